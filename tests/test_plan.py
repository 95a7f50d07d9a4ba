"""Tests of `plan`: deep models from shallow ones, the path of GPUs without a GPU, what fits, and the search."""

import contextlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import CONFIGS, ROOT, refuses
from simulations import BF16, C4, DEEPVIT, DPO, FP32, GRPO, RECOMPUTE, SFT, STEP, T5, TEMPLATE, command_of, job
from tiny import tiny_config
from torch.nn.attention.varlen import varlen_attn
from torch.optim.adamw import adamw
from transformers import LlamaConfig

from accelerate_recipes.arguments.gpus import EFFICIENCY, GIB, GPUS, OUTSIDE, check_gpu, known_as
from accelerate_recipes.arguments.shipped import load as load_recipe
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.trial import NotSimulatedError, config_of
from recipe_tools import planning
from recipe_tools import preflight as preflight_module
from recipe_tools.plan import simulate
from recipe_tools.plan.allocator import reserved
from recipe_tools.plan.layers import predict_outcomes, sizes_of
from recipe_tools.plan.ledger import ACTIVATIONS, HOST, Clock, Event, Ledger, attended_share
from recipe_tools.plan.predict import Prediction
from recipe_tools.plan.search import Change, Search, in_words, prediction_of, reason_of, savings, speedups
from recipe_tools.plan.simulate import MICRO_BATCHES, Job, Outcome, SimulationError, Simulator, add_ddp, load_trial
from recipe_tools.planning import job_of, plan
from recipe_tools.preflight import preflight
from recipe_tools.request import launch_environment, read_request

aten = torch.ops.aten
CUDA_C4 = [
    *C4, "--attn_implementation", "auto", "--max_length", "72", "--config_overrides", "hidden_size=64",
    "max_position_embeddings=72",
]  # fmt: skip
FSDP2 = ["fsdp_full", "fsdp_grad_op", "fsdp_hybrid", "fsdp_offload", "fsdp_no_wrap", "fsdp_full_state_dict"]
HYBRID = ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"]


ON_FOUR = {"fsdp_hybrid": HYBRID, "fsdp_long": HYBRID[2:]}  # flags that divide four processes


def on_four(config: str, command: list[str], *flags: str, **changes) -> Job:
    more = ON_FOUR.get(config, [])
    return job(config, command, *BF16, *more, *flags, num_processes=4, **changes)


ADAPTERS = ["--use_peft", "--lora_r", "4"]
CHESS = [str(ROOT / "recipes/chess.py"), "--max_length", "72", *STEP, "--model_name_or_path", "WIDE"]
WIDE_SFT = [SFT[0], "--max_length", "72", *SFT[3:], "WIDE"]
WIDE_DPO = [DPO[0], *WIDE_SFT[1:]]
WIDE_GRPO = [*GRPO, "WIDE"]
# Commands, with the copies that a micro-batch makes under fsdp_full, in calls of the operators that copy: an upper bound. Up to twelve judge the step.
GPU_COMMANDS = {
    "c4": (CUDA_C4, 55),
    "chess": (CHESS, 50),
    "t5": ([*T5, "FLAN"], 95),
    "t5 with adapters": ([*T5, "FLAN", *ADAPTERS], 89),
    "template": ([*TEMPLATE, "BERT"], 20),
    "sft": (WIDE_SFT, 65),
    "sft with packed rows": ([*WIDE_SFT, "--packing"], 60),
    "sft with adapters": ([*WIDE_SFT, *ADAPTERS], 62),
    "dpo": (WIDE_DPO, 75),
    "dpo with adapters": ([*WIDE_DPO, *ADAPTERS], 72),
    "grpo": (WIDE_GRPO, 178),  # with three passes that draw
    "grpo with adapters": ([*WIDE_GRPO, *ADAPTERS, "--beta", "0.1"], 177),
    "vit": (DEEPVIT, 51),
}
# Waits for numbers that trl logs, in each micro-batch.
WAITS = {"dpo": 15, "dpo with adapters": 15, "grpo": 8, "grpo with adapters": 9}
COPIES = ("_to_copy", "copy_", "clone", "cat")
SEES_DOCUMENTS = ("c4", "chess", "sft with packed rows")  # their rows have 72 tokens


def test_the_path_of_gpus_without_a_gpu(simulator):
    """Our code runs on tensors of a GPU, waits once a step, and attends document by document."""
    with_mask = on_four("fsdp_hybrid", [*CUDA_C4, "--attn_implementation", "sdpa"])
    found, masked = simulator([on_four("fsdp_hybrid", CUDA_C4), with_mask])
    check_path("c4", "fsdp_hybrid", found)
    assert found.calls["_varlen_attn"] == found.num_layers * found.micro_batches
    # transformers looks in each micro-batch whether a row has several documents.
    assert masked.value_reads == found.value_reads + min(masked.micro_batches, MICRO_BATCHES)


@pytest.mark.slow
def test_one_gpu_in_pure_bf16_copies_no_weights(simulator, tmp_path):
    """Bytes of a parameter that a step of one short row reads and writes. FSDP2 casts and copies each weight for both passes on
    one GPU too, autocast casts weights, clipping multiplies gradients; what is frozen is in bf16, and not cast."""
    tiny_config(hidden_size=512, intermediate_size=1536, num_hidden_layers=3).save_pretrained(tmp_path)
    short = [
        C4[0],
        "--model_name_or_path",
        str(tmp_path),
        "--max_length",
        "8",
        "--max_steps",
        "1",
        "--total_batch_size",
        "1",
    ]
    kahan = ["--optim", "adamw_bf16_kahan"]
    cases = {
        "pure bf16": ("single", kahan, FP32), "not clipped": ("single", [*kahan, "--max_grad_norm", "0"], FP32),
        "adapters": ("single", ["--use_peft", "--lora_r", "3"], BF16), "autocast": ("single", [], BF16), "FSDP2": ("fsdp_full", [], BF16),
    }  # fmt: skip
    jobs = [job(config, [*short, *more], *flags, num_processes=1) for config, more, flags in cases.values()]
    found = dict(zip(cases, simulator(jobs), strict=True))
    moved = {name: {kind: size / one.parameters for kind, size in one.moved.items()} for name, one in found.items()}
    copied = {name: sum(sizes.get(kind, 0) for kind in (*COPIES, "_foreach_copy_")) for name, sizes in moved.items()}
    assert copied.pop("FSDP2") > 20 > copied.pop("autocast") > 10 > 1.2 > max(copied.values())
    best = moved["pure bf16"]
    assert best["add_compensated_"] == pytest.approx(8, rel=0.01), "the weights, and what rounding has lost"
    assert best["mul_"] == pytest.approx(4, rel=0.01) and best["zeros_like"] < 0.1
    assert "mul_" not in moved["not clipped"]


@pytest.mark.slow
def test_a_second_model_on_gpus(simulator, bases):
    """A reference beside the model is simulated too: its shard, a quarter of its weights in fp32, is there in the step."""
    command = command_of(bases, WIDE_DPO)
    flag = "--precompute_ref_log_probs"
    alone, beside = simulator([on_four("fsdp_full", [*command, flag, at]) for at in ("true", "false")])
    assert isinstance(beside, Outcome), beside
    assert beside.peak >= alone.peak + beside.parameters and beside.flops > alone.flops


def check_path(name: str, config: str, found: Outcome | Exception) -> None:
    """Check what was simulated of a command of GPU_COMMANDS under a config, on four GPUs or on one."""
    case = name, config
    assert isinstance(found, Outcome), (case, str(found))
    # The flags of a step are read one by one here, and by one copy on a GPU. Nothing else is read by us.
    assert found.value_reads == 6 + WAITS.get(name, 0) * min(found.micro_batches, MICRO_BATCHES), case
    if name in SEES_DOCUMENTS:
        assert not [shape for shape in found.shapes if shape.count(72) > 1], case
    # Of 2 rows with 19 places for a target, 9 are of the answer: trl multiplies no others, in one tile
    if name == "grpo":
        assert {shape[0] for shape in found.shapes if shape[1:] == [2**15]} == {18}, case
    assert (found.host_peak > 2**14) == (config == "fsdp_offload"), case
    if config == "single":
        return
    # Bytes a parameter that FSDP and the optimizer read and write in a step, beyond which no copy was made. A gather copies
    # the shards, in fp32, to bf16, those into the buffer, and from it into whole weights.
    shards = 2 if config == "fsdp_hybrid" else 4
    gathers = (1 if config == "fsdp_grad_op" else 2) * found.micro_batches + 3 * ("grpo" in name)  # to draw
    (concatenation,) = (name for name in found.moved if name.startswith("chunk_cat"))
    most = {
        "_foreach_copy_": (6 / shards * gathers, found.parameters),
        "all_gather_copy_in": (4 / shards * gathers, found.parameters),
        "split_with_sizes_copy": (4 * gathers, found.parameters),
        concatenation: (6 * found.micro_batches, found.trained),
        "_fused_adamw_": (28 / shards, found.trained),
    }
    for operator, (size, parameters) in most.items():
        assert found.moved.get(operator, 0) <= 1.03 * size * parameters, (case, operator)  # padded to whole shards
    assert found.moved[concatenation] >= most[concatenation][0] * found.trained, case  # it is counted
    if config == "fsdp_full":
        copies = sum(found.calls.get(operator, 0) for operator in COPIES)
        assert copies <= GPU_COMMANDS[name][1] * found.micro_batches, (case, copies)


WITHOUT_ADAPTERS = [name for name in GPU_COMMANDS if "adapters" not in name]
# The loop under a config is that of all recipes: one recipe tries all configs, the others have one more in turn.
IN_TURN = dict(zip(WITHOUT_ADAPTERS, itertools.cycle(("fsdp_hybrid", "fsdp_offload", "fsdp_no_wrap", "fsdp_grad_op"))))


@pytest.mark.slow
@pytest.mark.parametrize("name, configs", [
    *(pytest.param(name, [*FSDP2[:1], IN_TURN[name]], id=name) for name in WITHOUT_ADAPTERS[1:]),
    pytest.param("c4", FSDP2, id="c4 under all"),
    *(pytest.param(n, FSDP2, id=f"{n} under all", marks=pytest.mark.long) for n in GPU_COMMANDS if n != "c4"),
])  # fmt: skip
def test_the_path_of_gpus_of_each_recipe(simulator, bases, name, configs):
    """Each recipe with a trial runs on tensors of GPUs under FSDP2's configs, and in bf16 on one GPU."""
    command = command_of(bases, GPU_COMMANDS[name][0])
    configs = [*configs, *(["fsdp_long"] if name in ("c4", "chess") else [])]
    jobs = [on_four(config, command) for config in configs]
    jobs += [job("single", command, *BF16, num_processes=1), job("fsdp_full", command, *BF16, num_processes=1)]
    *sharded, single, alone = simulator(jobs)
    for config, found in zip([*configs, "single"], [*sharded, single], strict=True):
        check_path(name, config, found)
    # Autocast computes in bf16 what FSDP does, and keeps beside the weights a copy in bf16, and some activations in fp32.
    assert single.flops == alone.flops
    assert alone.peak < single.peak < alone.peak + 2 * single.parameters + single.at_peak["activations"] // 2


@pytest.mark.parametrize("command, flags", [
    pytest.param([*T5, "DEEP", *ADAPTERS], RECOMPUTE, id="two stacks", marks=pytest.mark.long),
    pytest.param([*GRPO, "TALL"], [], id="many sums", marks=pytest.mark.slow),
    pytest.param([*GRPO, "TALL", "--total_batch_size", "512"], [], id="answers", marks=pytest.mark.slow),
])  # fmt: skip
def test_deep_models_with_more_than_two_passes(simulator, bases, command, flags):
    """A model is extrapolated to the byte from two stacks of layers, and with passes that draw answers, also if they decide."""
    deep = on_four("fsdp_full", command_of(bases, command), *flags)
    (whole,) = simulator([deep])
    (found,) = predict_outcomes(simulator, [deep])
    assert whole.phases and not found.phases  # an extrapolation has none
    for name in ("peak", "at_peak", "flops", "trained", "num_layers"):
        assert getattr(found, name) == getattr(whole, name), name
    assert found.before == pytest.approx(whole.before, rel=0.02)
    peaks = {name: max(peak for peak, _ in segments) for name, segments in whole.phases}
    assert (peaks.get("last tokens") == whole.peak) == ("512" in command)


FAULTY = """
import torch
from accelerate_recipes.arguments import shipped
from accelerate_recipes import recipe
from dataclasses import replace
c4 = shipped.load({c4!r})
Args, requirements, main = c4.Args, c4.requirements, c4.main
def trial(args):
    right = c4.trial(args)
    return replace(right, loss_fn=lambda model, batch: {loss})
"""


def test_faults_that_only_a_gpu_shows(simulator, tmp_path):
    """A tensor on the wrong device fails the simulation; one more wait is counted."""
    for name, loss in {
        "device": "right.loss_fn(model, batch) + torch.ones(1).sum()[None]",
        "wait": "right.loss_fn(model, batch) * (1 + 0 * right.loss_fn(model, batch).item())",
    }.items():
        (tmp_path / f"{name}.py").write_text(FAULTY.format(c4=C4[0], loss=loss))
    faulty = {name: on_four("fsdp_full", [str(tmp_path / f"{name}.py"), *CUDA_C4[1:]]) for name in ("device", "wait")}
    (found,) = simulator([faulty["wait"]])
    assert found.value_reads == 6 + found.micro_batches
    (found,) = simulator([faulty["device"]])
    assert isinstance(found, SimulationError)
    assert re.search("FakeTensorDeviceMismatchError|not on the expected device|two different devices", str(found))


@pytest.mark.parametrize(
    "flags, more, depth",
    [pytest.param(RECOMPUTE, ["--total_batch_size", "24"], 9, marks=pytest.mark.slow),
     *(pytest.param(*case, 13, marks=pytest.mark.long) for case in (
         ([], []), (RECOMPUTE, ["--checkpoint_every_n_layers", "2"]), ([], ["--prefetch_layers", "2"])))],
)  # fmt: skip
def test_deep_models_follow_from_shallow_ones(simulator, flags, more, depth):
    """Peak with its kinds, FLOPs and collectives are extrapolated to the byte; the bound of the time nearly."""
    deep = on_four("fsdp_full", [*CUDA_C4, "--config_overrides", f"num_hidden_layers={depth}", *more], *flags)
    (whole,) = simulator([deep])
    number = simulator.number
    (found,) = predict_outcomes(simulator, [deep])
    assert simulator.number == number + 3 and whole.phases and not found.phases  # an extrapolation has none
    for name in ("peak", "at_peak", "host_peak", "flops", "recomputed", "trained", "num_layers"):
        assert getattr(found, name) == getattr(whole, name), name
    for key, counts in whole.collectives.items():
        assert found.collectives[key] == pytest.approx(counts, rel=1e-3 if key.startswith("all_reduce") else 1e-12), key
    assert found.seconds == pytest.approx(whole.seconds, rel=0.02)


def outcome(needed: int) -> Outcome:
    """Make the outcome of a run that needs so many bytes."""
    numbers = dict.fromkeys(("flops", "recomputed", "seconds", "compute", "memory", "communication"), 1)
    numbers |= dict.fromkeys(("trained", "parameters", "num_layers", "micro_batches", "tokens"), 1)
    return Outcome(
        peak=needed - OUTSIDE, at_peak={}, host_peak=0, phases=[], collectives={}, inside_node={}, unit="images",
        is_uniform=True, **numbers,
    )  # fmt: skip


# What is done with 1,024 numbers in fp32, and the bytes that it reads and writes.
MOVED = {
    "a sum": (lambda x: x + x[:32].sum(), 4096 + 128 + 4 + 4 + 4096),
    "a cast": (lambda x: x.bfloat16(), 4096 + 2048),
    "a copy, which does not read where it writes": (lambda x: torch.empty(1024, dtype=torch.bfloat16).copy_(x), 4096 + 2048),
    "zeros": (lambda x: x.zero_(), 4096),
    "a view that does not say so": (lambda x: torch.ops.aten._unsafe_view(x, [32, 32]), 0),
    "some rows of a table": (lambda x: F.embedding(torch.tensor([1, 2]), x.view(32, 32)), 16 + 2 * 2 * 128),
    "a sum into some rows": (
        lambda x: x.view(32, 32).index_add_(0, torch.tensor([1, 2]), torch.empty(2, 32)), 16 + 3 * 2 * 128),
    "numbers that are scaled in place": (lambda x: torch._foreach_mul_([x, x.clone()], 2.0), 2 * 4096 + 4 * 4096),
    "AdamW": (lambda x: adamw_on(x), 7 * 4096 + 4 + 4 + 4 + 4),
}  # fmt: skip


def adamw_on(x: torch.Tensor) -> None:
    step = torch.ones(())
    adamw([x], [x], [x], [x], [], [step], fused=True, amsgrad=False, beta1=0.9, beta2=0.9, lr=0.1, weight_decay=0.0,
          eps=1e-8, maximize=False)  # fmt: skip


@pytest.mark.parametrize("what", MOVED)
def test_bytes_that_operators_read_and_write(what):
    work, expected = MOVED[what]
    x = torch.zeros(1024)
    with torch.no_grad(), Ledger("cpu", 0) as ledger:
        work(x)
    found = sum(ledger.moved.values())
    assert found == expected, ledger.moved


@pytest.mark.parametrize("length, window", [(64, (-1, -1)), (64, (-1, 0)), (64, (7, 0)), (5, (63, 0))])
def test_attention_takes_the_time_of_the_pairs_that_it_computes(length, window):
    """FLOPs are those of all pairs, as in MFU; the time, forward and backward, of those that the mask lets through."""
    query, key, value = (torch.randn(length, 2, 8, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, length], dtype=torch.int32)
    slow = replace(GPUS["h100"], fp32=1.0)  # so that FLOPs decide
    with Ledger("cpu", 0, Clock(slow, 8)) as ledger:
        varlen_attn(query, key, value, ends, ends, length, length, window_size=window).sum().backward()
    before, after = (length if tokens < 0 else tokens for tokens in window)
    seen = torch.ones(length, length).tril(after).triu(-before).mean().item()
    flops = sum(ledger.flops.values())
    assert flops == 2 * (2 + 5) * length**2 * 2 * 8
    assert ledger.clock.compute * EFFICIENCY == pytest.approx(flops * seen)


@pytest.mark.parametrize("is_causal, share", [(True, 17 / 32), (False, 1)])
def test_attention_without_documents_takes_the_time_of_half_the_pairs(is_causal, share):
    """Torch's own operators say in other places that they are causal."""
    query = torch.empty(1, 2, 16, 8)
    flash, efficient = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention
    assert attended_share(flash.default, (query, query, query, 0.0, is_causal), {}) == share
    assert attended_share(efficient.default, (query, query, query, None, True), {"is_causal": is_causal}) == share
    backward = aten._scaled_dot_product_flash_attention_backward.default
    given = (*[query] * 6, None, None, 16, 16, 0.0, is_causal, None, None)
    assert attended_share(backward, given, {}) == share
    assert attended_share(aten.mm.default, (query, query), {}) == 1


def test_the_buckets_of_ddp_are_held_by_the_allocator_too():
    found = replace(outcome(3 * GIB), trained=GIB // 4, reserved=GIB)
    before = found.peak
    add_ddp(found, 8, True, Clock(GPUS["h100"], 8))
    assert found.at_peak == {"DDP's buckets": GIB}
    assert (found.peak, found.reserved) == (before + GIB, 2 * GIB)


def test_the_reason_of_an_error():
    """Of a list the first item, else the first line."""
    assert reason_of(ConfigError("This launch cannot work:\n  - no GPU\n  - no CPU")) == "no GPU"
    assert reason_of(SimulationError("it failed: KeyError: 'a'\nTraceback:\n  File")) == "it failed: KeyError: 'a'"
    assert reason_of(ConfigError("no: such file")) == "no: such file"
    assert reason_of(SimulationError("")) == "SimulationError"


def test_what_the_search_could_not_try_is_said():
    """A change that is refused, not simulated, or fails in simulation is named with the reason; the others are proposed."""
    answers = {
        "--checkpoint_every_n_layers 2": NotSimulatedError("such layers\nbut others"),
        "--optim adafactor": SimulationError("the simulation failed: no such operator\nTraceback"),
    }

    def simulate(jobs: list[Job]) -> list:
        commands = [" ".join(job.command) for job in jobs]
        return [next((a for flags, a in answers.items() if flags in c), outcome(3 * GIB)) for c in commands]

    def make_job(changes: Sequence[Change]) -> Job:
        if any(change.kind == "offload" for change in changes):
            raise ConfigError("accelerate launch refuses: no CPU")
        return replace(first, command=first.command + [word for change in changes for word in change.recipe])

    first = job("fsdp_full", C4)
    before = prediction_of(first, outcome(4 * GIB), replace(GPUS["l4"], memory=4 * GIB - 1))
    told: list[str] = []
    search = Search(simulate, before, first, make_job, tell=told.append)
    found = search.fitting()
    assert [str(p.changes[0]) for p in found] == [
        "--fsdp_activation_checkpointing true", "--fsdp_activation_checkpointing true --checkpoint_every_n_layers 4",
        "config fsdp_long.yaml --num_machines 1 --num_processes 2 --mixed_precision bf16 --parallelism_config_dp_replicate_size 1"
        " --parallelism_config_dp_shard_size 1 --parallelism_config_cp_size 2",
        "--per_device_train_batch_size 1", "--mixed_precision no --optim adamw_bf16_kahan", "2 x as many nodes",
    ]  # fmt: skip
    tried = len(found) + 2  # two could not be simulated
    assert len(told) == tried and re.search(rf"; {tried - 2} left, about \d+ s$", told[0])
    assert told[0].startswith("Tried --fsdp_activation_checkpointing true: 3.00 GiB, a step of at least 1 s")
    assert "Tried --optim adafactor: could not be tried" in "\n".join(told)
    assert search.failed == {
        "--fsdp_offload_params true": "accelerate launch refuses: no CPU",
        "--fsdp_activation_checkpointing true --checkpoint_every_n_layers 2": "plan does not simulate such layers",
        "--optim adafactor": "the simulation failed: no such operator",
    }
    lines = planning.failures(search)
    assert lines[0] == "These could not be tried:"
    assert "  --optim adafactor: the simulation failed: no such operator" in lines


# Kinds of changes that only this config proposes. The others differ from those of fsdp_grad_op in nothing that is simulated.
OWN_KINDS = {"fsdp_hybrid": ("shard", "config"), "fsdp_long": ("row", "nodes", "recompute", "shard")}


@pytest.mark.parametrize("config, command, refused", [
    ("fsdp_grad_op", CUDA_C4, []),
    ("fsdp_hybrid", CUDA_C4, []),
    ("fsdp_long", CUDA_C4, []),
    ("ddp", CUDA_C4, ["--optim adamw_8bit"]),
    pytest.param("single", [*SFT, "LLAMA"], ["--optim adamw_8bit"], marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.slow
def test_all_that_the_search_proposes_can_be_launched(simulator, bases, config, command, refused):
    """Each change is one that the launcher, the recipe and the strategy accept; the 8-bit optimizer is not simulated."""
    number = 1 if config == "single" else 4
    more = ON_FOUR.get(config, [])
    argv = [str(CONFIGS / f"{config}.yaml"), *BF16, *more, "--num_processes", str(number), *command_of(bases, command)]
    request = read_request(argv)
    first = job_of(request, "h100")
    before = planning.simulated(simulator, first)
    search = Search(simulator, before, first, lambda changes: job_of(request, "h100", changes))
    changes = [*savings(before.args, first.env), *speedups(before.args, first.env)]
    for change in changes:
        load_trial(search.make_job([change]))  # which neither the launcher nor the recipe refuses
    own = OWN_KINDS.get(config)
    found = search.simulate([(change,) for change in changes if not own or change.kind in own])
    assert list(search.failed) == refused, search.failed
    assert {p.prediction.world_size for p in found} <= {number, 2 * number}
    needs = {str(p.changes[0]): p.prediction.outcome.peak for p in found if p.keeps_trajectory}
    whole = [change for change in needs if change.startswith("config fsdp_full.yaml")]
    assert len(whole) == {"ddp": 3, "single": 2}.get(config, 0)
    assert all(needs[change] < before.outcome.peak for change in whole)


@pytest.mark.parametrize("config, flags, expected", [
    ("fsdp_hybrid", ["--parallelism_config_dp_replicate_size", "4", "--parallelism_config_dp_shard_size", "1"], (2, 2)),
    ("fsdp_hybrid", HYBRID, (1, 4)),
])  # fmt: skip
def test_fewer_replicas_have_more_shards(config, flags, expected):
    first = job(config, C4, *flags, num_processes=4)
    args, _ = load_trial(first)
    (fewer,) = [change for change in savings(args, first.env) if change.kind == "shard"]
    replicas, shards = expected
    assert fewer.launch == (
        "--parallelism_config_dp_replicate_size", str(replicas), "--parallelism_config_dp_shard_size", str(shards),
        "--parallelism_config_cp_size", "1",
    )  # fmt: skip


def test_pairs_on_the_named_machines_come_before_more_machines():
    """If no single change on the machines that were named is enough, pairs of them are tried, and stand before more machines."""

    def simulate(jobs: list[Job]) -> list[Outcome]:
        """Two of the changes save a GiB each; with twice as many GPUs the run needs 3."""
        saved = [sum(word in ("false", "adafactor") for word in one.command) for one in jobs]
        return [outcome((3 if o.env["WORLD_SIZE"] == "4" else 5 - n) * GIB) for o, n in zip(jobs, saved, strict=True)]

    request = read_request([str(CONFIGS / "fsdp_full.yaml"), "--num_processes", "2", *C4, "--whole_logits", "true"])
    first = job_of(request, "l4")
    before = prediction_of(first, outcome(5 * GIB), replace(GPUS["l4"], memory=4 * GIB - 1))
    told: list[str] = []
    search = Search(simulate, before, first, lambda changes: job_of(request, "l4", changes), tell=told.append)
    found = search.fitting()
    shown = [in_words(p.changes) for p in found]
    assert shown == ["--whole_logits false and --optim adafactor", "2 x as many nodes"]
    at = told.index("No single change fits; now pairs of changes")
    assert all(" and " not in text and "does not fit" in text for text in told[:at])
    assert " and " in told[at + 1] and told[at + 1].count("Tried ") == 1


@pytest.mark.parametrize("flags, change", [
    (["--num_processes", "2"], Change("rows", (), ("--per_device_train_batch_size", "1"))),
    (["--num_processes", "2", *RECOMPUTE], Change("recompute", ("--fsdp_activation_checkpointing", "false"))),
    (["--nodes", "2", "--gpus-per-node", "4"], Change("nodes", more_nodes=2)),
    (["--num_processes", "4"], Change("config", ("--num_processes", "4"), config="ddp.yaml")),
])  # fmt: skip
def test_a_proposal_can_be_pasted(flags, change):
    """The command is the run that was simulated, and names nothing twice."""
    request = read_request([str(CONFIGS / "fsdp_full.yaml"), *flags, *C4, "--config_overrides", "hidden_size=64"])
    simulated = job_of(request, "h100", [change])
    words = shlex.split(planning.to_paste(request, [change]))
    assert words[:2] == ["accelerate", "launch"]
    at = words.index(C4[0])
    assert words[at:] == simulated.command
    launch = [{"$MACHINE_RANK": "0", "$FIRST_MACHINE": "head"}.get(word, word) for word in words[2:at]]
    launch += [] if "head" in launch else ["--main_process_ip", "head"]
    assert launch_environment([*launch, *words[at:]]) == simulated.env
    named = [word for word in words if word.startswith("--") and word != "--config_overrides"]
    assert len(named) == len({*named})


def test_the_first_answer_comes_at_once(monkeypatch):
    """What the run needs is told before the search begins; then a line for each trial; then whole commands."""
    told: list[str] = []

    class Fake:
        number = 0

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def __call__(self, jobs: list[Job]) -> list[Outcome]:
            told.append(f"{len(jobs)} jobs")
            self.number += len(jobs)
            return [outcome((3 if "adafactor" in one.command else 30) * GIB) for one in jobs]

    monkeypatch.setattr(planning, "Simulator", Fake)
    argv = [str(CONFIGS / "fsdp_full.yaml"), "--num_processes", "2", *C4]
    plan(["--gpu", "l4", *argv], told.append)
    assert told[0] == "1 jobs" and "30.00 of 22.30 GiB on l4" in told[1] and told[2].endswith(" jobs")
    trials = [text for text in told if text.startswith("Tried ")]
    assert len(trials) == 9 and told[3] == trials[0]
    (fitting,) = [text for text in trials if ", does not fit" not in text and "could not be tried" not in text]
    tried, command = fitting.splitlines()
    assert re.search(", fits(;|$)", tried) and command.startswith("    accelerate launch --config_file ")
    last = told[-2].splitlines()
    assert "Nothing that keeps the loss trajectory makes it fit" in last
    at = last.index("It fits with these changes (another loss trajectory):")
    assert last[at + 1].startswith("  --optim adafactor: 3.00 GiB")
    assert re.fullmatch("    accelerate launch --config_file .*--optim adafactor", last[at + 2])
    told.clear()
    plan(["--no_search", "--gpu", "l4", *argv], told.append)
    assert [text for text in told if text.endswith(" jobs")] == ["1 jobs"]


def test_a_config_alone_is_enough_of_a_model(tmp_path):
    """The message that a model is missing says so."""
    args = load_recipe(ROOT / "recipes/sft.py").Args(model_name_or_path=str(tmp_path))
    refuses(r"config\.json alone is enough", config_of, args, error=NotSimulatedError)
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path)
    assert config_of(args).hidden_size == 64
    (tmp_path / "config.json").write_text("{")
    assert "is enough here" not in refuses("cannot be read", config_of, args, error=NotSimulatedError)


def test_what_is_faster_and_the_largest_batch():
    """Of a run that fits: changes are proposed that fit and take less time, the fastest first; batches grow until one does not fit."""
    batches = {2: 3, 4: 3.5, 8: 3.9, 16: 5}  # GiB, by rows
    seconds = {1: 1.0, 2: 0.8, 4: 0.7}  # by --checkpoint_every_n_layers

    def simulated(one: Job) -> Outcome:
        args, _ = load_trial(one)
        if one.env["FSDP_ACTIVATION_CHECKPOINTING"] != "true":  # the fastest, which does not fit
            return replace(outcome(5 * GIB), seconds=0.6)
        found = outcome(int(batches[args.per_device_train_batch_size] * GIB))
        return replace(found, seconds=seconds[args.checkpoint_every_n_layers])

    def simulate(jobs: list[Job]) -> list[Outcome]:
        return [simulated(one) for one in jobs]

    argv = [str(CONFIGS / "fsdp_full.yaml"), *RECOMPUTE, "--num_processes", "2", *C4, "--total_batch_size", "32"]
    request = read_request(argv)
    first = job_of(request, "l4")
    before = prediction_of(first, replace(outcome(3 * GIB), seconds=1.0), replace(GPUS["l4"], memory=int(3.95 * GIB)))
    search = Search(simulate, before, first, lambda changes: job_of(request, "l4", changes))
    assert [str(p.changes[0])[-1] for p in search.faster()] == ["4", "2"]
    assert search.largest_batch() == 8
    before = replace(before, gpu=replace(GPUS["l4"], memory=int(3.6 * GIB)))
    assert Search(simulate, before, first, search.make_job).largest_batch() == 4


def test_targets_have_a_unit():
    """The JSON counts targets, and says whether they are tokens or images."""
    facts = prediction_of(job("fsdp_full", C4), outcome(3 * GIB), GPUS["l4"]).facts()
    assert facts["unit"] == "images" and facts["targets_per_second"] == facts["step"]["targets"] == 2
    assert not [name for name in (*facts, *facts["step"]) if "token" in name]


def test_hours():
    """To the end where the arguments say the number of steps, else for the rows of the data."""
    slow = replace(outcome(3 * GIB), seconds=36)
    steps = prediction_of(job("fsdp_full", [*DEEPVIT, "--max_steps", "200"]), slow, GPUS["l4"])
    assert steps.facts()["hours"] == pytest.approx(2) and "; 200 steps take at least 2 hours" in steps.report()
    rows = prediction_of(job("fsdp_full", DEEPVIT), slow, GPUS["l4"])
    assert rows.facts()["hours"] is None and rows.facts()["hours_of_a_million_rows"] == pytest.approx(1250)
    assert "; a million rows take at least 1,250 hours an epoch" in rows.report()
    drawing = Prediction(replace(slow, before=24), SimpleNamespace(max_steps=200, num_iterations=2), GPUS["l4"], {})
    assert drawing.hours == pytest.approx(200 * 24 / 3600), "every second step draws"
    assert "(plus copies" not in rows.report()
    offloaded = prediction_of(job("fsdp_full", DEEPVIT), replace(slow, host_peak=GIB), GPUS["l4"])
    assert "at least 36 s (plus " in offloaded.report()
    steps.outcome.before = 24
    assert "; passes before the micro-batches take 24 s of the step" in steps.report()


def test_a_muon_that_costs_too_much_is_named():
    """Its time is that of each step, whatever its size; it keeps one moment of a matrix, and ranks have whole ones."""
    of_muon = replace(outcome(3 * GIB), seconds=36, optimizer=4.0, by_muon=400, trained=1000)
    command = job("fsdp_full", [*C4, "--optim", "muon"])
    assert "Muon takes 11% of" in prediction_of(command, of_muon, GPUS["l4"]).report()
    assert "Muon" not in prediction_of(command, replace(of_muon, optimizer=3.0), GPUS["l4"]).report()
    assert "Muon" not in prediction_of(command, replace(of_muon, by_muon=0), GPUS["l4"]).report()
    assert prediction_of(command, of_muon, GPUS["l4"]).checkpoint == 12_000 - 4 * 400
    assert sizes_of(command) == (0, [0])


def test_the_size_of_a_checkpoint():
    """Weights in fp32 and two moments; under FULL_STATE_DICT the weights once more."""
    found = replace(outcome(3 * GIB), trained=1000)
    for config, size in (("fsdp_full", 12_000), ("fsdp_full_state_dict", 16_000)):
        assert prediction_of(job(config, C4), found, GPUS["l4"]).checkpoint == size


def test_memory_of_a_node(bases):
    """Each process of a node reads the whole model, or one, or none; it is gone when a checkpoint is copied."""
    command, found = command_of(bases, [*SFT, "LLAMA"]), replace(outcome(3 * GIB), parameters=GIB, trained=GIB)
    for config, readers in (("fsdp_full", 0), ("fsdp1_full", 1), ("ddp", 4)):
        prediction = prediction_of(job(config, command, num_processes=4), found, GPUS["l4"])
        host = {"processes": 8 * GIB, "copy of a checkpoint": 24 * GIB}
        host |= {"weights while loading": readers * 4 * GIB} if readers else {}
        assert prediction.host == host and prediction.host_peak == 32 * GIB
    alone = prediction_of(job("ddp", [*command, "--use_peft"], num_processes=4), replace(found, trained=1), GPUS["l4"])
    assert alone.host_peak == (8 + 4 * 4) * GIB


@pytest.mark.parametrize("name", ["A100 40 GB", "a100-40", "nvidia_a100-sxm4-40gb"])
def test_the_size_of_a_gpu_decides_which_is_meant(name):
    refuses(r"did you mean 'a100_40'\?", check_gpu, name)
    assert known_as(name.replace("40", "80")) == "a100" and {known_as(known) for known in GPUS} == {*GPUS}


@pytest.mark.parametrize("flags", [["--gpu", "tpu", "--no_search"], ["--no_search", "--gpu", "tpu"]])
def test_flags_may_stand_before_the_config(command, flags):
    assert "--gpu tpu: not known; known are a10g" in command("plan", *flags, CONFIGS / "fsdp_full.yaml", *C4).stderr


@pytest.mark.parametrize(
    "words",
    [["--nodes", "2", "--shell", "a.yaml", "b.py"], ["--shell", "--nodes=2", "a.yaml", "b.py"], ["a.yaml", "--shell", "b.py"]],
)  # fmt: skip
def test_shell_may_stand_anywhere(monkeypatch, command, words):
    monkeypatch.setattr(preflight_module, "preflight", lambda argv: ("said", " ".join(argv)))
    done = command("preflight", *words)
    assert done.stdout == " ".join(word for word in words if word != "--shell") + "\n" and done.stderr == "said\n"


def test_the_usage_names_the_command():
    for argv in ([], ["a.yaml"], ["--no_search"]):
        refuses(r"usage: python -m accelerate_recipes plan CONFIG", plan, argv, print)
    refuses(r"usage: python -m accelerate_recipes preflight CONFIG", read_request, [])


@pytest.mark.parametrize("flags, said", [
    (["--json", "{tmp}"], "--json {tmp}: it is a folder; name a file"),
    (["--json", "{tmp}/file/plan.json"], "--json {tmp}/file/plan.json: Not a directory"),
    (["--json", "/proc/nowhere/plan.json"], "--json /proc/nowhere/plan.json: No such file or directory"),
    (["--json", "{tmp}/gone/plan.json"], "{tmp}/gone is a link to nowhere, which is not there"),
])  # fmt: skip
def test_what_cannot_be_written_is_told_before_the_first_simulation(flags, said, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    monkeypatch.setattr(planning, "Simulator", lambda: pytest.fail("simulated"))
    flags = [word.format(tmp=tmp_path) for word in flags]
    refuses(re.escape(said.format(tmp=tmp_path)), plan, [*flags, str(CONFIGS / "fsdp_full.yaml"), *C4], print)


def test_a_line_for_each_simulation(simulator, monkeypatch):
    """Each is told when it is there, with what is left, behind a line at the start."""
    told: list[str] = []
    monkeypatch.setattr(simulator, "tell", told.append)
    found = [*simulator([job("fsdp_full", [*C4, "--lerning_rate", "1"])] * 3)]
    assert len(found) == 3 and all(isinstance(error, ConfigError) for error in found)
    begun, *lines = told
    assert begun.startswith("Simulating 3 steps, ") and len(lines) == 3
    for done, line in enumerate(lines, 1):
        assert re.fullmatch(rf"Simulated {done} of 3 in \d+ s(; about \d+ s left)?", line) and ("left" in line) == (
            done < 3
        )


def test_the_first_line_needs_no_library():
    code = "import sys; from recipe_tools import commands as m; sys.argv = ['x', 'plan']; sys.modules['torch'] = None; m.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Planning: "), done
    assert "torch" in done.stderr  # which could not be imported


@pytest.mark.slow
def test_the_command(at_the_root, capsys, tmp_path):
    """`plan` prints a report and writes JSON; what cannot be simulated, it names."""
    laptop = ["accelerate_configs/fsdp_full.yaml", "--nodes", "2", "--gpus-per-node", "8", "recipes/c4.py"]
    laptop += [
        "--config", "recipes/configs/c4/laptop.yaml", "--total_batch_size", "16", "--per_device_train_batch_size",
        "1",
    ]  # fmt: skip
    plan(["--gpu", "a100", "--no_search", "--json", str(tmp_path / "plan.json"), *laptop], print)
    found = capsys.readouterr().out
    assert "Memory of a GPU: " in found and "fits" in found
    facts = json.loads((tmp_path / "plan.json").read_text())
    memory = facts["memory"]
    assert memory["needed"] == memory["in_use"] + memory["allocator"] + OUTSIDE <= memory["of_gpu"]
    assert memory["of_gpu"] == GPUS["a100"].memory
    assert sum(memory["by_kind"].values()) == memory["in_use"]
    assert facts["gpus"] == 16 and facts["step"]["collectives"]["allgather_base 16"]["inside_node"] is False
    refuses("--gpu tpu: not known; known are a10g", plan, ["--gpu", "tpu", *laptop], print)
    refuses(r"config.json of no/model cannot be read: ", plan, [*laptop, "--model_name_or_path", "no/model"], print)


@pytest.mark.long
def test_the_page_shows_what_the_command_prints(at_the_root):
    """The example of docs/plan.md, a model of 8 billion parameters on 32 GPUs, is what its command prints."""
    page = (ROOT / "docs/plan.md").read_text()
    (command,) = re.findall(r"^python -m accelerate_recipes plan (.*)$", page, re.M)
    shown = page.split("```\n")[2].splitlines()
    told: list[str] = []
    plan(shlex.split(command), told.append)
    lines = "\n".join(text for text in told if not text.startswith(("Simulat", "Tried "))).splitlines()
    assert lines[:-1] == shown[:-1]


@pytest.mark.slow
def test_preflight_refuses_what_does_not_fit(simulator, monkeypatch, tmp_path):
    """With --gpu, preflight says what a GPU needs, and refuses a run that needs more."""
    monkeypatch.chdir(tmp_path)
    shared = contextlib.nullcontext(simulator)  # it takes seconds to start one
    monkeypatch.setattr(planning, "Simulator", lambda: shared)
    argv = [str(CONFIGS / "fsdp_full.yaml"), "--nodes", "1", "--gpus-per-node", "2", *C4]
    argv += ["--train_files", f"{tmp_path}/t.jsonl", "--validation_files", f"{tmp_path}/v.jsonl"]
    for name in ("t", "v"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} b"}) + "\n")
    said, _ = preflight(["--gpu", "l4", *argv])
    assert "Memory of a GPU: " in said and ": fits" in said
    monkeypatch.setitem(GPUS, "l4", replace(GPUS["l4"], memory=OUTSIDE))
    nothing = "none of the single changes"
    refuses(rf"Memory of a GPU: .* does not fit; {nothing}", preflight, ["--gpu", "l4", *argv])
    monkeypatch.setitem(GPUS, "l4", replace(GPUS["l4"], memory=int((OUTSIDE + 9 * 2**20) / 0.95)))
    said, _ = preflight(["--gpu", "l4", *argv])
    assert "fits, but only just" in said.splitlines()[-1]
    large = [
        *argv, "--config_overrides", "hidden_size=512", "intermediate_size=4096", "--per_device_train_batch_size",
        "4",
    ]  # fmt: skip
    needed = planning.simulated(simulator, job_of(read_request(large), "h100")).needed
    monkeypatch.setitem(GPUS, "l4", replace(GPUS["l4"], memory=needed - 1))
    refuses("does not fit; it fits with --fsdp_activation_checkpointing true: ", preflight, ["--gpu", "l4", *large])
    # On a machine with a GPU, that is the one.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA L4")
    assert read_request([argv[0], *argv[5:]]).gpu == "l4"
    elsewhere = [argv[0], "--nodes", "2", *argv[5:]]  # that of the job may be another
    assert read_request(elsewhere).gpu == read_request(argv).gpu == ""
    assert read_request([argv[0], "--cpu", *argv[5:]]).gpu == ""
    refuses("the accelerate YAML comes first, not sft", read_request, ["sft", "--model_name_or_path", "x"])
    refuses("the accelerate YAML comes first, not --config_file", read_request, ["--config_file", *argv])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "Memory of a GPU" not in preflight(["--gpu", "l4", "--no_plan", *argv])[0]
    refuses("--gpu tesla: not known; known are a10g", preflight, ["--gpu", "tesla", *argv])


@pytest.mark.slow
@pytest.mark.parametrize("config, command, said", [
    ("fsdp1_full", C4, "FSDP1"),
    ("fsdp_fp8", C4, "mixed_precision: fp8"),
    ("ddp", [*C4, "--optim", "muon"], "--optim muon under DDP"),
    ("fsdp_full", [str(ROOT / "recipes/template.py")], "template.py: it defines no trial(args)"),
    ("fsdp_full", [str(ROOT / "recipes/sft_vlm.py"), *SFT[1:], "."], "take two steps (--max_steps 2)"),
    ("fsdp_full", [*GRPO, ".", "--max_prompt_length", "0"], "GRPO with --max_prompt_length 0"),
    ("fsdp_full", [*GRPO, ".", "--use_vllm"], "GRPO with --use_vllm"),
    ("fsdp_full", [*DPO, ".", "--precompute_ref_batch_size", "4"], "DPO with --precompute_ref_batch_size 4"),
    ("fsdp_full", [*T5, "BART"], "BART: whether its decoder uses a mask depends on values"),
    ("fsdp_full", [*SFT, ".", "--loss_type", "dft"], "SFT with --loss_type dft"),
])  # fmt: skip
def test_what_is_not_simulated_is_named(simulator, bases, config, command, said):
    flags = [] if config == "fsdp_fp8" else FP32
    (found,) = simulator([job(config, command_of(bases, command), *flags)])
    assert isinstance(found, NotSimulatedError) and said in str(found)


def test_a_simulator_that_is_killed():
    with pytest.raises(ConfigError, match="ended with exit code -9, perhaps for want of memory"), Simulator() as killed:
        killed.child.kill()
        list(killed([Job({}, [])]))


@pytest.mark.parametrize("number", [2, 3, 7, 12])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_the_time_that_simulations_still_take(number, at_once):
    """Of simulations that differ by a third, some at once, each estimate is less than two times off, or half of one."""
    durations = [30.0 + 10 * (i * 5 % 3) / 2 for i in range(number)]
    free, ends = [0.0] * at_once, []
    for seconds in durations:
        core = min(range(at_once), key=free.__getitem__)
        free[core] += seconds
        ends.append(free[core])
    for done in range(1, number):
        told = max(ends[:done])  # results come in order
        left = max(ends) - told
        found = simulate.simulations_take(durations[:done], told, number, at_once)
        assert left / 2 - 20 <= found <= 2 * left + 20, (done, left, found)


def test_allocator():
    """Sizes are rounded, freed blocks are used again and joined, pools of streams are apart, and the host does not count."""
    page = 2 * 2**20

    def size_of(*changes: tuple) -> int:
        return reserved([Event(*change) for change in changes])

    def gpu(key: int, size: int, stream: int = 0) -> tuple:
        return key, size, ACTIVATIONS, stream

    assert size_of(gpu(1, 1)) == size_of(gpu(1, 1), gpu(2, 511)) == page
    assert size_of(gpu(1, page + 1)) == 2 * page
    assert size_of(gpu(1, page), gpu(1, 0), gpu(2, page)) == page
    assert size_of(gpu(1, page), gpu(2, page), gpu(1, 0), gpu(2, 0), gpu(3, 2 * page)) == 2 * page
    assert size_of(gpu(1, page), gpu(1, 0), gpu(2, page, stream=1)) == 2 * page
    assert size_of((1, page, HOST, 0)) == 0
