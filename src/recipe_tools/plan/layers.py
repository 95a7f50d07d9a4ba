"""Extrapolation by layers: the needs of a deep model, computed from simulations with a few layers, where that is exact.

Layers that are alike add the same to everything. So the bytes held in a given place of a step grow by the same number
with each layer. A place is a segment between two collectives. It is counted from the beginning, the end or the middle of a
phase; in the middle, an encoder's layers meet a decoder's. Within a stack, memory rises or falls by the same number from
layer to layer, so it is largest near one end of the stack. Three simulations show whether all this holds for a run. If it
does not hold, the whole model is simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.trial import NotSimulatedError, is_staged
from recipe_tools.plan.simulate import Job, Outcome, Refusal, Simulator, layers_of, load_trial

# From this many layers on, the neighbours of the middle layers are treated alike. With 3, an extrapolation was too low.
STEADY = 4


def on_line(values: Sequence[int], steps: int) -> int | None:
    """Continue three equidistant values by `steps` distances from the first; None if they do not lie on a line."""
    a, b, c = values
    if abs(c - 2 * b + a) > 1e-9 * max(map(abs, values)):
        return None
    return round(a + (b - a) * steps)


def peak_of(phases: Sequence[Sequence], steps: int) -> tuple[int, dict[str, int]] | None:
    """Extrapolate the largest segment of three outcomes, and its kinds.

    Return None if a place whose three values do not lie on a line could be larger.
    """
    names = [[name for name, _ in outcome] for outcome in phases]
    if names[0] != names[1] or names[1] != names[2]:
        return None
    # The largest extrapolated place is the peak, unless a place that lies on no line could be larger (`unsure`).
    best, unsure = (0, {}), 0
    for parts in zip(*phases, strict=True):
        segments = [part[1] for part in parts]
        for places in places_of(segments):
            totals = [on_line([total for total, _ in place], steps) for place in places]
            known = [(total, place) for total, place in zip(totals, places, strict=True) if total is not None]
            if not known:  # on no line: estimate how large this place could be
                first, _, third = (total for total, _ in places[0])
                unsure = max(unsure, third + round((third - first) / 2 * (steps - 2)))
            for total, place in known:
                if total > best[0]:
                    one, two, three = (kinds for _, kinds in place)
                    at = {kind: (one.get(kind, 0), two.get(kind, 0)) for kind in three}
                    best = total, {kind: round(a + (b - a) * steps) for kind, (a, b) in at.items()}
    return None if unsure > best[0] else best


def places_of(segments: Sequence[Sequence]) -> Iterator[list[list]]:
    """Find each segment of the first of three outcomes in the two deeper ones; yield the result of each way to count to it.

    Segments are counted from the beginning, from the end, and from the middle, where an encoder's layers meet a decoder's.
    All ways are tried, because all of a few layers may lie nearer to one end: a loss that sums many numbers over the ranks
    has more segments than the layers.
    """
    number, added = len(segments[0]), len(segments[1]) - len(segments[0])
    shifts = {0, added} | ({added // 2} if added % 2 == 0 else set())  # from one outcome to the next
    for at in range(number):
        yield [[segments[i][at + shift * i] for i in range(3)] for shift in sorted(shifts)]


def extrapolate(outcomes: Sequence[Outcome], num_layers: int) -> Outcome | None:
    """Compute the needs of a model of `num_layers` from three smaller models; None if their values do not lie on a line."""
    first, second, third = outcomes
    steps = (num_layers - first.num_layers) // (second.num_layers - first.num_layers)
    peak = peak_of([outcome.phases for outcome in outcomes], steps)
    found: dict[str, Any] = {"num_layers": num_layers}
    for name in ("host_peak", "flops", "recomputed", "trained", "parameters"):
        found[name] = on_line([getattr(outcome, name) for outcome in outcomes], steps)
    # Times are only nearly linear where communication and computation overlap.
    for name in ("seconds", "compute", "memory", "communication", "before", "optimizer"):
        found[name] = getattr(third, name) + (getattr(third, name) - getattr(second, name)) * (steps - 2)
    found["collectives"] = {}
    if not first.collectives.keys() == second.collectives.keys() == third.collectives.keys():
        return None
    for key, counts in third.collectives.items():
        calls, size = (on_line([o.collectives[key][what] for o in outcomes], steps) for what in ("calls", "bytes"))
        if calls is None or size is None:
            return None
        found["collectives"][key] = {"calls": calls, "bytes": size, "sent": size * counts["sent"] // counts["bytes"]}
    if peak is None or None in found.values():
        return None
    # The memory that the allocator cannot reuse hardly depends on the number of layers.
    found["reserved"] = peak[0] + max(outcome.reserved - outcome.peak for outcome in outcomes)
    return replace(third, peak=peak[0], at_peak=peak[1], phases=[], **found)


def predict_outcomes(simulator: Simulator, jobs: Sequence[Job]) -> list[Outcome | Refusal]:
    """Simulate each job; where it is exact, extrapolate from three models with fewer layers."""
    found = dict(arriving_outcomes(simulator, jobs))
    return [found[i] for i in range(len(jobs))]


def arriving_outcomes(simulator: Simulator, jobs: Sequence[Job]) -> Iterator[tuple[int, Outcome | Refusal]]:
    """Yield the number of each job and its outcome, as `predict_outcomes` finds it, when it is there."""
    few: dict[int, list[Job]] = {}
    for i, job in enumerate(jobs):
        try:
            few[i] = [replace(job, num_layers=n) for n in sizes_of(job)[1]]
        except (ConfigError, NotSimulatedError) as error:
            yield i, error
    arriving, whole = iter(simulator([small for smaller in few.values() for small in smaller])), []
    for i, smaller in few.items():
        outcomes = [next(arriving) for _ in smaller]
        found = None
        if len(outcomes) == 1 or not isinstance(outcomes[0], Outcome):
            found = outcomes[0]
        elif all(isinstance(outcome, Outcome) and outcome.is_uniform for outcome in outcomes):
            found = extrapolate(outcomes, sizes_of(jobs[i])[0])
        if found is None:
            whole.append(i)
        else:
            yield i, found
    if whole:
        yield from zip(whole, simulator([jobs[i] for i in whole]), strict=True)


def sizes_of(job: Job) -> tuple[int, list[int]]:
    """Return the number of layers of a job's model, and three small numbers to simulate; [0] means only all layers.

    The three have the same remainder as the number, and are as far apart as the layers that are treated alike.
    """
    args, trial = load_trial(job)
    # In stages of different widths, no layer could stand for others; without FSDP nothing divides a phase into segments.
    # Muon gives each rank whole matrices, so a rank's share does not grow evenly.
    if is_staged(trial.config) or job.env.get("ACCELERATE_USE_FSDP") != "true" or args.optim == "muon":
        return 0, [0]
    depth, recomputes = layers_of(trial.config), job.env.get("FSDP_ACTIVATION_CHECKPOINTING") == "true"
    period = args.checkpoint_every_n_layers if recomputes else 1
    first = STEADY + args.prefetch_layers  # so many layers are gathered early
    first += (depth - first) % period
    return depth, [first, first + period, first + 2 * period] if depth > first + 3 * period else [0]
