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
from accelerate_recipes.data.mixed_rows import MixedTable, MixtureLoader, MixtureOrder
from accelerate_recipes.data.mixture import MixedSource, Mixture
from accelerate_recipes.data.rows import Rows, make_train_loader
from accelerate_recipes.posttraining.mixtures import with_sources
from accelerate_recipes.posttraining.supervised_loss import make_collator
from accelerate_recipes.posttraining.trained_rows import numbered_batch, numbered_row


def packed_rows(folder: Path, number: int, length: int) -> datasets.Dataset:
    """Write packed rows of two documents each into a folder."""
    ids = np.random.default_rng(number).integers(0, 32_000, (number, length)).astype(np.int32)
    parts = {"input_ids": list(ids), "labels": list(ids.astype(np.int64))}
    rows = datasets.Dataset.from_dict(parts | {"seq_lengths": [[length // 2, length - length // 2]] * number})
    rows.save_to_disk(folder)
    return datasets.Dataset.load_from_disk(folder)


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
        sources = [MixedSource(*source, float("inf"), {}) for source in zip(names, (4, 3, 2, 1), strict=True)]
        table = MixedTable(args, Mixture("mixture.yaml", sources), [len(part) for part in parts], names)
        mixed = {
            "collate_fn": partial(with_sources, collate, table.source_of),
            "order_class": lambda *place: MixtureOrder(table, None, *place),
            "loader_class": MixtureLoader,
        }
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
