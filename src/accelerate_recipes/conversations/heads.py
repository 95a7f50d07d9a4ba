"""Forward passes that compute what a loss reads: ours for a sum, or trl's; where both are wrong, the class's own logits."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import linear_cross_entropy, uncompiled
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.head_probe import (
    Tiny,
    difference_at_head,
    linear_of,
    loss_in_head,
    tiny_and_tokens,
    with_forward,
)
from accelerate_recipes.models.pretrained import load_text_config
from accelerate_recipes.models.probes import balance_weight, own_balance, router_of
from accelerate_recipes.ranks import is_first


def loss_by_trl(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Sum the negative log-likelihood of a tiny model by trl's forward pass; the loss that balances experts comes second."""
    router = router_of(model, tokens)
    add_fused_lm_head(model)
    output = model(input_ids=tokens, labels=tokens, fused_lm_head=True, **router)
    return torch.stack([-output.log_probs.sum(), *([output.aux_loss] if router else [])])


def difference_by_trl(config: PreTrainedConfig, tiny: Tiny = tiny_and_tokens) -> str:
    """Say how the loss by trl's forward pass differs from that of the class's logits; empty if it does not.

    trl multiplies the last hidden states by the output layer: it skips what a class computes between them, as Inkling and
    ModernBERT-decoder do, and knows some of the caps and factors behind them.
    """
    weight_of_balance(config, None)  # names the experts as trl reads them
    return difference_at_head(config, loss_by_trl, tiny)


def add_head(
    model: PreTrainedModel, outputs: Sequence[str], temperature: float = 1.0, tiny: Tiny = tiny_and_tokens
) -> None:
    """Give a model the forward pass that computes `outputs` for a loss, as trl's `add_fused_lm_head` does.

    For a loss that is a plain sum, `outputs` has `loss` too, the sum over the targets. If the output layer alone makes the
    logits of this model, the gradients are then computed in the forward pass, while the logits of a chunk exist, and
    `log_probs` has none: half of trl's time on a CPU, and less memory. For a model of which trl's pass has another loss,
    whole logits are computed; a line says so.
    """
    if "loss" in outputs and temperature == 1 and not difference_at_head(model.config, loss_in_head, tiny):
        add_own_head(model, sum_in_head)
    elif difference := difference_by_trl(model.config, tiny):
        say_once(f"The loss is computed from whole logits, which take more memory: without them, {difference}")
        add_own_head(model, partial(measure_logits, outputs=outputs, temperature=temperature))
    else:
        add_fused_lm_head(model, outputs=tuple(outputs), temperature=temperature)


@functools.cache
def say_once(line: str) -> None:
    if is_first():
        print(line, flush=True)


def add_own_head(model: PreTrainedModel, measure: Callable[..., tuple[ModelOutput, dict[str, torch.Tensor]]]) -> None:
    """Give a model a forward pass with the arguments and results of trl's, in which `measure` calls its class's own."""
    forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def read(self: Any, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **inputs)
        labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        targets = shifted if labels is None else labels[:, 1:]
        output, values = measure(self, partial(forward, *args, **inputs | {"use_cache": False}), targets)
        return FusedCausalLMOutput(**values, label_mask=targets != IGNORE_INDEX, aux_loss=output.get("aux_loss"))

    model.forward = MethodType(read, model)


def sum_in_head(
    model: Any, forward: Callable[[], ModelOutput], targets: torch.Tensor
) -> tuple[ModelOutput, dict[str, torch.Tensor]]:
    """Sum the loss of the targets, (B, T), inside the output layer, and measure each; 0 where there is none."""
    mask, head = targets != IGNORE_INDEX, linear_of(model)
    losses = torch.empty(targets[mask].shape, device=targets.device)
    entropy, is_top1 = torch.empty_like(losses), torch.empty_like(losses, dtype=torch.bool)
    with with_forward(head, partial(uncompiled(sum_targets), head, targets, mask, losses, (entropy, is_top1))):
        output = forward()
    measured = {"log_probs": -losses, "entropy": entropy, "is_top1": is_top1}
    values = {name: value.new_zeros(mask.shape).masked_scatter(mask, value) for name, value in measured.items()}
    return output, values | {"loss": output.logits}


def sum_targets(
    head: nn.Linear,
    targets: torch.Tensor,
    mask: torch.Tensor,
    losses: torch.Tensor,
    measured: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Sum the cross-entropy of the targets in `mask`, (B, T), by `hidden` at their places, (B, T or T + 1, H)."""
    return linear_cross_entropy(head, targets[mask], hidden[:, : mask.shape[1]][mask], losses, measured)


def measure_logits(
    model: Any, forward: Callable[[], ModelOutput], targets: torch.Tensor, outputs: Sequence[str], temperature: float
) -> tuple[ModelOutput, dict[str, torch.Tensor]]:
    """Compute `outputs` of each target, (B, T), from whole logits; 0 where there is none."""
    mask, output = targets != IGNORE_INDEX, forward()
    logits = output.logits[:, : mask.shape[1]].float() / temperature
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    values = {
        "log_probs": lambda: chosen,
        "entropy": lambda: -(log_probs.exp() * log_probs).sum(-1),
        "log_sum_sq_probs": lambda: (2 * log_probs.detach()).logsumexp(-1),
        "mean_logits": lambda: logits.detach().mean(-1),
        "is_top1": lambda: logits.argmax(-1) == targets,
    }
    names = {"log_probs", *outputs} & {*values}  # a loss is their sum
    return output, {name: values[name]().masked_fill(~mask, 0) for name in names}


def check_hidden_suffices(names: Sequence[str]) -> None:
    """Raise ConfigError for a model of which a divergence needs more than its output layer and its last hidden states."""
    for name in names:
        if difference := difference_by_trl(load_text_config(name)):
            raise ConfigError(
                f"{name}: the divergence is computed from hidden states and output layer, and without whole logits, "
                f"{difference}; give another model"
            )


def weight_of_balance(config: PreTrainedConfig, given: float | None) -> float:
    """Return the weight of the loss that balances experts: the `given` one, or the model's; 0 without such a loss.

    trl 1.16 reads the number of experts as `num_experts`. Others call it `num_local_experts`, or as this is mapped to; this
    gives their class the other name too, as classes of transformers do.

    Raises:
        ConfigError: if a weight is given for a model that computes no such loss.
    """
    text, weight = config.get_text_config(), balance_weight(config, given)
    if given and not weight:
        raise ConfigError(
            f"--router_aux_loss_coef {given}: a trial of {text.model_type} found no loss that balances experts; remove it"
        )
    if own_balance(config) is not None and not hasattr(text, "num_experts") and hasattr(text, "num_local_experts"):
        name = text.attribute_map.get("num_local_experts", "num_local_experts")
        type(text).attribute_map = type(text).attribute_map | {"num_experts": name}
    return weight
