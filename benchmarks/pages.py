"""What the benchmarks of the data share: shards of any size from the shipped pages, a tokenizer, the machine."""

import gzip
import itertools
import json
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import accelerate_recipes
from accelerate_recipes.shards import Retry, find_shards, read_documents, text_of

PAGES = Path(__file__).parents[1] / "data" / "c4_pydoc"


def read_pages() -> list[str]:
    return [
        text_of(shard, *document, "text")
        for shard in find_shards(str(PAGES), "en/c4-train.*.json.gz", "train")
        for document in read_documents(shard, "text", 0, 1, Retry(), on_retry=lambda: None)
    ]


def pieces(text: str, mean_length: int, seed: int = 0) -> Iterator[str]:
    """Pieces of half to one and a half times `mean_length` characters, without end, from anywhere in the text.

    Neighbours have nothing in common, as in C4: in the order of the text, a tokenizer would find more words in its cache.
    """
    generator = np.random.default_rng(seed)
    while True:
        length = int(generator.integers(mean_length // 2, mean_length * 3 // 2 + 1))
        position = int(generator.integers(len(text) - length))
        yield text[position : position + length]


def write_shards(folder: Path, num_documents: int, num_shards: int, mean_length: int) -> list[str]:
    """Gzip shards of C4's schema, of equally many documents, made of pieces of the pages."""
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


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on the pages."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(read_pages(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def machine() -> dict:
    """On what it ran, with which versions, started by which command."""
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpu_info.read_text()) if cpu_info.exists() else []
    modules = (accelerate_recipes, torch, tokenizers, transformers)
    return {
        "command": " ".join(sys.argv),
        "device": names[0] if names else platform.machine(),
        "cores": psutil.cpu_count(),
        "load_average_before": psutil.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in modules},
    }
