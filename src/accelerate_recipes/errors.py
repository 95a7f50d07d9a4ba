"""Errors for mistakes of the user and for faults of the data, and the format of their messages."""

import contextlib
import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

# Control characters except line break and tab, and marks of writing direction.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class ConfigError(ValueError):
    """A mistake of the user, printed as one message, without a traceback."""


class DataError(Exception):
    """A shard cannot be read, or its content is wrong. Printed as one message, without a traceback."""


class NonFiniteError(RuntimeError):
    """A step went wrong: its loss or gradient norm is not finite, or a spike. The weights are those before the step.

    `micro_losses` are the summed token losses of this rank's micro-batches.
    """

    def __init__(self, message: str, micro_losses: list[float]):
        super().__init__(message)
        self.micro_losses = micro_losses


class ReplicaError(RuntimeError):
    """Replicas of the weights, which must be the same bits, differ."""


def error_list(title: str, errors: Sequence[str]) -> str:
    return f"{title}:\n" + "\n".join(f"  - {error}" for error in errors)


def raise_problems(title: str, problems: Sequence[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError(error_list(title, problems))


def that_apply(sentences: Mapping[str, Any]) -> list[str]:
    """List the sentences that apply; the value of each says whether it does."""
    return [sentence for sentence, applies in sentences.items() if applies]


@contextlib.contextmanager
def collecting_errors(problems: list[str], where: str = "") -> Iterator[None]:
    """Catch a ConfigError in this context, and append its text to a list, behind `where`."""
    try:
        yield
    except ConfigError as error:
        problems.append(f"{where}{error}")


def closest(name: str, known: Collection[str], cutoff: float = 0.75) -> str:
    """Return the most similar known name, or "" if no name is similar."""
    return next(iter(difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)), "")


def suggestion(name: str, known: Collection[str], cutoff: float = 0.75) -> str:
    """Return "; did you mean ...?" with the most similar known name, or "" if no name is similar."""
    close = closest(name, known, cutoff)
    return f"; did you mean {close!r}?" if close else ""


def near_path(path: str | Path) -> str:
    """Return "; did you mean ...?" with the most similar name beside the first part of a path that is not there, or ""."""
    path, there = Path(path), ""
    with contextlib.suppress(OSError, StopIteration):
        folder = next(parent for parent in path.parents if parent.is_dir())
        missing, names = Path(path.relative_to(folder).parts[0]), [*islice(os.listdir(folder), 10_000)]
        # Names with the same ending would all be similar, so it only decides between others that are alike.
        if stem := closest(missing.stem, {Path(name).stem for name in names}, cutoff=0.7):
            there = str(folder / closest(missing.name, [name for name in names if Path(name).stem == stem], cutoff=0))
    return f"; did you mean {there!r}?" if there else ""


def first_few(names: Iterable[str], most: int = 8) -> str:
    """Join names by commas, at most `most` of them, and say how many more there are."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def other_recipe(columns: Collection[str]) -> str:
    """Return "; ..." with the recipe that trains on rows with these columns, or ""."""
    if {"chosen", "rejected"} <= {*columns}:
        return "; dpo.py trains on pairs of answers"
    return "; sft.py trains on conversations" if {"messages", "conversations"} & {*columns} else ""


def printable(text: str) -> str:
    """Escape control characters and marks of writing direction, so that data cannot control a terminal."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(error: BaseException) -> str:
    """Format an error of another library in one line, with its type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
