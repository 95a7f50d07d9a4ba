"""Train a small causal language model, the student, to predict each token as a larger one does, its teacher.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/distill.py \\
        --model_name_or_path Qwen/Qwen3-0.6B --teacher_model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/Capybara

    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no recipes/distill.py \\
        --config recipes/configs/distill/arithmetic.yaml

Rows are those of sft.py: conversations, prompts with completions, or texts. The student draws answers to their prompts, and
learns at each token how probable the teacher finds all tokens there (`--lmbda 1`). With `--lmbda 0` it learns that of the
answers in the rows, without drawing. Both models have the same tokens. The teacher is sharded like the student, and is never
trained. Before, while and after training, both divergences are measured on held-out rows.
"""

from dataclasses import dataclass

import trl

from accelerate_recipes.conversations.distillation import (
    DistillArgs,
    DistillationLoss,
    OwnAnswers,
    check_vocabularies,
    distilled_trial,
    frozen_args,
    mean_divergences,
    prepare_to_answer,
    with_access,
)
from accelerate_recipes.conversations.formats import FormatArgs
from accelerate_recipes.conversations.heads import check_hidden_suffices
from accelerate_recipes.conversations.settings import make_model, set_up_by_trl
from accelerate_recipes.conversations.supervised_loss import nll_sum
from accelerate_recipes.conversations.trained_rows import compare_finished
from accelerate_recipes.data.rows import num_steps
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.life.picture import Curves
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, before_and_after, finish, start
from accelerate_recipes.trial import Trial


@dataclass
class Args(FormatArgs, DistillArgs, trl.SFTConfig):
    output_dir: str = "outputs/distill"
    tokenizes_first = True


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.base_model, args.teacher_model_name_or_path], datasets=args.row_datasets)


def trial(args: Args) -> Trial:
    return distilled_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and student, before the rows: these are made, and compared with the export, by the settings of both
    names = args.model_name_or_path, args.teacher_model_name_or_path
    tokenizer = load_tokenizer(names[0])
    check_vocabularies(tokenizer, load_tokenizer(names[1]), names)
    check_hidden_suffices(names)
    model = make_model(args)
    run.adapter = add_adapters(model, args)
    base_stops = set_up_by_trl(args, model, tokenizer, ("log_probs",))

    # Rows as the student reads them
    args.settle_date(tokenizer)
    rows, prompts = prepare_to_answer(run, model, tokenizer, base_stops)
    own = OwnAnswers(run, tokenizer, rows, model, prompts) if args.lmbda else None
    run.show_rows(tokenizer, rows.first, rows.num_targets, rows.counts)
    run.print(
        f"Data: {len(rows.train):,} rows to train on, {len(rows.heldout):,} held out; the student draws {args.lmbda:.0%} of "
        "the answers"
    )

    # Training and evaluation
    run.prepare(with_access(model), tokenizer, num_steps(args, len(rows.train)))
    teacher = with_access(make_model(frozen_args(args)))
    loss = DistillationLoss(args, model.config, teacher.config)
    loss.use_teacher(run.shard_reference(teacher))
    loader, heldout_loader = rows.make_loader(lengths=None if own else rows.lengths), rows.make_heldout_loader()

    def evaluate_fn(step: int) -> dict[str, float]:
        values = own.evaluate(loss, step) if own else {}
        if prompts is not None:
            return values
        values |= {"loss": evaluate_loss(run.accelerator, run.model, heldout_loader, nll_sum, count_next_tokens)}
        return values | mean_divergences(loss.of_rows(run, heldout_loader))

    loss_fn, count_fn, draw_fn = loss.sum_parts, count_next_tokens, own.draw if own else None
    given = {"values_fn": loss.values, "mark_fn": loss.gathered.mark}
    records = train(run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, draw_fn=draw_fn, **given)

    # Result
    def result(before: dict, after: dict) -> Result:
        panels = {"": "Answers of held-out rows", **({"drawn_": "Answers that the student draws"} if own else {})}
        kinds = {"forward KL": "forward_kl", "reverse KL": "reverse_kl"}
        curves = [
            Curves({name: f"eval_{begin}{kind}" for name, kind in kinds.items()}, f"{said}, divergence")
            for begin, said in panels.items()
        ]
        return Result(before_and_after(before, after).text, curves=curves)

    finish(run, records, f"{names[0]}, distilled from {names[1]} on {len(rows.train):,} rows of {args.source}.", result)
    compare_finished(run)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
