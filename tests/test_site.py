"""Tests of the site that `make docs` builds: all pages, no outside resources, no dead links, no picture missing or too wide."""

import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from helpers import REPOSITORY, environment

from accelerate_recipes.arguments.help import recipe_parser, shown_arguments
from accelerate_recipes.arguments.shipped import load

WIDTHS = (360, 1280, 1400)
# Loads each page in a frame of each width, and posts what is wrong as JSON.
INSPECTION = """<!doctype html><body><script>
async function inspect(page, width) {
  const frame = document.createElement("iframe")
  frame.style = `width: ${width}px; height: 900px; border: 0`
  frame.src = page
  await new Promise(done => { frame.onload = done; document.body.append(frame) })
  const inner = frame.contentDocument, root = inner.documentElement, found = []
  for (const image of inner.images) {
    image.loading = "eager"
    await image.decode().catch(() => found.push(`broken picture ${image.getAttribute("src")}`))
  }
  if (root.scrollWidth > width) found.push(`${root.scrollWidth} pixels wide`)
  for (const part of inner.querySelectorAll(".content, .toc-drawer")) {  // a fixed one slides in when it is asked for
    const cut = part.getBoundingClientRect().right - width
    if (cut > 1 && frame.contentWindow.getComputedStyle(part).position != "fixed") found.push(`${part.className} is cut`)
  }
  for (const code of inner.querySelectorAll("pre"))
    if (code.scrollWidth > code.clientWidth + 1 && !code.closest(".highlight-text")) found.push(`cut: ${code.innerText}`)
  for (const table of inner.querySelectorAll(".table-wrapper"))
    if (table.scrollWidth > table.clientWidth + 1) found.push(`cut: ${table.innerText}`)
  for (const flag of inner.querySelectorAll(".flag"))
    if (flag.getClientRects().length > 1) found.push(`in two lines: ${flag.innerText}`)
  const isDark = image => frame.contentWindow.getComputedStyle(image).filter != "none"
  const charts = [...inner.images].filter(image => !image.src.endsWith("_images.png"))
  for (const image of charts) if (isDark(image)) found.push(`dark in the light: ${image.src}`)
  for (const [theme, scheme] of [["dark", "light"], ["auto", "dark"]]) {
    inner.body.dataset.theme = theme
    frame.style.colorScheme = scheme
    for (const image of charts) if (!isDark(image)) found.push(`white in the dark, by ${scheme}: ${image.src}`)
  }
  if (!root.innerText.trim()) found.push("empty")
  frame.remove()
  return found.map(problem => `${page} at ${width}: ${problem}`)
}
(async () => {
  const found = []
  for (const page of PAGES) for (const width of WIDTHS) found.push(...await inspect(page, width))
  await fetch("found", {method: "POST", body: JSON.stringify(found)})
})()
</script>"""


class Page(HTMLParser):
    """Links of a page, places in it, and resources that it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.places, self.resources = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.places.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        if tag in ("script", "img", "link", "iframe", "source"):
            self.resources.add(found.get("src") or found.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Folder of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    (command,) = re.findall(r"^\t\$\(BIN\)/sphinx-build (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    command = command.replace(".cache/doctrees", str(folder / "trees"))
    words = command.replace(".cache/site", str(folder / "html")).split()
    run = [sys.executable, "-m", "sphinx", *words]
    done = subprocess.run(run, cwd=REPOSITORY, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


def test_a_page_has_its_name_in_the_menu():
    listed = re.findall(r"^- \[(.*?)\]\((.*?\.md)\)", (REPOSITORY / "docs/README.md").read_text(), re.MULTILINE)
    titles = {path: (REPOSITORY / "docs" / path).read_text().partition("\n")[0].replace("`", "") for _, path in listed}
    assert [(name, titles[path]) for name, path in listed if name.lower() not in titles[path].lower()] == []


def test_each_page_is_in_the_contents():
    pages = {path.relative_to(REPOSITORY / "docs") for path in REPOSITORY.glob("docs/**/*.md")} - {Path("README.md")}
    listed = re.findall(r"^- \[.*?\]\((.*?)\)", (REPOSITORY / "docs/README.md").read_text(), re.MULTILINE)
    assert len(listed) == len({*listed}) and pages == {Path(name) for name in listed if not name.startswith("../")}


def test_each_page_has_a_title():
    pages = [*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "benchmarks/results").rglob("*.md")]
    assert [page for page in pages if not page.read_text().startswith("# ")] == []


@pytest.mark.slow
def test_site_is_whole(site):
    """Links lead to a page, and to a place in it; nothing is loaded from elsewhere; each argument is in the reference."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 40
    dead = []
    for path, page in pages.items():
        for link in page.links | page.resources:
            name, _, place = unquote(link).partition("#")
            if re.match(r"(https?:|mailto:|data:)", link):
                assert link not in page.resources, link
                continue
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    text = (site / "docs/arguments.html").read_text()
    for recipe in (REPOSITORY / "recipes").glob("*.py"):
        args = load(recipe).Args
        known = [argument.flags.split()[0].strip(",") for argument in shown_arguments(args, recipe_parser(args))]
        assert [flag for flag in known if f">{flag}<" not in text] == []
    assert "accelerate_recipes.engine.train" in (site / "docs/functions.html").read_text()
    code = re.findall(r"<pre>.*?</pre>|<code .*?</code>", "".join(path.read_text() for path in pages), re.DOTALL)
    assert sum(text.count('<span class="flag">--') for text in code) > 1000
    assert [text for text in code if re.search(r"[\s>]--[a-z]", text.replace('<span class="flag">--', ""))] == []
    version = re.search(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"accelerate-recipes {version}" in (site / "README.html").read_text()


class Site(SimpleHTTPRequestHandler):
    """Serves the site, and puts what the browser posts into a queue."""

    def __init__(self, *args, posted: queue.SimpleQueue, **options):
        self.posted = posted
        super().__init__(*args, **options)

    def do_POST(self):
        self.posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def browser() -> list[str]:
    """Return the command of a browser without a window."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    return [chromium, "--headless", "--no-sandbox", "--disable-gpu"]


def inspect(folder: Path, pages: list[str], tmp_path: Path) -> list[str]:
    """List what a browser finds wrong on pages of a folder."""
    script = INSPECTION.replace("of PAGES", f"of {json.dumps(pages)}").replace("of WIDTHS", f"of {[*WIDTHS]}")
    (folder / "inspection.html").write_text(script)
    posted = queue.SimpleQueue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(folder), posted=posted)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = "--remote-debugging-port=0"  # else it ends at once
        address = f"http://127.0.0.1:{server.server_port}/inspection.html"
        run = [*browser(), port, f"--user-data-dir={tmp_path / 'profile'}", address]
        with (tmp_path / "browser.log").open("w") as log, subprocess.Popen(run, stdout=log, stderr=log) as started:
            try:
                return posted.get(timeout=400)
            finally:
                started.terminate()
                server.shutdown()


@pytest.mark.long
def test_site_in_a_browser(site, tmp_path):
    """On a telephone and on a screen, no picture is broken or white in the dark, no page wider than its window, no code or
    table cut.
    """
    broken = site / "broken.html"
    narrow = '<div style="width: 1em"><span class="flag">--a b</span><pre style="overflow: auto">cut off</pre></div>'
    table = '<div class="table-wrapper" style="overflow: auto; width: 1em"><table><tr><td>cut</td></tr></table></div>'
    dark = '<img src="_static/file.png" style="filter: invert(1)">'
    broken.write_text(f'<img src="none.png"><div style="width: 2000px">wide</div>{narrow}{table}{dark}')
    found = inspect(site, ["broken.html"], tmp_path)
    assert len(found) == 8 * len(WIDTHS)  # the inspection sees what is wrong
    broken.unlink()
    found = [path for path in site.rglob("*.html") if path.name not in ("index.html", "inspection.html")]
    pages = sorted(str(path.relative_to(site)) for path in found)
    assert inspect(site, pages, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("words, first", [
    ("mirror", "docs/mirrors.html#mirrors"),
    ("or_resume", "docs/functions.html#accelerate_recipes.models.tokenizers.make_or_resume"),
    ("learning rate", None),
    ("rate", None),  # no part of another word
    ("zzzz", None),
])  # fmt: skip
def test_search_of_a_folder(words, first, site, tmp_path):
    """Without a server, a search shows sections, first those that hold the words most, each with the place where they stand."""
    address = f"{(site / 'search.html').as_uri()}?q={quote(words)}"
    run = [*browser(), f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom", address]
    shown = subprocess.run(run, capture_output=True, text=True, timeout=300).stdout
    found = re.findall(r'<li><a href="(.*?)">(.*?)</a><p class="context">(.*?)</p></li>', shown, re.DOTALL)
    assert found if words != "zzzz" else "No sections with zzzz" in shown
    assert first in (None, *[address for address, _, _ in found[:1]])
    for address, _, context in found[:20]:
        name, _, place = address.partition("#")
        assert place in Page((site / name).read_text()).places
        marked = re.findall(r'(.)<span class="highlighted">(.*?)</span>', f" {context}")
        begins = ("mirr", "or_", "learn", "rate")
        assert all(not before.isalnum() and word.lower().startswith(begins) for before, word in marked)
    if words == "learning rate":
        assert all("rate" in context.lower() and "learn" in context.lower() for _, _, context in found[:5])
