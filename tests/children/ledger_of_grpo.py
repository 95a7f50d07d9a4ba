"""Train grpo.py under the ledger; `drawing` are the peaks of its steps until answers are drawn."""

from pathlib import Path
from typing import Any

from ledger_of_trl import Watched, watched

from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations import answers

grpo = shipped.load(Path(__file__).resolve().parents[2] / "recipes/grpo.py")
Args, requirements, main = grpo.Args, grpo.requirements, grpo.main


class AnswerTrainer(Watched, answers.AnswerTrainer):
    def _generate_single_turn(self, *args: Any, **settings: Any) -> tuple:
        try:
            return super()._generate_single_turn(*args, **settings)
        finally:
            if self.outcomes:  # not in the first step
                self.noted.setdefault("drawing", []).append(self.ledger.peak)


answers.AnswerTrainer, grpo.train = AnswerTrainer, watched
