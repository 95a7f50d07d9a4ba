"""Documents of a shard, read one by one from a disk or the network; they are decompressed on the fly and not stored."""

import gzip
import http.client
import itertools
import os
import random
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers

from accelerate_recipes.data.reading import MAX_LINE, TOO_LONG, TXT, check_characters, open_parquet, reading, record_of
from accelerate_recipes.data.shards import is_remote
from accelerate_recipes.errors import DataError, first_line, other_recipe, suggestion

CHUNK = 2**18  # bytes to read at once; decompressed text may be ten times as large
# A stream does not use its connection while its documents are tokenised and trained on, minutes or hours for a shard.
# Servers drop such a connection. After this number of seconds we open a new one, and do not count it as a failure.
IDLE_SECONDS = 10.0
TIMEOUT = 30.0  # seconds without a byte after which a connection counts as dead
TRIES = 10  # on a failing network; they end after about five minutes without a byte
WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the second try, which double with each try, and the most before any
T = TypeVar("T")
Document = tuple[int, bytes | str]  # its place in the shard; a line of JSON, or a text


def read_documents(
    shard: str, text_column: str, first: int, stride: int, on_retry: Callable[[], None]
) -> Iterator[Document]:
    """Read documents `first`, `first + stride`, ... of a shard.

    Documents before `first` are decompressed, but neither split into lines nor decoded. This takes seconds for a shard of
    C4. `on_retry` is called before each new try.

    Raises:
        DataError: names the shard, the problem, and the number of tries.
    """
    if shard.endswith(".parquet"):
        return parquet_rows(shard, text_column, first, stride)

    def parse(chunks: Iterator[bytes], first: int) -> Iterator[bytes | str]:
        if shard.endswith(TXT):
            return whole_text(shard, chunks, first)
        suffix = os.path.splitext(shard)[1]
        return lines(shard, unpacked(chunks, suffix) if suffix in (".gz", ".zst") else chunks, first, stride)

    return read_again(shard, first, stride, parse, on_retry)


def read_again(
    shard: str,
    first: int,
    stride: int,
    parse: Callable[[Iterator[bytes], int], Iterator[T]],
    on_retry: Callable[[], None],
) -> Iterator[tuple[int, T]]:
    """Yield items `first`, `first + stride`, ... of a shard, as (index, item). Read the shard again if it arrived damaged.

    `parse(chunks, first)` yields the items from `first` on. For damage it raises EOFError, or an error of tarfile.

    Raises:
        DataError: names the shard, the problem, and the number of tries.
    """
    failures = 0
    while True:
        chunks = fetch(shard, on_retry) if is_remote(shard) else read_file(shard)
        try:
            for item in parse(chunks, first):
                yield first, item
                first, failures = first + stride, 0
            return
        except (EOFError, tarfile.TarError) as error:  # damaged on the server, or in transfer
            failures += 1
            if not is_remote(shard):
                raise DataError(f"{shard} {error}") from None
            wait_or_give_up(f"{shard} {error}", failures, on_retry)


def all_texts(shards: Sequence[str], text_column: str) -> Iterator[str]:
    """Yield the texts of all documents, shard after shard."""
    for shard in shards:
        for index, document in read_documents(shard, text_column, 0, 1, on_retry=lambda: None):
            if (text := text_of(shard, index, document, text_column)) is not None:
                yield text


def parquet_rows(shard: str, text_column: str, first: int, stride: int) -> Iterator[tuple[int, str]]:
    """Read documents of a Parquet file; row groups before `first` are not read at all."""
    with reading(shard):
        file = open_parquet(shard)
    names = file.schema_arrow.names
    if text_column not in names:
        raise DataError(f"{shard} has the columns {names}, but no {text_column!r}{suggestion(text_column, names)}")
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        if first < end:
            with reading(f"{shard}, rows {start + 1} to {end}"):
                column = file.read_row_group(group, columns=[text_column]).column(0)
                column.validate(full=True)  # also checks that text is UTF-8
                if len(column) != end - start:
                    raise ValueError(f"there are {len(column)}")
            for index in range(first, end, stride):
                text = column[index - start].as_py()
                if not isinstance(text, str):
                    raise DataError(f"{shard}, row {index + 1}: {text_column!r} is no text, but {type(text).__name__}")
                yield index, text
                first = index + stride
        start = end


def read_file(path: str) -> Iterator[bytes]:
    with reading(path), open(path, "rb") as file:
        yield from iter(partial(file.read, CHUNK), b"")


def fetch(url: str, on_retry: Callable[[], None]) -> Iterator[bytes]:
    """Yield the bytes of a file on the network; after a failure, continue at the same byte.

    Raises:
        DataError: at once for an answer that will not change (such as 404); otherwise after TRIES failures in a row.
    """
    position = failures = 0
    while True:
        try:
            with open_at(url, position) as response:
                # A server that ignores the range sends the file from its start.
                skip = 0 if response.status == 206 else position
                while chunk := response.read(CHUNK):
                    new, skip = chunk[skip:], max(0, skip - len(chunk))
                    if new:
                        position, failures = position + len(new), 0
                        handed_over = time.monotonic()
                        yield new
                        if time.monotonic() - handed_over > IDLE_SECONDS:
                            break
                else:
                    if response.length:  # http.client accepts a short body as whole
                        raise http.client.IncompleteRead(b"", response.length)
                    return
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing after `position`: the whole file was read
                return
            reason = f"HTTP {error.code} {error.reason}"
            if error.code not in (408, 425, 429) and error.code < 500:
                raise DataError(f"{url} cannot be read: {reason}") from None
            failures += 1
            wait_or_give_up(f"{url} cannot be read: {reason}", failures, on_retry, error.headers["Retry-After"])
        # These are timeouts, refused and broken connections, unknown hosts, and bodies that end early.
        except (OSError, http.client.HTTPException) as error:
            failures += 1
            reason = f"{type(error).__name__}: {first_line(error)}"
            wait_or_give_up(f"{url} cannot be read from byte {position}: {reason}", failures, on_retry)


def open_at(url: str, position: int) -> http.client.HTTPResponse:
    request = urllib.request.Request(url)
    if url.startswith(f"{constants.ENDPOINT}/"):
        for name, value in build_hf_headers().items():
            # The Hub redirects to a server that must not see the token, and that refuses a request with a token.
            request.add_unredirected_header(name, value)
    if position:
        request.add_header("Range", f"bytes={position}-")
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def wait_or_give_up(problem: str, failures: int, on_retry: Callable[[], None], retry_after: str | None = None) -> None:
    """Sleep longer after each failure in a row; raise DataError after the last."""
    if failures >= TRIES:
        raise DataError(f"{problem} (tried {failures} times)") from None
    seconds = WAIT * 2 ** (failures - 1)
    if retry_after and retry_after.isdecimal():
        seconds = max(seconds, int(retry_after))
    # Hundreds of processes meet the same failure at the same time, and should not retry at the same time. This generator is
    # separate, because the state of the global generator is part of the checkpoint.
    seconds = min(seconds, LONGEST_WAIT) * random.Random().uniform(0.75, 1)
    on_retry()
    time.sleep(seconds)


class Chunks:
    """File-like object over chunks of bytes; it is read once, from start to end."""

    closed = False

    def __init__(self, chunks: Iterable[bytes]):
        self.chunks, self.rest = iter(chunks), memoryview(b"")

    def read(self, size: int) -> memoryview:
        self.rest = self.rest or memoryview(next(self.chunks, b""))
        part, self.rest = self.rest[:size], self.rest[size:]
        return part

    def close(self) -> None:
        """Do nothing; readers of an Arrow file call this."""


def unpacked(chunks: Iterator[bytes], suffix: str) -> Iterator[bytes]:
    """Decompress a file of gzip or Zstandard with one or several members.

    Raises:
        EOFError: for damaged data, and if the data end too early.
    """
    import pyarrow as pa

    if not (begin := next(chunks, b"")):
        raise EOFError("cannot be read: it is empty")
    file: Any = Chunks(itertools.chain([begin], chunks))
    try:
        # pyarrow's reader of gzip would refuse a file that is padded with zeros.
        is_gzip = suffix == ".gz"
        opened = gzip.GzipFile(fileobj=file) if is_gzip else pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
        while data := opened.read(CHUNK):
            yield data
    except (OSError, EOFError, zlib.error) as error:
        raise EOFError(f"cannot be read: {first_line(error)}") from None


def lines(shard: str, chunks: Iterable[bytes], first: int, stride: int) -> Iterator[bytes]:
    """Yield lines `first`, `first + stride`, ...; lines before `first` are counted, but not split.

    Raises:
        DataError: for a line that is longer than MAX_LINE.
    """
    rest, number = b"", 1  # start of a line whose end was not read yet, and its number
    for chunk in chunks:
        number += chunk.count(b"\n")
        if len(rest) > MAX_LINE and b"\n" not in chunk:
            raise DataError(f"{shard}, line {number} {TOO_LONG}")
        if first and first >= (ended := chunk.count(b"\n")):
            first -= ended
            rest = chunk[chunk.rfind(b"\n") + 1 :] if first == 0 else b""
            continue
        *whole, rest = (rest + chunk).split(b"\n")
        own = whole[first::stride]
        yield from own
        first += len(own) * stride - len(whole)
    if rest and first == 0:
        yield rest


def whole_text(file: str, chunks: Iterable[bytes], first: int) -> Iterator[str]:
    """Yield the text of a file as its only document, number 0; an empty file has no document.

    Raises:
        DataError: if the file is not UTF-8.
    """
    content = b"".join(chunks) if first == 0 else b""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    if text.strip():
        yield text


def text_of(shard: str, index: int, document: bytes | str, text_column: str) -> str | None:
    """Extract the text from a line that `read_documents` yields; None for a blank line, which is no document.

    Raises:
        DataError: names shard and line, if the line is not JSON or has no text.
    """
    if isinstance(document, str):
        return document
    if not document.strip():
        return None
    record = record_of(shard, index, document)
    if text_column not in record:
        meant = suggestion(text_column, record) or other_recipe(record)
        raise DataError(f"{shard}, line {index + 1} has no {text_column!r}, but the keys {list(record)}{meant}")
    text = record[text_column]
    if not isinstance(text, str):
        raise DataError(f"{shard}, line {index + 1}: {text_column!r} is no text, but {type(text).__name__}")
    check_characters(text, f"{shard}, line {index + 1}: {text_column!r}")
    return text
