"""Tests of rows with images: the forms in which people have them, their errors, and tokens that follow from sizes alone."""

import base64
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import datasets
import numpy as np
import pytest
import tiny_images
import torch
from conversations import TOOL, call
from helpers import by_time, refuses
from helpers import write_rows as write
from PIL import Image
from tiny_images import picture
from transformers import AutoImageProcessor

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.conversations.exported import read_of
from accelerate_recipes.conversations.messages import TEXT
from accelerate_recipes.data.passes import map_rows
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images import image_rows, pictures
from accelerate_recipes.images.image_places import PLACE, SEEN, undecoded
from accelerate_recipes.images.image_rows import ImageRowArgs, load_image_sides
from accelerate_recipes.images.pictures import (
    ORIENTATION,
    Pictures,
    checked_image,
    decoded,
    image_checksum,
    known_sizes,
    upright_size,
)
from accelerate_recipes.models.images import patches_of

SIZES = {"a.png": (24, 16), "b.png": (16, 32), "c.png": (40, 20)}
IMAGE = {"type": "image"}
ANSWER = {"role": "assistant", "content": "A cat."}


@dataclass
class Args(ImageRowArgs, TrainArgs):
    """Arguments of a recipe that reads rows with images."""

    completion_only_loss: bool | None = None
    assistant_only_loss: str = "auto"
    dataset_num_proc: int | None = None


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def processor():
    return tiny_images.processor("qwen2_vl")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with three images, and a row to evaluate on."""
    for seed, (name, size) in enumerate(SIZES.items()):
        picture(*size, seed).save(tmp_path / name)
    write(tmp_path / "eval.jsonl", [{"messages": [user("Held out?", 1), ANSWER], "images": ["a.png"]}])
    return tmp_path


def user(text: str, num_images: int = 0, before: bool = True) -> dict:
    parts = [IMAGE] * num_images
    said = [{"type": "text", "text": text}]
    return {"role": "user", "content": parts + said if before else said + parts}


def asking(text: str = "What?", num_images: int = 1, **columns) -> dict:
    return {"messages": [user(text, num_images), ANSWER]} | columns


def load(folder: Path, processor, rows: list[dict] | Path, **settings):
    file = rows if isinstance(rows, Path) else write(folder / "rows.jsonl", rows)
    args = Args(train_files=[str(file)], **{"eval_files": [str(folder / "eval.jsonl")]} | settings)
    return load_image_sides(args, processor, {4})


def as_parts(role: str, *parts: str) -> dict:
    return {"role": role, "content": [IMAGE if part == PLACE else {"type": "text", "text": part} for part in parts]}


CAT = as_parts("assistant", "A cat.")


def asked(content: str | list) -> list[dict]:
    return [{"role": "user", "content": content}, ANSWER]


def turns(question: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "A cat."}]


QUOTED = [IMAGE, {"type": "text", "text": "Is <image> HTML?"}]
# What people have in a row, the messages that it becomes, and the files of its images.
FORMS = {
    "LLaVA": ({"image": "a.png", "conversations": turns("<image>\nWhat?")}, [as_parts("user", PLACE, "\nWhat?"), CAT], "a"),
    "LLaMA-Factory": (
        {"images": ["b.png", "a.png"], "messages": asked("<image> or <image>?")},
        [as_parts("user", PLACE, " or ", PLACE, "?"), CAT], "ba",
    ),
    "parts and a column": (
        {"images": ["c.png"], "messages": [user("What?", 1, before=False), ANSWER]}, [as_parts("user", "What?", PLACE), CAT], "c",
    ),
    "parts with indices and nulls": (
        {"images": ["c.png", "a.png"], "messages": [
            {"role": "user", "content": [
                {"type": "image", "text": None, "index": 0}, {"type": "text", "text": "What?", "index": None},
                {"type": "image", "text": None, "index": 1}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat.", "index": None}]}]},
        [as_parts("user", PLACE, "What?", PLACE), CAT], "ca",
    ),
    "parts that name images": (
        {"messages": asked([
            {"type": "image", "path": "a.png"}, {"type": "text", "text": "or"}, {"type": "image", "image": "b.png"},
            {"type": "image_url", "image_url": {"url": "c.png"}}])},
        [as_parts("user", PLACE, "or", PLACE, PLACE), CAT], "abc",
    ),
    "texts of prompt and completion": (
        {"image": {"path": "a.png"}, "prompt": "<image>What?", "completion": "A cat."}, [as_parts("user", PLACE, "What?"), CAT], "a",
    ),
    "prompt with an earlier answer": (
        {"images": ["a.png"], "prompt": [user("What?", 1), ANSWER, user("Sure?")], "completion": [ANSWER]},
        [as_parts("user", PLACE, "What?"), CAT | {"weight": 0}, as_parts("user", "Sure?"), CAT], "a",
    ),
    "Alpaca, with what was said before": (
        {"images": ["a.png", "b.png", "c.png"], "system": "Be brief.", "history": [["<image>?", "A dog."]],
         "instruction": "And <image>", "input": "<image>", "output": "A cat."},
        [as_parts("system", "Be brief."), as_parts("user", PLACE, "?"), as_parts("assistant", "A dog."),
         as_parts("user", "And ", PLACE, "\n", PLACE), CAT], "abc",
    ),
    "an answer with an image": (
        {"images": ["a.png"], "messages": [user("Draw."), {"role": "assistant", "content": "Here: <image>"}]},
        [as_parts("user", "Draw."), as_parts("assistant", "Here: ", PLACE)], "a",
    ),
    "calls of tools": (
        {"images": ["a.png"], "tools": json.dumps([TOOL]), "messages": [
            user("Weather?", 1), call("weather", town=None, at=0.7), {"role": "tool", "content": "4"}, ANSWER]},
        [as_parts("user", PLACE, "Weather?"), call("weather", town=None, at=0.7) | {"content": None}, as_parts("tool", "4"), CAT],
        "a",
    ),
    "other columns": (asking(images=["a.png"], row=7, checksums="x", pixel_values=[1]), [as_parts("user", PLACE, "What?"), CAT], "a"),
    "a column beside texts": (
        {"images": ["b.png", "a.png"], "messages": [{"role": "system", "content": "Be brief."}, *asked("What?")]},
        [as_parts("system", "Be brief."), as_parts("user", PLACE, PLACE, "What?"), CAT], "ba",
    ),
    "LLaVA without a place": ({"image": "a.png", "conversations": turns("What?")}, [as_parts("user", PLACE, "What?"), CAT], "a"),
    "Alpaca with a history, without a place": (
        {"image": "a.png", "history": [["So?", "A dog."]], "instruction": "And", "input": "now?", "output": "A cat."},
        [as_parts("user", PLACE, "So?"), as_parts("assistant", "A dog."), as_parts("user", "And\nnow?"), CAT], "a",
    ),
    "<image> quoted beside parts": (
        {"images": ["a.png"], "messages": [{"role": "user", "content": QUOTED}, {"role": "assistant", "content": "<image> is none."}]},
        [{"role": "user", "content": QUOTED}, {"role": "assistant", "content": [{"type": "text", "text": "<image> is none."}]}], "a",
    ),
    "text alone": ({"messages": [user("Who?"), ANSWER], "images": []}, [as_parts("user", "Who?"), CAT], ""),
}  # fmt: skip
WITH_TOOLS = "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"


@pytest.mark.parametrize("name", FORMS)
def test_forms(name, folder, processor, monkeypatch):
    row, messages, files = FORMS[name]
    if "tools" in row:
        monkeypatch.setattr(processor.tokenizer, "chat_template", WITH_TOOLS + processor.tokenizer.chat_template)
    plain = {"messages": [user("Plain?"), ANSWER]} if "messages" in row else {}
    sides, first = load(folder, processor, [row] + [plain] * bool(plain))
    found = sides["train"][0]
    without = [{name: value for name, value in m.items() if value is not None} for m in found["messages"]]
    assert without == [{name: value for name, value in m.items() if value is not None} for m in messages]
    names = [f"{letter}.png" for letter in files]
    assert found["images"] == [{"path": str(folder / name), "bytes": None} for name in names]
    assert list(zip(found["widths"], found["heights"], strict=True)) == [SIZES[name] for name in names]
    assert found["checksums"] == [image_checksum((folder / name).read_bytes()) for name in names]
    assert found["row"] == 1 and len(sides["test"]) == 1
    assert found.get("tools") == ([TOOL] if "tools" in row else None)
    read = read_of(first[0])
    written = [{name: value for name, value in m.items() if value is not None} for m in read["messages"]]
    assert (written, read["images"], read["tools"]) == (without, found["images"], found.get("tools"))


RAW = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{% for p in m.content %}"
    "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% else %}{{ CONTENT }}{% endif %}{% endfor %}"
)
OF_PARTS = {"system", "user", "assistant"}


@pytest.mark.parametrize("template, as_parts", [
    (None, OF_PARTS),
    (tiny_images.PUBLISHED["glm4v"].replace("<|image|>", "<|image_pad|>"), {"user"}),
    (RAW.replace("CONTENT", "m.content"), {"user"}),
    (RAW.replace("CONTENT", "m.content | tojson"), {"user"}),
    (RAW.replace("CONTENT", "'\n' + m.content.strip()"), {"user"}),
    (RAW.replace("CONTENT", "m.content[0].text"), OF_PARTS),
    (RAW.replace("CONTENT", "m.content[0].text if m.role == 'assistant' else 'Always.'"), OF_PARTS),
    (RAW.replace("CONTENT", "m.content if m.role == 'system' else m.content[0].text"), {"user", "assistant"}),
])  # fmt: skip
def test_contents_are_parts_where_the_template_renders_parts(template, as_parts, folder, processor, monkeypatch):
    """Others stay texts, and no part is written as Python code; the side of a row does not depend on it."""
    names = [f"{number}.png" for number in range(12)]
    for number, name in enumerate(names):
        picture(16, 16, number).save(folder / name)
    systems = [{"role": "system", "content": f"Be {n}."} for n in names]
    rows = [{"messages": [s, user("What?", 1), ANSWER], "images": [n]} for s, n in zip(systems, names, strict=True)]
    usual = load(folder, processor, rows, eval_files=[], heldout_share=0.4)[0]
    if template:
        monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    sides, first = load(folder, processor, rows, eval_files=[], heldout_share=0.4)
    assert [*sides["test"]["row"]] == [*usual["test"]["row"]]
    for row, as_written in zip(sides["train"], first, strict=False):
        kinds = {message["role"]: isinstance(message["content"], list) for message in row["messages"]}
        assert kinds == {role: role in as_parts for role in OF_PARTS} and row["messages"] == as_written["messages"]
        assert "type" not in processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)


@pytest.mark.parametrize(
    "way",
    ["data", "data in capitals", "data in percents", "data in a part", "base64 in a part", "file", "file of localhost"],
)
def test_uris(way, folder, processor):
    content = (folder / "a.png").read_bytes()
    (folder / "a b.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    uri = {
        "data in percents": f"DATA:image/png,{quote(content)}",
        "data in capitals": f"DATA:image/png;BASE64,{encoded}",
        "file": f"file://{folder}/a%20b.png",
    }.get(way, f"file://localhost{folder}/a%20b.png" if "localhost" in way else f"data:image/png;base64,{encoded}")
    if "part" in way:
        by_url = {"type": "image_url", "image_url": {"url": uri, "detail": None}}
        named = {"base64": encoded} if "base64" in way else by_url
        row = {"messages": asked([IMAGE | named])}
    else:
        row = asking(images=[uri])
    (found,) = load(folder, processor, [row])[0]["train"]
    assert found["checksums"] == [image_checksum(content)] and found["widths"] == [24]
    is_file = way.startswith("file")
    path, held = (f"{folder}/a b.png", None) if is_file else (None, content)
    assert found["images"] == [{"path": path, "bytes": held}]


def test_what_is_made_of_rows_is_told(folder, processor, capfd):
    """Fields of images that are not read, and images without a place; each once, with the rows that have it."""
    by_url = {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}}
    named = [IMAGE | {"image": "a.png", "max_pixels": 256}, by_url]
    usual = [IMAGE | {"image": "a.png"}, {"type": "image_url", "image_url": {"url": "b.png", "detail": "auto"}}]
    rows = [{"messages": asked(parts)} for parts in (usual, named, named)]
    load(folder, processor, [*rows, {"messages": asked("What?"), "image": "c.png"}])
    said = [line for line in capfd.readouterr().out.splitlines() if "rows.jsonl" in line]
    for field, number, first in (("'max_pixels'", 2, 2), ("'detail'", 2, 2), ("first question", 1, 4)):
        (line,) = [line for line in said if field in line]
        assert f"in {number} rows; the first is row {first}" in line


TURNS = datasets.List({"from": TEXT, "value": TEXT})
BYTES = datasets.Value("binary")
STRUCTURE = {"bytes": BYTES, "path": TEXT}


@pytest.mark.parametrize("feature", [datasets.Image(), BYTES, STRUCTURE], ids=["Image", "bytes", "structure"])
@pytest.mark.parametrize("where", ["image", "images", "part"])
def test_parquet(feature, where, folder, processor, monkeypatch):
    """Bytes in a file stay as they are: no image is decoded."""
    content = (folder / "a.png").read_bytes()
    value: object = content if feature == BYTES else {"bytes": content, "path": "elsewhere/a.png"}
    if where == "part":
        parts = [{"type": "image", "text": None, "image": value}], [{"type": "text", "text": "A cat.", "image": None}]
        rows = {
            "messages": [{"role": role, "content": part} for role, part in zip(("user", "assistant"), parts, strict=True)],
        }  # fmt: skip
        content_type = datasets.List({"type": TEXT, "text": TEXT, "image": feature})
        features = {"messages": datasets.List({"role": TEXT, "content": content_type})}
    else:
        rows = {"conversations": turns("<image>"), where: value if where == "image" else [value]}
        features = {"conversations": TURNS, where: feature if where == "image" else datasets.List(feature)}
    table = datasets.Dataset.from_list([rows] * 2, features=datasets.Features(features))
    table.to_parquet(folder / "rows.parquet")
    monkeypatch.setattr(Image.Image, "load", None)
    found = load(folder, processor, folder / "rows.parquet")[0]["train"][1]
    assert found["images"][0]["bytes"] == content and found["messages"] == [as_parts("user", PLACE), CAT]
    assert (found["widths"], found["heights"], found["checksums"]) == ([24], [16], [image_checksum(content)])


def test_files_in_columns_are_not_decoded():
    """A package that decodes sounds and videos may be missing."""
    for kind in (datasets.Image(), datasets.Audio(), datasets.Video()):
        found = undecoded({"a": kind, "b": datasets.List({"c": kind})})
        assert found["a"] == found["b"].feature["c"] != kind and not found["a"].decode
    assert undecoded(datasets.Image(mode="L")).mode == "L" and undecoded(datasets.Json()) == datasets.Json()


DEEP = Image.fromarray((np.arange(800).reshape(20, 40) * 80).astype(np.uint16))
WRONG = {
    "more places": (asking(num_images=2, images=["a.png"]), {}, ["2 places", "1 images"]),
    "more images": (asking(images=["a.png", "b.png"]), {}, ["1 places", "2 images"]),
    "no place": (asking(num_images=0, image="a.png"), {}, ["0 places", "1 images"]),
    "a place in a text, no image": (asking("See <image>.", 0), {}, ["1 places", "0 images"]),
    "URL": (asking(images=["https://a.b/c.png"]), {}, ["https://a.b/c.png", "URL"]),
    "data that are no image": (asking(images=["data:image/png;base64," + base64.b64encode(b"12").decode()]), {}, ["image 1"]),
    "data that are cut": (asking(images=["data:image/png;base64,iVBOR"]), {}, ["data:image/png;base64,iVBOR", "base64"]),
    "URL in a part": ({"messages": asked([{"type": "image_url", "image_url": {"url": "http://a/b"}}])}, {}, ["http://a/b", "URL"]),
    "missing": (asking(images=["d.png"]), {}, ["d.png", "No such file"]),
    "a folder": (asking(images=["."]), {}, ["directory"]),
    "broken": (asking(images=["broken.png"]), {}, ["broken.png", "cannot identify"]),
    "16 bits": (asking(images=["deep.png"]), {}, ["deep.png", "I;16"]),
    "typed": (asking("A <|image_pad|>?", images=["a.png"]), {}, ["<|image_pad|>"]),
    "typed and kept": (asking("A <|image_pad|>?", images=["a.png"]), {"control_tokens": "keep"}, ["<|image_pad|>", "A "]),
    "a typed video": (asking("<|video_pad|>", images=["a.png"]), {"control_tokens": "keep"}, ["<|video_pad|>"]),
    "video": ({"messages": asked([{"type": "video", "video": "a.mp4"}])}, {}, ["video", "a.mp4"]),
    "a column of videos": (asking("<video>?", 0) | {"videos": ["a.mp4"]}, {}, ["videos", "a.mp4"]),
    "two columns": (asking(images=["a.png"], image="b.png"), {}, ["images and image"]),
    "another order": (
        {"messages": asked([IMAGE | {"index": 1}, IMAGE | {"index": 0}]), "images": ["a.png", "b.png"]}, {}, ["index 1", "place 0"],
    ),
    "half of the places name their image": ({"messages": asked([IMAGE | {"path": "a.png"}, IMAGE])}, {}, ["1 of 2"]),
    "a number": (asking(images=[3]), {}, ["3"]),
    "null": (asking(images=[None]), {}, ["None"]),
    "private character": (asking(f"A{SEEN}", images=["a.png"]), {}, ["e001"]),
    "messages that are a number": ({"messages": 3}, {}, ["3"]),
    "no role": ({"messages": [{"content": "Who?"}, ANSWER]}, {}, ["role"]),
    "a role that is a list": ({"messages": [{"role": ["user"], "content": "Who?"}, ANSWER], "image": "a.png"}, {}, ["role"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_file_and_row(name, folder, processor):
    (folder / "broken.png").write_bytes(b"no image")
    DEEP.save(folder / "deep.png")
    row, settings, facts = WRONG[name]
    with pytest.raises(DataError) as error:
        load(folder, processor, [asking("First?", images=["a.png"]), row], **settings)
    for fact in (f"{folder}/rows.jsonl, row 2", *facts):
        assert fact in str(error.value)


def test_runs_without_images_or_template(folder, processor, monkeypatch):
    write(folder / "eval.jsonl", [{"messages": [user("Held out?"), ANSWER]}])
    refuses(r"recipes/sft\.py", load, folder, processor, [asking(num_images=0)])
    monkeypatch.setattr(processor.tokenizer, "chat_template", None)
    refuses("--chat_template_path", load, folder, processor, [asking(images=["a.png"])])


def test_a_column_of_images_with_another_name(folder, processor):
    """With it, columns of the usual names are others; a side without it is an error."""
    rows = [asking(picture=["b.png"], images=["a.png"])]
    write(folder / "eval.jsonl", [asking("Held out?", picture=["c.png"])])
    found = load(folder, processor, rows, columns=["images=picture"])[0]
    assert [side["widths"][:] for side in found.values()] == [[[16]], [[40]]]
    args = Args(train_files=[str(folder / "rows.jsonl")], columns=["images=picture"])
    assert not args.problems(1) and "NAME of" in "".join(Args(columns=["image=picture"]).problems(1))
    write(folder / "eval.jsonl", [asking("Held out?", images=["c.png"])])
    with pytest.raises(ConfigError, match=r"eval\.jsonl has no column 'picture', which --columns names; .* images"):
        load(folder, processor, rows, columns=["images=picture"])


@pytest.mark.parametrize(
    "cell, names", [('["a.png", "b.png"]', "ab"), ("[1] a.png", "1"), ("a.png", "a"), ("['a.png']", None), ("[]", "")]
)
def test_images_in_a_cell(cell, names, folder, processor):
    """A cell of a CSV file holds a path, which may begin with a bracket, or a list in JSON."""
    picture(16, 16).save(folder / "[1] a.png")
    places = PLACE * (1 if names is None else len(names))
    quoted = cell.replace('"', '""')
    (folder / "rows.csv").write_text(f'question,answer,image\n{places}What?,A cat.,"{quoted}"\n')
    if names is None:
        with pytest.raises(DataError, match=r"rows\.csv, row 1: its images are .* no list in JSON"):
            load(folder, processor, folder / "rows.csv")
        return
    found = load(folder, processor, folder / "rows.csv")[0]["train"][0]
    wanted = ["[1] a.png" if name == "1" else f"{name}.png" for name in names]
    assert [Path(image["path"]).name for image in found["images"]] == wanted


def test_everything_trained_with_a_prompt(folder, processor):
    row = {"prompt": [user("What?", 1)], "completion": [ANSWER], "image": "a.png"}
    refuses("--assistant_only_loss", load, folder, processor, [row], assistant_only_loss="false")
    refuses("--completion_only_loss", load, folder, processor, [asking(images=["a.png"])], completion_only_loss=True)


def test_paths_begin_in_the_folder_of_their_file(folder, processor):
    """Also with files in two folders, and not with --image_folder."""
    for number, name in enumerate(("one", "two")):
        (folder / name).mkdir()
        picture(10 + number, 20).save(folder / name / "same.png")
        write(folder / name / "rows.jsonl", [asking(f"{name} {i}?", images=["same.png"]) for i in range(2 + number)])
    files = [str(folder / name / "rows.jsonl") for name in ("one", "two")]
    args = Args(train_files=files, eval_files=[str(folder / "eval.jsonl")])
    train = load_image_sides(args, processor, {4})[0]["train"]
    assert [row["widths"] for row in train] == [[10]] * 2 + [[11]] * 3
    write(folder / "eval.jsonl", [asking("Held out?", images=["same.png"])])
    args = Args(train_files=files, eval_files=args.eval_files, image_folder=str(folder / "two"))
    assert [row["widths"] for row in load_image_sides(args, processor, {4})[0]["train"]] == [[11]] * 5
    assert "--image_folder" in "".join(Args(train_files=files, image_folder=str(folder / "none")).problems(1))


def test_rows_with_control_tokens_are_left_out_with_their_images(folder, processor):
    rows = [
        asking("One?", images=["a.png"]), asking("<|im_end|>", images=["b.png"]), asking("Two?", images=["c.png"]),
    ]  # fmt: skip
    train, first = load(folder, processor, rows, control_tokens="drop_rows")
    assert [(row["row"], row["widths"]) for row in train["train"]] == [(1, [24]), (3, [40])]
    assert [row["messages"][0]["content"][1]["text"] for row in first] == ["One?", "Two?"]
    assert first[1]["images"][0]["path"].endswith("c.png")


def test_sides_follow_from_images_and_question(folder, processor):
    """Rows with the same images and question lie on one side, wherever the files lie; other images may lie on the other."""
    names = [f"{number}.png" for number in range(24)]
    for number, name in enumerate(names):
        picture(16, 16, number).save(folder / name)
    answers = [ANSWER, {"role": "assistant", "content": "No."}]
    rows = [{"messages": [user("What?", 1), answer], "images": [name]} for name in names for answer in answers]
    sides, _ = load(folder, processor, rows, eval_files=[], heldout_share=0.3)
    heldout = [*sides["test"]["row"]]
    assert 0 < len(heldout) < 48 and heldout == [row for n in range(1, 49, 2) if n in heldout for row in (n, n + 1)]
    (elsewhere := folder / "elsewhere").mkdir()
    for number, name in enumerate(names):
        (folder / name).rename(elsewhere / f"x{number}.png")
    rows = [row | {"images": [f"x{name}" for name in row["images"]]} for row in rows]
    again, _ = load(elsewhere, processor, rows, eval_files=[], heldout_share=0.3)
    assert [*again["test"]["row"]] == heldout


def test_images_are_measured_again_once_they_change(folder, processor, monkeypatch):
    rows = [asking(images=["a.png"])]
    before = load(folder, processor, rows)[0]["train"][0]

    with monkeypatch.context() as patched:
        patched.setattr(image_rows, "upright_size", lambda *_: pytest.fail("measured again"))
        assert load(folder, processor, rows)[0]["train"][0] == before
    image, known = before["images"][0], before["checksums"][0]
    assert checked_image(image, known, "rows.jsonl, row 1") == (folder / "a.png").read_bytes()
    picture(24, 16, 9).save(folder / "a.png")
    now = image_checksum((folder / "a.png").read_bytes())
    with pytest.raises(DataError) as error:
        checked_image(image, known, "rows.jsonl, row 1")
    for fact in ("rows.jsonl, row 1", "a.png", known, now):
        assert fact in str(error.value)
    os.utime(folder / "a.png", (1, 1))
    assert load(folder, processor, rows)[0]["train"][0]["checksums"] == [now]
    (folder / "a.png").unlink()
    refuses(r"rows\.jsonl, row 1: .*a\.png", checked_image, image, known, "rows.jsonl, row 1", error=DataError)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_rows_with_broken_images_are_left_out(num_proc, folder, processor, capfd, worker_server):
    """Those that PIL cannot decode to their end, too; the others keep their numbers, images and texts."""
    whole = (folder / "c.png").read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "text": b"no", "middle": whole[:200] + b"x" * 100 + whole[300:]}
    for name, content in broken.items():
        (folder / f"{name}.png").write_bytes(content)
    names = ("a.png", "cut.png", "b.png", "gone.png", "text.png")
    rows = [asking(f"{n}?", images=[name]) for n, name in enumerate(names)]
    rows += [asking("5?", 2, images=["b.png", "middle.png"]), asking("6?", 2, images=["c.png", "a.png"])]
    sides, first = load(folder, processor, rows, skip_broken_images=True, dataset_num_proc=num_proc)
    assert [(row["row"], row["widths"]) for row in sides["train"]] == [(1, [24]), (3, [16]), (7, [40, 24])]
    assert [row["messages"][0]["content"][-1]["text"] for row in first] == ["0?", "2?", "6?"]
    names = [[Path(image["path"]).name for image in row["images"]] for row in first]
    assert names == [["a.png"], ["b.png"], ["c.png", "a.png"]]
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "left out" in line]
    assert "4 of 7 rows" in line and f"{folder}/rows.jsonl, row 2" in line and "cut.png" in line
    refuses("row 2", load, folder, processor, rows, dataset_num_proc=num_proc, error=DataError)
    with pytest.raises(ConfigError, match=r"4 of 4 rows.*row 1, .*cut\.png"):
        load(folder, processor, [row for row in rows if row["images"][-1] not in SIZES], skip_broken_images=True)


# Images of all kinds


def saved(image: Image.Image, kind: str, **settings) -> bytes:
    image.save(content := io.BytesIO(), kind, **settings)
    return content.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return saved(picture(40, 20), kind, exif=exif)


SMALL = picture(40, 20)
KINDS = {
    **{f"{kind}, turned {way}": turned(kind, way) for kind in ("JPEG", "PNG", "WEBP", "TIFF") for way in (1, 3, 5, 6, 8)},
    "palette": saved(SMALL.quantize(16), "PNG"),
    "palette with transparency": saved(SMALL.quantize(16), "PNG", transparency=bytes(range(16))),
    "alpha": saved(SMALL.convert("RGBA"), "PNG"),
    "gray with alpha": saved(SMALL.convert("LA"), "PNG"),
    "black and white": saved(SMALL.convert("1"), "PNG"),
    "CMYK": saved(SMALL.convert("CMYK"), "JPEG"),
    "GIF of two": saved(SMALL.quantize(16), "GIF", save_all=True, append_images=[picture(40, 20, 1).quantize(16)]),
    "one pixel": saved(picture(1, 1), "PNG"),
    "three rows": saved(picture(17, 3), "PNG"),
    "a strip": saved(picture(10_000, 10), "PNG"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind):
    """The size, of the header alone, is that of the decoded image."""
    image = decoded(KINDS[kind], "row 1")
    assert image.size == upright_size(KINDS[kind], "row 1") and image.mode == "RGB"
    if "turned" in kind:
        assert image.size == ((20, 40) if kind[-1] in "568" else (40, 20))


BY_SIZE = ("qwen2_vl", "gemma3", "smolvlm", "llava_onevision", "mistral3")


@pytest.mark.parametrize("name", by_time(tiny_images.FAMILIES, BY_SIZE))
def test_blank_ids_are_real_ids(name):
    """Tokens made from sizes alone are those that the processor makes of the images; so are its refusals, and all values."""
    processor = tiny_images.processor(name)
    pictures, mark, refused = Pictures(processor), tiny_images.FAMILIES[name]["written"], []
    others = [decoded(KINDS["alpha"], ""), decoded(KINDS["CMYK"], "")]
    for kind, content in KINDS.items():
        image, size = decoded(content, ""), upright_size(content, "")
        for images in [[image], [others[0], image, others[1]]]:
            sizes = [size if one is image else one.size for one in images]
            text = "A" + f"{mark} b\n" * len(images)
            try:
                texts = pictures.texts_for([("row 9", sizes)]).of(sizes)
            except DataError as error:
                refused.append(kind)
                assert f"{size[0]} x {size[1]}" in str(error) and "row 9" in str(error)
                with pytest.raises(ValueError):
                    processor(text=text, images=images)
                continue
            parts = zip(text.split(processor.image_token), [*texts, ""], strict=True)
            ids = processor.tokenizer("".join(map("".join, parts)), add_special_tokens=False)["input_ids"]
            real = processor(text=text, images=[images], add_special_tokens=False, return_tensors="pt")
            assert ids == real["input_ids"][0].tolist(), kind
            if kind != "a strip":  # of which a processor may make hundreds of tiles
                found = pictures.types_of(real["input_ids"]) | pictures.inputs(images)
                assert found.keys() == real.keys() - {"input_ids", "attention_mask"}
                assert all(torch.equal(found[part], real[part]) for part in found), kind
    assert refused == ["a strip"] * 2 * name.startswith(("qwen", "glm", "mistral"))


@pytest.mark.parametrize("kind", ["truncated", "truncated PNG", "empty", "text", "16 bits", "bomb"])
def test_broken_images(kind, monkeypatch):
    whole = KINDS["JPEG, turned 1"]
    content = {"truncated": whole[: len(whole) // 2], "truncated PNG": KINDS["alpha"][:300]}
    content |= {"empty": b"", "text": b"no", "16 bits": saved(DEEP, "PNG")}
    if kind == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for read in (decoded, upright_size):
        with pytest.raises(DataError, match=r"^rows\.jsonl, row 7: ") as error:
            read(content.get(kind, whole), "rows.jsonl, row 7")
        assert kind != "bomb" or all(number in str(error.value) for number in ("800", "200"))


@pytest.mark.parametrize("name", tiny_images.FAMILIES)
def test_pixels_of_an_export_by_pil(name, tmp_path):
    """What docs/vlm.md names for the pixels of training gives them, for all types of models."""
    wanted = tiny_images.save_processor(tmp_path, name)
    tiny_images.config(name).save_pretrained(tmp_path)
    images = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert type(images) is type(wanted.image_processor)
    pixels = [one([SMALL], return_tensors="pt")["pixel_values"] for one in (images, wanted.image_processor)]
    assert torch.equal(*pixels)


def sized(number: int) -> list[tuple[str, list[tuple[int, int]]]]:
    return [(f"rows.jsonl, row {row}", [(20 + row, 30)] * (1 + row % 2)) for row in range(number)]


def test_sizes_are_made_once(folder, processor, monkeypatch, worker_server):
    """Only sizes that are new are made, in processes or in this one; other settings of the processor make all anew."""
    config, sizes, made = tiny_images.config("qwen2_vl"), sized(40), []

    def counting(rows, *more, **how):
        made.append(len(rows))
        return map_rows(rows, *more, **how)

    monkeypatch.setattr(pictures, "map_rows", counting)
    found = known_sizes(processor, config, sizes, 2)
    one = Pictures(processor)
    assert made == [60] and found[0].of([(21, 30)] * 2) == [one.of_size(21, 30, True)[0]] * 2
    assert found[1][21, 30, True] == found[1][21, 30, False] == patches_of(config, one.of_size(21, 30, False)[1])
    monkeypatch.setattr(processor.tokenizer, "chat_template", "another")
    assert known_sizes(processor, config, sizes, 1) == found and made == [60]
    assert {*known_sizes(processor, config, sized(41), 1)[1]} == {*found[1], (60, 30, False)} and made == [60, 1]
    (cache,) = (folder / "cache").glob("image-sizes-*")
    assert sum(file.stat().st_size for file in cache.iterdir()) < 10_000
    # A size is known though another one of the call is refused.
    for number in (2, 1):
        with pytest.raises(DataError, match=r"row 7: .* refuses an image of 10000 x 10 pixels"):
            known_sizes(processor, config, [("row 7", [(10_000, 10)]), ("row 8", [(9, 9)])], 1)
        assert made[2:] == [2, 1][: 3 - number]
    damaged = max(cache.iterdir(), key=lambda file: file.stat().st_size)
    content = damaged.read_bytes()
    for wrong in (content[: len(content) // 2], content.replace(content[200:210], bytes(10)), b""):
        damaged.write_bytes(wrong)
        refuses(rf"{damaged.name} cannot be read: .* remove it", known_sizes, processor, config, sizes, 1)
    damaged.unlink()
    made.clear()
    assert known_sizes(processor, config, sizes, 1) == found and made == [60]
    images = processor.image_processor
    monkeypatch.setattr(images, "size", images.size | {"longest_edge": 256})
    assert known_sizes(processor, config, sizes, 1) != found and made == [60, 60]
    config.vision_config.patch_size = 8
    known_sizes(processor, config, sizes[:2], 1)
    assert made == [60, 60, 3]
