"""Strict parser of presets and command lines: it finds every problem, and never changes the meaning of a value silently."""

import argparse
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NewType, get_args, get_type_hints

import transformers
import yaml
from transformers import HfArgumentParser, PreTrainedConfig

from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.names import meaning
from accelerate_recipes.errors import ConfigError, closest

VERY_NEAR = 0.85  # so that a misspelt name is recognised, and another name is not taken for one
MAX_INT = 2**31 - 1  # small enough for numpy and torch, also for a seed plus step and rank, and a product of two sizes

# Type of an argument that names a YAML file. A preset may hold its content instead, a section, which is kept as JSON.
FileOrSection = NewType("FileOrSection", str)


@dataclass(frozen=True)
class Range:
    """Allowed values of a numeric argument: finite, and within the bounds. argparse gets a Range as `choices`."""

    min: float = -math.inf
    max: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def problem(self, number: float) -> str:
        """Say what a number that is not in the range must be; "" for one that is."""
        if not math.isfinite(number):
            return "it must be a finite number"
        if isinstance(number, int) and number > min(self.max, MAX_INT):
            return f"it must be at most {min(self.max, MAX_INT)}"
        is_inside = self.min <= number <= self.max and self.above < number < self.below
        return "" if is_inside else f"it must be {self}"

    def __str__(self) -> str:
        bounds = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        return ", and ".join(f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)) or "finite"

    def __iter__(self) -> Iterator[str]:
        yield str(self)  # shown by --help


def arg(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | Range | None = None,
    fixed: bool | None = None,
    group: str | None = None,
    **bounds: float,
) -> Any:
    """Declare a dataclass field with its help text, as HfArgumentParser reads it. `bounds` of a number are those of `Range`.

    A `fixed` argument must not change when a checkpoint is continued, because it decides the model, the order of the
    data, or the optimizer's state. By default, the fields of a recipe are fixed, and those of TrainArgs are not.

    `group` is the place in --help, one of `help.GROUPS`. By default, it is that of the class.
    """
    metadata = {"help": help, "fixed": fixed, "group": group}
    if choices or bounds:
        metadata["choices"] = choices or Range(**bounds)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def declarations(args_class: type, name: str) -> Iterator[tuple[type, Mapping[str, Any]]]:
    """Yield each class that declares a field, with the field's metadata; a class that only changes the default has none."""
    for owner in args_class.__mro__:
        if name in inspect.get_annotations(owner):
            yield owner, owner.__dataclass_fields__[name].metadata


class Parser(HfArgumentParser):
    """HfArgumentParser that accepts a Range as `choices`, and the other metadata that `arg` sets.

    A field whose default a class changes keeps the help and the range of the class that declares it.
    """

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument without the metadata of its field that argparse does not know; HfArgumentParser passes on all."""
        dest = settings.get("dest", names[0].removeprefix("--"))
        for args_class in self.dataclass_types:
            metadata = next((meta for _, meta in declarations(args_class, dest) if "help" in meta), {})
            settings = {key: metadata[key] for key in ("help", "choices") if key in metadata} | settings
        settings = {key: value for key, value in settings.items() if key not in ("fixed", "group")}
        if "true" in (settings.get("choices") or ()):
            settings |= {"nargs": "?", "const": "true", "type": str.lower}  # as a switch: without a value, and True
        if settings.get("type") is dict:
            settings |= {"type": settings_in, "nargs": "+", "action": Merge}
        return super().add_argument(*names, **settings)

    def may_be_none(self, action: argparse.Action) -> bool:
        """Tell whether None is another value of a field than its default, such as of trl's `max_length`: `none`."""
        if action.type is not int or action.default is None:
            return False
        # HfArgumentParser takes None out of the types of the fields.
        return any(type(None) in get_args(get_type_hints(one).get(action.dest)) for one in self.dataclass_types)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        is_none = arg_string.lower() == "none" and self.may_be_none(action)
        return None if is_none else super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is None and self.may_be_none(action):
            return
        if not isinstance(action.choices, Range):
            super()._check_value(action, value)
        elif problem := action.choices.problem(value):
            raise ValueError(problem)


class Merge(argparse.Action):
    """Action that adds NAME=VALUE to a mapping which the preset may have begun."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        merged = getattr(namespace, self.dest)
        for name, value in (item for setting in values for item in setting.items()):
            # A new section replaces its fields that were set before. A new field replaces a section that was set as a whole.
            merged = {
                n: v for n, v in merged.items() if not f"{n}.".startswith(f"{name}.") and not name.startswith(f"{n}.")
            }
            merged[name] = value
        setattr(namespace, self.dest, merged)


def settings_in(text: str) -> dict[str, Any]:
    """Read NAME=VALUE, where the value is YAML. The names in a section become dotted names."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return with_dots(name, yaml.load(value, Values))
    except (yaml.YAMLError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"the value in {text!r} is not YAML: {error}") from error


def with_dots(name: str, value: Any) -> dict[str, Any]:
    """Turn a section into a flat mapping: `a` and {"b": 1} into {"a.b": 1}."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {dotted: leaf for key, inner in value.items() for dotted, leaf in with_dots(f"{name}.{key}", inner).items()}


def group_flags(argv: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Split `--a 1 --b=2 3` into [("--a", ["1"]), ("--b", ["2", "3"])] and the words before the first flag."""
    groups: list[tuple[str, list[str]]] = []
    stray = []
    for token in argv:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(token)
        else:
            stray.append(token)
    return groups, stray


def words_of(parser: argparse.ArgumentParser, groups: Sequence[tuple[str, list[str], str]]) -> list[str]:
    """Write flags, each with its values and place, for argparse, for which the last one counts.

    The values of a list add up if one place gives it several times; a later place replaces those of an earlier one.
    """
    joined: dict[Any, tuple[str, list[str]]] = {}
    for number, (flag, values, where) in enumerate(groups):
        action = parser._option_string_actions[flag]
        key = (action.dest, where) if action.nargs == "+" and not isinstance(action, Merge) else number
        joined.setdefault(key, (flag, []))[1].extend(values)
    return [word for flag, values in joined.values() for word in tokens(flag, values)]


def tokens(flag: str, values: Sequence[str]) -> list[str]:
    """Join a flag and its values for argparse, which would take a separate `-1e-5` for a flag."""
    return [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]


def read_preset(
    presets: list[list[str]], parser: argparse.ArgumentParser, recipe: str = ""
) -> Iterator[tuple[str, list[Any], str]]:
    """Yield flag, values and place of each line of the preset, as from a command line, so that both pass the same checks.

    `recipe` is the path of the recipe, which has this parser. Values stay as they are written in the file: YAML would make
    8 of 010, false of `no`, 3.1 of 3.10, and a text of 1e-5.

    Raises:
        ConfigError: if it is not one file of `name: value` lines.
    """
    if not presets:
        return
    if len(presets) > 1 or len(presets[0]) != 1:
        raise ConfigError("--config takes one file, once")
    path = Path(presets[0][0])
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file{shipped.other_presets(recipe, path)}")
    content = read_yaml(path, Texts) or {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines, not a {type(content).__name__}")
    for key, value in content.items():
        action = parser._option_string_actions.get(f"--{key}")
        if value is None and action and parser.may_be_none(action):
            value = "none"
        if value in (None, [], {}):
            continue  # `save` writes an argument that was not set this way
        value = shipped.data(value, path)
        if isinstance(action, Merge) and isinstance(value, dict):
            value = [
                f"{name}={as_yaml(leaf)}" for part in value for name, leaf in with_dots(str(part), value[part]).items()
            ]
        elif isinstance(value, dict) and action and action.type is FileOrSection:
            value = json.dumps(value, ensure_ascii=False)
        yield f"--{key}", value if isinstance(value, list) else [value], f"in {path}"


def as_yaml(value: Any) -> str:
    """Write a value that `Texts` has read, in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    return "null" if value is None else str(value)


class Yaml(yaml.SafeLoader):
    """YAML loader that refuses a key which occurs twice, where PyYAML silently takes the last, and aliases of nested values.

    Aliases of aliases could grow without end.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read a node; raise YAMLError for an alias of a list or section that holds others."""
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        node = super().compose_node(parent, index)
        if is_alias and isinstance(node, yaml.CollectionNode):
            inner = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            if any(isinstance(part, yaml.CollectionNode) for part in inner):
                raise yaml.MarkedYAMLError(
                    problem="an alias repeats a list or a section with others in it; write it out", problem_mark=mark
                )
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Read a section; raise YAMLError for a key that occurs twice."""
        node, lines = super().compose_mapping_node(anchor), {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"lines {lines[key.value]} and {line}" if lines[key.value] < line else f"line {line}"
                raise yaml.YAMLError(f"{key.value} stands twice, in {where}; remove one")
            lines[key.value] = line
        return node


class Values(Yaml):
    """YAML loader that reads 1e-5 as a number, as in JSON; PyYAML reads it as a text."""


Values.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class Texts(Yaml):
    """YAML loader that reads a value as text, as it is written in the file, without quotes; empty and null give None."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in known if tag.endswith((":null", ":merge"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(path: Path, loader: type[Yaml] = Yaml) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: if the file cannot be read, or is not YAML.
    """
    try:
        return yaml.load(path.read_text("utf-8"), loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # an impossible date raises ValueError
        raise ConfigError(f"{path} is not YAML: {error}") from error


def names_of_launcher() -> set[str]:
    """Return the names of the flags of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    return {option[2:] for option in launch_command_parser()._option_string_actions if option.startswith("--")}


def field_names(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the names, and other names, of the fields that a class of configurations adds to those of all classes."""
    added = {f.name for f in fields(config_class)} - {f.name for f in fields(PreTrainedConfig)}
    return added | {*config_class.attribute_map}


def is_of_new_model(parser: HfArgumentParser, name: str) -> bool:
    """Tell whether the config.json of a new model, of the type that the recipe makes by default, has this field."""
    model_type = parser.get_default("model_type") if parser.get_default("config_overrides") is not None else None
    if model_type is None:
        return False
    known = transformers.CONFIG_MAPPING  # its import takes long
    return model_type in known and name in field_names(known[model_type])


def parse_groups(
    parser: HfArgumentParser, owned_elsewhere: Mapping[str, str], groups: Sequence[tuple[str, list[Any], str]]
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse flags, each with its values and place.

    Returns:
        The values, the flags without error, and what is wrong with the others.
    """
    # Parse each flag alone first, to find all errors. Then parse the flags without error together, in the same order.
    problems = [flag_problem(parser, owned_elsewhere, *group) for group in groups]
    right = [group for group, problem in zip(groups, problems, strict=True) if not problem]
    return parser.parse_args(words_of(parser, right)), [flag for flag, *_ in right], [*filter(None, problems)]


def flag_problem(
    parser: HfArgumentParser, owned_elsewhere: Mapping[str, str], flag: str, values: list[Any], where: str
) -> str:
    """Parse one flag with its values; return the reason if that fails, else ""."""
    action = parser._option_string_actions.get(flag)
    name = action.dest if action else flag.removeprefix("--").replace("-", "_")  # --no_packing belongs to `packing`
    elsewhere = owned_elsewhere.get(name)
    of_launcher = names_of_launcher() if action is None and owned_elsewhere else set()
    if not elsewhere and name in of_launcher:
        elsewhere = f"put it before the recipe: `accelerate launch --{name} ... RECIPE`"
    if elsewhere:
        return f"--{name} ({where}) is not an argument of the recipe: {elsewhere}"
    if action is None or flag == "--config":  # a preset cannot name another
        known = {action.dest for action in parser._actions if action.help != argparse.SUPPRESS}
        unknown = f"unknown argument {name!r} {where}"
        if is_of_new_model(parser, name):
            return f"{unknown}; a field of a new model's config.json is given by --config_overrides {name}=..."
        if owned_elsewhere and (here := meaning(name, known)):
            return f"{unknown}; here it is {here}"
        meant = closest(name, known | of_launcher, VERY_NEAR)
        hint = f"; did you mean {meant!r}?" if meant else ""
        if meant in of_launcher - known:
            hint += f" It stands before the recipe: `accelerate launch --{meant} ... RECIPE`"
        return f"{unknown}{hint}"
    if not all(isinstance(value, str) for value in values):
        return f"{name} {where} is {values!r:.60}; it must be one value, or a list of some"
    try:
        _, rest = parser.parse_known_args(tokens(flag, values))
    except ValueError as error:  # of the range
        return f"{flag} is {' '.join(values)}; {error} ({where})"
    except Exception as error:  # argparse's ArgumentError, or one of a value in YAML
        return f"{error} ({where})"
    if dashed := next((word for word in rest if word.startswith("-")), ""):
        return f"{dashed} behind {flag} is no value; flags begin with two dashes: -{dashed} ({where})"
    return f"{flag} takes one value, not {len(values)}: {' '.join(values)} ({where})" if rest else ""
