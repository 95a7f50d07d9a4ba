"""Tests of reports: their times and curves, several runs on one page, hostile text, and that no report ends a run."""

import base64
import gzip
import hashlib
import json
import os
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import refuses, write_rows

from accelerate_recipes import agenda
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life import page, status
from accelerate_recipes.life.picture import Bars
from accelerate_recipes.life.status import begin_attempt, of_this_run, read_attempts, update_status
from accelerate_recipes.report import report
from recipe_tools.requeue import after_attempt

NASTY = "</td></table><script>alert(1)</script><img src=https://example.com/x.png onerror=alert(2)>\x1b[31m\ud800"


def record(step: int, time: float, **values: float) -> dict:
    """Make the record of a log line; 2 samples a second."""
    return {"step": step, "time": time, "samples_per_second": 2.0, "loss": 1 / step, "tokens_per_second": 9.0} | values


@pytest.fixture
def write_run(tmp_path):
    """Write the files of a run."""

    def write(name: str, records: list[dict], *lines: dict, **args: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder / "metrics.jsonl", records)
        (folder / "args.yaml").write_text(json.dumps({"total_batch_size": 4, "output_dir": name} | args))
        texts = [json.dumps({"job": "", "step": 0} | line) + "\n" for line in lines]
        (folder / "attempts.jsonl").write_text("".join(texts))
        return folder

    return write


@pytest.fixture
def as_process(monkeypatch):
    """Let the rest of the test be another process, which began at a time."""

    def begin(time: float) -> None:
        monkeypatch.setattr(status, "_begun", None)
        monkeypatch.setattr(status.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: time))

    return begin


def test_every_attempt_has_a_line(tmp_path, as_process):
    """One that is killed has no end of its own: it ended when it last wrote, at the newest checkpoint."""
    as_process(1000.0)
    begin_attempt(tmp_path, 0, host="n1")
    update_status(tmp_path, state="running", step=0, reason="")
    update_status(tmp_path, step=10)
    (tmp_path / "metrics.jsonl").touch()
    for name in ("metrics.jsonl", "status.json"):
        os.utime(tmp_path / name, (1500, 1500))
    as_process(2000.0)
    begin_attempt(tmp_path, 10, host="n2")
    update_status(tmp_path, state="stopped", reason="SIGTERM")
    killed, stopped = read_attempts(tmp_path)
    assert (killed["state"], killed["step"], killed["host"], killed["from"]) == ("killed", 10, "n1", 0)
    assert killed["ended"] == 1500
    wanted = {"begun": 2000.0, "state": "stopped", "reason": "SIGTERM", "step": 10}
    assert stopped.items() >= wanted.items()
    as_process(3000.0)
    update_status(tmp_path, state="failed", reason="it never began")
    assert read_attempts(tmp_path) == [killed, stopped]


def test_the_job_script_writes_into_the_line_of_the_run(tmp_path, as_process, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    as_process(1000.0)
    begin_attempt(tmp_path, 0)
    update_status(tmp_path, state="running", step=4, reason="")
    assert after_attempt(tmp_path, False, 9) == (75, "killed at step 4; the job goes on from step 4")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    after_attempt(tmp_path, False, 9)
    first, second = read_attempts(tmp_path)
    assert first["begun"] == 1000.0 and first["ended"] > 1000 and first["step"] == 4
    assert "begun" not in second and second["restarts"] == 1


def test_a_full_disk_loses_only_the_line(tmp_path, as_process):
    as_process(1000.0)
    begin_attempt(tmp_path, 0)
    (tmp_path / "attempts.jsonl.partial").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=r"attempts.jsonl could not be written: .*No space left"):
        update_status(tmp_path, state="finished")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"


def test_a_run_begun_anew_does_not_count_the_attempts_of_an_older_one():
    lines = [{"step": a, "from": b} for a, b in ((0, 0), (8, 0), (0, 0), (4, 0), (9, 4))]
    assert of_this_run(lines) == lines[2:]  # of two without a checkpoint, the second repeats the first
    assert of_this_run(lines[:2]) == lines[:2] and of_this_run([]) == []


def test_the_same_command_after_the_end_is_no_restart():
    """It exports again; one that goes on, because --max_steps was raised, or that fails, counts."""
    ended = {"step": 9, "from": 0, "state": "finished"}
    again, failed = {"step": 9, "from": 9, "state": "finished"}, {"step": 9, "from": 9, "state": "failed"}
    further = {"step": 12, "from": 9, "state": "finished"}
    assert of_this_run([ended, again, again]) == [ended]
    assert of_this_run([ended, again, failed, further]) == [ended, failed, further]


def test_a_first_attempt_that_failed_is_no_restart(write_run):
    """Something was put right in between, which takes as long as it takes; a lost process before the first save is one."""
    records = [record(4, 9010), record(8, 9018)]
    failed = {"begun": 1000.0, "ended": 1020.0, "from": 0, "state": "failed", "reason": "row 17"}
    trained = {"begun": 9000.0, "ended": 9018.0, "from": 0, "step": 8, "state": "finished"}
    once = report.read_run(write_run("run", records, failed, {**failed, "begun": 2000.0, "ended": 2001.0}, trained))
    effective = report.facts_of(once)["effective time"]
    assert once.effective == (16, 18) and "restarts" not in effective, effective
    crashed = report.read_run(write_run("crashed", records, failed | {"state": "crashed"}, trained))
    assert "restarts: 1" in report.facts_of(crashed)["effective time"]
    resumed = report.read_run(write_run("resumed", records, failed | {"step": 2}, trained | {"from": 2}))
    assert "restarts: 1" in report.facts_of(resumed)["effective time"], "what was saved before it failed counts"


@pytest.mark.parametrize("line, said", [
    ("{", "line 2 is no JSON: Expecting property name"),
    ("\xff", "line 2 is no JSON: 'utf-8' codec can't decode"),
    ("3", r"line 2 \(3\) has no step, as"),
    ("null", "has no step, as"),
    ('{"loss": 1.0, "time": 2}', r"line 2 \({\"loss\": 1.0, \"time\": 2}\) has no step,"),
    ('{"step": "four", "time": 2}', "has no step,"),
])  # fmt: skip
def test_a_damaged_line_is_named(write_run, line, said, command):
    folder = write_run("run", [record(4, 1010), record(8, 1018)])
    first, second, _ = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    (folder / "metrics.jsonl").write_bytes(b"\n".join([first, line.encode("latin-1"), second, b""]))
    refuses(rf"metrics.jsonl, {said}|metrics.jsonl, line 2 .*{said}", report.compare, [folder], folder / "page.html")
    done = command("report", folder)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    "name, content", [("samples.jsonl", '{"step": 4}\n'), ("samples.jsonl", "7\n"), ("plan.json", "{")]
)
def test_other_damaged_files_are_named(write_run, name, content):
    folder = write_run("run", [record(4, 1010, peak_memory_gib=1.0)])
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{folder}/{name}(, line 1 .* has no .*source and no rewards| is no JSON)"):
        report.compare([folder], folder / "page.html")


def test_effective_time(write_run):
    """Steps of 2 s. Killed after step 13, resumed from 10, which was not logged: its 2 steps count; again killed at once."""
    records = [record(4, 1010), record(8, 1018), record(12, 1060), record(16, 1068)]
    lines = [
        {"begun": 1000.0, "ended": 1026.0, "from": 0, "step": 10, "state": "killed"},
        {"begun": 1030.0, "ended": 1040.0, "from": 10, "step": 10, "state": "crashed"},
        {"begun": 1045.0, "ended": 1078.0, "from": 10, "step": 16, "state": "finished"},
    ]
    seen = report.read_run(write_run("run", records, *lines))
    assert seen.spans == [(1002, 1010), (1010, 1018), (1052, 1060), (1060, 1068)]
    assert seen.effective == (32, 78)
    assert seen.lost == [2, 22, 12], "to the first step; from the last that counts to the end of the second"
    assert sum(seen.lost) + 32 + 10 == 78, "the rest is what follows the last step"
    assert "41.0%: 32.0 s of 78.0 s since the first start" in report.facts_of(seen)["effective time"]
    assert "restarts: 2, which lost 34.0 s" in report.facts_of(seen)["effective time"]
    old = report.read_run(write_run("old", records, {"state": "finished"}))
    assert old.effective is None and old.lost == [None]


def test_a_run_that_was_killed_is_not_running(write_run, monkeypatch):
    folder = write_run("run", [])
    update_status(folder, state="running")
    (folder / "lock.json").touch()
    assert report.facts_of(report.read_run(folder))["state"] == "running"
    os.utime(folder / "lock.json", (time.time() - 7300,) * 2)
    assert report.facts_of(report.read_run(folder))["state"] == "killed: no sign of life for 2 h 01 min"
    monkeypatch.setattr(report.lock, "is_taken", lambda: True)  # clocks of other machines differ
    assert report.facts_of(report.read_run(folder))["state"] == "running"


class Scripts(HTMLParser):
    """Reader of a page: its scripts, images and links, and whether all tags of tables are closed."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self.text, self.inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        self.found += [(tag, dict(attrs))] if tag in ("script", "img", "a", "link", "iframe") else []
        assert not {name for name, _ in attrs if name.startswith("on")}, (tag, attrs)

    def handle_data(self, data):
        self.text += data if self.inside not in ("script", "style") else ""


def test_hostile_text_stays_text(write_run):
    """In a conversation, an argument, a reason, the first rows and a file of a user; no page asks for another file."""
    records = [record(2, 10), record(4, 20) | {"eval_<script>": 1.0}]
    folder = write_run("run <b>$a$", records, {"reason": NASTY, "state": NASTY}, text=NASTY)
    sample = {"step": 4, "source": NASTY, "prompt": [{"role": "user", "content": NASTY}], "completion": NASTY}
    sample |= {"rewards": {NASTY: None}, "expected": {"a": NASTY}}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "rows.txt").write_text(NASTY[:-1])
    update_status(folder, state="crashed", reason=NASTY)
    other = write_run("other", [record(2, 10)], text="x")
    report.compare([folder], Path())
    report.compare([folder, other], folder.parent / "comparison.html")
    for file in (folder / "report.html", folder.parent / "comparison.html"):
        text = file.read_text("utf-8")
        seen = Scripts(text)
        assert [tag for tag, _ in seen.found] == ["script"], "only ours, which sorts"
        assert seen.text.count("<script>alert(1)</script>") >= (8 if file.parent == folder else 2)
        assert "\x1b" not in text and "http:" not in re.sub(r"xmlns\S*=\S+", "", text)
    policy = re.search(r"script-src 'sha256-(.*?)'", text)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    assert base64.b64decode(policy) == hashlib.sha256(script.encode()).digest() and "default-src 'none'" in text


def test_without_matplotlib_there_are_no_curves(write_run, monkeypatch):
    folder = write_run("run", [record(2, 10), record(4, 20)])
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    report.write_report(folder)
    text = (folder / "report.html").read_text()
    assert "<svg" not in text and "since matplotlib is not installed" in text and "<td>last step</td><td>4</td>" in text


def test_curves_begin_with_two_points(write_run, monkeypatch):
    """One log line draws nothing, steps have no fractions, and a value is named as people say it."""
    measured = {"eval_loss": 2.0, "eval_next_move_accuracy": 0.5, "eval_rougeL": 3.0}
    evaluations = [{"step": n, "time": 1} | measured for n in (0, 2)]
    one = report.read_run(write_run("one", [record(1, 10, grad_norm=1.0)]))
    with monkeypatch.context() as before_the_first_step:
        before_the_first_step.setitem(sys.modules, "matplotlib.figure", None)  # its import takes longer than a step
        assert "<svg" not in (text := report.panels([one])) and "second log line" in text
    run = report.read_run(write_run("two", [*evaluations, record(2, 9)]))
    titles = re.findall("<h3>(.*?)</h3>", report.panels([run]))
    assert titles == ["Loss", "Next move accuracy", "RougeL"]
    for steps in ((1, 2), (0, 3)):
        folder = write_run(str(steps), [record(n, 10) for n in steps if n])
        svg = report.draw_curves([report.read_run(folder)], ["loss"])
        ticks = re.findall(r">(\d+(?:\.\d+)?)</text>", svg.partition('id="matplotlib.axis_2"')[0])
        assert svg == "" or set(ticks) == {"1", "2"}


@pytest.mark.parametrize("value", [98.4, -40.0])
def test_a_legend_covers_no_bar(value):
    """It stands below the bars, their labels and those of the axis, inside the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4.2), layout="constrained")
    chart = figure.subplots()
    series = {name: dict.fromkeys(("opening", "middle", "end"), value) for name in ("before", "baseline", "after")}
    Bars(series, "Moves", "%").draw(chart)
    FigureCanvasAgg(figure).draw()
    legend = chart.get_legend().get_window_extent()
    drawn = [*chart.patches, *chart.texts, *chart.get_xticklabels()]
    assert len(drawn) == 9 + 9 + 3 and min(part.get_window_extent().y0 for part in drawn) > legend.y1
    assert legend.y0 > 0 and legend.x0 > 0 and legend.x1 < figure.bbox.x1


def test_samples_read_as_people_write():
    """A message alone has no role, and no blank lines; what a message lacks is not written as None."""
    assert report.as_read([{"role": "assistant", "content": "\n\n42\n"}]) == report.as_read("\n42\n") == "42"
    asked = [{"role": "system", "content": None}, {"role": "user", "content": "a\n\nb\n"}]
    assert report.as_read(asked) == "system: \nuser: a\n\nb"
    assert report.as_read([{"type": "text"}, "x"]) == '[{"type": "text"}, "x"]' and report.as_read(None) is None


def test_evaluations_in_quick_succession_have_one_report(write_run, monkeypatch):
    """Drawing takes longer than the steps of a small run. The first evaluation has a page, and one a minute later."""
    folder = write_run("run", records := [record(2, 10)])
    observer, now, written = report.Report(TrainArgs(output_dir=str(folder))), [1000.0], []
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(report, "write_report", lambda *given: written.append((now[0], *given)))
    for now[0] in (1000.0, 1030.0, 1061.0, 1100.0):
        observer.evaluated(records)
    assert written == [(1000.0, folder, records), (1061.0, folder, records)]


def test_a_report_never_ends_a_run(write_run, capsys, monkeypatch):
    """What goes wrong is one line; a run that has not begun to train has no report."""
    folder = write_run("run", [record(2, 10)])
    (folder / "report.html").mkdir()
    report.write_report(folder)
    monkeypatch.setattr(report, "page_of", lambda seen: 1 / 0)
    report.write_report(folder)
    (folder / "args.yaml").write_text("{")
    report.write_report(folder)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(line.startswith("warning: report.html could not be written: ") for line in said)
    (folder / "metrics.jsonl").unlink()
    report.write_report(folder)
    assert capsys.readouterr().err == ""
    refuses(r"run is not the output directory of .*metrics\.jsonl", report.compare, [folder], Path())
    (folder / "metrics.jsonl").touch()
    (folder / "args.yaml").write_text("")
    refuses("is not the output directory of a run", report.compare, [folder], Path())


def test_long_curves_keep_peaks(write_run):
    """The page of a long run is not larger, and the curve has its highest and its lowest value."""
    losses = np.random.default_rng(0).normal(size=10_000)
    losses[5003], losses[6001] = 90, -90
    sizes = []
    for chosen in (losses, losses[4500:6500:2]):
        run = report.read_run(write_run(str(len(chosen)), [{"step": i, "loss": v} for i, v in enumerate(chosen)]))
        svg = report.draw_curves([run], ["loss"])
        sizes.append(len(svg))
        if chosen is losses:
            longest = max(re.findall(r'd="(.*?)"', svg, re.DOTALL), key=len)
            heights = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", longest)]
    assert sizes[0] < 2 * sizes[1] < 100_000
    assert max(heights) - min(heights) > 0.9 * 0.82 * 2.5 * 72, "the axes with their margins"


def test_the_page_of_a_run(write_run):
    """Curves with a reward first, evaluations, samples, attempts, a profile, and the plan's peak beside the measured one."""
    evaluation = {"step": 4, "time": 20, "eval_loss": 0.5, "eval_accuracy": 0.25}
    first = {"step": 0, "time": 1, "eval_loss": 2.0, "eval_accuracy": 0.0}
    steps = [record(2, 10, reward=0.1, peak_memory_gib=2.0), record(4, 18, reward=float("nan"), peak_memory_gib=3.0)]
    line = {"begun": 1.0, "recipe": "sft", "changed": {"learning_rate": 0.5}, "versions": {"torch": "9.9"}, "from": 0}
    folder = write_run("run", [first, *steps, record(6, 30, reward=0.2), evaluation], line, learning_rate=0.5, seed=1)
    (folder / "plan.json").write_text(json.dumps({"gpu": "H100", "memory": {"in_use": 5 * 2**29}}))
    (folder / "profile").mkdir()
    (folder / "profile/rank-1.trace.json.gz").touch()
    sample = {"source": "held out", "prompt": "1+1=", "completion": "3", "expected": "2", "rewards": {"right": 0.0}}
    samples = [{"step": n} | sample for n in (0, 4)]
    write_rows(folder / "samples.jsonl", samples)
    report.write_report(folder)
    text = (folder / "report.html").read_text()
    titles = re.findall(r"<h[23]>(.*?)</h", text)
    assert titles[:3] == ["Reward", "Loss", "Samples a second"] and "Accuracy" in titles
    assert text.count("<svg") == titles.index("Evaluations") and "currentColor" in text and report.INK not in text
    assert "3.00 GiB measured, 2.50 GiB planned for H100" in text
    assert '<td>held out</td><td>1+1=</td><td>3</td><td>2</td><td class="number">0</td>' in text
    assert "<h2>Profile</h2><p>profile/rank-1.trace.json.gz, for " in text.replace("\n", "")
    assert "<td>learning_rate</td><td>0.5</td>" in text and "<td>torch</td><td>9.9</td>" in text
    assert "<td>seed</td>" not in text
    assert "<h1>sft: run</h1>" in text and "prefers-color-scheme: dark" in text


def test_several_runs_on_one_page(write_run, command):
    records = [record(2, 10), record(4, 18), {"step": 4, "time": 19, "eval_loss": 0.5}]
    rates = {"a": 0.1, "b": 0.2, "c": 0.1}
    runs = [str(write_run(n, records, {"changed": {}}, learning_rate=rate, seed=1)) for n, rate in rates.items()]
    out = Path(runs[0]).parent / "all.html"
    assert command("report", *runs, "--out", out).stdout == f"{out}\n"
    text = out.read_text()
    assert "<td>learning_rate</td><td>0.1</td><td>0.2</td><td>0.1</td>" in text
    assert not {"<td>seed</td>", "<td>output_dir</td>"} & set(re.findall("<td>[^<]*</td>", text))
    colored = [text.count(f'"color:{color}"') for color in report.COLORS[:3]]
    assert colored == [2] * 3, "each run has its colour in both tables"
    assert all(f"stroke: {color}" in text for color in report.COLORS[:3])


def test_a_page_without_a_folder_is_told_at_once(write_run, tmp_path):
    with pytest.raises(ConfigError, match=r"^--out .*nowhere/page.html: there is no folder .*nowhere$"):
        report.compare([write_run("a", [record(4, 1010)])] * 2, tmp_path / "nowhere/page.html")


def test_profile_of_steps(tmp_path, monkeypatch):
    """On a CPU: chosen steps on chosen ranks, also if the run begins or ends within them."""
    args = TrainArgs(output_dir=str(tmp_path), profile_steps="3-4", profile_ranks=[0, 2])

    def run(rank: int, begun_at: int, total: int) -> list[str] | None:
        monkeypatch.setenv("RANK", str(rank))
        profiler = report.StepProfiler(args)
        profiler.began(begun_at)
        for step in range(begun_at + 1, total + 1):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.completed(step)
        profiler.ended(total)
        file = tmp_path / f"profile/rank-{rank}.trace.json.gz"
        if not file.exists():
            return None
        return [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]

    assert run(1, 0, 5) is None and run(0, 4, 6) is None
    assert run(0, 0, 5).count("aten::mm") == 2 and run(2, 3, 9).count("aten::mm") == 1


def test_a_profile_never_ends_a_run(tmp_path, monkeypatch):
    (tmp_path / "profile").touch()
    args = TrainArgs(output_dir=str(tmp_path), profile_steps="1")
    monkeypatch.setattr(agenda, "observers", [report.StepProfiler(args)])
    agenda.tell(agenda.Observer.began, 0)
    with pytest.warns(UserWarning, match="StepProfiler failed: FileExistsError"):
        agenda.tell(agenda.Observer.completed, 1)


def test_problems_of_the_profile():
    def problems(**args: object) -> list[str]:
        return [problem for problem in TrainArgs(**args).problems(2) if "profile" in problem]

    assert problems(profile_steps="10-12") == problems(profile_steps="7") == problems() == []
    for text in ("12-10", "0-3", "a", "-3", "3-", "1-2-3"):
        assert "such as 10-12" in problems(profile_steps=text)[0]
    assert "beyond the last step, --max_steps 5" in problems(profile_steps="4-6", max_steps=5)[0]
    assert "has [2]; the 2 processes are 0 to 1" in problems(profile_ranks=[0, 2])[0]


def test_elements():
    made = page.element("p", "a & b", page.Html("<br>"), class_="x", title='"')
    assert made == '<p class="x" title="&quot;">a &amp; b<br></p>'
    assert page.element("span", "", title=0) == '<span title="0"></span>'
