"""On a GPU, the same arithmetic as on a CPU. One process: what needs several GPUs is not tested."""

import json

import pytest
import torch
from helpers import CHILDREN, launch_ok, read_metrics
from safetensors.torch import load_file
from test_adapters import make_base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def steps(tmp_path, config: str, *flags: str, gpu: bool) -> dict:
    out = tmp_path / f"{config}-{gpu}"
    arguments = ("--output_dir", out, "--per_device_train_batch_size", 4)
    flags = ("--num_processes", "1", *flags)
    launch_ok(tmp_path, config, CHILDREN / "steps.py", *arguments, flags=flags, gpu=gpu)
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("config", ["single", "fsdp_full", "fsdp_offload", "fsdp1_full"])
def test_one_trajectory(tmp_path, config):
    """fp32, sharded or not, offloaded and clipped; and bit-exact resume."""
    wanted, found = steps(tmp_path, "single", gpu=False), steps(tmp_path, config, gpu=True)
    for step, reference in zip(found["trajectory"], wanted["trajectory"], strict=True):
        assert step == pytest.approx(reference, rel=1e-4)
    assert found["resumed"] == found["trajectory"][2:]


@pytest.mark.parametrize("config", ["single", "fsdp_full"])
def test_4_bits(tmp_path, config):
    """QLoRA through the launcher: it learns, and a weight has half a byte."""
    pytest.importorskip("bitsandbytes")
    base = make_base(tmp_path / "base", seed=1)
    args = (
        "--model_name_or_path",
        base,
        "--use_peft",
        "--lora_r",
        3,
        "--load_in_4bit",
        "--output_dir",
        tmp_path / "out",
    )
    flags = ("--num_processes", "1", "--mixed_precision", "bf16")
    launch_ok(tmp_path, config, CHILDREN / "toy.py", *args, flags=flags, gpu=True)
    before, after = (r["eval_loss"] for r in read_metrics(tmp_path / "out") if "eval_loss" in r)
    assert after < before - 0.1
    packed = load_file(tmp_path / "out/frozen.safetensors")["model.layers.0.mlp.up_proj.base_layer.weight"]
    assert packed.numel() * packed.element_size() == 32 * 64 // 2


@pytest.mark.parametrize("flags", [(), ("--dynamo_backend", "inductor")])
def test_bf16(tmp_path, flags):
    wanted = steps(tmp_path, "single", gpu=False)
    found = steps(tmp_path, "fsdp_full", "--mixed_precision", "bf16", *flags, gpu=True)
    for (loss, _), (reference, _) in zip(found["trajectory"], wanted["trajectory"], strict=True):
        assert loss == pytest.approx(reference, rel=1e-2)
