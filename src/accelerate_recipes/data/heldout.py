"""Rows to train and to evaluate on: read from the Hub or files, split by a hash of what a row asks.

So no question lies on both sides.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from accelerate_recipes.args import ConfigError, arg
from accelerate_recipes.data.files import falls_under, read_files, reading
from accelerate_recipes.data.rendering import SETTINGS
from accelerate_recipes.hub import cache


@dataclass
class RowsArgs:
    """Arguments that say which rows a recipe reads. Put it before TrainArgs in the bases of a recipe's arguments."""

    dataset_name: str = arg("", "Dataset to train on: a name on the Hub, or a folder.")
    dataset_config: str = arg("", "Configuration of the dataset, where it has several.")
    train_split: str = arg("train", "Split to train on.")
    train_files: list[str] = arg([], "Local .jsonl, .parquet or .csv files, instead of a dataset.")
    eval_files: list[str] = arg([], "Local files to evaluate on; without them a share of the rows is held out.")
    heldout_share: float = arg(
        0.05, "Share of the rows to evaluate on, chosen by a hash of the prompt.", above=0, below=1
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if bool(self.dataset_name) == bool(self.train_files):
            found.append("give one of --dataset_name and --train_files")
        for name in ("train_files", "eval_files"):
            found += self.file_problems(name, cache.BUILDERS)
            if len({Path(file).suffix for file in getattr(self, name)}) > 1:
                found.append(f"--{name} must all be of one kind")
        return found

    @property
    def row_datasets(self) -> list[cache.HubDataset]:
        """List the datasets to read from the Hub."""
        if not self.dataset_name:
            return []
        return [cache.HubDataset(self.dataset_name, config=self.dataset_config, splits=(self.train_split,))]

    @property
    def source(self) -> str:
        """Name of the rows' source, for messages."""
        return ", ".join(self.train_files) or self.dataset_name

    def read_rows(self) -> dict[str, datasets.Dataset]:
        """Read the rows: those to train on as `train`; those of --eval_files as `test`, if there are any.

        Raises:
            DataError: for rows that cannot be read.
        """
        if self.train_files:
            rows = {"train": read_files(self.train_files)}
        else:
            arguments = cache.load_arguments(self.row_datasets[0])
            with reading(self.source):
                rows = {"train": datasets.load_dataset(**arguments, split=self.train_split)}
        return rows | ({"test": read_files(self.eval_files)} if self.eval_files else {})

    def sides(self, rows: dict[str, datasets.Dataset]) -> dict[str, datasets.Dataset]:
        """Split rows with a `prompt` into `train` and `test`, unless there are rows of --eval_files.

        Raises:
            ConfigError: if a side is empty, or a prompt lies on both.
        """
        if "test" not in rows:
            numbers = split(rows["train"].select_columns(["prompt"]), self.heldout_share)
            return {name: rows["train"].select(chosen) for name, chosen in numbers.items()}
        trained = {beginning(row) for row in rows["train"].select_columns(["prompt"])}
        both = sum(beginning(row) in trained for row in rows["test"].select_columns(["prompt"]))
        if both:
            raise ConfigError(
                f"{both:,} of {len(rows['test']):,} prompts of --eval_files are also in {self.source}; remove them from one"
            )
        for name, side in rows.items():
            if not len(side):
                raise ConfigError(f"no row is left to {'train' if name == 'train' else 'evaluate'} on")
        return rows


def beginning(row: dict) -> str:
    """Return what a row asks the model: the messages up to the first answer, the prompt, or the whole text."""
    (asked,) = (row[name] for name in sorted(row) if name not in ("completion", *SETTINGS))
    if "messages" in row:
        asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", asked)) or asked
    return asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)


def split(rows: datasets.Dataset, share: float) -> dict[str, np.ndarray]:
    """Split rows by the hash of what they ask into `train` and `test`: their numbers, in order.

    A row has a `prompt`, `messages` or a text, and else only what does not count.

    Raises:
        ConfigError: if a side is empty.
    """
    heldout = rows.map(lambda row: {"heldout": falls_under(beginning(row), share)}, remove_columns=rows.column_names)
    heldout = np.array(heldout["heldout"][:], dtype=bool)
    sides = {"train": np.flatnonzero(~heldout), "test": np.flatnonzero(heldout)}
    for name, side in sides.items():
        if not len(side):
            raise ConfigError(
                f"of {len(rows):,} rows none is left to {'train' if name == 'train' else 'evaluate'} on: rows that "
                f"begin alike lie on one side; change --heldout_share {share}, or give more rows"
            )
    return sides
