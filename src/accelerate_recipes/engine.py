"""Training loop: `train()` runs the optimizer steps, `train_step()` computes one of them.

The recipe passes in model, data and loss: the sum of the losses of a batch, and the number of its targets. Only this
module divides the sum by the number, over all micro-batches and ranks, so the result does not depend on how the batch
was divided. A loss of several parts, such as a mean over pairs plus a mean over tokens, has a sum and a number for each
part. `agenda.Agenda` does the other work that is due at a step.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from accelerate_recipes.agenda import Agenda, EvaluateFn
from accelerate_recipes.bad_steps import MarkFn, Spikes, Traces, stop_run
from accelerate_recipes.distributed import accumulate, clip_gradients
from accelerate_recipes.errors import DataError, NonFiniteError
from accelerate_recipes.life import stop
from accelerate_recipes.metrics import Window
from accelerate_recipes.models.composites import check_tokens
from accelerate_recipes.models.shared_rows import part_of_rows, row_group
from accelerate_recipes.ranks import on_all_data_ranks, sum_over_ranks
from accelerate_recipes.run import Run

Batch = dict[str, Any]  # tensors, and plain numbers such as the longest document
# A LossFn returns one sum, or a sum for each part of the loss. A CountFn returns the number of targets that divides each
# sum. The last part counts tokens (in a recipe without tokens, images); the logged speed comes from it.
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
CountFn = Callable[[Batch], torch.Tensor]
# Makes the micro-batches of the step after `step` from this rank's rows. GRPO draws answers to prompts here.
DrawFn = Callable[[int, list[Batch]], list[Batch]]


class TrainLoader(Protocol):
    """Source of this rank's micro-batches, in the order of the steps and without end. `row` of a batch numbers its rows."""

    # True, after the last micro-batch of a step, if this rank must ask the other ranks before it can read its share of the
    # next step. If it is true on one rank, the engine sets it on all ranks.
    is_uneven: bool

    def __iter__(self) -> Iterator[Batch]: ...

    def start_at(self, step: int, states: list[dict]) -> None:
        """Begin after `step` optimizer steps; call it before iterating. `states` are the results of `state` of all ranks."""
        ...

    def state(self) -> dict:
        """Return what a checkpoint needs besides the step, as numbers and strings."""
        ...

    def counts(self) -> dict[str, int]:
        """Count what this rank has read so far; the log sums the counts over the ranks."""
        ...


class Step(NamedTuple):
    """Result of one optimizer step, equal on all ranks but for `micro_losses`. Tensors lie on the device."""

    loss_sums: torch.Tensor  # (K,), one for each part of the loss, in nats
    num_targets: torch.Tensor  # (K,), one for each part
    grad_norm: torch.Tensor  # scalar, before clipping
    micro_losses: torch.Tensor  # (M,), sums of this rank's micro-batches
    loss: float  # mean over all targets, in nats per token; the means of several parts are added
    norm: float  # `grad_norm`, as a mean over the ranks
    has_targets: bool
    save: bool  # a rank wants a checkpoint
    stop: bool  # a rank was asked to stop
    is_uneven: bool  # `TrainLoader.is_uneven` is true on a rank
    skipped: str = ""  # why the step was left out


def train_step(
    run: Run,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    count_fn: CountFn,
    wants_save: bool = False,
    is_uneven: bool = False,
    spikes: Spikes | None = None,
    mark_fn: MarkFn | None = None,
) -> Step:
    """Take one optimizer step on this rank's micro-batches, which lie on its device; without a target no weight changes.

    `spikes` judges the step; by default, loss and gradient norm must be finite. A step that it leaves out is one without
    targets, and says why. For `mark_fn` see `train`.

    Raises:
        NonFiniteError: for a step that must end the run. The weights are still unchanged then.
    """
    traces = Traces(run.model, mark_fn)
    compute = partial(compute_step, run, micro_batches, loss_fn, count_fn, wants_save, is_uneven)

    def again() -> Step:
        traces.restore()
        run.optimizer.zero_grad()
        return compute()

    step, reason = (spikes or Spikes(is_exact=adds_in_order(run))).settle(compute(), again)
    if reason:
        traces.remove()
        sums, targets, norm = (torch.zeros_like(value) for value in step[:3])
        step = step._replace(loss_sums=sums, num_targets=targets, grad_norm=norm, has_targets=False, skipped=reason)
    if step.has_targets:  # else weight decay and the moments of earlier steps would change the weights
        run.optimizer.step()
    run.optimizer.zero_grad()
    return step


def compute_step(
    run: Run, micro_batches: Sequence[Batch], loss_fn: LossFn, count_fn: CountFn, wants_save: bool, is_uneven: bool
) -> Step:
    """Compute loss and clipped gradients of one optimizer step."""
    accelerator, model, max_grad_norm = run.accelerator, run.model, run.args.max_grad_norm
    # A step is judged by the norm, not by the clipped gradients, so the limit must be a finite number.
    assert 0 <= max_grad_norm < float("inf"), max_grad_norm
    # Count before computing: each micro-batch's loss is divided by the number of targets of the whole step, on all ranks.
    # The same collective carries all that the ranks must agree on: wishes to save and to stop, and uneven data.
    num_targets = torch.stack([count_fn(batch) for batch in micro_batches]).sum(0).reshape(-1)
    wishes = torch.tensor([int(wants_save), int(stop.requested() is not None), int(is_uneven)])
    wishes = wishes.to(accelerator.device, non_blocking=True)  # torch.tensor(..., device=) would wait for the device
    num_targets, num_wishes = sum_over_ranks(torch.cat([num_targets, wishes])).split([len(num_targets), len(wishes)])
    # DDP and FSDP average gradients over the ranks. The factor turns this average into a sum, then divides by the targets.
    scale = accelerator.num_processes / num_targets.clamp(min=1)
    micro_losses = []
    for i, batch in enumerate(micro_batches):
        with accumulate(accelerator, model, run.first_units, is_last=i == len(micro_batches) - 1):
            loss = loss_fn(model, batch)
            accelerator.backward((loss * scale).sum())
        micro_losses.append(loss.detach().reshape(-1))
    losses = torch.stack(micro_losses)
    grad_norm = clip_gradients(accelerator, model, max_grad_norm)
    # Replicas compute norms of their own, which a fault may make different; with their mean all ranks decide alike.
    norm = grad_norm.to(losses, non_blocking=True).reshape(1)
    loss_sums, norm = sum_over_ranks(torch.cat([losses.sum(0), norm])).split([losses.shape[1], 1])
    loss = (loss_sums / num_targets.clamp(min=1)).sum(0, keepdim=True)
    # A step waits for the device only here. All values are reduced over all ranks, so all ranks decide the same.
    values = [loss, norm / accelerator.num_processes, num_targets[-1:], num_wishes]
    loss, norm, *numbers = torch.cat([value.double() for value in values]).tolist()
    flags = dict(zip(("has_targets", "save", "stop", "is_uneven"), map(bool, numbers), strict=True))
    return Step(loss_sums, num_targets, grad_norm, micro_losses=losses.sum(-1), loss=loss, norm=norm, **flags)


def adds_in_order(run: Run) -> bool:
    """Tell whether the same computation gives the same bits."""
    return run.accelerator.device.type == "cpu" or run.args.full_determinism


def train(
    run: Run,
    train_loader: TrainLoader,
    *,
    loss_fn: LossFn,
    count_fn: CountFn,
    evaluate_fn: EvaluateFn,
    draw_fn: DrawFn | None = None,
    values_fn: Callable[[int], dict[str, float]] | None = None,
    mark_fn: MarkFn | None = None,
    by_norm_alone: bool = False,
) -> list[dict]:
    """Train to the run's last step, beginning at the checkpoint to resume if there is one.

    `evaluate_fn(step)` runs on all ranks: before training, after training, and every `eval_steps`. `values_fn(step)`
    also runs on all ranks; it returns additional values for the log line after `step`. If `loss_fn` gathers these values,
    `mark_fn()` returns a function that forgets what it gathers from then on: a step may be computed again, or left out.
    Where the loss is a sum around zero, a step is judged `by_norm_alone`.

    Returns:
        The records of metrics.jsonl, including those of earlier parts of the run.

    Raises:
        Stopped: when a rank was asked to stop; a checkpoint is saved before.
        NonFiniteError: for a step that went wrong, naming it and the last good checkpoint.
        DataError: for many steps without a target.
    """
    accelerator, args, checkpointer = run.accelerator, run.args, run.checkpointer
    # A run of which each step is left out ends in an error too.
    fatal = min(args.max_skips, run.total_steps) if args.on_spike == "skip" else 1
    spikes = Spikes(args.spike_factor, fatal, by_norm_alone=by_norm_alone, is_exact=adds_in_order(run))
    agenda = Agenda(
        checkpointer, run.total_steps, run.flops, evaluate_fn, lambda: train_loader.state() | spikes.state()
    )
    step = agenda.begin()
    train_loader.start_at(step, checkpointer.data_states)
    spikes.restore(checkpointer.data_states)
    spikes.write(run.output_dir)
    micro_batches = iter(train_loader)
    accumulation_steps = args.accumulation_steps(run.data_world_size)
    window = Window()
    run.model.train()
    while step < run.total_steps:
        # Retries on a failing network may take longer than the time limit of a step, so each retry restarts the clock.
        agenda.expect(f"the data of step {step + 1}", lambda: train_loader.counts().get("retries"))
        start = time.perf_counter()
        batches = [on_this_rank(next(micro_batches), accelerator, run.model) for _ in range(accumulation_steps)]
        data_seconds = time.perf_counter() - start
        agenda.expect(f"step {step + 1}")
        try:
            if draw_fn is not None:
                batches = draw_fn(step, batches)
            wishes = agenda.save_is_overdue(), train_loader.is_uneven
            done = train_step(run, batches, loss_fn, count_fn, *wishes, spikes, mark_fn)
        except NonFiniteError as error:
            raise stop_run(error, checkpointer, step, batches) from None
        if done.skipped:
            spikes.skip(step + 1, done, batches, run.output_dir)
            agenda.trained_at = step + 1  # its rows have targets
        train_loader.is_uneven = done.is_uneven
        lr = run.scheduler.get_last_lr()[0]
        run.scheduler.step()
        step += 1
        agenda.completed(step, time.perf_counter() - start, wants_save=done.save, wants_stop=done.stop)
        # The GPU may still be updating the weights. If another step follows at once, that step waits for it. If something
        # else is due, `item` waits here, so that the logged speed includes the update.
        grad_norm = done.grad_norm.item() if agenda.something_is_due else float("nan")
        seconds = time.perf_counter() - start
        window.add(done.loss_sums, done.num_targets, args.total_batch_size, seconds, data_seconds)
        if agenda.log_is_due:
            parts = on_all_data_ranks(train_loader.counts())
            counts = {name: sum(part[name] for part in parts) for name in parts[0]}
            agenda.log_window(window, grad_norm, lr, counts | spikes.counts() | (values_fn(step) if values_fn else {}))
            window = Window()
        agenda.evaluate_and_save()
    return agenda.end()


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[Batch], loss_fn: LossFn, count_fn: CountFn
) -> float:
    """Compute the mean loss over all targets of all ranks, in nats per token, or the mean of another sum over targets.

    Every rank must pass the same number of batches, since forward passes communicate. A batch without targets adds
    nothing to the mean.

    Raises:
        Stopped: between two batches, if a rank was asked to stop.
        DataError: if there is no target at all.
    """
    loss_sum = torch.zeros((), device=accelerator.device, dtype=torch.float64)
    num_targets = torch.zeros((), device=accelerator.device, dtype=torch.int64)
    for batch in batches_to_evaluate(accelerator, model, batches):
        loss_sum += loss_fn(model, batch)
        num_targets += count_fn(batch)
    if not sum_over_ranks(num_targets).item():
        raise DataError("no row to evaluate on has a target of the loss; give others, or hold out a larger share")
    return (sum_over_ranks(loss_sum) / num_targets).item()


def batches_to_evaluate(accelerator: Accelerator, model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches on the device, while the model is in the mode of evaluation.

    Raises:
        Stopped: between two batches.
    """
    model.eval()
    for batch in batches:
        stop.raise_if_requested(accelerator)
        yield on_this_rank(batch, accelerator, model)
    model.train()


def on_this_rank(batch: Batch, accelerator: Accelerator, model: nn.Module) -> Batch:
    """Copy a batch to the device. Where ranks share rows, copy only this rank's part of the rows.

    Raises:
        DataError: for a token that stands for an image, if the model cannot read one.
    """
    check_tokens(batch, model)
    return to_device(part_of_rows(batch, row_group(accelerator)), accelerator.device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors of a batch to the device, without waiting if they are pinned; numbers in the batch stay."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
