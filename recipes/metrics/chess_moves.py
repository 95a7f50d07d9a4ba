"""Legal-move rate and next-move accuracy, as an `evaluate` metric. `evaluate.load` takes this file's path.

A prediction is one move in a chess position. The values are the share of predictions that are legal, and the share that are
the played move: over all positions, by phase of the game, and over positions that occur in no training game.
"""

import datasets
import evaluate

from chess_games.rules import PHASES, is_legal


class ChessMoves(evaluate.Metric):
    """Metric of predicted moves.

    Args:
        predictions: moves in UCI; anything else counts as illegal.
        references: the moves that were played.
        prefixes: the moves before each prediction, separated by spaces.
        phases: `opening`, `middlegame` or `endgame` for each prediction.
        seen: for each prediction, whether a training game begins with the same moves.
    Returns:
        legal_move_rate and next_move_accuracy (shares of 1). Also <name>_<phase> for each phase that occurs, and
        <name>_unseen if there are unseen positions.
    """

    def _info(self):
        features = dict.fromkeys(("predictions", "references", "prefixes", "phases"), datasets.Value("string"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__doc__,
            features=datasets.Features(features | {"seen": datasets.Value("bool")}),
        )

    def _compute(self, predictions, references, prefixes, phases, seen):
        legal = [is_legal(prefix.split(), move) for prefix, move in zip(prefixes, predictions, strict=True)]
        right = [move == played for move, played in zip(predictions, references, strict=True)]
        parts = {"": range(len(legal))}
        parts |= {f"_{phase}": [i for i, name in enumerate(phases) if name == phase] for phase in PHASES}
        parts["_unseen"] = [i for i, is_seen in enumerate(seen) if not is_seen]
        result = {}
        for suffix, chosen in parts.items():
            if chosen:
                result[f"legal_move_rate{suffix}"] = sum(legal[i] for i in chosen) / len(chosen)
                result[f"next_move_accuracy{suffix}"] = sum(right[i] for i in chosen) / len(chosen)
        return result
