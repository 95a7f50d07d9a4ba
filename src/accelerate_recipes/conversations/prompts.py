"""Prompts to which a model draws answers: arguments, which can be used, their tokens, and how answers to them are scored."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import datasets
import pyarrow.compute as pc
from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainerState

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.chats import check_written, without_controls
from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.exported import NUM_COMPARED, Exported, shown_ends
from accelerate_recipes.conversations.messages import TEXT, read_prompts, select
from accelerate_recipes.conversations.rendering import Rendering, added_begin, is_answer, prompts_alone, render_read
from accelerate_recipes.conversations.rewards import NO_COLUMNS, Reward, weighted
from accelerate_recipes.conversations.settings import TrainerArgs, stops_of_run
from accelerate_recipes.conversations.trained_rows import compare_with_rendering, first_refused, tell_of_prompts
from accelerate_recipes.data.passes import ROWS_TOGETHER
from accelerate_recipes.data.template_values import IS_RESERVED, RESERVED, SETTINGS, in_texts, is_begun
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models.generation import Generated, Sampling, generate_texts
from accelerate_recipes.models.pretrained import max_positions
from accelerate_recipes.ranks import local_main_process_first, on_first_rank
from accelerate_recipes.report.samples import Samples, expected
from accelerate_recipes.run import Run


@dataclass
class PromptArgs(TrainerArgs):
    """Arguments of every recipe that draws answers to prompts."""

    max_prompt_length: int = arg(
        0, "Longest prompt in tokens; longer ones are left out. 0: as long as the model can read.", min=0, group="data"
    )

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size)
        given: Any = self
        if self.object_in("chat_template_kwargs") is None:
            problems.append(
                f"--chat_template_kwargs is {given.chat_template_kwargs!r}; it must be a JSON object, such as "
                "'{\"enable_thinking\": false}'"
            )
        if reserved := sorted(RESERVED & {*(self.template_settings or ())}):
            problems.append(f"--chat_template_kwargs has {', '.join(reserved)}, which {IS_RESERVED}")
        return problems

    @property
    def template_settings(self) -> dict[str, Any]:
        """Settings that the chat template gets for every prompt."""
        return self.object_in("chat_template_kwargs")  # pyright: ignore[reportReturnType]  `problems` refuses None

    def object_in(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object that an argument is, or was parsed to; None for another value."""
        given = getattr(self, name)
        try:
            parsed = json.loads(given) if isinstance(given, str) and given else given or {}
        except json.JSONDecodeError:
            return None
        return parsed if isinstance(parsed, dict) else None


def load_prompts(args: Any, tokenizer: Any, model: Any) -> tuple[dict[str, datasets.Dataset], dict[str, int]]:
    """Load the prompts to answer and those to evaluate on, as `train` and `test`, with the other columns of their rows.

    Prompts that leave no room for an answer are left out.

    Returns:
        The rows, and counts: how many are left out, and the length of the longest prompt.

    Raises:
        DataError: for rows that cannot be read, or have no prompt, and as `tokenize_prompts`.
        ConfigError: if nothing is left, or if a row has a rendering of its own.
    """
    room, stops = room_for_prompts(args, model.config), stops_of_run(model, tokenizer)
    rows, lengths, begun = args.read_rows(), [], 0
    for name, side in rows.items():
        source = args.origins[name]
        side = read_prompts(side, source)
        side = without_controls(side, {"prompt"}, tokenizer, stops, source, args.control_tokens)
        side = select(side, side.column_names, source).select_columns(side.column_names)
        if taken := sorted(NO_COLUMNS & {*side.column_names}):
            raise ConfigError(
                f"{source} has the column {taken[0]}, but rewards get another thing by that name; rename it"
            )
        check_written(side, ["prompt"], tokenizer, f"{source}, row", args.template_date)
        check_settings(side, args.template_settings, source)
        ends = [(row, prompt[-1]) for row, prompt in enumerate(side["prompt"], 1) if is_begun(prompt)]
        if row := next((row for row, message in ends if not is_answer(message)), 0):
            raise DataError(f"{source}, row {row}: 'prompt' ends with an answer that is empty; remove it, or begin it")
        begun += len(ends)
        num_tokens = [len(ids) for ids in tokenize_prompts(tokenizer, side["prompt"][:], args, source)]
        rows[name] = side.select([i for i, length in enumerate(num_tokens) if length <= room])
        if not len(rows[name]):
            raise ConfigError(f"no prompt is left: all {len(side):,} have over {room} tokens, see --max_prompt_length")
        lengths += num_tokens
    counts = {"left out": sum(length > room for length in lengths), "longest": max(lengths)}
    return args.sides(rows, "prompt"), counts | ({"begun answers": begun} if begun else {})


def room_for_prompts(args: Any, config: PreTrainedConfig) -> int:
    """Return the length of the longest prompt that leaves the model room for an answer.

    Raises:
        ConfigError: if an answer leaves no room for a prompt.
    """
    longest = max_positions(config)
    room = longest - args.max_completion_length
    if room < 1:
        raise ConfigError(
            f"answers of {args.max_completion_length} tokens leave no room for a prompt among the {longest} positions of "
            f"{args.base_model}; lower --max_completion_length"
        )
    return min(room, args.max_prompt_length or room)


def check_settings(rows: datasets.Dataset, common: dict[str, Any], source: str) -> None:
    """Check that no row, as `select` returns it, has a rendering of its own: all prompts are rendered with `common`.

    Raises:
        ConfigError: for a row with tools, or with settings of the chat template that differ from `common`.
    """
    if not isinstance(rows["prompt"][0], list):
        return
    for name in SETTINGS:
        for number, own in enumerate(rows[name] if name in rows.column_names else [], 1):
            if own and own != common:
                raise ConfigError(
                    f"{source}, row {number}, has {name!r} ({json.dumps(own):.60}), but all prompts are rendered alike, "
                    "without that column: remove it, or rename it if it is for a reward (--chat_template_kwargs holds for "
                    "all rows)"
                )


def clean_prompts(
    run: Run[Any], sides: dict[str, datasets.Dataset], tokenizer: PreTrainedTokenizerBase
) -> dict[str, datasets.Dataset]:
    """Remove the begin token from prompts that are texts, because the tokenizer adds it, and tell of such prompts."""
    tell_of_prompts(run, sides, tokenizer)
    begin = added_begin(tokenizer)
    return {name: local_main_process_first(partial(without_begin, rows, begin)) for name, rows in sides.items()}


def without_begin(rows: datasets.Dataset, begin: str) -> datasets.Dataset:
    """Remove `begin`, which may be "", from the start of prompts that are texts."""
    are_texts = rows.features["prompt"] == TEXT
    if not (begin and are_texts and pc.any(pc.starts_with(rows.data.column("prompt"), begin)).as_py()):
        return rows
    return rows.map(lambda row: {"prompt": row["prompt"].removeprefix(begin)}, desc=f"Removing a second {begin}")


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence, args: Any, source: str = "the data"
) -> list[list[int]]:
    """Tokenise the prompts of a source, texts or conversations, as trl does before it draws an answer.

    Unlike trl, a conversation that ends with an answer is not closed: the answer is begun, and goes on.

    Raises:
        DataError: for a prompt that the template cannot render, and for a prompt without tokens.
    """
    rows = [{"prompt": prompt, "chat_template_kwargs": args.template_settings} for prompt in prompts]
    with frozen_date(args.template_date):
        try:
            parts = [rows[first : first + ROWS_TOGETHER] for first in range(0, len(rows), ROWS_TOGETHER)]
            ids = [made[0].ids for part in parts for made in render_read(part, tokenizer)]
        except (TemplateError, ValueError, TypeError) as error:
            number, reason = first_refused(map(in_texts, rows), tokenizer) or (0, str(error))
            raise DataError(f"{source}, row {number}, {reason}") from error
    if not all(ids):
        raise DataError(
            f"{source}, row {ids.index([]) + 1}: 'prompt' has no token, since the tokenizer adds no begin token; remove it"
        )
    return ids


def end_of_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], settings: dict[str, Any]) -> str:
    """Return the last tokens that the template writes before an answer, which they may begin; of a text, nothing."""
    if isinstance(prompt, str):
        return ""
    asked = prompt[:-1] if is_begun(prompt) and len(prompt) > 1 else prompt
    return tokenizer.decode(prompts_alone(tokenizer, [asked], settings)[0][-20:])  # pyright: ignore[reportReturnType]


def compare_prompts(
    run: Run[Any], exported: Exported, tokenizer: Any, rows: datasets.Dataset, ends: Collection[int]
) -> None:
    """Compare the first prompts, and the end of an answer, with the rendering of the tokenizer that will be exported.

    `rows` are tokenised for training by `tokenizer`. Answers are drawn until one of `ends` comes, so the model learns to end
    with one of them. Only rank 0 calls this.

    Raises:
        ConfigError: if they differ, or the template cannot render an answer.
    """
    first: Any = rows[:NUM_COMPARED]["prompt"]
    trained = [Rendering(ids, [False] * len(ids)) for ids in tokenize_prompts(tokenizer, first, run.args)]
    common = {"chat_template_kwargs": run.args.template_settings}
    written = [in_texts({"prompt": prompt} | common) for prompt in first]
    compare_with_rendering(run, exported, written, trained, ends)
    if not isinstance(first[0], str):
        tell_of_end(run, exported.tokenizer, first[0], sorted(ends))


def tell_of_end(run: Run[Any], exported: PreTrainedTokenizerBase, prompt: list[dict], ends: Sequence[int]) -> None:
    """Tell if the template ends an answer with a special token at which generation, which stops at `ends`, goes on.

    This is fine for a base model that has never seen the template, but a chat model would go on after its answers.

    Raises:
        ConfigError: if the template cannot render an answer.
    """
    messages = [*prompt, {"role": "assistant", "content": "Answer"}]
    try:
        text: Any = exported.apply_chat_template(messages, tokenize=False, **run.args.template_settings)
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(f"the chat template cannot render an answer to the first prompt: {error}") from error
    written: Any = exported(text.rpartition("Answer")[2], add_special_tokens=False)["input_ids"]
    special = {*exported.all_special_ids, *exported.added_tokens_decoder}
    if special & {*written} and not {*ends} & {*written}:
        run.print(
            f"The chat template ends an answer with {exported.decode(written)!r}, but answers are drawn until "
            f"{shown_ends(exported, ends)}. If the model has learned the template, name that end in its "
            "generation_config.json (eos_token_id)"
        )


# Evaluation


def draw_texts(
    run: Run[Any], tokenizer: Any, ids: list[list[int]], sampling: Sampling | None = None, may_stop: bool = True
) -> Generated:
    """Draw answers to prompts with these tokens, or generate the most likely ones, on all ranks together; each gets all.

    Raises:
        Stopped: between two batches, if it `may_stop`.
    """
    size, length = run.args.per_device_eval_batch_size, run.args.max_completion_length
    how = {"sampling": sampling, "may_stop": may_stop}
    return generate_texts(run.accelerator, run.model, tokenizer, ids, length, size, **how)


@dataclass
class HeldoutAnswers:
    """Evaluator of a model's answers to held-out prompts, by rewards, if there are any.

    `samples`, which is given on rank 0, collects the first answers. `ids` are the tokens of the prompts, if they are known.
    """

    run: Run[Any]
    tokenizer: PreTrainedTokenizerBase
    rows: datasets.Dataset
    rewards: Sequence[Reward]
    samples: Samples | None
    ids: list[list[int]] | None = None

    def __post_init__(self):
        self.columns = {name: self.rows[name][:] for name in self.rows.column_names}
        self.prompts = self.columns.pop("prompt")
        self.ids = self.ids or tokenize_prompts(self.tokenizer, self.prompts, self.run.args)
        self.weights = self.run.args.reward_weights or [1.0] * len(self.rewards)

    def evaluate(self, step: int, sampling: Sampling | None = None) -> dict[str, float]:
        """Measure the means of `reward`, of each reward and of the `length` in tokens, for the most likely or drawn answers.

        Where a reward is None, its share of None is measured too.

        Raises:
            ConfigError: if a reward fails, or if all rewards are None for all answers.
        """
        answers = draw_texts(self.run, self.tokenizer, self.ids, sampling)
        source = "held out, drawn" if sampling else "held out"
        return on_first_rank(lambda: self.score(step, answers, source))

    def score(
        self, step: int, answers: Generated, source: str, more: Mapping[str, Sequence[float]] = MappingProxyType({})
    ) -> dict[str, float]:
        """Score answers by the rewards; `more` has other values of each answer, to be shown. Only rank 0 calls this."""
        texts, ids = answers
        completions = texts
        if not isinstance(self.prompts[0], str):
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        state = TrainerState(global_step=step, max_steps=self.run.total_steps)
        given = {"completion_ids": ids, "log_extra": ignore, "log_metric": ignore, "trainer_state": state}
        values = [reward(self.prompts, completions, **given | self.columns) for reward in self.rewards]
        names = [reward.__name__ for reward in self.rewards]
        totals = [weighted(row, self.weights) for row in zip(*values, strict=True)]
        by_name = {"reward": totals} if names else {}
        by_name |= {f"rewards/{name}": row for name, row in zip(names, values, strict=True)}
        means = {
            name: sum(numbers) / len(numbers)
            for name, row in by_name.items()
            if (numbers := [value for value in row if value is not None])
        }
        for name, row in zip(names, values, strict=True):
            if none := row.count(None):
                means[f"rewards/{name}/none"] = none / len(row)
            if none == len(row) and "reward" in means:
                self.run.print(f"{name} gave None for all {none:,} held-out answers: the other rewards alone count")
        if names and "reward" not in means:
            raise ConfigError(f"{', '.join(names)} gave None for all {len(texts):,} held-out answers; check the data")
        if self.samples:
            rows = []
            for i in range(min(self.run.args.num_samples, len(texts))):
                wanted = expected({name: column[i] for name, column in self.columns.items()})
                scores = {name: row[i] for name, row in zip(names, values, strict=True)}
                scores |= {name: round(row[i], 4) for name, row in more.items()}
                shown = {"prompt": self.prompts[i], "completion": texts[i], "expected": wanted, "rewards": scores}
                rows.append(shown)
            self.samples.add(step, source, rows)
            self.samples.write_page()
        return means | {"length": sum(map(len, ids)) / len(ids)}


def ignore(*_: Any) -> None:
    """Accept what a reward wants to log, and drop it: an evaluation logs only the rewards."""
