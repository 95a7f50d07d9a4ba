"""Where the library meets a recipe: running one, and loading one by its path.

A recipe is a script that defines `Args`, `requirements(args)` and `main(args)`, does nothing at import, and ends with
`run(main, Args, requirements)`.
"""

import importlib.util
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import datasets
import transformers
import yaml
from huggingface_hub import constants

from accelerate_recipes import hub, lock
from accelerate_recipes.args import ConfigError, TrainArgs, error_list, parse
from accelerate_recipes.checkpoint import SaveError
from accelerate_recipes.distributed import launch_problems
from accelerate_recipes.download import download
from accelerate_recipes.engine import NonFiniteError
from accelerate_recipes.shards import DataError
from accelerate_recipes.status import is_wish_of_a_person, update_status
from accelerate_recipes.stop import Stopped
from accelerate_recipes.watch import LostRankError


@dataclass
class Requirements:
    """What a run reads of the Hub: names of models with their tokenizers, of tokenizers alone, and datasets.

    `new_model` makes the model that it begins with instead; preflight does so on the meta device.
    """

    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    datasets: list[hub.Dataset] = field(default_factory=list)
    new_model: Callable[[], transformers.PreTrainedModel] | None = None

    @property
    def needs(self) -> list[hub.Need]:
        models = [hub.Model(name) for name in self.models]
        return [*models, *(hub.Model(name, weights=False) for name in self.tokenizers), *self.datasets]


def lacking_problems(needs: Sequence[hub.Need], command: Sequence[str]) -> list[str]:
    """What of it is not here, and what fetches it; `command` is the recipe with its arguments."""
    found, cache = [], constants.HF_HUB_CACHE
    lacking = {need: names for need in needs if (names := hub.lacking(need))}
    for need, names in lacking.items():
        if os.path.isdir(need.name):
            found.append(f"{need.name} is a folder, but lacks {', '.join(names)}")
        elif names == [hub.ALL]:
            found.append(f"{need} is not in {cache}")
        else:
            found.append(f"{need} is incomplete in {cache}, it lacks {', '.join(names)}")
    if not all(os.path.isdir(need.name) for need in lacking):
        said = "HF_HUB_OFFLINE is set; " if constants.HF_HUB_OFFLINE else ""
        found.append(f"{said}where there is internet, run: python -m accelerate_recipes download {shlex.join(command)}")
    return found


def needs_of(command: Sequence[str]) -> list[hub.Need]:
    """What a recipe with arguments reads of the Hub.

    Raises:
        ConfigError: if they are not valid.
    """
    module = load(command[0])
    # How many processes there will be does not matter to it.
    return module.requirements(parse(module.Args, command[1:], world_size=1)).needs


def run(
    main: Callable[[TrainArgs], None],
    args_class: type[TrainArgs],
    requirements: Callable[[TrainArgs], Requirements],
) -> None:
    """Run a recipe with the command line's arguments. What the user can put right is one message, no traceback."""
    if not sys.stderr.isatty():  # a job's log: plain lines
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    args, code = None, 0
    try:
        args = parse(args_class, other_problems=launch_problems)
        if int(os.environ.get("RANK", 0)) == 0:
            arguments = {"arguments": args.values()}
            print(yaml.safe_dump(arguments, sort_keys=False, default_flow_style=None, width=120), flush=True)
        provide(requirements(args))
        main(args)
        end_with(args, state="finished")
    except Stopped as reason:
        end_with(args, state="stopped", reason=str(reason))
        # What restarts by exit codes alone takes 0 for the end of the run: that is only what a person wanted.
        if not is_wish_of_a_person(str(reason)):
            code = int(os.environ.get("STOPPED_EXIT_CODE", 0))
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"Stopped by {reason}; the same command goes on from the newest checkpoint", flush=True)
    except (ConfigError, DataError, NonFiniteError, SaveError) as error:
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:
            # The first process of the node has the same error. Were this one to exit first, the launcher would end
            # the other before it has said so. It ends this one instead.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(30)
        print(f"error: {error}", file=sys.stderr, flush=True)
        end_with(args, state="failed", reason=str(error))
        sys.exit(2)
    except LostRankError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        end_with(args, state="crashed", reason=str(error))
        code = 1
    except Exception as error:
        end_with(args, state="crashed", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()
    leave(code)


def provide(needed: Requirements) -> None:
    """See that what a run reads is here, before there is a process group or anything on a GPU.

    Offline it must be: every process looks. Otherwise the first of each machine downloads what lacks, unless it is to
    be streamed, and the others wait.

    Raises:
        ConfigError: with all that is not here, or cannot be had.
    """
    needs = needed.needs
    if not constants.HF_HUB_OFFLINE:
        needs = [need for need in needs if os.path.isdir(need.name) or not need.streamed]
        to_have = [need for need in needs if not os.path.isdir(need.name)]
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            download([need for need in to_have if hub.lacking(need)], sys.argv)
        while any(map(hub.lacking, to_have)):  # the launcher ends this if the first process fails
            time.sleep(1)
    if problems := lacking_problems(needs, sys.argv):
        raise ConfigError(error_list("This run cannot start", problems))


def leave(code: int) -> None:
    """End a launched process, whose work is done, without the interpreter's teardown.

    With torch 2.13 on gloo that aborts now and then ("terminate called without an active exception": a thread that
    nobody joins), and the launcher takes the finished run for a failed one. And after a lost rank, a save in the
    background would be waited for. Files are closed and trackers finished.
    """
    if "LOCAL_RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with(args: TrainArgs | None, **changes: str) -> None:
    """Say in status.json how the run ended, if it came as far as to own its output directory."""
    if lock.is_taken() and not lock.is_lost():
        update_status(Path(args.output_dir), **changes)


def load(path: str | Path) -> ModuleType:
    """The recipe at `path` as a module.

    Raises:
        ConfigError: if there is none, or it lacks what a recipe defines.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe")
    # Not its bare name: `chess` is python-chess.
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    missing = [name for name in ("Args", "requirements", "main") if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"{path} is not a recipe: it does not define {', '.join(missing)}")
    return module
