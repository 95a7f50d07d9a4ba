"""Mixin that watches trl's own loop under the ledger; rank 0 writes what it saw of a step to ledger.json."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from accelerate_recipes.agenda import EvaluateFn
from accelerate_recipes.plan.ledger import ACTIVATIONS, GRADIENTS, Ledger
from accelerate_recipes.plan.simulate import Outcome, num_logits, outcome_of

NO_TRIAL: Any = SimpleNamespace(tokens=0, unit="")


class Watched:
    """Put it before a trainer of a recipe in a class's bases; `noted` are more numbers to write."""

    ledger: Ledger
    step: ExitStack  # open from its first batch on
    outcomes: list[Outcome]  # of the steps
    noted: dict[str, Any]

    def complete_rows(self) -> None:
        self.ledger, self.step, self.outcomes, self.noted = (
            Ledger("cpu", num_logits(self.model.config)), ExitStack(), [], {},
        )  # fmt: skip
        with self.ledger:
            self.ledger.watch(self.run.model, self.run.optimizer)
            super().complete_rows()
            self.noted["before"] = self.ledger.peak

    def get_batch_samples(self, *args: Any) -> tuple:
        self.step.enter_context(self.ledger)
        self.step.callback(self.end_step)
        batches, number = super().get_batch_samples(*args)
        self.ledger.tag(
            [value for batch in batches if isinstance(batch, dict) for value in batch.values()], ACTIVATIONS
        )
        self.ledger.begin_step()
        return batches, number

    def end_step(self) -> None:
        self.ledger.tag([p.grad for p in self.run.model.parameters() if p.grad is not None], GRADIENTS)
        self.ledger.watch(self.run.model, self.run.optimizer)
        facts = {"trained": 0, "parameters": 0, "num_layers": 0, "is_uniform": True}
        self.outcomes.append(outcome_of(self.ledger, NO_TRIAL, [], **facts))

    def _maybe_log_save_evaluate(self, *args: Any, **settings: Any) -> None:
        self.step.close()
        super()._maybe_log_save_evaluate(*args, **settings)

    def train(self, evaluate_fn: EvaluateFn) -> list[dict]:
        records = super().train(evaluate_fn)
        if self.run.is_first:
            # In the first step the optimizer has no states; gloo's threads sometimes let go late of what was exchanged.
            least = asdict(min(self.outcomes[1:], key=lambda outcome: outcome.peak))
            (self.run.output_dir / "ledger.json").write_text(json.dumps(least | self.noted), encoding="utf-8")
        return records
