"""Train the causal language model in a folder for a few steps, check its packing, and generate texts with it at the end.

<output_dir>/texts.json holds the texts. An audit event `any_model.loss` comes before each loss: see faults.py.
"""

import json
import sys
from dataclasses import dataclass

import faults
import torch
import toy

from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.data.packing import collate
from accelerate_recipes.data.rows import make_eval_loader, make_train_loader
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.losses import check_document_mask, count_next_tokens, next_token_loss
from accelerate_recipes.metrics import Flops
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.generation import generate_texts
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import start

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
NEW_TOKENS = 5

requirements = toy.requirements


@dataclass
class Args(toy.Args):
    attn_implementation: str = "auto"
    num_rows: int = 16


def main(args: Args) -> None:
    run = start(args)
    rows = toy.packed_rows(args.num_rows)
    tokenizer = load_tokenizer(args.model_name_or_path)
    model = load_model(args.model_name_or_path, args.attn_implementation, **load_settings(args))
    run.prepare(model, tokenizer, args.max_steps, lambda model: Flops(1.0))
    check_document_mask(run.model, run.accelerator.device)
    heldout_loader = make_eval_loader(rows, args, run.rank, run.world_size, collate_fn=collate)
    num_passes = step_of(run.resumed_from) * args.accumulation_steps(run.world_size) if run.resumed_from else 0

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        sys.audit("any_model.loss", f"pass {num_passes}.")
        return next_token_loss(model, batch)

    def evaluate_fn(step: int) -> dict[str, float]:
        return {"loss": evaluate_loss(run.accelerator, run.model, heldout_loader, next_token_loss, count_next_tokens)}

    train(
        run,
        make_train_loader(rows, args, run.rank, run.world_size, collate_fn=collate),
        loss_fn=loss_fn,
        count_fn=count_next_tokens,
        evaluate_fn=evaluate_fn,
    )
    texts = generate_texts(run.accelerator, run.model, tokenizer, PROMPTS, NEW_TOKENS, batch_size=2).texts
    if run.is_first:
        (run.output_dir / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        export(run.checkpointer.newest, run.output_dir / "export", merge_adapter=args.merge_adapter)
    run.accelerator.end_training()


if __name__ == "__main__":
    faults.arm()
    run_recipe(main, Args, requirements)
