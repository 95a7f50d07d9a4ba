"""Compute loss and gradients of packed rows that ranks share, and of whole ones, for many models; results go to a JSON file.

tests/test_sequence.py runs this recipe, which is like any other.
"""

from dataclasses import dataclass

import torch
import toy
from accelerate.utils import set_seed
from tiny import tiny_config
from torch.distributed.tensor import DTensor
from toy import requirements
from transformers import AutoModelForCausalLM

from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.losses import next_token_loss
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.shared_rows import part_of_rows, row_group, whole_rows
from accelerate_recipes.ranks import sum_over_ranks
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run

WEIGHTS = {"initializer_range": 0.2, "pad_token_id": 0}
KINDS = ["sliding_attention", "full_attention"]
MODELS = {
    "as many heads for keys as queries": tiny_config(**WEIGHTS, num_key_value_heads=4),
    "one head for keys": tiny_config(**WEIGHTS, num_key_value_heads=1),
    "tied": tiny_config(**WEIGHTS, tie_word_embeddings=True),
    "mixtral": tiny_config("mixtral", **WEIGHTS, router_aux_loss_coef=0.0),
    "mixtral, balanced": tiny_config("mixtral", **WEIGHTS, router_aux_loss_coef=1.0),
    "qwen3 moe, balanced": tiny_config("qwen3_moe", **WEIGHTS, router_aux_loss_coef=1.0),
    "qwen3": tiny_config("qwen3", **WEIGHTS),
    "mistral with a window": tiny_config("mistral", **WEIGHTS, sliding_window=5),
    "gemma3": tiny_config("gemma3_text", **WEIGHTS, sliding_window=5, layer_types=KINDS),
}


@dataclass
class Args(toy.Args):
    attn_implementation: str = "auto"


def loss_and_gradients(model: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, dict]:
    """Return this rank's loss, and the whole gradients, as FSDP reduced them."""
    loss = next_token_loss(model, batch)
    loss.backward()
    found = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


def main(args: Args) -> None:
    accelerator = make_accelerator(args)
    batch = toy.batch_of(8)
    result = {}
    for name, config in MODELS.items():
        set_seed(args.seed)
        accelerator.free_memory()
        run = Run(args, accelerator)
        attention, _ = choose(args.attn_implementation, config, torch.float32, True, is_shared=True)
        run.shard(AutoModelForCausalLM.from_config(config, attn_implementation=attention))
        model = run.model.train()
        shared, parts = loss_and_gradients(model, part_of_rows(batch, row_group(accelerator)))
        with whole_rows():
            whole, wanted = loss_and_gradients(model, batch)
        # Each rank computed the whole rows then, and only its part before: FSDP's sum is as many times as large.
        size = accelerator.num_processes
        result[name] = {
            "attention": model.config._attn_implementation,
            "losses": [sum_over_ranks(shared).item(), whole.item()],
            "distances": {key: ((size * parts[key] - g).norm() / g.norm()).item() for key, g in wanted.items()},
        }
    toy.finish(args, accelerator, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
