"""Verifiable rewards of a move in a chess position, as trl's GRPOTrainer calls them.

Each takes the moves so far (`prompts`) and what a model wrote behind them (`completions`), of which the first word is
the answer, and returns a reward from 0 to 1 for each. Columns of the data come by their names: `move` is the one that
was played.
"""

from accelerate_recipes.chess_rules import all_uci_moves, is_legal

UCI_MOVES = frozenset(all_uci_moves())


def answer(completion: str) -> str:
    return (completion.split() or [""])[0]


def is_a_move(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """Whether the answer is a move that some piece could make on some board."""
    return [float(answer(completion) in UCI_MOVES) for completion in completions]


def is_legal_move(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """Whether it is one in this position."""
    return [float(is_legal(p.split(), answer(c))) for p, c in zip(prompts, completions, strict=True)]


def is_played_move(prompts: list[str], completions: list[str], move: list[str], **columns) -> list[float]:
    """Whether it is the move that was played."""
    return [float(answer(c) == played) for c, played in zip(completions, move, strict=True)]


REWARDS = [is_a_move, is_legal_move, is_played_move]
