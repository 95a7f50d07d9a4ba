"""Tests of the pretraining recipe on a few real pages: streamed, killed, resumed on other numbers of ranks, exported."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from helpers import ROOT, killed_at_opening, launch_ok, log_of, losses, read_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from accelerate_recipes.data.files import falls_under
from accelerate_recipes.text.pretraining import ValidationRows

C4 = SCRIPT = ROOT / "recipes" / "c4.py"
STEPS = 12
SIZES = (
    "--config_overrides", "vocab_size=300", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2",
    "num_attention_heads=2", "max_position_embeddings=64", "rms_norm_eps=1e-5",
)  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """Files with the beginnings of the shipped pages, named like C4's; so unequal that ranks hand rows over to others."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "en").mkdir()
    for i, file in enumerate(sorted((ROOT / "data/c4_pydoc/en").glob("*.json.gz"))):
        with gzip.open(file, "rt") as lines, gzip.open(folder / "en" / file.name, "wt") as out:
            for _, line in zip(range(20), lines, strict=False):
                page = json.loads(line)
                out.write(json.dumps(page | {"text": page["text"][: 50 + 300 * (i // 2)]}) + "\n")
    return folder


@pytest.fixture(scope="module")
def arguments(pages) -> tuple:
    return (
        "--dataset_name", pages, *SIZES, "--max_length", 64, "--max_steps", STEPS, "--total_batch_size", 8,
        "--per_device_train_batch_size", 2, "--num_validation_rows", 10, "--learning_rate", 1e-2, "--logging_steps", 1,
        "--save_steps", 4, "--save_total_limit", 0, "--dataloader_num_workers", 2, "--async_save", "false",
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(run) -> Path:
    """Output of a whole run on 2 ranks."""
    return run()


def test_it_says_what_it_does(undisturbed):
    printed = log_of(undisturbed)
    assert "Data: 4 shards, in rows of 64 tokens; validation on 10 rows" in printed
    steps = re.findall(r"Step (\d+)/12 Loss: .*, data wait: \d+\.\d%", printed)
    assert steps == [str(step) for step in range(1, STEPS + 1)], "max_steps is exact"
    assert re.search(r"Bits per byte .*\([\d,]+ bytes\): before .*, gzip .*, after ", printed)
    records = [record for record in read_metrics(undisturbed) if "loss" in record]
    assert [record["tokens_seen"] for record in records] == [8 * 64 * step for step in range(1, STEPS + 1)]
    assert records[-1]["retries"] == 0 and records[-1]["documents_seen"] > records[0]["documents_seen"]
    assert (undisturbed / "result.png").read_bytes().startswith(b"\x89PNG")


def test_it_learns_and_what_it_learnt_is_exported(undisturbed):
    before, after = (record for record in read_metrics(undisturbed) if "eval_loss" in record)
    assert after["eval_bits_per_byte"] < before["eval_bits_per_byte"] - 0.3
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "export")
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "export")
    assert tokenizer.decode(tokenizer("A page.")["input_ids"], skip_special_tokens=True) == "A page."
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_killed_and_resumed_is_as_if_it_had_not_been(forks, arguments, undisturbed, out):
    """A killed and resumed run is equal bit for bit, although workers had read ahead."""
    # When rank 0 would log step 7: it has opened the file for the evaluation, for 6 steps and for a copy.
    assert forks.run(out, *arguments, **killed_at_opening(11)) == -9, log_of(out)[-3000:]
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"] and max(losses(out)) == 6
    assert re.search(r"Resumed .*checkpoint-4 \(step", forks.succeed(out, *arguments))
    assert losses(out) == losses(undisturbed)


def test_validation_is_the_same_number_on_the_same_weights(forks, arguments, undisturbed, tmp_path):
    """Validation gives the same number twice if nothing is learnt, and on 1 rank as on 2."""
    still = ("--learning_rate", 0, "--eval_steps", 1, "--max_steps", 2)
    forks.succeed(tmp_path / "out", *arguments, *still, num_processes=1)
    found = [record["eval_loss"] for record in read_metrics(tmp_path / "out") if "eval_loss" in record]
    assert len(found) == 3 and len(set(found)) == 1
    first = next(record["eval_loss"] for record in read_metrics(undisturbed) if "eval_loss" in record)
    assert found[0] == pytest.approx(first, rel=1e-6)


def test_checkpoints_by_time(forks, arguments, tmp_path):
    """The first rank's clock decides for all: a checkpoint at other steps than --save_steps."""
    by_time = ("--save_steps", 0, "--save_minutes", 1e-9, "--max_steps", 3)
    forks.succeed(tmp_path / "out", *arguments, *by_time)
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 3


@pytest.mark.parametrize("wrong, messages", [
    (("--num_validation_rows", 0, "--max_steps", -1, "--num_streams", 5), [
        "--num_validation_rows is 0; it must be at least 1", "--max_steps is missing",
        "--num_streams 5 is not a multiple of 2 processes"]),
    (("--max_length", 128), ["--max_length is 128, "]),
    (("--validation_dataset_files", "en/none.*"), ["pages0 is a folder, but lacks a file that matches 'en/none.*'"]),
    (("--dataset_name", "allenai/c4", "--tokenizer_name", "no/tokenizer"), [
        "dataset 'allenai/c4' (en/c4-train.*.json.gz) is not in ", "tokenizer 'no/tokenizer' is not in "]),
    (("--text_column", "body"), ["has no 'body'"]),
])  # fmt: skip
def test_errors_are_one_message(forks, arguments, out, wrong, messages):
    assert forks.run(out, *arguments, *wrong) == 2
    said = log_of(out)
    assert all(message in said for message in messages) and "Traceback" not in said, said[-3000:]
    left = sorted(path.name for path in out.iterdir()) if out.exists() else []
    assert left == (["attempts.jsonl", "status.json"] if wrong[0] == "--text_column" else []), (
        "for a job script: it would fail again"
    )


@pytest.mark.parametrize("name, more, message", [
    ("--model_name_or_path", ("--max_length", 128), r"--max_length is 128, .* made for 64 tokens"),
    ("--tokenizer_name", ("--config_overrides", "vocab_size=200"), "set vocab_size in --config_overrides to 300"),
])  # fmt: skip
def test_a_model_that_does_not_fit(forks, arguments, undisturbed, tmp_path, name, more, message):
    """Rows are longer than it reads, or the tokenizer has more tokens."""
    assert forks.run(tmp_path / "out", *arguments, name, undisturbed / "export", *more) == 2
    assert re.search(message, log_of(tmp_path / "out"))


@pytest.mark.slow
def test_files_alone(forks, arguments, pages, tmp_path):
    """A folder of texts is enough: a share of them is validated on, and an epoch is counted."""
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {}
    *_, file = sorted((pages / "en").glob("c4-train*.json.gz"))
    with gzip.open(file, "rt") as lines:
        texts |= {f"{number:02}": json.loads(line)["text"] for number, line in enumerate(lines)}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    del options["--dataset_name"], options["--max_steps"]
    options |= {"--train_files": folder, "--heldout_share": 0.3, "--num_validation_rows": 1000, "--save_steps": 0}
    flags = [value for pair in options.items() for value in pair]
    out = tmp_path / "out"
    forks.succeed(out, *flags, HF_HUB_OFFLINE="1")
    printed = log_of(out)
    held = [text for text in texts.values() if falls_under(text, 0.3)]
    assert f"Data: {len(texts)} shards, in rows of 64 tokens; validation on " in printed
    assert "; 30.0% of the documents" in printed
    assert f"Bits per byte of the validation text ({sum(len(text.encode()) for text in held):,} bytes)" in printed
    records = [record for record in read_metrics(out) if "loss" in record]
    assert len(texts) - len(held) <= records[-1]["documents_seen"] < 2 * (len(texts) - len(held))
    assert records[-2]["documents_seen"] < len(texts) - len(held), "as few steps as an epoch needs"


@pytest.mark.long
def test_compiled_layer_by_layer(arguments, undisturbed, tmp_path):
    """dynamo_config of the YAML: the kernels change, the losses do not; each rank has a cache of its own."""
    caches = tmp_path / "caches"
    done = launch_ok(
        tmp_path, "fsdp_full", C4, *arguments, "--max_steps", 4, "--output_dir", tmp_path / "out",
        flags=("--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"),
        TORCHINDUCTOR_CACHE_DIR=str(caches),
    )  # fmt: skip
    assert sorted(path.name for path in caches.iterdir()) == ["rank-0", "rank-1"], done.stderr[-2000:]
    first = {step: loss for step, loss in losses(undisturbed).items() if step <= 2}
    begun = {step: loss for step, loss in losses(tmp_path / "out").items() if step <= 2}
    assert begun == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(
    "loss, perplexity", [(2.0, math.e**2), (709.5, math.exp(709.5)), (710.0, math.inf), (math.nan, math.nan)]
)
def test_a_loss_of_any_size_has_its_units(loss, perplexity):
    """A run that diverged says so, and is saved, although e to the power of 710 is no float."""
    found = ValidationRows(None, [], bytes_per_token=4.0).measures(loss)
    assert found["perplexity"] == pytest.approx(perplexity, nan_ok=True)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) / 4, nan_ok=True)


@pytest.mark.slow
def test_rows_that_ranks_share(forks, arguments, undisturbed, out):
    """Two groups of two ranks read the streams as two ranks do: the same losses, and each token counted once."""
    forks.succeed(out, *arguments, config="fsdp_long", num_processes=4, PARALLELISM_CONFIG_DP_SHARD_SIZE="2")
    for found, wanted in zip(read_metrics(out), read_metrics(undisturbed), strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & wanted.keys():
            assert found[name] == pytest.approx(wanted[name], rel=1e-5)
        for name in ("tokens_seen", "documents_seen"):
            assert found.get(name) == wanted.get(name)
    assert (out / "export/model.safetensors").exists()


def test_data_only_under_a_launcher(forks, arguments, tmp_path):
    """Each process reads alone, whatever mesh the YAML asks for."""
    forks.succeed(tmp_path / "out", *arguments, "--data_only", "true", config="fsdp_long", num_processes=2)
