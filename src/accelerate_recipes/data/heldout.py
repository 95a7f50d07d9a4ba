"""Rows to evaluate on: held out by a hash of what a row asks, so that no question lies on both sides."""

import itertools
import json

import datasets
import numpy as np

from accelerate_recipes.args import ConfigError
from accelerate_recipes.data.conversations import SETTINGS
from accelerate_recipes.data.files import falls_under


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
