"""Measure how many images a second the loader of recipes/vit.py makes, beside loaders as users write them.

    python benchmarks/image_throughput.py --out benchmarks/results/image_throughput.json

The images are photographs of no content: smooth noise of 500 x 375 pixels, as JPEG in a Parquet file. Each loader decodes,
crops by chance, resizes to 224 x 224, mirrors, and normalises. "this recipe, streamed" reads them as tar shards from a web
server, a process of its own on the same machine. They run in turns, so that a disturbance meets all alike; a loader's figure
is its median round. "datasets and DataLoader" is `with_transform` with PIL's resize, as in transformers'
examples without torchvision. torchvision's is measured where `import torchvision` works, else it is "not run".
"""

import argparse
import contextlib
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import torch
from machine import machine
from PIL import Image
from torch.utils.data import DataLoader

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.augmentation import Augmentation, random_box
from accelerate_recipes.data.image_streams import ImageShards, ImageStreams
from accelerate_recipes.data.images import Images, Labelled, collate_images
from accelerate_recipes.data.rows import EpochOrder, make_train_loader
from accelerate_recipes.vision.classifiers import new_image_processor

SIZE, BATCH, SHARDS = 224, 32, 8


def photographs(number: int) -> datasets.Dataset:
    """Make images that cost as much to decode as photographs."""
    generator, rows = np.random.default_rng(0), []
    for _ in range(number):
        small = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        out = io.BytesIO()
        small.resize((500, 375), Image.Resampling.BICUBIC).save(out, format="jpeg", quality=90)
        rows.append({"bytes": out.getvalue(), "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": rows, "label": [0] * number}, features=features)


def ours(table: datasets.Dataset, workers: int) -> Iterable[dict]:
    images = table.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    side = Labelled(images, np.zeros(len(table), dtype=np.int64), np.arange(len(table)), "images")
    args = TrainArgs(total_batch_size=BATCH, per_device_train_batch_size=BATCH, dataloader_num_workers=workers)
    rows = Images(side, new_image_processor(SIZE), Augmentation())
    return make_train_loader(rows, args, 0, 1, collate_fn=collate_images, order_class=EpochOrder)


def write_shards(table: datasets.Dataset, folder: Path) -> list[str]:
    """Write the images as tar shards, each member's name being its place; returns the names of the files."""
    names = [f"images-{number}.tar" for number in range(SHARDS)]
    images = table.cast_column("image", datasets.Image(decode=False))["image"]
    for number, name in enumerate(names):
        with tarfile.open(folder / name, "w") as tar:
            for place in range(number, len(table), SHARDS):
                for suffix, content in (("jpg", images[place]["bytes"]), ("cls", b"0")):
                    member = tarfile.TarInfo(f"{place:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return names


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve a folder; yields its address."""
    argv = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            address = re.search(r"http://[\d.:]+", process.stdout.readline())
            yield address[0]
        finally:
            process.kill()


def streamed(shards: list[str]) -> Callable:
    """Make the loader of the recipe for tar shards at these addresses."""

    def make(table: datasets.Dataset, workers: int) -> Iterable[dict]:
        args = TrainArgs(total_batch_size=BATCH, per_device_train_batch_size=BATCH, dataloader_num_workers=workers)
        source = ImageShards(shards, ["0"], new_image_processor(SIZE), Augmentation(), seed=0)
        return ImageStreams(source, args, 0, 1, num_streams=SHARDS)

    return make


def with_transform(table: datasets.Dataset, workers: int) -> Iterable[dict]:
    generator = np.random.default_rng()

    def transform(batch: dict) -> dict:
        pixels = []
        for image in batch["image"]:
            top, left, height, width = random_box(image.height, image.width, 0.08, generator)
            box = (left, top, left + width, top + height)
            small = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
            small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else small
            pixels.append((torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5)
        return {"pixel_values": pixels, "labels": batch["label"]}

    return DataLoader(table.with_transform(transform), batch_size=BATCH, shuffle=True, num_workers=workers)


def with_torchvision(table: datasets.Dataset, workers: int) -> Iterable[dict]:
    from torchvision.transforms import v2

    steps = v2.Compose(
        [
            v2.PILToTensor(), v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )  # fmt: skip

    def transform(batch: dict) -> dict:
        return {"pixel_values": [steps(image.convert("RGB")) for image in batch["image"]], "labels": batch["label"]}

    return DataLoader(table.with_transform(transform), batch_size=BATCH, shuffle=True, num_workers=workers)


def images_per_second(make: Callable, table: datasets.Dataset, workers: int) -> float:
    """Time one pass over the table, from the second batch on: the first waits for workers to start."""
    batches = iter(make(table, workers))
    next(batches)
    start, number = time.perf_counter(), len(table) // BATCH - 1
    for _ in islice(batches, number):
        pass
    return number * BATCH / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="Loader workers.")
    parser.add_argument("--out", type=Path, help="File for the result.")
    flags = parser.parse_args()

    torch.set_num_threads(1)
    loaders = {"this recipe": ours, "datasets and DataLoader": with_transform}
    found: dict = {"machine": machine(torch.device("cpu")), "images_per_second": {}}
    try:
        import torchvision  # noqa: F401

        loaders["datasets and torchvision"] = with_torchvision
    except Exception as error:  # its PyPI build does not load beside a CPU build of torch
        found["datasets and torchvision"] = f"not run: {type(error).__name__}: {error}"
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address:
        photographs(flags.images).to_parquet(Path(folder) / "images.parquet")
        table = datasets.load_dataset("parquet", data_files=f"{folder}/images.parquet", split="train", cache_dir=folder)
        names = write_shards(table, Path(folder))
        loaders["this recipe, streamed"] = streamed([f"{address}/{name}" for name in names])
        rounds: dict = {(name, workers): [] for workers in flags.workers for name in loaders}
        for _ in range(flags.rounds):
            for (name, workers), speeds in rounds.items():
                speeds.append(images_per_second(loaders[name], table, workers))
    for (name, workers), speeds in rounds.items():
        key = f"{name}, {workers} workers"
        found["images_per_second"][key] = {"median": statistics.median(speeds), "rounds": speeds}
    text = json.dumps(found, indent=1)
    print(text)
    if flags.out:
        flags.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
