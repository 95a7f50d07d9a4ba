"""Predict the memory of part 4 of `gpu.py` by the simulation of `plan`, on any machine.

    python benchmarks/gpu_predicted.py --out benchmarks/results/gpu_predicted.json

`gpu_report.py` sets the predictions beside what a GPU needed. They do not depend on the GPU.
"""

import argparse
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_cases import CASES, MODELS, ROW, Case, Setting, memory
from gpu_kernels import packed_batch
from machine import machine
from transformers import LlamaConfig

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.launch.preflight import launch_environment
from accelerate_recipes.losses import count_next_tokens, next_token_loss, next_token_loss_without_logits
from accelerate_recipes.models import new_model
from accelerate_recipes.plan.simulate import Job, Outcome, Simulator
from accelerate_recipes.recipe import Requirements
from accelerate_recipes.trial import Trial

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args(TrainArgs):
    """Arguments with which the child of `plan` finds a setting; this file is its recipe."""

    case: str = arg("", "Name of a case of gpu_cases.py.")
    setting: str = arg("", "Name of its setting.")


def requirements(args: Args) -> Requirements:
    return Requirements()


def main(args: Args) -> None:
    raise SystemExit("gpu.py runs this on a GPU")


def trial(args: Args) -> Trial:
    setting = next(setting for setting in CASES[args.case].settings if setting.name == args.setting)
    config = LlamaConfig(**MODELS[setting.model], num_hidden_layers=setting.layers)
    return Trial(
        config,
        partial(new_model, attn_implementation=setting.attention, dtype=args.param_dtype),
        next_token_loss if setting.whole_logits else next_token_loss_without_logits,
        count_next_tokens,
        packed_batch(setting.documents, setting.rows, ROW, config.vocab_size, 0),
        setting.rows * ROW,
    )


def job_of(case: Case, setting: Setting) -> Job:
    """Make the simulation of a setting, as `gpu.py` launches it."""
    config = ROOT / "accelerate_configs" / f"{case.config}.yaml"
    (micro_batches,) = setting.micro_batches
    values = {
        "case": case.name,
        "setting": setting.name,
        "per_device_train_batch_size": setting.rows,
        "total_batch_size": setting.rows * micro_batches,
        **setting.args,
    }
    words = [str(Path(__file__).resolve()), *(f"--{name}={value}" for name, value in values.items())]
    launch = ["--config_file", str(config), "--num_processes", "1", *case.launch.split()]
    return Job(launch_environment([*launch, *words]), words)


def predict(names: list[str]) -> list[dict]:
    """Simulate the settings of these cases; sizes are in bytes."""
    chosen = [(case, setting) for case in map(CASES.__getitem__, names) for setting in case.settings]
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # for the child, which loads this file
    with Simulator() as simulator:
        outcomes = simulator([job_of(*pair) for pair in chosen])
    found = []
    for (case, setting), outcome in zip(chosen, outcomes, strict=True):
        if not isinstance(outcome, Outcome):
            raise outcome
        sizes = {"allocated": outcome.peak, "reserved": outcome.reserved}
        found.append({"case": case.name, "setting": setting.name} | sizes)
    return found


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    found = machine(torch.device("cpu")) | {"predicted": predict([case.name for case in memory()])}
    flags.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for prediction in found["predicted"]:
        sizes = ", ".join(f"{prediction[what] / 2**30:.2f} GiB {what}" for what in ("allocated", "reserved"))
        print(f"{prediction['case']}, {prediction['setting']}: {sizes}")


if __name__ == "__main__":
    run()
