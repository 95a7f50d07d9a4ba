"""Processors of models that see images: a tokenizer, and what makes values of images, by PIL."""

import importlib
import inspect
import sys
from functools import cache as kept
from typing import Any

import transformers
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.hub import cache
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.models.tokenizers import load_tokenizer


def load_image_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that sees images, with its processor's chat template, which writes images.

    Processors of transformers 4 have it in a file of their own, chat_template.json. The tokenizer's own is missing then, or
    writes texts alone.

    Raises:
        ConfigError: like `load_tokenizer`.
    """
    tokenizer = load_tokenizer(name)
    saved, _ = ProcessorMixin.get_processor_dict(name, **cache.pinned(name))
    tokenizer.chat_template = saved.get("chat_template") or tokenizer.chat_template
    return tokenizer


def load_processor(
    name: str, tokenizer: PreTrainedTokenizerBase, max_pixels: int | None = None, config: PreTrainedConfig | None = None
) -> ProcessorMixin:
    """Load the processor of a pretrained model, with this tokenizer. `max_pixels` replaces the most pixels of its images.

    Its class is the one that its files name, as AutoProcessor takes it, else that of the type of model: a Pixtral is a LLaVA
    with another processor. `config` is that of the model; default: the one beside the processor, which a folder of adapters
    does not have.

    It reads no videos and no sound, so it needs neither torchvision nor what decodes them. Images are scaled by PIL, on
    every machine alike: torchvision would give other values (by up to 0.015, where their standard deviation is 0.85).

    Raises:
        ConfigError: for a model without a processor that transformers knows, for files that are missing or wrong, and for
            `max_pixels` that are too few, or of images that the model reads in a size of its own.
    """
    kind = (config or load_config(name)).model_type
    if kind not in PROCESSOR_MAPPING_NAMES:
        raise ConfigError(f"{name} is a {kind}, for which transformers has no processor of images with text")
    pinned = cache.pinned(name)
    try:
        saved, _ = ProcessorMixin.get_processor_dict(name, **pinned)
        images = AutoImageProcessor.from_pretrained(name, backend="pil", **pinned)
        of_images, _ = ImageProcessingMixin.get_image_processor_dict(name, **pinned)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the processor of {name} cannot be loaded: {one_line(error)}") from error
    files = (saved, of_images, tokenizer.init_kwargs)
    named = next(filter(None, (parts.get("processor_class") for parts in files)), "")
    # A class of a folder's own code is not run.
    is_known = named in sys.modules["transformers"]._class_to_module
    processor_class = class_of_processor(named if is_known else PROCESSOR_MAPPING_NAMES[kind])
    known = inspect.signature(processor_class.__init__).parameters.keys() - {"self", "kwargs", "chat_template"}
    if max_pixels:
        # Those that merge patches of an image of any size count pixels in `size`, whatever its names.
        if not (hasattr(images, "merge_size") and "longest_edge" in images.size):
            raise ConfigError(
                f"--image_max_pixels {max_pixels}: the processor of {name} ({type(images).__name__}) brings images to sizes "
                "of its own; remove it"
            )
        # GLM counts the pixels of an image once for each of the frames that a patch has.
        by_frame = "temporal_factor" in inspect.signature(images.resize).parameters
        frames = images.temporal_patch_size if by_frame else 1
        if max_pixels * frames < (least := images.size["shortest_edge"]):
            raise ConfigError(
                f"--image_max_pixels {max_pixels}: the processor of {name} scales smaller images up to {least // frames:,} "
                "pixels; give at least as many"
            )
        images.size = images.size | {"longest_edge": max_pixels * frames}
    parts = dict.fromkeys(processor_class.get_attributes()) | {"image_processor": images, "tokenizer": tokenizer}
    own = {field: value for field, value in saved.items() if field in known - parts.keys()}
    return processor_class(**parts, **own, chat_template=tokenizer.chat_template)


@kept
def class_of_processor(name: str) -> type[ProcessorMixin]:
    """Find a class of transformers by its name, without torchvision too.

    transformers 5.24 puts a class that refuses to be used in the place of one whose module names torchvision, asks for a
    processor of videos, and for a package that spells numbers of frames.
    """
    lazy = sys.modules["transformers"]
    module_name = f"transformers.{lazy._class_to_module[name]}"
    folder = module_name.rpartition(".")[0]
    kind = folder.rpartition(".")[2]
    if kind == "pixtral" and not transformers.utils.is_torchvision_available():
        by_pil = importlib.import_module(f"{folder}.image_processing_pil_{kind}")
        sys.modules.setdefault(f"{folder}.image_processing_{kind}", by_pil)
    module = importlib.import_module(module_name)
    if getattr(module, "num2words", True) is None:
        module.num2words = str  # of videos alone
    original = getattr(module, name)

    class WithoutVideos(original):
        def check_argument_for_proper_class(self, argument_name, argument):
            return type(None) if argument is None else super().check_argument_for_proper_class(argument_name, argument)

        def __reduce__(self):  # for data workers: another process makes this class anew
            return remade, (name, self.__dict__)

    WithoutVideos.__name__ = WithoutVideos.__qualname__ = name
    return WithoutVideos


def remade(name: str, fields: dict[str, Any]) -> ProcessorMixin:
    """Make a processor of `class_of_processor` again from its fields."""
    cls = class_of_processor(name)
    processor = cls.__new__(cls)
    processor.__dict__.update(fields)
    return processor
