"""Rows to train and to evaluate on: read from the Hub or files, and split by a hash of the question in each row.

So the same question never lies on both sides.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from accelerate_recipes.args import arg
from accelerate_recipes.data.files import (
    SUFFIXES,
    falls_under,
    file_kind,
    other_share,
    read_files,
    read_split,
    text_hash,
)
from accelerate_recipes.data.reading import files_of_folder, without_nulls
from accelerate_recipes.errors import ConfigError, collecting_errors
from accelerate_recipes.hub import cache
from accelerate_recipes.ranks import print_first

if TYPE_CHECKING:
    import datasets

# Share of the rows of --eval_files that may be trained on too: published splits repeat some, which changes a mean little.
MOST_REPEATED = 0.1


@dataclass
class RowsArgs:
    """Arguments that say which rows a recipe reads. Put it before TrainArgs in the bases of a recipe's arguments."""

    # The rows of a resumed run are compared by content, so the files may have moved.
    group = "data"
    dataset_name: str = arg("", "Dataset to train on: a name on the Hub, or a folder.", fixed=False)
    dataset_config: str = arg("", "Configuration of the dataset, if it has several.")
    train_split: str = arg("train", "Split to train on.")
    train_files: list[str] = arg(
        [],
        "Local files, or folders, instead of a dataset: .jsonl, .json, .csv, .tsv (also .gz, .zst), .parquet, .arrow.",
        fixed=False,
    )
    eval_files: list[str] = arg(
        [], "Local files to evaluate on, or folders; without them a share of the rows is held out.", fixed=False
    )
    heldout_share: float = arg(
        0.05,
        "Share of the rows to evaluate on, chosen by a hash of the prompt, all before the first answer, or the text.",
        above=0,
        below=1,
    )

    def source_problems(self) -> list[str]:
        problems = super().source_problems()
        if bool(self.dataset_name) == bool(self.train_files):
            problems.append("give one of --dataset_name and --train_files")
        problems += cache.folder_problems("dataset_name", self.dataset_name)
        for name in ("train_files", "eval_files"):
            with collecting_errors(problems, f"--{name}: "):
                files = in_folders(getattr(self, name))
                files = [file for file in files if Path(file).suffix or not self.is_elsewhere(file)]  # else a folder
                problems += self.file_problems(name, SUFFIXES, files)
                if len(kinds := {file_kind(file): file for file in files}) > 1:
                    those = ", ".join(map(str, kinds.values()))
                    problems.append(f"--{name} must all be of one kind; these are not: {those}")
        return problems

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

    @property
    def origins(self) -> dict[str, str]:
        """Names of what each side of the rows is read from, for messages."""
        return {"train": self.source, "test": ", ".join(self.eval_files)}

    def read_rows(self) -> "dict[str, datasets.Dataset]":
        """Read the rows: training rows as `train`, and the rows of --eval_files, if given, as `test`.

        Raises:
            DataError: for rows that cannot be read.
        """
        files = {"train": self.train_files, "test": self.eval_files}
        rows = {side: self.read_files(named) for side, named in files.items() if named}
        return rows if self.train_files else {"train": read_split(self.row_datasets[0], self.train_split)} | rows

    def read_files(self, files: list[str]) -> "datasets.Dataset":
        """Read the rows of local files, all of one kind."""
        return read_files(in_folders(files))

    def is_heldout(self, row: dict, asked: str) -> bool:
        """Tell whether a row belongs to --heldout_share. `asked` is the column with the question to the model."""
        return not self.eval_files and falls_under(beginning(row, asked), self.heldout_share)

    def sides(self, rows: "dict[str, datasets.Dataset]", asked: str) -> "dict[str, datasets.Dataset]":
        """Split rows into `train` and `test`, and keep their order; with --eval_files, only look for repeated questions.

        `asked` is the column with the question to the model. Rows with the same question lie on the same side.

        Raises:
            ConfigError: if a side is empty, or if too many questions lie on both sides.
        """
        whole = rows["train"]
        if "test" not in rows:
            # `datasets` finds its result again by all values that the function holds: keep `self` out.
            share = self.heldout_share
            heldout = whole.select_columns([asked]).map(
                lambda rows: {"heldout": [falls_under(beginning({asked: text}, asked), share) for text in rows[asked]]},
                batched=True,
                remove_columns=[asked],
            )
            is_heldout = np.array(heldout["heldout"][:], dtype=bool)
            numbers = {"train": np.flatnonzero(~is_heldout), "test": np.flatnonzero(is_heldout)}
            rows = {name: whole.select(chosen) for name, chosen in numbers.items()}
        else:
            trained, evaluated = (
                [text_hash(beginning(row, asked)) for row in rows[name].select_columns([asked])]
                for name in ("train", "test")
            )
            if both := repeated(trained, evaluated):
                first = repr(beginning(rows["test"][both[0]], asked)[-60:])  # a conversation may begin as all others do
                check_apart(both, len(evaluated), f"begin as rows of {self.source} do", first)
                counted = f"{len(both):,} of {len(evaluated):,} rows of {self.origins['test']}"
                print_first(f"{counted} begin as rows to train on do; the first is {first}")
        for name, side in rows.items():
            if not len(side):
                hashes = [text_hash(beginning(row, asked)) for row in whole.select_columns([asked])]
                raise ConfigError(
                    f"none of {len(whole):,} rows is left to {'train' if name == 'train' else 'evaluate'} on: rows that "
                    f"begin alike lie on one side; {other_share(hashes, self.heldout_share)}, --eval_files, or more rows"
                )
        return rows


def repeated(trained: Iterable[int], evaluated: Sequence[int | None]) -> list[int]:
    """List the places of the rows to evaluate on whose hash is that of a row to train on."""
    common = {*evaluated}.intersection(trained)
    return [position for position, row in enumerate(evaluated) if row in common]


def check_apart(both: Sequence[int], evaluated: int, said: str, first: str) -> None:
    """Raise ConfigError if more than MOST_REPEATED of the rows of --eval_files, at the places `both`, are trained on too."""
    if len(both) > MOST_REPEATED * evaluated:
        raise ConfigError(
            f"{len(both):,} of {evaluated:,} rows of --eval_files {said}; remove them from one side (at most "
            f"{MOST_REPEATED:.0%} may lie on both); the first is {first}"
        )


def in_folders(files: list[str]) -> list[str]:
    """List files; replace a folder by the files in it and its subfolders, in the order of their names.

    Of a folder that `save_to_disk` of `datasets` wrote, these are the files of its one split.

    Raises:
        ConfigError: for a folder without files that can be read, or with several kinds or splits.
    """
    paths = []
    for name in files:
        splits = cache.saved_splits(name)
        if len(splits) > 1:
            raise ConfigError(
                f"the folder {name} holds the splits {', '.join(splits)}; name that of one, {name}/{min(splits)}"
            )
        paths += next(iter(splits.values()), None) or (
            files_of_folder(name, SUFFIXES) if Path(name).is_dir() else [name]
        )
    return paths


def beginning(row: dict, asked: str) -> str:
    """Return the question of a row: its messages up to the first answer, its prompt, or its whole text."""
    question = row[asked]
    if asked == "messages":
        question = list(itertools.takewhile(lambda message: message.get("role") != "assistant", question)) or question
    # Arrow adds nulls to messages with different fields. The hash of a row must not depend on other rows.
    return question if isinstance(question, str) else json.dumps(without_nulls(question), ensure_ascii=False)
