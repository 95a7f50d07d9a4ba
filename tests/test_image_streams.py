"""Tests of streamed images: each once in an epoch, the same pixels on any number of ranks, exact resumes, and what is wrong
with a shard."""

import gzip
import io
import itertools
import random
import subprocess
import tarfile
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import ROOT, png, write_tar
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from PIL import Image
from streaming import Ranks, go_on, no_retry, states_of

from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.resume import settle_arguments
from accelerate_recipes.data import streams
from accelerate_recipes.data.shards import find_shards
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.images.augmentation import Augmentation
from accelerate_recipes.images.classifiers import new_image_processor
from accelerate_recipes.images.image_streams import ImageShards, ImageStreams
from accelerate_recipes.images.labelled import ImageArgs, load_images
from accelerate_recipes.images.tars import stream_images
from accelerate_recipes.launch import requirements

pytestmark = pytest.mark.usefixtures("quick_tries", "worker_server")

PROCESSOR = new_image_processor(16)
NUM_STREAMS, BLOCK, BATCH, SEED = 12, 3, 12, 5
NAMES = ["a", "b", "c"]
NOTE = "README-of-images-that-are-not-said-to-be-anything-but-noise.md"  # a name that fills a header
OF_IMAGES = ("row", "pixel_values", "labels", "other_labels", "share")
PLAIN = Augmentation(crop_area=1, horizontal_flip=False)
MIXED = Augmentation(crop_area=0.5, mixup_alpha=0.4, cutmix_alpha=1.0)
# Images in each shard: fewer and more than streams
FEW, MANY = ((1, 7, 0, 40), (1, 7, 0, 9, 2, 2, 3, 0, 1, 1, 5, 4, 2, 3))


@dataclass
class Args(ImageArgs, TrainArgs):
    """Arguments of a recipe that reads images."""


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
    with pytest.raises(DataError, match=message):
        list(source.read(0, 0 if is_wanted else 10, 1, no_retry))


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
    with pytest.raises(DataError, match=r"/a\.tar is compressed"):
        list(source.read(0, 0, 1, no_retry))
    assert len(server.requests) == before + 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_image_is_named_or_left_out(tmp_path, num_workers):
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
    with pytest.raises(DataError, match=r"there is no document to train on in .*/0\.tar and 1 more"):
        run(loaders_of(source), 1)
    source = streamed((0, 0, 1))
    (batch,) = [loaders_of(source)[0].first_batch()]
    assert batch["row"].tolist() == [[0, 2, 0]]


def test_state_of_other_images_is_refused(streamed):
    source = streamed((1, 2))
    (loader,) = loaders_of(source)
    state = loader.state()
    assert len(state["streams"]["0"][0]) == 8 and state["version"].keys() == {"classes"}
    (other,) = loaders_of(ImageShards(source.shards, ["a", "b"], PROCESSOR, MIXED, SEED))
    with pytest.raises(ConfigError, match=r"the data changed since the checkpoint: classes "):
        other.start_at(1, [state])
    (other,) = loaders_of(ImageShards(source.shards[:1], NAMES, PROCESSOR, MIXED, SEED))
    with pytest.raises(ConfigError, match=r"1 shards now, 2 then"):
        other.start_at(1, [state])


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
        with pytest.raises(ConfigError, match=said):
            find_shards(name, pattern)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"cannot be read from http.*HF_HUB_OFFLINE=1"):
        find_shards("tiny/images", "other-*.tar")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no file of 'tiny/images' that matches 'other-"):
        find_shards("tiny/images", "other-*.tar")
    with pytest.raises(ConfigError, match=r"(?s)'tiny/images' \(train-\*\.tar\) is .*accelerate_recipes download"):
        args, _ = resolve(vit.Args, command, 1)
        requirements.provide(args, vit.requirements(args), ["recipes/vit.py", *command])
