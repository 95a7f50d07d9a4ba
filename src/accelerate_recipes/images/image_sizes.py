"""Sizes of images: the text that a processor writes for one of each size, and its patches, kept for later runs."""

import json
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import transformers
import xxhash
from transformers import PreTrainedConfig, ProcessorMixin

from accelerate_recipes.data.passes import map_rows, num_processes
from accelerate_recipes.disk import made_once
from accelerate_recipes.errors import ConfigError, DataError, one_line
from accelerate_recipes.images.image_texts import ImageTexts, Key, Size
from accelerate_recipes.images.pictures import Pictures, keys_of
from accelerate_recipes.models.images import patches_of

VERSION = 1  # of the files; raise it when they would hold something else
SIZES_TOGETHER = 16  # sizes that are made together
ROWS_A_SIZE = 100  # a size takes as long as so many rows of other passes: 0.1 s
SIZES = datasets.Features({
    "width": datasets.Value("int32"),
    "height": datasets.Value("int32"),
    "is_among_others": datasets.Value("bool"),
    "text": datasets.Value("binary"),
    "patches": datasets.List(datasets.Value("int32")),
    "refused": datasets.Value("string"),
})  # fmt: skip
Patches = dict[Key, list[int]]  # of each tile of an image that is computed alone


def known_sizes(
    processor: ProcessorMixin,
    config: PreTrainedConfig,
    documents: Iterable[tuple[str, Sequence[Size]]],
    num_proc: int | None,
) -> tuple[ImageTexts, Patches]:
    """Find the texts and patches of the images of documents, whose places (for errors) and sizes of images are given.

    A blank image of each size is processed, which takes as long as a photo. So the results are kept beside the rows of
    `datasets`, in a folder for all that decides them: each call adds a file of the sizes that no file there has. It takes
    `num_proc` processes (default: see `num_processes`).

    Raises:
        DataError: for a size that the processor refuses; the others are kept.
        ConfigError: for a file that is damaged.
    """
    wanted = keys_of(documents)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / f"image-sizes-{version_of(processor, config)}"
    found = {key: row for file in folder.glob("*.parquet") for key, row in by_key(read_sizes(file)).items()}
    if missing := sorted(wanted.keys() - found.keys()):
        columns = dict(zip(("width", "height", "is_among_others"), map(list, zip(*missing, strict=True)), strict=True))
        make = partial(of_sizes, processor=processor, config=config)
        number = num_proc or num_processes(len(missing) * ROWS_A_SIZE)
        rows = datasets.Dataset.from_dict(columns)
        made = map_rows(rows, make, SIZES, num_proc=number, desc="Sizes of images", batch=SIZES_TOGETHER).data.table
        # A refusal may be for want of memory: it is not kept.
        if len(kept := made.filter(pc.field("refused").is_null())):
            file = folder / f"{xxhash.xxh3_128_hexdigest(json.dumps(missing).encode())}.parquet"
            made_once(file, lambda partial_file: pq.write_table(kept, partial_file, write_page_checksum=True))
        found |= by_key(made)
    for key, place in wanted.items():
        if refused := found[key]["refused"]:
            raise DataError(f"{place}: {refused}")
    texts = ImageTexts(processor.image_token, {key: found[key]["text"] for key in wanted})
    return texts, {key: found[key]["patches"] for key in wanted}


def version_of(processor: ProcessorMixin, config: PreTrainedConfig) -> str:
    """Return a checksum of all that decides what is made of a size: the chat template does not."""
    own = {name: value for name, value in vars(processor).items() if name not in ("tokenizer", "chat_template")}
    parts = {
        name: part.to_json_string() if hasattr(part, "to_json_string") else repr(part) for name, part in own.items()
    }
    tokens = repr(processor.tokenizer.special_tokens_map)
    known = [VERSION, transformers.__version__, type(processor).__name__, sorted(parts.items()), tokens]
    size = config.vision_config.patch_size  # all that `patches_of` reads of a configuration
    return xxhash.xxh3_128_hexdigest(json.dumps([*known, size]).encode())


def of_sizes(table: pa.Table, first: int, processor: ProcessorMixin, config: PreTrainedConfig) -> pa.Table:
    """Make what `processor` makes of blank images of some sizes, or why it `refused`; texts are compressed."""
    pictures, rows = Pictures(processor), table.to_pylist()
    for row in rows:
        try:
            text, inputs = pictures.of_size(row["width"], row["height"], row["is_among_others"])
        except ValueError as error:
            row |= {"text": None, "patches": None, "refused": str(error)}
        else:
            patches = patches_of(config, inputs)  # of both images, if it is among others
            own = patches[: len(patches) // 2] if row["is_among_others"] else patches
            row |= {"text": zlib.compress(text.encode()), "patches": own, "refused": None}
    return pa.Table.from_pylist(rows, schema=SIZES.arrow_schema)


def by_key(table: pa.Table) -> dict[Key, dict]:
    return {(row["width"], row["height"], row["is_among_others"]): row for row in table.to_pylist()}


def read_sizes(file: Path) -> pa.Table:
    try:
        return pq.read_table(file, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read: {one_line(error)}; remove it, and its sizes are made anew"
        ) from error
