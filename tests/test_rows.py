"""Tests of wrong files of rows: one message with file and line or row, whatever the content."""

import json
import re
import time

import datasets
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, refuses
from hypothesis import HealthCheck, given, settings

from accelerate_recipes import ranks
from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.supervised import load_sides
from accelerate_recipes.data.documents import read_documents, text_of
from accelerate_recipes.data.files import falls_under, other_share, read_files, text_hash
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.text.text_pairs import pairs_in, text_columns
from chess_games import rules
from chess_games.games import GamesArgs, load_games, prepare_games

GAME = b'{"Moves": ["e2e4", "e7e5"]}\n'
UNREADABLE = [
    ("a.jsonl", b"", "a.jsonl cannot be read: it has 0 rows"),
    ("a.jsonl", b"\n \n\n", "a.jsonl cannot be read: it has 0 rows"),
    ("a.jsonl", b"\xef\xbb\xbf\n", "a.jsonl cannot be read: it has 0 rows"),
    ("a.pgn", b"", "a.pgn cannot be read: it has 0 games"),
    ("a.parquet", b"", "a.parquet cannot be read: "),
    ("a.parquet", b"PAR1 or not PAR1", "a.parquet cannot be read: "),
    ("a.jsonl", GAME + b'\n{"Moves": ["e2e4"\n', "a.jsonl, line 3 is not JSON: "),
    ("a.jsonl", GAME + b"\0\0\0\n", "a.jsonl, line 2 is not JSON: "),
    ("a.jsonl", GAME + b'{"Moves": ["\xe9"]}\n', "a.jsonl, line 2 is not JSON: 'utf-8' codec can't decode"),
    ("a.jsonl", GAME + b'{"Moves": ["\\udead"]}\n', r"a.jsonl, line 2 holds \udead, which is no character"),
    ("a.jsonl", GAME + b"7\n", "a.jsonl, line 2 is no JSON object, but a int"),
    ("a.jsonl", b"7\n", "a.jsonl, line 1 is no JSON object, but a int"),
    ("a.jsonl", b"\n null \n" + GAME, "a.jsonl, line 2 is no JSON object, but null; remove it"),
    ("a.jsonl", GAME + b"null\n", "a.jsonl, line 2 is no JSON object, but null; remove it"),
    ("a.jsonl", b'{"moves": []}\n', "a.jsonl has the columns ['moves']; chess needs `Moves`"),
]


@pytest.mark.parametrize("name, content, message", UNREADABLE)
def test_files_that_cannot_be_read(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ConfigError, DataError)) as error:
        load_games(str(tmp_path / name), tmp_path / "cache")
    assert str(error.value).startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize("content, moves", [
    ('[\n{"Moves": [\n"e2e4",\nnull\n]}\n]\n', ["e2e4", None]),
    ('{\n"Moves": [\n["e2e4",\nnull\n]]}\n', [["e2e4", None]]),
])  # fmt: skip
def test_one_json_value_on_many_lines_may_have_nulls_inside(content, moves, tmp_path):
    (tmp_path / "a.json").write_text(content)
    assert read_files([str(tmp_path / "a.json")], tmp_path / "cache")["Moves"][:] == [moves]


def write_parquet(file, **columns) -> None:
    pq.write_table(pa.table(columns), file, compression="none", use_dictionary=False)


def test_parquet_without_rows_damaged_or_not_of_text(tmp_path):
    file = tmp_path / "a.parquet"

    def problem() -> str:
        with pytest.raises(DataError) as error:
            load_games(str(file), tmp_path / "cache")
        return str(error.value).removeprefix(str(file))

    write_parquet(file, Moves=pa.array([], pa.list_(pa.string())))
    assert problem() == " cannot be read: it has 0 rows"
    write_parquet(file, Moves=[["e2e4", "e7e5"]] * 5000)
    content = bytearray(file.read_bytes())
    content[4:40] = b"\xff" * 36
    file.write_bytes(content)
    assert problem().startswith(" cannot be read: ")
    moves = pa.ListArray.from_arrays([0, 1, 2, 3], pa.array([b"e2e4", b"\xff", b"e2e4"], pa.binary()).view(pa.string()))
    write_parquet(file, Moves=moves)
    assert problem().startswith(", row 2 cannot be read: 'utf-8' codec can't decode byte 0xff")


@pytest.fixture
def prepare(tmp_path):
    """Prepare games from a file, and return the message."""
    tokenizer = new_word_tokenizer(rules.all_uci_moves())

    def run(name: str, content: bytes, skip_bad_games: bool = False) -> str:
        file = tmp_path / name
        file.write_bytes(content)
        args = GamesArgs(
            train_files=[str(file)], heldout_share=0.5, skip_bad_games=skip_bad_games, num_positions=3,
            data_cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        try:
            prepare_games(tokenizer, args, max_length=8, seed=0)
        except ConfigError as error:
            return str(error).replace(f"{tmp_path}/", "")
        return ""

    return run


# Moves in JSON that are no list of texts, as a message shows them.
VALUES = {
    "null": "None", "5": "5", '["e2e4", null]': "['e2e4', None]", '["e2e4", 7]': "['e2e4', 7]", '[["e2e4"]]': "[['e2e4']]",
    '{"a": 1}': "{'a': 1}",
}  # fmt: skip


@pytest.mark.parametrize("value, shown", VALUES.items())
@pytest.mark.parametrize("alone", [False, True])
def test_moves_that_are_no_list_of_texts(value, shown, alone, prepare):
    """The message is the same if the whole column, or only one row, has another type."""
    bad = b'{"Moves": %s}\n' % value.encode()
    said = prepare("a.jsonl", bad * 3 if alone else GAME + bad)
    row = 0 if alone else 1
    assert "--skip_bad_games leaves them out" in said
    assert f"- a.jsonl, row {row + 1}: its Moves are no list of texts, but {shown}" in said


def games_of_two_moves() -> bytes:
    """Make enough games for both sides of the split."""
    moves = [("e2e4", second) for second in ("e7e5", "c7c5", "e7e6", "c7c6", "d7d5", "g8f6", "g7g6", "b8c6")]
    return b"".join(b'{"Moves": %s}\n' % json.dumps(game).encode() for game in moves)


def test_bad_games_are_left_out_on_demand(prepare, tmp_path):
    bad = b"".join(b'{"Moves": %s}\n' % value.encode() for value in VALUES)
    assert prepare("a.jsonl", games_of_two_moves() + bad, skip_bad_games=True) == ""
    every = [json.loads(file.read_text()) for file in (tmp_path / "cache").glob("*/facts.json")]
    (facts,) = [facts for facts in every if "games" in json.dumps(facts)]
    assert facts["skipped"] == len(VALUES) and facts["train"] + facts["heldout"] == 8


PGN = {
    "an illegal move": ("", "1. e4 e5 2. Ke3 Nf6", "move 3 cannot be made: illegal san: 'Ke3'"),
    "an ambiguous move": ("", "1. Nf3 e5 2. Nc3 d6 3. Nd4 Nf6 4. Nb5", "move 7 cannot be made: ambiguous san: 'Nb5'"),
    "another start": ('[SetUp "1"]\n[FEN "8/8/8/4k3/8/8/4P3/4K3 w - - 0 1"]\n', "1. e4", "it begins from another position, 8/8/8"),
    "from position": ('[Variant "From Position"]\n[FEN "4k3/8/8/8/8/8/4P3/4K3 w - - 0 1"]\n', "1. e4", "it begins from another position"),
    "a variant": ('[Variant "Atomic"]\n', "1. e4 d5 2. exd5", "it is Atomic, not normal chess"),
    "an unknown variant": ('[Variant "My Own"]\n', "1. e4", "it is My Own, not normal chess"),
    "960": ('[Variant "Chess960"]\n[FEN "nrkbbqrn/pppppppp/8/8/8/8/PPPPPPPP/NRKBBQRN w KQkq - 0 1"]\n', "1. e4", "it is Chess960"),
    "letters of another language": ("", "1. e4 e5 2. Sf3 Sc6", "'Sf3' is no move in PGN"),
    "a letter alone": ("", "1. e4 e5 2. Nf3 Nc", "'Nc' is no move in PGN"),
    "words": ("", "1. e4 e5 ?? hello 2. Nf3", "'hello' is no move in PGN"),
    "a null move": ("", "1. e4 -- 2. d4", "move 2, '0000', is illegal after e2e4"),
}  # fmt: skip


@pytest.mark.parametrize("case", PGN)
def test_pgn_games_that_are_not_whole_or_not_normal_chess(case, prepare, capfd, caplog):
    headers, moves, defect = PGN[case]
    good = '[Event "good"]\n\n1. e4 e5 2. Nf3 (2. Ke3 a6) 2... Nc6 1-0\n\n'  # a broken variation is no matter
    pgn = f'{good}[Event "bad"]\n{headers}\n{moves} 1-0\n\n'.encode()
    said = prepare("a.pgn", pgn)
    assert f"\n  - a.pgn, row 2: {defect}" in said and "row 1" not in said
    assert "while parsing" not in caplog.text + capfd.readouterr().err


def test_pgn_of_normal_chess(tmp_path):
    """PGN with the tags of lichess and chess.com, a byte order mark, and DOS line ends is read."""
    start = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
    headers = ['[Variant "Standard"]', f'[Variant "From Position"]\n[SetUp "1"]\n[FEN "{start}"]', '[SetUp "0"]']
    games = [f'[Event "?"]\n{header}\n\n1. f3 {{ [%clk 0:03:00] }} e5 2. g4 $4 Qh4# 0-1\n\n' for header in headers]
    (tmp_path / "a.pgn").write_bytes(b"\xef\xbb\xbf" + "".join(games).replace("\n", "\r\n").encode())
    rows = load_games(str(tmp_path / "a.pgn"), tmp_path / "cache")
    assert rows[:] == {"Moves": [["f2f3", "e7e5", "g2g4", "d8h4"]] * 3, "defect": [""] * 3}


@pytest.mark.parametrize("letters, moves", [
    ("KQRBN", "1. e4 e5 2. ♘f3 ♞c6 3. ♗b5 ♟a6 4. O-O! $1 ♝e7 (4... ♞x) 5. ♖e1+ {Sf3 (} h6"),
    ("KQRBN", "1.♙e4 e5 2.♘\ufe0ef3 ; Sc6 (\n% Sd4\n2...♞c6 {a\n\n% b\n} 3.Bb5 a6 4.0-0 Be7 5.Re1 h6"),
    ("KDTLS", "1. e4 e5 2. Sf3 Sc6 3. Lb5 a6 4. O-O Le7 5. Te1 h6"),
    ("RDTFC", "1. e4 e5 2. Cf3 Cc6 3. Fb5 a6 4. O-O ♝e7 5. Te1 h6"),
    ("KDTLP", "1. e4 e5 2. Pf3 Pc6 3. Lb5 a6 4. O-O Le7 5. Te1 h6"),
])  # fmt: skip
def test_figurines_and_letters(letters, moves, tmp_path):
    """Figurines, and letters of a declared language, are the moves that they say, beside comments and variations."""
    file = tmp_path / "a.pgn"
    file.write_text(f'[Event "♘"]\n[Variant ""]\n[FEN ""]\n\n{moves} *\n', encoding="utf-8")
    (game,) = rules.read_pgn(str(file), letters)
    wanted = "e2e4 e7e5 g1f3 b8c6 f1b5 a7a6 e1g1 f8e7 f1e1 h7h6"
    assert game == {"Moves": wanted.split(), "defect": ""}


@pytest.mark.parametrize("letters, move", [("KDTLS", "e8=D"), ("KDTLS", "e8D"), ("KQRBN", "e8=♕"), ("KQRBN", "e8=Q#")])
def test_promotions(letters, move, tmp_path):
    file = tmp_path / "a.pgn"
    moves = "1. e4 d5 2. e5 d4 3. e6 d3 4. exf7+ Kd7 5. fxg8=" + {"D": "D"}.get(letters[1], "Q")
    file.write_text(f"{moves} h6 1-0\n", encoding="utf-8")
    (game,) = rules.read_pgn(str(file), letters)
    assert game["Moves"][-2:] == ["f7g8q", "h7h6"] and not game["defect"]
    file.write_text(f"1. {move} 1-0\n", encoding="utf-8")
    (game,) = rules.read_pgn(str(file), letters)
    assert "cannot be made" in game["defect"], "it was read as a move"


def test_a_file_that_is_cut(tmp_path):
    """Its last game does not count as whole, wherever the cut is."""
    whole = '[Event "a"]\n\n1. e4 e5 2. Nf3 {[%clk 0:01]} Nc6 1-0\n\n'
    file = tmp_path / "a.pgn"
    for end in range(len(whole) - 5):
        file.write_text(whole * 2 + whole[:end])
        first, second, *rest = rules.read_pgn(str(file))
        assert first == second == {"Moves": ["e2e4", "e7e5", "g1f3", "b8c6"], "defect": ""}
        assert all(game["defect"] or not game["Moves"] for game in rest) and len(rest) == (end > 0), whole[:end]
    file.write_text(whole + whole.replace(" 1-0", ""))
    assert [game["defect"][:35] for game in rules.read_pgn(str(file))] == ["", "it ends before a result, such as 1-"]


def test_castling_has_one_text(prepare, tmp_path):
    """Castling that is written as king takes rook becomes the king's move; moves of rooks and queens stay."""
    begin = "e2e4 e7e5 g1f3 b8c6 f1c4 f8c5"
    short, long = f"{begin} e1h1 g8f6 f1e1 e8h8", "d2d4 d7d5 c1f4 c8f5 b1c3 b8c6 d1d3 d8d6 e1a1 e8a8"
    queen = f"{begin} e1e2 g8f6 e2d3 e8g8 d1e2 a7a6 e2e1 b7b6 e1h1"  # the queen takes no rook: it is illegal
    rook = f"{begin} e1g1 g8f6 f1e1 a7a6 h2h3 e8g8 g1h2 h7h6 e1h1"
    file = tmp_path / "a.jsonl"
    moves = [short, long, rook, queen]
    file.write_text("".join(json.dumps({"Moves": game.split()}) + "\n" for game in moves))
    games = load_games(str(file), tmp_path / "cache")["Moves"][:]
    assert [" ".join(game) for game in games] == [
        f"{begin} e1g1 g8f6 f1e1 e8g8", long.replace("e1a1", "e1c1").replace("e8a8", "e8c8"), rook, queen,
    ]  # fmt: skip
    assert [rules.defect_of_game(game)[:7] for game in games] == ["", "", "", "move 15"]
    file.write_text("".join(json.dumps({"Moves": game}) + "\n" for game in moves))  # moves in one text
    assert load_games(str(file), tmp_path / "cache")["Moves"][:] == games
    assert rules.is_legal(begin.split(), "e1g1") and not rules.is_legal(begin.split(), "e1h1")


TAGS = '[Event "a"]\n[Result "1-0"]\n\n'
WHOLE = ["e2e4", "e7e5", "g1f3", "b8c6"]
CUT = "it ends before a result, such as 1-0 or *; it may be cut"
FEN = '[Event "a"]\n[FEN "8/8/8/4k3/8/8/4P3/4K3 w - - 0 1"]\n\n'
ELSEWHERE = "it begins from another position, 8/8/8/4k3/8/8/4P3/4K3 w - - 0 1"


@pytest.mark.parametrize(
    "pgn, games",
    [
        (f"{TAGS}1. e4 e5 2. Nf3\n\n{TAGS}1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:3], CUT), (WHOLE, "")]),
        (f"{TAGS}1. e4 e5 2. Nf3 Nc6 1-0\n" * 2, [(WHOLE, "")] * 2),
        (f"{TAGS}1. e4 e5 2. Nf3 Nc6 1-0" * 2, [(WHOLE, "")] * 2),
        (f"\ufeff{TAGS}1. e4 e5 2. Nf3 Nc6 1-0\r\n" * 2, [(WHOLE, "")] * 2),
        (f"{TAGS}1. e4 e5[Event \"b\"]\n\n1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:2], CUT), (WHOLE, "")]),
        (f"{TAGS}1. e4 {{[%clk 0:0\n\n{TAGS}1. e4 e5 {{x}} 2. Nf3 Nc6 1-0\n", [(WHOLE[:1], CUT), (WHOLE, "")]),
        (f"{TAGS}1. e4 (1. d4 d5\n{TAGS}1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:1], CUT), (WHOLE, "")]),
        ("1. e4 e5 2. Nf3 Nc6 1-0\n1. e4 e5 *\n", [(WHOLE, ""), (WHOLE[:2], "")]),
        ("1. e4 e5 1-0 2. Nf3 Nc6 1-0\n", [(WHOLE, "'2.' follows its result; begin each game on a line of its own")]),
        (f"{TAGS}1.e4 e5 ...2.Nf3 Nc6*", [(WHOLE, "")]),
        (f'{TAGS}1. e4 {{see [Event "b"] there}} e5 2. Nf3 Nc6 1-0\n', [(WHOLE, "")]),
        (f"{TAGS}1. e4 ...e5 2.Nf3 2…Nc6 {{(}} 0-1 $1 {{done}}\n", [(WHOLE, "")]),
        (f"{TAGS}\n \r\n\n1. e4 e5 2. Nf3 Nc6 1-0\n\n\n\n" * 2, [(WHOLE, "")] * 2),
        (f"{TAGS}{{A\n\ngame}}\n\n1. e4 e5\n\n\n2. Nf3 Nc6\n\n1-0\n\n" * 2, [(WHOLE, "")] * 2),
        (f"{FEN}\n\n1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:1], ELSEWHERE)]),
        (f"{FEN}{{A game}}\n\n1. e4 e5 2. Nf3 Nc6 1-0\n\n{TAGS}1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:1], ELSEWHERE), (WHOLE, "")]),
        (f"{FEN}\n\n{TAGS}1. e4 e5 2. Nf3 Nc6 1-0\n", [([], CUT), (WHOLE, "")]),
        (f"{FEN}[Site \"b\"]\n\n1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:1], ELSEWHERE)]),
        ("1. e4 e5 2. Nf3\n\n1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:3], CUT), (WHOLE, "")]),
        (f"{TAGS}1. e4 e5\n1. e4 e5 2. Nf3 Nc6 1-0\n", [(WHOLE[:2], CUT), (WHOLE, "")]),
        (f"{TAGS}1. e4 (\n1. d4 d5)\n\n1... e5 2. Nf3 Nc6 1-0\n", [(WHOLE, "")]),
    ],
)  # fmt: skip
def test_where_games_end(pgn, games, tmp_path):
    """A game that is cut is said wherever it stands; blank lines between games may be missing, and others be there."""
    (tmp_path / "a.pgn").write_bytes(pgn.encode())
    found = rules.read_pgn(str(tmp_path / "a.pgn"))
    assert [(game["Moves"], game["defect"]) for game in found] == games


@pytest.mark.parametrize("tag", [
    '[fen "{}"]', "[FEN '{}']", "[FEN {}]", '[ FEN "{}"]', '[Event "a"] [FEN "{}"]', '[FEN "{}"] ; a comment', '[FEN "{}"',
])  # fmt: skip
def test_the_position_of_a_tag_that_is_written_otherwise(tag, tmp_path):
    """python-chess skips tags that it cannot read: the game would be read from the start."""
    (tmp_path / "a.pgn").write_text(f'{tag.format("4k3/8/8/8/8/8/4P3/4K3 w - - 0 1")}\n[Event "a"]\n\n1. e4 1-0\n')
    (game,) = rules.read_pgn(str(tmp_path / "a.pgn"))
    assert game["defect"] == "it begins from another position, 4k3/8/8/8/8/8/4P3/4K3 w - - 0 1"


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.999999])
def test_the_share_that_would_do(share):
    """Where a side is empty, the message gives a share that leaves rows on both, in few digits; alike texts have none."""
    for number in range(40):
        texts = [f"{number} {n}" for n in range(2 + number % 5)]
        hashes = [text_hash(text) for text in texts]
        found = float(re.fullmatch(rf"give --heldout_share (\S+) \(it is {share}\)", other_share(hashes, share))[1])
        assert len({falls_under(text, found) for text in texts}) == 2 and len(str(found)) < 8
    assert "--heldout_share 0." not in other_share([7, 7], share) and "divides" in other_share([], share)


@pytest.mark.parametrize("letters", ["KDTL", "KDTLL", "kdtls"])
def test_letters_of_the_pieces(letters):
    with pytest.raises(ConfigError, match=f"--piece_letters '{letters}' must be five"):
        parse(shipped.load(ROOT / "recipes/chess.py").Args, ["--piece_letters", letters], world_size=1)


def pairs_of(file, cache) -> list[tuple[str, list[str], str]]:
    rows = text_columns(read_files([str(file)], cache), ("s", "t"), str(file))
    return list(pairs_in(rows[:], ("s", "t")))


def test_pairs_of_mixed_types(tmp_path):
    """Each bad pair is reported with its row; good pairs are unchanged."""
    pairs = [("a", "b"), (5, "b"), ("a", ["b"]), ({"x": 1}, None), ("a", ["b", 7]), ("c", "d")]
    rows = [{"s": source, "t": target} for source, target in pairs]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = pairs_of(file, tmp_path / "cache")
    assert [defect for _, _, defect in pairs] == [
        "", "its source is no text, but 5", "", "its source is no text, but {'x': 1}", "its target is no text, but 7", "",
    ]  # fmt: skip
    assert pairs[0][:2] == ("a", ["b"]) and pairs[2][:2] == ("a", ["b"]) and pairs[5][:2] == ("c", ["d"])


SFT = [
    (b'{"text": "a"}\n{"text": null}\n{"text": null}\n', ", row 2: 'text' is null, as in 2 of 3 rows"),
    (b'{"text": 5}\n{"text": 6}\n', ": 'text' holds int64, not texts or messages; write it as text"),
    (b'{"text": "a"}\n{"text": 5}\n', ", row 2: 'text' holds 5; give texts in all rows"),
    (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', ", row 2: 'completion' is null, as in 1 of 2 rows"),
]


@pytest.mark.parametrize("content, message", SFT)
def test_rows_to_fine_tune_on(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    sft = shipped.load(ROOT / "recipes/sft.py")
    argv = ["--model_name_or_path", "none", "--train_files", str(file), "--heldout_share", "0.5"]
    args = parse(sft.Args, argv, world_size=1)
    with pytest.raises(DataError) as error:
        load_sides(args, new_word_tokenizer(["a"]), set())
    assert str(error.value).startswith(f"{file}{message}")


def test_what_a_rank_cannot_read_ends_all(monkeypatch):
    """The first process of a machine tells the others, which have not begun."""
    read = []

    def on_rank(local_rank: int, others: list) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(ranks, "on_all_ranks", lambda error: [error, *others])
        ranks.local_main_process_first(lambda: read.append(local_rank) or json.loads(str(local_rank)))

    on_rank(0, [None])
    on_rank(1, [None])
    assert read == [0, 1]
    refuses("broken", on_rank, 1, [DataError("broken")], error=DataError)
    assert read == [0, 1]
    monkeypatch.setattr(json, "loads", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        on_rank(0, [None])


# Tests with arbitrary content.

MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(MANY, max_examples=10)  # datasets takes about 50 ms for a file
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["e2e4", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["Moves", "text", "s"]), inner, max_size=3)
    ),
    max_leaves=6,
)
LINE = st.builds(lambda v: json.dumps(v).encode(), VALUE) | st.binary(max_size=12) | st.just(GAME.strip())
LINES = st.lists(
    st.builds(lambda v: json.dumps({"Moves": v, "text": v, "s": v, "t": "x"}).encode(), VALUE) | LINE, max_size=5
).map(b"\n".join)


def only_our_errors(read) -> None:
    try:
        read()
    except (ConfigError, DataError) as error:
        assert str(error)


@MANY
@given(content=LINES | st.binary(max_size=60))
def test_any_shard_of_lines(content, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)

    def read() -> None:
        for document in read_documents(str(file), "text", 0, 1, lambda: None):
            text = text_of(str(file), *document, "text")
            assert text is None or text.encode() is not None

    only_our_errors(read)


@FEW
@given(content=LINES)
def test_any_file_of_games_and_pairs(content, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    cache = tmp_path / str(time.monotonic_ns())

    def read_games() -> None:
        for game in load_games(str(file), cache):
            assert game["defect"] or all(isinstance(move, str) for move in game["Moves"])

    def read_pairs() -> None:
        for source, references, defect in pairs_of(file, cache):
            assert defect or (source.strip() and all(text.strip() for text in references))

    only_our_errors(read_games)
    only_our_errors(read_pairs)


@MANY
@given(
    content=st.lists(
        st.sampled_from(
            [
                '[Event "x"]\n', '[FEN "8/8 w"]\n', '[Variant "x"]\n', "1. e4 ", "e5 ", "Ke3 ", "(", ")", "{", "}",
                "\n\n", "1-0\n\n", "--", "\0", "é", "♘f3 ", "Sf3 ", ";", "%",
            ]
        )
    ).map("".join)
)  # fmt: skip
def test_any_pgn(content, tmp_path):
    file = tmp_path / "a.pgn"
    file.write_text(content)
    for game in rules.read_pgn(str(file)):
        assert game["defect"] or rules.legal_part(game["Moves"]) == game["Moves"] or "0000" in game["Moves"]
