"""Choice of the checkpoint at which a run resumes."""

import copy
import warnings
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint import files, mirror
from accelerate_recipes.checkpoint.export import check_replaceable, is_same_model
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.life import lock
from accelerate_recipes.ranks import gather_when_done, is_first, on_all_ranks, on_first_rank, place_on_machine

# Arguments of earlier versions, with the values that changed nothing, and what to do with a run that had others.
STRETCHED = "begin anew with the export of this checkpoint, whose config.json holds the stretched positions"
GONE = {
    "rope_scaling_factor": (1, STRETCHED),
    "rope_theta": (0, STRETCHED),
    "exclude_rows": ("", "begin anew with the export of this checkpoint, on files without these rows"),
}


def settle_resume(args: TrainArgs) -> Path | None:
    """Choose the checkpoint at which the run begins, or None for a fresh start, and set the arguments that are left open.

    The content of the checkpoint is not verified yet.

    `args.resume_from_checkpoint` says which one. But if this same command has saved in the output directory before, its
    newest checkpoint is taken: a command that is given again continues.

    Raises:
        ConfigError: for a path that is not a complete checkpoint, for a checkpoint of other data or batches, and for an
            output directory that holds checkpoints or files which the run would overwrite.
    """
    output_dir, given = Path(args.output_dir), args.resume_from_checkpoint
    check_replaceable(output_dir / "export", args.base_model)
    present = files.complete_checkpoints(output_dir)
    for other in files.candidates(output_dir):
        if other not in present and not files.is_part(other):
            warnings.warn(f"skipping {other}: {files.defect(other)}", stacklevel=2)
    # No changed argument: this same command has written the newest checkpoint, so it continues there.
    if given in ("latest", "mirror") or (present and not changed_arguments(present[-1], args)):
        chosen = present[-1] if present else None
    elif given == "none":
        chosen = None
    else:
        chosen = mirror.fetched(given, output_dir / "fetched") if mirror.is_copy(given) else Path(given)
        if reason := files.other_kind(chosen, "checkpoint"):
            raise ConfigError(f"--resume_from_checkpoint {given}: {reason}; give latest, none, or a checkpoint's path")
        if not files.CHECKPOINT.fullmatch(chosen.name):
            raise ConfigError(f"--resume_from_checkpoint {given}: its name must be checkpoint-STEP; rename it")
        if reason := files.defect(chosen):
            raise ConfigError(damaged(chosen, reason))
    if present and files.step_of(present[-1]) > (files.step_of(chosen) if chosen else 0):
        problem = f"--resume_from_checkpoint {given} would overwrite {present[-1]}, which is further on"
        raise ConfigError(f"{problem}; give another --output_dir, or latest, or move that checkpoint away")
    if chosen:
        settle_arguments(chosen, args)
        if args.max_steps > 0:  # else the number of steps is known only with the data
            check_not_beyond(chosen, args.max_steps)
    else:
        args.settle({})
    return chosen


def check_not_beyond(checkpoint: Path, total_steps: int) -> None:
    """Raise ConfigError for a checkpoint whose step is after the last step of a run."""
    if files.step_of(checkpoint) > total_steps:
        remedy = "give as many steps or more, or begin anew in another --output_dir"
        raise ConfigError(f"{checkpoint} is further on than the {total_steps} steps of this run; {remedy}")


def damaged(chosen: Path, reason: str) -> str:
    return f"--resume_from_checkpoint {chosen}: {reason}; give an older one, or latest"


def agree_on_resume(accelerator: Accelerator, args: TrainArgs) -> Path | None:
    """Agree on the checkpoint that `settle_resume` chooses on rank 0; verify its checksums, each rank for some of its files.

    From here on the output directory belongs to this run. Unfinished files of killed runs are removed from it. A damaged
    checkpoint is renamed to `<name>.damaged`, and the next older one is taken.

    Raises:
        ConfigError: like `settle_resume`, if a checkpoint that was given by its path is damaged, and if another run uses the
            output directory.
    """
    rank, world_size, output_dir = accelerator.process_index, accelerator.num_processes, Path(args.output_dir)
    if args.mirror:
        on_first_rank(lambda: take_directory(output_dir))
        mirror.look_for_disks(output_dir)
        gather_when_done(partial(take_directory, output_dir) if mirror.is_first_of_disk() else None)
        check_kind(accelerator)
        mirror.take_place(args)
    # A damaged checkpoint is renamed, so the next turn finds an older one.
    while True:
        if args.mirror:
            mirror.fetch_from_mirror(output_dir)
        chosen, *_ = gather_when_done(partial(take_own_and_settle, args) if is_first() else None)
        if mirror.has_own_disks():
            gather_when_done(partial(tidy_disk, args, chosen) if mirror.is_first_of_disk() else None)
        unseen = [i for i, reason in enumerate(on_all_ranks(chosen and files.defect(chosen))) if reason]
        if unseen:
            remedy = "--output_dir must lie on a filesystem that all machines share"
            raise ConfigError(f"ranks {unseen} do not see {chosen} as rank 0 does; {remedy}")
        if rank:  # `settle_resume` did this on rank 0
            args.settle(files.saved_arguments(chosen) if chosen else {})
        if chosen is None:
            return None
        share = place_on_machine() if mirror.has_own_disks() else (rank, world_size)
        reason = next(filter(None, on_all_ranks(files.damage(chosen, *share))), None)
        if reason is None:
            for name, (before, now) in changed_arguments(chosen, args).items():
                if rank == 0 and name not in ("output_dir", "resume_from_checkpoint"):
                    print(f"--{name} is now {now!r}; until step {files.step_of(chosen)} it was {before!r}")
            return chosen
        if chosen == Path(args.resume_from_checkpoint):
            raise ConfigError(damaged(chosen, reason))
        if rank == 0:
            warnings.warn(f"skipping {chosen}: {reason}", stacklevel=2)
        gather_when_done(partial(files.set_aside, chosen) if mirror.is_first_of_disk() else None)


def check_kind(accelerator: Accelerator) -> None:
    """Raise ConfigError for a kind of checkpoint that cannot lie on the disks of several machines."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if mirror.has_own_disks() and plugin is not None and plugin.state_dict_type.name == "FULL_STATE_DICT":
        raise ConfigError(
            "FULL_STATE_DICT writes one file from the parts of all machines, and each has an --output_dir of its own; give "
            "fsdp_state_dict_type SHARDED_STATE_DICT, or an --output_dir that they share"
        )


def tidy_disk(args: TrainArgs, chosen: Path | None) -> None:
    """Make a machine's own disk fit what rank 0 has chosen: fetch it, and take away what no run can resume."""
    output_dir, step = Path(args.output_dir), files.step_of(chosen) if chosen else 0
    if chosen and chosen.is_relative_to(output_dir / "fetched"):
        mirror.fetched(args.resume_from_checkpoint, output_dir / "fetched")
    for checkpoint in files.candidates(output_dir):
        if files.is_part(checkpoint):
            checkpoint.rename(files.unfinished(checkpoint))
        elif files.step_of(checkpoint) > step:
            files.set_aside(checkpoint)
    files.remove_leftovers(output_dir)


def take_own_and_settle(args: TrainArgs) -> Path | None:
    """Take the output directory, settle on a checkpoint in it, and remove the unfinished files of killed runs.

    A run that is refused leaves the directory as it was.

    Raises:
        ConfigError: like `settle_resume`, and if another run owns the directory, or if it cannot be written to.
    """
    output_dir = Path(args.output_dir)
    take_directory(output_dir)
    try:
        chosen = settle_resume(args)
    except ConfigError:
        lock.release()
        raise
    files.remove_leftovers(output_dir)
    return chosen


def take_directory(output_dir: Path) -> None:
    try:
        lock.take(output_dir)
    except OSError as error:
        names = ", ".join(map(str, files.leftovers(output_dir)))
        room = f"make room: {names} may be removed" if names else "make room, or give another"
        raise ConfigError(f"--output_dir {output_dir} cannot be written to: {error}; {room}") from None


def changed_arguments(checkpoint: Path, args: TrainArgs) -> dict[str, tuple]:
    """Return the arguments whose values differ from those of the checkpoint, as name: (before, now)."""
    saved, settled = files.saved_arguments(checkpoint), copy.copy(args)
    settled.settle(saved)
    changed = {name: (saved[name], now) for name, now in settled.values().items() if saved.get(name, now) != now}
    # Earlier versions wrote a bool where there is a choice of texts now.
    same = [name for name, (before, now) in changed.items() if isinstance(before, bool) and str(before).lower() == now]
    return {name: changed[name] for name in changed if name not in same}


def settle_arguments(checkpoint: Path, args: TrainArgs) -> None:
    """Take the arguments that are left open from a checkpoint, and check that it can be continued with the others.

    Raises:
        ConfigError: if a difference would change the model, or the order of the data in the middle of the run.
    """
    fixed = args.fixed_on_resume()
    fatal = [
        f"--{name} was {before!r} and is now {now!r}; set it back, or start anew in another --output_dir"
        for name, (before, now) in changed_arguments(checkpoint, args).items()
        if name in fixed and not (name == "model_name_or_path" and is_same_model(checkpoint, now))
    ]
    saved = files.saved_arguments(checkpoint)
    fatal += [
        f"--{name} was {saved[name]!r}, and is no argument now; {remedy}"
        for name, (unset, remedy) in GONE.items()
        if saved.get(name, unset) != unset
    ]
    fatal += args.settle(saved)
    raise_problems(f"{checkpoint} cannot be continued with these arguments", fatal)
