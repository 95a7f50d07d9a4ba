"""State of a run: `<output_dir>/status.json`, which job scripts read.

Its keys: `state` (running, finished, stopped, failed: the user must correct something, crashed: any other error), `step`
(of the newest checkpoint), `checkpoint` (its path), `reason` (of a stop, failure or crash), `longest_save_seconds`, `job`
(the job that wrote the file), `restarts` (of this job), `run` (the id of the run in a tracker), and `mirror` (with --mirror:
its `url`, the newest complete `copy` there, the time `since` which there is no newer one, and the last `problem`).
"""

import contextlib
import json
import os
import socket
import threading
import uuid
import warnings
from pathlib import Path
from typing import Any

import psutil

from accelerate_recipes.disk import is_full, write_atomically
from accelerate_recipes.life.attempts import update_attempt

# Types of the values that are read again.
TYPES = {"state": str, "step": int, "reason": str, "longest_save_seconds": int | float, "job": str, "restarts": int}

# Types of what identifies the owner of a place, and an owner of whom nothing can be read.
OWNER = {"host": str, "process": int, "job": str, "restarts": int}
UNKNOWN = {"host": "an unknown host", "process": 0, "job": "", "restarts": 0}

_writing = threading.Lock()


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
