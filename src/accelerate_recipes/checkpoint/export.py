"""Export of a checkpoint into a folder that `from_pretrained` loads, one safetensors shard at a time."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
import yaml
from huggingface_hub.serialization._base import parse_size_to_int

from accelerate_recipes.checkpoint import files, weight_files
from accelerate_recipes.checkpoint.base_form import COMPOSITE
from accelerate_recipes.checkpoint.files import EXPORT, USAGE, SaveError
from accelerate_recipes.disk import read_json, read_json_lines
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.metrics import is_evaluation
from accelerate_recipes.models import adapters
from accelerate_recipes.models.base import Base, described, folder_of_base, name_untrained, open_base
from accelerate_recipes.models.composites import sees_images
from accelerate_recipes.models.pretrained import mapped_weights, model_checksum
from accelerate_recipes.ranks import computes_in_bf16


def export(
    checkpoint: Path,
    out: Path,
    description: str = "",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
    text_only: bool = False,
) -> None:
    """Export a checkpoint to a folder that `from_pretrained` loads, in one process that never holds the whole model.

    `dtype` of the weights defaults to the precision of evaluation: bf16 after a bf16 run, else that of the parameters. The
    export needs the memory of one safetensors shard of `max_shard_size` (bytes, or a text such as "500MB").

    Adapters become a folder for PEFT. With `merge_adapter`, the folder holds the whole model, and the adapters themselves in
    `adapter/`. The weights of the whole model are read one by one from the files of the base.

    Parts of the base that the run does not train, such as the vision part of a composite checkpoint, are copied from the
    files of the base. With `text_only`, the export holds the trained model alone.

    `out` may be an earlier export. The new export replaces it when it is complete.

    Raises:
        ConfigError: for an `out` that holds anything else, and for settings that do not fit the checkpoint.
        SaveError: if the export cannot be written; no incomplete export is left.
    """
    checkpoint, out = checkpoint.resolve(), out.resolve()
    if checkpoint in (out, *out.parents) or out in checkpoint.parents:
        raise ConfigError(f"{out} is, holds or lies in the checkpoint {checkpoint}; give another folder")
    arguments, marker = files.saved_arguments(checkpoint), files.read_marker(checkpoint)
    began_with = arguments.get("model_name_or_path", "")
    check_replaceable(out, began_with)
    if is_same_model(checkpoint, str(out)):  # needed if the base has a relative path
        raise ConfigError(is_needed(out))
    is_adapter = files.holds_adapter(marker)
    if merge_adapter and not is_adapter:
        raise ConfigError(f"{checkpoint} holds a whole model: there is no adapter to merge")
    if merge_adapter and arguments.get("load_in_4bit"):
        problem = f"{checkpoint} holds adapters of a model in 4 bits: they do not fit unrounded weights"
        raise ConfigError(f"{problem}; PEFT loads them beside a model in 4 bits")
    if is_adapter and dtype and not merge_adapter:
        raise ConfigError(f"{checkpoint} holds adapters, which stay in fp32; a dtype is for the merged model")
    if is_adapter and text_only and not merge_adapter:
        problem = f"{checkpoint} holds adapters, and no other part of their model"
        raise ConfigError(f"{problem}; leave out --text_only_export")
    base = None
    if marker.get("base_model") and (merge_adapter or not (is_adapter or text_only)):
        base = base_of(checkpoint, marker)
    is_whole = base is not None and not text_only
    if base is None and not is_adapter and is_same_model(checkpoint, began_with):  # else it is gone, or has changed
        model, _ = weight_files.model_on_meta(checkpoint)
        base = open_base(model, began_with, cache.pinned(began_with).get("revision"))
    with replacing(out, began_with) as folder:
        left_out = {"data.json"}
        if is_adapter:  # `from_pretrained` would misread a file of the other kind
            left_out |= {"adapter_config.json"} if merge_adapter else {"adapter_config.json", "config.json"}
        copy_settings(checkpoint, folder, marker["files"].keys() - left_out, is_whole)
        if is_adapter:
            destination = folder / "adapter" if merge_adapter else folder
            destination.mkdir(exist_ok=True)
            if (checkpoint / COMPOSITE).is_dir() and not text_only:
                weight_files.write_adapter_of_whole(checkpoint, destination)
            else:
                weight_files.write_adapter(checkpoint, destination)
                shutil.copyfile(checkpoint / "adapter_config.json", destination / "adapter_config.json")
        if merge_adapter or not is_adapter:
            is_asked = dtype is not None
            usual = "bfloat16" if computes_in_bf16(marker["mixed_precision"]) else marker["param_dtype"]
            dtype = dtype or getattr(torch, usual)
            if merge_adapter:
                assert base is not None
                weight_files.write_merged(checkpoint, folder, dtype, max_shard_size, base, text_only)
            else:
                weight_files.write_safetensors(checkpoint, folder, dtype, max_shard_size, base, is_whole, not is_asked)
            say_dtype(folder / "config.json", str(dtype).removeprefix("torch."))
        if base and is_whole and base.rest:
            description += f" {name_untrained(base.rest, marker['base_model']['name'])}."
        (folder / "README.md").write_text(model_card(checkpoint, description), encoding="utf-8")


@contextlib.contextmanager
def replacing(out: Path, base_model: str) -> Iterator[Path]:
    """Give a folder for an export, which takes the place of `out` when it is written; see `export` for the errors."""
    folder = files.unfinished(out)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        list_files(folder)
        yield folder
        list_files(folder)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        if files.is_of_the_disk(error):
            raise SaveError(f"{out} could not be written: {error}") from None
        raise
    check_replaceable(out, base_model)  # check again: writing took some time
    try:
        remove_export(out)
        folder.rename(out)
    except OSError as error:
        raise SaveError(f"{folder} is whole, but cannot take its place: {error}; move it by hand") from None


def copy_settings(checkpoint: Path, out: Path, names: Iterable[str], is_whole: bool) -> None:
    """Copy the files of a checkpoint that `from_pretrained` reads besides the weights; for a whole composite, its own."""
    for name in sorted(names, key=lambda name: name.startswith(COMPOSITE)):
        is_artifact = "/" not in name and name.endswith((".json", ".jinja", ".model", ".py", ".txt"))
        if (is_artifact and "model.safetensors" not in name) or name.startswith("additional_chat_templates/"):
            target = out / name
        elif is_whole and name.startswith(f"{COMPOSITE}/"):
            target = out / Path(name).name
        else:
            continue
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint / name, target)  # without the mode of the checkpoint, which may be read-only


def say_dtype(file: Path, dtype: str) -> None:
    """Write the dtype of the weights into a config.json, by the name that it uses, or by those of transformers 4 and 5."""
    config, names = read_json(file), {"dtype", "torch_dtype"}
    parts = [part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict)]
    config |= dict.fromkeys(sorted(names & config.keys() or names), dtype)
    for part in parts:
        part |= dict.fromkeys(names & part.keys(), dtype)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def base_of(checkpoint: Path, marker: dict) -> Base:
    """Open the model that the run of a checkpoint began with. Raises ConfigError if its weights have changed."""
    name, revision = marker["base_model"]["name"], marker["base_model"]["revision"]
    model, _ = weight_files.model_on_meta(checkpoint)
    base = open_base(model, name, revision)
    weights = mapped_weights(folder_of_base(name, revision)) if files.holds_adapter(marker) else base.rest
    files.check_base(checkpoint, marker, described(name, revision, weights))
    return base


def check_shard_size(text: str) -> None:
    """Check that a text is a file size, such as 500MB. Raises ConfigError."""
    try:
        number = parse_size_to_int(text)
    except (ValueError, OverflowError):  # OverflowError: infinity
        number = 0
    if number < 1:
        raise ConfigError(f"--max_shard_size {text!r} is not a size; give a number with KB, MB, GB or TB")


def list_files(export: Path) -> None:
    """Write the list of an export's files: a later export removes only these files."""
    names = [str(path.relative_to(export)) for path in export.rglob("*")]
    (export / EXPORT).write_text(json.dumps({"files": sorted({*names, EXPORT})}, indent=1) + "\n", encoding="utf-8")


def listed_files(folder: Path) -> set[str]:
    """List the files that an export has written into a folder; empty if there is no export."""
    try:
        return set(read_json(folder / EXPORT)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def exported_files(folder: Path) -> list[str]:
    """List the files of a complete export, as paths below its folder; leave out files that no export wrote.

    Raises:
        ConfigError: if the folder is no export, is not finished, or lacks a file.
    """
    listed = listed_files(folder)
    if not listed:
        lacking = f"it holds no {EXPORT}; the command `export` makes one of a checkpoint"
        raise ConfigError(f"{folder} is no export: {files.other_kind(folder, 'export') or lacking}")
    if "README.md" not in listed:  # the list is written first and last
        raise ConfigError(f"{folder} is an export that was not finished; make it again")
    present = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.exists()}
    if missing := sorted(listed - present.keys()):
        raise ConfigError(f"{folder} is not whole: it lacks {', '.join(missing)}; export the checkpoint again")
    return sorted(name for name in listed if present[name].is_file())


def arguments_of(export: Path) -> dict:
    """Read the arguments of the run in the model card of an export.

    Raises:
        ConfigError: if the card does not have them.
    """
    card = (export / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^## Arguments\n\n```yaml\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ConfigError(f"{export / 'README.md'} does not say the arguments of the run under `## Arguments`")
    return yaml.safe_load(match[1])


def check_replaceable(out: Path, base_model: str) -> None:
    """Check that `out` is a new or empty folder, or an earlier export.

    Raises:
        ConfigError: if the export would remove anything else, or the model that the run began with.
    """
    if base_model and Path(base_model).resolve() == out.resolve():
        raise ConfigError(is_needed(out))
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; an export needs a folder")
    listed = listed_files(out)
    other = next((path for path in out.rglob("*") if str(path.relative_to(out)) not in listed), None)
    if other:
        raise ConfigError(f"{out} holds {other.name}, which no export wrote; move that away, or give another folder")
    unfinished = files.unfinished(out)
    if (unfinished.is_file() or any(unfinished.glob("*"))) and not (unfinished / EXPORT).exists():
        raise ConfigError(f"{unfinished}, where the export is written first, holds something else; move that away")


def is_same_model(checkpoint: Path, name: str) -> bool:
    """Tell whether a checkpoint's run began with this model, even if the model lies in another place."""
    then = files.read_marker(checkpoint).get("model_checksum")
    try:
        return bool(then and name) and then == model_checksum(name)
    except ConfigError:  # a damaged model is not the same
        return False


def is_needed(out: Path) -> str:
    return f"{out} is the model that the run begins with; the export needs another folder"


def remove_export(out: Path) -> None:
    """Remove the listed files, and the list last, so that an interrupted removal can be finished."""
    listed = listed_files(out)
    for path in sorted(out.rglob("*"), reverse=True):  # files before their folder
        if str(path.relative_to(out)) in listed - {EXPORT}:
            path.rmdir() if path.is_dir() else path.unlink()
    (out / EXPORT).unlink(missing_ok=True)
    if out.exists():
        out.rmdir()


def model_card(checkpoint: Path, description: str) -> str:
    """Write the README.md of an export: what was trained, the result, and the arguments."""
    arguments = (checkpoint / "args.yaml").read_text(encoding="utf-8")
    marker = files.read_marker(checkpoint)
    base = marker["base_model"] if files.holds_adapter(marker) else None
    if base:
        at = f" at commit {base['revision']}" if base["revision"] else ""
        description += f" Low-rank adapters of {base['name']}{at}, by PEFT."
    records = read_json_lines(checkpoint / "metrics.jsonl")
    result = next((record for record in reversed(records) if is_evaluation(record)), {})
    values = {name.removeprefix("eval_"): value for name, value in result.items() if name.startswith("eval_")}
    usage = checkpoint / USAGE  # of a recipe whose models are not simply loaded
    measured = "".join(f"| {name} | {value:.5g} |\n" for name, value in values.items())
    return f"""# {Path(yaml.safe_load(arguments)["output_dir"]).name}

{description} Trained with accelerate-recipes {marker["versions"]["accelerate_recipes"]}.
{how_to_load(checkpoint, base) if base else ""}{usage.read_text("utf-8") if usage.is_file() else ""}
## Result on held-out data

| after {result.get("step", "no")} steps | |
|---|---|
{measured}
## Arguments

```yaml
{arguments}```
"""


def how_to_load(checkpoint: Path, base: dict[str, str | None]) -> str:
    """Write how to load adapters with rows of new tokens; an empty text for other adapters, which need no instructions."""
    if not adapters.read_config(checkpoint).trainable_token_indices:
        return ""
    config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    is_whole = (checkpoint / COMPOSITE).is_dir() or sees_images(config)
    kind = "AutoModelForImageTextToText" if is_whole else "AutoModelForCausalLM"
    number = config.get_text_config().vocab_size
    revision = f', revision="{base["revision"]}"' if base["revision"] else ""
    return f"""
The adapters hold the rows of new tokens, for which their model needs room before they are loaded:

```python
from peft import PeftModel
from transformers import {kind}

model = {kind}.from_pretrained("{base["name"]}"{revision})
model.resize_token_embeddings({number})
model = PeftModel.from_pretrained(model, folder)  # that of adapter_config.json
```
"""
