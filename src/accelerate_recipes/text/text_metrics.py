"""Metrics of generated texts; recipes/metrics/texts.py defines them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate_recipes.args import arg

# Metrics and the names of their values; the first value of the first metric ranks the examples.
METRIC_VALUES = {
    "exact_match": ["exact_match"],
    "rouge": ["rougeL", "rouge1", "rouge2", "rougeLsum"],
    "bleu": ["bleu"],
    "chrf": ["chrf"],
    "gleu": ["gleu"],
}
NUM_EXAMPLES = 6  # predictions shown in the result


@dataclass
class GenerationArgs:
    """Arguments of a recipe that evaluates the texts that its model generates."""

    group = "evaluation"
    metrics: list[str] = arg(
        ["chrf", "bleu"], f"Metrics of the generated texts: {', '.join(METRIC_VALUES)}.", fixed=False
    )
    generation_max_length: int = arg(0, "Tokens of a generated text; 0: --max_target_length.", fixed=False, min=0)
    generation_num_beams: int = arg(1, "Beams of the search in generation; 1: greedy.", fixed=False, min=1)
    generation_length_penalty: float = arg(
        1.0,
        "Length penalty of beam search: above 0 favours long texts, below 0 short ones.",
        fixed=False,
        min=-10,
        max=10,
        group="rare",
    )

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size)
        if self.generation_num_beams == 1 and self.generation_length_penalty != 1:
            problems.append(
                f"--generation_length_penalty {self.generation_length_penalty} has no effect with "
                "--generation_num_beams 1; set it to 1, or search with more beams"
            )
        for name in self.metrics:
            if name not in METRIC_VALUES:
                problems.append(f"--metrics {name}: there is no such metric; known are {', '.join(METRIC_VALUES)}")
        measured = ["loss", *self.measured]
        if self.metric_for_best_model and self.metric_for_best_model not in measured:
            problems.append(
                f"--metric_for_best_model {self.metric_for_best_model}: the evaluation gives {', '.join(measured)}; "
                "choose one of them, or add to --metrics"
            )
        return problems

    @property
    def measured(self) -> list[str]:
        """Names of the values that the metrics give; the first one ranks the examples."""
        return [value for name in self.metrics for value in METRIC_VALUES.get(name, [])]

    def generation(self, max_length: int) -> dict[str, float]:
        """Return the settings of generation, with `max_length` tokens unless an argument gives a number."""
        return {
            "max_new_tokens": self.generation_max_length or max_length,
            "num_beams": self.generation_num_beams,
            "length_penalty": self.generation_length_penalty,
        }


class TextMetrics:
    """Group of metrics of an `evaluate` module with the same inputs; their values are from 0 to 100."""

    def __init__(self, module: Path, names: Sequence[str]):
        import evaluate

        self.metrics = [evaluate.load(str(module), name, keep_in_memory=True) for name in names]

    def compute(
        self, predictions: Sequence[str], references: Sequence[list[str]], sources: Sequence[str]
    ) -> dict[str, float]:
        """Compute the metrics of one prediction for each source; `references` lists all correct texts for each source."""
        inputs = {"predictions": predictions, "references": references, "sources": sources}
        results = {}
        for metric in self.metrics:
            results |= metric.compute(**{name: list(inputs[name]) for name in metric.features}) or {}
        return results

    def examples(
        self, name: str, predictions: Sequence[str], references: Sequence[list[str]], sources: Sequence[str]
    ) -> list[str]:
        """Show a few predictions in lines of text, ordered by the value `name` from the best to the worst."""
        rows = list(zip(predictions, references, sources, strict=True))
        results = [self.compute(*([value] for value in row)) for row in rows]
        ranked = sorted(range(len(rows)), key=lambda i: results[i][name])
        ranks = [round(n * (len(ranked) - 1) / (NUM_EXAMPLES - 1)) for n in reversed(range(NUM_EXAMPLES))]
        lines = [f"Held-out pairs, from the best {name} to the worst:"]
        for i in dict.fromkeys(ranked[rank] for rank in ranks):
            text, right, source = rows[i]
            lines.append(f"  {results[i][name]:5.1f}  {source!r}\n      ->  {text!r}\n  target  {right[0]!r}")
        return lines
