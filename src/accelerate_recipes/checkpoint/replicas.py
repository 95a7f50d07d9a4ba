"""Comparison of the replicas of a run: under DDP and HSDP, weights and states of the optimizer are the same bits on each."""

from collections import Counter
from collections.abc import Iterator

import torch
import xxhash
from accelerate import Accelerator
from torch import nn

from accelerate_recipes.distributed import shard_world_size
from accelerate_recipes.errors import ReplicaError, first_few
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.optim import local_shard
from accelerate_recipes.ranks import on_all_ranks

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SHOWN = 3  # names of tensors in a message


def check_replicas(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare weights and states of the optimizer over the replicas; call it on every rank.

    Raises:
        ReplicaError: naming the ranks that differ from most replicas; of two replicas, no one knows which is right.
    """
    sums = checksums(model, optimizer, accelerator.device)
    digests = on_all_ranks(xxhash.xxh3_64_hexdigest(repr(sums).encode()))
    shards = shard_world_size(accelerator)
    wrong: dict[int, int] = {}  # ranks that differ, with one that they differ from
    for shard in range(shards):
        ranks = range(shard, len(digests), shards)  # those that hold the same part of each tensor, one a replica
        (usual, number), *others = Counter(digests[rank] for rank in ranks).most_common()
        right = next(rank for rank in ranks if digests[rank] == usual)
        has_majority = 2 * number > len(ranks)
        wrong |= {rank: right for rank in ranks if others and (digests[rank] != usual or not has_majority)}
    if not wrong:
        return
    all_sums = on_all_ranks(sums)
    there = {name for rank, right in wrong.items() for name in sums if all_sums[rank][name] != all_sums[right][name]}
    names = sorted(there, key=[*sums].index)
    held = [f"rank {rank} (replica {rank // shards})" for rank in sorted(wrong)]
    vote = "" if 2 * len(wrong) < len(digests) else "; no majority tells which of them is right"
    raise ReplicaError(
        f"the replicas differ: {', '.join(held)}, in {first_few(names, SHOWN)}{vote}. It is hardware or a race"
    )


def checksums(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Sum the bits of each weight, and of each state of the optimizer, as integers; one flipped bit changes the sum.

    Nothing but the sums is allocated. This waits for the device once.
    """
    found = dict(tensors_of(model, optimizer))
    if not found:
        return {}
    sums = [tensor.view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in found.values()]
    stacked = torch.stack([value.to(device, non_blocking=True) for value in sums])
    return dict(zip(found, stacked.tolist(), strict=True))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of each weight and of each state of the optimizer, with its name."""
    for name, parameter in model.named_parameters():
        name = WRAPPERS.sub("", name)
        yield name, local_shard(parameter.detach())
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{kind} of {name}", local_shard(value.detach())
