"""Values that a chat template reads of a row: its settings beside the messages, and objects where rows hold JSON."""

import inspect
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.reading import without_nulls
from accelerate_recipes.errors import DataError

SETTINGS = ("tools", "chat_template_kwargs")  # columns that the chat template reads beside the messages
# Arguments of the function that renders; a template reads none of them, except documents.
RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
IS_RESERVED = "is no variable of a chat template, but an argument of apply_chat_template; remove it"


def parsed(value: Any, name: str, number: int, source: str) -> Any:
    """Return the value of a JSON text, or another value without Arrow's nulls. No settings give {}, no tools give None.

    An empty text is none, as an empty cell of a CSV file. `number` is that of the row, from 1.
    """
    try:
        value = json.loads(value or "null") if isinstance(value, str) else without_nulls(value)
    except json.JSONDecodeError as error:
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
    if isinstance(value, list):
        return [with_objects(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    value = value | {name: with_objects(value[name]) for name in ("tool_calls", "function") if value.get(name)}
    if isinstance(text := value.get("arguments"), str):
        try:
            value["arguments"] = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"the arguments {text!r:.60} of a tool call are no JSON: {error}") from None
        if not isinstance(value["arguments"], dict):
            raise ValueError(f"the arguments {text!r:.60} of a tool call must be a JSON object")
    return value
