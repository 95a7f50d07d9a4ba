"""First weights of a model that was built on the meta device: by the model's own rules, equal under any strategy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container
from functools import partial
from typing import NamedTuple

import torch
import transformers
from torch import nn

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.ranks import is_sharded

# Parts that DDP, FSDP1, activation checkpointing and torch.compile add to the name of a parameter.
WRAPPERS = re.compile(r"^(_orig_mod\.)?module\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")


class Place(NamedTuple):
    """A parameter or buffer, its position in a module, and the rules that may give it a value, in transformers' order."""

    name: str
    tensor: torch.Tensor
    tensors: dict[str, torch.Tensor | None]  # parameters or buffers of its module; `key` is its name there
    key: str
    rules: list[Callable[[], None]]


@torch.no_grad()
def initialize(
    model: transformers.PreTrainedModel,
    seed: int,
    device: torch.device | str,
    storage: torch.device | str | None = None,
) -> transformers.PreTrainedModel:
    """Give every parameter and buffer of a transformers model on the meta device its first value; returns the model.

    A value depends only on `seed` and on the name of the parameter, so a model is the same on any number of ranks and
    under any strategy. Parameters are drawn one at a time and whole, on `device` (a GPU draws other numbers than a CPU).
    A rank then keeps only its shard, on `storage` (default: `device`), so it never holds more than its shards and one
    whole parameter. Every rank draws every parameter, which avoids all communication.

    Raises:
        ConfigError: for a class of models whose rules leave a parameter or buffer without a value.
    """
    model.to_empty(device=storage or device)
    model.tie_weights()  # again: `to_empty` makes a parameter of its own for each name of a tied parameter
    return draw_values(model, seed, torch.device(device))


def draw_values(
    model: transformers.PreTrainedModel, seed: int, device: torch.device, only: Container[int] | None = None
) -> transformers.PreTrainedModel:
    """Give parameters and buffers that have memory their first values; see `initialize`. `only` holds the `id` of each."""
    places = all_places(model)
    # A rule may write to all children of its module. So while one tensor is drawn, a meta tensor replaces each other one:
    # writing to it does nothing.
    for place in places:
        place.tensors[place.key] = torch.empty(place.tensor.shape, dtype=place.tensor.dtype, device="meta")
    values, done = {}, set()
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            # A tied parameter is drawn under the name to which its other names are tied: this name sorts first.
            for place in sorted(places, key=lambda place: place.name in model.all_tied_weights_keys):
                if id(place.tensor) not in done and (only is None or id(place.tensor) in only):
                    done.add(id(place.tensor))
                    try:
                        value = first_value(place, seed, device)
                    except NotImplementedError:  # a rule reads another tensor, which is on the meta device
                        value = torch.tensor(torch.nan)
                    if value.sum().isnan():
                        raise ConfigError(
                            f"a new {model.config.model_type} cannot be made: the _init_weights of its class does not give "
                            f"{place.name} a value; give another architecture"
                        )
                    if isinstance(place.tensor, nn.Parameter):
                        fill(place.tensor, value)
                    else:
                        values[id(place.tensor)] = value
                    del value  # free it before the next is drawn
    finally:
        for place in places:
            place.tensors[place.key] = values.get(id(place.tensor), place.tensor)
    return model


def all_places(model: nn.Module) -> list[Place]:
    """List all parameters and buffers of a model; a tied parameter is listed under each of its names.

    The rule for a tensor is `_init_weights` of the innermost transformers model that holds it. It is called on the
    tensor's module and then on each parent of the module, because the rules of T5, GPT-2 and others set parameters of a
    module's children.
    """
    places, rules_of = [], {}
    for path, module in model.named_modules():
        above, rule = rules_of.get(path.rpartition(".")[0], ([], None)) if path else ([], None)
        rule = module._init_weights if isinstance(module, transformers.PreTrainedModel) else rule
        rules_of[path] = rules, _ = [*([partial(rule, module)] if rule else []), *above], rule
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = WRAPPERS.sub("", f"{path}.{key}".lstrip("."))
                    places.append(Place(name, tensor, tensors, key, rules))
    return places


def fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Copy a value into a parameter; where the parameter is sharded, copy this rank's shard of the value."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        parameter.to_local().copy_(value)
    else:
        parameter.copy_(value)


def seed_of(name: str, seed: int) -> int:
    """Derive the seed of a parameter from its name and the seed of the run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")


def first_value(place: Place, seed: int, device: torch.device) -> torch.Tensor:
    """Compute the value that the model's rules give one parameter or buffer, on `device`; NaN if they give it none."""
    stand_in, dtype = place.tensors[place.key], place.tensor.dtype
    # In bf16, torch 2.11 draws a truncated normal with values of 100 standard deviations among the others; 2.13 does not.
    drawn_in = torch.float32 if dtype.is_floating_point and torch.__version__ < "2.13" else dtype
    value = place.tensors[place.key] = torch.empty(place.tensor.shape, dtype=drawn_in, device=device)
    value.fill_(torch.nan if value.is_floating_point() else 0)  # NaN that remains shows that no rule sets it
    torch.manual_seed(seed_of(place.name, seed))
    for rule in place.rules:
        rule()
    place.tensors[place.key] = stand_in
    return value.to(dtype)


# Linear layers of state spaces that are not called: transformers, or a kernel in training, takes the weight out of them.
BY_WEIGHT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bamba", "zamba2", "granitemoehybrid", "nemotron_h", "falcon_h1", "mamba2"), ("out_proj",)),
    **dict.fromkeys(("mamba", "falcon_mamba"), ("x_proj", "dt_proj", "out_proj")),
    "jamba": ("dt_proj",),
}


def linear_layers_and_experts(model: transformers.PreTrainedModel) -> tuple[dict[str, nn.Linear], list[str]]:
    """Find linear layers by name, and the parameters that hold a matrix for each expert.

    The output layer and routers are left out, and so are layers that are not called, and layers of a list (their name is a
    number).
    """
    head, layers, experts = model.get_output_embeddings(), {}, []
    by_weight = BY_WEIGHT.get(model.config.model_type, ())
    for name, module in model.named_modules():
        end = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and module is not head:
            # A router returns several values.
            if "Router" not in type(module).__name__ and end not in by_weight and not end.isdecimal():
                layers[name] = module
        elif not isinstance(module, nn.Conv1d):  # its weight also has three dimensions
            parameters = module.named_parameters(recurse=False)
            experts += [f"{name}.{parameter}" for parameter, value in parameters if value.ndim == 3 and len(value) > 1]
    return layers, experts
