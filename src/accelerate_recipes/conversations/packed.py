"""Rows of SFT as pieces of tokenised documents: cut, packed as by trl, chosen, shuffled, and their targets counted."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from trl.data_utils import _pack_bfd

from accelerate_recipes.conversations.formats import LABEL
from accelerate_recipes.data.prepared import lengths_of
from accelerate_recipes.models import IGNORE_INDEX

NUM_LAST = 4  # number of last targets of a row among which its end token is searched
EVERYTHING = slice(None)
TOKENS = ("input_ids", "labels")  # columns of documents of which rows have pieces
PART = 1000  # rows that are read together


@dataclass(eq=False)
class Packed(Sequence):
    """Rows of pieces of documents. They are numbers: to cut, pack, choose and shuffle rows copies no token.

    Args:
        documents: TOKENS of each, and columns of which the checksum of the rows is made too; without a pending selection.
        pieces: (N, 3): number of a document, begin and end of a part of it; those of a row stand behind each other.
        borders: number of pieces before each row, and of all.
        are_apart: whether the documents of a row are apart, so that their first tokens are no targets.
        columns: columns of which a row has the value of its document, or a list of those of all that are apart.
        numbers: those of the rows that are left, in their order; default: all.
    """

    documents: datasets.Dataset
    pieces: np.ndarray
    borders: np.ndarray
    are_apart: bool = False
    columns: Sequence[str] = ()
    numbers: np.ndarray | None = None

    @cached_property
    def order(self) -> np.ndarray:
        """Numbers of the rows."""
        return np.arange(len(self.borders) - 1) if self.numbers is None else self.numbers

    @property
    def column_names(self) -> list[str]:
        return [*TOKENS, "seq_lengths"] if self.are_apart else [*TOKENS]

    @property
    def lengths(self) -> np.ndarray:
        """Count the tokens of each row."""
        return np.add.reduceat(self.pieces[:, 2] - self.pieces[:, 1], self.borders[:-1])[self.order]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        row = self.order[number]
        pieces = self.pieces[self.borders[row] : self.borders[row + 1]]
        example: dict[str, Any] = {name: tokens_of(self.documents, name, pieces.tolist()).tolist() for name in TOKENS}
        if self.are_apart:
            example["seq_lengths"] = (pieces[:, 2] - pieces[:, 1]).tolist()
        for name in self.columns:
            values = [self.documents.data.column(name)[number].as_py() for number in pieces[:, 0].tolist()]
            example[name] = values if self.are_apart else values[0]
        return example

    def chunks(self, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the lengths and the joined numbers of a column, part by part; `seq_lengths` are those of documents."""
        for first in range(0, len(self), PART):
            begins, ends = (self.borders[self.order[first : first + PART] + more] for more in (0, 1))
            counts = ends - begins
            starts = np.cumsum(counts) - counts
            pieces = self.pieces[np.repeat(begins - starts, counts) + np.arange(counts.sum())]
            lengths = (pieces[:, 2] - pieces[:, 1]).astype(np.int32)
            of_rows = np.add.reduceat(lengths, starts)
            if column != "seq_lengths":
                yield of_rows, tokens_of(self.documents, column, pieces.tolist())
            else:
                yield (counts, lengths) if self.are_apart else (np.ones_like(counts), of_rows)

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield columns, part by part, of which a checksum is made: those of a table of all rows, and `numbers`."""
        for column in self.column_names:
            for lengths, values in replace(self, numbers=None).chunks(column):
                yield column, pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values)
        for column in {*self.documents.column_names} - {*TOKENS}:
            yield from ((column, chunk) for chunk in self.documents.data.column(column).chunks)
        if self.numbers is not None:
            yield "", pa.array(self.numbers, pa.uint64())

    def chosen(self, numbers: np.ndarray) -> "Packed":
        return replace(self, numbers=self.order[numbers])

    def shuffled(self, seed: int | None) -> "Packed":
        order = np.random.default_rng(seed).permutation(len(self))
        return self.chosen(order) if seed is not None and (np.diff(order) != 1).any() else self


def tokens_of(documents: datasets.Dataset, column: str, pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """Join the tokens of pieces: number of a document, begin and end."""
    tokens: Any = documents.data.column(column)
    return np.concatenate([tokens[number].values.to_numpy()[begin:end] for number, begin, end in pieces])


def is_packed(args: Any, side: str) -> bool:
    """Tell whether the rows of a side, `train` or `test`, are packed."""
    return args.packing if side == "train" or args.eval_packing is None else args.eval_packing


def kept_part(args: Any, packs: bool) -> slice:
    """Return the part of each row that is trained; what `bfd_split` and `wrapped` cut off is trained as another row."""
    if not args.max_length or (packs and args.packing_strategy != "bfd"):
        return EVERYTHING
    at_end = args.truncation_mode == "keep_end" and not packs
    return slice(-args.max_length, None) if at_end else slice(args.max_length)


def cut_or_packed(args: Any, side: str, documents: datasets.Dataset) -> Packed:
    """Pack the documents of a side, or cut them and leave out those that have no target then, as trl does."""
    seed = args.seed if args.shuffle_dataset else None
    if is_packed(args, side):
        rows = packed(documents.select_columns([*TOKENS]), args.max_length, args.packing_strategy, seed)
    else:
        rows = cut(documents, kept_part(args, packs=False))
        if args.max_length:  # a first token counts too
            have_targets = [np.diff(targets_before(*labels)) > 0 for labels in rows.chunks("labels")]
            rows = rows.chosen(np.flatnonzero(np.concatenate(have_targets)))
    return rows.shuffled(seed)


def cut(documents: datasets.Dataset, kept: slice = EVERYTHING) -> Packed:
    """Make a row of a part of each document, its beginning or its end."""
    lengths, numbers = lengths_of(documents), np.arange(len(documents) + 1)
    begins = np.maximum(lengths + (kept.start or -lengths), 0)
    ends = np.minimum(lengths, kept.stop or lengths)
    columns = [name for name in (LABEL,) if name in documents.column_names]
    return Packed(documents, np.stack([numbers[:-1], begins, ends], 1), numbers, columns=columns)


def packed(documents: datasets.Dataset, longest: int, strategy: str, seed: int | None) -> Packed:
    """Pack documents by a strategy of trl, those of each PART apart from others, as trl does; with a seed, shuffled."""
    lengths, order = lengths_of(documents), cut(documents).shuffled(seed).order
    parts = np.split(order, range(PART, len(order), PART))
    pieces, counts = zip(*(packed_part(part, lengths[part], longest, strategy) for part in parts), strict=True)
    return Packed(documents, np.concatenate(pieces), np.cumsum([0, *np.concatenate(counts)]), strategy != "wrapped")


def packed_part(numbers: np.ndarray, lengths: np.ndarray, longest: int, strategy: str) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents of these numbers and lengths. Return the pieces of the rows, and how many each row has.

    trl's function packs the places of their tokens.
    """
    ends = lengths.cumsum(dtype=np.int64)
    starts = ends - lengths
    if strategy == "wrapped":  # one text, cut every `longest` tokens
        begins = np.union1d(np.arange(0, ends[-1], longest), starts[lengths > 0])
        sizes, counts = np.diff(begins, append=ends[-1]), np.bincount(begins // longest)
    else:
        indices = pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), np.arange(ends[-1]))
        bins = _pack_bfd(pa.table({"places": indices}), longest, "split" if strategy == "bfd_split" else "truncate")
        indices, of_rows = (bins.column(name).chunk(0) for name in ("places", "seq_lengths"))
        sizes, counts = np.asarray(of_rows.flatten()), np.asarray(of_rows.value_lengths())
        begins = np.asarray(indices.flatten())[sizes.cumsum() - sizes]
    documents = ends.searchsorted(begins, "right")
    begins = begins - starts[documents]
    return np.stack([numbers[documents], begins, begins + sizes], 1), counts


def count_targets_of(rows: Packed, ends: Iterable[int] = ()) -> tuple[np.ndarray, int, set[int]]:
    """Count the targets of each row, and the rows that end with one of `ends`, from their `labels`; also return these ends.

    The first token of a row is no target, nor that of a document of it that is apart: nothing comes before it. An end token
    counts if it is among the last NUM_LAST targets of a row: a template may write a line break after it, and end tokens of
    the user's messages are further from the end.
    """
    counts, num_ended, seen = [np.empty(0, np.int64)], 0, set()
    for (lengths, labels), (_, documents) in zip(rows.chunks("labels"), rows.chunks("seq_lengths"), strict=True):
        labels[(documents.cumsum() - documents)[documents > 0]] = IGNORE_INDEX
        before, targets = targets_before(lengths, labels), labels[labels != IGNORE_INDEX]
        counts.append(np.diff(before))
        has_end = np.zeros(len(lengths), bool)
        for offset in range(1, NUM_LAST + 1):
            numbers = np.flatnonzero(counts[-1] >= offset)
            tokens = targets[before[numbers + 1] - offset]
            is_end = np.isin(tokens, list(ends))
            has_end[numbers[is_end]] = True
            seen |= {*tokens[is_end].tolist()}
        num_ended += int(has_end.sum())
    return np.concatenate(counts), num_ended, seen


def targets_before(lengths: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Count the targets before each row of these lengths, and in all of them."""
    return np.append(0, np.cumsum(labels != IGNORE_INDEX))[np.append(0, np.cumsum(lengths))]
