"""Packing of documents into rows of one length; a document that fits into a row is never cut."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from accelerate_recipes.data.passes import map_rows
from accelerate_recipes.data.prepared import chunks_of, lengths_of
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.documents import boundaries

if TYPE_CHECKING:
    from datasets import Dataset


def pack(lengths: Sequence[int], max_length: int) -> list[list[tuple[int, int, int]]]:
    """Distribute documents over rows of `max_length` tokens: longest first, each into the fullest row that has room for it.

    A document that fits into a row stays whole; a longer one is split into full rows and a remainder. Returns for each
    row its pieces as (document, start, end). Every token is in exactly one piece.

    Source: best-fit packing, Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3.
    """
    pieces = [
        (document, start, min(start + max_length, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, max_length)
    ]
    pieces.sort(key=lambda piece: piece[1] - piece[2])  # longest first; the sort is stable, so the result is fixed
    rows: list[list[tuple[int, int, int]]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(max_length + 1)]
    # Bit n is set if some row has n tokens left. Shifting out the bits below `length` leaves the rows in which a piece
    # fits; the lowest bit that remains is the best fit, found without a search.
    spaces = 0
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


def pack_documents(documents: "Dataset", max_length: int, cache_file: Path) -> "Dataset":
    """Pack the `input_ids` of `documents` into rows, with the `lengths` of the pieces in each row.

    `documents` must have no pending selection (`flatten_indices`). The rows are written to `cache_file`.
    """
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value

    rows = pack(lengths_of(documents).tolist(), max_length)

    def gather(table: pa.Table, first: int) -> pa.Table:
        pieces_of_rows = table["pieces"].to_pylist()
        # Take the documents of all pieces with one Arrow call. Document i of `taken` is tokens[offsets[i] : offsets[i + 1]].
        wanted = pa.array([document for pieces in pieces_of_rows for document, _, _ in pieces])
        taken = documents.data.column("input_ids").take(wanted).combine_chunks()
        tokens, offsets = np.asarray(taken.values), np.asarray(taken.offsets)
        packed, lengths, begins = [], [], iter(offsets)
        for pieces in pieces_of_rows:
            parts = [tokens[at + start : at + end] for (_, start, end), at in zip(pieces, begins, strict=False)]
            packed.append(np.concatenate(parts))
            lengths.append([len(part) for part in parts])
        return pa.table({"input_ids": packed, "lengths": lengths})

    features = Features(input_ids=documents.features["input_ids"], lengths=List(Value("int64")))
    return map_rows(Dataset.from_dict({"pieces": rows}), partial(gather), features, (), 1, "Packing", cache_file)


def pack_row(
    tokens: np.ndarray, lengths: Sequence[int], max_length: int, pad_token_id: int, document_mask: bool
) -> dict[str, torch.Tensor]:
    """Make a row of `max_length` tokens: `input_ids`, `position_ids` and `labels`, each (T,) int64.

    `tokens` are the tokens of all pieces of documents in the row, `lengths` the pieces' lengths; padding fills the rest.
    With `document_mask`, positions restart at each piece, so that attention stays inside the piece. Without, the row is
    one continuous text. In both cases the first token of a piece is no target: the token before it belongs to another
    document, or the document was cut there.
    """
    input_ids = np.full(max_length, pad_token_id)
    labels = np.full(max_length, IGNORE_INDEX)
    position_ids = np.arange(max_length)
    input_ids[: len(tokens)] = labels[: len(tokens)] = tokens
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    labels[starts[:-1]] = IGNORE_INDEX
    if document_mask:
        # Subtract from each position the start of its piece. Padding counts as one more piece, from the last start on.
        position_ids -= np.repeat(starts, np.diff(np.append(starts, max_length)))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "labels": torch.from_numpy(labels),
    }


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Make a batch of packed rows, (B, T) each, that also says where documents begin; see `attention.boundaries`."""
    batch = default_collate(rows)
    return batch | boundaries(batch["position_ids"])


class PackedRows(torch.utils.data.Dataset):
    """Dataset of rows of `max_length` tokens, as `pack_row` makes them, with their number as `row`.

    Number -1 is a row without targets; it fills a place for which no row is left.
    """

    def __init__(self, rows: "Dataset", max_length: int, pad_token_id: int, document_mask: bool):
        self.rows = rows.with_format("numpy")
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.document_mask = document_mask

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": [], "lengths": []} if index < 0 else self.rows[index]
        tokens = pack_row(row["input_ids"], row["lengths"], self.max_length, self.pad_token_id, self.document_mask)
        return tokens | {"row": torch.tensor(index)}

    @property
    def padding_share(self) -> float:
        """Return the share of all positions that hold no token."""
        return 1 - lengths_of(self.rows).sum() / (len(self) * self.max_length)

    @property
    def num_targets(self) -> np.ndarray:
        """Count the targets of each row: all tokens except the first of each piece."""
        return lengths_of(self.rows) - lengths_of(self.rows, "lengths")

    @property
    def attended_length(self) -> float:
        """Return the mean length of a token's document, over all tokens. This is T in the FLOPs of attention."""
        if not self.document_mask:
            return float(self.max_length)
        # Each of the n tokens of a document counts n: the mean over tokens is sum(n * n) / sum(n).
        lengths = np.concatenate([chunk for _, chunk in chunks_of(self.rows, "lengths")]).astype(float)
        return float((lengths**2).sum() / lengths.sum())
