"""Choice of a kernel of attention, by model, precision and device; torch's own kernels: those to avoid, FlashAttention 3."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.ranks import computes_in_bf16

ALL_KERNELS = [kernel for kernel in SDPBackend.__members__.values() if kernel != SDPBackend.ERROR]
FLASH_3 = "flash_attn_interface"  # package of FlashAttention 3
# Choices for a recipe whose rows are packed.
KERNELS = ["auto", DOCUMENTS, "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]
WITH_MASKS = ("doge",)  # models that compute a mask from the values
SOFTCAP, SINKS, CHUNKS, OWN = "softcapped scores", "attention sinks", "attention in chunks", "an attention of its own"
NOT_SHARED = (SOFTCAP, SINKS, CHUNKS, OWN)  # with these, ranks cannot share rows
WHOLE_IMAGES = "images whose tokens see each other"


def of_layers(text: PreTrainedConfig) -> list[PreTrainedConfig]:
    """List the configurations of a model's layers. Layers may differ in the number and width of heads, as in Gemma 4."""
    return [*text.per_layer_config] if getattr(text, "num_hidden_layers", 0) else [text]


def width_of_heads(layer: PreTrainedConfig) -> int:
    """Return the width of the heads of a layer."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    return getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // heads


def class_of(config: PreTrainedConfig) -> Any:
    """Return the class of a decoder, of text alone or of images and text; None if it is not from transformers."""
    mappings = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return next((model_class for mapping in mappings if (model_class := mapping.get(type(config), None))), None)


@functools.cache
def has_sinks(model_class: type) -> bool:
    """Tell whether the attention of a class has sinks: its code gives them to transformers' interface by this name."""
    return "s_aux" in inspect.getsource(inspect.getmodule(model_class))  # pyright: ignore[reportArgumentType]


def sees_images_whole(config: PreTrainedConfig) -> bool:
    """Tell whether the tokens of an image see each other, the later ones too; not in the text part alone."""
    text = config.get_text_config()
    is_whole = text is not config
    return is_whole and (
        config.model_type == "gemma3" or getattr(text, "use_bidirectional_attention", None) == "vision"
    )


def beyond_documents(config: PreTrainedConfig) -> list[str]:
    """List the features of a model's attention that `documents` does not compute."""
    text = config.get_text_config()
    classes = list(filter(None, (class_of(config), class_of(text))))
    widths = {width_of_heads(layer) for layer in of_layers(text)}
    value, key = (getattr(text, name, max(widths)) for name in ("v_head_dim", "qk_head_dim"))
    asks = {
        SOFTCAP: getattr(text, "attn_logit_softcapping", None) is not None,
        SINKS: any(map(has_sinks, classes)),
        WHOLE_IMAGES: sees_images_whole(config),
        CHUNKS: "chunked_attention" in (getattr(text, "layer_types", None) or ()),
        "dropout of the attention": any(getattr(text, n, 0.0) for n in ("attention_dropout", "attn_pdrop")),
        OWN: not all(each._supports_attention_backend for each in classes)
        or not classes
        or text.model_type in WITH_MASKS,
        **{f"heads {width} wide": width > 256 or width % 8 > 0 for width in sorted(widths)},
        "values of another width than keys": value != key,
    }
    return [what for what, is_asked in asks.items() if is_asked]


def unsupported_kernels(config: PreTrainedConfig) -> dict[str, str]:
    """Map each kernel of torch that a model's class or its text part's does not support to the kernel to use instead."""
    classes = list(filter(None, (class_of(config), class_of(config.get_text_config()))))
    if not classes:  # not from transformers: it says so itself
        return {}
    supports = {
        "sdpa": "_supports_sdpa",
        "flex_attention": "_supports_flex_attn",
        "flash_attention_2": "_supports_flash_attn",
        "flash_attention_3": "_supports_flash_attn",
    }
    supported = {name: all(getattr(each, field) for each in classes) for name, field in supports.items()}
    return {name: "sdpa" if supported["sdpa"] else "eager" for name, is_there in supported.items() if not is_there}


def choose(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, has_boundaries: bool, is_shared: bool = False
) -> tuple[str, str]:
    """Choose the attention for `auto`; any other name stays. Return its name and the reason (empty if not `auto`).

    Args:
        dtype: dtype of the weights; the model computes in this dtype unless the accelerate YAML says bf16.
        has_boundaries: whether the batches say where documents begin.
        is_shared: whether ranks share a row (see `shared_rows`). If so, the choice is `documents` on any device, or `sdpa`
            with a mask.

    Raises:
        ConfigError: for an attention that does not work with the model, the precision or the installed packages.
    """
    import accelerate_recipes.models.document_attention  # noqa: F401  # which registers it; torch's takes a second

    is_bf16 = dtype == torch.bfloat16 or computes_in_bf16()
    lacks = unsupported_kernels(config)
    if name in lacks:
        raise ConfigError(
            f"--attn_implementation {name}: transformers' {config.get_text_config().model_type} does not support it; give "
            f"{lacks[name]}, or auto"
        )
    if is_shared and name not in ("auto", DOCUMENTS, "sdpa"):
        raise ConfigError(
            f"--attn_implementation {name}: rows that ranks share (parallelism_config_cp_size) need {DOCUMENTS}, or "
            "sdpa with a mask; give auto"
        )
    plain = lacks.get("sdpa", "sdpa")
    if sees_images_whole(config) and name not in ("auto", DOCUMENTS, "sdpa", "eager"):
        raise ConfigError(f"--attn_implementation {name}: the model has {WHOLE_IMAGES}; give {plain}, or auto")
    # Recipes of other models than decoders give no name; the heads of such a model may differ by stage, as in Swin.
    features = ", ".join(beyond_documents(config)) if name in ("auto", DOCUMENTS) else ""
    if name == DOCUMENTS and features:
        raise ConfigError(f"--attn_implementation {DOCUMENTS}: the model has {features}; give {plain}, or auto")
    if name == DOCUMENTS and torch.cuda.is_available() and not is_bf16:
        raise ConfigError(
            f"--attn_implementation {DOCUMENTS} computes in bf16 on a GPU; set `mixed_precision: bf16` in the accelerate "
            "YAML, or give sdpa"
        )
    # Without the package, transformers would load the kernel from the Hub with `kernels`.
    packages = {
        "flash_attention_2": ("flash_attn", "pip install flash-attn"),
        "flash_attention_3": (FLASH_3, "build it in the folder hopper of github.com/Dao-AILab/flash-attention"),
    }
    package, how = packages.get(name, ("", ""))
    if package and not any(map(find_spec, (package, "kernels"))):
        raise ConfigError(f"--attn_implementation {name}: its package {package} is not installed; {how}, or give auto")
    if name != "auto":
        return name, ""
    reasons = {
        f"the model has {features}": features,
        "trl's batches do not say where documents begin": not has_boundaries,
        "the precision is not bf16": not is_bf16 and torch.cuda.is_available(),
        "there is no GPU": not is_shared and not torch.cuda.is_available(),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if why and is_shared and plain == "eager":
        raise ConfigError(
            f"--attn_implementation auto chooses {plain} for {config.get_text_config().model_type}, since {why}; with that, "
            "ranks cannot share rows: set parallelism_config_cp_size to 1"
        )
    if why:
        return plain, why
    return DOCUMENTS, "ranks share a row" if is_shared else "bf16 on a GPU"


@contextlib.contextmanager
def with_padding(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Use sdpa instead of `documents` inside this context, for batches with padding, which `documents` does not support."""
    name = model.config._attn_implementation
    if name != DOCUMENTS:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(name)


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
