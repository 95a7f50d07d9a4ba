"""Trial with a tiny model: is a loss without whole logits that of its class's logits, by value and by what it trains?"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.models.probes import UNTRIED, deciding_fields, on_cpu_in_fp32, router_of, tiny_model
from accelerate_recipes.models.shared_rows import whole_rows
from accelerate_recipes.ranks import print_first

# Makes a tiny model, or None, and tokens of a text for it.
Tiny = Callable[[PreTrainedConfig], tuple[Any, torch.Tensor]]
LossOfTokens = Callable[[Any, torch.Tensor], torch.Tensor]  # of a model and tokens, (1, T): the loss, and its balance
HIGH = 50.0  # to which the logits of a trial are scaled: caps show there
NEAR = 1e-4  # relative distance of two losses; rounding is below 1e-5
_differences: dict[tuple, str] = {}  # results of `difference_at_head`


def linear_of(model: Any) -> nn.Linear:
    """Return the output layer, which FSDP1 may have wrapped."""
    return next(module for module in model.get_output_embeddings().modules() if isinstance(module, nn.Linear))


@contextlib.contextmanager
def with_forward(head: nn.Linear, forward: Callable) -> Iterator[None]:
    """Let an output layer compute `forward` inside this context."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward  # restores the forward of the class


def loss_in_head(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy inside the output layer, whose weight and bias alone count, in the model's own forward pass."""
    head = linear_of(model)

    def summed(hidden: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, head.weight, head.bias)[0, :-1], tokens[0, 1:], reduction="sum")

    with with_forward(head, summed):
        return model(input_ids=tokens, use_cache=False).logits[None]


def loss_of_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy of the logits; the loss that balances experts is the second value, if the class has one."""
    router = router_of(model, tokens)
    output = model(input_ids=tokens, use_cache=False, **router)
    loss = F.cross_entropy(output.logits[0, :-1].float(), tokens[0, 1:], reduction="sum")
    return torch.stack([loss, *([output.aux_loss] if router else [])])


def tiny_and_tokens(config: PreTrainedConfig) -> tuple[Any, torch.Tensor]:
    """Make a tiny model that reads text, or None, and tokens for it."""
    return tiny_model(config, "eager"), torch.arange(12)[None]


def difference_at_head(config: PreTrainedConfig, loss_fn: LossOfTokens, tiny: Tiny = tiny_and_tokens) -> str:
    """Say how `loss_fn` of a `tiny` model differs from the cross-entropy of its logits, by value or by what it trains.

    Empty if it does not, and if no tiny model can be made, which a line says. It takes 0.2 seconds, once a configuration.
    """
    key = loss_fn, *deciding_fields(config)
    if key not in _differences:
        with whole_rows(), torch.inference_mode(False), torch.enable_grad(), on_cpu_in_fp32():
            _differences[key] = compared(*tiny(config), loss_fn, config.model_type)
    return _differences[key]


def compared(model: Any, tokens: torch.Tensor, loss_fn: LossOfTokens, name: str) -> str:
    """Compare losses, and which parameters have a gradient, with the logits as they are, and raised to HIGH.

    A cap shows where logits are high; there, a factor of logits is almost one of the loss.
    """
    for prepare in (lambda: None, lambda: raise_logits(model, tokens)):
        try:
            prepare()
            own, trained = loss_and_trained(model, tokens, loss_of_logits)
        except Exception:  # there is no model, or it cannot be tried
            print_first(f"{UNTRIED.format(name)} its loss without whole logits is that of its logits")
            return ""
        try:
            losses, trains = loss_and_trained(model, tokens, loss_fn)
        except Exception as error:
            return f"a tiny {name} cannot be computed: {one_line(error)}"
        if other := sorted(trained ^ trains):
            return f"a tiny {name} trains {len(trains)} of {len(trained)} parameters, without {other[0]}"
        own = own[: len(losses)]
        far = ((losses - own).abs() / own.abs()).max()
        if not far <= NEAR:
            return f"the loss of a tiny {name} is {100 * float(far):.2g} % off"
    return ""


@torch.no_grad()
def raise_logits(model: Any, tokens: torch.Tensor) -> None:
    """Double the weight of the output layer until its greatest result is beyond HIGH."""
    head, seen = linear_of(model), []
    with head.register_forward_hook(lambda *some: seen.append(some[-1])):
        for _ in range(20):
            model(input_ids=tokens, use_cache=False)
            if seen.pop().abs().max() > HIGH:
                break
            head.weight *= 2


def loss_and_trained(model: Any, tokens: torch.Tensor, loss_fn: LossOfTokens) -> tuple[torch.Tensor, set[str]]:
    model.zero_grad()
    loss = loss_fn(model, tokens)
    loss.sum().backward()
    return loss.detach(), {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_head(config: PreTrainedConfig) -> None:
    """Raise ConfigError for a model whose loss cannot be computed inside its output layer: it needs whole logits."""
    if difference := difference_at_head(config, loss_in_head):
        raise ConfigError(f"without whole logits, {difference}; give --whole_logits")
