"""Rendering of a row by a tokenizer: tokens and targets, compared with what was trained. It needs no `datasets`."""

import inspect
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from accelerate_recipes.data.answer_spans import altered, is_trained, parts_of, tokens_in, weights_of
from accelerate_recipes.data.reading import without_nulls
from accelerate_recipes.errors import DataError

SETTINGS = ("tools", "chat_template_kwargs")  # columns that the chat template reads beside the messages
# Arguments of the function that renders; a template reads none of them, except documents.
RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
IS_RESERVED = "is no variable of a chat template, but an argument of apply_chat_template; remove it"
HAS_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds the marks of answers in a template
NUM_SHOWN = 8  # tokens on each side of a difference


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


def added_begin(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the begin token that the tokenizer would add to a text that has it already; "" if it adds none."""
    begin: Any = tokenizer.bos_token
    ids: Any = tokenizer(begin)["input_ids"] if begin else []
    return begin if ids[:2] == [tokenizer.bos_token_id] * 2 else ""


def without_tail(text: str, end: str) -> str:
    """Return a text without the white space behind its end token; another end token would follow that."""
    bare = text.rstrip()
    return bare if end and bare.endswith(end) else text


def tokens_without_weight(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> list[int]:
    """List the tokens of messages that are not trained, such as those of `weight: 0`, among those that a template marks.

    To find them, each message is changed in turn: a marked part belongs to the message whose change alters it. A part
    that no change alters, such as an end, belongs to the parts beside it.

    Raises:
        ValueError: if it is not clear to which message a part belongs.
    """

    def marked(messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        said = [{name: value for name, value in message.items() if value is not None} for message in messages]
        template = tokenizer.get_chat_template(None, settings.get("tools"))
        given = tokenizer.special_tokens_map | settings | {"chat_template": template}
        rendered: Any = render_jinja_template([said], return_assistant_tokens_mask=True, **given)
        (text,), (places,) = rendered
        return text, places

    text, places = marked(messages)
    weights: list[set] = [set() for _ in places]
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            other, moved = marked([*messages[:number], altered(message), *messages[number + 1 :]])
            own = [
                weight
                for weight, (a, b), (c, d) in zip(weights, places, moved, strict=False)
                if len(moved) == len(places) and text[a:b] != other[c:d]
            ]
            if 0 in weights_of(message) and not own:
                raise ValueError(
                    f"the template does not show which part is message {number}, of weight 0; remove the row"
                )
            for weight in own:
                weight.add(int(is_trained(message)))
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
    """Tokens of a row, and which of them are targets. `opened` is a prompt that an answer lacks; see `Part`."""

    ids: list[int]
    targets: list[bool]
    opened: str = ""


def render(row: dict, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Rendering]:
    """Render a row, as it was written, as users of the exported tokenizer would, by transformers alone: `render_read`."""
    read = without_nulls({name: value for name, value in row.items() if name not in SETTINGS}) | {
        name: parsed(row.get(name), name, 0, "") for name in SETTINGS
    }
    read |= {name: with_objects(read[name]) for name in ("messages", "prompt", "completion") if name in read}
    return render_read(read, tokenizer, **settings)


def render_read(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str,
    completion_only: bool,
    assistant_only: bool,
    stops: Sequence[int],
) -> list[Rendering]:
    """Render a row, as `conversations.select` returns it: with the nulls that the user wrote, and no others.

    A conversation of which the answers alone are targets may become several rows, see `answer_spans.parts_of`, or none if
    no answer is trained. `stops` are the tokens at which generation stops.

    Raises:
        ValueError: if the template marks none of the answers.
    """
    settings = {"tools": row.get("tools") or None, **(row.get("chat_template_kwargs") or {})}
    if row.keys() <= {"prompt", *SETTINGS}:  # the answer is drawn in training
        ids = prompt_alone(tokenizer, row["prompt"], settings)
        return [Rendering(ids, [False] * len(ids))]
    if not isinstance(row.get("messages", row.get("prompt")), list):
        prompt = row.get("prompt", "")
        text = without_tail(row["completion"] if "completion" in row else row[text_field], tokenizer.eos_token)
        end = "" if text.endswith(tokenizer.eos_token) else tokenizer.eos_token
        ids = tokenizer((prompt + text + end).removeprefix(added_begin(tokenizer)))["input_ids"]
        targets = [True] * len(ids)
    else:
        prompt = row.get("prompt", [])
        messages = [*prompt, *(row["messages"] if "messages" in row else row["completion"])]
        asked = range(len(prompt) if completion_only else 0, len(messages))
        answers = [number for number in asked if is_trained(messages[number])]
        if assistant_only and not answers:
            return []
        if assistant_only and not HAS_MARKS.search(tokenizer.get_chat_template(None, settings["tools"])):
            return by_rule(tokenizer, messages, answers, settings, stops)
        mask = {"return_assistant_tokens_mask": True} if assistant_only else {}
        found = by_template(tokenizer, messages, **settings, **mask)
        ids = found["input_ids"]
        targets = [bool(bit) for bit in found.get("assistant_masks", [True] * len(ids))]
        if assistant_only and not any(targets):
            raise ValueError("the template marks none of its answers")
        if assistant_only and not all(is_trained(message) for message in messages if message["role"] == "assistant"):
            for token in tokens_without_weight(tokenizer, messages, **settings):
                targets[token] = False
    if prompt and completion_only:
        begin = first_difference(prompt_alone(tokenizer, prompt, settings), ids)
        targets[:begin] = [False] * len(targets[:begin])  # all, if the answer has no token
    return [Rendering(ids, targets)]


def by_rule(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    answers: Sequence[int],
    settings: dict[str, Any],
    stops: Sequence[int],
) -> list[Rendering]:
    """Render a conversation whose answers the template does not mark.

    Raises:
        ValueError: for a tokenizer that does not say where its tokens stand.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text, so answers alone need a template "
            "that marks them ({% generation %}); give --assistant_only_loss false to train everything"
        )

    def write(messages: list[dict], **more: Any) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings, **more)  # pyright: ignore[reportReturnType]

    found = []
    for part in parts_of(messages, answers, write, [str(tokenizer.decode([stop])) for stop in stops]):
        encoded = tokenizer(part.text, add_special_tokens=False, return_offsets_mapping=True)
        targets = tokens_in(part.answers, encoded["offset_mapping"])  # pyright: ignore[reportArgumentType]
        found.append(Rendering(encoded["input_ids"], targets, part.opened))  # pyright: ignore[reportArgumentType]
    return found


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


def first_refused(rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase, **settings: Any) -> tuple[int, str] | None:
    """Find the first row with a conversation that cannot be rendered; return its number, from 1, and the reason.

    `settings` are those of `render`, for rows that it takes.
    """
    for number, row in enumerate(rows, 1):
        try:
            if settings:
                render(row, tokenizer, **settings)
                continue
            row = without_nulls(row) | {name: parsed(row.get(name), name, number, "") for name in SETTINGS}
            given = {"tools": row["tools"]} | row["chat_template_kwargs"]
            prompt = row.get("prompt", [])
            for name in ("chosen", "rejected", "prompt"):
                if isinstance(messages := row.get(name), list):
                    is_answer = name != "prompt" and isinstance(prompt, list)
                    by_template(tokenizer, with_objects([*prompt, *messages] if is_answer else messages), **given)
        except Exception as error:
            return number, f"cannot be rendered by the chat template: {error}"
    return None


def differences(
    trained: Iterable[Rendering], rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> list[str]:
    """List where the rendering of an exported tokenizer differs from what was trained, one sentence for each row.

    `settings` are those of `render`.
    """
    found, ours = [], []
    for number, row in enumerate(rows, 1):
        try:
            ours += [(number, rendered) for rendered in render(row, tokenizer, **settings)]
        except (TemplateError, ValueError, TypeError) as error:
            found.append(f"row {number} cannot be rendered: {error}")
    trained = [*trained]
    for (ids, targets, _), (number, other) in zip(trained, [] if found else ours, strict=False):
        if (place := first_difference(ids, other.ids)) is not None:
            window = slice(max(0, place - NUM_SHOWN), place + NUM_SHOWN)
            texts = (tokenizer.decode(side[window]) for side in (ids, other.ids))
            found.append(
                f"row {number}, token {place + 1}: {next(texts)!r} was trained, the export renders {next(texts)!r}"
            )
        elif (place := first_difference(targets, other.targets)) is not None:
            kind = "a target" if targets[place] else "no target"
            found.append(
                f"row {number}, token {place + 1}, {tokenizer.decode(ids[place : place + 1])!r}, was {kind} of the loss, "
                f"unlike in the export's rendering"
            )
    if not found and len(ours) != len(trained):
        found.append(f"{len(trained)} rows were trained, the export renders {len(ours)} instead")
    return found


def first_difference(a: Sequence, b: Sequence) -> int | None:
    """Return the first index at which two sequences differ; None if they are equal."""
    unequal = (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
    return next(unequal, None if len(a) == len(b) else min(len(a), len(b)))
