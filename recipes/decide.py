"""Train a causal language model to decide: to give each option of a question about a state its probability.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/decide.py \\
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --train_files my_tickets.jsonl

A row has `state`, `questions` and `answers`, as `pipeline("decision")` of transformers takes and gives them, or `text` and
`label`. Prompts are rendered as they are when the export is served. The loss is the cross-entropy of the answer's
probabilities, at the token where the pipeline reads the labels of the options.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.conversations.dates import DateArgs
from accelerate_recipes.conversations.formats import ColumnArgs
from accelerate_recipes.conversations.packed import count_targets_of
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.data.rows import num_steps
from accelerate_recipes.decisions.loss import DecisionLoss
from accelerate_recipes.decisions.prompts import prepare_decisions
from accelerate_recipes.decisions.rows import FORMS
from accelerate_recipes.decisions.served import Served, ask_finished
from accelerate_recipes.engine import train
from accelerate_recipes.losses import check_document_mask, count_labels
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.attention import KERNELS
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import finish, start
from accelerate_recipes.trial import Trial, packed_trial


@dataclass
class Args(ColumnArgs, DateArgs, RowsArgs, TrainArgs):
    output_dir: str = "outputs/decide"
    model_name_or_path: str = arg(
        "Qwen/Qwen2.5-0.5B-Instruct", "Causal language model: a name on the Hub, or a folder."
    )
    attn_implementation: str = arg("auto", "Attention kernel, see docs/levers.md.", choices=KERNELS, fixed=False)
    max_length: int = arg(1024, "Tokens of a row; a longer prompt is an error, since none is cut.", min=8)
    packing: bool = arg(True, "Put several prompts into a row, between which attention does not pass.")
    instructions: str = arg("", "Question about the texts of rows with text and label.")
    label_names: str = arg("", "File with the names of labels that are numbers: one on each line, that of 0 first.")
    decision_config: str = arg("", "Folder with decision.json or decision_template.jinja; default: those of the model.")
    options_only: bool = arg(
        False,
        "Compare only the options in the loss; the probability that all their labels have together may then fall.",
    )
    merge_adapter: bool = arg(
        True, "Export the merged model and the adapter, but not with --load_in_4bit.", group="adapters"
    )

    forms = FORMS
    tokenizes_first = True

    def __post_init__(self):
        self.merge_adapter = self.merge_adapter and self.use_peft and not self.load_in_4bit

    @property
    def has_boundaries(self) -> bool:
        return self.packing

    def problems(self, world_size: int) -> list[str]:
        found, folder = super().problems(world_size), self.decision_config
        if self.label_names:
            found += self.file_problems("label_names", ("",))
        if folder and not (Path(folder).is_dir() or self.is_elsewhere(folder)):
            found.append(f"--decision_config {folder}: no such folder")
        return found


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path], datasets=args.row_datasets)


def trial(args: Args) -> Trial:
    made = packed_trial(args, None, DecisionLoss(args.options_only))
    labels = torch.full_like(made.batch["labels"], IGNORE_INDEX)
    labels[:, 15::16] = 0  # no prompt is shorter
    places, options = (labels == 0).nonzero(), 4
    targets = {"labels": labels, "places": places, "shares": torch.ones(len(places), options)}
    batch = made.batch | targets | {"label_ids": torch.zeros(len(places), options, dtype=torch.int64)}
    return replace(made, count_fn=count_labels, batch=batch, tokens=len(places), unit="questions")


def main(args: Args) -> None:
    run = start(args)

    # Prompts, as they are served, in rows
    tokenizer = load_tokenizer(args.model_name_or_path)
    rows, config, requests = prepare_decisions(run, tokenizer)
    num_targets, tokens = count_targets_of(rows.train)[0], tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    run.show_rows(tokenizer, rows.first, num_targets, classes=tokens)
    num_questions = f"{num_targets.sum():,} questions"
    run.print(f"Data: {num_questions} to train on; {len(requests):,} rows held out")
    loader, heldout_loader = rows.make_loader(), rows.make_heldout_loader()

    # Model
    model = load_model(args.model_name_or_path, args.attn_implementation, args.packing, **load_settings(args))
    run.prepare(model, tokenizer, num_steps(args, len(rows.train)))
    if args.packing:
        check_document_mask(run.model, run.accelerator.device)
    served = Served(config, requests, args)
    run.artifacts.append(served)

    # Training and evaluation
    loss_fn = DecisionLoss(args.options_only)

    def evaluate_fn(step: int) -> dict[str, float]:
        return served.measure(loss_fn.ask(run, heldout_loader), step)

    records = train(run, loader, loss_fn=loss_fn, count_fn=count_labels, evaluate_fn=evaluate_fn)

    # Result
    description = f"{args.model_name_or_path}, trained to decide {num_questions} of {args.source}."
    finish(run, records, description, served.result)
    ask_finished(run)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
