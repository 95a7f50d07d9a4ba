"""Write positions of the games as prompts for grpo.py, and a model's illegal moves in them as pairs for dpo.py.

    python data/chess/moves.py outputs/demo/export outputs/chess_moves

It prints how many of the model's moves are legal. A game lies on the side where `chess.py --heldout_share 0.05` has it.
A prompt of grpo.py begins with the begin token that chess.py puts before a game. Pairs are messages, because dpo.py ends
each text: the template of `base/`, a copy of the model, writes an end for an empty answer alone, where the game has ended.
"""

import json
import random
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from accelerate_recipes.data.files import falls_under
from accelerate_recipes.models.generation import generate_texts
from accelerate_recipes.models.tokenizers import load_tokenizer
from chess_games.next_moves import answer, longest_move, prompt_of
from chess_games.rules import is_legal, sample_positions

NUM_POSITIONS = {"heldout": 900, "train": 20_000}
NUM_ASKED, NUM_ENDED = 6_000, 60  # positions of a side, and ends of its games, in which the model moves
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ ' ' + m.content if m.content else eos_token if m.role == 'assistant' else '' }}{% endfor %}"
)


def main(model: str, folder: Path) -> None:
    shutil.copytree(model, folder / "base", dirs_exist_ok=True)
    (folder / "base/chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    games = pq.read_table(Path(__file__).parent / "games_20k.parquet")["Moves"].to_pylist()
    seen = set()
    for side, number in NUM_POSITIONS.items():
        own = [moves for moves in games if falls_under(" ".join(moves), 0.05) == (side == "heldout")]
        drawn = [(" ".join(found["prefix"]), found["move"]) for found in sample_positions(own, number, seed=42)]
        positions = [(prefix, move) for prefix, move in drawn if prefix not in seen]
        seen |= {prefix for prefix, _ in positions}
        random.Random(42).shuffle(positions)
        write(
            folder / f"{side}.jsonl", ({"prompt": f"<s> {prefix}".rstrip(), "move": move} for prefix, move in positions)
        )
        asked = positions[:NUM_ASKED]
        num_asked = len(asked)
        asked += [(" ".join(moves), "") for moves in own[:NUM_ENDED]]
        moves = moves_of(model, [prefix.split() for prefix, _ in asked])
        judged = [is_legal(prefix.split(), move) for (prefix, _), move in zip(asked, moves, strict=True)]
        print(f"{side}: {sum(judged[:num_asked]) / num_asked:.1%} of {num_asked:,} moves are legal")
        found = zip(asked, moves, judged, strict=True)
        write(
            folder / f"{side}_pairs.jsonl",
            (pair(prefix, played, move) for (prefix, played), move, legal in found if not legal and move != played),
        )


def moves_of(model: str, positions: list[list[str]]) -> list[str]:
    """Return the most likely moves of a model after the moves so far."""
    tokenizer = load_tokenizer(model)
    prompts = [prompt_of(tokenizer, moves) for moves in positions]
    with_weights = Accelerator().prepare(AutoModelForCausalLM.from_pretrained(model))
    texts = generate_texts(Accelerator(), with_weights, tokenizer, prompts, longest_move(tokenizer), 64).texts
    return [answer(text) for text in texts]


def pair(prefix: str, played: str, illegal: str) -> dict[str, list[dict[str, str]]]:
    said = {"prompt": ("user", prefix), "chosen": ("assistant", played), "rejected": ("assistant", illegal)}
    return {name: [{"role": role, "content": text}] for name, (role, text) in said.items()}


def write(file: Path, rows: Iterable[dict]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
