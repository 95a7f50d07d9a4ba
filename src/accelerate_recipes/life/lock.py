"""Lock of an output directory: `<output_dir>/lock.json` names the one run that owns it, and shows that the run is alive."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

from accelerate_recipes.disk import json_or_none
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life import status, stop

HEARTBEAT = 5.0  # seconds between two touches of the file
SILENCE = 3 * HEARTBEAT  # seconds without a touch after which the owner counts as dead

# The lock of this process, which has one output directory. None until `take`.
_mine: tuple[Path, dict] | None = None


def take(output_dir: Path) -> None:
    """Make this process the owner until `release` or its end. Taking the lock twice changes nothing.

    Raises:
        ConfigError: if the owner is another run, and alive.
    """
    global _mine
    file = output_dir / "lock.json"
    if _mine is not None and _mine[0] == file:
        return
    owner = status.this_owner()
    output_dir.mkdir(parents=True, exist_ok=True)
    if other := acquire(file, owner):
        job = f" (job {other['job']})" if other["job"] else ""
        who = f"process {other['process']} on {other['host']}{job}"
        raise ConfigError(f"{output_dir} is in use by {who}, which is alive; stop it, or give another --output_dir")
    _mine = file, owner
    threading.Thread(target=_keep, args=_mine, daemon=True, name="lock").start()


def acquire(file: Path, owner: dict) -> dict | None:
    """Create `file` with `owner` in it, replacing the file of a dead owner.

    Several processes may find the same owner dead. Only one of them may remove the owner's file, and none may remove a file
    that another process has created since. So each process first acquires a second file in the same way, and checks again.
    (flock is no alternative: some cluster filesystems lack it, or limit it to one machine.)

    Returns:
        The living owner, if it is another process.
    """
    while True:
        try:
            with file.open("x", encoding="utf-8") as opened:
                json.dump(owner, opened, indent=1)
            return None
        except FileExistsError:
            snapshot = read(file), touched(file)
            if snapshot[1] is None:  # released since
                continue
            if other := living_owner(file, owner):
                return other
        takeover = file.with_name(f"{file.stem}-takeover.json")
        if acquire(takeover, owner) is None:
            if (read(file), touched(file)) == snapshot:
                file.unlink(missing_ok=True)
            takeover.unlink(missing_ok=True)


def is_taken() -> bool:
    """Tell whether this process holds the lock."""
    return _mine is not None


def is_lost() -> bool:
    """Tell whether another run has taken the lock of this process because it considered this run dead."""
    mine = _mine  # another thread may release the lock
    return mine is not None and read(mine[0]) not in (mine[1], None)


def living_owner(file: Path, me: dict) -> dict | None:
    """Return the owner of the lock if its run is still alive. This takes up to SILENCE seconds."""
    other = read(file)
    if other is not None and status.is_known_dead(other, me):
        return None
    # The owner's clock may differ from ours, so only a change of the time counts.
    first = touched(file)
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT / 10)
        if (now := touched(file)) != first:
            return None if now is None else read(file) or status.UNKNOWN
    return None


def read(file: Path) -> dict | None:
    """Read the owner; None if there is no file, or if the owner has not yet written it."""
    owner = json_or_none(file)
    return owner if status.is_owner(owner) else None


def touched(file: Path) -> int | None:
    """Return the time at which a file was last touched, in nanoseconds.

    It opens the file, so that a network filesystem asks its server.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _keep(file: Path, owner: dict) -> None:
    """Touch the lock while this process owns it. If another run has taken the lock, ask this run to stop."""
    while _mine == (file, owner):
        if is_lost():
            stop.ask(f"another run that took over {file.parent}")
            return
        with contextlib.suppress(OSError):  # the next touch may work
            os.utime(file)
        time.sleep(HEARTBEAT)


def release() -> None:
    """Release the output directory, if this process owns it."""
    global _mine
    if _mine is not None:
        (file, owner), _mine = _mine, None
        if read(file) == owner:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.parent.rmdir()  # works only if empty: a run that never began leaves nothing
