"""Take three steps of the toy model, and record what the levers do meanwhile, in a JSON file.

tests/test_levers.py runs this recipe, which is like any other.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import toy
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from accelerate_recipes.data.rows import make_train_loader
from accelerate_recipes.engine import train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.recipe import run_recipe

STEPS = 3


@dataclass
class Args(toy.Args):
    per_device_train_batch_size: int = 4


requirements = toy.requirements


def main(args: Args) -> None:
    run = toy.new_run(args, toy.make_model(args)[0])
    model = run.model
    calls = []
    layers = [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    offloads = []
    save_on_cpu = checkpoint_wrapper.save_on_cpu
    checkpoint_wrapper.save_on_cpu = lambda **options: offloads.append(options) or save_on_cpu(**options)
    reduced = []
    # FSDP1 and FSDP2 both call it by the first name, of torch 2.11 by the second.
    name = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
    reduce_scatter = getattr(dist, name)

    def record(output: torch.Tensor, input: torch.Tensor, *args, **kwargs):
        reduced.append(str(input.dtype))
        return reduce_scatter(output, input, *args, **kwargs)

    setattr(dist, name, record)
    batches = iter(make_train_loader(toy.packed_rows(args.num_rows), args, run.rank, run.world_size))
    losses = [train_step(run, [next(batches)], next_token_loss, count_next_tokens).loss for _ in range(STEPS)]
    result = {
        "losses": losses,
        "calls": [calls.count(i) / STEPS for i in range(len(layers))],
        "offloads": len(offloads) / STEPS,
        "reduced": sorted(set(reduced)),
        "stored": sorted({str(parameter.dtype) for parameter in model.parameters()}),
    }
    toy.finish(args, run.accelerator, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
