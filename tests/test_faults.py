"""Tests of SIGKILL at every kind of point: the next run continues from the newest complete checkpoint, as if undisturbed.

The toy recipe takes 10 steps on 2 ranks and saves after 3, 6, 9 and 10. Each fault strikes inside the real code, see
tests/children/faults.py.
"""

import json
import re
import subprocess
from pathlib import Path

import helpers
import pytest
from helpers import CHILDREN, ROOT, SIGTERM_TO_ALL, by_time, environment, killed_in_step, launch_command, log_of, losses

from accelerate_recipes.checkpoint.files import MARKER, candidates, damage, defect, step_of

DROPOUT = ("--dropout", 0.1)  # reveals a random generator that is not restored
STEPS = 10
SCRIPT = CHILDREN / "toy.py"
IMPATIENT = {"TESTED_PATIENCE": "1"}  # seconds in which other ranks might have their say, where none has one


@pytest.fixture(scope="module")
def undisturbed(forks, tmp_path_factory) -> dict[int, float]:
    """Losses of a whole undisturbed run."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    forks.succeed(out, *DROPOUT)
    assert [step_of(path) for path in candidates(out)] == [9, 10]
    found = losses(out)
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


# Point: rank, audit event, part of the path, how many such events, and the step of the newest complete checkpoint that
# must be there afterwards (None: any, since a save in the background may or may not be over).
TRAINING = {
    "in the first step": (0, "toy.loss", "step 1.", 1, 0),
    "in a step": (1, "toy.loss", "step 5.", 1, None),
    "in a step between two saves": (0, "toy.loss", "step 8.", 1, None),
    "logging": (0, "open", "metrics.jsonl", 5, 0),
}
SAVE = {
    "before the directory": (0, "os.mkdir", "checkpoint-6.partial", 1, 3),
    "copying the metrics": (0, "open", "checkpoint-6.partial/metrics.jsonl", 1, 3),
    "before the first file": (0, "open", "checkpoint-6.partial/state/__0_0", 1, 3),
    "before the first file of the other rank": (1, "open", "checkpoint-6.partial/state/__1_0", 1, 3),
    "before the metadata": (0, "open", "checkpoint-6.partial/state/.metadata.tmp", 1, 3),
    "before the metadata has its name": (0, "os.rename", "checkpoint-6.partial/state/.metadata.tmp", 1, 3),
    "before a random state": (0, "open", "checkpoint-6.partial/rng-0.pt", 1, 3),
    "before the other rank's random state": (1, "open", "checkpoint-6.partial/rng-1.pt", 1, 3),
    "before a checksum": (1, "open", "checkpoint-6.partial/state/__1_0", 3, 3),
    "before the arguments": (0, "open", "checkpoint-6.partial/args.yaml", 1, 3),
    "before the configuration": (0, "open", "checkpoint-6.partial/config.json", 1, 3),
    "before the marker": (0, "open", f"checkpoint-6.partial/{MARKER}", 1, 3),
    "before the marker is on the disk": (0, "open", f"checkpoint-6.partial/{MARKER}", 2, 3),
    "before the renaming": (0, "os.rename", "checkpoint-6.partial", 2, 3),
}
AFTER = {
    "between renaming and status": (0, "open", "status.json.partial", 7, 9),
    "between renaming and retention": (0, "os.rename", "checkpoint-3", 3, 9),
    "before an old one is removed": (0, "shutil.rmtree", "checkpoint-3.partial", 1, 9),
    "in the middle of the removal": (0, "os.remove", "rng-1.pt", 1, 9),
    "in the export": (0, "open", "export.partial/config.json", 1, 10),
}
POINTS = TRAINING | SAVE | AFTER
# Points at which runs in one output directory are killed, one after another: each run but the first goes on from what a killed
# one left. The end of one rank in a save leaves the files that the end of all leaves: most of these are for `make test-long`.
ALL_RANKS = {
    "": [["in a step", "before the marker"], ["in the middle of the removal"]],
    "slow": [
        ["logging", "in the first step", "in a step between two saves"],
        [point for point in SAVE if point != "before the marker"],
        ["between renaming and status", "in the export"],
        ["between renaming and retention"],
        ["before an old one is removed"],
    ],
}
ONE_RANK = {
    "": [["between renaming and retention"]],
    "slow": [["logging", "in the first step", "in a step", "in a step between two saves"], ["in the export"]],
    "long": [
        [*SAVE], ["between renaming and status"], ["before an old one is removed"], ["in the middle of the removal"],
    ],
}  # fmt: skip


def fault(point: str, everyone: bool) -> dict[str, str]:
    rank, event, path, count, _ = POINTS[point]
    return {"TOY_FAULT": json.dumps({"rank": rank, "event": event, "path": path, "count": count, "everyone": everyone})}


def newest_complete(out: Path, point: str) -> int:
    """Return the step of the newest complete checkpoint that a killed run left, or 0; check that each is undamaged."""
    complete = [path for path in candidates(out) if defect(path) is None]
    assert [damage(path) for path in complete] == [None] * len(complete)
    newest = step_of(complete[-1]) if complete else 0
    wanted = POINTS[point][-1]
    assert newest == wanted if wanted is not None else newest % 3 == 0
    return newest


def assert_continued(out: Path, newest: int, log: str, undisturbed: dict[int, float]) -> None:
    """Assert that a run continued from that checkpoint, with the same losses bit for bit, as far as it came."""
    resumed = re.findall(r"Resumed .*checkpoint-\d+ \(step (\d+)", log)
    assert resumed == ([str(newest)] if newest else [])
    found = losses(out) if (out / "metrics.jsonl").exists() else {}
    assert found.items() <= undisturbed.items()
    assert max(found, default=0) >= newest


def assert_resumed(out: Path, newest: int, log: str, undisturbed: dict[int, float]) -> None:
    """Assert that the next run continues from that checkpoint to the end."""
    assert_continued(out, newest, log, undisturbed)
    assert losses(out) == undisturbed
    assert json.loads((out / "status.json").read_text())["state"] == "finished"
    assert (out / "export/model.safetensors").exists() and not (out / "lock.json").exists()


@pytest.mark.parametrize(
    "points, everyone",
    [
        pytest.param(
            points,
            cases is ALL_RANKS,
            marks=getattr(pytest.mark, mark) if mark else (),
            id=f"{who}, {points[0]}{' ...' * (len(points) > 1)}",
        )
        for who, cases in (("all", ALL_RANKS), ("one", ONE_RANK))
        for mark, chains in cases.items()
        for points in chains
    ],
)
def test_killed(forks, undisturbed, tmp_path, points, everyone):
    """A surviving rank ends by itself, and says which other rank is gone."""
    out, log, newest = tmp_path / "out", tmp_path / "out.log", 0
    for point in points:
        code = forks.run(out, *DROPOUT, **fault(point, everyone))
        assert code == (-9 if everyone else 128 + 9), f"{point}: the fault did not strike: {log.read_text()[-3000:]}"
        if not everyone and point != "in the export":  # when training is over, nobody waits for anybody
            assert re.search(r"error: (rank \d \(on .*\)|the first node \(.*\)): gone during", log.read_text()), point
        assert_continued(out, newest, log.read_text(), undisturbed)
        newest = newest_complete(out, point)
        log.unlink()
    forks.succeed(out, *DROPOUT)
    assert_resumed(out, newest, log.read_text(), undisturbed)


@pytest.mark.parametrize("everyone", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("point", by_time(
    ("before the marker", "in a step between two saves", "between renaming and retention"), (), ["before the marker"]
))  # fmt: skip
def test_killed_under_the_launcher(forks, undisturbed, tmp_path, out, point, everyone):
    """The same holds under `accelerate launch`, which ends the surviving rank."""
    command = launch_command("fsdp_full", CHILDREN / "toy.py", "--output_dir", out, *DROPOUT)
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 200, "start_new_session": True}
    killed = subprocess.run(command, env=environment(tmp_path) | fault(point, everyone), **options)
    assert killed.returncode == (-9 if everyone else 1), killed.stderr[-3000:]
    newest = newest_complete(out, point)
    forks.succeed(out, *DROPOUT)
    assert_resumed(out, newest, log_of(out), undisturbed)


BY_4, BY_2 = (
    {"PARALLELISM_CONFIG_CP_SIZE": "4"},
    {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
)  # of 4 ranks that share rows
# Config and ranks of each run; where ranks share rows, attention and environment.
CHAINS = {
    "2 -> 1 -> 4 -> 2 ranks": [("fsdp_full", 2), ("fsdp_full", 1), ("fsdp_full", 4), ("fsdp_full", 2)],
    "FSDP2 -> DDP -> FSDP2": [("fsdp_full", 2), ("ddp", 2), ("fsdp_full", 2)],
    "single -> hybrid -> DDP -> single": [("single", 1), ("fsdp_hybrid", 4), ("ddp", 2), ("single", 1)],
    "rows shared by 4 -> by 2 -> by none": [
        ("fsdp_long", 4, "sdpa", BY_4), ("fsdp_long", 4, "documents", BY_2), ("single", 1, "documents", {}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def without_dropout(forks, tmp_path_factory) -> dict[int, float]:
    """Losses of a whole run whose arithmetic does not depend on the number of ranks."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    forks.succeed(out, "--num_rows", 96, "--num_train_epochs", 1)
    return losses(out)


@pytest.mark.parametrize("name", by_time(CHAINS, ["2 -> 1 -> 4 -> 2 ranks"]))
def test_chain_of_resumes(forks, without_dropout, out, name):
    """Each link but the last is killed after its first save; together they train on every row of the epoch once."""
    chain = CHAINS[name]
    args = ("--num_rows", 96, "--num_train_epochs", 1, "--save_steps", 3, "--per_device_train_batch_size", 2)
    for i, (config, num_processes, *shared) in enumerate(chain):
        last = i == len(chain) - 1
        attention, env = shared or ("sdpa", {})
        given = (*args, "--attn_implementation", attention, "--async_save", "false")
        env = env | ({} if last else killed_in_step(3 * i + 5))
        code = forks.run(out, *given, config=config, num_processes=num_processes, **env)
        assert code == (0 if last else -9), log_of(out)[-3000:]
    assert re.findall(r"\(step (\d+), saved by (\d) x", log_of(out)) == [
        (str(3 * i + 3), str(num_processes)) for i, (_, num_processes, *_) in enumerate(chain[:-1])
    ]
    assert losses(out) == pytest.approx(without_dropout, rel=1e-5)
    assert helpers.rows_trained_on(out) == list(range(96))


def test_a_save_that_fails_in_the_background_stops_the_run(forks, out):
    """Files may not grow beyond 40 kB: the first save fails, the run ends with its reason, and nothing is left of it."""
    assert forks.run(out, "--max_steps", 200, TOY_FSIZE="40000") == 2
    (said,) = re.findall(r"^error: .*", log_of(out), re.MULTILINE)
    assert re.search(r"checkpoint-3 could not be written: rank 0: .*File too large", said)
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    assert 3 < max(losses(out)) < 200, "training went on meanwhile, and then stopped"
    assert not list(out.glob("checkpoint-*"))


def test_a_rank_that_hangs_is_named(forks, out):
    """Rank 1 sleeps in step 5: the others do not wait for --ddp_timeout, and say where each is."""
    assert forks.run(out, "--step_timeout", 3, TOY_HANG="5") == 1
    said = r"error: step 5 has not ended within \d+ s .*rank 1 at step 5, in faulty_loss \(toy.py"
    assert re.search(said, log_of(out)), log_of(out)[-3000:]
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "crashed" and "rank 1" in status["reason"], status


def test_a_single_process_that_hangs_ends(forks, out):
    assert forks.run(out, "--step_timeout", 3, TOY_HANG="5", config="single", num_processes=1, **IMPATIENT) == 1
    said = "step 5 has not ended within [0-9]+ s .*; the process is in faulty_loss [(]toy.py"
    assert re.search(f"^error: {said}", log_of(out), re.MULTILINE), log_of(out)[-3000:]
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "crashed" and re.match(said, status["reason"]), status


def test_a_full_disk_while_logging_is_a_failure(forks, out):
    """Files may not grow beyond 1 kB: neither can the log line be printed, nor the error, but status.json says it."""
    assert forks.run(out, TOY_FSIZE="1000") == 2
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "failed" and "[Errno 27] File too large" in status["reason"], status
    assert not (out / "lock.json").exists()


def test_letters_that_the_locale_lacks(forks, tmp_path):
    """A run whose folder has them finishes in the plainest locale, and its card shows them."""
    out = tmp_path / "Läufer ♞"
    forks.succeed(out, "--max_steps", 2, LC_ALL="C", config="single", num_processes=1)
    assert json.loads((out / "status.json").read_bytes())["state"] == "finished"
    assert f"# {out.name}\n" in (out / "export/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("step", [0, 5])
def test_bad_data_of_one_rank_fail_the_run(forks, out, step):
    """Only rank 1 finds bad data, before training or in step 5; this is no crash, which would be tried again."""
    assert forks.run(out, TOY_BAD_DATA=step, **IMPATIENT) == 2
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "bad.jsonl, row 17: no text")
    assert log_of(out).count("error: bad.jsonl, row 17: no text") == 1
    assert not (out / "lock.json").exists()


def test_sigterm_to_all_processes_saves(forks, undisturbed, out):
    """After SIGTERM by scancel, a preemption or the end of a pod, the workers continue until the ranks have saved."""
    args = (*DROPOUT, "--dataloader_num_workers", 2, "--full_determinism")
    forks.succeed(out, *args, TOY_FAULT=json.dumps(SIGTERM_TO_ALL))
    status = json.loads((out / "status.json").read_text())
    assert "| deterministic algorithms |" in log_of(out)
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM") and status["step"] in (5, 6)
    forks.succeed(out, *args)
    assert losses(out) == undisturbed


def test_a_metric_that_the_evaluation_does_not_give(forks, out):
    assert forks.run(out, "--metric_for_best_model", "accuracy", "--eval_steps", 3) == 2
    assert "error: --metric_for_best_model accuracy: the evaluation gives loss" in log_of(out)
    assert not losses(out), "before the first step"


def test_a_loss_that_is_not_finite_names_its_rows(forks, out):
    """With poisoned row 17 the run ends before the weights change, and says where to look."""
    assert forks.run(out, "--per_device_train_batch_size", 2, TOY_POISON="17") == 2
    found = json.loads((out / "non_finite.json").read_text())
    assert f"step {found['step']}: loss nan" in log_of(out) and found["last_good_step"] == found["step"] - 1
    micro_batches = [entry for rank in found["micro_batches_of_ranks"] for entry in rank]
    assert len(found["micro_batches_of_ranks"]) == 2 and len(micro_batches) == 4
    assert sum(len(entry["rows"]) for entry in micro_batches) == 8
    assert [17 in entry["rows"] for entry in micro_batches] == [entry["loss_sum"] == "nan" for entry in micro_batches]
    assert any(17 in entry["rows"] for entry in micro_batches)
    assert max(losses(out), default=0) == found["last_good_step"]
