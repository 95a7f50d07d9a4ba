"""Steps that go wrong: which are not applied, whether hardware made them so, and what a run leaves about them.

A step whose loss or gradient norm is not finite, or a spike, is computed once more from the same state. Other numbers mean
hardware or a race; then the numbers that come twice in three computations count. The same numbers mean that the rows did
it, or the weights. All values that decide are equal on all ranks, so all ranks decide the same. Under DDP and HSDP, weights
and states of the optimizer are the same bits on each replica, which `check_replicas` compares.
"""

import contextlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash
from torch import nn

from accelerate_recipes.checkpoint.files import SaveError, saved_checkpoints, step_of
from accelerate_recipes.disk import write_atomically
from accelerate_recipes.distributed import shard_world_size
from accelerate_recipes.errors import NonFiniteError, ReplicaError, first_few
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.optim import local_shard
from accelerate_recipes.ranks import is_first, on_all_ranks, print_first, rng_state, set_rng_state

if TYPE_CHECKING:
    from accelerate_recipes.checkpoint.checkpointer import Checkpointer

MEMORY = 100  # steps of which the median is taken
FEWEST = 20  # steps of which a median is taken at all
NORMAL = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
LEAST_DEVIATION = 1e-3  # of the median: where all values are almost equal, rounding is no spike
# Where sums have no fixed order, as on a GPU without --full_determinism, two values that differ by less are the same.
NOISE = 0.01
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SHOWN = 3  # names of tensors in a message

# Loss and gradients of one step: `loss` and the gradient's `norm` before clipping, equal on all ranks; `micro_losses`, (M,),
# the sums of this rank's micro-batches; and whether it `has_targets`.
Step = TypeVar("Step", bound=Any)
# Returns a function that forgets what a loss function has gathered since, for the log.
MarkFn = Callable[[], Callable[[], None]]


class Traces:
    """State before a computation, to which it can go back: random generators, buffers, and what the loss gathers."""

    def __init__(self, model: nn.Module, mark_fn: MarkFn | None):
        self.random = rng_state()
        # A forward pass may change a buffer, or put another in its place. Those that are not saved follow from the settings.
        self.buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.forget = mark_fn() if mark_fn else lambda: None

    def remove(self) -> None:
        """Remove what the computation has left in the model and in the log; random generators go on."""
        for module, name, buffer, before in self.buffers:
            setattr(module, name, buffer.copy_(before))
        self.forget()

    def restore(self) -> None:
        """Go back to the state before the computation, so that it can be done again."""
        self.remove()
        set_rng_state(self.random)


class Spikes:
    """Judge of steps, with the loss and the gradient norm of the last hundred, and what it found so far.

    `factor` is --spike_factor. The run ends at the `fatal`-th step in a row that goes wrong, whatever computes it; those
    before it are skipped. Where losses are sums around zero, as GRPO's, they are no measure (`by_norm_alone`).
    `is_exact` says that the same computation gives the same bits.
    """

    def __init__(self, factor: float = 0.0, fatal: int = 1, *, by_norm_alone: bool = False, is_exact: bool = True):
        self.factor, self.fatal = factor, fatal
        self.by_norm_alone, self.is_exact = by_norm_alone, is_exact
        self.past = {name: deque(maxlen=MEMORY) for name in ("loss", "norm")}
        self.in_a_row = 0  # steps that were skipped
        self.num_unstable = 0  # steps that gave other numbers when they were computed again
        self.skipped: list[dict[str, Any]] = []

    def settle(self, first: Step, again: Callable[[], Step]) -> tuple[Step, str]:
        """Return the step as it was last computed, and why it must be skipped; "" if it may be applied.

        `first` is what was computed; `again` computes it from the same state.

        Raises:
            NonFiniteError: if the step must end the run.
        """
        step, reason = first, self.reason(first)
        if reason:
            step = self.computed_again(first, again, reason)
            reason = self.reason(step)
        if reason and self.in_a_row + 1 >= self.fatal:
            many = f" (as in {self.in_a_row} steps before it, which were skipped)" if self.in_a_row else ""
            line = f"{reason}{many}; computed again, the same: rows or weights did it, and no passing fault of hardware"
            raise NonFiniteError(line, step.micro_losses.tolist())
        self.in_a_row = self.in_a_row + 1 if reason else 0
        if step.has_targets and not reason:
            self.past["loss"].append(step.loss)
            self.past["norm"].append(step.norm)
        return step, reason

    def reason(self, step: Any) -> str:
        """Say why a step must not be applied; "" if it may."""
        if not (math.isfinite(step.loss) and math.isfinite(step.norm)):
            return f"loss {step.loss}, gradient norm {step.norm}"
        values = {"norm": step.norm} if self.by_norm_alone else {"loss": step.loss, "norm": step.norm}
        for name, value in values.items():
            past = self.past[name]
            if not self.factor or len(past) < FEWEST:
                continue
            middle = median(past)
            usual = max(NORMAL * median(abs(one - middle) for one in past), LEAST_DEVIATION * abs(middle))
            if value - middle > self.factor * usual:
                called = "loss" if name == "loss" else "gradient norm"
                return (
                    f"{called} {value:.5g}, which is more than {self.factor:g} robust deviations ({usual:.3g} each) above "
                    f"{middle:.5g}, the median of the last {len(past)} steps"
                )
        return ""

    def computed_again(self, first: Step, again: Callable[[], Step], reason: str) -> Step:
        """Compute a step again until two computations agree; return the last.

        Raises:
            NonFiniteError: if three computations are all different.
        """
        computed = [first, again()]
        if self.agree(*computed):
            return computed[-1]
        self.num_unstable += 1
        computed.append(again())
        ranks = on_all_ranks([step.micro_losses.tolist() for step in computed])
        named = [
            str(rank)
            for rank, losses in enumerate(ranks)
            if any(not self.are_same(*values) for other in losses[1:] for values in zip(losses[0], other, strict=True))
        ]
        where = f"the loss of rank {', '.join(named)} differs" if named else "gradients differ"
        numbers = "; ".join(f"loss {step.loss:.9g}, gradient norm {step.norm:.9g}" for step in computed)
        line = f"{reason}; computed again from the same state, it has other numbers: hardware or a race; {where} ({numbers})"
        if not any(self.agree(computed[-1], earlier) for earlier in computed[:-1]):
            raise NonFiniteError(f"{line}; no two of three computations agree", first.micro_losses.tolist())
        print_first(f"warning: {line}; the numbers that came twice count")
        return computed[-1]

    def agree(self, one: Any, other: Any) -> bool:
        """Tell whether two computations of a step have the same numbers."""
        # Of sums around zero, little is left but noise.
        if self.by_norm_alone and not self.is_exact:
            return self.are_same(one.norm, other.norm) and math.isfinite(one.loss) == math.isfinite(other.loss)
        return self.are_same(one.loss, other.loss) and self.are_same(one.norm, other.norm)

    def are_same(self, one: float, other: float) -> bool:
        if not (math.isfinite(one) and math.isfinite(other)):
            return math.isfinite(one) == math.isfinite(other)
        return one == other or (not self.is_exact and abs(one - other) <= NOISE * max(abs(one), abs(other)))

    def skip(self, number: int, step: Any, batches: Sequence[dict[str, Any]], output_dir: Path) -> None:
        """Note step `number`, which was skipped, in skipped.jsonl and for the next checkpoint."""
        numbers = {"loss": str(step.loss), "grad_norm": str(step.norm)}
        self.skipped.append(wrong_step(number, step.skipped, batches, step.micro_losses.tolist()) | numbers)
        self.write(output_dir)
        print_first(f"warning: step {number} is skipped: {step.skipped}; its rows are in skipped.jsonl")

    def write(self, output_dir: Path) -> None:
        """Write skipped.jsonl, if a step was skipped or an earlier run left such a file."""
        file = output_dir / "skipped.jsonl"
        if is_first() and (self.skipped or file.exists()):
            write_atomically(file, "".join(json.dumps(record) + "\n" for record in self.skipped))

    def counts(self) -> dict[str, int]:
        """Count what went wrong so far, for the log; without what never did."""
        numbers = {"skipped_steps": len(self.skipped), "unstable_steps": self.num_unstable}
        return {name: number for name, number in numbers.items() if number}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, on rank 0; it is the same on all ranks."""
        past = {name: [*values] for name, values in self.past.items()}
        own = {"past": past, "in_a_row": self.in_a_row, "num_unstable": self.num_unstable, "skipped": self.skipped}
        return {"spikes": own} if is_first() else {}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Go on from the `state` of a checkpoint; `states` are those of all ranks, or none."""
        for saved in (state["spikes"] for state in states if "spikes" in state):
            for name, values in self.past.items():
                values.extend(saved["past"][name])
            self.in_a_row, self.num_unstable = saved["in_a_row"], saved["num_unstable"]
            self.skipped = saved["skipped"]


def wrong_step(
    number: int, found: str, batches: Sequence[dict[str, Any]], micro_losses: Sequence[float]
) -> dict[str, Any]:
    """Describe step `number`, which went wrong: what was found, and for each rank rows and loss of each micro-batch."""
    # A packed row has a place in its file for each document.
    rows = [{"rows": b["row"].tolist()} | {name: b[name] for name in ("places",) if name in b} for b in batches]
    # JSON has no NaN; as text, every reader accepts it.
    own = [row | {"loss_sum": str(loss)} for row, loss in zip(rows, micro_losses, strict=True)]
    return {"step": number, "found": found, "micro_batches_of_ranks": on_all_ranks(own)}


def stop_run(
    error: NonFiniteError, checkpointer: "Checkpointer", step: int, batches: Sequence[dict[str, Any]]
) -> NonFiniteError:
    """Describe the step after `step`, which ends the run, in non_finite.json.

    Returns:
        The error, with the file and the last good checkpoint. A checkpoint is not good if its weights give no micro-batch a
        finite loss.
    """
    with contextlib.suppress(SaveError):
        checkpointer.wait()
    output_dir, newest = Path(checkpointer.args.output_dir), checkpointer.newest
    record = wrong_step(step + 1, str(error), batches, error.micro_losses)
    losses = [float(entry["loss_sum"]) for rank in record["micro_batches_of_ranks"] for entry in rank]
    if newest and step_of(newest) == step and not any(map(math.isfinite, losses)):
        newest = next((path for path in reversed(saved_checkpoints(output_dir)) if step_of(path) < step), None)
    file = output_dir / "non_finite.json"
    if is_first():
        record |= {"last_good_step": step, "checkpoint": str(newest or "")}
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    message = f"step {step + 1}: {error}. The weights were not changed; the rows of the batch are in {file}"
    return NonFiniteError(f"{message}. Last good checkpoint: {newest or 'none yet'}", error.micro_losses)


def check_replicas(checkpointer: "Checkpointer", step: int) -> None:
    """Compare weights and states of the optimizer over the replicas after `step`; call it on every rank.

    Raises:
        ReplicaError: naming the ranks that differ from most replicas; of two replicas, no one knows which is right. It names
            the last checkpoint, which was saved when they were the same.
    """
    sums = checksums(checkpointer.model, checkpointer.optimizer, checkpointer.accelerator.device)
    digests = on_all_ranks(xxhash.xxh3_64_hexdigest(repr(sums).encode()))
    shards = shard_world_size(checkpointer.accelerator)
    wrong: dict[int, int] = {}  # ranks that differ, with one that they differ from
    for shard in range(shards):
        ranks = range(shard, len(digests), shards)  # those that hold the same part of each tensor, one a replica
        (usual, number), *others = Counter(digests[rank] for rank in ranks).most_common()
        right = next(rank for rank in ranks if digests[rank] == usual)
        has_majority = 2 * number > len(ranks)
        wrong |= {rank: right for rank in ranks if others and (digests[rank] != usual or not has_majority)}
    if not wrong:
        return
    all_sums = on_all_ranks(sums)
    there = {name for rank, right in wrong.items() for name in sums if all_sums[rank][name] != all_sums[right][name]}
    names = sorted(there, key=[*sums].index)
    held = [f"rank {rank} (replica {rank // shards})" for rank in sorted(wrong)]
    vote = "" if 2 * len(wrong) < len(digests) else "; no majority tells which of them is right"
    with contextlib.suppress(SaveError):
        checkpointer.wait()
    raise ReplicaError(
        f"step {step}: the replicas differ: {', '.join(held)}, in {first_few(names, SHOWN)}{vote}. It is hardware or a "
        f"race. No checkpoint is saved. {checkpointer.last_good()}"
    )


def checksums(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Sum the bits of each weight, and of each state of the optimizer, as integers; one flipped bit changes the sum.

    Nothing but the sums is allocated. This waits for the device once.
    """
    tensors = dict(tensors_of(model, optimizer))
    if not tensors:
        return {}
    sums = [tensor.view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors.values()]
    stacked = torch.stack([value.to(device, non_blocking=True) for value in sums])
    return dict(zip(tensors, stacked.tolist(), strict=True))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of each weight and of each state of the optimizer, with its name."""
    for name, parameter in model.named_parameters():
        name = WRAPPERS.sub("", name)
        yield name, local_shard(parameter.detach())
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{kind} of {name}", local_shard(value.detach())
