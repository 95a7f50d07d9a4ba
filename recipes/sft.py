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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.data.formats import FormatArgs
from accelerate_recipes.data.rows import Rows, make_eval_loader
from accelerate_recipes.engine import evaluate_loss
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.posttraining.objective import without_targets
from accelerate_recipes.posttraining.settings import NewModelArgs, make_or_load_model, pad_multiple, trl_config
from accelerate_recipes.posttraining.supervised import (
    SupervisedTrainer,
    inputs_of,
    load_sides,
    supervised_trial,
    usual_value,
)
from accelerate_recipes.ranks import on_first_of_machine_before_others, ranks_a_row
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import finish, start
from accelerate_recipes.trial import Trial

TEMPLATES = (".jinja", ".j2")  # trl reads files with these endings as chat templates, other names as models


@dataclass
class Args(FormatArgs, NewModelArgs, SFTConfig):
    output_dir: str = "outputs/sft"
    tokenizes_first = True
    new_tokens: list[str] = arg(
        [],
        "Tokens to add to the vocabulary, such as a template's; their embedding rows are trained, also with adapters.",
    )
    assistant_only_loss: str = arg(
        "auto",
        "Train the answers of conversations alone (true), or everything (false); auto: true, but false for texts.",
        choices=("auto", "true", "false"),
        fixed=False,
        group="task",
    )

    fixed = frozenset({
        "dataset_text_field", "dataset_kwargs", "chat_template_path", "eos_token", "max_length", "truncation_mode",
        "packing", "packing_strategy", "shuffle_dataset", "completion_only_loss",
    })  # fmt: skip
    owned_elsewhere = NewModelArgs.owned_elsewhere | {
        "accept_training_template": "remove it: answers are found with the model's own template"
    }
    groups = NewModelArgs.groups | dict.fromkeys(("packing", "completion_only_loss"), "task")
    ranges = NewModelArgs.ranges | {"dataset_num_proc": Range(min=1), "max_length": Range(min=2)}

    pads_rows = True

    @property
    def shares_rows(self) -> bool:
        return self.has_boundaries

    @property
    def has_boundaries(self) -> bool:
        return self.padding_free or (self.packing and self.packing_strategy != "wrapped")

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.new_tokens and self.use_peft and self.template_model:
            found.append(
                f"--chat_template_path {self.chat_template_path} is a model, whose tokens trl would add to the embedding "
                "after --use_peft has chosen the rows of --new_tokens; give the template as a .jinja file"
            )
        if "" in self.new_tokens or len({*self.new_tokens}) < len(self.new_tokens):
            found.append(f"--new_tokens has an empty token, or one twice: {', '.join(map(repr, self.new_tokens))}")
        if self.chat_template_path and not self.template_model:
            found += self.file_problems("chat_template_path", TEMPLATES)
        return found

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        if self.assistant_only_loss == "auto":
            self.assistant_only_loss = usual_value(saved.get("assistant_only_loss", "auto"))
        return super().settle(saved)

    @property
    def template_model(self) -> str:
        """Name or folder of the model whose chat template is used; empty if --chat_template_path is a file, or empty."""
        path = self.chat_template_path or ""
        return "" if path.endswith(TEMPLATES) or Path(path).is_file() else path


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model],
        tokenizers=[args.tokenizer_name, args.template_model],
        datasets=args.row_datasets,
        new_model=args.new_model if args.from_scratch else None,
    )


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum the loss over the targets, in nats; trl has given the model its own forward pass for this."""
    return -model(**inputs_of(batch), fused_lm_head=True).log_probs.sum()


def trial(args: Args) -> Trial:
    return supervised_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path)
    tokenizer.add_tokens(args.new_tokens, special_tokens=True)
    args.settle_date(tokenizer)
    known = load_tokenizer(str(run.resumed_from)).chat_template if run.resumed_from else None
    if known and str(known) != args.template_of(tokenizer):
        raise ConfigError(
            f"{run.resumed_from} was trained with another chat template, its chat_template.jinja; put that back, or start "
            "anew in another --output_dir"
        )
    rows, first = on_first_of_machine_before_others(lambda: load_sides(args, tokenizer))

    # Model and trainer
    # Give trl the folder of the template's model at its pinned commit; by its name, trl would ask the Hub.
    template = str(cache.folder("model", args.template_model)) if args.template_model else args.chat_template_path
    padding = {"pad_to_multiple_of": math.lcm(pad_multiple(args) or 1, ranks_a_row())} if ranks_a_row() > 1 else {}
    # `SupervisedTrainer` finds the answers itself; trl would use another template.
    config = trl_config(run, SFTConfig, chat_template_path=template, assistant_only_loss=False, **padding)
    model, new_tokens = make_or_load_model(args, tokenizer, args.new_tokens)
    sides = {"train_dataset": rows["train"], "eval_dataset": rows["test"], "source_rows": first}
    trainer = SupervisedTrainer(run, config, model, tokenizer, new_tokens=new_tokens, **sides)
    run.print(
        f"Data: {len(rows['train']):,} rows to train on, {len(rows['test']):,} held out; "
        f"{len(trainer.train_dataset):,} sequences of at most {args.max_length} tokens"
    )

    # Training and evaluation
    heldout = Rows(trainer.eval_dataset, without_targets)
    heldout_loader = make_eval_loader(
        heldout, args, run.data_rank, run.data_world_size, collate_fn=trainer.data_collator
    )

    def evaluate_fn(step: int) -> dict[str, float]:
        return {"loss": evaluate_loss(run.accelerator, run.model, heldout_loader, loss_fn, count_next_tokens)}

    records = trainer.fine_tune(evaluate_fn)

    # Result
    description = f"{args.base_model or 'A new model'}, fine-tuned on {len(rows['train']):,} rows of {args.source}."
    finish(run, records, description)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
