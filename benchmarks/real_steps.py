"""Two optimizer steps of a recipe's trial for real, on forked ranks that exchange over gloo, with what they needed.

plan_shapes.py and memory_limits.py compare that with simulations.
"""

import ctypes
import json
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from harness import MIB, ROOT, peak_begins, status

from accelerate_recipes import distributed
from accelerate_recipes.engine import train_step
from accelerate_recipes.errors import first_line
from accelerate_recipes.models.shared_rows import part_of_rows, row_group
from accelerate_recipes.ranks import data_world_size
from accelerate_recipes.run import Run
from recipe_tools.plan.ledger import Ledger
from recipe_tools.plan.search import Change
from recipe_tools.plan.simulate import Job, load_trial, num_logits, take_steps
from recipe_tools.planning import job_of
from recipe_tools.request import Request, read_request

ALL = 2**10  # more micro-batches than a step has
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
# Thread stacks, blocks of malloc below the threshold, and copies that kernels of a CPU make; stated, not derived.
ALLOWANCE = 48 * MIB


def words_of(**values: int) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def request_of(config: str, words: Sequence[str]) -> Request:
    """Read a run on two ranks of this machine: a config, then flags of the launcher, the recipe and its arguments."""
    return read_request(
        [str(ROOT / f"accelerate_configs/{config}.yaml"), "--nodes", "1", "--gpus-per-node", "2", *words]
    )


def on_cpu(request: Request, changes: Sequence[Change] = ()) -> Job:
    """Make the simulation of a request as it runs on CPUs, with all micro-batches of a step."""
    return replace(job_of(request, "h100", changes), device="cpu", micro_batches=ALL)


@torch.no_grad()
def fill(
    model: torch.nn.Module, seed: int, device: torch.device, storage: torch.device | None = None
) -> torch.nn.Module:
    """Give a model on the meta device weights, all the same."""
    model.to_empty(device=storage or device)
    model.tie_weights()  # pyright: ignore[reportCallIssue]
    for tensor in (*model.parameters(), *model.buffers()):
        distributed.local_shard(tensor).fill_(0.01)
    return model


def prepared(job: Job, limit: int = 0) -> tuple[Run, Any, list[dict[str, Any]]]:
    """Make model, optimizer and micro-batches of a step in this rank, in at most `limit` bytes from now on."""
    args, trial = load_trial(job)
    run = Run(args, distributed.make_accelerator(args))
    if limit:
        most = status("VmData") + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    if args.base_model:  # a pretrained one, of which there is the configuration alone
        distributed.weights.initialize = fill
    run.shard(trial.make_model(trial.config))
    run.model.train()
    number = args.accumulation_steps(data_world_size())
    batches = [{n: v.clone() if torch.is_tensor(v) else v for n, v in trial.batch.items()} for _ in range(number)]
    return run, trial, [part_of_rows(batch, row_group(run.accelerator)) for batch in batches]


def counted(job: Job) -> dict[str, Any]:
    """Count the peak of the second step by the ledger."""
    run, trial, batches = prepared(job)
    with Ledger("cpu", num_logits(trial.config)) as ledger:
        take_steps(ledger, run, trial, batches)
    return {"peak": ledger.peak}


def resident(job: Job) -> dict[str, Any]:
    """Measure the resident peak of the second step, beside what the process holds without model, states and batches."""
    run, trial, batches = prepared(job)
    train_step(run, batches, trial.loss_fn, trial.count_fn)
    states = [value for state in run.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors = [*run.model.parameters(), *run.model.buffers(), *states]
    held = sum(distributed.local_shard(tensor).untyped_storage().nbytes() for tensor in tensors)
    held += sum(value.nbytes for batch in batches for value in batch.values() if torch.is_tensor(value))
    before = peak_begins()
    train_step(run, batches, trial.loss_fn, trial.count_fn)
    return {"resident": held + status("VmHWM") - before}


def limited(job: Job, limit: int) -> dict[str, Any]:
    """Take two steps in at most `limit` bytes besides ALLOWANCE; returns whether weights have changed, and are finite."""
    run, trial, batches = prepared(job, limit + ALLOWANCE)
    before = sums(run.model)
    for _ in range(2):
        train_step(run, batches, trial.loss_fn, trial.count_fn)
    after = sums(run.model)
    return {"trained": after != before and all(map(math.isfinite, after))}


@torch.no_grad()
def sums(model: torch.nn.Module) -> list[float]:
    """Sum what this rank holds of each parameter."""
    return [distributed.local_shard(p).sum(dtype=torch.float64).item() for p in model.parameters()]


def on_ranks(job: Job, work: Callable[[Job], dict[str, Any]]) -> list[dict[str, Any]]:
    """Do `work` in a fork for each rank; returns their results, {"died": why} for one that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = job.env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = []
    for rank in range(int(job.env["WORLD_SIZE"])):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""})
            result = in_rank(replace(job, env=dict(os.environ)), work)
            os.write(write, json.dumps(result).encode())
            os._exit(0)
        os.close(write)
        started.append((pid, read))
    return [result_of(pid, read) for pid, read in started]


def in_rank(job: Job, work: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)  # tensors are mapped, and given back when they are freed
    libc.mallopt(MMAP_THRESHOLD, 2**16)
    libc.mallopt(TRIM_THRESHOLD, 2**16)
    try:
        return work(job)
    except BaseException as error:
        return {"died": f"{type(error).__name__}: {first_line(error)[:200]}"}


def result_of(pid: int, read: int) -> dict[str, Any]:
    with os.fdopen(read, encoding="utf-8") as pipe:
        found = pipe.read()
    _, code = os.waitpid(pid, 0)
    if found:
        return json.loads(found)
    code = os.waitstatus_to_exitcode(code)
    return {"died": f"exit code {code}" if code >= 0 else signal.Signals(-code).name}
