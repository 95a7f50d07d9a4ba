"""A run from its start to its result. The `main` of every recipe goes through it:

    run = start(args)
    ...                                             tokenizer and data
    run.prepare(model, tokenizer, total_steps)
    records = train(run, loader, ...)               by `engine`
    finish(run, records, description, result_fn)

`Run` holds everything that belongs to the run.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes import ranks
from accelerate_recipes.adapters import Adapter, add_adapters
from accelerate_recipes.args import Args
from accelerate_recipes.attention import DOCUMENTS, choose, use_flash_3
from accelerate_recipes.base import described, is_decoder, open_base, untrained
from accelerate_recipes.checkpoint.check_export import ROWS, compare_rows
from accelerate_recipes.checkpoint.checkpointer import Checkpointer
from accelerate_recipes.checkpoint.export import export, exported_files
from accelerate_recipes.checkpoint.published import Published
from accelerate_recipes.checkpoint.resume import agree_on_resume
from accelerate_recipes.data import shown
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.distributed import make_accelerator, prepare
from accelerate_recipes.errors import printable
from accelerate_recipes.hub import cache
from accelerate_recipes.metrics import Flops, is_evaluation
from accelerate_recipes.models import tie_as_read
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.picture import Bars, Curves, draw_run
from accelerate_recipes.probes import mixers_in
from accelerate_recipes.ranks import on_first_rank, ranks_a_row
from accelerate_recipes.sharing import check_shared_masks

# The runs of this process, kept until it ends, where nothing is torn down (`recipe.leave`). If a run were freed when a
# recipe's `main` returns, gloo would wait for its threads while holding the interpreter's lock, which one of them may need:
# under DDP one run in eight hung this way (torch 2.13).
_runs: list["Run"] = []


@dataclass
class Run(Generic[Args]):
    """Everything that belongs to one run. `shard` fills the first of the later fields, `prepare` fills all."""

    args: Args
    accelerator: Accelerator
    resumed_from: Path | None = None  # the checkpoint that the run begins with

    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    adapter: Adapter | None = field(init=False, default=None)
    first_units: list[nn.Module] = field(init=False)  # modules that a forward pass gathers before it computes
    scheduler: torch.optim.lr_scheduler.LambdaLR = field(init=False)
    artifacts: list[Any] = field(init=False)  # configuration, tokenizer, ... to save and export
    checkpointer: Checkpointer = field(init=False)
    total_steps: int = field(init=False)
    flops: Flops | None = field(init=False, default=None)

    def __post_init__(self):
        _runs.append(self)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def data_rank(self) -> int:
        """Number of this process's share of the data: the same on all ranks that share rows."""
        return ranks.data_rank()

    @property
    def data_world_size(self) -> int:
        """Number of shares of the data: the ranks, or the groups of ranks that share rows."""
        return ranks.data_world_size()

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes and prints for all."""
        return self.accelerator.is_main_process

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def writes_rows(self) -> bool:
        """False where only the data are wanted, in the directory of another run, whose rows must stay."""
        return not (self.args.data_only and (self.output_dir / "status.json").exists())

    def print(self, text: str) -> None:
        """Print on rank 0. Control characters, which may come from the data, are escaped."""
        if self.is_first:
            print(printable(text), flush=True)

    def show_rows(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loaders: dict[str, HasRows],
        num_targets: np.ndarray | int | None = None,
        counts: dict[str, int] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        """Write the first rows of training and of evaluation, as they are trained, to rows.txt and rows.html.

        Call it on all ranks, when the data are ready and before the model is made. `loaders` are named after what they are
        for, such as "Training"; `num_targets` and `counts` are for a line above the rows, as `shown.count_line` takes them.
        Where the labels are classes, of rows or of tokens, `classes` are their names.
        A resumed run keeps the rows that it wrote before.

        Raises:
            ConfigError: if no row has a target.
            DataReady: if data are all that is wanted (--data_only).
        """
        if self.resumed_from and on_first_rank((self.output_dir / "rows.txt").exists):
            return
        folder = self.output_dir if self.writes_rows else None
        counted, text = on_first_rank(
            lambda: shown.first_rows(folder, tokenizer, loaders, num_targets, counts or {}, classes)
        )
        if counted:
            self.print(counted)
        if self.args.data_only:
            print(text, flush=True)  # a process alone; the text has colours
            raise DataReady

    def show_images(self, loaders: dict[str, HasRows], names: Sequence[str], processor: Any) -> None:
        """Draw the first images of training and of evaluation, as they are trained, in rows.png; `names` are the classes'.

        Call it where a recipe of texts calls `show_rows`.

        Raises:
            DataReady: if data are all that is wanted (--data_only).
        """
        file = self.output_dir / "rows.png"
        if self.writes_rows and not (self.resumed_from and on_first_rank(file.exists)):
            on_first_rank(lambda: shown.draw_first_images(file, loaders, names, processor))
        if self.args.data_only:
            self.print(f"The first images are in {file}")
            raise DataReady

    def shard(self, model: PreTrainedModel) -> None:
        """Put the adapters of --use_peft into a model, shard it as the strategy says, and make its optimizer."""
        self.adapter = self.adapter or add_adapters(model, self.args)
        self.model, self.optimizer, self.first_units = prepare(self.accelerator, model, self.args)

    def shard_reference(self, model: PreTrainedModel) -> nn.Module:
        """Shard a second model as the strategy says, which is never trained."""
        sharded, *_ = prepare(self.accelerator, model, self.args)
        return sharded.eval()

    def rest_of_base(self, model: PreTrainedModel) -> dict[str, str | None] | None:
        """Describe what the run does not train of the files that it begins with, and print it; call it on the first rank.

        Returns:
            What `base.described` does; None if the model holds all of them.
        """
        name = self.args.base_model
        if not name or not is_decoder(model):
            return None
        revision = cache.pinned(name).get("revision")
        rest = open_base(model, name, revision).rest
        if not rest:
            return None
        self.print(untrained(rest, name))
        return described(name, revision, rest)

    def release(self) -> None:
        """Free a sharded model, so that another one can be sharded."""
        del self.model, self.optimizer, self.first_units
        self.adapter = None
        self.accelerator.free_memory()

    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | BaseImageProcessor,
        total_steps: int,
        flops_fn: Callable[[PreTrainedModel], Flops] | None = None,
    ) -> None:
        """Make everything that is trained, saved and restored, from a model that is not sharded yet.

        `flops_fn(model)` counts the training FLOPs per target token, for MFU.

        Raises:
            ConfigError: for adapters, a strategy or settings that do not fit the model.
        """
        if ranks_a_row() > 1:
            check_shared_masks(model.config, model.config._attn_implementation, getattr(self.args, "max_length", 0))
        tie_as_read(model)  # a recipe may load its model by itself
        self.adapter = self.adapter or add_adapters(model, self.args)
        # A pretrained model may be loaded as another class, with a new head.
        model.config.architectures = [type(model).__name__]
        rest = on_first_rank(lambda: self.rest_of_base(model))
        generation = [model.generation_config] if model.can_generate() else []
        self.artifacts = copy.deepcopy([model.config, *generation])
        if self.is_first:  # it is the last, since it rewrites what the others have written
            self.artifacts.append(Published(self.artifacts[0], tokenizer))
        self.flops = flops_fn(model) if flops_fn else None
        self.shard(model)
        name = getattr(self.args, "attn_implementation", "")
        attention, why = choose(
            name, model.config, self.args.param_dtype, self.args.has_boundaries, is_shared=ranks_a_row() > 1
        )
        if why:
            self.print(f"Attention: {attention}, since {why}")
        is_packed = getattr(self.args, "document_mask", False) or getattr(self.args, "packing", False)
        if is_packed and (mixers := mixers_in(model)):
            self.print(f"Packed rows: {', '.join(sorted(mixers))} computes each document by itself")
        if attention == DOCUMENTS and use_flash_3():
            self.print("Attention: by FlashAttention 3")
        self.total_steps = total_steps
        self.scheduler = make_scheduler(self.optimizer, self.args, total_steps)
        self.checkpointer = Checkpointer(
            self.accelerator,
            self.model,
            self.optimizer,
            self.scheduler,
            self.args,
            self.artifacts,
            self.resumed_from,
            self.adapter,
            self.adapter.base if self.adapter else rest,
        )


class DataReady(Exception):
    """Raised when the data are ready, if --data_only asks for no more."""


def start(args: Args) -> Run[Args]:
    """Begin a run: start the process group, and agree on the checkpoint to resume.

    With --data_only there is no process group and no checkpoint: such a run only reads data, in one process.

    From here on the output directory belongs to this run.

    Raises:
        ConfigError: for a launch that cannot work, and a checkpoint or an output directory that the run cannot use.
    """
    if args.data_only:
        args.settle({})
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # its mesh would have more processes than one
        return Run(args, Accelerator(cpu=True, mixed_precision="no"))  # fp8 would ask for packages
    accelerator = make_accelerator(args)
    return Run(args, accelerator, agree_on_resume(accelerator, args))


class Result(NamedTuple):
    """Lines of text that say what a run has reached, and bars and further curves for its picture."""

    text: str
    bars: Bars | None = None
    curves: Sequence[Curves] = ()


def before_and_after(before: dict, after: dict) -> Result:
    """Write one line for each measure, with its value before and after training."""
    names = [name for name in after if name.startswith("eval_") and name in before]
    lines = [
        f"Held out, {name.removeprefix('eval_')}: before {before[name]:.4f}, after {after[name]:.4f}" for name in names
    ]
    return Result("\n".join(lines))


def finish(
    run: Run, records: list[dict], description: str, result_fn: Callable[[dict, dict], Result] = before_and_after
) -> None:
    """Draw, export and print the result of a run that has trained to its end; push the export if --push_to_hub is set.

    `description` begins the model card. `result_fn` is called on rank 0, with the first and the last record of an
    evaluation; by default everything that was measured is printed.

    Raises:
        ConfigError: if the export does not render what was trained, and if the push fails, with the command that repeats
            it; everything else is done by then.
    """
    out = run.output_dir / "export"
    if run.is_first:
        before, *_, after = filter(is_evaluation, records)
        result = result_fn(before, after)
        places = f"Model: {out}"
        if result.bars:
            draw_run(run.output_dir / "result.png", records, result.bars, result.curves)
            places += f"   picture: {run.output_dir / 'result.png'}"
        settings = {"merge_adapter": run.args.merge_adapter, "text_only": run.args.text_only_export}
        export(run.checkpointer.newest, out, description, **settings)
        run.print(f"{result.text}\n{places}")
        if (run.output_dir / ROWS).exists():
            run.print(compare_rows(out, run.output_dir))
    run.accelerator.end_training()
    if run.is_first and run.args.push_to_hub:  # the other ranks do not wait for it
        from accelerate_recipes.hub.push import push  # it imports `datasets`, which training does not need

        push(out, exported_files(out), run.args.push_to_hub)
