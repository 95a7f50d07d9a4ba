"""Report of a run, `<output_dir>/report.html`, and of several runs on one page, from the files that runs write anyway.

The profile of some steps, `--profile_steps 10-12`, is made here too.
"""

import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.profiler import profile, schedule

from accelerate_recipes.agenda import Observer
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.disk import read_json, read_json_lines
from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.life import lock
from accelerate_recipes.life.page import Html, element, html_table, picture, write_page
from accelerate_recipes.life.picture import plot, points_of, spoken
from accelerate_recipes.life.status import of_this_run, read_attempts, read_status
from accelerate_recipes.metrics import is_evaluation, sources_in
from accelerate_recipes.ranks import is_first, rank

MOST_SAMPLES = 200
MOST_ALLOCATIONS = 100_000  # in a snapshot of CUDA's memory
PAUSE = 60  # seconds at least between two pages of a run: all ranks wait while one draws
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
INK = "#010203"  # replaced by the colour of the page's text
# The first panels, with the values that each shows; other values of an evaluation get panels of their own.
PANELS = {
    "Reward": ("reward", "eval_reward", "eval_sampled_reward"),
    "Loss": ("loss", "eval_loss"),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("learning_rate",),
    "Samples a second": ("samples_per_second",),
    "Targets a second": ("tokens_per_second",),
    "MFU": ("mfu",),
    "Peak memory, GiB": ("peak_memory_gib",),
    "Waiting for data, share": ("data_wait",),
    "Tokens of an answer": ("completions/mean_length", "eval_length"),
    "KL divergence from the first model": ("kl",),
    "Margin of rewards": ("rewards/margins", "eval_margin"),
}
LABELS = {"eval_sampled_reward": "held out, drawn"}


class Seen(NamedTuple):
    """Files of a run as they are so far; what is missing is empty."""

    folder: Path
    records: list[dict]  # of metrics.jsonl
    args: dict[str, Any]
    status: dict[str, Any]
    attempts: list[dict]  # of this run; not those before it was begun anew

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def evaluations(self) -> list[dict]:
        return [*filter(is_evaluation, self.records)]

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Beginnings and ends of the times that went into steps which count, one for each log line.

        What a killed run has computed after its checkpoint is no longer in the log. Steps between the last log line and
        the checkpoint are: their time is estimated by the speed of the next line.
        """
        intervals, last, batch = [], 0, self.args.get("total_batch_size", 0)
        for record in self.records:
            if (speed := record.get("samples_per_second")) and "time" in record:
                intervals.append((record["time"] - (record["step"] - last) * batch / speed, record["time"]))
                last = record["step"]
        return intervals

    @property
    def lost(self) -> list[float | None]:
        """Seconds that each attempt cost before its first step that counts.

        They count from the last step that counts before, else from the end of the attempt before; for the first attempt
        from its start. An attempt without such a step cost all its time.
        """
        seconds, spans, since = [], self.spans, None
        for attempt in self.attempts:
            begun, ended = attempt.get("begun"), attempt.get("ended")
            own = [span for span in spans if begun and begun < span[1] <= (ended or math.inf)]
            first, last = (own[0][0], own[-1][1]) if own else (ended, ended)
            seconds.append(max(0.0, first - (since or begun)) if begun and first else None)
            since = last or since
        return seconds

    @property
    def effective(self) -> tuple[float, float] | None:
        """Seconds in steps that count, and since the first start; None if that start is not known."""
        begun = [attempt["begun"] for attempt in self.attempts if attempt.get("begun")]
        if not begun or not self.spans:
            return None
        ended = self.attempts[-1].get("ended") or self.records[-1].get("time", self.spans[-1][1])
        return sum(end - start for start, end in self.spans), max(ended - begun[0], 1e-9)


def read_run(folder: Path, records: list[dict] | None = None) -> Seen:
    """Read what a run has written. A running process passes its `records`, which are those of metrics.jsonl.

    Raises:
        ConfigError: if there is no log of a run, or a line of it is damaged.
    """
    try:
        log = objects_of(folder / "metrics.jsonl", {"step": int}) if records is None else records
        args = dict(yaml.safe_load((folder / "args.yaml").read_text("utf-8")))
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder} is not the output directory of a run that has begun to train: {error}") from error
    return Seen(folder, log, args, read_status(folder), of_this_run(read_attempts(folder)))


def objects_of(file: Path, kinds: dict[str, Any]) -> list[dict]:
    """Read a file of JSON lines that a run has written. Raises ConfigError for a line without values of these `kinds`."""
    try:
        rows = read_json_lines(file)
    except ValueError as error:
        raise ConfigError(f"{error}; remove that line") from error
    for number, row in enumerate(rows, start=1):
        lacking = [name for name in kinds if not (isinstance(row, dict) and isinstance(row.get(name), kinds[name]))]
        if lacking:
            problem = f"{file}, line {number} ({json.dumps(row):.60}) has no {' and no '.join(lacking)}"
            raise ConfigError(f"{problem}, as a line of a run has; remove it")
    return rows


def value_of(file: Path) -> Any:
    """Read a JSON file. Raises ConfigError if it is damaged."""
    try:
        return read_json(file)
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}; write it again, or remove it") from error


class Report(Observer):
    """Page of this run, which rank 0 writes after an evaluation; `recipe` writes it when the run ends."""

    def __init__(self, args: TrainArgs):
        self.folder, self.due = Path(args.output_dir), 0.0

    def evaluated(self, records: list[dict]) -> None:
        if is_first() and time.monotonic() >= self.due:
            write_report(self.folder, records)
            self.due = time.monotonic() + PAUSE


def write_report(folder: Path, records: list[dict] | None = None) -> None:
    """Write report.html of a run that has begun to train. An error is a warning: a report is not worth a run."""
    try:
        if (folder / "metrics.jsonl").exists():
            seen = read_run(folder, records)
            write_page(folder / "report.html", f"Run {seen.name}", page_of(seen))
    except Exception as error:
        with contextlib.suppress(OSError):
            print(f"warning: report.html could not be written: {one_line(error)}", file=sys.stderr, flush=True)


def compare(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of a run into its folder, or one page of several runs to `out`; return the page.

    Raises:
        ConfigError: if one of the folders holds no run, or a damaged file of one, or if there is no folder for the page.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 1:
        out = folders[0] / "report.html"
        write_page(out, f"Run {runs[0].name}", page_of(runs[0]))
    else:
        write_page(out, f"{len(runs)} runs", page_of_several(runs))
    return out


def page_of(seen: Seen) -> list[Html]:
    """Write the parts of the page of one run."""
    last = seen.attempts[-1] if seen.attempts else {}
    parts = [element("h1", f"{last.get('recipe', 'run')}: {seen.name}"), html_table((), facts_of(seen).items())]
    if sources_in(seen.records):
        parts += [element("h2", "Sources"), source_table(seen)]
    parts.append(panels([seen]))
    if rows := seen.evaluations:
        names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("eval_")))
        heads = ["step", *map(spoken, names)]
        table = html_table(heads, ([row["step"], *map(row.get, names)] for row in rows), sorts=True)
        parts += [element("h2", "Evaluations"), table]
    if (file := seen.folder / "result.png").exists() and seen.status.get("state") == "finished":
        parts += [element("h2", "Result"), picture(file.read_bytes(), file.name, is_chart=True)]
    if (file := seen.folder / "decisions.txt").exists() and seen.status.get("state") == "finished":
        parts += [element("h2", "Decisions"), element("pre", file.read_text("utf-8"))]
    if (file := seen.folder / "samples.jsonl").exists() and file.stat().st_size:
        samples = objects_of(file, {"step": int, "source": str, "rewards": dict})[: -MOST_SAMPLES - 1 : -1]
        parts += [element("h2", "Samples, newest first"), sample_table(samples)]
    if (file := seen.folder / "rows.txt").exists():
        title, text = element("summary", "The first rows as they are trained"), element("pre", file.read_text("utf-8"))
        parts += [element("h2", "Data"), element("details", title, text)]
    if (file := seen.folder / "rows.png").exists():
        parts += [element("h2", "Data"), picture(file.read_bytes(), file.name)]
    if traces := sorted(f"profile/{file.name}" for file in seen.folder.glob("profile/*.trace.json.gz")):
        parts += [element("h2", "Profile"), element("p", f"{', '.join(traces)}, for https://ui.perfetto.dev")]
    parts += attempts_of(seen)
    which = "Arguments that differ from their defaults" if "changed" in last else "Arguments"
    arguments = ((name, shown(value)) for name, value in last.get("changed", seen.args).items())
    parts += [element("h2", which), html_table((), arguments)]
    parts += [element("h2", "Versions"), html_table((), last.get("versions", {}).items())]
    return parts


def facts_of(seen: Seen) -> dict[str, str]:
    """List what a reader asks first."""
    steps = [record for record in seen.records if "samples_per_second" in record]
    last, after = steps[-1] if steps else {}, seen.evaluations[-1] if seen.evaluations else {}
    state, reason = seen.status.get("state", "unknown"), seen.status.get("reason")
    touched = lock.touched(seen.folder / "lock.json")
    if state == "running" and touched and not lock.is_taken():  # a process of the run itself needs no sign
        silent = time.time() - touched / 1e9
        if silent > 2 * lock.SILENCE:
            state, reason = "killed", f"no sign of life for {duration(silent)}"
    speeds = [step["tokens_per_second"] for step in steps if "tokens_per_second" in step]
    peaks = [step["peak_memory_gib"] for step in steps if "peak_memory_gib" in step]
    memory = f"{max(peaks):.2f} GiB" if peaks else None
    if memory and (file := seen.folder / "plan.json").exists():  # `plan --json <output_dir>/plan.json` wrote it
        plan = value_of(file)
        memory += f" measured, {plan['memory']['in_use'] / 2**30:.2f} GiB planned for {plan['gpu']}"
    effective = None
    if known := seen.effective:
        spent, total = map(duration, known)
        effective = f"{known[0] / known[1]:.1%}: {spent} of {total} since the first start went into steps that count"
        lost = duration(sum(seconds or 0 for seconds in seen.lost[1:]))
        effective += f"; restarts: {restarts}, which lost {lost}" if (restarts := len(seen.attempts) - 1) else ""
    facts = {
        "state": f"{state}: {reason}" if reason else state,
        "last step": last.get("step"),
        "loss": last.get("loss"),
        "loss, held out": after.get("eval_loss"),
        "reward": last.get("reward"),
        "targets a second, median": statistics.median(speeds) if speeds else None,
        "peak memory": memory,
        "effective time": effective,
        "launch": seen.attempts[-1].get("launch") if seen.attempts else None,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return {name: short(value) for name, value in facts.items() if value is not None}


def panels(runs: Sequence[Seen]) -> Html:
    """Draw a panel for each kind of value: the values of one run in colours, of several runs each run in its colour."""
    known = {name for values in PANELS.values() for name in values}
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    sources = sources_in(record for run in runs for record in run.records)
    of_sources = {
        "Loss by source": [f"{name}_loss" for name in sources],
        "Loss by source, held out": [f"eval_{name}_loss" for name in sources],
        "Share of the rows": [f"{name}_{kind}" for kind in ("share", "asked") for name in sources],
    }
    known |= {name for values in of_sources.values() for name in values}
    own = {name: (name,) for name in names if name.startswith("eval_") and name not in known}
    if find_spec("matplotlib") is None:
        return element("p", "There are no curves, since matplotlib is not installed.")
    drawn = {title: draw_curves(runs, values) for title, values in (PANELS | of_sources | own).items()}
    titles = {name: (words := spoken(name))[:1].upper() + words[1:] for name in own}  # rougeL keeps its L
    shown = [element("div", element("h3", titles.get(title, title)), svg) for title, svg in drawn.items() if svg]
    return element("div", *shown, class_="panels") if shown else element("p", "Curves begin with the second log line.")


def draw_curves(runs: Sequence[Seen], values: Sequence[str]) -> Html:
    """Draw the curves of some values as SVG inside a page, whose colour of text it takes; "" without two points in one."""
    if all(len(points_of(run.records, name)) < 2 for run in runs for name in values):
        return Html()
    import matplotlib  # here, since only one process needs it, and none before the first step
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "text.color"), INK)
    # Of points in one place, the lowest and the highest are drawn: a long run has as small a page as a short one.
    settings |= {"svg.fonttype": "none", "font.size": 9, "path.simplify_threshold": 1.0}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.8, 2.5), facecolor="none")
        axes = figure.add_axes((0.13, 0.12, 0.85, 0.82), facecolor="none")
        for i, run in enumerate(runs):
            for j, name in enumerate(values):
                color = COLORS[(i if len(runs) > 1 else j) % len(COLORS)]
                plot(axes, run.records, name, label_of(name), color=color, markersize=3)
        if len(runs) == 1 and len(axes.lines) > 1:
            axes.legend(framealpha=0)
        axes.grid(alpha=0.25)
        text = StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    return Html(svg[svg.index("<svg") :].replace(INK, "currentColor"))


def label_of(name: str) -> str | None:
    """Return the label of a curve: the name of a source, for one of its values; None for the usual one."""
    if name in PANELS["Loss"] or not name.endswith(("_loss", "_share", "_asked")):
        return LABELS.get(name)
    source, _, kind = name.removeprefix("eval_").rpartition("_")
    return f"{source}, asked" if kind == "asked" else source


def source_table(seen: Seen) -> Html:
    """Write what was trained of each source of a mixture: its share of the rows beside the one that was asked for."""
    steps = [record for record in seen.records if "samples_per_second" in record]
    last, after = steps[-1], seen.evaluations[-1] if seen.evaluations else {}
    targets = {name: sum(step.get(f"{name}_targets", 0) for step in steps) for name in sources_in(steps)}
    rows = [
        {
            "source": name,
            "rows": last[f"{name}_rows"],
            "epochs": last[f"{name}_epochs"],
            "share of the rows": f"{last[f'{name}_share']:.2%}",
            "asked": f"{last[f'{name}_asked']:.2%}",
            "targets": number,
            "share of the targets": f"{number / max(1, sum(targets.values())):.2%}",
            "loss": last.get(f"{name}_loss"),
            "held out": after.get(f"eval_{name}_loss"),
        }
        for name, number in targets.items()
    ]
    return html_table([*rows[0]], [[*row.values()] for row in rows])


def sample_table(rows: Iterable[dict]) -> Html:
    """Write answers of samples.jsonl as a table that sorts by step, reward, or any other column."""
    rows = list(rows)
    rewards = dict.fromkeys(name for row in rows for name in row["rewards"])
    texts = [name for name in ("prompt", "completion", "expected") if any(name in row for row in rows)]
    heads = ["step", "source", *("answer" if name == "completion" else name for name in texts), *rewards]
    lines = (
        [row["step"], row["source"], *(as_read(row.get(n)) for n in texts), *(row["rewards"].get(n) for n in rewards)]
        for row in rows
    )
    return html_table(heads, lines, sorts=True)


def as_read(said: Any) -> Any:
    """Write a text or the messages of a conversation as people read them; anything else stays as it is.

    A message alone needs no role. Blank lines at its ends would only make a table long.
    """
    if said is None or isinstance(said, str):
        return said and said.strip()
    if not (isinstance(said, list) and said and all(isinstance(message, dict) for message in said)):
        return shown(said)
    texts = [shown(message.get("content") or "").strip() for message in said]
    if len(said) == 1:
        return texts[0]
    return "\n".join(f"{message.get('role')}: {text}" for message, text in zip(said, texts, strict=True))


def attempts_of(seen: Seen) -> list[Html]:
    """List how each attempt began and ended, and the time that it cost before its first step that counts."""
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt["begun"])) if attempt.get("begun") else None,
            duration(attempt["ended"] - attempt["begun"]) if attempt.get("begun") and attempt.get("ended") else None,
            attempt.get("from"),
            f"{attempt.get('state')}{': ' if attempt.get('reason') else ''}{attempt.get('reason', '')}",
            attempt["step"],
            duration(lost) if lost is not None else None,
            attempt.get("launch"),
            attempt.get("host"),
        ]
        for attempt, lost in zip(seen.attempts, seen.lost, strict=True)
    ]
    heads = ["began", "lasted", "from step", "ended", "saved step", "lost before its first step", "launch", "host"]
    return [element("h2", "Attempts"), html_table(heads, rows)] if rows else []


def page_of_several(runs: Sequence[Seen]) -> list[Html]:
    """Write the parts of a page that compares runs: results, curves, and the arguments that differ."""
    colors = [f"color:{COLORS[i % len(COLORS)]}" for i in range(len(runs))]
    heads = ["", *(element("b", f"━ {run.folder}", style=color) for run, color in zip(runs, colors, strict=True))]
    results = [facts_of(run) | (run.evaluations[-1] if run.evaluations else {}) for run in runs]
    no_result = ("step", "time", "written", "eval_loss")  # the loss is a fact already
    measures = dict.fromkeys(name for result in results for name in result if name not in no_result)
    names = dict.fromkeys(name for run in runs for name in run.args if name != "output_dir")
    values = {name: [run.args.get(name) for run in runs] for name in names}
    differ = {name: row for name, row in values.items() if any(value != row[0] for value in row)}
    return [
        element("h1", f"{len(runs)} runs"),
        html_table(heads, ([spoken(name), *(short(r.get(name, "")) for r in results)] for name in measures)),
        element("h2", "Arguments that differ"),
        html_table(heads, ([name, *map(shown, row)] for name, row in differ.items())),
        element("p", "Dashed curves are of held-out data."),
        panels(runs),
    ]


def short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{seconds:.1f} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h {minutes % 60:02} min"


class StepProfiler(Observer):
    """Profiler of this rank, of torch, also on a CPU. It does nothing on a rank, and in steps, that are not chosen.

    `profile/` gets `rank-<n>.trace.json.gz` (for https://ui.perfetto.dev) and, on a GPU, `rank-<n>.memory.pickle` (for
    https://docs.pytorch.org/memory_viz).
    """

    recorder: profile | None = None

    def __init__(self, args: TrainArgs):
        self.steps, self.ranks, self.folder = args.profiled_steps, args.profile_ranks, Path(args.output_dir) / "profile"

    def began(self, step: int) -> None:
        """Begin to profile the steps after `step`. The step before the first one warms up the profiler."""
        self.steps = range(max(self.steps.start, step + 1), self.steps.stop)
        if self.steps and rank() in self.ranks:
            before = self.steps[0] - step - 1
            when = {"skip_first": max(0, before - 1), "wait": 0, "warmup": min(1, before), "active": len(self.steps)}
            self.recorder = profile(schedule=schedule(**when, repeat=1), on_trace_ready=self.write)
            self.recorder.start()
            self.watch_memory(step + 1)

    def completed(self, step: int) -> None:
        if self.recorder:
            self.recorder.step()
            self.watch_memory(step + 1)

    def ended(self, step: int) -> None:
        """End the profile, also if the run ends before the last of its steps."""
        if self.recorder:
            self.recorder.stop()
            self.recorder = None

    def watch_memory(self, step: int) -> None:
        """Let CUDA's allocator remember its calls from the first of the steps on."""
        if torch.cuda.is_initialized() and step == self.steps[0]:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def write(self, done: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = str(self.folder / f"rank-{rank()}")
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(f"{name}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        done.export_chrome_trace(f"{name}.trace.json.gz")
