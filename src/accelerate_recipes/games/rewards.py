"""Verifiable rewards of a move in a chess position, as trl's GRPOTrainer calls them.

Each takes the moves so far (`prompts`) and what a model wrote behind them (`completions`), of which the first word is
the answer, and returns a reward from 0 to 1 for each. Columns of the data come by their names: `move` is the one that
was played.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accelerate_recipes.args import arg
from accelerate_recipes.games.rules import all_uci_moves, chess, is_legal

UCI_MOVES = frozenset(all_uci_moves())
MAX_LOSS = 300  # centipawns, about a piece: what loses more is no worse


def answer(completion: str) -> str:
    return (completion.split() or [""])[0]


def is_a_move(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """Reward an answer that is a move which some piece could make on some board."""
    return [float(answer(completion) in UCI_MOVES) for completion in completions]


def is_legal_move(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """Reward an answer that is a legal move in its position."""
    return [float(is_legal(p.split(), answer(c))) for p, c in zip(prompts, completions, strict=True)]


def is_played_move(prompts: list[str], completions: list[str], move: list[str], **columns) -> list[float]:
    """Reward an answer that is the move that was played."""
    return [float(answer(c) == played) for c, played in zip(completions, move, strict=True)]


REWARDS = [is_a_move, is_legal_move, is_played_move]


@dataclass
class StockfishArgs:
    """Arguments of the reward that an engine gives."""

    stockfish: str = arg(
        "", "Chess engine that judges how good a legal answer is, by UCI: a program; empty: none does.", fixed=False
    )
    stockfish_nodes: int = arg(
        10_000, "Positions that it looks at to judge one; ten thousand take about 0.03 s.", fixed=False, min=1
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.stockfish and shutil.which(self.stockfish) is None:
            found.append(
                f"--stockfish {self.stockfish}: there is no such program; install it (Debian: apt-get install stockfish, "
                "then /usr/games/stockfish), or do without its reward"
            )
        return found


@contextlib.contextmanager
def stockfish_reward(program: str, nodes: int) -> Iterator[Callable[..., list[float]]]:
    """A fourth reward: 1 for the move that an engine thinks best, down to 0 for one that loses MAX_LOSS centipawns.

    The loss is the difference of two searches of `nodes` nodes from the same position: of all moves, and of the answer
    alone. A search starts with empty tables, on one thread: its result depends on nothing else. An illegal answer
    earns 0.
    """

    def score(board: chess.Board, moves: list[chess.Move] | None = None) -> int:
        """Return the score in centipawns, for the side that moves."""
        found = engine.analyse(board, chess.engine.Limit(nodes=nodes), game=object(), root_moves=moves)
        return found["score"].relative.score(mate_score=10_000)

    def is_good_move(prompts: list[str], completions: list[str], **columns) -> list[float]:
        best: dict[str, int] = {}  # a position comes once for each answer in it
        rewards = []
        for prompt, completion in zip(prompts, completions, strict=True):
            prefix, move = prompt.split(), answer(completion)
            if not is_legal(prefix, move):
                rewards.append(0.0)
                continue
            board = chess.Board()
            for earlier in prefix:
                board.push_uci(earlier)
            if prompt not in best:
                best[prompt] = score(board)
            loss = best[prompt] - score(board, [chess.Move.from_uci(move)])
            rewards.append(1 - min(max(loss, 0), MAX_LOSS) / MAX_LOSS)
        return rewards

    with chess.engine.SimpleEngine.popen_uci(program) as engine:
        yield is_good_move
