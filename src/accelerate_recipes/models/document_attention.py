"""Attention inside the documents of packed rows. The import registers it with transformers."""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward, varlen_attn

from accelerate_recipes.models.documents import DOCUMENTS

QUERIES_AT_ONCE = 128  # queries that the CPU's kernel computes at a time
# For fewer heads of keys and values than of queries; torch 2.11 has no such argument and needs none.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def documents(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention inside each document, as an attention function of transformers.

    Tiles outside of documents are not computed. On a GPU this is torch's varlen attention (FlashAttention; see
    `use_flash_3`), which needs bf16. On a CPU a plain kernel computes the same.

    Args:
        query: (B, H, T, D); key and value (B, H or a divisor, T, D).
        cu_seq_lens_q: `cu_seqlens` of `boundaries`. The last entry must be B x T: the gradient of tokens after it would be
            NaN (pytorch #176793).
        sliding_window: number of tokens that a token sees, including itself.

    Returns:
        (B, T, H, D).

    Raises:
        ValueError: for a setting that this kernel does not compute; `beyond_documents` finds such models beforehand.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or dropout or softcap is not None or s_aux is not None or not causal:
        raise ValueError(
            f"--attn_implementation {DOCUMENTS} computes causal attention without padding, dropout, softcap and sinks; "
            f"{type(module).__name__} asks for one of them: give sdpa, or eager"
        )
    if cu_seq_lens_q is None:
        raise ValueError(
            f"--attn_implementation {DOCUMENTS}: the batch does not say where its documents begin; give sdpa"
        )
    rows, length = query.shape[0], query.shape[2]
    if torch.is_autocast_enabled(query.device.type):  # under autocast, RoPE leaves queries and keys in fp32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    attended = varlen_attn(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
        scale=scaling, window_size=(window, 0), **GROUPED_HEADS,
    )  # fmt: skip
    return attended.unflatten(0, (rows, length)), None


def blocks(ends: torch.Tensor, window: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield at most QUERIES_AT_ONCE queries of one document, the keys that they see, and a mask of those unseen by each."""
    bounds = ends.tolist()
    for begin, end in itertools.pairwise(bounds):
        for start in range(begin, end, QUERIES_AT_ONCE):
            stop = min(start + QUERIES_AT_ONCE, end)
            first = begin if window < 0 else max(begin, start - window)
            distance = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
            unseen = (distance < 0) | (distance > window) if window >= 0 else distance < 0
            yield slice(start, stop), slice(first, stop), unseen


def probabilities(query: torch.Tensor, key: torch.Tensor, unseen: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the softmax, (H, queries, keys) in fp32, of (queries, H, D) against (keys, H, D)."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    return scores.masked_fill(unseen, -torch.inf).softmax(-1)


# The kernel is registered for torch's operator, so both devices run the same code, and compilation sees one node. torch 2.13
# has no kernel for a CPU; this one is for tests and small runs. It cannot use `scaled_dot_product_attention`, because an
# operator cannot call autograd.
@_varlen_attn.register_kernel("cpu")
def _attend_on_cpu(query, key, value, ends, _, max_q, max_k, is_causal=False, scale=None, window_size=(-1, -1), *args):
    repeats = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    attended = torch.empty_like(query)
    for rows, columns, unseen in blocks(ends, window_size[0]):
        weights = probabilities(query[rows], wide_key[columns], unseen, scale or query.shape[-1] ** -0.5)
        attended[rows] = torch.einsum("hqk,khd->qhd", weights, wide_value[columns].float()).to(query.dtype)
    # The backward pass on a GPU needs these values; the backward pass below computes them again.
    lse = torch.empty(query.shape[1], query.shape[0])
    return attended, lse, torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _attend_backward_on_cpu(
    grad, query, key, value, out, lse, ends, _, max_q, max_k, is_causal, rng, scale=None, window_size=(-1, -1), *args
):
    repeats = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scale = scale or query.shape[-1] ** -0.5
    grads = [torch.zeros(t.shape, dtype=torch.float32) for t in (query, wide_key, wide_value)]
    for rows, columns, unseen in blocks(ends, window_size[0]):
        weights, grad_out = probabilities(query[rows], wide_key[columns], unseen, scale), grad[rows].float()
        grads[2][columns] += torch.einsum("hqk,qhd->khd", weights, grad_out)
        grad_weights = torch.einsum("qhd,khd->hqk", grad_out, wide_value[columns].float())
        grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * scale
        grads[0][rows] += torch.einsum("hqk,khd->qhd", grad_scores, wide_key[columns].float())
        grads[1][columns] += torch.einsum("hqk,qhd->khd", grad_scores, query[rows].float())
    for i in (1, 2):
        grads[i] = grads[i].unflatten(1, (-1, repeats)).sum(2)
    # Keep the strides of the inputs: torch's shape function promises this, and inductor's code relies on it.
    return tuple(torch.empty_like(t).copy_(g) for g, t in zip(grads, (query, key, value), strict=True))


transformers.AttentionInterface.register(DOCUMENTS, documents)
