"""Checkpoints that hold more than a language model, such as models that also see images: the text part is trained alone.

The text part is loaded into its own class of transformers; the other parts are not loaded. This class and the files name
weights differently. Files of different versions also differ: `language_model.model.layers.0`,
`model.language_model.layers.0` and `model.layers.0` may be the same layer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from accelerate_recipes.errors import DataError

# Types whose text part computes the same as the whole model for text alone; tests/test_composites.py compares them.
COMPOSITES = (
    "gemma3", "gemma4", "idefics3", "internvl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_vl",
    "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "smolvlm", "vipllava",
)  # fmt: skip
# Types that can be trained whole, on images too. Each run tries whether its own model computes a packed row as each document
# alone (`image_probe`). A trial does not show that the names of parts, the numbers of patches, the tokens of a blank image
# and the export are right; tests/test_image_models.py and tests/test_image_rows.py do, for these types.
IMAGE_MODELS = (
    "gemma3", "gemma4", "glm46v", "glm4v", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3",
    "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
# Parts of such a model, as --freeze_vision_tower and others name them.
PARTS_OF_WHOLE = ("vision_tower", "multi_modal_projector", "language_model")
# Text parts without a class that has an output layer, and the type that computes the same for texts. In an image, a token
# has three positions; in a text it has one, and so has its rotary embedding.
SAME_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# Fields of a config.json that name a token which stands for features of an image, a video or a sound.
PLACEHOLDERS = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))


def is_composite(config: PreTrainedConfig) -> bool:
    """Tell whether a configuration belongs to a checkpoint whose text part can be trained alone."""
    return config.model_type in COMPOSITES


def text_part(config: PreTrainedConfig, name: str = "") -> PreTrainedConfig:
    """Return the configuration of the text part of the composite checkpoint `name`; other configurations stay unchanged."""
    if not is_composite(config):
        return config
    text = copy.deepcopy(config.get_text_config())
    if same := SAME_AS.get(text.model_type):
        config_class, fields = transformers.CONFIG_MAPPING[same], text.to_dict()
        fields = {field: value for field, value in fields.items() if hasattr(config_class(), field)}
        rope = fields["rope_parameters"].items()
        fields["rope_parameters"] = {field: value for field, value in rope if not field.startswith("mrope")}
        text = config_class(**{field: value for field, value in fields.items() if field != "model_type"})
    # Either configuration may say so. The weights in the files decide; see `loading.tie_as_read`.
    text.tie_word_embeddings = config.tie_word_embeddings or getattr(text, "tie_word_embeddings", False)
    text.name_or_path = name
    return text


def is_text_part(config: PreTrainedConfig, of: PreTrainedConfig) -> bool:
    """Tell whether a model with this configuration is the text part of a checkpoint with the configuration `of`."""
    return is_composite(of) and not isinstance(config, type(of))


def sees_images(config: PreTrainedConfig) -> bool:
    """Tell whether a model with this configuration is one of IMAGE_MODELS, whole."""
    return config.model_type in IMAGE_MODELS


def children_of(model: transformers.PreTrainedModel) -> tuple[str, str]:
    """Name the text part and the tower of a whole model that sees images, inside its base model."""
    embedding, children = model.get_input_embeddings(), dict(model.base_model.named_children())
    text = next(name for name, child in children.items() if any(module is embedding for module in child.modules()))
    return text, next(name for name in children.keys() - {text} if name.startswith("vis"))


def layers_of_text(model: transformers.PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Leave out the names of layers outside of the text part, if the model is a whole one that sees images."""
    if not sees_images(model.config):
        return list(names)
    part = model.base_model.get_submodule(children_of(model)[0])
    path = next(path for path, module in model.named_modules() if module is part)
    return [name for name in names if name.startswith(f"{path}.")]


def weights_by_part(model: transformers.PreTrainedModel) -> dict[str, list[nn.Parameter]]:
    """Divide the weights of a model that sees images, by the names of its parts; those that hear sound are left out.

    A projector lies beside the tower, or inside it, as the mergers of Qwen-VL and GLM do.
    """
    text, tower = children_of(model)
    weights: dict[str, list[nn.Parameter]] = {part: [] for part in PARTS_OF_WHOLE}
    for name, parameter in model.base_model.named_parameters():
        child, *rest = name.split(".")
        in_projector = child != tower or any("merger" in part for part in rest)
        part = "language_model" if child == text else "multi_modal_projector" if in_projector else "vision_tower"
        if "audio" not in child:
            weights[part].append(parameter)
    weights["language_model"] += model.get_output_embeddings().parameters()
    return weights


def unused_parameters(model: transformers.PreTrainedModel) -> list[nn.Parameter]:
    """List the weights of a model that sees images which no forward pass uses, or only one with sound.

    Such are the pooled output of a SigLIP, and what lies behind the layer that a LLaVA reads.
    """
    _, tower = children_of(model)
    parts = dict(model.base_model.named_children())
    unused = [part for name, part in parts.items() if "audio" in name]
    unused += [part for part in parts[tower].modules() if type(part).__name__.endswith("PoolingHead")]
    number = getattr(model.config.vision_config, "num_hidden_layers", 0)
    read = getattr(model.config, "vision_feature_layer", None)
    if read is not None:
        # Of the states before the first layer and behind each.
        last = max(layer % (number + 1) for layer in (read if isinstance(read, list | tuple) else [read]))
        lists = [part for part in parts[tower].modules() if isinstance(part, nn.ModuleList) and len(part) == number]
        unused += [*lists[0][last:], *(part for name, part in parts[tower].named_modules() if name == "post_layernorm")]
    return [parameter for part in unused for parameter in part.parameters()]


def freeze(model: transformers.PreTrainedModel, args: Any) -> transformers.PreTrainedModel:
    """Freeze the parts of a model that `args` name, and what no forward pass uses, in place; return the model."""
    model.requires_grad_(False)
    for part, parameters in weights_by_part(model).items():
        for parameter in parameters:
            parameter.requires_grad_(parameter.is_floating_point() and not getattr(args, f"freeze_{part}"))
    for parameter in unused_parameters(model):
        parameter.requires_grad_(False)
    return model


def placeholders(config: PreTrainedConfig) -> dict[int, str]:
    """Map tokens that stand for an image, a video or a sound in a composite checkpoint to the field that names them."""
    if not is_composite(config):
        return {}
    values = {field: getattr(config, field, None) for field in PLACEHOLDERS}
    return {value: field for field, value in values.items() if isinstance(value, int)}


def check_tokens(batch: dict[str, Any], model: nn.Module) -> None:
    """Check that no token of a batch on the CPU stands for an image: the text part cannot read images.

    Raises:
        DataError: names row and token.
    """
    known = getattr(getattr(model, "module", model), "placeholders", {})
    if not known or "input_ids" not in batch:
        return
    ids = batch["input_ids"]
    positions = torch.isin(ids, torch.tensor([*known])).nonzero().tolist()
    if positions:
        position: tuple[int, ...] = tuple(positions[0])
        token, rows = int(ids[position]), (batch["row"] + 1).tolist()
        named = rows[position[0]] if len(rows) == len(ids) else " or ".join(map(str, rows))
        raise DataError(stands_for_image(named, position[1], token, known[token]))


def stands_for_image(row: int | str, place: int, token: int, field: str, before: str = "") -> str:
    """Say where a text has a token that stands for an image; `before` is the text before the token, if known."""
    behind = f", behind {before!r}," if before else ""
    return (
        f"row {row}, token {place + 1}{behind} is {token}, which stands for an image, a video or a sound ({field} in the "
        "config.json of the model), and text alone is trained; remove it from the text"
    )


def places_of_parts(model: transformers.PreTrainedModel, names: Collection[str]) -> dict[str, str]:
    """Map prefixes of weight names in the class of a text part, such as `model.layers.`, to the prefixes in `names`.

    `model` has this class, on any device. `names` are the names of weights in files, or in the whole model. The place of the
    embedding shows where the text part lies. An output layer lies beside the text part, or above it.
    """
    names, own, embedding = set(names), list(model.state_dict()), model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    last = path.rpartition(".")[2]
    root = path.removesuffix(last)
    inside = [name.removeprefix(root) for name in own if name.startswith(root)]
    candidates = [name.removesuffix(f"{last}.weight") for name in names if f".{name}".endswith(f".{last}.weight")]
    # Heads that predict several tokens may have another embedding. Take the one among most weights of the text part.
    prefix = max(sorted(candidates), key=lambda prefix: sum(prefix + name in names for name in inside), default=root)
    prefixes = {f"{root}{part}.": f"{prefix}{part}." for part in (name.split(".")[0] for name in inside)}
    # Search a part outside of the text part's root, such as the output layer, from the place of the text part upwards.
    for part in {f"{name.split('.')[0]}." for name in own if not name.startswith(root)}:
        above = prefix
        while above and not any(name.startswith(above + part) for name in names):
            above = above[: above.rfind(".", 0, -1) + 1]
        prefixes[part] = above + part
    return prefixes


def name_in_whole(name: str, places: dict[str, str]) -> str:
    """Return the name in the whole of a weight or layer of its text part; see `places_of_parts`."""
    part = next((part for part in places if f"{name}.".startswith(part)), "")
    return (places.get(part, "") + f"{name}.".removeprefix(part)).removesuffix(".")


def layers_in_whole(ends: Collection[str], places: dict[str, str]) -> str:
    """Return PEFT's pattern for the layers of the text part in the whole whose names are or end with one of `ends`.

    A layer may itself be one of the parts in `places`, such as the output layer.
    """
    parts, ends = ({re.escape(name.removesuffix(".")) for name in some} for some in (places.values(), ends))
    return rf"(?=({'|'.join(sorted(parts))})(\.|$))(.*\.)?({'|'.join(sorted(ends))})"


def names_of_class(model: transformers.PreTrainedModel, names: Collection[str]) -> dict[str, str]:
    """Map `names` (see `places_of_parts`) to the names in the class of the text part; leave out names of other parts."""
    parts = {prefix: part for part, prefix in places_of_parts(model, names).items()}
    return {name: name_in_whole(name, parts) for name in names if f"{name}.".startswith(tuple(parts))}
