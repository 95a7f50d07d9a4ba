"""Rendering of a row by a tokenizer: tokens and targets, compared with what was trained. It needs no `datasets`."""

import inspect
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from accelerate_recipes.data.answer_spans import altered, is_trained, parts_of, tokens_in, unless_refused, weights_of
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
    return render_read([read], tokenizer, **settings)[0]


def render_read(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase, **how: Any) -> list[list[Rendering]]:
    """Render rows, as `messages.select` returns them: with the nulls that the user wrote, and no others.

    A conversation of which the answers alone are targets may become several rows, see `answer_spans.parts_of`, or none if
    no answer is trained. `how` is that of `render_alike`.

    Raises:
        ValueError: if the template marks none of the answers.
    """
    alike: dict[str, tuple[dict, list[int]]] = {}
    for number, row in enumerate(rows):
        settings = {"tools": row.get("tools") or None, **(row.get("chat_template_kwargs") or {})}
        alike.setdefault(json.dumps(settings, default=repr), (settings, []))[1].append(number)
    found: list[list[Rendering]] = [[]] * len(rows)
    for settings, numbers in alike.values():
        made = render_alike([rows[number] for number in numbers], tokenizer, settings, **how)
        for number, renderings in zip(numbers, made, strict=True):
            found[number] = renderings
    return found


def render_alike(
    rows: Sequence[dict],
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    *,
    text_field: str,
    completion_only: bool,
    assistant_only: bool,
    stops: Sequence[int],
) -> list[list[Rendering]]:
    """Render rows of one form with the same `settings` of the template. `stops` are the tokens at which generation stops."""
    prompts = [row.get("prompt") for row in rows]
    if rows[0].keys() <= {"prompt", *SETTINGS}:  # the answer is drawn in training
        return [[Rendering(ids, [False] * len(ids))] for ids in prompts_alone(tokenizer, prompts, settings)]
    found: list[list[Rendering]] = [[] for _ in rows]
    numbers = range(len(rows))
    if not isinstance(rows[0].get("messages", prompts[0]), list):
        texts = ["".join(read.values()) for read in texts_read(rows, tokenizer, text_field)]
        ids_of_rows: Any = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        masks: Any = [[True] * len(ids) for ids in ids_of_rows]
    else:
        whole = [
            [*(row.get("prompt") or ()), *(row["messages"] if "messages" in row else row["completion"])] for row in rows
        ]
        begins = [len(prompt or ()) if completion_only else 0 for prompt in prompts]
        answers = [
            [number for number in range(begin, len(messages)) if is_trained(messages[number])]
            for begin, messages in zip(begins, whole, strict=True)
        ]
        mask = {"return_assistant_tokens_mask": True} if assistant_only else {}
        if assistant_only:
            numbers = [number for number in numbers if answers[number]]
            whole, answers = [whole[number] for number in numbers], [answers[number] for number in numbers]
        if not whole:
            return found
        if assistant_only and not HAS_MARKS.search(tokenizer.get_chat_template(None, settings["tools"])):
            for number, renderings in zip(numbers, by_rule(tokenizer, whole, answers, settings, stops), strict=True):
                found[number] = renderings
            return found
        rendered = by_template(tokenizer, whole, **settings, **mask)
        ids_of_rows = rendered["input_ids"]
        masks = rendered.get("assistant_masks") or [[True] * len(ids) for ids in ids_of_rows]
        masks = [[*map(bool, mask)] for mask in masks]
        for messages, targets in zip(whole, masks, strict=True) if assistant_only else ():
            if not any(targets):
                raise ValueError("the template marks none of its answers")
            if not all(is_trained(message) for message in messages if message["role"] == "assistant"):
                for token in tokens_without_weight(tokenizer, messages, **settings):
                    targets[token] = False
    if completion_only and (asked := [number for number in numbers if prompts[number]]):
        alone = dict(zip(asked, prompts_alone(tokenizer, [prompts[number] for number in asked], settings), strict=True))
        for number, ids, targets in zip(numbers, ids_of_rows, masks, strict=True):
            if number in alone:
                begin = first_difference(alone[number], ids)
                targets[:begin] = [False] * len(targets[:begin])  # all, if the answer has no token
    for number, ids, targets in zip(numbers, ids_of_rows, masks, strict=True):
        found[number] = [Rendering(ids, targets)]
    return found


def texts_read(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase, text_field: str) -> list[dict[str, str]]:
    """Return the text of each row, or its prompt and completion: without a begin token, which is added, and with one end."""
    names = ("prompt", "completion") if "completion" in rows[0] else (text_field,)
    begin, end = added_begin(tokenizer), str(tokenizer.eos_token)
    found = []
    for row in rows:
        first, *more = (row[name] for name in names)
        *before, last = first.removeprefix(begin), *more
        last = without_tail(last, end)
        found.append(dict(zip(names, (*before, last if last.endswith(end) else last + end), strict=True)))
    return found


def by_rule(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[dict]],
    answers: Sequence[list[int]],
    settings: dict[str, Any],
    stops: Sequence[int],
) -> list[list[Rendering]]:
    """Render conversations whose answers the template does not mark.

    Raises:
        ValueError: for a tokenizer that does not say where its tokens stand.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text, so answers alone need a template "
            "that marks them ({% generation %}); give --assistant_only_loss false to train everything"
        )

    def write_all(conversations: list[list[dict]], **more: Any) -> list[str]:
        return tokenizer.apply_chat_template(conversations, tokenize=False, **settings, **more)  # pyright: ignore[reportReturnType]

    def write(messages: list[dict], **more: Any) -> str:
        if not messages:
            raise ValueError("there is no message")
        return write_all([messages], **more)[0]

    ends = [str(tokenizer.decode([stop])) for stop in stops]
    pairs = [*zip(conversations, answers, strict=True)]
    asked = [messages[:number] for messages, numbers in pairs for number in numbers]
    try:
        found: Iterable[str | None] = iter(
            write_all([before for before in asked if before], add_generation_prompt=True)
        )
        prompts = [next(found) if before else None for before in asked]
    except (TemplateError, ValueError, TypeError):  # the template refuses one of them
        prompts = [unless_refused(partial(write, add_generation_prompt=True), before) for before in asked]
    texts = write_all([messages[: number + 1] for messages, numbers in pairs for number in numbers])
    written = zip(texts, prompts, strict=True)
    parts = [parts_of(messages, dict(zip(numbers, written, strict=False)), write, ends) for messages, numbers in pairs]
    encoded = tokenizer(
        [part.text for found in parts for part in found],
        add_special_tokens=False,
        return_attention_mask=False,
        verbose=False,
    )
    tokens: Any = zip(encoded["input_ids"], encoded.encodings, strict=True)  # pyright: ignore[reportArgumentType]
    return [
        [
            Rendering(ids, tokens_in(part.answers, encoding), part.opened)
            for part, (ids, encoding) in zip(found, tokens, strict=False)
        ]
        for found in parts
    ]


def prompts_alone(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], settings: dict[str, Any]
) -> list[list[int]]:
    """Tokenise prompts: texts, or messages by the template with its `settings`."""
    if isinstance(prompts[0], str):
        begin = added_begin(tokenizer)
        texts = [prompt.removeprefix(begin) for prompt in prompts]
        return tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
    return by_template(tokenizer, prompts, **{"add_generation_prompt": True} | settings)["input_ids"]


def end_of_answer(tokenizer: PreTrainedTokenizerBase, prompt: list[dict], settings: dict[str, Any]) -> list[int]:
    """Tokenise the text that the chat template writes after an answer."""
    messages = [*prompt, {"role": "assistant", "content": "Answer"}]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    return tokenizer(text.rpartition("Answer")[2], add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def shown_ends(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> str:
    """Return the tokens at which generation stops, in readable form."""
    return " or ".join(repr(tokenizer.decode([end])) for end in ends) or "nothing"


def by_template(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[dict]], **settings: Any
) -> dict[str, Any]:
    """Tokenise conversations by the chat template; return `input_ids`, and other values that the settings request."""
    if not all(conversations):
        raise ValueError("there is a conversation without messages")
    given: Any = {"tokenizer_kwargs": {"return_attention_mask": False, "verbose": False}}
    return tokenizer.apply_chat_template([*conversations], return_dict=True, **given, **settings)  # pyright: ignore


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
                    by_template(tokenizer, [with_objects([*prompt, *messages] if is_answer else messages)], **given)
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
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return None if len(a) == len(b) else shorter
    return next(i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
