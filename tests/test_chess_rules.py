"""Tests of legality, vocabulary, positions and the metric, on games that one can check by eye."""

import random

import evaluate
import pyarrow.parquet as pq
import pytest
from helpers import ROOT

from accelerate_recipes.models.tokenizers import new_word_tokenizer
from chess_games import rules
from chess_games.games import tokenize_games

FOOLS_MATE = ["f2f3", "e7e5", "g2g4", "d8h4"]


@pytest.fixture(scope="module")
def games() -> list[list[str]]:
    table = pq.read_table(ROOT / "data/chess/games_20k.parquet", columns=["Moves"])
    return table.slice(0, 300).column("Moves").to_pylist()


def test_vocabulary_holds_every_move(games):
    moves = rules.all_uci_moves()
    assert len(moves) == len(set(moves)) == 1968
    assert {"e2e4", "g1f3", "e1g1", "e7e8q", "a2b1n", "h7h8r"} <= set(moves)
    assert "e7e8" in moves and "e2e2" not in moves and "a1b4" not in moves
    assert {move for game in games for move in game} <= set(moves)


def test_one_token_a_move(games):
    tokenizer = new_word_tokenizer(rules.all_uci_moves())
    ids = tokenizer(" ".join(games[0]), add_special_tokens=False)["input_ids"]
    assert len(ids) == len(games[0]) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids).split() == games[0]


def test_illegal_games_are_described(games):
    assert [rules.defect_of_game(game) for game in games] == [""] * len(games)
    assert rules.defect_of_game([*FOOLS_MATE, "e2e4"]) == "move 5, 'e2e4', is illegal after e7e5 g2g4 d8h4"
    assert rules.defect_of_game(["e2e5"]) == "move 1, 'e2e5', is illegal after the start"
    assert rules.defect_of_game(["rubbish"]).startswith("move 1, 'rubbish', is illegal")
    assert rules.defect_of_game([]) == "it has no moves"


@pytest.mark.parametrize("prefix, move, legal", [
    ([], "e2e4", True),
    ([], "e2e5", False),
    (["e2e4"], "e4e5", False),  # not White's turn
    (FOOLS_MATE, "e1f2", False),  # mate
    (["e2e4", "a7a6", "e4e5", "d7d5"], "e5d6", True),  # en passant
    (["e2e4", "a7a6", "e4e5", "d7d5", "h2h3", "h7h6"], "e5d6", False),  # too late
    (["g1f3", "g8f6", "g2g3", "g7g6", "f1g2", "f8g7"], "e1g1", True),  # castling
    ([], "", False),
    ([], "0000", False),
])  # fmt: skip
def test_legality(prefix, move, legal):
    assert rules.is_legal(prefix, move) == legal


def test_positions_cover_the_phases(games):
    positions = rules.sample_positions(games, 90, seed=0)
    assert [p["phase"] for p in positions] == ["opening"] * 30 + ["middlegame"] * 30 + ["endgame"] * 30
    for position in positions:
        assert rules.phase_of(len(position["prefix"])) == position["phase"]
        assert rules.is_legal(position["prefix"], position["move"])
    assert positions == rules.sample_positions(games, 90, seed=0)
    assert positions != rules.sample_positions(games, 90, seed=1)


def test_baseline():
    followers = rules.most_frequent_followers([["e2e4", "e7e5"], ["e2e4", "c7c5"], ["e2e4", "c7c5"], ["d2d4"]])
    assert followers == {"": "e2e4", "e2e4": "c7c5"}


def test_metric():
    metric = evaluate.load(str(ROOT / "recipes/metrics/chess_moves.py"), keep_in_memory=True)
    found = metric.compute(
        predictions=["e2e4", "e2e5", "d8h4", "e1f2"],
        references=["e2e4", "e2e4", "a7a6", "a2a3"],
        prefixes=["", "", "f2f3 e7e5 g2g4", " ".join(FOOLS_MATE)],
        phases=["opening", "opening", "middlegame", "middlegame"],
        seen=[True, False, False, True],
    )
    assert found == {
        "legal_move_rate": 0.5,
        "next_move_accuracy": 0.25,
        "legal_move_rate_opening": 0.5,
        "next_move_accuracy_opening": 0.5,
        "legal_move_rate_middlegame": 0.5,
        "next_move_accuracy_middlegame": 0.0,
        "legal_move_rate_unseen": 0.5,
        "next_move_accuracy_unseen": 0.0,
    }


def test_split_is_by_game_whatever_the_order(games, tmp_path):
    from datasets import Dataset

    tokenizer = new_word_tokenizer(rules.all_uci_moves())

    def heldout(games: list[list[str]], name: str) -> set[str]:
        table = Dataset.from_dict({"Moves": games, "defect": [""] * len(games)})
        rows = tokenize_games(table, tokenizer, 0.1, "games", tmp_path / f"{name}.arrow")
        return {" ".join(row["Moves"]) for row in rows if row["heldout"]}

    shuffled = random.Random(0).sample(games, len(games))
    held = heldout(games, "a")
    assert held == heldout(shuffled + games[:50], "b")
    assert 10 < len(held) < 60


def test_drawing():
    text = rules.draw_game(FOOLS_MATE)
    assert "1. f3 e5 2. g4 Qh4#" in text and "♛" in text
