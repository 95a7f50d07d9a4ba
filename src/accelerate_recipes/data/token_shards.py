"""Text shards tokenised once, which streams then read instead of text: the same rows in the same order.

A folder holds, for text shard i,

    shard-<i>.tokens     the tokens of its documents, one after another, little-endian uint16, or uint32 for more than
                         65,536 different tokens; read through a memory map
    shard-<i>.ends       where each document ends in the tokens, uint64
    shard-<i>.json       size and checksum of the two files, and of the text, if that is a file; written last, so a shard
                         with this file is finished

and `manifest.json`, written when all shards are finished: what they were made from, and their entries.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.documents import Retry, is_remote
from accelerate_recipes.data.shards import is_named_elsewhere
from accelerate_recipes.data.text import TextArgs, TextShards
from accelerate_recipes.disk import checksum, fsync, naming, own_suffix, size_and_times, write_atomically
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.ranks import on_first_rank

MANIFEST = "manifest.json"


class TokenShards:
    """Source of streams that reads a finished folder.

    Raises:
        ConfigError: for a folder that is not finished, or lacks a file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_token_manifest(self.folder)
        self.shards = [entry["shard"] for entry in self.manifest["shards"]]
        for i, entry in enumerate(self.manifest["shards"]):
            for suffix, described in entry["files"].items():
                file = shard_file(self.folder, i, suffix)
                if not file.is_file() or file.stat().st_size != described["size"]:
                    raise ConfigError(
                        f"{file} is missing, or has not the {described['size']} bytes it was written with; remove "
                        f"{file.with_suffix('.json')} and {self.folder / MANIFEST}, and --pretokenize makes it again"
                    )

    def version(self) -> dict[str, str]:
        entries = [sorted(entry["files"].items()) for entry in self.manifest["shards"]]
        return {"tokens": xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())}

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[int]:
        self._check(shard)
        return iter(range(first, self.manifest["shards"][shard]["documents"], stride))

    def tokens(self, shard: int, documents: Sequence[int], first: int = 0, epoch: int = 0) -> Iterator[np.ndarray]:
        ends = opened(shard_file(self.folder, shard, "ends"), "<u8")
        tokens = opened(shard_file(self.folder, shard, "tokens"), self.manifest["dtype"])
        for document in documents[first:]:
            yield tokens[int(ends[document - 1]) if document else 0 : int(ends[document])]

    def lengths(self, shard: int) -> np.ndarray:
        """Count the tokens of each document of a shard."""
        return np.diff(np.array(opened(shard_file(self.folder, shard, "ends"), "<u8"), dtype=np.int64), prepend=0)

    def _check(self, shard: int) -> None:
        for suffix, described in self.manifest["shards"][shard]["files"].items():
            file = shard_file(self.folder, shard, suffix)
            if (found := checksum_once(file)) != described["checksum"]:
                raise DataError(
                    f"{file} is damaged: its checksum is {found} instead of {described['checksum']}; remove "
                    f"{file.with_suffix('.json')} and {self.folder / MANIFEST}, and --pretokenize makes it again"
                )


@cache
def checksum_once(file: Path) -> str:
    """Compute a file's checksum once in a process, when the file is first read; this reads the whole file."""
    return checksum(file)


@lru_cache(maxsize=64)
def opened(file: Path, dtype: str) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


def shard_file(folder: Path, shard: int, suffix: str) -> Path:
    return folder / f"shard-{shard:05d}.{suffix}"


def is_pretokenized(folder: str) -> bool:
    """Tell whether `pretokenize` has finished in a folder; "" means no folder."""
    return bool(folder) and (Path(folder) / MANIFEST).is_file()


def read_token_manifest(folder: Path) -> dict:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {MANIFEST}: --pretokenize has not finished there") from None


def open_text(
    args: TextArgs, tokenizer: PreTrainedTokenizerBase, rank: int, world_size: int
) -> TextShards | TokenShards:
    """Open the text to train on; with --pretokenize as tokens, which are made now if they are missing."""
    if not args.pretokenize:
        shards = on_first_rank(args.train_shards)
        return TextShards(shards, tokenizer, args.text_column, heldout_share=args.share_heldout)
    settings = {"dataset": [args.dataset_name, args.dataset_files], "files": args.train_files}
    settings |= {"revision": args.dataset_revision} if args.dataset_revision else {}
    elsewhere = (
        any(map(is_named_elsewhere, args.train_files)) if args.train_files else not os.path.isdir(args.dataset_name)
    )
    return pretokenize(
        args.pretokenize,
        tokenizer,
        args.train_shards,
        settings,
        is_here=not elsewhere,
        text_column=args.text_column,
        heldout_share=args.share_heldout,
        rank=rank,
        world_size=world_size,
    )


def pretokenize(
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    find: Callable[[], Sequence[str]],
    settings: dict,
    *,
    is_here: bool = False,
    text_column: str = "text",
    heldout_share: float = 0.0,
    retry: Retry | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> TokenShards:
    """Tokenise the shards that `find()` lists into `folder`, unless that is done.

    If it is done, neither the Hub nor the text is needed. Text that `is_here`, as files, is compared by content with what
    was tokenised, wherever it lies now; of other text only the `settings`, which say what `find` lists, in JSON's types. The
    ranks divide the shards, and wait for each other without a collective that could time out; `folder` must lie on a
    filesystem that all share. A finished shard is not done again, neither after a kill nor with more ranks.

    Raises:
        ConfigError: if the folder was made from other text or with another tokenizer.
        DataError: for a shard that cannot be read.
    """
    folder = Path(folder)
    asked, here = {"settings": settings}, []
    if is_here:
        with contextlib.suppress(ConfigError):  # the text of a finished folder may be gone
            here = find()
    key = {
        "text_column": text_column,
        "tokenizer": xxhash.xxh64_hexdigest(tokenizer.backend_tokenizer.to_str().encode()),
        "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "heldout_share": heldout_share,
    }
    if not (folder / MANIFEST).exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = TextShards(here or find(), tokenizer, text_column, retry or Retry(), heldout_share)
        dtype = "<u2" if len(tokenizer) <= 2**16 else "<u4"
        made_from = asked | key | {"shards": [Path(shard).name for shard in source.shards]}
        check_key(folder, made_from, "key.json", write=rank == 0)
        check_text(folder, source.shards)
        tokenize_missing(folder, source, dtype, rank, world_size)
        if rank == 0:
            write_token_manifest(folder, asked | key | {"dtype": dtype}, len(source.shards))
        else:
            while not (folder / MANIFEST).exists():
                time.sleep(0.2)
    entries = read_token_manifest(folder)["shards"]
    is_known = bool(here) and all(entry.get("text") for entry in entries)
    check_key(folder, key if is_known else asked | key, MANIFEST)
    if is_known:
        if len(here) != len(entries):
            raise ConfigError(
                f"{folder} was tokenised from {len(entries)} files, now there are {len(here)}; give --pretokenize another "
                "folder"
            )
        check_text(folder, here)
    return TokenShards(folder)


def text_of_shard(shard: str) -> dict | None:
    """Describe the file of a text shard: where it is unchanged since, its content need not be read. None for a URL."""
    return None if is_remote(shard) else {"seen": size_and_times(shard), "checksum": checksum(Path(shard))}


def check_text(folder: Path, shards: Sequence[str]) -> None:
    """Raise ConfigError for a text shard that was tokenised, and has another content now."""
    for i, shard in enumerate(shards):
        entry = shard_file(folder, i, "json")
        then = json.loads(entry.read_text(encoding="utf-8")).get("text") if entry.exists() else None
        if not then or is_remote(shard) or size_and_times(shard) == then["seen"]:
            continue
        if checksum(Path(shard)) != then["checksum"]:
            raise ConfigError(
                f"{shard} is not what {folder} was tokenised from: its content is another one; give --pretokenize another "
                "folder, or put the file back"
            )


def check_key(folder: Path, key: dict, file: str, write: bool = False) -> None:
    """Raise ConfigError unless the file agrees with everything in `key`; if there is no file, `write` it."""
    path = folder / file
    if write and not path.exists():
        write_atomically(path, json.dumps(key, indent=1))
    while not path.exists():
        time.sleep(0.2)
    written = json.loads(path.read_text(encoding="utf-8"))
    differing = [
        f"{name} was {written.get(name)}, is {value}" for name, value in key.items() if written.get(name) != value
    ]
    if differing:
        raise ConfigError(
            f"{folder} was tokenised from something else: {'; '.join(differing)}. Give --pretokenize another folder"
        )


def tokenize_missing(folder: Path, source: TextShards, dtype: str, rank: int, world_size: int) -> None:
    """Tokenise this rank's unfinished shards, with a progress bar on a terminal, or a line for each in a batch job."""
    mine = range(rank, len(source.shards), world_size)
    missing = [shard for shard in mine if not shard_file(folder, shard, "json").exists()]
    on_terminal = sys.stderr.isatty()
    progress = tqdm(
        total=len(mine), initial=len(mine) - len(missing), unit="shard", desc="Tokenising", dynamic_ncols=True,
        disable=not (on_terminal and rank == 0),
    )  # fmt: skip
    for shard in missing:
        start = time.perf_counter()
        entry = tokenize_shard(folder, source, shard, dtype, progress)
        progress.update()
        if not on_terminal:
            speed = entry["tokens"] / (time.perf_counter() - start)
            print(
                f"Tokenised {source.shards[shard]}: {entry['documents']:,} documents, {speed:,.0f} tokens/s", flush=True
            )
    progress.close()


def tokenize_shard(folder: Path, source: TextShards, shard: int, dtype: str, progress: tqdm) -> dict:
    """Write the files of one shard, which get their names only when they are whole; returns the content of its .json."""
    partial = {suffix: shard_file(folder, shard, suffix + own_suffix()) for suffix in ("tokens", "ends")}
    retries = 0

    def on_retry() -> None:
        nonlocal retries
        retries += 1
        progress.set_postfix(retries=retries)

    num_tokens, ends, text = 0, [], text_of_shard(source.shards[shard])
    try:
        with naming(folder), partial["tokens"].open("wb") as file:
            for tokens in source.tokens(shard, source.read(shard, 0, 1, on_retry)):
                file.write(tokens.astype(dtype).tobytes())
                num_tokens += len(tokens)
                ends.append(num_tokens)
                if len(ends) % 1000 == 0:
                    progress.set_postfix(documents=f"{len(ends):,}", tokens=f"{num_tokens:,}", retries=retries)
        with naming(folder):
            partial["ends"].write_bytes(np.array(ends, dtype="<u8").tobytes())
        files = {}
        for suffix, path in partial.items():
            fsync(path)
            files[suffix] = {"size": path.stat().st_size, "checksum": checksum(path)}
            path.rename(shard_file(folder, shard, suffix))
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    name = Path(source.shards[shard]).name
    entry = {"shard": name, "documents": len(ends), "tokens": num_tokens, "files": files, "text": text}
    write_atomically(shard_file(folder, shard, "json"), json.dumps(entry, indent=1), own_suffix())
    return entry


def write_token_manifest(folder: Path, key: dict, num_shards: int) -> None:
    """Wait until all shards are finished, by whichever rank; then write the manifest."""
    entries = [shard_file(folder, shard, "json") for shard in range(num_shards)]
    while not all(entry.exists() for entry in entries):
        time.sleep(0.2)
    shards = [json.loads(entry.read_text(encoding="utf-8")) for entry in entries]
    write_atomically(folder / MANIFEST, json.dumps(key | {"shards": shards}, indent=1), own_suffix())
    for leftover in folder.glob("*.partial-*"):  # left by killed attempts
        leftover.unlink()
