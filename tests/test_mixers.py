"""Tests of packed rows in models with layers that carry a state: each document is computed as if it were alone."""

import copy
import itertools

import pytest
import torch
import toy
from arithmetic import positions
from helpers import by_time, refuses
from models_table import ARCHITECTURES, compare_gradients, documents_alone, gradients
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AutoModelForCausalLM,
    InklingTextConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RwkvConfig,
    ZayaConfig,
    xLSTMConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import accelerate_recipes.models.document_attention  # noqa: F401  # registers it
from accelerate_recipes import upstream
from accelerate_recipes.data.packing import PackedRows, collate
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import check_document_mask, next_token_loss
from accelerate_recipes.models import mixers, probes
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.documents import boundaries, boundary_arguments
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.mixers import Unpacking, documents_of, recompute_documents, unpack_documents
from accelerate_recipes.models.probes import mixers_in, model_sharing_problems
from accelerate_recipes.models.shared_rows import balance_of_rows

HYBRIDS = list(ARCHITECTURES)[list(ARCHITECTURES).index("Qwen3-Next") : list(ARCHITECTURES).index("T5")]


def all_but(*some: str) -> list:
    """List all hybrids, of which only these are tried by the fast tests, and a third by the slow ones."""
    return by_time(HYBRIDS, some, HYBRIDS[::3])


def make(name: str, **changes: object) -> PreTrainedModel:
    config: PreTrainedConfig = copy.deepcopy(ARCHITECTURES[name])
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=choose("auto", config, torch.float32, True)[0])
    unpack_documents(model, mixers_in(model))
    return model


def batch_of(*rows: int) -> dict:
    packed = PackedRows(toy.make_rows(20), toy.LENGTH, 0, document_mask=True)
    return collate([packed[row] for row in rows])


def test_documents_are_found_and_put_back():
    """A group holds documents of similar length, each token has one place, and a row that begins in a document is one."""
    found = documents_of(positions([7, 1, 40, 12], [30, 29, 1], [60]))
    tokens = torch.arange(180)
    assert torch.equal(torch.cat([tokens[group].flatten() for group in found.groups])[found.places], tokens)
    assert [list(group.shape) for group in found.groups] == [[1, 60], [2, 40], [1, 29], [1, 12], [1, 7], [2, 1]]
    assert found.groups[1][1].tolist() == [*range(60, 90), *[89] * 10]  # the last token is repeated
    continued = positions([5, 5], [10])
    continued[1] += 3
    assert sorted(len(row) for group in documents_of(continued).groups for row in group) == [5, 5, 10]
    assert documents_of(positions([10], [10])) is None
    assert documents_of(torch.zeros(2, 3, dtype=torch.int64)).groups[0].shape == (6, 1)


# Convolutions inside an attention with a window, so that the attention is what computes each document by itself.
ZAYA = ZayaConfig(layer_types=["hybrid", "hybrid_sliding"], num_hidden_layers=2, sliding_window=9)
WINDOWED = {"zaya": ZAYA, "inkling": InklingTextConfig()}


@pytest.mark.parametrize(
    "name, attention",
    [("zaya", "sdpa"), ("zaya", "eager"), ("zaya", "documents"), ("inkling", "sdpa"), ("inkling", "eager")],
)
def test_documents_longer_than_the_window(name, attention):
    """They are computed as if each were alone, with the window that each layer has."""
    config = copy.deepcopy(WINDOWED[name])
    config._attn_implementation = attention
    model = probes.tiny_model(config, "sdpa")
    assert model is not None
    plain, ids, places = copy.deepcopy(model), torch.arange(60).view(2, 30) % 32, positions([17, 13], [5, 24, 1])
    model.set_attn_implementation(attention)
    classes = mixers_in(model)
    assert any("Attention" in name for name in classes) and unpack_documents(model, classes)
    told = boundaries(places) if attention == "documents" else {}
    with torch.no_grad():
        more = boundary_arguments(config, told) if told else {}
        found = model(input_ids=ids, position_ids=places, use_cache=False, **more)
        begins = [0, 17, 30, 35, 59, 60]
        for begin, end in itertools.pairwise(begins):
            alone = plain(input_ids=ids.flatten()[None, begin:end], use_cache=False).logits[0]
            packed = found.logits.flatten(0, 1)[begin:end]
            assert (packed - alone).norm() <= 1e-4 * alone.norm(), (begin, end)


def test_a_mask_that_cannot_be_cut():
    with pytest.raises(ConfigError, match=r"flex_attention.*cannot be cut; give sdpa, or auto"):
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, "cpu")
        mixers.mask_taken(torch.Size([1, 4]), torch.arange(4)[None], mask)


@pytest.mark.parametrize("name", all_but("Qwen3.5", "Falcon-H1"))
def test_a_leak_is_found_at_the_start(name, monkeypatch):
    """The check before training asks the layers that will run: rows as they are, and documents with a wrong beginning."""
    model = make(name)
    check_document_mask(model, torch.device("cpu"))

    def with_a_token_of_the_one_before(position_ids: torch.Tensor) -> Unpacking | None:
        begins_late = torch.where(position_ids == 0, 1, position_ids).roll(-1, 1)
        begins_late[position_ids.roll(-1, 1) == 0] = 0
        return documents_of(begins_late)

    for wrong in (lambda _: None, with_a_token_of_the_one_before):
        monkeypatch.setattr(mixers, "documents_of", wrong)
        refuses("models do not keep attention inside a document", check_document_mask, model, torch.device("cpu"))


@pytest.mark.parametrize("name", all_but("Granite 4", "LFM2"))
def test_recomputed_layers_compute_their_own_documents(name):
    """Two batches are computed before the first backward pass, and a text without documents after them."""
    batches = [batch_of(0, 1), batch_of(2, 3)]
    model = make(name)
    wanted = gradients(model, [next_token_loss(model, batch) for batch in batches])
    for parent in list(model.modules()):
        for child, module in parent.named_children():
            if isinstance(module, GradientCheckpointingLayer) and not isinstance(parent, GradientCheckpointingLayer):
                setattr(parent, child, checkpoint_wrapper(module))
    recompute_documents(model)
    losses = [next_token_loss(model, batch) for batch in batches]
    with torch.no_grad():
        model(input_ids=batches[0]["input_ids"], use_cache=False)
    loss, found = gradients(model, losses)
    assert loss == wanted[0]
    prefix = "_checkpoint_wrapped_module."
    compare_gradients((loss, {key.replace(prefix, ""): value for key, value in found.items()}), wanted, 1e-6)


@pytest.mark.parametrize("name", ["GPT-OSS", "Qwen3-Next", "Granite 4", "Jamba", "MiniMax"])
def test_experts_are_balanced_as_in_documents_alone(name):
    """Routing, and the loss that balances it, are those of the documents alone, also where the model gets a mask."""
    model, batch = make(name, router_aux_loss_coef=0.5), batch_of(4, 5)
    model.train()
    with_balance = next_token_loss(model, batch).item()
    model.config.router_aux_loss_coef = 0.0
    balance = with_balance - next_token_loss(model, batch).item()
    routed = []
    for document in documents_alone(batch):
        del document["labels"]
        routed.append(model(**document, output_router_logits=True, use_cache=False).router_logits)
    logits = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
    targets = (batch["labels"][:, 1:] != -100).sum()
    wanted, _ = balance_of_rows(logits, model.config.num_experts_per_tok, targets, None)
    assert balance == pytest.approx(0.5 * wanted.item() * targets.item(), rel=1e-3)


@pytest.mark.parametrize("name", all_but("Qwen3.5", "Mamba"))
def test_padding_is_not_taken_for_documents(name):
    """Left of a prompt positions are 0 or 1 more than once; whoever generates gives a mask of it, or a cache."""
    ids, mask = torch.arange(5, 13)[None].repeat(2, 1), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model = make(name).eval()
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation=model.config._attn_implementation).eval()
    plain.load_state_dict(model.state_dict())
    settings = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(*(net(**settings, position_ids=places, use_cache=False).logits for net in (model, plain)))
    texts = [net.generate(**settings, max_new_tokens=4, do_sample=False, pad_token_id=0) for net in (model, plain)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", all_but("Qwen3.5", "Mamba", "Granite 4"))
def test_packed_rows_leave_no_cache(name):
    """A model that is asked for one computes each document alone: neither a state nor attention goes on to the next."""
    model = make(name).eval()
    inputs = {name: batch_of(0, 1)[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        assert torch.equal(*(model(**inputs, use_cache=use_cache).logits for use_cache in (True, False)))


def test_a_batch_that_is_not_computed_leaves_no_documents():
    model = make("LFM2")
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 8), 100), position_ids=positions([4, 4]), use_cache=False)
    assert mixers._documents is None


def test_minimax_generates_from_padded_prompts():
    """`upstream.count_cached_tokens` may go once its cache counts the tokens of a model whose first layer is linear."""
    model, ids = make("MiniMax").eval(), torch.tensor([[0, 0, 5, 6, 7], [9, 10, 11, 12, 13]])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def padded_as_alone() -> bool:
        mask = (ids > 0).long()
        padded = model.generate(ids, attention_mask=mask, **settings)
        texts = (padded[:1, 5:], model.generate(ids[:1, 2:], **settings)[:, 3:])
        return torch.equal(*texts)

    assert not padded_as_alone()
    upstream.count_cached_tokens(model)
    assert padded_as_alone()
    for name in ("get_seq_length", "get_mask_sizes"):
        delattr(MiniMaxCache, name)


def test_boundaries_for_kernels_do_not_reach_a_mixer():
    """Qwen's raises for them without its fast package; of a row of one document too."""
    model, ids = make("Qwen3.5"), torch.arange(8)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        for lengths in ([8], [3, 5]):
            ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
            found = model(input_ids=ids, position_ids=positions(lengths), **told, use_cache=False).logits
            assert torch.allclose(found[:, : lengths[0]], wanted[:, : lengths[0]], atol=1e-5)


@pytest.mark.parametrize("name", all_but("LFM2", "Mamba"))
def test_ranks_cannot_share_their_rows(name):
    problems = model_sharing_problems(ARCHITECTURES[name], 2)
    assert problems and all(ARCHITECTURES[name].model_type in problem for problem in problems)


@pytest.mark.parametrize("config", [RecurrentGemmaConfig(), RwkvConfig(), xLSTMConfig()], ids=lambda it: it.model_type)
def test_models_that_are_refused(tmp_path, config):
    """Their padded prompts would be read as texts."""
    config.save_pretrained(tmp_path)
    refuses(rf"is a {config.model_type}, which does not see the padding of prompts", load_model, str(tmp_path), "auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Bamba"])
def test_compiled(name):
    """Mixers stay uncompiled between compiled parts of a layer, with the same loss and gradients."""
    model, batch = make(name), batch_of(0, 1)
    wanted = gradients(model, [next_token_loss(model, batch)])
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(backend="aot_eager")
    found = gradients(model, [next_token_loss(model, batch)])
    torch._dynamo.reset()
    compare_gradients(found, wanted)
