"""Checkpoints that a kill cannot spoil, exact resume, and the export that `from_pretrained` loads.

`<output_dir>/checkpoint-<step>/` holds

    state/               model and optimizer shards, in the one format of torch.distributed.checkpoint
    rng-<rank>.pt        random generators of each rank
    args.yaml            resolved arguments; with the step they give the schedule and the position in the data
    data.json            what else the position in the data is, of data without a fixed order of rows
    metrics.jsonl        the records so far
    config.json, ...     configuration, tokenizer and generation config of the model
    adapter_config.json  of a model with adapters: then state/ holds nothing of the model besides
    model.safetensors    only under FULL_STATE_DICT; or adapter_model.safetensors
    complete.json        the marker, written last: step, world size, strategy, versions, size and checksum of every file

It is written beside its name, as `checkpoint-<step>.partial`, and renamed when the marker is on the disk. What has
no marker, or not the files that the marker lists, is no checkpoint: it is skipped with a warning. Nothing is read from
one before its checksum was verified. Training stands still only while the state is copied; a thread writes the copy.
docs/checkpoints.md says it for users.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
import yaml
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoConfig, GenerationConfig

import accelerate_recipes
from accelerate_recipes import adapters, lock, stop
from accelerate_recipes.args import ConfigError, TrainArgs, error_list
from accelerate_recipes.distributed import on_all_ranks, on_first_rank, strategy_name
from accelerate_recipes.metrics import is_evaluation
from accelerate_recipes.optim import WRAPPERS, local
from accelerate_recipes.state_reader import StatePlanner, StateReader
from accelerate_recipes.status import update_status

# Said whenever a single process saves, which is meant here, and dozens of times with FSDP1, which saves no other way.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
warnings.filterwarnings("ignore", "Please use DTensor instead and we are deprecating ShardedTensor")

MARKER = "complete.json"
EXPORT = "accelerate_recipes.json"  # in an export: its files, by which it is known when another is to take its place
PIN_EXACTLY = "pinned_max_round_threshold_mb:1"
NAME = re.compile(r"checkpoint-(\d+)")


def is_first_rank() -> bool:
    """Tell whether this is rank 0, before there is an Accelerator to ask."""
    return int(os.environ.get("RANK", 0)) == 0


def step_of(checkpoint: Path) -> int:
    return int(NAME.fullmatch(checkpoint.name)[1])


def checksum(file: Path) -> str:
    """XXH3 in 128 bits: finds damage at the speed of the disk; no protection against forgery."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def defect(checkpoint: Path) -> str | None:
    """Say why this directory is no complete checkpoint, or return None.

    Looks at names and sizes only, and at the content of what is read to choose a checkpoint: marker and arguments.
    """
    try:
        marker = read_marker(checkpoint)
    except FileNotFoundError:
        return f"it has no {MARKER}: the save was interrupted"
    except (OSError, ValueError) as error:
        return f"its {MARKER} is damaged: {error}"
    for name, entry in marker["files"].items():
        file = checkpoint / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"its {MARKER} names {name}, which is not in it"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
    return difference(checkpoint, "args.yaml", marker)


def damage(checkpoint: Path, part: int = 0, parts: int = 1) -> str | None:
    """Name a file of a complete checkpoint that changed since it was written, or None. Reads one part of the files."""
    marker = read_marker(checkpoint)
    names = sorted(marker["files"])[part::parts]
    return next(filter(None, (difference(checkpoint, name, marker) for name in names)), None)


def difference(checkpoint: Path, name: str, marker: dict) -> str | None:
    """Say how the content of a file differs from what was written, or None."""
    try:
        found = checksum(checkpoint / name)
    except OSError as error:  # what a disk cannot read any more
        return f"{name} cannot be read: {error}"
    wanted = marker["files"][name]["checksum"]
    return None if found == wanted else f"the checksum of {name} is {found} instead of {wanted}: the file is damaged"


def read_marker(checkpoint: Path) -> dict:
    """Read a checkpoint's marker.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: for one that was changed.
    """
    marker = json.loads((checkpoint / MARKER).read_text())
    if not isinstance(marker, dict) or "args.yaml" not in marker.get("files", ()):
        raise ValueError("it does not list the files of a checkpoint")
    found, written = checksum_of(marker), marker.pop("checksum", None)  # earlier versions wrote none
    if written not in (None, found):
        raise ValueError(f"its checksum is {found} instead of {written}")
    return marker


def write_marker(checkpoint: Path, marker: dict) -> None:
    (checkpoint / MARKER).write_text(json.dumps(marker | {"checksum": checksum_of(marker)}, indent=1))


def checksum_of(marker: dict) -> str:
    content = {name: value for name, value in marker.items() if name != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def candidates(output_dir: Path) -> list[Path]:
    """Directories that are named like a checkpoint, oldest first."""
    return sorted((path for path in output_dir.glob("checkpoint-*") if NAME.fullmatch(path.name)), key=step_of)


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Oldest first. Rank 0 warns about each directory that is named like a checkpoint but is not complete."""
    complete = []
    for checkpoint in candidates(output_dir):
        reason = defect(checkpoint)
        if reason is None:
            complete.append(checkpoint)
        elif is_first_rank():
            warnings.warn(f"skipping {checkpoint}: {reason}", stacklevel=2)
    return complete


def find_resume(args: TrainArgs) -> Path | None:
    """The checkpoint that the run begins with, or None for a fresh start; what it holds is not verified yet.

    `args.resume_from_checkpoint` says which. Where this very command has saved since it began, its newest: a command
    that is given again goes on.

    Raises:
        ConfigError: for a path that is no complete checkpoint, a checkpoint of other data or batches, and an
            output directory whose checkpoints or files the run would collide with.
    """
    output_dir = Path(args.output_dir)
    check_replaceable(output_dir / "export", args.base_model)
    present = complete_checkpoints(output_dir)
    if args.resume_from_checkpoint == "latest" or (present and not changed_arguments(present[-1], args)):
        chosen = present[-1] if present else None
    elif args.resume_from_checkpoint == "none":
        chosen = None
    else:
        chosen = Path(args.resume_from_checkpoint)
        if not chosen.is_dir() or not NAME.fullmatch(chosen.name):
            raise ConfigError(
                f"--resume_from_checkpoint {chosen}: no such checkpoint; give latest, none, or a path like outputs/run/checkpoint-500"
            )
        if reason := defect(chosen):
            raise ConfigError(f"--resume_from_checkpoint {chosen}: {reason}; give an older one, or latest")
    ahead = [p for p in present if step_of(p) > (step_of(chosen) if chosen else 0)]
    if ahead:
        raise ConfigError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint} would overwrite {ahead[-1]}, which is further on; "
            "give another --output_dir, or latest, or move that checkpoint away"
        )
    if chosen:
        check_arguments(chosen, args)
    return chosen


def agree_on_resume(accelerator: Accelerator, args: TrainArgs) -> Path | None:
    """`find_resume` as rank 0 sees it, with the checksums verified, each rank reading its share of the files.

    From here on the output directory is this run's, and what killed runs left unfinished there is removed. A damaged
    checkpoint is set aside as `<name>.damaged`, and the next older one taken.

    Raises:
        ConfigError: as `find_resume`, where the checkpoint that was asked for by its path is damaged, and where
            another run uses the output directory.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    output_dir = Path(args.output_dir)
    on_first_rank(lambda: make_own(output_dir))
    while True:
        chosen = on_first_rank(lambda: find_resume(args))
        if chosen is None:
            return None
        unseen = [i for i, reason in enumerate(on_all_ranks(defect(chosen))) if reason]
        if unseen:
            raise ConfigError(
                f"ranks {unseen} do not see {chosen} as rank 0 does; --output_dir must lie on a filesystem that all "
                "machines share"
            )
        reason = next(filter(None, on_all_ranks(damage(chosen, rank, world_size))), None)
        if reason is None:
            for name, (before, now) in changed_arguments(chosen, args).items():
                if name not in ("output_dir", "resume_from_checkpoint"):
                    accelerator.on_main_process(print)(
                        f"--{name} is now {now!r}; until step {step_of(chosen)} it was {before!r}"
                    )
            return chosen
        if chosen == Path(args.resume_from_checkpoint):
            raise ConfigError(f"--resume_from_checkpoint {chosen}: {reason}; give an older one, or latest")
        if rank == 0:
            warnings.warn(f"skipping {chosen}: {reason}", stacklevel=2)
        on_first_rank(partial(set_aside, chosen))


def make_own(output_dir: Path) -> None:
    """Take the output directory, and remove what killed runs left unfinished there.

    Raises:
        ConfigError: if another run has it, or it cannot be written to.
    """
    try:
        lock.take(output_dir)
    except OSError as error:
        names = ", ".join(map(str, leftovers(output_dir)))
        room = f"make room: {names} may be removed" if names else "make room, or give another"
        raise ConfigError(f"--output_dir {output_dir} cannot be written to: {error}; {room}") from None
    remove_leftovers(output_dir)


def set_aside(checkpoint: Path) -> None:
    """Rename what is no whole checkpoint, so that a new one can have its name."""
    names = (f"{checkpoint.name}.damaged{suffix}" for suffix in chain([""], (f"-{i}" for i in count(2))))
    checkpoint.rename(next(path for path in map(checkpoint.with_name, names) if not os.path.lexists(path)))


def leftovers(output_dir: Path) -> list[Path]:
    """List what killed runs left unfinished in their output directory; it is of no use."""
    found = [path for path in output_dir.glob("checkpoint-*.partial") if NAME.fullmatch(path.stem)]
    unfinished = unfinished_export(output_dir / "export")
    return [*found, unfinished] if (unfinished / EXPORT).is_file() else found


def remove_leftovers(output_dir: Path) -> None:
    for leftover in leftovers(output_dir):
        shutil.rmtree(leftover, ignore_errors=True)


def changed_arguments(checkpoint: Path, args: TrainArgs) -> dict[str, tuple]:
    """Arguments that differ from the checkpoint's, as name: (before, now)."""
    saved = yaml.safe_load((checkpoint / "args.yaml").read_text())
    return {
        name: (saved[name], value) for name, value in args.values().items() if name in saved and saved[name] != value
    }


def check_arguments(checkpoint: Path, args: TrainArgs) -> None:
    """Check that a checkpoint can be continued with these arguments.

    Raises:
        ConfigError: where a difference would change the model, or the order of the data under way.
    """
    fixed = args.fixed_on_resume()
    fatal = [
        f"--{name} was {before!r} and is now {now!r}; set it back, or start anew in another --output_dir"
        for name, (before, now) in changed_arguments(checkpoint, args).items()
        if name in fixed
    ]
    if fatal:
        raise ConfigError(error_list(f"{checkpoint} cannot be continued with these arguments", fatal))


class SaveError(RuntimeError):
    """A checkpoint could not be written; the older ones are intact."""


def is_of_the_disk(error: Exception) -> bool:
    """Tell whether an error means that a file could not be written: the tokenizers library has no name for that."""
    return isinstance(error, OSError | SafetensorError) or type(error) is Exception


class HostCopy(BlockingAsyncStager):
    """Copies a state dict into host memory, pinned for a GPU, and keeps that for the next copy.

    Getting the memory takes longer than the copy. torch 2.13's BlockingAsyncStager keeps it only where it can be pinned;
    its DefaultStager cannot copy the ShardedTensors of FSDP1.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.state_dict_cache is None:
            is_pinned = torch.cuda.is_available()
            if is_pinned:
                pin_what_is_asked_for()
            self.state_dict_cache = _create_cpu_state_dict(state_dict, pin_memory=is_pinned)
        return _copy_state_dict(state_dict, self.state_dict_cache)


def pin_what_is_asked_for() -> None:
    """Pin host memory of the size that is asked for, from 1 MiB on.

    torch 2.13 (CachingHostAllocatorImpl::allocate) rounds each tensor up to a power of two: a third more for a model of
    7B parameters. To set one setting sets the others back, so those of PYTORCH_ALLOC_CONF are given again.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    if PIN_EXACTLY not in settings:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [settings, PIN_EXACTLY])))


@dataclass
class Checkpointer:
    """Saves and restores all that a run consists of. Call its methods on every rank.

    Raises:
        ConfigError: for artifacts that could not be saved.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    args: TrainArgs
    artifacts: Sequence[Any]  # what has `save_pretrained`: configuration, tokenizer, generation config
    resumed_from: Path | None
    adapter: adapters.Adapter | None = None  # then only what is trained is saved
    newest: Path | None = None
    data_states: list[dict] = field(default_factory=list)  # of a resumed run: what each rank's data gave to `save`

    def __post_init__(self):
        for settings in (artifact for artifact in self.artifacts if isinstance(artifact, GenerationConfig)):
            try:
                settings.validate(strict=True)  # as its `save_pretrained` does; but now, not at the first checkpoint
            except ValueError as error:
                raise ConfigError(
                    f"the model's generation settings contradict each other; correct its generation_config.json: {error}"
                ) from None
        self.stager = HostCopy()
        # What is said in the background must not come between the collectives of training.
        self.group = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
        self.background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.in_flight: Future | None = None

    def save(self, step: int, data_state: dict) -> Path:
        """Write `checkpoint-<step>`, then remove those that are not to be kept. Returns its path.

        `data_state` is what this rank's data need besides the step to go on; `data_states` holds those of all ranks
        after `resume`.

        With `async_save` it returns as soon as the state is copied; `wait` waits for the rest. One save at a time: the
        one before is waited for first.

        Raises:
            SaveError: on all ranks, if one cannot write, now or in the background before, and for weights that are not
                finite. Older checkpoints are as they were, nothing is left half done.
        """
        self.wait()
        start = time.perf_counter()
        final = Path(self.args.output_dir) / f"checkpoint-{step}"
        unfinished = final.with_name(f"{final.name}.partial")
        data_states, broken = zip(*on_all_ranks((data_state, broken_weight(self.model)), self.group), strict=True)
        if name := next(filter(None, broken), None):
            raise SaveError(
                f"{final.name} is not saved: {name} holds NaN or infinity; lower --learning_rate, or look at what the last "
                f"steps logged. Last good checkpoint: {self.newest or 'none yet'}"
            )
        with self._all_or_none(unfinished):
            if self.accelerator.is_main_process:
                self._make_room(unfinished, final)
                shutil.copy(final.parent / "metrics.jsonl", unfinished)
                (unfinished / "data.json").write_text(json.dumps(data_states))
        model_state, optimizer_state = self._trained_state()
        settings = {"checkpoint_id": unfinished / "state", "process_group": self.group}
        state = {"model": model_state, "optimizer": optimizer_state}
        if self.args.async_save:
            write = dcp.async_save(state, async_stager=self.stager, **settings).result
            self.in_flight = self.background.submit(self._complete, step, start, unfinished, final, write, rng_state())
            self.in_flight.add_done_callback(ask_to_stop_if_failed)
        else:
            self._complete(step, start, unfinished, final, partial(dcp.save, state, **settings), rng_state())
        return final

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveError: if it failed.
        """
        if self.in_flight is not None:
            in_flight, self.in_flight = self.in_flight, None
            in_flight.result()

    def _complete(
        self, step: int, start: float, unfinished: Path, final: Path, write: Callable[[], Any], rng: dict
    ) -> None:
        """Everything of a save, begun at `start`, that training need not wait for. `write` writes model and optimizer."""
        rank = self.accelerator.process_index
        with self._all_or_none(unfinished):
            write()
            with (unfinished / f"rng-{rank}.pt").open("wb") as file:
                torch.save(rng, file)
            mine = [*(unfinished / "state").glob(f"__{rank}_*"), unfinished / f"rng-{rank}.pt"]
            described = [describe(file, unfinished) for file in mine]
        files = {name: entry for part in on_all_ranks(described, self.group) for name, entry in part}
        with self._all_or_none(unfinished):
            if rank == 0:
                self._finish(step, unfinished, final, files)
        self.newest = final
        longest = stop.save_took(time.perf_counter() - start)
        if rank == 0:
            update_status(final.parent, step=step, checkpoint=str(final), longest_save_seconds=round(longest, 2))
            try:
                remove_old(final.parent, self.args)
            except OSError as error:
                warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=2)

    @contextlib.contextmanager
    def _all_or_none(self, unfinished: Path) -> Iterator[None]:
        """Make a part of a save fail on all ranks if it fails on one: all raise SaveError, what was written is removed.

        A rank that fails by a mistake of the program raises that.
        """
        problems, failure = {}, None
        try:
            yield
        except dcp.CheckpointException as error:  # holds those of all ranks, each with its traceback
            problems = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        except Exception as error:  # whatever it is: the others must not wait, and what was written must not stay
            problems, failure = {self.accelerator.process_index: str(error)}, error
        found = on_all_ranks(problems, self.group)
        problems = {rank: problem for part in found for rank, problem in part.items()}
        if problems:
            if self.accelerator.is_main_process and not lock.is_lost():  # else it is the other run's
                shutil.rmtree(unfinished, ignore_errors=True)
            if failure is not None and not is_of_the_disk(failure):
                raise failure
            raise SaveError(
                f"{unfinished.with_suffix('')} could not be written: "
                f"{', '.join(f'rank {rank}: {problem}' for rank, problem in sorted(problems.items()))}. "
                f"Last good checkpoint: {self.newest or 'none yet'}"
            )

    def _make_room(self, unfinished: Path, final: Path) -> None:
        if lock.is_lost():
            raise OSError(f"another run has taken over {final.parent}")
        if final.exists():
            assert defect(final), f"{final} is complete"  # find_resume refuses such a run
            set_aside(final)  # damaged, or another program's: what is unfinished here has another name
        remove_leftovers(final.parent)
        if self.newest is not None and self.newest.is_dir():
            needed = sum(entry["size"] for entry in read_marker(self.newest)["files"].values())
            free = shutil.disk_usage(final.parent).free
            if free < needed:
                raise OSError(
                    f"{free / 2**30:.2f} GiB are free, the last checkpoint has {needed / 2**30:.2f} GiB; "
                    "make room, or lower --save_total_limit"
                )
        unfinished.mkdir(parents=True)

    def _finish(self, step: int, unfinished: Path, final: Path, files: dict[str, dict]) -> None:
        """Add what one rank writes, then the marker; `files` are those that the ranks have described."""
        self.args.save(unfinished / "args.yaml")
        for artifact in [*self.artifacts, *([self.adapter.config] if self.adapter else [])]:
            artifact.save_pretrained(unfinished)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.state_dict_type.name == "FULL_STATE_DICT":
            if self.adapter:
                write_adapter(unfinished, unfinished)
            else:
                write_safetensors(unfinished, unfinished, dtype=None, max_shard_size=2**63)
        for file in sorted(unfinished.rglob("*")):
            if file.is_file() and str(file.relative_to(unfinished)) not in files:
                name, entry = describe(file, unfinished)
                files[name] = entry
        for folder in (unfinished / "state", unfinished):
            fsync(folder)
        marker = {
            "step": step,
            "world_size": self.accelerator.num_processes,
            "strategy": strategy_name(self.accelerator),
            "mixed_precision": self.accelerator.mixed_precision,
            "param_dtype": str(self.args.param_dtype).removeprefix("torch."),
            "base_model": self.adapter.base if self.adapter else None,
            "versions": {
                module.__name__: module.__version__ for module in (accelerate_recipes, torch, accelerate, transformers)
            },
            "files": files,
        }
        write_marker(unfinished, marker)
        fsync(unfinished / MARKER)
        fsync(unfinished)
        unfinished.rename(final)
        fsync(final.parent)

    def resume(self) -> int:
        """Restore `resumed_from` and return its step; 0 where there is none.

        Model and optimizer are resharded to any number of ranks and any strategy. Learning rate, betas and decay
        are the command line's.
        """
        if self.resumed_from is None:
            return 0
        checkpoint = self.newest = self.resumed_from
        marker = read_marker(checkpoint)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if self.adapter:
            on_first_rank(lambda: check_base(checkpoint, marker, self.adapter.base))
        model_state, optimizer_state = self._trained_state()
        state = {"model": model_state, "optimizer": optimizer_state}
        check_shapes(checkpoint, model_state)
        dcp.load(state, storage_reader=StateReader(checkpoint / "state"), planner=StatePlanner())
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=self.adapter is None),  # what is frozen is not among it
        )  # fmt: skip
        if name := next(filter(None, on_all_ranks(broken_weight(self.model))), None):
            raise ConfigError(
                f"{checkpoint} is of no use: {name} holds NaN or infinity; move it away, and an older is taken"
            )
        for group, now in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(now)
        seek(self.scheduler, marker["step"])
        self.data_states = json.loads((checkpoint / "data.json").read_text())
        self.restore_rng()
        self.accelerator.on_main_process(print)(
            f"Resumed {checkpoint} (step {marker['step']}, saved by {marker['world_size']} x {marker['strategy']})",
            flush=True,
        )
        return marker["step"]

    def _trained_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """State of the model, or with adapters of those alone, and of the optimizer; sharded."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        if self.adapter:
            # Not StateDictOptions.ignore_frozen_params, which keeps the second name of a tied weight (torch 2.13).
            named = self.model.named_parameters()
            trained = [WRAPPERS.sub("", name) for name, parameter in named if parameter.requires_grad]
            model_state = {name: model_state[name] for name in trained}
        return model_state, optimizer_state

    def restore_rng(self) -> None:
        """Set the random generators to where they were at `resumed_from`: again, if something drew after `resume`."""
        marker = read_marker(self.resumed_from)
        if marker["world_size"] == self.accelerator.num_processes:
            file = self.resumed_from / f"rng-{self.accelerator.process_index}.pt"
            set_rng_state(torch.load(file, weights_only=True))
        else:  # no generator fits a rank that was not there: derive one from the step
            set_seed(self.args.seed + marker["step"], device_specific=True)


def broken_weight(model: nn.Module) -> str | None:
    """Name of a trained weight of which this rank holds a part that is not finite, or None."""
    held = {name: local(parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = {name: tensor for name, tensor in held.items() if tensor.numel()}
    # A maximum, in which NaN stays, takes no memory: a mask of all elements would.
    largest = [torch.linalg.vector_norm(tensor, float("inf")).float() for tensor in held.values()]
    are_finite = torch.isfinite(torch.stack(largest)).tolist() if held else []
    return next((WRAPPERS.sub("", name) for name, good in zip(held, are_finite, strict=True) if not good), None)


def check_base(checkpoint: Path, marker: dict, base: dict[str, str | None]) -> None:
    """Check that the adapters of a checkpoint belong to this model, as `adapters.base_of` describes it.

    Raises:
        ConfigError: if they were trained in another, by its weights, whatever its name.
    """
    before = marker.get("base_model")  # of a whole model there is none, and the names tell
    if before and "checksum" not in before:
        warnings.warn(
            f"{checkpoint} was saved by a version that looked at a part of the model's weights only: that {base['name']} is "
            f"the model which its adapters were trained in, {before['name']}, was not checked",
            stacklevel=2,
        )
    elif before and before["checksum"] != base["checksum"]:
        was, now = (f"{b['name']} ({b['revision'] or 'a folder'})" for b in (before, base))
        raise ConfigError(
            f"{checkpoint} holds adapters of {was}; {now} has other weights now. Bring those back that the adapters were trained "
            "in; or train anew, in another --output_dir"
        )


def check_shapes(checkpoint: Path, model_state: dict[str, torch.Tensor]) -> None:
    """Check that the checkpoint holds this model.

    Raises:
        ConfigError: naming the first parameter that differs, with both shapes.
    """
    saved = StateReader(checkpoint / "state").read_metadata().state_dict_metadata
    there = {name.removeprefix("model."): tuple(e.size) for name, e in saved.items() if name.startswith("model.")}
    here = {name: tuple(tensor.size()) for name, tensor in model_state.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise ConfigError(
                f"{checkpoint} holds another model: {name} has the shape {there.get(name, 'of nothing')} there and "
                f"{here.get(name, 'of nothing')} here; resume with the model it was saved from, or give another "
                "--output_dir"
            )


def ask_to_stop_if_failed(save: Future) -> None:
    """All ranks fail alike, but notice it at different steps: they stop together, and there `wait` says why."""
    if save.exception() is not None:
        stop.ask("a save that failed")


def remove_old(output_dir: Path, args: TrainArgs) -> None:
    """Remove the complete checkpoints that `args` do not keep."""
    present = complete_checkpoints(output_dir)
    keep = to_keep(present, args)
    for old in present:
        if old not in keep:
            # A removal that is interrupted must not leave something named like a checkpoint.
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))


def to_keep(checkpoints: Sequence[Path], args: TrainArgs) -> set[Path]:
    """The newest `save_total_limit`, each `keep_every_n_steps`, and the best; `checkpoints` are sorted by step."""
    keep = set(checkpoints[-args.save_total_limit :])  # all, where the limit is 0
    if args.keep_every_n_steps:
        keep |= {checkpoint for checkpoint in checkpoints if step_of(checkpoint) % args.keep_every_n_steps == 0}
    scores = {checkpoint: score(checkpoint, args) for checkpoint in checkpoints}
    measured = [checkpoint for checkpoint in checkpoints if scores[checkpoint] is not None]
    if measured:
        keep.add(max(measured, key=scores.get))
    return keep


def score(checkpoint: Path, args: TrainArgs) -> float | None:
    """Return `metric_for_best_model` at the checkpoint's step, with the sign that makes greater better.

    None: it was not measured, or is not finite, or the file that says it is damaged.
    """
    if not args.metric_for_best_model or difference(checkpoint, "metrics.jsonl", read_marker(checkpoint)):
        return None
    key = f"eval_{args.metric_for_best_model}"
    records = map(json.loads, (checkpoint / "metrics.jsonl").read_text().splitlines())
    values = [record[key] for record in records if key in record and record["step"] == step_of(checkpoint)]
    greater_is_better = args.greater_is_better
    if greater_is_better is None:
        greater_is_better = not args.metric_for_best_model.endswith("loss")
    if not values or not math.isfinite(values[-1]):
        return None
    return values[-1] if greater_is_better else -values[-1]


def seek(scheduler: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Put a fresh schedule where it is after `step` steps. It is a function of the step alone."""
    scheduler.last_epoch = step
    scheduler._step_count = step + 1
    for group, base_lr, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base_lr * factor(step)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def rng_state() -> dict[str, Any]:
    """State of every random generator of this process, loadable with `weights_only=True`."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.copy()), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def fsync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe(file: Path, root: Path) -> tuple[str, dict]:
    """Bring a file to the disk; returns its name and what the marker says of it."""
    fsync(file)
    return str(file.relative_to(root)), {"size": file.stat().st_size, "checksum": checksum(file)}


def export(
    checkpoint: Path,
    out: Path,
    description: str = "",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
) -> None:
    """Turn a checkpoint into a folder that `from_pretrained` loads, in one process, without the model.

    `dtype` of the weights defaults to the precision they were evaluated in: bf16 after a bf16 run, else fp32. Memory:
    one safetensors shard of `max_shard_size` (bytes, or such as "500MB").

    Of adapters it is a folder for PEFT; or with `merge_adapter` the whole model, of which each weight is read from the
    files of the one that they belong to, and the adapters themselves in `adapter/`.

    `out` may be an earlier export, whose place the new one takes when it is whole.

    Raises:
        ConfigError: for an `out` that holds anything else, and what these settings cannot make of the checkpoint.
        SaveError: where it cannot be written; nothing is left half done.
    """
    checkpoint, out = checkpoint.resolve(), out.resolve()
    if checkpoint in (out, *out.parents) or out in checkpoint.parents:
        raise ConfigError(f"{out} is, holds or lies in the checkpoint {checkpoint}; give another folder")
    arguments = yaml.safe_load((checkpoint / "args.yaml").read_text())
    base = arguments.get("model_name_or_path", "")
    check_replaceable(out, base)
    marker = read_marker(checkpoint)
    is_adapter = marker.get("base_model") is not None
    if merge_adapter and not is_adapter:
        raise ConfigError(f"{checkpoint} holds a whole model: there is no adapter to merge")
    if merge_adapter and arguments.get("load_in_4bit"):
        raise ConfigError(
            f"{checkpoint} holds adapters of a model in 4 bits: they do not fit its unrounded weights; PEFT loads them "
            "beside a model in 4 bits"
        )
    if is_adapter and dtype and not merge_adapter:
        raise ConfigError(f"{checkpoint} holds adapters, which stay in fp32; a dtype is for the merged model")
    if merge_adapter:
        check_base(checkpoint, marker, adapters.base_of(adapters.read_config(checkpoint)))
    unfinished = unfinished_export(out)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        list_files(unfinished)
        write_export(checkpoint, marker, unfinished, description, dtype, max_shard_size, merge_adapter)
        list_files(unfinished)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_of_the_disk(error):
            raise SaveError(f"{out} could not be written: {error}") from None
        raise
    check_replaceable(out, base)  # again: writing took its time
    try:
        remove_export(out)
        unfinished.rename(out)
    except OSError as error:
        raise SaveError(f"{unfinished} is whole, but cannot take its place: {error}; move it by hand") from None


def write_export(
    checkpoint: Path,
    marker: dict,
    out: Path,
    description: str,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    merge_adapter: bool,
) -> None:
    """Fill the folder of an export; see `export`."""
    is_adapter = marker.get("base_model") is not None
    left_out = {"data.json"}
    if is_adapter:  # each would make `from_pretrained` take the folder for the other
        left_out.add("adapter_config.json" if merge_adapter else "config.json")
    for name in marker["files"].keys() - left_out:
        is_artifact = "/" not in name and name.endswith((".json", ".jinja", ".model", ".txt"))
        if (is_artifact and "model.safetensors" not in name) or name.startswith("additional_chat_templates/"):
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copy(checkpoint / name, out / name)
    if merge_adapter:
        (out / "adapter").mkdir()
        shutil.copy(checkpoint / "adapter_config.json", out / "adapter")
    if is_adapter:
        write_adapter(checkpoint, out / "adapter" if merge_adapter else out)
    if merge_adapter or not is_adapter:
        if dtype is None:
            dtype = torch.bfloat16 if marker["mixed_precision"] == "bf16" else getattr(torch, marker["param_dtype"])
        write = write_merged if merge_adapter else write_safetensors
        write(checkpoint, out, dtype, max_shard_size)
        config = json.loads((out / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "README.md").write_text(model_card(checkpoint, description))


def unfinished_export(out: Path) -> Path:
    """Return the folder in which an export is written before it takes its place."""
    return out.with_name(f"{out.name}.partial")


def list_files(export: Path) -> None:
    """Write down what is in an export: no more than that is removed when another takes its place."""
    names = [str(path.relative_to(export)) for path in export.rglob("*")]
    (export / EXPORT).write_text(json.dumps({"files": sorted({*names, EXPORT})}, indent=1) + "\n")


def listed_files(folder: Path) -> set[str]:
    """List what an export has written into a folder; empty where none has."""
    try:
        return set(json.loads((folder / EXPORT).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def check_replaceable(out: Path, base_model: str) -> None:
    """Check that an export can be written there: into a new or empty folder, or in place of an earlier export.

    Raises:
        ConfigError: where something else would be removed, or the model that the run began with.
    """
    if base_model and Path(base_model).resolve() == out.resolve():
        raise ConfigError(f"{out} is the model that the run begins with; the export needs another folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; an export needs a folder")
    listed = listed_files(out)
    other = next((path for path in out.rglob("*") if str(path.relative_to(out)) not in listed), None)
    if other:
        raise ConfigError(f"{out} holds {other.name}, which no export wrote; move that away, or give another folder")
    unfinished = unfinished_export(out)
    if (
        unfinished.exists()
        and not (unfinished / EXPORT).exists()
        and (unfinished.is_file() or any(unfinished.iterdir()))
    ):
        raise ConfigError(f"{unfinished}, where the export is written first, holds something else; move that away")


def remove_export(out: Path) -> None:
    """Remove what is listed and there, the list last: a removal that is interrupted can be finished."""
    listed = listed_files(out)
    for path in sorted(out.rglob("*"), reverse=True):  # files before their folder
        if str(path.relative_to(out)) in listed - {EXPORT}:
            path.rmdir() if path.is_dir() else path.unlink()
    (out / EXPORT).unlink(missing_ok=True)
    if out.exists():
        out.rmdir()


def model_card(checkpoint: Path, description: str) -> str:
    """README.md of an export: what was trained, to what result, with which arguments."""
    arguments = (checkpoint / "args.yaml").read_text()
    marker = read_marker(checkpoint)
    if base := marker.get("base_model"):
        at = f" at commit {base['revision']}" if base["revision"] else ""
        description += f" Low-rank adapters of {base['name']}{at}, by PEFT."
    records = [json.loads(line) for line in (checkpoint / "metrics.jsonl").read_text().splitlines()]
    result = next((record for record in reversed(records) if is_evaluation(record)), {})
    measured = "".join(
        f"| {name.removeprefix('eval_')} | {value:.5g} |\n"
        for name, value in result.items()
        if name.startswith("eval_")
    )
    return f"""# {Path(yaml.safe_load(arguments)["output_dir"]).name}

{description} Trained with accelerate-recipes {marker["versions"]["accelerate_recipes"]}.

## Result on held-out data

| after {result.get("step", "no")} steps | |
|---|---|
{measured}
## Arguments

```yaml
{arguments}```
"""


def write_safetensors(checkpoint: Path, out: Path, dtype: torch.dtype | None, max_shard_size: int | str) -> None:
    """Write the model of `checkpoint/state` as safetensors, with an index if in several shards.

    Reads one shard of `max_shard_size` bytes at a time. `dtype` of floating-point weights; None: as saved.
    """
    model, tied = model_on_meta(checkpoint)
    tensors = {name: t for name, t in saved_tensors(checkpoint).items() if name not in tied}
    if missing := set(model.state_dict()) - tied - set(tensors):
        raise RuntimeError(f"{checkpoint} lacks {sorted(missing)}, which {type(model).__name__} needs")
    write_shards(tensors, partial(read_state, checkpoint), out, dtype, max_shard_size)


def write_merged(checkpoint: Path, out: Path, dtype: torch.dtype, max_shard_size: int | str) -> None:
    """Write the model that the adapters of `checkpoint/state` belong to, with them merged in.

    Weights are named as in its files, which are mapped into memory: of what is read, no more than a shard is kept.
    """
    config, adapter = adapters.read_config(checkpoint), read_adapter(checkpoint)
    base = adapters.base_tensors(config)
    model, tied = model_on_meta(checkpoint)
    tensors = {name: torch.empty_like(t, device="meta") for name, t in base.items() if name not in tied}
    weight_named = adapters.merged(model, base, adapter, config)

    def read(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weight_named(name).to(tensor.dtype).contiguous() for name, tensor in wanted.items()}

    write_shards(tensors, read, out, dtype, max_shard_size)


def write_adapter(checkpoint: Path, out: Path) -> None:
    """Write the adapters of `checkpoint/state` as PEFT does, in fp32."""
    tensors = {adapters.peft_name(name): tensor for name, tensor in read_adapter(checkpoint).items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def read_adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_state(checkpoint, saved_tensors(checkpoint))


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """List the tensors of the model in `checkpoint/state` by their names in it, on the meta device."""
    metadata = StateReader(checkpoint / "state").read_metadata().state_dict_metadata
    return {
        key.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for key, entry in metadata.items()
        if key.startswith("model.")
    }


def read_state(checkpoint: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the model in `checkpoint/state`, like those that are `wanted`."""
    # In the dtype to be written: the reader converts as it copies, without a second buffer.
    tensors = {f"model.{name}": torch.empty_like(tensor, device="cpu") for name, tensor in wanted.items()}
    dcp.load(tensors, storage_reader=StateReader(checkpoint / "state"), planner=StatePlanner(), no_dist=True)
    return {name: tensors[f"model.{name}"] for name in wanted}


def model_on_meta(checkpoint: Path) -> tuple[nn.Module, set[str]]:
    """The checkpoint's model without weights, and which of its names are other names of a tied weight."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    tied = set(model.all_tied_weights_keys)
    if not json.loads((checkpoint / "config.json").read_text()).get("tie_word_embeddings", True):
        # transformers 5.23 takes the output layer of every T5 for its embedding; see models.share_embedding.
        tied.discard("lm_head.weight")
    return model, tied


def write_shards(
    tensors: dict[str, torch.Tensor],
    read: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    out: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
) -> None:
    """Write `tensors`, which are on the meta device, as safetensors: `read` gives those of a shard, like what it is given."""
    tensors = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in plan.filename_to_tensors.items():
        # No name for the shard: it would live until the next one is read.
        save_file(read({name: tensors[name] for name in names}), out / filename, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
