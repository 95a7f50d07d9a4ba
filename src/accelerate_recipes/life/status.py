"""State of a run: `<output_dir>/status.json`, which job scripts read.

Its keys: `state` (running, finished, stopped, failed: the user must put something right, crashed: any other error), `step`
(of the newest checkpoint), `checkpoint` (its path), `reason` (of a stop, failure or crash), `longest_save_seconds`, `job`
(which wrote it), and `restarts` (of this job).
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

from accelerate_recipes.disk import write_atomically

_writing = threading.Lock()


def attempt() -> dict[str, Any]:
    """Return the id of this Slurm job (empty without Slurm), and how often it was restarted."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    return {"job": os.environ.get("SLURM_JOB_ID", ""), "restarts": int(restarts)}


def is_wish_of_a_person(reason: str) -> bool:
    """Tell whether the file `stop` stopped a run, not only a signal or the job's end."""
    return reason.startswith("file ")


def read_status(output_dir: Path) -> dict:
    """Read status.json; empty if there is none."""
    file = output_dir / "status.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def update_status(output_dir: Path, **changes: object) -> None:
    """Merge `changes` into status.json, which is whole at any moment. For rank 0."""
    with _writing:  # a save in the background writes it too
        status = read_status(output_dir) | changes | attempt()
        write_atomically(output_dir / "status.json", json.dumps(status, indent=1) + "\n")
