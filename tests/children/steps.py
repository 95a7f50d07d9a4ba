"""Take a few optimizer steps of a tiny Llama on rows with uneven numbers of targets; results go to a JSON file.

tests/test_equivalence.py runs this recipe, which is like any other, under each accelerate config.
"""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import toy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from toy import requirements

from accelerate_recipes.data.packing import collate
from accelerate_recipes.data.rows import make_train_loader
from accelerate_recipes.distributed import fsdp_units, make_accelerator
from accelerate_recipes.engine import on_this_rank, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.generation import generate_texts
from accelerate_recipes.models.weights import WRAPPERS
from accelerate_recipes.optim import local_shard
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run

STEPS = 4


@dataclass
class Args(toy.Args):
    num_train_epochs: float = 1.5  # 20 rows an epoch: the last of 4 batches is not full
    num_rows: int = 20


def checksums(model: nn.Module) -> dict[str, list[float]]:
    """Return two sums over each whole parameter and buffer; the second is weighted by position, so that order matters."""
    found = {}
    with FSDP1.summon_full_params(model) if isinstance(model, FSDP1) else contextlib.nullcontext():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole = whole.detach().cpu().double().flatten()
            found[WRAPPERS.sub("", name)] = [whole.sum().item(), (whole * torch.arange(len(whole))).sum().item()]
    return found


def main(args: Args) -> None:
    accelerator = make_accelerator(args)
    model, tokenizer = toy.make_model(args)
    total = sum(p.numel() for p in model.parameters())
    run = Run(args, accelerator)
    run.prepare(model, tokenizer, 2 * STEPS)
    model, checkpointer = run.model, run.checkpointer
    start = checksums(model)
    place = (toy.packed_rows(args.num_rows), args, run.data_rank, run.data_world_size)
    loader = make_train_loader(*place, collate_fn=collate)

    def steps(first: int) -> tuple[list[float], list[float]]:
        loader.start_at(first, checkpointer.data_states)
        batches = iter(loader)
        found = []
        for _ in range(first, STEPS):
            number = args.accumulation_steps(run.data_world_size)
            micro = [on_this_rank(next(batches), accelerator, model) for _ in range(number)]
            done = train_step(run, micro, next_token_loss, count_next_tokens)
            run.scheduler.step()
            found.append((done.loss, done.grad_norm.item()))
            if len(found) + first == STEPS // 2:
                if accelerator.is_main_process:
                    (Path(args.output_dir) / "metrics.jsonl").touch()
                checkpointer.save(STEPS // 2, loader.state())
        return found

    if accelerator.is_main_process:
        Path(args.output_dir).mkdir(parents=True)
    model.train()
    trajectory = steps(0)
    prompts = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15]]
    texts = generate_texts(accelerator, model, tokenizer, prompts, 4, batch_size=2).texts
    # Go back to the middle: model, optimizer, schedule and random generators must come from the files, which were written
    # while the later steps changed the weights.
    checkpointer.wait()
    checkpointer.resumed_from = checkpointer.newest
    resumed = steps(checkpointer.resume())
    result = {
        "start": start,
        "trajectory": trajectory,
        "resumed": resumed,
        "texts": texts,
        "world_size": accelerator.num_processes,
        "units": len(fsdp_units(model)),
        "local": sum(local_shard(p).numel() for p in model.parameters()),
        "total": total,
        "args": asdict(args),
    }
    toy.finish(args, accelerator, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
