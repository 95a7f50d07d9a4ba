"""Runner of recipes.

A recipe is a script that defines `Args`, `requirements(args)` and `main(args)`, does nothing at import, and ends with
`run_recipe(main, Args, requirements)`.
"""

import contextlib
import errno
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

import transformers
import yaml

from accelerate_recipes.agenda import observers
from accelerate_recipes.args import Args, TrainArgs, parse, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint import export, files, mirror
from accelerate_recipes.disk import is_full, print_any_text
from accelerate_recipes.errors import ConfigError, DataError, NonFiniteError, ReplicaError, printable, raise_problems
from accelerate_recipes.hub.push import push
from accelerate_recipes.launch.requirements import (
    Requirements,
    cache_of_library,
    problems_here,
    provide,
    write_problems,
)
from accelerate_recipes.life import lock, parent, status, stop, watch, workers
from accelerate_recipes.ranks import is_first, is_first_of_machine
from accelerate_recipes.report.report import Report, StepProfiler, write_report
from accelerate_recipes.run import DataReady


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
    module = shipped.load(command[0])
    args = parse(module.Args, [*command[1:], "--data_only", "true"], world_size=1)
    raise_problems("The data cannot be prepared", write_problems(args))
    gc.freeze()  # as in a run
    try:
        provide(args, module.requirements(args), command)
        with contextlib.suppress(DataReady), as_problem_of_the_machine():
            module.main(args)
    finally:
        gc.unfreeze()


def run_recipe(
    main: Callable[[Args], None], args_class: type[Args], requirements: Callable[[Args], Requirements]
) -> None:
    """Run a recipe with the command line's arguments. An error that the user can correct is one message, no traceback."""
    print_any_text()
    plain_lines_in_a_job()
    parent.follow_launcher()
    args, watched, code = None, None, 0
    try:
        with as_problem_of_the_machine(), contextlib.suppress(DataReady):
            args, problems = resolve(args_class, sys.argv[1:])
            raise_problems("This run cannot start", problems_here(args) + problems)
            if is_first():
                arguments = {"arguments that differ from the defaults": args.changed()}
                print(yaml.safe_dump(arguments, sort_keys=False, default_flow_style=None, width=120), flush=True)
            prepares = args.tokenizes_first or args.data_cache_dir
            if args.dataloader_num_workers or (prepares and is_first_of_machine()):
                with contextlib.suppress(ImportError):
                    import datasets  # noqa: F401  # workers share what is imported before they are forked
                workers.start_fork_server(of_loaders=args.dataloader_num_workers > 0)  # before the first thread
            gc.freeze()  # modules never go: collections, which would look at all of them, take a tenth of a short run
            watched = watch.start_watch(Path(args.output_dir), partial(fail, args))
            provide(args, requirements(args), sys.argv)
            observers[:] = [Report(args), StepProfiler(args)]
            main(args)
            if args.push_to_hub and is_first():  # last, and the other ranks do not wait for it
                out = Path(args.output_dir) / "export"
                push(out, export.exported_files(out), args.push_to_hub)
            end_with(args, state="finished")
    except (stop.Stopped, KeyboardInterrupt) as end:
        reason = str(end) or "Ctrl-C"
        end_with(args, state="stopped", reason=reason)
        begun = files.candidates(Path(args.output_dir)) if args is not None else ()
        has_saved = any((checkpoint / files.MARKER).is_file() for checkpoint in begun)
        message = f"Stopped by {reason}; the same command goes on from the newest checkpoint"
        if not has_saved:
            message = f"Stopped by {reason} before the first checkpoint; the same command begins again"
        if isinstance(end, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        # A supervisor that restarts by exit codes takes 0 for the end of the run. Only a `stop` file, which a person wrote,
        # means this end.
        elif not status.is_wish_of_a_person(reason):
            code = int(os.environ.get("STOPPED_EXIT_CODE", 0))
        if is_first():
            say(message, sys.stdout)
        if code:
            parent.tell_launcher(message)
    except (ConfigError, DataError, NonFiniteError, ReplicaError, files.SaveError) as error:
        told = watched is not None and watched.tell_first_rank(str(error))
        if told or not is_first_of_machine():
            # Another process prints the error: rank 0, which this process has told, or the first process of the machine,
            # which has the same error. If this process ended first, the launcher would end the other one before it has
            # printed. So this process waits until the launcher ends it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if stop.requested():  # the launcher sends SIGTERM only once, and it came before the line above
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
def as_problem_of_the_machine() -> Iterator[None]:
    """Turn an error for a full disk, missing permission to read or write, or a missing package into one for the user."""
    try:
        yield
    except ModuleNotFoundError as error:
        if problems := shipped.not_installed([error.name or ""]):
            raise ConfigError(*problems) from error
        raise
    except OSError as error:
        if is_full(error):
            # `datasets` names no file in its errors while it writes.
            folders = f"--output_dir, {cache_of_library('HF_DATASETS_CACHE')} or {tempfile.gettempdir()}"
            where = "" if error.filename else f": a file below {folders}"
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
    if args is not None and status.attempt()["job"] and is_first():
        # status.json must tell the job script, also before training begins, that a restart would not help.
        with contextlib.suppress(ConfigError, OSError):
            lock.take(Path(args.output_dir))
    end_with(args, state="failed", reason=reason)
    lock.release()
    leave(2)


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
    if is_first() and lock.is_taken() and not lock.is_lost():
        try:
            status.update_status(Path(args.output_dir), **changes)
        except OSError as error:  # a full disk must not hide how the run ended
            say(f"warning: status.json could not be written: {error}")
        write_report(Path(args.output_dir))
    if args is not None:
        with contextlib.suppress(OSError):  # a copy must not change how a run ends
            mirror.finish_copies(Path(args.output_dir), changes["state"])
