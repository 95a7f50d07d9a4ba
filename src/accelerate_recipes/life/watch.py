"""Watch over the ranks: ends a run that hangs, names the ranks that it waits for, and tells rank 0 why a rank fails.

If a rank dies or hangs, the others wait in a collective. gloo notices a lost connection, NCCL waits for a timeout; neither
says which rank caused it. So a thread of each rank writes a sign of life and the current place of the process into the
launcher's store, once a second. It also checks whether a rank has reported a failure. In a run of one process, the thread
only checks the time limit.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelerate_recipes import ranks
from accelerate_recipes.life.parent import launcher_is_gone, tell_launcher
from accelerate_recipes.life.status import update_status

SECONDS_TO_MISS = 4  # seconds without a sign of life after which a rank is missing; one is due each second
NO_STORE = "the first node (the launcher's store does not answer)"


class Watch:
    """Watch over the other ranks. It runs on every rank, from the start of the process group to the end of the process.

    If an activity takes longer than its time limit, the process ends. All ranks print the same message: it names the ranks
    that are gone, and the places of the others. If another rank fails with an error that the user must correct, rank 0 calls
    `on_failure(reason)` in a thread; this call ends the process.
    """

    def __init__(self, output_dir: Path, on_failure: Callable[[str], None]):
        self.output_dir = output_dir
        self.on_failure = on_failure
        self.rank = ranks.rank()
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.expect("the start", float("inf"))
        self.gave_up = threading.Event()
        self.store: dist.Store | None = None  # until there is a process group
        self.store_is_lost = False
        self.connecting = threading.Lock()
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def lost(self, error: BaseException) -> str:
        """Describe the ranks that are gone if a collective failed because of that; else return "". Takes a few seconds."""
        if self.gave_up.is_set():
            time.sleep(10 * SECONDS_TO_MISS)  # the thread has printed the reason, and is about to end the process
        self.seconds_left = float("inf")  # the process is already ending
        gone = []
        if self._connect() and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            try:
                self._check_store()
                before = self._signs()
                time.sleep(SECONDS_TO_MISS)
                gone = self._gone(before, self._signs())
            except dist.DistError:
                gone = [NO_STORE]
        return f"{', '.join(gone)}: gone during {self.doing} ({error})" if gone else ""

    def tell_first_rank(self, reason: str) -> bool:
        """Tell rank 0 why this rank fails. Return False on rank 0, and if the store cannot be reached."""
        if self.rank == 0 or not self._connect():
            return False
        self.seconds_left = float("inf")
        try:
            self._check_store()
            self.store.compare_set("failure", "", reason)
        except dist.DistError:
            return False
        return True

    def expect(self, doing: str, seconds: float, progress: Callable[[], Any] | None = None) -> None:
        """Declare that from now on this rank is `doing` something, for `seconds` at most.

        With `progress`, the time starts again whenever `progress()` returns another value. The other ranks wait as well.
        """
        self.doing, self.seconds, self.seconds_left = doing, seconds, seconds
        self.progress, self.reached = progress, None

    def _connect(self) -> bool:
        """Connect to the store, if there are other ranks and a process group yet; return whether there are."""
        with self.connecting:
            if self.store is None and self.world_size > 1 and dist.is_initialized():
                # Use a separate connection: the main one is busy while another thread waits for a key.
                # The launcher keeps the store when it restarts the ranks.
                prefix = f"watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
                self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())
        return self.store is not None

    def _check_store(self) -> None:
        """Raise DistError if the store is lost: a call to it would print a stack of c10d, each second."""
        holds_store = os.environ.get("GROUP_RANK", "0") == "0"  # the launcher of this machine
        if self.store_is_lost or (holds_store and launcher_is_gone()):
            raise dist.DistError(NO_STORE)

    def _run(self) -> None:
        while self.world_size > 1 and not self._connect():
            time.sleep(0.02)  # soon: if rank 0 holds the store and dies, the connection must already be there
        before, beat = None, 0
        # Count seconds here, do not compare clock times: a suspended job must not fail when it continues.
        while True:
            time.sleep(1)
            beat += 1
            self.seconds_left -= 1
            if self.progress and (reached := self.progress()) != self.reached:
                self.reached, self.seconds_left = reached, self.seconds
            if self.world_size == 1:
                if self.seconds_left <= 0:
                    self._end(f"{self._lateness()}; the process is in {self._place()}")
                continue
            try:
                self._check_store()
                self._give_sign(beat)
                # The verdict of the first rank that gives up counts for all: to a later rank, the first would seem gone.
                if self.store.check(["verdict"]):
                    self._end(self.store.get("verdict").decode())
                if self.rank == 0 and self.store.check(["failure"]):
                    time.sleep(SECONDS_TO_MISS)  # this rank may meet the same error, and then reports it itself
                    self.on_failure(self.store.get("failure").decode())
                if self.seconds_left > 0:
                    before = None
                elif before is None:
                    before = self._signs()
                elif self.seconds_left <= -SECONDS_TO_MISS:
                    now = self._signs()
                    if any(now[rank]["gets_on"] and now[rank]["beat"] > before[rank]["beat"] for rank in before):
                        before, self.seconds_left = None, 0  # check again
                        continue
                    verdict = self._verdict(before, now)
                    self._end(self.store.compare_set("verdict", "", verdict).decode())
            except dist.DistError as error:
                self.store_is_lost |= isinstance(error, dist.DistNetworkError)
                if self.seconds_left <= 0:
                    self._end(f"{self._lateness()}; gone: {NO_STORE}")

    def _place(self) -> str:
        """Return the line where the main thread is."""
        frame = sys._current_frames()[threading.main_thread().ident]
        return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"

    def _give_sign(self, beat: int) -> None:
        sign = {"host": socket.gethostname(), "at": f"{self.doing}, in {self._place()}", "beat": beat}
        sign["gets_on"] = self.progress is not None and self.seconds_left > 0
        self.store.set(str(self.rank), json.dumps(sign))

    def _signs(self) -> dict[int, dict]:
        """Return the last sign of life of each rank that gave one."""
        known = [rank for rank in range(self.world_size) if self.store.check([str(rank)])]  # else `get` would wait
        return {rank: json.loads(self.store.get(str(rank))) for rank in known}

    def _gone(self, before: dict[int, dict], now: dict[int, dict]) -> list[str]:
        """Return the ranks, with their hosts, that gave no sign of life between the two times."""
        silent = {"host": "a host that is not known", "beat": None}
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        gone = [rank for rank in others if before.get(rank, silent)["beat"] == now.get(rank, silent)["beat"]]
        return [f"rank {rank} (on {now.get(rank, silent)['host']})" for rank in gone]

    def _lateness(self) -> str:
        return f"{self.doing} has not ended within {self.seconds:.0f} s (--step_timeout, --ddp_timeout)"

    def _verdict(self, before: dict[int, dict], now: dict[int, dict]) -> str:
        """Name the ranks that are gone; if there are none, say where every rank is."""
        if gone := self._gone(before, now):
            return f"{self._lateness()}; gone: {', '.join(gone)}"
        ranks_at = defaultdict(list)
        for rank, sign in now.items():
            ranks_at[sign["at"]].append(rank)
        groups = sorted(ranks_at.items(), key=lambda item: len(item[1]))  # small groups first
        return "; ".join([self._lateness(), *(f"rank {', '.join(map(str, r))} at {where}" for where, r in groups)])

    def _end(self, message: str) -> None:
        self.gave_up.set()
        print(f"error: {message}", file=sys.stderr, flush=True)
        tell_launcher(message)
        faulthandler.dump_traceback(file=sys.stderr)
        if self.rank == 0:
            update_status(self.output_dir, state="crashed", reason=message)
        time.sleep(SECONDS_TO_MISS)  # this process may hold the store, from which the others still read
        os._exit(1)


# Watch of this process. None until `start_watch`.
_watch: Watch | None = None


def start_watch(output_dir: Path, on_failure: Callable[[str], None]) -> Watch:
    """Start the watch of this process; it works once the process group is up."""
    global _watch
    _watch = Watch(output_dir, on_failure)
    return _watch


def expect(doing: str, seconds: float, progress: Callable[[], Any] | None = None) -> None:
    """Tell the watch of this process what comes next; see `Watch.expect`."""
    if _watch is not None:
        _watch.expect(doing, seconds, progress)
