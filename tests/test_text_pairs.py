"""Tests of pairs: reading, splitting, cutting, counting; and padding, which has no loss."""

import copy
import json
import signal
import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from arithmetic import rounding
from datasets import Dataset, load_from_disk
from helpers import ROOT
from tiny import tiny_model
from transformers import ByT5Tokenizer

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments import shipped
from accelerate_recipes.data.files import falls_under
from accelerate_recipes.data.prepared import tokens_key
from accelerate_recipes.data.rows import make_eval_loader, make_train_loader
from accelerate_recipes.data.text_pairs import PairArgs, Pairs, prepare_pairs
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.losses import count_labels, sequence_to_sequence_loss
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer

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


def write_jsonl(path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_pairs(path, pairs):
    return write_jsonl(path, [{"source": source, "target": target} for source, target in pairs])


def texts_of(heldout: Dataset) -> list[tuple[str, list[str]]]:
    return list(zip(heldout["source"], heldout["references"], strict=True))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "nested jsonl", "parquet", "dataset", "folder"])
def test_every_kind_of_source(kind, prepare, tokenizer, tmp_path):
    """Texts arrive unchanged, even if they look like missing values."""
    rows = [{"source": source, "target": target} for source, target in TEXTS]
    more, heldout_texts = {}, [("Bad", "NA"), ("N/A", "None")]
    evaluated = write_pairs(tmp_path / "eval.jsonl", heldout_texts)
    file = tmp_path / f"pairs.{kind.split()[-1]}"
    if kind == "csv":
        file.write_text("\n".join(["source,target", *map(",".join, TEXTS)]) + "\n")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "nested jsonl":
        write_jsonl(file, [{"id": 7, "translation": {"en": row["source"], "fr": row["target"]}} for row in rows])
        more = {"source_column": "translation.en", "target_column": "translation.fr"}
        more |= {"eval_source_column": "source", "eval_target_column": "target"}
    else:
        write_jsonl(file, rows)
    files = {"train_files": [file], "eval_files": [evaluated]}
    if kind == "folder":
        for part, some in (("files", rows), ("more", heldout_texts)):
            (tmp_path / part).mkdir()
            (write_jsonl if part == "files" else write_pairs)(tmp_path / part / "pairs.jsonl", some)
        files = {"train_files": [tmp_path / "files"], "eval_files": [tmp_path / "more"]}
        args = shipped.load(ROOT / "recipes/t5.py").Args(train_files=[str(tmp_path / "files")])
        assert not [problem for problem in args.problems(1) if "train_files" in problem]
    if kind == "dataset":
        folder = tmp_path / "dataset"
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", rows)
        write_pairs(folder / "validation.jsonl", heldout_texts)
        files = {"dataset_name": str(folder), "eval_split": "validation"}
    facts, train, heldout = prepare(**files, **more)
    assert texts_of(heldout) == [(source, [target]) for source, target in heldout_texts]
    for part, texts in ((train, TEXTS), (heldout, heldout_texts)):
        whole = {"pairs": len(texts), "truncated_sources": 0, "truncated_targets": 0}
        assert facts["train" if part is train else "heldout"] == whole
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
    for first, repeated in (("text 9", 0), ("Text 3", 1)):  # one of ten is no reason to refuse a published test set
        write_pairs(file, [(first, "y"), *((f"new {i}", "x") for i in range(9))])
        facts, train, heldout = prepare(train_files=[folder / "train.jsonl"], eval_files=[file])
        assert (facts["repeated"], len(train), len(heldout)) == (repeated, 9, 10)
        assert capsys.readouterr().out.count("Sources of 1 pairs of ") == repeated


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


def test_several_right_targets(prepare, tmp_path):
    rows = [{"source": "he go", "target": ["he goes", "he went"]}, {"source": "ok", "target": ["ok"]}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    other = write_jsonl(tmp_path / "b.jsonl", [row | {"source": f"{row['source']}!"} for row in rows])
    facts, train, heldout = prepare(train_files=[file], eval_files=[other])
    assert facts["train"]["pairs"] == len(train) == 3 and facts["heldout"]["pairs"] == len(heldout) == 2
    assert train["source_ids"][0] == train["source_ids"][1] and train["target_ids"][0] != train["target_ids"][1]
    assert texts_of(heldout) == [("he go!", ["he goes", "he went"]), ("ok!", ["ok"])]
    assert heldout["target_ids"][0] == train["target_ids"][0]


def test_mistakes_are_named(prepare, tmp_path, tokenizer):
    def problem(rows: list[dict], **settings) -> str:
        file = write_jsonl(tmp_path / "a.jsonl", rows)
        with pytest.raises((ConfigError, DataError)) as error:
            prepare(**{"train_files": [file]} | settings)
        assert not (tmp_path / "cache").exists(), "a build that failed leaves nothing"
        return str(error.value).replace(f"{tmp_path}/", "")

    rows = [{"source": f"text {i}", "translation": {"en": "x", "fr": "y"}, "n": 3} for i in range(9)]
    nested = {"target_column": "translation.fr"}
    assert problem(rows) == "a.jsonl has no column 'target'; it has source, translation.en, translation.fr, n"
    assert "no column 'translation'; it has source" in problem(rows, target_column="translation")
    assert problem(rows, target_column="n") == "a.jsonl: column 'n' holds int64, not text"
    assert problem(rows, **nested, heldout_share=0.0) == (
        "none of 9 pairs of texts is left for heldout; change --heldout_share 0.0"
    )
    bad = [{"source": "a", "target": " "}, {"source": None, "target": "b"}, *[{"source": "c", "target": None}] * 7]
    found = problem(bad)
    assert "--skip_bad_pairs leaves them out (the first 5 of 9)" in found
    assert "a.jsonl, row 1: its target is empty" in found and "a.jsonl, row 2: its source is empty" in found
    assert "row 5" in found and "row 6" not in found
    assert problem(bad, skip_bad_pairs=True) == "none of 0 pairs of texts is left for train"
    (tmp_path / "c.jsonl").write_text("no JSON\n")
    assert "c.jsonl, line 1 is not JSON: " in problem(rows, train_files=[tmp_path / "c.jsonl"])
    (tmp_path / "no.jsonl").touch()
    (tmp_path / "no.csv").write_text("source,target\n")
    pq.write_table(pa.table({"source": pa.array([], pa.string()), "target": []}), tmp_path / "no.parquet")
    for file in ("no.jsonl", "no.csv", "no.parquet"):
        assert problem(rows, train_files=[tmp_path / file]) == f"{file} cannot be read: it has 0 rows"
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", rows)
    found = problem(rows, train_files=[], dataset_name=str(folder), eval_split="dev", **nested)
    assert "dataset, split dev cannot be read: there is no split dev; there are train" in found
    found = problem(rows, train_files=[], dataset_name=str(folder), train_split="train[:0]", **nested)
    assert found == "dataset, split train[:0] cannot be read: it has 0 rows"
    found = problem(rows, train_files=[], dataset_name="nobody/nothing")
    assert found == "dataset 'nobody/nothing' (its only configuration) was not downloaded"
    without_end = new_bpe_tokenizer(["a b"], 300)
    assert "does not put its end token behind a text" in problem(rows, **nested, tokenizer=without_end)


def test_bad_pairs_are_left_out_and_counted(prepare, tmp_path):
    file = write_pairs(tmp_path / "a.jsonl", [*TEXTS, ("x", "")])
    other = write_pairs(tmp_path / "b.jsonl", [("new", "x"), ("x", "")])
    facts, train, _ = prepare(train_files=[file], eval_files=[other], skip_bad_pairs=True)
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_loaders(world_size):
    """The ranks' loaders together give each row once, and continue where they stopped after a resume."""
    generator = np.random.default_rng(1)
    pairs = make_pairs(generator.integers(1, 40, (37, 2)).tolist())
    args = TrainArgs(total_batch_size=8, per_device_train_batch_size=2, per_device_eval_batch_size=3)

    def batches(make, rank: int) -> list[dict]:
        loader = make(pairs, args, rank, world_size, lengths=pairs.lengths, collate_fn=pairs.collate)
        num = 5 * args.accumulation_steps(world_size) if make is make_train_loader else len(loader)
        return [batch for batch, _ in zip(loader, range(num), strict=False)]

    for make in (make_train_loader, make_eval_loader):
        ranks = [batches(make, rank) for rank in range(world_size)]
        rows = [row for mine in ranks for batch in mine for row in batch["row"].tolist()]
        assert sorted(row for row in rows if row >= 0) == list(range(37))
        assert len({len(mine) for mine in ranks}) == 1
        for batch in ranks[0]:
            for row, ids, mask in zip(batch["row"], batch["input_ids"], batch["attention_mask"], strict=True):
                assert ids[mask == 1].tolist() == pairs[row.item()]["source_ids"].tolist()
    later = make_train_loader(pairs, args, 0, world_size, lengths=pairs.lengths, collate_fn=pairs.collate)
    later.start_at(3, [later.state()] * world_size)
    wanted = batches(make_train_loader, 0)[3 * args.accumulation_steps(world_size)]
    assert torch.equal(next(iter(later))["row"], wanted["row"]) and later.counts() == {}


@pytest.fixture(scope="module")
def model():
    return tiny_model("t5", vocab_size=50).eval()


@pytest.fixture(scope="module")
def exact(model):
    """Return the model in float64, whose gradients no processor rounds visibly; the sum of the losses is in fp32."""
    return copy.deepcopy(model).double()


def loss_and_gradients(model, batch) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = sequence_to_sequence_loss(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.shape == ()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_loss_is_that_of_transformers(model):
    pairs = make_pairs([(3, 9), (8, 2), (12, 17)])
    batch = pairs.collate([pairs[i] for i in range(3)])
    assert count_labels(batch).item() == 28
    wanted = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss.item()
    assert sequence_to_sequence_loss(model, batch).item() / 28 == pytest.approx(wanted, rel=rounding(28))
    # In bf16 the sum is in fp32: for 28 losses of 4 nats, bf16 would keep 2 digits.
    with torch.autocast("cpu", torch.bfloat16):
        assert sequence_to_sequence_loss(model, batch).item() / 28 == pytest.approx(wanted, rel=3e-3)


def test_padding_is_not_trained_on(exact):
    """Neither the amount nor the token of padding changes loss or gradients, nor, in the source, its side."""
    pairs = make_pairs([(3, 9), (8, 2), (12, 17)])
    batch = pairs.collate([pairs[i] for i in range(3)])
    wanted, wanted_gradients = loss_and_gradients(exact, batch)
    apart = [loss_and_gradients(exact, pairs.collate([pairs[i]])) for i in range(3)]
    assert sum(loss for loss, _ in apart) == pytest.approx(wanted, rel=rounding(28))

    def padded(batch, left: int, right: int, targets: int, token: int) -> dict[str, torch.Tensor]:
        fill = {"input_ids": (left, right, token), "attention_mask": (left, right, 0)}
        fill["labels"] = (0, targets, IGNORE_INDEX)
        more = {name: torch.nn.functional.pad(batch[name], (a, b), value=v) for name, (a, b, v) in fill.items()}
        return batch | more

    for change in [(0, 50, 0, 0), (0, 0, 50, 0), (50, 0, 50, 0), (7, 3, 1, 13)]:
        found, gradients = loss_and_gradients(exact, padded(batch, *change))
        assert found == pytest.approx(wanted, rel=rounding(28)), change
        assert ((gradients - wanted_gradients).norm() / wanted_gradients.norm()).item() < 1e-9, change


def test_division_of_a_batch_leaves_loss_and_gradients_alone(exact):
    """Loss and gradients are the same for any number of ranks, size of micro-batches and padding; the last step is not full."""
    pairs = make_pairs(np.random.default_rng(2).integers(1, 40, (20, 2)).tolist())

    def steps(world_size: int, size: int) -> list[tuple[float, torch.Tensor]]:
        args = TrainArgs(total_batch_size=8, per_device_train_batch_size=size)
        loaders = [
            iter(make_train_loader(pairs, args, rank, world_size, lengths=pairs.lengths, collate_fn=pairs.collate))
            for rank in range(world_size)
        ]
        found = []
        for _ in range(3):
            batches = [next(loader) for loader in loaders for _ in range(args.accumulation_steps(world_size))]
            losses, gradients = zip(*(loss_and_gradients(exact, batch) for batch in batches), strict=True)
            found.append((sum(losses), sum(gradients)))
        return found

    wanted = steps(1, 8)
    for division in [(1, 2), (2, 4), (2, 1), (4, 2)]:
        for (loss, gradients), (wanted_loss, wanted_gradients) in zip(steps(*division), wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=rounding(8 * 40)), division
            assert ((gradients - wanted_gradients).norm() / wanted_gradients.norm()).item() < 1e-9, division


def test_a_batch_without_targets_adds_nothing(model):
    pairs = make_pairs([(3, 9)])
    loss, gradients = loss_and_gradients(model, pairs.collate([pairs[-1], pairs[-1]]))
    assert loss == 0 and torch.count_nonzero(gradients) == 0 and torch.isfinite(gradients).all()


def test_shipped_pairs(prepare, tokenizer):
    """The pairs are as data/README.md describes them, and sorting a step by length saves half of the padding."""
    facts, train, _ = prepare(
        train_files=[SHIPPED], source_column="translation.en", target_column="translation.fr", heldout_share=0.05
    )
    assert facts["train"]["pairs"] + facts["heldout"]["pairs"] == 8029
    assert 300 < facts["heldout"]["pairs"] < 500
    pairs = Pairs(train, tokenizer.pad_token_id)
    args = TrainArgs(total_batch_size=64, per_device_train_batch_size=16)

    def padding_share(lengths) -> float:
        loader = make_train_loader(pairs, args, 0, 1, lengths=lengths, collate_fn=pairs.collate)
        batches = [batch for batch, _ in zip(loader, range(100), strict=False)]
        places = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
        tokens = sum((batch["attention_mask"].sum() + count_labels(batch)).item() for batch in batches)
        return 1 - tokens / places

    plain, grouped = padding_share(None), padding_share(pairs.lengths)
    assert plain > 0.55 and grouped < 0.35, (plain, grouped)


def test_upstream_dies_of_a_line_that_is_null():
    """Without this, `files.check_no_null` is not needed."""
    code = "import io, pyarrow.json; pyarrow.json.read_json(io.BytesIO(b'null\\n{}'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == -signal.SIGSEGV
