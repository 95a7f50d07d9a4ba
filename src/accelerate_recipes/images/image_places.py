"""Conversations with images as they are written: divided into texts, with a mark where an image stands, and the images.

With marks in their place, conversations are texts: what reads, checks and divides these serves both.
"""

import base64
import bisect
import dataclasses
import json
import os
import re
import sys
from collections import defaultdict
from functools import partial
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import datasets
import pyarrow as pa

from accelerate_recipes.conversations.messages import ANY, EITHER, LISTS, TEXT, TEXTS, WRITTEN, from_json
from accelerate_recipes.conversations.messages import IMAGE_COLUMNS as OF_IMAGES
from accelerate_recipes.conversations.messages import ROLES as OF_MESSAGES
from accelerate_recipes.data.passes import map_rows, rows_in
from accelerate_recipes.data.reading import as_written
from accelerate_recipes.errors import ConfigError, DataError, suggestion
from accelerate_recipes.images.pictures import URL
from accelerate_recipes.ranks import print_first

PLACE = "<image>"  # where an image stands in a text, as LLaVA and LLaMA-Factory write it
SEEN = "\ue001"  # the mark that stands there while rows are read: a character that no text has
COLUMNS = ("images", "image")
LIST = re.compile(r"\[\s*[\]\"'{]")  # begins a list; the name of a file may begin with a bracket too
OF_TEXT, OF_IMAGE = ("text", "input_text", "output_text"), ("image", "image_url", "input_image")  # types of parts
NAMES = ("image", "path", "bytes", "url", "image_url", "base64")  # fields of a part that name its image
ASKING = ("history", *LISTS, "prompt", "instruction", "question")  # columns: the first holds the first question
UNPLACED = "places of images are not written, so they stand before the first question"
# Columns that may hold texts, and become messages of these roles.
ROLES = {"prompt": "user", "completion": "assistant"}
ROWS_IN_MEMORY = 100  # rows whose images are in memory together
IMAGES = {
    "images": datasets.List({"path": TEXT, "bytes": datasets.Value("binary")}), "row": datasets.Value("int64"),
    "notes": datasets.List(TEXT),
}  # fmt: skip
UNREAD = ("videos", "video", "audios", "audio")  # columns, as LLaMA-Factory names them
UNUSED = {*OF_IMAGES, *IMAGES}  # columns that the texts of a row do not have


def texts_and_images(rows: datasets.Dataset, args: Any, side: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Divide rows into all their texts, with SEEN in the place of an image, and their `images`, each with its `row`.

    Raises:
        ConfigError: if they lack the column of images that --columns names.
    """
    if column := args.mapping.get("images"):
        if column not in (names := rows.column_names):
            raise ConfigError(
                f"{args.origins[side]} has no column {column!r}, which --columns names; there are {', '.join(names)}"
                + suggestion(column, names)
            )
        others = [name for name in COLUMNS if name in names and name != column]
        rows = rows.remove_columns(others).rename_columns({column: "images"})
    features = datasets.Features({name: undecoded(feature) for name, feature in rows.features.items()})
    forms = {args.mapping.get(name, name): name for form in args.forms for name in (*form.needs, *form.takes)}
    columns = {name: forms[name] for name in features if name in forms and features[name] != datasets.Value("null")}
    kinds = {name: kind_of_texts(features[name], form) for name, form in columns.items()}
    others = {name: feature for name, feature in features.items() if name not in UNUSED}
    given = {"features": features, "said": columns, "kinds": kinds, "source": args.origins[side]}
    make, made = partial(divided, **given, folders=args.folders(side)), datasets.Features(others | kinds | IMAGES)
    how = {"num_proc": args.dataset_num_proc, "desc": "Reading rows", "batch": ROWS_IN_MEMORY}
    prepared = map_rows(rows, make, made, code=(sys.modules[__name__],), **how)
    having: dict[str, list[int]] = defaultdict(list)  # rows of which the same was made
    for number, some in enumerate(prepared["notes"], 1):
        for note in {*some}:
            having[note].append(number)
    for note, numbers in having.items():
        print_first(f"{args.origins[side]}: {note}, in {len(numbers):,} rows; the first is row {numbers[0]}")
    return prepared.remove_columns([*IMAGES]), prepared.select_columns(["images", "row"])


def undecoded(feature: Any) -> Any:
    """Return the type of a column, in which images stay files; sounds and videos, for which packages may lack, too."""
    if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
        return dataclasses.replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: undecoded(value) for name, value in feature.items()}
    return datasets.List(undecoded(feature.feature)) if isinstance(feature, datasets.List) else feature


def kind_of_texts(feature: Any, form: str) -> Any:
    """Return the type that a column gets which is `form` in a form of rows: one for messages, or for a text."""
    if form in (*LISTS, *ROLES) or isinstance(feature, datasets.List):
        return ANY
    return TEXT if feature in TEXTS else datasets.Json()


def divided(
    table: pa.Table,
    first: int,
    features: datasets.Features,
    said: dict[str, str],
    kinds: dict[str, Any],
    folders: list[tuple[int, str]],
    source: str,
) -> pa.Table:
    """Divide rows: return their columns without images, those of texts with SEEN where an image stands, and IMAGES."""
    made: dict[str, list] = {name: [] for name in (*said, *IMAGES)}
    for number, row in enumerate(rows_in(table, features), first):
        folder = folders[bisect.bisect_right(folders, number, key=lambda entry: entry[0]) - 1][1]
        try:
            if unread := [name for name in UNREAD if row.get(name)]:
                raise ValueError(
                    f"it has {unread[0]} ({row[unread[0]]!r:.60}), and images alone are read; remove the row"
                )
            row |= {column: as_written(row[column], features[column]) for column in said}
            values, images, notes = divided_row(row, said)
            for column, value in values.items():
                made[column].append(value)
            made["images"].append([file_of(image, folder) for image in images])
            made["notes"].append(notes)
        except ValueError as error:
            raise DataError(f"{source}, row {number + 1}: {error}") from None
        made["row"].append(number + 1)
    kept = [name for name in table.column_names if name not in UNUSED]
    written: Any = datasets.Dataset.from_dict(made, features=datasets.Features(kinds | IMAGES)).data.table
    made_columns = dict(zip(written.column_names, written.columns, strict=True))
    return pa.table({name: table.column(name) for name in kept} | made_columns)


def divided_row(row: dict, said: dict[str, str]) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Divide a row into the values of its columns of texts, with SEEN where an image stands, its images, and notes on it."""
    there = {name: form for name, form in said.items() if row[name] is not None}
    values: dict[str, Any] = {name: messages_or_text(row, name, form) for name, form in there.items()}
    is_literal = any(map(has_images, values.values()))  # <image>: parts say where images stand

    def with_marks() -> tuple[dict[str, Any], list[Any], list[str]]:
        named: list[Any] = []
        notes: list[str] = []
        return {name: mark_places(value, named, notes, is_literal) for name, value in values.items()}, named, notes

    marked, named, notes = with_marks()
    images = images_of(row, named)
    if images and not named:
        column = next((name for form in ASKING for name in values if said[name] == form and values[name]), "")
        if column and (first := with_images_first(values[column], PLACE * len(images))) is not None:
            values[column] = first
            marked, _, notes = with_marks()
            notes.append(UNPLACED)
    return dict.fromkeys(said) | marked, images, notes


def has_images(value: Any) -> bool:
    """Tell whether messages have parts that are images."""
    if isinstance(value, list):
        return any(map(has_images, value))
    if not isinstance(value, dict):
        return False
    return value.get("type") in OF_IMAGE or has_images(value.get("content") or value.get("value"))


def with_images_first(value: Any, places: str) -> Any:
    """Return a question, a history or messages with `places` before the first text of the user, as trl puts them.

    Returns None if that is no text, but a list of parts.
    """
    if isinstance(value, str):
        return places + value
    entries: list[Any] = value if isinstance(value, list) else []
    for number, entry in enumerate(entries):
        is_turn = isinstance(entry, list)  # of a history: a question with its answer
        if is_turn or (
            isinstance(entry, dict) and OF_MESSAGES.get(str(entry.get("role", entry.get("from")))) == "user"
        ):
            key: Any = 0 if is_turn else "content" if "content" in entry else "value"
            text, changed = next(iter(entry), None) if is_turn else entry.get(key), entry.copy()
            if not isinstance(text, str):
                return None
            changed[key] = places + text
            return [*entries[:number], changed, *entries[number + 1 :]]
    return None


def messages_or_text(row: dict, column: str, form: str) -> Any:
    """Return the value of a column; messages also for the text of a prompt or a completion, and from a JSON text."""
    value = row[column]
    if isinstance(value, str) and (form in LISTS or (form in EITHER and WRITTEN.match(value))):
        value = from_json(row, column)
    if isinstance(value, str) and form in ROLES:
        return [{"role": ROLES[form], "content": value}]
    if isinstance(value, dict):
        return [value] if form in (*LISTS, *ROLES) else value
    if not isinstance(value, str | list):
        raise ValueError(f"{column!r} is {value!r:.60}; it must be a text or messages")
    return value


def mark_places(value: Any, named: list[Any], notes: list[str], is_literal: bool) -> Any:
    """Return a text, a message or a list of these with SEEN where an image stands: at PLACE, if that is not literal.

    `named` gets the image that a part names, or None, for each of these places, and `notes` what is not read of a part.
    """
    if isinstance(value, str):
        if SEEN in value:
            raise ValueError(f"a text holds \\u{ord(SEEN):x}, a character for private use; remove it: {value!r:.60}")
        if is_literal:
            return value
        named += [None] * value.count(PLACE)
        return value.replace(PLACE, SEEN)
    if isinstance(value, list):
        return [mark_places(entry, named, notes, is_literal) for entry in value]
    if not isinstance(value, dict):
        return value
    content = next((name for name in ("content", "value") if value.get(name) is not None), None)
    if content is None:
        return value
    parts = value[content] if isinstance(value[content], list) else [value[content]]
    texts = [marked_part(part, named, notes, is_literal) for part in parts]
    return value | {content: "".join(texts) if all(isinstance(text, str) for text in texts) else texts}


def marked_part(part: Any, named: list[Any], notes: list[str], is_literal: bool) -> Any:
    if not isinstance(part, dict):
        return mark_places(part, named, notes, is_literal)
    kind = part.get("type", "text")
    if kind in OF_TEXT and isinstance(part.get("text"), str):
        return mark_places(part["text"], named, notes, is_literal)
    if kind not in OF_IMAGE:
        raise ValueError(f"a message has a part that is no text and no image, {part!r:.60}; remove the row")
    if (index := part.get("index")) not in (None, len(named)):
        raise ValueError(
            f"the image of index {index} stands at place {len(named)}; put images in the order of their places"
        )
    name = next((name for name in NAMES if part.get(name)), "")
    image, unread = part.get(name), {field: part[field] for field in part.keys() - {"type", "text", "index", *NAMES}}
    if isinstance(image, dict) and "url" in image:
        unread |= {field: image[field] for field in image.keys() - {"url"}}
        image = image["url"]
    if name == "base64" and isinstance(image, str):
        image = image if URL.match(image) else f"data:;base64,{image}"
    notes += [
        f"the field {field!r} of an image is not read (--image_max_pixels bounds all)"
        for field, value in sorted(unread.items())
        if value not in (None, "auto")
    ]
    named.append(image)
    return SEEN


def images_of(row: dict, named: list[Any]) -> list[Any]:
    """Return the images of a row: those of its column, or those that parts of its messages name."""
    given = [name for name in COLUMNS if row.get(name)]
    if len(given) > 1:
        raise ValueError("it has images in both columns, images and image; remove one")
    value = row[given[0]] if given else []
    if isinstance(value, str) and LIST.match(value):  # a cell of a CSV file
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"its images are {value!r:.60}, which is no list in JSON") from None
    in_column = value if isinstance(value, list) else [value]
    inside = [image for image in named if image is not None]
    if inside and (in_column or len(inside) < len(named)):
        raise ValueError(
            f"{len(inside)} of {len(named)} places name their image, and the column of images holds {len(in_column)}; name "
            "all of them in one way"
        )
    return inside or in_column


def file_of(image: Any, folder: str) -> dict[str, Any]:
    """Return an image as IMAGES holds it, with its absolute path."""
    given = image if isinstance(image, dict) else {"bytes" if isinstance(image, bytes) else "path": image}
    path, content = given.get("path"), given.get("bytes")
    if isinstance(content, bytes):
        return {"path": path, "bytes": content}
    if content is not None or not path or not isinstance(path, str):
        raise ValueError(f"an image is {image!r:.60}; give the path of a file, or bytes")
    if path[:5].lower() == "data:":
        head, _, payload = path.partition(",")
        try:
            content = unquote_to_bytes(payload)
            return {"path": None, "bytes": base64.b64decode(content) if head.lower().endswith(";base64") else content}
        except ValueError as error:
            raise ValueError(f"an image is {path!r:.60}, which is not base64: {error}") from None
    if path[:7].lower() == "file://":
        path = unquote(re.sub("^localhost(?=/)", "", path[7:]))
    if not URL.match(path) and not os.path.isabs(path):
        if not folder:
            raise ValueError(f"the path of the image {path} does not say where it begins; give --image_folder")
        path = os.path.join(folder, path)
    return {"path": path, "bytes": None}
