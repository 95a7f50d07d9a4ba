"""Measure the time from a command to its first optimizer step: of ours, of trl's own script, and of LlamaFactory.

    python benchmarks/first_step.py --llamafactory ../llamafactory/bin/python \\
        --out benchmarks/results/first_step.json --picture docs/first_step.png
    python benchmarks/gpu_report.py

Each program trains the same tiny model on the same conversations: the answers, packed to --max_length, one step of one row.
A first start finds empty caches, a second start what the first one has cached. Programs take turns. Each is ended after its
first step. Ours evaluates before that, on one conversation; the others do not.

Parts follow each other on the clock of the process that trains. `imports` ends when the first tokenizer or data set is
read: it has the launcher and the arguments too. `model` is `from_pretrained` of the model, and `Accelerator.prepare` with
it; `first step` begins after that. `rows` is the rest: rows are read, rendered, tokenised, packed and checked, and training
is set up. What is imported late belongs to the part that imports it. CPU seconds are of all processes. Each computes with
one thread, since threads that wait spin. The programs are not changed: see `first_step_marks.py`.

--llamafactory is the Python of an environment that has LlamaFactory, and the same torch; without it, only the others run.
LlamaFactory has its own command, without a launcher. Ours is started by `python recipes/sft.py` too; else ours and trl are
started by `accelerate launch`. The last command writes docs/development/performance.md.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from harness import ROOT, machine, make_parser, print_ratios, ratios, table, turns, write_json
from prepare_rows import make_base

RESULT = ROOT / "benchmarks/results/first_step.json"
MARKS = Path(__file__).with_name("first_step_marks.py")
PARTS = ("imports", "rows", "model", "first step")
STARTS = {"first": "First start", "second": "Second start, with what the first one cached"}
PROGRAMS = {"ours": "ours", "alone": "ours, without a launcher", "trl": "trl", "llamafactory": "LlamaFactory"}
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "trl", "llamafactory", "peft", "bitsandbytes", "torchao")
VERSIONS = f"""\
import importlib.metadata as m, json
print(json.dumps({{name: m.version(name) for name in {PACKAGES} if [*m.Distribution.discover(name=name)]}}))
"""


def make_rows(base: Path, number: int) -> None:
    """Make tiny model, tokenizer and conversations, one more to evaluate on, and LlamaFactory's description of them."""
    (base / "chats").mkdir(parents=True)
    make_base(base, sorted(map(str, (ROOT / "data/c4_pydoc/en").glob("c4-train.*.json.gz"))), number + 1)
    lines = (base / "chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (base / "chats/train.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    (base / "eval.jsonl").write_text("".join(lines[-1:]), encoding="utf-8")
    tags = {f"{role}_tag": role for role in ("role", "content", "user", "assistant", "system")}
    chats = {"file_name": "chats/train.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    (base / "dataset_info.json").write_text(json.dumps({"chats": chats | {"tags": tags}}), encoding="utf-8")


def command_of(program: str, base: Path, out: Path, flags: argparse.Namespace) -> list[str]:
    """Make the command that trains one step with a program."""
    words = f"--model_name_or_path {base}/qwen2_5 --output_dir {out} --max_steps 1 --per_device_train_batch_size 1"
    words += " --packing true"
    if program == "llamafactory":
        words += f" --dataset_dir {base} --dataset chats --cutoff_len {flags.max_length} --template qwen --stage sft"
        words += f" --preprocessing_num_workers {flags.processes} --do_train true --finetuning_type full"
        words += " --report_to none --disable_gradient_checkpointing true"
        return [str(flags.llamafactory.absolute().with_name("llamafactory-cli")), "train", *words.split()]
    words += f" --max_length {flags.max_length} --dataset_num_proc {flags.processes} --assistant_only_loss true"
    if program in ("ours", "alone"):
        script = ROOT / "recipes/sft.py"
        words += (
            f" --train_files {base}/chats/train.jsonl --eval_files {base}/eval.jsonl --per_device_eval_batch_size 1"
        )
        words += " --total_batch_size 1"
    else:
        script = Path(find_spec("trl").origin).with_name("scripts") / "sft.py"
        words += f" --dataset_name {base}/chats --report_to none --bf16 false --gradient_checkpointing false"
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/single.yaml")]
    launch = [] if program == "alone" else [*launch, "--mixed_precision", "no"]
    return [sys.executable, *launch, str(script), *words.split()]


def start(command: list[str], home: Path) -> dict[str, dict[str, float]]:
    """Start a program, and end it after its first step; return the wall and CPU seconds of its parts.

    Raises:
        SystemExit: if it ends before, with the last lines that it wrote.
    """
    hooks, marks, log = home / "hooks", home / "marks", home / "log"
    hooks.mkdir(exist_ok=True)
    shutil.copy(MARKS, hooks / "sitecustomize.py")
    marks.write_text("", encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = inherited | {"PYTHONPATH": str(hooks), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment |= {"MARKS": str(marks), "BENCHMARK": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    begin = time.time()
    with log.open("w", encoding="utf-8") as file:
        process = psutil.Popen(command, env=environment, cwd=home, stdout=file, stderr=file)
    read: list[dict[str, Any]] = []
    while not read or read[-1]["part"] != "end":
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8")[-3000:]
            raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{said}")
        time.sleep(0.1)
        read = [json.loads(line) for line in marks.read_text(encoding="utf-8").splitlines()]
    ended = [process, *process.children(recursive=True)]
    for one in ended:
        one.kill()
    psutil.wait_procs(ended)
    found = {part: {"wall": 0.0, "cpu": 0.0} for part in PARTS}
    begins = [{"part": "imports", "wall": begin, "cpu": 0.0}, *read]
    for one, after in itertools.pairwise(begins):
        for clock in ("wall", "cpu"):
            found[one["part"]][clock] += after[clock] - one[clock]
    return found


def totals(starts: list[dict[str, Any]], clock: str) -> list[float]:
    """Add up the parts of each start."""
    return [sum(part[clock] for part in one.values()) for one in starts]


def section(found: dict[str, Any]) -> list[str]:
    """Write the section of docs/development/performance.md."""
    flags, on = found["flags"], found["machine"]
    text = (
        f"Each program trains the same tiny model on the same {flags['rows']:,} conversations, packed to "
        f"{flags['max_length']:,} tokens, in one process without a GPU. CPU seconds are of all processes, medians of "
        f"{flags['rounds']} rounds in turns; {on['cores']} cores, {on['device']}, {on['date']}. Ours and trl are started "
        "by `accelerate launch` in an environment of requirements.txt alone, LlamaFactory by its own command in another. "
        "It has no launcher for one process; ours needs none, and both ways are here. What is imported late belongs to the "
        "part that imports it; the first lines of the benchmark say more. Ours evaluates one row before its first step."
    )
    lines = ["## From a command to the first step", "", f"    python {on['command']}", "", textwrap.fill(text, 125), ""]
    for kind, title in STARTS.items():
        rows = []
        for program, kinds in found["seconds"].items():
            starts, versions = kinds[kind], found["versions"][program]
            parts = [f"{median(one[part]['cpu'] for one in starts):.1f}" for part in PARTS]
            both = [f"{median(totals(starts, clock)):.1f}" for clock in ("cpu", "wall")]
            rows.append([f"{PROGRAMS[program]} {versions.get(program, '')}".strip(), *parts, *both])
        lines += [*table([title, *PARTS, "all", "on the clock"], rows), ""]
    return [*lines, "![CPU seconds to the first step](../first_step.png)"]


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draw the medians of the parts' CPU seconds."""
    from matplotlib.figure import Figure

    programs = [*found["seconds"]]
    figure = Figure(figsize=(10, 1.4 + 0.9 * len(programs)), layout="constrained")
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharex=True, sharey=True), STARTS.items(), strict=True):
        left = [0.0] * len(programs)
        for part in PARTS:
            widths = [median(one[part]["cpu"] for one in found["seconds"][p][kind]) for p in programs]
            axes.barh([PROGRAMS[p] for p in programs], widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, program in enumerate(programs):
            end = median(totals(found["seconds"][program][kind], "cpu"))
            axes.annotate(f"{end:.1f}", (left[place], place), (3, 0), textcoords="offset points", va="center")
        axes.set(title=title, xlabel="CPU seconds", xmargin=0.12)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(
        __doc__,
        rows=(5000, "Conversations."),
        rounds=(3, "Repetitions of each."),
        max_length=(1024, "Tokens of a packed row."),
        processes=(2, "Processes that prepare rows, in each program."),
    )
    parser.add_argument("--llamafactory", type=Path, help="Python of an environment that has LlamaFactory.")
    parser.add_argument("--picture", type=Path, help="Draw the result into this file.")
    flags = parser.parse_args()
    pythons = dict.fromkeys(("ours", "alone", "trl"), sys.executable)
    if flags.llamafactory:
        pythons["llamafactory"] = str(flags.llamafactory)
    else:
        print("LlamaFactory is left out: give its Python by --llamafactory")
    found = {
        "machine": machine(),
        "flags": vars(flags),
        "versions": {p: json.loads(subprocess.check_output([python, "-c", VERSIONS])) for p, python in pythons.items()},
        "seconds": {program: {kind: [] for kind in STARTS} for program in pythons},
    }
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        make_rows(base, flags.rows)
        for number in range(flags.rounds):
            for program in turns([*pythons], number):
                home = Path(folder, f"{program}-{number}")
                home.mkdir()
                for kind in STARTS:
                    parts = start(command_of(program, base, home / kind, flags), home)
                    found["seconds"][program][kind].append(parts)
                    said = {name: f"{part['cpu']:.1f} ({part['wall']:.1f})" for name, part in parts.items()}
                    print(program, kind, said, flush=True)
    for kind in STARTS:
        for clock in ("cpu", "wall"):
            of_kind = {program: totals(kinds[kind], clock) for program, kinds in found["seconds"].items()}
            print_ratios(f"{kind} start, {clock}", ratios(of_kind, "ours", [*pythons][1:]))
    write_json(flags.out, found)
    if flags.picture:
        draw(flags.picture, found)


if __name__ == "__main__":
    main()
