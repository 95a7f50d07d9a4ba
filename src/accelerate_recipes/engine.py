"""Training loop: `train()` goes from step to step, `train_step()` is the arithmetic of one step.

Model, data and loss are passed in. A recipe gives the sum of the losses of a batch and the number of its targets; only
this module divides one by the other, over all micro-batches and ranks, so that the result does not depend on how the
batch was divided. A loss of several parts, such as a mean over pairs and one over tokens, gives a sum and a number for
each part. `agenda.Agenda` does what else is due at a step.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from accelerate_recipes.agenda import Agenda, EvaluateFn
from accelerate_recipes.checkpoint.files import SaveError, complete_checkpoints, step_of
from accelerate_recipes.composites import check_tokens
from accelerate_recipes.distributed import accumulate, clip_gradients
from accelerate_recipes.errors import DataError, NonFiniteError
from accelerate_recipes.life import stop
from accelerate_recipes.metrics import Window
from accelerate_recipes.ranks import on_all_data_ranks, on_all_ranks, sum_over_ranks
from accelerate_recipes.run import Run
from accelerate_recipes.sequence import part_of_rows, row_group

Batch = dict[str, Any]  # tensors; and numbers, such as of documents
# A sum, or one for each part of the loss; and the numbers of targets that divide them. The last part is that of tokens (of
# images, in a recipe that has no tokens), whose number gives the speed.
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
CountFn = Callable[[Batch], torch.Tensor]
# Makes the micro-batches of the step after `step` from this rank's rows, such as answers that the model draws.
DrawFn = Callable[[int, list[Batch]], list[Batch]]


class TrainLoader(Protocol):
    """Source of this rank's micro-batches in the order of the steps, without end. Each batch names its rows in `row`."""

    # After the last micro-batch of a step, true if this rank cannot take its share of the next step without asking the
    # other ranks. The engine sets it on all ranks if it is true on one.
    is_uneven: bool

    def __iter__(self) -> Iterator[Batch]: ...

    def start_at(self, step: int, states: list[dict]) -> None:
        """Begin after `step` optimizer steps; called before iterating. `states` are the results of `state` on all ranks."""
        ...

    def state(self) -> dict:
        """Return what a checkpoint needs besides the step, in numbers and strings."""
        ...

    def counts(self) -> dict[str, int]:
        """Count what this rank has read so far; the log sums the counts over the ranks."""
        ...


class Step(NamedTuple):
    """Result of one optimizer step; equal on all ranks, tensors are scalars on the device."""

    loss_sums: torch.Tensor  # of each part, (K,), in nats
    num_targets: torch.Tensor  # (K,)
    grad_norm: torch.Tensor  # before clipping
    save: bool  # a rank wants a checkpoint
    stop: bool  # a rank was asked to stop
    is_uneven: bool  # the data of some rank are uneven, see TrainLoader

    @property
    def loss(self) -> torch.Tensor:
        """Mean over all targets, in nats per token; the sum of the means of all parts."""
        return (self.loss_sums / self.num_targets.clamp(min=1)).sum()


def train_step(
    run: Run,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    count_fn: CountFn,
    wants_save: bool = False,
    is_uneven: bool = False,
) -> Step:
    """Take one optimizer step on this rank's micro-batches, which lie on its device; without a target no weight changes.

    Raises:
        NonFiniteError: before the weights change.
    """
    accelerator, model, max_grad_norm = run.accelerator, run.model, run.args.max_grad_norm
    # Only the norm is checked before the weights change, not the clipped gradients, so the limit must be a number.
    assert 0 <= max_grad_norm < float("inf"), max_grad_norm
    # One collective sums everything that the ranks must agree on: the number of targets, wishes to save and to stop, and
    # whether to talk about the next step's data.
    num_targets = torch.stack([count_fn(batch) for batch in micro_batches]).sum(0).reshape(-1)
    wishes = torch.tensor([int(wants_save), int(stop.requested() is not None), int(is_uneven)])
    wishes = wishes.to(accelerator.device, non_blocking=True)  # torch.tensor(..., device=) would wait for the device
    num_targets, num_wishes = sum_over_ranks(torch.cat([num_targets, wishes])).split([len(num_targets), len(wishes)])
    # DDP and FSDP average gradients over the ranks; the sum over all targets is wanted.
    scale = accelerator.num_processes / num_targets.clamp(min=1)
    micro_losses = []
    for i, batch in enumerate(micro_batches):
        with accumulate(accelerator, model, run.first_units, is_last=i == len(micro_batches) - 1):
            loss = loss_fn(model, batch)
            accelerator.backward((loss * scale).sum())
        micro_losses.append(loss.detach().reshape(-1))
    loss_sums = sum_over_ranks(torch.stack(micro_losses).sum(0))
    grad_norm = clip_gradients(accelerator, model, max_grad_norm)
    # A step waits for the device only here. All values are sums over all ranks, so all ranks decide alike.
    are_finite = torch.isfinite(loss_sums).all(), torch.isfinite(grad_norm.to(loss_sums.device))
    flags = torch.stack([*are_finite, num_targets[-1] > 0, *(num_wishes > 0)])
    loss_is_finite, norm_is_finite, has_targets, *wanted = flags.tolist()
    step = Step(loss_sums, num_targets, grad_norm, *wanted)
    if not (loss_is_finite and norm_is_finite):
        message = f"loss {step.loss.item()}, gradient norm {grad_norm.item()}"
        raise NonFiniteError(message, torch.stack(micro_losses).sum(-1).tolist())
    if has_targets:  # else weight decay, and what the optimizer remembers of earlier steps, would change the weights
        run.optimizer.step()
    run.optimizer.zero_grad()
    return step


def train(
    run: Run,
    train_loader: TrainLoader,
    *,
    loss_fn: LossFn,
    count_fn: CountFn,
    evaluate_fn: EvaluateFn,
    draw_fn: DrawFn | None = None,
    values_fn: Callable[[int], dict[str, float]] | None = None,
) -> list[dict]:
    """Train to the run's last step, from the checkpoint that is to be resumed if there is one.

    `evaluate_fn(step)` runs on all ranks, before and after training and every `eval_steps`. `values_fn(step)` returns, on
    all ranks, what a log line after `step` says besides.

    Returns:
        The records of metrics.jsonl, of earlier parts of the run too.

    Raises:
        Stopped: when a rank was asked to stop; what was done until then is saved.
        NonFiniteError: naming the step and the last good checkpoint.
        DataError: for many steps without a target.
    """
    accelerator, args, checkpointer = run.accelerator, run.args, run.checkpointer
    agenda = Agenda(checkpointer, run.total_steps, run.flops, evaluate_fn, train_loader.state)
    step = agenda.begin()
    train_loader.start_at(step, checkpointer.data_states)
    micro_batches = iter(train_loader)
    accumulation_steps = args.accumulation_steps(run.data_world_size)
    window = Window()
    run.model.train()
    while step < run.total_steps:
        # Retries on a failing network may take longer than a step may: each retry restarts the clock.
        agenda.expect(f"the data of step {step + 1}", lambda: train_loader.counts().get("retries"))
        start = time.perf_counter()
        batches = []
        for _ in range(accumulation_steps):
            batch = next(micro_batches)
            check_tokens(batch, run.model)
            batches.append(on_this_rank(batch, accelerator))
        data_seconds = time.perf_counter() - start
        agenda.expect(f"step {step + 1}")
        try:
            if draw_fn is not None:
                batches = draw_fn(step, batches)
            done = train_step(run, batches, loss_fn, count_fn, agenda.save_is_overdue(), train_loader.is_uneven)
        except NonFiniteError as error:
            with contextlib.suppress(SaveError):
                checkpointer.wait()
            file, good = dump_non_finite(accelerator, run.output_dir, step, batches, error, checkpointer.newest)
            raise NonFiniteError(
                f"step {step + 1}: {error}. The weights were not changed; the rows of the batch are in {file}. "
                f"Last good checkpoint: {good or 'none yet'}",
                error.micro_losses,
            ) from None
        train_loader.is_uneven = done.is_uneven
        lr = run.scheduler.get_last_lr()[0]
        run.scheduler.step()
        step += 1
        agenda.completed(step, time.perf_counter() - start, wants_save=done.save, wants_stop=done.stop)
        # A GPU still updates the weights. The next step waits for that; before anything else the step waits itself, so
        # that the logged speed counts it.
        grad_norm = done.grad_norm.item() if agenda.something_is_due else float("nan")
        seconds = time.perf_counter() - start
        window.add(done.loss_sums, done.num_targets, args.total_batch_size, seconds, data_seconds)
        if agenda.log_is_due:
            parts = on_all_data_ranks(train_loader.counts())
            counts = {name: sum(part[name] for part in parts) for name in parts[0]}
            agenda.log_window(window, grad_norm, lr, counts | (values_fn(step) if values_fn else {}))
            window = Window()
        agenda.evaluate_and_save()
    return agenda.end()


def dump_non_finite(
    accelerator: Accelerator,
    output_dir: Path,
    step: int,
    batches: Sequence[Batch],
    error: NonFiniteError,
    newest: Path | None,
) -> tuple[Path, Path | None]:
    """Write the rows of the step after `step`, and the loss of each micro-batch, to non_finite.json.

    Returns:
        The file, and the last good checkpoint. A checkpoint whose weights give no micro-batch a finite loss is not good.
    """
    rows = [batch["row"].tolist() for batch in batches]
    ranks = on_all_ranks([{"rows": r, "loss_sum": loss} for r, loss in zip(rows, error.micro_losses, strict=True)])
    if newest and step_of(newest) == step and not any(math.isfinite(e["loss_sum"]) for rank in ranks for e in rank):
        newest = next((path for path in reversed(complete_checkpoints(output_dir)) if step_of(path) < step), None)
    file = output_dir / "non_finite.json"
    if accelerator.is_main_process:
        found = {"step": step + 1, "found": str(error), "last_good_step": step, "checkpoint": str(newest or "")}
        # JSON has no NaN; as text, every reader accepts it.
        micro_batches = [[entry | {"loss_sum": str(entry["loss_sum"])} for entry in rank] for rank in ranks]
        file.write_text(
            json.dumps(found | {"micro_batches_of_ranks": micro_batches}, indent=1) + "\n", encoding="utf-8"
        )
    return file, newest


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[Batch], loss_fn: LossFn, count_fn: CountFn
) -> float:
    """Compute the mean loss over all targets of all ranks, in nats per token, or the mean of another sum over targets.

    Every rank must pass the same number of batches, since forward passes communicate; a batch without targets
    counts nothing.

    Raises:
        Stopped: between two batches.
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
        check_tokens(batch, model)
        yield on_this_rank(batch, accelerator)
    model.train()


def on_this_rank(batch: Batch, accelerator: Accelerator) -> Batch:
    """Copy a batch to the device: of rows that ranks share, this rank's part."""
    return to_device(part_of_rows(batch, row_group(accelerator)), accelerator.device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, without waiting if its memory is pinned. A packed batch of trl also holds numbers."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
