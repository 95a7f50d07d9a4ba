"""The page docs/performance.md, and its picture: what `gpu.py` measured, what was predicted, what others publish.

    python benchmarks/gpu_report.py

Of a case that was measured twice on a kind of GPU the last run counts. Rehearsals and runs without a GPU are no results.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from gpu_cases import CASES, flops_of
from harness import ROOT, table

from accelerate_recipes.gpus import GPUS

RESULTS, PAGE = ROOT / "benchmarks/results/gpu", ROOT / "docs/performance.md"
PREDICTED = ROOT / "benchmarks/results/gpu_predicted.json"  # memory, by gpu_predicted.py
INTRODUCTION = """\
# Performance

On one GPU, by

    python benchmarks/gpu.py
    python benchmarks/gpu.py --second --compiled benchmarks/results/gpu/compiled.tar.gz
    python benchmarks/gpu_report.py

`--describe` says what this needs and how long it takes. A case is rows of a pass x tokens of a row x passes of a step, of
random tokens; models are Llamas of the named size, all in bf16 with `--optim adamw_bf16_kahan`, except LoRA, which is beside
a frozen model in bf16. MFU is the share of the dense bf16 peak of the data sheet (H100, H200: 989 TFLOP/s); FLOPs of a token
are 6 N + 12 L H Q T, N without the input embedding, T the length of the row, as in PaLM and in what others publish.

**Predicted** is arithmetic, written down before anything ran on a GPU: matmuls at 650 TFLOP/s (480 to 620 in small models),
memory at 3.0 TB/s. It is no result.

![speeds, to what is published](performance.png)"""
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
    name = f"{record.get('case', '')} | {record.get('setting', '')}".strip(" |")
    if "error" in record:
        text = f"failed: {' '.join(record['error'].split())[:160]}"
    elif "skipped" in record:
        text = f"left out: {record['skipped']}"
    elif record["what"] == "machine":
        text = f"{record['device']}, {record['gib']:.1f} GiB, torch {record['versions']['torch']}"
    elif record["what"] == "steps":
        text = f"{record['tokens_per_second']:,.0f} tokens/s, MFU {share(record['mfu'])}, {gib(record)} GiB"
    elif record["what"] == "attention":
        text = f"{record['milliseconds']:.3f} ms, {record['tflops']:.0f} TFLOP/s, off by {record['off']:.1e}"
    elif record["what"] == "kernels":
        name_of_most, most = next(iter(record["kernels"].items()))
        text = f"{record['milliseconds']:.1f} ms, of which {most:.1f} in {name_of_most[:60]}"
    elif record["what"] == "tests":
        text = " ".join([*record["summary"], *record["failed"]])
    else:
        text = f"{record['seconds']:.0f} s"
    return f"{name:44} {text}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def gib(record: Record) -> str:
    return f"{record['allocated_gib']:.1f} / {record['reserved_gib']:.1f}" if "allocated_gib" in record else ""


def speeds(results: dict[tuple[str, str], Record], card: str) -> list[list[str]]:
    """Make the rows of speeds: ours on a card, predicted, published; a ratio only where the card is the same."""
    rows = []
    for case in CASES.values():
        for batch in case.batches if case.name != "memory" else ():
            record = results.get((case.name, batch.name), results.get((case.name, ""), {}))
            ours = record.get("tokens_per_second")
            low_high = "({:,.0f} to {:,.0f})".format(*record["range"]) if ours else ""
            predicted = f"{batch.predicted:,.0f}" if batch.predicted else ""
            if predicted and not case.args.get("use_peft"):
                predicted += f" ({batch.predicted * flops_of(case, batch) / GPUS['h100'].bf16:.0%})"
            measured = (
                [f"{ours:,.0f} {low_high}", share(record["mfu"]), gib(record)] if ours else ["not measured", "", ""]
            )
            for anchor in batch.anchors or (None,):
                is_same = ours and anchor and anchor.gpu in card
                published = (
                    [f"{anchor.speed:,.0f}, {anchor.gpu}, {anchor.source}", anchor.differs] if anchor else ["", ""]
                )
                ratio = f"{ours / anchor.speed:.2f}" if is_same else ""
                rows.append([f"{case.name}, {batch.name}", *measured, predicted, published[0], ratio, published[1]])
                measured, predicted = ["", "", ""], ""
    return rows


def memory(results: dict[tuple[str, str], Record]) -> list[list[str]]:
    """Make the rows of memory: what the simulation of `plan` predicts beside what was needed."""
    rows = []
    for predicted in json.loads(PREDICTED.read_text(encoding="utf-8"))["predicted"]:
        found = results.get((predicted["case"], predicted["setting"]), {})
        cells = [predicted["setting"]]
        for what in ("allocated", "reserved"):
            expected, measured = predicted[what] / 2**30, found.get(f"{what}_gib")
            cells += [
                f"{expected:.2f}",
                f"{measured:.2f} ({expected / measured - 1:+.1%})" if measured else "not measured",
            ]
        rows.append(cells)
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
        columns = [
            "case",
            "tokens/s",
            "MFU",
            "GiB allocated / reserved",
            "predicted tokens/s (MFU)",
            "published tokens/s",
        ]
        lines += [*table([*columns, "ours to theirs", "what differs in theirs"], speeds(results, card)), ""]
        lines += ["Peaks of memory of four layers of 7B under `fsdp_full.yaml`, not compiled, in GiB:", ""]
        columns = ["case", "allocated, by `plan`", "measured", "reserved, by `plan`", "measured"]
        lines += [*table(columns, memory(results)), ""]
        others = [r for r in results.values() if is_found(r) and r["what"] in ("attention", "kernels", "tests")]
        lost = [r for r in results.values() if not is_found(r)]
        for title, records in (
            ("Attention of a layer of 8B, kernels of a step, tests", others),
            ("Failed, or left out", lost),
        ):
            if records:
                lines += [f"{title}:", "", *(f"    {line_of(record)}" for record in records), ""]
    return "\n".join(lines).rstrip() + "\n"


def draw(path: Path, found: dict[str, dict[tuple[str, str], Record]]) -> None:
    """Draw what was published, predicted and measured, as shares of what was published."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    chosen = [(c, b, b.anchors[0]) for c in CASES.values() for b in c.batches if b.anchors]
    names = [
        f"{c.name}, {b.name}\n{a.source.split(',')[0].split(' (')[0]}, {a.gpu}: {a.speed:,.0f}/s" for c, b, a in chosen
    ]
    figure = Figure(figsize=(10, 0.8 + 0.6 * len(chosen)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="0.5", label="published")
    axes.plot(
        [b.predicted / a.speed or None for _, b, a in chosen], names, "o", mfc="none", color="C0", label="predicted"
    )
    for number, (card, results) in enumerate(found.items()):
        ours = [results.get((c.name, b.name), {}).get("tokens_per_second") for c, b, _ in chosen]
        same = [n / a.speed if n and a.gpu in card else None for n, (_, _, a) in zip(ours, chosen, strict=True)]
        axes.plot(same, names, "D", color=f"C{number + 1}", label=card)
    axes.set(xlabel="tokens/s, to what is published", xlim=(0, None), title="One GPU")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of gpu.py's results.")
    parser.add_argument("--out", type=Path, default=PAGE, help="The page; its picture lies beside it.")
    flags = parser.parse_args()
    found = load(flags.results)
    flags.out.write_text(page(found), encoding="utf-8")
    draw(flags.out.with_suffix(".png"), found)
    print(flags.out)


if __name__ == "__main__":
    main()
