"""The page docs/performance.md, and its picture, from what `gpu.py` measured on GPUs.

    python benchmarks/gpu_report.py

Reads all part*.jsonl below benchmarks/results/gpu. Of a case that was measured twice on a kind of GPU the last run counts.
Rehearsals and runs without a GPU are no results.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_profile import OPTIMIZER, PARTS
from gpu_records import figures, read

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/gpu", ROOT / "docs/performance.md"
PREDICTED = ROOT / "benchmarks/results/gpu_predicted.json"  # by gpu_predicted.py
COMMAND = "for part in 1 2 3 4; do python benchmarks/gpu.py --part $part --out benchmarks/results/gpu; done"
Record = dict[str, Any]
FULL = ("7B: best", "8B: best")
IDLE = "idle"
REFERENCE = "same: single, fp32"
MFU_GOAL, LORA_GOAL, FP8_GOAL = 0.62, 12_473, 1.15


class Anchor(NamedTuple):
    """A published speed of one GPU, and the cases that stand beside it."""

    source: str
    gpu: str  # as in the device's name
    setting: str
    speed: float  # tokens/s of one GPU
    cases: tuple[str, ...]
    differs: str
    lever: str  # what is next where ours is slower


RECOMPUTED = "rows a pass that fit: `--optim adamw_bf16_kahan`, or recomputation of every n-th layer"
ANCHORS = [
    Anchor(
        "KempnerForge, mfu_scaling.md", "H200", "Llama 8B, bf16, 1 GPU, 4 rows of 4,096, compiled, recomputation", 10_471,
        ("8B: best",), "they recompute all layers; ours are weights in bf16 with Kahan summation", RECOMPUTED,
    ),
    Anchor(
        "NeMo AutoModel, performance summary", "H100", "Llama 3 8B, LoRA r 16, 2 rows of 4,096, 16 micro-batches", 12_473,
        ("8B: LoRA",), "4 micro-batches; adapters beside all linear layers", "recomputation of fewer layers, more rows",
    ),
    Anchor(
        "llm.q, README", "H100", "Qwen2.5-7B, bf16, 1 GPU", 14_000, FULL, "another model of the size, C++ and CUDA",
        "fp8",
    ),
    Anchor(
        "llm.q, README", "H100", "Qwen2.5-7B, fp8, 1 GPU", 18_000, ("7B: fp8", "8B: fp8"),
        "another model of the size, C++ and CUDA", "fp8 of attention and of the output layer",
    ),
    Anchor(
        "torchtitan, llama3_h100_202412", "H100", "Llama 8B, FSDP2, 8 GPUs, 2 rows of 8,192", 5_762, ("8B: best",),
        "8 GPUs, rows twice as long", "compilation by layer",
    ),
    Anchor(
        "torchtitan, llama3_h100_202412", "H100", "the same, compiled", 6_667, ("8B: best",), "8 GPUs, rows twice as long",
        "fp8",
    ),
    Anchor(
        "torchtitan, llama3_h100_202412", "H100", "the same, compiled, float8", 8_532, ("7B: fp8", "8B: fp8"),
        "8 GPUs, rows twice as long; the case says which of ours", "float8 in the gathers of FSDP2",
    ),
    Anchor(
        "torchtune, README", "A100", "Llama 3.2 3B, LoRA", 8_210, (), "another model; an A100 was not measured",
        "an A100 to measure on",
    ),
]  # fmt: skip


class Results:
    """What was measured on one kind of GPU, by case."""

    def __init__(self, device: Record):
        self.device = device
        self.cases: dict[str, list[Record]] = {}

    def of(self, *kinds: str, part: str = "") -> list[Record]:
        """Select what was measured of some kinds, in the cases whose names begin with `part`."""
        return [r for r in self.records if r.get("what") in kinds and not is_lost(r) and r["case"].startswith(part)]

    @property
    def records(self) -> list[Record]:
        return [record for records in self.cases.values() for record in records]

    def steps(self, cases: Iterable[str], setting: str = "") -> list[Record]:
        """Select speeds of training steps; those of a search for rows come with the MFU that their case's others have."""
        found = [r for r in self.of("steps") if r["case"] in cases]
        for rows in (r for r in self.of("rows") if r["case"] in cases):
            base = next((r for r in found if r["case"] == rows["case"] and r["setting"] == rows["setting"]), None)
            for fitting in rows["fitting"] if base else []:
                ratio = fitting["tokens_per_second"] / base["tokens_per_second"]
                mfu = {key: base[key] and base[key] * ratio for key in ("mfu_full", "mfu_attended")}
                found.append(base | fitting | mfu | {"micro_batches": 1})
        return [r for r in found if r["setting"].startswith(setting)]

    def fastest(self, cases: Iterable[str], setting: str = "") -> Record | None:
        return max(self.steps(cases, setting), key=lambda r: r["tokens_per_second"], default=None)


def is_lost(record: Record) -> bool:
    return bool({"error", "skipped"} & record.keys())


def has_results(records: list[Record]) -> bool:
    return any(not is_lost(record) and record["what"] != "seconds" for record in records)


def load(folder: Path) -> list[Results]:
    """Read all results below a folder, by the name of the GPU."""
    found: dict[str, Results] = {}
    for path in sorted(folder.rglob("part*.jsonl")):
        runs: list[tuple[Record, dict[str, list[Record]]]] = []
        for record in read(path):
            if record.get("what") == "machine":
                runs.append((record, {}))
            else:
                runs[-1][1].setdefault(record["case"], []).append(record)
        for device, cases in runs:
            if not device["is_gpu"] or device["tiny"]:
                continue
            results = found.setdefault(device["device"], Results(device))
            for name, records in cases.items():
                if has_results(records) or not has_results(results.cases.get(name, [])):
                    results.cases[name] = records
    return [found[name] for name in sorted(found)]


def table(columns: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows), ""]


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def verdict(found: float | None, goal: float, text: Callable[[float], str]) -> tuple[str, str]:
    if found is None:
        return "", "not measured"
    return text(found), "reached" if found >= goal else "missed"


def goals(results: Results) -> list[str]:
    """Set what was asked for beside what was measured."""
    best = [r["mfu_full"] for r in results.steps(FULL, "one document") if r["mfu_full"] is not None]
    lora = results.fastest(("8B: LoRA",))
    speed = lora and lora["tokens_per_second"]
    models = ("8B", "7B", "8B, 24 of 32 layers", "7B, 24 of 32 layers")
    pairs = [[results.fastest((f"{m}: {way}",), "one document") for way in ("fp8", "best")] for m in models]
    ratios = [fp8["tokens_per_second"] / bf16["tokens_per_second"] for fp8, bf16 in pairs if fp8 and bf16]
    return table(
        ["goal", "measured", ""],
        [
            (
                f"7B or 8B, all weights, one document of 4,096 tokens a row: MFU {MFU_GOAL:.0%}",
                *verdict(max(best, default=None), MFU_GOAL, "{:.1%}".format),
            ),
            (f"8B, LoRA r 16: {LORA_GOAL:,} tokens/s", *verdict(speed, LORA_GOAL, "{:,.0f}".format)),
            (f"fp8: {FP8_GOAL} of bf16", *verdict(next(iter(ratios), None), FP8_GOAL, "{:.2f}".format)),
        ],
    )


def anchors(results: Results) -> list[str]:
    """Set published speeds beside ours; a ratio only where the GPU is of the same kind."""
    rows = []
    for anchor in ANCHORS:
        ours = results.fastest(anchor.cases, "") if anchor.gpu in results.device["device"] else None
        ratio = ours and ours["tokens_per_second"] / anchor.speed
        rows.append(
            (
                f"{anchor.source}: {anchor.setting}, {anchor.gpu}",
                f"{anchor.speed:,.0f}",
                f"{ours['tokens_per_second']:,.0f} ({ours['case']})" if ours else "not measured on this GPU",
                f"{ratio:.2f}" if ratio else "",
                anchor.differs,
                anchor.lever if ratio and ratio < 1 else "",
            )
        )
    return table(["published", "tokens/s", "ours", "ratio", "what differs", "next, where ours is slower"], rows)


def speeds(records: Iterable[Record], base: dict[int, float] | None = None) -> list[str]:
    """Tabulate training steps; with `base`, tokens/s by the number of micro-batches, their ratios to it."""
    rows = []
    for r in records:
        low, high = r["tokens_per_second_range"]
        compared = base.get(r["micro_batches"]) if base else None
        rows.append(
            (
                r["case"], r["setting"], f"{r['micro_batches']} x {r['rows']}",
                f"{r['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})",
                *([f"{r['tokens_per_second'] / compared:.2f}" if compared else ""] if base is not None else []),
                share(r.get("mfu_full")), share(r.get("mfu_attended")),
                f"{r['peak_allocated_gib']:.1f} / {r['peak_reserved_gib']:.1f}" if "peak_allocated_gib" in r else "",
            )
        )  # fmt: skip
    ratio = ["to the base"] if base is not None else []
    columns = ["case", "setting", "passes x rows", "tokens/s (spread)", *ratio, "MFU, T of the row"]
    return table([*columns, "MFU, T of the document", "GiB allocated / reserved"], rows)


def sameness(results: Results) -> list[str]:
    """Set losses and gradient norms behind the last step beside those of fp32."""
    found = results.of("same")
    exact = next((r for r in found if r["case"] == REFERENCE), None)

    def off(record: Record, key: str) -> str:
        return f"{abs(record[key][-1] / exact[key][-1] - 1):.1e}" if exact else ""

    return table(
        ["case", "attention", "loss", "off by", "gradient norm", "off by", "the same bits again"],
        [
            (
                r["case"], r["setting"], f"{r['losses'][-1]:.6f}", off(r, "losses"), f"{r['grad_norms'][-1]:.5f}",
                off(r, "grad_norms"), "yes" if r["is_repeated"] else "no",
            )
            for r in found
        ],
    )  # fmt: skip


def memory(results: Results) -> list[str]:
    """Set measured peaks beside those that the simulation of `plan` predicts."""
    found = {(r["case"], r["setting"]): r for r in results.of("steps", part="memory")}
    rows = []
    for predicted in json.loads(PREDICTED.read_text(encoding="utf-8"))["predicted"]:
        key = predicted["case"], predicted["setting"]
        if key in found:
            values = []
            for what in ("allocated", "reserved"):
                expected, measured = predicted[what] / 2**30, found[key][f"peak_{what}_gib"]
                values += [f"{expected:.2f}", f"{measured:.2f}", f"{expected / measured - 1:+.1%}"]
            rows.append((*key, *values))
    columns = ["case", "setting", "allocated, predicted", "GiB measured", "off by"]
    return table([*columns, "reserved, predicted", "GiB measured", "off by"], rows)


def section(results: Results) -> list[str]:
    """Everything of one kind of GPU."""
    device, other = results.device, lambda *kinds: [(r["case"], r["setting"], figures(r)) for r in results.of(*kinds)]
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
    levers = results.of("steps", part="lever")
    base = {r["micro_batches"]: r["tokens_per_second"] for r in levers if r["setting"] == "base"}
    parts = [
        (r["case"], *(f"{r['milliseconds'].get(part, 0):.0f}" for part in (*PARTS, OPTIMIZER)), share(r["idle_share"]))
        for r in results.of("profile")
    ]
    lost = [(r["case"], r.get("setting", ""), figures(r)) for r in results.records if is_lost(r)]
    whole = [r["case"] for r in results.of("steps") if r["case"].startswith(("7B", "8B", "Trainer"))]
    lines = [f"## {device['device']}", ""]
    lines += [
        f"{device['gib']:.1f} GiB, driver {device['driver']}, CUDA {device['cuda']}, cuDNN {device['cudnn']}; {versions}.",
        "",
    ]
    lines += ["### Goals", "", *goals(results)]
    lines += ["### Whole models", "", *speeds(results.steps(dict.fromkeys(whole)))]
    lines += ["### Beside what others publish", "", *anchors(results)]
    if parts:
        lines += ["### Where a step's time goes", "", "Milliseconds of a step of one micro-batch.", ""]
        lines += ["![a step's time by part](performance.png)", ""]
        lines += table(["case", *PARTS, OPTIMIZER, "idle"], parts)
    lines += ["### Levers, on eight layers of 7B", "", *speeds(levers, base)]
    lines += ["### The same result under each strategy, on four layers of 7B", ""]
    lines += [f"Off by: relative to `{REFERENCE}`; Kahan's weights in bf16 are others.", "", *sameness(results)]
    lines += ["### Memory, predicted by `plan` and measured", "", *memory(results)]
    for title, kinds in (
        ("Attention by itself", ("attention", "choice", "finite", "decode")),
        ("Ceilings", ("matmul", "copy")),
        ("The copy that begins a checkpoint", ("staging",)),
    ):
        lines += [f"### {title}", "", *table(["case", "setting", ""], other(*kinds))]
    if lost:
        lines += ["### Failed, or left out", "", *table(["case", "setting", ""], lost)]
    return lines


def page(results: list[Results]) -> str:
    """The page; without results of a GPU it says so, and how to get them."""
    command = [f"    {COMMAND}", "    python benchmarks/gpu_report.py", ""]
    if not results:
        return "\n".join(["# Performance", "", "Not measured yet. On a machine with a GPU:", "", *command])
    lines = ["# Performance", "", "Measured on one GPU, in rows of 4,096 tokens, by", "", *command]
    lines += [
        "Models are made from their configurations, rows are of random tokens. FLOPs of a token are 6 N + 12 L H Q T, N",
        "without the input embedding (`metrics.decoder_flops`); T is the length of the row, as in PaLM and in what others",
        "publish, or that of the document that a token lies in, which is what is attended. MFU is the share of the dense",
        "bf16 peak of the data sheet. Raw numbers: `benchmarks/results/gpu`.",
        "",
    ]
    for found in results:
        lines += section(found)
    return "\n".join(lines)


def with_idle(profile: Record) -> dict[str, float]:
    """Milliseconds by part, and of no kernel: a share of the whole, of which kernels that overlap count once too often."""
    idle = profile["idle_share"] or 0.0
    return profile["milliseconds"] | {IDLE: sum(profile["milliseconds"].values()) * idle / (1 - idle)}


def draw(path: Path, results: list[Results]) -> bool:
    """Draw profiles as stacked bars; returns whether there are any."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    profiles = {
        f"{found.device['device']}\n{r['case']}": with_idle(r) for found in results for r in found.of("profile")
    }
    if not profiles:
        return False
    figure = Figure(figsize=(11, 1.6 + 0.8 * len(profiles)), layout="constrained")
    axes = figure.subplots()
    lefts = dict.fromkeys(profiles, 0.0)
    for part in (*PARTS, OPTIMIZER, IDLE):
        values = [milliseconds.get(part, 0.0) for milliseconds in profiles.values()]
        color = {"color": "0.85"} if part == IDLE else {}
        axes.barh(list(profiles), values, left=list(lefts.values()), label=part, **color)
        lefts = {name: left + value for (name, left), value in zip(lefts.items(), values, strict=True)}
    axes.set(xlabel="ms of a step of one micro-batch", title="A step's time by part")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of gpu.py's results.")
    parser.add_argument("--out", type=Path, default=PAGE, help="The page; its picture lies beside it.")
    flags = parser.parse_args()
    results = load(flags.results)
    flags.out.write_text(page(results), encoding="utf-8")
    draw(flags.out.with_suffix(".png"), results)
    print(flags.out)


if __name__ == "__main__":
    main()
