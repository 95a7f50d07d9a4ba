"""Decision whether a Slurm job goes back into the queue after its processes have ended; slurm/submit.sh calls it."""

import os
import time
from pathlib import Path

from accelerate_recipes.life.status import attempt, is_wish_of_a_person, read_attempts, read_status, write_attempts

MAX_WITHOUT_PROGRESS = 3  # attempts of a job that end at the same checkpoint


def after_attempt(output_dir: Path, signalled: bool, max_restarts: int) -> tuple[int, str]:
    """Read from status.json how this attempt ended, and record it in attempts.jsonl.

    `signalled` says that Slurm told the job script that it wants the node back.

    Returns:
        Exit code and reason. 0: nothing is left to do; EX_TEMPFAIL (75): requeue; 1: the job has failed.
    """
    this = attempt()
    status = read_status(output_dir)
    if not status and (output_dir / "status.json").exists():
        status = {"state": "crashed", "reason": "status.json is damaged"}
    elif any(status.get(key) != value for key, value in this.items()):
        # An earlier attempt wrote this file; the current attempt ended before it could write. If Slurm wanted the node back,
        # that is no crash: its signal may also end processes that do not listen yet.
        status |= {"state": "stopped" if signalled else "crashed", "reason": "before training"}
    state, reason = status.get("state", "crashed"), status.get("reason", "")
    # The status is out of date if a run is killed just after a checkpoint got its name.
    saved = (marker.parent.name.removeprefix("checkpoint-") for marker in output_dir.glob("checkpoint-*/complete.json"))
    step = max([status.get("step", 0), *(int(name) for name in saved if name.isdecimal())])
    output_dir.mkdir(parents=True, exist_ok=True)
    attempts = read_attempts(output_dir)
    entry, last = this | {"state": state, "step": step, "reason": reason}, attempts[-1] if attempts else {}
    if last.get("begun") and this.items() <= last.items():  # the run itself noted when it began
        entry = {"ended": time.time()} | attempts.pop() | entry
    attempts.append(entry)
    write_attempts(output_dir, attempts)
    if state == "finished":
        return 0, "finished"
    if state == "failed":
        return 1, f"failed, and would again: {reason}"
    if state == "stopped" and not signalled and is_wish_of_a_person(reason):
        return 0, f"stopped by {reason}; the same command goes on"
    ended = f"{state if state != 'running' else 'killed'} at step {step}{': ' + reason if reason else ''}"
    newest = [(entry["job"], entry["step"]) for entry in attempts[-MAX_WITHOUT_PROGRESS:]]
    if newest == [(this["job"], step)] * MAX_WITHOUT_PROGRESS:
        said = f"{ended}; so ended {MAX_WITHOUT_PROGRESS} attempts without a newer checkpoint"
        remedy = "and submit again once it is put right (or with a longer --time)"
        return 1, f"{said}; see {output_dir / 'attempts.jsonl'} and the logs, {remedy}"
    if this["restarts"] >= max_restarts:
        return 1, f"{ended}; restarted {this['restarts']} times, MAX_RESTARTS is {max_restarts}"
    goes_on = f"goes on from step {step}" if step else "begins again, since no checkpoint was saved"
    return os.EX_TEMPFAIL, f"{ended}; the job {goes_on}"
