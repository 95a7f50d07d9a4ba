"""Sizes of the project that may only fall: `python tests/ratchet.py` (`make ratchet`) writes lower ones into ratchet.json.

A change that must raise one writes the number by hand, and its commit says what the lines buy.
"""

import ast
import io
import json
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
FILE = Path(__file__).with_suffix(".json")
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def tokens_of_code(path: Path) -> list[tokenize.TokenInfo]:
    """Return the tokens of a file without comments, docstrings and layout."""
    found, before = [], None
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in LAYOUT:
            before = token.type if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE) else before
            continue
        begins = before in (None, tokenize.INDENT, tokenize.NEWLINE, tokenize.DEDENT)
        before = token.type
        if not (begins and token.type == tokenize.STRING and token.string.startswith('"""')):
            found.append(token)
    return found


def lines_of_code(path: Path) -> set[int]:
    """Return the numbers of the lines that are neither blank nor part of comments or docstrings."""
    return {line for token in tokens_of_code(path) for line in range(token.start[0], token.end[0] + 1)}


def imported(path: Path) -> Iterator[Path]:
    """Yield the files of our packages that a file imports, also inside functions, and for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for parts in (name.split(".") for name in names):
            for end in range(1, len(parts) + 1):  # the __init__ of a package runs too
                place = SRC.joinpath(*parts[:end])
                yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def reach(recipe: str) -> set[Path]:
    """Return the files that a recipe pulls in, with itself."""
    seen, todo = set(), [ROOT / f"recipes/{recipe}.py"]
    while todo:
        if (path := todo.pop()) not in seen:
            seen.add(path)
            todo += imported(path)
    return seen


def sizes() -> dict[str, int]:
    """Measure the project: modules that have code, lines of code, tokens, and lines of pages."""
    folders = {
        "library": SRC / "accelerate_recipes", "programs": SRC / "recipe_tools", "games": SRC / "chess_games",
        "recipes": ROOT / "recipes", "tests": ROOT / "tests",
    }  # fmt: skip
    groups: dict[str, Iterable[Path]] = {name: folder.rglob("*.py") for name, folder in folders.items()}
    groups |= {f"reach of {name}": reach(name) for name in ("template", "chess", "sft")}
    found = {}
    for name, paths in groups.items():
        lines = {path: len(lines_of_code(path)) for path in paths}
        found[f"{name}: modules"] = sum(map(bool, lines.values()))
        found[f"{name}: lines"] = sum(lines.values())
        if name == "library":
            found[f"{name}: tokens"] = sum(len(tokens_of_code(path)) for path in lines)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return found | {"pages: lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in pages)}


if __name__ == "__main__":
    most = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    most = {name: min(size, most.get(name, size)) for name, size in sizes().items()}
    FILE.write_text(json.dumps(most, indent=1) + "\n", encoding="utf-8")
