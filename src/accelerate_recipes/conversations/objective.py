"""Losses of trl's trainers of DPO and GRPO for `engine.train`: sums and counts of their parts, and the values they log."""

import copy
import fnmatch
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes, reduce
from torch import nn
from transformers import PreTrainedConfig, TrainerState

from accelerate_recipes.conversations.heads import add_head, weight_of_balance
from accelerate_recipes.conversations.settings import make_model
from accelerate_recipes.models.adapters import WithoutAdapters
from accelerate_recipes.ranks import data_world_size, sum_over_ranks
from accelerate_recipes.run import Run

# Fields of trl's configs by which a reference would follow the model.
SYNC_REFERENCE = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")


class Collectives:
    """Stand-in for an Accelerator, with the attributes that trl's losses use."""

    is_main_process = False
    autocast = nullcontext  # the model's forward pass has autocast itself
    gather = gather_for_metrics = staticmethod(gather)
    pad_across_processes, reduce = staticmethod(pad_across_processes), staticmethod(reduce)
    device = property(lambda _: PartialState().device)
    num_processes = property(lambda _: data_world_size())


class Outputs:
    """Model that keeps its last outputs, for the parts of a loss that trl does not return separately."""

    last: Any

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        self.last = self.model(**inputs)
        return self.last


def reference_of(run: Run[Any], temperature: float = 1.0) -> Any:
    """Return a model that computes as the run's base: the run's own without its adapters, or a second, sharded model."""
    if run.adapter:
        return WithoutAdapters(run.model)
    reference = make_model(run.args)
    add_head(reference, ("log_probs",), temperature)
    return run.shard_reference(reference)


class Objective:
    """Mixin that makes the loss of one of trl's trainers one for the engine. Put it before the trainer in a class's bases.

    Subclasses define `sum_parts` and `count_parts`. `train()` of the trainer is never called.
    """

    counted: list[torch.Tensor]  # of the micro-batches since the last log line
    left_out: ClassVar[set[str]] = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"}

    def __init__(self, args: Any, config: PreTrainedConfig, accelerator: Any):
        """Set what trl's losses read, in place of trl's constructor, which takes a model, prepares rows, and writes.

        `args` are those of the recipe, `config` is that of the model. If a loss reads another attribute, it fails.
        """
        self.args, self.accelerator = copy.copy(args), accelerator
        model: Any = nn.Module()  # in training
        model.is_gradient_checkpointing = False
        self.model = model
        self.state = TrainerState()
        self.counted = []
        self._metrics, self._total_train_tokens, self._tp_size = {"train": defaultdict(list)}, 0, 1
        self.keep_balance_apart(args, config)

    def keep_balance_apart(self, args: Any, config: PreTrainedConfig) -> None:
        """Let `sum_parts` return the loss that balances experts as a part: its mean is over micro-batches, not targets."""
        self.balance = weight_of_balance(config, args.router_aux_loss_coef)
        self.router_aux_loss_coef, self.aux_loss_enabled = 0.0, self.balance > 0

    def balances(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return the weighted loss that balances experts in a micro-batch, as a list; the list is empty without experts."""
        return [self.balance * outputs.last.aux_loss] if self.aux_loss_enabled else []

    def sum_and_count(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of the loss, and keep the counts of the micro-batch, by which its values are weighed."""
        sums = self.sum_parts(model, batch)
        self.counted.append(self.count_parts(batch))
        return sums

    def weights(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return for each value that is a mean of a micro-batch of how many it is.

        `counts` are those of `count_parts` of all ranks, (parts, micro-batches). A name may stand for several, as in
        `clip_ratio/*`. Other values have the same weight in each micro-batch.
        """
        return {}

    def weigh(self) -> None:
        """Take means over all micro-batches of what trl has gathered of each; trl takes means of the means."""
        gathered = self._metrics["train"]
        counts, self.counted = sum_over_ranks(torch.stack(self.counted)).T.double().cpu(), []
        for pattern, numbers in self.weights(counts).items():
            for name in fnmatch.filter(gathered, pattern):
                values = torch.tensor(gathered[name], dtype=torch.float64)
                gathered[name] = [((values * numbers).sum() / numbers.sum().clamp(min=1)).item()]

    def mark(self) -> Callable[[], None]:
        """Return a function that forgets the micro-batches from here on, and what trl has gathered of them."""
        counted, gathered = [*self.counted], copy.deepcopy(self._metrics["train"])

        def forget() -> None:
            self.counted[:], self._metrics["train"] = counted, copy.deepcopy(gathered)

        return forget

    def values(self, step: int) -> dict[str, float]:
        """Return the means of the values that trl has gathered since the last log line, for the line after `step`."""
        if not self.counted:  # all steps were left out
            return {}
        self.weigh()
        self.state.global_step = step
        values: dict[str, Any] = {}
        self.log(values)  # trl adds its values to the dict
        return {k: v for k, v in values.items() if isinstance(v, int | float) and k not in self.left_out}
