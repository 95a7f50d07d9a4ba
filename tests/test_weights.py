"""Tests of first weights by the model's own rule. tests/test_equivalence.py shows that every strategy has the same."""

import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment
from models_table import ARCHITECTURES, ENCODER_DECODERS, EncoderDecoder, Model
from tiny import tiny_config
from transformers import PreTrainedConfig, Qwen3NextConfig

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize

SIZES = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.05,
}  # fmt: skip
# Beside those of the table, one whose rules compute values from a module's numbers, and layers of several kinds.
CONFIGS: dict[str, PreTrainedConfig] = ARCHITECTURES | {
    "llama, tied": tiny_config(**SIZES, tie_word_embeddings=True),
    "Qwen3-Next": Qwen3NextConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_as_transformers_does(name):
    """Each parameter has transformers' distribution; buffers and tied parameters are the same."""
    torch.manual_seed(1)
    state, config, is_pair = torch.random.get_rng_state(), CONFIGS[name], name in ENCODER_DECODERS
    auto = (EncoderDecoder if is_pair else Model).auto_class
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32)
    initialize(model, 0, "cpu")
    assert torch.equal(state, torch.random.get_rng_state())
    reference = auto.from_config(config, dtype=torch.float32)
    for (key, found), (wanted_key, wanted) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert key == wanted_key and found.dtype == torch.float32
        # Allow seven standard errors of the difference of two means, and of two standard deviations, over n values.
        error = 7 * wanted.std(correction=0).item() * (2 / wanted.numel()) ** 0.5
        assert found.mean().item() == pytest.approx(wanted.mean().item(), abs=error + 1e-7), key
        assert found.std(correction=0).item() == pytest.approx(wanted.std(correction=0).item(), abs=error + 1e-7), key
    buffers = dict(reference.named_buffers())
    assert set(dict(model.named_buffers())) == set(buffers)
    for key, found in model.named_buffers():
        assert torch.equal(found, buffers[key]), key
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == (reference.get_output_embeddings().weight is reference.get_input_embeddings().weight)


def test_a_value_depends_on_seed_and_name_only():
    """A value does not depend on the rest of the model: a deeper model begins with the same layers."""
    deeper = tiny_config(**SIZES | {"num_hidden_layers": 3})
    one, other, another_seed = (
        dict(initialize(new_model(config, "sdpa"), seed, "cpu").named_parameters())
        for config, seed in ((tiny_config(**SIZES), 0), (deeper, 0), (deeper, 1))
    )
    assert len(other) > len(one)
    for key, value in one.items():
        assert torch.equal(value, other[key])
        assert key.endswith("norm.weight") or not torch.equal(value, another_seed[key])
    matrices = [value for key, value in one.items() if value.shape == (192, 128)]
    assert not any(torch.equal(a, b) for a in matrices for b in matrices if a is not b)


@pytest.mark.long
def test_no_process_holds_the_model(tmp_path):
    """The benchmark, with Llama 3.2 1B on two processes, fails if one holds more than its shard and a parameter."""
    command = [sys.executable, "benchmarks/init_memory.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_what_the_rule_does_not_know_is_named():
    model = new_model(tiny_config(**SIZES), "sdpa")
    model.model.layers[1].mlp.register_parameter("gain", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ConfigError, match=r"a new llama cannot be made: .* model\.layers\.1\.mlp\.gain a value"):
        initialize(model, 0, "cpu")
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())  # what stood in is gone
