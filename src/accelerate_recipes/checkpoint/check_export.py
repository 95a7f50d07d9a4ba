"""Check of an export as whoever loads it sees it: by transformers alone, without the model's training."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from accelerate_recipes.args import ConfigError, error_list, first_line
from accelerate_recipes.data.rendering import (
    SETTINGS,
    Rendering,
    differences,
    parsed,
    prompt_alone,
    shown_ends,
    without_nulls,
)
from accelerate_recipes.disk import write_atomically

ROWS = "rows.json"  # in the output directory, beside export/


def as_exported(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer as whoever loads the export gets it: saved, and loaded by transformers alone."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


def compare_with_export(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict], trained: list[Rendering], settings: dict, folder: Path | None
) -> None:
    """Compare the first rows of training with what the exported tokenizer will render, and keep them in `folder`, if any.

    Raises:
        ConfigError: for each row that differs.
    """
    if found := differences(trained, rows, tokenizer, **settings):
        raise ConfigError(error_list("The export would not render what is trained", found))
    if folder:
        keep_rows(folder, rows, trained, settings)


def keep_rows(folder: Path, rows: list[dict], trained: list[Rendering], settings: dict) -> None:
    """Keep the first rows of a run, and how they were trained, for a comparison with its export."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ROWS, json.dumps({"settings": settings, "rows": rows, "trained": trained}) + "\n")


def compare_rows(export: Path) -> int:
    """Compare what an export's tokenizer makes of a run's first rows with what was trained; returns how many there are.

    Raises:
        ConfigError: for each row that differs.
    """
    file = export.resolve().parent / ROWS
    if not file.exists():
        return 0
    kept = json.loads(file.read_text())
    trained = [Rendering(*row) for row in kept["trained"]]
    tokenizer = AutoTokenizer.from_pretrained(export)
    if found := differences(trained, kept["rows"], tokenizer, **kept["settings"]):
        raise ConfigError(error_list(f"{export} does not render what was trained", found))
    return len(trained)


def check_export(export: Path, prompt: str | None, max_new_tokens: int) -> str:
    """Load an export, compare and generate; returns what was seen, in lines.

    `prompt` is a user's message where the tokenizer has a chat template; default: the beginning of the first row of
    training.

    Raises:
        ConfigError: for a folder that holds no model, and if the export does not render what was trained.
    """
    if not (export / "config.json").is_file() and not (export / "adapter_config.json").is_file():
        raise ConfigError(f"{export} holds no config.json or adapter_config.json: it is no export")
    if (export / "preprocessor_config.json").is_file():
        raise ConfigError(
            f"{export} holds a model of images, which answers no prompt; see docs/vision.md for how it is loaded"
        )
    number = compare_rows(export)
    try:
        tokenizer = AutoTokenizer.from_pretrained(export)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{export} holds no tokenizer that can be loaded: {first_line(error)}") from error
    model: Any = load_export(export).eval()
    if not model.can_generate():
        raise ConfigError(f"{export} holds a {type(model).__name__}, which writes no texts: there is nothing to ask it")
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    dtype = str(model.dtype).removeprefix("torch.")
    stops = shown_ends(tokenizer, (end for end in ends if end is not None))
    lines = [
        f"{export}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}",
        f"Vocabulary: {len(tokenizer):,} tokens, {model.get_input_embeddings().weight.shape[0]:,} rows of the embedding",
        f"Chat template: {'yes' if tokenizer.chat_template else 'none'}; generation stops at {stops}",
        f"Rows of training: {number} compared, all are rendered as they were trained"
        if number
        else f"Rows of training: not compared, there is no {ROWS} beside the export",
    ]
    ids = prompt_ids(export, tokenizer, prompt)
    inputs = torch.tensor([ids])
    with torch.no_grad():
        written = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )[0].tolist()
    written = written if model.config.is_encoder_decoder else written[len(ids) :]
    how = "an end token" if written and written[-1] in ends else f"--max_new_tokens {max_new_tokens}"
    lines.append(f"Prompt: {tokenizer.decode(ids)!r}")
    lines.append(f"Answer: {tokenizer.decode(written)!r}, {len(written)} tokens, ended by {how}")
    return "\n".join(lines)


def load_export(export: Path) -> transformers.PreTrainedModel:
    """Load a model of any kind; adapters beside their model, which is read from where they name it."""
    if not (export / "config.json").is_file():
        from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM

        task = json.loads((export / "adapter_config.json").read_text()).get("task_type")
        adapted = AutoPeftModelForSeq2SeqLM if task == "SEQ_2_SEQ_LM" else AutoPeftModelForCausalLM
        return adapted.from_pretrained(export)  # pyright: ignore[reportReturnType]
    names = json.loads((export / "config.json").read_text()).get("architectures") or []
    if len(names) != 1 or not hasattr(transformers, names[0]):
        raise ConfigError(f"{export}/config.json names the architectures {names}, not one that transformers has")
    return getattr(transformers, names[0]).from_pretrained(export)


def prompt_ids(export: Path, tokenizer: PreTrainedTokenizerBase, prompt: str | None) -> list[int]:
    """Tokenise what the model shall answer to."""
    if prompt is not None:
        asked = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
        return prompt_alone(tokenizer, asked, {})
    file = export.resolve().parent / ROWS
    if file.exists():
        kept = json.loads(file.read_text())
        row = without_nulls(kept["rows"][0])
        asked = row.get("prompt")
        if "messages" in row:
            asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", row["messages"]))
        tools, more = (without_nulls(parsed(row.get(name), name, 0, "")) for name in SETTINGS)
        settings = {"tools": tools or None} | (more or {})
        return prompt_alone(tokenizer, asked, settings) if asked else kept["trained"][0][0][:8]
    begin: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [begin]
