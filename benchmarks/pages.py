"""Shards of any size, made from the shipped pages, for the benchmarks of data."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from accelerate_recipes.data.documents import all_texts
from accelerate_recipes.data.shards import find_shards

PAGES = Path(__file__).parents[1] / "data" / "c4_pydoc"


def read_pages() -> list[str]:
    return list(all_texts(find_shards(str(PAGES), "en/c4-train.*.json.gz", "training"), "text"))


def pieces(text: str, mean_length: int, seed: int = 0) -> Iterator[str]:
    """Yield pieces from anywhere in the text, without end, of half to one and a half times `mean_length` characters.

    Neighbours have nothing in common, as in C4. In the order of the text, a tokenizer would find more words in its cache.
    """
    generator = np.random.default_rng(seed)
    while True:
        length = int(generator.integers(mean_length // 2, mean_length * 3 // 2 + 1))
        position = int(generator.integers(len(text) - length))
        yield text[position : position + length]


def write_shards(folder: Path, num_documents: int, num_shards: int, mean_length: int) -> list[str]:
    """Write gzip shards in C4's schema, with equally many documents, from pieces of the pages."""
    source = pieces("\n".join(read_pages()), mean_length)
    files = []
    for i in range(num_shards):
        size = num_documents * (i + 1) // num_shards - num_documents * i // num_shards
        content = "".join(
            json.dumps({"text": text, "timestamp": "2026-10-07T12:35:07Z", "url": "https://docs.python.org/3.11/"})
            + "\n"
            for text in itertools.islice(source, size)
        )
        file = folder / f"c4-train.{i:05d}-of-{num_shards:05d}.json.gz"
        file.write_bytes(gzip.compress(content.encode(), compresslevel=6))
        files.append(str(file))
    return files
