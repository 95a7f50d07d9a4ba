"""Rendering of rows by a tokenizer: their tokens, and which of them are targets. It needs no `datasets`.

An answer begins where the conversation before it ends, rendered with its generation prompt: there the model goes on when it
is asked. It ends with the first text behind its content at which generation stops. Both are places in the conversation
that is cut after the answer, because the model has never seen more when it answers.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from accelerate_recipes.data.template_values import SETTINGS, WEIGHTS, settings_of

HAS_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds the marks of answers in a template
NUM_OPENED = 60  # characters that are shown of a generation prompt
MARK = "\ue000"  # a character that no text has: it shows where a template writes a text
Write = Callable[..., str]  # renders messages


def weights_of(message: dict) -> list[Any]:
    """List the values of the fields that say whether a message is a target."""
    return [message[name] for name in WEIGHTS if message.get(name) is not None]


def is_answer(message: dict) -> bool:
    """Tell whether a message is an answer that says or calls something."""
    content = message.get("content")
    text = "".join(part.get("text", "") for part in content) if isinstance(content, list) else content
    text = text.strip() if isinstance(text, str) else text
    return message.get("role") == "assistant" and bool(text or message.get("tool_calls"))


def is_trained(message: dict) -> bool:
    """Tell whether a message is an answer that is a target."""
    return is_answer(message) and not any(weight == 0 for weight in weights_of(message))


def added_begin(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the begin token that the tokenizer would add to a text that has it already; "" if it adds none."""
    begin: Any = tokenizer.bos_token
    ids: Any = tokenizer(begin)["input_ids"] if begin else []
    return begin if ids[:2] == [tokenizer.bos_token_id] * 2 else ""


def without_end(text: str, end: str) -> str:
    """Return a text without its end token, and the white space behind that; another end token would follow it."""
    bare = text.rstrip()
    return bare.removesuffix(end) if end and bare.endswith(end) else text


def said_in(messages: list[dict]) -> list[dict]:
    """Return messages without nulls, as `apply_chat_template` gives them to a template."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def renderer(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that renders conversations as `apply_chat_template` does, which looks for its template each time.

    It returns their texts, and the places of answers in each.
    """
    template = tokenizer.get_chat_template(None, settings.get("tools"))
    # jinja 3.1 copies the names that a template knows for each text, from a ChainMap, which takes a sixth of the time.
    compiled = chat_template_utils._compile_jinja_template(template)
    compiled.globals = dict(compiled.globals)
    return partial(
        chat_template_utils.render_jinja_template,
        **tokenizer.special_tokens_map | settings | {"chat_template": template},
    )


def marked(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[dict]], **settings: Any
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Render conversations; also return the places of the parts that the template marks as answers, of each."""
    return renderer(tokenizer, settings)([*map(said_in, conversations)], return_assistant_tokens_mask=True)


def places_without_weight(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any
) -> tuple[str, list[tuple[int, int]]]:
    """List the places of messages that are not trained, such as those of `weight: 0`, among those that a template marks.

    To find them, each message is changed in turn: a marked part belongs to the message whose change alters it. A part
    that no change alters, such as an end, belongs to the parts beside it.

    Returns:
        The text, and the places in it.

    Raises:
        ValueError: if it is not clear to which message a part belongs.
    """
    (text,), (spans,) = marked(tokenizer, [messages], **settings)
    weights: list[set] = [set() for _ in spans]
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            changed = [*messages[:number], altered(message), *messages[number + 1 :]]
            (other,), (moved,) = marked(tokenizer, [changed], **settings)
            own = [
                weight
                for weight, (a, b), (c, d) in zip(weights, spans, moved, strict=False)
                if len(moved) == len(spans) and text[a:b] != other[c:d]
            ]
            if 0 in weights_of(message) and not own:
                raise ValueError(
                    f"the template does not show which part is message {number}, of weight 0; remove the row"
                )
            for weight in own:
                weight.add(int(is_trained(message)))
    untrained = []
    for number, (begin, end) in enumerate(spans):
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
            untrained.append((begin, end))
    return text, untrained


class Rendering(NamedTuple):
    """Tokens of a row, and which of them are targets. `opened` is a prompt that an answer lacks; see `Part`."""

    ids: list[int]
    targets: list[bool]
    opened: str = ""


def render_read(
    rows: Sequence[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    completion_only: bool = False,
    assistant_only: bool = False,
    text_field: str = "",
    stops: Sequence[int] = (),
) -> list[list[Rendering]]:
    """Render rows of one form, as `messages.select` returns them: with the nulls that the user wrote, and no others.

    A conversation of which the answers alone are targets may become several rows, see `parts_of`, or none if no answer is
    trained. `stops` are the tokens at which generation stops. The defaults leave each row whole.

    Raises:
        ValueError: if the template marks none of the answers.
    """

    def render_alike(rows: Sequence[dict], settings: dict[str, Any]) -> list[list[Rendering]]:
        # Rows with the same settings of the template, each with an answer to train.
        prompts = [row.get("prompt") for row in rows]
        if rows[0].keys() <= {"prompt", *SETTINGS}:  # the answer is drawn in training
            return [[Rendering(ids, [False] * len(ids))] for ids in prompts_alone(tokenizer, prompts, settings)]
        if is_conversation(rows[0]) and assistant_only:
            answers = [answers_in(row, completion_only) for row in rows]
            parts = answers_written(tokenizer, [*map(messages_in, rows)], answers, settings, stops)
            made = tokenized_parts(tokenizer, parts)
            if not parts[0][0].is_marked:
                return made
            renderings = [rendering for (rendering,) in made]
        else:
            if is_conversation(rows[0]):
                ids_of_rows: Any = by_template(tokenizer, [*map(messages_in, rows)], **settings)["input_ids"]
            else:
                texts = ["".join(read.values()) for read in texts_read(rows, tokenizer, text_field)]
                ids_of_rows = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
            renderings = [Rendering(ids, [True] * len(ids)) for ids in ids_of_rows]
        asked = [number for number, prompt in enumerate(prompts) if prompt] if completion_only else []
        alone = prompts_alone(tokenizer, [prompts[number] for number in asked], settings) if asked else []
        for number, ids in zip(asked, alone, strict=True):
            begin = shared_length(ids, renderings[number].ids)  # all, if the answer has no token
            renderings[number].targets[:begin] = [False] * begin
        return [[rendering] for rendering in renderings]

    alike: dict[str, tuple[dict, list[int]]] = {}
    for number, row in enumerate(rows):
        settings = settings_of(row)
        if not (assistant_only and is_conversation(row)) or answers_in(row, completion_only):
            alike.setdefault(json.dumps(settings, default=repr), (settings, []))[1].append(number)
    rendered: list[list[Rendering]] = [[]] * len(rows)
    for settings, numbers in alike.values():
        made = render_alike([rows[number] for number in numbers], settings)
        for number, renderings in zip(numbers, made, strict=True):
            rendered[number] = renderings
    return rendered


def is_conversation(row: dict) -> bool:
    return isinstance(row.get("messages", row.get("prompt")), list)


def messages_in(row: dict) -> list[dict]:
    """Return a row as one conversation: its messages, or its prompt with the answer to it."""
    return row["messages"] if "messages" in row else [*(row.get("prompt") or ()), *row["completion"]]


def answers_in(row: dict, completion_only: bool) -> list[int]:
    """List the numbers of the messages of a conversation that are targets as answers."""
    begin = len(row.get("prompt") or ()) if completion_only else 0
    return [number for number, message in enumerate(messages_in(row)) if number >= begin and is_trained(message)]


def answers_written(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[dict]],
    answers: Sequence[list[int]],
    settings: dict[str, Any],
    stops: Sequence[int],
) -> "list[list[Part]]":
    """Write conversations as texts, with the places of `answers`, numbers of messages: by the template's marks, or the rule.

    Raises:
        ValueError: if the template marks none of the answers, and if it is not clear to which message a part belongs.
    """
    ends = [str(tokenizer.decode([stop])) for stop in stops]
    if not has_marks(tokenizer, settings):
        render = renderer(tokenizer, settings)

        def write(messages: list[dict], **more: bool) -> str:
            return render([messages], **more)[0][0]

        pairs = zip(map(said_in, conversations), answers, strict=True)
        return [parts_of(messages, numbers, write, ends) for messages, numbers in pairs]
    parts = []
    for messages, text, spans in zip(conversations, *marked(tokenizer, conversations, **settings), strict=True):
        if not any(begin < end for begin, end in spans):
            raise ValueError("the template marks none of its answers")
        are_trained = all(is_trained(message) for message in messages if message["role"] == "assistant")
        without = [] if are_trained else places_without_weight(tokenizer, messages, **settings)[1]
        kept = [span for span in spans if span not in without and span[0] < span[1]]
        if any(stop_behind(text, span, ends) for span in kept):
            stop = end_behind_mark(tokenizer, messages, settings, ends)
            kept = [(a, b + len(stop) * (stop_behind(text, (a, b), ends) == stop)) for a, b in kept]
        parts.append([Part(text, kept, is_marked=True)])
    return parts


def has_marks(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> bool:
    return bool(HAS_MARKS.search(tokenizer.get_chat_template(None, settings.get("tools"))))


def stop_behind(text: str, place: tuple[int, int], stops: Sequence[str]) -> str:
    """Return the stop that stands directly behind a place in a text; "" for none, and if the place ends with one itself."""
    begin, end = place
    has_end = text[begin:end].rstrip().endswith(tuple(filter(None, stops)))
    return "" if has_end else max((stop for stop in stops if text.startswith(stop, end)), key=len, default="")


def end_behind_mark(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], settings: dict[str, Any], stops: Sequence[str]
) -> str:
    """Return the stop that the template writes directly behind the mark of an answer which nothing follows; else ""."""
    for number in (number for number, message in enumerate(messages) if is_answer(message)):
        (text,), (spans,) = marked(tokenizer, [messages[: number + 1]], **settings)
        if spans:
            return stop_behind(text, spans[-1], stops)
    return ""


def texts_read(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase, text_field: str) -> list[dict[str, str]]:
    """Return the text of each row, or its prompt and completion: without a begin token, which is added, and with one end."""
    names = ("prompt", "completion") if "completion" in rows[0] else (text_field,)
    begin, end = added_begin(tokenizer), str(tokenizer.eos_token)
    all_texts = [{name: row[name] for name in names} for row in rows]
    for texts in all_texts:
        texts[names[0]] = texts[names[0]].removeprefix(begin)
        texts[names[-1]] = without_end(texts[names[-1]], end) + end
    return all_texts


def tokenized_parts(tokenizer: PreTrainedTokenizerBase, parts: "Sequence[list[Part]]") -> list[list[Rendering]]:
    """Tokenise conversations that are written as texts.

    Raises:
        ValueError: for a tokenizer that does not say where its tokens stand in a text.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text, so answers alone cannot be trained; "
            "give --assistant_only_loss false to train everything"
        )
    every = [part for row in parts for part in row]
    texts: Any = [part.text for part in every]
    made: Any = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    tokens = zip(every, made["input_ids"], made.encodings, strict=True)
    renderings = (Rendering(ids, part.targets(encoding), part.opened) for part, ids, encoding in tokens)
    return [[*islice(renderings, len(row))] for row in parts]


class Part(NamedTuple):
    """A text to train on, and the answers in it that are targets, as pairs of places: begin and end.

    `opened` is the generation prompt if an answer does not begin with all of it, as when it opens a thought; else "". Of an
    answer that the template has marked, each token that touches it is a target, as in transformers.
    """

    text: str
    answers: list[tuple[int, int]]
    opened: str = ""
    is_marked: bool = False

    def targets(self, encoding: Any) -> list[bool]:
        """Tell for each token of the text, as `tokenizers.Encoding`, whether it is a target."""
        mask = [False] * len(encoding)
        for first, last in (ranges_touching if self.is_marked else ranges_in)(self.answers, encoding):
            mask[first:last] = [True] * (last - first)
        return mask


def parts_of(messages: list[dict], answers: Sequence[int], write: Write, stops: Sequence[str]) -> list[Part]:
    """Return a conversation as texts that hold its answers, each as it stands when it is the last message.

    `answers` are the numbers of their messages; `stops` are the texts at which generation stops.

    Usually this is one text. But some templates render a message otherwise when others follow: they drop thoughts, or move
    the system prompt. An answer that the later text does not hold in the same way gets a text of its own, cut after it.
    """
    parts: list[Part] = []
    for number in reversed(answers):
        text = write(messages[: number + 1])
        begin, opened = begin_of(messages, number, text, write)
        end = end_of(messages, number, text, begin, write, stops)
        there = next((i for i, part in enumerate(parts) if part.text.startswith(text[:end])), len(parts))
        part = parts.pop(there) if there < len(parts) else Part(text, [])
        parts.insert(there, Part(part.text, [(begin, end), *part.answers], opened or part.opened))
    return parts[::-1]


def begin_of(messages: list[dict], number: int, text: str, write: Write) -> tuple[int, str]:
    """Return where an answer begins in `text`, the conversation cut after it; also its prompt if it lacks a part of that."""
    before: list[dict] = messages[:number]
    prompt = unless_refused(partial(write, add_generation_prompt=True), before)
    if prompt is not None and text.startswith(prompt):
        return len(prompt), ""
    # The answer lacks the end of its prompt, such as an opened thought: it begins where they part, but not within its
    # content, which may begin as that end does. It does not begin earlier than the conversation before it ends.
    has_parts = isinstance(messages[number].get("content"), list)
    content = [{"type": "text", "text": MARK}] if has_parts else MARK
    begin = shared_length(text, write([*before, {"role": "assistant", "content": content}]))
    plain = unless_refused(write, before)
    if prompt is not None and plain is not None and text.startswith(plain):
        begin = max(len(plain), min(begin, shared_length(text, prompt)))
    return begin, (prompt or "").removeprefix(plain or "")[-NUM_OPENED:]


def unless_refused(write: Write, messages: list[dict]) -> str | None:
    """Render messages; return None if there are none, or if the template refuses them, as some do certain texts or roles."""
    try:
        return write(messages) if messages else None
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
    spans = [(start, start + len(stop)) for stop in stops if stop and (start := text.find(stop, begin)) >= 0]
    return min(spans)[1] if spans else None


def shared_length(a: Sequence, b: Sequence) -> int:
    """Count the characters, or tokens, with which two sequences begin alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((length for length, pair in pairs if pair[0] != pair[1]), min(len(a), len(b)))


def altered(value: Any) -> Any:
    """Return a message with another text wherever it has one, in a form that templates still accept."""
    if isinstance(value, dict):
        kept = ("role", "type", "id", "weight")
        return {name: entry if name in kept else altered(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [altered(entry) for entry in value]
    return f"{value}{MARK}" if isinstance(value, str) else value


def prompts_alone(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], settings: dict[str, Any]
) -> list[list[int]]:
    """Tokenise prompts: texts, or messages by the template with its `settings`. An answer begins behind them, or goes on."""
    if isinstance(prompts[0], str):
        begin = added_begin(tokenizer)
        texts = [prompt.removeprefix(begin) for prompt in prompts]
        return tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
    return by_template(tokenizer, prompts, **{"add_generation_prompt": True} | settings)["input_ids"]


def by_template(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[dict]], **settings: Any
) -> dict[str, Any]:
    """Tokenise conversations by the chat template; return `input_ids`, and other values that the settings request."""
    if not all(conversations):
        raise ValueError("there is a conversation without messages")
    given: Any = {"tokenizer_kwargs": {"return_attention_mask": False, "verbose": False}}
    return tokenizer.apply_chat_template([*conversations], return_dict=True, **given, **settings)  # pyright: ignore


def ranges_in(places: Sequence[tuple[int, int]], encoding: Any) -> list[list[int]]:
    """Return for each of `places` in an encoded text the numbers of the first token in it and of the first behind it."""

    def start(token: int) -> int:
        # Some tokenizers leave the space before a word out of its place; the token begins where the one before ends.
        return min(encoding.token_to_chars(token)[0], encoding.token_to_chars(token - 1)[1]) if token else 0

    def first_from(border: int) -> int:
        if near := encoding.char_to_token(border):
            before, end = encoding.token_to_chars(near - 1)
            if before < border == min(end, encoding.token_to_chars(near)[0]):  # as usual
                return near
        return bisect_left(range(len(encoding)), border, key=start)

    return [[*map(first_from, span)] for span in places]


def ranges_touching(places: Sequence[tuple[int, int]], encoding: Any) -> list[list[int]]:
    """Return, like `ranges_in`, the numbers of the tokens of which a part stands in a place, as transformers does."""
    numbers, ranges = range(len(encoding)), []
    for begin, end in places:
        first = bisect_right(numbers, begin, key=lambda token: encoding.token_to_chars(token)[1])
        last = bisect_left(numbers, end, key=lambda token: encoding.token_to_chars(token)[0])
        ranges.append([first, last])
    return ranges
