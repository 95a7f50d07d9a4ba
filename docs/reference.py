"""Reference of the site: tables of arguments, from the recipes' dataclasses, and the functions that recipes use."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments.help import GROUPS, Argument, recipe_parser, shown_arguments
from accelerate_recipes.arguments.shipped import load

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def arguments() -> str:
    """Write the arguments of each recipe, as `--help all` does, by group; what is the same in all is written once."""
    of_recipes = {recipe.name: described(load(recipe).Args) for recipe in RECIPES}
    everywhere = set.intersection(*map(set, of_recipes.values()))
    parts = ["## All recipes", *tables(of_recipes[RECIPES[0].name], everywhere)]
    for name, lines in of_recipes.items():
        parts += [f"## {name}", *tables(lines, set(lines) - everywhere)]
    return "\n\n".join(parts)


def described(args_class: type[TrainArgs]) -> dict[tuple[str, str], None]:
    """Describe the arguments of a recipe, in the order of `--help`: each group, and a row of a table."""
    known = shown_arguments(args_class, recipe_parser(args_class))
    return dict.fromkeys((argument.group, row_of(argument)) for argument in known)


def row_of(argument: Argument) -> str:
    """Write the row of an argument."""
    said = argument.text(everything=True).replace("|", "\\|")
    return f"| `{argument.flags}` | {' '.join(said.split())} |".replace("true|false", "true\\|false")


def tables(lines: Iterable[tuple[str, str]], wanted: set[tuple[str, str]]) -> list[str]:
    """Write a table for each group that has some of the wanted lines."""
    found = []
    for group, title in GROUPS.items():
        rows = [row for of, row in lines if of == group and (of, row) in wanted]
        found += [f"### {title}", "\n".join(["| argument | |", "|---|---|", *rows])] if rows else []
    return found


def functions() -> str:
    """Write directives for the functions and classes of the library that recipes import."""
    used = defaultdict(set)
    for recipe in RECIPES:
        for node in ast.walk(ast.parse(recipe.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("accelerate_recipes.", "chess_games.")
            ):
                folder = SRC.joinpath(*node.module.split("."))
                names = {alias.name for alias in node.names if not (folder / f"{alias.name}.py").is_file()}
                used[node.module] |= {name for name in names if not name.endswith("Args")}
    parts = []
    for module in sorted(name for name in used if used[name]):
        members = ", ".join(sorted(used[module]))
        parts.append(f"## {module.removeprefix('accelerate_recipes.')}")
        parts.append(f"```{{eval-rst}}\n.. automodule:: {module}\n   :members: {members}\n```")
    return "\n\n".join(parts)
