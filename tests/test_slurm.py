"""Tests of slurm/submit.sh under real Slurms of two nodes, started here. `make test-slurm` installs Slurm and runs this."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import CHILDREN, ROOT, SMALL_CHESS, environment, launch_ok, losses, read_metrics
from slurm_cluster import NODES, Cluster, wait_until

REASON = None
if os.geteuid() != 0:
    REASON = "NOT TESTED AGAINST SLURM: that needs root, to start a Slurm of its own"
elif not all(shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in ("slurmctld", "slurmd", "munged")):
    REASON = "NOT TESTED AGAINST SLURM: `make test-slurm` installs and uses it"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800), pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SUBMIT = ROOT / "slurm/submit.sh"
FP32 = ["accelerate_configs/fsdp_full.yaml", "--mixed_precision", "no"]
CHESS = ["recipes/chess.py", "--config", "recipes/configs/chess/laptop.yaml", *SMALL_CHESS]
TOY = [CHILDREN / "toy.py", "--max_steps", 18]
FIRST_ATTEMPT = "[ ${SLURM_RESTART_COUNT:-0} = 0 ] && "
# These send the signal that Slurm itself sends at the time limit and at a preemption to jobs with --signal=B:USR1.
SIGNAL = "scancel --batch --signal=USR1 $SLURM_JOB_ID; sleep 3"


class Jobs:
    """Jobs submitted with the real sbatch."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.environment = environment(folder) | cluster.environment | {"PYTHONPATH": str(CHILDREN)}

    def command(self, out: Path, run: list, flags: tuple, direct: bool) -> list[str]:
        flags = [f"--output={out.parent}/%x-%j.out", "--time=10", "--gpus-per-node=2", "--cpus-per-task=2", *flags]
        arguments = [*run, "--output_dir", out]
        words = [SUBMIT, *flags, "--", *arguments] if direct else ["sbatch", *flags, SUBMIT, *arguments]
        return [str(word) for word in words]

    def try_submit(self, out: Path, run: list, *flags: str, direct: bool = True, **env: str):
        return subprocess.run(
            self.command(out, run, flags, direct),
            cwd=ROOT, env=self.environment | env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def submit(
        self, out: Path, run: list, *flags: str, direct: bool = False, faults: Sequence[dict] = (), **env: str
    ) -> int:
        """Submit a job and return its id."""
        env["TOY_FAULT"] = json.dumps([{"rank": 0, "count": 1} | fault for fault in faults])
        done = self.try_submit(out, run, *flags, direct=direct, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(re.search(r"Submitted batch job (\d+)", done.stdout)[1])

    def show(self, job: int) -> dict[str, str]:
        """Return what Slurm knows about a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.run("scontrol", "show", "job", job)))

    def end(self, job: int, seconds: float = 1500) -> dict[str, str]:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_until(lambda: self.show(job)["JobState"] in ends, seconds, self.show(job))
        return self.show(job)

    def log(self, job: int) -> str:
        file = Path(self.show(job)["StdOut"])
        return file.read_text() if file.exists() else ""

    def completed(self, job: int, restarts: int | None = None) -> None:
        found = self.end(job)
        assert found["JobState"] == "COMPLETED", self.log(job)[-6000:]
        if restarts is not None:
            assert int(found["Restarts"]) == restarts, self.log(job)[-6000:]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield Jobs(cluster, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Output directory of the toy on two processes, undisturbed and without Slurm."""
    out = tmp_path_factory.mktemp("toy") / "out"
    launch_ok(out.parent, "fsdp_full", *TOY, "--output_dir", out)
    return out


@pytest.fixture(scope="module")
def toy_losses(toy) -> dict[int, float]:
    return losses(toy)


def attempts(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "attempts.jsonl").read_text().splitlines()]


def assert_undisturbed(out: Path, expected: dict[int, float], rel: float = 0.0) -> None:
    """Assert that the joined metrics.jsonl has every step once, with the losses of an undisturbed run."""
    steps = [record["step"] for record in read_metrics(out) if "loss" in record]
    assert steps == sorted(set(steps)) == sorted(expected)
    assert losses(out) == pytest.approx(expected, rel=rel, abs=0)
    assert (out / "export/model.safetensors").is_file()


# Those that take longest come first.


def test_time_limit(jobs, toy_losses, out):
    """A run that is not done when its two minutes end is saved, requeued and resumed, as if undisturbed."""
    until_told = FIRST_ATTEMPT + f"while [ ! -s {out}/stop ]; do sleep 0.5; done"
    fault = {"event": "toy.loss", "path": "step 5.", "command": until_told}
    job = jobs.submit(out, [*FP32, *TOY, "--save_steps", 0], "--time=2", "--signal=B:USR1@30", faults=[fault])
    jobs.completed(job)
    *stopped, last = attempts(out)
    assert stopped and {attempt["state"] for attempt in stopped} == {"stopped"} and last["state"] == "finished"
    assert [attempt["restarts"] for attempt in (*stopped, last)] == list(range(len(stopped) + 1))
    assert int(jobs.show(job)["Restarts"]) == len(stopped)
    assert_undisturbed(out, toy_losses)


# Training continues while this save waits, until the next save.
SIGNAL_AND_WAIT = f"{SIGNAL.partition(';')[0]}; for i in $(seq 50); do [ ! -s $OUT/stop ] || break; sleep 0.2; done"
ENDS = [  # of one job's attempts: an event, what happens there, and how the attempt ends
    ("toy.loss", "step 3.", "scancel --signal=USR1 $SLURM_JOB_ID; sleep 3", "stopped", [4]),  # to the processes
    ("toy.evaluation", "step 5.", SIGNAL, "stopped", [5]),
    ("toy.loss", "step 6.", "scontrol requeue $SLURM_JOB_ID; sleep 3", "stopped", [7]),  # from outside
    ("open", "checkpoint-12.partial/complete.json", SIGNAL_AND_WAIT, "stopped", range(12, 18)),
]


def test_saved_requeued_and_resumed(jobs, toy_losses, tmp_path):
    """The attempts of one job end in five ways. The first gets its signal when nothing listens yet: a file reports it."""
    out, faults = tmp_path / "out", []
    for number, (event, path, command, *_) in enumerate(ENDS, start=1):
        in_turn = f"[ ${{SLURM_RESTART_COUNT:-0}} = {number} ] && {{ {command}; }}"
        faults.append({"event": event, "path": path, "command": in_turn})
    job = jobs.submit(out, [*FP32, *TOY, "--eval_steps", 5], faults=faults, OUT=str(out))
    wait_until(lambda: "on each node: " in jobs.log(job), 200, "the launch")
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    jobs.completed(job, restarts=len(ENDS) + 1)
    log = jobs.log(job)
    assert "checkpoint-7 (step 7" in log, "Slurm requeues it; the processes have saved in time"
    expected = [("stopped", [0, 1]), *((state, steps) for *_, state, steps in ENDS), ("finished", [18])]
    for attempt, (state, steps) in zip(attempts(out), expected, strict=True):
        assert attempt["state"] == state and attempt["step"] in steps, log[-9000:]
    assert_undisturbed(out, toy_losses)


def test_the_jobs_end_without_a_signal(jobs, toy_losses, tmp_path):
    """Processes that no signal reaches look at the clock; one step takes nearly all of the two minutes."""
    command = FIRST_ATTEMPT + "sleep $((JOB_END_TIME - $(date +%s) - 25))"
    fault = {"event": "toy.loss", "path": "step 5.", "command": command}
    job = jobs.submit(tmp_path / "out", [*FP32, *TOY], "--time=2", "--signal=B:CONT@1", faults=[fault])
    jobs.completed(job, restarts=1)
    first, _ = attempts(tmp_path / "out")
    assert (first["state"], first["reason"], first["step"]) == ("stopped", "the job's end", 6)
    assert_undisturbed(tmp_path / "out", toy_losses)


def test_preemption(jobs, toy_losses, tmp_path, out):
    """A job of a higher partition takes both nodes of a run with replicas between nodes, and starts at once."""
    hybrid = ["accelerate_configs/fsdp_hybrid.yaml", "--mixed_precision", "no", *TOY]
    urgent = f"sbatch --partition=urgent --nodes=2 --gpus-per-node=2 --output={tmp_path}/urgent.out --wrap 'sleep 5'"
    command = FIRST_ATTEMPT + f"{urgent} && sleep 8"
    job = jobs.submit(out, hybrid, "--nodes=2", faults=[{"event": "toy.loss", "path": "step 5.", "command": command}])
    jobs.completed(job, restarts=1)
    assert "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2" in jobs.log(job)
    assert jobs.log(job).count("Strategy: ") == 2, "one of each attempt"
    assert {path.name for path in (out / "logs").iterdir()} == {"node-0", "node-1"}
    first, last = attempts(out)
    assert (first["state"], first["step"], last["state"]) == ("stopped", 6, "finished")
    assert_undisturbed(out, toy_losses, rel=1e-5)


def test_two_nodes_whose_ranks_share_rows(jobs, toy_losses, tmp_path):
    """Rows shared by the two processes of a node, a shard on each: the losses of ranks that share none, also when one was killed."""
    config = ["accelerate_configs/fsdp_long.yaml", "--mixed_precision", "no", "--parallelism_config_cp_size", "2"]
    killed = {"rank": 3, "event": "toy.loss", "path": "step 5.", "command": FIRST_ATTEMPT + "kill -9 $PPID"}
    job = jobs.submit(tmp_path / "out", [*config, *TOY, "--async_save", "false"], "--nodes=2", faults=[killed])
    jobs.completed(job, restarts=1)
    log = jobs.log(job)
    assert ", rows shared by 2" in log and "| 4 x cpu" in log and "warning: 2 ranks share a row" not in log
    assert_undisturbed(tmp_path / "out", toy_losses, rel=1e-5)
    first, last = attempts(tmp_path / "out")
    assert (first["state"], first["step"], last["state"]) == ("crashed", 3, "finished")


def test_a_node_is_lost(jobs, toy_losses, tmp_path, out):
    """When a node's slurmd is gone, the job continues elsewhere, and processes that live on without it end."""
    command = FIRST_ATTEMPT + f"{{ echo $$ >> {tmp_path}/orphans; exec sleep 1000; }}"
    fault = {"event": "toy.loss", "path": "step 5.", "command": command}
    job = jobs.submit(out, [*FP32, *TOY], faults=[fault])
    wait_until(lambda: (out / "checkpoint-3").is_dir(), 300, "training")
    node = jobs.show(job)["BatchHost"]
    jobs.cluster.kill_node(node)
    try:
        jobs.completed(job, restarts=1)
        assert jobs.show(job)["BatchHost"] != node
        assert_undisturbed(out, toy_losses)
        assert attempts(out)[-1]["state"] == "finished"
    finally:
        for orphan in (tmp_path / "orphans").read_text().split():  # these outlived slurmd
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(orphan), signal.SIGKILL)
        jobs.cluster.start_node(node)
        jobs.cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_node_is_lost_with_its_disk(jobs, toy, tmp_path):
    """Each node has a disk of its own, and rank 0's is lost: the job goes on from the copy, on an empty disk there."""
    cluster, place = jobs.cluster, tmp_path / "place"
    if not cluster.has_disks:
        pytest.skip("NOT TESTED WITH DISKS OF NODES: that needs the right to mount")
    out, disks = cluster.local / "out", [cluster.disk_of(node) / "out" for node in NODES]
    disks[1].mkdir()
    (disks[1] / "stop").write_text("TERM 0-0\n")  # left there by a job that was killed
    fault = {"event": "toy.loss", "path": "step 5.", "command": FIRST_ATTEMPT + "exec sleep 1000"}
    flags = ("--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/log")
    job = jobs.submit(out, [*FP32, *TOY, "--mirror", place], *flags, faults=[fault])
    wait_until(lambda: list(place.glob("checkpoint-3-*/complete.json")), 300, "a copy")
    for number, disk in enumerate(disks):
        assert [path.name for path in disk.glob("checkpoint-3/rng-*.pt")] == [f"rng-{number}.pt"]
    cluster.replace_node(NODES[0])
    jobs.completed(job, restarts=1)
    log = jobs.log(job)
    assert log.count("Mirror: fetching checkpoint-3-") == 2 and f"Resumed {out}/checkpoint-3 " in log
    assert "Mirror: the copy is complete: checkpoint-18-" in log
    assert_undisturbed(disks[0], losses(toy))
    exported = [folder / "export/model.safetensors" for folder in (toy, disks[0])]
    assert exported[0].read_bytes() == exported[1].read_bytes()


def test_cancelled(jobs, out):
    """A cancelled job saves, since Slurm leaves it KillWait, and is not requeued."""
    fault = {"event": "toy.loss", "path": "step 5.", "command": "scancel $SLURM_JOB_ID; sleep 3"}
    job = jobs.submit(out, [*FP32, *TOY], faults=[fault])
    assert jobs.end(job)["JobState"] == "CANCELLED"
    wait_until((out / "checkpoint-6/complete.json").exists, 60, "the last checkpoint")
    time.sleep(8)  # longer than a requeued job waits
    assert jobs.show(job)["Restarts"] == "0" and not jobs.cluster.run("squeue", "-h")


def test_one_node(jobs, games_file, tmp_path, out):
    """A recipe on two processes, submitted directly, without the variables of the login shell."""
    run = [*CHESS, "--train_files", games_file, "--heldout_share", 0.1, "--max_steps", 4, "--logging_steps", 1]
    job = jobs.submit(out, [*FP32, *run, "--data_cache_dir", tmp_path / "cache"], "--export=NONE", direct=True)
    jobs.completed(job, restarts=0)
    log = jobs.log(job)
    assert (out / "export/model.safetensors").is_file()
    assert jobs.show(job)["JobName"] == "chess" and jobs.show(job)["StdOut"] == f"{out.parent}/chess-{job}.out"
    assert f"accelerate launch --config_file {shlex.join(FP32[:1])} --num_machines 1 --num_processes 2" in log
    assert "Loss: " in log and "finished" in log
    for rank in (0, 1):
        (part,) = out.glob(f"logs/node-0/{job}-0_*/attempt_0/{rank}/stdout.log")
        assert ("Loss: " in part.read_text()) == (rank == 0)


def test_a_person_stops_it(jobs, out):
    command = f"touch {out}/stop"
    job = jobs.submit(out, [*FP32, *TOY], faults=[{"event": "toy.loss", "path": "step 5.", "command": command}])
    jobs.completed(job, restarts=0)
    assert "the same command goes on" in jobs.log(job)
    assert not (out / "export").exists()


def test_wrong_requests(jobs, tmp_path):
    """One message lists everything that is wrong with the run and with the request; nothing is queued."""
    wrong = [
        "--total_batch_size", 7, "--lerning_rate", 1, "--from_scratch", "false", "--model_name_or_path", "no/model",
    ]  # fmt: skip
    done = jobs.try_submit(Path("/proc/out"), [*FP32, *CHESS, *wrong], "--gpus-per-node=3", "--partition=nowhere")
    assert done.returncode == 1
    for expected in (
        "--total_batch_size 7", "unknown argument 'lerning_rate'", "model 'no/model' is not in",
        "--output_dir /proc/out cannot be written to: ", "invalid partition specified: nowhere", "nothing was queued",
    ):  # fmt: skip
        assert expected in done.stderr, done.stderr
    done = jobs.try_submit(tmp_path / "out", [*FP32, *TOY, "--per_device_train_batch_size", 1], "--gpus-per-node=3")
    assert done.returncode == 1 and "Requested node configuration is not available" in done.stderr
    assert not jobs.cluster.run("squeue", "-h")


def test_the_job_checks_first(jobs, tmp_path):
    """A misspelt flag given to sbatch fails the job within seconds, before any process is launched, without a requeue."""
    job = jobs.submit(tmp_path / "out", [*FP32, *TOY, "--lerning_rate", 1])
    found = jobs.end(job)
    assert (found["JobState"], found["Restarts"]) == ("FAILED", "0")
    assert "unknown argument 'lerning_rate'" in jobs.log(job) and "accelerate launch" not in jobs.log(job)
    assert not (tmp_path / "out").exists()


def test_flags_in_the_documentation(jobs):
    """All flags for sbatch in the READMEs are flags of sbatch."""
    text = (ROOT / "README.md").read_text() + (ROOT / "slurm/README.md").read_text()
    lines = re.findall(r"^slurm/submit.sh (.*?) --(?: |$)|^sbatch (.*?)slurm/submit.sh", text, re.MULTILINE)
    flags = {flag for line in lines for flag in re.findall(r"--[a-z-]+", "".join(line))}
    known = set(re.findall(r"--[a-z-]+", jobs.cluster.run("sbatch", "--help")))
    assert len(flags) >= 6 and flags <= known, flags - known
