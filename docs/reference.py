"""Reference of the site: tables of arguments, from the recipes' dataclasses, and the functions that recipes use."""

import ast
import dataclasses
import types
import typing
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.flags import Range
from accelerate_recipes.recipe import load

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src/accelerate_recipes"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def arguments() -> str:
    """Write tables of the arguments: those of all recipes, then those of each, by the class that declares them."""
    shared = {field.name for field in dataclasses.fields(TrainArgs)}
    parts = ["## All recipes", *tables(TrainArgs, shared)]
    for recipe in RECIPES:
        args = load(recipe).Args
        own = {field.name for field in dataclasses.fields(args)} - shared - args.owned_elsewhere.keys()
        changed = [f"`--{name}` {code(getattr(args(), name))}" for name in sorted(shared) if is_other(args, name)]
        defaults = [f"Defaults of this recipe: {', '.join(changed)}."] if changed else []
        parts += [f"## {recipe.name}", *defaults, *tables(args, own)]
    return "\n\n".join(parts)


def is_other(args: type[TrainArgs], name: str) -> bool:
    """Tell whether a recipe has another default for an argument that all recipes share."""
    return getattr(args(), name) != getattr(TrainArgs(), name)


def tables(args: type[TrainArgs], names: Iterable[str]) -> list[str]:
    """Write a table for each class that declares some of the arguments; the classes of the recipe come first."""
    rows = defaultdict(list)
    declared = dataclasses.fields(args)
    for field in (field for field in declared if field.name in {*names}):
        rows[next(c for c in reversed(args.__mro__) if field.name in vars(c).get("__annotations__", {}))].append(field)
    found = []
    for owner in sorted(rows, key=args.__mro__.index):
        lines = [row_of(args, field) for field in rows[owner]]
        head = f"### {owner.__qualname__} ({owner.__module__.removeprefix('accelerate_recipes.')})"
        head = "### Of this recipe" if owner.__module__.startswith("recipe_") else head
        found += [head, "\n".join(["| argument | default | values | |", "|---|---|---|---|", *lines])]
    return found


def row_of(args: type[TrainArgs], field: dataclasses.Field) -> str:
    """Write the row of an argument."""
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # pyright: ignore
    choices = args.ranges.get(field.name, field.metadata.get("choices"))
    values = name_of(field.type)
    if choices:
        values = f"{values}, {choices}" if isinstance(choices, Range) else ", ".join(map(str, choices))
    cells = [f"`--{field.name}`", code(default), values, field.metadata.get("help")]
    return f"| {' | '.join(' '.join(str(cell or '').replace('|', chr(92) + '|').split()) for cell in cells)} |"


def name_of(kind: Any) -> str:
    """Write a type as a reader of a command line knows it."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(name_of(part) for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is list:
        return f"several {name_of(typing.get_args(kind)[0])}"
    names = {int: "number", float: "number", str: "text", bool: "true or false", dict: "NAME=VALUE ..."}
    return names.get(typing.get_origin(kind) or kind, str(getattr(kind, "__name__", kind)))


def code(value: Any) -> str:
    """Write a default value as one types it."""
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, list):
        return f"`{' '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def functions() -> str:
    """Write directives for the functions and classes of the library that recipes import."""
    used = defaultdict(set)
    for recipe in RECIPES:
        for node in ast.walk(ast.parse(recipe.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accelerate_recipes."):
                folder = LIBRARY.joinpath(*node.module.split(".")[1:])
                names = {alias.name for alias in node.names if not (folder / f"{alias.name}.py").is_file()}
                used[node.module] |= {name for name in names if not name.endswith("Args")}
    parts = []
    for module in sorted(name for name in used if used[name]):
        members = ", ".join(sorted(used[module]))
        parts.append(f"## {module.removeprefix('accelerate_recipes.')}")
        parts.append(f"```{{eval-rst}}\n.. automodule:: {module}\n   :members: {members}\n```")
    return "\n\n".join(parts)
