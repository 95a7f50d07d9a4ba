"""Conversations and texts to train on: selection of their columns, removal of nulls, and counts of their targets."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accelerate_recipes.data.answer_spans import WEIGHTS, is_answer, is_trained, weights_of
from accelerate_recipes.data.prepared import chunks_of
from accelerate_recipes.data.rendering import SETTINGS, parsed, with_objects
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models import IGNORE_INDEX

IMAGES = {"image", "images", "pixel_values"}
NUM_COMPARED = 16  # number of rows whose rendering is compared
NUM_LAST = 4  # number of last targets of a row among which its end token is searched
EVERYTHING = slice(None)
TEXT = datasets.Value("string")
CALLS = {"tool_calls", "function_call"}
PARTS = (
    "{} has a message whose `content` is not a text but parts, of which many chat templates write nothing, or Python code; "
    "join the texts of each message into one"
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
    for name in kept:
        message = getattr(rows.features[name], "feature", None)
        if isinstance(message, dict) and not isinstance(message.get("content", TEXT), datasets.Value):
            raise ConfigError(PARTS.format(f"{source}: {name!r}"))
    return without_added_nulls(rows, kept, source)


def check_no_images(rows: datasets.Dataset, source: str) -> None:
    """Raise ConfigError for a column of images, on which these recipes do not train."""
    if images := IMAGES & {*rows.column_names}:
        raise ConfigError(f"{source} has the column {min(images)}: this recipe trains on text only; remove that column")


def without_added_nulls(rows: datasets.Dataset, columns: Collection[str], source: str) -> datasets.Dataset:
    """Rewrite columns, where needed, without the nulls that Arrow adds to rows with different fields.

    Raises:
        ConfigError: for messages that consist of parts.
        DataError: for tools that are not JSON.
    """
    changes = {name: target(rows.features[name]) for name in columns if is_rewritten(rows, name)}
    if changes:
        rows = rows.map(
            rewritten,
            with_indices=True,
            fn_kwargs={"names": sorted(changes), "source": source},
            features=datasets.Features(dict(rows.features) | changes),
            desc="Removing nulls",
        )
    return rows


def is_rewritten(rows: datasets.Dataset, name: str) -> bool:
    """Tell whether a column must be rewritten: settings such as tools; messages that are JSON, call tools or hold nulls."""
    message = getattr(rows.features[name], "feature", None)
    is_changed = isinstance(message, datasets.Json) or (isinstance(message, dict) and bool(CALLS & message.keys()))
    return name in SETTINGS or is_changed or any(has_nulls_inside(chunk) for chunk in rows.data.column(name).chunks)


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


def rewritten(row: dict, index: int, names: Sequence[str], source: str) -> dict:
    """Return the columns `names` of a row without nulls. Settings may also be JSON texts; nulls in these stay."""
    number = index + 1
    found = {name: parsed(row[name], name, number, source) for name in names}
    for name in found.keys() - {*SETTINGS}:
        where = f"{source}, row {number}: {name!r}"
        for message in found[name] if isinstance(found[name], list) else []:
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
            found[name] = with_objects(found[name])
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    return found


def without_begin(rows: datasets.Dataset, column: str, begin: str) -> datasets.Dataset:
    """Remove `begin`, which may be "", from the start of the texts of a column."""
    if (
        not begin
        or rows.features[column] != TEXT
        or not pc.any(pc.starts_with(rows.data.column(column), begin)).as_py()
    ):
        return rows
    return rows.map(lambda row: {column: row[column].removeprefix(begin)}, desc=f"Removing a second {begin}")


def has_unweighted(rows: datasets.Dataset, columns: Collection[str], source: str) -> bool:
    """Tell whether a message is not a target by its `weight`, `train` or `loss`, which is 0 or false.

    Raises:
        DataError: for a weight that is neither 0 nor 1.
    """
    found = False
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
                found |= 0 in weights
    return found


def missing_answers(rows: datasets.Dataset, column: str, source: str) -> str:
    """Describe the rows whose last message is no answer, or an empty one; return "" if there are none."""
    first, num_found, num_untrained = None, 0, 0
    for number, messages in enumerate(rows[column], 1):
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


def cut_at(lengths: np.ndarray, max_length: int | None) -> dict[str, int]:
    """Count the rows that are longer than `max_length` and the tokens beyond it; also return the longest length."""
    over = np.maximum(lengths - max_length, 0) if max_length else np.zeros(1, int)
    return {"cut": int((over > 0).sum()), "tokens cut off": int(over.sum()), "longest": int(lengths.max())}


class TargetCounts(NamedTuple):
    """Number of targets of each row, number of rows that end with a token that stops generation, and these tokens."""

    targets: np.ndarray
    num_ended: int
    ends: set[int]


def count_targets_of(rows: datasets.Dataset, ends: set[int], kept: slice = EVERYTHING) -> TargetCounts:
    """Count the targets of each row, and the rows that end with one of `ends`, from their `labels`.

    An end token counts if it is among the last NUM_LAST targets of a row: a template may write a line break after it, and
    end tokens of the user's messages are further from the end. `kept` is the part of each row that is trained, its beginning
    or its end. The first token of this part is not a target, because nothing comes before it.
    """
    counts, num_ended, seen = [np.empty(0, np.int64)], 0, set()
    for lengths, labels in chunks_of(rows, "labels"):
        starts = np.cumsum(lengths) - lengths
        first, last = starts + np.array([kept.indices(length)[:2] for length in lengths]).reshape(-1, 2).T
        of_targets = targets_up_to(labels)
        begin, end = of_targets[np.minimum(first + 1, last)], of_targets[last]  # of the row's targets, among all
        counts.append(end - begin)
        targets = labels[labels != IGNORE_INDEX]
        has_end = np.zeros(len(lengths), bool)
        for place in range(1, NUM_LAST + 1):
            numbers = np.flatnonzero(end - begin >= place)
            found = targets[end[numbers] - place]
            is_end = np.isin(found, list(ends))
            has_end[numbers[is_end]] = True
            seen |= {*found[is_end].tolist()}
        num_ended += int(has_end.sum())
    return TargetCounts(np.concatenate(counts), num_ended, seen)


def have_targets(rows: datasets.Dataset) -> np.ndarray:
    """Tell of each row whether a label is a target."""
    found = [np.empty(0, bool)]
    for lengths, labels in chunks_of(rows, "labels"):
        ends, of_targets = np.cumsum(lengths), targets_up_to(labels)
        found.append(of_targets[ends] > of_targets[ends - lengths])
    return np.concatenate(found)


def targets_up_to(labels: np.ndarray) -> np.ndarray:
    """Count the targets before each of the labels, and all of them."""
    return np.concatenate([[0], np.cumsum(labels != IGNORE_INDEX)])
