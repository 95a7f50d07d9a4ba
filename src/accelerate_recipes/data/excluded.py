"""Rows that --exclude_rows names: each leaves its place in a batch empty, and no other row moves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate_recipes.errors import ConfigError


def excluded_rows(file: str, names: tuple[str, ...] = ()) -> set:
    """Read the rows that a file names, from each list `rows` in it; no file names none.

    The file is JSON, or JSON Lines: skipped.jsonl or non_finite.json of a run, or one that a person writes, such as
    {"rows": [17, 23]}. Rows are numbers, or with `names`, such as epoch and place, lists of as many numbers.

    Raises:
        ConfigError: for a file that is no JSON, names no row, or names rows of another kind.
    """
    if not file:
        return set()
    said = f"--exclude_rows {file}"
    text = Path(file).read_text(encoding="utf-8")
    try:
        try:
            records = [json.loads(text)]
        except json.JSONDecodeError:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{said} is neither JSON nor JSON Lines: {error}") from None
    rows = [tuple(row) if isinstance(row, list) else row for row in rows_under(records)]
    if not rows:
        raise ConfigError(f'{said} names no row; it needs lists of rows, such as {{"rows": [17, 23]}}')
    kind = f"a list of {', '.join(names)}" if names else "a number"
    wanted = [int] * len(names) if names else int
    for row in rows:
        if ([*map(type, row)] if isinstance(row, tuple) else type(row)) != wanted:
            raise ConfigError(f"{said} names the row {json.dumps(row)}; with these data, a row is {kind}")
    return set(rows)


def rows_under(found: Any) -> Iterator[Any]:
    """Yield the entries of each list that stands under "rows"."""
    if isinstance(found, dict) and isinstance(found.get("rows"), list):
        yield from found["rows"]
    elif isinstance(found, dict | list):
        for part in found.values() if isinstance(found, dict) else found:
            yield from rows_under(part)
