"""Train a causal language model to prefer the better of two answers, with trl's DPOTrainer.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/dpo.py \\
        --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/ultrafeedback_binarized

    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no recipes/dpo.py \\
        --config recipes/configs/dpo/arithmetic.yaml

A row has `prompt`, `chosen` and `rejected`: texts or messages. Or a row is one judged answer, with `prompt`, `completion`
and `score`; the best and the worst answer to a prompt make a pair (docs/dpo.md). Rows of other forms are converted to
such pairs (docs/rows.md). Before and after training, loss, accuracy and margin are measured on held-out pairs. All pairs of
a prompt lie on one side.
"""

from dataclasses import dataclass

import datasets
import trl
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.chats import check_written, without_controls
from accelerate_recipes.conversations.exported import as_exported
from accelerate_recipes.conversations.formats import DPO, PAIR, FormatArgs
from accelerate_recipes.conversations.preferences import DPOArgs, PairLoss, preference_trial, to_pairs
from accelerate_recipes.conversations.settings import make_model, set_up_by_trl, stops_of_run
from accelerate_recipes.conversations.trained_pairs import compare_pairs, count_pairs, prepare_preferences
from accelerate_recipes.conversations.trained_rows import compare_finished
from accelerate_recipes.conversations.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.engine import train
from accelerate_recipes.life.picture import Bars, Curves
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.ranks import local_main_process_first
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, before_and_after, finish, start
from accelerate_recipes.trial import Trial


@dataclass
class Args(FormatArgs, DPOArgs, trl.DPOConfig):
    output_dir: str = "outputs/dpo"
    tokenizes_first = True
    forms = DPO  # pyright: ignore[reportAssignmentType]  a property of the base
    min_score_margin: float = arg(0.0, "Leave out pairs whose scores differ by less than this.", min=0)


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path], datasets=args.row_datasets)


def load_pairs(
    args: Args, tokenizer: PreTrainedTokenizerBase, stops: set[int]
) -> tuple[dict[str, datasets.Dataset], int, int]:
    """Load the pairs to train on and to evaluate on, as `train` and `test`. Generation stops at `stops`.

    Returns:
        The pairs, the number of rows read, and the number of rows to train on that are left out.

    Raises:
        DataError: for rows that cannot be read, or that hold no texts, messages or scores.
        ConfigError: for rows of another form, and if a side is empty.
    """
    rows, pairs = args.read_rows_for(tokenizer), {}
    for name, side in rows.items():
        source, said = args.origins[name], ("prompt", "completion", *PAIR)
        rows[name] = without_controls(side, said, tokenizer, stops, source, args.control_tokens)
        pairs[name] = to_pairs(rows[name], source, args.min_score_margin)
        check_written(pairs[name], ("prompt", *PAIR), tokenizer, f"{source}, pair", args.template_date)
    is_judged = "completion" in rows["train"].column_names  # then several rows make a pair
    left_out = 0 if is_judged else len(rows["train"]) - len(pairs["train"])
    return args.sides(pairs, "prompt"), sum(map(len, rows.values())), left_out


def trial(args: Args) -> Trial:
    return preference_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and model, before the pairs: these are made and compared with the settings of both
    tokenizer = load_tokenizer(args.model_name_or_path)
    model = make_model(args)
    run.adapter = add_adapters(model, args)
    args.settle_date(tokenizer)
    stops = stops_of_run(model, tokenizer)
    loss = PairLoss(args, model.config, run.accelerator)
    base_stops = set_up_by_trl(args, model, tokenizer, loss.outputs)
    pairs, num_rows, left_out = local_main_process_first(lambda: load_pairs(args, tokenizer, stops))

    # Pairs as the model reads them
    rows = prepare_preferences(run, loss, pairs, tokenizer)
    exported = as_exported(model, tokenizer, base_stops)
    ended = {"with an end": compare_pairs(run, loss.args, exported, rows.train)}
    num_targets, cut = count_pairs(loss.args, rows.train)
    left_out += len(pairs["train"]) - len(rows.train)
    run.show_rows(tokenizer, rows.first, num_targets, ended | {"left out": left_out} | cut)
    run.print(
        f"Data: {len(rows.train):,} pairs to train on, {len(rows.heldout):,} held out, from {num_rows:,} rows of "
        f"{args.source}"
    )

    # Training and evaluation
    run.prepare(model, tokenizer, num_whole_steps(args, len(rows.train)))
    loss.add_reference(run, rows)
    loader, heldout_loader = rows.make_loader(order_class=WholeSteps), rows.make_heldout_loader()

    def evaluate_fn(step: int) -> dict[str, float]:
        return loss.evaluate_pairs(run.model, heldout_loader)

    loss_fn, count_fn, values_fn, mark_fn = loss.sum_and_count, loss.count_parts, loss.values, loss.mark
    records = train(
        run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, values_fn=values_fn, mark_fn=mark_fn
    )

    # Result
    def result(before: dict, after: dict) -> Result:
        bars = {
            when: {"chosen": values["eval_logps_chosen"], "rejected": values["eval_logps_rejected"]}
            for when, values in (("before", before), ("after", after))
        }
        curves = [
            Curves(
                {"training": "rewards/accuracies", "held out": "eval_accuracy"}, "Share of pairs in the right order"
            ),
            Curves({"training": "rewards/margins", "held out": "eval_margin"}, "Margin (times beta)"),
            Curves(
                {"chosen": "eval_logps_chosen", "rejected": "eval_logps_rejected"}, "Held-out answers, log-probability"
            ),
        ]
        return Result(before_and_after(before, after).text, Bars(bars, "Held-out answers", "log-probability"), curves)

    description = f"{args.model_name_or_path}, trained by DPO on {len(pairs['train']):,} pairs of {args.source}."
    finish(run, records, description, result)
    compare_finished(run)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
