"""Optimizer and learning-rate schedule."""

import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import get_scheduler

from accelerate_recipes.args import TrainArgs

# What DDP, FSDP1, activation checkpointing and torch.compile put into a parameter's name.
WRAPPERS = re.compile(r"^module\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")


def optimizer_fn(model: nn.Module, args: TrainArgs) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function that builds the optimizer on `model` once it is sharded.

    Matrices decay; norms, biases and other parameters of fewer than two dimensions do not. That is read off the
    whole model, by name: FSDP1 leaves every parameter flat.
    """
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}

    def make_optimizer(sharded: nn.Module) -> torch.optim.Optimizer:
        decayed, spared = [], []
        for name, parameter in sharded.named_parameters():
            if parameter.requires_grad:
                (spared if WRAPPERS.sub("", name) in vectors else decayed).append(parameter)
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": args.weight_decay}, {"params": spared, "weight_decay": 0.0}],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True,  # one kernel, on CPU and GPU, for plain tensors and DTensors alike
        )

    return make_optimizer


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainArgs, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule over `total_steps` optimizer steps; step it once after each.

    The warm-up starts at 0; what follows falls to `min_lr_ratio` of the peak and stays there.
    """
    warmup = args.warmup_steps if args.warmup_steps >= 1 else args.warmup_steps * total_steps
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, round(warmup), total_steps)
    if args.min_lr_ratio:
        shape, floor = schedule.lr_lambdas[0], args.min_lr_ratio

        def raised(step: int) -> float:
            return shape(step) if step < warmup else floor + (1 - floor) * shape(step)

        schedule.lr_lambdas = [raised] * len(schedule.lr_lambdas)
    return schedule
