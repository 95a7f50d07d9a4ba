"""Supervised fine-tuning on rows with images: from their files to batches of whole documents, each with its images.

The order and the tokens of rows follow from texts and sizes of images alone. Data workers read and decode the images.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from accelerate_recipes.conversations import rendering
from accelerate_recipes.conversations.exported import as_exported
from accelerate_recipes.conversations.packed import Packed, count_targets_of, is_packed
from accelerate_recipes.conversations.settings import check_documents
from accelerate_recipes.conversations.supervised import (
    SupervisedRows,
    check_answers_are_left,
    check_same_rendering,
    ends_of,
    of_answers,
    tell_of_rendering,
)
from accelerate_recipes.conversations.supervised_loss import flops_of_rows
from accelerate_recipes.conversations.trained_rows import (
    USES,
    check_rows_are_left,
    compare_with_rendering,
    content_of_sides,
    cut_at,
)
from accelerate_recipes.data.packing import pack
from accelerate_recipes.data.passes import map_rows
from accelerate_recipes.data.prepared import lengths_of
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images import image_texts
from accelerate_recipes.images.image_rows import load_image_sides
from accelerate_recipes.images.image_texts import DOCUMENTS, Size, cut_documents, rendered_documents
from accelerate_recipes.images.pictures import (
    Patches,
    Pictures,
    checked_image,
    decoded,
    image_bytes,
    image_checksum,
    known_sizes,
    pixels_shown,
    render_written,
)
from accelerate_recipes.metrics import Flops, size_and_share
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.composites import weights_by_part
from accelerate_recipes.models.documents import text_positions
from accelerate_recipes.models.image_probe import check_whole
from accelerate_recipes.models.images import image_model_on_meta, join_documents
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.ranks import local_main_process_first, on_first_rank
from accelerate_recipes.run import Run

OF_IMAGES = ("of_row", "checksums", "image_begins")  # columns of documents that rows have too
NO_LIMIT = 1 << 40  # tokens of a document
SMALL = (96, 96)
BLANK = (32, 32)  # size of the image of a batch without images
SIZES_TO_TRY = [(32, 32), (64, 32)]


@dataclass(eq=False, kw_only=True)
class PackedDocuments(Packed):
    """Rows of whole documents, whose images lie in `read`, rows of `source`; `patches` has those of each of their tiles."""

    read: datasets.Dataset
    source: str
    patches: Sequence[int]

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = super().__getitem__(number)
        read = [self.read[number] for number in row.pop("of_row")]
        images = [source_row["images"][: len(sums)] for source_row, sums in zip(read, row["checksums"], strict=True)]
        return row | {"images": images, "places": [f"{self.source}, row {source_row['row']}" for source_row in read]}


class ImageCollator:
    """Collator of rows of documents: joins them in one row, (1, T), with what the model reads of their images.

    `places` of a batch name the file and row of each document.

    A batch without an image gets a blank one, as a further document without targets: under FSDP, all ranks must compute the
    parts of the model that see images. Its parts are made when they are needed, in each data worker.
    """

    def __init__(self, processor: ProcessorMixin, config: PreTrainedConfig):
        self.processor, self.config = processor, config

    def __reduce__(self):
        return ImageCollator, (self.processor, self.config)

    @cached_property
    def pictures(self) -> Pictures:
        return Pictures(self.processor)

    @cached_property
    def base(self) -> Any:
        return image_model_on_meta(self.config).base_model

    @cached_property
    def blank(self) -> dict[str, torch.Tensor]:
        image = Image.new("RGB", BLANK)
        text, _ = self.pictures.of_size(*BLANK, False)
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.document(ids, [IGNORE_INDEX] * len(ids), [image])  # pyright: ignore[reportArgumentType]

    def document(self, ids: list[int], labels: list[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        tokens = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        return tokens | self.pictures.types_of(tokens["input_ids"]) | self.pictures.inputs(images)

    def documents(self, row: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
        ends, images = itertools.accumulate(row["seq_lengths"]), self.images_in(row)
        for end, length, own in zip(ends, row["seq_lengths"], row["images"], strict=True):
            part = slice(end - length, end)
            yield self.document(row["input_ids"][part], row["labels"][part], [*itertools.islice(images, len(own))])

    def images_in(self, row: dict[str, Any]) -> Iterator[Image.Image]:
        """Read and decode the images of a row.

        Raises:
            DataError: for a file that has changed since the rows were prepared.
        """
        for images, checksums, where in zip(row["images"], row["checksums"], row["places"], strict=True):
            for number, (image, of_image) in enumerate(zip(images, checksums, strict=True), 1):
                image_name = f"{where}, image {number}"
                yield decoded(checked_image(image, of_image, image_name), image_name)

    def show(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch to show: rows with padding, and small images, by the places of their tokens in a row."""
        batch = DataCollatorForLanguageModeling(0, return_position_ids=True)([*rows])
        batch["labels"][batch["position_ids"] == 0] = IGNORE_INDEX
        batch["position_ids"][batch["attention_mask"] == 0] = 1  # padding begins no document
        images = []
        for row in rows:
            starts = itertools.accumulate(row["seq_lengths"], initial=0)
            begins = [start + begin for start, some in zip(starts, row["image_begins"], strict=False) for begin in some]
            images.append(dict(zip(begins, map(small, self.images_in(row)), strict=True)))
        return batch | {"images": images}

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        try:
            documents = [document for row in rows for document in self.documents(row)]
        except DataError as error:
            return {"error": str(error)}
        if not any("pixel_values" in document for document in documents):
            documents.append(self.blank)
        batch = join_documents(self.base, documents)
        batch["labels"][text_positions(batch["position_ids"]) == 0] = IGNORE_INDEX
        return batch | {"places": [where for row in rows for where in row["places"]]}


def documents_to_try(collate: ImageCollator) -> list[dict[str, torch.Tensor]]:
    """Make documents with two images, with none and with one, of two sizes and colours, for `check_whole`."""
    tokenizer, documents = collate.processor.tokenizer, []
    for sizes in (SIZES_TO_TRY, [], SIZES_TO_TRY[1:]):
        texts = [collate.pictures.of_size(*size, len(sizes) > 1)[0] for size in sizes]
        ids: Any = tokenizer("1".join(["2 ", *texts, " 3 4 5"]), add_special_tokens=False)["input_ids"]
        images = [Image.new("RGB", size, (10, 20, 30 + 50 * len(documents) + size[0])) for size in sizes]
        documents.append(collate.document(ids, ids, images))
    return documents


def prepare_with_images(
    run: Run[Any], model: PreTrainedModel, processor: ProcessorMixin, base_stops: set[int]
) -> SupervisedRows:
    """Read rows with images, render, cut and pack them; count them, and compare the first with the export's rendering.

    The base stops at `base_stops`.

    Raises:
        ConfigError: like `supervised.prepare_supervised`, if the images of each row leave no room for an answer, and if a
            tiny model of this configuration does not compute a packed row with images as its documents.
        DataError: for rows and images that cannot be read.
    """
    args, tokenizer, collate = run.args, processor.tokenizer, ImageCollator(processor, model.config)
    attention = model.config.get_text_config()._attn_implementation
    trial = model.config, args.model_name_or_path, attention
    on_first_rank(lambda: check_whole(*trial, documents_to_try(collate)))
    stops = base_stops | stops_of(tokenizer)
    sides, written = local_main_process_first(lambda: load_image_sides(args, processor, stops))
    check_same_rendering(run, tokenizer, sides["train"].features)
    sizes = itertools.chain(*(sizes_in(rows, args.origins[side] or args.source) for side, rows in sides.items()))
    know_all = partial(known_sizes, processor, model.config, sizes, args.dataset_num_proc)
    texts, patches = local_main_process_first(know_all)
    how = {"assistant_only": of_answers(args, sides["train"].features), "stops": sorted(stops)}
    longest = args.max_length or NO_LIMIT
    whole, cut, packed, first, added = {}, {}, {}, [], 0
    for side, rows in sides.items():
        use, source = f"rows to {USES[side]} on", args.origins[side] or args.source
        given = {"tokenizer": tokenizer, "date": args.template_date, "texts": texts, "source": source}
        make, code = partial(rendered_documents, **given, **how), (image_texts, rendering)
        make_all = partial(map_rows, rows, make, DOCUMENTS, code, args.dataset_num_proc, f"Tokenizing {use}")
        whole[side] = tokenized = local_main_process_first(make_all)
        check_answers_are_left(rows, tokenized, use)
        check_room(tokenized, longest)
        if side == "train":
            added, first = tell_of_rendering(rows, tokenized, tokenizer, how)
        cut_all = partial(
            map_rows, tokenized, partial(cut_documents, longest=longest), DOCUMENTS, desc="Cutting documents"
        )
        cut[side] = local_main_process_first(cut_all)
        check_rows_are_left(sides, {side: cut[side]}, args.max_length)
        lengths = lengths_of(cut[side])
        check_documents(args, args.base_model, model.config, lengths)
        alone = [[(number, 0, length)] for number, length in enumerate(lengths)]
        pieces = pack(lengths.tolist(), longest) if is_packed(args, side) else alone
        numbers = np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])
        read, own = rows.select_columns(["images", "row"]), patches_in(cut[side], rows, patches)
        of_images = {"read": read, "source": source, "patches": own}
        packed[side] = PackedDocuments(cut[side], *numbers, True, OF_IMAGES, **of_images)
    # Checksums in checkpoints are of a column with this name.
    content = content_of_sides(run, *(cut[side].rename_column("of_row", "source") for side in ("train", "test")))
    render = partial(render_written, processor=processor)
    exported = as_exported(model, tokenizer, base_stops)._replace(render=render)
    num_ended, ends = ends_of(args, cut["train"], first, exported)

    def compare() -> None:
        source, numbers = args.origins["train"] or args.source, sides["train"]["row"][: len(written)]
        rows = with_pixels(with_files(run, written), processor, [f"{source}, row {number}" for number in numbers])
        compare_with_rendering(run, exported, rows, first, ends, **how)

    on_first_rank(compare)
    counts = {"with an end": num_ended} | ({"packed from": len(cut["train"])} if args.packing else {})
    counts |= {"left out": len(sides["train"]) - len(cut["train"]) + added}
    counts |= cut_at(lengths_of(whole["train"]), args.max_length)
    counts |= {"images": sum(len(sums) for sums in cut["train"]["checksums"])}
    counted = {"sides": sides, "num_targets": count_targets_of(packed["train"])[0], "counts": counts}
    return SupervisedRows(run, packed["train"], packed["test"], collate, content, collate.show, **counted)


def patches_in(documents: datasets.Dataset, read: datasets.Dataset, patches: Patches) -> list[int]:
    """List the patches of all tiles of the images of documents."""
    read = read.select_columns(["widths", "heights"])
    counts = []
    for number, sums in zip(documents["of_row"], documents["checksums"], strict=True):
        row = read[number]
        for width, height, _ in zip(row["widths"], row["heights"], sums, strict=False):
            counts += patches[width, height, len(sums) > 1]
    return counts


def flops_with_images(args: Any, rows: PackedDocuments, num_targets: int) -> Callable[[PreTrainedModel], Flops]:
    """Return a function that counts the training FLOPs of a model per target of packed documents, images too, for MFU."""
    of_texts = flops_of_rows(args, [rows], num_targets)
    ends, begins = (sum(map(sum, rows.documents[name])) for name in ("image_ends", "image_begins"))

    def flops_fn(model: PreTrainedModel) -> Flops:
        of_images = flops_of_images(model, rows.patches, ends - begins) / max(1, num_targets)
        texts = of_texts(model)
        return Flops(texts.attended + of_images, texts.full_rows and texts.full_rows + of_images)

    return flops_fn


def flops_of_images(model: PreTrainedModel, patches: Iterable[int], num_tokens: int) -> float:
    """Count the training FLOPs of the tower and the projector of a model that is not sharded yet, for some images.

    As in `metrics.decoder_flops`; a tower that is not trained has no backward pass.

    Args:
        patches: numbers of patches of the images, or of their tiles; see `patches_of`.
        num_tokens: tokens that stand for the images.
    """
    parts, vision = weights_by_part(model), model.config.vision_config
    # Tables of positions, and the unused pooled output of a SigLIP, multiply no patch.
    left_out = {id(p) for name, p in model.named_parameters() if re.search(r"pos_embed|position|\.head\.", name)}
    multiply = [p for p in parts["vision_tower"] if p.ndim > 1 and id(p) not in left_out]
    size, share = size_and_share(multiply)
    projector, share_of_projector = size_and_share(parts["multi_modal_projector"])
    layers = getattr(vision, "num_hidden_layers", None) or vision.depth
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    width = getattr(vision, "head_dim", 0) * getattr(vision, "num_attention_heads", 0) or hidden
    # In most layers of a Qwen2.5-VL, a patch sees those of its window.
    full = getattr(vision, "fullatt_block_indexes", None)
    num_full = layers if full is None else len(full)
    window = 0 if full is None else (vision.window_size // vision.patch_size) ** 2
    attended = sum(n * (num_full * n + (layers - num_full) * min(n, window)) for n in patches)
    of_tower = (2 + 4 * share) * (size * sum(patches)) + (4 + 8 * share) * width * attended
    return of_tower + (2 + 2 * share_of_projector + 2 * max(share, share_of_projector)) * projector * num_tokens


def small(image: Image.Image) -> bytes:
    """Return an image as the content of a PNG file of at most SMALL pixels."""
    image.thumbnail(SMALL)
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def sizes_in(rows: datasets.Dataset, source: str) -> Iterator[tuple[str, list[Size]]]:
    """Yield the place of each row, for errors, and the sizes of its images."""
    for number, widths, heights in zip(rows["row"], rows["widths"], rows["heights"], strict=True):
        yield f"{source}, row {number}", [*zip(widths, heights, strict=True)]


def check_room(documents: datasets.Dataset, longest: int) -> None:
    """Check that, of documents with images, the images of some leave room for a target.

    Raises:
        ConfigError: if none does: texts alone would be trained.
    """
    begins, ends = (np.array([sum(numbers) for numbers in documents[name]]) for name in ("image_begins", "image_ends"))
    num_tokens = (ends - begins)[ends > begins]
    fewest, most = (num_tokens.min(), num_tokens.max()) if len(num_tokens) else (0, 0)
    if fewest >= longest:
        raise ConfigError(
            f"the images of a row take {fewest:,} to {most:,} tokens, and --max_length is {longest:,}: no answer is left; "
            "raise it, or give smaller images (--image_max_pixels)"
        )


def with_pixels(rows: list[dict], processor: ProcessorMixin, places: Sequence[str]) -> list[dict]:
    """Return rows with some of the values of their `pixels`; see `pixels_shown`. `places` name the rows in errors."""
    extended = []
    for row, where in zip(rows, places, strict=True):
        images = [decoded(image_bytes(image, where), f"{where}, {image['path']}") for image in row["images"]]
        extended.append(row | {"pixels": pixels_shown(processor, images) if images else []})
    return extended


def with_files(run: Run[Any], rows: list[dict]) -> list[dict]:
    """Return rows whose images are files: those that are not are written into the output directory.

    Raises:
        ConfigError: if a file of the user is in the way.
    """
    folder, saved = run.output_dir.resolve() / "images", []
    for row in rows:
        images = []
        for image in row["images"]:
            # Beside the bytes there may be a path, that of a file elsewhere.
            if image["bytes"] is not None and not run.args.data_only:
                file = folder / image_checksum(image["bytes"])
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except FileExistsError:
                    raise ConfigError(f"{folder} is a file, where images are to be written; move it away") from None
                file.write_bytes(image["bytes"])
                image = {"path": str(file), "bytes": None}
            images.append(image)
        saved.append(row | {"images": images})
    return saved
