"""Measure what it costs to look for steps that go wrong: steps of `engine.train_step` with and without.

    python benchmarks/spike_cost.py --out benchmarks/results/spike_cost.json

Three ways take turns, on one model and the same rows, so that other work on the machine disturbs all three:

    blind     takes every step as it is: nothing is kept to go back to, and no number is judged
    finite    the default: random state and buffers are kept, and loss and gradient norm must be finite
    spikes    --spike_factor: they are also compared with the median of a hundred steps before

A turn is --steps optimizer steps, between two waits for the device; a round is one turn of each, in an order that rotates;
a first round warms up and does not count. Read the ratios: each is the median over the rounds, with the smallest and the
largest; if 1 lies between those, the run shows no difference. On a busy machine, CPU time varies less than wall time.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from harness import machine, make_parser, print_ratios, ratios, turns, write_json
from transformers import LlamaConfig

from accelerate_recipes import engine
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.bad_steps import MEMORY, Spikes
from accelerate_recipes.data.packing import collate, pack_row
from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import Step, to_device, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.run import Run


class Blind(Spikes):
    """Judge that accepts each step."""

    def settle(self, first: Step, again: Callable[[], Step]) -> tuple[Step, str]:
        return first, ""


class NoTraces:
    """Stands in for the state to go back to."""

    def __init__(self, *_: Any):
        pass


def seconds(run: Run, batches: list[dict[str, Any]], spikes: Spikes, num_steps: int) -> tuple[float, float]:
    """Take steps; return their wall and CPU seconds."""
    patch = mock.patch.object(engine, "Traces", NoTraces) if isinstance(spikes, Blind) else contextlib.nullcontext()
    with patch:
        before = now()
        for _ in range(num_steps):
            train_step(run, batches, next_token_loss, count_next_tokens, spikes=spikes)
        after = now()
    return after[0] - before[0], after[1] - before[1]


def now() -> tuple[float, float]:
    """Return wall and CPU seconds of this process, once its device has finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter(), time.process_time()


def main() -> None:
    flags = make_parser(
        __doc__,
        pairs=(20, "Rounds that count."),
        steps=(20, "Optimizer steps in a turn."),
        micro_batches=(2, "Forward passes per step."),
        max_length=(256, "Tokens in a row."),
        hidden_size=(256, "Width of the model."),
        intermediate_size=(704, "Width of the model's feed-forward layers."),
        num_hidden_layers=(4, "Layers of the model."),
        num_attention_heads=(4, "Attention heads of the model."),
    ).parse_args()
    args = TrainArgs(learning_rate=1e-5)
    run = Run(args, make_accelerator(args))
    sizes = {name: value for name, value in vars(flags).items() if hasattr(LlamaConfig(), name)}
    run.shard(new_model(LlamaConfig(vocab_size=2000, max_position_embeddings=flags.max_length, **sizes), "sdpa"))
    run.model.train()
    tokens = torch.arange(flags.max_length).numpy() % 1999
    row = pack_row(tokens, [flags.max_length], flags.max_length, 0, True)
    batches = [to_device(collate([row]), run.accelerator.device)] * flags.micro_batches
    judges = {"blind": Blind(), "finite": Spikes(), "spikes": Spikes(1000.0)}
    for past in judges["spikes"].past.values():
        past.extend(1.0 + i % 7 for i in range(MEMORY))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in judges}
    for number in range(1 + flags.pairs):
        for name in turns([*judges], number):
            found[name].append(seconds(run, batches, judges[name], flags.steps))
    result: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in run.model.parameters())}
    for place, clock in enumerate(("wall", "CPU")):
        counted = {name: [values[place] for values in turn[1:]] for name, turn in found.items()}
        by_round = ratios(counted, "finite", ["blind"]) | ratios(counted, "spikes", ["blind"])
        print_ratios(f"{clock} time of a step,", by_round)
        result[f"{clock} seconds of turns"], result[f"{clock} ratios of rounds"] = counted, by_round
    write_json(flags.out, machine(run.accelerator.device) | {"flags": vars(flags)} | result)


if __name__ == "__main__":
    main()
