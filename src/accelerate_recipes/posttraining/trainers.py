"""Integration of trl's trainers: they do the step; everything around it is as in the other recipes.

A recipe declares

    @dataclass
    class Args(TrainerArgs, SFTConfig): ...

    class Trainer(RecipeTrainer, SFTTrainer): ...

`Args` has our arguments, which take precedence, and those that trl's config class adds: its own, and KEPT from those that
it inherits. `RecipeTrainer` replaces what transformers' Trainer does around the step. Launch, sharding, optimizer,
schedule, log, checkpoints, export, signals and lock are those of `engine.train`; loss, data, sampling and generation are
trl's.
"""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedType
from jinja2 import TemplateError
from torch import nn
from torch.utils.data import Sampler
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from transformers.trainer_utils import align_special_tokens
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes.adapters import add_adapters, load_settings
from accelerate_recipes.agenda import Agenda, EvaluateFn
from accelerate_recipes.architecture import Architecture, check_belong_together, new_config
from accelerate_recipes.args import OWNED_ELSEWHERE, TrainArgs, arg
from accelerate_recipes.attention import DOCUMENTS
from accelerate_recipes.checkpoint.check_export import (
    Exported,
    TrainedRows,
    compare_with_export,
    ends_of_adapters,
    stops_of,
)
from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.data.conversations import TEXT, without_begin
from accelerate_recipes.data.prepared import check_content, checksum_of_rows
from accelerate_recipes.data.rendering import Rendering, first_refused
from accelerate_recipes.data.shown import NUM_ROWS
from accelerate_recipes.environment import computes_in_bf16
from accelerate_recipes.errors import ConfigError, NonFiniteError
from accelerate_recipes.flags import Range
from accelerate_recipes.hub import cache
from accelerate_recipes.life import stop
from accelerate_recipes.metrics import Window
from accelerate_recipes.models import load_model, new_model
from accelerate_recipes.pretrained import load_config
from accelerate_recipes.probes import Packing, packing_of
from accelerate_recipes.ranks import on_first_of_machine_before_others, on_first_rank, sum_over_ranks
from accelerate_recipes.run import HasRows, Run
from accelerate_recipes.sequence import IGNORE_INDEX
from accelerate_recipes.weights import initialize, seed_of

# trl 1.16 uses an old name of transformers 5.23 in every step that generates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

# Fields of transformers.TrainingArguments that stay, besides those that TrainArgs has. The other fields would repeat or
# contradict what is done here.
KEPT = {
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "label_smoothing_factor",
    "liger_kernel_config", "neftune_noise_alpha", "remove_unused_columns", "torch_empty_cache_steps",
    "train_sampling_strategy", "use_liger_kernel",
}  # fmt: skip
REPLACED = {field.name for field in fields(TrainingArguments)} - set(TrainArgs.__dataclass_fields__) - KEPT
REFERENCE = {"ref_chosen_logps", "ref_rejected_logps"}  # columns that DPOTrainer adds
WHEN = "--save_steps, --eval_steps and --logging_steps say when"
CHECKPOINTING = "set `fsdp_activation_checkpointing: true` under `fsdp_config:` in the accelerate YAML"
MODEL = "the recipe loads the model; its arguments are --model_name_or_path and --attn_implementation"


@dataclass
class TrainerArgs(TrainArgs):
    """Arguments that every recipe on one of trl's trainers takes, besides the fields of trl's config class."""

    model_name_or_path: str = arg("", "Causal language model to begin with: a name on the Hub, or a folder.")
    attn_implementation: str = arg(
        "auto",
        "Attention kernel, as transformers names it, or documents (SFT with --packing or --padding_free); auto: documents "
        "in bf16 on a GPU where that is possible, else sdpa, or eager where a model has no sdpa.",
        fixed=False,
    )

    fixed = frozenset({"train_sampling_strategy"})
    ranges = (
        dict.fromkeys(("dataloader_prefetch_factor", "torch_empty_cache_steps"), Range(min=1))
        | dict.fromkeys(("neftune_noise_alpha", "router_aux_loss_coef"), Range(min=0))
        | {"label_smoothing_factor": Range(min=0, max=1)}
    )
    owned_elsewhere = (
        dict.fromkeys(REPLACED, "what trl's trainer does around a step is done as in the other recipes, see --help")
        | dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), WHEN)
        | dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), CHECKPOINTING)
        | dict.fromkeys(("gradient_checkpointing_kwargs", "activation_offloading"), CHECKPOINTING)
        | dict.fromkeys(("model_init_kwargs", "trust_remote_code"), MODEL)
        | {"load_best_model_at_end": "--metric_for_best_model keeps the best checkpoint, which `export` turns into a model"}
        | OWNED_ELSEWHERE
    )  # fmt: skip

    def __post_init__(self):
        """Skip `TrainingArguments.__post_init__`, which starts the process group; `trl_config` makes that config later."""

    @property
    def has_boundaries(self) -> bool:
        return False

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if not self.model_name_or_path and not getattr(self, "from_scratch", False):
            found.append("--model_name_or_path is missing: a name on the Hub, or a folder such as outputs/demo/export")
        if self.attn_implementation == DOCUMENTS and not self.has_boundaries:
            found.append(
                f"--attn_implementation {DOCUMENTS}: trl's batches do not say where documents begin; give sdpa, or train "
                "by SFT with --packing or --padding_free"
            )
        multiple = str(self.pad_to_multiple_of or "none").lower()
        if multiple not in ("auto", "none") and not (multiple.isdecimal() and int(multiple)):
            found.append(f"--pad_to_multiple_of is {multiple}; it must be auto, none or a positive number")
        return found


@dataclass
class NewModelArgs(TrainerArgs, Architecture):
    """Arguments of a recipe that may also begin with a new, small model."""

    tokenizer_name: str = arg("", "Tokenizer of a new model: a name on the Hub, or a folder (with --from_scratch).")
    router_aux_loss_coef: float | None = arg(
        None, "Weight of the loss that balances experts; default: the model's own."
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size) + self.architecture_problems(self.max_length)
        if self.from_scratch and self.model_name_or_path:
            found.append("--from_scratch makes a new model; remove it, or --model_name_or_path")
        if self.from_scratch != bool(self.tokenizer_name):
            found.append("--from_scratch and --tokenizer_name go together; give both, or neither")
        return found

    def new_model(self, tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedModel:
        """Make the new model on the meta device."""
        config = new_config(self, tokenizer, self.max_length)
        return new_model(config, self.attn_implementation, self.param_dtype, self.has_boundaries)


def trl_config(run: Run[TrainerArgs], config_class: type[TrainingArguments], **decided: Any) -> TrainingArguments:
    """Make the config of trl's trainer from our arguments, with everything switched off that the trainer must not do.

    `decided` are fields that the recipe sets.

    Raises:
        ConfigError: for what trl refuses.
    """
    args, accelerator = run.args, run.accelerator
    names = {field.name for field in fields(config_class)} - args.owned_elsewhere.keys()
    values = {name: getattr(args, name) for name in names}
    values |= {
        "accelerator_config": {"use_configured_state": True},
        "use_cpu": accelerator.device.type == "cpu",
        "bf16": computes_in_bf16(accelerator.mixed_precision),
        "gradient_accumulation_steps": args.accumulation_steps(accelerator.num_processes),
        "activation_checkpointing": False,  # trl turns it on, independent of the YAML's key
        "full_determinism": False,  # make_accelerator does it
        "dataloader_drop_last": True,  # else the last batch of an epoch is smaller than --total_batch_size
        "eval_strategy": "no",
        "save_strategy": "no",
        "optim": "adamw_torch",  # unused: `_prepare_for_training` makes ours
        "report_to": "none",
        "push_to_hub": False,  # `run.finish` pushes the export
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # would log the mean of earlier losses instead of NaN
    }
    values |= decided
    try:
        config = config_class(**values)
    except ValueError as error:
        raise ConfigError(f"trl's {config_class.__name__} refuses these arguments: {error}") from error
    # transformers 5.23 counts all GPUs of the machine where it sees one process without torch.distributed, for
    # DataParallel, which trl refuses.
    config._n_gpu = min(config.n_gpu, 1)
    return config


def make_model(args: TrainerArgs) -> PreTrainedModel:
    """Load the model; with --data_only make it on the meta device, without weights."""
    if args.data_only:
        config = load_config(args.model_name_or_path)
        model = new_model(config, args.attn_implementation, has_boundaries=args.has_boundaries)
        with contextlib.suppress(OSError):  # a model may have none; it names the tokens that end an answer
            name = args.model_name_or_path
            model.generation_config = GenerationConfig.from_pretrained(name, **cache.pinned(name))
        model.state_dict = dict  # DPOTrainer hashes the weights
    else:
        model = load_model(
            args.model_name_or_path, args.attn_implementation, has_boundaries=args.has_boundaries, **load_settings(args)
        )
    if (
        model.device.type == "meta"
    ):  # trl would begin rows for new tokens as the mean of the others, which have no values
        model.resize_token_embeddings = partial(model.resize_token_embeddings, mean_resizing=False)
    return model


def check_trl_packing(config: TrainingArguments, model: PreTrainedModel) -> None:
    """Refuse rows that trl packs for a model that does not see from their positions where documents begin.

    trl's `wrapped` strategy keeps no documents apart, for any model.

    Raises:
        ConfigError: for such a model.
    """
    is_packed = getattr(config, "packing", False) and config.packing_strategy != "wrapped"
    if (is_packed or getattr(config, "padding_free", False)) and packing_of(model.config) is not Packing.POSITIONS:
        raise ConfigError(
            f"{model.config.model_type} models do not see from the positions of a packed row where its documents begin, "
            "and trl gives them no mask: attention would cross them; leave out --packing and --padding_free"
        )


def make_or_load_model(
    args: NewModelArgs, tokenizer: PreTrainedTokenizerBase, new_tokens: Sequence[str]
) -> tuple[PreTrainedModel, list[int]]:
    """Load the model to begin with, or make a new one: whole on each rank, since trl's trainer takes no meta device.

    Tokens that were added to the tokenizer get rows in the embedding; what these begin with depends only on the seed.

    Returns:
        The model, and the numbers of `new_tokens`, and of all that got rows in its embedding.

    Raises:
        ConfigError: for a tokenizer or a length that does not fit the new model.
    """
    if not args.from_scratch:
        model = make_model(args)
        num_embeddings = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
        added = range(num_embeddings, len(tokenizer))
        if added:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed_of("new rows", args.seed))
                model.resize_token_embeddings(len(tokenizer))
        vocabulary = tokenizer.get_vocab()
        return model, sorted({*added, *(vocabulary[token] for token in new_tokens)})
    model = args.new_model(tokenizer)
    check_belong_together(model.config, tokenizer, args.max_length or 0)
    return model if args.data_only else initialize(model, args.seed, "cpu"), []


def with_fused_head(
    config: PreTrainedConfig,
    attn_implementation: str,
    dtype: torch.dtype,
    outputs: tuple[str, ...],
    temperature: float = 1.0,
) -> PreTrainedModel:
    """Make a model on the meta device, with the forward pass that one of trl's trainers gives it for such outputs."""
    model = new_model(config, attn_implementation, dtype)
    add_fused_lm_head(model, outputs=outputs, temperature=temperature)
    return model


def loss_of_experts(args: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the attributes by which trl's trainers know the loss that balances experts: its weight, whether it is on."""
    experts, weight = config.get_text_config(), args.router_aux_loss_coef
    weight = getattr(experts, "router_aux_loss_coef", 0.0) if weight is None else weight
    return {
        "router_aux_loss_coef": weight,
        "aux_loss_enabled": hasattr(experts, "output_router_logits") and weight != 0,
    }


def pad_multiple(args: Any) -> int | None:
    """Return the number of which the lengths of trl's batches are multiples, if there is one."""
    multiple = str(args.pad_to_multiple_of)
    return int(multiple) if multiple.isdecimal() else None


class WholeSteps(Sampler[int]):
    """Rows of an epoch in the order of another sampler, which follows from (seed, epoch) alone, in whole steps.

    Rows that fill no step are left out of the epoch; in the next one they are others. Set `epoch` before iterating.
    """

    # transformers 5.23 counts an epoch in micro-batches of a process. By their size and the number of processes, those that
    # are left over make a step with fewer rows, or none, and then each later step has other rows.
    # RepeatSampler (trl 1.16) draws an epoch from where the last one left its generator, which a resumed run has as it was
    # at the beginning. LengthGroupedSampler (transformers) draws from the process's generator, as dropout does.

    def __init__(self, sampler: Any, rows_per_step: int, seed: int):
        self.sampler, self.rows_per_step, self.seed = sampler, rows_per_step, seed
        self.epoch = 0
        self.generator = torch.Generator()
        if hasattr(sampler, "generator"):  # one that goes through the rows in their order has none
            sampler.generator = self.generator

    def __len__(self) -> int:
        return len(self.sampler) // self.rows_per_step * self.rows_per_step

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        return islice(iter(self.sampler), len(self))


class FirstRows(NamedTuple):
    """First rows of a trainer's dataset, as a batch."""

    trainer: "RecipeTrainer"
    rows: datasets.Dataset

    def first_batch(self) -> dict[str, torch.Tensor]:
        return self.trainer.collate([self.rows[i] for i in range(min(NUM_ROWS, len(self.rows)))])


class RecipeTrainer:
    """Mixin that replaces what a Trainer does around the step; put it before one of trl's trainers in a class's bases."""

    left_out: ClassVar[set[str]] = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"}

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
        self.num_targets = torch.zeros((), dtype=torch.int64, device=run.accelerator.device)
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
            for name, rows in args.read_rows().items():
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

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Make a batch of rows as the model reads them; of prompts, where the answers are drawn in training."""
        if hasattr(self, "_tokenize_prompts"):
            ids, *_ = self._tokenize_prompts([row["prompt"] for row in rows])
            return self.processing_class.pad({"input_ids": ids}, return_tensors="pt")
        return self.data_collator(rows)

    def complete_rows(self) -> None:
        """Add to the rows what the model itself must compute. It is sharded, and has its first weights, on a resume too."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `run.prepare` moves the model, under FSDP only this process's part of it."""

    def _send_telemetry(self) -> None:
        """Do nothing: a run sends no telemetry."""

    def create_accelerator_and_postprocess(self) -> None:
        """Do nothing: the run has its Accelerator already."""
        # Else Accelerate would take over the generator of WholeSteps.
        self.accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = False
        self.is_fsdp_enabled = self.accelerator.distributed_type == DistributedType.FSDP
        # Keeping whole gradients until the last micro-batch would cost every rank the memory of all of them.
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = self.is_fsdp_enabled

    def _get_train_sampler(self, *others: Any) -> WholeSteps | BatchRebalanceSampler:
        args = self.run.args
        sampler = super()._get_train_sampler(*others)
        if isinstance(sampler, BatchRebalanceSampler):  # it deals out whole steps to the processes
            sampler.seed = args.seed
            self.order = sampler
        else:
            if isinstance(sampler, LengthGroupedSampler):
                sampler.batch_size = args.total_batch_size  # not a process's share
            self.order = WholeSteps(sampler, args.total_batch_size, args.seed)
        if len(self.order) == 0:
            raise ConfigError(
                f"the training data have {len(self.train_dataset):,} rows, which do not fill a step of --total_batch_size "
                f"{args.total_batch_size}; lower it, or give more data"
            )
        return self.order

    def _run_epoch(self, *, epoch: int, **settings: Any) -> None:
        # Accelerate 1.15 does not reach a sampler behind a batch sampler of which it skips the first batches.
        self.order.epoch = epoch
        super()._run_epoch(epoch=epoch, **settings)

    def _get_dataloader(self, *args: Any, **settings: Any):
        loader = super()._get_dataloader(*args, **settings)
        inner = loader.base_dataloader  # Accelerate's loader iterates over this one
        if inner.persistent_workers:
            # Else torch draws from the process's generator when the workers start: once in a run, and once more where it is
            # resumed, since the epoch of which the beginning is skipped has its own workers.
            inner.generator = torch.Generator()
        return loader

    def train(self, evaluate_fn: EvaluateFn) -> list[dict]:
        """Train to the end, from the checkpoint that is to be resumed if there is one.

        `evaluate_fn(step)` runs on all ranks, before and after training and every `eval_steps`.

        Returns:
            The records of metrics.jsonl, of earlier parts of the run too.

        Raises:
            Stopped: when a rank was asked to stop; what was done until then is saved.
            NonFiniteError: naming the step and the last good checkpoint.
        """
        # The order of the data follows from the step.
        self.agenda = Agenda(self.run, evaluate_fn, lambda: {"content": self.content})
        super().train()
        return self.agenda.end()

    def _inner_training_loop(self, **settings: Any):
        # Do not call `train`, which looks for the Trainer's own file in the checkpoint.
        return super()._inner_training_loop(**settings | {"resume_from_checkpoint": self.run.resumed_from})

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *others: Any) -> tuple[int, int]:
        super()._init_training_state(max_steps, steps_per_epoch, *others)
        self.state.global_step = step_of(self.run.resumed_from) if self.run.resumed_from else 0
        # GRPOTrainer draws answers in each --num_iterations-th step, by its own count, which begins with 0 on a resume.
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        epoch, steps = divmod(self.state.global_step, steps_per_epoch)
        return epoch, steps * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any):
        """Shard the model, make optimizer and schedule, restore the checkpoint, evaluate what is due before step 1."""
        run = self.run
        # Do this only now: trl and transformers' Trainer change model, settings and tokenizer until here.
        run.prepare(self.model, self.processing_class, max_steps)
        run.artifacts[0].use_cache = self.use_cache
        self.model_wrapped, self.optimizer, self.lr_scheduler = run.model, run.optimizer, run.scheduler
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self.model = run.model
        before = self.train_dataset
        self.complete_rows()
        rows = self.train_dataset
        if rows is not before:  # the loader goes through rows that lack something
            train_dataloader = self.get_train_dataloader()
        # What the reference says of a row differs in the last bits by the number of processes and the micro-batch.
        own = [name for name in rows.column_names if name not in REFERENCE]
        self.content, with_reference = on_first_rank(
            lambda: [checksum_of_rows(rows, names) for names in (own, rows.column_names)]
        )
        step = self.agenda.begin()
        states = run.checkpointer.data_states
        # Checkpoints of earlier versions have the checksum of all columns.
        is_older = with_reference in [state.get("content") for state in states]
        check_content(with_reference if is_older else self.content, states)
        self._load_rng_state(run.resumed_from)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self.step_start = time.perf_counter()
        self._open_window()
        self.agenda.expect(f"step {step + 1}")
        return run.model, train_dataloader

    def _load_rng_state(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self.run.checkpointer.restore_rng()

    def _open_window(self) -> None:
        """Begin to count the steps until the next log line."""
        self.window_start, self.data_seconds = time.perf_counter(), 0.0
        self.num_targets.zero_()

    def get_batch_samples(self, *args: Any) -> tuple:
        start = time.perf_counter()
        try:
            return super().get_batch_samples(*args)
        finally:
            self.data_seconds += time.perf_counter() - start

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        if self.model.training:
            self.num_targets += count_targets(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> Any:
        """Check loss and gradients before each optimizer step."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if hasattr(grad_norm, "full_tensor"):
            grad_norm = grad_norm.full_tensor()
        if not torch.isfinite(grad_norm):
            raise NonFiniteError(
                f"step {self.state.global_step + 1}: gradient norm {grad_norm.item()}. The weights were not changed. "
                f"Last good checkpoint: {self.run.checkpointer.newest or 'none yet'}",
                [],
            )
        return grad_norm

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor, *_: Any, learning_rate: float, **__: Any
    ) -> None:
        """Log, evaluate and save what is due after a step. transformers calls it again at the end of an epoch."""
        step, agenda = self.state.global_step, self.agenda
        if step == agenda.step:
            return
        seconds = time.perf_counter() - self.step_start
        wishes = [int(agenda.save_is_overdue()), int(stop.requested() is not None)]
        wishes = sum_over_ranks(torch.tensor(wishes, device=self.accelerator.device))
        wants_save, wants_stop = (n > 0 for n in wishes.tolist())
        agenda.completed(step, seconds, wants_save=wants_save, wants_stop=wants_stop)
        if agenda.log_is_due:
            self._log_window(step, tr_loss, grad_norm, learning_rate)
        agenda.evaluate_and_save()
        agenda.expect(f"step {step + 1}")
        self.step_start = time.perf_counter()

    def _log_window(self, step: int, tr_loss: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """Log the steps since the last log line in one line, with the values that trl has gathered."""
        steps = step - self._globalstep_last_logged
        loss = sum_over_ranks(tr_loss.detach().clone()) / (steps * self.accelerator.num_processes)
        self._total_loss_scalar += loss.item() * steps  # waits until a GPU has updated the weights
        seconds = time.perf_counter() - self.window_start
        self._globalstep_last_logged = step
        tr_loss.zero_()
        values: dict[str, Any] = {}
        self.log(values)  # trl adds its own
        values = {k: v for k, v in values.items() if isinstance(v, int | float) and k not in self.left_out}
        window = Window()
        samples = steps * self.run.args.total_batch_size
        window.add(loss, sum_over_ranks(self.num_targets.clone()), samples, seconds, self.data_seconds)
        self.agenda.log_window(window, grad_norm.item(), learning_rate, values)
        self._open_window()


def count_targets(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens of a batch that are targets of the loss."""
    if "labels" in inputs:
        return (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
    return inputs["completion_mask"].sum()
