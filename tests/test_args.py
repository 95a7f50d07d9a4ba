"""Tests of arguments: presets, flags, and errors that name the remedy and come all at once."""

import argparse
import datetime
import re
import typing
from dataclasses import asdict, fields, replace

import pytest
import torch
import yaml
from accelerate.utils import set_seed
from helpers import ROOT, refused
from transformers import TrainingArguments
from trl import ModelConfig

from accelerate_recipes.args import TrainArgs, parse, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.declaring import Merge, Range
from accelerate_recipes.arguments.help import recipe_parser
from accelerate_recipes.data.rows import permutation
from accelerate_recipes.launch.checks import lever_problems
from accelerate_recipes.optim import make_scheduler, optimizer_fn
from recipe_tools.commands import command_parser
from recipe_tools.kubernetes import JobArgs
from recipe_tools.space import space_needed

# Arguments for which neither `transformers.TrainingArguments` nor (for adapters) trl's `ModelConfig` has a name.
OURS = {
    "total_batch_size", "min_lr_ratio", "save_minutes", "keep_every_n_steps", "async_save", "step_timeout",
    "prefetch_layers", "checkpoint_every_n_layers", "activation_memory_budget", "reduce_dtype",
    "merge_adapter",
    "text_only_export",
    "data_only", "profile_steps", "profile_ranks", "mirror", "mirror_bandwidth",
    "spike_factor", "on_spike", "max_skips", "verify_replicas",
}  # fmt: skip


def test_names_are_those_of_training_arguments():
    theirs = {field.name for config in (TrainingArguments, ModelConfig) for field in fields(config)}
    assert {field.name for field in fields(TrainArgs)} - theirs == OURS


def test_defaults_then_preset_then_flags(preset):
    flags = [*preset("learning_rate: 1e-3\nseed: 7\n"), "--seed", "8"]  # PyYAML reads 1e-3 as a string
    args = parse(TrainArgs, flags, world_size=1)
    assert (args.learning_rate, args.seed, args.logging_steps) == (1e-3, 8, TrainArgs.logging_steps)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_list_that_is_given_several_times(path, preset):
    """Its values add up, in each spelling of its flag, and replace those of the preset; of a single value the last counts."""
    args_class = shipped.load(path).Args
    actions = recipe_parser(args_class)._actions
    lists = [a for a in actions if a.nargs == "+" and a.help != argparse.SUPPRESS and not isinstance(a, Merge)]
    assert len(lists) > 1
    for action in lists:
        values = [*(action.choices if isinstance(action.choices, list | tuple) else "123")][:3]
        given = [word for pair in zip([*action.option_strings] * 3, values, strict=False) for word in pair]
        argv = [*preset(f"{action.dest}: [{values[-1]}]\nseed: 4\n"), "--seed", "5", *given, "--seed", "6"]
        args, _ = resolve(args_class, argv, world_size=1)
        wanted = [*map(action.type or str, values)]
        assert (getattr(args, action.dest), args.seed) == (wanted, 6)


def test_lists_of_commands_add_up():
    """Those of a job are declared like those of a recipe; the others must use the same action."""
    flags = ["--annotation", "a=1", "--annotation", "b=2", "--node-selector=c=3", "--node_selector", "d=4"]
    job, _ = resolve(JobArgs, flags, world_size=1)
    assert (job.annotation, job.node_selector) == (["a=1", "b=2"], ["c=3", "d=4"])
    parsers = [command_parser()]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.nargs == "+" and action.option_strings:
                assert isinstance(action, argparse._ExtendAction), action.option_strings
    args = command_parser().parse_args(["check-export", "x", "--prompt", "a", "--prompt", "b", "c"])
    assert args.prompt == ["a", "b", "c"]


@pytest.mark.parametrize(
    "text", ["no", "010", "3.10", "1_000", "2024-01-01", "0x1F", "1:30", "1.0e+400", "on", "=", "Null s"]
)
def test_texts_of_a_preset_stay_as_they_stand(text, preset):
    flags = preset(f"output_dir: &text {text}\nlora_target_modules: [*text, {text}]")
    args, _ = resolve(TrainArgs, flags, world_size=1)
    assert args.output_dir == text and args.lora_target_modules == [text, text]


def test_numbers_and_switches_of_a_preset_are_read_as_on_the_command_line(preset):
    flags = preset(
        "seed: 010\nlearning_rate: 1e-3\nasync_save: no\ngreater_is_better: ~\nwarmup_steps: &few 7\nlogging_steps: *few"
    )
    args = parse(TrainArgs, flags, world_size=1)
    assert (args.seed, args.learning_rate, args.async_save, args.greater_is_better) == (10, 1e-3, False, None)
    assert args.warmup_steps == args.logging_steps == 7


def test_saved_arguments_are_a_preset(tmp_path):
    args = parse(TrainArgs, ["--max_steps", "7", "--warmup_steps=0.5"], world_size=1)
    args.save(tmp_path / "args.yaml")
    assert parse(TrainArgs, ["--config", str(tmp_path / "args.yaml")], world_size=1) == args
    assert yaml.safe_load((tmp_path / "args.yaml").read_text()) == asdict(args)


@pytest.mark.parametrize(("given", "said", "length"), [
    (["--max_length", "none", "--padding_free"], "", None), (["--max_length=None", "--packing"], "which is none", None),
    ("max_length: null", "", None), ("max_length: none", "", None), ("max_length: 7", "", 7),
    (["--padding_free"], "--max_length none", 1024), (["--logging_steps", "none"], "invalid int value: 'none'", 1024),
])  # fmt: skip
def test_none_where_none_is_a_value(given, said, length, preset, tmp_path):
    """None of trl's max_length: as a flag and in a preset, also in one that a run has saved."""
    flags = preset(given) if isinstance(given, str) else given
    args_class = shipped.load(str(ROOT / "recipes/sft.py")).Args
    base = ["--model_name_or_path", "any/model", "--dataset_name", "any/rows"]
    args, problems = resolve(args_class, [*base, *flags], world_size=1)
    assert args.max_length == length and (said in problems[0] if said else not problems)
    args.save(tmp_path / "args.yaml")
    assert resolve(args_class, ["--config", str(tmp_path / "args.yaml")], world_size=1)[0].max_length == length
    found = lever_problems(args, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}, 0)
    assert not args.shares_rows or not any("parallelism_config_cp_size" in problem for problem in found)


def test_all_problems_at_once(preset):
    flags = preset("learning_rat: 3\nconfig: other.yaml\n")
    argv = [*flags, "--sed", "1", "--max_steps", "many", "--gradient_checkpointing", "true", "--bf16"]
    with refused(
        f"unknown argument 'learning_rat' in {flags[1]}; did you mean 'learning_rate'?",
        f"unknown argument 'config' in {flags[1]}",
        "unknown argument 'sed' on the command line; did you mean 'seed'?",
        "invalid int value: 'many'",
        "fsdp_activation_checkpointing: true",
        "mixed_precision: bf16",
        # All three numbers, and the totals that work.
        "--total_batch_size 16 is not a multiple of --per_device_train_batch_size 1 x 3 ",
        "15 or 18",
    ):
        parse(TrainArgs, argv, world_size=3)


@pytest.mark.parametrize(
    "total, per_device, world_size, steps", [(8, 4, 2, 1), (8, 1, 4, 2), (12, 3, 1, 4), (64, 1, 8, 8)]
)
def test_accumulation_follows_from_the_total(total, per_device, world_size, steps):
    argv = ["--total_batch_size", str(total), "--per_device_train_batch_size", str(per_device)]
    assert parse(TrainArgs, argv, world_size).accumulation_steps(world_size) == steps


@pytest.mark.parametrize("argv, reason", [
    (["--keep_every_n_steps", "300"], "--keep_every_n_steps 300 is not a multiple of --save_steps 500"),
    (["--metric_for_best_model", "loss"], r"make --save_steps \(500\) a multiple of --eval_steps \(0\)"),
    (["--step_timeout", "0"], "--step_timeout is 0; it must be at least 1"),
    (["--total_batch_size", "8", "--per_device_train_batch_size", "12"],  # no accumulation step
     r"totals that work: 12, or --per_device_train_batch_size 8$"),
    (["--learning", "1"], "unknown argument 'learning'"),
    (["--num_train_epochs", "0", "--max_steps", "5"], None),
    (["--metric_for_best_model", "loss", "--save_steps", "4", "--eval_steps", "2"], None),
])  # fmt: skip
def test_arguments_that_are_refused_or_go_together(argv, reason):
    _, problems = resolve(TrainArgs, argv, world_size=1)
    assert bool(problems) == bool(reason) and re.search(reason or "", "\n".join(problems)), problems


RECIPES = sorted((ROOT / "recipes").glob("*.py"))
NO_NUMBERS = ["nan", "inf", "-inf", "1e400", "", "ten", "1 2"]
NASTY = [
    *NO_NUMBERS, "-1", "-0.5", "0", "1e-300", "0.5", "1", "1.5", "2", "3", "5000000000", "1e308", "9" * 30, "-1e-5",
]  # fmt: skip


def numeric(args_class: type[TrainArgs]) -> dict[str, Range | None]:
    """Return a recipe's arguments that are numbers or lists of numbers, with their ranges in its parser."""
    found, hints = {}, typing.get_type_hints(args_class)
    choices = {action.dest: action.choices for action in recipe_parser(args_class)._actions}
    for f in fields(args_class):
        kind = hints[f.name]
        kinds = {kind, *typing.get_args(kind)} | {k for part in typing.get_args(kind) for k in typing.get_args(part)}
        if {int, float} & kinds and str not in kinds and f.name not in args_class.owned_elsewhere:
            found[f.name] = choices[f.name]
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_number_has_its_range(path):
    args_class = shipped.load(path).Args
    found = numeric(args_class)
    assert len(found) > 28
    assert [name for name, limits in found.items() if not isinstance(limits, Range)] == []
    assert args_class.ranges.keys() <= {f.name for f in fields(args_class)}  # else a field of trl's was renamed
    for name, limits in found.items():
        default = getattr(args_class(), name)
        for number in default if isinstance(default, list) else [default]:
            assert number is None or limits.problem(number) == ""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nasty_numbers_are_taken_or_refused_by_name(path):
    """With nasty values in all fields at once, each field has its message or its value; nothing is raised."""
    args_class = shipped.load(path).Args
    names = numeric(args_class)
    for value in NASTY:
        argv = [word for name in names for word in (f"--{name}", *value.split(" "))]
        args, problems = resolve(args_class, argv, world_size=1)
        for name in names:
            refused = (
                f"--{name} is {value}; it must be ",
                f"--{name} takes one value, not 2: {value} (",
                f"argument --{name}/",
            )
            refused += (f"argument --{name}:",)
            said = [problem for problem in problems if problem.startswith(refused)]
            if not said:
                kept = getattr(args, name)
                assert value not in NO_NUMBERS or (value == "1 2" and isinstance(kept, list)), name
                assert (kept[0] if isinstance(kept, list) else kept) == float(value.split(" ")[0]), name


def use(args: TrainArgs, folder) -> None:
    """Call everything that takes the common arguments, with these arguments."""
    set_seed(args.seed + 10**6 + 1000)  # plus a step and a rank
    assert sorted(permutation(3, args.seed, epoch=1)) == [0, 1, 2]
    datetime.timedelta(seconds=max(args.ddp_timeout, args.step_timeout))
    space_needed(replace(args, output_dir=str(folder)), 10, 10, None)
    torch.utils.data.DataLoader([0], num_workers=args.dataloader_num_workers)
    for optim in ("adamw_torch_fused", "adafactor"):
        model = torch.nn.Linear(3, 2)
        optimizer = optimizer_fn(model, replace(args, optim=optim))(model)
        scheduler = make_scheduler(optimizer, args, total_steps=2)
        for _ in range(3):
            # A row without a gradient, as of a token that does not occur.
            (model(torch.ones(3)) * torch.tensor([1.0, 0.0])).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_is_taken_works(tmp_path):
    """Optimizers and schedulers work with each nasty value that is in the range of a shared field."""
    tried = 0
    for name in numeric(TrainArgs):
        for value in NASTY:
            args, problems = resolve(TrainArgs, [f"--{name}={value}"], world_size=1)
            if not problems:
                use(args, tmp_path)
                tried += 1
    assert tried > 100


LAUGHS = "a0: &a0 [x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 20)}]\n" for i in range(1, 20))


@pytest.mark.parametrize("content, expected", [
    (b"learning_rate: [1e-4, 1e-5]", "--learning_rate takes one value, not 2: 1e-4 1e-5 (in "),
    (b"learning_rate: {a: 1}", "learning_rate in "),
    (b"output_dir: {a: 1}", "it must be one value, or a list of some"),
    (b"metric_for_best_model: gr\xfc\xdfe", "is not UTF-8 (byte 25); save it as UTF-8"),
    (b"seed: 2024-13-45", "invalid int value: '2024-13-45'"),
    (b"seed: 1:30", "invalid int value: '1:30'"),
    (b"lora_target_modules: [q_proj, ~]", "it must be one value, or a list of some"),
    (b"output_dir: !!set {a}", "it must be one value, or a list of some"),
    (b"seed: 1\nmax_steps: 3\nseed: 1", "seed stands twice, in lines 1 and 3; remove one"),
    (b"seed: " + b"[" * 3000, "is nested too deeply"),
    (LAUGHS.encode(), "an alias repeats a list or a section with others in it"),
    (b"seed: [", "is not YAML: "),
    (b"- seed", "must hold `name: value` lines, not a list"),
    (b"seed: true", "invalid int value: 'true'"),
    (b"seed: 1e3", "invalid int value: '1e3'"),
])  # fmt: skip
def test_bad_presets(content, expected, tmp_path):
    (tmp_path / "preset.yaml").write_bytes(content)
    with refused(expected) as caught:
        parse(TrainArgs, ["--config", str(tmp_path / "preset.yaml")], world_size=1)
    assert len(str(caught.value).split("\n  - ")) == 2


def test_negative_numbers_as_they_are_typed():
    """argparse alone takes -1e-3 for a flag."""
    args_class = shipped.load(ROOT / "recipes/t5.py").Args
    argv = ["--generation_num_beams", "2", "--generation_length_penalty", "-1e-3"]
    assert parse(args_class, argv, world_size=1).generation_length_penalty == -1e-3


@pytest.mark.parametrize("name", ["c4", "chess", "sft", "t5", "vit"])
def test_a_pretrained_model_has_no_sizes_of_a_new_one(name):
    """Neither the start, nor a checkpoint, nor the model card names what was not used."""
    args = shipped.load(ROOT / f"recipes/{name}.py").Args()
    args.model_name_or_path, args.from_scratch = "a/model", False
    of_new = {"config_overrides", "hidden_size", "image_size", "model_type"}
    assert not of_new & args.values().keys() and {"seed", "model_name_or_path"} <= args.values().keys()
    args.model_name_or_path, args.from_scratch = "", True
    assert of_new & args.values().keys()
