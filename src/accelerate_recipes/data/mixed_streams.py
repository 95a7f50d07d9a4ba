"""Streams of a mixture: every logical stream mixes the sources by itself, so the ranks need not talk.

Row k of stream s is row k S + s of the run, of S streams. Its source is what `Shares` says for place k of this stream, and
it goes on in the source where the source's last row in this stream ended. So every stream keeps one state for each source. A
source that has `max_epochs` is counted before the run: in each stream it ends with the last whole row of the documents that
this stream reads of it in so many epochs. So no document is trained on more often.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data import NUM_ROWS
from accelerate_recipes.data.mixture import Mixture, Weights, changed_shares, check_same_sources, continued
from accelerate_recipes.data.shares import Shares
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.data.stream_order import Documents, Order, Row, StreamState, stream_rows, tokens_of_epoch
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.ranks import is_first, on_first_rank

ROWS_AT_ONCE = 1024  # of a stream, whose sources are computed together


class MixedDocuments(NamedTuple):
    """Documents of all sources of a mixture, by their names."""

    of: Mapping[str, Documents]

    @property
    def shards(self) -> list[str]:
        return [shard for documents in self.of.values() for shard in documents.shards]

    def version(self) -> dict[str, str]:
        versions = {name: documents.version() for name, documents in self.of.items()}
        return {f"{kind} of {name}": value for name, found in versions.items() for kind, value in found.items()}


@dataclass
class Mixing:
    """Sources of the rows of all streams."""

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
        places = [self.place(num_rows, stream) for stream in range(self.num_streams)]
        both = [(shares.counts(place), shares.asked(place)) for shares, place in zip(self.shares, places, strict=True)]
        counts, asked = np.sum(both, axis=0)
        return counts.astype(int), asked


def mixed_rows(
    sources: Sequence[Documents],
    orders: Sequence[Order],
    mixing: Mixing,
    stream: int,
    states: Sequence[StreamState],
    on_retry: Callable[[], None],
) -> Iterator[Row]:
    """Yield the rows of one stream from `states` on, to the end of all sources; the state of each is that of its source.

    Raises:
        DataError: if a source that is due has no document.
    """
    shares, place = mixing.shares[stream], sum(state.rows for state in states)
    of_sources = zip(sources, orders, states, strict=True)
    rows = [stream_rows(source, order, stream, state, on_retry) for source, order, state in of_sources]
    while True:
        for source in shares.take(place, place + ROWS_AT_ONCE)[0].tolist():
            if source < 0:
                return
            row = next(rows[source])
            yield row._replace(epoch=0, place=place * mixing.num_streams + stream, source=source)
            place += 1


class MixedStreamLoader(StreamLoader):
    """StreamLoader of several sources, by name, mixed as a mixture says. `source` of a batch, (B, T), numbers them.

    Rows have `max_length` tokens, until a phase gives another length: where a stream stands does not depend on the length
    of its rows. Without --max_steps, a run ends with the last whole step before a stream has no source left.

    Raises:
        ConfigError: if the sources end before the last step.
        DataError: for shards that are counted and cannot be read.
    """

    source: MixedDocuments

    def __init__(
        self, sources: Mapping[str, Documents], args: TrainArgs, *place: int, mixture: Mixture, **settings: Any
    ):
        self.mixture = mixture
        super().__init__(MixedDocuments(sources), args, *place, runs_on=True, **settings)
        self.lengths = [(0, self.order.max_length), *mixture.lengths(args.max_steps)]
        sizes, self.limits = on_first_rank(self._counted)
        self.weigh(mixture.weights(sizes, args.max_steps))

    @property
    def names(self) -> list[str]:
        return list(self.source.of)

    @property
    def beginning(self) -> tuple[StreamState, ...]:
        return (StreamState(),) * len(self.source.of)

    @property
    def current(self) -> Order:
        length = next(length for step, length in reversed(self.lengths) if step <= self.step)
        return self.order._replace(max_length=length)

    def restored(self, state: Sequence[Sequence[int]]) -> tuple[StreamState, ...]:
        return tuple(StreamState(*numbers) for numbers in state)

    def consume(self, row: Row) -> None:
        stream = row.place % self.order.num_streams
        states = list(self.consumed[stream])
        states[row.source] = row.state
        self.consumed[stream] = tuple(states)

    def of_source(self, order: Order, name: str) -> Order:
        """Return the order of one source: two sources with the same documents have them in different orders."""
        return order._replace(seed=xxhash.xxh3_64_intdigest(f"{order.seed} {name}".encode()))

    def weigh(self, weights: Weights) -> None:
        """Mix the sources by `weights`."""
        self.weights, size = weights, self.args.total_batch_size
        rows = [(step * size, [some[name] for name in self.names]) for step, some in weights]
        self.mixing = Mixing(rows, self.limits, self.args.seed)

    def read(self, order: Order) -> Callable[..., Iterator[Row]]:
        orders = [self.of_source(order, name) for name in self.names]
        return partial(mixed_rows, list(self.source.of.values()), orders, self.mixing)

    def _counted(self) -> tuple[dict[str, int], np.ndarray]:
        """Count the rows of an epoch of each source, and the most rows that each stream takes of it, where this is asked."""
        sizes, limits = {}, np.full((self.order.num_streams, len(self.mixture.sources)), math.inf)
        steps = self.args.max_steps if self.args.max_steps > 0 else math.inf
        needed = steps * self.args.total_batch_size / self.order.num_streams + 1  # rows of a stream
        for k, source in enumerate(self.mixture.sources):
            if source.weight is not None and math.isinf(source.max_epochs):
                continue
            documents, order = self.source.of[source.name], self.of_source(self.order, source.name)
            lengths = [documents.lengths(shard) for shard in range(len(documents.shards))]
            sizes[source.name] = sum(tokens_of_epoch(lengths, order, 0)) // order.max_length
            if not sizes[source.name]:
                least = f"less than a row of {order.max_length} tokens"
                raise DataError(f"{self.mixture.file}, source {source.name} has {least}; give more text, or remove it")
            if math.isinf(source.max_epochs):
                continue
            tokens, epoch = np.zeros(order.num_streams), 0
            # A source may have more epochs than the run needs.
            while epoch < source.max_epochs and (tokens // order.max_length).min() < needed:
                tokens += min(1, source.max_epochs - epoch) * np.array(tokens_of_epoch(lengths, order, epoch))
                epoch += 1
            limits[:, k] = tokens // order.max_length
        return sizes, limits

    def num_steps(self) -> int:
        """Count the optimizer steps of the run: --max_steps, or as many as the sources have rows for.

        Raises:
            ConfigError: if the sources end before.
        """
        end = self.mixing.end
        possible = end // self.args.total_batch_size
        if possible < max(1, self.args.max_steps):
            raise ConfigError(
                f"with the max_epochs of {self.mixture.file}, all sources end after {end:,.0f} rows, which are "
                f"{possible:.0f} steps; --max_steps is {self.args.max_steps}: lower it, or raise a max_epochs"
            )
        steps = self.args.max_steps if self.args.max_steps > 0 else int(possible)
        self.mixture.check_phases(steps)
        return steps

    @property
    def first(self) -> dict[str, HasRows]:
        return {f"Training, {name}": FirstOfSource(self, name) for name in self.names}

    def described(self, num_steps: int) -> list[str]:
        found = []
        for name, count in zip(self.names, self.mixing.counts(num_steps * self.args.total_batch_size)[0], strict=True):
            share = count / (num_steps * self.args.total_batch_size)
            found.append(f"Source {name}: {len(self.source.of[name].shards):,} shards; {share:.2%} of the run's rows")
        return found

    def seen(self, step: int) -> dict[str, float]:
        num_rows = step * self.args.total_batch_size
        found = {}
        for name, count, asked in zip(self.names, *self.mixing.counts(num_rows), strict=True):
            found |= {f"{name}_rows": int(count), f"{name}_share": count / num_rows, f"{name}_asked": asked / num_rows}
        return found

    def _batch(self, rows: list[list[Row]], max_length: int) -> dict[str, Any]:
        sources = torch.tensor([row.source for (row,) in rows])
        return super()._batch(rows, max_length) | {"source": sources[:, None].expand(-1, max_length)}

    def state(self) -> dict:
        sources = {source.name: {"max_epochs": source.limit} for source in self.mixture.sources}
        return super().state() | {"sources": sources, "weights": self.weights}

    def start_at(self, step: int, states: list[dict]) -> None:
        super().start_at(step, states)
        if not states:
            return
        before = states[0]["weights"]
        self.weigh(continued(before, step, self.weights))
        if (said := changed_shares(before, self.weights, step)) and is_first():
            print(said, flush=True)

    def check(self, states: list[dict]) -> None:
        check_same_sources(states[0], self.state(), self.mixture.file)
        super().check(states)

    def counts(self) -> dict[str, Any]:
        of_sources = [dict(zip(self.names, states, strict=True)) for states in self.consumed.values()]
        every = [state for states in of_sources for state in states.values()]
        found: dict[str, Any] = self.counts_of(every)
        for name in self.names:
            found[f"{name}_tokens"] = sum(states[name].tokens for states in of_sources)
            found[f"{name}_documents"] = sum(states[name].documents for states in of_sources)
            # The mean over all streams, once the caller has added the ranks up.
            found[f"{name}_epochs"] = sum(states[name].epoch for states in of_sources) / self.order.num_streams
        return found


class FirstOfSource(NamedTuple):
    """First rows of one source of a mixture, to be shown."""

    loader: MixedStreamLoader
    name: str

    def first_batch(self) -> dict[str, Any]:
        """Make a batch of the first rows of the source in the first streams. Only this process reads them."""
        loader, k = self.loader, self.loader.names.index(self.name)
        documents, order = loader.source.of[self.name], loader.of_source(loader.order, self.name)
        streams = range(min(NUM_ROWS, order.num_streams))
        rows = (next(stream_rows(documents, order, stream, StreamState(), lambda: None)) for stream in streams)
        return loader._batch([[row._replace(epoch=0, source=k)] for row in rows], order.max_length)

    def check(self, states: list[dict]) -> None:
        """Raise ConfigError if the states of a checkpoint belong to other data, or to another order."""
        self.loader.check(states)
