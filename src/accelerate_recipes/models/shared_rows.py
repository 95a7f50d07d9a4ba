"""Rows that several ranks share: each rank holds some positions of a row and, inside attention, some of the heads.

Except in attention, each position is computed by itself. So a rank that holds T / N of a row's T positions needs 1 / N
of the activations. Before attention, an all-to-all gives each rank all T positions of 1 / N of the heads; after
attention, another gives back its own positions of all heads. The kernel sees whole rows, so documents and windows are as
in one process, and nothing is approximated.

`parallelism_config_cp_size: N` in the accelerate YAML asks for this. The ranks of a row are neighbours. The weights are
sharded over all ranks, as without it.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate import Accelerator

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.documents import DOCUMENTS

_rows_are_whole = False


def row_group(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """Return the ranks that share rows with this rank, or None if it shares none."""
    mesh = accelerator.torch_device_mesh
    return mesh["cp"].get_group() if mesh is not None and "cp" in (mesh.mesh_dim_names or ()) else None


def part_of_rows(batch: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return this rank's part of a batch of packed rows; the batch is the same on all ranks of the group.

    Boundaries of documents still describe whole rows. `labels` has one column more than `input_ids`, (B, T / N + 1),
    because the last position predicts the first token of the next rank. `row_position_ids` are the position ids of whole
    rows, (B, T).

    Raises:
        ConfigError: for rows that the ranks cannot divide evenly.
    """
    if group is None:
        return batch
    row = batch["input_ids"].shape[1]
    length, rest = divmod(row, group.size())
    if rest:
        raise ConfigError(f"parallelism_config_cp_size {group.size()} does not divide rows of {row} tokens")
    start = group.rank() * length
    with_next = slice(start, start + length + 1)
    part = {
        "input_ids": batch["input_ids"][:, start : start + length],
        "position_ids": batch["position_ids"][:, start : start + length],
        "labels": F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, with_next],
        "row_position_ids": batch["position_ids"],
        "sequence_group": group,
    }
    if "source" in batch:  # of a mixture
        part["source"] = F.pad(batch["source"], (0, 1))[:, with_next]
    return batch | part


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Compute with rows that no other rank shares, such as a text that is generated, inside this context."""
    global _rows_are_whole
    before, _rows_are_whole = _rows_are_whole, True
    try:
        yield
    finally:
        _rows_are_whole = before


def share_attention() -> None:
    """Make this process share attention from now on.

    transformers passes `sequence_group`, an argument of the model, on to attention; layers whose activations are
    recomputed get it again. A call without it is an error, unless `whole_rows` is active.
    """
    import accelerate_recipes.models.document_attention  # noqa: F401  # which registers it; torch's takes a second

    for name in (DOCUMENTS, "sdpa"):
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[name]
        if getattr(attend, "func", None) is not attend_shared:
            transformers.AttentionInterface.register(name, partial(attend_shared, attend))


def attend_shared(
    attend: Callable,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Compute `attend`, an attention function of transformers, on rows that the ranks of `sequence_group` share.

    Args:
        query: (B, H, T / N, D); key and value (B, H or a divisor, T / N, D).
        attention_mask: mask of whole rows; `settings` describe whole rows too.

    Returns:
        (B, T / N, H, D).

    Raises:
        ConfigError: for a model that did not pass the group on: its attention would see only this rank's part of a row.
    """
    if sequence_group is None:
        if not _rows_are_whole:
            raise ConfigError(
                f"{type(module).__name__} did not get the ranks that share its rows, so it would see only a part of each; "
                "set parallelism_config_cp_size to 1"
            )
        return attend(module, query, key, value, attention_mask, **settings)
    size, heads = sequence_group.size(), key.shape[1]
    # The ranks divide the heads. Where they do not divide those of keys and values, repeat these until they do.
    if copies := math.lcm(heads, size) // heads - 1:
        key, value = (tensor.repeat_interleave(copies + 1, 1) for tensor in (key, value))
        groups = query.shape[1] // key.shape[1]
        causal = getattr(module, "is_causal", True)
        module = SimpleNamespace(num_key_value_groups=groups, is_causal=causal, training=module.training)
    # From (B, heads, part of T, D) to (B, part of the heads, T, D). `attend` returns (B, T, part of the heads, D), which
    # the last exchange turns into (B, part of T, heads, D).
    query, key, value = (Exchange.apply(tensor, sequence_group, 1, 2) for tensor in (query, key, value))
    output, _ = attend(module, query, key, value, attention_mask, **settings)
    return Exchange.apply(output, sequence_group, 1, 2), None


class Exchange(torch.autograd.Function):
    """Autograd function of `exchange`; its backward pass exchanges the gradient back."""

    @staticmethod
    def forward(ctx, tensor, group, split, join):
        ctx.way_back = group, join, split
        return exchange(tensor, group, split, join)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.way_back), None, None, None


def exchange(tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
    """Redistribute a tensor: a rank holds all of `split` and a part of `join`, and gets a part of `split` and all of `join`.

    `split` and `join` are dimensions.
    """
    # Part r of `split` goes to rank r. What comes from rank r is its part of `join`.
    sent = torch.stack(tensor.chunk(group.size(), split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)


def balance_of_rows(
    router_logits: tuple[torch.Tensor, ...], top_k: int, num_targets: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute this rank's loss that balances experts. Its mean over the ranks of `group` is the loss of whole rows.

    It is the model's own loss, except that the experts' shares of the tokens, which have no gradient, are means over all
    ranks of the group.

    Returns:
        The loss, and the mean over the ranks of `num_targets`.
    """
    # The loss is E * sum over experts of (share of tokens sent to the expert) * (its mean probability). The loss is
    # linear in the latter, so only the shares must be averaged over the ranks. The same all-reduce averages the counts.
    probabilities = torch.cat([logits.flatten(0, -2) for logits in router_logits]).float().softmax(-1)
    num_tokens, num_experts = probabilities.shape
    chosen = probabilities.topk(top_k).indices.flatten()
    shares = probabilities.new_zeros(num_experts).index_add(0, chosen, probabilities.new_ones(len(chosen))) / num_tokens
    means = torch.cat([shares, num_targets[None]])
    if group is not None:
        dist.all_reduce(means, group=group)
        means /= group.size()
    return num_experts * (means[:-1] * probabilities.mean(0)).sum(), means[-1]
