"""Write the games as texts, each with the begin token that chess.py puts before a game, for distill.py.

    python data/chess/texts.py outputs/chess_texts     # train.jsonl, and heldout.jsonl with 200 games

A game lies on the side where `chess.py --heldout_share 0.05` has it.
"""

import json
import sys
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from accelerate_recipes.data.files import falls_under


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    games = [
        " ".join(moves) for moves in pq.read_table(Path(__file__).parent / "games_20k.parquet")["Moves"].to_pylist()
    ]
    for name, is_heldout, most in (("train", False, None), ("heldout", True, 200)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for game in islice((game for game in games if falls_under(game, 0.05) == is_heldout), most):
                file.write(json.dumps({"text": f"<s> {game}"}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
