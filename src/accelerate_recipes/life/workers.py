"""Fork server of data workers: it forks them from a process with one thread, whatever threads the run has by then.

A fork copies every lock, but only the thread that forks. A lock that another thread holds (a save in the background, the
watch) is never released in the copy. Such a worker would never start, and its rank would wait for it without a message.
"""

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life import parent
from accelerate_recipes.life.stop import SIGNALS

LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # Linux has 107 bytes for the path of a socket

_has_fork_server = False


def start_fork_server(*, of_loaders: bool = True) -> None:
    """Fork a process from which every DataLoader of this process (`of_loaders`) and every pass over rows forks its workers.

    Call it before the first thread starts, after all modules are imported; the workers share the modules. Workers block the
    signals that stop a run. A scheduler that wants the node back sends such a signal to all processes, but the last steps
    and the save need the workers. A worker ends when its loader ends it, or with its parent process (see `parent`).

    Raises:
        ConfigError: for a TMPDIR that is too long for the name of a socket. (A pass over rows then starts no workers.)
    """
    global _has_fork_server
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        if not of_loaders:
            return
        prefix = f"--dataloader_num_workers: the path of {folder}, which will hold a socket"
        raise ConfigError(f"{prefix}, is longer than {LONGEST_FOLDER} bytes; set TMPDIR to a shorter one, such as /tmp")
    if of_loaders:
        multiprocessing.set_start_method("forkserver", force=True)
    # The resource tracker, the server and the workers inherit the blocked signals.
    blocked = {*SIGNALS, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    sys.warnoptions.append("ignore:resource_tracker")  # it would warn of each loader that is open at the end
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # starting the tracker has unblocked some
    start = util.spawnv_passfds
    # Python 3.11 starts its server as a new program. This would import everything again: it takes seconds, and memory for a
    # second copy. A fork is equally safe as long as there is no other thread.
    util.spawnv_passfds = fork_server
    try:
        forkserver.set_forkserver_preload([])
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _has_fork_server = True


def has_fork_server() -> bool:
    return _has_fork_server


def fork_server(program: str, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Fork a process that runs `command`, a Python program with its code as the last argument; return its process id."""
    if process := os.fork():
        return process
    try:
        parent.ask_kernel(signal.SIGKILL)  # it holds both ends of the pipe by which it would see the end of its parent
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already share the cores among themselves
        gc.freeze()  # otherwise garbage collection in a worker would touch, and so copy, all shared memory
        exec(command[-1])
    finally:
        os._exit(1)


def remove_socket() -> None:
    """Remove the folder of the server's socket. The interpreter's teardown would do it, but this process ends without it."""
    if has_fork_server():
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
