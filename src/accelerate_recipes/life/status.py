"""State of a run: `<output_dir>/status.json`, which job scripts read.

Its keys: `state` (running, finished, stopped, failed: the user must correct something, crashed: any other error), `step`
(of the newest checkpoint), `checkpoint` (its path), `reason` (of a stop, failure or crash), `longest_save_seconds`, `job`
(the job that wrote the file), `restarts` (of this job), `run` (the id of the run in a tracker), and `mirror` (with --mirror:
its `url`, the newest complete `copy` there, the time `since` which there is no newer one, and the last `problem`).
"""

import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import psutil

from accelerate_recipes.disk import is_full, write_atomically
from accelerate_recipes.life.attempts import update_attempt

# Types of the values that are read again.
KINDS = {"state": str, "step": int, "reason": str, "longest_save_seconds": int | float, "job": str, "restarts": int}

_writing = threading.Lock()


def attempt() -> dict[str, Any]:
    """Return the id of this Slurm job (empty without Slurm), and how often it was restarted."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    return {"job": os.environ.get("SLURM_JOB_ID", ""), "restarts": int(restarts)}


def is_known_dead(other: dict, me: dict) -> bool:
    """Tell whether the owner of a place has surely ended: its process has left this host, or this job was restarted.

    Both have `host`, `process`, and what `attempt` returns.
    """
    if bool(me["job"]) and other["job"] == me["job"] and other["restarts"] < me["restarts"]:
        return True
    try:
        return other["host"] == me["host"] and psutil.Process(other["process"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
    if isinstance(status, dict) and all(isinstance(status[name], KINDS[name]) for name in KINDS.keys() & status.keys()):
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
