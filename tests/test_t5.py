"""Tests of the T5 recipe on a few real pairs: one trajectory, kill and resume, generation under every sharding, export."""

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, SHORT_RUN, STEPS, change_json, log_of, near, read_metrics, trajectory
from tiny import tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, GenerationConfig

from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.losses import sequence_to_sequence_loss
from accelerate_recipes.metrics import flops_per_target
from accelerate_recipes.models.encoder_decoders import new_encoder_decoder
from accelerate_recipes.models.generation import left_out

T5 = SCRIPT = ROOT / "recipes" / "t5.py"
PREFIX = "translate English to French: "
NUM_EVAL_PAIRS = 13  # uneven on 2 and on 3 ranks


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory) -> Path:
    """File with the first 150 real pairs."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        file.write_text("".join(islice(lines, 150)))
    return file


@pytest.fixture(scope="module")
def arguments(pairs_file, tmp_path_factory) -> tuple:
    """Return arguments of a run that takes seconds, without dropout, which differs with the number of ranks."""
    return (
        "--from_scratch", "--train_files", pairs_file, "--heldout_share", 0.2, "--num_eval_pairs", NUM_EVAL_PAIRS,
        "--config_overrides", "vocab_size=400", "d_model=32", "d_kv=8", "d_ff=64", "num_layers=2", "num_heads=4",
        "feed_forward_proj=gated-gelu", "--task_prefix", PREFIX, "--dropout_rate", 0, "--max_source_length", 64,
        "--max_target_length", 24, *SHORT_RUN, "--save_total_limit", 0, "--total_batch_size", 12,
        "--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 4, "--data_cache_dir", tmp_path_factory.mktemp("cache"),
    )  # fmt: skip


# With these the run is that which most tests compare with.
EVALUATED = ("--eval_steps", 3)


def predictions(out: Path, step: int = STEPS) -> list[dict]:
    return [json.loads(line) for line in (out / f"predictions/step-{step}.jsonl").read_text().splitlines()]


def test_it_says_what_it_does(run):
    out = run(*EVALUATED)
    printed = log_of(out)
    assert "6 FSDP units (Embedding, T5Block, T5ForConditionalGeneration)" in printed
    said = re.search(r"Data: (\d+) pairs .* 0 skipped; .* 13 of (\d+) pairs", printed)
    train, heldout = map(int, said.groups())
    cut_sources, cut_targets = map(int, re.search(r"cut sources (\d+); cut targets (\d+)", printed).groups())
    assert train + heldout == 150 and cut_targets > cut_sources > 0
    assert re.search(r"Held-out pairs \(13\), chrf: before [\d.]+, source copied [\d.]+, after [\d.]+", printed)
    assert "from the best chrf to the worst" in printed
    assert (out / "result.png").read_bytes().startswith(b"\x89PNG")
    card = (out / "export/README.md").read_text()
    assert "pairs.jsonl" in card and "chrf" in card


def test_a_reader_sees_it_learn(run):
    out = run(*EVALUATED)
    evaluations = [record for record in read_metrics(out) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [0, 3, 6]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.5
    assert {"eval_chrf", "eval_bleu"} <= set(evaluations[-1])
    first, last = predictions(out, 0), predictions(out)
    assert len(first) == len(last) == NUM_EVAL_PAIRS
    assert [(row["source"], row["target"]) for row in first] == [(row["source"], row["target"]) for row in last]
    assert [row["prediction"] for row in first] != [row["prediction"] for row in last]


def test_one_trajectory(run):
    """Losses and gradient norms over pairs of ragged lengths agree to 1e-5, and texts too, under any division."""
    found, reference = run(*EVALUATED), run("--per_device_train_batch_size", 12, config="single", num_processes=1)
    assert len(trajectory(found)) == STEPS
    assert trajectory(found) == near(trajectory(reference))
    assert predictions(found) == predictions(reference)


@pytest.mark.slow
def test_the_end_of_a_run_that_had_ended(forks, arguments, run, tmp_path):
    """A finished run in another output directory exports, and shows the same texts."""
    whole = run(*EVALUATED)
    args = (*arguments, *EVALUATED, "--resume_from_checkpoint", whole / f"checkpoint-{STEPS}")
    printed = forks.succeed(tmp_path / "out", *args)
    assert predictions(tmp_path / "out") == predictions(whole) and "from the best chrf to the worst" in printed


def assert_it_generates(export: Path, rows: list[dict], prefix: str) -> GenerationConfig:
    """Assert that transformers alone generates the predictions from an export; returns how it is asked to."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSeq2SeqLM.from_pretrained(export).eval()
    for row in rows:
        inputs = tokenizer(prefix + row["source"], return_tensors="pt", truncation=True, max_length=64)
        (tokens,) = model.generate(**inputs)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == row["prediction"]
    return model.generation_config


@pytest.mark.parametrize("num_processes, num_beams", [(2, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_ranks_generate_what_one_process_generates_from_the_export(run, num_processes, num_beams):
    """Texts agree row for row: 13 rows on 2 and on 3 ranks, padded in batches there, alone here."""
    search = ("--generation_num_beams", 3, "--generation_length_penalty", 2) if num_beams == 3 else ()
    out = run(*EVALUATED, *search, num_processes=num_processes)
    asked = assert_it_generates(out / "export", predictions(out), PREFIX)
    assert asked.num_beams == num_beams, "the export generates as the evaluation did"


def test_killed_and_resumed_is_as_if_it_had_not_been(killed_and_resumed, arguments, run):
    """Dropout is on, so that its generators count too."""
    whole, out = killed_and_resumed(SCRIPT, *arguments, "--dropout_rate", 0.1)
    assert trajectory(out) != trajectory(run(*EVALUATED)) and predictions(out) == predictions(whole)


def test_what_a_base_asks_of_generation_is_not_measured(run, tmp_path):
    """Its settings decide neither the texts of an evaluation nor the export, whose texts are those of the evaluation."""
    base = shutil.copytree(run(*EVALUATED) / "export", tmp_path / "base")
    asked = {"min_length": 20, "no_repeat_ngram_size": 1, "suppress_tokens": [*range(9, 300)], "num_beams": 4}
    change_json(base / "generation_config.json", **asked)
    args = ("--from_scratch", "false", "--model_name_or_path", base, "--max_steps", 1)
    out = run(*args, config="single", num_processes=1)
    assert re.search(r"without these settings of its base: .*min_length 20.*no_repeat_ngram_size 1", log_of(out))
    asked = assert_it_generates(out / "export", predictions(out, step=1), saved_arguments(out)["task_prefix"])
    assert left_out(asked) == {"max_new_tokens": 24}


def test_a_target_longer_than_the_models_maximum(forks, arguments, run, tmp_path):
    base = shutil.copytree(run(*EVALUATED) / "export", tmp_path / "base")
    change_json(base / "tokenizer_config.json", model_max_length=100)
    args = ("--from_scratch", "false", "--model_name_or_path", base, "--max_target_length", 101)
    assert forks.run(tmp_path / "out", *arguments, *args) == 2
    log = (tmp_path / "out.log").read_text()
    assert "--max_target_length is 101, but the model is made for 100" in log


def test_flops_are_what_a_counter_counts():
    """The FLOPs equal those counted in forward and backward pass, with attention as matrix products, most of them here."""
    config = tiny_config("t5", d_kv=32, d_ff=32, num_hidden_layers=3, feed_forward_proj="gated-gelu")
    t5 = new_encoder_decoder(config, "eager", torch.float32)
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 256))}
    config = BartConfig(vocab_size=50, d_model=256, max_position_embeddings=192, **sides)
    bart = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    ids = torch.ones(3, 192, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids[:, :128]}
    for model in (t5, bart):
        with FlopCounterMode(display=False) as counter:
            sequence_to_sequence_loss(model, batch).backward()
        counted = counter.get_total_flops() / (3 * 128)
        found = flops_per_target(model, np.full(3, 192), np.full(3, 128)).attended
        assert found == pytest.approx(counted, rel=0.01), type(model)
