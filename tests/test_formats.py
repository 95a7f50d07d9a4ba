"""Tests of reading: what people have is recognised by its columns, and read as it is written, from any kind of file."""

import datetime
import gzip
import importlib.util
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from conversations import TOOL, call, prepare, refuse, save_base, template_of
from helpers import ROOT, refused, refuses

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.exported import TrainedRows
from accelerate_recipes.conversations.formats import DPO, PAIR, SFT, Form, in_usual_form
from accelerate_recipes.conversations.preferences import to_pairs
from accelerate_recipes.conversations.rendering import Rendering
from accelerate_recipes.conversations.supervised import load_sides
from accelerate_recipes.data import tables
from accelerate_recipes.data.files import check_texts_or_messages, read_files, read_split
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.data.reading import without_nulls
from accelerate_recipes.data.shards import named_shards
from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.hub.cache import HubDataset
from accelerate_recipes.text.text_pairs import PairArgs
from chess_games.games import GamesArgs

ALL = {"sft": (*SFT, Form("text", ("text",), (), is_written=True)), "dpo": DPO}
PAGE = (ROOT / "docs/rows.md").read_text()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table_below(title: str, number: int) -> list[list[str]]:
    """Return the cells of a table of the page."""
    found = PAGE.split(title, 1)[1].split("\n## ")[0].split("|---|---|---|\n")[1:]
    rows = found[number].split("\n\n")[0].splitlines()
    return [[cell.strip("` ") for cell in row.strip("|").split(" | ")] for row in rows]


def made_of(rows: list[dict], folder: Path, name: str = "sft", has_template: bool = True, **mapping: str) -> list[dict]:
    """Return what becomes of rows in a file, with a byte order mark and DOS lines."""
    file = folder / "rows.jsonl"
    file.write_text("\ufeff" + "".join(json.dumps(row) + "\r\n" for row in rows), encoding="utf-8")
    found = in_usual_form(read_files([str(file)]), ALL[name], mapping, "rows.jsonl", has_template=has_template)
    if {*PAIR} <= {*found.column_names}:
        found = to_pairs(found, "rows.jsonl", 0)
    return [without_nulls(row) for row in found]


@pytest.mark.parametrize("has_template", [True, False])
def test_forms_of_the_page(has_template, tmp_path, capsys):
    """Each line of the tables becomes what stands there, and is named in one line."""
    lines = table_below("## Forms of rows", 0 if has_template else 1)
    assert len(lines) == (19 if has_template else 4)
    for name, line, made in lines:
        row = json.loads(line)
        wanted = row if not made.startswith("{") else json.loads(made)
        kind = "dpo" if {"chosen", "score"} & {*row} else "sft"
        if "hh" in name and not has_template:
            row, wanted = row, {"prompt": "\n\nHuman: 1+1?\n\nAssistant:", "chosen": " 2", "rejected": " 3"}
        assert made_of([row], tmp_path, kind, has_template) == [without_nulls(wanted)], name
        (said,) = capsys.readouterr().out.splitlines()
        assert said.startswith("rows.jsonl: ") and (", read as texts" in said) == ("role" not in f"{wanted}"), name


def test_files_of_the_page(tmp_path):
    """Each as it is, and compressed."""
    for name, line, made in table_below("## Files", 0):
        kind = name.split("`")[0]
        separator = {".csv": ",", ".tsv": "\t"}.get(kind)
        text = "\ufeff" + line + ("\r\n" + separator.join(["007", "1"]) if separator else "") + "\r\n"
        (file := tmp_path / f"a{kind}").write_text(text, encoding="utf-8")
        (packed := tmp_path / f"a{kind}.gz").write_bytes(
            b"".join(gzip.compress(b) for b in (text[:9].encode(), text[9:].encode()))
        )
        with pa.CompressedOutputStream(pa.OSFile(str(tmp_path / f"a{kind}.zst"), "wb"), "zstd") as stream:
            stream.write(text.encode())
        for each in (file, packed, tmp_path / f"a{kind}.zst"):
            assert read_files([str(each)]).to_list() == [json.loads(made)], each
        packed.write_bytes(packed.read_bytes()[:-9])
        refuses(rf"a{kind}.gz cannot be read: ", read_files, [str(packed)], error=DataError)


def test_arrow_files_and_folders(tmp_path):
    """Polars writes another form of Arrow than `datasets`; a folder stands for what lies in it and in its folders."""
    table = pa.table({"text": pa.array(["a", "b"], pa.string_view())})
    for number, new in enumerate((pa.ipc.new_file, pa.ipc.new_stream)):
        (folder := tmp_path / f"data/{number}").mkdir(parents=True)
        with new(str(folder / "a.arrow"), table.schema) as file:
            file.write_table(table)
        assert read_files([str(folder / "a.arrow")])["text"][:] == ["a", "b"]
    (tmp_path / "data/README.txt").write_text("notes")
    sft = shipped.load(ROOT / "recipes/sft.py")
    given = ["--model_name_or_path", "none", "--train_files", str(tmp_path / "data")]
    assert parse(sft.Args, given, world_size=1).read_rows()["train"]["text"][:] == ["a", "b"] * 2
    args = sft.Args(train_files=["/volume/data"], model_name_or_path="none")
    assert "no such file" in str(args.problems(1))
    args.elsewhere = ("/volume",)  # of a job, whose machine has it
    assert args.problems(1) == []
    (tmp_path / "data/b.jsonl").write_text('{"text": "c"}\n')
    refuses(r"the folder .*data holds files of several kinds, \.jsonl, \.arrow", parse, sft.Args, given, world_size=1)
    # Of a folder that is a dataset, `datasets` would make numbers of texts.
    for name, content in (("t.tsv", b"code\tn\n007\t1\n"), ("t.csv.gz", gzip.compress(b"code,n\n007,1\n"))):
        (tmp_path / name / "x").mkdir(parents=True)
        (tmp_path / name / "x" / f"train.{name.partition('.')[2]}").write_bytes(content)
        assert read_split(HubDataset(str(tmp_path / name)), "train").to_list() == [{"code": "007", "n": "1"}]


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    """It ends the reading before it is in memory, with file and line, whether it is the first or a later one."""
    monkeypatch.setattr(tables, "MAX_LINE", 2000)
    short, long = (json.dumps({"text": "a" * length}) + "\n" for length in (1980, 2000))
    for number, text in enumerate((long, short * 7 + long), 0):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(DataError, match=rf"a.jsonl, line {[1, 8][number]} has more than "):
            read_files([str(tmp_path / "a.jsonl")])
    (tmp_path / "a.jsonl").write_text(short * 7)
    (tmp_path / "b.json").write_text(json.dumps([{"text": "a" * 1980}] * 7))  # all on one line
    assert read_files([str(tmp_path / "a.jsonl")])[:] == read_files([str(tmp_path / "b.json")])[:]
    (tmp_path / "c.csv").write_text("text,n\n" + "a,1\n" * 5 + "a" * 9000 + ",1\n")
    refuses(r"c.csv, row 6 has more than 64 MiB;", read_files, [str(tmp_path / "c.csv")], error=DataError)


ASKED = [f"Question {i}?" for i in range(30)]
SYSTEM = "Be brief."


def usual(text: str) -> list[dict]:
    roles = ("system", "user", "assistant", "user", "assistant")
    said = zip(roles, (SYSTEM, text, "Yes.", "And?", "It is."), strict=True)
    return [{"role": role, "content": content} for role, content in said]


def turns(text: str, names: tuple[str, ...] = ("human", "gpt")) -> list[dict]:
    said = zip(names * 2, (text, "Yes.", "And?", "It is."), strict=True)
    return [{"from": name, "value": content} for name, content in said]


SAME = {
    "messages": [{"messages": usual(text)} for text in ASKED],
    "messages of parts": [{"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in usual(text)]} for text in ASKED],
    "ShareGPT": [{"conversations": [{"from": "system", "value": SYSTEM}, *turns(text)]} for text in ASKED],
    "other names": [{"conversations": turns(text, ("user", "chatgpt")), "system": SYSTEM, "id": 1} for text in ASKED],
    "messages of ShareGPT": [{"messages": turns(text), "system": SYSTEM} for text in ASKED],
    "roles of ShareGPT": [{"messages": [{"role": t["from"], "content": t["value"]} for t in turns(text)], "system": SYSTEM} for text in ASKED],
    "Alpaca": [{"instruction": "And?", "input": "", "output": "It is.", "system": SYSTEM, "history": [[t, "Yes."]]} for t in ASKED],
    "prompt and response": [{"prompt": "And?", "response": "It is.", "system": SYSTEM, "history": [[t, "Yes."]]} for t in ASKED],
    "question and answer": [{"question": "And?", "answer": "It is.", "system": SYSTEM, "history": [[t, "Yes."]]} for t in ASKED],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), template_of("qwen2_5"), "<|im_end|>")


def trained_on(base: Path, rows: list[dict], monkeypatch) -> list[Rendering]:
    """Return the first rows as they are trained, all targets included."""
    found, differences = [], TrainedRows.differences
    compare = lambda first, exported: found.append(first.trained) or differences(first, exported)  # noqa: E731
    monkeypatch.setattr(TrainedRows, "differences", compare)
    prepare(base, rows)
    return found[0]


def test_the_same_conversation_in_all_forms(base, tmp_path, monkeypatch):
    """Messages, token ids and targets are the same, those of the answers alone, whichever form they come in."""
    wanted = trained_on(base, SAME["messages"], monkeypatch)
    assert len(wanted) == 16 and all(any(targets) and not all(targets) for _, targets, _ in wanted)
    for name, rows in SAME.items():
        assert made_of(rows, tmp_path) == SAME["messages"], name
    for name in ("ShareGPT", "Alpaca"):
        assert trained_on(base, SAME[name], monkeypatch) == wanted, name
    tool = {"type": "function", "function": TOOL["function"]}
    usual = [
        {"messages": [{"role": "user", "content": t}, call("weather", town="Bern"), {"role": "tool", "content": "4"},
                      {"role": "assistant", "content": "It is."}], "tools": [tool]} for t in ASKED
    ]  # fmt: skip
    called = json.dumps({"name": "weather", "arguments": {"town": "Bern"}})
    said = [("function_call", called), ("observation", "4"), ("gpt", "It is.")]
    turns_of = [[{"from": a, "value": b} for a, b in (("human", text), *said)] for text in ASKED]
    shared = [{"conversations": turns_, "tools": json.dumps([tool["function"]])} for turns_ in turns_of]
    assert trained_on(base, usual, monkeypatch) == trained_on(base, shared, monkeypatch)


def test_two_readings_are_an_error(tmp_path):
    """It shows the first row and both commands; either of them is a way out."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name, row, ways in (
        ("sft", {"messages": said, "text": "ab"}, ("messages=messages", "text=text")),
        ("sft", {"instruction": "a", "output": "b", "text": "ab"}, ("instruction=instruction output=output", "text=text")),
        ("sft", {"prompt": "a", "completion": "b", "system": "c"},
         ("prompt=prompt completion=completion", "question=prompt answer=completion")),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"},
         ("prompt=prompt chosen=chosen rejected=rejected", "question=prompt chosen=chosen rejected=rejected")),
    ):  # fmt: skip
        with refused() as error:
            made_of([row], tmp_path, name)
        first, *told, shown = str(error.value).splitlines()
        assert first == "rows.jsonl can be read in 2 ways; say which by one of" and shown.startswith("The first row: {")
        assert [line.partition(" (")[0] for line in told] == [f"- --columns {way}" for way in ways]
        made = [made_of([row], tmp_path, name, **dict(pair.split("=") for pair in way.split())) for way in ways]
        assert made[0] != made[1]
        if "system" in row:
            without = [row | {"system": ""}, row | {"system": None}]
            assert made_of(without, tmp_path, name) == made[0] * 2, "nothing is lost"
        assert ("'c'" in str(made[1]) or "'d'" in str(made[1])) == ("system" in row)


def test_rows_of_two_forms(tmp_path):
    """The error says how many rows have each; the choice of one form names the first row that has it not."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    ways = ("messages=messages (messages: 2 of 3 rows)", "text=text (text: 1 of 3 rows)", "'text': None}")
    with refused("rows.jsonl has rows of 2 forms", *ways) as error:
        made_of([chat] * 2 + [{"text": "a"}], tmp_path)
    assert "--columns" not in str(error.value)
    sft = shipped.load(ROOT / "recipes/sft.py")
    flags = ("--train_files", str(tmp_path / "rows.jsonl"), "--columns", "messages=messages")
    args = parse(sft.Args, ["--model_name_or_path", "none", *flags], world_size=1)
    with pytest.raises(DataError, match="row 3: 'messages' is null, as in 1 of 3 rows"):
        load_sides(args, SimpleNamespace(chat_template="a"), set())


def test_columns_by_other_names(base, tmp_path, capsys):
    row = {"q": "a", "a": "b", "prompt": "unlike", "extra": 1}
    assert made_of([row], tmp_path, prompt="q", completion="a") == [{"prompt": "a", "completion": "b"}]
    assert "(q, a), read as texts as they stand; columns that are not used: extra" in capsys.readouterr().out
    assert made_of([row], tmp_path, question="q", answer="a")[0]["messages"][1]["content"] == "b"
    swapped = made_of([{"question": "b", "answer": "a"}], tmp_path, question="answer", answer="question")
    assert [message["content"] for message in swapped[0]["messages"]] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"has no column 'x', which --columns names; there are q, a, prompt, extra"):
        made_of([row], tmp_path, prompt="x")
    refuses(r"columns q, a, prompt, extra;(.|\n)*- ShareGPT: c", made_of, [row], tmp_path)
    for given, said in (("quest=q", "write NAME=COLUMN, with a NAME of "), ("prompt", "prompt=: write NAME=COLUMN")):
        refuse(said, base, [row], "--columns", given)
    refuse("a name or a column is there twice", base, [row], "--columns", "prompt=q", "completion=q")


def test_columns_that_are_nearly_right(tmp_path, capsys):
    """The error, or the line of what is not used, names what may be meant; rows of another recipe name that recipe."""
    for name, row, said in (
        ("sft", {"messages_": [], "id": 1}, "did you mean --columns messages=messages_?"),
        ("sft", {"prompt": "a", "Completions": "b"}, "did you mean --columns completion=Completions?"),
        ("dpo", {"prompt": "a", "chosen_": "b", "rejected": "c"}, "did you mean --columns chosen=chosen_?"),
        ("sft", {"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo.py trains on pairs of answers"),
        ("dpo", {"conversations": turns("a")}, "sft.py trains on conversations"),
    ):
        with refused(said):
            made_of([row], tmp_path, name)
    made_of([{"question": "a", "answer": "b", "system_": "c", "toolz": "[]", "x": 1}], tmp_path)
    assert capsys.readouterr().out.endswith(
        "not used: system_, toolz, x; did you mean --columns system=system_ tools=toolz?\n"
    )
    with pytest.raises(ConfigError, match=r"no column 'prompt_', .*; did you mean 'prompt'"):
        made_of([{"prompt": "a", "completion": "b"}], tmp_path, prompt="prompt_")
    for row, said in (({"prompts": "a"}, "did you mean 'prompts'"), ({"messages": []}, "trains on conversations")):
        with pytest.raises(DataError, match=rf"no column 'prompt'; .*{said}"):
            check_texts_or_messages(datasets.Dataset.from_list([row]), ["prompt"], "x")


def shared(*turns: tuple[str, object], **others: object) -> dict:
    return {"conversations": [{"from": name, "value": value} for name, value in turns]} | others


@pytest.mark.parametrize("right, wrong, said", [
    (shared(("human", "a")), shared(("Human being", "a")), "'conversations' has a message from 'Human being'; known are"),
    (shared(("human", "a")), shared(("function_call", "{a")), "'conversations' has a message from 'function_call' that is no JSON"),
    (shared(("human", "a")), shared(), "'conversations' has no message"),
    (shared(("human", "a")), shared(("human", None)), "'conversations' has a message from human without a text"),
    (shared(("human", "a")), shared(("human", 5)), "'conversations' has a message from human without a text"),
    (shared(("human", "a")), {"other": 1}, "'conversations' is null, not a text"),
    (shared(("human", "a")), shared(("human", [{"type": "image"}])), "'conversations' .* no text, {'type': 'image'}"),
    (shared(("human", "a"), system="b"), shared(("system", "c"), system="b"), "'system' says something else"),
    ({"question": "a", "answer": "b"}, {"question": "a"}, "'answer' is null, not a text"),
    ({"question": "a", "answer": "b"}, {"question": "a", "answer": 7}, "'answer' is 7, not a text"),
    ({"instruction": "a", "output": "b"}, {"output": "b"}, "'instruction' is null, not a text"),
    ({"instruction": "a", "output": "b", "history": []}, {"instruction": "a", "output": "b", "history": [["a"]]},
     r"'history' has \['a'\]; it must be pairs"),
    ({"question": "a", "chosen": "b", "rejected": "c"}, {"question": "a", "chosen": "b"}, "'rejected' is null"),
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}, {"chosen": "a", "rejected": "b"},
     "'chosen' .*'Human:'"),
])  # fmt: skip
def test_a_row_of_another_form(right, wrong, said, tmp_path):
    with pytest.raises(DataError, match=f"rows.jsonl, row 4: {said}"):
        made_of([right] * 3 + [wrong], tmp_path, "dpo" if "chosen" in right else "sft")


USER, TWO, THREE = (
    {"role": role, "content": text} for role, text in (("user", "1+1?"), ("assistant", "2"), ("assistant", "3"))
)
BRIEF = {"role": "system", "content": SYSTEM}
PARTED = {"prompt": [USER], "chosen": [TWO], "rejected": [THREE]}
ENDED = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "3"}]


@pytest.mark.parametrize("name, row, wanted", [
    ("dpo", {"prompt": [USER], "chosen": [USER, TWO], "rejected": [USER, THREE]}, PARTED),
    ("dpo", {"prompt": "1+1?", "chosen": [USER, TWO], "rejected": [USER, THREE]}, PARTED),
    ("dpo", {"prompt": "1+1?", "chosen": [TWO], "rejected": [THREE]}, PARTED),
    ("dpo", {"prompt": [USER], "chosen": [USER, TWO], "rejected": [THREE]}, PARTED),
    ("dpo", {"prompt": [USER, TWO], "chosen": [TWO], "rejected": [THREE]}, PARTED),
    ("dpo", {"prompt": [BRIEF, USER], "chosen": [USER, TWO], "rejected": [USER, THREE]}, PARTED | {"prompt": [BRIEF, USER]}),
    ("dpo", {"prompt": [BRIEF], "chosen": [USER, TWO], "rejected": [USER, THREE]}, PARTED | {"prompt": [BRIEF, USER]}),
    ("dpo", {"prompt": "", "chosen": [USER, TWO], "rejected": [USER, THREE]}, PARTED),
    ("dpo", {"system": SYSTEM, "prompt": "1+1?", "chosen": [USER, TWO], "rejected": [USER, THREE]}, PARTED | {"prompt": [BRIEF, USER]}),
    ("dpo", {"system": SYSTEM, "instruction": "1+1?", "chosen": "2", "rejected": "3"}, PARTED | {"prompt": [BRIEF, USER]}),
    ("dpo", {"prompt": "1+1?", "chosen": [THREE | {"role": "user"}, TWO, USER, TWO],
             "rejected": [THREE | {"role": "user"}, TWO, USER, THREE]},
     PARTED | {"prompt": [THREE | {"role": "user"}, TWO, USER]}),
    ("dpo", {"conversations": ENDED, "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}}, PARTED),
    ("dpo", {"prompt": "1+1=", "chosen": "1+1=2", "rejected": "1+1=3"}, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
    ("sft", {"prompt": [USER], "completion": [USER, TWO]}, {"prompt": [USER], "completion": [TWO]}),
    ("sft", {"prompt": "1+1?", "completion": [USER, TWO]}, {"prompt": [USER], "completion": [TWO]}),
    ("sft", {"prompt": [USER, TWO], "completion": [TWO]}, {"prompt": [USER], "completion": [TWO]}),
    ("sft", {"prompt": "1+1=", "completion": "1+1=2"}, {"prompt": "1+1=", "completion": "2"}),
    ("sft", {"question": "1+1?", "answer": "1+1?\n\n2"}, {"messages": [USER, TWO]}),
    # These repeat no question.
    ("dpo", {"prompt": [USER, TWO | {"content": "It is"}], "chosen": [TWO], "rejected": [THREE]},
     PARTED | {"prompt": [USER, TWO | {"content": "It is"}]}),
    ("sft", {"prompt": [USER], "completion": [TWO, USER, THREE]}, {"prompt": [USER], "completion": [TWO, USER, THREE]}),
    ("sft", {"prompt": "ab", "completion": "ab"}, {"prompt": "ab", "completion": "ab"}),
])  # fmt: skip
def test_a_question_is_read_once(name, row, wanted, tmp_path):
    """The answers are the targets, whether or not they come with their question, and the question with its answer."""
    assert made_of([row] * 2, tmp_path, name) == [wanted] * 2


def test_texts_of_which_some_repeat_the_question(tmp_path, capsys):
    rows = [{"prompt": "ab", "completion": text} for text in ("c", "abc", "abd")]
    assert made_of(rows, tmp_path) == rows
    assert re.search("2 of 3 answers begin .* row 2", capsys.readouterr().out)


def test_a_prompt_that_is_not_in_its_conversation(tmp_path):
    """It is an error, and the columns that --columns names as they are say which form is meant."""
    row = {"prompt": "2+2?", "chosen": [USER, TWO], "rejected": [USER, THREE]}
    with pytest.raises(DataError, match=r"row 1: 'chosen' .* without .*'2\+2\?'; .* chosen=chosen"):
        made_of([row], tmp_path, "dpo")
    assert made_of([row], tmp_path, "dpo", chosen="chosen", rejected="rejected") == [PARTED]
    for said in ([USER], [THREE | {"role": "user"}, TWO]):
        with pytest.raises(DataError, match=r"row 1: 'completion' (ends with|is a conversation without) the question"):
            made_of([{"prompt": [USER], "completion": said}], tmp_path)


@pytest.mark.parametrize("message", [
    {"role": "human", "value": "1+1?"}, {"from": "user", "content": "1+1?"}, {"from": "human", "value": "1+1?", "id": None},
    {"role": "user", "value": "1+1?", "content": None},
])  # fmt: skip
def test_keys_of_messages(message, tmp_path):
    """A message is read by either name of its keys; one without a text is an error, and no empty message."""
    answer = {name: "gpt" if value in ("human", "user") else value and "2" for name, value in message.items()}
    for name in ("messages", "conversations"):
        row = {name: [message, answer]}
        for rows in ([row], [row, {name: [USER, TWO, USER, TWO | {"more": 1}]}]):
            made = made_of(rows, tmp_path)[0]["messages"]
            assert [(m["role"], m["content"]) for m in made] == [("user", "1+1?"), ("assistant", "2")]
    for wrong in ({"role": "user", "text": "1+1?"}, {"role": "user", "weight": 1}):
        for rows in ([{"messages": [wrong, TWO]}] * 2, [{"messages": [USER, TWO]}, {"messages": [wrong, TWO]}]):
            with pytest.raises(DataError, match=rf"row {3 - rows.count(rows[-1])}: .* from user without a text"):
                made_of(rows, tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet", "json in parquet"])
def test_messages_as_json_texts(kind, tmp_path):
    """In a cell, lists of messages, and single ones, are read; a cell that is something else is an error with its row."""
    rows = [{"chosen": [USER, TWO], "rejected": [USER, THREE]}] * 2

    def read(rows: list[dict], name: str) -> list[dict]:
        texts = {column: [json.dumps(row[column]) for row in rows] for column in rows[0]}
        file = tmp_path / f"rows.{kind[-7:]}"
        if kind == "csv":
            pa.csv.write_csv(pa.table(texts), file)
        else:
            made = pa.json_() if kind.startswith("json") else pa.string()
            arrays = {name: pa.array(column, pa.string()).cast(made) for name, column in texts.items()}
            pq.write_table(pa.table(arrays), file)
        found = in_usual_form(read_files([str(file)]), ALL[name], {}, "rows", has_template=True)
        found = to_pairs(found, "rows", 0) if name == "dpo" else found
        return [without_nulls(row) for row in found]

    assert read(rows, "dpo") == [PARTED] * 2
    sides = {"chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}}
    pair = {"conversations": ENDED[:1]} | sides
    assert read([pair], "dpo") == [PARTED]
    assert read([{"messages": [USER, TWO]}], "sft") == [{"messages": [USER, TWO]}]
    if kind == "csv":
        for wrong, said in ((str([USER, TWO]), r"Python's str\(\) wrote it"), ("1+1", "not messages as JSON")):
            with pytest.raises(DataError, match=rf"row 2: 'messages' .*{said}"):
                made_of([{"messages": json.dumps([USER, TWO])}, {"messages": wrong}], tmp_path)
        for answer in ({"role": "admin", "content": 1}, {"role": "user", "id": 1}, {"value": 3}):  # JSON of a task
            row = {"prompt": "a", "completion": json.dumps(answer)}
            assert made_of([row], tmp_path) == [row]
        output = json.dumps([USER, TWO])
        assert made_of([{"instruction": "a", "output": output}], tmp_path)[0]["messages"][-1]["content"] == output
        both = [{"messages": [USER, TWO]}, {"messages": json.dumps([USER, TWO])}]
        assert made_of(both, tmp_path) == [both[0]] * 2, "some files may hold lists, others JSON texts"
    elif kind == "json in parquet":
        assert read([{"prompt": "a", "completion": "b"}], "sft") == [{"prompt": "a", "completion": "b"}]


@pytest.mark.parametrize(
    "row", [{"text": ["a", "b"]}, {"text": {"0": "a"}}, {"conversations": ["q", "a"]}, {"messages": [[USER]]}]
)
def test_a_file_of_columns(row, tmp_path):
    """An object that holds the values of all rows, as pandas writes it, is an error that says so."""
    refuses(r"one row, in which '\w+' holds \d values, .*; write an object for each row", made_of, [row], tmp_path)
    if "text" not in row:
        refuses(r"row 1: '\w+' has a message without a role", made_of, [row] * 2, tmp_path, error=DataError)


def test_bad_answers_are_not_trained(tmp_path):
    """Rows for KTO say which answers are bad; `label` may mean something else, and in texts it does."""
    texts = [("True", "false"), ("up", "down"), ("thumbs up", "thumbs down")]
    for good, bad in ((True, False), (1, 0), (1, -1.0), *texts):
        halves = [{"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [TWO]}]
        for answer in (*halves, {"messages": [USER, TWO]}):
            rows = [answer | {"label": label} for label in (good, good, bad)]
            refuses(rf"row 3: 'label' is '?{bad}'?, as in 1 of 3 rows", made_of, rows, tmp_path)
            assert made_of(rows, tmp_path, **{name: name for name in answer}) == [answer] * 3
            assert made_of(rows[:2], tmp_path) == [answer] * 2
    rows = [{"prompt": "a", "completion": text, "label": text == "b"} for text in "cb"]
    judged = datasets.Dataset.from_list(made_of(rows, tmp_path, "dpo", score="label"))
    assert to_pairs(judged, "x", 0).to_list() == [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert made_of([{"text": "a", "label": 0}], tmp_path) == [{"text": "a"}]
    for other in (-1, 2, "x", "up or down", [1]):
        row = {"prompt": "a", "completion": "b"}
        assert made_of([row | {"label": other}], tmp_path) == [row]
    for kind in ("x", "yes", "no"):  # as the classes of questions
        rows = [{"prompt": "a", "completion": "b", "label": label} for label in (kind, "yes")]
        assert made_of(rows, tmp_path) == [{"prompt": "a", "completion": "b"}] * 2


Rows, Pairs = (shipped.load(ROOT / f"recipes/{name}.py").Args for name in ("sft", "t5"))


def write(file: Path, rows: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        file.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", ["t[1]", "a*", "a?", "a::b", "[x] * ?/{a}/t", "zip:::t", "%41"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_name_is_no_pattern(name, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in ("t1", "ab", "abc", "a", "b", "x a b/a/t", "A"):
        write(tmp_path / f"{other}.{suffix}", [{"text": other}])
    write(tmp_path / f"{name}.{suffix}", [{"text": "mine"}])
    assert read_files([f"{name}.{suffix}"])["text"][:] == ["mine"]
    assert RowsArgs(train_files=[f"{name}.{suffix}"]).read_rows()["train"]["text"][:] == ["mine"]


def replace(file: str, text: str) -> None:
    """Give a file another content of the same size, with the same times."""
    stat = os.stat(file)
    Path(file).write_text(text, encoding="utf-8")
    assert os.path.getsize(file) == stat.st_size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_another_content_gives_other_rows(tmp_path):
    """Also if neither name, size nor time tell; whatever is computed of the rows is computed anew."""
    file = write(tmp_path / "folder/train.jsonl", [{"text": f"a{i}"} for i in range(40)])
    nested, other = (write(tmp_path / "folder" / name, [{"text": "a"}]) for name in ("en/b.jsonl", "readme.txt"))
    args = RowsArgs(train_files=[file], heldout_share=0.5)
    folder = HubDataset(str(tmp_path / "folder"), splits=("train",))

    def seen() -> list:
        sides = args.sides(args.read_rows(), "text")
        return [{*side["text"]} for side in (sides["train"], sides["test"], read_split(folder, "train"))]

    def keys() -> tuple[list, list]:
        """Return the keys of games and of pairs: of the file, and of the files of the folder."""
        files, some = {"train_files": [file]}, {"dataset_name": folder.name, "dataset_files": "**/*.jsonl"}
        return tuple([GamesArgs(**named).game_key, PairArgs(**named).version()] for named in (files, some))

    before, keys_before = seen(), keys()
    replace(other, Path(other).read_text(encoding="utf-8").replace("a", "b"))
    assert keys() == keys_before
    whole = PairArgs(dataset_name=folder.name).version()
    replace(nested, Path(nested).read_text(encoding="utf-8").replace("a", "b"))
    (of_file, of_folder), nested_before = keys(), keys_before
    assert of_file == nested_before[0] and whole != PairArgs(dataset_name=folder.name).version()
    assert all(one != other for one, other in zip(of_folder, nested_before[1], strict=True))
    replace(file, Path(file).read_text(encoding="utf-8").replace("a", "b"))
    after, keys_after = seen(), keys()
    for one, other in zip(before, after, strict=True):
        assert one and {text[0] for text in one} == {"a"} and {text[0] for text in other} == {"b"}
    for old, new in zip((keys_before[0], of_folder), keys_after, strict=True):
        assert all(one != other for one, other in zip(old, new, strict=True))
    # And the same content elsewhere is what was read before.
    moved = write(tmp_path / "elsewhere/x.jsonl", [{"text": f"b{i}"} for i in range(40)])
    assert read_files([moved]).cache_files == read_files([file]).cache_files
    assert GamesArgs(train_files=[moved]).game_key == keys_after[0][0]


def test_texts_of_csv_stay_texts(tmp_path):
    """Numbers keep their zeros, wherever a text stands among them; a quoted cell may have several lines."""
    cells = [f"{i:05}" for i in range(25_000)] + ["1.50", "NA", "", "x", '"a ""b"",\nc"', "é"]
    (tmp_path / "a.csv").write_text(
        "\ufeffcode,n\n" + "".join(f"{cell},0{i}\n" for i, cell in enumerate(cells)), encoding="utf-8"
    )
    rows = read_files([str(tmp_path / "a.csv")])
    assert rows["code"][:] == [*cells[:-2], 'a "b",\nc', "é"]
    assert rows["n"][:3] == ["00", "01", "02"]
    for (name, content), message in {
        ("b.csv", b"a,a\n1,2\n"): "it has several columns called 'a'", ("b.csv", b"a,b\n1,2\n1\n"): "Row #3: Expected 2 columns, got 1",
        ("b.csv", "a\né\n".encode("latin-1")): "codec can't decode byte 0xe9.*; save it as UTF-8", ("b.csv", b""): "it has 0 rows",
        ("b.csv", b"a,b\n"): "it has 0 rows", ("b.csv", b"prompt;completion\n1;2\n"): "its columns are separated by ';', not by ",
        ("b.csv", b"a\tb\n"): r"its columns are separated by '\\t', not by ", ("b.tsv", b"a,b\n1,2\n"): "its columns are separated by ',', not",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        refuses(rf"{name} cannot be read: .*{message}", read_files, [str(tmp_path / name)], error=DataError)
    (tmp_path / "c.csv").write_text('"a;b"\n1\n')
    assert read_files([str(tmp_path / "c.csv")]).column_names == ["a;b"]


LATE = {
    "a field": ({"score": 1.5}, None, 1.5),
    "a field of another type": ({"n": "text"}, 7, "text"),
    "a number with a fraction": ({"n": 0.12345678901234567}, 7.0, 0.12345678901234567),
    "a text of digits": ({"n": "5"}, 7, "5"),
    "an object": ({"n": {"a": None}}, 7, {"a": None}),
    "a field inside": ({"m": [{"role": "a", "more": 1}]}, [{"role": "a"}], [{"role": "a", "more": 1}]),
    "no date": ({"at": "soon"}, "2026-01-02", "soon"),
    "a list": ({"x": ["a"]}, [], ["a"]),
    "a large number": ({"n": 2**70 + 1}, 7, 2**70 + 1),
    "a number beside fractions": ({"n": 2.5}, 2**53 + 1, 2.5),
    "null in an object": ({"o": {"a": None, "b": [0.7]}}, {"a": 1, "b": [1e-12]}, {"a": None, "b": [0.7]}),
    "null in a list": ({"x": [None, {"a": None}]}, [], [None, {"a": None}]),
    "a weight": ({"m": [{"role": "a", "weight": 0.0}]}, [{"role": "a", "weight": 1}], [{"role": "a", "weight": 0.0}]),
}


@pytest.mark.parametrize("case", LATE)
@pytest.mark.parametrize("second_file", [False, True])
def test_a_field_may_appear_or_change_anywhere(case, second_file, tmp_path, monkeypatch):
    """In whatever block or file of JSON a field is another one, all rows are read, each as it is written."""
    change, early, late = LATE[case]
    first = {"text": "a", "n": 7, "m": [{"role": "a"}], "at": "2026-01-02", "x": [], "o": {"a": 1, "b": [1e-12]}}
    (name,) = change
    first |= {name: early} if name in first else {}
    rows = [first] * 20 + [first | change]
    parts = [rows[:20], rows[20:]] if second_file else [rows]
    files = [write(tmp_path / f"{i}.jsonl", part) for i, part in enumerate(parts)]
    monkeypatch.setattr(tables, "BYTES_PARSED", 200)
    found = read_files(files)
    if case == "a weight":
        assert found.features["m"].feature["weight"] == datasets.Value("float64"), "a recipe reads it as a number"
    else:
        assert repr(found[name][:]) == repr([early] * 20 + [late])
    assert found["text"][:] == ["a"] * 21 and found["at"][0] == "2026-01-02"


NUMBERS = [
    0.7, 48.85837012345679, 1e-12, -0.0, 5, 2.5, 2**53 + 1, 2**64, 12345678901234567890123, 1e22, True, "0.7", "01",
]  # fmt: skip


def test_numbers_stay_as_they_are_written(tmp_path):
    """Alone, in lists and in objects of any fields, read from a file and once more after `map`, as Python's json has them."""
    rows = [
        {"n": n, "all": NUMBERS, "one": {"amount": n}, "other": {f"a{i % 2}": [{"n": n}]}}
        for i, n in enumerate(NUMBERS)
    ]
    for i, row in enumerate(rows):
        row |= {"float": row["n"] + 0.1 if i < 4 else 0.1, "pay": {"amount": (100, 2.5)[i % 2]}}
    found = read_files([write(tmp_path / "a.jsonl", rows)])
    assert [*map(json.dumps, found)] == [*map(json.dumps, rows)]
    kinds = datasets.Features(found.features | {"again": datasets.List(datasets.Json())})
    again = found.map(lambda row: {"again": [row["one"], row["other"]]}, features=kinds)
    wanted = [row | {"again": [row["one"], row["other"]]} for row in rows]
    assert [*map(json.dumps, again)] == [*map(json.dumps, wanted)]
    texts = again.data.column("again")[0].as_py()
    assert json.loads(texts[0]) == {"amount": 0.7} and [*map(json.dumps, again.select([3]))] == [json.dumps(wanted[3])]


def test_upstream_needs_it():
    """`datasets` writes 1e-12 as 0, reads 0.7 as another number, and the text "5" as 5; checksums are of what it writes."""
    spec = importlib.util.find_spec("datasets.utils.json")
    spec.loader.exec_module(own := importlib.util.module_from_spec(spec))
    assert own.ujson_dumps(1e-12) == "0.0" and own.ujson_loads("0.7") != 0.7
    with pytest.raises(ValueError):
        own.ujson_loads("12345678901234567890123")
    assert own.json_encode_field("5", []) == "5", "a text that is JSON is taken for a value that is written"

    def stored(value: object) -> str:
        kinds = datasets.Features({"a": datasets.Json()})
        return datasets.Dataset.from_dict({"a": [value]}, features=kinds).data.column("a").chunk(0).storage[0].as_py()

    day = datetime.datetime(2026, 1, 2)
    for value in ({"a/b": "\x7f\u00e9", "c": [1, 1e-5, 1e16, True, None]}, {"at": day, "n": 0.5}):
        assert stored(value) == own.ujson_dumps(value)
    assert [*map(stored, ("5", {"at": day, "n": 1e-12}))] == ['"5"', '{"at": 1767312000000, "n": 1e-12}']


def test_json_in_other_forms(tmp_path):
    """A byte order mark, blank lines, DOS lines, a list, objects on many lines."""
    rows = [{"text": "a\u2028b\u0085"}, {"text": "c", "n": None}]
    contents = {
        "a.jsonl": "\ufeff\n" + "\r\n \r\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "b.json": json.dumps(rows, indent=1),
        "c.json": "\n".join(json.dumps(row, indent=1) for row in rows),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_files([str(tmp_path / name)])["text"][:] == ["a\u2028b\u0085", "c"]
    (tmp_path / "d.json").write_text('["x", "y"]', encoding="utf-8")
    assert read_files([str(tmp_path / "d.json")])["text"][:] == ["x", "y"]


def test_a_prediction_may_hold_any_line_end(tmp_path):
    """Those of Unicode stand in our own files as they are."""
    texts = ["a\u2028b\u2029c\x85d\x0be\r\nf", "é"]
    t5 = shipped.load(ROOT / "recipes/t5.py")
    t5.write_predictions(tmp_path / "step-3.jsonl", texts, [["x"]] * 2, texts)
    assert [line["prediction"] for line in read_json_lines(tmp_path / "step-3.jsonl")] == texts


def test_tables_of_polars_and_of_pandas(tmp_path):
    """Other forms of texts, lists and categories are read as the usual ones, beside an image that `datasets` wrote."""
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    messages = [[{"role": "user", "content": "a"}], [], None]
    table = pa.table(
        {
            "messages": pa.array(messages, pa.large_list(message)),
            "text": pa.array(["a", None, "b"], pa.string_view()),
            "label": pa.array(["x", "y", "x"]).dictionary_encode(),
            "image": pa.array([b"1", b"2", None], pa.binary_view()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_files([str(tmp_path / "a.parquet")])
    columns = {"text": ["a", None, "b"], "label": ["x", "y", "x"], "image": [b"1", b"2", None]}
    assert rows.to_dict() == {"messages": messages} | columns
    text = datasets.Value("string")
    assert rows.features["messages"] == datasets.List({"role": text, "content": text})
    assert (rows.features["text"], rows.features["label"]) == (text, text)
    typed = datasets.Features(label=datasets.ClassLabel(names=["n", "y"]), image=datasets.Image())
    datasets.Dataset.from_dict({"label": [1], "image": [None]}, features=typed).to_parquet(tmp_path / "b.parquet")
    assert read_files([str(tmp_path / "b.parquet")]).features == typed


def test_tables_of_spark(tmp_path):
    """A map is read as a list of its entries, a UUID as its bytes: they do no harm beside what is trained."""
    entry = [("a", 1), ("b", None)]
    meta = pa.array([entry], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"text": ["x"], "meta": meta, "id": pa.array([b"0" * 16], pa.uuid())})
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = read_files([str(tmp_path / "a.parquet")])
    pairs = [{"key": key, "value": value} for key, value in entry]
    assert row == {"text": "x", "meta": pairs, "id": b"0" * 16}


@pytest.mark.parametrize("levels", [9, 80])
def test_values_as_deep_as_a_thread(levels, tmp_path):
    """Arrow cannot hold 64 lists and objects in each other."""
    thread: dict = {"said": "a", "replies": []}
    for _ in range(levels):
        thread = {"said": "a", "replies": [thread]}
    rows = [{"text": "x", "thread": thread}, {"text": "y", "thread": thread | {"said": None}}]
    assert [*read_files([write(tmp_path / "a.jsonl", rows)])] == rows


def test_a_folder_whose_path_is_a_pattern(tmp_path):
    """`datasets` would read another folder, or none: it is refused by name, unless its files are known."""
    write(tmp_path / "v[1]" / "train.jsonl", [{"text": "mine"}])
    write(tmp_path / "v1" / "train.jsonl", [{"text": "other"}])
    said = "v[1]: `datasets` takes [, * and ?"
    name = str(tmp_path / "v[1]")
    for args in (Rows(dataset_name=name), Pairs(dataset_name=name), Pairs(eval_dataset_name=name, eval_split="x")):
        assert said in str(args.problems(1))
    assert said not in str(Pairs(dataset_name=name, train_files=[f"{name}/train.jsonl"]).problems(1))
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "s[1]")
    assert said not in str(Rows(dataset_name=str(tmp_path / "s[1]")).problems(1))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_pointer_of_git_is_no_data(suffix, tmp_path):
    """It is told before anything is read, or where a folder's files are read, with the remedy."""
    (tmp_path / "a").mkdir()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    (file := tmp_path / f"a/train.{suffix}").write_text(pointer)
    chess = shipped.load(ROOT / "recipes/chess.py")
    found = [Rows(train_files=[str(file)]).problems(1), Rows(eval_files=[str(tmp_path / "a")]).problems(1)]
    found += [chess.Args(train_files=[str(file)]).problems(1)] if suffix != "csv" else []
    for problems in map(str, found):
        assert f"{file} is a git-LFS pointer" in problems and "git lfs pull" in problems
    if suffix != "csv":
        refuses("is a git-LFS pointer", named_shards, [str(file)])
    refuses("is a git-LFS pointer", read_split, HubDataset(str(tmp_path / "a")), "train", error=DataError)


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name] * 9}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both [1]")
    parts["train"].save_to_disk(tmp_path / "one", num_shards=2)
    assert read_split(HubDataset(str(tmp_path / "both [1]")), "test[:3]")["text"][:] == ["test"] * 3
    args = RowsArgs(dataset_name=str(tmp_path / "one"))
    assert args.read_rows()["train"]["text"][:] == ["train"] * 9
    args = RowsArgs(train_files=[str(tmp_path / "one"), str(tmp_path / "both [1]/test")])
    assert args.read_rows()["train"]["text"][:] == ["train"] * 9 + ["test"] * 9
    assert f"both [1] holds the splits train, test; name that of one, {tmp_path}/both [1]/test" in str(
        Rows(train_files=[str(tmp_path / "both [1]")]).problems(1)
    )
    with pytest.raises(DataError, match="one, split test cannot be read: there is no split test; there are train"):
        read_split(HubDataset(str(tmp_path / "one")), "test")
