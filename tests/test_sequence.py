"""Tests of rows that ranks share; tests/test_equivalence.py shows that they change no trajectory."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from arithmetic import Watch
from helpers import CHILDREN, CONFIGS, ROOT, refuses
from tiny import tiny_config, tiny_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GraniteMoeHybridConfig, Mamba2Config, MiniMaxConfig, T5Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import accelerate_recipes.models.document_attention  # noqa: F401  # registers it
from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.checks import lever_problems, lever_warnings
from accelerate_recipes.losses import count_next_tokens, next_token_loss, next_tokens
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.documents import DOCUMENTS, boundaries
from accelerate_recipes.models.probes import check_shared_masks, model_sharing_problems
from accelerate_recipes.models.shared_rows import attend_shared, part_of_rows, share_attention, whole_rows
from accelerate_recipes.ranks import data_world_size, ranks_a_row
from recipe_tools.preflight import preflight
from recipe_tools.request import launch_environment, launch_flags

SCRIPT = CHILDREN / "toy.py"
CHESS = [str(ROOT / "recipes/chess.py"), "--config", str(ROOT / "recipes/configs/chess/laptop.yaml")]
LONG = str(CONFIGS / "fsdp_long.yaml")


def rank_of(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def test_parts_are_the_whole():
    """The ranks' targets are those of the whole rows, each once; documents are those of whole rows on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (3, 12), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(12 - n)]) for n in (3, 6, 11)])
    labels = torch.where(positions == 0, IGNORE_INDEX, ids)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels, **boundaries(positions)}
    for size in (1, 2, 3, 4, 6, 12):
        parts = [part_of_rows(batch, rank_of(rank, size)) for rank in range(size)]
        targets = [next_tokens(part).view(3, -1) for part in parts]
        assert torch.equal(torch.cat(targets, 1), next_tokens(batch).view(3, 12))
        assert sum(count_next_tokens(part) for part in parts) == count_next_tokens(batch)
        for name in ("input_ids", "position_ids"):
            assert torch.equal(torch.cat([part[name] for part in parts], 1), batch[name])
        for part in parts:
            assert torch.equal(part["cu_seqlens"], batch["cu_seqlens"])
            assert torch.equal(part["row_position_ids"], positions)
    refuses(r"cp_size 5 .* 12 tokens", part_of_rows, batch, rank_of(0, 5))
    assert part_of_rows(batch, None) is batch


class OwnAttention(torch.nn.Module):
    """Layer that keeps what it does not know, as a model's class may do with arguments for its attention."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, hidden, **_):
        return self.attend(self, hidden, hidden, hidden, None)[0]


@pytest.mark.parametrize("mode", [True, False])
def test_attention_that_does_not_get_the_group_is_an_error(mode):
    """In training and in evaluation; where rows are whole it is as ever."""

    def attend(module, query, key, value, mask):
        return value.transpose(1, 2), None

    layer = OwnAttention(lambda *args: attend_shared(attend, *args)).train(mode)
    hidden = torch.ones(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"OwnAttention did not get the ranks .* parallelism_config_cp_size to 1"):
        layer(hidden, sequence_group="unused")
    with whole_rows():
        assert layer(hidden).shape == (1, 3, 2, 4)
    with pytest.raises(ConfigError):
        layer(hidden)


def test_accelerate_still_drops_masks():
    """As long as its hooks do, upstream.keep_masks must keep them away; if this fails, they may stay."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = Seen()

        def forward(self, mask):
            return self.self_attn(attention_mask=mask)

    class Seen(torch.nn.Module):
        def forward(self, attention_mask=None, is_causal=False):
            return attention_mask

    layer = Layer()
    assert layer("a mask") == "a mask"
    _attach_context_parallel_hooks(layer)
    assert layer("a mask") is None


ROPE = {"rope_theta": 1e4, "factor": 2.0}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}


@pytest.mark.parametrize("config, size, words", [
    (tiny_config(), 4, ""),
    (tiny_config(rope_parameters={"rope_type": "linear", **ROPE}), 2, ""),
    (tiny_config("mistral", sliding_window=8), 2, ""),
    (tiny_config("gemma3_text"), 2, ""),
    (tiny_config("qwen3"), 2, ""),
    (tiny_config("mixtral"), 2, ""),
    (tiny_config(), 3, "llama has 4 query heads, .*cp_size 3 .* 1, 2, 4"),
    (tiny_config(rope_parameters={"rope_type": "dynamic", **ROPE}), 2, r"rotary embedding of llama \(dynamic\)"),
    (tiny_config("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=2048), 2, r"phi3 \(longrope\) depends on the last position"),
    (tiny_config("gemma2"), 2, "gemma2 has softcapped scores"),
    (tiny_config("gpt_oss"), 2, "gpt_oss has attention sinks"),
    (tiny_config("falcon"), 2, "falcon has an attention of its own"),
    (Mamba2Config(), 2, "mamba2 has .*"),
    (tiny_config("qwen3_next"), 2, "qwen3_next has an attention of its own"),
    (GraniteMoeHybridConfig(), 2, "layers of granitemoehybrid mix positions beside attention"),
    (MiniMaxConfig(), 2, "layers of minimax mix positions beside attention"),
    (tiny_config("lfm2", layer_types=["conv", "full_attention"]), 2, "lfm2 mix positions"),
    (tiny_config("llama4_text", layer_types=["chunked_attention", "full_attention"]), 2, "llama4_text has attention in chunks"),
    (T5Config(), 2, "t5 is an encoder-decoder"),
], ids=lambda value: value.model_type if hasattr(value, "model_type") else "")  # fmt: skip
def test_models_that_can_share_rows(config, size, words):
    found = model_sharing_problems(config, size)
    assert bool(found) == bool(words)
    assert not words or re.search(words, " ".join(found))


def test_experts_that_are_balanced_in_another_way(monkeypatch):
    """A model's own loss would be that of a part of a row; without it, ranks can share rows."""
    own = "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func"
    monkeypatch.setattr(own, lambda logits, *_: logits[0].square().mean())
    (problem,) = model_sharing_problems(tiny_config("mixtral"), 2)
    assert "mixtral balances its experts by a loss of its own" in problem
    assert model_sharing_problems(tiny_config("mixtral", router_aux_loss_coef=0.0), 2) == []


def test_the_kernel_is_documents_unless_the_model_needs_another():
    llama = tiny_config()
    assert choose("auto", llama, torch.float32, True, is_shared=True) == (DOCUMENTS, "ranks share a row")
    assert choose("sdpa", llama, torch.float32, True, is_shared=True) == ("sdpa", "")
    narrow = tiny_config(hidden_size=16)
    assert choose("auto", narrow, torch.float32, True, is_shared=True) == ("sdpa", "the model has heads 4 wide")
    for name in ("eager", "flex_attention"):
        with pytest.raises(ConfigError, match=rf"{name}: rows that ranks share .* give auto"):
            choose(name, llama, torch.float32, True, is_shared=True)
    check_shared_masks(llama, "sdpa", 8192)
    check_shared_masks(llama, DOCUMENTS, 2**20)
    refuses(r"--max_length 8200: with sdpa, .* at most 8192 tokens", check_shared_masks, llama, "sdpa", 8200)
    mixtral = tiny_config("mixtral")
    check_shared_masks(mixtral, DOCUMENTS, 8)
    with pytest.raises(ConfigError, match=r"mixtral cannot balance its experts; give --attn_implementation doc"):
        check_shared_masks(mixtral, "sdpa", 8)


def chess_args(*flags: str) -> TrainArgs:
    return resolve(shipped.load(CHESS[0]).Args, [*CHESS[1:], *flags], 1)[0]


def environment(*flags: str) -> dict[str, str]:
    return launch_environment(["--config_file", LONG, *flags, "recipe.py"])


def test_what_a_launch_says(monkeypatch, at_the_root):
    """The batch is divided among the groups of ranks that share rows; a length that they cannot divide is an error."""
    env = environment("--num_processes", "4", "--parallelism_config_dp_shard_size", "2")
    assert (ranks_a_row(env), data_world_size(env), ranks_a_row({"PARALLELISM_CONFIG_CP_SIZE": "2"})) == (2, 2, 1)
    assert lever_problems(chess_args(), env, 0) == lever_warnings(chess_args(), env, 2) == []
    (problem,) = lever_problems(chess_args("--max_length", "255"), env, 0)
    assert re.search("--max_length 255 .*cp_size 2.* 254 or 256", problem)
    (warning,) = lever_warnings(chess_args(), env | {"LOCAL_WORLD_SIZE": "3"}, 3)
    assert "2 ranks share a row, but a machine has 3 processes" in warning
    monkeypatch.setattr(os, "environ", env)  # `datasets` replaces it too
    assert (ranks_a_row(), data_world_size()) == (2, 2)
    shards = ["--num_processes", "4", "--parallelism_config_dp_shard_size", "2"]
    found, _ = preflight([LONG, *shards, *CHESS])
    assert "16 sequences a step = 2 groups of 2 processes that share rows x 8 x 1 micro-batches" in found
    with pytest.raises(ConfigError, match=r"llama has 4 query heads, .*cp_size 3 "):
        preflight([LONG, "--num_processes", "3", "--parallelism_config_cp_size", "3", *CHESS, "--max_length", "255"])
    c4 = [str(ROOT / "recipes/c4.py"), "--config", str(ROOT / "recipes/configs/c4/laptop.yaml")]
    command = [LONG, *shards, *c4, "--total_batch_size", "15", "--num_streams", "25"]
    text = refuses("15 is not a multiple of .* 4 x 2 groups of 2 .* = 8", preflight, command)
    assert "totals that work: 8 or 16" in text
    assert "25 is not a multiple of 2 groups of 2 processes that share rows; numbers that work: 1, 5, 25" in text
    for name in ("sft", "dpo"):
        trl = [str(ROOT / f"recipes/{name}.py"), "--model_name_or_path", "m", "--dataset_name", "d"]
        refuses(r"a row is whole on each process; .*sft\.py with --packing", preflight, [LONG, *trl])


def test_sizes_and_kernels_that_cannot_be(tmp_path):
    """They are refused in words, and the remedy is none that the launch would refuse next."""
    config = tmp_path / "halves.yaml"
    config.write_text((CONFIGS / "fsdp_long.yaml").read_text().replace("cp_size: 2", "cp_size: 2.0"))
    refuses(r"parallelism_config_cp_size is 2\.0; it must be a whole number", preflight, [str(config), *CHESS])
    with pytest.raises(ConfigError, match=r"flash_attention_2: rows that ranks share .* need documents"):
        preflight([LONG, *CHESS, "--attn_implementation", "flash_attention_2"])
    alone = ["--num_processes", "1", "--parallelism_config_cp_size", "1"]
    refuses(r"take accelerate_configs/fsdp_full\.yaml", preflight, [LONG, *alone, *CHESS])
    replicas = ["--nodes", "2", "--gpus-per-node", "4", "--parallelism_config_dp_replicate_size", "2"]
    said, assignments = preflight([LONG, *replicas, *CHESS, "--per_device_train_batch_size", "1"])
    assert "with 8 processes" in said and "4 groups of 2 processes that share rows" in said
    assert "--parallelism_config_dp_shard_size 2" in assignments


@pytest.mark.parametrize("nodes, gpus, size, replicas, flags", [
    (1, 8, None, None, "1 4"), (1, 8, 8, None, "1 1"), (4, 8, 8, None, "1 4"), (2, 2, 2, None, "1 2"),
    (1, 2, 16, None, "1 1"), (2, 4, None, 2, "2 2"), (2, 4, 1, 4, "4 2"), (2, 4, None, 0, "0 8"),
])  # fmt: skip
def test_a_job_has_as_many_shards_as_are_left(nodes, gpus, size, replicas, flags):
    replicate, shard = flags.split()
    wanted = ["--parallelism_config_dp_replicate_size", replicate, "--parallelism_config_dp_shard_size", shard]
    assert launch_flags(CONFIGS / "fsdp_long.yaml", nodes, gpus, size, replicas)[4:] == wanted


def elements(tensor: torch.Tensor) -> int:
    """Count the elements for which a tensor's memory has room."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


@pytest.fixture
def shared_attention():
    """Let this process share attention, and undo it."""
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in (DOCUMENTS, "sdpa")}
    share_attention()
    yield
    for name, attend in before.items():
        ALL_ATTENTION_FUNCTIONS.register(name, attend)


def bytes_kept(size: int, length: int) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps on a rank, and the most elements of a tensor of the whole step."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = tiny_model(attention=DOCUMENTS, max_position_embeddings=length, **sizes)
    positions = torch.cat([torch.arange(length // 4), torch.arange(length - length // 4)])[None]
    batch = boundaries(positions)
    batch |= {"input_ids": torch.empty_like(positions, device="meta"), "position_ids": positions.to("meta")}
    batch |= {"labels": batch["input_ids"], "cu_seqlens": batch["cu_seqlens"].to("meta")}
    dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    kept, weights = {}, {id(parameter) for parameter in model.parameters()}

    def keep(tensor):
        if id(tensor) not in weights:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
        return tensor

    try:
        batch = part_of_rows(batch, dist.group.WORLD if size > 1 else None)
        with whole_rows(), Watch(elements) as watch:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = next_token_loss(model, batch)
            loss.backward()
    finally:
        dist.destroy_process_group()
    return sum(kept.values()), watch.largest


def test_memory_of_a_row_is_divided(shared_attention, monkeypatch):
    """At 32,768 tokens no tensor grows with the square of the length, and a rank keeps its part of the activations."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know the meta device
    length = 32768
    whole, _ = bytes_kept(1, length)
    for size in (2, 4):
        kept, largest = bytes_kept(size, length)
        assert kept == pytest.approx(whole / size, rel=0.1)
        assert largest < length**2 / 64


@pytest.mark.slow
def test_architectures(forks, tmp_path):
    """Loss and gradients are those of whole rows: with windows, tied weights, experts, and one to as many heads for keys."""
    out, script = tmp_path / "out", CHILDREN / "shared_models.py"
    forks.succeed(out, script=script, config="fsdp_long")
    found = json.loads((out / "result.json").read_text())
    (balanced, _), (alone, _) = (found[name]["losses"] for name in ("mixtral, balanced", "mixtral"))
    assert balanced > 1.05 * alone
    assert len(found) == 9
    for name, model in found.items():
        assert model["attention"] == DOCUMENTS, name
        shared, whole = model["losses"]
        assert shared == pytest.approx(whole, rel=1e-5), name
        assert max(model["distances"].values()) < 1e-5, (name, model["distances"])
