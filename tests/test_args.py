"""One place for arguments: presets, flags, errors that name the remedy, all at once."""

from dataclasses import asdict, fields

import pytest
import yaml
from transformers import TrainingArguments
from trl import ModelConfig

from accelerate_recipes.args import ConfigError, TrainArgs, parse

# What neither `transformers.TrainingArguments` nor, of adapters, trl's `ModelConfig` has a name for.
OURS = {
    "total_batch_size", "min_lr_ratio", "save_minutes", "keep_every_n_steps", "async_save", "step_timeout",
    "prefetch_layers", "checkpoint_every_n_layers", "reduce_dtype", "merge_adapter",
}  # fmt: skip


def test_names_are_those_of_training_arguments():
    theirs = {field.name for config in (TrainingArguments, ModelConfig) for field in fields(config)}
    assert {field.name for field in fields(TrainArgs)} - theirs == OURS


def test_defaults_then_preset_then_flags(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("learning_rate: 1e-3\nseed: 7\n")  # PyYAML reads 1e-3 as a string
    args = parse(TrainArgs, ["--config", str(preset), "--seed", "8"], world_size=1)
    assert (args.learning_rate, args.seed, args.logging_steps) == (1e-3, 8, TrainArgs.logging_steps)


def test_saved_arguments_are_a_preset(tmp_path):
    args = parse(TrainArgs, ["--max_steps", "7", "--warmup_steps=0.5"], world_size=1)
    args.save(tmp_path / "args.yaml")
    assert parse(TrainArgs, ["--config", str(tmp_path / "args.yaml")], world_size=1) == args
    assert yaml.safe_load((tmp_path / "args.yaml").read_text()) == asdict(args)


def test_all_problems_at_once(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("learning_rat: 3\nconfig: other.yaml\n")
    argv = [
        "--config",
        str(preset),
        "--sed",
        "1",
        "--max_steps",
        "many",
        "--gradient_checkpointing",
        "true",
        "--bf16",
    ]
    with pytest.raises(ConfigError) as caught:
        parse(TrainArgs, argv, world_size=3, other_problems=lambda args: ["the launch is wrong"])
    text = str(caught.value)
    assert f"unknown argument 'learning_rat' in {preset}; did you mean 'learning_rate'?" in text
    assert f"unknown argument 'config' in {preset}" in text
    assert "unknown argument 'sed' on the command line; did you mean 'seed'?" in text
    assert "invalid int value: 'many'" in text
    assert "fsdp_activation_checkpointing: true" in text
    assert "mixed_precision: bf16" in text
    assert "the launch is wrong" in text
    # All three numbers, and the totals that work.
    assert "--total_batch_size 16 is not a multiple of --per_device_train_batch_size 1 x 3 processes = 3" in text
    assert "15 or 18" in text


@pytest.mark.parametrize(
    "total, per_device, world_size, steps", [(8, 4, 2, 1), (8, 1, 4, 2), (12, 3, 1, 4), (64, 1, 8, 8)]
)
def test_accumulation_follows_from_the_total(total, per_device, world_size, steps):
    argv = ["--total_batch_size", str(total), "--per_device_train_batch_size", str(per_device)]
    assert parse(TrainArgs, argv, world_size).accumulation_steps(world_size) == steps


def test_a_total_too_small_for_the_ranks_is_refused():
    """Integer division would give 0 accumulation steps."""
    with pytest.raises(ConfigError, match="totals that work: 16"):
        parse(TrainArgs, ["--total_batch_size", "8", "--per_device_train_batch_size", "4"], world_size=4)


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--keep_every_n_steps", "300"], "--keep_every_n_steps 300 is not a multiple of --save_steps 500"),
        (["--metric_for_best_model", "loss"], r"make --save_steps \(500\) a multiple of --eval_steps \(0\)"),
        (["--step_timeout", "0"], "--step_timeout is 0; it must be at least 1"),
    ],
)
def test_numbers_that_contradict(argv, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(TrainArgs, argv, world_size=1)


def test_abbreviations_are_unknown():
    with pytest.raises(ConfigError, match="unknown argument 'learning'"):
        parse(TrainArgs, ["--learning", "1"], world_size=1)


def test_missing_preset():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        parse(TrainArgs, ["--config", "nowhere.yaml"], world_size=1)
