"""Faults that strike inside real code: at an audit event, which Python raises before a system call.

TOY_FAULT in the environment is JSON with "event", "path", "count", "rank", and "everyone" or "command", or a list of such. At the count-th event
of that name whose first argument contains `path`, the process of that rank kills itself, or the whole run, or runs a
shell command. Events are `open`, `os.rename`, `os.remove`, ...
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil


def arm() -> None:
    """Install the faults, if the environment asks for some in this rank."""
    found = json.loads(os.environ.get("TOY_FAULT", "[]"))
    for fault in found if isinstance(found, list) else [found]:
        die_at(**fault)


def die_at(event: str, path: str, count: int, rank: int, everyone: bool = False, command: str = "") -> None:
    if int(os.environ["RANK"]) != rank:
        return
    seen = 0

    def hook(name: str, arguments: tuple) -> None:
        nonlocal seen
        if name == event and path in str(arguments[0]):
            seen += 1
            if seen == count and command:
                subprocess.run(["sh", "-c", command])
            elif seen == count and everyone:
                kill_run(psutil.Process().parent())
            elif seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def keep_still(run: Any, step: int) -> None:
    """Let the optimizer not make step `step` of a run: its weights and moments stay, and all else goes on."""
    update = run.optimizer.step
    if step:
        run.optimizer.step = lambda *args, **kwargs: (
            None if run.scheduler.last_epoch + 1 == step else update(*args, **kwargs)
        )


def kill_run(launcher: psutil.Process) -> None:
    """Kill (SIGKILL) the launcher, then its ranks and their workers. Each rank has its own session; the calling rank goes last."""
    run = [launcher, *launcher.children(recursive=True)]
    is_mine = any(process.pid == os.getpid() for process in run)
    for process in run:
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    if is_mine:
        os.kill(os.getpid(), signal.SIGKILL)
