"""Paths of a run in a pod: it must write to a volume, and read from a volume or from the image."""

import os
from collections.abc import Sequence
from pathlib import Path

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.launch.requirements import WRITTEN, Requirements

IMAGE = ("accelerate_configs", "data", "recipes", "src")  # folders of this repository that the image holds


def move_to_volumes(args: TrainArgs, volumes: Sequence[str]) -> list[str]:
    """Move the paths that a run writes to the volume of its checkpoints; list the paths that stay outside of the volumes."""
    found = []
    for name in WRITTEN:
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
    remedy += f", or into a folder of the image ({', '.join(IMAGE)})"
    sources = [source for source in args.alone if source is not args]  # of a mixture
    for name, value in [item for one in (args, *sources) for item in one.values().items()]:
        for text in value if isinstance(value, list) else [value]:
            if name in WRITTEN or not isinstance(text, str) or is_below(text, volumes):
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
    if Path(path).is_absolute() or parts[0] not in IMAGE or any(part.startswith(".") for part in parts):
        return False
    return Path(path).resolve().is_relative_to(Path(parts[0]).resolve())  # a link may lead out of the repository
