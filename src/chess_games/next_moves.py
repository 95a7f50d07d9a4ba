"""Evaluation of predicted moves in positions of held-out games: the share of legal moves, and of moves that were played."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.disk import read_json
from accelerate_recipes.models.generation import generate_texts
from chess_games import rules
from chess_games.games import begin_token


def answer(text: str) -> str:
    """Return the move that a model's text gives: its first word."""
    return (text.split() or [""])[0]


def prompt_of(tokenizer: PreTrainedTokenizerBase, prefix: Sequence[str]) -> list[int]:
    """Return the token ids of the moves so far, as the beginning of a document."""
    return [begin_token(tokenizer), *tokenizer(" ".join(prefix), add_special_tokens=False)["input_ids"]]


def longest_move(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens of the longest move, at the start of a game, or later with a space before the move."""

    def num_tokens(texts: list[str]) -> np.ndarray:
        return np.array([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])

    moves = rules.all_uci_moves()
    first = num_tokens(moves)
    return int(max(first.max(), (num_tokens([f"{move} {move}" for move in moves]) - first).max()))


class NextMoves:
    """Evaluator that uses the same positions for every evaluation and for the baseline.

    `folder` is that of `games.prepare_games`; `metric_file` is the `evaluate` module that counts.
    Results have the keys `legal_move_rate` and `next_move_accuracy`; with the suffix `_<phase>` for each phase, and with
    `_unseen` for positions that occur in no training game.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, metric_file: Path):
        import evaluate

        self.tokenizer = tokenizer
        self.metric = evaluate.load(str(metric_file), keep_in_memory=True)
        self.facts = read_json(folder / "facts.json")
        self.positions = self.facts["positions"]
        self.prefixes = [" ".join(position["prefix"]) for position in self.positions]
        self.max_new_tokens = longest_move(tokenizer)

    def evaluate(self, accelerator: Accelerator, model: nn.Module, batch_size: int) -> dict[str, float]:
        """Evaluate the greedy moves of `model`. Every rank takes its share; all get the result."""
        prompts = [prompt_of(self.tokenizer, position["prefix"]) for position in self.positions]
        texts = generate_texts(accelerator, model, self.tokenizer, prompts, self.max_new_tokens, batch_size).texts
        return self._count([answer(text) for text in texts])

    def baseline(self) -> dict[str, float]:
        """Evaluate the baseline: the most frequent next move after the previous move."""
        return self._count([self.facts["baseline"].get((p["prefix"] or [""])[-1], "") for p in self.positions])

    def _count(self, moves: list[str]) -> dict[str, float]:
        return self.metric.compute(  # pyright: ignore[reportReturnType]
            predictions=moves,
            references=[position["move"] for position in self.positions],
            prefixes=self.prefixes,
            phases=[position["phase"] for position in self.positions],
            seen=[position["is_seen"] for position in self.positions],
        )

    def summary(self, results: dict[str, dict]) -> str:
        """Summarise named evaluation records in lines of text; the keys of the values begin with `eval_`."""
        unseen = sum(not position["is_seen"] for position in self.positions)
        parts = {"": f"Held-out positions ({len(self.positions):,})"}
        if unseen:
            parts["_unseen"] = f"Of these, in no game trained on ({unseen:,})"
        lines = []
        for suffix, part in parts.items():
            for name, unit in (("legal_move_rate", "legal moves"), ("next_move_accuracy", "moves as played")):
                shares = ", ".join(f"{key} {result[f'eval_{name}{suffix}']:.1%}" for key, result in results.items())
                lines.append(f"{part}, {unit}: {shares}")
        return "\n".join(lines)

    def play(self, accelerator: Accelerator, model: nn.Module, num_moves: int) -> list[str]:
        """Let the model play against itself, up to the first illegal move."""
        start = [prompt_of(self.tokenizer, [])]
        (text,) = generate_texts(accelerator, model, self.tokenizer, start, num_moves * self.max_new_tokens, 1).texts
        return rules.legal_part(text.split()[:num_moves])
