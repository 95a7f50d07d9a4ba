"""Shards: functions that find them, and read their documents one by one, from a disk or over the network.

A shard of text is a path or an http(s) URL that ends in .json.gz, .jsonl.gz, .json, .jsonl (one JSON object a line), .txt
(one document) or .parquet (local only). It is read as a stream and decompressed on the fly; nothing is kept. Shards of
images are in `tars`.
"""

import contextlib
import glob
import http.client
import json
import os
import random
import re
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import EntryNotFoundError, HfHubHTTPError, build_hf_headers

from accelerate_recipes.errors import ConfigError, DataError, first_line
from accelerate_recipes.hub import cache

TXT = ".txt"
SUFFIXES = (".json.gz", ".jsonl.gz", ".json", ".jsonl", TXT, ".parquet")
CHUNK = 2**18  # bytes read at once; compressed text becomes up to ten times as large
# A stream does not use its connection while its documents are tokenised and trained on, minutes or hours for a shard.
# Servers drop such a connection. After this number of seconds we open a new one, and do not count it as a failure.
IDLE_SECONDS = 10.0
HUB = "hf://"

T = TypeVar("T")


@contextlib.contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn any error of `datasets`, pyarrow and other readers into one message.

    Raises:
        DataError: naming the source, and what is wrong with it.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise DataError(f"{source} cannot be read: {reason}") from error


class Retry(NamedTuple):
    """Settings for retries on a failing network. The defaults give up after about five minutes without a byte."""

    tries: int = 10
    wait: float = 1.0  # seconds before the second try; doubles with each, up to `longest_wait`
    longest_wait: float = 60.0
    timeout: float = 30.0  # seconds without a byte after which a connection counts as dead


def find_shards(dataset_name: str, pattern: str, split: str, revision: str = "") -> list[str]:
    """Find the files of a split that match `pattern` (such as `en/c4-train.*.json.gz`), in the order of their names.

    `dataset_name` is a folder or a dataset on the Hub. For a dataset the shards are URLs (below HF_ENDPOINT if it is set)
    at `revision`, else at the downloaded commit, else at the newest commit; with HF_HUB_OFFLINE they are the downloaded
    files.

    Raises:
        ConfigError: when nothing matches, or the Hub cannot be reached.
    """
    if Path(dataset_name).is_dir():
        found = sorted(str(path) for path in Path(dataset_name).glob(pattern))
        where = f"the folder {dataset_name}"
    elif constants.HF_HUB_OFFLINE:
        found = cache.dataset_files(dataset_name, pattern)
        where = f"what was downloaded of {dataset_name}"
    else:
        found = on_hub(dataset_name, pattern, revision)
        where = f"the dataset {dataset_name} on {constants.ENDPOINT}"
    if not found:
        raise ConfigError(f"there is no {split} split: no file of {where} matches {pattern!r}")
    check_suffixes(found)
    return found


def named_shards(files: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[str]:
    """Find the shards that a user names one by one, in that order: paths, http(s) URLs, `hf://datasets/ORG/NAME/PATH`.

    A PATH with `*` stands for all files that match, and a folder for all that lie in it and its folders, in the order of
    their names.

    Raises:
        ConfigError: for a file that is missing, or of a kind that cannot be read.
    """
    found = []
    for file in files:
        if file.startswith(HUB):
            name, revision, path = parts_of_hub_path(file)
            if constants.HF_HUB_OFFLINE and revision:
                raise ConfigError(f"{file}: HF_HUB_OFFLINE is set, and only files without @REVISION can be downloaded")
            if constants.HF_HUB_OFFLINE:
                found += downloaded(file)
            elif "*" not in path:
                found.append(hub_url(name, path, revision or pinned_commit(name)))
            elif listed := on_hub(name, path, revision):
                found += listed
            else:
                raise ConfigError(f"{file}: no file of the dataset {name} on {constants.ENDPOINT} matches {path!r}")
        elif not is_remote(file) and Path(file).is_dir():
            found += files_of_folder(file, suffixes)
        elif not is_remote(file) and not Path(file).is_file():
            raise ConfigError(f"{file}: no such file")
        else:
            found.append(file)
    check_suffixes(found, suffixes)
    return found


def files_of_folder(folder: str, suffixes: Sequence[str]) -> list[str]:
    """List the files of a folder that can be read.

    Raises:
        ConfigError: if there is none, or there are several kinds: a README.txt beside .jsonl files is no data.
    """
    # Unlike Path.rglob, glob follows links to folders, and leaves out what is hidden, such as copies of an editor.
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


def parts_of_hub_path(file: str) -> tuple[str, str, str]:
    """Split `hf://datasets/ORG/NAME[@REVISION]/PATH` into dataset, revision (or "") and path.

    Raises:
        ConfigError: for something else.
    """
    kind, *repository = file.removeprefix(HUB).split("/", 3)
    if kind != "datasets" or len(repository) != 3:
        raise ConfigError(f"{file}: write it as hf://datasets/ORG/NAME/PATH")
    name, _, revision = "/".join(repository[:2]).partition("@")
    return name, revision, repository[2]


def hub_file(file: str, *, streamed: bool) -> cache.HubDataset:
    """Return what a run reads from the Hub for a file that a user names."""
    name, revision, path = parts_of_hub_path(file)
    return cache.HubDataset(
        name, files=path if "*" in path else glob.escape(path), revision=revision, streamed=streamed
    )


def needs_of_shards(files: Sequence[str]) -> list[cache.HubDataset]:
    """List what `named_shards` reads from the Hub."""
    found = [hub_file(file, streamed=True) for file in files if file.startswith(HUB)]
    return [need for need in found if not need.revision]


def downloaded(file: str) -> list[str]:
    """Return the paths of a file on the Hub, or of those that match, which were downloaded."""
    need = hub_file(file, streamed=False)
    return cache.dataset_files(need.name, need.files)


def pinned_commit(dataset_name: str) -> str:
    """Return the commit at which a dataset was downloaded; else `main`."""
    manifest = cache.read_manifest("dataset", dataset_name)
    return manifest["revision"] if manifest else "main"


def check_suffixes(shards: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raise ConfigError for a shard whose kind cannot be read, or that is named twice."""
    for shard in shards:
        if not shard.endswith(tuple(suffixes)):
            raise ConfigError(f"{shard}: its name must end with one of {', '.join(suffixes)}")
        if is_remote(shard) and shard.endswith(".parquet"):
            raise ConfigError(f"{shard}: Parquet is read from a disk only; download it first, see docs/offline.md")
    if twice := {shard for shard in shards if shards.count(shard) > 1}:
        raise ConfigError(f"named twice, it would be trained on twice: {', '.join(sorted(twice))}")


def on_hub(dataset_name: str, pattern: str, revision: str = "") -> list[str]:
    """Return URLs at one commit, so that a dataset that changes during a run does not change the run."""
    folder, recursive = cache.place_of(pattern)
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        commit = api.dataset_info(dataset_name, revision=revision or pinned_commit(dataset_name)).sha
        entries = api.list_repo_tree(
            dataset_name, folder or None, recursive=recursive, revision=commit, repo_type="dataset"
        )
        found = [entry.path for entry in entries if isinstance(entry, RepoFile)]
        names = sorted(path for path in found if cache.matches(path, pattern))
    except EntryNotFoundError:
        return []
    except HfHubHTTPError as error:
        raise ConfigError(
            f"dataset {dataset_name!r} cannot be read from {constants.ENDPOINT}: {first_line(error)}. "
            "If it is gated or private, run: hf auth login"
        ) from None
    # Connection errors of the Hub's client are not OSErrors.
    except Exception as error:
        raise ConfigError(
            f"the Hub cannot be reached at {constants.ENDPOINT}: {first_line(error)}. Download the dataset where there is "
            "internet and set HF_HUB_OFFLINE=1 (docs/offline.md), or give a folder with the files instead of the name"
        ) from None
    return [hub_url(dataset_name, name, commit) for name in names]


def shards_version(shards: Sequence[str]) -> dict[str, str]:
    """Return what changes when shards change: a checksum of file `sizes`, the Hub's `commit`; nothing for other URLs."""
    found = {}
    if sizes := [os.path.getsize(shard) for shard in shards if not is_remote(shard)]:
        found["sizes"] = xxhash.xxh3_128_hexdigest(json.dumps(sizes).encode())
    prefix = re.compile(re.escape(f"{constants.ENDPOINT}/datasets/") + "[^/]+/[^/]+/resolve/([^/]+)/")
    if commits := {match[1] for shard in shards if (match := prefix.match(shard))}:
        found["commit"] = ", ".join(sorted(commits))
    return found


def hub_url(dataset_name: str, name: str, revision: str) -> str:
    revision = urllib.parse.quote(revision, safe="")
    return f"{constants.ENDPOINT}/datasets/{dataset_name}/resolve/{revision}/{urllib.parse.quote(name)}"


def is_remote(shard: str) -> bool:
    return shard.startswith(("http://", "https://"))


def is_named_elsewhere(file: str) -> bool:
    """Tell whether a user names a file by a URL or on the Hub, not on this disk."""
    return is_remote(file) or file.startswith(HUB)


def read_documents(
    shard: str, text_column: str, first: int, stride: int, retry: Retry, on_retry: Callable[[], None]
) -> Iterator[tuple[int, bytes | str]]:
    """Read documents `first`, `first + stride`, ... of a shard, as (index, line of JSON, or text).

    Documents before `first` are decompressed, but neither split into lines nor decoded: seconds for a shard of C4.
    `on_retry` is called before each new try.

    Raises:
        DataError: naming the shard, what is wrong with it, and how often it was tried.
    """
    if shard.endswith(".parquet"):
        return parquet_rows(shard, text_column, first, stride)

    def parse(chunks: Iterator[bytes], first: int) -> Iterator[bytes | str]:
        if shard.endswith(TXT):
            return whole_text(shard, chunks, first)
        return lines(gunzip(chunks) if shard.endswith(".gz") else chunks, first, stride)

    return read_again(shard, first, stride, parse, retry, on_retry)


def read_again(
    shard: str,
    first: int,
    stride: int,
    parse: Callable[[Iterator[bytes], int], Iterator[T]],
    retry: Retry,
    on_retry: Callable[[], None],
) -> Iterator[tuple[int, T]]:
    """Yield items `first`, `first + stride`, ... of a shard, as (index, item), reading it again if it came damaged.

    `parse(chunks, first)` yields the items from `first` on, and raises an error of zlib or tarfile, or EOFError, for damage.

    Raises:
        DataError: naming the shard, what is wrong with it, and how often it was tried.
    """
    failures = 0
    while True:
        chunks = fetch(shard, retry, on_retry) if is_remote(shard) else read_file(shard)
        try:
            for item in parse(chunks, first):
                yield first, item
                first, failures = first + stride, 0
            return
        except (zlib.error, EOFError, tarfile.TarError) as error:  # damaged on the server, or in transfer
            failures += 1
            if not is_remote(shard):
                raise DataError(f"{shard} {error}") from None
            wait_or_give_up(f"{shard} {error}", failures, retry, on_retry)


def all_texts(shards: Sequence[str], text_column: str) -> Iterator[str]:
    """Yield the texts of all documents, shard after shard."""
    for shard in shards:
        for index, document in read_documents(shard, text_column, 0, 1, Retry(), on_retry=lambda: None):
            if (text := text_of(shard, index, document, text_column)) is not None:
                yield text


def parquet_rows(shard: str, text_column: str, first: int, stride: int) -> Iterator[tuple[int, str]]:
    """Read documents of a Parquet file; row groups before `first` are not read at all."""
    try:
        file = open_parquet(shard)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{shard} is not Parquet: {first_line(error)}") from None
    if text_column not in file.schema_arrow.names:
        raise DataError(f"{shard} has the columns {file.schema_arrow.names}, but no {text_column!r}")
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        if first < end:
            try:
                column = file.read_row_group(group, columns=[text_column]).column(0)
                column.validate(full=True)  # also checks that text is UTF-8
                if len(column) != end - start:
                    raise OSError(f"there are {len(column)}")
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{shard} is damaged in rows {start} to {end - 1}: {first_line(error)}") from None
            for index in range(first, end, stride):
                text = column[index - start].as_py()
                if not isinstance(text, str):
                    raise DataError(f"{shard}, row {index}: {text_column!r} is no text, but {type(text).__name__}")
                yield index, text
                first = index + stride
        start = end


def open_parquet(file: str) -> pq.ParquetFile:
    """Open a Parquet file, whose pages are checked if it has checksums of them."""
    return pq.ParquetFile(os.path.abspath(file), page_checksum_verification=True)  # a relative `a:b` would be a URI


def read_file(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def fetch(url: str, retry: Retry, on_retry: Callable[[], None]) -> Iterator[bytes]:
    """Yield the bytes of a file on the network; after a failure, continue at the same byte.

    Raises:
        DataError: at once for an answer that will not change (such as 404), else after `retry.tries` failures in a row.
    """
    position = failures = 0
    while True:
        try:
            with open_at(url, position, retry.timeout) as response:
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
            wait_or_give_up(f"{url} cannot be read: {reason}", failures, retry, on_retry, error.headers["Retry-After"])
        # These are timeouts, refused and broken connections, unknown hosts, and bodies that end early.
        except (OSError, http.client.HTTPException) as error:
            failures += 1
            reason = f"{type(error).__name__}: {first_line(error)}"
            wait_or_give_up(f"{url} cannot be read from byte {position}: {reason}", failures, retry, on_retry)


def open_at(url: str, position: int, timeout: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(url)
    if url.startswith(f"{constants.ENDPOINT}/"):
        for name, value in build_hf_headers().items():
            # The Hub redirects to a server that must not see the token, and that refuses a request with it.
            request.add_unredirected_header(name, value)
    if position:
        request.add_header("Range", f"bytes={position}-")
    return urllib.request.urlopen(request, timeout=timeout)


def wait_or_give_up(
    problem: str, failures: int, retry: Retry, on_retry: Callable[[], None], retry_after: str | None = None
) -> None:
    """Sleep longer after each failure in a row; raise DataError after the last."""
    if failures >= retry.tries:
        raise DataError(f"{problem} (tried {failures} times)") from None
    seconds = retry.wait * 2 ** (failures - 1)
    if retry_after and retry_after.isdecimal():
        seconds = max(seconds, int(retry_after))
    # Hundreds of processes meet the same failure at the same time, and should not retry at the same time. This generator is
    # separate, because the global one is part of the checkpoint.
    seconds = min(seconds, retry.longest_wait) * random.Random().uniform(0.75, 1)
    on_retry()
    time.sleep(seconds)


def gunzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress a gzip file with one or several members.

    Raises:
        zlib.error: for damaged data. EOFError: if the data end too early.
    """
    inflate, ended, total = zlib.decompressobj(wbits=31), False, 0
    for chunk in chunks:
        total += len(chunk)
        while chunk and not (ended and not chunk.strip(b"\0")):  # a file may be padded with zeros
            if ended:
                inflate = zlib.decompressobj(wbits=31)
            try:
                data = inflate.decompress(chunk)
            except zlib.error as error:
                kind = "is not gzip" if total == len(chunk) else f"is damaged before byte {total}"
                raise zlib.error(f"{kind}: {first_line(error)}") from None
            ended, chunk = inflate.eof, inflate.unused_data
            if data:
                yield data
    if not ended:
        raise EOFError(f"is cut off: its gzip data do not end after {total} bytes")


def lines(chunks: Iterable[bytes], first: int, stride: int) -> Iterator[bytes]:
    """Yield lines `first`, `first + stride`, ...; lines before `first` are counted, but not split."""
    rest = b""  # start of a line whose end was not read yet
    for chunk in chunks:
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
    """Yield the text of a file, its only document, number 0, unless it is empty.

    Raises:
        DataError: if it is not UTF-8.
    """
    content = b"".join(chunks) if first == 0 else b""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}") from None
    if text.strip():
        yield text


def text_of(shard: str, index: int, document: bytes | str, text_column: str) -> str | None:
    """Extract the text from a line that `read_documents` yields; None from a blank one, which holds no document.

    Raises:
        DataError: naming shard and line, if it is not JSON or has no text.
    """
    if isinstance(document, str):
        return document
    if not document.strip():
        return None
    record = record_of(shard, index, document)
    if text_column not in record:
        raise DataError(f"{shard}, line {index + 1} has no {text_column!r}, but the keys {list(record)}")
    text = record[text_column]
    if not isinstance(text, str):
        raise DataError(f"{shard}, line {index + 1}: {text_column!r} is no text, but {type(text).__name__}")
    check_characters(text, f"{shard}, line {index + 1}: {text_column!r}")
    return text


def check_characters(text: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair. JSON can contain one, but neither UTF-8 nor tokens can represent it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds \\u{ord(text[error.start]):x}, which is no character") from None


def record_of(file: str, index: int, line: bytes) -> dict:
    """Parse the JSON object in a line.

    Raises:
        DataError: naming file and line (from 1), if it is not a JSON object.
    """
    where = f"{file}, line {index + 1}"
    try:
        record = json.loads(line.decode("utf-8-sig"))  # json.loads(bytes) would accept invalid UTF-8
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {first_line(error)}") from None
    if record is None:
        raise DataError(f"{where} is no JSON object, but null; remove it")
    if not isinstance(record, dict):
        raise DataError(f"{where} is no JSON object, but a {type(record).__name__}")
    return record
