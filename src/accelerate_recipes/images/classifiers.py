"""Classifiers of images, made from a name, a folder or sizes; their processors, loss, FLOPs, and evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import mod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from accelerate_recipes.data.rows import RowLoader
from accelerate_recipes.disk import read_json_lines, write_atomically
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.errors import ConfigError, DataError, first_line
from accelerate_recipes.hub import cache
from accelerate_recipes.images.labelled import Images
from accelerate_recipes.life.picture import draw_images
from accelerate_recipes.losses import count_labels
from accelerate_recipes.metrics import Flops, trained_share
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.classifiers import load_classifier, with_classes
from accelerate_recipes.models.configuration_deepvit import DeepViTConfig, register_model
from accelerate_recipes.models.configurations import Architecture, new_config
from accelerate_recipes.models.loading import on_meta
from accelerate_recipes.models.pretrained import Kind, load_config
from accelerate_recipes.ranks import on_all_ranks, on_first_rank
from accelerate_recipes.trial import Trial, config_of

# No code in a folder is run: transformers prefers a registered class to the copy in an export.
transformers.AutoConfig.register(DeepViTConfig.model_type, DeepViTConfig)

# Layers that FSDP gathers one by one. transformers' own list also has embeddings, or whole stages of a Swin or a ConvNeXt.
LAYERS = {
    "deepvit": "DeepViTLayer",
    "vit": "ViTLayer",
    "deit": "DeiTLayer",
    "dinov2": "Dinov2Layer",
    "swin": "SwinLayer",
    "convnext": "ConvNextLayer",
}
CHANNELS = [0.5] * 3  # mean and standard deviation of the channels; with them, a new model's pixels lie in [-1, 1]
NUM_DRAWN = 40  # held-out images on the sheet; half of them are classified wrongly, if there are enough such images
MOST_CLASSES = 30  # in the picture of the confusion matrix
NUM_CLASSES = 1000  # of a trial, as in ImageNet: the classes of the data are not known before the data are read


def new_vision_config(args: Architecture) -> PreTrainedConfig:
    """Make the configuration of the model that the arguments describe, without stochastic depth."""
    return new_config(args, **{"drop_path_rate": 0.0} if args.model_type == "swin" else {})


def image_size_problems(args: Architecture) -> list[str]:
    """List the sizes that no new model can have, one sentence each."""
    if problems := args.architecture_problems(None):
        return problems
    config, problems = new_vision_config(args), []
    if not isinstance(size := getattr(config, "image_size", 0), int):
        problems.append(f"--config_overrides: image_size {size}: a new model takes square images; give one number")
    for name, of in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
        size, part = getattr(config, name, 0), getattr(config, of, 1)
        if isinstance(size, int) and isinstance(part, int) and (part < 1 or size % part):
            problems.append(f"--config_overrides: {name} {size} is not a multiple of {of} {part}")
    if config.model_type == "swin":
        widths = [config.embed_dim * 2**stage for stage in range(len(config.depths))]
        if len(config.num_heads) != len(widths) or 0 in config.num_heads or any(map(mod, widths, config.num_heads)):
            problems.append(
                f"--config_overrides: of depths {config.depths}, the widths are {widths}; num_heads {config.num_heads} must "
                "have a divisor of each"
            )
    return problems


def new_classifier(args: Architecture, names: list[str], dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Make a classifier of images on the meta device; `distributed.prepare` draws its first weights."""
    return by_layers(classifier_on_meta(with_classes(new_vision_config(args), names), dtype))


def classifier_on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Make a classifier of images on the meta device, in `dtype`."""
    return on_meta(IMAGE_CLASSIFIER.auto_class, config, dtype=dtype)


def load_image_classifier(name: str, names: list[str], **settings: Any) -> transformers.PreTrainedModel:
    """Load a model of images as `load_classifier` does.

    Raises:
        ConfigError: for another kind of model.
    """
    check_classifier(load_config(name), name)
    register_model()
    return by_layers(load_classifier(IMAGE_CLASSIFIER.auto, name, names, **settings))


def check_classifier(config: PreTrainedConfig, name: str) -> None:
    """Raise ConfigError for a model whose type is not in LAYERS, and for one that does not read three channels."""
    if config.model_type not in LAYERS:
        raise ConfigError(f"{name} is a {config.model_type}, not one of {', '.join(LAYERS)}; give another model")
    if (number := getattr(config, "num_channels", 3)) != 3:
        raise ConfigError(
            f"num_channels of {name} is {number}, and images are read in 3, red, green and blue; give 3, or another model"
        )


def by_layers(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Set the layers that FSDP gathers one by one, and freeze weights that no image reaches; return the model."""
    model._no_split_modules = [LAYERS[model.config.model_type]]
    if model.config.model_type == "convnext":
        # Accelerate 1.15 asks for the input embedding (fsdp2_prepare_model). There is none, so transformers 5.23 raises.
        model.get_input_embeddings = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    for name, parameter in model.named_parameters():
        if name.endswith(".mask_token"):  # only for pretraining: without a gradient, DDP would wait for it
            parameter.requires_grad_(False)
    return model


def load_image_processor(name: str) -> Any:
    """Load the processor that prepares a model's images, in its version with PIL.

    Raises:
        ConfigError: if no processor can be loaded.
    """
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            name, backend="pil", **cache.pinned(name), trust_remote_code=False
        )
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the preprocessor_config.json of {name} cannot be used: {first_line(error)}") from error


IMAGE_CLASSIFIER = Kind(
    "AutoModelForImageClassification",
    load_image_processor,
    check_classifier,
    has_new_layer=True,
    register=register_model,
)


def new_image_processor(size: int) -> transformers.BitImageProcessorPil:
    """Make a processor that resizes the shorter side of an image to `size` pixels, and takes the middle."""
    square = {"height": size, "width": size}
    return transformers.BitImageProcessorPil(
        size={"shortest_edge": size}, crop_size=square, image_mean=CHANNELS, image_std=CHANNELS, resample=2
    )


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute logits, (B, C), in fp32; the pixels get the dtype of the weights, which may be bf16."""
    pixels = batch["pixel_values"].to(next(model.parameters()).dtype)
    return model(pixel_values=pixels).logits.float()


def image_loss(model: nn.Module, batch: dict[str, torch.Tensor], label_smoothing: float = 0.0) -> torch.Tensor:
    """Compute the sum of the cross entropies of a batch, in nats. A mixed image counts for both labels, by their shares.

    With `label_smoothing` s, the target is 1 - s at the label, plus s / C at each of the C classes.
    """
    logits = logits_of(model, batch)
    settings = {"reduction": "none", "ignore_index": IGNORE_INDEX, "label_smoothing": label_smoothing}
    losses = F.cross_entropy(logits, batch["labels"], **settings)
    if "share" in batch:
        share = batch["share"].to(losses)
        losses = share * losses + (1 - share) * F.cross_entropy(logits, batch["other_labels"], **settings)
    return losses.sum()


def images_trial(args: Any, loss_fn: Callable) -> Trial:
    """Make the trial of a classifier with NUM_CLASSES classes; its images have the size in its configuration."""
    config = new_vision_config(args) if args.from_scratch else config_of(args)
    check_classifier(config, args.base_model)
    rows, size = args.per_device_train_batch_size, config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    batch = {
        "pixel_values": torch.zeros(rows, 3, height, width),
        "labels": torch.zeros(rows, dtype=torch.int64),
        "row": torch.arange(rows),
    }
    if args.mixup_alpha or args.cutmix_alpha:
        batch |= {"other_labels": torch.zeros(rows, dtype=torch.int64), "share": torch.ones(rows)}
    config = with_classes(config, [str(number) for number in range(NUM_CLASSES)])

    def make_model(config: PreTrainedConfig) -> transformers.PreTrainedModel:
        return by_layers(classifier_on_meta(config, load_settings(args)["dtype"]))

    return Trial(config, make_model, loss_fn, count_labels, batch, rows, unit="images")


def flops_per_image(model: transformers.PreTrainedModel, size: tuple[int, int]) -> Flops:
    """Count the training FLOPs per image of `size`, height and width in pixels.

    A weight has 6 FLOPs for each place that it multiplies, a frozen weight 4. Each product of a query with a key, and of an
    attention weight with a value, has 12. The function counts the matrix products and convolutions of a forward pass of the
    same model on the meta device. A multiplication with an addition is 2 FLOPs; the backward pass has twice as many. For a
    ViT of L layers, width D, MLP M and N patches of P pixels a side, T = N + 1 tokens, the sum is
    6 (L (4 D^2 + 2 D M) T + 3 P^2 D N + D C) + 12 L D T^2; re-attention of H heads adds 6 L H^2 T^2.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    twin = classifier_on_meta(model.config).eval()
    # Attention kernels have no FLOP count on the meta device.
    twin.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        twin(pixel_values=torch.empty(1, 3, *size, device="meta"))
    return Flops((2 + trained_share(model)) * counter.get_total_flops())


# Evaluation


class ImageEvaluation:
    """Evaluator of held-out images. Predictions of step n are kept in predictions/step-<n>.jsonl, for the pictures.

    A line has the image's `row` and `label`, the most probable `classes`, the `probability` of the first, and the `loss`.
    """

    def __init__(self, metric_file: Path, heldout: Images, loader: RowLoader, names: list[str], output_dir: Path):
        import evaluate

        self.metric = evaluate.load(str(metric_file), keep_in_memory=True)
        self.heldout, self.loader, self.names = heldout, loader, names
        self.folder = output_dir / "predictions"

    def file(self, step: int) -> Path:
        return self.folder / f"step-{step}.jsonl"

    def evaluate(self, accelerator: Accelerator, model: nn.Module, step: int) -> dict[str, float]:
        """Evaluate `model`. Every rank takes its share; all get `loss` and the metrics over all images.

        Raises:
            DataError: if no image can be decoded.
        """
        mine = predict_classes(accelerator, model, self.loader)
        lines = sorted((line for part in on_all_ranks(mine) for line in part), key=lambda line: line["row"])

        def measure() -> dict[str, float]:
            if not lines:
                raise DataError(
                    f"all {len(self.heldout)} images to evaluate on ({self.heldout.side.source}) are broken; leave out "
                    "--skip_broken_images to see why"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file(step), "".join(json.dumps(line) + "\n" for line in lines))
            values = self.measure(lines)
            del values["by_class"]
            return {"loss": sum(line["loss"] for line in lines) / len(lines)} | values

        return on_first_rank(measure)

    def measure(self, lines: list[dict]) -> dict[str, Any]:
        """Compute the metrics of predictions."""
        return self.metric.compute(  # pyright: ignore[reportReturnType]
            predictions=[line["classes"] for line in lines],
            references=[line["label"] for line in lines],
            probabilities=[line["probability"] for line in lines],
        )

    def by_class(self, step: int) -> dict[str, float]:
        """Return the accuracy of each class, in percent."""
        shares = self.measure(read_json_lines(self.file(step)))["by_class"]
        return {self.names[label]: 100 * share for label, share in shares.items()}

    def draw(self, folder: Path, step: int) -> None:
        """Draw the confusion matrix, and held-out images with their predictions, as confusion.png and heldout.png."""
        lines = read_json_lines(self.file(step))
        if len(self.names) <= MOST_CLASSES:
            matrix = np.zeros((len(self.names), len(self.names)), dtype=int)
            for line in lines:
                matrix[line["label"], line["classes"][0]] += 1
            draw_matrix(folder / "confusion.png", matrix, self.names, f"Held-out images after {step} steps")
        wrong = [line for line in lines if line["label"] != line["classes"][0]][: NUM_DRAWN // 2]
        right = [line for line in lines if line["label"] == line["classes"][0]][: NUM_DRAWN - len(wrong)]
        drawn = []
        for line in wrong + right:
            label, predicted = self.names[line["label"]], self.names[line["classes"][0]]
            text = f"{predicted} {line['probability']:.0%}" + (f"\nis: {label}" if predicted != label else "")
            drawn.append((np.asarray(self.heldout.image(line["row"])), text, predicted == label))
        draw_images(folder / "heldout.png", drawn, f"Held-out images after {step} steps; wrong ones in red")


@torch.no_grad()
def predict_classes(accelerator: Accelerator, model: nn.Module, loader: RowLoader) -> list[dict]:
    """Predict the classes of this rank's images; return lines as `ImageEvaluation` describes them.

    Raises:
        Stopped: between two batches.
    """
    lines = []
    for batch in batches_to_evaluate(accelerator, model, loader):
        logits = logits_of(model, batch)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none", ignore_index=IGNORE_INDEX)
        top = logits.softmax(-1).topk(min(5, logits.shape[-1]))
        columns = (batch["row"], batch["labels"], top.indices, top.values[:, 0], losses)
        for row, label, classes, probability, loss in zip(*(column.tolist() for column in columns), strict=True):
            if label != IGNORE_INDEX:
                values = {"row": row, "label": label, "classes": classes, "probability": probability, "loss": loss}
                lines.append(values)
    return lines


def draw_matrix(path: Path, counts: np.ndarray, names: Sequence[str], title: str) -> None:
    """Write a PNG of a confusion matrix: in row i and column j the number of images of class i taken for class j."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 0.6 * len(names), 1.5 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(counts / counts.sum(1, keepdims=True).clip(1), cmap="Blues", vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(counts):
        if count:
            dark = count > counts[i].sum() / 2
            axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="label", title=title)
    figure.savefig(path, dpi=110)
