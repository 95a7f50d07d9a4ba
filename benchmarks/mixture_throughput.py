"""Compare the throughput of the data of a mixture of four sources with that of one source, in one process.

    python benchmarks/mixture_throughput.py --out benchmarks/results/mixture_throughput.json

The four sources are the quarters of the one: shards with parts of the shipped pages, tokenised while they are read.
Both loaders go on from round to round, and take turns. The time is that of this process, so others on the machine count
little. A stream tokenises 128 KB of a source at once, which give it rows for some 125 steps of four sources. So a round has
twice as many, and before the first round each loader reads so many.
"""

import gzip
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from harness import ROOT, machine, make_parser, print_ratios, ratios, turns, write_json

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.mixture import Mixture, Source
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.text.pretraining import TextShards

NAMES = ("a", "b", "c", "d")


def write_shards(folder: Path, number: int, shards_of_a_source: int) -> tuple[list[str], list[str]]:
    """Write shards of documents that are parts of the shipped pages. Return their paths, and the pages."""
    files = sorted((ROOT / "data/c4_pydoc/en").glob("c4-train*.json.gz"))
    pages = [json.loads(line)["text"] for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    draw, shards = random.Random(0), []
    for shard in range(len(NAMES) * shards_of_a_source):
        shards.append(str(folder / f"{shard:03}.jsonl.gz"))
        with gzip.open(shards[-1], "wt", compresslevel=6) as out:
            for _ in range(number):
                page = draw.choice(pages)
                begin = draw.randrange(max(1, len(page) - 2200))
                out.write(json.dumps({"text": page[begin : begin + 2200]}) + "\n")
    return shards, pages


def main() -> None:
    numbers = {
        "rounds": (8, "Rounds."), "steps": (250, "Steps of a loader in a round."), "warm_up": (130, "Steps before them."),
        "documents": (1500, "Documents in a shard."), "shards": (6, "Shards of each of the four sources."),
        "max_length": (1024, "Tokens of a row."),
    }  # fmt: skip
    flags = make_parser(__doc__, **numbers).parse_args()
    args = TrainArgs(total_batch_size=24, per_device_train_batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        shards, pages = write_shards(Path(folder), flags.documents, flags.shards)
        tokenizer = new_bpe_tokenizer(pages, 32_000)
        parts = [TextShards(shards[place :: len(NAMES)], tokenizer) for place in range(len(NAMES))]
        mixture = Mixture("mixture.yaml", [Source(name, 1.0, math.inf, {}) for name in NAMES])
        settings = {"max_length": flags.max_length}
        loaders: dict[str, Iterator[dict]] = {
            "four": iter(StreamLoader(parts, args, 0, 1, mixture=mixture, **settings)),
            "one": iter(StreamLoader([TextShards(shards, tokenizer)], args, 0, 1, **settings)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in loaders}
        for number in range(flags.rounds + 1):
            for name in turns([*loaders], number):
                start, steps = time.process_time(), flags.steps if number else flags.warm_up
                for _ in range(steps * args.total_batch_size // args.per_device_train_batch_size):
                    next(loaders[name])
                tokens = steps * args.total_batch_size * flags.max_length
                if number:
                    speeds[name].append(tokens / (time.process_time() - start))
    found = ratios(speeds, "four", ["one"])
    for name, values in speeds.items():
        print(f"{name}: {median(values):,.0f} tokens/s")
    print_ratios("Throughput", found)
    write_json(flags.out, machine() | {"flags": vars(flags), "tokens_per_second": speeds, "ratios": found})


if __name__ == "__main__":
    main()
