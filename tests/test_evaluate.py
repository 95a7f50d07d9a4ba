"""Tests of `evaluate`: lm-evaluation-harness gives the figures of the recipe's own evaluation, and the model card shows them.

`make test-eval` installs the harness and runs this; otherwise the tests that need it are skipped.
"""

import importlib.util
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, read_metrics
from tiny import tiny_model
from transformers import AutoModelForSequenceClassification

from accelerate_recipes import __main__, evaluate
from accelerate_recipes.checkpoint.export import (
    add_to_list,
    arguments_of,
    check_replaceable,
    exported_files,
    list_files,
)
from accelerate_recipes.chess.next_moves import prompt_of
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.tokenizers import load_tokenizer

SCRIPT = ROOT / "recipes/chess.py"
TINY = [
    "--config", ROOT / "recipes/configs/chess/laptop.yaml", "--config_overrides", "hidden_size=32",
    "intermediate_size=32", "num_attention_heads=2", "num_hidden_layers=1", "--heldout_share", 0.1, "--num_positions", 120,
    "--max_steps", 30, "--total_batch_size", 8, "--learning_rate", 0.02, "--eval_steps", 0, "--save_steps", 0,
]  # fmt: skip
needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="NOT TESTED WITH lm-evaluation-harness: `make test-eval` installs and uses it"
)


@pytest.fixture(scope="module")
def run(forks, games_file, tmp_path_factory):
    """Folder of a run that has learnt a little."""
    folder = tmp_path_factory.mktemp("chess")
    args = [*TINY, "--train_files", games_file, "--data_cache_dir", folder / "cache"]
    forks.succeed(folder / "run", *args, config="single", num_processes=1)
    return folder / "run"


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `evaluate`; returns exit code and output."""

    def run(*argv: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["accelerate_recipes", "evaluate", *map(str, argv)])
        try:
            __main__.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@needs_harness
def test_the_figures_are_those_of_the_recipe(run, command, tmp_path):
    export = run / "export"
    code, output = command(export, "--tasks", "chess_next_move,chess_loss", "--batch_size", 16)
    assert code == 0, output
    found = json.loads((export / "evaluation.json").read_text())
    measured = {name: value for task in found.values() for name, (value, _) in task["measures"].items()}
    own = {
        name.removeprefix("eval_"): value for name, value in read_metrics(run)[-1].items() if name.startswith("eval_")
    }
    loss, own_loss = measured.pop("loss"), own.pop("loss")
    assert loss == pytest.approx(own_loss, rel=1e-5)
    assert measured == pytest.approx({name: own[name] for name in measured}) and len(measured) == 10
    assert measured.keys() == {name for name in own if name.startswith(("legal_move_rate", "next_move_accuracy"))}
    assert 0.02 < own["legal_move_rate"] < 0.98 and own["next_move_accuracy"] > 0, "figures that say something"
    assert f"Held-out positions ({found['chess_next_move']['examples']})" in run.with_suffix(".log").read_text()

    card = (export / "README.md").read_text()
    assert (
        re.search(r"\| chess_loss \| \d+ \| loss \| " + re.escape(f"{loss:.5g}"), card)
        and card.count(evaluate.HEADING) == 1
    )
    assert card.index(evaluate.HEADING) < card.index("## Arguments") and arguments_of(export)["max_steps"] == 30
    assert "evaluation.json" in exported_files(export)
    check_replaceable(export, "")  # nothing there is foreign

    code, output = command(export, "--tasks", "chess_loss", "--limit", 3)
    assert code == 0, output
    again = json.loads((export / "evaluation.json").read_text())
    assert again["chess_next_move"] == found["chess_next_move"] and again["chess_loss"]["examples"] == 3
    assert again["chess_loss"]["measures"]["loss"][0] != loss
    card = (export / "README.md").read_text()
    assert (
        card.count(evaluate.HEADING) == 1 and card.count("| chess_loss") == 1 and "| chess_loss (limit 3) | 3 |" in card
    )


def test_prompts_are_those_of_the_recipe(run):
    """A small model hardly notices a missing begin token, so the tokens are compared too."""
    spec = importlib.util.spec_from_file_location("chess_tasks", ROOT / "recipes/tasks/chess/chess_tasks.py")
    tasks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tasks)
    tokenizer = load_tokenizer(str(run / "export"))
    positions = tasks.positions(str(run / "export"))["test"]
    for one in positions:
        tokens = tokenizer(one["prompt"], add_special_tokens=False)["input_ids"]
        assert tokens == prompt_of(tokenizer, one["prefix"])
    assert len(positions) > 100


@needs_harness
def test_a_folder_of_ones_own(run, command, tmp_path):
    """A task that reads a local file; tasks that nobody knows."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "moves.jsonl").write_text(
        "".join(json.dumps({"a": "e2e4 e7e5", "b": b}) + "\n" for b in ("g1f3", "f1c4"))
    )
    task = {
        "task": "two_moves", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "moves.jsonl")}},
        "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "{{a}}", "doc_to_target": " {{b}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tasks/two_moves.yaml").write_text(yaml.safe_dump(task))
    code, output = command(run / "export", "--tasks", "two_moves", "--include_path", tmp_path / "tasks")
    assert code == 0 and "| two_moves | 2 | acc |" in output, output
    code, output = command(
        run / "export", "--tasks", "two_move", "nothing_like_it", "--include_path", tmp_path / "tasks"
    )
    assert code == 1 and "- two_move; did you mean 'two_moves'?" in output and "- nothing_like_it" in output, output


def test_what_cannot_be_evaluated(command, monkeypatch, tmp_path):
    """Each is one message, before the harness is loaded."""
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    export = tmp_path / "export"
    export.mkdir()
    assert "is no export: it holds no" in command(export, "--tasks", "a")[1]
    (export / "README.md").write_text("A card.")
    tiny_model("bert", AutoModelForSequenceClassification).save_pretrained(export)
    list_files(export)
    assert "is a BertForSequenceClassification; lm-evaluation-harness evaluates" in command(export, "--tasks", "a")[1]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "README.md").write_text("A card.")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "far/away"}))
    list_files(adapter)
    assert "adapters of far/away, which is not here; run: hf download far/away" in command(adapter, "--tasks", "a")[1]
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(export)}))
    code, output = command(adapter, "--tasks", "a")
    assert (
        code == 1
        and "error: lm-evaluation-harness is not installed; run: pip install -r requirements-eval.txt" in output
    )
    assert "--limit is 0; it must be at least 1" in command(adapter, "--tasks", "a", "--limit", 0)[1]
    with pytest.raises(ConfigError, match="does not say the arguments of the run"):
        arguments_of(adapter)


def test_the_card_of_a_person_keeps_their_text(tmp_path):
    """The table is replaced, wherever a person has moved it; all other text stays."""
    export = Path(tmp_path)
    (export / "README.md").write_text("# Mine\n\nMy words.\n")
    list_files(export)
    one = {"task": {"measures": {"acc": [0.5, None]}, "examples": 4, "versions": {}}}
    evaluate.keep(export, one)
    assert (export / "README.md").read_text().startswith(f"# Mine\n\nMy words.\n\n{evaluate.HEADING}\n\n| task |")
    (export / "README.md").write_text((export / "README.md").read_text() + "\n# More\n\nOf mine: \\1.\n")
    one["task"]["measures"]["acc"] = [0.75, 0.1]
    evaluate.keep(export, one)
    evaluate.keep(export, {"other": one["task"]})
    card = (export / "README.md").read_text()
    assert card.startswith("# Mine\n\nMy words.\n") and card.endswith("\n# More\n\nOf mine: \\1.\n")
    assert card.count(evaluate.HEADING) == 1 and "0.5 " not in card
    assert "| other | 4 | acc | 0.75 | 0.1 |\n| task | 4 | acc | 0.75 | 0.1 |\n" in card
    add_to_list(export, "evaluation.json")
    assert exported_files(export) == ["README.md", "accelerate_recipes.json", "evaluation.json"]
