"""Settings and tokenizer of a checkpoint in the form of its base, for every program that reads the base.

transformers 5 writes some settings that only version 5 reads. Instead of `rope_theta` and `rope_scaling` it writes
`rope_parameters`, and version 4 then silently takes its defaults. It writes tokenizer classes that no other program knows,
and no `tokenizer.model`. So a checkpoint gets the files of the base, with the changes of the run. For a new model, both
forms are written, where version 5 reads the same with the older fields: it prefers some of them to its own.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.hub import cache
from accelerate_recipes.models.composites import is_text_part, text_part
from accelerate_recipes.models.pretrained import load_config, load_text_config

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
CARRIED = (*cache.TOKENIZERS, "merges.txt", "tekken.json", TOKENIZER_CONFIG, SPECIAL, ADDED)
# Folder in a checkpoint with the settings of the composite checkpoint that the run began with, and files of its processor.
COMPOSITE = "composite"
TEMPLATE = "chat_template.json"  # file of processors of transformers 4
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", TEMPLATE)
# Fields that differ between a text part and its composite checkpoint.
OF_CLASS = {"architectures", "dtype", "model_type", "_name_or_path", "transformers_version", "use_cache"}
# Settings that cutting or padding leaves behind in a tokenizer, with their values at rest.
STATE = {"truncation": None, "padding": None}
# Names of fields in transformers 4, by type of model.
OLD_NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
OLD_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


class BaseForm:
    """Artifact that writes a tokenizer or image processor, and replaces the config.json that transformers has written.

    `files` are written too: the content of each, by name. The constructor reads the base, because the base may be gone when
    the run saves.

    Raises:
        ConfigError: if transformers would read another configuration from the config.json than the one that trains.
    """

    def __init__(self, config: PreTrainedConfig, tokenizer: Any, files: Mapping[str, bytes] = MappingProxyType({})):
        name, made = config.name_or_path, written(config)
        of_base = files_of_base(name, [CONFIG])
        self.files = (
            tokenizer_files(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else written(tokenizer)
        )
        if name and cache.folder("model", name) and is_text_part(config, load_config(name)):
            self.files |= composite_files(config, tokenizer)
        self.files |= files
        settings, now = json.loads(made[CONFIG]), whole_content(config)
        # What this version of transformers reads from the base.
        before = whole_content(transformers.AutoConfig.from_pretrained(name, **cache.pinned(name))) if of_base else {}
        if before.get("model_type") == now["model_type"]:
            settings = with_changes(json.loads(of_base[CONFIG]), before, now)
            # transformers reads fields under these other names, but does not keep the names.
            others = {*config.attribute_map, "num_labels"} & settings.keys() - now.keys()
            settings |= {name: getattr(config, name) for name in others}
        if not any(file.endswith(".py") for file in made):  # the run did not train a model with the base's own code
            for content in (settings, now):
                content.pop("auto_map", None)
        if "tie_word_embeddings" in now:
            settings["tie_word_embeddings"] = now["tie_word_embeddings"]
        settings = with_older_fields(settings, now)
        # What a class derives from another field, as T5 does from `tie_word_embeddings`, is written too.
        settings |= {field: now[field] for field in read_otherwise(settings, now)}
        check_read_alike(settings, now)
        self.files[CONFIG] = as_bytes(settings)

    def save_pretrained(self, folder: str | Path) -> None:
        for name, content in self.files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)


def composite_files(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return settings and processor files of the composite checkpoint whose text part has this configuration, by name.

    These are the files of the base, with the run's changes to fields of the text part and to the chat template.
    """
    name = config.name_or_path
    files = files_of_base(name, (CONFIG, *PROCESSORS))
    base = json.loads(files[CONFIG])
    before, now = whole_content(load_text_config(name)), whole_content(config)
    changed = {field: value for field, value in now.items() if before.get(field) != value and field not in OF_CLASS}
    if changed and "text_config" in base:
        # The composite configuration may repeat a field of the text part.
        repeated = {field: value for field, value in changed.items() if base.get(field, ...) == before.get(field)}
        files[CONFIG] = as_bytes(base | repeated | {"text_config": base["text_config"] | changed})
    elif changed:  # an older Qwen2-VL keeps the fields of its text part among the others
        files[CONFIG] = as_bytes(base | changed)
    check_read_alike(json.loads(files[CONFIG]), now, part=text_part)
    if TEMPLATE in files:
        files |= template_file(name, tokenizer)
    return {f"{COMPOSITE}/{file}": content for file, content in files.items()}


def template_file(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the file of processors of transformers 4 that holds the chat template, if the template has changed."""
    template = tokenizer.chat_template
    is_same = template == transformers.AutoTokenizer.from_pretrained(name, **cache.pinned(name)).chat_template
    return {} if is_same else {TEMPLATE: as_bytes({"chat_template": template})}


def files_of_base(name: str, wanted: Iterable[str]) -> dict[str, bytes]:
    """Return those of the wanted files that a model has, by name."""
    folder = cache.folder("model", name)
    return {file: (folder / file).read_bytes() for file in wanted if (folder / file).is_file()} if folder else {}


def whole_content(config: PreTrainedConfig) -> dict:
    return json.loads(config.to_json_string(use_diff=False))


def with_changes(base: dict, before: dict, after: dict) -> dict:
    """Return `base`, the content of a file, with the differences between `before` and `after`.

    `before` and `after` are the contents that transformers would write before and after the run.
    """
    kept = {name: value for name, value in base.items() if name in after or name not in before}
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    for name, value in changed.items():
        old, own = before.get(name), base.get(name)
        if name.endswith("_config") and isinstance(old, dict) and isinstance(own, dict) and isinstance(value, dict):
            value = value | {field: old[field] for field in OF_CLASS & old.keys()}  # loading sets the dtype of a part
            changed[name] = with_changes(own, old, value)
    return kept | changed


def with_older_fields(settings: dict, now: dict) -> dict:
    """Add to the content of a config.json the same settings under the fields of transformers 4.

    Fields by which this version would read another configuration, where it reads `now`, are left out.
    """
    names = OLD_NAMES.get(settings.get("model_type", ""), {})
    for older in (
        lambda found: {"torch_dtype": found["dtype"]} if "dtype" in found else {},
        lambda found: older_rope(found.get("rope_parameters") or {}),
        lambda found: {old: found[new] for new, old in names.items() if new in found},
    ):
        more = settings | older(settings)
        if read_otherwise(more, now).keys() <= read_otherwise(settings, now).keys():
            settings = more
    return settings


def read_otherwise(settings: dict, now: dict, part: Callable = lambda whole: whole) -> dict[str, Any]:
    """Return what this version of transformers reads from a config.json, in the fields that are others in `now`.

    `now` is the content of a configuration, or of that `part` of it. All fields are others in a file that cannot be read.
    Fields of a class do not count, nor whether the output layer is tied, which the weights decide. (T5's class reads that
    field as whether the decoder's results are scaled.)
    """
    left_out = {*OF_CLASS, "tie_word_embeddings"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_bytes(as_bytes(settings))
        try:
            content = whole_content(part(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)))
        except Exception as error:  # each class of configurations checks its fields in its own way
            return dict.fromkeys(now, f"an error ({one_line(error)})")

    def compared(value: Any) -> Any:
        return {n: compared(v) for n, v in value.items() if n not in left_out} if isinstance(value, dict) else value

    theirs = compared(content)
    return {name: content.get(name) for name, value in compared(now).items() if theirs.get(name) != value}


def check_read_alike(settings: dict, now: dict, **how: Any) -> None:
    """Check that a config.json is read as `now`; see `read_otherwise`.

    Raises:
        ConfigError: names a field that is read otherwise.
    """
    if changed := read_otherwise(settings, now, **how):
        name = min(changed)
        raise ConfigError(
            f"the config.json that this run writes would be read otherwise than what is trained: {name} as "
            f"{changed[name]}, not {now[name]}; mend the config.json of the base, or --config_overrides"
        )


def older_rope(rope: dict) -> dict:
    """Convert `rope_parameters` to the fields of transformers 4."""
    fields = {}
    if all(rope.get(kind) for kind in ("sliding_attention", "full_attention")):  # two kinds of layers, as in Gemma 3
        fields["rope_local_base_freq"], rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
    apart = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in rope.items() if name not in apart}
    if scaling.get("rope_type") not in OLD_ROPES:  # version 4 does not know the model
        return {}
    if scaling["rope_type"] == "longrope":  # in version 4, a Phi-3 has only these names
        fields["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        scaling["type"] = scaling.pop("rope_type")
    fields["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    return fields | {name: rope[name] for name in apart if name in rope}


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: files of its base with the changes since, or else new files."""
    name = tokenizer.name_or_path
    base, files = files_of_base(name, CARRIED), written(tokenizer)
    settings = json.loads(files[TOKENIZER_CONFIG])
    if not base:
        return files | {TOKENIZER_CONFIG: as_bytes(with_older_class(settings, settings))}
    original = transformers.AutoTokenizer.from_pretrained(name, **cache.pinned(name))
    before = json.loads(written(original, TOKENIZER_CONFIG)[TOKENIZER_CONFIG])
    contents = {file: json.loads(base[file]) for file in (TOKENIZER_CONFIG, SPECIAL) if file in base}
    config = with_changes(contents.get(TOKENIZER_CONFIG, {}), before, settings)
    if "chat_template" in config and tokenizer.chat_template != original.chat_template:
        config["chat_template"] = template = tokenizer.chat_template
        if isinstance(template, dict):  # several templates are a list in this file
            config["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    added = [t.added_tokens_decoder for t in (original, tokenizer)]
    if added[0] != added[1]:
        config["added_tokens_decoder"] = {str(id): token.__getstate__() for id, token in added[1].items()}
        if ADDED in base or any(file.endswith(".model") for file in base):  # *.model files hold no added tokens
            inside = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False) if TOKENIZER in files else {}
            base[ADDED] = as_bytes({t.content: id for id, t in added[1].items() if t.content not in inside})
    # Write special tokens explicitly: the defaults of a class may differ between versions.
    config = {name: settings[name] for name in tokenizer.special_tokens_map if name in settings} | config
    changed = {n: settings[n] for n in tokenizer.special_tokens_map if before.get(n) != settings.get(n)}
    if changed and SPECIAL in contents:
        base[SPECIAL] = as_bytes(contents[SPECIAL] | changed)
    if TOKENIZER in files:
        base[TOKENIZER] = as_at_rest(files[TOKENIZER], base.get(TOKENIZER))
        # Whether a text gets a begin and an end token: classes of version 4 use only these fields.
        ids = tokenizer("a")["input_ids"]
        config["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id]
        config["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id]
    base[TOKENIZER_CONFIG] = as_bytes(with_older_class(config, settings))
    return files | base


def written(artifact: Any, name: str = "*") -> dict[str, bytes]:
    """Return the files that transformers writes for a tokenizer or image processor, or those with a name."""
    with tempfile.TemporaryDirectory() as folder:
        artifact.save_pretrained(folder)
        files = {
            str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob(name) if file.is_file()
        }
    return files | {TOKENIZER: as_at_rest(files[TOKENIZER], None)} if TOKENIZER in files else files


def as_bytes(content: dict) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def as_at_rest(file: bytes, base: bytes | None) -> bytes:
    """Return a tokenizer.json without padding and truncation of its last call; the `base` itself if nothing else differs."""
    if file == base:  # parsing a large vocabulary takes longer than a step
        return file
    content = json.loads(file)
    theirs = json.loads(Tokenizer.from_str(base.decode()).to_str()) if base else content | STATE
    if content | STATE == theirs | STATE and (base or content == theirs):
        return base or file
    return as_bytes(content | {name: theirs[name] for name in STATE})


def with_older_class(config: dict, written: dict) -> dict:
    """Return the content of a tokenizer_config.json with the class and the further special tokens as in transformers 4.

    `written` is the content that transformers 5 writes; it always names a class.
    """
    content = dict(config)
    named = content.get("tokenizer_class") or written["tokenizer_class"]
    # This path is from the machine that saved the base. Version 4 would read it instead of the file in the same folder.
    content.pop("tokenizer_file", None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast" if named == "TokenizersBackend" else named
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    return content
