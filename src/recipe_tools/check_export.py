"""Check of an export as its users see it: it is loaded by transformers alone, and asked."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.decision.configuration_utils import DECISION_CONFIG_NAME

from accelerate_recipes.checkpoint.files import other_kind
from accelerate_recipes.conversations.exported import (
    ROWS,
    TrainedRows,
    compare_rows,
    ends_of_adapters,
    kept_rows,
    render,
    shown_ends,
    stops_of,
)
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.decisions.served import compare_decisions
from accelerate_recipes.disk import read_json
from accelerate_recipes.errors import ConfigError, first_line
from accelerate_recipes.models.pretrained import max_positions


def check_export(export: Path, prompts: Sequence[str] | None, max_new_tokens: int, images: Sequence[Path] = ()) -> str:
    """Load an export, compare its rows and generate. Returns the results in lines.

    Each prompt is a user's message if the tokenizer has a chat template, with all the images before its text; default: the
    beginning of the first row of training, with its own images.

    Raises:
        ConfigError: for a folder without a model, or with one that cannot be loaded; for a prompt, images or a number of
            tokens that the model does not take; and if the export does not render what was trained.
        DataError: for an image that cannot be read.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens is {max_new_tokens}; it must be at least 1")
    if reason := other_kind(export, "export"):
        raise ConfigError(f"{export} is no export: {reason}")
    # What transformers, tokenizers, safetensors and PEFT raise for a damaged file has no common class.
    try:
        model: Any = load_export(export).eval()
        tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{export} cannot be loaded: {first_line(error)}; export the checkpoint again") from error
    from accelerate_recipes.images.pictures import renderer_of

    folder = export.resolve().parent
    try:
        compared, first = compare_rows(export, folder, renderer_of), kept_rows(export, folder)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{folder / ROWS} cannot be read: {type(error).__name__}: {first_line(error)}") from error
    if not model.can_generate():
        raise ConfigError(f"{export} holds a {type(model).__name__}, which writes no texts: there is nothing to ask it")
    ends = stops_of(model.generation_config)
    dtype = str(model.dtype).removeprefix("torch.")
    stops = shown_ends(tokenizer, sorted(ends))
    if is_decider := (export / DECISION_CONFIG_NAME).is_file():
        compared = compare_decisions(export, model)
    lines = [
        f"{export}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}",
        f"Vocabulary: {len(tokenizer):,} tokens, {model.get_input_embeddings().weight.shape[0]:,} rows of the embedding",
        f"Chat template: {'yes' if tokenizer.chat_template else 'none'}; generation stops at {stops}",
        compared,
    ]
    if is_decider and not (prompts or images):
        return "\n".join(lines)
    if isinstance(first, TrainedRows) and {*first.ends} - ends:
        lines.append(ends_of_adapters(tokenizer, first.ends, ends))
    known = first if isinstance(first, TrainedRows) else None
    is_chat = known and ("messages" in known.rows[0] or isinstance(known.rows[0].get("prompt"), list))
    if prompts and tokenizer.chat_template and known and not is_chat:
        lines.append(
            "The rows were trained as texts, without the chat template with which --prompt asks: the model has not learned "
            "to answer it so (docs/rows.md)"
        )
    if images and not hasattr(model.config, "vision_config"):
        raise ConfigError(f"--image: {export} holds a {type(model).__name__}, which sees no images; remove it")
    if images or (known and "images" in known.rows[0]):
        asked = inputs_with_images(export, tokenizer, prompts, images, known)
    else:
        rows = [torch.tensor([prompt_ids(tokenizer, prompt, known)]) for prompt in prompts or [None]]
        asked = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    most = max(inputs["input_ids"].shape[1] for inputs in asked)
    if not all(inputs["input_ids"].numel() for inputs in asked):
        raise ConfigError("--prompt has no tokens; give a text")
    longest = max_positions(model.config) - (0 if model.config.is_encoder_decoder else most)
    if max_new_tokens > longest:
        said = f"--max_new_tokens {max_new_tokens} behind a prompt of {most} tokens"
        raise ConfigError(f"{said} is more than the model is made for; give at most {longest}")
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for inputs in asked:
        ids = inputs["input_ids"][0].tolist()
        written = model.generate(**inputs, **settings)[0].tolist()
        written = written if model.config.is_encoder_decoder else written[len(ids) :]
        how = "an end token" if written and written[-1] in ends else f"--max_new_tokens {max_new_tokens}"
        lines.append(f"Prompt: {shortened(tokenizer.decode(ids))!r}")
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
    if any(name.endswith("ForImageClassification") for name in names):
        raise ConfigError(f"{export} holds a model of images, which answers no prompt; see docs/vision.md")
    if len(names) != 1 or not hasattr(transformers, names[0]):
        raise ConfigError(f"{export}/config.json names the architectures {names}, not one that transformers has")
    model, info = getattr(transformers, names[0]).from_pretrained(export, output_loading_info=True)
    if missing := ", ".join(sorted(info["missing_keys"])):  # transformers would draw random weights
        raise ConfigError(f"{export} lacks the weights {missing}; export the checkpoint again")
    return model


def inputs_with_images(
    export: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] | None,
    images: Sequence[Path],
    first: TrainedRows | None,
) -> list[dict[str, torch.Tensor]]:
    """Make what a model that sees images reads of prompts, by its own processor; see `check_export`."""
    from accelerate_recipes.images.image_texts import parts_in
    from accelerate_recipes.images.pictures import decoded, image_bytes, processor_of, with_images

    processor = processor_of(export, tokenizer)
    seen = [{"path": str(image), "bytes": None} for image in images]
    if prompts is None:
        if first is None:
            raise ConfigError(f"{export} lies beside no rows of its training; give --prompt, and --image")
        row = first.rows[0]
        messages = [*itertools.takewhile(lambda message: message.get("role") != "assistant", row["messages"])]
        asked, seen = [messages], seen or row["images"]
    else:
        parts = [{"type": "image"}] * len(images)
        asked = [[{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}] for prompt in prompts]
    found = []
    how: Any = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for messages in asked:
        number = sum(part["type"] == "image" for message in messages for part in parts_in(message))
        if number > len(seen):
            raise ConfigError(f"the question of the first row has {number} images, and --image names {len(seen)}")
        pictures = [decoded(image_bytes(image, "--image"), f"--image {image['path']}") for image in seen[:number]]
        read: Any = processor.apply_chat_template([with_images(messages, pictures)], **how)
        found.append(dict(read))
    return found


def shortened(text: str) -> str:
    """Return a text in which a token that is repeated for each part of an image stands once."""
    return re.sub(r"(<[^<>]+>|\[[^\[\]]+\])\1{3,}", r"\1...", text)


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
