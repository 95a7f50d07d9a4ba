"""Compare runs of recipes/vit.py with baselines on the same images: nearest class mean, and logistic regression.

    python benchmarks/vision_baselines.py outputs/demo-vit outputs/demo-vit-1 --out benchmarks/results/vision_baselines.json

Each argument is the output directory of a finished run whose images fit in memory. The baselines get the pixels of the same
training images, as the model's processor prepares them, and predict the same held-out ones. Logistic regression is
scikit-learn's (`pip install scikit-learn`), trained until it has converged; C is chosen by cross-validation on the training
images alone. Runs and baseline are compared image by image: by McNemar's exact test, two-sided, on those that only one has
right.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from machine import machine

from accelerate_recipes.args import parse
from accelerate_recipes.data.images import Images, Labelled, load_images
from accelerate_recipes.recipe import load
from accelerate_recipes.vision.classifiers import load_image_processor

ROOT = Path(__file__).parents[1]
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3)  # C of logistic regression; a large one hardly regularises


def pixels(side: Labelled, processor: object) -> np.ndarray:
    """Return the images as rows of numbers."""
    images = Images(side, processor)
    return np.stack([images[row]["pixel_values"].numpy().ravel() for row in range(len(images))])


def nearest_mean(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Predict the class whose mean image is nearest."""
    means = np.stack([train[labels == label].mean(0) for label in range(labels.max() + 1)])
    return ((test[:, None] - means) ** 2).sum(-1).argmin(1)


def logistic_regression(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, dict]:
    """Predict by multinomial logistic regression; also return the chosen C, and the accuracy of each on left-out folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    made = {c: LogisticRegression(C=c, max_iter=5000) for c in STRENGTHS}
    scores = {c: float(cross_val_score(model, train, labels, cv=folds).mean()) for c, model in made.items()}
    best = max(scores, key=scores.__getitem__)
    model = made[best].fit(train, labels)
    assert model.n_iter_.max() < 5000, "not converged"
    return model.predict(test), {"C": best, "accuracy_on_folds": scores, "iterations": int(model.n_iter_.max())}


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Return the two-sided p-value of the exact test that `one` and `other` are right equally often."""
    only_one, only_other = int((one & ~other).sum()), int((other & ~one).sum())
    number = only_one + only_other
    tail = sum(math.comb(number, k) for k in range(min(only_one, only_other) + 1)) / 2**number
    return min(1.0, 2 * tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="Output directories of runs on the same images.")
    parser.add_argument("--out", type=Path, help="File for the result.")
    flags = parser.parse_args()

    args_class = load(ROOT / "recipes/vit.py").Args
    args = parse(args_class, ["--config", str(flags.runs[0] / "args.yaml")], world_size=1)
    train, test, _ = load_images(args)
    processor = load_image_processor(str(flags.runs[0] / "export"))
    features, held = pixels(train, processor), pixels(test, processor)
    found: dict = {"machine": machine(torch.device("cpu")), "images": [len(features), len(held)]}
    right = {"nearest class mean": nearest_mean(features, train.labels, held) == test.labels}
    predicted, found["logistic_regression"] = logistic_regression(features, train.labels, held)
    right["logistic regression"] = predicted == test.labels
    found["accuracy"] = {name: float(hits.mean()) for name, hits in right.items()}
    found["runs"] = {}
    for run in flags.runs:
        last = max((run / "predictions").glob("step-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))
        lines = [json.loads(line) for line in last.read_text(encoding="utf-8").splitlines()]
        assert [line["label"] for line in lines] == test.labels.tolist(), f"{run} was evaluated on other images"
        hits = np.array([line["classes"][0] == line["label"] for line in lines])
        p_values = {name: mcnemar(hits, baseline) for name, baseline in right.items()}
        found["runs"][run.name] = {"accuracy": float(hits.mean()), "p_values": p_values}
    text = json.dumps(found, indent=1)
    print(text)
    if flags.out:
        flags.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
