"""Tiny models for tests: sizes in Llama's words, which the configuration of each architecture gets in its own."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
# Fields of an architecture that follow from these sizes, and that its constructor does not derive.
T5 = {"d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE = {
    "t5": T5, "mt5": T5, "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24}, "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"bos_token_id": 0, "eos_token_id": 0}, "gptj": {"rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0},
    "phi3": {"pad_token_id": 0, "eos_token_id": 2}, "gemma2": {"head_dim": 8}, "gemma3_text": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8, "pad_token_id": 0, "eos_token_id": 2}, "qwen3": {"head_dim": 8},
}  # fmt: skip


def tiny_config(model_type: str = "llama", **changes: object) -> PreTrainedConfig:
    """Make the configuration of a tiny model of any architecture."""
    config_class = CONFIG_MAPPING[model_type]
    fields = SIZES | MORE.get(model_type, {}) | changes
    # Some defaults follow from others in the constructor, which knows only an architecture's own names.
    return config_class(**{config_class.attribute_map.get(name, name): value for name, value in fields.items()})


def tiny_model(
    model_type: str = "llama",
    kind: type | None = None,
    attention: str | None = None,
    seed: int = 0,
    **changes: object,
) -> PreTrainedModel:
    """Make a tiny language model with random weights, or with a head of another `kind`, an auto class."""
    config = tiny_config(model_type, **changes)
    kind = kind or (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(config, attn_implementation=attention)
