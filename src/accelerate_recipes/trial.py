"""Trial of a recipe: one optimizer step without data and weights, which `plan` simulates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.errors import ConfigError, that_apply
from accelerate_recipes.hub import cache
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models import IGNORE_INDEX, adapters, documents, loading, pretrained


class NotSimulatedError(Exception):
    """Error for a run that cannot be simulated; the text names the part."""


def refuse(what: str, settings: dict[str, Any]) -> None:
    """Refuse to simulate a run if any of these settings is on. The message names those that are.

    Raises:
        NotSimulatedError: naming them.
    """
    if enabled := that_apply(settings):
        raise NotSimulatedError(f"{what} with {', '.join(enabled)}")


@dataclass
class Trial:
    """Model, loss and one micro-batch of a recipe with its arguments.

    `make_model` makes the model on the meta device, from `config` or from a copy with fewer layers. The values in
    `batch`, which lies on the CPU, do not matter; its sizes are the largest that the run will have. `tokens` is the
    largest number of targets in it, and `unit` names them.

    A step may begin with passes without gradients, such as those that draw answers. `before_fn(model, batch, begin)`
    runs them. Before each pass, it calls `begin(name, times)`, where `times` is the number of such passes in a step.

    A loss may compare the model with its base. Then `keep_reference(base)` gets the base: the model without its
    adapters, or a second model, sharded like it. Or it compares it with the model that `make_reference` makes.
    """

    config: PreTrainedConfig
    make_model: Callable[[PreTrainedConfig], transformers.PreTrainedModel]
    loss_fn: Callable[[Any, dict[str, Any]], torch.Tensor]
    count_fn: Callable[[dict[str, Any]], torch.Tensor]
    batch: dict[str, Any]
    tokens: int
    unit: str = "tokens"
    before_fn: Callable[[Any, dict[str, Any], Callable[[str, int], None]], None] | None = None
    keep_reference: Callable[[Any], None] | None = None
    make_reference: Callable[[], transformers.PreTrainedModel] | None = None

    @property
    def is_packed(self) -> bool:
        """Tell whether a row holds several documents, between which attention must not pass."""
        positions = self.batch.get("position_ids")
        return positions is not None and bool((positions[:, 1:] == 0).any())


def is_staged(config: PreTrainedConfig) -> bool:
    """Tell whether layers lie in stages of different widths, as in a Swin. Then a few layers do not represent all."""
    return bool(getattr(config, "depths", None))


def config_of(args: TrainArgs) -> PreTrainedConfig:
    """Read the configuration of the pretrained model at which a run begins. No other file of the model is needed.

    Raises:
        NotSimulatedError: if it is not here, and cannot be downloaded.
    """
    try:
        return pretrained.load_text_config(args.base_model)
    except ConfigError as error:
        folder = cache.folder("model", args.base_model)
        is_here = folder and (folder / "config.json").is_file()
        hint = "" if is_here else "; a folder with the model's config.json alone is enough here"
        raise NotSimulatedError(f"this run: {error}{hint}") from error


def packed_trial(args: Any, config: PreTrainedConfig | None, loss_fn: Callable) -> Trial:
    """Make the trial of a causal language model on the longest packed rows of a run: one long document, and a short one.

    `config` is the configuration of a new model; None for the pretrained model of the arguments.
    """
    length, rows = args.longest_row, args.per_device_train_batch_size
    positions = torch.arange(length).repeat(rows, 1)
    if args.document_mask:
        positions[:, -1] = 0
    labels = torch.zeros_like(positions)
    labels[:, [0, -1]] = IGNORE_INDEX
    batch = {"input_ids": torch.zeros_like(positions), "position_ids": positions, "labels": labels}
    settings = {"attn_implementation": args.attn_implementation, "dtype": adapters.load_settings(args)["dtype"]}
    return Trial(
        config or config_of(args),
        partial(loading.new_model, **settings),
        loss_fn,
        count_next_tokens,
        batch | {"row": torch.zeros(rows, dtype=torch.int64)} | documents.boundaries(positions),
        rows * (length - 2),
    )
