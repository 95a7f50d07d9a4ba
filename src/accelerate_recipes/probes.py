"""Tiny models of a class, which show whether it keeps to the documents of packed rows, and whether ranks can share rows."""

import copy
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from accelerate_recipes.attention import READ_BOUNDARIES, document_masks, of_layers, unsupported_kernels, width_of_heads
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.sequence import whole_rows

CROSSES = (
    "{} models do not keep attention inside a document of a packed row, not even with a mask; give --no_document_mask, or "
    "another model"
)


class Packing(Enum):
    """Way in which a model keeps attention inside the documents of a packed row."""

    POSITIONS = "its positions say where documents begin, or the kernel is told"
    MASK = "it gets a mask"
    NONE = "it does not"
    UNKNOWN = "no tiny model of its class can be made"


_packing: dict[tuple, Packing] = {}  # what `packing_of` has found out


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside the wrappers of DDP, FSDP1 and torch.compile."""
    return next(module for module in model.modules() if hasattr(module, "get_output_embeddings"))


def alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Attend to nothing but the position itself, as an attention function of transformers; for `shares_in_small`.

    Raises:
        KeyError: if the model has not handed `sequence_group` on.
    """
    settings["sequence_group"]
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionInterface.register("alone", alone)


@whole_rows()
def packing_of(config: PreTrainedConfig) -> Packing:
    """Find out how models with this configuration keep attention inside a document, by a tiny one of the same class.

    This takes a tenth of a second, once for each class and kind of attention. Where the answer is UNKNOWN, only
    `check_document_mask` can tell.
    """
    text, attention = config.get_text_config(), config._attn_implementation
    if attention in READ_BOUNDARIES:
        attention = "alone"  # the kernel is told; layers beside attention are not
    elif attention not in ("sdpa", "eager"):  # flex_attention would be compiled; its masks come from the same functions
        attention = unsupported_kernels(config).get("sdpa", "sdpa")
    kinds = tuple(sorted(set(getattr(text, "layer_types", None) or ())))
    key = (type(config), attention, kinds, getattr(text, "sliding_window", None) is None)
    if key not in _packing:
        group = {"sequence_group": None} if attention == "alone" else {}
        model = tiny_model(config, attention, **group)
        if model is None:  # one that hands nothing on to its attention is tried itself
            _packing[key] = Packing.POSITIONS if group else Packing.UNKNOWN
        elif is_packed_as_alone(model, **group):
            _packing[key] = Packing.POSITIONS
        elif group:
            _packing[key] = Packing.NONE
        else:
            _packing[key] = Packing.MASK if is_packed_as_alone(model, with_masks=True) else Packing.NONE
    return _packing[key]


def tiny_model(config: PreTrainedConfig, attention: str, **inputs: Any) -> nn.Module | None:
    """Make a model with one layer of each kind, two heads and few words, and with random weights; None if that fails.

    The heads keep their width, for which positions may have tables. Up to 32 experts stay, which may be in groups.
    """
    try:
        text = config.get_text_config()
        # The part for texts alone, where that is a model too.
        config = copy.deepcopy(text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config)
        text, layers = config.get_text_config(), text.num_hidden_layers
        lists = {
            name: value
            for name, value in vars(text).items()
            # A list of more values holds numbers, not kinds of layers.
            if isinstance(value, list) and len(value) == layers and len(set(map(repr, value))) <= 4
        }
        kinds = list(zip(*lists.values(), strict=True))
        chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]] or list(range(min(2, layers)))
        width = max(map(width_of_heads, of_layers(text)))
        sizes = {
            "num_hidden_layers": len(chosen), "num_attention_heads": 2, "num_key_value_heads": 2,
            "hidden_size": 2 * width, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 32,
            "initializer_range": 0.2,
        }  # fmt: skip
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            sizes[name] = min(32, getattr(text, name, None) or 0)
        sizes |= {name: [value[i] for i in chosen] for name, value in lists.items()}
        for name, value in sizes.items():
            if getattr(text, name, None) is not None:
                setattr(text, name, value)
        text.pad_token_id = None
        vars(config).pop("quantization_config", None)
        with torch.random.fork_rng([]), torch.device("cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
            for parameter in model.parameters():
                if parameter.is_floating_point() and not parameter.any():  # it would hide what it multiplies
                    nn.init.normal_(parameter, std=0.2)
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False, **inputs)
    except Exception:  # whatever an unusual configuration brings: only the real model can tell
        return None
    return model.eval()


@torch.enable_grad()
def sees(model: nn.Module, tokens: slice, of: slice, **inputs: Any) -> bool:
    """Tell whether a tiny model's predictions at the places `of` depend on these tokens, however little.

    The gradient says so: what a model does not see has a gradient of exactly 0.
    """
    seen = []
    embedding: Any = unwrapped(model).get_input_embeddings()
    with embedding.register_forward_hook(lambda *some: seen.append(some[-1])):
        logits = model(**inputs).logits
    (gradient,) = torch.autograd.grad(logits[:, of].square().sum(), seen)
    return bool(gradient[:, tokens].any())


def sees_before(model: nn.Module, place: int, **inputs: Any) -> bool:
    """Tell whether a tiny model's predictions from `place` on depend on the tokens before it."""
    return sees(model, slice(place), slice(place, None), **inputs)


def sees_later_tokens(config: PreTrainedConfig) -> bool:
    """Tell whether models of this configuration, by a tiny one, see the tokens that they are to predict."""
    model = tiny_model(config, "eager")
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        tokens = torch.arange(12)[None]
        return model is not None and sees(model, slice(6, None), slice(6), input_ids=tokens, use_cache=False)


@torch.no_grad()
def is_packed_as_alone(model: nn.Module, with_masks: bool = False, **inputs: Any) -> bool:
    """Tell whether a tiny model on the CPU predicts the same in the second document of a row as for the document alone."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        tokens, positions = torch.arange(12)[None], torch.tensor([[*range(5), *range(7)]])
        masks = document_masks(model.config, positions, torch.float32) if with_masks else {}
        inputs |= {"use_cache": False}
        row = {"input_ids": tokens, "position_ids": positions} | masks | inputs
        try:
            packed = model(**row).logits[:, 5:]
            alone = model(input_ids=tokens[:, 5:], position_ids=positions[:, 5:], **inputs).logits
            is_seen = sees_before(model, 5, **row)
        except (TypeError, ValueError, RuntimeError, KeyError):  # it takes no positions, or no such masks
            return False
    return not is_seen and bool((packed - alone).norm() <= 1e-3 * alone.norm())


@torch.no_grad()
def shares_in_small(config: PreTrainedConfig) -> bool:
    """Tell whether a tiny model of this configuration computes parts of a row as in the whole row, but for attention.

    Attention, which `sequence` exchanges, is replaced by one that sees only the position itself.
    """
    group = {"sequence_group": None, "use_cache": False}
    model = tiny_model(config, "alone", sequence_group=None)
    if model is None:
        return False
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        tokens, positions = torch.arange(12)[None], torch.arange(12)[None]
        try:
            whole = model(input_ids=tokens, position_ids=positions, **group).logits
            parts = [
                model(input_ids=t, position_ids=p, **group).logits
                for t, p in zip(tokens.split(6, 1), positions.split(6, 1), strict=True)
            ]
            is_seen = sees_before(model, 6, input_ids=tokens, position_ids=positions, **group)
        except (TypeError, ValueError, RuntimeError, KeyError):
            return False
    return not is_seen and bool((torch.cat(parts, 1) - whole).norm() <= 1e-3 * whole.norm())


def check_packing(config: PreTrainedConfig) -> None:
    """Raise ConfigError for a class of models that lets attention cross the documents of a packed row."""
    if packing_of(config) is Packing.NONE:
        raise ConfigError(CROSSES.format(config.model_type))
