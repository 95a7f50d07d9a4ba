"""State of a run: `<output_dir>/status.json`, which job scripts read, and its attempts, `attempts.jsonl`.

Keys of status.json: `state` (running, finished, stopped, failed: the user must correct something, crashed: any other error),
`step` (of the newest checkpoint), `checkpoint` (its path), `reason` (of a stop, failure or crash), `longest_save_seconds`,
`job` (the job that wrote the file), `restarts` (of this job), `run` (the id of the run in a tracker), and `mirror` (with
--mirror: its `url`, the newest complete `copy` there, the time `since` which there is no newer one, and the last `problem`).

attempts.jsonl has a line for each start, which also says how that attempt ended. Its keys: `job` and `restarts` as in
status.json, `begun` and `ended` (seconds since 1970), `from` (the step that it resumed, or 0), `state`, `step` and `reason`
as in status.json, and what `begin_attempt` is given. A job script adds a line without times for an attempt that ended before
it owned the output directory.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from accelerate_recipes.disk import is_full, write_atomically

# Types of the values that are read again.
TYPES = {"state": str, "step": int, "reason": str, "longest_save_seconds": int | float, "job": str, "restarts": int}

# Types of what identifies the owner of a place, and an owner of whom nothing can be read.
OWNER = {"host": str, "process": int, "job": str, "restarts": int}
UNKNOWN = {"host": "an unknown host", "process": 0, "job": "", "restarts": 0}

_writing = threading.Lock()
_begun: float | None = None  # when this process began; None until `begin_attempt`


def attempt() -> dict[str, Any]:
    """Return the id of this Slurm job (empty without Slurm), and how often it was restarted."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    return {"job": os.environ.get("SLURM_JOB_ID", ""), "restarts": int(restarts)}


def this_owner() -> dict[str, Any]:
    """Describe this process as the owner of a place: its host, number, job, and the `namespace` that gave the number.

    Containers of one machine may have one host name, and machines may too, but not this boot and namespace of processes.
    """
    namespace = ""
    with contextlib.suppress(OSError):  # without /proc
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    own = {"host": socket.gethostname(), "process": os.getpid(), "namespace": namespace, "run": uuid.uuid4().hex}
    return own | attempt()


def is_owner(value: Any) -> bool:
    """Tell whether a value that was read from a file describes an owner."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in OWNER.items())


def is_known_dead(other: dict, me: dict) -> bool:
    """Tell whether the owner of a place has surely ended: its process has left this namespace, or this job was restarted.

    Both are as `this_owner` describes them. Nothing is known of a process in another namespace: time must tell.
    """
    if bool(me["job"]) and other["job"] == me["job"] and other["restarts"] < me["restarts"]:
        return True
    if not me.get("namespace") or other.get("namespace") != me["namespace"]:
        return False
    try:
        os.kill(other["process"], 0)  # asks the kernel alone: /proc may hide the processes of others
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    with contextlib.suppress(psutil.Error):
        return psutil.Process(other["process"]).status() == psutil.STATUS_ZOMBIE
    return False


def is_wish_of_a_person(reason: str) -> bool:
    """Tell whether the file `stop` stopped a run, rather than a signal or the end of the job alone."""
    return reason.startswith("file ")


def read_status(output_dir: Path) -> dict:
    """Read status.json; empty if there is no such file. A damaged file counts as missing, with a warning."""
    file = output_dir / "status.json"
    try:
        status = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        status = None
    if isinstance(status, dict) and all(isinstance(status[name], TYPES[name]) for name in TYPES.keys() & status.keys()):
        return status
    warnings.warn(f"{file} is damaged, and counts as none", stacklevel=2)
    return {}


def update_status(output_dir: Path, **changes: object) -> None:
    """Merge `changes` into status.json, and into this attempt's line. The files are whole at any moment. For rank 0."""
    file = output_dir / "status.json"
    with _writing:  # a save in the background also writes the file
        text = json.dumps(read_status(output_dir) | changes | attempt(), indent=1) + "\n"
        try:
            write_atomically(file, text)
        except OSError as error:
            if not is_full(error) or not file.exists():
                raise
            with file.open("r+", encoding="utf-8") as opened:  # on a full disk, the file's own space is still there
                opened.write(text)
                opened.truncate()
        update_attempt(output_dir, changes)


def read_attempts(output_dir: Path) -> list[dict]:
    """Read attempts.jsonl without damaged lines. A full disk, for example, may have cut a line."""
    file, attempts = output_dir / "attempts.jsonl", []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and {"job", "step"} <= entry.keys():
                attempts.append(entry)
    return attempts


def write_attempts(output_dir: Path, attempts: list[dict]) -> None:
    write_atomically(output_dir / "attempts.jsonl", "".join(json.dumps(entry) + "\n" for entry in attempts))


def begin_attempt(output_dir: Path, step: int, **facts: Any) -> None:
    """Add a line for this process, which resumes `step`. For rank 0, once it owns the output directory.

    An earlier attempt without an end was killed: it ended when it last wrote a file.
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
    attempts.append(
        {**attempt(), "begun": _begun, "from": step, "state": "running", "step": step, "reason": "", **facts}
    )
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
    current = attempts[anew[-1] :] if anew else attempts
    return current[:1] + [entry for before, entry in pairwise(current) if not only_exported(before, entry)]


def only_exported(before: dict, attempt: dict) -> bool:
    """Tell whether an attempt found the run finished, by the attempt before it, and trained nothing."""
    are_finished = before.get("state") == attempt.get("state") == "finished"
    return are_finished and attempt.get("from") == attempt["step"]
