"""Temperatures of decisions: one for each type of question, fitted on held-out questions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from accelerate_recipes.decisions.questions import Question

FEWEST = 200  # questions of a type
LIMITS = 0.05, 20.0


def padded(values: Sequence[Sequence[float]], fill: float) -> np.ndarray:
    """Return rows of different lengths as an array, (N, K)."""
    found = np.full((len(values), max(map(len, values))), float(fill))
    for row, value in zip(found, values, strict=True):
        row[: len(value)] = value
    return found


def softmax(scores: np.ndarray) -> np.ndarray:
    found = np.exp(scores - scores.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def log_losses(probs: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute the log loss of each question, (N,), in nats."""
    return -(shares * np.log(probs.clip(1e-300))).sum(-1)


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
