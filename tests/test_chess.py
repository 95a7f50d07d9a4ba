"""Tests of the chess recipe as a user runs it, at toy size: trained, killed, resumed, exported, loaded."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from helpers import CHILDREN, CONFIGS, ROOT, launch, launch_ok, losses, read_metrics, write_rows

CHESS = SCRIPT = ROOT / "recipes" / "chess.py"
STEPS = 30
LOG_LINE = re.compile(
    r"Step \d+/\d+ Loss: \d+\.\d{5}, Speed: \d+\.\d\d samples/sec, \d+ tokens/sec, lr: \d\.\d+(e-\d\d)?, grad norm: \d+\.\d\d, "
    r"peak memory: \d+\.\d GiB, data wait: \d+\.\d%, done: \d+\.\d%(, left: [\d:]+)?"
)


@pytest.fixture(scope="module")
def tiny(games_file, tmp_path_factory) -> list[str]:
    """Arguments of a run that takes seconds, with one cache of packed games for all runs."""
    preset = {
        "from_scratch": True, "train_files": [str(games_file)], "max_length": 128, "heldout_share": 0.1,
        "config_overrides": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "num_positions": 30, "max_steps": STEPS, "total_batch_size": 8, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 10, "save_total_limit": 0,
        "data_cache_dir": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip
    file = tmp_path_factory.mktemp("preset") / "tiny.yaml"
    file.write_text(yaml.safe_dump(preset))
    return ["--config", str(file)]


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Output of a whole run on 2 ranks, with data workers, which other runs here do not have."""
    tmp_path = tmp_path_factory.mktemp("undisturbed")
    flags = ("--output_dir", tmp_path / "out", "--dataloader_num_workers", 1)
    done = launch_ok(tmp_path, "fsdp_full", CHESS, *tiny, *flags)
    return tmp_path / "out", done


def test_it_says_what_it_does(undisturbed):
    out, done = undisturbed
    lines = done.stdout.splitlines()
    (strategy,) = (line for line in lines if line.startswith("Strategy: "))
    for part in ("FSDP2 full shard", "2 x cpu", "backend gloo", "precision no", "4 FSDP units", "LlamaDecoderLayer"):
        assert part in strategy
    assert len([line for line in lines if LOG_LINE.fullmatch(line)]) == STEPS
    assert any("games to train on" in line and "padding" in line for line in lines)
    assert any(line.startswith("MFU is left out: the bf16 peak of this CPU is not known") for line in lines)
    for line, positions in ((lines[-5], "Held-out positions (30)"), (lines[-3], "Of these, in no game trained on (")):
        assert line.startswith(positions)
        assert "legal moves: before" in line and "baseline" in line and "after" in line
    assert str(out / "export") in lines[-1] and str(out / "result.png") in lines[-1]


def test_it_leaves_exactly(undisturbed):
    out, _ = undisturbed
    checkpoints = {f"checkpoint-{step}" for step in range(10, STEPS + 1, 10)}
    assert {path.name for path in out.iterdir()} == checkpoints | {
        "args.yaml", "metrics.jsonl", "status.json", "attempts.jsonl", "report.html", "result.png", "rows.txt",
        "rows.html", "export",
    }  # fmt: skip
    assert {path.name for path in (out / "export").iterdir()} == {
        "README.md", "accelerate_recipes.json", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (out / "result.png").read_bytes().startswith(b"\x89PNG")
    card = (out / "export/README.md").read_text()
    assert "next_move_accuracy" in card and "learning_rate: 0.01" in card and "games.parquet" in card


def test_it_learns(undisturbed):
    out, _ = undisturbed
    evaluations = [record for record in read_metrics(out) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [0, STEPS]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"] - 1
    assert evaluations[1]["eval_legal_move_rate_opening"] > evaluations[0]["eval_legal_move_rate_opening"]


def test_export_gives_the_loss_of_the_last_evaluation(undisturbed, fork_server, tmp_path):
    """The export is loaded by name alone, in a process without this project, and gets games one by one."""
    out, _ = undisturbed
    (cache,) = Path(yaml.safe_load((out / "args.yaml").read_text())["data_cache_dir"]).iterdir()
    printed = fork_server.run_python(tmp_path, CHILDREN / "export_loss.py", out / "export", cache / "heldout")
    assert float(printed.splitlines()[-1]) == pytest.approx(read_metrics(out)[-1]["eval_loss"], rel=1e-4)


def read_status(out: Path) -> dict:
    return json.loads((out / "status.json").read_text())


def test_a_signal_to_one_rank_stops_all_and_all_is_saved(fork_server, run_forked, undisturbed, tiny, tmp_path, out):
    """After SIGUSR1, twice, the exit code is 0, status.json says so, and the next run continues bit for bit."""
    fork_server.start(out, *tiny, script=CHESS)
    deadline = time.monotonic() + 100
    try:
        while not (out / "metrics.jsonl").exists() or max(losses(out), default=0) < 12:
            assert time.monotonic() < deadline, (tmp_path / "out.log").read_text()[-3000:]
            time.sleep(0.005)
        _, second_rank = fork_server.ranks()
        second_rank.send_signal(signal.SIGUSR1)
        second_rank.send_signal(signal.SIGUSR1)
    finally:
        code = fork_server.wait()
    assert code == 0, (tmp_path / "out.log").read_text()[-3000:]
    status = read_status(out)
    assert status["state"] == "stopped" and status["reason"] == "SIGUSR1"
    assert 12 <= status["step"] < STEPS and status["checkpoint"] == str(out / f"checkpoint-{status['step']}")
    assert max(losses(out)) == status["step"]
    assert run_forked(*tiny).returncode == 0
    assert losses(out) == losses(undisturbed[0])
    status = read_status(out)
    assert 0 < status.pop("longest_save_seconds") < 60
    assert status == {
        "state": "finished", "step": STEPS, "checkpoint": str(out / f"checkpoint-{STEPS}"), "reason": "", "job": "",
        "restarts": 0,
    }  # fmt: skip


def test_a_stop_file_is_noticed_in_the_first_evaluation(run_forked, tiny, out):
    """The file may exist before the run listens to signals, while Python imports."""
    out.mkdir()
    (out / "stop").touch()
    done = run_forked(*tiny)
    assert done.returncode == 0 and f"Stopped by file {out / 'stop'}" in done.stderr
    assert read_status(out)["state"] == "stopped" and not (out / "stop").exists()
    assert read_metrics(out) == []


def test_from_pretrained_under_bf16(run_forked, undisturbed, tiny, tmp_path):
    """If the export is fine-tuned as a pretrained model, in bf16, it starts where the other run ended."""
    out, _ = undisturbed
    pretrained = ["--model_name_or_path", out / "export", "--from_scratch", "false", "--max_steps", 3]
    done = run_forked(*tiny, *pretrained, flags=("--mixed_precision", "bf16"))
    assert done.returncode == 0 and "precision bf16" in done.stderr, done.stderr[-3000:]
    start = read_metrics(tmp_path / "out")[0]["eval_loss"]
    assert start == pytest.approx(read_metrics(out)[-1]["eval_loss"], rel=5e-3)
    from safetensors import safe_open

    with safe_open(tmp_path / "out/export/model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.slow
def test_other_files_and_the_full_state_dict(run_forked, games_file, tiny, tmp_path):
    """A run works with PGN and jsonl, a skipped bad game, no document mask, a tracker, and a checkpoint that can be loaded."""
    games = pq.read_table(games_file).column("Moves").to_pylist()
    write_rows(tmp_path / "a.jsonl", ({"Moves": moves} for moves in [*games, ["e2e5"]]))
    (tmp_path / "b.pgn").write_text('[Event "?"]\n[Result "1-0"]\n\n1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4. Qxf7# 1-0\n\n')
    arguments = ["--train_files", tmp_path / "a.jsonl", tmp_path / "b.pgn", "--skip_bad_games", "--no_document_mask"]
    done = run_forked(*tiny, *arguments, "--max_steps", 2, "--report_to", "tensorboard", config="fsdp_full_state_dict")
    assert done.returncode == 0 and "1 skipped" in done.stderr, done.stderr[-3000:]
    assert list((tmp_path / "out/chess").glob("events.out.tfevents.*"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/checkpoint-2")
    assert model.config.hidden_size == 32
    again = run_forked(*tiny, *arguments, "--max_steps", 2, "--report_to", "tensorboard", config="fsdp_full_state_dict")
    assert "Nothing was trained: all 2 steps" in again.stderr.splitlines()[-1], again.stderr[-1000:]
    assert "restarts: " not in (tmp_path / "out/report.html").read_text()


def assert_one_clear_error(done: subprocess.CompletedProcess, *expected: str) -> None:
    """Assert one message, no traceback of ours, and nothing written."""
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    for text in expected:
        assert text in done.stderr, done.stderr
    assert "src/accelerate_recipes" not in done.stderr and 'recipes/chess.py", line' not in done.stderr, done.stderr


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "launched"])
def test_wrong_arguments_are_one_message_of_the_first_rank(run_forked, tiny, tmp_path, launched):
    """Together with what its environment says; also under `accelerate launch`, which has its say about a failed process."""
    arguments = ["--lerning_rate", 1, "--total_batch_size", 7, "--gradient_checkpointing", "--train_files", "no.pgn"]
    of_yaml = ["gradient_accumulation_steps in the accelerate YAML", "parallelism_config is in use"]
    if launched:
        config = (CONFIGS / "fsdp_full.yaml").read_text()
        (tmp_path / "typo.yaml").write_text(config.replace("reshard_after_forward", "reshard_after_foward"))
        done = launch(tmp_path, str(tmp_path / "typo"), CHESS, *tiny, *arguments, "--output_dir", tmp_path / "out")
        of_yaml = [f"{tmp_path}/typo.yaml: fsdp_config has an unknown key 'fsdp_reshard_after_foward', which"]
    else:
        owners = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_USE_PARALLELISM_CONFIG")
        done = run_forked(*tiny, *arguments, **dict(zip(owners, ("2", "true"), strict=True)))
    said = (
        "unknown argument 'lerning_rate' on the command line; did you mean 'learning_rate'?", "fsdp_activation_checkpointing",
        "--total_batch_size 7 is not a multiple", "--train_files no.pgn: no such file",
    )  # fmt: skip
    assert_one_clear_error(done, *of_yaml, *said)
    assert not (tmp_path / "out").exists()


def test_an_illegal_move_is_named_by_file_and_row(run_forked, games_file, tiny, tmp_path):
    games = pq.read_table(games_file).column("Moves").to_pylist()[:20]
    games[7] = [*games[7][:10], "a1a1"]
    bad = write_rows(tmp_path / "bad.jsonl", ({"Moves": moves} for moves in games))
    done = run_forked(*tiny, "--train_files", bad, "--data_cache_dir", tmp_path / "cache")
    assert_one_clear_error(done, f"{bad}, row 8: move 11, 'a1a1', is illegal after", "--skip_bad_games leaves them out")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"status.json", "attempts.jsonl"} and read_status(tmp_path / "out")["state"] == "failed"
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def run_forked(forks, tmp_path):
    """Run forked ranks, two by default; `stderr` holds everything that they print."""

    def run(*args: object, **options: object) -> subprocess.CompletedProcess:
        code = forks.run(tmp_path / "out", *args, **options)
        return subprocess.CompletedProcess(args, code, "", (tmp_path / "out.log").read_text())

    return run
