"""Optimizers and learning-rate schedule."""

import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from transformers.pytorch_utils import Conv1D

from accelerate_recipes.args import OWN_SCHEDULES, TrainArgs
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.ranks import computes_in_bf16, is_first, is_sharded

# Bytes of a parameter in a checkpoint: the weight and its optimizer state. The means of Adafactor are negligible. Muon
# keeps one moment of a matrix, AdamW two.
_STATE_BYTES = {"adamw_torch_fused": 12, "adamw_bf16_kahan": 8, "adafactor": 4, "adamw_8bit": 6, "muon": 12}
# Biases, which may have several dimensions: those of experts (GPT-OSS), and tables of biases by distance (T5, Swin).
_BIAS = re.compile(r"(^|[._])bias(es)?(_[^.]*)?(\.weight)?$")
# Classes of norms, which may have a weight for each head (Cohere), and the names of those of other classes (Inkling 2).
_NORM_CLASS, _NORM = re.compile(r"Norm(?![a-z])"), re.compile(r"norm\d*$")


def checkpoint_bytes(args: TrainArgs, trained: int, state_dict_type: str | None, by_muon: int) -> int:
    """Compute the size of a checkpoint of `trained` parameters, some `by_muon`. FULL_STATE_DICT holds the weights twice."""
    again = args.param_dtype.itemsize if state_dict_type == "FULL_STATE_DICT" else 0
    return trained * (_STATE_BYTES[args.optim] + again) - 4 * by_muon


def trained_by_muon(model: nn.Module, args: TrainArgs) -> dict[str, nn.Parameter]:
    """Find the parameters that Muon trains; with another --optim there are none.

    These are the matrices of linear layers, and the stacks of matrices of experts, in the layers of a list. AdamW trains
    everything else: embeddings, output layers, routers, convolutions, vectors, and matrices of one row or column.
    """
    if args.optim != "muon":
        return {}
    routers = tuple(f"{name}." for name, module in model.named_modules() if "Router" in type(module).__name__)
    matrices = {}
    for name, module in model.named_modules():
        is_hidden = any(part.isdecimal() for part in name.split(".")) and not f"{name}.".startswith(routers)
        for key, parameter in module.named_parameters(recurse=False) if is_hidden else ():
            is_linear = isinstance(module, (nn.Linear, Conv1D)) and parameter.ndim == 2 and min(parameter.shape) > 1
            is_stack = parameter.ndim == 3 and min(parameter.shape) > 1 and not isinstance(module, nn.Conv1d)
            if parameter.requires_grad and (is_linear or is_stack):
                matrices[f"{name}.{key}"] = parameter
    if not matrices:
        raise ConfigError(
            "--optim muon trains the matrices of hidden layers, and this run trains none; choose another --optim"
        )
    return matrices


def optimizer_fn(model: nn.Module, args: TrainArgs) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that builds the optimizer of `args` on `model` once it is sharded.

    Matrices get weight decay; biases, norms and other parameters with fewer than two dimensions do not. The names of
    these are collected before sharding, because FSDP1 makes every parameter flat.
    """
    norms = {
        name
        for name, module in model.named_modules()
        if _NORM.search(name) or _NORM_CLASS.search(type(module).__name__)
    }
    not_decayed = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or _BIAS.search(name) or name.rpartition(".")[0] in norms
    }
    matrices = set(trained_by_muon(model, args))

    def make_optimizer(sharded: nn.Module) -> torch.optim.Optimizer:
        orthogonal, decayed, spared = [], [], []
        for name, parameter in sharded.named_parameters():
            if parameter.requires_grad:
                name = WRAPPERS.sub("", name)
                kind = orthogonal if name in matrices else spared if name in not_decayed else decayed
                kind.append(parameter)
        groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": spared, "weight_decay": 0.0}]
        # Leave out an empty group, because a checkpoint could not restore it. Adapters, for example, are all matrices.
        groups = [group for group in groups if group["params"]]
        if args.optim == "adafactor":
            return Adafactor(groups, args.learning_rate)
        adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        if args.optim == "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit  # not among the requirements

            return AdamW8bit(groups, **adam)
        if args.optim == "muon":
            # bf16 is precise enough for the direction of an update, but would make it depend on the number of ranks.
            dtype = torch.bfloat16 if computes_in_bf16() and orthogonal[0].is_cuda else torch.float32
            return Muon({"params": orthogonal, "weight_decay": args.weight_decay}, groups, dtype, **adam)
        # A fused step is one kernel, on CPU and GPU, for plain tensors and for DTensors.
        return (KahanAdamW if args.optim == "adamw_bf16_kahan" else torch.optim.AdamW)(groups, **adam, fused=True)

    return make_optimizer


class KahanAdamW(torch.optim.AdamW):
    """AdamW for weights in bf16 that keeps the rounding error of each update and adds it to the next update.

    bf16 has 8 bits of precision: an update of less than 1/512 of a weight is lost. This optimizer needs 8 bytes a
    parameter (weight, two moments, compensation) and 2 for the gradient, instead of 16. The second moment is in bf16
    too. With a beta2 above 0.996 it can get stuck, because the amount by which it should fall in a step is rounded away.

    Source: Zamirai et al., Revisiting BFloat16 Training, 2020, algorithm 1 (Kahan summation); torchdistx's
    AnyPrecisionAdamW.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            params, grads, exp_avgs, exp_avg_sqs, steps = [], [], [], [], []
            self._init_group(group, params, grads, exp_avgs, exp_avg_sqs, [], steps)
            for parameter in params:
                if "compensation" not in self.state[parameter]:
                    self.state[parameter]["compensation"] = torch.zeros_like(parameter)
            compensations = [self.state[parameter]["compensation"] for parameter in params]
            # Each element is updated by itself, so a rank can update its shards as plain tensors.
            tensors = (params, grads, exp_avgs, exp_avg_sqs, compensations)
            params, grads, exp_avgs, exp_avg_sqs, compensations = ([local_shard(t) for t in ts] for ts in tensors)
            # A compensation holds what earlier roundings have lost of a weight. AdamW's kernel adds its update to the
            # compensation, in place of the weight; `add_compensated_` then adds the sum to the weight and rounds once.
            # Weight decay comes later too, since it is a share of the weight, not of the compensation.
            adamw(
                compensations, grads, exp_avgs, exp_avg_sqs, [], steps, fused=True, amsgrad=False, maximize=False,
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], weight_decay=0.0,
            )  # fmt: skip
            add_compensated_(params, compensations, group["lr"] * group["weight_decay"])


@torch.library.custom_op("accelerate_recipes::add_compensated_", mutates_args=("weights", "compensations"))
def add_compensated_(weights: list[torch.Tensor], compensations: list[torch.Tensor], decay: float) -> None:
    """Decay the weights and add the compensations to them. A compensation then holds what this rounding has lost.

    On a GPU, one kernel reads and writes each number once. Elsewhere, and where Triton has no C compiler, five operators
    compute the same bits.
    """
    has_compiler = "CC" in os.environ or bool(shutil.which("gcc") or shutil.which("clang"))
    for weight, pending in zip(weights, compensations, strict=True):
        is_flat = weight.is_contiguous() and pending.is_contiguous()
        if weight.device.type == "cuda" and weight.dtype == torch.bfloat16 and is_flat and has_compiler:
            from accelerate_recipes.models.kernels import add_compensated  # Triton comes with torch for GPUs

            add_compensated(weight, pending, decay)
        else:
            pending.add_(weight, alpha=-decay)
            rounded = weight + pending
            pending.add_(weight.sub_(rounded))  # subtracts the change that the weight has really made
            weight.copy_(rounded)


@add_compensated_.register_fake
def _(weights: list[torch.Tensor], compensations: list[torch.Tensor], decay: float) -> None:
    pass


class Grid(NamedTuple):
    """Ranks that hold a parameter, as replicas x shards. A group is None where it would have one rank."""

    replicas: int = 1
    replica: int = 0
    among_replicas: dist.ProcessGroup | None = None
    shards: int = 1
    shard: int = 0
    among_shards: dist.ProcessGroup | None = None


def grid_of(parameter: torch.Tensor) -> Grid:
    if not is_sharded(parameter):  # one process, or DDP
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        return Grid() if is_alone else Grid(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    mesh, dims = parameter.device_mesh, {}
    for dim, placement in enumerate(parameter.placements):
        group = mesh.get_group(dim) if mesh.size(dim) > 1 else None
        dims[placement.is_shard()] = (mesh.size(dim), mesh.get_local_rank(dim), group)
    return Grid(*dims.get(False, (1, 0, None)), *dims.get(True, (1, 0, None)))


class Muon(torch.optim.AdamW):
    """Muon for the matrices of hidden layers, AdamW for everything else, with one learning rate and weight decay.

    Muon replaces the mean gradient of a matrix by a matrix near it whose singular values are about 1, so that rare
    directions learn as fast as frequent ones. Its update has the size of AdamW's, so that one learning rate fits both.

    Each matrix is made orthogonal once in the world. The shards of a matrix go to the rank that owns it in one all-to-all,
    a second one brings them back. Replicas share the matrices and broadcast them. Experts lie whole in a shard, so they
    need no all-to-all. The mean is sharded as the weight is, so a checkpoint is resharded as AdamW's is.

    Sources: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable for
    LLM Training, 2025 (size of the update). `torch.optim.Muon` of torch 2.13 gathers each sharded matrix on all ranks in
    each product, and refuses stacks of matrices.
    """

    def __init__(self, matrices: dict, groups: list[dict], dtype: torch.dtype, momentum: float = 0.95, **adam):
        self.dtype, self.momentum = dtype, momentum
        super().__init__(
            [matrices | {"is_muon": True}, *(group | {"is_muon": False} for group in groups)], **adam, fused=True
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            if group["is_muon"]:
                self._step_matrices(group)
                continue
            params, grads, exp_avgs, exp_avg_sqs, steps = [], [], [], [], []
            self._init_group(group, params, grads, exp_avgs, exp_avg_sqs, [], steps)
            tensors = (params, grads, exp_avgs, exp_avg_sqs)
            params, grads, exp_avgs, exp_avg_sqs = ([local_shard(t) for t in ts] for ts in tensors)
            adamw(
                params, grads, exp_avgs, exp_avg_sqs, [], steps, fused=True, amsgrad=False, maximize=False, lr=group["lr"],
                beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], weight_decay=group["weight_decay"],
            )  # fmt: skip

    def _step_matrices(self, group: dict) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        stacks = [parameter for parameter in parameters if parameter.ndim == 3]
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        for stack in stacks:
            direction, grid = self._direction(stack), grid_of(stack)
            for replica, part in enumerate(direction.tensor_split(grid.replicas)):
                if replica == grid.replica:
                    part.copy_(orthogonal(part))
                if grid.among_replicas and part.numel():
                    dist.broadcast(part, group_src=replica, group=grid.among_replicas)
            self._update(group, stack, direction)
        grid = grid_of(matrices[0]) if matrices else Grid()
        for owned in rounds([parameter.shape for parameter in matrices], grid.replicas * grid.shards):
            directions = {i: self._direction(matrices[i]) for i in owned if i is not None}
            for replica in range(grid.replicas):
                of_replica = owned[replica * grid.shards :][: grid.shards]
                if replica == grid.replica:
                    make_orthogonal(matrices, directions, of_replica, grid)
                for i in of_replica if grid.among_replicas else ():
                    if i is not None and directions[i].numel():
                        dist.broadcast(directions[i], group_src=replica, group=grid.among_replicas)
            for i, direction in directions.items():
                self._update(group, matrices[i], direction)

    def _direction(self, parameter: nn.Parameter) -> torch.Tensor:
        """Add this rank's shard of the gradient to its mean; return the shard of the next mean (Nesterov's momentum)."""
        state, grad = self.state[parameter], local_shard(parameter.grad)
        if not state:
            state["step"] = torch.zeros(())  # not used; AdamW reads it when states are loaded
            state["momentum"] = torch.zeros_like(parameter)
        average = local_shard(state["momentum"]).lerp_(grad, 1 - self.momentum)
        return grad.lerp(average, self.momentum).to(self.dtype)

    def _update(self, group: dict, parameter: nn.Parameter, direction: torch.Tensor) -> None:
        weight, size = local_shard(parameter), 0.2 * math.sqrt(max(parameter.shape[-2:]))
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"] * size)


def rounds(shapes: list[torch.Size], num_owners: int) -> list[list[int | None]]:
    """Give each matrix to the owner with the least work so far, the largest first.

    Returns:
        For each round, the index of one matrix for each owner, or None.
    """
    work, owned = [0] * num_owners, [[] for _ in range(num_owners)]
    cost = [2 * min(shape) ** 2 * max(shape) + min(shape) ** 3 for shape in shapes]  # multiplications of an iteration
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        owner = work.index(min(work))
        work[owner] += cost[i]
        owned[owner].append(i)
    return list(map(list, itertools.zip_longest(*owned)))


def make_orthogonal(matrices: list, directions: dict[int, torch.Tensor], owned: list[int | None], grid: Grid) -> None:
    """Make one matrix for each rank that shares them orthogonal; replaces the shards of `directions` that are `owned`."""
    from torch.distributed.tensor import Shard

    own, shards = owned[grid.shard], [directions[i] for i in owned if i is not None]
    if not shards:
        return
    rows, columns = (0, 0) if own is None else matrices[own].shape
    sends = [0 if i is None else directions[i].numel() for i in owned]
    receives = [Shard.local_shard_size_and_offset(rows, grid.shards, s)[0] * columns for s in range(grid.shards)]
    parts = whole = torch.cat([shard.flatten() for shard in shards])
    if grid.among_shards:
        whole = parts.new_empty(rows * columns)
        dist.all_to_all_single(whole, parts, receives, sends, group=grid.among_shards)
    if own is not None:
        whole = orthogonal(whole.view(rows, columns)).flatten()
    if grid.among_shards:
        dist.all_to_all_single(parts, whole, sends, receives, group=grid.among_shards)
    else:
        parts = whole
    for shard, part in zip(shards, parts.split([shard.numel() for shard in shards]), strict=True):
        shard.copy_(part.view_as(shard))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors and singular values of about 1, or a stack of them (..., m, n).

    Five steps of Newton and Schulz's iteration, with the coefficients and the operators of `torch.optim.Muon`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(5):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


class Adafactor(torch.optim.Optimizer):
    """Adafactor without a first moment, as it trained T5. For a matrix it keeps the mean squares of rows and columns.

    The learning rate is given from outside, as in `transformers.TrainingArguments`: no relative step, no scaling by the
    parameter. The versions of torch 2.13 and transformers 5.23 fail on DTensors, and so on the shards of FSDP2. Here,
    small all-reduces take each mean over the whole parameter, so a step is the same as on one process.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018, algorithms 4 and 5.
    """

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(self.state[parameter], parameter.grad)
                    parameter, update = local_shard(parameter), local_shard(update)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def _update(self, state: dict[str, torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
        square = grad.square().add_(1e-30)
        means = {"row": mean(square, -1), "column": mean(square, -2)} if grad.ndim > 1 else {"element": square}
        if not state:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(value) for name, value in means.items()})
        state["step"] += 1
        for name, value in means.items():
            state[name].lerp_(value, state["step"].item() ** -0.8)
        # The mean square of an element is estimated by (row mean) x (column mean) / (mean of the row means).
        if grad.ndim > 1:
            row = state["row"] / mean(state["row"], -1).unsqueeze(-1)
            update = grad * row.rsqrt().unsqueeze(-1) * state["column"].rsqrt().unsqueeze(-2)
        else:
            update = grad * state["element"].rsqrt()
        # Scale the update down if its root mean square is above the threshold.
        rms = (whole(update.square().sum()) / update.numel()).sqrt()
        update = update / rms.clamp(min=1.0)
        # For a parameter of one row, of which some ranks hold nothing, DTensor leaves the whole update on all ranks.
        return update.redistribute(placements=grad.placements) if is_sharded(grad) else update


def mean(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute a mean over all ranks that share the dimension. DTensor's own mean gives uneven shards equal weight."""
    return whole(tensor.sum(dim)) / tensor.shape[dim]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Complete a DTensor that is a partial sum over shards. Anything else is returned unchanged."""
    if is_sharded(tensor):
        from torch.distributed.tensor import Replicate

        done = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=done)
    return tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainArgs, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Make the schedule over `total_steps` optimizer steps. Step it once after each optimizer step.

    The warm-up starts at 0. After it, the learning rate falls to `min_lr_ratio` of the peak and stays there, or follows a
    schedule of transformers.

    Raises:
        ConfigError: for settings that the schedule does not take, or that do not fit `total_steps`.
    """
    raise_problems("This run cannot train", [*args.schedule_problems(total_steps)])
    if is_first():
        for warning in warmup_warnings(args, total_steps):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    warmup = args.num_warmup_steps(total_steps)

    def share_of_peak(step: int) -> float:
        if step < warmup:
            return step / warmup
        falling = max(1, total_steps - warmup)
        shape = {
            "constant_with_warmup": 1.0,
            "linear": max(0.0, (total_steps - step) / falling),
            "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / falling))),
        }[args.lr_scheduler_type]
        return args.min_lr_ratio + (1 - args.min_lr_ratio) * shape

    if args.lr_scheduler_type in OWN_SCHEDULES:
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)
    else:
        from transformers import get_scheduler  # seconds, since it imports PEFT, which only these schedules need

        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, warmup, total_steps, args.lr_scheduler_kwargs)
    factors = [(one.first_step(total_steps), one.lr_factor) for one in args.phases if one.lr_factor is not None]
    if factors:

        def factor(step: int) -> float:
            return next((value for begin, value in reversed(factors) if begin <= step), 1.0)

        scheduler.lr_lambdas = [lambda step, of=of: of(step) * factor(step) for of in scheduler.lr_lambdas]
    return scheduler


def warmup_warnings(args: TrainArgs, total_steps: int) -> list[str]:
    """Warn, in one sentence, if a run ends before its learning rate reaches the peak."""
    warmup = args.num_warmup_steps(total_steps)
    if warmup < total_steps or args.lr_scheduler_type == "constant":
        return []
    return [
        f"--warmup_steps {args.warmup_steps:g} of {total_steps} steps: the learning rate only rises, to "
        f"{(total_steps - 1) / warmup:.0%} of its peak; lower it, or give a share of all steps, such as 0.03"
    ]
