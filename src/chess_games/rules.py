"""Rules of chess for the chess recipes: legality, games from files, positions to test on, a baseline.

A move is written in UCI (`e2e4`, `e7e8q`), a game as moves separated by spaces.
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import TextIO

# `python recipes/chess.py` puts recipes/ first on the path, where `import chess` would find the recipe, not python-chess.
PATH = sys.path[:]
sys.path[:] = [entry for entry in PATH if not (Path(entry) / "chess.py").is_file()]
try:
    import chess
    import chess.pgn
finally:
    sys.path[:] = PATH

LETTERS = "KQRBN"
FIGURINES = str.maketrans("♔♕♖♗♘♚♛♜♝♞", 2 * LETTERS, "♙♟\ufe0e\ufe0f")  # a pawn has no letter
WORDS = re.compile(r"[{}();]|[^\s{}();]+")
# A word outside of comments and variations: a move with its number, a glyph; and a result, maybe right behind a move.
WORD = re.compile(
    r"[.…]*(\d+[.…]*)?([KQRBN]?[a-h]?[1-8]?[-x]?[a-h][1-8](=?[nbrqNBRQ])?([+#]|\+\+)?|(O-O(-O)?|0-0(-0)?)[+#]?|--|Z0)?(e\.p\.)?[!?]{0,2}"
    r"|\$\d+"
)
ENDED = re.compile(r"(.*?)(1-0|0-1|1/2-1/2|\*)")
HEADER = re.compile(r'\[(\w+)\s+"')
# Tags that change what the moves mean, however they are written: python-chess skips a tag that is not quite PGN.
START = re.compile(r'(?:^|\]\s*)\[\s*(FEN|Variant)\b[\s"]*([^"\]\n]*)', re.IGNORECASE)
FIRST_MOVE = re.compile(r"1[.\s](?!\s*[.…])")  # White's first move
EVENT = re.compile(r'\ufeff?\[Event\s+".*"\]\s*$')  # begins a game, also within a comment that was cut
# UCI writes castling as the move of the king, as in normal chess; for Chess960 engines, the king takes its own rook.
CASTLING = {"e1h1": "e1g1", "e1a1": "e1c1", "e8h8": "e8g8", "e8a8": "e8c8"}

# Phases of a game, for which results are reported, with their upper limits in plies.
PHASES = {"opening": 20, "middlegame": 60, "endgame": 10**9}


def phase_of(ply: int) -> str:
    """Return the phase of the game in which move number `ply` (from 0) is made."""
    return next(phase for phase, limit in PHASES.items() if ply < limit)


def all_uci_moves() -> list[str]:
    """List every move that a piece could make on an empty board: 1,968 moves, the vocabulary of a chess model."""
    moves = set()
    for square in chess.SQUARES:
        for piece in (chess.QUEEN, chess.KNIGHT):
            board = chess.Board(None)
            board.set_piece_at(square, chess.Piece(piece, chess.WHITE))
            moves |= {move.uci() for move in board.pseudo_legal_moves}
    # A pawn moves to its last rank like a queen, straight or to a file beside it.
    last = [move for move in moves if move[1::2] in ("78", "21") and abs(ord(move[0]) - ord(move[2])) <= 1]
    return sorted(moves | {move + piece for move in last for piece in "bnqr"})


def defect_of_moves(moves: object) -> str:
    """Say why a value is not a list of texts, or return an empty string."""
    if isinstance(moves, list) and all(isinstance(move, str) for move in moves):
        return ""
    return f"its Moves are no list of texts, but {moves!r:.80}"


def canonical(moves: list[str]) -> list[str]:
    """Write castling as the king's move, the only way in which normal chess has one text for each move.

    Until a move leaves e1 or e8, the king stands there, so that the first one is the king's.
    """
    for square in ("e1", "e8"):
        ply = next((ply for ply, move in enumerate(moves) if move.startswith(square)), None)
        if ply is not None and moves[ply] in CASTLING:
            moves = [*moves[:ply], CASTLING[moves[ply]], *moves[ply + 1 :]]
    return moves


def defect_of_game(moves: list[str]) -> str:
    """Say what is wrong with a game, or return an empty string."""
    if not moves:
        return "it has no moves"
    legal = legal_part(moves)
    if len(legal) == len(moves):
        return ""
    return f"move {len(legal) + 1}, {moves[len(legal)]!r}, is illegal after {' '.join(legal[-3:]) or 'the start'}"


def is_legal(prefix: list[str], move: str) -> bool:
    """Tell whether `move` is legal after the legal moves `prefix`."""
    return len(legal_part([*prefix, move])) > len(prefix)


def legal_part(moves: list[str]) -> list[str]:
    """Return the moves before the first illegal one."""
    board = chess.Board()
    for ply, uci in enumerate(moves):
        try:
            legal = board.push_uci(uci).uci() == uci != "0000"  # python-chess also parses null moves, and e1h1 as e1g1
        except ValueError:
            legal = False
        if not legal:
            return moves[:ply]
    return moves


class GameBuilder(chess.pgn.GameBuilder):
    """Builder of the played game, which does not log errors in the game.

    It skips variations: after a variation with an illegal move, python-chess 1.11 continues from the variation's position.
    """

    def visit_header(self, name: str, value: str) -> None:
        if value:  # an empty value carries no information
            super().visit_header(name, value)

    def begin_variation(self) -> chess.pgn.SkipType:
        return chess.pgn.SKIP

    def end_variation(self) -> None:
        pass

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)


class Movetext:
    """Lines of a PGN file for python-chess, which skips letters that it does not know: it would read `♘f3` and `Sf3` as f3.

    Figurines, and the `letters` of king, queen, rook, bishop and knight, become the letters of PGN. `junk` is the first word
    of a game that is not PGN. `is_ended` tells whether a result was read, and `rest` is the first word after it.

    python-chess sees the end of a game by a blank line. It gets one where a game has ended: behind its result, and where it
    was cut, or files were joined. It gets no other one, or it would read the moves behind it without the tags of their game.
    """

    def __init__(self, file: TextIO, letters: str):
        self.file = file
        foreign = {ord(letter): "\0" for letter in LETTERS}  # a letter of PGN that is no letter of this file
        self.letters = FIGURINES | foreign | {ord(letter): own for letter, own in zip(letters, LETTERS, strict=True)}
        self.in_moves = self.in_comment = False
        self.held: list[str] = []  # lines that come next
        self.begin_game()

    def begin_game(self) -> None:
        self.junk, self.is_ended, self.rest, self.depth = "", False, "", 0
        self.tags: set[str] = set()
        self.has_moves = False

    def readline(self) -> str:
        line, is_behind_blank = self.next_line(), False
        while line.isspace() and not (self.in_comment or self.is_ended):
            line, is_behind_blank = self.next_line(), True
        if self.in_comment and EVENT.match(line):
            self.in_comment, self.held = False, [line, *self.held]
            return "}\n"
        header = HEADER.match(line)
        if self.in_moves and not self.in_comment and (header or self.is_next(line)):
            self.in_moves, self.held = False, [line, *self.held]
            return "\n"
        if line.startswith("[") and not (self.in_moves or self.in_comment):
            if header and is_behind_blank and header[1] in self.tags:  # the game before has no moves
                self.in_moves, self.held = True, [line, *self.held]
                return "{}\n"
            self.tags |= {header[1]} if header else set()
            tags = [
                ("FEN" if tag.lower() == "fen" else "Variant", value.strip("' ")) for tag, value in START.findall(line)
            ]
            line, *more = [f'[{tag} "{value}"]\n' for tag, value in tags] or [line]
            self.held = more + self.held
        if self.in_comment or line.strip():
            starts_outside = not self.in_comment
            self.in_moves |= not line.startswith(("[", "%", ";"))
            self.in_rest = False  # in the rest of a line after a semicolon
            if self.in_moves and not (starts_outside and line.startswith(("%", ";"))):
                return WORDS.sub(self.word, line.partition("\n")[0]) + "\n" * line.endswith("\n")
        else:
            self.in_moves = False
        return line

    def is_next(self, line: str) -> bool:
        """Tell whether a line begins another game by its number."""
        return line[:1].isdecimal() and (
            self.is_ended or (self.has_moves and not self.depth and bool(FIRST_MOVE.match(line)))
        )

    def next_line(self) -> str:
        """Read a line without its byte order mark; a game that begins within it is held back."""
        line = (self.held.pop(0) if self.held else self.file.readline()).lstrip("\ufeff \t")
        if found := EVENT.search(line, 1):
            self.held = [line[found.start() :], *self.held]
            return line[: found.start()] + "\n"
        return line

    def word(self, found: re.Match) -> str:
        """Return a word or a bracket in the form that python-chess reads."""
        word = found[0]
        if self.in_comment:
            self.in_comment = word != "}"
        elif self.in_rest or word == ";":
            self.in_rest = True
        elif word == "{":
            self.in_comment = True
        elif word in "()":
            self.depth = max(0, self.depth + (1 if word == "(" else -1))
        elif not self.depth:
            moved, ended = word.translate(self.letters), ""
            if whole := ENDED.fullmatch(moved):
                moved, ended = whole.groups()
            if self.is_ended and moved[:1].isalnum():
                self.rest = self.rest or word
            self.has_moves |= moved[:1].isalnum()
            self.is_ended |= bool(ended)
            if not WORD.fullmatch(moved):
                self.junk = self.junk or word
            return f"{moved} {ended}".strip()
        return word


def read_pgn(path: str, letters: str = LETTERS) -> Iterator[dict]:
    """Read the games of a PGN file as rows with `Moves` and `defect`: why a game cannot be used, or an empty string.

    `letters` are the letters of king, queen, rook, bishop and knight in the moves.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = Movetext(file, letters)
        while game := chess.pgn.read_game(lines, Visitor=GameBuilder):  # pyright: ignore[reportArgumentType]
            moves = [move.uci() for move in game.mainline_moves()]
            yield {"Moves": moves, "defect": defect_of_pgn(game, len(moves), lines)}
            lines.begin_game()


def defect_of_pgn(game: chess.pgn.Game, num_moves: int, lines: Movetext) -> str:
    """Say why a game, of which `num_moves` moves were read, is not whole or not normal chess, or return an empty string."""
    if not lines.is_ended:
        return "it ends before a result, such as 1-0 or *; it may be cut"
    if lines.rest:
        return f"{lines.rest!r} follows its result; begin each game on a line of its own"
    variant = game.headers.get("Variant", "Standard")
    if variant.lower() not in ("standard", "from position", "chess", "normal"):
        return f"it is {variant}, not normal chess"
    if game.headers.get("FEN", chess.STARTING_FEN) != chess.STARTING_FEN:
        return f"it begins from another position, {game.headers['FEN']}"
    if lines.junk:
        remedy = "if the pieces have other letters, name them, such as --piece_letters KDTLS"
        return f"{lines.junk!r} is no move in PGN; {remedy}"
    if game.errors:
        return f"move {num_moves + 1} cannot be made: {game.errors[0]}"
    return ""


def sample_positions(games: Iterable[list[str]], num_positions: int, seed: int) -> list[dict]:
    """Draw positions spread evenly over the phases, at most one from each game and phase; fewer if there are not enough.

    Each position is {"prefix": moves so far, "move": the played move, "phase"}.
    """
    generator = random.Random(seed)
    candidates: dict[str, list[dict]] = {phase: [] for phase in PHASES}
    for moves in games:
        for phase, plies in groupby(range(len(moves)), phase_of):
            ply = generator.choice([*plies])
            candidates[phase].append({"prefix": moves[:ply], "move": moves[ply], "phase": phase})
    share = num_positions // len(PHASES)
    return [p for found in candidates.values() for p in generator.sample(found, min(share, len(found)))]


def mark_seen(positions: Sequence[dict], games: Iterable[list[str]]) -> None:
    """Set `is_seen` of each position: whether one of the games begins with the same moves."""
    prefixes = [position["prefix"] for position in positions]
    begins = {tuple(prefix[:number]) for prefix in prefixes for number in range(len(prefix) + 1)}
    seen = set()
    for moves in games:  # follow each game as long as a position begins with the same moves
        seen.update(takewhile(begins.__contains__, (tuple(moves[:number]) for number in range(len(moves) + 1))))
    for position in positions:
        position["is_seen"] = tuple(position["prefix"]) in seen


def most_frequent_followers(games: Iterable[list[str]]) -> dict[str, str]:
    """Map each move to the most frequent next move, in any position; "" stands for the start of a game.

    This is the baseline: the best prediction from the previous move alone, without the board.
    """
    counts: dict[str, Counter] = {}
    for moves in games:
        for previous, move in zip(["", *moves], moves, strict=False):
            counts.setdefault(previous, Counter())[move] += 1
    return {previous: followers.most_common(1)[0][0] for previous, followers in counts.items()}


def draw_game(moves: list[str]) -> str:
    """Draw the final position as text, with the moves in tournament notation."""
    board = chess.Board()
    line = board.variation_san([chess.Move.from_uci(uci) for uci in moves])
    for uci in moves:
        board.push_uci(uci)
    return f"{board.unicode(borders=False, empty_square='·')}\n{line}"
