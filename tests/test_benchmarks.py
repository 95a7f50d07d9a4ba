"""Each benchmark, as small as it goes: that it runs, and reports. Its numbers mean nothing here."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, environment

TINY_LLAMA = "--hidden_size 64 --num_hidden_layers 1"
TINY_HEADS = "--intermediate_size 64 --num_attention_heads 2"
LAUNCH = "-m accelerate.commands.launch --main_process_port 0 --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no"
COMMANDS = {
    "adapter_memory": "--num_hidden_layers 1",
    "against_trl": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
    "checkpoint_stall": f"--rounds 1 --steps 1 {TINY_LLAMA} --vocab_size 500",
    "data_throughput": "--documents 400 --shards 24 --rounds 1 --max_length 128 --vocab_size 500",
    "engine_overhead": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
    "export_memory": f"--rounds 1 {TINY_LLAMA} {TINY_HEADS} --vocab_size 500",
    "loss_memory": f"{TINY_LLAMA} --vocab_size 500 --max_length 64",
    "stream_resume": "--documents 2000 --rounds 1 --max_length 128 --vocab_size 500",
}
LAUNCHED = ("against_trl", "checkpoint_stall", "engine_overhead")
LONG = {"adapter_memory", "against_trl"}
ELSEWHERE = {"ablation", "ablation_trial", "init_memory"}  # test_ablation, test_weights


def test_all_are_here():
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert modules - ELSEWHERE - {"machine", "pages"} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in COMMANDS]
)
def test_runs(name, tmp_path):
    launcher = LAUNCH.split() if name in LAUNCHED else []
    command = [
        sys.executable,
        *launcher,
        f"benchmarks/{name}.py",
        *COMMANDS[name].split(),
        "--out",
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text())
