"""Tests of optimizers against references, in one process, and of the schedule. tests/test_levers.py uses several ranks."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
import transformers
from helpers import ROOT, refuses
from models_table import ARCHITECTURES, ENCODER_DECODERS
from tiny import tiny_config
from torch import nn
from transformers.optimization import Adafactor

from accelerate_recipes.args import OPTIMIZERS, THEIR_SCHEDULES, TrainArgs, parse
from accelerate_recipes.checkpoint.checkpointer import seek
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.optim import Muon, make_scheduler, optimizer_fn, trained_by_muon

STEPS = 20
MODELS = [
    *(
        (transformers.AutoModelForCausalLM, config)
        for config in ARCHITECTURES.values()
        if not config.is_encoder_decoder
    ),
    *((transformers.AutoModelForSeq2SeqLM, config) for config in ENCODER_DECODERS.values()),
    (transformers.AutoModelForImageClassification, transformers.SwinConfig(embed_dim=12, depths=[1], num_heads=[2])),
]


def build(model: nn.Module, optim: str, **values) -> torch.optim.Optimizer:
    args = TrainArgs(optim=optim, **values)
    return optimizer_fn(model, args)(model.to(args.param_dtype))


def follow(optimizer: torch.optim.Optimizer, model: nn.Module, gradients: list[list[torch.Tensor]]) -> None:
    """Take one step with each list of gradients, which has one gradient for each parameter."""
    for step in gradients:
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def drawn(shapes: list, powers: Iterable[int], dtype: torch.dtype = torch.float32) -> tuple[list, list[list]]:
    """Draw parameters, and for each step gradients, which are multiplied by a power of ten."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (
        [(torch.randn(shape, generator=generator) * 10**power).to(dtype) for shape in shapes] for power in (0, *powers)
    )
    return start, gradients


def test_kahan_keeps_what_bf16_loses():
    """Each of 400 steps of 1e-4 from 1 is less than half of the distance to the next number in bf16."""
    moved = {}
    for name, optim in (("fp32", "adamw_torch_fused"), ("plain", "adamw_torch_fused"), ("kahan", "adamw_bf16_kahan")):
        model = nn.ParameterList([torch.ones(3)])
        optimizer = build(model, optim, learning_rate=1e-4, weight_decay=0.0)
        follow(optimizer, model if name == "fp32" else model.bfloat16(), [[torch.ones(3)]] * 400)
        moved[name] = model[0].tolist()
    assert moved["fp32"] == pytest.approx([0.96] * 3, rel=1e-4)
    assert moved["plain"] == [1.0] * 3
    assert moved["kahan"] == pytest.approx(moved["fp32"], abs=1e-2)


def compensated(weight: torch.Tensor, pending: torch.Tensor, decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to a weight what is pending; return the sum in bf16, and what rounding has lost."""
    pending = (pending.double() - decay * weight.double()).bfloat16()
    total = (weight.double() + pending.double()).bfloat16()
    return total, (pending.double() + (weight.double() - total.double())).bfloat16()


def test_kahan_to_the_bit():
    """Given the updates of AdamW, each weight and its compensation are those of the algorithm; the moments are AdamW's."""
    start, gradients = drawn([(32, 16), (0, 16), (16, 1), (64,)], [0] * 20, torch.bfloat16)
    settings = {"learning_rate": 2**-10, "weight_decay": 0.25}  # decay and its products have no rounding of their own
    model, plain = (nn.ParameterList([tensor.clone() for tensor in start]) for _ in range(2))
    optimizer = build(model, "adamw_bf16_kahan", **settings)
    reference = torch.optim.AdamW(plain, lr=2**-10, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.95)
    weights, pending = start, [torch.zeros_like(tensor) for tensor in start]
    for step in gradients:
        follow(optimizer, model, [step])
        for parameter, lost in zip(plain, pending, strict=True):
            parameter.data.copy_(lost)
        follow(reference, plain, [step])
        decays = [2**-12 if tensor.ndim > 1 else 0.0 for tensor in start]
        pairs = [compensated(*of) for of in zip(weights, plain, decays, strict=True)]
        weights, pending = ([pair[i].detach() for pair in pairs] for i in range(2))
    for parameter, other, weight, lost in zip(model, plain, weights, pending, strict=True):
        state = optimizer.state[parameter]
        assert torch.equal(parameter, weight) and torch.equal(state["compensation"], lost)
        assert lost.count_nonzero() > 0.8 * lost.numel() or not lost.numel()
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], reference.state[other][name])


IN_TRITON = """
import torch
import transformers
from accelerate_recipes.models.kernels import add_compensated
from accelerate_recipes.optim import add_compensated_

generator = torch.Generator().manual_seed(0)
for size, decay in ((5000, 0.0), (4096, 2**-12), (0, 0.5)):  # an odd end of a tensor is decayed otherwise on a CPU
    weight = torch.randn(size, generator=generator).bfloat16()
    pending = (weight.float() * torch.rand(size, generator=generator) * 2.0 ** torch.arange(-size, 0).clamp(-14)).bfloat16()
    pending[:2] = torch.tensor([torch.nan, torch.inf])[:size]
    ways = [(weight.clone(), pending.clone()) for _ in range(2)]
    add_compensated(*ways[0], decay)
    add_compensated_([ways[1][0]], [ways[1][1]], decay)
    for one, other in zip(*ways):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert ways[0][1][2:].count_nonzero() > 0.5 * (size - 2)
"""


def test_the_kernel_computes_the_same_bits():
    """Triton's interpreter runs the kernel of GPUs on a CPU; torch for CPUs comes without Triton."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", IN_TRITON], env=env, check=True)


def test_adafactor_is_that_of_transformers():
    """Results equal transformers' with `TrainingArguments(optim="adafactor")`: vectors, matrices, stacks of matrices."""
    start, gradients = drawn([(7,), (5, 3), (2, 5, 3)], (0, -3, 1, 0, -6))
    gradients[0][1][1] = gradients[2][1][0] = 0.0  # like that of a word which was in no batch
    ours, theirs = (nn.ParameterList([p.clone() for p in start]) for _ in range(2))
    follow(build(ours, "adafactor", learning_rate=1e-2, weight_decay=0.5), ours, gradients)
    groups = [{"params": theirs[1:], "weight_decay": 0.5}, {"params": theirs[:1]}]
    optimizer = Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    follow(optimizer, theirs, gradients)
    for ours_now, theirs_now in zip(ours, theirs, strict=True):
        assert torch.allclose(ours_now, theirs_now, rtol=1e-5, atol=1e-7)


def test_muon_is_that_of_torch():
    """In bf16 to the bit, for wide, tall and square matrices; a stack of matrices is trained as each of them alone."""
    start, gradients = drawn([(6, 9), (9, 6), (8, 8), (3, 6, 9), (7,)], (0, -3, 1))
    ours, alone, adam = (nn.ParameterList([p.clone() for p in start]) for _ in range(3))
    settings = {"lr": 1e-2, "weight_decay": 0.5}
    matrices = {"params": [*ours[:4]], "weight_decay": 0.5}
    follow(Muon(matrices, [{"params": ours[4:], "weight_decay": 0.5}], torch.bfloat16, lr=1e-2), ours, gradients)
    follow(torch.optim.Muon(alone[:3], adjust_lr_fn="match_rms_adamw", **settings), alone, gradients)
    follow(torch.optim.AdamW(adam, fused=True, **settings), adam, gradients)
    assert all(torch.equal(ours[i], alone[i]) for i in range(3)) and torch.equal(ours[4], adam[4])
    for i, whole in enumerate(ours[3]):
        one = nn.ParameterList([start[3][i].clone()])
        muon = Muon({"params": [*one], "weight_decay": 0.5}, [], torch.float32, lr=1e-2)
        follow(muon, one, [[gradient[3][i]] for gradient in gradients])
        assert (whole - one[0]).abs().max() < 2e-2 * (one[0] - start[3][i]).abs().max()


# Parameters of two and more dimensions that AdamW trains beside Muon, by the ends of their names.
NOT_BY_MUON = re.compile(
    r"(embed\w*|wte|wpe|shared|lm_head|classifier|patch_embeddings\.projection|relative_attention_bias)\.weight$"
    r"|(mlp|feed_forward|mixer)\.gate\.weight$|router\.weight$|shared_expert_gate\.weight$"
    r"|conv(1d)?\.weight$|A_log$|_bias$|bias_table$"
)


@pytest.mark.parametrize(("auto", "config"), MODELS, ids=lambda value: getattr(value, "model_type", ""))
def test_muon_trains_matrices_of_hidden_layers(auto, config):
    with torch.device("meta"):
        model = auto.from_config(config)
    found = trained_by_muon(model, TrainArgs(optim="muon"))
    assert found and not any(NOT_BY_MUON.search(name) for name in found)
    rest = [name for name, parameter in model.named_parameters() if parameter.ndim > 1 and name not in found]
    assert [name for name in rest if not NOT_BY_MUON.search(name)] == []
    groups = optimizer_fn(model, TrainArgs(optim="muon"))(model).param_groups
    assert {*groups[0]["params"]} == {*found.values()}
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])


@pytest.mark.parametrize(("auto", "config", "ends"), [
    (transformers.AutoModelForCausalLM, transformers.JetMoeConfig(num_hidden_layers=1), "mlp.router.layer.weight"),
    (transformers.AutoModelForCausalLM, transformers.Gemma3nTextConfig(num_hidden_layers=1, num_kv_shared_layers=0), "modality_router.weight"),
    (transformers.AutoModelForImageClassification, transformers.Swinv2Config(depths=[1, 1, 1, 1]), "continuous_position_bias_mlp.2.weight"),
    (transformers.AutoModelForImageClassification, transformers.ResNetConfig(), "classifier.1.weight"),
], ids=lambda value: getattr(value, "model_type", ""))  # fmt: skip
def test_exceptions_of_muon_are_those_on_the_page(auto, config, ends):
    """docs/levers.md names them: routers and classifiers of these classes look like any linear layer."""
    with torch.device("meta"):
        found = trained_by_muon(auto.from_config(config), TrainArgs(optim="muon"))
    assert any(name.endswith(ends) for name in found) and (len(found) == 1) == (config.model_type == "resnet")


def test_muon_without_a_matrix_is_refused():
    refuses("--optim muon", build, nn.Sequential(nn.LayerNorm(3)), "muon")


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_norms_and_biases_do_not_decay(optim):
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="not among the requirements")
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.LayerNorm((2, 3)))
    decayed, spared = build(model, optim, weight_decay=0.1).param_groups
    assert decayed["weight_decay"] == 0.1 and [p.shape for p in decayed["params"]] == [(3, 4)]
    assert spared["weight_decay"] == 0.0 and len(spared["params"]) == 5


# Vectors that transformers' Trainer decays, because it chooses by names: norms among them, sinks and scales of states.
DECAYED_BY_TRAINER = (".norm_f.weight", ".sinks", ".A_log", ".D", ".query")


# Matrices of linear layers that Trainer does not decay, because they lie in a module whose name says norm or bias.
SPARED_BY_TRAINER = ("relative_position_bias.proj", "relative_position_bias.linear.weight")
# Norms with a weight for each head, by class and by name, and a table of biases that is called otherwise.
OF_HEADS = [
    (transformers.AutoModelForCausalLM, tiny_config("cohere", use_qk_norm=True)),
    (transformers.AutoModelForCausalLM, transformers.Inkling2TextConfig(num_hidden_layers=1)),
    (transformers.AutoModelForCausalLM, tiny_config("phi4_multimodal", pad_token_id=0)),
]


@pytest.mark.parametrize(("auto", "config"), MODELS + OF_HEADS, ids=lambda value: getattr(value, "model_type", ""))
def test_what_decays_is_what_trainer_decays(auto, config):
    """Biases and norms of several dimensions have no decay; other differences are DECAYED_BY_TRAINER, SPARED_BY_TRAINER."""
    with torch.device("meta"):
        model = auto.from_config(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = optimizer_fn(model, TrainArgs(weight_decay=0.1))(model).param_groups
    decayed = {names[p] for group in groups if group["weight_decay"] for p in group["params"]}
    theirs = {*transformers.Trainer.get_decay_parameter_names(None, model)} & {*names.values()}
    assert {name for name in decayed - theirs if not name.endswith(SPARED_BY_TRAINER)} == set()
    assert {name for name in theirs - decayed if not name.endswith(DECAYED_BY_TRAINER)} == set()


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_bytes_of_a_parameter_are_those_of_the_page(optim):
    """Weight, gradient and state of a matrix have the bytes that docs/levers.md states."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="not among the requirements")
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    optimizer = build(model, optim)
    follow(optimizer, model, [[torch.randn(256, 256)]])
    (weight,) = model.parameters()
    state = [tensor for tensor in optimizer.state[weight].values() if torch.is_tensor(tensor)]
    found = sum(tensor.numel() * tensor.element_size() for tensor in (weight, weight.grad, *state)) / 256**2
    (stated,) = re.findall(rf"^\| `{optim}` \| (\d+) \|", (ROOT / "docs/levers.md").read_text(), re.MULTILINE)
    assert found == pytest.approx(int(stated), rel=0.02)


def test_8_bit_needs_a_package(monkeypatch):
    monkeypatch.setattr("accelerate_recipes.args.find_spec", lambda name: None)
    refuses(r"--optim adamw_8bit: .*pip install bits", parse, TrainArgs, ["--optim", "adamw_8bit"], world_size=1)


def rates(**values) -> list[float]:
    """Return the learning rate of each step, and of steps after the last."""
    args = TrainArgs(learning_rate=0.5, **values)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=args.learning_rate)
    scheduler = make_scheduler(optimizer, args, STEPS)
    found = []
    for _ in range(STEPS + 3):
        assert len(set(scheduler.get_last_lr())) == 1
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_schedule_to_a_minimum(shape):
    """After the warmup it is the schedule to zero, which is transformers' own, between the peak and the minimum."""
    to_zero, found = (rates(warmup_steps=4, lr_scheduler_type=shape, min_lr_ratio=ratio) for ratio in (0, 0.2))
    assert found[:5] == to_zero[:5] and found[STEPS] == pytest.approx(0.2 * 0.5)
    assert found[4:] == pytest.approx([0.2 * 0.5 + 0.8 * rate for rate in to_zero[4:]])


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant_with_warmup"])
@pytest.mark.parametrize("warmup_steps", [0, 3, 0.5])
def test_the_schedules_are_those_of_transformers(shape, warmup_steps):
    """The schedules agree to the last bit where both are defined: after the last step, transformers' cosine rises again."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    warmup = TrainArgs(warmup_steps=warmup_steps).num_warmup_steps(STEPS)
    (reference,) = transformers.get_scheduler(shape, optimizer, warmup, STEPS).lr_lambdas
    found = rates(warmup_steps=warmup_steps, lr_scheduler_type=shape)
    assert found[: STEPS + 1] == [0.5 * reference(step) for step in range(STEPS + 1)]
    assert len(set(found[STEPS:])) == 1


SETTINGS = {
    "warmup_stable_decay": {"num_decay_steps": 5, "decay_type": "1-sqrt"},
    "polynomial": {"power": 2.0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
}


@pytest.mark.parametrize("name", THEIR_SCHEDULES)
def test_other_schedules_are_those_of_transformers(name):
    """Over a whole run, and from any step at which one is resumed."""
    settings = SETTINGS.get(name, {})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    (reference,) = transformers.get_scheduler(name, optimizer, 3, STEPS, scheduler_specific_kwargs=settings).lr_lambdas
    wanted = [0.5 * reference(step) for step in range(STEPS + 1)]
    values = {"lr_scheduler_type": name, "lr_scheduler_kwargs": settings, "warmup_steps": 3}
    assert rates(**values)[: STEPS + 1] == wanted and len({*wanted}) > (name != "constant")
    for step in range(1, STEPS):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        scheduler = make_scheduler(optimizer, TrainArgs(learning_rate=0.5, **values), STEPS)
        seek(scheduler, step)
        assert scheduler.get_last_lr() == [wanted[step]]


def test_a_run_that_ends_before_the_peak_is_told(capsys):
    rates(warmup_steps=2 * STEPS)
    said = capsys.readouterr().err
    assert said.startswith("warning: --warmup_steps") and f"{(STEPS - 1) / (2 * STEPS):.0%} of its peak" in said
    rates(warmup_steps=STEPS)
    assert capsys.readouterr().err.startswith("warning: --warmup_steps")
    rates(warmup_steps=STEPS - 1)
    assert not capsys.readouterr().err


WSD = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs"]


@pytest.mark.parametrize("flags, reason", [
    (["--min_lr_ratio", "1.5"], "--min_lr_ratio is 1.5; it must be at least 0, and at most 1"),
    (["--min_lr_ratio", "0.1", "--lr_scheduler_type", "constant_with_warmup"], "--min_lr_ratio 0.1 has no effect"),
    (["--lr_scheduler_kwargs", "power=2"], "--lr_scheduler_kwargs power has no effect"),
    (WSD[:2], "warmup_stable_decay .*'num_decay_steps'"),
    ([*WSD, "num_decay_steps=9", "decays=1"], "warmup_stable_decay .*'decays'"),
    ([*WSD, "num_decay_steps=many"], "warmup_stable_decay .*many"),
    ([*WSD, "num_decay_steps=60", "--max_steps", "99", "--warmup_steps", "40"], "=60 and 40 steps .* the run's 99"),
    (["--lr_scheduler_type", "polynomial", "--learning_rate", "1e-8"], "polynomial .*1e-08"),
    (["--lr_scheduler_type", "inverse_sqrt", "--min_lr_ratio", "0.1"], "--min_lr_ratio 0.1 has no effect"),
    (["--lr_scheduler_type", "greedy"], "--lr_scheduler_type"),
])  # fmt: skip
def test_mistakes(flags, reason):
    refuses(reason, parse, TrainArgs, flags, world_size=1)


def test_a_decay_longer_than_the_run_is_refused_when_its_steps_are_known():
    with pytest.raises(ConfigError, match=r"=15 and 8 steps .* the run's 20"):
        rates(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 15}, warmup_steps=8)
