"""First weights of a model that was built on the meta device: each by the model's own rule, under any strategy."""

import hashlib
import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

# Models whose `_init_weights` looks at one module at a time. In others (T5, GPT-2) it reaches into the module's children.
MODEL_TYPES = ("llama", "mistral", "mixtral", "deepvit", "vit", "deit", "dinov2", "swin", "convnext")

# Parts that DDP, FSDP1, activation checkpointing and torch.compile add to a parameter's name.
WRAPPERS = re.compile(r"^(_orig_mod\.)?module\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")


@torch.no_grad()
def initialize(
    model: PreTrainedModel, seed: int, device: torch.device | str, storage: torch.device | str | None = None
) -> PreTrainedModel:
    """Give every parameter and buffer of a transformers model on the meta device its first value; returns the model.

    A value depends only on `seed` and on the parameter's name, so a model is the same on any number of ranks and under
    any strategy. Each parameter is drawn whole, one at a time, on `device` (a GPU draws other numbers than a CPU); only this
    rank's shard is kept, on `storage` (default: `device`). So no rank holds more than its shards and the
    largest parameter. Every rank draws every parameter: this avoids all communication.

    Raises:
        ValueError: for a model whose rule is not known to work this way, or leaves a parameter or buffer without a value.
    """
    if model.config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"a new model of type {model.config.model_type} cannot be made on the meta device, only {', '.join(MODEL_TYPES)}"
        )
    device = torch.device(device)
    model.to_empty(device=storage or device)
    model.tie_weights()  # `to_empty` makes a new parameter for each name of a tied one
    done = set()
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:  # a tied parameter takes its first name
                    done.add(id(parameter))
                    value = first_value(model, module, path, name, seed, device)
                    if isinstance(parameter, DTensor):
                        mesh, placements = parameter.device_mesh, parameter.placements
                        value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
                        parameter = parameter.to_local()
                    parameter.copy_(value)
                    del value  # free it before the next is drawn
            for name, _ in module.named_buffers(recurse=False):
                module._buffers[name] = first_value(model, module, path, name, seed, device)
    return model


def seed_of(name: str, seed: int) -> int:
    """Derive a parameter's own seed from its name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")


def first_value(
    model: PreTrainedModel, module: nn.Module, path: str, name: str, seed: int, device: torch.device
) -> torch.Tensor:
    """Compute what the model's own rule (`_init_weights`) gives one parameter or buffer of a module, on `device`.

    Meanwhile all other tensors of the module have no memory.
    """
    name_in_model = WRAPPERS.sub("", f"{path}.{name}".lstrip("."))
    own, held = {}, dict(module.__dict__)
    for group in ("_parameters", "_buffers"):
        own[group] = {
            n: None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in held[group].items()
        }
        if name in own[group]:
            tensor = held[group][name]
            value = own[group][name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if value.is_floating_point():
        value.fill_(torch.nan)  # NaN shows whether the rule sets it
    torch.manual_seed(seed_of(name_in_model, seed))
    module.__dict__.update(own)
    try:
        model._init_weights(module)
    finally:
        module.__dict__.update(held)
    if value.sum().isnan():
        raise ValueError(f"{type(module).__name__}: the model's _init_weights gives {name_in_model} no value")
    return value


def linear_layers_and_experts(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], list[str]]:
    """Find linear layers by name, but no output layer or router, and the parameters that hold a matrix for each expert."""
    head, layers, experts = model.get_output_embeddings(), {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            if "Router" not in type(module).__name__:  # it returns several values
                layers[name] = module
        elif not isinstance(module, nn.Conv1d):  # its weight also has three dimensions
            parameters = module.named_parameters(recurse=False)
            experts += [f"{name}.{parameter}" for parameter, value in parameters if value.ndim == 3]
    return layers, experts
