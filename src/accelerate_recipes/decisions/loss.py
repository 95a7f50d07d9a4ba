"""Loss of decisions: the cross-entropy of the labels at the tokens where a prompt is read, from question to evaluation."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accelerate_recipes.data import packing
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.losses import predict, uncompiled
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.head_probe import with_forward
from accelerate_recipes.models.probes import unwrapped
from accelerate_recipes.ranks import on_all_data_ranks
from accelerate_recipes.run import Run


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


def collate(pad_token_id: int, row_length: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch of B rows of T tokens, with N questions of at most K options.

    `labels`, (B, T), have the most probable label at each token that is read, and `places`, (N, 2), are its row and
    position. `label_ids`, (N, K), are the tokens of all labels, -1 where there is none, and `shares`, (N, K), those of the
    answer. T is `row_length` or, if that is 0, the length of the longest row.
    """
    length = row_length or max(len(row["input_ids"]) for row in rows)
    batch = packing.collate(
        [
            packing.pack_row(row["input_ids"], row["seq_lengths"], length, pad_token_id, document_mask=bool(row_length))
            | {"labels": F.pad(torch.tensor(row["labels"]), (0, length - len(row["labels"])), value=IGNORE_INDEX)}
            for row in rows
        ]
    )
    asked = [Question(**one) for row in rows for text in row["questions"] for one in json.loads(text)]
    sizes = len(asked), max((len(question.options) for question in asked), default=1)
    ids, shares = torch.full(sizes, -1), torch.zeros(sizes)
    for number, question in enumerate(asked):
        ids[number, : len(question.options)] = torch.tensor(question.label_ids)
        shares[number, : len(question.options)] = torch.tensor(question.target)
    indices = (batch["labels"] != IGNORE_INDEX).nonzero()
    return batch | {"label_ids": ids, "shares": shares, "places": indices, "questions": asked}


def head_at(head: nn.Module, places: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute logits, (1, N, V), at N places of hidden states, (B, T, H), by the head's own forward."""
    return type(head).forward(head, hidden[places[:, 0], places[:, 1]][None])


class DecisionLoss:
    """Summed cross-entropy of the shares of all options, over the vocabulary or, with `options_only`, over the options."""

    def __init__(self, options_only: bool = False):
        self.options_only = options_only

    def log_probs(self, model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the log-probabilities of the labels, (N, K) in fp32, 0 where there is none, and the balance of experts.

        The output layer computes the places alone that are read. The model calls it as usual, and scales or caps its result.
        """
        head: Any = unwrapped(model).get_output_embeddings()
        with with_forward(head, partial(uncompiled(head_at), head, batch["places"])):
            output, balance = predict(model, batch)
        logits, is_none = output.logits[0].float(), batch["label_ids"] < 0
        options = logits.gather(1, batch["label_ids"].clamp(min=0))
        among = options.masked_fill(is_none, -torch.inf) if self.options_only else logits
        return (options - among.logsumexp(-1, keepdim=True)).masked_fill(is_none, 0), balance

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        log_probs, balance = self.log_probs(model, batch)
        return -(batch["shares"] * log_probs).sum() + balance

    @torch.no_grad()
    def ask(self, run: Run[Any], batches: Any) -> list[Question]:
        """Ask a model all questions of some batches; return them with log-probabilities, in the order of their rows.

        Raises:
            Stopped: between two batches.
        """
        answered = []
        for batch in batches_to_evaluate(run.accelerator, run.model, batches):
            values = DecisionLoss().log_probs(run.model, batch)[0].tolist()
            for question, log_probs in zip(batch["questions"], values, strict=True):
                answered.append(replace(question, log_probs=tuple(log_probs[: len(question.options)])))
        everywhere = itertools.chain.from_iterable(on_all_data_ranks(answered))
        return sorted(everywhere, key=lambda question: (question.row, question.name))
