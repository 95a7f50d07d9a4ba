"""Rewards of answers: functions from any Python file or from trl.

A reward is a function `f(prompts, completions, **columns) -> list`. It returns a number for each answer, or None where
it does not apply. `columns` are the other columns of the data, with one value for each answer. A prompt and an answer
are texts; in conversations, they are lists of messages.
"""

import ast
import contextlib
import importlib.util
import inspect
import os
import symtable
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import torch

from accelerate_recipes.errors import ConfigError, first_line
from accelerate_recipes.models.generation import own_draws
from accelerate_recipes.models.weights import seed_of

LARGEST = 1e16  # largest reward: trl computes variances in fp32
BUILT_IN = ("accuracy_reward", "think_format_reward")
THINK = "<think>"
MATH_VERIFY = "math-verify==0.9.0"
# Arguments that trl passes to a reward besides the columns of the data.
NO_COLUMNS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def reward_problems(specs: Sequence[str], elsewhere: Sequence[str | Path] = ()) -> list[str]:
    """List what is wrong with the values of --rewards, one sentence each, without running their files.

    `elsewhere` are folders that this machine cannot see.
    """
    if not specs:
        return [f"--rewards is missing: give my_rewards.py:function, or one of {', '.join(BUILT_IN)}"]
    found = []
    for spec in specs:
        file, colon, name = spec.rpartition(":")
        if not colon:
            if spec not in BUILT_IN:
                found.append(f"--rewards {spec}: known are {', '.join(BUILT_IN)}; or give my_rewards.py:function")
            elif spec == "accuracy_reward" and find_spec("math_verify") is None:
                found.append(f"--rewards accuracy_reward: math-verify is not installed; run: pip install {MATH_VERIFY}")
        elif not Path(file).is_file():
            if not set(map(Path, elsewhere)) & set(Path(os.path.normpath(file)).parents):
                found.append(f"--rewards {spec}: {file}: no such file")
        else:
            try:
                names = defined_names(Path(file))
            except (SyntaxError, ValueError, OSError) as error:
                found.append(f"--rewards {spec}: {file} cannot be read as Python: {first_line(error)}")
                continue
            if name not in names and "*" not in names:
                known = ", ".join(sorted(names)) or "nothing"
                found.append(
                    f"--rewards {spec}: {file} defines no {name or 'function without a name'}; it defines {known}"
                )
    names = [spec.rpartition(":")[2] for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        found.append(f"--rewards has {', '.join(twice)} twice; their values are logged by name: rename one")
    return found


def defined_names(file: Path) -> set[str]:
    """Return the names that a Python file defines or imports at its top level; `*` if it imports all names of a module."""
    code = file.read_bytes()
    symbols = symtable.symtable(code, str(file), "exec").get_symbols()  # pyright: ignore[reportArgumentType]  bytes too
    imports_all = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(ast.parse(code)))
    return {symbol.get_name() for symbol in symbols if symbol.is_local()} | ({"*"} if imports_all else set())


class Reward:
    """Reward function with checks: it gets only the arguments that it takes, and its errors and results are checked."""

    def __init__(self, name: str, function: Callable, *, takes_messages: bool = False):
        self.__name__, self.function, self.takes_messages = name, function, takes_messages
        kinds = inspect.signature(function).parameters.values()
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in kinds)
        named = [p for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes = {parameter.name for parameter in named}
        self.needs = {p.name for p in named if p.default is p.empty} - NO_COLUMNS

    def __call__(self, prompts: list, completions: list, **columns: Any) -> list[float | None]:
        """Return a finite number, or None, for each answer.

        Raises:
            ConfigError: if the function raises, or returns something else.
        """
        if self.takes_messages and completions and isinstance(completions[0], str):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        passed = {"prompts": prompts, "completions": completions} | columns
        if not self.takes_all:
            passed = {name: value for name, value in passed.items() if name in self.takes}
        # The function gets random generators of its own: if it seeded torch's, the model would draw the same answers again.
        # In an evaluation there is no trainer_state, and the step counts as -1.
        step = getattr(columns.get("trainer_state"), "global_step", -1)
        rewards = None
        try:
            with restored(), own_draws(seed_of(f"rewards of step {step}", torch.initial_seed())):
                given = self.function(**copied(passed))
                if not isinstance(given, str | Mapping | Set):
                    rewards = [None if reward is None else float(reward) for reward in given]
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"the reward {self.__name__} failed: {type(error).__name__}: {first_line(error)} ({place.filename}, line "
                f"{place.lineno}); it had {len(completions)} answers, first {completions[0]!r:.80} to {prompts[0]!r:.80}"
            ) from error
        if rewards is None or len(rewards) != len(completions):
            what = f"a {type(given).__name__}" if rewards is None else f"{len(rewards)} values"
            raise ConfigError(
                f"the reward {self.__name__} gave {what} for {len(completions)} answers; give a list with a number, or "
                "None, for each"
            )
        for reward, completion in zip(rewards, completions, strict=True):
            if reward is not None and not abs(reward) <= LARGEST:
                raise ConfigError(
                    f"the reward {self.__name__} is {reward} for {completion!r:.80}; give a number of at most {LARGEST:g}, "
                    "or None"
                )
        return rewards


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore after this context what a user's code may change for the whole process: the folder, and torch's defaults."""
    here, dtype, device, is_grad_enabled = (
        os.open(".", os.O_RDONLY), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
    )  # fmt: skip
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        torch.set_grad_enabled(is_grad_enabled)


def think_format(prompts: list, completions: list[list[dict]], *, opens: bool = False) -> list[float]:
    """Judge by trl's think_format_reward whole answers: also those whose first `<think>` stands at the end of the prompt.

    `opens` says that the chat template writes it there. A user may write it in a text, or in an answer that is begun.
    """
    import trl.rewards

    whole = []
    for prompt, (message,) in zip(prompts, completions, strict=True):
        is_begun = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
        end = prompt if isinstance(prompt, str) else prompt[-1]["content"] if is_begun else THINK * opens
        whole.append([{"content": THINK * end.rstrip().endswith(THINK) + message["content"]}])
    return trl.rewards.think_format_reward(whole)


def copied(value: Any) -> Any:
    """Copy the lists and dicts in a nested value, because a reward may change them."""
    if isinstance(value, dict):
        return {name: copied(entry) for name, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, list) else value


def load_rewards(specs: Sequence[str], columns: Sequence[str], end_of_prompts: str = "") -> list[Reward]:
    """Load the functions of --rewards. This runs each of their files once.

    `columns` are the names of the data's columns; `end_of_prompts` is what the chat template writes before an answer.

    Raises:
        ConfigError: if a file fails, if a name is no function, if a function needs a column that the data lack, and for
            think_format_reward where the template leaves no thought to the answer.
    """
    files: dict[str, ModuleType] = {}
    rewards = []
    for spec in specs:
        file, _, name = spec.rpartition(":")
        if not file:
            import trl.rewards  # not at the top, since it imports math-verify

            function = getattr(trl.rewards, name)
            if name == "think_format_reward":
                if end_of_prompts.rstrip().endswith("</think>"):
                    raise ConfigError(
                        f"--rewards {name}: the chat template ends a prompt with {end_of_prompts[-20:]!r}, so no answer has "
                        "a thought, and all would get 0; remove it, or let the model think (--chat_template_kwargs)"
                    )
                function = partial(think_format, opens=end_of_prompts.rstrip().endswith(THINK))
            reward = Reward(name, function, takes_messages=True)
        else:
            if file not in files:
                files[file] = run_file(file)
            function = getattr(files[file], name, None)
            if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"--rewards {spec}: {name} is {type(function).__name__}; it must be a plain function")
            reward = Reward(name, function)
        if missing := sorted(reward.needs - set(columns)):
            raise ConfigError(
                f"--rewards {spec} needs {', '.join(missing)}; the data have the columns {', '.join(columns)}"
            )
        if "completion" in reward.needs:
            raise ConfigError(f"--rewards {spec} needs completion, a column that trl passes to no reward; rename both")
        rewards.append(reward)
    return rewards


def run_file(file: str) -> ModuleType:
    """Run a Python file as a module. Raises ConfigError if it fails."""
    spec = importlib.util.spec_from_file_location(f"rewards_of_{Path(file).stem}", file)
    assert spec and spec.loader, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with restored():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # SystemExit of the file would end the run, as if the run had succeeded
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--rewards {file} failed when it was loaded: {type(error).__name__}: {first_line(error)} "
            f"({place.filename}, line {place.lineno})"
        ) from error
    return module


def weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Sum the weighted rewards of one answer; None if all are None."""
    said = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(said) if said else None


def check_column_names(rows: datasets.Dataset, source: str) -> None:
    """Check that trl can pass all columns to the rewards.

    Raises:
        ConfigError: for a column with the name of another argument that trl passes.
    """
    if taken := sorted(NO_COLUMNS & set(rows.column_names)):
        raise ConfigError(
            f"{source} has the column {taken[0]}, but trl passes something else to rewards by that name; rename it"
        )
