"""Settings of the site that `make docs` builds from the README and the pages, with references of arguments and functions.

The source directory is the repository, so that each link is the same on the site as in a clone.
"""

import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import reference

ROOT = Path(__file__).parents[1]

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


def mark_flags(app: Sphinx, page: str, template: str, context: dict, doctree: object) -> None:
    """Mark the flags of commands, inside which no line may end, and change the search on its page."""
    if page == "search":
        app.add_js_file("search.js")
    for part in ("body", "toc"):
        for code in {*re.findall(r"<pre>.*?</pre>|<code .*?</code>", context.get(part, ""), re.DOTALL)}:
            marked = re.sub(r"(?<![^\s>(])--?[a-z][\w-]*(?![^<]*>)", r'<span class="flag">\g<0></span>', code)
            context[part] = context[part].replace(code, marked)


def finish(app: Sphinx, error: Exception | None) -> None:
    """Lead from index.html, at which servers begin, to the README; keep the texts of pages for the search."""
    if error or app.builder.name != "html":
        return
    front = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">README</a>'
    (Path(app.outdir) / "index.html").write_text(front, encoding="utf-8")
    texts = {}
    for page in sorted(app.env.found_docs):
        html = (Path(app.outdir) / f"{page}.html").read_text(encoding="utf-8")
        text = html.partition('<article role="main"')[2].partition(">")[2].partition("</article>")[0]
        texts[f"{page}.html"] = re.sub(r'\s*<a class="headerlink".*?</a>|<[^>]*>', "", text, flags=re.DOTALL)
    (Path(app.outdir) / "_static/texts.js").write_text(f"const TEXTS = {json.dumps(texts)}\n", encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill)
    app.connect("html-page-context", mark_flags)
    app.connect("build-finished", finish)
