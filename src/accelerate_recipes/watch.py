"""Who is missing: ends a run that hangs, and names the ranks that it waits for.

A rank that dies or hangs leaves the others in a collective. gloo notices a lost connection, NCCL waits for a timeout;
neither says whose fault it is. So a thread of each rank writes once a second, into the launcher's store, that the
process lives and where it is.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from accelerate_recipes.status import update_status

SECONDS_TO_MISS = 4  # without a sign of life, of which one is due each second
NO_STORE = "the first node (the launcher's store does not answer)"


class LostRankError(RuntimeError):
    """Another rank is gone, so nothing can be agreed on any more, and nothing saved."""


class Watch:
    """Around training, on every rank: `with Watch(output_dir) as watch: ... watch.expect("step 2", seconds)`.

    What does not end within its seconds ends the process, with one message for all ranks: who is gone, and where the
    others are. An error of a collective becomes a LostRankError if a rank is gone.
    """

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.rank = int(os.environ.get("RANK", 0))
        self.expect("the start", float("inf"))
        self.ended = threading.Event()
        self.gave_up = threading.Event()

    def __enter__(self) -> "Watch":
        if dist.is_initialized():
            # A connection of its own: the main one is busy while another thread waits for a key.
            # The launcher keeps the store when it restarts the ranks.
            prefix = f"watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())
            self._give_sign(0)
            threading.Thread(target=self._run, daemon=True, name="watch").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback) -> None:
        if self.gave_up.is_set():
            time.sleep(10 * SECONDS_TO_MISS)  # the thread has said why, and is about to end the process
        gone = []
        if dist.is_initialized() and kind and (kind is RuntimeError or issubclass(kind, dist.DistError)):
            try:
                before = self._signs()
                time.sleep(SECONDS_TO_MISS)
                gone = self._gone(before, self._signs())
            except dist.DistError:
                gone = [NO_STORE]
        self.ended.set()
        if gone:
            raise LostRankError(f"{', '.join(gone)}: gone during {self.doing} ({error})") from error

    def expect(self, doing: str, seconds: float) -> None:
        """From now on this rank is `doing` something, for `seconds` at most."""
        self.doing, self.seconds, self.seconds_left = doing, seconds, seconds

    def _run(self) -> None:
        before, beat = None, 0
        # Counts seconds of its own, not the clock's: a job that was suspended must not wake up to an error.
        while not self.ended.wait(1):
            beat += 1
            self.seconds_left -= 1
            try:
                self._give_sign(beat)
                # The first to give up speaks for all: to a later one it would seem gone.
                if self.store.check(["verdict"]):
                    self._end(self.store.get("verdict").decode())
                if self.seconds_left > 0:
                    before = None
                elif before is None:
                    before = self._signs()
                elif self.seconds_left <= -SECONDS_TO_MISS:
                    verdict = self._verdict(before, self._signs())
                    self._end(self.store.compare_set("verdict", "", verdict).decode())
            except dist.DistError:
                if self.seconds_left <= 0:
                    self._end(f"{self._lateness()}; gone: {NO_STORE}")

    def _give_sign(self, beat: int) -> None:
        frame = sys._current_frames()[threading.main_thread().ident]
        place = f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        sign = {"host": socket.gethostname(), "at": f"{self.doing}, in {place}", "beat": beat}
        self.store.set(str(self.rank), json.dumps(sign))

    def _signs(self) -> dict[int, dict]:
        """The last sign of life of each rank."""
        ranks = range(dist.get_world_size())
        return dict(zip(ranks, map(json.loads, self.store.multi_get([str(rank) for rank in ranks])), strict=True))

    def _gone(self, before: dict[int, dict], now: dict[int, dict]) -> list[str]:
        """Ranks, with their hosts, that gave no sign of life between the two times."""
        return [
            f"rank {rank} (on {now[rank]['host']})"
            for rank in now
            if rank != self.rank and now[rank]["beat"] == before[rank]["beat"]
        ]

    def _lateness(self) -> str:
        return f"{self.doing} has not ended within {self.seconds:.0f} s (--step_timeout, --ddp_timeout)"

    def _verdict(self, before: dict[int, dict], now: dict[int, dict]) -> str:
        """Who is gone, else where everybody is."""
        if gone := self._gone(before, now):
            return f"{self._lateness()}; gone: {', '.join(gone)}"
        ranks_at = defaultdict(list)
        for rank, sign in now.items():
            ranks_at[sign["at"]].append(rank)
        places = sorted(ranks_at.items(), key=lambda item: len(item[1]))  # the odd ones out first
        return "; ".join([self._lateness(), *(f"rank {', '.join(map(str, r))} at {place}" for place, r in places)])

    def _end(self, message: str) -> None:
        self.gave_up.set()
        print(f"error: {message}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr)
        if self.rank == 0:
            update_status(self.output_dir, state="crashed", reason=message)
        time.sleep(SECONDS_TO_MISS)  # the others still read from the store, which this process may keep
        os._exit(1)
