"""Parent of this process: the kernel's signal at its end, the message by which this process ends, and what the user gave it.

No process outlives its parent: a run its launcher, a data worker its run.

A process that is killed by SIGKILL (out of memory, an impatient scheduler) cannot tell its children, but the kernel can: on
Linux, a process can ask for a signal at the end of its parent (prctl(2), PR_SET_PDEATHSIG). More exactly, the signal comes
when the thread that started the process ends. Launchers and loaders start their processes from the main thread.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from accelerate_recipes.disk import write_atomically

PR_SET_PDEATHSIG = 1
# torch's launcher sets the first variable. Accelerate's launcher, which starts a single process itself, sets the second.
# Do not use ACCELERATE_MIXED_PRECISION: a person who starts a run without a launcher may export it.
LAUNCHED = {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"}

# The launcher's process id, or None if this process cannot identify a launcher; and the id of this process.
_launcher: int | None = None
_process: int | None = None


def follow_launcher() -> None:
    """End this process when the launcher ends: at once, until `stop.listen` asks for a signal that leaves time to save.

    If the launcher ended while this process was importing, this function ends the process. Workers that this process forks
    to prepare or load data end with the process.
    """
    global _launcher, _process
    _process = os.getpid()
    os.register_at_fork(after_in_child=follow_parent)
    if not LAUNCHED & os.environ.keys():
        return
    parent = os.getppid()
    # Do not use sys.argv: in it, a module's path replaces the module's name.
    command = sys.orig_argv[-len(sys.argv) :]
    started_by = command_of(parent)
    if started_by[-len(command) :] == command:
        _launcher = parent
        follow(signal.SIGKILL)
    # A process that adopts orphans has its own session. Any Python program may be a launcher with another command line.
    elif parent and not is_python(started_by) and os.getsid(parent) != os.getsid(0):
        leave_without_launcher()


def follow(number: int) -> None:
    """Ask for this signal at the end of the launcher; if the launcher is gone already, end this process."""
    if _launcher is not None:
        ask_kernel(number)
        if os.getppid() != _launcher:
            leave_without_launcher()


def launcher_is_gone() -> bool:
    """Tell whether the launcher, which may have held the store, has ended."""
    return _launcher is not None and os.getppid() != _launcher


def threads_are_chosen() -> bool:
    """Tell whether the user has chosen OMP_NUM_THREADS; launchers set it to 1 where the user has not.

    The nearest process above that no launcher has started is the launcher. It began with the user's environment.
    """
    if not LAUNCHED & os.environ.keys():
        return "OMP_NUM_THREADS" in os.environ
    with contextlib.suppress(psutil.Error):  # another user's process, or one that is gone
        for process in psutil.Process().parents():
            environment = process.environ()
            if not LAUNCHED & environment.keys():
                flags = (word.replace("-", "_") for word in process.cmdline())
                return "OMP_NUM_THREADS" in environment or any(f.startswith("__num_cpu_threads") for f in flags)
    return False


def leave_without_launcher() -> None:
    print("error: the launcher that started this process is gone", file=sys.stderr, flush=True)
    os._exit(1)


def tell_launcher(message: str) -> bool:
    """Write why this process ends to the file whose content torch's launcher prints last; without one, do nothing.

    The message has no call stack, which the launcher would print in its place.

    Returns:
        Whether the launcher will print it where this process prints: to the same file, pipe or terminal.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    # The launcher names the first process to fail, by whole seconds. Those that it ends then may end in the same second.
    failure = {"message": message, "extraInfo": {"timestamp": int(time.time()) - 1}}
    with contextlib.suppress(OSError):
        write_atomically(Path(file), json.dumps({"message": failure}))
        # Before it restarts its processes, it prints no message.
        restarts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
        if int(restarts[0]) >= int(restarts[1]) and os.getppid() == _launcher:
            return os.path.samestat(os.fstat(2), os.stat(f"/proc/{_launcher}/fd/2"))
    return False


def follow_parent() -> None:
    """End this process as soon as the process that forked it ends."""
    global _process
    parent, _process = _process, os.getpid()
    ask_kernel(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ask_kernel(number: int) -> None:
    """Ask the kernel for a signal when the parent is gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def command_of(process: int) -> list[str]:
    """Return a process's arguments, the program first; empty where they cannot be read."""
    try:
        return psutil.Process(process).cmdline()
    except psutil.Error:
        return []


def is_python(command: list[str]) -> bool:
    return bool(command) and os.path.basename(command[0]).startswith("python")
