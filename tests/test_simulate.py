"""Tests of the simulation: it equals real runs by the same ledger, to the byte, and its pretence of GPUs holds."""

import json
from dataclasses import asdict

import pytest
from helpers import CHILDREN, CONFIGS, ROOT, launch_ok, log_of
from transformers import LlamaConfig

from accelerate_recipes.launch.preflight import launch_environment
from accelerate_recipes.plan.simulate import Job, Simulator

SCRIPT = CHILDREN / "ledger_of_run.py"
# A Llama of two layers with grouped heads and sizes that do not divide.
SMALL = [
    "--vocab_size", "203", "--hidden_size", "48", "--intermediate_size", "100", "--num_hidden_layers", "2",
    "--num_attention_heads", "4", "--num_key_value_heads", "2", "--max_position_embeddings", "64", "--max_length", "40",
    "--max_steps", "1", "--total_batch_size", "8", "--per_device_train_batch_size", "2", "--attn_implementation", "sdpa",
]  # fmt: skip
C4 = [str(ROOT / "recipes/c4.py"), *SMALL]
EQUAL = ("peak", "at_peak", "flops", "recomputed", "collectives", "shapes")
# Operators that a real run calls otherwise: it reads all flags of a step at once, takes norms by one kernel for all gradients
# where they are plain tensors, and waits for the sum of the norm.
OTHERWISE = {
    "unbind", "wait_tensor", "_wrap_tensor_autograd", "mul_", "linalg_vector_norm", "_foreach_norm", "_foreach_mul_",
}  # fmt: skip
FP32, BF16 = ["--mixed_precision", "no"], ["--mixed_precision", "bf16"]
RECOMPUTE = ["--fsdp_activation_checkpointing", "true"]
HYBRID = ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"]
MIXTRAL = ["--model_type", "mixtral", "--intermediate_size", "96"]
ADAFACTOR = ["--optim", "adafactor"]
KAHAN = ["--optim", "adamw_bf16_kahan"]
LOOKUPS = 16  # bytes that a real hybrid mesh holds to find a rank's place in it


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder with the configuration of a pretrained model: nothing else of it is read."""
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=203, hidden_size=48, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def job(config: str, command: list[str], *flags: str, num_processes: int = 2, **changes) -> Job:
    argv = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(num_processes), *flags]
    return Job(launch_environment([*argv, "--main_process_ip", "head", *command]), command, **changes)


CASES = [
    ("fsdp_full", FP32, 2, [[], ["LORA"]]),
    pytest.param("fsdp_full", FP32, 2, [KAHAN], marks=pytest.mark.slow),
    pytest.param("fsdp_grad_op", [*BF16, *RECOMPUTE], 2, [[]], marks=pytest.mark.slow),
    pytest.param("fsdp_full", BF16, 2, [[], ["--whole_logits", "true"]], marks=pytest.mark.slow),
    pytest.param("fsdp_full", BF16, 2, [MIXTRAL], marks=pytest.mark.slow),
    pytest.param("fsdp_full", [*FP32, *RECOMPUTE], 2, [ADAFACTOR, ["--no_document_mask"]], marks=pytest.mark.slow),
    pytest.param("fsdp_hybrid", [*FP32, *HYBRID], 4, [[]], marks=pytest.mark.slow),
    pytest.param("single", FP32, 1, [[], KAHAN], marks=pytest.mark.slow),
    pytest.param("single", BF16, 1, [[]], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("config, flags, num_processes, variants", CASES)
def test_simulated_equals_real(forks, simulator, base, tmp_path, config, flags, num_processes, variants):
    """Peak with its kinds, FLOPs, collectives, shapes and calls are those that the same ledger sees in a real run."""
    out, lora = tmp_path / "out", ["--model_name_or_path", str(base), "--use_peft", "--lora_r", "4"]
    commands = [[*C4, *(lora if variant == ["LORA"] else variant)] for variant in variants]
    argv = ("--trials", json.dumps(commands))
    if num_processes == 1:  # forks are always ranks
        launch_ok(tmp_path, config, SCRIPT, "--output_dir", out, *argv, flags=flags)
    else:
        assert forks.run(out, *argv, config=config, flags=flags, num_processes=num_processes) == 0, log_of(out)[-3000:]
    jobs = [
        job(config, command, *flags, num_processes=num_processes, device="cpu", micro_batches=8) for command in commands
    ]
    for simulated, real in zip(simulator(jobs), json.loads((out / "ledger.json").read_text()), strict=True):
        simulated = json.loads(json.dumps(asdict(simulated)))
        if config == "fsdp_hybrid":
            real["peak"] -= LOOKUPS
            real["at_peak"]["activations"] -= LOOKUPS
            real["shapes"] = [shape for shape in real["shapes"] if shape not in ([1, 2], [2, 2])]
        else:
            calls = [{k: n for k, n in of["calls"].items() if k not in OTHERWISE} for of in (simulated, real)]
            assert calls[0] == calls[1]
        for name in EQUAL:
            assert simulated[name] == real[name], name
        # Flags of a real step are copied once; fakes are read one by one.
        assert simulated["value_reads"] - real["value_reads"] in (3, 5)
