"""Images on two sides, to train and to evaluate on: their content, which lie on which side, and which lie on both."""

import contextlib
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from PIL import Image

from accelerate_recipes.data.augmentation import decode
from accelerate_recipes.data.documents import reading
from accelerate_recipes.data.heldout import repeated
from accelerate_recipes.data.tars import TAR
from accelerate_recipes.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets

THUMBNAIL = 16  # pixels of a side of the thumbnails by which images are compared
ALIKE = 0.99  # two thumbnails with a higher correlation show the same image
NUM_READ = 10_000  # images, evenly spread, whose bytes are compared with a checkpoint's, and with those trained on
MOST_COMPARED = 50_000  # images that can be compared; each is compared with all others


class Labelled(NamedTuple):
    """Undecoded images of one side (`train` or held out), with the numbers of their classes and their `rows` in `source`."""

    images: "datasets.Dataset"  # one column, `image`: {"bytes", "path"}
    labels: np.ndarray
    rows: np.ndarray
    source: str

    @property
    def content(self) -> str:
        """Return a checksum of the labels, of sizes or names of the images, and of the bytes of NUM_READ images."""
        import pyarrow.compute as pc

        column = self.images.data.column("image")
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.labels))
        digest.update(np.ascontiguousarray(self.rows))
        for chunk in column.chunks:
            sizes = pc.binary_length(chunk.field("bytes")).to_pylist()
            names = chunk.field("path").to_pylist()
            for size, name in zip(sizes, names, strict=True):
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
    return [int(chosen[place]) for place in repeated(filter(None, trained), evaluated)], len(chosen)


def digest_of(side: Labelled, number: int) -> int | None:
    """Compute a hash of an image; return None if it cannot be read, which a later step reports."""
    with contextlib.suppress(OSError):
        return xxhash.xxh64_intdigest(read_bytes(side.images[int(number)]["image"]))


def image_sizes(side: Labelled) -> list[int | None]:
    """Return the size of each image; None if there is no such file, which a later step reports."""
    import pyarrow.compute as pc

    def size(path: str | None) -> int | None:
        with contextlib.suppress(OSError):
            return image_place(path)[2] if path else None

    return [
        size(path) if inside is None else inside
        for chunk in side.images.data.column("image").chunks
        for inside, path in zip(
            pc.binary_length(chunk.field("bytes")).to_pylist(), chunk.field("path").to_pylist(), strict=True
        )
    ]


def spread(side: Labelled) -> np.ndarray:
    """Choose NUM_READ images of a side, evenly spread; all if there are fewer."""
    return np.unique(np.linspace(0, len(side.images) - 1, NUM_READ, dtype=int))


def heldout(side: Labelled, share: float, skips_broken: bool) -> np.ndarray:
    """Choose the images to evaluate on. Images that look alike, directly or through other images, lie on one side.

    The smallest hash of the contents of a group decides for the group, so the order of the rows does not matter.

    Raises:
        DataError: for an image that cannot be decoded.
        ConfigError: for more images than can be compared, and if a side is empty.
    """
    if len(side.images) > MOST_COMPARED:
        raise ConfigError(
            f"{side.source} has {len(side.images):,} images, of which no more than {MOST_COMPARED:,} are compared with each "
            "other to hold some out; give --eval_split or --eval_files"
        )
    thumbnails = np.zeros((len(side.images), THUMBNAIL**2))
    digests = []
    for number, row in enumerate(side.images):
        image = row["image"]  # pyright: ignore[reportCallIssue, reportArgumentType, reportIndexIssue]
        digest: int = number
        try:
            with reading(f"{side.source}, row {side.rows[number] + 1}: the image"):
                content = read_bytes(image)
                digest = xxhash.xxh64_intdigest(content)
                small = decode(content).convert("L").resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
                thumbnails[number] = np.asarray(small, dtype=np.float64).ravel()
        except DataError:
            if not skips_broken:
                raise
        digests.append(digest)
    group = groups_of_alike(thumbnails)
    first = {}
    for number, root in enumerate(group):
        first[root] = min(first.get(root, math.inf), digests[number])
    # The minimum of several hashes is not uniform: hash it again.
    sides = {root: xxhash.xxh64_intdigest(str(digest).encode()) < share * 2**64 for root, digest in first.items()}
    chosen = np.array([sides[root] for root in group], dtype=bool)
    if chosen.all() or not chosen.any():
        raise ConfigError(
            f"none of the {len(chosen):,} images of {side.source} is left to {'train' if chosen.all() else 'evaluate'} on: "
            f"they make {len(first):,} groups of images that look alike, and a group lies on one side; change "
            f"--heldout_share {share}, give --eval_files, or more images"
        )
    return chosen


def groups_of_alike(thumbnails: np.ndarray) -> list[int]:
    """Return for each thumbnail the number of the first in its group; a correlation above ALIKE joins two into one group."""
    centred = thumbnails - thumbnails.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    centred /= np.where(norms, norms, 1)  # an image of one colour becomes zero: similar to no other
    # Each image begins as a group of its own. Whenever images are alike, all their groups get the smallest of their numbers.
    root = np.arange(len(centred))
    for start in range(0, len(centred), 1024):
        for is_alike in centred[start : start + 1024] @ centred[start:].T > ALIKE:
            roots = root[start:][is_alike]
            if len(roots) and (roots != roots[0]).any():  # most images join no groups: skip the costly line
                root[np.isin(root, roots)] = roots.min()
    return root.tolist()


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
    shard, *place = path.rsplit(":", 2)
    if place and shard.endswith(TAR):
        offset, size = map(int, place)
        return shard, offset, size
    return path, 0, os.path.getsize(path)
