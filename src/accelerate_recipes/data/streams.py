"""Streams of rows: their arguments, and the loader of a rank's rows, which can stop and resume on any number of ranks.

`stream_order` defines the order of the rows. Rank r of W reads streams r, r + W, ...

A source that has `max_epochs` is counted before the run: in each stream it ends with the last whole row of the documents
that this stream reads of it in so many epochs. So no document is trained on more often.
"""

import heapq
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data import NUM_ROWS
from accelerate_recipes.data.mixture import ONE_SOURCE, Mixture, Weights, changed_shares, check_same_sources, continued
from accelerate_recipes.data.packing import collate, pack_row
from accelerate_recipes.data.shards import fingerprint
from accelerate_recipes.data.shown import HasRows, titled
from accelerate_recipes.data.stream_order import (
    Documents,
    Mixing,
    Order,
    Row,
    StreamState,
    join_rests,
    rows_of_epoch,
    rows_of_sources,
    stream_rows,
    tokens_of_epoch,
)
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.ranks import on_all_data_ranks, on_first_rank, print_first, ranks_a_row, readers

NUM_STREAMS = 24  # or the smallest multiple that the ranks divide; 24 divides among 1, 2, 3, 4, 6, 8, 12 and 24 ranks
HANDED_OVER = 16  # rows of a rank in one collective: every rank receives the rows of all ranks, and images are large


def stream_problems(num_streams: int, world_size: int, row_size: int) -> list[str]:
    """Check that the processes, or groups of `row_size` processes that share rows, divide the logical streams evenly."""
    if num_streams % world_size == 0:
        return []
    fitting = [str(size) for size in range(1, num_streams + 1) if num_streams % size == 0]
    return [
        f"--num_streams {num_streams} is not a multiple of {readers(world_size, row_size)}; numbers that work: "
        f"{', '.join(fitting)}; a new run takes --num_streams {math.lcm(NUM_STREAMS, world_size)} by default"
    ]


@dataclass
class StreamArgs:
    """Arguments of a recipe that reads streams. Put it before TrainArgs in the bases of a recipe's arguments."""

    group = "rare"
    num_streams: int = arg(
        0,
        "Number of logical streams, a multiple of each number of processes on which the run may continue; 0: the number of "
        "the checkpoint, or for a new run the smallest multiple of 24 that the number of processes divides.",
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
        problems = super().problems(world_size)
        if not self.is_streamed:
            return problems + (["--num_streams is for shards that are streamed; remove it"] if self.num_streams else [])
        if self.max_steps < 1 and not self.is_finite:
            problems.append("--max_steps is missing: the length of a stream is not known")
        return problems + (stream_problems(self.num_streams, world_size, self.row_size) if self.num_streams else [])

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        problems = super().settle(saved)
        if self.num_streams or not self.is_streamed:
            return problems
        self.num_streams = saved.get("num_streams") or math.lcm(NUM_STREAMS, self.num_launched)
        return problems + stream_problems(self.num_streams, self.num_launched, self.row_size)


@dataclass
class StreamRows(IterableDataset):
    """Dataset of the rows of some streams in their order, without end, as lists of `Row`. A text in a list is an error."""

    read: Callable[[int, Any, Callable[[], None]], Iterator[Row]]  # rows of a stream from a state on
    states: dict[int, Any]
    retries: torch.Tensor  # (number of streams,) in shared memory

    def __iter__(self) -> Iterator[Sequence[Row | str]]:
        rows = [
            self.read(stream, state, partial(self.retries[stream].add_, 1)) for stream, state in self.states.items()
        ]
        try:
            # A resume must decompress what it skips. Use all cores: decompression does not hold the interpreter's lock.
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                first = list(pool.map(lambda some: list(islice(some, 1)), rows))
            merged = heapq.merge(*(chain(row, rest) for row, rest in zip(first, rows, strict=True)))
            while chunk := list(islice(merged, len(rows))):
                yield chunk
        except DataError as error:  # yield its text: an exception would come wrapped in the worker's traceback
            yield [str(error)]


class Lookahead:
    """Endless iterator of rows that can look at the next rows before it takes them."""

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
    """Loader of this rank's micro-batches in the order of the steps; it also keeps the states of its streams.

    `documents` are those of each source of the mixture; `order` are fields of `Order`, such as `max_length`. In a mixture,
    `source` of a batch, (B, T), numbers the sources, and rows have `max_length` tokens until a phase gives another length:
    where a stream stands does not depend on the length of its rows. A mixture ends with its sources, one source never.

    Each iteration continues after the last whole step of the previous iteration, or where `start_at` says. Batches are
    in host memory, pinned if there is a GPU.
    """

    def __init__(
        self,
        documents: Sequence[Documents],
        args: TrainArgs,
        rank: int,
        world_size: int,
        *,
        mixture: Mixture = ONE_SOURCE,
        document_mask: bool = True,
        num_streams: int = NUM_STREAMS,
        **order: Any,
    ):
        if problems := stream_problems(num_streams, world_size, ranks_a_row()):
            raise ConfigError(problems[0])
        self.documents, self.mixture = documents, mixture
        self.args = args
        self.rank, self.world_size = rank, world_size
        self.document_mask = document_mask
        self.share = args.accumulation_steps(world_size) * args.per_device_train_batch_size
        self.order = Order(num_streams, seed=args.seed, runs_on=bool(mixture.names), **order)
        self.lengths = [(0, self.order.max_length), *mixture.lengths(args.max_steps)]
        self.step = 0
        # States of the sources in each stream.
        beginning = (StreamState(),) * len(documents)
        self.consumed = dict.fromkeys(range(rank, num_streams, world_size), beginning)
        # Each worker writes the entries of its own streams; the main process reads them.
        self.retries = torch.zeros(num_streams, dtype=torch.int64).share_memory_()
        self.is_uneven = True
        versions = on_first_rank(lambda: [some.version() for some in documents])
        named = zip(mixture.sources, versions, strict=True)
        self.version = {
            f"{kind} of {source.name}" if source.name else kind: value
            for source, version in named
            for kind, value in version.items()
        }
        sizes, self.limits = on_first_rank(self._counted)
        self.weigh(mixture.weights(sizes, args.max_steps))

    @property
    def shards(self) -> list[str]:
        """Files of all sources."""
        return [shard for documents in self.documents for shard in documents.shards]

    def weigh(self, weights: Weights) -> None:
        """Mix the sources by `weights`."""
        self.weights, size = weights, self.args.total_batch_size
        rows = [(step * size, [some[source.name] for source in self.mixture.sources]) for step, some in weights]
        self.mixing = Mixing(rows, self.limits, self.args.seed)

    def orders(self, order: Order) -> list[Order]:
        """Return the order of each source: two sources with the same documents have them in different orders."""
        names = [source.name for source in self.mixture.sources]
        keys = [xxhash.xxh3_64_intdigest(f"{order.seed} {name}".encode()) if name else order.seed for name in names]
        return [order._replace(seed=key) for key in keys]

    @property
    def current(self) -> Order:
        """Order of the rows of the next step. Where it changes, workers begin anew at the states of the streams."""
        length = next(length for step, length in reversed(self.lengths) if step <= self.step)
        return self.order._replace(max_length=length)

    def _counted(self) -> tuple[dict[str, int], np.ndarray]:
        """Count the rows of an epoch of each source, and the most rows that each stream takes of it, where this is asked."""
        sizes, limits = {}, np.full((self.order.num_streams, len(self.documents)), math.inf)
        steps = self.args.max_steps if self.args.max_steps > 0 else math.inf
        needed = steps * self.args.total_batch_size / self.order.num_streams + 1  # rows of a stream
        parts = zip(self.mixture.sources, self.documents, self.orders(self.order), strict=True)
        for k, (source, documents, order) in enumerate(parts):
            if source.weight is not None and math.isinf(source.max_epochs):
                continue
            lengths = lengths_in(documents)
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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        size = self.args.per_device_train_batch_size
        # The ranks have not agreed on anything yet. Streams that run on are even.
        self.is_uneven, last = not self.order.runs_on, None
        order = ahead = None
        while True:
            if ahead is None or self.current != order:  # workers read the rows of the next step, and what follows
                order, ahead = self.current, Lookahead(heapq.merge(*self._start_workers()))
            if self.is_uneven:
                mine, gone = self._divide(ahead)
            else:
                gone = ahead.take(self.share)
                mine = [[row] for row in gone]
            last = gone[-1] if gone else last
            for start in range(0, self.share, size):
                # The last micro-batch of a step: only now do its rows count as consumed in `state`.
                if start + size == self.share:
                    self.step += 1
                    for row in gone:  # the state of its source in its stream is that after the row
                        states = [*self.consumed[stream := row.place % self.order.num_streams]]
                        states[row.source] = row.state
                        self.consumed[stream] = tuple(states)
                    self.is_uneven = not (order.runs_on or self._goes_on_evenly(last, ahead))
                batch = self._batch(mine[start : start + size], order.max_length)
                if torch.cuda.is_available():
                    batch = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                yield batch

    @property
    def first(self) -> dict[str, HasRows]:
        """First rows of each source to train on, by heading."""
        names = [source.name for source in self.mixture.sources]
        batches = (partial(self.first_batch, number) for number in range(len(names)))
        firsts: list[Any] = [SimpleNamespace(first_batch=first_batch, check=self.check) for first_batch in batches]
        return {titled("Training", name): first for name, first in zip(names, firsts, strict=True)}

    def described(self, num_steps: int) -> list[str]:
        """Describe each source of a mixture in one line, for a run of so many steps."""
        num_rows = num_steps * self.args.total_batch_size
        parts = zip(self.mixture.names, self.documents, self.mixing.counts(num_rows)[0], strict=False)
        return [
            f"Source {name}: {len(documents.shards):,} shards; {count / num_rows:.2%} of the run's rows"
            for name, documents, count in parts
        ]

    def seen(self, step: int) -> dict[str, float]:
        """Return what the log tells of the sources of a mixture after a step."""
        num_rows, record = step * self.args.total_batch_size, {}
        for name, count, asked in zip(self.mixture.names, *self.mixing.counts(num_rows), strict=False):
            record |= {f"{name}_rows": int(count), f"{name}_share": count / num_rows, f"{name}_asked": asked / num_rows}
        return record

    def first_batch(self, source: int = 0) -> dict[str, Any]:
        """Make a batch of the first rows of a source in the first streams, to show them. Only this process reads them.

        Raises:
            DataError: for shards that cannot be read.
        """
        documents, order = self.documents[source], self.orders(self.order)[source]
        streams = range(order.num_streams)
        first = (next(stream_rows(documents, order, stream, StreamState(), lambda: None)) for stream in streams)
        rows = islice((row for row in first if len(row.tokens)), NUM_ROWS)
        return self._batch([[row._replace(source=source)] for row in rows], order.max_length)

    def num_steps(self) -> int:
        """Count the optimizer steps of the run: --max_steps, or as many as the sources of a mixture have rows for.

        One source has as many as --num_train_epochs passes over its rows need; rows of the next epoch fill the last step.
        For this, the first process counts the tokens of all documents.

        Raises:
            ConfigError: if the sources of a mixture end before the last step.
            DataError: for shards that cannot be read.
        """

        def count() -> int:
            lengths, (whole, part) = lengths_in(self.documents[0]), divmod(self.args.num_train_epochs, 1)
            rows = sum(rows_of_epoch(lengths, self.order, epoch) for epoch in range(int(whole)))
            return rows + round(part * rows_of_epoch(lengths, self.order, int(whole)))

        steps, end = self.args.max_steps, self.mixing.end
        possible = end // self.args.total_batch_size
        if possible < max(1, steps):
            raise ConfigError(
                f"with the max_epochs of {self.mixture.file}, all sources end after {end:,.0f} rows, which are "
                f"{possible:.0f} steps; --max_steps is {steps}: lower it, or raise a max_epochs"
            )
        if steps < 1 and self.order.runs_on:
            steps = int(possible)
        elif steps < 1:
            steps = max(1, math.ceil(on_first_rank(count) / self.args.total_batch_size))
        self.mixture.check_phases(steps)
        return steps

    @property
    def workers_note(self) -> str:
        """Note for the end of a line if more workers were asked for than a rank has streams, else an empty text."""
        asked, streams = self.args.dataloader_num_workers, len(self.consumed)
        return f"; {streams} of {asked} workers read, one a stream: see --num_streams" if asked > streams else ""

    def _start_workers(self) -> list[Iterator[Row]]:
        # A worker without streams would have nothing to do.
        num_workers = min(self.args.dataloader_num_workers, len(self.consumed))
        streams = sorted(self.consumed)
        parts = [streams[worker::num_workers] for worker in range(num_workers)] or [streams]
        # Prefetch enough rows for the next step while a step is computed.
        lists_of_two_steps = max(2, -(-2 * self.share // len(streams)))
        of_worker = {"num_workers": 1, "prefetch_factor": lists_of_two_steps} if num_workers else {}
        started = []
        # Reads the rows of a stream: from its number, its states, and what to call before a retry.
        read = partial(rows_of_sources, self.documents, self.orders(self.current), self.mixing)
        for part in parts:
            states = {stream: self.consumed[stream] for stream in part}
            rows = StreamRows(read, states, self.retries)
            # Each worker has its own loader, because workers do not have equally many rows. And each loader its generator:
            # iter() would draw from the global one, and change a resumed run's dropout.
            loader = DataLoader(rows, batch_size=None, collate_fn=list, generator=torch.Generator(), **of_worker)
            started.append(iter(loader))
        return [single_rows(lists) for lists in started]

    def _goes_on_evenly(self, last: Row | None, ahead: Lookahead) -> bool:
        """Tell whether this rank's share of the next step is simply its next rows, as far as this rank can see.

        If this holds on all ranks, these are the next rows of the run: they are in the same epoch as the row before
        them, `last`, and there is no gap between them, as a stream that has ended would leave.
        """
        for row in ahead.first(self.share):
            if last is None or row.key != (last.epoch, False, last.place + self.world_size):
                return False
            last = row
        return True

    def _divide(self, ahead: Lookahead) -> tuple[list[list[Row]], list[Row]]:
        """Agree with all ranks on the rows of the next step, and on which rank takes which row.

        Returns:
            This rank's share, where each entry is a whole row or remainders that fit into one; and the rows of this rank's
            own streams that are in the step, no matter which rank takes them.
        """
        num_rows, num_offered = self.share * self.world_size, self.share + 1
        while True:
            offer = [(row.key, len(row.tokens)) for row in ahead.first(num_offered)]
            offers = on_all_data_ranks(offer)
            # Each rank offers its next rows. Up to this key all rows of the run are known; after it, a rank may have rows
            # that it did not offer.
            bound = min(offered[-1][0] for offered in offers)
            known = sorted((*row, rank) for rank, offered in enumerate(offers) for row in offered if row[0] <= bound)
            joined = join_rests(known, self.order.max_length)
            if len(joined) > num_rows:  # one more than needed: it shows that the last row takes no further remainder
                break
            if offer[-1][0] == bound:
                num_offered *= 2
        end, _, _ = joined[num_rows][0]
        own = ahead.take(sum(key < end for key, _ in offer))

        # A rank keeps its own rows, up to its share. Ranks with too few take the rows that are left over, in order.
        shares = [[] for _ in range(self.world_size)]
        left = deque()
        for rows in joined[:num_rows]:
            share = shares[rows[0][-1]]
            (share if len(share) < self.share else left).append(rows)
        for share in shares:
            share += [left.popleft() for _ in range(self.share - len(share))]
        # Exchange the rows that another rank takes than the one that has read them. All ranks have computed the same shares,
        # so each knows which of its rows to give and which to keep of those that it receives.
        by_key = {row.key: row for row in own}
        taken = {key for key, _, _ in chain(*shares[self.rank])}
        given = [[] for _ in range(self.world_size)]
        for taker, rows in enumerate(shares):
            for key, _, owner in chain(*rows):
                if owner != taker:
                    given[owner].append(key)
        for start in range(0, max(map(len, given)), HANDED_OVER):
            part = {key: by_key[key] for key in given[self.rank][start : start + HANDED_OVER]}
            for handed_over in on_all_data_ranks(part):
                by_key |= {key: row for key, row in handed_over.items() if key in taken}
        return [[by_key[key] for key, _, _ in rows] for rows in shares[self.rank]], own

    def _batch(self, rows: list[list[Row]], max_length: int) -> dict[str, Any]:
        packed = []
        for parts in rows:
            tokens = np.concatenate([part.tokens for part in parts])
            lengths = [length for part in parts for length in part.lengths]
            row = pack_row(tokens, lengths, max_length, 0, self.document_mask)
            packed.append(row | {"row": torch.tensor((parts[0].epoch, parts[0].place))})
        sources = torch.tensor([parts[0].source for parts in rows])[:, None].expand(-1, max_length)
        return collate(packed) | ({"source": sources} if self.mixture.names else {})

    def state(self) -> dict:
        """Return the state of this rank's streams after the last step of which all micro-batches were delivered.

        It consists of plain numbers and strings, so it can be written as JSON.
        """
        return {
            "order": self.order._asdict(),
            "shards": fingerprint(self.shards),
            "version": self.version,
            "streams": {str(stream): [list(state) for state in states] for stream, states in self.consumed.items()},
            "sources": {source.name: {"max_epochs": source.limit} for source in self.mixture.sources},
            "weights": self.weights,
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
        self.check(states)
        streams = {int(stream): saved for part in states for stream, saved in part["streams"].items()}
        for stream in self.consumed:
            saved = streams[stream]  # earlier versions wrote the one state of a stream without a mixture
            of_sources = [saved] if isinstance(saved[0], int) else saved
            self.consumed[stream] = tuple(StreamState(*numbers) for numbers in of_sources)
        before = states[0].get("weights", self.weights)
        self.weigh(continued(before, step, self.weights))
        if message := changed_shares(before, self.weights, step):
            print_first(message)

    def check(self, states: list[dict]) -> None:
        """Raise ConfigError if the states belong to other data, or to another order."""
        then, now = states[0], self.state()
        check_same_sources(then, now, self.mixture.file)
        for name, value in Order(**then["order"])._asdict().items():  # earlier versions had fewer fields
            if now["order"][name] != value:
                raise ConfigError(f"{name} is {now['order'][name]}, the checkpoint has {value}; set it back")
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

    def counts(self) -> dict[str, Any]:
        """Count what this rank's streams have read since the start of the run. The caller sums the counts over the ranks.

        `retries` counts retries on a failing network since this process started.
        """
        states = [*chain.from_iterable(self.consumed.values())]
        totals: dict[str, Any] = {
            "tokens_seen": sum(state.tokens for state in states),
            "documents_seen": sum(state.documents for state in states),
            "documents_left_out": sum(state.left_out for state in states),
            "retries": int(self.retries.sum()),
        }
        for name, own in zip(self.mixture.names, zip(*self.consumed.values(), strict=True), strict=False):
            totals[f"{name}_tokens"] = sum(state.tokens for state in own)
            totals[f"{name}_documents"] = sum(state.documents for state in own)
            # The mean over all streams, once the caller has added the ranks up.
            totals[f"{name}_epochs"] = sum(state.epoch for state in own) / self.order.num_streams
        return totals


def lengths_in(documents: Any) -> list[np.ndarray]:
    """Count the tokens of each document of each shard."""
    return [documents.lengths(shard) for shard in range(len(documents.shards))]


def single_rows(lists: Iterator[Sequence[Row | str]]) -> Iterator[Row]:
    """Yield the rows of the lists one by one. Raises DataError for an error that a worker found."""
    for row in chain.from_iterable(lists):
        if isinstance(row, str):
            raise DataError(row)
        yield row
