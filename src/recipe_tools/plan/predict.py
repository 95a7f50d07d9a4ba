"""Prediction for a run on a GPU: memory, communication, FLOPs and a lower bound of the time, as a report and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments.gpus import EFFICIENCY, GIB, OUTSIDE, Gpu
from accelerate_recipes.optim import checkpoint_bytes
from recipe_tools.plan.simulate import Outcome

TIGHT = 0.93  # share of a GPU's memory above which the estimate of the allocator decides
LOADING, COPY = "weights while loading", "copy of a checkpoint"  # kinds of host memory
PROCESS = 2 * GIB  # host memory of a process with Python, torch and a CUDA context; an assumption, not measured on GPUs


@dataclass(frozen=True)
class Prediction:
    """Needs of a run on one GPU, and a lower bound of the time of a step."""

    outcome: Outcome
    args: TrainArgs
    gpu: Gpu
    env: Mapping[str, str]  # what `accelerate launch` gives the first process

    @property
    def world_size(self) -> int:
        return int(self.env["WORLD_SIZE"])

    @property
    def gpus_per_node(self) -> int:
        return int(self.env["LOCAL_WORLD_SIZE"])

    @property
    def allocator(self) -> int:
        """Bytes that the allocator holds in addition to the memory in use; an estimate."""
        return max(0, self.outcome.reserved - self.outcome.peak)

    @property
    def needed(self) -> int:
        return self.outcome.peak + self.allocator + OUTSIDE

    @property
    def fits(self) -> bool:
        return self.needed <= self.gpu.memory

    @property
    def is_near(self) -> bool:
        """True if the run fits only just."""
        return self.fits and self.needed > TIGHT * self.gpu.memory

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of a step, a lower bound: only one of --num_iterations steps draws answers."""
        without = 1 - 1 / self.args.num_iterations
        return self.outcome.seconds - without * self.outcome.before

    @property
    def targets_per_second(self) -> float:
        """Upper bound of the targets per second of all GPUs together."""
        outcome = self.outcome
        return outcome.tokens * outcome.micro_batches * self.world_size / self.mean_seconds

    @property
    def mfu(self) -> float:
        """Upper bound of model FLOPs utilisation: a share of the GPU's bf16 peak, without recomputation."""
        return (self.outcome.flops - self.outcome.recomputed) / self.outcome.seconds / self.gpu.bf16

    @property
    def hours(self) -> float | None:
        """Hours of the run, a lower bound; None if the number of steps depends on the data."""
        steps = self.args.max_steps
        return steps * self.mean_seconds / 3600 if steps > 0 else None

    @property
    def hours_of_a_million_rows(self) -> float:
        """Hours to train once on a million rows (the unit of --total_batch_size), a lower bound."""
        return 1e6 / self.args.total_batch_size * self.mean_seconds / 3600

    @property
    def checkpoint(self) -> int:
        state_dict_type = self.env.get("FSDP_STATE_DICT_TYPE")
        return checkpoint_bytes(self.args, self.outcome.trained, state_dict_type, self.outcome.by_muon)

    @property
    def host(self) -> dict[str, int]:
        """Bytes of host memory of a node, by purpose."""
        nodes = -(-self.world_size // self.gpus_per_node)
        found = {
            "processes": self.gpus_per_node * PROCESS,
            "offloaded": self.gpus_per_node * self.outcome.host_peak,
            # Pinned blocks are rounded up to powers of two: up to twice as much.
            COPY: 2 * checkpoint_bytes(self.args, self.outcome.trained, None, self.outcome.by_muon) // nodes,
        }
        if self.args.base_model:
            found[LOADING] = self.readers * self.args.param_dtype.itemsize * self.outcome.parameters
        return {what: size for what, size in found.items() if size > 2**20}

    @property
    def step_time(self) -> str:
        """Least time of a step in words, with what it leaves out."""
        copies = " (plus copies to the CPU and back, and the optimizer there)" if "offloaded" in self.host else ""
        return f"at least {self.outcome.seconds:.3g} s{copies}"

    @property
    def readers(self) -> int:
        """Number of processes of a node that read the whole pretrained model; 0 if each reads its own part (`slices`)."""
        if self.env.get("FSDP_CPU_RAM_EFFICIENT_LOADING") != "true" or self.args.load_in_4bit:
            return self.gpus_per_node
        is_classifier = not self.args.attn_implementation  # transformers loads it, with a new output layer
        return int(is_classifier or self.env.get("FSDP_VERSION") != "2")

    @property
    def host_peak(self) -> int:
        """Largest use of host memory of a node, in bytes: loaded weights are freed before a checkpoint is copied."""
        host = self.host
        return sum(host.values()) - min(host.get(LOADING, 0), host.get(COPY, 0))

    def facts(self) -> dict[str, Any]:
        """Return everything for --json; sizes in bytes, times in seconds."""
        outcome = self.outcome
        return {
            "gpu": self.gpu.name,
            "gpus": self.world_size,
            "gpus_per_node": self.gpus_per_node,
            "unit": outcome.unit,
            "parameters": outcome.parameters,
            "trained": outcome.trained,
            "memory": {
                "in_use": outcome.peak,
                "by_kind": outcome.at_peak,
                "allocator": self.allocator,
                "outside": OUTSIDE,
                "needed": self.needed,
                "of_gpu": self.gpu.memory,
                "fits": self.fits,
                "near": self.is_near,
            },
            "host": {"peak": self.host_peak, "by_kind": self.host},
            "step": {
                "micro_batches": outcome.micro_batches,
                "targets": outcome.tokens * outcome.micro_batches * self.world_size,
                "flops": outcome.flops,
                "recomputed_flops": outcome.recomputed,
                "seconds": outcome.seconds,
                "compute_seconds": outcome.compute,
                "memory_seconds": outcome.memory,
                "communication_seconds": outcome.communication,
                "drawing_seconds": outcome.before,
                "optimizer_seconds": outcome.optimizer,
                "hidden_seconds": outcome.compute + outcome.memory + outcome.communication - outcome.seconds,
                "collectives": {
                    key: counts | {"inside_node": outcome.inside_node[key]}
                    for key, counts in outcome.collectives.items()
                },
            },
            "targets_per_second": self.targets_per_second,
            "mfu": self.mfu,
            "hours": self.hours,
            "hours_of_a_million_rows": self.hours_of_a_million_rows,
            "checkpoint": self.checkpoint,
        }

    def memory_line(self) -> str:
        """Say what a GPU needs, as a sum of three numbers, and whether that fits."""
        verdict = "does not fit" if not self.fits else "fits, but only just" if self.is_near else "fits"
        return (
            f"{in_gib(self.needed)} of {in_gib(self.gpu.memory)} GiB on {self.gpu.name} ({in_gib(self.outcome.peak)} in "
            f"use, {in_gib(self.allocator)} by the allocator's rounding, {in_gib(OUTSIDE)} outside of it): {verdict}"
        )

    def report(self) -> str:
        """Write the report for a person."""
        outcome = self.outcome
        kinds = sorted(outcome.at_peak.items(), key=lambda item: -item[1])
        parts = [f"{in_gib(size)} {kind}" for kind, size in kinds if size >= GIB / 100]
        lines = [
            f"Model: {outcome.parameters:,} parameters, {outcome.trained:,} trained, in {outcome.num_layers} layers; a "
            f"step is {outcome.micro_batches} micro-batches of {outcome.tokens:,} targets on "
            f"{'the GPU' if self.world_size == 1 else f'each of {self.world_size} GPUs'}",
            f"Memory of a GPU: {self.memory_line()}",
            f"  in use at the peak, GiB: {', '.join(parts)}",
            f"Memory of a node: {in_gib(self.host_peak)} GiB at most: "
            + ", ".join(f"{in_gib(size)} {what}" for what, size in self.host.items()),
            f"FLOPs of a GPU in a step: {outcome.flops:.3e}, {outcome.recomputed / outcome.flops:.0%} of them recomputed",
        ]
        for key, counts in outcome.collectives.items():
            name, size = key.split()
            place = "inside a node" if outcome.inside_node[key] else "between nodes"
            if counts["sent"] >= 2**20:
                lines.append(
                    f"  {name} among {size} ranks, {place}: {counts['calls']} calls, {in_gib(counts['sent'])} GiB sent"
                )
        hidden = max(0.0, outcome.compute + outcome.memory + outcome.communication - outcome.seconds)  # rounding
        before = f"; passes before the micro-batches take {outcome.before:.3g} s of the step" if outcome.before else ""
        share = outcome.optimizer / self.mean_seconds
        if outcome.by_muon and share > 0.1:
            before += f"; Muon takes {share:.0%} of it: raise --total_batch_size, or choose another --optim"
        lines += [
            f"Time of a step, at {EFFICIENCY:.0%} of each peak speed: {self.step_time}; "
            f"{outcome.compute:.3g} bound by FLOPs, {outcome.memory:.3g} by memory, "
            f"{outcome.communication:.3g} on links, {hidden:.3g} hidden by others{before}",
            f"Speed at most: {self.targets_per_second:,.0f} {outcome.unit}/s, {self.mfu:.1%} MFU",
        ]
        if self.hours is not None:
            lines[-1] += f"; {self.args.max_steps:,} steps take at least {in_hours(self.hours)}"
        else:
            lines[-1] += f"; a million rows take at least {in_hours(self.hours_of_a_million_rows)} an epoch"
        lines.append(f"A checkpoint: {in_gib(self.checkpoint)} GiB")
        return "\n".join(lines)


def in_hours(hours: float) -> str:
    return f"{hours:,.0f} hours" if hours >= 100 else f"{hours:.3g} hours"


def in_gib(size: float) -> str:
    return f"{size / GIB:.2f}"
