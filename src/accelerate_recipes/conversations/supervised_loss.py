"""Loss of supervised fine-tuning, by the forward pass of `heads`, its FLOPs, and a step for `plan`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from accelerate_recipes.conversations.heads import weight_of_balance
from accelerate_recipes.conversations.packed import Packed
from accelerate_recipes.conversations.settings import pad_multiple, trial_of
from accelerate_recipes.data.rows import RowLoader
from accelerate_recipes.engine import evaluate_loss
from accelerate_recipes.losses import Gathered, count_next_tokens, means_of_sources, sums_by_source
from accelerate_recipes.metrics import Flops, flops_per_token
from accelerate_recipes.models.configurations import new_config
from accelerate_recipes.ranks import sum_over_ranks
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial, config_of, refuse


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the model in a batch. If ranks share rows, labels are shifted to where they are predicted."""
    inputs = {
        name: value for name, value in batch.items() if name not in ("row", "row_position_ids", "source", "places")
    }
    if "sequence_group" in batch:
        inputs["shift_labels"] = inputs.pop("labels")[:, 1:]
    return inputs | {"use_cache": False, "fused_lm_head": True}


def nll_sum(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Sum the negative log-likelihood of the targets, in nats."""
    return -model(**inputs_of(batch)).log_probs.sum()


class SupervisedLoss:
    """Loss that trains: of the targets, by --loss_type, and of the balance of experts, if the model has any.

    It keeps the sums of what is logged: entropy, share of the targets that the model finds most probable, and balance; of a
    mixture, loss and targets of the sources with these names.
    """

    def __init__(self, args: Any, config: PreTrainedConfig, sources: Sequence[str] = ()):
        self.is_dft = args.loss_type == "dft"
        # What the loss reads of the forward pass, see `add_head`: a plain sum, or the log-probabilities with gradients.
        self.outputs = (*(() if self.is_dft else ("loss",)), "log_probs", "entropy", "is_top1")
        self.balance = weight_of_balance(config, args.router_aux_loss_coef)
        self.router = {"output_router_logits": True} if self.balance else {}
        self.sources = sources
        self.gathered = Gathered()

    def sum_parts(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of the loss over a micro-batch, each for one of `count_parts`, in nats."""
        output: Any = model(**inputs_of(batch), **self.router)
        losses = -output.log_probs  # 0 where there is no target
        if self.is_dft:
            losses = losses * output.log_probs.exp().detach()
        loss = losses.sum() if losses.requires_grad else output.loss  # see `add_head`
        one = torch.ones((), device=losses.device)
        balance = [output.aux_loss] if self.balance else []
        measured = [output.label_mask.sum(), output.entropy.sum(), output.is_top1.sum(), one, *balance]
        sums = [torch.stack([value.detach().double() for value in measured])]
        if self.sources:
            sums.append(sums_by_source(batch, losses.detach(), len(self.sources)))
        self.gathered.add(torch.cat(sums))
        return torch.stack([*(self.balance * value for value in balance), loss])

    def count_parts(self, batch: dict[str, Any]) -> torch.Tensor:
        """Count the micro-batch itself if there are experts, and the targets."""
        num_targets = count_next_tokens(batch)
        return torch.stack([*[torch.ones_like(num_targets)] * bool(self.balance), num_targets])

    @torch.no_grad()
    def evaluate(self, run: Run[Any], batches: RowLoader) -> dict[str, float]:
        """Compute the mean negative log-likelihood of all targets, in nats, and of a mixture that of each source.

        Raises:
            Stopped: between two batches.
            DataError: if there is no target at all.
        """
        sums = torch.zeros(2 * len(self.sources), device=run.accelerator.device, dtype=torch.float64)

        def sum_all(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            losses = -model(**inputs_of(batch)).log_probs
            if self.sources:
                sums.add_(sums_by_source(batch, losses, len(self.sources)))
            return losses.sum()

        loss = evaluate_loss(run.accelerator, run.model, batches, sum_all, count_next_tokens)
        means = means_of_sources(self.sources, sum_over_ranks(sums).tolist()) if self.sources else {}
        return {"loss": loss} | {name: mean for name, mean in means.items() if name.endswith("_loss")}

    def values(self, step: int) -> dict[str, float]:
        """Return the means over the targets since the last log line, and the mean balance of the micro-batches."""
        if not (sums := self.gathered.take()):
            return {}
        targets, entropy, most_probable, number, *others = sums
        balance, of_sources = others[: bool(self.balance)], others[bool(self.balance) :]
        means = {"entropy": entropy / max(targets, 1), "mean_token_accuracy": most_probable / max(targets, 1)}
        means |= {"aux_loss": balance[0] / number} if balance else {}
        return means | (means_of_sources(self.sources, of_sources) if self.sources else {})


def make_collator(args: Any, pad_token_id: int) -> DataCollatorForLanguageModeling:
    """Make trl's collator."""
    return DataCollatorForLanguageModeling(
        pad_token_id=pad_token_id, padding_free=args.has_boundaries, pad_to_multiple_of=pad_multiple(args)
    )


def flops_of_rows(args: Any, tables: list[Packed], num_targets: float, visits: Any = 1) -> Callable[..., Flops]:
    """Return a function that counts the training FLOPs of a model per target of the prepared rows, for MFU.

    `visits` says how often a row is trained, each or all, and `num_targets` counts its targets as often.
    """
    chunks = (chunk for rows in tables for chunk in rows.chunks("seq_lengths"))
    numbers, documents = map(np.concatenate, zip(*chunks, strict=True))
    visits = visits if np.isscalar(visits) else np.repeat(visits, numbers)
    tokens, squares = (documents * visits).sum(), (np.square(documents, dtype=float) * visits).sum()
    row_length = args.max_length if args.packing else 0

    def flops_fn(model: PreTrainedModel) -> Flops:
        a_token = flops_per_token(model, squares / tokens, row_length)
        a_target, full_rows = tokens / max(1, num_targets), a_token.full_rows if row_length else None
        return Flops(a_token.attended * a_target, full_rows and full_rows * a_target)

    return flops_fn


def supervised_trial(args: Any) -> Trial:
    """Make the trial of an SFT run: the run's own loss, on rows of --max_length tokens by trl's own collator.

    Raises:
        NotSimulatedError: for settings that change the step.
    """
    others = {
        "--max_length none": not args.max_length,
        "--packing_strategy wrapped": args.packing and args.packing_strategy == "wrapped",
        "--new_tokens": args.new_tokens,
        "--loss_type dft": args.loss_type == "dft",
    }
    refuse("SFT", others)
    config = new_config(args, max_length=args.max_length) if args.from_scratch else config_of(args)
    loss = SupervisedLoss(args, config)
    length, rows = args.max_length, args.per_device_train_batch_size
    row, shorter = {"input_ids": [0] * length}, {"input_ids": [0] * (length - 1)}
    if args.has_boundaries:
        row["seq_lengths"] = [length - 1, 1]
    collate = make_collator(args, 0)
    batch = collate([row] * rows if args.has_boundaries or rows == 1 else [*[row] * (rows - 1), shorter])
    if rows == 1 and batch.pop("attention_mask", None) is not None:  # one row has no padding, and attention no mask
        batch["position_ids"] = torch.arange(length)[None]
    return trial_of(args, config, loss, batch, int(count_next_tokens(batch)))
