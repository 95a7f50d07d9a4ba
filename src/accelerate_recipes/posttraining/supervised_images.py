"""Supervised fine-tuning on rows with images: from their files to batches of whole documents, each with its images.

The order and the tokens of rows follow from texts and sizes of images alone. Data workers read and decode the images.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from accelerate_recipes.checkpoint.exported import Exported, as_exported
from accelerate_recipes.data import image_texts, rendering
from accelerate_recipes.data.image_rows import load_image_sides
from accelerate_recipes.data.image_sizes import Patches, known_sizes
from accelerate_recipes.data.image_texts import DOCUMENTS, ImageTexts, Size, cut_documents, rendered_documents
from accelerate_recipes.data.packing import pack
from accelerate_recipes.data.passes import made_of
from accelerate_recipes.data.pictures import Pictures, checked_image, decoded, image_bytes, image_checksum, pixels_shown
from accelerate_recipes.data.prepared import lengths_of
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.metrics import Flops, size_and_share
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.composites import weights_by_part
from accelerate_recipes.models.documents import text_positions
from accelerate_recipes.models.image_probe import check_whole
from accelerate_recipes.models.images import image_model_on_meta, join_documents
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.posttraining.supervised import (
    SupervisedRows,
    check_answers_are_left,
    ends_of,
    first_rendered,
    is_packed,
)
from accelerate_recipes.posttraining.supervised_loss import flops_of_rows
from accelerate_recipes.posttraining.trained_rows import (
    USES,
    check_rows_are_left,
    check_same_targets,
    check_same_template,
    compare_with_rendering,
    content_of_sides,
    count_targets_of,
    cut_at,
    of_answers,
    tell_of_parts,
)
from accelerate_recipes.ranks import on_first_of_machine_before_others, on_first_rank
from accelerate_recipes.run import Run

NO_LIMIT = 1 << 40  # tokens of a document
SMALL = (96, 96)
BLANK = (32, 32)  # size of the image of a batch without images
SIZES_TO_TRY = [(32, 32), (64, 32)]


class PackedDocuments(Sequence):
    """Rows of whole documents: numbers of rows of `tokens`, whose images lie in `read`, rows of `source`.

    `patches` has those of each tile of the images.
    """

    def __init__(
        self,
        tokens: datasets.Dataset,
        read: datasets.Dataset,
        documents: Sequence[Sequence[int]],
        source: str,
        patches: Sequence[int],
    ):
        self.tokens, self.documents, self.source, self.patches = tokens, documents, source, patches
        self.read = read.select_columns(["images", "row"])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> dict[str, Any]:
        found = self.tokens[[*self.documents[number]]]
        read = [self.read[source] for source in found["source"]]
        return {
            "input_ids": [token for ids in found["input_ids"] for token in ids],
            "labels": [label for labels in found["labels"] for label in labels],
            "seq_lengths": [*map(len, found["input_ids"])],
            "images": [row["images"][: len(sums)] for row, sums in zip(read, found["checksums"], strict=True)],
            "checksums": found["checksums"],
            "image_begins": found["image_begins"],
            "places": [f"{self.source}, row {row['row']}" for row in read],
        }

    def sum_of(self, counts: np.ndarray) -> np.ndarray:
        """Sum a number of each document over the documents of each row."""
        return np.array([counts[[*numbers]].sum() for numbers in self.documents])


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
        for images, checksums, place in zip(row["images"], row["checksums"], row["places"], strict=True):
            for number, (image, of_image) in enumerate(zip(images, checksums, strict=True), 1):
                said = f"{place}, image {number}"
                yield decoded(checked_image(image, of_image, said), said)

    def show(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch to show: rows with padding, and small images, by the places of their tokens in a row."""
        longest = max(len(row["input_ids"]) for row in rows)
        filled: dict[str, list] = {
            name: [] for name in ("input_ids", "labels", "attention_mask", "position_ids", "images")
        }
        for row in rows:
            padding = longest - len(row["input_ids"])
            places = [place for length in row["seq_lengths"] for place in range(length)]
            labels = [IGNORE_INDEX if place == 0 else label for place, label in zip(places, row["labels"], strict=True)]
            filled["input_ids"].append(row["input_ids"] + [0] * padding)
            filled["labels"].append(labels + [IGNORE_INDEX] * padding)
            filled["attention_mask"].append([1] * len(places) + [0] * padding)
            filled["position_ids"].append(places + [1] * padding)
            starts = itertools.accumulate(row["seq_lengths"], initial=0)
            begins = [start + begin for start, some in zip(starts, row["image_begins"], strict=False) for begin in some]
            filled["images"].append(dict(zip(begins, map(small, self.images_in(row)), strict=True)))
        return {name: values if name == "images" else torch.tensor(values) for name, values in filled.items()}

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        try:
            documents = [document for row in rows for document in self.documents(row)]
        except DataError as error:
            return {"error": str(error)}
        if not any("pixel_values" in document for document in documents):
            documents.append(self.blank)
        batch = join_documents(self.base, documents)
        batch["labels"][text_positions(batch["position_ids"]) == 0] = IGNORE_INDEX
        return batch | {"places": [place for row in rows for place in row["places"]]}


def documents_to_try(collate: ImageCollator) -> list[dict[str, torch.Tensor]]:
    """Make documents with two images, with none and with one, of two sizes and colours, for `check_whole`."""
    tokenizer, found = collate.processor.tokenizer, []
    for sizes in (SIZES_TO_TRY, [], SIZES_TO_TRY[1:]):
        texts = [collate.pictures.of_size(*size, len(sizes) > 1)[0] for size in sizes]
        ids: Any = tokenizer("1".join(["2 ", *texts, " 3 4 5"]), add_special_tokens=False)["input_ids"]
        images = [Image.new("RGB", size, (10, 20, 30 + 50 * len(found) + size[0])) for size in sizes]
        found.append(collate.document(ids, ids, images))
    return found


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
    sides, written = on_first_of_machine_before_others(lambda: load_image_sides(args, processor, stops))
    if run.resumed_from:
        check_same_template(tokenizer, run.resumed_from)
        check_same_targets(args, sides["train"].features, run.resumed_from)
    sizes = itertools.chain(*(sizes_in(rows, args.sources[side] or args.source) for side, rows in sides.items()))
    know_all = partial(known_sizes, processor, model.config, sizes, args.dataset_num_proc)
    texts, patches = on_first_of_machine_before_others(know_all)
    how = {"assistant_only": of_answers(args, sides["train"].features), "stops": sorted(stops)}
    longest = args.max_length or NO_LIMIT
    whole, cut, packed, first, added = {}, {}, {}, [], 0
    for side, rows in sides.items():
        whole[side] = found = render_image_side(run, side, rows, tokenizer, texts, how)
        check_room(found, longest)
        if side == "train":
            added, first = tell_of_parts(run, found), first_rendered(found)
        cut_all = partial(made_of, found, partial(cut_documents, longest=longest), DOCUMENTS, desc="Cutting documents")
        cut[side] = on_first_of_machine_before_others(cut_all)
        check_rows_are_left(sides, {side: cut[side]}, args.max_length)
        lengths = lengths_of(cut[side]).tolist()
        pieces = pack(lengths, longest) if is_packed(args, side) else [[(number,)] for number in range(len(lengths))]
        documents = [[number for number, *_ in row] for row in pieces]
        source = args.sources[side] or args.source
        packed[side] = PackedDocuments(cut[side], rows, documents, source, patches_in(cut[side], rows, patches))
    content = content_of_sides(run, cut["train"], cut["test"])
    exported = Exported(*as_exported(model, tokenizer)[:3], processor)
    targets, *_ = count_targets_of(cut["train"], exported.stops)
    num_ended, ends = ends_of(args, cut["train"], first, exported)
    place = run, exported, base_stops

    def compare() -> None:
        source, numbers = args.sources["train"] or args.source, sides["train"]["row"][: len(written)]
        rows = with_pixels(with_files(run, written), processor, [f"{source}, row {number}" for number in numbers])
        compare_with_rendering(*place, rows, first, ends, **how)

    on_first_rank(compare)
    counts = {"with an end": num_ended} | ({"packed from": len(cut["train"])} if args.packing else {})
    counts |= {"left out": len(sides["train"]) - len(cut["train"]) + added}
    counts |= cut_at(lengths_of(whole["train"]), args.max_length)
    counts |= {"images": sum(len(sums) for sums in cut["train"]["checksums"])}
    counted = {"sides": sides, "num_targets": packed["train"].sum_of(targets), "counts": counts}
    return SupervisedRows(run, packed["train"], packed["test"], collate, content, collate.show, **counted)


def patches_in(documents: datasets.Dataset, read: datasets.Dataset, patches: Patches) -> list[int]:
    """List the patches of all tiles of the images of documents."""
    read = read.select_columns(["widths", "heights"])
    found = []
    for source, sums in zip(documents["source"], documents["checksums"], strict=True):
        row = read[source]
        for width, height, _ in zip(row["widths"], row["heights"], sums, strict=False):
            found += patches[width, height, len(sums) > 1]
    return found


def flops_with_images(args: Any, rows: PackedDocuments, num_targets: int) -> Callable[[PreTrainedModel], Flops]:
    """Return a function that counts the training FLOPs of a model per target of packed documents, images too, for MFU."""
    of_texts = flops_of_rows(args, rows.tokens, num_targets)
    ends, begins = (sum(map(sum, rows.tokens[name])) for name in ("image_ends", "image_begins"))

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


def render_image_side(
    run: Run[Any],
    side: str,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    texts: ImageTexts,
    settings: dict[str, Any],
) -> datasets.Dataset:
    """Render the rows of a side as documents; see `image_texts.rendered_documents`.

    Raises:
        ConfigError: for a row that cannot be rendered, and if none has a target.
    """
    args = run.args
    given = {"features": rows.features, "tokenizer": tokenizer, "date": args.template_date, "texts": texts}
    make = partial(rendered_documents, **given, source=args.sources[side] or args.source, **settings)
    use = f"rows to {USES[side]} on"
    how = {"code": (image_texts, rendering), "num_proc": args.dataset_num_proc, "desc": f"Tokenizing {use}"}
    found = on_first_of_machine_before_others(partial(made_of, rows, make, DOCUMENTS, **how))
    check_answers_are_left(rows, found, use)
    return found


def check_room(documents: datasets.Dataset, longest: int) -> None:
    """Check that, of documents with images, the images of some leave room for a target.

    Raises:
        ConfigError: if none does: texts alone would be trained.
    """
    begins, ends = (np.array([sum(numbers) for numbers in documents[name]]) for name in ("image_begins", "image_ends"))
    found = (ends - begins)[ends > begins]
    fewest, most = (found.min(), found.max()) if len(found) else (0, 0)
    if fewest >= longest:
        raise ConfigError(
            f"the images of a row take {fewest:,} to {most:,} tokens, and --max_length is {longest:,}: no answer is left; "
            "raise it, or give smaller images (--image_max_pixels)"
        )


def with_pixels(rows: list[dict], processor: ProcessorMixin, places: Sequence[str]) -> list[dict]:
    """Return rows with some of the values of their `pixels`; see `pixels_shown`. `places` name the rows in errors."""
    found = []
    for row, place in zip(rows, places, strict=True):
        images = [decoded(image_bytes(image, place), f"{place}, {image['path']}") for image in row["images"]]
        found.append(row | {"pixels": pixels_shown(processor, images) if images else []})
    return found


def with_files(run: Run[Any], rows: list[dict]) -> list[dict]:
    """Return rows whose images are files: those that are not are written into the output directory.

    Raises:
        ConfigError: if a file of the user is in the way.
    """
    folder, found = run.output_dir.resolve() / "images", []
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
        found.append(row | {"images": images})
    return found
