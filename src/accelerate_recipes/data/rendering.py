"""Rendering of a row by a tokenizer: tokens and targets, compared with what was trained. It needs no `datasets`."""

import inspect
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from accelerate_recipes.errors import DataError

SETTINGS = ("tools", "chat_template_kwargs")  # columns that the chat template reads beside the messages
# Arguments of the function that renders; a template reads none of them, except documents.
RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
IS_RESERVED = "is no variable of a chat template, but an argument of apply_chat_template; remove it"
NUM_SHOWN = 8  # tokens on each side of a difference


def parsed(value: Any, name: str, number: int, source: str) -> Any:
    """Return the value of a JSON text, or another value without Arrow's nulls. No settings give {}, no tools give None.

    `number` is that of the row, from 1.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else without_nulls(value)
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


def without_nulls(value: Any) -> Any:
    """Return a nested value without fields that are null. But a message that calls tools keeps its `content`, even if null.

    Templates ask whether it is null, and fail if it is missing.
    """
    if isinstance(value, dict):
        needed = {"content": None} if value.get("tool_calls") else {}
        return needed | {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


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


def added_begin(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the begin token that the tokenizer would add to a text that has it already; "" if it adds none."""
    begin: Any = tokenizer.bos_token
    ids: Any = tokenizer(begin)["input_ids"] if begin else []
    return begin if ids[:2] == [tokenizer.bos_token_id] * 2 else ""


def without_tail(text: str, end: str) -> str:
    """Return a text without the white space behind its end token; another end token would follow that."""
    bare = text.rstrip()
    return bare if end and bare.endswith(end) else text


def altered(value: Any) -> Any:
    """Return a message with another text wherever it has one, in a form that templates still accept."""
    if isinstance(value, dict):
        kept = ("role", "type", "id", "weight")
        return {name: entry if name in kept else altered(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [altered(entry) for entry in value]
    return f"{value}\ue000" if isinstance(value, str) else value


def tokens_without_weight(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> list[int]:
    """List the tokens of answers with `weight: 0`, among those that the template marks as answers.

    To find them, each message is changed in turn: a marked part belongs to the message whose change alters it. A part
    that no change alters, such as an end, belongs to the parts beside it.

    Raises:
        ValueError: if it is not clear to which message a part belongs.
    """

    def parts_of(messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        said = [{name: value for name, value in message.items() if value is not None} for message in messages]
        template = tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools"))
        given = tokenizer.special_tokens_map | settings | {"chat_template": template}
        rendered: Any = render_jinja_template([said], return_assistant_tokens_mask=True, **given)
        (text,), (places,) = rendered
        return text, places

    text, places = parts_of(messages)
    weights: list[set] = [set() for _ in places]
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            other, moved = parts_of([*messages[:number], altered(message), *messages[number + 1 :]])
            own = [
                weight
                for weight, (a, b), (c, d) in zip(weights, places, moved, strict=False)
                if len(moved) == len(places) and text[a:b] != other[c:d]
            ]
            if message.get("weight") == 0 and not own:
                raise ValueError(
                    f"the template does not show which part is message {number}, of weight 0; remove the row"
                )
            for weight in own:
                weight.add(message.get("weight", 1))
    encoded = tokenizer(text, add_special_tokens=False)
    found = []
    for number, (begin, end) in enumerate(places):
        if begin == end:
            continue
        before = next((weight for weight in reversed(weights[:number]) if weight), set())
        after = next((weight for weight in weights[number + 1 :] if weight), set())
        weight = weights[number] or before | after
        if len(weight) != 1:
            raise ValueError(
                f"the template does not show to which message {text[begin:end]!r:.60} belongs; leave out weight"
            )
        if weight == {0}:
            found += [token for place in range(begin, end) if (token := encoded.char_to_token(place)) is not None]
    return found


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
    """Render a row as users of the exported tokenizer would, by transformers alone.

    `template` is a chat template to use instead of the tokenizer's own.
    """
    row = without_nulls({name: value for name, value in row.items() if name not in SETTINGS}) | {
        name: parsed(row.get(name), name, 0, "") for name in SETTINGS
    }
    row |= {name: with_objects(row[name]) for name in ("messages", "prompt", "completion") if name in row}
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
        if mask and any(message.get("weight") == 0 for message in answer):
            for token in tokens_without_weight(tokenizer, [*prompt, *answer], **settings):
                mask[token] = 0
    else:
        prompt, mask = row.get("prompt", ""), None
        text = without_tail(row["completion"] if "completion" in row else row[text_field], tokenizer.eos_token)
        end = "" if text.endswith(tokenizer.eos_token) else tokenizer.eos_token
        ids = tokenizer((prompt + text + end).removeprefix(added_begin(tokenizer)))["input_ids"]
    targets = [bool(bit) for bit in mask] if mask else [True] * len(ids)
    if prompt and completion_only:
        begin = first_difference(prompt_alone(tokenizer, prompt, settings), ids)
        targets[:begin] = [False] * len(targets[:begin])  # all, if the answer has no token
    return Rendering(ids, targets)


def prompt_alone(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], settings: dict[str, Any]) -> list[int]:
    """Tokenise a prompt: a text, or messages by the template with its `settings`."""
    if isinstance(prompt, str):
        return tokenizer(prompt.removeprefix(added_begin(tokenizer)))["input_ids"]  # pyright: ignore[reportReturnType]
    return by_template(tokenizer, prompt, **{"add_generation_prompt": True} | settings)["input_ids"]


def end_of_answer(tokenizer: PreTrainedTokenizerBase, prompt: list[dict], settings: dict[str, Any]) -> list[int]:
    """Tokenise the text that the chat template writes after an answer."""
    messages = [*prompt, {"role": "assistant", "content": "Answer"}]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    return tokenizer(text.rpartition("Answer")[2], add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def shown_ends(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> str:
    """Return the tokens at which generation stops, in readable form."""
    return " or ".join(repr(tokenizer.decode([end])) for end in ends) or "nothing"


def by_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> dict[str, Any]:
    """Tokenise messages by the chat template; return `input_ids`, and other values that the settings request."""
    found: Any = tokenizer.apply_chat_template(messages, return_dict=True, **settings)
    return found


def first_refused(
    rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase, template: str | None, *, assistant_only: bool
) -> tuple[int, str] | None:
    """Find the first row with a conversation that cannot be rendered; return its number, from 1, and the reason."""
    for number, row in enumerate(rows, 1):
        try:
            row = without_nulls(row) | {name: parsed(row.get(name), name, number, "") for name in SETTINGS}
            settings = {"tools": row["tools"], "chat_template": template} | row["chat_template_kwargs"]
            prompt = row.get("prompt", [])
            for name in ("messages", "completion", "chosen", "rejected", "prompt"):
                if isinstance(messages := row.get(name), list):
                    messages = with_objects(
                        [*prompt, *messages] if name != "prompt" and isinstance(prompt, list) else messages
                    )
                    asked = {"return_assistant_tokens_mask": True} if assistant_only and name != "prompt" else {}
                    found = by_template(tokenizer, messages, **settings, **asked)
                    if asked and 1 not in found["assistant_masks"]:
                        return number, "has no answer, as the template marks them, to train on; remove it"
                    if asked and any(message.get("weight") == 0 for message in messages):
                        tokens_without_weight(tokenizer, messages, **settings)
        except Exception as error:
            return number, f"cannot be rendered by the chat template: {error}"
    return None


def differences(
    trained: Iterable[Rendering], rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase, **settings: Any
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
    unequal = (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
    return next(unequal, None if len(a) == len(b) else min(len(a), len(b)))
