"""Commands for use before, between and after runs: `python -m accelerate_recipes COMMAND ...`"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from accelerate_recipes.disk import print_any_text
from accelerate_recipes.errors import ConfigError, DataError, printable


def command_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m accelerate_recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("preflight", help="check a launch before it is queued", add_help=False)
    check.add_argument("--shell", action="store_true", help="print assignments for a job script; messages go to stderr")
    check.add_argument("argv", nargs=argparse.REMAINDER, metavar="CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]")
    ahead = commands.add_parser("plan", help="predict memory and time of a run, by simulating a step", add_help=False)
    ahead.add_argument(
        "argv",
        nargs=argparse.REMAINDER,
        metavar="CONFIG [--nodes N --gpus-per-node G --gpu NAME --json FILE --plot FILE --no-search] RECIPE [ARGS...]",
    )
    job = commands.add_parser("k8s", help="print a Kubernetes job for a run")
    job.add_argument("kind", choices=["pytorchjob", "trainjob"])
    job.add_argument("argv", nargs=argparse.REMAINDER, metavar="[FLAGS] CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]")
    fetch = commands.add_parser(
        "download", help="download what a run will read from the Hub, where there is internet", allow_abbrev=False
    )
    fetch.add_argument("--max_shards", type=int, help="download only the first MAX_SHARDS files of a pattern")
    fetch.add_argument("--update", action="store_true", help="move to the newest commits; default: keep pinned ones")
    fetch.add_argument("recipe", metavar="RECIPE [ARGS...]")
    ready = commands.add_parser(
        "prepare", help="prepare the data that a run will read, and show its first rows", add_help=False
    )
    ready.add_argument("argv", nargs=argparse.REMAINDER, metavar="RECIPE [ARGS...]")
    ended = commands.add_parser(
        "requeue", help="decide what a Slurm job does next; exit code 0: nothing, 75: requeue, 1: fail"
    )
    ended.add_argument("output_dir", type=Path)
    ended.add_argument("--signalled", action="store_true", help="Slurm asked for the nodes back")
    ended.add_argument("--max_restarts", type=int, required=True)
    commands.add_parser("verify", help="read what was downloaded, and compare it with its checksums; offline")
    commands.add_parser("list", help="list what was downloaded, and for which recipes; offline")
    saved = commands.add_parser("checkpoint", help="look at checkpoints").add_subparsers(dest="action", required=True)
    saved.add_parser("verify", help="check every file of a checkpoint").add_argument("directory", type=Path)
    saved.add_parser("list", help="list the checkpoints of a run").add_argument("directory", type=Path)
    seen = commands.add_parser("report", help="write the report of a run, or compare several runs on one page")
    seen.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory")
    seen.add_argument("--out", type=Path, default="comparison.html", help="page that compares several runs")
    add_export_commands(commands)
    return parser


def main() -> None:
    print_any_text()
    parser = command_parser()
    args, rest = parser.parse_known_args()
    if args.command in ("preflight", "plan"):  # flags may stand before CONFIG
        args.argv, rest = [*rest, *args.argv], []
    if rest and args.command != "download":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    if args.command == "requeue":
        # Be quick: the job may be about to end.
        from accelerate_recipes.launch.requeue import after_attempt

        try:
            code, why = after_attempt(args.output_dir, args.signalled, args.max_restarts)
        except OSError as error:
            code, why = 1, f"how the attempt ended cannot be noted: {error}; put it right, and submit again"
        print(why)
        sys.exit(code)

    try:
        # The imports below load torch and transformers, which a usage message does not need.
        if args.command == "preflight":
            from accelerate_recipes.launch.preflight import preflight

            found, assignments = preflight(args.argv)
            if args.shell:
                print(found, file=sys.stderr)
                print(assignments)
            else:
                print(found)
        elif args.command == "plan":
            from accelerate_recipes.launch.planning import plan

            print(plan(args.argv).text)
        elif args.command == "prepare":
            from accelerate_recipes.recipe import prepare_data

            if not args.argv:
                parser.error("prepare needs a recipe: prepare RECIPE [ARGS...]")
            prepare_data(args.argv)
        elif args.command == "k8s":
            from accelerate_recipes.launch.kubernetes import render_manifest

            manifest, said = render_manifest(args.kind, args.argv)
            print(said, file=sys.stderr)
            print(manifest, end="")
        elif args.command == "download":
            from accelerate_recipes.hub.download import download
            from accelerate_recipes.recipe import needs_of

            command = [args.recipe, *rest]
            download(needs_of(command), command, max_shards=args.max_shards, update=args.update)
            print("All is here. A run reads it with HF_HUB_OFFLINE=1, without any network")
        elif args.command in ("verify", "list"):
            from accelerate_recipes.hub.download import listing, verify

            print(verify() if args.command == "verify" else listing())
        elif args.command == "report":
            from accelerate_recipes.report import compare

            print(compare(args.runs, args.out))
        elif args.command == "check-export":
            from accelerate_recipes.checkpoint.check_export import check_export

            print(check_export(args.export, args.prompt, args.max_new_tokens))
        elif args.command == "export":
            export_checkpoint(args)
        elif args.command == "evaluate":
            evaluate(args)
        elif args.command == "push":
            push_export(args)
        elif args.action == "verify":
            verify_checkpoint(args.directory)
        else:
            list_checkpoints(args.directory)
    except (ConfigError, DataError, OSError) as error:  # a path is too long, a file is not readable, a disk is full
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)


def add_export_commands(commands: Any) -> None:
    """Add the commands that make or use an export."""
    out = commands.add_parser("export", help="turn a checkpoint into a folder that from_pretrained loads")
    out.add_argument("checkpoint", type=Path)
    out.add_argument("out", type=Path)
    out.add_argument("--dtype", choices=["bf16", "fp32"], help="dtype of the weights; default: that of evaluation")
    out.add_argument("--max_shard_size", default="5GB", help="largest safetensors file, such as 500MB")
    out.add_argument("--merge_adapter", action="store_true", help="export the whole model with adapters merged in")
    out.add_argument(
        "--text_only_export", action="store_true", help="export the trained language model without the rest of its base"
    )
    seen = commands.add_parser(
        "check-export", help="load an export with transformers alone, and print what it is and answers"
    )
    seen.add_argument("export", type=Path)
    seen.add_argument("--prompt", help="prompt to answer; default: the beginning of the first row")
    seen.add_argument("--max_new_tokens", type=int, default=40, help="tokens of the answer at most")
    judge = commands.add_parser("evaluate", help="evaluate an export by lm-evaluation-harness, and show it in its card")
    judge.add_argument("export", type=Path)
    judge.add_argument("--tasks", nargs="+", required=True, help="names of tasks, separated by spaces or commas")
    judge.add_argument(
        "--include_path", type=Path, nargs="+", default=[], help="folders with tasks, besides recipes/tasks"
    )
    judge.add_argument("--batch_size", type=int, default=8, help="examples at a time")
    judge.add_argument("--limit", type=int, help="evaluate only the first LIMIT examples of each task")
    judge.add_argument("--num_fewshot", type=int, help="examples in each prompt; default: as the task says")
    judge.add_argument("--apply_chat_template", action="store_true", help="put prompts into the model's chat template")
    upload = commands.add_parser("push", help="push an export to a repository on the Hub, private if it is new")
    upload.add_argument("export", type=Path)
    upload.add_argument("repo", metavar="ORG/NAME")
    upload.add_argument("--public", action="store_true", help="make a new repository public, or push to a public one")


def verify_checkpoint(directory: Path) -> None:
    """Print the content of a checkpoint, or its defect."""
    from accelerate_recipes.checkpoint import files

    if reason := files.defect(directory) or files.damage(directory):
        raise ConfigError(f"{directory}: {reason}")
    marker = files.read_marker(directory)
    print(f"{directory}: step {marker['step']}, saved by {marker['world_size']} x {marker['strategy']}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in marker["versions"].items()))
    for name, entry in sorted(marker["files"].items()):
        print(f"{entry['size']:>14,}  {name}")
    print("complete and unchanged")


def list_checkpoints(directory: Path) -> None:
    """Print a line for each directory named like a checkpoint: size, age, and whether it is complete."""
    from accelerate_recipes.checkpoint import files

    for path in files.candidates(directory):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        hours = (time.time() - path.stat().st_mtime) / 3600
        state = files.defect(path) or "complete"
        print(f"{path.name:<20} {size / 2**30:>10.3f} GiB {hours:>10.1f} h ago   {state}")


def export_checkpoint(args: argparse.Namespace) -> None:
    import torch

    from accelerate_recipes.checkpoint import files
    from accelerate_recipes.checkpoint.check_export import ROWS, compare_rows
    from accelerate_recipes.checkpoint.export import check_shard_size, export

    check_shard_size(args.max_shard_size)
    if reason := files.defect(args.checkpoint) or files.damage(args.checkpoint):
        raise ConfigError(f"{args.checkpoint}: {reason}")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[args.dtype]
    settings = {"merge_adapter": args.merge_adapter, "text_only": args.text_only_export}
    try:
        export(args.checkpoint, args.out, dtype=dtype, max_shard_size=args.max_shard_size, **settings)
    except files.SaveError as error:
        raise ConfigError(str(error)) from None
    print(f"{args.out} holds the model of {args.checkpoint}")
    run = args.checkpoint.resolve().parent
    if (run / ROWS).exists():
        print(compare_rows(args.out, run))


def evaluate(args: argparse.Namespace) -> None:
    from accelerate_recipes.evaluate import evaluate_export

    for name in ("batch_size", "limit"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ConfigError(f"--{name} is {number}; it must be at least 1")
    tasks = [task for words in args.tasks for task in words.split(",") if task]
    options = {name: getattr(args, name) for name in ("batch_size", "limit", "num_fewshot", "apply_chat_template")}
    print(evaluate_export(args.export, tasks, args.include_path, **options))
    print(f"{args.export / 'README.md'} shows these results")


def push_export(args: argparse.Namespace) -> None:
    from accelerate_recipes.checkpoint.export import exported_files
    from accelerate_recipes.hub.push import push

    push(args.export, exported_files(args.export), args.repo, public=args.public)


if __name__ == "__main__":
    main()
