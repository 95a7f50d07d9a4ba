"""Where a step's time goes, from a trace of torch's profiler: by part, by kernel, and not at all."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

OPTIMIZER, REST = "optimizer", "norms and other elementwise"
# A kernel belongs to the first part whose words are in its name; what is inside the optimizer's step, to that.
PARTS = {
    "attention": "flash|fmha|sdpa|scaled_dot_product|flex_attention|varlen|mha_|attn",
    REST: "^triton",  # compiled ones have the names of all that is fused in them
    "matmuls": "gemm|nvjet|cutlass|cublas|xmma|wgmma|matmul|aten::.*mm$|splitk",
    "loss": "softmax|nll_loss|cross_entropy",
    "copies and casts": "memcpy|memset|copy|catarray|chunk|nccl|split_with_sizes",
}
Event = tuple[str, float, float]  # name, beginning and duration in microseconds


def part_of(name: str) -> str:
    """Name the part of a step that a kernel belongs to, of those outside the optimizer."""
    return next((part for part, words in PARTS.items() if re.search(words, name, re.IGNORECASE)), REST)


def profiled(step: Callable[[], object], device: torch.device) -> dict:
    """Run a step under the profiler.

    Returns:
        `milliseconds` by part; `idle_share`, of the time from the first kernel to the end of the last; the `kernels` that
        take longest, with their milliseconds and number. On a CPU operators stand for kernels, and idle time is not known.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as trace:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    if not on_gpu:
        events = [(e.key, 0.0, e.self_cpu_time_total) for e in trace.key_averages()]
        return summary(events, [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        raw = [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in raw if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # The optimizer's step, as the GPU lived it.
    ranges = [e for e in raw if e.get("cat") == "gpu_user_annotation" and e["name"].startswith("Optimizer.step")]
    return summary(*([(e["name"], float(e["ts"]), float(e["dur"])) for e in events] for events in (kernels, ranges)))


def summary(events: list[Event], optimizer: list[Event]) -> dict:
    """Sum up kernels; see `profiled`. `optimizer`: when its steps ran."""
    parts, times, numbers = Counter(dict.fromkeys((*PARTS, OPTIMIZER), 0.0)), Counter(), Counter()
    for name, begin, duration in events:
        inside = any(start <= begin < start + length for _, start, length in optimizer) or "adam" in name.lower()
        parts[OPTIMIZER if inside else part_of(name)] += duration / 1000
        times[name] += duration / 1000
        numbers[name] += 1
    top = [{"name": n[:160], "milliseconds": t, "number": numbers[n]} for n, t in times.most_common(15)]
    return {"milliseconds": dict(parts), "idle_share": idle_share(events), "kernels": top}


def idle_share(events: list[Event]) -> float | None:
    """Share of the time between the first kernel and the last in which none runs; None without times."""
    if not any(begin for _, begin, _ in events):
        return None
    spans = sorted((begin, begin + duration) for _, begin, duration in events)
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])
