"""Trial of drawn answers: the passes of `generate` in a step, each once."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import Cache, GenerationConfig

from accelerate_recipes.upstream import CACHES


def draw_answers(
    sampling: dict[str, Any],
    ids: torch.Tensor,
    length: int,
    times: int,
    model: nn.Module,
    begin: Callable[[str, int], None],
) -> None:
    """Draw answers of `length` tokens: read the prompts, then draw a first token and a last one, which stand for all others.

    `generate` does the same for each token, with a longer cache each time. As in `generate`, the parameters outside the
    wrapped layers are gathered when drawing begins. `ids` (rows, tokens) have the sizes of prompts with their answers, of
    which a step has so many `times`.
    """
    prompt_length = ids.shape[1] - length
    settings = GenerationConfig(do_sample=True, **sampling)

    def draw(model: Any) -> None:
        process = model._get_logits_processor(settings, input_ids_seq_length=prompt_length, device=ids.device)
        token = partial(draw_token, model, process)
        begin("prompts", times)
        cache, held = token(ids[:, :prompt_length], None)
        if length > 1:
            begin("first tokens", times * (length // 2))
            cache, held = token(ids[:, : prompt_length + 1], cache)
        if length > 2:
            begin("tokens between", 0)
            lengthen(cache, length - 3)
            begin("last tokens", times * (length - 1 - length // 2))
            cache, held = token(ids[:, : prompt_length + length - 1], cache)
        del held

    model.draw = MethodType(draw, model)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    register_fsdp_forward_method(model, "draw")
    with torch.no_grad():
        model.draw()  # pyright: ignore[reportCallIssue]
    del model.draw


def draw_token(model: Any, process: Callable, ids: torch.Tensor, cache: Cache | None) -> tuple[Any, Any]:
    """Draw the token after `ids`. The cache holds all of `ids` but the last; without a cache, all of `ids` are read.

    Returns:
        The cache, and the tensors from which the token was drawn: `generate` holds these during its next pass.
    """
    mask = torch.ones_like(ids)
    mask[0, 0] = 0  # prompts have several lengths
    known = signature(model.forward).parameters
    (cached,) = CACHES & known.keys()
    inputs = {"attention_mask": mask, "use_cache": True, cached: cache, "logits_to_keep": 1}
    inputs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    inputs = {name: value for name, value in inputs.items() if name in known}
    new = None if cache is None else 1
    out = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=new, **inputs))
    logits = out.logits[:, -1].to(copy=True, dtype=torch.float32)
    scores = process(ids, logits)
    shares = nn.functional.softmax(scores, dim=-1)
    torch.multinomial(shares, num_samples=1)
    return out[cached], (logits, scores, shares)


def lengthen(cache: Cache, number: int) -> None:
    """Add `number` tokens to a cache."""
    for at, layer in enumerate(cache.layers):
        rows, heads, _, width = layer.keys.shape
        tokens = layer.keys.new_zeros(rows, heads, number, width)
        cache.update(tokens, tokens, at)
