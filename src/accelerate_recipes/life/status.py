"""State of a run: `<output_dir>/status.json`, which job scripts read.

Its keys: `state` (running, finished, stopped, failed: by what the user must put right, crashed: by anything else), `step`
(of the newest checkpoint), `checkpoint` (its path), `reason` (of a stop, failure or crash), `longest_save_seconds`, and
which `job` wrote it, after how many `restarts`.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

from accelerate_recipes.disk import write_atomically

_writing = threading.Lock()


def attempt() -> dict[str, Any]:
    """Return the name of this job, and how often it was restarted; an empty name where there is no Slurm."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    return {"job": os.environ.get("SLURM_JOB_ID", ""), "restarts": int(restarts)}


def is_wish_of_a_person(reason: str) -> bool:
    """Tell whether a run stopped by the file `stop`, and not by a signal or the job's end alone."""
    return reason.startswith("file ")


def read_status(output_dir: Path) -> dict:
    """Read status.json; empty where there is none."""
    file = output_dir / "status.json"
    return json.loads(file.read_text()) if file.exists() else {}


def update_status(output_dir: Path, **changes: object) -> None:
    """Merge `changes` into status.json, which is whole at any moment. For rank 0."""
    with _writing:  # a save in the background writes it too
        status = read_status(output_dir) | changes | attempt()
        write_atomically(output_dir / "status.json", json.dumps(status, indent=1) + "\n")
