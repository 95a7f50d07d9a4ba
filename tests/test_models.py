"""Tests of new models: their sizes, and sizes from which no model can be made."""

import json
import re

import pytest
import torch
from helpers import ROOT, refuses
from tiny import tiny_config, tiny_model
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.configurations import Architecture, check_belong_together, new_config
from accelerate_recipes.models.encoder_decoders import dropouts, new_encoder_decoder
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer, new_word_tokenizer

PRESETS = ROOT / "recipes/configs/c4"
LONG_CONTEXT = (ROOT / "docs/long-context.md").read_text()
# Numbers of parameters as published with the models' weights.
PARAMETERS = {
    "llama2_7b": 6_738_415_616, "llama2_13b": 13_015_864_320, "llama2_70b": 68_976_648_192, "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496, "llama3_2_1b": 1_235_814_400, "llama3_2_3b": 3_212_749_824, "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
}  # fmt: skip


def parsed(*argv: str):
    return parse(shipped.load(ROOT / "recipes/c4.py").Args, argv, world_size=8)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models(name):
    """The preset parses, and its model on the meta device has exactly the published number of parameters."""
    args = parsed("--config", str(PRESETS / f"{name}.yaml"))
    model = new_model(new_config(args), args.attn_implementation)
    assert model.num_parameters() == PARAMETERS[name]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert f"{PARAMETERS[name]:,}" in (PRESETS / f"{name}.yaml").read_text()
    assert model.config.tie_word_embeddings == name.startswith("llama3_2")
    assert model.config.eos_token_id == (128001 if name.startswith("llama3") else 2)


@pytest.mark.parametrize("form", ["of transformers 5", "published earlier"])
def test_a_copy_with_an_edited_config_is_stretched(form, tmp_path):
    """It computes what a model with these fields computes, and is saved with them. The fields are those of the page."""
    plain = tiny_model(max_position_embeddings=64)
    plain.save_pretrained(tmp_path)
    (page,) = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", LONG_CONTEXT, re.DOTALL))
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    if form == "published earlier":
        del fields["rope_parameters"]
    file.write_text(json.dumps(fields | page))
    wanted = {"max_position_embeddings": page["max_position_embeddings"], "rope_parameters": page["rope_parameters"]}
    by_hand = tiny_model(**wanted)
    model = load_model(str(tmp_path), "sdpa")
    ids = torch.arange(200)[None] % 100
    assert torch.equal(model(ids).logits, by_hand(ids).logits) and not torch.equal(model(ids).logits, plain(ids).logits)
    model.save_pretrained(tmp_path / "again")
    assert wanted.items() <= json.loads((tmp_path / "again/config.json").read_text()).items()


PRESET = ("--config", str(PRESETS / "llama2_7b.yaml"))
MIXTRAL = ("--config", str(PRESETS / "mixtral_8x7b.yaml"))
SMALL = (
    "--from_scratch", "--config_overrides", "hidden_size=64", "num_hidden_layers=4", "vocab_size=300",
    "intermediate_size=32",
)  # fmt: skip


def test_a_field_of_a_preset_can_be_overridden():
    """Flags change single fields of the preset's mapping, nested ones too; what follows from sizes follows."""
    overrides = ("num_hidden_layers=2", "num_local_experts=4", "head_dim=64", "rope_parameters.rope_theta=5e5")
    args = parsed(*MIXTRAL, "--config_overrides", "head_dim=32", "--config_overrides", *overrides)
    config = new_config(args)
    assert (config.num_hidden_layers, config.num_local_experts, config.head_dim) == (2, 4, 64)
    assert config.hidden_size == 4096 and config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert new_model(config, "sdpa").model.layers[1].mlp.experts.gate_up_proj.shape == (4, 2 * 14336, 4096)
    assert {"model_type", "config_overrides"} <= type(args).fixed_on_resume()
    llama3 = ("--config", str(PRESETS / "llama3_2_1b.yaml"), "--config_overrides", "rope_parameters=null")
    assert new_config(parsed(*llama3)).rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    one = parsed(*llama3, "rope_parameters.rope_theta=5.0")
    assert one.config_overrides["rope_parameters.rope_theta"] == 5.0 and "rope_parameters" not in one.config_overrides


@pytest.mark.parametrize("model_type, overrides, expected", [
    ("qwen3", ["num_attention_heads=4", "num_key_value_heads=2"], {"head_dim": 128}),
    ("gemma3_text", ["num_attention_heads=4", "sliding_window=8"], {"layer_types": ["sliding_attention"] * 4}),
    ("qwen3_next", ["num_attention_heads=4", "num_key_value_heads=2", "num_experts=4", "num_experts_per_tok=2"],
     {"layer_types": [*["linear_attention"] * 3, "full_attention"]}),
    ("gpt_neox", ["num_attention_heads=4", "rms_norm_eps=1"], "a gpt_neox has no field rms_norm_eps"),
    ("gpt2", ["n_head=4"], "a gpt2 has no field intermediate_size"),
])  # fmt: skip
def test_any_architecture(model_type, overrides, expected, tmp_path):
    """Sizes are the user's, also under other names; lists that follow are the class's, and so is the rest."""
    argv = (*SMALL, *overrides, "--model_type", model_type, "--max_length", "128", "--max_steps", "1")
    if isinstance(expected, str):
        refuses(expected, parsed, *argv)
        return
    args = parsed(*argv)
    model = shipped.load(ROOT / "recipes/c4.py").make_model(args)
    assert model.config.model_type == model_type and model.config.max_position_embeddings == 128
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (64, 4, 300)
    assert {name: getattr(model.config, name) for name in expected} == expected
    assert all(parameter.is_meta for parameter in model.parameters())
    args.save(tmp_path / "args.yaml")  # it is a preset
    again = parsed("--config", str(tmp_path / "args.yaml"))
    assert again.values() == args.values() and new_config(again) == new_config(args)


def test_values_are_yaml(preset):
    """Nested fields are dotted, in a preset a section; both give the same numbers, lists, switches and nulls."""
    given = preset(
        "max_steps: 1\nmodel_type: mistral\nfrom_scratch: true\nconfig_overrides:\n  rms_norm_eps: 1e-5\n  sliding_window: ~\n"
        "  hidden_act: gelu\n  tie_word_embeddings: no\n  eos_token_id: [2, 3]\n  rope_parameters:\n    rope_type: linear\n"
        "    factor: 2.0\n"
    )
    typed = (
        "rms_norm_eps=1e-5", "sliding_window=null", "hidden_act=gelu", "tie_word_embeddings=false", "eos_token_id=[2, 3]",
        "rope_parameters.rope_type=linear", "rope_parameters={factor: 2.0}",
    )  # fmt: skip
    flags = ("--from_scratch", "--model_type", "mistral", "--max_steps", "1", "--config_overrides", *typed)
    args = parsed(*given)
    assert args.values() == parsed(*flags).values() and args.config_overrides == {
        "rms_norm_eps": 1e-5, "sliding_window": None, "hidden_act": "gelu", "tie_word_embeddings": False,
        "eos_token_id": [2, 3], "rope_parameters.rope_type": "linear", "rope_parameters.factor": 2.0,
    }  # fmt: skip
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert new_config(args).rope_parameters == rope and new_config(args).sliding_window is None


@pytest.mark.parametrize("flags, reason", [
    (["hidden_size=100", "num_attention_heads=8"], r"hidden size \(100\) is not a multiple .* heads \(8\)"),
    (["hidden_size=160"], "even rotary dimension, but got `head_dim`=5"),
    (["num_key_value_heads=5"], "num_attention_heads 32 .* num_key_value_heads 5"),
    (["hidden_size=96", "num_attention_heads=3", "num_key_value_heads=4"], "heads 3 is not a multiple of num_key_value_heads 4"),
    (["sliding_window=4096"], "a llama has no field sliding_window"),
    (["dtype=bfloat16", "hiden_size=8"], r"no field dtype(.|\n)*no field hiden_size; did you mean 'hidden_size'"),
    (["hidden_size=wide"], "'hidden_size' expected int, got str"),
    (["num_hidden_layers=-1"], "num_hidden_layers is -1; it must be at least 1"),
    (["num_hidden_layers=10001"], "num_hidden_layers is 10001; it must be at most 10000"),
    (["attention_dropout=1.5"], "attention_dropout is 1.5; it must be at least 0, and below 1"),
    (["rms_norm_eps=.nan"], "rms_norm_eps is nan; it must be a finite number"),
    (["rope_parameters.factr=2"], "Unrecognized keys in `rope_parameters` .*factr"),
    (["rope_parameters.rope_type=llama3", "rope_parameters.factor=8.0"], "Missing required keys in `rope_parameters`"),
    (["hidden_size"], "'hidden_size' is not NAME=VALUE"),
    (["hidden_size=[1"], r"the value in 'hidden_size=\[1' is not YAML"),
    (["x", "--max_length", "8192"], "'x' is not NAME=VALUE"),
    (["vocab_size=32000", "--max_length", "8192"], "--max_length is 8192, .* 4096"),
    (["vocab_size=32000", "--hidden_size", "64"], "unknown argument 'hidden_size' .* given by --config_overrides hidden_size="),
    (["vocab_size=32000", "--model_type", "qwen33"], "transformers has no ModelForCausalLM of this type; did you mean 'qwen3'"),
    (["vocab_size=32000", "--model_type", "gemma3"], "also reads images or sound|no field"),
    (["vocab_size=32000", "--from_scratch", "--model_name_or_path", "m"], "--from_scratch .* or --model_name_or_path"),
])  # fmt: skip
def test_mistakes(flags, reason):
    refuses(reason, parsed, *PRESET, "--config_overrides", *flags)


@pytest.mark.parametrize("model_type, overrides, reason", [
    ("mixtral", ["num_local_experts=8", "num_experts_per_tok=9"], "num_experts_per_tok is 9, .* 8"),
    ("qwen3_moe", ["num_experts=8", "num_experts_per_tok=9"], "num_experts_per_tok is 9, but num_experts is 8"),
    ("gemma3_text", ["layer_types=[full_attention]"], r"`num_hidden_layers` \(2\) .* `layer_types` \(1\)"),
    ("gpt2", ["n_embd=8", "hidden_size=8"], "n_embd is set under two names"),
    ("gpt2", ["n_embd=8", "n_head=3"], "`embed_dim` must be divisible by num_heads .*8 and `num_heads`: 3"),
    ("bert", [], "bert whose attention sees the tokens that it is to predict"),
    ("llama", ["hidden_act=nonsense"], "no llama can be made with this configuration: KeyError: 'nonsense'"),
])  # fmt: skip
def test_mistakes_of_other_architectures(model_type, overrides, reason):
    """Those that only show when the model is made are told by preflight, which makes it without weights."""
    with pytest.raises(ConfigError, match=reason):
        args = parsed("--from_scratch", "--model_type", model_type, "--max_steps", "1", "--max_length", "64",
                      "--config_overrides", "num_hidden_layers=2", *overrides)  # fmt: skip
        shipped.load(ROOT / "recipes/c4.py").requirements(args).new_model()


@pytest.mark.parametrize("max_length", [64, pytest.param(200_000, marks=pytest.mark.slow)])
def test_every_decoder_is_new_or_refused_by_name(max_length):
    """With the defaults of its class, whatever its padding token and rotary embedding; images make it no decoder."""
    refused = {}
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            new_config(Architecture(model_type=config_class.model_type), None, max_length)
        except ConfigError as error:
            refused[config_class.model_type] = str(error)
    assert not [message for message in refused.values() if "--config_overrides" in message]
    sees = {name for name, message in refused.items() if "also reads images or sound" in message}
    assert sees >= {"fuyu", "emu3", "gemma4_unified", "mllama", "git"}
    # Those that no class of configurations can make: of their own defaults, or as transformers 5.23 reads them.
    told = {name for name, said in refused.items() if re.search("has an encoder|is_decoder|the padding", said)}
    other = refused.keys() - sees - told
    broken = {"cohere_compass_text", "dots3_note_text", "gemma4_assistant"}
    stretched = {"gpt_oss", "apertus", "cwm", "ministral3"}
    assert other <= broken | (stretched if max_length > 64 else set())


def test_models_are_made_of_what_is_taken():
    """With each nasty value in a number of its config.json, a model can be made, or the user is told why not."""
    of_attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.0, "head_dim": 8}
    small = {"hidden_size": 16, "vocab_size": 9, "intermediate_size": 4, "num_hidden_layers": 1} | of_attention
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    experts |= {"initializer_range": 0.02, "rope_parameters.factor": 1.0}
    linear = {"rope_parameters.rope_type": "linear"}
    nasty = (-1, -0.5, 0, 1e-300, 0.5, 1, 3, 5_000_000_000, 1e308, 10**30, float("inf"), True, None, "ten", [1])
    made, refused = set(), 0
    for name in small | experts:
        for value in nasty:
            overrides = linear | small | experts | {name: value}
            args = Architecture(model_type="mixtral", config_overrides=overrides)
            try:
                assert new_model(new_config(args), "sdpa").num_parameters() > 0
                made.add(name)
            except ConfigError as error:
                assert name.split(".")[0] in str(error) or "mixtral" in str(error), error
                refused += 1
    assert made == small.keys() | experts.keys() and refused > 60


def test_a_vocabulary_that_does_not_fit():
    tokenizer = new_word_tokenizer([f"w{i}" for i in range(96)])  # 100 tokens; <s> is 1, </s> is 2

    def config(**overrides):
        return new_config(Architecture(config_overrides=overrides), tokenizer, 4096)

    check_belong_together(config(vocab_size=100), tokenizer)
    check_belong_together(config(vocab_size=128), tokenizer)
    ids = new_config(Architecture(), new_bpe_tokenizer(["a"], 300))
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (0, 1, None)
    refuses(r"100 tokens, .* vocab_size is 99", check_belong_together, config(vocab_size=99), tokenizer)
    refuses(r"eos_token_id is 2, .* 3", check_belong_together, config(eos_token_id=3), tokenizer)


def test_a_new_encoder_decoder_depends_on_the_seed_alone():
    """It does not depend on numbers drawn since the seed was set, in which ranks may differ."""
    torch.manual_seed(3)
    first = new_encoder_decoder(tiny_config("t5"), "sdpa", torch.float32)
    torch.rand(5)
    second = new_encoder_decoder(tiny_config("t5"), "sdpa", torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("model_type", ["mt5", "umt5", "bart"])
def test_other_encoder_decoders(model_type):
    """A new one knows the tokenizer's tokens, is made for the longest text, and has the dropout of the arguments."""
    t5 = shipped.load(ROOT / "recipes/t5.py")
    sizes = ("d_model=16", "vocab_size=300", *(("encoder_layers=1",) if model_type == "bart" else ("num_layers=1",)))
    argv = (
        "--train_files", str(ROOT / "data/en_fr/libreoffice.jsonl"), "--from_scratch", "--model_type", model_type,
        "--dropout_rate", "0",
    )  # fmt: skip
    lengths = ["--max_source_length", "24", "--max_target_length", "32"]
    args = parse(t5.Args, [*argv, *lengths, "--config_overrides", *sizes], world_size=1)
    tokenizer = new_bpe_tokenizer(["a"], 280, "$A </s>")
    config = t5.make_model(args, tokenizer).config
    assert config.vocab_size == len(tokenizer) and config.decoder_start_token_id == config.pad_token_id == 2
    assert config.eos_token_id == getattr(config, "forced_eos_token_id", 1) == 1
    assert getattr(config, "max_position_embeddings", 32) == 32 and not any(dropouts(config, 0).values())
