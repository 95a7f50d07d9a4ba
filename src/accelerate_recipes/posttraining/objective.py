"""trl as a library: its trainers prepare rows, draw answers and compute losses, and `engine.train` trains by them.

A recipe declares

    @dataclass
    class Args(TrainerArgs, SFTConfig): ...

    class Trainer(Objective, SFTTrainer): ...

`Args` has our arguments, which take precedence, and those that trl's config class adds, but none that it inherits from
transformers. An `Objective` is never told to `train()`: it gives the engine rows in the order of the steps, and the sums
and counts of each part of trl's loss.
"""

import contextlib
import copy
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
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
)
from transformers.trainer_utils import align_special_tokens
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes.adapters import WithoutAdapters, add_adapters
from accelerate_recipes.agenda import EvaluateFn
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint.check_export import (
    Exported,
    TrainedRows,
    compare_with_export,
    ends_of_adapters,
    stops_of,
)
from accelerate_recipes.data.conversations import TEXT, without_begin
from accelerate_recipes.data.prepared import checksum_of_rows
from accelerate_recipes.data.rendering import Rendering, first_refused
from accelerate_recipes.data.rows import Rows, StepLoader, StepOrder, make_train_loader, rows_of_step
from accelerate_recipes.data.shown import NUM_ROWS, HasRows
from accelerate_recipes.engine import DrawFn, train
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.metrics import Flops
from accelerate_recipes.posttraining.settings import TrainerArgs, check_trl_packing, make_model
from accelerate_recipes.ranks import data_world_size, on_first_of_machine_before_others, on_first_rank
from accelerate_recipes.run import Run
from accelerate_recipes.sequence import IGNORE_INDEX

# trl 1.16 uses an old name of transformers 5.23 in every step that generates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

REFERENCE = {"ref_chosen_logps", "ref_rejected_logps"}  # columns that DPOTrainer adds


class Collectives:
    """Stand-in for an Accelerator, with what a loss of trl asks of it."""

    is_main_process, parallelism_config = False, None
    autocast = nullcontext  # the model's forward pass does it
    gather = gather_for_metrics = staticmethod(gather)
    pad_across_processes, reduce = staticmethod(pad_across_processes), staticmethod(reduce)

    @property
    def device(self) -> torch.device:
        return PartialState().device  # pyright: ignore[reportReturnType]

    @property
    def num_processes(self) -> int:
        return data_world_size()


def bare(trainer_class: type["Objective"], args: Any, config: PreTrainedConfig, **attributes: Any) -> Any:
    """Make a trainer that can only compute its loss, for a trial; what the loss reads, and is missing, is an error."""
    trainer: Any = trainer_class.__new__(trainer_class)
    model: Any = nn.Module()  # in training
    model.is_gradient_checkpointing = False
    experts, weight = config.get_text_config(), args.router_aux_loss_coef
    weight = getattr(experts, "router_aux_loss_coef", 0.0) if weight is None else weight
    vars(trainer).update(
        args=copy.copy(args),
        model=model,
        accelerator=Collectives(),
        balance=weight,
        router_aux_loss_coef=0.0,
        aux_loss_enabled=hasattr(experts, "output_router_logits") and weight != 0,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        compute_loss_func=None,
        label_smoother=None,
        **attributes,
    )
    trainer.args.average_tokens_across_devices = False
    if getattr(args, "disable_dropout", False):
        args.lora_dropout = 0.0  # of the adapters, which the trial's model gets later
    return trainer


class WholeSteps(StepOrder):
    """StepOrder without the last rows of the run that do not fill a step; with the answers to a prompt of GRPO as its rows.

    Answers are drawn for --num_iterations steps.
    """

    # trl's losses gather a value for each row of a micro-batch, so all micro-batches must have the same size.

    def rows(self, step: int) -> list[int]:
        args = self.args
        answers, iterations = of_a_prompt(args)
        prompts = args.total_batch_size // answers
        rows = rows_of_step(step // iterations, prompts, self.num_rows, args.seed, self.end, self.epoch)
        return [] if -1 in rows else [row for row in rows for _ in range(answers)]


def of_a_prompt(args: TrainArgs) -> tuple[int, int]:
    """Return how many answers a row stands for, and in how many steps they are used: 1 and 1, but for GRPO."""
    return getattr(args, "num_generations", 1), getattr(args, "num_iterations", 1)


def num_whole_steps(args: TrainArgs, num_rows: int) -> int:
    """Return the number of optimizer steps of a run in the order of WholeSteps.

    Raises:
        ConfigError: if it would be 0.
    """
    if args.max_steps > 0:
        return args.max_steps
    answers, iterations = of_a_prompt(args)
    rows_a_step, num_trained = args.total_batch_size // answers, round(args.num_train_epochs * num_rows)
    if num_trained < rows_a_step:
        raise ConfigError(
            f"--num_train_epochs {args.num_train_epochs} of {num_rows:,} rows are {num_trained:,}, which do not fill a step "
            f"of {rows_a_step}; raise it, give --max_steps, or lower --total_batch_size"
        )
    return num_trained // rows_a_step * iterations


class FirstRows(NamedTuple):
    """First rows of a trainer's dataset, as a batch."""

    trainer: "Objective"
    rows: datasets.Dataset

    def first_batch(self) -> dict[str, torch.Tensor]:
        return self.trainer.batch_of([self.rows[i] for i in range(min(NUM_ROWS, len(self.rows)))])


class Numbered(NamedTuple):
    """Collator of rows with their numbers: what `collate` makes of the rows, and the numbers as `row`."""

    collate: Callable[[list[dict]], dict[str, Any]]

    def __call__(self, rows: list[tuple[int, dict]]) -> dict[str, Any]:
        return self.collate([row for _, row in rows]) | {"row": torch.tensor([number for number, _ in rows])}


def numbered_row(row: dict, number: int) -> tuple[int, dict]:
    return number, without_targets(row, number)


def without_targets(row: dict, number: int) -> dict:
    """Return a row as trl prepared it; number -1 gets no targets."""
    return row if number >= 0 else row | {"labels": [IGNORE_INDEX] * len(row["input_ids"])}


@contextlib.contextmanager
def hidden_mesh(accelerator: Accelerator) -> Iterator[None]:
    """Hide that ranks share rows: trl 1.16 refuses packed ones, since Accelerate's own way would mix their documents.

    Ours (`sequence`) does not. tests/test_upstream.py fails once trl no longer asks.
    """
    config, accelerator.state.parallelism_config = accelerator.state.parallelism_config, None
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config


class Outputs:
    """Model whose last outputs can be read, for parts of a loss that trl does not give apart."""

    last: Any

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        self.last = self.model(**inputs)
        return self.last


class Objective:
    """Mixin that makes one of trl's trainers a library for the engine; put it before the trainer in a class's bases.

    `sum_parts` and `count_parts`, which the subclasses have, are the engine's `loss_fn` and `count_fn`.
    """

    left_out: ClassVar[set[str]] = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"}
    order_class: ClassVar[type[StepOrder]] = WholeSteps
    lengths: np.ndarray | None = None  # of the rows, if rows of similar length are trained together
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

        With adapters, the rows of `new_tokens` are trained too. `heldout` shows the rows of an evaluation that is not of
        trl's `eval_dataset`; `counts` are numbers of the recipe for the printed line.
        """
        self.counts = {"left out": 0} | (counts or {})
        self.run = run
        self.accelerator = run.accelerator
        check_trl_packing(config, model)
        run.adapter = add_adapters(model, run.args, new_tokens)
        self.use_cache = model.config.use_cache  # transformers' Trainer switches it off in the model's config
        if not sys.stderr.isatty():  # a job's log: plain lines
            os.environ["TQDM_DISABLE"] = "1"  # trl reads this
        self.base_stops = stops_of(model.generation_config)
        num_embeddings, num_tokens = model.get_input_embeddings().num_embeddings, len(tokenizer)
        adapter = [(p, p.data) for p in model.parameters() if p.requires_grad] if run.adapter else []
        for name in ("train_dataset", "eval_dataset"):
            for column in ("prompt", getattr(config, "dataset_text_field", None)):
                if column in getattr(settings.get(name), "column_names", ()):
                    once = partial(without_begin, settings[name], column, tokenizer)
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
        except (ValueError, TemplateError, TypeError) as error:  # TemplateError: of a chat template, or for bad rows
            if isinstance(error, TypeError) and "Undefined" not in str(error):  # a template writes what a row lacks
                raise
            raise ConfigError(f"trl's trainer refuses this run: {error}") from error
        # Trainer does this when training begins; the export is compared before.
        align_special_tokens(self.model, tokenizer)
        for parameter, data in adapter:
            parameter.data = data  # trl 1.16 rounds it to bf16 beside a model in 4 bits: small updates would be lost
        # The embedding may have rows to spare for them, which mean nothing as long as nobody trains them.
        if adapter and (len(tokenizer) != num_tokens or model.get_input_embeddings().num_embeddings != num_embeddings):
            raise ConfigError(
                f"--chat_template_path {run.args.chat_template_path} is a model, whose tokens trl adds: the tokenizer had "
                f"{num_tokens:,}, and has {len(tokenizer):,}. --use_peft neither trains nor saves their rows of the "
                "embedding; give the template as a .jinja file"
            )
        self.remove_callback(PrinterCallback)
        # The engine weighs the balance of experts itself: its mean is over micro-batches, not over targets.
        self.balance, self.router_aux_loss_coef = self.router_aux_loss_coef, 0.0
        self.counts["left out"] += len(settings["train_dataset"]) - len(self.train_dataset)
        for name, use in (("train_dataset", "train"), ("eval_dataset", "evaluate")):
            if (rows := settings.get(name)) is not None and not len(getattr(self, name)):
                raise ConfigError(
                    f"none of {len(rows):,} rows is left to {use} on: trl leaves out rows that have no target "
                    f"within --max_length {getattr(config, 'max_length', None)}; raise it, or see the weights of the "
                    "messages"
                )
        loaders = {"Training": FirstRows(self, self.train_dataset)}
        if self.eval_dataset is not None:
            heldout = FirstRows(self, self.eval_dataset)
        loaders |= {"Evaluation": heldout} if heldout else {}
        run.show_rows(tokenizer, loaders, *self.examine())

    @contextlib.contextmanager
    def naming_rows(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
        """Say in which row of which file a conversation cannot be rendered, if that is why trl cannot prepare the rows.

        Raises:
            ConfigError: naming the row.
        """
        try:
            yield
        except Exception as error:
            args: Any = self.run.args
            settings = {"assistant_only": getattr(args, "assistant_only_loss", False)}
            for name, rows in args.read_rows_for(tokenizer).items():
                found = first_refused(rows, tokenizer, getattr(self, "chat_template", None), **settings)
                if found:
                    raise ConfigError(f"{args.sources[name]}, row {found[0]}, {found[1]}") from error
            raise

    def examine(self) -> tuple[np.ndarray | int, dict[str, int]]:
        """Check the prepared rows, and count their targets, and what else is worth saying; see `shown.count_line`.

        Raises:
            ConfigError: for rows that would not train what the export then does.
        """
        return len(self.train_dataset), self.counts

    def first_rows(
        self, rows: list[dict], trained: list[Rendering], ends: Iterable[int], **settings: Any
    ) -> TrainedRows:
        """Make what is compared with the export, from rows as they were written and as they are trained."""
        defaults = {"text_field": "", "completion_only": False, "assistant_only": False, "template": None}
        args = self.run.args
        fixed = {name: value for name, value in args.values().items() if name in args.fixed_on_resume()}
        return TrainedRows(rows, trained, defaults | settings, sorted(ends), fixed)

    def compare_with_export(self, exported: Exported, first: TrainedRows) -> None:
        """Compare the first rows with what the export will make of them, and keep them for a comparison with the export.

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
        """Add to the rows what the model itself must compute. It is sharded, and has its first weights, on a resume too."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `run.prepare` moves the model, under FSDP only this process's part of it."""

    def _send_telemetry(self) -> None:
        """Do nothing: a run sends no telemetry."""

    def create_accelerator_and_postprocess(self) -> None:
        """Do nothing: the run has its Accelerator already. Where trl sees FSDP, it loads a second model, whole on a rank."""
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def fine_tune(self, evaluate_fn: EvaluateFn) -> list[dict]:
        """Shard the model, then train to the end; see `engine.train`.

        Returns:
            The records of metrics.jsonl, of earlier parts of the run too.
        """
        run = self.run
        # Do this only now: trl changes model, settings and tokenizer until here.
        run.prepare(self.model, self.processing_class, self.num_steps(), self.flops_fn)
        run.artifacts[0].use_cache = self.use_cache
        self.model_wrapped = run.model
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self.model = run.model
        self.complete_rows()
        return train(
            run,
            self.make_loader(),
            loss_fn=self.sum_parts,
            count_fn=self.count_parts,
            evaluate_fn=evaluate_fn,
            draw_fn=self.draw,
            values_fn=self.values,
        )

    def keep_reference(self) -> None:
        """Keep what computes as the run's base does: the model without its adapters, or a second one, sharded like it."""
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
        run, rows = self.run, self.train_dataset
        # What the reference says of a row differs in the last bits by the number of processes and the micro-batch.
        own = [name for name in rows.column_names if name not in REFERENCE]
        return make_train_loader(
            Rows(rows, numbered_row),
            run.args,
            run.data_rank,
            run.data_world_size,
            lengths=self.lengths,
            collate_fn=Numbered(self.data_collator),
            content=on_first_rank(lambda: checksum_of_rows(rows, own)),
            order_class=self.order_class,
        )

    def balances(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return how far experts are from balance in a micro-batch, weighed; nothing if there are none."""
        return [self.balance * outputs.last.aux_loss] if self.aux_loss_enabled else []

    def values(self, step: int) -> dict[str, float]:
        """Return the means of what trl has gathered since the last log line, for the one after `step`."""
        self.state.global_step = step
        values: dict[str, Any] = {}
        self.log(values)  # trl adds its own
        return {k: v for k, v in values.items() if isinstance(v, int | float) and k not in self.left_out}
