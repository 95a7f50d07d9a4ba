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

from accelerate_recipes.checkpoint import files, store
from accelerate_recipes.disk import readable, size_and_times, write_atomically
from accelerate_recipes.life import parent, status

LEASE = 180.0  # seconds without a renewal after which a lease has expired; it is renewed each third of them
LOOK = 1.0  # seconds between two looks at the output directory
SHARE = 60.0  # seconds between two looks at what a person watches
LONGEST_PAUSE = 300.0  # seconds between two attempts after failures
PATIENCE_WITH_OTHERS = 600.0  # seconds for the part of another machine, once there is a newer checkpoint
PATIENCE_AT_END = 300.0  # seconds for a store that fails when the run has ended
LAST_SECONDS = 3.0  # of a deadline, for the release of the lease
WATCHED = ("args.yaml", "metrics.jsonl", "report.html", "status.json")
OWNER = re.compile(r"(?:state/__|rng-)(\d+)")  # of a file: the rank that wrote it; rank 0 wrote all others


OPEN = (None, "", "auto")  # values of arguments that a run settles later
# Names in a place that is empty all the same; a start that was killed leaves all but the last.
NOT_FOREIGN = {store.LEASE_FILE, f"{store.LEASE_FILE}.partial", f"{store.RUN}.partial", "lost+found"}


class Uploader:
    """Uploader of one machine. `rank` is the first of the machine; `ranks` are the first of all machines."""

    copy = ""  # the newest that needs nothing more of this machine
    coming, good = "", []  # copies that the lease names: one that is about to be complete, and complete ones
    problem, failures, beat, shared_at, is_lost, is_over = "", 0, 0, 0.0, False, False
    reading: Path | None = None
    run: dict[str, Any] | None = None  # what run.json is to say
    # Of other machines: owner of the lease; its last beat, and when it was seen.
    first, heard, heard_at = None, None, 0.0
    wanted = ""  # checkpoint that is to be made whole
    until = 0.0  # how long the run waits for a store that fails, by time.monotonic

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.rank, self.owner, self.url = settings, settings["rank"], settings["owner"], settings["url"]
        self.output_dir, self.ranks = Path(settings["output_dir"]), settings["ranks"]
        self.store = store.Store(self.url, say=lambda text: self.tell(say=text))  # until `watch`: the run waits
        self.has_disk = self.rank == 0 or settings["has_own_disk"]  # the first machine takes care of a shared one
        self.pace, self.since, self.shared = store.Pace(settings["bandwidth"], self.check), time.time(), {}
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
            raise store.StoreError("another run has taken over this place")
        if self.reading is not None and not self.reading.exists():
            raise store.Gone(str(self.reading))

    # The start, on the first machine.

    def begin(self) -> None:
        """Make the place that of this run. Raises StoreError, and changes nothing, if it may not have it."""
        stored_run = self.store.run()
        if not self.has_disk:
            return  # the store answers this machine too
        self.check_place(stored_run)
        noted, arguments = files.noted(self.output_dir), self.settings["arguments"]
        run = {"id": stored_run["id"] if stored_run else noted.get("id") or uuid.uuid4().hex, "arguments": arguments}
        if self.rank == 0:
            if stored_run is None:
                self.store.make()
                self.tell(say=f"{self.url} is a new place, and holds no copies yet")
            self.take_lease()
            if self.store.run() != stored_run:
                self.write_lease(None)
                raise store.StoreError(f"{self.url} was taken by another run just now; give another place")
            if stored_run is None:
                self.store.write_json(store.RUN, run)
            self.run = run
            self.store.abort_leftovers()
            threading.Thread(target=self.keep_lease, daemon=True).start()
        self.note(id=run["id"], places=sorted({*noted.get("places", ()), self.store.root}), reading=None)

    def check_place(self, run: dict[str, Any] | None) -> None:
        """Raise StoreError unless this run may have the place, which is that of `run`, or of none."""
        noted = files.noted(self.output_dir)
        mine = noted.get("id")
        if run is None:
            if mine and self.store.root in noted.get("places", []):
                raise store.StoreError(
                    f"{self.url} was the place of this run, and holds no {store.RUN} now: is its disk mounted? To begin a "
                    f"new place there, remove {self.output_dir / files.MIRROR}"
                )
            if foreign := sorted(n for n in self.store.names() if n not in NOT_FOREIGN and not n.startswith(".")):
                raise store.StoreError(
                    f"{self.url} holds {', '.join(foreign[:3])}, but no {store.RUN}; give an empty place"
                )
            return
        if (mine or files.candidates(self.output_dir)) and run["id"] != mine:
            raise store.StoreError(
                f"{self.url} holds another run than {self.output_dir}; give another --mirror, or another --output_dir"
            )
        before, now = self.recorded(run), self.settings["arguments"]
        differ = {name for name in before.keys() & now.keys() if before[name] != now[name]}
        left_open = {name for name in differ if before[name] in OPEN or now[name] in OPEN}
        fatal = differ & {*self.settings["fixed"]} - left_open - {"model_name_or_path"}  # a model may move
        remedy = "set it back"
        adopts = mine is None and self.settings["rank"] == 0  # the other machines follow rank 0
        if adopts and not self.settings["may_adopt"] and not fatal:
            fatal = differ - {*self.settings["of_place_and_speed"]} - (set() if "arguments" in run else left_open)
            remedy = "give another --mirror, or go on with that run by --resume_from_checkpoint mirror"
        if fatal:
            changes = ", ".join(f"--{name} was {before[name]!r} and is now {now[name]!r}" for name in sorted(fatal))
            raise store.StoreError(f"{self.url} holds a run whose {changes}; {remedy}")

    def recorded(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a run's last start, or of its newest copy, where an earlier version recorded none."""
        if "arguments" in run:
            return run["arguments"]
        newest = next((copy for copy, _ in self.store.complete()), None)
        text = self.store.read(f"{newest}/args.yaml") if newest else None
        return files.parsed_arguments(text or b"{}", f"{self.url}/{newest}/args.yaml") | run["fixed"]

    def take_lease(self) -> None:
        """Wait until the lease of another process has expired, then write ours, and look whether it stays."""
        before, until = None, time.monotonic() + LEASE
        while (lease := self.store.lease()) and (other := lease["owner"]):
            if status.is_known_dead(other, self.owner) or time.monotonic() > until:
                break
            who = f"process {other['process']} on {other['host']}"
            if before is None:
                self.tell(say=f"{who} had {self.url}; waiting {LEASE:.0f} s for a sign of it")
            elif lease["beat"] != before:
                raise store.StoreError(f"{self.url} is in use by {who}, which is alive; stop it, or give another place")
            before = lease["beat"]
            time.sleep(min(5 * LOOK, LEASE / 10))
        complete = dict(self.store.complete())
        self.good = [copy for copy in self.store.named() if copy in complete]
        self.write_lease(self.owner)
        time.sleep(LOOK)  # another may have found the same lease expired: the last to write has it
        if (self.store.lease() or {"owner": None})["owner"] != self.owner:
            raise store.StoreError(f"{self.url} was taken by another run just now; give another place")

    def write_lease(self, owner: dict[str, Any] | None) -> None:
        with self.leasing:
            self.beat += 1
            copies = [*filter(None, [self.coming]), *self.good]
            lease = {"owner": owner, "beat": [self.owner["run"], self.beat], "copies": copies}
            self.store.write_json(store.LEASE_FILE, lease)

    def check_lease(self) -> None:
        """Raise StoreError unless this run has the lease. If another one has it, this one stops."""
        if (lease := self.store.lease()) is None:
            raise store.StoreError(f"{self.url} has lost its {store.LEASE_FILE}: is its disk mounted?")
        if lease["owner"] not in (self.owner, status.UNKNOWN) and not self.is_lost:
            self.is_lost = True
            self.tell(say="another run has taken over the mirror: no more copies are made there")
        self.check()

    def renew_lease(self) -> None:
        self.check_lease()
        self.write_lease(self.owner)

    def keep_lease(self) -> None:
        while not self.is_lost:
            time.sleep(LEASE / 3)
            with contextlib.suppress(store.StoreError, store.Gone):
                self.renew_lease()

    def fetch_newest(self, copy: str = "") -> str:
        """Fetch a copy, by default the newest complete one, if it is further on than the output directory.

        Returns its name, or "". A machine with a disk of its own has nothing that is further on, but has files of the copy.

        Raises:
            StoreError: if each copy that is further on is damaged; all of them stay.
        """
        wanted, paths, damaged = copy, files.complete_checkpoints(self.output_dir), {}
        here = (
            {files.name_of_copy(files.read_marker(path)) for path in paths} if self.settings["has_own_disk"] else set()
        )
        newest = 0 if self.settings["has_own_disk"] else max(map(files.step_of, paths), default=0)
        for copy in self.store.copies():
            if wanted not in ("", copy) or files.step_of_copy(copy) <= newest:
                continue
            if copy in here:
                return copy
            try:
                if (marker := self.store.marker(copy)) is None:
                    continue
                self.tell(say=f"fetching {copy} ({readable(files.listed_bytes(marker))}) from {self.url}")
                self.store.fetch_copy(copy, marker, self.output_dir / f"checkpoint-{marker['step']}")
            except store.Damaged as error:
                damaged[copy] = error
                continue
            for name, error in damaged.items():  # this one has shown that store and disk are well
                self.tell(say=f"{name} is set aside there, and {copy} is taken, which is older: {error}")
                self.store.set_copy_aside(name, str(error))
            return copy
        if damaged:
            name, error = next(iter(damaged.items()))
            raise store.StoreError(
                f"{name} in {self.url} is damaged ({error}), and no copy that is older can take its place; it stays. "
                f"Restore that file, or remove {name} from there to go on without it"
            )
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
            elif self.store.markers().get(copy) is None:
                self.tell(say=f"making a copy of {name} from the disks of all machines")
                self.send_copy(checkpoint, copy, marker)
        self.pace.rate = rate

    # Copies, while the run trains.

    def watch(self) -> None:
        """Send each newest checkpoint, until the run has ended; then its export, and what a person watches."""
        look, self.store.say = LOOK * (5 if self.rank else 1), lambda text: None
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
            except store.Gone:
                pass
            except Exception as error:
                self.note_trouble(error)
                if self.wanted and time.monotonic() > self.until:
                    reason = f"there is no copy of {self.wanted}, from which the export is made: {self.problem}"
                    self.tell(error=f"{reason}; the same command, given again, makes it when the store has all parts")
                    self.wanted = ""
        try:
            if self.rank == 0 and not self.failures:
                exported = (self.output_dir / "export").rglob("*") if self.finish["is_finished"] else ()
                # The list of its files comes last.
                for path in sorted(filter(Path.is_file, exported), key=lambda path: path.name == files.EXPORT):
                    self.store.send(path, str(path.relative_to(self.output_dir)), self.pace)
                self.share()
        except Exception as error:
            self.note_trouble(error, "the export, the report and the metrics are NOT all there")
        self.leave()

    def turn_of_first(self) -> None:
        if self.run:  # it has begun with these arguments
            self.check_lease()
            self.store.write_json(store.RUN, self.run)
            self.run = None
        present, done = reversed(files.candidates(self.output_dir)), files.checkpoint_of(self.copy)
        newest = next((c for c in present if c.name == done or files.defect(c) is None or files.is_part(c)), None)
        if newest is not None and newest.name != done:
            marker, start = files.read_marker(newest), time.monotonic()
            copy = files.name_of_copy(marker)
            there = self.store.markers()
            if there.get(copy) is None:
                self.remove_unfinished([name for name, marker in there.items() if marker is None and name != copy])
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
            text = (checkpoint / files.MARKER).read_bytes()
            self.renew_lease()
            self.send_part(checkpoint, copy, marker)
            while lacking := marker["files"].keys() - self.store.sent(copy):
                self.check()
                has_newer = files.step_of(files.candidates(self.output_dir)[-1]) > marker["step"]
                is_late = has_newer and time.monotonic() - begun > patience
                if is_late or (self.wanted and time.monotonic() > self.until):
                    raise store.StoreError(f"another machine has not sent {min(lacking)} of {copy}")
                time.sleep(LOOK)
            self.renew_lease()  # only its owner completes a copy
            self.store.write(f"{copy}/{files.MARKER}", text)

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
            match = OWNER.match(name)
            owner = int(match[1]) % self.settings["world_size"] if match else 0
            return max(first for first in self.ranks if first <= owner) == self.rank

        mine = [name for name in sorted(marker["files"]) if is_mine(name)]
        self.store.send_part(checkpoint, copy, marker, mine, self.rank, self.pace)

    def turn_of_other(self) -> None:
        """Send this machine's part of the copy that the first machine has chosen."""
        if (lease := self.store.lease()) is None or lease["owner"] == status.UNKNOWN:
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
            if self.store.markers().get(copy) is None:
                self.store.write_json(f"{copy}/{store.GONE}", self.rank)  # the first machine then takes a newer one
            self.copy = copy

    def remove_unfinished(self, copies: list[str]) -> None:
        """Remove copies that were never complete, since the next may need their space. What was set aside waits for it."""
        self.check_lease()
        for copy in copies:
            if store.DAMAGED not in self.store.names(copy):
                self.store.remove_copy(copy)

    def remove_old(self) -> None:
        """Remove the copies that are not kept, by the rules of the output directory, and what is not complete."""
        rules, there = SimpleNamespace(**self.settings["rules"]), self.store.markers()
        scores = {}
        for copy, marker in there.items():
            if marker is not None:
                metrics = self.store.metrics(copy, marker) if rules.metric_for_best_model else ()
                scores[marker["step"]] = files.score(metrics, marker["step"], rules)
        keep = files.kept(scores, rules) - {files.step_of_copy(self.copy)}
        for copy, marker in there.items():
            if copy != self.copy and (marker is None or marker["step"] not in keep):
                self.store.remove_copy(copy)

    def share(self) -> None:
        """Send what a person watches, where it has changed."""
        self.check_lease()
        for name in WATCHED:
            with contextlib.suppress(FileNotFoundError):
                if self.shared.get(name) != (state := size_and_times(self.output_dir / name)):
                    self.store.write(name, (self.output_dir / name).read_bytes())
                    self.shared[name] = state
        self.shared_at = time.monotonic()

    def note_trouble(self, error: Exception, missing: str = "") -> None:
        """Say since when there is no copy, or what is `missing` in the end: at first, then less and less often."""
        self.failures += 1
        self.problem = str(error) if isinstance(error, store.StoreError) else store.told(error)
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
        is_plain = isinstance(error, store.StoreError)
        print(json.dumps({"error": str(error) if is_plain else store.told(error)}), flush=True)
        os._exit(1)


if __name__ == "__main__":
    run_uploader()
