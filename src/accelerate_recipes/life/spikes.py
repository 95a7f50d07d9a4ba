"""Steps that go wrong: which are not applied, and whether hardware made them so.

A step whose loss or gradient norm is not finite, or a spike, is computed once more from the same state. Other numbers mean
hardware or a race; then the numbers that come twice in three computations count. The same numbers mean that the rows did
it, or the weights. All values that decide are equal on all ranks, so all ranks decide the same.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from accelerate_recipes.disk import write_atomically
from accelerate_recipes.errors import NonFiniteError
from accelerate_recipes.ranks import is_first, on_all_ranks

MEMORY = 100  # steps of which the median is taken
FEWEST = 20  # steps of which a median is taken at all
NORMAL = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
LEAST_DEVIATION = 1e-3  # of the median: where all values are almost equal, rounding is no spike
# Where sums have no fixed order, as on a GPU without --full_determinism, two values that differ by less are the same.
NOISE = 0.01

# Loss and gradients of one step: `loss` and the gradient's `norm` before clipping, equal on all ranks; `micro_losses`, (M,),
# the sums of this rank's micro-batches; and whether it `has_targets`.
Step = TypeVar("Step", bound=Any)


class Spikes:
    """Judge of steps, with the loss and the gradient norm of the last hundred, and what it found so far.

    `factor` is --spike_factor. The run ends at the `fatal`-th step in a row that goes wrong, whatever computes it; those
    before it are skipped. Where a recipe draws what it trains on, as GRPO does, losses are no measure (`by_norm_alone`).
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
            said = f"{reason}{many}; computed again, the same: rows or weights did it, and no passing fault of hardware"
            raise NonFiniteError(said, step.micro_losses.tolist())
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
        said = f"{reason}; computed again from the same state, it has other numbers: hardware or a race; {where} ({numbers})"
        if not any(self.agree(computed[-1], earlier) for earlier in computed[:-1]):
            raise NonFiniteError(f"{said}; no two of three computations agree", first.micro_losses.tolist())
        if is_first():
            print(f"warning: {said}; the numbers that came twice count", flush=True)
        return computed[-1]

    def agree(self, one: Any, other: Any) -> bool:
        """Tell whether two computations of a step have the same numbers."""
        # Losses of drawn rows are sums around zero, of which little is left but noise.
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
        if is_first():
            print(f"warning: step {number} is skipped: {step.skipped}; its rows are in skipped.jsonl", flush=True)

    def write(self, output_dir: Path) -> None:
        """Write skipped.jsonl, if a step was skipped or an earlier run left such a file."""
        file = output_dir / "skipped.jsonl"
        if is_first() and (self.skipped or file.exists()):
            write_atomically(file, "".join(json.dumps(record) + "\n" for record in self.skipped))

    def counts(self) -> dict[str, int]:
        """Count what went wrong so far, for the log; without what never did."""
        found = {"skipped_steps": len(self.skipped), "unstable_steps": self.num_unstable}
        return {name: number for name, number in found.items() if number}

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
