"""Check of a run before it is queued: `python -m accelerate_recipes preflight CONFIG RECIPE ARGS...`

It checks the keys and values of the accelerate YAML (Accelerate itself silently drops unknown nested keys), the
recipe's arguments, the batch arithmetic, the wrap class, whether model and data are here, the checkpoint to resume,
the output directory and its space, and versions; it reports all problems at once. Between CONFIG and RECIPE it takes the
flags of `accelerate launch`, such as --num_processes; or what the job will have, --nodes and --gpus-per-node (without
GPUs, --cpus-per-node), from which those flags follow. With --gpu NAME a step is simulated (`plan/`), and a run that does not
fit on that GPU is a problem; --no_plan leaves that out.
"""

import argparse
import math
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env, setup_fp8_env
from huggingface_hub import constants
from packaging.requirements import Requirement
from transformers import PreTrainedModel

from accelerate_recipes import recipe
from accelerate_recipes.adapters import add_adapters
from accelerate_recipes.args import TrainArgs, read_yaml, resolve
from accelerate_recipes.attention import choose
from accelerate_recipes.checkpoint import files, resume
from accelerate_recipes.disk import existing
from accelerate_recipes.errors import ConfigError, error_list, suggestion
from accelerate_recipes.hub import cache
from accelerate_recipes.launcher import ignored_flags, parse_flags, yaml_problems
from accelerate_recipes.life.status import read_status
from accelerate_recipes.losses import check_head
from accelerate_recipes.optim import checkpoint_bytes, warmup_warnings
from accelerate_recipes.plan.gpus import GPUS, known_as
from accelerate_recipes.plan.layers import predict_outcomes
from accelerate_recipes.plan.search import Change, Search, prediction_of, reason_of
from accelerate_recipes.plan.simulate import Job, NotSimulatedError, Outcome, Simulator
from accelerate_recipes.probes import check_packing
from accelerate_recipes.ranks import data_world_size, ranks_a_row, readers
from accelerate_recipes.sharing import check_shared_masks, model_sharing_problems
from accelerate_recipes.strategy import (
    environment_problems,
    fp8_layers,
    lever_problems,
    lever_warnings,
    num_accelerators,
)

TOKENIZED_PER_SECOND = 1e6  # bytes of files in one process: a low estimate (docs/plan.md)

IMAGE = ("accelerate_configs", "data", "recipes", "src")  # folders of this repository that the image holds
LOCAL_FILESYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


def launch_environment(argv: list[str]) -> dict[str, str]:
    """Return what `accelerate launch ARGV` would put into the environment of each process.

    Raises:
        ConfigError, ValueError: for what it refuses, or fails at.
    """
    args, _, _ = _validate_launch_command(parse_flags(argv))
    num_processes, num_machines = (getattr(args, name) or 0 for name in ("num_processes", "num_machines"))
    if num_processes < 1 or num_processes % max(1, num_machines):
        raise ValueError(
            f"{num_processes} processes (--num_processes) on {max(1, num_machines)} machines (--num_machines); give a "
            "multiple, such as as many as the machines have GPUs"
        )
    args.main_process_port = 0  # no port is opened here, so any number will do
    # For fp8 the launcher asks for packages; `environment_problems` reports what is wrong with fp8 here.
    precision, args.mixed_precision = args.mixed_precision, "no"
    if args.use_fsdp or args.multi_gpu:
        env, world_size = prepare_multi_gpu_env(args), args.num_processes
    else:
        env, world_size = prepare_simple_launcher_cmd_env(args)[1], 1
    if precision == "fp8":
        env = setup_fp8_env(args, env)
    return env | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // (args.num_machines or 1)),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(args.gradient_accumulation_steps or 1),
        "ACCELERATE_MIXED_PRECISION": precision.lower(),
    }


def models_on_meta(needed: recipe.Requirements, make_new: bool) -> tuple[list[PreTrainedModel], list[str]]:
    """Make those models of a run that are here, without weights; also return why a model cannot be made."""
    models, problems = recipe.check_models(needed)
    if needed.new_model and make_new:
        try:
            with torch.device("meta"):
                models.append(needed.new_model())
        except ConfigError as error:
            problems.append(str(error))
    return models, problems


def wrap_problems(model: PreTrainedModel, env: Mapping[str, str]) -> list[str]:
    """Check that the model contains the class that FSDP is to wrap."""
    if env.get("ACCELERATE_USE_FSDP") != "true" or env.get("FSDP_AUTO_WRAP_POLICY") != "TRANSFORMER_BASED_WRAP":
        return []
    names = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    wanted = names.split(",") if names else list(model._no_split_modules or [])
    present = {type(module).__name__ for module in model.modules()}
    title = type(model).__name__
    if not wanted:
        return [f"{title} names no layer class to wrap; set fsdp_transformer_layer_cls_to_wrap in the YAML"]
    return [
        f"fsdp_transformer_layer_cls_to_wrap: {name} is not in {title}{suggestion(name, present)}"
        for name in wanted
        if name not in present
    ]


def attention_problems(args: TrainArgs, model: PreTrainedModel, env: Mapping[str, str]) -> list[str]:
    """Check that a model can be trained with the attention, the packing and the loss that the arguments ask for."""
    name = getattr(args, "attn_implementation", "")
    if not name or model.config.is_encoder_decoder:
        return []
    size = ranks_a_row(env)
    if size > 1 and (problems := model_sharing_problems(model.config, size)):
        return problems
    try:
        attention, _ = choose(name, model.config, args.param_dtype, args.has_boundaries, size > 1)
        model.config._attn_implementation = attention
        if size > 1:
            check_shared_masks(model.config, attention, getattr(args, "max_length", 0))
        if getattr(args, "document_mask", False):
            check_packing(model.config)
        if not getattr(args, "whole_logits", True):
            check_head(model.config)
    except ConfigError as error:
        return [str(error)]
    return []


def versions() -> tuple[list[str], list[str]]:
    """List the packages of requirements.txt that are not installed, or installed in another version."""
    missing, other = [], []
    file = Path(__file__).parents[3] / "requirements.txt"
    # An installed copy has no such file.
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for requirement in (Requirement(line) for line in lines if line and not line.startswith(("#", "-"))):
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement} is not installed; run: pip install -r {file}")
        else:
            if not requirement.specifier.contains(installed):
                other.append(f"{requirement.name} is {installed}; tested is {requirement}")
    return missing, other


def filesystem(path: Path) -> str:
    """Return the type of a path's filesystem, such as ext4 or nfs4."""
    place = existing(path).resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (place, *place.parents) if parent in mounts), "")


def resume_candidate(args: TrainArgs, read: bool) -> tuple[Path | None, list[str], list[str]]:
    """Find the checkpoint that the run would resume, with problems and warnings. `read` verifies all its checksums."""
    try:
        chosen = resume.find_resume(args)
    except ConfigError as error:
        return None, [str(error)], []
    if chosen is None or not read:
        return chosen, [], []
    parts = os.cpu_count()
    with ThreadPoolExecutor(parts) as threads:
        found = threads.map(lambda part: files.damage(chosen, part, parts), range(parts))
        reason = next(filter(None, found), None)
    if reason and chosen == Path(args.resume_from_checkpoint):
        return None, [f"--resume_from_checkpoint {chosen}: {reason}; give an older one, or latest"], []
    if reason:
        return None, [], [f"{chosen} is damaged, the run would take an older one: {reason}"]
    return chosen, [], []


def space_needed(args: TrainArgs, num_parameters: int, trained: int, state_dict_type: str | None) -> tuple[int, str]:
    """Compute the bytes that future checkpoints and the export add to the output directory, and say how they are counted.

    A checkpoint holds the `trained` parameters; so does the export, unless adapters are merged.

    If the number of steps is not known, this is a lower bound.
    """
    present = [path for path in files.candidates(Path(args.output_dir)) if files.defect(path) is None]
    if present:  # the size of a real checkpoint is better than a computed one
        size = sum(entry["size"] for entry in files.read_marker(present[-1])["files"].values())
    else:
        size = checkpoint_bytes(args, trained, state_dict_type)
    saves = math.ceil(args.max_steps / args.save_steps) if args.max_steps > 0 and args.save_steps else 1
    at_once = saves
    if args.save_total_limit:
        kept = args.max_steps // args.keep_every_n_steps if args.max_steps > 0 and args.keep_every_n_steps else 0
        # An old checkpoint is removed only when the new one is complete.
        at_once = min(saves, args.save_total_limit + bool(args.metric_for_best_model) + 1 + kept)
    coming = max(0, at_once - len(present))
    export = (num_parameters if args.merge_adapter else trained) * args.param_dtype.itemsize
    return (
        coming * size + export,
        f"{coming} checkpoint{'s' * (coming != 1)} of {gib(size)} and the export of {gib(export)}",
    )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def launch_flags(
    config: Path, nodes: int, processes_per_node: int, size: int | None = None, replicas: int | None = None
) -> list[str]:
    """Return flags of `accelerate launch`: processes; for a hybrid config, shards inside a node and replicas between.

    Where `size` ranks share a row (default: as many as the config says), there are as many shards as are left, and unless
    `replicas` says how many there are, replicas only if the config has some.
    """
    flags = ["--num_machines", str(nodes), "--num_processes", str(nodes * processes_per_node)]
    sizes = read_yaml(config).get("parallelism_config")
    if sizes is None:
        return flags
    sharing = max(1, size or sizes.get("parallelism_config_cp_size", 1))
    if replicas is None:
        replicas = nodes if sharing == 1 or sizes.get("parallelism_config_dp_replicate_size", 1) > 1 else 1
    flags += ["--parallelism_config_dp_replicate_size", str(replicas)]
    flags += [
        "--parallelism_config_dp_shard_size",
        str(max(1, nodes * processes_per_node // max(1, replicas * sharing))),
    ]
    return flags


@dataclass(frozen=True)
class Launch:
    """A run that can start."""

    said: str  # what will run, with warnings
    args: TrainArgs
    needs: list[cache.Need]
    launch: list[str]  # flags of `accelerate launch`
    command: list[str]  # the recipe with its arguments

    @property
    def signal_seconds(self) -> int:
        """Return how many seconds before its end a run must be told, so that it saves in time; 300 if it never saved."""
        longest_save = read_status(Path(self.args.output_dir)).get("longest_save_seconds")
        # Reserve time for two saves: one in flight, and the last. Slurm may signal a minute early, a step may take one.
        return 300 if longest_save is None else 120 + 2 * math.ceil(longest_save)

    @property
    def assignments(self) -> str:
        """Write assignments that a job script reads with bash."""
        return "\n".join(
            [
                f"OUTPUT_DIR={shlex.quote(self.args.output_dir)}",
                f"SIGNAL_SECONDS={self.signal_seconds}",
                f"LAUNCH_FLAGS=({shlex.join(self.launch)})",
                f"COMMAND=({shlex.join(self.command)})",
            ]
        )


def preflight(argv: Sequence[str]) -> tuple[str, str]:
    """Return what will run, with warnings, and the same as assignments for bash. See `check`.

    Raises:
        ConfigError: with all problems.
    """
    plan, problems = check(argv)
    if problems:
        raise ConfigError(error_list("This run cannot start", problems))
    return plan.said, plan.assignments


@dataclass
class Report:
    """Messages of a check about a run."""

    problems: list[str]
    warnings: list[str]


class Request(NamedTuple):
    """Parsed command line of preflight."""

    config: Path  # the accelerate YAML
    config_problems: list[str]
    launch: list[str]  # flags of `accelerate launch`
    command: list[str]  # the recipe with its arguments
    num_devices: int  # accelerators of a machine of the job
    reads_checksums: bool
    gpu: str  # name of the GPU on which the run must fit, if it is known
    plans: bool  # whether to simulate a step, to check the memory


def check(argv: Sequence[str], volumes: Sequence[str] = ()) -> tuple[Launch | None, list[str]]:
    """Check CONFIG [--nodes N --gpus-per-node G] [launch flags] RECIPE ARGS...

    `volumes` are the mount paths of a pod that will run it; the first is for its checkpoints. Only the cluster knows what
    lies there: the checkpoint to resume, space, the Hub's cache, files of data. The processes of the run check all this
    before they train.

    Returns:
        What will run, or else all problems.

    Raises:
        ConfigError: if there is nothing to check.
    """
    request = read_request(argv)
    module = recipe.load(request.command[0])
    report = Report(*versions())
    env = check_launch(request, report)
    world_size = int(env.get("WORLD_SIZE", 1))
    nodes = world_size // int(env.get("LOCAL_WORLD_SIZE", 1))

    shares, size = data_world_size(env), ranks_a_row(env)
    args, found = resolve(module.Args, request.command[1:], shares, elsewhere=volumes, row_size=size)
    report.problems += found
    if env:
        report.problems += lever_problems(args, env, request.num_devices)
        report.warnings += lever_warnings(args, env, request.num_devices)
    report.problems += recipe.push_to_hub_problems(args, from_here=not volumes)
    if volumes:
        resumed_from, is_writable = None, check_volumes(args, volumes, report)
    else:
        resumed_from, is_writable = check_output_dir(args, nodes, request.reads_checksums, report)

    try:
        needed = module.requirements(args)
    except ConfigError as error:
        return None, [*report.problems, str(error)]
    if volumes:
        check_read_in_pod(args, needed, volumes, report)
    models = check_model_and_data(args, needed, request.command, env, report, is_here=not volumes)
    lines = [
        f"Ready: {request.config.name} with {world_size} processes; {args.total_batch_size} sequences a step = "
        f"{readers(shares, size)} x {args.per_device_train_batch_size} x {args.accumulation_steps(shares)} micro-batches"
    ]
    if models and is_writable:
        lines.append(check_space(args, models, env, report, is_here=not volumes))
    if request.gpu and request.plans and not report.problems:
        lines.append(check_memory(request, env, report, is_here=not volumes))
    if report.problems:
        return None, report.problems
    if resumed_from:
        checked = "; its checksums are right" if request.reads_checksums else ""
        lines.append(f"The run continues from {resumed_from}{checked}")
    said = "\n".join([*filter(None, lines), *(f"warning: {warning}" for warning in report.warnings)])
    return Launch(said, args, needed.needs, request.launch, request.command), []


def read_request(argv: Sequence[str]) -> Request:
    """Read a command line. Raises ConfigError if it names no run."""
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
    if len(argv) < 2 or argv[0].startswith("-"):
        first = f"; the accelerate YAML comes first, not {argv[0]}" if len(argv) > 1 else ""
        raise ConfigError(
            f"usage: python -m accelerate_recipes preflight CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]{first}"
        )
    for name, least in {"nodes": 1, "gpus_per_node": 0, "cpus_per_node": 1}.items():
        if (number := getattr(asked, name)) is not None and number < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}; it must be at least {least}")
    if asked.gpu and asked.gpu not in GPUS:
        raise ConfigError(f"--gpu {asked.gpu}: not known; known are {', '.join(GPUS)}")
    config = Path(argv[0])
    launch = ["--config_file", *argv]
    is_counted = asked.nodes or asked.gpus_per_node or asked.cpus_per_node
    problems = yaml_problems(config, 1 if is_counted else parse_flags(launch).num_processes)
    if not problems and is_counted:
        processes_per_node = asked.gpus_per_node or asked.cpus_per_node or 1
        parser = launch_command_parser()
        # 1 by default, which would hide those of the YAML
        parser.set_defaults(parallelism_config_cp_size=None, parallelism_config_dp_replicate_size=None)
        given = parser.parse_args(launch)
        size, replicas = given.parallelism_config_cp_size, given.parallelism_config_dp_replicate_size
        launch[2:2] = launch_flags(config, asked.nodes or 1, processes_per_node, size, replicas)
    parsed = parse_flags(launch)
    if parsed.config_file != argv[0]:
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


def gpu_here() -> str:
    """Return the name in GPUS of this machine's first GPU; empty if it has none, or one that is not known."""
    return known_as(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


def check_launch(request: Request, report: Report) -> dict[str, str]:
    """Check the accelerate YAML and the launcher's flags.

    Returns:
        Environment of the first process; empty if the launcher would start none.
    """
    report.problems += request.config_problems
    if request.config_problems:
        return {}
    try:
        env = launch_environment(
            [*request.launch, "--main_process_ip", "head", *request.command]
        )  # any address will do
    except ValueError as error:
        report.problems.append(f"accelerate launch refuses: {error}")
        return {}
    report.problems += ignored_flags(request.config, request.launch, env)
    report.problems += environment_problems(env, request.num_devices)
    return env


def check_volumes(args: TrainArgs, volumes: Sequence[str], report: Report) -> bool:
    """Move what a run in a pod writes to the volume of its checkpoints; returns whether the output directory is there."""
    for name in recipe.WRITTEN:
        if getattr(args, name, ""):
            place = os.path.normpath(Path(volumes[0], getattr(args, name)))
            setattr(args, name, place)
            if not is_below(place, volumes[:1] if name == "output_dir" else volumes):
                report.problems.append(f"--{name} {place} is lost with the pod; give one below {volumes[0]}")
    return is_below(args.output_dir, volumes[:1])


def is_below(path: str, folders: Sequence[str]) -> bool:
    return any(Path(folder) in Path(os.path.normpath(path)).parents for folder in folders)


def check_read_in_pod(args: TrainArgs, needed: recipe.Requirements, volumes: Sequence[str], report: Report) -> None:
    """Check that what a run in a pod reads is not only on this machine: it lies on a volume, or in the image."""
    names = {need.name for need in needed.needs}
    for name, value in args.values().items():
        for text in value if isinstance(value, list) else [value]:
            if name in recipe.WRITTEN or not isinstance(text, str) or is_below(text, volumes):
                continue
            # Rewards are named as my_rewards.py:function. A word may also happen to be the name of a folder.
            here = next((path for path in (text, text.rpartition(":")[0]) if path and os.path.exists(path)), "")
            if os.path.isfile(here) or (here and (text in names or len(Path(here).parts) > 1)):
                if not is_in_image(here):
                    report.problems.append(
                        f"--{name} {text} lies on this machine, where no pod finds it; put it on a volume and give its path "
                        f"there, below {' or '.join(volumes)}, or into a folder of the image ({', '.join(IMAGE)})"
                    )
            elif text in names and os.path.isabs(text):
                report.warnings.append(f"--{name} {text} must be in the image, which was not checked")


def is_in_image(path: str) -> bool:
    """Tell whether the image, which is built from this repository, holds a path; see .dockerignore."""
    parts = Path(path).parts
    if Path(path).is_absolute() or parts[0] not in IMAGE or any(part.startswith(".") for part in parts):
        return False
    return Path(parts[0]).resolve() in (
        Path(path).resolve(),
        *Path(path).resolve().parents,
    )  # a link may lead out of it


def check_output_dir(args: TrainArgs, nodes: int, reads_checksums: bool, report: Report) -> tuple[Path | None, bool]:
    """Check the directories that a run writes to; returns the checkpoint to resume, and whether they can be written."""
    found = recipe.write_problems(args)
    output_dir = Path(args.output_dir)
    if nodes > 1 and filesystem(output_dir) in LOCAL_FILESYSTEMS:
        report.warnings.append(
            f"--output_dir {output_dir} lies on {filesystem(output_dir)}; {nodes} machines must all see it there"
        )
    resumed_from, problems, doubts = resume_candidate(args, read=reads_checksums)
    report.problems += [*problems, *found]
    report.warnings += doubts
    return resumed_from, not found


def check_model_and_data(
    args: TrainArgs,
    needed: recipe.Requirements,
    command: Sequence[str],
    env: Mapping[str, str],
    report: Report,
    *,
    is_here: bool,
) -> list[PreTrainedModel]:
    """Check that what a run reads is here, if this machine should have it, and that its models can be made and wrapped.

    Returns:
        The models without weights, with the adapters that will be trained in them.
    """
    if is_here:
        may_lack = [] if constants.HF_HUB_OFFLINE else [need for need in needed.needs if not os.path.isdir(need.name)]
        must_be = [need for need in needed.needs if need not in may_lack]
        report.problems += recipe.lacking_problems(must_be, command)
        if found := recipe.lacking_problems(may_lack, command):
            report.warnings += [*found, "without that, the run reads it from the Hub itself, and needs internet"]
        report.warnings += tokenizing_warnings(args, needed.datasets)
    with mock.patch.dict(os.environ, env):  # a new model's attention depends on it
        models, found = models_on_meta(needed, make_new=not report.problems)
    report.problems += found
    report.warnings += warmup_warnings(args, args.max_steps) if args.max_steps > 0 else []
    for model in models:
        report.problems += wrap_problems(model, env) + attention_problems(args, model, env)
    try:
        for model in models:
            # The numbers of the new tokens' rows, which the tokenizer decides, do not matter here.
            add_adapters(model, args, range(len(getattr(args, "new_tokens", ()))))
            if env.get("ACCELERATE_MIXED_PRECISION") == "fp8":
                fp8_layers(model)
    except ConfigError as error:
        report.problems.append(str(error))
    return models


def tokenizing_warnings(args: TrainArgs, needed: Sequence[cache.HubDataset]) -> list[str]:
    """Say if rows probably take longer to tokenise than the processes that wait for it allow."""
    if not args.tokenizes_first:
        return []
    local = [*getattr(args, "train_files", []), *getattr(args, "eval_files", [])]
    size = sum(cache.size_of(Path(file)) or 0 for file in local) + sum(map(cache.bytes_of, needed))
    num_workers = getattr(args, "dataset_num_proc", None) or 1
    seconds = size / (TOKENIZED_PER_SECOND * num_workers)
    if seconds < args.ddp_timeout:
        return []
    return [
        f"{size / 1e9:.1f} GB of rows take about {seconds / 60:.0f} minutes to tokenise, at "
        f"{TOKENIZED_PER_SECOND / 1e6:.0f} MB/s in {num_workers} process(es). The processes that wait for it give up after "
        f"{args.ddp_timeout} s (--ddp_timeout): run `python -m accelerate_recipes prepare` with this recipe and its "
        "arguments first, if you have not yet"
    ]


def job_of(request: Request, gpu: str, changes: Sequence[Change] = ()) -> Job:
    """Make the simulation of a request under changes.

    Raises:
        ConfigError: if the launcher would start nothing.
    """
    flags = [*request.launch, "--main_process_ip", "head"]  # any address will do
    more = 1
    for change in changes:
        if change.config:
            flags[1] = str(request.config.parent / change.config)
            if problems := yaml_problems(Path(flags[1])):
                raise ConfigError(", ".join(problems))
        flags += change.launch
        more *= change.more_nodes
    command = [*request.command, *(word for change in changes for word in change.recipe)]
    try:
        env = launch_environment([*flags, *command])
        if more > 1:
            replicas, shards = (int(env.get(f"PARALLELISM_CONFIG_DP_{of}_SIZE", 1)) for of in ("REPLICATE", "SHARD"))
            flags += ["--num_machines", str(more * (int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])))]
            flags += ["--num_processes", str(more * int(env["WORLD_SIZE"]))]
            if replicas > 1:
                flags += ["--parallelism_config_dp_replicate_size", str(more * replicas)]
            elif "PARALLELISM_CONFIG_DP_SHARD_SIZE" in env:
                flags += ["--parallelism_config_dp_shard_size", str(more * shards)]
            env = launch_environment([*flags, *command])
    except ValueError as error:
        raise ConfigError(f"accelerate launch refuses: {error}") from error
    return Job(env, command, gpu)


def check_memory(request: Request, env: dict[str, str], report: Report, *, is_here: bool) -> str:
    """Simulate a step, and check that the run fits on its GPU; returns a line that says what it needs, if that is known.

    A file that the simulation reads may be only where the run is: unless `is_here`, it is then not a problem.
    """
    job = Job(env, request.command, request.gpu)
    with Simulator() as simulator:
        (outcome,) = predict_outcomes(simulator, [job])
        if isinstance(outcome, Outcome):
            prediction = prediction_of(job, outcome, GPUS[request.gpu])
            line = f"Memory of a GPU: {prediction.memory_line()}"
            if prediction.is_near:
                report.warnings.append(f"{line}; what lies outside of tensors is not known exactly")
                return ""
            if not prediction.fits:
                search = Search(simulator, prediction, job, lambda changes: job_of(request, request.gpu, changes))
                fitting = search.first_fitting()
                nothing = "none of the single changes that keep the loss trajectory, and could be simulated, is enough"
                remedy = f"it fits with {fitting}" if fitting else nothing
                report.problems.append(
                    f"{line}; {remedy}. `python -m accelerate_recipes plan` in place of preflight finds more, and "
                    "--no_plan leaves this check out"
                )
            return line
    if isinstance(outcome, ConfigError) and is_here:
        report.problems.append(str(outcome))
    else:
        said = reason_of(outcome)
        what = f"plan does not simulate {said}" if isinstance(outcome, NotSimulatedError) else said
        report.warnings.append(f"memory was not checked: {what}")
    return ""


def check_space(
    args: TrainArgs, models: Sequence[PreTrainedModel], env: Mapping[str, str], report: Report, *, is_here: bool
) -> str:
    """Check that the disk has room for the checkpoints; returns a line that says how much they need."""
    output_dir = Path(args.output_dir)
    num_parameters, trained = (
        sum(model.num_parameters(only_trainable=only) for model in models) for only in (False, True)
    )
    needs, counted = space_needed(args, num_parameters, trained, env.get("FSDP_STATE_DICT_TYPE"))
    needed_space = f"{output_dir} needs {gib(needs)} for {counted}"
    of_adapters = f", of which {trained:,} are trained" if trained < num_parameters else ""
    line = f"Parameters: {num_parameters:,}{of_adapters}; {needed_space}"
    if not is_here:
        return line
    # Unfinished files there are removed before the run writes anything.
    unfinished = (file for folder in files.leftovers(output_dir) for file in folder.rglob("*"))
    free = shutil.disk_usage(existing(output_dir)).free + sum(f.stat().st_size for f in unfinished if f.is_file())
    if needs > free:
        remedy = "make room, lower --save_total_limit, or give another"
        report.problems.append(f"--output_dir {needed_space}, but has {gib(free)} free; {remedy}")
    return f"{line}; {gib(free)} are free"
