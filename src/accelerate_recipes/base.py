"""Base: the model that a run begins with. Checkpoints and the export need its files, including the untrained weights."""

import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from accelerate_recipes.composites import is_text_part
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.pretrained import MASKS, load_config, mapped_weights, names_in_files
from accelerate_recipes.ranks import on_all_ranks, share

# Endings of tensors in files that are not weights: a model computes them itself.
CONSTANTS = (*MASKS, "rotary_emb.inv_freq")


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
    place = cache.repository("model", name) / "snapshots" / revision if revision else Path(name)
    if not any((place / file).is_file() for file in cache.WEIGHTS):
        raise ConfigError(
            f"{place.absolute()} holds no weights, but the export needs those of {name}; put them back (if relative, start "
            "in the folder of the run), or export with --text_only_export what was trained of a whole model"
        )
    return place


def open_base(model: PreTrainedModel, name: str, revision: str | None) -> Base:
    """Open the files from which `model` was loaded; the model may have adapters, and weights in 4 bits.

    Raises:
        ConfigError: if the files are not here, or cannot be read.
    """
    with torch.device("meta"):  # a loaded model would also carry the names that transformers changed as it loaded
        plain = type(model)(model.config)
    place = folder_of_base(name, revision)
    tensors = mapped_weights(place)
    files = names_in_files(plain, str(place), tensors)
    held = {part for parts in parts_in_files(plain, files, plain.state_dict()).values() for part in parts}
    if is_text_part(plain.config, load_config(str(place))):
        rest = tensors.keys() - {files[weight] for weight in held & files.keys()}
    else:
        ignored = plain._keys_to_ignore_on_load_unexpected or ()
        rest = {weight for weight in tensors.keys() - held if any(re.search(pattern, weight) for pattern in ignored)}
        rest = {weight for weight in rest if not weight.endswith(CONSTANTS)}
    return Base(
        {weight: tensors[of_file] for weight, of_file in files.items() if of_file not in rest},
        files,
        {weight: tensor for weight, tensor in tensors.items() if weight in rest},
    )


def parts_in_files(model: PreTrainedModel, files: Container[str], weights: Iterable[str]) -> dict[str, list[str]]:
    """Map weights of a model without adapters to their names in `files`, or to the names of the parts that form a weight."""
    state = model.state_dict()
    return {
        name: [name] if name in files else list(revert_weight_conversion(model, {name: state[name].to("meta")}))
        for name in weights
    }


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
    found = itertools.chain(*on_all_ranks(lines)) if by_all else lines
    checksum = xxhash.xxh3_128_hexdigest("".join(sorted(found)).encode())
    return {"name": name, "revision": revision, "checksum": checksum}


def is_decoder(model: PreTrainedModel) -> bool:
    """Tell whether the class of a model is one of causal language models."""
    # By name: MODEL_FOR_CAUSAL_LM_MAPPING would import the code of all 200 models, for seconds.
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def untrained(rest: Iterable[str], name: str) -> str:
    """Describe the weights of the model `name` that are not trained, by part."""
    counts = Counter(map(part_of, rest))
    parts = (f"{part} ({count} weight{'s' * (count > 1)})" for part, count in sorted(counts.items()))
    return f"Not trained, as in {name}: {', '.join(parts)}"


def part_of(weight: str) -> str:
    """Return the part of a model to which a weight belongs, by its name in the files: a tower, a head, or an extra layer."""
    found = []
    for step in weight.split("."):
        found.append(step)
        if step not in ("model", "language_model", "layers"):
            break
    return ".".join(found)
