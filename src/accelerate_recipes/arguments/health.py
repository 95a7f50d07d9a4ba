"""Arguments for steps that go wrong, which every recipe takes; see `bad_steps`."""

from collections.abc import Iterator
from dataclasses import dataclass

from accelerate_recipes.arguments.declaring import arg


@dataclass
class HealthArgs:
    """Arguments for steps that go wrong, a part of `TrainArgs`."""

    group = "rare"
    spike_factor: float = arg(
        0.0,
        "A step whose loss or gradient norm is this many robust deviations above the median of the last hundred steps is "
        "not applied; 0: only one that is not finite.",
        min=0,
    )
    on_spike: str = arg(
        "stop", "End the run at a step that its rows make wrong, or leave that step out.", choices=["stop", "skip"]
    )
    max_skips: int = arg(5, "Steps left out in a row that end the run.", min=1)
    verify_replicas: int = arg(
        0, "Steps between comparisons of weights and optimizer states over the replicas; 0: never.", min=0
    )

    def health_problems(self) -> Iterator[str]:
        """List problems of these arguments, one sentence each."""
        if self.on_spike == "stop" and self.max_skips != HealthArgs.max_skips:
            yield f"--max_skips {self.max_skips} has no effect with --on_spike stop; add --on_spike skip, or remove it"
