"""Measure tokens/s per core from gzip shards to packed batches, compared with the tokenizer alone on the same text.

    python benchmarks/data_throughput.py --out benchmarks/results/data_throughput.json

The script makes gzip shards from the shipped pages, with documents as long as C4's. A round goes through this text once in
each of three ways, with one thread, a twentieth at a time and in turns, so that other work on the machine disturbs all:

    ours                StreamLoader without workers: read, decompress, decode JSON, shuffle, tokenise, pack
    encode_batch        the function of `tokenizers`, on texts in memory; the ids are not taken out
    encode_batch_fast   the same without the tokens' offsets; ours calls this one

A round of ours has the rows for the tokens of one epoch. The loader continues from round to round: what it tokenises ahead
at the end of a round costs time there and is used in the next. Read the ratio ours / encode_batch: the
median over the rounds, with the smallest and the largest. A first round warms up and does not count.
"""

import argparse
import gzip
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from harness import ROOT, machine, make_parser, print_ratios, ratios, turns, write_json

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.documents import all_texts, read_documents, text_of
from accelerate_recipes.data.shards import find_shards
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.data.text import TextShards
from accelerate_recipes.tokenizers import new_bpe_tokenizer

NUM_PARTS = 20
WAYS = ("ours", "encode_batch", "encode_batch_fast")


def pieces(text: str, mean_length: int, seed: int = 0) -> Iterator[str]:
    """Yield pieces from anywhere in the text, without end, of half to one and a half times `mean_length` characters.

    Neighbours have nothing in common, as in C4. In the order of the text, a tokenizer would find more words in its cache.
    """
    generator = np.random.default_rng(seed)
    while True:
        length = int(generator.integers(mean_length // 2, mean_length * 3 // 2 + 1))
        position = int(generator.integers(len(text) - length))
        yield text[position : position + length]


def write_shards(folder: Path, flags: argparse.Namespace, pages: list[str]) -> list[str]:
    """Write gzip shards in C4's schema, with equally many documents, from pieces of the pages."""
    source = pieces("\n".join(pages), flags.mean_length)
    files = []
    for i in range(flags.shards):
        size = flags.documents * (i + 1) // flags.shards - flags.documents * i // flags.shards
        content = "".join(
            json.dumps({"text": text, "timestamp": "2026-10-07T12:35:07Z", "url": "https://docs.python.org/3.11/"})
            + "\n"
            for text in itertools.islice(source, size)
        )
        file = folder / f"c4-train.{i:05d}-of-{flags.shards:05d}.json.gz"
        file.write_bytes(gzip.compress(content.encode(), compresslevel=6))
        files.append(str(file))
    return files


def main(flags: argparse.Namespace, folder: Path) -> None:
    pages = list(all_texts(find_shards(str(ROOT / "data/c4_pydoc"), "en/c4-train.*.json.gz"), "text"))
    files = write_shards(folder, flags, pages)
    source = TextShards(files, new_bpe_tokenizer(pages, flags.vocab_size))
    texts = [
        text_of(file, *document, "text")
        for file in files
        for document in read_documents(file, "text", 0, 1, source.retry, on_retry=lambda: None)
    ]
    tokenizer = source.tokenizer.backend_tokenizer
    # The rates count what the tokenizer makes, without the end tokens that ours adds.
    num_tokens = sum(len(encoding) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    batch_size = flags.per_device_train_batch_size
    args = TrainArgs(total_batch_size=batch_size, per_device_train_batch_size=batch_size)
    batches = iter(StreamLoader(source, args, 0, 1, max_length=flags.max_length))
    num_batches = (num_tokens + len(texts)) // (flags.max_length * batch_size)

    parts = [texts[i::NUM_PARTS] for i in range(NUM_PARTS)]

    def pack_part(i: int) -> int:
        size = num_batches * (i + 1) // NUM_PARTS - num_batches * i // NUM_PARTS
        eos = source.tokenizer.eos_token_id
        return sum(int((batch["input_ids"] != eos).sum()) for batch in itertools.islice(batches, size))

    def encode_part(encode, i: int) -> int:
        return sum(len(encoding) for encoding in encode(parts[i], add_special_tokens=False))

    run = {
        "ours": pack_part,
        "encode_batch": partial(encode_part, tokenizer.encode_batch),
        "encode_batch_fast": partial(encode_part, tokenizer.encode_batch_fast),
    }
    speeds, cpu_speeds = ({way: [] for way in WAYS} for _ in range(2))
    for round_number in range(1 + flags.rounds):
        tokens, seconds, cpu_seconds = (dict.fromkeys(WAYS, 0.0) for _ in range(3))
        for i in range(NUM_PARTS):
            for way in turns(WAYS, i):
                start, cpu_start = time.perf_counter(), time.process_time()
                tokens[way] += run[way](i)
                seconds[way] += time.perf_counter() - start
                cpu_seconds[way] += time.process_time() - cpu_start
        for way in WAYS if round_number else ():
            speeds[way].append(tokens[way] / seconds[way])
            cpu_speeds[way].append(tokens[way] / cpu_seconds[way])
    result = machine() | {
        "flags": vars(flags),
        "tokens": num_tokens,
        "characters": sum(map(len, texts)),
        "tokens_per_second": speeds,
        "tokens_per_cpu_second": cpu_speeds,
        "ratios": ratios(speeds, "ours", WAYS[1:]),
        "cpu_ratios": ratios(cpu_speeds, "ours", WAYS[1:]),
    }
    for way in WAYS:
        print(f"{way}: median {median(speeds[way]):,.0f} tokens/s, {median(cpu_speeds[way]):,.0f} tokens/CPU s")
    print_ratios("speed", result["ratios"])
    print_ratios("speed per CPU second", result["cpu_ratios"])
    write_json(flags.out, result)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    parser = make_parser(
        __doc__,
        documents=(4_500, "Documents in all shards; the default is as many pieces as the pages have."),
        shards=(24, "Gzip files."),
        mean_length=(2200, "Characters of a document; C4's have about as many."),
        rounds=(5, "Rounds that count."),
        max_length=(1024, "Tokens in a row."),
        per_device_train_batch_size=(8, "Rows in a batch."),
        vocab_size=(32768, "Vocabulary of the tokenizer, which is trained on the pages."),
    )
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), Path(folder))
