"""Decision whether a Slurm job whose processes have ended goes back into the queue; slurm/submit.sh calls it."""

import json
import os
from pathlib import Path

from accelerate_recipes.life.status import attempt, is_wish_of_a_person, read_status

MAX_WITHOUT_PROGRESS = 3  # attempts of a job that end at the same checkpoint


def after_attempt(output_dir: Path, signalled: bool, max_restarts: int) -> tuple[int, str]:
    """Judge by status.json how this attempt ended, and note it in attempts.jsonl.

    `signalled` says that Slurm told the job script that it wants the node back.

    Returns:
        Exit code and reason. 0: nothing is left to do; EX_TEMPFAIL (75): requeue; 1: the job has failed.
    """
    this = attempt()
    status = read_status(output_dir)
    if any(status.get(key) != value for key, value in this.items()):
        # An earlier attempt wrote it; this attempt ended before that.
        status = {"state": "crashed", "reason": "before training", "step": status.get("step", 0)}
    state, reason = status["state"], status.get("reason", "")
    # The status is out of date if a run is killed just after a checkpoint got its name.
    saved = (marker.parent.name.removeprefix("checkpoint-") for marker in output_dir.glob("checkpoint-*/complete.json"))
    step = max([status.get("step", 0), *(int(name) for name in saved if name.isdecimal())])
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / "attempts.jsonl"
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(this | {"state": state, "step": step, "reason": reason}) + "\n")
    if state == "finished":
        return 0, "finished"
    if state == "failed":
        return 1, f"failed, and would again: {reason}"
    if state == "stopped" and not signalled and is_wish_of_a_person(reason):
        return 0, f"stopped by {reason}; the same command goes on"
    ended = f"{state if state != 'running' else 'killed'} at step {step}{': ' + reason if reason else ''}"
    attempts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][-MAX_WITHOUT_PROGRESS:]
    if [(entry["job"], entry["step"]) for entry in attempts] == [(this["job"], step)] * MAX_WITHOUT_PROGRESS:
        return 1, (
            f"{ended}; so ended {MAX_WITHOUT_PROGRESS} attempts without a newer checkpoint; see {file} and the logs, "
            "and submit again once it is put right (or with a longer --time)"
        )
    if this["restarts"] >= max_restarts:
        return 1, f"{ended}; restarted {this['restarts']} times, MAX_RESTARTS is {max_restarts}"
    return os.EX_TEMPFAIL, ended
