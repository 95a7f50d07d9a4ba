"""Packed rows, and the order in which the ranks see rows of any kind.

The order is a pure function of (seed, optimizer step): resuming needs no saved iterator and is exact on any number
of ranks. Nothing here knows a task.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler

from accelerate_recipes.args import ConfigError, TrainArgs
from accelerate_recipes.losses import IGNORE_INDEX
from accelerate_recipes.parent import start_worker

LENGTH_WINDOW = 50  # global batches whose rows are sorted by length together: enough to pad little, few enough to mix


def pack(lengths: Sequence[int], max_length: int) -> list[list[tuple[int, int, int]]]:
    """Distribute documents over rows of `max_length` tokens, longest first, each where it fits best.

    A document that fits a row is kept whole; a longer one is split into full rows and a rest. Returns for each row
    its pieces as (document, start, end); every token is in exactly one.

    Source: best-fit packing, Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3.
    """
    pieces = [
        (document, start, min(start + max_length, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, max_length)
    ]
    pieces.sort(key=lambda piece: piece[1] - piece[2])  # a stable sort: the lengths alone decide
    rows: list[list[tuple[int, int, int]]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(max_length + 1)]
    spaces = 0  # bit n: some row has n tokens left. The lowest bit that fits is found without a search.
    for piece in pieces:
        length = piece[2] - piece[1]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = max_length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left := space - length:
            rows_by_space[left].append(row)
            spaces |= 1 << left
    return rows


def pack_documents(documents: Dataset, max_length: int, cache_file: Path) -> Dataset:
    """Pack the `input_ids` of `documents` into rows with `input_ids` and the `lengths` of the pieces in each.

    `documents` must have no pending selection (`flatten_indices`). The rows are written to `cache_file`.
    """
    chunks = documents.data.column("input_ids").chunks
    rows = pack(np.concatenate([np.asarray(chunk.value_lengths()) for chunk in chunks]).tolist(), max_length)

    def gather(pieces_of_rows: list[list[list[int]]]) -> dict[str, list]:
        wanted = pa.array([document for pieces in pieces_of_rows for document, _, _ in pieces])
        taken = documents.data.column("input_ids").take(wanted).combine_chunks()
        tokens, offsets = np.asarray(taken.values), np.asarray(taken.offsets)
        packed, lengths, i = [], [], 0
        for pieces in pieces_of_rows:
            parts = []
            for _, start, end in pieces:
                parts.append(tokens[offsets[i] + start : offsets[i] + end])
                i += 1
            packed.append(np.concatenate(parts))
            lengths.append([len(part) for part in parts])
        return {"input_ids": packed, "lengths": lengths}

    return Dataset.from_dict({"pieces": rows}).map(
        gather,
        input_columns="pieces",
        remove_columns="pieces",
        batched=True,
        cache_file_name=str(cache_file),
        new_fingerprint="packed",  # nothing is looked up by it; hashing `documents` would read them all
        desc="Packing",
    )


def make_row(
    tokens: np.ndarray, lengths: Sequence[int], max_length: int, pad_token_id: int, document_mask: bool
) -> dict[str, torch.Tensor]:
    """A row of `max_length` tokens: `input_ids`, `position_ids` and `labels`, each (T,) int64.

    `tokens` are those of the pieces of documents in it, which have these `lengths`; padding fills the rest. With
    `document_mask`, positions restart with each piece, from which transformers keeps attention inside it; without, a
    row is one run of text. Either way the first token of a piece is no target: what precedes it is another document,
    or was cut off.
    """
    input_ids = np.full(max_length, pad_token_id)
    labels = np.full(max_length, IGNORE_INDEX)
    position_ids = np.arange(max_length)
    input_ids[: len(tokens)] = labels[: len(tokens)] = tokens
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    labels[starts[:-1]] = IGNORE_INDEX
    if document_mask:
        # The padding is a document of its own; the last start is where it begins.
        position_ids -= np.repeat(starts, np.diff(np.append(starts, max_length)))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "labels": torch.from_numpy(labels),
    }


class Rows(torch.utils.data.Dataset):
    """Rows that are made when they are asked for, by `make(item, number)` of one of `items`.

    Number -1 stands for places that no row is left for: of it, `make` leaves no targets.
    """

    def __init__(self, items: Sequence, make: Callable[[Any, int], dict]):
        self.items, self.make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> dict:
        return self.make(self.items[number], number)


class PackedRows(torch.utils.data.Dataset):
    """Rows of `max_length` tokens, as `make_row` gives them, with their number as `row`. Number -1 is a row without
    targets, for places that no row is left for.
    """

    def __init__(self, rows: Dataset, max_length: int, pad_token_id: int, document_mask: bool):
        self.rows = rows.with_format("numpy")
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.document_mask = document_mask

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": [], "lengths": []} if index < 0 else self.rows[index]
        tokens = make_row(row["input_ids"], row["lengths"], self.max_length, self.pad_token_id, self.document_mask)
        return tokens | {"row": torch.tensor(index)}

    @property
    def padding_share(self) -> float:
        """Share of all positions that hold no token."""
        return 1 - self._token_counts().sum() / (len(self) * self.max_length)

    @property
    def attended_length(self) -> float:
        """Mean over all tokens of the length of the document they lie in: T of the attention FLOPs."""
        if not self.document_mask:
            return float(self.max_length)
        lengths = np.concatenate([np.asarray(c.values) for c in self.rows.data.column("lengths").chunks]).astype(float)
        return float((lengths**2).sum() / lengths.sum())

    def _token_counts(self) -> np.ndarray:
        return np.concatenate([np.asarray(c.value_lengths()) for c in self.rows.data.column("input_ids").chunks])


@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Order of the rows in one epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)


def rows_of_step(
    step: int,
    batch_size: int,
    num_rows: int,
    seed: int,
    end: float = math.inf,
    order_of_epoch: Callable[[int, int, int], np.ndarray] = permutation,
) -> list[int]:
    """Rows of the global batch that optimizer step `step` (from 0) trains on.

    Epochs follow each other without a gap, so every row comes once in each. Behind `end` rows in all, -1.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    return [
        int(order_of_epoch(num_rows, seed, place // num_rows)[place % num_rows]) if place < end else -1
        for place in places
    ]


def group_by_length(order: np.ndarray, lengths: np.ndarray, batch_size: int, epoch: int, seed: int) -> np.ndarray:
    """`order`, of the rows of an epoch, with rows of similar `lengths` in each global batch.

    In every LENGTH_WINDOW batches the rows are sorted by length, and the batches then shuffled: neither short nor long
    rows come first. Nothing here knows the ranks. A batch in which two epochs meet is left as it is: what of it lies
    in this epoch cannot know the lengths of the rest.
    """
    order = order.copy()
    start = -epoch * len(order) % batch_size  # epochs have no gap: the first batch of this one may begin in the last
    num_batches = max(0, len(order) - start) // batch_size
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]).jumped())  # not the draws of the permutation
    for first in range(0, num_batches, LENGTH_WINDOW):
        last = min(first + LENGTH_WINDOW, num_batches)
        window = order[start + first * batch_size : start + last * batch_size]
        by_length = window[np.argsort(lengths[window], kind="stable")]
        window[:] = generator.permutation(by_length.reshape(-1, batch_size)).ravel()
    return order


class StepOrder(Sampler[list[int]]):
    """Micro-batches of one rank, from `start_step` on, without end: rank r takes the r-th slice of each global batch."""

    def __init__(self, num_rows: int, args: TrainArgs, rank: int, world_size: int):
        self.num_rows = num_rows
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.start_step = 0

    def __iter__(self) -> Iterator[list[int]]:
        args = self.args
        end = math.inf if args.max_steps > 0 else round(args.num_train_epochs * self.num_rows)
        share = args.total_batch_size // self.world_size
        step = self.start_step
        while True:
            mine = self.share_of(rows_of_step(step, args.total_batch_size, self.num_rows, args.seed, end, self.epoch))
            for start in range(0, share, args.per_device_train_batch_size):
                yield mine[start : start + args.per_device_train_batch_size]
            step += 1

    def epoch(self, num_rows: int, seed: int, epoch: int) -> np.ndarray:
        """Order of the rows in one epoch; the same on all ranks."""
        return permutation(num_rows, seed, epoch)

    def share_of(self, rows: list[int]) -> list[int]:
        """Return this rank's share of a global batch."""
        share = len(rows) // self.world_size
        return rows[self.rank * share : (self.rank + 1) * share]


class LengthOrder(StepOrder):
    """Order like StepOrder's, with rows of similar length together in a global batch and, more so, in a micro-batch.

    `lengths` has any number for each row that grows with its cost. The ranks' micro-batches of one forward pass are
    neighbours in length, since the ranks wait for the slowest.
    """

    def __init__(self, lengths: np.ndarray, args: TrainArgs, rank: int, world_size: int):
        super().__init__(len(lengths), args, rank, world_size)
        self.lengths = lengths
        self.epoch = lru_cache(maxsize=2)(self.epoch)  # a batch may lie in two

    def epoch(self, num_rows: int, seed: int, epoch: int) -> np.ndarray:
        order = permutation(num_rows, seed, epoch)
        return group_by_length(order, self.lengths, self.args.total_batch_size, epoch, seed)

    def share_of(self, rows: list[int]) -> list[int]:
        rows = sorted(rows, key=lambda row: math.inf if row < 0 else self.lengths[row])
        size = self.args.per_device_train_batch_size
        starts = range(self.rank * size, len(rows), self.world_size * size)
        return [row for start in starts for row in rows[start : start + size]]


def num_steps(args: TrainArgs, num_rows: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        ConfigError: if they would be none.
    """
    if args.max_steps > 0:
        return args.max_steps
    num_trained = round(args.num_train_epochs * num_rows)
    if num_trained == 0:
        raise ConfigError(
            f"--num_train_epochs {args.num_train_epochs} of {num_rows:,} rows is less than one row; raise it, or give "
            "--max_steps"
        )
    return math.ceil(num_trained / args.total_batch_size)


class StepLoader(DataLoader):
    """Micro-batches by a StepOrder, whose position is the step and nothing else."""

    is_uneven = False
    content = ""

    def start_at(self, step: int, states: list[dict]) -> None:
        """Begin behind `step` optimizer steps; call it before iterating. `states` are what `state` gave on all ranks.

        Raises:
            ConfigError: for the state of other rows.
        """
        check_content(self.content, states)
        self.batch_sampler.start_step = step

    def state(self) -> dict:
        """Return what a checkpoint needs besides the step: of which rows it is."""
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
) -> StepLoader:
    """This rank's micro-batches in the order of the steps; with `lengths`, rows of similar length together.

    `content` is the rows' `checksum_of_rows`, by which a resumed run knows that they are the same.
    """
    if lengths is None:
        order = StepOrder(len(rows), args, rank, world_size)
    else:
        order = LengthOrder(lengths, args, rank, world_size)
    loader = StepLoader(
        rows,
        batch_sampler=order,
        collate_fn=collate_fn,
        num_workers=args.dataloader_num_workers,
        worker_init_fn=start_worker,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else iter() draws from the global one, and a resumed run's dropout differs
    )
    loader.content = content
    return loader


def make_eval_loader(
    rows: torch.utils.data.Dataset,
    args: TrainArgs,
    rank: int,
    world_size: int,
    lengths: np.ndarray | None = None,
    collate_fn: Callable[[list], dict[str, torch.Tensor]] | None = None,
) -> DataLoader:
    """Every row on exactly one rank, and as many batches on each: the last are filled up with rows without targets.

    With `lengths`, from the shortest row to the longest.

    Raises:
        ConfigError: where there are no rows.
    """
    if not len(rows):
        raise ConfigError("no row is left to evaluate on; give more data, or hold out a larger share")
    size = args.per_device_eval_batch_size
    num_batches = math.ceil(len(rows) / (size * world_size))
    order = range(len(rows)) if lengths is None else np.argsort(lengths, kind="stable").tolist()
    places = range(rank, num_batches * size * world_size, world_size)
    mine = [order[place] if place < len(rows) else -1 for place in places]
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    return DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # evaluating must not shift the dropout of the steps behind it
    )


def check_content(now: str, states: list[dict]) -> None:
    """Raise ConfigError unless a checkpoint, whose data's `states` these are, is of rows with this checksum."""
    then = states[0].get("content") if states else None
    if then and then != now:
        raise ConfigError(
            f"the training data are others than the checkpoint's: their checksum is {now}, was {then}; put the "
            "files back as they were, or start anew in another --output_dir"
        )


def checksum_of_rows(rows: Dataset, columns: Sequence[str]) -> str:
    """Compute XXH3 of columns of any type, whatever chunks they lie in."""
    chunks = [(column, chunk) for column in columns for chunk in rows.data.column(column).chunks]
    if rows._indices is not None:  # of rows that were shuffled or chosen: which of the table they are
        chunks += [("", chunk) for chunk in rows._indices.column(0).chunks]
    digests = defaultdict(xxhash.xxh3_128)
    for column, chunk in chunks:
        for leaf, values in leaves(column, chunk):
            digests[leaf].update(values)
    return xxhash.xxh3_128_hexdigest(
        repr(sorted((leaf, digest.hexdigest()) for leaf, digest in digests.items())).encode()
    )


def leaves(name: str, array: pa.Array) -> Iterator[tuple[str, bytes | np.ndarray]]:
    """Yield names and contents of the plain arrays that an array of texts, lists or structures consists of."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        yield f"{name}, lengths", np.ascontiguousarray(array.value_lengths().fill_null(0))
        yield from leaves(f"{name}[]", array.flatten())
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        yield f"{name}, lengths", np.ascontiguousarray(pc.binary_length(array).fill_null(0))
        yield name, "".join(filter(None, array.to_pylist())).encode()
    elif pa.types.is_struct(array.type):
        for field, values in zip(array.type, array.flatten(), strict=True):
            yield from leaves(f"{name}.{field.name}", values)
    elif pa.types.is_boolean(array.type):
        yield from leaves(name, array.cast(pa.uint8()))
    elif pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        yield name, np.ascontiguousarray(array.fill_null(0))
    else:
        yield name, "".join(f"{value!r}\n" for value in array.to_pylist()).encode()


def cached(root: Path, key: dict, build: Callable[[Path], None], is_builder: bool) -> Path:
    """The folder that `build(folder)` filled for this `key`, built once by the process that `is_builder`.

    The others wait for it, without a collective that could time out; when the builder fails, the launcher ends
    them. The folder appears under its name only when it is whole. On a shared filesystem two nodes may build at
    once; then the second finds the first's.
    """
    final = root / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if not is_builder:
        while not final.exists():
            time.sleep(0.2)
    elif not final.exists():
        partial = final.with_name(f"{final.name}.partial-{socket.gethostname()}-{os.getpid()}")
        print(f"Preparing the data, once; it is kept in {final}", flush=True)
        try:
            partial.mkdir(parents=True)
            build(partial)
            (partial / "key.json").write_text(json.dumps(key, indent=1))
            try:
                partial.rename(final)
            except OSError:
                if not final.exists():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                root.rmdir()  # only when empty: a build that failed leaves nothing
    return final
