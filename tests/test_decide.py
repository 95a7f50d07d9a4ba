"""Tests of recipes/decide.py: its loss is that of plain transformers, one prompt at a time, under every division.

Rows of all forms ask the same, bad ones are refused by their number, and an export gives the probabilities of the evaluation.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny_images
import torch
from helpers import ROOT, STEPS, evaluations, launch_ok, log_of, trajectory, write_rows
from tiny import save_base, tiny_composite
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.decision import DecisionConfig, label_token_ids

from accelerate_recipes import recipe
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.trained_rows import EMPTY
from accelerate_recipes.decisions import prompts
from accelerate_recipes.decisions.loss import DecisionLoss
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.losses import count_labels
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.mixers import unpack_documents
from accelerate_recipes.models.probes import mixers_in
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.models.weights import initialize
from accelerate_recipes.run import DataReady, Run

SCRIPT = ROOT / "recipes/decide.py"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
ANIMALS, TIMES = ("cat", "dog", "cow"), ("once", "twice", "often")
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys(ANIMALS)}
SCORE = {"type": "score", "instructions": "How often?", "criteria": list(TIMES)}
NOUL = {"type": "noul", "instructions": "A pet?"}


def tokenizer_of(template: str | None = TEMPLATE) -> Any:
    """Make a tokenizer in which AA to AZ are tokens, and Yes and No."""
    words = "\n".join(["Yes", "No", *(f"A{chr(65 + n)}" for n in range(26))])
    tokenizer = new_bpe_tokenizer([f"{words}\nI saw a cat dog cow today.\nAnswer with the letter only."] * 9, 420)
    tokenizer.chat_template = template
    return tokenizer


def row(number: int) -> dict:
    """Make a row of one to three questions; options come in several orders, and some answers are shares or null."""
    animal, times = ANIMALS[number % 3], number // 3 % 3
    criteria = dict.fromkeys(ANIMALS[number % 2 :] + ANIMALS[: number % 2])
    questions = {"animal": CHOICE | {"criteria": criteria}, "times": SCORE, "pet": NOUL}
    answers = {
        "animal": animal,
        "times": [times, {"0": 0.5, "2": 0.5}][number % 2],
        "pet": [True, {"true": 0.7}, None][number // 3 % 3],
    }
    kept = list(questions)[: 1 + number % 3]
    return {
        "state": f"{number}: I saw a {animal} today {TIMES[times]} {'. ' * (number % 7)}",
        "questions": {name: questions[name] for name in kept},
        "answers": {name: answers[name] for name in kept},
    }


ROWS = [row(number) for number in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decide")
    save_base(folder / "base", tokenizer_of(), initializer_range=0.3)
    write_rows(folder / "rows.jsonl", ROWS[:48])
    write_rows(folder / "heldout.jsonl", ROWS[48:])
    return folder


@pytest.fixture(scope="module")
def arguments(folder) -> tuple:
    return (
        "--model_name_or_path", folder / "base", "--train_files", folder / "rows.jsonl", "--eval_files", folder / "heldout.jsonl",
        "--max_length", 200, "--max_steps", STEPS, "--save_steps", 3, "--logging_steps", 1, "--total_batch_size", 12,
        "--learning_rate", 1e-2, "--async_save", "false", "--per_device_eval_batch_size", 3,
    )  # fmt: skip


def plain(model: Any, tokenizer: Any, rows: list[dict]) -> tuple[torch.Tensor, int]:
    """Sum the cross-entropy of the answers by plain transformers, one prompt at a time, and count the questions."""
    total, number, config = torch.zeros(()), 0, DecisionConfig()
    for one in rows:
        for inputs, (question,) in config.prepare_inputs(
            {"state": one["state"], "questions": one["questions"]}, tokenizer
        ):
            answer = one["answers"][question.name]
            shares = {"true": {"true": 1.0}, "{'true': 0.7}": {"true": 0.7, "false": 0.3}}.get(
                str(answer).lower(), answer
            )
            shares = shares if isinstance(shares, dict) else {str(shares): 1.0}
            if answer is not None:
                ids = label_token_ids(tokenizer, tuple(question.labels))
                log_probs = model(input_ids=inputs["input_ids"]).logits[0, -1].float().log_softmax(-1)
                total = total - sum(shares.get(o, 0) * log_probs[i] for o, i in zip(question.options, ids, strict=True))
                number += 1
    return total, number


@pytest.fixture
def prepared(folder, tmp_path, monkeypatch):
    """Prepare rows as a run does; return the sides that it would show."""

    def prepare(rows: Any, *flags: object, base: Path = folder / "base") -> dict[str, Any]:
        shown = []

        def show(run: Run, tokenizer: Any, sides: dict, num_targets: Any, classes: Any) -> None:
            shown.append(sides)
            raise DataReady

        monkeypatch.setattr(Run, "show_rows", show)
        file = rows if isinstance(rows, Path) else write_rows(tmp_path / "rows.jsonl", rows)
        given = {"--model_name_or_path": base, "--train_files": file, "--eval_files": folder / "heldout.jsonl"}
        given |= {"--output_dir": tmp_path / "out", "--max_length": 200} | dict(
            zip(flags[::2], flags[1::2], strict=True)
        )
        recipe.prepare_data([str(SCRIPT), *(str(word) for pair in given.items() if pair[1] for word in pair)])
        return shown[0]

    return prepare


def asked(side: Any) -> list[dict]:
    return [question for text in side.rows.documents["questions"] for question in json.loads(text)]


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("kind, changes", [
    ("llama", {}), ("qwen2", {}), ("gemma3_text", {"final_logit_softcapping": 3.0}), ("cohere", {"logit_scale": 0.3}),
    ("qwen3_5", {}), ("gemma3", {}),
])  # fmt: skip
def test_loss_and_gradient_are_those_of_plain_transformers(prepared, tmp_path, kind, changes, packing):
    """In batches with a place that no row fills; composites decide by their text part, and are compared whole."""
    base, tokenizer = tmp_path / "base", tokenizer_of()
    if is_whole := kind in ("qwen3_5", "gemma3"):
        tokenizer.add_tokens([f"<image {n}>" for n in range(10)], special_tokens=True)
        whole = tiny_composite(kind, len(tokenizer)).eval()
        whole.save_pretrained(base)
        tokenizer.save_pretrained(base)
    else:
        save_base(base, tokenizer, model_type=kind, **{"initializer_range": 0.3} | changes)
        whole = AutoModelForCausalLM.from_pretrained(base)
    side = prepared(ROWS[:48], "--packing", packing, base=base)["Training"]
    model = load_model(str(base), "auto", packing == "true", dtype=torch.float32)
    if mixers := mixers_in(model):
        unpack_documents(model, mixers)
    total, number, filler = 0.0, 0, side.rows[0] | {name: EMPTY[name] for name in side.rows[0]}
    loss_fn = DecisionLoss()
    for first in range(0, len(side.rows), 3):
        batch = side.collate([side.rows[i] for i in range(first, min(first + 3, len(side.rows)))] + [filler])
        loss = loss_fn(model, batch)
        loss.backward()
        total, number = total + loss.item(), number + int(count_labels(batch))
    expected, found = plain(whole, AutoTokenizer.from_pretrained(base), ROWS[:48])
    expected.backward()
    assert number == found == 91 and total == pytest.approx(expected.item(), rel=1e-6)
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        own = theirs[
            name.replace("model.", "model.language_model.", 1) if is_whole and name not in theirs else name
        ].grad
        assert (parameter.grad - own).norm() <= 1e-5 * own.norm() + 1e-6, name


def test_options_alone_are_those_of_their_question(prepared, folder):
    """Questions of a batch have different numbers of options."""
    side = prepared(ROWS[:24])["Training"]
    batch, model = side.collate(list(side.rows)), load_model(str(folder / "base"), "auto", True, dtype=torch.float32)
    among_all, _ = DecisionLoss().log_probs(model, batch)
    numbers = [len(question.options) for question in batch["questions"]]
    own = [values[:number].log_softmax(-1) for values, number in zip(among_all, numbers, strict=True)]
    targets = [torch.tensor(question.target) for question in batch["questions"]]
    expected = -sum((target * values).sum().item() for target, values in zip(targets, own, strict=True))
    assert len({*numbers}) > 1 and DecisionLoss(options_only=True)(model, batch).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_any_division(run):
    """Losses, gradients and evaluations are the same on 1, 2 and 3 ranks, for any micro-batch."""
    found = []
    for config, ranks, size in (("single", 1, 12), ("fsdp_full", 2, 2), ("fsdp_grad_op", 3, 1)):
        out = run("--per_device_train_batch_size", size, "--max_steps", 3, config=config, num_processes=ranks)
        found.append([*trajectory(out), *evaluations(out), *evaluations(out, "eval_log_loss")])
    assert len(found[0]) == 7 and len({loss for loss, _ in found[0][:3]}) == 3
    for other in found[1:]:
        assert [*map(pytest.approx, other)] == found[0]


def test_padded_rows_are_evaluated_alike_and_bf16_nearly(run):
    """The first evaluation is that of packed rows."""
    packed = evaluations(run())[0]
    assert evaluations(run("--max_steps", 1, "--packing", "false"))[0] == pytest.approx(packed, rel=1e-6)
    rounded = run("--max_steps", 1, flags=("--mixed_precision", "bf16"))
    assert evaluations(rounded)[0] == pytest.approx(packed, rel=0.02) and asked_by_pipeline(rounded) < 0.05


def asked_by_pipeline(out: Path) -> float:
    """Return how far the probabilities of the pipeline are from those of the last evaluation, as a run has said."""
    return float(re.search(r"on the export: .* at most (\S+)", log_of(out))[1])


def test_a_killed_run_goes_on(killed_and_resumed, run, arguments):
    """Bit by bit, with a data worker; the export of both gives the probabilities of the last evaluation."""
    outs = killed_and_resumed(SCRIPT, *arguments, whole=run())
    for name in ("decisions.jsonl", "export/model.safetensors", "export/decision.json"):
        one, other = ((out / name).read_bytes() for out in outs)
        assert one == other
    assert max(map(asked_by_pipeline, outs)) < 1e-5
    assert evaluations(outs[0])[-1] < evaluations(outs[0])[0] - 0.5
    assert "read   | <s>|" in (outs[0] / "rows.txt").read_text() and "target | :/" in (outs[0] / "rows.txt").read_text()


def test_adapters_many_options_and_a_template_of_ones_own(arguments, tmp_path):
    """By the launcher: one prompt with two marks, merged adapters, labels beyond Z in the settings of the export."""
    (tmp_path / "own").mkdir()
    template = "{{ state }}{% for q in questions %}\n{{ q.instructions }} {{ q.labels|join(' ') }}:<|mark|>{% endfor %}"
    (tmp_path / "own/decision_template.jinja").write_text(template)
    options = [f"option {n}" for n in range(30)]
    questions = {"one": CHOICE | {"criteria": dict.fromkeys(options)}, "other": NOUL}
    rows = [
        {"state": f"s{n}", "questions": questions, "answers": {"one": options[n % 30], "other": n % 2 == 0}}
        for n in range(60)
    ]
    given = (
        "--train_files",
        write_rows(tmp_path / "rows.jsonl", rows),
        "--eval_files",
        write_rows(tmp_path / "e.jsonl", [r | {"state": f"e{n}"} for n, r in enumerate(rows[:40])]),
    )
    given += (
        "--decision_config",
        tmp_path / "own",
        "--use_peft",
        "--max_steps",
        2,
        "--save_steps",
        0,
        "--options_only",
    )
    done = launch_ok(tmp_path, "fsdp_full", SCRIPT, *arguments, *given, "--output_dir", tmp_path / "out")
    assert float(re.search(r"on the export: of 32 questions, .* at most (\S+)", done.stdout)[1]) < 1e-5
    settings = json.loads((tmp_path / "out/export/decision.json").read_text())
    assert settings["chat_template"] == template
    assert settings["labels"]["choice"] == [*map(chr, range(65, 91)), "AA", "AB", "AC", "AD"]
    assert (
        "documents" in (tmp_path / "out/rows.txt").read_text()
        and "/AC" in done.stdout + (tmp_path / "out/rows.txt").read_text()
    )


def one(questions: Any = None, answers: Any = None, **more: Any) -> list[dict]:
    """Make rows of which the second has these questions and answers."""
    return [row(1), {"state": "s", "questions": questions or {"q": CHOICE}, "answers": answers or {"q": "cat"}} | more]


LABELLED = [{"text": f"t{n}", "label": label} for n, label in enumerate(("a", "b", "a"))]
REFUSED = {
    "an unknown option": (one(answers={"q": "hen"}), "row 2: 'hen' is none of the options of 'q': cat, dog, cow"),
    "another case": (one(answers={"q": "Cat"}), "row 2: 'Cat' is none"),
    "shares": (one(answers={"q": {"cat": 0.5}}), "row 2: the shares of 'q' are {'cat': 0.5}, which do not add up to 1"),
    "negative": (one(answers={"q": {"cat": 1.5, "dog": -0.5}}), "row 2: the shares of 'q'"),
    "a level": (one({"q": SCORE}, {"q": 3}), "row 2: '3' is none of the options of 'q': 0, 1, 2"),
    "a half level": (one({"q": SCORE}, {"q": 1.5}), "row 2: '1.5' is none"),
    "a truth as level": (one({"q": SCORE}, {"q": True}), "row 2: 'true' is none"),
    "a probability": (one({"q": NOUL}, {"q": 1.5}), "row 2: the shares of 'q'"),
    "no truth": (one({"q": NOUL}, {"q": "perhaps"}), "row 2: 'perhaps' is none of the options of 'q': true, false"),
    "no question": (one({"q": None}), "row 2: it asks no question"),
    "no answer": ([*one(answers={"q": None}), row(2) | {"answers": {}}], "row 3: it has no answer"),
    "another name": (one(answers={"p": "cat"}), "row 2: it answers 'p', which is none of its questions: q"),
    "too long": (one(state="word " * 300), "row 2: a prompt has .* tokens, and none is cut; raise --max_length 200"),
    "many options": (one({"q": CHOICE | {"criteria": dict.fromkeys(map(str, range(60)))}}, {"q": "3"}), "row 2: .*at most 52"),
    "equal options": (one({"q": CHOICE | {"criteria": {"cat": None, "Cat ": None}}}), "row 2: question 'q' has the option 'cat' twice"),
    "equal levels": (one({"q": SCORE | {"criteria": ["lo", "lo"]}}, {"q": 1}), "row 2: question 'q' has the option 'lo' twice"),
    "a list of options": (one({"q": CHOICE | {"criteria": ["a", "b"]}}), "row 2: question 'q': .* an object, {OPTION: null}, and no list"),
    "another type": (one({"q": {"type": "pick"}}), "row 2: Question 'q': `type` must be one of noul, choice, score"),
    "assets": (one(assets={"a": "b"}), "row 2: it has assets, and this recipe trains on text alone"),
    "no JSON": (one('{"q"'), "row 2: 'questions' is '{\"q\"', not an object"),
    "no state": (one(state=None), "row 2: there is nothing to decide on"),
    "no text": ([*LABELLED, {"text": " ", "label": "a"}], "row 4: there is nothing to decide on"),
    "all null": ([{"text": "a", "label": ""}, {"text": "b", "label": " "}], "none of 2 rows to train on has an answer"),
    "flat": ([{"kind": "choice", "question": "?", "options": ["a"], "target": "a"}], "write each row as `state`, `questions`"),
    "no form": ([{"prompt": "a", "completion": "b"}], "text=COLUMN label=COLUMN"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_rows_are_refused_by_their_number(prepared, folder, name):
    rows, said = REFUSED[name]
    heldout = folder / "heldout.jsonl"
    if "text" in rows[0]:
        heldout = write_rows(folder / "labelled.jsonl", [{"text": f"held out {n}", "label": "a"} for n in range(3)])
    with pytest.raises((ConfigError, DataError), match=said):
        prepared(rows, "--eval_files", heldout)


ANSWERS = [
    (NOUL, True, [1, 0]), (NOUL, "No", [0, 1]), (NOUL, 0.25, [0.25, 0.75]), (NOUL, {"true": 0.7}, [0.7, 0.3]),
    (NOUL, {"false": 1}, [0, 1]), (NOUL, {"true": 0.7, "false": None}, [0.7, 0.3]), (CHOICE, {"cat": None, "cow": 1}, [0, 0, 1]), (NOUL, {"type": "noul", "noul": 0.9}, [0.9, 0.1]), (NOUL, {"label": "true"}, [1, 0]),
    (CHOICE, "dog", [0, 1, 0]), (CHOICE, {"dog": 1}, [0, 1, 0]), (CHOICE, {"cat": 0.25, "cow": 0.75}, [0.25, 0, 0.75]),
    (CHOICE, {"type": "choice", "choice": "dog", "probabilities": {"cat": 0.5, "dog": 0.5, "cow": 0}}, [0.5, 0.5, 0]),
    (CHOICE, {"type": "choice", "choice": "dog"}, [0, 1, 0]), (CHOICE, {"label": "cow", "probabilities": None}, [0, 0, 1]),
    (SCORE, 2, [0, 0, 1]), (SCORE, 1.0, [0, 1, 0]), (SCORE, "0", [1, 0, 0]), (SCORE, [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]),
    (SCORE, {"type": "score", "score": 1.3, "legend": {}, "probabilities": {"0": 0.5, "2": 0.5}}, [0.5, 0, 0.5]),
    (CHOICE | {"criteria": {"1": None, "2": None}}, 2.0, [0, 1]), (CHOICE | {"criteria": {"label": None, "b": None}}, {"label": 1}, [1, 0]),
    (CHOICE | {"criteria": {"true": None, "false": None}}, True, [1, 0]),
]  # fmt: skip


@pytest.mark.parametrize("column", ["answers", "gold"])
@pytest.mark.parametrize("as_text", [False, True])
def test_answers_in_all_forms(prepared, column, as_text):
    """An answer is what a row says, or what the pipeline answers; objects may be JSON texts in cells."""
    cell = json.dumps if as_text else lambda value: value
    rows = [
        {"state": f"s{n}", "questions": cell({"q": q}), column: cell({"q": a})} for n, (q, a, _) in enumerate(ANSWERS)
    ]
    targets = [question["target"] for question in asked(prepared(rows)["Training"])]
    assert targets == [pytest.approx(target) for *_, target in ANSWERS]


def test_options_keep_the_order_in_which_they_are_written(prepared):
    """Also where all rows have the same options; so do the fields of a state. A text that is JSON stays a text."""
    orders = [dict.fromkeys(order, "x") for order in (ANIMALS, ANIMALS[::-1], ANIMALS)]
    rows = [
        {"state": {"a": "1", "b": str(n)}, "questions": {"q": CHOICE | {"criteria": c}}, "answers": {"q": "cat"}}
        for n, c in enumerate(orders)
    ]
    rows[1]["state"] = dict(reversed(rows[1]["state"].items()))
    side = prepared(rows)["Training"]
    assert [tuple(question["options"]) for question in asked(side)] == [*map(tuple, orders)]
    texts = [
        AutoTokenizer.from_pretrained(side.run.args.model_name_or_path).decode(ids)
        for ids in side.rows.documents["input_ids"]
    ]
    assert '{"b": "1", "a": "1"}' in texts[1] and '{"a": "1", "b": "2"}' in texts[2]
    (text,) = prepared([row(0) | {"state": '{"b": 1}'}])["Training"].rows.documents["input_ids"][:1]
    assert '{"b": 1}' in AutoTokenizer.from_pretrained(side.run.args.model_name_or_path).decode(text)


def test_structures_of_parquet_have_no_options_of_other_rows(prepared, tmp_path):
    options = [{"cat": "purrs", "dog": "barks"}, {"cow": "moos", "dog": "barks"}]
    rows = [
        {"state": f"s{n}", "questions": {"q": CHOICE | {"criteria": own}}, "answers": {"q": "dog", "p": None}}
        for n, own in enumerate(options)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    found = asked(prepared(tmp_path / "rows.parquet")["Training"])
    assert [{*question["options"]} for question in found] == [{*own} for own in options]


def test_a_composite_is_rendered_by_its_processor_too(prepared, tmp_path, monkeypatch):
    base = tiny_images.save_base(tmp_path / "base", "qwen3_5")
    assert [type(made).__name__ for made in prompts.processor_of(str(base))] == ["Qwen3VLProcessor"]
    rows = [{"state": f"s{n}", "questions": {"q": CHOICE}, "answers": {"q": "cat"}} for n in range(2)]
    heldout = write_rows(tmp_path / "heldout.jsonl", [{**rows[0], "state": "other"}])
    assert len(asked(prepared(rows, "--eval_files", heldout, base=base)["Training"])) == 2
    monkeypatch.setattr(prompts, "processor_of", lambda name: [tokenizer_of(TEMPLATE.replace("</s>", ""))])
    with pytest.raises(DataError, match="row 1: the processor, by which the model is served, reads it otherwise"):
        prepared([row(1)])


def test_a_composite_is_exported_and_asked_whole(forks, arguments, tmp_path):
    tokenizer = tokenizer_of()
    tokenizer.add_tokens([f"<image {n}>" for n in range(10)], special_tokens=True)
    tiny_composite("qwen3_5", len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    given = ("--model_name_or_path", tmp_path / "base", "--max_steps", 1, "--save_steps", 0)
    forks.succeed(tmp_path / "out", *arguments, *given)
    assert asked_by_pipeline(tmp_path / "out") < 1e-5
    settings = json.loads((tmp_path / "out/export/config.json").read_text())
    assert settings["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_a_trial_is_a_step_of_the_longest_rows(folder):
    """Its questions stand as densely as any prompts do."""
    given = {"model_name_or_path": str(folder / "base"), "max_length": 64, "per_device_train_batch_size": 2}
    trial = shipped.load(SCRIPT).trial(shipped.load(SCRIPT).Args(**given))
    model = initialize(trial.make_model(trial.config), 0, "cpu")
    trial.loss_fn(model, trial.batch).backward()
    assert trial.count_fn(trial.batch) == trial.tokens == 8 and trial.batch["input_ids"].shape == (2, 64)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_both_sides_have_one_form_and_columns_other_names(prepared, tmp_path):
    """A file of pandas has an index column."""
    with pytest.raises(ConfigError, match=r"heldout\.jsonl has questions, .* another form"):
        prepared(LABELLED)
    (tmp_path / "rows.csv").write_text(',text,intent\n0,t0,a\n1,"t, 1",\n2,t2,b\n')
    (tmp_path / "heldout.csv").write_text(",text,intent\n0,t4,True\n")
    sides = prepared(tmp_path / "rows.csv", "--eval_files", tmp_path / "heldout.csv", "--columns", "label=intent")
    assert [(q["row"], q["options"], q["target"]) for q in asked(sides["Training"])] == [
        (0, ["True", "a", "b"], [0, 1, 0]), (2, ["True", "a", "b"], [0, 0, 1]),
    ]  # fmt: skip


CLASSES = datasets.Features(
    {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "maybe", "yes"])}
)


WITH_TEXTS = datasets.Features(CLASSES | {"label_text": datasets.Value("string")})


@pytest.mark.parametrize("labels, options, targets, flags", [
    (["spam", "ham", None, "", "spam"], ["ham", "spam"], [1, 0, 1], ()),
    ([10, 2, 10], ["2", "10"], [1, 0, 1], ()),
    ([1.0, 0.0, None], ["0", "1"], [1, 0], ()),
    ([True, False, None], ["true", "false"], [0, 1], ()),
    (["True", "FALSE"], ["true", "false"], [0, 1], ()),
    ([2, 0, 1], ["red", "green", "blue"], [2, 0, 1], ("--label_names", "names.txt")),
    (["Spam", "spam "], ["Spam", "spam "], [0, 1], ()),
    (CLASSES, ["no", "maybe", "yes"], [2, 0], ()),
    (WITH_TEXTS, ["a", "b", "c"], [2, 0, 1], ()),
    ([(0, "zero"), (1, "one")], ["one", "zero"], [1, 0], ()),
])  # fmt: skip
def test_labels_are_one_question(prepared, tmp_path, monkeypatch, capsys, labels, options, targets, flags):
    """Names come from the classes of a column, a column with texts, or a file; an empty cell is null, and no option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    file = tmp_path / "labelled.jsonl"
    if isinstance(labels, datasets.Features):
        file = tmp_path / "labelled.parquet"
        columns = {"text": ["t0", "t1", "t2"], "label": [2, 0, -1], "label_text": ["c", "a", "b"]}
        datasets.Dataset.from_dict({name: columns[name] for name in labels}, features=labels).to_parquet(file)
    elif isinstance(labels[0], tuple):
        write_rows(
            file, [{"text": f"t{n}", "label": label, "label_text": text} for n, (label, text) in enumerate(labels)]
        )
    else:
        write_rows(file, [{"text": f"t{n}", "label": label} for n, label in enumerate(labels)])
    side = prepared(file, "--eval_files", "", "--heldout_share", 0.5, "--instructions", "Which one?", *flags)
    questions = sorted(asked(side["Training"]) + asked(side["Evaluation"]), key=lambda question: question["row"])
    assert {tuple(question["options"]) for question in questions} == {tuple(options)}
    assert sorted(question["target"].index(1) for question in questions) == sorted(targets)
    said = capsys.readouterr().out
    assert ("The labels are numbers" in said) == (options in (["2", "10"], ["0", "1"]))
    assert ("'Spam' and 'spam ' differ in case or spaces alone" in said) == ("Spam" in options)


def test_labels_without_a_name(prepared, tmp_path):
    (tmp_path / "names.txt").write_text("red\ngreen\n")
    rows = [{"text": f"t{n}", "label": n} for n in range(3)]
    given = ("--eval_files", "", "--heldout_share", 0.5, "--label_names", tmp_path / "names.txt")
    with pytest.raises(DataError, match="row 3: the label '2' has no name"):
        prepared(rows, *given)
    (tmp_path / "names.txt").write_text("red\nred\nblue")
    with pytest.raises(ConfigError, match="two labels have the same name, 'red'"):
        prepared(rows, *given)


TURN = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
OPENED = "{% if add_generation_prompt %}<s>assistant:"
TEMPLATES = {
    "none": (None, None, "has no chat template and no decision_template.jinja; give --decision_config"),
    "no generation prompt": (TURN, None, "begins no answer: it has no generation prompt"),
    "system first": ("{{ raise_exception('system first') if messages[0].role != 'system' }}", None, "TemplateError: system first"),
    "an adapter": (TEMPLATE, {"adapter": "lora"}, "names the adapter lora: give the merged model"),
    "few marks": (TEMPLATE, {"chat_template": "{{ state }}{{ questions|length }}<|mark|>"}, "row 2: the template marks 1 places to read for 2 questions"),
    "controls": (
        TEMPLATE, {"sanitize_control_tokens": False, "chat_template": "{{ state }} {{ question.name }}<|mark|>"},
        "row 1: it holds '</s>', which the template does not escape",
    ),
    "a thought": (TURN + OPENED + "<think>\n{% endif %}", None, "begins with a thought"),
    "a channel": (TURN + "{% if false %}<|channel|>{% endif %}" + OPENED + "{% endif %}", None, "begins with a channel"),
    "a date": ("{{ strftime_now('%d') }}" + TEMPLATE, None, "The template writes the date: 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(prepared, folder, tmp_path, capsys, name):
    """What cannot ask for a decision is refused before the model is loaded; what a reader should know is said."""
    template, config, said = TEMPLATES[name]
    base = shutil.copytree(folder / "base", tmp_path / "base")
    tokenizer_of(template).save_pretrained(base)
    if not template:
        (base / "chat_template.jinja").unlink(missing_ok=True)
    if config:
        DecisionConfig(**config).save_pretrained(base)
    rows = [row(0) | {"state": "</s>"} if name == "controls" else row(0), row(1)]
    if name in ("a thought", "a channel", "a date"):
        prepared(rows, base=base)
        assert said in capsys.readouterr().out
    else:
        with pytest.raises((ConfigError, DataError), match=re.escape(said)):
            prepared(rows, base=base)


def test_a_base_with_a_head_of_its_own(prepared, folder, tmp_path):
    base = shutil.copytree(folder / "base", tmp_path / "base")
    (base / "decision_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="decides by a head of its own"):
        prepared([row(0)], base=base)


def test_an_adapter_is_merged_unless_the_base_has_4_bits():
    args = shipped.load(SCRIPT).Args
    assert [args(**given).merge_adapter for given in ({}, {"use_peft": True}, {"use_peft": True, "load_in_4bit": True})] == [
        False, True, False,
    ]  # fmt: skip
    assert args(use_peft=True, merge_adapter=False).merge_adapter is False
