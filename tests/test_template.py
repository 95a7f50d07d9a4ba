"""Tests of recipes/template.py, which trains, stops and resumes, and of what docs/your-recipe.md makes of it."""

import ast
import gzip
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import ROOT, blocks, change_json, log_of, losses, read_metrics, refuses, write_rows
from tiny import tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import candidates, step_of
from accelerate_recipes.checkpoint.resume import settle_resume
from accelerate_recipes.life.status import read_attempts
from accelerate_recipes.models.classifiers import classifier_tokenizer, load_classifier
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.report.report import read_run

PAGE = (ROOT / "docs/your-recipe.md").read_text()
WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """Copy of the template under another name, as the page asks for it."""
    return shutil.copy(ROOT / "recipes/template.py", tmp_path_factory.mktemp("copied") / "my_recipe.py")


def test_the_page_names_each_part_of_the_template():
    parts = re.findall(r"^(?:def|class) (\w+)", (ROOT / "recipes/template.py").read_text(), re.M)
    assert len(parts) > 8 and [part for part in parts if f"`{part}`" not in PAGE] == []


def test_it_trains_goes_on_after_a_kill_and_exports(forks, copied, template_arguments, tmp_path):
    """A copy of the template trains sharded over two processes; after a kill, its steps are those of an uninterrupted run.

    Meanwhile the model was moved; another model cannot take its place, nor can other data.
    """
    whole, killed, begun = tmp_path / "whole", tmp_path / "killed", time.time()
    profiled = ("--profile_steps", "3-4", "--profile_ranks", 1, "--eval_steps", 4)
    forks.succeed(whole, *template_arguments, *profiled, script=copied)
    fault = {"rank": 1, "event": "open", "path": "checkpoint-8.partial/rng-1.pt", "count": 1, "everyone": True}
    template_arguments = [*template_arguments, "--dataloader_num_workers", 1]
    assert forks.run(killed, *template_arguments, script=copied, TOY_FAULT=json.dumps(fault)) != 0
    assert [step_of(path) for path in candidates(killed)] == [4, 6]
    model = Path(template_arguments[template_arguments.index("--model_name_or_path") + 1])
    moved = shutil.copytree(model, tmp_path / "moved")
    forks.succeed(killed, *template_arguments, "--model_name_or_path", moved, script=copied)
    assert f"--model_name_or_path is now '{moved}'; until step 6 it was '{model}'" in log_of(killed)
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    args = shipped.load(ROOT / "recipes/template.py").Args(
        output_dir=str(whole), model_name_or_path=str(moved), resume_from_checkpoint="latest"
    )
    refuses(f"--model_name_or_path was '{model}' and is now '{moved}'; set it back", settle_resume, args)
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

    file, others = template_arguments[template_arguments.index("--train_files") + 1], tmp_path / "others.jsonl"
    rows = Path(file).read_text()
    others.write_text("".join(reversed(rows.splitlines(keepends=True))))
    assert forks.run(whole, *template_arguments, "--train_files", others, "--max_steps", 9, script=copied) == 2
    said = log_of(whole).rpartition("arguments that differ")[2]
    assert "error: the training data are others than the checkpoint's" in said and "Strategy: " not in said


def save_with_types(tokenizer: Any, folder: Path) -> Any:
    """Save a tokenizer that tells the texts of a pair apart, as a BERT's does; return it as it is read."""
    tokenizer.save_pretrained(folder)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    change_json(folder / "tokenizer_config.json", model_input_names=names)
    return AutoTokenizer.from_pretrained(folder)


def changed_template(code: str) -> str:
    """Return the template with the imports and the functions of a page in the place of its own."""
    nodes = ast.parse(code).body
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    others = {node.name: node for node in nodes if node not in imports}  # pyright: ignore[reportAttributeAccessIssue]
    tree = ast.parse((ROOT / "recipes/template.py").read_text())
    names = [getattr(node, "name", None) for node in tree.body]
    assert others.keys() <= {*names} and len(others) == 5
    head, *rest = (others.get(name, node) for name, node in zip(names, tree.body, strict=True))
    assert isinstance(rest[0], ast.ImportFrom) and rest[0].module == "__future__"
    tree.body = [head, rest[0], *imports, *rest[1:]]
    return ast.unparse(tree)


def test_pairs_of_texts_with_several_labels(forks, template_arguments, tmp_path):
    """The page's example trains what its export computes by transformers alone: pairs have types, labels are independent."""
    script, rows, out = tmp_path / "pairs.py", tmp_path / "rows.jsonl", tmp_path / "out"
    code = changed_template(blocks(PAGE)[0])
    names = 'class_names((label for table in tables.values() for label in table["label"]))'.replace('"', "'")
    assert names in code and "['text', 'label']" in code
    split = "class_names(name for table in tables.values() for names in table['label'] for name in names.split())"
    assert split.replace("'", '"') in PAGE
    script.write_text(code.replace(names, split).replace("['text', 'label']", "['text', 'title', 'label']"))
    texts = [{"title": f"w{i % 40}", "text": f"w{i % 7} w{i % 3}", "label": ["", "a", "a b"][i % 3]} for i in range(90)]
    write_rows(rows, texts)
    base = Path(template_arguments[template_arguments.index("--model_name_or_path") + 1])
    pairing = AutoTokenizer.from_pretrained(base)
    pairing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A </s>:0 $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    shutil.copytree(base, tmp_path / "base")
    pairing = save_with_types(pairing, tmp_path / "base")
    given = ("--model_name_or_path", tmp_path / "base", "--train_files", rows, "--max_steps", 2, "--eval_steps", 2)
    forks.succeed(out, *template_arguments, *given, script=script, config="single", num_processes=1)
    assert re.search(r"Speed: \S+ samples/sec, \d+ labels/sec", log_of(out))
    model = AutoModelForSequenceClassification.from_pretrained(out / "export").eval()
    assert model.config.problem_type == "multi_label_classification" and model.config.id2label == {0: "a", 1: "b"}
    inputs = AutoTokenizer.from_pretrained(out / "export")("w1 w2", "w3", return_tensors="pt")
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1]]
    module = shipped.load(script)
    with torch.no_grad():
        assert torch.equal(module.predict(model, inputs | {"labels": None, "row": None}), model(**inputs).logits)
    one = {"title": "w1 w2", "text": "w3", "label": "b"}
    row = module.make_row(pairing, module.Args(max_length=9), ["a", "b"], one, 0)
    assert row["labels"].tolist() == [0, 1] and row["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert module.count({"labels": module.make_row(pairing, module.Args(), ["a"], texts[0], -1)["labels"]}) == 0


def test_bases_that_cannot_label_texts(tmp_path):
    """One message each: no padding, another padding in the model, a length beyond its positions. A decoder finds the end by it."""
    auto, sizes = "AutoModelForSequenceClassification", {"vocab_size": 44, "max_position_embeddings": 20}
    tokenizer = new_word_tokenizer(WORDS)

    def read(kind: str, length: int = 16, **config) -> Any:
        transformers.AutoConfig.for_model(kind, **sizes | config).save_pretrained(tmp_path)
        save_with_types(tokenizer, tmp_path)
        return classifier_tokenizer(auto, str(tmp_path), length)

    assert read("bert", pad_token_id=None).model_input_names == ["input_ids", "token_type_ids", "attention_mask"]
    assert read("distilbert").model_input_names == ["input_ids", "attention_mask"]
    assert read("llama", pad_token_id=0) and read("roberta", 18, pad_token_id=1)
    for kind, given, said in (
        ("gpt2", {"pad_token_id": 2}, r"is 2, and its tokenizer pads with 0"),
        ("bert", {"length": 21}, r"--max_length is 21, .* made for 20"),
        ("roberta", {"length": 19, "pad_token_id": 1}, r"--max_length is 19, .* made for 18"),
    ):
        refuses(said, read, kind, **given)
    tiny_model().save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", pad_token_id=None)
    tokenizer.save_pretrained(tmp_path)
    assert classifier_tokenizer(auto, str(tmp_path), 8).pad_token_id == 0
    assert load_classifier(auto, str(tmp_path), ["x", "y"]).config.pad_token_id == 0, "that of the tokenizer"
    tokenizer.pad_token = None
    refuses(r"no padding token, .* 16 tokens; .* '</s>'", read, "bert")


@pytest.mark.slow
def test_second_example(forks, template_arguments, tmp_path):
    """The code of docs/token-labels.md takes the place of the template's; it learns, and rows show the label of a token."""
    script = tmp_path / "token_labels.py"
    script.write_text(changed_template("\n\n".join(blocks((ROOT / "docs/token-labels.md").read_text()))))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    texts = [[f"w{(7 * i * j) % 40}" for j in range(1, 4 + i % 5)] for i in range(200)]
    tags = [["ODD" if int(word[1:]) % 2 else "O" for word in text] for text in texts]
    lines = [{"text": " ".join(text), "tags": " ".join(tag)} for text, tag in zip(texts, tags, strict=True)]
    write_rows(rows, lines)
    forks.succeed(out, *template_arguments, "--train_files", rows, script=script)
    evaluations = [record for record in read_metrics(out) if "eval_accuracy" in record]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.05
    assert 0 <= evaluations[0]["eval_accuracy"] < evaluations[-1]["eval_accuracy"] <= 1
    assert "ODD" in (out / "rows.txt").read_text()
    rows.write_text(rows.read_text() + json.dumps({"text": "w1 w2", "tags": "O"}) + "\n")
    assert forks.run(tmp_path / "bad", *template_arguments, "--train_files", rows, script=script) == 2
    assert "rows.jsonl, row 201 has 2 words and 1 tags; give each word a tag" in log_of(tmp_path / "bad")


WITHOUT_NAMES = ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.parametrize("of_base, labels, rows", [
    (["even", "odd", "zero"], ["zero", "even", "odd"], [2, 0, 1]), (["even", "odd", "zero"], ["odd", "even"], [1, 0]),
    # Without names, a class is called by its number, with or without `LABEL_`.
    (WITHOUT_NAMES, ["2", "0", "1"], [2, 0, 1]), (WITHOUT_NAMES, ["LABEL_2", "LABEL_0"], [2, 0]),
    ([0, 1, 2], ["2", "0", "1"], [2, 0, 1]), (["0", "1", "2"], ["LABEL_2", "LABEL_0", "LABEL_1"], [2, 0, 1]),
    (["crane", "ape", "crane"], ["crane", "crane", "ape"], [0, 2, 1]),  # as two classes of ImageNet are called
])  # fmt: skip
def test_rows_of_a_base_go_by_the_names_of_its_classes(of_base, labels, rows, tmp_path):
    """Also where their number differs; a base for several labels at once serves one here."""
    kind = {"num_labels": 3, "problem_type": "multi_label_classification"}
    base = tiny_model("bert", AutoModelForSequenceClassification, **kind)
    base.save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", id2label=dict(enumerate(of_base)))
    module = shipped.load(ROOT / "recipes/template.py")
    model = module.make_model(module.Args(model_name_or_path=str(tmp_path), train_files=["texts.jsonl"]), labels)
    assert torch.equal(model.classifier.weight, base.classifier.weight[rows])
    assert model.config.problem_type is None and [*model.config.id2label.values()] == labels
    assert model.config.label2id == {label: number for number, label in model.config.id2label.items()}
