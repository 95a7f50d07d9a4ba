"""Stopping in good order: signals, the file `stop`, and status.json, which job scripts read.

A scheduler that wants the node back sends SIGUSR1 or SIGTERM; a person may also write a file `stop` into the output
directory. Either is noticed on any rank; all ranks agree at the next step, or the next batch of an evaluation, save,
and exit with 0. What became of the run stands in `<output_dir>/status.json`.
"""

import json
import os
import signal
import threading
from pathlib import Path

import torch
from accelerate import Accelerator

from accelerate_recipes.distributed import on_all_ranks, sum_over_ranks

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

# Of this process, as signals are. `_file` is None until `listen` was called.
_file: Path | None = None
_asked_by: str | None = None
_writing_status = threading.Lock()


class Stopped(Exception):
    """The run was asked to stop, and all ranks know it. Its text says by what."""


def listen(output_dir: Path) -> None:
    """Notice, from now on, a signal or the file `stop`. A second signal changes nothing."""
    global _file
    _file = output_dir / "stop"
    for number in SIGNALS:
        signal.signal(number, _on_signal)


def _on_signal(number: int, frame) -> None:
    ask(signal.Signals(number).name)


def ask(reason: str) -> None:
    """Ask this rank, and so all, to stop at the next step or batch of an evaluation."""
    global _asked_by
    _asked_by = reason


def requested() -> str | None:
    """By what this rank was asked to stop, or None."""
    if _asked_by is None and _file is not None and _file.exists():
        return f"file {_file}"
    return _asked_by


def raise_if_requested(accelerator: Accelerator) -> None:
    """Call it on all ranks at once.

    Raises:
        Stopped: on all, if any was asked.
    """
    if sum_over_ranks(torch.tensor(int(requested() is not None), device=accelerator.device)).item():
        raise Stopped(reason(accelerator))


def reason(accelerator: Accelerator) -> str:
    """By what, on all ranks; the file is removed, so that the next run may start."""
    found = on_all_ranks(requested())
    if accelerator.is_main_process and _file is not None:
        _file.unlink(missing_ok=True)
    return ", ".join(dict.fromkeys(filter(None, found)))


def update_status(output_dir: Path, **changes: object) -> None:
    """Merge `changes` into status.json, which is whole at any moment. For rank 0.

    Its keys: `state` (running, finished, stopped or failed), `step` (of the newest checkpoint), `checkpoint` (its path)
    and `reason` (of a stop or failure).
    """
    file = output_dir / "status.json"
    with _writing_status:  # a save in the background writes it too
        status = json.loads(file.read_text()) if file.exists() else {}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(status | changes, indent=1) + "\n")
        os.replace(partial, file)
