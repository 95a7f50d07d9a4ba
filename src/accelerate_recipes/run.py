"""Run of a recipe, from its start to its result. The `main` of every recipe has these steps:

    run = start(args)
    ...                                             tokenizer and data
    run.prepare(model, tokenizer, total_steps)
    records = train(run, loader, ...)               by `engine`
    finish(run, records, description, result_fn)

`Run` holds everything that belongs to the run.
"""

from __future__ import annotations

import copy
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from accelerate_recipes import ranks
from accelerate_recipes.args import Args
from accelerate_recipes.checkpoint.base_form import BaseForm
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.checkpoint.mirror import begin_copies, make_whole
from accelerate_recipes.checkpoint.resume import agree_on_resume
from accelerate_recipes.data import shown
from accelerate_recipes.data.prepared import same_on_machines
from accelerate_recipes.disk import read_json
from accelerate_recipes.distributed import make_accelerator, prepare, strategy_name
from accelerate_recipes.hub import cache
from accelerate_recipes.life.picture import Chart, Curves, draw_run, spoken
from accelerate_recipes.life.status import begin_attempt
from accelerate_recipes.metrics import Flops, device_name, is_evaluation
from accelerate_recipes.models import adapters, attention, loading, probes
from accelerate_recipes.models.base import described, is_decoder, name_untrained, open_base
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.upstream import library_versions

if TYPE_CHECKING:
    from accelerate_recipes.checkpoint.checkpointer import Checkpointer

# Keeps the runs of this process until `recipe.leave` ends it without teardown. If a run were freed when a recipe's `main`
# returns, gloo would hold the interpreter's lock while it waits for its threads, and one of these may need that lock: under
# DDP one run in eight hung this way (torch 2.13).
_runs: list[Run] = []


@dataclass
class Run(Generic[Args]):
    """Everything that belongs to one run. `shard` fills the fields from `model` to `first_units`, `prepare` fills all."""

    args: Args
    accelerator: Accelerator
    resumed_from: Path | None = None  # checkpoint at which the run begins

    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    adapter: adapters.Adapter | None = field(init=False, default=None)
    first_units: list[nn.Module] = field(init=False)  # modules whose parameters a forward pass gathers first
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
        """Index of this process's share of the data. Ranks that share rows have the same index."""
        return ranks.data_rank()

    @property
    def data_world_size(self) -> int:
        """Number of shares of the data: the number of ranks, or of groups of ranks that share rows."""
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
        """False for --data_only in the directory of another run, whose rows.txt must stay."""
        return not (self.args.data_only and (self.output_dir / "status.json").exists())

    def print(self, text: str) -> None:
        """Print on rank 0; see `print_first`."""
        ranks.print_first(text)

    def show_rows(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loaders: dict[str, shown.HasRows],
        num_targets: np.ndarray | int | None = None,
        counts: dict[str, int] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        """Write the first rows of training and of evaluation, as the model will get them, to rows.txt and rows.html.

        Call this on all ranks, when the data are ready and before `prepare`. The keys of `loaders` are headings,
        such as "Training". `num_targets` and `counts` give the numbers of a line above the rows; see `shown.count_line`.
        If the labels are classes, of rows or of tokens, `classes` holds their names. A resumed run keeps the files that
        it wrote before.

        Raises:
            ConfigError: if no row has a target, and if a resumed run has other data than its checkpoint.
            DataReady: with --data_only, when the files are written.
        """
        self.check_data(loaders)
        if self.resumed_from and ranks.on_first_rank((self.output_dir / "rows.txt").exists):
            return
        folder = self.output_dir if self.writes_rows else None
        counted, text = ranks.on_first_rank(
            lambda: shown.first_rows(folder, tokenizer, loaders, num_targets, counts or {}, classes)
        )
        for line in [*filter(None, [counted]), *ranks.on_first_rank(lambda: shown.unknown_lines(tokenizer, loaders))]:
            self.print(line)
        if self.args.data_only:
            self.print(text)
            raise DataReady

    def show_images(self, loaders: dict[str, shown.HasRows], names: Sequence[str], processor: Any) -> None:
        """Draw the first images of training and evaluation in rows.png, as the model will get them. `names` are class names.

        Call this where a recipe for texts calls `show_rows`.

        Raises:
            ConfigError: if a resumed run has other data than its checkpoint.
            DataReady: with --data_only, when the file is written.
        """
        self.check_data(loaders)
        file = self.output_dir / "rows.png"
        if self.writes_rows and not (self.resumed_from and ranks.on_first_rank(file.exists)):
            ranks.on_first_rank(lambda: shown.draw_first_images(file, loaders, names, processor))
        if self.args.data_only:
            self.print(f"The first images are in {file}")
            raise DataReady

    def check_data(self, loaders: dict[str, shown.HasRows]) -> None:
        """Raise ConfigError, before a model is loaded, if a resumed run has other data than its checkpoint."""
        training = next((loader for name, loader in loaders.items() if name.startswith("Training")), None)
        if self.resumed_from and hasattr(training, "check"):
            training.check(read_json(self.resumed_from / "data.json"))

    def shard(self, model: transformers.PreTrainedModel) -> None:
        """Add the adapters of --use_peft to a model, shard it as the strategy says, and make its optimizer."""
        self.adapter = self.adapter or adapters.add_adapters(model, self.args)
        if not self.adapter:
            loading.keep_frozen(model)
        self.model, self.optimizer, self.first_units = prepare(self.accelerator, model, self.args)

    def shard_reference(self, model: transformers.PreTrainedModel) -> nn.Module:
        """Shard a second model, which is never trained, as the strategy says. It keeps its dtype."""
        sharded, *_ = prepare(self.accelerator, model.requires_grad_(False), self.args)
        return sharded.eval()

    def rest_of_base(self, model: transformers.PreTrainedModel) -> dict[str, str | None] | None:
        """Describe what the run does not train of the files that it begins with, and print it; call it on all ranks.

        Returns:
            What `base.described` does; None if the model holds all of them.
        """
        name = self.args.base_model
        if not name or not is_decoder(model):
            return None
        revision = cache.pinned(name).get("revision")
        if not (rest := open_base(model, name, revision).rest):
            return None
        self.print(name_untrained(rest, name))
        return described(name, revision, rest, by_all=True)

    def release(self) -> None:
        """Free a sharded model, so that another one can be sharded."""
        del self.model, self.optimizer, self.first_units
        self.adapter = None
        self.accelerator.free_memory()

    def prepare(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | transformers.BaseImageProcessor,
        total_steps: int,
        flops_fn: Callable[[transformers.PreTrainedModel], Flops] | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Make everything that is trained, saved and restored, from a model that is not sharded yet.

        `flops_fn(model)` counts the training FLOPs per target token, for MFU. Checkpoints and export hold `files` too.

        Raises:
            ConfigError: if adapters, strategy or settings do not fit the model.
        """
        args, is_shared = self.args, ranks.ranks_a_row() > 1
        if is_shared:
            probes.check_shared_masks(model.config, model.config._attn_implementation, args.longest_row)
        weight = getattr(model.config, "router_aux_loss_coef", 0)
        has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
        if weight and has_experts and probes.own_balance(model.config) is None:
            self.print(f"Experts are not balanced: {type(model).__name__} computes no loss for that")
        loading.tie_as_read(model)  # again, since a recipe may load its model without `models.loading`
        self.adapter = self.adapter or adapters.add_adapters(model, args)
        # A pretrained model may be loaded as another class, with a new head.
        model.config.architectures = [type(model).__name__]
        rest = self.rest_of_base(model)
        generation = [model.generation_config] if model.can_generate() else []
        self.artifacts = copy.deepcopy([model.config, *generation])
        # BaseForm comes last, since it replaces files that the others have written.
        ranks.on_first_rank(lambda: self.artifacts.append(BaseForm(self.artifacts[0], tokenizer, files)))
        self.flops = flops_fn(model) if flops_fn else None
        self.shard(model)
        kernel, why = attention.choose(
            args.attn_implementation, model.config, args.param_dtype, args.has_boundaries, is_shared
        )
        if why:
            self.print(f"Attention: {kernel}, since {why}")
        if (args.document_mask or args.packing) and (mixers := probes.mixers_in(model)):
            self.print(f"Packed rows: each document is computed by itself in {', '.join(sorted(mixers))}")
        if kernel == DOCUMENTS and attention.use_flash_3():
            self.print("Attention: by FlashAttention 3")
        self.total_steps = total_steps
        self.scheduler = make_scheduler(self.optimizer, args, total_steps)
        trained = (self.accelerator, self.model, self.optimizer, self.scheduler)
        base = self.adapter.base if self.adapter else rest
        # The part of torch that it imports takes long.
        from accelerate_recipes.checkpoint.checkpointer import Checkpointer

        self.checkpointer = Checkpointer(*trained, args, self.artifacts, self.resumed_from, self.adapter, base)


class DataReady(Exception):
    """Raised when the data are ready and --data_only asks for no more."""


def start(args: Args) -> Run[Args]:
    """Begin a run: start the process group, and agree on the checkpoint to resume.

    From here on the output directory belongs to this run. A run with --data_only has no process group and no checkpoint:
    it only reads data, in one process.

    Raises:
        ConfigError: for a launch that cannot work, and for a checkpoint or an output directory that the run cannot use.
    """
    if args.data_only:
        args.settle({})
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # its mesh needs several processes
        return Run(args, Accelerator(cpu=True, mixed_precision="no"))  # fp8 would ask for packages
    accelerator = make_accelerator(args)
    if name := args.base_model:
        is_folder = os.path.isdir(name)
        same_on_machines("a folder" if is_folder else cache.revision("model", name), f"the commit of {name}")
    run = Run(args, accelerator, agree_on_resume(accelerator, args))
    begin_copies()
    if run.is_first:
        device = device_name(accelerator.device).removeprefix("this ")
        facts = {
            "recipe": Path(sys.argv[0]).stem,
            "launch": f"{strategy_name(accelerator)}, {run.world_size} x {device}",
            "host": socket.gethostname(),
            "versions": library_versions(),
            "changed": args.changed(),
        }
        step = step_of(run.resumed_from) if run.resumed_from else 0
        begin_attempt(run.output_dir, step, **facts)
    return run


class Result(NamedTuple):
    """Result of a run as lines of text, with a chart and further curves for its picture."""

    text: str
    chart: Chart | None = None
    curves: Sequence[Curves] = ()


def before_and_after(before: dict, after: dict) -> Result:
    """Write one line for each measure, with its value before and after training; a panel shows each but the loss."""
    names = [name for name in after if name.startswith("eval_") and name in before]
    lines = [
        f"Held out, {name.removeprefix('eval_')}: before {before[name]:.4f}, after {after[name]:.4f}" for name in names
    ]
    sources = [match[1] for name in names if (match := re.fullmatch("eval_(.+)_loss", name))]
    panels = [Curves({"held out": name}, spoken(name).capitalize()) for name in names if not name.endswith("_loss")]
    shares = {}
    for name in sources:
        shares |= {name: f"{name}_share", f"{name}, asked": f"{name}_asked"}
    panels += [
        Curves({name: f"{name}_loss" for name in sources}, "Loss by source"),
        Curves({name: f"eval_{name}_loss" for name in sources}, "Loss by source, held out"),
        Curves(shares, "Share of the rows"),
    ]
    return Result("\n".join(lines), curves=panels)


def finish(
    run: Run, records: list[dict], description: str, result_fn: Callable[[dict, dict], Result] = before_and_after
) -> None:
    """Draw, export and print the result of a run that has trained to its end. `run_recipe` pushes the export.

    `description` begins the model card. `result_fn(first, last)` is called on rank 0 with the first and the last record
    of an evaluation; the default prints all measures.
    """
    out = run.output_dir / "export"
    if run.is_first:
        before, *_, after = filter(is_evaluation, records)
        result = result_fn(before, after)
        picture = run.output_dir / "result.png"
        if find_spec("matplotlib"):
            draw_run(picture, records, result.chart, result.curves)
        else:
            picture = "none, since matplotlib is not installed"
        args, newest = run.args, run.checkpointer.newest
        make_whole(newest)
        export(newest, out, description, merge_adapter=args.merge_adapter, text_only=args.text_only_export)
        report = run.output_dir / "report.html"  # which `recipe` writes when the run has ended
        run.print(f"{result.text}\nModel: {out}   picture: {picture}   report: {report}")
        if newest == run.checkpointer.resumed_from:
            done = f"all {after['step']} steps were done before; for another run, give another --output_dir"
            run.print(f"Nothing was trained: {done}")
    run.accelerator.end_training()
