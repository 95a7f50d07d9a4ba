"""Prompts of GRPO, before an answer is drawn: which of them can be used, and their tokens."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
import pyarrow.compute as pc
from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.data.dates import frozen_date
from accelerate_recipes.data.messages import TEXT
from accelerate_recipes.data.passes import BATCH
from accelerate_recipes.data.rendering import added_begin, prompts_alone, render_read
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models.positions import max_positions
from accelerate_recipes.posttraining.trained_rows import first_refused, tell_of_prompts
from accelerate_recipes.ranks import on_first_of_machine_before_others
from accelerate_recipes.run import Run


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
    """Check that no row, as `select` returns it, has a rendering of its own: trl renders all prompts with `common`.

    Raises:
        ConfigError: for a row with tools, or with settings of the chat template that differ from `common`.
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


def rows_with_room(
    rows: datasets.Dataset, room: int, tokenizer: PreTrainedTokenizerBase, args: Any, source: str
) -> tuple[datasets.Dataset, list[int]]:
    """Leave out the rows whose prompt has more than `room` tokens. Also return the lengths of all prompts.

    Raises:
        DataError: for a prompt that the template cannot render, and for a prompt without tokens.
        ConfigError: if no row is left.
    """
    lengths = [len(ids) for ids in tokenize_prompts(tokenizer, rows["prompt"][:], args, source)]
    kept = rows.select([i for i, length in enumerate(lengths) if length <= room])
    if not len(kept):
        raise ConfigError(f"no prompt is left: all {len(rows):,} have over {room} tokens, see --max_prompt_length")
    return kept, lengths


def end_of_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], settings: dict[str, Any]) -> str:
    """Return the last tokens of a rendered conversation, which may begin the answer; of a prompt that is a text, nothing."""
    return "" if isinstance(prompt, str) else tokenizer.decode(prompts_alone(tokenizer, [prompt], settings)[0][-20:])  # pyright: ignore
