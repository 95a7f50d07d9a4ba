"""Mixin that watches the steps of a recipe on trl under the ledger; rank 0 writes what it saw of one to ledger.json."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn

from accelerate_recipes import engine
from accelerate_recipes.agenda import EvaluateFn
from accelerate_recipes.plan.ledger import ACTIVATIONS, GRADIENTS, PARAMETERS, Ledger
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
            parameters = self.ledger.peak
            super().complete_rows()
            # A second model is made before it is sharded; what counts is what a step keeps of it.
            keeps_another = isinstance(self.ref_model, nn.Module)
            self.noted["before"] = 0 if keeps_another or self.ledger.peak == parameters else self.ledger.peak
        if keeps_another:
            self.ledger.tag(self.ref_model.parameters(), PARAMETERS)

    def draw(self, step: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.step.enter_context(self.ledger)
        self.step.callback(self.end_step)
        self.ledger.tag([value for batch in batches for value in batch.values()], ACTIVATIONS)
        self.ledger.begin_step()
        return super().draw(step, batches) if super().draw else batches

    def end_step(self) -> None:
        self.ledger.tag([p.grad for p in self.run.model.parameters() if p.grad is not None], GRADIENTS)
        self.ledger.watch(self.run.model, self.run.optimizer)
        facts = {"trained": 0, "parameters": 0, "num_layers": 0, "is_uniform": True}
        self.outcomes.append(outcome_of(self.ledger, NO_TRIAL, [], **facts))

    def fine_tune(self, evaluate_fn: EvaluateFn) -> list[dict]:
        take = engine.train_step

        def take_and_close(*args: Any) -> engine.Step:
            done = take(*args)
            self.step.close()
            return done

        with mock.patch.object(engine, "train_step", take_and_close):
            records = super().fine_tune(evaluate_fn)
        if self.run.is_first:
            # In the first step the optimizer has no states; gloo's threads sometimes let go late of what was exchanged.
            least = asdict(min(self.outcomes[1:], key=lambda outcome: outcome.peak))
            (self.run.output_dir / "ledger.json").write_text(json.dumps(least | self.noted), encoding="utf-8")
        return records
