"""Names and files of checkpoints and exports: which are complete, which are damaged, and what a killed run has left."""

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path
from typing import Any

import xxhash
import yaml
from safetensors import SafetensorError

from accelerate_recipes.disk import checksum, fsync, json_or_none, read_json
from accelerate_recipes.errors import ConfigError

# torch warns when a single process saves, which is intended here. With FSDP1, which always saves this way, it warns dozens
# of times.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
warnings.filterwarnings("ignore", "Please use DTensor instead and we are deprecating ShardedTensor")

MARKER = "complete.json"
EXPORT = "accelerate_recipes.json"  # lists the files of an export; a later export recognises an export by this list
# In an output directory: `id` of the run, the `places` of its copies, and `reading`, the checkpoint that is being sent.
MIRROR = "mirror.json"
USAGE = "usage.md"  # in a checkpoint: how an export of it is used, if it is not simply loaded
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
COPY = re.compile(r"checkpoint-(\d+)-([0-9a-f]{8})")  # in a mirror; see `checkpoint.store`
SETTINGS_FILES = ("config.json", "adapter_config.json")  # of a model, and of adapters
RULES = ("save_total_limit", "keep_every_n_steps", "metric_for_best_model", "greater_is_better")  # of what is kept


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def name_of_copy(marker: dict) -> str:
    return f"checkpoint-{marker['step']}-{checksum_of(marker)[:8]}"


def step_of_copy(copy: str) -> int:
    return int(copy.split("-")[1])


def checkpoint_of(copy: str) -> str:
    """Return the name of the checkpoint of a copy; "" of none."""
    return copy.rpartition("-")[0]


def noted(output_dir: Path) -> dict[str, Any]:
    """Read mirror.json in an output directory; empty if there is none."""
    content = json_or_none(output_dir / MIRROR)
    return content if isinstance(content, dict) else {}


def defect(checkpoint: Path) -> str | None:
    """Return why this directory is not a complete checkpoint, or None if it is.

    The check compares names and sizes. It reads only the marker and the arguments, which are needed to choose a
    checkpoint.
    """
    try:
        marker = read_marker(checkpoint)
    except FileNotFoundError:
        return f"it has no {MARKER}: the save was interrupted"
    except (OSError, ValueError) as error:
        return f"its {MARKER} is damaged: {error}"
    for name, entry in marker["files"].items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
    return difference(checkpoint, "args.yaml", marker)


def other_kind(folder: Path, kind: str) -> str | None:
    """Return why a folder cannot be the `checkpoint` or `export` that was asked for, and which was meant; None if it can."""
    is_checkpoint = (folder / MARKER).exists() or CHECKPOINT.fullmatch(folder.name.removesuffix(".partial"))
    is_export = not is_checkpoint and any((folder / name).is_file() for name in SETTINGS_FILES)
    if not folder.is_dir():
        return "it is a file" if folder.is_file() else "there is no such folder"
    if is_checkpoint if kind == "checkpoint" else is_export:
        return None
    if is_checkpoint:
        return "it is a checkpoint; `python -m accelerate_recipes export` turns it into an export"
    if is_export:
        return "it is an export, not a checkpoint"
    if kind == "export" and (folder / "export").is_dir():
        return f"it is the output directory of a run, whose export is {folder / 'export'}"
    if checkpoints := candidates(folder):
        return f"it is the output directory of a run, whose newest checkpoint is {checkpoints[-1]}"
    if (folder / "args.yaml").is_file():
        return f"it is the output directory of a run, which has no {kind} yet"
    return f"it holds no {MARKER if kind == 'checkpoint' else ' or '.join(SETTINGS_FILES)}"


def damage(checkpoint: Path, part: int = 0, parts: int = 1) -> str | None:
    """Describe a file of a complete checkpoint that has changed since it was written, or return None.

    The check reads every `parts`-th file, beginning with file `part`.
    """
    marker = read_marker(checkpoint)
    with ThreadPoolExecutor() as threads:  # hashing does not hold the interpreter's lock
        problems = threads.map(lambda name: difference(checkpoint, name, marker), sorted(marker["files"])[part::parts])
        return next(filter(None, problems), None)


def difference(checkpoint: Path, name: str, marker: dict) -> str | None:
    """Return how the content of a file differs from what was written, or None."""
    try:
        actual = checksum(checkpoint / name)
    except OSError as error:  # the disk can no longer read it
        return f"{name} cannot be read: {error}"
    wanted = marker["files"][name]["checksum"]
    return None if actual == wanted else f"the checksum of {name} is {actual} instead of {wanted}: the file is damaged"


def read_marker(checkpoint: Path) -> dict:
    """Read a checkpoint's marker.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it was changed.
    """
    return checked_marker(read_json(checkpoint / MARKER))


def checked_marker(marker: Any) -> dict:
    """Return a marker without its own checksum.

    Raises:
        ValueError: if it was changed, or names a file outside of the checkpoint.
    """
    if not isinstance(marker, dict) or not isinstance(listed := marker.get("files"), dict) or "args.yaml" not in listed:
        raise ValueError("it does not list the files of a checkpoint")
    written = marker.pop("checksum", None)
    if written != checksum_of(marker):
        raise ValueError(f"its checksum is {checksum_of(marker)} instead of {written}")
    if outside := next((n for n in listed if Path(n).is_absolute() or ".." in Path(n).parts), None):
        raise ValueError(f"it names {outside}, which is not in the checkpoint")
    entries = all(isinstance(entry, dict) and {"size", "checksum"} <= entry.keys() for entry in listed.values())
    if not entries or not isinstance(marker.get("step"), int):
        raise ValueError("it does not say the step, or the sizes and checksums of the files")
    return marker


def write_marker(checkpoint: Path, marker: dict) -> None:
    (checkpoint / MARKER).write_text(json.dumps(marker | {"checksum": checksum_of(marker)}, indent=1), encoding="utf-8")
    fsync(checkpoint / MARKER)


def publish(final: Path, marker: dict) -> None:
    """Complete a checkpoint on this disk: write its marker, and give it its final name."""
    write_marker(unfinished(final), marker)
    fsync(unfinished(final))
    unfinished(final).rename(final)
    fsync(final.parent)


def total_size(checkpoint: Path) -> int:
    """Add up the bytes of a checkpoint's files on this disk."""
    entries = read_marker(checkpoint)["files"]
    return sum(entry["size"] for name, entry in entries.items() if (checkpoint / name).exists())


def listed_bytes(marker: dict) -> int:
    return sum(entry["size"] for entry in marker["files"].values())


def checksum_of(marker: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(marker).encode())


def saved_arguments(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "args.yaml"
    return parsed_arguments(file.read_bytes(), str(file))


def parsed_arguments(text: bytes, name: str) -> dict[str, Any]:
    """Read the arguments in the `text` of an args.yaml.

    Raises:
        ConfigError: if a stranger has written it, or it is damaged: it is no mapping of names to plain values.
    """
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} holds no arguments of a run: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{name} holds no arguments of a run, but a {type(content).__name__}")
    return content


def candidates(output_dir: Path) -> list[Path]:
    """List the directories whose names are those of checkpoints, oldest first."""
    return sorted((path for path in output_dir.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)), key=step_of)


def is_part(checkpoint: Path) -> bool:
    """Tell whether other machines hold files of a checkpoint that was saved here; see `checkpoint.mirror`."""
    try:
        return read_marker(checkpoint).get("in_parts", False) and defect(checkpoint) is not None
    except (OSError, ValueError):
        return False


def saved_checkpoints(output_dir: Path) -> list[Path]:
    """List the complete checkpoints, oldest first, also those of which other machines hold files."""
    return [path for path in candidates(output_dir) if defect(path) is None or is_part(path)]


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    return [path for path in candidates(output_dir) if defect(path) is None]


def kept(scores: Mapping[int, float | None], rules: Any) -> set[int]:
    """Choose the steps whose checkpoints are kept, by the arguments RULES: the newest (0: all), multiples, and the best.

    `scores` has the complete checkpoints by step; a higher score is better.
    """
    keep = set(sorted(scores)[-rules.save_total_limit :])
    if rules.keep_every_n_steps:
        keep |= {step for step in scores if step % rules.keep_every_n_steps == 0}
    scored = {step: value for step, value in sorted(scores.items()) if value is not None}
    return keep | ({max(scored, key=scored.__getitem__)} if scored else set())


def score(records: Iterable[dict], step: int, rules: Any) -> float | None:
    """Return the value of the evaluation by which the best checkpoint is chosen, negated if a lower value is better.

    None if it was not measured at `step`, or if it is not finite. `rules` has the arguments RULES.
    """
    key, is_greater = f"eval_{rules.metric_for_best_model}", rules.greater_is_better
    values = [record[key] for record in records if key in record and record["step"] == step]
    if not values or not math.isfinite(values[-1]):
        return None
    return values[-1] if is_greater or (is_greater is None and not key.endswith("loss")) else -values[-1]


def set_aside(checkpoint: Path) -> None:
    """Rename a directory that is not a complete checkpoint, so that a new checkpoint can have its name."""
    names = (f"{checkpoint.name}.damaged{suffix}" for suffix in chain([""], (f"-{i}" for i in count(2))))
    checkpoint.rename(next(path for path in map(checkpoint.with_name, names) if not os.path.lexists(path)))


def leftovers(output_dir: Path) -> list[Path]:
    """List the unfinished directories that killed runs have left in their output directory; they can be removed."""
    partials = [path for path in output_dir.glob("checkpoint-*.partial") if CHECKPOINT.fullmatch(path.stem)]
    export = unfinished(output_dir / "export")
    return [*partials, export] if (export / EXPORT).is_file() else partials


def remove_leftovers(output_dir: Path) -> None:
    for leftover in leftovers(output_dir):
        shutil.rmtree(leftover, ignore_errors=True)


class SaveError(RuntimeError):
    """Error of a checkpoint that could not be written; the older ones are intact."""


def is_of_the_disk(error: Exception) -> bool:
    """Tell whether an error means that a file could not be written. The tokenizers library raises a plain Exception then."""
    return isinstance(error, OSError | SafetensorError) or type(error) is Exception


def holds_adapter(marker: dict) -> bool:
    """Tell whether the checkpoint of a marker holds adapters rather than a whole model."""
    return "adapter_config.json" in marker["files"]


def check_base(checkpoint: Path, marker: dict, base: dict[str, str | None] | None) -> None:
    """Check that a checkpoint, which may not hold all of its model, belongs to this base; see `base.described`.

    Raises:
        ConfigError: if it was trained from a model with other weights, whatever its name.
    """
    before = marker.get("base_model")  # absent for a whole model, where names are compared
    if before and (base is None or before["checksum"] != base["checksum"]):
        was, now = (f"{b['name']} ({b['revision'] or 'a folder'})" for b in (before, base or before))
        part = "adapters" if holds_adapter(marker) else "the trained part"
        remedy = "Restore the weights that it was trained from, or train anew in another --output_dir"
        raise ConfigError(f"{checkpoint} holds {part} of {was}; {now} has other weights now. {remedy}")


def describe(file: Path, root: Path) -> dict[str, dict]:
    """Sync a file to the disk; return its entry in the marker, by its name."""
    fsync(file)
    return {str(file.relative_to(root)): {"size": file.stat().st_size, "checksum": checksum(file)}}


def unfinished(folder: Path) -> Path:
    """Return the folder in which a checkpoint or an export is written, before it is renamed to its final name."""
    return folder.with_name(f"{folder.name}.partial")
