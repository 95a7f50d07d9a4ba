"""What one GPU reaches: attention by itself, and training steps of models whose speed others publish. Seven minutes.

    python benchmarks/gpu.py --describe    # the commands

Models are made from their shapes and rows of random tokens: nothing is downloaded, and needed are torch, transformers,
accelerate, peft and this library (where it is not installed, by PYTHONPATH=src), but not datasets, trl and chess. A step is
the library's own, under the environment that `accelerate launch` makes of a YAML of accelerate_configs/. FlashAttention 3 is
used where it is installed.

Cases come in order of worth. Each is a launch of its own, whose end, whatever it is, leaves the others alone; the next one
starts and imports meanwhile, and waits for its turn. A case that the time, the device's memory or a lacking package rules
out is left out, and said so. What is found is appended to OUT/gpu.jsonl line by line, so that a run cut off anywhere leaves
figures; what the launches print, to OUT/gpu.log. What was compiled is kept in OUT/compiled.tar.gz, for the next run.

--tiny is a rehearsal on any machine, on models of two layers and compiled by `eager`: its numbers mean nothing.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_cases import CASES, Case
from gpu_report import RESULTS, line_of
from harness import ROOT, machine

from recipe_tools.machine import installed_gpus

COMPILED = Path(tempfile.gettempdir()) / "accelerate_recipes_compiled"  # what is compiled names this path
LARGEST = 2**24  # bytes of COMPILED, packed
LONGEST_WAIT = 900  # seconds that a launch waits for its turn
PACKAGES = ("peft", "triton", "torchao", "flash-attn-3", "datasets")
DESCRIPTION = """\
Commands, each for one call, in an environment with torch, transformers, accelerate, peft and psutil:
    PYTHONPATH=src python benchmarks/gpu.py
    PYTHONPATH=src:site python benchmarks/gpu.py --second --compiled benchmarks/results/gpu/compiled.tar.gz
    python benchmarks/gpu_report.py    # where matplotlib is

Wheels that the second list needs besides (torchao for fp8; with pytest, pyarrow and xxhash the others for the tests), 5 MB:
    pip download --no-deps -d wheels torchao==0.18.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
    pip install --no-index --no-deps --target site wheels/*.whl
"""


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--second", action="store_true", help="Measure the second list.")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="NAME", help="Only these, of either list.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Folder; by default benchmarks/results/gpu.")
    parser.add_argument("--minutes", type=float, help="Time of all cases; by default 7, of the second list 3.")
    parser.add_argument("--compiled", type=Path, help="The compiled.tar.gz of an earlier run.")
    parser.add_argument("--tiny", action="store_true", help="A rehearsal with tiny models.")
    parser.add_argument("--describe", action="store_true", help="Print commands, packages and times, and end.")
    parser.add_argument("--run", nargs="+", default=[], help=argparse.SUPPRESS)  # cases to measure in this process
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)  # a file that says when
    return parser.parse_args()


def description() -> str:
    """Say how to run this, and what it takes."""
    lines = [DESCRIPTION]
    for name, is_second in (("First", False), ("Second", True)):
        cases = [case for case in CASES.values() if case.is_second == is_second]
        for card in (79.6, 139.8):
            seconds = sum(case.seconds for case in cases if case.gib <= card)
            lines.append(f"{name} list, on a card of {card} GiB: about {seconds:.0f} s")
        lines += [f"    {case.name:14} about {case.seconds:.0f} s, needs {case.gib:.0f} GiB" for case in cases]
    return "\n".join(lines)


def describe_device() -> dict[str, Any]:
    """Describe the device, for the first line of the results, without a CUDA context, whose memory is not given back."""
    found = machine() | {"is_gpu": False, "gib": 0.0, "cuda": torch.version.cuda}
    found["versions"] |= {found.name: found.version for found in distributions() if found.name in PACKAGES}
    for card in installed_gpus()[:1]:
        found |= {"is_gpu": True, "device": card.name, "gib": card.memory / 2**30, "driver": card.driver}
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    """Append a record to the results, at once, and print it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(line_of(record), flush=True)


class Launch:
    """A launch of cases: it imports at once, and measures when it has its turn."""

    def __init__(self, cases: list[Case], flags: argparse.Namespace, folder: Path):
        case = cases[0]
        self.turn = folder / f"turn-{[*CASES].index(case.name)}"
        self.log = self.turn.with_suffix(".log")
        command = [sys.executable]
        if case.config:
            config = f"{ROOT}/accelerate_configs/{case.config}.yaml"
            command += ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "1"]
            command += ["--main_process_port", "0", *case.launch.split()]
            command += ["--dynamo_backend", "eager"] * flags.tiny
        command += [__file__, "--out", str(flags.out), "--turn", str(self.turn), *["--tiny"] * flags.tiny]
        command += ["--run", *(c.name for c in cases)]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(COMPILED), "TRITON_CACHE_DIR": str(COMPILED / "triton")}
        with self.log.open("wb") as log, open(os.devnull, "rb") as nothing:
            self.process = subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log, env=os.environ | caches)

    def measure(self, seconds: float) -> str:
        """Give it its turn; returns how it failed, if it did."""
        self.turn.touch()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return f"not over within {seconds:.0f} s"
        lines = [*filter(None, map(str.strip, self.log.read_text(errors="replace", encoding="utf-8").splitlines()))]
        errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
        return f"ended with {code}: {(errors or lines or ['without a word'])[-1]}" if code else ""

    def end(self) -> None:
        """End it with the processes that it started: torchrun puts them into sessions of their own."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
        self.process.wait()


def run(flags: argparse.Namespace) -> None:
    """Measure the cases, one launch after the other, and print a line for each record."""
    start = time.monotonic()
    flags.out.mkdir(parents=True, exist_ok=True)
    path = flags.out / "gpu.jsonl"
    device = describe_device() | {"command": shlex.join(["python", *sys.argv]), "tiny": flags.tiny}
    write(path, {"what": "machine", "unix_time": time.time()} | device)
    if flags.compiled and flags.compiled.exists():
        with tarfile.open(flags.compiled) as packed:
            packed.extractall(COMPILED)  # Python before 3.11.4 has no `filter`
    elif flags.compiled:  # the run before kept none, or had no time for it
        print(f"{flags.compiled} is not there: everything is compiled anew", flush=True)
    todo = []
    for case in CASES.values():
        if case.name not in flags.cases if flags.cases else case.is_second != flags.second:
            continue
        if case.package and find_spec(case.package) is None:
            write(path, {"case": case.name, "skipped": f"{case.package} is not installed"})
        elif device["gib"] < case.gib and not flags.tiny:
            why = f"needs a GPU with {case.gib:.0f} GiB, this one has {device['gib']:.1f}"
            write(path, {"case": case.name, "skipped": why})
        else:
            todo.append(case)
    # In a rehearsal starting a process is what takes the time.
    launches = [list(g) for _, g in itertools.groupby(todo, lambda c: (c.config, c.launch) if flags.tiny else c.name)]
    minutes = (3 if flags.second else 7) if flags.minutes is None else flags.minutes
    with tempfile.TemporaryDirectory() as folder:
        run_launches(launches, flags, path, Path(folder), start + 60 * minutes)
    pack(flags.out / "compiled.tar.gz")
    print(f"{path}: {time.monotonic() - start:.0f} s", flush=True)


def run_launches(launches: list[list[Case]], flags: argparse.Namespace, path: Path, folder: Path, end: float) -> None:
    """Give each launch its turn as long as the time lasts; while one measures, the next one imports."""
    running: list[Launch] = []  # the one that measures, and the one that waits
    try:
        for number, cases in enumerate(launches):
            left, needed = end - time.monotonic(), sum(case.seconds for case in cases)
            if left < needed and not flags.tiny:
                while running:
                    running.pop().end()
                why = f"no time: takes about {needed:.0f} s, {max(left, 0):.0f} are left"
                write(path, {"case": cases[0].name, "skipped": why})
                continue
            running = running or [Launch(cases, flags, folder)]
            running += [Launch(following, flags, folder) for following in launches[number + 1 : number + 2]]
            begin, known = time.monotonic(), path.stat().st_size
            # Enough for imports from a cold disk and for a compiler, but no case takes all that is left.
            failure = running[0].measure(left if flags.tiny else min(left, 30 + 2 * needed))
            for line in path.read_bytes()[known:].splitlines():
                print(line_of(json.loads(line)), flush=True)
            if failure:
                write(path, {"case": cases[0].name, "error": failure})
            write(path, {"case": cases[0].name, "what": "seconds", "seconds": time.monotonic() - begin})
            with path.with_suffix(".log").open("a", encoding="utf-8") as log:
                printed = running.pop(0).log.read_text(encoding="utf-8", errors="replace")
                log.write(f"=== {', '.join(case.name for case in cases)}\n{printed}\n")
    finally:
        for launch in running:
            launch.end()


def pack(path: Path) -> None:
    """Keep what was compiled, unless it is too large to travel."""
    if not COMPILED.exists():
        return
    with tarfile.open(path, "w:gz", compresslevel=5) as packed:
        packed.add(COMPILED, "")
    if (size := path.stat().st_size) > LARGEST:
        path.unlink()
        print(f"what was compiled is not kept: it has {size / 2**20:.1f} MiB, at most {LARGEST / 2**20:.0f} are")


def run_cases(flags: argparse.Namespace) -> None:
    """Measure cases in this process, when it has its turn."""
    import gpu_measure  # which takes the time that the case before measures

    waited = time.monotonic()
    while not flags.turn.exists():
        if time.monotonic() - waited > LONGEST_WAIT:
            sys.exit("no turn came")  # whoever started this is gone
        time.sleep(0.02)
    cases, path = [CASES[name] for name in flags.run], flags.out / "gpu.jsonl"
    gpu_measure.measure(cases, flags.tiny, lambda name, found: write(path, {"case": name} | found))
    os._exit(0)  # tearing down process groups has been seen to hang


def main() -> None:
    flags = parse_flags()
    if flags.describe:
        print(description())
    elif flags.run:
        run_cases(flags)
    else:
        run(flags)


if __name__ == "__main__":
    main()
