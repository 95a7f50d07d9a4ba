"""Everything that can be known before the queue: `python -m accelerate_recipes preflight CONFIG RECIPE ARGS...`

Checks the keys and values of the accelerate YAML (Accelerate itself drops unknown nested keys without a word), the
recipe's arguments, the batch arithmetic, the wrap class, and whether model and data are here; reports all problems at
once. Between CONFIG and RECIPE it takes the flags of `accelerate launch`, such as --num_processes.
"""

import difflib
from pathlib import Path

import torch
import transformers
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from transformers import AutoConfig

from accelerate_recipes import recipe
from accelerate_recipes.args import ConfigError, TrainArgs, error_list, parse
from accelerate_recipes.distributed import environment_problems, lever_problems, num_accelerators

SECTIONS = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_"}
VALUES = {
    "distributed_type": {"NO", "MULTI_GPU", "FSDP"},
    "mixed_precision": {"no", "bf16", "fp16", "fp8"},
    "fsdp_version": {1, 2},
    "fsdp_auto_wrap_policy": {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"},
    "fsdp_state_dict_type": {"SHARDED_STATE_DICT", "FULL_STATE_DICT"},
    "fsdp_sharding_strategy": {
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "HYBRID_SHARD_ZERO2",
    },
    "fsdp_backward_prefetch": {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"},
} | {
    key: {True, False}
    for key in (
        "fsdp_offload_params",
        "fsdp_use_orig_params",
        "fsdp_sync_module_states",
        "fsdp_forward_prefetch",
        "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
        "fsdp_cpu_ram_efficient_loading",
    )
}
# What Accelerate reads with one version of FSDP and ignores with the other.
FSDP1_ONLY = {
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_backward_prefetch": None,
    "fsdp_forward_prefetch": None,
    "fsdp_sync_module_states": None,
    "fsdp_use_orig_params": None,
}


def yaml_problems(path: Path) -> list[str]:
    """What is wrong with the keys and values of an accelerate YAML, one sentence each."""
    if not path.is_file():
        return [f"{path}: no such file; the shipped ones lie in accelerate_configs/"]
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        return [f"{path} is not YAML: {error}"]
    if not isinstance(content, dict):
        return [f"{path} holds no `key: value` lines"]
    options = {action.dest for action in launch_command_parser()._actions}
    found, flat = [], {}
    for key, value in content.items():
        if key not in ClusterConfig.__dataclass_fields__:
            found.append(f"{path}: unknown key {key!r}{closest(key, ClusterConfig.__dataclass_fields__)}")
        elif key not in SECTIONS:
            flat[key] = value
        elif not isinstance(value, dict):
            found.append(f"{path}: {key} must hold `{SECTIONS[key]}...: value` lines, not {value!r}")
        else:
            known = {option for option in options if option.startswith(SECTIONS[key])}
            known |= {"fsdp_version"} if key == "fsdp_config" else set()
            for name, setting in value.items():
                flat[name] = setting
                if name not in known:
                    hint = closest(name, known) or closest(SECTIONS[key] + name, known)
                    found.append(f"{path}: {key} has an unknown key {name!r}, which Accelerate ignores{hint}")
    for key, allowed in VALUES.items():
        if key in flat and flat[key] not in allowed:
            choices = ", ".join(
                str(value).lower() if isinstance(value, bool) else str(value) for value in sorted(allowed)
            )
            found.append(f"{path}: {key} is {flat[key]!r}; it must be one of {choices}")
    if flat.get("fsdp_version") == 2:
        for key, instead in FSDP1_ONLY.items():
            if key in flat:
                found.append(
                    f"{path}: {key} has no effect with fsdp_version: 2; "
                    + (f"use {instead} (true or false)" if instead else "remove it")
                )
    if not isinstance(flat.get("num_processes"), int) or flat["num_processes"] < 1:
        found.append(f"{path}: num_processes is {flat.get('num_processes')!r}; accelerate needs a number")
    return found


def closest(key: str, known) -> str:
    matches = difflib.get_close_matches(str(key), known, n=1, cutoff=0.75)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def launch_environment(argv: list[str]) -> dict[str, str]:
    """What `accelerate launch ARGV` would put into the environment of each process."""
    args = launch_command_parser().parse_args(argv)
    args, _, _ = _validate_launch_command(args)
    args.main_process_port = 0  # none is opened here: any will do
    if args.use_fsdp or args.multi_gpu:
        env, world_size = prepare_multi_gpu_env(args), args.num_processes
    else:
        env, world_size = prepare_simple_launcher_cmd_env(args)[1], 1
    return env | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // (args.num_machines or 1)),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(args.gradient_accumulation_steps or 1),
    }


def wrap_problems(model_name: str, env: dict[str, str]) -> list[str]:
    """Whether the class that FSDP is to wrap is in the model; it is built on the meta device, without weights."""
    if env.get("ACCELERATE_USE_FSDP") != "true" or env.get("FSDP_AUTO_WRAP_POLICY") != "TRANSFORMER_BASED_WRAP":
        return []
    config = AutoConfig.from_pretrained(model_name)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    names = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    wanted = names.split(",") if names else list(model._no_split_modules or [])
    present = {type(module).__name__ for module in model.modules()}
    if not wanted:
        return [f"{model_name} names no layer class to wrap; set fsdp_transformer_layer_cls_to_wrap in the YAML"]
    return [
        f"fsdp_transformer_layer_cls_to_wrap: {name} is not in {model_name}{closest(name, present)}"
        for name in wanted
        if name not in present
    ]


def preflight(argv: list[str]) -> str:
    """Check CONFIG [launch flags] RECIPE ARGS...; returns what will run.

    Raises:
        ConfigError: with all problems.
    """
    if len(argv) < 2:
        raise ConfigError("usage: python -m accelerate_recipes preflight CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]")
    config = Path(argv[0])
    problems = yaml_problems(config)
    launch = ["--config_file", *argv]
    parsed = launch_command_parser().parse_args(launch)
    module = recipe.load(parsed.training_script)
    env = {}
    if not problems:
        try:
            env = launch_environment(launch)
        except ValueError as error:
            problems.append(f"accelerate launch refuses: {error}")
        else:
            problems += environment_problems(env, num_accelerators())
    world_size = int(env.get("WORLD_SIZE", 1))

    def launch_problems(args: TrainArgs) -> list[str]:
        return problems + (lever_problems(args, env) if env else [])

    args = parse(module.Args, parsed.training_script_args, world_size, launch_problems)
    needed = module.requirements(args)
    problems = needed.problems()
    if not problems:
        problems = [problem for name in needed.models for problem in wrap_problems(name, env)]
    if problems:
        raise ConfigError(error_list("This run cannot start", problems))
    return (
        f"Ready: {config.name} with {world_size} processes; {args.total_batch_size} sequences a step = "
        f"{world_size} processes x {args.per_device_train_batch_size} x {args.accumulation_steps(world_size)} micro-batches"
    )
