"""Take steps of a tiny Llama on rows of 32 and of 4,096 tokens, and its loss on the long ones; results go to a JSON file.

tests/test_equivalence.py runs this in bf16. The weights are large: with the initial weights of a new model, attention is
nearly uniform, and no loss shows whether positions are right.
"""

from dataclasses import dataclass

import torch
import toy
from tiny import tiny_config
from toy import requirements

from accelerate_recipes.engine import evaluate_loss, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.recipe import run_recipe

LENGTHS = (32, 32, 4096)


@dataclass
class Args(toy.Args):
    total_batch_size: int = 4
    max_grad_norm: float = 0.0


def main(args: Args) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = tiny_config(**sizes, max_position_embeddings=max(LENGTHS), initializer_range=0.5)
    run = toy.new_run(args, new_model(config, "sdpa"))
    generator = torch.Generator().manual_seed(0)

    def micro_batches(length: int) -> list[dict[str, torch.Tensor]]:
        ids = torch.randint(4, 100, (args.total_batch_size, length), generator=generator)
        batch = {"input_ids": ids, "position_ids": torch.arange(length).expand_as(ids), "labels": ids}
        mine = {name: rows[run.rank :: run.world_size] for name, rows in batch.items()}
        parts = [rows.split(args.per_device_train_batch_size) for rows in mine.values()]
        return [dict(zip(mine, part, strict=True)) for part in zip(*parts, strict=True)]

    long = micro_batches(4096)
    losses = [evaluate_loss(run.accelerator, run.model, long, next_token_loss, count_next_tokens)]
    norms = []
    for length in LENGTHS:
        batches = micro_batches(length)
        done = train_step(run, batches, next_token_loss, count_next_tokens)
        losses.append(done.loss)
        norms.append(done.grad_norm.item())
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in run.model.named_buffers()}
    of_buffers = {name: [str(buffer.dtype), buffer.tolist()] for name, buffer in buffers.items()}
    toy.finish(args, run.accelerator, {"losses": losses, "norms": norms, "buffers": of_buffers})


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
