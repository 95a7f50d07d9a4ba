"""Images with labels: read from the Hub, folders, Parquet or tar shards, split, and decoded.

This module handles images that lie on a disk, each at its own place: which of them to evaluate on, and which lie on both
sides. `tars` reads shards from the network.
"""

import contextlib
import os
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from PIL import Image
from torch.utils.data import default_collate

from accelerate_recipes.args import arg
from accelerate_recipes.data.files import class_names, falls_under, other_share, read_split, some_names, text_hash
from accelerate_recipes.data.heldout import RowsArgs, check_apart, repeated
from accelerate_recipes.data.prepared import same_on_machines
from accelerate_recipes.data.reading import reading
from accelerate_recipes.data.shards import HUB, downloaded, hub_file, hub_files, is_named_elsewhere, named_shards
from accelerate_recipes.data.streams import StreamArgs
from accelerate_recipes.errors import ConfigError, DataError, collecting_errors, first_line, suggestion, that_apply
from accelerate_recipes.hub import cache
from accelerate_recipes.images.augmentation import Augmentation, Preparation, decode
from accelerate_recipes.images.tars import TAR, Member, images_and_labels, text_of_label, with_labels
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.ranks import local_main_process_first, on_first_rank, print_first

if TYPE_CHECKING:
    import datasets

NUM_READ = 10_000  # images, evenly spread, whose bytes are compared with a checkpoint's, and with those trained on
MOST_COMPARED = 50_000  # images whose bytes are compared with those of NUM_READ others


class Labelled(NamedTuple):
    """Undecoded images of one side (`train` or held out), with the numbers of their classes and their `rows` in `source`."""

    images: "datasets.Dataset"  # one column, `image`: {"bytes", "path"}
    labels: np.ndarray
    rows: np.ndarray
    source: str

    @property
    def content(self) -> str:
        """Return a checksum of the labels, of sizes or names of the images, and of the bytes of NUM_READ images."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.labels))
        digest.update(np.ascontiguousarray(self.rows))
        for size, name in sizes_and_paths(self):
            digest.update(repr(size or "/".join(Path(name or "").parts[-2:])).encode())
        for number in spread(self):
            with contextlib.suppress(OSError):  # a later step reports a missing image, or leaves it out
                digest.update(read_bytes(self.images[int(number)]["image"]))
        return digest.hexdigest()


def same_images(train: Labelled, test: Labelled) -> tuple[list[int], int]:
    """List the rows of `test` whose images are trained on too, alike to the bit; also return how many rows were compared.

    These are up to NUM_READ rows, and fewer where more than MOST_COMPARED images of `train` would be read: those that have
    the size of one of theirs.
    """
    chosen, sizes, of_train = spread(test), image_sizes(test), image_sizes(train)
    same_size = Counter(filter(None, of_train))
    while sum(same_size[size] for size in {sizes[number] for number in chosen}) > MOST_COMPARED:
        chosen = chosen[1::2]
    common = {sizes[number] for number in chosen} & {*of_train} - {None}
    trained = (digest_of(train, number) for number, size in enumerate(of_train) if size in common)
    evaluated = [digest_of(test, number) if sizes[number] in common else None for number in chosen]
    return [int(chosen[position]) for position in repeated(filter(None, trained), evaluated)], len(chosen)


def digest_of(side: Labelled, number: int) -> int | None:
    """Compute a hash of an image; return None if it cannot be read, which a later step reports."""
    with contextlib.suppress(OSError):
        return xxhash.xxh64_intdigest(read_bytes(side.images[int(number)]["image"]))


def image_sizes(side: Labelled) -> list[int | None]:
    """Return the size of each image; None if there is no such file, which a later step reports."""

    def size(path: str | None) -> int | None:
        with contextlib.suppress(OSError):
            return image_place(path)[2] if path else None

    return [size(path) if inside is None else inside for inside, path in sizes_and_paths(side)]


def sizes_and_paths(side: Labelled) -> Iterator[tuple[int | None, str | None]]:
    """Yield of each image the size of its bytes in the table, if they are there, and its path."""
    import pyarrow.compute as pc

    for chunk in side.images.data.column("image").chunks:
        sizes = pc.binary_length(chunk.field("bytes")).to_pylist()
        yield from zip(sizes, chunk.field("path").to_pylist(), strict=True)


def spread(side: Labelled) -> np.ndarray:
    """Choose NUM_READ images of a side, evenly spread; all if there are fewer."""
    return np.unique(np.linspace(0, len(side.images) - 1, NUM_READ, dtype=int))


def heldout(side: Labelled, share: float) -> np.ndarray:
    """Choose the images to evaluate on, by a hash of their content: images alike to the bit lie on one side.

    Raises:
        ConfigError: if a side is empty.
    """
    digests = map(partial(digest_of, side), range(len(side.images)))  # None if it cannot be read
    contents = [str(number if digest is None else digest) for number, digest in enumerate(digests)]
    chosen = np.array([falls_under(content, share) for content in contents])
    if chosen.all() or not chosen.any():
        raise ConfigError(
            f"none of the {len(chosen):,} images of {side.source} is left to {'train' if chosen.all() else 'evaluate'} on; "
            f"{other_share([*map(text_hash, contents)], share)}, --eval_files, or more images"
        )
    return chosen


def read_bytes(image: dict) -> bytes:
    """Read the bytes of an image from its row, its file, or a tar shard."""
    if image["bytes"] is not None:
        return image["bytes"]
    path, offset, size = image_place(image["path"])
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def image_place(path: str) -> tuple[str, int, int]:
    """Return the file that holds an image, its first byte there, and its size. Raises OSError if there is no such file."""
    shard, *extent = path.rsplit(":", 2)
    if extent and shard.endswith(TAR):
        offset, size = map(int, extent)
        return shard, offset, size
    return path, 0, os.path.getsize(path)


@dataclass
class ImageArgs(Augmentation, StreamArgs, RowsArgs):
    """Arguments that say which images a recipe reads. Put it before TrainArgs in the bases of a recipe's arguments."""

    group = "data"
    train_files: list[str] = arg(
        [],
        "Local .parquet files with images, or .tar shards with `NAME.jpg` and `NAME.cls`, instead of a dataset. Shards that "
        "are URLs or hf://datasets/ORG/NAME/PATH are streamed; PATH may have a *.",
    )
    eval_files: list[str] = arg(
        [], "Files to evaluate on, of the same kinds; those of hf://datasets/ORG/NAME/PATH are downloaded."
    )
    eval_split: str = arg("", "Split of the dataset to evaluate on, instead of a share of the rows.")
    image_column: str = arg("image", "Column with the images.")
    label_column: str = arg("label", "Column with the labels: names, or numbers.")
    heldout_share: float = arg(0.05, "Share of images to evaluate on, by a hash of their content.", above=0, below=1)
    skip_broken_images: bool = arg(False, "Leave out images that cannot be decoded, instead of ending with an error.")

    def problems(self, world_size: int) -> list[str]:
        messages = super().problems(world_size)
        if self.rand_augment:
            try:
                from torchvision.transforms import v2  # noqa: F401 # pyright: ignore[reportMissingImports]
            except Exception as error:  # a torchvision for another torch fails with various errors
                messages.append(
                    f"--rand_augment needs torchvision, but it cannot be imported: {first_line(error)}; install one "
                    "that was built for this torch, from the same index, or give --rand_augment 0"
                )
        split, files = self.eval_split, self.eval_files
        problems = {
            f"--eval_split {split} names a split of a dataset, but there are --train_files; give --eval_files, and "
            "--eval_split ''": split and self.train_files,
            f"--eval_split {split} and --eval_files both say what to evaluate on; remove one": split and files,
            "--train_files are streamed, and no share of a stream can be held out; give --eval_files: .tar or .parquet "
            "files that are here, or hf://datasets/ORG/NAME/PATH, which is downloaded": self.is_streamed and not files,
        }
        return messages + that_apply(problems)

    def file_problems(self, name: str, suffixes: Collection[str], files: Sequence[str] | None = None) -> list[str]:
        if name not in ("train_files", "eval_files"):
            return super().file_problems(name, suffixes)
        named: list[str] = getattr(self, name)
        kinds = (".parquet", TAR)
        problems = super().file_problems(name, kinds, [file for file in named if not is_named_elsewhere(file)])
        for file in filter(is_named_elsewhere, named):
            if name == "train_files" and not file.endswith(TAR):
                problems.append(f"--{name} {file}: what is streamed must end with {TAR}; download it, or pack it so")
            elif name == "eval_files" and not file.startswith(HUB):
                problems.append(
                    f"--{name} {file}: images to evaluate on are not streamed; download it and give its path"
                )
            elif not file.endswith(kinds):
                problems.append(f"--{name} {file}: its name must end with one of {', '.join(kinds)}")
            elif file.startswith(HUB):
                with collecting_errors(problems, f"--{name} "):
                    hub_file(file, streamed=False)
        return problems

    @property
    def is_streamed(self) -> bool:
        """Tell whether the images to train on come from shards on the network."""
        return any(map(is_named_elsewhere, self.train_files))

    def train_shards(self) -> list[str]:
        """Find the shards to stream."""
        return named_shards(self.train_files, [TAR])

    @property
    def row_datasets(self) -> list[cache.HubDataset]:
        evaluated = [hub_file(file, streamed=False) for file in self.eval_files if file.startswith(HUB)]
        if not self.dataset_name:
            return hub_files(self.train_files) + evaluated
        splits = (self.train_split, *filter(None, [self.eval_split]))
        return [cache.HubDataset(self.dataset_name, config=self.dataset_config, splits=splits), *evaluated]

    @property
    def origins(self) -> dict[str, str]:
        return super().origins | ({"test": f"{self.dataset_name}, {self.eval_split}"} if self.eval_split else {})

    def read_files(self, files: list[str]) -> "datasets.Dataset":
        here = [path for file in files for path in (downloaded(file) if file.startswith(HUB) else [file])]
        return read_tars(here) if here[0].endswith(TAR) else super().read_files(here)

    def read_rows(self) -> "dict[str, datasets.Dataset]":
        if self.is_streamed:
            return {"test": self.read_files(self.eval_files)}
        rows = super().read_rows()
        if self.eval_split:
            rows["test"] = read_split(self.row_datasets[0], self.eval_split)
        return rows


def load_images(args: ImageArgs) -> tuple[Labelled | None, Labelled, list[str]]:
    """Read the images to train and to evaluate on, and the names of the classes. Call it on all ranks.

    If the training images are streamed, they are None here, and the images to evaluate on define the classes.

    Raises:
        DataError: for rows that cannot be read, lack a column, or have no label.
        ConfigError: if a side is empty, or if too many images of --eval_files are also trained on.
    """
    import datasets

    tables = local_main_process_first(args.read_rows)
    for name, table in tables.items():
        check_columns(table, args, args.origins[name])
    all_classes = tables.get("train", tables.get("test"))
    of_labels = all_classes.features[args.label_column]
    if isinstance(of_labels, datasets.ClassLabel):
        names = list(of_labels.names)
    else:
        names = class_names(map(str, all_classes.data.column(args.label_column).unique().to_pylist()))
    sides = {}
    for name, table in tables.items():
        images = table.select_columns([args.image_column]).rename_columns({args.image_column: "image"})
        images = images.cast_column("image", datasets.Image(decode=False))
        labels = numbered(table, args.label_column, names, args.origins[name])
        sides[name] = Labelled(images, labels, np.arange(len(images)), args.origins[name])
        same_on_machines(xxhash.xxh3_128_hexdigest(labels), f"the checksum of the labels in {args.origins[name]}")
    if sides.keys() == {"train", "test"}:
        both, compared = on_first_rank(lambda: same_images(sides["train"], sides["test"]))
        if args.eval_files and both:
            check_apart(both, compared, f"are images of {args.source} too", f"row {both[0] + 1}")
        if both:
            print_first(f"{len(both):,} of {compared:,} images of {args.origins['test']} are also trained on")
    if "test" not in sides:
        whole = sides["train"]
        is_heldout = on_first_rank(lambda: heldout(whole, args.heldout_share))
        for name, chosen in (("train", np.flatnonzero(~is_heldout)), ("test", np.flatnonzero(is_heldout))):
            images = whole.images.select(chosen).flatten_indices()
            sides[name] = Labelled(images, whole.labels[chosen], chosen, whole.source)
    for side in sides.values():
        if not len(side.images):
            raise ConfigError(f"{side.source} has no images; give others")
    return sides.get("train"), sides["test"], names


def check_columns(table: "datasets.Dataset", args: ImageArgs, source: str) -> None:
    """Raise DataError for a column that is missing, or whose type cannot hold images or labels."""
    import datasets

    for flag in ("image_column", "label_column"):
        if (column := getattr(args, flag)) not in table.column_names:
            raise DataError(
                f"{source} has no column {column!r}; there are {', '.join(table.column_names)}; set --{flag}"
                + suggestion(column, table.column_names)
            )
    if not isinstance(table.features[args.image_column], datasets.Image):
        raise DataError(f"{source}: {args.image_column!r} holds {table.features[args.image_column]}, not images")
    label = table.features[args.label_column]
    if not isinstance(label, datasets.ClassLabel | datasets.Value) or label.dtype.startswith("float"):
        raise DataError(f"{source}: {args.label_column!r} holds {label}, not one name or number; set --label_column")
    for column in (args.image_column, args.label_column):
        if missing := table.data.column(column).null_count:
            raise DataError(f"{source}: {column!r} is null in {missing} of {len(table)} rows")


def numbered(table: "datasets.Dataset", column: str, names: Sequence[str], source: str) -> np.ndarray:
    """Return the number of each row's class. Raises DataError for other classes, and for a label of no class."""
    import datasets

    labels, feature = table.with_format("arrow")[column][:].to_pylist(), table.features[column]
    number_of = {name: number for number, name in enumerate(names)}
    if not isinstance(feature, datasets.ClassLabel):
        numbers = [number_of.get(str(label), -1) for label in labels]
    elif feature.names == names:  # not by name: two classes of ImageNet are called "crane"
        numbers = labels
    elif len({*feature.names}) == len(feature.names) and len({*names}) == len(names) and {*feature.names} <= {*names}:
        in_order = [number_of[name] for name in feature.names]  # such as 0, 1, 10, 2, the order of texts
        numbers = [in_order[label] if 0 <= label < len(in_order) else -1 for label in labels]
    else:
        raise DataError(
            f"{source} has the classes {some_names(feature.names)}, but those trained on are {some_names(names)}; give both "
            "the same"
        )
    for row, (label, number) in enumerate(zip(labels, numbers, strict=True), 1):
        if not 0 <= number < len(names):
            raise DataError(f"{source}, row {row}: the label {label!r} is none of the {len(names)} classes trained on")
    return np.array(numbers, dtype=np.int64)


def read_tars(files: Sequence[str]) -> "datasets.Dataset":
    """List the images in tar shards. The images stay in the shards; each is read when it is needed.

    Each image is a member `NAME.jpg` (or .jpeg, .png, .webp) with its label in `NAME.cls`.

    Raises:
        DataError: for a shard that cannot be read, and for a member without its label.
    """
    import datasets

    columns = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("string")})
    with reading(", ".join(files)):
        rows = datasets.Dataset.from_generator(
            members, features=columns, gen_kwargs={"files": list(files), "versions": [*map(cache.file_version, files)]}
        )
    return rows.cast_column("image", datasets.Image())  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


def members(files: list[str], versions: list) -> Iterator[dict]:
    """Yield the place and the label of each image of the shards; if `versions` change, `datasets` lists the shards again."""
    for file in files:
        with reading(file), tarfile.open(file, "r:", tarinfo=Member) as shard:  # "r:": compressed tars have no offsets
            parts = []
            for _, stem, is_image, member in images_and_labels(shard, file):
                if is_image:
                    content = f"{os.path.abspath(file)}:{member.offset_data}:{member.size}"
                else:
                    content = text_of_label(shard.extractfile(member).read(), f"{file}: {member.name}")  # pyright: ignore[reportOptionalMemberAccess]
                parts.append((stem, is_image, content))
            for path, label in with_labels(sorted(parts), file):  # the two members of an image may lie apart
                yield {"image": {"bytes": None, "path": path}, "label": label}


class Images(Preparation, torch.utils.data.Dataset):
    """Images of one side as tensors.

    With N rows, number n is row n % N of epoch n // N. Number -1 fills a place in a batch for which no row is left.
    """

    def __init__(self, side: Labelled, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.side = side

    def __len__(self) -> int:
        return len(self.side.images)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return `row`, and the result of `trained`; without augmentation, `pixel_values` and `labels`.

        An image that cannot be decoded gives `error`: an exception in a loader's worker would print its whole traceback.
        """
        epoch, row = divmod(number, len(self)) if number >= 0 else (0, -1)
        try:
            if self.augmentation is None:
                sample = self.evaluated(row)
            else:
                sample = self.trained((self.seed, epoch, max(row, 0)), row, len(self), self.labelled)
        except DataError as error:
            return {"error": str(error)}
        return sample | {"row": torch.tensor(row)}

    def evaluated(self, row: int) -> dict[str, torch.Tensor]:
        """Prepare the image of a row with the model's own processor. Raises DataError."""
        image, label = self.decoded(self.labelled, row)
        height, width = self.size
        pixels = self.by_processor(image or Image.new("RGB", (width, height)))
        return {"pixel_values": pixels, "labels": torch.tensor(label)}

    def labelled(self, row: int) -> tuple[Image.Image | None, int]:
        """Return the image and the label of a row; for -1, no image and no target. Raises DataError that names the row."""
        return (self.image(row), int(self.side.labels[row])) if row >= 0 else (None, IGNORE_INDEX)

    def image(self, row: int) -> Image.Image:
        """Decode the image of a row. Raises DataError that names the row."""
        image = self.side.images[row]["image"]
        name = f" ({image['path']})" if image["path"] else ""
        with reading(f"{self.side.source}, row {self.side.rows[row] + 1}{name}: the image"):
            return self.checked(decode(read_bytes(image)))


def collate_images(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put images into a batch; if an image has an error, the batch holds only the error."""
    broken = next((row for row in rows if "error" in row), None)
    return broken or default_collate(rows)
