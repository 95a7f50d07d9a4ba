"""Tests of adapters: one trajectory under every sharding; checkpoints and exports hold what was trained; PEFT loads them.

The base is a small Llama with weights of a useful size; the toy recipe trains adapters in it for 10 steps.
"""

import contextlib
import itertools
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toy
from helpers import (
    CHILDREN,
    by_time,
    change_json,
    evaluations,
    killed_in_step,
    log_of,
    near,
    refused,
    refuses,
    trajectory,
)
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file, save_file
from tiny import change_weights, save_base, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint import files
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.checkpoint.weight_files import saved_tensors
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.metrics import num_weights
from accelerate_recipes.models import adapters
from accelerate_recipes.models.adapters import NAME, add_adapters, merged, peft_name, targets, weight_of
from accelerate_recipes.models.base import folder_of_base
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.pretrained import mapped_weights
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.models.weights import linear_layers_and_experts
from recipe_tools.check_export import check_export
from recipe_tools.preflight import preflight
from recipe_tools.space import space_needed

SCRIPT = CHILDREN / "toy.py"
LAST = 10
CHECKPOINTING = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
# Name: config, processes, sequences per forward pass, environment.
STRATEGIES = {
    "one process, accumulation": ("single", 1, 2, {}),
    "ddp": ("ddp", 2, 4, {}),
    "fsdp2": ("fsdp_full", 2, 4, {}),
    "fsdp2, accumulation": ("fsdp_full", 2, 2, {}),
    "every process reads the base": ("fsdp_full", 2, 4, {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}),
    "gradients and optimizer, accumulation": ("fsdp_grad_op", 2, 1, {}),
    "hybrid 2 x 2": ("fsdp_hybrid", 4, 2, {}),
    "offload": ("fsdp_offload", 2, 4, {}),
    "no wrap": ("fsdp_no_wrap", 2, 4, {}),
    "full state dict": ("fsdp_full_state_dict", 2, 4, {}),
    "activation checkpointing": ("fsdp_full", 2, 4, CHECKPOINTING),
    "rows shared by 2": ("fsdp_long", 2, 4, {}),
    "rows shared by 2, 2 shards": ("fsdp_long", 4, 2, {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}),
}
CHECKPOINTED = "activation checkpointing"
FAST = ("one process, accumulation", "ddp", "fsdp2")
SLOW = ("fsdp2, accumulation", "hybrid 2 x 2", "rows shared by 2", CHECKPOINTED)
FOUR_BITS = ("fsdp2", "ddp")
DROPOUT = ("--lora_dropout", 0.2)
# A recipe refuses 4 bits without a GPU; tests/children/fork_server.py allows it.
IN_4_BITS = ("--load_in_4bit",)
ON_CPU = {"FOUR_BITS_ON_CPU": "1"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return toy.make_base(tmp_path_factory.mktemp("base") / "base", seed=1)


@pytest.fixture(scope="module")
def arguments(base) -> tuple:
    """Return arguments without dropout, which differs with the number of ranks.

    With adapters of rank 3 on four ranks, one rank has no row.
    """
    return ("--model_name_or_path", base, "--use_peft", "--lora_r", 3, "--lora_alpha", 6, "--lora_dropout", 0)


@pytest.fixture(scope="module")
def run_under(run):
    """Run the toy under a strategy."""

    def output(name: str, *args: object) -> Path:
        config, num_processes, size, env = STRATEGIES[name]
        env = env | (ON_CPU if IN_4_BITS[0] in args else {})
        return run("--per_device_train_batch_size", size, *args, config=config, num_processes=num_processes, **env)

    return output


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    """Compute a model's loss on the toy's evaluation data."""
    batch = toy.batch_of(toy.Args().num_rows)
    return (next_token_loss(model.eval(), batch) / count_next_tokens(batch)).item()


@pytest.mark.parametrize("name, variant", [
    *by_time(STRATEGIES, FAST, SLOW, ()),
    *by_time(itertools.islice(STRATEGIES, 1, None), (), FOUR_BITS, IN_4_BITS),
    *by_time(["fsdp2"], (), None, ("--use_dora",)),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_one_trajectory(run_under, name, variant):
    """Losses and gradient norms agree to 1e-5, and the model learns."""
    reference = trajectory(run_under("one process, accumulation", *variant))
    found = trajectory(run_under(name, *variant))
    before, after = evaluations(run_under(name, *variant))
    assert len(found) == LAST and after < before - 0.1
    assert found == near(reference)


@pytest.fixture
def no_repacking(monkeypatch):
    """Switch bitsandbytes' repacking off, as tests/children/fork_server.py does."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def in_4_bits(base: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load a model in 4 bits by transformers alone."""
    settings = {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype, "bnb_4bit_use_double_quant": True}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=quantization)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare tensors bit by bit, also packed ones whose bits form no number."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("name", by_time(FAST, ["fsdp2"]))
def test_4_bits_stay_as_they_were_rounded(run_under, base, no_repacking, name):
    weights = dict(in_4_bits(base, torch.float32).named_parameters())
    packed = {key for key in weights if "_proj" in key}
    assert len(packed) == 7 * 3 and all(weights[key].shape[1:] == (1,) for key in packed)
    for key, tensor in load_file(run_under(name, *IN_4_BITS) / "frozen.safetensors").items():
        assert same_bits(tensor, weights[key.replace(".base_layer", "")].data), key


def test_4_bits(run_under, base, tmp_path, no_repacking):
    """They train as whole weights do, but for the rounding; PEFT loads the adapters beside them."""
    out = run_under("fsdp2", *IN_4_BITS)
    for (loss, _), (wanted, _) in zip(trajectory(out), trajectory(run_under("fsdp2")), strict=True):
        assert loss != wanted and loss == pytest.approx(wanted, rel=0.05)  # 4 bits of weights as coarse as these
    rounded = in_4_bits(base, torch.float32)
    assert num_weights(rounded.get_submodule("model.layers.0.mlp.up_proj").weight) == 32 * 64
    loaded = PeftModel.from_pretrained(rounded, out / "export")
    assert loss_of(loaded) == pytest.approx(evaluations(out)[-1], rel=1e-5)
    with pytest.raises(ConfigError, match="checkpoint-10 holds adapters of a model in 4 bits"):
        export(out / f"checkpoint-{LAST}", tmp_path / "merged", merge_adapter=True)


@pytest.mark.slow
def test_4_bits_under_bf16(forks, arguments, base, tmp_path, no_repacking):
    """FSDP gathers 4-bit weights, which are packed in bf16, unchanged."""
    weights = dict(in_4_bits(base, torch.bfloat16).named_parameters())
    losses = []
    for config, num_processes in (("single", 1), ("fsdp_full", 2)):
        out = tmp_path / config
        args = (*arguments, *IN_4_BITS, "--per_device_train_batch_size", 4)
        env = {"ACCELERATE_MIXED_PRECISION": "bf16"} | ON_CPU
        forks.succeed(out, *args, config=config, num_processes=num_processes, **env)
        for key, tensor in load_file(out / "frozen.safetensors").items():
            assert same_bits(tensor, weights[key.replace(".base_layer", "")].data), key
        losses.append([loss for loss, _ in trajectory(out)])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_4_bits_are_refused_where_they_cannot_be(base, monkeypatch, at_the_root, tmp_path):
    """4 bits are refused where they do not work, before anything is loaded; all reasons come at once."""
    monkeypatch.setattr("accelerate_recipes.arguments.adapters.find_spec", lambda name: None)
    monkeypatch.setattr("recipe_tools.request.num_accelerators", lambda: 0)
    argv = ["accelerate_configs/fsdp_full.yaml", *CHESS, "--model_name_or_path", str(base)]
    argv += ["--output_dir", str(tmp_path / "out"), "--use_peft", "--load_in_4bit", "--merge_adapter", "--use_dora"]
    said = r"(?s)pip install bitsandbytes.*--merge_adapter would .*--use_dora needs the exact length.*4bit needs a GPU, and"
    refuses(said, preflight, argv)


@pytest.mark.parametrize("name", by_time((*FAST, "offload"), FAST))
def test_what_trains_is_what_peft_trains(run_under, base, name):
    """The trained parameters are as many as PEFT counts; all others stay the same bit for bit, under each strategy."""
    model = AutoModelForCausalLM.from_pretrained(base)
    before = dict(model.named_parameters())
    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    trained, total = get_peft_model(model, config).get_nb_trainable_parameters()
    said = re.findall(r"adapters: ([\d,]+) parameters are trained, .* of ([\d,]+) parameters", log_of(run_under(name)))
    assert [int(number.replace(",", "")) for number in said[0]] == [trained, total]
    frozen = load_file(run_under(name) / "frozen.safetensors")
    assert len(frozen) == len(before)
    for key, tensor in frozen.items():
        assert torch.equal(tensor, before[key.replace(".base_layer", "")]), key


def test_first_weights(forks, arguments, base, out):
    """An adapter's first weights depend on seed and name alone; in fp32, and distributed like PEFT's; also on two processes."""

    def first(**settings) -> dict[str, torch.Tensor]:
        model = load_model(str(base), "sdpa", dtype=torch.bfloat16)
        torch.manual_seed(len(settings))  # does not matter
        args = toy.Args(model_name_or_path=str(base), use_peft=True, use_dora=True, lora_r=3, **settings)
        add_adapters(model, args)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    whole, few, other = first(), first(lora_target_modules=["v_proj"]), first(seed=43)
    assert len(few) == 9 and all(torch.equal(tensor, whole[name]) for name, tensor in few.items())
    weights = load_file(base / "model.safetensors")
    for name, tensor in whole.items():
        assert tensor.dtype == torch.float32
        layer, kind = name.split(".lora_")
        assert torch.equal(tensor, other[name]) == (kind[0] != "A")
        if kind[0] == "A":
            assert tensor.abs().max() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.05)
            assert not torch.equal(tensor, tensor.bfloat16().float())
        elif kind[0] == "B":
            assert not tensor.any()
        else:
            assert torch.equal(tensor, weights[f"{layer}.weight"].bfloat16().float().norm(dim=1))
    forks.succeed(out, *arguments, "--max_steps", 1, "--learning_rate", 0)
    exported = load_file(out / "export/adapter_model.safetensors")
    assert len(exported) == 2 * 7 * 3
    for name, tensor in whole.items():
        if "magnitude" not in name:
            assert torch.equal(tensor, exported[f"base_model.model.{name.replace('.default', '')}"]), name


def test_a_checkpoint_holds_the_adapters_alone(run_under, base):
    out = run_under("fsdp2")
    state = saved_tensors(out / f"checkpoint-{LAST}")
    assert len(state) == 2 * 7 * 3 and all("lora_" in name for name in state)
    metadata = dcp.FileSystemReader(out / f"checkpoint-{LAST}/state").read_metadata().state_dict_metadata
    moments = {key.split(".", 2)[2] for key in metadata if key.startswith("optimizer.state.")}
    assert moments == {f"{name}.{kind}" for name in state for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert files.read_marker(out / f"checkpoint-{LAST}")["base_model"]["name"] == str(base)


@pytest.mark.parametrize(
    "num_processes, variant", [(2, DROPOUT), pytest.param(4, (), marks=pytest.mark.slow)], ids=["dropout", "4 ranks"]
)
def test_killed_and_resumed(forks, arguments, run_under, out, num_processes, variant):
    """A run killed by SIGKILL in step 8 resumes step 6; with dropout, on the same number of ranks, bit for bit."""
    args = (*variant, "--async_save", "false", "--per_device_train_batch_size", 8 // num_processes)
    assert forks.run(out, *arguments, *args, **killed_in_step(8)) == -9
    assert [path.name for path in files.candidates(out)] == ["checkpoint-3", "checkpoint-6"]
    code = forks.run(out, *arguments, *args, num_processes=num_processes)
    assert code == 0 and "(step 6, saved by 2 x" in log_of(out), log_of(out)[-3000:]
    if num_processes == 2:
        assert trajectory(out) == trajectory(run_under("fsdp2", *variant)) != trajectory(run_under("fsdp2"))
    else:
        assert trajectory(out) == near(trajectory(run_under("fsdp2")))


def test_another_model_is_refused(forks, arguments, run_under, base, tmp_path):
    """A model with one changed number, but the same name and shapes, is refused for resume and merge; other files are not."""
    out, file = tmp_path / "out", base / "model.safetensors"
    shutil.copytree(run_under("fsdp2"), out)
    last = out / f"checkpoint-{LAST}"
    weights, whole, name = load_file(file), file.read_bytes(), "model.layers.2.mlp.down_proj.weight"
    corner = torch.zeros_like(weights[name])
    corner[-1, -1] = 1e-6
    try:
        change_weights(base, lambda weights: weights | {name: weights[name] + corner})
        assert forks.run(out, *arguments, "--max_steps", LAST + 1) == 2
        merge = partial(export, last, tmp_path / "merged", merge_adapter=True)
        refuses(r"checkpoint-10 holds adapters of .* has other weights", merge)
        assert not list(tmp_path.glob("merged*"))
        file.write_bytes(file.read_bytes()[:-4])
        refuses(r"model\.safetensors cannot be read: ", merge)
        file.unlink()
        for part in (0, 1):
            names = sorted(weights)[part::2]
            save_file({name: weights[name] for name in names}, base / f"{part}.safetensors", metadata={"format": "pt"})
        index = {"weight_map": {name: f"{i % 2}.safetensors" for i, name in enumerate(sorted(weights))}}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        merge()
    finally:
        for path in (*base.glob("[01].safetensors"), *base.glob("*.index.json")):
            path.unlink()
        file.write_bytes(whole)
    assert re.search(r"error: .*checkpoint-10 holds adapters of .* has other weights", log_of(out)), log_of(out)[-3000:]


@pytest.mark.parametrize(
    "variant", [(), pytest.param(("--use_dora", "--use_rslora"), marks=pytest.mark.slow)], ids=["lora", "dora"]
)
def test_export(run_under, base, variant):
    """PEFT loads the adapters, and transformers the merged model; both give the last evaluation's loss."""
    out = run_under("fsdp2", *variant, "--merge_adapter")
    before, after = evaluations(out)
    assert len({path.stat().st_mode for path in (out / "export").rglob("*") if path.is_file()}) == 1  # of any new file
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert loss_of(plain) == pytest.approx(before, rel=1e-5)
    loaded = PeftModel.from_pretrained(plain, out / "export/adapter")
    assert loss_of(loaded) == pytest.approx(after, rel=1e-5)
    names = get_peft_model_state_dict(loaded, save_embedding_layers=False).keys()
    assert load_file(out / "export/adapter/adapter_model.safetensors").keys() == names
    merged = AutoModelForCausalLM.from_pretrained(out / "export")
    assert loss_of(merged) == pytest.approx(after, rel=1e-5)
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]


MERGED = ("fsdp_full", 2, ("--use_peft", "--merge_adapter"))


@pytest.mark.parametrize("head, config, num_processes, flags", [
    ("own", *MERGED), ("equal", "single", 1, ()),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("own", "fsdp_full", 2, ()), ("equal", *MERGED),
    )),
])  # fmt: skip
def test_an_output_layer_that_the_config_calls_tied(forks, tmp_path, out, head, config, num_processes, flags):
    """The weights in the files decide whether it is the embedding: the run evaluates, and exports, what was read."""
    base = toy.make_base(tmp_path / "base", seed=3)
    change_json(base / "config.json", tie_word_embeddings=True)
    if head == "equal":
        change_weights(base, lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    short = ("--max_steps", 2, "--lora_dropout", 0) if flags else ("--max_steps", 2)
    given = ("--model_name_or_path", base, *short, *flags)
    forks.succeed(out, *given, config=config, num_processes=num_processes)
    before, after = evaluations(out)
    assert before == pytest.approx(loss_of(AutoModelForCausalLM.from_pretrained(base)), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    assert after == pytest.approx(loss_of(model), rel=1e-5) and after != before
    is_tied = head == "equal"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert json.loads((out / "export/config.json").read_text())["tie_word_embeddings"] == is_tied


def test_export_without_merging(run_under, base):
    out = run_under("fsdp2")
    names = {path.name for path in (out / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    assert not names & {"config.json", "model.safetensors"}
    assert f"Low-rank adapters of {base}" in (out / "export/README.md").read_text()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "export")
    assert loss_of(loaded) == pytest.approx(evaluations(out)[-1], rel=1e-5)
    said = check_export(out / "export", ["w1 w2"], 3)
    assert "PeftModelForCausalLM" in said and "Answer: " in said


@pytest.mark.slow
def test_a_full_state_dict_is_pefts(run_under):
    assert (run_under("full state dict") / f"checkpoint-{LAST}/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("variant", [(), pytest.param(("--use_dora",), marks=pytest.mark.slow)], ids=["lora", "dora"])
def test_bf16(run_under, forks, arguments, base, out, variant):
    """Frozen weights are kept in bf16, adapters in fp32; the losses are those of fp32 except for rounding."""
    args = (*arguments, "--per_device_train_batch_size", 4, *variant, "--merge_adapter")
    forks.succeed(out, *args, ACCELERATE_MIXED_PRECISION="bf16")
    assert "precision bf16, weights bfloat16" in log_of(out)
    assert trajectory(out) == near(trajectory(run_under("fsdp2", *variant)), 0.02)
    whole = load_file(base / "model.safetensors")
    for key, tensor in load_file(out / "frozen.safetensors").items():
        assert torch.equal(tensor, whole[key.replace(".base_layer", "")].bfloat16()), key
    adapter = load_file(out / "export/adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in adapter.values())
    merged = load_file(out / "export/model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16} and merged.keys() == whole.keys()
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    assert loss_of(model) == pytest.approx(evaluations(out)[-1], rel=0.01)


CHESS = ("recipes/chess.py", "--train_files", "data/chess/games_20k.parquet")


def test_all_problems_at_once(at_the_root, tmp_path):
    where = ("--output_dir", str(tmp_path / "out"))
    argv = ["accelerate_configs/fsdp1_full.yaml", "--mixed_precision", "no", *CHESS, *where, "--from_scratch"]
    argv += ["--use_peft", "--lora_r", "0", "--lora_dropout", "1", "--optim", "adamw_bf16_kahan"]
    with refused(
        "--lora_r is 0", "--lora_dropout is 1", "keeps trained weights in bf16", "makes a new one", "FSDP1 joins",
        "--lora_target_modules is all-linear q_proj",
    ):  # fmt: skip
        preflight([*argv, "--lora_target_modules", "all-linear", "q_proj"])
    with pytest.raises(ConfigError, match=r"--lora_r has no effect without --use_peft(.|\n)*--merge_adapter has no"):
        preflight(["accelerate_configs/ddp.yaml", *CHESS, *where, "--from_scratch", "--lora_r", "8", "--merge_adapter"])


def test_preflight_knows_the_layers_and_the_space(base, at_the_root, tmp_path):
    argv = ["accelerate_configs/fsdp_full.yaml", *CHESS, "--model_name_or_path", str(base), "--use_peft"]
    argv += ["--output_dir", str(tmp_path / "out"), "--max_steps", "10", "--max_length", "32", "--lora_r", "4"]
    assert "Parameters: 40,416, of which 6,144 are trained" in preflight(argv)[0]
    with pytest.raises(ConfigError, match=r"--lora_target_modules query: no .* LlamaForCausalLM .* v_proj"):
        preflight([*argv, "--lora_target_modules", "q_proj", "query"])
    with pytest.raises(ConfigError, match="--lora_target_modules lm_head: no linear layer inside"):
        preflight([*argv, "--lora_target_modules", "lm_head"])
    full, adapter = 100_000_000, 1_000_000
    whole, few = TrainArgs(max_steps=10), TrainArgs(max_steps=10, use_peft=True)
    assert space_needed(whole, full, full, None)[0] == 1600_000_000
    assert space_needed(few, full, adapter, None)[0] == 16_000_000
    assert space_needed(replace(few, merge_adapter=True), full, adapter, None)[0] == 12_000_000 + 400_000_000


WEIGHTS = {"max_position_embeddings": toy.LENGTH, "pad_token_id": 0, "initializer_range": 0.1}
SHARED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MIXTURES = {
    # Switch off the loss that balances experts, which depends on the rows of a forward pass, not of a step.
    "mixtral": tiny_config("mixtral", router_aux_loss_coef=0.0, **WEIGHTS),
    "a layer of qwen2 is no mixture": tiny_config("qwen2_moe", mlp_only_layers=[0], **WEIGHTS),
    # Of these types, PEFT takes down_proj and similar names for experts.
    "a layer of qwen3 is no mixture": tiny_config("qwen3_moe", mlp_only_layers=[0], router_aux_loss_coef=0.0, **WEIGHTS),
    "glm4": tiny_config("glm4_moe", **SHARED, head_dim=8, **WEIGHTS),
}  # fmt: skip


def make_mixture(folder: Path, name: str) -> Path:
    """Make a mixture with files as on the Hub, where each matrix of an expert is a tensor."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MIXTURES[name])
    model.save_pretrained(folder)
    assert any(".experts.3." in key for key in load_file(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("name, in_parts", [*((name, True) for name in MIXTURES), ("mixtral", False)])
def test_experts(tmp_path, name, in_parts):
    """The merged model has the loss of the model with adapters; so has PEFT with the files that we write."""
    base = make_mixture(tmp_path / "base", name)
    if not in_parts:
        change_weights(base, lambda _: AutoModelForCausalLM.from_pretrained(base).state_dict())
    settings = {"use_peft": True, "lora_dropout": 0.0, "lora_r": 3, "merge_adapter": True, "use_rslora": True}
    args = toy.Args(model_name_or_path=str(base), **settings)
    model = load_model(str(base), "sdpa")
    config = add_adapters(model, args).config
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for key, parameter in trained.items():
            torch.nn.init.normal_(parameter, std=0.2 if "lora_B" in key else 0.1)
    before, wanted = loss_of(AutoModelForCausalLM.from_pretrained(base)), loss_of(model)
    assert abs(wanted - before) > 0.01
    adapter = {key: parameter.detach() for key, parameter in trained.items()}

    files = mapped_weights(folder_of_base(config.base_model_name_or_path, config.revision))
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(MIXTURES[name])
    weight_named = merged(plain, files, adapter, config)
    changed = {key: weight_named(key).contiguous() for key in files}
    shutil.copytree(base, tmp_path / "merged")
    save_file(changed, tmp_path / "merged/model.safetensors", metadata={"format": "pt"})
    assert loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) == pytest.approx(wanted, rel=1e-5)
    kept = {key for key in files if torch.equal(changed[key], files[key])}
    assert not [key for key in kept if re.search(r"_proj(\.weight)?$|\.w[123]\.", key)], (
        "all linear layers and experts have adapters"
    )

    config.save_pretrained(tmp_path / "adapter")
    tensors = {peft_name(key): tensor for key, tensor in adapter.items()}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert loss_of(loaded) == pytest.approx(wanted, rel=1e-5)


def test_experts_are_refused_where_they_cannot_be(monkeypatch, tmp_path):
    """Options that PEFT's adapters of experts lack are refused; adapters only in other layers are not."""
    base = str(make_mixture(tmp_path / "base", "mixtral"))
    model = load_model(base, "sdpa")
    args = {"model_name_or_path": base, "use_peft": True}
    attention = ["q_proj", "v_proj"]
    for setting, value in (("lora_dropout", 0.05), ("use_dora", True), ("load_in_4bit", True)):
        found = toy.Args(**args | {"lora_dropout": 0.0} | {setting: value})
        refuses(rf"experts .* --{setting}[^-]*; .*k_proj o_proj q_proj v_proj$", targets, model, found)
        assert targets(model, replace(found, lora_target_modules=attention)) == {"target_modules": attention}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ConfigError, match="not work with dynamo_backend in the accelerate YAML; change"):
        targets(model, toy.Args(**args, lora_dropout=0.0))
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    few = targets(model, toy.Args(**args, lora_dropout=0.0, lora_target_modules=["q_proj", "experts.down_proj"]))
    assert few == {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}


LLAMA_4 = {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}
GLM_4 = SHARED | {"head_dim": 8}
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("model_type", "more", "names", "experts"), [
    ("qwen2_moe", {}, SEVEN, 4), ("llama4_text", LLAMA_4, SEVEN, 2), ("glm4_moe", GLM_4, SEVEN, 2),
    ("glm4_moe", GLM_4, ["up_proj", "q_proj"], 0), ("qwen3_moe", {}, ["experts.down_proj"], 2),
    ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}, ["all-linear"], 8),
])  # fmt: skip
def test_names_of_layers_in_a_mixture(model_type, more, names, experts, tmp_path):
    """A short name adapts all linear layers of that name, and all of an expert; with more of its name, what it says."""
    save_base(tmp_path, new_bpe_tokenizer(["e2e4"], 300), model_type=model_type, **more)
    model = load_model(str(tmp_path), "sdpa")
    layers, of_experts = linear_layers_and_experts(model)
    args = {"model_name_or_path": str(tmp_path), "use_peft": True, "lora_target_modules": names}
    if names == ["up_proj", "q_proj"]:
        with pytest.raises(ConfigError, match=r"takes for experts \(up_proj\).*dropout .* k_proj o_proj q_proj v_proj"):
            targets(model, toy.Args(**args))
    add_adapters(model, toy.Args(**args, lora_dropout=0.0))
    adapted = {weight_of(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    wanted = {f"{name}.weight" for name in layers if name.rpartition(".")[2] in names}
    wanted |= {name for name in of_experts if experts and (len(names) != 1 or name.endswith(names[0]))}
    wanted = {*of_experts, *(f"{name}.weight" for name in layers)} if names == ["all-linear"] else wanted
    assert adapted == wanted and len(adapted & {*of_experts}) == experts


def test_names_that_peft_takes_for_experts(monkeypatch, base):
    """As PEFT converts them for each type of transformers; what it refuses there is one message."""
    for model_type, like in _MODEL_TO_CONVERSION_PATTERN.items():
        model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
        for name in {*itertools.chain(*adapters.NAMES_OF_EXPERTS.values()), "q_proj", "o_proj"}:
            config = LoraConfig(target_modules=[name])
            with contextlib.suppress(ValueError):
                convert_peft_config_for_transformers(config, model, None)
                is_taken = name in adapters.NAMES_OF_EXPERTS.get(like, ())
                assert (config.target_modules != {name}) == is_taken, (model_type, name)
    monkeypatch.setattr(adapters, "NAMES_OF_EXPERTS", {})
    args = toy.Args(model_name_or_path=str(base), use_peft=True, lora_target_modules=["up_proj"], lora_dropout=0.0)
    with pytest.raises(ConfigError, match=r"up_proj: Cannot convert .* gate_proj .*--lora_target_modules"):
        add_adapters(tiny_model("glm4_moe", **SHARED, head_dim=8), args)


def test_dora_on_a_row_of_zeros(tmp_path):
    toy.make_base(tmp_path, seed=1)
    model = load_model(str(tmp_path), "sdpa")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3:5] = 0
    with pytest.raises(ConfigError, match=r"2 of \d+ rows of model.layers.1.mlp.up_proj.weight"):
        add_adapters(model, toy.Args(model_name_or_path=str(tmp_path), use_peft=True, use_dora=True))


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows(base, tmp_path, tied):
    """Rows of new tokens begin as those of the model, are trained alone, and compute what PEFT's wrappers compute."""
    tokens, ids = [3, 50], torch.arange(60).unsqueeze(0)
    toy.make_base(tmp_path / "base", seed=1, tie_word_embeddings=tied)
    model, plain = (load_model(str(tmp_path / "base"), "sdpa") for _ in range(2))
    args = toy.Args(model_name_or_path=str(tmp_path / "base"), use_peft=True, lora_dropout=0.0)
    adapter = add_adapters(model, args, tokens)
    owners = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    assert adapter.config.trainable_token_indices == dict.fromkeys(owners, tokens)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name in trained if ".lora_" not in name] == [f"{owner}.new_rows" for owner in owners]
    assert torch.equal(model(ids).logits, plain(ids).logits)

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) / 10)
    adapter.config.save_pretrained(tmp_path / "adapter")
    tensors = {peft_name(name): tensor.detach() for name, tensor in trained.items()}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    torch.testing.assert_close(model(ids).logits, loaded(ids).logits)
    head = loaded.get_output_embeddings()  # why PEFT's own wrappers are not used for training
    assert head.weight is not loaded.get_input_embeddings().weight and not hasattr(head, "bias")
    for one in (model, loaded):
        one(ids).logits.log_softmax(-1)[..., tokens].sum().backward()
    wanted = {name: p.grad for name, p in loaded.named_parameters()}
    for name, parameter in trained.items():
        name = peft_name(name).replace("_delta", f"_delta.{NAME}").replace(".weight", f".{NAME}.weight")
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
    # Outside of a forward pass, also of one that failed, the weight is the parameter, tied or not.
    with pytest.raises(IndexError):
        model(ids + 10**6)
    assert isinstance(model.lm_head.weight, torch.nn.Parameter)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_new_rows_and_a_bias(monkeypatch):
    """PEFT would leave the bias of an output layer out."""
    model = tiny_model("phi")
    monkeypatch.setattr("accelerate_recipes.models.adapters.folder_of_base", lambda *base: None)
    monkeypatch.setattr("accelerate_recipes.models.adapters.mapped_weights", lambda folder: {})
    refuses("PhiForCausalLM has a bias", add_adapters, model, toy.Args(model_name_or_path="phi", use_peft=True), [3])


def test_new_rows_and_an_output_layer_that_the_config_calls_tied(tmp_path):
    """Whoever adds rows to such a model before it loads the adapters would tie it: only merged, it is what was trained."""
    toy.make_base(tmp_path, seed=1, tie_word_embeddings=False)
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    args = toy.Args(model_name_or_path=str(tmp_path), use_peft=True)
    refuses(r"ties its output layer .* weights do not", add_adapters, load_model(str(tmp_path), "sdpa"), args, [3])
    args.merge_adapter = True
    assert add_adapters(load_model(str(tmp_path), "sdpa"), args, [3])


def test_a_router_gets_no_adapter():
    """The router of a Phi-3.5 MoE is a linear layer that returns two values, of which PEFT's adapters know nothing."""
    model = tiny_model("phimoe")
    found = targets(model, toy.Args(use_peft=True, lora_dropout=0.0))
    assert found["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_a_base_of_the_hub(base, monkeypatch, tmp_path):
    """A base on the Hub is read at its commit, also in the older format; files that cannot be merged are refused early."""
    place = tmp_path / "models--me--base/snapshots/abc"
    shutil.copytree(base, place)
    (tmp_path / "models--me--base/refs").mkdir()
    (tmp_path / "models--me--base/refs/main").write_text("abc")
    weights = load_file(base / "model.safetensors")
    (place / "model.safetensors").unlink()
    torch.save(weights, place / "pytorch_model.bin")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    args = toy.Args(model_name_or_path="me/base", use_peft=True, merge_adapter=True)
    adapter = add_adapters(load_model(str(base), "sdpa"), args)
    assert adapter.base["revision"] == adapter.config.revision == "abc"
    found = mapped_weights(folder_of_base("me/base", adapter.config.revision))
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    torch.save({name.removeprefix("model."): tensor for name, tensor in weights.items()}, place / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"--merge_adapter: there is no model\.layers\.0\.mlp\.down_proj\.weight in"):
        add_adapters(load_model(str(base), "sdpa"), args)
