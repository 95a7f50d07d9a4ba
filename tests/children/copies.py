"""Bytes that each operator writes in a training step, per parameter of the model; the result goes to a JSON file.

Run by tests/test_levers.py. A row is short, so that weights and gradients are what is large.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import toy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import requirements
from transformers import LlamaConfig

from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import to_device, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.documents import boundaries
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run


@dataclass
class Args(toy.Args):
    total_batch_size: int = 1
    per_device_train_batch_size: int = 1


class Written(TorchDispatchMode):
    """Adds up the bytes that each operator writes: its result, or what it changes in place."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        schema = function._schema
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        changed = [
            value
            for value, argument in zip(args, schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tree_leaves(changed or result):
            if isinstance(tensor, torch.Tensor) and not is_view:
                self.bytes[schema.name.removeprefix("aten::")] += tensor.numel() * tensor.element_size()
        return result


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
    accelerator = make_accelerator(args)
    run = Run(args, accelerator)
    sizes = {
        "vocab_size": 500, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2, "num_hidden_layers": 3,
        "max_position_embeddings": 16,
    }  # fmt: skip
    if args.model_name_or_path:
        run.shard(load_model(args.model_name_or_path, "sdpa", **load_settings(args)))
    else:
        run.shard(new_model(LlamaConfig(**sizes), args.attn_implementation, args.param_dtype))
    ids = torch.arange(8)[None] + 4
    positions = torch.arange(8)[None]
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids} | boundaries(positions)
    batch = to_device(batch, accelerator.device)
    for _ in range(2):  # the first makes the moments
        with Written() as written:
            train_step(run, [batch], next_token_loss, count_next_tokens)
    waits = count_waits(lambda: train_step(run, [batch, batch], next_token_loss, count_next_tokens))
    total = sum(parameter.numel() for parameter in run.model.parameters())
    per_parameter = {name: size / total for name, size in written.bytes.items()}
    toy.finish(args, accelerator, per_parameter | {"waits": waits})


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
