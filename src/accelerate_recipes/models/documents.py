"""Documents of packed rows: where they begin, and how a model is told."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

DOCUMENTS = "documents"
# Kernels that read the boundaries of documents; others get a mask, which transformers makes from the positions.
READ_BOUNDARIES = (DOCUMENTS, "flash_attention_2", "flash_attention_3")


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


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions, (B, T), that say where documents begin: of (4, B, T), those before time, height and width."""
    return position_ids[0] if position_ids.ndim == 3 else position_ids


def boundary_arguments(config: PreTrainedConfig, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the document boundaries of a batch as arguments of a model of this configuration; empty if it gets a mask."""
    if config.get_text_config()._attn_implementation not in READ_BOUNDARIES:
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
    masks = transformers.masking_utils.create_masks_for_generate(config, shape, None, None, position_ids=position_ids)
    return {"attention_mask": masks}
