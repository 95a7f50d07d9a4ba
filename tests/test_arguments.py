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

from accelerate_recipes.args import TrainArgs, arg, resolve
from accelerate_recipes.arguments import names, shipped
from accelerate_recipes.arguments.help import GROUPS, recipe_parser, shown_arguments
from recipe_tools.kubernetes import JobArgs
from recipe_tools.schema import schema

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


@pytest.mark.parametrize(("recipe", "typed", "meant"), [
    ("sft", "lr", {"--learning_rate"}),
    ("sft", "batch_size", {"--total_batch_size"}),
    ("sft", "micro_batch_size", {"--per_device_train_batch_size"}),
    ("sft", "adapter", {"--use_peft", "--load_in_4bit"}),
    ("sft", "sample_packing", {"--packing"}),
    ("sft", "cutoff_len", {"--max_length"}),
    ("t5", "cutoff_len", {"--max_source_length", "--max_target_length"}),
    ("sft", "dataset_path", {"--train_files", "--dataset_name"}),
    ("sft", "load_in_8bit", {"--load_in_4bit"}),
    ("t5", "sample_packing", set()),  # what a recipe lacks is not proposed
    ("sft", "galore_rank", set()),
    ("sft", "use_unsloth", set()),
])  # fmt: skip
def test_names_of_other_programs(recipe, typed, meant, preset):
    args_class = shipped.load(ROOT / f"recipes/{recipe}.py").Args
    flags = preset(f"{typed}:\n- path: x\n  type: y\n")
    for given, where in (([f"--{typed}", "1"], "on the command line"), (flags, f"in {flags[1]}")):
        _, problems = resolve(args_class, given, world_size=1)
        (problem,) = [problem for problem in problems if typed in problem]
        said, _, hint = problem.partition("; ")
        assert said == f"unknown argument {typed!r} {where}" and {*re.findall(r"--\w+", hint)} == meant, problem
        assert meant or not hint


def test_the_table_of_names():
    """It stands on the page; what it names is a flag, and no name of it is one of ours or has two meanings."""
    recipes = [shipped.load(file).Args for file in (ROOT / "recipes").glob("*.py")]
    ours = {action.dest for args_class in recipes for action in recipe_parser(args_class)._actions}
    others = [name for some in (names.ELSEWHERE, *names.OTHER_NAMES.values()) for name in some]
    of_launcher = {"num_processes", "config_file", "config", "merge_adapter", "mixed_precision"}
    named = {flag for meant in names.MEANINGS.values() for flag in re.findall(r"--(\w+)", meant)}
    assert named <= ours | of_launcher
    assert len({*others}) == len(others)
    assert not {*others} & TrainArgs.__dataclass_fields__.keys()
    assert names.table() in (ROOT / "docs/names.md").read_text(), (
        "run: python -m accelerate_recipes.arguments.names docs/names.md"
    )


@pytest.mark.parametrize(("typed", "said"), [
    ("rows.jsonl", "no such file; did you mean '{}/data/my_rows.jsonl'?"),
    ("my_rows.txt", "its name must end with .*; c4.py reads .txt"),
    ("games.pgn", "its name must end with .*; chess.py reads .pgn"),
    ("../dat/my_rows.jsonl", "no such file; did you mean '{}/data/../data'?"),
    ("other", "no such file"),
    ("b.jsonl", "no such file"),
    ("my_rows.json", "no such file; did you mean '{}/data/my_rows.jsonl'?"),
    ("://rows.jsonl", " is a URL, which is not read here; copy it to a disk"),
])  # fmt: skip
def test_files_that_are_not_there_or_of_another_recipe(typed, said, tmp_path):
    for name in ("my_rows.jsonl", "my_rows.txt", "games.pgn"):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).touch()
    file = f"{tmp_path}/data/{typed}"
    _, problems = resolve(shipped.load(ROOT / "recipes/sft.py").Args, ["--train_files", file], world_size=1)
    (problem,) = [problem for problem in problems if typed in problem]
    expected = said.format(tmp_path).replace("'?", "'[?]")
    assert re.fullmatch(f"--train_files {re.escape(file)}:? ?{expected}", problem), problem


BEHIND = "`accelerate launch --{} ... RECIPE`$".replace(".", "[.]")
T5 = str(ROOT / "recipes/configs/t5/laptop.yaml")


@pytest.mark.parametrize(("recipe", "argv", "said"), [
    # Flags of the launcher behind the recipe; if they are misspelt, they are nearer than any argument of the recipe.
    *(("chess", [f"--{flag}", "true"], [rf"--{flag} \(on the command line\).*{BEHIND.format(flag)}"])
      for flag in ("num_processes", "fsdp_activation_checkpointing", "dynamo_backend", "multi_gpu")),
    *(("chess", [f"--{typed}", "2"], [rf"unknown argument '{typed.replace('-', '_')}'.*did you mean '{meant}'\? .*{BEHIND.format(meant)}"])
      for typed, meant in (("num_proceses", "num_processes"), ("main_proces_port", "main_process_port"), ("num-machine", "num_machines"))),
    # The presets of a recipe, or the one that was meant.
    ("c4", ["--config", "llama3"], ["--config llama3: no such file; recipes/configs/c4 holds laptop.yaml, laptop_long.yaml, llama2_13b.yaml"]),
    ("t5", ["--config", "configs/t5/laptop.yaml"], [".*no such file; did you mean recipes/configs/t5/laptop.yaml[?]"]),
    ("t5", ["--config", "laptop"], [".*no such file; did you mean recipes/configs/t5/laptop.yaml[?]"]),
    ("template", ["--config", "laptop"], ["--config laptop: no such file$"]),
    ("chess", ["--config", T5], [f"--config {T5} is a preset of t5.py, not of chess.py$", ".*source_column"]),
    ("t5", ["--config", T5, "--lerning_rate", "1"], ["unknown argument 'lerning_rate'"]),  # and not a preset of another recipe
    ("sft", ["--lora_target_modules", "q_proj", "-lr", "3"], ["-lr behind --lora_target_modules .*--lr"]),
    # Of earlier versions.
    ("sft", ["--accept_training_template", "--data_cache_dir", "x"],
     [".*is not an argument of the recipe: remove it", "unknown argument 'data_cache_dir' on the command line$"]),
    ("chess", ["--epochs", "3", "--zzzz", "1", "--num_hidden_layers", "2"],
     ["unknown argument 'epochs'.*`--num_train_epochs`$", "unknown argument 'zzzz'[^;]*$", ".*--config_overrides num_hidden_layers="]),
])  # fmt: skip
def test_what_an_unknown_argument_may_mean(recipe, argv, said, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    _, problems = resolve(shipped.load(ROOT / f"recipes/{recipe}.py").Args, argv, world_size=1)
    for problem, expected in zip(problems, said, strict=False):
        assert re.match(expected, problem), problems
    assert len(problems) >= len(said)


def test_a_job_has_no_flags_of_the_launcher():
    assert "accelerate launch" not in resolve(JobArgs, ["--num_proceses", "2"], world_size=1)[1][0]


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
def test_a_choice_of_true_and_false_is_a_switch_too(words, value, preset):
    """As in trl, where it is a bool; a preset may hold it as YAML's bool."""
    args_class = shipped.load(ROOT / "recipes/sft.py").Args
    assert resolve(args_class, words, world_size=1)[0].assistant_only_loss == value
    args, _ = resolve(args_class, preset(f"assistant_only_loss: {value.capitalize()}\n"), world_size=1)
    assert args.assistant_only_loss == value
    jsonschema.validate({"assistant_only_loss": value == "true"}, schema(args_class, "sft"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_schema_describes_what_presets_may_hold(path):
    found = json.loads(json.dumps(schema(shipped.load(path).Args, path.name)))
    jsonschema.Draft202012Validator.check_schema(found)
    validator = jsonschema.Draft202012Validator(found)
    for preset in (ROOT / "recipes/configs" / path.stem).glob("*.yaml"):
        content = yaml.safe_load(preset.read_text())
        small = {name: float(value) for name, value in content.items() if re.match(r"\d.*e-", str(value))}
        content |= small
        validator.validate(content)
    wrong_values = {"learning_rate": 2, "learning_rat": 0.1, "optim": "sgd", "seed": 1.5, "lora_dropout": 1}
    for wrong in ({"seed": 2**31}, *({name: value} for name, value in wrong_values.items())):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)
    assert found["properties"]["learning_rate"]["x-group"] == "essential"


def test_schema_command(command):
    found = json.loads(command("schema", "--json", ROOT / "recipes/template.py").stdout)["properties"]
    assert found["max_length"]["anyOf"][0] == {"type": "integer", "minimum": 4, "maximum": 2**31 - 1}
    assert found["train_files"]["anyOf"][1] == {"type": "array", "items": {"type": ["string", "number", "boolean"]}}


def test_only_changed_arguments_are_named():
    flags = ["--seed", "7", "--lora_target_modules", "all-linear", "--max_steps", "-1"]
    args, _ = resolve(TrainArgs, flags, world_size=1)
    assert args.changed() == {"seed": 7}
    args_class = shipped.load(ROOT / "recipes/c4.py").Args
    args, _ = resolve(args_class, ["--model_name_or_path", "a/b", "--config_overrides", "hidden_size=8"], world_size=1)
    assert args.changed() == {"model_name_or_path": "a/b"}, "sizes of a model that is not made"
