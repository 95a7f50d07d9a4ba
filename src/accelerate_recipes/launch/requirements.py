"""Requirements of a run, and checks of them before it starts: files, models that can be trained, folders to write to.

Preflight checks them on a login node, and every process of a run again.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants

from accelerate_recipes.args import TrainArgs, parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.disk import refusal
from accelerate_recipes.errors import collecting_errors, near_path, raise_problems
from accelerate_recipes.hub import cache, push
from accelerate_recipes.hub.download import download
from accelerate_recipes.launch.checks import fp8_layers, launch_problems, num_accelerators, wrap_problems
from accelerate_recipes.launch.settings import launcher_problems
from accelerate_recipes.models import adapters, attention, base, head_probe, probes
from accelerate_recipes.models.loading import CAUSAL
from accelerate_recipes.models.pretrained import Kind, check_model
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.ranks import is_first, is_first_of_machine, ranks_a_row

# Arguments that name directories to which runs write. In a pod, relative ones lie on the volume for checkpoints.
WRITTEN_FOLDERS = ("output_dir", "data_cache_dir", "pretokenize")

# Variables that name the folders to which `datasets` and `evaluate` write, with the folder's place below HF_HOME.
CACHE_FOLDERS = {"HF_MODULES_CACHE": "modules", "HF_DATASETS_CACHE": "datasets"}


@dataclass
class Requirements:
    """Models with their tokenizers, tokenizers alone, and datasets that a run reads from the Hub; empty names are ignored.

    `kind` says how the models are loaded, each with its tokenizer unless `tokenizers` are named. `new_model` makes the
    model of a run that begins with a new one; its first call is on the meta device.
    """

    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    datasets: list[cache.HubDataset] = field(default_factory=list)
    kind: Kind = CAUSAL
    new_model: Callable[[], transformers.PreTrainedModel] | None = None

    def __post_init__(self):
        self.models, self.tokenizers = ([name for name in names if name] for names in (self.models, self.tokenizers))

    @property
    def needs(self) -> list[cache.Need]:
        models = [cache.HubModel(name) for name in self.models]
        return [*models, *(cache.HubModel(name, weights=False) for name in self.tokenizers), *self.datasets]


def write_problems(args: TrainArgs) -> list[str]:
    """List the directories that a run must write to but cannot, one sentence each."""
    problems = []
    for name in WRITTEN_FOLDERS:
        directory = getattr(args, name, None)
        if directory:
            if name != "output_dir" and os.path.isdir(directory) and os.listdir(directory):
                continue  # it holds prepared data, perhaps of somebody else, which are only read
            if why := refusal(directory):
                problems.append(f"--{name} {directory} cannot be written to: {why}; give another")
        elif directory == "" and name != "pretokenize":  # an empty --pretokenize means off
            problems.append(f"--{name} is empty; name a folder")
    if args.fills_caches:
        for name in list(CACHE_FOLDERS)[: 1 if args.data_cache_dir else 2]:
            directory = cache_of_library(name)
            if why := refusal(directory):
                of_hub = f"HF_HUB_CACHE to {constants.HF_HUB_CACHE} if the models lie there"
                remedy = f"set HF_HOME to a folder of your own, and {of_hub}"
                problems.append(f"{directory} cannot be written to: {why}; {remedy}")
    return problems


def cache_of_library(variable: str) -> Path:
    """Return the folder that a variable of CACHE_FOLDERS names, without the second that an import of `datasets` takes."""
    return Path(os.environ.get(variable, os.path.join(constants.HF_HOME, CACHE_FOLDERS[variable])))


def push_to_hub_problems(args: TrainArgs, *, from_here: bool) -> list[str]:
    """List what prevents the push of --push_to_hub, one sentence each. Rank 0 pushes, perhaps from another machine."""
    if not args.push_to_hub:
        return []
    problems = push.push_problems(args.push_to_hub) if from_here else push.name_problems(args.push_to_hub)
    return [f"--push_to_hub: {problem}" for problem in problems]


def lacking_problems(needs: Sequence[cache.Need], command: Sequence[str]) -> list[str]:
    """List the requirements that are missing here, and how to download them. `command` is the recipe with its arguments."""
    problems, hub_cache = [], constants.HF_HUB_CACHE
    lacking = {need: names for need in needs if (names := cache.lacking(need))}
    for need, names in lacking.items():
        if os.path.isdir(need.name):
            problems.append(f"{need.name} is a folder, but lacks {', '.join(names)}")
        elif cache.is_path(need.name):
            problems.append(f"{need}: no such folder{near_path(need.name)}")
        elif names == [cache.ALL]:
            problems.append(f"{need} is not in {hub_cache}")
        else:
            problems.append(f"{need} is incomplete in {hub_cache}, it lacks {', '.join(names)}")
    if not all(cache.is_path(need.name) for need in lacking):
        reason = "HF_HUB_OFFLINE is set; " if constants.HF_HUB_OFFLINE else ""
        problems.append(
            f"{reason}where there is internet, run: python -m accelerate_recipes download {shlex.join(command)}"
        )
    return problems


def needs_problems(needed: Requirements, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """List what is missing here and no run could download, and, as warnings, what a run would download."""
    may_lack = [] if constants.HF_HUB_OFFLINE else [need for need in needed.needs if not cache.is_path(need.name)]
    must_be = [need for need in needed.needs if need not in may_lack]
    downloads = lacking_problems(may_lack, command)
    downloads += ["without that, the run reads it from the Hub itself, and needs internet"] if downloads else []
    return lacking_problems(must_be, command), downloads


def check_models(
    args: TrainArgs, needed: Requirements, *, makes_new: bool = True
) -> tuple[list[transformers.PreTrainedModel], list[str]]:
    """Check the models of a run whose files are here and, if nothing is wrong with the pretrained ones, their tokenizers.

    The environment is that of the launch. `makes_new` says whether the arguments of a new model are good enough to make
    it. With --data_only, only the files of the models are checked: the run may be on another machine.

    Returns:
        The model to train on the meta device, if it is here, and the reasons why this or another cannot be used.
    """
    models, others, problems = [], [], []
    for name in needed.models:
        if (folder := cache.folder("model", name)) and (folder / "config.json").is_file():
            with collecting_errors(problems):
                model = check_model(name, needed.kind)
                (models if name == args.base_model else others).append(model)
                if name != args.base_model or args.use_peft:
                    continue
                if args.param_dtype == torch.bfloat16 and os.environ.get("ACCELERATE_USE_FSDP") == "true":
                    base.check_one_dtype(model, name)
                if not cache.lacking(cache.HubModel(name)):
                    base.check_export_form(model, name)
    load = load_tokenizer if needed.tokenizers else needed.kind.reader
    for name in needed.tokenizers or needed.models:
        if not problems and not cache.lacking(cache.HubModel(name, weights=not needed.tokenizers)):
            with collecting_errors(problems):
                load(name)
    if args.data_only:
        return models, problems
    if needed.new_model and makes_new:
        with collecting_errors(problems), torch.device("meta"):
            models.append(needed.new_model())
    for model in (*models, *others):
        problems += model_problems(args, model, os.environ, is_trained=model in models)
    return models, problems


def model_problems(
    args: TrainArgs, model: transformers.PreTrainedModel, env: Mapping[str, str], *, is_trained: bool = True
) -> list[str]:
    """List why a model on the meta device cannot be used with `args` in the launch that `env` describes.

    PEFT is not imported: it may import bitsandbytes, which looks at the GPUs before the process has chosen its own.
    """
    of_trained = {} if is_trained else {"FSDP_TRANSFORMER_CLS_TO_WRAP": ""}
    problems = wrap_problems(model, {**env, **of_trained}) + attention_problems(args, model, env)
    with collecting_errors(problems):
        if args.use_peft and is_trained:
            adapters.targets(model, args)
        if env.get("ACCELERATE_MIXED_PRECISION") == "fp8":
            fp8_layers(model)
    return problems


def attention_problems(args: TrainArgs, model: transformers.PreTrainedModel, env: Mapping[str, str]) -> list[str]:
    """List why a model cannot be trained with the attention, the packing and the loss that the arguments ask for."""
    name = args.attn_implementation
    if not name or model.config.is_encoder_decoder:
        return []
    size = ranks_a_row(env)
    if problems := probes.model_sharing_problems(model.config, size) if size > 1 else []:
        return problems
    with collecting_errors(problems):
        kernel, _ = attention.choose(name, model.config, args.param_dtype, args.has_boundaries, size > 1)
        model.config._attn_implementation = kernel
        if size > 1:
            probes.check_shared_masks(model.config, kernel, args.longest_row)
        if args.document_mask:
            probes.check_packing(model.config)
        if args.whole_logits is False:
            head_probe.check_head(model.config)
    return problems


def needs_of(command: Sequence[str]) -> list[cache.Need]:
    """List what a recipe reads from the Hub with these arguments.

    Raises:
        ConfigError: if the arguments are not valid.
    """
    command = shipped.found_command(command)
    module = shipped.load(command[0])
    # The number of processes does not matter here.
    return module.requirements(parse(module.Args, command[1:], world_size=1)).needs


def problems_here(args: TrainArgs) -> list[str]:
    """List what prevents this process from running with these arguments, one sentence each."""
    return [
        *launcher_problems(),
        *launch_problems(args, os.environ, num_accelerators()),
        *write_problems(args),
        *push_to_hub_problems(args, from_here=is_first()),
    ]


def provide(args: TrainArgs, needed: Requirements, command: Sequence[str]) -> None:
    """Make sure that the files of a run are here, and that its models can be trained, before anything is on a GPU.

    `command` is the recipe with its arguments. Offline, every process checks that the files are here. Otherwise the
    first process of each machine downloads missing files, except those that are streamed, while the others wait.

    Raises:
        ConfigError: with everything that is missing, or with all reasons why a model cannot be trained.
    """
    needs = needed.needs
    if not constants.HF_HUB_OFFLINE:
        needs = [need for need in needs if cache.is_path(need.name) or not need.streamed]
        to_have = [need for need in needs if not cache.is_path(need.name)]
        if is_first_of_machine():
            download([need for need in to_have if cache.lacking(need)], command)
        # There is no process group yet, so the other processes wait for the files.
        while any(map(cache.lacking, to_have)):  # the launcher ends this if the first process fails
            time.sleep(1)
    raise_problems("This run cannot start", lacking_problems(needs, command) or check_models(args, needed)[1])
