"""Ledger of the resources that operators use: memory by kind, collectives, FLOPs, and a lower bound of the time.

It works for fake and for real tensors, on a GPU and on a CPU. So a simulation can be compared with a run:

    with Ledger("cpu", vocab_size) as ledger:
        ledger.watch(model, optimizer)
        ...                                     a step
        ledger.begin_step()
        ...                                     the step that counts

The ledger counts the memory of a storage from the first operator that returns it until the storage is freed. Memory that an
operator allocates and frees before it returns is counted only for the few operators that use much of it.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # registers its operators
from torch import nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from accelerate_recipes.arguments.gpus import EFFICIENCY, GPUS, Gpu

aten, fsdp = torch.ops.aten, torch.ops.fsdp
PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer", "buffers"
GATHERED, WHOLE_GRADIENTS = "gathered parameters", "whole gradients"  # of the units that FSDP has gathered
ACTIVATIONS, LOGITS, TEMPORARY, INSIDE = "activations", "logits", "temporary", "inside an operator"
BUCKETS = "DDP's buckets"
HOST = "host"  # tensors on the CPU of a run on GPUs; they do not count in the peak
# Position of the group, and of the whole tensors, among the arguments of a collective.
COLLECTIVES = {
    "_allgather_base_": (2, 0), "_reduce_scatter_base_": (2, 1), "allreduce_": (1, 0), "alltoall_base_": (2, 0),
}  # fmt: skip
# On a CPU gloo (torch 2.13) exchanges a copy of the whole tensor; benchmarks/plan_shapes.py measures it.
COPIED_BY_GLOO = {"allgather_base", "reduce_scatter_base"}
# LOOKUPS read only as much of their first argument as they return. UNREAD names an argument that an operator does not read.
LOOKUPS = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
UNREAD = {
    "bernoulli_": 0, "copy_": 0, "fill_": 0, "full_like": 0, "new_ones": 0, "new_zeros": 0, "ones_like": 0, "zero_": 0,
    "zeros_like": 0, "nll_loss_backward": 1,
}  # fmt: skip


class Event(NamedTuple):
    """Change of a storage: its new size and kind; the size is 0 once it is freed."""

    key: int
    size: int
    kind: str
    stream: int


class Phase(NamedTuple):
    """Part of a step: a pass before the micro-batches, a forward pass and what follows it, a backward pass, or the
    optimizer's step.

    A segment lies between two collectives. It records its peak, and the bytes of each kind at the peak.
    """

    name: str
    segments: list[tuple[int, dict[str, int]]]


class Clock:
    """Lower bound of the time on one GPU. Computation and links work in parallel, each at 80 % of its peak."""

    def __init__(self, gpu: Gpu, gpus_per_node: int):
        self.gpu, self.gpus_per_node = gpu, gpus_per_node
        self.reset()

    def reset(self) -> None:
        self.now = self.link = self.copied = 0.0  # end of computation, the link, the last copy out of a gather
        self.compute = self.memory = self.communication = 0.0  # seconds of work; parts run in parallel
        self.gathers: dict[int, float] = {}  # time at which each gathered storage is ready

    @property
    def seconds(self) -> float:
        return max(self.now, self.link)

    def work(self, flops: int, moved: int, dtype: torch.dtype) -> None:
        """Add an operator. Its time is bound by its FLOPs or by the bytes that it reads and writes."""
        rate = self.gpu.fp32 if dtype == torch.float32 else self.gpu.bf16
        by_flops, by_bytes = flops / rate / EFFICIENCY, moved / self.gpu.bandwidth / EFFICIENCY
        self.now += max(by_flops, by_bytes)
        if by_flops > by_bytes:
            self.compute += by_flops
        else:
            self.memory += by_bytes

    def of_node(self, ranks: list[int]) -> int:
        """Count the ranks of a group that are on the node of its first rank."""
        return sum(rank // self.gpus_per_node == ranks[0] // self.gpus_per_node for rank in ranks)

    def is_inside(self, ranks: list[int]) -> bool:
        return self.of_node(ranks) == len(ranks)

    def transfer(self, sent: float, ranks: list[int]) -> float:
        """Compute the seconds in which each rank sends `sent` bytes."""
        speed = self.gpu.nvlink
        if not self.is_inside(ranks):
            speed = min(speed, self.gpu.network * self.of_node(ranks))
        return sent / speed / EFFICIENCY

    def send(self, name: str, sent: float, ranks: list[int], is_awaited: bool) -> None:
        """Add a collective over a ring. If the ring leaves the node, GPUs of a node share the node's network cards."""
        # A gather starts when the previous gather was copied out. Other collectives start when their input is computed.
        begin = self.copied if "gather" in name else self.now
        seconds = self.transfer(sent, ranks)
        self.link = max(self.link, begin) + seconds
        self.communication += seconds
        if is_awaited and "gather" not in name:  # the next operator reads it
            self.now = max(self.now, self.link)


class Ledger(TorchDispatchMode):
    """Record of live storages by kind and their peak, and of collectives and FLOPs, since `begin_step`.

    Args:
        device: type of the device whose memory counts.
        vocab_size: size by which logits are recognised.
        clock: counts time; without one, that of a usual GPU.
    """

    def __init__(self, device: str, vocab_size: int, clock: Clock | None = None):
        super().__init__()
        self.device, self.vocab_size, self.clock = device, vocab_size, clock or Clock(GPUS["h100"], 8)
        self.live: dict[int, tuple[int, str]] = {}  # bytes and kind of a storage
        self.refs: dict[int, weakref.ref] = {}
        self.held: Counter[str] = Counter()
        self.total, self.in_optimizer = 0, False
        self.optimizer = 0.0  # seconds of its last step
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the counters, but keep the live storages."""
        self.peak, self.host_peak = self.total, self.held[HOST]
        self.at_peak = {kind: held for kind, held in self.held.items() if held and kind != HOST}
        self.flops: Counter[str] = Counter()
        self.recomputed = self.value_reads = 0
        self.calls: Counter[str] = Counter()  # by operator
        self.moved: Counter[str] = Counter()  # bytes that operators read and wrote
        self.shapes: set[tuple[int, ...]] = set()  # shapes of results
        self.collectives: dict[tuple[str, int], Counter] = defaultdict(Counter)  # by name and number of ranks
        self.groups: dict[tuple[str, int], list[int]] = {}
        self.phases: list[Phase] = []
        self.after_backward: list[dict[str, Any]] = []  # sums until the end of each backward pass
        self.passes: list[tuple[str, int, dict[str, Any]]] = []  # before the micro-batches: see `begin_pass`
        self.in_pass = ""
        live = self.live.copy()  # the garbage collector may end tensors meanwhile
        self.events = [Event(key, size, kind, 0) for key, (size, kind) in live.items()]
        self.clock.reset()

    def begin_pass(self, name: str, times: int) -> None:
        """Begin a pass before the micro-batches. The step has it `times` times. An empty name ends the last pass."""
        self.passes.append((name, times, self.sums()))
        self.in_pass = name

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Tag parameters, buffers and the optimizer's tensors; call it before the first step and again after it."""
        self.tag(model.parameters(), PARAMETERS)
        self.tag(model.buffers(), BUFFERS)
        self.tag(tree_leaves([list(state.values()) for state in optimizer.state.values()]), OPTIMIZER)
        if not optimizer._optimizer_step_pre_hooks:
            optimizer.register_step_pre_hook(self.begin_optimizer)
            optimizer.register_step_post_hook(self.end_optimizer)

    def begin_optimizer(self, *_: Any) -> None:
        self.in_optimizer, self.optimizer = True, -self.clock.seconds

    def end_optimizer(self, *_: Any) -> None:
        self.in_optimizer, self.optimizer = False, self.optimizer + self.clock.seconds

    def sums(self) -> dict[str, Any]:
        """Copy the sums that grow with the number of micro-batches, as the fields of an `Outcome`."""
        return {
            "flops": sum(self.flops.values()),
            "recomputed": self.recomputed,
            "collectives": {f"{name} {size}": dict(counts) for (name, size), counts in self.collectives.items()},
            **{name: getattr(self.clock, name) for name in ("seconds", "compute", "memory", "communication")},
        }

    def tag(self, tensors: Iterable[Any], kind: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self.put(tensor, kind, retag=True)

    def put(self, tensor: torch.Tensor, kind: str, retag: bool = False) -> None:
        """Enter a tensor's storage. A storage keeps its first kind unless `retag`."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.refs[key] = weakref.ref(storage, lambda _: self.remove(key))
        kind = HOST if tensor.device.type != self.device else kind
        self.change(key, storage.nbytes(), kind if retag or key not in self.live else self.live[key][1])

    def change(self, key: int, size: int, kind: str) -> None:
        old_size, old_kind = self.live.get(key, (0, kind))
        if (old_size, old_kind) == (size, kind) and key in self.live:
            return
        self.live[key] = size, kind
        self.count(key, old_size, old_kind, size, kind)

    def remove(self, key: int) -> None:
        self.refs.pop(key, None)
        size, kind = self.live.pop(key)
        self.count(key, size, kind, 0, kind)

    def count(self, key: int, old_size: int, old_kind: str, size: int, kind: str) -> None:
        self.held[old_kind] -= old_size
        self.held[kind] += size
        self.total += (kind != HOST) * size - (old_kind != HOST) * old_size
        self.host_peak = max(self.host_peak, self.held[HOST])
        stream = torch.cpu.current_stream() if self.device == "cuda" and active_fake_mode() else None
        self.events.append(Event(key, size, kind, id(stream)))
        self.needs(0)

    def needs(self, size: int) -> None:
        """Count memory that an operator allocates and frees before it returns."""
        total = self.total + size
        segment_peak = self.phases[-1].segments[-1][0] if self.phases else 0
        if total > segment_peak:
            kinds = {kind: held for kind, held in self.held.items() if held and kind != HOST}
            if size:
                kinds[INSIDE] = size
            if self.phases:
                self.phases[-1].segments[-1] = total, kinds
            if total > self.peak:
                self.peak, self.at_peak = total, kinds

    def enter_phase(self, begins_segment: bool) -> None:
        """Begin a phase if this operator belongs to another phase than the last one; begin a segment at a collective."""
        is_backward = torch._C._current_graph_task_id() != -1
        name = self.in_pass or ("optimizer" if self.in_optimizer else "backward" if is_backward else "forward")
        if not self.phases or self.phases[-1].name != name:
            if self.phases and self.phases[-1].name == "backward":
                self.after_backward.append(self.sums())
            self.phases.append(Phase(name, []))
            begins_segment = True
        if begins_segment:
            self.phases[-1].segments.append((0, {}))
            self.needs(0)

    def __enter__(self):
        self.outer_mode, self.is_aside = active_fake_mode(), False
        resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # FSDP2 frees and allocates gathered parameters with it; no dispatch sees it
            resize(storage, size)
            if storage._cdata in self.live:
                self.change(storage._cdata, storage.nbytes(), self.live[storage._cdata][1])

        def aside(owner: type, name: str) -> Any:
            """Patch a function so that no operator inside it counts."""
            function = getattr(owner, name)

            def call(*args, **kwargs):
                before, self.is_aside = self.is_aside, True
                try:
                    return function(*args, **kwargs)
                finally:
                    self.is_aside = before

            return mock.patch.object(owner, name, call)

        self.patches = [
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            aside(dist.Work, "wait"),  # meanwhile gloo makes copies that NCCL does not
            # DTensor asks for shapes, on torch 2.11 in the fake mode that is active, and again in each step.
            aside(ShardingPropagator, "_propagate_tensor_meta_non_cached"),
        ]
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *args):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*args)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and it takes time to switch the compiler off for each operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor turn it into operations on this rank's shard
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # half of all dispatches
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if active_fake_mode() is self.outer_mode and not self.is_aside:  # else DTensor asks for shapes
            self.account(func, args, kwargs, out)
        return out

    def account(self, func, args, kwargs, out) -> None:
        """Enter an operator that has run."""
        name = func._schema.name.partition("::")[2]
        self.enter_phase(begins_segment=func.namespace == "c10d" and name in COLLECTIVES)
        if func is aten._local_scalar_dense.default:
            self.value_reads += args[0].device.type == self.device
            return
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        flops = count(*args, **kwargs, out_val=out) if (count := FLOPS.get(func._overloadpacket)) else 0
        if func.namespace == "c10d" and name in COLLECTIVES:
            group, which = COLLECTIVES[name]
            self.communicate(name.strip("_"), dist.ProcessGroup.unbox(args[group]), tree_leaves(args[which]), args[0])
        elif func.namespace == "_c10d_functional" and name == "all_reduce":  # by DTensor, for the gradient norm
            self.communicate(name, dist.distributed_c10d._resolve_process_group(args[2]), [args[0]], args[0])
        elif func is fsdp.split_with_sizes_copy.default:
            self.tag(kwargs["out"], GATHERED)
            arrived = self.clock.gathers.pop(args[0].untyped_storage()._cdata, 0.0)
            self.clock.now = max(self.clock.now, arrived)
        elif name.startswith("chunk_cat"):  # torch 2.15: chunk_cat_mixed_dtype
            self.tag(args[0], WHOLE_GRADIENTS)
        elif name in ("_varlen_attn_backward", "_scaled_dot_product_flash_attention_backward"):
            self.needs(inside_flash_backward(args[1], args[2]))
        first = func._overloadpacket in (aten.addmm, aten.addmm_)  # factors in bf16 may be summed in fp32
        if flops and not self.in_optimizer:  # those of Muon are no use of the model
            self.flops[f"{name} {str(tensors[first].dtype)[6:]}"] += flops
            if builds_graph(func) and torch._C._current_graph_task_id() != -1:
                self.recomputed += flops
        self.calls[name] += 1
        moved = bytes_moved(func, args, kwargs, out)
        self.moved[name] += moved
        if tensors:
            self.clock.work(flops * attended_share(func, args, kwargs) if flops else 0, moved, tensors[first].dtype)
            if func is fsdp.split_with_sizes_copy.default:
                self.clock.copied = self.clock.now
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.shapes.add(tuple(t.shape))
                is_saved = builds_graph(func) and not self.in_optimizer
                is_logits = t.ndim > 1 and t.shape[-1] == self.vocab_size
                self.put(t, LOGITS if is_logits else ACTIVATIONS if is_saved else TEMPORARY)

    def communicate(self, name: str, group: dist.ProcessGroup, tensors: list, out: Any) -> None:
        """Enter a collective; `tensors` are the whole (unsharded) tensors."""
        ranks, size = dist.get_process_group_ranks(group), sum(t.numel() * t.itemsize for t in tensors)
        if len(ranks) == 1:
            return
        sent = size * (len(ranks) - 1) / len(ranks) * (2 if name in ("allreduce", "all_reduce") else 1)  # a ring
        key = name, len(ranks)
        self.collectives[key].update({"calls": 1, "bytes": size, "sent": int(sent)})
        self.groups[key] = ranks
        if self.device == "cpu" and name in COPIED_BY_GLOO:
            self.needs(size)
        self.clock.send(name, sent, ranks, size < 1e6 or name == "alltoall_base")
        if name == "allgather_base":
            self.clock.gathers[out.untyped_storage()._cdata] = self.clock.link
            self.tag([out], GATHERED)
        elif name == "reduce_scatter_base":
            self.tag(tensors, WHOLE_GRADIENTS)
            self.tag([out], GRADIENTS)


def bytes_moved(func, args, kwargs, out) -> int:
    """Count the bytes that an operator reads and writes; a lower bound."""
    name = func._schema.name.partition("::")[2]
    if func.is_view or name.startswith(("empty", "_unsafe_view", "record_grad_output")) or "c10d" in func.namespace:
        return 0
    if name == "all_gather_copy_in":  # copies the shards into the buffer, and returns views of it
        return 2 * tensor_bytes(args[0])
    moved = tensor_bytes((args, kwargs, None if kwargs.get("out") is out else out))
    if name in LOOKUPS:
        moved -= max(0, tensor_bytes(args[0]) - tensor_bytes(out))
    elif name in UNREAD:
        moved -= tensor_bytes(args[UNREAD[name]])
    elif name in ("index_add_", "scatter_"):  # they read and write only the part that they change
        moved -= 2 * max(0, tensor_bytes(args[0]) - tensor_bytes(args[3]))
    elif name == "_fused_adamw_":  # it does not return the tensors that it changes
        moved += tensor_bytes((args[0], args[2], args[3]))
    elif name == "add_compensated_":
        moved *= 2
    elif name.startswith("_foreach_") and name.endswith("_") and name != "_foreach_copy_":
        moved += tensor_bytes(args[0])
    return moved


def tensor_bytes(tree: Any) -> int:
    """Sum the bytes of tensors; an expanded tensor has only the bytes of its storage."""
    tensors = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor))
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def builds_graph(func) -> bool:
    """Tell whether an operator belongs to a forward pass or its recomputation; custom operators run without gradients."""
    return torch.is_grad_enabled() or func in CUSTOM_FORWARD


def inside_flash_backward(query: torch.Tensor, key: torch.Tensor) -> int:
    """Count the bytes inside FlashAttention's backward: the gradient of the queries in fp32, and with fewer key heads than
    query heads, the gradients of keys and values for each query head.
    """
    is_grouped = query.shape[1] != key.shape[1]  # (T, H, D), or (B, H, T, D)
    return query.numel() * (4 + 2 * query.itemsize * is_grouped)


def packed_attention_flops(query, key, value, cu_seq_q, cu_seq_k, max_q, *args, out_val=None, **kwargs) -> int:
    """Count the FLOPs of `_varlen_attn` as if all documents were `max_q` long: fake boundaries have no values."""
    return 2 * query.numel() * max_q * 2


def packed_attention_backward_flops(grad, query, key, value, out, lse, *args, **kwargs) -> int:
    return packed_attention_flops(query, key, value, *args, **kwargs) * 5 // 2  # five products, not two


def attended_share(func, args, kwargs) -> float:
    """Return the share of its FLOPs that an attention kernel computes: it skips what a causal mask or a window hides.

    FLOPs count all pairs of tokens, as MFU does. The time is that of the computed pairs: half of them in a long row.
    """
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    before, after = given.get("window_size") or (-1, 0 if given.get("is_causal") else -1)  # tokens seen; -1: all
    if after != 0:
        return 1.0
    length = given["max_k"] if "max_k" in given else given["key"].shape[-2]
    seen = length if before < 0 else min(before + 1, length)
    return seen * (2 * length - seen + 1) / (2 * length**2)


def addmm_flops(summand, a, b, *args, out_val=None, **kwargs) -> int:
    """Count the FLOPs of `addmm` in all its forms, including a separate dtype for the result."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


CUSTOM_FORWARD = (torch.ops.torch_attn._varlen_attn.default,)
# torch 2.13 does not count `addmm_` and `addmm` with a dtype, and counts each boundary as a document of the greatest length.
FLOPS = flop_registry | {
    **dict.fromkeys((aten.addmm, aten.addmm_), addmm_flops),
    torch.ops.torch_attn._varlen_attn: packed_attention_flops,
    torch.ops.torch_attn._varlen_attn_backward: packed_attention_backward_flops,
}
