"""Messages that a column holds as JSON texts, as the cells of a CSV or Parquet file do."""

import json
import re
from collections.abc import Sequence
from typing import Any

import datasets

from accelerate_recipes.data.conversations import TEXT
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.messages import ROLES, messages_of, text_in
from accelerate_recipes.errors import DataError

LISTS = ("messages", "conversations")  # columns that never hold a text
TEXTS = (TEXT, datasets.Value("large_string"))
ANY = datasets.List(datasets.Json())
EITHER = ("prompt", "completion", "chosen", "rejected")  # columns that hold texts or messages
# How a text begins that holds messages, written by JSON or by Python: other JSON, such as an answer of a task, stays a text.
WRITTEN = re.compile(
    rf"""\s*\[?\s*\{{\s*(?=.*["'](role|from)["']\s*:\s*["']({"|".join(ROLES)}|developer)["'])"""
    r"""(?=.*["'](content|value|tool_calls)["']\s*:)["']""",
    re.DOTALL,
)


def read_prompts(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Return rows whose `prompt` is a text or messages; messages may be written as JSON texts.

    Raises:
        DataError: for rows without such a column, and for the first row without a prompt.
    """
    if "prompt" in rows.column_names and is_json(rows := with_texts(rows, ["prompt"]), "prompt"):
        features = datasets.Features(rows.features | {"prompt": ANY})
        rows = rows.map(read_prompt, with_indices=True, fn_kwargs={"source": source}, features=features)
    check_texts_or_messages(rows, {"prompt"}, source)
    return rows


def read_prompt(row: dict, index: int, source: str) -> dict[str, list[dict]]:
    try:
        return {"prompt": messages_of({"prompt": from_json(row, "prompt")}, "prompt", "user")}
    except ValueError as error:
        raise DataError(f"{source}, row {index + 1}: {error}") from None


def with_texts(rows: datasets.Dataset, names: Sequence[str]) -> datasets.Dataset:
    """Turn those of some columns that are of Arrow's type JSON, and hold nothing but texts, into columns of texts."""
    of_json = [name for name in names if rows.features[name] == datasets.Json()]
    stored = [name for name in of_json if all(isinstance(value, str) for value in rows[name])]
    if not stored:
        return rows
    features = datasets.Features(rows.features | dict.fromkeys(stored, TEXT))
    return rows.map(lambda row: {name: row[name] for name in stored}, features=features)


def is_json(rows: datasets.Dataset, name: str) -> bool:
    """Tell whether a column of texts holds messages as JSON, as its first text shows; for lists of messages it must."""
    if rows.features[name] not in TEXTS:
        return False
    return name in LISTS or (name in EITHER and bool(WRITTEN.match(next((text for text in rows[name] if text), ""))))


def from_json(row: dict, name: str) -> Any:
    """Read the messages of a column that holds them as JSON texts, as a cell of a CSV file must."""
    if row[name] is None:
        return None
    try:
        found = json.loads(text_in(row, name))
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, list | dict):
        by_python = "; Python's str() wrote it, write it by json.dumps()" if re.match(r"\W*'", row[name]) else ""
        raise ValueError(f"{name!r} is {row[name]!r:.60}, not messages as JSON{by_python}")
    return found
