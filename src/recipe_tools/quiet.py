"""The command `launch`: `accelerate launch` with the same arguments, but its screen ends with the message of the run.

`accelerate launch` itself also prints the stack of the launcher, which says nothing about the run.
"""

import ast
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError, raise_problems, suggestion
from accelerate_recipes.launch.settings import parse_flags, yaml_problems
from recipe_tools.request import completed

# It logs what the ranks have said already: that a process failed, and that the others get a signal.
LOGGER = "torch.distributed.elastic.multiprocessing.api"
LAUNCHER = "accelerate.commands.launch"
ERROR = "error: "


def launch(argv: Sequence[str]) -> None:
    """Do what `accelerate launch ARGV` does, with the same exit code, but print no stack of the launcher.

    Raises:
        ConfigError: for arguments that `accelerate launch` refuses, and for files that cannot be meant.
    """
    args = parse_flags(argv)
    if args.config_file and not os.path.exists(args.config_file):
        raise ConfigError(*yaml_problems(Path(args.config_file)))
    script, config = args.training_script, shipped.config_file(args.training_script)
    if config.endswith((".yaml", ".yml")):
        if not yaml_problems(Path(config), 1):
            raise ConfigError(f"{script} is not a recipe; give it before the recipe: --config_file {script}")
        raise ConfigError(f"{script} is not a recipe; give a .py file, and a preset behind it: --config {script}")
    if not (args.module or args.no_python or os.path.isfile(script)):
        meant = suggestion(Path(script).stem, shipped.names("recipes"), cutoff=0.6)
        raise ConfigError(f"{script}: no such recipe{meant}")
    if script.endswith(".py"):
        raise_problems(f"{script} cannot start", shipped.not_installed(imported_by(Path(script))))
    config = Path(args.config_file or ("" if args.cpu else default_config_file))
    if config.is_file():
        raise_problems("This run cannot start", yaml_problems(config, args.num_processes))
    logging.getLogger(LAUNCHER).disabled = True  # `launch_command` completes the flags again, and says what it adds
    whole = completed(args)
    logging.getLogger(LAUNCHER).disabled = False
    if whole.num_machines > 1 and not whole.main_process_ip:
        first = "give the address of the first, --main_process_ip, and the number of this one, --machine_rank"
        raise ConfigError(f"--num_machines is {whole.num_machines}, but nothing says where they meet; {first}")
    if "LOGLEVEL" not in os.environ:
        logging.getLogger(LOGGER).setLevel(logging.CRITICAL)
    try:
        launch_command(args)
    except ChildFailedError as error:
        leave_with(failure_in_words(error))
    except subprocess.CalledProcessError as error:  # one process, which has printed its message unless it was killed
        leave_with(f"the process got {signal.Signals(-error.returncode).name}" if error.returncode < 0 else "")
    except SignalException:  # the processes have been stopped, and have said so
        leave_with("")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except ValueError as error:
        raise ConfigError(f"accelerate launch refuses: {error}") from error


def imported_by(script: Path) -> list[str]:
    """List the modules that a script imports at once."""
    with contextlib.suppress(SyntaxError, ValueError):  # which the processes say
        body = ast.parse(script.read_bytes()).body
        found = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        found += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]
        return found
    return []


def failure_in_words(error: ChildFailedError) -> str:
    """Say why the first process failed; "" if it has printed that itself, and no other process gave a reason."""
    failures = error.failures
    told = [rank for rank, failure in failures.items() if isinstance(failure.message, dict)]
    # The launcher ends the others by SIGTERM, perhaps in the same second.
    rank = min(failures, key=lambda n: (failures[n].exitcode == -signal.SIGTERM, failures[n].timestamp))
    message: Any = failures[rank].message
    reason = message["message"] if rank in told else message
    if told == [rank]:  # of an error without a stack, which begins with this word, the launcher prints the message
        return reason.removeprefix(ERROR) if reason.startswith(ERROR) else ""
    return f"rank {rank}: {reason.removeprefix(ERROR)}"


def leave_with(message: str) -> NoReturn:
    if message:
        print(f"{ERROR}{message}", file=sys.stderr)
    sys.exit(1)
