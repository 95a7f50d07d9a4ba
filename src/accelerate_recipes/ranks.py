"""Ranks: this process in its launch, as the launcher's variables describe it, its random state, and collectives.

The variables give numbers, precision and compilation, so these are known before there is a process group. Without a launcher
there is one process. The collectives also work without a process group.

With `parallelism_config_cp_size: N` in the accelerate YAML, N neighbouring ranks share each row (see `models.shared_rows`).
They read the same rows, so they count as one rank for the data.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from accelerate_recipes.errors import printable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

# Names of the sizes in a `parallelism_config`.
PARALLEL_SIZES = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")


def variables(env: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the launcher's variables; by default those of this process.

    No default argument holds `os.environ`: `datasets` 5.2 puts a copy in its place after a `map` with workers.
    """
    return os.environ if env is None else env


def is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("true", "1")


def is_one_of(env: Mapping[str, str], name: str, *values: str) -> bool:
    return env.get(name, "").upper() in values


def is_compiled(env: Mapping[str, str] | None = None) -> bool:
    return variables(env).get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO"


def computes_in_bf16(precision: str | None = None) -> bool:
    """Tell whether layers compute in bf16 while weights are in fp32.

    `precision` is `mixed_precision` of the accelerate YAML; default: that of this launch. With fp8, the linear layers
    get their inputs in bf16, and everything else computes in bf16.
    """
    return (precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) in ("bf16", "fp8")


def rank() -> int:
    """Return the number of this process among all processes."""
    return int(os.environ.get("RANK", 0))


def is_first() -> bool:
    """Tell whether this is rank 0, which writes and prints for all."""
    return rank() == 0


def print_first(text: str) -> None:
    """Print on rank 0. Control characters, which the data may contain, are escaped."""
    if is_first():
        print(printable(text), flush=True)


def is_first_of_machine() -> bool:
    """Tell whether this is the first process of its machine."""
    return place_on_machine()[0] == 0


def place_on_machine() -> tuple[int, int]:
    """Return the number of this process among those of its machine, and how many they are."""
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def ranks_a_row(env: Mapping[str, str] | None = None) -> int:
    """Return how many ranks share a row; at least 1."""
    env = variables(env)
    is_used = is_on(env, "ACCELERATE_USE_PARALLELISM_CONFIG")
    return max(1, int(env.get("PARALLELISM_CONFIG_CP_SIZE", 1))) if is_used else 1


def data_rank() -> int:
    """Return the index of this process's share of the data. Ranks that share rows have the same index."""
    return rank() // ranks_a_row()


def data_world_size(env: Mapping[str, str] | None = None) -> int:
    """Return the number of shares of the data: the number of processes, or of groups that share rows."""
    env = variables(env)
    return max(1, int(env.get("WORLD_SIZE", 1)) // ranks_a_row(env))


def readers(shares: int, size: int) -> str:
    """Name the shares of the data in words: processes, or groups of `size` processes that share rows."""
    if size == 1:
        return f"{shares} processes"
    return f"{shares} group{'s' if shares > 1 else ''} of {size} processes that share rows"


def share(items: Sequence[T]) -> Sequence[T]:
    """Return this rank's share of `items`: every n-th, of n ranks."""
    return items[rank() :: dist.get_world_size()] if dist.is_initialized() else items


def on_all_data_ranks(value: Any) -> list:
    """Gather on every rank the value of each share of the data, once for ranks that share rows."""
    return on_all_ranks(value)[:: ranks_a_row()]


def on_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """Gather each rank's value on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_first_rank(compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `compute` on rank 0. Return its result on every rank, or raise its error on every rank."""
    if not dist.is_initialized():
        return compute()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def raise_on_all(error: BaseException | None) -> None:
    """Raise on every rank the error of the first rank that has one."""
    for raised in on_all_ranks(error):
        if raised is not None:
            raise raised


def gather_when_done(compute: Callable[[], T] | None) -> list[T | None]:
    """Call `compute` in a thread, and gather the results of all ranks. It may take longer than a collective waits.

    A rank that has nothing to do gives None. If it raises on one rank, every rank raises the same error.
    """
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(compute or (lambda: None))
        while not all(on_all_ranks(not wait([done], timeout=30).not_done)):
            pass
    raise_on_all(done.exception())
    return on_all_ranks(done.result())


def local_main_process_first(compute: Callable[[], T]) -> T:
    """Call `compute` on every rank, but first on one rank of each machine, which fills the caches for the others.

    If it raises on one rank, every rank raises the same error: to wait for a failed rank would give another error.
    """
    result: Any = None
    error = None
    for turn in (True, False):
        if is_first_of_machine() == turn:
            try:
                result = compute()
            except Exception as raised:
                error = raised
        raise_on_all(error)
    return result


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks, in place, on the device. This does not wait for the device."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks. This waits for the device."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def is_sharded(tensor: torch.Tensor | None) -> "TypeGuard[DTensor]":
    """Tell whether a tensor is one of FSDP2, a DTensor, of which this rank holds a shard."""
    from torch.distributed.tensor import DTensor  # a third of a second more to import than all that arguments need

    return isinstance(tensor, DTensor)


def rng_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, in a form that `weights_only=True` can load."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # no tensor: each step keeps a state, which `plan` would count
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, np.asarray(keys), *rest))  # earlier checkpoints hold a tensor
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
