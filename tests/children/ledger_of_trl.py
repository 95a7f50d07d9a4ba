"""Train dpo.py or grpo.py (RECIPE) under the ledger; rank 0 writes what it saw of one step to ledger.json.

There, `before` is the peak of the reference's pass; `drawing` are the peaks of steps of GRPO until answers are drawn.
"""

import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn

from accelerate_recipes import engine
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations import answers
from accelerate_recipes.run import Run
from recipe_tools.plan.ledger import ACTIVATIONS, GRADIENTS, PARAMETERS, Ledger
from recipe_tools.plan.simulate import Outcome, num_logits, outcome_of

NAME = os.environ["RECIPE"]
module = shipped.load(Path(__file__).resolve().parents[2] / f"recipes/{NAME}.py")
Args, requirements, main = module.Args, module.requirements, module.main
NO_TRIAL: Any = SimpleNamespace(tokens=0, unit="")


class Watched:
    """Put it before a trainer of a recipe in a class's bases; `noted` are more numbers to write."""

    ledger: Ledger
    step: ExitStack  # open from its first batch on
    outcomes: list[Outcome]  # of the steps
    noted: dict[str, Any]

    def add_reference(self, *given: Any) -> None:
        self.run = given[0] if given else self.run
        self.ledger, self.step, self.outcomes, self.noted = (
            Ledger("cpu", num_logits(self.run.model.config)), ExitStack(), [], {},
        )  # fmt: skip
        with self.ledger:
            self.ledger.watch(self.run.model, self.run.optimizer)
            parameters = self.ledger.peak
            super().add_reference(*given)
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
        return super().draw(step, batches) if NAME == "grpo" else batches

    def end_step(self) -> None:
        self.ledger.tag([p.grad for p in self.run.model.parameters() if p.grad is not None], GRADIENTS)
        self.ledger.watch(self.run.model, self.run.optimizer)
        facts = {"trained": 0, "parameters": 0, "num_layers": 0, "is_uniform": True}
        self.outcomes.append(outcome_of(self.ledger, NO_TRIAL, [], **facts))


def watched(run: Run, loader: Any, *, loss_fn: Any, **functions: Any) -> list[dict]:
    """Train with the trainer of `loss_fn`, which is Watched, and write what it saw."""
    take, trainer = engine.train_step, loss_fn.__self__

    def take_and_close(*args: Any) -> engine.Step:
        done = take(*args)
        trainer.step.close()
        return done

    with mock.patch.object(engine, "train_step", take_and_close):
        records = engine.train(run, loader, loss_fn=loss_fn, **functions | {"draw_fn": trainer.draw})
    if run.is_first:
        # In the first step the optimizer has no states; gloo's threads sometimes let go late of what was exchanged.
        least = asdict(min(trainer.outcomes[1:], key=lambda outcome: outcome.peak))
        (run.output_dir / "ledger.json").write_text(json.dumps(least | trainer.noted), encoding="utf-8")
    return records


if NAME == "grpo":

    class WatchedAnswers(Watched, answers.AnswerTrainer):
        def _generate_single_turn(self, *args: Any, **settings: Any) -> tuple:
            try:
                return super()._generate_single_turn(*args, **settings)
            finally:
                if self.outcomes:  # not in the first step
                    self.noted.setdefault("drawing", []).append(self.ledger.peak)

    answers.AnswerTrainer = WatchedAnswers
else:

    class WatchedPairs(Watched, module.PairLoss):
        pass

    module.PairLoss = WatchedPairs
module.train = watched
