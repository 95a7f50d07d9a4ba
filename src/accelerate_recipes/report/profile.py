"""Profile of some steps: `--profile_steps 10-12` runs torch's profiler, also on a CPU, and writes `<output_dir>/profile/`.

For each chosen rank: `rank-<n>.json` (operators, and shares of the time, for the report), `rank-<n>.trace.json.gz` (for
https://ui.perfetto.dev) and, on a GPU, `rank-<n>.memory.pickle` (for https://docs.pytorch.org/memory_viz).
"""

import json
import time
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerAction, profile

from accelerate_recipes.agenda import Observer
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.disk import write_atomically
from accelerate_recipes.ranks import rank

NUM_OPERATORS = 30
MOST_ALLOCATIONS = 100_000  # in a snapshot of CUDA's memory


class StepProfiler(Observer):
    """Profiler of this rank. It does nothing on a rank, and in steps, that are not chosen."""

    begun_at = 0
    recorder: profile | None = None

    def __init__(self, args: TrainArgs):
        self.steps, self.ranks, self.folder = args.profiled_steps, args.profile_ranks, Path(args.output_dir) / "profile"

    def action(self, number: int) -> ProfilerAction:
        """Say what to do in the step after `begun_at + number`. The step before the first one warms up the profiler."""
        step = self.begun_at + number + 1
        if step in self.steps:
            return ProfilerAction.RECORD_AND_SAVE if step == self.steps[-1] else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == self.steps[0] - 1 else ProfilerAction.NONE

    def began(self, step: int) -> None:
        if self.steps and rank() in self.ranks and step < self.steps[-1]:
            self.begun_at = step  # which `profile` asks for at once
            self.recorder = profile(schedule=self.action, on_trace_ready=self.write)
            self.recorder.start()
            self.watch_memory(step + 1)

    def completed(self, step: int) -> None:
        if self.recorder:
            self.recorder.step()
            self.watch_memory(step + 1)

    def ended(self, step: int) -> None:
        """End the profile, also if the run ends before the last of its steps."""
        if self.recorder:
            self.recorder.stop()
            self.recorder = None

    def watch_memory(self, step: int) -> None:
        """Let CUDA's allocator remember its calls from the first of the steps on."""
        if torch.cuda.is_initialized() and step == max(self.steps[0], self.begun_at + 1):
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def write(self, done: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = str(self.folder / f"rank-{rank()}")
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(f"{name}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        done.export_chrome_trace(f"{name}.trace.json.gz")
        facts = {"rank": rank(), "steps": [self.steps[0], self.steps[-1]], "time": time.time()} | summary(done)
        write_atomically(Path(f"{name}.json"), json.dumps(facts, indent=1) + "\n")


def summary(done: profile) -> dict[str, Any]:
    """Sum up a profile: seconds of its steps, the share of them in which something ran, and its operators.

    On a GPU these are kernels. On a CPU they are torch's operators, and the transfers in gloo's threads.
    `communication_alone` is the share in which nothing is computed meanwhile; in `idle`, neither runs.
    """
    events = done.events() or []
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    steps = [event for event in on_cpu if is_step(event.name)]
    if kernels:
        transfers = [event for event in kernels if "nccl" in event.name.lower()]
        computed = [event for event in kernels if "nccl" not in event.name.lower()]
    else:
        threads = {event.thread for event in steps}  # gloo's threads also copy
        transfers = [event for event in on_cpu if event.name.startswith("gloo:")]
        computed = [event for event in on_cpu if event.name.startswith("aten::") and event.thread in threads]
    whole, computing, either = covered(steps), covered(computed), covered([*computed, *transfers])
    time_of = attrgetter("self_device_time_total" if kernels else "self_cpu_time_total")
    operators = [
        {"name": mean.key, "calls": mean.count, "seconds": time_of(mean) / 1e6}
        for mean in done.key_averages()
        if not is_step(mean.key)
    ]
    return {
        "seconds": whole / 1e6,
        "computation": computing / whole,
        "communication": covered(transfers) / whole,
        "communication_alone": (either - computing) / whole,
        "idle": max(0.0, 1 - either / whole),
        "operators": sorted(operators, key=lambda operator: -operator["seconds"])[:NUM_OPERATORS],
    }


def is_step(name: str) -> bool:
    return name.startswith("ProfilerStep")


def covered(events: Iterable[FunctionEvent]) -> float:
    """Return the microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for span in sorted((event.time_range for event in events), key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total
