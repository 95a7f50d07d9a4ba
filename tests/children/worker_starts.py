"""Start data workers beside saves in the background and, if asked for, a rain of signals: none may hang or end too early.

    python tests/children/worker_starts.py FOLDER STARTS [server] [signals] [seed]

With `server` they are started as in a run, else by a fork of this process. Ends with code -14 (SIGALRM) if a worker has given
no row for a minute.
"""

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

from accelerate_recipes import recipe
from accelerate_recipes.life import parent, stop, workers

WORKERS = 4
PATIENCE = 60  # seconds


class Rows(Dataset):
    def __len__(self) -> int:
        return WORKERS

    def __getitem__(self, number: int) -> int:
        return number


def save(folder: Path) -> None:
    state = {f"weight {i}": torch.ones(100) for i in range(10)}
    while True:
        dcp.async_save(state, checkpoint_id=folder, no_dist=True).result()


def send_signals() -> None:
    """Send each signal that asks a run to stop to all other processes of this run, again and again."""
    this = psutil.Process()
    while True:
        for process in this.children(recursive=True):
            for number in stop.SIGNALS:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def main(folder: Path, starts: int, *asked: str) -> None:
    parent.follow_launcher()
    if "server" in asked:
        workers.start_fork_server()
    for place in ("one", "other"):
        threading.Thread(target=save, args=(folder / place,), daemon=True).start()
    if "signals" in asked:
        threading.Thread(target=send_signals, daemon=True).start()
    began = time.perf_counter()
    for started in range(0, starts, WORKERS):
        signal.alarm(PATIENCE)
        assert list(DataLoader(Rows(), batch_size=None, num_workers=WORKERS)) == list(range(WORKERS))
        if (started + WORKERS) % 1000 == 0:
            print(started + WORKERS, "starts,", round(time.perf_counter() - began), "seconds", flush=True)
    recipe.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
