"""Write positions with two questions about them, for decide.py: whether the last move is legal, and which phase this is.

    python data/chess/decisions.py outputs/chess_decisions     # train.jsonl, heldout.jsonl, and the settings of the prompt

A game lies on the side where `chess.py --heldout_share 0.05` has it. Half of the last moves are replaced by one of a piece
of the player that is not legal. The demo's model knows no words: labels are moves, and so is what stands for a question.
"""

import json
import random
import sys
from pathlib import Path

import chess
import pyarrow.parquet as pq

from accelerate_recipes.data.files import falls_under
from chess_games import rules

NUMBERS = {"train": 4000, "heldout": 400}
QUESTIONS = {
    "legal": {"type": "noul", "instructions": "Is the last move legal?"},
    "phase": {"type": "score", "instructions": "Which phase of the game is it?", "criteria": [*rules.PHASES]},
}
LABELS = {"noul": ["a1a2", "a1a3"], "score": ["a1a4", "a1a5", "a1a6"]}
TEMPLATE = "{{ bos_token }} {{ state }}{% for question in questions %} {{ question.labels[0] }}<|mark|>{% endfor %}"


def make_row(game: list[str], draw: random.Random) -> dict:
    """Cut a game behind a move, and maybe replace the move."""
    ply = draw.randrange(min(len(game), 100))
    moves, is_legal = rules.canonical(game)[: ply + 1], draw.random() < 0.5
    if not is_legal:
        board = chess.Board()
        for move in moves[:-1]:
            board.push_uci(move)
        own = {chess.square_name(square) for square in chess.SQUARES if board.color_at(square) == board.turn}
        legal = {move.uci() for move in board.legal_moves}
        others = [move for move in rules.all_uci_moves() if move[:2] in own and len(move) == 4 and move not in legal]
        moves[-1] = draw.choice(others)
    phase = [*rules.PHASES].index(rules.phase_of(ply))
    return {"state": " ".join(moves), "questions": QUESTIONS, "answers": {"legal": is_legal, "phase": phase}}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    games = pq.read_table(Path(__file__).parent / "games_20k.parquet")["Moves"].to_pylist()
    draw.shuffle(games)
    for side, number in NUMBERS.items():
        own = [game for game in games if falls_under(" ".join(game), 0.05) == (side == "heldout")][:number]
        lines = (json.dumps(make_row(game, draw)) + "\n" for game in own)
        (folder / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "decision.json").write_text(json.dumps({"labels": LABELS}) + "\n", encoding="utf-8")
    (folder / "decision_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
