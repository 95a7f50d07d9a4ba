"""Positions of a model: how many it has."""

import sys

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.pretrained import load_config

LONGER = "a copy of the model with other rope_parameters in its config.json may read more (docs/long-context.md)"


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence of a model, in tokens; a huge number if its configuration has no limit."""
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None) or 0
    if found <= 0:  # XLNet has -1
        return sys.maxsize
    model_class = transformers.MODEL_MAPPING.get(type(text), None)
    if hasattr(text, "rope_parameters") or not isinstance(model_class, type):
        ropes = text.rope_parameters or {}  # or one for each kind of layer
        each = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
        stretched = [(rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1) for rope in each]
        return max(found, *map(int, stretched))
    try:
        with torch.device("meta"):
            model = model_class(text)
    except Exception:  # of such a configuration no model can be made, which is told where one is
        return found
    # RoBERTa and its family count positions from the row behind the one of padding.
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
    return found - next((row + 1 for row in padding if row is not None), 0)


def check_length(
    name: str, length: int, flag: str = "max_length", multiple: int = 1, config: PreTrainedConfig | None = None
) -> None:
    """Raise ConfigError if rows of `length` tokens, the value of `flag`, are longer than the longest sequence of a model.

    Batches are padded to a `multiple`. With a `config`, that of the model, `length` is that of the longest prepared
    document, which `flag` may cut.
    """
    found = config or load_config(name)
    longest = max_positions(found) // multiple * multiple
    if length > longest:
        said, meant, cut = f"--{flag} is {length}", "it", ""
        if config:
            said, meant, cut = f"the longest document has {length} tokens", f"--{flag}", ", which cuts longer ones"
        padded = f" (batches are padded to a multiple of {multiple})" if multiple > 1 else ""
        raise ConfigError(
            f"{said}, but {name} is made for {longest} tokens{padded}; set {meant} to {longest} or less{cut}"
            + (f"; {LONGER}" if hasattr(found.get_text_config(), "rope_parameters") else "")
        )
