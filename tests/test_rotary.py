"""Tests of rotary embeddings that depend on the length of a text: each document has the one that it has alone."""

import itertools
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from tiny import SIZES, tiny_config
from transformers import AutoModelForCausalLM, PhimoeConfig, PreTrainedConfig, PreTrainedModel

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.packing import collate, pack_row
from accelerate_recipes.distributed import prepare
from accelerate_recipes.losses import next_token_loss
from accelerate_recipes.models import rotary

LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 9.0],
    "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
OF_LAYERS = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC}
PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "longrope": tiny_config("phi3", max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONG),
    "dynamic": tiny_config(max_position_embeddings=16, rope_parameters=DYNAMIC),
    "by layer": tiny_config(
        "gemma3_text", max_position_embeddings=16, rope_parameters=OF_LAYERS, sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phimoe": PhimoeConfig(
        **SIZES, **PHI, max_position_embeddings=64, num_local_experts=2,
        rope_parameters=LONG | {"short_mscale": 1.1, "long_mscale": 1.3},
    ),
}  # fmt: skip
TOKENS = torch.arange(80) * 7 % 99 + 1
DOCUMENTS = [[5, 30, 5], [20, 16, 4]]  # two rows; the original length is 16


@pytest.fixture(params=CONFIGS)
def models(request) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Model as a run has it, and one that computes each text alone, before any longer one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    plain = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="sdpa").eval()
    plain.load_state_dict(model.state_dict())
    assert rotary.embed_by_length(model)
    return model, plain


@torch.no_grad()
def alone(plain: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    plain(input_ids=tokens[None, :1], use_cache=False)  # a short text resets what longer ones have left
    return plain(input_ids=tokens[None], use_cache=False).logits[0]


def test_texts_that_are_generated_are_left_to_transformers(models):
    """Padded prompts become the same texts, beyond the original length too."""
    ids, mask = TOKENS[:12].view(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(*(net.generate(ids, attention_mask=mask, **settings) for net in models))


def are_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() <= 1e-5 * wanted.norm())


@torch.no_grad()
def test_packed_documents(models):
    """In any order of batches, and after evaluation of longer texts; packed rows as transformers reads them are not right."""
    model, plain = models
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    ends = [0, *itertools.accumulate(n for row in DOCUMENTS for n in row)]
    wanted = [alone(plain, TOKENS[begin:end]) for begin, end in itertools.pairwise(ends)]
    for _ in range(2):
        found = model(input_ids=TOKENS.view(2, 40), position_ids=places, use_cache=False).logits.flatten(0, 1)
        assert all(are_near(found[b:e], w) for (b, e), w in zip(itertools.pairwise(ends), wanted, strict=True))
        assert are_near(model(input_ids=TOKENS[None, :40], use_cache=False).logits[0], alone(plain, TOKENS[:40]))
    found = plain(input_ids=TOKENS.view(2, 40), position_ids=places, use_cache=False).logits.flatten(0, 1)
    assert not are_near(found[:5], wanted[0])


def test_a_run_embeds_by_length():
    model = AutoModelForCausalLM.from_config(CONFIGS["longrope"])
    prepared, *_ = prepare(Accelerator(cpu=True), model, TrainArgs())
    places = torch.tensor([[*range(4), *range(20)]])
    with torch.no_grad():
        packed = prepared(input_ids=TOKENS[None, :24], position_ids=places, use_cache=False).logits[:, :4]
        assert are_near(packed, prepared(input_ids=TOKENS[None, :4], use_cache=False).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_texts(models, side):
    """With positions or without, a row is computed as without padding and without its neighbours."""
    model, plain = models
    lengths = [40, 10, 16]
    mask = torch.stack([torch.arange(40) < n for n in lengths]).long()
    mask = mask if side == "right" else mask.flip(1)
    ids = TOKENS[:40].expand(3, -1) * mask
    for positions in ({}, {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}):
        found = model(input_ids=ids, attention_mask=mask, **positions, use_cache=False).logits
        for row, own in zip(range(3), mask.bool(), strict=True):
            assert are_near(found[row, own], alone(plain, ids[row, own]))
    assert rotary._texts is None


@pytest.mark.parametrize(
    "models", [name for name in CONFIGS if name != "phimoe"], indirect=True
)  # it draws its experts
def test_gradients(models):
    """Activation checkpointing does not compute the embedding again; the loss of packed rows is that of each document."""
    model, plain = models
    rows = [pack_row(TOKENS[40 * i : 40 * (i + 1)].numpy(), DOCUMENTS[i], 40, 0, True) for i in range(2)]
    batch = collate([row | {"row": torch.tensor(i)} for i, row in enumerate(rows)])
    model.activation_checkpointing_enable({"use_reentrant": False})
    loss = next_token_loss(model.train(), batch)
    loss.backward()
    ends = [0, *itertools.accumulate(n for row in DOCUMENTS for n in row)]
    sums = partial(torch.nn.functional.cross_entropy, reduction="sum")
    wanted = sum(sums(alone(plain, TOKENS[b:e])[:-1], TOKENS[b + 1 : e]) for b, e in itertools.pairwise(ends))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
