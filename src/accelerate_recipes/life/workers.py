"""Fork server of the data's workers: they are forked from a process with one thread, whatever threads the run has by then.

A fork copies every lock, but only the thread that forks: a lock that another thread held (of a save in the background, of
the watch) is never released in the copy. Such a worker would never start, and its rank would wait for it, without a word.
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
from accelerate_recipes.life.stop import SIGNALS

LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # Linux has 107 bytes for the path of a socket


def start_fork_server() -> None:
    """Let multiprocessing, and so every DataLoader of this process, fork its workers from a process that is forked here.

    Call it before the first thread, and with all modules imported, which the workers share. No worker ever gets a signal
    that stops a run: a scheduler that wants the node back sends it to all processes, but the last steps and the save need
    the workers. They end when the loader tells them to, or with their process (see `parent`).

    Raises:
        ConfigError: for a TMPDIR in which no socket can have its name.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise ConfigError(
            f"--dataloader_num_workers: the path of {folder}, which will hold a socket, is longer than "
            f"{LONGEST_FOLDER} bytes; set TMPDIR to a shorter one, such as /tmp"
        )
    multiprocessing.set_start_method("forkserver", force=True)
    # The resource tracker, the server and the workers inherit what is blocked.
    blocked = {*SIGNALS, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    sys.warnoptions.append("ignore:resource_tracker")  # it would warn of each loader that is open when the process ends
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # starting the tracker has unblocked some
    start = util.spawnv_passfds
    # Python 3.11 starts its server as a new program, which would import everything again, for seconds and a second time in
    # memory. A fork is as safe as long as there is no other thread.
    util.spawnv_passfds = fork_server
    try:
        forkserver.set_forkserver_preload([])
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork_server(program: str, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Fork a process that runs `command`, a Python program with its code as last argument; return its id."""
    if process := os.fork():
        return process
    try:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already share the cores among themselves
        gc.freeze()  # else garbage collection in a worker would look at, and so copy, all that it shares
        exec(command[-1])
    finally:
        os._exit(1)


def remove_socket() -> None:
    """Remove the folder of the server's socket: this process ends without the interpreter's teardown, which would do it."""
    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
