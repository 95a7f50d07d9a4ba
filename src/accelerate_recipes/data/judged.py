"""Answers that are judged one by one: a row has a `label`, which is true for a good answer and false for a bad one."""

from dataclasses import dataclass

import datasets
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.formats import KTO, LABEL, FormatArgs
from accelerate_recipes.errors import DataError

GOOD = {"true": True, "1": True, "false": False, "0": False}


@dataclass
class JudgedArgs(FormatArgs):
    """Arguments of a recipe that reads judged answers. Put it before TrainArgs in the bases of its arguments."""

    forms = KTO  # pyright: ignore[reportAssignmentType]  a property of the base

    def read_rows_for(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, datasets.Dataset]:
        return {
            side: judged_answers(rows, self.sources[side]) for side, rows in super().read_rows_for(tokenizer).items()
        }


def judged_answers(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Make rows of `prompt`, `completion` and a bool as `label`. Of a conversation, the last answer is judged.

    Raises:
        DataError: for a label that is neither true nor false, and for a conversation that does not end with an answer.
    """
    said = [str(value).lower().removesuffix(".0") for value in rows[LABEL][:]]
    for number, text in enumerate(said, 1):
        if text not in GOOD:
            raise DataError(f"{source}, row {number}: {LABEL!r} is {text!r}; it must be true or false, or 1 or 0")
    rows = rows.remove_columns(LABEL).add_column(LABEL, [GOOD[text] for text in said])  # pyright: ignore
    if "messages" not in rows.column_names:
        return rows
    message = rows.features["messages"]
    features = {name: kind for name, kind in rows.features.items() if name != "messages"}
    features |= {"prompt": message, "completion": message}
    return rows.map(
        before_last_answer,
        with_indices=True,
        fn_kwargs={"source": source},
        remove_columns="messages",
        features=datasets.Features(features),
        desc="Finding the answers that are judged",
    )


def before_last_answer(row: dict, index: int, source: str) -> dict:
    """Part a conversation before its last answer."""
    messages = row["messages"] or []
    begin = len(messages)
    while begin and messages[begin - 1]["role"] == "assistant":
        begin -= 1
    if not 0 < begin < len(messages):
        raise DataError(
            f"{source}, row {index + 1}: 'messages' must be a question and end with the answer that is judged, a message of "
            f"the role 'assistant'; the roles are {', '.join(message['role'] for message in messages) or 'none'}"
        )
    return {"prompt": messages[:begin], "completion": messages[begin:]}
