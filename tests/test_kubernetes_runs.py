"""Tests that run a rendered job as the operators would: two pods of two processes, or of one, deleted, restarted, resumed."""

import json
import re
from pathlib import Path

import pytest
from helpers import CHILDREN, ROOT, losses, read_metrics
from pods import Pods

from recipe_tools.kubernetes import CHECKPOINTS

SCRIPT = CHILDREN / "toy.py"
JOB = ["--image", "registry.example/accelerate-recipes:1.0", "--checkpoints-pvc", "claim", "--nodes", "2"]
JOB += ["--gpus-per-node", "0", "--cpus-per-node"]
TWO, ONE = [*JOB, "2"], [*JOB, "1"]  # processes of a pod
FP32 = ["accelerate_configs/fsdp_full.yaml", "--mixed_precision", "no"]
OUT = ["--output_dir", f"{CHECKPOINTS}/out"]
TOY = [str(SCRIPT.relative_to(ROOT)), "--per_device_train_batch_size", "2", "--num_train_epochs", "4"]  # 20 steps


pytestmark = pytest.mark.usefixtures("at_the_root")


@pytest.fixture(scope="module")
def toy_losses(forks, tmp_path_factory) -> dict[int, float]:
    """Losses of the toy on four processes of one machine, undisturbed and without Kubernetes."""
    out = tmp_path_factory.mktemp("toy") / "out"
    forks.succeed(out, *TOY[1:], num_processes=4)
    return losses(out)


def last_step(out: Path) -> int:
    return max(losses(out), default=0) if (out / "metrics.jsonl").exists() else 0


def assert_undisturbed(pods: Pods, expected: dict[int, float]) -> None:
    """Assert that every step comes once, with the losses of an undisturbed run."""
    steps = [record["step"] for record in read_metrics(pods.out) if "loss" in record]
    assert steps == sorted(set(steps)) == sorted(expected), pods.tail()
    assert losses(pods.out) == pytest.approx(expected, rel=1e-5, abs=0)
    assert json.loads((pods.out / "status.json").read_text())["state"] == "finished"
    assert (pods.out / "export/model.safetensors").is_file() and not (pods.out / "lock.json").exists()


def resumed_from(pods: Pods) -> list[int]:
    return [int(step) for step in re.findall(r"Resumed .*checkpoint-\d+ \(step (\d+)", pods.log.read_text())]


def status(pods: Pods) -> dict:
    return json.loads((pods.out / "status.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_pod_is_deleted_and_a_node_is_lost(toy_losses, tmp_path, node):
    """After a deletion all pods save and end as failed, so that they are restarted; they continue from that step.

    Then a pod is gone without a signal: the surviving one ends by itself, and both continue from the newest checkpoint.
    """
    with Pods("pytorchjob", tmp_path, *TWO, *FP32, *TOY, *OUT, TOY_PACE="0.3") as pods:
        pods.wait_until(lambda: last_step(pods.out) >= 4)
        assert pods.delete(node) < pods.grace
        code = pods.processes[1 - node].wait(timeout=30)
        assert code != 0, "a pod that ends with 0 is not restarted, and the first one would be the end of the job"
        stopped = status(pods)
        assert stopped["state"] == "stopped" and stopped["reason"] == "SIGTERM" and stopped["step"] in range(4, 16)
        for pod in (0, 1):
            pods.restart(pod)
        pods.wait_until(lambda: last_step(pods.out) >= stopped["step"] + 2)
        pods.kill(1 - node)
        assert pods.processes[node].wait(timeout=60) != 0
        pods.finish(deleted=1 - node)
    first, second = resumed_from(pods)
    assert first == stopped["step"] and (second == first or (second in range(first, 20) and second % 3 == 0))
    assert_undisturbed(pods, toy_losses)


def slow_save(tmp_path: Path, step: int, seconds: int) -> dict[str, str]:
    """Delay the first save at this step by some seconds, just before it is complete; a file says when this begins."""
    # The launcher also signals everything that its processes have started.
    command = f"[ -e {tmp_path}/saving ] || {{ trap '' TERM; touch {tmp_path}/saving; exec sleep {seconds}; }}"
    fault = {"rank": 0, "event": "open", "path": f"checkpoint-{step}.partial/complete.json", "count": 1}
    return {"TOY_FAULT": json.dumps(fault | {"command": command})}


@pytest.mark.long
def test_a_pod_is_deleted_during_a_long_save(toy_losses, tmp_path):
    """The save takes longer than the launcher's default of 30 s, but the grace period counts."""
    job = [*ONE, "--grace-seconds", "75"]
    with Pods("trainjob", tmp_path, *job, *FP32, *TOY, *OUT, **slow_save(tmp_path, 3, 40)) as pods:
        pods.wait_until((tmp_path / "saving").exists)
        assert 31 < pods.delete(1) < 60
        stopped = status(pods)
        assert stopped["state"] == "stopped" and stopped["longest_save_seconds"] > 31
        pods.finish(deleted=1)
    assert resumed_from(pods) == [stopped["step"]]
    assert_undisturbed(pods, toy_losses)


@pytest.mark.slow
def test_a_person_stops_it(tmp_path):
    """A file `stop` ends the job, and nothing is restarted."""
    with Pods("trainjob", tmp_path, *ONE, *FP32, *TOY, *OUT, TOY_PACE="0.3") as pods:
        pods.wait_until(lambda: last_step(pods.out) >= 4)
        (pods.out / "stop").touch()
        pods.finish()
    assert pods.restarts == 0 and status(pods)["state"] == "stopped" and status(pods)["step"] < 20
