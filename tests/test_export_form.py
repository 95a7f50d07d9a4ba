"""Tests that an export has the form of the files that its run began with: names, shapes, and fp32 where these have it."""

import re
from pathlib import Path

import models_table
import pytest
import torch
import torch.distributed.checkpoint as dcp
import toy
import transformers
import yaml
from helpers import by_time
from models_table import COMPOSITES, ENCODER_DECODERS, ROWS, SIZES
from safetensors.torch import load_file, save_file
from tiny import change_weights, save_different, tiny_composite, tiny_model

from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint import files, weight_files
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.images.classifiers import load_image_classifier
from accelerate_recipes.launch import requirements
from accelerate_recipes.models.adapters import add_adapters, merged
from accelerate_recipes.models.base import check_export_form, described, form_differences, is_decoder, open_base
from accelerate_recipes.models.encoder_decoders import ENCODER_DECODER, load_encoder_decoder
from accelerate_recipes.models.loading import CAUSAL, load_model
from accelerate_recipes.models.pretrained import check_model, mapped_weights, model_checksum


@pytest.fixture
def compared(monkeypatch) -> list[list[str]]:
    """Results of the comparisons that exports make."""
    found = []

    def record(*args: object) -> list[str]:
        found.append(form_differences(*args))
        return found[-1]

    monkeypatch.setattr(weight_files, "form_differences", record)
    return found


# Its gate and up projections, and all four of its attention, are one tensor in the files.
HRM = transformers.HrmTextConfig(**SIZES, head_dim=8)


def saved_by(
    model: transformers.PreTrainedModel, folder: Path, base_model: Path | None, mixed_precision: str = "bf16"
) -> Path:
    """Write the checkpoint of a run that has trained `model`, as far as an export reads it."""
    checkpoint = folder / "checkpoint-1"
    (checkpoint / "state").mkdir(parents=True)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save(state, checkpoint_id=checkpoint / "state", no_dist=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(checkpoint)
    arguments = {"output_dir": str(folder), "model_name_or_path": str(base_model or "")}
    (checkpoint / "args.yaml").write_text(yaml.safe_dump(arguments))
    (checkpoint / "metrics.jsonl").write_text("")
    rest = open_base(model, str(base_model), None).rest if base_model and is_decoder(model) else {}
    entries = [files.describe(path, checkpoint) for path in checkpoint.rglob("*") if path.is_file()]
    marker = {
        "step": 1, "mixed_precision": mixed_precision, "param_dtype": "float32", "versions": {"accelerate_recipes": "0"},
        "base_model": described(str(base_model), None, rest) if rest else None,
        "model_checksum": model_checksum(str(base_model)) if base_model else None,
        "files": {name: entry for described_file in entries for name, entry in described_file.items()},
    }  # fmt: skip
    files.write_marker(checkpoint, marker)
    return checkpoint


def test_weights_that_the_files_fuse(tmp_path):
    """The export of a class that splits them holds them whole, in one file or several."""
    start = save_different(transformers.AutoModelForCausalLM.from_config(HRM), tmp_path / "base")
    model = load_model(str(start), "sdpa")
    checkpoint = saved_by(model, tmp_path / "run", start)
    wanted = load_file(start / "model.safetensors")
    assert wanted["model.L_module.layers.0.attn.gqkv_proj.weight"].shape == (128, 32)
    for name, size in (("one", "5GB"), ("several", "20KB")):
        export(checkpoint, tmp_path / name, dtype=torch.float32, max_shard_size=size)
        found = mapped_weights(tmp_path / name)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        again = load_model(str(tmp_path / name), "sdpa").state_dict()
        assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "layers, dora", [("all-linear", False), ("up_proj q_proj o_proj", False), ("up_proj q_proj", True)]
)
def test_adapters_of_weights_that_the_files_fuse(layers, dora, tmp_path):
    """Merged, they compute what the model with adapters computes, though some parts of a tensor may have none."""
    start = save_different(transformers.AutoModelForCausalLM.from_config(HRM), tmp_path / "base")
    settings = {"lora_dropout": 0.0, "use_peft": True, "merge_adapter": True, "lora_target_modules": layers.split()}
    model = load_model(str(start), "eager")
    config = add_adapters(model, toy.Args(model_name_or_path=str(start), use_dora=dora, **settings)).config
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(HRM)
    of_base, adapter = mapped_weights(start), {key: parameter.detach() for key, parameter in trained.items()}
    weight_named = merged(plain, of_base, adapter, config)
    model.config.save_pretrained(tmp_path / "merged")
    whole = {key: weight_named(key).contiguous() for key in of_base}
    save_file(whole, tmp_path / "merged/model.safetensors", {"format": "pt"})
    ids = torch.arange(12)[None]
    before, after = (load_model(str(folder), "eager") for folder in (start, tmp_path / "merged"))
    logits = [net.eval()(ids, use_cache=False).logits for net in (before, model, after)]
    assert (logits[1] - logits[0]).norm() > 0.01 * logits[0].norm()
    assert (logits[1] - logits[2]).norm() < 1e-5 * logits[1].norm()


def test_another_form_is_an_error_before_the_first_step_and_at_the_export(tmp_path, monkeypatch):
    """A conversion that loses a part is named with both shapes, by preflight and a launch; the export leaves no files."""
    start = save_different(transformers.AutoModelForCausalLM.from_config(HRM), tmp_path / "base")
    checkpoint = saved_by(load_model(str(start), "sdpa"), tmp_path / "run", start)
    whole = transformers.core_model_loading.revert_weight_conversion
    monkeypatch.setattr(
        transformers.core_model_loading,
        "revert_weight_conversion",
        lambda model, weights: {
            part: tensor for name, weight in weights.items() for part, tensor in whole(model, {name: weight}).items()
        },
    )
    said = r"L_module.layers.0.mlp.gate_up_proj.weight \(96, 32\) float32 in the base, .* \(48, 32\) \w+ in the export"
    with pytest.raises(ConfigError, match=rf"checkpoint-1 cannot be exported.*{said}.*The checkpoint is whole"):
        export(checkpoint, tmp_path / "export")
    assert not (tmp_path / "export").exists() and files.defect(checkpoint) is None
    c4 = shipped.load(models_table.REPOSITORY / "recipes/c4.py")
    args = c4.Args(model_name_or_path=str(start), document_mask=False)
    _, problems = requirements.check_models(args, c4.requirements(args))
    assert len(problems) == 1 and "an export of" in problems[0] and "(96, 32)" in problems[0], problems
    args.use_peft = True  # an export of adapters alone does not hold these weights
    assert not any("an export of" in problem for problem in requirements.check_models(args, c4.requirements(args))[1])


# Others are tried by the slow tests.
SAMPLE = (
    "Llama 3", "Qwen3-MoE", "GPT-OSS", "DeepSeek V3", "Llama 4", "Jamba", "Zamba2", "FLAN-T5", "BART", "Gemma 4, composite",
    "Qwen3.5-MoE, composite",
)  # fmt: skip


@pytest.mark.parametrize("name", by_time(ROWS, SAMPLE))
def test_models_of_the_table_have_the_form_of_their_files(name, tmp_path):
    kinds = {"": (transformers.AutoModelForCausalLM, CAUSAL)} | dict.fromkeys(
        COMPOSITES, (transformers.AutoModelForImageTextToText, CAUSAL)
    )
    kinds |= dict.fromkeys(ENCODER_DECODERS, (transformers.AutoModelForSeq2SeqLM, ENCODER_DECODER))
    auto, kind = kinds.get(name, kinds[""])
    with torch.device("meta"):
        model = auto.from_config(ROWS[name])
    model.to_empty(device="cpu").tie_weights()
    model.save_pretrained(tmp_path, max_shard_size="30kB")
    check_export_form(check_model(str(tmp_path), kind), str(tmp_path))


def as_bin(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def with_old_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights as in BERTs from before 2019."""
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {re.sub(r"LayerNorm\.\w+", lambda m: older[m[0]], name): tensor for name, tensor in weights.items()}


def joined_experts(folder: Path) -> None:
    """Write the experts of a layer as one tensor, as the class has them."""
    change_weights(folder, lambda _: transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def as_first_published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name weights as in the first files of GPT-2, which also hold masks; the class ignores names like theirs."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    return found | {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8) for layer in range(2)}


TIED = {"tie_word_embeddings": True}
DECODERS = {
    "torch's file": ({}, lambda folder: as_bin(folder, load_file(folder / "model.safetensors"))),
    "tied": (TIED, lambda folder: None),
    "tied, in the files twice": (
        TIED, lambda folder: change_weights(folder, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]}),
    ),
    "tied in config.json alone": (
        TIED, lambda folder: change_weights(folder, lambda w: w | {"lm_head.weight": 2 * w["model.embed_tokens.weight"]}),
    ),
    "computed": ({}, lambda folder: change_weights(folder, lambda w: w | {"model.rotary_emb.inv_freq": torch.ones(4)})),
    "without the prefix": (
        TIED, lambda folder: change_weights(folder, lambda w: {name.removeprefix("model."): t for name, t in w.items()}),
    ),
    "GPT-2 of the Hub": ({"model_type": "gpt2"}, lambda folder: change_weights(folder, as_first_published)),
    "experts": ({"model_type": "mixtral"}, lambda folder: None),
    "joined experts": ({"model_type": "mixtral"}, joined_experts),
    "heads that the class ignores": (
        {"model_type": "qwen3_5_moe_text"}, lambda folder: change_weights(folder, lambda w: w | {"mtp.fc.weight": torch.ones(3)})
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [0, 7], ids=["", "more rows"])
@pytest.mark.parametrize("name", DECODERS)
def test_what_is_meant_is_no_difference(name, rows, tmp_path, compared):
    """Neither before the first step nor at the export, which a class reads as it was trained."""
    fields, change = DECODERS[name]
    start = tmp_path / "base"
    config = ROWS["Qwen3.5-MoE"] if fields.get("model_type") == "qwen3_5_moe_text" else None
    save_different(transformers.AutoModelForCausalLM.from_config(config) if config else tiny_model(**fields), start)
    change(start)
    check_export_form(check_model(str(start), CAUSAL), str(start))
    model = load_model(str(start), "eager")
    if rows:
        model.resize_token_embeddings(model.config.vocab_size + rows)
    checkpoint = saved_by(model, tmp_path / "run", start, mixed_precision="no")
    export(checkpoint, tmp_path / "export")
    found = load_model(str(tmp_path / "export"), "eager").state_dict()
    assert compared == [[]] and all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_more_rows_of_an_encoder_decoder(tmp_path, compared):
    """BART has a bias of its vocabulary, (1, V), and embeddings under several names."""
    start = save_different(transformers.AutoModelForSeq2SeqLM.from_config(ROWS["BART"]), tmp_path / "base")
    change_weights(
        start,
        lambda w: (
            w | {f"model.{part}.embed_tokens.weight": w["model.shared.weight"] for part in ("encoder", "decoder")}
        ),
    )
    check_export_form(check_model(str(start), ENCODER_DECODER), str(start))
    model = load_encoder_decoder(str(start), "eager", 0.0)
    model.resize_token_embeddings(107)
    export(saved_by(model, tmp_path / "run", start, mixed_precision="no"), tmp_path / "export")
    assert compared == [[]]


@pytest.mark.parametrize("text_only", [False, True])
def test_a_composite(text_only, tmp_path, compared):
    start = save_different(tiny_composite("qwen3_5_moe"), tmp_path / "base")
    model = load_model(str(start), "eager")
    checkpoint = saved_by(model, tmp_path / "run", start)
    (checkpoint / "composite").mkdir()
    export(checkpoint, tmp_path / "export", text_only=text_only)
    names = mapped_weights(tmp_path / "export").keys()
    assert compared == [[]] and (names == mapped_weights(start).keys()) != text_only


CLASSIFIERS = {
    "bert": (transformers.AutoModelForMaskedLM, transformers.AutoModelForTokenClassification, lambda weights: weights),
    "bert, old names": (transformers.AutoModelForMaskedLM, transformers.AutoModelForTokenClassification, with_old_names),
    "bert, without the prefix": (
        transformers.AutoModelForMaskedLM, transformers.AutoModelForTokenClassification,
        lambda weights: {name.removeprefix("bert."): t for name, t in weights.items() if not name.startswith("cls.")},
    ),
    "vit": (transformers.AutoModelForImageClassification, transformers.AutoModelForImageClassification, lambda weights: weights),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_with_a_new_head(name, tmp_path, compared):
    """Also where its files name weights otherwise, or hold the head of another task."""
    began, ends, change = CLASSIFIERS[name]
    kind, sizes = name.partition(",")[0], {"image_size": 8, "patch_size": 4} if name == "vit" else {}
    start = save_different(tiny_model(kind, began, num_labels=2, **sizes), tmp_path / "base")
    change_weights(start, change)
    names = [f"class {i}" for i in range(5)]
    model = load_image_classifier(str(start), names) if name == "vit" else ends.from_pretrained(start, num_labels=5)
    export(saved_by(model, tmp_path / "run", start, mixed_precision="no"), tmp_path / "export")
    found = ends.from_pretrained(tmp_path / "export").state_dict()
    assert compared == [[]] and all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def in_bf16(folder: Path, kept: str | tuple[str, ...]) -> None:
    """Round the weights in a file to bf16, except those whose names end with `kept`."""
    change_weights(folder, lambda w: {name: t if name.endswith(kept) else t.bfloat16() for name, t in w.items()})


@pytest.mark.parametrize("name, kept", [
    ("DeepSeek V3", ()),  # what its class names
    ("GLM 4.5 MoE", ()),
    ("Llama 3", "0.mlp.up_proj.weight"),  # in fp32 in the files alone
    ("Mixtral", "gate.weight"),  # under another name there
])  # fmt: skip
def test_what_the_base_keeps_in_fp32(name, kept, tmp_path):
    """The export of a run in bf16 keeps it too, exactly, and so does one in fp16; all else is rounded."""
    model = transformers.AutoModelForCausalLM.from_config(ROWS[name])
    kept = kept or tuple(model._keep_in_fp32_modules_strict)
    start = save_different(model, tmp_path / "base")
    in_bf16(start, kept)
    model = load_model(str(start), "eager")
    checkpoint = saved_by(model, tmp_path / "run", start)
    for dtype in (None, torch.float16):
        export(checkpoint, tmp_path / "export", dtype=dtype)
        found, wanted = mapped_weights(tmp_path / "export"), mapped_weights(start)
        for key, tensor in found.items():
            assert tensor.dtype == (torch.float32 if key.endswith(kept) else dtype or torch.bfloat16), key
            assert not key.endswith(kept) or torch.equal(tensor, wanted[key])
    assert any(key.endswith(kept) for key in wanted)


@pytest.mark.parametrize(
    "optim, use_fsdp, said",
    [("adamw_bf16_kahan", True, "gate.weight in fp32"), ("adamw_bf16_kahan", False, ""), ("adafactor", True, "")],
)
def test_trained_weights_of_two_dtypes(optim, use_fsdp, said, monkeypatch, tmp_path):
    """FSDP would refuse them in the first step, with an assertion."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(use_fsdp).lower())
    config = transformers.Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, head_dim=8)
    start = save_different(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "base")
    c4 = shipped.load(models_table.REPOSITORY / "recipes/c4.py")
    args = c4.Args(model_name_or_path=str(start), optim=optim, whole_logits=True, data_only=True)
    _, problems = requirements.check_models(args, c4.requirements(args))
    problems = [problem for problem in problems if "tokenizer" not in problem]
    assert [said in problem for problem in problems] == [True] * bool(said), problems


def test_merged_adapters_keep_it_too(tmp_path):
    whole = transformers.AutoModelForCausalLM.from_config(ROWS["GLM 4.5 MoE"])
    start = save_different(whole, tmp_path / "base")
    in_bf16(start, tuple(whole._keep_in_fp32_modules_strict))
    model, checkpoint = load_model(str(start), "eager"), tmp_path / "checkpoint-1"
    settings = {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"], "merge_adapter": True}
    config = add_adapters(model, toy.Args(model_name_or_path=str(start), **settings)).config
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    dcp.save(state, checkpoint_id=checkpoint / "state", no_dist=True)
    model.config.architectures = [type(model).__name__]
    for settings in (config, model.config):
        settings.save_pretrained(checkpoint)
    plain, _ = weight_files.model_on_meta(checkpoint)
    weight_files.write_merged(checkpoint, tmp_path, torch.bfloat16, "5GB", open_base(plain, str(start), None), False)
    found, wanted = mapped_weights(tmp_path), mapped_weights(start)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in wanted.items()}
    biases = [name for name in found if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(found[name], wanted[name]) for name in biases)
