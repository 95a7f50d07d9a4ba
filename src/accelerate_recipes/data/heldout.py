"""Rows to evaluate on: held out by a hash of what a row asks, so that no question lies on both sides."""

import itertools
import json

import datasets
import numpy as np

from accelerate_recipes.args import ConfigError
from accelerate_recipes.data.files import falls_under


def beginning(row: dict) -> str:
    """Return what a row asks the model: the messages up to the first answer, the prompt, or the whole text."""
    (asked,) = (row[name] for name in sorted(row) if name != "completion")
    if "messages" in row:
        asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", asked)) or asked
    return asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)


def split(rows: datasets.Dataset, share: float) -> datasets.DatasetDict:
    """Split rows with a `prompt`, a text or messages, by its hash into `train` and `test`, in their order.

    Raises:
        ConfigError: if a side is empty.
    """
    prompts = rows.select_columns(["prompt"])
    heldout = prompts.map(lambda row: {"heldout": falls_under(beginning(row), share)}, remove_columns=["prompt"])
    heldout = np.array(heldout["heldout"][:], dtype=bool)
    sides = {name: rows.select(np.flatnonzero(chosen)) for name, chosen in (("train", ~heldout), ("test", heldout))}
    for name, side in sides.items():
        if not len(side):
            raise ConfigError(
                f"of {len(rows):,} rows none is left to {'train' if name == 'train' else 'evaluate'} on: rows with the "
                f"same prompt lie on one side; change --heldout_share {share}, or give more rows"
            )
    return datasets.DatasetDict(sides)  # pyright: ignore[reportCallIssue]
