"""Answers in conversations: which messages are trained, and where a chat template without marks writes them.

An answer begins where the conversation before it ends, rendered with its generation prompt: there the model goes on when it
is asked. It ends with the first text behind its content at which generation stops. Both are places in the conversation
that is cut after the answer, because the model has never seen more when it answers.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2 import TemplateError

WEIGHTS = ("weight", "train", "loss")  # fields of a message, of several formats: with 0 or false, it is no target
NUM_SHOWN = 60  # characters that are shown of a generation prompt
MARK = "\ue000"  # a character that no text has: it shows where a template writes a text
Write = Callable[[list[dict]], str]  # renders messages


def weights_of(message: dict) -> list[Any]:
    """List the values of the fields that say whether a message is a target."""
    return [message[name] for name in WEIGHTS if message.get(name) is not None]


def is_answer(message: dict) -> bool:
    """Tell whether a message is an answer that says or calls something."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return message.get("role") == "assistant" and bool(said or message.get("tool_calls"))


def is_trained(message: dict) -> bool:
    """Tell whether a message is an answer that is a target."""
    return is_answer(message) and not any(weight == 0 for weight in weights_of(message))


class Part(NamedTuple):
    """A text to train on, and the answers in it that are targets, as pairs of places: begin and end.

    `opened` is the generation prompt if an answer does not begin with all of it, as when it opens a thought; else "".
    """

    text: str
    answers: list[tuple[int, int]]
    opened: str = ""


def parts_of(
    messages: list[dict], written: dict[int, tuple[str, str | None]], write: Write, stops: Sequence[str]
) -> list[Part]:
    """Return a conversation as texts that hold its answers, each as it stands when it is the last message.

    `written` has for the number of each answer the conversation cut after it, and the conversation before it with the
    generation prompt, or None if the template refuses that.

    Usually this is one text. But some templates render a message otherwise when others follow: they drop thoughts, or move
    the system prompt. An answer that the later text does not hold in the same way gets a text of its own, cut after it.
    `stops` are the texts at which generation stops.
    """
    parts: list[Part] = []
    for number, (text, prompt) in reversed(written.items()):
        begin, opened = begin_of(messages, number, text, prompt, write)
        end = end_of(messages, number, text, begin, write, stops)
        there = next((i for i, part in enumerate(parts) if part.text.startswith(text[:end])), len(parts))
        part = parts.pop(there) if there < len(parts) else Part(text, [])
        parts.insert(there, Part(part.text, [(begin, end), *part.answers], opened or part.opened))
    return parts[::-1]


def begin_of(messages: list[dict], number: int, text: str, prompt: str | None, write: Write) -> tuple[int, str]:
    """Return where an answer begins in `text`, the conversation cut after it; also its prompt if it lacks a part of that."""
    if prompt is not None and text.startswith(prompt):
        return len(prompt), ""
    # The answer lacks the end of its prompt, such as an opened thought: it begins where they part, but not within its
    # content, which may begin as that end does. It does not begin earlier than the conversation before it ends.
    before: list[dict] = messages[:number]
    begin = shared_length(text, write([*before, {"role": "assistant", "content": MARK}]))
    plain = unless_refused(write, before)
    if prompt is not None and plain is not None and text.startswith(plain):
        begin = max(len(plain), min(begin, shared_length(text, prompt)))
    return begin, (prompt or "").removeprefix(plain or "")[-NUM_SHOWN:]


def unless_refused(write: Write, messages: list[dict]) -> str | None:
    """Render messages; return None if the template refuses them, as some do without any, or with certain texts or roles."""
    try:
        return write(messages)
    except (TemplateError, ValueError, TypeError):
        return None


def end_of(messages: list[dict], number: int, text: str, begin: int, write: Write, stops: Sequence[str]) -> int:
    """Return where an answer ends in `text`, the conversation cut after it: after the first stop behind its content."""
    end = first_stop(text, begin, stops)
    if end is None or not text[end:].strip():
        return end or len(text)
    # The content may quote a stop; so look where the content ends.
    longer = unless_refused(write, [*messages[:number], altered(messages[number])]) or ""
    behind = longer.rpartition(MARK)[2]
    if MARK in longer and text.endswith(behind):
        end = first_stop(text, max(begin, len(text) - len(behind)), stops)
    return end or len(text)


def first_stop(text: str, begin: int, stops: Sequence[str]) -> int | None:
    """Return the end of the first stop in `text` from `begin` on; None if there is none."""
    found = [(place, place + len(stop)) for stop in stops if stop and (place := text.find(stop, begin)) >= 0]
    return min(found)[1] if found else None


def shared_length(a: str, b: str) -> int:
    """Count the characters with which two texts begin alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def altered(value: Any) -> Any:
    """Return a message with another text wherever it has one, in a form that templates still accept."""
    if isinstance(value, dict):
        kept = ("role", "type", "id", "weight")
        return {name: entry if name in kept else altered(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [altered(entry) for entry in value]
    return f"{value}{MARK}" if isinstance(value, str) else value


def tokens_in(places: Sequence[tuple[int, int]], encoding: Any) -> list[bool]:
    """Tell for each token of an encoded text, `tokenizers.Encoding`, whether it begins in one of `places`."""

    def start(token: int) -> int:
        # Some tokenizers leave the space before a word out of its place; the token begins where the one before ends.
        return min(encoding.token_to_chars(token)[0], encoding.token_to_chars(token - 1)[1]) if token else 0

    tokens = range(len(encoding))
    found = [False] * len(tokens)
    for place in places:
        first, last = (bisect_left(tokens, border, key=start) for border in place)
        found[first:last] = [True] * (last - first)
    return found
