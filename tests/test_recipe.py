"""Tests of how a recipe is loaded, what it refuses, and how it ends: its exit code and status.json."""

import errno
import gc
import io
import json
import tempfile

import datasets
import pytest
from helpers import ROOT, refuses

from accelerate_recipes import recipe
from accelerate_recipes.args import TrainArgs, parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import SaveError
from accelerate_recipes.errors import DataError
from accelerate_recipes.launch import requirements
from accelerate_recipes.life import lock, parent, watch
from accelerate_recipes.life.stop import Stopped


class Left(BaseException):
    """Raised in place of leaving the process with an exit code."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a `main` in this process; return the exit code and status.json."""

    def leave(code: int):
        raise Left(code)

    monkeypatch.setattr(recipe, "leave", leave)
    monkeypatch.setattr(parent, "follow_launcher", lambda: None)
    monkeypatch.setattr(watch, "_watch", None)
    monkeypatch.setattr("sys.argv", ["recipe.py", "--output_dir", str(tmp_path)])

    def run_main(error: BaseException | None, takes_lock: bool = True, says: str = "") -> tuple[int, dict]:
        def main(args: TrainArgs) -> None:
            if takes_lock:
                lock.take(tmp_path)
            print(says, flush=True)
            if error is not None:
                raise error

        with pytest.raises(Left) as left:
            recipe.run_recipe(main, TrainArgs, lambda args: requirements.Requirements())
        assert not (tmp_path / "lock.json").exists()
        status = tmp_path / "status.json"
        return left.value.args[0], json.loads(status.read_text()) if status.exists() else {}

    return run_main


FULL = (errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error, code, state, reason", [
    (None, 0, "finished", None),
    (Stopped("SIGTERM"), 0, "stopped", "SIGTERM"),
    (DataError("row 17"), 2, "failed", "row 17"),
    (OSError(errno.EROFS, "Read-only file system", "/hf"), 2, "failed", "[Errno 30] Read-only file system: '/hf'"),
    (OSError(*FULL, "/out/samples.jsonl"), 2, "failed",
     "[Errno 28] No space left on device: '/out/samples.jsonl'; make room, and the same command goes on"),
    (OSError(*FULL), 2, "failed",
     "[Errno 28] No space left on device: a file below --output_dir, "
     f"{datasets.config.HF_DATASETS_CACHE} or {tempfile.gettempdir()}; make room, and the same command goes on"),
    (OSError(errno.EIO, "Input/output error"), 1, "crashed", "OSError: [Errno 5] Input/output error"),
    (ValueError("what nobody expected"), 1, "crashed", "ValueError: what nobody expected"),
    (KeyboardInterrupt(), 130, "stopped", "Ctrl-C"),
])  # fmt: skip
def test_every_end_leaves_alike(run, capsys, error, code, state, reason):
    left, status = run(error)
    assert (left, status["state"], status.get("reason")) == (code, state, reason)
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


def test_collections_leave_modules_alone(run):
    """Garbage collection does not look at what was imported before `main`."""
    try:
        run(None)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("error, exit_code, code, message", [
    (DataError("row 17"), "", 2, "error: row 17"),
    (ValueError("what nobody expected"), "", 1, "ValueError: what nobody expected"),
    (Stopped("SIGTERM"), "75", 75, "Stopped by SIGTERM before the first checkpoint"),
    (Stopped("SIGTERM"), "0", 0, None),
    (Stopped("file /out/stop"), "75", 0, None),  # written by a person, who wants no restart
    (None, "", 0, None),
])  # fmt: skip
def test_a_run_that_fails_tells_its_launcher(run, tmp_path, monkeypatch, error, exit_code, code, message):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    if exit_code:
        monkeypatch.setenv("STOPPED_EXIT_CODE", exit_code)
    assert run(error)[0] == code
    said = json.loads(file.read_text())["message"]["message"] if file.exists() else ""
    assert said.startswith(message) if message else not said


@pytest.mark.parametrize("name, goes_on", [("checkpoint-3", True), ("checkpoint-3.partial", False), ("", False)])
def test_a_stopped_run_says_where_its_command_goes_on(run, tmp_path, capsys, name, goes_on):
    """Before the first whole checkpoint it begins again: nothing that it promises is missing."""
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "complete.json").touch()
    run(Stopped("file stop"))
    said = capsys.readouterr().out
    assert ("goes on from the newest checkpoint" in said) == goes_on
    assert ("before the first checkpoint; the same command begins again" in said) != goes_on


@pytest.mark.filterwarnings("ignore:.*status.json is damaged")
def test_a_full_disk_does_not_hide_the_end(run, tmp_path, monkeypatch):
    """Neither the message nor a new status.json can be written, but the old one has room for the new state."""
    for damaged in ('{"state": "running", "step": 3, "reason": "", "checkpoint": "checkpoint-3"}', ""):
        (tmp_path / "status.json").write_text(damaged)
        (tmp_path / "status.json.partial").unlink(missing_ok=True)
        (tmp_path / "status.json.partial").symlink_to("/dev/full")
        with monkeypatch.context() as full:
            full.setattr("sys.stderr", io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True))
            assert run(SaveError("checkpoint-6 could not be written"))[0] == 2
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["state"], status.get("step", 3)) == ("failed", 3)


def test_a_letter_that_the_locale_lacks(run, monkeypatch):
    """It is printed as its number: a run that has done everything is not taken for a crash."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", printed)
    assert run(None, says="Naïve ♞")[1]["state"] == "finished"
    assert "Naïve \\u265e" in printed.buffer.getvalue().decode("latin-1")


def test_bad_data_before_training_end_a_job(run, monkeypatch):
    """A job's script reads status.json; outside of a job only the message says it, and no file is left."""
    assert run(DataError("row 17"), takes_lock=False) == (2, {})
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    code, status = run(DataError("row 17"), takes_lock=False)
    assert (code, status["state"], status["reason"], status["job"]) == (2, "failed", "row 17", "5")


@pytest.mark.parametrize("name, problem", [
    ("recipes/nope.py", "no such recipe"),
    ("accelerate_configs/single.yaml", "is not a recipe; give a .py file, such as"),
    ("src/accelerate_recipes/run.py", "is not a recipe: it does not define requirements, main"),
])  # fmt: skip
def test_what_is_no_recipe(name, problem):
    refuses(problem, shipped.load, ROOT / name)


IMAGES = "--from_scratch --train_files data/fashion/train.parquet"
MODEL = "--model_name_or_path outputs/demo/export"


CONTRADICTIONS = [
    ("c4", "--report_to foo", "--report_to names 'foo'"),
    ("c4", "--config a.yaml b.yaml", "--config takes one file, once"),
    ("c4", "--config a.yaml --config b.yaml", "--config takes one file, once"),
    ("t5", "--eval_files a.jsonl --eval_split test", "--eval_files and --eval_split test both"),
    ("t5", "--eval_dataset_name a/b", "--eval_dataset_name a/b needs --eval_split"),
    ("vit", f"{IMAGES} --eval_files a.parquet --eval_split b", "--eval_split b and --eval_files both say"),
    ("c4", "--train_files README.md ./data/../README.md --validation_files README.md", "--train_files and --validation_files both"),
    ("c4", "--train_files data/c4_pydoc/en --validation_files data/c4_pydoc/en/c4-train.00000-of-01024.json.gz",  # a file in a folder
     "--train_files and --validation_files both"),
    ("sft", f"{MODEL} --train_files a.jsonl b.csv", "--train_files must all be of one kind"),
    ("sft", f"{MODEL} --from_scratch --tokenizer_name a", "--from_scratch makes a new model; remove it, or"),
    ("sft", f"{MODEL} --tokenizer_name a", "--from_scratch and --tokenizer_name go together"),
    ("sft", f"{MODEL} --pad_to_multiple_of 0", "--pad_to_multiple_of is 0;"),
    ("t5", "--heldout_share 1.5", "--heldout_share is 1.5; it must be above 0, and below 1"),
    # All at once
    ("t5", "--train_files data/en_fr/libreoffice.jsonl no.txt --eval_split test --generation_length_penalty 2 --metrics chrf meteor "
     "--num_eval_pairs 0 --max_target_length 1 --dropout_rate 1 --metric_for_best_model gleu",
     "no.txt: no such file", "--eval_split test names a split", "--generation_length_penalty 2.0 has no effect",
     "known are exact_match, rouge, bleu, chrf, gleu", "--num_eval_pairs is 0; it must be at least 1",
     "--max_target_length is 1; it must be at least 2", "--dropout_rate is 1; it must be at least 0, and below 1",
     "--metric_for_best_model gleu: the evaluation gives loss, chrf;"),
    ("vit", f"{IMAGES} --eval_split test --config_overrides hidden_size=100 num_attention_heads=3 image_size=30 --use_peft "
     "--crop_area 0 --hidden_size 64",
     "--eval_split test names a split", "hidden_size 100 is not a multiple of num_attention_heads 3",
     "image_size 30 is not a multiple of patch_size 16", "--use_peft would", "--crop_area is 0; it must be above 0",
     "unknown argument 'hidden_size' on the command line; a field of a new model's config.json is given by"),
]  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: f"{case[0]} {case[2]}")
def test_contradictions(case):
    name, argv, *problems = case
    said = refuses("", parse, shipped.load(ROOT / f"recipes/{name}.py").Args, argv.split(), world_size=1)
    assert [problem for problem in problems if problem not in said] == []
