"""Positions of a model: how many it has."""

import sys

from transformers import PreTrainedConfig

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.pretrained import load_config

LONGER = "a copy of the model with other rope_parameters in its config.json may read more (docs/long-context.md)"


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence of a model, in tokens; a huge number if its configuration has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def check_length(name: str, max_length: int, flag: str = "max_length", multiple: int = 1) -> None:
    """Raise ConfigError if rows of `max_length` tokens are longer than the longest sequence of a pretrained model.

    `flag` is the argument that the message names; batches are padded to a `multiple`.
    """
    longest = max_positions(load_config(name)) // multiple * multiple
    if max_length > longest:
        raise ConfigError(
            f"--{flag} is {max_length}, but {name} is made for {longest} tokens; set it to {longest} or less; {LONGER}"
        )
