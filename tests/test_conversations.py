"""Tests of conversations: what a row says reaches the template, and the export renders what was trained."""

import contextlib
import copy
import json
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from conversations import (
    CHATML,
    PAIRS,
    PROMPTS,
    ROWS_WITH_TOOLS,
    TOOL,
    call,
    conversation,
    heldout_batches,
    prepare,
    refuse,
    save_base,
    template_of,
    write,
)
from datasets import Dataset, Features
from helpers import ROOT, change_json, log_of, losses, refuses
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers.utils.chat_template_utils import render_jinja_template

from accelerate_recipes import recipe
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.conversations import supervised, trained_pairs
from accelerate_recipes.conversations.exported import ROWS, Exported, TrainedRows, read_exported, render
from accelerate_recipes.conversations.messages import select
from accelerate_recipes.conversations.packed import Packed, count_targets_of
from accelerate_recipes.conversations.rendering import Rendering
from accelerate_recipes.conversations.settings import make_or_load_model
from accelerate_recipes.data.heldout import beginning
from accelerate_recipes.data.passes import map_rows
from accelerate_recipes.data.reading import without_nulls
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.run import Run
from recipe_tools.check_export import check_export
from recipe_tools.preflight import preflight

SCRIPT = ROOT / "recipes/sft.py"
# Templates of well-known models, as trl ships them, and the token that ends an answer.
PUBLISHED = {
    "llama3_1": "<|eot_id|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>", "phi3": "<|end|>", "gptoss": "<|return|>", "deepseekv3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "cohere": "<|END_OF_TURN_TOKEN|>", "lfm2": "<|im_end|>", "llama3": "<|eot_id|>", "llama3_2": "<|eot_id|>",
    "qwen3_instruct_2507": "<|im_end|>", "qwen3_5_think": "<|im_end|>", "qwen3_6": "<|im_end|>", "qwen3_8": "<|im_end|>",
    "lfm2_v2": "<|im_end|>", "lfm2_2_5": "<|im_end|>", "nemotron_3_nano": "<|im_end|>", "gemma4": "<turn|>",
    "muse_glimmer": "<|eot|>",
}  # fmt: skip
WITHOUT_TOOLS = {"gemma", "gemma3", "phi3", "cohere", "llama3", "lfm2", "deepseekv3"}
NOT_A_SYSTEM = {"gemma"}  # templates that refuse a system prompt


def noted(monkeypatch) -> list[tuple[dict, Rendering]]:
    """Return a list that the next comparison fills: each row as it was written, with the last row that it became."""
    compared, differences = [], TrainedRows.differences

    def compare(first: TrainedRows, exported: Exported) -> list[str]:
        rendered = [render(row, exported.tokenizer, **first.settings) for row in first.rows]
        assert [part[:2] for parts in rendered for part in parts] == [part[:2] for part in first.trained]
        compared[:] = [(row, parts[-1]) for row, parts in zip(first.rows, rendered, strict=True)]
        return differences(first, exported)

    monkeypatch.setattr(TrainedRows, "differences", compare)
    return compared


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates(name, tmp_path, capsys, monkeypatch):
    """With tools, a system prompt and several turns, the export renders what is trained, and the tools are in it."""
    tools = name not in WITHOUT_TOOLS
    save_base(tmp_path, template_of(name), PUBLISHED[name])
    compared = noted(monkeypatch)
    prepare(tmp_path, [conversation(i, tools=tools, system=name not in NOT_A_SYSTEM) for i in range(30)])
    assert not (tmp_path / "out" / ROWS).exists(), "a run that only prepares data has no export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(compared) == 16
    if tools:
        for row, (ids, *_) in compared:
            text = tokenizer.decode(ids)
            ours, other = ("weather", '"a"') if "weather" in row["tools"] else ("add", "town")
            assert ours in text and other not in text, "the row's own tools, without the fields of the other rows"
            assert "null" not in text and "None" not in text
    said = re.search(r"(\d+) rows; 0 without a target; with an end (\d+); left out 0; cut 0;", capsys.readouterr().out)
    assert said and said[1] == said[2], "each row ends with an answer, and each answer with its end"
    targets = targets_of(tmp_path)
    assert "It is" in targets or "No, " in targets
    assert "Question" not in targets and "brief" not in targets, targets


def test_a_template_that_does_not_end_answers(tmp_path):
    """GLM's ends an answer with the mark of the next user, so the last answer has no end."""
    folder = save_base(tmp_path, template_of("glm4moe"), "<|user|>")
    refuse(r"no row ends with .* stops at '<\|user\|>', .* or mend the chat template", folder, ROWS_WITH_TOOLS)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), template_of("qwen3"), PUBLISHED["qwen3"])


@pytest.fixture(scope="module", params=["qwen3", "llama3_1", "gptoss"])
def family(request, tmp_path_factory) -> Path:
    """Bases with templates that have little in common."""
    return save_base(tmp_path_factory.mktemp(request.param), template_of(request.param), PUBLISHED[request.param])


def saved_otherwise(change: Callable[[Path], object], saver: type = transformers.PreTrainedTokenizerBase) -> Callable:
    """Make a mutation of what is saved in a folder."""

    def mutate(patch) -> None:
        real = saver.save_pretrained

        def save(self, folder, **settings):
            found = real(self, folder, **settings)
            change(Path(folder))
            return found

        patch.setattr(saver, "save_pretrained", save)

    return mutate


def edit(file: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(re.sub(old, new, (folder / file).read_text()))


dropped_template = saved_otherwise(edit("chat_template.jinja", "assistant", "helper"))
lost_template = saved_otherwise(lambda folder: (folder / "chat_template.jinja").unlink())
changed_end = saved_otherwise(edit("chat_template.jinja", r"<\|(im_end|eot_id|return)\|>", "</s>"))
changed_stop = saved_otherwise(
    edit("generation_config.json", r'("eos_token_id": )\d+', r"\g<1>5"), transformers.GenerationConfig
)


def shifted_mask(patch) -> None:
    real = supervised.rendered

    def rendered(*args, **given):
        found = real(*args, **given)
        place, labels = found.column_names.index("labels"), found["labels"].to_pylist()
        return found.set_column(place, found.field(place), [[[*own[1:], -100] for own in labels]])

    patch.setattr(supervised, "rendered", rendered)


def removed_tools(patch) -> None:
    patch.setattr(supervised, "select", lambda *args: select(*args).remove_columns("tools"))


@pytest.mark.parametrize("mutation, said", [
    (dropped_template, r"row 1(, token \d+: .* was trained, | cannot be rendered)"),
    (lost_template, "row 1 cannot be rendered"),
    (changed_end, r"row 1, token \d+: .* was trained, the export renders .*</s>"),
    (changed_stop, "no row ends with a target"),
    (shifted_mask, r"row 1, token \d+, .*, was (a|no) target of the loss"),
    (removed_tools, r"row 1, token \d+: .* was trained, the export renders "),
])  # fmt: skip
def test_mutations_are_caught_before_the_first_step(family, monkeypatch, mutation, said):
    """Three families of templates: what is exported is not what is trained, or the other way round."""
    mutation(monkeypatch)
    refuse(said, family, ROWS_WITH_TOOLS)


def test_settings_of_the_export_are_those_of_training(tmp_path, monkeypatch):
    """An end that only generation_config.json names is lost if that is not exported; so is a token without an embedding."""
    folder = save_base(tmp_path, template_of("qwen3"), "</s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    prepare(folder, ROWS_WITH_TOOLS)
    first = TrainedRows([], [Rendering([7, 900], [True] * 2)], {}, ends, {})
    exported = read_exported(folder)
    monkeypatch.setattr(TrainedRows, "differences", lambda *_: [])
    assert first.problems(exported) == [f"rows have the token 900, its config.json a vocab_size of {len(tokenizer)}"]
    monkeypatch.setattr(transformers.GenerationConfig, "save_pretrained", lambda *_: None)
    refuse(r"generation stops at '</s>', .* row ends with '.<\|im_end\|>', and no such", folder, ROWS_WITH_TOOLS)


def as_rows(name: str, rows: list[dict]) -> list[dict]:
    """Return pairs in another form that dpo.py takes."""
    sides = ("rejected", "chosen")
    if name == "implicit":
        return [row | {side: [*row["prompt"], *row[side]] for side in sides} | {"prompt": ""} for row in rows]
    if name == "judged":
        return [
            {"prompt": row["prompt"], "tools": row["tools"], "completion": row[side], "score": float(side == "chosen")}
            for row in rows
            for side in sides
        ]
    return rows


@pytest.mark.parametrize("form", ["pairs", "implicit", "judged"])
def test_pairs_as_they_were_written(base, monkeypatch, form):
    """Two rows that differ in tools and in the fields of messages keep their own, in each form; the export renders both."""
    compared = noted(monkeypatch)
    prepare(base, as_rows(form, PAIRS), name="dpo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert len(compared) == 32
    sides = {"chosen": 0, "rejected": 0}
    for row, (ids, *_) in compared:
        text = tokenizer.decode(ids)
        ours, other = ("weather", '"a"') if '"weather"' in row["tools"] else ("add", "town")
        assert ours in text and other not in text and "null" not in text and "None" not in text
        sides["rejected" if "I do not know" in text else "chosen"] += 1
    assert sides == {"chosen": 16, "rejected": 16}


@pytest.mark.parametrize("form", ["pairs", "implicit", "judged"])
def test_tools_that_differ_in_one_field(base, capsys, form):
    """Tools get no fields of other rows' tools, not as nulls either."""
    tools = [[TOOL], [TOOL | {"strict": True}]]
    prepare(base, as_rows(form, [pair | {"tools": tools[i % 2]} for i, pair in enumerate(PAIRS)]), name="dpo")
    text = capsys.readouterr().out.replace("|", "")
    assert "strict" in text and "null" not in text


# The first 16 rows, which are compared with the export, hold none that `datasets` changes.
AMOUNTS = [
    *range(17), 0.7, 2.5, 48.85837012345679, 1e-12, -0.0, 2**53 + 1, 12345678901234567890123, "5", "0.7", None, 100,
]  # fmt: skip


CASES = [
    ("sft", "", False), ("sft", "", True), ("kto", "", False), ("grpo", "", False), ("dpo", "implicit", False),
    ("dpo", "pairs", True), ("dpo", "implicit", True), ("dpo", "judged", False), ("dpo", "judged", True),
]  # fmt: skip


@pytest.mark.parametrize("name, form, as_text", CASES)
def test_values_in_calls_are_trained_as_they_are_written(base, monkeypatch, name, form, as_text):
    """Numbers, texts of digits and nulls, in calls and schemas, in whatever types `datasets` would keep them."""
    trained, rows = [], []
    called = [{"amount": amount, "city": None if i % 3 else "Bern"} for i, amount in enumerate(AMOUNTS)]
    schema = copy.deepcopy(TOOL)
    schema["function"]["parameters"]["properties"]["town"] |= {"default": None, "at": [0.7, 1, 12345678901234567890123]}
    for number, arguments in enumerate(called):
        used = call("weather", **arguments) | {"content": f"Row {number}."}
        if as_text:
            used["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
        # With fields alike, Arrow has a structure for messages and for arguments; as texts, fields differ.
        asked = {"role": "user", "content": f"Question {number}?"} | ({} if as_text else {"tool_calls": None})
        rows.append({"prompt": [asked], "chosen": [used], "tools": json.dumps([schema]) if as_text else [schema]})
    if name == "grpo":
        rows = [{"prompt": row["prompt"] + row["chosen"] + [{"role": "tool", "content": "4"}]} for row in rows]
    elif name == "dpo":
        rows = as_rows(form, [row | {"rejected": [{"role": "assistant", "content": "No."}]} for row in rows])
    else:
        rows = [{"messages": row["prompt"] + row["chosen"], "tools": row["tools"], "label": True} for row in rows]
        rows = rows if name == "kto" else [row | {"label": None} for row in rows]
    for module in ("supervised", "trained_pairs", "answers"):
        place = f"accelerate_recipes.conversations.{module}.content_of_sides"
        monkeypatch.setattr(place, lambda run, train, heldout=None: trained.append(train) or "")
    prepare(base, rows, name=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for row in trained[0]:
        if name == "grpo":
            text = tokenizer.apply_chat_template(row["prompt"], tokenize=False)
        else:
            text = tokenizer.decode(row["prompt_ids"] + row["chosen_ids"] if name == "dpo" else row["input_ids"])
        arguments = called[int(re.search(r"Row (\d+)", text)[1])]
        assert f'"arguments": {json.dumps(arguments)}' in text, text
        assert name == "grpo" or json.dumps(schema) in text


def test_prompts_as_they_were_written(base, capsys, monkeypatch):
    """Prompts of GRPO are compared too; one row's tools, which trl does not pass on, end the run with the remedy."""
    calls = [{"prompt": row["messages"][:-1]} for row in ROWS_WITH_TOOLS]  # messages of calls have other fields
    prepare(base, calls, name="grpo")
    text = capsys.readouterr().out.replace("|", "")
    assert "weather" in text and "null" not in text and "None" not in text
    tools = [row | {"tools": json.dumps([TOOL] if number == 20 else [])} for number, row in enumerate(PROMPTS, 1)]
    refuse(r"row \d+, has 'tools' (.*weather.*), but all prompts are rendered alike", base, tools, name="grpo")
    settings = [row | {"chat_template_kwargs": {"enable_thinking": False}} for row in PROMPTS]
    refuse(r"row 1, has 'chat_template_kwargs' .*--chat_template_kwargs holds for all", base, settings, name="grpo")
    prepare(base, settings, "--chat_template_kwargs", '{"enable_thinking": false}', name="grpo")
    prepare(base, PROMPTS, "--chat_template_kwargs", '{"enable_thinking": false}', name="grpo")
    assert "<think>" in capsys.readouterr().out


def dropped_tools(patch) -> None:
    real = trained_pairs.tokenized

    def tokenized(table: pa.Table, *args, **given):
        place, tools = table.column_names.index("tools"), table.column("tools")
        without = table.set_column(place, table.field(place), pa.nulls(len(table), tools.type))
        return real(without, *args, **given).set_column(place, table.field(place), tools)

    patch.setattr(trained_pairs, "tokenized", tokenized)


@pytest.mark.parametrize("name, rows, mutation", [
    *(("dpo", PAIRS, mutation) for mutation in (dropped_template, lost_template, dropped_tools)),
    *(("grpo", PROMPTS, mutation) for mutation in (dropped_template, lost_template)),
])  # fmt: skip
def test_mutations_are_caught_before_the_first_step_of_others(base, monkeypatch, name, rows, mutation):
    mutation(monkeypatch)
    refuse(r"would not render what is trained(.|\n)*row 1", base, rows, name=name)


def test_an_end_that_no_answer_has(tmp_path, capsys):
    """Answers must end where generation stops, and GRPO's are drawn until the template's end; texts get theirs.

    Base models of this kind stop at another token than their template ends turns with.
    """
    save_base(tmp_path, template_of("qwen3"), "<|endoftext|>")
    rows = [conversation(i, tools=False, system=False) for i in range(30)]
    said = r"generation stops at '<\|endoftext\|>', .* ends with '<\|im_end\|>\\n', and no such token .* --eos_token"
    refuse(said, tmp_path, rows)
    prepare(tmp_path, rows, "--eos_token", "<|im_end|>")
    said = r"generation stops at '<\|endoftext\|>', the first answer ends with '<\|im_end\|>\\n'"
    refuse(said, tmp_path, PAIRS, name="dpo")
    capsys.readouterr()
    prepare(tmp_path, PROMPTS, name="grpo")
    said = r"ends an answer with '<|im_end|>\n', but answers are drawn until '<|endoftext|>'"
    assert said in capsys.readouterr().out
    texts = [{"prompt": f"Question {i}?", "chosen": " Yes.", "rejected": " No."} for i in range(30)]
    prepare(tmp_path, texts, name="dpo")
    prepare(tmp_path, [{"prompt": row["prompt"]} for row in texts], name="grpo")
    long = [row | {"chosen": " Yes." * 20} for row in texts]
    refuse(r"no chosen answer has an end .* raise --max_length", tmp_path, long, "--max_length", "20", name="dpo")
    # The file that says where generation stops is read for data alone too.
    ends = transformers.AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(["<|im_end|>", "</s>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    prepare(tmp_path, PAIRS, name="dpo")
    capsys.readouterr()
    prepare(tmp_path, PROMPTS, name="grpo")
    assert "answers are drawn until" not in capsys.readouterr().out
    prepare(tmp_path, rows)


def test_a_prompt_that_loses_its_end(tmp_path, capsys):
    """Where the rendering of a prompt is not how prompt and answer begin, as trl trains, the difference is shown."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant Think.{% endif %}"
    )
    folder = save_base(tmp_path, template, "<|im_end|>")
    rows = [pair | {"prompt": [{"role": "user", "content": f"A {i}?"}], "tools": None} for i, pair in enumerate(PAIRS)]
    prepare(folder, rows, name="dpo")
    assert re.search(r"16 of the first 16 pairs .*'.*Think\.'", capsys.readouterr().out)


def test_only_the_answers(base, tmp_path, capsys):
    """By default the answers alone are targets, with a template that marks them or not; `false` trains everything."""
    rows = [conversation(i, tools=False, system=True) for i in range(30)]
    prepare(base, rows)
    assert "No," in (targets := targets_of(base)) and "Question" not in targets and "user" not in targets
    assert "rows with" in capsys.readouterr().out, "the template drops thoughts, so rows are added"
    prepare(base, rows, "--assistant_only_loss", "false")
    assert "Question" in targets_of(base) and "brief" in targets_of(base)
    marked = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    prepare(folder := save_base(tmp_path / "marked", marked), rows)
    assert "Question" in targets_of(folder), "marks decide where there are any"
    assert "directly behind" not in capsys.readouterr().out
    prepare(save_base(tmp_path / "behind", marked.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")), rows)
    assert "'</s>' directly behind" in capsys.readouterr().out
    nothing = (
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}{% if 0 %}{% generation %}{% endgeneration %}{% endif %}"
    )
    refuse(r"rows.jsonl, row 1, .*marks none of its answers", save_base(tmp_path / "none", nothing), rows)
    halves = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    for given, flags, is_trained in (
        (halves, (), False),
        (halves, ("--completion_only_loss", "false"), True),
        (rows, ("--completion_only_loss", "false"), False),
    ):
        prepare(base, given, *flags)
        assert ("Question" in targets_of(base)) == is_trained and "No," in targets_of(base)
    texts = [{"text": f"Question {i}"} for i in range(30)]
    prepare(save_base(tmp_path / "texts", None), texts)
    assert "Question" in targets_of(tmp_path / "texts")
    refuse(r"--assistant_only_loss true .* column text ", tmp_path / "texts", texts, "--assistant_only_loss", "true")
    refuse(r"--completion_only_loss .* these have text", tmp_path / "texts", texts, "--completion_only_loss", "true")


def test_rows_that_do_not_end_with_an_answer(base, tmp_path, capsys):
    """They are counted and named, trained with the answers that they have, and left out if they have none."""
    rows = [conversation(i, tools=False, system=False) for i in range(30)]
    for number in (4, 7, 9):
        rows[number] = {"messages": rows[number]["messages"][: 1 if number == 7 else 3]}
    rows[11] = {"messages": [*rows[11]["messages"][:1], {"role": "assistant", "content": ""}]}
    held = ("--eval_files", str(write(tmp_path / "eval.jsonl", [conversation(99, tools=False, system=False)])))
    prepare(save_base(tmp_path, template_of("qwen2_5"), "<|im_end|>"), rows, *held, "--num_train_epochs", "1")
    printed = capsys.readouterr().out
    assert re.search(r"rows.jsonl: 4 of 30 rows .* row 5, .*'And 5\?'", printed)
    assert "2 of them have none, and are left out" in printed and "eval.jsonl: " not in printed.replace(
        "eval.jsonl: messages", ""
    )
    assert "Rows to train on: 28 rows; 0 without a target; with an end 28; left out 2;" in printed
    refuse("none of 2 rows to train on has an answer", tmp_path, [rows[7], rows[11]], *held)


def test_rows_of_answers_beside_trl(tmp_path):
    """With `false`, and where the template marks the answers, rows are those of trl, token for token and target for target."""
    marked = (Path(trl.__file__).parent / "chat_templates/qwen2_5_training.jinja").read_text()
    folder = save_base(tmp_path, marked, "<|im_end|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chats = [json.loads(json.dumps(row)) for row in ROWS_WITH_TOOLS]
    halves = [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:], "tools": r["tools"]} for r in chats]
    for rows, answers in ((chats, False), (chats, True), (halves, False), (halves, True)):
        whole = select(Dataset.from_list(rows), {*rows[0]} - {"tools"}, "here")
        config = trl.SFTConfig(assistant_only_loss=answers, max_length=None, use_cpu=True, bf16=False)
        completion_only = "completion" in rows[0]
        trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=completion_only)
        theirs = trl.SFTTrainer._prepare_dataset(trainer, whole, tokenizer, config, False, None, "train")
        settings = {"text_field": "text", "completion_only": completion_only, "assistant_only": answers, "stops": []}
        make = partial(supervised.rendered, tokenizer=tokenizer, date="", **settings)
        ours = map_rows(whole, make, Features(dict(whole.features) | supervised.RENDERED))
        assert ours.remove_columns(["of_row", "opened"]).features == theirs.features, "and the checksum of a checkpoint"
        for name in theirs.column_names:
            assert ours[name][:] == theirs[name][:], (name, answers)


def test_rows_to_evaluate_on(tmp_path, capsys):
    """They may lie in files of their own, which must not ask what rows of training ask."""
    folder = save_base(tmp_path, None)
    rows = [{"prompt": f"Question {i}", "completion": " Yes.", "id": i} for i in range(3)]
    one = write(tmp_path / "eval.jsonl", [{"prompt": "And?", "completion": " No."}])
    prepare(folder, rows, "--eval_files", str(one))
    assert re.search(r"Evaluation\n\n  row 1: .*\n.*And", (folder / "out/rows.txt").read_text().replace("|", ""))
    said = capsys.readouterr().out
    assert said.count("prompt and completion (prompt, completion), read as texts as they stand") == 2
    assert said.count("as they stand; columns that are not used: id\n") == 1
    with pytest.raises(ConfigError, match=r"2 of 2 rows of --eval_files begin as rows of .* do; remove them from one"):
        prepare(folder, rows, "--eval_files", str(write(tmp_path / "eval.jsonl", rows[:2])))
    few = [rows[1], *({"prompt": f"Other {i}", "completion": " No."} for i in range(9))]
    prepare(folder, rows, "--eval_files", str(write(tmp_path / "eval.jsonl", few)))  # a published split may repeat some
    assert "1 of 10 rows of " in (said := capsys.readouterr().out) and "the first is 'Question 1'" in said
    with pytest.raises(ConfigError, match=r"none of 3 rows is left to train on: .*within --max_length 2; raise it"):
        held = write(tmp_path / "eval.jsonl", [rows[0] | {"prompt": ""}])
        prepare(folder, rows, "--max_length", "2", "--eval_files", str(held))


def test_rows_to_evaluate_on_of_another_form(tmp_path, capsys):
    """Texts beside conversations are evaluated as they stand; other columns are an error that says so."""
    folder = save_base(tmp_path, template_of("qwen2_5"), "<|im_end|>")
    (question, answer) = conversation(1, tools=False, system=False)["messages"][:2]
    asked = [[question | {"content": f"{i}?"}] for i in range(3)]
    rows = [{"prompt": prompt, "completion": [answer], "chat_template_kwargs": ""} for prompt in asked]
    one = write(tmp_path / "eval.jsonl", [{"prompt": "And?", "completion": " No."}])
    prepare(folder, rows, "--eval_files", str(one))
    text = (folder / "out/rows.txt").read_text().replace("|", "")
    assert re.search(r"Evaluation\n\n  row 1: .*\n  read +(<s>)?And\?\n  target +No\.<im_end>\n", text)
    with pytest.raises(ConfigError, match=r"eval.jsonl has no column 'prompt'; there are messages: "):
        prepare(folder, rows, "--eval_files", str(write(tmp_path / "eval.jsonl", [{"messages": [question, answer]}])))


def test_rows_that_are_cut(tmp_path, capsys):
    """They are counted where tokens are lost: trl's `bfd` cuts rows, `bfd_split` goes on with the rest."""
    folder = save_base(tmp_path, None)
    rows = [{"text": "Question? And? " * 9}] * 2 + [{"text": f"{i}"} for i in range(30)]
    counts = {"bfd": "cut 2; tokens cut off 62; longest 41;", "bfd_split": "cut 0; tokens cut off 0; longest 41;"}
    for strategy, said in counts.items():
        prepare(folder, rows, "--packing", "true", "--packing_strategy", strategy, "--max_length", "10")
        assert said in (printed := capsys.readouterr().out), printed[-900:]


@pytest.mark.parametrize("name, rows", [("sft", ROWS_WITH_TOOLS), ("dpo", PAIRS), ("grpo", PROMPTS)])
def test_all_rows_are_checked_before_the_first_is_rendered(tmp_path, name, rows):
    """What is wrong with the last row is told at once: the template, which refuses the first one, was not asked."""
    begins = "{{ raise_exception('Rendered') if 'Question 0' in messages[1].content }}"
    refuses = save_base(tmp_path, begins + template_of("qwen3"), "<|im_end|>")
    asked = {"role": "user", "content": "Hi<|im_end|>"}
    last = {"messages": [asked, *rows[1]["messages"][1:]]} if name == "sft" else rows[1] | {"prompt": [asked]}
    refuse("Rendered", refuses, rows, name=name, error=(ConfigError, DataError))
    refuse("row 31", refuses, [*rows, last], name=name, error=DataError)


def test_a_row_that_keeps_a_target_at_its_beginning_alone(tmp_path, capsys):
    """It stays where rows are cut, though nothing is learnt from it, and is counted."""
    answer = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    folder = save_base(
        tmp_path, f"{{% for m in messages %}}{answer}{{{{ messages[0].content }}}}{{% endif %}}{{% endfor %}}"
    )
    number = len(transformers.AutoTokenizer.from_pretrained(folder)("And?", add_special_tokens=False)["input_ids"])
    held = ("--eval_files", str(write(tmp_path / "eval.jsonl", [asked_and_answered("!")])))
    rows = [asked_and_answered("?")] * 29 + [asked_and_answered("And?")]
    prepare(folder, rows, "--truncation_mode", "keep_end", "--max_length", str(number + 1), *held)
    assert "Rows to train on: 30 rows; 1 without a target; " in (printed := capsys.readouterr().out), printed[-900:]
    assert "left out 0" in printed


def asked_and_answered(question: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Question."}]}


# Prepares files of rows, and prints after each the most memory of its own that the process has had, in bytes.
PREPARE = """
import os, sys, threading, time
from accelerate_recipes import recipe
os.environ.pop("LOCAL_RANK")  # this is no rank of a run

def look():
    while True:
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        most[0] = max(most[0], int(status["RssAnon"].split()[0]) << 10)
        time.sleep(0.01)

most, (script, folder, *files) = [0], sys.argv[1:]
threading.Thread(target=look, daemon=True).start()
for file in files:
    flags = ["--max_length", "2000", "--dataset_num_proc", "1", "--output_dir", folder + "/out"]
    recipe.prepare_data([script, "--model_name_or_path", folder, "--train_files", file, *flags])
    print("MOST", most[0])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(fork_server, tmp_path):
    """What four times the text takes more is less than its additional tokens and labels, of 4 and 8 bytes, would take."""
    folder, text, files = save_base(tmp_path, None), "xw kz vb " * 110, []
    for number in (4_000, 16_000):
        files.append(write(tmp_path / f"{number}.jsonl", [{"text": f"{i} {text}"} for i in range(number)]))
    printed = fork_server.run_python(tmp_path, PREPARE, ROOT / "recipes/sft.py", folder, *files)
    few, many = map(int, re.findall(r"MOST (\d+)", printed))
    assert many - few < 12_000 * (4 + 8) * len(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


HELD_OUT = {"texts": [2, 4, 21, 27, 28, 29, 37], "messages": [10, 40, 56, 58]}


@pytest.mark.parametrize("form", HELD_OUT)
def test_which_rows_are_held_out(tmp_path, form):
    """A new version holds out the rows that an older one did: a run that goes on must not be measured on what it was trained on."""
    template = template_of("qwen2_5") if form == "messages" else None
    folder = save_base(tmp_path, template, "<|im_end|>")
    rows = [{"text": f"Question {i}?"} for i in range(60)]
    if form == "messages":
        rows = [conversation(i, tools=i % 2 > 0, system=i % 3 > 0) for i in range(60)]
    batches = heldout_batches(folder, rows, "--heldout_share", "0.1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = "".join(tokenizer.decode(row) for batch in batches for row in batch["input_ids"])
    assert sorted(map(int, re.findall(r"Question (\d+)", said))) == HELD_OUT[form]


def test_documents_longer_than_the_positions_of_a_model(tmp_path):
    """The longest document is compared, as far as it is kept; packed rows may be longer. `prepare` says it in each recipe."""
    bases = {number: save_base(tmp_path / f"{number}", None, max_position_embeddings=number) for number in (20, 32, 48)}
    asked = [f"And Question {i}? " * 3 for i in range(40)]
    texts = write(tmp_path / "texts.jsonl", [{"text": text} for text in asked])
    short = write(tmp_path / "short.jsonl", [{"text": f"{i}?"} for i in range(40)])
    answers = [{"prompt": text, "completion": "No.", "label": True} for text in asked]
    answers += [{"prompt": f"{i}?", "completion": "It is. " * 4, "label": False} for i in range(40)]
    judged = write(tmp_path / "judged.jsonl", answers)
    plain = write(tmp_path / "plain.jsonl", [row | {"label": None} for row in answers])
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": text, "chosen": "No.", "rejected": "Yes."} for text in asked])

    def said(name: str, number: int, file: Path, *flags: str) -> str:
        command = [ROOT / f"recipes/{name}.py", "--model_name_or_path", bases[number], "--train_files", file]
        try:
            recipe.prepare_data([*map(str, command), "--output_dir", str(tmp_path / "out"), *flags])
        except ConfigError as error:
            told = r"document has (\d+) tokens, but \S+/(\d+) is made for (\d+) tokens.*; set --max_length to (\d+)"
            found = re.search(told, f"{error}")
            return " ".join(found.groups()) if found else f"{error}"
        return ""

    whole = ("--packing", "true", "--packing_strategy", "wrapped")
    teacher = ("--teacher_model_name_or_path", str(bases[20]), "--lmbda")
    cases = [
        ("sft", 20, texts, (), "22 20 20 20"),
        ("sft", 20, texts, ("--max_length", "20"), ""),
        ("sft", 32, texts, ("--packing", "true", "--max_length", "100"), ""),
        ("sft", 32, texts, (*whole, "--max_length", "100"), "100 32 32 32"),
        ("sft", 20, short, ("--eval_files", str(texts)), "22 20 20 20"),
        ("sft", 32, texts, ("--pad_to_multiple_of", "21"), "22 32 21 21"),
        ("dpo", 20, pairs, (), "23 20 20 20"),
        ("dpo", 20, pairs, ("--max_length", "20"), ""),
        ("kto", 20, judged, (), "23 20 20 20"),
        ("kto", 32, judged, (), "34 32 32 32"),  # the longest prompt before the longest answer
        ("kto", 32, judged, ("--max_length", "32"), ""),
        ("distill", 48, plain, (*teacher, "0"), "23 20 20 20"),
    ]
    for *case, flags, expected in cases:
        assert said(*case, *flags) == expected, (case, flags)
    drawn = (*teacher, "1", "--max_completion_length", "4", "--max_length", "20")
    assert "answers of 4 tokens leave room for 16" in said("distill", 48, plain, *drawn)


def test_messages_of_parts(tmp_path):
    """Texts are joined, in a column of one type and among messages that are texts; templates would lose them silently."""
    folder = save_base(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}")
    text = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes."}]
    rows = [[message | {"content": f"{i} {message['content']}"} for message in text] for i in range(30)]

    def divided(message: dict) -> dict:
        halves = message["content"][:2], message["content"][2:]
        return message | {"content": [{"type": "text", "text": half} for half in halves]}

    parts = [[*map(divided, row)] for row in rows]
    seen = set()
    for given in (rows, parts, rows[:9] + parts[9:], parts[:9] + rows[9:]):
        prepare(folder, [{"messages": row} for row in given])
        seen.add((folder / "out/rows.txt").read_text())
    assert len(seen) == 1
    image = [text[0] | {"content": [{"type": "image_url", "image_url": "a.png"}]}, text[1]]
    for given in ([*rows[:3], image], [*parts[:3], image]):
        said = "rows.jsonl, row 4: 'messages' .* {'type': 'image_url'"
        refuse(said, folder, [{"messages": row} for row in given], error=DataError)
    refuse(r"'prompt' .*`content`.* parts", folder, [{"prompt": row[:1]} for row in parts], name="grpo")


CHAT = conversation(1, tools=False, system=False)["messages"]
ASKED, ANSWER = CHAT[:1], CHAT[1:2]
OTHER = [{"role": "assistant", "content": "No."}]
WITH_IMAGES = "has the column images: this recipe trains on text only"


def called(arguments: str) -> dict:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


@pytest.mark.parametrize("name, row, said", [
    ("sft", {"messages": "And?"}, "row 1: 'messages' is 'And.', not messages as JSON"),
    ("sft", {"text": CHAT}, "the column text holds messages; .* texts into text"),
    ("sft", {"messages": []}, "row 4: 'messages' has no message; remove the row"),
    ("sft", {"messages": [None, *CHAT]}, "row 4: 'messages' has a message that is null"),
    ("sft", {"messages": [{"role": "user", "text": "And?"}]}, "row 1: 'messages' has a message from user without a text as its content"),
    ("sft", {"messages": [*ASKED, {"role": "assistant", "content": None, "refusal": "No."}]},
     "row 4: 'messages' has a message from assistant without a text as its content"),
    ("sft", {"messages": [*ASKED, {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}}]},
     "row 4: 'messages' .*function_call,.* give tool_calls"),
    ("dpo", {"prompt": ASKED, "chosen": ANSWER, "rejected": [{"role": "assistant", "content": None}]},
     "row 1: 'rejected' has a message from assistant without a text as its content"),
    ("sft", {"messages": [{"content": "And?"}, *CHAT]}, "row 4: 'messages' has a message without a role"),
    ("sft", {"messages": [{"role": 3, "content": "And?"}]}, "row 1: 'messages' .* role that is a text"),
    ("sft", {"messages": [{"role": 3, "content": "And?"}, *CHAT]}, "row 4: 'messages' .* role that is a text"),
    ("sft", {"messages": [called("[1]")]}, r"row 4: 'messages': .*'\[1\]'.* JSON object"),
    ("sft", {"messages": [called("{a")]}, r"row 4: 'messages': .*'{a'.* no JSON: "),
    ("sft", {"messages": CHAT, "chat_template_kwargs": {"tokenize": False}}, r"'chat_template_kwargs' has tokenize,"),
    ("grpo", {"prompt": []}, "row 4: 'prompt' has no message"),
    ("dpo", {"chosen": ANSWER, "rejected": OTHER}, "row 1: the answers .* same one"),
    ("sft", {"messages": CHAT, "tools": "[{"}, "row 1: 'tools' is no JSON"),
    ("sft", {"messages": CHAT, "tools": '{"a": 1}'}, "row 1: 'tools' is .* must be a JSON list"),
    ("sft", {"messages": CHAT, "tools": f"[{'1' * 5000}]"}, "row 1: 'tools' is no JSON: .*4300"),
    ("sft", {"messages": [called('{"a": "\\ud83d"}')]}, r"row 1: 'messages': the arguments .*ud83d.* no JSON"),
    ("sft", {"messages": [called("[" * 100_000)]}, r"row 1: 'messages': the arguments .* no JSON"),
    ("sft", {"messages": CHAT, "images": ["a.png"]}, WITH_IMAGES),
    ("dpo", {"prompt": ASKED, "chosen": ANSWER, "rejected": OTHER, "images": ["a.png"]}, WITH_IMAGES),
    ("grpo", {"prompt": ASKED, "images": ["a.png"]}, WITH_IMAGES),
])  # fmt: skip
def test_rows_of_another_form(base, name, row, said):
    """One message says what is wrong, and in which row where only some are wrong."""
    right = {"sft": {"messages": CHAT}, "grpo": {"prompt": ASKED}}.get(name, row)
    rows = [right if "row 4" in said else row] * 3 + [row] * 3
    refuse(said, base, rows, name=name, error=(ConfigError, DataError))


def test_counts_of_targets():
    """A row's first token is no target, since nothing comes before it; nor is it an end. An end is among the last targets."""

    def rows_of(labels: list[list[int]], *kept: slice) -> Packed:
        return supervised.cut(Dataset.from_dict({"input_ids": labels, "labels": labels}), *kept)

    labels = [[5, 6, 2], [2], [-100, 8], [], [-100, -100, 2]]
    counts, num_ended, seen = count_targets_of(rows_of(labels), {2, 9})
    assert counts.tolist() == [2, 0, 1, 0, 1] and num_ended == 2 and seen == {2}
    labels = [[5, 2, 6, 7, 8, 9], [5, 2, 6, 7, 8], [5, 2, 6, 7, 8, -100], [5, 6, 7], [5, 6, 7, 8, 9, 2]]
    parts = [rows_of(labels, kept) for kept in (slice(None), slice(4), slice(-4, None))]
    assert [count_targets_of(part, {2})[1] for part in parts] == [3, 3, 1]
    assert count_targets_of(parts[-1], {2})[0].tolist() == [3, 3, 2, 2, 3]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_counts_of_targets_are_those_of_batches(tmp_path, monkeypatch, strategy):
    """Also of packed rows, in which the first token of each document is no target: speed and MFU are by these counts."""
    found = []
    monkeypatch.setattr(
        Run, "show_rows", lambda run, tokenizer, first, num_targets, counts: found.append((first, num_targets))
    )
    rows = [{"text": f"Question {i}?" + " And" * (i % 40)} for i in range(1500)]
    packing = ("--packing", "true", "--packing_strategy", strategy, "--max_length", "24")
    prepare(save_base(tmp_path, None), rows, *packing)
    ((first, num_targets),) = found
    batches = [first["Training"].collate([row]) for row in first["Training"].rows]
    assert num_targets.tolist() == [count_next_tokens(batch).item() for batch in batches]


@pytest.mark.parametrize("packing", [(), ("--packing", "true")])
def test_an_end_of_the_user_alone(tmp_path, packing):
    """Where the template ends only the user's messages, the model never learns to stop, though that end is a target."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if m.role == 'assistant' else '</s>' }}{% endfor %}"
    )
    folder = save_base(tmp_path, template)
    rows = [conversation(i, tools=False, system=True) for i in range(30)]
    refuse(r"no row ends with a target.*: .* ends with '", folder, rows, *packing)


def test_rows_that_are_left_out(tmp_path, capsys):
    """trl leaves out rows of which only the prompt fits; the printed line says how many, and of how many rows it packs."""
    folder = save_base(tmp_path, None)
    rows = [{"prompt": f"{i}" + " And" * (30 if i % 3 == 0 else 1), "completion": " Yes."} for i in range(30)]
    held = ("--eval_files", str(write(tmp_path / "eval.jsonl", [{"prompt": "Be brief.", "completion": " No."}])))
    prepare(folder, rows, "--max_length", "20", *held)
    said = "Rows to train on: 20 rows; 0 without a target; with an end 20; left out 10; cut 10; tokens cut off "
    assert said in (printed := capsys.readouterr().out), printed[:900]
    prepare(folder, rows, "--packing", "true", *held)
    assert re.search("1 rows; 0 without a target; with an end 30; packed from 30; cut 0; ", capsys.readouterr().out)


def test_what_a_row_asks_does_not_depend_on_other_rows():
    """Arrow gives messages the fields of other rows' messages, as nulls."""
    message = {"role": "user", "content": "Yes?"}
    rows = Dataset.from_list([{"messages": [message]}, {"messages": [message | {"name": "Ada"}]}])
    one, other, alone = (beginning(row, "messages") for row in (*rows, {"messages": [message]}))
    assert one == alone != other


def test_columns_of_another_form_beside_what_is_read(base, tmp_path):
    """Well-known datasets have messages and their first prompt as a text; only what is trained is compared."""
    prepare(base, [row | {"prompt": "Question?"} for row in ROWS_WITH_TOOLS])
    beside = [row | {"prompt": "Question?", "completion": "Yes."} for row in ROWS_WITH_TOOLS]
    prepare(base, beside, "--columns", "messages=messages")
    prepare(save_base(tmp_path, None), [{"text": f"Question {i}", "prompt": "Question"} for i in range(30)])


def test_data_alone_need_no_precision(tmp_path, monkeypatch):
    """A machine that cannot compute in fp8 prepares the data of a run that does."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: False)
    AcceleratorState._reset_state()
    prepare(save_base(tmp_path, None), [{"text": f"Question {i}"} for i in range(30)])


def test_what_is_not_here(tmp_path):
    """The command that downloads it is one that can be run."""
    file = write(tmp_path / "a.jsonl", [{"text": "a"}])
    command = [str(SCRIPT), "--model_name_or_path", "no/such", "--train_files", str(file)]
    said = f"download {shlex.join(command)}"
    refuses(re.escape(said), recipe.prepare_data, command)


def test_columns():
    rows = [
        {"messages": [call("weather", town="Bern")], "tools": [TOOL], "chat_template_kwargs": {"a": 1}, "id": 3},
        {"messages": [call("add", a=2)], "tools": None, "chat_template_kwargs": None, "id": 4},
    ]
    found = select(Dataset.from_list(rows), {"messages"}, "here")
    texts = [{"messages": [], "tools": json.dumps([{"a": None}]), "chat_template_kwargs": '{"b": null}'}]
    found_in_texts = select(Dataset.from_list(texts), {"messages"}, "here")[0]
    assert found_in_texts == {"messages": [], "tools": [{"a": None}], "chat_template_kwargs": {"b": None}}
    wanted = [[{"content": None} | message for message in row["messages"]] for row in rows]
    assert found[:]["messages"] == wanted, "without the fields of the other rows"
    assert found["tools"][:] == [[TOOL], None] and found["chat_template_kwargs"][:] == [{"a": 1}, {}]
    plain = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}])
    assert select(plain, {"messages"}, "here").features == plain.features, "nothing is rewritten without need"
    assert without_nulls({"a": None, "b": [{"c": None, "d": 0}], "e": False}) == {"b": [{"d": 0}], "e": False}


def test_differences_of_lengths():
    tokenizer = new_bpe_tokenizer(["a b"] * 3, 280)
    ids = tokenizer("a b</s>")["input_ids"]
    settings = {"text_field": "text", "completion_only": False, "assistant_only": False, "stops": []}
    for trained, said in ((ids, ""), (ids[:-1], f"row 1, token {len(ids)}: "), ([*ids, 5], f"token {len(ids) + 1}: ")):
        first = TrainedRows([{"text": "a b"}], [Rendering(trained, [True] * len(trained))], settings, [], {})
        found = first.differences(Exported(tokenizer, None, set()))
        assert said in "".join(found) and len(found) == bool(said)


def test_a_run_is_compared_with_its_export(forks, base, tmp_path, out, command):
    """A sharded run with tools: its export renders the rows as trained; a changed export is noticed."""
    file = write(tmp_path / "rows.jsonl", ROWS_WITH_TOOLS)
    arguments = ("--model_name_or_path", base, "--train_files", file, "--max_length", 1200, "--heldout_share", 0.3)
    log = forks.succeed(out, *arguments, "--max_steps", 2, "--total_batch_size", 2, "--async_save", "false")
    number = len(json.loads((out / ROWS).read_text())["rows"])
    assert f"The export renders the first {number} rows as they were trained" in log, log[-3000:]
    kept = (out / ROWS).read_bytes(), (out / "rows.txt").read_bytes()
    other = ("--train_files", write(tmp_path / "other.jsonl", ROWS_WITH_TOOLS[5:]), "--output_dir", out)
    recipe.prepare_data([str(SCRIPT), *map(str, arguments), *map(str, other)])
    assert kept == ((out / ROWS).read_bytes(), (out / "rows.txt").read_bytes()), "rows of a run stay"
    said = check_export(out / "export", None, 3)
    assert f"The export renders the first {number} rows as they were trained" in said
    assert "generation stops at '<|im_end|>'" in said and "LlamaForCausalLM" in said
    assert re.search(r"Prompt: '<\|im_start\|>system(.|\n)*Answer: .*, 3 tokens, ended by --max_new_tokens 3", said), (
        said
    )
    assert "Hello" in (said := check_export(out / "export", ["Hello"], 1)) and "without the chat template" not in said
    asked = TrainedRows([{"prompt": "1?", "completion": "It is."}], [Rendering([5, 6], [False, True])], {}, [2], {})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("recipe_tools.check_export.kept_rows", lambda *_: asked)
        said = check_export(out / "export", ["Hello"], 1)
        assert "trained as texts, without the chat template with which --prompt asks" in said
    (checkpoint,) = out.glob("checkpoint-*")
    again = ("export", checkpoint, tmp_path / "again")
    assert f"The export renders the first {number} rows as they were trained" in command(*again).stdout
    written = json.loads((out / ROWS).read_text())
    for change, said in (
        ({"trained": [[ids[::-1], targets, ""] for ids, targets, _ in written["trained"]]}, "again does not render what was trained"),
        ({"ends": [5]}, r"rows end with .* it stops at '<\|im_end\|>'"),
    ):  # fmt: skip
        (out / ROWS).write_text(json.dumps(written | change))
        assert re.search(said, printed := command(*again).stderr), printed
    # A file of another run, or of the user, is not compared; the user's own is not overwritten.
    (out / ROWS).write_text(json.dumps(written | {"arguments": written["arguments"] | {"max_length": 7}}))
    said = check_export(out / "export", ["Hello"], 1)
    assert re.search(f"not compared, .*/{ROWS} is of another run, with --max_length 7, not 1200", said), said
    (out / ROWS).write_text("[1, 2]")
    assert f"not compared, {out / ROWS} was not written by a run" in check_export(out / "export", ["Hello"], 1)
    assert forks.run(out, *arguments, "--max_steps", 3, "--total_batch_size", 2) == 2
    assert f"{out / ROWS} was not written by a run, and would be overwritten" in out.with_suffix(".log").read_text()
    assert (out / ROWS).read_text() == "[1, 2]"
    (out / ROWS).write_bytes(kept[0])
    settings = out / "export/generation_config.json"
    whole = settings.read_text()
    settings.write_text(json.dumps(json.loads(whole) | {"eos_token_id": 5}))
    refuses(r"rows end with '<\|im_end\|>'", check_export, out / "export", None, 3)
    settings.write_text(whole)
    template = out / "export/chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    refuses(r"does not render what was trained(.|\n)*row 1, token", check_export, out / "export", None, 3)
    for file in (out / "export").glob("tokenizer*"):
        file.rename(file.with_name(f"away-{file.name}"))
    refuses("cannot be loaded: ", check_export, out / "export", None, 3)
    for file in (out / "export").glob("away-*"):
        file.rename(file.with_name(file.name.removeprefix("away-")))
    refuses(r"is no export: .*whose export is", check_export, out, None, 3)


def test_tokens_of_a_template_beside_adapters(tmp_path, capsys):
    """Rows to spare in the embedding do not make a token known: adapters train no row of it. Without them, they are used."""
    template = "{% for m in messages %}<a>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    save_base(tmp_path / "other", template)
    folder = save_base(tmp_path / "base", None)
    settings = json.loads((folder / "config.json").read_text())
    # Trl makes it a multiple of 64
    for vocab_size in (settings["vocab_size"], 64 * (settings["vocab_size"] // 64 + 1)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(vocab_size)
        model.save_pretrained(folder)
        rows = [conversation(i, tools=False, system=True) for i in range(30)]
        flags = ("--chat_template_path", str(tmp_path / "other"))
        prepare(folder, rows, *flags)
        assert "<a>|" in capsys.readouterr().out
        refuse(r"tokens trl adds: .*\d+, .*\d+\. --use_peft", folder, rows, *flags, "--use_peft")
    prepare(folder, [{"text": f"{i} <b>"} for i in range(30)], "--new_tokens", "<b>", "<c>")
    assert "<b>|" in capsys.readouterr().out


def test_a_base_whose_tokenizer_has_more_tokens_than_its_embedding(tmp_path):
    """Its new tokens get rows, which are trained, also beside adapters."""
    folder = save_base(tmp_path / "base", None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<b>"])
    tokenizer.save_pretrained(folder)
    change_json(folder / "config.json", vocab_size=len(tokenizer) - 1)
    rows = [{"text": f"{i} <b>"} for i in range(30)]
    prepare(folder, rows)
    prepare(folder, rows, "--use_peft")
    args = shipped.load(str(SCRIPT)).Args(model_name_or_path=str(folder), data_only=True)
    model, trained = make_or_load_model(args, tokenizer, ["</s>"])
    assert trained == sorted([tokenizer.eos_token_id, len(tokenizer) - 1]) and model.config.vocab_size == len(tokenizer)


@pytest.mark.slow
def test_adapters_of_a_base_that_stops_elsewhere(forks, tmp_path, out):
    """Rows that are cut after earlier answers are compared with the export too; the run and the check say where it stops."""
    folder = save_base(tmp_path / "base", template_of("qwen3"), "<|endoftext|>")
    file = write(tmp_path / "rows.jsonl", [conversation(i, tools=False, system=True) for i in range(30)])
    arguments = ("--model_name_or_path", folder, "--train_files", file, "--eos_token", "<|im_end|>", "--use_peft")
    size = ("--heldout_share", 0.3, "--max_steps", 1, "--total_batch_size", 2)
    log = forks.succeed(out, *arguments, *size)
    stops = r"Rows end with '<\|im_end\|>', but adapters are .*, which stop at '<\|endoftext\|>'; give"
    renders = "renders the first 16 rows as they were trained"
    assert re.search(stops, log) and renders in log, log[-3000:]
    kept = json.loads((out / ROWS).read_text())
    assert len(kept["trained"]) == 32 == 2 * len(kept["rows"]), "each has an answer before a later question"
    said = check_export(out / "export", ["And?"], 2)
    assert re.search(stops, said) and renders in said, said
    template = out / "export/chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    refuses(r"does not render what was trained(.|\n)*row 1, token ", check_export, out / "export", ["And?"], 2)


def answer_of(export: Path, tied: bool, kind: type = transformers.AutoModelForCausalLM) -> str:
    """Return three tokens that an export writes, as transformers alone (or PEFT) loads it."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(export), kind.from_pretrained(export)
    assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight) == tied
    ids = tokenizer("Question 77", return_tensors="pt")
    return tokenizer.decode(model.generate(**ids, max_new_tokens=3, do_sample=False)[0])


@torch.no_grad()
def check_adapters_alone(out: Path, base: Path, tied: bool, alone: Path) -> None:
    """Check that adapters which are not merged give the merged model's logits: loaded by PEFT's class, and as the card says."""
    export(max(out.glob("checkpoint-*")), alone)
    assert "77<yes><no>" in answer_of(alone, tied, AutoPeftModelForCausalLM)
    assert "288 tokens, 288 rows" in check_export(alone, ["Question 77"], 2)
    ids = torch.arange(288).unsqueeze(0)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(out / "export")(ids).logits
    (lines,) = re.findall("```python\n(.*?)```", (alone / "README.md").read_text(), re.DOTALL)
    found = {"folder": str(alone)}
    exec(lines, found)
    for model in (found["model"], AutoPeftModelForCausalLM.from_pretrained(alone)):
        torch.testing.assert_close(model.eval()(ids).logits, wanted, rtol=1e-4, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_new_tokens_of_adapters(forks, tmp_path, tied):
    """Under FSDP adapters train the rows of new tokens alone; both exports answer with them, and a resume is exact."""
    folder = save_base(tmp_path / "base", None, tie_word_embeddings=tied, initializer_range=0.3)
    lora = ("--use_peft", "--merge_adapter", "--lora_dropout", 0, "--async_save", "false", "--save_steps", 10)
    file = write(tmp_path / "rows.jsonl", [{"prompt": f"Question {i}", "completion": "<yes><no>"} for i in range(32)])
    size = ("--max_steps", 40, "--total_batch_size", 8, "--learning_rate", 0.03, "--logging_steps", 1)
    arguments = ("--model_name_or_path", folder, "--train_files", file, "--heldout_share", 0.1, *size, *lora)
    arguments = (*arguments, "--new_tokens", "<yes>", "<no>")
    out, resumed = tmp_path / "whole/out", tmp_path / "resumed/out"
    for place in (out, resumed):
        place.parent.mkdir()
    forks.succeed(out, *arguments)
    shutil.copytree(out / "checkpoint-30", resumed / "checkpoint-30")
    assert "77<yes><no>" in answer_of(out / "export", tied)

    before = load_file(folder / "model.safetensors")
    files = ("model.safetensors", "adapter/adapter_model.safetensors")
    after, adapter = (load_file(out / "export" / file) for file in files)
    layers = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    for layer in layers:
        old, new = before[f"{layer}.weight"], after[f"{layer}.weight"]
        assert len(new) == len(old) + 2 and torch.equal(new[:-2], old)
        assert torch.equal(new[-2:], adapter.pop(f"base_model.model.{layer}.token_adapter.trainable_tokens_delta"))
    assert all(".lora_" in name for name in adapter)
    check_adapters_alone(out, folder, tied, tmp_path / "alone")

    assert forks.run(resumed, *arguments) == 0 and "(step 30" in log_of(resumed), log_of(resumed)[-3000:]
    for name, tensor in load_file(resumed / "export/model.safetensors").items():
        assert torch.equal(tensor, after[name]), name
    assert losses(resumed) == losses(out)


def test_a_model_that_reads_images(base, tmp_path):
    """One whose text part was not tried is refused by name, before its weights are read, by a run and by preflight."""
    for config in (transformers.PaliGemmaConfig(), transformers.AyaVisionConfig(), transformers.FuyuConfig()):
        folder = tmp_path / config.model_type
        shutil.copytree(base, folder)
        config.architectures = ["PaliGemmaForConditionalGeneration"]
        config.save_pretrained(folder)
        said = f"{config.model_type}, which also reads images or sound"
        refuses(said, load_model, str(folder), "sdpa")
        command = [str(SCRIPT), "--model_name_or_path", str(folder), "--train_files", str(base / "tokenizer.json")]
        refuses(said, preflight, [str(ROOT / "accelerate_configs/fsdp_full.yaml"), *command])


def test_commands_of_the_page(base, games_file, tmp_path, at_the_root, command):
    """The commands of docs/rows.md run, with a model and texts that are here."""
    texts = write(tmp_path / "texts.jsonl", [{"text": f"Question {i}. Yes."} for i in range(30)])
    here = {"outputs/demo-c4/export": str(base), "outputs/demo/export": str(base), "my_texts.jsonl": str(texts)}
    (block, other) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/rows.md").read_text(), re.DOTALL)
    printed = []
    for line in (block + other).splitlines():
        if not line.startswith("#"):
            words = [here.get(word, word) for word in shlex.split(line)[3:]]
            more = ["--output_dir", tmp_path / "out"] if ".py" in line else ["--max_new_tokens", 2]
            more += ["--train_files", games_file] if "chess" in line and ".py" in line else []
            printed.append(command(*words, *more).stdout)
    assert "Rows to train on: " in printed[0] and "target |" in printed[0]
    assert "Rows to train on: " in printed[1] and "target |" in printed[1]
    assert "2 tokens, ended by" in printed[2]


def targets_of(folder: Path) -> str:
    return "".join(re.findall(r"target \|(.*)", (folder / "out/rows.txt").read_text())).replace("|", "")


def weighted(number: int, **answer) -> list[dict]:
    return [
        {"role": "user", "content": f"What is {number} + 1?"},
        {"role": "assistant", "content": "WRONG", "weight": 0} | answer,
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": f"It is {number + 1}.", "weight": 1},
    ]


MARKED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.reasoning }}{% endgeneration %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("name", ["qwen2_5", "phi3", "marked"])
def test_messages_of_weight_0(name, tmp_path):
    """They are no targets, nor are their ends; rows of prompt and completion too. Nobody trains them without a word."""
    folder = save_base(tmp_path, MARKED if name == "marked" else template_of(name), PUBLISHED.get(name, "</s>"))
    rows = [{"messages": weighted(i, **({"reasoning": "Hm."} if i % 2 else {}))} for i in range(30)]
    with pytest.raises(ConfigError, match=r"messages of weight 0, .* remove --assistant_only_loss false"):
        prepare(folder, rows, "--assistant_only_loss", "false")
    prepare(folder, rows)
    end = PUBLISHED.get(name, "</s>").replace("|", "")
    said = re.sub(rf"It is \d+\.(\\n|{end})+| |\\n", "", targets_of(folder))
    assert not said and targets_of(folder).count("It is") == 6, targets_of(folder)
    assert "WRONG" in (folder / "out/rows.txt").read_text().replace("|", "")
    rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    prepare(folder, rows)
    assert "WRONG" not in targets_of(folder) and "It is" in targets_of(folder)
    names = {"user": "human", "assistant": "gpt"}
    turns = [[(names[m["role"]], m["content"]) for m in weighted(i)] for i in range(30)]
    for field, value in (("train", False), ("loss", 0)):
        marks = {"WRONG": {field: value}}
        marked = [{"conversations": [{"from": a, "value": b} | marks.get(b, {}) for a, b in row]} for row in turns]
        prepare(folder, marked)
        assert "WRONG" not in targets_of(folder) and "It is" in targets_of(folder)


def test_weights_that_say_nothing(tmp_path):
    """A part that is the same for every message, between messages of other weights, is nobody's."""
    constant = MARKED.replace("{{ m.reasoning }}", "Hm.")
    folder = save_base(tmp_path, constant)
    with pytest.raises(ConfigError, match=r"row 1, .*message 'Hm.'"):
        prepare(folder, [{"messages": weighted(i)} for i in range(30)], "--assistant_only_loss", "true")
    said = "message 1, of weight 0"
    with pytest.raises(ConfigError, match=said):
        dropping = MARKED.replace(
            "{{ m.content }}</s>{% endgeneration %}", "{{ m.content|trim('W') if 0 }}</s>{% endgeneration %}"
        )
        rows = [{"messages": weighted(i)} for i in range(30)]
        prepare(save_base(tmp_path / "b", dropping), rows, "--assistant_only_loss", "true")
    folder, rows = save_base(tmp_path / "c", MARKED), [{"messages": weighted(i, content="")} for i in range(30)]
    prepare(folder, rows, "--assistant_only_loss", "true")
    assert re.fullmatch(r"( *It is \d+\.</s>)+", targets_of(folder)), "an empty answer has an end"
    rows = [{"messages": weighted(i, weight=0.5 if i == 7 else 0)} for i in range(30)]
    with pytest.raises(DataError, match=r"row 8: 'messages' has a message of weight 0.5; .* give 0 or 1"):
        prepare(folder, rows, "--assistant_only_loss", "true")
    rows = [{"messages": weighted(i)[:2]} for i in range(30)]
    refuse(r"none of \d+ rows to train on has .* roles and weights", folder, rows, "--assistant_only_loss", "true")


TEXTS = [
    ("sft", [{"text": f"<s>Question {i}. Yes."} for i in range(30)]),
    ("sft", [{"prompt": f"<s>Question {i}.", "completion": " Yes."} for i in range(30)]),
    ("dpo", [{"prompt": f"<s>Question {i}.", "chosen": " Yes.", "rejected": " No."} for i in range(30)]),
    ("grpo", [{"prompt": f"<s>Question {i}."} for i in range(30)]),
]


@pytest.mark.parametrize("name, rows", TEXTS)
def test_texts_with_a_begin_token(tmp_path, capsys, name, rows):
    """A text that begins with the begin token, as one that a template has rendered, gets no second one."""
    folder = save_base(tmp_path, None)
    for given in (rows, json.loads(json.dumps(rows).replace("<s>", ""))):  # without it, the tokenizer adds it
        prepare(folder, given, name=name)
        said = re.sub(r"\n  (target|read) +\| ", "|", capsys.readouterr().out)
        assert "<s>|Qu" in said and "<s>|<s>" not in said


@pytest.mark.parametrize("name, rows", [
    ("sft", [{"text": f"Question {i}. Yes.</s>\n"} for i in range(30)]),
    ("sft", [{"prompt": f"Question {i}.", "completion": " Yes.</s> \n"} for i in range(30)]),
    ("dpo", [{"prompt": f"Question {i}.", "chosen": " Yes.</s>\n", "rejected": " No.</s>\n"} for i in range(30)]),
])  # fmt: skip
def test_texts_with_an_end_and_a_line_break(tmp_path, capsys, name, rows):
    """They get no second end; the export renders them as they are trained, without the line break."""
    prepare(save_base(tmp_path, None), rows, name=name)
    said = capsys.readouterr().out
    assert said.count("</s>") == len(re.findall(r"\|</s>\n", said)) == len(re.findall(r"\n  target +\| .*", said)) > 3


@pytest.mark.parametrize("name, rows", TEXTS[1:])
def test_prompts_that_are_texts_beside_a_template(base, capsys, name, rows):
    flags = ("--eos_token", "</s>") if name == "sft" else ()
    with contextlib.suppress(ConfigError):
        prepare(base, rows, *flags, name=name)
    answers = {"sft": "answer=completion", "dpo": "chosen=chosen rejected=rejected"}
    remedy = {key: f"--columns question=prompt {value}" for key, value in answers.items()}
    said = capsys.readouterr().out
    assert "the chat template" in said and "is not used" in said and remedy.get(name, "lists of messages") in said


@pytest.mark.parametrize("template, row, said", [
    ("{{ raise_exception('No.') if messages[0].content == 'A' }}", [{"role": "user", "content": "A"}, CHAT[1]], "No."),
    ("{% include 'a' %}", CHAT, "no loader for this environment"),
    ("{{ messages[0].content + 1 }}", CHAT, "can only concatenate"),
])  # fmt: skip
def test_a_template_that_refuses_a_row(tmp_path, template, row, said):
    """The message says in which row of which file."""
    folder = save_base(tmp_path, template + MARKED)
    rows = [{"messages": conversation(i, tools=False, system=False)["messages"]} for i in range(30)]
    rows[17] = {"messages": row}
    number = 1 if row == CHAT else 18
    refuse(rf"rows.jsonl, row {number}, .*{said}", folder, rows)


def test_a_template_that_refuses_a_pair(tmp_path):
    refusing = "{{ raise_exception('No.') if messages[-1].content == 'A' }}"
    rows = [row | {"tools": None} for row in PAIRS]
    rows[11] |= {"chosen": [{"role": "assistant", "content": "A"}]}
    folder, judged = save_base(tmp_path, refusing + MARKED), as_rows("judged", rows)
    (number,) = (number for number, row in enumerate(judged, 1) if row["completion"] == rows[11]["chosen"])
    for given, place in ((rows, 12), (judged, number)):
        refuse(rf"rows.jsonl, row {place}, .*No\.", folder, given, name="dpo")


def test_arguments_that_cannot_be(base):
    twice = "--new_tokens has an empty token, or one twice: '"
    settings = '{"tokenize": false, "conversation": [], "a": 1}'
    of_a_model = ("--use_peft", "--new_tokens", "<a>", "--chat_template_path", str(base))  # adapters would train rows
    for name, rows, flags, said in (
        ("sft", ROWS_WITH_TOOLS, ("--new_tokens", "<a>", "<a>"), twice),
        ("sft", ROWS_WITH_TOOLS, ("--new_tokens", ""), twice),
        ("sft", ROWS_WITH_TOOLS, of_a_model, "is a model, whose tokens trl would add to the embedding"),
        (
            "grpo",
            PROMPTS,
            ("--chat_template_kwargs", settings),
            "_kwargs has conversation, tokenize, which is no variable",
        ),
    ):
        refuse(said, base, rows, *flags, name=name)


def test_the_template_with_marks():
    """It renders ChatML as its authors describe it, and marks what the assistant says."""
    marked = (ROOT / "recipes/chat_templates/chatml.jinja").read_text()
    tokenizer = new_bpe_tokenizer(["a b"] * 3, 280)
    messages = conversation(1, tools=False, system=True)["messages"]
    for asked in (False, True):
        one, other = (
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=asked)
            for template in (CHATML, marked)
        )
        assert one == other
    (text,), (places,) = render_jinja_template([messages], chat_template=marked, return_assistant_tokens_mask=True)
    assert [text[begin:end] for begin, end in places] == ["Yes.<|im_end|>\n", "No, 1.<|im_end|>\n"]
