"""Rotary embeddings that depend on the length of a text (longrope, dynamic): each document gets the one that it has alone.

transformers 5.23 takes the largest position of a batch for the length of all its texts, and for the dynamic kind that of
earlier batches too. What a document teaches would depend on its neighbours in the row, in the batch, and before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from accelerate_recipes.models.mixers import take_over
from accelerate_recipes.upstream import CACHES

ROPE_KINDS = ("dynamic", "longrope")


class TextPlaces(NamedTuple):
    """Length of the document of each token of a batch, (B, T), and the place in the row where that document begins."""

    lengths: torch.Tensor
    starts: torch.Tensor


_texts: TextPlaces | None = None  # of the batch that a model is computing


def kinds_of(module: nn.Module) -> set[str]:
    """Return those kinds of a module that depend on the length: of a rotary embedding, one for each kind of layer."""
    kinds = getattr(module, "rope_type", None)
    types = kinds.values() if isinstance(kinds, dict) else [kinds]
    return {kind for kind in types if isinstance(kind, str)} & {*ROPE_KINDS}


def embed_by_length(model: nn.Module) -> list[nn.Module]:
    """Let the rotary embeddings of a model that depend on the length of a text take that of each document, in place.

    Returns:
        These modules.
    """
    return take_over(
        model, [module for module in model.modules() if kinds_of(module)], by_length, begin_texts, end_texts
    )


def texts_of(inputs: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None) -> TextPlaces:
    """Find the documents of a batch: a row with padding is one; in packed rows a document begins where a position is 0."""
    index = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
    if mask is not None:
        lengths, starts = mask.long().sum(1, keepdim=True), mask.long().argmax(1, keepdim=True)
        return TextPlaces(lengths.clamp(min=1).expand_as(index), starts.expand_as(index))
    begins = torch.zeros_like(index, dtype=torch.bool) if positions is None else (positions == 0).expand_as(index)
    begins = begins | (index == 0)
    numbers = begins.flatten().cumsum(0) - 1
    lengths = torch.bincount(numbers)[numbers].view(index.shape)
    return TextPlaces(lengths, torch.where(begins, index, 0).cummax(1).values)


def begin_texts(model: transformers.PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Find the texts of the batch before a model computes it. While it generates, transformers decides."""
    global _texts
    given = (kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    inputs = next(given, args[0] if args else None)
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    is_cached = any(kwargs.get(name) is not None for name in CACHES)
    is_known = isinstance(inputs, torch.Tensor) and (positions is None or positions.ndim == 2)
    _texts = None
    if is_known and not is_cached and not isinstance(inputs, FakeTensor):  # in a simulation tokens have no values
        _texts = texts_of(inputs, positions, mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None)


def end_texts(*_: Any) -> None:
    global _texts
    _texts = None


@torch.no_grad()
def by_length(
    forward: Callable, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the `forward` of a rotary embedding for texts up to the original length, then for each greater length."""
    module: Any = forward.__self__  # pyright: ignore[reportFunctionMemberAccess]
    kind, parameters, of_layer, prefix = module.rope_type, module.config.rope_parameters, {}, ""
    if layer_type is not None:
        kind, parameters = kind[layer_type], parameters[layer_type]
        of_layer, prefix = {"layer_type": layer_type}, f"{layer_type}_"
    if _texts is None or kind not in ROPE_KINDS:
        return forward(x, position_ids, **of_layer)
    is_dynamic = kind == "dynamic"
    original = module.original_max_seq_len if is_dynamic else parameters["original_max_position_embeddings"]
    lengths, starts = _texts
    positions = position_ids.expand_as(lengths)
    # From the begin of the text: only differences of positions count.
    positions = (positions - positions.gather(1, starts)).clamp(min=0).minimum(lengths - 1)
    long = lengths[lengths > original].unique()
    rope = None
    for group in [lengths <= original, *([lengths == n for n in long] if is_dynamic else [lengths > original])]:
        if not group.any():
            continue
        if is_dynamic:
            module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", original)
        made = forward(x, torch.where(group, positions, 0), **of_layer)  # the largest of these positions decides
        rope = made if rope is None else [torch.where(group[..., None], *pair) for pair in zip(made, rope, strict=True)]
    assert rope is not None
    cos, sin = rope
    return cos, sin
