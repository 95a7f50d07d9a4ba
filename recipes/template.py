"""Teach a BERT to label texts: the smallest whole recipe. docs/your-recipe.md builds it step by step.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/template.py \\
        --train_files my_texts.jsonl
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from accelerate_recipes.adapters import load_settings
from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data.files import check_texts_or_messages, falls_under, read_files
from accelerate_recipes.data.prepared import checksum_of_rows
from accelerate_recipes.data.rows import Rows, make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.engine import Batch, evaluate_loss, train
from accelerate_recipes.hub import cache
from accelerate_recipes.ranks import on_first_of_machine_before_others
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import finish, start


@dataclass
class Args(TrainArgs):
    output_dir: str = "outputs/template"
    model_name_or_path: str = arg("google-bert/bert-base-uncased", "Model like BERT: a name on the Hub, or a folder.")
    train_files: list[str] = arg(["my_texts.jsonl"], "Local files (.jsonl, .csv, .parquet) with `text` and `label`.")
    max_length: int = arg(128, "Longest text in tokens; longer texts are cut.", min=4)

    def problems(self, world_size: int) -> list[str]:
        frozen = ["--use_peft would leave the new output layer as it is; remove it"] if self.use_peft else []
        return super().problems(world_size) + self.file_problems("train_files", cache.BUILDERS) + frozen


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path])


def predict(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(predict(model, batch), batch["labels"], reduction="sum")


def accuracy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return (predict(model, batch).argmax(-1) == batch["labels"]).sum()


def count(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, **cache.pinned(args.model_name_or_path))
    table = on_first_of_machine_before_others(lambda: read_files(args.train_files))
    check_texts_or_messages(table, ["text", "label"], ", ".join(args.train_files))
    labels = sorted(set(table["label"]))

    def make_row(item: dict[str, str], number: int) -> Batch:
        settings = {"max_length": args.max_length, "truncation": True, "padding": "max_length", "return_tensors": "pt"}
        found = tokenizer(item["text"], **settings)
        label = torch.tensor(labels.index(item["label"]) if number >= 0 else -100)
        row = {"labels": label, "row": torch.tensor(number)}
        return row | {name: found[name][0] for name in ("input_ids", "attention_mask")}

    rows = Rows(table.filter(lambda item: not falls_under(item["text"], 0.05)), make_row)
    heldout_rows = Rows(table.filter(lambda item: falls_under(item["text"], 0.05)), make_row)
    content = checksum_of_rows(table, table.column_names)
    loader = make_train_loader(rows, args, run.rank, run.world_size, content=content)
    heldout = make_eval_loader(heldout_rows, args, run.rank, run.world_size)
    run.show_rows(tokenizer, {"Training": loader, "Evaluation": heldout})

    # Model
    settings = load_settings(args) | cache.pinned(args.model_name_or_path) | {"id2label": dict(enumerate(labels))}
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, **settings)
    run.prepare(model, tokenizer, total_steps=num_steps(args, len(rows)))

    # Training and evaluation
    def evaluate_fn(step: int) -> dict[str, float]:
        return {fn.__name__: evaluate_loss(run.accelerator, run.model, heldout, fn, count) for fn in (loss, accuracy)}

    records = train(run, loader, loss_fn=loss, count_fn=count, evaluate_fn=evaluate_fn)

    # Result
    finish(run, records, f"{args.model_name_or_path}, trained to label texts as {', '.join(args.train_files)}.")


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
