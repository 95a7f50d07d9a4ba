"""Which directories are checkpoints, what a run may continue, and what is never lost. In one process."""

import contextlib
import dataclasses
import json
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from accelerate_recipes import __main__ as cli
from accelerate_recipes import checkpoint, lock, recipe, stop
from accelerate_recipes.args import ConfigError, TrainArgs
from accelerate_recipes.checkpoint import (
    Checkpointer,
    SaveError,
    agree_on_resume,
    complete_checkpoints,
    defect,
    export,
    find_resume,
)
from accelerate_recipes.distributed import prepare
from accelerate_recipes.models import new_llama
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.status import read_status


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """A Checkpointer over a tiny model, with a gradient step behind it."""
    monkeypatch.setattr(stop, "_asked_by", None)  # as after the test: it is the process's

    def build(resumed_from: Path | None = None, hidden_size: int = 16, **overrides) -> Checkpointer:
        args = TrainArgs(output_dir=str(tmp_path / "run"), save_total_limit=2, **overrides)
        accelerator = Accelerator(cpu=True)
        model = new_llama(
            "sdpa", vocab_size=50, hidden_size=hidden_size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
        config, generation_config = model.config, model.generation_config
        model, optimizer = prepare(accelerator, model, args)
        scheduler = make_scheduler(optimizer, args, 100)
        Path(args.output_dir).mkdir(exist_ok=True)
        (Path(args.output_dir) / "metrics.jsonl").touch()
        run = Checkpointer(accelerator, model, optimizer, scheduler, args, [config, generation_config], resumed_from)
        model(input_ids=torch.arange(10)[None]).logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return run

    yield build
    lock.release()


def save(run: Checkpointer, step: int) -> Path:
    """To the end."""
    path = run.save(step, {})
    run.wait()
    return path


def test_what_could_not_be_saved_is_refused_before_training(make_run):
    """A temperature without sampling, as some published models have it: `save_pretrained` would raise."""
    run = make_run()
    settings = GenerationConfig(do_sample=False, temperature=0.5)
    with pytest.raises(ConfigError, match=r"(?s)correct its generation_config\.json: .*temperature"):
        dataclasses.replace(run, artifacts=[settings])


def test_a_checkpoint_is_complete_and_the_oldest_goes(make_run):
    run = make_run()
    saved = [save(run, step) for step in (10, 20, 100)]
    assert [defect(path) for path in saved[1:]] == [None, None]
    assert complete_checkpoints(saved[0].parent) == saved[1:]  # by number, not by name
    assert contents(saved[0].parent) == {"checkpoint-20", "checkpoint-100"}
    marker = json.loads((saved[2] / "complete.json").read_text())
    assert marker["step"] == 100 and marker["world_size"] == 1 and marker["strategy"] == "single process"
    assert {"state/.metadata", "rng-0.pt", "args.yaml", "metrics.jsonl", "config.json"} <= set(marker["files"])


def test_what_is_written_in_the_background_is_what_was_there(make_run, tmp_path):
    """Byte for byte the files of a synchronous save, although the weights change as soon as `save` returns."""
    run = make_run()
    run.args.async_save = False
    wanted = (run.save(10, {}) / "state/__0_0.distcp").read_bytes()
    run.args.async_save = True
    for step in (20, 30):  # the second time into memory that is there already
        found = run.save(step, {})
        with torch.no_grad():
            originals = [p.clone() for p in run.model.parameters()]
            for p in run.model.parameters():
                p.fill_(float("nan"))
        run.wait()
        assert (found / "state/__0_0.distcp").read_bytes() == wanted
        with torch.no_grad():
            for p, original in zip(run.model.parameters(), originals, strict=True):
                p.copy_(original)


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda c: (c / "complete.json").unlink(), "has no complete.json: the save was interrupted"),
        (lambda c: (c / "complete.json").write_text("{"), "is not JSON"),
        (lambda c: (c / "state/__0_0.distcp").unlink(), "state/__0_0.distcp is missing"),
        (lambda c: (c / "rng-0.pt").write_bytes(b"x"), "rng-0.pt has 1 bytes instead of"),
    ],
)
def test_a_damaged_one_is_skipped_with_its_reason(make_run, damage, reason):
    run = make_run()
    older, newer = save(run, 10), save(run, 20)
    damage(newer)
    with pytest.warns(UserWarning, match=reason):
        assert find_resume(run.args) == older
    run.args.resume_from_checkpoint = str(newer)
    with pytest.raises(ConfigError, match=reason), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        find_resume(run.args)


def contents(output_dir: Path) -> set[str]:
    """What a save may leave there."""
    return {path.name for path in output_dir.iterdir()} - {"metrics.jsonl", "status.json", "lock.json"}


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_byte_is_found_and_the_next_older_taken(make_run):
    run = make_run()
    older, newer = save(run, 10), save(run, 20)
    assert agree_on_resume(run.accelerator, run.args) == newer
    flip_a_byte(newer / "state/__0_0.distcp")
    assert defect(newer) is None  # by its size nothing is wrong
    with pytest.warns(UserWarning, match=r"checksum of state/__0_0\.distcp is .* the file is damaged"):
        assert agree_on_resume(run.accelerator, run.args) == older
    assert newer.with_name("checkpoint-20.damaged").is_dir()
    save(run, 20)
    assert agree_on_resume(run.accelerator, run.args) == newer
    flip_a_byte(newer / "rng-0.pt")
    run.args.resume_from_checkpoint = str(newer)
    with pytest.raises(ConfigError, match=r"the checksum of rng-0\.pt is"):
        agree_on_resume(run.accelerator, run.args)


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """`python -m accelerate_recipes ...`, in this process."""

    def run(*args: object) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["accelerate_recipes", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return run


def test_commands(make_run, run_cli, tmp_path):
    """verify, list and export, as typed."""
    run = make_run()
    older, newer = save(run, 10), save(run, 20)
    verified = run_cli("checkpoint", "verify", newer)
    assert verified.returncode == 0, verified.stderr
    assert "step 20, saved by 1 x single process" in verified.stdout and "complete and unchanged" in verified.stdout
    flip_a_byte(older / "state/__0_0.distcp")
    assert run_cli("checkpoint", "verify", older).returncode == 1
    (newer / "rng-0.pt").unlink()
    broken = run_cli("checkpoint", "verify", newer)
    assert broken.returncode == 1 and "rng-0.pt is missing" in broken.stderr
    listed = run_cli("checkpoint", "list", newer.parent).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["checkpoint-10", "checkpoint-20"]
    assert "complete" in listed[0] and "rng-0.pt is missing" in listed[1]
    assert run_cli("export", newer, tmp_path / "out").returncode == 1
    exported = run_cli("export", save(run, 30), tmp_path / "out", "--dtype", "bf16", "--max_shard_size", "4KB")
    assert exported.returncode == 0, exported.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.embed_tokens.weight, run.model.model.embed_tokens.weight.bfloat16())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@contextlib.contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond: EFBIG, an OSError like a full disk's or a quota's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 1000, 20_000])
def test_a_save_that_cannot_write_loses_nothing(make_run, num_bytes):
    """The older checkpoint is unchanged, the half of a new one gone, and the next save succeeds."""
    run = make_run()
    good = save(run, 10)
    assert sum(entry["size"] for entry in checkpoint.read_marker(good)["files"].values()) > 30_000
    with (
        files_limited_to(num_bytes),
        pytest.raises(SaveError, match=r"checkpoint-20 could not be written.*File too large"),
    ):
        save(run, 20)
    assert contents(good.parent) == {"checkpoint-10"}
    assert agree_on_resume(run.accelerator, run.args) == good == run.newest
    save(run, 20)
    assert contents(good.parent) == {"checkpoint-10", "checkpoint-20"}


def test_too_little_room_is_known_before(make_run, monkeypatch):
    run = make_run()
    save(run, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 10, 10))
    with pytest.raises(SaveError, match=r"0\.00 GiB are free, the last checkpoint has .*; make room"):
        save(run, 20)
    assert contents(Path(run.args.output_dir)) == {"checkpoint-10"}


def test_a_run_that_was_taken_over_touches_nothing(make_run):
    """Neither the other's save of the same step, nor its status."""
    run = make_run()
    output_dir = Path(run.args.output_dir)
    lock.take(output_dir)
    save(run, 10)
    (output_dir / "lock.json").write_text(
        json.dumps({"host": "elsewhere", "process": 1, "job": "17", "restarts": 0, "run": "other"})
    )
    (output_dir / "checkpoint-20.partial").mkdir()
    with pytest.raises(SaveError, match="another run has taken over"):
        save(run, 20)
    recipe.end_with(run.args, state="failed")
    assert contents(output_dir) == {"checkpoint-10", "checkpoint-20.partial"}
    assert "state" not in read_status(output_dir)


def test_an_interrupted_removal_is_finished_by_the_next_save(make_run):
    """Killed between the renaming of an old checkpoint and its removal: whole, but no longer a checkpoint."""
    run = make_run()
    save(run, 10).rename(Path(run.args.output_dir) / "checkpoint-10.partial")
    assert find_resume(run.args) is None
    newer = save(run, 20)
    assert contents(newer.parent) == {"checkpoint-20"}


def test_resume_restores_model_optimizer_and_schedule_but_not_hyperparameters(make_run):
    torch.manual_seed(1)
    first = make_run(learning_rate=1e-3)
    torch.manual_seed(2)
    second = make_run(resumed_from=save(first, 10), learning_rate=5e-4)
    assert not all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert second.resume() == 10
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        mine, theirs = first.optimizer.state[a], second.optimizer.state[b]
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    for _ in range(10):
        first.scheduler.step()
    assert second.scheduler.get_last_lr() == [lr / 2 for lr in first.scheduler.get_last_lr()]
    first.scheduler.step()
    second.scheduler.step()
    assert second.scheduler.get_last_lr() == [lr / 2 for lr in first.scheduler.get_last_lr()]


def test_a_checkpoint_of_another_model_is_refused(make_run):
    checkpoint = save(make_run(), 10)
    other = make_run(resumed_from=checkpoint, hidden_size=32)
    with pytest.raises(
        ConfigError,
        match=r"holds another model: lm_head\.weight has the shape \(50, 16\) there and \(50, 32\) here",
    ):
        other.resume()


def test_an_empty_directory_is_no_checkpoint(make_run):
    run = make_run()
    older = save(run, 10)
    older.with_name("checkpoint-20").mkdir()
    with pytest.warns(UserWarning, match=r"checkpoint-20: it has no complete\.json: the save was interrupted"):
        assert find_resume(run.args) == older


def test_what_is_kept(make_run):
    """The two newest, every 30th, and the best by the evaluation; the newest in any case."""
    run = make_run(keep_every_n_steps=30, metric_for_best_model="accuracy")
    accuracies = {10: 0.1, 20: 0.9, 30: 0.3, 40: 0.2, 50: 0.5, 60: 0.4, 70: 0.6}
    for step, accuracy in accuracies.items():
        with (Path(run.args.output_dir) / "metrics.jsonl").open("a") as file:
            print(json.dumps({"step": step, "eval_accuracy": accuracy}), file=file)
        save(run, step)
    assert contents(Path(run.args.output_dir)) == {f"checkpoint-{step}" for step in (20, 30, 60, 70)}
    run.args.greater_is_better = False
    save(run, 80)  # without an evaluation of its own
    assert contents(Path(run.args.output_dir)) == {f"checkpoint-{step}" for step in (30, 60, 70, 80)}
    run.args.metric_for_best_model = "loss"
    run.args.keep_every_n_steps = 0
    run.args.save_total_limit = 1
    save(run, 90)
    assert contents(Path(run.args.output_dir)) == {"checkpoint-90"}


def test_a_failing_removal_is_no_failing_save(make_run, monkeypatch):
    run = make_run()
    save(run, 10), save(run, 20)

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(f"not allowed: {path}")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="an old checkpoint could not be removed: not allowed"):
        newest = save(run, 30)
    assert run.newest == newest and defect(newest) is None


def test_what_a_run_may_continue(make_run, tmp_path, capsys):
    run = make_run()
    args = run.args
    assert find_resume(args) is None
    old, new = save(run, 10), save(run, 20)
    assert find_resume(args) == new
    args.resume_from_checkpoint = "none"
    with pytest.raises(ConfigError, match=r"would overwrite .*checkpoint-20"):
        find_resume(args)
    args.resume_from_checkpoint = str(old)
    with pytest.raises(ConfigError, match=r"would overwrite .*checkpoint-20"):
        find_resume(args)
    args.output_dir = str(tmp_path / "other")
    assert find_resume(args) == old
    args.learning_rate = 0.5
    assert agree_on_resume(run.accelerator, args) == old
    assert "--learning_rate is now 0.5; until step 10 it was 1e-05" in capsys.readouterr().out
    args.total_batch_size = 99
    with pytest.raises(ConfigError, match="--total_batch_size was 16 and is now 99"):
        find_resume(args)
    args.resume_from_checkpoint = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no such checkpoint"):
        find_resume(args)


@pytest.mark.parametrize("max_shard_size", [10**9, 4000])
def test_export(make_run, tmp_path, max_shard_size):
    """In one shard or many, the weights are the model's; the tied output layer is stored once."""
    run = make_run()
    export(save(run, 10), tmp_path / "export", "A test.", max_shard_size=max_shard_size)
    assert "A test. Trained with accelerate-recipes" in (tmp_path / "export/README.md").read_text()
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size == 4000)
    stored = {name for file in files for name in load_file(file)}
    assert "lm_head.weight" not in stored and "model.embed_tokens.weight" in stored
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, weight in run.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    shutil.rmtree(tmp_path / "export")
