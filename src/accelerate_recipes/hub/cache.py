"""Models and datasets of the Hub on this machine: their commits, and missing files. This module uses no network.

`download.py` downloads. In the cache folder of each repository it writes a manifest, `accelerate_recipes.json`:

    name, type    of the repository; type is `model` or `dataset`
    branch        the requested branch, such as `main`
    revision      its commit at that time; later downloads stay at this commit, even if the branch moves
    files         size and checksum of each requested file
    asked         the requests, as `Need.key`: each with its `files`, and the `recipes` (command lines) that asked
    configs       for a dataset: how to read each requested configuration, and the files of its splits
"""

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate
from huggingface_hub import constants
from huggingface_hub.utils import HFValidationError, validate_repo_id

from accelerate_recipes.disk import checksum, is_pointer, read_json, size_and_times
from accelerate_recipes.errors import ConfigError

MANIFEST = "accelerate_recipes.json"
# `from_pretrained` takes the first of these files that exists. An index lists the files that hold the weights.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
# Endings of files of weights, also in formats that are not read; and parts of weights, which an index names.
WEIGHT_FORMATS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
# Builders with which `datasets` reads files, by the suffixes of the files.
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
POINTED_AT = (".jpg", ".jpeg", ".png", ".webp", ".tar")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class HubModel:
    """Model and its tokenizer; without `weights`, only the tokenizer."""

    name: str
    weights: bool = True
    repo_type = "model"
    branch = "main"
    streamed = False

    @property
    def key(self) -> str:
        return "model" if self.weights else "tokenizer"

    def __str__(self) -> str:
        return f"{self.key} {self.name!r}"


@dataclass(frozen=True)
class HubDataset:
    """Files of a dataset that match a pattern, or splits of a configuration as `datasets.load_dataset` finds them.

    A `streamed` dataset is in the cache only if it was downloaded beforehand.
    """

    name: str
    files: str = ""
    config: str = ""
    splits: tuple[str, ...] = ()
    revision: str = ""  # branch, tag or commit; empty: main
    streamed: bool = False
    repo_type = "dataset"

    def __post_init__(self):
        parts = Path(self.files).parts
        if self.files and (not parts or parts[0] == "/" or any("**" in part and part != "**" for part in parts)):
            remedy = "write a relative one, with ** for folders, such as data/**/*.parquet"
            raise ConfigError(f"{self.files!r} is no pattern of files inside {self.name}: {remedy}")

    def __str__(self) -> str:
        return f"dataset {self.name!r} ({self.files or self.config or 'its only configuration'})"

    @property
    def branch(self) -> str:
        return self.revision or "main"

    @property
    def key(self) -> str:
        return f"files {self.files}" if self.files else f"splits {self.config}: {', '.join(self.split_names)}"

    @property
    def split_names(self) -> list[str]:
        return [name for split in self.splits if split for name in names_in(split)]


Need = HubModel | HubDataset
ALL = "all of it"


def names_in(split: str) -> list[str]:
    """List the names of the splits in a text such as `train[:10%]+test`."""
    return [part.split("[")[0].strip() for part in split.split("+")]


def matches(file: str, pattern: str) -> bool:
    """Match a path as a shell does, with `**` for any folders."""
    return re.fullmatch(glob_translate(pattern), file) is not None


def place_of(pattern: str) -> tuple[str, bool]:
    """Find the deepest folder that holds all matches, and whether matches may lie deeper.

    This avoids listing a whole repository: C4 has tens of thousands of files.
    """
    inside = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    return inside, "/" in pattern.removeprefix(f"{inside}/")


def repository(repo_type: str, name: str) -> Path:
    """Return the folder of a repository in the cache, even for a name that is not valid."""
    return Path(constants.HF_HUB_CACHE) / "--".join([f"{repo_type}s", *name.split("/")])


def read_manifest(repo_type: str, name: str) -> dict | None:
    file = repository(repo_type, name) / MANIFEST
    return parsed_manifest(file) if file.exists() else None


def manifests() -> Iterator[dict]:
    """Read all manifests of the cache, by name."""
    return map(parsed_manifest, sorted(Path(constants.HF_HUB_CACHE).glob(f"*/{MANIFEST}")))


def parsed_manifest(file: Path) -> dict:
    """Read a manifest. Raises ConfigError for a damaged one."""
    try:
        manifest = read_json(file)
        files, asked = manifest["files"], manifest["asked"].values()
        texts = [manifest[name] for name in ("type", "name", "branch", "revision")]
        texts += [text for entry in asked for text in (*entry["files"], *entry["recipes"])]
        texts += [entry["checksum"] for entry in files.values()]
        is_whole = all(isinstance(text, str) for text in texts) and isinstance(manifest["configs"], dict)
        is_whole &= {name for entry in asked if entry["recipes"] for name in entry["files"]} == files.keys()
        if is_whole and all(isinstance(entry["size"], int) for entry in files.values()):
            return manifest
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        pass
    raise ConfigError(f"{file}, the record of a download, is damaged; remove it, and run the same `download` again")


def revision(repo_type: str, name: str) -> str | None:
    """Return the commit to read on this machine: the downloaded one, else the newest one in the cache, else None.

    A download that was interrupted leaves the name of a commit without its files.
    """
    if manifest := read_manifest(repo_type, name):
        return manifest["revision"]
    repo = repository(repo_type, name)
    try:
        commit = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return commit if commit and (repo / "snapshots" / commit).is_dir() else None


def folder(repo_type: str, name: str) -> Path | None:
    """Find the folder of the files: `name` itself, or its folder in the cache; None if there is neither."""
    if os.path.isdir(name):
        return Path(name)
    commit = revision(repo_type, name)
    return repository(repo_type, name) / "snapshots" / commit if commit else None


def version(repo_type: str, name: str, pattern: str = "**/*") -> list:
    """Return a value that changes when matching files change: the commit, or for a folder each file's name and version."""
    if not os.path.isdir(name):
        return [revision(repo_type, name)]
    files = sorted(path for path in Path(name).glob(pattern) if path.is_file())
    return [[str(path.relative_to(name)), file_version(path)] for path in files]


def file_version(file: str | Path) -> str | list[int]:
    """Return a checksum of a file's content, independent of its place: other content may have the same size and time.

    For images and tars, return size and times instead: these files are many and large, and read in their place.
    """
    return size_and_times(file) if str(file).endswith(POINTED_AT) else checksum(Path(file))


def pinned(name: str) -> dict:
    """Return the settings with which `from_pretrained(name, ...)` reads only files on this machine."""
    here = {"local_files_only": True}
    return here if os.path.isdir(name) else here | {"revision": revision("model", name)}


def files_of(manifest: dict, need: Need) -> list[str]:
    """List the files of a manifest that a run with this need reads; for a missing split, list `split NAME`."""
    if need.key in manifest["asked"]:
        return manifest["asked"][need.key]["files"]
    # Other requests may have asked for the same files.
    if isinstance(need, HubModel):
        return [file for file in manifest["files"] if need.weights or not file.endswith((".safetensors", ".bin"))]
    if need.files:
        return sorted(file for file in manifest["files"] if matches(file, need.files))
    splits = manifest["configs"].get(need.config, {}).get("splits", {})
    return [file for name in need.split_names or splits for file in splits.get(name, [f"split {name}"])]


def snapshot(manifest: dict) -> Path:
    """Return the folder of the files of a manifest."""
    return repository(manifest["type"], manifest["name"]) / "snapshots" / manifest["revision"]


def absent(manifest: dict, files: list[str]) -> list[str]:
    """List the files that are not on the disk, or have another size."""
    known = manifest["files"]
    return [file for file in files if file not in known or size_of(snapshot(manifest) / file) != known[file]["size"]]


def size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def is_path(name: str) -> bool:
    """Tell whether a name is that of a folder: there is one, or no repository of the Hub can have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return os.path.isdir(name)


def lacking(need: Need) -> list[str]:
    """List the missing files of a need, by name or by a description. Reads only names and sizes."""
    directory = folder(need.repo_type, need.name)
    if directory is None:
        return [ALL]
    if not os.path.isdir(need.name) and (manifest := read_manifest(need.repo_type, need.name)):
        if manifest["branch"] != need.branch:
            return [f"revision {need.branch}"]
        files = files_of(manifest, need)
        if (missing := absent(manifest, files)) or (files and isinstance(need, HubDataset)):
            return missing
    # `download` did not fetch these files, so no manifest says which files should be there.
    if isinstance(need, HubModel):
        return lacking_of_model(directory, need.weights)
    if (need.files and any(directory.glob(need.files))) or (os.path.isdir(need.name) and not need.files):
        return []
    return [f"a file that matches {need.files!r}" if need.files else ALL]


def lacking_of_model(place: Path, weights: bool) -> list[str]:
    """List the missing files among those that every model or tokenizer must have.

    Raises:
        ConfigError: for an index of weights that cannot be read.
    """
    pointers = {path.name for path in place.iterdir() if is_pointer(path)}
    names = ["config.json"] if any("index.json" in name for name in pointers) else ["config.json", *weight_files(place)]
    # A clone may hold pointers to weights in other formats, which are not read.
    needed = {name for name in pointers if not name.endswith(WEIGHT_FORMATS) or (weights and name in names)}
    missing = [f"{name} (it is a git-LFS pointer; `git lfs pull` gets the file)" for name in sorted(needed)]
    if not weights:
        return missing if any((place / name).is_file() for name in TOKENIZERS) else [*missing, "tokenizer.json"]
    if (place / "adapter_config.json").is_file() and not (place / "config.json").is_file():
        return ["a whole model, as it holds adapters: `python -m accelerate_recipes export --merge_adapter` makes one"]
    lost = [name for name in names if not (place / name).is_file()]
    return missing + [without_weights(place) if name == WEIGHT_FILES[0] else name for name in lost]


def without_weights(place: Path) -> str:
    """Describe the weights that a folder lacks, by what it holds instead."""
    names = sorted(path.name for path in place.iterdir() if path.is_file() and not is_pointer(path))
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        stem, end = shards[0].split("-")[0], shards[0].rpartition(".")[2]
        return f"{stem}.{end}.index.json (it names the weights in {shards[0]} and its like; copy or download it too)"
    if other := next((name for name in names if name.endswith(WEIGHT_FORMATS)), None):
        reason = "is for llama.cpp" if other.endswith(".gguf") else "is in a format that is not read here"
        return f"{WEIGHT_FILES[0]} ({other} {reason}; give the same model in the format of transformers)"
    return WEIGHT_FILES[0]


def weight_files(place: Path) -> list[str]:
    """Return the files of a folder that hold the weights: those of the first index or file that `from_pretrained` takes."""
    weight_file = next((name for name in WEIGHT_FILES if (place / name).is_file()), WEIGHT_FILES[0])
    return shards_of(place / weight_file) if weight_file.endswith(".index.json") else [weight_file]


def shards_of(index: Path) -> list[str]:
    """Return the files that an index of weights names.

    Raises:
        ConfigError: if the file is not such an index.
    """
    try:
        return sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights ({error!r}); copy or download it again") from error


def paths_of(need: HubDataset) -> list[str]:
    """List the paths of a dataset's files on this machine, in the order of their names; empty if it is not here."""
    directory = folder("dataset", need.name)
    if directory and not os.path.isdir(need.name) and (manifest := read_manifest("dataset", need.name)):
        return [str(directory / file) for file in files_of(manifest, need)]
    return sorted(map(str, directory.glob(need.files or "**/*"))) if directory else []


def bytes_of(need: HubDataset) -> int:
    """Add up the sizes of a dataset's files on this machine; 0 if it is not here."""
    return sum(size_of(Path(path)) or 0 for path in paths_of(need) if not os.path.isdir(path))


def dataset_files(name: str, pattern: str) -> list[str]:
    """Return the paths of the matching files of a dataset or a folder, in the order of their names.

    Raises:
        ConfigError: if no file matches.
    """
    paths = paths_of(HubDataset(name, files=pattern))
    if not paths:
        raise ConfigError(f"no file of {name!r} that matches {pattern!r} is here")
    return paths


def load_arguments(need: HubDataset) -> dict:
    """Return arguments (besides the split) with which `datasets.load_dataset` reads a downloaded dataset from its files.

    Offline, datasets 5.2 finds a dataset by name only if it has converted it before with the same arguments. With
    `data_files` it does not find even this (datasets#6837), because its cache key contains the files' state on the Hub.

    Raises:
        ConfigError: if the dataset was not downloaded.
    """
    if os.path.isdir(need.name):
        return {"path": need.name, "name": need.config or None, "data_files": need.files or None}
    if need.files:
        files = dataset_files(need.name, need.files)
        builder = next((BUILDERS[suffix] for suffix in Path(files[0]).suffixes if suffix in BUILDERS), None)
        if builder is None:
            raise ConfigError(f"{files[0]}: its name must end with one of {', '.join(BUILDERS)}")
        return {"path": builder, "data_files": {"train": files}}
    manifest = read_manifest("dataset", need.name)
    if manifest is None or need.config not in manifest["configs"]:
        raise ConfigError(f"{need} was not downloaded")
    entry, directory = manifest["configs"][need.config], folder("dataset", need.name)
    files = {name: [str(directory / file) for file in entry["splits"].get(name, [])] for name in need.split_names}
    return {"path": entry["builder"], "data_files": files} | entry["options"]


def options_of(config: Any) -> dict[str, Any]:
    """Return the options of a configuration of `datasets` that change how its files are read."""
    others = ("name", "version", "data_dir", "data_files", "description", "features")
    own = [option for option in fields(config) if option.name not in others]
    return {option.name: value for option in own if (value := getattr(config, option.name)) != option.default}


def saved_splits(name: str) -> dict[str, list[str]]:
    """List the Arrow files of each split of a folder that `save_to_disk` wrote; empty for other folders."""
    if (index := Path(name) / "dataset_dict.json").is_file():
        folders = {split: Path(name) / split for split in read_json(index)["splits"]}
    else:
        folders = {"train": Path(name)} if (Path(name) / "state.json").is_file() else {}
    data_files = {split: read_json(path / "state.json")["_data_files"] for split, path in folders.items()}
    return {split: [str(folders[split] / file["filename"]) for file in files] for split, files in data_files.items()}


def folder_problems(flag: str, name: str) -> list[str]:
    """Say why `datasets` cannot find the files of a folder that a flag names."""
    here = str(Path(name).resolve())
    if not os.path.isdir(name) or glob.escape(here) == here or saved_splits(name):
        return []
    return [f"--{flag} {here}: `datasets` takes [, * and ? in the path for a pattern; rename the folder"]
