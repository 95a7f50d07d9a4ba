"""Rewards of answers: functions from any Python file or from trl.

A reward is a function `f(prompts, completions, **columns) -> list`. It returns a number for each answer, or None where
it does not apply. `columns` are the other columns of the data, with one value for each answer. A prompt and an answer
are texts; in conversations, they are lists of messages. An answer has no special tokens, but WITH_SPECIAL_TOKENS has.
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
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.passes import map_rows, rows_in
from accelerate_recipes.data.template_values import is_begun
from accelerate_recipes.errors import ConfigError, first_line, near_path
from accelerate_recipes.models.generation import own_draws
from accelerate_recipes.models.weights import seed_of
from accelerate_recipes.ranks import local_main_process_first
from accelerate_recipes.run import Run

MAX_REWARD = 1e16  # largest reward: trl computes variances in fp32
BUILT_IN = ("accuracy_reward", "think_format_reward")
THINK = "<think>"
MATH_VERIFY = "math-verify==0.9.0"
END_OF_THOUGHT = "</think>"
# An argument of rewards: the answers as texts, with the special tokens in them.
WITH_SPECIAL_TOKENS = "completions_with_special_tokens"
# Arguments that a reward gets besides the columns of the data.
BY_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
NO_COLUMNS = BY_TRL | {WITH_SPECIAL_TOKENS}
NUM_NAMED = 8  # special tokens that a line names


def reward_problems(specs: Sequence[str], elsewhere: Sequence[str | Path] = ()) -> list[str]:
    """List what is wrong with the values of --rewards, one sentence each, without running their files.

    `elsewhere` are folders that this machine cannot see.
    """
    if not specs:
        return [f"--rewards is missing: give my_rewards.py:function, or one of {', '.join(BUILT_IN)}"]
    problems = []
    for spec in specs:
        file, colon, name = spec.rpartition(":")
        if not colon:
            if spec not in BUILT_IN:
                problems.append(f"--rewards {spec}: known are {', '.join(BUILT_IN)}; or give my_rewards.py:function")
            elif spec == "accuracy_reward" and find_spec("math_verify") is None:
                problems.append(
                    f"--rewards accuracy_reward: math-verify is not installed; run: pip install {MATH_VERIFY}"
                )
        elif not Path(file).is_file():
            if not set(map(Path, elsewhere)) & set(Path(os.path.normpath(file)).parents):
                problems.append(f"--rewards {spec}: {file}: no such file{near_path(file)}")
        else:
            try:
                names = defined_names(Path(file))
            except (SyntaxError, ValueError, OSError) as error:
                problems.append(f"--rewards {spec}: {file} cannot be read as Python: {first_line(error)}")
                continue
            if name not in names and "*" not in names:
                known = ", ".join(sorted(names)) or "nothing"
                problems.append(
                    f"--rewards {spec}: {file} defines no {name or 'function without a name'}; it defines {known}"
                )
    names = [spec.rpartition(":")[2] for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"--rewards has {', '.join(twice)} twice; their values are logged by name: rename one")
    return problems


def defined_names(file: Path) -> set[str]:
    """Return the names that a Python file defines or imports at its top level; `*` if it imports all names of a module."""
    code = file.read_bytes()
    symbols = symtable.symtable(code, str(file), "exec").get_symbols()  # pyright: ignore[reportArgumentType]  bytes too
    imports_all = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(ast.parse(code)))
    return {symbol.get_name() for symbol in symbols if symbol.is_local()} | ({"*"} if imports_all else set())


class Reward:
    """Reward function with checks: it gets only the arguments that it takes, and its errors and results are checked."""

    def __init__(
        self,
        name: str,
        function: Callable,
        *,
        takes_messages: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.__name__, self.function, self.takes_messages = name, function, takes_messages
        self.tokenizer = tokenizer
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
        if WITH_SPECIAL_TOKENS in self.takes and self.tokenizer:
            passed[WITH_SPECIAL_TOKENS] = self.tokenizer.batch_decode(columns["completion_ids"])
        if not self.takes_all:
            passed = {name: value for name, value in passed.items() if name in self.takes}
        # The function gets random generators of its own: if it seeded torch's, the model would draw the same answers again.
        step = getattr(columns.get("trainer_state"), "global_step", -1)
        rewards = None
        try:
            with restored(), own_draws(seed_of(f"rewards of step {step}", torch.initial_seed())):
                given = self.function(**copied(passed))
                if not isinstance(given, str | Mapping | Set):
                    rewards = [None if reward is None else float(reward) for reward in given]
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"the reward {self.__name__} failed: {type(error).__name__}: {first_line(error)} ({frame.filename}, line "
                f"{frame.lineno}); it had {len(completions)} answers, first {completions[0]!r:.80} to {prompts[0]!r:.80}"
            ) from error
        if rewards is None or len(rewards) != len(completions):
            what = f"a {type(given).__name__}" if rewards is None else f"{len(rewards)} values"
            raise ConfigError(
                f"the reward {self.__name__} gave {what} for {len(completions)} answers; give a list with a number, or "
                "None, for each"
            )
        for reward, completion in zip(rewards, completions, strict=True):
            if reward is not None and not abs(reward) <= MAX_REWARD:
                raise ConfigError(
                    f"the reward {self.__name__} is {reward} for {completion!r:.80}; give a number of at "
                    f"most {MAX_REWARD:g}, or None"
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


def think_format(
    prompts: list,
    completions: list[list[dict]],
    *,
    opens: bool = False,
    completions_with_special_tokens: Sequence[str] = (),
) -> list[float]:
    """Judge by trl's think_format_reward whole answers: also those whose first `<think>` stands at the end of the prompt.

    `opens` says that the chat template writes it there. A user may write it in a text, or in an answer that is begun, with
    the first words of the thought. Where the marks are special tokens, they are in the texts with special tokens alone.
    """
    import trl.rewards

    whole, texts = [], [message["content"] for (message,) in completions]
    for prompt, text, marked in zip(prompts, texts, completions_with_special_tokens or texts, strict=True):
        if is_begun(prompt):
            content = prompt[-1]["content"]
            begun = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            _, mark, thought = begun.rpartition(THINK)
            opened = mark + thought if mark and END_OF_THOUGHT not in thought else ""
        else:
            end = prompt if isinstance(prompt, str) else THINK * opens
            opened = THINK * end.rstrip().endswith(THINK)
        is_special = any(mark in marked and mark not in text for mark in (THINK, END_OF_THOUGHT))
        whole.append([{"content": opened + (marked if is_special else text)}])
    return trl.rewards.think_format_reward(whole)


def accuracy(completions: list[list[dict]], solution: list, **others: Any) -> list[float | None]:
    """Judge by trl's accuracy_reward, also by solutions that are numbers, which it cannot read."""
    import trl.rewards

    return trl.rewards.accuracy_reward(completions, [*map(as_gold, solution)], **others)


def as_gold(solution: Any) -> Any:
    """Return a solution as a text, a number without an exponent, which math-verify would not read."""
    is_number = isinstance(solution, int | float) and not isinstance(solution, bool)
    return f"{Decimal(str(solution)):f}" if is_number else solution


def can_be_parsed(table: pa.Table, first: int) -> pa.Table:
    """Tell for each solution of a table whether accuracy_reward can read it; it gives None for the others."""
    from math_verify import parse

    return pa.table({"can_be_parsed": [bool(parse(as_gold(row["solution"]))) for row in rows_in(table)]})


def tell_of_rewards(
    run: Run[Any], tokenizer: PreTrainedTokenizerBase, sides: Mapping[str, datasets.Dataset], rewards: Sequence[Reward]
) -> None:
    """Tell what rewards will not see, and which rows of `sides`, by their use, accuracy_reward cannot judge.

    Raises:
        ConfigError: if it can judge none, and is the only reward.
    """
    if rewards:
        tell_of_special_tokens(run.print, tokenizer)
    if any(reward.function is accuracy for reward in rewards):
        local_main_process_first(lambda: tell_of_golds(run.print, sides, is_alone=len(rewards) == 1))


def tell_of_golds(tell: Callable[[str], None], sides: Mapping[str, datasets.Dataset], *, is_alone: bool) -> None:
    """Count the solutions that accuracy_reward cannot read, and show the first one; see `tell_of_rewards`."""
    features = datasets.Features({"can_be_parsed": datasets.Value("bool")})
    for use, rows in sides.items():
        solutions = rows.select_columns("solution")
        made = map_rows(solutions, partial(can_be_parsed), features, desc="Parsing solutions")
        valid = np.array(made["can_be_parsed"][:])
        if valid.all():
            continue
        first = int(valid.argmin())
        problem = (
            f"accuracy_reward cannot read {(~valid).sum():,} of the {len(valid):,} solutions to {use} on, first that of row "
            f"{first + 1:,}, {rows[first]['solution']!r:.60}"
        )
        if is_alone and not valid.any():
            raise ConfigError(f"{problem}; give numbers, or LaTeX such as $\\frac{{1}}{{2}}$")
        tell(f"{problem}: it gives None for answers to them, and other rewards alone count")


def tell_of_special_tokens(tell: Callable[[str], None], tokenizer: PreTrainedTokenizerBase) -> None:
    """Tell which tokens of the vocabulary are left out of the answers that rewards read."""
    usual = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    added = [token for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    if marks := [token.content for token in added if token.special and token.content not in usual]:
        more = f" and {len(marks) - NUM_NAMED:,} more" if len(marks) > NUM_NAMED else ""
        tell(
            f"Rewards read answers without the special tokens {' '.join(marks[:NUM_NAMED])}{more}; a reward that needs them "
            f"takes {WITH_SPECIAL_TOKENS}"
        )


def copied(value: Any) -> Any:
    """Copy the lists and dicts in a nested value, because a reward may change them."""
    if isinstance(value, dict):
        return {name: copied(entry) for name, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, list) else value


def load_rewards(
    specs: Sequence[str],
    columns: Sequence[str],
    end_of_prompts: str = "",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Reward]:
    """Load the functions of --rewards. This runs each of their files once.

    `columns` are the names of the data's columns; `end_of_prompts` is what the chat template writes before an answer;
    `tokenizer` decodes answers with their special tokens.

    Raises:
        ConfigError: if a file fails, if a name is no function, if a function needs a column that the data lack, and for
            think_format_reward where the template leaves no thought to the answer.
    """
    files: dict[str, ModuleType] = {}
    rewards = []
    for spec in specs:
        file, _, name = spec.rpartition(":")
        if not file:
            function = accuracy
            if name == "think_format_reward":
                if end_of_prompts.rstrip().endswith("</think>"):
                    raise ConfigError(
                        f"--rewards {name}: the chat template ends a prompt with {end_of_prompts[-20:]!r}, so no answer has "
                        "a thought, and all would get 0; remove it, or let the model think (--chat_template_kwargs)"
                    )
                function = partial(think_format, opens=end_of_prompts.rstrip().endswith(THINK))
            reward = Reward(name, function, takes_messages=True, tokenizer=tokenizer)
        else:
            if file not in files:
                files[file] = run_file(file)
            function = getattr(files[file], name, None)
            if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"--rewards {spec}: {name} is {type(function).__name__}; it must be a plain function")
            reward = Reward(name, function, tokenizer=tokenizer)
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
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--rewards {file} failed when it was loaded: {type(error).__name__}: {first_line(error)} "
            f"({frame.filename}, line {frame.lineno})"
        ) from error
    return module


def weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Sum the weighted rewards of one answer; None if all are None."""
    terms = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(terms) if terms else None
