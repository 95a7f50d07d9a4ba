"""Preparation of images as tensors, with random augmentation of training images.

The augmentation is a pure function of (seed, epoch, row). So a resumed run, and a run on another number of processes or
loader workers, trains on the same pixels.
"""

import io
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional as F

from accelerate_recipes.args import arg
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models import IGNORE_INDEX

RATIO = 4 / 3  # largest ratio of the sides of a random crop
# From the number of an image: it, or None, and its label.
Labelling = Callable[[int], tuple[Image.Image | None, int]]
TORCHS_GENERATOR = threading.Lock()  # several threads may augment at the same time if a stream has no workers


@dataclass
class Augmentation:
    """Arguments of the random augmentation of training images."""

    group = "data"
    crop_area: float = arg(0.08, "Smallest area of a random crop, as a share of the image; 1: no crop.", above=0, max=1)
    horizontal_flip: bool = arg(True, "Mirror each image with probability 1/2.")
    rand_augment: int = arg(
        0, "Operations of RandAugment on each image; 0: none. Install torchvision separately.", min=0, max=14
    )
    mixup_alpha: float = arg(
        0.0, "Mix each image with another; the share is drawn from Beta(this, this); 0: never.", min=0, max=100
    )
    cutmix_alpha: float = arg(
        0.0, "Paste a part of another into each; its share is drawn from Beta(this, this); 0: never.", min=0, max=100
    )


def open_image(content: bytes) -> Image.Image:
    """Open an image. Raises ValueError for a mode that PIL would silently convert to white or black."""
    image = Image.open(io.BytesIO(content))
    if image.mode[0] in "IF":
        raise ValueError(f"it has more than 8 bits a channel (PIL's mode {image.mode}); convert the images to 8 bits")
    return image


def decode(content: bytes) -> Image.Image:
    """Decode an image as transformers does: upright, red, green and blue, the first picture of several."""
    with open_image(content) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


class Preparation:
    """Preparation of images as tensors, with the model's own processor, or with an `augmentation` for training."""

    def __init__(
        self, processor: Any, augmentation: Augmentation | None = None, seed: int = 0, skips_broken: bool = False
    ):
        self.processor, self.seed, self.skips_broken = processor, seed, skips_broken
        self.augmentation: Any = augmentation
        self.size = image_size(processor)  # height and width
        # A processor that does not crop may keep the sizes of images, or their ratios.
        height, width = self.size
        others = (Image.new("RGB", size) for size in ((width, 2 * height), (2 * width, height)))
        self.is_fixed = all(self.by_processor(image).shape[1:] == self.size for image in others)
        if augmentation is not None:
            self.check_colours(augmentation.crop_area == 1)
        crops = getattr(processor, "do_center_crop", False) and not processor.do_resize
        if crops and augmentation is not None and augmentation.crop_area < 1:
            raise ConfigError(
                f"--crop_area {augmentation.crop_area} scales parts of images to {height} x {width} pixels, but the model's "
                "processor takes the middle of images as they are (do_resize is false); give --crop_area 1"
            )

    def by_processor(self, image: Image.Image, **settings: Any) -> torch.Tensor:
        """Prepare an image by the model's own processor, (3, H, W), with `settings` of it."""
        return torch.as_tensor(self.processor(images=image, return_tensors="pt", **settings)["pixel_values"][0])

    def check_colours(self, is_processed: bool) -> None:
        """Raise ConfigError if evaluation sees other colours than training, whose images the processor resizes or not.

        EfficientNet normalizes twice (`include_top`), and MobileViT exchanges red and blue.
        """
        height, width = self.size
        image = Image.new("RGB", (width, height), (250, 120, 10))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if is_processed:
            pixels = self.by_processor(image, do_rescale=False, do_normalize=False)
        trained, seen = (p.mean((1, 2)) for p in (normalized(pixels.float(), self.processor), self.by_processor(image)))
        if (trained - seen).abs().max() > 0.05:
            raise ConfigError(
                f"the model's {type(self.processor).__name__} does more to colours than to scale and shift them: of one, "
                f"training would see {trained.tolist()}, and evaluation {seen.tolist()}; switch that off in its "
                "preprocessor_config.json, or give another model"
            )

    def checked(self, image: Image.Image) -> Image.Image:
        """Return an image of which the processor makes one of the size of all others.

        Raises:
            ValueError: for another one.
        """
        if not self.is_fixed and (shape := self.by_processor(image).shape[1:]) != self.size:
            (height, width), (to_height, to_width) = shape, self.size
            raise ValueError(
                f"of its {image.height} x {image.width} pixels, the processor of the model makes {height} x {width}, and a "
                f"batch has {to_height} x {to_width}; give images of one size, or have the preprocessor_config.json of the "
                "model bring them to one (do_resize, size, do_center_crop)"
            )
        return image

    def trained(self, key: tuple[int, ...], number: int, count: int, labelled: Labelling) -> dict[str, torch.Tensor]:
        """Return `pixel_values`, (3, H, W), and `labels` of image `number`, augmented at random with the seed `key`.

        `labelled(number)` gives an image, or None, and its label.
        The result of a mixed image also has `other_labels`, the label of its partner among `count` images, and `share`, the
        share of the first image.

        Raises:
            DataError: for an image that cannot be decoded, unless broken images are left out.
        """
        settings, generator = self.augmentation, np.random.default_rng(key)
        first, label = self.decoded(labelled, number)
        sample = {"labels": torch.tensor(label)}
        pixels = self.augmented(first, generator)
        if settings.mixup_alpha or settings.cutmix_alpha:
            (second, other_label), share = self.decoded(labelled, int(generator.integers(count))), 1.0
            if second is not None:
                pixels, share = self.mixed(pixels, self.augmented(second, generator), generator)
            other_label = label if first is None else other_label
            sample |= {"other_labels": torch.tensor(other_label), "share": torch.tensor(share)}
        return sample | {"pixel_values": normalized(pixels, self.processor)}

    def decoded(self, labelled: Labelling, number: int) -> tuple[Image.Image | None, int]:
        """Return image and label, `labelled(number)`; for a broken image that is left out, no image and no target."""
        try:
            return labelled(number)
        except DataError:
            if not self.skips_broken:
                raise
            return None, IGNORE_INDEX

    def augmented(self, image: Image.Image | None, generator: np.random.Generator) -> torch.Tensor:
        """Crop and mirror an image at random; (3, H, W), from 0 to 255. None gives a black image."""
        if image is None:
            return torch.zeros(3, *self.size)
        settings = self.augmentation
        if settings.crop_area < 1:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
            top, left, height, width = random_box(image.height, image.width, settings.crop_area, generator)
            pixels = pixels[:, top : top + height, left : left + width]
            resized = F.interpolate(pixels[None], size=self.size, mode="bilinear", antialias=True)[0]
        else:  # what evaluation sees
            resized = self.by_processor(image, do_rescale=False, do_normalize=False)
        if settings.horizontal_flip and generator.random() < 0.5:
            resized = resized.flip(-1)
        return rand_augment(resized, settings.rand_augment, generator) if settings.rand_augment else resized.float()

    def mixed(
        self, pixels: torch.Tensor, other: torch.Tensor, generator: np.random.Generator
    ) -> tuple[torch.Tensor, float]:
        """Mix two images by mixup or cutmix (either with equal probability if both are on); also return the first's share.

        Source: Zhang et al., mixup, 2018; Yun et al., CutMix, 2019.
        """
        settings = self.augmentation
        is_cut = settings.cutmix_alpha > 0 and (settings.mixup_alpha == 0 or generator.random() < 0.5)
        alpha = settings.cutmix_alpha if is_cut else settings.mixup_alpha
        share = float(generator.beta(alpha, alpha))
        if not is_cut:
            return share * pixels + (1 - share) * other, share
        height, width = (round(side * math.sqrt(1 - share)) for side in self.size)
        top, left = (int(generator.integers(s - own + 1)) for s, own in zip(self.size, (height, width), strict=True))
        part = (slice(None), slice(top, top + height), slice(left, left + width))
        pasted = pixels.clone()
        pasted[part] = other[part]
        return pasted, 1 - (height / self.size[0]) * (width / self.size[1])


def normalized(pixels: torch.Tensor, processor: Any) -> torch.Tensor:
    """Scale and shift pixels, (3, H, W) from 0 to 255, as a processor does after resizing."""
    if processor.do_rescale:
        pixels = pixels * processor.rescale_factor
    if not processor.do_normalize:
        return pixels
    # One number may stand for all channels.
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (processor.image_mean, processor.image_std))
    return (pixels - mean) / std


def image_size(processor: Any) -> tuple[int, int]:
    """Return height and width of the images that a processor makes, of one that has this size.

    Raises:
        ConfigError: for a processor that names no size.
    """
    crop = dict(processor.crop_size or {}) if getattr(processor, "do_center_crop", False) else {}
    sizes = crop or dict(processor.size)
    edge = sizes.get("shortest_edge") or sizes.get("longest_edge")
    height, width = sizes.get("height") or edge, sizes.get("width") or edge
    if not (height and width):
        raise ConfigError(
            f"the preprocessor_config.json of the model has the size {sizes}, which says no height and width; give both"
        )
    return int(height), int(width)


def random_box(height: int, width: int, smallest: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a box in an image; its area is at least the share `smallest`.

    Source: Szegedy et al., Going Deeper with Convolutions, 2015, section 6. After ten tries it takes the whole image, as
    in torchvision.
    """
    for _ in range(10):
        area = height * width * generator.uniform(smallest, 1)
        ratio = math.exp(generator.uniform(-math.log(RATIO), math.log(RATIO)))
        box_height, box_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < box_height <= height and 0 < box_width <= width:
            top, left = generator.integers(height - box_height + 1), generator.integers(width - box_width + 1)
            return int(top), int(left), box_height, box_width
    return 0, 0, height, width


def rand_augment(pixels: torch.Tensor, num_ops: int, generator: np.random.Generator) -> torch.Tensor:
    """Apply `num_ops` random operations to an image, (3, H, W) of bytes. The operations depend only on the generator.

    Source: Cubuk et al., RandAugment, 2020. This calls torchvision's version, which draws from torch's generator.
    """
    from torchvision.transforms.v2 import RandAugment  # pyright: ignore[reportMissingImports]

    with TORCHS_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(2**63)))
        return RandAugment(num_ops)(pixels).float()
