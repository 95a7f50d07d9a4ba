"""Tests of composite checkpoints: their text part is trained alone, and the export is the whole again."""

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers
from helpers import CHILDREN, ROOT, by_time, log_of, losses, refuses, write_rows
from packaging.version import Version
from safetensors.torch import load_file
from tiny import COMPOSITE, LINEAR, change_weights, tiny_composite, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from accelerate_recipes import recipe
from accelerate_recipes.checkpoint.base_form import composite_files, whole_content, with_older_fields
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.checkpoint.files import check_base, read_marker
from accelerate_recipes.checkpoint.weight_files import saved_tensors
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models import composites
from accelerate_recipes.models.base import open_base
from accelerate_recipes.models.loading import CAUSAL, load_model
from accelerate_recipes.models.pretrained import check_model, mapped_weights
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.models.weights import linear_layers_and_experts
from recipe_tools.check_export import check_export, load_export

SCRIPT = CHILDREN / "toy.py"
VOCABULARY = 110  # the last ten tokens are for images
MTP = {"mtp.fc.weight": torch.arange(32.0), "mtp.layers.0.mlp.down_proj.weight": torch.arange(8.0).bfloat16()}
PATCHES = {"pixel_values": torch.linspace(-1, 1, 16 * 96).reshape(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)}
IMAGES = {
    "gemma3": PIXELS,
    "gemma4": {
        "pixel_values": torch.linspace(0, 1, 16 * 48).reshape(1, 16, 48),
        "image_position_ids": torch.tensor([[[x, y] for y in range(4) for x in range(4)]]),
    },
    "llama4": PIXELS, "mistral3": PIXELS | {"image_sizes": torch.tensor([[8, 8]])},
    "qwen3_5": PATCHES, "qwen3_5_moe": PATCHES, "qwen3_vl": PATCHES,
}  # fmt: skip
# What a model of images and text asks for beside a text.
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}


def save_base(
    folder: Path, model_type: str, vocab_size: int = VOCABULARY, special: tuple = (1, 2, 0), **changes: object
) -> Path:
    """Save a tiny composite as it is published: with a processor, and with heads that transformers ignores.

    `special` are the tokens that begin, end and pad a text.
    """
    model = tiny_composite(model_type, vocab_size, **changes)
    for name, token in zip(("bos_token_id", "eos_token_id", "pad_token_id"), special, strict=True):
        for settings in (model.config.get_text_config(), model.generation_config):
            setattr(settings, name, token)
    model.save_pretrained(folder)
    if model_type.startswith("qwen3_5"):
        change_weights(folder, lambda weights: weights | MTP)
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 8},  "image_mean": [0.5, 0.5, 0.5]}')
    return folder


@torch.no_grad()
def logits_of(model: PreTrainedModel, length: int = 12) -> torch.Tensor:
    ids = torch.arange(2 * length).reshape(2, length) * 7 % 100
    types = {name: torch.zeros_like(ids) for kind, name in TYPES.items() if kind == model.config.model_type}
    return model.eval()(input_ids=ids, **types).logits


def test_types():
    assert sorted(composites.COMPOSITES) == sorted(COMPOSITE) and IMAGES.keys() < COMPOSITE.keys()


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", composites.COMPOSITES)
def test_the_text_part_computes_what_the_whole_does(model_type, tied, tmp_path):
    base = save_base(tmp_path, model_type, tie_word_embeddings=tied)
    checked = check_model(str(base), CAUSAL)
    model = load_model(str(base), "auto")
    assert checked.state_dict().keys() == model.state_dict().keys()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied or model_type == "llama4"
    opened = open_base(checked, str(base), None)
    of_text = {opened.files[name] for name in opened.weights}
    assert of_text | opened.rest.keys() == mapped_weights(base).keys() and not of_text & opened.rest.keys()
    assert not any(".mlp." in name and "vis" not in name for name in opened.rest if name not in MTP)
    now = whole_content(model.config)
    assert type(model.config)(**with_older_fields(now, now)).rope_parameters == model.config.rope_parameters
    assert torch.equal(logits_of(model), logits_of(AutoModelForImageTextToText.from_pretrained(base)))


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="it works there")
def test_a_whole_llama4_computes_nothing(monkeypatch):
    """Of transformers 5.24 by itself: when it works, `image_outputs` may go from tiny.py, and a sentence from docs/checkpoints.md."""
    monkeypatch.delattr(MoeCausalLMOutputWithPast, "image_outputs")
    refuses("image_outputs", logits_of, tiny_composite("llama4"), error=AttributeError)


@pytest.mark.parametrize("model_type", composites.COMPOSITES)
def test_adapters_find_their_layers_in_the_whole(model_type):
    """All of them, also those that lie beside the layers, and none of other parts."""
    with torch.device("meta"):
        whole = tiny_composite(model_type)
        text = AutoModelForCausalLM.from_config(composites.text_part(whole.config))
    places = composites.places_of_parts(text, whole.state_dict())
    names = [*linear_layers_and_experts(text)[0], "lm_head"]
    pattern = composites.layers_in_whole({name.rpartition(".")[2] for name in names}, places)
    linear = {name for name, module in whole.named_modules() if isinstance(module, torch.nn.Linear)}
    found = {name for name in linear if re.fullmatch(pattern, name)}
    assert found == {composites.name_in_whole(name, places) for name in names}


@torch.no_grad()
def features_of(model: PreTrainedModel) -> list[torch.Tensor]:
    image = IMAGES[model.config.model_type]
    if model.config.model_type == "llama4":  # `get_image_features` of transformers 5.23 fails for it
        return [model.multi_modal_projector(model.vision_model(**image).last_hidden_state)]
    found = model.get_image_features(**image).pooler_output
    assert found[0].numel()
    return [*found]


def check_whole(export: Path, base: Path, text_dtype: torch.dtype = torch.float32) -> None:
    """Check that an export is the whole composite: the text part changed, every other tensor and file the base's."""
    files, of_base = mapped_weights(export), mapped_weights(base)
    assert files.keys() == of_base.keys()
    text = {name for name in files if "language_model" in name or name.startswith("lm_head")}
    assert {files[name].dtype for name in text} == {text_dtype}
    same = {name for name in files if files[name].dtype == of_base[name].dtype and files[name].equal(of_base[name])}
    assert {name for name in same if "layer_scalar" not in name} == files.keys() - text  # of Gemma 4, constant
    assert (export / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    settings = (base / "config.json").read_text().replace('dtype": "float32"', f'dtype": "{str(text_dtype)[6:]}"')
    assert json.loads((export / "config.json").read_text()) | {"vision_config": None} == json.loads(settings) | {
        "vision_config": None
    }
    whole, before = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval() for folder in (export, base)
    )
    for features, wanted in zip(features_of(whole), features_of(before), strict=True):
        assert torch.allclose(features, wanted, rtol=1e-5, atol=1e-7)  # numbers in files may be aligned in other ways


RUN = ("--num_train_epochs", 1.2)


@pytest.fixture(scope="module", params=by_time(IMAGES, ["qwen3_5"], ["gemma3"]))
def trained(request, forks, tmp_path_factory) -> tuple[Path, Path, str]:
    """A base, the output directory of a run of two ranks of FSDP2 that began with it, and the log."""
    folder = tmp_path_factory.mktemp(request.param)
    base = save_base(folder / "base", request.param)
    return base, folder / "two", forks.succeed(folder / "two", "--model_name_or_path", base, *RUN)


def test_trained_as_by_one_process(trained, forks, tmp_path):
    base, two, log = trained
    forks.succeed(tmp_path / "one", "--model_name_or_path", base, *RUN, num_processes=1)
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(two)[6] < losses(two)[1] - 0.02
    assert "Not trained, as in" in log
    assert ("mtp (2 weights)" in log) == bool(MTP.keys() & mapped_weights(base).keys())


@pytest.mark.slow
def test_killed_and_resumed(trained, killed_and_resumed):
    base, two, _ = trained
    killed_and_resumed(SCRIPT, "--model_name_or_path", base, *RUN, whole=two)


def test_the_export_is_the_whole(trained, tmp_path):
    base, two, _ = trained
    check_whole(two / "export", base)
    checkpoint = two / "checkpoint-6"
    assert saved_tensors(checkpoint).keys() <= load_model(str(base), "auto").state_dict().keys()
    export(checkpoint, tmp_path / "bf16", dtype=torch.bfloat16, max_shard_size="20KB")
    check_whole(tmp_path / "bf16", base, torch.bfloat16)
    export(checkpoint, tmp_path / "text", text_only=True)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert not (tmp_path / "text/preprocessor_config.json").exists()
    assert torch.equal(logits_of(text), logits_of(AutoModelForImageTextToText.from_pretrained(two / "export")))


def test_another_base_is_refused(trained, forks, tmp_path):
    """What is not trained comes from the base: one changed number there is found, by a resume and by an export."""
    base, two, _ = trained
    shutil.copytree(two, tmp_path / "out")
    file = base / "model.safetensors"
    whole, name = file.read_bytes(), next(name for name in load_file(file) if "vis" in name)
    try:
        change_weights(base, lambda weights: weights | {name: weights[name] + 1})
        said = "holds the trained part of .* has other weights now"
        assert forks.run(tmp_path / "out", "--model_name_or_path", base, "--num_train_epochs", 1.4) == 2
        assert re.search(said, log_of(tmp_path / "out"))
        refuses(said, export, two / "checkpoint-6", tmp_path / "export")
        export(two / "checkpoint-6", tmp_path / "text", text_only=True)
        with pytest.raises(ConfigError, match=said):  # a base that holds the text part alone
            check_base(two / "checkpoint-6", read_marker(two / "checkpoint-6"), None)
        file.unlink()
        refuses("holds no weights, but the export needs those of", export, two / "checkpoint-6", tmp_path / "export")
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("model_type", by_time(("gemma3", "llama4", "qwen3_5_moe", "qwen3_vl"), (), ["gemma3"]))
def test_adapters(model_type, forks, tmp_path):
    """Adapters are of the text part alone, though other parts have layers of the same names; merged, the whole is exported."""
    base, out = save_base(tmp_path / "base", model_type), tmp_path / "out"
    args = ("--use_peft", "--lora_dropout", 0, "--lora_r", 4, "--merge_adapter")
    forks.succeed(out, "--model_name_or_path", base, *args, *RUN)
    merged, of_base = mapped_weights(out / "export"), mapped_weights(base)
    assert merged.keys() == of_base.keys()
    assert all("language_model" in name for name in merged if not merged[name].equal(of_base[name]))
    whole = AutoModelForImageTextToText.from_pretrained(out / "export")
    assert (logits_of(whole) - logits_of(AutoModelForImageTextToText.from_pretrained(base))).abs().max() > 0.01
    export(out / "checkpoint-6", tmp_path / "adapter")
    for folder in (out / "export/adapter", tmp_path / "adapter"):
        adapted = load_export(folder)
        assert type(adapted.base_model.model) is type(whole)
        names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
        assert names and all("language_model" in name for name in names)
        assert torch.allclose(logits_of(adapted), logits_of(whole), atol=1e-4)
    export(out / "checkpoint-6", tmp_path / "text", merge_adapter=True, text_only=True)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert torch.allclose(logits_of(text), logits_of(whole), atol=1e-5)
    with pytest.raises(ConfigError, match=r"holds adapters, .* leave out --text_only_export"):
        export(out / "checkpoint-6", tmp_path / "refused", text_only=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Folder with a tokenizer of 410 tokens, of which the last ten are for images, a base for it, and rows of text."""
    folder = tmp_path_factory.mktemp("texts")
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        found = [json.loads(line)["translation"]["en"] for line in islice(lines, 40)]
    tokenizer = new_bpe_tokenizer(found, 400)
    tokenizer.add_tokens([f"<image{i}>" for i in range(10)], special_tokens=True)
    save_base(folder / "base", "gemma3", len(tokenizer), (0, 1, 2))
    tokenizer.save_pretrained(folder / "base")
    (folder / "base/chat_template.json").write_text('{"chat_template": "of the processor"}')
    write_rows(folder / "texts.jsonl", ({"text": text} for text in found))
    found[7] += " <image0>"
    write_rows(folder / "images.jsonl", ({"text": text} for text in found))
    return folder


def test_texts_and_a_new_token(texts, forks, tmp_path):
    """The vocabulary grows in the whole; a processor file stays as it is."""
    base, out = texts / "base", tmp_path / "out"
    args = (
        "--model_name_or_path", base, "--train_files", texts / "texts.jsonl", "--new_tokens", "<a>", "--max_steps", 2,
        "--max_length", 32, "--total_batch_size", 4, "--heldout_share", 0.1,
    )  # fmt: skip
    forks.succeed(out, *args, script=ROOT / "recipes/sft.py")
    export, before = out / "export", json.loads((base / "config.json").read_text())
    after = json.loads((export / "config.json").read_text())
    assert after["text_config"].pop("vocab_size") == before["text_config"].pop("vocab_size") + 1 == 411
    assert after == before
    assert (export / "chat_template.json").read_bytes() == (base / "chat_template.json").read_bytes()
    whole = AutoModelForImageTextToText.from_pretrained(export)
    assert whole.get_input_embeddings().weight.shape[0] == 411 == whole.lm_head.weight.shape[0]
    assert AutoTokenizer.from_pretrained(export)("<a>")["input_ids"][-1] == 410
    said = check_export(export, None, 3)
    assert "Gemma3ForConditionalGeneration" in said and "The export renders the first" in said


def test_settings_beside_each_other(texts, tmp_path):
    """An older Qwen2-VL has no `text_config`: what changed stands where it stood."""
    save_base(tmp_path, "qwen2_vl")
    settings = json.loads((tmp_path / "config.json").read_text())
    flat = settings | settings.pop("text_config") | {"model_type": "qwen2_vl"}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    AutoTokenizer.from_pretrained(texts / "base").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "sdpa")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert json.loads(composite_files(model.config, tokenizer)["composite/config.json"]) == flat
    model.resize_token_embeddings(120)
    found = json.loads(composite_files(model.config, tokenizer)["composite/config.json"])
    assert found == flat | {"vocab_size": 120}


def test_a_token_for_an_image(texts, tmp_path):
    """It is an error with row and token, before a model is loaded, and, where only the loop sees the rows, in the loop."""
    flags = {"model_name_or_path": texts / "base", "train_files": texts / "images.jsonl", "heldout_share": 0.1}
    flags |= {"output_dir": tmp_path / "out"}
    command = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    said = r"row \d+, token \d+, behind '.+ ', is 400, .* \(image_token_index in the config\.json"
    refuses(said, recipe.prepare_data, [str(ROOT / "recipes/sft.py"), *command], error=DataError)
    model = load_model(str(texts / "base"), "sdpa")
    batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 400]]), "row": torch.tensor([11, 12])}
    refuses("row 13, token 3 is 400, which stands for an image", composites.check_tokens, batch, model, error=DataError)
    composites.check_tokens(batch | {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 399]])}, model)


OTHERS = (
    "audio.embed_tokens.weight", "vision_tower.embed_tokens.weight", "mtp.layers.0.norm.weight", "mtp.lm_head.weight",
    "model.visual.norm.weight",
)  # fmt: skip


@pytest.mark.parametrize(
    "inside, head",
    [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head."), ("model.", "lm_head.")],
)  # fmt: skip
def test_the_text_part_is_found(inside, head):
    """Under `language_model.`, beside other parts, and outside; towers and heads may have parts of the same names."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    names = {name: name.replace("model.", inside).replace("lm_head.", head) for name in model.state_dict()}
    extra = f"{inside}layers.2.embed_tokens.weight"  # a layer that predicts the token after the next
    found = composites.names_of_class(model, {*names.values(), *OTHERS, extra})
    assert found == {of_file: name for name, of_file in names.items()} | {extra: "model.layers.2.embed_tokens.weight"}


@pytest.mark.parametrize(
    "model_type, head", [("qwen3_next", "mtp.fc.weight"), ("glm4_moe", "model.layers.46.eh_proj.weight")]
)
def test_heads_of_other_models_that_are_ignored(model_type, head, tmp_path):
    """They are the base's in the export too, but no constants of attention."""
    more = {
        "qwen3_next": LINEAR,
        "glm4_moe": {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    }
    model = tiny_model(model_type, head_dim=8, moe_intermediate_size=16, **more[model_type])
    model.save_pretrained(tmp_path)
    others = {head: torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    change_weights(tmp_path, lambda weights: weights | others)
    assert open_base(model.to("meta"), str(tmp_path), None).rest.keys() == {head}
