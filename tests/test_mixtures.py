"""Mixtures of finite sources: what their file says, which rows each step trains on, and runs that are killed and resumed."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conversations import translations
from datasets import Dataset
from helpers import ROOT, SHORT_RUN, STEPS, TIMES, evaluations, log_of, losses, read_metrics, refuses, write_rows
from tiny import save_base

from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.mixtures import SourceOrder, SourceTable, check_sources_apart
from accelerate_recipes.data.mixture import ONE_SOURCE, Mixture, MixturePhase, Source, continued
from accelerate_recipes.data.rows import StepOrder, num_steps
from accelerate_recipes.errors import ConfigError

SCRIPT = ROOT / "recipes/sft.py"
# The source of ten rows ends within step 4, with which the phase begins: a run that is killed in step 5 goes on before.
MIXTURE = """
sources:
- {{name: few, weight: 4, train_files: [{folder}/few.parquet], max_epochs: 1.5, heldout_share: 0.3}}
- {{name: chats, weight: 5, train_files: [{folder}/chats.jsonl]}}
- {{name: alpaca, weight: 3, train_files: [{folder}/alpaca.csv], columns: [instruction=asked, output=said]}}
phases:
- {{from: 4, weights: {{chats: 1, alpaca: 3, few: 1}}, lr_factor: 0.5}}
"""


def write_mixture(folder: Path, text: str = MIXTURE, name: str = "mixture") -> Path:
    (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a base, and with sources of three forms in three kinds of files: 80 rows, 60 rows, and 10 rows."""
    import pandas

    folder = tmp_path_factory.mktemp("sources")
    chats, tokenizer = translations(200)
    save_base(folder / "base", tokenizer)
    write_rows(folder / "chats.jsonl", ({"messages": messages} for messages in chats[:80]))
    said = [[message["content"] for message in messages] for messages in chats]
    pandas.DataFrame([{"asked": fr, "said": en} for en, fr in said[80:140]]).to_csv(folder / "alpaca.csv", index=False)
    turns = [[{"from": "human", "value": en}, {"from": "gpt", "value": fr}] for en, fr in said[140:160]]
    pandas.DataFrame({"conversations": turns[:10]}).to_parquet(folder / "few.parquet")
    section = write_mixture(folder).read_text().replace("\n", "\n  ")
    (folder / "preset.yaml").write_text(f"mixture:\n  {section}")
    return folder


@pytest.fixture(scope="module")
def arguments(folder) -> tuple:
    return (
        "--model_name_or_path", folder / "base", "--config", folder / "preset.yaml", "--max_length", 64, *SHORT_RUN,
        "--total_batch_size", 8, "--per_device_train_batch_size", 2, "--heldout_share", 0.1,
        "--assistant_only_loss", "false", "--per_device_eval_batch_size", 5, "--lr_scheduler_type", "constant",
    )  # fmt: skip


# Which rows each step trains on


def table_of(
    weights: list, sizes: list, args: TrainArgs, max_epochs: tuple = (), phases: tuple = (), **more
) -> SourceTable:
    """Make a mixture of the sources a, b, ..."""
    names = "abcdef"[: len(sizes)]
    ends = max_epochs or [math.inf] * len(sizes)
    sources = [Source(*source, {}) for source in zip(names, weights, ends, strict=True)]
    phases = [MixturePhase(begin, dict(zip(names, w, strict=True)), None) for begin, w in phases]
    mixture = Mixture("mixture.yaml", sources, phases)
    return SourceTable(args, mixture, sizes, [f"content of {name}" for name in names], **more)


def rows_of(table: SourceTable, num_steps: int, **order) -> list[int]:
    orders = order_of(table, **order)
    return [row for step in range(num_steps) for row in orders.rows(step)]


def order_of(table: SourceTable, lengths=None, rank: int = 0, world_size: int = 1) -> SourceOrder:
    return SourceOrder(table, sum(table.sizes), table.args, rank, world_size, lengths)


ARGS = TrainArgs(max_steps=625, total_batch_size=16, per_device_train_batch_size=2)


def test_shares_of_the_rows_and_passes_over_sources():
    """Over 10,000 rows the shares are the weights; each pass over a source has each of its rows once, in another order."""
    sizes, asked = [10, 100_000, 700, 31], np.array([0.1, 0.5, 0.25, 0.15])
    table = table_of([2, 10, 5, 3], sizes, ARGS)
    rows = np.array(rows_of(table, 625))
    sources = np.searchsorted(table.ends, rows, side="right")
    assert abs(np.bincount(sources) / len(rows) - asked).max() < 3e-4
    starts, passes = np.cumsum([0, *sizes[:-1]]), {}
    for source, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        mine = rows[sources == source] - start
        passes[source] = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
        assert all(len({*one}) == len(one) for one in passes[source])
    assert len(passes[0]) == 100 and len({tuple(one) for one in passes[0]}) > 95
    seen = table.seen(625)
    assert [seen[f"{name}_rows"] for name in "abcd"] == np.bincount(sources).tolist()
    assert [seen[f"{name}_asked"] for name in "abcd"] == pytest.approx(asked.tolist())
    assert seen["d_epochs"] == pytest.approx(1500 / 31, rel=1e-3)


@pytest.mark.parametrize("lengths", [None, np.arange(1, 152) % 37])
def test_ranks_share_the_rows_of_a_step(lengths):
    """Any number of ranks trains on the same rows, also after a resume; padded rows of similar length come together."""
    args = TrainArgs(max_steps=40, total_batch_size=12, per_device_train_batch_size=2)
    table = table_of([3, 2, 1], [10, 100, 41], args, max_epochs=(2.5, math.inf, 1), phases=((20, [1, 1, 1]),))
    steps = {}
    for world_size in (1, 2, 3):
        orders = [iter(order_of(table, lengths, rank, world_size)) for rank in range(world_size)]
        steps[world_size] = [
            sorted(row for order in orders for micro in islice(order, 6 // world_size) for row in micro)
            for _ in range(40)
        ]
    assert steps[1] == steps[2] == steps[3] == [sorted(order_of(table).rows(step)) for step in range(40)]
    order = order_of(table, lengths)
    order.start_step = 25
    assert next(iter(order)) == next(islice(iter(order_of(table, lengths)), 25 * 6, None))
    if lengths is not None:
        micro = [lengths[rows] for rows in islice(iter(order_of(table, lengths)), 240)]
        apart = np.mean([abs(int(a) - int(b)) for a, b in micro])
        assert apart < 4, "in a random order it would be 12"


def test_one_source_is_read_as_without_a_mixture():
    ends = TrainArgs(num_train_epochs=1.5, total_batch_size=16, per_device_train_batch_size=2)
    for table in (table_of([7], [50], ARGS), *(SourceTable(args, ONE_SOURCE, [50], [""]) for args in (ARGS, ends))):
        assert rows_of(table, 20) == [row for n in range(20) for row in StepOrder(50, table.args, 0, 1).rows(n)]
        assert table.num_steps() == num_steps(table.args, 50)


def test_names_decide_and_sizes_weigh():
    """Sources of equal sizes are passed over in orders of their own; `size` with a temperature makes weights more alike."""
    order = order_of(table_of([1, 1], [40, 40], ARGS))
    assert (order.pass_over(0, 0) != order.pass_over(1, 0) - 40).any()
    sources = [Source(name, None, math.inf, {}) for name in "ab"]
    for temperature, share in ((1, 0.8), (2, 2 / 3)):
        table = SourceTable(ARGS, Mixture("", sources, temperature=temperature), [400, 100], ["", ""])
        assert table.seen(625)["a_asked"] == pytest.approx(share)
    for temperature, said in (
        (0.05, r"1e\+09 times apart; raise temperature 0.05"),
        (0.001, "the weights are too large"),
    ):
        refuses(said, SourceTable(ARGS, Mixture("", sources, temperature=temperature), [400, 100], ["", ""]).seen, 1)


def test_sources_end_and_so_does_the_run():
    """The last step is filled up; more steps, or a phase behind the end, are an error with both numbers."""
    args = TrainArgs(total_batch_size=8, per_device_train_batch_size=2)
    table = table_of([3, 1], [10, 25], args, max_epochs=(2, 0.5))
    assert table.num_steps() == 4
    rows = rows_of(table, 9)
    assert len(rows) == 32 and rows.count(-1) == 0
    assert Counter(np.array(rows)[np.array(rows) < 10].tolist()) == dict.fromkeys(range(10), 2)
    args.max_steps = 5
    with pytest.raises(ConfigError, match=r"--max_steps 5 needs 40 rows, .* end after 32: lower it to 4"):
        table_of([3, 1], [10, 25], args, max_epochs=(2, 0.5)).num_steps()
    args.max_steps = -1
    with pytest.raises(ConfigError, match="phase from 4: it begins after the last step, 4"):
        table_of([3, 1], [10, 25], args, max_epochs=(2, 0.5), phases=((4, [1, 1]),)).num_steps()
    with pytest.raises(ConfigError, match=r"source b: max_epochs 0\.01 of 25 rows is less than one row"):
        table_of([3, 1], [10, 25], args, max_epochs=(2, 0.01)).num_steps()


def test_weights_change_on_a_resume_twice():
    """A later resume replays what held before: the steps before a change keep their rows, those after it have the shares."""
    sizes, given = [100, 70], [[3, 1], [1, 1], [1, 0]]
    whole = rows_of(table_of(given[0], sizes, ARGS), 600)
    first = table_of(given[0], sizes, ARGS)
    second = table_of(given[1], sizes, ARGS, before=json.loads(json.dumps(first.weights)), begun_at=200)
    assert second.changed() == "Shares from step 201 on: a 50.00%, b 50.00%; before: a 75.00%, b 25.00%"
    again = table_of(given[1], sizes, ARGS, before=json.loads(json.dumps(second.weights)), begun_at=300)
    assert again.changed() == "" and again.weights == second.weights
    third = table_of(given[2], sizes, ARGS, before=json.loads(json.dumps(again.weights)), begun_at=400)
    rows = rows_of(third, 600)
    assert rows[: 200 * 16] == whole[: 200 * 16] and rows[: 400 * 16] == rows_of(second, 400)
    shares = [np.mean(np.array(rows[begin * 16 : (begin + 200) * 16]) < 100) for begin in (0, 200, 400)]
    assert shares == pytest.approx([0.75, 0.5, 1], abs=1e-3)
    # Weights that mean the same begin nothing anew; a planned phase counts as planned.
    later = (9, {"a": 1, "b": 1})
    assert continued([(0, {"a": 3, "b": 1})], 5, [(0, {"a": 6, "b": 2}), later]) == [(0, {"a": 3, "b": 1}), later]


def test_a_resumed_run_has_the_sources_of_its_checkpoint():
    whole = table_of([1, 2], [100, 70], ARGS)
    states = json.loads(json.dumps([whole.state()]))
    whole.check(states)
    for other, message in {
        "more": "c new in mixture.yaml", "fewer": "b no longer in mixture.yaml", "ends": "max_epochs is 2, the checkpoint has none",
        "content": "source b: the training data are others than the checkpoint's",
    }.items():  # fmt: skip
        sizes = {"more": [100, 70, 5], "fewer": [100]}.get(other, [100, 70])
        table = table_of([1] * len(sizes), sizes, ARGS, max_epochs=(2, math.inf) if other == "ends" else ())
        table.contents = ["content of a", "changed"] if other == "content" else table.contents
        refuses(message, table.check, states)
    refuses("trained without a mixture", whole.check, [{"content": "content of a"}])
    refuses("that of a run with --mixture", SourceTable(ARGS, ONE_SOURCE, [100], ["content of a"]).check, states)


def test_held_out_rows_that_another_source_trains_are_counted(capsys):
    """They are told with both names; many of them are refused. With one share for all sources, nothing is compared."""

    def part(*sides: Iterable[int]) -> SimpleNamespace:
        texts = ([f"Text {i}" for i in numbers] for numbers in sides)
        tables = (Dataset.from_dict({"text": text}) for text in texts)
        return SimpleNamespace(sides=dict(zip(("train", "test"), tables, strict=True)))

    parts = {"a": part(range(40), range(40, 60)), "b": part(range(100, 140), range(39, 58))}
    parts["c"] = part(range(200, 220), [0, *range(300, 310)])
    alone = [SimpleNamespace(eval_files=["x.jsonl"], heldout_share=0.1)] * 3
    args = SimpleNamespace(sources=alone, mix=Mixture("mixture.yaml"), dataset_text_field="text")
    check_sources_apart(SimpleNamespace(args=args, print=print), parts)
    assert capsys.readouterr().out.splitlines() == [
        "1 of 19 held-out rows of b begin as rows to train on of a do",
        "1 of 11 held-out rows of c begin as rows to train on of a do",
    ]
    args.sources = [SimpleNamespace(eval_files=[], heldout_share=0.1)] * 3
    check_sources_apart(SimpleNamespace(args=args, print=None), parts)
    args.sources = [SimpleNamespace(eval_files=[], heldout_share=share) for share in (0.1, 0.2, 0.1)]
    parts["b"] = part(range(100, 140), range(30, 50))
    with pytest.raises(ConfigError, match="10 of 20 held-out rows of b begin as rows to train on of a do; remove them"):
        check_sources_apart(SimpleNamespace(args=args, print=print), parts)


# The file


def problems_of(text: str, folder: Path, *flags: object) -> str:
    file = write_mixture(folder, text, "wrong")
    args = shipped.load(SCRIPT).Args
    given = ["--mixture", file, "--model_name_or_path", "x", *flags]
    _, found = resolve(args, [str(word) for word in given], 1)
    return "\n".join(found).replace(str(folder), "")


def test_all_that_is_wrong_is_told_at_once(folder, tmp_path):
    wrong = """
temperature: 2
sources:
- {{name: a, weight: 1, train_file: x}}
- {{name: a, weight: -1, train_files: [missing.jsonl], max_epochs: 0}}
- {{name: eval_b, weight: many, train_files: [{folder}/missing.jsonl], columns: [prompts=x]}}
- {{weight: size, dataset_name: x, train_split: [x, y]}}
phases:
- {{from: 1.5, weights: {{a: 1, c: 1}}}}
- {{from: 0.5}}
"""
    found = problems_of(wrong, tmp_path, "--train_files", folder / "chats.jsonl", "--num_train_epochs", 2)
    for problem in (
        "/wrong.yaml, source a: unknown key 'train_file'; did you mean 'train_files'?",
        "/wrong.yaml, source a: weight is -1; it must be a number of at least 0",
        "/wrong.yaml, source a: max_epochs is 0; it must be a number above 0",
        "/wrong.yaml, source 3: its name is eval_b; it must not begin with eval_",
        "/wrong.yaml, source 3: weight is many; it must be a number of at least 0",
        "/wrong.yaml, source 4: its name is missing; it must be letters, digits, _, - and .",
        "--train_split takes one value, not 2: x y (in /wrong.yaml, source 4)",
        "/wrong.yaml: two sources are called a",
        "/wrong.yaml: number 4 have weight: size, and others a number; give all of them alike",
        "/wrong.yaml, phase 1: from is 1.5; it must be a step, or a share of the run below 1",
        "/wrong.yaml, phase 1: weights lacks number 3, number 4; a weight of 0 leaves a source out",
        "/wrong.yaml, phase 1, weights: unknown key 'c'",
        "/wrong.yaml, phase 2 changes nothing; give weights or lr_factor",
        "/wrong.yaml, source a: give one of --dataset_name and --train_files",
        "/wrong.yaml, source a: --train_files missing.jsonl: no such file",
        "/wrong.yaml, source number 3: --train_files /missing.jsonl: no such file",
        "/wrong.yaml, source number 3: --columns prompts=x: write NAME=COLUMN",
        "chats.jsonl has no effect with the sources of /wrong.yaml; name it as a source, and remove it here",
        "--num_train_epochs 2.0 has no effect with the sources of /wrong.yaml",
        "--max_steps is missing: a, a, number 3, number 4 of /wrong.yaml would never end; or give max_epochs",
        "/wrong.yaml, phase from 0.5: a share of the run needs --max_steps; or give a step",
    ):
        assert problem in found
    assert len(found.splitlines()) == 21


@pytest.mark.parametrize("text, problem", [
    ("sources: []", "names no source"),
    ("weights: 3", "must hold `sources:`, a list of sections"),
    ("sources: [3]", "source 1 is '3'; it must be a section"),
    ("sources: [{{name: a, weight: 0, train_files: [{folder}/chats.jsonl]}}]", "no source has a weight above 0"),
    (MIXTURE.replace("weight: 4", "weight: 1e-20"), "yaml: the weights 1e-20 and 5 are more than 1e+09 times apart; a weight of 0"),
    (MIXTURE.replace("few: 1", "few: 1e99"), "phase 1: the weights 1 and 1e+99 are more than 1e+09 times apart"),
    ("sources: [{{name: a, train_files: [{folder}/chats.jsonl]}}]", "source a: its weight is missing"),
    ("{{", "is not YAML"),
    (MIXTURE.replace("few: 1", "few: "), "phase 1, weights: few is null; it must be a number"),
    (MIXTURE.replace("few: 1", "few: 1, few: 2"), "few stands twice, in line "),
    (MIXTURE.replace("max_epochs: 1.5", "max_epochs: "), "source few: max_epochs is null; it must be a number above 0"),
    (MIXTURE + "- {{from: 5, weights: }}", "phase 2: weights is None; it must be a section"),
    (MIXTURE.replace("from: 4", "from: 9"), "phase from 9: it begins after the last step, --max_steps 9"),
    (MIXTURE.replace("sources:", "temperature: 2\nsources:"), "temperature is for weight: size; remove it"),
    (MIXTURE + "- {{from: 4, lr_factor: 1}}", "phases begin after the steps 4, 4; let each begin later"),
])  # fmt: skip
def test_a_wrong_file_is_one_message(text, problem, folder):
    assert problem in problems_of(text, folder, "--max_steps", 9)


def test_the_page_shows_what_is_read(tmp_path):
    """The mixture of the page for sft.py is right."""
    first, _ = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/mixtures.md").read_text(), re.DOTALL)
    (tmp_path / "own.csv").write_text("question,answer")
    file = tmp_path / "mixture.yaml"
    file.write_text(first.replace("own.csv", str(tmp_path / "own.csv")))
    args, found = resolve(
        shipped.load(SCRIPT).Args, ["--mixture", str(file), "--model_name_or_path", "x", "--max_steps", "9"], 1
    )
    assert found == [] and [(phase.first_step(10), phase.lr_factor) for phase in args.phases] == [(8, 0.5)]
    assert [need.name for source in args.sources for need in source.row_datasets] == ["trl-lib/Capybara"]


def test_a_missing_file_and_a_right_one(folder):
    assert problems_of(MIXTURE, folder, "--max_steps", 9) == ""
    args, found = resolve(shipped.load(SCRIPT).Args, ["--mixture", "none.yaml", "--model_name_or_path", "x"], 1)
    assert found == ["--mixture none.yaml cannot be read: No such file or directory"] and args.sources == []


def test_a_preset_holds_a_mixture(folder, tmp_path, monkeypatch):
    """It is that of a file, is saved as the section that it is, and is named in what is wrong; shipped data are found."""
    args_class, preset = shipped.load(SCRIPT).Args, tmp_path / "preset.yaml"

    def read(text: str, *flags: str) -> tuple:
        section = text.format(folder=folder).replace("\n", "\n  ")
        preset.write_text(f"model_name_or_path: x\nmax_steps: 9\nmixture:\n  {section}")
        return resolve(args_class, ["--config", str(preset), *flags], 1)

    text = MIXTURE.replace("name: few", "name: no").replace("few: 1", "no: 1")
    args, found = read(text)
    file = write_mixture(folder, text, "same")
    of_file, _ = resolve(args_class, ["--mixture", str(file), "--model_name_or_path", "x", "--max_steps", "9"], 1)
    assert found == [] and (args.mix.sources, args.mix.phases) == (of_file.mix.sources, of_file.mix.phases)
    assert args.mix.names == ["alpaca", "chats", "no"], "a name is no truth value"
    args.save(tmp_path / "args.yaml")
    again, found = resolve(args_class, ["--config", str(tmp_path / "args.yaml")], 1)
    saved = yaml.safe_load((tmp_path / "args.yaml").read_text())
    assert found == [] and again.mix == args.mix and again.values() == args.values() == saved
    assert list(saved["mixture"]) == ["sources", "phases"]
    assert read(MIXTURE, "--mixture", str(file))[0].mix == of_file.mix, "a flag overrides it"
    wrong = read(MIXTURE.replace("weight: 5", "weight: -5").replace("from: 4", "from: 9"), "--num_train_epochs", "2")[1]
    assert wrong == [
        "--mixture, source chats: weight is -5; it must be a number of at least 0",
        "--num_train_epochs 2.0 has no effect with the sources of --mixture; give max_epochs of each source, or "
        "--max_steps, and remove it here",
        "--mixture, phase from 9: it begins after the last step, --max_steps 9",
    ]
    assert read("weights: 3")[1][0].startswith("--mixture must hold `sources:`")
    monkeypatch.chdir(tmp_path)
    args, found = resolve(args_class, ["--config", str(ROOT / "recipes/configs/sft/arithmetic_mixture.yaml")], 1)
    assert found == [] and all(Path(file).is_absolute() for one in args.sources for file in one.train_files)


# Runs


def records_of(out: Path) -> list[dict]:
    """Return the records without what differs between two equal runs."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in read_metrics(out)]


@pytest.fixture(scope="module")
def whole(run) -> Path:
    return run()


def test_each_source_is_seen(whole, folder):
    """Log, report, first rows and checkpoint name each source; the loss of all is the mean over their targets."""
    *_, last, after = read_metrics(whole)
    names = ("alpaca", "chats", "few")
    assert sum(last[f"{name}_rows"] for name in names) == 8 * STEPS
    assert last["few_rows"] == 10 and last["few_epochs"] == pytest.approx(10 / 7), "1.5 epochs of 7 rows"
    for record in (record for record in read_metrics(whole) if "loss" in record):
        parts = [(record[f"{name}_targets"], record.get(f"{name}_loss", 0)) for name in names]
        mean = sum(targets * loss for targets, loss in parts) / sum(targets for targets, _ in parts)
        assert record["loss"] == pytest.approx(mean, rel=1e-5)
    assert [record["learning_rate"] for record in read_metrics(whole) if "loss" in record] == [1e-2] * 4 + [5e-3] * 2
    assert {"eval_alpaca_loss", "eval_chats_loss", "eval_few_loss"} < after.keys()
    log = log_of(whole)
    report, shown = ((whole / name).read_text() for name in ("report.html", "rows.html"))
    assert "Source few: 7 rows to train on, 3 held out; 7 sequences: 20.83% of the run's, 1.43 epochs in 6 steps" in log
    assert ", chats_loss: " in log and "The export renders the first" in log
    for name in names:
        assert f"Training, {name}" in shown and f"Evaluation, {name}" in shown
        assert f"<td>{name}</td>" in report
    assert report.count("Loss by source") == 2 and "Share of the rows" in report
    state = json.loads((whole / "checkpoint-6/data.json").read_text())[0]
    assert [step for step, _ in state["weights"]] == [0, 4] and state["sources"]["few"]["max_epochs"] == 1.5


def test_a_killed_run_goes_on_across_an_end_and_a_phase(killed_and_resumed, forks, whole, arguments, tmp_path):
    """It is equal bit by bit, and on another number of processes, with data workers, to 1e-5."""
    killed_and_resumed(SCRIPT, *arguments, whole=whole)
    other = tmp_path / "other"
    on = ("--resume_from_checkpoint", whole / "checkpoint-3", "--dataloader_num_workers", 2)
    forks.succeed(other, *arguments, *on, num_processes=1, config="single")
    assert losses(other) == pytest.approx(losses(whole), rel=1e-5)
    assert evaluations(other) == pytest.approx(evaluations(whole), rel=1e-5)


@pytest.fixture(scope="session")
def tables(tmp_path_factory) -> Path:
    """Folder in which forked runs keep the rows that they have prepared."""
    return tmp_path_factory.getbasetemp() / "forks0/hf/datasets"


def test_a_branch_has_other_phases_and_another_schedule(forks, whole, folder, arguments, tables, tmp_path):
    """Its first step is the trunk's next one, since there both agree; nothing is prepared again, and the trunk stays as it is."""

    def contents() -> dict[Path, tuple[bytes, int]]:
        files = [file for file in (*whole.rglob("*"), *tables.rglob("*.arrow")) if file.is_file()]
        return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    before = contents()
    assert sum(file.suffix == ".arrow" for file in before) > 6
    phases = "phases: [{{from: 5, weights: {{few: 0, chats: 0, alpaca: 1}}, lr_factor: 0.5}}]"
    file = write_mixture(folder, MIXTURE.partition("phases")[0] + phases, "branch")
    schedule = ("--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", "num_decay_steps=2")
    given = ("--mixture", file, "--resume_from_checkpoint", whole / "checkpoint-3")
    forks.succeed(tmp_path / "out", *arguments, *given, *schedule)
    assert contents() == before
    branch, trunk = ([r for r in records_of(out) if "loss" in r] for out in (tmp_path / "out", whole))
    assert branch[:4] == trunk[:4] and branch[4]["loss"] != trunk[4]["loss"]
    assert [record["learning_rate"] for record in branch] == pytest.approx([1e-2] * 5 + [2.5e-3])
    assert branch[5]["alpaca_rows"] == branch[4]["alpaca_rows"] + 8
    states = json.loads((tmp_path / "out/checkpoint-6/data.json").read_text())
    assert [step for step, _ in states[0]["weights"]] == [0, 5]


@pytest.mark.slow
def test_one_source_packed(forks, folder, arguments, tmp_path):
    """A mixture of one source trains packed rows, and its loss is that of the source."""
    packed = ("--packing", "true", "--max_length", 128, "--max_steps", 2, "--save_steps", 0)
    file = write_mixture(folder, "sources: [{{name: chats, weight: 2, train_files: [{folder}/chats.jsonl]}}]", "one")
    forks.succeed(tmp_path / "out", *arguments, *packed, "--mixture", file, num_processes=1, config="single")
    for record in read_metrics(tmp_path / "out")[1:-1]:
        assert record["chats_loss"] == pytest.approx(record["loss"], rel=1e-6) and record["chats_share"] == 1
