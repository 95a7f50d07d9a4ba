"""Fine-tune a causal language model on conversations or texts.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/sft.py \\
        --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no recipes/sft.py \\
        --model_name_or_path outputs/demo-c4/export --train_files my_texts.jsonl --max_length 256

A row has `messages` (for the model's chat template; the loss is on the answers), `prompt` and `completion` (the loss is on
the completion), or `text`.
Rows of other forms, such as ShareGPT and Alpaca, are converted to one of these (docs/rows.md).
Every argument of trl's SFTConfig about data and loss is also an argument here: --packing, --assistant_only_loss, ...
"""

from dataclasses import dataclass
from pathlib import Path

import trl

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.formats import FormatArgs
from accelerate_recipes.conversations.mixtures import prepare_sources
from accelerate_recipes.conversations.settings import AnswerArgs, NewModelArgs, make_or_load_model, set_up_by_trl
from accelerate_recipes.conversations.supervised_loss import SupervisedLoss, flops_of_rows, supervised_trial
from accelerate_recipes.conversations.trained_rows import compare_finished
from accelerate_recipes.data.mixture import MixtureArgs
from accelerate_recipes.engine import train
from accelerate_recipes.errors import that_apply
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import finish, start
from accelerate_recipes.trial import Trial


@dataclass
class Args(MixtureArgs, FormatArgs, AnswerArgs, NewModelArgs, trl.SFTConfig):
    output_dir: str = "outputs/sft"
    tokenizes_first = True
    new_tokens: list[str] = arg(
        [],
        "Tokens to add to the vocabulary, such as a template's; their embedding rows are trained, also with adapters.",
    )

    fixed = frozenset({
        "dataset_text_field", "chat_template_path", "eos_token", "max_length", "truncation_mode",
        "packing", "packing_strategy", "shuffle_dataset", "completion_only_loss",
    })  # fmt: skip
    pads_rows = True

    @property
    def shares_rows(self) -> bool:
        return self.has_boundaries

    @property
    def has_boundaries(self) -> bool:
        return self.padding_free or (self.packing and self.packing_strategy != "wrapped")

    def problems(self, world_size: int) -> list[str]:
        adds_rows = self.new_tokens and self.use_peft and self.template_model
        is_cut = self.padding_free and not self.packing and self.max_length
        is_wrong = "" in self.new_tokens or len({*self.new_tokens}) < len(self.new_tokens)
        problems = {
            f"--chat_template_path {self.chat_template_path} is a model, whose tokens trl would add to the embedding after "
            "--use_peft has chosen the rows of --new_tokens; give the template as a .jinja file": adds_rows,
            f"--padding_free without --packing would not cut rows at --max_length {self.max_length}; "
            "give --max_length none, add --packing, or remove --padding_free": is_cut,
            f"--new_tokens has an empty token, or one twice: {', '.join(map(repr, self.new_tokens))}": is_wrong,
        }
        return super().problems(world_size) + that_apply(problems)

    @property
    def template_model(self) -> str:
        """Name or folder of the model whose chat template is used; empty if --chat_template_path is a file, or empty."""
        path = self.chat_template_path or ""
        return "" if path.endswith(self.templates) or Path(path).is_file() else path


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model],
        tokenizers=[args.tokenizer_name, args.template_model],
        datasets=[need for source in args.sources for need in source.row_datasets],
        new_model=args.new_model if args.from_scratch else None,
    )


def trial(args: Args) -> Trial:
    return supervised_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and model, before the rows: these are made, and compared with the export, by the tokens and settings of both
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path)
    tokenizer.add_tokens(args.new_tokens, special_tokens=True)
    model, new_tokens = make_or_load_model(args, tokenizer, args.new_tokens)
    run.adapter = add_adapters(model, args, new_tokens)
    loss = SupervisedLoss(args, model.config, args.mix.names)
    base_stops = set_up_by_trl(args, model, tokenizer, loss.outputs)

    # Rows as the model reads them
    args.settle_date(tokenizer)
    rows = prepare_sources(run, model, tokenizer, base_stops)
    run.show_rows(tokenizer, rows.first, rows.num_targets, rows.counts)
    num_train, num_heldout = rows.num_read["train"], rows.num_read["test"]
    run.print(
        f"Data: {num_train:,} rows to train on, {num_heldout:,} held out; {len(rows.train):,} sequences of at most "
        f"{args.max_length} tokens"
    )
    loader, heldout_loader = rows.make_loader(), rows.make_heldout_loader()

    # Training and evaluation
    num_targets = (rows.num_targets * rows.visits).sum()
    run.prepare(model, tokenizer, rows.table.num_steps(), flops_of_rows(args, rows.tables, num_targets, rows.visits))

    def evaluate_fn(step: int) -> dict[str, float]:
        return loss.evaluate(run, heldout_loader)

    def values_fn(step: int) -> dict[str, float]:
        return loss.values(step) | rows.table.seen(step)

    loss_fn, count_fn, mark_fn = loss.sum_parts, loss.count_parts, loss.gathered.mark
    records = train(
        run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, values_fn=values_fn, mark_fn=mark_fn
    )

    # Result
    sources = ", ".join(source.source for source in args.sources)
    description = f"{args.base_model or 'A new model'}, fine-tuned on {num_train:,} rows of {sources}."
    finish(run, records, description)
    compare_finished(run)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
