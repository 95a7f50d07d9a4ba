"""Tests of images: what chance does to them, their order, their sources, which lie on which side, and broken ones."""

import io
import os
import sys
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
from helpers import ROOT, png, write_tar
from PIL import Image
from transformers import (
    BitImageProcessorPil,
    ConvNextImageProcessorPil,
    EfficientNetImageProcessorPil,
    MobileViTImageProcessorPil,
    ViTImageProcessorPil,
)

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data import prepared
from accelerate_recipes.data.files import class_names
from accelerate_recipes.data.prepared import check_content
from accelerate_recipes.data.rows import EpochOrder, make_eval_loader, make_train_loader
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images import labelled
from accelerate_recipes.images.augmentation import Augmentation, Preparation, decode, image_size, random_box
from accelerate_recipes.images.classifiers import ImageEvaluation, new_image_processor
from accelerate_recipes.images.labelled import ImageArgs, Images, Labelled, collate_images, load_images, same_images

pytestmark = pytest.mark.usefixtures("worker_server")

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
    """torchvision's, which draws from torch's one generator: the same again, and from several threads, as a stream without
    workers has them; nothing else is drawn otherwise."""

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
        with pytest.raises(ConfigError, match="the training data are others than the checkpoint's"):
            check_content(after.content, [{"content": then}])
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
    with pytest.raises(ConfigError, match=r"none of the 20 images .* is left to .*--heldout_share .*0\.25"):
        heldout([1] * 20)


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
        with pytest.raises(DataError, match=r"row 8: the image"):
            loader.first_batch(40)
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
    with pytest.raises(DataError, match=r"'label' holds .*, not images"):
        sides([parquet], image_column="label")
    file = write_parquet(tmp_path / "test.parquet", map(png, range(2)), [0, 3], ["a", "b", "c", "d"])
    with pytest.raises(DataError, match=r"has the classes a, b, c, d \(4\), but those trained on are a, b, c \(3\)"):
        sides([parquet], eval_files=[file])
    for classes in (["c", "a", "b"], ["c", "a"]):  # the same in another order; a part of them
        write_parquet(file, map(png, (100, 101)), [0, 1], classes)
        assert sides([parquet], eval_files=[file])[1].labels.tolist() == [2, 0]
    write_parquet(file, map(png, range(2)), ["a", "d"], Value("string"))
    with pytest.raises(DataError, match=r"test\.parquet, row 2: the label 'd' .* 3 classes"):
        sides([parquet], eval_files=[file])
    write_parquet(file, map(png, range(2)), [[0], [0, 1]], List(Value("int64")))
    with pytest.raises(DataError, match=r"'label' holds .*, not one name or number"):
        sides([file])
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
    with pytest.raises(ConfigError, match=rf"labels in {parquet} is .*, and another on that of rank 1"):
        sides([parquet])
