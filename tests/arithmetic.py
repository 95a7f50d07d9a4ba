"""Arithmetic that is the same on CPUs and GPUs: models with packed documents, and sums in bf16."""

import copy
from collections.abc import Callable

import torch
from tiny import tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from accelerate_recipes.losses import linear_cross_entropy, next_token_loss, summed_cross_entropy
from accelerate_recipes.models.documents import boundaries


def rounding(addends: int) -> float:
    """Return how far two sums in fp32 of the same addends may be apart, in whatever order processors take them."""
    return addends * 2**-24  # each addition rounds by 2**-24


CONFIGS = {
    "heads in groups": tiny_config(),
    "window 1": tiny_config("mistral", sliding_window=1),
    "window 2": tiny_config("mistral", sliding_window=2),
    "window 5": tiny_config("mistral", sliding_window=5, num_key_value_heads=4),
    "biases": tiny_config("qwen2"),
    "experts": tiny_config("mixtral"),
    "both kinds of layer": tiny_config("gemma3_text", sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "learnt positions": tiny_config("gpt2", n_positions=300, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}  # fmt: skip


def positions(*rows: list[int]) -> torch.Tensor:
    """Return the positions of rows of documents with these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


# Documents of one token, of more than a block of the kernel, and one over a whole row.
POSITIONS = positions([5, 1, 1, 193], [200], [130, 70])


TOKENS = torch.randint(0, 100, POSITIONS.shape, generator=torch.Generator().manual_seed(0))


def make(config, attention: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def packed(position_ids: torch.Tensor = POSITIONS, tokens: torch.Tensor = TOKENS) -> dict:
    batch = {"input_ids": tokens, "position_ids": position_ids, "labels": tokens}
    return batch | boundaries(position_ids)


def loss_and_gradients(model, batch: dict) -> tuple[float, dict[str, torch.Tensor]]:
    loss = next_token_loss(model.train(), batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Watch(TorchDispatchMode):
    """Notes the names of operators, and the largest tensor that one of them makes, in whatever size `size_of` gives."""

    def __init__(self, size_of: Callable[[torch.Tensor], int] = torch.Tensor.numel):
        super().__init__()
        self.size_of, self.names, self.largest = size_of, set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.names.add(function._schema.name)
        sizes = [self.size_of(tensor) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def compare_in_bf16(device: torch.device) -> None:
    """Over 16 chunks gradients are as near to fp32 as those of whole logits."""
    torch.manual_seed(0)
    head = nn.Linear(16, 501, bias=False, device=device)
    hidden, targets = torch.randn(2, 6144, 16, device=device), torch.randint(501, (12288,), device=device)
    head.weight.data, hidden = head.weight.data.bfloat16().float(), hidden.bfloat16().float()

    def gradients(dtype: torch.dtype, whole: bool) -> list[torch.Tensor]:
        layer, inputs = copy.deepcopy(head).to(dtype), hidden.detach().to(dtype).requires_grad_()
        if whole:
            loss = summed_cross_entropy(layer(inputs).flatten(0, 1), targets)
        else:
            loss = linear_cross_entropy(layer, targets, inputs)
        (loss / 777).backward()
        return [loss.detach(), layer.weight.grad.float(), inputs.grad.float()]

    wanted, plain, found = (
        gradients(*way) for way in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False))
    )
    for right, other, ours in zip(wanted, plain, found, strict=True):
        assert (ours - right).norm() < 1.2 * (other - right).norm() + 1e-6 * right.norm()
