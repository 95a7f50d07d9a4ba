"""Answers of a model by step: samples.jsonl for programs, samples.html for people."""

import html
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.disk import naming, read_json_lines, write_atomically
from accelerate_recipes.page import write_page

MOST_STEPS = 200  # largest number of steps on the page; of more steps, it shows some, evenly spread
STYLE = """body { font: 15px/1.45 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100% } h2 { font-size: 1.05em; margin: 1.6em 0 .3em }
th, td { text-align: left; vertical-align: top; padding: .25em .7em; border-top: 1px solid #ddd }
td.text { white-space: pre-wrap; overflow-wrap: anywhere } td.number { text-align: right; white-space: nowrap }"""


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
        """Append rows with `prompt`, `completion` and `rewards`; `source` says which prompts they answer."""
        lines = [as_line({"step": step, "source": source} | row) for row in rows]
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def write_page(self) -> None:
        """Write all answers so far as one page, newest first."""
        rows = read_json_lines(self.path)
        groups = [(key, list(group)) for key, group in groupby(rows, key=lambda row: (row["step"], row["source"]))]
        every = -(-len(groups) // MOST_STEPS) or 1
        parts = ["<h1>Answers by step</h1>"]
        for (step, source), group in groups[::-1][::every]:
            names = list(group[0]["rewards"])
            heads = "".join(f"<th>{html.escape(name)}</th>" for name in ["prompt", "answer", *names])
            parts.append(f"<h2>Step {step}, {html.escape(source)}</h2><table><tr>{heads}</tr>")
            for row in group:
                texts = "".join(f"<td class=text>{html.escape(as_read(row[n]))}</td>" for n in ("prompt", "completion"))
                numbers = "".join(f"<td class=number>{number(row['rewards'][name])}</td>" for name in names)
                parts.append(f"<tr>{texts}{numbers}</tr>")
            parts.append("</table>")
        write_page(self.page, "Answers by step", STYLE, parts)


def as_line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def as_read(said: str | list[dict]) -> str:
    """Write a text, or the messages of a conversation, as people read it."""
    if isinstance(said, str):
        return said
    return "\n".join(f"{message['role']}: {message['content']}" for message in said)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
