"""Store that fails on purpose: an fsspec filesystem on a folder. It delays, cuts, refuses, drops half an upload, lists what was.

Register it by `register()`; `faulty:///folder` is its URL. The class holds a seeded generator, the share of calls that fail, and
counts of each fault.
"""

import errno
import random
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Killed(BaseException):
    """Stand-in for SIGKILL: from some call on, the process does no more."""


FAULTS = ("delay", "503", "429", "cut", "half", "stale", "lost answer")


class Faulty(fsspec.AbstractFileSystem):
    """Filesystem on a folder, with faults by the generator of the class."""

    protocol = "faulty"
    cachable = False
    generator = random.Random(0)
    rate = 0.0
    killed_after: int | None = None  # calls
    place, capacity = Path(), None  # a folder that is full with so many bytes
    counts: ClassVar[dict[str, int]] = {}
    listings: ClassVar[dict[str, list]] = {}

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.inner = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("faulty://").rstrip("/")

    @classmethod
    def fault(cls, *possible: str) -> str:
        """Return what goes wrong with a call, or "". Delays are made here, and errors that come before anything is done."""
        if cls.killed_after is not None:
            cls.killed_after -= 1
            if cls.killed_after < 0:
                raise Killed
        name = cls.generator.choice(possible) if cls.generator.random() < cls.rate else ""
        if name:
            cls.counts[name] = cls.counts.get(name, 0) + 1
        if name == "delay":
            time.sleep(0.02)
        if name in ("503", "429"):
            raise OSError(f"HTTP {name}: slow down")
        return name

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **options: Any) -> None:
        with open(lpath, "rb") as file:
            data = file.read()
        self.pipe_file(rpath, data)
        if callback:
            callback.relative_update(len(data))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        what = self.fault("delay", "503", "429", "cut", "half", "lost answer")
        if what == "cut":
            raise ConnectionResetError("the connection was cut")
        value = value[: len(value) // 2] if what == "half" else value
        if self.capacity is not None:
            others = (file for file in self.place.rglob("*") if file.is_file() and str(file) != path)
            room = max(0, self.capacity - sum(file.stat().st_size for file in others))
            self.inner.pipe_file(path, value[:room])
            if len(value) > room:
                raise OSError(errno.ENOSPC, "No space left on device")
        self.inner.pipe_file(path, value)
        if what == "lost answer":
            raise ConnectionResetError("the answer was lost")

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        what = self.fault("delay", "503", "429", "cut", "half")
        data = self.inner.cat_file(rpath)
        with open(lpath, "wb") as file:
            file.write(data[: len(data) // 2] if what in ("half", "cut") else data)
        if what == "cut":
            raise ConnectionResetError("the connection was cut")

    def cat_file(self, path: str, **options: Any) -> bytes:
        self.fault("delay", "503", "429")
        return self.inner.cat_file(path, **options)

    def info(self, path: str, **options: Any) -> dict:
        self.fault("delay", "503", "429")
        return self.inner.info(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list:
        old = self.listings.get(path)
        if self.fault("delay", "503", "429", "stale") == "stale" and old is not None:
            return old
        self.listings[path] = self.inner.ls(path, detail=detail)
        return self.listings[path]

    def rm_file(self, path: str) -> None:
        self.fault("delay", "503", "429")
        self.inner.rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.fault("delay", "503", "429")
        self.inner.rm(path, recursive=recursive)


def register() -> None:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
