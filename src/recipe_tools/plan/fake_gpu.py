"""GPUs and other ranks that are not there: our own code runs on fake tensors that report a GPU as their device.

Everything here depends on private parts of torch 2.13, transformers 5.23 and Accelerate 1.15. It must run in a process that
does nothing else. tests/test_simulate.py compares the result with real runs, and fails if a private part has changed.
"""

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fully_shard as fully_shard
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils

from accelerate_recipes.losses import TILES, LinearCrossEntropy
from accelerate_recipes.models import mixers, weights

aten = torch.ops.aten
CUDA, META = torch.device("cuda", 0), torch.device("meta")
# On a GPU these are single operators; on other devices torch composes them of several. The library needs only their names.
COMPOSED = ("silu_backward", "mish_backward", "_fused_rms_norm")
_kernels = torch.library.Library("aten", "IMPL")
_truth: list[None] = []  # if not empty, every caller gets the real device of a fake tensor


class Answers(TorchDispatchMode):
    """Dispatch mode that answers two questions that fake tensors cannot answer: their values, and their device.

    Autograd and autocast both ask for the device, and the question does not show which of the two asks. Autograd looks for a
    stream, and must not see a GPU. Autocast decides what to cast, and must see the GPU. Autocast may ask while it is
    switched off. In that case, the first question about a result comes from autograd.

    Args:
        on_gpu: whether tensors report a GPU as their device.
        targets: number of targets of a micro-batch; a mask selects this many positions.
        cast: parameters of a model under autocast; empty without autocast.
    """

    def __init__(self, on_gpu: bool, targets: int, cast: Sequence[nn.Parameter]):
        super().__init__()
        self.on_gpu, self.targets, self.cast = on_gpu, targets, cast
        # For each tensor with a gradient: whether autograd has asked for its device.
        self.is_asked = WeakIdKeyDictionary()
        self.leaves: list[Any] = []
        self.compute = LinearCrossEntropy.forward
        self.patched = mock.patch.object(LinearCrossEntropy, "forward", self.forward)

    def __enter__(self):
        super().__enter__()
        for parameter in self.cast:
            if parameter.requires_grad:  # autograd asks only at the first use, which is this one
                self.is_asked[parameter] = False
                self.leaves.append(parameter.view_as(parameter).grad_fn)
        self.patched.start()
        return self

    def __exit__(self, *error):
        self.patched.stop()
        return super().__exit__(*error)

    def forward(self, *args):
        """Compute the loss without logits. Autograd is the first to ask for its device: no operator gave it a gradient."""
        loss = self.compute(*args)
        self.is_asked[loss] = False
        return loss

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor, but hide a GPU from autograd."""
        in_backward = torch._C._current_graph_task_id() != -1
        asks = not _truth and (torch.is_grad_enabled() or in_backward)
        if asks and self.cast and not in_backward:
            is_asked = self.is_asked.get(tensor)
            if is_asked is not None:
                self.is_asked[tensor] = True
            # A result that is not a view has `requires_grad` only after autograd has asked for its device.
            known = is_asked is None or (is_asked and tensor.requires_grad)
            asks = torch.is_autocast_enabled("cuda") or not known
        return META if asks and tensor.device.type == "cuda" else tensor.device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = self.answer(func, args, kwargs)
        if self.cast and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves((args, kwargs))):
            self.is_asked.update((t, False) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out

    def answer(self, func, args, kwargs) -> Any:
        if func is aten._local_scalar_dense.default:
            return True  # is it finite?
        if func is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            values, mask = args[0], args[1][0]  # a fake mask selects: of (rows, positions) the targets, else everything
            number = min(mask.numel(), self.targets) if mask.ndim == 2 else mask.numel()
            return values.new_empty(number, *values.shape[mask.ndim :])
        if not self.on_gpu:
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return self.device_of(args[0])
        if kwargs.get("device") == META:  # C++ copies the device that `device_of` gave for another tensor
            kwargs = kwargs | {"device": CUDA}
        return func(*args, **kwargs)


class Stream(torch.cpu.Stream):
    """Stream that records events, where FSDP2 refuses None for a GPU, and has numbers, which FSDP2 of torch 2.15 reads."""

    stream_id = device_index = device_type = 0

    def record_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()


def fake_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Replace torch's function: flash attention, or with a mask the memory-efficient kernel, which keeps it as a bias."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:  # which flash attention does not support
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is None and enable_gqa:  # no other kernel supports this
        return aten._scaled_dot_product_attention_math(
            query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


class Kernel:
    """Stand-in for a Triton kernel: it does nothing, since such a kernel allocates nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def of_trl() -> list[Any]:
    """List patches that make trl's losses take their GPU path, if they are loaded."""
    triton, found = SimpleNamespace(cdiv=lambda a, b: -(-a // b)), []
    for module in [module for name, module in sys.modules.items() if name.startswith("trl.kernels.chunked_")]:
        found += [mock.patch.object(module, name, Kernel()) for name in vars(module) if name.endswith("_kernel")]
        found.append(mock.patch.object(module, "triton", triton, create=True))
        if hasattr(module, "_TRITON_AVAILABLE"):
            found.append(mock.patch.object(module, "_TRITON_AVAILABLE", True))
        if module.__name__ in TILES:
            found.append(mock.patch.object(module, "TOKEN_CHUNK_SIZE", TILES[module.__name__]))
    return found


def packed_sequence_indices(is_packed: bool, position_ids: torch.Tensor) -> torch.Tensor | None:
    """Replace transformers' function, which would take all fake rows for packed: positions have no values."""
    before = position_ids[:, :1] - 1
    sequences = (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)
    bool((sequences[:, -1] == 0).all())
    return sequences if is_packed else None


def documents_of_trial(is_packed: bool, position_ids: torch.Tensor) -> mixers.Unpacking | None:
    """Replace `mixers.documents_of`: each row of a trial has one long document and one of a single token."""
    rows, length = position_ids.shape
    groups = [position_ids.new_empty(rows, n) for n in (length - 1, 1)]
    return mixers.Unpacking(position_ids.shape, groups, position_ids.new_empty(rows * length)) if is_packed else None


def truthful(owner: Any, name: str) -> Any:
    """Patch a function that makes DTensors, so that it gets the GPU of a fake tensor; autograd gets another device."""

    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        _truth.append(None)
        try:
            return original(*args, **kwargs)
        finally:
            _truth.pop()

    return mock.patch.object(owner, name, wrapped)


def guard_nothing() -> None:
    """Register the CPU's device guard, which does nothing, for CUDA: torch built without CUDA has no guard for it."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib/libc10.so"))
    registry = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[1] = registry[0]


def of_gpu() -> list[Any]:
    """List patches that let fake tensors on `cuda` pass through FSDP2 and a backward pass without CUDA."""
    if torch.version.cuda is None:
        guard_nothing()
        for name in COMPOSED:
            _kernels.impl(name, lambda *_: None, "CUDA")
    stream = Stream()
    of_units = ("__init__", "lazy_init", "unshard", "wait_for_unshard", "pre_backward", "post_backward")
    replaced = {
        "Stream": Stream,
        "Event": torch.cpu.Event,
        "stream": torch.cpu.stream,
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "is_initialized": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_: True,
    }
    return [
        *(mock.patch.object(torch.cuda, name, value) for name, value in replaced.items()),
        mock.patch.object(torch.accelerator, "current_stream", lambda *_: stream),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", fake_sdpa),
        *(truthful(FSDPParamGroup, name) for name in of_units),
        truthful(weights, "initialize"),
        *of_trl(),
    ]


@contextlib.contextmanager
def pretend(world_size: int, device: str, use_fsdp: bool, is_packed: bool) -> Iterator[FakeTensorMode]:
    """Make this process rank 0 of `world_size`, with tensors on `device` (cuda or cpu); yield the mode for fake tensors.

    The environment must be that of the first process. Without FSDP there is no other rank. `is_packed` is a field of the
    trial. Code that makes tensors must run inside the yielded mode.
    """
    warnings.filterwarnings("ignore")
    if use_fsdp:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a model's weights are real meta tensors, until they get memory

    def initialize(model, seed, device, storage=None):
        """Give weights memory without values, in place of `weights.initialize`."""
        with mode:
            # `to_empty` of the whole model would convert a module in several places, such as an encoder-decoder's embedding,
            # several times (torch 2.13), which a fake weight does not always allow ("Couldn't swap"). FSDP2 needs the inner
            # modules first.
            for module in reversed([*model.modules()]):
                module.to_empty(device=storage or device, recurse=False)
            model.tie_weights()
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device)
        mode.allow_non_fake_inputs = False
        return model

    on = CUDA if device == "cuda" else torch.device("cpu")
    PartialState(cpu=True)
    PartialState._shared_state["device"] = on
    if use_fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if device == "cuda":  # with gloo, Accelerate gathers in another way, into lists
            PartialState._shared_state["backend"] = "nccl"
    patches = [
        mock.patch.object(weights, "initialize", initialize),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", partial(packed_sequence_indices, is_packed)),
        mock.patch.object(mixers, "documents_of", partial(documents_of_trial, is_packed)),
        # FSDP2 makes its mesh for this device.
        mock.patch.object(torch._C, "_get_accelerator", lambda *_: torch.device(device)),
    ]
    if not use_fsdp:  # Accelerate would move the model; its weights are on the device, and fakes cannot be moved
        patches.append(mock.patch.object(nn.Module, "to", lambda self, *args, **kwargs: self))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if device == "cuda":
            for patch in of_gpu():  # which wraps a function that is replaced above
                stack.enter_context(patch)
            if use_fsdp:
                mesh = dist.init_device_mesh("cuda", (world_size,))  # outside the mode: it reads values
                stack.enter_context(mock.patch.object(fully_shard, "_init_default_mesh", lambda *_: mesh))
        yield mode
