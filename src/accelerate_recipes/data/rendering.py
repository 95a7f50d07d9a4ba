"""Rendering of a row by a tokenizer: tokens and targets, compared with what was trained. It needs no `datasets`."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.shards import DataError

SETTINGS = ("tools", "chat_template_kwargs")  # columns that the chat template reads beside the messages
NUM_SHOWN = 8  # tokens on each side of a difference


def parsed(value: Any, name: str, number: int, source: str) -> Any:
    """Return what a text of JSON means, or another value without Arrow's nulls; no settings are {}, no tools are None."""
    try:
        value = json.loads(value) if isinstance(value, str) else without_nulls(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{source}, row {number}: {name!r} is no JSON: {error}") from None
    kind = {"tools": list, "chat_template_kwargs": dict}.get(name)
    if not value and kind:
        return {} if kind is dict else None  # templates ask whether there are tools in different ways
    if kind and not isinstance(value, kind):
        raise DataError(f"{source}, row {number}: {name!r} is {value!r:.60}; it must be a JSON {kind.__name__}")
    return value


def without_nulls(value: Any) -> Any:
    """Return a nested value without the fields that are null. A message that calls tools has a `content`, if only null.

    Templates ask whether that is null; they fail if it is not there.
    """
    if isinstance(value, dict):
        needed = {"content": None} if value.get("tool_calls") else {}
        return needed | {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


class Rendering(NamedTuple):
    """Tokens of a row, and which of them are targets."""

    ids: list[int]
    targets: list[bool]


def render(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    text_field: str,
    *,
    completion_only: bool,
    assistant_only: bool,
    template: str | None,
) -> Rendering:
    """Render a row as whoever loads the exported tokenizer would, by transformers alone.

    `template`: a chat template instead of the tokenizer's own.
    """
    row = without_nulls({name: value for name, value in row.items() if name not in SETTINGS}) | {
        name: parsed(row.get(name), name, 0, "") for name in SETTINGS
    }
    settings = {"tools": row.get("tools") or None, **(row.get("chat_template_kwargs") or {})}
    settings |= {"chat_template": template} if template else {}
    if row.keys() <= {"prompt", *SETTINGS}:  # the answer is drawn in training
        ids = prompt_alone(tokenizer, row["prompt"], settings)
        return Rendering(ids, [False] * len(ids))
    if isinstance(row.get("messages", row.get("prompt")), list):
        prompt, answer = row.get("prompt", []), row["messages"] if "messages" in row else row["completion"]
        asked = {"return_assistant_tokens_mask": True} if assistant_only else {}
        found = by_template(tokenizer, [*prompt, *answer], **settings, **asked)
        ids, mask = found["input_ids"], found.get("assistant_masks")
    else:
        prompt, mask = row.get("prompt", ""), None
        text = row["completion"] if "completion" in row else row[text_field]
        end = "" if text.endswith(tokenizer.eos_token) else tokenizer.eos_token
        ids = tokenizer(prompt + text + end)["input_ids"]
    targets = [bool(bit) for bit in mask] if mask else [True] * len(ids)
    if prompt and completion_only:
        before = prompt_alone(tokenizer, prompt, settings)
        begin = next(
            (t for t, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        targets[:begin] = [False] * begin
    return Rendering(ids, targets)


def prompt_alone(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], settings: dict[str, Any]) -> list[int]:
    """Tokenise what an answer is asked for by: a text, or messages by the template with its `settings`."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]  # pyright: ignore[reportReturnType]
    return by_template(tokenizer, prompt, **{"add_generation_prompt": True} | settings)["input_ids"]


def end_of_answer(tokenizer: PreTrainedTokenizerBase, prompt: list[dict], settings: dict[str, Any]) -> list[int]:
    """Tokenise what the chat template writes behind an answer."""
    messages = [*prompt, {"role": "assistant", "content": "Answer"}]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    return tokenizer(text.rpartition("Answer")[2], add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def shown_ends(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> str:
    """Return the tokens at which generation stops as a person reads them."""
    return " or ".join(repr(tokenizer.decode([end])) for end in ends) or "nothing"


def by_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> dict[str, Any]:
    """Tokenise messages by the chat template, into `input_ids` and what the settings ask for."""
    found: Any = tokenizer.apply_chat_template(messages, return_dict=True, **settings)
    return found


def differences(
    trained: Iterable[Rendering],
    rows: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    **settings: Any,
) -> list[str]:
    """List where the rendering of an exported tokenizer differs from what was trained, one sentence for each row.

    `settings` are those of `render`.
    """
    found = []
    for number, (row, (ids, targets)) in enumerate(zip(rows, trained, strict=True), 1):
        try:
            ours = render(row, tokenizer, **settings)
        except (TemplateError, ValueError, TypeError) as error:
            found.append(f"row {number} cannot be rendered: {error}")
            continue
        if (place := first_difference(ids, ours.ids)) is not None:
            window = slice(max(0, place - NUM_SHOWN), place + NUM_SHOWN)
            texts = (tokenizer.decode(side[window]) for side in (ids, ours.ids))
            found.append(
                f"row {number}, token {place + 1}: {next(texts)!r} was trained, the export renders {next(texts)!r}"
            )
        elif (place := first_difference(targets, ours.targets)) is not None:
            kind = "a target" if targets[place] else "no target"
            found.append(
                f"row {number}, token {place + 1}, {tokenizer.decode(ids[place : place + 1])!r}, was {kind} of the loss, "
                f"unlike in the export's rendering"
            )
    return found


def first_difference(a: Sequence, b: Sequence) -> int | None:
    """Return the first index at which two sequences differ; None if they are equal."""
    if len(a) != len(b):
        return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
