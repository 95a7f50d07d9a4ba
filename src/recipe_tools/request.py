"""Launch that preflight and plan are asked about: its command line, and the variables that its processes would get."""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.commands.launch import _validate_launch_command
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env, setup_fp8_env

from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.declaring import read_yaml
from accelerate_recipes.arguments.gpus import check_gpu, known_as
from accelerate_recipes.errors import ConfigError, that_apply
from accelerate_recipes.launch.checks import num_accelerators
from accelerate_recipes.launch.settings import ignored_flags, parse_flags, yaml_problems


class Request(NamedTuple):
    """Parsed command line."""

    config: Path  # the accelerate YAML
    config_problems: list[str]
    launch: list[str]  # flags of `accelerate launch`
    command: list[str]  # the recipe with its arguments
    num_devices: int  # accelerators of a machine of the job
    reads_checksums: bool
    gpu: str  # name of the GPU on which the run must fit, if it is known
    plans: bool  # whether to simulate a step, to check the memory

    def environment(self) -> tuple[dict[str, str], list[str]]:
        """Return the environment of the first process, empty if the launcher would start none, and the problems with it."""
        if self.config_problems:
            return {}, self.config_problems
        try:
            env = launch_environment([*self.launch, *self.command])
        except ConfigError as error:
            return {}, [str(error)]
        return env, ignored_flags(self.config, self.launch, env)


def read_request(argv: Sequence[str], name: str = "preflight") -> Request:
    """Read the command line of preflight, or of another command. Raises ConfigError if it names no run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus-per-node", "--gpus_per_node", type=int)
    parser.add_argument("--cpus-per-node", "--cpus_per_node", type=int)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--no-plan", "--no_plan", action="store_true")
    parser.add_argument("--no-checksums", action="store_true")  # a job leaves checksums to its processes
    try:
        asked, argv = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if len(argv) < 2 or argv[0].startswith("-") or shipped.found_command(argv[:1])[0].endswith(".py"):
        first = f"; the accelerate YAML comes first, not {argv[0]}" if argv else ""
        raise ConfigError(f"usage: python -m accelerate_recipes {name} CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]{first}")
    for name, least in {"nodes": 1, "gpus_per_node": 0, "cpus_per_node": 1}.items():
        if (number := getattr(asked, name)) is not None and number < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}; it must be at least {least}")
    check_gpu(asked.gpu)
    own = parser._option_string_actions
    config = Path(shipped.config_file(argv[0]))
    launch = ["--config_file", str(config), *argv[1:]]
    is_counted = asked.nodes or asked.gpus_per_node or asked.cpus_per_node
    problems = yaml_problems(config, 1 if is_counted else parse_flags(launch, own).num_processes)
    if not problems and is_counted:
        processes_per_node = asked.gpus_per_node or asked.cpus_per_node or 1
        # These are 1 by default, and would hide the sizes in the YAML.
        given = parse_flags(launch, own, parallelism_config_cp_size=None, parallelism_config_dp_replicate_size=None)
        size, replicas = given.parallelism_config_cp_size, given.parallelism_config_dp_replicate_size
        sizes = launch_flags(config, asked.nodes or 1, processes_per_node, size, replicas)
        problems = job_size_problems(given, parse_flags([*sizes, given.training_script]), asked)
        launch[2:2] = sizes
    parsed = parse_flags(launch, own)
    if parsed.config_file != str(config):
        raise ConfigError(f"--config_file {parsed.config_file}: the accelerate YAML is given once, first: {config}")
    command = [parsed.training_script, *parsed.training_script_args]
    # A login node has no GPUs, or other GPUs than the job.
    here = 0 if asked.cpus_per_node else num_accelerators()
    num_devices = here if asked.gpus_per_node is None else asked.gpus_per_node
    is_elsewhere = parsed.cpu or asked.nodes or asked.cpus_per_node or asked.gpus_per_node is not None
    gpu, flags = asked.gpu, launch[: len(launch) - len(command)]
    if not gpu and not is_elsewhere and torch.cuda.is_available():
        gpu = known_as(torch.cuda.get_device_name(0))
    return Request(config, problems, flags, command, num_devices, not asked.no_checksums, gpu, not asked.no_plan)


def job_size_problems(given: argparse.Namespace, wanted: argparse.Namespace, asked: argparse.Namespace) -> list[str]:
    """List the launcher's flags that contradict the size of the job. On CPUs, fewer processes leave each more of them."""
    gpus, nodes = asked.gpus_per_node or 0, asked.nodes or 1
    machines, processes = given.num_machines, given.num_processes
    size = f"--nodes {nodes} with --gpus-per-node {gpus}" if gpus else f"--nodes {nodes}"
    problems = {
        f"--num_machines {machines} contradicts {size}; leave it out: it follows": machines not in (None, nodes),
        f"--num_processes {processes} contradicts {size}, which makes {wanted.num_processes}; leave it out: it follows": gpus
        and processes not in (None, wanted.num_processes),
    }
    return that_apply(problems)


def completed(parsed: argparse.Namespace) -> argparse.Namespace:
    """Return the flags of a launch with what its YAML adds to them, as `accelerate launch` completes them.

    Raises:
        ConfigError: for what it refuses, and for numbers at which it ends in a stack.
    """
    args = copy.copy(parsed)
    try:
        _validate_launch_command(args)
    except ValueError as error:
        raise ConfigError(f"accelerate launch refuses: {error}") from error
    is_given = parsed.num_processes is not None
    processes, args.num_machines = args.num_processes or 0, 1 if args.num_machines is None else args.num_machines
    machines, number, port = args.num_machines, int(args.machine_rank or 0), args.main_process_port
    problems = {
        f"--num_machines is {machines}; it must be at least 1": machines < 1,
        # A launcher of a single process, without a YAML, counts GPUs.
        f"{processes} processes (--num_processes) on {machines} machines (--num_machines): each machine needs the same "
        f"number; give a multiple of {machines}, such as one a GPU": (is_given or args.use_fsdp or args.multi_gpu)
        and (processes < 1 or processes % max(1, machines)),
        f"--machine_rank is {number}; the {machines} machines are 0 to {machines - 1}": number
        not in range(max(1, machines)),
        f"--main_process_port is {port}; it must be 0, for any free one, or at most 65535": (port or 0)
        not in range(2**16),
    }
    if found := that_apply(problems):
        raise ConfigError(f"accelerate launch refuses: {'; '.join(found)}")
    return args


def launch_environment(argv: list[str]) -> dict[str, str]:
    """Return the variables that `accelerate launch ARGV` would put into the environment of each process.

    Raises:
        ConfigError: for arguments that it refuses, or at which it fails.
    """
    args = completed(parse_flags(argv))
    machines, processes = args.num_machines, args.num_processes
    try:
        # Nothing is opened or reached here, so any port and address will do.
        args.main_process_port, args.main_process_ip = 0, args.main_process_ip or "head"
        # For fp8 the launcher asks for packages; `checks` reports what is wrong with fp8 here.
        precision, args.mixed_precision = args.mixed_precision, "no"
        if (args.use_fsdp or args.multi_gpu) and not args.cpu:
            env, world_size = prepare_multi_gpu_env(args), processes
        else:
            env, world_size = prepare_simple_launcher_cmd_env(args)[1], 1
    except ValueError as error:
        raise ConfigError(f"accelerate launch refuses: {error}") from error
    if precision == "fp8":
        env = setup_fp8_env(args, env)
    return env | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // machines),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(args.gradient_accumulation_steps or 1),
        "ACCELERATE_MIXED_PRECISION": precision.lower(),
    }


def launch_flags(
    config: Path, nodes: int, processes_per_node: int, size: int | None = None, replicas: int | None = None
) -> list[str]:
    """Return flags of `accelerate launch`: processes; for a hybrid config, shards inside a node and replicas between nodes.

    The number of shards is the number of processes / (`replicas` * `size`). `size` ranks share a row (default: the
    number in the config). By default there is a replica for each node; where ranks share rows, only if the config has
    replicas.
    """
    flags = ["--num_machines", str(nodes), "--num_processes", str(nodes * processes_per_node)]
    sizes = read_yaml(config).get("parallelism_config")
    if sizes is None:
        return flags
    sharing = max(1, size or sizes.get("parallelism_config_cp_size", 1))
    if replicas is None:
        replicas = nodes if sharing == 1 or sizes.get("parallelism_config_dp_replicate_size", 1) > 1 else 1
    shards = max(1, nodes * processes_per_node // max(1, replicas * sharing))
    flags += ["--parallelism_config_dp_replicate_size", str(replicas)]
    return [*flags, "--parallelism_config_dp_shard_size", str(shards)]
