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
import itertools
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from machine import machine
from pages import read_pages, write_shards

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.documents import read_documents, text_of
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.data.text import TextShards
from accelerate_recipes.tokenizers import new_bpe_tokenizer

NUM_PARTS = 20
WAYS = ("ours", "encode_batch", "encode_batch_fast")


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default, text in (
        ("documents", 4_500, "Documents in all shards; the default is as many pieces as the pages have."),
        ("shards", 24, "Gzip files."),
        ("mean_length", 2200, "Characters of a document; C4's have about as many."),
        ("rounds", 5, "Rounds that count."),
        ("max_length", 1024, "Tokens in a row."),
        ("per_device_train_batch_size", 8, "Rows in a batch."),
        ("vocab_size", 32768, "Vocabulary of the tokenizer, which is trained on the pages."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--out", type=Path, help="Write all numbers to this JSON file.")
    return parser.parse_args()


def main(flags: argparse.Namespace, folder: Path) -> None:
    result = machine(torch.device("cpu"))
    files = write_shards(folder, flags.documents, flags.shards, flags.mean_length)
    source = TextShards(files, new_bpe_tokenizer(read_pages(), flags.vocab_size))
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
    for _ in range(1 + flags.rounds):
        tokens, seconds, cpu_seconds = (dict.fromkeys(WAYS, 0.0) for _ in range(3))
        for i in range(NUM_PARTS):
            for way in WAYS[i % 3 :] + WAYS[: i % 3]:
                start, cpu_start = time.perf_counter(), time.process_time()
                tokens[way] += run[way](i)
                seconds[way] += time.perf_counter() - start
                cpu_seconds[way] += time.process_time() - cpu_start
        for way in WAYS:
            speeds[way].append(tokens[way] / seconds[way])
            cpu_speeds[way].append(tokens[way] / cpu_seconds[way])
    speeds, cpu_speeds = ({way: values[1:] for way, values in s.items()} for s in (speeds, cpu_speeds))
    result |= {
        "flags": vars(flags) | {"out": str(flags.out)},
        "tokens": num_tokens,
        "characters": sum(map(len, texts)),
        "tokens_per_second": speeds,
        "tokens_per_cpu_second": cpu_speeds,
        "ratios": {
            f"ours/{way}": [a / b for a, b in zip(speeds["ours"], speeds[way], strict=True)] for way in WAYS[1:]
        },
        "cpu_ratios": {
            f"ours/{way}": [a / b for a, b in zip(cpu_speeds["ours"], cpu_speeds[way], strict=True)] for way in WAYS[1:]
        },
    }
    for way in WAYS:
        print(f"{way}: median {median(speeds[way]):,.0f} tokens/s, {median(cpu_speeds[way]):,.0f} tokens/CPU s")
    for title, ratios in (("speed", result["ratios"]), ("speed per CPU second", result["cpu_ratios"])):
        for name, values in ratios.items():
            print(f"{title} {name}: {median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        main(parse_flags(), Path(folder))
