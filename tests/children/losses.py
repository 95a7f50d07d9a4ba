"""Compare the loss without logits with the plain one, and test prefetching, on sharded models; results go to a JSON file.

tests/test_losses.py runs this recipe, which is like any other.
"""

from dataclasses import dataclass, replace

import torch
import toy
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from toy import requirements
from transformers import CONFIG_MAPPING

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.distributed import fsdp_units, make_accelerator
from accelerate_recipes.engine import train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss, next_token_loss_without_logits
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.generation import generate_texts
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run

EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.0}
MODELS = {"llama": {}, "llama, tied": {"tie_word_embeddings": True}, "mixtral": EXPERTS}


@dataclass
class Args(TrainArgs):
    total_batch_size: int = 4
    per_device_train_batch_size: int = 2
    learning_rate: float = 1e-2


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole gradients of the backward pass on every rank, and clear them."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[WRAPPERS.sub("", name)] = whole.clone().double()
    model.zero_grad()
    return found


def main(args: Args) -> None:
    accelerator = make_accelerator(args)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    tokenizer = new_word_tokenizer([f"w{i}" for i in range(596)])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, len(tokenizer), (4, 96), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, IGNORE_INDEX, ids)
    rows = {"input_ids": ids, "position_ids": torch.arange(96).expand_as(ids), "labels": labels}
    batch = {name: tensor.chunk(world_size)[rank] for name, tensor in rows.items()}

    def new(values: dict, prefetch: int = 0) -> Run:
        set_seed(args.seed)
        accelerator.free_memory()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
        sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.2, "num_key_value_heads": 4}
        config = CONFIG_MAPPING[values.get("model_type", "llama")](**sizes | values)
        model = new_model(config, "sdpa")
        run = Run(replace(args, prefetch_layers=prefetch), accelerator)
        run.shard(model)
        return run

    def train(run: Run) -> list[float]:
        return [train_step(run, [batch], next_token_loss_without_logits, count_next_tokens).loss for _ in range(3)]

    result = {"world_size": world_size, "models": {}}
    for name, values in MODELS.items():
        run = new(values)
        model = run.model
        losses, grads = [], []
        for loss_fn in (next_token_loss, next_token_loss_without_logits):
            loss = loss_fn(model, batch)
            accelerator.backward(loss / 100)
            losses.append(loss.item())
            grads.append(gradients(model))
        found = {
            "losses": losses,
            "distance": {key: ((grads[1][key] - g).norm() / g.norm()).item() for key, g in grads[0].items()},
            "trajectory": train(run),
            "texts": generate_texts(accelerator, model, tokenizer, [[5, 6, 7], [8]], 4, batch_size=1).texts,
        }
        if accelerator.is_fsdp2:
            run = new(values, prefetch=2)
            model = run.model
            index = {id(unit._get_fsdp_state()): i for i, unit in enumerate(fsdp_units(model))}
            states = [unit._get_fsdp_state() for unit in fsdp_units(model)]
            found["prefetched"] = {
                way: [[index[id(other)] for other in getattr(state, f"_states_to_{way}_prefetch")] for state in states]
                for way in ("forward", "backward")
            }
            found["trajectory with prefetching"] = train(run)
        result["models"][name] = found
    toy.finish(args, accelerator, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
