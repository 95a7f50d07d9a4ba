"""Tests of the T5 recipe on a few real pairs: one trajectory, kill and resume, generation under every sharding, export."""

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, log_of, losses, read_metrics, trajectory
from safetensors.torch import load_file, save_file
from tiny import tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import sequence_to_sequence_loss
from accelerate_recipes.metrics import flops_per_target
from accelerate_recipes.models.encoder_decoders import new_encoder_decoder

T5 = SCRIPT = ROOT / "recipes" / "t5.py"
STEPS = 6
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
        "feed_forward_proj=gated-gelu",
        "--dropout_rate", 0, "--max_source_length", 64, "--max_target_length", 24, "--max_steps", STEPS,
        "--total_batch_size", 12, "--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 4,
        "--learning_rate", 1e-2, "--logging_steps", 1, "--save_steps", 3, "--save_total_limit", 0, "--async_save", "false",
        "--data_cache_dir", tmp_path_factory.mktemp("cache"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(forks, arguments, tmp_path_factory):
    """Run the recipe in forked ranks, once for all tests that ask for the same; return its output."""
    done: dict[tuple, Path] = {}

    def output(*args: object, config: str = "fsdp_full", num_processes: int = 2) -> Path:
        key = (args, config, num_processes)
        if key not in done:
            out = tmp_path_factory.mktemp("run") / "out"
            forks.succeed(out, *arguments, *args, config=config, num_processes=num_processes)
            done[key] = out
        return done[key]

    return output


# With these the run is that of `undisturbed`, which most tests compare with.
EVALUATED = ("--eval_steps", 3)


@pytest.fixture(scope="module")
def undisturbed(run) -> tuple[Path, str]:
    """Output of a whole run on 2 ranks, and what it printed."""
    out = run(*EVALUATED)
    return out, log_of(out)


def predictions(out: Path, step: int = STEPS) -> list[dict]:
    return [json.loads(line) for line in (out / f"predictions/step-{step}.jsonl").read_text().splitlines()]


def test_it_says_what_it_does(undisturbed):
    out, printed = undisturbed
    assert "6 FSDP units (Embedding, T5Block, T5ForConditionalGeneration)" in printed
    said = re.search(r"Data: (\d+) pairs .* 0 skipped; .* 13 of (\d+) pairs", printed)
    train, heldout = map(int, said.groups())
    cut_sources, cut_targets = map(int, re.search(r"cut sources (\d+); cut targets (\d+)", printed).groups())
    assert train + heldout == 150 and cut_targets > cut_sources > 0
    assert re.search(r"Held-out pairs \(13\), chrf: before [\d.]+, source copied [\d.]+, after [\d.]+", printed)
    assert "from the best chrf to the worst" in printed
    assert (out / "result.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (out / "export").iterdir()} == {
        "README.md", "accelerate_recipes.json", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    card = (out / "export/README.md").read_text()
    assert "pairs.jsonl" in card and "chrf" in card


def test_a_reader_sees_it_learn(undisturbed):
    out, _ = undisturbed
    evaluations = [record for record in read_metrics(out) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [0, 3, 6]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.5
    assert {"eval_chrf", "eval_bleu"} <= set(evaluations[-1])
    first, last = predictions(out, 0), predictions(out)
    assert len(first) == len(last) == NUM_EVAL_PAIRS
    assert [(row["source"], row["target"]) for row in first] == [(row["source"], row["target"]) for row in last]
    assert [row["prediction"] for row in first] != [row["prediction"] for row in last]


STRATEGIES = {
    "one process": ("single", 1, 12),
    "accumulation": ("single", 1, 2),
    "ddp": ("ddp", 2, 6),
    "fsdp2": ("fsdp_full", 2, 6),
    "fsdp2, accumulation": ("fsdp_full", 2, 2),
    "fsdp1": ("fsdp1_full", 2, 3),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "fsdp2, accumulation" else pytest.mark.slow) for name in STRATEGIES]
)
def test_one_trajectory(run, name):
    """Losses and gradient norms over pairs of ragged lengths agree to 1e-5, and texts too, under any division."""
    (config, num_processes, size), (reference, *_) = (
        STRATEGIES[name],
        (run("--per_device_train_batch_size", 12, config="single", num_processes=1),),
    )
    if name == "fsdp2, accumulation":
        found = run(*EVALUATED)
    else:
        found = run("--per_device_train_batch_size", size, config=config, num_processes=num_processes)
    assert len(trajectory(found)) == STEPS
    for step, wanted in zip(trajectory(found), trajectory(reference), strict=True):
        assert step == pytest.approx(wanted, rel=1e-5)
    assert predictions(found) == predictions(reference)


def test_the_end_of_a_run_that_had_ended(forks, arguments, undisturbed, tmp_path):
    """A finished run in another output directory exports, and shows the same texts."""
    whole, _ = undisturbed
    args = (*arguments, *EVALUATED, "--resume_from_checkpoint", whole / f"checkpoint-{STEPS}")
    printed = forks.succeed(tmp_path / "out", *args)
    assert predictions(tmp_path / "out") == predictions(whole) and "from the best chrf to the worst" in printed


@pytest.mark.slow
def test_activations_recomputed(forks, arguments, run, tmp_path):
    out = tmp_path / "out"
    assert forks.run(out, *arguments, FSDP_ACTIVATION_CHECKPOINTING="true") == 0
    assert "activations of 4 of 4 layers recomputed" in log_of(out)
    assert trajectory(out) == [pytest.approx(step, rel=1e-5) for step in trajectory(run(*EVALUATED))]


@pytest.mark.parametrize("num_processes, num_beams", [(2, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_ranks_generate_what_one_process_generates_from_the_export(run, num_processes, num_beams):
    """Texts agree row for row: 13 rows on 2 and on 3 ranks, padded in batches there, alone here."""
    search = ("--generation_num_beams", 3, "--generation_length_penalty", 2) if num_beams == 3 else ()
    out = run(*EVALUATED, *search, num_processes=num_processes)
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "export").eval()
    assert model.generation_config.num_beams == num_beams, "the export generates as the evaluation did"
    prefix = shipped.load(T5).Args().task_prefix
    for row in predictions(out):
        inputs = tokenizer(prefix + row["source"], return_tensors="pt", truncation=True, max_length=64)
        (tokens,) = model.generate(**inputs)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == row["prediction"]


def test_export_gives_the_loss_of_the_last_evaluation(undisturbed):
    out, _ = undisturbed
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "export").eval()
    prefix, loss_sum, num_targets = shipped.load(T5).Args().task_prefix, 0.0, 0
    for row in predictions(out):
        source, target = tokenizer(prefix + row["source"])["input_ids"], tokenizer(row["target"])["input_ids"]
        source, target = (
            ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids, limit in ((source, 64), (target, 24))
        )
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([source]), labels=torch.tensor([target])).loss
        loss_sum, num_targets = loss_sum + loss.item() * len(target), num_targets + len(target)
    last = [record["eval_loss"] for record in read_metrics(out) if "eval_loss" in record][-1]
    assert loss_sum / num_targets == pytest.approx(last, rel=1e-5)


def test_killed_and_resumed_is_as_if_it_had_not_been(forks, arguments, run, tmp_path):
    """Both ranks get SIGKILL when rank 0 would log step 5. Dropout is on, so that its generators count too."""
    dropout = ("--dropout_rate", 0.1)
    fault = {"event": "open", "path": "/out/metrics.jsonl", "count": 9, "rank": 0, "everyone": True}
    out = tmp_path / "out"
    assert forks.run(out, *arguments, *dropout, TOY_FAULT=json.dumps(fault)) == -9
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"] and max(losses(out)) >= 4
    arguments = (*arguments, "--dataloader_num_workers", 2)
    forks.succeed(out, *arguments, *dropout)
    whole = run(*dropout)
    assert trajectory(out) == trajectory(whole) != trajectory(run(*EVALUATED))
    assert predictions(out) == predictions(whole)


@pytest.fixture(scope="module")
def pretrained(run, tmp_path_factory) -> Path:
    """Model like the published FLAN-T5: its output layer is not its embedding; its tokenizer names a longest text.

    Its settings ask for beam search, which the tests do not use.
    """
    folder = tmp_path_factory.mktemp("pretrained") / "flan"
    shutil.copytree(run(*EVALUATED) / "export", folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["shared.weight"].flip(0).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, changes in (
        ("config.json", {"tie_word_embeddings": False, "scale_decoder_outputs": False}),
        ("tokenizer_config.json", {"model_max_length": 100}),
        ("generation_config.json", {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}),
    ):
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.slow
def test_an_output_layer_of_its_own_stays_one(run, pretrained):
    """The output layer stays separate on 2 ranks and in the export, though transformers and Accelerate would tie it."""
    args = ("--from_scratch", "false", "--model_name_or_path", pretrained)
    found, wanted = run(*args), run(*args, config="single", num_processes=1)
    assert trajectory(found) == [pytest.approx(step, rel=1e-5) for step in trajectory(wanted)]
    assert predictions(found) == predictions(wanted)
    model = AutoModelForSeq2SeqLM.from_pretrained(found / "export")
    assert not torch.allclose(model.lm_head.weight, model.shared.weight, atol=0.1)
    assert model.encoder.embed_tokens.weight is model.shared.weight
    assert not model.config.scale_decoder_outputs


@pytest.mark.slow
def test_a_tied_output_layer_stays_one(run):
    """A run that begins with an export, on 2 ranks of which one reads the weights, starts where the other run ended."""
    args = ("--from_scratch", "false", "--model_name_or_path", run(*EVALUATED) / "export", "--max_steps", 1)
    found = run(*args)
    last = [record["eval_loss"] for record in read_metrics(run(*EVALUATED)) if "eval_loss" in record][-1]
    assert read_metrics(found)[0]["eval_loss"] == pytest.approx(last, rel=1e-5)
    assert "lm_head.weight" not in load_file(found / "export/model.safetensors")


@pytest.mark.slow
def test_best_checkpoint_by_a_metric(run):
    best = ("--metric_for_best_model", "chrf", "--eval_steps", 1, "--save_steps", 1, "--save_total_limit", 1)
    out = run(*best)
    scores = {
        record["step"]: record["eval_chrf"]
        for record in read_metrics(out)
        if record.get("eval_chrf") and record["step"]
    }
    best_step = max(scores, key=scores.get)
    assert best_step != STEPS  # else it would be kept as the last one anyway
    assert {int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")} == {STEPS, best_step}


@pytest.mark.parametrize(
    "wrong, message",
    [(("--source_column", "translation.de"), "has no column 'translation.de'; it has translation.en, translation.fr")],
)
def test_errors_are_one_message(forks, arguments, tmp_path, wrong, message):
    out, log = tmp_path / "out", tmp_path / "out.log"
    assert forks.run(out, *arguments, *wrong) == 2
    assert message in log.read_text() and "Traceback" not in log.read_text(), log.read_text()[-3000:]


def test_a_target_longer_than_the_models_maximum(forks, arguments, pretrained, tmp_path):
    args = ("--from_scratch", "false", "--model_name_or_path", pretrained, "--max_target_length", 101)
    assert forks.run(tmp_path / "out", *arguments, *args) == 2
    log = (tmp_path / "out.log").read_text()
    assert "--max_target_length is 101, but the model is made for 100" in log


def test_all_problems_at_once(pairs_file):
    """All contradictions of arguments are reported at once, before anything is read."""
    wrong = [
        "--train_files", str(pairs_file), str(pairs_file.with_suffix(".txt")), "--eval_split", "test",
        "--heldout_share", "1.5", "--generation_length_penalty", "2", "--metrics", "chrf", "meteor",
        "--num_eval_pairs", "0", "--max_target_length", "1", "--dropout_rate", "1", "--metric_for_best_model", "gleu",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        parse(shipped.load(T5).Args, wrong, world_size=1)
    for expected in (
        "pairs.txt: no such file",
        "--eval_split test names a split",
        "--generation_length_penalty 2.0 has no effect",
        "known are exact_match, rouge, bleu, chrf, gleu",
        "--num_eval_pairs is 0; it must be at least 1",
        "--max_target_length is 1; it must be at least 2",
        "--dropout_rate is 1; it must be at least 0, and below 1",
        "--metric_for_best_model gleu: the evaluation gives loss, chrf;",
    ):
        assert expected in str(caught.value)
    with pytest.raises(ConfigError, match=r"--heldout_share is 1\.5; it must be above 0, and below 1"):
        parse(shipped.load(T5).Args, ["--heldout_share", "1.5"], world_size=1)


def test_flops_are_what_a_counter_counts():
    """The FLOPs equal those counted in forward and backward pass, with attention as matrix products, most of them here."""
    config = tiny_config("t5", d_kv=32, d_ff=32, num_hidden_layers=3, feed_forward_proj="gated-gelu")
    t5 = new_encoder_decoder(config, "eager", torch.float32)
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 256))}
    config = BartConfig(vocab_size=50, d_model=256, max_position_embeddings=192, **sides)
    bart = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    batch = {
        "input_ids": torch.ones(3, 192, dtype=torch.long),
        "attention_mask": torch.ones(3, 192, dtype=torch.long),
        "labels": torch.ones(3, 128, dtype=torch.long),
    }
    for model in (t5, bart):
        with FlopCounterMode(display=False) as counter:
            sequence_to_sequence_loss(model, batch).backward()
        counted = counter.get_total_flops() / (3 * 128)
        found = flops_per_target(model, np.full(3, 192), np.full(3, 128)).attended
        assert found == pytest.approx(counted, rel=0.01), type(model)
