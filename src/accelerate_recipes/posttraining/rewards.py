"""Rewards of answers: functions of any Python file, or of trl, and GRPO's arguments.

A reward is a function `f(prompts, completions, **columns) -> list`: for each answer a number, or None where it says
nothing. `columns` are the other columns of the data, one value for each answer. A prompt and an answer are texts; where the
prompts are conversations, they are lists of messages.
"""

import ast
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import torch
from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from trl import GRPOTrainer

from accelerate_recipes.args import arg
from accelerate_recipes.checkpoint.check_export import as_exported
from accelerate_recipes.data.conversations import NUM_COMPARED
from accelerate_recipes.data.rendering import (
    IS_RESERVED,
    RESERVED,
    SETTINGS,
    Rendering,
    added_begin,
    end_of_answer,
    prompt_alone,
    shown_ends,
)
from accelerate_recipes.errors import ConfigError, DataError, first_line
from accelerate_recipes.flags import Range
from accelerate_recipes.generation import Generated, Sampling, generate_texts, own_draws
from accelerate_recipes.positions import max_positions
from accelerate_recipes.posttraining.samples import Samples
from accelerate_recipes.posttraining.trainers import RecipeTrainer, TrainerArgs
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.run import Run
from accelerate_recipes.weights import seed_of

LARGEST = 1e16  # reward: trl computes variances in fp32
BUILT_IN = ("accuracy_reward", "think_format_reward")
MATH_VERIFY = "math-verify==0.9.0"
# What trl passes to a reward besides the columns of the data.
NO_COLUMNS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}

# Fields of trl's config, which has no ranges.
NOT_NEGATIVE = (
    "beta", "epsilon", "epsilon_high", "top_k", "off_policy_mask_threshold", "entropy_coef", "entropy_coef_min",
    "entropy_coef_max", "entropy_coef_delta", "entropy_target", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap", "max_tool_calling_iterations", "num_completions_to_print",
)  # fmt: skip
AT_LEAST_ONE = ("num_iterations", "ref_model_sync_steps", "vllm_max_model_length", "vllm_tensor_parallel_size")


@dataclass
class GRPOArgs(TrainerArgs):
    """Arguments of every recipe on trl's GRPOTrainer, besides the fields of GRPOConfig. Put it before that class."""

    max_prompt_length: int = arg(
        0, "Longest prompt in tokens; longer ones are left out. 0: as long as the model can read.", min=0
    )
    per_device_train_batch_size: int = arg(8, "Answers per forward pass on one process.", min=1)
    total_batch_size: int = arg(128, "Answers per optimizer step, over all processes and accumulation.", min=1)
    num_generations: int = arg(8, "Answers to each prompt, which are compared with each other.", min=2)
    max_completion_length: int = arg(512, "Longest answer in tokens.", min=1)
    learning_rate: float = arg(1e-6, "Peak learning rate.", min=0, max=1)
    weight_decay: float = arg(0.0, "Weight decay; norms and biases have none.", min=0, max=1000)

    fixed = TrainerArgs.fixed | {"num_iterations", "shuffle_dataset"}
    ranges = (
        TrainerArgs.ranges
        | dict.fromkeys(NOT_NEGATIVE, Range(min=0))
        | dict.fromkeys(("delta", "sapo_temperature_neg", "sapo_temperature_pos", "vllm_server_timeout"), Range(above=0))
        | dict.fromkeys(AT_LEAST_ONE, Range(min=1))
        | dict.fromkeys(("min_p", "ref_model_mixup_alpha", "top_entropy_quantile"), Range(min=0, max=1))
        | dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), Range(above=0, max=1))
        | dict.fromkeys(("vllm_server_port", "vllm_group_port"), Range(min=1, max=65535))
        # Logits are divided by these.
        | {"temperature": Range(min=1e-4), "repetition_penalty": Range(min=0.01, max=100)}
        | {"reward_weights": Range()}
    )  # fmt: skip
    owned_elsewhere = (
        TrainerArgs.owned_elsewhere
        | dict.fromkeys(("generation_batch_size", "steps_per_generation"), "answers are drawn for one step at a time")
        | {"num_generations_eval": "the evaluation draws one answer to each held-out prompt"}
        | {"ds3_gather_for_generation": "this collection shards with FSDP"}
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.total_batch_size % self.num_generations:
            found.append(
                f"--total_batch_size {self.total_batch_size} is not a multiple of --num_generations "
                f"{self.num_generations}, the answers to one prompt"
            )
        if self.save_steps % self.num_iterations:
            found.append(
                f"--save_steps {self.save_steps} is not a multiple of --num_iterations {self.num_iterations}, the steps "
                "on the same answers, which a checkpoint does not hold"
            )
        try:
            is_object = isinstance(self.template_settings, dict)
        except json.JSONDecodeError:
            is_object = False
        if not is_object:
            found.append(
                f"--chat_template_kwargs is {self.chat_template_kwargs!r}; it must be a JSON object, such as "
                "'{\"enable_thinking\": false}'"
            )
        elif reserved := sorted(RESERVED & {*self.template_settings}):
            found.append(f"--chat_template_kwargs has {', '.join(reserved)}, which {IS_RESERVED}")
        return found

    @property
    def template_settings(self) -> dict[str, Any]:
        """Settings that the chat template of every prompt gets."""
        given = self.chat_template_kwargs
        return json.loads(given) if isinstance(given, str) else given or {}


def reward_problems(specs: Sequence[str], elsewhere: Sequence[str | Path] = ()) -> list[str]:
    """List what is wrong with the values of --rewards, one sentence each, without running their files.

    `elsewhere` are folders that this machine does not see.
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
    """Return the names that a Python file defines or imports at its top level; `*` if it imports all of another."""
    found: set[str] = set()
    open_nodes: list[ast.AST] = [*ast.parse(file.read_bytes()).body]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            open_nodes += ast.iter_child_nodes(node)
    return found


class Reward:
    """Reward function that is called with what it takes, and whose errors and results are checked."""

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
        # A function that seeds torch would make the model draw the same answers again. An evaluation has no state.
        step = getattr(columns.get("trainer_state"), "global_step", -1)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        rewards = None
        try:
            with own_draws(device, seed_of(f"rewards of step {step}", torch.initial_seed())):
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


def copied(value: Any) -> Any:
    """Copy the lists and dicts of a nested value, which a reward may change."""
    if isinstance(value, dict):
        return {name: copied(entry) for name, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, list) else value


def load_rewards(specs: Sequence[str], columns: Sequence[str]) -> list[Reward]:
    """Load the functions of --rewards. This runs their files, each once.

    `columns` are those of the data.

    Raises:
        ConfigError: if a file fails, a function is none, or it needs a column that the data lack.
    """
    files: dict[str, ModuleType] = {}
    rewards = []
    for spec in specs:
        file, _, name = spec.rpartition(":")
        if not file:
            import trl.rewards  # imported here, since it imports math-verify

            reward = Reward(name, getattr(trl.rewards, name), takes_messages=True)
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


def room_for_prompts(args: GRPOArgs, config: PreTrainedConfig, answer_length: int) -> int:
    """Return the length of the longest prompt to which a model can answer in `answer_length` tokens.

    Raises:
        ConfigError: if an answer leaves no room for a prompt.
    """
    room = max_positions(config) - answer_length
    if room < 1:
        raise ConfigError(
            f"answers of {answer_length} tokens leave no room for a prompt among the {room + answer_length} positions of "
            f"{args.base_model}; lower --max_completion_length"
        )
    return min(room, args.max_prompt_length or room)


def run_file(file: str) -> ModuleType:
    """Run a Python file as a module. Raises ConfigError if it fails."""
    spec = importlib.util.spec_from_file_location(f"rewards_of_{Path(file).stem}", file)
    assert spec and spec.loader, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends itself would end the run, as if it had succeeded
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--rewards {file} failed when it was loaded: {type(error).__name__}: {first_line(error)} "
            f"({place.filename}, line {place.lineno})"
        ) from error
    return module


def weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Sum the rewards of one answer; None if none says anything."""
    said = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(said) if said else None


def check_column_names(rows: datasets.Dataset, source: str) -> None:
    """Check that trl can pass all columns to the rewards.

    Raises:
        ConfigError: for a column that is called like what trl passes besides.
    """
    if taken := sorted(NO_COLUMNS & set(rows.column_names)):
        raise ConfigError(
            f"{source} has the column {taken[0]}, but trl passes something else to rewards by that name; rename it"
        )


def check_settings(rows: datasets.Dataset, common: dict[str, Any], source: str) -> None:
    """Check that no row, as `select` gives it, asks for a rendering of its own: trl renders all prompts with `common`.

    Raises:
        ConfigError: for a row with tools, or with settings of the chat template that are not `common`.
    """
    if not isinstance(rows["prompt"][0], list):
        return
    for name in SETTINGS:
        for number, own in enumerate(rows[name] if name in rows.column_names else [], 1):
            if own and own != common:
                raise ConfigError(
                    f"{source}, row {number}, has {name!r} ({json.dumps(own):.60}), but trl renders GRPO's prompts without "
                    "that column: remove it, or rename it if it is for a reward (--chat_template_kwargs holds for all rows)"
                )


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence, settings: dict[str, Any], source: str = "the data"
) -> list[list[int]]:
    """Tokenise prompts of a source, texts or conversations, as trl does for an answer.

    Raises:
        DataError: for a prompt that the template cannot render, or of which no token is left.
    """
    if isinstance(prompts[0], str):
        begin = added_begin(tokenizer)
        found: Any = tokenizer([text.removeprefix(begin) for text in prompts])["input_ids"]
    else:
        found = []
        for number, prompt in enumerate(prompts):
            try:
                found.append(prompt_alone(tokenizer, prompt, settings))
            except (TemplateError, ValueError, TypeError) as error:
                raise DataError(f"{source}, row {number}: the chat template cannot render it: {error}") from error
    if not all(found):
        raise DataError(
            f"{source}, row {found.index([])}: 'prompt' has no token, since the tokenizer adds no begin token; remove it"
        )
    return found


class RewardTrainer(RecipeTrainer, GRPOTrainer):
    """trl's GRPOTrainer, which checks before it trains that the export will render the prompts as they are trained."""

    def examine(self) -> tuple[int, dict[str, int]]:
        on_first_rank(self.compare)
        return super().examine()  # pyright: ignore[reportReturnType]

    def compare(self) -> None:
        """Compare the first prompts, and the end of an answer, with the rendering of the tokenizer that will be exported.

        Raises:
            ConfigError: if they differ, or the template cannot render an answer.
        """
        exported = as_exported(self.model, self.processing_class)
        train_rows: Any = self.train_dataset
        first = [train_rows[i] for i in range(min(NUM_COMPARED, len(train_rows)))]
        ids, *_ = self._tokenize_prompts([row["prompt"] for row in first])
        trained = [Rendering(row, [False] * len(row)) for row in ids]
        common = self.run.args.template_settings
        rows = [{"prompt": row["prompt"], "chat_template_kwargs": json.dumps(common)} for row in first]
        # Answers are drawn until one of these ends, and so learn to end with it.
        self.compare_with_export(exported, self.first_rows(rows, trained, self.eos_token_ids))
        if not isinstance(rows[0]["prompt"], str):
            self.compare_end(exported.tokenizer, rows[0]["prompt"])

    def compare_end(self, exported: PreTrainedTokenizerBase, prompt: list[dict]) -> None:
        """Warn if the template ends an answer with a special token at which generation does not stop.

        A base model that has never seen the template may be trained this way; a chat model would go on after its answers.

        Raises:
            ConfigError: if the template cannot render an answer.
        """
        try:
            written = end_of_answer(exported, prompt, self.run.args.template_settings)
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(f"the chat template cannot render an answer to the first prompt: {error}") from error
        special = {*exported.all_special_ids, *exported.added_tokens_decoder}
        if special & {*written} and not {*self.eos_token_ids} & {*written}:
            stops = shown_ends(exported, self.eos_token_ids)
            self.run.print(
                f"The chat template ends an answer with {exported.decode(written)!r}, but answers are drawn until {stops}. "
                "If the model has learned the template, name that end in its generation_config.json (eos_token_id)"
            )


class HeldoutAnswers:
    """Evaluator of a model's answers to held-out prompts, by the rewards of training.

    `samples`, on rank 0, gets the first answers.
    """

    def __init__(
        self,
        run: Run[Any],
        tokenizer: PreTrainedTokenizerBase,
        rows: datasets.Dataset,
        rewards: Sequence[Reward],
        samples: Samples | None,
    ):
        self.run, self.tokenizer, self.rewards, self.samples = run, tokenizer, rewards, samples
        self.columns = {name: rows[name][:] for name in rows.column_names}
        self.prompts = self.columns.pop("prompt")
        self.ids = tokenize_prompts(tokenizer, self.prompts, run.args.template_settings)
        self.weights = run.args.reward_weights or [1.0] * len(rewards)

    def evaluate(self, step: int, sampling: Sampling | None = None) -> dict[str, float]:
        """Measure the mean `reward` of the most likely answers, or of drawn ones, each reward, and the `length` in tokens.

        Raises:
            ConfigError: if a reward fails, or no reward says anything about any answer.
        """
        run, args = self.run, self.run.args
        size, length = args.per_device_eval_batch_size, args.max_completion_length
        answers = generate_texts(run.accelerator, run.model, self.tokenizer, self.ids, length, size, sampling=sampling)
        return on_first_rank(lambda: self._score(step, answers, "held out, drawn" if sampling else "held out"))

    def _score(self, step: int, answers: Generated, source: str) -> dict[str, float]:
        texts, ids = answers
        said = texts
        if not isinstance(self.prompts[0], str):
            said = [[{"role": "assistant", "content": text}] for text in texts]
        given = {"completion_ids": ids, "log_extra": ignore, "log_metric": ignore, "trainer_state": None} | self.columns
        values = [reward(self.prompts, said, **given) for reward in self.rewards]
        names = [reward.__name__ for reward in self.rewards]
        totals = [weighted(row, self.weights) for row in zip(*values, strict=True)]
        found = {"reward": totals} | {f"rewards/{name}": row for name, row in zip(names, values, strict=True)}
        means = {
            name: sum(numbers) / len(numbers)
            for name, row in found.items()
            if (numbers := [value for value in row if value is not None])
        }
        if "reward" not in means:
            raise ConfigError(f"{', '.join(names)} gave None for all {len(texts):,} held-out answers; check the data")
        if self.samples:
            shown = range(min(self.run.args.num_samples, len(texts)))
            self.samples.add(
                step,
                source,
                [
                    {
                        "prompt": self.prompts[i],
                        "completion": texts[i],
                        "rewards": dict(zip(names, (row[i] for row in values), strict=True)),
                    }
                    for i in shown
                ],
            )
            self.samples.write_page()
        return means | {"length": sum(map(len, ids)) / len(ids)}


def ignore(*_: Any) -> None:
    """Take what a reward wants to log; an evaluation logs the rewards alone."""
