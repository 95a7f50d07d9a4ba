"""Check whether several ranks can share the rows of a model (see `shared_rows`), and say why not."""

import math

import torch
from transformers import PreTrainedConfig

from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.models.attention import CHUNKS, OWN, SINKS, SOFTCAP, beyond_documents, of_layers
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.models.probes import (
    REFUSALS,
    UNTRIED,
    balance_weight,
    on_cpu_in_fp32,
    shares_in_small,
    tiny_model,
)
from accelerate_recipes.models.rotary import ROPE_KINDS
from accelerate_recipes.models.shared_rows import balance_of_rows
from accelerate_recipes.ranks import ranks_a_row

LONGEST_MASK = 8192  # tokens in a row that ranks share; the mask of such a row has 64 MiB


def check_sharing(config: PreTrainedConfig) -> None:
    """Raise ConfigError if ranks share rows (see `shared_rows`), but not those of a model with this configuration."""
    size = ranks_a_row()
    if size > 1:
        raise_problems("Ranks cannot share rows (parallelism_config_cp_size)", model_sharing_problems(config, size))


def model_sharing_problems(config: PreTrainedConfig, size: int) -> list[str]:
    """List why `size` ranks cannot share the rows of a model with this configuration, one sentence each."""
    text = config.get_text_config()
    name = text.model_type
    heads = math.gcd(*(getattr(layer, "num_attention_heads", 0) or 0 for layer in of_layers(text)))
    if config.is_encoder_decoder:
        return [f"{name} is an encoder-decoder, whose rows are not packed; set parallelism_config_cp_size to 1"]
    found = []
    if not heads or heads % size:
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        found.append(
            f"{name} has {heads} query heads, which parallelism_config_cp_size {size} does not divide; set it to one of "
            f"{sizes or 1}"
        )
    if asked := [what for what in beyond_documents(config) if what in (SOFTCAP, SINKS, CHUNKS, OWN)]:
        found.append(f"{name} has {', '.join(asked)}; set parallelism_config_cp_size to 1")
    elif (shares := shares_in_small(config)) is None:
        found.append(f"{UNTRIED.format(name)} ranks can share its rows; set parallelism_config_cp_size to 1")
    elif not shares:
        found.append(
            f"layers of {name} mix positions beside attention (a linear attention, a state space, a convolution), or do not "
            "call attention by transformers' interface: a rank would see only its part of a row; set "
            "parallelism_config_cp_size to 1"
        )
    elif balance_weight(config) and not balances_as_known(config):
        found.append(
            f"{name} balances its experts by a loss of its own, which would see only a part of a row; set "
            "parallelism_config_cp_size to 1, or router_aux_loss_coef in its config.json to 0"
        )
    ropes = getattr(text, "rope_parameters", None) or {}
    of_kinds = [part for part in ropes.values() if isinstance(part, dict)]
    if moving := {*ROPE_KINDS} & {part.get("rope_type") for part in (ropes, *of_kinds)}:
        found.append(
            f"the rotary embedding of {name} ({', '.join(moving)}) depends on the last position, and each rank has another; "
            "set parallelism_config_cp_size to 1"
        )
    return found


def check_shared_masks(config: PreTrainedConfig, attention: str, max_length: int) -> None:
    """Raise ConfigError if this attention cannot have a mask for rows of `max_length` tokens (0: any) that ranks share."""
    if attention == "sdpa" and balance_weight(config):
        raise ConfigError(
            f"with sdpa, rows that ranks share have a mask, with which {config.model_type} cannot balance its experts; give "
            f"--attn_implementation {DOCUMENTS}, or set router_aux_loss_coef in its config.json to 0"
        )
    if attention == "sdpa" and not 0 < max_length <= LONGEST_MASK:
        raise ConfigError(
            f"--max_length {max_length or 'none'}: with sdpa, rows that ranks share have a mask of all pairs of tokens, for "
            f"at most {LONGEST_MASK} tokens; shorten them, or give --attn_implementation {DOCUMENTS}"
        )


@torch.no_grad()
@on_cpu_in_fp32()
def balances_as_known(config: PreTrainedConfig) -> bool:
    """Tell whether a tiny model of this configuration balances its experts by the same loss as `balance_of_rows`."""
    model = tiny_model(config, "alone", sequence_group=None)
    if model is None:
        return False
    try:
        output = model(torch.arange(12)[None], use_cache=False, output_router_logits=True, sequence_group=None)
        found, _ = balance_of_rows(output.router_logits, model.config.num_experts_per_tok, torch.ones(()), None)
        return bool((found - output.aux_loss).abs() <= 1e-4 * output.aux_loss)
    except REFUSALS:
        return False
