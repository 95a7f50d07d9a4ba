"""Sums of token losses, and the number of target tokens in each sum. The engine divides the sum by the number."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.utils import ModelOutput

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.documents import READ_BOUNDARIES, boundaries, boundary_arguments, document_masks
from accelerate_recipes.models.head_probe import check_head, linear_of, with_forward
from accelerate_recipes.models.probes import Packing, balance_weight, check_packing, crosses, packing_of, unwrapped
from accelerate_recipes.models.shared_rows import balance_of_rows, whole_rows
from accelerate_recipes.ranks import computes_in_bf16, sum_over_ranks

# Size of a chunk of logits: BYTES_OF_A_WORD for each word of the vocabulary or, if more, the size of the hidden states in
# fp32, but at most BYTES_OF_A_CHUNK. In bf16, with 131,072 words, a chunk has 768 to 2,048 rows.
BYTES_OF_A_WORD, BYTES_OF_A_CHUNK = 1536, 2**29
LOGITS_IN_FP32 = 3 * 2**21  # few enough for the cache of a GPU, with enough work for it
uncompiled = cache(torch.compiler.disable)  # the same function each time, for which nothing is compiled again
SPREAD = 2**8  # factor with which fp16 can hold gradients of logits down to 2**-32
# Tokens of which trl's losses compute logits at once. trl 1.16 takes 4,096. On a GPU, these make two tiles of 512 MiB for a
# divergence. On a CPU, they leave the cache, and the memory of each tile is taken anew: a first step took twice as long.
TILES = {"trl.kernels.chunked_logprob": 4096, "trl.kernels.chunked_divergence": 512}  # on a GPU
TILE_ON_CPU = 128


def next_token_loss(
    model: nn.Module, batch: dict[str, torch.Tensor], losses: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the summed cross-entropy of a causal language model, in nats, as an fp32 scalar.

    `batch` holds `input_ids`, `position_ids` and `labels`, each (B, T). A label stands at its own token's position, as
    in transformers: the logits at t predict the label at t + 1. IGNORE_INDEX marks a position that is no target.

    No attention mask is passed. Attention stays inside each document, because the batch says where documents begin
    (`packing.collate`), or because transformers sees position ids that restart.

    For a mixture of experts in training, the loss that balances the experts is added, weighted by `router_aux_loss_coef`
    of the model's configuration and by the number of targets. It measures the balance within this batch; where ranks
    share rows, over the whole rows. So it is the only value that depends a little on how a global batch is divided.

    `losses`, (B x T,) in fp32, gets the loss of each position, 0 where there is no target.
    """
    output, balance = predict(model, batch)
    logits, targets = output.logits.flatten(0, 1), next_tokens(batch)
    if losses is None:
        return summed_cross_entropy(logits, targets) + balance
    token_losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    losses.copy_(token_losses.detach())
    return token_losses.sum() + balance


def next_token_loss_without_logits(
    model: nn.Module, batch: dict[str, torch.Tensor], losses: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the loss and the gradients of `next_token_loss`, with logits of only some of the tokens at a time.

    This is for a large vocabulary: whole logits are (B, T, V), and with their gradient take some 10 bytes an element.

    During this one call, the output layer returns the loss instead of logits. The model calls the layer as usual, so
    FSDP has gathered its weight, autocast is on, and the backward pass reduces its gradient.

    Raises:
        ConfigError: for a model whose logits are not those of the output layer's weight alone; see `check_head`.
    """
    causal_lm = unwrapped(model)
    check_head(causal_lm.config)
    head = linear_of(causal_lm)
    with with_forward(head, partial(uncompiled(linear_cross_entropy), head, next_tokens(batch), losses=losses)):
        output, balance = predict(model, batch)
    return output.logits + balance


def next_token_loss_fn(whole_logits: bool) -> Callable[..., torch.Tensor]:
    """Choose between `next_token_loss` and `next_token_loss_without_logits`."""
    return next_token_loss if whole_logits else next_token_loss_without_logits


def predict(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[ModelOutput, torch.Tensor | float]:
    """Call a causal model on a packed batch; see `next_token_loss`.

    Returns:
        Its output, with `logits` (B, T, V), and the loss that balances experts, a scalar; 0.0 without experts.
    """
    causal_lm = unwrapped(model)
    config, masked = causal_lm.config, contextlib.nullcontext()
    coefficient = balance_weight(config) if model.training else 0.0
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    inputs |= {"output_router_logits": True} if coefficient else {}
    inputs |= boundary_arguments(config, batch)
    group = batch.get("sequence_group")
    is_shared = group is not None
    # Some kernels read boundaries. Others need a mask if the model does not find the documents by position ids, and if ranks
    # share rows, since a rank has only a part of these.
    is_told = config._attn_implementation in READ_BOUNDARIES
    if not is_told and (is_shared or packing_of(config) is Packing.MASK):
        dtype = torch.bfloat16 if computes_in_bf16() else next(model.parameters()).dtype
        masks = document_masks(config, batch["row_position_ids" if is_shared else "position_ids"], dtype)
        if coefficient:
            masked = handing_on(causal_lm, masks)
        else:
            inputs |= masks
    inputs |= {"sequence_group": group} if is_shared else {}
    with masked:
        output = model(**inputs, use_cache=False)
    if not coefficient:
        return output, 0.0
    if not is_shared:
        return output, coefficient * output.aux_loss * count_next_tokens(batch)
    # Ranks that share rows have different numbers of targets. Each weighs its balance by the mean number, so that the sum
    # over the ranks is that of whole rows.
    counts = count_next_tokens(batch).to(output.router_logits[0].device, torch.float32)
    balance, mean_count = balance_of_rows(output.router_logits, config.num_experts_per_tok, counts, group)
    return output, coefficient * balance * mean_count


@contextlib.contextmanager
def handing_on(causal_lm: nn.Module, masks: dict[str, Any]) -> Iterator[None]:
    """Give masks to a model's layers, but not to its loss that balances experts, which takes only one of padding."""
    base: Any = causal_lm.base_model
    hook = base.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | masks), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
@whole_rows()
def check_document_mask(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError for a model that lets attention cross the documents of a packed row.

    The test runs two rows that differ only in their first document: the predictions in the second document must not
    differ. Call it on all ranks. It tests the model as it is trained, with its kernel. A test of a tiny model
    (`check_packing`) finds smaller leaks.
    """
    check_packing(unwrapped(model).config)
    tokens = torch.arange(12, device=device) % unwrapped(model).config.get_text_config().vocab_size
    positions = torch.arange(4, device=device).repeat(2, 2)
    # Two rows of two documents, of four tokens each. The first documents differ, the second ones are equal.
    input_ids = torch.stack([tokens[:8], torch.cat([tokens[8:], tokens[4:8]])])
    rows = {"input_ids": input_ids, "position_ids": positions} | boundaries(positions)
    model.eval()
    one, other = predict(model, rows)[0].logits[:, 4:].float()
    model.train()
    is_exact = next(model.parameters()).dtype == torch.float32 and not computes_in_bf16()
    if (one - other).norm() > (1e-5 if is_exact else 0.01) * one.norm():
        raise ConfigError(crosses(unwrapped(model).config))


def sequence_to_sequence_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the summed cross-entropy of an encoder-decoder, in nats, as an fp32 scalar.

    `batch` holds `input_ids` and `attention_mask`, (B, S), and `labels`, (B, T), padded on the right with IGNORE_INDEX.
    Padding is no target. The decoder needs no mask: it only looks back.
    """
    # Do not pass `labels`: transformers would return a mean, computed in the precision of the logits.
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["decoder_input_ids"] = unwrapped(model).prepare_decoder_input_ids_from_labels(batch["labels"])
    output = model(**inputs, use_cache=False)
    return summed_cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())


def linear_cross_entropy(
    head: nn.Linear,
    targets: torch.Tensor,
    hidden: torch.Tensor,
    losses: torch.Tensor | None = None,
    measured: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Sum the cross-entropy of `head(hidden)`, in nats, as an fp32 scalar. `hidden` is (B, T, H), `targets` (B x T,).

    Tensors of the size of `targets` are filled, if given: `losses`, in fp32, with the loss of each position, and the two of
    `measured` with the entropy of the prediction, in fp32, and whether the target is the most probable token.
    """
    device = hidden.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
    # Without autocast: it would compute products of `add_product` in bf16 that must be in fp32. The meta device has none.
    with torch.autocast(device, enabled=False) if is_cast else contextlib.nullcontext():
        return LinearCrossEntropy.apply(
            head.weight, hidden.flatten(0, -2), head.bias, targets, dtype, torch.is_grad_enabled(), losses, measured
        )


class LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear layer, without the logits of all rows at once.

    The loss is a sum, so the backward pass only multiplies the gradients by a factor. They are computed in the forward
    pass, while the logits of a chunk exist: no logits are computed twice.

    The gradient of the weight is summed over chunks: in fp32 for factors in fp32, and on a GPU in fp16 for factors in
    bf16. The rounding of fp16 is an eighth of that of bf16, so a sum over many chunks is as exact as one product. The
    backward pass then turns the fp16 sum into the gradient, in the same memory. `scales_of` keeps the sum in the range
    of fp16.
    """

    @staticmethod
    def forward(ctx, weight, hidden, bias, targets, dtype, with_gradients, losses=None, measured=()):
        inputs, size = (weight, hidden, bias), weight.shape[0]
        # Each chunk reads and writes the whole gradient of the weight, so chunks should be large. But they should be small
        # beside the model's activations.
        room = min(max(BYTES_OF_A_WORD * size, 4 * hidden.numel()), BYTES_OF_A_CHUNK)
        sum_dtype = dtype_of_sum(dtype, hidden.device)
        rows = max(1, room // (size * sum_dtype.itemsize))
        rows_in_fp32 = max(1, LOGITS_IN_FP32 // size)
        needed = [with_gradients and is_needed for is_needed in ctx.needs_input_grad[:3]]
        scales = scales_of(hidden, targets) if needed[0] and sum_dtype == torch.float16 else None
        of_weight = torch.zeros_like(weight, dtype=sum_dtype) if needed[0] else None
        of_hidden = torch.empty_like(hidden, dtype=dtype) if needed[1] else None
        of_bias = weight.new_zeros(size, dtype=torch.float32) if needed[2] else None
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        losses = torch.empty_like(targets, dtype=torch.float32) if losses is None else losses
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            ignored = targets[chunk, None] == IGNORE_INDEX
            words = targets[chunk, None].masked_fill(ignored, 0)
            # Zeros in ignored rows add nothing to the weight's gradient, even if such a row holds NaN.
            some = hidden[chunk].to(dtype).masked_fill(ignored, 0)
            logits = F.linear(some, weight, bias)
            parts = (rows.split(rows_in_fp32) for rows in (logits, words, *(values[chunk] for values in measured)))
            chosen = torch.cat([replace_by_probabilities(any(needed), *part) for part in zip(*parts, strict=True)])
            losses[chunk] = -chosen.masked_fill(ignored, 0).squeeze(1)
            # `logits` holds probabilities p now. Their gradient is p, but p - 1 at the target: as expm1(log p) it is exact
            # also where p is near 1.
            if any(needed):
                logits.scatter_(1, words, chosen.expm1().to(dtype))
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[chunk]).masked_fill_(ignored, 0)
            if of_bias is not None:
                of_bias += logits.masked_fill_(ignored, 0).sum(0, dtype=torch.float32)
            if of_weight is not None:
                add_product(of_weight, logits, some, scales)
            del logits  # free it before the next chunk is made
        # Kept on `ctx` itself, not by save_for_backward, so that the backward pass can free and overwrite them.
        ctx.kept = [of_weight, of_hidden, of_bias, scales]
        ctx.dtypes = [None if t is None else t.dtype for t in inputs]
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, factor):
        if not ctx.kept:
            raise RuntimeError("the gradients of this loss are kept for one backward pass, and this is the second")
        scales = ctx.kept.pop()
        # The scales of `scales_of` are powers of two: dividing by them is exact.
        factors = factor if scales is None else factor / scales, factor, factor
        # Each sum is freed before the next is multiplied.
        gradients = [times(ctx.kept.pop(0), *how) for how in zip(factors, ctx.dtypes, strict=True)]
        return *gradients, None, None, None, None, None


def times(sums: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Multiply a gradient by a factor, in place if the result has elements of the same size."""
    if sums is None:
        return None
    is_as_large = sums.itemsize == dtype.itemsize
    return torch.mul(sums, factor, out=sums.view(dtype) if is_as_large else torch.empty_like(sums, dtype=dtype))


def replace_by_probabilities(
    is_needed: bool, logits: torch.Tensor, words: torch.Tensor, *measured: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of each row's target, (N, 1), in fp32. If `is_needed`, `logits` become probabilities.

    For `measured` see `linear_cross_entropy`.
    """
    log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
    if measured:
        entropy, is_most_probable = measured
        torch.sum(torch.special.entr(log_probs.exp()), -1, out=entropy)
        torch.eq(log_probs.argmax(-1), words[:, 0], out=is_most_probable)
    if is_needed:
        torch.exp(log_probs, out=logits)
    return log_probs.gather(1, words)


def dtype_of_sum(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Choose fp16 if the factors have 16 bits, except on a CPU, where fp16 is slow."""
    return torch.float32 if dtype == torch.float32 or device.type == "cpu" else torch.float16


def scales_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Choose a power of two for each column of `hidden`, (H,), that keeps the weight's gradient in the range of fp16.

    The gradient of a logit is at most 1. So the sum for a column is at most the sum of the column's absolute values,
    which the scale brings to 2**15 or less.
    """
    sums = hidden.masked_fill(targets[:, None] == IGNORE_INDEX, 0).abs_().sum(0, dtype=torch.float32)
    return torch.exp2((2**15 / sums.clamp(min=2**-100)).log2().floor())


def add_product(total: torch.Tensor, logits: torch.Tensor, hidden: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Add a chunk's part to the weight's gradient; `logits` holds the gradient of the logits.

    With `scales`, the products are in fp16, and so is `logits` afterwards, in the same memory.
    """
    # SPREAD lifts small gradients of logits into the range of fp16. The hidden states are divided by it, so that the product
    # has only the factor `scales`.
    if scales is not None:
        logits = torch.mul(logits, SPREAD, out=logits.view(torch.float16))
        hidden = hidden * (scales / SPREAD)
    total.addmm_(logits.T.to(total.dtype), hidden.to(total.dtype))


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def next_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the target of each position, (B x T,). The labels are shifted, because shifting the logits would copy them.

    Where ranks share rows, labels have one more column: the target of the last position.
    """
    missing = 1 + batch["input_ids"].shape[1] - batch["labels"].shape[1]
    return F.pad(batch["labels"][:, 1:], (0, missing), value=IGNORE_INDEX).flatten()


def count_next_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the targets in the batch, as a scalar on its device. The label at position 0 is never a target."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum()


def count_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the targets of `sequence_to_sequence_loss`, as a scalar on the batch's device: all labels but padding."""
    return (batch["labels"] != IGNORE_INDEX).sum()


class Gathered:
    """Sums of the micro-batches since the last log line, for the values in it."""

    def __init__(self):
        self.sums: list[torch.Tensor] = []

    def add(self, sums: torch.Tensor) -> None:
        self.sums.append(sums.detach())

    def mark(self) -> Callable[[], None]:
        """Return a function that forgets the micro-batches from here on; see `mark_fn` of `engine.train`."""
        number = len(self.sums)

        def forget() -> None:
            del self.sums[number:]

        return forget

    def take(self) -> list[float]:
        """Return the sums over all ranks, and begin anew; an empty list if all steps were left out. Call it on all ranks."""
        sums, self.sums = self.sums, []
        return sum_over_ranks(torch.stack(sums).sum(0)).tolist() if sums else []


class LossOfSources:
    """Loss of next tokens that trains; of a mixture, it also keeps the sums of the sources with these names, for the log.

    `whole_logits` chooses as in `next_token_loss_fn`.
    """

    def __init__(self, whole_logits: bool, names: Sequence[str]):
        self.loss_fn, self.names, self.gathered = next_token_loss_fn(whole_logits), names, Gathered()

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.names:
            return self.loss_fn(model, batch)
        losses = torch.empty(batch["input_ids"].numel(), device=batch["input_ids"].device)
        loss = self.loss_fn(model, batch, losses)
        # Where ranks share rows, the last position has a target too.
        losses = losses.view(batch["input_ids"].shape)[:, : batch["labels"].shape[1] - 1]
        self.gathered.add(sums_by_source(batch, losses, len(self.names)))
        return loss

    def values(self, step: int) -> dict[str, float]:
        """Return the mean loss and the number of targets of each source since the last log line. Call it on all ranks."""
        sums = self.gathered.take()
        return means_of_sources(self.names, sums) if sums else {}


def sums_by_source(batch: dict[str, torch.Tensor], losses: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Sum losses of next tokens, (B, T - 1), by the source of each token, which `source` of the batch numbers, (B, T).

    Returns:
        (2 K,) of float64: the sums of K sources, then their numbers of targets.
    """
    sources = torch.arange(num_sources, device=losses.device)[:, None, None]
    is_of = (batch["source"][:, 1:] == sources) & (batch["labels"][:, 1:] != IGNORE_INDEX)
    return torch.cat([torch.where(is_of, losses.double(), 0).sum((1, 2)), is_of.sum((1, 2)).double()])


def means_of_sources(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the loss and the number of targets of each source, from summed `sums_by_source`; no loss without a target."""
    metrics = {}
    for name, loss, targets in zip(names, sums[: len(names)], sums[len(names) :], strict=True):
        metrics |= ({f"{name}_loss": loss / targets} if targets else {}) | {f"{name}_targets": int(targets)}
    return metrics
