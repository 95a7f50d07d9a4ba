"""What one GPU reaches: ceilings, attention by itself, equal results, each lever, whole models at their best; and memory.

    python benchmarks/gpu.py --part 1 --out benchmarks/results/gpu
    python benchmarks/gpu.py --part 2 --out benchmarks/results/gpu
    python benchmarks/gpu.py --part 3 --out benchmarks/results/gpu
    python benchmarks/gpu.py --part 4 --out benchmarks/results/gpu
    python benchmarks/gpu_report.py

    part 1    matmuls and copies; attention by each kernel, with its errors; cuDNN's NaN; tokens decoded one by one
    part 2    losses and gradient norms of four layers of 7B under each strategy; each lever on eight layers
    part 3    7B and 8B in full: tokens/s, MFU, memory, rows that fit, a profile; adapters; Trainer; a checkpoint's copy
    part 4    peaks of memory that `gpu_predicted.py` predicts by the simulation of `plan`

Models are made from their configurations and rows of random tokens: nothing is downloaded, and needed are torch,
transformers, accelerate, peft and this library (where it is not installed, by PYTHONPATH=src), but not datasets, trl and
chess; for fp8 torchao, for 4 bits bitsandbytes, as in requirements-dev.txt. Liger and FlashAttention 3 are measured where
they are installed. A training step is the library's own, under the environment that `accelerate launch` makes of a YAML of
accelerate_configs/.

A part ends within --minutes; parts 1 and 4 together should take five minutes. Each case is a launch of its own, whose end,
whatever it is, leaves the others alone; the next one starts and imports meanwhile, and waits for its turn. A case that the
time, the device's memory or a lacking package rules out is left out, and said so. What is found is appended to
OUT/partN.jsonl line by line; what the launches print, to OUT/partN.log. A table closes it.

--tiny is a rehearsal on any machine, on models of two layers: cases of the same launch share a process, and compile by
the backend `eager`. Its numbers mean nothing.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from gpu_cases import CASES, Case
from gpu_records import Report, in_words, line_of, read, write
from machine import machine

ROOT = Path(__file__).parents[1]
LONGEST_WAIT = 900  # seconds that a launch waits for its turn
PACKAGES = ("peft", "triton", "torchao", "bitsandbytes", "flash-attn", "liger-kernel", "datasets", "trl")


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), default=1, help="Which part to measure.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="Folder of the results.")
    parser.add_argument("--minutes", type=float, default=8.0, help="Time of a part.")
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="Only these of the part.")
    parser.add_argument("--tiny", action="store_true", help="A rehearsal with tiny models.")
    parser.add_argument("--list", action="store_true", help="Print the names of the part's cases, and end.")
    parser.add_argument("--describe", action="store_true", help="Print what there is to know of the device, and end.")
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="Measure these in this process.")
    parser.add_argument("--turn", type=Path, help="With --case: a file that says when, and for how many seconds.")
    return parser.parse_args()


def describe_device() -> dict:
    """Describe the device, for the first line of the results."""
    on_gpu = torch.cuda.is_available()
    found = machine(torch.device("cuda" if on_gpu else "cpu")) | {"is_gpu": on_gpu, "gib": 0.0}
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver_version(),
        }
    for package in PACKAGES:
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """Ask the driver's tool, if it is there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


class Launch:
    """A launch of cases: it imports at once, and measures when it has its turn."""

    def __init__(self, cases: Sequence[Case], flags: argparse.Namespace, path: Path, folder: Path):
        self.cases, self.turn = cases, folder / f"turn-{cases[0].name.replace('/', '-')}"
        self.log = self.turn.with_suffix(".log")
        case = cases[0]
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(ROOT / f"accelerate_configs/{case.config}.yaml"),
        ]
        command += ["--num_processes", "1", "--main_process_port", "0"]
        command += case.launch.split() + ["--dynamo_backend", "eager"] * (flags.tiny and case.is_compiled)
        command += [str(Path(__file__).resolve()), "--out", str(path), "--turn", str(self.turn)]
        command += ["--tiny"] * flags.tiny + ["--case", *(c.name for c in cases)]
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | case.environment,
            )  # fmt: skip

    def measure(self, seconds: float) -> str:
        """Give it its turn; returns how it failed, if it did."""
        self.turn.write_text(f"{seconds}\n", encoding="utf-8")
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return f"not over within {seconds:.0f} s"
        if code == 0:
            return ""
        lines = [
            line.strip() for line in self.log.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()
        ]
        errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
        return f"ended with {code}: {(errors or lines or ['without a word'])[-1]}"

    def end(self) -> None:
        """End it with the processes that it started: torchrun puts them into sessions of their own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait()


def reason_against(case: Case, gib: float, tiny: bool) -> str:
    """Say why a case cannot be measured on this device; empty if it can."""
    if case.package and find_spec(case.package) is None:
        return f"{case.package} is not installed"
    if tiny:
        return ""
    if gib < case.gib:
        return f"needs a GPU with {case.gib:.0f} GiB, this one has {gib:.0f}"
    if gib >= case.below_gib:
        return "the device holds the larger case"
    return ""


def run_part(flags: argparse.Namespace) -> None:
    """Measure the cases of a part, one launch after the other, and print the table."""
    start = time.monotonic()
    flags.out.mkdir(parents=True, exist_ok=True)
    path = flags.out / f"part{flags.part}.jsonl"
    # In a process of its own: the memory that a CUDA context takes is not given back.
    described = subprocess.run([sys.executable, __file__, "--describe"], stdout=subprocess.PIPE, text=True, check=True)
    device = json.loads(described.stdout.splitlines()[-1]) | {"command": shlex.join(["python", *sys.argv])}
    begin = len(read(path)) if path.exists() else 0
    write(path, {"what": "machine", "part": flags.part, "tiny": flags.tiny, "unix_time": time.time()} | device)
    print(line_of(read(path)[-1]), flush=True)

    todo = []
    for case in (case for case in CASES.values() if case.part == flags.part):
        if flags.cases and case.name not in flags.cases:
            continue
        if reason := reason_against(case, device["gib"], flags.tiny):
            write(path, {"case": case.name, "skipped": reason})
        else:
            todo.append(case)
    # In a rehearsal starting a process is what takes the time.
    launches = [list(g) for _, g in itertools.groupby(todo, lambda case: case.key if flags.tiny else case.name)]
    with tempfile.TemporaryDirectory() as folder:
        run_launches(launches, flags, path, Path(folder), start + 60 * flags.minutes)
    records = read(path)[begin:]
    print("\n" + "\n".join(map(line_of, records)), flush=True)
    print(f"\n{path}: {time.monotonic() - start:.0f} s", flush=True)


def run_launches(
    launches: list[list[Case]], flags: argparse.Namespace, path: Path, folder: Path, deadline: float
) -> None:
    """Give each launch its turn as long as the time lasts; while one measures, the next one imports."""
    waiting: Launch | None = None
    for number, cases in enumerate(launches):
        name, left, needed = cases[0].name, deadline - time.monotonic(), sum(case.seconds for case in cases)
        if left < needed and not flags.tiny:
            for case in cases:
                write(path, {"case": case.name, "skipped": f"no time: takes about {needed:.0f} s, {left:.0f} are left"})
            if waiting:
                waiting.end()
            waiting = None
            continue
        launch = waiting or Launch(cases, flags, path, folder)
        following = launches[number + 1] if number + 1 < len(launches) else None
        waiting = Launch(following, flags, path, folder) if following else None
        print(f"{name}, {left:.0f} s left", flush=True)
        began = time.monotonic()
        # Twice what is expected, for a compiler; so that no case takes all that is left.
        failure = launch.measure(left if flags.tiny else min(left, 30 + 2 * needed))
        if failure:
            write(path, {"case": name, "error": failure})
            print(f"    {failure[:200]}", flush=True)
        write(path, {"case": name, "what": "seconds", "seconds": time.monotonic() - began})
        with path.with_suffix(".log").open("a", encoding="utf-8") as log:
            log.write(
                f"=== {', '.join(case.name for case in cases)}\n{launch.log.read_text(errors='replace', encoding='utf-8')}\n"
            )
    if waiting:
        waiting.end()


def run_cases(flags: argparse.Namespace) -> int:
    """Measure cases in this process, which `accelerate launch` started. Returns its exit code."""
    import gpu_kernels
    import gpu_steps

    from accelerate_recipes.distributed import make_accelerator

    waited = time.monotonic()
    while not (flags.turn.exists() and flags.turn.read_text(encoding="utf-8").endswith("\n")):
        if time.monotonic() - waited > LONGEST_WAIT:
            return 1  # whoever started it is gone
        time.sleep(0.02)
    seconds = float(flags.turn.read_text(encoding="utf-8"))
    accelerator = None
    for name in flags.case:
        case, report = CASES[name], Report(flags.out, name, seconds)
        try:
            accelerator = accelerator or make_accelerator(gpu_steps.Args())
            if flags.tiny:
                torch.set_num_threads(1)  # more would wait for each other
            if case.part == 1:
                getattr(gpu_kernels, case.measure)(accelerator.device, flags.tiny, report)
            else:
                gpu_steps.measure(case, accelerator, flags.tiny, report)
        except Exception as error:  # such as a ConfigError of the launch: it is the result of the case
            report(error=in_words(error))
    return 0


def main() -> None:
    flags = parse_flags()
    if flags.describe:
        print(json.dumps(describe_device()))
    elif flags.list:
        print("\n".join(case.name for case in CASES.values() if case.part == flags.part))
    elif flags.case:
        code = run_cases(flags)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # tearing down process groups has been seen to hang
    else:
        if unknown := set(flags.cases) - {case.name for case in CASES.values() if case.part == flags.part}:
            sys.exit(f"part {flags.part} has no case {', '.join(sorted(unknown))}; see --list")
        run_part(flags)


if __name__ == "__main__":
    main()
