"""Tar shards of images as in WebDataset: an image is a member `NAME.jpg`, and its label the member `NAME.cls`.

For tarfile, a damaged header is the end of a tar; it silently leaves out the rest. Here, a damaged tar is an error.
"""

import tarfile
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import NamedTuple, TypeVar

from accelerate_recipes.data.documents import CHUNK, Chunks
from accelerate_recipes.errors import DataError

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
        found: dict[bool, T] = {}
        for _, is_image, content in same:
            if is_image in found or name in names:
                raise DataError(
                    f"{shard} has two {'images' if is_image else 'labels'} called {name}; give each image its own name, and "
                    "put its two members one after the other"
                )
            found[is_image] = content
        names.add(name)
        if len(found) < 2:
            raise DataError(
                f"{shard}: {name} has no {'label' if True in found else 'image'} beside it; the members {name}.jpg and "
                f"{name}.cls must follow each other"
            )
        yield found[True], found[False]


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
