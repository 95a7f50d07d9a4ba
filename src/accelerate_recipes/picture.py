"""Picture of a run: its loss curve, and bars of what the run should improve."""

from pathlib import Path
from typing import NamedTuple


class Bars(NamedTuple):
    """Bar chart: for each series its values by label, in `unit`."""

    values: dict[str, dict[str, float]]
    title: str
    unit: str


def draw_run(path: Path, records: list[dict], bars: Bars) -> None:
    """Write a PNG. `records` are those of metrics.jsonl."""
    import matplotlib  # imported here, since only one process needs it
    from matplotlib.figure import Figure

    matplotlib.use("agg")  # there may be no display
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curve, chart = figure.subplots(1, 2)

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    heldout = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    curve.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training")
    curve.plot(*zip(*heldout, strict=True), "o--", color="tab:orange", markersize=4, label="held out")
    curve.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss")
    curve.grid(alpha=0.3)
    curve.legend()

    width = 0.8 / len(bars.values)
    colors = ("0.75", "tab:orange", "tab:blue")
    for i, (series, values) in enumerate(bars.values.items()):
        places = [place + (i - (len(bars.values) - 1) / 2) * width for place in range(len(values))]
        drawn = chart.bar(places, list(values.values()), width * 0.95, label=series, color=colors[i % 3])
        chart.bar_label(drawn, fmt="%.3g", fontsize=8)
        chart.set_xticks(range(len(values)), list(values))
    chart.set(ylabel=bars.unit, title=bars.title)
    chart.margins(y=0.12)
    chart.grid(alpha=0.3, axis="y")
    chart.legend()
    figure.savefig(path, dpi=110)
