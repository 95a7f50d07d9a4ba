"""Orderly stop of a run: by signals, by the file `stop`, and at the end of a job.

Three events stop a run. A scheduler that wants the node back sends SIGUSR1 or SIGTERM. A person writes a file `stop` into
the output directory. The job is about to end (JOB_END_TIME, in seconds since 1970), with just enough time left to save. Any
rank may notice the event. All ranks agree at the next step, or at the next batch of an evaluation. They save, and exit with
0, or with STOPPED_EXIT_CODE if that is set and the file did not stop the run.
"""

import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from accelerate_recipes.life import parent
from accelerate_recipes.life.status import read_status
from accelerate_recipes.ranks import is_first_of_machine, on_all_ranks, sum_over_ranks

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
LEAVE_SECONDS = 15.0  # time for the processes to end, and for the job script to requeue

# State of this process; it is global, because signals are global. `_file` is None until `listen` is called.
_file: Path | None = None
_asked_by: str | None = None
_killed_at = float("inf")  # by time.monotonic
_job_ends = float("inf")
_batches = 0  # number of evaluation batches
_last_step = _longest_save = 0.0  # seconds


class Stopped(Exception):
    """The run was asked to stop, and all ranks know it. The text names the cause."""


def listen(output_dir: Path) -> None:
    """Watch, from now on, for a signal, the end of the launcher, the file `stop`, and the job's end.

    A second signal changes nothing.
    """
    global _file, _job_ends, _longest_save
    _file = output_dir / "stop"
    _job_ends = float(os.environ.get("JOB_END_TIME") or "inf")
    _longest_save = read_status(output_dir).get("longest_save_seconds", 0.0)
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    parent.follow(signal.SIGTERM)


def _on_signal(number: int, frame) -> None:
    global _killed_at
    if number == signal.SIGTERM and _killed_at == float("inf"):  # the launcher has it too, and kills after this time
        _killed_at = time.monotonic() + float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    ask(signal.Signals(number).name)


def ask(reason: str) -> None:
    """Ask this rank, and therefore all ranks, to stop at the next step or batch of an evaluation."""
    global _asked_by
    _asked_by = reason


def seconds_left() -> float:
    """Return how long this process may go on: until shortly before the end of the job, or of the launcher's patience."""
    return min(_job_ends - time.time(), _killed_at - time.monotonic()) - LEAVE_SECONDS / 3


def requested() -> str | None:
    """Return the cause for which this rank was asked to stop, or None."""
    if _asked_by is None and _file is not None and _file.exists():
        return f"file {_file}"
    # Reserve time for two steps and two saves: a save may still be running when the last save begins.
    if _asked_by is None and time.time() > _job_ends - 2 * (_last_step + _longest_save) - LEAVE_SECONDS:
        ask("the job's end")
    return _asked_by


def step_took(seconds: float) -> None:
    global _last_step
    _last_step = seconds


def save_took(seconds: float) -> float:
    """Record the duration of a save; return the longest duration, including earlier parts of the run."""
    global _longest_save
    _longest_save = max(_longest_save, seconds)
    return _longest_save


def evaluated_batches() -> int:
    """Count the batches of evaluations that this process has begun."""
    return _batches


def raise_if_requested(accelerator: Accelerator) -> None:
    """Stop if any rank was asked to stop; call it on all ranks together, before each batch of an evaluation.

    Raises:
        Stopped: on all ranks, if any rank was asked to stop.
    """
    global _batches
    _batches += 1
    if sum_over_ranks(torch.tensor(int(requested() is not None), device=accelerator.device)).item():
        raise Stopped(reason())


def reason() -> str:
    """Return on all ranks the causes of the stop; remove the file `stop`, so that the next run may start."""
    causes = on_all_ranks(requested())
    if is_first_of_machine() and _file is not None:  # each machine may have an output directory of its own
        _file.unlink(missing_ok=True)
    return ", ".join(dict.fromkeys(filter(None, causes)))
