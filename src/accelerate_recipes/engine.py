"""The loop: `train()` is the calendar, `train_step()` the arithmetic of one optimizer step.

Model, data and loss are handed in. A recipe gives the sum of token losses of a batch and the number of its
targets; only here is one divided by the other, over all micro-batches and ranks, so that the result does not
depend on how the batch was divided. The clock is the completed optimizer step.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from accelerate_recipes import stop, watch
from accelerate_recipes.args import ConfigError, TrainArgs
from accelerate_recipes.checkpoint import Checkpointer, SaveError, complete_checkpoints, step_of
from accelerate_recipes.distributed import accumulate, max_over_ranks, on_all_ranks, sum_over_ranks
from accelerate_recipes.metrics import MetricsLog, Window, peak_memory_gib
from accelerate_recipes.status import update_status
from accelerate_recipes.stop import Stopped

Batch = dict[str, torch.Tensor]
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
CountFn = Callable[[Batch], torch.Tensor]


class TrainLoader(Protocol):
    """This rank's micro-batches in the order of the steps, without end. `row`, of each, names its rows."""

    # Behind the last micro-batch of a step: this rank cannot take its share of the next one without asking the others.
    # The engine sets it on all ranks where one cannot.
    is_uneven: bool

    def __iter__(self) -> Iterator[Batch]: ...

    def start_at(self, step: int, states: list[dict]) -> None:
        """Begin behind `step` optimizer steps; called before iterating. `states` are what `state` gave on all ranks."""

    def state(self) -> dict:
        """Return what a checkpoint needs besides the step, in numbers and strings."""

    def counts(self) -> dict[str, int]:
        """Count what this rank has read so far, for the log, which adds the ranks' counts up."""


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is not finite. The weights are those before the step.

    `micro_losses` are the summed token losses of this rank's micro-batches.
    """

    def __init__(self, message: str, micro_losses: list[float]):
        super().__init__(message)
        self.micro_losses = micro_losses


class Step(NamedTuple):
    """Result of one optimizer step; equal on all ranks, tensors are scalars on the device."""

    loss: torch.Tensor  # mean over all targets, in nats per token
    grad_norm: torch.Tensor  # before clipping
    num_targets: torch.Tensor
    save: bool  # a rank wants a checkpoint
    stop: bool  # a rank was asked to stop
    is_uneven: bool  # the data of a rank are, see TrainLoader


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    count_fn: CountFn,
    max_grad_norm: float,
    wants_save: bool = False,
    is_uneven: bool = False,
) -> Step:
    """Take one optimizer step on this rank's micro-batches, which lie on its device.

    Raises:
        NonFiniteError: before the weights change.
    """
    # The norm is looked at before the weights change, not what it is divided into.
    assert 0 <= max_grad_norm < float("inf"), max_grad_norm
    # One collective for all that the ranks must agree on: number of targets, a wish to save, one to stop, and whether
    # to talk about the next step's data.
    num_targets = torch.stack([count_fn(batch) for batch in micro_batches]).sum()
    wishes = torch.tensor([int(wants_save), int(stop.requested() is not None), int(is_uneven)])
    wishes = wishes.to(accelerator.device, non_blocking=True)  # torch.tensor(..., device=) would wait for the device
    num_targets, *num_wishes = sum_over_ranks(torch.cat([num_targets[None], wishes]))
    # DDP and FSDP average gradients over the ranks; the sum over all targets is wanted.
    scale = accelerator.num_processes / num_targets.clamp(min=1)
    micro_losses = []
    for i, batch in enumerate(micro_batches):
        with accumulate(accelerator, model, is_last=i == len(micro_batches) - 1):
            loss = loss_fn(model, batch)
            accelerator.backward(loss * scale)
        micro_losses.append(loss.detach())
    loss = sum_over_ranks(torch.stack(micro_losses).sum()) / num_targets.clamp(min=1)
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
    if hasattr(grad_norm, "full_tensor"):
        grad_norm = grad_norm.full_tensor()
    # The one wait for the device in a step. All are sums over all ranks, so all ranks decide alike.
    flags = torch.stack([torch.isfinite(loss), torch.isfinite(grad_norm.to(loss.device)), *(n > 0 for n in num_wishes)])
    loss_is_finite, norm_is_finite, *wanted = flags.tolist()
    if not (loss_is_finite and norm_is_finite):
        message = f"loss {loss.item()}, gradient norm {grad_norm.item()}"
        raise NonFiniteError(message, torch.stack(micro_losses).tolist())
    optimizer.step()
    optimizer.zero_grad()
    return Step(loss, grad_norm, num_targets, *wanted)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    train_loader: TrainLoader,
    args: TrainArgs,
    *,
    total_steps: int,
    loss_fn: LossFn,
    count_fn: CountFn,
    evaluate_fn: Callable[[int], dict[str, float]],
    checkpointer: Checkpointer,
    flops_per_token: float,
) -> list[dict]:
    """Train to `total_steps`, from the checkpoint that `checkpointer` is to resume if there is one.

    `evaluate_fn(step)` runs on all ranks, before and after training and every `eval_steps`.

    Returns:
        The records of metrics.jsonl, of earlier parts of the run too.

    Raises:
        Stopped: when a rank was asked to stop; what was done until then is saved.
        NonFiniteError: naming the step and the last good checkpoint.
    """
    output_dir = Path(args.output_dir)
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        args.save(output_dir / "args.yaml")
    # Not earlier: before there is something to save, a signal should end the process, also one that waits for another.
    stop.listen(output_dir)
    set_seed(args.seed, device_specific=True)  # the weights are made; from here on ranks draw different dropout
    step, log = begin(checkpointer, total_steps, evaluate_fn, flops_per_token)
    train_loader.start_at(step, checkpointer.data_states)
    micro_batches = iter(train_loader)
    accumulation_steps = args.accumulation_steps(accelerator.num_processes)
    window = Window()
    model.train()
    last_save = time.perf_counter()
    step_timeout = args.ddp_timeout  # the first step may compile, and start the data's workers
    while step < total_steps:
        # A network that fails is tried again for longer than a step may take: each try counts.
        watch.expect(f"the data of step {step + 1}", step_timeout, lambda: train_loader.counts().get("retries"))
        start = time.perf_counter()
        batches = [to_device(next(micro_batches), accelerator.device) for _ in range(accumulation_steps)]
        data_seconds = time.perf_counter() - start
        watch.expect(f"step {step + 1}", step_timeout)
        # The first rank's clock counts.
        save_by_time = accelerator.is_main_process and 0 < 60 * args.save_minutes < start - last_save
        try:
            done = train_step(
                accelerator, model, optimizer, batches, loss_fn, count_fn, args.max_grad_norm, save_by_time,
                train_loader.is_uneven,
            )  # fmt: skip
        except NonFiniteError as error:
            with contextlib.suppress(SaveError):
                checkpointer.wait()
            file, good = dump_non_finite(accelerator, output_dir, step, batches, error, checkpointer.newest)
            raise NonFiniteError(
                f"step {step + 1}: {error}. The weights were not changed; the rows of the batch are in {file}. "
                f"Last good checkpoint: {good or 'none yet'}",
                error.micro_losses,
            ) from None
        train_loader.is_uneven = done.is_uneven
        lr = scheduler.get_last_lr()[0]
        scheduler.step()
        step += 1
        seconds = time.perf_counter() - start
        stop.step_took(seconds)
        window.add(done.loss, done.num_targets, args.total_batch_size, seconds, data_seconds)
        if step_timeout == args.ddp_timeout:
            step_timeout = max(args.step_timeout, 4 * seconds)
        log.progress.update()

        watch.expect(f"what follows step {step}", args.ddp_timeout)
        stopped = Stopped(stop.reason(accelerator)) if done.stop else None
        if stopped or log_is_due(step, total_steps, args):
            gib = max_over_ranks(peak_memory_gib(accelerator.device), accelerator.device)
            parts = on_all_ranks(train_loader.counts())
            counts = {name: sum(part[name] for part in parts) for name in parts[0]}
            log.log_step(step, window, done.grad_norm.item(), lr, gib, counts)
            window = Window()
        if evaluate_and_save(step, log, evaluate_fn, checkpointer, train_loader.state, save=done.save, stopped=stopped):
            last_save = time.perf_counter()
    watch.expect("what follows training", float("inf"))
    log.progress.close()
    return log.records


def begin(
    checkpointer: Checkpointer,
    total_steps: int,
    evaluate_fn: Callable[[int], dict[str, float]],
    flops_per_token: float | None,
) -> tuple[int, MetricsLog]:
    """Restore the checkpoint that is to be resumed, and measure the model before the first step.

    Returns:
        The step to go on from, and the log with the records of earlier parts of the run.

    Raises:
        ConfigError: for a checkpoint behind the last step, and if --metric_for_best_model is not among what the
            evaluation gives.
    """
    accelerator, args = checkpointer.accelerator, checkpointer.args
    output_dir = Path(args.output_dir)
    checkpoint = checkpointer.resumed_from
    if checkpoint and step_of(checkpoint) > total_steps:
        raise ConfigError(
            f"{checkpoint} is further on than the {total_steps} steps of this run; give as many steps or more, or begin "
            "anew in another --output_dir"
        )
    step = checkpointer.resume()
    log = MetricsLog(accelerator, output_dir, total_steps, flops_per_token)
    log.restore(checkpointer.resumed_from)
    if args.trackers:
        # TensorBoard takes plain values only.
        config = {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in args.values().items()
        }
        accelerator.init_trackers(output_dir.name, config=config)
    if accelerator.is_main_process:
        update_status(output_dir, state="running", step=step, checkpoint=str(checkpointer.newest or ""), reason="")
    # What is due at this step, unless a run that was stopped in it comes back: before the first step, for one.
    if evaluation_is_due(step, total_steps, args) and not log.has_evaluation(step):
        log.log_evaluation(step, evaluate_fn(step))
    best = args.metric_for_best_model
    measured = {name.removeprefix("eval_") for record in log.records for name in record if name.startswith("eval_")}
    if best and best not in measured:
        known = ", ".join(sorted(measured))
        raise ConfigError(f"--metric_for_best_model {best}: the evaluation gives {known}; choose one of them")
    return step, log


def evaluate_and_save(
    step: int,
    log: MetricsLog,
    evaluate_fn: Callable[[int], dict[str, float]],
    checkpointer: Checkpointer,
    data_state_fn: Callable[[], dict],
    *,
    save: bool,
    stopped: Stopped | None,
) -> bool:
    """Evaluate and save, as far as that is due after a step and its log line.

    `save`: a rank wants a checkpoint; `stopped`: a rank was asked to stop, so that a save is all that is still due.

    Returns:
        Whether a checkpoint was saved.

    Raises:
        Stopped: `stopped`, or one that was wished during the evaluation; what was done until then is saved.
    """
    args, total_steps = checkpointer.args, log.total_steps
    if not stopped and evaluation_is_due(step, total_steps, args):
        try:
            log.log_evaluation(step, evaluate_fn(step))
        except Stopped as error:
            stopped = error
    ends = stopped is not None or step == total_steps
    save = save or ends or (args.save_steps > 0 and step % args.save_steps == 0)
    if save:
        checkpointer.save(step, data_state_fn())
    if ends:
        checkpointer.wait()
    if stopped:
        checkpointer.accelerator.end_training()
        raise stopped
    return save


def dump_non_finite(
    accelerator: Accelerator,
    output_dir: Path,
    step: int,
    batches: Sequence[Batch],
    error: NonFiniteError,
    newest: Path | None,
) -> tuple[Path, Path | None]:
    """Write which rows the step after `step` had, and the loss of each micro-batch, to non_finite.json.

    Returns:
        The file, and the last good checkpoint: one whose weights give no micro-batch a finite loss is not good.
    """
    rows = [batch["row"].tolist() for batch in batches]
    ranks = on_all_ranks([{"rows": r, "loss_sum": loss} for r, loss in zip(rows, error.micro_losses, strict=True)])
    if newest and step_of(newest) == step and not any(math.isfinite(e["loss_sum"]) for rank in ranks for e in rank):
        newest = next((path for path in reversed(complete_checkpoints(output_dir)) if step_of(path) < step), None)
    file = output_dir / "non_finite.json"
    if accelerator.is_main_process:
        found = {"step": step + 1, "found": str(error), "last_good_step": step, "checkpoint": str(newest or "")}
        # JSON has no NaN; written as text, any reader takes it.
        micro_batches = [[entry | {"loss_sum": str(entry["loss_sum"])} for entry in rank] for rank in ranks]
        file.write_text(json.dumps(found | {"micro_batches_of_ranks": micro_batches}, indent=1) + "\n")
    return file, newest


def log_is_due(step: int, total_steps: int, args: TrainArgs) -> bool:
    return step == total_steps or step % args.logging_steps == 0


def evaluation_is_due(step: int, total_steps: int, args: TrainArgs) -> bool:
    return step in (0, total_steps) or (args.eval_steps > 0 and step % args.eval_steps == 0)


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[Batch], loss_fn: LossFn, count_fn: CountFn
) -> float:
    """Mean loss over all targets of all ranks, in nats per token.

    Every rank must hand in the same number of batches, since forward passes communicate; a batch without targets
    counts nothing.

    Raises:
        Stopped: between two batches.
    """
    model.eval()
    loss_sum = torch.zeros((), device=accelerator.device, dtype=torch.float64)
    num_targets = torch.zeros((), device=accelerator.device, dtype=torch.int64)
    for batch in batches:
        stop.raise_if_requested(accelerator)
        batch = to_device(batch, accelerator.device)
        loss_sum += loss_fn(model, batch)
        num_targets += count_fn(batch)
    model.train()
    return (sum_over_ranks(loss_sum) / sum_over_ranks(num_targets)).item()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, without waiting if its memory is pinned. A packed batch of trl's has numbers, too."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
