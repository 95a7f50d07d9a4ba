"""Parts of every reader of files: which files, an object in a line, values for templates, and errors as one message."""

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_recipes.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import pyarrow.parquet as pq

TXT = ".txt"
BOM = b"\xef\xbb\xbf"
MAX_LINE = 64 << 20  # bytes of a line; a longer line means a damaged file, and would fill the memory
TOO_LONG = f"has more than {MAX_LINE >> 20} MiB; divide or remove it"


@contextlib.contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn any error of `datasets`, pyarrow and other readers into one message.

    Raises:
        DataError: names the source and the problem.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise DataError(f"{source} cannot be read: {reason}{remedy_of(reason)}") from error


def remedy_of(reason: str) -> str:
    """Return what to do about an error of decoding, which Python and Arrow word in different ways; "" for other errors."""
    return "; save it as UTF-8" if "codec can't decode" in reason or "UTF8" in reason else ""


def files_of_folder(folder: str, suffixes: Sequence[str]) -> list[str]:
    """List the files of a folder that can be read.

    Raises:
        ConfigError: if there is none, or if there are several kinds: a README.txt beside .jsonl files is no data.
    """
    # Unlike Path.rglob, glob follows links to folders, and leaves out hidden files, such as copies of an editor.
    paths = sorted(Path(folder, name) for name in glob.glob("**", root_dir=folder, recursive=True))
    files = [path for path in paths if path.is_file()]
    # A .TXT is found here, and refused by its name afterwards.
    kinds = {suffix: [str(path) for path in files if path.name.lower().endswith(suffix)] for suffix in suffixes}
    kinds = {suffix: named for suffix, named in kinds.items() if named}
    if len(kinds) != 1:
        held = (
            f"files of several kinds, {', '.join(kinds)}; name those to read" if kinds else f"no {', '.join(suffixes)}"
        )
        raise ConfigError(f"the folder {folder} holds {held}")
    return next(iter(kinds.values()))


def open_parquet(file: str) -> "pq.ParquetFile":
    """Open a Parquet file. Its pages are checked if the file has checksums."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(os.path.abspath(file), page_checksum_verification=True)  # a relative `a:b` would be a URI


def check_characters(text: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair. JSON can contain one, but neither UTF-8 nor tokens can represent it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds \\u{ord(text[error.start]):x}, which is no character") from None


def record_of(file: str, index: int, line: bytes) -> dict:
    """Parse the JSON object in a line.

    Raises:
        DataError: names file and line (from 1), if the line is not a JSON object.
    """
    where = f"{file}, line {index + 1}"
    try:
        record = json.loads(line.removeprefix(BOM).decode())  # json.loads(bytes) would accept invalid UTF-8
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        raise DataError(f"{where} is not JSON: {reason}{remedy_of(reason)}") from None
    if not isinstance(record, dict):
        kind = "null; remove it" if record is None else f"a {type(record).__name__}"
        raise DataError(f"{where} is no JSON object, but {kind}")
    return record


def json_in(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: for a text that is no JSON, has too many levels, or holds half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def without_nulls(value: Any, kept: str = "") -> Any:
    """Return a nested value without fields that are null; what the field `kept` holds stays as it is.

    But a message that calls tools keeps its `content`, even if null: templates ask whether it is null, and fail if it is
    missing.
    """
    if isinstance(value, dict):
        needed = {"content": None} if value.get("tool_calls") else {}
        fields = {name: entry for name, entry in value.items() if entry is not None}
        return needed | {name: entry if name == kept else without_nulls(entry, kept) for name, entry in fields.items()}
    return [without_nulls(entry, kept) for entry in value] if isinstance(value, list) else value


def as_written(value: Any, feature: Any) -> Any:
    """Return a value of a column of this type without the nulls that Arrow adds to structures; those in JSON are written."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: as_written(entry, feature[name]) for name, entry in value.items() if entry is not None}
    inner = getattr(feature, "feature", None)  # of a list
    return [as_written(entry, inner) for entry in value] if isinstance(value, list) and inner else value
