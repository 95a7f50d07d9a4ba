"""What the benchmarks share: flags, turns, ratios of rounds, the description of the machine, results as JSON and tables."""

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import accelerate
import psutil
import torch
import transformers

import accelerate_recipes
from recipe_tools.machine import processor

ROOT = Path(__file__).resolve().parents[1]
MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


def make_parser(description: str | None, **numbers: tuple[int, str]) -> argparse.ArgumentParser:
    """Make a parser with a flag for each whole number, given by its default and its help, and with --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} Default: {default}.")
    parser.add_argument("--out", type=Path, help="Write all numbers to this JSON file.")
    return parser


def turns(names: Sequence[str], round_number: int) -> list[str]:
    """Return the order of a round, which rotates from round to round: a disturbance meets all alike."""
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


def ratios(values: Mapping[str, Sequence[float]], one: str, others: Iterable[str]) -> dict[str, list[float]]:
    """Divide the values of `one` by those of each other, round by round."""
    return {f"{one}/{other}": [a / b for a, b in zip(values[one], values[other], strict=True)] for other in others}


def print_ratios(title: str, found: Mapping[str, Sequence[float]]) -> None:
    """Print the median of each pair, with the smallest and the largest."""
    for name, values in found.items():
        print(f"{title} {name}: {median(values):.4f} ({min(values):.4f} to {max(values):.4f})")


def machine(device: torch.device = CPU) -> dict[str, Any]:
    """Describe the machine that a benchmark ran on, the versions, the day, and the command that started it."""
    modules = (accelerate_recipes, torch, accelerate, transformers)
    return {
        "command": " ".join(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": psutil.cpu_count(),
        "load_average": psutil.getloadavg()[0],
        "threads_per_process": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in modules},
    }


def write_json(path: Path | None, found: dict[str, Any]) -> None:
    """Write a result, if a file was asked for."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Write the lines of a table in Markdown."""
    lines = [list(columns), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def status(name: str) -> int:
    """Return VmRSS, VmHWM or VmData of this process in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])  # pyright: ignore[reportOptionalSubscript]


def peak_begins() -> int:
    """Let the resident peak begin anew; return what is resident, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return status("VmRSS")
