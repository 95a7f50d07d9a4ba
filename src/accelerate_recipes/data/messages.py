"""Messages of a row: read from the forms in which they are written, and checked one by one."""

import json
import re
from collections.abc import Iterable
from typing import Any

CALL = "function_call"
# Roles in messages with the key `from`, and their usual names.
ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "assistant": "assistant", "model": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool": "tool", CALL: "assistant",
}  # fmt: skip
FOREIGN = {"human", "gpt", "chatgpt", "bot", "observation", CALL}  # unknown to templates, which may have other names
ASKING = {"user", "system"}  # roles of the messages with which a whole conversation begins
HH = re.compile(r"\n\n(Human|Assistant):")  # stands before each turn in Anthropic's pairs


def text_in(row: dict, name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"{name!r} is {'null' if row[name] is None else repr(row[name])[:60]}, not a text")
    return row[name]


def turns(row: dict, name: str) -> list[dict]:
    """Split a text in Anthropic's form into messages."""
    start, *parts = HH.split(text_in(row, name))
    if start or not parts:
        raise ValueError(f"{name!r} does not begin with a line 'Human:', unlike the first row")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[a], "content": b.strip()} for a, b in zip(parts[::2], parts[1::2], strict=True)]


def messages_of(row: dict, name: str, role: str) -> list[dict]:
    """Return the messages of a column that holds a list, a single message, or a text of `role`."""
    value = row[name]
    if isinstance(value, list | dict) and value:
        try:
            return [message_of(message) for message in ([value] if isinstance(value, dict) else value)]
        except ValueError as error:
            raise ValueError(f"{name!r} has a message {error}") from None
    if value == []:
        raise ValueError(f"{name!r} has no message; remove the row")
    return [{"role": role, "content": text_in(row, name)}]


def message_of(message: Any) -> dict:
    """Return a message with `role`, by a name that templates know, and with `content`, a text, or calls of tools."""
    if not isinstance(message, dict):
        raise ValueError("that is null; remove it" if message is None else f"without a role: {message!r:.60}")
    message = {name: value for name, value in message.items() if value is not None}
    names = FOREIGN
    if "from" in message and "role" not in message:
        if message["from"] not in ROLES:
            raise ValueError(f"from {message['from']!r:.60}; known are {', '.join(ROLES)}")
        names, message = ROLES.keys(), {"role": message.pop("from")} | message
    if not isinstance(role := message.get("role"), str):
        raise ValueError(f"without a role that is a text: {message!r:.60}")
    if "value" in message and "content" not in message:
        names, message = ROLES.keys(), {"role": role, "content": message.pop("value")} | message
    content = message.get("content")
    if not isinstance(content, str | list) and (content is not None or not {"tool_calls", CALL} & {*message}):
        raise ValueError(f"from {role} without a text as its content: {message!r:.80}; give a text, or remove the row")
    if isinstance(content, list):
        message["content"] = "".join(map(text_of_part, content))
    if role in names:
        message["role"] = ROLES[role]
    return called(message) if role == CALL and content is not None else message


def stands_at(place: int, some: list[dict], messages: list[dict]) -> bool:
    """Tell whether messages stand at a place among others; white space around their texts does not count."""

    def said(messages: list[dict]) -> list[dict]:
        return [{name: str(value).strip() for name, value in message.items()} for message in messages]

    return bool(some) and said(messages[place : place + len(some)]) == said(some)


def without_answer(asked: list[dict], answers: Iterable[list[dict]]) -> list[dict]:
    """Remove one of the answers from the end of a question."""
    for answer in answers:
        place = len(asked) - len(answer)
        if place > 0 and stands_at(place, answer, asked):
            return asked[:place]
    return asked


def end_of_question(name: str, answer: list[dict], asked: list[dict]) -> int:
    """Return how many messages of an answer lead up to its question, and are it; 0 for an answer without its question.

    Raises:
        ValueError: for a whole conversation without the question, or with nothing after it.
    """
    if answer[0]["role"] not in ASKING:
        return 0
    for own in (asked, [message for message in asked if message["role"] != "system"]):
        if (place := next((i for i in range(len(answer)) if stands_at(i, own, answer)), None)) is not None:
            if place + len(own) == len(answer):
                raise ValueError(f"{name!r} ends with the question; remove the row")
            return place + len(own)
    if answer[0]["role"] == asked[-1]["role"] == "user":
        raise ValueError(
            f"{name!r} is a conversation without the question, {asked[-1]['content']!r:.60}; leave out the column with the "
            f"question, as --columns chosen=chosen rejected=rejected or --columns messages={name} does, or mend the row"
        )
    return 0


def text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise ValueError(f"with a part that is no text, {part!r:.60}; this recipe trains on text only: remove the row")
    return part["text"]


def called(message: dict) -> dict:
    """Convert the text of one or several tool calls to the form that templates read."""
    try:
        calls = json.loads(message.pop("content"))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"from {CALL!r} that is no JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    return message | {"tool_calls": [{"type": "function", "function": call} for call in calls]}
