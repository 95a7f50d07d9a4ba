"""Images of tar shards that are read as streams from the network, and never stored on a disk.

`streams` decides the order of the images and the content of a checkpoint. For it, an image is a document of one token and
also a row. So the images of step n and their augmentation follow from the seed and n. The partner of a mixed image is drawn
from the images that its stream shuffles together: these are in memory, also after a resume.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash
from PIL import Image
from torch.utils.data import default_collate

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.documents import read_again
from accelerate_recipes.data.reading import reading
from accelerate_recipes.data.shards import shards_version
from accelerate_recipes.data.stream_order import Row
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import DataError
from accelerate_recipes.images.augmentation import Preparation, decode
from accelerate_recipes.images.labelled import some_names
from accelerate_recipes.images.tars import TarImage, stream_images

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
        for _, found in documents:
            if found.label not in self.number_of:
                raise DataError(
                    f"{self.shards[shard]}, {found.name}: the label {found.label!r} is none of the {some_names(self.names)} "
                    "classes of the images to evaluate on; give --eval_files with images of each class"
                )

        def labelled(place: int) -> tuple[Image.Image, int]:
            _, found = documents[place]
            with reading(f"{self.shards[shard]}, {found.name}: the image"):
                return self.checked(decode(found.content)), self.number_of[found.label]

        for place in range(first, len(documents)):
            index, _ = documents[place]
            found = self.trained((self.seed, epoch, shard, index), place, len(documents), labelled)
            row = np.empty(1, dtype=object)
            # Use arrays, because each tensor from a worker would need a file descriptor.
            row[0] = {name: value.numpy() for name, value in found.items()} | {"row": np.array([epoch, shard, index])}
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
