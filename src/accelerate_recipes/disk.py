"""Files that are whole or do not exist, even after a power failure."""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

POINTER = b"version https://git-lfs.github.com/spec/"
IS_POINTER = "is a git-LFS pointer, and no file of data; `git lfs pull` gets the file"


def checksum(file: Path) -> str:
    """Compute XXH3 in 128 bits: it finds damage at the speed of the disk, but does not protect against forgery."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def size_and_times(file: str | Path) -> list[int]:
    """Return what changes when a file is written: while it stays, the content need not be read again."""
    stat = os.stat(file)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def is_pointer(path: Path) -> bool:
    """Tell whether a file is only git's pointer to a large file, as in a clone without git-LFS."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(POINTER)) == POINTER
    except OSError:  # a folder, or no access
        return False


def fsync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing(path: Path) -> Path:
    """Return the path, or the deepest folder above it that exists."""
    return next(candidate for candidate in (path.absolute(), *path.absolute().parents) if candidate.exists())


def refusal(directory: str | Path) -> str | None:
    """Return why a directory, or its nearest existing parent, cannot be written to; None if it can."""
    path = Path(directory).absolute()
    try:
        links = (folder for folder in (path, *path.parents) if folder.is_symlink() and not folder.exists())
        if broken := next(links, None):
            return f"{broken} is a link to {os.readlink(broken)}, which is not there"
        with tempfile.TemporaryFile(dir=existing(Path(directory))):
            return None
    except OSError as error:
        return error.strerror


def is_full(error: OSError) -> bool:
    """Tell whether an error means that the disk is full, that the user's quota is, or that a file may not be so large."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an error that names no file; errors in writing do not name one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def readable(size: int) -> str:
    """Write a number of bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.3f} MiB"


def own_suffix() -> str:
    """Return an ending for names of unfinished files. No other process of the cluster uses the same ending."""
    return f".partial-{socket.gethostname()}-{os.getpid()}"


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return a file or folder whose name says what it holds. If it is missing, `make` makes it, first under another name.

    Two nodes may make it at once on a shared filesystem. Of two folders the second is left out.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + own_suffix())
        try:
            make(partial)
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
    return path


def print_any_text() -> None:
    """Print characters that the locale's encoding lacks as their numbers. They must not end a run or a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deeply") from error


def json_or_none(file: Path) -> Any:
    """Read a JSON file; None if it is not there, or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(file)
    return None


def read_json_lines(file: Path) -> list[Any]:
    """Read a file with one JSON value in each line; an incomplete last line is left out.

    `splitlines` is not used: it would also split at Unicode's other line ends, which may stand inside a text.

    Raises:
        ValueError: naming the file and the line, for one that is not JSON.
    """
    *lines, _ = file.read_bytes().split(b"\n")
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(json.loads(line.decode()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number} is no JSON: {error}") from error
    return values


def write_atomically(path: Path, text: str, suffix: str = ".partial") -> None:
    """Write a file so that at any moment, the file of this name is complete.

    The content is first written to a name with `suffix`. Give `own_suffix()` if several processes may write at once.
    """
    partial = path.with_name(path.name + suffix)
    with naming(path):
        partial.write_text(text, encoding="utf-8")
        fsync(partial)
    partial.replace(path)
    fsync(path.parent)
