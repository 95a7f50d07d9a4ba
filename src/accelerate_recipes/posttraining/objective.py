"""trl as a library: its trainers prepare rows, draw answers and compute losses, and `engine.train` trains with them.

A recipe declares

    @dataclass
    class Args(TrainerArgs, SFTConfig): ...

    class Trainer(Objective, SFTTrainer): ...

`Args` has our arguments, which take precedence, and those that trl's config class adds, but none that this class
inherits from transformers. `train()` of an `Objective` is never called. It gives the engine rows in the order of the
steps, and the sums and counts of each part of trl's loss.
"""

import contextlib
import copy
import fnmatch
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, gather, pad_across_processes, reduce
from jinja2 import TemplateError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainingArguments
from transformers.trainer_utils import align_special_tokens
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes.agenda import EvaluateFn
from accelerate_recipes.checkpoint.check_export import (
    Exported,
    TrainedRows,
    compare_with_export,
    ends_of_adapters,
    stops_of,
)
from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.data import NUM_ROWS
from accelerate_recipes.data.conversations import TEXT, without_marks
from accelerate_recipes.data.prepared import check_content, content_of
from accelerate_recipes.data.rendering import Rendering, added_begin, first_refused
from accelerate_recipes.data.rows import Rows, StepLoader, StepOrder, make_train_loader
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.engine import DrawFn, train
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.metrics import Flops
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.adapters import WithoutAdapters, add_adapters
from accelerate_recipes.models.shared_rows import balance_weight
from accelerate_recipes.posttraining.settings import TrainerArgs, check_trl_packing, make_model
from accelerate_recipes.posttraining.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.ranks import data_world_size, on_first_of_machine_before_others, sum_over_ranks
from accelerate_recipes.run import Run

# trl 1.16 uses an old name of transformers 5.23 in every step that generates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

ROUTING = ("output_router_logits", "router_aux_loss_coef")  # fields of a configuration that trl sets


class Collectives:
    """Stand-in for an Accelerator, with the attributes that trl's losses use."""

    is_main_process, parallelism_config = False, None
    autocast = nullcontext  # the model's forward pass has autocast itself
    gather = gather_for_metrics = staticmethod(gather)
    pad_across_processes, reduce = staticmethod(pad_across_processes), staticmethod(reduce)

    @property
    def device(self) -> torch.device:
        return PartialState().device  # pyright: ignore[reportReturnType]

    @property
    def num_processes(self) -> int:
        return data_world_size()


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
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        compute_loss_func=None,
        label_smoother=None,
        **attributes,
    )
    trainer.args.average_tokens_across_devices = False
    if getattr(args, "disable_dropout", False):
        args.lora_dropout = 0.0  # the trial's model gets its adapters later, by these `args`
    return trainer


def weight_of_balance(config: PreTrainedConfig, given: float | None) -> float:
    """Return the weight of the loss that balances experts: the `given` one, or the model's; 0 without such a loss.

    trl 1.16 reads the number of experts as `num_experts`. The Granites and PhiMoE call it `num_local_experts`; this gives
    their class the other name too, as classes of transformers do.

    Raises:
        ConfigError: if a weight is given for a model that computes no such loss.
    """
    text, weight = config.get_text_config(), balance_weight(config, given)
    if given and not weight:
        raise ConfigError(
            f"--router_aux_loss_coef {given}: this {text.model_type} computes no loss that balances experts; remove it"
        )
    if weight and not hasattr(text, "num_experts"):
        type(text).attribute_map = type(text).attribute_map | {"num_experts": "num_local_experts"}
    return weight


class FirstRows(NamedTuple):
    """First rows of a trainer's dataset, as a batch."""

    trainer: "Objective"
    rows: datasets.Dataset

    def check(self, states: list[dict]) -> None:
        """Raise ConfigError if the states of a checkpoint belong to other rows."""
        run, remedy = self.trainer.run, ""
        date = getattr(run.args, "template_date", "")
        if date and run.resumed_from and "template_date" not in saved_arguments(run.resumed_from):
            remedy = f"give by --template_date, which is now {date}, the day on which the run began; "
        check_content(self.trainer.content, states, remedy)

    def first_batch(self) -> dict[str, torch.Tensor]:
        return self.trainer.batch_of([self.rows[i] for i in range(min(NUM_ROWS, len(self.rows)))])


class Numbered(NamedTuple):
    """Collator of numbered rows: returns what `collate` makes of the rows, and their numbers as `row`."""

    collate: Callable[[list[dict]], dict[str, Any]]

    def __call__(self, rows: list[tuple[int, dict]]) -> dict[str, Any]:
        return self.collate([row for _, row in rows]) | {"row": torch.tensor([number for number, _ in rows])}


def numbered_row(row: dict, number: int) -> tuple[int, dict]:
    return number, without_targets(row, number)


def without_targets(row: dict, number: int) -> dict:
    """Return a row as trl prepared it; the row of number -1 loses its targets."""
    return row if number >= 0 else row | {"labels": [IGNORE_INDEX] * len(row["input_ids"])}


@contextlib.contextmanager
def hidden_mesh(accelerator: Accelerator) -> Iterator[None]:
    """Hide from trl that ranks share rows. trl 1.16 refuses packed rows then, since Accelerate would mix their documents.

    `sequence`, which shares rows here, does not mix them. tests/test_upstream.py fails once trl no longer refuses them.
    """
    config, accelerator.state.parallelism_config = accelerator.state.parallelism_config, None
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config


class Outputs:
    """Model that keeps its last outputs, for the parts of a loss that trl does not return separately."""

    last: Any

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        self.last = self.model(**inputs)
        return self.last


class Objective:
    """Mixin that makes one of trl's trainers a library for the engine. Put it before the trainer in a class's bases.

    Subclasses define `sum_parts` and `count_parts`, which are the engine's `loss_fn` and `count_fn`.
    """

    left_out: ClassVar[set[str]] = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"}
    ended: ClassVar[tuple[str, ...]] = ()  # columns of answers, to which trl adds an end token if they are texts
    order_class: ClassVar[type[StepOrder]] = WholeSteps
    # The engine divides the loss, so trl must not divide it too; transformers' loop, which sets this, does not run.
    current_gradient_accumulation_steps = 1
    lengths: np.ndarray | None = None  # lengths of the rows, if micro-batches are padded
    flops_fn: Callable[[PreTrainedModel], Flops] | None = None
    draw: DrawFn | None = None

    def __init__(
        self,
        run: Run[TrainerArgs],
        config: TrainingArguments,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        new_tokens: Sequence[int] = (),
        heldout: HasRows | None = None,
        counts: dict[str, int] | None = None,
        **settings: Any,
    ):
        """Make trl's trainer with its other `settings`, and show the first rows.

        With adapters, the embedding rows of `new_tokens` are trained too. `heldout` shows rows of an evaluation other
        than that on trl's `eval_dataset`. `counts` are numbers of the recipe for the printed line.
        """
        self.counts = {"left out": 0} | (counts or {})
        self.counted: list[torch.Tensor] = []  # of the micro-batches since the last log line
        self.run = run
        self.accelerator = run.accelerator
        check_trl_packing(config, model)
        run.adapter = add_adapters(model, run.args, new_tokens)
        self.use_cache = model.config.use_cache  # transformers' Trainer switches this off in the model's config
        text = model.config.get_text_config()
        routing = {name: getattr(text, name) for name in ROUTING if hasattr(text, name)}
        if not sys.stderr.isatty():  # the log of a job gets plain lines
            os.environ["TQDM_DISABLE"] = "1"  # trl reads this
        self.base_stops = stops_of(model.generation_config)
        num_embeddings, num_tokens = model.get_input_embeddings().num_embeddings, len(tokenizer)
        adapter = [(p, p.data) for p in model.parameters() if p.requires_grad] if run.adapter else []
        begin, end = added_begin(tokenizer), getattr(config, "eos_token", None) or tokenizer.eos_token or ""
        text_field = getattr(config, "dataset_text_field", None)
        for name in ("train_dataset", "eval_dataset"):
            for column in ("prompt", text_field, *self.ended):
                if column in getattr(settings.get(name), "column_names", ()):
                    marks = "" if column in self.ended else begin, "" if column == "prompt" else end
                    once = partial(without_marks, settings[name], column, *marks)
                    settings[name] = on_first_of_machine_before_others(once)
        if settings["train_dataset"].features.get("prompt") == TEXT and tokenizer.chat_template:
            run.print(
                "The prompts are texts, which are read as they stand: the chat template of "
                f"{run.args.base_model or run.args.model_name_or_path} is not used. Give lists of messages to use it"
            )
        try:
            with hidden_mesh(run.accelerator):
                super().__init__(model=model, args=config, processing_class=tokenizer, **settings)  # pyright: ignore[reportCallIssue]
        except ConfigError:
            raise
        except (ValueError, TemplateError, TypeError) as error:
            # A TemplateError comes from a wrong chat template, or from wrong rows.
            # A TypeError about Undefined comes from a template that writes a value which a row lacks.
            if isinstance(error, TypeError) and "Undefined" not in str(error):
                raise
            raise ConfigError(f"trl's trainer refuses this run: {error}") from error
        for name, value in routing.items():  # trl would compute router logits in each forward pass, also of the export
            setattr(text, name, value)
        # transformers' Trainer does this when training begins, but the rows are compared with the export before that.
        align_special_tokens(self.model, tokenizer)
        for parameter, data in adapter:
            parameter.data = data  # trl 1.16 rounds it to bf16 for a model in 4 bits: small updates would be lost
        # Even if the embedding has spare rows for new tokens, these rows mean nothing while they are not trained.
        if adapter and (len(tokenizer) != num_tokens or model.get_input_embeddings().num_embeddings != num_embeddings):
            raise ConfigError(
                f"--chat_template_path {run.args.chat_template_path} is a model, whose tokens trl adds: the tokenizer had "
                f"{num_tokens:,}, and has {len(tokenizer):,}. --use_peft neither trains nor saves their rows of the "
                "embedding; give the template as a .jinja file"
            )
        self.remove_callback(PrinterCallback)
        # `sum_parts` returns the loss that balances experts as a separate part: its mean is over micro-batches, not targets.
        self.balance, self.router_aux_loss_coef = weight_of_balance(model.config, run.args.router_aux_loss_coef), 0.0
        self.aux_loss_enabled = self.balance > 0
        self.counts["left out"] += len(settings["train_dataset"]) - len(self.train_dataset)
        for name, use in (("train_dataset", "train"), ("eval_dataset", "evaluate")):
            if (rows := settings.get(name)) is not None and not len(getattr(self, name)):
                raise ConfigError(
                    f"none of {len(rows):,} rows is left to {use} on: trl leaves out rows that have no target "
                    f"within --max_length {getattr(config, 'max_length', None)}; raise it, or see the weights of the "
                    "messages"
                )
        if not run.args.data_only:  # now, before the model is sharded: machines may have other rows
            self.content = self.checksum()
        loaders = {"Training": FirstRows(self, self.train_dataset)}
        if self.eval_dataset is not None:
            heldout = FirstRows(self, self.eval_dataset)
        loaders |= {"Evaluation": heldout} if heldout else {}
        run.show_rows(tokenizer, loaders, *self.examine())

    @contextlib.contextmanager
    def naming_rows(self, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Iterator[None]:
        """If trl cannot prepare the rows because a conversation cannot be rendered, say in which row of which file it is.

        `settings` are those of `rendering.first_refused`.

        Raises:
            ConfigError: naming the row.
        """
        try:
            yield
        except Exception as error:
            args: Any = self.run.args
            for name, rows in args.read_rows_for(tokenizer).items():
                found = first_refused(rows, tokenizer, **settings)
                if found:
                    raise ConfigError(f"{args.sources[name]}, row {found[0]}, {found[1]}") from error
            raise

    def examine(self) -> tuple[np.ndarray | int, dict[str, int]]:
        """Check the prepared rows; return the counts of their targets, and other counts to print (see `shown.count_line`).

        Raises:
            ConfigError: if the rows would train something else than the export then renders.
        """
        return len(self.train_dataset), self.counts

    def first_rows(
        self, rows: list[dict], trained: list[Rendering], ends: Iterable[int], **settings: Any
    ) -> TrainedRows:
        """Make the rows to compare with the export: each as it was written, and as it is trained."""
        defaults = {"text_field": "", "completion_only": False, "assistant_only": False, "stops": []}
        names = self.run.args.fixed_on_resume()
        fixed = {name: value for name, value in self.run.args.values().items() if name in names}
        return TrainedRows(rows, trained, defaults | settings, sorted(ends), fixed)

    def compare_with_export(self, exported: Exported, first: TrainedRows) -> None:
        """Compare the first rows with how the export will render them, and keep them for a comparison with the real export.

        Raises:
            ConfigError: if they differ, and if a file of the user is in the way.
        """
        args = self.run.args
        compare_with_export(exported, first, None if args.data_only else self.run.output_dir)
        if self.run.adapter and not args.merge_adapter and {*first.ends} - self.base_stops:
            self.run.print(ends_of_adapters(exported.tokenizer, first.ends, self.base_stops))

    def batch_of(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Make a batch of rows as the model reads them."""
        return self.data_collator(rows)

    def complete_rows(self) -> None:
        """Add to the rows what the sharded model itself must compute. Even on a resume it still has its first weights."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `run.prepare` moves the model; under FSDP, only this process's shard of it."""

    def _send_telemetry(self) -> None:
        """Do nothing: a run sends no telemetry."""

    def create_accelerator_and_postprocess(self) -> None:
        """Do nothing: the run has its Accelerator. If trl saw FSDP, it would load a second model, whole on each rank."""
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def fine_tune(self, evaluate_fn: EvaluateFn) -> list[dict]:
        """Shard the model, then train to the end; see `engine.train`.

        Returns:
            The records of metrics.jsonl, including those of earlier parts of the run.
        """
        run = self.run
        # Not earlier: trl changes model, settings and tokenizer until here.
        run.prepare(self.model, self.processing_class, self.num_steps(), self.flops_fn)
        run.artifacts[0].use_cache = self.use_cache
        self.model_wrapped = run.model
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self.model = run.model
        self.complete_rows()
        return train(
            run,
            self.make_loader(),
            loss_fn=self.sum_and_count,
            count_fn=self.count_parts,
            evaluate_fn=evaluate_fn,
            draw_fn=self.draw,
            values_fn=self.values,
        )

    def keep_reference(self) -> None:
        """Keep a reference model that equals the run's base: the model without its adapters, or a second, sharded model."""
        if self.run.adapter:
            self.ref_model = WithoutAdapters(self.run.model)
        else:
            reference = make_model(self.run.args)
            add_fused_lm_head(reference, temperature=getattr(self, "temperature", 1.0))
            self.ref_model = self.run.shard_reference(reference)

    def num_steps(self) -> int:
        """Return the number of optimizer steps."""
        return num_whole_steps(self.run.args, len(self.train_dataset))

    def make_loader(self) -> StepLoader:
        """Make the loader of this rank's micro-batches, in the order of the steps."""
        run = self.run
        return make_train_loader(
            Rows(self.train_dataset, numbered_row),
            run.args,
            run.data_rank,
            run.data_world_size,
            lengths=self.lengths,
            collate_fn=Numbered(self.data_collator),
            content=self.content,
            order_class=self.order_class,
        )

    def checksum(self) -> str:
        """Compute the checksum of the rows to train on. Raises ConfigError if machines have other rows on either side."""
        if (others := self.eval_dataset) is not None:
            content_of(others, others.column_names)  # pyright: ignore[reportArgumentType]
        # Earlier versions computed it later, when the values of a reference had replaced the rows that were left out.
        is_flat = (rows := self.train_dataset)._indices is None or not getattr(
            self.run.args, "precompute_ref_log_probs", False
        )
        return content_of(rows if is_flat else rows.flatten_indices(), rows.column_names)

    def balances(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return the weighted loss that balances experts in a micro-batch, as a list; the list is empty without experts."""
        return [self.balance * outputs.last.aux_loss] if self.aux_loss_enabled else []

    def sum_and_count(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of the loss, and keep the counts of the micro-batch, by which its values are weighed."""
        sums = self.sum_parts(model, batch)
        self.counted.append(self.count_parts(batch))
        return sums

    def weights(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return for each value that is a mean of a micro-batch of how many it is; `counts` are those of `count_parts`.

        A name may stand for several, as in `clip_ratio/*`. Other values have the same weight in each micro-batch.
        """
        return {}

    def weigh(self) -> None:
        """Take means over all micro-batches of what trl has gathered of each; trl takes means of the means."""
        gathered = self._metrics["train"]
        counts, self.counted = sum_over_ranks(torch.stack(self.counted)).T.double().cpu(), []
        for pattern, weights in self.weights(counts).items():
            for name in fnmatch.filter(gathered, pattern):
                values = torch.tensor(gathered[name], dtype=torch.float64)
                gathered[name] = [((values * weights).sum() / weights.sum().clamp(min=1)).item()]

    def values(self, step: int) -> dict[str, float]:
        """Return the means of the values that trl has gathered since the last log line, for the line after `step`."""
        self.weigh()
        self.state.global_step = step
        values: dict[str, Any] = {}
        self.log(values)  # trl adds its values to the dict
        return {k: v for k, v in values.items() if isinstance(v, int | float) and k not in self.left_out}
