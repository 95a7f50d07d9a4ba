"""Settings of the site that `make docs` builds from the README and the pages, with references of arguments and functions.

The source directory is the repository, so that each link is the same on the site as in a clone.
"""

import json
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from html import escape, unescape
from itertools import cycle
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import reference

ROOT = Path(__file__).parents[1]
# Widest tables, in characters of the longest words of their columns, that fit into a telephone and into a page on a screen.
PHONE, DESK = 36, 88

project = "accelerate-recipes"
copyright = author = "the accelerate-recipes contributors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
root_doc = "README"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**.md"),
    *("slurm/README.md", "data/README.md", "benchmarks/results/**.md"),
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
default_role = "code"  # of docstrings
myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]  # raw numbers; a test compares docs/README.md with the pages
html_theme = "furo"
html_title = f"accelerate-recipes {version}"
html_copy_source = False
html_use_index = False
html_static_path = ["site.css", "search.js"]
html_css_files = ["site.css"]
smartquotes = False  # they make a dash of --


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what is generated: the contents of the site, or a reference."""
    if page == root_doc:
        source[0] += contents()
    for generate in (reference.arguments, reference.functions):
        place = f"<!-- make docs: {generate.__name__} -->"
        if place in source[0]:
            source[0] = source[0].replace(place, generate())


def contents() -> str:
    """Write the order of the pages, which docs/README.md decides."""
    found = ""
    for chapter in (ROOT / "docs/README.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, lines = chapter.partition("\n")
        links = re.findall(r"^- \[(.*?)\]\((.*?)\.md\)", lines, re.MULTILINE)
        pages = [f"{name} </{posixpath.normpath(posixpath.join('docs', link))}>" for name, link in links]
        found += "\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {title}\n", *pages, "```"])
    return found


def mark(app: Sphinx, page: str, template: str, context: dict, doctree: object) -> None:
    """Mark the flags of commands, inside which no line may end, and what tables need; change the search on its page."""
    if page == "search":
        app.add_js_file("search.js")
    for part in ("body", "toc"):
        for code in {*re.findall(r"<pre>.*?</pre>|<code .*?</code>", context.get(part, ""), re.DOTALL)}:
            marked = re.sub(r"(?<![^\s>(])--?[a-z][\w-]*(?![^<]*>)", r'<span class="flag">\g<0></span>', code)
            context[part] = context[part].replace(code, marked)
    if "body" in context:
        context["body"] = re.sub(
            r"<table .*?</table>", lambda found: fitted(found[0]), context["body"], flags=re.DOTALL
        )


def fitted(table: str) -> str:
    """Let names in a table end a line behind a mark; mark a wide table, and its cells with the heads of their columns."""

    def breakable(code: re.Match) -> str:
        parts = re.split(r'(<span class="flag">.*?</span>|<[^>]*>)', code[0])
        return "".join(part if part[:1] == "<" else re.sub(r"(?<=[_/.:=])(?=\w)", "<wbr>", part) for part in parts)

    table = re.sub(r"<code .*?</code>", breakable, table, flags=re.DOTALL)
    heads = [text_of(head) for head in re.findall(r"<th.*?>(.*?)</th>", table, re.DOTALL)]
    cells = [text_of(cell, " ").split() for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", table, re.DOTALL)]
    columns = [cells[number :: len(heads)] for number in range(len(heads))]
    width = sum(2 + max((len(word) for cell in column for word in cell), default=0) for column in columns)
    if len(heads) > 2:
        labels = cycle(heads)
        table = re.sub("<td", lambda _: f'<td data-label="{escape(next(labels))}"', table)
    return table.replace('class="', f'class="{"narrow " * (width <= PHONE)}{"wide " * (width > DESK)}', 1)


def text_of(html: str, gap: str = "") -> str:
    """Return the text of a part of a page, with `gap` where a line may end inside a word."""
    return unescape(re.sub(r"<[^>]*>", "", html.replace("<wbr>", gap))).strip()


def finish(app: Sphinx, error: Exception | None) -> None:
    """Lead from index.html, at which servers begin, to the README; write the sections of pages for the search."""
    if error or app.builder.name != "html":
        return
    front = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">README</a>'
    (Path(app.outdir) / "index.html").write_text(front, encoding="utf-8")
    sections = [section for page in sorted(app.env.found_docs) for section in sections_of(app, page)]
    (Path(app.outdir) / "_static/sections.js").write_text(
        f"const SECTIONS = {json.dumps(sections)}\n", encoding="utf-8"
    )


def sections_of(app: Sphinx, page: str) -> Iterator[list[str]]:
    """Yield address, title of the page, title and text of each section, and of each function of the reference."""
    kinds, no_text = (nodes.section, addnodes.desc), (nodes.title, nodes.comment, addnodes.desc_signature)
    part: Any
    for part in app.env.get_doctree(page).findall(lambda node: isinstance(node, kinds)):
        of_function = isinstance(part, addnodes.desc)
        head: nodes.Element = next(part.findall(addnodes.desc_signature if of_function else nodes.title))
        place = (head if of_function else part)["ids"][0]
        own = [
            leaf.astext()
            for leaf in part.findall(nodes.Text)
            if owner_of(leaf, kinds) is part and not owner_of(leaf, no_text)
        ]
        title = place.removeprefix("accelerate_recipes.") if of_function else head.astext()
        yield [f"{page}.html#{place}", app.env.titles[page].astext(), title, " ".join(" ".join(own).split())]


def owner_of(node: nodes.Node, kinds: tuple[type, ...]) -> nodes.Node | None:
    """Return the nearest node of these kinds around a node."""
    while node is not None and not isinstance(node, kinds):
        node = node.parent
    return node


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill)
    app.connect("html-page-context", mark)
    app.connect("build-finished", finish)
