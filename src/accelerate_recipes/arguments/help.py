"""Descriptions of arguments: --help in groups."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import string_to_bool

from accelerate_recipes.arguments.declaring import Merge, Parser, Range, declarations

# In the order of --help. The rare ones are shown by `--help all`.
GROUPS = {
    "essential": "What most runs set",
    "model": "Model",
    "data": "Data",
    "task": "This task",
    "batch": "Batch and length of the training",
    "optimizer": "Optimizer",
    "memory": "Precision and memory",
    "evaluation": "Evaluation",
    "saving": "Saving",
    "logging": "Logging",
    "adapters": "Adapters",
    "job": "Job (- and _ in names are the same)",
    "rare": "Rare",
}
# Types of the values, in --help and in JSON Schema.
TYPE_NAMES = {
    int: ("N", "integer"), float: ("X", "number"), string_to_bool: ("", "boolean"),
    str: ("TEXT", ["string", "number", "boolean"]),  # a preset is read as text, so a text may look like a number in YAML
}  # fmt: skip
COLUMN = 32  # where the help texts begin


@dataclass(frozen=True)
class Argument:
    """An argument of a recipe, as its parser reads it."""

    group: str
    action: argparse.Action

    @property
    def name(self) -> str:
        return self.action.dest

    @property
    def is_switch(self) -> bool:
        """Tell whether the flag needs no value."""
        return self.action.nargs == "?"

    @property
    def type(self) -> Any:
        """Type of a value, or of each in a list: a key of TYPE_NAMES."""
        return self.action.type if self.action.type in TYPE_NAMES else str

    @property
    def flags(self) -> str:
        """Write the flag with its value, once."""
        if isinstance(self.action, Merge):
            return f"--{self.name} NAME=VALUE ..."
        if self.is_switch:
            return f"--{self.name}" + (f", --no_{self.name}" if self.action.default is True else "")
        value = self.action.metavar or ("true|false" if self.type is string_to_bool else TYPE_NAMES[self.type][0])
        return f"--{self.name} {value}{' ...' if self.action.nargs == '+' else ''}"

    def text(self, *, everything: bool) -> str:
        """Write the help with choices and default; without `everything` only its first sentence, and no range of numbers."""
        description, choices, default = self.action.help or "", self.action.choices, self.action.default
        if not everything:
            description = re.split(r"(?<=\.) (?=[A-Z`-])", description)[0]
        notes = []
        if choices and (everything or not isinstance(choices, Range)):
            notes.append(str(choices) if isinstance(choices, Range) else ", ".join(map(str, choices)))
        if default not in (None, "", [], {}) and default is not False:
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            notes.append(f"default: {'true' if default is True else shown}")
        return description + (f" ({'; '.join(notes)})" if notes else "")


def recipe_parser(args_class: type) -> Parser:
    """Make the parser of a recipe's arguments, which hides those that something else decides, and deprecated ones.

    It does not exit at the first error, and allows no abbreviations: `--learning` must not silently mean --learning_rate.
    """
    parser = Parser(args_class, allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--config", metavar="FILE", help="Preset: a YAML file with arguments; flags override it.")
    for action in parser._actions:
        action.choices = args_class.ranges.get(action.dest, action.choices)
        if action.dest in args_class.owned_elsewhere or (action.help or "").startswith("Deprecated"):
            action.help = argparse.SUPPRESS
    return parser


def group_of(args_class: type, name: str) -> str:
    """Find the group of an argument: from its declaration by `arg`, from `groups` of the arguments, or from its class.

    A recipe's own arguments belong to the task; fields of another library that `groups` does not name are rare.
    """
    owners = [(owner, meta) for owner, meta in declarations(args_class, name) if "group" in meta]
    if groups := [meta["group"] for _, meta in owners if meta["group"]]:
        return groups[0]
    if name in args_class.groups:
        return args_class.groups[name]
    return next((vars(owner)["group"] for owner, _ in owners if "group" in vars(owner)), "task" if owners else "rare")


def shown_arguments(args_class: type, parser: Parser) -> Iterator[Argument]:
    """Describe each argument that a user may give, once, in the order of the groups."""
    shown = {action.dest: action for action in reversed(parser._actions) if action.help != argparse.SUPPRESS}
    config = shown.pop("config")
    names = sorted(reversed(shown), key=[*args_class.groups, *reversed(shown)].index)
    yield Argument("essential", config)
    for group in GROUPS:
        yield from (Argument(group, shown[name]) for name in names if group_of(args_class, name) == group)


def help_text(args_class: type, parser: Parser, *, everything: bool) -> str:
    """Write the help of a recipe. Without `everything`, the rare arguments, and the ranges of numbers, are left out."""
    width = min(shutil.get_terminal_size().columns, 120)
    known = list(shown_arguments(args_class, parser))
    shown = [argument for argument in known if everything or argument.group != "rare"]
    usage = args_class.usage.replace(" RECIPE [FLAGS]", f" {sys.argv[0]} [FLAGS]")
    lines = [f"usage: {f'{sys.argv[0]} RECIPE [FLAGS]' if sys.argv[0].endswith(' prepare') else usage}"]
    for group, title in GROUPS.items():
        members = [argument for argument in shown if argument.group == group]
        lines += ["", f"{title}:"] if members else []
        for argument in members:
            text = textwrap.wrap(argument.text(everything=everything), width - COLUMN, break_on_hyphens=False)
            flags = f"  {argument.flags}"
            text = ["", *text] if len(flags) >= COLUMN else text
            lines += [f"{flags:{COLUMN}}{text[0]}".rstrip(), *(" " * COLUMN + line for line in text[1:])]
    more = f"`--help all` shows {len(known) - len(shown)} more, whole texts, and the ranges of numbers."
    return "\n".join([*lines, *([] if everything else ["", more])])
