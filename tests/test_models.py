"""Tests of new models: their sizes, and sizes from which no model can be made."""

import pytest
import torch
from helpers import CONFIGS, ROOT
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, LlamaConfig

from accelerate_recipes import recipe
from accelerate_recipes.architecture import Architecture, check_belong_together, new_config
from accelerate_recipes.args import parse
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.preflight import preflight
from accelerate_recipes.models import load_model, new_model, new_t5
from accelerate_recipes.positions import stretched_positions
from accelerate_recipes.tokenizers import new_word_tokenizer

PRESETS = ROOT / "recipes/configs/c4"
# Numbers of parameters as published with the models' weights.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
}


def parsed(*argv: str):
    return parse(recipe.load(ROOT / "recipes/c4.py").Args, argv, world_size=8)


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


def test_llama3_stretches_its_rotary_waves():
    """Long waves are stretched by the factor, short ones not at all. Source: the config.json of Llama 3.1 and 3.2."""
    for name, factor in (("llama3_1_8b", 8.0), ("llama3_2_1b", 32.0)):
        assert new_config(parsed("--config", str(PRESETS / f"{name}.yaml"))).rope_parameters == {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    default = new_config(parsed("--config", str(PRESETS / "llama2_7b.yaml"))).rope_parameters
    assert default == {"rope_type": "default", "rope_theta": 10000.0}


TINY = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
STRETCH = (
    "--rope_scaling_factor", "4", "--rope_original_max_position_embeddings", "64", "--max_position_embeddings", "256",
    "--max_length", "256", "--max_steps", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> str:
    """Folder of a pretrained model that reads 64 tokens."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("published")
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(folder)
    return str(folder)


def test_a_pretrained_model_is_stretched(published, tmp_path, capsys):
    """It computes what the model with a changed config.json computes, and is saved with it; a second time is the same."""
    args = parsed("--model_name_or_path", published, *STRETCH, "--rope_theta", "50000")
    model = load_model(published, "sdpa", stretch=args)
    wanted = {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert model.config.rope_parameters == wanted and model.config.max_position_embeddings == 256
    assert "'factor': 4.0" in capsys.readouterr().out
    by_hand = AutoModelForCausalLM.from_config(
        LlamaConfig(**TINY | {"max_position_embeddings": 256}, rope_parameters=wanted)
    )
    by_hand.load_state_dict(load_model(published, "sdpa").state_dict())
    ids = torch.arange(200)[None] % 100
    assert torch.equal(model(ids).logits, by_hand(ids).logits)
    assert not torch.equal(model(ids).logits, load_model(published, "sdpa")(ids).logits)
    model.save_pretrained(tmp_path)
    for again in (load_model(str(tmp_path), "sdpa"), load_model(str(tmp_path), "sdpa", stretch=args)):
        assert again.config.rope_parameters == wanted and torch.equal(again(ids).logits, model(ids).logits)
    unchanged = load_model(published, "sdpa", stretch=parsed("--model_name_or_path", published, "--max_steps", "1"))
    assert unchanged.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert {"rope_scaling_factor", "rope_theta", "max_position_embeddings"} <= type(args).fixed_on_resume()


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--max_length", "257"], "--max_length is 257, but the model is made for --max_position_embeddings 256"),
        (["--rope_high_freq_factor", "1"], "--rope_high_freq_factor 1.0 must be above --rope_low_freq_factor 1.0"),
        (["--use_peft"], "the files of an adapter do not say how positions are stretched; add --merge_adapter"),
        (
            ["--rope_original_max_position_embeddings", "32"],
            "--rope_original_max_position_embeddings is 32, but .* was first trained for 64 tokens; set it to 64",
        ),
        (
            ["--max_position_embeddings", "32", "--max_length", "32"],
            "--max_position_embeddings 32 is what .* which is 64 already; set it to 64 or more",
        ),
    ],
)
def test_what_cannot_be_stretched(flags, reason, published, tmp_path):
    argv = ["--model_name_or_path", published, "--output_dir", str(tmp_path / "out"), *STRETCH, *flags]
    with pytest.raises(ConfigError, match=reason):
        preflight(
            [
                str(CONFIGS / "single.yaml"),
                str(ROOT / "recipes/c4.py"),
                "--dataset_name",
                str(ROOT / "data/c4_pydoc"),
                *argv,
            ]
        )


@pytest.mark.parametrize(
    "config, kind",
    [
        (BloomConfig(), "none, or several"),
        (Gemma3TextConfig(), "none, or several"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
    ids=["no rotary embedding", "one for each kind of layer", "dynamic"],
)
def test_only_one_rotary_embedding_is_stretched(config, kind):
    args = parsed("--model_name_or_path", "m", *STRETCH)
    with pytest.raises(ConfigError, match=f"m has {kind}; leave them out, and change the config.json"):
        stretched_positions(config, "m", args)


def test_any_field_can_be_overridden():
    preset = ("--config", str(PRESETS / "mixtral_8x7b.yaml"))
    config = new_config(parsed(*preset, "--num_hidden_layers", "2", "--num_local_experts", "4", "--head_dim", "64"))
    assert (config.num_hidden_layers, config.num_local_experts, config.head_dim) == (2, 4, 64)
    assert new_model(config, "sdpa").model.layers[1].mlp.experts.gate_up_proj.shape == (4, 2 * 14336, 4096)
    for name in Architecture.__dataclass_fields__:
        assert name == "model_type" or name.startswith("rope_") or hasattr(config, name), name


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--hidden_size", "100", "--num_attention_heads", "8"], "--hidden_size 100 is not an even multiple of"),
        (["--num_key_value_heads", "5"], "--num_attention_heads 32 is not a multiple of --num_key_value_heads 5"),
        (["--sliding_window", "4096"], "--sliding_window 4096: llama has none"),
        (["--max_length", "8192"], "--max_length is 8192, but the model is made for --max_position_embeddings 4096"),
    ],
)
def test_mistakes(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        parsed("--config", str(PRESETS / "llama2_7b.yaml"), *flags)


def test_a_vocabulary_that_does_not_fit():
    tokenizer = new_word_tokenizer([f"w{i}" for i in range(96)])  # 100 tokens; <s> is 1, </s> is 2
    check_belong_together(new_config(Architecture(vocab_size=100)), tokenizer, 4096)
    check_belong_together(new_config(Architecture(vocab_size=128)), tokenizer, 4096)
    with pytest.raises(ConfigError, match="the tokenizer has 100 tokens, the model's vocab_size is 99"):
        check_belong_together(new_config(Architecture(vocab_size=99)), tokenizer, 4096)
    with pytest.raises(
        ConfigError, match=r"eos_token_id is 2, the model's is 3(.|\n)*--max_length is 4097, the model's is 4096"
    ):
        check_belong_together(new_config(Architecture(eos_token_id=3)), tokenizer, 4097)


def test_a_new_t5_depends_on_the_seed_alone():
    """A new T5 does not depend on numbers drawn since the seed was set, in which ranks may differ."""
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(3)
    first = new_t5("sdpa", torch.float32, **sizes)
    torch.rand(5)
    second = new_t5("sdpa", torch.float32, **sizes)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
