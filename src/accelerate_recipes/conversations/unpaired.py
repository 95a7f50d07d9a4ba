"""KTO: answers that are judged one by one, their loss, and its KL divergence, which the whole step shares.

A row has a `label`, which is true for a good answer and false for a bad one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.conversations.formats import KTO, LABEL, LABELS, FormatArgs, label_text
from accelerate_recipes.conversations.heads import weight_of_balance
from accelerate_recipes.conversations.settings import check_documents, trial_of
from accelerate_recipes.conversations.supervised import SupervisedRows
from accelerate_recipes.conversations.supervised_loss import inputs_of, supervised_trial
from accelerate_recipes.conversations.whole_steps import WholeSteps
from accelerate_recipes.data.rows import RowLoader, Rows, StepLoader, make_eval_loader, make_train_loader
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.losses import Gathered, count_next_tokens
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.ranks import data_world_size, print_first, sum_over_ranks
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial

FOREIGN = "foreign_"  # begins the names of a batch's tensors with the answers of other rows


@dataclass
class JudgedArgs(FormatArgs):
    """Arguments of a recipe that reads judged answers. Put it before TrainArgs in the bases of its arguments."""

    forms = KTO  # pyright: ignore[reportAssignmentType]  a property of the base

    def read_rows_for(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, datasets.Dataset]:
        return {
            side: judged_answers(rows, self.origins[side]) for side, rows in super().read_rows_for(tokenizer).items()
        }


def judged_answers(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Make rows of `prompt`, `completion` and a bool as `label`. Of a conversation, the last answer is judged.

    Raises:
        DataError: for labels that are not two of LABELS, and for a conversation that does not end with an answer.
    """
    texts = [label_text(value) for value in rows[LABEL][:]]
    first = {text: number for number, text in reversed([*enumerate(texts, 1)])}
    is_good = next((labels for labels in LABELS if {*first} <= {*labels}), None)
    if is_good is None:
        *others, wrong = sorted(first, key=lambda text: (not any(text in labels for labels in LABELS), first[text]))
        beside = "".join(f", {text!r} in row {first[text]}" for text in others[:2])
        known = ", ".join(" and ".join(labels) for labels in LABELS[1:])
        raise DataError(
            f"{source}, row {first[wrong]}: {LABEL!r} is {wrong!r}{beside}; it must be true or false, or 1 or 0, or in all "
            f"rows one of {known}"
        )
    if is_good is not LABELS[0]:
        good, bad = is_good
        print_first(f"{source}: answers of the {LABEL} {good!r} are good, those of {bad!r} are bad")
    rows = rows.remove_columns(LABEL).add_column(LABEL, [is_good[text] for text in texts])  # pyright: ignore
    if "messages" not in rows.column_names:
        return rows
    message = rows.features["messages"]
    others = {name: kind for name, kind in rows.features.items() if name != "messages"}
    features = datasets.Features(others | {"prompt": message, "completion": message})
    how = {"remove_columns": "messages", "features": features, "desc": "Finding the answers that are judged"}
    return rows.map(before_last_answer, with_indices=True, fn_kwargs={"source": source}, **how)


def before_last_answer(row: dict, index: int, source: str) -> dict:
    """Part a conversation before its last answer."""
    messages = row["messages"] or []
    begin = len(messages)
    while begin and messages[begin - 1]["role"] == "assistant":
        begin -= 1
    if not 0 < begin < len(messages):
        raise DataError(
            f"{source}, row {index + 1}: 'messages' must be a question and end with the answer that is judged, a message of "
            f"the role 'assistant'; the roles are {', '.join(message['role'] for message in messages) or 'none'}"
        )
    return {"prompt": messages[:begin], "completion": messages[begin:]}


def advice_on_weights(args: Any, good: int, number: int) -> str:
    """Note for the end of a line if the weights are not those that KTO's paper advises for this many good answers.

    It says that good answers, by number times weight, should count 1 to 4/3 times as much as bad ones: else the easiest way
    to a low loss is to make all answers rarer, or all more likely.

    Raises:
        ConfigError: if all answers have the weight 0.
    """
    bad = number - good
    for kind, alone, weight in (("good", not bad, "desirable"), ("bad", not good, "undesirable")):
        if alone and not getattr(args, f"{weight}_weight"):
            raise ConfigError(
                f"all {number:,} answers to train on are {kind}, and with --{weight}_weight 0 none of them trains anything; "
                "raise it, or give answers of both labels"
            )
    if not (good and bad and args.desirable_weight and args.undesirable_weight):
        return "; all answers have one label, or one kind has the weight 0"
    ratio = args.desirable_weight * good / (args.undesirable_weight * bad)
    if 0.99 <= ratio <= 4 / 3 + 0.01:
        return ""
    least = args.undesirable_weight * bad / good
    return (
        f"; good ones count {ratio:.2f} times as much as bad ones, and should 1 to 1.33 times: --desirable_weight "
        f"{least:.2f} to {least * 4 / 3:.2f}"
    )


class WithNeighbours(WholeSteps):
    """WholeSteps of pairs: a row, and the one before it in the same step. The last row of a step comes before the first."""

    def rows(self, step: int) -> list[tuple[int, int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = super().rows(step)
        return [(row, rows[i - 1]) for i, row in enumerate(rows)]


class NeighbourRows(Rows):
    """Rows, each with its prompt before the answer of another row; they are asked for by pairs, as in WithNeighbours."""

    def __getitem__(self, numbers: tuple[int, int]) -> dict:  # pyright: ignore[reportIncompatibleMethodOverride]
        own, other = numbers
        return with_answer_of(self.items[own], self.items[other]) | {"row": own}


def with_answer_of(row: dict, other: dict) -> dict:
    """Return a row with its prompt before the answer of another row, as `foreign_input_ids` and `foreign_labels`."""
    begin, others = first_target(row), first_target(other)
    return row | {
        f"{FOREIGN}input_ids": row["input_ids"][:begin] + other["input_ids"][others:],
        f"{FOREIGN}labels": row["labels"][:begin] + other["labels"][others:],
    }


def first_target(row: dict) -> int:
    return next(position for position, label in enumerate(row["labels"]) if label != IGNORE_INDEX)


def check_foreign_rows(args: Any, config: PreTrainedConfig, rows: SupervisedRows) -> None:
    """Check that the longest prompt before the longest answer, of which a step may make a row, fits into the model.

    Raises:
        ConfigError: if it does not.
    """
    for side in (rows.train, rows.heldout):
        begins = np.array([*map(first_target, side)])
        check_documents(args, args.base_model, config, begins.max() + side.lengths - begins)


def make_loaders(run: Run[Any], rows: SupervisedRows) -> tuple[StepLoader, RowLoader]:
    """Make the loaders of this rank's judged answers, to train and to evaluate on."""
    shard = run.args, run.data_rank, run.data_world_size
    collate = partial(judged_batch, rows.collate, run.args.max_length)
    heldout, train = rows.heldout, NeighbourRows(rows.train, with_answer_of)
    loader = make_train_loader(train, *shard, collate_fn=collate, content=rows.content, order_class=WithNeighbours)
    evaluated = Rows(heldout, lambda row, n: with_answer_of(row, heldout[(n - 1) % len(heldout)]) | {"row": n})
    return loader, make_eval_loader(evaluated, *shard, collate_fn=collate)


def judged_batch(
    collate: Callable[[list[dict]], dict[str, Any]], longest: int | None, rows: list[dict]
) -> dict[str, Any]:
    """Make a batch of rows by `with_answer_of`. `collate` pads rows of SFT, of which each keeps `longest` tokens."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("row", LABEL)}
    for begin in ("", FOREIGN):
        read = [{name: row[begin + name][:longest] for name in ("input_ids", "labels")} for row in rows]
        batch |= {begin + name: value for name, value in collate(read).items()}
    return batch


# Loss


class UnpairedLoss:
    """trl's loss of KTO, as a sum over rows: its KL divergence is that of the whole step.

    trl 1.16 takes the mean over the ranks of one micro-batch, so there the loss depends on how a step is divided. Here,
    `add_references` is called with all micro-batches of a step before the first pass with gradients.
    """

    outputs = "log_probs", "entropy"  # what it reads of the forward pass; see `add_head`
    reference: Any  # a model that computes the reference's values

    def __init__(self, args: Any, config: PreTrainedConfig):
        self.beta, self.has_kl = args.beta, args.loss_type == "kto"
        self.weights = args.desirable_weight, args.undesirable_weight
        self.balance = weight_of_balance(config, args.router_aux_loss_coef)
        self.router = {"output_router_logits": True} if self.balance else {}
        self.gathered = Gathered()

    @torch.no_grad()
    def log_ratios(self, model: nn.Module, batch: dict[str, Any], begin: str = "") -> torch.Tensor:
        """Compute the log-probability of each answer by a model, and subtract that of the reference: (B,), in nats."""
        ours, theirs = (answers_of(one(**inputs_in(batch, begin))) for one in (model, self.reference))
        return ours - theirs

    @torch.no_grad()
    def add_references(self, model: nn.Module, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add to each micro-batch of a step the reference's log-probabilities, and the KL divergence over all ranks."""
        kl = torch.zeros((), device=batches[0][LABEL].device)
        if self.has_kl:
            ratios = torch.cat([self.log_ratios(model, batch, FOREIGN) for batch in batches]).double()
            total, number = sum_over_ranks(torch.stack([ratios.sum(), torch.ones_like(ratios).sum()]))
            kl = (total / number).clamp(min=0).float()
        return [batch | {"reference": answers_of(self.reference(**inputs_in(batch))), "kl": kl} for batch in batches]

    def losses(self, ratios: torch.Tensor, labels: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
        """Return the loss of each answer, (B,): Eq. 7 of the KTO paper (arXiv 2402.01306), or that of APO-zero for kl 0."""
        weights = torch.where(labels, *self.weights)
        return weights * torch.sigmoid(-self.beta * torch.where(labels, ratios - kl, kl - ratios))

    def sum_parts(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of the loss over a micro-batch, each for one of `count_parts`."""
        output: Any = model(**inputs_in(batch), **self.router)
        ratios, labels = answers_of(output) - batch["reference"], batch[LABEL]
        losses = self.losses(ratios, labels, batch["kl"])
        balance = [self.balance * output.aux_loss] if self.balance else []
        rewards = self.beta * ratios.detach().double()
        sums = [labels.sum(), (~labels).sum(), (rewards * labels).sum(), (rewards * ~labels).sum()]
        sums += [batch["kl"] * len(labels), output.entropy.sum(), output.label_mask.sum()]
        self.gathered.add(torch.stack([value.detach().double() for value in sums]))
        return torch.stack([*balance, losses.sum(), torch.zeros_like(losses[0])])

    def count_parts(self, batch: dict[str, Any]) -> torch.Tensor:
        """Count the micro-batch itself if there are experts, the answers, and their tokens."""
        tokens = count_next_tokens(batch)
        one = torch.ones_like(tokens)
        return torch.stack([*[one] * bool(self.balance), one * len(batch[LABEL]), tokens])

    def values(self, step: int) -> dict[str, float]:
        """Return the means since the last log line: rewards, KL divergence from the reference, and entropy."""
        if not (sums := self.gathered.take()):
            return {}
        good, bad, *rewards, kl, entropy, tokens = sums
        values = {"kl": kl / max(good + bad, 1), "entropy": entropy / max(tokens, 1)}
        return values | named_rewards(good, bad, *rewards)

    def evaluate(self, run: Run[Any], batches: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Evaluate the model on held-out answers; in `row` of a batch, a negative number only fills it.

        Returns:
            `loss`, with the KL divergence over all of them; `kl`; `accuracy`: share of the answers whose log-probability has
            moved, compared with the reference and the divergence, to where its label says; `rewards_chosen` and
            `rewards_rejected`, of good and of bad answers, and `rewards_margins` between them.

        Raises:
            Stopped: between two batches.
        """
        measured = []
        for batch in batches_to_evaluate(run.accelerator, run.model, batches):
            ratios = self.log_ratios(run.model, batch).double()
            foreign = self.log_ratios(run.model, batch, FOREIGN).double() if self.has_kl else torch.zeros_like(ratios)
            measured.append(torch.stack([ratios, foreign, batch[LABEL].double(), (batch["row"] >= 0).double()]))
        ratios, foreign, labels, are_rows = torch.cat(measured, 1)
        labels, number = labels.bool(), sum_over_ranks(are_rows.sum())
        kl = (sum_over_ranks((foreign * are_rows).sum()) / number).clamp(min=0)
        losses, rewards = self.losses(ratios, labels, kl), self.beta * ratios
        is_right = torch.where(labels, ratios > kl, ratios < kl)
        values = torch.stack([losses, is_right, labels, ~labels, rewards * labels, rewards * ~labels]) * are_rows
        loss, accuracy, *sums = sum_over_ranks(values.sum(1)).tolist()
        number = number.item()
        rewards = {name.replace("/", "_"): value for name, value in named_rewards(*sums).items()}
        return {"loss": loss / number, "accuracy": accuracy / number, "kl": kl.item()} | rewards


def named_rewards(good: float, bad: float, of_good: float, of_bad: float) -> dict[str, float]:
    """Return mean rewards and their margin, of sums over this many answers; without those of which there are none."""
    totals = {"chosen": (of_good, good), "rejected": (of_bad, bad)}
    means = {f"rewards/{name}": total / number for name, (total, number) in totals.items() if number}
    margin = means["rewards/chosen"] - means["rewards/rejected"] if len(means) == 2 else None
    return means if margin is None else means | {"rewards/margins": margin}


def inputs_in(batch: dict[str, Any], begin: str = "") -> dict[str, Any]:
    """Return the inputs of the model: those of the rows, or those with answers of other rows."""
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    return inputs_of({name: batch[begin + name] for name in names if begin + name in batch})


def answers_of(outputs: Any) -> torch.Tensor:
    """Return the log-probability of each answer, (B,), in nats."""
    return outputs.log_probs.sum(1)


# Trial


def unpaired_trial(args: Any) -> Trial:
    """Make the trial of a KTO run: rows of --max_length tokens, read by the model and by its reference.

    Raises:
        NotSimulatedError: like `supervised.supervised_trial`.
    """
    trial = supervised_trial(args)
    loss, passes = UnpairedLoss(args, trial.config), args.accumulation_steps(data_world_size())
    rows = len(trial.batch["labels"])
    foreign = {FOREIGN + name: value for name, value in trial.batch.items()}
    judged = {LABEL: torch.ones(rows, dtype=torch.bool), "reference": torch.zeros(rows), "kl": torch.zeros(())}
    judged["row"] = torch.zeros(rows, dtype=torch.int64)

    def read_references(model: nn.Module, batch: dict[str, Any], begin: Callable[[str, int], None]) -> None:
        if loss.has_kl:
            begin("answers of other rows", passes)
            loss.log_ratios(model, batch, FOREIGN)
        begin("reference", passes)
        with torch.no_grad():
            loss.reference(**inputs_in(batch))

    passes_of_reference = {"before_fn": read_references, "keep_reference": partial(setattr, loss, "reference")}
    return trial_of(args, trial.config, loss, trial.batch | foreign | judged, trial.tokens, **passes_of_reference)
