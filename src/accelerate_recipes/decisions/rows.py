"""Rows of decisions: the forms in which they are written, the questions that they ask, and what their answers mean."""

import contextlib
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from transformers.decision.template_utils import Question

from accelerate_recipes.conversations.formats import Form, recognised
from accelerate_recipes.data.files import class_names
from accelerate_recipes.data.reading import as_written, json_in
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.ranks import print_first

TEXT, LABEL, NAME = "text", "label", "label_text"
LABELS = {LABEL, NAME}
FORMS = (
    Form("questions", ("state", "questions", "answers"), ()),
    Form("questions, with gold", ("state", "questions", "gold"), ()),
    Form("text and label", (TEXT, LABEL), (NAME,)),
)
FLAT = ("kind", "question", "options", "target")
IMAGES = ("assets", "image", "images")
NUMBER = "number"  # column with the number of a row in its file
TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


class Labels(NamedTuple):
    """Question that rows with text and label ask, and the answer that each label stands for, null for those of no class."""

    question: dict[str, Any]
    answers: dict[str, str | None]


def read_decisions(args: Any) -> tuple[dict[str, datasets.Dataset], Labels | None]:
    """Read the rows of both sides, with their numbers in the files, and the question of their labels, if they have any.

    Raises:
        ConfigError: for columns of no form, for labels with equal names, and if a side is empty.
        DataError: for rows that cannot be read.
    """
    rows, asked = {}, ""
    for side, table in args.read_rows().items():
        if {*FLAT} <= {*table.column_names}:
            raise ConfigError(
                f"{args.origins[side]} has the columns {', '.join(FLAT)}: write each row as `state`, `questions`, which are "
                '{NAME: {"type": "choice", "instructions": ..., "criteria": {OPTION: null}}}, and `answers`, {NAME: OPTION}'
            )
        form, renamed = recognised(table, FORMS, args.mapping, args.origins[side])
        if asked not in ("", form.needs[0]):
            raise ConfigError(f"{args.origins[side]} has {form.name}, {args.source} another form; write both in one")
        asked = form.needs[0]
        kept = [name for name in (*form.needs, *form.takes, *IMAGES) if name in renamed.column_names]
        rows[side] = renamed.select_columns(kept).add_column(NUMBER, np.arange(len(renamed)))
    return args.sides(rows, asked), labels_of(args, rows) if asked == TEXT else None


def labels_of(args: Any, rows: dict[str, datasets.Dataset]) -> Labels:
    """Make the question of labels, whose options are their names, or else the labels themselves, and say what is odd in it.

    Raises:
        ConfigError: for names that are equal.
    """
    kind, names = rows["train"].features[LABEL], []
    if NAME not in rows["train"].column_names:
        names = getattr(kind, "names", None) or []  # of a ClassLabel
        if args.label_names and not names:
            names = Path(args.label_names).read_text(encoding="utf-8").splitlines()
    given = (
        label_in(row) for table in rows.values() for row in table.select_columns([*LABELS & {*table.column_names}])
    )
    options = names or class_names(filter(None, given))
    answers = {str(number): name for number, name in enumerate(names)} | {"-1": None}
    answers = answers if names else dict(zip(options, options, strict=True))
    if len({*options}) < len(options):
        raise ConfigError(f"two labels have the same name, {next(o for o in options if options.count(o) > 1)!r}")
    seen: dict[str, str] = {}
    for option in options:
        if (other := seen.setdefault(folded(option), option)) != option:
            print_first(f"The labels {other!r} and {option!r} differ in case or spaces alone, and are two options")
    if options and all(re.fullmatch(r"-?\d+", option) for option in options):
        print_first(
            "The labels are numbers, which tell the model nothing: name them by --label_names or a column label_text"
        )
    are_truths = {*map(folded, options)} <= {"true", "false"}
    question = {"type": "noul"} if are_truths else {"type": "choice", "criteria": dict.fromkeys(options)}
    return Labels(question | {"instructions": args.instructions or None}, answers)


def label_in(row: dict[str, Any]) -> str | None:
    """Return the label of a row as a text, by its name if the row has one."""
    return as_option(row[NAME if NAME in row else LABEL])


def as_option(value: Any) -> str | None:
    """Return an answer as a text: 1.0 is "1", true is "true", and an empty cell is None."""
    if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
        value = None if math.isnan(value) else int(value)
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.strip() else None


def folded(text: str) -> str:
    return " ".join(text.casefold().split())


def request_of(row: dict[str, Any], kinds: datasets.Features, labels: Labels | None) -> tuple[dict, dict]:
    """Return `state` and `questions` of a row, and by the names of the questions the answers that are not null.

    Raises:
        ValueError: for what is no question, or no answer.
    """
    if images := [name for name in IMAGES if row.get(name)]:
        raise ValueError(f"it has {images[0]}, and this recipe trains on text alone")
    state = row[TEXT if labels else "state"]
    if state is None or (labels and not str(state).strip()):
        raise ValueError("there is nothing to decide on: the state, or text, is empty")
    if labels:
        label = label_in(row)
        if label and label not in labels.answers:
            raise ValueError(f"the label {label!r} has no name")
        questions, answers = {LABEL: labels.question}, {LABEL: labels.answers.get(label or "")}
    else:
        questions, answers = (in_cell(row, kinds, name) for name in row if name in ("questions", "answers", "gold"))
        for name, question in questions.items():
            check_criteria(name, question)
    questions = {name: question for name, question in questions.items() if question is not None}
    if not questions:
        raise ValueError("it asks no question")
    if unknown := [name for name, answer in answers.items() if name not in questions and answer is not None]:
        raise ValueError(f"it answers {unknown[0]!r}, which is none of its questions: {', '.join(questions)}")
    if not {*answers} & {*questions}:
        raise ValueError("it has no answer")
    given = {name: answer for name, answer in answers.items() if answer is not None}
    return {"state": state, "questions": questions}, given


def in_cell(row: dict[str, Any], kinds: datasets.Features, name: str) -> dict[str, Any]:
    """Return the object in a column, which may hold it as JSON, without the nulls that Arrow adds to structures."""
    value = as_written(row[name], kinds[name])
    with contextlib.suppress(ValueError):
        value = json_in(value) if isinstance(value, str) else value
    if not isinstance(value, dict | None):
        raise ValueError(f"{name!r} is {value!r:.60}, not an object with the names of questions")
    return value or {}


def check_criteria(name: str, question: Any) -> None:
    """Raise ValueError for criteria that transformers accepts, or refuses without telling what is wrong."""
    criteria = question.get("criteria") if isinstance(question, dict) else None
    if isinstance(criteria, list) and question.get("type") == "choice":
        raise ValueError(f"question {name!r}: the criteria of a choice are an object, {{OPTION: null}}, and no list")
    options = [folded(option) for option in criteria or () if isinstance(option, str)]
    if alike := [option for option in options if options.count(option) > 1]:
        raise ValueError(f"question {name!r} has the option {alike[0]!r} twice")


def shares_of(question: Question, answer: Any) -> list[float]:
    """Return the shares of the options, which add up to 1: of one option, of probabilities, or of the pipeline's answer.

    Raises:
        ValueError: for an answer that is none of the question's.
    """
    if isinstance(answer, dict) and not answer.keys() <= {*question.options}:
        candidates = (answer.get(key) for key in ("probabilities", question.type, "label"))
        answer = next((value for value in candidates if value is not None), answer)
    if question.type == "score" and isinstance(answer, list):
        answer = dict(enumerate(answer))
    if isinstance(answer, dict):
        answer = {str(option): share for option, share in answer.items() if share is not None}
    if question.type == "noul":
        answer = TRUTHS.get(folded(answer), answer) if isinstance(answer, str) else answer
        answer = {"true": answer} if isinstance(answer, bool | int | float) else answer
        if isinstance(answer, dict) and len(answer) == 1:
            ((option, share),) = answer.items()
            answer = {option: share, {"true": "false"}.get(option, "true"): 1 - share}
    shares = answer if isinstance(answer, dict) else {as_option(answer) or "": 1}
    shares = {option: float(share) for option, share in shares.items()}
    if unknown := [option for option in shares if option not in question.options]:
        raise ValueError(f"{unknown[0]!r} is none of the options of {question.name!r}: {', '.join(question.options)}")
    total = sum(shares.values())
    if min(shares.values(), default=-1) < 0 or not abs(total - 1) < 1e-3:
        raise ValueError(f"the shares of {question.name!r} are {shares}, which do not add up to 1")
    return [shares.get(option, 0.0) / total for option in question.options]
