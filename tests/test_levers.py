"""Tests that each lever does what it says, and changes nothing else in the arithmetic. Two forked ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from helpers import CHILDREN, log_of, losses, read_metrics
from tiny import tiny_config
from transformers import AutoModelForCausalLM, get_scheduler

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.run import Run

RECOMPUTED = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
KAHAN = ("--optim", "adamw_bf16_kahan")
# Tolerance of losses where something is kept in 8 bits: ranks differ in the last bits of a gradient, which changes its
# rounding by 1/256; the effect of an update on the loss is far smaller.
BF16 = 1e-3
SCRIPT = CHILDREN / "toy.py"


@pytest.fixture(scope="module")
def levers(run):
    """Results and logs of tests/children/levers.py."""

    def result(*args: object, **options: str) -> tuple[dict, str]:
        out = run(*args, script=CHILDREN / "levers.py", **options)
        return json.loads((out / "result.json").read_text()), log_of(out)

    return result


@pytest.mark.parametrize("config, n, calls", [
    ("fsdp_full", 1, [2, 2, 2]),
    ("fsdp_full", 2, [2, 1, 2]),
    pytest.param("fsdp1_full", 1, [2, 2, 2], marks=pytest.mark.slow),
    ("fsdp1_full", 2, [2, 1, 2]),
])  # fmt: skip
def test_each_nth_layer_is_recomputed(levers, config, n, calls):
    """A recomputed layer is called twice a step; losses are those of a run without recomputation, bit for bit."""
    plain, log = levers(config=config)
    assert plain["calls"] == [1, 1, 1] and "recomputed" not in log
    found, log = levers("--checkpoint_every_n_layers", n, config=config, **RECOMPUTED)
    assert found["calls"] == calls and found["losses"] == plain["losses"]
    assert f"activations of {sum(calls) - 3} of 3 layers recomputed" in log


def test_where_inputs_are_kept_on_the_cpu_the_other_layers_keep_theirs(levers):
    env = RECOMPUTED | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}
    found, log = levers("--checkpoint_every_n_layers", 2, **env)
    assert found["calls"] == [2, 1, 2] and found["offloads"] == 2
    assert found["losses"] == levers()[0]["losses"]
    assert "activations of 2 of 3 layers recomputed from inputs kept on the CPU" in log


@pytest.mark.slow
def test_compiled_layers_keep_what_the_budget_allows():
    """The smaller the budget, the fewer bytes wait for the backward pass; loss and gradients stay."""
    found = {}
    for budget in (0.0, 0.5, 1.0):  # the last, the default, stays in force
        torch._dynamo.reset()
        AcceleratorState._reset_state(reset_partial_state=True)  # that of an earlier test knows no plugin
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
        run = Run(TrainArgs(activation_memory_budget=budget), Accelerator(cpu=True, dynamo_plugin=plugin))
        run.shard(new_model(tiny_config(), "sdpa"))
        kept = {}

        def note(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.arange(64)[None]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = run.model(ids, labels=ids).loss
        loss.backward()
        gradients = [p.grad for p in run.model.parameters()]
        found[budget] = sum(kept.values()), [loss.detach(), *gradients]
    AcceleratorState._reset_state(reset_partial_state=True)
    least, half, whole = (kept for kept, _ in found.values())
    assert least < half < whole
    for _, values in found.values():
        for value, expected in zip(values, found[1.0][1], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


# Each precision with gradients summed in the other one.
@pytest.mark.parametrize("precision, dtype", [("no", "bf16"), ("bf16", "fp32"), ("pure bf16", "fp32")])
@pytest.mark.parametrize("config", ["fsdp_full", pytest.param("fsdp1_full", marks=pytest.mark.slow)])
def test_gradients_are_summed_over_the_ranks_in_the_precision_asked_for(levers, config, dtype, precision):
    """The requested precision holds whatever the layers compute in, and does not change the precision of kept weights."""
    args = KAHAN if precision == "pure bf16" else ()
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"} if precision == "bf16" else {}
    found, log = levers("--reduce_dtype", dtype, *args, config=config, **env)
    assert ("precision no, weights bfloat16 |" in log) == (precision == "pure bf16")
    assert found["reduced"] == [{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]]
    assert found["stored"] == ["torch.bfloat16" if precision == "pure bf16" else "torch.float32"]
    assert found["losses"] == pytest.approx(levers()[0]["losses"], rel=3e-3)


@pytest.fixture(scope="module")
def whole_runs(run):
    """Output directories of whole runs of the toy recipe with each optimizer: 10 steps, with all checkpoints."""

    def result(optim: str, config: str = "fsdp_full", num_processes: int = 2) -> Path:
        return run(*flags_of(optim, config), config=config, num_processes=num_processes)

    return result


def flags_of(optim: str, config: str) -> list[object]:
    flags = ["--optim", optim, "--save_total_limit", 0]
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="not among the requirements")
        flags += ["--hidden_size", 64]  # it leaves smaller parameters in 32 bits
    if config == "ddp" and optim == "adamw_bf16_kahan":
        flags += ["--reduce_dtype", "bf16"]
    return flags


def tolerance(optim: str) -> float:
    return 1e-5 if optim in ("adafactor", "muon") else BF16


EVERYWHERE = [
    ("adamw_bf16_kahan", "fsdp_full"),
    pytest.param("adamw_bf16_kahan", "ddp", marks=pytest.mark.slow),
    pytest.param("adafactor", "fsdp_full", marks=pytest.mark.slow),
    ("adamw_8bit", "ddp"),
    ("muon", "fsdp_full"),
    *(pytest.param("muon", config, marks=pytest.mark.slow) for config in ("fsdp_hybrid", "ddp", "fsdp_long")),
]  # fmt: skip


@pytest.mark.parametrize("optim, config", EVERYWHERE)
def test_an_optimizer_does_not_depend_on_the_strategy(whole_runs, optim, config):
    num_processes = 4 if config == "fsdp_hybrid" else 2
    wanted, found = losses(whole_runs(optim, "single", 1)), losses(whole_runs(optim, config, num_processes))
    assert len(wanted) == 10 and found == pytest.approx(wanted, rel=tolerance(optim))


@pytest.mark.parametrize("optim, dtype", [("adamw_bf16_kahan", torch.bfloat16), ("adafactor", torch.float32)])
def test_an_export_has_the_precision_that_was_trained(whole_runs, optim, dtype):
    model = AutoModelForCausalLM.from_pretrained(whole_runs(optim) / "export", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize(
    "config, num_processes",
    [("fsdp_full", 3), ("ddp", 2), pytest.param("fsdp_hybrid", 4, marks=pytest.mark.slow)],
)  # fmt: skip
def test_muon_makes_each_matrix_orthogonal_once_in_the_world(forks, tmp_path, config, num_processes):
    """Also where ranks divide neither rows nor experts. The ranks share the work, and the losses are those of one process."""
    found = {}
    for name, ranks in (("single", 1), (config, num_processes)):
        forks.succeed(tmp_path / name, script=CHILDREN / "muon.py", config=name, num_processes=ranks)
        found[name] = json.loads((tmp_path / name / "result.json").read_text())
    matrices = 4 * (7 + 4 + 2 * 4)  # steps, times a dense layer, attention, and two matrices of each expert
    assert found["single"]["made orthogonal"] == [matrices]
    shared = found[config]["made orthogonal"]
    assert sum(shared) == matrices and len(shared) == num_processes and min(shared) > 0
    assert found[config]["losses"] == pytest.approx(found["single"]["losses"], rel=1e-5)


OPTIMIZERS = ("adamw_bf16_kahan", "adafactor", "adamw_8bit", "muon")


@pytest.mark.parametrize("optim, before, after", [
    *((optim, 2, 2) for optim in OPTIMIZERS),
    ("adamw_bf16_kahan", 2, 1),
    *(pytest.param(optim, 2, 1, marks=pytest.mark.slow) for optim in OPTIMIZERS[1:]),
])  # fmt: skip
def test_an_optimizer_is_resumed(forks, whole_runs, tmp_path, optim, before, after):
    """A new process resumes step 3 bit for bit, and on another number of ranks within rounding."""
    config = {1: "single", 2: "ddp" if optim == "adamw_8bit" else "fsdp_full"}
    whole, out = whole_runs(optim, config[before], before), tmp_path / "out"
    out.mkdir()
    shutil.copytree(whole / "checkpoint-3", out / "checkpoint-3")
    forks.succeed(out, *flags_of(optim, config[after]), config=config[after], num_processes=after)
    assert f"checkpoint-3 (step 3, saved by {before} x" in log_of(out)
    if before == after:
        assert losses(out) == losses(whole)
    else:
        assert losses(out) == pytest.approx(losses(whole), rel=tolerance(optim))


def test_a_branch_decays_from_any_checkpoint(forks, tmp_path):
    """A run that stays at its peak goes on, in another folder, with the decay that the branch asks for."""
    stable = ("--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs")
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    forks.succeed(trunk, *stable, "num_decay_steps=1", "--save_total_limit", 0)
    begun = ("--resume_from_checkpoint", trunk / "checkpoint-3")
    forks.succeed(branch, *stable, "num_decay_steps=4", "--max_steps", 8, *begun)
    optimizer, settings = torch.optim.SGD([torch.zeros(1)], lr=1e-2), {"num_decay_steps": 4}
    (share,) = get_scheduler("warmup_stable_decay", optimizer, 2, 8, scheduler_specific_kwargs=settings).lr_lambdas
    found = {record["step"]: record["learning_rate"] for record in read_metrics(branch) if "learning_rate" in record}
    assert [found[step] for step in range(4, 9)] == [1e-2 * share(step - 1) for step in range(4, 9)]
    assert found[4] == 1e-2 and found[8] < found[7] < found[6] < 1e-2
