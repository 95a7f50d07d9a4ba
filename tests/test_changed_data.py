"""Tests of changed data: they are prepared anew, and a run that began on other data does not resume. Also of patient ranks."""

import json
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import trl
from datasets import load_from_disk
from helpers import write_rows
from huggingface_hub import constants
from streaming import tokens_of

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.conversations import supervised
from accelerate_recipes.conversations.trained_pairs import chosen_rows
from accelerate_recipes.data import prepared
from accelerate_recipes.data.prepared import checksum_of_rows
from accelerate_recipes.data.rows import make_train_loader
from accelerate_recipes.data.shards import shards_version
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life.watch import SECONDS_TO_MISS, Watch
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer, new_word_tokenizer
from accelerate_recipes.text.pretraining import TextShards
from accelerate_recipes.text.text_pairs import PairArgs, prepare_pairs
from chess_games.games import GamesArgs, prepare_games


def test_a_tokenizer_with_other_special_tokens_makes_its_own_rows(tmp_path):
    """A base and its model of answers share a tokenizer.json. They make rows of their own, of games and of pairs."""
    moves = [("e2e4", second) for second in ("e7e5", "c7c5", "e7e6", "c7c6", "d7d5", "g8f6", "g7g6", "b8c6")]
    games, pairs = tmp_path / "games.jsonl", tmp_path / "pairs.jsonl"
    write_rows(games, ({"Moves": game} for game in moves))
    write_rows(pairs, ({"source": second, "target": first} for first, second in moves))
    others = GamesArgs(train_files=[str(games)], heldout_share=0.5, num_positions=3, data_cache_dir=str(tmp_path))
    of_pairs = PairArgs(
        train_files=[str(pairs)], heldout_share=0.5, source_column="source", target_column="target", dataset_config="",
        data_cache_dir=str(tmp_path),
    )  # fmt: skip
    words = sorted({move for game in moves for move in game})
    base, answers, other_begin = (new_word_tokenizer(words) for _ in range(3))
    answers.eos_token, other_begin.bos_token = answers.pad_token, answers.pad_token
    for tokenizer in (base, answers, other_begin):
        assert tokenizer.backend_tokenizer.to_str() == base.backend_tokenizer.to_str()
        rows = load_from_disk(prepare_games(tokenizer, others, max_length=8, seed=0) / "train")["input_ids"]
        ends = {(row[0], row[-1]) for row in rows}
        assert ends == {(tokenizer.bos_token_id, tokenizer.eos_token_id)}
    ending, other_end = (new_bpe_tokenizer(["e2e4"], 300, "$A </s>") for _ in range(2))
    assert prepare_pairs(ending, of_pairs).is_dir()
    other_end.eos_token = other_end.pad_token
    with pytest.raises(ConfigError, match="does not put its end token behind a text"):
        prepare_pairs(other_end, of_pairs)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("how", ["bfd", "bfd_split", "wrapped", "keep_start", "keep_end", ""])
def test_rows_of_pieces_are_those_of_a_table(how, shuffled):
    """They are trl's, packed in parts of 1,000 documents, and their checksum is that of tables in earlier checkpoints."""
    draw, longest = np.random.default_rng(1), 20
    ids = [draw.integers(2, 99, size=size).astype(np.int32) for size in draw.integers(1, 50, 2500)]
    labels = [np.where(draw.random(len(row)) < 0.1, row, np.int64(IGNORE_INDEX)) for row in ids]
    labels[7] = np.array(
        [*ids[7][:1], *[IGNORE_INDEX] * len(ids[7][1:])]
    )  # the first token is a target, though of no loss
    columns = {"input_ids": ids, "labels": labels, "text": [str(number) for number in range(2500)]}
    documents = datasets.Dataset.from_dict(columns)
    args = SimpleNamespace(seed=3, shuffle_dataset=shuffled, packing=how not in ("", "keep_start", "keep_end"))
    args.max_length, args.truncation_mode, args.packing_strategy = how and longest, how, how
    rows = supervised.cut_or_packed(args, "train", documents)
    if args.packing:
        table = documents.remove_columns("text")
        table = trl.pack_dataset(table.shuffle(seed=3) if shuffled else table, longest, how)
    else:
        part = {"keep_start": slice(longest), "keep_end": slice(-longest, None), "": slice(None)}[how]
        columns |= {name: [row[part] for row in columns[name]] for name in ("input_ids", "labels")}
        table = datasets.Dataset.from_dict(columns)
        if how:
            table = chosen_rows(table, np.array([(row != IGNORE_INDEX).any() for row in columns["labels"]]))
    table = table.shuffle(seed=3) if shuffled else table
    names = [name for name in table.column_names if name != "text"]
    assert rows.column_names == names and [*rows] == table.select_columns(names).to_list()
    assert rows.lengths.tolist() == [*map(len, table["input_ids"])]
    assert checksum_of_rows(rows) == checksum_of_rows(table, table.column_names)


def test_checksum_of_rows():
    """It depends on each value, at any depth, and on the order, also of rows that only point to a table; not on chunks."""
    first, second = {"role": "user", "content": "a b"}, {"role": "tool", "content": None}
    row = {"messages": [first, second], "ids": [1, 2], "n": 1, "x": 0.5, "ok": True, "at": datetime(2026, 1, 2)}
    changes = [
        {"at": datetime(2026, 1, 3)}, {"n": 2}, {"x": 0.25}, {"ok": False}, {"ids": [1, 3]}, {"ids": []},
        {"messages": [first]}, {"messages": [first | {"role": "bot"}, second]}, {"messages": [first | {"content": "ab "}, second]},
    ]  # fmt: skip
    rows = [row, *(row | change for change in changes)]

    def checksum(rows: datasets.Dataset) -> str:
        return checksum_of_rows(rows, rows.column_names)

    table = datasets.Dataset.from_list(rows)
    orders = ([1, 0, *range(2, 10)], [*range(9)], [*range(10), 0])
    tables = [table, table.shuffle(seed=0), *map(table.select, orders), datasets.Dataset.from_list(rows[::-1])]
    tables += [datasets.Dataset.from_list([each]) for each in rows]
    assert len({*map(checksum, tables)}) == 16
    halves = [table.select(range(3)), table.select(range(3, 10))]
    assert checksum(table) == checksum(datasets.concatenate_datasets(halves))


def test_rows_of_a_checkpoint():
    """A resume with other rows is refused; with a checkpoint of data without a checksum it is not."""
    args = TrainArgs(total_batch_size=2, per_device_train_batch_size=2)
    state = json.loads(json.dumps(make_train_loader([1, 2, 3], args, 0, 1, content="abc").state()))
    make_train_loader([1, 2, 3], args, 0, 1, content="abc").start_at(1, [state])
    make_train_loader([1, 2, 3], args, 0, 1, content="abc").start_at(1, [{}])
    with pytest.raises(ConfigError, match="their checksum is abd, was abc;"):
        make_train_loader([1, 2, 3], args, 0, 1, content="abd").start_at(1, [state])


def test_shards_of_a_checkpoint(tmp_path, monkeypatch):
    """Sizes of files (text or tokens) and the commit on the Hub are compared; data of different kinds are accepted."""
    tokenizer = new_word_tokenizer(["a", "b"])
    args = TrainArgs(total_batch_size=2, per_device_train_batch_size=2)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a b"}\n')

    def state_of(source) -> dict:
        return json.loads(json.dumps(StreamLoader([source], args, 0, 1, max_length=4).state()))

    def resume(source, state: dict) -> None:
        StreamLoader([source], args, 0, 1, max_length=4).start_at(0, [state])

    text = state_of(TextShards([str(file)], tokenizer))
    tokens = state_of(tokens_of(tmp_path / "tokens", tokenizer, lambda: [str(file)], {}))
    resume(TextShards([str(file)], tokenizer), text)
    resume(TextShards([str(file)], tokenizer), tokens)  # the same rows, from tokens
    file.write_text('{"text": "a b a"}\n')
    with pytest.raises(ConfigError, match=r"the data changed .*: sizes .* now, .* then; put them back"):
        resume(TextShards([str(file)], tokenizer), text)
    with pytest.raises(ConfigError, match="the data changed since the checkpoint: tokens"):
        resume(tokens_of(tmp_path / "others", tokenizer, lambda: [str(file)], {}), tokens)

    hub_url = "https://hub.example.org"
    monkeypatch.setattr(constants, "ENDPOINT", hub_url)
    urls = [f"{hub_url}/datasets/allenai/c4/resolve/{commit}/en/a.jsonl" for commit in ("1a", "2b")]
    assert [shards_version([url]) for url in urls] == [{"commit": "1a"}, {"commit": "2b"}]
    assert shards_version(["https://example.org/a.jsonl"]) == {}
    first, second = (TextShards([url], tokenizer) for url in urls)
    with pytest.raises(ConfigError, match=r"commit 2b now, 1a then.*--dataset_revision"):
        resume(second, state_of(first))
    resume(TextShards([str(file)], tokenizer), state_of(first))  # a copy on the disk


# The watch


class Over(Exception):
    """The hundredth second has come, or the watch gave up."""


@pytest.fixture
def run_watch(tmp_path, monkeypatch):
    """Run the loop of a Watch of rank 0 of 2 for 100 seconds, which pass at once; return when it gave up, and why."""

    def run(sign_of_other, progress=None) -> tuple[int, str] | None:
        now, ends = 0, []

        class Clock:
            @staticmethod
            def sleep(seconds: float) -> None:
                nonlocal now
                now += 1
                if now > 100:
                    raise Over

        class Store:
            def check(self, keys):
                return False

            def compare_set(self, key, old, new):
                return new.encode()

            def set(self, key, value):
                self.own = json.loads(value)

        def end(message: str) -> None:
            ends.append((now, message))
            raise Over

        def signs() -> dict:
            other = {"host": "b", "at": "x", "beat": now, "gets_on": False}
            return {0: watch.store.own, 1: other | sign_of_other(now)}

        monkeypatch.setattr("accelerate_recipes.life.watch.time", Clock)
        with monkeypatch.context() as patch:
            patch.setattr("accelerate_recipes.life.watch.threading.Thread", Mock())  # the loop runs here
            watch = Watch(tmp_path, on_failure=print)
        watch.store, watch.world_size = Store(), 2
        monkeypatch.setattr(watch, "_end", end)
        monkeypatch.setattr(watch, "_signs", signs)
        watch.expect("step 1", 5, (lambda: progress(now)) if progress else None)
        with pytest.raises(Over):
            watch._run()
        return ends[0] if ends else None

    return run


def test_the_watch_is_patient_with_a_rank_that_waits_for_data(run_watch):
    late = 5 + SECONDS_TO_MISS
    assert run_watch(lambda now: {})[0] == late
    assert run_watch(lambda now: {"gets_on": True}) is None
    # The watch is patient until the other rank is late itself, or dead.
    for sign in (lambda now: {"gets_on": now < 40}, lambda now: {"gets_on": True, "beat": min(now, 40)}):
        found, message = run_watch(sign)
        assert 40 <= found <= 40 + 3 * SECONDS_TO_MISS and "step 1 has not ended" in message


def test_the_watch_begins_anew_with_each_retry(run_watch):
    late = 5 + SECONDS_TO_MISS
    assert run_watch(lambda now: {}, progress=lambda now: 0)[0] in (late, late + 1)
    assert run_watch(lambda now: {}, progress=lambda now: now // 4) is None
    found, _ = run_watch(lambda now: {}, progress=lambda now: min(now, 40) // 4)
    assert 40 + late <= found <= 42 + late


def test_machines_with_other_files_are_refused(monkeypatch, tmp_path):
    """Ranks of one machine wait for its first; two machines train on one set of rows, and at one commit of a model."""
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    content = checksum_of_rows(rows, ["input_ids"])
    others = [content, None]
    monkeypatch.setattr(prepared, "on_all_ranks", lambda value: [value, *others])
    assert prepared.content_of(rows, ["input_ids"]) == content
    others[1] = "another"
    said = f"the checksum of the rows is {content} .* rank 0, and another .* rank 2"
    with pytest.raises(ConfigError, match=said):
        prepared.content_of(rows, ["input_ids"])
    with pytest.raises(ConfigError, match=r"the key of the prepared data is .* on the machine of rank 0"):
        prepared.cached(tmp_path, {"a": 1}, lambda *_: pytest.fail("nothing is prepared"))
