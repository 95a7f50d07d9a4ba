"""Arguments of a recipe: one flat dataclass. Flags override the preset (`--config`), the preset overrides the defaults.

Names are those of `transformers.TrainingArguments` wherever it has one. Settings of the accelerate YAML (sharding,
precision, compile, activation checkpointing) have no flag here. Such a flag is an error that names the key of the YAML.
All problems are reported at once, in one `ConfigError`.
"""

import gc
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import yaml

from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.adapters import AdapterArgs
from accelerate_recipes.arguments.declaring import Range, arg, declarations, group_flags, parse_groups, read_preset
from accelerate_recipes.arguments.help import help_text, recipe_parser
from accelerate_recipes.arguments.mirror import mirror_problems
from accelerate_recipes.arguments.names import ELSEWHERE
from accelerate_recipes.disk import IS_POINTER, is_pointer
from accelerate_recipes.errors import collecting_errors, near_path, raise_problems
from accelerate_recipes.ranks import data_world_size, is_first, ranks_a_row, readers

gc.freeze()  # torch never goes: collections, which would look at it again and again, take a sixth of a start

OPTIMIZERS = ["adamw_torch_fused", "adamw_bf16_kahan", "adafactor", "adamw_8bit", "muon"]
READ_BY = {".txt": "c4.py", ".pgn": "chess.py", ".tar": "vit.py"}  # kinds of files that one recipe reads
OWN_SCHEDULES = ["linear", "cosine", "constant_with_warmup"]
# Those of transformers' table that follow from the step alone: the others need values of the run.
THEIR_SCHEDULES = [
    "constant", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "inverse_sqrt", "polynomial",
    "warmup_stable_decay",
]  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class TrainArgs(AdapterArgs):
    """Arguments that every recipe takes. A step is a completed optimizer step; the size of a batch counts sequences."""

    group = "rare"  # of an argument that names no other
    output_dir: str = arg(
        "outputs/run", "Folder for checkpoints, metrics.jsonl, args.yaml and export/.", group="essential"
    )
    resume_from_checkpoint: str = arg(
        "latest",
        "Checkpoint to resume: `latest` (in --output_dir or --mirror, if any), `mirror`, a path, a URL, or `none`.",
        group="saving",
    )
    mirror: str = arg(
        "",
        "Copy checkpoints to this URL (s3://, gs://, az://, hf://buckets/...) or folder, and resume from there.",
        group="saving",
    )
    mirror_bandwidth: float = arg(
        0.0, "MiB/s that each machine sends to --mirror at most, until training ends; 0: no limit.", min=0
    )
    data_only: bool = arg(
        False, "Prepare the data, show the first rows, and end before the model is loaded; see `prepare`.", group="data"
    )
    seed: int = arg(
        42, "Seed of the initial weights, dropout and the order of the data.", fixed=True, min=0, group="batch"
    )
    full_determinism: bool = arg(False, "Use slower algorithms on GPUs, so that the same run gives the same bits.")
    num_train_epochs: float = arg(
        1.0, "Passes over the training data, unless --max_steps is given.", min=0, max=1e6, group="essential"
    )
    max_steps: int = arg(-1, "Optimizer steps; -1: as many as --num_train_epochs needs.", min=-1, group="batch")
    total_batch_size: int = arg(
        16, "Sequences per optimizer step, over all processes and accumulation.", fixed=True, min=1, group="essential"
    )
    per_device_train_batch_size: int = arg(1, "Sequences per forward pass on one process.", min=1, group="essential")
    per_device_eval_batch_size: int = arg(
        8, "Sequences per forward pass on one process in evaluation.", min=1, group="evaluation"
    )
    learning_rate: float = arg(1e-5, "Peak learning rate.", min=0, max=1, group="essential")
    lr_scheduler_type: str = arg(
        "cosine", "Learning rate after the warm-up.", choices=[*OWN_SCHEDULES, *THEIR_SCHEDULES], group="optimizer"
    )
    lr_scheduler_kwargs: dict = arg({}, "Settings of transformers' schedules, NAME=VALUE, such as num_decay_steps=500.")
    min_lr_ratio: float = arg(0.0, "Learning rate at the end, as a share of the peak.", min=0, max=1)
    warmup_steps: float = arg(0.03, "Steps of the warm-up; below 1: a share of all steps.", min=0, group="optimizer")
    weight_decay: float = arg(0.1, "Weight decay; norms and biases have none.", min=0, max=1000, group="optimizer")
    adam_beta1: float = arg(0.9, "AdamW's beta1.", min=0, below=1)
    adam_beta2: float = arg(0.95, "AdamW's beta2.", min=0, below=1)
    adam_epsilon: float = arg(1e-8, "AdamW's epsilon.", min=1e-30, max=1)
    optim: str = arg(
        "adamw_torch_fused",
        "Optimizer; `kahan` keeps the weights in bf16.",
        choices=OPTIMIZERS,
        fixed=True,
        group="optimizer",
    )
    max_grad_norm: float = arg(
        1.0, "Global gradient norm above which gradients are scaled down; 0: never.", min=0, group="optimizer"
    )
    spike_factor: float = arg(
        0.0,
        "A step whose loss or gradient norm is this many robust deviations above the median of the last hundred steps is "
        "not applied; 0: only one that is not finite.",
        min=0,
    )
    on_spike: str = arg(
        "stop", "End the run at a step that its rows make wrong, or leave that step out.", choices=["stop", "skip"]
    )
    max_skips: int = arg(5, "Steps left out in a row that end the run.", min=1)
    verify_replicas: int = arg(
        0, "Steps between comparisons of weights and optimizer states over the replicas; 0: never.", min=0
    )
    prefetch_layers: int = arg(
        0, "Layers that FSDP2 gathers ahead of the computing layer; 0: torch's default, one.", min=0
    )
    checkpoint_every_n_layers: int = arg(
        1, "Recompute only every n-th layer, if the YAML sets fsdp_activation_checkpointing.", min=1, group="memory"
    )
    activation_memory_budget: float = arg(
        1.0,
        "Share of the activations that compiled layers keep; those that are cheapest to compute are recomputed.",
        min=0,
        max=1,
    )
    reduce_dtype: str = arg(
        "fp32", "Precision in which FSDP sums gradients over the ranks.", choices=list(DTYPES), group="memory"
    )
    logging_steps: int = arg(10, "Steps between log lines.", min=1, group="logging")
    eval_steps: int = arg(
        0, "Steps between evaluations; 0: evaluate only before and after training.", min=0, group="evaluation"
    )
    save_steps: int = arg(
        500,
        "Steps between checkpoints, with one more after the last step; 0: only after the last.",
        min=0,
        group="saving",
    )
    save_minutes: float = arg(
        0.0, "Minutes since the last checkpoint after which to save one more; 0: save by steps only.", min=0
    )
    save_total_limit: int = arg(2, "Newest complete checkpoints to keep; 0: all.", min=0, group="saving")
    keep_every_n_steps: int = arg(0, "Also keep the checkpoints at multiples of this number of steps; 0: none.", min=0)
    metric_for_best_model: str = arg(
        "", "Also keep the best checkpoint by this value of the evaluation, such as `loss`.", group="saving"
    )
    greater_is_better: bool | None = arg(
        None, "A higher value is better; default: true unless the name ends in `loss`."
    )
    async_save: bool = arg(True, "Write checkpoints in the background, from a copy in host memory.")
    dataloader_num_workers: int = arg(
        0, "Worker processes that collate batches, per process.", min=0, max=1024, group="data"
    )
    ddp_timeout: int = arg(
        1800, "Seconds to wait for a process that does not join a collective; then the run fails.", min=1
    )
    step_timeout: int = arg(
        300, "Seconds to wait for a step that hangs; then the run fails. The first step has --ddp_timeout.", min=1
    )
    report_to: str = arg(
        "none", "Trackers, comma-separated: tensorboard, trackio, wandb; none: only metrics.jsonl.", group="logging"
    )
    profile_steps: str = arg("", "Steps that torch's profiler records, such as 10-12.", group="logging")
    profile_ranks: list[int] = arg([0], "Processes of which --profile_steps are recorded.", min=0)
    text_only_export: bool = arg(
        False,
        "Export only the trained language model, without the untrained parts of the base, such as those for images.",
    )
    push_to_hub: str = arg(
        "", "Repository for the export, ORG/NAME on the Hub; a new one is made private.", group="saving"
    )

    usage: ClassVar[str] = "accelerate launch [LAUNCH FLAGS] RECIPE [FLAGS]"

    # Fields of other libraries that are not arguments here, each with what decides it instead.
    owned_elsewhere: ClassVar[dict[str, str]] = ELSEWHERE

    # Ranges of fields that another library declares, and the names of those fields that are fixed on a resume.
    ranges: ClassVar[dict[str, Range | tuple[str, ...]]] = {}
    fixed: ClassVar[frozenset[str]] = frozenset()

    # Groups in --help of fields that several recipes declare, and of fields that another library declares.
    groups: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("model_name_or_path", "dataset_name", "train_files", "max_length"), "essential"),
        "tokenizer_name": "model",
        "attn_implementation": "memory",
        **dict.fromkeys(("dataset_revision", "data_cache_dir"), "rare"),
    }

    # Whether ranks can share a row (parallelism_config_cp_size). For this, rows must be packed, and batches must say where
    # documents begin.
    shares_rows = False

    # Whether rows of any length are padded to a length that the ranks which share a row can divide.
    pads_rows: ClassVar[bool] = False

    # Whether `datasets` or `evaluate` read rows or compute metrics; they fill caches.
    fills_caches = True

    # Whether all rows are tokenised before the first step, while other processes wait in a collective.
    tokenizes_first: ClassVar[bool] = False

    # Arguments of some recipes. The others have these values: without a type, they are no arguments.
    attn_implementation = ""
    max_length = 0
    document_mask = packing = False
    whole_logits = None  # the recipe has no choice
    new_tokens = train_files = eval_files = phases = ()
    num_iterations = num_generations = 1
    data_cache_dir = dataset_num_proc = None
    template_date = source_name = ""

    # Folders that only the machine of the run can see. Files in them cannot be checked here.
    elsewhere = ()

    # Shares of the data in this launch: processes, or groups of processes that share rows. (transformers' arguments have
    # `world_size` already, as a property.)
    num_launched = 1

    # Processes in a group that shares rows (parallelism_config_cp_size).
    row_size = 1

    def problems(self, world_size: int) -> list[str]:
        """List contradictions between these values, one sentence each. A recipe extends the list."""
        of_parts = [*self.source_problems(), *mirror_problems(self), *self.adapter_problems()]
        return [*self.contradictions(world_size), *of_parts, *self.batch_problems(world_size)]

    def source_problems(self) -> list[str]:
        """List what is wrong with the arguments that say what is read, each source of a mixture its own, as `problems`."""
        return []

    def contradictions(self, world_size: int) -> Iterator[str]:
        yield from self.schedule_problems(self.max_steps)
        if self.max_steps == 0:
            yield "--max_steps is 0; give a positive number, or -1: as --num_train_epochs gives"
        if self.max_steps < 0 and self.num_train_epochs == 0:
            yield "--num_train_epochs is 0; give a positive number, or --max_steps"
        if self.save_steps > 0 and self.keep_every_n_steps % self.save_steps:
            kept = f"--keep_every_n_steps {self.keep_every_n_steps}"
            yield f"{kept} is not a multiple of --save_steps {self.save_steps}: make it one"
        if self.metric_for_best_model and (self.eval_steps < 1 or self.save_steps % self.eval_steps):
            steps = f"make --save_steps ({self.save_steps}) a multiple of --eval_steps ({self.eval_steps})"
            yield f"--metric_for_best_model needs an evaluation at every checkpoint: {steps}"
        if self.on_spike == "stop" and self.max_skips != TrainArgs.max_skips:
            yield f"--max_skips {self.max_skips} has no effect with --on_spike stop; add --on_spike skip, or remove it"
        if self.optim == "adamw_8bit" and find_spec("bitsandbytes") is None:
            yield "--optim adamw_8bit: bitsandbytes is not installed; run: pip install bitsandbytes"
        steps, num_processes = self.profiled_steps, world_size * self.row_size
        if self.profile_steps and not steps:
            yield f"--profile_steps is {self.profile_steps}; give the first and the last step, such as 10-12"
        elif steps and 0 < self.max_steps < steps[-1]:
            yield f"--profile_steps {self.profile_steps} is beyond the last step, --max_steps {self.max_steps}"
        if missing := [rank for rank in self.profile_ranks if not 0 <= rank < num_processes]:
            yield f"--profile_ranks has {missing}; the {num_processes} processes are 0 to {num_processes - 1}"
        for tracker in self.trackers:
            if tracker not in ("tensorboard", "trackio", "wandb"):
                yield f"--report_to names {tracker!r}; known are none, tensorboard, trackio, wandb"
            elif find_spec(tracker) is None:
                yield f"--report_to {tracker}: it is not installed; run: pip install {tracker}"

    def schedule_problems(self, total_steps: int) -> Iterator[str]:
        """List problems of the schedule, one sentence each. `total_steps` below 1 is a number that is not known yet."""
        name, given = self.lr_scheduler_type, self.lr_scheduler_kwargs
        of_schedule = f"--lr_scheduler_type {name}"
        if self.min_lr_ratio and name not in ("linear", "cosine"):
            other = (
                "; give --lr_scheduler_kwargs min_lr_rate=SHARE" if "with_min_lr" in name else "; remove one of the two"
            )
            yield f"--min_lr_ratio {self.min_lr_ratio} has no effect with {of_schedule}{other}"
        if name not in THEIR_SCHEDULES or name == "constant":
            if given:
                yield f"--lr_scheduler_kwargs {', '.join(given)} has no effect with {of_schedule}; remove one of the two"
            return
        from transformers import get_scheduler  # seconds, which only these schedules need

        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.learning_rate)
        steps = total_steps if total_steps > 0 else 1000
        warmup = self.num_warmup_steps(steps)
        try:
            (share,) = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=given).lr_lambdas
            shares = [share(step) for step in (0, steps // 2, steps - 1, steps)]
        except (TypeError, ValueError, ArithmeticError) as error:
            yield f"{of_schedule} with --lr_scheduler_kwargs {given or '(none)'}: {error}"
            return
        falling = given.get("num_decay_steps", 0)
        if 0 < total_steps < warmup + falling:
            yield f"num_decay_steps={falling} and {warmup} steps of warm-up are more than the run's {total_steps}; lower one"
        elif not all(0 <= value < float("inf") for value in shares):
            yield f"{of_schedule} with --lr_scheduler_kwargs {given}: the learning rate would be negative or infinite"

    def batch_problems(self, world_size: int) -> Iterator[str]:
        """Check that the sequences of a step divide evenly over `world_size` shares of the data."""
        total, per_device = self.total_batch_size, self.per_device_train_batch_size
        step = per_device * world_size
        if total % step:
            nearest = " or ".join(str(n) for n in (total // step * step, (total // step + 1) * step) if n)
            size = max((n for n in range(1, per_device) if total % (n * world_size) == 0), default=0)
            smaller = f", or --per_device_train_batch_size {size}" if size else ""
            yield (
                f"--total_batch_size {total} is not a multiple of --per_device_train_batch_size {per_device} x "
                f"{readers(world_size, self.row_size)} = {step}; totals that work: {nearest}{smaller}"
            )

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        """Set the arguments that are left open, from the `saved` ones of the checkpoint to resume, or for a new run from {}.

        Returns:
            Reasons why this launch cannot continue with the saved values, one sentence each.
        """
        return []

    def file_problems(self, name: str, suffixes: Collection[str], files: Sequence[str] | None = None) -> list[str]:
        """List the files of an argument, or of `files`, that are missing or of an unknown kind, one sentence each."""
        problems, paths = [], getattr(self, name) if files is None else files
        for given in [paths] if isinstance(paths, str) else paths:
            file = Path(given)
            if "://" in str(given):
                problems.append(f"--{name} {given} is a URL, which is not read here; copy it to a disk")
            elif not file.is_file() and not self.is_elsewhere(file):
                problems.append(f"--{name} {file}: no such file{near_path(file)}")
            elif not file.name.endswith(tuple(suffixes)):
                recipe = READ_BY.get(file.suffix)
                other = f"; {recipe} reads {file.suffix}" if recipe else ""
                problems.append(f"--{name} {file}: its name must end with one of {', '.join(suffixes)}{other}")
            elif is_pointer(file):
                problems.append(f"--{name} {file} {IS_POINTER}")
        return problems

    def is_elsewhere(self, file: str | Path) -> bool:
        """Tell whether a file lies in a folder that this machine cannot see."""
        return bool(set(map(Path, self.elsewhere)) & set(Path(os.path.normpath(file)).parents))

    @property
    def base_model(self) -> str:
        """Name or folder of the pretrained model at which a run begins; empty if the run makes a new model."""
        return "" if getattr(self, "from_scratch", False) else getattr(self, "model_name_or_path", "")

    @property
    def has_boundaries(self) -> bool:
        """True if the batches say where documents begin. Some attention kernels need this."""
        return True

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the trained weights in memory."""
        return torch.bfloat16 if self.optim == "adamw_bf16_kahan" else torch.float32

    @property
    def trackers(self) -> list[str]:
        return [] if self.report_to == "none" else [name.strip() for name in self.report_to.split(",")]

    @property
    def profiled_steps(self) -> range:
        """Steps of --profile_steps; empty if there are none."""
        parts = self.profile_steps.split("-")
        numbers = [int(part) for part in parts if part.isdecimal()]
        return range(numbers[0], numbers[-1] + 1) if len(numbers) == len(parts) < 3 and numbers[0] else range(0)

    @classmethod
    def fixed_on_resume(cls) -> set[str]:
        """Return the names of the arguments that must not change when a checkpoint is continued; see `arg`."""

        def is_fixed(name: str) -> bool:
            is_shared = name in TrainArgs.__dataclass_fields__
            owners = declarations(TrainArgs if is_shared else cls, name)
            fixed = [meta["fixed"] for _, meta in owners if "fixed" in meta]  # the first class that declares it decides
            return bool(fixed) and (fixed[0] if is_shared else fixed[0] is not False)

        return {*cls.fixed, *(f.name for f in fields(cls) if is_fixed(f.name))}

    @property
    def longest_row(self) -> int:
        """Tokens of the longest rows of the run, where rows have a length; else 0."""
        return self.max_length or 0

    @property
    def sources(self) -> list[Any]:
        """Arguments of a run on each of its sources alone; see `data.mixture`."""
        return [self]

    def accumulation_steps(self, world_size: int) -> int:
        """Return the number of forward passes per optimizer step on one process."""
        return self.total_batch_size // (self.per_device_train_batch_size * world_size)

    def num_warmup_steps(self, total_steps: int) -> int:
        return round(self.warmup_steps if self.warmup_steps >= 1 else self.warmup_steps * total_steps)

    def values(self) -> dict[str, Any]:
        """Return all arguments by name. If the run begins at a pretrained model, leave out those named in `of_new_model`."""
        left_out = {*self.owned_elsewhere, *(getattr(self, "of_new_model", ()) if self.base_model else ())}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def changed(self) -> dict[str, Any]:
        """Return the arguments of `values` that differ from their defaults, by name."""
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        return {name: value for name, value in self.values().items() if value != defaults[name]}

    def save(self, path: Path) -> None:
        """Write the arguments as YAML; the file is itself a valid `--config`."""
        path.write_text(yaml.safe_dump(self.values(), sort_keys=False), encoding="utf-8")


Args = TypeVar("Args", bound=TrainArgs)


def parse(args_class: type[Args], argv: Sequence[str], world_size: int = 0) -> Args:
    """Return the arguments of a recipe, as `resolve` does.

    Raises:
        ConfigError: with every problem found, in the preset, the flags and their combination.
    """
    args, errors = resolve(args_class, argv, world_size)
    raise_problems("This run cannot start", errors)
    return args


def resolve(
    args_class: type[Args], argv: Sequence[str], world_size: int = 0, elsewhere: Sequence[str] = (), row_size: int = 0
) -> tuple[Args, list[str]]:
    """Return the arguments of a recipe, without those that are wrong, and every problem found.

    `world_size` is the number of shares of the data. If it or `row_size` is 0, it follows from the launcher's environment.
    `elsewhere` and `row_size` are fields of `TrainArgs`.
    """
    world_size, row_size = world_size or data_world_size(), row_size or ranks_a_row()
    parser = recipe_parser(args_class)
    if asked := {"-h", "--help", "--help=all"} & {*argv}:
        if is_first():
            everything = "--help=all" in asked or any(a in asked and b == "all" for a, b in pairwise(argv))
            print(help_text(args_class, parser, everything=everything))
        raise SystemExit(0)

    flags, stray = group_flags(argv)
    errors = [f"{token!r} does not belong to any flag" for token in stray]
    presets = [values for flag, values in flags if flag == "--config"]
    groups, script = [], getattr(sys.modules.get(args_class.__module__), "__file__", None)
    unread: list[str] = []  # what is wrong with the preset as a whole
    with collecting_errors(unread):
        groups += read_preset(presets, parser, script or "")
    errors += unread
    groups += [(flag, values, "on the command line") for flag, values in flags if flag != "--config"]
    # A flag after the preset overrides it.
    namespace, _, wrong = parse_groups(parser, args_class.owned_elsewhere, groups)
    if wrong and script:
        errors += [error for values in presets for file in values for error in shipped.preset_of_another(script, file)]
    errors += wrong
    args = args_class(**{f.name: getattr(namespace, f.name) for f in fields(args_class)})
    args.elsewhere, args.num_launched, args.row_size = elsewhere, world_size, row_size
    # Without the preset, values that it gives would be told as missing.
    return args, errors + ([] if unread else args.problems(world_size))
