"""Where the library meets a recipe: running one, and loading one by its path.

A recipe is a script that defines `Args`, `requirements(args)` and `main(args)`, does nothing at import, and ends with
`run(main, Args, requirements)`.
"""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

import datasets
import transformers
import yaml

from accelerate_recipes import hub, lock, stop
from accelerate_recipes.args import ConfigError, TrainArgs, error_list, parse
from accelerate_recipes.checkpoint import SaveError
from accelerate_recipes.distributed import launch_problems
from accelerate_recipes.engine import NonFiniteError
from accelerate_recipes.shards import DataError
from accelerate_recipes.stop import Stopped
from accelerate_recipes.watch import LostRankError


@dataclass
class Requirements:
    """What a run reads of the Hub: names of models, of tokenizers without one, and of datasets with a pattern."""

    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    datasets: list[tuple[str, str]] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What of it cannot be had, one sentence each."""
        found = [hub.model_problem(name) for name in self.models]
        found += [hub.tokenizer_problem(name) for name in self.tokenizers]
        found += [hub.dataset_problem(name, files) for name, files in self.datasets]
        return [problem for problem in found if problem]


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
            arguments = {"arguments": asdict(args)}
            print(yaml.safe_dump(arguments, sort_keys=False, default_flow_style=None, width=120), flush=True)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 and (problems := requirements(args).problems()):
            raise ConfigError(error_list("This run cannot start", problems))
        main(args)
        end_with(args, state="finished")
    except Stopped as reason:
        end_with(args, state="stopped", reason=str(reason))
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
        end_with(args, state="failed", reason=str(error))
        code = 1
    except Exception as error:
        end_with(args, state="failed", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()
    leave(code)


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
    if lock.is_taken():
        stop.update_status(Path(args.output_dir), **changes)


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
