"""Tests of copies elsewhere: each is complete or absent, whatever the store does and wherever the run is killed."""

import contextlib
import itertools
import json
import queue
import random
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fsspec
import psutil
import pytest
import store_with_faults
from faults import kill_run
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from helpers import CHILDREN, ROOT, environment, launch_command, launch_ok, losses, refuses
from huggingface_hub import constants, hf_file_system
from huggingface_hub.hf_file_system import BucketFile, BucketFolder
from store_with_faults import Faulty

from accelerate_recipes.arguments.mirror import url_problems
from accelerate_recipes.checkpoint import files, mirror, store, uploader
from accelerate_recipes.checkpoint.files import name_of_copy, step_of_copy
from accelerate_recipes.checkpoint.resume import check_kind
from accelerate_recipes.checkpoint.store import Gone, Pace, Store, StoreError
from accelerate_recipes.checkpoint.uploader import Uploader
from accelerate_recipes.life.status import this_owner

SCRIPT = CHILDREN / "toy.py"
ARGUMENTS = {"seed": 1, "learning_rate": 1e-5, "output_dir": "out", "resume_from_checkpoint": "latest"}
RULES = dict(zip(files.RULES, (2, 0, "", None), strict=True))


def make_checkpoint(out: Path, step: int, seed: int = 0, ranks: int = 2, metrics: str = "") -> Path:
    """Write a complete checkpoint of random bytes, as `Checkpointer` does."""
    made = random.Random(f"{step} {seed}")
    final = out / f"checkpoint-{step}"
    contents = {"args.yaml": b"seed: 1\nlearning_rate: 1.0e-05\n", "metrics.jsonl": metrics.encode()}
    for rank in range(ranks):
        contents[f"state/__{rank}_0.distcp"] = made.randbytes(made.randrange(1, 5000))
        contents[f"rng-{rank}.pt"] = made.randbytes(40)
    entries = {}
    for name, data in contents.items():
        file = files.unfinished(final) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        entries |= files.describe(file, files.unfinished(final))
    files.write_marker(files.unfinished(final), {"step": step, "world_size": ranks, "files": entries})
    files.unfinished(final).rename(final)
    return final


def owner(number: int = 0, process: int = 2**30) -> dict:
    """Make an owner of a lease, by default one that is known to be dead."""
    return this_owner() | {"process": process, "run": str(number), "job": "", "restarts": 0}


fails_with = partial(refuses, error=StoreError)
MADE: list[Uploader] = []  # in a test


def make_uploader(url: str, out: Path, number: int = 0, rank: int = 0, **changes) -> Uploader:
    """Make an uploader in this process, of one machine of one rank or of two; what it tells is in `told`."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "url": url, "output_dir": str(out), "bandwidth": 0, "rank": rank, "world_size": 2, "owner": owner(number),
        "arguments": ARGUMENTS, "fixed": ["seed"], "of_place_and_speed": ["output_dir"], "may_adopt": False, "rules": RULES, "has_own_disk": False, "ranks": [0],
    }  # fmt: skip
    made = Uploader(settings | changes)
    made.heard = []
    made.tell = lambda **event: made.heard.append(event)
    MADE.append(made)
    return made


def begun(*args: object, **changes) -> Uploader:
    made = make_uploader(*args, **changes)
    made.begin()
    return made


def complete_there(place: Path) -> list[int]:
    """List the steps of complete copies, by reading each file on the disk of the store: none with a marker lacks a file."""
    steps = []
    for folder in place.glob("checkpoint-*-*"):
        with contextlib.suppress(FileNotFoundError, ValueError):  # no marker, or half of one
            marker = files.read_marker(folder)
            assert name_of_copy(marker) == folder.name and files.damage(folder) is None
            steps.append(marker["step"])
    return sorted(steps)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(store, "WAITS", (0.001,) * 12)
    monkeypatch.setattr(uploader, "LOOK", 0.001)
    store_with_faults.register()
    for name, value in {"rate": 0.0, "counts": {}, "listings": {}, "killed_after": None}.items():
        monkeypatch.setattr(Faulty, name, value)
    yield
    for made in MADE:
        made.is_lost = True  # its thread ends
    MADE.clear()


@pytest.mark.parametrize("machines", [1, 2])
def test_each_start_goes_on_from_the_newest_complete_copy(tmp_path, monkeypatch, machines):
    """Hundreds of faults, and SIGKILL at a random call of the store in each attempt, after which the disk is deleted."""
    place, out, seed = tmp_path / "place", tmp_path / "out", 54 + machines
    monkeypatch.setattr(Faulty, "generator", random.Random(seed))
    monkeypatch.setattr(uploader, "LEASE", 3.0)  # a start waits for it where a lease was cut
    monkeypatch.setattr(Uploader, "keep_lease", lambda self: None)  # a process that is killed renews none
    chance, step, kept_after, resumed = random.Random(seed), 0, [], set()
    for number in range(25 if machines == 1 else 12):
        shutil.rmtree(out, ignore_errors=True)
        Faulty.rate, Faulty.killed_after = 0.0, None
        first = make_uploader(f"faulty://{place}", out, number)
        first.ranks = [0, 1][:machines]
        Faulty.rate = 0.15
        newest = max(complete_there(place), default=0)
        first.begin()
        first.fetch_newest()
        here = files.complete_checkpoints(out)
        assert [files.step_of(path) for path in here] == ([newest] if newest else []), first.heard
        assert not here or files.damage(here[0]) is None
        resumed.add(newest)
        step = newest
        Faulty.killed_after = chance.randrange(10, 120)
        try:
            with other_machine(first, machines):
                for _ in range(4):
                    step += chance.randrange(1, 3)
                    make_checkpoint(out, step, seed=number)
                    first.turn_of_first()
                    kept_after.append(complete_there(place))
                    assert kept_after[-1][-1] == step and len(kept_after[-1]) <= 2
        except store_with_faults.Killed:
            pass
        first.is_lost = True  # its thread ends
    assert sum(Faulty.counts.values()) > (200 if machines == 1 else 40), Faulty.counts
    assert machines > 1 or {*Faulty.counts} == {*store_with_faults.FAULTS}, Faulty.counts
    # How far the first of two machines comes depends on when the other one has sent its files.
    assert len(resumed) > (10 if machines == 1 else 2) and kept_after


@contextlib.contextmanager
def other_machine(first: Uploader, machines: int):
    """Let the uploader of a second machine work in a thread meanwhile."""
    over = threading.Event()
    other = make_uploader(first.settings["url"], first.output_dir, rank=1)
    other.ranks = [0, 1]

    def work() -> None:
        while not over.is_set():
            with contextlib.suppress(Gone, StoreError, OSError, store_with_faults.Killed):
                other.turn_of_other()
            over.wait(0.02)  # it is the slower one

    thread = threading.Thread(target=work, daemon=True)
    if machines > 1:
        thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join() if machines > 1 else None


def test_a_copy_with_a_damaged_file_is_set_aside(place, out):
    copied(place, out, 3, 6)
    (copy,) = place.glob("checkpoint-6-*")
    (copy / "rng-1.pt").write_bytes(b"x" * 40)
    shutil.rmtree(out)
    again = begun(str(place), out, 1)
    assert again.fetch_newest().startswith("checkpoint-3-")
    assert any("checkpoint-6" in event["say"] and "checksum of rng-1.pt" in event["say"] for event in again.heard[1:])
    assert "checksum" in json.loads((copy / "damaged.json").read_text())["reason"] and complete_there(place) == [3]
    make_checkpoint(out, 6, seed=1)
    again.turn_of_first()
    assert complete_there(place) == [3, 6] and not copy.exists(), "what is incomplete goes when the next is complete"


def all_files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def size_of(folder: Path) -> int:
    return sum(map(len, all_files(folder).values()))


def copied(place: Path, out: Path, *steps: int, is_faulty: bool = False) -> Uploader:
    """Copy checkpoints of some steps; returns the uploader, whose lease is that of a process that is dead."""
    made = begun(f"faulty://{place}" if is_faulty else str(place), out)
    for step in steps:
        make_checkpoint(out, step)
        made.turn_of_first()
    return made


def test_who_takes_the_place_of_an_earlier_run(tmp_path):
    """With an empty directory: the same run, on another disk or at another speed, and who asks for it. Nobody else."""
    place, numbers = tmp_path / "place", itertools.count(1)
    copied(place, tmp_path / "out", 3)
    with pytest.raises(StoreError, match="another run than"):
        make_checkpoint(tmp_path / "other", 1)
        begun(str(place), tmp_path / "other")
    before = all_files(place)

    def begin(said: str = "", may_adopt: bool = False, **changed: object) -> Uploader:
        """Begin with an empty directory, and with other arguments; `said` is why this is refused."""
        number, given = next(numbers), {"arguments": ARGUMENTS | changed, "may_adopt": may_adopt}
        made = make_uploader(str(place), tmp_path / f"empty{number}", number, **given)
        fails_with(said, made.begin) if said else made.begin()
        assert (made.output_dir / "mirror.json").exists() == (not said)
        return made

    begin(r"was 1e-05 and is now 0\.0001; .* --resume_from_checkpoint mirror", learning_rate=1e-4)
    said = "--resume_from_checkpoint was 'latest' and is now 'out/checkpoint-3'"
    begin(said, resume_from_checkpoint="out/checkpoint-3")
    assert all_files(place) == before, "who is refused changes nothing"
    assert begin(output_dir="elsewhere").fetch_newest().startswith("checkpoint-3-")
    begin("whose --seed was 1 and is now 2; set it back", may_adopt=True, seed=2)
    other = begin(may_adopt=True, learning_rate=1e-4)
    assert other.fetch_newest().startswith("checkpoint-3-")
    other.turn_of_first()
    begin(r"--learning_rate was 0\.0001 and is now 1e-05")  # it has begun with another one
    run = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps({"id": run["id"], "fixed": {"seed": 1}}))  # as earlier versions wrote it
    begin(r"--learning_rate was 1e-05 and is now 0\.0001", learning_rate=1e-4)
    begin()


def test_only_the_store_condemns_a_copy(place, out, monkeypatch):
    """A disk that cannot read, or reads other bytes, is no proof; nor is a store that returns each time something else."""
    copied(place, out, 3, 6, is_faulty=True)
    shutil.rmtree(out)
    again, answers = make_uploader(f"faulty://{place}", out, 1), itertools.count()
    (newest,), (older,) = (place.glob(f"checkpoint-{step}-*") for step in (6, 3))

    def fails(reason: str, **ill) -> None:
        """The newest copy is not fetched, no older one is taken silently, and all stays; functions of the store may be ill."""
        before = all_files(place)
        with monkeypatch.context() as patched:
            for name, function in ill.items():
                patched.setattr(files if name == "checksum" else Faulty, name, function)
            fails_with(rf"(?s){reason}", again.fetch_newest)
        assert all_files(place) == before and files.complete_checkpoints(out) == []

    def changing(fs, path, **options) -> bytes:
        return fs.inner.cat_file(path) if path.endswith("json") else next(answers).to_bytes(40)

    fails("checkpoint-6-.*cannot be fetched to .*out", checksum=lambda file: "0" * 32)
    fails("checkpoint-6-.*cannot be fetched to .*out", checksum=lambda file: file.open("x"))  # an OSError
    fails("HTTP 503", get_file=mock.Mock(side_effect=OSError("HTTP 503")))
    (newest / "rng-1.pt").write_bytes(b"x" * 40)
    fails("checkpoint-6-.*otherwise", cat_file=changing)
    (older / "rng-0.pt").unlink()
    fails(r"checkpoint-6-.*is damaged .*checksum of rng-1\.pt.* it stays")
    (newest / "complete.json").write_text("{}")  # of a marker alone, too
    fails(r"checkpoint-6-.*is damaged .*complete\.json.* it stays")


@pytest.mark.parametrize(
    "name", ["args.yaml", "checkpoint-3", "notes/x.txt", "run.json.bak", "checkpoint-3-0a1b2c3d/rng-0.pt"]
)
def test_a_place_must_be_empty(place, out, name):
    """But for hidden files, lost+found, and what a first start has left that was killed."""
    (place / "lost+found").mkdir(parents=True)
    (place / ".hidden").write_text("x")
    (place / "lease.json").write_text(json.dumps({"owner": owner(7), "beat": [7, 1], "copies": []}))
    first = make_uploader(str(place), out)
    foreign = place / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("of another")
    before = all_files(place)
    fails_with(f"holds {name.split('/')[0]}, but no run.json", first.begin)
    assert all_files(place) == before and not (out / "mirror.json").exists()
    shutil.rmtree(place / name.split("/")[0]) if "/" in name else foreign.unlink()
    first.begin()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"id": 1, "fixed": {}}', '{"id": "a", "arguments": []}', "[" * 100_000]
)
def test_damaged_files_of_a_place(place, out, monkeypatch, text):
    """run.json decides whose place it is, so it must be whole. A damaged lease is that of a process of whom nothing is known."""
    copied(place, out, 3)
    (place / "lease.json").write_text(text)
    (out / "mirror.json").write_text(text)
    monkeypatch.setattr(uploader, "LEASE", 0.2)
    shutil.rmtree(out)
    again = begun(str(place), out, 1)
    assert again.fetch_newest().startswith("checkpoint-3-") and "process 0 on an unknown host" in again.heard[0]["say"]
    again.is_lost = True
    (place / "run.json").write_text(text)
    before = all_files(place)
    fails_with(r"/run\.json does not say whose place this is", begun, str(place), out, 2)
    assert all_files(place) == before


def test_a_disk_that_is_gone(tmp_path):
    """Its folder is not made anew, and a place that the run knew is not taken for a new one."""
    (tmp_path / "mount").mkdir()
    place, out, away = tmp_path / "mount/place", tmp_path / "out", tmp_path / "away"
    first = copied(place, out, 3)
    assert first.heard[0]["say"].startswith(f"{place} is a new place")
    make_checkpoint(out, 6)
    for is_folder in (False, True):  # the disk was mounted above the place, or at it
        place.rename(away)
        place.mkdir() if is_folder else None
        for turn in (first.turn_of_first, first.share, make_uploader(str(place), out, 1).begin):
            fails_with("is its disk mounted", turn)
        assert not place.exists() or list(place.iterdir()) == []
        place.rmdir() if is_folder else None
        away.rename(place)
    first.turn_of_first()
    assert complete_there(place) == [3, 6]
    with pytest.raises(StoreError, match=r"there is no folder .*/mount/missing"):
        begun(str(tmp_path / "mount/missing/place"), tmp_path / "new")
    assert not (tmp_path / "mount/missing").exists()
    moved = make_uploader(str(tmp_path / "mount/moved"), out, 2)  # a place that it did not know may be empty
    moved.begin()
    moved.turn_of_first()
    assert complete_there(tmp_path / "mount/moved") == [6]


def test_a_disk_that_was_full_once(place, out, monkeypatch):
    """What is left of the copy that did not fit goes before the next one is sent, and no complete copy does."""
    first = copied(place, out, 3, is_faulty=True)
    before = size_of(place)
    monkeypatch.setattr(Faulty, "place", place)
    monkeypatch.setattr(Faulty, "capacity", before + size_of(make_checkpoint(out, 6)) - 20)
    fails_with("No space left", first.turn_of_first)
    assert size_of(place) == Faulty.capacity > before + 3000 and complete_there(place) == [3]
    monkeypatch.setattr(Faulty, "capacity", before + size_of(make_checkpoint(out, 9)) + 1000)  # part-marker and lease
    first.turn_of_first()
    assert complete_there(place) == [3, 9] and not list(place.glob("checkpoint-6-*/*"))


def test_one_answer_of_an_ill_store_removes_nothing(place, out, monkeypatch):
    """A marker or the metrics that are said to be absent, once or always: the copy stays, and is not taken for another."""
    first = copied(place, out, 3, 6, is_faulty=True)
    whole, absent = Faulty.cat_file, {}

    def cat_file(fs, path, **options):
        name = path.removeprefix(f"{place}/")
        if absent.get(name, 0) > 0:
            absent[name] -= 1
            raise FileNotFoundError(path)
        return whole(fs, path, **options)

    def named(step: int, name: str) -> str:
        (copy,) = place.glob(f"checkpoint-{step}-*")
        return f"{copy.name}/{name}"

    monkeypatch.setattr(Faulty, "cat_file", cat_file)
    for step, times, kept in ((9, 1, [6, 9]), (12, 5, [9, 12]), (15, 10**6, [9, 12, 15])):
        make_checkpoint(out, step, metrics=json.dumps({"step": step, "eval_loss": step}) + "\n")
        absent = {named(step - 3, "complete.json"): times}
        first.turn_of_first()
        assert complete_there(place) == kept
    first.settings["rules"] = dict(zip(files.RULES, (2, 0, "loss", None), strict=True))
    make_checkpoint(out, 18)
    absent = {named(15, "metrics.jsonl"): 10**6}
    fails_with(r"checkpoint-15-\w+/metrics\.jsonl is not what was sent", first.turn_of_first)
    assert complete_there(place) == [9, 12, 15, 18]
    shutil.rmtree(out)
    absent = {named(18, "complete.json"): 10**6}
    again = begun(f"faulty://{place}", out, 1)
    fails_with(r"lists checkpoint-18-\w+/complete\.json, and does not return it", again.fetch_newest)
    assert complete_there(place) == [9, 12, 15, 18]


def test_a_disk_that_returns_other_bytes_sends_none(place, out, monkeypatch):
    first = copied(place, out, 3)
    harmed = make_checkpoint(out, 6) / "rng-1.pt"
    harmed.write_bytes(bytes(40))
    with monkeypatch.context() as patched, pytest.raises(StoreError, match=r"checkpoint-6 is damaged.*rng-1\.pt"):
        patched.setattr(Store, "send", lambda *args: pytest.fail("files beside it would be sent at each attempt"))
        first.turn_of_first()
    make_checkpoint(out, 9)
    first.turn_of_first()
    assert complete_there(place) == [3, 9]


def test_what_is_said_of_a_store_that_does_not_answer(place, out, monkeypatch):
    silent = make_uploader(f"faulty://{place}", out)
    for name, value in (("NOTE_EVERY", 0.05), ("PATIENCE", 0.2), ("WAITS", (0.01,) * 2)):
        monkeypatch.setattr(store, name, value)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="no answer within 0 s"):
        patched.setattr(Faulty, "cat_file", lambda *args, **options: time.sleep(1))
        silent.begin()
    said = [event["say"] for event in silent.heard]
    assert any("no answer for 0 s; still trying" in text and str(place) in text for text in said)
    without_keys = type("NoCredentialsError", (Exception,), {})  # as botocore calls it
    for error in (PermissionError("Forbidden"), without_keys("no keys")):
        refuse = mock.Mock(side_effect=error)
        monkeypatch.setattr(Faulty, "cat_file", refuse)
        fails_with(f"{place} refuses access .*{error}.*list, read, write and remove", silent.begin)
        refuse.assert_called_once()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_refused_run_says_nothing_of_copies(tmp_path, monkeypatch, capsys, has_begun):
    answers = queue.Queue()
    answers.put({"ended": False, "copy": "", "problem": "a problem"})
    sender = SimpleNamespace(
        is_ending=False, has_begun=has_begun, answers=answers, ask=lambda **asked: None, note=lambda noted: None
    )
    monkeypatch.setattr(mirror, "_sender", sender)
    make_checkpoint(tmp_path, 3)
    mirror.finish_copies(tmp_path, "failed")
    assert ("NOT complete" in capsys.readouterr().out) == has_begun


def test_one_writer_has_the_lease(place, tmp_path, monkeypatch):
    """A start waits for a foreign lease that does not change, and refuses one that does; a writer that lost it stops."""
    monkeypatch.setattr(uploader, "LEASE", 0.6)
    alive = {"host": "elsewhere", "process": 1, "run": "a", "job": "", "restarts": 0}
    first = make_uploader(str(place), tmp_path / "first", owner=alive)
    first.begin()  # renews each 0.2 s
    fails_with("process 1 on elsewhere, which is alive", begun, str(place), tmp_path / "second", 1)
    first.renew_lease = lambda: None
    time.sleep(0.3)
    before = time.monotonic()
    second = begun(str(place), tmp_path / "third", 2)
    assert 0.5 < time.monotonic() - before < 5 and "waiting" in second.heard[0]["say"]
    del first.renew_lease
    make_checkpoint(tmp_path / "first", 3)
    fails_with("another run has taken over", first.turn_of_first)
    assert complete_there(place) == []


def test_a_part_of_another_number_of_machines_is_not_the_whole(place, out):
    """The machine of rank 1 was lost before it sent its part, and the run goes on without it."""
    first = make_uploader(str(place), out)
    first.ranks, checkpoint = [0, 1], make_checkpoint(out, 3)
    first.begin()
    marker = files.read_marker(checkpoint)
    first.send_part(checkpoint, name_of_copy(marker), marker)
    assert not list(place.rglob("rng-1.pt"))
    again = begun(str(place), out, 1)
    again.turn_of_first()
    assert complete_there(place) == [3]


def test_what_is_kept(place, out):
    """As in the output directory: the newest two, multiples, the best; never less than the newest complete one."""
    rules = dict(zip(files.RULES, (1, 4, "loss", None), strict=True))
    first = begun(str(place), out, rules=rules)
    kept = []
    for step, loss in enumerate([5, 1, 3, 2, 4, float("nan")], start=1):
        make_checkpoint(out, step, metrics=json.dumps({"step": step, "eval_loss": loss}) + "\n")
        first.turn_of_first()
        kept.append(complete_there(place))
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 6]]


def test_a_checkpoint_that_is_removed_meanwhile(place, out):
    """The next save would not fit: the run removes what is being sent, and the uploader goes on with the newest."""
    first = begun(str(place), out, bandwidth=1e9)
    old, sent = make_checkpoint(out, 3), []

    def remove_it(inc: int) -> None:
        assert json.loads((out / "mirror.json").read_text())["reading"] == "checkpoint-3"
        sent.append(inc)
        shutil.rmtree(old, ignore_errors=True)
        Pace.relative_update(first.pace, inc)

    first.pace.relative_update = remove_it
    with pytest.raises(Gone):
        first.turn_of_first()
    assert len(sent) <= 4 and json.loads((out / "mirror.json").read_text())["reading"] is None
    del first.pace.relative_update
    for step in (6, 9, 12):
        make_checkpoint(out, step)
    first.turn_of_first()
    assert complete_there(place) == [12], "all but the newest are skipped"


def test_bandwidth_and_deadline(tmp_path, monkeypatch):
    """A cap holds on average, also where a client sends at once; a call that hangs is tried again."""
    (tmp_path / "file").write_bytes(bytes(200_000))
    (tmp_path / "place").mkdir()
    begun = time.monotonic()
    Store(str(tmp_path / "place")).send(tmp_path / "file", "file", Pace(400_000))
    assert 0.4 < time.monotonic() - begun < 3
    monkeypatch.setattr(store, "PATIENCE", 0.1)
    monkeypatch.setattr(store, "SLOWEST", 1e9)
    calls = iter([0.5, 0])
    monkeypatch.setattr(Faulty, "info", lambda self, path: time.sleep(next(calls, 0)) or {"size": 200_000})
    Store(f"faulty://{tmp_path}/place").send(tmp_path / "file", "other", Pace())
    assert next(calls, None) is None


def test_no_error_holds_a_credential(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcd1234efgh")
    error = OSError("PUT https://me:word@host/x?X-Amz-Signature=77 failed with abcd1234efgh, token=zzz")
    assert store.told(error) == "OSError: PUT https:...host/x... failed with ..., token=..."


def test_urls():
    assert [url_problems(url) for url in ("/mnt/other", "file:///mnt/other", "hf://buckets/me/b/run")] == [[]] * 3
    for url in ("s3://me:secret@b/run", "https://h/run?key=secret", "simplecache::s3://b/run"):
        (problem,) = url_problems(url)
        assert "credentials" in problem and "secret" not in problem
    assert "run: pip install gcsfs==" in url_problems("gs://b/run")[0]
    assert "fsspec knows no s9://" in url_problems("s9://b/run")[0]
    assert "hf://buckets/" in url_problems("hf://me/model")[0]


class Bucket:
    """Stand-in for HfApi: one bucket of the Hub, whose files a file server shows. Real buckets are read and written by Xet."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files

    def place(self, name: str) -> str:
        return f"/buckets/me/bucket/resolve/{name}"

    def _build_hf_headers(self) -> dict[str, str]:
        return {}

    def bucket_info(self, bucket: str) -> None:
        assert bucket == "me/bucket"

    def batch_bucket_files(self, bucket: str, add=(), delete=()) -> None:
        self.files.update({self.place(name): Path(source).read_bytes() for source, name in add})
        for name in delete:
            del self.files[self.place(name)]  # an error for what is not there

    def list_bucket_tree(self, bucket: str, prefix: str, recursive: bool):
        folders = set()
        for path, data in sorted(self.files.items()):
            name = path.removeprefix(self.place(""))
            below = name.removeprefix(f"{prefix}/")
            if below == name:
                continue
            if recursive or "/" not in below:
                yield BucketFile(type="file", path=name, size=len(data), xetHash=None)
            elif (folder := f"{prefix}/{below.partition('/')[0]}") not in folders:
                folders.add(folder)
                yield BucketFolder(type="directory", path=folder)


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run", "hf://buckets/me/bucket/run"])
def test_other_stores(url, tmp_path, monkeypatch, serve):
    """Memory stands for gs and az. For the Hub the client is the real one, and its API a stand-in."""
    scheme, out = url.partition(":")[0], tmp_path / "out"
    if scheme == "hf":
        server = serve({})
        for name, value in (("ENDPOINT", server.url), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_file_system, "HfApi", lambda **options: Bucket(server.files))
    else:
        methods = {"_strip_protocol": classmethod(lambda cls, path: "/" + path.removeprefix(f"{scheme}://").strip("/"))}
        methods |= {"protocol": scheme, "store": {}, "pseudo_dirs": [""]}
        stand_in = type("StandIn", (MemoryFileSystem,), methods)
        monkeypatch.setitem(_registry, scheme, stand_in)
    first = begun(url, out)
    for step in (3, 6, 9):
        make_checkpoint(out, step)
        first.turn_of_first()
    first.share()
    (newest, _), (older, _) = first.store.complete()
    assert (step_of_copy(newest), step_of_copy(older), len(first.store.copies())) == (9, 6, 2)
    first.store.fs.pipe_file(first.store._path(f"{newest}/rng-1.pt"), b"x" * 40)
    shutil.rmtree(out)
    again = begun(url, out, 1)
    assert again.fetch_newest() == older and files.damage(out / "checkpoint-6") is None
    assert [copy for copy, _ in again.store.complete()] == [older]


def test_the_uploader_is_light():
    code = "import sys, accelerate_recipes.checkpoint.uploader; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_a_run_that_loses_its_disk(run, forks, tmp_path, place, out, command):
    """Killed, its folder deleted: the next start goes on from the newest complete copy, as if undisturbed."""
    args = ("--dropout", 0.1, "--mirror", place)
    dies = {"event": "toy.loss", "path": "step 8.", "count": 1, "rank": 1, "everyone": True}
    forks.run(out, *args, TOY_FAULT=json.dumps(dies), TOY_PACE=0.5)
    newest = max(complete_there(place), default=0)
    shutil.rmtree(out)
    log = forks.succeed(out, *args)
    assert newest and f"Resumed {out}/checkpoint-{newest} " in log
    assert "Mirror: the copy is complete: checkpoint-10-" in log
    assert losses(out) == losses(run("--dropout", 0.1))
    status = json.loads((out / "status.json").read_text())
    assert status["mirror"]["copy"].startswith("checkpoint-10-") and not status["mirror"]["problem"]
    assert complete_there(place)[-1] == 10
    there = {str(path.relative_to(place)) for path in place.rglob("*")}
    assert {"metrics.jsonl", "report.html", "export/model.safetensors", "export/accelerate_recipes.json"} <= there
    assert json.loads((place / "lease.json").read_text())["owner"] is None
    copies = sorted(Store(str(place)).complete(), key=lambda copy: copy[1]["step"])
    older, newest = (f"file://{place}/{name}" for name, _ in copies[-2:])
    listed = command("checkpoint", "list", f"file://{place}").stdout
    assert [line.split()[-1] for line in listed.splitlines()][-2:] == ["complete", "complete"]
    assert "complete and unchanged" in command("checkpoint", "verify", newest).stdout
    assert command("export", newest, tmp_path / "exported").returncode == 0
    exported = [folder / "model.safetensors" for folder in (tmp_path / "exported", out / "export")]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    # Another run begins with a copy of this one.
    log = forks.succeed(other := tmp_path / "other", *args[:2], "--resume_from_checkpoint", older)
    assert f"Resumed {other}/fetched/{older.rpartition('/')[2]}/checkpoint-" in log
    assert losses(other) == losses(out)


def two_disks(tmp_path: Path, *steps: int) -> list[Uploader]:
    """Make uploaders of two machines with disks of their own, on which each has its part of a checkpoint of each step."""
    disks = {tmp_path / "first": "rng-1.pt", tmp_path / "other": "rng-0.pt"}  # a file that the other disk has
    place = str(tmp_path / "place")
    made = [make_uploader(place, disk, rank=rank, has_own_disk=True) for rank, disk in enumerate(disks)]
    for uploader_ in made:
        uploader_.begin()
    for whole in (make_checkpoint(tmp_path / "whole", step) for step in steps):
        for disk, lacking in disks.items():
            shutil.copytree(whole, disk / whole.name)
            (disk / whole.name / lacking).unlink()
            files.write_marker(disk / whole.name, files.read_marker(whole) | {"in_parts": True})
    return made


def test_a_part_that_is_gone(tmp_path):
    """Another machine has removed its part before it saw which copy is made: the first one takes a newer one."""
    first, other = two_disks(tmp_path, 3, 6)
    shutil.rmtree(other.output_dir / "checkpoint-3")
    later = (first.output_dir / "checkpoint-6").rename(tmp_path / "checkpoint-6")

    def choose(step: int) -> None:
        first.coming = name_of_copy(files.read_marker(first.output_dir / f"checkpoint-{step}"))
        first.renew_lease()
        other.turn_of_other()

    choose(3)
    with pytest.raises(Gone):
        first.turn_of_first()
    later.rename(first.output_dir / "checkpoint-6")
    choose(6)
    first.turn_of_first()
    assert complete_there(tmp_path / "place") == [6] and first.store.copies() == [first.copy]


@pytest.mark.timeout(60)
def test_a_part_that_never_comes(tmp_path):
    """An export does not wait for ever for the part of a machine that is gone."""
    first, _ = two_disks(tmp_path, 3)
    first.wanted = "checkpoint-3"
    fails_with(r"another machine has not sent rng-1\.pt of checkpoint-3-", first.turn_of_first)


def test_a_store_that_is_down_at_the_end(tmp_path, monkeypatch):
    """An export that waits for it sees its return soon. What is not there in the end is named, and it is no error."""
    place, out, waits, codes = tmp_path / "place", tmp_path / "out", [], []
    monkeypatch.setattr(uploader.os, "_exit", codes.append)
    first = begun(str(place), out)
    make_checkpoint(out, 3)
    first.turn_of_first()
    make_checkpoint(out, 6)
    (out / "export").mkdir()
    (out / "export/model.safetensors").write_bytes(b"weights")
    away = place.rename(tmp_path / "away")
    place.touch()  # each call fails

    def wait(seconds: float) -> None:
        waits.append(seconds)
        first.wanted, first.until = ("checkpoint-6" if len(waits) == 4 else ""), float("inf")
        if len(waits) == 6:
            first.finish, first.until = {"step": 3, "is_finished": True}, 0.0

    first.wake = SimpleNamespace(wait=wait, clear=lambda: None)
    first.watch()
    assert waits[1:4] == [30, 60, 120] and waits[4] <= 10 and codes == [0]
    first.failures, first.shared_at = 0, time.monotonic()
    first.watch()
    assert "the export, the report and the metrics are NOT all there" in first.heard[-3]["say"], first.heard
    assert first.heard[-1]["copy"].startswith("checkpoint-3-") and codes == [0, 0]
    assert complete_there(away) == [3] and not (away / "export").exists()


def test_what_all_disks_hold_together(tmp_path, monkeypatch):
    """It becomes a copy at the start, and each machine fetches what it lacks, and no more."""
    machines, held = two_disks(tmp_path, 3, 6), []
    monkeypatch.setattr(mirror, "is_first_of_disk", lambda: True)
    monkeypatch.setattr(mirror, "on_all_ranks", lambda own: [held.append(own) or own])
    assert [mirror.newest_of_all_disks(machine.output_dir) for machine in machines] == ["", ""]
    monkeypatch.setattr(mirror, "on_all_ranks", lambda own: held)
    assert mirror.newest_of_all_disks(machines[0].output_dir) == "checkpoint-6"
    for machine in reversed(machines):
        machine.send_now("checkpoint-6")
    assert complete_there(tmp_path / "place") == [6]
    (first, other), fetched = machines, []
    monkeypatch.setattr(LocalFileSystem, "get_file", lambda fs, a, b: fetched.append(Path(b).name) or shutil.copy(a, b))
    assert first.fetch_newest() == other.fetch_newest() != "" and fetched == ["rng-1.pt", "rng-0.pt"]
    assert all(files.damage(machine.output_dir / "checkpoint-6") is None for machine in machines)
    assert files.is_part(first.output_dir / "checkpoint-3")


def test_what_lies_on_the_disks(tmp_path, monkeypatch):
    """Which machines share the directory is seen from rank 0's lock; some of them alone is an error."""
    monkeypatch.setattr(mirror, "_has_own_disks", False)
    monkeypatch.setattr(mirror, "on_all_ranks", lambda own: [own, None, False, True])
    refuses(r"machines \[1\] do not see what the first one writes", mirror.look_for_disks, tmp_path)
    full = SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=SimpleNamespace(name="FULL_STATE_DICT")))
    check_kind(SimpleNamespace(state=full))
    monkeypatch.setattr(mirror, "on_all_ranks", lambda own: [own, None, False, False])
    mirror.look_for_disks(tmp_path)
    assert mirror.has_own_disks()
    refuses("FULL_STATE_DICT writes one file from the parts of all machines", check_kind, SimpleNamespace(state=full))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """Serve S3 with faults; yields the variables for a client of the proxy, and a client of the server behind it.

    The proxy speaks TLS by a certificate of its own. The variables also ask for encryption, as a user of s3fs does.
    """
    s3fs = pytest.importorskip("s3fs")
    certificate, key = (tmp_path_factory.mktemp("tls") / name for name in ("certificate.pem", "key.pem"))
    own = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *own.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    script = [sys.executable, str(CHILDREN / "s3_with_faults.py"), "0.15", "54", certificate, key]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    server = subprocess.Popen(script, **pipes, stderr=subprocess.DEVNULL, text=True)
    behind, proxy = server.stdout.readline().split()
    keys = {
        "AWS_ACCESS_KEY_ID": "tested-key",
        "AWS_SECRET_ACCESS_KEY": "tested-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CA_BUNDLE": str(certificate),
        "FSSPEC_S3": json.dumps({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}),
    }
    settings = {"skip_instance_cache": True, "use_listings_cache": False}
    direct = s3fs.S3FileSystem(key="k", secret="s", endpoint_url=f"http://127.0.0.1:{behind}", **settings)
    direct.mkdir("bucket")
    yield keys | {"AWS_ENDPOINT_URL": f"https://127.0.0.1:{proxy}"}, direct
    server.stdin.close()
    server.wait(30)


def complete_in(direct, url: str, folder: Path) -> list[int]:
    """Do as `complete_there`, for a place in the bucket."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        direct.get(url, str(folder), recursive=True)
    return complete_there(folder)


def test_s3(bucket, tmp_path, monkeypatch):
    """The client's own way: through a proxy that delays, cuts, answers 503 and 429, drops half an upload, lists what was."""
    variables, direct = bucket
    for name, value in (variables | {"AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fsspec.config, "conf", {})
    fsspec.config.set_conf_env(fsspec.config.conf)  # as an import of fsspec does
    out, newest = tmp_path / "out", 0
    for number in range(3):
        first = begun("s3://bucket/run", out, number)
        first.fetch_newest()
        assert [files.step_of(path) for path in files.complete_checkpoints(out)] == ([newest] if newest else [])
        newest += 3
        make_checkpoint(out, newest, seed=number)
        first.turn_of_first()
        assert complete_in(direct, "bucket/run", tmp_path / "seen")[-1] == newest
        first.is_lost = True
        shutil.rmtree(out)
    upload = direct.call_s3("create_multipart_upload", Bucket="bucket", Key="run/checkpoint-12-00000000/x")["UploadId"]
    other = direct.call_s3("create_multipart_upload", Bucket="bucket", Key="other/x")["UploadId"]
    first.store.abort_leftovers()
    left = [found["UploadId"] for found in direct.list_multipart_uploads("bucket")]
    assert left == [other] and upload != other, "what belongs to others stays"
    files_there = [path for path in direct.find("bucket/run") if "/checkpoint-9-" in path]
    heads = [direct.call_s3("head_object", Bucket="bucket", Key=path.removeprefix("bucket/")) for path in files_there]
    assert len(heads) > 6 and {head["ServerSideEncryption"] for head in heads} == {"aws:kms"}
    names = ("checkpoint-3-00000000/x", "")
    direct.pipe({f"bucket/{run}/{name}": b"x" for run in ("run1", "run[1]") for name in names})
    bracketed = Store("s3://bucket/run[1]")
    assert bracketed.copies() == bracketed.names() == ["checkpoint-3-00000000"], "the place itself has an object here"
    bracketed.remove_copy("checkpoint-3-00000000")
    direct.invalidate_cache()
    assert "bucket/run1/checkpoint-3-00000000/x" in direct.find("bucket/run1"), (
        "of another place, which it matches as a pattern"
    )
    assert bracketed.copies() == []
    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.setattr(store, "WAITS", ())
    fails_with(r"(?i)certificate", Store("s3://bucket/run").read, "run.json")
    monkeypatch.setenv("AWS_CA_BUNDLE", variables["AWS_CA_BUNDLE"])
    fails_with("bucket does not exist", begun, "s3://another/run", out)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_twenty_runs_on_s3(bucket, tmp_path):
    """SIGKILL of the whole launch at random points, the disk deleted each time."""
    variables, direct = bucket
    out, chance, resumed = tmp_path / "out", random.Random(20), []
    args = ("--dropout", 0.1, "--num_train_epochs", 1000, "--max_steps", 300, "--save_steps", 3)
    two = ("--num_processes", "2")
    launch_ok(tmp_path, "fsdp_full", SCRIPT, "--output_dir", tmp_path / "undisturbed", *args, flags=two)
    command = launch_command(
        "fsdp_full", SCRIPT, "--output_dir", out, "--mirror", "s3://bucket/runs", *args, flags=("--num_processes", "2")
    )
    env = environment(tmp_path) | variables | {"TOY_PACE": "0.1"}
    for number in range(20):
        newest = max(complete_in(direct, "bucket/runs", tmp_path / "seen"), default=0)
        with (tmp_path / f"{number}.log").open("w") as log:
            run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
            until, last = time.monotonic() + 200, newest + chance.randrange(2, 25)
            while run.poll() is None and time.monotonic() < until:
                if (out / "metrics.jsonl").exists() and max(losses(out), default=0) >= last:
                    break
                time.sleep(0.02)
            time.sleep(chance.random())
            kill_run(psutil.Process(run.pid))
            run.wait()
        text = (tmp_path / f"{number}.log").read_text()
        assert max(losses(out)) >= last, text[-3000:]
        assert not newest or f"Resumed {out}/checkpoint-{newest} " in text, text[-3000:]
        resumed.append(newest)
        shutil.rmtree(out)
    env["TOY_PACE"] = "0"
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(out) == losses(tmp_path / "undisturbed") and len(losses(out)) == 300
    assert len(set(resumed)) > 10, resumed
