"""Tests of attention inside documents, which equals attention with a mask, to rounding, without a mask in memory.

Also, cuDNN's attention is switched on only where it is correct and fast: in training, without a mask.
"""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from arithmetic import CONFIGS, POSITIONS, Watch, loss_and_gradients, make, packed, positions, rounding
from helpers import CHILDREN, ROOT, refuses
from tiny import tiny_config, tiny_model
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import activate_flash_attention_impl

from accelerate_recipes.args import resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import next_token_loss
from accelerate_recipes.models import attention, document_attention
from accelerate_recipes.models.attention import beyond_documents, choose, keep_cudnn_from_masks, with_padding
from accelerate_recipes.models.documents import boundaries

IDS = torch.arange(8)[None] + 4
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])


@pytest.fixture
def calls(monkeypatch) -> list[tuple[bool, bool]]:
    """Record of each call of torch's attention: whether it has a mask, and whether cuDNN may compute it."""
    found = []
    compute = F.scaled_dot_product_attention

    def record(*args, attn_mask=None, **settings):
        found.append((attn_mask is not None, torch.backends.cuda.cudnn_sdp_enabled()))
        return compute(*args, attn_mask=attn_mask, **settings)

    before = transformers.AttentionInterface()["sdpa"]
    keep_cudnn_from_masks()
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    yield found
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    transformers.AttentionInterface.register("sdpa", before)


@pytest.mark.parametrize("model, inputs, masked", [
    ("llama", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}, True),  # packed: documents
    ("llama", {"position_ids": torch.arange(8)[None]}, False),
    ("llama", {"attention_mask": PADDED}, True),  # conversations, preferences, rewards
    ("llama", {"attention_mask": torch.ones_like(IDS)}, False),
    ("mixtral", {"attention_mask": PADDED}, True),
    ("t5", {"decoder_input_ids": IDS}, True),
    ("falcon", {"attention_mask": PADDED}, True),
])  # fmt: skip
@pytest.mark.parametrize("recomputed", [False, True])
def test_with_a_mask_cudnn_is_off(calls, model, inputs, masked, recomputed):
    """cuDNN is off with a mask in the forward pass, and where the backward pass computes attention again."""
    model = tiny_model(model).train()
    if recomputed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=IDS, use_cache=False, **inputs).logits.sum()
    forward = len(calls)
    loss.backward()
    assert len(calls) == forward * (1 + recomputed) > 0
    assert set(calls) == {(masked, not masked)}


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_while_generating_cudnn_is_off(calls, model):
    """cuDNN is off during generation, even for prompts of one length, which need no mask."""
    mask = torch.ones_like(IDS)
    tiny_model(model).generate(IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert len(calls) >= 3 and not any(may_be_cudnn for _, may_be_cudnn in calls)
    assert model == "t5" or not any(masked for masked, _ in calls)


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_are_attended_to_as_with_a_mask(name):
    """Loss and gradients are those with a mask, to the rounding of sums over the 200 tokens of a row."""
    (masked, wanted), (loss, found) = (
        loss_and_gradients(make(CONFIGS[name], attention), packed()) for attention in ("sdpa", "documents")
    )
    assert loss == pytest.approx(masked, rel=rounding(200))
    largest = max(gradient.norm() for gradient in wanted.values())
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= rounding(200) * max(gradient.norm(), 0.1 * largest), key


def test_boundaries():
    found = boundaries(POSITIONS)
    assert found["cu_seqlens"].dtype == torch.int32
    assert found["cu_seqlens"].tolist() == [0, 5, 6, 7, 200, 400, 530, 600] and found["max_seqlen"] == 200
    one = boundaries(torch.arange(100)[None])  # with --no_document_mask
    assert one["cu_seqlens"].tolist() == [0, 100] and one["max_seqlen"] == 100
    assert boundaries(torch.zeros(2, 50, dtype=torch.int64))["cu_seqlens"].tolist() == [*range(101)]


def test_precision_of_autocast(monkeypatch):
    """RoPE leaves queries and keys in fp32; the kernel for GPUs takes one dtype."""
    dtypes = []
    compute = document_attention.varlen_attn

    def record(query, key, value, *args, **settings):
        dtypes.append({query.dtype, key.dtype, value.dtype})
        return compute(query, key, value, *args, **settings)

    monkeypatch.setattr(document_attention, "varlen_attn", record)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = loss_and_gradients(make(CONFIGS["heads in groups"], "documents"), packed())
        masked, _ = loss_and_gradients(make(CONFIGS["heads in groups"], "sdpa"), packed())
    assert dtypes == [{torch.bfloat16}] * 2
    assert loss == pytest.approx(masked, rel=1e-3)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("name, has_mask", [("sdpa", True), ("documents", False)])
def test_memory_of_the_mask(name, has_mask):
    """Outside of the kernel no tensor has T x T elements, forward or backward, for any documents."""
    length = 2048
    tokens = torch.zeros(1, length, dtype=torch.int64)
    model = make(CONFIGS["heads in groups"], name)
    given = [[1024] * 2] if has_mask else [[500] * 4 + [48], [length]]
    for position_ids in map(positions, given):
        with Watch() as found:
            loss_and_gradients(model, packed(position_ids, tokens))
        assert (found.largest >= length**2) == has_mask


@pytest.mark.slow
def test_compiled_once_for_all_documents():
    """The number of documents and the longest one become variables: after two values nothing is compiled again."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = make(CONFIGS["heads in groups"], "documents").train()
    compiled = torch.compile(model, backend=counter, dynamic=None)
    counts = []
    for lengths in ([100, 100], [100, 60, 40], [50] * 4, [1] * 20 + [180], [200], [128, 72]):
        position_ids = positions(lengths, lengths, lengths)
        next_token_loss(compiled, packed(position_ids)).backward()
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert counts == [1, 2, 3, 3, 3, 3]  # first, another number of documents, another longest one


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, num_processes, flags",
    [("single_bf16", 1, ()), ("fsdp_full", 1, ()), ("fsdp_full", 2, ("--fsdp_activation_checkpointing", "true"))],
)
def test_compiled_by_layer(config, num_processes, flags, forks, out):
    """Whatever the number of layers and the documents: a layer three times, for the first two lengths of the longest document
    in training, then for any; and for evaluation. Generation compiles nothing, and nothing is compiled again."""
    flags += ("--dynamo_backend", "eager", "--dynamo_use_regional_compilation")
    script = CHILDREN / "graphs.py"
    args = ("--optim", "adamw_bf16_kahan") if config == "single_bf16" else ()
    forks.succeed(out, *args, script=script, config=config, num_processes=num_processes, flags=flags)
    found = json.loads((out / "result.json").read_text())
    assert found["2"] == found["3"]
    graphs, layers = zip(*found["2"].values(), strict=True)
    assert layers == (2, 2, *[3] * 8)
    assert graphs == (graphs[0], graphs[0], *[graphs[2]] * 8)


def test_gradients_lie_as_compiled_code_expects():
    """With the strides of their inputs, which torch announces while it traces: inductor checks them."""
    inputs = [torch.randn(1, heads, 8, 4).transpose(1, 2).flatten(0, 1) for heads in (4, 2, 2)]
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    saved = (inputs[0], torch.empty(4, 8), ends, ends, 8, 8, True, torch.zeros(2, dtype=torch.uint64))
    found = torch.ops.torch_attn._varlen_attn_backward(inputs[0], *inputs, *saved)
    assert [gradient.stride() for gradient in found] == [tensor.stride() for tensor in inputs] != [(16, 4, 1)] * 3


def test_generation_goes_back_to_sdpa():
    """Generation uses sdpa, because it pads, which `documents` would not see."""
    prompt = {"input_ids": IDS, "attention_mask": PADDED}
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = make(CONFIGS["heads in groups"], "sdpa").generate(**prompt, **settings)
    model = make(CONFIGS["heads in groups"], "documents")
    with with_padding(model):
        assert torch.equal(model.generate(**prompt, **settings), wanted)
    assert model.config._attn_implementation == "documents"
    refuses("does not say where its documents begin; give sdpa", model, **prompt, error=ValueError)


@pytest.mark.parametrize("config, asks", [
    (transformers.Gemma2Config(), "softcapped scores"),
    (transformers.GptOssConfig(), "attention sinks"),
    (transformers.GPT2Config(), "dropout of the attention"),
    (transformers.BloomConfig(n_embd=64, n_head=4), "an attention of its own"),
    (transformers.FalconConfig(), "an attention of its own"),
    (transformers.DeepseekV3Config(head_dim=64), "values of another width than keys"),
    (transformers.LlamaConfig(head_dim=512), "heads 512 wide"),
    (transformers.Gemma4TextConfig(), "heads 512 wide"),
    (transformers.DogeConfig(), "an attention of its own"),
    (transformers.LlamaConfig(hidden_size=4 * 20, num_attention_heads=4), "heads 20 wide"),
    (transformers.LlamaConfig(), ""),
], ids=lambda value: value if isinstance(value, str) else value.model_type)  # fmt: skip
def test_choice(config, asks, monkeypatch):
    assert ", ".join(beyond_documents(config)) == asks
    assert choose("eager", config, torch.bfloat16, True) == ("eager", "")
    plain = "eager" if config.model_type in ("gemma2", "gpt_oss", "bloom") else "sdpa"  # what transformers supports
    assert choose("auto", config, torch.bfloat16, True)[0] == plain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose("auto", config, torch.bfloat16, True)[0] == (plain if asks else "documents")
    assert choose("auto", config, torch.float32, True)[0] == plain
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert choose("auto", config, torch.float32, True)[0] == (plain if asks else "documents")
    batches_of_trl = choose("auto", config, torch.bfloat16, has_boundaries=False)
    assert batches_of_trl == (
        plain,
        f"the model has {asks}" if asks else "trl's batches do not say where documents begin",
    )


@pytest.mark.parametrize("flags, expected", [([], "sdpa"), (["--packing"], "documents")])
def test_a_new_model_of_trl(monkeypatch, flags, expected):
    """Rows that trl pads do not say where documents begin: a new model for them has no kernel that asks."""
    sft = shipped.load(ROOT / "recipes/sft.py")  # what it imports must not see a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    new = [
        "--from_scratch", "--tokenizer_name", "any", "--config_overrides", "num_hidden_layers=1", "--train_files",
        __file__,
    ]  # fmt: skip
    args, _ = resolve(sft.Args, [*new, *flags], world_size=1)
    assert args.new_model().config._attn_implementation == expected


def test_choices_that_cannot_be_are_errors(monkeypatch):
    with pytest.raises(ConfigError, match="documents: the model has softcapped scores; give eager, or auto"):
        choose("documents", transformers.Gemma2Config(), torch.bfloat16, True)
    for name, config, other in (
        ("sdpa", transformers.Gemma2Config(), "eager"), ("sdpa", transformers.GptOssConfig(), "eager"), ("flex_attention", transformers.GPT2Config(), "sdpa"),
        ("flash_attention_2", transformers.BloomConfig(), "eager"),
    ):  # fmt: skip
        said = f"{name}: transformers' {config.model_type} does not support it; give {other}, or auto"
        refuses(said, choose, name, config, torch.bfloat16, True)
    for version, said in ((2, "pip install flash-attn"), (3, "not installed; build it in the folder")):
        with pytest.raises(ConfigError, match=rf"flash_attention_{version}: its package .*{said}"):
            choose(f"flash_attention_{version}", transformers.LlamaConfig(), torch.bfloat16, True)
    assert choose("documents", transformers.LlamaConfig(), torch.float32, True) == ("documents", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"documents .* set `mixed_precision: bf16`"):
        choose("documents", transformers.LlamaConfig(), torch.float32, True)


def test_flash_attention_3_where_it_can_be(monkeypatch):
    """On Hopper, where its package is installed; a package that does not work is an error, and not left out silently."""
    activated = []
    monkeypatch.setattr(attention, "find_spec", lambda name: name == "flash_attn_interface")
    assert not attention.use_flash_3()  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    for major, expected in ((8, []), (10, []), (9, ["FA3"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert attention.use_flash_3() == bool(expected) and activated == expected
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate_flash_attention_impl)  # torch's
    refuses(r"flash_attn_interface .* does not work with torch .*No module named", attention.use_flash_3)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert not attention.use_flash_3()


def test_what_it_cannot_compute_is_an_error():
    with pytest.raises(ValueError, match="without padding, dropout, softcap and sinks; LlamaAttention asks for one"):
        loss_and_gradients(make(tiny_config(attention_dropout=0.1), "documents"), packed())
