"""An endless order of packed rows from shards of text, which any number of ranks can leave and take up again.

The text is divided among a fixed number of logical streams, 24 unless said otherwise. Each goes through its own
documents, epoch after epoch, and cuts them into rows of `max_length` tokens without padding: what does not fit goes on
in the stream's next row, and the last, partial row of an epoch is filled up from the next. Row n of the run is the
(n div 24)-th row of stream n mod 24. So optimizer step s, which trains on rows s * B to (s + 1) * B - 1, is the same set
of rows on any number of ranks that divides 24; rank r of W takes those with n mod W = r, and with them whole streams.

What an epoch's order is made of, all keyed on (seed, epoch): the shards are permuted and dealt out to the streams;
those left over (all of them, when there are fewer shards than streams) are shared: of k streams with one shard, each
takes every k-th document. Within a shard, blocks of `shuffle_block` documents of a stream are shuffled.

Every row carries the state of its stream behind it, six numbers, so a checkpoint knows what was consumed, not what
workers have prepared beyond. To resume, each stream decompresses one shard from its start, at most.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import ConfigError, TrainArgs
from accelerate_recipes.data import PackedRows, make_row
from accelerate_recipes.parent import start_worker
from accelerate_recipes.shards import DataError, Retry, read_documents, text_of

NUM_STREAMS = 24  # divides among 1, 2, 3, 4, 6, 8, 12 and 24 ranks
SHUFFLE_BLOCK = 1024  # documents; of C4 about 2 MB of text, which every stream holds in memory
ENCODE_BYTES = 2**17  # of text tokenised at once: enough to keep the tokenizer busy, little enough to start soon

Batch = dict[str, torch.Tensor]


def stream_problems(num_streams: int, world_size: int) -> list[str]:
    """Whether the logical streams divide among the processes."""
    if num_streams % world_size == 0:
        return []
    fitting = [size for size in range(1, num_streams + 1) if num_streams % size == 0]
    return [
        f"--num_streams {num_streams} is not a multiple of {world_size} processes; numbers of processes that work: "
        f"{', '.join(map(str, fitting))}; or, for a run that starts anew, --num_streams {-(-num_streams // world_size) * world_size}"
    ]


class Documents(Protocol):
    """Where streams get tokens from: text shards, or shards that were tokenised before."""

    shards: Sequence[str]

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[Any]:
        """Documents `first`, `first + stride`, ... of a shard, in a form that is cheap to pass over."""

    def tokens(self, shard: int, documents: Sequence[Any]) -> Iterator[np.ndarray]:
        """The tokens of some of them, (T,) integers; each ends with the end token."""


@dataclass
class TextShards:
    """Text that is tokenised as it is read. A document starts with the begin token if the tokenizer adds one."""

    shards: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    text_column: str = "text"
    retry: Retry = field(default_factory=Retry)
    bos: list[int] = field(init=False)
    backend: Tokenizer = field(init=False)

    def __post_init__(self):
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token, which would end each document; set its eos_token")
        bos = self.tokenizer.bos_token_id
        self.bos = [bos] if bos is not None and self.tokenizer("a")["input_ids"][0] == bos else []
        # A copy: the original's truncation and padding change with every call of others.
        self.backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()

    def read(
        self, shard: int, first: int, stride: int, on_retry: Callable[[], None]
    ) -> Iterator[tuple[int, bytes | str]]:
        return read_documents(self.shards[shard], self.text_column, first, stride, self.retry, on_retry)

    def tokens(self, shard: int, documents: Iterable[tuple[int, bytes | str]]) -> Iterator[np.ndarray]:
        texts, size = [], 0
        for index, document in documents:
            texts.append(text_of(self.shards[shard], index, document, self.text_column))
            size += len(document)
            if size >= ENCODE_BYTES:
                yield from self.encode(texts)
                texts, size = [], 0
        yield from self.encode(texts)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids (int32) of each text. Nothing is truncated, whatever the tokenizer was last used for."""
        eos = [self.tokenizer.eos_token_id]
        # `_fast` leaves out the offsets of the tokens in the text, which nobody asks for here.
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(self.bos + encoding.ids + eos, dtype=np.int32) for encoding in encodings]


class StreamState(NamedTuple):
    """Where the next row of a stream begins, and what came before."""

    epoch: int = 0  # passes over all text that lie behind
    part: int = 0  # place in the epoch's list of the stream's shards
    document: int = 0  # place among the stream's documents of this shard, in shuffled order
    token: int = 0  # of this document
    rows: int = 0  # since the start of the run
    documents: int = 0  # that ended in these rows


class Order(NamedTuple):
    """What, besides the text, decides which rows the streams yield."""

    num_streams: int
    max_length: int
    seed: int
    shuffle_block: int = SHUFFLE_BLOCK


def generator(seed: int, epoch: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch], spawn_key=key)))


def parts_of_stream(order: Order, num_shards: int, stream: int, epoch: int) -> list[tuple[int, int, int]]:
    """What one stream reads in one epoch, as (shard, residue, stride): documents residue, residue + stride, ...

    With 24 shards and more, a stream owns whole shards, and each is read once. Shards left over are split rather than
    dealt out, so that streams are of nearly equal length; one shard alone is decompressed by all 24, which costs less
    than tokenising it.
    """
    shards = generator(order.seed, epoch).permutation(num_shards).tolist()
    left = num_shards % order.num_streams
    whole = num_shards - left
    parts = [(shard, 0, 1) for shard in shards[stream : whole : order.num_streams]]
    if left:
        residue, place = divmod(stream, left)
        stride = len(range(place, order.num_streams, left))
        parts.append((shards[whole + place], residue, stride))
    return parts


def stream_documents(
    source: Documents, order: Order, stream: int, state: StreamState, on_retry: Callable[[], None]
) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
    """The documents of one stream from `state` on, without end, as ((epoch, part, document), tokens)."""
    skip, size = state.document, order.shuffle_block
    start = state.part
    for epoch in count(state.epoch):
        parts = parts_of_stream(order, len(source.shards), stream, epoch)
        is_empty = (start, skip) == (0, 0)
        for part, (shard, residue, stride) in enumerate(parts[start:], start):
            first_block, skip = divmod(skip, size)
            documents = source.read(shard, residue + first_block * size * stride, stride, on_retry)
            for block in count(first_block):
                members = list(islice(documents, size))
                if not members:
                    break
                is_empty = False
                shuffled = generator(order.seed, epoch, shard, residue, block).permutation(len(members)).tolist()
                chosen = [members[i] for i in shuffled[skip:]]
                for place, tokens in enumerate(source.tokens(shard, chosen), skip):
                    yield (epoch, part, block * size + place), tokens
                skip = 0
            skip = 0
        start = 0
        if is_empty:
            raise DataError(
                f"stream {stream} of {order.num_streams} has no document in epoch {epoch}: the {len(source.shards)} shards "
                f"hold fewer documents than there are streams; lower --num_streams"
            )


def stream_rows(
    source: Documents, order: Order, stream: int, state: StreamState, on_retry: Callable[[], None]
) -> Iterator[tuple[list[np.ndarray], StreamState]]:
    """The rows of one stream from `state` on, without end: the pieces of documents in each, and the state behind it."""
    pieces, space = [], order.max_length
    rows, ended, start = state.rows, state.documents, state.token
    for (epoch, part, document), tokens in stream_documents(source, order, stream, state, on_retry):
        while start < len(tokens):
            piece = tokens[start : start + space]
            pieces.append(piece)
            space -= len(piece)
            start += len(piece)
            is_end = start == len(tokens)
            ended += is_end
            if space == 0:
                rows += 1
                place = (document + 1, 0) if is_end else (document, start)
                yield pieces, StreamState(epoch, part, *place, rows, ended)
                pieces, space = [], order.max_length
        start = 0


class Rounds(IterableDataset):
    """Rows of some streams, round by round: a round is the next row of each. In a worker, of the worker's streams.

    A round is a dict of tensors as `make_row` gives them, (R, T), and `state`, (R, 7): the stream's number, and its
    state behind the row. A round that was begun before a checkpoint lacks the rows that were consumed then; with
    nothing left for this worker it is None. What is wrong with the data is yielded as its text.
    """

    def __init__(self, source: Documents, order: Order, states: dict[int, StreamState], document_mask: bool):
        self.source = source
        self.order = order
        self.states = states
        self.document_mask = document_mask
        # Written by the workers, each in the places of its own streams, read by the main process.
        self.retries = torch.zeros(order.num_streams, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Batch | str | None]:
        worker = get_worker_info()
        streams = sorted(self.states)[worker.id :: worker.num_workers] if worker else sorted(self.states)
        rows = {stream: self._rows(stream) for stream in streams}
        try:
            # On all cores: what a resume passes over is decompressed outside of the interpreter's lock.
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                first = list(pool.map(lambda stream: next(rows[stream]), streams))
            rows = {stream: chain([row], rows[stream]) for stream, row in zip(streams, first, strict=True)}
            for finished in count(min(state.rows for state in self.states.values())):
                due = [stream for stream in streams if self.states[stream].rows <= finished]
                yield torch.utils.data.default_collate([next(rows[stream]) for stream in due]) if due else None
        except DataError as error:  # an exception would come out with the worker's traceback around it
            yield str(error)

    def _rows(self, stream: int) -> Iterator[Batch]:
        def on_retry() -> None:
            self.retries[stream] += 1

        order = self.order
        for pieces, state in stream_rows(self.source, order, stream, self.states[stream], on_retry):
            lengths = [len(piece) for piece in pieces]
            row = make_row(np.concatenate(pieces), lengths, order.max_length, 0, self.document_mask)
            yield row | {"state": torch.tensor([stream, *state])}


class StreamLoader:
    """This rank's micro-batches in the order of the steps, without end, and the state of its streams.

    Each iteration goes on behind the last whole step of the one before, or where `start_at` says. Batches lie in
    memory of the host, pinned where there is a GPU.
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
    ):
        if problems := stream_problems(num_streams, world_size):
            raise ConfigError(problems[0])
        self.args = args
        self.accumulation_steps = args.accumulation_steps(world_size)
        self.step = 0
        states = {stream: StreamState() for stream in range(rank, num_streams, world_size)}
        order = Order(num_streams, max_length, args.seed, shuffle_block)
        self.rounds = Rounds(source, order, states, document_mask)
        self.consumed = dict(states)

    def __iter__(self) -> Iterator[Batch]:
        # A worker without a stream would have nothing to do.
        num_workers = min(self.args.dataloader_num_workers, len(self.consumed))
        self.rounds.states, handed_out = dict(self.consumed), dict(self.consumed)
        chunks = start_workers(self.rounds, num_workers, rounds_ahead=self._rounds_of_two_steps())
        rounds = (next_round(chunks, max(1, num_workers)) for _ in count())
        for i, batch in enumerate(regroup(rounds, self.args.per_device_train_batch_size), 1):
            states = [(stream, StreamState(*state)) for stream, *state in batch.pop("state").tolist()]
            handed_out |= dict(states)
            num_streams = self.rounds.order.num_streams
            batch["row"] = torch.tensor([(state.rows - 1) * num_streams + stream for stream, state in states])
            if i % self.accumulation_steps == 0:
                self.step += 1
                self.consumed = dict(handed_out)
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if torch.cuda.is_available() else batch

    def _rounds_of_two_steps(self) -> int:
        """What workers prepare ahead, so that a step does not wait for rows while the one before is computed."""
        rows_per_step = self.accumulation_steps * self.args.per_device_train_batch_size
        return max(2, -(-2 * rows_per_step // len(self.consumed)))

    def state(self) -> dict:
        """State of this rank's streams behind the last step of which all micro-batches were handed out.

        Plain numbers and strings, fit for JSON.
        """
        return {
            "order": self.rounds.order._asdict(),
            "shards": fingerprint(self.rounds.source.shards),
            "streams": {str(stream): list(state) for stream, state in self.consumed.items()},
        }

    def start_at(self, step: int, states: list[dict]) -> None:
        """Before iterating: begin behind `step` optimizer steps.

        `states` are what `state` gave then on all ranks, of whatever number; none at the start of a run.

        Raises:
            ConfigError: for the state of other data, or of another order.
        """
        self.step = step
        if not states:
            return
        then, now, order = states[0], self.state(), self.rounds.order
        for name, value in now["order"].items():
            if then["order"][name] != value:
                raise ConfigError(f"{name} is {value}, the checkpoint has {then['order'][name]}; set it back")
        if then["shards"] != now["shards"]:
            raise ConfigError(
                f"the data are others than the checkpoint's: {now['shards'][0]} shards now, {then['shards'][0]} then"
                f"{', with other names' if now['shards'][0] == then['shards'][0] else ''}; a run goes on with the shards that "
                "it started with"
            )
        streams = {stream: state for part in states for stream, state in part["streams"].items()}
        for stream in self.consumed:
            state = StreamState(*streams[str(stream)])
            before, rest = divmod(self.step * self.args.total_batch_size, order.num_streams)
            if state.rows != before + (stream < rest):
                raise ConfigError(
                    f"stream {stream} of the checkpoint has yielded {state.rows} rows, but {self.step} steps of "
                    f"--total_batch_size {self.args.total_batch_size} take {before + (stream < rest)}; set it back"
                )
            self.consumed[stream] = state

    def counts(self) -> dict[str, int]:
        """What this rank's streams have gone through since the start of the run: add them up over the ranks.

        `retries` of a network that failed are those since this process started.
        """
        states = self.consumed.values()
        return {
            "tokens_seen": sum(state.rows for state in states) * self.rounds.order.max_length,
            "documents_seen": sum(state.documents for state in states),
            "retries": int(self.rounds.retries.sum()),
        }


def start_workers(rounds: Rounds, num_workers: int, rounds_ahead: int) -> Iterator[Batch | str | None]:
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if num_workers:
        # The tokenizer's threads do not survive a fork: a worker that wanted them would wait for ever. The workers
        # share the cores among themselves already.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return iter(
            DataLoader(
                rounds,
                batch_size=None,
                num_workers=num_workers,
                prefetch_factor=rounds_ahead if num_workers else None,
                worker_init_fn=start_worker,
                generator=torch.Generator(),  # else iter() draws from the global one, and a resumed run's dropout differs
            )
        )
    finally:
        if num_workers and before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        elif before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def next_round(rounds: Iterator[Batch | str | None], num_workers: int) -> Batch:
    """Put together what the workers have of a round, in the order of the streams.

    Raises:
        DataError: what a worker found wrong.
    """
    parts = [next(rounds) for _ in range(num_workers)]
    for part in parts:
        if isinstance(part, str):
            raise DataError(part)
    if num_workers == 1:
        return parts[0]
    # A round that a checkpoint has cut may have no row left for a worker.
    rows = concatenate([part for part in parts if part])
    # In numpy: torch would wake all its threads for a copy of some hundred kB.
    by_stream = np.argsort(rows["state"][:, 0].numpy())
    return {name: torch.from_numpy(tensor.numpy()[by_stream]) for name, tensor in rows.items()}


def regroup(rounds: Iterator[Batch], size: int) -> Iterator[Batch]:
    """The rows of the rounds, `size` at a time."""
    waiting: list[Batch] = []
    num_waiting = 0
    for rows in rounds:
        waiting.append(rows)
        num_waiting += len(rows["state"])
        if num_waiting < size:
            continue
        joined = concatenate(waiting)
        for start in range(0, num_waiting - size + 1, size):
            yield {name: tensor[start : start + size] for name, tensor in joined.items()}
        num_waiting %= size
        waiting = [{name: tensor[len(tensor) - num_waiting :] for name, tensor in joined.items()}]


def concatenate(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def fingerprint(shards: Sequence[str]) -> list:
    """Number of shards and a hash of their names. Not of their folders: a run may go on with a copy of the data."""
    names = "\n".join(PurePath(shard).name for shard in shards)
    return [len(shards), xxhash.xxh64_hexdigest(names.encode())]


class ValidationRows(NamedTuple):
    """What the model is validated on, always the same; for `make_eval_loader`."""

    rows: PackedRows
    texts: list[str]  # the documents in them, the last perhaps not to its end
    bytes_per_token: float  # of these documents, in UTF-8: bits per byte = nats per token / ln 2 / this


def validation_rows(
    source: TextShards, num_rows: int, max_length: int, pad_token_id: int, document_mask: bool
) -> ValidationRows:
    """The first `num_rows` rows of the documents in their own order, in memory; fewer, the last of them padded, where
    the shards do not hold as many.

    Raises:
        DataError: for shards without documents.
    """
    texts: list[str] = []
    pieces: list[np.ndarray] = []
    wanted, num_tokens = num_rows * max_length, 0
    for shard in range(len(source.shards)):
        documents = source.read(shard, 0, 1, on_retry=lambda: None)
        while num_tokens < wanted and (document := list(islice(documents, 1))):
            texts.append(text_of(source.shards[shard], *document[0], source.text_column))
            pieces += source.encode(texts[-1:])
            num_tokens += len(pieces[-1])
    if not texts:
        raise DataError(f"there is no document to validate on in {', '.join(source.shards)}")
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
