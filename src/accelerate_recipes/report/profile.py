"""Profile of some steps: `--profile_steps 10-12` runs torch's profiler, also on a CPU, and writes `<output_dir>/profile/`.

For each chosen rank: `rank-<n>.trace.json.gz` (for https://ui.perfetto.dev) and, on a GPU, `rank-<n>.memory.pickle` (for
https://docs.pytorch.org/memory_viz).
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

from accelerate_recipes.agenda import Observer
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.ranks import rank

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
