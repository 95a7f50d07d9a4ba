"""Rows with images as tokens: rendered by the chat template, with the text that stands for each image in its place.

What stands for an image follows from its size, so that no image is read here.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.rendering import Part, answers_in, answers_written, has_marks, ranges_in
from accelerate_recipes.data.passes import rows_in
from accelerate_recipes.data.template_values import settings_of
from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.models import IGNORE_INDEX

Size = tuple[int, int]  # width and height
Key = tuple[int, int, bool]  # of what stands for an image: width, height, and whether it is among others
NUMBERS = datasets.List(datasets.Value("int32"))
DOCUMENTS = datasets.Features({
    "input_ids": NUMBERS,
    "labels": datasets.List(datasets.Value("int64")),
    "of_row": datasets.Value("int64"),
    "opened": datasets.Value("string"),
    "image_begins": NUMBERS,
    "image_ends": NUMBERS,
    "checksums": datasets.List(datasets.Value("string")),
    "differs_alone": datasets.Value("bool"),
})  # fmt: skip


class ImageTexts(NamedTuple):
    """Texts that stand for an image: `mark` in a template, one of `texts` after it, which is compressed by zlib."""

    mark: str
    texts: dict[Key, bytes]  # 18 KB, most of it one word, are 80 bytes

    def of(self, sizes: Sequence[Size]) -> list[str]:
        """Return the text of each image of a document."""
        return [zlib.decompress(self.texts[*size, len(sizes) > 1]).decode() for size in sizes]

    def differ_alone(self, sizes: Sequence[Size]) -> bool:
        """Tell whether the first of several images has other tokens if it is alone, as LLaVA-OneVision's has."""
        return len(sizes) > 1 and self.of(sizes[:1]) != self.of(sizes)[:1]


class Document(NamedTuple):
    """Tokens of a text, and which are targets. `images` has for each image its first token, and the first behind it."""

    ids: list[int]
    targets: list[bool]
    opened: str
    images: list[list[int]]


def render_documents(
    row: dict, tokenizer: PreTrainedTokenizerBase, texts: ImageTexts, *, assistant_only: bool, stops: Sequence[int] = ()
) -> list[Document]:
    """Render a row with `messages` of parts, and `widths` and `heights` of images, as documents: see `rendering.parts_of`.

    Tokens of an image are no targets. A row without an answer to train gives no document.

    Raises:
        ValueError: for a tokenizer that does not say where its tokens stand, and for a chat template that does not write
            all images, or marks no answer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say where its tokens stand in a text")
    row = row | {"messages": messages_read(row, tokenizer, assistant_only)}
    number = sum(part["type"] == "image" for message in row["messages"] for part in parts_in(message))
    sizes: list[Size] = [*zip(row["widths"], row["heights"], strict=True)][:number]
    settings, answers = settings_of(row), answers_in(row, completion_only=False)
    if not assistant_only:
        text: Any = tokenizer.apply_chat_template(row["messages"], tokenize=False, **settings)
        parts = [Part(text, [(0, len(text))])]
    else:
        parts = answers_written(tokenizer, [row["messages"]], [answers], settings, stops)[0] if answers else []
    if parts and (written := parts[-1].text.count(texts.mark)) != len(sizes):  # the last one is the whole conversation
        raise ValueError(
            f"the chat template writes {written} places for images ({texts.mark}), and the row has {len(sizes)} images"
        )
    return [document_of(part, tokenizer, sizes, texts) for part in parts]


def parts_in(message: dict) -> list[dict]:
    """Return the parts of a message; none, if its content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def messages_read(row: dict, tokenizer: PreTrainedTokenizerBase, assistant_only: bool) -> list[dict]:
    """Return the messages that the documents of a row hold: up to the last answer, if the template does not mark answers."""
    if not assistant_only or has_marks(tokenizer, settings_of(row)):
        return row["messages"]
    return row["messages"][: max(answers_in(row, completion_only=False), default=-1) + 1]


def document_of(part: Part, tokenizer: PreTrainedTokenizerBase, sizes: Sequence[Size], texts: ImageTexts) -> Document:
    """Tokenise a text, in which the first of the images have their places."""
    part, images = expanded(part, sizes, texts)
    before, behind = added_around(part.text, tokenizer)
    encoded = tokenizer(part.text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    (encoding,) = encoded.encodings  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    ids: list[int] = encoded["input_ids"]  # pyright: ignore[reportAssignmentType]
    targets, spans = part.targets(encoding), ranges_in(images, encoding)
    for first, last in spans:
        targets[first:last] = [False] * (last - first)
    targets = [False] * len(before) + targets + [False] * len(behind)
    spans = [[len(before) + border for border in span] for span in spans]
    return Document(before + ids + behind, targets, part.opened, spans)


def added_around(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a processor adds before a rendered text and behind it, as its `apply_chat_template` does."""
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return [], []
    read: Any = tokenizer("a", return_special_tokens_mask=True)
    is_added = read["special_tokens_mask"]
    first, last = is_added.index(0), len(is_added) - is_added[::-1].index(0)
    return read["input_ids"][:first], read["input_ids"][last:]


Places = list[tuple[int, int]]  # begin and end in a text


def expanded(part: Part, sizes: Sequence[Size], texts: ImageTexts) -> tuple[Part, Places]:
    """Put the text of each image at its mark. Returns the part with it, and the places of the images."""
    first, *pieces = part.text.split(texts.mark)
    written = texts.of(sizes[: len(pieces)])
    text, images = first, []
    for image, piece in zip(written, pieces, strict=True):
        images.append((len(text), len(text) + len(image)))
        text += image + piece
    marks = np.cumsum([len(piece) + len(texts.mark) for piece in (first, *pieces[:-1])] if pieces else [])  # their ends
    grown = np.cumsum([0, *(len(image) - len(texts.mark) for image in written)])
    answers = [
        tuple(int(offset + grown[marks.searchsorted(offset, "right")]) for offset in answer) for answer in part.answers
    ]
    return part._replace(text=text, answers=answers), images


def rendered_documents(
    table: pa.Table,
    first: int,
    tokenizer: PreTrainedTokenizerBase,
    date: str,
    texts: ImageTexts,
    source: str,
    **settings: Any,
) -> pa.Table:
    """Render rows of `source` as documents with the columns DOCUMENTS. `first` is the number of the first row.

    Raises:
        ConfigError: for a row that cannot be rendered.
    """
    records = []
    for number, row in enumerate(rows_in(table), first):
        sizes = [*zip(row["widths"], row["heights"], strict=True)]
        try:
            with frozen_date(date):
                documents = render_documents(row, tokenizer, texts, **settings)
        except Exception as error:  # templates raise any
            raise ConfigError(f"{source}, row {row['row']}, cannot be rendered: {one_line(error)}") from error
        for ids, targets, opened, images in documents:
            labels = [token if is_target else IGNORE_INDEX for token, is_target in zip(ids, targets, strict=True)]
            begins, ends = ([image[i] for image in images] for i in (0, 1))
            checksums = row["checksums"][: len(images)]
            differs = texts.differ_alone(sizes[: len(images)])
            columns = (ids, labels, number, opened, begins, ends, checksums, differs)
            records.append(dict(zip(DOCUMENTS, columns, strict=True)))
    return pa.Table.from_pylist(records, schema=DOCUMENTS.arrow_schema)


def cut_documents(table: pa.Table, first: int, longest: int) -> pa.Table:
    """Cut documents of more than `longest` tokens behind their last target, with the images before it."""
    documents = [cut_document(document, longest) for document in table.to_pylist()]
    return pa.Table.from_pylist([*filter(None, documents)], schema=table.schema)


def cut_document(document: dict, longest: int) -> dict | None:
    """Cut a document. Returns None if no target is left, and if the image that is left of several has other tokens alone."""
    labels, kept = document["labels"], len(document["labels"])
    if kept > longest:  # tokens of an image are no targets, so images stay whole
        kept = max((position for position in range(longest) if labels[position] != IGNORE_INDEX), default=-1) + 1
    number = sum(end <= kept for end in document["image_ends"])
    is_other = number == 1 < len(document["image_ends"]) and document["differs_alone"]
    if is_other or all(label == IGNORE_INDEX for label in labels[1:kept]):  # the first token is no target
        return None
    parts = {"input_ids": kept, "labels": kept, "image_begins": number, "image_ends": number, "checksums": number}
    return document | {name: document[name][:length] for name, length in parts.items()}
