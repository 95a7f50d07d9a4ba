"""What may not be combined: the checks that refuse a launch, asked for every recipe, strategy, lever and kind of model.

Nothing here decides: `preflight`'s checks do. `tests/models_table.py` writes the result into docs/models.md.
"""

import itertools
import os
import re
import warnings
from collections.abc import Iterable
from functools import cache
from unittest import mock

import torch
from helpers import REPOSITORY
from tiny import tiny_model
from transformers import PreTrainedModel

from accelerate_recipes.args import Args, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.launch import requirements
from accelerate_recipes.launch.checks import environment_problems, lever_problems
from recipe_tools.request import launch_environment

STRATEGIES = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
RECIPES = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
CHECKPOINTING = ("--fsdp_activation_checkpointing", "true")
BY_LAYER = ("--dynamo_backend", "inductor", "--dynamo_use_regional_compilation")
# A lever's name on the page: the launcher's flags, the recipe's flags.
LEVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "`mixed_precision: no`": (("--mixed_precision", "no"), ()),
    "`mixed_precision: fp16`": (("--mixed_precision", "fp16"), ()),
    "activation checkpointing": (CHECKPOINTING, ()),
    "activation checkpointing, `--checkpoint_every_n_layers 2`": (CHECKPOINTING, ("--checkpoint_every_n_layers", "2")),
    "compilation by layer": (BY_LAYER, ()),
    "compilation of the whole model": (("--dynamo_backend", "inductor"), ()),
    "`--prefetch_layers 2`": ((), ("--prefetch_layers", "2")),
    "`--reduce_dtype bf16`": ((), ("--reduce_dtype", "bf16")),
    "`mixed_precision: no`, `--optim adamw_bf16_kahan`": (("--mixed_precision", "no"), ("--optim", "adamw_bf16_kahan")),
    "`mixed_precision: bf16`, `--optim adamw_bf16_kahan`": (("--mixed_precision", "bf16"), ("--optim", "adamw_bf16_kahan")),
    "`--optim adafactor`": ((), ("--optim", "adafactor")),
    "`--optim adamw_8bit`": ((), ("--optim", "adamw_8bit")),
    "`--use_peft`": ((), ("--use_peft",)),
    "`--use_peft --use_dora`": ((), ("--use_peft", "--use_dora")),
    "`--use_peft --load_in_4bit`": ((), ("--use_peft", "--load_in_4bit")),
    "`--use_peft --merge_adapter`": ((), ("--use_peft", "--merge_adapter")),
    "`--attn_implementation documents`": ((), ("--attn_implementation", "documents")),
}  # fmt: skip
MACHINES = {"8 GPUs": 8, "2 CPU processes": 0}
BASE = ("--model_name_or_path", "m", "--max_steps", "10", "--total_batch_size", "64")
MORE = {
    "distill": ("--teacher_model_name_or_path", "t"),
    "template": ("--train_files", str(REPOSITORY / "data/en_fr/libreoffice.jsonl")),
    "grpo": ("--rewards", "think_format_reward"),
}


@cache
def environment(strategy: str, num_devices: int, flags: tuple[str, ...]) -> dict[str, str] | str:
    """Return the environment of a launch on one machine, or what the launcher says instead."""
    config = REPOSITORY / f"accelerate_configs/{strategy}.yaml"
    num_processes = 1 if strategy.startswith("single") else num_devices or 2
    num_processes = max(4, num_processes) if strategy == "fsdp_hybrid" else num_processes  # 2 x 2 at least
    launch = ["--config_file", str(config), "--num_processes", str(num_processes)]
    if strategy == "fsdp_hybrid":
        launch += ["--parallelism_config_dp_replicate_size", "2"]
        launch += ["--parallelism_config_dp_shard_size", str(num_processes // 2)]
    if strategy == "fsdp_long":
        launch += ["--parallelism_config_dp_shard_size", str(num_processes // 2)]
    try:
        return launch_environment([*launch, *flags, "recipe.py"])
    except ValueError as error:
        return f"accelerate launch refuses: {error}"


load = cache(shipped.load)


@cache
def arguments(name: str, flags: tuple[str, ...], world_size: int) -> tuple[Args, list[str]]:
    """Return a recipe's arguments, and what is wrong with them."""
    module = load(REPOSITORY / f"recipes/{name}.py")
    dataset = () if name == "template" else ("--dataset_name", "d")
    return resolve(module.Args, [*BASE, *dataset, *MORE.get(name, ()), *flags], world_size)


@cache
def strategy_problems(
    strategy: str, machine: str, launch_flags: tuple[str, ...], flags: tuple[str, ...], name: str = "chess"
) -> list[str]:
    """List what the checks of the launch say; the recipe's arguments are those of `name`."""
    num_devices = MACHINES[machine]
    env = environment(strategy, num_devices, launch_flags)
    if isinstance(env, str):
        return [env]
    args, _ = arguments(name, flags, int(env["WORLD_SIZE"]))
    # This machine's GPU, if it has one, is not that of the launch.
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return environment_problems(env, num_devices) + lever_problems(args, env, num_devices)


def by_strategy(machine: str) -> dict[tuple[str, str], list[str]]:
    """Ask for each lever and strategy; a refusal of the strategy alone stands under the lever ''."""
    found = {}
    for strategy in STRATEGIES:
        alone = strategy_problems(strategy, machine, (), ())
        found["", strategy] = alone
        for lever, flags in LEVERS.items():
            found[lever, strategy] = [p for p in strategy_problems(strategy, machine, *flags) if p not in alone]
    return found


def by_recipe() -> dict[tuple[str, str], list[str]]:
    """Ask each recipe for each lever."""
    found = {}
    for name in RECIPES:
        _, alone = arguments(name, (), 8)
        assert not alone, alone
        for lever, (_, flags) in LEVERS.items():
            found[lever, name] = arguments(name, flags, 8)[1]
    return found


def by_pair() -> dict[tuple[str, str], list[str]]:
    """Ask for each two levers, each of which works alone under `fsdp_full` or `single` on GPUs; chess's arguments."""
    found = {}
    for one, other in itertools.combinations(LEVERS, 2):
        (launch_1, flags_1), (launch_2, flags_2) = LEVERS[one], LEVERS[other]
        if same_flag(launch_1, launch_2) or same_flag(flags_1, flags_2):
            continue
        said = []
        for strategy in ("fsdp_full", "single"):
            alone = strategy_problems(strategy, "8 GPUs", launch_1, flags_1)
            alone = [*alone, *strategy_problems(strategy, "8 GPUs", launch_2, flags_2)]
            together = strategy_problems(strategy, "8 GPUs", (*launch_1, *launch_2), (*flags_1, *flags_2))
            said.append([problem for problem in together if generic(problem) not in map(generic, alone)])
        separately = arguments("chess", flags_1, 8)[1] + arguments("chess", flags_2, 8)[1]
        together = [p for p in arguments("chess", (*flags_1, *flags_2), 8)[1] if p not in separately]
        found[one, other] = list(dict.fromkeys([*together, *said[0], *said[1]]))
    return found


def same_flag(one: Iterable[str], other: Iterable[str]) -> bool:
    """Tell whether two levers give one flag two values; `--use_peft` is part of several."""
    flags = [{flag for flag in flags if flag.startswith("--")} - {"--use_peft"} for flags in (one, other)]
    return bool(flags[0] & flags[1])


def by_mixture() -> dict[str, list[str]]:
    """Ask for each lever with a mixture of experts, with --lora_dropout 0 where there are adapters."""
    found = {}
    cases = LEVERS | {
        "`--use_peft`, with its `--lora_dropout 0.05`": ((), ("--use_peft", "--lora_dropout", "0.05")),
        "`mixed_precision: fp8`": (("--mixed_precision", "fp8"), ()),
    }
    for lever, (launch_flags, flags) in cases.items():
        if "--use_peft" in flags and "--lora_dropout" not in flags:
            flags = (*flags, "--lora_dropout", "0")
        strategy = "fsdp_fp8" if "fp8" in launch_flags else "fsdp_full"
        env = environment(strategy, 8, launch_flags)
        assert isinstance(env, dict), env
        found[lever] = model_problems(mixture(), flags, env)
    # Compilation is refused for adapters of experts only.
    env = environment("fsdp_full", 8, BY_LAYER)
    assert isinstance(env, dict), env
    found["`--use_peft` with compilation"] = model_problems(mixture(), ("--use_peft", "--lora_dropout", "0"), env)
    return found


def mixture() -> PreTrainedModel:
    with torch.device("meta"):
        return tiny_model("mixtral")


def model_problems(model: PreTrainedModel, flags: tuple[str, ...], env: dict[str, str]) -> list[str]:
    args, _ = arguments("chess", tuple(flag for flag in flags if flag != "--merge_adapter"), 8)  # merging reads files
    with mock.patch.dict(os.environ, env), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return requirements.model_problems(args, model, env)


def generic(problem: str) -> str:
    """Leave out the numbers of a message."""
    return re.sub(r"\d+", "N", problem)


INTRODUCTION = """\
An empty cell can be combined, and so can a lever that has no row. = means that the lever changes nothing there. A number is that
of the refusal below, which comes before anything is loaded. A recipe, a strategy and a lever together are refused if two of the
three are. All recipes refuse `fsdp_long` except `chess.py`, `c4.py`, and `sft.py` with packed rows. The checks themselves were
asked, with a pretrained model."""


NOTHING = "="


def changes_nothing(strategy: str, machine: str, lever: str) -> bool:
    """Tell whether the launcher's flags of a lever leave the environment of a strategy as it is."""
    launch_flags, flags = LEVERS.get(lever, ((), ("none",)))
    num_devices = MACHINES[machine]
    return not flags and environment(strategy, num_devices, launch_flags) == environment(strategy, num_devices, ())


class Notes:
    """Messages, numbered as they come; the same message has the same number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, problems: Iterable[str]) -> str:
        found = [self.numbers.setdefault(problem, len(self.numbers) + 1) for problem in problems]
        return ", ".join(map(str, sorted(set(found))))

    @property
    def lines(self) -> list[str]:
        return [f"{number}. {escape(problem)}" for problem, number in self.numbers.items()]


def escape(text: str) -> str:
    """Write a message as markdown that shows it as it is."""
    text = text.replace(str(REPOSITORY), "").replace("<", "&lt;")
    return re.sub(r"([*|])", r"\\\1", re.sub(r"\s+", " ", text))


def table(corner: str, columns: list[str], rows: dict[str, list[str]]) -> list[str]:
    """Write a table, with one row for all that have the same cells."""
    lines = [f"| {corner} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    alike = {"; ".join(name for name in rows if rows[name] == cells): cells for cells in rows.values()}
    return lines + [f"| {names} | {' | '.join(cells)} |" for names, cells in alike.items()]


def chapter() -> str:
    """Write the chapter of docs/models.md."""
    notes = Notes()
    lines = ["## What may not be combined", "", INTRODUCTION, ""]
    shown = {}
    for machine in MACHINES:
        found = by_strategy(machine)
        rows = {
            lever or "alone": [
                notes.of(found[lever, strategy]) or NOTHING * changes_nothing(strategy, machine, lever)
                for strategy in STRATEGIES
            ]
            for lever in ("", *LEVERS)
        }
        rows = {lever: cells for lever, cells in drop_empty(rows).items() if cells != shown.get(lever)}
        title = f"### Lever and strategy, on {machine}" + (", where it differs" if shown else "")
        lines += [title, "", *table("", [f"`{strategy}`" for strategy in STRATEGIES], rows), ""]
        shown |= rows
    found = by_recipe()
    rows = {lever: [notes.of(found[lever, name]) for name in RECIPES] for lever in LEVERS}
    lines += ["### Lever and recipe", "", *table("", [f"`{name}.py`" for name in RECIPES], drop_empty(rows)), ""]
    pairs = {pair: notes.of(said) for pair, said in by_pair().items() if said}
    lines += ["### Two levers", "", "| one | other | refusal |", "|---|---|---|"]
    alike = {
        rest: "; ".join(a for (a, b), n in pairs.items() if (b, n) == rest)
        for rest in zip((b for _, b in pairs), pairs.values(), strict=True)
    }
    lines += [f"| {ones} | {other} | {numbers} |" for (other, numbers), ones in alike.items()]
    mixed = {lever: notes.of(said) for lever, said in by_mixture().items() if said}
    lines += ["", "### Lever and mixture of experts", "", "| lever | refusal |", "|---|---|"]
    lines += [f"| {lever} | {numbers} |" for lever, numbers in mixed.items()]
    return "\n".join([*lines, "", "### The refusals", "", *notes.lines, ""])


def drop_empty(rows: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: cells for name, cells in rows.items() if any(cell != "" for cell in cells)}


if __name__ == "__main__":
    print(chapter())
