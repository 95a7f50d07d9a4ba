"""Images of rows: their sizes, the text that stands for them, and what a model's processor makes of them; its files.

The tokens of an image follow from its size alone. So rows are made from sizes, and only a data worker decodes images. What
the processor writes for a size is kept for later runs.
"""

import contextlib
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import transformers
import xxhash
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from accelerate_recipes.checkpoint.base_form import CONFIG, PROCESSORS, TEMPLATE, as_bytes, files_of_base, template_file
from accelerate_recipes.conversations.exported import read_of
from accelerate_recipes.conversations.rendering import Rendering, shared_length
from accelerate_recipes.data.passes import map_rows, num_processes
from accelerate_recipes.data.template_values import settings_of
from accelerate_recipes.disk import made_once, read_json
from accelerate_recipes.errors import ConfigError, DataError, one_line
from accelerate_recipes.images.augmentation import decode, open_image
from accelerate_recipes.images.image_texts import ImageTexts, Key, Size, messages_read, parts_in, render_documents
from accelerate_recipes.models.images import patches_of
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.models.processors import load_processor

ORIENTATION = 0x0112  # EXIF's number of the field that says how a camera was held
SIDEWAYS = (5, 6, 7, 8)
OF_EXIF = (b"eXIf", b"exif", b"adobe.xmp")  # one of these stands in a PNG that has EXIF, or the same in XMP
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}  # stand near the end of a whole file
URL = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.I)
VERSION = 1  # of the files of sizes; raise it when they would hold something else
SIZES_TOGETHER = 16  # sizes that are made together
ROWS_A_SIZE = 100  # a size takes as long as so many rows of other passes: 0.1 s
SIZES = datasets.Features({
    "width": datasets.Value("int32"),
    "height": datasets.Value("int32"),
    "is_among_others": datasets.Value("bool"),
    "text": datasets.Value("binary"),
    "patches": datasets.List(datasets.Value("int32")),
    "refused": datasets.Value("string"),
})  # fmt: skip
Patches = dict[Key, list[int]]  # of each tile of an image that is computed alone


def image_bytes(image: dict[str, Any], place: str) -> bytes:
    """Read the bytes of an image: {"path": ..., "bytes": ...}, of which one is None. `place` is its row, for errors.

    Raises:
        DataError: for a URL, and for a file that cannot be read.
    """
    if image["bytes"] is not None:
        return image["bytes"]
    path = image["path"]
    if URL.match(path):
        raise DataError(f"{place}: the image {path!r:.80} is a URL, which is not read; give the path of a file")
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a path with a null character
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{place}: the image {path} cannot be read: {cause}; put it there, or remove the row") from None


def checked_image(image: dict[str, Any], expected: str, place: str) -> bytes:
    """Read the bytes of an image, as `image_bytes` does, and check that they are those that were measured.

    Raises:
        DataError: for a file that has changed, or cannot be read.
    """
    content = image_bytes(image, place)
    if (checksum := image_checksum(content)) != expected:
        raise DataError(
            f"{place}: the image {image['path'] or 'in it'} has changed since the rows were prepared: its checksum is "
            f"{checksum}, was {expected}; put it back, or start the run anew with the new one"
        )
    return content


def upright_size(content: bytes, place: str) -> tuple[int, int]:
    """Return width and height of an image as it is seen: a camera that was held upright writes the image sideways.

    It reads the header, and decodes only an image that seems to lack its end.

    Raises:
        DataError: for bytes that are no image, or a part of one.
    """
    with reading_image(place), open_image(content) as image:
        if ENDS.get(image.format or "", b"") not in content[-64:]:
            image.load()
        width, height = image.size
        # Of a TIFF, PIL turns the size itself. In a PNG, EXIF may stand at the end: PIL would decode it all to look there.
        is_upright = image.format == "TIFF" or (image.format == "PNG" and not any(mark in content for mark in OF_EXIF))
        is_sideways = not is_upright and image.getexif().get(ORIENTATION) in SIDEWAYS
    return (height, width) if is_sideways else (width, height)


def decoded(content: bytes, place: str) -> Image.Image:
    """Decode an image, as `decode` does.

    Raises:
        DataError: for bytes that are no image, or a part of one.
    """
    with reading_image(place):
        return decode(content)


@contextlib.contextmanager
def reading_image(place: str) -> Iterator[None]:
    """Turn any error of PIL, whose formats raise many kinds, into a DataError with `place`."""
    try:
        yield
    except Exception as error:
        cause = str(error).partition(" <")[0] or type(error).__name__
        raise DataError(f"{place}: the image cannot be read: {cause}; mend the file, or remove the row") from None


def image_checksum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def keys_of(documents: Iterable[tuple[str, Sequence[Size]]]) -> dict[Key, str]:
    """Map the keys of all images of documents to the first document with it; see `Pictures.texts_for`."""
    keys: dict[Key, str] = {}
    for where, sizes in documents:
        # A part of the row may have the first image alone.
        for key in [*((*size, len(sizes) > 1) for size in sizes), *((*size, False) for size in sizes[:1])]:
            keys.setdefault(key, where)
    return keys


class Pictures:
    """Values and texts that a model's processor makes of images, without the texts around them."""

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor

    @property
    def names(self) -> list[str]:
        return self.processor.model_input_names

    def texts_for(self, documents: Iterable[tuple[str, Sequence[Size]]]) -> ImageTexts:
        """Make the texts that stand for the images of documents, whose places (for errors) and sizes of images are given.

        Raises:
            DataError: for a size that the processor refuses.
        """
        texts = {}
        for key, where in keys_of(documents).items():
            try:
                texts[key] = zlib.compress(self.of_size(*key)[0].encode())
            except ValueError as error:
                raise DataError(f"{where}: {error}") from error
        return ImageTexts(self.processor.image_token, texts)

    def of_size(self, width: int, height: int, is_among_others: bool) -> tuple[str, dict[str, torch.Tensor]]:
        """Make the text that stands for an image, and what the model reads of a blank one, or of two.

        LLaVA-OneVision divides an image into tiles only if it is alone.

        Raises:
            ValueError: for a size that the processor refuses.
        """
        blank = Image.new("RGB", (width, height))
        try:
            values, (text, *_) = self.processed([blank, blank] if is_among_others else [blank])
        except Exception as error:  # processors raise errors of many kinds
            raise ValueError(
                f"the processor of the model refuses an image of {width} x {height} pixels: {error}; give another "
                "image, or remove the row"
            ) from error
        return text, {name: torch.as_tensor(value) for name, value in values.items() if name in self.names}

    def processed(self, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        """Process the images of one document; also return the text that stands for each."""
        settings = self.processor._merge_kwargs(tokenizer_init_kwargs={}, return_tensors="pt")["images_kwargs"]
        return self.processor._process_images([[*images]], **settings)

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Compute what the model reads of the images of a document."""
        if not images:
            return {}
        processed, _ = self.processed(images)
        return {name: torch.as_tensor(value) for name, value in processed.items() if name in self.names}

    def types_of(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tell for tokens, (1, L), which of them stand for images, by the name under which the model wants it."""
        names = {"token_type_ids", "mm_token_type_ids"} & {*self.names}
        known = torch.tensor([token for token in self.processor.image_token_ids if token is not None])
        return {name: torch.isin(ids, known).long() for name in names}


def known_sizes(
    processor: ProcessorMixin,
    config: PreTrainedConfig,
    documents: Iterable[tuple[str, Sequence[Size]]],
    num_proc: int | None,
) -> tuple[ImageTexts, Patches]:
    """Find the texts and patches of the images of documents, whose places (for errors) and sizes of images are given.

    A blank image of each size is processed, which takes as long as a photo. So the results are kept beside the rows of
    `datasets`, in a folder for all that decides them: each call adds a file of the sizes that no file there has. It takes
    `num_proc` processes (default: see `num_processes`).

    Raises:
        DataError: for a size that the processor refuses; the others are kept.
        ConfigError: for a file that is damaged.
    """
    wanted = keys_of(documents)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / f"image-sizes-{version_of(processor, config)}"
    known = {key: row for file in folder.glob("*.parquet") for key, row in by_key(read_sizes(file)).items()}
    if missing := sorted(wanted.keys() - known.keys()):
        columns = dict(zip(("width", "height", "is_among_others"), map(list, zip(*missing, strict=True)), strict=True))
        make = partial(of_sizes, processor=processor, config=config)
        number = num_proc or num_processes(len(missing) * ROWS_A_SIZE)
        rows = datasets.Dataset.from_dict(columns)
        made = map_rows(rows, make, SIZES, num_proc=number, desc="Sizes of images", batch=SIZES_TOGETHER).data.table
        # A refusal may be for want of memory: it is not kept.
        if len(kept := made.filter(pc.field("refused").is_null())):
            file = folder / f"{xxhash.xxh3_128_hexdigest(json.dumps(missing).encode())}.parquet"
            made_once(file, lambda partial_file: pq.write_table(kept, partial_file, write_page_checksum=True))
        known |= by_key(made)
    for key, where in wanted.items():
        if refused := known[key]["refused"]:
            raise DataError(f"{where}: {refused}")
    texts = ImageTexts(processor.image_token, {key: known[key]["text"] for key in wanted})
    return texts, {key: known[key]["patches"] for key in wanted}


def version_of(processor: ProcessorMixin, config: PreTrainedConfig) -> str:
    """Return a checksum of all that decides what is made of a size: the chat template does not."""
    own = {name: value for name, value in vars(processor).items() if name not in ("tokenizer", "chat_template")}
    parts = {
        name: part.to_json_string() if hasattr(part, "to_json_string") else repr(part) for name, part in own.items()
    }
    tokens = repr(processor.tokenizer.special_tokens_map)
    known = [VERSION, transformers.__version__, type(processor).__name__, sorted(parts.items()), tokens]
    size = config.vision_config.patch_size  # all that `patches_of` reads of a configuration
    return xxhash.xxh3_128_hexdigest(json.dumps([*known, size]).encode())


def of_sizes(table: pa.Table, first: int, processor: ProcessorMixin, config: PreTrainedConfig) -> pa.Table:
    """Make what `processor` makes of blank images of some sizes, or why it `refused`; texts are compressed."""
    pictures, rows = Pictures(processor), table.to_pylist()
    for row in rows:
        try:
            text, inputs = pictures.of_size(row["width"], row["height"], row["is_among_others"])
        except ValueError as error:
            row |= {"text": None, "patches": None, "refused": str(error)}
        else:
            patches = patches_of(config, inputs)  # of both images, if it is among others
            own = patches[: len(patches) // 2] if row["is_among_others"] else patches
            row |= {"text": zlib.compress(text.encode()), "patches": own, "refused": None}
    return pa.Table.from_pylist(rows, schema=SIZES.arrow_schema)


def by_key(table: pa.Table) -> dict[Key, dict]:
    return {(row["width"], row["height"], row["is_among_others"]): row for row in table.to_pylist()}


def read_sizes(file: Path) -> pa.Table:
    try:
        return pq.read_table(file, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read: {one_line(error)}; remove it, and its sizes are made anew"
        ) from error


def pixels_shown(processor: ProcessorMixin, images: Sequence[Image.Image]) -> list[float]:
    """Return the number of pixel values that a processor makes of images, and some of them, evenly spread."""
    values = Pictures(processor).inputs(images)["pixel_values"].flatten()
    return [len(values), *values[:: len(values) // 64 + 1].tolist()]


def render_with_images(row: dict, processor: ProcessorMixin, **settings: Any) -> list[Rendering]:
    """Render a row with `messages` and `images` as documents; the processor must make the same tokens of the whole row.

    If the row has `pixels`, those that `pixels_shown` has found in training, they must also be the same.

    Raises:
        ValueError: if it does not, and like `image_texts.render_documents`.
        DataError: for an image that cannot be read.
    """
    tokenizer = processor.tokenizer
    where = "one of the first rows"
    images = [decoded(image_bytes(image, where), f"{where}, {image['path']}") for image in row["images"]]
    sizes = [image.size for image in images]
    row = row | {"widths": [width for width, _ in sizes], "heights": [height for _, height in sizes]}
    documents = render_documents(row, tokenizer, Pictures(processor).texts_for([(where, sizes)]), **settings)
    if documents:
        # A processor takes settings that its template does not name for its own.
        given = {name: value for name, value in settings_of(row).items() if name in str(processor.chat_template)}
        read = messages_read(row, tokenizer, settings["assistant_only"])
        messages = with_images(read, images)
        (ids,) = processor.apply_chat_template([messages], tokenize=True, **given)
        if documents[-1].ids != [*ids]:
            where = shared_length(documents[-1].ids, ids)
            raise ValueError(f"token {where + 1} is another of the processor: images stand elsewhere than in training")
    if images and row.get("pixels"):
        before, now = row["pixels"], pixels_shown(processor, images)
        # Releases of PIL and numpy may round otherwise; another mean, size or filter changes more.
        if len(before) != len(now) or not np.allclose(before, now, rtol=0, atol=1e-3):
            raise ValueError(f"its images have other pixel values than in training: {now[:6]}..., were {before[:6]}...")
    return [Rendering(*document[:3]) for document in documents]


def renderer_of(export: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[Rendering]]:
    """Return what renders a row with images, as it was written, as users of an exported processor would."""
    return partial(render_written, processor=processor_of(export, tokenizer))


def render_written(row: dict, processor: ProcessorMixin, **settings: Any) -> list[Rendering]:
    """Render a row with images, as it was written, by transformers alone."""
    return render_with_images(read_of(row), processor, **settings)


def processor_of(export: Path, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Load the processor of an export. The type of model stands in the export, or with adapters in that of their model."""
    is_whole = (export / "config.json").is_file()
    model = str(export) if is_whole else read_json(export / "adapter_config.json")["base_model_name_or_path"]
    return load_processor(str(export), tokenizer, config=load_config(model))


def with_images(messages: Sequence[dict], images: Iterable[Image.Image]) -> list[dict]:
    """Put images at their places into messages, as the processors of transformers take them."""
    rest = iter(images)
    filled = []
    for message in messages:
        parts = [part | ({"image": next(rest)} if part["type"] == "image" else {}) for part in parts_in(message)]
        filled.append(message | ({"content": parts} if parts else {}))
    return filled


def marks_of(processor: ProcessorMixin) -> list[str]:
    """List the texts that a processor or its model reads as an image, a video or a sound, longest first."""
    names = {getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")}
    known = {token for token in processor.image_token_ids if token is not None}
    return sorted({*filter(None, names), *map(processor.tokenizer.convert_ids_to_tokens, known)}, key=len, reverse=True)


def processor_files(name: str, processor: ProcessorMixin) -> dict[str, bytes]:
    """Return the processor files of a model that sees images, by name: those of its base, with the run's changes.

    See `checkpoint.base_form`, which writes the other files in the form of the base.

    Raises:
        ConfigError: if the files cannot say these changes.
    """
    files, now = files_of_base(name, PROCESSORS), settings_of_images(processor)
    before = settings_of_images(load_processor(name, processor.tokenizer))
    changed = {field: value for field, value in now.items() if before.get(field) != value}
    for file in files.keys() & {"preprocessor_config.json", "processor_config.json"} if changed else ():
        content = json.loads(files[file])
        nested = content if file.startswith("pre") else content.get("image_processor")
        if nested is not None:
            nested |= changed
            for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
                if bound in nested:  # an older name, which transformers prefers
                    nested[bound] = now["size"][edge]
            files[file] = as_bytes(content)
    if TEMPLATE in files:
        files |= template_file(name, processor.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        for file, content in (files | files_of_base(name, [CONFIG])).items():
            (Path(folder) / file).write_bytes(content)
        if (read := settings_of_images(load_processor(folder, processor.tokenizer))) != now:
            differ = sorted(field for field in now if read.get(field) != now[field])
            raise ConfigError(
                f"the processor files of {name} cannot say how this run processes images ({', '.join(differ)} would differ "
                "in the export); leave out the arguments that change it, such as --image_max_pixels"
            )
    return files


def settings_of_images(processor: ProcessorMixin) -> dict[str, Any]:
    return json.loads(processor.image_processor.to_json_string())
