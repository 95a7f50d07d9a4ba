"""Corrections of errors in Accelerate 1.15, torch 2.14, transformers 5.24 and datasets 5.2, each with the reason.

For each correction, a test fails once upstream no longer needs it: then it can be removed. A correction that needs no
function of its own stands where the error happens, with the version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import accelerate
import psutil
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper

import accelerate_recipes
from accelerate_recipes.ranks import is_compiled

# Names by which models take the state of earlier tokens: `cache` since transformers 5.24.
CACHES = {"cache", "cache_params", "past_key_values", "state"}


def library_versions() -> dict[str, str]:
    """Return the versions of what computes, by name."""
    return {module.__name__: module.__version__ for module in (accelerate_recipes, torch, accelerate, transformers)}


def load_plain(file: Any, **options: Any) -> Any:
    """Load a file of torch that holds tensors and plain values alone.

    Raises:
        ValueError: for one that names anything else. torch 2.14 advises to set `weights_only=False`, which would run it.
    """
    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(f"it names {named[1]}, which would run: do not load it") from None
        raise ValueError("it is no file of tensors and plain values") from None


def let_torch_choose_dynamic_shapes() -> None:
    """Undo a default of `accelerate launch` by which all sizes in compiled layers are constants.

    `accelerate launch` 1.15 sets this if the YAML does not. torch would then compile a layer again for each new length
    of the longest document, and give up after eight compilations. By its own default, torch makes a variable of a number
    that changes.
    """
    if os.environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC") == "False":
        del os.environ["ACCELERATE_DYNAMO_USE_DYNAMIC"]


def choose_interface() -> None:
    """Make gloo use the network by which this machine reaches the first process, unless GLOO_SOCKET_IFNAME is set.

    gloo (torch 2.13) tells the other processes the address that this machine's own name resolves to. This is often
    127.0.0.1, at which other machines cannot reach it. gloo is used on GPUs too: ranks agree on checkpoints by it.
    """
    master = os.environ.get("MASTER_ADDR")
    if master is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(address)  # sends nothing
            own = route.getsockname()[0]
    except OSError:  # the rendezvous fails too, with a better message
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if own in (entry.address.split("%")[0] for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def forget_evaluated_shapes() -> None:
    """Let compiled code treat the sizes of the first training step as constants, whatever was evaluated before.

    torch (2.11 to 2.13) makes a variable of a size that changes between two calls of a layer. After an evaluation with
    another batch size, training would get slower kernels. The code that was compiled for the evaluation stays.
    """
    if is_compiled():
        from torch._dynamo import pgo  # loads the compiler

        pgo.reset_code_state()


def start_on_cpu(use_fsdp: bool, timeout: timedelta) -> None:
    """Start the process group on gloo, so that the launcher's processes become one world.

    Accelerate 1.15 takes its FSDP branch only for MULTI_<device> types other than MULTI_CPU (AcceleratorState.__init__),
    and PartialState._prepare_backend ignores CPUs unless told `cpu=True`. So an FSDP YAML on a CPU silently gives N
    independent runs. This function starts the state first and names it MULTI_GPU, which opens that branch. Nothing else
    on our path reads the device from this type. tests/test_distributed.py fails once upstream no longer needs this.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # `cpu`, not `cpu:0`, which FSDP1 takes for another device
    if "LOCAL_RANK" not in os.environ:
        return
    PartialState(cpu=True, timeout=timeout)
    if use_fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


# Elementwise functions that torch computes by MKL.
VECTOR_MATH = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10", "log1p", "log2", "sin",
    "sqrt", "tan", "tanh",
)  # fmt: skip


def resolve_vector_math() -> None:
    """Call each function of MKL's vector math once, on one number and therefore in one thread.

    MKL 2024.2, with which torch 2.13 is built, chooses a kernel in the first call of a function. If several threads make
    that call, one of them may compute its part with a relative error of 3e-4 (pytorch #188792). This happened now and
    then to a rotary embedding in the first step.
    """
    for name in VECTOR_MATH:
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.ones(1, dtype=dtype))


def keep_masks(accelerator: Accelerator) -> None:
    """Keep Accelerate from removing attention masks where ranks share rows.

    With cp_size, Accelerate 1.15 (_prepare_cp) adds a hook to each attention that removes its mask, for a ring attention
    on GPUs. Packed documents would silently attend to each other. Here `shared_rows` shares the rows, with their masks.
    tests/test_sequence.py fails once upstream no longer does this.
    """
    accelerator._prepare_cp = lambda *prepared: prepared


@contextlib.contextmanager
def hidden_buffers(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Copy the first rank's saved buffers to all ranks, and mark them as not saved while Accelerate shards the model.

    Only where Accelerate sends the first rank's weights to all (fsdp_cpu_ram_efficient_loading). DeepSeek V3 has such a
    buffer in its router. Accelerate 1.15 (fsdp2_load_full_state_dict) takes each entry of the state for a sharded
    parameter, and fails at a buffer. tests/test_distributed.py fails once upstream no longer needs this.
    """
    is_packed = any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
    is_sent = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading and not is_packed
    device, hidden = accelerator.device, []
    for module in model.modules() if is_sent else ():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                torch.distributed.broadcast(value, src=0)
                module._buffers[name] = value
                module._non_persistent_buffers_set.add(name)
                hidden.append((module, name))
    yield
    for module, name in hidden:
        module._non_persistent_buffers_set.discard(name)


def leave_out_other_layers(model: transformers.PreTrainedModel) -> None:
    """Take the layers that a model does not have out of those that transformers names for FSDP.

    Text parts of composite models, such as `Gemma4ForCausalLM` of transformers 5.23, also name layers of other parts, and
    Accelerate 1.15 looks for all of them.
    """
    layers = getattr(model, "_no_split_modules", None)
    if layers:
        present = {type(module).__name__ for module in model.modules()}
        model._no_split_modules = [name for name in layers if name in present]


def count_cached_tokens(model: nn.Module) -> None:
    """Let the cache of a MiniMax count its tokens in a layer that keeps some.

    MiniMaxCache of transformers 5.23 asks the first layer, which keeps none if its attention is linear: the mask of padded
    prompts is then wrong for all tokens that are generated but the first.
    """
    cache: Any = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if cache is not None:
        cache.get_seq_length = lambda self, *_, **__: max((layer.get_seq_length() for layer in self.layers), default=0)
        cache.get_mask_sizes = lambda self, query_length, *_, **__: (self.get_seq_length() + query_length, 0)


def keep_lone_token(model: transformers.PreTrainedModel) -> None:
    """Let a Mistral 3 read a row whose images have one token in all.

    Mistral3Model of transformers 5.24 (get_image_features) takes the axis of a single token for one to remove, and fails.
    """
    if model.config.model_type == "mistral3":
        projector = model.get_submodule("model.multi_modal_projector")
        projector.register_forward_hook(lambda module, args, features: features[None])


def name_backbone(model: transformers.PreTrainedModel) -> None:
    """Let `base_model` of a Llama 4 be its layers below the output layer.

    Llama4ForCausalLM of transformers 5.23 has the prefix of a whole checkpoint, so it is its own `base_model`: trl's losses
    would fail.
    """
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"  # of this model alone: files are read and written by the prefix of the class


def forget_layers_of_other_models(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Let FSDP wrap the layers of a further model: those that the YAML names, or else its own, if it has none of these.

    Accelerate 1.15 (set_auto_wrap_policy) keeps the layers of the first model of a process in the plugin.
    """
    policy = plugin.auto_wrap_policy
    if isinstance(policy, functools.partial) and "transformer_layer_cls" in policy.keywords:
        named = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")
        present = {type(module).__name__ for module in model.modules()}
        plugin.transformer_cls_names_to_wrap = [name for name in named if name in present] or None
        plugin.auto_wrap_policy = policy.func


def leave_embedding_to_accelerate(model: transformers.PreTrainedModel) -> None:
    """Remove the module that holds the input embedding from the layers that transformers names for FSDP.

    Models like BERT name their embeddings there. Accelerate 1.15 (fsdp2_prepare_model) wraps that module, and then wraps
    the input embedding inside it again, which torch refuses.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    layers = getattr(model, "_no_split_modules", None)
    if embedding is not None and layers:
        around = {type(m).__name__ for m in model.modules() if m is not embedding and embedding in m.modules()}
        model._no_split_modules = [name for name in layers if name not in around]


@contextlib.contextmanager
def hidden_head(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Hide an output layer that must not be in a unit of its own, and the embedding with it: both stay in the root's unit.

    Accelerate 1.15 (fsdp2_prepare_model) makes a unit of output layer and last norm, and of the embedding if it is tied.
    Torch refuses a parameter that lies in two units, as a bias that another module holds too, in BERT's masked language
    model. And if the last norm is not found, because it lies deeper, as in a model that also sees images, nothing gathers
    the weight that trl's losses read: its gradients were those of one rank. tests/test_distributed.py and
    tests/test_image_models.py fail once upstream no longer needs this.
    """
    embedding, head = (getattr(model, f"get_{end}put_embeddings", lambda: None)() for end in ("in", "out"))
    bias = getattr(head, "bias", None)
    holders = [m for m in model.modules() if any(p is bias for p in m.parameters(recurse=False))]
    is_alone = (
        head is not None
        and not model.config.is_encoder_decoder
        and head.weight is not getattr(embedding, "weight", None)
        and not any("Norm" in type(part).__name__ for part in model.base_model.children())
    )
    is_hidden = (bias is not None and len(holders) > 1) or is_alone
    hidden = ("get_input_embeddings", "get_output_embeddings") if is_hidden else ()
    for name in hidden:
        setattr(model, name, lambda: None)
    yield
    for name in hidden:
        delattr(model, name)


def computes_on(model: transformers.PreTrainedModel, device: torch.device) -> None:
    """Tell transformers the device on which a model computes, where FSDP2 keeps the parameters on the CPU.

    `generate` of transformers 5.23 moves its inputs to the device of the first parameter (prepare_inputs_for_generation,
    6.).
    """
    # Only this model changes: FSDP2 has given it a class of its own.
    type(model).device = property(lambda _: device)  # pyright: ignore[reportAttributeAccessIssue]


def restore_rng_in_recompute(model: nn.Module) -> None:
    """Make activation checkpointing draw the same dropout mask again when it recomputes.

    Accelerate 1.15 (fsdp2_apply_ac) passes preserve_rng_state=False. With dropout, the gradients would then belong to
    another mask than the loss.
    """
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn.keywords["preserve_rng_state"] = True


def compile_inside_recompute(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the layers inside the wrappers that recompute them, instead of the wrappers.

    Accelerate 1.15 (_prepare_fsdp2) compiles the wrappers and then shards the layers inside. torch cannot trace FSDP's
    hooks within a checkpoint: it would silently run whole layers uncompiled.
    """
    for wrapper in model.modules():
        if isinstance(wrapper, CheckpointWrapper | OffloadWrapper) and wrapper._compiled_call_impl is not None:
            wrapper._compiled_call_impl = None
            inner = wrapper
            while isinstance(inner, CheckpointWrapper | OffloadWrapper):
                inner = inner._checkpoint_wrapped_module
            inner.compile(**plugin.to_kwargs())


def keep_json_exact() -> None:
    """Let `datasets` give back each value that it stores as JSON as it was.

    datasets 5.2 (utils/json.py) writes ten decimals, reads 0.7 as 0.7000000000000001, and refuses an integer beyond 64
    bits; and it takes the text "5" for the number 5. tests/test_formats.py fails once upstream no longer needs this.
    """
    from datasets import arrow_writer
    from datasets.features import features
    from datasets.packaged_modules.json import json as builder
    from datasets.utils import json as utils
    from pandas.io.json import ujson_dumps

    def written(value: Any) -> str:
        # Checksums in checkpoints are of the form that `datasets` writes, so this stays where it keeps the value.
        usual = ujson_dumps(value)
        if repr(json.loads(usual)) == repr(value):
            return usual
        exact = json.dumps(value, default=lambda other: json.loads(ujson_dumps(other)))  # dates, among others
        return usual if json.dumps(json.loads(usual)) == exact else exact

    def with_json_at(place: list, value: Any) -> Any:
        if value is None:
            return None
        if not place:
            return written(value)
        field, *inside = place
        if field == 0:
            return [with_json_at(inside, entry) for entry in value]
        return value | {field: with_json_at(inside, value.get(field))}

    for module in (features, builder, utils):
        module.ujson_dumps, module.ujson_loads = written, json.loads
    # A value is written once, where its type is known; until then, a text is a value.
    features.Json.encode_example = lambda self, value: value
    arrow_writer.json_encode_field = lambda value, place: with_json_at(place, value)
