"""Measures of decisions: how often the most probable option is right, and how far its probability can be believed.

An answer is a dict with `name` and `type` of its question, its `options`, and for each of them the share by the row
(`target`) and the probability that is judged (`cross_fitted`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from accelerate_recipes.decisions.temperatures import log_losses, padded
from accelerate_recipes.errors import printable

BINS = 15  # of the calibration error; the usual number
MOST = 20  # names, and options of a matrix


class Reliability(NamedTuple):
    """Chart of accuracy over confidence, for the answers of each series."""

    answers: dict[str, list[dict]]

    def draw(self, axes: Any) -> None:
        """Draw bins as points, whose areas are their numbers, beside the line of a calibrated model."""
        axes.plot((0, 1), (0, 1), ":", color="0.5", label="calibrated")
        for series, answers in self.answers.items():
            sure, right, numbers = zip(*reliability(*confidence(answers)), strict=True)
            axes.scatter(sure, right, [10 + 300 * number / sum(numbers) for number in numbers], label=series, alpha=0.7)
        axes.set(xlabel="probability of the most probable option", ylabel="share that is right")
        axes.set(title="Reliability after training, held out")
        axes.grid(alpha=0.3)
        axes.legend()


def groups_of(answers: Sequence[dict]) -> dict[str, list[dict]]:
    """Group answers: all, those to each of the most frequent names, and to each type, such as "nouls", of several names."""
    groups = {"all": [*answers]}
    for field, ending in (("name", ""), ("type", "s")):
        for value, _ in Counter(answer[field] for answer in answers).most_common(MOST):
            own = [answer for answer in answers if answer[field] == value]
            if own not in groups.values():
                groups[f"{value}{ending}"] = own
    return groups


def measure(answers: Sequence[dict]) -> dict[str, float]:
    """Measure the answers of a group, and what only one type or one name has: AUROC, the error of a score, macro F1."""
    probs, shares = arrays(answers)
    sure, right = confidence(answers)
    draw = np.random.default_rng(0)
    found = {
        "accuracy": right.mean(),
        "log_loss": log_losses(probs, shares).mean(),
        "calibration_error": calibration_error(sure, right),
        # Mean of a model whose confidence is its accuracy: few questions show no less.
        "if_calibrated": np.mean([calibration_error(sure, draw.random(len(sure)) < sure) for _ in range(100)]),
    }
    types = {answer["type"] for answer in answers}
    if types == {"noul"} and (value := auroc(*of_true(answers))) is not None:
        found["auroc"] = value
    if types == {"score"}:
        found["mean_absolute_error"] = np.abs((probs - shares) @ np.arange(probs.shape[1])).mean()
    if options := options_of(answers):
        matrix = confusion(answers, options)
        counts = matrix.sum(0) + matrix.sum(1)
        found["macro_f1"] = (2 * matrix.diagonal()[counts > 0] / counts[counts > 0]).mean()
    return {name: float(value) for name, value in found.items()}


def arrays(answers: Iterable[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities and the shares of all options, (N, K) both."""
    probs, shares = zip(*((answer["cross_fitted"], answer["target"]) for answer in answers), strict=True)
    return padded(probs, 0), padded(shares, 0)


def confidence(answers: Iterable[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each most probable option, (N,), and the share that the answer gives it, (N,)."""
    probs, shares = arrays(answers)
    return probs.max(-1), shares[np.arange(len(shares)), probs.argmax(-1)]


def bins_of(sure: np.ndarray) -> np.ndarray:
    """Return the number of each answer's bin of confidence, (N,); all are equally wide."""
    return np.minimum((sure * BINS).astype(int), BINS - 1)


def calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    """Compute the expected calibration error: the mean distance of confidence and accuracy over the answers' bins."""
    return float(np.abs(np.bincount(bins_of(sure), right - sure)).sum() / len(sure))


def reliability(sure: np.ndarray, right: np.ndarray) -> list[tuple[float, float, int]]:
    """Return mean confidence, accuracy and number of the answers in each bin that has any."""
    places = [bins_of(sure) == number for number in np.unique(bins_of(sure))]
    return [(float(sure[own].mean()), float(right[own].mean()), int(own.sum())) for own in places]


def of_true(answers: Iterable[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Return probability and share of `true` in answers to nouls, (N,) both."""
    pairs = [
        [answer[field][answer["options"].index("true")] for field in ("cross_fitted", "target")] for answer in answers
    ]
    return np.array(pairs).T[0], np.array(pairs).T[1]


def auroc(probs: np.ndarray, shares: np.ndarray) -> float | None:
    """Compute the chance that a true question has a higher probability than a false one, where equal ones count half.

    None if all are true, or all false.
    """
    _, ranks = np.unique(probs, return_inverse=True)
    positive, negative = np.bincount(ranks, shares), np.bincount(ranks, 1 - shares)
    pairs = positive.sum() * negative.sum()
    return float((positive * (negative.cumsum() - negative / 2)).sum() / pairs) if pairs else None


def confusion(answers: Iterable[dict], options: Sequence[str]) -> np.ndarray:
    """Count, for each answer (rows), how often each option (columns) was the most probable."""
    matrix = np.zeros((len(options), len(options)))
    for answer in answers:
        chosen = answer["options"][int(np.argmax(answer["cross_fitted"]))]
        for option, share in zip(answer["options"], answer["target"], strict=True):
            matrix[options.index(option), options.index(chosen)] += share
    return matrix


def options_of(answers: Sequence[dict]) -> list[str]:
    """List the options of a question; none for several questions, or more than MOST options."""
    options = list(dict.fromkeys(option for answer in answers for option in answer["options"]))
    return options if len({answer["name"] for answer in answers}) == 1 and len(options) <= MOST else []


def most_frequent(answers: Sequence[dict]) -> float:
    """Return the accuracy of always giving the most frequent answer of each question."""
    counts, best = Counter(), {}
    for answer in answers:
        for option, share in zip(answer["options"], answer["target"], strict=True):
            counts[answer["name"], option] += share
    for (name, _), count in counts.items():
        best[name] = max(best.get(name, 0), count)
    return sum(best.values()) / len(answers)


def key_of(measured: str, group: str) -> str:
    """Return the name of a value in the log, which the terminal shows as it is."""
    return measured if group == "all" else printable(f"{measured}/{group}")


def summary(before: dict[str, float], after: dict[str, float], answers: Sequence[dict]) -> str:
    """Write the values of two evaluations as tables, and what the `answers` of the second one were."""
    columns, texts = ("accuracy", "log_loss", "calibration_error", "if_calibrated"), []
    rows = [("held-out questions", "number", "most frequent", *(name.replace("_", " ") for name in columns))]
    for group, own in groups_of(answers).items():
        keys = {name: f"eval_{key_of(name, group)}" for name in measure(own)}
        values = {name: f"{before.get(key, np.nan):.3f} -> {after.get(key, np.nan):.3f}" for name, key in keys.items()}
        rows.append((group, f"{len(own):,}", f"{most_frequent(own):.3f}", *(values.pop(name) for name in columns)))
        texts += [f"{group}: {name.replace('_', ' ')} {value}" for name, value in values.items()]
        if (options := options_of(own)) and own[0]["type"] == "noul":
            texts.append(thresholds(*of_true(own)))
        elif options:
            cells = confusion(own, options).tolist()
            lines = [(option, *(f"{n:.4g}" for n in line)) for option, line in zip(options, cells, strict=True)]
            texts.append(aligned([("answer, and most probable option:", *options), *lines]))
    return "\n".join([aligned(rows), *texts])


def thresholds(probs: np.ndarray, shares: np.ndarray) -> str:
    """Write how often, and how well, `true` is said if it is said from each probability on."""
    rows = [("true from a probability of", "is said", "precision", "recall")]
    for least in np.arange(1, 10) / 10:
        said = probs >= least
        hits = shares[said].sum()
        values = said.mean(), hits / max(said.sum(), 1), hits / max(shares.sum(), 1e-300)
        rows.append((f"{least:.1f}", *(f"{value:.3f}" for value in values)))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
