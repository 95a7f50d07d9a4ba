"""Order of the rows of streams: endless, from shards of text or of images, and the same on any number of ranks.

The documents are divided among a fixed number of logical streams, 24 by default. In each epoch a stream goes through its
own documents and cuts them into rows of `max_length` tokens without padding. The rest of a document that does not fit
continues in the stream's next row. (An image is a document of one token, and a row of its own: see `images.tars`.)

The rows of the run are those of epoch 0, then those of epoch 1, and so on. In an epoch they come in rounds: the first
row of each stream, the second of each stream that has a second, until none is left. Then come the remainders: each
stream leaves less than a row, and a row takes as many remainders as fit. So each document occurs once in each epoch,
however unequal the shards are. Optimizer step s trains on the B rows from s * B on, on any number of ranks.

Rank r of W reads streams r, r + W, ... While every stream has rows, the step's rows of these streams are its share. When
some streams have ended, the ranks agree on the next rows, and ranks with too many rows give some to the others.

The order of an epoch depends on (seed, epoch). The shards are permuted and dealt out to the streams. Shards that are
left over (all of them, if there are fewer shards than streams) are shared: if k streams share a shard, each takes every
k-th document. Within a shard, each stream shuffles its documents in blocks of `shuffle_block`.

In a mixture each place of a stream has a source (`Mixing`), which goes on where its last row in this stream ended. So
a stream keeps a state for each source. Rows run on over the end of an epoch: the row in which an epoch ends goes on with the
first documents of the next, so no stream ends before its sources do. Streams that share a shard take turns with its
documents, so a source may have fewer documents than there are streams: an epoch of it still has each document once.

Every row carries the state of its source in its stream after that row, eight numbers. So a checkpoint holds the states after
the rows that were consumed, not after those that workers have prepared. For a resume, each stream decompresses at most one
shard from its start.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from accelerate_recipes.data.shares import Shares
from accelerate_recipes.errors import DataError

Offer = tuple[tuple[int, bool, int], int, int]  # key of a row, number of its tokens, rank that has it
# Its multiples modulo 2**64 fill any interval evenly, so in few epochs each stream has each of the turns.
GOLDEN = 0x9E3779B97F4A7C15
ROWS_AT_ONCE = 1024  # of a stream, whose sources are computed together
SHUFFLE_BLOCK = 1024  # documents that every stream holds in memory, about 2 MB of C4's text


class Documents(Protocol):
    """Source of a stream's tokens: shards of text or of images, or shards that were tokenised beforehand."""

    shards: Sequence[str]

    def version(self) -> dict[str, str]:
        """Return values that change when the data change, by kind: only values of the same kind can be compared."""
        ...

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[Any]:
        """Yield documents `first`, `first + stride`, ... of a shard, in a form that is cheap to skip."""
        ...

    def tokens(self, shard: int, documents: Any, first: int = 0, epoch: int = 0) -> Iterator[np.ndarray]:
        """Yield the tokens of `documents`, from number `first` on: (T,) integers each, with the end token last.

        A held-out document has no tokens. The documents are those that a stream shuffles together in an `epoch`. An
        image is one token, an object; its augmentation depends on the epoch, and may need any of the other images.
        """
        ...


class StreamState(NamedTuple):
    """Position in a stream at which its next row begins, and counts of what came before."""

    epoch: int = 0  # completed passes over all text
    part: int = 0  # place in the epoch's list of the stream's shards
    document: int = 0  # place among the stream's documents of this shard, in shuffled order
    token: int = 0  # place in this document
    rows: int = 0  # since the start of the epoch; of the run, if rows run on over its end
    tokens: int = 0  # since the start of the run
    documents: int = 0  # documents that ended since the start of the run
    left_out: int = 0  # documents with too few tokens since the start of the run


class Order(NamedTuple):
    """Settings that, together with the text, decide the rows of the streams."""

    num_streams: int
    max_length: int
    seed: int
    shuffle_block: int = SHUFFLE_BLOCK
    min_document_tokens: int = 0
    heldout_share: float = 0.0
    runs_on: bool = False  # a row goes on over the end of an epoch


class Row(NamedTuple):
    """Whole row of a stream, or the remainder of its epoch, which has fewer tokens or none.

    The rows of all streams come in the order of their `key`: the whole rows of an epoch, round by round, then its
    remainders.
    """

    epoch: int
    is_rest: bool
    place: int  # (number of earlier rows of its stream in the epoch) * (number of streams) + (number of its stream)
    tokens: np.ndarray  # (T,) integers, or one object
    lengths: list[int]  # of the pieces of documents in the row
    state: StreamState  # of its source in its stream, after this row
    source: int = 0  # number of its source

    @property
    def key(self) -> tuple[int, bool, int]:
        return self[:3]


def generator(seed: int, epoch: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch], spawn_key=key)))


def parts_of_stream(order: Order, num_shards: int, stream: int, epoch: int) -> list[tuple[int, int, int]]:
    """List what one stream reads in one epoch, as (shard, residue, stride): documents residue, residue + stride, ...

    With 24 or more shards, a stream has whole shards, and each of these is read once. Shards that are left over are
    split instead of dealt out, so that streams have nearly equal lengths. A single shard is decompressed by all 24
    streams, which costs less than tokenising it. Neighbouring streams share a shard, so that each rank has a part of
    each.
    """
    shards = generator(order.seed, epoch).permutation(num_shards).tolist()
    left = num_shards % order.num_streams
    whole = num_shards - left
    parts = [(shard, 0, 1) for shard in shards[stream : whole : order.num_streams]]
    if left:
        # The streams are divided among the shards left over: streams `first` to `end - 1` share this one.
        index = stream * left // order.num_streams
        first, end = (-(-p * order.num_streams // left) for p in (index, index + 1))
        stride = end - first
        turn = (epoch * GOLDEN % 2**64) * stride >> 64 if order.runs_on else 0
        parts.append((shards[whole + index], (stream - first + turn) % stride, stride))
    return parts


def stream_documents(
    source: Documents, order: Order, stream: int, state: StreamState, on_retry: Callable[[], None]
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Yield the documents of one stream from `state` to the end of its epoch, as ((part, document), tokens)."""
    skip, size = state.document, order.shuffle_block
    parts = parts_of_stream(order, len(source.shards), stream, state.epoch)
    for part, (shard, residue, stride) in enumerate(parts[state.part :], state.part):
        # A resume goes straight to the block of the next document, and skips the documents before it in this block.
        first_block, skip = divmod(skip, size)
        documents = source.read(shard, residue + first_block * size * stride, stride, on_retry)
        for block in count(first_block):
            members = list(islice(documents, size))
            if not members:
                break
            shuffled = generator(order.seed, state.epoch, shard, residue, block).permutation(len(members)).tolist()
            chosen = [members[i] for i in shuffled]
            for position, tokens in enumerate(source.tokens(shard, chosen, skip, state.epoch), skip):
                yield (part, block * size + position), tokens
            skip = 0
        skip = 0


def stream_rows(
    source: Documents, order: Order, stream: int, state: StreamState, on_retry: Callable[[], None]
) -> Iterator[Row]:
    """Yield the rows of one stream from `state` on, without end. Each epoch ends with a remainder, unless rows run on.

    Raises:
        DataError: if there is no document at all.
    """

    def row(is_rest: bool, behind: StreamState) -> Row:
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
        position = state.rows * order.num_streams + stream
        return Row(
            0 if order.runs_on else state.epoch, is_rest, position, tokens, [len(piece) for piece in pieces], behind
        )

    # One turn of this loop is the rest of an epoch, from `state` on. `start` is the first unread token of the document.
    pieces, space, is_checked = [], order.max_length, False
    while True:
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
                # A full row: its state names the document, or the token in it, with which the next row begins.
                if space == 0:
                    cursor = (document + 1, 0) if is_end else (document, start)
                    behind = StreamState(state.epoch, part, *cursor, state.rows + 1, tokens_seen, ended, left_out)
                    yield row(False, behind)
                    state, pieces, space = behind, [], order.max_length
            start = 0
        if not (pieces or state.rows or is_checked):
            check_not_empty(source, order, on_retry)
            is_checked = True
        behind = StreamState(state.epoch + 1, tokens=tokens_seen, documents=ended, left_out=left_out)
        if order.runs_on:
            state = behind._replace(rows=state.rows)
        else:
            yield row(True, behind)
            state, pieces, space = behind, [], order.max_length


@dataclass
class Mixing:
    """Sources of the rows of all streams: each mixes the sources by itself, so the ranks need not talk.

    Row k of stream s is row k S + s of the run, of S streams. Its source is what `Shares` says for place k of this stream.
    """

    rows: Sequence[tuple[int, Sequence[float]]]  # weights of the K sources, each from a row of the run on
    limits: np.ndarray  # (number of streams, K): most rows of a stream that come from a source; infinity for any number
    seed: int

    @property
    def num_streams(self) -> int:
        return len(self.limits)

    def place(self, row: int, stream: int) -> int:
        """Return the place in a stream of its first row that is no earlier row of the run than `row`."""
        return max(0, -(-(row - stream) // self.num_streams))

    @cached_property
    def shares(self) -> list[Shares]:
        """Sources of the places of each stream."""
        return [
            Shares([(self.place(row, stream), some) for row, some in self.rows], limits, self.seed, stream)
            for stream, limits in enumerate(self.limits.tolist())
        ]

    @property
    def end(self) -> float:
        """First row of the run for which no source is left; infinity if there always is one."""
        return min(shares.end * self.num_streams + stream for stream, shares in enumerate(self.shares))

    def counts(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Count the rows of each source among the first `num_rows` of the run, and those that the weights ask for, (K,)."""
        ends = [self.place(num_rows, stream) for stream in range(self.num_streams)]
        both = [(shares.counts(end), shares.asked(end)) for shares, end in zip(self.shares, ends, strict=True)]
        counts, asked = np.sum(both, axis=0)
        return counts.astype(int), asked


def rows_of_sources(
    sources: Sequence[Documents],
    orders: Sequence[Order],
    mixing: Mixing,
    stream: int,
    states: Sequence[StreamState],
    on_retry: Callable[[], None],
) -> Iterator[Row]:
    """Yield the rows of one stream from `states` on, one for each source, to the end of all sources.

    Raises:
        DataError: if a source that is due has no document.
    """
    shares, position = mixing.shares[stream], sum(state.rows for state in states)
    of_sources = zip(sources, orders, states, strict=True)
    rows = [stream_rows(source, order, stream, state, on_retry) for source, order, state in of_sources]
    while True:
        for source in shares.take(position, position + ROWS_AT_ONCE)[0].tolist():
            if source < 0:
                return
            row = next(rows[source])._replace(source=source)
            # Without end, places of a row are counted over all sources.
            yield row._replace(place=position * mixing.num_streams + stream) if orders[source].runs_on else row
            position += 1


def check_not_empty(source: Documents, order: Order, on_retry: Callable[[], None]) -> None:
    """Raise DataError if no shard has a document that is long enough: a stream would search for one without end."""
    for shard in range(len(source.shards)):
        documents = source.read(shard, 0, 1, on_retry)
        while members := list(islice(documents, order.shuffle_block)):
            if any(len(tokens) >= max(1, order.min_document_tokens) for tokens in source.tokens(shard, members)):
                return
    left = f", beside the {order.heldout_share:.1%} held out" if order.heldout_share else ""
    raise DataError(f"{no_document('train', source.shards, order.min_document_tokens)}{left}")


def no_document(use: str, shards: Sequence[str], min_document_tokens: int) -> str:
    """Say that shards have no document that is long enough to be used."""
    more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
    least = f" of --min_document_tokens {min_document_tokens} or more" if min_document_tokens else ""
    return f"there is no document{least} to {use} on in {shards[0]}{more}"


def tokens_of_epoch(lengths: Sequence[np.ndarray], order: Order, epoch: int) -> list[int]:
    """Count the tokens that each stream reads in an epoch, given the number of tokens of each document of each shard."""
    counts = []
    for stream in range(order.num_streams):
        parts = parts_of_stream(order, len(lengths), stream, epoch)
        read = (lengths[shard][first::stride] for shard, first, stride in parts)
        counts.append(sum(int(some[some >= order.min_document_tokens].sum()) for some in read))
    return counts


def rows_of_epoch(lengths: Sequence[np.ndarray], order: Order, epoch: int) -> int:
    """Count the rows of an epoch, given the number of tokens of each document of each shard."""
    whole, rests = 0, []
    for stream, tokens in enumerate(tokens_of_epoch(lengths, order, epoch)):
        # A stream cuts its tokens into rows without gaps, so only their sum counts.
        rows, rest = divmod(tokens, order.max_length)
        whole += rows
        rests.append(((epoch, True, rows * order.num_streams + stream), rest, 0))
    return whole + len(join_rests(sorted(rests), order.max_length))


def join_rests(rows: Sequence[Offer], max_length: int) -> list[list[Offer]]:
    """Join consecutive remainders of an epoch, as many as fit into a row. Whole rows stay single."""
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
