"""The schedule."""

import math

import pytest
import torch

from accelerate_recipes.args import ConfigError, TrainArgs, parse
from accelerate_recipes.optim import make_scheduler

STEPS = 20


def rates(**values) -> list[float]:
    """Learning rate of each step, and of those after the last."""
    args = TrainArgs(learning_rate=0.5, **values)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=args.learning_rate)
    scheduler = make_scheduler(optimizer, args, STEPS)
    found = []
    for _ in range(STEPS + 3):
        assert len(set(scheduler.get_last_lr())) == 1
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_cosine_to_a_minimum():
    found = rates(warmup_steps=4, min_lr_ratio=0.1)
    assert found[:5] == pytest.approx([0, 0.125, 0.25, 0.375, 0.5])
    for step in range(4, STEPS):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 4) / (STEPS - 4)))
        assert found[step] == pytest.approx(0.05 + 0.45 * cosine)
    assert found[STEPS] == pytest.approx(0.05)


def test_linear_to_a_minimum():
    found = rates(warmup_steps=0, min_lr_ratio=0.2, lr_scheduler_type="linear")
    assert found[0] == 0.5 and found[STEPS // 2] == pytest.approx(0.3)
    assert found[STEPS:] == pytest.approx([0.1] * 3)


def test_by_default_to_zero():
    assert rates(warmup_steps=0.25)[STEPS] == pytest.approx(0)
    assert rates(warmup_steps=0.25)[5] == 0.5


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--min_lr_ratio", "1.5"], "--min_lr_ratio is 1.5; it is a share of the peak, from 0 to 1"),
        (
            ["--min_lr_ratio", "0.1", "--lr_scheduler_type", "constant_with_warmup"],
            "--min_lr_ratio 0.1 has no effect with --lr_scheduler_type constant_with_warmup",
        ),
    ],
)
def test_mistakes(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(TrainArgs, flags, world_size=1)
