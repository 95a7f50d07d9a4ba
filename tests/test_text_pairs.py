"""Tests of pairs: reading, splitting, cutting, counting; and padding, which has no loss."""

import json
import signal
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from arithmetic import rounding
from datasets import Dataset, load_from_disk
from helpers import ROOT, write_rows
from tiny import tiny_model
from transformers import ByT5Tokenizer

from accelerate_recipes.arguments import shipped
from accelerate_recipes.data.files import falls_under
from accelerate_recipes.data.prepared import tokens_key
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.losses import count_labels, sequence_to_sequence_loss
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.text.text_pairs import TASK_PREFIX, PairArgs, Pairs, prepare_pairs

SHIPPED = ROOT / "data/en_fr/libreoffice.jsonl"
TEXTS = [("Good morning", "Bonjour"), ("Open the file", "Ouvrir le fichier"), ("None", "NA")]


@pytest.fixture(scope="module")
def tokenizer():
    """Tokenizer that ends a text with its end token, as T5's does."""
    return new_bpe_tokenizer(SHIPPED.read_text().splitlines()[:300], 400, "$A </s>")


@pytest.fixture
def prepare(tokenizer, tmp_path, monkeypatch):
    """Return the facts and both parts, by default from local files with columns `source` and `target`."""

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "rows")

    def run(tokenizer=tokenizer, **settings):
        defaults = {
            "source_column": "source", "target_column": "target", "task_prefix": "", "max_source_length": 128,
            "heldout_share": 0.5, "data_cache_dir": str(tmp_path / "cache"), "dataset_config": "",
        }  # fmt: skip
        settings = defaults | settings
        for part in ("train_files", "eval_files"):
            settings[part] = [str(file) for file in settings.get(part, [])]
        folder = prepare_pairs(tokenizer, PairArgs(**settings))
        facts = json.loads((folder / "facts.json").read_text())
        return facts, load_from_disk(folder / "train"), load_from_disk(folder / "heldout")

    return run


def write_pairs(path, pairs):
    return write_rows(path, [{"source": source, "target": target} for source, target in pairs])


def texts_of(heldout: Dataset) -> list[tuple[str, list[str]]]:
    return list(zip(heldout["source"], heldout["references"], strict=True))


def test_folders_of_pairs(prepare, tokenizer, tmp_path):
    """Texts arrive unchanged, even if they look like missing values; columns to evaluate on may have other names."""
    for name in ("files", "more"):
        (tmp_path / name).mkdir()
    rows = [{"id": 7, "translation": {"en": source, "fr": target}} for source, target in TEXTS]
    write_rows(tmp_path / "files/pairs.jsonl", rows)
    evaluated = [("Bad", "NA"), ("N/A", "None")]
    write_pairs(tmp_path / "more/pairs.jsonl", evaluated)
    args = shipped.load(ROOT / "recipes/t5.py").Args(train_files=[str(tmp_path / "files")])
    assert not [problem for problem in args.problems(1) if "train_files" in problem]
    columns = {"source_column": "translation.en", "target_column": "translation.fr"}
    columns |= {"eval_source_column": "source", "eval_target_column": "target"}
    facts, *parts = prepare(train_files=[tmp_path / "files"], eval_files=[tmp_path / "more"], **columns)
    assert texts_of(parts[1]) == [(source, [target]) for source, target in evaluated]
    for name, part, texts in zip(("train", "heldout"), parts, (TEXTS, evaluated), strict=True):
        assert facts[name] == {"pairs": len(texts), "truncated_sources": 0, "truncated_targets": 0}
        assert part["source_ids"][:] == [tokenizer(source)["input_ids"] for source, _ in texts]
        assert part["target_ids"][:] == [tokenizer(target)["input_ids"] for _, target in texts]
    assert facts["skipped"] == facts["repeated"] == 0


def test_a_source_on_both_sides(prepare, tmp_path, capsys):
    """Of files it is refused, with both numbers, also in other case and white space; of a split of a dataset it is counted."""
    trained, others = [(f"text {i}", "x") for i in range(9)], [("new", "x"), (" TEXT  7\n", "y"), ("text 8", "x")]
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_pairs(folder / "train.jsonl", trained)
    file = write_pairs(folder / "validation.jsonl", others)
    with pytest.raises(ConfigError, match=r"2 of 3 rows of --eval_files begin as rows of .*train\.jsonl do.*' TEXT  7"):
        prepare(train_files=[folder / "train.jsonl"], eval_files=[file])
    for _ in range(2):  # also when the prepared pairs are found again
        facts, train, heldout = prepare(dataset_name=str(folder), eval_split="validation")
        assert (facts["repeated"], len(train), len(heldout)) == (2, 9, 3)
        assert "Sources of 2 pairs of " in capsys.readouterr().out


def test_bytes_as_tokens(prepare, tmp_path):
    """ByT5's tokenizer is written in Python: it has no tokenizer.json."""
    tokenizer = ByT5Tokenizer()
    trained, evaluated = write_pairs(tmp_path / "a.jsonl", TEXTS[:2]), write_pairs(tmp_path / "b.jsonl", TEXTS[2:])
    facts, train, heldout = prepare(tokenizer, train_files=[trained], eval_files=[evaluated])
    assert train["source_ids"][:] == [[byte + 3 for byte in source.encode()] + [1] for source, _ in TEXTS[:2]]
    assert texts_of(heldout) == [("None", ["NA"])] and facts["train"]["pairs"] == 2
    assert tokens_key(tokenizer) != tokens_key(ByT5Tokenizer(extra_ids=0))


def test_prefix_and_truncation(prepare, tokenizer, tmp_path):
    long = " ".join(["word"] * 50)
    file = write_pairs(tmp_path / "a.jsonl", [("short", long), (long, "kurz"), (long + " x", long)])
    other = write_pairs(tmp_path / "b.jsonl", [("brief", "kurz")])
    facts, train, heldout = prepare(
        train_files=[file], eval_files=[other], task_prefix="fix: ", max_source_length=20, max_target_length=10
    )
    assert facts["train"] == {"pairs": 3, "truncated_sources": 2, "truncated_targets": 2}
    for row in train:
        assert len(row["source_ids"]) <= 20 and len(row["target_ids"]) <= 10
        assert row["source_ids"][-1] == row["target_ids"][-1] == tokenizer.eos_token_id
        assert tokenizer.decode(row["source_ids"]).startswith("fix: ")
        assert not tokenizer.decode(row["target_ids"]).startswith("fix: ")
    assert [len(ids) for ids in train["source_ids"]][1:] == [20, 20]
    assert heldout["source"][0] == "brief", "without the prefix"
    # A text of exactly the longest length is not cut.
    exact = len(tokenizer(long)["input_ids"])
    facts, *_ = prepare(train_files=[file], eval_files=[other], max_target_length=exact)
    assert facts["train"]["truncated_targets"] == 0


def test_split_is_by_source_whatever_the_order(prepare, tmp_path):
    pairs = [(f"Text {i % 100}", f"Texte {i}") for i in range(200)]
    pairs += [(f"  text  {i}\n", "autre") for i in range(100)]  # the same sources, except for case and white space
    sides = []
    for name, some in {"a": pairs, "b": pairs[::-1]}.items():
        facts, _, heldout = prepare(train_files=[write_pairs(tmp_path / f"{name}.jsonl", some)], heldout_share=0.3)
        assert facts["train"]["pairs"] + facts["heldout"]["pairs"] == 300
        sides.append(set(heldout["source"]))
        texts = [" ".join(source.lower().split()) for source in heldout["source"]]
        assert all(texts.count(text) == 3 for text in texts)
        assert 15 < len(set(texts)) < 45
    assert sides[0] == sides[1]
    assert falls_under("x", 1) and not falls_under("x", 0)
    for i in range(20):  # two ways to write one letter
        assert falls_under(f"\ufb01le e\u0301 {i}", 0.5) == falls_under(f"File\u00a0\u00e9 {i}", 0.5)


def test_cached_until_something_changes(prepare, tmp_path):
    file = write_pairs(tmp_path / "a.jsonl", [(f"text {i}", "x") for i in range(20)])

    def num_folders(**settings) -> int:
        prepare(train_files=[file], **settings)
        return len(list((tmp_path / "cache").iterdir()))

    assert [num_folders(), num_folders()] == [1, 1]
    file = file.rename(tmp_path / "moved.jsonl")
    assert num_folders() == 1
    other = write_pairs(tmp_path / "other.jsonl", [("new", "x")])
    changes = [{"task_prefix": "p: "}, {"max_target_length": 9}, {"heldout_share": 0.4}, {"eval_files": [other]}]
    assert [num_folders(**change) for change in changes] == [2, 3, 4, 5]


def test_a_prefix_goes_with_what_it_describes():
    """The default one translates the default columns of the default dataset; a resumed run keeps that of its checkpoint."""
    args_class = shipped.load(ROOT / "recipes/t5.py").Args
    for changed, prefix in (
        ({}, TASK_PREFIX),
        ({"train_files": ["a.jsonl"]}, ""),
        ({"dataset_name": "mine"}, ""),
        ({"dataset_config": "en-de"}, ""),
        ({"source_column": "translation.fr", "target_column": "translation.en"}, ""),
        ({"train_files": ["a.jsonl"], "task_prefix": "fix: "}, "fix: "),
        ({"task_prefix": ""}, ""),
    ):
        args = args_class(**changed)
        args.settle({})
        assert args.task_prefix == prefix, changed
    args = args_class(train_files=["a.jsonl"])
    args.settle({"task_prefix": TASK_PREFIX})
    assert args.task_prefix == TASK_PREFIX


def test_several_right_targets(prepare, tmp_path):
    rows = [{"source": "he go", "target": ["he goes", "he went"]}, {"source": "ok", "target": ["ok"]}]
    file = write_rows(tmp_path / "a.jsonl", rows)
    other = write_rows(tmp_path / "b.jsonl", [row | {"source": f"{row['source']}!"} for row in rows])
    facts, train, heldout = prepare(train_files=[file], eval_files=[other])
    assert facts["train"]["pairs"] == len(train) == 3 and facts["heldout"]["pairs"] == len(heldout) == 2
    assert train["source_ids"][0] == train["source_ids"][1] and train["target_ids"][0] != train["target_ids"][1]
    assert texts_of(heldout) == [("he go!", ["he goes", "he went"]), ("ok!", ["ok"])]
    assert heldout["target_ids"][0] == train["target_ids"][0]


def test_mistakes_are_named(prepare, tmp_path, tokenizer):
    def problem(rows: list[dict], **settings) -> str:
        file = write_rows(tmp_path / "a.jsonl", rows)
        with pytest.raises((ConfigError, DataError)) as error:
            prepare(**{"train_files": [file]} | settings)
        assert not (tmp_path / "cache").exists(), "a build that failed leaves nothing"
        return str(error.value).replace(f"{tmp_path}/", "")

    rows = [{"source": f"text {i}", "translation": {"en": "x", "fr": "y"}, "n": 3} for i in range(9)]
    nested = {"target_column": "translation.fr"}
    assert problem(rows) == "a.jsonl has no column 'target'; it has source, translation.en, translation.fr, n"
    assert "no column 'translation'; it has source" in problem(rows, target_column="translation")
    assert problem(rows, target_column="n") == "a.jsonl: column 'n' holds int64, not text"
    said = problem(rows, **nested, heldout_share=0.0)
    assert said.startswith("none of 9 pairs of texts is left for heldout; give --heldout_share 0.")
    assert "(it is 0.0)" in said
    bad = [{"source": "a", "target": " "}, {"source": None, "target": "b"}, *[{"source": "c", "target": None}] * 7]
    found = problem(bad)
    assert "--skip_bad_pairs leaves them out (the first 5 of 9)" in found
    assert "a.jsonl, row 1: its target is empty" in found and "a.jsonl, row 2: its source is empty" in found
    assert "row 5" in found and "row 6" not in found
    assert problem(bad, skip_bad_pairs=True) == "none of 0 pairs of texts is left for train"
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_rows(folder / "train.jsonl", rows)
    found = problem(rows, train_files=[], dataset_name=str(folder), eval_split="dev", **nested)
    assert "dataset, split dev cannot be read: there is no split dev; there are train" in found
    found = problem(rows, train_files=[], dataset_name="nobody/nothing")
    assert found == "dataset 'nobody/nothing' (its only configuration) was not downloaded"
    without_end = new_bpe_tokenizer(["a b"], 300)
    assert "does not put its end token behind a text" in problem(rows, **nested, tokenizer=without_end)


def test_bad_pairs_are_left_out_and_counted(prepare, tmp_path):
    file = write_pairs(tmp_path / "a.jsonl", [*TEXTS, ("x", "")])
    other = write_pairs(tmp_path / "b.jsonl", [("new", "x"), ("x", "")])
    facts, train, _ = prepare(train_files=[file], eval_files=[other], skip_bad_pairs=True)
    assert facts["skipped"] == 2 and facts["train"]["pairs"] == len(train) == 3
    # Objects of which some lack a text, or have other fields.
    parts = [{"en": "a", "fr": "b"}, {"en": "c", "fr": "d", "de": "e"}]
    parts += [{"en": "f", "fr": None}, None, {"en": "g", "fr": "h"}]
    file = write_rows(tmp_path / "c.jsonl", [{"translation": part} for part in parts])
    columns = {"source_column": "translation.en", "target_column": "translation.fr"}
    other = write_rows(tmp_path / "d.jsonl", [{"translation": {"en": "x", "fr": "y"}}])
    facts, train, _ = prepare(train_files=[file], eval_files=[other], **columns, skip_bad_pairs=True)
    assert facts["skipped"] == 2 and facts["train"]["pairs"] == len(train) == 3


def make_pairs(lengths: list[tuple[int, int]]) -> Pairs:
    generator = np.random.default_rng(0)
    columns = zip(*[[generator.integers(3, 50, n).tolist() for n in pair] for pair in lengths], strict=True)
    return Pairs(Dataset.from_dict(dict(zip(("source_ids", "target_ids"), columns, strict=True))), pad_token_id=0)


def test_batches_are_padded_to_multiples_of_8():
    pairs = make_pairs([(3, 9), (8, 2), (5, 5)])
    batch = pairs.collate([pairs[i] for i in (0, 1, -1)])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (3, 8), "attention_mask": (3, 8), "labels": (3, 16), "row": (3,),
    }  # fmt: skip
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert batch["row"].tolist() == [0, 1, -1]
    assert batch["attention_mask"].sum(1).tolist() == [3, 8, 1]
    assert (batch["labels"] != IGNORE_INDEX).sum(1).tolist() == [9, 2, 0]
    assert batch["labels"][0, :9].tolist() == pairs[0]["target_ids"].tolist()
    assert batch["input_ids"][0].tolist() == [*pairs[0]["source_ids"].tolist(), 0, 0, 0, 0, 0]
    assert count_labels(batch).item() == 11
    assert pairs.collate([pairs[-1]])["labels"].shape == (1, 8)


@pytest.fixture(scope="module")
def model():
    return tiny_model("t5", vocab_size=50).eval()


def test_loss_is_that_of_transformers(model):
    pairs = make_pairs([(3, 9), (8, 2), (12, 17)])
    batch = pairs.collate([pairs[i] for i in range(3)])
    assert count_labels(batch).item() == 28
    wanted = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss.item()
    assert sequence_to_sequence_loss(model, batch).item() / 28 == pytest.approx(wanted, rel=rounding(28))
    # In bf16 the sum is in fp32: for 28 losses of 4 nats, bf16 would keep 2 digits.
    with torch.autocast("cpu", torch.bfloat16):
        assert sequence_to_sequence_loss(model, batch).item() / 28 == pytest.approx(wanted, rel=3e-3)


def test_a_batch_without_targets_adds_nothing(model):
    pairs = make_pairs([(3, 9)])
    loss = sequence_to_sequence_loss(model, pairs.collate([pairs[-1], pairs[-1]]))
    loss.backward()
    assert loss.dtype == torch.float32 and loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_shipped_pairs(prepare):
    """The pairs are as data/README.md describes them."""
    columns = {"source_column": "translation.en", "target_column": "translation.fr"}
    facts, *_ = prepare(train_files=[SHIPPED], heldout_share=0.05, **columns)
    assert facts["train"]["pairs"] + facts["heldout"]["pairs"] == 8029
    assert 300 < facts["heldout"]["pairs"] < 500


def test_upstream_dies_of_a_line_that_is_null():
    """Without this, `files.check_no_null` is not needed."""
    code = "import io, pyarrow.json; pyarrow.json.read_json(io.BytesIO(b'null\\n{}'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == -signal.SIGSEGV
