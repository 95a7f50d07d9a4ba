"""Tests of .venv, as slurm/create_env.sh and make set it up, in a copy of the repository that needs one tiny package."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT


@pytest.fixture
def copy(tmp_path) -> Path:
    for name in ("Makefile", "pyproject.toml", "slurm/create_env.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements.txt").write_text("tiny==1.0\n")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            wheel.writestr(f"tiny-1.0.dist-info/{name}", text)
    return tmp_path


def bash(folder: Path, command: str) -> subprocess.CompletedProcess:
    """Run bash with every package index out of reach."""
    env = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    env.pop("VIRTUAL_ENV", None)
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_from_wheels_and_twice(copy):
    done = bash(copy, "slurm/create_env.sh wheels && .venv/bin/python -c 'import tiny'")
    assert done.returncode == 0 and f"{copy}/.venv is ready" in done.stdout, done.stderr
    before = (copy / ".venv/recipes").stat().st_mtime_ns
    # The second time there is nothing to do, even without the wheels. If sourced, it activates, and sets no shell options.
    shutil.rmtree(copy / "wheels")
    done = bash(copy, ". slurm/create_env.sh; false; set +o | grep -c 'set -o \\(errexit\\|nounset\\)'; which python")
    count, python = done.stdout.splitlines()[-2:]
    assert (count, python) == ("0", f"{copy}/.venv/bin/python"), done.stdout + done.stderr
    assert (copy / ".venv/recipes").stat().st_mtime_ns == before


def test_what_fails_leaves_the_shell_alive(copy):
    """A failure leaves the shell alive, and no stamp file, so that the next call tries again."""
    (copy / "wheels/tiny-1.0-py3-none-any.whl").unlink()
    done = bash(copy, ". slurm/create_env.sh wheels; echo alive $?")
    assert "alive 0" not in done.stdout and "alive" in done.stdout and "tiny" in done.stderr, done.stderr
    assert not (copy / ".venv/recipes").exists()
    done = bash(copy, "slurm/create_env.sh nowhere")
    assert done.returncode == 1 and "nowhere is no folder" in done.stderr


@pytest.mark.parametrize("variables, fails, calls, said", [
    ("HAS_GPU=", 0, ["pip install --quiet uv==1.0", "uv pip install --python .venv/bin/python --torch-backend cpu torch==2.0"], ""),
    ("HAS_GPU=", 1, ["pip install --quiet uv==1.0", "uv pip install --python .venv/bin/python --torch-backend cpu torch==2.0"],
     "cannot be reached: taking what pip finds"),
    ("HAS_GPU=/usr/bin/nvidia-smi", 0, [], ""),
    ("HAS_GPU= PIP_NO_INDEX=1", 0, [], ""),
], ids=["cpu", "unreachable", "gpu", "from wheels"])  # fmt: skip
def test_torch_for_cpus_where_there_is_no_gpu(copy, variables, fails, calls, said):
    """pip and uv are replaced by scripts that write down how they are called."""
    (copy / "requirements.txt").write_text("torch==2.0\n")
    (copy / "requirements-dev.txt").write_text("uv==1.0\n")
    (copy / ".venv/bin").mkdir(parents=True)
    for name, code in (("pip", 0), ("uv", fails)):
        script = copy / f".venv/bin/{name}"
        script.write_text(f"#!/bin/bash\necho {name} $@ >>{copy}/calls\nexit {code}\n")
        script.chmod(0o755)
    done = bash(copy, f"make --silent {variables} .venv/recipes")
    assert done.returncode == 0, done.stderr
    assert (copy / "calls").read_text().splitlines() == [*calls, "pip install --quiet -r requirements.txt"]
    assert said in done.stdout and (bool(said) or "reached" not in done.stdout)
