"""Take four steps of a tiny mixture of experts by Muon; a JSON file holds losses, and how many matrices each rank has made orthogonal.

tests/test_levers.py runs this recipe. Of three ranks, one holds none of its 4 experts, and one fewer of its 20 dimensions than the others.
"""

import math
from dataclasses import dataclass

import torch
import toy
from accelerate.utils import gather_object
from transformers import Qwen3MoeConfig

from accelerate_recipes import optim
from accelerate_recipes.data.rows import make_train_loader
from accelerate_recipes.engine import train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.recipe import run_recipe

CONFIG = Qwen3MoeConfig(
    vocab_size=100, hidden_size=20, intermediate_size=28, moe_intermediate_size=12, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0],
)  # fmt: skip


@dataclass
class Args(toy.Args):
    optim: str = "muon"
    total_batch_size: int = 12
    per_device_train_batch_size: int = 1
    learning_rate: float = 0.1
    warmup_steps: float = 0


requirements = toy.requirements


def main(args: Args) -> None:
    run = toy.new_run(args, new_model(CONFIG, "sdpa"))
    made, orthogonal = [], optim.orthogonal

    def record(matrix: torch.Tensor) -> torch.Tensor:
        made.append(math.prod(matrix.shape[:-2]))
        return orthogonal(matrix)

    optim.orthogonal = record
    batches = iter(make_train_loader(toy.packed_rows(args.num_rows), args, run.rank, run.world_size))
    losses = []
    for _ in range(4):
        step = [next(batches) for _ in range(args.accumulation_steps(run.world_size))]
        losses.append(train_step(run, step, next_token_loss, count_next_tokens).loss)
    of_ranks = gather_object([sum(made)])
    toy.finish(args, run.accelerator, {"losses": losses, "made orthogonal": of_ranks})


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
