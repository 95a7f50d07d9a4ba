"""Evaluation of a classifier of images: one pass over the held-out images gives loss, metrics, predictions and pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from accelerate_recipes.data.rows import RowLoader
from accelerate_recipes.disk import read_json_lines, write_atomically
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.errors import DataError
from accelerate_recipes.images.classifiers import logits_of
from accelerate_recipes.images.labelled import Images
from accelerate_recipes.life.picture import draw_images
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.ranks import on_all_ranks, on_first_rank

NUM_DRAWN = 40  # held-out images on the sheet; half of them are classified wrongly, if there are enough such images
MOST_CLASSES = 30  # in the picture of the confusion matrix


class ImageEvaluation:
    """Evaluator of held-out images. Predictions of step n are kept in predictions/step-<n>.jsonl, for the pictures.

    A line has the image's `row` and `label`, the most probable `classes`, the `probability` of the first, and the `loss`.
    """

    def __init__(self, metric_file: Path, heldout: Images, loader: RowLoader, names: list[str], output_dir: Path):
        import evaluate

        self.metric = evaluate.load(str(metric_file), keep_in_memory=True)
        self.heldout, self.loader, self.names = heldout, loader, names
        self.folder = output_dir / "predictions"

    def file(self, step: int) -> Path:
        return self.folder / f"step-{step}.jsonl"

    def evaluate(self, accelerator: Accelerator, model: nn.Module, step: int) -> dict[str, float]:
        """Evaluate `model`. Every rank takes its share; all get `loss` and the metrics over all images.

        Raises:
            DataError: if no image can be decoded.
        """
        mine = predict_classes(accelerator, model, self.loader)
        lines = sorted((line for part in on_all_ranks(mine) for line in part), key=lambda line: line["row"])

        def measure() -> dict[str, float]:
            if not lines:
                raise DataError(
                    f"all {len(self.heldout)} images to evaluate on ({self.heldout.side.source}) are broken; leave out "
                    "--skip_broken_images to see why"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file(step), "".join(json.dumps(line) + "\n" for line in lines))
            values = self.measure(lines)
            del values["by_class"]
            return {"loss": sum(line["loss"] for line in lines) / len(lines)} | values

        return on_first_rank(measure)

    def measure(self, lines: list[dict]) -> dict[str, Any]:
        """Compute the metrics of predictions."""
        return self.metric.compute(  # pyright: ignore[reportReturnType]
            predictions=[line["classes"] for line in lines],
            references=[line["label"] for line in lines],
            probabilities=[line["probability"] for line in lines],
        )

    def by_class(self, step: int) -> dict[str, float]:
        """Return the accuracy of each class, in percent."""
        shares = self.measure(read_json_lines(self.file(step)))["by_class"]
        return {self.names[label]: 100 * share for label, share in shares.items()}

    def draw(self, folder: Path, step: int) -> None:
        """Draw the confusion matrix, and held-out images with their predictions, as confusion.png and heldout.png."""
        lines = read_json_lines(self.file(step))
        if len(self.names) <= MOST_CLASSES:
            matrix = np.zeros((len(self.names), len(self.names)), dtype=int)
            for line in lines:
                matrix[line["label"], line["classes"][0]] += 1
            draw_matrix(folder / "confusion.png", matrix, self.names, f"Held-out images after {step} steps")
        wrong = [line for line in lines if line["label"] != line["classes"][0]][: NUM_DRAWN // 2]
        right = [line for line in lines if line["label"] == line["classes"][0]][: NUM_DRAWN - len(wrong)]
        drawn = []
        for line in wrong + right:
            label, predicted = self.names[line["label"]], self.names[line["classes"][0]]
            text = f"{predicted} {line['probability']:.0%}" + (f"\nis: {label}" if predicted != label else "")
            drawn.append((np.asarray(self.heldout.image(line["row"])), text, predicted == label))
        draw_images(folder / "heldout.png", drawn, f"Held-out images after {step} steps; wrong ones in red")


@torch.no_grad()
def predict_classes(accelerator: Accelerator, model: nn.Module, loader: RowLoader) -> list[dict]:
    """Predict the classes of this rank's images; return lines as `ImageEvaluation` describes them.

    Raises:
        Stopped: between two batches.
    """
    lines = []
    for batch in batches_to_evaluate(accelerator, model, loader):
        logits = logits_of(model, batch)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none", ignore_index=IGNORE_INDEX)
        top = logits.softmax(-1).topk(min(5, logits.shape[-1]))
        columns = (batch["row"], batch["labels"], top.indices, top.values[:, 0], losses)
        for row, label, classes, probability, loss in zip(*(column.tolist() for column in columns), strict=True):
            if label != IGNORE_INDEX:
                values = {"row": row, "label": label, "classes": classes, "probability": probability, "loss": loss}
                lines.append(values)
    return lines


def draw_matrix(path: Path, counts: np.ndarray, names: Sequence[str], title: str) -> None:
    """Write a PNG of a confusion matrix: in row i and column j the number of images of class i taken for class j."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 0.6 * len(names), 1.5 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(counts / counts.sum(1, keepdims=True).clip(1), cmap="Blues", vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(counts):
        if count:
            dark = count > counts[i].sum() / 2
            axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="label", title=title)
    figure.savefig(path, dpi=110)
