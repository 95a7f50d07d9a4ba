"""Evaluation of answers to held-out prompts, scored by rewards; the first ones are shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase, TrainerState

from accelerate_recipes.conversations.prompts import tokenize_prompts
from accelerate_recipes.conversations.rewards import Reward, weighted
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.generation import Generated, Sampling, generate_texts
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.report.samples import Samples, expected
from accelerate_recipes.run import Run


def draw_texts(
    run: Run[Any], tokenizer: Any, ids: list[list[int]], sampling: Sampling | None = None, may_stop: bool = True
) -> Generated:
    """Draw answers to prompts with these tokens, or generate the most likely ones, on all ranks together; each gets all.

    Raises:
        Stopped: between two batches, if it `may_stop`.
    """
    size, length = run.args.per_device_eval_batch_size, run.args.max_completion_length
    how = {"sampling": sampling, "may_stop": may_stop}
    return generate_texts(run.accelerator, run.model, tokenizer, ids, length, size, **how)


@dataclass
class HeldoutAnswers:
    """Evaluator of a model's answers to held-out prompts, by rewards, if there are any.

    `samples`, which is given on rank 0, collects the first answers. `ids` are the tokens of the prompts, if they are known.
    """

    run: Run[Any]
    tokenizer: PreTrainedTokenizerBase
    rows: datasets.Dataset
    rewards: Sequence[Reward]
    samples: Samples | None
    ids: list[list[int]] | None = None

    def __post_init__(self):
        self.columns = {name: self.rows[name][:] for name in self.rows.column_names}
        self.prompts = self.columns.pop("prompt")
        self.ids = self.ids or tokenize_prompts(self.tokenizer, self.prompts, self.run.args)
        self.weights = self.run.args.reward_weights or [1.0] * len(self.rewards)

    def evaluate(self, step: int, sampling: Sampling | None = None) -> dict[str, float]:
        """Measure the means of `reward`, of each reward and of the `length` in tokens, for the most likely or drawn answers.

        Where a reward is None, its share of None is measured too.

        Raises:
            ConfigError: if a reward fails, or if all rewards are None for all answers.
        """
        answers = draw_texts(self.run, self.tokenizer, self.ids, sampling)
        source = "held out, drawn" if sampling else "held out"
        return on_first_rank(lambda: self.score(step, answers, source))

    def score(
        self, step: int, answers: Generated, source: str, more: Mapping[str, Sequence[float]] = MappingProxyType({})
    ) -> dict[str, float]:
        """Score answers by the rewards; `more` has other values of each answer, to be shown. Only rank 0 calls this."""
        texts, ids = answers
        said = texts
        if not isinstance(self.prompts[0], str):
            said = [[{"role": "assistant", "content": text}] for text in texts]
        state = TrainerState(global_step=step, max_steps=self.run.total_steps)
        given = {
            "completion_ids": ids,
            "log_extra": ignore,
            "log_metric": ignore,
            "trainer_state": state,
        } | self.columns
        values = [reward(self.prompts, said, **given) for reward in self.rewards]
        names = [reward.__name__ for reward in self.rewards]
        totals = [weighted(row, self.weights) for row in zip(*values, strict=True)]
        found = {"reward": totals} if names else {}
        found |= {f"rewards/{name}": row for name, row in zip(names, values, strict=True)}
        means = {
            name: sum(numbers) / len(numbers)
            for name, row in found.items()
            if (numbers := [value for value in row if value is not None])
        }
        for name, row in zip(names, values, strict=True):
            if none := row.count(None):
                means[f"rewards/{name}/none"] = none / len(row)
            if none == len(row) and "reward" in means:
                self.run.print(f"{name} gave None for all {none:,} held-out answers: the other rewards alone count")
        if names and "reward" not in means:
            raise ConfigError(f"{', '.join(names)} gave None for all {len(texts):,} held-out answers; check the data")
        if self.samples:
            rows = []
            for i in range(min(self.run.args.num_samples, len(texts))):
                wanted = expected({name: column[i] for name, column in self.columns.items()})
                scores = {name: row[i] for name, row in zip(names, values, strict=True)}
                scores |= {name: round(row[i], 4) for name, row in more.items()}
                shown = {"prompt": self.prompts[i], "completion": texts[i], "expected": wanted, "rewards": scores}
                rows.append(shown)
            self.samples.add(step, source, rows)
            self.samples.write_page()
        return means | {"length": sum(map(len, ids)) / len(ids)}


def ignore(*_: Any) -> None:
    """Accept what a reward wants to log, and drop it: an evaluation logs only the rewards."""
