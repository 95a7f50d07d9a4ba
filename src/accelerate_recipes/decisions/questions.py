"""A question about a state, with the answer of its row, and what a model thinks of its options."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question of a row as it is trained, or as an evaluation has asked it.

    Args:
        row: number of the row on its side, `train` or `test`, from 0.
        state: hash of the state; rows that repeat a state have the same.
        name: name of the question in its row.
        type: `choice`, `score` or `noul`.
        options: in the order of the prompt: names of a choice, levels "0", "1", ... of a score, or `true` and `false`.
        label_ids: the token for each option, of which the model gives the probability.
        target: shares of the options by the row's answer; they add up to 1.
        log_probs: log-probabilities of the labels among all tokens, at temperature 1; empty before an evaluation. Their
            softmax gives the probabilities of the options, the sum of their exponentials the mass of the labels.
    """

    row: int
    state: int
    name: str
    type: str
    options: tuple[str, ...]
    label_ids: tuple[int, ...]
    target: tuple[float, ...]
    log_probs: tuple[float, ...] = ()
