"""Measure how fast a mixture of four sources delivers batches, beside one source of as many rows.

    python benchmarks/mixtures.py --out benchmarks/results/mixtures.json

The loaders are those of `sft.py` on one rank without data workers, with one thread; rows are packed, and lie in files.
`seconds` are CPU time, since other processes would disturb the time of the clock. `ratio` is that of the one source by that
of the mixture, round by round: 1 is as fast, less is slower.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import datasets
import numpy as np
import torch
from harness import machine, make_parser, print_ratios, ratios, turns, write_json
from torch.utils.data import ConcatDataset

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.conversations.mixtures import SourceOrder, SourceTable, with_sources
from accelerate_recipes.conversations.packed import Packed
from accelerate_recipes.conversations.supervised_loss import make_collator
from accelerate_recipes.conversations.trained_rows import numbered_batch, numbered_row
from accelerate_recipes.data.mixture import Mixture, Source
from accelerate_recipes.data.rows import Rows, make_train_loader


def packed_rows(folder: Path, number: int, length: int) -> Packed:
    """Write documents into a folder, of which two are a row."""
    ids = np.random.default_rng(number).integers(0, 32_000, (2 * number, length // 2)).astype(np.int32)
    datasets.Dataset.from_dict({"input_ids": list(ids), "labels": list(ids.astype(np.int64))}).save_to_disk(folder)
    pieces = [(document, 0, length // 2) for document in range(2 * number)]
    return Packed(datasets.Dataset.load_from_disk(folder), np.array(pieces), np.arange(0, 2 * number + 1, 2), True)


def main() -> None:
    parser = make_parser(
        __doc__,
        rounds=(120, "Rounds."),
        rows=(4000, "Rows."),
        max_length=(2048, "Tokens."),
        steps=(4, "Steps a round."),
    )
    flags = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    args = TrainArgs(max_steps=10**6, total_batch_size=16, per_device_train_batch_size=4)
    collate = partial(numbered_batch, make_collator(SimpleNamespace(has_boundaries=True, pad_to_multiple_of=None), 0))
    names = ["first", "second", "third", "fourth"]
    with tempfile.TemporaryDirectory() as folder:
        whole = packed_rows(Path(folder, "whole"), flags.rows, flags.max_length)
        parts = [packed_rows(Path(folder, name), flags.rows // 4, flags.max_length) for name in names]
        sources = [Source(*source, float("inf"), {}) for source in zip(names, (4, 3, 2, 1), strict=True)]
        table = SourceTable(args, Mixture("mixture.yaml", sources), [len(part) for part in parts], names)
        mixed = {"collate_fn": partial(with_sources, collate, table.ends), "order_class": partial(SourceOrder, table)}
        loaders = {
            "one": iter(make_train_loader(Rows(whole, numbered_row), args, 0, 1, collate_fn=collate)),
            "mixture": iter(make_train_loader(Rows(ConcatDataset(parts), numbered_row), args, 0, 1, **mixed)),
        }
        found: dict[str, list[float]] = {name: [] for name in loaders}
        for number in range(-1, flags.rounds):  # the first round reads files
            for name in turns([*found], number):
                start = time.process_time()
                for _ in range(4 * flags.steps):
                    assert next(loaders[name])["input_ids"].shape == (1, 4 * flags.max_length)
                if number >= 0:
                    found[name].append(time.process_time() - start)
    ratio = ratios(found, "one", ["mixture"])
    print_ratios("CPU time", ratio)
    medians = {name: median(values) for name, values in (found | ratio).items()}
    write_json(flags.out, {"machine": machine(), "medians": medians, "seconds": found, "ratio": ratio})


if __name__ == "__main__":
    main()
