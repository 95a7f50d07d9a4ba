"""Rows of a finite dataset: which rows each rank sees at each step, and the loaders that deliver them.

The order is a pure function of (seed, optimizer step). So a resume needs no saved iterator, and is exact on any number
of ranks. Nothing here depends on the task.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data import NUM_ROWS
from accelerate_recipes.data.prepared import check_content
from accelerate_recipes.errors import ConfigError, DataError


class Rows(torch.utils.data.Dataset):
    """Dataset that makes a row when it is needed, by `make(item, number)` from one of `items`.

    Number -1 fills a place for which no row is left: `make` must return a row without targets.
    """

    def __init__(self, items: Sequence, make: Callable[[Any, int], dict]):
        self.items, self.make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> dict:
        return self.make(self.items[number], number)


@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int, epoch: int, source: int = 0) -> np.ndarray:
    """Return the order of the rows in one epoch. Each `source` of 32 bits, of a mixture, has another."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch + (source << 32)])).permutation(num_rows)


def rows_of_step(step: int, batch_size: int, num_rows: int, seed: int, end: float = math.inf) -> list[int]:
    """List the rows of the global batch that optimizer step `step` (from 0) trains on.

    The epochs form one sequence without gaps, in which every row occurs once in each epoch. A step takes the next
    `batch_size` places of it. Places from `end` on hold -1.
    """
    window = range(step * batch_size, (step + 1) * batch_size)
    return [
        int(permutation(num_rows, seed, index // num_rows)[index % num_rows]) if index < end else -1 for index in window
    ]


class StepOrder(Sampler[list[int]]):
    """Sampler of one rank's micro-batches, from `start_step` to the last row. Rank r takes slice r of each global batch.

    With `max_steps` there is no last row: epochs follow without end.

    With `lengths`, numbers that grow with the cost of each row, a micro-batch has rows of similar length.
    The rows of a step stay a random draw: steps that have one length each would have gradients that differ with the length,
    and teach less. In one forward pass the ranks get neighbours in length, because all ranks wait for the slowest one.
    """

    def __init__(self, num_rows: int, args: TrainArgs, rank: int, world_size: int, lengths: np.ndarray | None = None):
        self.num_rows = num_rows
        self.args = args
        self.rank, self.world_size = rank, world_size
        self.lengths = lengths
        self.start_step = 0

    def __iter__(self) -> Iterator[list[int]]:
        size, step = self.args.per_device_train_batch_size, self.start_step
        while rows := self.rows(step):
            mine = self.share_of(rows)
            for start in range(0, len(mine), size):
                yield mine[start : start + size]
            step += 1

    @property
    def end(self) -> float:
        """Number of rows that the run trains on, over all epochs."""
        return math.inf if self.args.max_steps > 0 else round(self.args.num_train_epochs * self.num_rows)

    def rows(self, step: int) -> list[int]:
        """List the rows of a step's global batch, with -1 where no row is left. After the last step, the list is empty."""
        if step * self.args.total_batch_size >= self.end:
            return []
        return rows_of_step(step, self.args.total_batch_size, self.num_rows, self.args.seed, self.end)

    def share_of(self, rows: list[int]) -> list[int]:
        """Return this rank's share of a global batch."""
        if (lengths := self.lengths) is None:
            share = len(rows) // self.world_size
            return rows[self.rank * share : (self.rank + 1) * share]
        # Sort the global batch by length and deal it out: micro-batch m of rank r is number m * world_size + r.
        rows = sorted(rows, key=lambda row: math.inf if row < 0 else lengths[row])
        size = self.args.per_device_train_batch_size
        starts = range(self.rank * size, len(rows), self.world_size * size)
        return [row for start in starts for row in rows[start : start + size]]


class EpochOrder(StepOrder):
    """StepOrder for rows with random changes, such as augmentation: row r of epoch e has the number e * N + r, of N rows."""

    def rows(self, step: int) -> list[int]:
        first = step * self.args.total_batch_size
        rows = enumerate(super().rows(step), first)
        return [row if row < 0 else index // self.num_rows * self.num_rows + row for index, row in rows]


def num_steps(args: TrainArgs, num_rows: int) -> int:
    """Return the number of optimizer steps of the whole run.

    Raises:
        ConfigError: if it would be 0.
    """
    if args.max_steps > 0:
        return args.max_steps
    num_trained = round(args.num_train_epochs * num_rows)
    if num_trained == 0:
        raise ConfigError(f"--num_train_epochs {args.num_train_epochs} of {num_rows:,} rows is less than one; raise it")
    return math.ceil(num_trained / args.total_batch_size)


def without_error(batch: Any) -> dict[str, torch.Tensor]:
    """Return a batch; raise DataError for one that holds only an `error`."""
    if isinstance(batch, dict) and "error" in batch:
        raise DataError(batch["error"])
    return batch


class RowLoader(DataLoader):
    """Loader of batches of rows by their numbers.

    Raises:
        DataError: for a batch that holds only an `error`. (An error raised in a worker would have its traceback as text.)
    """

    def __init__(self, rows: torch.utils.data.Dataset, **settings: Any):
        # iter() would draw from the global generator, and change the dropout of a resumed run, or that after an evaluation.
        super().__init__(rows, pin_memory=torch.cuda.is_available(), generator=torch.Generator(), **settings)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from map(without_error, super().__iter__())

    def first_batch(self, size: int = NUM_ROWS) -> dict[str, torch.Tensor]:
        """Make a batch of the first `size` rows, to show them. The state of the loader does not change."""
        batches: Any = self.batch_sampler
        numbers = itertools.islice((row for batch in batches for row in batch if row >= 0), size)
        return without_error(self.collate_fn([self.dataset[number] for number in numbers]))


class StepLoader(RowLoader):
    """Loader of the micro-batches of a StepOrder; the step alone is its position."""

    is_uneven = False
    content = ""

    def start_at(self, step: int, states: list[dict]) -> None:
        """Begin after `step` optimizer steps; call it before iterating. `states` are the results of `state` on all ranks.

        Raises:
            ConfigError: if the states belong to other rows.
        """
        self.check(states)
        self.batch_sampler.start_step = step

    def check(self, states: list[dict]) -> None:
        """Raise ConfigError if the states belong to other rows."""
        check_content(self.content, states)

    def state(self) -> dict:
        """Return what a checkpoint needs besides the step: the checksum of the rows."""
        return {"content": self.content}

    def counts(self) -> dict[str, int]:
        return {}


def make_train_loader(
    rows: torch.utils.data.Dataset,
    args: TrainArgs,
    rank: int,
    world_size: int,
    lengths: np.ndarray | None = None,
    collate_fn: Callable[[list], dict[str, torch.Tensor]] | None = None,
    content: str = "",
    order_class: Callable[..., StepOrder] = StepOrder,
) -> StepLoader:
    """Make the loader of this rank's micro-batches, in the order of the steps.

    With `lengths`, the micro-batches of a step have rows of similar length. `order_class` is EpochOrder for rows with random
    changes; rows of sources have their own order. `content` is the `checksum_of_rows`, by which a resumed run checks that
    the rows are the same.
    """
    order = order_class(len(rows), args, rank, world_size, lengths)
    loader = StepLoader(rows, batch_sampler=order, collate_fn=collate_fn, num_workers=args.dataloader_num_workers)
    loader.content = content
    return loader


def make_eval_loader(
    rows: torch.utils.data.Dataset,
    args: TrainArgs,
    rank: int,
    world_size: int,
    lengths: np.ndarray | None = None,
    collate_fn: Callable[[list], dict[str, torch.Tensor]] | None = None,
    num_workers: int = 0,
) -> RowLoader:
    """Make a loader with every row on exactly one rank and equally many batches on each, padded by rows without targets.

    With `lengths`, rows come from the shortest to the longest.

    Raises:
        ConfigError: if there are no rows.
    """
    if not len(rows):
        raise ConfigError("no row is left to evaluate on; give more data, or hold out a larger share")
    size = args.per_device_eval_batch_size
    num_batches = math.ceil(len(rows) / (size * world_size))
    order = range(len(rows)) if lengths is None else np.argsort(lengths, kind="stable").tolist()
    # Deal the rows out in turn: with `lengths`, the ranks then have rows of similar length at the same time.
    positions = range(rank, num_batches * size * world_size, world_size)
    mine = [order[position] if position < len(rows) else -1 for position in positions]
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    return RowLoader(rows, batch_sampler=batches, collate_fn=collate_fn, num_workers=num_workers)
