"""Launching what a user launches, and reading the result from a file."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
CHILDREN = ROOT / "tests" / "children"


def launch_command(config: str, script: Path, *args: object, flags: tuple[str, ...] = ()) -> list[str]:
    """`accelerate launch` with a shipped config, in fp32 and on a free port; `flags` go before the script."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
    ]
    command += ["--mixed_precision", "no", "--main_process_port", "0", *flags]
    return command + [str(part) for part in (script, *args)]


def environment(tmp_path: Path) -> dict[str, str]:
    """CPU, one thread a process, no network; what the libraries cache goes to the test's folder."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "HF_", "PARALLELISM_"))
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONFAULTHANDLER": "1"}
    return inherited | offline | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def launch(
    tmp_path: Path,
    config: str,
    script: Path,
    *args: object,
    flags: tuple[str, ...] = (),
    timeout: int = 400,
    gpu: bool = False,
) -> subprocess.CompletedProcess:
    """Run to the end; the caller looks at `returncode`, `stdout` and `stderr`."""
    variables = environment(tmp_path)
    if gpu:
        del variables["CUDA_VISIBLE_DEVICES"]
    return subprocess.run(
        launch_command(config, script, *args, flags=flags),
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def launch_ok(tmp_path: Path, config: str, script: Path, *args: object, **options) -> subprocess.CompletedProcess:
    done = launch(tmp_path, config, script, *args, **options)
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[:6000]}"
    return done


def read_metrics(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(output_dir) if "loss" in record}
