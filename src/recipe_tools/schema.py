"""Description of arguments for editors: JSON Schema."""

import math
from typing import Any

from accelerate_recipes.arguments.declaring import MAX_INT, FileOrSection, Merge, Range
from accelerate_recipes.arguments.help import TYPE_NAMES, Argument, recipe_parser, shown_arguments


def schema(args_class: type, title: str) -> dict[str, Any]:
    """Describe the presets of a recipe as JSON Schema (draft 2020-12); `x-group` is the group in --help.

    Source: https://json-schema.org/draft/2020-12
    """
    _, *known = shown_arguments(args_class, recipe_parser(args_class))  # the first is --config
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": {argument.name: as_schema(argument) for argument in known},
        "additionalProperties": False,
    }


def as_schema(argument: Argument) -> dict[str, Any]:
    """Describe an argument in JSON Schema. An empty value is as good as none, and one value as good as a list of one."""
    action, default = argument.action, argument.action.default
    found = {"description": action.help, "x-group": argument.group, "default": default}
    if isinstance(action, Merge):
        return found | {"type": ["object", "null"]}
    value: dict[str, Any] = {"type": TYPE_NAMES[argument.type][1]}
    if isinstance(action.choices, Range):
        bounds = {"minimum": action.choices.min, "maximum": action.choices.max}
        bounds |= {"exclusiveMinimum": action.choices.above, "exclusiveMaximum": action.choices.below}
        if argument.type is int:
            bounds["maximum"] = min(bounds["maximum"], MAX_INT)
        value |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    elif action.choices:
        value = {"enum": [*action.choices, *((True, False) if argument.is_switch else ())]}
    elif action.type is FileOrSection:
        value = {"type": ["string", "object"]}
    many = [{"type": "array", "items": value}] if action.nargs == "+" else []
    return found | {"anyOf": [value, *many, {"type": "null"}]}
