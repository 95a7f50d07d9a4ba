"""Tests of models that see images, trained whole: packed rows, frozen parts, what is trained and exported."""

import itertools
import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_images
import torch
import transformers
from helpers import CHILDREN, refuses
from image_steps import BOTH_WAYS, OUTPUTS, TEXTS, documents_of, loss_of
from peft import AutoPeftModel, PeftModel
from safetensors.torch import load_file, save_file
from tiny import composite_config, tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import is_torchvision_available

from accelerate_recipes.arguments.adapters import AdapterArgs
from accelerate_recipes.checkpoint import export
from accelerate_recipes.checkpoint.base_form import BaseForm
from accelerate_recipes.checkpoint.files import read_marker
from accelerate_recipes.conversations.heads import add_head
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.images.pictures import Pictures, processor_files
from accelerate_recipes.images.supervised_images import ImageCollator, documents_to_try, flops_of_images
from accelerate_recipes.metrics import flops_per_token
from accelerate_recipes.models import IGNORE_INDEX, images
from accelerate_recipes.models.adapters import targets
from accelerate_recipes.models.attention import beyond_documents, choose, sees_images_whole
from accelerate_recipes.models.composites import PARTS_OF_WHOLE, freeze, unused_parameters, weights_by_part
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.models.image_probe import check_whole, tiny_of_text
from accelerate_recipes.models.images import (
    IMAGE_MODELS,
    OF_TOKENS,
    ImageModelArgs,
    check_image_model,
    image_model_on_meta,
    join_documents,
    load_image_model,
    patches_of,
)
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.mixers import unpack_documents
from accelerate_recipes.models.pretrained import check_model, load_config
from accelerate_recipes.models.probes import mixers_in
from accelerate_recipes.models.processors import load_processor
from accelerate_recipes.models.tokenizers import load_tokenizer

FEW = ["gemma3", "llava_next", "mistral3", "qwen3_5", "qwen3_vl", "smolvlm"]
BEYOND = ("gemma3", "qwen3_5", "qwen3_5_moe", BOTH_WAYS)  # what `documents` does not compute
# Those whose processor transformers makes without torchvision, with which it would read the videos of the others.
BY_ITSELF = ("gemma3", "gemma3-own", "idefics3", "llava_next")
SETTINGS = ["--learning_rate", 1e-3, "--adam_epsilon", 1e-3, "--no_freeze_vision_tower", "--max_steps", 4]
SCRIPT = CHILDREN / "image_steps.py"


def args_of(model: object, **changes: object) -> SimpleNamespace:
    usual = {f"freeze_{part}": False for part in PARTS_OF_WHOLE}
    usual |= {"use_peft": False, "load_in_4bit": False, "data_only": False, "has_boundaries": True}
    usual |= {"param_dtype": torch.float32, "attn_implementation": "sdpa", "model_name_or_path": str(model)}
    return SimpleNamespace(**usual | changes)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Save a tiny base of a family, once."""
    folders = {}

    def base(name: str):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("bases") / name
            with pytest.MonkeyPatch.context() as patch:
                if name == BOTH_WAYS:
                    family = tiny_images.FAMILIES["gemma4"]
                    patch.setitem(family, "text", {"use_bidirectional_attention": "vision", "sliding_window": 16})
                    tiny_images.saved_config.cache_clear()
                tiny_images.save_base(folders[name], name.partition("-")[0])
            tiny_images.saved_config.cache_clear()
        return folders[name]

    return base


def prepared(args: SimpleNamespace) -> transformers.PreTrainedModel:
    """Load a model as a recipe does."""
    model = load_image_model(args)
    add_head(model, OUTPUTS, tiny=tiny_of_text)
    unpack_documents(model, mixers_in(model))
    return model.train()


def row_of(model: transformers.PreTrainedModel, documents: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return join_documents(image_model_on_meta(model.config).base_model, documents)


def gradients(model: transformers.PreTrainedModel) -> torch.Tensor:
    gradient = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in sorted(model.named_parameters())]
    return torch.cat([value.flatten() for value in gradient]).double()


def alone(base: object, documents: list[dict[str, torch.Tensor]]) -> tuple[list[float], torch.Tensor]:
    """Compute each document alone by transformers: the losses, and the gradient of their sum."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(base, attn_implementation="eager").train()
    found = []
    for document in documents:
        inputs = {name: value for name, value in document.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, document["labels"][0, 1:], reduction="sum")
        loss.backward()
        found.append(loss.item())
    return found, gradients(model)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", [*IMAGE_MODELS, BOTH_WAYS])
def test_a_packed_row_computes_what_its_documents_do_alone(name, bases):
    base, documents = bases(name), documents_of(name)
    losses, gradient = alone(base, documents)
    model = prepared(args_of(base))
    row = row_of(model, documents)
    row["pixel_values"].requires_grad_()
    loss_of(model, row).backward()
    assert distance(gradients(model), gradient) < 1e-5
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == used
    assert {id(p) for name, p in model.named_parameters() if name not in used} == set(map(id, unused_parameters(model)))
    # Of the last document alone: no other image matters.
    row["pixel_values"].grad = None
    last = row | {"labels": row["labels"].clone()}
    last["labels"][:, : -documents[-1]["labels"].shape[1]] = IGNORE_INDEX
    loss = loss_of(model, last)
    assert loss.item() == pytest.approx(losses[-1], rel=1e-5)
    loss.backward()
    axis = 1 if "pixel_attention_mask" in row else 0
    number = documents[-1]["pixel_values"].shape[axis]
    of_pixels = row["pixel_values"].grad
    assert not of_pixels.narrow(axis, 0, of_pixels.shape[axis] - number).any()
    assert of_pixels.narrow(axis, of_pixels.shape[axis] - number, number).any()
    assert bool(beyond_documents(model.config)) == (name in BEYOND), name
    if name not in BEYOND:
        told = prepared(args_of(base, attn_implementation=DOCUMENTS))
        loss_of(told, row_of(told, documents)).backward()
        assert distance(gradients(told), gradient) < 1e-5
    if sees_images_whole(model.config):
        eager = prepared(args_of(base, attn_implementation="eager"))
        loss_of(eager, row_of(eager, documents)).backward()
        assert distance(gradients(eager), gradient) < 1e-5


@pytest.mark.parametrize("file", ["processor_config", "preprocessor_config", "tokenizer_config", None])
def test_the_processor_is_that_of_the_checkpoint(file, tmp_path):
    """A Pixtral is of the type of LLaVA; one of the files names its processor, which its export has too."""
    base = tiny_images.save_base(tmp_path / "base", "mistral3")
    whole = tiny_images.config("mistral3")
    parts = {"text_config": whole.text_config, "vision_config": whole.vision_config, "vision_feature_layer": -1}
    parts |= {"image_token_index": whole.image_token_id, "vision_feature_select_strategy": "full"}
    config = transformers.CONFIG_MAPPING["llava"](**parts)
    config.save_pretrained(base)
    names = ("processor_config.json", "tokenizer_config.json")
    saved, of_tokens = (json.loads((base / name).read_text(encoding="utf-8")) for name in names)
    images = saved.pop("image_processor")
    saved["spatial_merge_size"] = 1
    for name, content in zip((*names, "preprocessor_config.json"), (saved, of_tokens, images), strict=True):
        content.pop("processor_class", None)
        known = {"processor_config.json": "OfItsOwnCode" if file is None else None, f"{file}.json": "PixtralProcessor"}
        (base / name).write_text(json.dumps(content | {"processor_class": known.get(name)}), encoding="utf-8")
    tokenizer = load_tokenizer(str(base))
    processor = load_processor(str(base), tokenizer)
    if file is None:  # as that of the type, which has no more to go by
        assert type(processor).__name__ == "LlavaProcessor"
        return
    text, _ = Pictures(processor).of_size(24, 16, False)
    assert type(processor).__name__ == "PixtralProcessor" and "[IMG_BREAK]" in text and text.endswith("[IMG_END]")
    out = tmp_path / "export"
    config.save_pretrained(out)
    BaseForm(config, tokenizer, processor_files(str(base), processor)).save_pretrained(out)
    assert type(load_processor(str(out), load_tokenizer(str(out)))).__name__ == "PixtralProcessor"
    check_whole(config, "base", "sdpa", documents_to_try(ImageCollator(processor, config)))


def grown(name: str) -> transformers.PreTrainedConfig:
    """Return the configuration of a family in sizes that a trial must make smaller."""
    config = tiny_images.config(name)
    vision, text = config.vision_config, config.get_text_config()
    wide = ("hidden_size", "intermediate_size", "embed_dim", "out_hidden_size", "num_heads", "num_attention_heads")
    for part, field in itertools.product((vision, text), (*wide, "num_key_value_heads")):
        if field in vars(part):
            setattr(part, field, 8 * getattr(part, field))
    for field in {"depth", "num_hidden_layers"} & vars(vision).keys():
        setattr(vision, field, 12)
    for field in {"deepstack_visual_indexes", "fullatt_block_indexes"} & vars(vision).keys():
        setattr(vision, field, [3, 6, 9])
    return config


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_trial_with_images_agrees(name):
    check_whole(grown(name), "base", "sdpa", documents_of(name))


def three_positions(base: transformers.PreTrainedModel, documents: list) -> dict[str, torch.Tensor]:
    return (row := join_documents(base, documents)) | {"position_ids": row["position_ids"][1:]}


@pytest.mark.parametrize("name, part, broken", [
    ("gemma3", "images.image_masks", lambda config, batch: {}),
    ("qwen3_vl", "image_probe.join_documents", three_positions),
    ("qwen3_5", "image_probe.unpack_documents", lambda model, mixers: None),
])  # fmt: skip
def test_a_trial_with_images_finds_what_leaks(name, part, broken, monkeypatch):
    monkeypatch.setattr(f"accelerate_recipes.models.{part}", broken)
    with pytest.raises(ConfigError, match=r"does not compute .* by \d+%, .* vision_tower by \d+%.* language_model"):
        check_whole(grown(name), "base", "sdpa", documents_of(name))


def test_a_model_that_cannot_be_tried_is_refused():
    config = grown("llava")
    config.vision_feature_layer = -9
    with pytest.raises(ConfigError, match=r"no tiny llava could be made .* base computes .*IndexError"):
        check_whole(config, "base", "sdpa", documents_of("llava"))


@pytest.mark.parametrize("name", ["gemma3", BOTH_WAYS])
def test_images_that_are_seen_whole_need_sdpa(name, bases):
    for kernel in (DOCUMENTS, "flex_attention"):
        with pytest.raises(ConfigError, match=r"images whose tokens see each other.* give sdpa"):
            load_image_model(args_of(bases(name), attn_implementation=kernel))
    assert choose("auto", load_config(str(bases(name))), torch.bfloat16, True)[0] == "sdpa"


def test_transformers_cannot_read_a_lone_token_of_an_image(bases):
    """If this fails, `upstream.keep_lone_token` can go."""
    (document,) = documents_of("mistral3", [("<image>", [(8, 8)], "yes")])
    with pytest.raises(RuntimeError, match="split"):
        alone(bases("mistral3"), [document])
    loss_of(model := prepared(args_of(bases("mistral3"))), row_of(model, [document]))


@pytest.mark.skipif(is_torchvision_available(), reason="it is about machines without torchvision")
def test_transformers_asks_for_what_reads_videos():
    """If a part of this fails, that part of `processors.class_of_processor` can go."""
    with pytest.raises(ImportError, match="Torchvision"):
        transformers.PixtralProcessor()
    parts = tiny_images.processor("qwen2_vl")
    with pytest.raises((AttributeError, TypeError)):
        transformers.Qwen2VLProcessor(parts.image_processor, parts.tokenizer, None)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "idefics3", "llava_next", "qwen2_5_vl"])
def test_parts_are_frozen(name, bases):
    for frozen in PARTS_OF_WHOLE:
        model = load_image_model(args_of(bases(name), **{f"freeze_{frozen}": True}))
        unused = {id(parameter) for parameter in unused_parameters(model)}
        for part, parameters in weights_by_part(model).items():
            assert parameters
            assert {p.requires_grad for p in parameters if id(p) not in unused} == {part != frozen}
    every = [id(parameter) for parameters in weights_by_part(model).values() for parameter in parameters]
    assert {*every} == {id(parameter) for parameter in model.parameters()}


def test_parts_that_hear_are_never_trained():
    settings = tiny_images.config("gemma4")
    sound = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    settings.audio_config = transformers.CONFIG_MAPPING["gemma4_audio"](**sound)
    model = freeze(image_model_on_meta(settings), args_of(""))
    trained = {name.split(".")[1] for name, parameter in model.named_parameters() if parameter.requires_grad}
    named = {name.split(".")[1] for name, _ in model.named_parameters()}
    assert named - trained == {"audio_tower", "embed_audio"}


def test_what_a_model_of_images_cannot_do_is_refused(bases, monkeypatch):
    refuses(r"llama4.*qwen2_5_vl", check_image_model, composite_config("llama4"), "base")
    refuses(r"llama.*qwen2_5_vl", check_image_model, tiny_config(), "base")
    monkeypatch.setattr("accelerate_recipes.models.images.ranks_a_row", lambda: 2)
    refuses("parallelism_config_cp_size is 2", load_image_model, args_of(bases("qwen2_vl")))

    @dataclass
    class Args(ImageModelArgs, AdapterArgs):
        text_only_export: bool = False

    assert not Args().image_model_problems() and Args().freeze_vision_tower
    assert "--lora_target_modules" in Args(freeze_vision_tower=False, use_peft=True).image_model_problems()[0]
    args = Args(freeze_language_model=True, freeze_multi_modal_projector=True, use_peft=True, load_in_4bit=True)
    assert [said.split()[0] for said in args.image_model_problems()] == [
        "--freeze_language_model", "--freeze_language_model:", "--load_in_4bit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "names", [FEW[2:5], pytest.param(sorted({*IMAGE_MODELS, BOTH_WAYS} - {*FEW[2:5]}), marks=pytest.mark.slow)]
)
def test_ranks_without_images_change_nothing(names, forks, bases, tmp_path):
    recomputed = ("--fsdp_activation_checkpointing", "true")
    places = {"single": (1, ()), "fsdp_full": (2, recomputed), "ddp": (2, ())}
    for config, (num_processes, flags) in places.items():
        given = ["--bases", *(bases(name) for name in names), *SETTINGS]
        forks.succeed(tmp_path / config, *given, config=config, flags=flags, num_processes=num_processes)
    for config, name in itertools.product(("fsdp_full", "ddp"), names):
        one, two = (json.loads((tmp_path / place / f"{name}.json").read_text()) for place in ("single", config))
        assert config == "ddp" or len(two["units"]) >= 3  # layers of the text part, of the tower, and the rest
        # Loss and norm of the gradients, which is 53 for one and differs by 1.2e-5 on some processors.
        assert two["steps"] == [pytest.approx(step, rel=3e-5) for step in one["steps"]], (config, name)
        weights, expected = (load_file(tmp_path / place / f"{name}.safetensors") for place in (config, "single"))
        assert all(torch.allclose(weights[part], expected[part], atol=1e-5) for part in expected), (config, name)


def older(folder: Path) -> Path:
    """Give a base the files of a processor of transformers 4, with older names, and a head that transformers ignores."""
    settings = json.loads((folder / "processor_config.json").read_text())
    of_images = settings.pop("image_processor")
    size = of_images.pop("size")
    of_images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(of_images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": settings["processor_class"]}))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    weights = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.ones(3)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def exported(forks, tmp_path_factory):
    """Train and export several families; returns the folder of each, with that of its base beside it."""
    root = tmp_path_factory.mktemp("exported")
    for name in (*FEW, "gemma4", "idefics3", "llava_onevision"):
        tiny_images.save_base(root / "bases" / name, name)
    tiny_images.save_base(root / "bases" / "qwen3_5-older", "qwen3_5")
    older(root / "bases" / "qwen3_5-older")
    for name in ("gemma3", "llava_next"):  # with the names of the class
        base = tiny_images.save_base(root / "bases" / f"{name}-own", name)
        own = transformers.AutoModelForImageTextToText.from_pretrained(base)
        weights = {part: value for part, value in own.state_dict().items() if part not in own.all_tied_weights_keys}
        save_file(weights, base / "model.safetensors", {"format": "pt"})
    folders = sorted((root / "bases").iterdir())
    forks.succeed(root / "out", "--bases", *folders, "--max_steps", 4, "--exports", config="single", num_processes=1)
    return root


@pytest.mark.parametrize("name", [*FEW, "gemma4", "idefics3", "llava_onevision", "qwen3_5-older", "gemma3-own"])
def test_transformers_reads_the_whole_model_from_the_export(name, exported):
    base, out = exported / "bases" / name, exported / "out" / name / "export"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    model = transformers.AutoModelForImageTextToText.from_pretrained(out)
    trained = load_file(exported / "out" / f"{name}.safetensors")
    assert all(torch.equal(parameter, trained[part]) for part, parameter in model.named_parameters())
    first = transformers.AutoModelForImageTextToText.from_pretrained(base)
    frozen = {id(p) for p in (*weights_by_part(model)["vision_tower"], *unused_parameters(model))}
    changed = {part for part, p in model.named_parameters() if not torch.equal(p, first.get_parameter(part))}
    assert changed and not {part for part, p in model.named_parameters() if id(p) in frozen} & changed
    for file in ("preprocessor_config.json", "processor_config.json", "chat_template.json", "chat_template.jinja"):
        assert (base / file).exists() == (out / file).exists(), file
        assert not (base / file).exists() or (base / file).read_bytes() == (out / file).read_bytes(), file
    assert check_model(str(out), images.images_and_text()).config.architectures == [type(model).__name__]
    settings = [json.loads((folder / "config.json").read_text()) for folder in (base, out)]
    assert settings[1] == settings[0] | {"torch_dtype": settings[0]["dtype"]}
    processors = [load_processor(str(folder), load_tokenizer(str(folder))) for folder in (base, out)]
    assert processors[0].image_processor.to_dict() == processors[1].image_processor.to_dict()
    if name not in BY_ITSELF:
        return
    text, sizes, _ = TEXTS[1]
    seen = [tiny_images.picture(*size, seed=i) for i, size in enumerate(sizes)]
    written = text.replace("<image>", tiny_images.FAMILIES[name.partition("-")[0]]["written"])
    theirs = transformers.AutoProcessor.from_pretrained(out, backend="pil")(
        text=[f"<|im_start|>{written}:"], images=[seen], add_special_tokens=False, return_tensors="pt"
    )
    (document,) = documents_of(name, [(text, sizes, "")])
    values = {part: value for part, value in theirs.items() if part != "attention_mask"}
    assert values.keys() == document.keys() - {"labels"}
    length = values["input_ids"].shape[1]
    whole = {part: value[:, :length] if part in OF_TOKENS else value for part, value in document.items()}
    assert all(torch.equal(value, whole[part]) for part, value in values.items())


def test_an_export_in_bf16_leaves_frozen_parts_as_they_are(exported, tmp_path, monkeypatch):
    checkpoint = exported / "out" / "gemma3" / "checkpoint-4"
    marker = read_marker(checkpoint) | {"mixed_precision": "bf16"}
    monkeypatch.setattr(export.files, "read_marker", lambda checkpoint: marker)
    export.export(checkpoint, tmp_path / "export")
    weights, base = (load_file(f / "model.safetensors") for f in (tmp_path / "export", exported / "bases" / "gemma3"))
    frozen = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert frozen == {name for name in base if name.startswith("vision_tower.")}
    assert all(torch.equal(weights[name], base[name]) for name in frozen)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "export").dtype == torch.bfloat16
    export.export(checkpoint, tmp_path / "asked", dtype=torch.bfloat16)
    assert {weight.dtype for weight in load_file(tmp_path / "asked" / "model.safetensors").values()} == {torch.bfloat16}


def test_processor_files_say_the_most_pixels(bases, tmp_path):
    for name in ("qwen2_5_vl", "older"):
        base = tiny_images.save_base(tmp_path / name, "qwen2_5_vl")
        base = older(base) if name == "older" else base
        processor = load_processor(str(base), load_tokenizer(str(base)), max_pixels=512)
        processor.tokenizer.chat_template = "{{ 'new' }}"
        files = processor_files(str(base), processor)
        template = json.loads(files.get("chat_template.json", b'{"chat_template": ""}'))
        assert template["chat_template"] in ("", "{{ 'new' }}")
        for file in ("model.safetensors", "config.json"):
            (tmp_path / f"{name} again").mkdir(exist_ok=True)
            (tmp_path / f"{name} again" / file).symlink_to(base / file)
        for file, content in files.items():
            (tmp_path / f"{name} again" / file).write_bytes(content)
        again = load_processor(str(tmp_path / f"{name} again"), processor.tokenizer)
        assert again.image_processor.size["longest_edge"] == 512
        assert "longest_edge" not in str(files.get("preprocessor_config.json")) or name == "older"


@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS if name.startswith(("qwen", "glm"))])
def test_the_most_pixels_are_those_of_an_image(name, bases):
    """Also where a processor counts the frames of a patch. Fewer than it scales small images to are refused."""
    read = partial(load_processor, str(bases(name)), load_tokenizer(str(bases(name))))
    for most in (256, 1024):
        (patches,) = patches_of(tiny_images.config(name), Pictures(read(most)).of_size(256, 256, False)[1])
        assert patches * 4**2 == most
    refuses(r"--image_max_pixels 9: .* scales smaller images up to \d+ pixels", read, 9)


def test_a_processor_is_read_before_the_run(bases, tmp_path):
    """So that a model without one, or with images of one size, is refused before its weights are loaded."""
    base = shutil.copytree(bases("gemma3"), tmp_path / "base")
    refuses(r"--image_max_pixels 512: .* sizes of its own", images.images_and_text(512).reader, str(base))
    (base / "processor_config.json").unlink()
    refuses(r"the processor of .* cannot be loaded", images.images_and_text().reader, str(base))


def test_adapters_lie_in_the_text_part(forks, bases, tmp_path):
    names = ["gemma3", "idefics3", "qwen3_vl_moe"]
    folders = [bases(name) for name in names]
    lora = ["--use_peft", "--lora_dropout", 0, "--model_name_or_path", folders[0], "--learning_rate", 0.01]
    args = ["--bases", *folders, "--max_steps", 4, "--exports", *lora]
    forks.succeed(tmp_path / "out", *args, config="single", num_processes=1)
    for name, base in zip(names, folders, strict=True):
        out = tmp_path / "out" / name
        trained = load_file(tmp_path / "out" / f"{name}.safetensors")
        adapters = {part for part in trained if ".lora_" in part}
        assert adapters and all(re.match(r"model\.(language|text)_model\.", part) for part in adapters)
        assert "q_proj" in {part.split(".")[-4] for part in adapters}
        (document,) = documents_of(name, TEXTS[:1])
        inputs = {part: value for part, value in document.items() if part != "labels"}
        plain = transformers.AutoModelForImageTextToText.from_pretrained(base)
        before = plain(**inputs).logits
        by_peft = PeftModel.from_pretrained(plain, out / "export")
        loaded = {part.removeprefix("base_model.model."): p for part, p in by_peft.named_parameters()}
        assert all(torch.equal(loaded[part], trained[part]) for part in adapters)
        logits = by_peft(**inputs).logits
        export.export(out / "checkpoint-4", out / "merged", merge_adapter=True)
        merged = transformers.AutoModelForImageTextToText.from_pretrained(out / "merged")
        assert torch.allclose(merged(**inputs).logits, logits, atol=1e-4)
        assert not torch.allclose(before, logits, atol=1e-2)
        files = [load_file(folder / "model.safetensors") for folder in (base, out / "merged")]
        assert files[0].keys() == files[1].keys()
        tower = [part for part in files[0] if "visual" in part or "vision" in part]
        assert tower and all(torch.equal(files[0][part], files[1][part]) for part in tower)
        assert AutoPeftModel.from_pretrained(out / "export").base_model.model.__class__ is type(merged)


def test_adapters_elsewhere_if_they_are_asked_for(bases):
    model = load_image_model(args_of(bases("qwen2_5_vl")))
    layers = {"q_proj": "language_model", "qkv": "visual", "visual.blocks.0.mlp.up_proj": "visual"}
    for asked, places in ((layer, {part}) for layer, part in layers.items()):
        given = SimpleNamespace(lora_target_modules=[asked], load_in_4bit=False)
        chosen = targets(model, given)["target_modules"]
        assert {name.split(".")[1] for name in chosen} == places
    every = targets(model, SimpleNamespace(lora_target_modules=["all-linear"], load_in_4bit=False))["target_modules"]
    assert {name.split(".")[1] for name in every} == {"language_model"} and len(every) == 14


@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS if name not in ("glm46v", "idefics3")])
def test_flops_of_images_are_those_that_torch_counts(name, bases):
    (document,) = documents_of(name, [("<image>", [(64, 48)], "")])
    base = transformers.AutoModelForImageTextToText.from_pretrained(bases(name), attn_implementation="eager")
    values = {part: v for part, v in document.items() if part not in ("input_ids", "labels") and "type" not in part}
    for trained in (False, True):
        model = freeze(base, args_of("", freeze_vision_tower=not trained))
        with FlopCounterMode(display=False) as counter:
            found = model.base_model.get_image_features(**values)
            features = torch.cat([*found.pooler_output])
            deep = [features, *(getattr(found, "deepstack_features", None) or ())]
            sum(torch.cat([*part]).sum() if isinstance(part, tuple) else part.sum() for part in deep).backward()
        num_tokens = features.numel() // features.shape[-1]
        counted = flops_of_images(model, patches_of(model.config, values), num_tokens)
        assert counted == pytest.approx(counter.get_total_flops(), rel=0.2), trained


@pytest.mark.parametrize("name", ["gemma3", "llava_next", "qwen2_5_vl"])
def test_flops_of_texts_are_those_of_the_text_part(name, bases):
    whole, text = load_image_model(args_of(bases(name))), load_model(str(bases(name)), "sdpa")
    assert flops_per_token(whole, 10, 20) == flops_per_token(text, 10, 20)
    half = freeze(whole, args_of("", freeze_language_model=True))
    assert flops_per_token(half, 0, 0).attended == flops_per_token(text, 0, 0).attended * 4 / 6


def test_the_text_part_is_asked_too():
    """A LLaVA may have any text part: one that ignores positions is refused, and its kernels are those of both."""
    llava = tiny_images.config("llava")
    llava.text_config = transformers.CONFIG_MAPPING["bloom"](hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ConfigError, match=r"base does not compute .*gradient of its language_model"):
        check_whole(llava, "base", "eager", documents_of("llava"))
    internvl = transformers.CONFIG_MAPPING["internvl"](text_config={"model_type": "gpt_oss"})
    assert choose("auto", internvl, torch.bfloat16, True) == ("eager", "the model has attention sinks")
    refuses("does not support it; give eager", choose, "sdpa", internvl, torch.bfloat16, True)
