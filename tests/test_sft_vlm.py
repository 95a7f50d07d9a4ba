"""Tests of recipes/sft_vlm.py: tokens and targets of documents with images, their batches, runs of it, and exports."""

import io
import json
import shutil
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_images
import torch
from conversations import runs_of_targets
from datasets import Dataset
from helpers import ROOT, STEPS, change_json, losses, refuses
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_images import picture
from transformers import AutoTokenizer

from accelerate_recipes.args import resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.base_form import BaseForm
from accelerate_recipes.conversations.exported import TrainedRows
from accelerate_recipes.conversations.rendering import Part, Rendering, render_read
from accelerate_recipes.conversations.supervised import ends_of
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images import pictures
from accelerate_recipes.images.image_texts import DOCUMENTS, ImageTexts, cut_documents, expanded, render_documents
from accelerate_recipes.images.pictures import Pictures, image_checksum, processor_files, render_with_images
from accelerate_recipes.images.supervised_images import (
    OF_IMAGES,
    ImageCollator,
    PackedDocuments,
    check_room,
    with_files,
    with_pixels,
)
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.documents import text_positions
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.models.processors import load_image_tokenizer, load_processor
from recipe_tools import check_export as check_export_module
from recipe_tools.check_export import check_export

SCRIPT = ROOT / "recipes/sft_vlm.py"
FEW = ["qwen2_5_vl", "gemma3", "smolvlm", "llava_onevision", "mistral3"]
IMAGE = {"type": "image"}
SIZES = [(24, 16), (16, 32), (40, 20)]
NO_MARKS = ("{% generation %}", "{% endgeneration %}")


def text(said: str) -> dict:
    return {"type": "text", "text": said}


def row_of(num_images: int, *more: dict, **fields) -> dict:
    """Make a row with two answers and its images behind each other, as `load_image_sides` returns it."""
    parts = [part for number in range(num_images) for part in (IMAGE, text(f"look {number} "))]
    messages = [
        {"role": "user", "content": [*parts[:2], text("what?")]},
        {"role": "assistant", "content": [text("a cat")]},
        {"role": "user", "content": [*parts[2:], text("and now?")]},
        {"role": "assistant", "content": [text("a dog")]},
        *more,
    ]
    widths, heights = ([size[i] for size in SIZES[:num_images]] for i in (0, 1))
    return {"messages": messages, "widths": widths, "heights": heights} | fields


def texts_for(processor, *rows: dict):
    sizes = [[*zip(row["widths"], row["heights"], strict=True)] for row in rows]
    return Pictures(processor).texts_for(("here", size) for size in sizes)


def trained_texts(tokenizer, document) -> list[str]:
    """Return the runs of targets of a document as texts."""
    return runs_of_targets(document.ids, document.targets, tokenizer)


@pytest.mark.parametrize("way", ["marks", "rule", "everything"])
@pytest.mark.parametrize("name", FEW)
def test_tokens_are_those_of_the_processor(name, way):
    """Documents with none to three images have the tokens that the processor makes; their answers, and no image, are targets."""
    processor = tiny_images.processor(name)
    tokenizer = processor.tokenizer
    if way == "rule":
        for mark in NO_MARKS:
            tokenizer.chat_template = tokenizer.chat_template.replace(mark, "")
    rows = [row_of(number) for number in range(4)]
    texts = texts_for(processor, *rows)
    for number, row in enumerate(rows):
        stops = [tokenizer.eos_token_id]
        (found,) = render_documents(row, tokenizer, texts, assistant_only=way != "everything", stops=stops)
        images = [picture(*size) for size in SIZES[:number]]
        written = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        wanted = processor(text=[written], images=[images] if images else None, add_special_tokens=False)
        assert found.ids == [*wanted["input_ids"][0]]
        placeholders = np.isin(found.ids, [token for token in processor.image_token_ids if token is not None])
        assert not (placeholders & found.targets).any() and placeholders.any() == bool(images)
        inside = np.zeros(len(found.ids), bool)
        for first, last in found.images:
            inside[first:last] = True
        assert len(found.images) == number and (inside >= placeholders).all()
        if way == "everything":
            assert (inside != found.targets).all()
        else:
            assert trained_texts(tokenizer, found) == ["a cat<|im_end|>", "a dog<|im_end|>"]


def test_a_mark_of_no_message():
    """A part that a template marks, though it belongs to no message, is a target where all answers are."""
    processor = tiny_images.processor("qwen2_vl")
    alone = "{% generation %}|{% endgeneration %}"
    processor.tokenizer.chat_template = alone + "{% for m in messages %}{{ m['role'] }}{% endfor %}<|image_pad|>"
    row = row_of(1)
    (found,) = render_documents(row, processor.tokenizer, texts_for(processor, row), assistant_only=True)
    assert trained_texts(processor.tokenizer, found) == ["|"]


def test_what_is_no_target():
    """A message of weight 0 is none; a row without an answer gives no document."""
    processor = tiny_images.processor("qwen2_vl")
    row = row_of(2)
    texts = texts_for(processor, row)
    row["messages"][1]["weight"] = 0
    render = partial(render_documents, tokenizer=processor.tokenizer, texts=texts, assistant_only=True, stops=[4])
    (found,) = render(row)
    assert trained_texts(processor.tokenizer, found) == ["a dog<|im_end|>"]
    assert render(row | {"messages": row["messages"][:1], "widths": [24], "heights": [16]}) == []
    processor.tokenizer.chat_template = processor.tokenizer.chat_template.replace("<|image_pad|>", "<|image_pad|>" * 2)
    with pytest.raises(ValueError, match=r"4 places for images .* 2 images"):
        render(row)


@pytest.mark.parametrize("marks", [True, False])
def test_a_row_that_ends_with_a_question(marks):
    """What follows the last answer is no target, and may have an image of its own; the export renders the same."""
    processor = tiny_images.processor("qwen2_vl")
    for mark in () if marks else NO_MARKS:
        processor.tokenizer.chat_template = processor.tokenizer.chat_template.replace(mark, "")
    processor.chat_template = processor.tokenizer.chat_template
    for images in ([], [IMAGE]):
        row = row_of(1, {"role": "user", "content": [*images, text("and then?")]})
        row |= {"images": [as_file(24, 16), *(as_file(8, 8) for _ in images)]}
        row |= {"widths": [24, 8][: 1 + len(images)], "heights": [16, 8][: 1 + len(images)]}
        (found,) = render_documents(row, processor.tokenizer, texts_for(processor, row), assistant_only=True, stops=[4])
        assert trained_texts(processor.tokenizer, found) == ["a cat<|im_end|>", "a dog<|im_end|>"]
        assert len(found.images) == (1 + len(images) if marks else 1)
        (exported,) = render_with_images(row, processor, assistant_only=True, stops=[4])
        assert exported.ids == found.ids


BEHIND_A_SPACE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}"
    "{% endfor %} {% else %}ASSISTANT: {% generation %}{{ m.content[0].text }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("adds, begins", [("$A", 0), ("<s> $A", 1)])
def test_a_word_behind_a_marks_space_is_a_target(adds, begins):
    """A mark may begin inside a token; the tokens and targets are those of texts, and the processor's begin token comes first."""
    words = ("▁ASSISTANT:", "▁yes", "USER:", "▁even?", "▁is")
    processor = tiny_images.with_words("llava", BEHIND_A_SPACE, *words, adds=adds)
    tokenizer = processor.tokenizer
    asked = {"role": "user", "content": [IMAGE, text(" is even?")]}
    row = {"messages": [asked, {"role": "assistant", "content": [text("yes")]}], "widths": [24], "heights": [16]}
    (found,) = render_documents(row, tokenizer, texts_for(processor, row), assistant_only=True, stops=[3])
    assert trained_texts(tokenizer, found) == ["yes</s>"]
    (of_texts,) = render_read([row], tokenizer, assistant_only=True, stops=[3])
    assert of_texts[0].targets[-2:] == [True] * 2 == found.targets[-2:] and sum(of_texts[0].targets) == 2
    assert tokenizer.convert_ids_to_tokens(found.ids)[: 1 + begins] == ["<s>", "USER:"][1 - begins :]
    ((first, last),) = found.images
    assert {*found.ids[first:last]} == {tokenizer.convert_tokens_to_ids("<image>")}
    assert found.ids[last] != found.ids[first]
    again = render_with_images(row | {"images": [as_file(24, 16)]}, processor, assistant_only=True, stops=[3])
    assert again[0].ids == found.ids
    tokenizer.chat_template = processor.chat_template = "<s>" + BEHIND_A_SPACE
    (written,) = render_documents(row, tokenizer, texts_for(processor, row), assistant_only=True, stops=[3])
    assert written.ids == [2, *found.ids[begins:]], "a template that writes the begin token gets no second one"


def test_an_export_is_asked_as_it_was_trained(tmp_path, monkeypatch):
    """With the begin token that the tokenizer adds, and with contents that are texts."""
    template = BEHIND_A_SPACE.replace(
        "{% for m", "{% for m in messages[:1] if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m", 1
    )
    template = template.replace("in messages %}", "in messages if m.role != 'system' %}", 1)
    processor = tiny_images.with_words("llava", template, "USER:", "▁even?", adds="<s> $A")
    monkeypatch.setattr(pictures, "processor_of", lambda *_: processor)
    picture(24, 16).save(file := tmp_path / "a.png")
    ask = partial(check_export_module.inputs_with_images, tmp_path, processor.tokenizer)
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    asked = {"role": "user", "content": [IMAGE, text(" even?")]}
    system = {"role": "system", "content": "USER:"}
    rows = [{"messages": [system, asked], "images": [{"path": str(file), "bytes": None}]}]
    for prompts, images, first in (["USER:"], [file], None), (None, [], TrainedRows(rows, [], {}, [], {})):
        (found,) = ask(prompts, images, first)
        ids = found["input_ids"][0].tolist()
        assert processor.tokenizer.decode(ids).count("<s>") == 1 and ids[0] == processor.tokenizer.bos_token_id
        assert image in ids
        assert len(found["pixel_values"]) == 1
    rows[0]["messages"][1]["content"].append(IMAGE)
    refuses(r"2 images, .* 1", ask, None, [file], TrainedRows(rows, [], {}, [], {}))


MENDED = {"llava": "llava", "llava_next": "llava_next_mistral", "glm4v": "glm4v", "llava_onevision": None}


@pytest.mark.parametrize("name", MENDED)
def test_published_templates(name):
    """The end of an answer is a target where it stands behind the mark; other templates are refused, and have one that is mended."""
    processor = tiny_images.processor(name)
    tokenizer, row = processor.tokenizer, row_of(2)
    if name == "glm4v":  # it writes answers as they stand
        messages = row["messages"]
        row["messages"] = [m | {"content": m["content"][0]["text"]} if m["role"] != "user" else m for m in messages]
    found, texts = {}, {}
    for kind, template in (("published", tiny_images.PUBLISHED[name]), ("mended", MENDED[name])):
        if template:
            file = ROOT / f"recipes/chat_templates/{template}.jinja"
            tokenizer.chat_template = template if kind == "published" else file.read_text(encoding="utf-8")
            (found[kind],) = render_documents(row, tokenizer, texts_for(processor, row), assistant_only=True, stops=[4])
            texts[kind] = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    if name == "llava_onevision":
        assert trained_texts(tokenizer, found["published"]) == ["\na cat<|im_end|>", "\na dog<|im_end|>"]
        return
    for end in ("<|im_end|>", r"<\s> ", "cat ", "dog "):
        texts = {kind: text.replace(end, end.strip(" ") * (end[0] not in "<")) for kind, text in texts.items()}
    assert texts["published"] == texts["mended"], "apart from the end of an answer"
    assert trained_texts(tokenizer, found["mended"]) == ["a cat<|im_end|>", "a dog<|im_end|>"]
    ids, targets, *_ = found["published"]
    labels = [token if is_target else IGNORE_INDEX for token, is_target in zip(ids, targets, strict=True)]
    whole, first = Dataset.from_dict({"labels": [labels], "input_ids": [ids]}), [Rendering(ids, targets)]
    args, exported = SimpleNamespace(max_length=None, packing=False), SimpleNamespace(tokenizer=tokenizer, stops={4})
    with pytest.raises(ConfigError, match=r"stops at '<\|im_end\|>', .* and no such token is written behind it"):
        ends_of(args, whole, first, exported)  # pyright: ignore[reportArgumentType]
    ids, first = [*ids, 4], [Rendering([*ids, 4], [*targets, False])]
    whole = Dataset.from_dict({"labels": [[*labels, IGNORE_INDEX]], "input_ids": [ids]})
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>' stands behind it"):
        ends_of(args, whole, first, exported)  # pyright: ignore[reportArgumentType]


def as_file(*size: int) -> dict:
    picture(*size).save(content := io.BytesIO(), "PNG")
    return {"path": None, "bytes": content.getvalue()}


def test_an_earlier_answer_has_its_own_images():
    """If a template writes an answer otherwise once others follow, the part until it has the first images alone."""
    processor = tiny_images.processor("llava_onevision")
    template = processor.tokenizer.chat_template
    for mark in NO_MARKS:
        template = template.replace(mark, "")
    said = "{{ said(message['content']) + '<|im_end|>' }}{% else %}"
    assert said in template
    processor.tokenizer.chat_template = template.replace(said, "{{ 'hm' if loop.last }}" + said)
    row = row_of(2)
    texts = texts_for(processor, row)
    first, whole = render_documents(row, processor.tokenizer, texts, assistant_only=True, stops=[4])
    assert len(first.images) == 1 and len(whole.images) == 2
    sizes = [*zip(row["widths"], row["heights"], strict=True)]
    assert first.ids[slice(*first.images[0])] == processor.tokenizer(texts.of(sizes[:1]))["input_ids"][0]
    assert first.images[0] != whole.images[0], "this family divides an image that is alone"


def test_places_move_with_the_texts_of_images():
    """Answers that begin behind an image, or end with one, keep their places."""
    texts = ImageTexts("<i>", {(1, 1, False): zlib.compress(b"IMAGE"), (1, 1, True): zlib.compress(b"II")})
    part = Part("a<i>bc<i>d", [(4, 6), (5, 9), (9, 10)])
    moved, images = expanded(part, [(1, 1), (1, 1)], texts)
    assert moved.text == "aIIbcIId" and [moved.text[slice(*place)] for place in images] == ["II", "II"]
    assert [moved.text[slice(*place)] for place in moved.answers] == ["bc", "cII", "d"]
    assert expanded(Part("<i>", [(0, 3)]), [(1, 1)], texts) == (Part("IMAGE", [(0, 5)]), [(0, 5)])


def cut(longest: int, differs_alone: bool = False) -> dict | None:
    """Cut a document: text, an image, text, an answer, an image, text, an answer, with ten tokens each, and text."""
    targets = [False, False, False, True, False, False, True, False]
    ids = list(range(80))
    labels = [token if targets[token // 10] else IGNORE_INDEX for token in ids]
    row = {"input_ids": ids, "labels": labels, "of_row": 0, "opened": ""}
    row |= {"image_begins": [10, 40], "image_ends": [20, 50]}
    row |= {"checksums": ["a", "b"], "differs_alone": differs_alone}
    found = cut_documents(Dataset.from_list([row], features=DOCUMENTS).data.table, 0, longest).to_pylist()
    return found[0] if found else None


def test_a_document_is_cut_behind_a_target():
    """A cut document ends with a target and holds whole images; without a target, it is left out."""
    assert cut(80)["input_ids"] == list(range(80)), "it is not cut"
    for longest, kept, images in ((79, 70, 2), (65, 65, 2), (60, 40, 1), (45, 40, 1), (35, 35, 1)):
        found = cut(longest)
        assert found["input_ids"] == list(range(kept)), longest
        assert found["labels"][-1] == kept - 1
        assert [len(found[name]) for name in ("image_begins", "image_ends", "checksums")] == [images] * 3
    for longest in (30, 15, 5):
        assert cut(longest) is None
    assert cut(60, differs_alone=True) is None and cut(65, differs_alone=True) is not None


def test_images_must_leave_room():
    """Rows without images have it, and do not count."""
    rows = {"image_begins": [[1, 20], [1], []], "image_ends": [[11, 40], [12], []]}
    check_room(Dataset.from_dict(rows), 12)
    refuses(r"11 to 30 tokens.*--max_length is 11.*--image_max_pixels", check_room, Dataset.from_dict(rows), 11)
    check_room(Dataset.from_dict({"image_begins": [[]], "image_ends": [[]]}), 1)


def packed_rows(tmp_path, processor) -> PackedDocuments:
    """Make a row of three documents with two, no and one image, and one of a document alone without images."""
    rows, tokens = [], []
    for number, num_images in enumerate((2, 0, 1, 0)):
        images = []
        for place in range(num_images):
            picture(*SIZES[place], seed=10 * number + place).save(file := tmp_path / f"{number}_{place}.png")
            images.append({"path": str(file), "bytes": None})
        rows.append(row_of(num_images, images=images, row=number + 1))
    texts = texts_for(processor, *rows)
    for number, row in enumerate(rows):
        (found,) = render_documents(row, processor.tokenizer, texts, assistant_only=False)
        pairs = zip(found.ids, found.targets, strict=True)
        labels = [token if is_target else IGNORE_INDEX for token, is_target in pairs]
        begins, ends = ([place[i] for place in found.images] for i in (0, 1))
        sums = [image_checksum(Path(image["path"]).read_bytes()) for image in row["images"]]
        tokens.append((found.ids, labels, number, "", begins, ends, sums, False))
    columns = dict(zip(DOCUMENTS, map(list, zip(*tokens, strict=True)), strict=True))
    read = Dataset.from_list([{name: row[name] for name in ("images", "row")} for row in rows])
    pieces = np.array([(number, 0, len(ids)) for number, (ids, *_) in enumerate(tokens)])
    documents, of_images = Dataset.from_dict(columns, features=DOCUMENTS), {"source": "rows.jsonl", "patches": []}
    return PackedDocuments(documents, pieces, np.array([0, 3, 4]), True, OF_IMAGES, read=read, **of_images)


@pytest.mark.parametrize("name", FEW)
def test_batches(name, tmp_path):
    """A batch has each document's own images in their order, and a blank one where it has none."""
    processor = tiny_images.processor(name)
    rows = packed_rows(tmp_path, processor)
    collate = ImageCollator(processor, tiny_images.config(name))
    batch = collate([rows[0]])
    starts = [0, *np.cumsum(rows[0]["seq_lengths"])]
    assert (text_positions(batch["position_ids"])[0] == 0).nonzero()[:, 0].tolist() == starts[:-1]
    assert (batch["labels"][0, starts[:-1]] == IGNORE_INDEX).all()
    seen = [[picture(*SIZES[0], 0), picture(*SIZES[1], 1)], [picture(*SIZES[0], 20)]]
    read = [processor.image_processor(images, return_tensors="pt") for images in seen]
    wanted = torch.cat([values["pixel_values"].flatten() for values in read])
    if name in ("qwen2_5_vl", "gemma3"):  # others pad images beside each other
        assert torch.equal(batch["pixel_values"].flatten(), wanted)
    alone = collate([rows[1]])
    assert alone["input_ids"].shape[1] > len(rows[1]["input_ids"]) and not alone["pixel_values"].isnan().any()
    behind = alone["labels"][0, len(rows[1]["input_ids"]) :]
    assert (behind == IGNORE_INDEX).all() and text_positions(alone["position_ids"])[0, len(rows[1]["input_ids"])] == 0
    both = collate([rows[1], rows[0]])
    assert both["input_ids"].shape[1] == sum(len(row["input_ids"]) for row in (rows[0], rows[1])), "no blank is needed"
    assert both["places"] == [f"rows.jsonl, row {number}" for number in (4, 1, 2, 3)]
    Image.new("RGB", SIZES[0]).save(tmp_path / "0_0.png")
    assert "rows.jsonl, row 1, image 1" in collate([rows[0]])["error"]


def test_images_in_rows_become_files(tmp_path):
    """The check of an export reads images of the first rows from files, also those whose bytes came with a name."""
    run: Any = SimpleNamespace(output_dir=tmp_path, args=SimpleNamespace(data_only=False))
    images = [{"path": None, "bytes": b"a"}, {"path": "b.png", "bytes": b"b"}, {"path": "/c.png", "bytes": None}]
    (row,) = with_files(run, [{"images": images}])
    assert [image["bytes"] for image in row["images"]] == [None] * 3 and row["images"][2] == images[2]
    assert [Path(image["path"]).read_bytes() for image in row["images"][:2]] == [b"a", b"b"]
    run.output_dir = tmp_path / "mine"
    run.output_dir.mkdir()
    (run.output_dir / "images").touch()
    refuses("images is a file", with_files, run, [{"images": images}])


def test_the_template_is_that_of_the_processor(tmp_path):
    """A base of transformers 4 has another template for its tokenizer; its export writes images by both."""
    base = tiny_images.save_base(tmp_path / "base", "qwen2_vl")
    (base / "chat_template.jinja").rename(tmp_path / "template")
    template = (tmp_path / "template").read_text(encoding="utf-8")
    (base / "chat_template.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    for own in (None, "{% for message in messages %}{{ message['content'] }}{% endfor %}"):
        change_json(base / "tokenizer_config.json", **({"chat_template": own} if own else {}))
        tokenizer = load_image_tokenizer(str(base))
        assert tokenizer.chat_template == template
        for changed in (template, f"{template}!"):
            tokenizer.chat_template = changed
            config = load_config(str(base))
            out = tmp_path / f"export{len(changed)}{bool(own)}"
            config.save_pretrained(out)
            files = processor_files(str(base), load_processor(str(base), tokenizer))
            BaseForm(config, tokenizer, files).save_pretrained(out)
            assert AutoTokenizer.from_pretrained(out).chat_template == changed
            assert load_image_tokenizer(str(out)).chat_template == changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make rows with images of several sizes; in some batches all, some or none have images."""
    place = tmp_path_factory.mktemp("rows")
    (place / "images").mkdir()
    rows = []
    for number in range(30):
        images = []
        for image in range((0, 0, 1, 2, 0)[number % 5]):
            picture(*SIZES[(number + image) % 3], seed=31 * number + image).save(place / f"images/{number}_{image}.png")
            images.append(f"images/{number}_{image}.png")
        asked = [*([IMAGE] * len(images)), text(f"question {number}")]
        answer = {"role": "assistant", "content": [text(f"answer {number % 7}")]}
        rows.append({"messages": [{"role": "user", "content": asked}, answer], "images": images})
    for name, some in (("train", rows[:24]), ("test", rows[24:])):
        (place / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some), encoding="utf-8")
    for name in ("qwen2_5_vl", "gemma3"):
        tiny_images.save_base(place / name, name)
    return place


def arguments(folder, name: str) -> list:
    return [
        "--model_name_or_path", folder / name, "--train_files", folder / "train.jsonl", "--eval_files",
        folder / "test.jsonl", "--max_length", 64, "--total_batch_size", 6, "--per_device_train_batch_size", 1,
        "--per_device_eval_batch_size", 2, "--learning_rate", "1e-3", "--adam_epsilon", "1e-3", "--logging_steps", 1,
        "--max_steps", STEPS, "--save_steps", 3, "--async_save", "false", "--dataloader_num_workers", 0,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def both(folder, killed_and_resumed):
    """Run the recipe under FSDP on two ranks, once without end, and once killed, with data workers, and resumed."""
    return killed_and_resumed(SCRIPT, *arguments(folder, "qwen2_5_vl"))


@pytest.mark.slow
def test_a_killed_run_is_resumed(both, folder):
    """The resumed run has the same weights, bit for bit; what is frozen is as in the base."""
    whole, out = (load_file(run / "export/model.safetensors") for run in both)
    base = load_file(folder / "qwen2_5_vl/model.safetensors")
    assert whole.keys() == out.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], out[name])}
    assert all(torch.equal(whole[name], out[name]) for name in base)
    assert all(base[name].shape == out[name].shape and base[name].dtype == out[name].dtype for name in base)
    assert changed == {name for name in base if "visual" not in name or "merger" in name}


@pytest.mark.slow
def test_an_export_is_read_by_transformers(both, folder):
    """The export has its processor, which makes the trained tokens of rows; check-export answers with an image."""
    export = both[1] / "export"
    said = check_export(export, None, 3)
    assert "The export renders the first 16 rows as they were trained" in said and "Answer: " in said
    image = folder / "images/3_0.png"
    said = check_export(export, ["question 3"], 3, [image, image])
    assert said.count("<|image_pad|>...") == 2 and "question 3" in said
    with pytest.raises(DataError, match=r"rows.jsonl.* cannot be read"):
        check_export(export, ["question 3"], 3, [folder / "rows.jsonl"])
    shutil.copytree(export, other := both[1].parent / "moved/export")
    shutil.copy(both[1] / "rows.json", other.parent)
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["size"] = {"shortest_edge": 64, "longest_edge": 256}
    (other / "processor_config.json").write_text(json.dumps(settings))
    refuses("row 3", check_export, other, None, 3)
    shutil.copy(export / "processor_config.json", other)
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.4] * 3
    (other / "processor_config.json").write_text(json.dumps(settings))
    refuses(r"row 3.* other pixel values than in training", check_export, other, None, 3)
    rows = (other.parent / "rows.json").read_text()
    (other.parent / "rows.json").write_text(rows.replace("/images/", "/gone/"))
    said = check_export(other, ["question 3"], 3)
    assert "not compared" in said and "gone/2_0.png" in said and "Answer: " in said


def test_an_image_that_broke_since_it_was_measured_is_named(tmp_path):
    (file := tmp_path / "a.png").write_bytes(b"broken")
    rows = [{"images": []}, {"images": [{"path": str(file), "bytes": None}]}]
    with pytest.raises(DataError, match=r"rows\.jsonl, row 4, .*a\.png.* cannot be read"):
        with_pixels(rows, tiny_images.processor("qwen2_vl"), ["rows.jsonl, row 3", "rows.jsonl, row 4"])


@pytest.mark.slow
def test_gemma(forks, folder, tmp_path):
    """A Gemma 3, whose images see themselves whole, trains packed with recomputation as it does alone."""
    args = (*arguments(folder, "gemma3"), "--logging_steps", 1, "--packing", "--max_steps", 2)
    forks.succeed(tmp_path / "one", *args, config="single", num_processes=1)
    forks.succeed(tmp_path / "two", *args, flags=("--fsdp_activation_checkpointing", "true"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    page = (tmp_path / "two/rows.html").read_text()
    assert page.count("<img") >= 3 and "x 4" in (tmp_path / "two/rows.txt").read_text()


@pytest.mark.slow
def test_adapters(forks, folder, out):
    """An export of adapters alone, without a config.json, renders rows with images and answers."""
    said = forks.succeed(out, *arguments(folder, "qwen2_5_vl"), "--use_peft", "--max_steps", 1)
    assert "The export renders the first 16 rows as they were trained" in said
    assert not (out / "export/config.json").exists()
    said = check_export(out / "export", ["question 3"], 3, [folder / "images/3_0.png"])
    assert "<|image_pad|>..." in said and "Answer: " in said


@pytest.mark.slow
def test_a_step_that_is_not_finite_names_file_and_row(forks, folder, tmp_path):
    """Of packed rows, the places of their documents are named."""
    out, base = tmp_path / "out", shutil.copytree(folder / "qwen2_5_vl", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights[next(name for name in weights if "visual" in name)][:] = float("nan")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    more = ("--packing", "--max_length", 150, "--model_name_or_path", base)
    assert forks.run(out, *arguments(folder, "qwen2_5_vl"), *more) == 2
    found = json.loads((out / "non_finite.json").read_text())
    entries = [entry for rank in found["micro_batches_of_ranks"] for entry in rank]
    places = [place for entry in entries for place in entry["places"]]
    assert len(places) > sum(len(entry["rows"]) for entry in entries) == 6
    assert {*places} <= {f"{folder}/train.jsonl, row {number}" for number in range(1, 25)}


def test_a_setting_without_effect_is_refused():
    args, problems = resolve(shipped.load(SCRIPT).Args, ["--shuffle_dataset"], world_size=1)
    assert args.router_aux_loss_coef == 0, "experts are not balanced: the tokens of blank images would count"
    assert "is not an argument of the recipe" in problems[0] and "--seed" in problems[0]
