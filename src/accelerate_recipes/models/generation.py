"""Text generation with a sharded model: each rank generates for its share of the prompts, and all ranks get all texts.

Whatever is drawn or measured comes from the model alone: the settings with which its base was published decide nothing, and
rows of the embedding that are no tokens are never drawn.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase

from accelerate_recipes.life import stop
from accelerate_recipes.models import attention, pretrained, probes, shared_rows, tokenizers, weights
from accelerate_recipes.ranks import is_compiled, on_all_ranks, rng_state, set_rng_state

KEPT = "the export keeps them"

# Settings that stay: tokens with which texts begin and end, such as that of a language, and how a pass computes.
OF_THE_MODEL = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "use_cache",
    "transformers_version", "_from_model_config",
}  # fmt: skip


class Sampling(NamedTuple):
    """Settings for drawing texts at random. A text follows from the seed and the place of its prompt among all."""

    temperature: float
    seed: int
    places: Sequence[int] | None = None  # of the prompts, if others are missing between them
    settings: Mapping[str, Any] = MappingProxyType({})  # others of `generate`


class Generated(NamedTuple):
    """Texts that a model has generated, and their token ids up to the end token."""

    texts: list[str]
    ids: list[list[int]]


@torch.no_grad()
def generate_texts(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling | None = None,
    may_stop: bool = True,
    **settings: float,
) -> Generated:
    """Generate a text for each prompt (token ids): by `sampling`, or the most likely one, with `settings` of `generate`.

    Every rank gets all texts.

    An encoder-decoder reads the prompt; a decoder continues it. If a prompt leaves a decoder no room for the new tokens
    among its positions, the decoder reads only the end of the prompt. No rank ever holds the whole model: the parts
    outside the wrapped layers (embedding, output layer, last norms) stay gathered during the whole generation, a layer
    only while it computes. So each token costs a gather of all layers, and all ranks run as many passes as the slowest
    rank.

    Raises:
        Stopped: between two batches, if a rank was asked to stop, unless `may_stop` is false: in the middle of a step.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    generator = accelerator.unwrap_model(model, keep_torch_compile=False)
    if not generator.config.is_encoder_decoder:
        room = pretrained.max_positions(generator.config)
        max_new_tokens = min(max_new_tokens, room - 1)
        prompts = [prompt[-(room - max_new_tokens) :] for prompt in prompts]
    # Deal the prompts to the ranks by length, so that batches need little padding. Repeat the last prompt until all ranks
    # have equally many full batches: their passes communicate.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    missing = -len(by_length) % (world_size * batch_size)
    mine = (by_length + by_length[-1:] * missing)[rank::world_size]
    answers: dict[int, tuple[str, list[int]]] = {}
    ends = sorted(tokenizers.stops_of(tokenizer) | tokenizers.stops_of(generator.generation_config))
    how: dict[str, Any] = {"do_sample": False, **settings}
    if sampling:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0, "top_k": 0, **sampling.settings}
    model.eval()
    # `generate` calls an encoder directly. Accelerate's autocast is in the forward of the whole model, so it is set here.
    # Even where a number decides, `generate` draws, which must not change what training draws. Compiled layers would be
    # compiled again for every length.
    with (
        shared_rows.whole_rows(),
        attention.with_padding(generator),
        torch.compiler.set_stance("force_eager") if is_compiled() else contextlib.nullcontext(),
        whole_root(model),
        by_model_alone(generator, tokenizer),
        accelerator.autocast(),
        own_draws(sampling and sampling.seed),
    ):
        for start in range(0, len(mine), batch_size):
            if may_stop:
                stop.raise_if_requested(accelerator)
            indices = mine[start : start + batch_size]
            batch = tokenizer.pad(
                {"input_ids": [prompts[i] for i in indices]},  # pyright: ignore[reportGeneralTypeIssues]
                padding_side="right" if generator.config.is_encoder_decoder else "left",  # BART counts positions
                return_tensors="pt",
            ).to(accelerator.device)
            drawing = contextlib.nullcontext()
            if sampling:  # by the place of a prompt, on any number of ranks
                positions = [*map(sampling.places.__getitem__, indices)] if sampling.places else indices
                numbers = numbers_of(weights.seed_of("texts", sampling.seed), 0, positions, max_new_tokens)
                drawing = drawn_by(generator, numbers.to(accelerator.device))
            with drawing:
                tokens = generator.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=max_new_tokens,
                    eos_token_id=ends,
                    pad_token_id=tokenizer.pad_token_id,
                    synced_gpus=world_size > 1,
                    **how,
                )
            new = tokens if generator.config.is_encoder_decoder else tokens[:, batch["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(new, skip_special_tokens=True)
            for i, text, ids in zip(indices, texts, new.tolist(), strict=True):
                end = next((index for index, token in enumerate(ids) if token in ends), len(ids))
                answers[i] = (text, ids[: end + 1])
    model.train()
    # Prompts that were repeated to fill batches have the same number, so their answers count once.
    by_prompt = {i: answer for part in on_all_ranks(answers) for i, answer in part.items()}
    in_order = [by_prompt[i] for i in range(len(prompts))]
    return Generated([text for text, _ in in_order], [ids for _, ids in in_order])


class ByOwnNumbers(LogitsProcessor):
    """Logits processor that draws a token for each row, with given random numbers. It leaves this token with probability 1.

    `numbers` (rows, tokens) lie in [0, 1). This is sampling by the inverse of the cumulative distribution: the drawn
    token is the first at which the sum of probabilities exceeds the row's number.
    """

    def __init__(self, numbers: torch.Tensor):
        self.numbers, self.place = numbers, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Sum in float64: in fp32, rounding over a large vocabulary would move the boundaries between tokens.
        sums = scores.float().softmax(-1).double().cumsum(-1)
        passed = self.numbers[:, self.place, None] * sums[:, -1:]  # rounding may leave a total that is not 1
        drawn = torch.searchsorted(sums, passed, right=True).clamp(max=scores.shape[-1] - 1)
        self.place += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def drawn_by(model: nn.Module, numbers: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Make `generate` draw with these numbers, after all that changes probabilities, such as temperature and top_p.

    A processor that is passed to `generate` of transformers 5.23 would be applied before these.
    """
    return with_processors(probes.unwrapped(model), lambda found: found.append(ByOwnNumbers(numbers)))


@contextlib.contextmanager
def with_processors(model: transformers.PreTrainedModel, change: Callable[[list], None]) -> Iterator[None]:
    """Let `generate` change its processors of logits by `change` in this context."""
    before = vars(model).get("_get_logits_processor")
    make: Any = model._get_logits_processor

    def processors(*args: Any, **settings: Any) -> list:
        processor_list = make(*args, **settings)
        change(processor_list)
        return processor_list

    model._get_logits_processor = processors
    try:
        yield
    finally:
        del model._get_logits_processor
        if before:
            model._get_logits_processor = before


class TokensAlone(LogitsProcessor):
    """Logits processor that leaves the rows of the output layer that are tokens, by their numbers."""

    supports_continuous_batching = True

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.is_none = torch.tensor(tokens), torch.zeros(0, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        number = scores.shape[-1]
        if len(self.is_none) != number:
            self.is_none = torch.ones(number, dtype=torch.bool)
            self.is_none[self.tokens[self.tokens < number]] = False
            self.is_none = self.is_none.to(scores.device)
        return scores.masked_fill(self.is_none, -torch.inf)


@contextlib.contextmanager
def by_model_alone(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Let `generate` choose among the tokens of the tokenizer, without the settings in `left_out` of the model's own.

    transformers fills what a call leaves open from the model's settings, so these are replaced.
    """
    inner, only = probes.unwrapped(model), TokensAlone(sorted(tokenizer.get_vocab().values()))
    before, inner.generation_config = inner.generation_config, settings_alone(inner.generation_config)
    try:
        # Before top_k and others that leave tokens out.
        with with_processors(inner, lambda found: found.insert(0, only)):
            yield
    finally:
        inner.generation_config = before


def left_out(settings: GenerationConfig) -> dict[str, Any]:
    """Return the settings of a model for generation that decide nothing where a run draws or measures texts."""
    usual = settings._get_default_generation_params() | {"output_attentions": False, "output_hidden_states": False}
    fields = {name: value for name, value in settings.to_dict().items() if name not in OF_THE_MODEL}
    return {name: value for name, value in fields.items() if value is not None and value != usual.get(name)}


def settings_alone(settings: GenerationConfig) -> GenerationConfig:
    """Return settings for generation without those in `left_out`."""
    alone = copy.deepcopy(settings)
    vars(alone).update(dict.fromkeys(left_out(settings)))
    return alone


def tell_left_out(tell: Callable[[str], None], model: transformers.PreTrainedModel, and_export: str) -> None:
    """Tell which settings of a base decide nothing in a run, if any, and what its export has in their place."""
    if settings := left_out(model.generation_config):
        named = ", ".join(f"{name} {value!r:.40}" for name, value in settings.items())
        tell(f"Texts are generated by the model alone, without these settings of its base: {named}; {and_export}")


def numbers_of(seed: int, step: int, places: Sequence[int], length: int) -> torch.Tensor:
    """Return a random number in [0, 1) for each token of the answers at these places of a step, (places, length)."""
    drawn = [np.random.default_rng([seed, step, position]).random(length) for position in places]
    return torch.from_numpy(np.stack(drawn))


@contextlib.contextmanager
def own_draws(seed: int | None) -> Iterator[None]:
    """Draw random numbers of torch, Python and numpy from this seed in this context, and restore the generators after it."""
    if seed is None:
        yield
        return
    before = rng_state()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        set_rng_state(before)


def whole_root(model: nn.Module) -> contextlib.AbstractContextManager:
    """Gather the parameters outside the wrapped layers.

    A call of the model does this, but `generate` calls parts of the model directly: FSDP1's inner module, or an encoder.
    Under FSDP2, `generate` counts as a call (see `distributed.prepare`).
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    if isinstance(model, FSDP1):
        return FSDP1.summon_full_params(model, recurse=False, writeback=False)
    return contextlib.nullcontext()
