"""Train tiny models that see images for a few steps, one after the other: in some steps, some or all ranks have no image.

<output_dir>/NAME.json holds the losses and the norms of the gradients of a model, NAME.safetensors its weights at the end.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tiny_images
import torch
import toy
from safetensors.torch import save_file
from torch import nn
from toy import requirements

from accelerate_recipes.args import arg
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.conversations.heads import add_head
from accelerate_recipes.distributed import fsdp_units, make_accelerator
from accelerate_recipes.engine import on_this_rank, train_step
from accelerate_recipes.images.pictures import Pictures, processor_files
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.image_probe import tiny_of_text
from accelerate_recipes.models.images import ImageModelArgs, image_model_on_meta, join_documents, load_image_model
from accelerate_recipes.models.processors import load_processor
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run

Document = dict[str, torch.Tensor]
BOTH_WAYS = "gemma4-both-ways"  # a Gemma 4 in which the tokens of an image see each other, as in its larger ones
# Texts, the sizes of the images in them, and answers.
TEXTS = [
    ("<image>What is it?", [(24, 16)], "a cat."),
    ("Compare <image> and <image>", [(16, 16), (40, 20)], "both"),
    ("No image here", [], "right"),
    ("See:<image>", [(16, 32)], "a dog"),
]
BLANK = ("<image>", [(8, 8)], "")
# For each step the documents of its two rows. None of the second step has an image; sizes differ much in the third.
STEPS = [
    ([TEXTS[0], TEXTS[1]], [TEXTS[2], BLANK]),
    ([TEXTS[2], BLANK], [("Nor here", [], "no"), BLANK]),
    ([("<image>?", [(64, 48)], "large")], [TEXTS[3], TEXTS[2], ("<image>", [(8, 8)], "small")]),
    ([TEXTS[2], BLANK], [TEXTS[1]]),
]


@dataclass
class Args(toy.Args, ImageModelArgs):
    bases: list[str] = arg([], "Folders of models.")
    image_max_pixels: int | None = arg(None, "Most pixels of an image.")
    exports: bool = arg(False, "Save and export each model, to <output_dir>/NAME/export.")
    has_boundaries = True


def documents_of(name: str, texts: list[tuple] = TEXTS) -> list[Document]:
    """Make documents as rows do: the text with its images' tokens, targets, and what the model reads of the images."""
    name = name.partition("-")[0]
    pictures = Pictures(processor := tiny_images.processor(name))
    tokenizer, mark, found = processor.tokenizer, tiny_images.FAMILIES[name]["written"], []
    for number, (text, sizes, answer) in enumerate(texts):
        first, *others = text.replace("<image>", mark).split(processor.image_token)
        written = [pictures.of_size(*size, len(sizes) > 1)[0] for size in sizes]
        before = "".join([first, *(image + part for image, part in zip(written, others, strict=True))])
        prompt, target = (tokenizer(part)["input_ids"] for part in (f"<|im_start|>{before}:", f"{answer}<|im_end|>"))
        ids = torch.tensor([prompt + target])
        labels = torch.tensor([[IGNORE_INDEX] * len(prompt) + (target if answer else [IGNORE_INDEX] * len(target))])
        shown = [tiny_images.picture(*size, seed=10 * number + i) for i, size in enumerate(sizes)]
        found.append({"input_ids": ids, "labels": labels} | pictures.types_of(ids) | pictures.inputs(shown))
    return found


OUTPUTS = ("loss", "log_probs", "entropy", "is_top1")  # as in SFT


def loss_of(model: nn.Module, batch: Document) -> torch.Tensor:
    return model(**batch, use_cache=False, fused_lm_head=True).loss


def main(args: Args) -> None:
    run, out = Run(args, make_accelerator(args)), Path(args.output_dir)
    if run.is_first:
        out.mkdir(parents=True)
    for folder in args.bases:
        name, args.model_name_or_path = Path(folder).name, folder
        model = load_image_model(args)
        add_head(model, OUTPUTS, tiny=tiny_of_text)
        positions = image_model_on_meta(model.config).base_model
        if run.accelerator.is_fsdp2:
            run.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None  # those of the model before
        if args.exports:
            (out / name).mkdir()
            args.output_dir = str(out / name)
            processor = load_processor(folder, load_tokenizer(folder), args.image_max_pixels)
            run.prepare(model, processor.tokenizer, len(STEPS), files=processor_files(folder, processor))
        else:
            run.shard(model)
        run.model.train()
        found = []
        for rows in STEPS:
            own = [join_documents(positions, documents_of(name, row)) for row in rows[run.rank :: run.world_size]]
            step = train_step(
                run, [on_this_rank(row, run.accelerator, run.model) for row in own], loss_of, count_next_tokens
            )
            if args.exports:
                run.scheduler.step()
            found.append((step.loss, step.grad_norm.item()))
        weights = {WRAPPERS.sub("", name): toy.whole(p).contiguous() for name, p in run.model.named_parameters()}
        if run.is_first:
            result = {"steps": found, "units": sorted({type(unit).__name__ for unit in fsdp_units(run.model)})}
            (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
            save_file({name: weight.clone() for name, weight in weights.items()}, out / f"{name}.safetensors")
        if args.exports:
            if run.is_first:
                (out / name / "metrics.jsonl").touch()
            run.checkpointer.save(len(STEPS), [])
            run.checkpointer.wait()
            if run.is_first:
                export(run.checkpointer.newest, out / name / "export", merge_adapter=args.merge_adapter)
        run.release()
    run.accelerator.end_training()


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
