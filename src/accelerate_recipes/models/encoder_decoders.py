"""Encoder-decoders: T5, mT5, UMT5 and BART, from a name, a folder or a configuration."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.loading import ENCODER_DECODERS, made, on_meta, read_model, tie_as_read
from accelerate_recipes.models.pretrained import Kind, load_config
from accelerate_recipes.models.tokenizers import load_tokenizer


def load_encoder_decoder(
    name: str, attn_implementation: str, dropout_rate: float, **settings: Any
) -> transformers.PreTrainedModel:
    """Load a pretrained T5, T5 v1.1, FLAN-T5, mT5 or BART, as `load_model` loads a model.

    `dropout_rate` holds for all kinds of dropout in the model.

    Raises:
        ConfigError: for another kind of model, and for a model that does not name the token with which a text begins.
    """
    config = load_config(name)
    check_encoder_decoder(config, name)
    vars(config).update(dropouts(config, dropout_rate))
    settings |= {"attn_implementation": attn_implementation}
    return share_embedding(read_model(transformers.AutoModelForSeq2SeqLM, config, name, settings))


def check_encoder_decoder(config: PreTrainedConfig, name: str) -> None:
    """Raise ConfigError for a model that is none of ENCODER_DECODERS, or names no token with which a text begins."""
    if config.model_type not in ENCODER_DECODERS:
        raise ConfigError(
            f"{name} is a {config.model_type}, not one of {', '.join(ENCODER_DECODERS)}; give another model"
        )
    if getattr(config, "decoder_start_token_id", None) is None:
        raise ConfigError(
            f"the config.json of {name} has no decoder_start_token_id, the token before the first of a text; add the one "
            f"that it was trained with (in a T5 that of the padding, here {config.pad_token_id})"
        )


ENCODER_DECODER = Kind("AutoModelForSeq2SeqLM", load_tokenizer, check_encoder_decoder)


def dropouts(config: PreTrainedConfig, rate: float) -> dict[str, float]:
    """Return the fields that give an encoder-decoder's configuration this dropout, and no LayerDrop.

    LayerDrop skips whole layers, different ones on each rank. Under FSDP, the ranks would then wait for each other
    without end.
    """
    kinds = ("dropout_rate", "dropout", "attention_dropout", "activation_dropout")
    rates = {kind: rate for kind in kinds if hasattr(config, kind)}
    return rates | {kind: 0.0 for kind in ("encoder_layerdrop", "decoder_layerdrop") if hasattr(config, kind)}


def encoder_decoder_on_meta(
    config: PreTrainedConfig, is_tied: bool, attn_implementation: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Make an encoder-decoder on the meta device, as it would be after loading. Only its sizes matter."""
    model = on_meta(transformers.AutoModelForSeq2SeqLM, config, dtype=dtype, attn_implementation=attn_implementation)
    if not is_tied:
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return share_embedding(model)


def new_encoder_decoder(
    config: PreTrainedConfig, attn_implementation: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Make an encoder-decoder with its first weights, whole on each rank, and equal on all ranks by the common seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(torch.initial_seed())
        return share_embedding(
            made(transformers.AutoModelForSeq2SeqLM, config, dtype=dtype, attn_implementation=attn_implementation)
        )


def share_embedding(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Make an encoder-decoder's embedding a single module, in place; returns the model.

    transformers 5.23 ties three modules, which FSDP2 would put into two groups, and refuses. Only the weights say whether
    the output layer is the embedding too (in v1.1 and FLAN it is not, though the configuration says so).
    """
    shared = tie_as_read(model).get_input_embeddings()
    for part in (model.get_encoder(), model.get_decoder()):
        part.embed_tokens = shared
    # FSDP2 warns because T5's layers pass on the position bias, a view. Nothing writes to it in place.
    warnings.filterwarnings("ignore", message=r".*T5Block\) returned a view tensor")
    return model
