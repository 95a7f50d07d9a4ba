"""Images on two sides, to train and to evaluate on: their content, which lie on which side, and which lie on both."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from accelerate_recipes.data.files import falls_under
from accelerate_recipes.data.heldout import repeated
from accelerate_recipes.data.tars import TAR
from accelerate_recipes.errors import ConfigError

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
    return [int(chosen[place]) for place in repeated(filter(None, trained), evaluated)], len(chosen)


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
    contents = map(partial(digest_of, side), range(len(side.images)))  # None if it cannot be read
    chosen = np.array([falls_under(str(n if found is None else found), share) for n, found in enumerate(contents)])
    if chosen.all() or not chosen.any():
        raise ConfigError(
            f"none of the {len(chosen):,} images of {side.source} is left to {'train' if chosen.all() else 'evaluate'} on; "
            f"change --heldout_share {share}, give --eval_files, or more images"
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
    shard, *place = path.rsplit(":", 2)
    if place and shard.endswith(TAR):
        offset, size = map(int, place)
        return shard, offset, size
    return path, 0, os.path.getsize(path)
