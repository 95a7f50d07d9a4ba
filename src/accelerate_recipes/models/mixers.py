"""Packed rows for layers that carry a state from token to token: linear attention, state spaces, short convolutions.

Such a mixer ignores the positions, which say where a document begins. So a row is split into its documents before the mixer,
and packed again after it. All other layers compute packed rows. Some kernels take boundaries of documents, under three
different names, and some ignore them. Unpacking is exact with any of these kernels, and without a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_map

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.documents import boundaries, text_positions
from accelerate_recipes.upstream import CACHES

# Arguments of a mixer that describe whole rows. A single document has no boundaries inside, no padding, no earlier state.
BOUNDARIES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
OF_ROWS = BOUNDARIES | CACHES | {"attention_mask"}


@dataclass
class Unpacking:
    """Documents of a batch of packed rows, in groups that are computed together.

    Args:
        shape: (B, T), the shape of the batch.
        groups: each (N, L): for N documents of similar length, the places of their tokens in the concatenated rows. A
            shorter document repeats its last token; tokens before it do not see the copies.
        places: (B x T,): for each token of the batch, its place in the concatenated groups.
    """

    shape: torch.Size
    groups: list[torch.Tensor]
    places: torch.Tensor


_documents: Unpacking | None = None  # documents of the rows that a model is computing


class Keeping:
    """Context in which mixers compute these documents. Recomputation enters it several times."""

    def __init__(self, documents: Unpacking | None):
        self.documents, self.before = documents, None

    def __enter__(self):
        global _documents
        self.before, _documents = _documents, self.documents

    def __exit__(self, *_):
        global _documents
        _documents = self.before


def documents_of(position_ids: torch.Tensor) -> Unpacking | None:
    """Find the documents of packed rows, (B, T), by their positions; None if each row is one document.

    Once for each batch, this waits until the GPU has finished all queued work.
    """
    positions = position_ids.cpu().clone()
    positions[:, 0] = 0  # a row begins a document, whatever its first position is
    ends = boundaries(positions)["cu_seqlens"].long()
    lengths = ends.diff()
    if len(lengths) == len(position_ids):
        return None
    groups, indices, taken = [], torch.empty(position_ids.numel(), dtype=torch.int64), 0
    for numbers in alike(lengths.tolist()):
        own = lengths[numbers, None]
        steps = torch.arange(int(own.max()))
        # Places beyond the end of a document repeat its last token; `indices` leaves them out.
        groups.append(ends[numbers, None] + steps.minimum(own - 1))
        indices[groups[-1][steps < own]] = taken + (steps < own).flatten().nonzero().flatten()
        taken += groups[-1].numel()
    device = position_ids.device
    return Unpacking(position_ids.shape, [group.to(device) for group in groups], indices.to(device))


def alike(lengths: list[int]) -> list[list[int]]:
    """Divide document numbers into groups. In a group, no document is shorter than three quarters of the longest."""
    groups, longest = [], 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not groups or 4 * lengths[number] < 3 * longest:
            groups.append([])
            longest = lengths[number]
        groups[-1].append(number)
    return groups


def unpack_documents(model: transformers.PreTrainedModel, mixers: Collection[str]) -> list[nn.Module]:
    """Let modules of the classes `mixers` compute each document of a packed row by itself, in place.

    The model must be called with `position_ids`, which begin with 0 in each document. A batch with padding, which has a mask
    (B, T), is computed as it is.

    Returns:
        These modules.
    """
    modules = [module for module in model.modules() if type(module).__name__ in mixers]
    return take_over(model, modules, by_document, begin, end)


def take_over(
    model: nn.Module, modules: list[nn.Module], forward: Callable, begin: Callable, end: Callable
) -> list[nn.Module]:
    """Call `forward` with the own one of each module, and `begin` and `end` around the model; return the modules.

    None of the three is compiled.
    """
    if modules:
        forward, begin, end = map(torch.compiler.disable, (forward, begin, end))
        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)
    for module in modules:
        module.forward = partial(forward, module.forward)
    return modules


def check_units(mixers: Collection[nn.Module], units: Collection[nn.Module]) -> None:
    """Check that FSDP gathers no part of a mixer by itself.

    A mixer is called once for each group of documents. Ranks may have different numbers of groups, and would then wait for
    each other for ever.

    Raises:
        ConfigError: names the mixer.
    """
    for mixer in mixers:
        if any(part is unit for part in mixer.modules() if part is not mixer for unit in units):
            raise ConfigError(
                f"fsdp_auto_wrap_policy shards parts of {type(mixer).__name__} by themselves. A rank calls such a part once "
                "for each group of its documents, and the ranks have different numbers of groups; let it wrap whole layers "
                "(TRANSFORMER_BASED_WRAP)"
            )


def begin(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Find the documents of the batch before a model computes it. With a cache, attention would not see where they begin."""
    global _documents
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    is_cached = any(kwargs.get(name) is not None for name in CACHES)
    is_padded = isinstance(mask, torch.Tensor) and mask.ndim == 2
    _documents = None if positions is None or is_cached or is_padded else documents_of(text_positions(positions))
    return None if _documents is None else (args, kwargs | {"use_cache": False})


def end(*_: Any) -> None:
    global _documents
    _documents = None


def by_document(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a mixer's `forward` for one group of documents after the other; pack the results again."""
    documents, masks = _documents, kwargs.get("attention_mask")
    # An attention beside convolutions has a kernel that asks where documents begin.
    is_told = hasattr(getattr(forward, "__self__", None), "is_causal") and kwargs.get("cu_seq_lens_q") is not None
    if documents is None:
        kwargs |= {} if is_told else dict.fromkeys(kwargs.keys() & BOUNDARIES)
        return forward(*args, **kwargs)
    kwargs |= dict.fromkeys(kwargs.keys() & OF_ROWS)
    outputs = []
    with Keeping(None):  # a mixer inside a mixer already gets documents
        for group in documents.groups:
            some_args, some_kwargs = tree_map(partial(taken, documents.shape, group), (args, kwargs))
            if "attention_mask" in kwargs:
                some_kwargs["attention_mask"] = tree_map(partial(mask_taken, documents.shape, group), masks)
            if is_told:
                ends = torch.arange(0, group.numel() + 1, group.shape[1], dtype=torch.int32, device=group.device)
                some_kwargs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
                some_kwargs |= {"max_length_q": group.shape[1], "max_length_k": group.shape[1]}
            outputs.append(forward(*some_args, **some_kwargs))
    is_tuple = isinstance(outputs[0], tuple)
    results = [result[0] if is_tuple else result for result in outputs]
    rows = torch.cat([result.flatten(0, 1) for result in results])
    rows = rows.index_select(0, documents.places).unflatten(0, documents.shape)
    return (rows, *[None] * (len(outputs[0]) - 1)) if is_tuple else rows  # the other values are states


def taken(shape: torch.Size, group: torch.Tensor, value: Any) -> Any:
    """Take a group of documents out of a tensor of packed rows, (B, T, ...); return any other value unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
        return value
    return value.flatten(0, 1).index_select(0, group.flatten()).unflatten(0, group.shape)


def mask_taken(shape: torch.Size, group: torch.Tensor, mask: Any) -> torch.Tensor | None:
    """Cut the mask of a group of documents, (N, 1, L, L), out of that of packed rows, (B, 1, T, T): it may hold a window.

    A mask of padding, (B, T), becomes None.

    Raises:
        ConfigError: for the mask of flex_attention, which cannot be cut.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(mask, BlockMask):
        raise ConfigError(
            "--attn_implementation flex_attention: this model computes the attention of each document by itself, and this "
            "mask cannot be cut; give sdpa, or auto"
        )
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    rows, columns = group // shape[1], group % shape[1]
    cut = mask.expand(shape[0], -1, -1, -1)[rows[:, :1, None], :, columns[:, :, None], columns[:, None, :]]
    # Beyond its end, a document repeats its last token, which must not see the copies.
    later = torch.ones(group.shape[1], group.shape[1], dtype=torch.bool, device=mask.device).triu(1)
    unseen = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return cut.permute(0, 3, 1, 2).masked_fill(later, unseen)


def recompute_documents(model: nn.Module) -> None:
    """Let layers with recomputed activations use the same documents again, whatever batch was computed since."""
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn.keywords["context_fn"] = lambda: (contextlib.nullcontext(), Keeping(_documents))
