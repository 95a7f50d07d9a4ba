"""Preference pairs of moves: the move that was played in a position, and a worse move of the model.

A rule decides which moves of the model are worse: with `illegal`, illegal moves; with `not_played`, also legal moves that
the master did not play.
"""

import json
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from accelerate_recipes.chess.next_moves import NextMoves
from accelerate_recipes.chess.rules import is_legal
from accelerate_recipes.disk import fsync, read_json_lines
from accelerate_recipes.ranks import on_first_rank

RULES = ["illegal", "not_played"]


def is_worse(position: dict, move: str, rule: str) -> bool:
    """Tell whether to reject a model's `move`, compared with the played move. An empty move means that the game ended."""
    return move != position["move"] and (rule == "not_played" or not is_legal(position["prefix"], move))


def make_pairs(
    accelerator: Accelerator,
    model: nn.Module,
    next_moves: NextMoves,
    positions: list[dict],
    rule: str,
    file: Path,
    size: int,
) -> None:
    """Write the pairs of all positions to `file`, as JSON lines with `position` (its number), `chosen` and `rejected`.

    The model's moves are greedy, so they are the same on any number of processes; `size` is its batch. After a kill, writing
    continues after the last written pair; the file gets its name when all pairs are written.

    Raises:
        Stopped: between two batches.
    """
    partial = file.with_suffix(".partial")
    chunk = 4 * size * accelerator.num_processes  # positions are sorted by length inside a chunk
    for start in range(on_first_rank(lambda: go_on(partial)), len(positions), chunk):
        part = positions[start : start + chunk]
        moves = next_moves.moves(accelerator, model, part, size)
        if accelerator.is_main_process:
            with partial.open("a", encoding="utf-8") as lines:
                for number, (position, move) in enumerate(zip(part, moves, strict=True), start):
                    if is_worse(position, move, rule):
                        pair = {"position": number, "chosen": position["move"], "rejected": move}
                        lines.write(json.dumps(pair) + "\n")
    if accelerator.is_main_process:
        partial.touch()
        fsync(partial)
        partial.replace(file)
        fsync(file.parent)
    accelerator.wait_for_everyone()


def go_on(partial: Path) -> int:
    """Return the number of the position after the last pair in the file; remove an incomplete last line."""
    if not partial.exists():
        return 0
    pairs = read_json_lines(partial)
    partial.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return pairs[-1]["position"] + 1 if pairs else 0
