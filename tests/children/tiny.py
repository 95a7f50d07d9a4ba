"""Tiny models for tests: sizes in Llama's words, which the configuration of each architecture gets in its own."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

# A whole Llama 4 of transformers 5.24 reads this from the output of its text part, which does not have it.
MoeCausalLMOutputWithPast.image_outputs = None

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

LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN35 = LINEAR | {"head_dim": 8, "rope_parameters": MROPE | {"partial_rotary_factor": 1.0}}
WINDOWS = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# Sizes of a vision part.
VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
QWEN_VIT = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
CLIP = VIT | {"model_type": "clip_vision_model", "image_size": 8}
QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
GEMMA_TOKENS = {"boi_token_index": 91, "eoi_token_index": 92}
# For each composite type: fields of its text part, of its vision part, and of the whole.
COMPOSITE = {
    "gemma3": (WINDOWS, VIT | {"image_size": 8}, GEMMA_TOKENS | {"mm_tokens_per_image": 1, "image_token_index": 90}),
    "gemma4": (
        WINDOWS | {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
        VIT | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16, "pooling_kernel_size": 2},
        {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_config": None},
    ),
    "llama4": (
        {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 2, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2},
        VIT | {"intermediate_size": 64, "image_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
               "projector_output_dim": 32},
        GEMMA_TOKENS | {"image_token_index": 90},
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 8}, VIT | {"model_type": "pixtral", "head_dim": 8, "image_size": 8},
        {"image_token_index": 90, "spatial_merge_size": 1},
    ),
    "qwen3_5": (QWEN35, QWEN_VIT, QWEN_TOKENS),
    "qwen3_5_moe": (QWEN35 | EXPERTS | {"shared_expert_intermediate_size": 16}, QWEN_VIT, QWEN_TOKENS),
    "qwen3_vl": (
        {"head_dim": 8, "rope_parameters": MROPE}, QWEN_VIT | {"deepstack_visual_indexes": [0]}, QWEN_TOKENS
    ),
    "idefics3": ({"model_type": "llama"}, VIT | {"image_size": 8}, {"image_token_id": 90}),
    "internvl": (
        {"model_type": "qwen3", "head_dim": 8}, VIT | {"image_size": [8, 8], "patch_size": [4, 4]}, {"image_token_id": 90}
    ),
    "llava": ({"model_type": "llama"}, CLIP, {"image_token_index": 90}),
    "llava_next": ({"model_type": "mistral", "head_dim": 8}, CLIP, {"image_token_index": 90, "image_grid_pinpoints": [[8, 8]]}),
    "llava_onevision": (
        {"model_type": "qwen2"}, VIT | {"model_type": "siglip_vision_model", "image_size": 8},
        {"image_token_index": 90, "image_grid_pinpoints": [[8, 8]], "vision_feature_layer": -1},
    ),
    "qwen2_vl": (
        {"rope_parameters": MROPE}, QWEN_VIT | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, QWEN_TOKENS
    ),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, QWEN_VIT | {"fullatt_block_indexes": [0]}, QWEN_TOKENS),
    "smolvlm": ({"model_type": "llama"}, VIT | {"image_size": 8}, {"image_token_id": 90}),
    "vipllava": ({"model_type": "llama"}, CLIP, {"image_token_index": 90, "vision_feature_layers": [0]}),
}  # fmt: skip


def composite_config(model_type: str, vocab_size: int = 100, **changes: object) -> transformers.PreTrainedConfig:
    """Make the configuration of a tiny composite; `changes` are of the whole. Its last ten tokens are for images."""
    text, vision, whole = COMPOSITE[model_type]
    text = SIZES | text | {"vocab_size": vocab_size, "initializer_range": 0.1}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = vocab_size
    whole = {k: v + vocab_size - 100 if isinstance(v, int) and v >= 90 else v for k, v in whole.items()}
    return transformers.CONFIG_MAPPING[model_type](text_config=text, vision_config=vision, **whole | changes)


def tiny_composite(model_type: str, vocab_size: int = 100, **changes: object) -> transformers.PreTrainedModel:
    """Make a tiny model of a composite type, with random weights; see `composite_config`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(composite_config(model_type, vocab_size, **changes))


def tiny_config(model_type: str = "llama", **changes: object) -> transformers.PreTrainedConfig:
    """Make the configuration of a tiny model of any architecture."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    fields = SIZES | MORE.get(model_type, {}) | changes
    # Some defaults follow from others in the constructor, which knows only an architecture's own names.
    return config_class(**{config_class.attribute_map.get(name, name): value for name, value in fields.items()})


def tiny_model(
    model_type: str = "llama", kind: type | None = None, attention: str | None = None, seed: int = 0, **changes: object
) -> transformers.PreTrainedModel:
    """Make a tiny language model with random weights, or with a head of another `kind`, an auto class."""
    config = tiny_config(model_type, **changes)
    kind = kind or (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(config, attn_implementation=attention)


def save_different(model: transformers.PreTrainedModel, folder: Path, **settings: object) -> Path:
    """Save a model whose values all differ, so that none can be taken for another."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) / 4)
    model.save_pretrained(folder, **settings)
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Give a saved model, which has its weights in one file, others."""
    file = folder / "model.safetensors"
    weights = {name: weight.contiguous().clone() for name, weight in change(load_file(file)).items()}
    save_file(weights, file, {"format": "pt"})


def save_base(folder: Path, tokenizer, **config) -> Path:
    """Save a tiny causal model, with the special tokens of a tokenizer, and this tokenizer beside it."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tiny_model(**{"vocab_size": len(tokenizer), "initializer_range": 0.1, **ids, **config}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
