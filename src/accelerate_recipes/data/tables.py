"""Rows of local files as one Arrow table on the disk. Its schema fits all rows, wherever in the files a field first appears.

Texts stay as they are written, also in CSV. Values whose types differ between rows are stored as JSON, a type of `datasets`:
so are whole numbers beside fractions, those beyond 64 bits, and objects with a field that is null, since Arrow adds nulls.
But in a message, a field that is null is not there, and weights are numbers.
"""

import contextlib
import csv
import io
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.csv
from datasets.table import table_cast

from accelerate_recipes.data.reading import BOM, MAX_LINE, TOO_LONG, check_characters, open_parquet, reading, record_of
from accelerate_recipes.data.template_values import WEIGHTS
from accelerate_recipes.errors import DataError
from accelerate_recipes.upstream import keep_json_exact

keep_json_exact()
BYTES_PARSED = 10 << 20  # bytes that are parsed together
ROWS_A_CHUNK = 1000  # rows
# Levels of nested lists and objects; deeper levels are JSON. The time of `datasets` doubles with each level.
DEEPEST = 16
SPACE = re.compile(r"\s*")
JSON = pa.json_()
ANY = object()  # example of a value that is kept as JSON
VOID = datasets.Value("null")
Read = tuple[pa.Schema, Iterator[pa.RecordBatch]]  # what a file holds


class OtherSchema(Exception):
    """Raised when rows do not fit the schema of the rows before them."""


def write_table(files: Sequence[str], kind: str, path: str) -> None:
    """Write the rows of files of one kind (arrow, csv, tsv, json or parquet) to an Arrow stream.

    Raises:
        DataError: for a file that cannot be read, or has no rows.
    """
    if kind != "json":
        features = datasets.Features()
        for file in files:
            with reading(file):
                columns = datasets.Features.from_arrow_schema(plain_schema(READERS[kind](file)[0]))
            features |= {name: value for name, value in columns.items() if features.get(name, VOID) == VOID}
        write_stream(path, features, (part for file in files for part in tables_of(file, kind)))
        return
    # In most files, all blocks have the fields of the first one.
    schema = schema_of(next(blocks_of(files[0])))
    try:
        write_stream(path, datasets.Features.from_arrow_schema(schema), json_tables(files, schema))
    except OtherSchema:
        schema = reduce(common_schema, (schema_of(block) for file in files for block in blocks_of(file)))
        write_stream(path, datasets.Features.from_arrow_schema(schema), json_tables(files, schema))


def write_stream(path: str, features: datasets.Features, parts: Iterator[tuple[str, pa.Table]]) -> None:
    """Write tables to an Arrow stream with the types of `features`. Each table comes with the name of its file."""
    schema, counts = features.arrow_schema, {}
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for name, table in parts:
            start = counts.get(name, 0)
            with reading(name):
                table = table_cast(table, schema)
                check_texts(table, name, start)
            stream.write_table(table, max_chunksize=ROWS_A_CHUNK)
            counts[name] = start + len(table)


def check_texts(table: pa.Table, source: str, start: int) -> None:
    """Raise DataError for the first row with a text that is not UTF-8; pyarrow does not check this when it reads."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        for row in range(len(table)):
            with reading(f"{source}, row {start + row + 1}"):
                table.slice(row, 1).to_pylist()
        raise


# Parquet, Arrow and CSV


def tables_of(file: str, kind: str) -> Iterator[tuple[str, pa.Table]]:
    """Yield the file's name and its rows, part by part."""
    with reading(file):
        rows, (_, batches) = 0, READERS[kind](file)
        for batch in batches:
            table = pa.Table.from_batches([batch])
            rows += len(table)
            yield file, table.cast(plain_schema(table.schema))
        if not rows:
            raise ValueError("it has 0 rows")


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Replace variants of types that Polars, pandas and Spark write: every text becomes a text, every list a list."""
    return pa.schema([(field.name, plain(field.type)) for field in schema], metadata=schema.metadata)


def plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if isinstance(kind, pa.UuidType):
        return kind.storage_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.list_(pa.struct([("key", plain(kind.key_type)), ("value", plain(kind.item_type))]))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, plain(field.type)) for field in kind])
    return kind


def read_parquet(file: str) -> Read:
    opened = open_parquet(file)
    rows = opened.metadata.num_rows
    size = sum(opened.metadata.row_group(i).total_byte_size for i in range(opened.num_row_groups))
    return opened.schema_arrow, opened.iter_batches(max(1, min(ROWS_A_CHUNK, rows * BYTES_PARSED // max(size, 1))))


def read_arrow(file: str) -> Read:
    """Read Arrow data in the file format, which Polars writes, or in the stream format, which `datasets` writes."""
    content = pa.memory_map(file)
    if content.size() >= 6 and content.read_at(6, 0) == b"ARROW1":
        reader = pa.ipc.open_file(content)
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    reader = pa.ipc.open_stream(content)
    return reader.schema, iter(reader)


def decompressed(file: str) -> io.BufferedReader:
    """Open a text file; a file whose name ends with .gz or .zst is decompressed while it is read."""
    return io.BufferedReader(pa.input_stream(os.path.abspath(file)))  # pyright: ignore[reportArgumentType]


def read_csv(file: str, delimiter: str = ",") -> Read:
    """Read texts alone, because leading zeros of a number may carry meaning."""
    with io.TextIOWrapper(decompressed(file), encoding="utf-8-sig", newline="") as lines:
        first = next((line for line in lines if line.strip("\r\n")), "")
        names = next(filter(None, csv.reader(itertools.chain([first], lines), delimiter=delimiter)), [])
    marks = ";\t|," if len(names) == 1 else ""
    if other := next((mark for mark in marks if len(next(csv.reader([first], delimiter=mark))) > 1), ""):
        remedy = f"save it with {delimiter!r}" + (", or name it .tsv" if other == "\t" else "")
        raise ValueError(f"its columns are separated by {other!r}, not by {delimiter!r}; {remedy}")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"it has several columns called {min(twice)!r}")
    schema = pa.schema([(name, pa.string()) for name in names])
    return schema, csv_batches(file, schema, delimiter) if names else iter(())


def csv_batches(file: str, schema: pa.Schema, delimiter: str) -> Iterator[pa.RecordBatch]:
    # With threads, the message about a wrong row would lack the number of the row.
    blocks = pa.csv.ReadOptions(block_size=MAX_LINE, use_threads=False)
    cells = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    texts = pa.csv.ConvertOptions(column_types=schema, strings_can_be_null=False)
    rows = 0
    try:
        with decompressed(file) as lines, pa.csv.open_csv(lines, blocks, cells, texts) as reader:
            for batch in reader:
                rows += len(batch)
                yield batch
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
        raise DataError(f"{file}, row {rows + 1} {TOO_LONG}") from None


READERS = {"arrow": read_arrow, "csv": read_csv, "parquet": read_parquet, "tsv": partial(read_csv, delimiter="\t")}

# JSON


def json_tables(files: Sequence[str], schema: pa.Schema) -> Iterator[tuple[str, pa.Table]]:
    """Yield the file and the rows of each block.

    Raises:
        OtherSchema: for a block that needs another schema.
    """
    for file in files:
        for rows in blocks_of(file):
            if common_schema(schema, schema_of(rows)) != schema:
                raise OtherSchema
            with reading(file):
                columns = [array_of([row.get(field.name) for row in rows], field.type) for field in schema]
                table = pa.table(columns, names=schema.names)
            yield file, table


def blocks_of(file: str) -> Iterator[list[dict]]:
    """Yield the rows of a file, block by block: objects, each on a line, or JSON on many lines.

    Raises:
        DataError: names the first line that is not a JSON object, or is longer than MAX_LINE.
    """
    with reading(file):
        if (rows := rows_on_many_lines(file)) is not None:
            for first in range(0, len(rows), ROWS_A_CHUNK):
                yield rows[first : first + ROWS_A_CHUNK]
            return
        with decompressed(file) as lines:
            block, size = [], 0
            for number, line in enumerate(lines_of(lines), 1):
                if len(line) > MAX_LINE:
                    raise DataError(f"{file}, line {number} {TOO_LONG}")
                if line.removeprefix(BOM).strip():
                    block.append(record_of(file, number - 1, line))
                    if b"\\ud" in line.lower():  # maybe half of a surrogate pair
                        check_characters(json.dumps(block[-1], ensure_ascii=False), f"{file}, line {number}")
                size += len(line)
                if block and size >= BYTES_PARSED:
                    yield block
                    block, size = [], 0
            if block:
                yield block


def lines_of(stream: io.BufferedReader) -> Iterator[bytes]:
    """Read line by line; of a line that is longer than MAX_LINE, a part shows it."""
    return iter(lambda: stream.readline(MAX_LINE + 1), b"")


def rows_on_many_lines(file: str) -> list[dict] | None:
    """Return the rows of a file with a list of objects or texts, or with objects over many lines; None for an object a line.

    Raises:
        ValueError: for a file without rows.
    """
    with decompressed(file) as lines:
        begin = next((line for line in lines_of(lines) if line.removeprefix(BOM).strip()), None)
    if begin is None:
        raise ValueError("it has 0 rows")
    start = begin.removeprefix(BOM).lstrip()[:1]
    if start == b"{":
        with contextlib.suppress(DataError):  # the object ends on another line, or is broken
            if len(begin) <= MAX_LINE:
                record_of(file, 0, begin)
            return None
    elif start != b"[":
        return None
    try:
        with decompressed(file) as lines:
            text = lines.read().decode("utf-8-sig")
        values, position = [], SPACE.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
        while position < len(text):
            value, position = json.JSONDecoder().raw_decode(text, position)
            position = SPACE.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]
            values.append(value)
    except (ValueError, RecursionError):
        return None
    if len(values) == 1 and isinstance(values[0], list):
        (values,) = values
    if not values:
        raise ValueError("it has 0 rows")
    rows = [{"text": value} if isinstance(value, str) else value for value in values]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number} is no JSON object, but a {type(row).__name__}")
        check_characters(json.dumps(row, ensure_ascii=False), f"{file}, row {number}")
    return rows


def schema_of(rows: list[dict]) -> pa.Schema:
    """Return the schema that fits all rows of a block."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.schema([(name, kind_of([row.get(name) for row in rows])) for name in names])


def is_message(names: Collection[str], levels: int) -> bool:
    """Tell whether an object with fields of these names is a message, an entry of the list in a column."""
    return "role" in names and levels == DEEPEST - 1


def kind_of(values: list, levels: int = DEEPEST, *, are_weights: bool = False) -> pa.DataType:
    """Return the common type of JSON values. It is JSON if no other type gives all of them back as they are written."""
    values = [value for value in values if value is not None]
    kinds = {*map(type, values)}
    if not kinds:
        return pa.null()
    if kinds == {str}:
        return pa.string()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return pa.int64()
    if kinds == {float} or (are_weights and kinds == {int, float}):
        return pa.float64()
    if not levels:
        return JSON
    if kinds == {list}:
        return pa.list_(kind_of([entry for value in values for entry in value], levels - 1))
    if kinds == {dict} and values[0] and all(value.keys() == values[0].keys() for value in values):
        fields, are_messages = values[0].keys(), is_message(values[0], levels)
        # The fields of a message have no order; the options of a question have one, and Arrow would keep that of the first.
        if are_messages or all(None not in value.values() and [*value] == [*fields] for value in values):
            weights = WEIGHTS if are_messages else ()
            of_fields = {name: [value[name] for value in values] for name in fields}
            return pa.struct([(n, kind_of(v, levels - 1, are_weights=n in weights)) for n, v in of_fields.items()])
    return JSON


def example(kind: pa.DataType) -> Any:
    """Return a value whose type is `kind`, one that `kind_of` returns."""
    if pa.types.is_list(kind):
        return [example(kind.value_type)]
    if pa.types.is_struct(kind):
        return {field.name: example(field.type) for field in kind}
    return {pa.null(): None, pa.string(): "", pa.bool_(): False, pa.int64(): 0, pa.float64(): 0.0}.get(kind, ANY)


def common_schema(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return a schema that can hold the rows of both."""
    return schema_of([{field.name: example(field.type) for field in schema} for schema in (one, other)])


def array_of(values: list, kind: pa.DataType) -> pa.Array:
    """Make an array of values in the form in which they are stored."""
    return pa.array([stored(value, kind) for value in values] if is_converted(kind) else values, storage(kind))


def is_converted(kind: pa.DataType) -> bool:
    """Tell whether values of a type are converted: JSON, which becomes texts."""
    return kind == JSON or any(is_converted(kind.field(i).type) for i in range(kind.num_fields))


def storage(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(storage(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, storage(field.type)) for field in kind])
    return pa.string() if kind == JSON else kind


def stored(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if kind == JSON:
        return json.dumps(value, ensure_ascii=False)
    if pa.types.is_list(kind):
        return [stored(entry, kind.value_type) for entry in value]
    if pa.types.is_struct(kind):
        return {field.name: stored(value[field.name], field.type) for field in kind}
    return value
