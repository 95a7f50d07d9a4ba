"""Tests of the chess recipes with all usual kinds of causal language models: tokenizers, begin and end tokens, positions."""

import itertools
import json
import math
import re
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from helpers import ROOT, read_metrics, refuses
from huggingface_hub.errors import StrictDataclassClassValidationError
from tiny import tiny_config, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import accelerate_recipes.models.document_attention  # noqa: F401  # registers it
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.settings import check_trl_packing
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.requirements import check_models
from accelerate_recipes.losses import check_document_mask
from accelerate_recipes.models import probes
from accelerate_recipes.models.attention import SINKS, beyond_documents, choose
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.models.generation import Sampling, generate_texts, left_out
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.mixers import unpack_documents
from accelerate_recipes.models.pretrained import check_length, max_positions
from accelerate_recipes.models.probes import Packing, mixers_in, packing_of
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.run import Run
from chess_games import rules
from chess_games.games import tokenize_games
from chess_games.next_moves import NextMoves, longest_move, prompt_of

SCRIPT = ROOT / "recipes" / "chess.py"
METRIC = ROOT / "recipes" / "metrics" / "chess_moves.py"
GAME = ["e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6", "b5a4", "g8f6", "e1g1", "f8e7", "f1e1", "b7b5", "a4b3", "d7d6"]
DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Settings of published models that change what is generated, or that `generate` refuses in a batch.
CONSTRAINTS = {
    "do_sample": True, "temperature": 3.0, "top_k": 40, "top_p": 0.5, "min_p": 0.3, "typical_p": 0.4, "top_h": 0.5,
    "epsilon_cutoff": 0.3, "eta_cutoff": 0.3, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_length": 90,
    "min_new_tokens": 5, "suppress_tokens": [*range(3, 300)], "begin_suppress_tokens": [*range(3, 300)],
    "bad_words_ids": [[5], [6]], "sequence_bias": [[[9], 99.0]], "forced_eos_token_id": 2, "max_time": 1e-9,
    "exponential_decay_length_penalty": [1, 99.0], "encoder_repetition_penalty": 9.0, "guidance_scale": 9.0,
    "stop_strings": ["e"], "num_return_sequences": 2, "token_healing": True, "prompt_lookup_num_tokens": 3,
    "watermarking_config": {"bias": 99.0}, "num_beams": 3, "length_penalty": 3.0, "early_stopping": True,
}  # fmt: skip


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
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=make(), **special)
    tokenizer.save_pretrained(folder)
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = None
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
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
        assert document[: len(prompt)] == prompt and len(prompt) > 0
        answer = document[len(prompt) : len(prompt) + longest]
        assert tokenizer.decode(answer, skip_special_tokens=True).split()[0] == move
    # This holds for any move, not only for moves whose tokens were learnt.
    for move in rules.all_uci_moves()[::100]:
        prompt, whole = prompt_of(tokenizer, GAME), prompt_of(tokenizer, [*GAME, move])
        assert whole[: len(prompt)] == prompt and 0 < len(whole) - len(prompt) <= longest


@pytest.mark.parametrize(
    "folder", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama 2", "qwen"))], indirect=True,
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
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out/export")
    prompt = torch.tensor([prompt_of(tokenizer, GAME[:2])])
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.shape[1]


def test_greedy_is_greedy_and_fits_the_positions(folder):
    """Generation ignores the settings of a chat model; only the end of a long prompt is read."""
    tokenizer, model = load_tokenizer(str(folder)), transformers.AutoModelForCausalLM.from_pretrained(folder)
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
    model.generation_config.update(**CONSTRAINTS)
    own = model.generation_config.to_dict()
    assert generate() == found and model.generation_config.to_dict() == own
    assert left_out(model.generation_config).keys() == CONSTRAINTS.keys()
    # More than all positions are asked for, as in a game against itself.
    assert generate_texts(accelerator, model, tokenizer, [prompts[0][:1]], 200, batch_size=1).texts


@pytest.mark.parametrize("sampling", [None, Sampling(1.0, 0), Sampling(1.0, 0, settings={"top_k": 1})])
def test_rows_that_are_no_tokens_are_never_generated(folder, sampling):
    """An embedding may have rows for no token, between tokens or behind them, however probable the model finds them."""
    tokenizer, model = load_tokenizer(str(folder)), transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer) + 5, mean_resizing=False)
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(tokenizer) + 5))
    head.bias.data[[7, *range(len(tokenizer), len(tokenizer) + 5)]] = 1e4
    known = {token: number for token, number in tokenizer.get_vocab().items() if number != 7}
    tokenizer.get_vocab = lambda: known
    prompts = [prompt_of(tokenizer, GAME), prompt_of(tokenizer, GAME[:2])]
    _, ids = generate_texts(Accelerator(cpu=True), model, tokenizer, prompts, 5, batch_size=2, sampling=sampling)
    assert {*itertools.chain(*ids)} <= {*known.values()} and "_get_logits_processor" not in vars(model)


def test_attention_stays_inside_a_game_or_it_is_an_error(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    check_document_mask(model, torch.device("cpu"))
    assert model.training


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_each_kernel_keeps_attention_inside_a_game(attention):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SHAPES["llama 3"][2], attn_implementation=attention)
    check_document_mask(model, torch.device("cpu"))


@pytest.mark.parametrize("attention", ["sdpa", "documents", "flash_attention_2"])
def test_convolutions_cross_documents(attention):
    """A kernel that is told where documents begin does not help what is no attention: that gets one document at a time."""
    config = tiny_config("lfm2", layer_types=["conv", "full_attention"])
    for kind, found in (("conv", {"Lfm2ShortConv"}), ("full_attention", set())):
        config.layer_types, config._attn_implementation = [kind, "full_attention"], attention
        assert packing_of(config) is Packing.POSITIONS
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.config._attn_implementation = attention
        assert mixers_in(model) == found


def test_models_whose_attention_crosses_games(tmp_path):
    """BLOOM takes no positions. Refused before weights are read."""
    config = transformers.BloomConfig()
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
            assert bool(probes.model_sharing_problems(model.config, 2)) == bool(strength)
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
    refuses("llama models do not keep attention inside a document", check_document_mask, model, torch.device("cpu"))
    assert packing_of(model.config) is Packing.POSITIONS and mixers_in(model) == {"LlamaMLP"}
    unpack_documents(model, mixers_in(model))
    check_document_mask(model, torch.device("cpu"))


def test_a_model_that_no_tiny_one_stands_for_is_tried_itself(monkeypatch):
    monkeypatch.setattr(probes, "tiny_model", lambda *_, **__: None)
    monkeypatch.setattr(probes, "_packing", {})
    model = tiny_model("opt")
    assert packing_of(model.config) is Packing.UNKNOWN
    refuses(r"opt models .* a mask could not be tried", check_document_mask, model, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"no tiny opt could be made .* nothing says"):
        check_trl_packing(SimpleNamespace(has_boundaries=True, router_aux_loss_coef=0.0), model)
    assert any(
        "no tiny llama could be made" in said for said in probes.model_sharing_problems(transformers.LlamaConfig(), 2)
    )


def gemma4(**fields: object) -> transformers.Gemma4TextConfig:
    """Make the configuration of a published Gemma 4, with fewer layers."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    return transformers.Gemma4TextConfig(num_hidden_layers=9, layer_types=kinds * 3, **fields)


EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


UNUSUAL = {
    "Gemma 3n": transformers.Gemma3nTextConfig(),
    "Gemma 4 E2B": gemma4(num_kv_shared_layers=6, use_double_wide_mlp=True),
    "Gemma 4 26B-A4B": gemma4(num_global_key_value_heads=2, attention_k_eq_v=True, num_attention_heads=16, **EXPERTS),
    "MiMo": transformers.MiMoV2FlashConfig(),
    "ModernBERT": transformers.ModernBertDecoderConfig(),
    "CodeGen": transformers.CodeGenConfig(),
    "a padding that counts positions": transformers.RobertaConfig(is_decoder=True),
    "DBRX": transformers.DbrxConfig(
        d_model=6144,
        n_heads=48,
        attn_config={"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5},
        ffn_config={"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    ),
    "DeepSeek V4": transformers.DeepseekV4Config(),
    "HRM-Text": transformers.HrmTextConfig(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_tiny_model_of_unusual_sizes(name):
    """Sizes by kind of layer, keys and values of other layers, a padding that must be a token, layers that are repeated."""
    config = UNUSUAL[name]
    config._attn_implementation = choose("auto", config, torch.float32, True)[0]
    model = probes.tiny_model(config, config._attn_implementation)
    assert model is not None and sum(parameter.numel() for parameter in model.parameters()) < 2e7
    if isinstance(config, transformers.Gemma4TextConfig):
        kinds = ["sliding_attention", "full_attention"]
        assert model.config.layer_types == kinds * (2 if config.num_kv_shared_layers else 1)
        assert model.config.num_kv_shared_layers == (2 if config.num_kv_shared_layers else 0)
        widths = [layer.self_attn.head_dim for layer in model.model.layers]
        assert widths == [256, 512] * (len(widths) // 2)
    assert packing_of(config) not in (Packing.UNKNOWN, Packing.NONE)


def test_a_model_that_is_not_tiny_is_not_built(monkeypatch):
    """It is counted on the meta device, and no memory is taken for it."""

    class Large:
        @staticmethod
        def from_config(config, **settings):
            devices.append(torch.get_default_device().type)
            return torch.nn.Linear(1000, 1000)

    devices = []
    monkeypatch.setattr(probes, "MAX_SIZE", 10**6)
    with pytest.raises(ConfigError, match="a small llama would have 1,001,000 parameters, more than 1,000,000"):
        probes.randomly_made(Large, transformers.LlamaConfig(), "sdpa")
    assert devices == ["meta"]


def test_a_tokenizer_without_an_end_token(tmp_path):
    make, _, _ = SHAPES["qwen"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=make()).save_pretrained(tmp_path)
    refuses(rf"the tokenizer of {tmp_path} has no end token, .*; set its eos_token", load_tokenizer, str(tmp_path))


def test_rows_longer_than_the_model_is_made_for(folder, tmp_path):
    check_length(str(folder), 96)
    refuses(rf"--max_length is 97, but {folder} .* 96 or less", check_length, str(folder), 97)


def test_a_model_whose_positions_have_no_end(tmp_path):
    transformers.BloomConfig().save_pretrained(tmp_path)
    assert max_positions(transformers.BloomConfig()) == max_positions(transformers.XLNetConfig()) == sys.maxsize
    check_length(str(tmp_path), 10**6)


def test_positions_that_begin_behind_that_of_padding():
    """The table of a RoBERTa has two rows more than the longest text, which a forward pass shows."""
    for name, number in (("roberta", 10), ("bert", 12)):
        config = tiny_config(name, max_position_embeddings=12)
        model, longest = transformers.AutoModel.from_config(config).eval(), max_positions(config)
        assert longest == number
        model(torch.full((1, longest), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    assert max_positions(transformers.Qwen2Config(max_position_embeddings=32, rope_parameters=yarn)) == 128, (
        "as Qwen writes it"
    )


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
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=make(), **special)
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
    assert not any("unseen" in name for name in found)
    assert len(next_moves.summary({"baseline": found}).splitlines()) == 2


@pytest.mark.parametrize("name", ["AfmoeConfig", "Ernie4_5_MoeConfig", "LagunaConfig"])
def test_what_a_class_freezes_stays_frozen(name, tmp_path):
    """Under DDP, a router's bias that no gradient reaches would end the run in its second step."""
    model = probes.tiny_model(getattr(transformers, name)(), "sdpa")
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "sdpa")
    run = Run(TrainArgs(output_dir=str(tmp_path / "out")), Accelerator(cpu=True))
    run.shard(loaded)
    named = [{n for n, p in one.named_parameters() if not p.requires_grad} for one in (model, run.model)]
    assert named[0] == named[1] != set() and all("bias" in name for name in named[0])
    trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert len(trained) == sum(p.requires_grad for p in run.model.parameters())


def test_ranks_share_no_rows_of_a_class_that_gets_eager():
    """Of each class of decoders, the kernel that results is one that rows of several ranks have, or the run is refused."""
    with_sinks, refused = set(), set()
    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class()
            features = beyond_documents(config)
        except (ValueError, StrictDataclassClassValidationError):  # no defaults that fit together, or several texts
            continue
        if SINKS in features:
            with_sinks.add(config.model_type)
        try:
            assert choose("auto", config, torch.float32, True, True)[0] in (DOCUMENTS, "sdpa"), config.model_type
        except ConfigError as error:
            refused.add(config.model_type)
            assert "eager" in str(error) and "parallelism_config_cp_size" in str(error)
    assert with_sinks >= {"gpt_oss", "flint", "mimo_v2_flash", "deepseek_v4", "hy_v4"} and "llama" not in with_sinks
    assert refused >= {*with_sinks, "gemma2"} and "got_ocr2" not in refused
