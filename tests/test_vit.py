"""Tests of the vision recipe on a few real images: one trajectory, kill and resume, export, pretrained architectures."""

import copy
import io
import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageColumn
from helpers import ROOT, SHORT_RUN, STEPS, by_time, log_of, near, read_metrics, refuses, trajectory, write_tar
from safetensors.torch import load_file
from torch.torch_version import TorchVersion
from transformers import AutoModelForImageClassification, ViTImageProcessorPil, initialization
from transformers.modeling_outputs import ImageClassifierOutput

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.images.classifiers import (
    LAYERS,
    check_classifier,
    classifier_on_meta,
    draw_matrix,
    flops_per_image,
    image_loss,
    image_size_problems,
    load_image_classifier,
    new_classifier,
    new_vision_config,
)
from accelerate_recipes.models.deepvit import DeepViTConfig, DeepViTForImageClassification, ReAttention
from accelerate_recipes.models.weights import initialize

SCRIPT = ROOT / "recipes" / "vit.py"
Args = shipped.load(SCRIPT).Args


@pytest.fixture(scope="module")
def images_file(tmp_path_factory) -> Path:
    """File with the first 120 real images."""
    file = tmp_path_factory.mktemp("images") / "images.parquet"
    pq.write_table(pq.read_table(ROOT / "data/fashion/train.parquet").slice(0, 120), file)
    return file


@pytest.fixture(scope="module")
def arguments(images_file) -> tuple:
    """Return arguments of a run that takes seconds, with all that chance does to an image; 6 steps are more than an epoch."""
    return (
        "--from_scratch", "--train_files", images_file, "--heldout_share", 0.3, "--config_overrides", "image_size=28",
        "patch_size=7", "hidden_size=24", "intermediate_size=48", "num_hidden_layers=2", "num_attention_heads=3",
        "--crop_area", 0.5, "--mixup_alpha", 0.4, "--cutmix_alpha", 1, "--label_smoothing", 0.1, *SHORT_RUN, "--save_total_limit", 0,
        "--total_batch_size", 24, "--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 7,
    )  # fmt: skip


def predictions(out: Path, step: int = STEPS) -> list[dict]:
    return [json.loads(line) for line in (out / f"predictions/step-{step}.jsonl").read_text().splitlines()]


def test_it_says_what_it_does(run):
    out = run()
    printed = log_of(out)
    assert "5 FSDP units (Conv2d, DeepViTForImageClassification, DeepViTLayer, LayerNorm)" in printed, printed
    said = re.search(r"Data: (\d+) images of 10 classes .* (\d+) held out; 28 x 28 pixels", printed)
    train, heldout = map(int, said.groups())
    assert train + heldout == 120 and train < 24 * STEPS and len(predictions(out)) == heldout
    assert re.search(rf"Held-out images \({heldout}\), top-1: before [\d.]+%, after [\d.]+%", printed)
    for name in ("rows", "result", "confusion", "heldout"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (out / "export").iterdir()} == {
        "README.md", "accelerate_recipes.json", "config.json", "configuration_deepvit.py", "deepvit.py", "model.safetensors",
        "preprocessor_config.json",
    }  # fmt: skip
    first, *_, last = (record for record in read_metrics(out) if "eval_loss" in record)
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_accuracy"] == np.mean([line["classes"][0] == line["label"] for line in predictions(out)])


def test_one_trajectory(run):
    """Losses and gradient norms on augmented and mixed images agree to 1e-5 on one process, and sharded, with accumulation."""
    reference = run("--per_device_train_batch_size", 24, config="single", num_processes=1)
    assert len(trajectory(run())) == STEPS
    assert trajectory(run()) == near(trajectory(reference))


def test_weights_in_bf16(run):
    """Images are fp32: they are rounded to the weights' precision."""
    found = run("--optim", "adamw_bf16_kahan")
    assert [loss for loss, _ in trajectory(found)] == pytest.approx([loss for loss, _ in trajectory(run())], rel=0.02)
    assert {tensor.dtype for tensor in load_file(found / "export/model.safetensors").values()} == {torch.bfloat16}


def test_killed_and_resumed_with_workers_is_as_if_it_had_not_been(killed_and_resumed, arguments, run):
    whole, out = killed_and_resumed(SCRIPT, *arguments, whole=run())
    assert predictions(out) == predictions(whole)


@pytest.mark.slow
def test_streamed_shards_train_as_any_other_images(forks, arguments, images_file, serve, killed_and_resumed, tmp_path):
    """On 2 processes, a stream of unequal shards gives the losses of 1 process, also killed in step 5 and run again."""
    rows = Dataset.from_parquet(str(images_file), keep_in_memory=True).cast_column("image", ImageColumn(decode=False))
    names, files = rows.features["label"].names, {}
    for shard, (first, end) in enumerate(pairwise((0, 5, 45, 45, 70))):
        members = []
        for number, row in enumerate(rows.select(range(first, end))):
            label, image = names[row["label"]].encode(), row["image"]["bytes"]
            members += [(f"{number:03}.cls", label), (f"{number:03}.png", image)]
        write_tar(content := io.BytesIO(), members)
        files[f"/{shard}.tar"] = content.getvalue()
    server = serve(files)
    urls = [f"{server.url}{name}" for name in files]
    others = arguments[arguments.index("--config_overrides") :]
    streamed = ("--from_scratch", "--train_files", *urls, "--eval_files", images_file, *others)
    whole, killed = killed_and_resumed(SCRIPT, *streamed)
    assert re.search("4 streamed shards of 10 classes .* 120 held out", log_of(whole))
    forks.succeed(
        one := tmp_path / "one", *streamed, "--per_device_train_batch_size", 24, config="single", num_processes=1
    )
    assert len(trajectory(whole)) == STEPS and trajectory(whole) == near(trajectory(one))
    seen = [record["images_seen"] for record in read_metrics(whole) if "loss" in record]
    assert seen == [24 * step for step in range(1, STEPS + 1)]
    assert predictions(killed) == predictions(whole)
    assert (whole / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert "on the images of 4 streamed shards from http://" in (whole / "export/README.md").read_text()


ALONE = """
import io, json, sys
import pyarrow.parquet as pq, torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification
export, predictions, table, *rows = sys.argv[1:]
model = AutoModelForImageClassification.from_pretrained(export, trust_remote_code=True).eval()
processor = AutoImageProcessor.from_pretrained(export)
images = pq.read_table(table)["image"].to_pylist()
for line, row in zip(open(predictions), map(int, rows), strict=True):
    line = json.loads(line)
    image = Image.open(io.BytesIO(images[row]["bytes"])).convert("RGB")
    with torch.no_grad():
        logits = model(**processor(images=image, return_tensors="pt")).logits[0]
    assert logits.argmax() == line["classes"][0], line
    assert abs(logits.softmax(-1).max() - line["probability"]) < 1e-5
    assert model.config.id2label[0] == "T-shirt/top", model.config.id2label
assert "accelerate_recipes" not in sys.modules
assert "torchvision" not in sys.modules
"""


def test_export_predicts_alone_what_the_last_evaluation_did(run, fork_server, images_file, tmp_path):
    """A process without this project gives each held-out image the class and probability of the last evaluation."""
    from accelerate_recipes.images.labelled import load_images

    out, code = run(), tmp_path / "alone.py"
    code.write_text(ALONE)
    args = parse(Args, ["--from_scratch", "--train_files", str(images_file), "--heldout_share", "0.3"], world_size=1)
    rows = load_images(args)[1].rows.tolist()
    file = out / f"predictions/step-{STEPS}.jsonl"
    fork_server.run_python(
        tmp_path, code, out / "export", file, images_file, *rows, HF_MODULES_CACHE=tmp_path / "modules"
    )


def test_reattention_is_the_papers_formula():
    """Norm(Theta^T A), written plainly; unlike the paper's BatchNorm, it does not depend on how a batch is divided."""
    torch.manual_seed(0)
    module, maps = ReAttention(4, 5), torch.rand(2, 4, 5, 5).softmax(-1)
    torch.nn.init.normal_(module.theta)
    torch.nn.init.normal_(module.norm.weight)
    torch.nn.init.normal_(module.norm.bias)
    mixed = torch.zeros(2, 4, 5, 5)
    for new, old in product(range(4), range(4)):
        mixed[:, new] += module.theta[old, new] * maps[:, old]

    scale, shift = (weight[:, None, None] for weight in (module.norm.weight, module.norm.bias))
    mean, variance = mixed.mean(1, keepdim=True), mixed.var(1, unbiased=False, keepdim=True)
    wanted = (mixed - mean) / (variance + module.norm.eps).sqrt() * scale + shift
    torch.testing.assert_close(module(maps), wanted)
    torch.testing.assert_close(module(maps)[:1], module(maps[:1]))
    whole = module(maps)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(maps.bfloat16()).float(), whole, rtol=0.05, atol=0.1)
    rounded = copy.deepcopy(module).bfloat16()(maps.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), whole, rtol=0.05, atol=0.1)


@pytest.fixture
def layer() -> torch.nn.Module:
    torch.manual_seed(0)
    config = DeepViTConfig(image_size=8, patch_size=4, hidden_size=12, intermediate_size=24, num_attention_heads=3)
    return DeepViTForImageClassification(config).deepvit.layers[0].attention


def test_what_no_head_attends_to_does_not_weigh(layer):
    """The norm takes the mean over the heads away, and leaves a pair that no head attends to small beside the others."""
    scores = torch.randn(2, 3, 5, 5)
    scores[..., 0] = -5
    mixed = layer.reattention(scores.softmax(-1))
    torch.testing.assert_close(mixed.mean(1), torch.zeros(2, 5, 5))
    assert mixed.square().mean((0, 1, 2)).sqrt()[1:].min() > 0.2 and mixed[..., 0].abs().max() < 0.05


def test_the_maps_weight_the_values(layer):
    """Softmax(Q K^T / sqrt d), re-attention and the values, one head and one token at a time."""
    torch.nn.init.normal_(layer.qkv.weight)
    hidden = torch.randn(2, 5, 12)
    maps = []
    layer.reattention.register_forward_hook(lambda module, given, result: maps.append((given[0], result)))
    output = layer(hidden)
    ((softmax, mixed),) = maps
    query, key, value = layer.qkv(hidden).split(12, dim=-1)
    for row, head in product(range(2), range(3)):
        mine = slice(4 * head, 4 * head + 4)
        wanted = (query[row, :, mine] @ key[row, :, mine].T / 4**0.5).softmax(-1)
        torch.testing.assert_close(softmax[row, head], wanted)
        for token in range(5):
            weighted = sum(mixed[row, head, token, t] * value[row, t, mine] for t in range(5))
            attended = torch.linalg.solve(layer.projection.weight, output[row, token] - layer.projection.bias)[mine]
            torch.testing.assert_close(attended, weighted, rtol=1e-3, atol=1e-3)


def test_presets_have_the_published_sizes():
    """DeepViT-16, -24 and -32 of the paper's table have 24.5, 36.3 and 48.1 million parameters; ours 1B, 3B and 8B."""
    counts = {}
    for path in (ROOT / "recipes/configs/vit").glob("deepvit*.yaml"):
        args = parse(Args, ["--config", str(path)], world_size=8)
        count = new_classifier(args, [str(i) for i in range(1000)], torch.float32).num_parameters()
        counts[path.stem] = count
        assert f"Parameters: {count:,}" in path.read_text(), f"{path}: {count:,}"
    published = {"deepvit_16": 24.5e6, "deepvit_24": 36.3e6, "deepvit_32": 48.1e6}
    for name, count in published.items():
        assert counts[name] == pytest.approx(count, abs=0.1e6)
    ours = {"deepvit_1b": 1e9, "deepvit_3b": 3e9, "deepvit_8b": 8e9}
    for name, count in ours.items():
        assert counts[name] == pytest.approx(count, rel=0.03)
    assert counts.keys() == published.keys() | ours.keys()


SIZES = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip
OTHER_SIZES = {
    "dinov2": {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {"mlp_ratio": 2},
    "swin": {"image_size": 64, "embed_dim": 32, "depths": [1, 2], "num_heads": [1, 2]},
    "convnext": {"image_size": 64, "hidden_sizes": [32, 64], "depths": [1, 2], "num_stages": 2},
}


def architecture(model_type: str, **more: Any) -> Args:
    sizes = OTHER_SIZES.get(model_type, SIZES)
    return Args(model_type=model_type, from_scratch=True, config_overrides=sizes | more)


@pytest.mark.parametrize("model_type", LAYERS)
def test_new_models_and_their_layers(model_type):
    """Each architecture is made on the meta device, gets first weights by its own rule, and has three layers to gather."""
    args = architecture(model_type)
    assert image_size_problems(args) == [] and new_vision_config(args).to_dict().get("drop_path_rate", 0) == 0
    for number in (1, 4):
        (found,) = image_size_problems(architecture(model_type, num_channels=number))
        assert "num_channels" in found and f"is {number}," in found and " 3," in found
        (config := new_vision_config(args)).num_channels = number
        refuses(f"base is {number}", check_classifier, config, "base")
    size = args.config_overrides["image_size"]
    model = new_classifier(args, ["a", "b", "c"], torch.float32)
    (layer,) = model._no_split_modules
    assert sum(type(module).__name__ == layer for module in model.modules()) == 3
    initialize(model, 0, "cpu")
    batch = {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, -100])}
    with torch.no_grad():
        one, other = (image_loss(model.eval(), batch | {"labels": torch.tensor([label, -100])}) for label in (0, 2))
    assert one.isfinite() and one != other
    assert all(p.grad is None for p in model.parameters())
    image_loss(model, batch).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    assert flops_per_image(model, (size, size)).attended > 6 * sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("model_type", LAYERS)
def test_rows_of_a_classifier_go_by_the_names_of_its_classes(model_type, tmp_path, capsys):
    """Classes in another order, or fewer, keep their logits; a class that the base lacks gets a new row, and is counted."""
    base = new_classifier(architecture(model_type), ["car", "bus", "truck"], torch.float32)
    initialize(base, 0, "cpu")
    base.save_pretrained(tmp_path)
    size = architecture(model_type).config_overrides["image_size"]
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    wanted = dict(zip(["car", "bus", "truck"], base.eval()(pixel_values=pixels).logits.unbind(1), strict=True))
    for names in (["bus", "car", "truck"], ["truck", "bus"], ["ape", "bus", "car"], ["ape", "bee", "cow"]):
        model = load_image_classifier(str(tmp_path), names, dtype=torch.float32).eval()
        assert f"{len(wanted.keys() & names)} of {len(names)} classes have the rows" in capsys.readouterr().out
        assert model.config.id2label == dict(enumerate(names))
        assert model.config.label2id == {name: number for number, name in enumerate(names)}
        for name, found in zip(names, model(pixel_values=pixels).logits.unbind(1), strict=True):
            if name in wanted:
                torch.testing.assert_close(found, wanted[name])
            else:
                assert not any(torch.allclose(found, old, rtol=1e-3, atol=1e-4) for old in wanted.values())


def test_first_weights_in_bf16(monkeypatch):
    """They are those in fp32 with torch 2.11, whose truncated normal in bf16 is wrong; later ones draw in bf16."""

    def drawn(dtype: torch.dtype) -> torch.Tensor:
        model = initialize(classifier_on_meta(new_vision_config(architecture("deepvit")), dtype), 0, "cpu")
        return model.get_parameter("deepvit.layers.0.up.weight").data

    def wrong(tensor: torch.Tensor, **settings: Any) -> torch.Tensor:
        return tensor.fill_(2) if tensor.dtype == torch.bfloat16 else torch.nn.init.trunc_normal_(tensor, **settings)

    assert drawn(torch.bfloat16).abs().max() < 0.2
    monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, "trunc_normal_", wrong)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    assert torch.equal(drawn(torch.bfloat16), drawn(torch.float32).bfloat16())


@pytest.mark.parametrize("reattention", [True, False])
def test_flops_are_the_stated_formula(reattention):
    model = classifier_on_meta(new_vision_config(architecture("deepvit", reattention=reattention)))
    layers, width, mlp, heads = 3, 32, 64, 4
    patches = (32 // 8) ** 2
    tokens, classes = patches + 1, model.config.num_labels
    matrices = layers * (4 * width**2 + 2 * width * mlp) * tokens + 3 * 8**2 * width * patches + width * classes
    wanted = 6 * matrices + 12 * layers * width * tokens**2 + reattention * 6 * layers * heads**2 * tokens**2
    assert flops_per_image(model, (32, 32)).attended == wanted
    vit = classifier_on_meta(new_vision_config(architecture("vit")))
    assert reattention or flops_per_image(vit, (32, 32)).attended == wanted


def test_loss_of_mixed_images():
    """The loss of a mixed image is that of the mixed target, smoothed."""
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))

    class Model(torch.nn.Linear):
        def forward(self, pixel_values):
            return ImageClassifierOutput(logits=logits)

    share = torch.tensor([0.3, 1.0])
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.tensor([1, 2])}
    batch |= {"other_labels": torch.tensor([3, 0]), "share": share}
    target = torch.tensor([[0, 0.3, 0, 0.7], [0, 0, 1, 0]]) * 0.9 + 0.1 / 4
    wanted = -(target * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(image_loss(Model(1, 1), batch, label_smoothing=0.1), wanted)


@pytest.mark.parametrize(
    "model_type", by_time([name for name in LAYERS if name != "deepvit"], (), ("convnext", "swin"))
)
def test_pretrained_models_get_a_new_head(run, tmp_path, model_type):
    """A model of another task is fine-tuned with the same losses on one process and sharded over two, recomputed or not."""
    config = new_vision_config(architecture(model_type))
    config.num_labels, size = 4, config.image_size
    initialize(classifier_on_meta(config), 0, "cpu").save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(tmp_path / "model")
    args = ("--from_scratch", "false", "--model_name_or_path", tmp_path / "model", "--max_steps", 2)
    one = run(*args, "--per_device_train_batch_size", 12, config="single", num_processes=1)
    for env in ({}, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}):
        found = run(*args, **env)
        assert trajectory(found) == near(trajectory(one), rel=1e-4)
        (units,) = re.findall(r"(\d+) FSDP units \(.*Layer", log_of(found))
        assert int(units) >= 4  # three layers, and what is around them
    assert AutoModelForImageClassification.from_pretrained(found / "export").config.num_labels == 10
    assert run(*args, config="ddp")


def test_sizes_of_new_models_that_cannot_be():
    assert "a deepvit has no field depths" in image_size_problems(architecture("deepvit", depths=[2, 2]))[0]
    (found,) = image_size_problems(architecture("vit", image_size=[32, 96]))
    assert "image_size [32, 96]" in found and "square" in found
    for wrong in ({"depths": [1, 2, 1]}, {"num_heads": [3, 6]}):
        found = image_size_problems(architecture("swin", **wrong))
        assert "the widths are [32, 64" in found[0] and "must have a divisor of each" in found[0]


def test_confusion_is_drawn_without_a_class(tmp_path):
    draw_matrix(tmp_path / "confusion.png", np.array([[3, 1], [0, 0]]), ["a", "b"], "Two classes")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
