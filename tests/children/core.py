"""Do what the core can do, where optional packages are missing: load recipes; check, plan and train the template on made-up rows.

Takes a folder with a model and its tokenizer, and one for the output.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from accelerate_recipes import recipe
from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.arguments import shipped
from accelerate_recipes.data.rows import Rows, make_eval_loader, make_train_loader
from accelerate_recipes.models.pretrained import read_tokenizer
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial, config_of
from recipe_tools.planning import plan
from recipe_tools.preflight import preflight

ROOT = Path(__file__).resolve().parents[2]
template = shipped.load(ROOT / "recipes/template.py")
requirements, main = template.requirements, template.main


@dataclass
class Args(TrainArgs):
    source = "made-up rows"
    row_datasets = ()
    has_new_layer = True

    model_name_or_path: str = arg("", "Model like BERT.")
    max_length: int = arg(8, "Tokens of a text.")


def make_row(number: int, row: int) -> dict[str, torch.Tensor]:
    words = torch.arange(8) % (4 + number % 2) + 4
    label = torch.tensor(number % 2 if row >= 0 else -100)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": label, "row": torch.tensor(row)}


def make_data(run: Run[Args]) -> tuple:
    rows, place = Rows(range(32), make_row), (run.args, run.data_rank, run.data_world_size)
    loaders = make_train_loader(rows, *place, content="made up"), make_eval_loader(rows, *place)
    return read_tokenizer(run.args.model_name_or_path), *loaders, ["even", "odd"]


def trial(args: Args) -> Trial:
    def make_model(config: PreTrainedConfig) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, dtype=args.param_dtype)

    batch = {name: value[None] for name, value in make_row(0, 0).items()}
    return Trial(config_of(args), make_model, template.loss, template.count, batch, tokens=1)


template.make_data = make_data

if __name__ == "__main__":
    model, out = sys.argv[1:]
    for name in ("c4", "t5", "vit"):
        shipped.load(ROOT / f"recipes/{name}.py")
    words = ["--model_name_or_path", model, "--output_dir", out, "--max_steps", "4", "--dataloader_num_workers", "1"]
    run = [str(ROOT / "accelerate_configs/single.yaml"), "--mixed_precision", "no", __file__, *words]
    print(preflight(["--no-plan", *run])[0])
    plan(["--no_search", "--gpu", "h100", *run], print)
    sys.argv[1:] = words
    recipe.run_recipe(main, Args, requirements)
