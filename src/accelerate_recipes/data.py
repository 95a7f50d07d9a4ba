"""Packed rows, and the order in which the ranks see them.

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
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.losses import IGNORE_INDEX


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


def rows_of_step(step: int, batch_size: int, num_rows: int, seed: int, end: float = math.inf) -> list[int]:
    """Rows of the global batch that optimizer step `step` (from 0) trains on.

    Epochs follow each other without a gap, so every row comes once in each. Behind `end` rows in all, -1.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    return [
        int(permutation(num_rows, seed, place // num_rows)[place % num_rows]) if place < end else -1 for place in places
    ]


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
            rows = rows_of_step(step, args.total_batch_size, self.num_rows, args.seed, end)
            mine = rows[self.rank * share : (self.rank + 1) * share]
            for start in range(0, share, args.per_device_train_batch_size):
                yield mine[start : start + args.per_device_train_batch_size]
            step += 1


def num_steps(args: TrainArgs, num_rows: int) -> int:
    """Optimizer steps of the whole run."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(round(args.num_train_epochs * num_rows) / args.total_batch_size)


class StepLoader(DataLoader):
    """Micro-batches by a StepOrder, whose position is the step and nothing else."""

    def start_at(self, step: int, states: list[dict]) -> None:
        """Before iterating: begin behind `step` optimizer steps. `states` are what `state` gave on all ranks."""
        self.batch_sampler.start_step = step

    def state(self) -> dict:
        """What a checkpoint needs besides the step: nothing."""
        return {}

    def counts(self) -> dict[str, int]:
        return {}


def make_train_loader(rows: torch.utils.data.Dataset, args: TrainArgs, rank: int, world_size: int) -> StepLoader:
    """This rank's micro-batches in the order of the steps."""
    return StepLoader(
        rows,
        batch_sampler=StepOrder(len(rows), args, rank, world_size),
        num_workers=args.dataloader_num_workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else iter() draws from the global one, and a resumed run's dropout differs
    )


def make_eval_loader(rows: torch.utils.data.Dataset, args: TrainArgs, rank: int, world_size: int) -> DataLoader:
    """Every row on exactly one rank, and as many batches on each: the last are filled up with rows without targets."""
    size = args.per_device_eval_batch_size
    num_batches = math.ceil(len(rows) / (size * world_size))
    places = range(rank, num_batches * size * world_size, world_size)
    mine = [place if place < len(rows) else -1 for place in places]
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    return DataLoader(
        rows,
        batch_sampler=batches,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # evaluating must not shift the dropout of the steps behind it
    )


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
