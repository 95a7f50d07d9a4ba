"""Ranks that read a pretrained model by slices, and compare it with what transformers loads in one process."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from accelerate_recipes.models import slices
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.weights import all_places
from accelerate_recipes.ranks import on_all_ranks

CPU = torch.device("cpu")
BY_SLICES = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    """Shard a model as the recipes do: a unit for each layer, and one for the rest."""
    layers = set(model._no_split_modules or ())
    for module in reversed([module for module in model.modules() if type(module).__name__ in layers]):
        fully_shard(module)
    return fully_shard(model)


def loaded(folder: str, dtype: torch.dtype, by_slices: bool) -> PreTrainedModel:
    os.environ |= BY_SLICES if by_slices else {"ACCELERATE_USE_FSDP": "false"}
    return load_model(folder, "eager", dtype=dtype)


def values_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tensors = {place.name: place.tensor.detach() for place in all_places(model)}
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def compare(folder: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the bytes that all ranks read over those in the files, and the names of weights that differ in a bit."""
    model = loaded(folder, dtype, by_slices=True)
    source = slices.source_of(model)
    assert source is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    slices.read_slices(sharded(model), source, CPU, CPU)
    found, expected = values_of(model), values_of(loaded(folder, dtype, by_slices=False))
    pairs = {name: (found.get(name), expected.get(name)) for name in found.keys() | expected.keys()}
    differ = [name for name, (a, b) in pairs.items() if a is None or b is None or not torch.equal(a, b)]
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    return {"read": sum(on_all_ranks(sum(source.sizes))) / size, "differ": differ}


def work(rank: int, world: int, compute: Callable[..., Any], cases: Sequence[Any], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=world)
    results = [compute(*case) for case in cases]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads would make a normal end hang now and then


def on_ranks(world: int, compute: Callable[..., Any], cases: Sequence[Any]) -> list[Any]:
    """Call `compute` with each of `cases` on forked ranks; returns what the first rank's calls return."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (world, compute, cases, folder), world, start_method="fork")
        return json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
