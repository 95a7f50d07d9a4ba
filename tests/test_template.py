"""Tests of docs/your-recipe.md: the code of its blocks is recipes/template.py, which trains, stops and resumes."""

import ast
import gzip
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, blocks, log_of, losses, read_metrics
from tiny import tiny_model
from transformers import AutoModelForSequenceClassification

from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import candidates, step_of
from accelerate_recipes.checkpoint.resume import find_resume
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life.attempts import read_attempts
from accelerate_recipes.models.loading import load_classifier
from accelerate_recipes.report.report import read_run

PAGE = (ROOT / "docs/your-recipe.md").read_text()
WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """File with the page's code blocks, in their order; the last one, for `plan`, is optional."""
    recipe = tmp_path_factory.mktemp("typed") / "my_recipe.py"
    recipe.write_text("\n\n".join(blocks(PAGE)[:-1]))
    return recipe


def test_the_page_is_the_template(typed):
    template = ast.parse((ROOT / "recipes/template.py").read_text())
    assert ast.get_docstring(template)
    del template.body[0]
    assert ast.unparse(ast.parse(typed.read_text())) == ast.unparse(template)


def test_it_trains_goes_on_after_a_kill_and_exports(forks, typed, template_arguments, tmp_path):
    """The page's recipe trains sharded over two processes; after a kill, its steps are those of an uninterrupted run.

    Meanwhile the model was moved; another model cannot take its place, nor can other data.
    """
    whole, killed, begun = tmp_path / "whole", tmp_path / "killed", time.time()
    profiled = ("--profile_steps", "3-4", "--profile_ranks", 1, "--eval_steps", 4)
    assert forks.run(whole, *template_arguments, *profiled, script=typed) == 0, log_of(whole)[-3000:]
    fault = {"rank": 1, "event": "open", "path": "checkpoint-8.partial/rng-1.pt", "count": 1, "everyone": True}
    template_arguments = [*template_arguments, "--dataloader_num_workers", 1]
    assert forks.run(killed, *template_arguments, script=typed, TOY_FAULT=json.dumps(fault)) != 0
    assert [step_of(path) for path in candidates(killed)] == [4, 6]
    model = Path(template_arguments[template_arguments.index("--model_name_or_path") + 1])
    moved = shutil.copytree(model, tmp_path / "moved")
    assert forks.run(killed, *template_arguments, "--model_name_or_path", moved, script=typed) == 0, log_of(killed)[
        -3000:
    ]
    assert f"--model_name_or_path is now '{moved}'; until step 6 it was '{model}'" in log_of(killed)
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    args = shipped.load(ROOT / "recipes/template.py").Args(
        output_dir=str(whole), model_name_or_path=str(moved), resume_from_checkpoint="latest"
    )
    with pytest.raises(ConfigError, match=f"--model_name_or_path was '{model}' and is now '{moved}'; set it back"):
        find_resume(args)
    assert "Strategy: FSDP2 full shard | 2 x cpu" in log_of(killed) and "(step 6, saved by 2 x" in log_of(killed)
    assert losses(killed) == losses(whole)
    evaluations = [record for record in read_metrics(whole) if "eval_accuracy" in record]
    assert [record["step"] for record in evaluations] == [0, 4, 8]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.05
    assert f"accuracy: before {evaluations[0]['eval_accuracy']:.4f}, after" in log_of(whole)
    exported, again = (
        AutoModelForSequenceClassification.from_pretrained(out / "export").state_dict() for out in (whole, killed)
    )
    assert all(torch.equal(again[name], weight) for name, weight in exported.items())

    # What a reader sees: classes by name, the attempts, the result, and the profile of rank 1.
    assert "row 1, label odd: " in (whole / "rows.txt").read_text() + (killed / "rows.txt").read_text()
    first, second = read_attempts(killed)
    assert (first["state"], first["step"], second["state"], second["from"]) == ("killed", 6, "finished", 6)
    assert first["begun"] < first["ended"] <= second["begun"] < second["ended"]
    assert first["launch"] == "FSDP2 full shard, 2 x CPU" and first["recipe"] == "my_recipe"
    assert second["changed"]["model_name_or_path"] == str(moved) and "seed" not in second["changed"]
    seconds, since = read_run(killed).effective
    assert 0 < seconds < since < time.time() - begun
    reports = [(out / "report.html").read_text() for out in (whole, killed)]
    assert "restarts: 1, which lost" in reports[1] and ">killed<" in reports[1] and ">finished<" in reports[1]
    assert "<h3>Accuracy</h3>" in reports[0] and "label odd" in reports[0] and "Attempts" in reports[0]
    assert all((out / "result.png").read_bytes().startswith(b"\x89PNG") for out in (whole, killed))
    assert [file.name for file in (whole / "profile").iterdir()] == ["rank-1.trace.json.gz"]
    assert "<p>profile/rank-1.trace.json.gz, " in reports[0] and "<h2>Profile</h2>" not in reports[1]
    trace = gzip.decompress((whole / "profile/rank-1.trace.json.gz").read_bytes()).decode()
    assert "ProfilerStep#3" in trace and "gloo:" in trace

    rows, others = (
        Path(template_arguments[template_arguments.index("--train_files") + 1]).read_text(),
        tmp_path / "others.jsonl",
    )
    others.write_text("".join(reversed(rows.splitlines(keepends=True))))
    assert forks.run(whole, *template_arguments, "--train_files", others, "--max_steps", 9, script=typed) == 2
    said = log_of(whole).rpartition("arguments that differ")[2]
    assert "error: the training data are others than the checkpoint's" in said and "Strategy: " not in said, said[
        -3000:
    ]


def test_machines_with_other_texts(forks, typed, template_arguments, tmp_path):
    rows = Path(template_arguments[template_arguments.index("--train_files") + 1]).read_text().splitlines(keepends=True)
    for machine in range(2):
        (folder := tmp_path / f"machine-{machine}").mkdir()
        (folder / "texts.jsonl").write_text("".join(rows[machine:]))
    out = tmp_path / "out"
    code = forks.run(out, *template_arguments, "--train_files", "texts.jsonl", script=typed, TESTED_MACHINES=tmp_path)
    assert code == 2 and "the checksum of the rows is " in log_of(out), log_of(out)[-3000:]


@pytest.mark.slow
def test_second_example(forks, template_arguments, tmp_path):
    """The code of docs/token-labels.md takes the place of the template's; it learns, and rows show the label of a token."""
    (code,) = ["\n\n".join(blocks((ROOT / "docs/token-labels.md").read_text()))]
    nodes = ast.parse(code).body
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    others = {node.name: node for node in nodes if node not in imports}
    tree = ast.parse((ROOT / "recipes/template.py").read_text())
    names = [getattr(node, "name", None) for node in tree.body]
    assert others.keys() <= {*names} and len(others) == 5
    head, *rest = (others.get(name, node) for name, node in zip(names, tree.body, strict=True))
    assert isinstance(rest[0], ast.ImportFrom) and rest[0].module == "__future__"
    tree.body = [head, rest[0], *imports, *rest[1:]]
    script = tmp_path / "token_labels.py"
    script.write_text(ast.unparse(tree))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    texts = [[f"w{(7 * i * j) % 40}" for j in range(1, 4 + i % 5)] for i in range(200)]
    lines = [
        {"text": " ".join(text), "tags": " ".join("ODD" if int(word[1:]) % 2 else "O" for word in text)}
        for text in texts
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert forks.run(out, *template_arguments, "--train_files", rows, script=script) == 0, log_of(out)[-3000:]
    evaluations = [record for record in read_metrics(out) if "eval_accuracy" in record]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.05
    assert 0 <= evaluations[0]["eval_accuracy"] < evaluations[-1]["eval_accuracy"] <= 1
    assert "ODD" in (out / "rows.txt").read_text()
    rows.write_text(rows.read_text() + json.dumps({"text": "w1 w2", "tags": "O"}) + "\n")
    assert forks.run(tmp_path / "bad", *template_arguments, "--train_files", rows, script=script) == 2
    assert "rows.jsonl, row 201 has 2 words and 1 tags; give each word a tag" in log_of(tmp_path / "bad")


def test_a_base_with_classes_of_its_own(tmp_path):
    """The rows of a base go by the names of its labels, also where their number differs, and both tables of names agree."""
    base = tiny_model("bert", AutoModelForSequenceClassification, id2label={0: "even", 1: "odd", 2: "zero"})
    base.save_pretrained(tmp_path)
    module = shipped.load(ROOT / "recipes/template.py")
    args = module.Args(model_name_or_path=str(tmp_path), train_files=["texts.jsonl"])
    for labels, rows in ((["zero", "even", "odd"], [2, 0, 1]), (["odd", "even"], [1, 0])):
        model = module.make_model(args, labels)
        assert torch.equal(model.classifier.weight, base.classifier.weight[rows])
        assert model.config.label2id == {label: number for number, label in model.config.id2label.items()}
        assert [*model.config.id2label.values()] == labels


@pytest.mark.parametrize("of_base", [None, {0: 0, 1: 1, 2: 2}, {0: "0", 1: "1", 2: "2"}])
def test_classes_without_names(of_base, tmp_path):
    """They are called by their numbers, with or without `LABEL_`; a base for several labels at once serves one here."""
    base = tiny_model(
        "bert", AutoModelForSequenceClassification, num_labels=3, problem_type="multi_label_classification"
    )
    base.save_pretrained(tmp_path)
    if of_base:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": of_base}))
    for labels in (["2", "0", "1"], ["LABEL_2", "LABEL_0", "LABEL_1"]):
        model = load_classifier("AutoModelForSequenceClassification", str(tmp_path), labels)
        assert torch.equal(model.classifier.weight, base.classifier.weight[[2, 0, 1]])
        assert model.config.problem_type is None and [*model.config.id2label.values()] == labels


def test_too_few_texts_to_hold_any_out(forks, typed, template_arguments, tmp_path):
    """Too few texts are refused, because an evaluation of no rows would give no number."""
    out, texts = tmp_path / "out", tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "w1", "label": "odd"}) + "\n")
    assert forks.run(out, *template_arguments, "--train_files", texts, script=typed) == 2
    assert "error: none of 1 rows is left to evaluate on" in log_of(out)
    assert forks.run(out, *template_arguments, "--train_files", texts, "--use_peft", script=typed) == 2
    assert "--use_peft would leave the new output layer as it is" in log_of(out)
