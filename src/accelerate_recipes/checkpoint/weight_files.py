"""Weights of a checkpoint as files of safetensors: a whole model, merged or not, and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from accelerate_recipes.checkpoint.base_form import COMPOSITE
from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.disk import read_json
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models import adapters
from accelerate_recipes.models.base import Base, as_in_files, form_differences, kept_in_fp32, parts_in_files
from accelerate_recipes.models.composites import freeze, layers_in_whole, name_in_whole, places_of_parts, sees_images
from accelerate_recipes.models.pretrained import NUM_NAMED, conversions, model_class, output_is_embedding


def write_safetensors(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    base: Base | None = None,
    is_whole: bool = False,
    keeps_frozen: bool = False,
) -> None:
    """Write the model of `checkpoint/state` as safetensors, with an index if in several shards.

    If the export `is_whole`, weights have the names of the `base`'s files, and its untrained rest is written too. Otherwise
    they are named and divided as in published files of such a model. The division matters: transformers 5 joins the experts
    of a layer when it reads them, older versions and other programs do not. One shard of `max_shard_size` bytes is in memory
    at a time. Floating-point weights are converted to `dtype`, except those that `kept_in_fp32` names, and if it
    `keeps_frozen`, frozen parts of a model that sees images, which are as in the base; with None they stay as saved.

    Raises:
        ConfigError: if the files would not have the form of those of the base.
    """
    model, tied = model_on_meta(checkpoint)
    fp32 = kept_in_fp32(model, base.weights if base else {}) if dtype else set()
    frozen = dtypes_of_frozen(model, checkpoint, base) if base and keeps_frozen and sees_images(model.config) else {}
    saved = {
        name: converted(tensor, frozen.get(name, torch.float32 if name in fp32 else dtype))
        for name, tensor in saved_tensors(checkpoint).items()
        if name not in tied
    }
    if missing := set(model.state_dict()) - tied - set(saved):
        raise RuntimeError(f"{checkpoint} lacks {sorted(missing)}, which {type(model).__name__} needs")

    names = base.files if base and (is_whole or sees_images(model.config)) else ()
    tensors, sources = as_in_files(model, saved, names), {}
    for weight, parts in parts_in_files(model, names, saved).items():
        for part in parts:
            sources.setdefault(part, []).append(weight)

    if base and (differences := form_differences(model, base.weights, tensors, tied)):
        raise ConfigError(
            f"{checkpoint} cannot be exported: weights would be written in another form than the run began with: "
            f"{'; '.join(differences[:NUM_NAMED])}. The checkpoint is whole, and stays"
        )

    def read(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        needed = {weight: saved[weight] for name in wanted for weight in sources[name]}
        parts = as_in_files(model, read_state(checkpoint, needed), names)
        return {name: parts[name].contiguous() for name in wanted}

    write_shards(tensors, read, out, max_shard_size, base if is_whole else None)


def dtypes_of_frozen(model: transformers.PreTrainedModel, checkpoint: Path, base: Base) -> dict[str, torch.dtype]:
    """Map the weights that the run has frozen, of a model that sees images, to their dtypes in the files of the base."""
    freeze(model, SimpleNamespace(**saved_arguments(checkpoint)))
    kept = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: base.weights[tensor].dtype for tensor, name, *_ in conversions(model, base.weights) if name in kept}


def write_merged(
    checkpoint: Path, out: Path, dtype: torch.dtype, max_shard_size: int | str, base: Base, text_only: bool
) -> None:
    """Write the base model of the adapters of `checkpoint/state`, with the adapters merged in.

    Weights have the names of the base's files. These files are memory-mapped; at most one shard is held in memory.
    """
    config, adapter = adapters.read_config(checkpoint), read_adapter(checkpoint)
    model, tied = model_on_meta(checkpoint)
    fp32 = kept_in_fp32(model, base.weights)
    fp32 = {name for name, weight, *_ in conversions(model, base.weights) if weight in fp32}
    tensors = {
        name: converted(tensor.to("meta"), torch.float32 if name in fp32 else dtype)
        for name, tensor in base.weights.items()
        if name not in tied
    }
    new_rows = adapters.names_in_base(model, base.weights, adapters.layers_with_new_rows(config))
    for weight, (name,) in new_rows.items():
        tensors[name] = torch.empty_like(model.get_parameter(weight), dtype=tensors[name].dtype)
    weight_named = adapters.merged(model, base.weights, adapter, config)

    def read(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weight_named(name).to(tensor.dtype).contiguous() for name, tensor in wanted.items()}

    write_shards(tensors, read, out, max_shard_size, None if text_only else base)


def write_adapter(checkpoint: Path, out: Path) -> None:
    """Write the adapters of `checkpoint/state` as PEFT does, in fp32."""
    tensors = {adapters.peft_name(name): tensor for name, tensor in read_adapter(checkpoint).items()}
    save_tensors(tensors, out / "adapter_model.safetensors")


def write_adapter_of_whole(checkpoint: Path, folder: Path) -> None:
    """Write adapters and their settings so that PEFT loads them into the whole composite model, not its text part.

    Layers of other parts get no adapters, even if they have the same names.
    """
    model, _ = model_on_meta(checkpoint)
    settings = transformers.AutoConfig.from_pretrained(checkpoint / COMPOSITE, trust_remote_code=False)
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(settings)
    prefixes = places_of_parts(model, whole.state_dict())

    tensors = {name_in_whole(name, prefixes): tensor for name, tensor in read_adapter(checkpoint).items()}
    save_tensors({adapters.peft_name(name): t for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    config = adapters.read_config(checkpoint)
    config.target_modules = layers_in_whole(config.target_modules or (), prefixes)
    rows = config.trainable_token_indices
    if isinstance(rows, dict):
        config.trainable_token_indices = {name_in_whole(layer, prefixes): ids for layer, ids in rows.items()}
    config.task_type = None  # PEFT would choose another class by it
    config.auto_mapping = {"base_model_class": type(whole).__name__, "parent_library": "transformers"}
    config.save_pretrained(str(folder))


def read_adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_state(checkpoint, saved_tensors(checkpoint))


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """List the model's tensors in `checkpoint/state` by name, on the meta device."""
    from accelerate_recipes.checkpoint.state_reader import StateReader

    metadata = StateReader(checkpoint / "state").read_metadata().state_dict_metadata
    saved = {key.removeprefix("model."): entry for key, entry in metadata.items() if key.startswith("model.")}
    return {name: torch.empty(e.size, dtype=e.properties.dtype, device="meta") for name, e in saved.items()}


def read_state(checkpoint: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the `wanted` tensors of the model from `checkpoint/state`."""
    from accelerate_recipes.checkpoint.state_reader import load_state

    # Allocate them in the dtype to be written: the reader converts as it copies, without a second buffer.
    tensors = {f"model.{name}": torch.empty_like(tensor, device="cpu") for name, tensor in wanted.items()}
    load_state(tensors, checkpoint, no_dist=True)
    return {name: tensors[f"model.{name}"] for name in wanted}


def model_on_meta(checkpoint: Path) -> tuple[transformers.PreTrainedModel, set[str]]:
    """Make the checkpoint's model without weights, and list the names that are aliases of a tied weight.

    For an encoder-decoder, the saved configuration decides whether the output layer is such an alias; `share_embedding` has
    corrected this configuration.
    """
    config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    with torch.device("meta"):
        model = model_class(config)(config)
    tied = set(model.all_tied_weights_keys)
    if not output_is_embedding(read_json(checkpoint / "config.json")):
        tied.discard("lm_head.weight")
    return model, tied


def write_shards(
    tensors: dict[str, torch.Tensor],
    read: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    out: Path,
    max_shard_size: int | str,
    base: Base | None,
) -> None:
    """Write `tensors`, which are on the meta device, as safetensors; `read` returns the values of one shard.

    With `base`, tensors have the names of its files, and its untrained rest is written unchanged.
    """
    rest = base.rest if base else {}
    own = {base.files.get(name, name) if base else name: name for name in tensors}

    def values(names: list[str]) -> dict[str, torch.Tensor]:
        trained = read({own[name]: tensors[own[name]] for name in names if name in own})
        return {name: trained[own[name]] if name in own else rest[name] for name in names}

    plan = split_state_dict_into_shards_factory(
        {name: tensors[weight] for name, weight in own.items()} | {name: t.to("meta") for name, t in rest.items()},
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in plan.filename_to_tensors.items():
        # Do not assign the shard to a variable: it would stay in memory while the next one is read.
        save_tensors(values(names), out / filename)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors as safetensors, with the mode of any new file: safetensors 0.8 lets only the owner read them."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)
