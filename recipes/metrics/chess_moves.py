"""Legal-move rate and next-move accuracy, as an `evaluate` metric. `evaluate.load` takes this file's path."""

import datasets
import evaluate

from accelerate_recipes.chess_rules import PHASES, is_legal

DESCRIPTION = """
Of moves predicted in chess positions: the share that is legal, and the share that is the move which was played;
over all positions and by phase of the game.
"""

INPUTS = """
Args:
    predictions: moves in UCI; anything else counts as illegal.
    references: the moves that were played.
    prefixes: the moves before each, separated by spaces.
    phases: `opening`, `middlegame` or `endgame` for each.
Returns:
    legal_move_rate, next_move_accuracy (shares of 1), and the same as <name>_<phase> for each phase that occurs.
"""


class ChessMoves(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        names = ("predictions", "references", "prefixes", "phases")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({name: text for name in names}),
        )

    def _compute(self, predictions, references, prefixes, phases):
        legal = [is_legal(prefix.split(), move) for prefix, move in zip(prefixes, predictions, strict=True)]
        right = [move == played for move, played in zip(predictions, references, strict=True)]
        result = {
            "legal_move_rate": sum(legal) / len(legal),
            "next_move_accuracy": sum(right) / len(right),
        }
        for phase in PHASES:
            chosen = [i for i, name in enumerate(phases) if name == phase]
            if chosen:
                result[f"legal_move_rate_{phase}"] = sum(legal[i] for i in chosen) / len(chosen)
                result[f"next_move_accuracy_{phase}"] = sum(right[i] for i in chosen) / len(chosen)
        return result
