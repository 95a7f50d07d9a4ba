"""Pages of HTML: each is one file that needs no other, dark or light as the reader's system is, and all text is escaped."""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate_recipes.disk import write_atomically
from accelerate_recipes.errors import printable

STYLE = """
:root { color-scheme: light dark; --line: #ddd; --soft: #666; --good: #d9f2dc; --on-good: #0b4d1a; --mark: #a06c00; }
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --soft: #aaa; --good: #173d20; --on-good: #b5ecc0; --mark: #e0b040; }
  .chart { filter: invert(.9) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80em; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin: 2em 0 .4em; } h3 { font-size: 1em; margin: 1em 0 .2em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .2em .9em .2em 0; border-top: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } .sorts th { cursor: pointer; text-decoration: underline dotted; }
td:not(:first-child, .number) { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 7em; }
td.number { text-align: right; }
pre, .row { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.row { color: var(--soft); } .row span { border-right: 1px solid var(--line); }
.row .target { background: var(--good); color: var(--on-good); font-weight: 600; }
.special { outline: 1px solid var(--mark); color: var(--mark); } hr { border: 0; border-top: 1px dashed var(--soft); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22em), 1fr)); gap: 0 1.5em; }
svg, img { max-width: 100%; height: auto; } summary { cursor: pointer; }
"""
SORT = """document.addEventListener("click", event => {
  const head = event.target.closest(".sorts th");
  if (!head) return;
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const falls = head.dataset.falls = head.dataset.falls == 1 ? 0 : 1;
  const value = row => row.cells[column].textContent;
  const order = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  body.append(...[...body.rows].sort((a, b) => (falls ? -1 : 1) * order(value(a), value(b))));
});"""


class Html(str):
    """Text that is HTML; `element` escapes any other text."""


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """Write an element; of texts, control characters are shown. A name that Python reserves ends in an underscore."""
    given = "".join(
        f' {name.rstrip("_")}="{html.escape(str(value))}"' for name, value in attributes.items() if value != ""
    )
    inner = "".join(part if isinstance(part, Html) else html.escape(printable(str(part))) for part in content)
    return Html(f"<{tag}{given}>{inner}</{tag}>")


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, sorts: bool = False) -> Html:
    """Write a table; numbers stand at the right, None is a dash. If it `sorts`, a click on a head sorts the rows by it."""
    head = element("thead", element("tr", *(element("th", name) for name in heads))) if heads else Html()
    body = element("tbody", *(element("tr", *map(cell, row)) for row in rows))
    return element("div", element("table", head, body, class_="sorts" if sorts else ""), class_="wide")


def cell(value: Any) -> Html:
    is_number = value is None or isinstance(value, int | float)
    text = "-" if value is None else f"{value:.5g}" if isinstance(value, float) else value
    return element("td", text, class_="number" if is_number else "")


def picture(content: bytes, name: str, *, is_chart: bool = False) -> Html:
    """Write a PNG into the page; a chart is dark in the dark."""
    data = base64.b64encode(content).decode()
    tag = element("img", alt=name, src=f"data:image/png;base64,{data}", class_="chart" if is_chart else "")
    return Html(tag.removesuffix("</img>"))


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write a page whose body is `parts`, one after the other, which are HTML; `title` is a text.

    Its policy for browsers allows no network, and no script but the one that sorts: what is escaped wrongly does no harm.
    """
    script = base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
    head = (
        f'<!doctype html><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{policy}">'
        f'<meta name=viewport content="width=device-width"><title>{html.escape(printable(title))}</title>'
        f"<style>{STYLE}</style><script>{SORT}</script>"
    )
    text = "".join([head, *parts]) + "\n"
    write_atomically(path, text.encode("utf-8", "replace").decode())  # half a surrogate pair cannot be written
