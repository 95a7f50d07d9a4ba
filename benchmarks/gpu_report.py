"""The page docs/development/performance.md and its picture: what `gpu.py` measured, what was predicted, what others publish.

    python benchmarks/gpu_report.py

The page ends with what `first_step.py` measured.

Of a case that was measured twice on a kind of GPU the last run counts. Rehearsals and runs without a GPU are no results.
"""

import json
from pathlib import Path
from typing import Any

import first_step
from gpu_cases import CASES, Anchor, flops_of
from harness import ROOT, table

from accelerate_recipes.arguments.gpus import GPUS

RESULTS, PAGE = ROOT / "benchmarks/results/gpu", ROOT / "docs/development/performance.md"
INTRODUCTION = """\
# Performance

On one GPU, by

    python benchmarks/gpu.py
    python benchmarks/gpu.py --second --compiled benchmarks/results/gpu/compiled.tar.gz
    python benchmarks/gpu_report.py

`gpu.py --describe` says what this needs and how long it takes. In a case such as 4 x 1024 x 8, a step has 8 passes of
4 rows, each with 1,024 random tokens. Models are Llamas of the named size. They are trained in bf16 with
`--optim adamw_bf16_kahan`; only LoRA trains adapters beside a frozen model in bf16. MFU is the share of the dense bf16 peak
of the data sheet (H100, H200: 989 TFLOP/s). FLOPs of a token are 6 N + 12 L H Q T, as in PaLM and in what others publish:
N leaves out the input embedding, and T is the length of the row.

**Predicted** is arithmetic, written down before anything ran on a GPU: matmuls at 650 TFLOP/s (480 to 620 in small models),
memory at 3.0 TB/s. It is no result.

![speeds, to what is published](performance.png)"""
COLUMNS = (
    "case", "tokens/s", "MFU", "GiB allocated / reserved", "predicted tokens/s (MFU)", "published tokens/s",
    "ours to theirs", "what differs in theirs",
)  # fmt: skip
Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """Read the records of a file; a last line that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def load(folder: Path) -> dict[str, dict[tuple[str, str], Record]]:
    """Read all results below a folder: by GPU, then by case and setting. A GPU's own record has the key ("", "")."""
    found: dict[str, dict[tuple[str, str], Record]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        device: Record = {}
        for record in read(path):
            if record.get("what") == "machine":
                device = record | {"case": ""}
            if device["is_gpu"] and not device["tiny"] and record.get("what") != "seconds":
                records = found.setdefault(device["device"], {("", ""): device})
                key = record.get("case", ""), record.get("setting", "")
                if is_found(record) or key not in records:
                    records[key] = record
    return found


def is_found(record: Record) -> bool:
    return not {"error", "skipped"} & record.keys()


def line_of(record: Record) -> str:
    """Put a record into words."""
    parts = {key: value for key, value in record.items() if key not in ("case", "setting", "what", "range", "versions")}
    name = f"{record.get('case', '')} | {record.get('setting', '')}".strip(" |")
    if "kernels" in parts:
        parts = {"milliseconds": parts["milliseconds"]} | dict(list(parts["kernels"].items())[:3])
    words = (f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in parts.items())
    return f"{name:44} {' '.join(', '.join(words).split())[:240]}"


def beside(anchor: Anchor | None, ours: float | None, card: str) -> list[str]:
    """Make the cells of what is published; a ratio only where the card is the same."""
    if not anchor:
        return ["", "", ""]
    ratio = f"{ours / anchor.speed:.2f}" if ours and anchor.gpu in card else ""
    return [f"{anchor.speed:,.0f}, {anchor.gpu}, {anchor.source}", ratio, anchor.differs]


def speeds(results: dict[tuple[str, str], Record], card: str) -> list[list[str]]:
    """Make the rows of speeds: ours on a card, predicted, published."""
    rows = []
    for case in CASES.values():
        for batch in case.batches:
            record = results.get((case.name, batch.name), results.get((case.name, ""), {}))
            ours = record.get("tokens_per_second")
            measured = ["not measured", "", ""]
            if ours:
                speed = "{:,.0f} ({:,.0f} to {:,.0f})".format(ours, *record["range"])
                gib = f"{record['allocated_gib']:.1f} / {record['reserved_gib']:.1f}"
                measured = [speed, f"{record['mfu']:.1%}", gib]
            predicted = f"{batch.predicted:,.0f}" if batch.predicted else ""
            if predicted and not case.args.get("use_peft"):
                predicted += f" ({batch.predicted * flops_of(case, batch) / GPUS['h100'].bf16:.0%})"
            for anchor in batch.anchors or (None,):
                rows.append([f"{case.name}, {batch.name}", *measured, predicted, *beside(anchor, ours, card)])
                measured, predicted = ["", "", ""], ""
    return rows


def page(found: dict[str, dict[tuple[str, str], Record]]) -> str:
    """Write the page; without results of a GPU it says so."""
    lines = [INTRODUCTION, ""]
    for card, results in (found or {"Not measured yet": {}}).items():
        lines += [f"## {card}", ""]
        if results:
            device = results["", ""]
            versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
            lines += [f"{device['gib']:.1f} GiB, driver {device['driver']}, CUDA {device['cuda']}; {versions}.", ""]
        lines += [*table(COLUMNS, speeds(results, card)), ""]
        others = [r for r in results.values() if is_found(r) and r["what"] in ("attention", "kernels", "tests")]
        lost = [r for r in results.values() if not is_found(r)]
        for title, records in (("Attention, kernels of a step, tests", others), ("Failed, or left out", lost)):
            if records:
                lines += [f"{title}:", "", *(f"    {line_of(record)}" for record in records), ""]
    lines += first_step.section(json.loads(first_step.RESULT.read_text(encoding="utf-8")))
    return "\n".join(lines).rstrip() + "\n"


def draw(path: Path, found: dict[str, dict[tuple[str, str], Record]]) -> None:
    """Draw what was published, predicted and measured, as shares of what was published."""
    from matplotlib.figure import Figure

    chosen = [(c, b, b.anchors[0]) for c in CASES.values() for b in c.batches if b.anchors]
    whose = [f"{a.source.split(',')[0].split(' (')[0]}, {a.gpu}: {a.speed:,.0f}/s" for _, _, a in chosen]
    names = [f"{c.name}, {b.name}\n{theirs}" for (c, b, _), theirs in zip(chosen, whose, strict=True)]
    figure = Figure(figsize=(10, 0.8 + 0.6 * len(chosen)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="0.5", label="published")
    predicted = [b.predicted / a.speed or None for _, b, a in chosen]
    axes.plot(predicted, names, "o", mfc="none", color="C0", label="predicted")
    for number, (card, results) in enumerate(found.items()):
        ours = [results.get((c.name, b.name), {}).get("tokens_per_second") for c, b, _ in chosen]
        same = [n / a.speed if n and a.gpu in card else None for n, (_, _, a) in zip(ours, chosen, strict=True)]
        axes.plot(same, names, "D", color=f"C{number + 1}", label=card)
    axes.set(xlabel="tokens/s, to what is published", xlim=(0, None), title="One GPU")
    axes.invert_yaxis()
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    results = load(RESULTS)
    PAGE.write_text(page(results), encoding="utf-8")
    draw(PAGE.with_suffix(".png"), results)
    print(PAGE)
