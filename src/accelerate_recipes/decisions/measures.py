"""Measures of decisions: how often the most probable option is right, and how far its probability can be believed.

An answer is a dict with `name` and `type` of its question, its `options`, and for each of them the share by the row
(`target`) and the probability that is judged (`cross_fitted`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from accelerate_recipes.decisions.loss import Question
from accelerate_recipes.errors import printable

BINS = 15  # of the calibration error; the usual number
MOST = 20  # names, and options of a matrix
FEWEST = 200  # questions of a type, to fit a temperature
LIMITS = 0.05, 20.0  # of temperatures


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


def padded(values: Sequence[Sequence[float]], fill: float) -> np.ndarray:
    """Return rows of different lengths as an array, (N, K)."""
    matrix = np.full((len(values), max(map(len, values))), float(fill))
    for row, value in zip(matrix, values, strict=True):
        row[: len(value)] = value
    return matrix


def softmax(scores: np.ndarray) -> np.ndarray:
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def log_losses(probs: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute the log loss of each question, (N,), in nats."""
    return -(shares * np.log(probs.clip(1e-300))).sum(-1)


def judge(
    asked: Sequence[Question], base: Mapping[str, float], fits: bool, options_only: bool
) -> tuple[list[dict], dict[str, float]]:
    """Judge the answers to held-out questions; return them, and the values for the log.

    A question is judged by a temperature that was not fitted on it or, if temperatures are not to be fitted, by the base's.
    """
    tempered, answers = temper(asked, base, fits), []
    for question, *probs in zip(asked, tempered.served, tempered.cross_fitted, strict=True):
        served, cross_fitted = (np.round(one[: len(question.options)], 8).tolist() for one in probs)
        answer = {"name": question.name, "type": question.type, "options": question.options, "target": question.target}
        answers.append(answer | {"served": served, "cross_fitted": cross_fitted})
    scores, shares = padded([q.log_probs for q in asked], -np.inf), padded([q.target for q in asked], 0)
    mass = np.exp(scores)
    loss = log_losses(softmax(scores) if options_only else mass, shares).mean()
    values = {"loss": float(loss), "label_mass": float(mass.sum(-1).mean())}
    for group, own in groups_of(answers).items():
        values |= {key_of(name, group): value for name, value in measure(own).items()}
    values |= {f"temperature/{kind}": value for kind, value in tempered.temperatures.items()}
    return answers, values | {f"temperature_gain/{kind}": value for kind, value in tempered.gains.items()}


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
    measures = {
        "accuracy": right.mean(),
        "log_loss": log_losses(probs, shares).mean(),
        "calibration_error": calibration_error(sure, right),
        # Mean of a model whose confidence is its accuracy: few questions show no less.
        "if_calibrated": np.mean([calibration_error(sure, draw.random(len(sure)) < sure) for _ in range(100)]),
    }
    types = {answer["type"] for answer in answers}
    if types == {"noul"} and (value := auroc(*of_true(answers))) is not None:
        measures["auroc"] = value
    if types == {"score"}:
        measures["mean_absolute_error"] = np.abs((probs - shares) @ np.arange(probs.shape[1])).mean()
    if options := options_of(answers):
        matrix = confusion(answers, options)
        counts = matrix.sum(0) + matrix.sum(1)
        measures["macro_f1"] = (2 * matrix.diagonal()[counts > 0] / counts[counts > 0]).mean()
    return {name: float(value) for name, value in measures.items()}


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
    bins = [bins_of(sure) == number for number in np.unique(bins_of(sure))]
    return [(float(sure[own].mean()), float(right[own].mean()), int(own.sum())) for own in bins]


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
    counts = defaultdict(Counter)
    for answer in answers:
        counts[answer["name"]].update(dict(zip(answer["options"], answer["target"], strict=True)))
    return sum(max(own.values()) for own in counts.values()) / len(answers)


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
        predicted = probs >= least
        hits = shares[predicted].sum()
        values = predicted.mean(), hits / max(predicted.sum(), 1), hits / max(shares.sum(), 1e-300)
        rows.append((f"{least:.1f}", *(f"{value:.3f}" for value in values)))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def best_temperature(scores: np.ndarray, shares: np.ndarray) -> float:
    """Find the temperature with the least log loss; `scores`, (N, K), are -inf where there is no option.

    The log loss is convex in 1 / T, so its slope is bisected. One question more, whose answer has equal shares, keeps the
    temperature finite if all answers are right.
    """
    is_option = np.isfinite(scores)
    shares = (shares * len(shares) + is_option / is_option.sum(-1, keepdims=True)) / (len(shares) + 1)
    finite = np.where(is_option, scores, 0)
    low, high = 1 / LIMITS[1], 1 / LIMITS[0]
    for _ in range(50):
        middle = (low * high) ** 0.5
        slope = ((softmax(scores * middle) - shares) * finite).sum()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float(1 / middle)


class Tempered(NamedTuple):
    """Probabilities of N questions with at most K options, with temperatures by type."""

    temperatures: dict[str, float]  # those that were fitted
    served: np.ndarray  # (N, K)
    cross_fitted: np.ndarray  # (N, K), with temperatures that were fitted on the other half of the states
    gains: dict[str, float]  # nats by which the cross-fitted temperatures lower the log loss of a type


def temper(asked: Sequence[Question], base: Mapping[str, float], fits: bool) -> Tempered:
    """Fit temperatures of types with FEWEST questions or more; others keep that of `base`, and all do if not `fits`.

    No question is judged by a temperature that has seen it. The halves are by the hash of the state: rows may alternate.
    """
    scores, shares = padded([q.log_probs for q in asked], -np.inf), padded([q.target for q in asked], 0)
    types, halves = np.array([q.type for q in asked]), np.array([q.state % 2 for q in asked])
    of_base = np.array([[float(base.get(q.type, 1))] for q in asked])
    of_all, of_others, fitted = of_base.copy(), of_base.copy(), {}
    for kind in sorted({*types.tolist()}) if fits else ():
        own = types == kind
        sides = own & (halves == 0), own & (halves == 1)
        if own.sum() >= FEWEST and all(side.any() for side in sides):
            of_all[own] = fitted[kind] = best_temperature(scores[own], shares[own])
            for side, other in (sides, sides[::-1]):
                of_others[side] = best_temperature(scores[other], shares[other])
    cross_fitted = softmax(scores / of_others)
    gained = log_losses(softmax(scores / of_base), shares) - log_losses(cross_fitted, shares)
    gains = {kind: float(gained[types == kind].mean()) for kind in fitted}
    return Tempered(fitted, softmax(scores / of_all), cross_fitted, gains)
