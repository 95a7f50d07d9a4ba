"""Metrics of generated texts, by the names of their modules; see recipes/metrics/."""

from collections.abc import Sequence
from pathlib import Path

import evaluate


class TextMetrics:
    """`evaluate` modules from `<folder>/<name>.py`, for the same inputs. All give values from 0 to 100."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self.metrics = [evaluate.load(str(folder / f"{name}.py"), keep_in_memory=True) for name in names]

    def compute(
        self, predictions: Sequence[str], references: Sequence[list[str]], sources: Sequence[str]
    ) -> dict[str, float]:
        """Compute the metrics of one prediction for each source; `references` are, for each, all that is right."""
        inputs = {"predictions": predictions, "references": references, "sources": sources}
        results = {}
        for metric in self.metrics:
            results |= metric.compute(**{name: list(inputs[name]) for name in metric.features})
        return results
