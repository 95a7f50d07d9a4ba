"""How often the CPU waits for the GPU in a training step of two micro-batches; the result goes to a JSON file.

Run by tests/test_gpu.py.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import toy
from tiny import tiny_config
from toy import requirements

from accelerate_recipes.engine import to_device, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.documents import boundaries
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.recipe import run_recipe


@dataclass
class Args(toy.Args):
    total_batch_size: int = 1
    per_device_train_batch_size: int = 1


def count_waits(work: Callable[[], object]) -> int:
    """Count how often the CPU waits for the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def main(args: Args) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 16}
    run = toy.new_run(args, new_model(tiny_config(**sizes), args.attn_implementation, args.param_dtype))
    ids, positions = torch.arange(8)[None] + 4, torch.arange(8)[None]
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids} | boundaries(positions)
    batch = to_device(batch, run.accelerator.device)
    train_step(run, [batch], next_token_loss, count_next_tokens)  # makes the moments
    waits = count_waits(lambda: train_step(run, [batch, batch], next_token_loss, count_next_tokens))
    toy.finish(args, run.accelerator, {"waits": waits})


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
