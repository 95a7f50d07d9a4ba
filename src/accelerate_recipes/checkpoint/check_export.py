"""Check of an export as its users see it: it is loaded by transformers alone, and asked."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.exported import (
    ROWS,
    TrainedRows,
    compare_rows,
    ends_of_adapters,
    kept_rows,
    render,
    shown_ends,
    stops_of,
)
from accelerate_recipes.checkpoint.files import other_kind
from accelerate_recipes.data.rendering import SETTINGS
from accelerate_recipes.disk import read_json
from accelerate_recipes.errors import ConfigError, first_line
from accelerate_recipes.models.positions import max_positions


def check_export(export: Path, prompts: Sequence[str] | None, max_new_tokens: int) -> str:
    """Load an export, compare its rows and generate. Returns the results in lines.

    Each prompt is a user's message if the tokenizer has a chat template; default: the beginning of the first row of
    training.

    Raises:
        ConfigError: for a folder without a model, or with one that cannot be loaded; for a prompt or a number of tokens that
            the model does not take; and if the export does not render what was trained.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens is {max_new_tokens}; it must be at least 1")
    if reason := other_kind(export, "export"):
        raise ConfigError(f"{export} is no export: {reason}")
    # What transformers, tokenizers, safetensors and PEFT raise for a damaged file has no common class.
    try:
        names = read_json(export / "config.json").get("architectures") if (export / "config.json").is_file() else None
        if any(name.endswith("ForImageClassification") for name in names or ()):
            raise ConfigError(f"{export} holds a model of images, which answers no prompt; see docs/vision.md")
        tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
        model: Any = load_export(export).eval()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{export} cannot be loaded: {first_line(error)}; export the checkpoint again") from error
    folder = export.resolve().parent
    try:
        compared, first = compare_rows(export, folder), kept_rows(export, folder)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{folder / ROWS} cannot be read: {type(error).__name__}: {first_line(error)}") from error
    if not model.can_generate():
        raise ConfigError(f"{export} holds a {type(model).__name__}, which writes no texts: there is nothing to ask it")
    ends = stops_of(model.generation_config)
    dtype = str(model.dtype).removeprefix("torch.")
    stops = shown_ends(tokenizer, sorted(ends))
    lines = [
        f"{export}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}",
        f"Vocabulary: {len(tokenizer):,} tokens, {model.get_input_embeddings().weight.shape[0]:,} rows of the embedding",
        f"Chat template: {'yes' if tokenizer.chat_template else 'none'}; generation stops at {stops}",
        compared,
    ]
    if isinstance(first, TrainedRows) and {*first.ends} - ends:
        lines.append(ends_of_adapters(tokenizer, first.ends, ends))
    known = first if isinstance(first, TrainedRows) else None
    asked = [prompt_ids(tokenizer, prompt, known) for prompt in prompts or [None]]
    if not all(asked):
        raise ConfigError("--prompt has no tokens; give a text")
    most = max(map(len, asked))
    longest = max_positions(model.config) - (0 if model.config.is_encoder_decoder else most)
    if max_new_tokens > longest:
        said = f"--max_new_tokens {max_new_tokens} behind a prompt of {most} tokens"
        raise ConfigError(f"{said} is more than the model is made for; give at most {longest}")
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for ids in asked:
        inputs = torch.tensor([ids])
        written = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **settings)[0].tolist()
        written = written if model.config.is_encoder_decoder else written[len(ids) :]
        how = "an end token" if written and written[-1] in ends else f"--max_new_tokens {max_new_tokens}"
        lines.append(f"Prompt: {tokenizer.decode(ids)!r}")
        lines.append(f"Answer: {tokenizer.decode(written)!r}, {len(written)} tokens, ended by {how}")
    return "\n".join(lines)


def load_export(export: Path) -> transformers.PreTrainedModel:
    """Load a model of any kind. Adapters are loaded with their model, from the place that they name."""
    if not (export / "config.json").is_file():
        from peft import AutoPeftModel, AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM

        task = read_json(export / "adapter_config.json").get("task_type")
        kinds = {None: AutoPeftModel, "SEQ_2_SEQ_LM": AutoPeftModelForSeq2SeqLM}
        adapted = kinds.get(task, AutoPeftModelForCausalLM)
        return adapted.from_pretrained(export)  # pyright: ignore[reportReturnType]
    names = read_json(export / "config.json").get("architectures") or []
    if len(names) != 1 or not hasattr(transformers, names[0]):
        raise ConfigError(f"{export}/config.json names the architectures {names}, not one that transformers has")
    model, info = getattr(transformers, names[0]).from_pretrained(export, output_loading_info=True)
    if missing := ", ".join(sorted(info["missing_keys"])):  # transformers would draw random weights
        raise ConfigError(f"{export} lacks the weights {missing}; export the checkpoint again")
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | None, first: TrainedRows | None) -> list[int]:
    """Tokenise the text to answer: the prompt, or by default the beginning of the first row of training."""
    if prompt is not None:
        asked = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
        return render({"prompt": asked}, tokenizer)[0].ids
    if first:
        row = first.rows[0]
        asked = row.get("prompt")
        if "messages" in row:
            asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", row["messages"]))
        own = {name: row.get(name) for name in SETTINGS}
        return render(own | {"prompt": asked}, tokenizer)[0].ids if asked else first.trained[0].ids[:8]
    begin: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [begin]
