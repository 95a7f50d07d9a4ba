"""Answers of a model by step: samples.jsonl for programs, samples.html for people."""

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.disk import naming, read_json_lines, write_atomically
from accelerate_recipes.life.page import element, write_page
from accelerate_recipes.report.report import sample_table

MOST_STEPS = 200  # largest number of steps on the page; of more steps, it shows some, evenly spread


class Samples:
    """Writer of the answers in an output directory; use it only on rank 0.

    A resumed run continues after the answers of the checkpoint's step; later answers are dropped, and drawn again.
    """

    def __init__(self, output_dir: Path, resumed_from: Path | None):
        self.path = output_dir / "samples.jsonl"
        self.page = output_dir / "samples.html"
        last = step_of(resumed_from) if resumed_from else -1
        rows = read_json_lines(self.path) if self.path.exists() else []
        output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, "".join(as_line(row) for row in rows if row["step"] <= last))

    def add(self, step: int, source: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows with `prompt`, `completion` and `rewards`; `source` says which prompts they answer.

        `expected` in a row is what the rewards compare the answer with.
        """
        lines = [as_line({"step": step, "source": source} | row) for row in rows]
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def write_page(self) -> None:
        """Write all answers so far as one page, newest first."""
        steps = [list(group) for _, group in groupby(read_json_lines(self.path), key=lambda row: row["step"])]
        every = -(-len(steps) // MOST_STEPS) or 1
        rows = (row for step in steps[::-1][::every] for row in step)
        write_page(self.page, "Answers by step", [element("h1", "Answers by step"), sample_table(rows)])


def expected(row: dict[str, Any]) -> Any:
    """Return what the rewards may compare an answer with: the other columns of a row, or the value of the only one."""
    columns = {k: v for k, v in row.items() if k not in ("prompt", *SETTINGS) and v is not None}
    return next(iter(columns.values()), None) if len(columns) < 2 else columns


def as_line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"  # a column may hold a date, or bytes
