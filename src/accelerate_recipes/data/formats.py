"""Common forms of conversations and pairs: recognised by their columns, and converted to a form that trl reads.

For conversations, trl reads `messages`, `prompt` and `completion`, or a text; for pairs, `prompt`, `chosen` and `rejected`.
docs/rows.md shows a row of each form, and the result of its conversion.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase
from trl.data_utils import extract_prompt

from accelerate_recipes.args import arg
from accelerate_recipes.data.chats import ChatArgs
from accelerate_recipes.data.conversations import TEXT, check_no_images
from accelerate_recipes.data.rendering import SETTINGS, parsed
from accelerate_recipes.errors import ConfigError, DataError, printable
from accelerate_recipes.ranks import is_first

PAIR, SCORES, JUDGED = ("chosen", "rejected"), ("score_chosen", "score_rejected"), ("prompt", "completion", "score")
ANSWERS = {"output", "completion", "response", "answer", *PAIR}
BEFORE = ("system", "history")  # a system prompt as text; earlier questions with their answers
CALL = "function_call"
# Roles in messages with the key `from`, and their usual names.
ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "assistant": "assistant", "model": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool": "tool", CALL: "assistant",
}  # fmt: skip
FOREIGN = {"human", "gpt", "chatgpt", "bot", "observation"}  # unknown to templates, which may have other names
HH = re.compile(r"\n\n(Human|Assistant):")  # stands before each turn in Anthropic's pairs
TEXTS = (TEXT, datasets.Value("large_string"))
PLAIN = datasets.List({"role": TEXT, "content": TEXT})
ANY = datasets.List(datasets.Json())


class Form(NamedTuple):
    """A form of rows: the columns that it needs, the column with the question first, and the columns that it may have."""

    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...] = BEFORE
    is_written: bool = False  # columns keep their names, texts stay unchanged

    @property
    def said(self) -> list[str]:
        """Columns that hold texts or messages."""
        return [name for name in self.needs if name != JUDGED[2]]

    @property
    def is_pair(self) -> bool:
        return {*PAIR} <= {*self.needs}


SFT = (
    Form("messages", ("messages",), is_written=True),
    Form("ShareGPT", ("conversations",)),
    Form("Alpaca", ("instruction", "output"), ("input", *BEFORE)),
    Form("prompt and completion", ("prompt", "completion"), is_written=True),
    Form("prompt and response", ("prompt", "response")),
    Form("question and answer", ("question", "answer")),
)
DPO = (
    Form("judged answers", JUDGED, (), is_written=True),
    Form("pairs", ("prompt", *PAIR), (*SCORES, *BEFORE), is_written=True),
    Form("pairs of conversations", PAIR, (*SCORES, *BEFORE), is_written=True),
    Form("ShareGPT pairs", ("conversations", *PAIR), (*SCORES, *BEFORE)),
    Form("Alpaca pairs", ("instruction", *PAIR), ("input", *SCORES, *BEFORE)),
    Form("question and pair", ("question", *PAIR), (*SCORES, *BEFORE)),
)


@dataclass
class FormatArgs(ChatArgs):
    """Arguments of a recipe that reads rows of several forms. Put it before TrainArgs in the bases of its arguments."""

    group = "data"
    columns: list[str] = arg(
        [], "Columns that have other names than in a form, as NAME=COLUMN: prompt=question completion=answer."
    )

    @property
    def forms(self) -> Sequence[Form]:
        """Forms that the recipe reads."""
        return (*SFT, Form("text", (self.dataset_text_field,), (), is_written=True))  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def mapping(self) -> dict[str, str]:
        """Columns of the rows by their names in a form."""
        return {name: column for name, _, column in (pair.partition("=") for pair in self.columns)}

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        known = dict.fromkeys(name for form in self.forms for name in (*form.needs, *form.takes, *SETTINGS))
        for name, column in self.mapping.items():
            if name not in known or not column:
                found.append(f"--columns {name}={column}: write NAME=COLUMN, with a NAME of {', '.join(known)}")
        if len({*self.mapping.values()}) < len(self.columns):
            found.append(f"--columns {' '.join(self.columns)}: a name or a column is there twice")
        return found

    def read_rows_for(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, datasets.Dataset]:
        has_template = bool(tokenizer.chat_template or getattr(self, "chat_template_path", None))
        return {
            name: in_usual_form(side, self.forms, self.mapping, self.sources[name], has_template=has_template)
            for name, side in self.read_rows().items()
        }


@dataclass
class PairFormatArgs(FormatArgs):
    """Arguments of a recipe that reads pairs of answers."""

    @property
    def forms(self) -> Sequence[Form]:
        return DPO


def in_usual_form(
    rows: datasets.Dataset, forms: Sequence[Form], mapping: dict[str, str], source: str, *, has_template: bool
) -> datasets.Dataset:
    """Convert rows of one of the forms to a form that trl reads, and print their form. Rows that trl reads stay unchanged.

    Raises:
        ConfigError: for columns of no form or of several forms, and for images.
        DataError: names the first row that does not have the form.
    """
    check_no_images(rows, source)
    form, rows = recognised(rows, forms, mapping, source)
    are_texts = all(rows.features[name] in TEXTS for name in form.said)
    is_hh = has_template and are_texts and form.needs == PAIR and bool(HH.match(rows[0][PAIR[0]] or ""))
    as_messages = is_hh or not are_texts or (has_template and not form.is_written)
    is_kept = form.is_written and not is_hh and (are_texts or form.name == "text")
    takes = [name for name in form.takes if not (is_kept and name in BEFORE)]
    read = [name for name in (*form.needs, *takes, *SETTINGS) if name in rows.column_names]
    unread = [name for name in rows.column_names if name not in read]
    rows = rows.select_columns(read)
    if is_first():
        how = "texts as they stand" if is_kept else "conversations" if as_messages else "texts, without a chat template"
        columns = ", ".join(mapping.get(name, name) for name in read)
        others = f"; columns that are not used: {', '.join(unread)}" if unread else ""
        print(printable(f"{source}: {form.name} ({columns}), read as {how}{others}"), flush=True)
    is_usual = form.is_written and not {*BEFORE} & {*read} and all(is_usual_column(rows, name) for name in form.said)
    if is_kept or (is_usual and not is_hh):
        return rows
    if form.is_pair:
        made = ["prompt", *PAIR]
    elif form.is_written:
        made = form.said
    else:
        made = ["messages"] if as_messages else ["prompt", "completion"]
    kind = TEXT if not as_messages else PLAIN if are_texts else ANY
    kept = {name: rows.features[name] for name in (*SCORES, JUDGED[2], *SETTINGS) if name in read}
    return rows.map(
        usual_row,
        with_indices=True,
        fn_kwargs={"form": form, "as_messages": as_messages, "is_hh": is_hh, "source": source},
        remove_columns=rows.column_names,
        features=datasets.Features(dict.fromkeys(made, kind) | kept | ({"tools": TEXT} if "tools" in kept else {})),
        desc=f"Reading {form.name}",
    )


def recognised(
    rows: datasets.Dataset, forms: Sequence[Form], mapping: dict[str, str], source: str
) -> tuple[Form, datasets.Dataset]:
    """Find the form of rows by their columns; rename the columns to the names of the form.

    Raises:
        ConfigError: if the rows fit no form, or several.
    """
    names = rows.column_names
    if lost := [column for column in mapping.values() if column not in names]:
        raise ConfigError(f"{source} has no column {lost[0]!r}, which --columns names; there are {', '.join(names)}")
    rows = rows.remove_columns([name for name in mapping if name in names and name not in mapping.values()])
    rows = rows.rename_columns({column: name for name, column in mapping.items() if name != column})
    there = {name for name in rows.column_names if not pa.types.is_null(rows.data.column(name).type)}
    fitting = [form for form in forms if {*form.needs} <= there and {*mapping} <= {*form.needs, *form.takes, *SETTINGS}]
    # Answers are whole conversations only if there is no column with the question.
    fitting = [form for form in fitting if not any({*form.needs} < {*other.needs} for other in fitting)]
    if not fitting:
        known = "".join(f"\n- {form.name}: {', '.join(form.needs)}" for form in forms)
        shown = next((form for form in forms if len(form.needs) == 2), forms[-1])
        raise ConfigError(
            f"{source} has the columns {', '.join(names)}; it needs those of one of these forms, or --columns, such as "
            f"{' '.join(f'{need}=COLUMN' for need in shown.needs)}, which says what they are called:{known}"
        )
    ways = [(form.name, dict(zip(form.needs, form.needs, strict=True))) for form in fitting]
    form = fitting[0]
    is_prompt = form.takes and form.is_written and form.needs[0] == "prompt"
    are_texts = is_prompt and all(rows.features[name] in TEXTS for name in form.said)
    if are_texts and not mapping and any(any(rows[name]) for name in BEFORE if name in there):
        # In this form, texts stay unchanged, and a system prompt or a history would be lost.
        other = next(other for other in forms if other.needs[0] == "question")
        ways.append((other.name, dict(zip(other.needs, form.needs, strict=True))))
    if len(ways) > 1:
        raise ConfigError(ambiguity(rows, ways, mapping, source))
    return form, rows


def ambiguity(
    rows: datasets.Dataset, ways: Sequence[tuple[str, dict[str, str]]], mapping: dict[str, str], source: str
) -> str:
    """Describe the ways to read the rows, with the arguments for each way, and show the first row."""
    valid = [[rows.data.column(column).is_valid() for column in way.values()] for _, way in ways]
    full_of_way = [reduce(pc.and_, columns).to_numpy() for columns in valid]  # pyright: ignore
    told, shown, flag = [f"{source} can be read in {len(ways)} ways; say which by one of"], {}, "--columns "
    if all(full.any() for full in full_of_way) and sum(full.astype(int) for full in full_of_way).max() < 2:
        # No choice of columns would read all rows.
        told, flag = [f"{source} has rows of {len(ways)} forms, but a run reads one; give files of one form:"], ""
    for (form, way), full in zip(ways, full_of_way, strict=True):
        pairs = " ".join(f"{name}={mapping.get(column, column)}" for name, column in way.items())
        told.append(f"- {flag}{pairs} ({form}: {full.sum():,} of {len(rows):,} rows)")
        shown |= {column: rows[0][column] for column in way.values()}
    return "\n".join([*told, f"The first row: {shown!r:.500}"])


def is_usual_column(rows: datasets.Dataset, name: str) -> bool:
    """Tell whether a column need not be rewritten: messages of texts, with roles that templates know."""
    feature = rows.features[name]
    if not isinstance(feature, datasets.List):
        return not isinstance(feature, dict)  # a column without messages is refused later
    message = feature.feature
    if not isinstance(message, dict) or "role" not in message or "from" in message:
        return not isinstance(message, dict | datasets.Json)
    if not isinstance(message.get("content", TEXT), datasets.Value):
        return False
    if message["role"] not in TEXTS:
        return True
    roles = (pc.unique(chunk.flatten().field("role")) for chunk in rows.data.column(name).chunks)
    return not any(FOREIGN & {*names.to_pylist()} for names in roles)


def usual_row(row: dict, number: int, form: Form, as_messages: bool, is_hh: bool, source: str) -> dict:
    """Convert a row to messages or to texts.

    Raises:
        DataError: for a row that does not have the form.
    """
    kept = {name: row[name] for name in (*SCORES, JUDGED[2], *SETTINGS) if name in row}
    if kept.get("tools") is not None:
        tools = parsed(row["tools"], "tools", number, source) or []
        if form.needs[0] == "conversations":
            tools = [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
        kept["tools"] = json.dumps(tools)
    try:
        return (conversation(row, form, is_hh=is_hh) if as_messages else texts(row, form)) | kept
    except ValueError as error:
        raise DataError(f"{source}, row {number}: {error}") from None


def texts(row: dict, form: Form) -> dict[str, str]:
    """Return a prompt that ends with a blank line, and the answers."""
    asked, *answers = form.needs
    prompt = "".join(f"{message['content']}\n\n" for message in [*said_before(row), *question(row, asked)])
    found = {name: text_in(row, name) for name in answers}
    return {"prompt": prompt} | (found if form.is_pair else {"completion": found[answers[0]]})


def conversation(row: dict, form: Form, *, is_hh: bool) -> dict[str, list[dict]]:
    """Return the whole conversation as messages, or the question and its answers as messages."""
    answers = [name for name in form.said if name in ANSWERS]
    before = said_before(row)
    said = {name: turns(row, name) if is_hh else messages_of(row, name, "assistant") for name in answers}
    if form.is_pair and (form.needs == PAIR or any(side[0].get("role") != "assistant" for side in said.values())):
        return extract_prompt({name: joined(before, side) for name, side in said.items()})  # pyright: ignore
    asked = joined(before, question(row, form.needs[0]))
    if form.is_pair or (form.is_written and answers):
        return {"prompt": asked} | said
    return {"messages": sum(said.values(), asked)}


def said_before(row: dict) -> list[dict]:
    """Return the system prompt and the history of a row as messages, if there are any."""
    found = [{"role": "system", "content": text_in(row, "system")}] if row.get("system") else []
    for turn in row.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise ValueError(f"'history' has {turn!r:.60}; it must be pairs of a question and its answer")
        found += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    return found


def joined(before: list[dict], messages: list[dict]) -> list[dict]:
    """Put earlier messages before the others; there may be one system prompt, at the beginning."""
    own = messages[:1] if messages and messages[0].get("role") == "system" else []
    others = before[:1] if before and before[0]["role"] == "system" else []
    if own and others and own[0]["content"] != others[0]["content"]:
        raise ValueError("'system' says something else than the system message; leave out one of them")
    return [*(own or others), *before[len(others) :], *messages[len(own) :]]


def question(row: dict, name: str) -> list[dict]:
    """Return messages; a text with its `input` becomes one message of the user."""
    if isinstance(row[name], str) and row.get("input"):
        return [{"role": "user", "content": f"{row[name]}\n{text_in(row, 'input')}"}]
    return messages_of(row, name, "user")


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


def message_of(message: Any) -> Any:
    """Return a message with `role` and `content`; the content is a text."""
    if not isinstance(message, dict):
        return message  # refused later, like a message without a role
    message = {name: value for name, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        if role not in ROLES:
            raise ValueError(f"from {role!r:.60}; known are {', '.join(ROLES)}")
        if not isinstance(message.get("value"), str | list):
            raise ValueError(f"from {role} without a text: {message!r:.60}")
        message = {"role": ROLES[role], "content": message.pop("value")} | message
        if role == CALL:
            return called(message)
    elif message.get("role") in FOREIGN:
        message["role"] = ROLES[message["role"]]
    if isinstance(content := message.get("content"), list):
        message["content"] = "".join(map(text_of_part, content))
    return message


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
