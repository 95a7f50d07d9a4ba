"""Train dpo.py under the ledger; `before` is the peak of the reference's pass."""

from pathlib import Path

from ledger_of_trl import Watched, watched

from accelerate_recipes.arguments import shipped

dpo = shipped.load(Path(__file__).resolve().parents[2] / "recipes/dpo.py")
Args, requirements, main = dpo.Args, dpo.requirements, dpo.main


class PairLoss(Watched, dpo.PairLoss):
    pass


dpo.PairLoss, dpo.train = PairLoss, watched
