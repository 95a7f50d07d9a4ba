"""Tar shards of images as in WebDataset: an image is a member `NAME.jpg`, and its label the member `NAME.cls`.

For tarfile, a damaged header is the end of a tar; it silently leaves out the rest. Here, a damaged tar is an error.

Shards on the network are read as streams, and never stored on a disk. `data.streams` decides the order of the images and the
content of a checkpoint. For it, an image is a document of one token and also a row. So the images of step n and their
augmentation follow from the seed and n. The partner of a mixed image is drawn from the images that its stream shuffles
together: these are in memory, also after a resume.
"""

import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from PIL import Image
from torch.utils.data import default_collate

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.documents import CHUNK, Chunks, read_again
from accelerate_recipes.data.files import some_names
from accelerate_recipes.data.reading import reading
from accelerate_recipes.data.shards import shards_version
from accelerate_recipes.data.stream_order import Row
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import DataError
from accelerate_recipes.images.augmentation import Preparation, decode

TAR = ".tar"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
GZIP = b"\x1f\x8b"
T = TypeVar("T")


class TarImage(NamedTuple):
    """Undecoded image of a shard, with its label."""

    name: str  # of its member
    content: bytes
    label: str


class Member(tarfile.TarInfo):
    """Member of a tar; a damaged header is an error."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "Member":  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            raise
        except (tarfile.HeaderError, ValueError) as error:
            raise tarfile.ReadError(f"the header at byte {tar.offset} is missing or damaged ({error})") from None


def images_and_labels(tar: tarfile.TarFile, shard: str) -> Iterator[tuple[int, str, bool, tarfile.TarInfo]]:
    """Yield the members that are an image or a label, to the end of a tar: (number, NAME, whether it is an image, member).

    The number counts the names, of which the two members follow each other.

    Raises:
        DataError: for an image or a label that is a link.
        tarfile.TarError: for a tar that is cut off or damaged.
    """
    number, last = -1, None
    while member := tar.next():
        tar.members = []  # tarfile would keep all members in memory
        stem, _, suffix = member.name.rpartition(".")
        is_image = suffix.lower() in IMAGE_SUFFIXES
        if member.isdir() or not (is_image or suffix == "cls"):
            continue
        if not member.isreg():
            raise DataError(f"{shard}: {member.name} is a link; pack it by `tar --dereference --hard-dereference`")
        number, last = number + (stem != last), stem
        yield number, stem, is_image, member
    while rest := tar.fileobj.read(CHUNK):
        if rest.strip(b"\0"):
            raise tarfile.ReadError("more follows its end; tars cannot be joined by `cat`")


def with_labels(parts: Iterable[tuple[str, bool, T]], shard: str) -> Iterator[tuple[T, T]]:
    """Yield (image, label) of each NAME from parts (NAME, whether it is an image, image or label).

    Raises:
        DataError: for an image without a label, a label without an image, and two members of one name.
    """
    names = set()
    for name, same in groupby(parts, key=lambda part: part[0]):
        pair: dict[bool, T] = {}
        for _, is_image, content in same:
            if is_image in pair or name in names:
                raise DataError(
                    f"{shard} has two {'images' if is_image else 'labels'} called {name}; give each image its own name, and "
                    "put its two members one after the other"
                )
            pair[is_image] = content
        names.add(name)
        if len(pair) < 2:
            raise DataError(
                f"{shard}: {name} has no {'label' if True in pair else 'image'} beside it; the members {name}.jpg and "
                f"{name}.cls must follow each other"
            )
        yield pair[True], pair[False]


def stream_images(chunks: Iterable[bytes], first: int, *, shard: str, stride: int) -> Iterator[TarImage]:
    """Yield images `first`, `first + stride`, ... of a shard in one pass; of other images, read only the names.

    The two members of an image must follow each other. Members of other kinds are ignored.

    Raises:
        DataError: for members that `with_labels` refuses, and for a compressed tar.
        tarfile.ReadError: for a shard that is cut off or damaged.
    """
    chunks = iter(chunks)
    begin = next(chunks, b"")
    if begin.startswith(GZIP):
        raise DataError(f"{shard} is compressed; unpack it by `gunzip`: images hardly become smaller")
    try:
        with tarfile.open(fileobj=Chunks(chain([begin], chunks)), mode="r|", tarinfo=Member) as tar:  # pyright: ignore[reportCallIssue]

            def content(number: int, member: tarfile.TarInfo) -> bytes:
                is_wanted = number >= first and (number - first) % stride == 0
                return tar.extractfile(member).read() if is_wanted else b""  # pyright: ignore[reportOptionalMemberAccess]

            parts = (
                (name, is_image, (member.name, content(number, member)))
                for number, name, is_image, member in images_and_labels(tar, shard)
            )
            for (image, pixels), (file, label) in islice(with_labels(parts, shard), first, None, stride):
                yield TarImage(image, pixels, text_of_label(label, f"{shard}: {file}"))
    except tarfile.TarError as error:
        raise tarfile.ReadError(f"is not a whole tar: {error}") from None


def text_of_label(content: bytes, where: str) -> str:
    """Decode a label; raise DataError if it is not UTF-8."""
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8, so no label") from None


# Streams


SHUFFLED = 256  # images that every stream holds in memory, about 28 MB of ImageNet's files


class ImageShards(Preparation):
    """Source of a stream's images: tar shards. `names` are the names of the classes; more arguments are Preparation's."""

    def __init__(self, shards: Sequence[str], names: Sequence[str], *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.shards, self.names = shards, names
        self.number_of = {name: number for number, name in enumerate(names)}

    def version(self) -> dict[str, str]:
        return shards_version(self.shards) | {"classes": xxhash.xxh3_128_hexdigest(repr(list(self.names)).encode())}

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[tuple[int, TarImage]]:
        parse = partial(stream_images, shard=self.shards[shard], stride=stride)
        return read_again(self.shards[shard], first, stride, parse, on_retry)

    def tokens(
        self, shard: int, documents: Sequence[tuple[int, TarImage]], first: int = 0, epoch: int = 0
    ) -> Iterator[np.ndarray]:
        for _, image in documents:
            if image.label not in self.number_of:
                raise DataError(
                    f"{self.shards[shard]}, {image.name}: the label {image.label!r} is none of the {some_names(self.names)} "
                    "classes of the images to evaluate on; give --eval_files with images of each class"
                )

        def labelled(position: int) -> tuple[Image.Image, int]:
            _, image = documents[position]
            with reading(f"{self.shards[shard]}, {image.name}: the image"):
                return self.checked(decode(image.content)), self.number_of[image.label]

        for position in range(first, len(documents)):
            index, _ = documents[position]
            image = self.trained((self.seed, epoch, shard, index), position, len(documents), labelled)
            row = np.empty(1, dtype=object)
            # Use arrays, because each tensor from a worker would need a file descriptor.
            row[0] = {name: value.numpy() for name, value in image.items()} | {"row": np.array([epoch, shard, index])}
            yield row


class ImageStreams(StreamLoader):
    """StreamLoader of images. A batch identifies its images by epoch, number of the shard, and place in the shard."""

    def __init__(self, source: ImageShards, args: TrainArgs, *place: int, num_streams: int, block: int = SHUFFLED):
        super().__init__([source], args, *place, max_length=1, num_streams=num_streams, shuffle_block=block)

    def _batch(self, rows: list[list[Row]], max_length: int) -> dict[str, Any]:
        return default_collate([row.tokens[0] for (row,) in rows])

    def counts(self) -> dict[str, int]:
        counts = super().counts()
        return {"images_seen": counts["documents_seen"], "retries": counts["retries"]}
