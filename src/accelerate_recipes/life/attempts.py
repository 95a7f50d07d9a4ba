"""Attempts of a run: `<output_dir>/attempts.jsonl` has a line for each start, which also says how that attempt ended.

Its keys: `job` and `restarts` as in status.json, `begun` and `ended` (seconds since 1970), `from` (the step that it
resumed, or 0), `state`, `step` (of the newest checkpoint) and `reason` as in status.json, and what `begin_attempt` is given.
A job script adds a line without times for an attempt that ended before it owned the output directory.
"""

import contextlib
import json
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from accelerate_recipes.disk import write_atomically

_begun: float | None = None  # when this process began; None until `begin_attempt`


def read_attempts(output_dir: Path) -> list[dict]:
    """Read attempts.jsonl without damaged lines. A full disk, for example, may have cut a line."""
    file, found = output_dir / "attempts.jsonl", []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and {"job", "step"} <= entry.keys():
                found.append(entry)
    return found


def write_attempts(output_dir: Path, attempts: list[dict]) -> None:
    write_atomically(output_dir / "attempts.jsonl", "".join(json.dumps(entry) + "\n" for entry in attempts))


def begin_attempt(output_dir: Path, this: dict[str, Any], step: int, **facts: Any) -> None:
    """Add a line for this process, which resumes `step`. For rank 0, once it owns the output directory.

    `this` identifies the attempt, as `status.attempt` does. An earlier attempt without an end was killed: it ended when it
    last wrote a file.
    """
    global _begun
    _begun = psutil.Process().create_time()
    attempts = read_attempts(output_dir)
    files = [file for name in ("metrics.jsonl", "status.json") if (file := output_dir / name).exists()]
    for entry in attempts[-1:]:
        if entry.get("begun") and not entry.get("ended"):
            last = max([entry["begun"], *(file.stat().st_mtime for file in files)])
            # The time at which a process began is rounded: this one may seem older than the last file before it.
            entry |= {"ended": min(last, _begun), "state": "killed", "step": max(entry["step"], step)}
    attempts.append({**this, "begun": _begun, "from": step, "state": "running", "step": step, "reason": "", **facts})
    write_attempts(output_dir, attempts)


def update_attempt(output_dir: Path, changes: dict[str, Any]) -> None:
    """Merge the `state`, `step` and `reason` among `changes` into the line of this process, if it has one.

    A disk that is full must not end a run here: then only warn.
    """
    attempts = read_attempts(output_dir) if _begun else []
    if not attempts or attempts[-1].get("begun") != _begun:
        return
    attempts[-1] |= {name: changes[name] for name in ("state", "step", "reason") if name in changes}
    if attempts[-1]["state"] != "running":
        attempts[-1]["ended"] = time.time()
    try:
        write_attempts(output_dir, attempts)
    except OSError as error:
        warnings.warn(f"attempts.jsonl could not be written: {error}", stacklevel=2)


def of_this_run(attempts: list[dict]) -> list[dict]:
    """Return the attempts since the run was begun anew, from step 0, without those that had nothing left to train.

    It was begun anew if the attempt before had saved a checkpoint, or had failed: then something was put right in between.
    Without a checkpoint, any other attempt is repeated by the next. The same command after the end only exports again.
    """
    is_new = [entry.get("from") == 0 and (b["step"] or b.get("state") == "failed") for b, entry in pairwise(attempts)]
    anew = [i for i, new in enumerate(is_new, start=1) if new]
    found = attempts[anew[-1] :] if anew else attempts
    return found[:1] + [entry for before, entry in pairwise(found) if not only_exported(before, entry)]


def only_exported(before: dict, attempt: dict) -> bool:
    """Tell whether an attempt found the run finished, by the attempt before it, and trained nothing."""
    are_finished = before.get("state") == attempt.get("state") == "finished"
    return are_finished and attempt.get("from") == attempt["step"]
