"""Measure the cost of resuming a stream early and late in the data, and the cost of skipping to the same place.

    python benchmarks/stream_resume.py --out benchmarks/results/stream_resume.json

The script makes gzip shards with equally many documents from the shipped pages. One pass iterates over the rows of an epoch
from its start, and notes the state at 1 % and at 95 % of the steps, and the time to get there: the cost of resuming by
skipping. Then, in turns, a new loader gets one of these states, and is read until the rows of its first step are
there: the cost of resuming. The rows must be those that the first pass saw, or the benchmark ends with an error.

Times include everything from making the loader on, also the start of workers. The files were just written and lie
in the page cache. Read the ratio of the medians, 95 % to 1 %.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from machine import machine
from pages import read_pages, write_shards

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.streams import NUM_STREAMS, StreamLoader
from accelerate_recipes.data.text import TextShards
from accelerate_recipes.life import parent, workers
from accelerate_recipes.tokenizers import new_bpe_tokenizer

PLACES = (0.01, 0.95)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default, text in (
        ("documents", 200_000, "Documents in all shards."),
        ("shards", 25, "Gzip files."),
        ("mean_length", 1000, "Characters of a document."),
        ("rounds", 5, "Resumes at each place."),
        ("max_length", 1024, "Tokens in a row."),
        ("total_batch_size", 24, "Rows in a step."),
        ("num_workers", 0, "Processes that tokenise."),
        ("vocab_size", 8192, "Vocabulary of the tokenizer, which is trained on the pages."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--out", type=Path, help="Write all numbers to this JSON file.")
    return parser.parse_args()


def new_loader(source: TextShards, flags: argparse.Namespace) -> StreamLoader:
    args = TrainArgs(
        total_batch_size=flags.total_batch_size,
        per_device_train_batch_size=flags.total_batch_size,
        dataloader_num_workers=flags.num_workers,
    )
    return StreamLoader(source, args, 0, 1, max_length=flags.max_length)


def iterate(source: TextShards, flags: argparse.Namespace) -> dict[float, tuple[dict, torch.Tensor, float]]:
    """Return, for each place, the state there, the rows of the next step, and the seconds from the start to this place.

    A place is a share of the documents; the first step after it counts.
    """
    loader = new_loader(source, flags)
    found = {}
    start = time.perf_counter()
    batches = iter(loader)
    for place in PLACES:
        while loader.counts()["documents_seen"] < place * flags.documents:
            next(batches)
        step, state, seconds = loader.step, loader.state(), time.perf_counter() - start
        found[place] = (step, state, next(batches)["input_ids"], seconds)
    return found


def main(flags: argparse.Namespace, folder: Path) -> None:
    result = machine(torch.device("cpu"))
    if flags.num_workers:
        parent.follow_launcher()
        workers.start_fork_server()
    files = write_shards(folder, flags.documents, flags.shards, flags.mean_length)
    source = TextShards(files, new_bpe_tokenizer(read_pages(), flags.vocab_size))
    skipped = iterate(source, flags)
    seconds = {place: [] for place in PLACES}
    for _ in range(flags.rounds):
        for place in PLACES:
            step, state, rows, _ = skipped[place]
            start = time.perf_counter()
            loader = new_loader(source, flags)
            loader.start_at(step, [state])
            batch = next(iter(loader))
            seconds[place].append(time.perf_counter() - start)
            if not torch.equal(batch["input_ids"], rows):
                raise RuntimeError(f"the rows after resuming at {place:.0%} are others than those of the first pass")
    early, late = (median(seconds[place]) for place in PLACES)
    result |= {
        "flags": vars(flags) | {"out": str(flags.out)},
        "num_streams": NUM_STREAMS,
        "gzip_bytes": sum(Path(file).stat().st_size for file in files),
        "steps": {f"{place:.0%}": skipped[place][0] for place in PLACES},
        "seconds_by_resuming": {f"{place:.0%}": seconds[place] for place in PLACES},
        "seconds_by_skipping": {f"{place:.0%}": skipped[place][3] for place in PLACES},
        "ratio_late_to_early": late / early,
        "ratio_skipping_to_resuming_late": skipped[PLACES[1]][3] / late,
    }
    for place in PLACES:
        print(
            f"{place:4.0%} (step {skipped[place][0]}): resumed in {median(seconds[place]):.2f} s "
            f"({min(seconds[place]):.2f} to {max(seconds[place]):.2f}), by skipping {skipped[place][3]:.2f} s"
        )
    print(f"95 % to 1 %: {late / early:.2f}; skipping to resuming at 95 %: {skipped[PLACES[1]][3] / late:.1f}")
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(parse_flags(), Path(folder))
