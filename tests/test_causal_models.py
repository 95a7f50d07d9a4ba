"""Tests of the chess recipes with all usual kinds of causal language models: tokenizers, begin and end tokens, positions."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers import ROOT, read_metrics
from tiny import tiny_config, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    CodeGenConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    ModernBertDecoderConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from accelerate_recipes.arguments import shipped
from accelerate_recipes.chess import rules
from accelerate_recipes.chess.games import tokenize_games
from accelerate_recipes.chess.next_moves import NextMoves, longest_move, prompt_of, with_begin
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.requirements import check_models
from accelerate_recipes.losses import check_document_mask
from accelerate_recipes.models import probes
from accelerate_recipes.models import shared_rows_check as sharing
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.generation import generate_texts
from accelerate_recipes.models.mixers import unpack_documents
from accelerate_recipes.models.positions import check_length, max_positions
from accelerate_recipes.models.probes import Packing, mixers_in, packing_of
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.posttraining.settings import check_trl_packing

SCRIPT = ROOT / "recipes" / "chess.py"
METRIC = ROOT / "recipes" / "metrics" / "chess_moves.py"
GAME = ["e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6", "b5a4", "g8f6", "e1g1", "f8e7", "f1e1", "b7b5", "a4b3", "d7d6"]
DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bpe(special: list[str], pre_tokenizer, **options) -> Tokenizer:
    """Make a small byte-pair encoding that has learnt a few moves."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    bytes_as_tokens = [f"<0x{i:02X}>" for i in range(256)] if options.get("byte_fallback") else []
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[*special, *bytes_as_tokens], show_progress=False,
        initial_alphabet=[] if bytes_as_tokens else pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([" ".join(GAME)] * 3, trainer)
    return tokenizer


def sentencepiece(prepend_scheme: str) -> Tokenizer:
    """Make a tokenizer like Llama 2's (CodeLlama's) and Mistral's: a space marks a word, unknown text becomes bytes."""
    tokenizer = bpe(["<unk>", "<s>", "</s>"], pre_tokenizers.Metaspace(), byte_fallback=True, unk_token="<unk>")
    if prepend_scheme == "always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level(special: list[str], digits: str = "") -> Tokenizer:
    """Make a tokenizer like GPT-2's, or like Llama 3's and Qwen's, which split numbers in another way."""
    split = [pre_tokenizers.Split(Regex(DIGITS % digits), "isolated")] if digits else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not digits)
    tokenizer = bpe(special, pre_tokenizers.Sequence([*split, level]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], "{1,3}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "{1}")
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
END = "<|endoftext|>"
LENGTH = {"max_position_embeddings": 96}
SHAPES = {
    "llama 2": (lambda: sentencepiece("always"), SENTENCEPIECE, tiny_config(**LENGTH, num_key_value_heads=4)),
    "llama 3": (
        llama3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, tiny_config(**LENGTH)
    ),
    "qwen": (qwen, {"eos_token": END, "pad_token": END}, tiny_config("qwen2", **LENGTH, tie_word_embeddings=True)),
    "gpt2": (
        lambda: byte_level([END]), {"bos_token": END, "eos_token": END, "unk_token": END},
        tiny_config("gpt2", **LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    ),
    "mistral": (lambda: sentencepiece("first"), SENTENCEPIECE, tiny_config("mistral", **LENGTH, sliding_window=32)),
}  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    """A pretrained model with random weights, and its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    make, special, config = SHAPES[request.param]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), **special)
    tokenizer.save_pretrained(folder)
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_prompt_is_how_a_game_begins(folder, tmp_path):
    """A document is begin token, moves, end token; a prompt is the beginning of what was trained on."""
    tokenizer = load_tokenizer(str(folder))
    rows = tokenize_games(
        Dataset.from_dict({"Moves": [GAME], "defect": [""]}), tokenizer, 0.5, "games", tmp_path / "tokens.arrow"
    )
    document = rows[0]["input_ids"]
    assert None not in document and len(document) > len(GAME) + 2
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    assert document[0] == begin and document[-1] == tokenizer.eos_token_id
    longest = longest_move(tokenizer)
    for ply, move in enumerate(GAME):
        prompt = prompt_of(tokenizer, GAME[:ply])
        assert with_begin(tokenizer)(text=[" ".join(GAME[:ply])])["input_ids"] == [prompt]
        assert document[: len(prompt)] == prompt and len(prompt) > 0
        answer = document[len(prompt) : len(prompt) + longest]
        assert tokenizer.decode(answer, skip_special_tokens=True).split()[0] == move
    # This holds for any move, not only for moves whose tokens were learnt.
    for move in rules.all_uci_moves()[::100]:
        prompt, whole = prompt_of(tokenizer, GAME), prompt_of(tokenizer, [*GAME, move])
        assert whole[: len(prompt)] == prompt and 0 < len(whole) - len(prompt) <= longest


@pytest.mark.parametrize(
    "folder", ["qwen", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama 2", "llama 3", "mistral"))],
    indirect=True,
)  # fmt: skip
def test_trained_evaluated_played_and_exported(folder, forks, tmp_path):
    """On two ranks; games are longer than the positions of the model, in training and in evaluation."""
    games = tmp_path / "games.parquet"
    pq.write_table(pq.read_table(ROOT / "data/chess/games_20k.parquet").slice(0, 40), games)
    arguments = {
        "model_name_or_path": folder, "train_files": games, "heldout_share": 0.3, "num_positions": 6, "max_length": 96,
        "max_steps": 1, "total_batch_size": 2, "data_cache_dir": tmp_path / "cache",
    }  # fmt: skip
    log = forks.succeed(tmp_path / "out", *(part for name, value in arguments.items() for part in (f"--{name}", value)))
    assert all(math.isfinite(record["eval_loss"]) for record in read_metrics(tmp_path / "out") if "eval_loss" in record)
    assert "The model against itself" in log
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/export")
    prompt = torch.tensor([prompt_of(tokenizer, GAME[:2])])
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.shape[1]


def test_greedy_is_greedy_and_fits_the_positions(folder):
    """Generation ignores the settings of a chat model; only the end of a long prompt is read."""
    tokenizer, model = load_tokenizer(str(folder)), AutoModelForCausalLM.from_pretrained(folder)
    accelerator = Accelerator(cpu=True)
    prompts = [prompt_of(tokenizer, GAME), prompt_of(tokenizer, GAME * 20)]
    assert len(prompts[1]) > max_positions(model.config) == 96

    def generate() -> list[str]:
        return generate_texts(accelerator, model, tokenizer, prompts, 5, batch_size=1).texts

    found = generate()
    ids = prompts[1][-91:]
    model.eval()
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    if tokenizer.eos_token_id not in ids[-5:]:
        assert found[1] == tokenizer.decode(ids[-5:], skip_special_tokens=True)
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=50, repetition_penalty=9.0)
    assert generate() == found
    # More than all positions are asked for, as in a game against itself.
    assert generate_texts(accelerator, model, tokenizer, [prompts[0][:1]], 200, batch_size=1).texts


def test_attention_stays_inside_a_game_or_it_is_an_error(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    check_document_mask(model, torch.device("cpu"))
    assert model.training


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_each_kernel_keeps_attention_inside_a_game(attention):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES["llama 3"][2], attn_implementation=attention)
    check_document_mask(model, torch.device("cpu"))


@pytest.mark.parametrize("attention", ["sdpa", "documents", "flash_attention_2"])
def test_convolutions_cross_documents(attention):
    """A kernel that is told where documents begin does not help what is no attention: that gets one document at a time."""
    config = tiny_config("lfm2", layer_types=["conv", "full_attention"])
    for kind, found in (("conv", {"Lfm2ShortConv"}), ("full_attention", set())):
        config.layer_types, config._attn_implementation = [kind, "full_attention"], attention
        assert packing_of(config) is Packing.POSITIONS
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.config._attn_implementation = attention
        assert mixers_in(model) == found


def test_models_whose_attention_crosses_games(tmp_path):
    """BLOOM takes no positions. Refused before weights are read."""
    config = BloomConfig()
    config.save_pretrained(tmp_path)
    said = f"{config.model_type} models do not keep attention inside .* not even with a mask; give --no_document_mask"
    recipe = shipped.load(SCRIPT)
    for has_mask, expected in ((True, [said]), (False, [])):
        args = recipe.Args(model_name_or_path=str(tmp_path), document_mask=has_mask)
        _, problems = check_models(args, recipe.requirements(args))
        assert len(problems) == len(expected) and all(map(re.search, expected, problems))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "documents"])
def test_a_small_leak_between_documents_is_found(monkeypatch, attention):
    """A causal convolution of width 2 between layers, however little it adds, also where a rank's part of a row begins."""

    def convolved(self, hidden, *args, **settings):
        return forward(self, hidden + strength * functional.pad(hidden, (0, 0, 1, -1)), *args, **settings)

    forward, strength = LlamaDecoderLayer.forward, 0.0
    monkeypatch.setattr(LlamaDecoderLayer, "forward", convolved)
    model = tiny_model(attention=attention)
    for strength, has_tiny in ((0.0, True), (1e-6, True), (0.0, False), (1e-2, False)):
        monkeypatch.setattr(probes, "_packing", {})
        if has_tiny:
            assert packing_of(model.config) is (Packing.NONE if strength else Packing.POSITIONS)
            assert bool(sharing.model_sharing_problems(model.config, 2)) == bool(strength)
        else:
            monkeypatch.setattr(probes, "tiny_model", lambda *_, **__: None)
        if strength:
            with pytest.raises(ConfigError, match="llama models do not keep attention inside a document"):
                check_document_mask(model, torch.device("cpu"))
        else:
            check_document_mask(model, torch.device("cpu"))


def test_a_leak_inside_a_layer_is_unpacked(monkeypatch):
    """Whatever a part of a layer is called, it computes each document by itself if it carries something from one to the next."""
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: forward(self, hidden.cumsum(1)))
    monkeypatch.setattr(probes, "_packing", {})
    model = tiny_model()
    with pytest.raises(ConfigError, match="llama models do not keep attention inside a document"):
        check_document_mask(model, torch.device("cpu"))
    assert packing_of(model.config) is Packing.POSITIONS and mixers_in(model) == {"LlamaMLP"}
    unpack_documents(model, mixers_in(model))
    check_document_mask(model, torch.device("cpu"))


def test_a_model_that_no_tiny_one_stands_for_is_tried_itself(monkeypatch):
    monkeypatch.setattr(probes, "tiny_model", lambda *_, **__: None)
    monkeypatch.setattr(probes, "_packing", {})
    model = tiny_model("opt")
    assert packing_of(model.config) is Packing.UNKNOWN
    with pytest.raises(ConfigError, match=r"opt models .* a mask could not be tried"):
        check_document_mask(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"no tiny opt could be made .* nothing says"):
        check_trl_packing(SimpleNamespace(has_boundaries=True, router_aux_loss_coef=0.0), model)
    assert any("no tiny llama could be made" in said for said in sharing.model_sharing_problems(LlamaConfig(), 2))


def gemma4(**fields: object) -> Gemma4TextConfig:
    """Make the configuration of a published Gemma 4, with fewer layers."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    return Gemma4TextConfig(num_hidden_layers=9, layer_types=kinds * 3, **fields)


EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


@pytest.mark.parametrize(
    "config",
    [
        Gemma3nTextConfig(),
        gemma4(num_kv_shared_layers=6, use_double_wide_mlp=True),  # E2B
        gemma4(num_global_key_value_heads=2, attention_k_eq_v=True, num_attention_heads=16, **EXPERTS),  # 26B-A4B
        MiMoV2FlashConfig(),
        ModernBertDecoderConfig(),
        CodeGenConfig(),
        RobertaConfig(is_decoder=True),
    ],
    ids=[
        "Gemma 3n",
        "Gemma 4 E2B",
        "Gemma 4 26B-A4B",
        "MiMo",
        "ModernBERT",
        "CodeGen",
        "a padding that counts positions",
    ],
)
def test_a_tiny_model_of_unusual_sizes(config):
    """Sizes by kind of layer, keys and values of other layers, a padding that must be a token."""
    config._attn_implementation = choose("auto", config, torch.float32)[0]
    model = probes.tiny_model(config, config._attn_implementation)
    assert model is not None and sum(parameter.numel() for parameter in model.parameters()) < 5e7
    if isinstance(config, Gemma4TextConfig):
        kinds = ["sliding_attention", "full_attention"]
        assert model.config.layer_types == kinds * (2 if config.num_kv_shared_layers else 1)
        assert model.config.num_kv_shared_layers == (2 if config.num_kv_shared_layers else 0)
        widths = [layer.self_attn.head_dim for layer in model.model.layers]
        assert widths == [256, 512] * (len(widths) // 2)
    assert packing_of(config) is not Packing.UNKNOWN


def test_a_tokenizer_without_an_end_token(tmp_path):
    make, _, _ = SHAPES["qwen"]
    PreTrainedTokenizerFast(tokenizer_object=make()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"the tokenizer of {tmp_path} has no end token, .*; set its eos_token"):
        load_tokenizer(str(tmp_path))


def test_rows_longer_than_the_model_is_made_for(folder, tmp_path):
    check_length(str(folder), 96)
    with pytest.raises(ConfigError, match=rf"--max_length is 97, but {folder} .* 96 or less"):
        check_length(str(folder), 97)


def test_a_model_whose_positions_have_no_end(tmp_path):
    BloomConfig().save_pretrained(tmp_path)
    assert max_positions(BloomConfig()) == sys.maxsize
    check_length(str(tmp_path), 10**6)


def test_positions_that_were_seen_in_training():
    """A position was seen if a training game begins with its moves, also a whole game, or no moves; in any phase."""
    prefixes = [[], ["e2e4"], ["e2e4", "e7e5"], ["e2e4", "c7c5"], ["e2e4", "e7e5", "g1f3"], ["d2d4"], ["e2e4"]]
    positions = [{"prefix": prefix, "move": "a2a3", "phase": "opening"} for prefix in prefixes]
    rules.mark_seen(positions, [["e2e4", "e7e5"], ["e2e4", "e7e5", "b1c3"], ["e7e5"]])
    assert [position["is_seen"] for position in positions] == [True, True, True, False, False, False, True]
    rules.mark_seen(positions, [])
    assert not any(position["is_seen"] for position in positions)


def test_the_share_over_positions_never_seen_is_told_apart(tmp_path):
    played = [([], "e2e4", True), (["e2e4"], "e7e5", False), (["e2e4", "e7e5"], "g1f3", False)]
    positions = [{"prefix": p, "move": m, "phase": "opening", "is_seen": seen} for p, m, seen in played]
    make, special, _ = SHAPES["gpt2"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), **special)
    facts = {"positions": positions, "baseline": {"": "e2e4", "e2e4": "c7c5"}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    next_moves = NextMoves(tmp_path, tokenizer, METRIC)
    found = {f"eval_{name}": value for name, value in next_moves.baseline().items()}
    assert found["eval_legal_move_rate"] == 2 / 3 and found["eval_legal_move_rate_unseen"] == 1 / 2
    assert found["eval_next_move_accuracy"] == 1 / 3 and found["eval_next_move_accuracy_unseen"] == 0
    assert next_moves.summary({"baseline": found}).splitlines() == [
        "Held-out positions (3), legal moves: baseline 66.7%",
        "Held-out positions (3), moves as played: baseline 33.3%",
        "Of these, in no game trained on (2), legal moves: baseline 50.0%",
        "Of these, in no game trained on (2), moves as played: baseline 0.0%",
    ]
    for position in next_moves.positions:
        position["is_seen"] = True
    found = {f"eval_{name}": value for name, value in next_moves.baseline().items()}
    assert (
        not any("unseen" in name for name in found) and len(next_moves.summary({"baseline": found}).splitlines()) == 2
    )
