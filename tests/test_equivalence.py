"""Tests that the arithmetic does not depend on the strategy: one trajectory for all.

The runs are forked, with the variables that `accelerate launch` would set. tests/test_chess.py launches one of FSDP2, and the
slow tests one of each other kind.
"""

import json

import pytest
from helpers import CHILDREN, by_time, launch_ok, near

# Name: config, processes, sequences per forward pass, launch flags, number of FSDP units, share of the parameters
# that a rank holds. FSDP2's units are 3 layers, the embedding, and norm with output layer (without wrapping only the root).
FOUR = ("--num_processes", "4")
HYBRID_OF_ROWS = ("--num_processes", "8")
HYBRID_OF_ROWS += ("--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2")
STRATEGIES = {
    "one process": ("single", 1, 8, (), 0, 1),
    "accumulation": ("single", 1, 2, (), 0, 1),
    "ddp": ("ddp", 2, 2, (), 0, 1),
    "fsdp2": ("fsdp_full", 2, 4, (), 5, 1 / 2),
    "fsdp2 on 4, accumulation": ("fsdp_full", 4, 1, FOUR, 5, 1 / 4),
    "gradients and optimizer, accumulation": ("fsdp_grad_op", 2, 1, (), 5, 1 / 2),
    "hybrid 2 x 2, accumulation": ("fsdp_hybrid", 4, 1, (), 5, 1 / 2),
    "offload": ("fsdp_offload", 2, 4, (), 5, 1 / 2),
    "activation checkpointing": ("fsdp_full", 2, 4, ("--fsdp_activation_checkpointing", "true"), 5, 1 / 2),
    "no wrap": ("fsdp_no_wrap", 2, 4, (), 3, 1 / 2),
    "rows shared by 2": ("fsdp_long", 2, 4, (), 5, 1 / 2),
    "rows shared by 2, 2 shards": ("fsdp_long", 4, 2, (*FOUR, "--parallelism_config_dp_shard_size", "2"), 5, 1 / 4),
    "rows shared by 4, with 2 heads for keys": ("fsdp_long", 4, 4, (*FOUR, "--parallelism_config_cp_size", "4"), 5, 1 / 4),
    "rows shared by 2, hybrid 2 x 2": ("fsdp_long", 8, 1, HYBRID_OF_ROWS, 5, 1 / 4),
    "fsdp1": ("fsdp1_full", 2, 4, (), 4, 1 / 2),
    "fsdp1 by size": ("fsdp1_size_wrap", 2, 4, ("--fsdp_min_num_params", "5000"), 5, 1 / 2),
}  # fmt: skip
FAST = (
    "one process", "accumulation", "ddp", "fsdp2", "hybrid 2 x 2, accumulation", "activation checkpointing",
    "rows shared by 2", "rows shared by 2, 2 shards", "fsdp1",
)  # fmt: skip
NAMES = by_time(STRATEGIES, FAST)
SCRIPT = CHILDREN / "steps.py"


@pytest.fixture(scope="module")
def run_steps(run_result):
    """Run tests/children/steps.py under a strategy, perhaps with more flags of the launcher."""

    def result(name: str, *args: object, more: tuple[str, ...] = ()) -> dict:
        config, world_size, size, flags, _, _ = STRATEGIES[name]
        where = {"config": config, "num_processes": world_size, "flags": (*flags, *more)}
        return run_result("--per_device_train_batch_size", size, *args, **where)

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp1"])
def test_launched_is_forked(run_steps, tmp_path, name):
    """`accelerate launch` gives the numbers of the forked run, bit for bit."""
    config, _, size, flags, _, _ = STRATEGIES[name]
    args = ("--output_dir", tmp_path / "out", "--per_device_train_batch_size", size)
    launch_ok(tmp_path, config, SCRIPT, *args, flags=flags)
    found, forked = json.loads((tmp_path / "out/result.json").read_text()), run_steps(name)
    found["args"]["output_dir"] = forked["args"]["output_dir"]
    assert found == forked


@pytest.mark.parametrize("name", NAMES)
def test_one_trajectory(run_steps, name):
    """Losses and gradient norms of 4 steps agree to 1e-5, and the strategy is the named one, not N copies."""
    reference, found = run_steps("one process"), run_steps(name)
    _, world_size, _, _, units, share = STRATEGIES[name]
    assert found["world_size"] == world_size
    assert found["units"] == units
    assert found["local"] == pytest.approx(share * found["total"], rel=0.01)
    assert len(found["trajectory"]) == 4
    assert found["trajectory"] == near(reference["trajectory"])


@pytest.mark.parametrize("name", NAMES)
def test_same_start(run_steps, name):
    """Every parameter and buffer of a new model is the same bit for bit under any sharding."""
    assert run_steps(name)["start"] == run_steps("one process")["start"]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_restores_everything(run_steps, name):
    """Steps 3 and 4 are repeated from the checkpoint of step 2, bit for bit."""
    found = run_steps(name)
    assert found["resumed"] == found["trajectory"][2:]


@pytest.mark.parametrize("name", NAMES)
def test_generation(run_steps, name):
    """5 prompts of uneven length, divided over the ranks, are continued as one process continues them."""
    assert run_steps(name)["texts"] == run_steps("one process")["texts"]


@pytest.mark.slow
def test_dropout(run_steps):
    """At one world size dropout is bit-equal, also through a resume and where activations are recomputed.

    Fails without upstream.restore_rng_in_recompute, or with a loader that draws from the global generator.
    """
    plain = run_steps("fsdp2", "--dropout", 0.2)
    recomputed = run_steps("activation checkpointing", "--dropout", 0.2)
    assert plain["trajectory"] == recomputed["trajectory"]
    assert plain["trajectory"] != run_steps("fsdp2")["trajectory"]
    assert plain["resumed"] == plain["trajectory"][2:]


def test_tied_embeddings(run_steps):
    tied = ("--tie_word_embeddings", "true")
    found, wanted = run_steps("fsdp2", *tied), run_steps("one process", *tied)
    assert found["start"] == wanted["start"] and "lm_head.weight" not in found["start"]
    assert found["trajectory"] == near(wanted["trajectory"])
    assert found["resumed"] == found["trajectory"][2:]


BY_DOCUMENTS = {"fsdp2", "rows shared by 2"}
SLOW_BY_DOCUMENTS = {"fsdp1", "activation checkpointing", "ddp", "rows shared by 4, with 2 heads for keys"}


@pytest.mark.parametrize("name", by_time(STRATEGIES, BY_DOCUMENTS, SLOW_BY_DOCUMENTS))
def test_attention_by_documents(run_steps, name):
    """The trajectory is that of sdpa with a mask, also after a resume; generation, which pads, uses sdpa."""
    found, wanted = run_steps(name, "--attn_implementation", "documents"), run_steps("one process")
    assert found["trajectory"] == near(wanted["trajectory"])
    assert found["resumed"] == found["trajectory"][2:]
    assert found["texts"] == wanted["texts"]


IN_BF16 = {"one process", "fsdp2"}
SLOW_IN_BF16 = {"ddp", "hybrid 2 x 2, accumulation", "activation checkpointing", "fsdp1"}
# Half of the last place of a bf16 number is 1/512 of it. Losses of two runs that round at different places differ by less than
# twice that, even after AdamW, which enlarges small differences of a small gradient.
BF16 = 2**-8


BF16_OF_LAUNCHER = ("--mixed_precision", "bf16")


@pytest.fixture(scope="module")
def run_bf16(run_result):
    """Run tests/children/precision.py under a strategy in bf16."""

    def result(name: str) -> dict:
        config, world_size, _, flags, _, _ = STRATEGIES[name]
        size = 1 if "accumulation" in name else 4 // world_size
        where = {"config": config, "num_processes": world_size, "flags": (*flags, *BF16_OF_LAUNCHER)}
        return run_result("--per_device_train_batch_size", size, script=CHILDREN / "precision.py", **where)

    return result


# Its model has one, which ranks cannot share
ONE_HEAD = [name for name in STRATEGIES if not name.startswith("rows shared")]


@pytest.mark.parametrize("name", by_time(ONE_HEAD, IN_BF16, SLOW_IN_BF16))
def test_bf16(run_bf16, name):
    """Losses agree also on rows of 4,096 tokens, where frequencies in bf16 would be radians off; buffers stay fp32.

    Between the layers FSDP computes in bf16, autocast in fp32. Strategies that round at the same places give the same losses
    until the weights change; with buffers in bf16, FSDP1's first loss would be 1.6e-4 off.
    """
    found, single = run_bf16(name), run_bf16("one process")
    alike = run_bf16("fsdp2") if STRATEGIES[name][0].startswith("fsdp") else single
    assert found["buffers"] == single["buffers"]
    assert {dtype for dtype, _ in found["buffers"].values()} == {"torch.float32"}
    assert found["losses"][:2] == pytest.approx(alike["losses"][:2], rel=1e-6)
    assert found["losses"] == pytest.approx(single["losses"], rel=BF16)
    assert found["norms"] == pytest.approx(single["norms"], rel=8 * BF16)


@pytest.mark.slow
def test_shared_rows_in_bf16(run_steps):
    """The losses are those of FSDP2 with whole rows, within the rounding of bf16."""
    names = ("fsdp2", "rows shared by 2")
    found = [
        run_steps(name, "--attn_implementation", "documents", more=BF16_OF_LAUNCHER)["trajectory"] for name in names
    ]
    for whole, shared in zip(*found, strict=True):
        assert shared[0] == pytest.approx(whole[0], rel=BF16)
        assert shared[1] == pytest.approx(whole[1], rel=8 * BF16)


@pytest.mark.parametrize(("name", "backend"), [
    pytest.param("one process", "inductor", marks=pytest.mark.long),
    pytest.param("fsdp2", "inductor", marks=pytest.mark.long),
    pytest.param("activation checkpointing", "inductor", marks=pytest.mark.slow),
    pytest.param("rows shared by 2", "eager", marks=pytest.mark.slow),
    pytest.param("rows shared by 2", "inductor", marks=pytest.mark.long),
])  # fmt: skip
def test_compiled(run_steps, name, backend):
    """Compiled layers change the kernels, not the losses; generation and resume still work."""
    by_layer = ("--dynamo_backend", backend, "--dynamo_use_regional_compilation")
    kernel = ("--attn_implementation", "documents") if "shared" in name else ()  # shared rows have no other by default
    found, wanted = run_steps(name, *kernel, more=by_layer), run_steps("one process")
    assert found["trajectory"] == near(wanted["trajectory"])
    assert found["resumed"] == found["trajectory"][2:]
    assert found["texts"] == wanted["texts"]
