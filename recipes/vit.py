"""Train an image classifier: fine-tune a ViT, DeiT, Swin, DINOv2 or ConvNeXt, or train a new one, such as a DeepViT.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 \\
        recipes/vit.py --config recipes/configs/vit/vit_large_imagenet.yaml

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/vit.py --config recipes/configs/vit/laptop.yaml

The images come from a dataset, a folder, Parquet files or tar shards, which can also be streamed. Before and after training
and every --eval_steps, the recipe measures loss, top-1 and top-5 accuracy and the calibration error on held-out images.
Pictures show which classes the model confuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import transformers

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data.rows import EpochOrder, make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.engine import train
from accelerate_recipes.images.classifiers import (
    IMAGE_CLASSIFIER,
    LAYERS,
    ImageEvaluation,
    flops_per_image,
    image_loss,
    image_size_problems,
    images_trial,
    load_image_classifier,
    load_image_processor,
    new_classifier,
    new_image_processor,
    new_vision_config,
)
from accelerate_recipes.images.labelled import ImageArgs, Images, collate_images, load_images
from accelerate_recipes.images.tars import ImageShards, ImageStreams
from accelerate_recipes.life.picture import Bars, Curves
from accelerate_recipes.losses import count_labels
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.configurations import Architecture
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.trial import Trial

METRIC = Path(__file__).parent / "metrics" / "image_classes.py"
MOST_NAMED = 12  # largest number of classes that the printed result names


@dataclass
class Args(ImageArgs, TrainArgs, Architecture):
    kind = IMAGE_CLASSIFIER

    output_dir: str = "outputs/vit"
    model_name_or_path: str = arg(
        "google/vit-base-patch16-224-in21k",
        "ViT, DeiT, Swin, DINOv2, ConvNeXt or DeepViT: a name on the Hub, or a folder.",
    )
    model_type: str = arg("deepvit", "Architecture of a new model.", choices=list(LAYERS))
    label_smoothing: float = arg(0.0, "Share of a target spread evenly over all classes.", fixed=False, min=0, below=1)
    has_new_layer = True

    def problems(self, world_size: int) -> list[str]:
        return super().problems(world_size) + (image_size_problems(self) if self.from_scratch else [])


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model],
        kind=IMAGE_CLASSIFIER,
        datasets=args.row_datasets,
        new_model=(lambda: make_model(args, ["one", "other"])) if args.from_scratch else None,
    )


def make_model(args: Args, names: list[str]) -> transformers.PreTrainedModel:
    if args.from_scratch:
        return new_classifier(args, names, args.param_dtype)
    return load_image_classifier(args.model_name_or_path, names, **load_settings(args))


def loss_fn(args: Args) -> Callable:
    return partial(image_loss, label_smoothing=args.label_smoothing)


def trial(args: Args) -> Trial:
    return images_trial(args, loss_fn(args))


def main(args: Args) -> None:
    run = start(args)

    # Images
    if args.base_model:
        processor = load_image_processor(args.base_model)
    else:
        processor = new_image_processor(new_vision_config(args).image_size)
    train_side, heldout_side, names = load_images(args)
    how = (processor, args, args.seed, args.skip_broken_images)
    place = (args, run.rank, run.world_size)
    if train_side is None:
        shards = ImageShards(on_first_rank(args.train_shards), names, *how)
        train_loader = ImageStreams(shards, *place, num_streams=args.num_streams)
        total_steps, said = args.max_steps, f"the images of {len(shards.shards):,} streamed shards"
        note = train_loader.workers_note
    else:
        train_images = Images(train_side, *how)
        content = on_first_rank(lambda: train_side.content)
        train_loader = make_train_loader(
            train_images, *place, collate_fn=collate_images, content=content, order_class=EpochOrder
        )
        total_steps, said = num_steps(args, len(train_images)), f"{len(train_images):,} images"
        note = ""
    heldout_images = Images(heldout_side, processor, skips_broken=args.skip_broken_images)
    heldout_loader = make_eval_loader(heldout_images, *place, collate_fn=collate_images)
    run.show_images({"Training": train_loader, "Evaluation": heldout_loader}, names, processor)

    # Model
    flops_fn = partial(flops_per_image, size=heldout_images.size)
    run.prepare(make_model(args, names), processor, total_steps=total_steps, flops_fn=flops_fn)
    run.print(
        f"Data: {said} of {len(names):,} classes to train on, {len(heldout_images):,} held out; "
        f"{' x '.join(map(str, heldout_images.size))} pixels{note}"
    )

    # Training and evaluation
    evaluation = ImageEvaluation(METRIC, heldout_images, heldout_loader, names, run.output_dir)

    def evaluate_fn(step: int) -> dict[str, float]:
        return evaluation.evaluate(run.accelerator, run.model, step)

    records = train(run, train_loader, loss_fn=loss_fn(args), count_fn=count_labels, evaluate_fn=evaluate_fn)

    # Result
    if not on_first_rank(evaluation.file(run.total_steps).exists):  # the last evaluation ran with another --output_dir
        evaluate_fn(run.total_steps)

    def result(before: dict, after: dict) -> Result:
        evaluation.draw(run.output_dir, run.total_steps)
        measured = {"accuracy": "top-1", "top5_accuracy": "top-5", "calibration_error": "calibration error"}
        values = {
            key: {text: 100 * record[f"eval_{name}"] for name, text in measured.items()}
            for key, record in (("before", before), ("after", after))
        }
        text = "\n".join(
            f"Held-out images ({len(heldout_images):,}), {name}: before {values['before'][name]:.2f}%, "
            f"after {values['after'][name]:.2f}%"
            for name in measured.values()
        )
        by_class = evaluation.by_class(run.total_steps)
        named = islice(by_class.items(), MOST_NAMED)
        text += "\nBy class: " + ", ".join(f"{name} {share:.1f}%" for name, share in named)
        curves = [Curves({"top-1": "eval_accuracy", "top-5": "eval_top5_accuracy"}, "Accuracy, held out")]
        return Result(text, Bars(values, "Held-out images", "%"), curves)

    begin = f"A new {args.model_type}, trained" if args.from_scratch else f"{args.model_name_or_path}, fine-tuned"
    finish(run, records, f"{begin} on {said} from {args.source}.", result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
