"""Choice of the attention kernel where torch's own is not good."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ALL_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,  # what a device has of its own, such as Intel's GPUs
]


def keep_cudnn_from_masks() -> None:
    """Have attention computed by cuDNN only where a model learns without a mask; in this process, from now on.

    On Hopper torch 2.13 prefers cuDNN's kernel to all others. Without a mask it is the fastest. With one, of packed
    documents, of padding or of T5's position bias, its backward pass (cuDNN 9.20) gives NaN gradients where a row has 64
    tokens more than a multiple of 128 and a logsumexp below -88.7 (pytorch/pytorch#196678; tests/test_gpu.py fails once
    it does not). And it makes a plan, for tens of milliseconds, for each shape that it meets: while a text is
    generated, for each token.

    The switch is the process's. It is off, also for a model that calls torch by itself, and `sdpa` turns it on for a
    call: not around a forward pass, as activation checkpointing computes attention in the backward pass again.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register("sdpa", sdpa)


def sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa_attention_forward`, in whose place this stands for `attn_implementation="sdpa"`."""
    is_masked = attention_mask is not None or settings.get("position_bias") is not None
    if is_masked or not torch.is_grad_enabled():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    with sdpa_kernel(ALL_KERNELS):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
