"""Tests of what slurm/submit.sh passes to preflight, for different sbatch flags. test_slurm.py uses a real Slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    for name, commands in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{commands}\n")
        (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the flags that preflight gets; preflight and sbatch are stand-ins."""
    folder = tmp_path_factory.mktemp("login")
    (folder / "slurm").mkdir()
    shutil.copy(ROOT / "slurm/submit.sh", folder / "slurm")
    (folder / "slurm/site.sh").touch()
    python = f"""[[ $2 != *.gpus ]] || PYTHONPATH={ROOT / "src"} exec {sys.executable} "$@"
echo "$@" >"$ASKED"; echo "COMMAND=(recipes/chess.py)\""""
    write_programs(folder, {"python": python, "sbatch": 'echo "sbatch $@" >>"$ASKED"'})

    def submit(*flags: str, **env: str) -> str:
        paths = {"PATH": f"{folder}:{os.environ['PATH']}", "ASKED": str(folder / "asked")}
        command = ["bash", "slurm/submit.sh", *flags, "--", "config.yaml", "recipe.py"]
        settings = {"cwd": folder, "env": os.environ | paths | env, "timeout": 60}
        done = subprocess.run(command, capture_output=True, text=True, **settings)
        return (folder / "asked").read_text() if done.returncode == 0 else done.stderr

    return submit


@pytest.mark.parametrize("flags, gpus", [
    ([], 0), (["--gpus-per-node=8"], 8), (["--gpus-per-node", "h100:8"], 8), (["--gpus-per-node=a100:1,h100:7"], 8),
    (["--gres=gpu:2"], 2), (["--gres=gpu"], 1), (["--gres=gpu:h100"], 1), (["--gres", "gpu:h100:4"], 4), (["--gres=gpu:08"], 8),
    (["--gres=gpu:2,craynetwork:1"], 2), (["--gres=craynetwork:4,gpu:h100:2"], 2), (["--gres=craynetwork:1"], 0),
    (["--gres=gpu:a100:2,gpu:h100:3"], 5), (["--gres=gres:gpu:2"], 2), (["--gres=gpumem:80"], 0), (["--gres=none"], 0),
    (["--gres=gpu:2", "--gpus-per-node=4"], 4), (["--gres=gpu:h100:8(S:0-1)"], 8), (["--gres=gpu:l4:2(S:0,2),gpu:t4:1(S:1)"], 3),
    (["--gres=gres/gpu=4"], 4), (["--gres", "gres/gpu:h100=8"], 8), (["--gpus-per-node=h100:8(S:0-1)"], 8),
    (["--comment", "--gpus-per-node=8"], 0), (["--exclusive", "--gres=gpu:2"], 2), (["-Qv", "--gres=gpu:2"], 2),
], ids=str)  # fmt: skip
def test_gpus_of_a_node(asked, flags, gpus):
    assert f" config.yaml --nodes 1 --gpus-per-node {gpus} --cpus-per-node 1 " in asked(*flags)


@pytest.mark.parametrize("flags, gpu", [
    (["--gpus-per-node=8"], ""), (["--gres=gpu:8"], ""), (["--gres=gpu:08,shard:l4:1"], ""), (["--gres=gpu:tesla:1"], ""),
    (["--gpus-per-node", "h100:8"], "h100"), (["--gpus-per-node=a100:1,h100:7"], "a100"),
    (["--gres=craynetwork:4,gpu:h200:2"], "h200"), (["--gres=gres/gpu:l40s"], "l40s"),
    (["--gres=gpu:l4:2", "--gpus-per-node=4"], ""), (["--gres=gpu:nvidia_a100-sxm4-40gb:4"], "a100_40"),
    (["--gpus-per-node=a100_40:4"], "a100_40"), (["--gres=gpu:h100:8(S:0-1)"], "h100"), (["--gres=gres/gpu:h200=8"], "h200"),
    (["--gres=gpu:a100-80:4"], "a100"),
], ids=str)  # fmt: skip
def test_the_gpu_by_its_name_in_slurm(asked, flags, gpu):
    found = asked(*flags)
    assert f" --gpu {gpu} recipe.py" in found if gpu else "--gpu " not in found


def test_gpus_by_the_environment(asked):
    assert "--gpus-per-node 3" in asked(SBATCH_GRES="shard:1,gpu:3")
    assert "--gpus-per-node 4" in asked("--gres=gpu:2", SBATCH_GPUS_PER_NODE="h100:4")


@pytest.mark.parametrize("flags, nodes", [
    (["--nodes=4"], 4), (["--nodes", "4"], 4), (["-N4"], 4), (["-N", "4"], 4), (["-N=4"], 4), (["-HN4"], 4),
    (["--comment", "-N8 x"], 1), (["--comment", "-N8", "-N2"], 2), (["-J", "-N8"], 1), (["-J-N8"], 1),
    (["--nodes=2", "-N3"], 3), (["--wait", "-N3"], 3), (["-oN8"], 1), (["--oom-kill-step", "-N3"], 3), (["-N", "2-2"], 2),
], ids=str)  # fmt: skip
def test_nodes(asked, flags, nodes):
    """A word is read as sbatch reads it: the value of one flag is not another flag."""
    assert f" config.yaml --nodes {nodes} --gpus-per-node 0 " in asked(*flags)


def test_what_is_no_number(asked):
    assert "--gpus-per-node eight" in asked("--gpus-per-node=eight")
    assert "--gpus-per-node gpu:h100:eight" in asked("--gres=gpu:h100:eight")
    assert "--nodes 2-4" in asked("--nodes=2-4")
    assert "--nodes ," in asked("--nodes=")


@pytest.mark.parametrize("flags, env, said", [
    (["--array=1-3"], {}, "--array 1-3: all tasks would share one output directory"),
    (["-a", "0-7%2"], {}, "--array 0-7%2: "),
    ([], {"SBATCH_ARRAY_INX": "1"}, "--array 1: "),
    (["-G8"], {}, "--gpus 8 leaves open how many each node has; give --gpus-per-node"),
    (["--gpus-per-task", "4"], {}, "--gpus-per-task 4 leaves open"),
    (["--tres-per-task=cpu:2,gres/gpu:4"], {}, "--tres-per-task cpu:2,gres/gpu:4 leaves open"),
    ([], {"SBATCH_GPUS": "8"}, "--gpus 8 leaves open"),
    (["--gpus-per-n=8"], {}, "--gpus-per-n: write it out, --gpus-per-node"),
    (["--nodes"], {}, "--nodes needs a value"),
    (["--exclusive", "user"], {}, "put -- before user"),
    (["--chdir=/tmp"], {}, "--chdir /tmp: the job would not begin in "),
    (["-D", "slurm"], {}, "--chdir slurm: the job would not begin in "),
    (["recipes/chess.py"], {}, "put -- before recipes/chess.py"),
], ids=str)  # fmt: skip
def test_requests_that_are_refused(asked, flags, env, said):
    assert said in asked(*flags, **env)


def test_tasks_of_cpus_and_this_folder_are_fine(asked):
    assert "--nodes 1 " in asked("--tres-per-task=cpu:2", "--gres-flags=enforce-binding", "--chdir=slurm/..")


@pytest.mark.parametrize(
    "flags, env",
    [(["--signal=USR2@60"], {}), (["--signal", "USR1@60"], {}), ([], {"SBATCH_SIGNAL": "B:KILL@9"})],
    ids=str,
)
def test_another_signal_is_refused(asked, flags, env):
    """It would take the place of the one at which the job saves; ours is named."""
    said = asked(*flags, **env)
    given = flags[-1].removeprefix("--signal=") if flags else "B:KILL@9"
    assert f"--signal {given} " in said and "--signal=B:USR1@300" in said and "nothing was queued" in said


@pytest.mark.parametrize("flags, env", [(["--signal=B:USR1@900"], {}), ([], {"SBATCH_SIGNAL": "B:USR1@900"})], ids=str)
def test_the_same_signal_may_come_earlier(asked, flags, env):
    queued = asked(*flags, **env).splitlines()[-1]
    assert queued.startswith("sbatch ") and "--signal=B:USR1@900" in queued and "@300" not in queued


@pytest.fixture
def job(tmp_path):
    """Run submit.sh as Slurm's copy, with stand-ins for Slurm: srun takes from the job what it takes over without --export."""
    script = tmp_path / "spool/slurm_script"
    for folder in (script.parent, tmp_path / "slurm", tmp_path / "bin"):
        folder.mkdir()
        shutil.copy(ROOT / "slurm/submit.sh", folder)
    script.parent.joinpath("submit.sh").rename(script)
    (tmp_path / "slurm/site.sh").write_text("export PATH=$PWD/bin:$PATH\n")
    stand_ins = {
        "python": f"[[ $3 != preflight ]] || echo 'LAUNCH_FLAGS=() COMMAND=(r.py); OUTPUT_DIR={tmp_path}/out'",
        "scontrol": "echo NodeAddr=127.0.0.1",
        "squeue": "echo RUNNING 0",
        "srun": 'for word; do [[ $word != --export=* ]] || SLURM_EXPORT_ENV=${word#*=}; done\n'
        '[[ ${SLURM_EXPORT_ENV-ALL} == *ALL* ]] || PATH=/usr/bin:/bin\nwhile [[ $1 != bash ]]; do shift; done; "$@"',
        "accelerate": "echo launched in $PWD: $*",
    }  # fmt: skip
    write_programs(tmp_path / "bin", stand_ins)

    def run(**env: str) -> subprocess.CompletedProcess:
        slurm = {"SLURM_JOB_ID": "8", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "1"}
        env = os.environ | slurm | {"SLURM_JOB_NODELIST": "n1"} | env
        return subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


def test_an_array_given_to_sbatch_itself_is_refused_in_the_job(job):
    """There submit.sh is told by Slurm that it is a task of an array."""
    done = job(SLURM_ARRAY_JOB_ID="7")
    assert done.returncode == 1 and "--array: all tasks would share one output directory" in done.stderr


@pytest.mark.parametrize("export", ["NONE", "NIL", "HF_HOME,WANDB_MODE", "ALL,WANDB_MODE=offline"])
def test_the_processes_get_what_the_site_file_sets(job, export):
    """The list of --export is for the job: its script sets up the environment of the processes."""
    done = job(SLURM_EXPORT_ENV=export)
    assert "launched in " in done.stdout and "srun ended with 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("flags", [["--help"], ["-h", "--nodes=2"]], ids=str)
def test_help_checks_and_queues_nothing(tmp_path, flags):
    script = ["bash", str(ROOT / "slurm/submit.sh"), *flags]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.startswith("Trains on a Slurm cluster") and last.endswith("slurm/README.md has more.")
    assert "  slurm/submit.sh [SBATCH FLAGS] -- [CONFIG [LAUNCH FLAGS] RECIPE [ARGS]] " in done.stdout
