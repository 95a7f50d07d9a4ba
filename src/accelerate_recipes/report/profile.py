"""Profile of some steps: `--profile_steps 10-12` runs torch's profiler, also on a CPU, and writes `<output_dir>/profile/`.

For each chosen rank: `rank-<n>.trace.json.gz` (for https://ui.perfetto.dev) and, on a GPU, `rank-<n>.memory.pickle` (for
https://docs.pytorch.org/memory_viz).
"""

from pathlib import Path

import torch
from torch.profiler import profile, schedule

from accelerate_recipes.agenda import Observer
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.ranks import rank

MOST_ALLOCATIONS = 100_000  # in a snapshot of CUDA's memory


class StepProfiler(Observer):
    """Profiler of this rank. It does nothing on a rank, and in steps, that are not chosen."""

    recorder: profile | None = None

    def __init__(self, args: TrainArgs):
        self.steps, self.ranks, self.folder = args.profiled_steps, args.profile_ranks, Path(args.output_dir) / "profile"

    def began(self, step: int) -> None:
        """Begin to profile the steps after `step`. The step before the first one warms up the profiler."""
        self.steps = range(max(self.steps.start, step + 1), self.steps.stop)
        if self.steps and rank() in self.ranks:
            before = self.steps[0] - step - 1
            when = {"skip_first": max(0, before - 1), "wait": 0, "warmup": min(1, before), "active": len(self.steps)}
            self.recorder = profile(schedule=schedule(**when, repeat=1), on_trace_ready=self.write)
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
        if torch.cuda.is_initialized() and step == self.steps[0]:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def write(self, done: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = str(self.folder / f"rank-{rank()}")
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(f"{name}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        done.export_chrome_trace(f"{name}.trace.json.gz")
