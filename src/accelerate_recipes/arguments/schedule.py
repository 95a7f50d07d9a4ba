"""Schedules of the learning rate: which there are, and what is wrong with their arguments."""

from collections.abc import Iterator
from typing import Any

import torch

OWN_SCHEDULES = ["linear", "cosine", "constant_with_warmup"]
# Those of transformers' table that follow from the step alone: the others need values of the run.
THEIR_SCHEDULES = [
    "constant", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "inverse_sqrt", "polynomial",
    "warmup_stable_decay",
]  # fmt: skip


def num_warmup_steps(args: Any, total_steps: int) -> int:
    return round(args.warmup_steps if args.warmup_steps >= 1 else args.warmup_steps * total_steps)


def schedule_problems(args: Any, total_steps: int) -> Iterator[str]:
    """List problems of the schedule, one sentence each. `total_steps` below 1 is a number that is not known yet."""
    name, given = args.lr_scheduler_type, args.lr_scheduler_kwargs
    of_schedule = f"--lr_scheduler_type {name}"
    if args.min_lr_ratio and name not in ("linear", "cosine"):
        other = "; give --lr_scheduler_kwargs min_lr_rate=SHARE" if "with_min_lr" in name else "; remove one of the two"
        yield f"--min_lr_ratio {args.min_lr_ratio} has no effect with {of_schedule}{other}"
    if name not in THEIR_SCHEDULES or name == "constant":
        if given:
            yield f"--lr_scheduler_kwargs {', '.join(given)} has no effect with {of_schedule}; remove one of the two"
        return
    from transformers import get_scheduler  # seconds, which only these schedules need

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    steps = total_steps if total_steps > 0 else 1000
    warmup = num_warmup_steps(args, steps)
    try:
        (share,) = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=given).lr_lambdas
        shares = [share(step) for step in (0, steps // 2, steps - 1, steps)]
    except (TypeError, ValueError, ArithmeticError) as error:
        yield f"{of_schedule} with --lr_scheduler_kwargs {given or '(none)'}: {error}"
        return
    falling = given.get("num_decay_steps", 0)
    if 0 < total_steps < warmup + falling:
        yield f"num_decay_steps={falling} and {warmup} steps of warm-up are more than the run's {total_steps}; lower one"
    elif not all(0 <= value < float("inf") for value in shares):
        yield f"{of_schedule} with --lr_scheduler_kwargs {given}: the learning rate would be negative or infinite"
