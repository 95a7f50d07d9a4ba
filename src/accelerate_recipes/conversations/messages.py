"""Messages and texts of rows: read from the forms in which they are written, checked, and without nulls that Arrow adds."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import datasets
import pyarrow as pa

from accelerate_recipes.conversations.rendering import is_answer, is_trained, weights_of
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.reading import as_written, json_in, without_nulls
from accelerate_recipes.data.template_values import ARGUMENTS, MESSAGES, SETTINGS, WEIGHTS, parsed, with_objects
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.upstream import keep_json_exact

keep_json_exact()
IMAGE_COLUMNS = {"image", "images", "pixel_values"}
TEXT = datasets.Value("string")
CALLS = {"tool_calls", "function_call"}
PARTS = (
    "{} has a message whose `content` is not a text but parts, of which many chat templates write nothing, or Python code; "
    "join the texts of each message into one"
)
CALL = "function_call"
# Roles in messages with the key `from`, and their usual names.
ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "assistant": "assistant", "model": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool": "tool", CALL: "assistant",
}  # fmt: skip
FOREIGN = {"human", "gpt", "chatgpt", "bot", "observation", CALL}  # unknown to templates, which may have other names
LISTS = ("messages", "conversations")  # columns that never hold a text
TEXTS = (TEXT, datasets.Value("large_string"))
ANY = datasets.List(datasets.Json())
EITHER = ("prompt", "completion", "chosen", "rejected")  # columns that hold texts or messages
# How a text begins that holds messages, written by JSON or by Python: other JSON, such as an answer of a task, stays a text.
WRITTEN = re.compile(
    rf"""\s*\[?\s*\{{\s*(?=.*["'](role|from)["']\s*:\s*["']({"|".join(ROLES)}|developer)["'])"""
    r"""(?=.*["'](content|value|tool_calls)["']\s*:)["']""",
    re.DOTALL,
)


def select(rows: datasets.Dataset, columns: Collection[str], source: str) -> datasets.Dataset:
    """Keep only `columns`, with rows as they were written: without the nulls that Arrow adds to rows with different fields.

    Raises:
        ConfigError: for images, on which these recipes do not train.
        DataError: for tools that are not JSON.
    """
    check_no_images(rows, source)
    kept = sorted({*columns, *(name for name in SETTINGS if name in rows.column_names)})
    rows = rows.select_columns(kept)
    for name in (name for name in kept if name in MESSAGES):
        message = getattr(rows.features[name], "feature", None)
        if isinstance(message, dict) and not isinstance(message.get("content", TEXT), datasets.Value):
            raise ConfigError(PARTS.format(f"{source}: {name!r}"))
    return without_added_nulls(rows, kept, source)


def check_no_images(rows: datasets.Dataset, source: str) -> None:
    """Raise ConfigError for a column of images, on which these recipes do not train."""
    if images := IMAGE_COLUMNS & {*rows.column_names}:
        raise ConfigError(
            f"{source} has the column {min(images)}: this recipe trains on text only; train on conversations with images by "
            "recipes/sft_vlm.py, or remove that column"
        )


def without_added_nulls(rows: datasets.Dataset, columns: Collection[str], source: str) -> datasets.Dataset:
    """Rewrite columns, where needed, without the nulls that Arrow adds to rows with different fields.

    Raises:
        ConfigError: for messages that consist of parts.
        DataError: for tools that are not JSON.
    """
    changes = {name: target(rows.features[name]) for name in columns if is_rewritten(rows, name)}
    if changes:
        given = {"kinds": {name: rows.features[name] for name in sorted(changes)}, "source": source}
        how = {"features": datasets.Features(dict(rows.features) | changes), "desc": "Removing nulls"}
        rows = rows.map(rewritten, with_indices=True, fn_kwargs=given, **how)
    return rows


def is_rewritten(rows: datasets.Dataset, name: str) -> bool:
    """Tell whether a column must be rewritten: settings such as tools; messages that are JSON or call tools; added nulls."""
    message = getattr(rows.features[name], "feature", None)
    is_changed = isinstance(message, datasets.Json) or (isinstance(message, dict) and bool(CALLS & message.keys()))
    if name in SETTINGS or (is_changed and name in MESSAGES):
        return True
    return any(has_nulls_inside(chunk) for chunk in rows.data.column(name).chunks)


def has_nulls_inside(array: pa.Array) -> bool:
    """Tell whether a structure in an array, at any depth, has a field that is null."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return has_nulls_inside(array.flatten())
    if pa.types.is_struct(array.type):
        return any(field.null_count or has_nulls_inside(field) for field in array.flatten())
    return False


def target(feature: Any) -> Any:
    """Return the type in which a column keeps its rows exactly: JSON. Other types would give all rows all fields."""
    return datasets.List(datasets.Json()) if isinstance(feature, datasets.List) else datasets.Json()


def rewritten(row: dict, index: int, kinds: dict[str, Any], source: str) -> dict:
    """Return the columns with these types without nulls that Arrow adds. Settings may also be JSON texts.

    Of messages, fields that are null are left out, but not in arguments of tools.
    """
    number = index + 1
    columns = {name: as_written(row[name], kind) for name, kind in kinds.items()}
    columns |= {name: parsed(columns[name], name, number, source) for name in SETTINGS if name in columns}
    for name in (name for name in MESSAGES if name in columns):
        columns[name] = without_nulls(columns[name], kept=ARGUMENTS)
        where = f"{source}, row {number}: {name!r}"
        for message in columns[name] if isinstance(columns[name], list) else []:
            if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
                raise DataError(f"{where} has a message without a role that is a text: {message!r:.60}")
            if isinstance(message.get("content"), list):
                raise ConfigError(PARTS.format(where))
            if message.get("function_call"):
                raise DataError(
                    f"{where} has a message with function_call, which templates do not write; give tool_calls"
                )
            if message.get("content") is None and not message.get("tool_calls"):
                raise DataError(
                    f"{where} has a message without content and tool_calls: {message!r:.60}; remove the row"
                )
        try:
            columns[name] = with_objects(columns[name])
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    return columns


def has_unweighted(rows: datasets.Dataset, columns: Collection[str], source: str) -> bool:
    """Tell whether a message is not a target by its `weight`, `train` or `loss`, which is 0 or false.

    Raises:
        DataError: for a weight that is neither 0 nor 1.
    """
    has_zero = False
    for name in columns:
        message = getattr(rows.features[name], "feature", None)
        if isinstance(message, datasets.Json) or (isinstance(message, dict) and {*WEIGHTS} & {*message}):
            for number, messages in enumerate(rows[name], 1):
                weights = [weight for message in messages for weight in weights_of(message)]
                if wrong := [weight for weight in weights if weight not in (0, 1)]:
                    raise DataError(
                        f"{source}, row {number}: {name!r} has a message of weight {wrong[0]!r}; {', '.join(WEIGHTS)} "
                        "say whether a message is a target: give 0 or 1, or rename a field that means something else"
                    )
                has_zero |= 0 in weights
    return has_zero


def missing_answers(rows: datasets.Dataset, column: str, source: str) -> str:
    """Describe the rows whose last message is no answer, or an empty one; return "" if there are none."""
    first, num_found, num_untrained = None, 0, 0
    batches: Any = rows.select_columns(column).iter(1000)  # a fourth of the time of row by row
    for number, messages in enumerate((messages for batch in batches for messages in batch[column]), 1):
        if not is_answer(messages[-1] if messages else {}):
            first = first or (number, messages[-1:])
            num_found += 1
            num_untrained += not any(map(is_trained, messages))
    if not first:
        return ""
    return (
        f"{source}: {num_found:,} of {len(rows):,} rows do not end with an answer, the first is row {first[0]}, whose end "
        f"is {first[1]!r:.80}; they are trained with the answers that they have. {num_untrained:,} of them have none, and "
        "are left out"
    )


def text_in(row: dict, name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"{name!r} is {'null' if row[name] is None else repr(row[name])[:60]}, not a text")
    return row[name]


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


def message_of(message: Any) -> dict:
    """Return a message with `role`, by a name that templates know, and with `content`, a text, or calls of tools."""
    if not isinstance(message, dict):
        raise ValueError("that is null; remove it" if message is None else f"without a role: {message!r:.60}")
    message = {name: value for name, value in message.items() if value is not None}
    names = FOREIGN
    if "from" in message and "role" not in message:
        if message["from"] not in ROLES:
            raise ValueError(f"from {message['from']!r:.60}; known are {', '.join(ROLES)}")
        names, message = ROLES.keys(), {"role": message.pop("from")} | message
    if not isinstance(role := message.get("role"), str):
        raise ValueError(f"without a role that is a text: {message!r:.60}")
    if "value" in message and "content" not in message:
        names, message = ROLES.keys(), {"role": role, "content": message.pop("value")} | message
    content = message.get("content")
    if not isinstance(content, str | list) and (content is not None or not {"tool_calls", CALL} & {*message}):
        raise ValueError(f"from {role} without a text as its content: {message!r:.80}; give a text, or remove the row")
    if isinstance(content, list):
        message["content"] = "".join(map(text_of_part, content))
    if role in names:
        message["role"] = ROLES[role]
    return called(message) if role == CALL and content is not None else message


def text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise ValueError(
            f"with a part that is no text, {part!r:.60}; this recipe trains on text only: remove the row, or train on "
            "images by recipes/sft_vlm.py"
        )
    return part["text"]


def called(message: dict) -> dict:
    """Convert the text of one or several tool calls to the form that templates read."""
    try:
        calls = json_in(message.pop("content"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"from {CALL!r} that is no JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    return message | {"tool_calls": [{"type": "function", "function": call} for call in calls]}


def read_prompts(rows: datasets.Dataset, source: str) -> datasets.Dataset:
    """Return rows whose `prompt` is a text or messages; messages may be written as JSON texts.

    Raises:
        DataError: for rows without such a column, and for the first row without a prompt.
    """
    if "prompt" in rows.column_names and is_json(rows := with_texts(rows, ["prompt"]), "prompt"):
        features = datasets.Features(rows.features | {"prompt": ANY})
        rows = rows.map(read_prompt, with_indices=True, fn_kwargs={"source": source}, features=features)
    check_texts_or_messages(rows, {"prompt"}, source)
    return rows


def read_prompt(row: dict, index: int, source: str) -> dict[str, list[dict]]:
    try:
        return {"prompt": messages_of({"prompt": from_json(row, "prompt")}, "prompt", "user")}
    except ValueError as error:
        raise DataError(f"{source}, row {index + 1}: {error}") from None


def with_texts(rows: datasets.Dataset, names: Sequence[str]) -> datasets.Dataset:
    """Turn those of some columns that are of Arrow's type JSON, and hold nothing but texts, into columns of texts."""
    of_json = [name for name in names if rows.features[name] == datasets.Json()]
    stored = [name for name in of_json if all(isinstance(value, str) for value in rows[name])]
    if not stored:
        return rows
    features = datasets.Features(rows.features | dict.fromkeys(stored, TEXT))
    return rows.map(lambda row: {name: row[name] for name in stored}, features=features)


def is_json(rows: datasets.Dataset, name: str) -> bool:
    """Tell whether a column of texts holds messages as JSON, as its first text shows; for lists of messages it must."""
    if rows.features[name] not in TEXTS:
        return False
    return name in LISTS or (name in EITHER and bool(WRITTEN.match(next((text for text in rows[name] if text), ""))))


def from_json(row: dict, name: str) -> Any:
    """Read the messages of a column that holds them as JSON texts, as a cell of a CSV file must."""
    if row[name] is None:
        return None
    text = text_in(row, name)
    try:
        messages = json_in(text)
    except ValueError:
        messages = None
    if not isinstance(messages, list | dict):
        by_python = "; Python's str() wrote it, write it by json.dumps()" if re.match(r"\W*'", text) else ""
        raise ValueError(f"{name!r} is {text!r:.60}, not messages as JSON{by_python}")
    return messages
