"""Picture of a run: its loss curve, and a chart of what the run should improve."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


class Chart(Protocol):
    """Last panel of a picture, which draws itself into axes of matplotlib."""

    def draw(self, axes: Any) -> None: ...


class Bars(NamedTuple):
    """Bar chart: for each series its values by label, in `unit`."""

    values: dict[str, dict[str, float]]
    title: str
    unit: str

    def draw(self, axes: Any) -> None:
        width = 0.8 / len(self.values)
        colors = ("0.75", "tab:orange", "tab:blue")
        for i, (series, values) in enumerate(self.values.items()):
            positions = [tick + (i - (len(self.values) - 1) / 2) * width for tick in range(len(values))]
            drawn = axes.bar(positions, list(values.values()), width * 0.95, label=series, color=colors[i % 3])
            axes.bar_label(drawn, fmt="%.3g", fontsize=8)
            axes.set_xticks(range(len(values)), list(values))
        axes.set(ylabel=self.unit, title=self.title)
        axes.margins(y=0.12)
        axes.grid(alpha=0.3, axis="y")
        # Below: bars may be negative.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(self.values))


class Curves(NamedTuple):
    """Panel of curves over the steps: the names of the records' values by label."""

    names: dict[str, str]
    title: str


def draw_run(path: Path, records: list[dict], chart: Chart | None, panels: Sequence[Curves]) -> None:
    """Write a PNG. `records` are those of metrics.jsonl; a panel without values is left out. A reward comes first."""
    import matplotlib  # imported here, since only one process needs it
    from matplotlib.figure import Figure

    matplotlib.use("agg")  # there may be no display
    unit = "" if panels else " (nats per token)"  # with other panels, the loss is not one of tokens
    panels = [Curves({"training": "loss", "held out": "eval_loss"}, f"Loss{unit}"), *panels]
    panels = [panel for panel in panels if any(name in r for name in panel.names.values() for r in records)]
    panels.sort(key=lambda panel: "reward" not in panel.names.values())
    number = len(panels) + bool(chart)
    columns = 2 if number in (2, 4) else min(3, number)
    rows = -(-number // columns)
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for curve, panel in zip(all_axes, panels, strict=False):
        for label, name in panel.names.items():
            plot(curve, records, name, label, markersize=4)
        curve.set(xlabel="optimizer step", title=panel.title)
        curve.grid(alpha=0.3)
        curve.legend()
    if chart:
        chart.draw(all_axes[len(panels)])
    for unused in all_axes[number:]:
        unused.remove()
    figure.savefig(path, dpi=110)


def plot(axes: Any, records: Sequence[dict], name: str, label: str | None, **style: Any) -> None:
    """Draw a value over the steps into axes of matplotlib, if there is one: held-out values as dots on a dashed line.

    What was asked for is a dotted line, which lies over the line of what came out.
    """
    points = points_of(records, name)
    is_heldout = name.startswith("eval_")
    label = label or ("held out" if is_heldout else "training")
    style |= {"marker": "o"} if is_heldout or len(points) == 1 else {}
    if points:
        is_asked = name.endswith("_asked")
        line = "--" if is_heldout else ":" if is_asked else "-"
        style = ({"color": "black"} if is_asked else {}) | style
        axes.plot(*zip(*points, strict=True), line, label=label, linewidth=1.2, **style)
        axes.xaxis.get_major_locator().set_params(integer=True)


def points_of(records: Sequence[dict], name: str) -> list[tuple[int, float]]:
    """List the steps that have a value, with the value."""
    pairs = [(record["step"], record.get(name)) for record in records]
    return [(step, value) for step, value in pairs if isinstance(value, int | float) and math.isfinite(value)]


def spoken(name: str) -> str:
    """Return the name of a value of an evaluation as people say it."""
    return name.removeprefix("eval_").replace("_", " ").replace("/", ", ")


def draw_images(path: Path, images: Sequence[tuple[np.ndarray, str, bool]], title: str) -> None:
    """Write a PNG of images, (H, W, 3) from 0 to 255, each with a text, which is red where it is not right."""
    from matplotlib.figure import Figure

    columns = min(10, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.35 * columns, 0.4 + 1.75 * rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in all_axes:
        axes.axis("off")
    for axes, (image, text, is_right) in zip(all_axes, images, strict=False):
        axes.imshow(image)
        axes.set_title(text, fontsize=7, color="black" if is_right else "red")
    figure.savefig(path, dpi=110)
