"""Sums of token losses, and the number of tokens they are sums over. The engine divides one by the other."""

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed cross-entropy of a causal language model, in nats, as an fp32 scalar.

    `batch` holds `input_ids`, `position_ids` and `labels`, each (B, T). Labels stand at the token's own position
    (the convention of transformers: logits at t predict the label at t + 1); IGNORE_INDEX is no target.

    No attention mask is passed: transformers reads the documents of a packed row from the position ids that
    restart, and keeps attention inside each.
    """
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    # Shift the labels rather than the logits: slicing (B, T, V) would copy it.
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def count_next_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Number of targets in the batch, as a scalar on its device. The label at position 0 is never one."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
