"""Rows of local files, and of datasets on this machine. An error in a file becomes one message that names its place."""

import json
import logging
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from accelerate_recipes.data.reading import reading
from accelerate_recipes.disk import IS_POINTER, checksum, is_pointer, made_once
from accelerate_recipes.errors import DataError, other_recipe, suggestion
from accelerate_recipes.hub import cache

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

VERSION = 3  # of the tables in the cache; raise it when files are read differently, so that old tables are not used
FILE_KINDS = cache.BUILDERS | {".arrow": "arrow", ".tsv": "tsv"}
PACKED = [kind + how for kind in (".jsonl", ".json", ".csv", ".tsv") for how in (".gz", ".zst")]
SUFFIXES = (*FILE_KINDS, *PACKED)  # of the files that are read

# These libraries also log the errors that they raise.
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)


def file_kind(file: str) -> str | None:
    """Return the kind of a file by its suffix; None if such files are not read."""
    suffix = next((suffix for suffix in SUFFIXES if file.endswith(suffix)), "")
    return FILE_KINDS.get(suffix.removesuffix(".gz").removesuffix(".zst"))


def read_files(files: Sequence[str], cache_dir: str | Path | None = None) -> "datasets.Dataset":
    """Read all rows of local files of one kind; each file has a suffix of SUFFIXES.

    The rows are kept as an Arrow table in `cache_dir` (default: that of `datasets`). The table is found again by the content
    of the files, because other content may have the same name, size and time.

    Raises:
        DataError: for a file that is damaged, or has no rows.
    """
    import datasets

    from accelerate_recipes.data.tables import write_table

    kind, sums = file_kind(files[0]), []
    for file in files:
        if is_pointer(Path(file)):
            raise DataError(f"{file} {IS_POINTER}")
        with reading(file):
            sums.append(checksum(Path(file)))
    name = xxhash.xxh3_128_hexdigest(json.dumps([VERSION, kind, sums]).encode())
    table = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / f"files-{name}" / "rows.arrow"
    return datasets.Dataset.from_file(str(made_once(table, lambda partial: write_table(files, kind, str(partial)))))


def read_split(need: cache.HubDataset, split: str) -> "datasets.Dataset":
    """Read a split, such as `train[:10%]`, of a folder or of a downloaded dataset.

    Raises:
        ConfigError: if the dataset was not downloaded.
        DataError: if the dataset cannot be read, or has no such split.
    """
    import datasets
    from datasets.data_files import DataFilesList

    root, options, is_typed = Path(datasets.config.HF_DATASETS_CACHE), {}, False
    saved = cache.saved_splits(need.name)
    arguments = {} if saved else cache.load_arguments(need)
    with reading(f"{need.name}, split {split}"):
        if saved:
            files = saved
        elif Path(need.name).is_dir():
            # `datasets` finds data in its cache by the times of the files; this folder depends on their content.
            root /= xxhash.xxh3_128_hexdigest(json.dumps(cache.version("dataset", need.name)).encode())
            builder = datasets.load_dataset_builder(**arguments, cache_dir=str(root))
            files = dict(builder.config.data_files or {})
            options, is_typed = cache.options_of(builder.config), bool(builder.info.features)
        else:
            # `datasets` does not take a list of this class for patterns. Files in the cache of the Hub never change.
            data_files = arguments["data_files"].items()
            files = {name: DataFilesList(paths, [(path,) for path in paths]) for name, paths in data_files}
            arguments["data_files"] = files
            options = {name: value for name, value in arguments.items() if name not in ("path", "data_files")}
        names = cache.names_in(split)
        if lost := {*names} - {*files}:
            raise ValueError(f"there is no split {min(lost)}; there are {', '.join(map(str, files))}")
        kinds = {file_kind(file) for name in names for file in files[name]}
        is_usual = options == ({"sep": "\t"} if kinds == {"tsv"} else {})
        if is_typed or not is_usual or len(kinds) > 1 or None in kinds:
            return datasets.load_dataset(**arguments, split=split, cache_dir=str(root))
        parts = {name: read_files(files[name]) for name in names}
        sizes = {name: len(part) for name, part in parts.items()}
        spans = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        chosen = [parts[span.splitname].select(range(span.from_, span.to)) for span in spans]
        if not any(map(len, chosen)):
            raise ValueError("it has 0 rows")
        return datasets.concatenate_datasets(chosen)


def check_texts_or_messages(rows: "datasets.Dataset", columns: Collection[str], source: str) -> None:
    """Check that all columns hold texts, or that all hold lists of messages.

    Raises:
        DataError: for a column that is missing or has another type than the others, and for the first row in which a column
            is null or has no message.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    holds = {}
    for column in columns:
        if column not in rows.column_names:
            meant = suggestion(column, rows.column_names) or other_recipe(rows.column_names)
            raise DataError(f"{source} has no column {column!r}; there are {', '.join(rows.column_names)}{meant}")
        values = rows.data.column(column)
        kind = values.type
        if isinstance(kind, pa.JsonType):  # several types
            non_texts = ((row, value) for row, value in enumerate(rows[column], 1) if not isinstance(value, str))
            row, value = next(non_texts, (1, rows[0][column]))
            raise DataError(
                f"{source}, row {row}: {column!r} holds {value!r:.60}; give texts in all rows, or lists in all"
            )
        is_messages = pa.types.is_list(kind) and isinstance(kind.value_type, pa.StructType | pa.JsonType)
        holds[column] = "messages" if is_messages else "texts"
        if not (is_messages or pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            remedy = "" if pa.types.is_nested(kind) else "; write it as text" + " (UTF-8)" * ("binary" in str(kind))
            raise DataError(f"{source}: {column!r} holds {kind}, not texts or messages{remedy}")
        if values.null_count:
            row = pc.index(values.is_null(), True).as_py() + 1
            raise DataError(f"{source}, row {row}: {column!r} is null, as in {values.null_count} of {len(rows)} rows")
        if is_messages:
            check_messages(values, f"{source}{{}}: {column!r}")
    if len({*holds.values()}) > 1:
        summary = ", ".join(f"{column!r} holds {what}" for column, what in holds.items())
        raise DataError(f"{source}: {summary}; give all of them as texts, or all as lists of messages")


def check_messages(values: "pa.ChunkedArray", where: str) -> None:
    """Raise DataError for messages without a role or content, and for the first list that is empty or holds a null.

    `where` gets the row's number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    fields = values.type.value_type
    names = [field.name for field in fields] if isinstance(fields, pa.StructType) else ["role", "content"]
    if "role" not in names or not {"content", "tool_calls"} & {*names}:
        raise DataError(f"{where.format('')} holds messages with {', '.join(names)}; a message has role and content")
    if isinstance(fields, pa.StructType) and not pa.types.is_string(fields.field("role").type):
        raise DataError(f"{where.format('')} holds messages whose `role` is not a text in all rows, such as user")
    for number, length in enumerate(pc.list_value_length(values).to_pylist(), 1):
        if not length:
            raise DataError(f"{where.format(f', row {number}')} has no message; remove the row")
    if sum(chunk.flatten().null_count for chunk in values.chunks):
        number = next(i for i, messages in enumerate(values.to_pylist(), 1) if None in messages)
        raise DataError(f"{where.format(f', row {number}')} has a message that is null; remove it")
    if isinstance(fields, pa.StructType) and any(
        pc.struct_field(c.flatten(), "role").null_count for c in values.chunks
    ):
        number = next(i for i, chat in enumerate(values.to_pylist(), 1) if any(m["role"] is None for m in chat))
        raise DataError(f"{where.format(f', row {number}')} has a message without a role")


def class_names(labels: Iterable[str]) -> list[str]:
    """List the different labels, in the order of numbers if all are numbers: 2 before 10."""
    names = {*labels}
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def some_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''} ({len(names)})"


def falls_under(source: str, share: float) -> bool:
    """Tell whether the hash of a text falls under a share."""
    return text_hash(source) < int(share * 2**64)


def other_share(hashes: Collection[int], share: float) -> str:
    """Say which share would leave something on both sides, where this one leaves a side empty: the least, in few digits."""
    first, last = min(hashes, default=0), max(hashes, default=0)
    for digits in range(1, 18):
        candidate = (first * 10**digits // 2**64 + 1) / 10**digits
        if first < int(candidate * 2**64) <= last:
            return f"give --heldout_share {candidate} (it is {share})"
    return f"all are alike, and no --heldout_share (it is {share}) divides them: give others"


def text_hash(text: str) -> int:
    """Compute a hash of a text, below 2**64. Case and white space do not count: repeats differ in them."""
    return xxhash.xxh64_intdigest(" ".join(unicodedata.normalize("NFKC", text).casefold().split()).encode())
