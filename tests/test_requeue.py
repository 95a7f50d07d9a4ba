"""Tests of when a job goes back into the queue, when it does not, and when its processes stop by themselves."""

import json
import os
import time

import pytest

from accelerate_recipes.life import stop
from accelerate_recipes.life.status import update_status
from recipe_tools.commands import main
from recipe_tools.requeue import after_attempt

DONE, FAIL, REQUEUE = 0, 1, os.EX_TEMPFAIL


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """End an attempt of a job in a state, and ask what to do next."""

    def end(job: str, restarts: int, signalled: bool = False, max_restarts: int = 100, **status: object):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        if status:
            update_status(tmp_path, **{"reason": "", "step": 0} | status)
        return after_attempt(tmp_path, signalled, max_restarts)

    return end


def test_what_goes_on_and_what_does_not(attempt):
    assert attempt("5", 0, signalled=True, state="stopped", reason="SIGUSR1", step=10) == (
        REQUEUE, "stopped at step 10: SIGUSR1; the job goes on from step 10",
    )  # fmt: skip
    assert attempt("5", 1, state="stopped", reason="the job's end", step=20)[0] == REQUEUE
    assert attempt("5", 2, state="crashed", reason="rank 3 (on n7): gone", step=30)[0] == REQUEUE
    assert attempt("5", 3, state="running", step=40) == (REQUEUE, "killed at step 40; the job goes on from step 40")
    code, why = attempt("5", 4, state="failed", reason="step 41: loss nan", step=40)
    assert code == FAIL and "loss nan" in why
    assert attempt("6", 0, state="finished", step=50)[0] == DONE


def test_a_person_is_obeyed(attempt):
    """The file stops the chain, unless it was the job script that wrote it."""
    assert attempt("5", 0, state="stopped", reason="file out/stop", step=10)[0] == DONE
    assert attempt("5", 0, signalled=True, state="stopped", reason="file out/stop", step=10)[0] == REQUEUE


DAMAGED = [
    b"", b'{\n "state": "runn', b"\xff\xfe\x00", b"[]", b"null", b'{"state": 1, "job": "5", "restarts": 0}',
    b"[" * 10**5,
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_status_does_not_end_the_chain(attempt, tmp_path, content):
    """The job goes on, its next attempt replaces the file, and a job that ends at the same place ends at last."""
    (tmp_path / "status.json").write_bytes(content)
    (tmp_path / "attempts.jsonl").write_bytes(b'{"job": "5", "restarts": 0, "st')
    with pytest.warns(UserWarning, match="status.json is damaged"):
        assert attempt("5", 0) == (
            REQUEUE, "crashed at step 0: status.json is damaged; the job begins again, since no checkpoint was saved",
        )  # fmt: skip
        assert attempt("5", 1, state="crashed")[0] == REQUEUE
    assert attempt("5", 2, state="crashed")[0] == FAIL
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_is_one_message(tmp_path, capsys, monkeypatch):
    (tmp_path / "attempts.jsonl.partial").symlink_to("/dev/full")
    monkeypatch.setattr("sys.argv", ["accelerate_recipes", "requeue", str(tmp_path), "--max_restarts", "3"])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"No space left on device: '{tmp_path / 'attempts.jsonl'}'" in said


def test_three_attempts_without_progress(attempt, tmp_path):
    crashed = {"state": "crashed", "reason": "rank 1: gone", "step": 10}
    assert [attempt("5", restarts, **crashed)[0] for restarts in (0, 1)] == [REQUEUE, REQUEUE]
    code, why = attempt("5", 2, **crashed)
    assert code == FAIL and "at step 10: rank 1: gone; so ended 3 attempts" in why
    # If submitted again, it is another job, with three attempts of its own.
    assert [attempt("6", restarts, **crashed)[0] for restarts in (0, 1, 2)] == [REQUEUE, REQUEUE, FAIL]
    # After a newer checkpoint, counting begins anew.
    assert [attempt("7", 0, **crashed)[0], attempt("7", 1, **crashed)[0]] == [REQUEUE, REQUEUE]
    assert attempt("7", 2, **crashed | {"step": 11})[0] == REQUEUE
    lines = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert lines[0] == {"job": "5", "restarts": 0, **crashed} and len(lines) == 9


def test_a_checkpoint_that_the_status_does_not_know(attempt, tmp_path):
    """A checkpoint counts if the run was killed before it updated the status; one that is not renamed yet does not."""
    for name in ("checkpoint-12", "checkpoint-15.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete.json").touch()
    assert attempt("5", 0, state="crashed", reason="gone", step=10) == (
        REQUEUE, "crashed at step 12: gone; the job goes on from step 12",
    )  # fmt: skip
    assert attempt("5", 1, state="running", step=12)[1].startswith("killed at step 12;")
    assert attempt("5", 2)[0] == FAIL


def test_a_status_of_an_earlier_attempt_is_not_taken_for_this_ones(attempt):
    """If this attempt ended before it wrote a status (nodes did not meet, no Python), an earlier status does not count."""
    attempt("5", 0, state="failed", reason="a bad row", step=10)
    assert attempt("6", 0) == (REQUEUE, "crashed at step 10: before training; the job goes on from step 10")
    assert attempt("6", 1, signalled=True)[1].startswith("stopped at step 10: before training")
    assert attempt("6", 2)[0] == FAIL


def test_restarts_are_bounded(attempt):
    stopped = {"state": "stopped", "reason": "SIGUSR1", "signalled": True}
    assert attempt("5", 1, max_restarts=2, step=1, **stopped)[0] == REQUEUE
    code, why = attempt("5", 2, max_restarts=2, step=2, **stopped)
    assert code == FAIL and "restarted 2 times, MAX_RESTARTS is 2" in why


def test_the_jobs_end(tmp_path, monkeypatch):
    """The run stops, for good, when the time left is less than two steps and two saves, earlier parts included."""
    for name in ("_file", "_asked_by", "_job_ends", "_last_step", "_longest_save"):
        monkeypatch.setattr(stop, name, getattr(stop, name))
    monkeypatch.setattr(stop.signal, "signal", lambda *_: None)
    now = time.time()
    monkeypatch.setattr(stop.time, "time", lambda: now)
    update_status(tmp_path, longest_save_seconds=40)
    monkeypatch.setenv("JOB_END_TIME", str(now + 100 + stop.LEAVE_SECONDS))
    stop.listen(tmp_path)
    stop.step_took(9)
    assert stop.requested() is None  # 98 s are needed
    assert stop.save_took(30) == 40 and stop.requested() is None
    stop.step_took(11)
    assert stop.requested() == "the job's end"
    stop.step_took(1)
    assert stop.requested() == "the job's end"
    monkeypatch.setattr(stop, "_asked_by", None)
    assert stop.requested() is None
    assert stop.save_took(50) == 50 and stop.requested() == "the job's end"
