"""Tests of packing, of the order of rows, and of data that changed: they are prepared anew, or a run does not resume. Also of patient ranks."""

import errno
import itertools
import json
import math
import shutil
from collections import Counter
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, load_from_disk
from helpers import refuses, write_rows
from huggingface_hub import constants
from streaming import tokens_of
from tiny import tiny_config

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.conversations import supervised
from accelerate_recipes.conversations.trained_pairs import chosen_rows
from accelerate_recipes.data import prepared
from accelerate_recipes.data.packing import PackedRows, pack, pack_documents
from accelerate_recipes.data.prepared import cached, checksum_of_rows
from accelerate_recipes.data.rows import StepOrder, make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.data.shards import shards_version
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life.watch import SECONDS_TO_MISS, Watch
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer, new_word_tokenizer
from accelerate_recipes.models.weights import initialize
from accelerate_recipes.text.pretraining import TextShards
from accelerate_recipes.text.text_pairs import PairArgs, prepare_pairs
from chess_games.games import GamesArgs, prepare_games


def documents(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(4, 50, size=n).tolist() for n in generator.integers(1, longest, size=num)]


@pytest.fixture
def packed(tmp_path):
    def build(texts: list[list[int]], max_length: int) -> Dataset:
        return pack_documents(Dataset.from_dict({"input_ids": texts}), max_length, tmp_path / "rows.arrow")

    return build


def test_pack_is_best_fit():
    """The result equals a search of all rows: longest first, each into the row where least is left, the latest of those."""
    lengths = np.random.default_rng(2).integers(1, 20, size=300).tolist()
    pieces = [(d, start, min(start + 16, n)) for d, n in enumerate(lengths) for start in range(0, n, 16)]
    rows, left = [], {}
    for piece in sorted(pieces, key=lambda piece: -(piece[2] - piece[1])):
        length = piece[2] - piece[1]
        row = min((row for row in left if left[row] >= length), key=lambda row: left[row], default=len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        left = {row: left.pop(row, 16) - length} | left  # the latest that changed comes first
    assert pack(lengths, max_length=16) == rows


def test_rows_hold_the_documents(packed):
    texts = documents(50, 40)
    rows = packed(texts, 16)
    pieces = []
    for row in rows:
        cuts = np.cumsum([0, *row["lengths"]])
        pieces += [tuple(row["input_ids"][a:b]) for a, b in itertools.pairwise(cuts)]
    wanted = [tuple(text[i : i + 16]) for text in texts for i in range(0, len(text), 16)]
    assert Counter(pieces) == Counter(wanted)


def test_packed_losses_are_those_of_the_documents_alone(packed):
    """Losses agree token for token: neither attention nor positions cross from one document to the next."""
    model = new_model(tiny_config(max_position_embeddings=64), "sdpa")
    initialize(model, 0, "cpu").eval()
    texts = documents(30, 30)
    rows = PackedRows(packed(texts, 64), 64, pad_token_id=0, document_mask=True)
    batch = torch.utils.data.default_collate([rows[i] for i in range(len(rows))])

    def token_losses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        return losses[batch["labels"][:, 1:] != IGNORE_INDEX]

    def alone(text: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([text])
        return {"input_ids": ids, "position_ids": torch.arange(len(text))[None], "labels": ids}

    with torch.no_grad():
        together = token_losses(batch)
        apart = torch.cat([token_losses(alone(text)) for text in texts])
        torch.testing.assert_close(together.sort().values, apart.sort().values, rtol=1e-5, atol=1e-5)
        assert next_token_loss(model, batch).item() == pytest.approx(apart.sum().item(), rel=1e-5)
        assert count_next_tokens(batch).item() == len(apart)
        # The mask matters: without it the losses differ.
        batch["position_ids"] = torch.arange(64).expand_as(batch["position_ids"])
        assert (token_losses(batch).sum() - apart.sum()).abs() > 1e-2


def test_padding_share_and_attended_length(packed):
    rows = PackedRows(packed([[5] * 10, [6] * 6], 20), 20, 0, document_mask=True)
    assert rows.padding_share == pytest.approx(4 / 20)
    assert rows.attended_length == pytest.approx((10 * 10 + 6 * 6) / 16)


@pytest.mark.parametrize("num_rows", [27, 5, 8, 800, 1003])
def test_every_row_once_in_each_epoch_on_any_number_of_ranks(num_rows):
    """A step has the same rows on any number of ranks, also grouped by length, else its gradients would differ with the length."""
    args = TrainArgs(total_batch_size=8, per_device_train_batch_size=2, num_train_epochs=3)
    lengths, found = np.random.default_rng(0).integers(1, 100, num_rows), []
    for world_size, by_length in itertools.product((1, 2, 4), (False, True)):
        grouped = lengths if by_length else None
        orders = [iter(StepOrder(num_rows, args, rank, world_size, grouped)) for rank in range(world_size)]
        turns = [order for _ in range(args.accumulation_steps(world_size)) for order in orders]
        steps = [[row for order in turns for row in next(order)] for _ in range(num_steps(args, num_rows))]
        found.append([sorted(step) for step in steps])
        if by_length:  # what the ranks have at one time is of similar length
            in_turn = [[lengths[row] for row in step if row >= 0] for step in steps]
            assert in_turn == [sorted(step) for step in in_turn]
    assert all(steps == found[0] for steps in found)
    seen = Counter(dict.fromkeys(range(num_rows), 0))
    for step in found[0]:  # no row comes again before all have come
        seen.update(row for row in step if row >= 0)
        assert max(seen.values()) == math.ceil(seen.total() / num_rows)
    assert {*seen.values()} == {3} and sum(step.count(-1) for step in found[0]) == 8 * len(found[0]) - 3 * num_rows
    whole = [row for rows in map(StepOrder(num_rows, args, 0, 1).rows, range(len(found[0]))) for row in rows]
    assert whole[:num_rows] != whole[num_rows : 2 * num_rows], "an epoch has an order of its own"


BY_LENGTH = ["plain", "by length"]


@pytest.mark.parametrize("lengths", [None, np.arange(4)], ids=BY_LENGTH)
def test_the_order_ends_with_the_last_row(lengths):
    """So nobody waits for a row for ever, where a rank has fewer rows than are shown, or none."""
    args = TrainArgs(total_batch_size=8, per_device_train_batch_size=2, num_train_epochs=1)
    for world_size in (2, 4):
        for rank in range(world_size):
            loader = make_train_loader(range(4), args, rank, world_size, lengths, collate_fn=list)
            batches = list(itertools.islice(loader.batch_sampler, 100))
            assert len(batches) == args.accumulation_steps(world_size), "one step"
            mine = [row for batch in batches for row in batch if row >= 0]
            assert loader.first_batch(5) == mine and (mine or rank)


@pytest.mark.parametrize("lengths", [None, np.arange(10)], ids=BY_LENGTH)
def test_starting_later_is_the_same_order(lengths):
    args = TrainArgs(total_batch_size=4, per_device_train_batch_size=4, max_steps=100)
    order, later = StepOrder(10, args, 0, 1, lengths), StepOrder(10, args, 0, 1, lengths)
    later.start_step = 7
    whole = [micro for micro, _ in zip(order, range(12), strict=False)]
    assert [micro for micro, _ in zip(later, range(5), strict=False)] == whole[7:]


@pytest.mark.parametrize("num_rows, world_size, size", [(10, 4, 2), (3, 4, 2), (16, 2, 4), (1, 1, 8)])
def test_evaluation_reads_every_row_once_in_equally_many_batches(num_rows, world_size, size):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return num_rows

        def __getitem__(self, index):
            return index

    args = TrainArgs(per_device_eval_batch_size=size)
    batches = [list(make_eval_loader(Rows(), args, rank, world_size)) for rank in range(world_size)]
    assert len({len(mine) for mine in batches}) == 1
    rows = [row for mine in batches for batch in mine for row in batch.tolist()]
    assert sorted(row for row in rows if row >= 0) == list(range(num_rows))
    # By length too; and the batches of the ranks are alike.
    lengths = np.random.default_rng(0).permutation(num_rows)
    batches = [list(make_eval_loader(Rows(), args, rank, world_size, lengths=lengths)) for rank in range(world_size)]
    in_turn = [row for step in zip(*batches, strict=True) for row in torch.stack(step, 1).flatten().tolist()]
    assert in_turn == [*np.argsort(lengths), *[-1] * (len(rows) - num_rows)]


def test_loaders_leave_the_global_generator_alone():
    args = TrainArgs(total_batch_size=2, per_device_train_batch_size=2, max_steps=1)
    before = torch.get_rng_state()
    next(iter(make_train_loader([1, 2, 3], args, 0, 1)))
    next(iter(make_eval_loader([1, 2, 3], args, 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_cache_is_built_once_and_failure_leaves_nothing(tmp_path, monkeypatch):
    built = []

    def build(folder, tmp):
        built.append(folder)
        (tmp / "y").write_text("not kept")
        (folder / "x").write_text("1")
        return {"n": 1}

    first = cached(tmp_path / "c", {"a": 1}, build)
    assert {file.name for file in first.iterdir()} == {"x", "facts.json", "key.json"}
    assert json.loads((first / "facts.json").read_text()) == {"n": 1}
    assert cached(tmp_path / "c", {"a": 1}, build) == first
    with monkeypatch.context() as other:
        other.setattr(prepared, "is_first_of_machine", lambda: False)
        assert cached(tmp_path / "c", {"a": 1}, build) == first
    assert cached(tmp_path / "c", {"a": 2}, build) != first
    assert len(built) == 2 and len(first.name) == 16

    def fail(folder, tmp):
        (folder / "x").write_text("1")
        raise ValueError("no")

    with pytest.raises(ValueError):
        cached(tmp_path / "d", {}, fail)
    assert not (tmp_path / "d").exists()

    def fill_the_disk(folder, tmp):
        raise OSError(errno.ENOSPC, "Error writing bytes to file")  # as by pyarrow, without a name

    with pytest.raises(OSError, match=f"to file: '{tmp_path}/f/"):
        cached(tmp_path / "f", {}, fill_the_disk)

    def build_when_another_node_has(folder, tmp):
        shutil.copytree(first, folder.with_name(folder.name.split(".")[0]))
        (folder / "x").write_text("2")
        return {}

    theirs = cached(tmp_path / "e", {}, build_when_another_node_has)
    assert (theirs / "x").read_text() == "1" and list((tmp_path / "e").iterdir()) == [theirs]


@pytest.mark.parametrize("epochs, steps", [(1.0, 25), (0.5, 13), (0.01, 1), (2.5, 63)])
def test_number_of_steps(epochs, steps):
    assert num_steps(TrainArgs(total_batch_size=4, num_train_epochs=epochs), 100) == steps
    refuses(r"--num_train_epochs 1e-09 of 100 rows", num_steps, TrainArgs(num_train_epochs=1e-9), 100)


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
    refuses("does not put its end token behind a text", prepare_pairs, other_end, of_pairs)


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
    refuses(r"commit 2b now, 1a then.*--dataset_revision", resume, second, state_of(first))
    resume(TextShards([str(file)], tokenizer), state_of(first))  # a copy on the disk


# The watch


class Over(Exception):
    """The hundredth second has come, or the watch gave up."""


@pytest.fixture
def run_watch(tmp_path, monkeypatch):
    """Run the loop of a Watch of rank 0 of 2 for 100 seconds, which pass at once; return when it gave up, and why."""

    def run(sign_of_other, progress=None) -> tuple[int, str] | None:
        now, own, ends = 0, {}, []

        def sleep(seconds: float) -> None:
            nonlocal now
            now += 1
            if now > 100:
                raise Over

        def end(message: str) -> None:
            ends.append((now, message))
            raise Over

        def signs() -> dict:
            return {0: own, 1: {"host": "b", "at": "x", "beat": now, "gets_on": False} | sign_of_other(now)}

        store = SimpleNamespace(check=lambda keys: False, compare_set=lambda key, old, new: new.encode())
        store.set = lambda key, value: own.update(json.loads(value))
        monkeypatch.setattr("accelerate_recipes.life.watch.time", SimpleNamespace(sleep=sleep))
        with monkeypatch.context() as patch:
            patch.setattr("accelerate_recipes.life.watch.threading.Thread", Mock())  # the loop runs here
            watch = Watch(tmp_path, on_failure=print)
        vars(watch).update(store=store, world_size=2, _end=end, _signs=signs)
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
    refuses(said, prepared.content_of, rows, ["input_ids"])
    with pytest.raises(ConfigError, match=r"the key of the prepared data is .* on the machine of rank 0"):
        prepared.cached(tmp_path, {"a": 1}, lambda *_: pytest.fail("nothing is prepared"))
