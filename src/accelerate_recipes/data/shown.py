"""First rows of a run, as a reader sees them: which tokens are read, which are targets, and where documents begin."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.prepared import chunks_of
from accelerate_recipes.disk import write_atomically
from accelerate_recipes.errors import ConfigError, printable
from accelerate_recipes.life.page import Html, element, picture, write_page
from accelerate_recipes.life.picture import draw_images
from accelerate_recipes.models import IGNORE_INDEX

MAX_TOKENS = 2000  # number of tokens shown of a row
MOST_REPEATED = 3  # times that a special token is shown again
NUM_ASKED = 1000  # number of rows that are looked at, of rows that are made when they are needed
OF_TOKENS = {"input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "source_ids", "target_ids"}
CONTEXT = 8  # earlier tokens that are decoded with a token: they decide about a space, or complete a character


class HasRows(Protocol):
    """Source of batches that can show its first rows."""

    def first_batch(self) -> dict[str, Any]: ...


def titled(title: str, name: str) -> str:
    """Return a title with the name of a source, if it has one."""
    return f"{title}, {name}" if name else title


class Token(NamedTuple):
    """One token of a row. `text` is its part of the row's text."""

    id: int
    text: str
    is_target: bool
    is_special: bool
    begins_document: bool

    @property
    def kinds(self) -> list[str]:
        """Return the classes of the token on a page."""
        return [name for name, on in (("target", self.is_target), ("special", self.is_special)) if on]


class ShownRow(NamedTuple):
    """One row as it is trained. `title` names it; `num_padding` tokens at its end are left out.

    `images` has small images, as the content of PNG files, by the number of the first token that stands for each.
    """

    title: str
    tokens: list[Token]
    num_padding: int
    images: Mapping[int, bytes] = MappingProxyType({})

    @property
    def num_targets(self) -> int:
        return sum(token.is_target for token in self.tokens)

    @property
    def has_label(self) -> bool:
        """Tell whether the target is no token, but a label in the title."""
        return ", label" in self.title

    @property
    def summary(self) -> str:
        num_documents = sum(token.begins_document for token in self.tokens)
        parts = [f"{len(self.tokens):,} tokens"]
        parts += [] if self.has_label else [f"{self.num_targets:,} targets"]
        parts += [f"{num_documents} documents"] if num_documents > 1 else []
        parts += [f"{self.num_padding:,} of padding left out"] if self.num_padding else []
        return f"{self.title}: {', '.join(parts)}"


def first_rows(
    folder: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    loaders: dict[str, HasRows],
    num_targets: np.ndarray | int | None,
    counts: dict[str, int],
    classes: Sequence[str],
) -> tuple[str, str]:
    """Write the first rows of each loader into a folder, if one is given. Return a line of counts, and rows for a terminal.

    Raises:
        ConfigError: if no row has a target.
    """
    parts = [(name, rows_of(loader.first_batch(), tokenizer, classes)) for name, loader in loaders.items()]
    counted, which = "", "the first"
    if num_targets is not None:
        counted = f"Rows to train on: {count_line(num_targets, counts)}"
    elif first := [row.num_targets for name, rows in parts if name.startswith("Training") for row in rows]:
        # Streams: nobody has counted their rows.
        counted, which = f"The first rows to train on: {count_line(np.array(first), {})}", "they"
    if folder:
        write_rows(folder, parts, counted)
        counted += f"; {which} are in {folder / 'rows.txt'}" if counted else ""
    if isinstance(num_targets, np.ndarray) and not num_targets.any():
        raise ConfigError(
            f"none of the {len(num_targets):,} rows to train on has a target of the loss; see rows.txt, and check the "
            "chat template, --assistant_only_loss, --completion_only_loss and --max_length"
        )
    return counted, as_text(parts)


def tokens_of(loader: Any) -> Iterator[tuple[str, Iterable[tuple[np.ndarray, np.ndarray]]]]:
    """Yield each kind of tokens of a loader's rows, as "target", with their lengths and the joined tokens, part by part.

    These are all rows if they are prepared, else the first, of a stream very few.
    """
    rows: Any = getattr(getattr(loader, "dataset", loader), "rows", None)
    names = [name for name in getattr(rows, "column_names", ()) if name in OF_TOKENS]
    for name in names:
        yield name.removesuffix("_ids"), rows.chunks(name) if hasattr(rows, "chunks") else chunks_of(rows, name)
    if not names:
        batch = loader.first_batch(NUM_ASKED) if hasattr(loader, "dataset") else loader.first_batch()
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        ids = [row[mask].numpy() for row, mask in zip(batch["input_ids"], masks, strict=True)]
        yield "input", [(np.array([*map(len, ids)]), np.concatenate(ids))]


def unknown_lines(tokenizer: PreTrainedTokenizerBase, loaders: dict[str, HasRows]) -> list[str]:
    """Say how many tokens stand for what the tokenizer has no tokens for, and show the first of each loader."""
    unknown, lines = tokenizer.unk_token_id, []
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return []  # a tokenizer that writes all characters may name another token so
    for heading, loader in loaders.items():
        for kind, parts in tokens_of(loader):
            numbers, first = np.zeros(4, int), ""
            for lengths, ids in parts:
                (positions,), ends = (ids == unknown).nonzero(), lengths.cumsum()
                rows = ends.searchsorted(positions, "right")
                if len(positions) and not first:
                    position, row = positions[0], rows[0]
                    part = ids[max(position - CONTEXT, ends[row] - lengths[row]) : min(position + CONTEXT, ends[row])]
                    first = f"row {numbers[3] + row + 1}: {tokenizer.decode(part)!r}"
                numbers += len(positions), len(ids), len({*rows.tolist()}), len(lengths)
            if first:
                count, tokens, having, rows = (f"{number:,}" for number in numbers)
                kind = "tokens" if kind == "input" else f"{kind} tokens"
                lines.append(
                    f"{heading}: {count} of {tokens} {kind}, in {having} of {rows} rows, are {tokenizer.unk_token!r}, what "
                    f"the tokenizer has no tokens for, and the model cannot tell apart; the first is in {first}"
                )
    return lines


def draw_first_images(file: Path, loaders: dict[str, HasRows], names: Sequence[str], processor: Any) -> None:
    """Draw the first images of each loader. `names` are the names of the classes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn = []
    mean, std = (torch.tensor(values) for values in (processor.image_mean, processor.image_std))
    for part, loader in loaders.items():
        batch = loader.first_batch()
        pixels = (batch["pixel_values"].movedim(1, -1) * std + mean).clamp(0, 1).numpy()
        texts = [f"{part}\n{names[label] if label >= 0 else 'broken'}" for label in batch["labels"].tolist()]
        drawn += [(image, text, True) for image, text in zip(pixels, texts, strict=True)]
    draw_images(file, drawn, "Images as they are trained")


def rows_of(batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, classes: Sequence[str] = ()) -> list[ShownRow]:
    """Divide a batch into the rows that the model reads.

    `batch` holds `input_ids`, (B, T), and one of these, which tells the targets:

    - `labels`: (B, T) for a causal model, (B, S) for an encoder-decoder; for classes (B,), for several of C classes (B, C)
      of floats; if `classes` names them, (B, T) for classes of tokens;
    - `completion_mask`, (B, T), of trl's pairs, where the second half of the rows are the rejected answers.

    Without these, nothing is a target, as in prompts. `images` are those of `ShownRow`, for each row.
    """
    ids, labels = batch["input_ids"].tolist(), batch.get("labels")
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).tolist()
    begins = batch["position_ids"].eq(0).tolist() if "position_ids" in batch else [[]] * len(ids)
    rows = []
    for i, tokens in enumerate(ids):
        title, wanted, targets = f"row {i + 1}", [], []
        label = None if labels is None else labels[i].tolist()
        if "completion_mask" in batch:
            half = len(ids) // 2
            title = f"row {i % half + 1}, {'chosen' if i < half else 'rejected'}"
            wanted = batch["completion_mask"][i].tolist()
        elif isinstance(label, int):
            title += f", label {visible(classes[label]) if classes and label >= 0 else label}"
        elif label is not None and labels.is_floating_point():  # several classes of a row
            held = [visible(name) for name, is_held in zip(classes, label, strict=False) if is_held]
            title += f", labels {', '.join(held) if classes else label}"
        elif label is not None and classes:
            wanted = ["" if number == IGNORE_INDEX else f"/{classes[number]}" for number in label]
        elif label is not None and is_causal(batch):
            # A causal model predicts a token from those before it: the first token of a row is no target.
            wanted = [t > 0 and number != IGNORE_INDEX for t, number in enumerate(label)]
        elif label is not None:
            targets = [token for token in label if token != IGNORE_INDEX]
            title += ", to read"
        images = batch["images"][i] if "images" in batch else {}
        rows.append(show_row(title, tokens, wanted, begins[i], mask[i], tokenizer, images))
        if targets:
            ones = [1] * len(targets)
            rows.append(show_row(title.replace("read", "write"), targets, ones, [], ones, tokenizer))
    return rows


def is_causal(batch: dict[str, Any]) -> bool:
    """Tell whether the labels of a batch are its own tokens, each at its place, and not a separate sequence."""
    ids, labels = batch["input_ids"], batch["labels"]
    return ids.shape == labels.shape and bool(((labels == ids) | (labels == IGNORE_INDEX)).all())


def show_row(
    title: str,
    ids: list[int],
    wanted: Sequence[Any],
    starts: Sequence[bool],
    mask: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    images: Mapping[int, bytes] = MappingProxyType({}),
) -> ShownRow:
    """Make a row of tokens, without the padding at its end. In a packed row, which has `starts`, token 0 may be padding too.

    A token is a target if its entry of `wanted` is true. If this is a text, the token's class, it stands behind the token.
    """
    wanted, starts = wanted or [False] * len(ids), starts or [False] * len(ids)
    length, padding = len(ids), [tokenizer.pad_token_id, *([0] if any(starts) else [])]
    while length and not wanted[length - 1] and (not mask[length - 1] or ids[length - 1] in padding):
        length -= 1
    # Special tokens have a role, such as the end, or are marks of the chat template.
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special |= {*tokenizer.all_special_ids}
    shown = min(length, MAX_TOKENS)
    tokens = [
        Token(token, text + (target if isinstance(target, str) else ""), bool(target), token in special, begins)
        for token, text, target, begins in zip(ids, spelt(ids[:shown], tokenizer), wanted, starts, strict=False)
    ]
    title += f" (the first {shown:,} of {length:,} tokens)" if shown < length else ""
    return ShownRow(title, tokens, len(ids) - length, images)


def spelt(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield each token's part of the text; for a token that is only a part of a character, its name in the vocabulary."""
    for t, token in enumerate(ids):
        before = str(tokenizer.decode(ids[max(0, t - CONTEXT) : t], skip_special_tokens=False))
        text = str(tokenizer.decode(ids[max(0, t - CONTEXT) : t + 1], skip_special_tokens=False))
        is_whole = text.startswith(before) and "\N{REPLACEMENT CHARACTER}" not in text[len(before) :]
        yield text[len(before) :] if is_whole else str(tokenizer.convert_ids_to_tokens(token))


def as_text(parts: Iterable[tuple[str, list[ShownRow]]]) -> str:
    """Write rows as lines: `read` or `target`, then tokens, divided by bars. A new line begins where the kind changes."""
    lines = []
    for heading, rows in parts:
        lines.append(heading)
        for row in rows:
            lines += ["", f"  {row.summary}"]
            for number, document in enumerate(split_documents(row.tokens)):
                lines += [f"  ------ | document {number + 1} begins"] if number else []
                for is_target, tokens in groupby(document, lambda token: token.is_target):
                    texts = "|".join(
                        visible(token.text) + times_said(number) for token, number in runs_of_tokens(tokens)
                    )
                    lines.append(f"  {'target' if is_target else 'read  '} | {texts}")
        lines.append("")
    return "\n".join(lines)


def as_html(parts: Sequence[tuple[str, list[ShownRow]]], counted: str) -> list[Html]:
    """Write rows as parts of a page. The number of a token appears under the pointer."""
    every = [row for _, rows in parts for row in rows]
    kinds = {kind for row in every for token in row.tokens for kind in token.kinds}
    legend = [
        "Tokens in ",
        element("span", "green", class_="target"),
        " are targets of the loss, the others are only read. ",
    ]
    if "target" not in kinds:
        legend = ["No token is a target of the loss: all are only read. "]
        if any(row.has_label for row in every):
            legend.append("The target of a row is the label in its heading. ")
    legend += [element("span", "Framed", class_="special"), " tokens are special. "] if "special" in kinds else []
    if any(len(split_documents(row.tokens)) > 1 for row in every):
        legend.append("A dashed line: another document begins.")
    body = [element("p", *legend, class_="row"), element("p", counted)]
    for heading, rows in parts:
        body.append(element("h1", heading))
        for row in rows:
            shown, position = [], 0
            for number, document in enumerate(split_documents(row.tokens)):
                shown += [Html("<hr>")] if number else []
                for token, count in runs_of_tokens(document):
                    images = [row.images[i] for i in range(position, position + count) if i in row.images]
                    shown += [picture(image, "image") for image in images]
                    text = token.text.replace("\n", "↵\n") + times_said(count)
                    shown.append(element("span", text, class_=" ".join(token.kinds), title=token.id))
                    position += count
            body += [element("h2", row.summary), element("div", *shown, class_="row")]
    return body


def split_documents(tokens: list[Token]) -> list[list[Token]]:
    """Split the tokens of a row where documents begin."""
    starts = [0, *(t for t, token in enumerate(tokens) if token.begins_document and t), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(starts) if end > start]


def runs_of_tokens(tokens: Iterable[Token]) -> Iterator[tuple[Token, int]]:
    """Yield tokens with their numbers: those that stand for an image are hundreds of one special token."""
    for _, some in groupby(tokens, lambda token: (token.id, token.is_special, token.is_target)):
        first, *others = some
        if first.is_special and len(others) >= MOST_REPEATED:
            yield first, 1 + len(others)
        else:
            yield from ((token, 1) for token in (first, *others))


def times_said(number: int) -> str:
    return f" x {number}" if number > 1 else ""


def visible(text: str) -> str:
    """Return a text in one line, in which white space and control characters are visible."""
    return printable(text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t"))


def count_line(num_targets: np.ndarray | int, counts: dict[str, int]) -> str:
    """Write in one line the number of rows, of their targets, and the other `counts`.

    `num_targets` holds the number of targets of each row; if answers are drawn in training, it is only the number of
    rows.
    """
    others = [f"{name} {number:,}" for name, number in counts.items()]
    if isinstance(num_targets, int):
        return "; ".join([f"{num_targets:,} rows", *others])
    parts = [f"{len(num_targets):,} rows", f"{(num_targets == 0).sum():,} without a target"]
    mean = f"targets a row: mean {num_targets.mean():,.1f}, most {num_targets.max():,}"
    return "; ".join([*parts, *others, mean])


def write_rows(folder: Path, parts: Sequence[tuple[str, list[ShownRow]]], counted: str) -> None:
    """Write `rows.txt` and `rows.html` into a folder: a line of counts, if any, then `parts`, headings with their rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "rows.txt", (f"{counted}\n\n" if counted else "") + as_text(parts))
    write_page(folder / "rows.html", "Rows as they are trained", as_html(parts, counted))
