"""Positions of a pretrained model: how many it has, and how they are stretched."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig

from accelerate_recipes.args import arg
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.pretrained import load_config


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
            f"--{flag} is {max_length}, but {name} is made for {longest} tokens; set it to {longest} or less"
        )


@dataclass
class Stretch:
    """Arguments of a recipe that stretches the positions of a pretrained model."""

    group = "rare"
    max_position_embeddings: int = arg(
        0, "Longest sequence of a pretrained model after its positions are stretched, in tokens.", min=0, group="model"
    )
    rope_theta: float = arg(0.0, "Base of a pretrained model's rotary embedding; 0: its own.", min=0)
    rope_scaling_factor: float = arg(
        1.0,
        "Factor by which a pretrained model's positions are stretched, as in Llama 3 (rope_type llama3); 1: its own.",
        min=1,
    )
    rope_low_freq_factor: float = arg(
        1.0,
        "With --rope_scaling_factor: waves longer than (original context / this value) are stretched fully.",
        above=0,
    )
    rope_high_freq_factor: float = arg(
        4.0,
        "With --rope_scaling_factor: waves shorter than (original context / this value) are not stretched.",
        above=0,
    )
    rope_original_max_position_embeddings: int = arg(
        8192, "With --rope_scaling_factor: the original context, in tokens.", min=1
    )

    @property
    def stretches(self) -> bool:
        """True if the arguments say how a pretrained model's positions are stretched."""
        return bool(self.rope_theta) or self.rope_scaling_factor != 1

    def stretch_problems(self, base_model: str, max_length: int, exports_adapter_alone: bool) -> Iterator[str]:
        """List why these arguments cannot stretch a pretrained model's positions, one sentence each."""
        if not base_model:
            as_new = (
                "is for a pretrained model; a new one takes it in --config_overrides (rope_parameters.rope_theta=5e5)"
            )
            yield from (f"--{f.name} {as_new}" for f in fields(Stretch) if getattr(self, f.name) != f.default)
        elif self.stretches:
            low, high, longest = self.rope_low_freq_factor, self.rope_high_freq_factor, self.max_position_embeddings
            if self.rope_scaling_factor != 1 and low >= high:
                yield f"--rope_high_freq_factor {high} must be above --rope_low_freq_factor {low}"
            if exports_adapter_alone:
                yield (
                    "--rope_scaling_factor and --rope_theta with --use_peft: the files of an adapter do not say how "
                    "positions are stretched; add --merge_adapter, or change the config.json of a copy of the model"
                )
            if max_length > longest:
                yield f"--max_length is {max_length}, but the model is made for --max_position_embeddings {longest}"


def stretched_positions(config: PreTrainedConfig, name: str, args: Stretch) -> dict[str, Any]:
    """Return the fields of a pretrained model's config.json that the arguments change by stretching its positions, if any.

    Raises:
        ConfigError: for a model whose positions cannot be stretched this way, and for another original context than its own.
    """
    if not args.stretches:
        return {}
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "none, or several")
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"--rope_scaling_factor and --rope_theta stretch one rotary embedding of the type default or llama3, {name} has "
            f"{kind}; leave them out, and change the config.json of a copy of it"
        )
    longest = max_positions(config)
    original = rope.get("original_max_position_embeddings") or longest
    given = args.rope_original_max_position_embeddings
    if args.rope_scaling_factor != 1 and given != original:
        raise ConfigError(
            f"--rope_original_max_position_embeddings is {given}, but {name} was first trained for {original} tokens; set "
            f"it to {original}"
        )
    if args.max_position_embeddings < longest:
        raise ConfigError(
            f"--max_position_embeddings is {args.max_position_embeddings}, {name} has {longest} already; set it to that or "
            "more"
        )
    if args.rope_scaling_factor != 1:
        factors = {name: getattr(args, f"rope_{name}") for name in ("low_freq_factor", "high_freq_factor")}
        rope |= factors | {"rope_type": "llama3", "factor": args.rope_scaling_factor}
        rope["original_max_position_embeddings"] = given
    if args.rope_theta:
        rope["rope_theta"] = args.rope_theta
    return {"rope_parameters": rope, "max_position_embeddings": args.max_position_embeddings}
