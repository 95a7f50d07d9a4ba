"""The records of `gpu.py`: JSON lines that survive a crash, and a line of the table for each."""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def write(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file, at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file; a last line that a crash cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Report:
    """Writes what a case finds, as it finds it."""

    def __init__(self, path: Path, case: str, seconds: float):
        self.path, self.case = path, case
        self.deadline = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def __call__(self, **record: Any) -> None:
        write(self.path, {"case": self.case} | record)

    def attempt(self, setting: str, what: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Write what a measurement finds, or how it failed: the next one has its chance."""
        try:
            found = measure()
        except Exception as error:  # whatever it is, it is the result
            found = {"error": in_words(error)}
        self(**found | {"what": what, "setting": setting})
        free_memory()


def free_memory() -> None:
    """Free what nothing holds any more; behind an error, the tensors of its frames."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def line_of(record: dict[str, Any]) -> str:
    """Put a record into a line of the table at the end."""
    name = " | ".join(str(record[key]) for key in ("case", "setting") if record.get(key))
    if "micro_batches" in record:
        name += f" | {record['micro_batches']} x {record['rows']} rows"
    return f"{name:78} {figures(record)}"


def figures(record: dict[str, Any]) -> str:
    """Put what a record says into words."""
    if "error" in record:
        return f"failed: {' '.join(record['error'].split())[:160]}"
    if "skipped" in record:
        return f"left out: {record['skipped']}"
    match record["what"]:
        case "machine":
            return f"{record['device']}, {record['gib']:.1f} GiB, torch {record['versions']['torch']}"
        case "matmul":
            return f"{record['milliseconds']:9.3f} ms {record['tflops']:7.1f} TFLOP/s"
        case "copy":
            return f"{record['milliseconds']:9.3f} ms {record['terabytes_per_second']:7.2f} TB/s"
        case "attention":
            worst = max(record["errors"].values())
            return (
                f"{record['milliseconds']:9.3f} ms (forward {record['forward_milliseconds']:.3f}), "
                f"{record['tflops']:.1f} TFLOP/s, error {worst:.1e}"
            )
        case "choice":
            return record["backend"]
        case "finite":
            return "gradient finite" if record["is_finite"] else "gradient NaN"
        case "decode":
            return f"{record['milliseconds_per_token']:.2f} ms a token"
        case "same":
            bits = "same bits again" if record["is_repeated"] else "other bits again"
            return f"loss {record['losses'][-1]:.6f}, gradient norm {record['grad_norms'][-1]:.5f}, {bits}"
        case "steps":
            return steps_line(record)
        case "rows":
            best = max((found["tokens_per_second"] for found in record["fitting"]), default=0)
            return f"fit: {[f['rows'] for f in record['fitting']]}, then {record['then']}; best {best:,.0f} tokens/s"
        case "profile":
            parts = ", ".join(f"{part} {ms:.1f}" for part, ms in record["milliseconds"].items())
            idle = "" if record["idle_share"] is None else f"; idle {record['idle_share']:.1%}"
            return f"ms: {parts}{idle}"
        case "staging":
            return f"{record['gib']:.2f} GiB in {record['seconds'][0]:.2f} s, again {record['seconds'][1]:.2f} s"
        case "seconds":
            return f"{record['seconds']:.0f} s"
    return json.dumps(record)


def steps_line(record: dict[str, Any]) -> str:
    low, high = record["tokens_per_second_range"]
    text = f"{record['tokens_per_second']:10,.0f} tokens/s ({low:,.0f} to {high:,.0f})"
    if record.get("mfu_full") is not None:
        text += f", MFU {record['mfu_full']:.1%}, of what is attended {record['mfu_attended']:.1%}"
    if "peak_allocated_gib" in record:
        text += f", {record['peak_allocated_gib']:.1f} GiB"
    return text
