"""Base: the model that a run begins with. Checkpoints and the export need its files, including the untrained weights."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import xxhash

from accelerate_recipes.errors import ConfigError, first_few
from accelerate_recipes.hub import cache
from accelerate_recipes.models import pretrained
from accelerate_recipes.models.composites import is_text_part
from accelerate_recipes.ranks import on_all_ranks, share

# Endings of tensors in files that are not weights: a model computes them itself.
CONSTANTS = (*pretrained.MASKS, "rotary_emb.inv_freq")


@dataclass
class Base:
    """Weights of a pretrained model, memory-mapped from its files.

    `weights` have the names in the class of the trained model; `files` maps these names to the names in the files. `rest`
    holds the weights that this class does not have, by their names in the files: the other parts of a composite checkpoint,
    and heads that transformers ignores, such as heads that predict several tokens.
    """

    weights: dict[str, torch.Tensor]
    files: dict[str, str]
    rest: dict[str, torch.Tensor]


def folder_of_base(name: str, revision: str | None) -> Path:
    """Return the folder of a pretrained model. Raises ConfigError if it holds no weights."""
    folder = cache.repository("model", name) / "snapshots" / revision if revision else Path(name)
    if not any((folder / file).is_file() for file in cache.WEIGHT_FILES):
        raise ConfigError(
            f"{folder.absolute()} holds no weights, but the export needs those of {name}; put them back (if relative, start "
            "in the folder of the run), or export with --text_only_export what was trained of a whole model"
        )
    return folder


def open_base(model: transformers.PreTrainedModel, name: str, revision: str | None) -> Base:
    """Open the files from which `model` was loaded; the model may have adapters, and weights in 4 bits.

    Raises:
        ConfigError: if the files are not here, or cannot be read.
    """
    with torch.device("meta"):  # a loaded model would also carry the names that transformers changed as it loaded
        plain = type(model)(model.config)
    folder = folder_of_base(name, revision)
    tensors = pretrained.mapped_weights(folder)
    files = pretrained.names_in_files(plain, str(folder), tensors)
    read = {tensor for tensor, *_ in pretrained.conversions(plain, files)}
    if is_text_part(plain.config, pretrained.load_config(str(folder))):
        rest = tensors.keys() - {files[weight] for weight in read}
    else:
        ignored = plain._keys_to_ignore_on_load_unexpected or ()
        rest = {weight for weight in tensors.keys() - read if any(re.search(pattern, weight) for pattern in ignored)}
        rest = {weight for weight in rest if not weight.endswith(CONSTANTS)}
    return Base(
        {weight: tensors[of_file] for weight, of_file in files.items() if of_file not in rest},
        files,
        {weight: tensor for weight, tensor in tensors.items() if weight in rest},
    )


def parts_in_files(
    model: transformers.PreTrainedModel, files: Container[str], weights: Iterable[str]
) -> dict[str, list[str]]:
    """Map weights of a model without adapters to their names in `files`, or to the names of the parts that form a weight.

    Several weights with the same part are one tensor in the files, which the class of the model splits.
    """
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    if as_in_files(model, state, files).keys() == state.keys():  # at once, for most classes
        return {name: [name] for name in weights}
    return {name: list(as_in_files(model, {name: state[name]}, files)) for name in weights}


def as_in_files(
    model: transformers.PreTrainedModel, weights: Mapping[str, torch.Tensor], files: Container[str]
) -> dict[str, torch.Tensor]:
    """Convert weights of a model to the tensors of its files: those in `files` as they are, others as they are published.

    Weights that are one tensor in the files must come together.
    """
    own = {name: tensor for name, tensor in weights.items() if name in files}
    others = {name: tensor for name, tensor in weights.items() if name not in files}
    return own | (transformers.core_model_loading.revert_weight_conversion(model, others) if others else {})


def form_differences(
    model: transformers.PreTrainedModel,
    base: Mapping[str, torch.Tensor],
    written: Mapping[str, torch.Tensor],
    tied: Collection[str],
) -> list[str]:
    """List how the tensors of an export differ in name, shape or kind of number from those of its base, unless it is meant.

    `model` is on the meta device, without adapters; `base` and `written` have the names of its class. Meant are other rows
    of the vocabulary, the new head of a classifier, `tied` weights present or absent, tensors that are none of the model's
    weights, and other names or another division of as many values, since transformers' mapping renames and divides.
    """
    of_base, of_export = tensors_by_weight(model, base), tensors_by_weight(model, written)
    rows = getattr(model.config.get_text_config(), "vocab_size", None)
    is_classifier = model.get_output_embeddings() is None
    ties = {*tied, *model.all_tied_weights_keys.values()}
    differences = []
    for weights in sorted(of_base.keys() | of_export.keys()):
        theirs, ours = of_base.get(weights, {}), of_export.get(weights, {})
        if (is_classifier and pretrained.is_new(weights[0], model)) or (weights[0] in ties and not (theirs and ours)):
            continue
        cut = {i for tensor in ours.values() for i, size in enumerate(tensor.shape) if size == rows}
        shapes = [
            {name: [size for i, size in enumerate(tensor.shape) if i not in cut] for name, tensor in side.items()}
            for side in (theirs, ours)
        ]
        sizes = [sum(map(math.prod, side.values())) for side in shapes]
        kinds = [{tensor.is_floating_point() for tensor in side.values()} for side in (theirs, ours)]
        is_same = shapes[0] == shapes[1] if theirs.keys() == ours.keys() else theirs and ours and sizes[0] == sizes[1]
        if not is_same or kinds[0] != kinds[1]:
            differences.append(f"{with_shapes(theirs)} in the base, {with_shapes(ours)} in the export")
    return differences


def tensors_by_weight(
    model: transformers.PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
    """Group tensors in files by the weights of a model that they form: several, if these are published as one tensor."""
    parts, groups = parts_in_files(model, (), model.state_dict()), {}
    together: dict[str, tuple[str, ...]] = {}
    for weight, names in parts.items():
        together[names[0]] = (*together.get(names[0], ()), weight)
    for name, weight, *_ in pretrained.conversions(model, tensors):
        groups.setdefault(together[parts[weight][0]], {})[name] = tensors[name]
    return groups


def kept_in_fp32(model: transformers.PreTrainedModel, base: Mapping[str, torch.Tensor]) -> set[str]:
    """Name the weights that stay in fp32 in an export of a narrower dtype, since rounding them would change the model.

    Its class names some, such as the biases by which a router chooses experts. Others are in fp32 in the files of the
    `base` although most of its values are narrower.
    """
    listed = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    kept = {*named_by(listed, model.state_dict())}
    values = [tensor for tensor in base.values() if tensor.is_floating_point()]
    narrow = sum(tensor.numel() for tensor in values if tensor.dtype.itemsize < 4)
    if 2 * narrow > sum(tensor.numel() for tensor in values):
        for weights, tensors in tensors_by_weight(model, base).items():
            if all(tensor.dtype == torch.float32 for tensor in tensors.values()):
                kept |= {*weights}
    return kept


def named_by(modules: Sequence[str], weights: Iterable[str]) -> list[str]:
    """List the weights that a class's list of modules names, as transformers reads such a list."""
    pattern, *_ = transformers.core_model_loading.build_glob_alternation([*modules])
    return [weight for weight in weights if modules and pattern.search(weight)]


def check_one_dtype(model: transformers.PreTrainedModel, name: str) -> None:
    """Raise ConfigError for a model of which transformers would load some trained weights in fp32, the others in bf16."""
    weights = [weight for weight, _ in model.named_parameters()]
    if kept := named_by([*(model._keep_in_fp32_modules_strict or ())], weights):
        raise ConfigError(
            f"{name} is a {model.config.model_type}, which keeps {kept[0]} in fp32, but --optim adamw_bf16_kahan keeps the "
            "weights in bf16, and FSDP shards those of a layer in one dtype; give another --optim"
        )


def with_shapes(tensors: Mapping[str, torch.Tensor]) -> str:
    """Name tensors with their shapes and dtypes, at most two."""
    names = [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in sorted(tensors.items())]
    return first_few(names, 2) or "none"


def check_export_form(model: transformers.PreTrainedModel, name: str) -> None:
    """Check that an export of the pretrained model `name` would have the form of its own files; no value is needed.

    Raises:
        ConfigError: names what would differ.
    """
    base = open_base(model, name, cache.pinned(name).get("revision"))
    with torch.device("meta"):
        plain = type(model)(model.config)
    written = as_in_files(plain, plain.state_dict(), base.files if base.rest and is_decoder(model) else ())
    if differences := form_differences(plain, base.weights, written, plain.all_tied_weights_keys):
        raise ConfigError(
            f"an export of {name} would not have the form of its files, so that other programs might not read it: "
            f"{'; '.join(differences[: pretrained.NUM_NAMED])}; give another model, or train adapters alone (--use_peft)"
        )


def described(
    name: str, revision: str | None, weights: dict[str, torch.Tensor], by_all: bool = False
) -> dict[str, str | None]:
    """Describe a pretrained model by `name`, `revision` and the `checksum` of its `weights`, which are read for this.

    The checksum is one of each weight's name, shape, dtype and bytes; it does not depend on the number of files. `by_all`
    divides the weights among the ranks, which must all call this function.
    """

    def line(weight: tuple[str, torch.Tensor]) -> str:
        name, tensor = weight
        content = xxhash.xxh3_128_hexdigest(tensor.flatten().view(torch.uint8).numpy())
        return f"{name} {tuple(tensor.shape)} {tensor.dtype} {content}\n"

    by_size = sorted(weights.items(), key=lambda weight: weight[1].nbytes)  # so that each rank reads about as much
    with ThreadPoolExecutor() as threads:
        lines = list(threads.map(line, share(by_size) if by_all else by_size))
    all_lines = itertools.chain(*on_all_ranks(lines)) if by_all else lines
    checksum = xxhash.xxh3_128_hexdigest("".join(sorted(all_lines)).encode())
    return {"name": name, "revision": revision, "checksum": checksum}


def is_decoder(model: transformers.PreTrainedModel) -> bool:
    """Tell whether the class of a model is one of causal language models, or of models that also see images."""
    # By name: MODEL_FOR_CAUSAL_LM_MAPPING would import the code of all 200 models, for seconds.
    auto = transformers.models.auto.modeling_auto
    mappings = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return any(type(model).__name__ in names.values() for names in mappings)


def name_untrained(rest: Iterable[str], name: str) -> str:
    """Describe the weights of the model `name` that are not trained, by part."""
    # Of each name in the files: a tower, a head, or an extra layer.
    named = (re.match(r"((model|language_model|layers)\.)*[^.]*", weight) for weight in rest)
    counts = Counter(match[0] for match in named if match)
    parts = (f"{part} ({count} weight{'s' * (count > 1)})" for part, count in sorted(counts.items()))
    return f"Not trained, as in {name}: {', '.join(parts)}"
