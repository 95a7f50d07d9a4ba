"""Check of a run before it is queued: `python -m accelerate_recipes preflight CONFIG RECIPE ARGS...`

It checks the keys and values of the accelerate YAML (Accelerate itself silently drops unknown nested keys), the
recipe's arguments, the batch arithmetic, the wrap class, whether model and data are here, the checkpoint to resume,
the output directory and its space, and versions. It reports all problems at once. The flags of `accelerate launch`, such as
--num_processes, stand between CONFIG and RECIPE. Instead of them, --nodes and --gpus-per-node (without GPUs,
--cpus-per-node) may describe the job; the flags follow from these. With --gpu NAME, preflight simulates a step (`plan/`),
and a run that does not fit on that GPU is a problem. --no_plan leaves this check out.

This module only lists the checks. Each check stands beside the code that would fail, and a run calls the same function.
"""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint import files
from accelerate_recipes.checkpoint.mirror import is_copy
from accelerate_recipes.checkpoint.resume import damaged, settle_resume
from accelerate_recipes.data.prepared import tokenizing_warnings
from accelerate_recipes.errors import ConfigError, collecting_errors, raise_problems
from accelerate_recipes.hub import cache
from accelerate_recipes.launch import requirements
from accelerate_recipes.launch.checks import launch_problems, lever_warnings
from accelerate_recipes.launch.requirements import WRITTEN_FOLDERS, Requirements
from accelerate_recipes.life.status import read_status
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.optim import warmup_warnings
from accelerate_recipes.ranks import data_world_size, ranks_a_row, readers
from recipe_tools.machine import shared_disk_warnings, versions
from recipe_tools.planning import memory_problems
from recipe_tools.request import read_request
from recipe_tools.space import space_problems

FOLDERS_OF_IMAGE = ("accelerate_configs", "data", "recipes", "src")  # folders of this repository that an image holds


@dataclass(frozen=True)
class Launch:
    """A run that can start."""

    said: str  # what will run, with warnings
    args: TrainArgs
    needs: list[cache.Need]
    launch: list[str]  # flags of `accelerate launch`
    command: list[str]  # the recipe with its arguments

    @property
    def signal_seconds(self) -> int:
        """Return how many seconds before its end a run needs the signal to save in time; 300 if it has never saved."""
        longest_save = read_status(Path(self.args.output_dir)).get("longest_save_seconds")
        # Reserve time for two saves: one in flight, and the last. Slurm may signal a minute early, a step may take one.
        return 300 if longest_save is None else 120 + 2 * math.ceil(longest_save)

    @property
    def assignments(self) -> str:
        """Write assignments that a job script reads with bash."""
        lines = [f"OUTPUT_DIR={shlex.quote(self.args.output_dir)}", f"SIGNAL_SECONDS={self.signal_seconds}"]
        lines += [f"LAUNCH_FLAGS=({shlex.join(self.launch)})", f"COMMAND=({shlex.join(self.command)})"]
        return "\n".join(lines)


def preflight(argv: Sequence[str]) -> tuple[str, str]:
    """Describe what will run, with warnings; also return it as assignments for bash. See `check`.

    Raises:
        ConfigError: with all problems.
    """
    plan, problems = check(argv)
    raise_problems("This run cannot start", problems)
    return plan.said, plan.assignments


def resume_problems(args: TrainArgs, *, reads: bool) -> tuple[Path | None, list[str], list[str]]:
    """Find the checkpoint that a run would resume, with problems and warnings. With `reads`, verify all its checksums."""
    if is_copy(args.resume_from_checkpoint):  # the run fetches it
        return None, [], []
    try:
        chosen = settle_resume(args)
    except ConfigError as error:
        return None, [str(error)], []
    reason = files.damage(chosen) if chosen and reads else None
    if chosen is None or reason is None:
        return chosen, [], []
    if chosen == Path(args.resume_from_checkpoint):
        return None, [damaged(chosen, reason)], []
    return None, [], [f"{chosen} is damaged, the run would take an older one: {reason}"]


def check(argv: Sequence[str], volumes: Sequence[str] = ()) -> tuple[Launch | None, list[str]]:
    """Check CONFIG [--nodes N --gpus-per-node G] [launch flags] RECIPE ARGS...

    `volumes` are the mount paths of the pod that will run this; the first is for its checkpoints. Only the cluster knows the
    content of the volumes: the checkpoint to resume, space, the Hub's cache, files of data. The processes of the run check
    these before they train.

    Returns:
        The launch, or None and all problems.

    Raises:
        ConfigError: if there is nothing to check.
    """
    request = read_request(argv)
    module = shipped.load(request.command[0])
    problems, warnings = versions()
    env, found = request.environment()
    problems += found
    world_size = int(env.get("WORLD_SIZE", 1))
    shares, size = data_world_size(env), ranks_a_row(env)
    args, found = resolve(module.Args, request.command[1:], shares, elsewhere=volumes, row_size=size)
    problems += found
    if env:
        problems += launch_problems(args, env, request.num_devices)
        warnings += lever_warnings(args, env, request.num_devices)
    problems += requirements.push_to_hub_problems(args, from_here=not volumes)
    resumed_from = None
    if volumes:
        unwritable = move_to_volumes(args, volumes)
        has_place = is_below(args.output_dir, volumes[:1])
    else:
        if not args.mirror:  # with it, each machine may have its own
            warnings += shared_disk_warnings(Path(args.output_dir), world_size // int(env.get("LOCAL_WORLD_SIZE", 1)))
        resumed_from, found, doubts = resume_problems(args, reads=request.reads_checksums)
        problems, warnings = problems + found, warnings + doubts
        unwritable = requirements.write_problems(args)
        has_place = not unwritable
    problems += unwritable

    try:
        needed = module.requirements(args)
    except ConfigError as error:
        return None, [*problems, str(error)]
    found, doubts = (
        read_in_pod(args, needed, volumes) if volumes else requirements.needs_problems(needed, request.command)
    )
    problems, warnings = problems + found, warnings + doubts
    warnings += [] if volumes else tokenizing_warnings(args, needed.datasets)
    warnings += warmup_warnings(args, args.max_steps) if args.max_steps > 0 else []
    with mock.patch.dict(os.environ, env):
        models, found = requirements.check_models(args, needed, makes_new=not problems)
        problems += found
        with collecting_errors(problems):
            for model in models if not found else ():  # to count parameters
                # The tokenizer decides the numbers of the new tokens' rows; here any numbers will do.
                add_adapters(model, args, range(len(args.new_tokens)))
    lines = [
        f"Ready: {request.config.name} with {world_size} processes; {args.total_batch_size} sequences a step = "
        f"{readers(shares, size)} x {args.per_device_train_batch_size} x {args.accumulation_steps(shares)} micro-batches"
    ]
    if models and has_place:
        line, found = space_problems(args, models, env.get("FSDP_STATE_DICT_TYPE"), is_here=not volumes)
        lines, problems = [*lines, line], problems + found
    if request.gpu and request.plans and not problems:
        line, problems, doubts = memory_problems(request, env, is_here=not volumes)
        lines, warnings = [*lines, line], warnings + doubts
    if problems:
        return None, problems
    if resumed_from:
        checked = "; its checksums are right" if request.reads_checksums else ""
        lines.append(f"The run continues from {resumed_from}{checked}")
    said = "\n".join([*filter(None, lines), *(f"warning: {warning}" for warning in warnings)])
    return Launch(said, args, needed.needs, request.launch, request.command), []


def move_to_volumes(args: TrainArgs, volumes: Sequence[str]) -> list[str]:
    """Move the paths that a run writes to the volume of its checkpoints; list the paths that stay outside of the volumes."""
    found = []
    for name in WRITTEN_FOLDERS:
        if getattr(args, name, ""):
            place = os.path.normpath(Path(volumes[0], getattr(args, name)))
            setattr(args, name, place)
            if not is_below(place, volumes[:1] if name == "output_dir" else volumes):
                found.append(f"--{name} {place} is lost with the pod; give one below {volumes[0]}")
    return found


def is_below(path: str, folders: Sequence[str]) -> bool:
    return any(Path(folder) in Path(os.path.normpath(path)).parents for folder in folders)


def read_in_pod(args: TrainArgs, needed: Requirements, volumes: Sequence[str]) -> tuple[list[str], list[str]]:
    """List paths that a run reads but that only this machine has; and, as warnings, paths that the image must hold."""
    names, problems, warnings = {need.name for need in needed.needs}, [], []
    remedy = f"put it on a volume and give its path there, below {' or '.join(volumes)}"
    remedy += f", or into a folder of the image ({', '.join(FOLDERS_OF_IMAGE)})"
    sources = [source for source in args.sources if source is not args]  # of a mixture
    for name, value in [item for one in (args, *sources) for item in one.values().items()]:
        for text in value if isinstance(value, list) else [value]:
            if name in WRITTEN_FOLDERS or not isinstance(text, str) or is_below(text, volumes):
                continue
            # Rewards are named as my_rewards.py:function. A word may also happen to be the name of a folder.
            here = next((path for path in (text, text.rpartition(":")[0]) if path and os.path.exists(path)), "")
            if os.path.isfile(here) or (here and (text in names or len(Path(here).parts) > 1)):
                if not is_in_image(here):
                    problems.append(f"--{name} {text} lies on this machine, where no pod finds it; {remedy}")
            elif text in names and os.path.isabs(text):
                warnings.append(f"--{name} {text} must be in the image, which was not checked")
    return [*dict.fromkeys(problems)], [*dict.fromkeys(warnings)]


def is_in_image(path: str) -> bool:
    """Tell whether the image holds a path. The image is built from this repository; see .dockerignore."""
    parts = Path(path).parts
    if Path(path).is_absolute() or parts[0] not in FOLDERS_OF_IMAGE or any(part.startswith(".") for part in parts):
        return False
    return Path(path).resolve().is_relative_to(Path(parts[0]).resolve())  # a link may lead out of the repository
