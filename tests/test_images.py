"""Tests of images, in files and in shards that are streamed: what chance does to them, their order, which lie on which side, broken ones."""

import gzip
import io
import itertools
import os
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageColumn
from helpers import ROOT, png, refuses, write_tar
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from PIL import Image
from streaming import Ranks, go_on, no_retry, states_of
from transformers import (
    BitImageProcessorPil,
    ConvNextImageProcessorPil,
    EfficientNetImageProcessorPil,
    MobileViTImageProcessorPil,
    ViTImageProcessorPil,
)

from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.resume import settle_arguments
from accelerate_recipes.data import prepared, streams
from accelerate_recipes.data.files import class_names
from accelerate_recipes.data.prepared import check_content
from accelerate_recipes.data.rows import EpochOrder, make_eval_loader, make_train_loader
from accelerate_recipes.data.shards import find_shards
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images import labelled
from accelerate_recipes.images.augmentation import Augmentation, Preparation, decode, image_size, random_box
from accelerate_recipes.images.classifiers import ImageEvaluation, new_image_processor
from accelerate_recipes.images.labelled import ImageArgs, Images, Labelled, collate_images, load_images, same_images
from accelerate_recipes.images.tars import ImageShards, ImageStreams, stream_images
from accelerate_recipes.launch import requirements

pytestmark = pytest.mark.usefixtures("quick_tries", "worker_server")

PROCESSOR = new_image_processor(16)


@dataclass
class Args(ImageArgs, TrainArgs):
    """Arguments of a recipe that reads images."""


def write_parquet(
    file: Path, images: Iterable[bytes], labels: list, classes: object, columns=("image", "label")
) -> str:
    """Write images, and their labels, which `classes` describe: their names, or a feature."""
    kind = ClassLabel(names=classes) if isinstance(classes, list) else classes
    features = Features(dict(zip(columns, (ImageColumn(), kind), strict=True)))
    parts = [{"bytes": image, "path": None} for image in images], labels
    Dataset.from_dict(dict(zip(columns, parts, strict=True)), features=features).to_parquet(file)
    return str(file)


def write_folder(folder: Path, classes: dict[int, str], name: str = "{:02}") -> None:
    """Write images of noise, each into the folder of its class."""
    for seed, label in classes.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{name.format(seed)}.png").write_bytes(png(seed))


def members(seeds: Iterable[int], label_of: Callable[[int], bytes], name: str = "{:02}") -> list[tuple[str, bytes]]:
    """List the files of a tar of images of noise: each image, and its label."""
    parts = ((i, (("png", png(i)), ("cls", label_of(i)))) for i in seeds)
    return [(f"{name.format(i)}.{suffix}", content) for i, both in parts for suffix, content in both]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("parquet") / "images.parquet"
    return write_parquet(file, map(png, range(40)), [i % 3 for i in range(40)], ["a", "b", "c"])


def sides(files: list[str], **settings: object):
    return load_images(Args(train_files=files, heldout_share=0.25, **settings))


def batches(side, num_steps: int, rank: int = 0, world_size: int = 1, start: int = 0, **settings: object):
    """Return micro-batches of the first steps, as one rank of several reads them."""
    args = Args(
        max_steps=99, total_batch_size=12, per_device_train_batch_size=2, mixup_alpha=0.4, cutmix_alpha=1.0, **settings
    )
    images = Images(side, PROCESSOR, args, args.seed)
    loader = make_train_loader(images, args, rank, world_size, collate_fn=collate_images, order_class=EpochOrder)
    loader.start_at(start, [])
    return list(islice(loader, (num_steps - start) * 6 // world_size))


def by_place(found: list[dict], rank: int, world_size: int) -> dict[tuple[int, int], dict]:
    """Name rows by step and place in the global batch."""
    share, places = 12 // world_size, {}
    for i, batch in enumerate(found):
        for j in range(2):
            step, place = divmod(i * 2 + j, share)
            places[step, rank * share + place] = {name: value[j] for name, value in batch.items()}
    return places


def test_the_same_pixels_on_any_number_of_ranks_and_after_a_resume(parquet):
    """Each image comes once in an epoch; crop, flip and mixture are those of (seed, epoch, row), also from workers."""
    side, _, _ = sides([parquet])
    num_rows, steps = len(side.images), 6  # over two epochs
    assert 24 < num_rows < 40
    whole = by_place(batches(side, steps), 0, 1)
    rows = [int(whole[step, place]["row"]) for step in range(steps) for place in range(12)]
    assert sorted(rows[:num_rows]) == sorted(rows[num_rows : 2 * num_rows]) == list(range(num_rows))
    for world_size in (2, 3):
        found = {}
        for rank in range(world_size):
            found |= by_place(batches(side, steps, rank, world_size, dataloader_num_workers=rank), rank, world_size)
        assert found.keys() == whole.keys()
        for place, row in whole.items():
            assert all(torch.equal(row[name], found[place][name]) for name in row)
    resumed = by_place(batches(side, steps, start=4), 0, 1)
    for (step, place), row in resumed.items():
        assert torch.equal(row["pixel_values"], whole[step + 4, place]["pixel_values"])
    again = [i for i in range(num_rows, steps * 12) if rows[i] == rows[0]]
    first, second = whole[0, 0], whole[divmod(again[0], 12)]
    assert not torch.equal(first["pixel_values"], second["pixel_values"]), "an epoch has its own draws"
    other = by_place(batches(side, 1, seed=1), 0, 1)
    mine = {int(row["row"]): row["pixel_values"] for row in other.values()}
    assert not any(
        torch.equal(row["pixel_values"], mine[int(row["row"])]) for row in whole.values() if int(row["row"]) in mine
    )


def test_mixtures_have_the_share_that_is_said(parquet):
    """A black image mixed with a white one has the brightness that its share says, by mixup and by cutmix."""
    side, _, _ = sides([parquet])
    black, white = torch.zeros(3, 16, 16), torch.full((3, 16, 16), 255.0)
    for settings in ({"mixup_alpha": 0.4}, {"cutmix_alpha": 1.0}):
        images = Images(side, PROCESSOR, Args(**settings))
        found = [images.mixed(black, white, np.random.default_rng(seed)) for seed in range(20)]
        for pixels, share in found:
            assert pixels.mean().item() / 255 == pytest.approx(1 - share, abs=1e-6)
        assert len({share for _, share in found}) > 5
        values = torch.cat([pixels.ravel() for pixels, _ in found]).unique()
        assert (len(values) == 2) == ("cutmix_alpha" in settings)


def test_rand_augment_is_a_function_of_seed_epoch_and_row(parquet, monkeypatch):
    """torchvision's, which draws from torch's one generator: the same again, from several threads too; nothing else changes."""

    class RandAugment:
        def __init__(self, num_ops: int):
            self.num_ops = num_ops

        def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
            assert pixels.dtype == torch.uint8
            return pixels // 2 + sum(torch.randint(0, self.num_ops, pixels.shape, dtype=torch.uint8) for _ in range(9))

    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchvision.transforms", SimpleNamespace(v2=None))
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", SimpleNamespace(RandAugment=RandAugment))
    alone = Augmentation(crop_area=1, horizontal_flip=False, rand_augment=9)  # so that nothing else differs
    images = Images(sides([parquet])[0], PROCESSOR, alone, 0)

    def pixels(row: int) -> torch.Tensor:
        return images[row]["pixel_values"]

    state, rows = torch.random.get_rng_state(), range(2 * len(images))
    found = [*map(pixels, rows)]
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(torch.equal(found[3], found[row]) for row in (4, 3 + len(images)))
    with ThreadPoolExecutor(8) as pool:
        assert all(map(torch.equal, pool.map(pixels, rows), found))
    assert "rand_augment" not in str(Args(rand_augment=2).problems(1))


def test_rand_augment_without_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    found = [text for text in Args(rand_augment=2).problems(1) if "rand_augment" in text]
    assert len(found) == 1 and found[0].startswith("--rand_augment needs torchvision")


def test_crops_lie_inside_and_have_the_area():
    generator = np.random.default_rng(0)
    boxes = [random_box(24, 30, 0.25, generator) for _ in range(300)]
    for top, left, height, width in boxes:
        assert 0 <= top <= top + height <= 24 and 0 <= left <= left + width <= 30
    areas = np.array([height * width / 720 for *_, height, width in boxes])
    assert 0.2 < areas.min() < 0.35 and areas.max() > 0.9 and 0.5 < areas.mean() < 0.75
    assert random_box(1, 1000, 0.9, generator) == (0, 0, 1, 1000), "no such crop: the whole"


WIDE, NO_CROP = {"height": 16, "width": 48}, {"do_center_crop": False}


@pytest.mark.parametrize("processor", [
    ViTImageProcessorPil(size=WIDE), ViTImageProcessorPil(size=WIDE, image_mean=0.4, image_std=0.2),
    BitImageProcessorPil(size={"shortest_edge": 20}, crop_size=WIDE), BitImageProcessorPil(do_resize=False, crop_size=WIDE),
    ConvNextImageProcessorPil(size={"shortest_edge": 24}), ViTImageProcessorPil(size={"height": 24, "width": 24}),
    ViTImageProcessorPil(do_normalize=False), ViTImageProcessorPil(do_rescale=False, image_mean=[99.0] * 3),
], ids=lambda processor: f"{type(processor).__name__[:3]}-{processor.do_resize}-{processor.image_mean}")  # fmt: skip
@pytest.mark.parametrize("mixed", [{}, {"cutmix_alpha": 1.0}])
def test_training_sees_what_evaluation_sees(parquet, processor, mixed):
    """Whatever the processor does to sizes and values: without augmentation, images are the same."""
    side, _, _ = sides([parquet])
    plain = Args(crop_area=1.0, horizontal_flip=False, **mixed)
    trained, evaluated = (Images(side, processor, augmentation) for augmentation in (plain, None))
    for row in range(4):
        views = trained[row]["pixel_values"], evaluated[row]["pixel_values"]
        assert views[0].shape[1:] == views[1].shape[1:] == trained.size == evaluated[-1]["pixel_values"].shape[1:]
        if not mixed:
            torch.testing.assert_close(*views, atol=1e-5, rtol=0)
            assert trained[row].keys() == evaluated[row].keys()
    if processor.do_resize:
        assert Images(side, processor, Args(crop_area=0.5, **mixed))[0]["pixel_values"].shape[1:] == trained.size
        return
    with pytest.raises(ConfigError, match=r"--crop_area 0\.5 .* 16 x 48 pixels.*do_resize.*--crop_area 1"):
        Images(side, processor, Args(crop_area=0.5))


def test_a_processor_that_changes_colours_otherwise():
    """EfficientNet's normalizes twice; MobileViT's exchanges colours, which training sees only if it processes its images."""
    for processor, area in ((EfficientNetImageProcessorPil(), 1), (MobileViTImageProcessorPil(), 0.5)):
        with pytest.raises(ConfigError, match=rf"{type(processor).__name__} .*training would see .* evaluation "):
            Preparation(processor, Args(crop_area=area))
    Preparation(MobileViTImageProcessorPil(), Args(crop_area=1))


@pytest.mark.parametrize("processor, made", [
    (ViTImageProcessorPil(size=WIDE, do_resize=False), "20 x 30"),
    (BitImageProcessorPil(size={"shortest_edge": 10}, **NO_CROP), "10 x 15"),
])  # fmt: skip
def test_images_that_keep_their_sizes_are_named(processor, made, tmp_path):
    """Those of a batch have one size: that of the processor, or it brings them to it."""
    height, width = image_size(processor)
    for name, size in (("1.png", (width, height)), ("2.png", (30, 20))):
        Image.new("RGB", size).save(tmp_path / name)
    rows = Dataset.from_dict({"image": [{"bytes": None, "path": str(tmp_path / name)} for name in ("1.png", "2.png")]})
    side = Labelled(rows, np.zeros(2), np.arange(2), "sizes.parquet")
    for augmentation in (None, Args(crop_area=1), Args(crop_area=0.5)):
        images = Images(side, processor, augmentation)
        assert images[0]["pixel_values"].shape[1:] == (height, width)
        said = images[1]["error"]
        for fact in ("sizes.parquet, row 2", "20 x 30", made, f"{height} x {width}", "preprocessor_config.json"):
            assert fact in said


def test_every_source_gives_the_same_images(parquet, tmp_path):
    """Parquet, a folder of each class, and tar shards hold the same images, and name their classes."""
    folder, shards = tmp_path / "folder/train", [tmp_path / f"shard-{i}.tar" for i in range(2)]
    write_folder(folder, {i: "abc"[i % 3] for i in range(40)})
    for number, shard in enumerate(shards):
        numbers = range(number * 20, number * 20 + 20)
        write_tar(shard, members(numbers, lambda i: "abc"[i % 3].encode(), "images/{:02}"))
    found = []
    args = Args(dataset_name=str(tmp_path / "folder"), heldout_share=0.25)
    for train, test, names in (sides([parquet]), sides([str(shard) for shard in shards]), load_images(args)):
        assert names == ["a", "b", "c"]
        found.append([
            {Images(side, PROCESSOR)[row]["pixel_values"].numpy().tobytes(): int(side.labels[row]) for row in range(len(side.labels))}
            for side in (train, test)
        ])  # fmt: skip
    assert found[0] == found[1] == found[2] and len(found[0][0]) + len(found[0][1]) == 40
    assert sides([str(shard) for shard in shards])[0].content == sides([str(shard) for shard in shards])[0].content
    # Another image, or another label, of the same size, in a file with the same times.
    files, place = {"eval_files": [str(shards[1])]}, shards[0].stat()
    before = sides([str(shards[0])], **files)[0]
    then, whole = before.content, shards[0].read_bytes()
    for old, new in ((png(7), png(7)[:-1] + b"\0"), (b"b" + bytes(511), b"c" + bytes(511))):
        shards[0].write_bytes(whole.replace(old, new, 1))
        os.utime(shards[0], ns=(place.st_atime_ns, place.st_mtime_ns))
        after = sides([str(shards[0])], **files)[0]
        assert np.array_equal(before.labels, after.labels) == (old == png(7))
        refuses("the training data are others than the checkpoint's", check_content, after.content, [{"content": then}])
    shards[0].write_bytes(whole)
    folders = [load_images(args)[0].content]
    file = folder / "a" / "03.png"
    for content in (png(3)[:-1], png(3)):
        file.write_bytes(content)
        folders.append(
            load_images(Args(dataset_name=args.dataset_name, heldout_share=0.25, skip_broken_images=True))[0].content
        )
    assert folders[0] == folders[2] != folders[1]
    write_tar(shards[0], [("alone.png", png(1))], "a")
    with pytest.raises(DataError, match=r"shard-0\.tar: alone has no label .* alone.jpg and alone\.cls"):
        sides([str(shard) for shard in shards])
    write_tar(shards[1], [("images/20.jpg", b"")], "a")
    with pytest.raises(DataError, match=r"shard-1\.tar has two images called images/20; give each image its own"):
        sides([str(shards[1])])
    write_tar(shards[0], [("x.png", png(1)), ("x.cls", b"a"), ("x.cls", b"b")])
    with pytest.raises(DataError, match=r"shard-0\.tar has two labels called x; give each image its own name"):
        sides([str(shards[0])])


def test_labels_that_are_numbers_are_in_their_order(tmp_path):
    """The texts of a tar give the classes of Parquet's numbers: 2 comes before 10, and what is not a number by its letters."""
    numbers = [0, 1, 2, 10, 11]
    write_parquet(tmp_path / "images.parquet", map(png, range(20)), [numbers[i % 5] for i in range(20)], Value("int64"))
    write_tar(tmp_path / "images.tar", members(range(20), lambda i: b"%d" % numbers[i % 5]))
    of_parquet, of_tar = (sides([str(tmp_path / f"images.{kind}")]) for kind in ("parquet", "tar"))
    assert of_tar[2] == of_parquet[2] == ["0", "1", "2", "10", "11"]
    assert np.array_equal(of_tar[0].labels, of_parquet[0].labels)
    assert class_names(["b", "10", "2", "10"]) == ["10", "2", "b"]
    assert class_names(["3", "-1", "03"]) == ["-1", "03", "3"]


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_a_split_of_the_dataset_to_evaluate_on(tmp_path, kind):
    """A class has the same number in --eval_split as in training, also where a class is missing; columns may have other names."""
    for split, places in {"train": range(9), "validation": range(10, 14)}.items():
        labels = [i % 3 if split == "train" else 1 + i % 2 for i in places]  # b and c alone in the validation split
        if kind == "folder":
            write_folder(tmp_path / split, {i: "abc"[label] for i, label in zip(places, labels, strict=True)})
        else:
            file = tmp_path / f"{split}-00000-of-00001.parquet"
            write_parquet(file, map(png, places), labels, ["a", "b", "c"], ("img", "of"))
    columns = {} if kind == "folder" else {"image_column": "img", "label_column": "of"}
    train, test, names = load_images(Args(dataset_name=str(tmp_path), eval_split="validation", **columns))
    assert names == ["a", "b", "c"] and (len(train.labels), len(test.labels)) == (9, 4)
    assert sorted(test.labels) == [1, 1, 2, 2]
    pixels = {Images(test, PROCESSOR)[row]["pixel_values"].numpy().tobytes(): test.labels[row] for row in range(4)}
    for i in range(10, 14):
        image = np.asarray(Image.open(io.BytesIO(png(i))))
        assert pixels[PROCESSOR(image, return_tensors="pt")["pixel_values"][0].numpy().tobytes()] == 1 + i % 2


def test_images_alike_to_the_bit_lie_on_one_side(tmp_path):
    """The order of the rows plays no role; where all are alike, none is left on a side."""

    def heldout(seeds: list[int]) -> list[int]:
        file = write_parquet(tmp_path / "images.parquet", map(png, seeds), [seed % 2 for seed in seeds], ClassLabel(2))
        return sorted(seeds[row] for row in sides([file])[1].rows)

    seeds = [*range(60), *range(30)]
    found = heldout(seeds)
    assert 8 < len(found) < 40 and sorted(seed for seed in seeds if seed in found) == found
    assert heldout(seeds[::-1]) == found
    refuses(r"none of the 20 images .* is left to .*--heldout_share .*0\.25", heldout, [1] * 20)


@pytest.mark.parametrize("kind", ["parquet", "tar", "folder"])
def test_images_on_both_sides(kind, tmp_path, capsys):
    """Alike to the bit, they are refused with both numbers; a split of a dataset is as it is, and they are counted."""
    sides_of = {"train": range(12), "validation": [*range(10, 14)]}
    for split, numbers in sides_of.items():
        if kind == "tar":
            parts = members(numbers, lambda i: b"ab"[i % 2 : i % 2 + 1], split + "{:02}")
            write_tar(tmp_path / f"{split}.tar", parts)
        elif kind == "folder":
            write_folder(tmp_path / split, {i: "ab"[i % 2] for i in numbers}, split + "{:02}")
        else:
            write_parquet(tmp_path / f"{split}.parquet", map(png, numbers), [i % 2 for i in numbers], ["a", "b"])
    if kind == "folder":
        assert len(load_images(Args(dataset_name=str(tmp_path), eval_split="validation"))[1].labels) == 4
        assert "2 of 4 images of " in capsys.readouterr().out
        (tmp_path / "train/a/train10.png").unlink()
        (tmp_path / "train/b/train11.png").write_bytes(png(11)[:-1] + b"x")  # of one size, but another image
        load_images(Args(dataset_name=str(tmp_path), eval_split="validation"))
        assert "are also trained on" not in capsys.readouterr().out
    else:
        train, evaluated = (str(tmp_path / f"{split}.{kind}") for split in sides_of)
        with pytest.raises(
            ConfigError, match=rf"2 of 4 rows of --eval_files are images of .*train\.{kind} too; remove.* row 1$"
        ):
            sides([train], eval_files=[evaluated])


def test_images_that_are_not_compared(monkeypatch):
    """Fewer are compared where a side has too many of their sizes; an image without content is left to a later step."""
    images = [{"bytes": b"%05d" % i, "path": None} for i in range(12)] + [{"bytes": b"longer", "path": None}]
    images += [{"bytes": None, "path": None}, {"bytes": None, "path": "none.png"}]
    side = Labelled(Dataset(pa.table({"image": images})), np.zeros(15), np.arange(15), "")
    assert same_images(side, side) == ([*range(13)], 15)
    monkeypatch.setattr(labelled, "MOST_COMPARED", 5)
    assert same_images(side, side)[1] < 15


@pytest.fixture
def others(tmp_path) -> str:
    """File of the same classes with other images."""
    return write_parquet(
        tmp_path / "others.parquet", map(png, range(40, 80)), [i % 3 for i in range(40)], ["a", "b", "c"]
    )


@pytest.fixture
def broken(tmp_path) -> str:
    """File whose row 8 is a PNG that ends early."""
    images = [png(i)[: 200 if i == 7 else None] for i in range(40)]
    return write_parquet(tmp_path / "broken.parquet", images, [i % 3 for i in range(40)], ["a", "b", "c"])


def test_a_broken_image_is_named_or_left_out(broken, others):
    train, _, _ = sides([broken], eval_files=[others])
    args = Args(max_steps=99, total_batch_size=4, per_device_train_batch_size=4, dataloader_num_workers=1)
    for settings in ({}, {"mixup_alpha": 1.0}):
        augmentation = Args(**settings)
        images = Images(train, PROCESSOR, augmentation)
        loader = make_train_loader(images, args, 0, 1, collate_fn=collate_images, order_class=EpochOrder)
        with pytest.raises(DataError, match=r"broken\.parquet, row 8: the image cannot be read: ") as caught:
            list(islice(loader, 12))
        assert "Traceback" not in str(caught.value)
        refuses(r"row 8: the image", loader.first_batch, 40, error=DataError)
        images = Images(train, PROCESSOR, augmentation, skips_broken=True)
        loader = make_train_loader(images, args, 0, 1, collate_fn=collate_images, order_class=EpochOrder)
        pairs = (zip(b["row"], b["labels"], strict=True) for b in islice(loader, 10))
        found = {int(row): int(label) for batch in pairs for row, label in batch}
        assert [row for row, label in found.items() if label < 0] == [7] and len(found) == 40
    assert sum(len(side.images) for side in sides([broken])[:2]) == 40


def test_all_images_to_evaluate_on_are_broken(broken, others, tmp_path):
    _, test, names = sides([others], eval_files=[broken])
    only = Labelled(test.images.select([7]), test.labels[7:8], np.array([0]), test.source)
    images = Images(only, PROCESSOR, skips_broken=True)
    loader = make_eval_loader(images, Args(), 0, 1, collate_fn=collate_images)
    evaluation = ImageEvaluation(ROOT / "recipes/metrics/image_classes.py", images, loader, names, tmp_path)

    class Model(torch.nn.Linear):
        def forward(self, pixel_values):
            return SimpleNamespace(logits=super().forward(pixel_values.flatten(1)[:, :2]))

    with pytest.raises(DataError, match=r"all 1 images .*broken.parquet\) are broken; leave out --skip"):
        evaluation.evaluate(Accelerator(cpu=True), Model(2, 3), 0)


@pytest.mark.parametrize(("dtype", "mode"), [(np.uint16, "I;16"), (np.int32, "I"), (np.float32, "F")])
def test_more_than_8_bits_are_refused(dtype, mode):
    """PIL would cut such values: nearly all of the image would become white, or black."""
    Image.fromarray(np.full((4, 4), 1000, dtype=dtype)).save(out := io.BytesIO(), format="tiff")
    with pytest.raises(ValueError, match=rf"more than 8 bits a channel \(PIL's mode {mode}\); convert"):
        decode(out.getvalue())


def test_columns_and_labels_are_checked(parquet, tmp_path):
    with pytest.raises(DataError, match=r"has no column 'img'; there are image, label; set --image_column"):
        sides([parquet], image_column="img")
    refuses(r"'label' holds .*, not images", sides, [parquet], image_column="label", error=DataError)
    file = write_parquet(tmp_path / "test.parquet", map(png, range(2)), [0, 3], ["a", "b", "c", "d"])
    with pytest.raises(DataError, match=r"has the classes a, b, c, d \(4\), but those trained on are a, b, c \(3\)"):
        sides([parquet], eval_files=[file])
    for classes in (["c", "a", "b"], ["c", "a"]):  # the same in another order; a part of them
        write_parquet(file, map(png, (100, 101)), [0, 1], classes)
        assert sides([parquet], eval_files=[file])[1].labels.tolist() == [2, 0]
    write_parquet(file, map(png, range(2)), ["a", "d"], Value("string"))
    refuses(r"test\.parquet, row 2: the label 'd' .* 3 classes", sides, [parquet], eval_files=[file], error=DataError)
    write_parquet(file, map(png, range(2)), [[0], [0, 1]], List(Value("int64")))
    refuses(r"'label' holds .*, not one name or number", sides, [file], error=DataError)
    with pytest.raises(ConfigError, match=r"none of the 40 images of .* is left to evaluate on"):
        load_images(Args(train_files=[parquet], heldout_share=1e-9))


def test_content_notices_other_images(parquet, broken, others):
    assert sides([parquet])[0].content == sides([parquet])[0].content
    assert sides([parquet], eval_files=[others])[0].content != sides([broken], eval_files=[others])[0].content


def test_size_of_processors():
    assert image_size(new_image_processor(20)) == (20, 20)
    with pytest.raises(ConfigError, match=r"max_height.* no height and width"):
        image_size(ViTImageProcessorPil(size={"max_height": 20, "max_width": 30}))


def test_machines_with_other_images_are_refused(parquet, monkeypatch):
    """By their labels, before a rank would look for an image that its machine lacks."""
    monkeypatch.setattr(prepared, "on_all_ranks", lambda value: [value, "another"])
    refuses(rf"labels in {parquet} is .*, and another on that of rank 1", sides, [parquet])


NUM_STREAMS, BLOCK, BATCH, SEED = 12, 3, 12, 5
NAMES = ["a", "b", "c"]
NOTE = "README-of-images-that-are-not-said-to-be-anything-but-noise.md"  # a name that fills a header
OF_IMAGES = ("row", "pixel_values", "labels", "other_labels", "share")
PLAIN = Augmentation(crop_area=1, horizontal_flip=False)
MIXED = Augmentation(crop_area=0.5, mixup_alpha=0.4, cutmix_alpha=1.0)
# Images in each shard: fewer and more than streams
FEW, MANY = ((1, 7, 0, 40), (1, 7, 0, 9, 2, 2, 3, 0, 1, 1, 5, 4, 2, 3))


def image(shard: int, index: int) -> bytes:
    return png(100 * shard + index)


def label_of(shard: int, index: int) -> int:
    return random.Random(100 * shard + index).randrange(3)


def tar_of(members: list[tuple[str, bytes]], **settings: object) -> bytes:
    write_tar(out := io.BytesIO(), members, **settings)
    return out.getvalue()


def shard_of(number: int, size: int) -> bytes:
    """Make a shard with other members, too; the label is the first or the second member of an image."""
    members = [(NOTE, b"")]
    for i in range(size):
        parts = [(f"{i:03}.png", image(number, i)), (f"{i:03}.cls", f"{NAMES[label_of(number, i)]}\n".encode())]
        members += [*parts[:: 1 - 2 * (i % 2)], (f"{i:03}.json", b"{}")]
    return tar_of(members)


@pytest.fixture
def streamed(serve, monkeypatch):
    """Return a source of shards of these sizes, from a server."""
    monkeypatch.setattr(streams, "HANDED_OVER", 2)

    def source(sizes: tuple[int, ...], augmentation: Augmentation = MIXED, **settings: object) -> ImageShards:
        server = serve({f"/{i}.tar": shard_of(i, size) for i, size in enumerate(sizes)})
        urls = [f"{server.url}/{i}.tar" for i in range(len(sizes))]
        source.server = server  # not in what is returned, of which a worker gets a copy
        return ImageShards(urls, NAMES, PROCESSOR, augmentation, SEED, **settings)

    return source


def loaders_of(source: ImageShards, world_size: int = 1, num_workers: int = 0) -> list[ImageStreams]:
    args = Args(total_batch_size=BATCH, per_device_train_batch_size=1, seed=SEED, dataloader_num_workers=num_workers)
    sizes = {"num_streams": NUM_STREAMS, "block": BLOCK}
    return [ImageStreams(source, args, rank, world_size, **sizes) for rank in range(world_size)]


def run(loaders: list[ImageStreams], num_steps: int) -> list[list[dict]]:
    names = OF_IMAGES if loaders[0].documents[0].augmentation.mixup_alpha else OF_IMAGES[:3]
    return Ranks(loaders, names).run(num_steps)


def assert_equal(found: list[list[dict]], wanted: list[list[dict]]) -> None:
    """Compare the images of some steps, to the bit."""
    assert [[row["row"].tolist() for row in step] for step in found] == [
        [row["row"].tolist() for row in step] for step in wanted
    ]
    for row, other in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert all(torch.equal(row[name], other[name]) for name in row)


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_each_image_once_in_an_epoch(streamed, sizes):
    """Each epoch has all images once, with their own pixels and labels, in an order of its own."""
    source, total = streamed(sizes, PLAIN), sum(sizes)
    steps = run(loaders_of(source), 3 * total // BATCH)
    rows = list(itertools.chain(*steps))
    epochs = [[tuple(row["row"].tolist()[1:]) for row in rows if row["row"][0] == epoch] for epoch in range(3)]
    everything = Counter((shard, i) for shard, size in enumerate(sizes) for i in range(size))
    assert all(Counter(epoch) == everything for epoch in epochs[:2]) and not Counter(epochs[2]) - everything
    for row in rows[:total]:
        _, shard, i = row["row"].tolist()
        picture = Image.open(io.BytesIO(image(shard, i))).convert("RGB")
        pixels = PROCESSOR(picture, return_tensors="pt")["pixel_values"][0]
        plain = source.trained((0,), 0, 1, lambda _: (Image.open(io.BytesIO(image(shard, i))), 0))  # noqa: B023
        assert torch.equal(row["pixel_values"], plain["pixel_values"]) and pixels.shape == plain["pixel_values"].shape
        assert row["labels"] == label_of(shard, i)
    in_steps = [[sorted(tuple(row["row"].tolist()[1:]) for row in step) for step in part] for part in (steps[:2], steps[total // BATCH :][:2])]  # fmt: skip
    assert in_steps[0] != in_steps[1]


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_the_same_pixels_on_any_number_of_ranks_and_after_each_resume(streamed, sizes):
    """With crops, flips and mixtures; a run is continued after each of its steps, on another number of ranks."""
    source, num_steps = streamed(sizes), 9  # of 12 images: over two epochs
    assert 2 * sum(sizes) < num_steps * BATCH
    whole = run(loaders_of(source), num_steps)
    mixed_with = [int(row["other_labels"] != row["labels"]) for row in itertools.chain(*whole)]
    assert np.mean(mixed_with) > 0.1  # with another class; where blocks are small, often with itself
    for world_size, num_workers in ((1, 2), (2, 0), (3, 2), (4, 0)):
        assert_equal(run(loaders_of(source, world_size, num_workers), num_steps), whole)
    loaders = loaders_of(source, 2)
    for step in range(1, num_steps):
        run(loaders, 1)
        resumed = loaders_of(source, (1, 3, 4)[step % 3])
        go_on(resumed, step, states_of(loaders))
        assert_equal(run(resumed, num_steps - step), whole[step:])
    assert sum(loader.counts()["images_seen"] for loader in resumed) == num_steps * BATCH


def test_chance_is_a_function_of_seed_epoch_and_image(streamed):
    """The same image has other draws in another epoch, and with another seed; partners come from all of a block."""
    source = streamed((BLOCK * 4,), Augmentation(mixup_alpha=1.0))
    documents = list(source.read(0, 0, 1, no_retry))
    drawn = {}
    for epoch, seed in ((0, SEED), (1, SEED), (0, SEED + 1)):
        source.seed = seed
        drawn[epoch, seed] = [row[0] for row in source.tokens(0, documents, 0, epoch)]
    again = [row[0] for row in source.tokens(0, documents, 5, 0)]
    first, *others = drawn.values()
    for other in others:
        assert not any(np.array_equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(first, other, strict=True))
    assert all(np.array_equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(drawn[0, SEED + 1][5:], again, strict=True))  # fmt: skip
    assert len({int(row["other_labels"]) for row in first}) == 3
    source.augmentation = Augmentation(crop_area=0.5)
    orders = [[row for row, *_ in source.tokens(0, order)] for order in (documents, documents[::-1])]
    rows = [{int(row["row"][2]): row["pixel_values"] for row in order} for order in orders]
    assert all(np.array_equal(rows[0][i], rows[1][i]) for i in range(len(documents))), "its place plays no role"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_faults_of_the_network_change_nothing(streamed, num_workers):
    source = streamed(FEW)
    wanted = run(loaders_of(source), 4)
    streamed.server.faults = [429, "truncate", 503]
    (loader,) = loaders_of(source, num_workers=num_workers)
    assert_equal(run([loader], 4), wanted)
    assert loader.counts() == {"images_seen": 4 * BATCH, "retries": 3}


# Shards


def parts(*numbers: int) -> list[tuple[str, bytes]]:
    return [(f"{i}.{suffix}", content) for i in numbers for suffix, content in (("png", png(i)), ("cls", b"a"))]


def cut(content: bytes, chunk: int = 1000) -> list[bytes]:
    return [content[start : start + chunk] for start in range(0, len(content), chunk)]


LONG = "folder/" * 30 + "größe" * 20  # longer than a plain header holds


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_kinds_of_tars(format):
    stems = [f"images/{i}" if format == tarfile.USTAR_FORMAT else f"{LONG}{i}" for i in range(9)]
    members = []
    for i, stem in enumerate(stems):
        members += [(f"{stem}.JPEG", png(i)), (f"{stem}.txt", b"no image"), (f"{stem}.cls", f" {i} \n".encode())]
    content = tar_of(members, format=format)
    for first, stride, chunk in ((0, 1, 1), (4, 1, 511), (2, 3, 10_000), (9, 1, 10**6)):
        found = list(stream_images(cut(content, chunk), first, shard="a.tar", stride=stride))
        assert [(one.name, one.content, one.label) for one in found] == [
            (f"{stems[i]}.JPEG", png(i), str(i)) for i in range(first, 9, stride)
        ]


def test_a_tar_by_tar_itself(tmp_path):
    """A file with a hole is stored as a sparse one; folders are members, too."""
    (tmp_path / "in").mkdir()
    for i in range(3):
        (tmp_path / f"in/{i}.png").write_bytes(png(i))
        (tmp_path / f"in/{i}.cls").write_text("a")
    with open(tmp_path / "in/1.png", "r+b") as file:
        file.truncate(2**20)
    subprocess.run(["tar", "--sparse", "--sort=name", "-cf", "a.tar", "in"], cwd=tmp_path, check=True)
    content = (tmp_path / "a.tar").read_bytes()
    assert len(content) < 2**20
    found = [one.content for one in stream_images(cut(content), 0, shard="a.tar", stride=1)]
    assert found == [png(0), png(1).ljust(2**20, b"\0"), png(2)]


WHOLE = tar_of(parts(0, 1, 2))
LINK = tarfile.TarInfo("1.png")
LINK.type, LINK.linkname = tarfile.LNKTYPE, "0.png"
SECOND = WHOLE.index(b"1.png")


def with_link() -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO(tar_of(parts(0)))), mode="a") as tar:
        tar.addfile(LINK)
    return out.getvalue()


@pytest.mark.parametrize("content, message", [
    (tar_of(parts(0, 1)[:-1]), r"a.tar: 1 has no label .*1.jpg and 1.cls"),
    (tar_of(parts(0, 1)[1:]), r"a.tar: 0 has no image beside it"),
    (tar_of([*parts(0), *parts(1), *parts(0)]), r"a.tar has two images called 0; give each image its own name"),
    (tar_of([*parts(0), ("0.jpg", b"")]), r"a.tar has two images called 0"),
    (tar_of(sorted(parts(0, 1), key=lambda part: part[0][-1])), r"a.tar: 0 has no (label|image) beside it"),
    (tar_of([("0.png", png(0)), ("0.cls", b"\xff")]), r"a.tar: 0.cls is not UTF-8, so no label"),
    (with_link(), r"a.tar: 1.png is a link.*`tar --dereference"),
    (gzip.compress(WHOLE), r"a.tar is compressed; unpack it by `gunzip`"),
    (b"<html>busy</html>", r"a.tar .* byte 0 .*\(truncated header\)"),
    (b"", r"a.tar .* byte 0 .*\(empty header\)"),
    (WHOLE[: SECOND + 100], r"a.tar .* byte \d+ .*\(truncated"),
    (WHOLE[:SECOND], r"a.tar .* byte \d+ .*\(empty"),
    (WHOLE[: SECOND + 600], r"a.tar is not a whole tar: unexpected end of data"),
    (WHOLE[:SECOND] + b"\1" + WHOLE[SECOND + 1 :], r"a.tar .* byte \d+ .*\(bad checksum\)"),
    (WHOLE + WHOLE, r"a.tar is not a whole tar: more follows its end"),
])  # fmt: skip
@pytest.mark.parametrize("is_wanted", [True, False])
def test_shards_that_are_not_what_they_should_be(tmp_path, content, message, is_wanted):
    """Nothing is left out silently, whether images are read or passed over."""
    (tmp_path / "a.tar").write_bytes(content)
    source = ImageShards([str(tmp_path / "a.tar")], NAMES, PROCESSOR, PLAIN, SEED)
    if not is_wanted and b"\xff" in content[:3000] and b"0.cls" in content[:3000]:
        return  # a label that nobody reads
    refuses(message, list, source.read(0, 0 if is_wanted else 10, 1, no_retry), error=DataError)


def test_a_local_shard_that_is_cut_off(tmp_path):
    """tarfile alone would read fewer images, and say nothing."""
    for content in (WHOLE[:SECOND], WHOLE[:SECOND] + b"\1" + WHOLE[SECOND + 1 :]):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.tar cannot be read: .* byte \d+ "):
            load_images(Args(train_files=[str(tmp_path / "a.tar")], heldout_share=0.5))


def test_a_damaged_shard_is_read_again_from_the_network(serve):
    server = serve({"/a.tar": tar_of([(NOTE, b""), *parts(0, 1, 2)])})
    source = ImageShards([f"{server.url}/a.tar"], NAMES, PROCESSOR, PLAIN, SEED)
    server.faults, retries = ["damage", 500], []
    assert [one.content for _, one in source.read(0, 1, 1, lambda: retries.append(1))] == [png(1), png(2)]
    assert len(retries) == 2
    server.files["/a.tar"] = WHOLE[:SECOND]
    with pytest.raises(DataError, match=r"/a\.tar is not a whole tar: .* \(tried 4 times\)"):
        list(source.read(0, 0, 1, lambda: None))
    server.files["/a.tar"] = gzip.compress(WHOLE)
    before = len(server.requests)
    refuses(r"/a\.tar is compressed", list, source.read(0, 0, 1, no_retry), error=DataError)
    assert len(server.requests) == before + 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_image_of_a_shard_is_named_or_left_out(tmp_path, num_workers):
    members = parts(*range(6))
    members[6] = ("3.png", png(3)[:200])
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    for augmentation in (PLAIN, MIXED):
        how = ([str(tmp_path / "a.tar")], NAMES, PROCESSOR, augmentation, SEED)
        (loader,) = loaders_of(ImageShards(*how), num_workers=num_workers)
        # Without `as`: in a cycle of references, torch's iterator would wait for its workers.
        with pytest.raises(DataError, match=r"(?s)^(?!.*Traceback).*a\.tar, 3\.png: the image cannot be read: "):
            list(itertools.islice(loader, BATCH))
        (loader,) = loaders_of(ImageShards(*how, skips_broken=True), num_workers=num_workers)
        first = list(itertools.islice(loader, BATCH))
        labels = {int(row["row"][0, 2]): int(row["labels"]) for row in first}
        assert labels == {i: -100 if i == 3 else 0 for i in range(6)}


def test_labels_are_those_of_the_images_to_evaluate_on(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([*parts(0), ("1.png", png(1)), ("1.cls", b"z")]))
    source = ImageShards([str(tmp_path / "a.tar")], NAMES, PROCESSOR, PLAIN, SEED)
    with pytest.raises(DataError, match=r"a\.tar, 1\.png: the label 'z' .* a, b, c \(3\) .*--eval_files"):
        run(loaders_of(source), 1)


def test_shards_without_images(streamed):
    source = streamed((0, 0))
    refuses(r"there is no document to train on in .*/0\.tar and 1 more", run, loaders_of(source), 1, error=DataError)
    source = streamed((0, 0, 1))
    (batch,) = [loaders_of(source)[0].first_batch()]
    assert batch["row"].tolist() == [[0, 2, 0]]


def test_state_of_other_images_is_refused(streamed):
    source = streamed((1, 2))
    (loader,) = loaders_of(source)
    state = loader.state()
    assert len(state["streams"]["0"][0]) == 8 and state["version"].keys() == {"classes"}
    (other,) = loaders_of(ImageShards(source.shards, ["a", "b"], PROCESSOR, MIXED, SEED))
    refuses(r"the data changed since the checkpoint: classes ", other.start_at, 1, [state])
    (other,) = loaders_of(ImageShards(source.shards[:1], NAMES, PROCESSOR, MIXED, SEED))
    refuses(r"1 shards now, 2 then", other.start_at, 1, [state])


# Arguments

URL, HUB = "https://example.org/a.tar", "hf://datasets/tiny/images/train-*.tar"


def problems_of(*argv: str, world_size: int = 1) -> tuple[Args, str]:
    args, problems = resolve(Args, argv, world_size)
    return args, "\n".join(problems)


def test_all_problems_at_once():
    _, found = problems_of("--train_files", URL)
    assert "--max_steps is missing" in found
    assert "no share of a stream can be held out; give --eval_files" in found
    files = [URL, "hf://tiny/a.tar", "hf://a", "https://example.org/b.parquet", "https://example.org/b.tar.gz"]
    _, found = problems_of("--train_files", *files, "--eval_files", URL, "hf://datasets/a/b/c.tgz", "--max_steps", "3", "--num_streams", "5", world_size=2)  # fmt: skip
    for expected in (
        "--train_files hf://tiny/a.tar: ",
        "--train_files hf://a: what is streamed must end with .tar",
        "--train_files https://example.org/b.parquet: what is streamed must end with .tar",
        "--train_files https://example.org/b.tar.gz: what is streamed must end with .tar",
        f"--eval_files {URL}: images to evaluate on",
        "--eval_files hf://datasets/a/b/c.tgz: ",
        "--num_streams 5 is not a multiple of 2 processes",
    ):
        assert expected in found
    assert "no such file" not in found
    images = str(ROOT / "data/fashion/train.parquet")
    _, found = problems_of("--train_files", images, "--num_streams", "24")
    assert found.startswith("--num_streams is for shards that are streamed")


def test_the_number_of_streams_belongs_to_the_run(tmp_path):
    """test_streams.py has what a resume does with it; images that are here have none."""
    images = str(ROOT / "data/fashion/train.parquet")
    args, found = problems_of("--train_files", URL, "--eval_files", images, "--max_steps", "3", "--total_batch_size", "160", world_size=5)  # fmt: skip
    assert found == "" and args.settle({}) == [] and args.num_streams == 120
    local, _ = problems_of("--train_files", images)
    assert local.settle({}) == [] and local.num_streams == 0 and not local.is_streamed
    local.save(tmp_path / "args.yaml")
    settle_arguments(tmp_path, local)
    assert local.num_streams == 0


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = LoopbackHub()
    files = {f"train-{i}.tar": shard_of(i, size) for i, size in ((1, 2), (0, 3))} | {"val-0.tar": shard_of(7, 9)}
    server.commit = server.push("datasets/tiny/images", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    server.shutdown()
    server.server_close()


def test_shards_on_the_hub(hub, monkeypatch):
    """Shards to train on are read from the Hub at one commit and not kept; those to evaluate on are downloaded."""
    vit = shipped.load(ROOT / "recipes/vit.py")
    command = ["--from_scratch", "--max_steps", "2", "--train_files", HUB, "--eval_files", HUB.replace("train", "val")]
    args, problems = resolve(vit.Args, command, 1)
    assert problems == []
    needs = vit.requirements(args).needs
    assert [(need.files, need.streamed) for need in needs] == [("train-*.tar", True), ("val-*.tar", False)]
    requirements.provide(args, vit.requirements(args), ["recipes/vit.py", *command])
    assert hub.sent == ["datasets/tiny/images/val-0.tar"]
    train, heldout, names = load_images(args)
    assert train is None and names == NAMES and len(heldout.labels) == 9
    found = args.train_shards()
    assert found == [f"{hub.url}/datasets/tiny/images/resolve/{hub.commit}/train-{i}.tar" for i in range(2)]
    source = ImageShards(found, names, PROCESSOR, PLAIN, SEED)
    assert [one.content for _, one in source.read(1, 0, 1, no_retry)] == [image(1, 0), image(1, 1)]
    assert source.version()["commit"] == hub.commit
    for name, pattern, said in (
        ("tiny/images", "other-*.tar", r"no file of the dataset tiny/images on http.* matches 'other-"),
        ("tiny/images", "en/*.tar", r"no file of the dataset tiny/images on http.* matches 'en/"),
        ("tiny/nothing", "other-*.tar", "dataset 'tiny/nothing' cannot be read from"),
    ):
        refuses(said, find_shards, name, pattern)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refuses(r"cannot be read from http.*HF_HUB_OFFLINE=1", find_shards, "tiny/images", "other-*.tar")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuses(r"no file of 'tiny/images' that matches 'other-", find_shards, "tiny/images", "other-*.tar")
    with pytest.raises(ConfigError, match=r"(?s)'tiny/images' \(train-\*\.tar\) is .*accelerate_recipes download"):
        args, _ = resolve(vit.Args, command, 1)
        requirements.provide(args, vit.requirements(args), ["recipes/vit.py", *command])
