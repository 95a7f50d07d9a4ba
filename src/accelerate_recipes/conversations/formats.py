"""Common forms of conversations and pairs: recognised by their columns, and converted to a form that trl reads.

For conversations, trl reads `messages`, `prompt` and `completion`, or a text; for pairs, `prompt`, `chosen` and `rejected`.
docs/rows.md shows a row of each form, and the result of its conversion.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase
from trl.data_utils import extract_prompt

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.chats import ChatArgs
from accelerate_recipes.conversations.messages import (
    ANY,
    FOREIGN,
    LISTS,
    TEXT,
    TEXTS,
    check_no_images,
    from_json,
    is_json,
    messages_of,
    text_in,
    with_texts,
)
from accelerate_recipes.data.reading import as_written
from accelerate_recipes.data.template_values import SETTINGS, parsed
from accelerate_recipes.errors import ConfigError, DataError, closest, other_recipe, suggestion
from accelerate_recipes.ranks import print_first

PAIR, SCORES, JUDGED = ("chosen", "rejected"), ("score_chosen", "score_rejected"), ("prompt", "completion", "score")
LABEL = "label"  # column that says whether an answer is good
# Values by which it says so, as `label_text` returns them, the good one first: those of one of these stand in all rows.
JUDGEMENTS = (
    {"true": True, "1": True, "false": False, "0": False}, {"1": True, "-1": False}, {"good": True, "bad": False},
    {"up": True, "down": False}, {"thumbs_up": True, "thumbs_down": False}, {"like": True, "dislike": False},
)  # fmt: skip
LABELS = (*JUDGEMENTS, {"yes": True, "no": False})  # which may be the classes of questions too
VALUES = (*SCORES, JUDGED[2], LABEL)  # columns that judge answers
ANSWERS = {"output", "completion", "response", "answer", *PAIR}
ASKING = {"user", "system"}  # roles of the messages with which a whole conversation begins
HH = re.compile(r"\n\n(Human|Assistant):")  # stands before each turn in Anthropic's pairs
BEFORE = ("system", "history")  # a system prompt as text; earlier questions with their answers
PLAIN = datasets.List({"role": TEXT, "content": TEXT})
# Ways to read rows, in words.
AS_WRITTEN, CONVERSATIONS, PLAIN_TEXTS = "texts as they stand", "conversations", "texts, without a chat template"


class Form(NamedTuple):
    """A form of rows: the columns that it needs, the column with the question first, and the columns that it may have."""

    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...] = BEFORE
    is_written: bool = False  # columns keep their names, texts stay unchanged

    @property
    def said(self) -> list[str]:
        """Columns that hold texts or messages."""
        return [name for name in self.needs if name not in VALUES]

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
KTO = tuple(Form(f"{form.name}, with a label", (*form.needs, LABEL), form.takes, form.is_written) for form in SFT)


@dataclass
class ColumnArgs:
    """Argument of a recipe that reads rows of several `forms`. Put it before RowsArgs in the bases of its arguments."""

    group = "data"
    columns: list[str] = arg(
        [], "Columns that have other names than in a form, as NAME=COLUMN: question=prompt answer=reply."
    )

    forms: ClassVar[Sequence[Form]]
    beside_forms: ClassVar[tuple[str, ...]] = ()  # columns that rows of any form may have

    @property
    def mapping(self) -> dict[str, str]:
        """Columns of the rows by their names in a form."""
        return {name: column for name, _, column in (pair.partition("=") for pair in self.columns)}

    def source_problems(self) -> list[str]:
        problems = super().source_problems()  # pyright: ignore[reportAttributeAccessIssue]
        known = dict.fromkeys(name for form in self.forms for name in (*form.needs, *form.takes, *self.beside_forms))
        for name, column in self.mapping.items():
            if name not in known or not column:
                problems.append(f"--columns {name}={column}: write NAME=COLUMN, with a NAME of {', '.join(known)}")
        if len({*self.mapping.values()}) < len(self.columns):
            problems.append(f"--columns {' '.join(self.columns)}: a name or a column is there twice")
        return problems


@dataclass
class FormatArgs(ColumnArgs, ChatArgs):
    """Arguments of a recipe on conversations or texts. Put it before TrainArgs in the bases of its arguments."""

    beside_forms = SETTINGS

    # What a source of a mixture may set, where the recipe takes a mixture.
    of_source = (
        "dataset_name", "dataset_config", "train_split", "train_files", "eval_files", "heldout_share", "columns",
    )  # fmt: skip

    @property
    def forms(self) -> Sequence[Form]:
        """Forms that the recipe reads."""
        return (*SFT, Form("text", (self.dataset_text_field,), (), is_written=True))  # pyright: ignore[reportAttributeAccessIssue]

    def read_rows_for(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, datasets.Dataset]:
        """Read the rows in the form that will be rendered with a tokenizer."""
        has_template = bool(tokenizer.chat_template)
        return {
            name: in_usual_form(side, self.forms, self.mapping, self.origins[name], has_template=has_template)
            for name, side in self.read_rows().items()
        }


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
    check_judged(rows, form, mapping, source)
    check_one_by_one(rows, form, source)
    rows = with_texts(rows, form.said)
    as_json = [name for name in form.said if is_json(rows, name)]
    are_texts = not as_json and all(rows.features[name] in TEXTS for name in form.said)
    is_hh = has_template and are_texts and form.needs == PAIR and bool(HH.match(rows[0][PAIR[0]] or ""))
    if form.is_written and not is_hh and (are_texts or form.name == "text"):
        way = AS_WRITTEN
    else:
        way = CONVERSATIONS if has_template or not are_texts else PLAIN_TEXTS
    takes = [name for name in form.takes if not (way == AS_WRITTEN and name in BEFORE)]
    read = [name for name in (*form.needs, *takes, *SETTINGS) if name in rows.column_names]
    unread = [name for name in rows.column_names if name not in read]
    rows = rows.select_columns(read)
    columns = ", ".join(mapping.get(name, name) for name in read)
    others = f"; columns that are not used: {', '.join(unread)}" if unread else ""
    others += meant_columns([name for name in (*takes, *SETTINGS) if name not in read], unread)
    if has_template and way == AS_WRITTEN and form.name != "text":
        ways = [f"--columns {as_columns(way, mapping)}" for _, way in ways_by_template(form, forms)]
        remedy = (ways or ["lists of messages instead of texts"])[0]
        others += f"; the chat template is not used: to use it, give {remedy}"
    print_first(f"{source}: {form.name} ({columns}), read as {way}{others}")
    if are_texts and form.needs != PAIR:
        rows = without_repeated_question(rows, form, source)
    needs_nothing = form.is_written and not are_texts and not {*BEFORE, *as_json} & {*read} and is_usual(rows, form)
    if way == AS_WRITTEN or needs_nothing:
        return rows
    if form.is_pair:
        made = ["prompt", *PAIR]
    elif form.is_written:
        made = form.said
    else:
        made = ["messages"] if way == CONVERSATIONS else ["prompt", "completion"]
    kind = TEXT if way == PLAIN_TEXTS else PLAIN if are_texts else ANY
    kinds = dict(rows.features)
    kept = {name: kinds[name] for name in (*VALUES, *SETTINGS) if name in read}

    def usual_row(row: dict, index: int) -> dict:
        row = {name: as_written(value, kinds[name]) for name, value in row.items()}
        others = {name: row[name] for name in kept}
        if others.get("tools") is not None:
            tools = parsed(row["tools"], "tools", index + 1, source) or []
            if form.needs[0] == "conversations":
                tools = [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
            others["tools"] = json.dumps(tools)
        try:
            in_cells = [name for name in LISTS if isinstance(row.get(name), str)]  # other rows may hold lists
            row |= {name: from_json(row, name) for name in {*as_json, *in_cells}}
            return (conversation(row, form, is_hh=is_hh) if way == CONVERSATIONS else texts(row, form)) | others
        except ValueError as error:
            raise DataError(f"{source}, row {index + 1}: {error}") from None

    features = datasets.Features(dict.fromkeys(made, kind) | kept | ({"tools": TEXT} if "tools" in kept else {}))
    how = {"remove_columns": rows.column_names, "features": features, "desc": f"Reading {form.name}"}
    return rows.map(usual_row, with_indices=True, **how)


def recognised(
    rows: datasets.Dataset, forms: Sequence[Form], mapping: dict[str, str], source: str
) -> tuple[Form, datasets.Dataset]:
    """Find the form of rows by their columns; rename the columns to the names of the form.

    Raises:
        ConfigError: if the rows fit no form, or several.
    """
    names = rows.column_names
    if lost := [column for column in mapping.values() if column not in names]:
        meant = suggestion(lost[0], names)
        raise ConfigError(
            f"{source} has no column {lost[0]!r}, which --columns names; there are {', '.join(names)}{meant}"
        )
    rows = rows.remove_columns([name for name in mapping if name in names and name not in mapping.values()])
    rows = rows.rename_columns({column: name for name, column in mapping.items() if name != column})
    there = {name for name in rows.column_names if not pa.types.is_null(rows.data.column(name).type)}
    fitting = [form for form in forms if {*form.needs} <= there and {*mapping} <= {*form.needs, *form.takes, *SETTINGS}]
    # Without a column with the question, or by --columns chosen=chosen rejected=rejected, answers are whole conversations.
    chosen = [form for form in fitting if mapping == dict(zip(form.needs, form.needs, strict=True))]
    fitting = chosen or [form for form in fitting if not any({*form.needs} < {*other.needs} for other in fitting)]
    if not fitting:
        known = "".join(f"\n- {form.name}: {', '.join(form.needs)}" for form in forms)
        close = [form.needs for form in forms if all(closest(need, names) for need in form.needs)]
        meant = meant_columns(close[0] if close else (), names) or other_recipe(names)
        if "text" in names and all(LABEL in form.needs for form in forms):
            meant = (
                "; a text does not show where the answer that is judged begins: divide it into prompt and completion"
            )
        shown = next((form for form in forms if len(form.needs) == 2), forms[-1])
        raise ConfigError(
            f"{source} has the columns {', '.join(names)}; it needs those of one of these forms, or --columns, such as "
            f"{' '.join(f'{need}=COLUMN' for need in shown.needs)}, which says what they are called{meant}:{known}"
        )
    ways = [(form.name, dict(zip(form.needs, form.needs, strict=True))) for form in fitting]
    form = fitting[0]
    is_prompt = form.takes and form.is_written and form.needs[0] == "prompt"
    are_texts = is_prompt and all(rows.features[name] in TEXTS for name in form.said)
    if are_texts and not mapping and any(any(rows[name]) for name in BEFORE if name in there):
        # In this form, texts stay unchanged, and a system prompt or a history would be lost.
        ways += ways_by_template(form, forms)
    if len(ways) > 1:
        raise ConfigError(ambiguity(rows, ways, mapping, source))
    return form, rows


def ways_by_template(form: Form, forms: Sequence[Form]) -> list[tuple[str, dict[str, str]]]:
    """List the ways to read prompts and answers that are texts with the chat template: names of forms, and their columns."""
    judging = [name for name in form.needs if name in VALUES]
    return [
        (other.name, dict(zip(other.needs, form.needs, strict=True)))
        for other in forms
        if other.needs[0] == "question" and (len(other.needs), other.is_pair) == (len(form.needs), form.is_pair)
        if [name for name in other.needs if name in VALUES] == judging
    ]


def as_columns(way: dict[str, str], mapping: dict[str, str]) -> str:
    """Write the columns of a way to read rows as --columns takes them; `mapping` is what it was given before."""
    return " ".join(f"{name}={mapping.get(column, column)}" for name, column in way.items())


def meant_columns(wanted: Sequence[str], names: Sequence[str]) -> str:
    """Return "; did you mean ...?" with the columns that have nearly the wanted names, or ""."""
    matches = {name: closest(name, names) for name in wanted}
    renamed = [f"{name}={column}" for name, column in matches.items() if column not in ("", name)]
    return f"; did you mean --columns {' '.join(renamed)}?" if renamed else ""


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
        told.append(f"- {flag}{as_columns(way, mapping)} ({form}: {full.sum():,} of {len(rows):,} rows)")
        shown |= {column: rows[0][column] for column in way.values()}
    return "\n".join([*told, f"The first row: {shown!r:.500}"])


def label_text(value: Any) -> str:
    """Return a label as LABELS has it: a number or a text, whatever its case, with a hyphen or a space between two words."""
    return re.sub(r"\b[ -]\b", "_", str(value).strip().lower()).removesuffix(".0")


def check_judged(rows: datasets.Dataset, form: Form, mapping: dict[str, str], source: str) -> None:
    """Raise ConfigError for answers of which a column says that some are bad, as in rows for KTO: SFT would train them."""
    if form in (*DPO, *KTO) or form.name == "text" or {*form.needs} <= {*mapping}:
        return
    for name in ("label", "kto_tag"):
        kind = rows.features.get(name)
        if not isinstance(kind, datasets.Value | datasets.Json):
            continue
        values = rows.unique(name) if isinstance(kind, datasets.Value) else rows[name]
        given = {label_text(value): value for value in values}
        judgements = {*given} - {"none", ""}
        is_good = next((labels for labels in JUDGEMENTS if judgements <= {*labels}), {})
        bad = [text for text in judgements if not is_good.get(text, True)]
        if bad and judgements != {"-1"}:  # -1 alone says that a row has no label
            numbers = [number for number, value in enumerate(rows[name], 1) if label_text(value) in bad]
            raise ConfigError(
                f"{source}, row {numbers[0]}: {name!r} is {given[bad[0]]!r}, as in {len(numbers):,} of {len(rows):,} rows: "
                "it marks a bad answer, which would be trained like the good ones; train on both by recipes/kto.py, remove "
                "these rows, or give "
                f"--columns {' '.join(f'{need}={need}' for need in form.needs)} if {name} means something else"
            )


def check_one_by_one(rows: datasets.Dataset, form: Form, source: str) -> None:
    """Raise ConfigError for a file with one object that holds the values of all rows, column by column."""
    for name in form.said if len(rows) == 1 else ():
        value = rows[0][name]
        is_message = isinstance(value, dict) and bool({"role", "from"} & {*value})
        inside = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        if inside and not is_message and not any(isinstance(entry, dict) for entry in inside):
            raise ConfigError(
                f"{source} has one row, in which {name!r} holds {len(inside):,} values, not a text or messages: "
                f"{inside[0]!r:.60}, ...; write an object for each row, with one value of each column"
            )


def without_repeated_question(rows: datasets.Dataset, form: Form, source: str) -> datasets.Dataset:
    """Remove the question from the texts of answers if all of them repeat it; print in how many it stands."""
    asked, *answers = form.said

    def repeat(question: str, *texts: str) -> bool:
        return bool(question) and all(len(text or "") > len(question) and text.startswith(question) for text in texts)

    parts = rows.select_columns(form.said).iter(batch_size=1000) if answers else ()
    columns = ([part[name] for name in form.said] for part in parts)  # pyright: ignore[reportCallIssue, reportArgumentType]
    texts_of_rows = (row for part in columns for row in zip(*part, strict=True))
    numbers = [number for number, row in enumerate(texts_of_rows, 1) if repeat(*row)]
    is_removed = len(numbers) == len(rows)
    if numbers:
        done = "it is read once" if is_removed else f"it stays there; the first is row {numbers[0]}"
        print_first(f"{source}: {len(numbers):,} of {len(rows):,} answers begin with their question; {done}")
    if not is_removed:
        return rows
    is_written = form.is_written  # `datasets` finds its result again by what the function holds

    def answer(row: dict, name: str) -> str:
        text = row[name].removeprefix(row[asked])
        return text if is_written else text.lstrip()

    return rows.map(lambda row: {name: answer(row, name) for name in answers}, desc="Removing repeated questions")


def is_usual(rows: datasets.Dataset, form: Form) -> bool:
    """Tell whether rows need not be rewritten: messages of texts, with roles that templates know, and no question twice."""
    for name in form.said:
        feature = rows.features[name]
        message = feature.feature if isinstance(feature, datasets.List) else None
        if not isinstance(message, dict) or {"from", "value"} & {*message}:
            return False
        if message.get("role") not in TEXTS or message.get("content") not in TEXTS or FOREIGN & roles_at(rows, name):
            return False
    asked, *answers = form.said
    if asked in ANSWERS or not answers:
        return True
    begins = set().union(*(roles_at(rows, name, 0) for name in answers))
    return "assistant" not in roles_at(rows, asked, -1) and not ASKING & begins


def texts(row: dict, form: Form) -> dict[str, str]:
    """Return a prompt that ends with a blank line, and the answers."""
    asked, *answers = form.said
    prompt = "".join(f"{message['content']}\n\n" for message in [*said_before(row), *question(row, asked)])
    completions = {name: text_in(row, name) for name in answers}
    return {"prompt": prompt} | (completions if form.is_pair else {"completion": completions[answers[0]]})


def conversation(row: dict, form: Form, *, is_hh: bool) -> dict[str, list[dict]]:
    """Return the whole conversation as messages, or the question and its answers as messages."""
    answers = [name for name in form.said if name in ANSWERS]
    before = said_before(row)
    sides = {name: turns(row, name) if is_hh else messages_of(row, name, "assistant") for name in answers}
    if form.needs != PAIR and (row[form.needs[0]] or not form.is_pair):
        asked = without_answer(question(row, form.needs[0]), sides.values())
        ends = {name: end_of_question(name, side, asked) for name, side in sides.items()}
        system = [message for message in asked[:1] if message["role"] == "system"]
        asked = next((joined(system, sides[name][:end]) for name, end in ends.items() if end), asked)
        if not (form.is_pair and all(side[0]["role"] in ASKING for side in sides.values())):
            asked, after = joined(before, asked), {name: sides[name][end:] for name, end in ends.items()}
            is_parted = form.is_pair or (form.is_written and answers)
            return {"prompt": asked} | after if is_parted else {"messages": sum(after.values(), asked)}
        before = joined(before, system if any(ends.values()) else asked)
    # The answers are whole conversations; what they have in common is the question.
    return extract_prompt({name: joined(before, side) for name, side in sides.items()})  # pyright: ignore


def said_before(row: dict) -> list[dict]:
    """Return the system prompt and the history of a row as messages, if there are any."""
    messages = [{"role": "system", "content": text_in(row, "system")}] if row.get("system") else []
    for turn in row.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise ValueError(f"'history' has {turn!r:.60}; it must be pairs of a question and its answer")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    return messages


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


def turns(row: dict, name: str) -> list[dict]:
    """Split a text in Anthropic's form into messages."""
    start, *parts = HH.split(text_in(row, name))
    if start or not parts:
        raise ValueError(f"{name!r} does not begin with a line 'Human:', unlike the first row")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[a], "content": b.strip()} for a, b in zip(parts[::2], parts[1::2], strict=True)]


def stands_at(place: int, some: list[dict], messages: list[dict]) -> bool:
    """Tell whether messages stand at a place among others; white space around their texts does not count."""

    def said(messages: list[dict]) -> list[dict]:
        return [{name: str(value).strip() for name, value in message.items()} for message in messages]

    return bool(some) and said(messages[place : place + len(some)]) == said(some)


def without_answer(asked: list[dict], answers: Iterable[list[dict]]) -> list[dict]:
    """Remove one of the answers from the end of a question."""
    for answer in answers:
        begin = len(asked) - len(answer)
        if begin > 0 and stands_at(begin, answer, asked):
            return asked[:begin]
    return asked


def end_of_question(name: str, answer: list[dict], asked: list[dict]) -> int:
    """Return how many messages of an answer lead up to its question, and are it; 0 for an answer without its question.

    Raises:
        ValueError: for a whole conversation without the question, or with nothing after it.
    """
    if answer[0]["role"] not in ASKING:
        return 0
    for own in (asked, [message for message in asked if message["role"] != "system"]):
        if (begin := next((i for i in range(len(answer)) if stands_at(i, own, answer)), None)) is not None:
            if begin + len(own) == len(answer):
                raise ValueError(f"{name!r} ends with the question; remove the row")
            return begin + len(own)
    if answer[0]["role"] == asked[-1]["role"] == "user":
        raise ValueError(
            f"{name!r} is a conversation without the question, {asked[-1]['content']!r:.60}; leave out the column with the "
            f"question, as --columns chosen=chosen rejected=rejected or --columns messages={name} does, or mend the row"
        )
    return 0


def roles_at(rows: datasets.Dataset, name: str, place: int | None = None) -> set[str | None]:
    """Return the roles of the first messages of a column (`place` 0), of the last ones (-1), or of all."""
    roles = set()
    for chunk in filter(len, rows.data.column(name).chunks):
        starts, ends = (chunk.offsets.to_numpy()[part] for part in (slice(None, -1), slice(1, None)))
        indices = np.arange(starts[0], ends[-1]) if place is None else (ends - 1 if place else starts)[ends > starts]
        roles |= {*pc.unique(chunk.values.field("role").take(pa.array(indices))).to_pylist()}
    return roles
