"""Prompts to which a model draws answers: arguments about them, which of them can be used, and their tokens."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import pyarrow.compute as pc
from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.checkpoint.exported import Exported, shown_ends
from accelerate_recipes.data.chats import check_written, without_controls
from accelerate_recipes.data.dates import frozen_date
from accelerate_recipes.data.messages import NUM_COMPARED, TEXT, read_prompts, select
from accelerate_recipes.data.passes import BATCH
from accelerate_recipes.data.rendering import Rendering, added_begin, prompts_alone, render_read
from accelerate_recipes.data.template_values import IS_RESERVED, RESERVED, SETTINGS
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models.positions import max_positions
from accelerate_recipes.posttraining.rewards import check_column_names
from accelerate_recipes.posttraining.settings import TrainerArgs, stops_of_run
from accelerate_recipes.posttraining.trained_rows import compare_with_rendering, first_refused, tell_of_prompts
from accelerate_recipes.ranks import on_first_of_machine_before_others
from accelerate_recipes.run import Run


@dataclass
class PromptArgs(TrainerArgs):
    """Arguments of every recipe that draws answers to prompts."""

    max_prompt_length: int = arg(
        0, "Longest prompt in tokens; longer ones are left out. 0: as long as the model can read.", min=0, group="data"
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        given: Any = self
        if as_object(given.chat_template_kwargs) is None:
            found.append(
                f"--chat_template_kwargs is {given.chat_template_kwargs!r}; it must be a JSON object, such as "
                "'{\"enable_thinking\": false}'"
            )
        if reserved := sorted(RESERVED & {*(self.template_settings or ())}):
            found.append(f"--chat_template_kwargs has {', '.join(reserved)}, which {IS_RESERVED}")
        return found

    @property
    def template_settings(self) -> dict[str, Any]:
        """Settings that the chat template gets for every prompt."""
        given: Any = self
        return as_object(given.chat_template_kwargs)  # pyright: ignore[reportReturnType]  `problems` refuses None


def as_object(given: str | dict | None) -> dict[str, Any] | None:
    """Return the JSON object that an argument is, or was parsed to; None for another value."""
    try:
        found = json.loads(given) if isinstance(given, str) and given else given or {}
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def load_prompts(args: Any, tokenizer: Any, model: Any) -> tuple[dict[str, datasets.Dataset], dict[str, int]]:
    """Load the prompts to answer and those to evaluate on, as `train` and `test`, with the other columns of their rows.

    Prompts that leave no room for an answer are left out.

    Returns:
        The rows, and counts: how many are left out, and the length of the longest prompt.

    Raises:
        DataError: for rows that cannot be read, or have no prompt, and as `tokenize_prompts`.
        ConfigError: if nothing is left, or if a row has a rendering of its own.
    """
    room, stops = room_for_prompts(args, model.config, args.max_completion_length), stops_of_run(model, tokenizer)
    rows, lengths = args.read_rows(), []
    for name, side in rows.items():
        source = args.sources[name]
        side = read_prompts(side, source)
        side = without_controls(side, {"prompt"}, tokenizer, stops, source, args.control_tokens)
        side = select(side, side.column_names, source).select_columns(side.column_names)
        check_column_names(side, source)
        check_written(side, ["prompt"], tokenizer, f"{source}, row", args.template_date)
        check_settings(side, args.template_settings, source)
        found = [len(ids) for ids in tokenize_prompts(tokenizer, side["prompt"][:], args, source)]
        rows[name] = side.select([i for i, length in enumerate(found) if length <= room])
        if not len(rows[name]):
            raise ConfigError(f"no prompt is left: all {len(side):,} have over {room} tokens, see --max_prompt_length")
        lengths += found
    return args.sides(rows, "prompt"), {"left out": sum(length > room for length in lengths), "longest": max(lengths)}


def room_for_prompts(args: Any, config: PreTrainedConfig, answer_length: int) -> int:
    """Return the length of the longest prompt that leaves the model room for an answer of `answer_length` tokens.

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
    return {
        name: on_first_of_machine_before_others(partial(without_begin, rows, "prompt", begin))
        for name, rows in sides.items()
    }


def without_begin(rows: datasets.Dataset, column: str, begin: str) -> datasets.Dataset:
    """Remove `begin`, which may be "", from the start of the texts of a column."""
    if (
        not begin
        or rows.features[column] != TEXT
        or not pc.any(pc.starts_with(rows.data.column(column), begin)).as_py()
    ):
        return rows
    return rows.map(lambda row: {column: row[column].removeprefix(begin)}, desc=f"Removing a second {begin}")


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence, args: Any, source: str = "the data"
) -> list[list[int]]:
    """Tokenise the prompts of a source, texts or conversations, as trl does before it draws an answer.

    Raises:
        DataError: for a prompt that the template cannot render, and for a prompt without tokens.
    """
    rows = [{"prompt": prompt, "chat_template_kwargs": args.template_settings} for prompt in prompts]
    with frozen_date(args.template_date):
        try:
            parts = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
            found = [made[0].ids for part in parts for made in render_read(part, tokenizer)]
        except (TemplateError, ValueError, TypeError) as error:
            number, said = first_refused(rows, tokenizer) or (0, str(error))
            raise DataError(f"{source}, row {number}, {said}") from error
    if not all(found):
        raise DataError(
            f"{source}, row {found.index([]) + 1}: 'prompt' has no token, since the tokenizer adds no begin token; remove it"
        )
    return found


def end_of_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], settings: dict[str, Any]) -> str:
    """Return the last tokens of a rendered conversation, which may begin the answer; of a prompt that is a text, nothing."""
    return "" if isinstance(prompt, str) else tokenizer.decode(prompts_alone(tokenizer, [prompt], settings)[0][-20:])  # pyright: ignore


def compare_prompts(
    run: Run[Any],
    exported: Exported,
    base_stops: set[int],
    prompts: Sequence,
    ids: list[list[int]],
    ends: Collection[int],
) -> None:
    """Compare the first prompts, and the end of an answer, with the rendering of the tokenizer that will be exported.

    `ids` are the tokens of the prompts, of which the first NUM_COMPARED are compared. Answers are drawn until one of `ends`
    comes, so the model learns to end with one of them. Only rank 0 calls this.

    Raises:
        ConfigError: if they differ, or the template cannot render an answer.
    """
    first, trained = prompts[:NUM_COMPARED], [Rendering(one, [False] * len(one)) for one in ids[:NUM_COMPARED]]
    common = json.dumps(run.args.template_settings)
    written = [{"prompt": prompt, "chat_template_kwargs": common} for prompt in first]
    compare_with_rendering(run, exported, base_stops, written, trained, ends)
    if not isinstance(first[0], str):
        tell_of_end(run, exported.tokenizer, first[0], sorted(ends))


def tell_of_end(run: Run[Any], exported: PreTrainedTokenizerBase, prompt: list[dict], ends: Sequence[int]) -> None:
    """Tell if the template ends an answer with a special token at which generation, which stops at `ends`, goes on.

    This is fine for a base model that has never seen the template, but a chat model would go on after its answers.

    Raises:
        ConfigError: if the template cannot render an answer.
    """
    try:
        written = end_of_answer(exported, prompt, run.args.template_settings)
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(f"the chat template cannot render an answer to the first prompt: {error}") from error
    special = {*exported.all_special_ids, *exported.added_tokens_decoder}
    if special & {*written} and not {*ends} & {*written}:
        run.print(
            f"The chat template ends an answer with {exported.decode(written)!r}, but answers are drawn until "
            f"{shown_ends(exported, ends)}. If the model has learned the template, name that end in its "
            "generation_config.json (eos_token_id)"
        )


def end_of_answer(tokenizer: PreTrainedTokenizerBase, prompt: list[dict], settings: dict[str, Any]) -> list[int]:
    """Tokenise the text that the chat template writes after an answer."""
    messages = [*prompt, {"role": "assistant", "content": "Answer"}]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    return tokenizer(text.rpartition("Answer")[2], add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]
