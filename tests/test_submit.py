"""Tests of what slurm/submit.sh passes to preflight, for different sbatch flags. test_slurm.py uses a real Slurm."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the flags that preflight gets; preflight and sbatch are stand-ins."""
    folder = tmp_path_factory.mktemp("login")
    (folder / "slurm").mkdir()
    shutil.copy(ROOT / "slurm/submit.sh", folder / "slurm")
    (folder / "slurm/site.sh").touch()
    python = f"""[[ $2 != *.gpus ]] || PYTHONPATH={ROOT / "src"} exec {sys.executable} "$@"
echo "$@" >"$ASKED"; echo "COMMAND=(recipes/chess.py)\""""
    for name, said in (("python", python), ("sbatch", "true")):
        (folder / name).write_text(f"#!/bin/bash\n{said}\n")
        (folder / name).chmod(0o755)

    def submit(*flags: str, **env: str) -> str:
        paths = {"PATH": f"{folder}:{os.environ['PATH']}", "ASKED": str(folder / "asked")}
        command = ["bash", "slurm/submit.sh", *flags, "--", "config.yaml", "recipe.py"]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | paths | env, capture_output=True, text=True, timeout=60
        )
        return (folder / "asked").read_text() if done.returncode == 0 else done.stderr

    return submit


@pytest.mark.parametrize(
    "flags, gpus",
    [
        ([], 0), (["--gpus-per-node=8"], 8), (["--gpus-per-node", "h100:8"], 8), (["--gpus-per-node=a100:1,h100:7"], 8),
        (["--gres=gpu:2"], 2), (["--gres=gpu"], 1), (["--gres=gpu:h100"], 1), (["--gres", "gpu:h100:4"], 4), (["--gres=gpu:08"], 8),
        (["--gres=gpu:2,craynetwork:1"], 2), (["--gres=craynetwork:4,gpu:h100:2"], 2), (["--gres=craynetwork:1"], 0),
        (["--gres=gpu:a100:2,gpu:h100:3"], 5), (["--gres=gres:gpu:2"], 2), (["--gres=gpumem:80"], 0), (["--gres=none"], 0),
        (["--gres=gpu:2", "--gpus-per-node=4"], 4),
    ],
    ids=str,
)  # fmt: skip
def test_gpus_of_a_node(asked, flags, gpus):
    assert f" config.yaml --nodes 1 --gpus-per-node {gpus} --cpus-per-node 1 " in asked(*flags)


@pytest.mark.parametrize(
    "flags, gpu",
    [
        (["--gpus-per-node=8"], ""), (["--gres=gpu:8"], ""), (["--gres=gpu:08,shard:l4:1"], ""), (["--gres=gpu:tesla:1"], ""),
        (["--gpus-per-node", "h100:8"], "h100"), (["--gpus-per-node=a100:1,h100:7"], "a100"),
        (["--gres=craynetwork:4,gpu:h200:2"], "h200"), (["--gres=gres/gpu:l40s"], "l40s"),
        (["--gres=gpu:l4:2", "--gpus-per-node=4"], ""), (["--gres=gpu:nvidia_a100-sxm4-40gb:4"], "a100_40"),
        (["--gpus-per-node=a100_40:4"], "a100_40"), (["--gres=gpu:a100-80:4"], "a100"),
    ],
    ids=str,
)  # fmt: skip
def test_the_gpu_by_its_name_in_slurm(asked, flags, gpu):
    found = asked(*flags)
    assert f" --gpu {gpu} recipe.py" in found if gpu else "--gpu " not in found


def test_gpus_by_the_environment(asked):
    assert "--gpus-per-node 3" in asked(SBATCH_GRES="shard:1,gpu:3")
    assert "--gpus-per-node 4" in asked("--gres=gpu:2", SBATCH_GPUS_PER_NODE="h100:4")


def test_what_is_no_number(asked):
    assert "--gpus-per-node eight" in asked("--gpus-per-node=eight")
    assert "--nodes 2-4" in asked("--nodes=2-4")


@pytest.mark.parametrize("flags", [["--help"], ["-h", "--nodes=2"]], ids=str)
def test_help_checks_and_queues_nothing(tmp_path, flags):
    script = ["bash", str(ROOT / "slurm/submit.sh"), *flags]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.startswith("Trains on a Slurm cluster") and last.endswith("slurm/README.md has more.")
    assert "  slurm/submit.sh [SBATCH FLAGS] -- [CONFIG [LAUNCH FLAGS] RECIPE [ARGS]] " in done.stdout
