"""Models: from a name, a folder or a configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from accelerate_recipes import upstream
from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.hub import cache
from accelerate_recipes.models import slices
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.composites import COMPOSITES, is_text_part, placeholders, text_part
from accelerate_recipes.models.pretrained import Kind, load_config, load_text_config, weights_in_files, with_weights
from accelerate_recipes.models.probes import check_sharing, sees_later_tokens
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.ranks import on_first_rank, ranks_a_row

ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart")
# In evaluation, RWKV also divides its weights in place (`rescale_every`); a checkpoint might then hold the divided weights.
BLIND_TO_PADDING = ("recurrent_gemma", "rwkv", "xlstm")


def load_model(
    name: str, attn_implementation: str, has_boundaries: bool = True, **settings: Any
) -> transformers.PreTrainedModel:
    """Load a causal language model, with the `settings` that `adapters.load_settings` gives, such as the `dtype`.

    `has_boundaries` has the same meaning as in `attention.choose`.

    Under FSDP2, the model has no values until `distributed.prepare` has sharded it; see `slices`.

    Raises:
        ConfigError: if the model's class does not support the attention, or rows that ranks share; and if the model is not a
            decoder.
    """
    config = load_text_config(name)
    check_decoder(config, name)
    check_sharing(config)
    dtype = settings.get("dtype", torch.float32)
    attention, _ = choose(attn_implementation, config, dtype, has_boundaries, ranks_a_row() > 1)
    settings |= {"attn_implementation": attention}
    model = read_model(transformers.AutoModelForCausalLM, config, name, settings)
    model.placeholders = placeholders(load_config(name))  # see `composites.check_tokens`
    upstream.name_backbone(model)
    return tie_as_read(model)


def read_model(
    auto: Any, config: PreTrainedConfig, name: str, settings: dict[str, Any]
) -> transformers.PreTrainedModel:
    """Load a model with the weights in the files of `name`; without values if each rank will read its own slices."""
    is_sliced = slices.applies(name, settings)
    if not is_sliced and not is_text_part(config, load_config(name)):
        return auto.from_pretrained(name, config=config, **settings, **cache.pinned(name))
    model = on_meta(auto, config)
    if is_sliced:
        return slices.load_on_meta(model, name, settings)
    return with_weights(model, name, weights_in_files(model, name), settings)


def tie_as_read(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Tie a model's output layer to the embedding, or untie it, as the first rank has read the weights; return the model.

    config.json may be wrong: transformers 5.23 does not tie weights that differ. With `fsdp_cpu_ram_efficient_loading`, only
    the first rank has weights. This also corrects the configuration. Otherwise Accelerate and `resize_token_embeddings`,
    which tie weights again, would replace the output layer, and an export would lose it.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return model
    is_tied = on_first_rank(lambda: head.weight is embedding.weight)
    if is_tied != (head.weight is embedding.weight):
        head.weight = embedding.weight if is_tied else nn.Parameter(torch.empty_like(embedding.weight))
    model.config.tie_word_embeddings = is_tied
    return model


def keep_frozen(model: transformers.PreTrainedModel) -> None:
    """Freeze in place what a model's class freezes, such as biases of routers: transformers 5.24 thaws it where it loads."""
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    for name, parameter in made.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)


def check_decoder(config: PreTrainedConfig, name: str) -> None:
    """Check that a model is a decoder that reads text alone.

    Raises:
        ConfigError: for a model that also reads images or sound, because text alone gives those parts no gradient; for a
            model with an encoder and a decoder, such as BART, because transformers would silently take the decoder alone;
            and for an encoder.
    """
    others = [name for name in vars(config) if re.search("(vision|audio).*_config$", name) and getattr(config, name)]
    # Fuyu and Emu3 have no vision_config.
    if others or type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(
            f"{name} is a {config.model_type}, which also reads images or sound; these recipes train models that read text "
            f"alone, and the text part of a pretrained {', '.join(COMPOSITES[:-1])} or {COMPOSITES[-1]}: give one of those"
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{name} is a {config.model_type}, which has an encoder; this recipe trains decoders alone, recipes/t5.py "
            f"trains encoder-decoders ({', '.join(ENCODER_DECODERS)})"
        )
    if not getattr(config, "is_decoder", True) and sees_later_tokens(config):
        raise ConfigError(
            f"{name} is a {config.model_type} whose attention sees the tokens that it is to predict, since its config.json "
            "has is_decoder false; set that to true, or give another model"
        )
    if config.model_type in BLIND_TO_PADDING:
        raise ConfigError(
            f"{name} is a {config.model_type}, which does not see the padding of prompts: texts generated in batches would "
            "be wrong; give another model"
        )


CAUSAL = Kind("AutoModelForCausalLM", load_tokenizer, check_decoder, part=text_part)


def made(auto: Any, config: PreTrainedConfig, **settings: Any) -> transformers.PreTrainedModel:
    """Make a model of a class of transformers, on the device of the context.

    Raises:
        ConfigError: if no model can be made with this configuration.
    """
    config.architectures = config.architectures or []  # transformers 5.23 reads it to choose a class of a DeiT
    try:
        model = auto.from_config(config, **settings)
    except Exception as error:  # each class of models checks its sizes in its own way
        raise ConfigError(f"no {config.model_type} can be made with this configuration: {one_line(error)}") from error
    model.config.architectures = [type(model).__name__]
    upstream.name_backbone(model)
    return model


def on_meta(auto: Any, config: PreTrainedConfig, **settings: Any) -> transformers.PreTrainedModel:
    """Make a model without values, as `made` makes one."""
    with torch.device("meta"):
        return made(auto, config, **settings)


def new_model(
    config: PreTrainedConfig, attn_implementation: str, dtype: torch.dtype = torch.float32, has_boundaries: bool = True
) -> transformers.PreTrainedModel:
    """Make a causal language model on the meta device, in `dtype`; `has_boundaries` is as in `attention.choose`.

    In a run, `distributed.prepare` draws its first weights; elsewhere `weights.initialize` does.
    """
    check_sharing(config)
    attention, _ = choose(attn_implementation, config, dtype, has_boundaries, ranks_a_row() > 1)
    return on_meta(transformers.AutoModelForCausalLM, config, dtype=dtype, attn_implementation=attention)


def with_classes(config: PreTrainedConfig, names: Sequence[str]) -> PreTrainedConfig:
    """Give a configuration the names of the classes, of which one is right: a base may be of several, or of a number."""
    config.problem_type = None
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    return config
