"""Tests of decisions: their measures beside plain formulas, temperatures, and what an export answers when it is served."""

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT, STEPS, blocks, environment, log_of, write_rows
from tiny import save_base
from transformers import LlamaConfig, pipeline
from transformers.decision import DecisionConfig
from transformers.utils.import_utils import is_serve_available

from accelerate_recipes.arguments import shipped
from accelerate_recipes.decisions.loss import Question
from accelerate_recipes.decisions.measures import (
    FEWEST,
    best_temperature,
    calibration_error,
    confidence,
    groups_of,
    measure,
    most_frequent,
    reliability,
    softmax,
    summary,
    temper,
)
from accelerate_recipes.decisions.served import Served, compare_decisions
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from recipe_tools.check_export import check_export

SCRIPT = ROOT / "recipes/decide.py"
OPTIONS = {"noul": ("true", "false"), "choice": ("cat", "dog", "cow"), "score": ("0", "1", "2", "3")}


def answer(kind: str, probs: Any, target: Any, name: str = "q") -> dict:
    return {"name": name, "type": kind, "options": OPTIONS[kind], "cross_fitted": [*probs], "target": [*target]}


def drawn(kind: str, number: int, seed: int, soft: bool = False) -> list[dict]:
    """Draw answers whose probabilities are coarse, so that some are equal, and which are neither right nor wrong always."""
    draw, size = np.random.default_rng(seed), len(OPTIONS[kind])
    probs = draw.integers(1, 6, (number, size)) / 1.0
    probs /= probs.sum(-1, keepdims=True)
    targets = draw.dirichlet(np.ones(size), number) if soft else np.eye(size)[[draw.choice(size, p=p) for p in probs]]
    return [answer(kind, p, t) for p, t in zip(probs, targets, strict=True)]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_measures_by_their_definitions(kind, soft):
    answers = drawn(kind, 200, 0, soft)
    found, pairs = measure(answers), [(a["cross_fitted"], a["target"]) for a in answers]
    best = [max(range(len(p)), key=p.__getitem__) for p, _ in pairs]  # of equal ones the first, as it is served
    right = [t[b] for b, (_, t) in zip(best, pairs, strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    losses = [sum(-s * np.log(x) for s, x in zip(t, p, strict=True)) for p, t in pairs]
    assert found["log_loss"] == pytest.approx(np.mean(losses))
    gaps = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15 if number < 14 else 2
        inside = [(max(p), r) for (p, _), r in zip(pairs, right, strict=True) if low <= max(p) < high]
        gaps += abs(sum(r - p for p, r in inside))
    assert found["calibration_error"] == pytest.approx(gaps / 200)
    scores = []
    for option in range(len(OPTIONS[kind])):
        hits = sum(t[option] for b, (_, t) in zip(best, pairs, strict=True) if b == option)
        said, true = best.count(option), sum(t[option] for _, t in pairs)
        precision, recall = hits / said, hits / true
        scores.append(2 * precision * recall / (precision + recall))
    assert found["macro_f1"] == pytest.approx(np.mean(scores))
    if kind == "noul":
        won = [
            t[0] * u[1] * (1 if p[0] > q[0] else 0.5 if p[0] == q[0] else 0)
            for p, t in pairs for q, u in pairs
        ]  # fmt: skip
        all_pairs = sum(t[0] * u[1] for _, t in pairs for _, u in pairs)
        assert found["auroc"] == pytest.approx(sum(won) / all_pairs)
    if kind == "score":
        distances = [abs(sum(i * (x - s) for i, (x, s) in enumerate(zip(p, t, strict=True)))) for p, t in pairs]
        assert found["mean_absolute_error"] == pytest.approx(np.mean(distances))
    assert ("auroc" in found, "mean_absolute_error" in found) == (kind == "noul", kind == "score")


def test_measures_at_the_limits():
    """All true: no pair to compare. A probability of 0 for the right option, one of 1, and an option that is never right."""
    sure = [answer("noul", (1.0, 0.0), (1.0, 0.0))] * 3
    perfect = {"accuracy": 1, "log_loss": 0, "calibration_error": 0, "if_calibrated": 0, "macro_f1": 1}
    assert measure(sure) == perfect
    wrong = measure([*sure, answer("noul", (1.0, 0.0), (0.0, 1.0))])
    assert 100 < wrong["log_loss"] < 200 and wrong["auroc"] == 0.5 and wrong["calibration_error"] == 0.25
    # The last bin has its upper end.
    assert calibration_error(np.array([1.0, 0.95]), np.array([0.0, 1.0])) == pytest.approx(0.475)
    assert reliability(*confidence(sure)) == [(1.0, 1.0, 3)]
    many = [answer("choice", np.full(21, 1 / 21), np.eye(21)[0]) | {"options": [*map(str, range(21))]}]
    assert "macro_f1" not in measure(many) and measure(many)["log_loss"] == pytest.approx(np.log(21))


def test_a_calibrated_model_has_an_error_by_chance():
    """It is the mean of what a calibrated model shows, and smaller on more questions; of one question it is known exactly."""
    draw = np.random.default_rng(1)
    probs = draw.uniform(0.5, 1, 400)
    answers = [answer("noul", (p, 1 - p), (1, 0)) for p in probs]
    seen = [calibration_error(probs, draw.random(400) < probs) for _ in range(300)]
    assert measure(answers)["if_calibrated"] == pytest.approx(np.mean(seen), rel=0.05)
    assert measure(answers[:60])["if_calibrated"] > 2 * measure(answers)["if_calibrated"]
    assert measure([answer("noul", (0.9, 0.1), (1, 0))])["if_calibrated"] == pytest.approx(2 * 0.9 * 0.1, abs=0.06)


def test_groups():
    """All, each name, and a type of several names; at most 20 names, the most frequent ones."""
    few = [answer("noul", (0.5, 0.5), (1, 0), name) for name in "aab"] + [
        answer("score", (1, 0, 0, 0), (1, 0, 0, 0), "c")
    ]
    assert {name: len(own) for name, own in groups_of(few).items()} == {"all": 4, "a": 2, "b": 1, "c": 1, "nouls": 3}
    assert [*groups_of(few[:2])] == ["all"]
    many = [answer("noul", (0.5, 0.5), (1, 0), str(name)) for name in range(30) for _ in range(1 + (name > 9))]
    assert [*groups_of(many)] == ["all", *map(str, range(10, 30))]
    # The most frequent answer of each question: two of two, one of one, and one of one.
    assert most_frequent(few) == 1 and most_frequent([*few, answer("noul", (0.5, 0.5), (0.5, 0.5), "b")]) == 4.5 / 5


def asked(
    number: int, temperature: float = 1.7, seed: int = 0, kind: str = "choice", state: Any = None
) -> list[Question]:
    """Make questions whose answers are drawn from the model's logits divided by a temperature."""
    draw, size = np.random.default_rng(seed), len(OPTIONS[kind])
    logits = draw.normal(size=(number, size)) * 3
    answers = [draw.choice(size, p=p) for p in softmax(logits / temperature)]
    # The labels have half of the mass.
    log_probs = np.log(softmax(logits) / 2)
    states = draw.integers(0, 2**63, number) if state is None else [state] * number
    return [
        Question(row, int(s), "q", kind, OPTIONS[kind], ("A", "B", "C", "D")[:size], tuple(np.eye(size)[a]), tuple(logs))
        for row, (s, a, logs) in enumerate(zip(states, answers, log_probs, strict=True))
    ]  # fmt: skip


def test_temperatures():
    questions = asked(4000)
    found = temper(questions, {}, True)
    assert found.temperatures == {"choice": pytest.approx(1.7, abs=0.07)}
    # Nothing is better beside it.
    scores, shares = (np.array([getattr(q, name) for q in questions]) for name in ("log_probs", "target"))
    best = found.temperatures["choice"]
    losses = [-(shares * np.log(softmax(scores / t))).sum(-1).mean() for t in (best, best * 1.02, best / 1.02)]
    assert losses[0] == min(losses)
    assert found.gains["choice"] == pytest.approx(
        -(shares * np.log(softmax(scores))).sum(-1).mean() - losses[0], abs=1e-3
    )
    raw, cooled = (
        measure([answer("choice", p, q.target) for p, q in zip(probs, questions, strict=True)])
        for probs in (softmax(scores), found.cross_fitted)
    )
    assert cooled["calibration_error"] < 0.03 < 0.09 < raw["calibration_error"]
    # All right, or all answers equal: far from the limits, since one more question has equal shares.
    assert 0.1 < best_temperature(scores[:300], np.eye(3)[scores[:300].argmax(-1)]) < 0.5
    assert best_temperature(scores, np.full_like(scores, 1 / 3)) == pytest.approx(20, rel=1e-3)


def test_a_temperature_is_not_judged_by_what_it_has_seen():
    """Each half of the states gets the temperature of the other half, whatever the order of the rows."""
    even, odd = asked(2000, 0.6, state=2), asked(2000, 3.0, seed=1, state=3)
    mixed = [q for pair in zip(even, odd, strict=True) for q in pair]
    found = temper(mixed, {}, True)
    scores = np.array([q.log_probs for q in mixed])
    assert np.allclose(found.cross_fitted[::2], softmax(scores[::2] / 3), atol=0.05)
    assert np.allclose(found.cross_fitted[1::2], softmax(scores[1::2] / 0.6), atol=0.05)
    assert np.allclose(found.served, softmax(scores / found.temperatures["choice"]))


def test_few_questions_keep_the_temperature_of_the_base():
    questions = asked(FEWEST) + asked(FEWEST - 1, kind="noul")
    found = temper(questions, {"noul": 2, "choice": 3}, True)
    assert [*found.temperatures] == ["choice"]
    scores = np.array([q.log_probs for q in questions[FEWEST:]])
    for probs in (found.served, found.cross_fitted):
        assert np.allclose(probs[FEWEST:], np.pad(softmax(scores / 2), [(0, 0), (0, 1)]))
    # One state cannot judge itself, nor is the model before training changed.
    assert temper(asked(FEWEST, state=5), {}, True).temperatures == temper(questions, {}, False).temperatures == {}


def test_what_is_kept_and_saved(tmp_path):
    """The file of decisions, the log, and the settings of a checkpoint, which has the temperatures of its own log."""
    template = "{{ state }}<|mark|>"
    requests = [
        {"state": {"n": row}, "questions": {"q": {"type": "choice"}}, "answers": {"q": "cat"}} for row in range(300)
    ]
    LlamaConfig().save_pretrained(tmp_path / "base")
    args = shipped.load(SCRIPT).Args(output_dir=str(tmp_path), model_name_or_path=str(tmp_path / "base"))
    base = DecisionConfig(temperature={"score": 0.5, "choice": 4}, chat_template=template)
    served = Served(base, requests, args)
    before, after = (
        {f"eval_{name}": value for name, value in served.measure(asked(300), step).items()} for step in (0, 7)
    )
    # Half of the mass is that of labels: the loss is among all tokens.
    assert before["eval_label_mass"] == pytest.approx(0.5)
    raw = [float(softmax(np.array(q.log_probs))[np.argmax(q.target)]) for q in asked(300)]
    assert before["eval_loss"] == after["eval_loss"] == pytest.approx(-np.log(raw).mean() + np.log(2))
    assert "eval_temperature/choice" not in before and after["eval_temperature/choice"] == pytest.approx(1.7, abs=0.3)
    assert after["eval_log_loss"] < before["eval_log_loss"] and after["eval_accuracy"] == before["eval_accuracy"]
    assert after["eval_temperature_gain/choice"] == pytest.approx(
        before["eval_log_loss"] - after["eval_log_loss"], abs=1e-6
    )
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert len(lines) == 300 and lines[5]["step"] == 7 and lines[5]["state"] == {"n": 5} and "answers" in lines[5]
    kept = lines[5]["answers"]["q"]
    scores = np.array(asked(300)[5].log_probs)
    assert np.allclose(kept["served"], softmax(scores / after["eval_temperature/choice"]), atol=1e-7)
    assert kept["cross_fitted"] != kept["served"] and sum(kept["cross_fitted"]) == pytest.approx(1)

    (saved := tmp_path / "checkpoint-7.partial").mkdir()
    (saved / "metrics.jsonl").write_text(json.dumps(before) + "\n" + json.dumps(after) + "\n")
    served.save_pretrained(saved)
    config = DecisionConfig.from_pretrained(saved)
    assert config.temperature == {"score": 0.5, "choice": after["eval_temperature/choice"]}
    assert DecisionConfig.from_file(saved / "decision.json") == config and config.chat_template == template
    assert (saved / "decision_template.jinja").read_text() == template
    assert "These are the weights after 7 steps." in (saved / "usage.md").read_text()

    text, bars, curves = served.result(before, after)
    assert (tmp_path / "decisions.txt").read_text() == text + "\n"
    assert f"Temperature of choice: {after['eval_temperature/choice']:.3f}; it lowers the log loss by 0." in text
    assert bars.answers["choice"] and [curve.names for curve in curves] == [{"all": "eval_accuracy"}]


def test_the_summary_is_what_a_reader_asks():
    answers = drawn("noul", 100, 0) + [a | {"name": "pet"} for a in drawn("choice", 50, 1)]
    values = {
        f"eval_{name}" if group == "all" else f"eval_{name}/{group}": value
        for group, own in groups_of(answers).items()
        for name, value in measure(own).items()
    }
    lines = summary(values, values, answers).splitlines()
    assert lines[0].split("  ")[0] == "held-out questions" and {len(line) for line in lines[:4]} == {len(lines[0])}
    assert [line.split()[:2] for line in lines[1:4]] == [["all", "150"], ["q", "100"], ["pet", "50"]]
    said = next(line for line in lines if line.startswith("0.5 ")).split()
    sure = [a for a in answers[:100] if a["cross_fitted"][0] >= 0.5]
    hits = sum(a["target"][0] for a in sure)
    true = sum(a["target"][0] for a in answers[:100])
    assert said == ["0.5", *(f"{value:.3f}" for value in (len(sure) / 100, hits / len(sure), hits / true))]
    matrix = np.array([line.split()[1:] for line in lines[-3:]], float)
    assert [line.split()[0] for line in lines[-3:]] == [*OPTIONS["choice"]] and matrix.sum() == 50
    assert matrix.trace() / 50 == pytest.approx(values["eval_accuracy/pet"])


# Exports


PAIRS = ["".join(pair) for pair in itertools.product("ABCDEFGHI", repeat=2)]
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
# Two marks in a prompt, with labels that the template itself writes.
OWN = "<s>{{ state }}{% for q in questions %} {{ q.labels[0] }}?<|mark|>{% endfor %}"
OWN_LABELS = {"choice": [*PAIRS[:30]], "noul": ["Yes", "No"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folder with a base, settings with a template of their own, and rows of 30 and of 100 options."""
    folder = tmp_path_factory.mktemp("decisions")
    tokenizer = new_bpe_tokenizer(
        ["Which number? Is it even? Answer with the label of the option that fits best only"], 310
    )
    tokenizer.add_tokens(["Yes", "No", *PAIRS])
    tokenizer.chat_template = CHAT
    save_base(folder / "base", tokenizer, max_position_embeddings=4096)
    for number, size in ((30, 500), (100, 100)):
        asked = {
            "which": {"type": "choice", "criteria": {str(i): None for i in range(number)}},
            "even": {"type": "noul", "instructions": "Is it even?"},
        }
        numbers = [7 * row % number for row in range(size)]
        rows = [
            {"state": f"row {row}, {n}", "questions": asked, "answers": {"which": str(n), "even": n % 2 == 0}}
            for row, n in enumerate(numbers)
        ]
        write_rows(folder / f"{number}.jsonl", rows)
    DecisionConfig(labels=OWN_LABELS, chat_template=OWN).save_pretrained(folder / "settings")
    return folder


@pytest.fixture(scope="module")
def arguments(place) -> tuple:
    return (
        "--model_name_or_path", place / "base", "--train_files", place / "30.jsonl", "--heldout_share", 0.45, "--max_length", 1024,
        "--max_steps", STEPS, "--save_steps", 3, "--logging_steps", 1, "--total_batch_size", 4, "--learning_rate", 3e-2,
        "--per_device_train_batch_size", 2, "--async_save", "false",
    )  # fmt: skip


def kept(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "decisions.jsonl").read_text().splitlines()]


def largest_difference(lines: list[dict], decide: Any) -> float:
    """Ask for the answers to some held-out rows, and compare their probabilities with those of the last evaluation."""
    found = []
    for line in lines:
        given = decide({name: line[name] for name in ("state", "questions")})
        assert given.keys() == line["answers"].keys()
        for name, answer in line["answers"].items():
            probs = given[name].get("probabilities") or {"true": given[name]["noul"], "false": 1 - given[name]["noul"]}
            assert [*probs] == answer["options"]
            found.append(np.abs(np.subtract([*probs.values()], answer["served"])).max())
    return float(max(found))


def by_the_card(export: Path, monkeypatch) -> Any:
    """Run the code that the card of an export shows, in its folder; return the pipeline that it makes."""
    (code,) = blocks((export / "README.md").read_text())
    monkeypatch.chdir(export)
    exec(code, names := {})
    assert names["answers"]["even"]["type"] == "noul"
    return names["decide"]


@pytest.mark.parametrize("name", ["full", "LoRA, 100 options", "bf16"])
def test_the_pipeline_gives_what_was_evaluated(run, place, monkeypatch, name):
    """To 1e-5 in fp32: two ranks, packed rows, 30 options and 100, of which those beyond Z have labels of two letters; merged."""
    is_many, is_half = "100" in name, name == "bf16"
    more = ("--use_peft", "--max_length", 2048, "--train_files", place / "100.jsonl") if is_many else ()
    out = run(*more, **({"flags": ("--mixed_precision", "bf16")} if is_half else {}))
    lines, settings = kept(out), json.loads((out / "export/decision.json").read_text())
    assert is_many or len(lines) > 200
    assert settings["temperature"].keys() == (set() if is_many else {"choice", "noul"})
    assert len(settings["labels"]["choice"]) == (100 if is_many else 30)
    decide = by_the_card(out / "export", monkeypatch)
    assert type(decide.model).__name__ == "LlamaForCausalLM" and (decide.model.dtype == torch.bfloat16) == is_half
    assert largest_difference(lines[:40], decide) < (3e-2 if is_half else 1e-5)
    assert "<h2>Decisions</h2><pre>held-out questions " in (out / "report.html").read_text()
    said = re.search(r'pipeline\("decision"\) on the export: of 32 questions, .* by at most (\S+)', log_of(out))
    assert float(said[1]) < (3e-2 if is_half else 1e-5)


@pytest.fixture(scope="module")
def own(run, place) -> Path:
    """Output of a run with a template of its own."""
    return run("--decision_config", place / "settings")


def test_a_template_of_two_marks_after_a_kill(own, killed_and_resumed, arguments, place, monkeypatch):
    """The resumed run decides as the whole one; both questions of a row share a prompt, with the labels of the settings."""
    _, resumed = killed_and_resumed(SCRIPT, *arguments, "--decision_config", place / "settings", whole=own)
    for name in ("decisions.jsonl", "export/decision.json", "checkpoint-3/decision.json"):
        assert (resumed / name).read_text() == (own / name).read_text()
    labels = json.loads((own / "export/decision.json").read_text())["labels"]
    assert labels | OWN_LABELS == labels
    assert (own / "export/decision_template.jinja").read_text() == OWN
    assert largest_difference(kept(resumed)[:40], by_the_card(resumed / "export", monkeypatch)) < 1e-5


def test_adapters_alone(run, place, monkeypatch):
    """An export that is not merged says at the end of its run how it is asked: with the settings of its own folder."""
    out = run("--use_peft", "--merge_adapter", "false", "--decision_config", place / "settings")
    said = log_of(out).splitlines()[-1]
    assert said.endswith("which no server asks by the settings in its folder; its README.md says how to ask them")
    decide = by_the_card(out / "export", monkeypatch)
    assert largest_difference(kept(out)[:40], decide) < 1e-5
    # By its name, its settings are not read.
    with pytest.raises(ValueError, match="reads at most 26 options"):
        largest_difference(kept(out), pipeline("decision", model=str(out / "export"), device="cpu"))
    assert "by at most" in check_export(out / "export", None, 5)


def test_an_export_that_decides_otherwise(own, tmp_path):
    """Another temperature, as if it had been forgotten, is an error; probabilities of another step are not compared."""
    out = shutil.copytree(own, tmp_path / "out")
    said = check_export(out / "export", None, 5).splitlines()[-1]
    assert said.startswith('pipeline("decision") on the export: of 32 questions')
    assert "Answer: " in check_export(out / "export", ["1"], 5)
    settings = json.loads((out / "export/decision.json").read_text())
    (out / "export/decision.json").write_text(json.dumps(settings | {"temperature": {}}))
    with pytest.raises(ConfigError, match="does not decide as the model that was evaluated: of 32 questions, prob"):
        check_export(out / "export", None, 5)
    write_rows(out / "decisions.jsonl", (line | {"step": 3} for line in kept(out)))
    assert "decisions.jsonl is of step 3, and the export of another" in compare_decisions(out / "export")
    (out / "decisions.jsonl").unlink()
    assert "not compared, there is no " in compare_decisions(out / "export")


@pytest.mark.skipif(
    not is_serve_available(), reason="NOT TESTED with `transformers serve`: install requirements-dev.txt"
)
def test_transformers_serve(own, tmp_path):
    """A server on this machine, given decision.json, answers 30 options by the template of the export."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    export = str(own / "export")
    program = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    words = ["serve", export, "--decision-config", f"{export}/decision.json", "--host", "127.0.0.1", "--port", port]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([*program, *words], env=environment(tmp_path), stdout=log, stderr=log)
    try:
        decide = partial(posted, f"http://127.0.0.1:{port}/v1/systemone", export, server)
        assert largest_difference(kept(own)[:5], decide) < 1e-5
    finally:
        server.kill()
        server.wait()


def posted(url: str, model: str, server: subprocess.Popen, request: dict) -> dict:
    """Ask a server, and wait until it listens."""
    body = json.dumps({"model": model, **request}).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while True:
        try:
            return json.loads(urllib.request.urlopen(asked, timeout=120).read())["answers"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None
        except urllib.error.URLError:
            assert server.poll() is None
            time.sleep(0.3)
