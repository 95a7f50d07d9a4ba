"""Tests of the lock of an output directory: a living owner is respected, a dead one is replaced."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import threading

import pytest
from helpers import refuses

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life import lock, stop
from accelerate_recipes.life.status import is_known_dead, this_owner

HEARTBEAT = lock.HEARTBEAT
OTHER = {"host": "elsewhere", "process": 1, "job": "17", "restarts": 0, "run": "other"}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.1)
    monkeypatch.setattr(lock, "SILENCE", 1.0)
    monkeypatch.setattr(stop, "_asked_by", None)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    yield
    lock.release()


def owner_of(folder) -> dict:
    return json.loads((folder / "lock.json").read_text())


def test_a_second_living_run_is_an_error(tmp_path):
    """The first run is a separate process, with the real heartbeat."""

    def take_and_wait() -> None:
        lock.HEARTBEAT = HEARTBEAT
        lock.take(tmp_path)
        is_taken.set()
        threading.Event().wait()

    fork = multiprocessing.get_context("fork")
    is_taken, first = fork.Event(), fork.Process(target=take_and_wait)
    first.start()
    assert is_taken.wait(timeout=30)
    lock.SILENCE = 20.0
    refuses(f"in use by process {first.pid} on {socket.gethostname()}, which is alive", lock.take, tmp_path)
    first.kill()
    first.join()
    lock.take(tmp_path)  # at once: its process is gone
    assert owner_of(tmp_path)["process"] == os.getpid()
    lock.release()
    assert not (tmp_path / "lock.json").exists()


@contextlib.contextmanager
def touched(file):
    """Touch a file meanwhile, as its owner does."""
    owner_is_dead = threading.Event()

    def keep() -> None:
        while not owner_is_dead.wait(0.05):
            file.touch()

    owner = threading.Thread(target=keep)
    owner.start()
    try:
        yield
    finally:
        owner_is_dead.set()
        owner.join()


KNOWN = json.dumps(OTHER)


@pytest.mark.parametrize("text", [None, KNOWN, "[]", "{", json.dumps(OTHER | {"restarts": "1"}), "[" * 100_000])
def test_an_owner_of_whom_nothing_is_known_counts_while_it_touches_its_lock(tmp_path, text):
    """On another host; in a container with this host's name, where the number of a process may be none; in a damaged lock."""
    file, own = tmp_path / "lock.json", this_owner()
    assert is_known_dead(dead(), own) and not is_known_dead(
        OTHER | {"process": os.getppid(), "namespace": own["namespace"]}, own
    )
    file.write_text(text or json.dumps(dead() | {"host": own["host"], "namespace": own["namespace"] + "0"}))
    host = {None: own["host"], KNOWN: r"elsewhere \(job 17\)"}.get(text, "an unknown host")
    with touched(file):
        refuses(f"in use by process .* on {host}.*, which is alive", lock.take, tmp_path)
    lock.take(tmp_path)  # nobody touched it for SILENCE
    assert owner_of(tmp_path)["process"] == os.getpid()


def test_the_same_job_follows_itself_at_once(tmp_path, monkeypatch):
    (tmp_path / "lock.json").write_text(json.dumps(OTHER))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(lock.time, "monotonic", lambda: pytest.fail("it need not wait"))
    lock.take(tmp_path)
    assert owner_of(tmp_path)["restarts"] == 1


def test_who_was_taken_over_gives_way(tmp_path):
    lock.take(tmp_path)
    (tmp_path / "lock.json").write_text(json.dumps(OTHER))
    for _ in range(50):
        if stop.requested():
            break
        lock.time.sleep(0.1)
    assert stop.requested() == f"another run that took over {tmp_path}"
    lock.release()
    assert owner_of(tmp_path) == OTHER  # not ours to remove


def test_a_run_that_left_nothing_leaves_no_folder(tmp_path):
    lock.take(tmp_path / "out")
    lock.release()
    assert not (tmp_path / "out").exists()


def dead() -> dict:
    """Owner on this host whose process is gone."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return OTHER | {"process": process.pid, "namespace": this_owner()["namespace"]}


def test_one_of_several_takes_a_dead_owners_place(tmp_path):
    """Exactly one of several forked processes succeeds, in 20 trials that they begin together."""
    folders, takers = [tmp_path / str(i) for i in range(20)], 4
    for folder in folders:
        folder.mkdir()
        (folder / "lock.json").write_text(json.dumps(dead()))
    barrier = multiprocessing.get_context("fork").Barrier(takers)
    lock.HEARTBEAT = 0.02

    def take_all(taker: int) -> None:
        for folder in folders:
            barrier.wait(timeout=30)
            with contextlib.suppress(ConfigError):
                lock.take(folder)
                (folder / f"won-{taker}").touch()
            barrier.wait(timeout=30)
            lock.release()

    processes = [multiprocessing.get_context("fork").Process(target=take_all, args=(i,)) for i in range(takers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * takers
    assert [len(list(folder.glob("won-*"))) for folder in folders] == [1] * len(folders)


@pytest.mark.parametrize("content", [json.dumps(OTHER), ""], ids=["whole", "not yet written"])
def test_who_looked_too_early_does_not_remove_a_newer_lock(tmp_path, monkeypatch, content):
    """Another process takes the lock after this one has looked, but before it removes the dead owner's lock."""
    file, faster = tmp_path / "lock.json", OTHER | {"host": "faster", "run": "faster"}
    file.write_text(content)
    os.utime(file, (0, 0))
    looks = []

    def look(path, me):
        looks.append(path)
        if len(looks) == 1:
            file.write_text(json.dumps(faster) if content else "")
            return None
        return lock.read(path) or faster

    monkeypatch.setattr(lock, "living_owner", look)
    assert lock.acquire(file, OTHER | {"run": "slower"}) == faster
    assert file.read_text() == (json.dumps(faster) if content else "")
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def test_a_taker_that_died_while_taking_over_is_followed(tmp_path):
    for name in ("lock.json", "lock-takeover.json"):
        (tmp_path / name).write_text(json.dumps(dead()))
    lock.take(tmp_path)
    assert owner_of(tmp_path)["process"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]
