"""Fine-tune a model that sees images and writes text, on conversations with images.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/sft_vlm.py \\
        --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_files rows.jsonl --packing --max_length 4096

A row has `messages`, whose contents are lists of parts, `{"type": "image"}` and `{"type": "text", "text": ...}`, and
`images`: files, relative to the file of rows, or their bytes. Rows as those of ShareGPT and LLaVA, with `<image>` in their
texts, are converted (docs/vlm.md). Documents are joined in rows without padding; each is computed as it would be alone.
Every argument of trl's SFTConfig about data and loss is also an argument here.
"""

from dataclasses import dataclass

import trl

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.settings import AnswerArgs, TrainerArgs, set_up_by_trl
from accelerate_recipes.conversations.supervised_loss import SupervisedLoss, nll_sum
from accelerate_recipes.conversations.trained_rows import compare_finished
from accelerate_recipes.data.rows import num_steps
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.images.image_rows import ImageRowArgs
from accelerate_recipes.images.pictures import processor_files, renderer_of
from accelerate_recipes.images.supervised_images import flops_with_images, prepare_with_images
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.image_probe import tiny_of_text
from accelerate_recipes.models.images import ImageModelArgs, images_and_text, load_image_model
from accelerate_recipes.models.processors import load_image_tokenizer, load_processor
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import finish, start
from accelerate_recipes.trial import NotSimulatedError, Trial


@dataclass
class Args(ImageRowArgs, AnswerArgs, ImageModelArgs, TrainerArgs, trl.SFTConfig):
    output_dir: str = "outputs/sft_vlm"
    model_name_or_path: str = arg("", "Model that sees images and writes text: a name on the Hub, or a folder.")
    tokenizes_first = True
    dataloader_num_workers: int = 2  # images are decoded there
    image_max_pixels: int | None = arg(
        None,
        "Most pixels of an image, to which larger ones are scaled, for models that read images of any size.",
        group="data",
        min=1,
    )

    fixed = frozenset({"chat_template_path", "eos_token", "max_length", "packing", "image_max_pixels"})
    owned_elsewhere = AnswerArgs.owned_elsewhere | {
        "dataset_text_field": "remove it: rows are conversations",
        "mixture": "remove it: rows with images are those of one source, of one or several --train_files",
        "shuffle_dataset": "remove it: the order of the rows follows from --seed",
        "truncation_mode": "remove it: a row is cut at its end, behind a target",
        "packing_strategy": "remove it: documents stay whole",
        "padding_free": "remove it: rows have no padding",
        "router_aux_loss_coef": "remove it: the tokens of blank images would count in the balance of experts",
        "pad_to_multiple_of": "remove it: rows have no padding",
    }
    router_aux_loss_coef: float = 0.0

    @property
    def has_boundaries(self) -> bool:
        return True

    def problems(self, world_size: int) -> list[str]:
        return super().problems(world_size) + self.image_model_problems()


def requirements(args: Args) -> Requirements:
    kind = images_and_text(args.image_max_pixels)
    return Requirements(models=[args.base_model], datasets=args.row_datasets, kind=kind)


def trial(args: Args) -> Trial:
    raise NotSimulatedError(
        "sft_vlm.py: a model that sees images computes shapes from values, which a simulation does not have; take two steps "
        "(--max_steps 2) with the largest images, whose log line names the peak memory"
    )


def main(args: Args) -> None:
    run = start(args)

    # Processor and model
    tokenizer = load_image_tokenizer(args.model_name_or_path)
    model = load_image_model(args)
    run.adapter = add_adapters(model, args)
    loss = SupervisedLoss(args, model.config)
    base_stops = set_up_by_trl(args, model, tokenizer, loss.outputs, tiny_of_text)
    processor = load_processor(args.model_name_or_path, tokenizer, args.image_max_pixels)
    if getattr(model.config.get_text_config(), "router_aux_loss_coef", 0):
        run.print("Experts are not balanced: the tokens of blank images would count")

    # Rows as the model reads them
    args.settle_date(tokenizer)
    rows = prepare_with_images(run, model, processor, base_stops)
    run.show_rows(tokenizer, rows.first, rows.num_targets, rows.counts)
    num_train, num_heldout = rows.num_read["train"], rows.num_read["test"]
    run.print(
        f"Data: {num_train:,} rows to train on, {num_heldout:,} held out; {len(rows.train):,} sequences of at most "
        f"{args.max_length} tokens"
    )
    loader, heldout_loader = rows.make_loader(), rows.make_heldout_loader(args.dataloader_num_workers)

    # Training and evaluation
    flops_fn = flops_with_images(args, rows.train, rows.num_targets.sum())
    files = processor_files(args.model_name_or_path, processor)
    run.prepare(model, tokenizer, num_steps(args, len(rows.train)), flops_fn, files)

    def evaluate_fn(step: int) -> dict[str, float]:
        return {"loss": evaluate_loss(run.accelerator, run.model, heldout_loader, nll_sum, count_next_tokens)}

    loss_fn, count_fn, values_fn, mark_fn = loss.sum_parts, loss.count_parts, loss.values, loss.gathered.mark
    records = train(
        run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, values_fn=values_fn, mark_fn=mark_fn
    )

    # Result
    finish(run, records, f"{args.base_model}, fine-tuned on {num_train:,} rows with images of {args.source}.")
    compare_finished(run, with_images=renderer_of)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
