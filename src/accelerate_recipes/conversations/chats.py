"""Arguments of the recipes that render conversations by a chat template, and what they do: which texts of rows are refused.

A text may hold control tokens, which the tokenizer reads as marks of the template. And a template may not write all that
messages hold: that would be lost, and nothing would say so.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.dates import DateArgs, frozen_date
from accelerate_recipes.conversations.exported import NUM_COMPARED
from accelerate_recipes.conversations.messages import TEXT
from accelerate_recipes.conversations.rendering import WEIGHTS, without_end
from accelerate_recipes.data.control_tokens import Controls
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.data.passes import map_rows, rows_in
from accelerate_recipes.data.prepared import leaf_arrays
from accelerate_recipes.data.template_values import SETTINGS, parsed
from accelerate_recipes.errors import ConfigError, DataError, raise_problems
from accelerate_recipes.ranks import print_first

UNWRITTEN = {"role", "name", "content", "refusal", "tool_call_id", *WEIGHTS}  # fields that need not be written as such
TOOLS = "tools"
OPENING = {"system", "developer"}  # roles of a message that a template may write at the beginning alone
REMEDY = "give a chat template that writes it, put it into `content`, or remove it"
REMEDY_OF_ROLE = "give a chat template that writes it, put it into the message of the user, or remove it"


@dataclass
class ChatArgs(DateArgs, RowsArgs):
    """Arguments of a recipe that renders conversations. Put it before TrainArgs in the bases of its arguments."""

    group = "data"
    control_tokens: str = arg(
        "refuse",
        "Messages whose texts hold control tokens: refuse them, keep them, or drop_rows, which leaves their rows out.",
        choices=["refuse", "keep", "drop_rows"],
    )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a nested value, with the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from texts_in(entry)


def named_in(template: str, message: Any) -> Any:
    """Return a message without the fields that a chat template does not name: it cannot write these."""
    is_message = isinstance(message, dict)
    return {name: value for name, value in message.items() if name in template} if is_message else message


def first_controls(
    table: pa.Table, first: int, tokenizer: PreTrainedTokenizerBase, stops: Collection[int], source: str
) -> pa.Table:
    """Return the first control token of each row, as `control`; "" for a row without one.

    A text that is no message may begin with the begin token and end with the end token; the white space behind that is
    removed later.
    """
    controls, template = Controls(tokenizer, stops), str(tokenizer.chat_template)
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
    tokens = []
    for number, row in enumerate(rows_in(table), first + 1):
        contents = [
            parsed(value, name, number, source)
            if name in SETTINGS
            else without_end(value.removeprefix(begin), end)
            if isinstance(value, str)
            else [named_in(template, message) for message in value or []]
            for name, value in row.items()
        ]
        tokens.append(next(filter(None, map(controls.first_in, texts_in(contents))), ""))
    return pa.table({"control": tokens})


def may_hold_controls(rows: datasets.Dataset, columns: Sequence[str], controls: Controls) -> bool:
    """Tell whether columns may hold control tokens, without making Python's texts of them; JSON may escape a token."""
    chunks = [(name, chunk) for name in columns for chunk in rows.data.column(name).chunks]
    if controls.normalizer or {*SETTINGS} & {*columns} or any("json" in str(chunk.type) for _, chunk in chunks):
        return True
    pattern = re.compile(controls.pattern.pattern.encode())
    leaves: Any = itertools.chain.from_iterable(itertools.starmap(leaf_arrays, chunks))
    return any(pattern.search(name.encode()) or pattern.search(values) for name, values in leaves)


def without_controls(
    rows: datasets.Dataset,
    columns: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    source: str,
    action: str,
) -> datasets.Dataset:
    """Look for control tokens in `columns` and in the settings of a chat template, and do as --control_tokens says.

    Texts that are no messages were rendered by the user, so their control tokens are only told.

    Raises:
        DataError: for messages with control tokens, unless `action` is `keep` or `drop_rows`.
        ConfigError: if no row is left.
    """
    said_in = [name for name in rows.column_names if name in columns]
    read = [*said_in, *(name for name in rows.column_names if name in SETTINGS)]
    if not may_hold_controls(rows, read, Controls(tokenizer, stops)):
        return rows
    make = partial(first_controls, tokenizer=tokenizer, stops=stops, source=source)
    line = "Looking for control tokens"
    controls = map_rows(rows.select_columns(read), make, datasets.Features(control=TEXT), desc=line)["control"][:]
    (numbers,) = np.array(controls, dtype=bool).nonzero()
    if not len(numbers):
        return rows
    first, shares = int(numbers[0]), f"{len(numbers):,} of {len(rows):,} rows"
    line = f"{source}, row {first + 1}: the text {controls[first]!r} is read as a control token, as in {shares}"
    if action == "drop_rows":
        if len(numbers) == len(rows):
            raise ConfigError(f"{line}; --control_tokens drop_rows leaves none")
        rows = rows.select(np.setdiff1d(np.arange(len(rows)), numbers))
        line += "; they are left out"
    elif action != "keep" and any(isinstance(rows.features[name], datasets.List) for name in said_in):
        raise DataError(
            f"{line}: it would end a message, or begin another, in the middle of a text. Change these texts, or leave the "
            "rows out by --control_tokens drop_rows; --control_tokens keep trains them so"
        )
    print_first(line)
    return rows


class Content(NamedTuple):
    """Content of the messages of a role, as a field: of all together or, behind the first message, of each by itself."""

    role: str
    is_each: bool = False

    def __str__(self) -> str:
        if self.is_each:
            return f"each message of the role {self.role}, also behind the first message"
        return f"content of the role {self.role}"


def content_field(message: dict[str, Any], *, begins: bool) -> Content | None:
    """Return the field of a message's content; None for one that says nothing."""
    role, content = message["role"], message.get("content")
    if not (content.strip() if isinstance(content, str) else content):
        return None
    return Content(role, is_each=role in OPENING and not begins)


def fields_of(row: dict[str, Any], columns: Sequence[str]) -> set[str | Content]:
    """Return the fields of a row's messages that hold something to write, `tools`, and the content of each role."""
    fields: set[Any] = {TOOLS} if row.get(TOOLS) else set()
    for column in columns:
        leads = column == "prompt" or "prompt" not in columns
        for index, message in enumerate(row[column]):
            fields |= {name for name, value in message.items() if value}
            fields.add(content_field(message, begins=leads and not index))
    return fields - UNWRITTEN - {None}


def without_field(row: dict[str, Any], columns: Sequence[str], field: str | Content) -> Iterator[dict[str, Any]]:
    """Yield a row without a field of its messages; of a field that is `is_each`, the row without each of the messages."""
    if field == TOOLS:
        yield row | {TOOLS: None}
    elif isinstance(field, Content) and field.is_each:
        for column in columns:
            for index, message in enumerate(row[column]):
                if content_field(message, begins=False) == field:
                    yield row | {column: [*row[column][:index], emptied(message), *row[column][index + 1 :]]}
    else:

        def lacking(message: dict[str, Any]) -> dict[str, Any]:
            if isinstance(field, Content):
                return emptied(message) if message["role"] == field.role else message
            return {name: value for name, value in message.items() if name != field}

        yield row | {column: [*map(lacking, row[column])] for column in columns}


def emptied(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": type(message["content"])()}


def renderings(row: dict[str, Any], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Render the messages of a row as texts: a prompt with each answer to it, or what there is."""
    prompt = row["prompt"] if "prompt" in columns else []
    answers = [row[column] for column in columns if column != "prompt"]
    settings = {"tools": row.get(TOOLS)} | (row.get("chat_template_kwargs") or {})
    for messages in [[*prompt, *answer] for answer in answers] or [prompt]:
        conversation = [{name: value for name, value in message.items() if value is not None} for message in messages]
        yield tokenizer.apply_chat_template(conversation, tokenize=False, **settings)


def is_written(
    row: dict[str, Any], columns: Sequence[str], field: str | Content, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Tell whether a row is rendered otherwise without a field. A row that cannot be rendered is told elsewhere."""
    try:
        whole = [*renderings(row, columns, tokenizer)]
        return all([*renderings(part, columns, tokenizer)] != whole for part in without_field(row, columns, field))
    except Exception:  # templates raise errors of any kind
        return True


def rows_by_roles(rows: datasets.Dataset, columns: Sequence[str]) -> list[list[int]]:
    """Group the numbers of rows of messages by their roles, and by which messages have a content that is not blank."""
    groups: dict[tuple[str, ...], list[int]] = {}
    start = 0
    for table in rows.select_columns([*columns]).with_format("arrow").iter(10_000):
        of_columns = []
        for chunk in (table.column(name).combine_chunks() for name in columns):
            inner = pc.list_flatten(chunk)
            roles, contents = (pc.struct_field(inner, name).cast(pa.string()) for name in ("role", "content"))
            is_blank = pc.equal(pc.utf8_trim_whitespace(pc.fill_null(contents, "")), "")
            kinds = pc.binary_join_element_wise(roles, pc.if_else(is_blank, "-", "+"), "")
            offsets = np.cumsum([0, *pc.list_value_length(chunk).to_numpy()], dtype=np.int32)
            of_columns.append(pc.binary_join(pa.ListArray.from_arrays(offsets, kinds), " ").to_pylist())
        for number, kinds in enumerate(zip(*of_columns, strict=True), start):
            groups.setdefault(kinds, []).append(number)
        start += len(table)
    return [*groups.values()]


def check_written(
    rows: datasets.Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: str, date: str
) -> None:
    """Print which fields of messages the chat template does not write, each with the number of its rows, and the first.

    A template may write a field in some places, such as thoughts only in the last answer. So a field is written if one of
    the first rows that have it is rendered otherwise without it. The content of each role is such a field; system prompts
    behind the first message are a field of their own, of which a row is tried without each. `where` stands before the
    number of a row; the template writes the `date`.

    Raises:
        ConfigError: if these are calls of tools, or tools.
    """
    features = {column: getattr(rows.features[column], "feature", None) for column in columns}
    if not all(isinstance(feature, dict | datasets.Json) for feature in features.values()):
        return  # texts
    is_plain = TOOLS not in rows.column_names and all(
        isinstance(feature, dict) and {"role", "content"} <= feature.keys() <= UNWRITTEN
        for feature in features.values()
    )
    alike = rows_by_roles(rows, columns) if is_plain else ([number] for number in range(len(rows)))
    firsts = (rows[numbers[0]] for numbers in alike) if is_plain else rows
    having: dict[str | Content, list[int]] = defaultdict(list)
    for numbers, row in zip(alike, firsts, strict=True):
        for field in fields_of(row, columns):  # pyright: ignore[reportArgumentType]
            having[field] += numbers
    lost = {}
    for field, numbers in having.items():
        numbers.sort()
        with frozen_date(date):
            if any(is_written(rows[number], columns, field, tokenizer) for number in numbers[:NUM_COMPARED]):
                continue
        having_it = f"{len(numbers):,} of {len(rows):,}"
        writes = "does not write" if isinstance(field, Content) and field.is_each else "writes nothing of"
        remedy = REMEDY_OF_ROLE if isinstance(field, Content) else REMEDY
        problem = f"{where} {numbers[0] + 1}: the chat template {writes} `{field}`, which {having_it} have"
        lost[field] = f"{problem}; {remedy}"
    raise_problems(
        "What rows hold would not be trained", [lost[name] for name in ("tool_calls", TOOLS) if name in lost]
    )
    for problem in lost.values():
        print_first(problem)
