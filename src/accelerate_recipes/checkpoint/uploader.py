"""Uploader: the one process of each machine that talks to the store of `--mirror`. See `checkpoint.store` for the protocol.

    python -m accelerate_recipes.checkpoint.uploader

`checkpoint.mirror` starts it, without torch, and sends it commands, one JSON object a line: first its settings, then `fetch`
(on the first machine, before the run chooses a checkpoint), `watch`, and `finish`. It answers in the same way. It ends with
its parent, and ignores signals: the run decides how long it goes on.
"""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from accelerate_recipes.checkpoint import files
from accelerate_recipes.checkpoint.files import EXPORT, MARKER
from accelerate_recipes.checkpoint.store import (
    LEASE_FILE,
    RUN,
    Damaged,
    Gone,
    Pace,
    Store,
    StoreError,
    name_of_copy,
    step_of_copy,
    told,
)
from accelerate_recipes.disk import fsync, read_json, readable, write_atomically
from accelerate_recipes.life import parent
from accelerate_recipes.life.status import is_known_dead

LEASE = 180.0  # seconds without a renewal after which a lease has expired; it is renewed each third of them
LOOK = 1.0  # seconds between two looks at the output directory
SHARE = 60.0  # seconds between two looks at what a person watches
LONGEST_PAUSE = 300.0  # seconds between two attempts after failures
PATIENCE_WITH_OTHERS = 600.0  # seconds for the part of another machine, once there is a newer checkpoint
WATCHED = ("args.yaml", "metrics.jsonl", "report.html", "status.json")
LOCAL = "mirror.json"  # in the output directory: `id` of the run, the checkpoint being `reading`, the newest `copy`, `ended`
LAST_SECONDS = 3.0  # of a deadline, for the release of the lease
OWNER = re.compile(r"(?:state/__|rng-)(\d+)")  # of a file: the rank that wrote it; rank 0 wrote all others


class Refused(Exception):
    """The user must give another place, or other arguments."""


class Uploader:
    """Uploader of one machine. `rank` is the first of the machine, `ranks` are the first of all machines."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.rank, self.owner = settings, settings["rank"], settings["owner"]
        self.output_dir = Path(settings["output_dir"])
        self.store = Store(settings["url"])
        self.reading: Path | None = None
        self.pace = Pace(settings["bandwidth"], self.check)
        self.copy, self.done = "", ""  # newest complete copy; name of the checkpoint that is not to be sent again
        self.coming, self.good = (
            "",
            [],
        )  # copies that the lease names: one that is about to be complete, and the newest ones
        self.since, self.problem, self.failures = time.time(), "", 0
        self.finish: dict[str, Any] | None = None
        self.beat, self.is_lost, self.leasing = 0, False, threading.Lock()
        self.scores: dict[str, float | None] = {}
        self.shared: dict[str, tuple] = {}
        self.shared_at = 0.0
        self.wake = threading.Event()
        self.telling = threading.Lock()

    def tell(self, **event: Any) -> None:
        with self.telling, contextlib.suppress(OSError):
            print(json.dumps(event), flush=True)

    def note(self, **changes: Any) -> None:
        """Change mirror.json in the output directory, which the run and the other machines read."""
        file = self.output_dir / LOCAL
        write_atomically(file, json.dumps(self.noted() | changes, indent=1) + "\n")

    def noted(self) -> dict[str, Any]:
        try:
            return read_json(self.output_dir / LOCAL)
        except (OSError, ValueError):
            return {}

    def check(self) -> None:
        """Raise Gone if the checkpoint that is being sent was removed, and StoreError if another run has the lease."""
        if self.is_lost:
            raise StoreError("another run has taken over this place")
        if self.reading is not None and not self.reading.exists():
            raise Gone(str(self.reading))

    # The start, on the first machine.

    def begin(self) -> None:
        """Make the place that of this run, and take the lease.

        Raises:
            Refused: if it belongs to another run, or to one that is alive.
        """
        url, run = self.settings["url"], self.store.read_json(RUN)
        mine = self.noted().get("id")
        if run is None:
            if names := self.store.copies():
                raise Refused(f"{url} holds {names[0]}, but no {RUN}; give another place")
        elif (mine or files.candidates(self.output_dir)) and run["id"] != mine:
            raise Refused(
                f"{url} holds another run than {self.output_dir}; give another --mirror, or another --output_dir"
            )
        elif changed := changed_fixed(run["fixed"], self.settings["fixed"]):
            raise Refused(f"{url} holds a run with other arguments: {changed}; set them back, or give another --mirror")
        self.take_lease()
        if run is None:
            run = {"id": mine or uuid.uuid4().hex, "fixed": self.settings["fixed"]}
            self.store.write_json(RUN, run)
        self.note(id=run["id"], reading=None, copy="", ended=False)
        self.store.abort_leftovers()
        threading.Thread(target=self.keep_lease, daemon=True).start()

    def take_lease(self) -> None:
        """Wait until the lease of another process has expired, then write ours, and look whether it stays."""
        before, until = None, time.monotonic() + LEASE
        while lease := self.store.read_json(LEASE_FILE):
            if not (other := lease["owner"]) or is_known_dead(other, self.owner):
                break
            who = f"process {other['process']} on {other['host']}"
            if before is None:
                self.tell(say=f"{who} had {self.settings['url']}; waiting {LEASE:.0f} s for a sign of it")
            elif lease["beat"] != before:
                raise Refused(f"{self.settings['url']} is in use by {who}, which is alive; stop it, or give another")
            if time.monotonic() > until:
                break
            before = lease["beat"]
            time.sleep(min(5 * LOOK, LEASE / 10))
        self.good = [copy for copy in self.store.named() if self.store.marker(copy)]
        self.write_lease()
        time.sleep(LOOK)  # another may have found the same lease expired: the last to write has it
        if (self.store.read_json(LEASE_FILE) or {}).get("owner") != self.owner:
            raise Refused(f"{self.settings['url']} was taken by another run just now; give another place")

    def write_lease(self, *, released: bool = False) -> None:
        with self.leasing:
            self.beat += 1
            held = {
                "owner": None if released else self.owner,
                "beat": f"{self.owner['run']} {self.beat}",
                "copies": [*filter(None, [self.coming]), *self.good],
            }
            self.store.write_json(LEASE_FILE, held)

    def renew_lease(self) -> None:
        """Renew the lease, unless another run has it: then stop."""
        found = self.store.read_json(LEASE_FILE)
        if self.is_lost or (found and found["owner"] != self.owner):
            if not self.is_lost:
                self.tell(say="another run has taken over the mirror: no more copies are made there")
            self.is_lost = True
            self.check()
        self.write_lease()

    def keep_lease(self) -> None:
        while not self.is_lost and not (self.finish or {}).get("over"):
            time.sleep(LEASE / 3)
            with contextlib.suppress(StoreError):
                self.renew_lease()

    def fetch_newest(self) -> str:
        """Fetch the newest complete copy, if it is further on than the output directory. Returns its name, or ""."""
        here = [path for path in files.candidates(self.output_dir) if files.defect(path) is None]
        step = files.step_of(here[-1]) if here else 0
        for copy, marker in self.store.complete():
            if marker["step"] <= step:
                break
            final = self.output_dir / f"checkpoint-{marker['step']}"
            unfinished = files.unfinished(final)
            shutil.rmtree(unfinished, ignore_errors=True)
            self.tell(say=f"fetching {copy} ({readable(files.listed_bytes(marker))}) from {self.settings['url']}")
            try:
                self.store.fetch_copy(copy, marker, unfinished)
            except Damaged as error:
                self.tell(say=f"{copy} is set aside there, and an older one is taken: {error}")
                self.store.set_copy_aside(copy, str(error))
                continue
            if final.exists():
                files.set_aside(final)
            unfinished.rename(final)
            fsync(self.output_dir)
            return copy
        return ""

    # Copies, while the run trains.

    def watch(self, ranks: list[int]) -> None:
        """Send each newest checkpoint, until the run has ended."""
        turn = self.turn_of_first if self.rank == 0 else self.turn_of_other
        self.ranks = ranks
        while True:
            try:
                turn()
                self.problem, self.failures = "", 0
            except Gone:
                self.reading = None
            except Exception as error:
                self.note_trouble(error)
            if self.finish and (self.is_complete() or self.failures >= 3):
                break
            pause = min(LONGEST_PAUSE, 15.0 * 2**self.failures) if self.failures else LOOK
            self.wake.wait(LOOK if self.finish else pause)  # set by `finish`
        self.end()

    def turn_of_first(self) -> None:
        newest = next((c for c in reversed(files.candidates(self.output_dir)) if files.defect(c) is None), None)
        if newest is not None and newest.name != self.done:
            self.check()
            marker = files.read_marker(newest)
            copy, start = name_of_copy(marker), time.monotonic()
            if self.store.marker(copy) is None:
                self.note(reading=newest.name)
                self.reading = newest
                try:
                    self.send_copy(newest, copy, marker)
                finally:
                    self.reading = None
                    self.note(reading=None)
                self.tell(
                    say=f"{copy} is complete ({readable(files.listed_bytes(marker))} in {time.monotonic() - start:.0f} s)"
                )
            self.copy, self.done, self.since = copy, newest.name, time.time()
            self.coming, self.good = "", [copy]
            self.note(copy=copy)
            self.tell_status()
            self.remove_old()
        if time.monotonic() - self.shared_at > SHARE:
            self.share()

    def send_copy(self, checkpoint: Path, copy: str, marker: dict) -> None:
        """Send this machine's part, wait for the others, and complete the copy."""
        text = (checkpoint / MARKER).read_bytes()
        self.send_mine(checkpoint, copy, marker)
        begun = time.monotonic()
        for rank in self.ranks[1:]:
            while self.store.read_json(f"{copy}/part-{rank}.json") is None:
                self.check()
                has_newer = files.step_of(files.candidates(self.output_dir)[-1]) > marker["step"]
                if has_newer and time.monotonic() - begun > PATIENCE_WITH_OTHERS:
                    raise StoreError(f"the machine of rank {rank} has not sent its part of {copy}")
                time.sleep(LOOK)
        self.coming = copy
        self.renew_lease()  # only its owner completes a copy
        self.store.write(f"{copy}/{MARKER}", text)

    def send_mine(self, checkpoint: Path, copy: str, marker: dict) -> None:
        mine = [name for name in marker["files"] if self.machine_of(name, marker["world_size"]) == self.rank]
        self.store.send_part(checkpoint, copy, mine, self.rank, self.pace)

    def machine_of(self, name: str, world_size: int) -> int:
        """Return the first rank of the machine that sends a file; the checkpoint may be of another number of ranks."""
        found = OWNER.match(name)
        owner = int(found[1]) if found else 0
        return max(rank for rank in self.ranks if rank <= owner % self.settings["world_size"])

    def turn_of_other(self) -> None:
        """Send this machine's part of the checkpoint that the first machine has chosen."""
        name = self.noted().get("reading")
        if name and name != self.done:
            self.reading = self.output_dir / name
            self.check()
            marker = files.read_marker(self.reading)
            self.send_mine(self.reading, name_of_copy(marker), marker)
            self.reading, self.done = None, name

    def remove_old(self) -> None:
        """Remove the copies that are not kept, by the rules of the output directory, and what was never completed."""
        rules = self.settings["rules"]
        complete = dict(self.store.complete())
        for copy in complete.keys() - self.scores.keys():
            self.scores[copy] = self.score_of(copy, complete[copy]["step"])
        by_step = {step_of_copy(copy): self.scores[copy] for copy in complete}
        keep = files.kept(by_step, rules["limit"], rules["every"])
        for copy in self.store.copies():
            is_replaced = copy != self.copy and step_of_copy(copy) == step_of_copy(self.copy)
            if copy != self.copy and (copy not in complete or is_replaced or step_of_copy(copy) not in keep):
                self.store.remove_copy(copy)

    def score_of(self, copy: str, step: int) -> float | None:
        metric = self.settings["rules"]["metric"]
        lines = (self.store.read(f"{copy}/metrics.jsonl") or b"").splitlines() if metric else []
        return files.score([json.loads(line) for line in lines], step, metric, self.settings["rules"]["greater"])

    def share(self) -> None:
        """Send what a person watches, where it has changed."""
        for name in WATCHED:
            with contextlib.suppress(FileNotFoundError):
                stat = (self.output_dir / name).stat()
                if self.shared.get(name) != (state := (stat.st_mtime_ns, stat.st_size)):
                    self.store.write(name, (self.output_dir / name).read_bytes())
                    self.shared[name] = state
        self.shared_at = time.monotonic()

    def note_trouble(self, error: Exception) -> None:
        """Say since when there is no copy: at the first failure, and then less and less often."""
        self.failures += 1
        self.problem = str(error) if isinstance(error, StoreError) else told(error)
        if not self.is_lost and self.failures.bit_count() == 1:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
            self.tell(say=f"no new copy since {since}: {self.problem}; the run goes on, and this is tried again")
        self.tell_status()

    def tell_status(self) -> None:
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.since))
        self.tell(status={"url": self.settings["url"], "copy": self.copy, "since": since, "problem": self.problem})

    # The end.

    def is_complete(self) -> bool:
        """Tell whether this machine has no more to do for the run's newest checkpoint."""
        step = self.finish["step"] if self.finish else 0
        noted = self.noted() if self.rank else {"copy": self.copy}
        sent = int(self.done.partition("-")[2] or 0) if self.rank else 0
        copied = step_of_copy(noted["copy"]) if noted.get("copy") else 0
        return bool(noted.get("ended")) or max(sent, copied) >= step

    def hurry(self, command: dict[str, Any]) -> None:
        """Begin the end: no limit of the bandwidth any more, and a deadline."""
        self.finish, self.pace.rate = command, 0
        timer = threading.Timer(max(0.0, command["seconds"] - LAST_SECONDS), self.give_up)
        timer.daemon = True
        timer.start()
        self.wake.set()

    def give_up(self) -> None:
        threading.Timer(LAST_SECONDS, os._exit, (0,)).start()
        self.leave()

    def end(self) -> None:
        """Send the export and what a person watches."""
        out = self.output_dir / "export"
        try:
            if self.rank == 0 and not self.is_lost:
                if self.finish and self.finish["is_finished"] and (out / EXPORT).is_file():
                    names = [
                        str(path.relative_to(self.output_dir)) for path in sorted(out.rglob("*")) if path.is_file()
                    ]
                    for name in sorted(names, key=lambda name: name.endswith(EXPORT)):  # the list of its files last
                        self.store.send(self.output_dir / name, name, self.pace)
                self.share()
        except Exception as error:
            self.note_trouble(error)
        self.leave()

    def leave(self) -> None:
        """Release the lease, and end this process."""
        if self.finish:
            self.finish["over"] = True
        is_complete = self.is_complete()
        if self.rank == 0:
            with contextlib.suppress(Exception):
                self.note(reading=None, ended=True)
            if not self.is_lost:
                with contextlib.suppress(Exception):
                    self.write_lease(released=True)
        self.tell(ended=is_complete, copy=self.copy, problem=self.problem)
        os._exit(0)


def changed_fixed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Name the fixed arguments that differ, with both values; without those left open, and a model, which may have moved."""
    both = [name for name in before if name in now and name != "model_name_or_path"]
    is_open = (None, "")
    found = [
        name for name in both if before[name] != now[name] and not (before[name] in is_open or now[name] in is_open)
    ]
    return ", ".join(f"--{name} was {before[name]!r} and is now {now[name]!r}" for name in found)


def run_uploader() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent.ask_kernel(signal.SIGKILL)
    settings = json.loads(sys.stdin.readline())
    if os.getppid() != settings["parent"]:
        os._exit(1)
    os.nice(10)
    commands: queue.SimpleQueue = queue.SimpleQueue()
    uploader = None
    try:
        uploader = Uploader(settings)

        def listen() -> None:
            for line in sys.stdin:
                command = json.loads(line)
                if command["do"] == "finish":
                    uploader.hurry(command)
                commands.put(command)
            os._exit(1)  # the run is gone

        threading.Thread(target=listen, daemon=True).start()
        if uploader.rank == 0:
            uploader.begin()
        uploader.tell(answer="")
        while (command := commands.get())["do"] == "fetch":
            uploader.tell(answer=uploader.fetch_newest())
        if command["do"] == "finish":  # the run was refused
            uploader.leave()
        uploader.watch(command["ranks"])
    except Exception as error:
        is_plain = isinstance(error, Refused | StoreError)
        print(json.dumps({"error": str(error) if is_plain else told(error)}), flush=True)
        os._exit(1)


if __name__ == "__main__":
    run_uploader()
