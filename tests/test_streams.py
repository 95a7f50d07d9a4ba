"""Tests of streams: the same rows on any number of ranks and workers, exact after a resume, whatever the network does."""

import gzip
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT, change_json, refuses
from huggingface_hub import constants
from streaming import Numbered, Ranks, go_on, no_retry, states_of, tokens_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.resume import changed_arguments, settle_arguments
from accelerate_recipes.data import documents
from accelerate_recipes.data.documents import all_texts, lines, read_documents, text_of
from accelerate_recipes.data.files import falls_under
from accelerate_recipes.data.shards import find_shards, named_shards
from accelerate_recipes.data.stream_order import Order, StreamState, stream_documents, stream_rows
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.disk import is_full
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.text.pretraining import TextArgs, TextShards, validation_rows
from accelerate_recipes.text.token_shards import TokenShards, open_text

pytestmark = pytest.mark.usefixtures("quick_tries", "worker_server")

PAGES = ROOT / "data/c4_pydoc"
NUM_STREAMS, MAX_LENGTH, BLOCK = 24, 16, 4
SIZES = {"max_length": MAX_LENGTH, "num_streams": NUM_STREAMS, "shuffle_block": BLOCK}


def zstd(content: bytes) -> bytes:
    with pa.CompressedOutputStream(sink := pa.BufferOutputStream(), "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def parquet(**columns: list) -> bytes:
    pq.write_table(pa.table(columns), sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()


def write_shard(file: Path, texts: list[str]) -> str:
    content = "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in texts).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    pack = {".gz": partial(gzip.compress, mtime=0), ".zst": zstd}.get(file.suffix, bytes)
    file.write_bytes(pack(content))
    return str(file)


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """Texts from the shipped pages, 1 to 40 words each, every word numbered, so that no token comes twice."""
    (shard,) = find_shards(str(PAGES), "en/c4-validation.*.json.gz")
    pages = [text_of(shard, *document, "text") for document in read_documents(shard, "text", 0, 1, no_retry)]
    words = iter(" ".join(pages).split()[:3000])
    sizes = np.random.default_rng(0).integers(1, 41, size=120).tolist()
    pieces = [list(itertools.islice(words, size)) for size in sizes]
    return [" ".join(f"{word}#{n}.{k}" for k, word in enumerate(piece)) for n, piece in enumerate(pieces)]


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return new_word_tokenizer(" ".join(corpus).split())


@pytest.fixture(scope="module")
def split_into(corpus, tokenizer, tmp_path_factory):
    def write(num_shards: int) -> TextShards:
        folder = tmp_path_factory.mktemp("shards")
        files = [write_shard(folder / f"c4-train.{i:05d}.json.gz", corpus[i::num_shards]) for i in range(num_shards)]
        return TextShards(files, tokenizer)

    return write


@pytest.fixture(scope="module")
def text_shards(split_into) -> TextShards:
    return split_into(29)


@pytest.fixture(scope="module", params=["3 shards", "29 shards", "29 shards, pretokenised"])
def source(request, split_into, text_shards, tmp_path_factory):
    """Source with fewer shards than streams, or with more: each stream has one of its own, and five are left over."""
    if request.param == "3 shards":
        return split_into(3)
    if request.param == "29 shards":
        return text_shards
    return tokens_of(tmp_path_factory.mktemp("tokens"), text_shards.tokenizer, lambda: text_shards.shards, {})


def make_loader(source, rank: int = 0, world_size: int = 1, num_workers: int = 0, **changes) -> StreamLoader:
    changes |= {"total_batch_size": 12, "per_device_train_batch_size": 1, "seed": 5}
    args = TrainArgs(dataloader_num_workers=num_workers, **changes)
    return StreamLoader([source], args, rank, world_size, **SIZES)


def run_steps(loaders: list[StreamLoader], num_steps: int) -> list[list[list[int]]]:
    """Return the rows of the steps, sorted within a step, because any rank may train on any of them."""
    steps = Ranks(loaders).run(num_steps)
    return [sorted(row["input_ids"].tolist() for row in step) for step in steps]


def rows_in_order(source, num_rows: int, max_length: int = MAX_LENGTH, block: int = BLOCK) -> list[list[int]]:
    """Compute the order, epoch by epoch: the first row of each stream, the second of each that has one, and so on.

    Then come the remainders, as many in a row as fit.
    """
    order = Order(NUM_STREAMS, max_length, seed=5, shuffle_block=block)
    streams = [stream_rows(source, order, stream, StreamState(), no_retry) for stream in range(NUM_STREAMS)]
    found = []
    while len(found) < num_rows:
        epochs = []
        for stream in streams:
            epochs.append([])
            while not epochs[-1] or not epochs[-1][-1].is_rest:
                epochs[-1].append(next(stream))
        rests = [rows.pop() for rows in epochs]
        found += [row.tokens.tolist() for round_ in itertools.zip_longest(*epochs) for row in round_ if row]
        joined = []
        for rest in sorted(rests, key=lambda rest: rest.place):
            if not joined or len(joined) + len(rest.tokens) > max_length:
                found += [joined] if joined else []
                joined = []
            joined = joined + rest.tokens.tolist()
        found += [joined] if joined else []
    return [row + [0] * (max_length - len(row)) for row in found[:num_rows]]


def expected_rows(source, num_steps: int) -> list[list[list[int]]]:
    rows = rows_in_order(source, 12 * num_steps)
    return [sorted(rows[start : start + 12]) for start in range(0, len(rows), 12)]


NUM_STEPS = 40  # 480 rows of 16 tokens: the corpus has about 170, so nearly three epochs


@pytest.fixture(scope="module")
def alone(source) -> tuple[list[list[list[int]]], StreamLoader]:
    """Rows that NUM_STEPS steps must have, and a loader that has read them without other ranks."""
    loader = make_loader(source)
    run_steps([loader], NUM_STEPS)
    return expected_rows(source, NUM_STEPS), loader


def test_workers_without_streams_are_named(source):
    assert [make_loader(source, 0, 12, number).workers_note for number in (0, 1, 2)] == ["", "", ""]
    assert make_loader(source, 0, 12, 3).workers_note == "; 2 of 3 workers read, one a stream: see --num_streams"


@pytest.mark.parametrize("world_size, num_workers", [(1, 0), (1, 2), (2, 0), (3, 2), (4, 0)])
def test_ranks_divide_the_same_rows(source, alone, world_size, num_workers):
    """Ranks divide the same rows, across ends of epochs, with 5, 6 and 8 streams a rank, and unequal shares of two workers."""
    loaders = [make_loader(source, rank, world_size, num_workers) for rank in range(world_size)]
    expected, _ = alone
    assert run_steps(loaders, NUM_STEPS) == expected
    assert min(loader.consumed[stream][0].epoch for loader in loaders for stream in loader.consumed) >= 1
    padding = sum(row.count(0) for step in expected for row in step)
    assert sum(loader.counts()["tokens_seen"] for loader in loaders) == NUM_STEPS * 12 * MAX_LENGTH - padding
    assert padding < 12 * MAX_LENGTH
    assert len({stream for loader in loaders for stream in loader.consumed}) == NUM_STREAMS


def test_every_document_once_in_each_epoch(source, corpus, tokenizer):
    order = Order(NUM_STREAMS, MAX_LENGTH, seed=5, shuffle_block=BLOCK)
    wanted = Counter(tuple([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in corpus)
    epochs = []
    for epoch in range(3):
        state = StreamState(epoch)
        documents = [stream_documents(source, order, n, state, no_retry) for n in range(NUM_STREAMS)]
        epochs.append([tuple(tokens.tolist()) for _, tokens in itertools.chain(*documents)])
    assert [Counter(documents) for documents in epochs] == [wanted] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


UNEQUAL = {
    "a large and a small shard": ([24_000, 240], 10),
    "48 of 500 to 1500": (np.random.default_rng(1).integers(500, 1501, size=48).tolist(), 5),
    "one of 24 is empty": ([40] * 23 + [0], 10),
    "960 and 5": ([960, 5], 10),
    "equal": ([50] * 24, 10),
    "one": ([500], 10),
    "one large": ([5000] + [10] * 30, 10),
    "fewer documents than streams": ([3, 0, 2], 50),
    "a single document": ([1], 3),
    "a document longer than all others together": ([1] * 30, 400),
}


@pytest.mark.parametrize("sizes, mean_length", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_document_once_in_an_epoch_of_the_whole(sizes, mean_length, world_size):
    """Each document comes once in an epoch, whatever the sizes of the shards, and nothing is read in vain."""
    max_length = 128
    source = Numbered(sizes, mean_length)
    if len(sizes) == 30:
        source.num_tokens[7] = 20_000
    args = TrainArgs(total_batch_size=48, per_device_train_batch_size=8, seed=5)
    sizes_ = SIZES | {"max_length": max_length, "shuffle_block": 64}
    ranks = Ranks([StreamLoader([source], args, rank, world_size, **sizes_) for rank in range(world_size)])
    num_steps = sum(source.num_tokens) // max_length // 48 + 3
    rows = list(itertools.chain(*ranks.run(num_steps)))
    epochs = [row["row"][0].item() for row in rows]
    assert epochs == sorted(epochs) and epochs[-1] > 0
    for epoch in range(epochs[-1]):  # the last epoch is not over
        tokens = torch.cat([row["input_ids"] for row in rows if row["row"][0] == epoch]).numpy()
        assert np.bincount(tokens, minlength=len(source.num_tokens) + 1)[1:].tolist() == source.num_tokens
        num_padded = len(tokens) // max_length - sum(source.num_tokens) // max_length
        assert num_padded <= max(NUM_STREAMS / 2, 0.02 * len(tokens) / max_length), f"{num_padded} rows are cut short"
    if len(sizes) in (2, 48) and len(rows) > 1000:
        assert epochs[-1] == 1
        # Each stream that shares a shard decompresses it; the next epoch has begun.
        sharers = 12 if len(sizes) == 2 else 1
        assert sum(source.documents_read) < 1.1 * sharers * sum(sizes)
    if len(set(sizes)) == 1 and len(sizes) == 24:
        assert ranks.talks < 8, "streams that go on evenly need no talk"


def test_shards_without_documents(tmp_path, tokenizer):
    source = TextShards([write_shard(tmp_path / f"{i}.jsonl", []) for i in range(3)], tokenizer)
    for num_workers in (0, 2):
        with pytest.raises(DataError, match=r"there is no document to train on in .*/0.jsonl and 2 more"):
            next(iter(make_loader(source, num_workers=num_workers)))
    with pytest.raises(DataError, match=r"no document to validate on in .*0.jsonl"):
        validation_rows(source, 5, MAX_LENGTH, document_mask=True)


def test_rows_run_through_the_documents(source):
    """Nothing is truncated: a stream's rows, joined, are its documents. The first token of a piece is no target."""
    order = Order(NUM_STREAMS, MAX_LENGTH, seed=5, shuffle_block=BLOCK)
    documents = stream_documents(source, order, 0, StreamState(), no_retry)
    tokens = np.concatenate([tokens for _, tokens in documents])
    eos = tokens[-1]
    rows = itertools.chain(*Ranks([make_loader(source)]).run(NUM_STEPS))
    rows = [row for row in rows if row["row"][0] == 0 and row["row"][1] % NUM_STREAMS == 0][: len(tokens) // MAX_LENGTH]
    assert torch.cat([row["input_ids"] for row in rows]).tolist() == tokens[: len(rows) * MAX_LENGTH].tolist()
    assert len(rows) > 2
    for row in rows:
        ids, labels, positions = (row[name] for name in ("input_ids", "labels", "position_ids"))
        is_start = torch.cat([torch.tensor([True]), ids[:-1] == eos])
        assert torch.equal(labels, torch.where(is_start, IGNORE_INDEX, ids))
        assert torch.equal(positions == 0, is_start)


@pytest.mark.parametrize(
    "before, after, step",
    [((2, 2), (2, 2), 5), ((4, 0), (1, 2), 23), ((3, 0), (2, 0), 36), ((1, 2), (3, 0), 1)]
    + [pytest.param((2, 0), (3, 0), step, marks=() if step % 2 else pytest.mark.slow) for step in range(11, 17)],
)
def test_resume_is_exact(source, alone, before, after, step):
    """A resume with other (ranks, workers) is exact, also in the steps in which the first epoch ends.

    With 12 rows a step and 24 streams, a step leaves half of a round. Those after step 23 are states of earlier versions:
    one for a stream.
    """
    world_size, num_workers = before
    first = [make_loader(source, rank, world_size, num_workers) for rank in range(world_size)]
    rows, states = run_steps(first, step), states_of(first)
    if step == 23:
        states = [state | {"streams": {k: own for k, (own,) in state["streams"].items()}} for state in states]
    world_size, num_workers = after
    second = [make_loader(source, rank, world_size, num_workers) for rank in range(world_size)]
    go_on(second, step, states)
    rows += run_steps(second, NUM_STEPS - step)
    expected, whole = alone
    assert rows == expected
    streams = [loader.state()["streams"] for loader in second]
    assert {stream: state for part in streams for stream, state in part.items()} == whole.state()["streams"]
    assert sum(loader.counts()["documents_seen"] for loader in second) == whole.counts()["documents_seen"]


def test_short_documents_are_left_out(text_shards, corpus, tokenizer):
    """Rows hold the long documents alone, each once in an epoch, and the others are counted, also across a resume."""
    settings = SIZES | {"min_document_tokens": 20}
    args = TrainArgs(total_batch_size=12, per_device_train_batch_size=1, seed=5)
    lengths = [len(tokens) for tokens in text_shards.encode(corpus)]
    long = sum(length >= 20 for length in lengths)
    assert 0 < long < len(lengths)

    def loader(*place: int) -> StreamLoader:
        return StreamLoader([text_shards], args, *place, **settings)

    whole = loader(0, 1)
    rows = run_steps([whole], 30)
    seen = [token for row in itertools.chain(*rows) for token in row]
    texts = [text.split() for text in corpus]
    words = {n: set(tokenizer.convert_tokens_to_ids(text)) for n, text in enumerate(texts)}
    short = set().union(*(words[n] for n, length in enumerate(lengths) if length < 20))
    assert not short & set(seen)
    counts, epochs = whole.counts(), {state.epoch for (state,) in whole.consumed.values()}
    assert min(epochs) >= 1, "each document was met"
    first = [loader(rank, 2) for rank in range(2)]
    begun = run_steps(first, 7)
    states, second = states_of(first), [loader(rank, 4) for rank in range(4)]
    go_on(second, 7, states)
    assert begun + run_steps(second, 23) == rows
    for name in ("documents_left_out", "documents_seen"):
        assert sum(part.counts()[name] for part in second) == counts[name] > 0
    refuses("min_document_tokens is 0, the checkpoint has 20", make_loader(text_shards).start_at, 7, states)
    with pytest.raises(DataError, match="no document of --min_document_tokens 999 or more to train on"):
        run_steps([StreamLoader([text_shards], args, 0, 1, **settings | {"min_document_tokens": 999})], 1)
    with pytest.raises(DataError, match="no document of --min_document_tokens 999 or more to validate on"):
        validation_rows(text_shards, 2, MAX_LENGTH, True, min_document_tokens=999)
    assert min(len(text_shards.encode([t])[0]) for t in validation_rows(text_shards, 9, 16, True, 20).texts) >= 20


def test_state_is_of_whole_steps(source):
    loader = make_loader(source)
    batches = iter(loader)
    states, steps = [loader.state()], [loader.step]
    for _ in range(24):
        next(batches)
        states.append(loader.state())
        steps.append(loader.step)
    assert steps == [0] * 12 + [1] * 12 + [2]
    assert states[11] == states[0] and states[23] == states[12] != states[24]
    next(batches)  # a micro-batch of an unfinished step
    assert run_steps([loader], 3) == expected_rows(source, 5)[2:]


@pytest.mark.timeout(120)
def test_workers_survive_what_is_set_for_the_main_process(text_shards, corpus, monkeypatch):
    """The tokenizer's threads, which a fork does not have, and SIGTERM, which Slurm sends to all; nothing is drawn here."""
    generator = torch.get_rng_state()
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    text_shards.encode(corpus)
    loader = make_loader(text_shards, num_workers=2)
    batches = iter(loader)
    rows = [next(batches)["input_ids"][0].tolist()]
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGTERM)
    rows += [next(batches)["input_ids"][0].tolist() for _ in range(199)]
    assert rows == rows_in_order(text_shards, 200)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true" and torch.equal(torch.get_rng_state(), generator)


def test_state_of_other_data_is_refused(text_shards):
    loader = make_loader(text_shards)
    next(iter(loader))
    state = loader.state()
    for name, then in (("shuffle_block", 1024), ("num_streams", 12)):
        with pytest.raises(ConfigError, match=rf"{name} is \d+, the checkpoint has {then}"):
            make_loader(text_shards).start_at(0, [state | {"order": state["order"] | {name: then}}])
    for then, said in (([7, "0"], r"\d+ shards now, 7 then"), ([len(text_shards.shards), "0"], "with other names")):
        refuses(said, make_loader(text_shards).start_at, 0, [state | {"shards": then}])


def test_streams_follow_the_first_launch_and_stay(tmp_path):
    """Left open, their number is the smallest multiple of 24 that the processes divide; a resume takes the checkpoint's."""
    c4 = shipped.load(ROOT / "recipes/c4.py").Args

    def args_on(world_size: int, *more: str):
        args, problems = resolve(c4, ["--max_steps", "1", "--total_batch_size", "32", *more], world_size)
        return args, [problem for problem in problems if "--num_streams" in problem]

    sizes = (1, 2, 5, 7, 16, 32, 36, 48, 64)
    for world_size in sizes:
        args, problems = args_on(world_size)
        assert problems == args.settle({}) == []
        assert args.num_streams == next(n for n in itertools.count(24, 24) if n % world_size == 0)
    assert "--num_streams 24 is not a multiple of 32 processes" in args_on(32, "--num_streams", "24")[1][0]

    first, _ = args_on(32)
    first.settle({})
    first.save(tmp_path / "args.yaml")
    for world_size in sizes:
        later, _ = args_on(world_size)
        assert changed_arguments(tmp_path, later) == {}
        if 96 % world_size == 0:
            settle_arguments(tmp_path, later)
            assert later.num_streams == 96
        else:
            refuses(rf"96 .* {world_size} processes.*: 1, 2, 3, 4, 6, 8, ", settle_arguments, tmp_path, later)
    refuses("--num_streams was 96 and is now 24", settle_arguments, tmp_path, args_on(8, "--num_streams", "24")[0])


# Reading


def test_lines_are_counted_across_chunks():
    generator = np.random.default_rng(0)
    for _ in range(300):
        wanted = [b"x" * n for n in generator.integers(1, 7, size=generator.integers(0, 12))]
        data = b"\n".join(wanted) + b"\n" * (bool(wanted) and generator.random() < 0.5)
        cuts = np.cumsum(generator.integers(1, 9, size=100)).tolist()
        chunks = [data[a:b] for a, b in itertools.pairwise([0, *cuts]) if data[a:b]]
        first, stride = generator.integers(0, 14), generator.integers(1, 5)
        assert list(lines("a", chunks, first, stride)) == wanted[first::stride]


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl", "a.json", "a.parquet"])
def test_kinds_of_files(corpus, tmp_path, name):
    file = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": corpus, "n": range(len(corpus))}), file, row_group_size=7)
    else:
        write_shard(file, corpus)
    for first, stride in ((0, 1), (20, 1), (3, 5), (len(corpus), 1)):
        found = list(read_documents(*named_shards([str(file)]), "text", first, stride, no_retry))
        assert [index for index, _ in found] == list(range(first, len(corpus), stride))
        assert [text_of("", *document, "text") for document in found] == corpus[first::stride]


@pytest.mark.parametrize("kind, end", [(".jsonl.gz", b"\0" * 100), (".jsonl.zst", b"")])
def test_files_of_several_members(kind, end, corpus, tmp_path):
    file = tmp_path / f"a{kind}"
    halves = [write_shard(tmp_path / f"{i}{kind}", corpus[i * 60 : (i + 1) * 60]) for i in range(2)]
    file.write_bytes(b"".join(Path(half).read_bytes() for half in halves) + end)
    found = read_documents(str(file), "text", 0, 1, no_retry)
    assert [text_of("", *document, "text") for document in found] == corpus


def test_a_line_without_end(tmp_path, monkeypatch):
    """It ends the reading before all of it is in memory, with file and line."""
    monkeypatch.setattr(documents, "MAX_LINE", 2**20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' * 3 + b"0" * 2**21)
    for first in (0, 3):
        with pytest.raises(DataError, match=r"a\.jsonl, line 4 has more than 64 MiB; divide or remove it"):
            list(read_documents(str(tmp_path / "a.jsonl"), "text", first, 1, no_retry))


@pytest.mark.parametrize("name, content, message", [
    ("a.json.gz", b"<html>busy</html>", r"a.json.gz cannot be read: Not a gzipped file"),
    ("a.json.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-20], r"a.json.gz cannot be read: .* ended"),
    ("a.json.gz", b"", r"a.json.gz cannot be read: it is empty"),
    ("a.json.zst", b"<html>busy</html>", r"a.json.zst cannot be read: "),
    ("a.json.zst", zstd(b'{"text": "a"}\n' * 99)[:-9], r"a.json.zst cannot be read: Truncated"),
    ("a.json.zst", b"", r"a.json.zst cannot be read: it is empty"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b\n', "a.jsonl, line 2 is not JSON: "),
    ("a.jsonl", b'{"text": "a"}\n["b"]\n', "a.jsonl, line 2 is no JSON object, but a list"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "a.jsonl, line 2 is not JSON: .*codec can't decode"),
    ("a.jsonl", b"[" * 10**5, "a.jsonl, line 1 is not JSON: .*recursion"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b\\ud800c"}\n', r"a.jsonl, line 2: 'text' holds \\ud800,"),
    ("a.jsonl", b'{"text": "b\xed\xa0\x80c"}\n', "a.jsonl, line 1 is not JSON: .*codec can't decode"),
    ("a.jsonl", b'{"text": null}\n', "a.jsonl, line 1: 'text' is no text, but NoneType"),
    ("a.jsonl", b'{"content": "a"}\n', r"a.jsonl, line 1 has no 'text', but the keys \['content'\]"),
    ("a.parquet", parquet(content=["a"]), r"has the columns \['content'\], but no 'text'"),
    ("a.parquet", b"PAR", "a.parquet cannot be read: "),
])  # fmt: skip
def test_files_that_are_not_what_they_should_be(name, content, message, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(content)
    source = TextShards([str(tmp_path / name)], tokenizer)
    refuses(message, list, source.tokens(0, source.read(0, 0, 1, no_retry)), error=DataError)


def test_parquet_that_is_damaged_or_holds_no_text(tmp_path, corpus, tokenizer):
    """The error names the row; the rows before it are read."""
    file = tmp_path / "a.parquet"
    binary = pa.array([text.encode() for text in corpus], pa.binary())
    no_utf8 = pa.array([*map(str.encode, corpus[:9]), b"\xff", *map(str.encode, corpus[10:])], pa.binary())

    def problem(texts) -> tuple[int, str]:
        settings = {"row_group_size": 8, "compression": "none", "use_dictionary": False}
        pq.write_table(pa.table({"text": texts}), file, **settings)
        if texts is corpus:  # the header of a page in the second group
            content = bytearray(file.read_bytes())
            start = pq.read_metadata(file).row_group(1).column(0).data_page_offset
            content[start : start + 8] = b"\xff" * 8
            file.write_bytes(content)
        read = []
        with pytest.raises(DataError) as error:
            for document in read_documents(str(file), "text", 0, 1, no_retry):
                read.append(document)
        return len(read), str(error.value).removeprefix(str(file))

    num, found = problem(corpus)
    assert num == 8 and found.startswith(", rows 9 to 16 cannot be read: ")
    num, found = problem(no_utf8.view(pa.string()))
    assert num == 8 and found.startswith(", rows 9 to 16 cannot be read: ") and "UTF8" in found
    assert problem([*corpus[:12], None]) == (12, ", row 13: 'text' is no text, but NoneType")
    assert problem(binary) == (0, ", row 1: 'text' is no text, but bytes"), "not taken for JSON"
    assert problem([{"a": "b"}]) == (0, ", row 1: 'text' is no text, but dict")


def test_shards_named_one_by_one(tmp_path, monkeypatch):
    file = write_shard(tmp_path / "a.jsonl", [])
    (tmp_path / "a.csv").touch()
    (tmp_path / "hard.jsonl").hardlink_to(file)
    for folder in (tmp_path / "folder", tmp_path / "other"):
        folder.mkdir()
    (tmp_path / "folder/linked").symlink_to(tmp_path / "other")
    (tmp_path / "other/a.jsonl").symlink_to(file)
    remote = "hf://datasets/allenai/c4@main/en/c4-train.00000-of-01024.json.gz"
    url = f"{constants.ENDPOINT}/datasets/allenai/c4/resolve/main/en/c4-train.00000-of-01024.json.gz"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert named_shards([file, remote]) == [file, url]
    for files, message in (
        ([file, file], "named twice"),
        ([file, f"{tmp_path}//a.jsonl"], "named twice.*a.jsonl, .*//a.jsonl"),
        ([str(tmp_path / "folder"), file], "named twice.*folder/linked/a.jsonl, .*a.jsonl"),
        ([file, str(tmp_path / "hard.jsonl")], "named twice"),
        ([str(tmp_path / "b.jsonl")], "no such file"),
        ([str(tmp_path / "a.csv")], "must end with one of .json.gz"),
        (["https://example.org/a.parquet"], "download it first"),
        (["hf://allenai/c4"], "hf://datasets/ORG/NAME/PATH"),
    ):
        refuses(message, named_shards, files)


def test_a_folder_is_read_whole(tmp_path):
    """With folders that are linked, without copies that an editor hides; a name that is not read is an error."""
    for name in ("data/a.txt", "data/.ipynb_checkpoints/a-checkpoint.txt", "data/.b.txt", "elsewhere/[1]/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a", encoding="utf-8")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    folder = str(tmp_path / "data")
    assert named_shards([folder]) == [f"{folder}/a.txt", f"{folder}/linked/[1]/c.txt"]
    (tmp_path / "data/B.TXT").write_text("b", encoding="utf-8")
    refuses(r"B\.TXT: its name must end with one of", named_shards, [folder])


def test_a_folder_of_texts(tmp_path, tokenizer, corpus):
    """A folder stands for its files of one kind, in the order of their names; a .txt file is one document."""
    texts = {"b/2.txt": corpus[2], "a.txt": f"{corpus[0]}\n\n{corpus[1]}\r\n", "c.txt": " \n", ".d.txt": "x"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "notes.md").write_text("no text")
    files = named_shards([str(tmp_path)])
    assert [Path(file).name for file in files] == ["a.txt", "2.txt", "c.txt"]
    assert list(all_texts(files, "text")) == [corpus[0] + "\n\n" + corpus[1] + "\r\n", corpus[2]]
    assert not list(read_documents(files[0], "text", 1, 2, no_retry)), "there is no second document"
    (tmp_path / "c.txt").write_bytes("Zürich".encode("latin-1"))
    refuses(r"c\.txt is not UTF-8 at byte 1", list, all_texts(files, "text"), error=DataError)
    write_shard(tmp_path / "e.jsonl", corpus)
    for folder, said in ((tmp_path, r"several kinds, \.jsonl, \.txt"), (tmp_path / "x", "holds no .json.gz,")):
        folder.mkdir(exist_ok=True)
        refuses(said, named_shards, [str(folder)])


@pytest.mark.parametrize("pretokenised", [False, True])
def test_held_out_documents(split_into, corpus, tokenizer, tmp_path, pretokenised):
    """By the hash of its text each document is on one side, whatever reads it; a resumed run has the same share."""
    shards = split_into(29).shards
    source = TextShards(shards, tokenizer, heldout_share=0.3)
    if pretokenised:
        source = tokens_of(tmp_path, tokenizer, lambda: shards, {}, heldout_share=0.3)
        with pytest.raises(ConfigError, match="was tokenised from something else: heldout_share was"):
            tokens_of(tmp_path, tokenizer, lambda: shards, {})
    held = [text for text in corpus if falls_under(text, 0.3)]
    assert 20 < len(held) < 60
    loader = StreamLoader([source], TrainArgs(total_batch_size=12), 0, 1, **SIZES, heldout_share=0.3)
    streams = [stream_rows(source, loader.order, stream, StreamState(), no_retry) for stream in range(NUM_STREAMS)]
    first = [itertools.takewhile(lambda row: row.epoch == 0, rows) for rows in streams]
    read = {token for row in itertools.chain(*first) for token in row.tokens.tolist()}
    eos = {tokenizer.eos_token_id}
    ids = {text: {*tokenizer(text, add_special_tokens=False)["input_ids"]} for text in corpus}
    assert read - eos == set().union(*(ids[text] for text in corpus if text not in held))
    source = TextShards(shards, tokenizer, heldout_share=0.3, is_heldout=True)
    found = validation_rows(source, 10_000, MAX_LENGTH, document_mask=True)
    assert sorted(found.texts) == sorted(held)
    assert loader.state()["order"]["heldout_share"] == 0.3
    with pytest.raises(ConfigError, match=r"heldout_share is 0\.3, the checkpoint has 0\.0; set it back"):
        state = loader.state()
        loader.start_at(1, [state | {"order": state["order"] | {"heldout_share": 0.0}}])
    with pytest.raises(DataError, match=r"no document to validate on in .*; raise --heldout_share 1e-09, or"):
        source = TextShards(shards[:1], tokenizer, heldout_share=1e-9, is_heldout=True)
        validation_rows(source, 5, MAX_LENGTH, document_mask=True)
    with pytest.raises(DataError, match=r"no document to train on in .* and 28 more, beside the 100\.0% held out"):
        whole = TextShards(shards, tokenizer, heldout_share=1.0)
        next(stream_rows(whole, loader.order._replace(heldout_share=1.0), 0, StreamState(), no_retry))


def test_named_files_are_looked_at_before_a_launch(tmp_path):
    """Of files here, what is wrong is said with the other arguments; --max_steps is needed only for those elsewhere."""
    args = shipped.load(ROOT / "recipes/c4.py").Args
    file = write_shard(tmp_path / "a.jsonl", ["a"])

    def problems(*train_files: str, **changes) -> list[str]:
        found = args(train_files=list(train_files), **changes).problems(1)
        return [line for line in found if "_embeddings" not in line]

    assert problems(file) == [] and problems(str(tmp_path)) == []
    assert problems(str(tmp_path / "b.jsonl")) == [f"--train_files {tmp_path}/b.jsonl: no such file"]
    (missing, *_) = problems(file, validation_files=[f"{file}.csv"])
    assert missing.startswith(f"--validation_files {file}.csv: no such file")
    (found,) = problems("https://example.org/a.jsonl")
    assert found.startswith("--max_steps is missing")
    assert problems(file, heldout_share=0) == []
    ways = ({}, {"validation_files": [file]}, {"dataset_name": "a"})
    shares = [args(train_files=[file], **named).share_heldout for named in ways]
    assert shares == [0.05, 0, 0] and args().share_heldout == 0


@pytest.mark.parametrize("epochs", [1, 3, 0.5])
@pytest.mark.parametrize("least", [0, 9])
def test_steps_of_epochs(source, epochs, least):
    """As many steps as the rows of so many epochs need, whatever the shards are, also of documents that are long enough."""
    args = TrainArgs(total_batch_size=12, num_train_epochs=epochs)
    loader = StreamLoader([source], args, 0, 1, **SIZES, min_document_tokens=least)
    batches = iter(loader)
    first = [[next(batches)["row"].tolist() for _ in range(12)] for _ in range(loader.num_steps())]
    epoch_of = [row[0][0] for step in first for row in step]
    if epochs < 1:
        args = TrainArgs(total_batch_size=12)
        whole = StreamLoader([source], args, 0, 1, **SIZES, min_document_tokens=least)
        assert len(first) in (-(-whole.num_steps() // 2), whole.num_steps() // 2)
    else:
        assert epoch_of[-12] < epochs, "no step too many"
        assert epoch_of[-1] == epochs or next(batches)["row"].tolist()[0][0] == epochs, "no row too few"
    assert StreamLoader([source], TrainArgs(max_steps=7), 0, 1, max_length=9).num_steps() == 7


# The network


@pytest.fixture
def shard_server(serve, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK", 64)  # bytes; else one read returns a whole small shard
    file = write_shard(tmp_path / "a.json.gz", corpus)
    return serve({"/a.json.gz": Path(file).read_bytes()})


@pytest.mark.parametrize("ignores_range", [False, True])
@pytest.mark.parametrize("faults", [
    [429], [503, 500, 429], ["truncate"], ["truncate", 429, "truncate"], ["stall"], ["damage"], ["damage", "truncate"],
], ids=str)  # fmt: skip
def test_faults_are_overcome_and_counted(shard_server, corpus, faults, ignores_range):
    shard_server.faults = list(faults)
    shard_server.ignores_range = ignores_range
    retries = Counter()
    found = read_documents(f"{shard_server.url}/a.json.gz", "text", 5, 2, lambda: retries.update(["network"]))
    assert [text_of("", *document, "text") for document in found] == corpus[5::2]
    assert retries["network"] == len(faults)
    positions = [int(range_.removeprefix("bytes=").removesuffix("-") or 0) for _, range_ in shard_server.requests]
    if faults[-1] in ("truncate", "stall"):
        assert positions[-1] > 0  # not from the start


@pytest.mark.parametrize("fault, message, num_requests", [
    (503, r"cannot be read: HTTP 503 .*\(tried 4 times\)", 4),
    (404, r"cannot be read: HTTP 404 Not Found$", 1),
    (403, r"cannot be read: HTTP 403", 1),
    ("stall", r"cannot be read from byte \d+: TimeoutError.*\(tried 4 times\)", None),
    ("damage", r"cannot be read: .*\(tried 4 times\)", 4),
    ("cut off", r"cannot be read: .* ended before the end.*\(tried 4 times\)", None),
    ("gone", r"cannot be read from byte 0: URLError: .*refused.*\(tried 4 times\)", 0),
])  # fmt: skip
def test_faults_that_stay_are_an_error(shard_server, fault, message, num_requests):
    shard_server.always = fault
    url = f"{shard_server.url}/a.json.gz"
    if fault == "stall":
        shard_server.ignores_range = True  # so that no try gets further
    elif fault == "cut off":
        body = shard_server.files["/a.json.gz"]
        shard_server.files["/a.json.gz"] = body[: len(body) // 2]
    elif fault == "gone":
        shard_server.shutdown()
        shard_server.server_close()
    refuses(f"^{url} {message}", list, read_documents(url, "text", 0, 1, lambda: None), error=DataError)
    assert num_requests in (None, len(shard_server.requests))


def test_idle_connections_are_given_up(shard_server, corpus, monkeypatch):
    monkeypatch.setattr(documents, "IDLE_SECONDS", -1.0)
    found = read_documents(f"{shard_server.url}/a.json.gz", "text", 0, 1, no_retry)
    assert [text_of("", *document, "text") for document in found] == corpus
    assert len(shard_server.requests) > 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_retries_are_counted_over_all_workers(serve, text_shards, num_workers):
    server = serve({f"/{Path(file).name}": Path(file).read_bytes() for file in text_shards.shards})
    server.faults = [429, "truncate", 503]
    source = TextShards([f"{server.url}/{Path(file).name}" for file in text_shards.shards], text_shards.tokenizer)
    loader = make_loader(source, num_workers=num_workers)
    assert run_steps([loader], 4) == expected_rows(text_shards, 4)
    assert loader.counts()["retries"] == 3
    make_loader(text_shards).start_at(4, [loader.state()])  # a copy of the data in a folder will do


# Tokens


def test_documents_end_and_begin_as_the_tokenizer_says(corpus, tokenizer):
    words = tokenizer(corpus[0])["input_ids"]
    (tokens,) = TextShards([], tokenizer).encode(corpus[:1])
    assert tokens.tolist() == [*words, tokenizer.eos_token_id]
    from tokenizers.processors import TemplateProcessing

    with_bos = new_word_tokenizer(corpus[0].split())
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", with_bos.bos_token_id)]
    )
    with_bos(corpus[0], truncation=True, max_length=2)  # the backend remembers these settings
    (tokens,) = TextShards([], with_bos).encode(corpus[:1])
    assert tokens.tolist() == [with_bos.bos_token_id, *range(4, 4 + len(words)), with_bos.eos_token_id]
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> <s> $A </s>",
        special_tokens=[(token, with_bos.convert_tokens_to_ids(token)) for token in ("<pad>", "<s>", "</s>")],
    )
    (tokens,) = TextShards([], with_bos).encode(corpus[:1])
    assert tokens.tolist() == with_bos(corpus[0])["input_ids"], "a prefix of several tokens, and one end"
    with_bos.eos_token = None
    refuses("no end token", TextShards, [], with_bos)


@pytest.mark.parametrize("most", [0, 600])
def test_a_full_disk_names_the_folder_of_tokens(text_shards, tokenizer, tmp_path, most):
    """The kernel refuses larger files: the key of the folder, or a file of a shard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(OSError) as caught:
            tokens_of(tmp_path, tokenizer, lambda: text_shards.shards, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_full(caught.value) and str(tmp_path) in caught.value.filename


def test_pretokenised_numbers_above_65535(tmp_path):
    """The largest number decides how many bytes a token has, not how many tokens there are; tokens cut to 2 are refused."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 65535, "b": 70000}
    file = write_shard(tmp_path / "c4-train.0.json.gz", ["a b", "b"])
    for names, dtype in ((["a"], "<u2"), (["a", "b"], "<u4")):
        chosen = {token: n for token, n in vocabulary.items() if token in names or n < 3}
        backend = Tokenizer(WordLevel(chosen, unk_token="<unk>"))
        backend.pre_tokenizer = WhitespaceSplit()
        marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **marks)
        folder = tmp_path / dtype
        tokens = tokens_of(folder, tokenizer, lambda: [file], {})
        assert tokens.manifest["dtype"] == dtype
        found = [tokens.tokens(0, [i]) for i in range(2)]
        wanted = [[chosen.get(word, 2) for word in text.split()] + [1] for text in ("a b", "b")]
        assert [next(one).tolist() for one in found] == wanted
    change_json(folder / "manifest.json", dtype="<u2")
    refuses(r"dtype was <u2, is <u4.*another folder", tokens_of, folder, tokenizer, lambda: [file], {})


def test_a_tokenizer_in_python_is_too_slow_for_a_stream(tmp_path):
    with pytest.raises(ConfigError, match=r"a ByT5Tokenizer is written in Python.*tokenizer\.json"):
        tokens_of(tmp_path, ByT5Tokenizer(), lambda: ["a.json.gz"], {})


def test_pretokenised_shards_are_made_once(text_shards, tokenizer, tmp_path):
    """Shards are made one after the other, as if killed in between, and by two ranks; later they are not listed or read."""
    from accelerate_recipes.text import token_shards

    shards_ = list(text_shards.shards)
    broken = tmp_path / Path(shards_[2]).name
    broken.write_bytes(b"no gzip")
    folder = tmp_path / "tokens"
    with pytest.raises(DataError, match="Not a gzipped file"):
        tokens_of(folder, tokenizer, lambda: [*shards_[:2], str(broken), *shards_[3:]], {"subset": "en"})
    refuses(r"tokens is not whole: --pretokenize has not finished", TokenShards, folder)
    finished = {file: file.stat().st_mtime_ns for file in folder.glob("shard-*")}
    assert len(finished) == 4
    (folder / "shard-00009.tokens.partial-elsewhere-1").touch()
    with ThreadPoolExecutor(2) as pool:
        make = partial(tokens_of, folder, tokenizer, lambda: shards_, {"subset": "en"}, world_size=2)
        assert len([*pool.map(lambda rank: make(rank=rank), range(2))]) == 2
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert not list(folder.glob("*.partial*"))

    tokens = tokens_of(folder, tokenizer, pytest.fail, {"subset": "en"})
    assert tokens.manifest["dtype"] == "<u2"
    assert rows_in_order(tokens, 50) == rows_in_order(text_shards, 50)
    with pytest.raises(ConfigError, match=r"settings was .*'subset': 'en'.*, is .*'subset': 'fr'.*another folder"):
        tokens_of(folder, tokenizer, pytest.fail, {"subset": "fr"})
    with pytest.raises(ConfigError, match="tokenised from something else: tokenizer was"):
        tokens_of(folder, new_word_tokenizer(["a"]), pytest.fail, {"subset": "en"})

    file = folder / "shard-00001.tokens"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    token_shards.checksum_once.cache_clear()
    with pytest.raises(DataError, match=r"shard-00001.tokens is damaged: .*--pretokenize makes it again"):
        rows_in_order(TokenShards(folder), 24)
    file.write_bytes(content[:-2])
    refuses(r"shard-00001.tokens is missing, or does not have", TokenShards, folder)
    # Do what the message says.
    file.with_suffix(".json").unlink()
    token_shards.checksum_once.cache_clear()
    again = tokens_of(folder, tokenizer, lambda: shards_, {"subset": "en"})
    assert rows_in_order(again, 50) == rows_in_order(text_shards, 50)


def test_blank_lines_are_no_documents(tokenizer, corpus, tmp_path):
    """As text and as tokens, in training and in validation; and they are not counted."""
    lines_ = [json.dumps({"text": text}) for text in corpus[:60]]
    file = tmp_path / "a.jsonl"
    file.write_text("\n \r\n" + "\n\n".join(lines_) + "\n\n\n", encoding="utf-8")
    source = TextShards([str(file)], tokenizer)
    order = Order(num_streams=1, max_length=10**6, seed=0, shuffle_block=BLOCK, min_document_tokens=1)
    for some in (source, tokens_of(tmp_path / "tokens", tokenizer, lambda: [str(file)], {})):
        row = next(stream_rows(some, order, 0, StreamState(), no_retry))
        ends = np.cumsum(row.lengths)
        found = [row.tokens[end - length : end].tolist() for end, length in zip(ends, row.lengths, strict=True)]
        assert sorted(found) == sorted(ids.tolist() for ids in source.encode(corpus[:60]))
        assert (row.state.documents, row.state.left_out) == (60 * (row.state.epoch > 0), 0)
    assert list(documents.all_texts([str(file)], "text")) == corpus[:60]
    assert validation_rows(source, 10**4, 8, True).texts == corpus[:60]
    file.write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match="there is no document to train on"):
        next(stream_rows(source, order._replace(min_document_tokens=0), 0, StreamState(), no_retry))


@pytest.mark.parametrize("is_folder", [False, True])
def test_tokens_belong_to_their_text(is_folder, tokenizer, corpus, tmp_path):
    """A replaced file, one more file, and another revision are other text; moved or deleted text is the same."""

    def tokens(place: str, **settings) -> TokenShards:
        files = {"dataset_name": str(tmp_path / place), "dataset_files": "*.jsonl"}
        files = files if is_folder else {"train_files": sorted(map(str, (tmp_path / place).glob("*.jsonl")))}
        return open_text(TextArgs(pretokenize=str(tmp_path / "tokens"), **files | settings), tokenizer, 0, 1)

    folder = tmp_path / "text"
    folder.mkdir()
    for name in "ab":
        write_shard(folder / f"{name}.jsonl", corpus[:NUM_STREAMS])
    first = tokens("text").version()
    assert tokens("text").version() == first
    (tmp_path / "other").mkdir()
    for file in folder.glob("*"):
        shutil.copy(file, tmp_path / "other" / f"new-{file.name}")
    assert tokens("other").version() == first
    shutil.rmtree(tmp_path / "other")
    refuses(r"revision.*another folder", tokens, "gone", dataset_name="allenai/c4", dataset_revision="v2")
    file = folder / "b.jsonl"
    stat, content = file.stat(), file.read_bytes()
    file.write_bytes(content[:12] + bytes([content[12] ^ 1]) + content[13:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refuses(r"b\.jsonl is not what .*tokens was tokenised from", tokens, "text")
    (tmp_path / "tokens/shard-00000.json").unlink()  # as if killed between two shards
    refuses(r"b\.jsonl is not what .*tokens was tokenised from", tokens, "text")
    file.write_bytes(content)
    assert tokens("text").version() == first
    write_shard(folder / "c.jsonl", corpus[:NUM_STREAMS])
    refuses("was tokenised from 2 files, now there are 3", tokens, "text")
    if is_folder:
        shutil.rmtree(folder)
        assert tokens("text").version() == first


# Validation


@pytest.mark.parametrize("num_rows, wanted", [(5, 5), (10_000, None)])
def test_validation_rows_are_the_first_tokens(corpus, tokenizer, tmp_path, num_rows, wanted):
    files = [write_shard(tmp_path / f"{i}.jsonl", corpus[i * 10 : (i + 1) * 10]) for i in range(2)]
    found = validation_rows(TextShards(files, tokenizer), num_rows, MAX_LENGTH, document_mask=True)
    documents = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in corpus[:20]]
    tokens = [token for document in documents for token in document]
    assert len(found.rows) == (wanted or -(-len(tokens) // MAX_LENGTH))
    tokens = tokens[: len(found.rows) * MAX_LENGTH]
    assert [token for row in found.rows.rows["input_ids"][:] for token in row] == tokens
    starts = {0, *np.cumsum([len(document) for document in documents]).tolist(), *range(0, len(tokens), MAX_LENGTH)}
    labels = torch.cat([found.rows[i]["labels"] for i in range(len(found.rows))]).tolist()[: len(tokens)]
    assert labels == [IGNORE_INDEX if i in starts else token for i, token in enumerate(tokens)]
    assert found.texts == corpus[: len(found.texts)]
    num_bytes = sum(len(text.encode()) for text in found.texts)
    num_tokens = sum(len(text.split()) + 1 for text in found.texts)
    assert found.bytes_per_token == pytest.approx(num_bytes / num_tokens)
    assert num_tokens >= len(tokens) > num_tokens - len(documents[len(found.texts) - 1])
