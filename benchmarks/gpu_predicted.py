"""Predict the memory of uncompiled cases of `gpu.py` by the simulation of `plan`, on any machine.

    python benchmarks/gpu_predicted.py --out benchmarks/results/gpu_predicted.json

`gpu_report.py` sets the predictions beside what a GPU needed. They do not depend on the GPU.
"""

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_cases import CASES, Batch, Case, config_of, packed_batch
from harness import ROOT, machine, make_parser, write_json

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.launcher import launch_environment
from accelerate_recipes.losses import count_next_tokens, next_token_loss_without_logits
from accelerate_recipes.models import new_model
from accelerate_recipes.plan.simulate import Job, Outcome, Simulator
from accelerate_recipes.recipe import Requirements
from accelerate_recipes.trial import Trial


@dataclass
class Args(TrainArgs):
    """Arguments with which the child of `plan` makes a case; this file is its recipe."""

    model: str = arg("", "A model of gpu_cases.SHAPES.")
    layers: int = arg(0, "Its layers.")
    attention: str = arg("documents", "Its attention.")
    length: int = arg(0, "Tokens of a row.")
    documents: str = arg("one", "Documents of a row.")


def requirements(args: Args) -> Requirements:
    return Requirements()


def main(args: Args) -> None:
    raise SystemExit("gpu.py runs this on a GPU")


def trial(args: Args) -> Trial:
    batch = Batch(args.per_device_train_batch_size, args.length, documents=args.documents)
    config = config_of(Case("", 0, model=args.model, layers=args.layers))
    return Trial(
        config,
        partial(new_model, attn_implementation=args.attention, dtype=args.param_dtype),
        next_token_loss_without_logits,
        count_next_tokens,
        packed_batch(batch, config.vocab_size, 0),
        batch.rows * batch.length,
    )


def job_of(case: Case, batch: Batch) -> Job:
    """Make the simulation of a case, as `gpu.py` launches it."""
    values = {
        "model": case.model, "layers": case.layers, "attention": case.attention, "length": batch.length,
        "documents": batch.documents, "per_device_train_batch_size": batch.rows,
        "total_batch_size": batch.rows * batch.micro_batches, **case.args,
    }  # fmt: skip
    words = [str(Path(__file__).resolve()), *(f"--{name}={value}" for name, value in values.items())]
    launch = ["--config_file", str(ROOT / f"accelerate_configs/{case.config}.yaml"), "--num_processes", "1"]
    return Job(launch_environment([*launch, *case.launch.split(), *words]), words)


def predict(case: Case) -> list[dict]:
    """Simulate the batches of a case; sizes are in bytes."""
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # for the child, which loads this file
    with Simulator() as simulator:
        outcomes = simulator([job_of(case, batch) for batch in case.batches])
    found = []
    for batch, outcome in zip(case.batches, outcomes, strict=True):
        if not isinstance(outcome, Outcome):
            raise outcome
        found.append(
            {"case": case.name, "setting": batch.name, "allocated": outcome.peak, "reserved": outcome.reserved}
        )
    return found


if __name__ == "__main__":
    flags = make_parser(__doc__).parse_args()
    found = machine() | {"predicted": predict(CASES["memory"])}
    write_json(flags.out, found)
    print(json.dumps(found["predicted"], indent=1))
