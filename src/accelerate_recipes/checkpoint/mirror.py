"""Mirror of a run: starts the uploader of this machine, and asks it for what the run needs. See `checkpoint.store`.

After the start, a run never waits for the store, until it ends, and no failure of the store is one of the run.

With a mirror, each machine may have an output directory of its own. The lock of rank 0 tells: who does not see it has
another disk, and a lock of its own there. Each machine then holds its part of a checkpoint, under the same marker, and its
first rank renames and removes there what rank 0 does on a shared disk. A run resumes from copies alone. Each machine fetches
them whole, but for the files that it has. What all machines together hold at the start becomes a copy first.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments.mirror import OF_PLACE_AND_SPEED, url_problems
from accelerate_recipes.checkpoint import files
from accelerate_recipes.checkpoint.store import Store
from accelerate_recipes.disk import existing
from accelerate_recipes.errors import ConfigError, printable, raise_problems
from accelerate_recipes.life import lock, stop
from accelerate_recipes.life.status import this_owner, update_status
from accelerate_recipes.ranks import gather_when_done, is_first, is_first_of_machine, on_all_ranks, on_first_rank, rank

AFTER_FAILURE = 20.0  # seconds that a run which failed gives to its newest copy: its launcher may be ending it


def is_copy(place: str) -> bool:
    """Tell whether a place is that of a copy, as `checkpoint list` names it, not that of a checkpoint."""
    return "://" in place or files.COPY.fullmatch(PurePosixPath(place).name) is not None


def store_at(url: str) -> Store:
    """Return the store of a URL that a person gave.

    Raises:
        ConfigError: for a URL that cannot be used here.
    """
    raise_problems("The place cannot be read", url_problems(url))
    return Store(url, say=say_of_mirror)


def fetched(place: str, folder: Path) -> Path:
    """Fetch the copy at a place into a folder, unless it is there. Returns the checkpoint, `checkpoint-<step>`.

    Raises:
        ConfigError: if there is no complete copy, or if it cannot be fetched.
    """
    url, _, copy = place.rstrip("/").rpartition("/")
    url, copy = (url, copy) if files.COPY.fullmatch(copy) else (place, "")
    checkpoint = folder / copy / files.checkpoint_of(copy)
    if files.defect(checkpoint) is not None:
        try:
            store = store_at(url)
            marker = store.marker(copy) if copy else None
            if marker is None:
                copies = ", ".join(name for name, _ in store.complete()) or "none"
                raise ConfigError(f"{place} is no complete copy of a checkpoint; complete in {url}: {copies}")
            store.fetch_copy(copy, marker, checkpoint)
        except OSError as error:
            raise ConfigError(f"{place}: {error}") from None
    return checkpoint


@contextlib.contextmanager
def as_checkpoint(place: str, near: Path) -> Iterator[Path]:
    """Yield the checkpoint at a path; that at a URL is fetched into a folder beside `near`, and removed again."""
    if is_copy(place):
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=existing(near.parent)) as folder:
            yield fetched(place, Path(folder))
    else:
        yield Path(place)


class Sender:
    """Process of this machine that talks to the store, and the conversation with it."""

    def __init__(self, args: TrainArgs, firsts: list[int]):
        self.output_dir = Path(args.output_dir)
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.status: dict[str, Any] = {}  # `mirror` in status.json
        self.is_ending = self.has_begun = False
        self.process = subprocess.Popen(  # in its own session: a signal to the run's group must not end it
            [sys.executable, "-P", "-m", "accelerate_recipes.checkpoint.uploader"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        values, may_adopt = args.values(), args.resume_from_checkpoint == "mirror"
        self.ask(
            url=args.mirror,
            output_dir=str(self.output_dir.absolute()),
            bandwidth=args.mirror_bandwidth * 2**20,
            rank=rank(),
            ranks=firsts,
            has_own_disk=_has_own_disks,
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            parent=os.getpid(),
            owner=this_owner(),
            arguments=values | {"resume_from_checkpoint": "latest" if may_adopt else args.resume_from_checkpoint},
            fixed=sorted(args.fixed_on_resume()),
            of_place_and_speed=sorted(OF_PLACE_AND_SPEED),
            may_adopt=may_adopt,
            rules={name: values[name] for name in files.RULES},
        )
        threading.Thread(target=self.listen, daemon=True, name="mirror").start()

    def ask(self, **command: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `listen` says
            print(json.dumps(command, default=str), file=self.process.stdin, flush=True)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if message := event.get("say"):
                say_of_mirror(message)
            elif status := event.get("status"):
                self.note(status)
            else:
                self.answers.put(event)
        self.answers.put({"error": f"its process has ended with code {self.process.wait()}"})
        if self.has_begun and not self.is_ending:
            say_of_mirror("its process has ended, and no more copies are made")
            self.note({"problem": "its process has ended"})

    def note(self, changes: dict[str, Any]) -> None:
        self.status |= changes
        if is_first():
            with contextlib.suppress(OSError):
                update_status(self.output_dir, mirror=self.status)

    def call(self, **command: Any) -> Any:
        """Give a command, and wait for its answer. Raises ConfigError if it cannot be done."""
        self.ask(**command)
        event = self.answers.get()
        if "error" in event:
            self.is_ending = True
            raise ConfigError(f"--mirror: {event['error']}")
        return event["answer"]


# Of this process, which has one output directory. There is no sender without --mirror, nor on other ranks of a machine.
_sender: Sender | None = None
_has_own_disks = False


def has_own_disks() -> bool:
    """Tell whether each machine has an output directory of its own."""
    return _has_own_disks


def is_first_of_disk() -> bool:
    """Tell whether this rank renames and removes in the output directory for all that share it."""
    return is_first_of_machine() if _has_own_disks else is_first()


def look_for_disks(output_dir: Path) -> None:
    """Find out whether each machine has an output directory of its own. Call it on all ranks, when rank 0 has its lock.

    Raises:
        ConfigError: if some machines share that of rank 0, and others do not.
    """
    global _has_own_disks
    output_dir.mkdir(parents=True, exist_ok=True)  # this asks the server of a network filesystem
    file = output_dir / "lock.json"
    owner = on_first_rank(lambda: lock.read(file))
    answers = on_all_ranks(lock.read(file) == owner if is_first_of_machine() else None)
    sees = [one for one in answers if one is not None]
    if any(sees[1:]) and not all(sees):
        apart = [number for number, one in enumerate(sees) if not one]
        raise ConfigError(
            f"--output_dir {output_dir}: machines {apart} do not see what the first one writes, and the others do; let all "
            "machines share it, or none"
        )
    _has_own_disks = not all(sees)


def newest_of_all_disks(output_dir: Path) -> str:
    """Return the name of the newest checkpoint that all machines hold together, rank 0's among them; "" if there is none.

    Call it on all ranks.
    """
    lacking = {}
    for checkpoint in files.candidates(output_dir) if is_first_of_disk() else ():
        with contextlib.suppress(OSError, ValueError):
            marker = files.read_marker(checkpoint)
            key = files.step_of(checkpoint), files.checksum_of(marker)
            lacking[key] = {name for name in marker["files"] if not (checkpoint / name).is_file()}
    disks = on_all_ranks(lacking)
    whole = [key for key in disks[0] if not set.intersection(*(on_disk[key] for on_disk in disks if key in on_disk))]
    return f"checkpoint-{max(whole)[0]}" if whole else ""


def say_of_mirror(text: str) -> None:
    with contextlib.suppress(OSError):
        print(printable(f"Mirror: {text}"), flush=True)


def take_place(args: TrainArgs) -> None:
    """Take the place at --mirror for this run; call it on all ranks, after `look_for_disks`.

    Raises:
        ConfigError: if the place cannot be written to, or belongs to another run.
    """
    global _sender
    firsts = [number for number in on_all_ranks(rank() if is_first_of_machine() else None) if number is not None]
    if is_first_of_machine():  # in the main thread: the process ends with the thread that starts it
        _sender = Sender(args, firsts)
    for turn in (True, False):  # rank 0 takes the place, the others join
        gather_when_done(partial(_sender.call, do="begin") if _sender and is_first() == turn else None)


def fetch_from_mirror(output_dir: Path) -> None:
    """Bring the newest complete copy into the output directory, if it is further on; call it on all ranks."""
    sender = _sender if is_first_of_disk() else None
    if _has_own_disks and (newest := newest_of_all_disks(output_dir)):
        gather_when_done(partial(sender.call, do="send", name=newest) if sender else None)
    wanted = ""
    while True:
        names = gather_when_done(partial(sender.call, do="fetch", copy=wanted) if sender else None)
        copies = {copy for copy in names if copy}
        if len(copies) < 2:
            return
        wanted = min(copies, key=files.step_of_copy)  # one machine has found a newer copy damaged


def begin_copies() -> None:
    """Send each new checkpoint from now on: the run has begun."""
    if _sender is not None:
        _sender.has_begun = True
        _sender.ask(do="watch")


def make_whole(checkpoint: Path) -> None:
    """Fetch what other machines hold of a checkpoint; for rank 0, and the export.

    Raises:
        ConfigError: if there is no copy of it, and for some time none could be made.
    """
    if files.is_part(checkpoint):
        assert _sender is not None
        _sender.call(do="make_whole", name=checkpoint.name)


def finish_copies(output_dir: Path, state: str) -> None:
    """Complete the copy of the newest checkpoint before this process ends, as far as the time allows, and say whether it is.

    The end of the job, or the grace after a signal, limits the time.
    """
    if _sender is None or _sender.is_ending:
        return
    _sender.is_ending = True
    seconds = stop.seconds_left() if state in ("finished", "stopped") else min(stop.seconds_left(), AFTER_FAILURE)
    until = time.monotonic() + seconds
    steps = [files.step_of(path) for path in files.saved_checkpoints(output_dir)]
    _sender.ask(do="finish", step=max(steps, default=0), seconds=min(seconds, 1e6), is_finished=state == "finished")
    event: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        while not event and stop.seconds_left() > 0 and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                event = _sender.answers.get(timeout=0.2)
    if not is_first() or not _sender.has_begun:  # a refused run has no copies
        return
    if event.get("ended"):
        say_of_mirror(f"the copy is complete: {event['copy']}" if event["copy"] else "there is no checkpoint to copy")
    else:
        problem = event.get("problem") or event.get("error") or "there was no time"
        say_of_mirror(f"the copy of the newest checkpoint is NOT complete: {problem}")
        _sender.note({"problem": problem})
