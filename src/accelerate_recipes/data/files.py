"""Rows of local files, read by `datasets`; an error in a file becomes one message that says where it is."""

import contextlib
import json
import logging
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from accelerate_recipes.data.shards import DataError, check_characters, record_of
from accelerate_recipes.hub import cache

# These libraries also log the errors that they raise.
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn any error of `datasets`, pandas and pyarrow into one message.

    Raises:
        DataError: naming the source, and what is wrong with it.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise DataError(f"{source} cannot be read: {reason}") from error


def read_files(files: Sequence[str], cache_dir: str | Path | None = None) -> datasets.Dataset:
    """Read all rows of local files, which are all .jsonl, all .parquet or all .csv.

    Raises:
        DataError: for a file that is damaged, or has no rows.
    """
    names = ", ".join(files)
    kind = cache.BUILDERS[Path(files[0]).suffix]
    # A text may really be "None" or "NA".
    options: dict[str, Any] = {"keep_default_na": False} if kind == "csv" else {}
    for file in files:
        with reading(file):
            if is_empty(file):
                raise ValueError("it has 0 rows")
        if kind == "json":
            check_no_null(file)
    try:
        with reading(names):
            rows = datasets.load_dataset(
                kind, data_files=list(files), split="train", cache_dir=cache_dir and str(cache_dir), **options
            )
        check_texts(rows, names)
    except DataError:
        for file in files if kind == "json" else ():
            check_lines(file)
        raise
    return rows


def check_texts_or_messages(rows: datasets.Dataset, columns: Collection[str], source: str) -> None:
    """Check that columns hold texts, or all of them lists of messages.

    Raises:
        DataError: for a column that is missing or has another type than the others, and for the first row in which it is
            null, or has no message.
    """
    holds = {}
    for column in columns:
        if column not in rows.column_names:
            raise DataError(f"{source} has no column {column!r}; there are {', '.join(rows.column_names)}")
        values = rows.data.column(column)
        kind = values.type
        is_messages = pa.types.is_list(kind) and isinstance(kind.value_type, pa.StructType | pa.JsonType)
        holds[column] = "messages" if is_messages else "texts"
        if not (is_messages or pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            raise DataError(f"{source}: {column!r} holds {kind}, not texts or messages")
        if values.null_count:
            row = pc.index(values.is_null(), True).as_py()
            raise DataError(f"{source}, row {row}: {column!r} is null, as in {values.null_count} of {len(rows)} rows")
        if is_messages:
            check_messages(values, f"{source}{{}}: {column!r}")
    if len({*holds.values()}) > 1:
        said = ", ".join(f"{column!r} holds {what}" for column, what in holds.items())
        raise DataError(f"{source}: {said}; give all of them as texts, or all as lists of messages")


def check_messages(values: pa.ChunkedArray, where: str) -> None:
    """Raise DataError for messages without a role, and for the first list that is empty or holds a null.

    `where` gets the row's number.
    """
    fields = values.type.value_type
    if isinstance(fields, pa.StructType) and fields.get_field_index("role") < 0:
        names = ", ".join(field.name for field in fields)
        raise DataError(f"{where.format('')} holds messages with {names}; a message has role and content")
    if isinstance(fields, pa.StructType) and not pa.types.is_string(fields.field("role").type):
        raise DataError(f"{where.format('')} holds messages whose `role` is not a text in all rows, such as user")
    for number, length in enumerate(pc.list_value_length(values).to_pylist()):
        if not length:
            raise DataError(f"{where.format(f', row {number}')} has no message; remove the row")
    if sum(chunk.flatten().null_count for chunk in values.chunks):
        number = next(i for i, messages in enumerate(values.to_pylist()) if None in messages)
        raise DataError(f"{where.format(f', row {number}')} has a message that is null; remove it")
    if isinstance(fields, pa.StructType) and any(
        pc.struct_field(c.flatten(), "role").null_count for c in values.chunks
    ):
        number = next(i for i, found in enumerate(values.to_pylist()) if any(m["role"] is None for m in found))
        raise DataError(f"{where.format(f', row {number}')} has a message without a role")


def is_empty(file: str) -> bool:
    """Tell whether a local file has no rows; the message of `datasets` about such a file would help nobody."""
    if file.endswith(".parquet"):
        return pq.read_metadata(file).num_rows == 0
    with open(file, "rb") as lines:
        filled = (line for line in lines if line.strip())
        if file.endswith(".csv"):
            next(filled, None)  # the header
        return next(filled, None) is None


def check_no_null(file: str) -> None:
    """Raise DataError for the first line of a .jsonl file that is `null`.

    pyarrow 26.0 ends the process with a segmentation fault if such a line is the first of a block. A file that is one list
    or one object, written on many lines, may have such lines inside.
    """
    with open(file, "rb") as lines:
        begin = next((line.strip() for line in lines if line.strip()), b"")
        if begin.startswith(b"[") or begin == b"{":
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if len(line) < 100 and line.strip() == b"null":
                raise DataError(f"{file}, line {number} is no JSON object, but null; remove it")


def check_lines(file: str) -> None:
    """Raise DataError for the first line of a .jsonl file that is not JSON, or is JSON that cannot be stored."""
    with open(file, "rb") as lines:
        for index, line in enumerate(lines):
            if line.strip():
                record = record_of(file, index, line)
                check_characters(json.dumps(record, ensure_ascii=False), f"{file}, line {index + 1}")


def check_texts(rows: datasets.Dataset, source: str) -> None:
    """Raise DataError for the first row with a text that is not UTF-8; pyarrow does not check this."""
    table = rows.data.table
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        for row in range(len(table)):
            with reading(f"{source}, row {row}"):
                table.slice(row, 1).to_pylist()
        raise DataError(f"{source} cannot be read: {error}") from error


def falls_under(source: str, share: float) -> bool:
    """Tell whether a text's hash falls under a share. Case and white space do not count, since repeats differ in them."""
    text = " ".join(unicodedata.normalize("NFKC", source).casefold().split())
    return xxhash.xxh64_intdigest(text.encode()) < int(share * 2**64)
