"""Take real steps of a recipe's trial under the ledger; rank 0 writes what it saw to ledger.json.

tests/test_simulate.py compares that with the simulation. It runs several settings of --trials one after another, which must
agree in what the launcher decides.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import toy
from toy import requirements

from accelerate_recipes import distributed
from accelerate_recipes.args import arg
from accelerate_recipes.models.shared_rows import part_of_rows, row_group
from accelerate_recipes.ranks import data_world_size
from accelerate_recipes.recipe import run_recipe
from accelerate_recipes.run import Run
from recipe_tools.plan.ledger import GATHERED, PARAMETERS, Ledger
from recipe_tools.plan.simulate import Job, load_trial, num_logits, outcome_of, take_steps

# gloo's threads sometimes let go late of what was gathered: a peak is then too high, now and then by 2 %, or it is reached
# sooner, by what is still there instead of by the copy inside the next gather.
TRIES = 4


@dataclass
class Args(toy.Args):
    trials: str = arg("", "JSON list of commands: a recipe with its arguments.")
    total_batch_size: int = 8


@torch.no_grad()
def fill(model, seed, device, storage=None):
    """Replace `weights.initialize`, which does not know adapters."""
    model.to_empty(device=storage or device)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        distributed.local_shard(tensor).fill_(0.01)
    return model


def ledger_of(accelerator, command: list[str]) -> dict:
    args, trial = load_trial(Job(dict(os.environ), command))
    run = Run(args, accelerator)
    run.shard(trial.make_model(trial.config))
    reference = run.shard_reference(trial.make_reference()) if trial.make_reference else None
    if reference is not None:
        trial.keep_reference(reference)
    number = args.accumulation_steps(data_world_size())
    with Ledger("cpu", num_logits(trial.config)) as ledger:
        batches = [{n: v.clone() if torch.is_tensor(v) else v for n, v in trial.batch.items()} for _ in range(number)]
        batches = [part_of_rows(batch, row_group(accelerator)) for batch in batches]
        if reference is not None:
            ledger.tag(reference.parameters(), PARAMETERS)
        outcomes = []
        for _ in range(TRIES):
            take_steps(ledger, run, trial, batches)
            outcomes.append(outcome_of(ledger, trial, batches, trained=0, parameters=0, num_layers=0, is_uniform=True))
    run.release()
    return asdict(min(outcomes, key=lambda outcome: (outcome.peak, outcome.at_peak.get(GATHERED, 0))))


def main(args: Args) -> None:
    distributed.weights.initialize = fill
    accelerator = distributed.make_accelerator(args)
    found = [ledger_of(accelerator, command) for command in json.loads(args.trials)]
    if accelerator.is_main_process:
        Path(args.output_dir).mkdir(parents=True)
        (Path(args.output_dir) / "ledger.json").write_text(json.dumps(found), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
