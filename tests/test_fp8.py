"""Linear layers in fp8: near bf16, the same under all strategies, and the checkpoints of bf16."""

import re

import pytest
import torch
import yaml
from helpers import CHILDREN, CONFIGS, ROOT, launch_ok, losses
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from tiny import tiny_config

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch import checks
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize
from recipe_tools.preflight import preflight

SCRIPT = CHILDREN / "toy.py"
FP8 = ("--mixed_precision", "fp8")
EAGER = ("--dynamo_backend", "no")
SIZES = {"intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_layers():
    """Not the output layer, nor what a GPU does not multiply, nor adapters."""
    model = new_model(tiny_config(**SIZES), "sdpa")
    wanted = {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    assert checks.fp8_layers(model) == wanted
    model = initialize(model, 0, "cpu")
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["q_proj"]), model)
    adapted = "model.layers.0.self_attn.q_proj"
    assert checks.fp8_layers(model) == wanted - {adapted} | {f"{adapted}.base_layer"}
    with pytest.raises(ConfigError, match="MixtralForCausalLM keeps the experts"):
        checks.fp8_layers(new_model(tiny_config("mixtral", **SIZES), "sdpa"))


def test_what_it_needs(monkeypatch):
    env = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}
    assert checks.fp8_problems(env) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    (problem,) = checks.fp8_problems(env)
    assert "this one has 8.0; set `mixed_precision: bf16`" in problem
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    (problem,) = checks.fp8_problems(env)
    assert "pip install torchao==0.18.0" in problem
    (problem,) = checks.lever_problems(TrainArgs(use_peft=True, load_in_4bit=True), env, num_devices=1)
    assert re.match("--load_in_4bit .* mixed_precision: fp8", problem)


@pytest.fixture(scope="module")
def runs(forks, tmp_path_factory):
    """Output directories of runs: in bf16; in fp8 with fp32 weights, all in bf16, and with rows that ranks share."""
    found = {}
    content = {name: yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("fsdp_fp8", "fsdp_long")}
    content["fsdp_fp8"]["parallelism_config"] = content["fsdp_long"]["parallelism_config"]
    shared = tmp_path_factory.mktemp("config") / "shared"
    shared.with_suffix(".yaml").write_text(yaml.safe_dump(content["fsdp_fp8"]))
    for name, config, num_processes, flags, args in (
        ("bf16", "fsdp_full", 2, ("--mixed_precision", "bf16"), ()),
        ("fp8", "fsdp_fp8", 2, (*FP8, *EAGER), ()),
        ("fp8, kahan", "fsdp_fp8", 1, (*FP8, *EAGER), ("--optim", "adamw_bf16_kahan")),
        ("fp8, shared rows", shared, 2, (*FP8, *EAGER), ("--per_device_train_batch_size", 4)),
    ):
        out = found[name] = tmp_path_factory.mktemp("fp8") / "out"
        forks.succeed(out, "--save_total_limit", 9, *args, config=config, num_processes=num_processes, flags=flags)
    return found


@pytest.mark.slow
def test_trajectory(runs):
    """An element has 4 bits, a gradient 3, where bf16 has 8: losses differ by less than 2 %, not by nothing."""
    assert "precision fp8 in 21 linear layers" in runs["fp8"].with_suffix(".log").read_text()
    wanted = losses(runs["bf16"])
    for name in ("fp8", "fp8, kahan", "fp8, shared rows"):
        found = losses(runs[name])
        assert list(found) == list(wanted) and list(found.values()) == pytest.approx(list(wanted.values()), rel=0.02)
        assert list(found.values()) != pytest.approx(list(wanted.values()), rel=1e-5)


@pytest.mark.slow
def test_checkpoints_are_those_of_bf16(runs, forks, tmp_path):
    """Each goes on from the other's, and exports are of the same names, shapes and precision."""
    exports = [load_file(runs[name] / "export/model.safetensors") for name in ("bf16", "fp8")]
    described = [{name: (tensor.shape, tensor.dtype) for name, tensor in export.items()} for export in exports]
    assert described[0] == described[1]
    wanted = losses(runs["bf16"])
    bf16 = ("--mixed_precision", "bf16")
    for name, config, flags in (("fp8", "fsdp_full", bf16), ("bf16", "fsdp_fp8", (*FP8, *EAGER))):
        checkpoint = runs[name] / "checkpoint-3"
        out = tmp_path / config
        forks.succeed(out, "--resume_from_checkpoint", checkpoint, config=config, flags=flags)
        found = losses(out)
        assert found == pytest.approx(wanted, rel=0.02)
        later = [losses(runs[name])[step] for step in found if step > 4]
        assert [found[step] for step in found if step > 4] != pytest.approx(later, rel=1e-6), "the precision changes"


@pytest.mark.slow
def test_launched_and_compiled_by_layer(runs, tmp_path):
    """Launch the YAML as it is, but with the backend `eager`."""
    flags = (*FP8, "--dynamo_backend", "eager")
    launch_ok(tmp_path, "fsdp_fp8", SCRIPT, "--output_dir", tmp_path / "out", "--max_steps", 2, flags=flags)
    first = {step: loss for step, loss in losses(runs["fp8"]).items() if step <= 2}
    assert losses(tmp_path / "out") == pytest.approx(first, rel=1e-3)


def test_preflight_refuses_experts(at_the_root):
    """A mixture is refused before the job is queued."""
    config, recipe = CONFIGS / "fsdp_fp8.yaml", ROOT / "recipes/c4.py"
    preset = ("--config", str(ROOT / "recipes/configs/c4/laptop.yaml"))
    assert "Ready" in preflight([str(config), str(recipe), *preset])[0]
    with pytest.raises(ConfigError, match="MixtralForCausalLM keeps the experts"):
        mixture = ("--model_type", "mixtral", "--config_overrides", "num_key_value_heads=4")
        preflight([str(config), str(recipe), *preset, *mixture])
