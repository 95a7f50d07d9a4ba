"""Cache of prepared data: built once, found by the settings that decide the data, and checked by content."""

import contextlib
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.disk import made_once, naming
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.hub import cache
from accelerate_recipes.ranks import is_first_of_machine, on_all_ranks

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

TOKENIZED_PER_SECOND = 1e6  # bytes of files in one process: a low estimate (docs/plan.md)


def check_content(now: str, states: list[dict], remedy: str = "") -> None:
    """Raise ConfigError unless a checkpoint, with these data `states`, was trained on rows with this checksum.

    `remedy` comes before others.
    """
    then = states[0].get("content") if states else None
    if then and now != then:
        raise ConfigError(
            f"the training data are others than the checkpoint's: their checksum is {now}, was {then}; {remedy}put the "
            "files back as they were, or the version that rendered them, or start anew in another --output_dir"
        )


def checksum_of_rows(rows: Any, columns: Sequence[str] = ()) -> str:
    """Compute XXH3 of columns of any type of a dataset, or of those that a `Packed` names.

    It does not depend on how the columns are divided into chunks.
    """
    if isinstance(rows, Sequence):
        chunks = rows.arrays()
    else:
        chunks = [(column, chunk) for column in columns for chunk in rows.data.column(column).chunks]
        if rows._indices is not None:  # shuffled or selected rows: also hash their numbers in the table
            chunks += [("", chunk) for chunk in rows._indices.column(0).chunks]
    digests = defaultdict(xxhash.xxh3_128)
    for column, chunk in chunks:
        for leaf, values in leaf_arrays(column, chunk):
            digests[leaf].update(values)
    sums = sorted((leaf, digest.hexdigest()) for leaf, digest in digests.items())
    return xxhash.xxh3_128_hexdigest(repr(sums).encode())


def content_of(rows: Any, columns: Sequence[str]) -> str:
    """Compute `checksum_of_rows` in the first process of each machine; return it on every rank.

    Raises:
        ConfigError: if the machines have different rows.
    """
    own = checksum_of_rows(rows, columns) if is_first_of_machine() else None
    return same_on_machines(own, "the checksum of the rows")  # pyright: ignore[reportReturnType]  rank 0 has one


def same_on_machines(value: str | None, what: str) -> str | None:
    """Return rank 0's value, which all ranks have alike, or have as None.

    Raises:
        ConfigError: if a rank has another one, since its machine has other files. Else ranks would train on different data.
    """
    first, *others = on_all_ranks(value)
    for rank, other in enumerate(others, 1):
        if other not in (None, first):
            raise ConfigError(
                f"{what} is {first} on the machine of rank 0, and {other} on that of rank {rank}; give all machines the "
                "same files, and the same commit of a model or dataset"
            )
    return first


def leaf_arrays(name: str, array: "pa.Array") -> Iterator[tuple[str, bytes | np.ndarray]]:
    """Yield names and contents of the plain arrays inside an array of texts, lists or structures."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        yield f"{name}, lengths", np.ascontiguousarray(array.value_lengths().fill_null(0))
        yield from leaf_arrays(f"{name}[]", array.flatten())
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        yield f"{name}, lengths", np.ascontiguousarray(pc.binary_length(array).fill_null(0))
        yield name, "".join(filter(None, array.to_pylist())).encode()
    elif pa.types.is_struct(array.type):
        for field, values in zip(array.type, array.flatten(), strict=True):
            yield from leaf_arrays(f"{name}.{field.name}", values)
    elif isinstance(array.type, pa.JsonType):
        yield from leaf_arrays(name, array.storage)
    elif pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        yield name, np.ascontiguousarray(array.fill_null(0))
    else:
        yield name, "".join(f"{value!r}\n" for value in array.to_pylist()).encode()


def tokens_key(tokenizer: PreTrainedTokenizerBase) -> list:
    """Return all that decides the tokens of a text, for the key of a cache.

    A base and the model trained on its answers often share one tokenizer.json, and differ in the tokens that begin and end.
    """
    settings = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.split_special_tokens]
    return [backend_checksum(tokenizer), *settings]


def backend_checksum(tokenizer: PreTrainedTokenizerBase) -> str:
    """Compute a checksum of a tokenizer's file, or, of one in Python such as ByT5's, of its class and vocabulary."""
    if tokenizer.is_fast:
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = repr([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return xxhash.xxh64_hexdigest(content.encode())


def chunks_of(rows: "Dataset", column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the lengths and the joined numbers of a column of lists, part by part."""
    for table in rows.select_columns(column).with_format("arrow").iter(batch_size=1000):
        # Of rows that were selected, each may be a chunk.
        lists = table.column(column).combine_chunks()  # pyright: ignore[reportAttributeAccessIssue]
        yield np.asarray(lists.value_lengths()), np.asarray(lists.flatten())


def lengths_of(rows: "Dataset", column: str = "input_ids") -> np.ndarray:
    """Count the tokens of each row."""
    return np.concatenate([lengths for lengths, _ in chunks_of(rows, column)])


def check_no_bad(title: str, bad: Sequence[str]) -> None:
    """Raise ConfigError with the first of the rows that cannot be used, if there are any."""
    more = f" (the first {len(bad[:5])} of {len(bad)})" if len(bad) > 5 else ""
    raise_problems(f"{title}{more}", bad[:5])


def cached(root: Path, key: dict, build: Callable[[Path, Path], dict]) -> Path:
    """Return the folder that `build(folder, tmp)` filled for this `key`, once, in the first process of each machine.

    The result of `build` is kept as `facts.json`; `tmp` is a folder for temporary files. The other processes wait
    without a collective, which could time out; if the builder fails, the launcher ends them. The folder gets its name
    only when it is complete.

    Raises:
        ConfigError: if the machines have different keys.
    """
    final = root / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    same_on_machines(final.name, "the key of the prepared data")

    def make(folder: Path) -> None:
        print(f"Preparing the data, once; it is kept in {final}", flush=True)
        with naming(final):
            tmp = folder / "tmp"
            tmp.mkdir(parents=True)
            facts = build(folder, tmp)
            shutil.rmtree(tmp)
            (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
            (folder / "key.json").write_text(json.dumps(key, indent=1), encoding="utf-8")

    while not (is_first_of_machine() or final.exists()):
        time.sleep(0.2)
    try:
        return made_once(final, make)
    finally:
        with contextlib.suppress(OSError):
            root.rmdir()  # works only if empty: a failed build leaves nothing


def prepared_rows(folder: Path) -> "Dataset":
    """Open rows that `build` of `cached` has saved."""
    from datasets import Dataset

    return Dataset.load_from_disk(folder)


def tokenizing_warnings(args: TrainArgs, needed: Sequence[cache.HubDataset]) -> list[str]:
    """Warn if the rows probably take longer to tokenise than the waiting processes allow."""
    if not args.tokenizes_first:
        return []
    local = [file for source in args.sources for file in (*source.train_files, *source.eval_files)]
    size = sum(cache.size_of(Path(file)) or 0 for file in local) + sum(map(cache.bytes_of, needed))
    num_workers = args.dataset_num_proc or 1
    seconds = size / (TOKENIZED_PER_SECOND * num_workers)
    if seconds < args.ddp_timeout:
        return []
    return [
        f"{size / 1e9:.1f} GB of rows take about {seconds / 60:.0f} minutes to tokenise, at "
        f"{TOKENIZED_PER_SECOND / 1e6:.0f} MB/s in {num_workers} process(es). The processes that wait for it give up after "
        f"{args.ddp_timeout} s (--ddp_timeout): run `python -m accelerate_recipes prepare` with this recipe and its "
        "arguments first, if you have not yet"
    ]
