"""Attention inside the documents of a packed row, and a better choice of kernels than torch's own in some cases."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward, varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.ranks import computes_in_bf16

DOCUMENTS = "documents"
# Kernels that read the boundaries of documents; others get a mask, which transformers makes from the positions.
READ_BOUNDARIES = (DOCUMENTS, "flash_attention_2", "flash_attention_3")
# Choices for a recipe whose rows are packed.
KERNELS = ["auto", DOCUMENTS, "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]

ALL_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,  # kernel of one kind of device, such as Intel's GPUs
]
FLASH_3 = "flash_attn_interface"  # package of FlashAttention 3
BLOCK = 128  # queries that the CPU's kernel computes at a time
# For fewer heads of keys and values than of queries; torch 2.11 has no such argument and needs none.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def boundaries(position_ids: torch.Tensor) -> dict[str, torch.Tensor | int]:
    """Find the documents of packed rows, on the CPU. A document begins where a position is 0, and at each row's start.

    Args:
        position_ids: (B, T).

    Returns:
        `cu_seqlens`, (N + 1,) int32: the starts of the N documents in the concatenated rows, and the end, B x T.
        `max_seqlen` is the length of the longest document. Both are exact, not padded: FlashAttention launches the blocks of
        N documents of the longest length, even for documents without tokens. Compiled code treats both as variables after
        it has met two values.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    return {"cu_seqlens": ends.to(torch.int32), "max_seqlen": int(ends.diff().max())}


def boundary_arguments(config: PreTrainedConfig, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the document boundaries of a batch as arguments of a model of this configuration; empty if it gets a mask."""
    if config._attn_implementation not in READ_BOUNDARIES:
        return {}
    ends, longest = batch["cu_seqlens"], batch["max_seqlen"]
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def document_masks(config: PreTrainedConfig, position_ids: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Make the mask of packed rows as an argument of a model that does not make a mask from its positions itself.

    It is one mask, or one for each kind of layer (sliding, full). The attention that the configuration names decides its
    form.

    Args:
        position_ids: (B, T); they begin with 0 in each document.
        dtype: dtype of the activations.
    """
    shape = torch.empty(*position_ids.shape, 1, dtype=dtype, device=position_ids.device)  # only its type is read
    masks = create_masks_for_generate(config, shape, None, None, position_ids=position_ids)
    return {"attention_mask": masks}


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
    found = varlen_attn(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
        scale=scaling, window_size=(window, 0), **GROUPED_HEADS,
    )  # fmt: skip
    return found.unflatten(0, (rows, length)), None


WITH_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")
WITH_MASKS = ("doge",)  # models that compute a mask from the values
SOFTCAP, SINKS, CHUNKS, OWN = "softcapped scores", "attention sinks", "attention in chunks", "an attention of its own"


def of_layers(text: PreTrainedConfig) -> list[PreTrainedConfig]:
    """List the configurations of a model's layers. Layers may differ in the number and width of heads, as in Gemma 4."""
    number = getattr(text, "num_hidden_layers", 0)
    # transformers before 5.23 has no `per_layer_config`. A model without layers has no list of them.
    return (list(getattr(text, "per_layer_config", ())) if number else []) or [text] * max(number, 1)


def width_of_heads(layer: PreTrainedConfig) -> int:
    """Return the width of the heads of a layer."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    return getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // heads


def beyond_documents(config: PreTrainedConfig) -> list[str]:
    """List the features of a model's attention that `documents` does not compute."""
    text = config.get_text_config()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    widths = {width_of_heads(layer) for layer in of_layers(text)}
    value, key = (getattr(text, name, max(widths)) for name in ("v_head_dim", "qk_head_dim"))
    asks = {
        SOFTCAP: getattr(text, "attn_logit_softcapping", None) is not None,
        SINKS: text.model_type in WITH_SINKS,
        CHUNKS: "chunked_attention" in (getattr(text, "layer_types", None) or ()),
        "dropout of the attention": any(getattr(text, n, 0.0) for n in ("attention_dropout", "attn_pdrop")),
        OWN: model_class is None or not model_class._supports_attention_backend or text.model_type in WITH_MASKS,
        **{f"heads {width} wide": width > 256 or width % 8 > 0 for width in sorted(widths)},
        "values of another width than keys": value != key,
    }
    return [what for what, is_asked in asks.items() if is_asked]


def unsupported_kernels(config: PreTrainedConfig) -> dict[str, str]:
    """Map each kernel of torch that a model's class does not support to the kernel to use instead."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:  # not from transformers: it says so itself
        return {}
    supported = {
        "sdpa": model_class._supports_sdpa,
        "flex_attention": model_class._supports_flex_attn,
        "flash_attention_2": model_class._supports_flash_attn,
        "flash_attention_3": model_class._supports_flash_attn,
    }
    return {name: "sdpa" if supported["sdpa"] else "eager" for name, is_there in supported.items() if not is_there}


def choose(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, has_boundaries: bool = True, is_shared: bool = False
) -> tuple[str, str]:
    """Choose the attention for `auto`; any other name stays. Return its name and the reason (empty if not `auto`).

    Args:
        dtype: dtype of the weights; the model computes in this dtype unless the accelerate YAML says bf16.
        has_boundaries: whether the batches say where documents begin.
        is_shared: whether ranks share a row (see `sequence`). If so, the choice is `documents` on any device, or `sdpa` with
            a mask.

    Raises:
        ConfigError: for an attention that does not work with the model, the precision or the installed packages.
    """
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
    if name == DOCUMENTS and (why := ", ".join(beyond_documents(config))):
        raise ConfigError(f"--attn_implementation {DOCUMENTS}: the model has {why}; give {plain}, or auto")
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
    if why := ", ".join(beyond_documents(config)):
        return plain, f"the model has {why}"
    if not has_boundaries:
        return plain, "trl's batches do not say where documents begin"
    if not is_bf16 and torch.cuda.is_available():
        return plain, "the precision is not bf16"
    if is_shared:
        return DOCUMENTS, "ranks share a row"
    if not torch.cuda.is_available():
        return plain, "there is no GPU"
    return DOCUMENTS, "bf16 on a GPU"


@contextlib.contextmanager
def with_padding(model: PreTrainedModel) -> Iterator[None]:
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


def blocks(ends: torch.Tensor, window: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield at most BLOCK queries of one document, the keys that they see, and a mask of the keys unseen by each query."""
    bounds = ends.tolist()
    for begin, end in itertools.pairwise(bounds):
        for start in range(begin, end, BLOCK):
            stop = min(start + BLOCK, end)
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
def _attend_on_cpu(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=(-1, -1), *args
):
    repeats = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    found = torch.empty_like(query)
    for rows, columns, unseen in blocks(cu_seq_q, window_size[0]):
        weights = probabilities(query[rows], wide_key[columns], unseen, scale or query.shape[-1] ** -0.5)
        found[rows] = torch.einsum("hqk,khd->qhd", weights, wide_value[columns].float()).to(query.dtype)
    # The backward pass on a GPU needs these values; the backward pass below computes them again.
    lse = torch.empty(query.shape[1], query.shape[0])
    return found, lse, torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _attend_backward_on_cpu(
    grad,
    query,
    key,
    value,
    out,
    lse,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal,
    rng,
    scale=None,
    window_size=(-1, -1),
):
    repeats = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scale = scale or query.shape[-1] ** -0.5
    grads = [torch.zeros(t.shape, dtype=torch.float32) for t in (query, wide_key, wide_value)]
    for rows, columns, unseen in blocks(cu_seq_q, window_size[0]):
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
    AttentionInterface.register("sdpa", sdpa)


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


AttentionInterface.register(DOCUMENTS, documents)
