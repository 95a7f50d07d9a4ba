"""Tests of --help in groups, and of the schema of presets."""

import contextlib
import json
import re
import sys
from dataclasses import dataclass, fields

import jsonschema
import pytest
import yaml
from helpers import REPOSITORY, ROOT

from accelerate_recipes import __main__
from accelerate_recipes.args import TrainArgs, arg, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.help import GROUPS, recipe_parser, shown_arguments
from accelerate_recipes.arguments.schema import schema
from accelerate_recipes.launch.job_args import JobArgs

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
ESSENTIAL = {
    "config", "model_name_or_path", "dataset_name", "train_files", "output_dir", "max_length", "num_train_epochs",
    "total_batch_size", "per_device_train_batch_size", "learning_rate",
}  # fmt: skip


def shown_by(args_class: type, *words: str, capsys: pytest.CaptureFixture) -> str:
    with contextlib.suppress(SystemExit):
        resolve(args_class, words, world_size=1)
    return capsys.readouterr().out


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  --(\w+)", text, re.MULTILINE)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_help(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["recipes/x.py"])
    args_class = shipped.load(path).Args
    brief, whole = (shown_by(args_class, *words, capsys=capsys) for words in (["--help"], ["--help", "all"]))
    assert len(brief.splitlines()) <= 156 and max(map(len, brief.splitlines())) <= 80
    known = flags_in(whole)
    assert len(known) == len({*known}) > 50, "each flag once"
    left_out = set(known) - set(flags_in(brief))
    assert f"`--help all` shows {len(left_out)} more" in brief and not set(flags_in(brief)) - set(known)
    assert left_out == set(flags_in(whole.partition("\nRare:\n")[2]))

    said = {f.name: f.metadata.get("help", "") for f in fields(args_class)}
    hidden = {name for name in said if name in args_class.owned_elsewhere or said[name].startswith("Deprecated")}
    assert set(known) == {*said, "config"} - hidden
    first = flags_in(brief.partition("\nModel:\n")[0].partition("\nData:\n")[0])
    assert set(first) >= ESSENTIAL & set(known) and len(first) <= 12
    assert not re.search(r"^  --\S+ *\S*$\n  -", whole, re.MULTILINE), "an argument without a help text"


def test_help_shows_choices_ranges_and_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    whole = shown_by(TrainArgs, "--help=all", capsys=capsys)
    assert re.search(r"--adam_beta1 X +AdamW's beta1\. \(at least 0, and below 1; default: 0\.9\)\n", whole)
    assert re.search(r"--reduce_dtype TEXT .+\(fp32, bf16; default: fp32\)\n", whole)
    assert "--async_save, --no_async_save " in whole
    assert shown_by(TrainArgs, "-h", "all", capsys=capsys) == whole
    brief = shown_by(TrainArgs, "--lora_target_modules", "all", "-h", capsys=capsys)
    # What a default like -1 means is said here too; ranges and further sentences are not.
    assert re.search(r"--max_steps N +Optimizer steps; .*\(default: -1\)\n", brief)
    assert "in 4 bits (QLoRA: NF4, by bitsandbytes).\n" in brief and "adam_beta1" not in brief
    # One rank prints it.
    monkeypatch.setenv("RANK", "1")
    assert shown_by(TrainArgs, "--help", capsys=capsys) == ""


@dataclass
class OwnArgs(TrainArgs):
    """Arguments as a user declares them."""

    learning_rate: float = 0.5
    temperature: float = arg(1.0, "Temperature. It divides logits, e.g. those of Llama; 1: none.", above=0)


def test_arguments_of_an_own_recipe(capsys):
    """Another default leaves help, range and group; own arguments are shown."""
    brief = shown_by(OwnArgs, "--help", capsys=capsys)
    assert "Peak learning rate. (default: 0.5)" in brief and "This task:\n  --temperature X" in brief
    groups = {argument.name: argument.group for argument in shown_arguments(OwnArgs, recipe_parser(OwnArgs))}
    assert (groups["learning_rate"], groups["temperature"]) == ("essential", "task")
    assert set(groups.values()) <= GROUPS.keys()
    _, problems = resolve(OwnArgs, ["--learning_rate", "2"], world_size=1)
    assert problems == ["--learning_rate is 2; it must be at least 0, and at most 1 (on the command line)"]


def test_help_of_a_job(capsys):
    shown = shown_by(JobArgs, "--help", capsys=capsys)
    assert shown.startswith("usage: python -m accelerate_recipes k8s KIND") and "--gpus_per_node N" in shown


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "learning_rate"),
        ("model", "model_name_or_path"),
        ("data", "train_files"),
        ("batch_size", "total_batch_size"),
        ("per_device_batch_size", "per_device_train_batch_size"),
    ],
)
def test_names_of_other_programs(typed, meant, tmp_path):
    args_class = shipped.load(ROOT / "recipes/sft.py").Args
    _, problems = resolve(
        args_class, ["--model_name_or_path", "x", "--train_files", "x", f"--{typed}", "1"], world_size=1
    )
    assert f"unknown argument {typed!r} on the command line; did you mean {meant!r}?" in problems
    (tmp_path / "preset.yaml").write_text(f"{typed}: 1\n")
    _, problems = resolve(args_class, ["--config", str(tmp_path / "preset.yaml")], world_size=1)
    assert f"unknown argument {typed!r} in {tmp_path}/preset.yaml; did you mean {meant!r}?" in problems
    # What a recipe lacks is not proposed.
    _, problems = resolve(TrainArgs, [f"--{typed}", "1"], world_size=1)
    assert (meant in problems[0]) == (meant in TrainArgs.__dataclass_fields__), problems


@pytest.mark.parametrize("flag", ["num_processes", "fsdp_activation_checkpointing", "dynamo_backend", "multi_gpu"])
def test_flags_of_the_launcher_behind_the_recipe(flag):
    args_class = shipped.load(ROOT / "recipes/chess.py").Args
    _, (problem,) = resolve(args_class, [f"--{flag}", "true"], world_size=1)
    assert problem.startswith(f"--{flag} (on the command line)")
    assert problem.endswith(f"`accelerate launch --{flag} ... RECIPE`")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("num_proceses", "num_processes"), ("main_proces_port", "main_process_port"), ("num-machine", "num_machines")],
)
def test_misspelt_flags_of_the_launcher_behind_the_recipe(typed, meant):
    """They are nearer than any argument of the recipe, and the message says where they stand."""
    args_class = shipped.load(ROOT / "recipes/chess.py").Args
    _, problems = resolve(args_class, [f"--{typed}", "2"], world_size=1)
    assert len(problems) == 1 and f"unknown argument {typed.replace('-', '_')!r}" in problems[0]
    assert f"did you mean {meant!r}? " in problems[0]
    assert problems[0].endswith(f"`accelerate launch --{meant} ... RECIPE`")
    assert "accelerate launch" not in resolve(JobArgs, [f"--{typed}", "2"], world_size=1)[1][0]


@pytest.mark.parametrize(
    ("script", "typed", "said"),
    [
        ("c4", "llama3", "recipes/configs/c4 holds laptop.yaml, laptop_long.yaml, llama2_13b.yaml"),
        ("t5", "configs/t5/laptop.yaml", "did you mean recipes/configs/t5/laptop.yaml?"),
        ("t5", "laptop", "did you mean recipes/configs/t5/laptop.yaml?"),
        ("template", "laptop", ""),
    ],
)
def test_a_preset_that_is_not_there(script, typed, said, monkeypatch):
    """The message lists those of the recipe, or names the one that was meant."""
    monkeypatch.chdir(REPOSITORY)
    args_class = shipped.load(ROOT / f"recipes/{script}.py").Args
    _, problems = resolve(args_class, ["--config", typed], world_size=1)
    assert problems[0].startswith(f"--config {typed}: no such file{'; ' if said else ''}{said}")
    assert said or problems[0].endswith("no such file")


@pytest.mark.parametrize("given", [["llama3"], ["qwen3_8b", "llama3_1_8b"], []])
def test_what_an_unread_preset_may_give_is_not_missing(given, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    args_class = shipped.load(ROOT / "recipes/sft.py").Args
    flags = [word for name in given for word in ("--config", name)] or ["--config"]
    _, problems = resolve(args_class, [*flags, "--lora_r", "x"], world_size=1)
    assert len(problems) == 2 and problems[0].startswith("--config") and "lora_r" in problems[1]


@pytest.mark.parametrize(
    "words, value",
    [(["--assistant_only_loss"], "true"), (["--assistant_only_loss", "True"], "true"),
     (["--assistant_only_loss", "--packing"], "true"), (["--assistant_only_loss=FALSE"], "false"), ([], "auto")],
)  # fmt: skip
def test_a_choice_of_true_and_false_is_a_switch_too(words, value, tmp_path):
    """As in trl, where it is a bool; a preset may hold it as YAML's bool."""
    args_class = shipped.load(ROOT / "recipes/sft.py").Args
    assert resolve(args_class, words, world_size=1)[0].assistant_only_loss == value
    (tmp_path / "preset.yaml").write_text(f"assistant_only_loss: {value.capitalize()}\n")
    assert (
        resolve(args_class, ["--config", str(tmp_path / "preset.yaml")], world_size=1)[0].assistant_only_loss == value
    )
    jsonschema.validate({"assistant_only_loss": value == "true"}, schema(args_class, "sft"))


def test_a_flag_with_one_dash_is_named():
    _, problems = resolve(TrainArgs, ["--lora_target_modules", "q_proj", "-lr", "3"], world_size=1)
    assert len(problems) == 1 and problems[0].startswith("-lr behind --lora_target_modules ") and "--lr" in problems[0]


def test_a_flag_of_earlier_versions_has_no_foolish_hint():
    args_class = shipped.load(ROOT / "recipes/sft.py").Args
    told, other = resolve(args_class, ["--accept_training_template", "--data_cache_dir", "x"], world_size=1)[1][:2]
    assert "is not an argument of the recipe: remove it" in told
    assert other == "unknown argument 'data_cache_dir' on the command line"


def test_what_is_no_field_of_a_model_has_no_hint_at_one():
    args_class = shipped.load(ROOT / "recipes/chess.py").Args
    argv = ["--epochs", "3", "--zzzz", "1", "--num_hidden_layers", "2"]
    _, (epochs, unknown, layers) = resolve(args_class, argv, world_size=1)
    assert "'epochs'" in epochs and epochs.endswith("'num_train_epochs'?")
    assert "'zzzz'" in unknown and ";" not in unknown
    assert "--config_overrides num_hidden_layers=" in layers


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_schema_describes_what_presets_may_hold(path):
    found = json.loads(json.dumps(schema(shipped.load(path).Args, path.name)))
    jsonschema.Draft202012Validator.check_schema(found)
    validator = jsonschema.Draft202012Validator(found)
    for preset in (ROOT / "recipes/configs" / path.stem).glob("*.yaml"):
        content = yaml.safe_load(preset.read_text())
        content = {
            name: float(value) if str(value)[:1].isdigit() and "e-" in str(value) else value
            for name, value in content.items()
        }
        validator.validate(content)
    for wrong in (
        {"learning_rate": 2},
        {"learning_rat": 0.1},
        {"optim": "sgd"},
        {"seed": 1.5},
        {"seed": 2**31},
        {"lora_dropout": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)
    assert found["properties"]["learning_rate"]["x-group"] == "essential"


def test_schema_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accelerate_recipes", "schema", "--json", str(ROOT / "recipes/template.py")])
    __main__.main()
    found = json.loads(capsys.readouterr().out)["properties"]
    assert found["max_length"]["anyOf"][0] == {"type": "integer", "minimum": 4, "maximum": 2**31 - 1}
    assert found["train_files"]["anyOf"][1] == {"type": "array", "items": {"type": ["string", "number", "boolean"]}}


def test_only_changed_arguments_are_named():
    args, _ = resolve(
        TrainArgs, ["--seed", "7", "--lora_target_modules", "all-linear", "--max_steps", "-1"], world_size=1
    )
    assert args.changed() == {"seed": 7}
    args_class = shipped.load(ROOT / "recipes/c4.py").Args
    args, _ = resolve(args_class, ["--model_name_or_path", "a/b", "--config_overrides", "hidden_size=8"], world_size=1)
    assert args.changed() == {"model_name_or_path": "a/b"}, "sizes of a model that is not made"
