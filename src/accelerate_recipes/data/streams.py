"""Streams: an endless order of rows from shards, of text or of images, which any number of ranks can stop and resume.

The documents are divided among a fixed number of logical streams, 24 by default. In each epoch a stream goes
through its own documents and cuts them into rows of `max_length` tokens without padding: what does not fit continues
in the stream's next row. (An image is a document of one token, and a row of its own: see `image_streams`.) The rows of the
run are those of epoch 0, then those of epoch 1, and so on. In an epoch they come in rounds: the first row of each stream,
the second of each that has a second, until none is left; then the remainders, less than a row from each stream, as many in a
row as fit. So each document comes once in each epoch, however unequal the shards are, and optimizer step s trains on the B
rows from s * B on, on any number of ranks.

Rank r of W reads streams r, r + W, ... While every stream has rows, the step's rows of these streams are its share.
Once some have ended, the ranks agree which rows come next, and ranks with too many rows hand some to the others.

The order of an epoch depends on (seed, epoch). The shards are permuted and dealt out to the streams. Shards left over
(all of them, if there are fewer shards than streams) are shared: if k streams share a shard, each
takes every k-th document. Within a shard, each stream shuffles its documents in blocks of `shuffle_block`.

Every row carries the state of its stream after that row, eight numbers, so a checkpoint knows what was consumed, not what
workers have prepared. To resume, each stream decompresses at most one shard from its start.
"""

import copy
import heapq
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from datasets import Dataset
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data.files import falls_under
from accelerate_recipes.data.packing import PackedRows, collate, pack_row
from accelerate_recipes.data.shards import (
    TXT,
    Retry,
    all_texts,
    find_shards,
    is_named_elsewhere,
    named_shards,
    needs_of_shards,
    read_documents,
    shards_version,
    text_of,
)
from accelerate_recipes.data.shown import NUM_ROWS
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.hub import cache
from accelerate_recipes.ranks import on_all_data_ranks, on_first_rank, ranks_a_row, readers

NUM_STREAMS = 24  # or a multiple of it; it divides among 1, 2, 3, 4, 6, 8, 12 and 24 ranks
SHUFFLE_BLOCK = 1024  # documents, about 2 MB of C4's text, which every stream holds in memory
HANDED_OVER = 16  # rows of a rank in one collective: every rank gets those of all, and an image's pixels are large
ENCODE_BYTES = 2**17  # of text to tokenise at once: enough to keep the tokenizer busy, little enough to start soon


def fewest_streams(world_size: int) -> int:
    """Return the smallest multiple of NUM_STREAMS that divides among `world_size` processes."""
    return math.lcm(NUM_STREAMS, world_size)


def stream_problems(num_streams: int, world_size: int, row_size: int = 1) -> list[str]:
    """Check that the logical streams divide among the processes, or among groups of `row_size` that share rows."""
    if num_streams % world_size == 0:
        return []
    fitting = [size for size in range(1, num_streams + 1) if num_streams % size == 0]
    return [
        f"--num_streams {num_streams} is not a multiple of {readers(world_size, row_size)}; numbers of "
        f"{'groups' if row_size > 1 else 'processes'} that work: "
        f"{', '.join(map(str, fitting))}; a new run takes --num_streams {fewest_streams(world_size)} by default"
    ]


@dataclass
class StreamArgs:
    """Arguments of a recipe that reads streams. Put it before TrainArgs in the bases of a recipe's arguments."""

    num_streams: int = arg(
        0,
        "Number of logical streams, a multiple of each number of processes on which the run may go on; 0: the checkpoint's, "
        "or for a new run the smallest multiple of 24 that the number of processes divides.",
        min=0,
    )

    @property
    def is_streamed(self) -> bool:
        """Tell whether the rows to train on are a stream."""
        return True

    @property
    def is_finite(self) -> bool:
        """Tell whether a pass over the stream is short enough to be counted before training."""
        return False

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if not self.is_streamed:
            return found + (["--num_streams is for shards that are streamed; remove it"] if self.num_streams else [])
        if self.max_steps < 1 and not self.is_finite:
            found.append("--max_steps is missing: how long a stream is, nobody knows")
        return found + (stream_problems(self.num_streams, world_size, self.row_size) if self.num_streams else [])

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        found = super().settle(saved)
        if self.num_streams or not self.is_streamed:
            return found
        self.num_streams = saved.get("num_streams") or fewest_streams(self.num_launched)
        return found + stream_problems(self.num_streams, self.num_launched, self.row_size)


@dataclass
class TextArgs(StreamArgs):
    """Arguments of a recipe that streams text from shards: files of a dataset, or files named one by one."""

    shares_rows = True

    dataset_name: str = arg(
        "allenai/c4", "Dataset on the Hub, or a folder with the same files, such as a mounted copy.", fixed=False
    )
    dataset_revision: str = arg(
        "", "Branch or commit of the dataset; default: the downloaded commit, else the newest of main.", fixed=False
    )
    dataset_files: str = arg("en/c4-train.*.json.gz", "Pattern of the dataset's files to train on.", fixed=False)
    validation_dataset_files: str = arg(
        "en/c4-validation.*.json.gz", "Pattern of the dataset's files to validate on.", fixed=False
    )
    train_files: list[str] = arg(
        [], "Paths or URLs of files to train on, or folders, instead of a dataset.", fixed=False
    )
    validation_files: list[str] = arg(
        [], "Paths or URLs of files to validate on, or folders; default: a share of --train_files.", fixed=False
    )
    heldout_share: float = arg(
        0.05,
        "Share of the documents of --train_files to validate on, chosen by a hash of the text, where nothing else is named; "
        "0: validate on the dataset.",
        min=0,
        below=1,
    )
    text_column: str = arg("text", "Key or column that holds the text.")
    pretokenize: str = arg(
        "", "Folder for the tokens of all training text, which is then tokenised only once; empty: none.", fixed=False
    )
    min_document_tokens: int = arg(
        0, "Leave out documents with fewer tokens, in training and validation: to train on long ones alone.", min=0
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        for name in ("validation_files",) if self.pretokenize else ("train_files", "validation_files"):
            here = [file for file in getattr(self, name) if not (is_named_elsewhere(file) or self.is_elsewhere(file))]
            try:
                named_shards(here)
            except ConfigError as error:
                found.append(f"--{name} {error}")
        return found

    @property
    def is_finite(self) -> bool:
        return bool(self.train_files) and not any(map(is_named_elsewhere, self.train_files))

    @property
    def share_heldout(self) -> float:
        """Share of the documents of --train_files that are validated on; 0 if other files are."""
        fields = TextArgs.__dataclass_fields__
        names = ("dataset_name", "validation_dataset_files")
        is_named = self.validation_files or any(getattr(self, name) != fields[name].default for name in names)
        return self.heldout_share if self.train_files and not is_named else 0.0

    def train_shards(self) -> list[str]:
        """Find the files to train on."""
        if self.train_files:
            return named_shards(self.train_files)
        return find_shards(self.dataset_name, self.dataset_files, "training", self.dataset_revision)

    def validation_shards(self) -> list[str]:
        """Find the files to validate on."""
        if self.share_heldout:
            return self.train_shards()
        if self.validation_files:
            return named_shards(self.validation_files)
        return find_shards(self.dataset_name, self.validation_dataset_files, "validation", self.dataset_revision)

    def train_texts(self) -> Iterator[str]:
        """Read the documents to train on, shard by shard."""
        texts = all_texts(self.train_shards(), self.text_column)
        return (text for text in texts if not falls_under(text, self.share_heldout))

    def validation_text(self, tokenizer: PreTrainedTokenizerBase) -> "TextShards":
        """Open the text to validate on."""
        share = self.share_heldout
        return TextShards(
            self.validation_shards(), tokenizer, self.text_column, heldout_share=share, is_heldout=share > 0
        )

    def text_note(self, shards: Sequence[str]) -> str:
        """Say, for the end of a line, what is held out, and what a document is where that is not clear; else nothing."""
        held = f"; {self.share_heldout:.1%} of the documents, by a hash of their text, are validated on"
        is_txt = any(shard.endswith(TXT) for shard in shards)
        return (held if self.share_heldout else "") + ("; each .txt file is one document" if is_txt else "")

    def text_datasets(self, training: bool) -> list[cache.HubDataset]:
        """List what is read from the Hub for validation and, with `training`, for training."""
        found = []
        validated = self.train_files if self.share_heldout else self.validation_files
        parts = [(validated, self.validation_dataset_files), (self.train_files, self.dataset_files)]
        for files, pattern in parts if training else parts[:1]:
            dataset = cache.HubDataset(self.dataset_name, files=pattern, revision=self.dataset_revision, streamed=True)
            found += needs_of_shards(files) if files else [dataset]
        return found

    @property
    def text_source(self) -> str:
        """Name of the text's source, for messages."""
        return ", ".join(self.train_files) or f"{self.dataset_name} ({self.dataset_files})"


class Documents(Protocol):
    """Source of a stream's tokens: shards of text or of images, or shards that were tokenised beforehand."""

    shards: Sequence[str]

    def version(self) -> dict[str, str]:
        """Return what changes when the data change, by kind: only values of one kind can be compared."""
        ...

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[Any]:
        """Yield documents `first`, `first + stride`, ... of a shard, in a form that is cheap to skip."""
        ...

    def tokens(self, shard: int, documents: Any, first: int = 0, epoch: int = 0) -> Iterator[np.ndarray]:
        """Return the tokens of `documents`, from number `first` on: (T,) integers each, which end with the end token.

        A document that is held out has none. The documents are those that a stream shuffles together in an `epoch`. An
        image is one token, an object; what chance makes of it depends on the epoch, and may need any of the others.
        """
        ...


@dataclass
class TextShards:
    """Source of text that is tokenised as it is read. A document starts with the begin token if the tokenizer adds one.

    Documents of which the hash falls under `heldout_share` are not read; with `is_heldout` no others are.
    """

    shards: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    text_column: str = "text"
    retry: Retry = field(default_factory=Retry)
    heldout_share: float = 0.0
    is_heldout: bool = False
    bos: list[int] = field(init=False)
    backend: Tokenizer = field(init=False)

    def __post_init__(self):
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token, which would end each document; set its eos_token")
        bos = self.tokenizer.bos_token_id
        self.bos = [bos] if bos is not None and self.tokenizer("a")["input_ids"][0] == bos else []
        # Use a copy: other callers change the truncation and padding of the original.
        self.backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()

    def version(self) -> dict[str, str]:
        return shards_version(self.shards)

    def read(
        self, shard: int, first: int, stride: int, on_retry: Callable[[], None]
    ) -> Iterator[tuple[int, bytes | str]]:
        return read_documents(self.shards[shard], self.text_column, first, stride, self.retry, on_retry)

    def tokens(
        self, shard: int, documents: Iterable[tuple[int, bytes | str]], first: int = 0, epoch: int = 0
    ) -> Iterator[np.ndarray]:
        texts, size = [], 0
        for index, document in islice(documents, first, None):
            text = text_of(self.shards[shard], index, document, self.text_column)
            texts.append(text if self.is_read(text) else None)
            size += len(document)
            if size >= ENCODE_BYTES:
                yield from self.encode(texts)
                texts, size = [], 0
        yield from self.encode(texts)

    def is_read(self, text: str | None) -> bool:
        """Tell whether there is a document, and on this side of what is held out."""
        return text is not None and falls_under(text, self.heldout_share) == self.is_heldout

    def lengths(self, shard: int) -> np.ndarray:
        """Count the tokens of each document of a shard."""
        documents = self.read(shard, 0, 1, on_retry=lambda: None)
        return np.array([len(tokens) for tokens in self.tokens(shard, documents)], dtype=np.int64)

    def encode(self, texts: Sequence[str | None]) -> list[np.ndarray]:
        """Return the token ids (int32) of each text; of None none. Nothing is truncated, whatever the tokenizer did last."""
        eos = [self.tokenizer.eos_token_id]
        # `_fast` leaves out the offsets of the tokens in the text, which are not needed.
        encodings = iter(
            self.backend.encode_batch_fast([text for text in texts if text is not None], add_special_tokens=False)
        )
        ids = ([] if text is None else self.bos + next(encodings).ids + eos for text in texts)
        return [np.array(tokens, dtype=np.int32) for tokens in ids]


class StreamState(NamedTuple):
    """Place in a stream where its next row begins, and counts of what came before."""

    epoch: int = 0  # completed passes over all text
    part: int = 0  # place in the epoch's list of the stream's shards
    document: int = 0  # place among the stream's documents of this shard, in shuffled order
    token: int = 0  # place in this document
    rows: int = 0  # since the start of the epoch
    tokens: int = 0  # since the start of the run
    documents: int = 0  # documents that ended since the start of the run
    left_out: int = 0  # documents with too few tokens since the start of the run


class Order(NamedTuple):
    """Settings that, besides the text, decide which rows the streams yield."""

    num_streams: int
    max_length: int
    seed: int
    shuffle_block: int = SHUFFLE_BLOCK
    min_document_tokens: int = 0
    heldout_share: float = 0.0


class Row(NamedTuple):
    """Whole row of a stream, or the remainder of its epoch, with fewer tokens or none.

    The rows of all streams come in the order of their `key`: an epoch's whole rows, round by round, then its remainders.
    """

    epoch: int
    is_rest: bool
    place: int  # number of rows before it in the stream's epoch * number of streams + the stream
    tokens: np.ndarray  # (T,) integers, or one object
    lengths: list[int]  # of the pieces of documents in the row
    state: StreamState  # of its stream, after this row

    @property
    def key(self) -> tuple[int, bool, int]:
        return self[:3]


def generator(seed: int, epoch: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch], spawn_key=key)))


def parts_of_stream(order: Order, num_shards: int, stream: int, epoch: int) -> list[tuple[int, int, int]]:
    """List what one stream reads in one epoch, as (shard, residue, stride): documents residue, residue + stride, ...

    With 24 or more shards, a stream owns whole shards, and each is read once. Shards left over are split rather than
    dealt out, so that streams have nearly equal lengths; a single shard is decompressed by all 24 streams, which costs less
    than tokenising it. Neighbouring streams share a shard, so that each rank has a part of each.
    """
    shards = generator(order.seed, epoch).permutation(num_shards).tolist()
    left = num_shards % order.num_streams
    whole = num_shards - left
    parts = [(shard, 0, 1) for shard in shards[stream : whole : order.num_streams]]
    if left:
        place = stream * left // order.num_streams
        first, end = (-(-p * order.num_streams // left) for p in (place, place + 1))
        parts.append((shards[whole + place], stream - first, end - first))
    return parts


def stream_documents(
    source: Documents, order: Order, stream: int, state: StreamState, on_retry: Callable[[], None]
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Yield the documents of one stream from `state` to the end of its epoch, as ((part, document), tokens)."""
    skip, size = state.document, order.shuffle_block
    parts = parts_of_stream(order, len(source.shards), stream, state.epoch)
    for part, (shard, residue, stride) in enumerate(parts[state.part :], state.part):
        first_block, skip = divmod(skip, size)
        documents = source.read(shard, residue + first_block * size * stride, stride, on_retry)
        for block in count(first_block):
            members = list(islice(documents, size))
            if not members:
                break
            shuffled = generator(order.seed, state.epoch, shard, residue, block).permutation(len(members)).tolist()
            chosen = [members[i] for i in shuffled]
            for place, tokens in enumerate(source.tokens(shard, chosen, skip, state.epoch), skip):
                yield (part, block * size + place), tokens
            skip = 0
        skip = 0


def stream_rows(
    source: Documents, order: Order, stream: int, state: StreamState, on_retry: Callable[[], None]
) -> Iterator[Row]:
    """Yield the rows of one stream from `state` on, without end; each epoch ends with a remainder.

    Raises:
        DataError: if there is no document at all.
    """

    def row(is_rest: bool, behind: StreamState) -> Row:
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
        place = state.rows * order.num_streams + stream
        return Row(state.epoch, is_rest, place, tokens, [len(piece) for piece in pieces], behind)

    while True:
        pieces, space = [], order.max_length
        start, tokens_seen, ended, left_out = state.token, state.tokens, state.documents, state.left_out
        for (part, document), tokens in stream_documents(source, order, stream, state, on_retry):
            if len(tokens) < order.min_document_tokens:
                left_out += len(tokens) > 0  # a blank line is no document
                continue
            while start < len(tokens):
                piece = tokens[start : start + space]
                pieces.append(piece)
                space -= len(piece)
                start += len(piece)
                tokens_seen += len(piece)
                is_end = start == len(tokens)
                ended += is_end
                if space == 0:
                    place = (document + 1, 0) if is_end else (document, start)
                    behind = StreamState(state.epoch, part, *place, state.rows + 1, tokens_seen, ended, left_out)
                    yield row(False, behind)
                    state, pieces, space = behind, [], order.max_length
            start = 0
        if not pieces and state.rows == 0:
            check_not_empty(source, order, on_retry)
        behind = StreamState(state.epoch + 1, tokens=tokens_seen, documents=ended, left_out=left_out)
        yield row(True, behind)
        state = behind


def check_not_empty(source: Documents, order: Order, on_retry: Callable[[], None]) -> None:
    """Raise DataError if no shard has a document that is long enough: a stream would search for one for ever."""

    def has_one(shard: int) -> bool:
        documents = source.read(shard, 0, 1, on_retry)
        while members := list(islice(documents, order.shuffle_block)):
            if any(len(tokens) >= max(1, order.min_document_tokens) for tokens in source.tokens(shard, members)):
                return True
        return False

    if not any(map(has_one, range(len(source.shards)))):
        more = f" and {len(source.shards) - 1} more" if len(source.shards) > 1 else ""
        least = f" of --min_document_tokens {order.min_document_tokens} or more" if order.min_document_tokens else ""
        left = f", beside the {order.heldout_share:.1%} held out" if order.heldout_share else ""
        raise DataError(f"there is no document{least} to train on in {source.shards[0]}{more}{left}")


def rows_of_epoch(lengths: Sequence[np.ndarray], order: Order, epoch: int) -> int:
    """Count the rows of an epoch, of the numbers of tokens of each shard's documents."""
    whole, rests = 0, []
    for stream in range(order.num_streams):
        parts = parts_of_stream(order, len(lengths), stream, epoch)
        read = np.concatenate([lengths[shard][first::stride] for shard, first, stride in parts] or [np.empty(0, int)])
        rows, rest = divmod(int(read[read >= order.min_document_tokens].sum()), order.max_length)
        whole += rows
        rests.append(((epoch, True, rows * order.num_streams + stream), rest, 0))
    return whole + len(join_rests(sorted(rests), order.max_length))


class StreamRows(IterableDataset):
    """Dataset of the rows of some streams in their order, without end, as lists of `Row`. An error is yielded as text."""

    def __init__(self, source: Documents, order: Order, states: dict[int, StreamState], retries: torch.Tensor):
        self.source = source
        self.order = order
        self.states = states
        self.retries = retries  # (number of streams,) in shared memory

    def __iter__(self) -> Iterator[list[Row] | str]:
        rows = [self._rows_of(stream) for stream in self.states]
        try:
            # Use all cores: what a resume skips is decompressed outside of the interpreter's lock.
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                first = list(pool.map(next, rows))
            merged = heapq.merge(*(chain([row], rest) for row, rest in zip(first, rows, strict=True)))
            while True:
                yield list(islice(merged, len(rows)))
        except DataError as error:  # an exception would be wrapped in the worker's traceback
            yield str(error)

    def _rows_of(self, stream: int) -> Iterator[Row]:
        def on_retry() -> None:
            self.retries[stream] += 1

        return stream_rows(self.source, self.order, stream, self.states[stream], on_retry)


class Lookahead:
    """Endless iterator of rows, which can look at the next rows before it takes them."""

    def __init__(self, rows: Iterator[Row]):
        self.rows = rows
        self.waiting: deque[Row] = deque()

    def first(self, number: int) -> Iterator[Row]:
        for i in range(number):
            if i == len(self.waiting):
                self.waiting.append(next(self.rows))
            yield self.waiting[i]

    def take(self, number: int) -> list[Row]:
        list(self.first(number))
        return [self.waiting.popleft() for _ in range(number)]


class StreamLoader:
    """Loader of this rank's micro-batches in the order of the steps, without end, and of the state of its streams.

    Each iteration continues after the last whole step of the previous one, or where `start_at` says. Batches are in
    host memory, pinned if there is a GPU.
    """

    def __init__(
        self,
        source: Documents,
        args: TrainArgs,
        rank: int,
        world_size: int,
        *,
        max_length: int,
        document_mask: bool = True,
        num_streams: int = NUM_STREAMS,
        shuffle_block: int = SHUFFLE_BLOCK,
        min_document_tokens: int = 0,
        heldout_share: float = 0.0,
    ):
        if problems := stream_problems(num_streams, world_size, ranks_a_row()):
            raise ConfigError(problems[0])
        self.source = source
        self.args = args
        self.rank, self.world_size = rank, world_size
        self.document_mask = document_mask
        self.share = args.accumulation_steps(world_size) * args.per_device_train_batch_size
        self.order = Order(num_streams, max_length, args.seed, shuffle_block, min_document_tokens, heldout_share)
        self.step = 0
        self.consumed = {stream: StreamState() for stream in range(rank, num_streams, world_size)}
        # Each worker writes the entries of its own streams; the main process reads them.
        self.retries = torch.zeros(num_streams, dtype=torch.int64).share_memory_()
        self.is_uneven = True
        self.version = on_first_rank(source.version)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._batches(Lookahead(heapq.merge(*self._start_workers())))

    def _batches(self, ahead: Lookahead) -> Iterator[dict[str, Any]]:
        size = self.args.per_device_train_batch_size
        self.is_uneven, last = True, None  # the ranks have not agreed on anything yet
        while True:
            if self.is_uneven:
                mine, gone = self._divide(ahead)
            else:
                gone = ahead.take(self.share)
                mine = [[row] for row in gone]
            last = gone[-1] if gone else last
            for start in range(0, self.share, size):
                if start + size == self.share:
                    self.step += 1
                    for row in gone:
                        self.consumed[row.place % self.order.num_streams] = row.state
                    self.is_uneven = not self._goes_on_evenly(last, ahead)
                batch = self._batch(mine[start : start + size])
                if torch.cuda.is_available():
                    batch = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                yield batch

    def first_batch(self, size: int = NUM_ROWS) -> dict[str, Any]:
        """Make a batch of the run's first `size` rows, read by this process alone, for a reader.

        Raises:
            DataError: for shards that cannot be read.
        """
        streams = range(self.order.num_streams)
        first = (next(stream_rows(self.source, self.order, s, StreamState(), lambda: None)) for s in streams)
        return self._batch([[row] for row in islice((row for row in first if len(row.tokens)), size)])

    def num_steps(self) -> int:
        """Count the optimizer steps of the run: --max_steps, or those with which each row comes --num_train_epochs times.

        The first process counts the tokens of all documents. The last step is filled with rows of the next epoch.

        Raises:
            ConfigError: if it would be none.
            DataError: for shards that cannot be read.
        """

        def count() -> int:
            lengths = [self.source.lengths(shard) for shard in range(len(self.source.shards))]  # pyright: ignore
            whole, part = divmod(self.args.num_train_epochs, 1)
            rows = sum(rows_of_epoch(lengths, self.order, epoch) for epoch in range(int(whole)))
            return rows + round(part * rows_of_epoch(lengths, self.order, int(whole)))

        return (
            self.args.max_steps
            if self.args.max_steps > 0
            else max(1, -(-on_first_rank(count) // self.args.total_batch_size))
        )

    @property
    def workers_note(self) -> str:
        """Say, for the end of a line, how many workers read if more were asked for than a rank has streams; else nothing."""
        asked, streams = self.args.dataloader_num_workers, len(self.consumed)
        return f"; {streams} of {asked} workers read, one a stream: see --num_streams" if asked > streams else ""

    def _start_workers(self) -> list[Iterator[Row]]:
        # A worker without streams would have nothing to do.
        num_workers = min(self.args.dataloader_num_workers, len(self.consumed))
        streams = sorted(self.consumed)
        parts = [streams[worker::num_workers] for worker in range(num_workers)] or [streams]
        # Prefetch enough rows for the next step while a step is computed.
        lists_of_two_steps = max(2, -(-2 * self.share // len(streams)))
        started = []
        for part in parts:
            states = {stream: self.consumed[stream] for stream in part}
            rows = StreamRows(self.source, self.order, states, self.retries)
            # Each worker has its own loader, because workers do not have equally many rows.
            loader = DataLoader(
                rows,
                batch_size=None,
                collate_fn=as_it_is,
                num_workers=1 if num_workers else 0,
                prefetch_factor=lists_of_two_steps if num_workers else None,
                # Without this, iter() draws from the global generator, which changes a resumed run's dropout.
                generator=torch.Generator(),
            )
            started.append(iter(loader))
        return [single_rows(lists) for lists in started]

    def _goes_on_evenly(self, last: Row | None, ahead: Lookahead) -> bool:
        """Tell whether this rank's share of the next step is simply its next rows, as far as this rank can see.

        These are the next rows of the run if the same holds on all ranks: they are in the same epoch as the row before
        them, `last`, and leave no gap, as a stream does that has ended.
        """
        for row in ahead.first(self.share):
            if last is None or row.key != (last.epoch, False, last.place + self.world_size):
                return False
            last = row
        return True

    def _divide(self, ahead: Lookahead) -> tuple[list[list[Row]], list[Row]]:
        """Agree with all ranks on the next step's rows, and on which rank takes which row.

        Returns:
            This rank's share, where each entry is a whole row or remainders that fit into one; and the rows of this rank's
            own streams that are in the step, whichever rank takes them.
        """
        num_rows, num_offered = self.share * self.world_size, self.share + 1
        while True:
            offer = [(row.key, len(row.tokens)) for row in ahead.first(num_offered)]
            offers = on_all_data_ranks(offer)
            # Beyond this key, a rank's rows after its offer may come before other ranks' offers.
            bound = min(offered[-1][0] for offered in offers)
            known = sorted((*row, rank) for rank, offered in enumerate(offers) for row in offered if row[0] <= bound)
            joined = join_rests(known, self.order.max_length)
            if len(joined) > num_rows:  # one more, which shows that the last row is whole
                break
            if offer[-1][0] == bound:
                num_offered *= 2
        end, _, _ = joined[num_rows][0]
        own = ahead.take(sum(key < end for key, _ in offer))

        shares = [[] for _ in range(self.world_size)]
        left = deque()
        for rows in joined[:num_rows]:
            share = shares[rows[0][-1]]
            (share if len(share) < self.share else left).append(rows)
        for share in shares:
            while len(share) < self.share:
                share.append(left.popleft())
        found = {row.key: row for row in own}
        taken = {key for key, _, _ in chain(*shares[self.rank])}
        given = [[] for _ in range(self.world_size)]
        for taker, rows in enumerate(shares):
            for key, _, owner in chain(*rows):
                if owner != taker:
                    given[owner].append(key)
        for start in range(0, max(map(len, given)), HANDED_OVER):
            part = {key: found[key] for key in given[self.rank][start : start + HANDED_OVER]}
            for handed_over in on_all_data_ranks(part):
                found |= {key: row for key, row in handed_over.items() if key in taken}
        return [[found[key] for key, _, _ in rows] for rows in shares[self.rank]], own

    def _batch(self, rows: list[list[Row]]) -> dict[str, Any]:
        return collate([self._row(parts) for parts in rows])

    def _row(self, parts: list[Row]) -> dict[str, Any]:
        tokens = np.concatenate([part.tokens for part in parts])
        lengths = [length for part in parts for length in part.lengths]
        row = pack_row(tokens, lengths, self.order.max_length, 0, self.document_mask)
        return row | {"row": torch.tensor([parts[0].epoch, parts[0].place])}

    def state(self) -> dict:
        """Return the state of this rank's streams after the last step whose micro-batches were all delivered.

        It holds plain numbers and strings, fit for JSON.
        """
        return {
            "order": self.order._asdict(),
            "shards": fingerprint(self.source.shards),
            "version": self.version,
            "streams": {str(stream): list(state) for stream, state in self.consumed.items()},
        }

    def start_at(self, step: int, states: list[dict]) -> None:
        """Begin after `step` optimizer steps; call it before iterating.

        `states` are what `state` returned then on all ranks, whose number may differ; empty at the start of a run.

        Raises:
            ConfigError: for the state of other data, or of another order.
        """
        self.step = step
        if not states:
            return
        then, now = states[0], self.state()
        for name, value in now["order"].items():
            if then["order"][name] != value:
                raise ConfigError(f"{name} is {value}, the checkpoint has {then['order'][name]}; set it back")
        if then["shards"] != now["shards"]:
            raise ConfigError(
                f"the data are others than the checkpoint's: {now['shards'][0]} shards now, {then['shards'][0]} then"
                f"{', with other names' if now['shards'][0] == then['shards'][0] else ''}; a run goes on with the "
                "shards that it started with"
            )
        for kind, version in self.version.items():
            if then["version"].get(kind, version) != version:
                raise ConfigError(
                    f"the data changed since the checkpoint: {kind} {version} now, {then['version'][kind]} then; put them "
                    "back as they were (of a dataset on the Hub: --dataset_revision), or start anew in another --output_dir"
                )
        streams = {stream: state for part in states for stream, state in part["streams"].items()}
        self.consumed = {stream: StreamState(*streams[str(stream)]) for stream in self.consumed}

    def counts(self) -> dict[str, int]:
        """Count what this rank's streams have read since the start of the run; to be summed over the ranks.

        `retries` counts those on a failing network since this process started.
        """
        states = self.consumed.values()
        return {
            "tokens_seen": sum(state.tokens for state in states),
            "documents_seen": sum(state.documents for state in states),
            **(
                {"documents_left_out": sum(state.left_out for state in states)}
                if self.order.min_document_tokens
                else {}
            ),
            "retries": int(self.retries.sum()),
        }


def as_it_is(rows: list[Row] | str) -> list[Row] | str:
    return rows


def single_rows(lists: Iterator[list[Row] | str]) -> Iterator[Row]:
    """Raise DataError for an error that a worker found."""
    for rows in lists:
        if isinstance(rows, str):
            raise DataError(rows)
        yield from rows


Offer = tuple[tuple[int, bool, int], int, int]  # key of a row, number of its tokens, rank that has it


def join_rests(rows: Sequence[Offer], max_length: int) -> list[list[Offer]]:
    """Join remainders of an epoch that follow each other, as many as fit into a row; whole rows stay single."""
    joined: list[list[Offer]] = []
    space = 0
    for row in rows:
        (epoch, is_rest, _), length, _ = row
        if length == 0:
            continue
        if is_rest and joined and joined[-1][0][0][:2] == (epoch, True) and length <= space:
            joined[-1].append(row)
            space -= length
        else:
            joined.append([row])
            space = max_length - length
    return joined


def fingerprint(shards: Sequence[str]) -> list:
    """Return the number of shards and a hash of their names, without folders: a run may continue with a copy of the data."""
    names = "\n".join(PurePath(shard).name for shard in shards)
    return [len(shards), xxhash.xxh64_hexdigest(names.encode())]


class ValidationRows(NamedTuple):
    """Fixed rows on which the model is validated, for `make_eval_loader`."""

    rows: PackedRows
    texts: list[str]  # the documents in the rows; the last may be cut
    bytes_per_token: float  # of these documents, in UTF-8

    def measures(self, loss: float) -> dict[str, float]:
        """Return the loss in nats per token, e to its power, and bits per byte, which compares across tokenizers."""
        # A token at the start of a row or document is no target; assume that it costs as much as the others.
        bits_per_byte = loss / math.log(2) / self.bytes_per_token
        perplexity = math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
        return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}


def validation_rows(
    source: TextShards,
    num_rows: int,
    max_length: int,
    pad_token_id: int,
    document_mask: bool,
    min_document_tokens: int = 0,
) -> ValidationRows:
    """Read the first `num_rows` rows of the documents in their own order into memory; fewer if the shards hold fewer.

    The last row may be padded then.

    Raises:
        DataError: for shards without documents.
    """
    texts: list[str] = []
    pieces: list[np.ndarray] = []
    wanted, num_tokens = num_rows * max_length, 0
    for shard in range(len(source.shards)):
        documents = source.read(shard, 0, 1, on_retry=lambda: None)
        while num_tokens < wanted and (document := list(islice(documents, 1))):
            text = text_of(source.shards[shard], *document[0], source.text_column)
            (tokens,) = source.encode([text]) if source.is_read(text) else ([],)
            if len(tokens) >= max(1, min_document_tokens):
                texts.append(text)
                pieces.append(tokens)
                num_tokens += len(tokens)
    if not texts:
        least = f" of --min_document_tokens {min_document_tokens} or more" if min_document_tokens else ""
        more = f" and {len(source.shards) - 3} more" if len(source.shards) > 3 else ""
        shown = ", ".join(source.shards[:3]) + more
        if source.is_heldout:
            raise DataError(
                f"no document{least} of {shown} is held out to validate on by --heldout_share {source.heldout_share}; raise "
                "it, or give --validation_files"
            )
        raise DataError(f"there is no document{least} to validate on in {shown}")
    bytes_per_token = sum(len(text.encode()) for text in texts) / num_tokens
    tokens = np.concatenate(pieces)[:wanted]
    is_start = np.zeros(num_tokens, dtype=bool)
    is_start[np.cumsum([0, *(len(piece) for piece in pieces[:-1])])] = True
    is_start[::max_length] = True
    starts = np.flatnonzero(is_start[: len(tokens)])
    lengths = np.diff(np.append(starts, len(tokens)))
    first = range(0, len(tokens), max_length)
    rows = Dataset.from_dict(
        {
            "input_ids": [tokens[i : i + max_length] for i in first],
            "lengths": [lengths[(starts >= i) & (starts < i + max_length)] for i in first],
        }
    )
    return ValidationRows(PackedRows(rows, max_length, pad_token_id, document_mask), texts, bytes_per_token)
