"""Values that a chat template reads of a row: its settings beside the messages, and objects where rows hold JSON."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.reading import as_written, json_in
from accelerate_recipes.errors import DataError

SETTINGS = ("tools", "chat_template_kwargs")  # columns that the chat template reads beside the messages
MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")  # columns that may hold messages
WEIGHTS = ("weight", "train", "loss")  # fields of a message, of several formats: with 0 or false, it is no target
ARGUMENTS = "arguments"  # field of a call of a tool
# Arguments of the function that renders; a template reads none of them, except documents.
RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
IS_RESERVED = "is no variable of a chat template, but an argument of apply_chat_template; remove it"


def is_begun(prompt: Any) -> bool:
    """Tell whether a prompt ends with an answer, which is begun, and goes on."""
    return isinstance(prompt, list) and bool(prompt) and prompt[-1].get("role") == "assistant"


def settings_of(row: dict) -> dict[str, Any]:
    """Return what `apply_chat_template` gets for a row beside the messages."""
    settings = {"tools": row.get("tools") or None, **(row.get("chat_template_kwargs") or {})}
    if row.keys() <= {"prompt", *SETTINGS} and is_begun(row.get("prompt")):
        settings |= {"continue_final_message": True, "add_generation_prompt": False}
    return settings


def parsed(value: Any, name: str, number: int, source: str) -> Any:
    """Return the value of a JSON text, or another value as it is. No settings give {}, no tools give None.

    An empty text is none, as an empty cell of a CSV file. `number` is that of the row, from 1.
    """
    try:
        value = json_in(value or "null") if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{source}, row {number}: {name!r} is no JSON: {error}") from None
    kind = {"tools": list, "chat_template_kwargs": dict}.get(name)
    if not value and kind:
        return {} if kind is dict else None  # templates ask whether there are tools in different ways
    if kind and not isinstance(value, kind):
        raise DataError(f"{source}, row {number}: {name!r} is {value!r:.60}; it must be a JSON {kind.__name__}")
    if kind is dict and (reserved := sorted(RESERVED & {*value})):
        raise DataError(f"{source}, row {number}: {name!r} has {', '.join(reserved)}, which {IS_RESERVED}")
    return value


def with_objects(value: Any) -> Any:
    """Return messages in which the arguments of tool calls are objects, as templates expect. OpenAI's format has JSON texts.

    Raises:
        ValueError: for a text that is no JSON object.
    """
    return with_arguments(value, object_of)


def object_of(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json_in(arguments or "{}")
    except ValueError as error:
        raise ValueError(f"the arguments {arguments!r:.60} of a tool call are no JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise ValueError(f"the arguments {arguments!r:.60} of a tool call must be a JSON object")
    return decoded


def in_texts(row: dict[str, Any], kinds: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return a row whose settings, and arguments of tool calls, are JSON texts: nulls in these are those of the user.

    `kinds` are the types of the columns, if Arrow has added nulls.
    """

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, default=str)

    row = {name: as_written(value, kinds.get(name)) for name, value in row.items()}
    messages = {name: with_arguments(row[name], text) for name in MESSAGES if name in row}
    return row | messages | {name: text(row[name]) for name in SETTINGS if row.get(name) is not None}


def with_arguments(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return messages in which `convert` has changed the arguments of tool calls."""
    if isinstance(value, list):
        return [with_arguments(entry, convert) for entry in value]
    if not isinstance(value, dict):
        return value
    value = value | {
        name: with_arguments(value[name], convert) for name in ("tool_calls", "function") if value.get(name)
    }
    return value | {ARGUMENTS: convert(value[ARGUMENTS])} if value.get(ARGUMENTS) is not None else value
