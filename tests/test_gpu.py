"""Tests that a GPU has the same arithmetic as a CPU, in one process; nothing that needs several GPUs is tested.

    python -m pytest tests/test_gpu.py

On a machine without a network that has torch, transformers, accelerate, peft, pyarrow, xxhash, pytest and pytest-timeout,
it needs the wheels of datasets, dill and multiprocess besides, but neither trl, chess nor bitsandbytes:

    pip download --no-deps -d wheels datasets==5.2.0 "dill<0.4.2" "multiprocess<0.70.20"    # where there is a network
    pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site:src python -m pytest tests/test_gpu.py

The first list of `benchmarks/gpu.py` needs none of these.
"""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import toy
from arithmetic import CONFIGS, compare_in_bf16, loss_and_gradients, make, packed
from helpers import CHILDREN, ROOT, launch_ok, read_metrics
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import accelerate_recipes.models.document_attention  # noqa: F401  # registers it
from accelerate_recipes.engine import to_device
from accelerate_recipes.models.attention import sdpa
from accelerate_recipes.optim import add_compensated_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


BF16 = ("--mixed_precision", "bf16")
BY_LAYER = ("--dynamo_backend", "inductor", "--dynamo_use_regional_compilation")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Saved model from which both begin, because a GPU draws other weights for a new model than a CPU."""
    return toy.make_base(tmp_path_factory.mktemp("base") / "base", seed=1)


def steps(tmp_path, base: Path, config: str, *flags: str, gpu: bool) -> dict:
    out = tmp_path / f"{config}-{gpu}"
    arguments = ("--output_dir", out, "--per_device_train_batch_size", 4, "--model_name_or_path", base)
    flags = ("--num_processes", "1", *flags)
    launch_ok(tmp_path, config, CHILDREN / "steps.py", *arguments, flags=flags, gpu=gpu)
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("config", ["single", "fsdp_full", "fsdp_offload", "fsdp1_full"])
def test_one_trajectory(tmp_path, base, config):
    """The trajectory in fp32 is the same, sharded or not, offloaded and clipped; a resume is bit-exact."""
    wanted, found = steps(tmp_path, base, "single", gpu=False), steps(tmp_path, base, config, gpu=True)
    assert found["start"] == wanted["start"]
    for step, reference in zip(found["trajectory"], wanted["trajectory"], strict=True):
        assert step == pytest.approx(reference, rel=1e-4)
    assert found["resumed"] == found["trajectory"][2:]


@pytest.mark.parametrize("config", ["single", "fsdp_full"])
def test_4_bits(tmp_path, base, config):
    """QLoRA under the launcher learns, and a weight has half a byte."""
    pytest.importorskip("bitsandbytes")
    args = (
        "--model_name_or_path", base, "--use_peft", "--lora_r", 3, "--load_in_4bit", "--output_dir", tmp_path / "out",
    )  # fmt: skip
    flags = ("--num_processes", "1", "--mixed_precision", "bf16")
    launch_ok(tmp_path, config, CHILDREN / "toy.py", *args, flags=flags, gpu=True)
    before, after = (r["eval_loss"] for r in read_metrics(tmp_path / "out") if "eval_loss" in r)
    assert after < before - 0.1
    packed = load_file(tmp_path / "out/frozen.safetensors")["model.layers.0.mlp.up_proj.base_layer.weight"]
    assert packed.numel() * packed.element_size() == 32 * 64 // 2


@pytest.mark.parametrize("config, flags", [
    ("fsdp_full", BF16),
    ("fsdp_full", (*BF16, *BY_LAYER)),
    ("fsdp_full", (*BF16, *BY_LAYER, "--fsdp_activation_checkpointing", "true")),
    ("single", (*BF16, *BY_LAYER)),
    ("fsdp_fp8", ("--mixed_precision", "fp8")),
    ("single_fp8", ("--mixed_precision", "fp8")),
])  # fmt: skip
def test_less_than_fp32(tmp_path, base, config, flags):
    """bf16 and fp8, also compiled by layer: near fp32 on a CPU."""
    if "fp8" in flags:
        pytest.importorskip("torchao")
    wanted = steps(tmp_path, base, "single", gpu=False)
    found = steps(tmp_path, base, config, *flags, gpu=True)
    for (loss, _), (reference, _) in zip(found["trajectory"], wanted["trajectory"], strict=True):
        assert loss == pytest.approx(reference, rel=2e-2 if "fp8" in flags else 1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_by_documents(name):
    """In bf16 the kernel for GPUs is at most 1.5 times as far from fp32 with a mask as sdpa is; gradients are finite."""
    config = copy.deepcopy(CONFIGS[name])
    if config.model_type == "gpt2":
        config.n_embd = 64  # heads of 16
    wanted = loss_and_gradients(make(config, "sdpa"), packed())

    def error(attention: str) -> float:
        model = make(config, attention).to("cuda", torch.bfloat16)
        loss, gradients = loss_and_gradients(model, to_device(packed(), torch.device("cuda")))
        assert loss == pytest.approx(wanted[0], rel=1e-2)
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        return sum((gradients[key].cpu().float() - g).norm().item() ** 2 for key, g in wanted[1].items()) ** 0.5

    assert error("documents") < 1.5 * error("sdpa")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
def test_upstream_still_gives_nan_where_attention_has_a_mask():
    """When the last line fails, cuDNN is correct with a mask; keep_cudnn_from_masks is then for generation only."""
    length, width = 192, 64
    torch.manual_seed(0)
    query, key, value, output = torch.randn(4, 1, 1, length, width, device="cuda", dtype=torch.bfloat16).unbind()
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = 1, -120 * math.sqrt(width)  # each logit is about -120
    query.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]

    def gradient(attended: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(attended, query, output)[0]

    torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run
    ours = gradient(sdpa(torch.nn.Identity(), query, key, value, mask)[0].transpose(1, 2))
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert ours.isfinite().all()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert gradient(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)).isnan().any()


def test_memory_is_in_segments_that_grow():
    """Set before torch reads it."""
    code = "import torch; torch.empty(1, device='cuda'); print(torch.cuda.memory._snapshot()['allocator_settings'])"
    settings = "from accelerate_recipes.distributed import keep_memory_in_one_piece as k; k(); " + code
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", settings], env=variables, capture_output=True, text=True, check=True)
    assert "'expandable_segments': True" in done.stdout


@pytest.mark.parametrize("config", ["single", "fsdp_full"])
@pytest.mark.parametrize("attention, waits", [("documents", 1), ("sdpa", 3)])
def test_waits_in_a_step(tmp_path, out, config, attention, waits):
    """The CPU waits for the GPU once a step, before the weights change; for a mask transformers waits in each micro-batch."""
    flags = ("--num_processes", "1", *BF16)
    args = ("--output_dir", out, "--attn_implementation", attention)
    launch_ok(tmp_path, config, CHILDREN / "waits.py", *args, flags=flags, gpu=True)
    assert json.loads((out / "result.json").read_text())["waits"] == waits


def test_peak_is_the_simulated_one(tmp_path):
    """What `plan` says of tensors in use, of a model of a hundred million weights; the context of CUDA is not counted."""
    pytest.importorskip("chess")
    sizes = ("hidden_size=1024", "intermediate_size=4096", "num_attention_heads=8", "num_hidden_layers=6")
    recipe = (
        ROOT / "recipes/chess.py", "--config", ROOT / "recipes/configs/chess/laptop.yaml", "--config_overrides", *sizes,
        "--output_dir", tmp_path / "out", "--max_steps", 2, "--logging_steps", 2, "--num_positions", 60,
        "--per_device_eval_batch_size", 8,
    )  # fmt: skip
    flags = ("--num_processes", "1", *BF16)
    launch_ok(tmp_path, "fsdp_full", *recipe, flags=flags, gpu=True)
    found = next(r["peak_memory_gib"] for r in read_metrics(tmp_path / "out") if "loss" in r)
    command = [
        "plan", ROOT / "accelerate_configs/fsdp_full.yaml", *flags, "--no_search", "--json", tmp_path / "plan.json",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "accelerate_recipes", *map(str, (*command, *recipe))], cwd=ROOT, check=True)
    planned = json.loads((tmp_path / "plan.json").read_text())["memory"]["in_use"] / 2**30
    assert found == pytest.approx(planned, rel=0.03)


def test_the_optimizers_kernel_computes_the_bits_of_operators(monkeypatch):
    """A GPU rounds by one kernel as it does by the operators that take its place without a C compiler."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight, pending = (torch.randn(100_003, device="cuda", generator=generator).bfloat16() for _ in range(2))
    pending *= 2.0 ** -torch.randint(14, pending.shape, device="cuda", generator=generator)
    ways = []
    for has_compiler in (True, False):
        if not has_compiler:
            monkeypatch.delenv("CC", raising=False)
            monkeypatch.setattr("shutil.which", lambda name: None)
        ways.append((weight.clone(), pending.clone()))
        add_compensated_([ways[-1][0]], [ways[-1][1]], 2**-12)
    assert all(map(torch.equal, *ways)) and ways[0][1].count_nonzero() > 50_000


def test_the_loss_without_logits_in_bf16():
    compare_in_bf16(torch.device("cuda"))
