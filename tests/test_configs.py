"""The shipped YAMLs say what they do, and preflight finds what Accelerate would drop without a word."""

import pytest
import yaml
from helpers import CONFIGS, ROOT

from accelerate_recipes.args import ConfigError
from accelerate_recipes.preflight import launch_environment, preflight, yaml_problems

SHIPPED = sorted(CONFIGS.glob("*.yaml"))
LAPTOP = [str(ROOT / "recipes/chess.py"), "--config", str(ROOT / "recipes/configs/chess/laptop.yaml")]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped(path):
    assert yaml_problems(path) == []
    text, content = path.read_text(), yaml.safe_load(path.read_text())
    for word in ("# Choose it:", "# Costs:", "# Needs:"):
        assert word in text
    assert content["mixed_precision"] == "bf16"
    assert content["num_processes"] == {"single": 1, "fsdp_hybrid": 4}.get(path.stem, 2)
    if content["distributed_type"] == "FSDP":
        fsdp = content["fsdp_config"]
        strategy = "fsdp_reshard_after_forward" if fsdp["fsdp_version"] == 2 else "fsdp_sharding_strategy"
        assert {"fsdp_auto_wrap_policy", "fsdp_state_dict_type", strategy} <= set(fsdp)
        assert "fsdp_transformer_layer_cls_to_wrap" not in fsdp


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_reaches_the_environment(path):
    """Each FSDP setting is what the launcher hands on."""
    content = yaml.safe_load(path.read_text())
    env = launch_environment(["--config_file", str(path), "recipe.py"])
    assert env["WORLD_SIZE"] == str(content["num_processes"])
    for key, value in (content.get("fsdp_config", {}) | content.get("parallelism_config", {})).items():
        assert env[key.upper()].lower() == str(value).lower()


def test_ready():
    assert "2 processes; 16 sequences a step = 2 processes x 8 x 1" in preflight(
        [str(CONFIGS / "fsdp_full.yaml"), *LAPTOP]
    )


def test_launch_flags_count():
    argv = [
        str(CONFIGS / "fsdp_full.yaml"),
        "--num_processes",
        "4",
        *LAPTOP,
        "--per_device_train_batch_size",
        "4",
    ]
    assert "4 processes x 4 x 1" in preflight(argv)


BROKEN = """
distributed_type: FSDP
mixed_precision: bf61
num_procesess: 2
parallelism_config:
  dp_replicate_size: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_polcy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: maybe
"""


def test_all_problems_of_yaml_and_arguments_at_once(tmp_path):
    config = tmp_path / "broken.yaml"
    config.write_text(BROKEN)
    with pytest.raises(ConfigError) as caught:
        preflight([str(config), *LAPTOP, "--lerning_rate", "1", "--train_files", "nowhere.pgn"])
    text = str(caught.value)
    for expected in (
        "unknown key 'num_procesess'; did you mean 'num_processes'?",
        "mixed_precision is 'bf61'; it must be one of bf16, fp16, fp8, no",
        "parallelism_config has an unknown key 'dp_replicate_size', which Accelerate ignores; "
        "did you mean 'parallelism_config_dp_replicate_size'?",
        "unknown key 'fsdp_auto_wrap_polcy', which Accelerate ignores; did you mean 'fsdp_auto_wrap_policy'?",
        "fsdp_sharding_strategy has no effect with fsdp_version: 2; use fsdp_reshard_after_forward",
        "fsdp_offload_params is 'maybe'; it must be one of false, true",
        "num_processes is None",
        "unknown argument 'lerning_rate' on the command line; did you mean 'learning_rate'?",
        "--train_files nowhere.pgn: no such file",
    ):
        assert expected in text


def test_refused_strategies_and_batches(tmp_path):
    config = tmp_path / "config.yaml"
    content = yaml.safe_load((CONFIGS / "fsdp_full.yaml").read_text())
    content["fsdp_config"]["fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP"
    content["mixed_precision"] = "fp16"
    config.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as caught:
        preflight([str(config), "--num_processes", "3", *LAPTOP])
    for expected in (
        "fp16 is not supported",
        "fsdp1_size_wrap.yaml",
        "8 x 3 processes = 24; totals that work: 24",
    ):
        assert expected in str(caught.value)


def test_wrap_class_and_missing_model(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "m")
    config = tmp_path / "config.yaml"
    content = yaml.safe_load((CONFIGS / "fsdp_full.yaml").read_text())
    content["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "LlamaDecodrLayer"
    config.write_text(yaml.safe_dump(content))
    chess = [
        str(ROOT / "recipes/chess.py"),
        "--train_files",
        "data/chess/games_20k.parquet",
        "--model_name_or_path",
    ]
    with pytest.raises(ConfigError, match=r"LlamaDecodrLayer is not in .*; did you mean 'LlamaDecoderLayer'\?"):
        preflight([str(config), *chess, str(tmp_path / "m")])
    download = (
        r"model 'nobody/nothing' is not in .*/hub.*\n.* python -m accelerate_recipes download .*chess.py --train_files"
    )
    with pytest.raises(ConfigError, match=download):
        preflight([str(CONFIGS / "fsdp_full.yaml"), *chess, "nobody/nothing"])
