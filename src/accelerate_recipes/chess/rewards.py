"""Verifiable rewards for a move in a chess position, with the signature that trl's GRPOTrainer expects.

Each function takes the moves so far (`prompts`) and the model's texts (`completions`), whose first word is
the answer, and returns a reward from 0 to 1 for each. Columns of the data are passed by name: `move` is the played move.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accelerate_recipes.args import arg
from accelerate_recipes.chess.rules import all_uci_moves, chess, is_legal

UCI_MOVES = frozenset(all_uci_moves())
MAX_LOSS = 300  # centipawns, about the value of a piece; a larger loss is not punished more


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
    """Arguments of the reward that a chess engine gives."""

    stockfish: str = arg("", "UCI chess engine that judges how good legal answers are; empty: none.", fixed=False)
    stockfish_nodes: int = arg(
        10_000, "Nodes that --stockfish searches for a judgement; ten thousand take about 0.03 s.", fixed=False, min=1
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
    """Make the engine's reward: 1 for the engine's best move, down to 0 for a loss of MAX_LOSS centipawns.

    The loss is the difference between the scores of two searches of `nodes` nodes from the same position: one over all
    moves, one over the answer alone. A search starts with empty tables, on one thread, so its result depends on nothing
    else. An illegal answer earns 0.
    """

    def score(board: chess.Board, moves: list[chess.Move] | None = None) -> int:
        """Return the score in centipawns, for the side to move."""
        found = engine.analyse(board, chess.engine.Limit(nodes=nodes), game=object(), root_moves=moves)
        return found["score"].relative.score(mate_score=10_000)  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def is_good_move(prompts: list[str], completions: list[str], **columns) -> list[float]:
        best: dict[str, int] = {}  # a position occurs once for each of its answers
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
