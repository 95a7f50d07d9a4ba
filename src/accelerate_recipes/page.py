"""Pages of HTML that need no other file."""

import html
from collections.abc import Iterable
from pathlib import Path

from accelerate_recipes.disk import write_atomically


def write_page(path: Path, title: str, style: str, parts: Iterable[str]) -> None:
    """Write a page whose body is `parts`, one after the other, which are HTML; `title` is a text."""
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
    write_atomically(path, "".join([head, *parts]) + "\n")
