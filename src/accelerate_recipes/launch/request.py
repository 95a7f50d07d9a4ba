"""Command line of preflight and plan: a launch with its recipe, or the resources of a job."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.gpus import check_gpu, known_as
from accelerate_recipes.errors import ConfigError, that_apply
from accelerate_recipes.launch.settings import (
    ignored_flags,
    launch_environment,
    launch_flags,
    parse_flags,
    yaml_problems,
)
from accelerate_recipes.launch_checks import num_accelerators


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
    return Request(
        config,
        problems,
        launch[: len(launch) - len(command)],
        command,
        num_devices,
        not asked.no_checksums,
        asked.gpu or ("" if is_elsewhere else gpu_here()),
        not asked.no_plan,
    )


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


def gpu_here() -> str:
    """Return the name in GPUS of this machine's first GPU; empty without a GPU, and for an unknown one."""
    return known_as(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""
