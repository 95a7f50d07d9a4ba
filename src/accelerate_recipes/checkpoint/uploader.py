"""Uploader: the one process of each machine that talks to the store of `--mirror`. See `checkpoint.store` for the protocol.

`checkpoint.mirror` starts it, without torch, and sends it commands, one JSON object a line: first its settings, then
`begin`, `send` and `fetch` (before the run chooses a checkpoint), `watch`, `make_whole` (before an export), and `finish`.
It answers in the same way. It ends with its parent, and ignores signals: the run decides how long it goes on.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate_recipes.checkpoint import files
from accelerate_recipes.checkpoint.files import EXPORT, MARKER
from accelerate_recipes.checkpoint.store import GONE, LEASE_FILE, RUN, Damaged, Gone, Pace, Store, StoreError, told
from accelerate_recipes.disk import readable, size_and_times, write_atomically
from accelerate_recipes.life import parent
from accelerate_recipes.life.status import is_known_dead

LEASE = 180.0  # seconds without a renewal after which a lease has expired; it is renewed each third of them
LOOK = 1.0  # seconds between two looks at the output directory
SHARE = 60.0  # seconds between two looks at what a person watches
LONGEST_PAUSE = 300.0  # seconds between two attempts after failures
PATIENCE_WITH_OTHERS = 600.0  # seconds for the part of another machine, once there is a newer checkpoint
PATIENCE_AT_END = 300.0  # seconds for a store that fails when the run has ended
LAST_SECONDS = 3.0  # of a deadline, for the release of the lease
WATCHED = ("args.yaml", "metrics.jsonl", "report.html", "status.json")
OWNER = re.compile(r"(?:state/__|rng-)(\d+)")  # of a file: the rank that wrote it; rank 0 wrote all others


class Uploader:
    """Uploader of one machine. `rank` is the first of the machine; `ranks` are the first of all machines."""

    copy = ""  # the newest that needs nothing more of this machine
    coming, good = "", []  # copies that the lease names: one that is about to be complete, and complete ones
    problem, failures, beat, shared_at, is_lost, is_over = "", 0, 0, 0.0, False, False
    reading: Path | None = None
    # Of other machines: owner of the lease; its last beat, and when it was seen.
    first, heard, heard_at = None, None, 0.0
    wanted = ""  # checkpoint that is to be made whole
    until = 0.0  # how long the run waits for a store that fails, by time.monotonic

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.rank, self.owner, self.url = settings, settings["rank"], settings["owner"], settings["url"]
        self.output_dir, self.store, self.ranks = Path(settings["output_dir"]), Store(self.url), settings["ranks"]
        self.has_disk = self.rank == 0 or settings["has_own_disk"]  # the first machine takes care of a shared one
        self.pace, self.since, self.shared = Pace(settings["bandwidth"], self.check), time.time(), {}
        self.wake, self.leasing = threading.Event(), threading.Lock()
        self.finish: dict[str, Any] = {}  # the command

    def tell(self, **event: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(event).encode() + b"\n")  # whole, whichever thread

    def note(self, **changes: Any) -> None:
        """Change mirror.json in the output directory, which the run reads."""
        content = files.noted(self.output_dir) | changes
        write_atomically(self.output_dir / files.MIRROR, json.dumps(content, indent=1) + "\n")

    def check(self) -> None:
        """Raise Gone if the checkpoint that is being sent was removed, and StoreError if another run has the lease."""
        if self.is_lost:
            raise StoreError("another run has taken over this place")
        if self.reading is not None and not self.reading.exists():
            raise Gone(str(self.reading))

    # The start, on the first machine.

    def begin(self) -> None:
        """Make the place that of this run. Raises StoreError if it belongs to another, or to one that is alive."""
        run, mine, fixed = self.store.read_json(RUN), files.noted(self.output_dir).get("id"), self.settings["fixed"]
        if not self.has_disk:
            return  # the store answers this machine too
        if run is None and (copies := self.store.copies()):
            raise StoreError(f"{self.url} holds {copies[0]}, but no {RUN}; give another place")
        if run and (mine or files.candidates(self.output_dir)) and run["id"] != mine:
            remedy = "give another --mirror, or another --output_dir"
            raise StoreError(f"{self.url} holds another run than {self.output_dir}; {remedy}")
        run = run or {"id": mine or uuid.uuid4().hex, "fixed": fixed}
        is_open = (None, "")  # it is settled later; and a model may have moved
        for name in sorted(run["fixed"].keys() & fixed.keys() - {"model_name_or_path"}):
            was, now = run["fixed"][name], fixed[name]
            if was != now and was not in is_open and now not in is_open:
                raise StoreError(f"{self.url} holds a run whose --{name} was {was!r} and is now {now!r}; set it back")
        if self.rank == 0:
            self.take_lease()
            self.store.write_json(RUN, run)
            self.store.abort_leftovers()
            threading.Thread(target=self.keep_lease, daemon=True).start()
        self.note(id=run["id"], reading=None)

    def take_lease(self) -> None:
        """Wait until the lease of another process has expired, then write ours, and look whether it stays."""
        before, until = None, time.monotonic() + LEASE
        while (lease := self.store.read_json(LEASE_FILE)) and (other := lease["owner"]):
            if is_known_dead(other, self.owner) or time.monotonic() > until:
                break
            who = f"process {other['process']} on {other['host']}"
            if before is None:
                self.tell(say=f"{who} had {self.url}; waiting {LEASE:.0f} s for a sign of it")
            elif lease["beat"] != before:
                raise StoreError(f"{self.url} is in use by {who}, which is alive; stop it, or give another place")
            before = lease["beat"]
            time.sleep(min(5 * LOOK, LEASE / 10))
        self.good = [copy for copy in self.store.named() if self.store.marker(copy)]
        self.write_lease(self.owner)
        time.sleep(LOOK)  # another may have found the same lease expired: the last to write has it
        if (self.store.read_json(LEASE_FILE) or {}).get("owner") != self.owner:
            raise StoreError(f"{self.url} was taken by another run just now; give another place")

    def write_lease(self, owner: dict[str, Any] | None) -> None:
        with self.leasing:
            self.beat += 1
            copies = [*filter(None, [self.coming]), *self.good]
            lease = {"owner": owner, "beat": [self.owner["run"], self.beat], "copies": copies}
            self.store.write_json(LEASE_FILE, lease)

    def renew_lease(self) -> None:
        """Renew the lease, unless another run has it: then stop."""
        found = self.store.read_json(LEASE_FILE)
        if found and found["owner"] != self.owner and not self.is_lost:
            self.is_lost = True
            self.tell(say="another run has taken over the mirror: no more copies are made there")
        self.check()
        self.write_lease(self.owner)

    def keep_lease(self) -> None:
        while not self.is_lost:
            time.sleep(LEASE / 3)
            with contextlib.suppress(StoreError, Gone):
                self.renew_lease()

    def fetch_newest(self, copy: str = "") -> str:
        """Fetch a copy, by default the newest complete one, if it is further on than the output directory.

        Returns its name, or "". A machine with a disk of its own has nothing that is further on, but has files of the copy.
        """
        wanted, found = copy, files.complete_checkpoints(self.output_dir)
        for copy, marker in self.store.complete():
            if wanted not in ("", copy):
                continue
            if self.settings["has_own_disk"]:
                if copy in (files.name_of_copy(files.read_marker(path)) for path in found):
                    return copy
            elif marker["step"] <= max(map(files.step_of, found), default=0):
                break
            self.tell(say=f"fetching {copy} ({readable(files.listed_bytes(marker))}) from {self.url}")
            try:
                self.store.fetch_copy(copy, marker, self.output_dir / f"checkpoint-{marker['step']}")
                return copy
            except Damaged as error:
                self.tell(say=f"{copy} is set aside there, and an older one is taken: {error}")
                self.store.set_copy_aside(copy, str(error))
        return ""

    def send_now(self, name: str) -> None:
        """Send what this machine has of a checkpoint, which no machine has whole; the first one completes the copy."""
        checkpoint, rate = self.output_dir / name, self.pace.rate
        self.pace.rate = 0  # the run waits
        if checkpoint.exists():
            marker = files.read_marker(checkpoint)
            copy = files.name_of_copy(marker)
            if self.rank:
                self.send_part(checkpoint, copy, marker)
            elif self.store.marker(copy) is None:
                self.tell(say=f"making a copy of {name} from the disks of all machines")
                self.send_copy(checkpoint, copy, marker)
        self.pace.rate = rate

    # Copies, while the run trains.

    def watch(self) -> None:
        """Send each newest checkpoint, until the run has ended; then its export, and what a person watches."""
        look = LOOK * (5 if self.rank else 1)
        while not (self.finish and (self.is_complete() or (self.failures and time.monotonic() > self.until))):
            if self.finish:
                time.sleep(look / 5)
            else:
                longest = 10.0 if self.wanted else LONGEST_PAUSE  # the run waits
                self.wake.wait(min(longest, 15.0 * 2**self.failures) if self.failures else look)
                self.wake.clear()
            try:
                self.turn_of_first() if self.rank == 0 else self.turn_of_other()
                if self.wanted and self.wanted == files.checkpoint_of(self.copy):
                    self.store.fetch_copy(self.copy, self.store.marker(self.copy), self.output_dir / self.wanted)
                    self.tell(answer="")
                    self.wanted = ""
                self.problem, self.failures = "", 0
            except Gone:
                pass
            except Exception as error:
                self.note_trouble(error)
                if self.wanted and time.monotonic() > self.until:
                    said = f"there is no copy of {self.wanted}, from which the export is made: {self.problem}"
                    self.tell(error=f"{said}; the same command, given again, makes it when the store has all parts")
                    self.wanted = ""
        try:
            if self.rank == 0 and not self.failures:
                exported = (self.output_dir / "export").rglob("*") if self.finish["is_finished"] else ()
                # The list of its files comes last.
                for path in sorted(filter(Path.is_file, exported), key=lambda path: path.name == EXPORT):
                    self.store.send(path, str(path.relative_to(self.output_dir)), self.pace)
                self.share()
        except Exception as error:
            self.note_trouble(error, "the export, the report and the metrics are NOT all there")
        self.leave()

    def turn_of_first(self) -> None:
        present, done = reversed(files.candidates(self.output_dir)), files.checkpoint_of(self.copy)
        newest = next((c for c in present if c.name == done or files.defect(c) is None or files.is_part(c)), None)
        if newest is not None and newest.name != done:
            marker, start = files.read_marker(newest), time.monotonic()
            copy = files.name_of_copy(marker)
            if self.store.marker(copy) is None:
                self.send_copy(newest, copy, marker, PATIENCE_WITH_OTHERS)
                seconds = time.monotonic() - start
                self.tell(say=f"{copy} is complete ({readable(files.listed_bytes(marker))} in {seconds:.0f} s)")
            self.copy, self.since, self.coming, self.good = copy, time.time(), "", [copy]
            self.tell_status()
            self.remove_old()
        if time.monotonic() - self.shared_at > SHARE:
            self.share()

    def send_copy(self, checkpoint: Path, copy: str, marker: dict, patience: float = math.inf) -> None:
        """Tell the other machines which copy it is, send this machine's part, wait for the others, and complete the copy."""
        self.coming, begun = copy, time.monotonic()
        with self.reads(checkpoint):
            text = (checkpoint / MARKER).read_bytes()
            self.renew_lease()
            self.send_part(checkpoint, copy, marker)
            while lacking := marker["files"].keys() - self.store.sent(copy):
                self.check()
                has_newer = files.step_of(files.candidates(self.output_dir)[-1]) > marker["step"]
                is_late = has_newer and time.monotonic() - begun > patience
                if is_late or (self.wanted and time.monotonic() > self.until):
                    raise StoreError(f"another machine has not sent {min(lacking)} of {copy}")
                time.sleep(LOOK)
            self.renew_lease()  # only its owner completes a copy
            self.store.write(f"{copy}/{MARKER}", text)

    @contextlib.contextmanager
    def reads(self, checkpoint: Path) -> Iterator[None]:
        """Keep a checkpoint from being removed meanwhile. Raises Gone if it was, as `check` does later."""
        if self.has_disk:
            self.note(reading=checkpoint.name)
        self.reading = checkpoint
        try:
            self.check()
            yield
        finally:
            self.reading = None
            if self.has_disk:
                self.note(reading=None)

    def send_part(self, checkpoint: Path, copy: str, marker: dict) -> None:
        """Send the files of this machine's ranks, or on its own disk. The checkpoint may be of another number of ranks."""

        def is_mine(name: str) -> bool:
            if self.settings["has_own_disk"]:
                return (checkpoint / name).is_file()
            found = OWNER.match(name)
            owner = int(found[1]) % self.settings["world_size"] if found else 0
            return max(first for first in self.ranks if first <= owner) == self.rank

        mine = [name for name in sorted(marker["files"]) if is_mine(name)]
        self.store.send_part(checkpoint, copy, mine, self.rank, self.pace)

    def turn_of_other(self) -> None:
        """Send this machine's part of the copy that the first machine has chosen."""
        if (lease := self.store.read_json(LEASE_FILE)) is None:
            return
        if self.heard != lease["beat"]:
            self.heard, self.heard_at = lease["beat"], time.monotonic()
        self.first = self.first or lease["owner"]
        self.is_over = not lease["owner"] or lease["owner"] != self.first or time.monotonic() - self.heard_at > LEASE
        copy = next(iter(lease["copies"]), self.copy)
        checkpoint = self.output_dir / files.checkpoint_of(copy)
        if copy == self.copy:
            return
        if checkpoint.exists():
            with self.reads(checkpoint):
                marker = files.read_marker(checkpoint)
                if files.name_of_copy(marker) == copy:
                    self.send_part(checkpoint, copy, marker)
            self.copy = copy
        elif any(files.step_of(c) > files.step_of_copy(copy) for c in files.candidates(self.output_dir)):
            if self.store.marker(copy) is None:
                self.store.write_json(f"{copy}/{GONE}", self.rank)  # the first machine then takes a newer one
            self.copy = copy

    def remove_old(self) -> None:
        """Remove the copies that are not kept, by the rules of the output directory, and what was never completed."""
        rules, complete = SimpleNamespace(**self.settings["rules"]), dict(self.store.complete())
        scores = {}
        for copy, marker in complete.items():
            text = self.store.read(f"{copy}/metrics.jsonl") if rules.metric_for_best_model else None
            scores[marker["step"]] = files.score(map(json.loads, (text or b"").splitlines()), marker["step"], rules)
        keep = files.kept(scores, rules) - {files.step_of_copy(self.copy)}
        for copy in self.store.copies():
            if copy != self.copy and (copy not in complete or files.step_of_copy(copy) not in keep):
                self.store.remove_copy(copy)

    def share(self) -> None:
        """Send what a person watches, where it has changed."""
        for name in WATCHED:
            with contextlib.suppress(FileNotFoundError):
                if self.shared.get(name) != (state := size_and_times(self.output_dir / name)):
                    self.store.write(name, (self.output_dir / name).read_bytes())
                    self.shared[name] = state
        self.shared_at = time.monotonic()

    def note_trouble(self, error: Exception, missing: str = "") -> None:
        """Say since when there is no copy, or what is `missing` in the end: at first, then less and less often."""
        self.failures += 1
        self.problem = str(error) if isinstance(error, StoreError) else told(error)
        if not self.is_lost and self.failures.bit_count() == 1:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
            then = "the same command sends them" if missing else "the run goes on, and this is tried again"
            self.tell(say=f"{missing or f'no new copy since {since}'}: {self.problem}; {then}")
        self.tell_status()

    def tell_status(self) -> None:
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.since))
        self.tell(status={"url": self.url, "copy": self.copy, "since": since, "problem": self.problem})

    # The end.

    def is_complete(self) -> bool:
        """Tell whether this machine has no more to do for the run's newest checkpoint."""
        return self.is_over or files.step_of_copy(self.copy or "x-0") >= self.finish["step"]

    def listen(self, commands: Iterator[dict[str, Any]]) -> None:
        """Begin what the run then waits for, without a limit of the bandwidth: `make_whole`, or `finish` with its deadline.

        The run ends at the deadline too, and the kernel ends this process with it.
        """
        for command in commands:
            self.pace.rate, self.until = 0, time.monotonic() + PATIENCE_AT_END
            if command["do"] == "make_whole":
                self.wanted = command["name"]
            else:
                self.finish = command
                threading.Timer(max(0.0, command["seconds"] - LAST_SECONDS), self.leave).start()
            self.wake.set()
        os._exit(1)  # the run is gone

    def leave(self) -> None:
        """Release the lease, and end this process."""
        with contextlib.suppress(Exception):
            if self.rank == 0 and not self.failures:
                self.renew_lease()
                self.is_lost = True  # nothing is to follow
                self.write_lease(None)
        self.tell(ended=self.is_complete(), copy=self.copy, problem=self.problem)
        os._exit(0)


def run_uploader() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent.ask_kernel(signal.SIGKILL)
    commands = map(json.loads, sys.stdin)
    settings = next(commands)
    if os.getppid() != settings["parent"]:
        os._exit(1)
    os.nice(10)
    try:
        uploader = Uploader(settings)
        actions = {"begin": uploader.begin, "send": uploader.send_now, "fetch": uploader.fetch_newest}
        while (do := (command := next(commands)).pop("do")) in actions:
            uploader.tell(answer=actions[do](**command))
        if do == "finish":  # the run was refused
            uploader.finish = command
            uploader.leave()
        threading.Thread(target=uploader.listen, args=(commands,), daemon=True).start()
        uploader.watch()
    except Exception as error:
        is_plain = isinstance(error, StoreError)
        print(json.dumps({"error": str(error) if is_plain else told(error)}), flush=True)
        os._exit(1)


if __name__ == "__main__":
    run_uploader()
