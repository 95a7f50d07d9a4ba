"""torch's own kernels of attention: those that are avoided, and FlashAttention 3."""

from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from accelerate_recipes.errors import ConfigError

ALL_KERNELS = [kernel for kernel in SDPBackend.__members__.values() if kernel != SDPBackend.ERROR]
FLASH_3 = "flash_attn_interface"  # package of FlashAttention 3


def use_flash_3() -> bool:
    """Let torch use version 3 of FlashAttention, in this process from now on, if the GPU and the packages allow it.

    torch's FlashAttention then raises an error for dropout, which `documents` does not compute either.

    Returns:
        Whether torch uses version 3.

    Raises:
        ConfigError: if the package is installed but does not work.
    """
    if not find_spec(FLASH_3) or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"the package {FLASH_3} (FlashAttention 3) does not work with torch {torch.__version__}: {error}; install a "
            "build for this torch, or uninstall it"
        ) from error
    return True


def keep_cudnn_from_masks() -> None:
    """Use cuDNN's attention only for training without a mask; in this process, from now on.

    On Hopper, torch 2.13 prefers cuDNN's kernel to all others. Without a mask it is the fastest. With a mask (for packed
    documents, padding or T5's position bias), its backward pass (cuDNN 9.20) gives NaN gradients if a row has 64
    tokens more than a multiple of 128 and a logsumexp below -88.7 (pytorch/pytorch#196678; tests/test_gpu.py fails once
    this is fixed). In addition, it makes a plan for each new shape, in tens of milliseconds; in generation each token has a
    new shape.

    The switch belongs to the process. This function turns it off, also for models that call torch directly. `sdpa` turns it
    on for one call. Turning it on for a whole forward pass is not enough, because activation checkpointing computes
    attention again in the backward pass.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformers.AttentionInterface.register("sdpa", sdpa)


def sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Replace transformers' `sdpa_attention_forward`, for `attn_implementation="sdpa"`."""
    is_masked = attention_mask is not None or settings.get("position_bias") is not None
    if is_masked or not torch.is_grad_enabled():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    with sdpa_kernel(ALL_KERNELS):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
