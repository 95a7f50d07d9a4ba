"""Tests of fields that a chat template does not write: lines, errors for tools, and pairs that differ in nothing else."""

import json
import re
from pathlib import Path

import pytest
from conversations import PAIRS, ROWS_WITH_TOOLS, TOOL, conversation, prepare, save_base, template_of
from datasets import Dataset
from transformers import AutoTokenizer

from accelerate_recipes.conversations.trained_pairs import same_answers
from accelerate_recipes.errors import ConfigError

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [conversation(i, tools=False, system=True) for i in range(30)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("plain"), PLAIN, "<|im_end|>")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("qwen3"), template_of("qwen3"), "<|im_end|>")


def with_field(row: dict, place: int = -1, **fields) -> dict:
    messages = [dict(message) for message in row["messages"]]
    messages[place] |= fields
    return {"messages": messages}


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "mood"])
def test_fields_that_a_template_does_not_write(plain, qwen3, capsys, field):
    """A line names field, first row and count. A template that writes thoughts of the last answer alone writes them."""
    rows = [*CHATS[:3], *(with_field(row, **{field: "Well."}) for row in CHATS[3:8]), *CHATS[8:]]
    prepare(plain, rows)
    said = rf"rows\.jsonl, row 4: .*`{field}`, which 5 of 30 have"
    assert len(re.findall(said, capsys.readouterr().out)) == 1
    early = [with_field(row, 2, **{field: "Well."}) for row in CHATS[:15]]
    rows = [*early[:3], *(with_field(row, **{field: "Well."}) for row in CHATS[15:])]
    prepare(qwen3, rows)
    is_lost = "writes nothing of" in capsys.readouterr().out
    assert is_lost == (field == "mood")


def test_other_columns_of_messages(plain, capsys):
    """Completions, answers of pairs and prompts are looked at too; what has no text to train on is not told."""
    asked, answer = CHATS[0]["messages"][:2], {"role": "assistant", "content": "Yes.", "thinking": "Well."}
    prompts = [[asked[0], asked[1] | {"content": f"{i}?"}] for i in range(30)]
    for name, rows, unit in (
        ("sft", [{"prompt": prompt, "completion": [answer]} for prompt in prompts], "row"),
        ("dpo", [{"prompt": prompt, "chosen": [answer], "rejected": [answer | {"content": "No."}]} for prompt in prompts], "pair"),
        ("grpo", [{"prompt": [*asked, answer, *prompt[1:]]} for prompt in prompts], "row"),
    ):  # fmt: skip
        prepare(plain, rows, name=name)
        assert f"{unit} 1: the chat template writes nothing of `thinking`, which 30 of 30" in capsys.readouterr().out
    named = [with_field(row, name="Ada", weight=1, refusal=None, reasoning_content="") for row in CHATS]
    prepare(plain, [*named[:20], *CHATS[20:]])
    assert "writes nothing" not in capsys.readouterr().out


def test_roles_that_a_template_does_not_know(qwen3, capsys):
    """Templates pass over messages of other roles in silence."""
    for role, number in (("developer", 30), ("tool", 0)):
        prepare(qwen3, [with_field(row, 0, role=role) for row in CHATS])
        said = f"writes nothing of `content of the role {role}`, which 30 of 30 have"
        assert capsys.readouterr().out.count(said) == (number > 0)


def test_system_prompts_that_a_template_does_not_write(plain, tmp_path, capsys):
    """A line names the first row and the count: of a role that is left out, and of messages that a template passes over
    behind the first, or but for the last. Each recipe and form of rows tells it; a blank text is none."""
    turns = (
        "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}<|im_end|>"
        "{% elif m.role == 'assistant' %}A {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    first = "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}<|im_end|>{% endif %}"
    last = "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}"
    bases = {
        name: save_base(tmp_path / name, begin + turns, "<|im_end|>")
        for name, begin in (("none", ""), ("first", first), ("last", last + "{{ ns.s }}<|im_end|>"))
    }

    def lost(base: str, rows: list[dict], name: str = "sft") -> list[str]:
        prepare(bases[base], rows, name=name)
        said = capsys.readouterr().out
        return re.findall(r"(\w+ \d+: the chat template (?:writes nothing|does not write) .*? have);", said)

    asked = [{"messages": row["messages"][1:]} for row in CHATS]
    system, again = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    begun = [{"messages": [system, *row["messages"]]} for row in asked]
    both = [{"messages": [*row["messages"][:3], again, *row["messages"][3:]]} for row in begun]
    first = again | {"role": "developer"}
    late = [{"messages": [first, *row["messages"][:2], system, *row["messages"][2:]]} for row in asked]
    blank = [{"messages": [system | {"content": " "}, *row["messages"]]} for row in asked]
    whole = "the chat template writes nothing of `content of the role {}`, which {} of 30 have"
    each = "the chat template does not write `each message of the role {}, also behind the first message`, which {} of 30 have"
    assert lost("none", [*asked[:20], *begun[20:]]) == [f"row 21: {whole.format('system', 10)}"]
    assert lost("none", [*asked[:20], *blank[20:]]) == lost("first", begun) == lost("last", begun) == []
    assert lost("first", [*begun[:25], *both[25:]]) == lost("last", [*begun[:25], *both[25:]])
    assert lost("first", [*begun[:25], *both[25:]]) == [f"row 26: {each.format('system', 5)}"]
    assert lost("first", late) == [f"row 1: {each.format('system', 30)}"]
    alpaca = [{"instruction": f"{i}?", "output": "Yes.", "system": "Be brief." if i > 7 else ""} for i in range(30)]
    assert lost("none", alpaca) == [f"row 9: {whole.format('system', 22)}"]
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    pairs = [{"prompt": row["messages"][:2]} | answers for row in begun]
    assert lost("none", pairs, "dpo") == [f"pair 1: {whole.format('system', 30)}"]
    prompts = [{"prompt": row["prompt"]} for row in pairs]
    assert lost("none", prompts, "grpo") == [f"row 1: {whole.format('system', 30)}"]
    prepare(plain, both)
    assert "chat template" not in capsys.readouterr().out


def test_tools_that_a_template_does_not_write(plain, qwen3, tmp_path):
    """Without them the model would learn to call nothing, from answers to nothing."""
    called = [{"messages": row["messages"]} for row in ROWS_WITH_TOOLS]
    tools = [row | {"tools": json.dumps([TOOL])} for row in CHATS]
    said = r"rows\.jsonl, row 2: .*`{}`, which {} of 31 have"
    with pytest.raises(ConfigError, match=said.format("tool_calls", 30)):
        prepare(plain, [CHATS[0], *called])
    with pytest.raises(ConfigError, match=said.format("tools", 30)):
        prepare(plain, [CHATS[0] | {"tools": "[]"}, *tools])
    both = [CHATS[0] | {"tools": None}, *ROWS_WITH_TOOLS]
    with pytest.raises(ConfigError, match=f"{said.format('tool_calls', 30)}(.|\n)*{said.format('tools', 30)}"):
        prepare(plain, both)
    pairs = [PAIRS[0] | {"prompt": row["messages"][:2], "tools": row["tools"]} for row in tools]
    with pytest.raises(ConfigError, match=r"pair 1: the chat template writes nothing of `tools`, which 30 of 30"):
        prepare(plain, pairs, name="dpo")
    several = AutoTokenizer.from_pretrained(plain)
    several.chat_template = {"default": PLAIN, "tool_use": template_of("qwen3")}
    several.save_pretrained(tmp_path / "several")
    with pytest.raises(ConfigError, match=said.format("tools", 30)):  # trl takes its default
        prepare(plain, [CHATS[0], *tools], "--chat_template_path", str(tmp_path / "several"))
    with pytest.raises(ConfigError, match=r"--chat_template_path .*bare: .*chat_template is not set"):
        prepare(plain, CHATS, "--chat_template_path", str(save_base(tmp_path / "bare", None)))
    prepare(qwen3, both)
    template = str(qwen3 / "chat_template.jinja")
    prepare(plain, both, "--chat_template_path", template, "--new_tokens", "<think>", "</think>")


def test_pairs_that_differ_in_nothing_that_is_written(plain, qwen3, capsys):
    def pair(number: int, **answers: dict) -> dict:
        return {"prompt": [{"role": "user", "content": f"{number}?"}]} | {
            side: [{"role": "assistant", "content": "2", "reasoning_content": "Well."} | answers.get(side, {})]
            for side in ("chosen", "rejected")
        }

    thoughts = [pair(i, rejected={"reasoning_content": "A guess."}) for i in range(30)]
    texts = [pair(i, rejected={"content": "3"}) for i in range(30, 60)]
    with pytest.raises(ConfigError, match=r"both answers are the same.*A guess.*No pair is left: raise --max_length"):
        prepare(plain, thoughts, name="dpo")
    capsys.readouterr()
    prepare(plain, [*thoughts, *texts], name="dpo")
    printed = capsys.readouterr().out
    (train, of), (held, others) = (
        re.search(rf"In (\d+) of (\d+) pairs to {use} on, both answers are the same tokens", printed).groups()
        for use in ("train", "evaluate")
    )
    assert int(train) + int(held) == 30 and int(of) + int(others) == 60
    assert f"left out {train};" in printed
    prepare(qwen3, thoughts, name="dpo")
    assert "the same tokens" not in capsys.readouterr().out


def test_same_answers():
    """Answers are compared as far as they are trained."""
    pairs = {
        "prompt_ids": [[1], [1, 2], [1], [], [1, 2, 3, 4]],
        "chosen_ids": [[5, 6], [5, 6, 7], [5], [5, 6, 7, 8], [5]],
        "rejected_ids": [[5, 6], [5, 6, 8], [5, 6], [5, 6, 7, 9], [6, 7]],
    }
    rows = Dataset.from_dict(pairs)
    assert same_answers(rows, None).tolist() == [0]
    assert same_answers(rows, 4).tolist() == [0, 1, 4]
    assert same_answers(rows.select([4, 0, 2, 0]), 9).tolist() == [1, 3]
    many = Dataset.from_dict({name: column * 1000 for name, column in pairs.items()})
    assert same_answers(many, 5).tolist() == [*range(0, 5000, 5)]
