"""Tests that an export is read by transformers 4, on which servers and converters build, as by version 5, and as its base was.

`make test-serving` installs transformers 4 and runs this; otherwise the tests that need it are skipped.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from helpers import CHILDREN, REPOSITORY, environment, refuses
from safetensors.torch import load_file

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint.base_form import BaseForm, whole_content, with_older_fields
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.disk import read_json
from accelerate_recipes.images.classifiers import with_classes
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.encoder_decoders import load_encoder_decoder
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.models.tokenizers import load_tokenizer, new_bpe_tokenizer
from accelerate_recipes.run import Run

VERSIONS = {4: REPOSITORY / ".venv/serving/bin/python", 5: REPOSITORY / ".venv/bin/python"}
needs_4 = pytest.mark.skipif(
    not VERSIONS[4].exists(), reason="NOT TESTED WITH transformers 4: `make test-serving` installs and uses it"
)
STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
PAIRS, NEW_TOKENS = ("t5", "flan"), ("llama3", "gpt2", "codellama")
BASES = ("llama3", "codellama", "yarn", "gemma3", "mixtral", "neox", "phi3", "gpt2", "t5", "flan")


def python(version: int, tmp_path: Path, script: str, *args: object) -> dict:
    """Run a child under a version of transformers; return what it printed."""
    command = [str(part) for part in (VERSIONS[version], CHILDREN / script, *args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def export_of(base: Path, out: Path, new_tokens: tuple[str, ...] = (), is_pairs: bool | None = None) -> Path:
    """Export a pretrained model as a run that has trained nothing."""
    args = TrainArgs(output_dir=str(out), async_save=False)
    tokenizer = load_tokenizer(str(base))
    if base.name in PAIRS if is_pairs is None else is_pairs:
        model = load_encoder_decoder(str(base), "sdpa", 0.0, **load_settings(args))
    else:
        model = load_model(str(base), "auto", **load_settings(args))
    if new_tokens:
        tokenizer.add_tokens(list(new_tokens), special_tokens=True)
        model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    return exported(args, model, tokenizer)


def new_export(
    out: Path, config_class: type[transformers.PreTrainedConfig] = transformers.LlamaConfig, **more: Any
) -> Path:
    """Export a new model with stretched positions, and its new tokenizer."""
    args = TrainArgs(output_dir=str(out), async_save=False)
    tokenizer = new_bpe_tokenizer(["e2e4 e7e5", "Two lines\n"], 300)
    tokenizer("a", truncation=True, padding="max_length", max_length=4)  # a recipe leaves such settings in it
    config = config_class(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, rope_parameters=STRETCHED | {"rope_theta": 5e5}, initializer_range=0.2,
        bos_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    return exported(args, new_model(config, "sdpa"), tokenizer)


def exported(
    args: TrainArgs, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> Path:
    run, out = Run(args, Accelerator(cpu=True)), Path(args.output_dir)
    run.prepare(model, tokenizer, 1)
    out.mkdir()
    (out / "metrics.jsonl").touch()
    export(run.checkpointer.save(1, {}), out / "export", dtype=torch.bfloat16)
    return out / "export"


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[int, dict[str, dict]]:
    """Return what both versions see in each base, in its export, and in exports of bases that version 5 has written."""
    place = tmp_path_factory.mktemp("serving")
    folders = {name: place / name for name in python(4, place, "published_bases.py", place)}
    assert tuple(folders) == BASES
    for name in BASES:
        folders[f"{name}, exported"] = export_of(folders[name], place / f"{name}-out")
        base = place / f"{name}-5"
        auto_class = transformers.AutoModelForSeq2SeqLM if name in PAIRS else transformers.AutoModelForCausalLM
        for artifact in (auto_class.from_pretrained(folders[name]), load_tokenizer(str(folders[name]))):
            artifact.save_pretrained(base)
        folders[f"{name}, of version 5"] = export_of(base, place / f"{name}-5-out", is_pairs=name in PAIRS)
    for name in NEW_TOKENS:
        folders[f"{name}, new tokens"] = export_of(folders[name], place / f"{name}-new", ("<new>",))
    folders["new"] = new_export(place / "new-out")
    paths = json.dumps([str(folder) for folder in folders.values()])
    found = {version: python(version, place, "served.py", paths) for version in VERSIONS}
    return {version: {name: found[version][str(path)] for name, path in folders.items()} for version in VERSIONS}


def agree(one: dict, other: dict) -> None:
    assert torch.allclose(torch.tensor(one["logits"]), torch.tensor(other["logits"]), atol=1e-5)
    assert {n: v for n, v in one.items() if n != "logits"} == {n: v for n, v in other.items() if n != "logits"}
    assert not one["missing"]


EXPORTS = [*(f"{name}, {which}" for name in BASES for which in ("exported", "of version 5"))]
EXPORTS += [*(f"{name}, new tokens" for name in NEW_TOKENS), "new"]


@needs_4
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_both_versions_read_the_same(seen, name):
    """Logits, token ids, texts, special tokens and chats, equal in both; those of llama.cpp's library are compared below."""
    old, now = seen[4][name], seen[5][name]
    agree({field: value for field, value in old.items() if field != "gguf"}, now)


@needs_4
@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_an_export_is_what_its_base_was(seen, name):
    """As version 5 reads it, which trained it: its classes change some tokenizers of version 4."""
    base, exported = seen[5][name], seen[5][f"{name}, exported"]
    # The padding of the run
    assert exported["special"].pop(2) is not None and base["special"].pop(2) in (None, "<pad>")
    agree(base, exported)


@needs_4
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gpt2", "codellama"])
def test_what_llama_cpp_reads(seen, name):
    """Scores of a sentencepiece model, special tokens, merges and chat template; new tokens come after the others."""
    exported, extended = (seen[4][f"{name}, {which}"]["gguf"] for which in ("exported", "new tokens"))
    assert exported["special"].keys() >= {"bos", "eos"} and bool(exported["template"]) == (name == "gpt2")
    if base := seen[4][name].get("gguf"):  # the library wants a tokenizer.json
        assert exported | {"special": 0} == base | {"special": 0}
        assert exported["special"].items() >= base["special"].items()
    if name == "gpt2":
        assert exported["merges"] == extended["merges"] and exported["merges"]
        return
    assert len({score for _, score in exported["scores"]}) > 50
    assert extended["scores"][: len(exported["scores"])] == exported["scores"]
    assert ["<new>", -1000.0] in extended["scores"][len(exported["scores"]) :]


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
    "rope_theta": 500000.0, "rope_scaling": {"factor": 4.0, "type": "linear"}, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "pretraining_tp": 1, "transformers_version": "4.33.0", "auto_map": {"AutoConfig": "theirs.Config"},
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


@pytest.fixture
def base(tmp_path) -> Path:
    """Make what transformers 4 publishes of a Llama, without weights."""
    folder = tmp_path / "base"
    new_bpe_tokenizer(["e2e4 e7e5"], 300).save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    class_ = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "chat_template": TEMPLATE}
    where = {"tokenizer_file": "/home/somebody/tokenizer.json"}
    settings = special | class_ | where
    files = {"config.json": LLAMA, "tokenizer_config.json": settings, "special_tokens_map.json": special}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(json.dumps(read_json(folder / "tokenizer.json"), indent=4))  # not as ours
    (folder / "tokenizer.model").write_bytes(b"scores")
    return folder


def published(
    base: Path, out: Path, config: transformers.PreTrainedConfig, tokenizer: transformers.PreTrainedTokenizerBase
) -> dict[str, bytes]:
    """Save settings and tokenizer where the base is no longer there; return the files."""
    artifact = BaseForm(config, tokenizer)
    base.rename(base.with_name("gone"))
    for one in (config, artifact):
        one.save_pretrained(out)
    base.with_name("gone").rename(base)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_what_the_run_has_not_changed(base, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer("a", truncation=True, max_length=4)  # it keeps this setting
    found = published(base, tmp_path / "out", transformers.AutoConfig.from_pretrained(base), tokenizer)
    unchanged = LLAMA | {"tie_word_embeddings": False}
    del unchanged["auto_map"]  # the code is not there, nor was it trained
    assert json.loads(found["config.json"]) == unchanged
    for name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json"):
        assert found[name] == (base / name).read_bytes(), name
    added = {"add_bos_token": True, "add_eos_token": False}
    wanted = read_json(base / "tokenizer_config.json") | added
    del wanted["tokenizer_file"]  # where its author had it
    written = json.loads(found["tokenizer_config.json"])
    assert written.items() >= wanted.items() and "tokenizer_file" not in written
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder)("e2e4") for folder in (tmp_path / "out", base))
    assert ours.input_ids == theirs.input_ids


def test_what_the_run_has_changed(base, tmp_path):
    """Fields of version 4 follow; new tokens, special ones and a template are where the base had them."""
    config = transformers.AutoConfig.from_pretrained(base)
    config.dtype = torch.float32
    config.rope_parameters = STRETCHED | {"rope_theta": 2e6}
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<new>", TEMPLATE.replace("</s>", "<new>")
    found = published(base, tmp_path / "out", config, tokenizer)
    settings, written = (json.loads(found[name]) for name in ("config.json", "tokenizer_config.json"))
    assert settings["torch_dtype"] == settings["dtype"] == "float32" and settings["pretraining_tp"] == 1
    assert settings["rope_theta"] == 2e6 and settings["rope_scaling"] == STRETCHED
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == config.rope_parameters
    number = tokenizer.convert_tokens_to_ids("<new>")
    assert written["added_tokens_decoder"][str(number)]["content"] == written["eos_token"] == "<new>"
    assert written["chat_template"] == tokenizer.chat_template and written["legacy"] is True
    assert json.loads(found["special_tokens_map.json"]) == {"bos_token": "<s>", "eos_token": "<new>"}
    assert json.loads(found["added_tokens.json"])["<new>"] == number and found["tokenizer.model"] == b"scores"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("e2e4<new>").input_ids == tokenizer("e2e4<new>").input_ids
    assert again.chat_template == tokenizer.chat_template


def test_other_names_of_what_has_changed(base, tmp_path):
    """A field that transformers reads, but does not keep under that name, follows what the run has changed."""
    settings = LLAMA | {"model_type": "vit", "num_labels": 2, "id2label": {"0": "a", "1": "b"}}
    (base / "config.json").write_text(json.dumps(settings))
    config = with_classes(transformers.AutoConfig.from_pretrained(base), ["x", "y", "z"])
    found = published(base, tmp_path / "out", config, transformers.AutoTokenizer.from_pretrained(base))
    assert json.loads(found["config.json"])["num_labels"] == 3
    (base / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "hidden_size": 32}))
    config = transformers.AutoConfig.from_pretrained(base)
    config.hidden_size = 48
    found = published(base, tmp_path / "gpt2", config, transformers.AutoTokenizer.from_pretrained(base))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "gpt2").n_embd == 48


def test_each_decoder_is_read_as_it_was_written(tmp_path):
    """Of ropes by kind of layer, those of full attention alone are stretched; fields of version 4 change nothing."""
    tried, older = set(), 0
    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        for stretch in ({}, {"rope_type": "yarn", "factor": 2.0}, STRETCHED):
            try:
                config = config_class()
                ropes = getattr(config, "rope_parameters", None) or {}
                if not ropes or ("full_attention" not in ropes and stretch is not STRETCHED):
                    continue
                ropes.get("full_attention", ropes).update(stretch)
                config.save_pretrained(tmp_path)
                before = transformers.AutoConfig.from_pretrained(tmp_path)
            except Exception:  # the class has no defaults that fit together, or not with this rope
                break
            written = with_older_fields(read_json(tmp_path / "config.json"), whole_content(before))
            (tmp_path / "config.json").write_text(json.dumps(written))
            after = transformers.AutoConfig.from_pretrained(tmp_path)
            assert whole_content(before).items() <= whole_content(after).items(), (config.model_type, stretch)
            tried.add(config.model_type)
            older += "rope_scaling" in written
    assert len(tried) > 100 and {"mellum", "laguna", "mimo_v2_flash", "gemma4_text"} < tried and older > 80


def test_a_configuration_that_cannot_be_written(tmp_path):
    """A class that sets a field by itself when it is read."""
    config = transformers.CONFIG_MAPPING["moshi"]()
    assert config.audio_vocab_size is None
    refuses("audio_vocab_size as 2048, not None", BaseForm, config, new_bpe_tokenizer(["e2e4"], 300))


@pytest.mark.parametrize("written", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_field_that_a_class_derives_from_another(written, is_tied, tmp_path):
    """A T5 scales results as its base's `tie_word_embeddings` says, and is tied as its weights are."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "t5"} | written))
    config = transformers.AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = is_tied
    (tmp_path / "config.json").write_bytes(BaseForm(config, new_bpe_tokenizer(["e2e4"], 300)).files["config.json"])
    assert transformers.AutoConfig.from_pretrained(tmp_path).scale_decoder_outputs is written.get(
        "tie_word_embeddings", True
    )


def test_a_new_model(tmp_path):
    """Names that version 4 knows stand beside those of version 5, and each expert has its weights."""
    out = new_export(tmp_path / "out", transformers.MixtralConfig, num_local_experts=3)
    settings, written = (read_json(out / name) for name in ("config.json", "tokenizer_config.json"))
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 5e5
    assert settings["rope_scaling"]["factor"] == 8 and settings["torch_dtype"] == settings["dtype"] == "bfloat16"
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert read_json(out / "tokenizer.json")["truncation"] is None
    names = load_file(out / "model.safetensors").keys()
    of_experts = "model.layers.1.block_sparse_moe.experts.{}.{}.weight".format
    assert names >= {of_experts(i, part) for i in range(3) for part in ("w1", "w2", "w3")}
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())


@pytest.mark.slow
def test_transformers_serves_a_whole_model(tmp_path, monkeypatch):
    """`transformers serve` finds an export by a relative path, and takes no adapters, as docs/serving.md says."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager
    new_export(tmp_path / "out")
    left_out = shutil.ignore_patterns("config.json", "model*")
    shutil.copytree(tmp_path / "out/export", tmp_path / "adapter", ignore=left_out)
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "out/export"}))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = manager(device="cpu", force_model="out/export").load_model_and_processor("out/export@main")
    assert type(model).__name__ == "LlamaForCausalLM" and len(tokenizer) > 256
    refuses("Unrecognized model in adapter", manager, device="cpu", force_model="adapter", error=ValueError)
