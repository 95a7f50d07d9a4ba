"""cuDNN's attention is switched on only where it is sound and fast: in training, without a mask."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from accelerate_recipes.attention import keep_cudnn_from_masks

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
IDS = torch.arange(8)[None] + 4
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(intermediate_size=16, num_key_value_heads=1, **SIZES)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(intermediate_size=16, num_key_value_heads=1, num_local_experts=2, **SIZES)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SIZES)),  # calls torch by itself
}


@pytest.fixture
def calls(monkeypatch) -> list[tuple[bool, bool]]:
    """Of each call of torch's attention: has it a mask, and may cuDNN compute it?"""
    found = []
    compute = F.scaled_dot_product_attention

    def record(*args, attn_mask=None, **settings):
        found.append((attn_mask is not None, torch.backends.cuda.cudnn_sdp_enabled()))
        return compute(*args, attn_mask=attn_mask, **settings)

    before = AttentionInterface()["sdpa"]
    keep_cudnn_from_masks()
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    yield found
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    AttentionInterface.register("sdpa", before)


@pytest.mark.parametrize(
    "model, inputs, masked",
    [
        ("llama", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}, True),  # packed: documents
        ("llama", {"position_ids": torch.arange(8)[None]}, False),
        ("llama", {"attention_mask": PADDED}, True),  # conversations, preferences, rewards
        ("llama", {"attention_mask": torch.ones_like(IDS)}, False),
        ("mixtral", {"attention_mask": PADDED}, True),
        ("t5", {"decoder_input_ids": IDS}, True),
        ("falcon", {"attention_mask": PADDED}, True),
    ],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_with_a_mask_cudnn_is_off(calls, model, inputs, masked, recomputed):
    """In the forward pass, and where the backward pass computes it again."""
    model = MODELS[model]().train()
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=IDS, use_cache=False, **inputs).logits.sum()
    forward = len(calls)
    loss.backward()
    assert len(calls) == forward * (1 + recomputed) > 0
    assert set(calls) == {(masked, not masked)}


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_while_generating_cudnn_is_off(calls, model):
    """Also for prompts of one length, which need no mask."""
    MODELS[model]().generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    assert len(calls) >= 3 and not any(may_be_cudnn for _, may_be_cudnn in calls)
    assert model == "t5" or not any(masked for masked, _ in calls)
