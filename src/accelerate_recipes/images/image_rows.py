"""Rows with images to train and to evaluate on: conversations whose contents are parts, and their images, measured."""

import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from accelerate_recipes.args import arg
from accelerate_recipes.conversations import rendering
from accelerate_recipes.conversations.chats import check_written, texts_in, without_controls
from accelerate_recipes.conversations.exported import NUM_COMPARED
from accelerate_recipes.conversations.formats import SFT, Form, FormatArgs, in_usual_form
from accelerate_recipes.conversations.messages import ANY, TEXT, has_unweighted, missing_answers, without_added_nulls
from accelerate_recipes.conversations.rendering import MARK, unless_refused
from accelerate_recipes.data.files import check_texts_or_messages, read_files
from accelerate_recipes.data.heldout import beginning, in_folders
from accelerate_recipes.data.passes import map_rows, rows_in
from accelerate_recipes.data.template_values import SETTINGS, in_texts, settings_of
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images import pictures
from accelerate_recipes.images.image_places import PLACE, ROWS_IN_MEMORY, SEEN, texts_and_images
from accelerate_recipes.images.pictures import decoded, image_bytes, marks_of, upright_size
from accelerate_recipes.ranks import is_first, print_first

IMAGE = {"type": "image"}
NUMBERS = datasets.List(datasets.Value("int32"))
MEASURES = {"widths": NUMBERS, "heights": NUMBERS, "checksums": datasets.List(TEXT), "broken": TEXT}
ASKED = "asked"  # column with what decides on which side a row lies
PRINTED = re.compile(rf"""['"]text['"]: ['"]{MARK}""")  # a part, where a template writes a content as it stands
PARTED = datasets.Features({"messages": ANY, ASKED: TEXT})


@dataclass
class ImageRowArgs(FormatArgs):
    """Arguments of a recipe that reads conversations with images. Put it before TrainArgs in the bases of its arguments."""

    group = "data"
    image_folder: str = arg(
        "", "Folder in which the paths of images begin; default: that of the file with the row.", fixed=False
    )
    skip_broken_images: bool = arg(
        False,
        "Leave out rows with an image that cannot be decoded, instead of ending with an error: each is decoded beforehand.",
    )

    beside_forms = (*SETTINGS, "images")

    @property
    def forms(self) -> Sequence[Form]:
        return SFT

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size)
        folder = Path(self.image_folder)
        if not folder.is_dir() and not self.is_elsewhere(folder / "any"):
            problems.append(f"--image_folder {self.image_folder} is no folder here; give one, or put it there")
        return problems

    def folders(self, side: str) -> list[tuple[int, str]]:
        """Return the folders in which the paths of images of a side begin, each with the number of its first row, from 0.

        A folder is empty if the rows lie in no folder.
        """
        files = in_folders(self.train_files if side == "train" else self.eval_files)
        if self.image_folder or not files:
            folder = self.image_folder or (self.dataset_name if Path(self.dataset_name).is_dir() else "")
            return [(0, folder and os.path.abspath(folder))]
        folders = [os.path.dirname(os.path.abspath(file)) for file in files]
        if len({*folders}) == 1:
            return [(0, folders[0])]
        sizes = [len(read_files([file])) for file in files[:-1]]
        return [*zip(itertools.accumulate(sizes, initial=0), folders, strict=True)]


def load_image_sides(
    args: Any, processor: ProcessorMixin, stops: set[int]
) -> tuple[dict[str, datasets.Dataset], list[dict]]:
    """Load the rows to train on and to evaluate on, as `train` and `test`; also return the first training rows.

    A row has `messages`, in which each content is a list of parts, {"type": "text", "text": ...} or {"type": "image"};
    `images`, as many as such parts, {"path": absolute path or None, "bytes": bytes or None}; their `widths`, `heights` and
    `checksums`; its number in the files, from 1, as `row`; and those of the SETTINGS that there are. The first rows have
    `messages` and `images`, and all else as it was written.

    `args` are ImageRowArgs with trl's arguments of SFT; `stops` are the tokens at which generation stops.

    Raises:
        DataError: for files and images that cannot be read, for rows that hold no messages, for a text that the processor
            would read as an image, and for a row with more places than images, or fewer.
        ConfigError: for rows without any image, for arguments that do not fit the rows, and if a side is empty.
    """
    if not processor.tokenizer.chat_template:
        raise ConfigError(
            f"{args.base_model} has no chat template, which says where an image stands; give --chat_template_path"
        )
    read, written, columns, num_images = {}, {}, {}, 0
    for side, rows in args.read_rows().items():
        source = args.origins[side]
        texts, images = texts_and_images(rows, args, side)
        written[side], columns[side] = usual_texts(texts, args, source)
        kept = without_controls(written[side], columns[side], processor.tokenizer, stops, source, args.control_tokens)
        checked = checked_texts(kept, columns[side], args, source)
        if len(kept) < len(images):
            images = images.select(np.asarray(kept["row"][:]) - 1).flatten_indices()
        # It is done again once a file has another size or time.
        make = partial(measure, source=source, files=files_version(images), skips=args.skip_broken_images)
        how = {"num_proc": args.dataset_num_proc, "desc": "Measuring images", "batch": ROWS_IN_MEMORY}
        measured = map_rows(images, make, datasets.Features(MEASURES), (pictures, sys.modules[__name__]), **how)
        if args.skip_broken_images:
            whole = unbroken(measured, source)
            checked, images, measured = (part.select(whole).flatten_indices() for part in (checked, images, measured))
        measured = measured.remove_columns("broken")
        joined = datasets.concatenate_datasets([checked, measured.select_columns(["checksums"])], axis=1)
        given = {"columns": columns[side], "weighs": is_weighed(args, columns[side]), "source": source}
        make = partial(parted, **given, marks=marks_of(processor), tokenizer=processor.tokenizer)
        code = (sys.modules[__name__], rendering)
        parts = map_rows(joined, make, PARTED, code, args.dataset_num_proc, "Finding places of images")
        if settings := [name for name in SETTINGS if name in checked.column_names]:
            parts = datasets.concatenate_datasets([parts, checked.select_columns(settings)], axis=1)
        check_written(parts, ("messages",), processor.tokenizer, f"{source}, row", args.template_date)
        read[side] = datasets.concatenate_datasets([parts, images, measured], axis=1)
        num_images += sum(map(len, measured["checksums"]))
    if not num_images:
        raise ConfigError(
            f"{' and '.join(filter(None, args.origins.values()))}: no row has an image in the column images or image, or in "
            "its messages; train on texts with recipes/sft.py"
        )
    sides = {name: side.remove_columns(ASKED) for name, side in args.sides(read, ASKED).items()}
    rows, first = written["train"], []
    for row in itertools.islice(sides["train"], NUM_COMPARED):
        row_in_texts = in_texts(rows[row["row"] - 1], rows.features)  # pyright: ignore[reportCallIssue, reportArgumentType]
        as_texts = {message["role"] for message in row["messages"] if isinstance(message.get("content"), str)}
        messages = messages_of_parts(row_in_texts, columns["train"], is_weighed(args, columns["train"]), as_texts)
        settings = {name: row_in_texts[name] for name in SETTINGS if name in row_in_texts}
        first.append({"messages": messages} | settings | {"images": row["images"]})
    return sides, first


# Images


def unbroken(measured: datasets.Dataset, source: str) -> np.ndarray:
    """Return the numbers of the rows whose images can all be decoded, and tell of the others.

    Raises:
        ConfigError: if there are none.
    """
    errors: list[str | None] = measured["broken"][:]
    broken = np.array([error is not None for error in errors])
    if broken.any():
        number, first = int(broken.sum()), next(filter(None, errors))
        message = (
            f"{source}: {number:,} of {len(errors):,} rows have an image that cannot be decoded; the first is {first}"
        )
        if broken.all():
            raise ConfigError(message)
        print_first(f"{message}. They are left out")
    return np.flatnonzero(~broken)


def files_version(images: datasets.Dataset) -> str:
    """Return a checksum of path, size and time of all files of images."""
    digest = xxhash.xxh3_128()
    for chunk in images.data.column("images").chunks:
        files = chunk.flatten()
        for path in files.field("path").filter(files.field("bytes").is_null()).to_pylist():
            try:
                status = os.stat(path)
                known = [path, status.st_size, status.st_mtime_ns]
            except (OSError, ValueError):  # the pass tells of it, with the row
                known = [path]
            digest.update(json.dumps(known).encode())
    return digest.hexdigest()


def measure(table: pa.Table, first: int, source: str, files: str, skips: bool) -> pa.Table:
    """Measure the images of rows; `files` is the version of their files, by which the result is found again.

    If it `skips` broken images, all are decoded, and a row with one is `broken`, by the error of the first.
    """
    made: dict[str, list] = {name: [] for name in MEASURES}
    for row in table.to_pylist():
        sizes, checksums, broken = [], [], None
        where = f"{source}, row {row['row']}"
        try:
            for number, image in enumerate(row["images"], 1):
                content = image_bytes(image, where)
                named = f"{where}, {image['path'] or f'image {number}'}"
                sizes.append(decoded(content, named).size if skips else upright_size(content, named))
                checksums.append(pictures.image_checksum(content))
        except DataError as error:
            if not skips:
                raise
            broken = str(error)
        made["widths"].append([width for width, _ in sizes])
        made["heights"].append([height for _, height in sizes])
        made["checksums"].append(checksums)
        made["broken"].append(broken)
    return pa.table(made, schema=datasets.Features(MEASURES).arrow_schema)


# Messages of parts


def usual_texts(texts: datasets.Dataset, args: Any, source: str) -> tuple[datasets.Dataset, tuple[str, ...]]:
    """Convert texts with marks to messages, numbered by `row`; also return the columns that hold these.

    Raises:
        DataError: for rows that hold no messages.
        ConfigError: for columns of no form, and for arguments that do not fit the rows.
    """
    mapping = {name: column for name, column in args.mapping.items() if name != "images"}
    usual = in_usual_form(texts, args.forms, mapping, source, has_template=True)
    columns = ("messages",) if "messages" in usual.column_names else ("prompt", "completion")
    if args.completion_only_loss and columns[-1] != "completion":
        raise ConfigError(
            f"--completion_only_loss is for rows of prompt and completion; {source} has {columns[-1]}; remove it: of "
            "messages, the answers alone are trained (--assistant_only_loss)"
        )
    check_texts_or_messages(usual, columns, source)
    return usual.add_column("row", np.arange(1, len(usual) + 1)), columns  # pyright: ignore[reportCallIssue]


def is_weighed(args: Any, columns: Collection[str]) -> bool:
    """Tell whether answers in a prompt get the weight 0, because the completion alone is trained."""
    return "prompt" in columns and args.completion_only_loss is not False


def checked_texts(rows: datasets.Dataset, columns: tuple[str, ...], args: Any, source: str) -> datasets.Dataset:
    """Return messages without the nulls that Arrow adds, and tell of rows without an answer.

    Raises:
        DataError: for messages that templates do not read.
        ConfigError: if everything is trained, and messages are no targets.
    """
    texts = without_added_nulls(rows, rows.column_names, source)
    trained = columns if args.completion_only_loss is False else columns[-1:]
    has_others = has_unweighted(texts, trained, source) or is_weighed(args, columns)
    if has_others and args.assistant_only_loss == "false":
        raise ConfigError(
            f"{source} has messages that are no targets, by their weight or as a prompt, but everything is trained; remove "
            "--assistant_only_loss false"
        )
    if is_first() and (message := missing_answers(texts, columns[-1], source)):
        print_first(message.replace(ascii(SEEN)[1:-1], PLACE))
    return texts


def parted(
    table: pa.Table,
    first: int,
    columns: tuple[str, ...],
    weighs: bool,
    marks: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    source: str,
) -> pa.Table:
    """Make messages of parts, and the column ASKED: the question of a row with its images, which decides on its side.

    Contents that the template writes as they stand remain texts.
    """
    made: dict[str, list] = {name: [] for name in PARTED}
    as_texts: dict[frozenset, set[str]] = {}
    typed = re.compile("|".join(map(re.escape, marks)))
    for row in rows_in(table):
        where, checksums = f"{source}, row {row['row']}", row["checksums"]
        messages = messages_of_parts(row, columns, weighs)
        if match := next(filter(None, map(typed.search, texts_in([messages, row.get("tools")]))), None):
            raise DataError(
                f"{where}: the text {match.string!r:.80} holds {match[0]!r}, which the model would read as an image, a "
                "video or a sound; remove it"
            )
        num_places = sum(part == IMAGE for message in messages for part in message.get("content") or ())
        if num_places != len(checksums):
            remedy = f"write {PLACE} in a text, or a part of the type image, where each image stands"
            remedy += "" if checksums else ", or name their column by --columns images=COLUMN"
            raise DataError(f"{where} has {num_places} places for images, and {len(checksums)} images; {remedy}")
        question = beginning({"messages": messages}, "messages")
        asked = checksums[: question.count(json.dumps(IMAGE))]
        roles = frozenset(message["role"] for message in messages if "content" in message)
        if roles not in as_texts:
            as_texts[roles] = written_as_texts(messages, tokenizer, settings_of(row))
        made["messages"].append(messages_of_parts(row, columns, weighs, as_texts[roles]))
        made[ASKED].append(" ".join([*asked, question]))
    return datasets.Dataset.from_dict(made, features=PARTED).data.table


def messages_of_parts(row: dict, columns: Collection[str], weighs: bool, as_texts: Collection[str] = ()) -> list[dict]:
    """Return the messages of a row, with contents as parts; if it `weighs`, answers in the prompt are no targets.

    Contents without an image of the roles `as_texts` stay texts.
    """
    before = row["prompt"] if "prompt" in columns else []
    if weighs:
        before = [message | {"weight": 0} if message["role"] == "assistant" else message for message in before]
    messages = [*before, *row["completion" if "completion" in columns else "messages"]]
    return [
        message | {"content": split_at_marks(content)}
        if isinstance(content := message.get("content"), str) and (SEEN in content or message["role"] not in as_texts)
        else message
        for message in messages
    ]


def written_as_texts(messages: list[dict], tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> set[str]:
    """Return the roles whose contents the chat template writes as they stand: of parts, it would write code, or nothing.

    It is tried with a known text in each message. Where parts do as well as texts, contents are parts.
    """
    having = [message["role"] for message in messages if isinstance(message.get("content"), list)]
    known, best, most = [{"type": "text", "text": MARK}], set(), -1
    roles = sorted({*having})
    for some in itertools.chain.from_iterable(itertools.combinations(roles, n) for n in range(len(roles) + 1)):
        contents = {role: MARK if role in some else known for role in roles}
        trial = [m | {"content": contents[m["role"]]} if isinstance(m.get("content"), list) else m for m in messages]
        text = unless_refused(partial(tokenizer.apply_chat_template, tokenize=False, **settings), trial) or ""
        number = text.count(MARK) - len(PRINTED.findall(text))
        if number > most:
            best, most = {*some}, number
        if most >= len(having):
            break
    return best


def split_at_marks(text: str) -> list[dict]:
    """Divide a text at its marks into parts; an empty text has none."""
    texts = [{"type": "text", "text": between} for between in text.split(SEEN)]
    parts = [part for between in texts for part in (IMAGE, between)][1:]
    return [part for part in parts if part.get("text") != ""]
