"""Commands for use before, between and after runs: `python -m accelerate_recipes COMMAND ...`, or `accelerate-recipes`."""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from accelerate_recipes.arguments.gpus import GPUS
from accelerate_recipes.disk import print_any_text, readable
from accelerate_recipes.errors import ConfigError, DataError, near_path, printable, suggestion

EXAMPLES = """\
examples, in the order of a run's life:
  %(prog)s download recipes/chess.py --config recipes/configs/chess/codellama_7b.yaml
  %(prog)s prepare recipes/chess.py --config recipes/configs/chess/laptop.yaml
  %(prog)s preflight accelerate_configs/fsdp_full.yaml \\
      recipes/chess.py --config recipes/configs/chess/laptop.yaml
  %(prog)s plan accelerate_configs/fsdp_full.yaml --gpus-per-node 8 --gpu h100 \\
      recipes/c4.py --config recipes/configs/c4/llama2_7b.yaml
  %(prog)s launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
      recipes/chess.py --config recipes/configs/chess/laptop.yaml
  %(prog)s checkpoint list outputs/demo
  %(prog)s check-export outputs/demo/export

`%(prog)s COMMAND --help` shows the arguments of a command, `python recipes/chess.py --help` those of a recipe.
"""
RUN = "CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]"


class Commands(argparse.ArgumentParser):
    """Parser that names the command, or the choice, that a misspelt one is most like."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message += suggestion(found[1], re.findall("'(.+?)'", found[2]))
        super().error(message)


def command_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands. What it returns holds in `call` the function that does the work."""
    parser = Commands(
        description="Check, plan, launch and export runs of recipes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    def add(
        name: str, call: Callable[..., None], help: str, words: str = "", to: Any = commands, **settings: Any
    ) -> argparse.ArgumentParser:
        said = f"{help[0].upper()}{help[1:]}."
        command = to.add_parser(name, help=help, description=said, allow_abbrev=False, **settings)
        command.set_defaults(call=call, parser=command)
        if words:  # what follows the command, with the flags of another parser
            command.usage = f"{command.prog} {words}"
            command.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        return command

    fetch = add("download", download_needs, "download what a run will read from the Hub, where there is internet")
    fetch.add_argument("--max_shards", type=int, help="download only the first MAX_SHARDS files of a pattern")
    fetch.add_argument("--update", action="store_true", help="move to the newest commits; default: keep pinned ones")
    fetch.add_argument("recipe", metavar="RECIPE [ARGS...]")
    add("list", show_downloads, "list what was downloaded, and for which recipes; offline")
    add("verify", show_downloads, "read what was downloaded, and compare it with its checksums; offline")
    ready = add("prepare", prepare_rows, "prepare the data that a run will read, and show its first rows")
    ready.add_argument("recipe", metavar="RECIPE")
    ready.add_argument("argv", nargs=argparse.REMAINDER, metavar="[ARGS...]")
    told = add("schema", describe_arguments, "describe the arguments of a recipe, for editors and tools")
    told.add_argument("--json", action="store_true", required=True, help="as JSON Schema of its presets")
    told.add_argument("recipe", metavar="RECIPE")
    check = add("preflight", check_launch, "check a launch before it is queued", f"[--shell] [FLAGS] {RUN}")
    check.add_argument("--shell", action="store_true", help="print assignments for a job script; messages go to stderr")
    flags = "[--nodes N --gpus-per-node G --gpu NAME --json FILE --no_search]"
    foreseen = add("plan", plan_run, "predict memory and time of a run, by simulating a step", f"{flags} {RUN}")
    foreseen.epilog = f"NAME of --gpu: {', '.join(GPUS)}; default: this machine's GPU, or h100"
    job = add("k8s", print_manifest, "print a Kubernetes job for a run")
    job.add_argument("kind", choices=["pytorchjob", "trainjob"])
    job.add_argument("argv", nargs=argparse.REMAINDER, metavar=f"[FLAGS] {RUN}")
    said = "launch a run, as accelerate launch does; the message of the run is the end of the screen"
    add("launch", launch_run, said, "[LAUNCH FLAGS] RECIPE [ARGS...]", add_help=False)
    ended = add("requeue", requeue, "decide what a Slurm job does next; exit code 0: nothing, 75: requeue, 1: fail")
    ended.add_argument("output_dir", type=Path)
    ended.add_argument("--signalled", action="store_true", help="Slurm asked for the nodes back")
    ended.add_argument("--max_restarts", type=int, required=True)
    healthy = add("doctor", examine_machine, "find what would fail or be slow on this machine, or prove that it works")
    healthy.add_argument("--prove", action="store_true", help="make small runs, and write what they prove on a card")
    healthy.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="PROOF", help="make only these proofs"
    )
    healthy.add_argument("--output_dir", type=Path, default=Path("outputs/doctor"), help="folder of the card")
    saved = commands.add_parser("checkpoint", help="look at checkpoints").add_subparsers(dest="action", required=True)
    one = add("verify", verify_checkpoint, "check every file of a checkpoint", to=saved)
    several = add("list", list_checkpoints, "list the checkpoints of a run", to=saved)
    for command in (one, several):
        command.add_argument("directory", metavar="DIRECTORY_OR_URL")
    seen = add("report", report_runs, "write the report of a run, or compare several runs on one page")
    seen.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory")
    seen.add_argument("--out", type=Path, default="comparison.html", help="page that compares several runs")
    add_export_commands(add)
    return parser


def main() -> None:
    print_any_text()
    if os.path.basename(sys.argv[0]) == "__main__.py":
        sys.argv[0] = "python -m accelerate_recipes"  # argparse names the program by it, also in the usage of a recipe
    parser = command_parser()
    args, rest = parser.parse_known_args()
    if args.command is None and not rest:
        parser.print_help()
        return
    if args.command in ("launch", "preflight", "plan"):  # which have the flags of another parser, wherever they stand
        args.argv, rest = sys.argv[2:], []
    args.rest = rest
    if rest and args.command != "download":
        meant = suggestion(rest[0], args.parser._option_string_actions)
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    sys.argv[0] += f" {args.command}"
    try:
        args.call(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (ConfigError, DataError, OSError) as error:  # a path is too long, a file is not readable, a disk is full
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)


def add_export_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that make or use an export."""
    out = add("export", export_checkpoint, "turn a checkpoint into a folder that from_pretrained loads")
    out.add_argument("checkpoint", metavar="CHECKPOINT_OR_URL")
    out.add_argument("out", type=Path)
    out.add_argument("--dtype", choices=["bf16", "fp32"], help="dtype of the weights; default: that of evaluation")
    out.add_argument("--max_shard_size", default="5GB", help="largest safetensors file, such as 500MB")
    out.add_argument("--merge_adapter", action="store_true", help="export the whole model with adapters merged in")
    out.add_argument(
        "--text_only_export", action="store_true", help="export the trained language model without the rest of its base"
    )
    said = "load an export with transformers alone, and print what it is and answers"
    seen = add("check-export", check_export_alone, said)
    seen.add_argument("export", type=Path)
    more = {"nargs": "+", "action": "extend"}  # given twice, it holds all
    seen.add_argument("--prompt", **more, help="prompts to answer; default: the beginning of the first row")
    seen.add_argument("--image", **more, type=Path, default=[], help="images before the text of each prompt")
    seen.add_argument("--max_new_tokens", type=int, default=40, help="tokens of the answer at most")
    upload = add("push", push_export, "push an export to a repository on the Hub, private if it is new")
    upload.add_argument("export", type=Path)
    upload.add_argument("repo", metavar="ORG/NAME")
    upload.add_argument("--public", action="store_true", help="make a new repository public, or push to a public one")


# The functions below import what they need: torch and transformers take seconds, which a usage message does not need.


def download_needs(args: argparse.Namespace) -> None:
    from accelerate_recipes.hub.download import download
    from accelerate_recipes.launch.requirements import needs_of

    command = [args.recipe, *args.rest]
    download(needs_of(command), command, max_shards=args.max_shards, update=args.update)
    print("All is here. A run reads it with HF_HUB_OFFLINE=1, without any network")


def show_downloads(args: argparse.Namespace) -> None:
    from accelerate_recipes.hub.download import listing, verify

    print(listing() if args.command == "list" else verify())


def prepare_rows(args: argparse.Namespace) -> None:
    from accelerate_recipes.arguments import shipped
    from accelerate_recipes.life import workers
    from accelerate_recipes.recipe import prepare_data

    command = shipped.found_command([args.recipe, *args.argv])
    shipped.load(command[0])  # workers share what is imported before they are forked
    workers.start_fork_server(of_loaders=False)
    prepare_data(command)


def describe_arguments(args: argparse.Namespace) -> None:
    from accelerate_recipes.arguments import shipped
    from recipe_tools.schema import schema

    print(json.dumps(schema(shipped.load(args.recipe).Args, args.recipe), indent=1))


def check_launch(args: argparse.Namespace) -> None:
    from recipe_tools.preflight import preflight

    found, assignments = preflight([word for word in args.argv if word != "--shell"])
    print(found, file=sys.stderr if "--shell" in args.argv else sys.stdout)
    if "--shell" in args.argv:
        print(assignments)


def plan_run(args: argparse.Namespace) -> None:
    print("Planning: steps of the run are simulated, which may take minutes", flush=True)
    from recipe_tools.planning import plan

    plan(args.argv, partial(print, flush=True))


def examine_machine(args: argparse.Namespace) -> None:
    from recipe_tools.doctor.command import doctor

    sys.exit(not doctor(args.output_dir, args.only, proves=args.prove or bool(args.only)))


def launch_run(args: argparse.Namespace) -> None:
    from recipe_tools.quiet import launch

    launch(args.argv)


def print_manifest(args: argparse.Namespace) -> None:
    from recipe_tools.kubernetes import render_manifest

    manifest, said = render_manifest(args.kind, args.argv)
    print(said, file=sys.stderr)
    print(manifest, end="")


def requeue(args: argparse.Namespace) -> None:
    """Print what a job does next. Be quick: the job may be about to end."""
    from recipe_tools.requeue import after_attempt

    try:
        code, why = after_attempt(args.output_dir, args.signalled, args.max_restarts)
    except OSError as error:
        code, why = 1, f"how the attempt ended cannot be noted: {error}; put it right, and submit again"
    print(why)
    sys.exit(code)


def verify_checkpoint(args: argparse.Namespace) -> None:
    """Print the content of a checkpoint, or its defect."""
    from accelerate_recipes.checkpoint import files, mirror

    with mirror.as_checkpoint(args.directory, Path(tempfile.gettempdir(), "copy")) as directory:
        if reason := files.other_kind(directory, "checkpoint") or files.defect(directory) or files.damage(directory):
            raise ConfigError(f"{args.directory}: {reason}")
        marker = files.read_marker(directory)
    print(f"{args.directory}: step {marker['step']}, saved by {marker['world_size']} x {marker['strategy']}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in marker["versions"].items()))
    for name, entry in sorted(marker["files"].items()):
        print(f"{entry['size']:>14,}  {name}")
    print("complete and unchanged")


def list_checkpoints(args: argparse.Namespace) -> None:
    """Print a line for each directory named like a checkpoint: size, age, and whether it is complete."""
    from accelerate_recipes.checkpoint import files, mirror

    directory = Path(args.directory)
    if "://" in args.directory or (directory / "run.json").is_file():  # the place of a mirror
        store = mirror.store_at(args.directory)
        for copy in reversed(store.copies()):
            marker = store.marker(copy)
            print(f"{copy:<28} {readable(files.listed_bytes(marker)) + '   complete' if marker else 'incomplete'}")
        return
    found = files.candidates(directory)
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: there is no such folder{near_path(directory)}; give the output directory of a run"
        )
    if files.other_kind(directory, "checkpoint") is None:
        raise ConfigError(f"{directory}: it is a checkpoint; give the folder above it")
    if not found:
        print(f"{directory} holds no checkpoint")
    for path in found:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        hours = (time.time() - path.stat().st_mtime) / 3600
        state = files.defect(path) or "complete"
        print(f"{path.name:<20} {size / 2**30:>10.3f} GiB {hours:>10.1f} h ago   {state}")


def report_runs(args: argparse.Namespace) -> None:
    from accelerate_recipes.report.report import compare

    print(compare(args.runs, args.out))


def export_checkpoint(args: argparse.Namespace) -> None:
    import torch

    from accelerate_recipes.checkpoint import files, mirror
    from accelerate_recipes.checkpoint.export import check_shard_size, export
    from accelerate_recipes.conversations.exported import ROWS, compare_rows
    from accelerate_recipes.images.classifiers import IMAGE_CLASSIFIER
    from accelerate_recipes.images.pictures import renderer_of

    IMAGE_CLASSIFIER.register()
    check_shard_size(args.max_shard_size)
    with mirror.as_checkpoint(args.checkpoint, args.out) as source:
        if reason := files.other_kind(source, "checkpoint") or files.defect(source) or files.damage(source):
            raise ConfigError(f"{source}: {reason}")
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[args.dtype]
        settings = {"merge_adapter": args.merge_adapter, "text_only": args.text_only_export}
        try:
            export(source, args.out, dtype=dtype, max_shard_size=args.max_shard_size, **settings)
        except files.SaveError as error:
            raise ConfigError(str(error)) from None
    print(f"{args.out} holds the model of {args.checkpoint}")
    run = source.resolve().parent
    if (run / ROWS).exists():
        print(compare_rows(args.out, run, renderer_of))


def check_export_alone(args: argparse.Namespace) -> None:
    from recipe_tools.check_export import check_export

    print(check_export(args.export, args.prompt, args.max_new_tokens, args.image))


def push_export(args: argparse.Namespace) -> None:
    from accelerate_recipes.checkpoint.export import exported_files
    from accelerate_recipes.hub.push import push

    push(args.export, exported_files(args.export), args.repo, public=args.public)
