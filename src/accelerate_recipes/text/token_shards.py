"""Text shards tokenised once, which streams then read instead of text: the same rows in the same order.

A folder holds `manifest.json`, what the tokens are made from, and for text shard i,

    shard-<i>.tokens     the tokens of its documents, one after another, little-endian uint16, or uint32 if the largest
                         token has a number above 65,535; behind them, where each document ends in them, uint64. It is read
                         through a memory map
    shard-<i>.json       size and checksum of that file, and of the text, if that is a file; written last, so a shard
                         with this file is finished
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.prepared import backend_checksum
from accelerate_recipes.data.shards import is_remote
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.disk import checksum, fsync, naming, own_suffix, read_json, size_and_times, write_atomically
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.text.pretraining import TextArgs, TextShards, prefix_of

MANIFEST = "manifest.json"
checksum_once = cache(checksum)  # in a process, when a file is first used: this reads the whole file


class TokenShards:
    """Source of streams that reads a finished folder.

    Raises:
        ConfigError: for a folder that is not finished, or from which a file is missing.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not is_pretokenized(self.folder):
            raise ConfigError(f"{folder} is not whole: --pretokenize has not finished there")
        self.manifest = read_json(self.folder / MANIFEST)
        self.shards = self.manifest["shards"]
        self.entries = [read_json(shard_file(self.folder, i, "json")) for i in range(len(self.shards))]
        for i, entry in enumerate(self.entries):
            file = shard_file(self.folder, i, "tokens")
            if not file.is_file() or file.stat().st_size != entry["size"]:
                raise ConfigError(
                    f"{file} is missing, or does not have the {entry['size']} bytes that were written; remove "
                    f"{file.with_suffix('.json')}, and --pretokenize makes it again"
                )

    def version(self) -> dict[str, str]:
        entries = [[entry["size"], entry["checksum"]] for entry in self.entries]
        return {"tokens": xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())}

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[int]:
        file, wanted = shard_file(self.folder, shard, "tokens"), self.entries[shard]["checksum"]
        if (actual := checksum_once(file)) != wanted:
            raise DataError(
                f"{file} is damaged: its checksum is {actual} instead of {wanted}; remove {file.with_suffix('.json')}, and "
                "--pretokenize makes it again"
            )
        return iter(range(first, self.entries[shard]["documents"], stride))

    def tokens(self, shard: int, documents: Sequence[int], first: int = 0, epoch: int = 0) -> Iterator[np.ndarray]:
        tokens, ends = self._opened(shard)
        for document in documents[first:]:
            yield tokens[int(ends[document - 1]) if document else 0 : int(ends[document])]

    def lengths(self, shard: int) -> np.ndarray:
        """Count the tokens of each document of a shard."""
        return np.diff(self._opened(shard)[1].astype(np.int64), prepend=0)

    def _opened(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        file = shard_file(self.folder, shard, "tokens")
        return opened(file, self.manifest["dtype"], self.entries[shard]["tokens"])


@lru_cache(maxsize=64)
def opened(file: Path, dtype: str, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Map into memory the tokens of a shard, and the places where its documents end."""
    # An empty file cannot be mapped.
    content = np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.empty(0, np.uint8)
    size = num_tokens * np.dtype(dtype).itemsize
    return content[:size].view(dtype), content[size:].view("<u8")


def shard_file(folder: Path, shard: int, suffix: str) -> Path:
    return folder / f"shard-{shard:05d}.{suffix}"


def is_pretokenized(folder: str | Path) -> bool:
    """Tell whether `pretokenize` has finished in a folder; "" means no folder."""
    if not folder or not (manifest := Path(folder) / MANIFEST).is_file():
        return False
    return all(shard_file(Path(folder), i, "json").is_file() for i in range(len(read_json(manifest)["shards"])))


def open_text(
    args: TextArgs, tokenizer: PreTrainedTokenizerBase, rank: int, world_size: int
) -> TextShards | TokenShards:
    """Open the text to train on. With --pretokenize, open it as tokens, and make these now if they are missing."""
    if not args.pretokenize:
        shards = on_first_rank(args.train_shards)
        return TextShards(shards, tokenizer, args.text_column, heldout_share=args.share_left_out)
    return pretokenize(args, tokenizer, rank, world_size)


def make_text_loader(
    args: Any, tokenizer: PreTrainedTokenizerBase, rank: int, world_size: int, data_rank: int, data_world_size: int
) -> StreamLoader:
    """Make the loader of the rows to train on, of one source or of a mixture. The numbers are those of `Run`.

    Raises:
        ConfigError: for text that was tokenised otherwise, and for sources that end before the run.
        DataError: for shards that must be counted or tokenised first and cannot be read.
    """
    settings = {
        "max_length": args.max_length, "document_mask": args.document_mask, "num_streams": args.num_streams,
        "min_document_tokens": args.min_document_tokens, "heldout_share": args.sources[0].share_left_out,
    }  # fmt: skip
    texts = [open_text(one, tokenizer, rank, world_size) for one in args.sources]
    return StreamLoader(texts, args, data_rank, data_world_size, mixture=args.mix, **settings)


def pretokenize(args: TextArgs, tokenizer: PreTrainedTokenizerBase, rank: int, world_size: int) -> TokenShards:
    """Tokenise the shards to train on into the folder --pretokenize, unless this has been done.

    If it has, neither the Hub nor the text is needed. Text on a disk is compared by content with the text that was
    tokenised, wherever it lies now. For other text, only the arguments that name it are compared. The ranks divide the
    shards. They wait for each other without a collective, which could time out; the folder must lie on a filesystem that
    all ranks share. A finished shard is not done again, neither after a kill nor on more ranks.

    Raises:
        ConfigError: if the folder was made from other text or with another tokenizer.
        DataError: for a shard that cannot be read.
    """
    folder, here = Path(args.pretokenize), []
    dataset = {"dataset": [args.dataset_name, args.dataset_files], "revision": args.dataset_revision}
    asked = {"settings": dataset | {"files": args.train_files}}
    if args.is_here:
        with contextlib.suppress(ConfigError):  # the text of a finished folder may be gone
            here = args.train_shards()
    key = {
        "text_column": args.text_column,
        "tokenizer": backend_checksum(tokenizer),
        "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "heldout_share": args.share_left_out,
        "dtype": "<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4",
    }
    if (prefix := prefix_of(tokenizer)) not in ([], [tokenizer.bos_token_id]):
        key["prefix"] = prefix  # earlier versions left it out
    if not is_pretokenized(folder):
        shards = here or args.train_shards()
        source = TextShards(shards, tokenizer, args.text_column, heldout_share=args.share_left_out)
        made_from = asked | key | {"shards": [Path(shard).name for shard in source.shards]}
        if rank == 0 and not (folder / MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / MANIFEST, json.dumps(made_from, indent=1))
        wait_for(folder / MANIFEST)
        check_key(folder, made_from)
        check_text(folder, source.shards)
        tokenize_missing(folder, source, key["dtype"], rank, world_size)
        for shard in range(len(source.shards)):  # also those of the other ranks
            wait_for(shard_file(folder, shard, "json"))
        for leftover in folder.glob("*.partial-*") if rank == 0 else ():  # files of killed attempts
            leftover.unlink()
    tokenized = TokenShards(folder)
    is_known = bool(here) and all(entry["text"] for entry in tokenized.entries)
    check_key(folder, key if is_known else asked | key)
    if is_known:
        if len(here) != len(tokenized.shards):
            raise ConfigError(
                f"{folder} was tokenised from {len(tokenized.shards)} files, now there are {len(here)}; give --pretokenize "
                "another folder"
            )
        check_text(folder, here)
    return tokenized


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.2)


def check_text(folder: Path, shards: Sequence[str]) -> None:
    """Raise ConfigError for a text shard that was tokenised and whose content has changed since."""
    for i, shard in enumerate(shards):
        entry = shard_file(folder, i, "json")
        then = read_json(entry)["text"] if entry.exists() else None
        if not then or is_remote(shard) or size_and_times(shard) == then["seen"]:
            continue
        if checksum(Path(shard)) != then["checksum"]:
            raise ConfigError(
                f"{shard} is not what {folder} was tokenised from: its content is another one; give --pretokenize another "
                "folder, or put the file back"
            )


def check_key(folder: Path, key: dict) -> None:
    """Raise ConfigError unless the manifest agrees with everything in `key`."""
    then = read_json(folder / MANIFEST)
    differing = [f"{name} was {then.get(name)}, is {value}" for name, value in key.items() if then.get(name) != value]
    if differing:
        raise ConfigError(
            f"{folder} was tokenised from something else: {'; '.join(differing)}. Give --pretokenize another folder"
        )


def tokenize_missing(folder: Path, source: TextShards, dtype: str, rank: int, world_size: int) -> None:
    """Tokenise this rank's unfinished shards, with a line for each."""
    for shard in range(rank, len(source.shards), world_size):
        if not shard_file(folder, shard, "json").exists():
            start = time.perf_counter()
            entry = tokenize_shard(folder, source, shard, dtype)
            speed = entry["tokens"] / (time.perf_counter() - start)
            line = f"Tokenised {source.shards[shard]}: {entry['documents']:,} documents, {speed:,.0f} tokens/s"
            print(line, flush=True)


def tokenize_shard(folder: Path, source: TextShards, shard: int, dtype: str) -> dict:
    """Write the files of one shard, which get their final names when they are complete. Returns the content of its .json."""
    text_file, partial = source.shards[shard], shard_file(folder, shard, "tokens" + own_suffix())
    num_tokens, ends = 0, []
    # With size and times, a later run sees that the file is unchanged, without reading its content again.
    seen = None if is_remote(text_file) else {"seen": size_and_times(text_file), "checksum": checksum(Path(text_file))}
    try:
        with naming(folder), partial.open("wb") as file:
            for tokens in source.tokens(shard, source.read(shard, 0, 1, on_retry=lambda: None)):
                file.write(tokens.astype(dtype).tobytes())
                num_tokens += len(tokens)
                ends.append(num_tokens)
            file.write(np.array(ends, dtype="<u8").tobytes())
        fsync(partial)
        described = {"size": partial.stat().st_size, "checksum": checksum(partial)}
        partial.rename(shard_file(folder, shard, "tokens"))
    finally:
        partial.unlink(missing_ok=True)
    entry = {"documents": len(ends), "tokens": num_tokens, **described, "text": seen}
    write_atomically(shard_file(folder, shard, "json"), json.dumps(entry, indent=1), own_suffix())
    return entry
