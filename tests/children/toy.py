"""Train a tiny Llama in a second or two, for tests that kill and resume: recipes/template.py with other data, model and loss.

<output_dir>/rows.jsonl lists the rows of each step. Variables of the environment: TOY_FAULT is where the run dies (see
faults.py), TOY_FSIZE the largest size of a file in bytes, TOY_HANG a step in which the last rank hangs, TOY_BAD_DATA a step in which
rank 1's data are bad (0: before training), TOY_POISON a row whose loss is not a number,
TOY_STILL a step whose update is not made,
TOY_FLIP bits that hardware flips: "step", "rank", "where" (loss, gradient or weight) and "times"; TOY_PACE extra seconds for each batch.
"""

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults
import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors.torch import save_file
from tiny import tiny_config, tiny_model
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from accelerate_recipes import recipe
from accelerate_recipes.agenda import EvaluateFn
from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.data.packing import PackedRows, collate
from accelerate_recipes.data.rows import RowLoader, StepLoader, make_eval_loader, make_train_loader
from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import Batch, LossFn, evaluate_loss, train
from accelerate_recipes.errors import DataError
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.optim import local_shard
from accelerate_recipes.ranks import ranks_a_row
from accelerate_recipes.recipe import Requirements
from accelerate_recipes.run import Run

LENGTH = 32


@dataclass
class Args(TrainArgs):
    shares_rows = True
    max_length = LENGTH
    source = "made-up rows"

    num_train_epochs: float = 2.0
    total_batch_size: int = 8
    per_device_train_batch_size: int = 2
    learning_rate: float = 1e-2
    warmup_steps: float = 2
    logging_steps: int = 1
    save_steps: int = 3
    num_rows: int = arg(40, "Rows of an epoch.")
    hidden_size: int = arg(32, "Width of the model.")
    dropout: float = arg(0.0, "Dropout in the attention.")
    tie_word_embeddings: bool = arg(False, "Output layer and embedding are one.")
    model_name_or_path: str = arg("", "Instead, the model in this folder.")
    attn_implementation: str = arg("sdpa", "Attention kernel.", fixed=False)


def requirements(args: Args) -> Requirements:
    return Requirements()


def make_rows(num_rows: int) -> Dataset:
    """Make rows of one to four documents, some nearly empty, so that a mean of means would differ from the mean."""
    generator = np.random.default_rng(0)
    lengths = [generator.integers(2, 9, size=generator.integers(1, 5)).tolist() for _ in range(num_rows)]
    return Dataset.from_dict(
        {"input_ids": [generator.integers(4, 100, size=sum(row)).tolist() for row in lengths], "lengths": lengths}
    )


def packed_rows(num_rows: int) -> PackedRows:
    return PackedRows(make_rows(num_rows), LENGTH, 0, document_mask=True)


def batch_of(num_rows: int) -> Batch:
    rows = packed_rows(num_rows)
    return collate([rows[i] for i in range(num_rows)])


def make_tokenizer() -> PreTrainedTokenizerFast:
    return new_word_tokenizer([f"w{i}" for i in range(96)])


def make_base(folder: Path, seed: int, **config: object) -> Path:
    """Save a base of three layers with its tokenizer."""
    tokenizer = make_tokenizer()
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": LENGTH, "pad_token_id": 0, "initializer_range": 0.1}
    tiny_model(seed=seed, vocab_size=len(tokenizer), **sizes | config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_model(args: Args) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    tokenizer = make_tokenizer()
    if args.model_name_or_path:
        return load_model(args.model_name_or_path, args.attn_implementation, **load_settings(args)), tokenizer
    config = tiny_config(
        vocab_size=len(tokenizer), hidden_size=args.hidden_size, num_hidden_layers=3, max_position_embeddings=LENGTH,
        pad_token_id=0, attention_dropout=args.dropout, tie_word_embeddings=args.tie_word_embeddings,
    )  # fmt: skip
    return new_model(config, args.attn_implementation, args.param_dtype), tokenizer


def make_data(run: Run[Args]) -> tuple[PreTrainedTokenizerBase, StepLoader, RowLoader, list[str]]:
    look_at_data(run, 0)
    place = (packed_rows(run.args.num_rows), run.args, run.data_rank, run.data_world_size)
    loaders = make_train_loader(*place, collate_fn=collate), make_eval_loader(*place, collate_fn=collate)
    return make_tokenizer(), *loaders, []


def evaluate(run: Run[Args], heldout: RowLoader) -> dict[str, float]:
    return {"loss": evaluate_loss(run.accelerator, run.model, heldout, next_token_loss, count_next_tokens)}


def new_run(args: TrainArgs, model: torch.nn.Module) -> Run:
    """Shard a model as the environment asks, for a run of another child."""
    run = Run(args, make_accelerator(args))
    run.shard(model)
    return run


def finish(args: TrainArgs, accelerator: Accelerator, result: dict) -> None:
    """End a run of another child; the first rank writes the result to <output_dir>/result.json."""
    if accelerator.is_main_process:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(args.output_dir) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    accelerator.end_training()


def look_at_data(run: Run[Args], step: int) -> None:
    if run.data_rank == 1 and os.environ.get("TOY_BAD_DATA") == str(step):
        raise DataError("bad.jsonl, row 17: no text")


def train_with_faults(run: Run[Args], loader: StepLoader, *, loss_fn: LossFn, evaluate_fn: EvaluateFn, **rest) -> Any:
    """Train as the template does; write down what each step reads, and let happen what the environment asks for."""
    first_step = step_of(run.resumed_from) if run.resumed_from else 0
    flips = json.loads(os.environ.get("TOY_FLIP", '{"step": 0}'))

    def faulty_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        step = run.scheduler.last_epoch + 1
        if run.rank % ranks_a_row() == 0:
            with (run.output_dir / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"from": first_step, "step": step, "rows": batch["row"].tolist()}) + "\n")
        sys.audit("toy.loss", f"step {step}.")
        look_at_data(run, step)
        if run.data_rank == run.data_world_size - 1 and os.environ.get("TOY_HANG") == str(step):
            time.sleep(1000)
        time.sleep(float(os.environ.get("TOY_PACE", 0)))
        loss = loss_fn(model, batch)
        if step == flips["step"] and run.rank == flips["rank"] and flips["times"] > 0:
            flips["times"] -= 1
            loss = flipped(model, loss, flips["where"], 1e30 * (1 + flips["times"]))
        return loss * float("nan") if int(os.environ.get("TOY_POISON", -2)) in batch["row"] else loss

    def faulty_evaluate(step: int) -> dict[str, float]:
        sys.audit("toy.evaluation", f"step {step}.")
        return evaluate_fn(step)

    if limit := os.environ.get("TOY_FSIZE"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    faults.keep_still(run, int(os.environ.get("TOY_STILL", 0)))
    records = train(run, loader, loss_fn=faulty_loss, evaluate_fn=faulty_evaluate, **rest)
    if run.args.use_peft:
        frozen = {name: whole(p) for name, p in run.model.named_parameters() if not p.requires_grad}
        if run.is_first:
            save_file({WRAPPERS.sub("", name): p for name, p in frozen.items()}, run.output_dir / "frozen.safetensors")
    return records


def flipped(model: torch.nn.Module, loss: torch.Tensor, where: str, factor: float) -> torch.Tensor:
    """Let hardware flip a bit: of the loss, of its gradient alone, or of a weight, which stays so."""
    if where == "loss":
        return loss * factor
    if where == "gradient":
        loss.register_hook(lambda gradient: gradient * factor)
    else:
        weight = local_shard(next(model.parameters()).detach())
        weight.view(torch.int32).flatten()[0] ^= 1 << 20  # rounding in the next steps may undo the lowest bit
    return loss


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


template = shipped.load(Path(__file__).resolve().parents[2] / "recipes/template.py")
template.make_data, template.make_model = make_data, lambda args, labels: make_model(args)[0]
template.loss, template.count, template.evaluate = next_token_loss, count_next_tokens, evaluate
template.train = train_with_faults
main = template.main


if __name__ == "__main__":
    faults.arm()
    recipe.run_recipe(main, Args, requirements)
