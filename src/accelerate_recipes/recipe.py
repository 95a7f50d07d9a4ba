"""Runner of recipes: runs a recipe as a script, and loads one by its path.

A recipe is a script that defines `Args`, `requirements(args)` and `main(args)`, does nothing at import, and ends with
`run_recipe(main, Args, requirements)`.
"""

import contextlib
import errno
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

import torch
import transformers
import yaml
from huggingface_hub import constants

from accelerate_recipes import shipped
from accelerate_recipes.adapters import targets
from accelerate_recipes.args import Args, TrainArgs, parse, resolve
from accelerate_recipes.attention import choose
from accelerate_recipes.base import check_export_form, check_one_dtype
from accelerate_recipes.checkpoint.files import MARKER, SaveError, candidates
from accelerate_recipes.disk import is_full, print_any_text, refusal
from accelerate_recipes.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    noting,
    printable,
    raise_problems,
    suggestion,
)
from accelerate_recipes.hub import cache, push
from accelerate_recipes.hub.download import download
from accelerate_recipes.launcher import launcher_problems
from accelerate_recipes.life import lock, parent, watch, workers
from accelerate_recipes.life.status import attempt, is_wish_of_a_person, update_status
from accelerate_recipes.life.stop import Stopped, requested
from accelerate_recipes.losses import check_head
from accelerate_recipes.models import CAUSAL
from accelerate_recipes.pretrained import Kind, check_model
from accelerate_recipes.probes import check_packing
from accelerate_recipes.ranks import is_first, is_first_of_machine, ranks_a_row
from accelerate_recipes.report import write_report
from accelerate_recipes.run import DataReady
from accelerate_recipes.sharing import check_shared_masks, model_sharing_problems
from accelerate_recipes.strategy import fp8_layers, launch_problems, num_accelerators, wrap_problems
from accelerate_recipes.tokenizers import load_tokenizer

# Arguments that name directories to which runs write. In a pod, relative ones lie on the volume for checkpoints.
WRITTEN = ("output_dir", "data_cache_dir", "pretokenize")
# Variables that name the folders to which `datasets` and `evaluate` write, with the folder's place below HF_HOME.
CACHES = {"HF_MODULES_CACHE": "modules", "HF_DATASETS_CACHE": "datasets"}


@dataclass
class Requirements:
    """Models with their tokenizers, tokenizers alone, and datasets that a run reads from the Hub; empty names are ignored.

    `kind` says how the models are loaded, each with its tokenizer unless `tokenizers` are named. `new_model` makes the
    model of a run that begins with a new one; its first call is on the meta device. `changes(config, name)` returns the
    fields that the run changes in the configuration of the model of this name.
    """

    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    datasets: list[cache.HubDataset] = field(default_factory=list)
    kind: Kind = CAUSAL
    new_model: Callable[[], transformers.PreTrainedModel] | None = None
    changes: Callable[[transformers.PreTrainedConfig, str], dict[str, Any]] | None = None

    def __post_init__(self):
        self.models, self.tokenizers = ([name for name in names if name] for names in (self.models, self.tokenizers))

    @property
    def needs(self) -> list[cache.Need]:
        models = [cache.HubModel(name) for name in self.models]
        return [*models, *(cache.HubModel(name, weights=False) for name in self.tokenizers), *self.datasets]


def write_problems(args: TrainArgs) -> list[str]:
    """List the directories that a run must write to but cannot, one sentence each."""
    found = []
    for name in WRITTEN:
        directory = getattr(args, name, None)
        if directory:
            if name != "output_dir" and os.path.isdir(directory) and os.listdir(directory):
                continue  # it holds prepared data, perhaps of somebody else, which are only read
            if why := refusal(directory):
                found.append(f"--{name} {directory} cannot be written to: {why}; give another")
        elif directory == "" and name != "pretokenize":  # an empty --pretokenize means off
            found.append(f"--{name} is empty; name a folder")
    if args.fills_caches:
        for name in list(CACHES)[: 1 if hasattr(args, "data_cache_dir") else 2]:
            directory = cache_of_library(name)
            if why := refusal(directory):
                found.append(
                    f"{directory} cannot be written to: {why}; set HF_HOME to a folder of your own, and HF_HUB_CACHE to "
                    f"{constants.HF_HUB_CACHE} if the models lie there"
                )
    return found


def cache_of_library(variable: str) -> Path:
    """Return the folder that a variable of CACHES names, without the second that an import of `datasets` takes."""
    return Path(os.environ.get(variable, os.path.join(constants.HF_HOME, CACHES[variable])))


def push_to_hub_problems(args: TrainArgs, *, from_here: bool) -> list[str]:
    """List what prevents the push of --push_to_hub, one sentence each. Rank 0 pushes, perhaps from another machine."""
    if not args.push_to_hub:
        return []
    found = push.push_problems(args.push_to_hub) if from_here else push.name_problems(args.push_to_hub)
    return [f"--push_to_hub: {problem}" for problem in found]


def lacking_problems(needs: Sequence[cache.Need], command: Sequence[str]) -> list[str]:
    """List the requirements that are missing here, and how to download them. `command` is the recipe with its arguments."""
    found, place = [], constants.HF_HUB_CACHE
    lacking = {need: names for need in needs if (names := cache.lacking(need))}
    for need, names in lacking.items():
        if os.path.isdir(need.name):
            found.append(f"{need.name} is a folder, but lacks {', '.join(names)}")
        elif cache.is_path(need.name):
            found.append(f"{need}: no such folder")
        elif names == [cache.ALL]:
            found.append(f"{need} is not in {place}")
        else:
            found.append(f"{need} is incomplete in {place}, it lacks {', '.join(names)}")
    if not all(cache.is_path(need.name) for need in lacking):
        said = "HF_HUB_OFFLINE is set; " if constants.HF_HUB_OFFLINE else ""
        found.append(f"{said}where there is internet, run: python -m accelerate_recipes download {shlex.join(command)}")
    return found


def needs_problems(needed: Requirements, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """List what is missing here and no run could download, and, as warnings, what a run would download."""
    may_lack = [] if constants.HF_HUB_OFFLINE else [need for need in needed.needs if not cache.is_path(need.name)]
    must_be = [need for need in needed.needs if need not in may_lack]
    found = lacking_problems(may_lack, command)
    found += ["without that, the run reads it from the Hub itself, and needs internet"] if found else []
    return lacking_problems(must_be, command), found


def check_models(
    args: TrainArgs, needed: Requirements, *, makes_new: bool = True
) -> tuple[list[transformers.PreTrainedModel], list[str]]:
    """Check the models of a run whose files are here and, if nothing is wrong with the pretrained ones, their tokenizers.

    The environment is that of the launch. `makes_new` says whether the arguments of a new model are good enough to make
    it. With --data_only, only the files of the models are checked: the run may be on another machine.

    Returns:
        The models on the meta device, and the reasons why some of them cannot be trained.
    """
    models, problems = [], []
    for name in needed.models:
        if (place := cache.folder("model", name)) and (place / "config.json").is_file():
            with noting(problems):
                models.append(check_model(name, needed.kind, needed.changes))
                if name != args.base_model or args.use_peft:
                    continue
                if args.param_dtype == torch.bfloat16 and os.environ.get("ACCELERATE_USE_FSDP") == "true":
                    check_one_dtype(models[-1], name)
                if not cache.lacking(cache.HubModel(name)):
                    check_export_form(models[-1], name)
    load = load_tokenizer if needed.tokenizers else needed.kind.reader
    for name in needed.tokenizers or needed.models:
        if not problems and not cache.lacking(cache.HubModel(name, weights=not needed.tokenizers)):
            with noting(problems):
                load(name)
    if args.data_only:
        return models, problems
    if needed.new_model and makes_new:
        with noting(problems), torch.device("meta"):
            models.append(needed.new_model())
    for model in models:
        problems += model_problems(args, model, os.environ)
    return models, problems


def model_problems(args: TrainArgs, model: transformers.PreTrainedModel, env: Mapping[str, str]) -> list[str]:
    """List why a model on the meta device cannot be trained with `args`, in the launch that `env` describes.

    PEFT is not imported: it may import bitsandbytes, which looks at the GPUs before the process has chosen its own.
    """
    found = wrap_problems(model, env) + attention_problems(args, model, env)
    with noting(found):
        if args.use_peft:
            targets(model, args)
        if env.get("ACCELERATE_MIXED_PRECISION") == "fp8":
            fp8_layers(model)
    return found


def attention_problems(args: TrainArgs, model: transformers.PreTrainedModel, env: Mapping[str, str]) -> list[str]:
    """List why a model cannot be trained with the attention, the packing and the loss that the arguments ask for."""
    name = getattr(args, "attn_implementation", "")
    if not name or model.config.is_encoder_decoder:
        return []
    size = ranks_a_row(env)
    if problems := model_sharing_problems(model.config, size) if size > 1 else []:
        return problems
    with noting(problems):
        attention, _ = choose(name, model.config, args.param_dtype, args.has_boundaries, size > 1)
        model.config._attn_implementation = attention
        if size > 1:
            check_shared_masks(model.config, attention, getattr(args, "max_length", 0))
        if getattr(args, "document_mask", False):
            check_packing(model.config)
        if not getattr(args, "whole_logits", True):
            check_head(model.config)
    return problems


def needs_of(command: Sequence[str]) -> list[cache.Need]:
    """List what a recipe reads from the Hub with these arguments.

    Raises:
        ConfigError: if the arguments are not valid.
    """
    command = shipped.found_command(command)
    module = load(command[0])
    # The number of processes does not matter here.
    return module.requirements(parse(module.Args, command[1:], world_size=1)).needs


def plain_lines_in_a_job() -> None:
    """Switch progress bars off where stderr is not a terminal."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # which an import of `datasets` reads
        if "datasets" in sys.modules:
            sys.modules["datasets"].disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def prepare_data(command: Sequence[str]) -> None:
    """Prepare the data of a run in this process, so that the run finds them ready, and print its first rows.

    `command` is the recipe with its arguments. Long work such as tokenising is done here, so that no rank waits for it.

    Raises:
        ConfigError: for arguments that are not valid, and for missing files.
        DataError: for data that cannot be used.
    """
    plain_lines_in_a_job()
    command = shipped.found_command(command)
    module = load(command[0])
    args = parse(module.Args, [*command[1:], "--data_only", "true"], world_size=1)
    raise_problems("The data cannot be prepared", write_problems(args))
    provide(args, module.requirements(args), command)
    with contextlib.suppress(DataReady), as_problem_of_the_disk():
        module.main(args)


def problems_here(args: TrainArgs) -> list[str]:
    """List what prevents this process from running with these arguments, one sentence each."""
    return [
        *launcher_problems(),
        *launch_problems(args, os.environ, num_accelerators()),
        *write_problems(args),
        *push_to_hub_problems(args, from_here=is_first()),
    ]


def run_recipe(
    main: Callable[[Args], None], args_class: type[Args], requirements: Callable[[Args], Requirements]
) -> None:
    """Run a recipe with the command line's arguments. An error that the user can correct is one message, no traceback."""
    print_any_text()
    plain_lines_in_a_job()
    parent.follow_launcher()
    args, watched, code = None, None, 0
    try:
        with as_problem_of_the_disk(), contextlib.suppress(DataReady):
            args, problems = resolve(args_class, sys.argv[1:])
            raise_problems("This run cannot start", problems_here(args) + problems)
            if is_first():
                arguments = {"arguments that differ from the defaults": args.changed()}
                print(yaml.safe_dump(arguments, sort_keys=False, default_flow_style=None, width=120), flush=True)
            if args.dataloader_num_workers:
                with contextlib.suppress(ImportError):
                    import datasets  # noqa: F401  # workers share what is imported before they are forked
                workers.start_fork_server()  # before the first thread
            watched = watch.start_watch(Path(args.output_dir), partial(fail, args))
            provide(args, requirements(args), sys.argv)
            main(args)
            end_with(args, state="finished")
    except (Stopped, KeyboardInterrupt) as end:
        reason = str(end) or "Ctrl-C"
        end_with(args, state="stopped", reason=reason)
        has_saved = args is not None and any((c / MARKER).is_file() for c in candidates(Path(args.output_dir)))
        said = f"Stopped by {reason}; the same command goes on from the newest checkpoint"
        if not has_saved:
            said = f"Stopped by {reason} before the first checkpoint; the same command begins again"
        if isinstance(end, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        # A supervisor that restarts by exit codes takes 0 for the end of the run. Only a `stop` file, which a person wrote,
        # means this end.
        elif not is_wish_of_a_person(reason):
            code = int(os.environ.get("STOPPED_EXIT_CODE", 0))
        if is_first():
            say(said, sys.stdout)
        if code:
            parent.tell_launcher(said)
    except (ConfigError, DataError, NonFiniteError, SaveError) as error:
        told = watched is not None and watched.tell_first_rank(str(error))
        if told or not is_first_of_machine():
            # Another process prints the error: rank 0, which this process has told, or the first process of the machine,
            # which has the same error. If this process ended first, the launcher would end the other one before it has
            # printed. So this process waits until the launcher ends it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if requested():  # the launcher sends SIGTERM only once, and it came before the line above
                leave(2)
            time.sleep(30)
        fail(args, str(error))
    except Exception as error:
        if reason := watched.lost(error) if watched is not None else "":
            say(f"error: {reason}")
        else:
            say(traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
        parent.tell_launcher(printable(reason))
        end_with(args, state="crashed", reason=reason)
        code = 1
    finally:
        lock.release()
    leave(code)


@contextlib.contextmanager
def as_problem_of_the_disk() -> Iterator[None]:
    """Turn the error of a full disk, or of missing permission to read or write, into an error for the user."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            # `datasets` names no file in its errors while it writes.
            places = f"--output_dir, {cache_of_library('HF_DATASETS_CACHE')} or {tempfile.gettempdir()}"
            where = "" if error.filename else f": a file below {places}"
            raise ConfigError(f"{error}{where}; make room, and the same command goes on") from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise ConfigError(str(error)) from error
        raise


def say(text: str, file: TextIO | None = None) -> None:
    """Print to stderr or to another file. Even if that is full or closed, the run must end in good order."""
    with contextlib.suppress(OSError):
        print(text, file=file or sys.stderr, flush=True)


def fail(args: TrainArgs | None, reason: str) -> NoReturn:
    """End with an error that the user must correct. If another rank found it, the watch's thread on rank 0 calls this."""
    message = f"error: {printable(reason)}"
    if not parent.tell_launcher(message):
        say(message)
    if args is not None and attempt()["job"] and is_first():
        # status.json must tell the job script, also before training begins, that a restart would not help.
        with contextlib.suppress(ConfigError, OSError):
            lock.take(Path(args.output_dir))
    end_with(args, state="failed", reason=reason)
    lock.release()
    leave(2)


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


def leave(code: int) -> NoReturn:
    """End this process, whose work is done, without the interpreter's teardown.

    The teardown waits for a save in the background and, without end, for a loader's worker or a thread that does not
    end. With torch 2.13 on gloo it aborts now and then ("terminate called without an active exception": a thread that
    nobody joins), and the launcher takes the finished run for a failed one. Files are closed and trackers finished
    before this call.
    """
    workers.remove_socket()
    with contextlib.suppress(OSError):  # the reader of a pipe may have gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_with(args: TrainArgs | None, **changes: str) -> None:
    """Write to status.json and the report how the run ended, if the run owns its output directory."""
    if lock.is_taken() and not lock.is_lost():
        try:
            update_status(Path(args.output_dir), **changes)
        except OSError as error:  # a full disk must not hide how the run ended
            say(f"warning: status.json could not be written: {error}")
        write_report(Path(args.output_dir))


def load(path: str | Path) -> ModuleType:
    """Load the recipe at `path` as a module.

    Raises:
        ConfigError: if there is no such file, if it cannot be imported, or if it lacks what a recipe defines.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe{suggestion(path.stem, shipped.names('recipes'), cutoff=0.6)}")
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a recipe; give a .py file, such as recipes/c4.py")
    # Do not import it by its bare name: `chess` is python-chess.
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f" (line {lines[-1]})" if lines else ""  # a SyntaxError says it itself
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}{where}") from error
    missing = [name for name in ("Args", "requirements", "main") if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"{path} is not a recipe: it does not define {', '.join(missing)}")
    return module
