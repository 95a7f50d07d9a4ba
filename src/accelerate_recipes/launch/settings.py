"""Checks of what `accelerate launch` is told but silently drops: keys and values of its YAML, and flags.

Preflight makes these checks before a job is queued. A run makes them for the launcher that started it, so that a mistake
does not go unnoticed.
"""

import os
import typing
from argparse import Action, Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from accelerate.commands.config.config_args import ClusterConfig, default_config_file
from accelerate.commands.launch import launch_command_parser

from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.declaring import read_yaml
from accelerate_recipes.errors import ConfigError, closest, suggestion, that_apply

# Sections of the YAML, each with the prefix of its keys, which are flags too.
SECTIONS = {f"{name}_config": f"{name}_" for name in ("fsdp", "dynamo", "fp8")}
SECTIONS["parallelism_config"] = "parallelism_config_"
YAML_VALUES = {
    "compute_environment": {"LOCAL_MACHINE"},
    "distributed_type": {"NO", "MULTI_GPU", "FSDP"},
    "mixed_precision": {"no", "bf16", "fp16", "fp8"},
    "fsdp_version": {1, 2},
    "fsdp_auto_wrap_policy": {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"},
    "fsdp_state_dict_type": {"SHARDED_STATE_DICT", "FULL_STATE_DICT"},
    "fsdp_sharding_strategy": {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"},
    "fsdp_backward_prefetch": {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"},
}
# Keys that Accelerate reads with one version of FSDP and ignores with the other.
FSDP1_ONLY = {"fsdp_sharding_strategy": "use fsdp_reshard_after_forward (true or false)"} | {
    f"fsdp_{name}": "remove it"
    for name in ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params")
}
# Programs whose command `launch` takes these flags.
LAUNCHERS = ("accelerate", "accelerate.commands.accelerate_cli", "accelerate-recipes", "accelerate_recipes")
TYPES_IN_WORDS = {int: "a whole number", str: "a text; put it in quotes"}


def yaml_problems(path: Path, num_processes: int | None = None) -> list[str]:
    """List what is wrong with the keys and values of an accelerate YAML, one sentence each.

    `num_processes` is the value of the launcher's flag; without it, the YAML must give the number.
    """
    if not path.is_file():
        meant = closest(path.stem, shipped.names("accelerate_configs"))
        hint = f"did you mean {shipped.config_file(meant)}?" if meant else "the shipped ones lie in accelerate_configs/"
        return [f"{path}: no such file; {hint}"]
    try:
        content = read_yaml(path)
    except ConfigError as error:
        return [str(error)]
    if not isinstance(content, dict):
        return [f"{path} holds no `key: value` lines"]
    flags = {action.dest: action for action in launch_command_parser()._actions}
    hints = typing.get_type_hints(ClusterConfig)
    problems, values = [], {}  # values by key, those of the sections too
    for key, value in content.items():
        if key not in hints:
            problems.append(f"{path}: unknown key {key!r}{suggestion(key, hints)}")
        elif key not in SECTIONS:
            values[key] = value
        elif value is not None and not isinstance(value, dict):
            problems.append(f"{path}: {key} must hold `{SECTIONS[key]}...: value` lines, not {value!r:.60}")
        else:
            prefix = SECTIONS[key]
            known = [flag for flag in flags if flag.startswith(prefix)]
            for written, setting in (value or {}).items():
                name = str(written)
                if key != "parallelism_config" and not name.startswith(prefix):  # Accelerate adds it here
                    name = prefix + name
                if name in known:
                    values[name] = setting
                else:
                    hint = suggestion(name, known) or suggestion(prefix + name, known)
                    problems.append(f"{path}: {key} has an unknown key {written!r}, which Accelerate ignores{hint}")
    for key, value in values.items():
        if wanted := wanted_instead(key, value, hints.get(key), flags.get(key)):
            problems.append(f"{path}: {key} is {value!r:.60}; it must be {wanted}")
    if values.get("fsdp_version") == 2:
        useless = {key: remedy for key, remedy in FSDP1_ONLY.items() if key in values}
        problems += [f"{path}: {key} has no effect with fsdp_version: 2; {remedy}" for key, remedy in useless.items()]
    number = values.get("num_processes", 1 if values.get("distributed_type") == "NO" else None)
    if num_processes is None and (number is None or (type(number) is int and number < 1)):
        problems.append(f"{path}: num_processes is {number!r}; accelerate needs a number")
    return problems


def wanted_instead(key: str, value: Any, hint: Any, flag: Action | None) -> str:
    """Say what the value of a key must be; "" if it is that.

    Accelerate has a type, `hint`, for keys outside of the sections, and for each in a section a flag of the launcher.
    """
    if key in YAML_VALUES:
        return wrong_choice(value, YAML_VALUES[key])
    if hint is not None:
        kinds = () if typing.get_origin(hint) is list else typing.get_args(hint) or (hint,)
        return next((TYPES_IN_WORDS[kind] for kind in TYPES_IN_WORDS if kind in kinds and type(value) not in kinds), "")
    # With FSDP1 this may also name a sharding strategy.
    if flag.default in ("true", "false") and key != "fsdp_reshard_after_forward":
        return wrong_choice(value, {True, False})
    if flag.type is int:
        return "" if type(value) is int else TYPES_IN_WORDS[int]
    return "one value" if isinstance(value, list | dict) else ""


def wrong_choice(value: Any, choices: Iterable[Any]) -> str:
    """Name the choices if a value is none of them."""
    if any(type(value) is type(choice) and value == choice for choice in choices):  # 1 equals true
        return ""
    names = ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in sorted(choices))
    is_no = value is False and "no" in names.lower()
    return f"one of {names}" + "; put it in quotes, since YAML reads no as false" * is_no


def parse_flags(argv: Sequence[str], known: Iterable[str] = (), **defaults: object) -> Namespace:
    """Parse what stands after `accelerate launch`, and find what is named. Raises ConfigError for what it refuses.

    Args:
        argv: what stands there.
        known: further flags that a misspelt one may mean.
        defaults: values of flags that are not given, instead of the launcher's.
    """

    def refuse(message: str) -> NoReturn:
        _, is_unknown, flags = message.partition("unrecognized arguments: ")
        if is_unknown:
            meant = suggestion(flags.split()[0], [*parser._option_string_actions, *known])
            message += meant or "; arguments of the recipe come after the recipe"
        raise ConfigError(f"accelerate launch refuses: {message}")

    parser = launch_command_parser()
    parser.set_defaults(**defaults)
    parser.prog, parser.error = "accelerate launch", refuse
    args = parser.parse_args(argv)
    args.config_file = args.config_file and shipped.config_file(args.config_file)
    command = [args.training_script, *args.training_script_args]
    args.training_script, *args.training_script_args = shipped.found_command(command)
    return args


def ignored_flags(config: Path | str, flags: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """List what the launcher's flags ask for in vain, by the environment that it makes, one sentence each."""
    ignored = [flag for flag in flags if flag.startswith("--parallelism_config_")]
    asked = parse_flags([*flags, "recipe.py"]).num_processes or read_yaml(Path(config)).get("num_processes") or 1
    started = int(env.get("WORLD_SIZE", 1))
    on_cpu = "leave out --cpu, and hide GPUs, if there are any, by CUDA_VISIBLE_DEVICES="
    problems = {
        f"{', '.join(ignored)}: {config} has no parallelism_config, so accelerate launch would ignore it; take "
        "fsdp_long.yaml for ranks that share rows, or fsdp_hybrid.yaml for replicas": ignored
        and "ACCELERATE_USE_PARALLELISM_CONFIG" not in env,
        f"{asked} processes are asked for, by --num_processes or {config}, but accelerate launch starts {started}; "
        f"{on_cpu if '--cpu' in flags else 'take fsdp_full.yaml, or ddp.yaml'}": asked > started,
    }
    return that_apply(problems)


def launcher_problems() -> list[str]:
    """List what is wrong with the YAML and the flags of the `accelerate launch` that started this process.

    The list is empty if no such launcher exists, or if its command line or its file cannot be read here. It is also
    empty if the launcher has restarted its processes: these have the environment that it read at first.
    """
    argv, folder = own_launch()
    if not argv or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return []
    args = parse_flags(argv)
    config = args.config_file or ("" if args.cpu else default_config_file)
    path = Path(config if folder == os.getcwd() else os.path.join(folder, config))
    if not path.is_file():
        return []
    flags = argv[: len(argv) - 1 - len(args.training_script_args)]
    return [*yaml_problems(path, args.num_processes), *ignored_flags(path, flags, os.environ)]


def own_launch() -> tuple[list[str], str]:
    """Find the nearest `accelerate launch` that started this process. Returns its arguments and its working directory."""
    try:
        for process in psutil.Process().parents():
            command = process.cmdline()
            for i, word in enumerate(command):
                name = os.path.basename(word)
                if name in LAUNCHERS and command[i + 1 : i + 2] == ["launch"]:
                    return command[i + 2 :], process.cwd()
                if name in ("accelerate-launch", "accelerate.commands.launch"):
                    return command[i + 1 :], process.cwd()
    except psutil.Error:  # another user's process, or one that is gone
        pass
    return [], ""
