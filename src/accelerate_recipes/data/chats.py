"""Arguments of the recipes that render conversations by a chat template, and what they do: which texts of rows are refused.

A text may hold control tokens, which the tokenizer reads as marks of the template. And a template may not write all that
messages hold: that would be lost, and nothing would say so.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data.control_tokens import Controls
from accelerate_recipes.data.dates import ASKS, first_prepared, frozen_date, is_day
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.data.messages import NUM_COMPARED, roles_at
from accelerate_recipes.data.prepared import leaf_arrays
from accelerate_recipes.data.rendering import WEIGHTS, without_end
from accelerate_recipes.data.template_values import SETTINGS, parsed
from accelerate_recipes.errors import ConfigError, DataError, printable, raise_problems
from accelerate_recipes.ranks import is_first, on_first_rank

UNWRITTEN = {"role", "name", "content", "refusal", "tool_call_id", *WEIGHTS}  # fields that need not be written as such
TOOLS = "tools"
USUAL = {"system", "user", "assistant"}  # roles that every template knows, or refuses
OF_ROLE = "content of the role "
REMEDY = "give a chat template that writes it, put it into `content`, or remove it"


@dataclass
class ChatArgs(RowsArgs):
    """Arguments of a recipe that renders conversations. Put it before TrainArgs in the bases of its arguments."""

    group = "data"
    template_date: str = arg(
        "",
        "Day that a chat template writes as today's, as YYYY-MM-DD; default: the day on which the rows were first prepared.",
        group="rare",
    )
    control_tokens: str = arg(
        "refuse",
        "Messages whose texts hold control tokens: refuse them, keep them, or drop_rows, which leaves their rows out.",
        choices=["refuse", "keep", "drop_rows"],
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.template_date and not is_day(self.template_date):
            found.append(f"--template_date is {self.template_date!r}; it must be a day as YYYY-MM-DD: 2026-01-31")
        return found

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        self.template_date = self.template_date or saved.get("template_date") or ""
        return super().settle(saved)

    def settle_date(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Settle --template_date, alike on all ranks, if the chat template writes the date of the day.

        Raises:
            ConfigError: for a date that the template does not write.
        """
        template = str(tokenizer.chat_template)  # all of them if it has several, by name
        if ASKS in template:
            self.template_date = self.template_date or on_first_rank(
                lambda: first_prepared(self.alone[0].read_rows()["train"], template)
            )
        elif self.template_date:
            raise ConfigError(
                f"--template_date {self.template_date}: the chat template does not ask for the date ({ASKS}); remove it"
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
    rows: dict[str, list],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    source: str,
) -> dict[str, list[str]]:
    """Return the first control token of each row; "" for a row without one.

    A text that is no message may begin with the begin token and end with the end token; the white space behind that is
    removed later.
    """
    controls, template = Controls(tokenizer, stops), str(tokenizer.chat_template)
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
    found = []
    for index, *values in zip(indices, *rows.values(), strict=True):
        said = [
            parsed(value, name, index + 1, source)
            if name in SETTINGS
            else without_end(value.removeprefix(begin), end)
            if isinstance(value, str)
            else [named_in(template, message) for message in value or []]
            for name, value in zip(rows, values, strict=True)
        ]
        found.append(next(filter(None, map(controls.first_in, texts_in(said))), ""))
    return {"control": found}


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
    found = rows.select_columns(read).map(
        first_controls,
        batched=True,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "stops": stops, "source": source},
        remove_columns=read,
        desc="Looking for control tokens",
    )["control"][:]
    (numbers,) = np.array(found, dtype=bool).nonzero()
    if not len(numbers):
        return rows
    first, shares = int(numbers[0]), f"{len(numbers):,} of {len(rows):,} rows"
    said = f"{source}, row {first + 1}: the text {found[first]!r} is read as a control token, as in {shares}"
    if action == "drop_rows":
        if len(numbers) == len(rows):
            raise ConfigError(f"{said}; --control_tokens drop_rows leaves none")
        rows = rows.select(np.setdiff1d(np.arange(len(rows)), numbers))
        said += "; they are left out"
    elif action != "keep" and any(isinstance(rows.features[name], datasets.List) for name in said_in):
        raise DataError(
            f"{said}: it would end a message, or begin another, in the middle of a text. Change these texts, or leave the "
            "rows out by --control_tokens drop_rows; --control_tokens keep trains them so"
        )
    if is_first():
        print(printable(said), flush=True)
    return rows


def fields_of(row: dict[str, Any], columns: Sequence[str]) -> set[str]:
    """Return the fields of a row's messages that hold something to write, and `tools`; of content, that of unusual roles."""
    messages = [message for column in columns for message in row[column]]
    found = {name for message in messages for name, value in message.items() if value}
    roles = {f"{OF_ROLE}{message['role']}" for message in messages if message["role"] not in USUAL}
    return (found | roles | ({TOOLS} if row.get(TOOLS) else set())) - UNWRITTEN


def without_field(row: dict[str, Any], columns: Sequence[str], field: str) -> dict[str, Any]:
    """Return a row whose messages lack a field, or the content of a role; without `tools`, a row that has none."""
    if field == TOOLS:
        return row | {TOOLS: None}

    def lacking(message: dict[str, Any]) -> dict[str, Any]:
        if field == f"{OF_ROLE}{message['role']}":
            return message | {"content": ""}
        return {name: value for name, value in message.items() if name != field}

    return row | {column: [*map(lacking, row[column])] for column in columns}


def renderings(row: dict[str, Any], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Render the messages of a row as texts: a prompt with each answer to it, or what there is."""
    prompt = row["prompt"] if "prompt" in columns else []
    answers = [row[column] for column in columns if column != "prompt"]
    settings = {"tools": row.get(TOOLS)} | (row.get("chat_template_kwargs") or {})
    for messages in [[*prompt, *answer] for answer in answers] or [prompt]:
        said = [{name: value for name, value in message.items() if value is not None} for message in messages]
        yield tokenizer.apply_chat_template(said, tokenize=False, **settings)


def is_written(row: dict[str, Any], columns: Sequence[str], field: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a row is rendered otherwise without a field. A row that cannot be rendered is told elsewhere."""
    lacking = without_field(row, columns, field)
    try:
        return [*renderings(row, columns, tokenizer)] != [*renderings(lacking, columns, tokenizer)]
    except Exception:  # templates raise errors of any kind
        return True


def check_written(
    rows: datasets.Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: str, date: str
) -> None:
    """Print which fields of messages the chat template does not write, each with the number of its rows, and the first.

    A template may write a field in some places, such as thoughts only in the last answer. So a field is written if one of
    the first rows that have it is rendered otherwise without it. `where` stands before the number of a row; the template
    writes the `date`.

    Raises:
        ConfigError: if these are calls of tools, or tools.
    """
    features = {column: getattr(rows.features[column], "feature", None) for column in columns}
    if not all(isinstance(feature, dict | datasets.Json) for feature in features.values()):
        return  # texts
    if TOOLS not in rows.column_names and all(
        isinstance(feature, dict) and feature.keys() <= UNWRITTEN and roles_at(rows, column) <= USUAL
        for column, feature in features.items()
    ):
        return
    having: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        for field in fields_of(row, columns):  # pyright: ignore[reportArgumentType]
            having[field].append(number)
    lost = {}
    for field, numbers in having.items():
        with frozen_date(date):
            if any(is_written(rows[number], columns, field, tokenizer) for number in numbers[:NUM_COMPARED]):
                continue
        having_it = f"{len(numbers):,} of {len(rows):,}"
        said = f"{where} {numbers[0] + 1}: the chat template writes nothing of `{field}`, which {having_it} have"
        lost[field] = f"{said}; {REMEDY}"
    raise_problems(
        "What rows hold would not be trained", [lost[name] for name in ("tool_calls", TOOLS) if name in lost]
    )
    if is_first():
        for said in lost.values():
            print(printable(said), flush=True)
