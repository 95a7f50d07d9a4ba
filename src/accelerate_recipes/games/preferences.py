"""Preference pairs of moves: the move that was played in a position, and a worse move of the model.

A rule decides which moves of the model are worse: with `illegal`, illegal moves; with `not_played`, also legal moves that
the master did not play.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.disk import fsync, read_json_lines
from accelerate_recipes.games.next_moves import prompt_of
from accelerate_recipes.games.rewards import answer
from accelerate_recipes.games.rules import is_legal
from accelerate_recipes.generation import generate_texts
from accelerate_recipes.ranks import on_first_rank

RULES = ["illegal", "not_played"]


def is_worse(position: dict, move: str, rule: str) -> bool:
    """Tell whether to reject a model's `move`, compared with the played move. An empty move means that the game ended."""
    return move != position["move"] and (rule == "not_played" or not is_legal(position["prefix"], move))


def make_pairs(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    positions: Sequence[dict],
    rule: str,
    file: Path,
    max_new_tokens: int,
    batch_size: int,
) -> None:
    """Write the pairs of all positions to `file`, as JSON lines with `position` (its number), `chosen` and `rejected`.

    The model's moves are greedy, so they are the same on any number of processes. After a kill, writing continues after
    the last written pair; the file gets its name when all pairs are written.

    Raises:
        Stopped: between two batches.
    """
    partial = file.with_suffix(".partial")
    done = on_first_rank(lambda: go_on(partial))
    chunk = 4 * batch_size * accelerator.num_processes  # positions are sorted by length inside a chunk
    bar = tqdm(
        total=len(positions),
        initial=done,
        unit="position",
        desc="Making pairs",
        disable=not (accelerator.is_main_process and sys.stderr.isatty()),
    )
    for start in range(done, len(positions), chunk):
        part = positions[start : start + chunk]
        prompts = [prompt_of(tokenizer, position["prefix"]) for position in part]
        texts = generate_texts(accelerator, model, tokenizer, prompts, max_new_tokens, batch_size).texts
        if accelerator.is_main_process:
            with partial.open("a", encoding="utf-8") as lines:
                for i, (position, text) in enumerate(zip(part, texts, strict=True), start):
                    if is_worse(position, move := answer(text), rule):
                        pair = {"position": i, "chosen": position["move"], "rejected": move}
                        lines.write(json.dumps(pair) + "\n")
        bar.update(len(part))
    bar.close()
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
