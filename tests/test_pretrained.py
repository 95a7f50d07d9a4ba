"""Tests of pretrained models that cannot be loaded: preflight and a launch say why, with the same message."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from helpers import CONFIGS, ROOT, change_json, log_of
from safetensors.torch import load_file, save_file
from tiny import change_weights, tiny_model
from transformers import AutoModel, AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM, MT5Config
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.launch import requirements
from accelerate_recipes.models.loading import load_model
from accelerate_recipes.models.pretrained import model_checksum
from accelerate_recipes.models.tokenizers import load_tokenizer, new_word_tokenizer
from recipe_tools.preflight import preflight

SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
DATA = {
    "c4": ["--train_files", "texts.jsonl", "--validation_files", "others.jsonl", "--max_length", "16"],
    "t5": ["--train_files", "pairs.jsonl", "--source_column", "a", "--target_column", "b"],
    "template": ["--train_files", "texts.jsonl"],
    "vit": ["--train_files", "images.parquet"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folder with a model of each kind."""
    place = tmp_path_factory.mktemp("models")
    tiny = {
        "llama": tiny_model(**SIZES),
        "tied": tiny_model(**SIZES, tie_word_embeddings=True),
        "mixtral": tiny_model("mixtral", **SIZES, num_local_experts=2),
        "gptj": tiny_model("gptj", **SIZES),
        "t5": tiny_model("t5", **SIZES),
        "bert": tiny_model("bert", AutoModelForMaskedLM, **SIZES),
        "vit": tiny_model("vit", AutoModel, **SIZES, image_size=32, patch_size=16),
    }
    for name, model in tiny.items():
        model.save_pretrained(place / name, max_shard_size="8kB" if name == "llama" else "1GB")
        new_word_tokenizer(["a", "b", "c", "d"]).save_pretrained(place / name)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place / "vit")
    for name in ("texts.jsonl", "others.jsonl", "pairs.jsonl", "images.parquet"):
        (place / name).write_text(json.dumps({"text": "a", "label": "x", "a": "a", "b": "b"}) + "\n")
    return place


@pytest.fixture
def said(models, monkeypatch):
    """Return a function that says what preflight and a launch say of a model; asserts that they say the same."""
    monkeypatch.chdir(models)

    def answers(folder: Path, name: str = "c4", *args: str) -> str:
        command = [str(ROOT / f"recipes/{name}.py"), *DATA[name], "--model_name_or_path", str(folder), *args]
        command += ["--output_dir", str(folder.parent / "out"), "--max_steps", "1"]
        found = []
        module = shipped.load(command[0])
        parsed = parse(module.Args, command[1:], world_size=1)
        for check in (
            lambda: preflight([str(CONFIGS / "single.yaml"), *command]),
            lambda: requirements.provide(parsed, module.requirements(parsed), command),
        ):
            try:
                check()
                found.append("")
            except ConfigError as error:
                found.append(str(error).removeprefix("This run cannot start:\n  - "))
        assert found[0] == found[1]
        return found[0]

    return answers


@pytest.fixture
def copy(models, tmp_path):
    """Return a function that copies one of the models."""
    return lambda name: Path(shutil.copytree(models / name, tmp_path / "model"))


def set_config(folder: Path, **changes) -> None:
    change_json(folder / "config.json", **changes)


@pytest.mark.parametrize(
    "name, by", [("llama", "c4"), ("tied", "c4"), ("mixtral", "c4"), ("t5", "t5"), ("bert", "template"), ("vit", "vit")]
)
def test_whole_models(said, copy, name, by):
    """Whole models are ready; the output layer that a classifier gets, and that of another task, do not count."""
    folder = copy(name)
    set_config(folder, architectures=None)
    assert said(folder, by) == ""


def test_what_a_model_cannot_do_is_known_before_the_data_are_prepared(said, copy, monkeypatch):
    """Adapters, attention and the layers to wrap are checked on the meta device, all at once, by a launch too."""
    monkeypatch.setattr("accelerate_recipes.models.attention.find_spec", lambda name: None)
    adapters = ["--use_peft", "--lora_target_modules", "q_prj"]
    folder, flags = copy("llama"), [*adapters, "--attn_implementation", "flash_attention_2"]
    found = said(folder, "c4", *flags)
    assert "--lora_target_modules q_prj: " in found and "LlamaForCausalLM" in found
    assert "--attn_implementation flash_attention_2: its package flash_attn" in found
    c4 = shipped.load(ROOT / "recipes/c4.py")
    command = [*DATA["c4"], "--model_name_or_path", str(folder), "--max_steps", "1", *flags, "--data_only", "true"]
    args = parse(c4.Args, command, world_size=1)
    # Data may be prepared where the package is not
    assert requirements.check_models(args, c4.requirements(args))[1] == []


def test_a_launch_checks_adapters_without_peft(models, monkeypatch):
    """PEFT imports bitsandbytes, if it is installed, which would make a context on the first GPU in each process."""
    monkeypatch.setitem(sys.modules, "peft", None)
    c4 = shipped.load(ROOT / "recipes/c4.py")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for layers, number in (("all-linear", 0), ("q_prj", 1)):
        args = c4.Args(model_name_or_path="a", use_peft=True, lora_target_modules=[layers])
        assert len(requirements.model_problems(args, model, {})) == number


def without(*ends: str):
    return lambda weights: {name: weight for name, weight in weights.items() if not name.endswith(ends)}


def prefixed(prefix: str):
    return lambda weights: {prefix + name: weight for name, weight in weights.items()}


def wrapped(part: str):
    """Put a wrapper of the layers into the names of their weights; others, such as the embedding, have none."""
    return lambda weights: {re.sub(r"(layers\.\d+\.)", rf"\1{part}", name): weight for name, weight in weights.items()}


@pytest.mark.parametrize("name, by, change, reasons", [
    ("tied", "c4", without("1.mlp.up_proj.weight"), ["random values: model.layers.1.mlp.up_proj.weight"]),
    ("tied", "c4", lambda weights: weights | {"v_head.weight": torch.ones(2)}, ["not in such a model: v_head.weight"]),
    ("tied", "c4", lambda weights: weights | {"model.norm.weight": torch.ones(9)}, ["model.norm.weight (9,) instead of (16,)"]),
    ("tied", "c4", prefixed("_orig_mod."), ["_orig_mod., which they have from torch.compile", "and 12 more", "random values"]),
    ("tied", "c4", wrapped("_fsdp_wrapped_module."), ["hold _fsdp_wrapped_module., which they have from FSDP: remove it"]),
    ("tied", "c4", wrapped("_checkpoint_wrapped_module."), ["hold _checkpoint_wrapped_module., which they have from activation checkpointing"]),
    ("tied", "c4", wrapped("_orig_mod."), ["hold _orig_mod., which they have from torch.compile"]),
    ("tied", "c4", prefixed("module."), ["module., which they have from DDP"]),
    ("tied", "c4", prefixed("base_model.model."), ["from PEFT: save what `model.merge_and_unload()` returns"]),
    ("mixtral", "c4", without("lm_head.weight"), ["random values: lm_head.weight"]),
    ("mixtral", "c4", without("1.block_sparse_moe.experts.1.w2.weight"), ["1.mlp.experts.down_proj (1, 16, 16) instead of (2, 16, 16)"]),
    ("mixtral", "c4", without("1.block_sparse_moe.experts.0.w1.weight"), ["MixtralForCausalLM joins weights of a layer"]),
    ("t5", "t5", without("SelfAttention.q.weight"), ["random values: decoder.block.0.layer.0.SelfAttention.q.weight"]),
    ("bert", "template", without("1.output.dense.weight"), ["random values: bert.encoder.layer.1.output.dense.weight"]),
    ("vit", "vit", without("layernorm.weight"), ["random values: vit.layernorm.weight"]),
    ("vit", "vit", lambda weights: weights | {"encoder.layer.9.x": torch.ones(1)}, ["not in such a model"]),
])  # fmt: skip
def test_weights_of_another_model(said, copy, name, by, change, reasons):
    """A weight that is missing, left over or of another shape is an error that names it, and what has changed the names."""
    folder = copy(name)
    change_weights(folder, change)
    message = said(folder, by)
    assert all(reason in message for reason in reasons), message


def test_where_only_one_process_reads_the_weights(models, forks, tmp_path):
    """Two ranks under FSDP2, of which one would read the weights, end with the same message, once, and no traceback."""
    folder, out = shutil.copytree(models / "tied", tmp_path / "model"), tmp_path / "out"
    change_weights(folder, without("0.mlp.up_proj.weight"))
    args = ["--train_files", models / "texts.jsonl", "--validation_files", models / "others.jsonl", "--max_length", 16]
    args += ["--model_name_or_path", folder, "--max_steps", 1, "--total_batch_size", 2]
    assert forks.run(out, *args, script=ROOT / "recipes/c4.py") == 2
    assert log_of(out).count("random values: model.layers.0.mlp.up_proj.weight") == 1, log_of(out)
    assert "Traceback" not in log_of(out)


def test_what_a_class_ignores_does_not_count(said, copy):
    """Old files hold buffers that are no weights, and tied weights twice."""
    folder = copy("gptj")
    computed = {"transformer.h.0.attn.bias": torch.ones(4, 4), "transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}
    change_weights(folder, lambda weights: weights | computed)
    assert said(folder) == ""
    shutil.rmtree(folder)
    folder = copy("tied")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)}
    change_weights(folder, lambda weights: weights | buffer | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert said(folder) == ""


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
SHARD = "model-00002-of-"


def cut(folder: Path, name: str, size: int = -8) -> None:
    (file,) = folder.glob(f"{name}*")
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("name, change, reason", [
    ("llama", lambda folder: next(folder.glob(f"{SHARD}*")).unlink(), "but lacks model-00002-of-"),
    ("llama", lambda folder: next(folder.glob(f"{SHARD}*")).write_text(POINTER), "git-LFS pointer; `git lfs pull` gets"),
    ("llama", lambda folder: cut(folder, SHARD), "cannot be read: .*; it has .* bytes"),
    ("llama", lambda folder: cut(folder, "model.safetensors.index", 20), "is no index of weights"),
    ("llama", lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "is no index of weights"),
    ("llama", lambda folder: (folder / "model.safetensors.index.json").write_text(POINTER), "index.json .it is a git-LFS"),
    ("tied", lambda folder: cut(folder, "model.safetensors"), "cannot be read: .*; it has .* bytes, and is cut, damaged"),
    ("tied", lambda folder: cut(folder, "model.safetensors", 3), "cannot be read: .*; it has .* bytes, and is cut, damaged"),
    ("tied", lambda folder: cut(folder, "model.safetensors", 0), "cannot be read: .*; it has 0 bytes, and is cut, damaged"),
    ("tied", lambda folder: (folder / "model.safetensors").write_text(POINTER), "lacks model.safetensors .it is a git-LFS"),
    ("tied", lambda folder: (folder / "model.safetensors").unlink(), "but lacks model.safetensors"),
    ("llama", lambda folder: (folder / "model.safetensors.index.json").unlink(), r"lacks model.safetensors.index.json .*model-00001-of-"),
    ("tied", lambda folder: (folder / "model.safetensors").rename(folder / "consolidated.00.pth"), r"lacks model.safetensors \(consolidated.00.pth is in a format"),
    ("tied", lambda folder: (folder / "model.safetensors").rename(folder / "Q4_K_M.gguf"), r"lacks model.safetensors \(Q4_K_M.gguf is for llama.cpp; give the same"),
    ("tied", lambda folder: [(folder / name).write_text(POINTER) for name in ("pytorch_model.bin", "rust_model.onnx")], "^$"),  # not read
    ("tied", lambda folder: ((folder / "model.safetensors").unlink(), torch.save({"a": print}, folder / "pytorch_model.bin")), r"\.bin cannot be read: it names \S*print, which would run"),
    ("tied", lambda folder: (folder / "tokenizer.json").write_text(POINTER), "lacks tokenizer.json .it is a git-LFS"),
    ("tied", lambda folder: cut(folder, "tokenizer.json", 100), "the tokenizer of .* cannot be loaded"),
    ("tied", lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer of .* cannot be loaded"),
    ("tied", lambda folder: cut(folder, "config.json", 30), "config.json of .* cannot be read"),
    ("tied", lambda folder: set_config(folder, model_type="nobody"), "config.json of .* cannot be used: .*nobody"),
    ("tied", lambda folder: set_config(folder, hidden_size="wide"), "config.json of .* cannot be used"),
    ("tied", lambda folder: set_config(folder, hidden_size=15), "config.json of .* cannot be used"),
    ("tied", lambda folder: set_config(folder, num_hidden_layers=1), "not in such a model: model.layers.1.input_layernorm"),
    ("tied", lambda folder: set_config(folder, quantization_config={"quant_method": "fp8"}), r"are quantised \(fp8; "),
    ("tied", lambda folder: set_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}), r"quantised \(gptq; "),
    ("tied", lambda folder: set_config(folder, quantization_config={"load_in_4bit": True}), r"quantised"),
    ("tied", lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}'), r"holds adapters \(adapter_config"),
    ("tied", lambda folder: ((folder / "config.json").rename(folder / "adapter_config.json"), (folder / "model.safetensors").unlink()), "holds adapters: .*export --merge_adapter"),
    ("tied", lambda folder: set_config(folder, is_encoder_decoder=True), "which has an encoder"),
    ("tied", lambda folder: (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}'), "temperature"),
    ("tied", lambda folder: (folder / "generation_config.json").write_text('{"max_new_tokens": -1}'), "`max_new_tokens` must be"),
    ("tied", lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json of .* cannot be used"),
    ("t5", lambda folder: set_config(folder, quantization_config={"quant_method": "awq"}), r"quantised \(awq; "),
    ("t5", lambda folder: (folder / "generation_config.json").write_text('{"top_p": 0.6}'), "top_p"),
    ("t5", lambda folder: (folder / "generation_config.json").write_text('{"early_stopping": true}'), "^$"),
    ("bert", lambda folder: cut(folder, "model.safetensors"), "cannot be read: .*; it has .* bytes, and is cut, damaged"),
    ("vit", lambda folder: (folder / "preprocessor_config.json").unlink(), "preprocessor_config.json of .* cannot be used"),
    ("vit", lambda folder: set_config(folder, model_type="bert"), "not one of deepvit, vit"),
])  # fmt: skip
def test_files_that_are_no_model(said, copy, name, change, reason):
    """What is cut, a pointer, quantised or contradicts itself is one message, the same from preflight and a launch."""
    folder = copy(name)
    change(folder)
    message = said(folder, {"tied": "c4", "llama": "c4", "bert": "template"}.get(name, name))
    assert re.search(reason, message, re.DOTALL), message
    assert "  - " not in message, "one problem"


def as_bin(folder: Path, num_files: int = 1, **options) -> None:
    """Save the weights as torch's files, as was usual before safetensors."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-{i}.bin" for i in range(num_files)] if num_files > 1 else ["pytorch_model.bin"]
    of = {weight: names[i % num_files] for i, weight in enumerate(weights)}
    for name in names:
        torch.save({weight: weights[weight] for weight in weights if of[weight] == name}, folder / name, **options)
    if num_files > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))


def test_files_of_torch_are_read_too(said, copy, models):
    """A model whose only files are torch's trains as the same one in safetensors, in one file, several, or an old one."""
    folder = copy("tied")
    wanted = load_model(str(models / "tied"), "sdpa").state_dict()
    for options in ({}, {"num_files": 3}, {"_use_new_zipfile_serialization": False}):
        shutil.copy(models / "tied/model.safetensors", folder)
        as_bin(folder, **options)
        assert said(folder) == ""
        found = load_model(str(folder), "sdpa").state_dict()
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        for file in folder.glob("pytorch_model*"):
            file.unlink()


@pytest.mark.parametrize("change, reason", [
    (lambda folder: as_bin(folder), ""),
    (lambda folder: (as_bin(folder), cut(folder, "pytorch_model.bin")), "cannot be read"),
    (lambda folder: (as_bin(folder, 2), cut(folder, "pytorch_model-1.bin", 100)), "pytorch_model-1.bin cannot be read"),
    (lambda folder: (as_bin(folder, 2), (folder / "pytorch_model-1.bin").unlink()), "lacks pytorch_model-1.bin"),
    (lambda folder: (as_bin(folder), (folder / "pytorch_model.bin").write_text(POINTER)), "it is a git-LFS pointer"),
    (lambda folder: (change_weights(folder, without("q_proj.weight")), as_bin(folder, 2)), "random values: model.layers.0"),
    (lambda folder: (as_bin(folder), torch.save([1], folder / "pytorch_model.bin")), "cannot be read"),
    (lambda folder: (as_bin(folder), torch.save({"state_dict": {}}, folder / "pytorch_model.bin")), "pytorch_model.bin holds state_dict, which is no weight"),
    (lambda folder: (as_bin(folder), torch.save(Path(), folder / "pytorch_model.bin")), "cannot be read"),
])  # fmt: skip
def test_damaged_files_of_torch(said, copy, change, reason):
    folder = copy("tied")
    change(folder)
    assert re.search(reason, said(folder), re.DOTALL) if reason else said(folder) == ""


CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "strange"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("changes, of_tokenizer, reason", [
    ({"model_type": "strange"}, {}, "model .* needs Python code"),
    ({"model_type": "vit"}, {}, "model .* needs Python code"),
    ({}, {"tokenizer_class": "Tokenizer"}, "the tokenizer of .* needs Python code"),
    ({}, {}, "^$"),  # transformers has a class itself
])  # fmt: skip
def test_code_beside_a_model_never_runs(said, copy, monkeypatch, changes, of_tokenizer, reason):
    """Code of a model is not run, not even by a person who answers yes; where transformers has the class, it is not needed."""
    folder = copy("tied")
    ran = folder / "ran"
    (folder / "strange.py").write_text(CODE.format(ran=str(ran)))
    auto = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    set_config(folder, auto_map=auto, **changes)
    settings = {"auto_map": {"AutoTokenizer": [None, "strange.Tokenizer"]}} if of_tokenizer else {}
    change_json(folder / "tokenizer_config.json", **settings, **of_tokenizer)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    message = said(folder)
    assert re.search(reason, message, re.DOTALL), message
    if not message:
        load_model(str(folder), "sdpa")
    assert not ran.exists()


@pytest.mark.parametrize("file, config, kind, settings", [
    ("spiece.model", MT5Config(vocab_size=60, decoder_start_token_id=0), "unigram", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}),
    ("tokenizer.model", LlamaConfig(vocab_size=60), "bpe", {"tokenizer_class": "LlamaTokenizer"}),
])  # fmt: skip
def test_a_tokenizer_of_sentencepiece_alone(file, config, kind, settings, tmp_path):
    """A tokenizer that is published as sentencepiece's file alone, as mT5's is, gives the ids that sentencepiece gives."""
    texts = ["the cat sat on the mat", "a dog sat on the log", "the dog and the cat"]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, model_type=kind, vocab_size=45, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=3, minloglevel=2,
    )  # fmt: skip
    (tmp_path / file).write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    wanted = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    for text in texts:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == wanted.encode(text)
    (tmp_path / file).write_text(POINTER)
    assert cache.lacking(cache.HubModel(str(tmp_path), weights=False))[0].startswith(f"{file} (it is a git-LFS pointer")


def test_a_model_is_known_in_another_place(models, copy):
    """A model that was moved is the same; with other weights, settings or tokenizer it is another."""
    folder = copy("llama")
    assert model_checksum(str(folder)) == model_checksum(str(models / "llama"))
    last = sorted(folder.glob("*.safetensors"))[-1]
    weights = load_file(last)
    weights[max(weights)] += 1e-3
    save_file(weights, last)
    changed = model_checksum(str(folder))
    set_config(folder, rms_norm_eps=1e-5)
    others = {model_checksum(str(place)) for place in (models / "llama", folder, models / "tied")}
    assert len({changed, *others}) == 4
    assert model_checksum(str(folder / "nowhere")) is None
    before = model_checksum(str(folder))
    (folder / "evaluation.json").write_text("{}")
    assert model_checksum(str(folder)) == before, "an export that was evaluated"
    as_one = folder.parent / "one"
    LlamaForCausalLM.from_pretrained(models / "llama").save_pretrained(as_one)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models / "llama" / name, as_one)
    assert model_checksum(str(as_one)) == model_checksum(str(models / "llama")), "in one file or several"


def test_a_run_imports_no_other_models(fork_server, tmp_path):
    """Whether a model is a causal one is known without the code of all others, which takes seconds to import."""
    code = """\
import sys
from transformers import LlamaForCausalLM, LlamaConfig
from accelerate_recipes.models.base import is_decoder

model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
before = {*sys.modules}
print(is_decoder(model), is_decoder(model.model), sum(name.startswith("transformers.models.") for name in {*sys.modules} - before))
"""
    assert fork_server.run_python(tmp_path, code).split()[-3:] == ["True", "False", "0"]
