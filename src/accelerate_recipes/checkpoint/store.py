"""Store of copies: what lies behind the URL of `--mirror`, and the rules by which a copy is complete or absent.

    run.json                         the run that owns this place: its id, and the arguments that it must not change
    lease.json                       the process that writes here, renewed each minute, and the names of its newest copies
    checkpoint-<step>-<sum>/         a copy; <sum> begins the checksum of the checkpoint's marker
        <files>                      as in the checkpoint
        part-<rank>.json             lists files that are here, by one machine; <rank> is its first
        gone.json                    a machine has removed its part: there will be no copy
        complete.json                the checkpoint's own marker, byte for byte, written last
    export/, metrics.jsonl, ...      what a person watches; replaced when they change

1. The name of a copy says its content, so no file of a copy is ever replaced by another, and nothing of a failed attempt is
   taken for a part of a later one: a copy is begun again, or goes on, under its own name.
2. The uploader of the first machine chooses a checkpoint, and names its copy in the lease. The others follow the lease.
   While a checkpoint is read, `<output_dir>/mirror.json` names it, and it is not removed from that disk.
3. Each machine sends the files of its own ranks, or those on its own disk, looks at the size of each there, and writes its
   part-marker, which lists them. The store's client guards the way up by its own checksums. Once the part-markers list all
   files, the first machine writes complete.json.
4. A copy without a valid complete.json does not exist for a reader. A reader lists the place without any cache, and adds
   what the lease names, since a listing may be older. The reader compares the checksum of each file that it fetches.
5. What is lost, and when: one answer proves nothing. A file is absent if the store says so twice, and the listing agrees
   where a marker is. A file is damaged if the store returns it wrongly twice, in the same way; what this machine's disk
   makes of it is no proof. A damaged copy is set aside (damaged.json takes the place of the marker) once an older one has
   been fetched whole; without an older one it stays, and the start ends. A store that does not answer ends the start too. A
   copy is removed if it is complete, older than another, and not kept by the rules; if it was never complete, when the next
   one begins; if it was set aside, when a newer one is complete. Removal goes the other way: complete.json, then the
   part-markers, then the files. What a disk returns is compared with the checksums of the save before it is sent.
6. A writer owns the lease. A start waits until a foreign lease has not changed for LEASE seconds; it need not wait for a
   process that is known to be dead. A writer that finds another's lease, or none, writes nothing.
7. A run has the place whose id is in its mirror.json. A place that it knew, and that is empty now, is an error: its disk may
   be gone. A run with an empty directory also has the place of a run with the same arguments, but for those of place and
   speed, and by `--resume_from_checkpoint mirror` that of one with others. Any other place must be empty. A run that is
   refused changes nothing.

Only fsspec and its clients talk to the store. This module does without torch: a process of its own imports it.
"""

import contextlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
import xxhash

from accelerate_recipes.checkpoint import files
from accelerate_recipes.disk import fsync, write_atomically
from accelerate_recipes.life.status import UNKNOWN, is_owner

T = TypeVar("T")

RUN, LEASE_FILE, GONE, DAMAGED = "run.json", "lease.json", "gone.json", "damaged.json"
WAITS = (0.5, 2.0, 8.0, 30.0)  # seconds before an attempt is repeated, on average
PATIENCE = 120.0  # seconds for one call, and for a file at first;
SLOWEST = 2**20  # bytes a second at which a file may come
NOTE_EVERY = 15.0  # seconds of waiting for a store between two words about it
PIECE = 2**26  # bytes of a file that are compared at a time
AT_ONCE = 2  # files on the way up; each in parts, by the store's client
# A client reads as many parts of a file at once; with s3fs's own 10 of 50 MiB, two files take a GiB of memory.
OPTIONS = {"s3": {"max_concurrency": 4}}
NO_KEYS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")  # of botocore and google.auth
SECRETS = re.compile(r"//[^/\s@]*@|\?\S*|(?i:(?<=key=)|(?<=token=)|(?<=signature=))\S+")


class StoreError(OSError):
    """The store did not do what was asked, or the place cannot be that of this run. The text holds no credentials."""


class Contradiction(StoreError):
    """The store says of a file that it is there, and that it is not."""


class Gone(Exception):
    """The checkpoint that was being sent is no longer on the disk."""


class Damaged(OSError):
    """A file of a copy is missing, or is not what was sent. Once `Store` has raised it, the store itself says so."""


def told(error: BaseException) -> str:
    """Return the first line of an error, without what may be a credential."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    hidden = [v for k, v in os.environ.items() if len(v) > 7 and re.search("KEY|SECRET|TOKEN|PASSW|CRED|CONNECTION", k)]
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, "...")
    return SECRETS.sub("...", text)[:400]


def within(seconds: float, call: Callable[[], T], say: Callable[[str], None] = lambda text: None) -> T:
    """Call a function in a thread, wait for its result, and say so. After a TimeoutError the thread may still be at work."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if wait([done], first := min(seconds, NOTE_EVERY)).not_done:
        say(f"no answer for {first:.0f} s")
    try:
        return done.result(timeout=seconds - first)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {seconds:.0f} s") from None


class Pace(fsspec.Callback):
    """Pace of the files that this process sends: at most `rate` bytes a second together (0: no limit). `check` may raise.

    The clients call it after each part that they have sent.
    """

    def __init__(self, rate: float = 0, check: Callable[[], None] = lambda: None):
        super().__init__()
        self.rate, self.check, self.free_at, self.lock = rate, check, 0.0, threading.Lock()

    def relative_update(self, inc: int = 1) -> None:
        self.check()
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + (inc / self.rate if self.rate else 0)
        while self.rate and (left := self.free_at - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))  # `rate` may become 0 meanwhile
            self.check()


class Store:
    """Place behind a URL. Each method repeats what fails, and waits longer each time.

    Raises:
        StoreError: after the last attempt.
    """

    def __init__(self, url: str, say: Callable[[str], None] = lambda text: None):
        self.url, self.say, self.said_at = url, say, 0.0
        scheme = url.partition("://")[0] if "://" in url else "file"
        try:
            self.fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **OPTIONS.get(scheme, {}))
        except Exception as error:  # the errors of the clients have no common class
            raise StoreError(told(error)) from None
        self.root, self.is_folder = root.rstrip("/"), scheme == "file"

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _insist(self, call: Callable[..., T], *args: Any, seconds: float = 0) -> T:
        """Call with `args`, again and again, each time without cached listings, for `seconds` (0: PATIENCE) at most."""
        begun = time.monotonic()

        def fresh() -> T:
            self.fs.invalidate_cache()
            return call(*args)

        def say(problem: str) -> None:
            if not seconds and (now := time.monotonic()) - max(begun, self.said_at) >= NOTE_EVERY:
                self.said_at = now
                self.say(f"{self.url}: {problem}; still trying")

        for pause in (*WAITS, None):
            try:
                return within(seconds or PATIENCE, fresh, say)
            except (FileNotFoundError, Gone, StoreError):
                raise
            except Exception as error:
                if isinstance(error, PermissionError) or type(error).__name__ in NO_KEYS:
                    remedy = "give credentials, or a user, that may list, read, write and remove there"
                    raise StoreError(f"{self.url} refuses access ({told(error)}): {remedy}") from None
                if pause is None or isinstance(error, NotADirectoryError):
                    raise error if isinstance(error, Damaged) else StoreError(told(error)) from None
                say(told(error))
                time.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError

    def _found(self, call: Callable[..., T], *args: Any) -> T | None:
        """Return the result of a call, or None if the store says twice that there is no such file."""
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                return self._insist(call, *args)
        return None

    def _make_folder(self, place: str) -> None:
        """Make the folder of a file, but not the place itself: its disk may have gone."""
        if self.is_folder:
            if not Path(self.root).is_dir():
                raise StoreError(f"{self.root} is gone; is its disk mounted?")
            Path(place).parent.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if there is none."""
        return self._found(self.fs.cat_file, self._path(name))

    def read_json(self, name: str) -> Any:
        """Return the value in a file; None if there is no such file, or if it is no JSON."""
        try:
            return json.loads(self.read(name) or b"null")
        except (ValueError, RecursionError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, and read it again."""
        path = self._path(name)

        def pipe() -> None:
            self._make_folder(path)
            if self.is_folder:
                write_atomically(Path(path), data.decode())
            else:
                self.fs.pipe_file(path, data)
            self.fs.invalidate_cache()
            if self.fs.cat_file(path) != data:
                raise OSError(f"{name} is there with another content than was written")

        try:
            self._insist(pipe)
        except FileNotFoundError as error:  # no such bucket
            raise StoreError(told(error)) from None

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1).encode())

    def send(self, source: Path, name: str, pace: Pace) -> None:
        """Send a file, and compare its size there. Raises Gone if it is no longer on the disk."""

        def put() -> None:
            pace.check()
            self._make_folder(self._path(name))
            is_slowed = self.is_folder and pace.rate  # LocalFileSystem's own copy cannot be, but the kernel makes it
            put_file = partial(fsspec.AbstractFileSystem.put_file, self.fs) if is_slowed else self.fs.put_file
            try:
                put_file(str(source), self._path(name), callback=pace)
            except FileNotFoundError as error:  # of the file, or of the bucket
                pace.check()
                raise OSError(told(error)) from None
            self.fs.invalidate_cache()
            if (stored_size := self.fs.info(self._path(name))["size"]) != size:
                raise OSError(f"{name} has {stored_size} bytes there instead of {size}")
            if self.is_folder:
                fsync(Path(self._path(name)))

        try:
            size = source.stat().st_size
        except FileNotFoundError:
            raise Gone(str(source)) from None
        self._insist(put, seconds=PATIENCE + size / min(SLOWEST, pace.rate / 2 or SLOWEST))

    def fetch(self, copy: str, name: str, folder: Path, marker: dict) -> None:
        """Fetch a file of a copy, unless the folder has it. Raises Damaged if it is missing or differs in the store."""

        def get() -> None:
            try:
                self.fs.get_file(self._path(f"{copy}/{name}"), str(folder / name))
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            if reason := files.difference(folder, name, marker):
                raise Damaged(reason)

        if files.difference(folder, name, marker) is None:
            return
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._insist(get, seconds=PATIENCE + marker["files"][name]["size"] / SLOWEST)
        except OSError as error:
            (folder / name).unlink(missing_ok=True)
            if not isinstance(error, Damaged):
                raise
            if (fault := self.fault(copy, name, marker)) and fault == self.fault(copy, name, marker):
                raise Damaged(fault) from None
            problem = f"{copy} cannot be fetched to {folder}: {error}"
            raise StoreError(f"{problem}. The store itself returns {name} unharmed, or each time otherwise") from None
        fsync(folder / name)

    def fault(self, copy: str, name: str, marker: dict) -> str | None:
        """Return what is wrong with a file of a copy as the store returns it; None if it is right. No disk takes part."""
        path, wanted, hasher = self._path(f"{copy}/{name}"), marker["files"][name], xxhash.xxh3_128()
        if (info := self._found(self.fs.info, path)) is None:
            return f"{name} is missing"
        if info["size"] != wanted["size"]:
            return f"{name} has {info['size']} bytes there instead of {wanted['size']}"
        for start in range(0, size := wanted["size"], PIECE):
            end = min(start + PIECE, size)
            hasher.update(self._found(partial(self.fs.cat_file, path, start=start, end=end)) or b"")
        problem = f"the checksum of {name} is {hasher.hexdigest()} instead of {wanted['checksum']}"
        return None if hasher.hexdigest() == wanted["checksum"] else problem

    def names(self, folder: str = "") -> list[str]:
        """List the names in a folder."""
        parent = self._path(folder)
        paths = self._found(partial(self.fs.ls, parent, detail=False)) or ()
        # A store may name the folder itself.
        return [PurePosixPath(path).name for path in paths if path.rstrip("/") != parent]

    def remove(self, name: str) -> None:
        """Remove a small file; nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            if self.read(name) is not None:  # not every store takes that for removed which was never there
                self._insist(self.fs.rm_file, self._path(name))

    # The place.

    def run(self) -> dict[str, Any] | None:
        """Return what run.json says of the run that owns the place; None if there is none."""
        if (data := self.read(RUN)) is None:
            return None
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
            run = json.loads(data)
            if isinstance(run["id"], str) and isinstance(run.get("arguments", run.get("fixed")), dict):
                return run
        raise StoreError(f"{self.url}/{RUN} does not say whose place this is; restore that file, or give another place")

    def make(self) -> None:
        """Make the place of a new run, in a folder that is there: else its disk may be gone. A bucket is never made."""
        if self.is_folder:
            folder = Path(self.root)
            try:
                folder.mkdir(exist_ok=True)
            except FileNotFoundError:
                remedy = "is its disk mounted? Make it, or give another folder"
                raise StoreError(f"{self.url}: there is no folder {folder.parent}; {remedy}") from None
            except OSError as error:
                raise StoreError(told(error)) from None

    # Copies.

    def copies(self) -> list[str]:
        """List the names of copies, complete or not, the newest step first."""
        named = self.named()
        all_copies = {name for name in self.names() if files.COPY.fullmatch(name)} | {*named}
        return sorted(all_copies, key=lambda name: (files.step_of_copy(name), name in named, name), reverse=True)

    def lease(self) -> dict | None:
        """Return the lease; None if there is none. What is no lease counts as that of an unknown process."""
        if (data := self.read(LEASE_FILE)) is None:
            return None
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            lease = json.loads(data)
            copies = [copy for copy in lease["copies"] if files.COPY.fullmatch(copy)]
            if lease["owner"] is None or is_owner(lease["owner"]):
                return {"owner": lease["owner"], "beat": lease["beat"], "copies": copies}
        return {"owner": UNKNOWN, "beat": data.hex(), "copies": []}

    def named(self) -> list[str]:
        """List the copies that the lease names."""
        return (self.lease() or {"copies": []})["copies"]

    def marker(self, copy: str) -> dict | None:
        """Return the marker of a complete copy; None for any other. Raises Damaged for a marker that was changed."""
        name = f"{copy}/{files.MARKER}"
        for pause in (*WAITS, 0.0):
            data = self.read(name)
            if data is None and files.MARKER not in self.names(copy):
                return None
            try:
                marker = files.checked_marker(json.loads(data or b"null"))
                if copy == files.name_of_copy(marker):
                    return marker
                reason = f"it is that of {files.name_of_copy(marker)}"
            except (ValueError, RecursionError) as error:
                reason = str(error)
            if data is not None and data == self.read(name):
                is_cut = not data.endswith(b"}") and self._insist(self.fs.info, self._path(name))["size"] == len(data)
                if is_cut:  # its writer was killed, or had no space
                    return None
                raise Damaged(f"its {files.MARKER} is damaged: {reason}")
            time.sleep(pause)
        raise Contradiction(f"{self.url} lists {name}, and does not return it, or each time otherwise")

    def markers(self) -> dict[str, dict | None]:
        """Return the marker of each complete copy, the newest first, and None for those that are not; no doubtful ones."""
        by_copy = {}
        for copy in self.copies():
            with contextlib.suppress(Damaged, Contradiction):
                by_copy[copy] = self.marker(copy)
        return by_copy

    def complete(self) -> Iterator[tuple[str, dict]]:
        """Yield name and marker of each complete copy, the newest first."""
        return ((copy, marker) for copy, marker in self.markers().items() if marker)

    def metrics(self, copy: str, marker: dict) -> list[dict]:
        """Read the log records in a complete copy."""
        if (entry := marker["files"].get("metrics.jsonl")) is None:
            return []
        data = self.read(f"{copy}/metrics.jsonl") or b""
        if xxhash.xxh3_128_hexdigest(data) != entry["checksum"]:
            raise StoreError(f"{copy}/metrics.jsonl is not what was sent, so it is not known which copy is the best")
        return list(map(json.loads, data.splitlines()))

    def fetch_copy(self, copy: str, marker: dict, checkpoint: Path) -> None:
        """Fetch a copy, as a checkpoint that is complete or absent. Raises Damaged, naming a file that differs.

        Files of the same checkpoint that are there are not fetched.
        """
        unfinished, has_part = files.unfinished(checkpoint), False
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError, ValueError):
            has_part = files.read_marker(checkpoint) == marker and bool(checkpoint.rename(unfinished))
        try:
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda name: self.fetch(copy, name, unfinished, marker), marker["files"]))
        except OSError:
            if has_part:
                unfinished.rename(checkpoint)
            raise
        if checkpoint.exists():
            files.set_aside(checkpoint)
        files.publish(checkpoint, marker)

    def set_copy_aside(self, copy: str, reason: str) -> None:
        """Note why a copy is of no use, and make it incomplete."""
        self.write_json(f"{copy}/{DAMAGED}", {"reason": reason})
        self.remove(f"{copy}/{files.MARKER}")

    def sent(self, copy: str) -> set[str]:
        """List the files of a copy that are there, by its part-markers. Raises Gone if a machine no longer has its part."""
        names = self.names(copy)
        if GONE in names:
            raise Gone(copy)
        parts = [name for name in names if name.startswith("part-")]
        return {name for part in parts for name in self.listed(f"{copy}/{part}")}

    def listed(self, part: str) -> list[str]:
        """List the files that a part-marker names."""
        content = self.read_json(part)
        return [name for name in content if isinstance(name, str)] if isinstance(content, list) else []

    def send_part(self, checkpoint: Path, copy: str, marker: dict, names: Sequence[str], rank: int, pace: Pace) -> None:
        """Send those files of a machine which are not there, then its part-marker."""

        part = f"{copy}/part-{rank}.json"
        before = self.sent(copy)
        if missing := [name for name in names if name not in before]:
            for name in missing:
                pace.check()
                if (checkpoint / name).exists() and (reason := files.difference(checkpoint, name, marker)):
                    raise StoreError(f"{checkpoint} is damaged on this disk, and is not sent: {reason}")
            with ThreadPoolExecutor(1 if pace.rate else AT_ONCE) as threads:
                list(threads.map(lambda name: self.send(checkpoint / name, f"{copy}/{name}", pace), missing))
            self.write_json(part, [*self.listed(part), *missing])

    def remove_copy(self, copy: str) -> None:
        folder = self._path(copy)
        for name in (files.MARKER, *self.names(copy)):
            if name == files.MARKER or name.startswith("part-"):
                self.remove(f"{copy}/{name}")
        if not self.is_folder and has_magic(folder):  # `rm` would take it for a pattern, and remove what matches
            for path in self._found(self.fs.find, folder) or ():
                self._insist(self.fs.rm_file, path)
            return
        with contextlib.suppress(FileNotFoundError):
            self._insist(partial(self.fs.rm, recursive=True), folder)

    def abort_leftovers(self) -> None:
        """Abort the unfinished uploads that a killed writer has left here, which cost money and show in no list."""
        bucket, _, prefix = self.root.partition("/")
        with contextlib.suppress(Exception):  # only s3fs lists them, and it may not be allowed
            for upload in within(PATIENCE, partial(self.fs.list_multipart_uploads, bucket)):
                if upload["Key"].startswith(f"{prefix}/"):
                    names = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    within(PATIENCE, partial(self.fs.call_s3, "abort_multipart_upload", **names))
