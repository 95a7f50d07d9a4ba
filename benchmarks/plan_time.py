"""Measure what `plan` takes: seconds, and the memory of it with all its processes.

    python benchmarks/plan_time.py --out benchmarks/results/plan_time.json

First Llama 2 70B on 64 GPUs, then every preset for GPUs, each as the command is typed, with `--no-search`: that simulates as
much as the check of `preflight --gpu`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import machine
from plans import of_preset, presets, words_of

ROOT = Path(__file__).resolve().parents[1]
LARGE = (
    "accelerate_configs/fsdp_full.yaml --nodes 8 --gpus-per-node 8 --gpu h100 --fsdp_activation_checkpointing true "
    "recipes/c4.py --config recipes/configs/c4/llama2_70b.yaml --config_overrides num_hidden_layers="
)


def measured(command: str) -> dict[str, Any]:
    """Run `plan` without a search; return its seconds, and the most memory that its processes had at once, in bytes."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(command, Path(folder))
        most = watched([sys.executable, "-m", "accelerate_recipes", "plan", "--no-search", *words])
    return {"command": command, "seconds": round(time.perf_counter() - start, 1), "memory": most}


def watched(argv: list[str]) -> int:
    """Run a command to its end; return the most memory of its processes."""
    most = 0
    plan = psutil.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while plan.poll() is None:
        most = max(most, memory_of(plan))
        time.sleep(0.05)
    if plan.returncode:
        sys.exit(plan.stdout.read())
    return most


def memory_of(process: psutil.Process) -> int:
    """Sum the memory of a process and its children; what forks share counts once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--large", type=int, default=80, metavar="LAYERS", help="layers of Llama 2 70B")
    parser.add_argument("--presets", nargs="+", default=sorted(presets()), help="names as in recipes/configs")
    args = parser.parse_args()
    found: dict[str, Any] = machine(torch.device("cpu")) | {"large": measured(f"{LARGE}{args.large}"), "presets": {}}
    for name in args.presets:
        found["presets"][name] = measured(of_preset(name))
        print(f"{found['presets'][name]['seconds']:6.1f} s {name}", flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
