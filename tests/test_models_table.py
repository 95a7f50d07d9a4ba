"""Tests of docs/models.md: cells that start no runs for each architecture, all cells for two, and the refusals on the page."""

import itertools
import json
import re

import combinations
import models_table
import pytest
import torch
import toy
from combinations import LEVERS, MACHINES, RECIPES, STRATEGIES, arguments, environment, generic, strategy_problems
from helpers import ROOT
from models_table import (
    ARCHITECTURES,
    CELLS,
    COMPOSITES,
    ENCODER_DECODERS,
    IN_PROCESS,
    NAMED,
    REFUSED,
    ROWS,
    WORKS,
    Model,
    cell,
    page,
)
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, MarianConfig, T5Config

from accelerate_recipes.adapters import add_adapters
from accelerate_recipes.encoder_decoders import load_encoder_decoder
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.preflight import check
from accelerate_recipes.positions import check_length

RESULT = json.loads(models_table.RESULT.read_text())


@pytest.fixture(scope="module")
def models(fork_server, tmp_path_factory):
    """Tiny models by the name of their architecture."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = models_table.make(name, folder, fork_server)
        return made[name]

    return model


# Others are tried by the slow tests, as further hybrids are.
SAMPLE = [
    *list(ARCHITECTURES)[: list(ARCHITECTURES).index("Llama 4")], *ENCODER_DECODERS, "Llama 4", "Qwen3-Next", "Qwen3.5", "LFM2",
    "Granite 4", "Falcon-H1", "Mamba",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in SAMPLE
        else pytest.param(name, marks=pytest.mark.long if name in COMPOSITES else pytest.mark.slow)
        for name in ROWS
    ],
)
def test_packing_and_losses(models, name):
    """Packing is proved for each class, by us and by trl, and the loss without logits; or the refusal is the page's."""
    for title in IN_PROCESS:
        assert cell(models(name), title) == RESULT["cells"][name][title]


# GPT-OSS: a mask of ours, sinks, experts in one weight. DeepSeek V3: a buffer that is saved, named layers. BART: a buffer,
# positions that count from the left, a scaled embedding.
THROUGH_RANKS = [
    ("GPT-OSS", "FSDP2 x 2"), ("GPT-OSS", "export"), ("GPT-OSS", "generation"), ("DeepSeek V3", "FSDP2 x 2"),
    ("BART", "FSDP2 x 2"), ("BART", "export"), ("BART", "generation"), ("Qwen3.5", "FSDP2 x 2"),
]  # fmt: skip
SLOW = [
    ("GPT-OSS", "kill, resume"), ("GPT-OSS", "LoRA"), ("DeepSeek V3", "export"), ("BART", "recomputation"),
    ("BART", "kill, resume"), ("mT5", "export"), ("Granite 4", "recomputation"), ("Granite 4", "kill, resume"), ("Jamba", "LoRA"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, title", [*THROUGH_RANKS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_through_ranks(models, name, title):
    assert cell(models(name), title) == RESULT["cells"][name][title]


@pytest.mark.parametrize("name, title", [pair for pair in REFUSED if pair[1] not in IN_PROCESS])
def test_refusals(models, name, title):
    """What the page says of adapters that are refused is what a run says."""
    args = toy.Args(model_name_or_path=str(models(name).base), use_peft=True, lora_dropout=0.0)
    args.load_in_4bit = title == "4 bits, on a CPU"
    with pytest.raises(ConfigError) as caught:
        add_adapters(models(name).load(), args)
    assert RESULT["cells"][name][title].endswith(models_table.first_line(caught.value))


@pytest.mark.parametrize(
    "config, said",
    [
        (MarianConfig(), "is a marian, not one of t5, mt5, umt5, bart"),
        (LlamaConfig(), "is a llama, not one of t5, mt5, umt5, bart"),
        (T5Config(), r"has no decoder_start_token_id, .* \(in a T5 that of the padding, here 0\)"),
    ],
)
def test_encoder_decoders_that_are_refused(tmp_path, config, said):
    """Other models, and one that does not say how a text begins, are refused before their weights are read."""
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_encoder_decoder(str(tmp_path), "sdpa", dropout_rate=0.0)


def test_texts_longer_than_the_positions_of_a_model(models):
    """A BART has 16 positions; a T5 has no limit. Batches are padded to a multiple of 8."""
    check_length(str(models("BART").base), 16, "max_source_length", 8)
    check_length(str(models("T5").base), 10**6, "max_source_length", 8)
    with pytest.raises(
        ConfigError, match=r"--max_target_length is 17, but .* is made for 16 tokens; set it to 16 or less"
    ):
        check_length(str(models("BART").base), 17, "max_target_length", 8)
    with pytest.raises(ConfigError, match="set it to 10 or less"):
        check_length(str(models("BART").base), 12, "max_source_length", 10)


def test_dropout_of_an_encoder_decoder(models):
    """One rate holds wherever the model has dropout, and no layer is left out at random: ranks would leave out others."""
    for name in ENCODER_DECODERS:
        model = load_encoder_decoder(str(models(name).base), "sdpa", dropout_rate=0.25)
        config = model.config
        kinds = {key: value for key, value in config.to_dict().items() if "drop" in key and "classif" not in key}
        assert kinds and all(value == (0.0 if "layerdrop" in key else 0.25) for key, value in kinds.items()), kinds
        modules = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert all(p == 0.25 for p in modules) and (modules or name == "BART")


def test_the_page_is_what_is_generated():
    assert models_table.PAGE.read_text() == page(RESULT), "run `make models`, or tests/models_table.py --page"


def test_every_cell_is_there_and_none_is_empty():
    assert RESULT["cells"].keys() == ROWS.keys() and len(ROWS) >= 50
    for name, cells in RESULT["cells"].items():
        assert cells.keys() == {"attention", *CELLS}
        for title, said in cells.items():
            if title != "attention" and said != WORKS:
                is_without = name in ENCODER_DECODERS and said.startswith(("not packed: ", "not offered: "))
                assert is_without or (name, title) in REFUSED, f"{name}, {title}: {said}"
    for name in NAMED:
        assert RESULT["cells"][name]["LoRA"].startswith(f"{WORKS} with `--lora_target_modules ")


def test_a_red_cell_fails_the_command(monkeypatch, tmp_path, capsys):
    """A fault, an unexpected refusal and a refusal that no longer comes are red; then nothing is written."""

    def raises(error: Exception):
        def check(model):
            raise error

        return check

    monkeypatch.setattr(models_table, "ForkServer", lambda *_: type("Server", (), {"close": lambda _: None})())
    monkeypatch.setattr(models_table, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(models_table, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(models_table, "ROWS", {"GPT-2": ROWS["GPT-2"]})
    checks = {
        "export": raises(AssertionError("losses differ by 1")),
        "generation": raises(ConfigError("no")),
        "LoRA": lambda model: None,
        "recomputation": lambda model: None,
    }
    monkeypatch.setattr(models_table, "CELLS", checks)
    monkeypatch.setattr(models_table.sys, "argv", ["models_table.py"])
    with pytest.raises(SystemExit) as ended:
        models_table.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and not list(tmp_path.iterdir())
    for red in (
        "export: AssertionError: losses differ by 1",
        "generation: AssertionError: refused: no",
        "LoRA: .*works now",
    ):
        assert re.search(f"^GPT-2, {red}", said, re.MULTILINE), said
    assert "recomputation" not in said and "3 cells are red" in said


def test_preflight_refuses_them_too(models, monkeypatch, tmp_path):
    """An attention that a class does not support, rows that it cannot keep apart, a loss that needs whole logits."""
    monkeypatch.chdir(ROOT)
    gemma, crosses = str(models("Gemma 2").base), tmp_path / "bloom"
    BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)).save_pretrained(crosses)
    where = ("--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--max_length", "32")
    chess = ("recipes/chess.py", "--train_files", "data/chess/games_20k.parquet", *where)
    c4 = ("recipes/c4.py", "--train_files", "data/en_fr/libreoffice.jsonl", *where, "--model_name_or_path", gemma)
    refused = {
        (
            *chess, "--model_name_or_path", gemma, "--attn_implementation", "sdpa",
        ): "gemma2 does not support it; give eager",
        (*chess, "--model_name_or_path", str(crosses)): "bloom models do not keep attention inside a document",
        c4: "gemma2 has final_logit_softcapping 30.0 behind .* give --whole_logits",
    }  # fmt: skip
    for command, said in refused.items():
        _, problems = check(["accelerate_configs/fsdp_full.yaml", *command])
        assert re.search(said, " ".join(problems)), problems
    for command in ((*chess, "--model_name_or_path", gemma), (*c4, "--whole_logits")):
        _, problems = check(["accelerate_configs/fsdp_full.yaml", *command])
        assert not re.search("does not support it|behind its output layer|keep attention", " ".join(problems)), problems
    _, problems = check(
        ["accelerate_configs/fsdp_full.yaml", *chess, "--model_name_or_path", str(crosses), "--no_document_mask"]
    )
    assert "do not keep attention" not in " ".join(problems)


def test_three_are_refused_where_two_are():
    """A recipe's arguments change nothing in what a strategy refuses, so that two tables say all; but who shares rows."""
    for machine, strategy, (launch_flags, flags) in itertools.product(MACHINES, STRATEGIES, LEVERS.values()):
        found = set()
        for name in RECIPES:
            args, problems = arguments(name, flags, 8)
            if not problems:
                refusals = [generic(said) for said in strategy_problems(strategy, machine, launch_flags, flags, name)]
                whole = [said for said in refusals if "in this recipe a row is whole on each process" in said]
                assert len(whole) == (strategy == "fsdp_long" and not args.shares_rows)
                found.add(tuple(said for said in refusals if said not in whole))
        assert len(found) == 1, (machine, strategy, flags, found)


def test_every_shipped_strategy_starts_alone():
    for machine, strategy in itertools.product(MACHINES, STRATEGIES):
        assert isinstance(environment(strategy, MACHINES[machine], ()), dict)
    on_gpus = combinations.by_strategy("8 GPUs")
    assert not any(on_gpus["", strategy] for strategy in STRATEGIES)
