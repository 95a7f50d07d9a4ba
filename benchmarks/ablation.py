"""Find which FSDP options pay on this machine: the largest batch that fits with each, and the throughput at that batch.

    python benchmarks/ablation.py --memory_gib 0.5 recipes/t5.py --config recipes/configs/t5/laptop.yaml

For each of OPTIONS the batch per device is doubled, then bisected. Each trial is an `accelerate launch` on this machine
of some optimizer steps of the recipe (benchmarks/ablation_trial.py), which either fits and is measured, or runs out of
memory. A trial begins with the longest rows: if these fit, all rows fit. A batch is `per_device_train_batch_size`, in
sequences, without accumulation. With --rounds 2 or more the batches found are measured again, the options in turns, and
the fastest round counts, because disturbances can only slow a run.

On GPUs leave --memory_gib out: their memory is the limit. On a CPU, RLIMIT_DATA imitates such a limit: a process may
take --memory_gib more than it held before the model.

The script writes to --out:

    results.jsonl     a line for each launch; a launch with a line is not repeated until you delete the line
    table.md          the effect of each lever, as in the PyTorch blog on T5; all figures; DDP against FSDP in bytes
    throughput.png, memory.png

Source: "Efficient Large-Scale Training with Pytorch FSDP and AWS", pytorch.org/blog: the table and its levers.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import matplotlib
import psutil
from harness import GIB, ROOT, table
from matplotlib.figure import Figure
from tqdm import tqdm

from accelerate_recipes.launch.checks import num_accelerators


class Option(NamedTuple):
    """Config, flags of `accelerate launch` and flags of the recipe. {half} is half of the processes, at least 2."""

    config: str = "fsdp_full"
    launch: str = ""
    recipe: str = ""


CHECKPOINTING = "--fsdp_activation_checkpointing true"
OPTIONS = {
    "full shard": Option(),
    "DDP": Option("ddp"),
    "grad-op shard": Option("fsdp_grad_op"),
    "hybrid shard": Option(
        "fsdp_hybrid", "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size {half}"
    ),
    "no wrapping": Option("fsdp_no_wrap"),
    "FSDP1": Option("fsdp1_full"),
    "FSDP1, by size": Option("fsdp1_size_wrap"),
    "fp32": Option(launch="--mixed_precision no"),
    "pure bf16, Kahan": Option(launch="--mixed_precision no", recipe="--optim adamw_bf16_kahan"),
    "bf16 reduction": Option(recipe="--reduce_dtype bf16"),
    "checkpointing": Option(launch=CHECKPOINTING),
    "checkpointing, every 2nd": Option(launch=CHECKPOINTING, recipe="--checkpoint_every_n_layers 2"),
    "checkpointing, on CPU": Option(launch=f"{CHECKPOINTING} --fsdp_activation_checkpointing_offload true"),
    "parameter offload": Option("fsdp_offload"),
    "prefetch 2": Option(recipe="--prefetch_layers 2"),
    "compile": Option(launch="--dynamo_backend inductor --dynamo_use_regional_compilation"),
}
# Each lever compares two options that differ in nothing else: with the lever, and without.
LEVERS = {
    "Mixed precision (bf16), against fp32": ("full shard", "fp32"),
    "Pure bf16 with Kahan summation, against mixed": ("pure bf16, Kahan", "full shard"),
    "Gradients reduced in bf16, against fp32": ("bf16 reduction", "full shard"),
    "Activation checkpointing": ("checkpointing", "full shard"),
    "Activation checkpointing of every 2nd layer": ("checkpointing, every 2nd", "full shard"),
    "Activation checkpointing with inputs on the CPU": ("checkpointing, on CPU", "full shard"),
    "Transformer wrapping policy, against none": ("full shard", "no wrapping"),
    "Transformer wrapping policy, against units of 100M parameters (FSDP1)": ("FSDP1", "FSDP1, by size"),
    "Full shard, against gradients and optimizer only": ("full shard", "grad-op shard"),
    "Full shard, against DDP": ("full shard", "DDP"),
    "Hybrid shard, against full": ("hybrid shard", "full shard"),
    "FSDP2, against FSDP1": ("full shard", "FSDP1"),
    "Parameters, gradients and optimizer on the CPU": ("parameter offload", "full shard"),
    "Prefetch of 2 layers, against 1": ("prefetch 2", "full shard"),
    "torch.compile of each layer": ("compile", "full shard"),
}
# All have weights, gradients and moments in fp32, so their bytes can be compared.
SHARDINGS = ["DDP", "full shard", "grad-op shard", "hybrid shard", "no wrapping", "FSDP1"]
STATE = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer"}
ON_CPU = "{} CPU cores, gloo: shows that it works, not what a GPU does."


class CannotRunError(RuntimeError):
    """The recipe refuses an option, whatever the batch."""


def largest_fitting(fits: Callable[[int], bool], limit: int, start: int = 1, tolerance: float = 0.0) -> int:
    """Find the largest number from 1 to `limit` that fits, to within a share `tolerance`; 0 if none fits.

    Doubles (or halves) from `start` until one number fits and another does not, then bisects between them. Every number
    below one that fits is assumed to fit.
    """
    fitting, failing = 0, limit + 1
    size = min(start, limit)
    while failing - fitting > max(1, tolerance * fitting):
        if fits(size):
            fitting = size
        else:
            failing = size
        if not fitting:
            size = failing // 2
        elif failing > limit:
            size = min(2 * fitting, limit)
        else:
            size = (fitting + failing) // 2
    return fitting


class Ablation:
    """Launches of one comparison, and the file that records them."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.path = flags.out / "results.jsonl"
        # These settings are the same for all launches: with others, results cannot be compared.
        self.settings = {
            "recipe": shlex.join([flags.recipe, *flags.arguments]),
            "num_processes": flags.num_processes,
            "memory_gib": flags.memory_gib,
            "steps": flags.steps,
        }
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.records = [json.loads(line) for line in lines]
        for record in self.records:
            if record["settings"] != self.settings:
                raise ValueError(
                    f"{self.path} holds launches of {record['settings']}, not of {self.settings}; "
                    "give the same, or another --out"
                )
        total = len(flags.options) * flags.rounds
        self.progress = tqdm(total=total, unit="option", disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def command(self, name: str, batch: int) -> list[str]:
        option, processes = OPTIONS[name], self.flags.num_processes
        config = os.path.relpath(ROOT / f"accelerate_configs/{option.config}.yaml")
        command = ["accelerate", "launch", "--config_file", config, "--num_processes", str(processes)]
        command += option.launch.format(half=max(2, processes // 2)).split()
        command += [os.path.relpath(ROOT / "benchmarks/ablation_trial.py"), "--steps", str(self.flags.steps)]
        if self.flags.memory_gib:
            command += ["--memory_gib", str(self.flags.memory_gib)]
        command += [self.flags.recipe, *self.flags.arguments, *option.recipe.split()]
        return [*command, "--per_device_train_batch_size", str(batch), "--total_batch_size", str(batch * processes)]

    def trial(self, name: str, batch: int, round_number: int) -> dict:
        """Launch one trial, or return its record if the file has it."""
        command = self.command(name, batch)
        key = {"option": name, "batch": batch, "round": round_number, "command": shlex.join(command)}
        for record in self.records:
            if key.items() <= record.items():
                return record
        self.progress.set_postfix_str(f"{name}, batch {batch}")
        record = (
            key | {"settings": self.settings} | launch(command, self.flags.trial_minutes * 60, self.flags.memory_gib)
        )
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        line = f"{name}, {batch} a device: {record['outcome']}"
        if record["outcome"] == "fits":
            line += f", {record['tokens_per_second']:,.0f} tokens/s, {max(record['peak_memory_gib']):.2f} GiB"
        else:
            line += f" ({in_short(record['reason'])})"
        with self.progress.external_write_mode(file=sys.stdout):
            print(line, flush=True)
        return record

    def fits(self, name: str, batch: int) -> bool:
        outcome = self.trial(name, batch, 1)["outcome"]
        if outcome == "cannot run":
            raise CannotRunError(name)
        return outcome == "fits"

    def run(self) -> None:
        """Search under each option, in round 1, then measure again."""
        start = 0
        for name in self.flags.options:
            with contextlib.suppress(CannotRunError):
                first = start or self.flags.first_batch
                found = largest_fitting(partial(self.fits, name), self.flags.max_batch, first, self.flags.tolerance)
                start = start or found  # other options fit about as much as the first
            self.progress.update()
        for round_number in range(2, self.flags.rounds + 1):
            for name in self.flags.options:
                # Near the limit a batch may fit once and not again: then the next smaller batch counts.
                while batch := best(name, self.records).get("batch"):
                    if self.trial(name, batch, round_number)["outcome"] == "fits":
                        break
                self.progress.update()
        self.progress.close()


def launch(command: list[str], seconds: float, memory_gib: float) -> dict:
    """Run one trial to its end, and say how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        words = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *command[2:]]
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen([*words, "--output_dir", folder], stdout=file, stderr=subprocess.STDOUT)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"outcome": "failed", "reason": f"not over within {seconds / 60:g} minutes (--trial_minutes)"}
            finally:
                end(process)
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank-*.json"))]
        return outcome(ranks, log.read_text(encoding="utf-8"), memory_gib)


def end(launcher: subprocess.Popen) -> None:
    """Kill a launcher and its ranks, which it puts into sessions of their own."""
    if launcher.poll() is None:
        for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            process.kill()
        launcher.wait()


def outcome(ranks: list[dict], log: str, memory_gib: float) -> dict:
    """Decide from the ranks' files and the launcher's log: a trial fits, is out of memory, cannot run, or failed.

    A failure in other words may also come from too large a batch, so the search continues with smaller ones. If several
    ranks failed, the first one says why; the others only lost contact with it.
    """
    measured = [rank for rank in ranks if "tokens_per_second" in rank]
    if measured and len(measured) == measured[0]["num_processes"]:
        lists = {name: [rank[name] for rank in measured] for name in (*STATE, "peak_memory_gib")}
        shares = [rank["communication_share"] for rank in measured if "communication_share" in rank]
        if len(shares) == len(measured):
            merged = {"communication_share": mean(shares), "communication_reason": ""}
        else:
            why = next((rank["profile_failed"] for rank in measured if "profile_failed" in rank), "killed")
            merged = {"communication_share": None, "communication_reason": f"the profiled step failed: {why}"}
        return {"outcome": "fits"} | measured[0] | lists | merged
    origin = next(({"machine": rank["machine"]} for rank in ranks if "machine" in rank), {})
    failed = [rank for rank in ranks if "reason" in rank]
    if failed:
        first = min(failed, key=lambda rank: (rank["outcome"] == "failed", rank["failed_at"]))
        found = {"outcome": first["outcome"], "reason": first["reason"]}
    elif killed := re.search(r"Root Cause.*?exitcode\s*: -(\d+)", log, re.DOTALL):
        number = int(killed[1])
        # The kernel kills (SIGKILL) when the machine's memory is used up; C++ code often aborts when it gets none.
        by_limit = memory_gib and number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
        kind = "out of memory" if by_limit or number == signal.SIGKILL else "failed"
        found = {"outcome": kind, "reason": f"killed by {signal.Signals(number).name}"}
    else:
        found = {"outcome": "failed", "reason": (log.strip().splitlines() or ["it ended without a word"])[-1]}
    return found | origin


def write_report(out: Path, names: list[str], records: list[dict]) -> None:
    """Write tables and plots of these options, as far as they were measured."""
    rows = {name: best(name, records) for name in names}
    measured = [row for row in rows.values() if "tokens_per_second" in row]
    if not measured:
        return
    (out / "table.md").write_text(
        "\n\n".join([heading(measured, records), levers(rows), figures(rows), state(rows)]) + "\n", encoding="utf-8"
    )
    note = "\n" + ON_CPU.format(measured[0]["machine"]["cores"]) if measured[0]["device_type"] == "cpu" else ""
    shown = {f"{name} ({row['batch']})" if "batch" in row else name: row for name, row in rows.items()}
    draw(
        out / "throughput.png",
        {"": {name: row.get("tokens_per_second", 0) for name, row in shown.items()}},
        "tokens/s of all processes, at the largest batch per device that fits" + note,
        shown,
    )
    parts = {
        label: {name: max(row.get(part, [0])) / GIB for name, row in shown.items()} for part, label in STATE.items()
    }
    parts["activations, gathered layers, buffers"] = {
        name: max(0, max(row.get("peak_memory_gib", [0])) - sum(part[name] for part in parts.values()))
        for name, row in shown.items()
    }
    draw(out / "memory.png", parts, "peak memory of a process at that batch, GiB" + note, shown)


def best(name: str, records: list[dict]) -> dict:
    """Return the fastest round at the largest batch that always fitted, or the `reason` why there is none."""
    mine = [record for record in records if record["option"] == name]
    failing = [record for record in mine if record["outcome"] != "fits"]
    too_large = min((record["batch"] for record in failing), default=float("inf"))
    measured = [record for record in mine if record["outcome"] == "fits" and record["batch"] < too_large]
    if measured:
        fastest = max(measured, key=lambda record: (record["batch"], record["tokens_per_second"]))
        return fastest | {"too_large": too_large}
    if not failing:
        return {"reason": "not launched yet"}
    last = min(failing, key=lambda record: record["batch"])
    found = "" if last["outcome"] == "cannot run" else f"{last['outcome']} with a batch of {last['batch']}: "
    return {"reason": found + in_short(last["reason"])}


def in_short(reason: str) -> str:
    """Return the first of a list of problems, without its remedy."""
    lines = [line.strip().removeprefix("- ") for line in reason.splitlines()]
    return lines[len(lines) > 1 and lines[0].endswith(":")].split("; ")[0]


def model_name(row: dict) -> str:
    count, unit = next(
        (row["num_parameters"] / n, u) for n, u in ((1e9, "B"), (1e6, "M"), (1, "")) if row["num_parameters"] >= n
    )
    return f"{row['model']} {count:.3g}{unit}"


def heading(measured: list[dict], records: list[dict]) -> str:
    first = measured[0]
    machine, settings = first["machine"], first["settings"]
    loads = [row["machine"]["load_average"] for row in measured]
    lines = [f"# Ablation of `{settings['recipe']}`"]
    if first["device_type"] == "cpu":
        lines.append(f"**{ON_CPU.format(machine['cores'])}**")
    memory = (
        f", each with {settings['memory_gib']:g} GiB for its state and activations" if settings["memory_gib"] else ""
    )
    lines.append(
        f"{first['num_processes']} processes on {machine['device']}{memory}; load average {min(loads):.1f} to "
        f"{max(loads):.1f}, these processes included. Versions: "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + ". Every launch, with its command: [results.jsonl](results.jsonl)."
    )
    rounds = defaultdict(list)
    for record in records:
        if record["outcome"] == "fits":
            rounds[record["option"], record["batch"]].append(record["tokens_per_second"])
    if noise := max((max(speeds) / min(speeds) for speeds in rounds.values() if len(speeds) > 1), default=0):
        lines.append(
            f"Two rounds of one option differ by up to {noise:.2f}x; the faster counts. Smaller differences are noise."
        )
    return "\n\n".join(lines)


def levers(rows: dict[str, dict]) -> str:
    """Format the blog's table: throughput with a lever over throughput without, each at the largest batch that fits."""
    lines = []
    for lever, names in LEVERS.items():
        if not set(names) <= set(rows):
            continue
        pair = [rows[name] for name in names]
        missing = [f"{name}: {row['reason']}" for name, row in zip(names, pair, strict=True) if "reason" in row]
        model = next((model_name(row) for row in pair if "batch" in row), "")
        if missing:
            lines.append([lever, model, "", "", "; ".join(missing)])
        else:
            ratio = pair[0]["tokens_per_second"] / pair[1]["tokens_per_second"]
            lines.append([lever, model, f"{ratio:.2f}x", f"{pair[1]['batch']} -> {pair[0]['batch']}", ""])
    header = ["optimization", "model", "throughput improvement", "batch per device", "why empty"]
    return "## What each lever brings\n\n" + "\n".join(table(header, lines))


def figures(rows: dict[str, dict]) -> str:
    lines = []
    for name, row in rows.items():
        if "reason" in row:
            lines.append([name, "", "", "", "", "", row["reason"]])
            continue
        share = row["communication_share"]
        lines.append(
            [
                name,
                f"{row['batch']}" + (f" (not {row['too_large']})" if row["too_large"] < float("inf") else ""),
                f"{row['tokens_per_second']:,.0f}",
                "-" if row["tflops_per_device"] is None else f"{row['tflops_per_device']:.3g}",
                f"{max(row['peak_memory_gib']):.3f}",
                f"{share:.0%}" if share is not None else "",
                row["communication_reason"],
            ]
        )
    header = ["option", "batch per device", "tokens/s", "TFLOP/s per device", "peak GiB", "communication", "why empty"]
    return (
        "## Figures\n\n"
        + "\n".join(table(header, lines))
        + "\n\nTokens are targets, over all processes. FLOPs follow the formulas in `metrics.py`, without recomputation. "
        "Peak is that of the process that needs most: on a CPU above what it held before the model, on a GPU allocated "
        "tensors. Communication is the share of one profiled step in which a collective runs, as a mean over the "
        "processes; it includes waiting for other processes, and on a GPU it may overlap computation."
    )


def state(rows: dict[str, dict]) -> str:
    """Format the bytes that do not depend on the batch, compared with an ideal division among the processes."""
    title = "## DDP against FSDP: what a process holds\n\n"
    whole = next((row for row in map(rows.get, ("full shard", "DDP")) if row and "batch" in row), None)
    if whole is None:
        return title + "Neither `full shard` nor `DDP` ran."
    ideal = whole["whole_bytes"] / whole["num_processes"]
    lines = []
    for name in SHARDINGS:
        row = rows.get(name, {"reason": "not chosen"})
        if "reason" in row:
            lines.append([name, *[""] * 5, row["reason"]])
        else:
            held = [max(row[part]) for part in STATE]
            lines.append(
                [name, *(f"{part / 2**20:,.1f}" for part in (*held, sum(held))), f"{sum(held) / ideal:.3f}", ""]
            )
    header = ["option", "parameters, MiB", "gradients, MiB", "optimizer, MiB", "sum", "sum / ideal", "why empty"]
    return (
        title
        + "\n".join(table(header, lines))
        + f"\n\nThe ideal is the sum divided by {whole['num_processes']} processes: {ideal / 2**20:,.1f} MiB. The bytes "
        "are those of the tensors after a step, before the gradients are freed, on the process that holds most."
    )


def draw(path: Path, parts: dict[str, dict[str, float]], title: str, rows: dict[str, dict]) -> None:
    """Draw a PNG with a bar for each option, its parts one after the other; an option that did not run says so."""
    matplotlib.use("agg")  # there may be no display
    figure = Figure(figsize=(9, 1.4 + 0.34 * len(rows)), layout="constrained")
    chart = figure.subplots()
    left = dict.fromkeys(rows, 0.0)
    for label, values in parts.items():
        bars = chart.barh(list(values), list(values.values()), left=list(left.values()), label=label)
        left = {name: left[name] + value for name, value in values.items()}
    chart.bar_label(
        bars,
        [
            f"{left[name]:,.0f}" if left[name] >= 100 else f"{left[name]:.3g}" if "batch" in row else "did not run"
            for name, row in rows.items()
        ],
        padding=3,
        fontsize=8,
    )
    chart.set(title=title)
    chart.invert_yaxis()
    chart.margins(x=0.12)
    chart.grid(alpha=0.3, axis="x")
    if len(parts) > 1:
        figure.legend(loc="outside lower center", ncols=len(parts), fontsize=8)
    figure.savefig(path, dpi=110)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/ablation"), help="Folder for results.")
    parser.add_argument(
        "--options", nargs="+", default=list(OPTIONS), choices=OPTIONS, help="Options to compare; end them with --."
    )
    parser.add_argument("--num_processes", type=int, default=num_accelerators() or 2, help="Processes to launch.")
    parser.add_argument("--memory_gib", type=float, default=0.0, help="Memory limit of a process, on a CPU only.")
    parser.add_argument("--first_batch", type=int, default=1, help="Batch per device at which the search begins.")
    parser.add_argument("--max_batch", type=int, default=1024, help="Largest batch per device to try.")
    parser.add_argument("--tolerance", type=float, default=0.1, help="Accepted error of the batch, as a share of it.")
    parser.add_argument("--steps", type=int, default=10, help="Optimizer steps to measure in a launch.")
    parser.add_argument("--rounds", type=int, default=1, help="Measurements of each option at its batch.")
    parser.add_argument("--trial_minutes", type=float, default=20.0, help="Time limit of a launch.")
    parser.add_argument("recipe", help="Recipe to launch, such as recipes/chess.py.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Arguments of the recipe.")
    flags = parser.parse_args()
    if not num_accelerators() and not flags.memory_gib:
        parser.error("on a CPU give --memory_gib: without it the search would use up the machine's memory")
    if num_accelerators() and flags.memory_gib:
        parser.error(f"--memory_gib {flags.memory_gib:g} is for a CPU; a GPU's memory is its own limit: leave it out")
    return flags


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and ends the running launch
    flags = parse_flags()
    flags.out.mkdir(parents=True, exist_ok=True)
    try:
        ablation = Ablation(flags)
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        ablation.run()
    finally:
        write_report(flags.out, flags.options, ablation.records)
    print((flags.out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
