"""Models that also see images, trained whole: loading, parts, and what they read of a row of several documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from accelerate_recipes import upstream
from accelerate_recipes.args import arg
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.attention import choose, sees_images_whole
from accelerate_recipes.models.composites import IMAGE_MODELS, PARTS_OF_WHOLE, freeze, sees_images
from accelerate_recipes.models.documents import boundaries, boundary_arguments, text_positions
from accelerate_recipes.models.loading import on_meta, read_model, tie_as_read
from accelerate_recipes.models.pretrained import Kind, generation_config, load_config
from accelerate_recipes.models.processors import load_image_tokenizer, load_processor
from accelerate_recipes.ranks import ranks_a_row

# Outputs of processors that have a value for each token.
OF_TOKENS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")


def join_documents(base: PreTrainedModel, documents: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join documents in one row, which a model computes as it computes each of them alone.

    Args:
        base: the model without its output layer, on any device: it knows the positions of an image's tokens.
        documents: each as the model's processor gives it, without a mask: `input_ids` and other values of tokens, (1, L),
            and the values of its images, if it has any.

    Returns:
        Values of tokens, (1, T), values of images, and where documents begin, if the attention of the base asks for that.
        `position_ids` are (1, T), or (4, 1, T): those of the text, which begin with 0 in each document and alone say where
        it begins, then time, height and width.
    """
    joined = {"position_ids": torch.cat([positions_of(base, document) for document in documents], -1)}
    for name in dict.fromkeys(name for document in documents for name in document):
        values = [document[name] for document in documents if name in document]
        if name in OF_TOKENS:
            joined[name] = torch.cat(values, -1)
        else:
            # Idefics numbers texts first, then their images; a row is one text.
            joined[name] = join_images(values, 1 if any("pixel_attention_mask" in d for d in documents) else 0)
    return joined | boundary_arguments(base.config, boundaries(text_positions(joined["position_ids"])))


def positions_of(base: Any, document: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the positions of a document's tokens, (1, L), or (4, 1, L) for models whose images have height and width."""
    ids = document["input_ids"]
    text = torch.arange(ids.shape[-1])[None]
    if not hasattr(base, "get_rope_index"):
        return text
    if "image_grid_thw" not in document:
        return text.expand(4, *text.shape)
    settings = {name: document[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    rope_index, _ = base.get_rope_index(input_ids=ids, **settings)
    return torch.cat([text[None], rope_index])


def join_images(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate what belongs to images. A smaller one is padded with zeros, as processors pad the images of one text."""
    sizes = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    padded = []
    for value in values:
        missing = [0 if axis == dim else size - value.shape[axis] for axis, size in enumerate(sizes)]
        padded.append(pad(value, [length for missed in reversed(missing) for length in (0, missed)]))
    return torch.cat(padded, dim)


def image_masks(config: PreTrainedConfig, batch: dict[str, Any]) -> dict[str, Any]:
    """Make the masks of a model in which the tokens of an image see each other, as arguments of the model; else none.

    In transformers 5.24 (masking_utils), packed rows of these models are wrong: images of one document are looked up at
    places of another.

    Returns:
        For each kind of layer (B, 1, T, T), true where a token sees another.
    """
    if not sees_images_whole(config):
        return {}
    text = config.get_text_config()
    positions = text_positions(batch["position_ids"])
    is_first = positions == 0
    document = is_first.cumsum(-1)
    types = batch.get("token_type_ids", batch.get("mm_token_type_ids"))
    is_image = torch.zeros_like(is_first) if types is None else (types == 1) | (types == 2)
    # An image begins behind another token, or with its document.
    begins = is_image & (is_first | ~pad(is_image, (1, -1)))
    image = begins.cumsum(-1)
    index = torch.arange(positions.shape[-1], device=positions.device)
    distance = index[:, None] - index
    same_image = (image[:, :, None] == image[:, None]) & is_image[:, :, None] & is_image[:, None]
    causal = (distance >= 0).expand_as(same_image)
    window = distance < text.sliding_window
    in_all_layers = config.model_type == "gemma3"
    seen = {"full_attention": causal | same_image if in_all_layers else causal}
    seen["sliding_attention"] = (causal | same_image) & window
    inside = document[:, :, None] == document[:, None]
    masks = {kind: (mask & inside)[:, None] for kind, mask in seen.items()}
    if text._attn_implementation == "eager":  # it adds its mask to the scores
        dtype = text.dtype or torch.float32
        lowest = torch.finfo(dtype).min
        masks = {kind: (~mask).to(dtype) * lowest for kind, mask in masks.items()}
    return {"attention_mask": masks}


def patches_of(config: PreTrainedConfig, inputs: dict[str, torch.Tensor]) -> list[int]:
    """Count the patches of each image of a document, or of each of its tiles, which the tower computes together.

    `inputs` are what the model reads of the images, such as those of blank images of the same sizes.
    """
    if "image_grid_thw" in inputs:
        return inputs["image_grid_thw"].prod(-1).tolist()
    values, vision = inputs["pixel_values"], config.vision_config
    if "image_position_ids" in inputs:  # of patches, padded to a fixed number
        return [values.shape[-2]] * values.shape[0]
    size = vision.patch_size
    width = size if isinstance(size, int) else math.prod(size) ** 0.5
    if "image_sizes" in inputs and values.ndim == 4:  # Mistral 3 leaves out what pads an image
        return [int(height * breadth / width**2) for height, breadth in inputs["image_sizes"].tolist()]
    tiles = math.prod(values.shape[:-3])
    return [int(values.shape[-1] * values.shape[-2] / width**2)] * tiles


@dataclass
class ImageModelArgs:
    """Arguments of a recipe that trains a model which sees images: which of its parts are trained."""

    group = "model"
    freeze_vision_tower: bool = arg(True, "Leave the part that reads images as it is.")
    freeze_multi_modal_projector: bool = arg(
        False, "Leave what translates images for the text part as it is, such as Qwen-VL's mergers."
    )
    freeze_language_model: bool = arg(False, "Leave the text part as it is, with embedding and output layer.")

    def image_model_problems(self) -> list[str]:
        """List problems of these arguments, and of others that do not fit such a model, one sentence each."""
        args: Any = self
        problems = []
        if all(getattr(args, f"freeze_{part}") for part in PARTS_OF_WHOLE):
            problems.append("--freeze_language_model with the other two leaves nothing to train; remove one")
        if args.use_peft and args.freeze_language_model:
            problems.append(
                "--freeze_language_model: the adapters of --use_peft lie in the text part; remove one of the two"
            )
        if args.use_peft and not args.freeze_vision_tower:
            problems.append(
                "--freeze_vision_tower false: --use_peft trains adapters alone, in the text part; remove one of the two, or "
                "name layers of the tower by --lora_target_modules"
            )
        if args.load_in_4bit:
            problems.append("--load_in_4bit does not work yet with a model that sees images; remove it")
        if args.text_only_export:
            problems.append("--text_only_export: the whole model is trained, not its text part alone; remove it")
        return problems


def check_image_model(config: PreTrainedConfig, name: str) -> None:
    """Raise ConfigError for a model that cannot be trained on images, and for rows that ranks share."""
    if not sees_images(config):
        raise ConfigError(
            f"{name} is a {config.model_type}; rows with images train these types of models: {', '.join(IMAGE_MODELS)}"
        )
    if ranks_a_row() > 1:
        raise ConfigError(
            f"parallelism_config_cp_size is {ranks_a_row()}, but ranks cannot share rows with images; remove it"
        )


def load_image_model(args: Any) -> PreTrainedModel:
    """Load a model that sees images, whole, with frozen parts; its rows are those of `join_documents`.

    `args` are those of a recipe (`TrainArgs`) with `ImageModelArgs`, `model_name_or_path` and `attn_implementation`.
    --data_only makes it on the meta device. Under FSDP2 it has no values until `distributed.prepare` has sharded it.

    Raises:
        ConfigError: for a model that cannot be loaded, or not be trained on images.
    """
    name, settings = args.model_name_or_path, load_settings(args)
    config = load_config(name)
    check_image_model(config, name)
    attention, _ = choose(args.attn_implementation, config, settings["dtype"], args.has_boundaries)
    settings |= {"attn_implementation": {"text_config": attention, "vision_config": "sdpa"}}
    if args.data_only:
        model = image_model_on_meta(config, **settings)
        model.generation_config = generation_config(model, name)
        return model
    model = tie_as_read(read_model(AutoModelForImageTextToText, config, name, settings))
    # Some classes name parts of a layer, or modules that are never called.
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    model._no_split_modules = sorted(layers)
    return freeze(correct(model), args)


def correct(model: PreTrainedModel) -> PreTrainedModel:
    """Correct, in place, what transformers computes otherwise for a packed row with images than for its documents."""
    upstream.keep_lone_token(model)
    if sees_images_whole(model.config):
        model.register_forward_pre_hook(torch.compiler.disable(add_image_masks), with_kwargs=True)
    return model


def image_model_on_meta(config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Make a model that sees images without values: it knows positions; see `join_documents`."""
    return on_meta(AutoModelForImageTextToText, config, **settings)


def add_image_masks(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Give a model the masks of packed rows before it computes them; a text that it generates has another mask."""
    is_other = any(kwargs.get(name) is not None for name in ("attention_mask", *upstream.CACHES))
    if is_other or kwargs.get("position_ids") is None:
        return None
    return args, kwargs | image_masks(model.config, kwargs)


def images_and_text(max_pixels: int | None = None) -> Kind:
    """Return the way in which models that see images are loaded; their processor has `max_pixels`."""

    def read(name: str) -> ProcessorMixin:
        return load_processor(name, load_image_tokenizer(name), max_pixels)

    return Kind("AutoModelForImageTextToText", read, check_image_model)
