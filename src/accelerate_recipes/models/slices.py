"""Weights of a pretrained model under FSDP2: each rank reads its own slices of the files, and nobody sends any.

Otherwise one process of each machine reads the whole model, and Accelerate 1.15 sends it to all ranks, weight by weight:
the more machines, the longer it takes.

Files may hold other tensors than the class has weights, such as each expert by itself. transformers 5.23 knows how to
convert them (core_model_loading). It can also fill a sharded model, but with wrong values where a conversion joins or
transposes the dimension that the ranks share, and without any on a rank whose slice is empty. Here such weights are read
whole, converted and cut.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm import tqdm

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.models.pretrained import conversions, mapped_weights, names_in_files, with_weights
from accelerate_recipes.models.weights import all_places, draw_values, fill
from accelerate_recipes.ranks import is_first, is_first_of_machine, is_sharded, on_first_rank, raise_on_all

BYTES_AT_ONCE = 2**22  # bytes that each of the threads reads at once, and so holds besides the weights of its rank
THREADS = 32  # more than cores: they wait together for a store on the network


def loads_when_sharded() -> bool:
    """Tell whether a model gets its weights when it is sharded: under FSDP2 with `fsdp_cpu_ram_efficient_loading`."""
    return transformers.integrations.is_fsdp_enabled() and os.environ.get("FSDP_VERSION") == "2"


def gets_weights_later() -> bool:
    """Tell whether Accelerate sends this process its weights when it shards the model, so that it need not read them.

    Under FSDP2, `fsdp_cpu_ram_efficient_loading: true` means that one process of each machine reads the weights. But
    transformers 5.23 reads in all processes. If it converts the dtype, each process then holds a whole model: 8 billion
    parameters in fp32 are 256 GB in eight processes. tests/test_distributed.py fails when upstream no longer needs this. The
    first process of every other machine also reads, although its weights come from rank 0, because transformers makes
    buffers if LOCAL_RANK is not 0.
    """
    return loads_when_sharded() and not is_first_of_machine()


def applies(name: str, settings: dict[str, Any]) -> bool:
    """Tell whether each rank reads its own slices of the model `name`.

    It does if the model gets its weights when it is sharded, from files of safetensors. With a quantization in `settings`,
    each process reads the whole model and rounds it.
    """
    folder = cache.folder("model", name)
    return (
        loads_when_sharded()
        and "quantization_config" not in settings
        and folder is not None
        and all(file.endswith(".safetensors") for file in cache.weight_files(folder))
    )


@dataclass
class Source:
    """Files that hold the weights of a model on the meta device, and how its weights are made of theirs.

    `parts` names, for a weight of the model, the tensors in the files by the pattern that a conversion takes them for.
    """

    model: transformers.PreTrainedModel  # of the same class, not sharded
    tensors: dict[str, torch.Tensor]  # on the meta device, by their names in the class of the model
    places: dict[str, tuple[Path, int]]  # file, and first byte
    # By the first weight that each makes.
    conversions: dict[str, transformers.core_model_loading.WeightTransform] = field(default_factory=dict)
    parts: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    new_rows: dict[str, torch.Tensor] = field(default_factory=dict)  # of tensors with more rows than in the files
    sizes: list[int] = field(default_factory=list)  # of what was read, in bytes; threads may append

    def __post_init__(self):
        """Find the conversion of each tensor."""
        for tensor, name, pattern, conversion in conversions(self.model, self.tensors):
            self.conversions.setdefault(name, conversion)
            self.parts.setdefault(name, {}).setdefault(pattern or tensor, []).append(tensor)

    def read(self, tensor: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read the rows of a tensor from `start` to `stop`, all by default.

        Raises:
            ConfigError: if the file has become shorter, or cannot be read.
        """
        whole, (file, begin) = self.tensors[tensor], self.places[tensor]
        rows = torch.empty_like(whole[start:stop] if whole.ndim else whole, device="cpu")
        view = memoryview(rows.flatten().view(torch.uint8).numpy())
        begin += start * (whole[0].nbytes if start else 0)
        done = 0
        try:
            with file.open("rb", buffering=0) as opened:
                while done < len(view):
                    count = os.preadv(opened.fileno(), [view[done:]], begin + done)
                    if not count:
                        raise OSError(f"it ends at byte {begin + done:,}, within {tensor}")
                    done += count
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error}; copy or download it again") from error
        self.sizes.append(done)
        if tensor not in self.new_rows:
            return rows
        end = len(whole)
        new = self.new_rows[tensor][max(0, start - end) : None if stop is None else max(0, stop - end)]
        return torch.cat([rows, new.to(rows.dtype)])

    def convert(self, weight: str, own: range | None = None) -> dict[str, torch.Tensor]:
        """Read and convert what the model's `weight` is made of; with `own`, only these of the tensors that are stacked."""
        conversion = copy.deepcopy(self.conversions[weight])
        for pattern, tensors in self.parts[weight].items():
            chosen = tensors[own.start : own.stop] if own else tensors
            conversion.collected_tensors[pattern] = [partial(self.read, tensor) for tensor in chosen]  # pyright: ignore
        made = conversion.convert(weight, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def whole(self, weight: str) -> torch.Tensor:
        """Read a weight of the model as a whole."""
        return self.convert(weight)[weight]

    def rows(self, weight: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of a weight that is one tensor in the files, or that `stacks`."""
        if not isinstance(self.conversions[weight], transformers.core_model_loading.WeightRenaming):
            return self.convert(weight, range(start, stop))[weight]
        (tensor,) = self.parts[weight]
        return self.read(tensor, start, stop)

    def stacks(self, weight: str) -> bool:
        """Tell whether a weight is made of one tensor for each of its rows, such as an expert, and row by row."""
        operations = getattr(self.conversions[weight], "operations", [])
        lengths, transforms = {len(tensors) for tensors in self.parts[weight].values()}, transformers.core_model_loading
        return (
            bool(operations)
            and isinstance(operations[0], transforms.MergeModulelist)
            and operations[0].dim == 0
            and all(isinstance(operation, transforms.Concatenate) and operation.dim > 0 for operation in operations[1:])
            and lengths == {len(self.model.state_dict()[weight])}
        )


def load_on_meta(
    model: transformers.PreTrainedModel, name: str, settings: dict[str, Any]
) -> transformers.PreTrainedModel:
    """Load a pretrained model without values, as its class's `from_pretrained` would; `read_slices` gives it values.

    `model` is of the same class and configuration, on the meta device.
    """
    folder = cache.folder("model", name)
    assert folder is not None  # see `applies`
    files = {tensor: value.to("meta") for tensor, value in mapped_weights(folder).items()}
    names = names_in_files(model, name, files)
    tensors = {weight: files[of_file] for weight, of_file in names.items()}
    offsets = places_in_files(folder)
    source = Source(model, tensors, {weight: offsets[of_file] for weight, of_file in names.items()})
    loaded = with_weights(model, name, tensors, settings | {"device_map": "meta"})
    loaded = loaded.to("meta")  # ranks would make other buffers than the first
    # Without values, transformers does not tie weights that the files hold twice.
    for weight, origin in loaded.all_tied_weights_keys.items():
        both = weight in source.parts and origin in source.parts
        if both and on_first_rank(lambda pair=(weight, origin): torch.equal(*map(source.whole, pair))):
            path, _, key = weight.rpartition(".")
            setattr(loaded.get_submodule(path), key, loaded.get_parameter(origin))
    loaded.source = source
    loaded.resize_token_embeddings = partial(resize, loaded, source)  # trl calls it too
    return loaded


def places_in_files(folder: Path) -> dict[str, tuple[Path, int]]:
    """Map each tensor in the safetensors files of a folder to its file and its first byte there."""
    offsets = {}
    for file in map(folder.joinpath, cache.weight_files(folder)):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        offsets |= {tensor: (file, 8 + size + entry["data_offsets"][0]) for tensor, entry in header.items()}
    return offsets


def source_of(model: nn.Module) -> Source | None:
    """Return the files that a model on the meta device gets its values from; None for other models."""
    return getattr(model, "source", None)


def plain_name(name: str) -> str:
    """Return the name of a weight without what PEFT adds to it, twice where it adapts two parameters of a module."""
    return name.replace(".base_layer", "")


def tensor_of(parameter: nn.Parameter, model: transformers.PreTrainedModel, source: Source) -> str:
    """Name the tensor in the files that an embedding or output layer gets its parameter from; it may be tied."""
    names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
    return next(tensor for name in names if name in source.parts for tensor in source.parts[name])


@torch.no_grad()
def resize(
    model: transformers.PreTrainedModel, source: Source, new_num_tokens: int, pad_to_multiple_of: int | None = None
) -> None:
    """Give embedding and output layer of a model without values `new_num_tokens` rows, as transformers does.

    transformers makes the new rows from the others. The first rank reads both layers for this, and sends the new rows.
    """

    def replace(new: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Give both layers new parameters, one where they share one."""
        made: dict[int, nn.Parameter] = {}
        for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            for key, parameter in layer._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(new(parameter))
                    layer._parameters[key] = made[id(parameter)]

    def cut(parameter: nn.Parameter) -> torch.Tensor:
        tensor = tensor_of(parameter, model, source)
        source.new_rows[tensor] = parameter[len(source.tensors[tensor]) :].clone()
        return parameter.to("meta")

    on_first_rank(lambda: replace(lambda value: source.read(tensor_of(value, model, source)).to(value.dtype)))
    type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, mean_resizing=is_first())
    replace(cut)
    source.new_rows = on_first_rank(lambda: source.new_rows)


def rows_of_tokens(layer: Any, tokens: Sequence[int], model: transformers.PreTrainedModel) -> torch.Tensor:
    """Return the rows of `tokens` in an embedding or output layer, on the CPU if the model has no values yet."""
    source = source_of(model)
    if source is None:
        return layer.weight.data[list(tokens)]
    tensor = tensor_of(layer.weight, model, source)
    rows = on_first_rank(lambda: torch.cat([source.read(tensor, token, token + 1) for token in tokens]))
    return rows.to(layer.weight.dtype)


@torch.no_grad()
def read_slices(
    model: transformers.PreTrainedModel, source: Source, device: torch.device, storage: torch.device
) -> None:
    """Give a sharded model on the meta device its values. What the files do not hold, such as constants, its class computes.

    Parameters come to lie on `storage`, buffers on `device`. Parameters with values, such as those of adapters, stay.

    Raises:
        ConfigError: on all ranks, if a file cannot be read on one of them.
    """
    empty = {place.name for place in all_places(model) if place.tensor.is_meta}

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        target = storage if isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor

    model._apply(with_memory)
    model.tie_weights()  # again: a tied parameter now has memory of its own under each name
    places = [place for place in all_places(model) if place.name in empty]
    tensors = {plain_name(place.name): place.tensor for place in places}
    error, filled, reads = None, set(), []
    threads = ThreadPoolExecutor(THREADS)
    try:
        for weight in source.parts:
            if weight not in tensors:  # it has a value already
                continue
            calls = reads_of(tensors[weight], weight, source)
            if calls is not None:
                reads += [threads.submit(read_rows, *call, source) for call in calls]
                filled.add(id(tensors[weight]))
            else:  # one after the other, because a whole weight needs much memory
                for name, value in source.convert(weight).items():
                    fill(tensors[name], value.to(storage))
                    filled.add(id(tensors[name]))
        for read in tqdm(reads, "Reading weights", disable=None if is_first() else True):
            read.result()
    except Exception as raised:
        error = raised
    threads.shutdown(cancel_futures=True)
    raise_on_all(error)
    rest = [place for place in places if id(place.tensor) not in filled]
    if lost := [place.name for place in rest if isinstance(place.tensor, nn.Parameter)]:
        raise ConfigError(f"the files of the model give {len(lost)} of its weights no values, such as {min(lost)}")
    draw_values(model, 0, device, {id(place.tensor) for place in rest})


def reads_of(tensor: torch.Tensor, weight: str, source: Source) -> list[tuple[torch.Tensor, str, int]] | None:
    """Divide this rank's rows of a weight into arguments of `read_rows`; None if the weight must be read whole."""
    local, first = tensor.detach(), 0
    if is_sharded(local):
        from torch.distributed.tensor import distribute_tensor

        numbers = torch.arange(len(local), device=local.device)
        numbers = distribute_tensor(numbers, local.device_mesh, local.placements, src_data_rank=None).to_local()
        local, first = local.to_local(), int(numbers[0]) if len(numbers) else 0
    if source.stacks(weight):
        step = 1
    elif local.ndim and isinstance(source.conversions[weight], transformers.core_model_loading.WeightRenaming):
        step = max(1, BYTES_AT_ONCE * len(local) // max(1, local.nbytes))
    else:
        return None
    return [(local[row : row + step], weight, first + row) for row in range(0, len(local), step)]


def read_rows(rows: torch.Tensor, weight: str, first: int, source: Source) -> None:
    rows.copy_(source.rows(weight, first, first + len(rows)))
