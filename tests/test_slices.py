"""Tests that each rank reads its own slices of a pretrained model (slices.py), and no value is lost or in another place."""

import os
from pathlib import Path

import pytest
import torch
from loaded import CPU, compare, loaded, on_ranks, sharded, values_of
from models_table import ROWS
from safetensors.torch import load_file
from tiny import change_weights, save_different, tiny_composite, tiny_model
from transformers import AutoModelForCausalLM

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models import slices
from accelerate_recipes.ranks import rank


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    models = {
        "tied": tiny_model(tie_word_embeddings=True),
        "experts": tiny_model("qwen3_moe"),  # each is a tensor in the files
        "experts in one": tiny_model("gpt_oss"),
        # Its convolutions are three tensors in the files, joined in the dimension that ranks share.
        "joined": AutoModelForCausalLM.from_config(ROWS["Kimi-Linear"]),
        "buffers": AutoModelForCausalLM.from_config(ROWS["DeepSeek V3"]),  # its router has one that is saved
        "part": tiny_composite("gemma3"),
        "untied part": tiny_composite("qwen3_5_moe"),
    }
    found = {name: str(save_different(model, root / name)) for name, model in models.items()}
    found["many files"] = str(save_different(tiny_model(), root / "many files", max_shard_size="20KB"))
    assert len(list((root / "many files").glob("*.safetensors"))) > 5
    return found


@pytest.mark.parametrize("world", [1, 3, 5])  # sizes do not divide; with 5 ranks, one gets none of 4 experts
def test_every_value_is_in_its_place(folders, world):
    found = dict(zip(folders, on_ranks(world, compare, [(folder,) for folder in folders.values()]), strict=True))
    assert not any(result["differ"] for result in found.values()), found
    # Whole, each rank reads only joined weights. Of the others each value is read once.
    assert all(result["read"] < 1.01 for name, result in found.items() if name != "joined"), found
    assert found["joined"]["read"] < (1.01 if world == 1 else 1.1)


def test_another_dtype(folders):
    (result,) = on_ranks(2, compare, [(folders["experts"], torch.bfloat16)])
    assert not result["differ"]


def kept(folder: str) -> list[object]:
    """Load a model in bf16, and its files by slices; return the dtypes of what the class keeps in fp32, and what differs."""
    model = loaded(folder, torch.bfloat16, by_slices=True)
    slices.read_slices(sharded(model), slices.source_of(model), CPU, CPU)
    found = {name: value for name, value in values_of(model).items() if name.endswith("e_score_correction_bias")}
    files = load_file(Path(folder, "model.safetensors"))
    others = [name for name, value in found.items() if not torch.equal(value, files[name])]
    return [sorted({str(value.dtype) for value in found.values()}), others]


def test_what_a_class_keeps_in_fp32_is_not_rounded(folders):
    assert on_ranks(2, kept, [(folders["buffers"],)]) == [[["torch.float32"], []]]


def twice(folder: str) -> list[bool]:
    """Load a model whose config.json ties its output layer; return whether it is tied, and whether its values are right."""
    model = loaded(folder, torch.float32, by_slices=True)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    slices.read_slices(sharded(model), slices.source_of(model), CPU, CPU)
    head = values_of(model)["lm_head.weight"]
    expected = loaded(folder, torch.float32, by_slices=False).get_output_embeddings().weight
    return [is_tied, model.config.tie_word_embeddings, torch.equal(head, expected)]


def test_files_that_hold_a_tied_weight_twice(tmp_path):
    """The values decide whether it is tied, as in transformers."""
    cases = []
    for factor in (1, 2):
        folder = tmp_path / str(factor)
        cases.append((str(save_different(tiny_model(tie_word_embeddings=True), folder)),))
        change_weights(folder, lambda w, n=factor: w | {"lm_head.weight": n * w["model.embed_tokens.weight"]})
    assert on_ranks(2, twice, cases) == [[True, True, True], [False, False, True]]


def grown(folder: str) -> list[object]:
    """Load a model and give it rows for new tokens; return what differs from the whole model with as many, and the new rows."""
    model = loaded(folder, torch.float32, by_slices=True)
    whole = loaded(folder, torch.float32, by_slices=False)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    for each in (model, whole):
        torch.manual_seed(0)
        each.resize_token_embeddings(107)
    source = slices.source_of(model)
    rows = slices.rows_of_tokens(model.get_input_embeddings(), [0, 99, 106], model)
    expected = values_of(whole)
    assert torch.equal(rows, expected["model.embed_tokens.weight"][[0, 99, 106]])
    slices.read_slices(sharded(model), source, CPU, CPU)
    found = values_of(model)
    others = [name for name in expected if not torch.equal(found[name], expected[name])]
    return [others, list(found["lm_head.weight"].shape)]


def test_rows_of_new_tokens(folders):
    for result in on_ranks(3, grown, [(folders["tied"],), (folders["many files"],)]):
        assert result == [[], [107, 32]]


def damaged(folder: str, how: str) -> str:
    """Load a model of which one rank cannot read a tensor; return the error of the first rank."""
    model = loaded(folder, torch.float32, by_slices=True)
    source = slices.source_of(model)
    name = "model.layers.1.mlp.gate_proj.weight"
    if how == "lost":
        del source.parts[name]
    elif rank() == 1:
        file, _ = source.places[name]
        source.places[name] = (file.with_name("none"), 0) if how == "missing" else (file, file.stat().st_size - 8)
    try:
        slices.read_slices(sharded(model), source, CPU, CPU)
    except ConfigError as error:
        return str(error)
    return "read"


def test_an_error_on_one_rank_is_an_error_on_all(folders):
    """Nobody waits for the others, and no weight keeps what happened to lie in memory."""
    kinds = ["missing", "short", "lost"]
    missing, short, lost = on_ranks(2, damaged, [(folders["tied"], kind) for kind in kinds])
    assert "none cannot be read: [Errno 2] No such file or directory" in missing
    assert "cannot be read: it ends at byte" in short and "within model.layers.1.mlp.gate_proj.weight" in short
    assert "1 of its weights" in lost and "model.layers.1.mlp.gate_proj.weight" in lost
