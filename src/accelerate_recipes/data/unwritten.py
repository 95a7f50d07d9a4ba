"""Fields of messages that a chat template does not write: what they hold would be lost, and nothing would say so."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.answer_spans import WEIGHTS
from accelerate_recipes.data.conversations import NUM_COMPARED
from accelerate_recipes.data.prepared import chunks_of
from accelerate_recipes.errors import printable, raise_problems
from accelerate_recipes.ranks import is_first

PLAIN = {"role", "name", "content", "refusal", "tool_call_id", *WEIGHTS}  # fields that need not be written as such
TOOLS = "tools"
USUAL = {"system", "user", "assistant"}  # roles that every template knows, or refuses
OF_ROLE = "content of the role "
REMEDY = "give a chat template that writes it, put it into `content`, or remove it"


def fields_of(row: dict[str, Any], columns: Sequence[str]) -> set[str]:
    """Return the fields of a row's messages that hold something to write, and `tools`; of content, that of unusual roles."""
    messages = [message for column in columns for message in row[column]]
    found = {name for message in messages for name, value in message.items() if value}
    roles = {f"{OF_ROLE}{message['role']}" for message in messages if message["role"] not in USUAL}
    return (found | roles | ({TOOLS} if row.get(TOOLS) else set())) - PLAIN


def without_field(row: dict[str, Any], columns: Sequence[str], field: str) -> dict[str, Any]:
    """Return a row whose messages lack a field, or the content of a role; without `tools`, a row that has none."""
    if field == TOOLS:
        return row | {TOOLS: None}

    def lacking(message: dict[str, Any]) -> dict[str, Any]:
        if field == f"{OF_ROLE}{message['role']}":
            return message | {"content": ""}
        return {name: value for name, value in message.items() if name != field}

    return row | {column: [*map(lacking, row[column])] for column in columns}


def renderings(
    row: dict[str, Any], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, template: Any
) -> Iterator[Any]:
    """Render the messages of a row as texts: a prompt with each answer to it, or what there is."""
    prompt = row["prompt"] if "prompt" in columns else []
    answers = [row[column] for column in columns if column != "prompt"]
    settings = {"tools": row.get(TOOLS), "chat_template": template} | (row.get("chat_template_kwargs") or {})
    for messages in [[*prompt, *answer] for answer in answers] or [prompt]:
        said = [{name: value for name, value in message.items() if value is not None} for message in messages]
        yield tokenizer.apply_chat_template(said, tokenize=False, **settings)


def roles_of(rows: datasets.Dataset, column: str) -> set[str]:
    """Return the roles in a column of messages with fields of fixed types."""
    roles = (pc.unique(chunk.flatten().field("role")) for chunk in rows.data.column(column).chunks)
    return {role for found in roles for role in found.to_pylist()}


def is_written(
    row: dict[str, Any], columns: Sequence[str], field: str, tokenizer: PreTrainedTokenizerBase, template: Any
) -> bool:
    """Tell whether a row is rendered otherwise without a field. A row that cannot be rendered is told elsewhere."""
    given = (columns, tokenizer, template)
    try:
        return [*renderings(row, *given)] != [*renderings(without_field(row, columns, field), *given)]
    except Exception:  # templates raise errors of any kind
        return True


def check_written(
    rows: datasets.Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, template: Any, where: str
) -> None:
    """Print which fields of messages the chat template does not write, each with the number of its rows, and the first.

    A template may write a field in some places, such as thoughts only in the last answer. So a field is written if one of
    the first rows that have it is rendered otherwise without it. `where` stands before the number of a row.

    Raises:
        ConfigError: if these are calls of tools, or tools.
    """
    features = {column: getattr(rows.features[column], "feature", None) for column in columns}
    if not all(isinstance(feature, dict | datasets.Json) for feature in features.values()):
        return  # texts
    if TOOLS not in rows.column_names and all(
        isinstance(feature, dict) and feature.keys() <= PLAIN and roles_of(rows, column) <= USUAL
        for column, feature in features.items()
    ):
        return
    having: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        for field in fields_of(row, columns):  # pyright: ignore[reportArgumentType]
            having[field].append(number)
    lost = {}
    for field, numbers in having.items():
        first = (rows[number] for number in numbers[:NUM_COMPARED])
        if not any(is_written(row, columns, field, tokenizer, template) for row in first):
            lost[field] = (
                f"{where} {numbers[0] + 1}: the chat template writes nothing of `{field}`, which {len(numbers):,} of "
            )
            lost[field] += f"{len(rows):,} have; {REMEDY}"
    raise_problems(
        "What rows hold would not be trained", [lost[name] for name in ("tool_calls", TOOLS) if name in lost]
    )
    if is_first():
        for said in lost.values():
            print(printable(said), flush=True)


def same_answers(pairs: datasets.Dataset, max_length: int | None) -> np.ndarray:
    """List the tokenised pairs whose answers are the same tokens, of a prompt and an answer the first `max_length`."""
    found, start = [], 0
    columns = (chunks_of(pairs, f"{name}_ids") for name in ("prompt", "chosen", "rejected"))
    for (prompts, _), (better, chosen), (worse, rejected) in zip(*columns, strict=True):
        rooms = np.maximum(max_length - prompts, 0) if max_length else np.maximum(better, worse)
        begins = zip(better.cumsum() - better, worse.cumsum() - worse, strict=True)
        kept = zip(np.minimum(better, rooms), np.minimum(worse, rooms), strict=True)
        for number, ((a, b), (length, other)) in enumerate(zip(begins, kept, strict=True), start):
            if length == other and np.array_equal(chosen[a : a + length], rejected[b : b + length]):
                found.append(number)
        start += len(prompts)
    return np.array(found, dtype=int)
