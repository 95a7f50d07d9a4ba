"""Proofs by small runs on this machine: each gives figures with their tolerances. `PROOFS` lists them.

The runs are launched as a user launches them, on all GPUs or on two processes of a CPU, each once for all proofs.
"""

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.gpus import GIB, known_as
from accelerate_recipes.checkpoint.files import candidates, step_of
from accelerate_recipes.data.rows import rows_of_step
from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.errors import one_line
from accelerate_recipes.launch.checks import environment_problems, num_accelerators
from recipe_tools.doctor import workload
from recipe_tools.plan.simulate import Job, Outcome, Simulator
from recipe_tools.request import launch_environment, launch_flags

CONFIGS = shipped.HOME / "accelerate_configs"
# Configs, and the processes that they need at least.
STRATEGIES = {"ddp": 2, "fsdp_full": 1, "fsdp_grad_op": 1, "fsdp1_full": 2, "fsdp_hybrid": 4, "fsdp_long": 2}
SECONDS = 600  # of all proofs together
STEPS = 8
KILLED = 6  # in this step
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss")
# Relative differences that fp32 makes at most: over STEPS steps with sums in another order, and in one loss.
# A fault makes more: 3e-3 at least where tests plant one in the training, 9e-5 where the export rounds weights to bf16.
TOLERANCE, EXPORTED = 1e-4, 1e-5
ALL = 2**10  # more micro-batches than a step has


@dataclass(frozen=True)
class Figure:
    """A measured value, which passes if it is at most `limit`, or has none. `why` says how its run failed.

    A figure that `varies` (memory, times) differs from one repetition to the next.
    """

    proof: str
    what: str
    value: float | None
    limit: float | None = None
    unit: str = ""
    varies: bool = False
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.why and (self.limit is None or (self.value is not None and self.value <= self.limit))


class RunFailed(Exception):
    """A run of the workload did not end as it must; the text says how."""


# Flags of the launcher, arguments of the workload, log, seconds; returns the exit code.
Start = Callable[[Sequence[str], Sequence[str], Path, float], int]


def launch_workload(flags: Sequence[str], argv: Sequence[str], log: Path, seconds: float) -> int:
    """Launch the workload as a user launches a recipe, and wait for its end."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--main_process_port", "0"]
    command += [workload.__file__, *argv]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"not over after {seconds:.0f} s; its end: {log}") from None
    finally:
        kill_launch(process)


def kill_launch(process: subprocess.Popen) -> None:
    """Kill a launcher that still runs, with its ranks, which have sessions of their own."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


class Runs:
    """Runs of the workload in a folder, each once, within SECONDS."""

    def __init__(self, folder: Path, start: Start = launch_workload):
        self.folder, self.start = folder, start
        self.num_devices = num_accelerators()
        self.processes = self.num_devices or 2
        self.deadline = time.monotonic() + SECONDS
        self.done: dict[tuple, Path] = {}

    def batch(self, rows: int) -> list[str]:
        """Return arguments for a step of two micro-batches of `rows` rows on each process."""
        return ["--total_batch_size", str(2 * rows * self.processes), "--per_device_train_batch_size", str(rows)]

    def flags(self, config: str) -> list[str]:
        """Return the launcher's flags: all processes, but one under `single`; replicas of a hybrid config are halves."""
        path, processes = CONFIGS / f"{config}.yaml", 1 if config == "single" else self.processes
        sizes = launch_flags(path, 1, processes, replicas=2 if config == "fsdp_hybrid" else None)
        return ["--config_file", str(path), *sizes, "--mixed_precision", "no"]

    def environment(self, config: str, flags: Sequence[str] = ()) -> dict[str, str]:
        return launch_environment([*self.flags(config), *flags, workload.__file__])

    def fitting(self) -> list[str]:
        """List the strategies that fit this machine."""
        enough = [config for config, least in STRATEGIES.items() if self.processes >= least]
        return [config for config in enough if not environment_problems(self.environment(config), self.num_devices)]

    def tiny(self, config: str, *argv: str, **how) -> Path:
        """Train the tiny model for STEPS steps; see `__call__`."""
        batch = self.batch(2)
        if config == "single":  # in one pass, so that a mean of means is another number
            batch[-1] = batch[1]
        steps = ["--max_steps", str(STEPS), "--logging_steps", "1", "--learning_rate", "0.01", *batch]
        return self(config, *steps, *argv, **how)

    def __call__(
        self, config: str, *argv: str, name: str = "", flags: Sequence[str] = (), killed: bool = False
    ) -> Path:
        """Run the workload; returns the output directory. `name` names it, to run there again.

        Raises:
            RunFailed: for a run that fails, or is not killed though it should be.
        """
        key = (config, *argv, *flags, name, killed)
        if key in self.done:
            return self.done[key]
        out = self.folder / (name or f"{len(self.done)}-{config}")
        log, left = out.with_suffix(".log"), self.deadline - time.monotonic()
        if left < 1:
            raise RunFailed(f"no time left of {SECONDS} s")
        code = self.start([*self.flags(config), *flags], ["--output_dir", str(out), *argv], log, left)
        if killed and not code:
            raise RunFailed("it was not killed")
        if code and not killed:
            said = log.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in said if "rror: " in line and "ChildFailedError" not in line] or said or [""]
            raise RunFailed(f"{config} ended with {code}: {errors[-1].strip()[:300]}")
        self.done[key] = out
        return out


def largest_difference(one: list[dict], other: list[dict]) -> float:
    """Return the largest relative difference between what two runs logged; infinite if they logged other steps or values."""
    if [record.keys() for record in one] != [record.keys() for record in other]:
        return float("inf")
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in COMPARED if name in a]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def records(out: Path) -> list[dict]:
    return read_json_lines(out / "metrics.jsonl")


def compare_strategies(runs: Runs) -> list[Figure]:
    """Train with each strategy that fits this machine, and compare losses and norms with one process."""
    reference, found = records(runs.tiny("single")), []
    for config in runs.fitting():
        what = f"{config} on {runs.processes}: largest difference to one process"
        try:
            apart = largest_difference(records(runs.tiny(config)), reference)
            found.append(Figure("trajectory", what, apart, TOLERANCE))
        except RunFailed as error:
            found.append(Figure("trajectory", what, None, TOLERANCE, why=str(error)))
    return found


def kill_and_resume(runs: Runs) -> list[Figure]:
    """Kill all processes in a step, with dropout on; run again with data workers; compare with a run that was not killed."""
    argv = ["--dropout", "0.1", "--save_steps", "4", "--attn_implementation", "sdpa"]
    whole = runs.tiny("fsdp_full", *argv)
    out = runs.tiny("fsdp_full", *argv, "--kill_at_step", str(KILLED), name="killed", killed=True)
    before = [record["time"] for record in records(out)]
    kept = max((step_of(path) for path in candidates(out)), default=0)
    runs.tiny("fsdp_full", *argv, "--dataloader_num_workers", "1", name="killed")
    after = records(out)
    again = sorted({record["step"] for record in after if record["time"] not in before} - {0})
    limit = TOLERANCE if runs.num_devices else 0.0
    lost = abs(len(again) - STEPS + kept)
    changed = largest_difference(after, records(whole))
    return [
        Figure("resume", "largest difference to a run that was not killed", changed, limit),
        Figure("resume", "steps lost or repeated, besides those after the checkpoint", lost, 0),
        Figure("resume", "exported weights: largest difference", apart(out / "export", whole / "export"), limit),
    ]


def apart(one: Path, other: Path) -> float:
    """Return the largest difference between the weights of two exports."""
    a, b = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (one, other))
    return max((a[name] - b[name]).abs().max().item() for name in a) if a.keys() == b.keys() else float("inf")


@torch.no_grad()
def compare_export(runs: Runs) -> list[Figure]:
    """Compute the held-out loss by transformers alone, a document at a time, and compare it with the run's last one."""
    out = runs.tiny("fsdp_full")
    model = AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.float32).eval()
    loss_sum, targets = 0.0, 0
    args = workload.Args()
    for item in workload.HELD_OUT:
        tokens, lengths = workload.row_of(args, item)
        for document in torch.from_numpy(tokens).split(lengths):
            logits = model(input_ids=document[None]).logits[0, :-1]
            loss_sum += torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum").item()
            targets += len(document) - 1
    trained = records(out)[-1]["eval_loss"]
    words = abs(len(AutoTokenizer.from_pretrained(out / "export")) - model.config.vocab_size)
    return [
        Figure("export", "its loss: difference to training", abs(loss_sum / targets / trained - 1), EXPORTED),
        Figure("export", "words of its tokenizer, besides those of the model", words, 0),
    ]


def speed_command(runs: Runs) -> tuple[list[str], list[str]]:
    """Return arguments and flags of the standard run: 127 million parameters in bf16 on GPUs, 2.4 in fp32 on CPUs."""
    if runs.num_devices:
        size = ["--model", "gpu", "--max_length", "1024", "--max_steps", "40", "--logging_steps", "10"]
        return [*size, *runs.batch(8), "--save_steps", "0", "--whole_logits", "false"], ["--mixed_precision", "bf16"]
    size = ["--model", "cpu", "--max_length", "128", "--max_steps", "9", "--logging_steps", "3"]
    return [*size, *runs.batch(2), "--save_steps", "0"], []


def compare_plan(runs: Runs) -> list[Figure]:
    """Compare the peak of memory that `plan` predicts for the standard run with a real one: on a GPU its allocator's."""
    argv, flags = speed_command(runs)
    if runs.num_devices:
        measured = max(r.get("peak_memory_gib", 0) for r in records(runs("fsdp_full", *argv, flags=flags))) * GIB
    else:
        measured = float((runs("fsdp_full", *argv, "--counts_memory", "true") / "peak").read_text(encoding="utf-8"))
    device, gpu = ("cuda", known_as(torch.cuda.get_device_name(0))) if torch.cuda.is_available() else ("cpu", "")
    environment = runs.environment("fsdp_full", flags)
    with Simulator() as simulator:
        job = Job(environment, [workload.__file__, *argv], gpu or "h100", device, micro_batches=ALL)
        (outcome,) = simulator([job])
    if not isinstance(outcome, Outcome):
        raise RunFailed(f"the simulation: {outcome}")
    error = abs(outcome.peak / measured - 1)
    return [
        Figure("plan", "peak memory: error of the plan", error, 0.05 if runs.num_devices else 0.02, varies=True),
        Figure("plan", "peak memory, measured", measured / GIB, unit="GiB", varies=True),
    ]


def measure_speed(runs: Runs) -> list[Figure]:
    """Measure the speed of the standard run, and check the logged speed by counting the targets between two lines."""
    argv, flags = speed_command(runs)
    logged = [record for record in records(runs("fsdp_full", *argv, flags=flags)) if "tokens_per_second" in record]
    args, errors = parse(workload.Args, argv, world_size=1), []
    order = (args.total_batch_size, workload.NUM_ROWS, args.seed)
    for before, record in itertools.pairwise(logged):
        steps = range(before["step"], record["step"])
        lengths = [workload.row_of(args, row)[1] for step in steps for row in rows_of_step(step, *order)]
        targets = sum(sum(row) - len(row) for row in lengths)
        errors.append(abs(record["tokens_per_second"] * (record["time"] - before["time"]) / targets - 1))
    last = logged[-1]
    found = [
        Figure("throughput", "logged speed: error", min(errors), 0.1, varies=True),
        Figure("throughput", "share of the time waiting for data", last["data_wait"], 0.2, varies=True),
        Figure("throughput", "speed", last["tokens_per_second"], unit="tokens/s", varies=True),
    ]
    return found + [Figure("throughput", "MFU", last[name], varies=True) for name in ("mfu",) if name in last]


PROOFS = {
    "trajectory": compare_strategies,
    "resume": kill_and_resume,
    "export": compare_export,
    "plan": compare_plan,
    "throughput": measure_speed,
}


def prove(names: Sequence[str], runs: Runs) -> list[Figure]:
    """Make the proofs of these names; a run that fails is a figure that did not pass."""
    disable_progress_bar()
    figures = []
    for name in names:
        begin = time.monotonic()
        try:
            found = PROOFS[name](runs)
        except Exception as error:  # errors of reading a damaged export have no common class
            why = str(error) if isinstance(error, RunFailed) else one_line(error)
            found = [Figure(name, "the runs", None, 0, why=why)]
        verdict = "passed" if all(figure.passed for figure in found) else "FAILED"
        print(f"{name}: {time.monotonic() - begin:.0f} s, {verdict}", flush=True)
        figures += found
    return figures
