"""Tests that no process outlives the one that it works for."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver

import psutil
import pytest
import torch
from helpers import CHILDREN, refuses

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.rows import StepOrder, make_train_loader
from accelerate_recipes.life import parent, workers

# Starts the command in its arguments, as a launcher does, in a new session or not.
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-u", *sys.argv[2:]], start_new_session=sys.argv[1] == "torch").wait()
"""
# Prints its id and imports until told to continue; then it waits at a rendezvous, and forks; or trains, and saves when told.
PROCESS = """
import os, signal, sys, time
from accelerate_recipes.life import parent

print(os.getpid(), flush=True)
phase, go_on = sys.argv[1:]
while phase == "importing" and not os.path.exists(go_on):
    time.sleep(0.02)
parent.follow_launcher()
if phase == "training":
    def save(*_):
        open(go_on, "w").close()
        os._exit(0)
    signal.signal(signal.SIGTERM, save)
    parent.follow(signal.SIGTERM)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as slurm/submit.sh has it until then
forked = 0 if phase == "training" else os.fork()
if forked or phase == "training":
    print("ready", forked, flush=True)
time.sleep(60)
"""
MARKS = {"torch": {"TORCHELASTIC_RUN_ID": "none"}, "accelerate": {"ACCELERATE_USE_CPU": "False"}}


def ends(process: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


# Starts the code in its last argument with one thread, unless threads are chosen, as launchers do; perhaps by a script.
LIMITING = """
import os, subprocess, sys
env = {"OMP_NUM_THREADS": "1"} | os.environ | {"TORCHELASTIC_RUN_ID": "none"}
command = ["bash", "-c", '"$@"; exit', "bash"] if "--no_python" in sys.argv else []
subprocess.run([*command, sys.executable, "-c", sys.argv[-1]], env=env, check=True)
"""


@pytest.mark.parametrize("threads, flags, chosen", [
    (None, (), False), ("1", (), True), ("3", (), True), (None, ("--num_cpu_threads_per_process", "1"), True),
    (None, ("--num-cpu-threads-per-process=1",), True), (None, ("--no_python",), False), ("1", ("--no_python",), True),
])  # fmt: skip
def test_who_has_chosen_the_threads(threads, flags, chosen):
    """A launcher's limit of one thread differs from the same number in the environment of the user."""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", *parent.LAUNCHED)}
    env |= {"OMP_NUM_THREADS": threads} if threads else {}
    told = "from accelerate_recipes.life import parent; print(parent.threads_are_chosen())"
    command = [sys.executable, "-c", LIMITING, *flags, told]
    assert subprocess.check_output(command, env=env, text=True, timeout=60).strip() == str(chosen)


@pytest.mark.parametrize("threads", [None, "1"])
def test_without_a_launcher_the_environment_is_the_users(threads, monkeypatch):
    for name in ("OMP_NUM_THREADS", *parent.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert parent.threads_are_chosen() == bool(threads)


# Gives its message to a launcher, which has the same stderr or another; prints whether the launcher will print it.
TELLING = """
import os, sys
from accelerate_recipes.life import parent

if sys.argv[1] == "redirected":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
parent.follow_launcher()
print(parent.tell_launcher("error: no"), flush=True)
"""


@pytest.mark.parametrize(
    "stderr, restarts, printed",
    [("shared", ("0", "0"), True), ("redirected", ("0", "0"), False), ("shared", ("0", "1"), False),
     ("shared", ("1", "1"), True)],
)  # fmt: skip
def test_who_prints_the_message(tmp_path, stderr, restarts, printed):
    """The launcher does, once, at its end: not into the log of a rank, and not if it starts the ranks again."""
    (tmp_path / "recipe.py").write_text(TELLING)
    command = [sys.executable, "-c", LAUNCHER, "torch", str(tmp_path / "recipe.py"), stderr]
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    env = os.environ | MARKS["torch"] | dict(zip(names, restarts, strict=True))
    env |= {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    assert subprocess.check_output(command, env=env, text=True, timeout=60).strip() == str(printed)
    assert "error: no" in (tmp_path / "error.json").read_text()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(PROCESS)
    return path


@pytest.mark.parametrize("launcher", MARKS)
@pytest.mark.parametrize("phase", ["importing", "rendezvous", "training"])
def test_the_launcher_is_killed(script, tmp_path, launcher, phase):
    """The launcher is killed before the process asked for the signal, after, and when there is something to save."""
    go_on = tmp_path / "go_on"
    command = [sys.executable, "-c", LAUNCHER, launcher, script, phase, go_on]
    env = os.environ | MARKS[launcher]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:  # fmt: skip
        process = int(first.stdout.readline())
        try:
            forked = 0
            if phase != "importing":
                forked = first.stdout.readline().split()[1]
            first.kill()
            first.wait()
            if phase == "importing":
                assert not ends(process, 0.2)
                go_on.touch()
            assert ends(process) and (phase != "rendezvous" or ends(int(forked)))
            assert ("the launcher" in first.stderr.read()) == (phase == "importing")
            assert go_on.exists() == (phase != "rendezvous")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


OTHER_STARTS = {
    "by hand": ([], {}),
    # The environment holds the run's command line, so that bash's own command line does not end with it.
    "by a scheduler, with a precision exported": (["bash", "-c", "setsid $RUN; exit"], {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "by a program that is no launcher": ([sys.executable, "-c", LAUNCHER, "alike"], {}),
    "by a launcher with another command line": (
        [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(sys.argv[1:] + ['rendezvous', 'x'], start_new_session=True).wait()"],
        MARKS["torch"],
    ),
    "by a launcher through a shell": (
        [sys.executable, "-c", LAUNCHER.replace('sys.executable, "-u"', '"bash", "-c", "\\"$@\\" rendezvous x; exit", "bash", sys.executable'), "torch"],
        MARKS["torch"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("command, env", OTHER_STARTS.values(), ids=OTHER_STARTS)
def test_others_are_left_alone(script, command, env):
    """A process without a launcher, or with one whose command line is unknown, is not treated as an orphan."""
    if "Popen(sys.argv[1:]" in str(command):
        command = [*command, sys.executable]
    arguments = [script] if env == MARKS["torch"] else [script, "rendezvous", "x"]
    run = [sys.executable, *arguments]
    env = env | {"RUN": " ".join(map(str, run))}
    if "setsid $RUN; exit" not in command:
        command = [*command, *arguments] if command else run
    with subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True, start_new_session=True) as first:  # fmt: skip
        process = int(first.stdout.readline())
        try:
            assert first.stdout.readline().startswith("ready")
        finally:
            os.kill(process, signal.SIGKILL)


def test_a_process_that_is_forked_while_its_own_dies(monkeypatch):
    """It is too late for the kernel's signal, but the process sees that another one has adopted it."""
    monkeypatch.setattr(parent, "_process", 1)  # process 1 did not fork this one
    monkeypatch.setattr(parent, "ask_kernel", lambda number: None)
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    with pytest.raises(ZeroDivisionError):
        monkeypatch.setattr(os, "_exit", lambda code: 1 / 0)
        parent.follow_parent()


class Rows(torch.utils.data.Dataset):
    """Rows of which each worker's fourth takes for ever."""

    seen = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        assert gc.get_freeze_count() > 10_000, "a collection in a worker would copy what all of them share"
        self.seen += 1
        if self.seen == 4:
            time.sleep(60)
        return i


ARGS = TrainArgs(total_batch_size=1, dataloader_num_workers=2)


def first_rows(connection) -> None:
    """Send, from a new process, the ids of its workers, and its rows, the last four after SIGTERM to all workers."""
    forkserver._forkserver.__init__()  # a server that an earlier test left is no child of this process
    parent.follow_launcher()
    workers.start_fork_server()
    batches = iter(make_train_loader(Rows(), ARGS, 0, 1))
    rows = [next(batches).item() for _ in range(2)]  # one from each worker, so that both have started before the signal
    started = [process.pid for process in multiprocessing.active_children()]
    for worker in started:
        os.kill(worker, signal.SIGTERM)
    time.sleep(0.2)
    rows += [next(batches).item() for _ in range(4)]
    connection.send((started, rows))
    time.sleep(60)


def test_workers_live_as_long_as_their_process():
    """SIGTERM, which a scheduler sends to every process, does not end workers; the end of their process does, at once."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=first_rows, args=(there,))
    process.start()
    there.close()
    assert here.poll(60)
    started, rows = here.recv()
    assert [[row] for row in rows] == list(itertools.islice(StepOrder(8, ARGS, 0, 1), 6))
    process.kill()
    process.join()
    assert len(started) == 2 and [ends(worker) for worker in started] == [True, True]


def starts_of_workers(folder, *args: object) -> int:
    """Run tests/children/worker_starts.py; return its exit code."""
    command = [sys.executable, str(CHILDREN / "worker_starts.py"), str(folder), *map(str, args)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def test_a_socket_has_no_room_for_its_name(tmp_path, monkeypatch):
    """The error leaves no folder behind."""
    folder = tmp_path / (90 * "x")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    refuses("is longer than 75 bytes; set TMPDIR to a shorter one", workers.start_fork_server)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_workers_start_beside_other_threads(tmp_path):
    """They neither hang nor end by a signal while saves run in the background; a fork of the process itself soon hangs."""
    assert starts_of_workers(tmp_path, 100, "server", "signals") == 0


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_20_000_workers_start_beside_other_threads(tmp_path):
    assert starts_of_workers(tmp_path, 20_000, "server") == 0
    assert starts_of_workers(tmp_path, 500, "server", "signals") == 0
    assert starts_of_workers(tmp_path, 20_000) == -signal.SIGALRM, "forks do not hang any more: the server is needless"
