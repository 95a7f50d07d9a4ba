"""How many graphs torch has compiled after each act of a run, and how many of them are layers, for models of two and of
three layers; to a JSON file.

Run by tests/test_attention.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import toy
from accelerate.utils import set_seed
from tiny import tiny_config
from torch._dynamo.backends import registry
from toy import requirements

from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import evaluate_loss, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss_without_logits
from accelerate_recipes.models.documents import boundaries
from accelerate_recipes.models.generation import generate_texts
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run

# Documents in a row; each act computes all of them.
ACTS = {
    "training": [[50, 50], [100]],
    "training again": [[50, 50], [100]],
    "evaluation": [[50, 50]],
    "training after it": [[100]],
    "other documents": [[1, 99], [70, 30], [90, 5, 5]],
    "a shorter longest document": [[50, 50]],
    "another shorter longest document": [[25] * 4],
    "a third": [[10] * 10],
    "generation": [],
    "training after all": [[50, 50], [100], [1, 99]],
}


@dataclass
class Args(toy.Args):
    total_batch_size: int = 4
    attn_implementation: str = "documents"


def make_batch(lengths: list[int]) -> dict:
    """One row, of documents of these lengths."""
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.arange(position_ids.numel())[None] % 96 + 4
    return {"input_ids": ids, "position_ids": position_ids, "labels": ids} | boundaries(position_ids)


def note_graphs() -> list[bool]:
    """Return a list that will say of each graph that the backend `eager` gets whether there is attention in it."""
    has_attention = []

    def note(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        has_attention.append(any("varlen_attn" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    registry.lookup_backend("eager")
    registry._COMPILER_FNS["eager"] = note
    return has_attention


def count_graphs(run: Run, tokenizer, has_attention: list[bool]) -> dict[str, tuple[int, int]]:
    """Do the acts, and count after each the graphs that are there, and those with attention in them."""
    found = {}
    for act, rows in ACTS.items():
        batches = [make_batch(lengths) for lengths in rows]
        if act == "evaluation":
            evaluate_loss(run.accelerator, run.model, batches, next_token_loss_without_logits, count_next_tokens)
        elif act == "generation":
            generate_texts(run.accelerator, run.model, tokenizer, [[5, 6, 7], [8]], 4, batch_size=1)
        else:
            for batch in batches:
                train_step(run, [batch], next_token_loss_without_logits, count_next_tokens)
        found[act] = len(has_attention), sum(has_attention)
    return found


def main(args: Args) -> None:
    accelerator = make_accelerator(args)
    tokenizer = toy.make_tokenizer()
    result = {}
    for num_layers in (2, 3):
        set_seed(args.seed)
        accelerator.free_memory()
        torch._dynamo.reset()
        has_attention = note_graphs()
        run = Run(args, accelerator)
        config = tiny_config(num_hidden_layers=num_layers, max_position_embeddings=128)
        run.shard(new_model(config, args.attn_implementation, args.param_dtype))
        result[num_layers] = count_graphs(run, tokenizer, has_attention)
        run.release()
    toy.finish(args, accelerator, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
