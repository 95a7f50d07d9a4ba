"""Train a BERT to label texts: the smallest complete recipe. docs/your-recipe.md explains it part by part.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/template.py \\
        --train_files my_texts.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data.files import check_texts_or_messages, class_names
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.data.prepared import content_of
from accelerate_recipes.data.rows import RowLoader, Rows, StepLoader, make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.engine import Batch, evaluate_loss, train
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.classifiers import classifier_tokenizer, load_classifier
from accelerate_recipes.models.pretrained import Kind, read_tokenizer
from accelerate_recipes.ranks import local_main_process_first
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Run, finish, start


@dataclass
class Args(RowsArgs, TrainArgs):
    output_dir: str = "outputs/template"
    model_name_or_path: str = arg("google-bert/bert-base-uncased", "Model like BERT: a name on the Hub, or a folder.")
    max_length: int = arg(128, "Longest text in tokens; longer texts are cut.", min=4)
    has_new_layer = True


def requirements(args: Args) -> Requirements:
    kind = Kind("AutoModelForSequenceClassification", read_tokenizer, has_new_layer=True)
    return Requirements(models=[args.model_name_or_path], kind=kind, datasets=args.row_datasets)


def make_row(tokenizer: PreTrainedTokenizerBase, args: Args, labels: list[str], item: dict, number: int) -> Batch:
    text = item["text"] if number >= 0 else "empty"
    found = tokenizer(text, max_length=args.max_length, truncation=True, padding="max_length")
    row = {**found, "labels": labels.index(item["label"]) if number >= 0 else -100, "row": number}
    return {name: torch.tensor(value) for name, value in row.items()}


def make_data(run: Run[Args]) -> tuple[PreTrainedTokenizerBase, StepLoader, RowLoader, list[str]]:
    args, place = run.args, (run.args, run.data_rank, run.data_world_size)
    tokenizer = classifier_tokenizer("AutoModelForSequenceClassification", args.model_name_or_path, args.max_length)
    tables = local_main_process_first(args.read_rows)
    for part, table in tables.items():
        check_texts_or_messages(table, ["text", "label"], args.origins[part])
    labels = class_names(label for table in tables.values() for label in table["label"])
    make = partial(make_row, tokenizer, args, labels)
    rows = {part: Rows(table, make) for part, table in args.sides(tables, "text").items()}
    content = {part: content_of(table, table.column_names) for part, table in tables.items()}["train"]
    loaders = make_train_loader(rows["train"], *place, content=content), make_eval_loader(rows["test"], *place)
    return tokenizer, *loaders, labels


def make_model(args: Args, labels: list[str]) -> transformers.PreTrainedModel:
    return load_classifier("AutoModelForSequenceClassification", args.model_name_or_path, labels, **load_settings(args))


def predict(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(**{name: value for name, value in batch.items() if name not in ("labels", "row")}).logits.float()


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(predict(model, batch), batch["labels"], reduction="sum")


def accuracy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return (predict(model, batch).argmax(-1) == batch["labels"]).sum()


def count(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def evaluate(run: Run[Args], heldout: RowLoader) -> dict[str, float]:
    return {fn.__name__: evaluate_loss(run.accelerator, run.model, heldout, fn, count) for fn in (loss, accuracy)}


def main(args: Args) -> None:
    run = start(args)
    tokenizer, loader, heldout, labels = make_data(run)
    run.show_rows(tokenizer, {"Training": loader, "Evaluation": heldout}, len(loader.dataset), classes=labels)
    run.prepare(make_model(args, labels), tokenizer, total_steps=num_steps(args, len(loader.dataset)))
    records = train(run, loader, loss_fn=loss, count_fn=count, evaluate_fn=lambda step: evaluate(run, heldout))
    finish(run, records, f"{args.model_name_or_path}, trained to label texts from {args.source}.")


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
