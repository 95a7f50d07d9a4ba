"""Tests of the rows that a reader sees: their targets, documents and padding are those of the batch."""

import copy
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers import refuses

from accelerate_recipes import recipe
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.conversations.trained_rows import FirstRows
from accelerate_recipes.data import shown
from accelerate_recipes.data.packing import PackedRows, collate, pack_row
from accelerate_recipes.data.rows import Rows, make_eval_loader
from accelerate_recipes.data.shown import Token
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer, new_word_tokenizer
from accelerate_recipes.run import Run
from accelerate_recipes.text.text_pairs import Pairs

WORDS = new_word_tokenizer(["a", "b", "c", "d"])  # tokens 4 to 7, after <pad>, <s>, </s>, <unk>


def lines(batch: dict) -> list[str]:
    return shown.as_text([("Training", shown.rows_of(batch, WORDS))]).splitlines()[1:]


def test_packed_rows():
    rows = [pack_row(np.array([1, 4, 5, 2, 1, 6]), [4, 2], 9, 0, document_mask=True) for _ in range(2)]
    assert lines(collate(rows))[:6] == [
        "", "  row 1: 6 tokens, 4 targets, 2 documents, 3 of padding left out",
        "  read   | <s>", "  target |  a| b| </s>", "  ------ | document 2 begins", "  read   |  <s>",
    ]  # fmt: skip


def test_padded_rows_of_a_causal_model():
    """The first token has no predecessor: it is no target, whatever its label."""
    ids = torch.tensor([[4, 5, 2, 0], [4, 2, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids == 0, -100)}
    found = lines(batch)
    assert found[1:4] == ["  row 1: 3 tokens, 2 targets, 1 of padding left out", "  read   | a", "  target |  b| </s>"]
    batch["labels"][:, 1] = -100
    assert lines(batch)[2:4] == ["  read   | a| b", "  target |  </s>"]


def test_padding_is_no_end():
    """An end token that is also the padding token stays where it is a target; padding of packed rows is token 0."""
    tokenizer = copy.deepcopy(WORDS)
    tokenizer.pad_token = tokenizer.eos_token
    ids = torch.tensor([[4, 2, 2, 2]])
    mask, labels = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[4, 2, -100, -100]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    (row,) = shown.rows_of(batch, tokenizer)
    assert row.summary == "row 1: 2 tokens, 1 targets, 2 of padding left out" and row.tokens[-1].is_target
    packed = collate([pack_row(np.array([1, 4, 5]), [3], 5, 0, document_mask=True)])
    (row,) = shown.rows_of(packed, tokenizer)
    assert row.summary == "row 1: 3 tokens, 2 targets, 2 of padding left out"


def test_other_kinds_of_rows():
    ids = torch.tensor([[4, 5], [6, 0]])
    sources = {"input_ids": ids, "attention_mask": ids.ne(0).long()}
    pairs = lines(sources | {"labels": torch.tensor([[7, 2, -100], [2, -100, -100]])})
    assert pairs[1:3] + pairs[4:6] == [
        "  row 1, to read: 2 tokens, 0 targets", "  read   | a| b", "  row 1, to write: 2 tokens, 2 targets", "  target | d| </s>"
    ]  # fmt: skip
    assert "  row 2, label 3: 1 tokens, 1 of padding left out" in lines(sources | {"labels": torch.tensor([1, 3])})
    named = shown.rows_of(sources | {"labels": torch.tensor([1, -100])}, WORDS, ["a", "\033b"])
    assert [row.title for row in named] == [r"row 1, label \x1bb", "row 2, label -100"]
    several = sources | {"labels": torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])}
    titles = [row.title for row in shown.rows_of(several, WORDS, list("xyz"))]
    assert titles == ["row 1, labels x, z", "row 2, labels y"]
    assert "row 2, labels [0.0, 1.0, 0.0]: 1 tokens, 1 of padding" in "".join(lines(several))
    of_tokens = sources | {"labels": torch.tensor([[-100, 1], [0, -100]])}
    (one, other) = shown.rows_of(of_tokens, WORDS, ["PLACE", "NAME"])
    assert [(token.text, token.is_target) for token in one.tokens] == [("a", False), (" b/NAME", True)]
    assert [(token.text, token.is_target) for token in other.tokens] == [("c/PLACE", True)] and other.num_padding == 1
    preferences = lines(sources | {"completion_mask": torch.tensor([[0, 1], [1, 0]])})
    assert [line for line in preferences if "row" in line] == [
        "  row 1, chosen: 2 tokens, 1 targets", "  row 1, rejected: 1 tokens, 1 targets, 1 of padding left out"
    ]  # fmt: skip
    assert lines(sources)[1] == "  row 1: 2 tokens, 0 targets"


def test_tokens_are_parts_of_the_text():
    """Joined, the tokens are the text; what is only a part of a character is named, and white space can be seen."""
    tokenizer = new_bpe_tokenizer(["the cat sat\non the mat"] * 3, 280)
    ids = tokenizer("the cat\non the mat")["input_ids"]
    assert list(shown.spelt(ids, tokenizer)) == ["<s>", "the", " cat", "\n", "on", " the", " mat"]
    assert list(shown.spelt(tokenizer("a é!")["input_ids"], tokenizer)) == ["<s>", "a", " ", "Ã", "©", "!"]
    row = shown.show_row("row", ids, [], [], [1] * len(ids), tokenizer)
    assert shown.as_text([("", [row])]).splitlines()[-1] == r"  read   | <s>|the| cat|\n|on| the| mat"


def test_page(tmp_path):
    row = shown.rows_of({"input_ids": torch.tensor([[1, 4, 2]]), "labels": torch.tensor([[-100, 4, 2]])}, WORDS)
    shown.write_rows(tmp_path, [("Training", row)], "1 row & more")
    page = (tmp_path / "rows.html").read_text()
    assert "<p>1 row &amp; more</p>" in page and (tmp_path / "rows.txt").read_text().startswith("1 row & more\n\nTra")
    assert '<span class="special" title="1">&lt;s&gt;</span>' in page, "a token is no tag"
    assert '<span class="target" title="4"> a</span><span class="target special" title="2">' in page


def test_a_page_explains_only_what_it_shows(tmp_path):
    """Nothing is green where rows have labels, or are prompts, and no line is dashed in one document."""

    def page(batch: dict, classes: tuple[str, ...] = ()) -> str:
        shown.write_rows(tmp_path, [("Training", shown.rows_of(batch, WORDS, classes))], "")
        text = (tmp_path / "rows.html").read_text().partition("</script>")[2]
        assert ('class="target"' in text) == ("green" in text) and ("<hr>" in text) == ("dashed" in text)
        assert ('class="special" title' in text) == ("Framed" in text)
        return text

    ids = torch.tensor([[4, 5, 6]])
    labelled = "The target of a row is the label in its heading"
    for labels, classes in ((torch.tensor([1]), ("a", "b")), (torch.tensor([[1.0, 0.0]]), ("a", "b"))):
        assert labelled in page({"input_ids": ids, "labels": labels}, classes)
    for batch in ({"input_ids": ids}, {"input_ids": torch.tensor([[1, 4]])}, {"input_ids": ids, "labels": ids}):
        assert labelled not in page(batch)
    packed = [pack_row(np.array([1, 4, 5, 2, 1, 6]), [4, 2], 9, 0, document_mask=True)]
    assert "dashed" in page(collate(packed)) and "dashed" not in page(
        collate([pack_row(np.array([4, 5]), [2], 2, 0, document_mask=True)])
    )


def test_data_do_not_command_the_terminal(tmp_path, capsys):
    """Escape sequences, the bell and changes of direction are shown, in rows, messages and results; letters stay."""
    nasty, letters = "\x1b]0;x\x07\x9b\r\u202e\u2028\x00", "é 日本 👩\u200d🚀 \\"
    run = Run(TrainArgs(output_dir=str(tmp_path)), Accelerator(cpu=True))
    run.print(f"{nasty}\n{letters}")
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patched:
        patched.setattr(recipe, "leave", sys.exit)
        recipe.fail(None, nasty)
    printed = "".join(capsys.readouterr())
    text, special = Token(5, nasty + letters, True, False, False), "\\x1b]0;x\\x07\\x9b\\r\\u202e\\u2028\\x00"
    shown.write_rows(tmp_path, [("Training", [shown.ShownRow("row", [text], 0)])], "")
    for page in ("rows.txt", "rows.html"):
        written = (tmp_path / page).read_bytes().decode()
        assert special in written and letters.rstrip("\\") in written
        assert not set(nasty) & set(written) - set("]0;x")
    assert printed.count(special) == 2 and letters in printed and not set(nasty) & set(printed) - set("]0;x")


def test_marks_of_a_template_are_special(tmp_path):
    """Also those that have no role in the tokenizer, such as the end or the padding."""
    tokenizer = new_bpe_tokenizer(["a b"] * 3, 280)
    tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    tokenizer.add_tokens(["<think>"])
    ids = tokenizer("<|user|><think>a</s>", return_tensors="pt")["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|user|>") not in tokenizer.all_special_ids
    (row,) = shown.rows_of({"input_ids": ids}, tokenizer)
    assert [token.text for token in row.tokens if token.is_special] == ["<s>", "<|user|>", "</s>"]


def test_a_long_row_is_cut(monkeypatch):
    monkeypatch.setattr(shown, "MAX_TOKENS", 2)
    assert "row 1 (the first 2 of 3 tokens): 2 tokens" in "\n".join(lines({"input_ids": torch.tensor([[4, 5, 6]])}))


def test_rows_without_a_target():
    line = shown.count_line(np.array([0, 3]), {"cut": 1})
    assert line == "2 rows; 1 without a target; cut 1; targets a row: mean 1.5, most 3"
    refuses("none of the 2 rows to train on has a target", shown.first_rows, None, WORDS, {}, np.array([0, 0]), {}, ())


def test_characters_that_a_tokenizer_lacks(tmp_path, capsys):
    """They are counted in all rows, with the first, whatever holds the rows; of a stream, in the rows that are shown."""
    run = Run(TrainArgs(output_dir=str(tmp_path)), Accelerator(cpu=True))
    texts = ["a b", "c { } a", "} d"]
    ids = Dataset.from_dict({"input_ids": WORDS(texts)["input_ids"], "lengths": [[2], [4], [2]]})
    pairs = Dataset.from_dict({"source_ids": WORDS(["a"] * 3)["input_ids"], "target_ids": ids["input_ids"][:]})

    def make(text: str, number: int) -> dict:
        return {name: torch.tensor(value) for name, value in WORDS(text, padding="max_length", max_length=5).items()}

    def said(rows: Any, tokenizer: Any = WORDS) -> list[str]:
        collate_fn = getattr(rows, "collate", None)
        loader = make_eval_loader(rows, run.args, 0, 1, collate_fn=collate_fn) if hasattr(rows, "__len__") else rows
        run.show_rows(tokenizer, {"Evaluation": loader})
        return capsys.readouterr().out.splitlines()

    (line,) = said(packed := PackedRows(ids, 8, 0, True))
    assert line.startswith("Evaluation: 3 of 8 tokens, in 2 of 3 rows, are '<unk>'")
    assert "row 2: 'c <unk> <unk> a'" in line
    assert said(Rows(texts, make)) == said(FirstRows(run, ids, lambda rows: collate([packed[0]]))) == [line]
    (line,) = said(Pairs(pairs, 0))
    assert line.startswith("Evaluation: 3 of 8 target tokens, in 2 of 3 rows")
    (line,) = said(SimpleNamespace(first_batch=lambda: {"input_ids": torch.tensor([[4, 3, 5]])}))
    assert "1 of 3 tokens, in 1 of 1 rows" in line
    other = copy.deepcopy(WORDS)
    other.unk_token = other.eos_token  # as in GPT-2, whose tokens write every character
    assert said(packed, other) == said(Rows(["a b", "c"], make)) == []


@pytest.mark.parametrize("name, wanted", [
    ("chess", r"Training\n\n  row 1: 2\d\d tokens, 2\d\d targets(.|\n)*Evaluation\n\n  row 1: 2\d\d tokens"),
    ("c4", r"Training\n\n  row 1: 256 tokens, 255 targets\n  read   \| <s>\n  target \| "),
    ("t5", r"row 1, to read: \d+ tokens, 0 targets(.|\n)*  row 1, to write: (\d+) tokens, \2 targets"),
], ids=["chess", "c4", "t5"])  # fmt: skip
def test_prepare(name, wanted, games_file, out, at_the_root, capsys):
    """The data of any recipe are prepared, and shown, by one process, without a model or a checkpoint."""
    command = [f"recipes/{name}.py", "--config", f"recipes/configs/{name}/laptop.yaml", "--output_dir", str(out)]
    recipe.prepare_data([*command, *(["--train_files", str(games_file)] if name == "chess" else [])])
    printed = capsys.readouterr().out
    assert re.search(wanted, printed), printed[:3000]
    written = (out / "rows.txt").read_text()
    counted, rest = written.split("\n\n", 1)
    assert counted in printed and rest in printed, "what was printed is what lies there"
    of = "The first rows" if name == "c4" else "Rows"  # nobody has counted a stream
    wanted = rf"{of} to train on: [\d,]+ rows; 0 without a target;.* targets a row: mean [\d,.]+, most \d+"
    assert re.match(wanted, counted)
    assert (out / "rows.html").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(("checkpoint", "status", "args", "metrics"))]
