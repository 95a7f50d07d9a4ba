"""Check of a pretrained model before it is loaded: its settings, and the names and shapes of its weights, but no values.

Preflight and the processes of a run both call `check_model`, so their messages are the same. transformers itself gives
random values to weights that are missing in the files, and only prints a table of them while it loads.
"""

from __future__ import annotations

import contextlib
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from accelerate_recipes.disk import checksum
from accelerate_recipes.errors import ConfigError, first_few, first_line, near_path
from accelerate_recipes.hub import cache
from accelerate_recipes.models.composites import is_text_part, names_of_class, text_part
from accelerate_recipes.upstream import load_plain

NUM_NAMED = 8  # weights named in a message
MASKS = (".attn.bias", ".attention.bias", ".masked_bias")  # constants of attention in files of GPT-J and GPT-Neo
NUM_VALUES = 1024  # values of each weight by which a model is recognised
TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")  # files of settings and tokenizers
RESULTS = (cache.MANIFEST, "evaluation.json")  # a download, and earlier versions, wrote them
LONGER = "a copy of the model with other rope_parameters in its config.json may read more (docs/long-context.md)"
# What wrappers put before or into names of weights, and the way to save weights without it.
WRAPPER_PARTS = {
    "_orig_mod.": "torch.compile: save the state dict of `model._orig_mod`, or remove it from the names",
    "_fsdp_wrapped_module.": "FSDP: remove it from the names",
    "_checkpoint_wrapped_module.": "activation checkpointing: remove it from the names",
}
PREFIXES = {
    "module.": "DDP: save the state dict of `model.module`",
    "base_model.model.": "PEFT: save what `model.merge_and_unload()` returns",
}


def model_class(config: PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    """Return the class of the model that a configuration names: one of transformers, or of the configuration's own module.

    Raises:
        AttributeError: if neither has such a class.
    """
    name = config.architectures[0]  # pyright: ignore[reportOptionalSubscript]
    return getattr(transformers, name, None) or getattr(sys.modules[type(config).__module__], name)


def output_is_embedding(settings: Mapping[str, Any]) -> bool:
    """Tell from the content of a config.json whether an encoder-decoder's output layer is its embedding.

    transformers 5.23 ignores this setting of the file: for every T5 and mT5, it takes the output layer for the embedding.
    """
    return settings.get("tie_word_embeddings", True)


@dataclass(frozen=True)
class Kind:
    """Way in which a recipe loads pretrained models."""

    auto: str  # name of a class of transformers, such as AutoModelForCausalLM
    reader: Callable[[str], Any]  # loads what prepares the model's inputs: a tokenizer, or an image processor
    check: Callable[[PreTrainedConfig, str], None] = lambda config, name: None  # raises ConfigError for other models
    has_new_layer: bool = False  # the output layer may begin with random values
    part: Callable[[PreTrainedConfig, str], PreTrainedConfig] = lambda config, name: config  # the trained part
    register: Callable[[], None] = lambda: None  # tells transformers of classes that are not its own

    @property
    def auto_class(self) -> Any:
        """Import the class of transformers that makes models of this kind."""
        self.register()
        return getattr(transformers, self.auto)


@contextlib.contextmanager
def explained(what: str, failure: str) -> Iterator[None]:
    """Turn any error of transformers in this context into a ConfigError: a `failure`, or that `what` needs code of its own.

    Each class of configurations checks its fields in its own way, and the library `tokenizers` raises plain Exceptions.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{what} needs Python code that lies beside its files (auto_map), and code of a model is never run here; "
                "give a model whose class is part of transformers"
            ) from error
        raise ConfigError(f"{failure}: {first_line(error)}") from error


def load_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a pretrained model.

    Raises:
        ConfigError: if it cannot be read, needs code that is not in transformers, or says that the weights are quantised.
    """
    if cache.is_path(name) and not Path(name).is_dir():
        raise ConfigError(f"model {name!r}: no such folder{near_path(name)}")
    with explained(f"model {name}", f"the config.json of {name} cannot be read"):
        PreTrainedConfig.get_config_dict(name, **cache.pinned(name))
    with explained(f"model {name}", f"the config.json of {name} cannot be used"):
        config = transformers.AutoConfig.from_pretrained(name, **cache.pinned(name), trust_remote_code=False)
    if Path(cache.folder("model", name) or "", "adapter_config.json").is_file():
        raise ConfigError(
            f"{name} holds adapters (adapter_config.json), so transformers would load their base model with them. To train "
            "the weights of this folder, move adapter_config.json away; otherwise merge the adapters, and give the result"
        )
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "an unknown way") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"the weights of {name} are quantised ({method}; quantization_config in its config.json), and such weights "
            "cannot be trained; give the model that they were made from, and --use_peft --load_in_4bit if it needs too "
            "much memory"
        )
    return config


def load_text_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a pretrained causal language model, or of the text part of a composite checkpoint.

    Raises:
        ConfigError: like `load_config`.
    """
    return text_part(load_config(name), name)


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence of a model, in tokens; a huge number if its configuration has no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 0
    if limit <= 0:  # XLNet has -1
        return sys.maxsize
    model_class = transformers.MODEL_MAPPING.get(type(text), None)
    if hasattr(text, "rope_parameters") or not isinstance(model_class, type):
        ropes = text.rope_parameters or {}  # or one for each kind of layer
        each = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
        stretched = [(rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1) for rope in each]
        return max(limit, *map(int, stretched))
    try:
        with torch.device("meta"):
            model = model_class(text)
    except Exception:  # of such a configuration no model can be made, which is told where one is
        return limit
    # RoBERTa and its family count positions from the row behind the one of padding.
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
    return limit - next((row + 1 for row in padding if row is not None), 0)


def check_length(
    name: str, length: int, flag: str = "max_length", multiple: int = 1, config: PreTrainedConfig | None = None
) -> None:
    """Raise ConfigError if rows of `length` tokens, the value of `flag`, are longer than the longest sequence of a model.

    Batches are padded to a `multiple`. With a `config`, that of the model, `length` is that of the longest prepared
    document, which `flag` may cut.
    """
    model_config = config or load_config(name)
    longest = max_positions(model_config) // multiple * multiple
    if length > longest:
        too_long, meant, cut = f"--{flag} is {length}", "it", ""
        if config:
            too_long, meant, cut = f"the longest document has {length} tokens", f"--{flag}", ", which cuts longer ones"
        padded = f" (batches are padded to a multiple of {multiple})" if multiple > 1 else ""
        raise ConfigError(
            f"{too_long}, but {name} is made for {longest} tokens{padded}; set {meant} to {longest} or less{cut}"
            + (f"; {LONGER}" if hasattr(model_config.get_text_config(), "rope_parameters") else "")
        )


def read_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Raises:
        ConfigError: if it cannot be loaded, or needs code that is not in transformers.
    """
    with explained(f"the tokenizer of {name}", f"the tokenizer of {name} cannot be loaded"):
        return transformers.AutoTokenizer.from_pretrained(name, **cache.pinned(name), trust_remote_code=False)


def check_model(name: str, kind: Kind) -> transformers.PreTrainedModel:
    """Check that a pretrained model can be loaded, and that its files hold all its weights and no others.

    Weights that the class ignores do not count, nor do tied weights. Only names and shapes are read from the files. If a
    file is not here, the weights are not checked.

    Returns:
        The model on the meta device.

    Raises:
        ConfigError: with the reason why the model cannot be loaded.
    """
    config = kind.part(load_config(name), name)
    kind.check(config, name)
    with explained(f"model {name}", f"model {name} cannot be made by {kind.auto}"):
        config.architectures = config.architectures or []  # transformers 5.23 reads it to choose a class of a DeiT
        with torch.device("meta"):
            model = kind.auto_class.from_config(config, trust_remote_code=False)
        if not cache.lacking(cache.HubModel(name)):
            with silence():
                model = loaded_on_meta(model, name, kind)
    if model.can_generate():
        settings = generation_config(model, name)
        if config.is_encoder_decoder:
            settings.update(num_beams=1, length_penalty=1.0, early_stopping=False)  # recipes/t5.py sets them
        check_generation_config(settings, name)
    return model


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide the progress bar of a mere check, and the table of missing weights, which the caller reports."""
    logging = transformers.utils.logging
    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def loaded_on_meta(model: transformers.PreTrainedModel, name: str, kind: Kind) -> transformers.PreTrainedModel:
    """Let transformers load weights without values into a model of the same class. Raises ConfigError, as `check_model`."""
    weights = {weight: tensor.to("meta") for weight, tensor in weights_in_files(model, name).items()}
    model_class: Any = type(model)
    settings = {"config": model.config, "state_dict": weights, "device_map": "meta"}
    settings |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # so that all differences are reported
    try:
        loaded, loading_info = model_class.from_pretrained(None, **settings)
    except RuntimeError as error:  # if several weights, such as those of experts, cannot be joined into one
        raise ConfigError(
            f"a {type(model).__name__} joins weights of a layer, such as those of its experts, into one, but in {name} one "
            "of them is missing, or has another shape; copy or save the model again, or give another"
        ) from error
    shapes = {
        f"{weight} {tuple(of_file)} instead of {tuple(wanted)}": weight
        for weight, of_file, wanted in loading_info["mismatched_keys"]
    }
    kinds = {
        "not in the files, so that they would begin with random values": loading_info["missing_keys"],
        "in the files, but not in such a model": [
            weight for weight in loading_info["unexpected_keys"] if not weight.endswith(MASKS)
        ],
        "of another shape": shapes,
    }
    problems = []
    for kind_of_problem, names in kinds.items():
        if kind.has_new_layer:
            names = [weight for weight in names if not is_new(shapes.get(weight, weight), loaded)]
        if names:
            problems.append(f"{kind_of_problem}: {first_few(sorted(names), NUM_NAMED)}")
    if problems:
        prefix = next((prefix for prefix in PREFIXES if all(weight.startswith(prefix) for weight in weights)), None)
        part = next((part for part in WRAPPER_PARTS if any(part in weight for weight in weights)), None)
        remedy = "config.json and the weights must be of one model, and whole; copy or save it again, or give another"
        if part:
            remedy = f"names in the files hold {part}, which they have from {WRAPPER_PARTS[part]}"
        elif prefix:
            remedy = f"all names in the files begin with {prefix}, which they have from {PREFIXES[prefix]}"
        problems.append(remedy)
        title = f"the weights of {name} are not those of a {type(model).__name__}:"
        raise ConfigError("\n      ".join([title, *problems]))
    return loaded


def is_new(weight: str, model: transformers.PreTrainedModel) -> bool:
    """Tell whether a weight may be new: it lies outside of the base model's layers, or serves only pretraining."""
    weight = weight.removeprefix(f"{model.base_model_prefix}.")
    if weight.startswith("pooler.") or weight.endswith("mask_token"):
        return True
    return weight.split(".")[0] not in dict(model.base_model.named_children())


def conversions(
    model: transformers.PreTrainedModel, tensors: Iterable[str]
) -> Iterator[tuple[str, str, str | None, transformers.core_model_loading.WeightTransform]]:
    """Find the conversion of each tensor in files, as transformers 5.23 does (convert_and_load_state_dict_in_model).

    Yields the tensor, the first weight of the model that is made of it, the pattern that the conversion takes it for (None
    if it is only renamed), and the conversion. Tensors of which no weight is made are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping, weights = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    for tensor in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, weights)
        if name not in weights and tensor in weights:
            name, pattern = rename_source_key(tensor, [], [], prefix, weights)
        if name in weights:
            yield tensor, name, pattern, of_pattern[pattern] if pattern else WeightRenaming(tensor, name)


def names_in_files(model: transformers.PreTrainedModel, name: str, files: Collection[str]) -> dict[str, str]:
    """Map the names of weights in the class of a model to their names in the files of the pretrained model `name`.

    For a composite checkpoint, the result holds only weights of the text part.
    """
    if not is_text_part(model.config, load_config(name)):
        return {weight: weight for weight in files}
    return {weight: of_file for of_file, weight in names_of_class(model, files).items()}


def weights_in_files(model: transformers.PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    """Open the weights of the pretrained model `name`, by their names in the class of `model`."""
    files = mapped_weights(cache.folder("model", name))
    return {weight: files[of_file] for weight, of_file in names_in_files(model, name, files).items()}


def mapped_weights(place: Path) -> dict[str, torch.Tensor]:
    """Open the weights in all files of a folder; the files are memory-mapped, not read.

    Raises:
        ConfigError: for a file that is not whole.
    """
    weights = {}
    for file in map(place.joinpath, cache.weight_files(place)):
        try:
            if file.suffix == ".safetensors":
                tensors = load_file(file)
            else:  # files from before torch 1.6 are not archives, and cannot be mapped
                tensors = dict(load_plain(file, map_location="cpu", mmap=zipfile.is_zipfile(file)))
        except Exception as error:  # torch and safetensors raise many kinds
            raise ConfigError(
                f"{file} cannot be read: {first_line(error)}; it has {file.stat().st_size:,} bytes, and is cut, damaged or "
                "no file of weights: copy or download it again"
            ) from error
        if other := next((name for name, value in tensors.items() if not isinstance(value, torch.Tensor)), None):
            raise ConfigError(
                f"{file} holds {other}, which is no weight; save what `state_dict()` of the model returns"
            )
        weights |= tensors
    return weights


def model_checksum(name: str) -> str | None:
    """Compute a checksum that recognises a model in another place; None if the model is not here.

    The checksum covers the whole content of the other files, and of each weight the name, shape, dtype and first values.
    The first values are enough, because training changes almost all values of a weight.
    """
    folder = cache.folder("model", name)
    if folder is None or cache.lacking_of_model(folder, weights=True):
        return None
    hasher = xxhash.xxh3_128()
    files = (file for end in TEXTS for file in folder.glob(end) if not file.name.endswith((".index.json", *RESULTS)))
    for file in sorted(files):
        hasher.update(f"{file.name} {checksum(file)}\n".encode())
    for weight, tensor in sorted(mapped_weights(folder).items()):
        first = tensor.flatten()[:NUM_VALUES].view(torch.uint8).numpy()
        hasher.update(f"{weight} {tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(first)}\n".encode())
    return hasher.hexdigest()


def with_weights(
    model: transformers.PreTrainedModel, name: str, weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> transformers.PreTrainedModel:
    """Make the pretrained model `name` from its weights, by their names in the class of `model`, which stays unchanged.

    `settings` are those of `from_pretrained`, besides the configuration, which is that of `model`.
    """
    model_class: Any = type(model)
    loaded = model_class.from_pretrained(None, config=model.config, state_dict=weights, **settings)
    loaded.config.name_or_path = name
    if loaded.can_generate():
        loaded.generation_config = generation_config(loaded, name)
    return loaded


def generation_config(model: transformers.PreTrainedModel, name: str) -> GenerationConfig:
    """Read the settings of a model for generation, as loading the model does.

    Raises:
        ConfigError: if transformers refuses them.
    """
    if not Path(cache.folder("model", name) or "", "generation_config.json").is_file():
        return model.generation_config
    with explained(f"model {name}", f"the generation_config.json of {name} cannot be used"):
        return GenerationConfig.from_pretrained(name, **cache.pinned(name))


def check_generation_config(settings: GenerationConfig, name: str) -> None:
    """Check settings for generation as strictly as transformers does when it saves them.

    Raises:
        ConfigError: if the settings contradict each other.
    """
    try:
        settings.validate(strict=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the generation settings of {name} contradict each other; correct its generation_config.json: {error}"
        ) from None
