"""Tests of first weights by the model's own rule. tests/test_equivalence.py shows that every strategy has the same."""

import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from accelerate_recipes.models import new_model
from accelerate_recipes.weights import initialize

SIZES = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.05,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama 3, tied": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_as_transformers_does(name):
    """Each parameter has transformers' distribution; buffers and tied parameters are the same."""
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    model = initialize(new_model(CONFIGS[name], "sdpa"), 0, "cpu")
    assert torch.equal(state, torch.random.get_rng_state())
    reference = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    for (key, found), (wanted_key, wanted) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert key == wanted_key and found.dtype == torch.float32
        # Allow five standard errors of a mean, and of a standard deviation, over n values.
        error = 5 * wanted.std().item() / wanted.numel() ** 0.5
        assert found.mean().item() == pytest.approx(wanted.mean().item(), abs=2 * error)
        assert found.std().item() == pytest.approx(wanted.std().item(), abs=2 * error)
    buffers = dict(reference.named_buffers())
    assert set(dict(model.named_buffers())) == set(buffers) and buffers
    for key, found in model.named_buffers():
        assert torch.equal(found, buffers[key]), key
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == CONFIGS[name].tie_word_embeddings
    assert model.config.architectures == [type(reference).__name__]


def test_a_value_depends_on_seed_and_name_only():
    """A value does not depend on the rest of the model: a deeper model begins with the same layers."""
    deeper = LlamaConfig(**SIZES | {"num_hidden_layers": 3})
    one, other, another_seed = (
        dict(initialize(new_model(config, "sdpa"), seed, "cpu").named_parameters())
        for config, seed in ((CONFIGS["llama"], 0), (deeper, 0), (deeper, 1))
    )
    assert len(other) > len(one)
    for key, value in one.items():
        assert torch.equal(value, other[key])
        assert key.endswith("norm.weight") or not torch.equal(value, another_seed[key])
    matrices = [value for key, value in one.items() if value.shape == (192, 128)]
    assert not any(torch.equal(a, b) for a in matrices for b in matrices if a is not b)


@pytest.mark.slow
def test_no_process_holds_the_model(tmp_path):
    """The benchmark, with Llama 3.2 1B on two processes, fails if one holds more than its shard and a parameter."""
    command = [sys.executable, "benchmarks/init_memory.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_what_the_rule_does_not_know_is_named():
    model = new_model(CONFIGS["llama"], "sdpa")
    model.model.layers[1].mlp.register_parameter("gain", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ValueError, match=r"LlamaMLP: .* gives model\.layers\.1\.mlp\.gain no value"):
        initialize(model, 0, "cpu")


def test_a_model_whose_rule_reaches_into_children_is_refused():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(ValueError, match="of type t5 cannot be made on the meta device, only llama, mistral, mixtral"):
        initialize(model, 0, "cpu")
