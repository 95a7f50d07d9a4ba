"""Checkpointer of a run: saves the run in the background, and restores it exactly on any number of ranks."""

import contextlib
import itertools
import json
import shutil
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import GenerationConfig, PreTrainedConfig

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint import files, mirror
from accelerate_recipes.checkpoint.files import SaveError
from accelerate_recipes.checkpoint.state_reader import load_state
from accelerate_recipes.checkpoint.weight_files import saved_tensors, write_adapter, write_safetensors
from accelerate_recipes.disk import fsync, read_json, read_json_lines, readable
from accelerate_recipes.distributed import strategy_name
from accelerate_recipes.errors import ConfigError, first_line
from accelerate_recipes.life import lock, status, stop
from accelerate_recipes.models import adapters
from accelerate_recipes.models.pretrained import check_generation_config, model_checksum
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.optim import local_shard
from accelerate_recipes.ranks import is_first, on_all_ranks, on_first_rank, print_first, rng_state, set_rng_state
from accelerate_recipes.upstream import library_versions, load_plain

PIN_EXACTLY = "pinned_max_round_threshold_mb:1"


class HostCopy(BlockingAsyncStager):
    """Stager that copies a state dict into host memory, pinned for a GPU, and keeps the memory for the next copy.

    To allocate the memory takes longer than to copy. BlockingAsyncStager of torch 2.13 keeps the memory only if it can
    be pinned, and DefaultStager cannot copy the ShardedTensors of FSDP1.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.state_dict_cache is None:
            is_pinned = torch.cuda.is_available()
            if is_pinned:
                pin_what_is_asked_for()
            self.state_dict_cache = _create_cpu_state_dict(state_dict, pin_memory=is_pinned)
        return _copy_state_dict(state_dict, self.state_dict_cache)


def pin_what_is_asked_for() -> None:
    """Make torch pin host memory of exactly the requested size, from 1 MiB on.

    torch 2.13 (CachingHostAllocatorImpl::allocate) rounds each tensor up to a power of two: a third more memory for a
    model of 7B parameters. Setting one option resets all others, so those of PYTORCH_ALLOC_CONF are set again.
    """
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # torch 2.11, which does not have the setting either
        return
    settings = torch._C._accelerator_getAllocatorSettings()
    if PIN_EXACTLY not in settings:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [settings, PIN_EXACTLY])))


@dataclass
class Checkpointer:
    """Saves and restores everything that a run consists of. Call its methods on every rank.

    Raises:
        ConfigError: for artifacts that could not be saved.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    args: TrainArgs
    artifacts: Sequence[Any]  # objects with `save_pretrained`: configuration, tokenizer, generation config
    resumed_from: Path | None
    adapter: adapters.Adapter | None = None  # if given, only trained parameters are saved
    base: dict[str, str | None] | None = None  # what an export takes the rest from; see `base.described`
    newest: Path | None = None
    kept: set[int] | None = None  # steps whose checkpoints the last save has kept
    data_states: list[dict] = field(default_factory=list)  # after `resume`: the `data_state` of each rank

    def __post_init__(self):
        for settings in (artifact for artifact in self.artifacts if isinstance(artifact, GenerationConfig)):
            # `save_pretrained` checks this too, but only at the first checkpoint.
            check_generation_config(settings, self.args.base_model)
        self.model_checksum = model_checksum(self.args.base_model) if is_first() and self.args.base_model else None
        self.stager = HostCopy()
        # A group of its own: collectives of a save in the background must not mix with those of training.
        self.group = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
        self.background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.in_flight: Future | None = None

    def save(self, step: int, data_state: dict) -> Path:
        """Write `checkpoint-<step>`, then remove the checkpoints that are not to be kept. Returns its path.

        `data_state` is what this rank's data need, besides the step, to continue. After `resume`, `data_states` holds
        those of all ranks.

        With `async_save`, this returns as soon as the state is copied to host memory; `wait` waits for the rest. There
        is one save at a time: a new save first waits for the previous one.

        Raises:
            SaveError: on all ranks, if one of them cannot write, now or in the previous background save, or if weights are
                not finite. Older checkpoints are unchanged, and no unfinished directory stays.
        """
        self.wait()
        start = time.perf_counter()
        final = Path(self.args.output_dir) / f"checkpoint-{step}"
        data_states, broken = zip(*on_all_ranks((data_state, broken_weight(self.model)), self.group), strict=True)
        if name := next(filter(None, broken), None):
            remedy = "lower --learning_rate, or look at what the last steps logged"
            raise SaveError(f"{final.name} is not saved: {name} holds NaN or infinity; {remedy}. {self.last_good()}")
        # A save goes into `<name>.partial`, which no run resumes. A rename gives it its final name only when all files, and
        # the marker with their checksums, are on the disk. So a kill leaves a complete checkpoint or an unfinished name.
        with self._all_or_none(final):
            if mirror.is_first_of_disk():
                self._begin(final, data_states)
        # With `async_save`, torch copies the state now and writes it in a thread of its own. Our thread waits for this, then
        # completes the checkpoint. The random state is read now too: the next step changes it.
        settings = {"checkpoint_id": files.unfinished(final) / "state", "process_group": self.group}
        state, rng = self._trained_state(), rng_state()
        if self.args.async_save:
            write = dcp.async_save(state, async_stager=self.stager, **settings).result
            self.in_flight = self.background.submit(self._complete, final, start, write, rng)
            self.in_flight.add_done_callback(ask_to_stop_if_failed)
        else:
            self._complete(final, start, partial(dcp.save, state, **settings), rng)
        return final

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveError: if the save failed.
        """
        if self.in_flight is not None:
            in_flight, self.in_flight = self.in_flight, None
            in_flight.result()

    def _complete(self, final: Path, start: float, write: Callable[[], Any], rng: dict) -> None:
        """Do the part of a save that training need not wait for. The save began at `start`; `write` writes the state."""
        rank, unfinished = self.accelerator.process_index, files.unfinished(final)
        with self._all_or_none(final):
            write()
            with (unfinished / f"rng-{rank}.pt").open("wb") as file:
                torch.save(rng, file)
            # Each rank syncs and checksums the files that it wrote: DCP names them after the rank.
            mine = [*(unfinished / "state").glob(f"__{rank}_*"), unfinished / f"rng-{rank}.pt"]
            described = [files.describe(file, unfinished) for file in mine]
        # This collective is also a barrier: all ranks have written their files before rank 0 writes the marker.
        entries = dict(ChainMap(*itertools.chain(*on_all_ranks(described, self.group))))
        with self._all_or_none(final):
            marker = self._finish(final, entries) if rank == 0 else None
        if mirror.has_own_disks():
            marker = on_first_rank(lambda: marker, self.group)
            with self._all_or_none(final):
                if mirror.is_first_of_disk() and rank:
                    files.publish(final, marker)
        self.newest = final
        longest = stop.save_took(time.perf_counter() - start)
        if rank == 0:
            step = files.step_of(final)
            status.update_status(final.parent, step=step, checkpoint=str(final), longest_save_seconds=round(longest, 2))
        try:
            self.kept = on_first_rank(lambda: steps_to_keep(final.parent, self.args), self.group)
            if mirror.is_first_of_disk():
                is_read = files.noted(final.parent).get("reading") if self.args.mirror else None
                remove_old(final.parent, self.kept, is_read)
        except OSError as error:
            if mirror.is_first_of_disk():
                warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=2)

    @contextlib.contextmanager
    def _all_or_none(self, final: Path) -> Iterator[None]:
        """Make a part of a save fail on all ranks if it fails on one: all raise SaveError, and written files are removed.

        A rank that fails because of a bug raises its own error.
        """
        problems, failure = {}, None
        try:
            yield
        except dcp.CheckpointException as error:  # holds the errors of all ranks, with tracebacks
            problems = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        except Exception as error:  # any error: the other ranks must not wait, and written files must not stay
            problems, failure = {self.accelerator.process_index: str(error)}, error
        problems = dict(ChainMap(*on_all_ranks(problems, self.group)))
        if problems:
            if mirror.is_first_of_disk() and not lock.is_lost():  # else another run owns the directory
                shutil.rmtree(files.unfinished(final), ignore_errors=True)
            if failure is not None and not files.is_of_the_disk(failure):
                raise failure
            reasons = ", ".join(f"rank {rank}: {problem}" for rank, problem in sorted(problems.items()))
            raise SaveError(f"{final} could not be written: {reasons}. {self.last_good()}")

    def last_good(self) -> str:
        """Write a sentence that names the last good checkpoint."""
        return f"Last good checkpoint: {self.newest or 'none yet'}"

    def _begin(self, final: Path, data_states: Sequence[dict]) -> None:
        """Make the unfinished directory, if there is room, with the files that are known before the state."""
        if lock.is_lost():
            raise OSError(f"another run has taken over {final.parent}")
        if final.exists():
            assert files.defect(final), f"{final} is complete"  # settle_resume refuses such a run
            files.set_aside(final)  # damaged, or written by another program; an unfinished checkpoint has another name
        files.remove_leftovers(final.parent)
        # The next checkpoint will be as large as the last one. Without room, fail before anything is written.
        if self.newest is not None and self.newest.is_dir():
            needed = files.total_size(self.newest)
            if self.args.mirror and shutil.disk_usage(final.parent).free < needed:
                keep = steps_to_keep(final.parent, self.args) if self.kept is None else self.kept
                remove_old(final.parent, keep)  # the mirror then stops reading it
                until = time.monotonic() + 60  # for the senders to close the files
                while shutil.disk_usage(final.parent).free < needed and time.monotonic() < until:
                    time.sleep(0.1)
            if (free := shutil.disk_usage(final.parent).free) < needed:
                remedy = "make room, or lower --save_total_limit"
                raise OSError(f"{readable(free)} are free, the last checkpoint has {readable(needed)}; {remedy}")
        unfinished = files.unfinished(final)
        unfinished.mkdir(parents=True)
        if is_first():
            shutil.copy(final.parent / "metrics.jsonl", unfinished)
            (unfinished / "data.json").write_text(json.dumps(data_states), encoding="utf-8")

    def _finish(self, final: Path, entries: dict[str, dict]) -> dict[str, Any]:
        """Add the files that only one rank writes, then the marker, with these `entries` of the others. Returns it."""
        unfinished = files.unfinished(final)
        self.args.save(unfinished / "args.yaml")
        for artifact in [*self.artifacts, *([self.adapter.config] if self.adapter else [])]:
            artifact.save_pretrained(unfinished)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.state_dict_type.name == "FULL_STATE_DICT":
            if self.adapter:
                write_adapter(unfinished, unfinished)
            else:
                write_safetensors(unfinished, unfinished, dtype=None, max_shard_size=2**63)
        for path in sorted(unfinished.rglob("*")):
            if path.is_dir():
                fsync(path)
            elif str(path.relative_to(unfinished)) not in entries:
                entries |= files.describe(path, unfinished)
        marker = {
            "step": files.step_of(final),
            "world_size": self.accelerator.num_processes,
            "strategy": strategy_name(self.accelerator),
            "mixed_precision": self.accelerator.mixed_precision,
            "param_dtype": str(self.args.param_dtype).removeprefix("torch."),
            "base_model": self.base,
            "model_checksum": self.model_checksum,
            "versions": library_versions(),
            "files": entries,
        } | ({"in_parts": True} if mirror.has_own_disks() else {})
        files.publish(final, marker)
        return marker

    def resume(self) -> int:
        """Restore `resumed_from` and return its step, or 0 if there is no checkpoint.

        Model and optimizer are resharded to any number of ranks and any strategy. Learning rate, betas and weight decay
        come from the command line.
        """
        if self.resumed_from is None:
            return 0
        checkpoint = self.newest = self.resumed_from
        marker = files.read_marker(checkpoint)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        on_first_rank(lambda: files.check_base(checkpoint, marker, self.base))
        state = self._trained_state()
        check_classes(checkpoint, self.artifacts[0])
        check_shapes(checkpoint, state["model"])
        load_state(state, checkpoint)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=self.adapter is None),  # frozen weights are not saved
        )  # fmt: skip
        if name := next(filter(None, on_all_ranks(broken_weight(self.model))), None):
            remedy = "move it away, and an older is taken"
            raise ConfigError(f"{checkpoint} is of no use: {name} holds NaN or infinity; {remedy}")
        # The state of the optimizer has brought the hyperparameters of the checkpoint; put those of the command line back.
        for group, now in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(now)
        seek(self.scheduler, marker["step"])
        self.data_states = read_json(checkpoint / "data.json")
        if marker["world_size"] == self.accelerator.num_processes:
            file = checkpoint / f"rng-{self.accelerator.process_index}.pt"
            try:
                set_rng_state(load_plain(file))
            except Exception as error:  # the generators raise many kinds
                raise ConfigError(f"{file} holds no state of random generators: {first_line(error)}") from error
        else:  # another number of ranks: the checkpoint lacks generators for new ranks, so seed all by the step
            set_seed(self.args.seed + marker["step"], device_specific=True)
        saved_by = f"{marker['world_size']} x {marker['strategy']}"
        print_first(f"Resumed {checkpoint} (step {marker['step']}, saved by {saved_by})")
        return marker["step"]

    def _trained_state(self) -> dict[str, dict[str, Any]]:
        """Return the sharded state of the model (with adapters, only of the adapters) and of the optimizer."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        if self.adapter:
            # StateDictOptions.ignore_frozen_params of torch 2.13 would keep the second name of a tied weight.
            named = self.model.named_parameters()
            trained = [WRAPPERS.sub("", name) for name, parameter in named if parameter.requires_grad]
            model_state = {name: model_state[name] for name in trained}
        return {"model": model_state, "optimizer": optimizer_state}


def broken_weight(model: nn.Module) -> str | None:
    """Return the name of a trained weight that is not finite in this rank's shard, or None."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    held = {name: shard for name, parameter in trained if (shard := local_shard(parameter.detach())).numel()}
    # The largest absolute value is NaN if any element is. It takes no memory; a mask of all elements would.
    largest = [torch.linalg.vector_norm(tensor, float("inf")).float() for tensor in held.values()]
    are_finite = torch.isfinite(torch.stack(largest)).tolist() if held else []
    return next((WRAPPERS.sub("", name) for name, good in zip(held, are_finite, strict=True) if not good), None)


def check_classes(checkpoint: Path, config: PreTrainedConfig) -> None:
    """Raise ConfigError if the classes of a checkpoint have other names, or other numbers, than those of the data."""
    there = read_json(checkpoint / "config.json").get("id2label")  # None for those that transformers itself names
    here = {str(number): name for number, name in (getattr(config, "id2label", None) or {}).items()}
    if there and there != here:
        number = next(number for number in there | here if there.get(number) != here.get(number))
        raise ConfigError(
            f"{checkpoint} has {len(there)} classes, and the data have {len(here)}: number {number} is "
            f"{there.get(number, 'none')!r} there and {here.get(number, 'none')!r} here; give data with the same labels, or "
            "begin anew in another --output_dir"
        )


def check_shapes(checkpoint: Path, model_state: dict[str, torch.Tensor]) -> None:
    """Check that the checkpoint holds this model.

    Raises:
        ConfigError: naming the first parameter that differs, with both shapes.
    """
    sides = (saved_tensors(checkpoint), model_state)
    there, here = ({name: tuple(tensor.size()) for name, tensor in side.items()} for side in sides)
    for name in sorted(there.keys() | here.keys()):
        was, now = there.get(name, "of nothing"), here.get(name, "of nothing")
        if was != now:
            problem = f"{checkpoint} holds another model: {name} has the shape {was} there and {now} here"
            raise ConfigError(f"{problem}; resume with the model it was saved from, or give another --output_dir")


def ask_to_stop_if_failed(save: Future) -> None:
    """Ask to stop if a save failed.

    A save fails on all ranks, but the ranks notice it at different steps. So they agree to stop, and then `wait` raises
    the error.
    """
    if save.exception() is not None:
        stop.ask("a save that failed")


def steps_to_keep(output_dir: Path, args: TrainArgs) -> set[int]:
    """Return the newest `save_total_limit` of the steps that were saved, each `keep_every_n_steps`, and the best."""
    scores = {files.step_of(saved): best_score(saved, args) for saved in files.saved_checkpoints(output_dir)}
    return files.kept(scores, args)


def remove_old(output_dir: Path, keep: set[int], is_read: str | None = None) -> None:
    """Remove the saved checkpoints of other steps; one that the mirror is reading is removed by a later call."""
    for old in files.saved_checkpoints(output_dir):
        if files.step_of(old) not in keep and old.name != is_read:
            # Rename first: an interrupted removal must not leave a directory with the name of a checkpoint.
            shutil.rmtree(old.rename(files.unfinished(old)))


def best_score(checkpoint: Path, args: TrainArgs) -> float | None:
    """Return `files.score` of a checkpoint; None also if its metrics.jsonl is damaged."""
    if not args.metric_for_best_model or files.difference(checkpoint, "metrics.jsonl", files.read_marker(checkpoint)):
        return None
    return files.score(read_json_lines(checkpoint / "metrics.jsonl"), files.step_of(checkpoint), args)


def seek(scheduler: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Move a fresh schedule to its state after `step` steps. The state depends on the step alone."""
    scheduler.last_epoch = step - 1
    scheduler._step_count += 1  # a first step of the schedule before one of the optimizer would be warned of
    scheduler.step()
