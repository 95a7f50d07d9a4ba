"""Rewards for moves of chess, in positions that data/chess/moves.py writes: the moves so far, behind a begin token."""

from chess_games.next_moves import answer
from chess_games.rules import all_uci_moves, is_legal

MOVES = frozenset(all_uci_moves())


def is_a_move(completions: list[str], **_) -> list[float]:
    """Reward an answer that is a move which some piece could make on some board."""
    return [float(answer(text) in MOVES) for text in completions]


def is_legal_move(prompts: list[str], completions: list[str], **_) -> list[float]:
    """Reward an answer that is a legal move in its position."""
    return [float(is_legal(p.split()[1:], answer(text))) for p, text in zip(prompts, completions, strict=True)]


def is_played_move(completions: list[str], move: list[str], **_) -> list[float]:
    """Reward an answer that is the move that was played."""
    return [float(answer(text) == played) for text, played in zip(completions, move, strict=True)]
