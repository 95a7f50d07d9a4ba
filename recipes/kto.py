"""Train a causal language model on answers of which each is judged good or bad (KTO).

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/kto.py \\
        --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/kto-mix-14k

    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no recipes/kto.py \\
        --config recipes/configs/kto/arithmetic.yaml

A row has `prompt`, `completion` and `label`, true or false: what a thumb up or down leaves. Or it has `messages` and
`label`; then the last answer is judged. An answer needs no other to the same prompt beside it (else see dpo.py). Rows of
other forms are converted to these (docs/rows.md). Good answers become more likely and bad ones less, compared with the
model at which the run begins, which is kept as a second, sharded model, or is the model without its adapters.
"""

from dataclasses import dataclass
from typing import Any

import trl

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.formats import LABEL
from accelerate_recipes.conversations.objective import reference_of
from accelerate_recipes.conversations.settings import AnswerArgs, TrainerArgs, make_model, set_up_by_trl
from accelerate_recipes.conversations.supervised import prepare_supervised
from accelerate_recipes.conversations.trained_rows import compare_finished
from accelerate_recipes.conversations.unpaired import (
    JudgedArgs,
    UnpairedLoss,
    advice_on_weights,
    check_foreign_rows,
    make_loaders,
    unpaired_trial,
)
from accelerate_recipes.conversations.whole_steps import num_whole_steps
from accelerate_recipes.engine import train
from accelerate_recipes.errors import that_apply
from accelerate_recipes.life.picture import Curves
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, before_and_after, finish, start
from accelerate_recipes.trial import Trial


@dataclass
class Args(JudgedArgs, AnswerArgs, TrainerArgs, trl.SFTConfig):
    output_dir: str = "outputs/kto"
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    loss_type: str = arg(
        "kto", "Loss: of KTO, or of APO-zero, which needs no KL divergence.", choices=("kto", "apo_zero_unpaired")
    )
    beta: float = arg(
        0.1, "Weight of the distance to the reference: with more, the model stays nearer to it.", above=0, fixed=False
    )
    desirable_weight: float = arg(1.0, "Weight of the loss of good answers.", min=0, fixed=False)
    undesirable_weight: float = arg(1.0, "Weight of the loss of bad answers.", min=0, fixed=False)
    disable_dropout: bool = arg(True, "Train without dropout.", fixed=False, group="rare")
    tokenizes_first = True
    new_tokens = ()

    fixed = frozenset({"chat_template_path", "eos_token", "max_length"})
    owned_elsewhere = AnswerArgs.owned_elsewhere | dict.fromkeys(
        ("packing", "packing_strategy", "padding_free", "eval_packing", "shuffle_dataset", "dataset_text_field",
         "truncation_mode", "completion_only_loss"),
        "remove it: a row is one answer, which is trained whole, without padding-free rows",
    )  # fmt: skip

    def problems(self, world_size: int) -> list[str]:
        problems = {
            f"--total_batch_size {self.total_batch_size}: KTO reads each prompt with the answer of another row of the step; "
            "raise it, or give --loss_type apo_zero_unpaired": self.loss_type == "kto" and self.total_batch_size < 2,
            "--desirable_weight and --undesirable_weight are both 0; raise one": not self.desirable_weight
            and not self.undesirable_weight,
        }
        return super().problems(world_size) + that_apply(problems)


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.base_model], tokenizers=[args.template_model], datasets=args.row_datasets)


def trial(args: Args) -> Trial:
    return unpaired_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and model, before the rows: these are made, and compared with the export, by the settings of both
    tokenizer = load_tokenizer(args.model_name_or_path)
    model = make_model(args)
    run.adapter = add_adapters(model, args)
    loss = UnpairedLoss(args, model.config)
    base_stops = set_up_by_trl(args, model, tokenizer, loss.outputs)

    # Rows as the model reads them
    args.settle_date(tokenizer)
    rows = prepare_supervised(run, model, tokenizer, base_stops)
    if loss.has_kl:
        check_foreign_rows(args, model.config, rows)
    labels = rows.train.documents.select(rows.train.order)[LABEL]
    run.print(
        f"Data: {len(labels):,} answers to train on, {sum(labels):,} of them good; {len(rows.heldout):,} held out"
        f"{advice_on_weights(args, sum(labels), len(labels))}"
    )
    run.show_rows(tokenizer, rows.first, rows.num_targets, rows.counts)

    # Training and evaluation
    run.prepare(model, tokenizer, num_whole_steps(args, len(rows.train)))
    loss.reference = reference_of(run)
    loader, heldout_loader = make_loaders(run, rows)

    def evaluate_fn(step: int) -> dict[str, float]:
        return loss.evaluate(run, heldout_loader)

    def draw_fn(step: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return loss.add_references(run.model, batches)

    loss_fn, count_fn = loss.sum_parts, loss.count_parts
    given = {"values_fn": loss.values, "mark_fn": loss.gathered.mark}
    records = train(run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, draw_fn=draw_fn, **given)

    # Result
    def result(before: dict, after: dict) -> Result:
        curves = [
            Curves({"good": "eval_rewards_chosen", "bad": "eval_rewards_rejected"}, "Reward of held-out answers"),
            Curves({"held out": "eval_accuracy"}, "Share of answers that moved as their labels say"),
        ]
        return Result(before_and_after(before, after).text, None, curves)

    description = f"{args.model_name_or_path}, trained by KTO on {len(labels):,} judged answers of {args.source}."
    finish(run, records, description, result)
    compare_finished(run)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
