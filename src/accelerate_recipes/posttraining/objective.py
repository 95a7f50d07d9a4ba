"""trl's trainers of DPO and GRPO as libraries: they draw answers and compute losses, and `engine.train` trains with them.

A recipe declares

    @dataclass
    class Args(TrainerArgs, DPOConfig): ...

and gives its model to a trainer:

    trainer = give_model_to_trl(PairTrainer, run, config, model, tokenizer, train_dataset=rows)

`Args` has our arguments, which take precedence, and those that trl's config class adds, but none that this class
inherits from transformers. `train()` of an `Objective` is never called. The recipe gives the engine its `sum_and_count`,
`count_parts` and `values`: sums and counts of each part of trl's loss, and what trl logs.
"""

import copy
import fnmatch
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, gather, pad_across_processes, reduce
from huggingface_hub import constants
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import align_special_tokens
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes.models.adapters import WithoutAdapters
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.posttraining.settings import make_model, refused_by_trl, switch_off_dropout, weight_of_balance
from accelerate_recipes.ranks import data_world_size, sum_over_ranks
from accelerate_recipes.run import Run

constants.HF_HUB_DISABLE_TELEMETRY = True  # a run tells nobody of itself
# trl 1.16 uses an old name of transformers 5.23 in every step that generates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

ROUTING = ("output_router_logits", "router_aux_loss_coef")  # fields of a configuration that trl sets


class Collectives:
    """Stand-in for an Accelerator, with the attributes that trl's losses use."""

    is_main_process = False
    autocast = nullcontext  # the model's forward pass has autocast itself
    gather = gather_for_metrics = staticmethod(gather)
    pad_across_processes, reduce = staticmethod(pad_across_processes), staticmethod(reduce)
    device = property(lambda _: PartialState().device)
    num_processes = property(lambda _: data_world_size())


def bare(trainer_class: type["Objective"], args: Any, config: PreTrainedConfig, **attributes: Any) -> Any:
    """Make a trainer for a trial: it can only compute its loss. If the loss reads an attribute that is missing, it fails."""
    trainer: Any = trainer_class.__new__(trainer_class)
    model: Any = nn.Module()  # in training
    model.is_gradient_checkpointing = False
    weight = weight_of_balance(config, args.router_aux_loss_coef)
    vars(trainer).update(
        args=copy.copy(args),
        model=model,
        accelerator=Collectives(),
        balance=weight,
        router_aux_loss_coef=0.0,
        aux_loss_enabled=weight > 0,
        state=TrainerState(),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )
    if args.disable_dropout:
        args.lora_dropout = 0.0  # the trial's model gets its adapters later, by these `args`
    return trainer


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
    add_fused_lm_head(reference, temperature=temperature)
    return run.shard_reference(reference)


class Objective:
    """Mixin that makes one of trl's trainers a library for the engine. Put it before the trainer in a class's bases.

    Subclasses define `sum_parts` and `count_parts`. Make one by `give_model_to_trl`.
    """

    left_out: ClassVar[set[str]] = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"}
    # The engine divides the loss, so trl must not divide it too; transformers' loop, which sets this, does not run.
    current_gradient_accumulation_steps = 1
    base_stops: set[int]  # tokens at which the base stops, as it is published

    def __init__(self, run: Run[Any], config: TrainingArguments, **settings: Any):
        self.run = run
        self.accelerator = run.accelerator
        self.counted: list[torch.Tensor] = []  # of the micro-batches since the last log line
        super().__init__(args=config, **settings)  # pyright: ignore[reportCallIssue]
        self.remove_callback(PrinterCallback)
        # `sum_parts` returns the loss that balances experts as a separate part: its mean is over micro-batches, not targets.
        self.balance = weight_of_balance(self.model.config, run.args.router_aux_loss_coef)
        self.router_aux_loss_coef, self.aux_loss_enabled = 0.0, self.balance > 0

    def create_accelerator_and_postprocess(self) -> None:
        """Do nothing: the run has its Accelerator. If trl saw FSDP, it would load a second model, whole on each rank."""
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def use_sharded_model(self) -> None:
        """Compute with the run's model from here on, which is prepared."""
        self.model.config.use_cache = False  # which trl's GRPO reads, and the export's copy does not have
        self.model_wrapped = self.run.model
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self.model = self.run.model

    def balances(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return the weighted loss that balances experts in a micro-batch, as a list; the list is empty without experts."""
        return [self.balance * outputs.last.aux_loss] if self.aux_loss_enabled else []

    def sum_and_count(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of the loss, and keep the counts of the micro-batch, by which its values are weighed."""
        sums = self.sum_parts(model, batch)
        self.counted.append(self.count_parts(batch))
        return sums

    def weights(self, counts: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return for each value that is a mean of a micro-batch of how many it is, and how many of these count.

        `counts` are those of `count_parts` of all ranks, (parts, micro-batches). What does not count must be 0. A name may
        stand for several, as in `clip_ratio/*`. Other values have the same weight in each micro-batch.
        """
        return {}

    def weigh(self) -> None:
        """Take means over all micro-batches of what trl has gathered of each; trl takes means of the means."""
        gathered = self._metrics["train"]
        counts, self.counted = sum_over_ranks(torch.stack(self.counted)).T.double().cpu(), []
        for pattern, (numbers, real) in self.weights(counts).items():
            for name in fnmatch.filter(gathered, pattern):
                values = torch.tensor(gathered[name], dtype=torch.float64)
                gathered[name] = [((values * numbers).sum() / real.sum().clamp(min=1)).item()]

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


Trainer = TypeVar("Trainer", bound=Objective)


def give_model_to_trl(
    trainer_class: type[Trainer],
    run: Run[Any],
    config: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **settings: Any,
) -> Trainer:
    """Make trl's trainer of a model with its adapters. It gives the model the forward pass that computes trl's loss.

    trl and transformers' Trainer also write the special tokens of the tokenizer into the configurations of the model. What
    else they change is changed back, so that it is not exported. `settings` are those of trl's trainer.

    Raises:
        ConfigError: if trl refuses the model, the rows or the settings.
    """
    base_stops, text = stops_of(model.generation_config), model.config.get_text_config()
    routing = {name: getattr(text, name) for name in ROUTING if hasattr(text, name)}
    adapter = [(p, p.data) for p in model.parameters() if p.requires_grad] if run.adapter else []
    use_cache = model.config.use_cache  # transformers' Trainer switches this off
    with refused_by_trl():
        trainer = trainer_class(run, config, model=model, processing_class=tokenizer, **settings)
    model.config.use_cache = use_cache
    for name, value in routing.items():  # trl would compute router logits in each forward pass, also of the export
        setattr(text, name, value)
    # transformers' Trainer does this when training begins, but the rows are compared with the export before that.
    align_special_tokens(model, tokenizer)
    for parameter, data in adapter:
        parameter.data = data  # trl 1.16 rounds it to bf16 for a model in 4 bits: small updates would be lost
    trainer.base_stops = base_stops
    if trainer.args.disable_dropout:
        switch_off_dropout(model)
    return trainer
