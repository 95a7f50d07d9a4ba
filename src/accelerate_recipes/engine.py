"""The loop: `train()` is the calendar, `train_step()` the arithmetic of one optimizer step.

Model, data and loss are handed in. A recipe gives the sum of token losses of a batch and the number of its
targets; only here is one divided by the other, over all micro-batches and ranks, so that the result does not
depend on how the batch was divided. The clock is the completed optimizer step.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint import Checkpointer
from accelerate_recipes.distributed import accumulate, max_over_ranks, sum_over_ranks
from accelerate_recipes.metrics import MetricsLog, Window, peak_memory_gib

Batch = dict[str, torch.Tensor]
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
CountFn = Callable[[Batch], torch.Tensor]


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is not finite. The weights are those before the step."""


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    count_fn: CountFn,
    max_grad_norm: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One optimizer step on this rank's micro-batches, which lie on its device.

    Returns:
        Mean loss over all ranks' targets (nats per token), gradient norm before clipping, number of targets; each
        a scalar on the device, equal on all ranks.

    Raises:
        NonFiniteError: before the weights change.
    """
    num_targets = sum_over_ranks(torch.stack([count_fn(batch) for batch in micro_batches]).sum())
    # DDP and FSDP average gradients over the ranks; the sum over all targets is wanted.
    scale = accelerator.num_processes / num_targets.clamp(min=1)
    loss_sum = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(micro_batches):
        with accumulate(accelerator, model, is_last=i == len(micro_batches) - 1):
            loss = loss_fn(model, batch)
            accelerator.backward(loss * scale)
        loss_sum += loss.detach()
    loss = sum_over_ranks(loss_sum) / num_targets.clamp(min=1)
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
    if hasattr(grad_norm, "full_tensor"):
        grad_norm = grad_norm.full_tensor()
    # The one wait for the device in a step. Both are sums over all ranks, so all ranks decide alike.
    if not torch.isfinite(torch.stack([loss, grad_norm.to(loss.device)])).all().item():
        raise NonFiniteError(f"loss {loss.item()}, gradient norm {grad_norm.item()}")
    optimizer.step()
    optimizer.zero_grad()
    return loss, grad_norm, num_targets


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    train_loader: DataLoader,
    args: TrainArgs,
    *,
    total_steps: int,
    loss_fn: LossFn,
    count_fn: CountFn,
    evaluate_fn: Callable[[], dict[str, float]],
    checkpointer: Checkpointer,
    flops_per_token: float,
) -> list[dict]:
    """Train to `total_steps`, from the checkpoint that `args` name if there is one.

    `train_loader` yields this rank's micro-batches in order; its batch sampler has a `start_step`.
    `evaluate_fn` runs on all ranks, before and after training and every `eval_steps`.

    Returns:
        The records of metrics.jsonl, of earlier parts of the run too.
    """
    output_dir = Path(args.output_dir)
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        args.save(output_dir / "args.yaml")
    set_seed(args.seed, device_specific=True)  # the weights are made; from here on ranks draw different dropout
    step = checkpointer.resume()
    log = MetricsLog(accelerator, output_dir, total_steps, flops_per_token)
    log.restore(checkpointer.resumed_from)
    if args.trackers:
        # TensorBoard takes plain values only.
        config = {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in vars(args).items()
        }
        accelerator.init_trackers(output_dir.name, config=config)
    if step == 0:
        log.log_evaluation(0, evaluate_fn())

    train_loader.batch_sampler.start_step = step
    micro_batches = iter(train_loader)
    accumulation_steps = args.accumulation_steps(accelerator.num_processes)
    window = Window()
    model.train()
    while step < total_steps:
        start = time.perf_counter()
        batches = [to_device(next(micro_batches), accelerator.device) for _ in range(accumulation_steps)]
        try:
            loss, grad_norm, num_targets = train_step(
                accelerator, model, optimizer, batches, loss_fn, count_fn, args.max_grad_norm
            )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {step + 1}: {error}. The weights were not changed. "
                f"Last good checkpoint: {checkpointer.newest or 'none yet'}"
            ) from None
        lr = scheduler.get_last_lr()[0]
        scheduler.step()
        step += 1
        window.add(loss, num_targets, args.total_batch_size, time.perf_counter() - start)
        log.progress.update()

        last = step == total_steps
        if last or step % args.logging_steps == 0:
            gib = max_over_ranks(peak_memory_gib(accelerator.device), accelerator.device)
            log.log_step(step, window, grad_norm.item(), lr, gib)
            window = Window()
        if last or (args.eval_steps and step % args.eval_steps == 0):
            log.log_evaluation(step, evaluate_fn())
        if last or (args.save_steps and step % args.save_steps == 0):
            checkpointer.save(step)
    log.progress.close()
    return log.records


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[Batch], loss_fn: LossFn, count_fn: CountFn
) -> float:
    """Mean loss over all targets of all ranks, in nats per token.

    Every rank must hand in the same number of batches, since forward passes communicate; a batch without targets
    counts nothing.
    """
    model.eval()
    loss_sum = torch.zeros((), device=accelerator.device)
    num_targets = torch.zeros((), device=accelerator.device)
    for batch in batches:
        batch = to_device(batch, accelerator.device)
        loss_sum += loss_fn(model, batch)
        num_targets += count_fn(batch)
    model.train()
    return (sum_over_ranks(loss_sum) / sum_over_ranks(num_targets)).item()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Without waiting, when the loader pins its memory."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
