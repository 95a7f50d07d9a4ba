"""Models and datasets of the Hub on this machine: at which commit, and whether whole. Nothing here asks the network.

`download.py` fetches. In the cache folder of each repository it leaves a manifest, `accelerate_recipes.json`:

    name, type    of the repository; type is `model` or `dataset`
    branch        that was asked for, such as `main`
    revision      its commit at that time: what was downloaded once stays at it, wherever the branch moves
    files         size and checksum of each file that was asked for
    asked         what was asked for, as `Need.key`: its `files`, and the `recipes`, command lines, that did
    configs       of a dataset: how to read each configuration that was asked for, and the files of its splits
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.utils import glob_translate
from huggingface_hub import constants

from accelerate_recipes.args import ConfigError

MANIFEST = "accelerate_recipes.json"
# `from_pretrained` takes the first of these that exists. An index names the files that weights are spread over.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
# How `datasets` reads files, by their names.
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class HubModel:
    """A model and its tokenizer; without `weights` the tokenizer alone."""

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
    """Files of a dataset that match a pattern; or, as `datasets.load_dataset` finds them, splits of a configuration.

    What is `streamed` is in the cache only if it was downloaded beforehand.
    """

    name: str
    files: str = ""
    config: str = ""
    splits: tuple[str, ...] = ()
    revision: str = ""  # branch, tag or commit; else main
    streamed: bool = False
    repo_type = "dataset"

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
    """List the splits that `train[:10%]+test` is made of."""
    return [part.split("[")[0].strip() for part in split.split("+")]


def matches(file: str, pattern: str) -> bool:
    """Match a path as a shell does, with `**` for any folders."""
    return re.fullmatch(glob_translate(pattern), file) is not None


def place_of(pattern: str) -> tuple[str, bool]:
    """Find the deepest folder that holds all matches, and whether matches may lie deeper.

    To list less than a whole repository: all files of C4 are tens of thousands.
    """
    inside = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    return inside, "/" in pattern.removeprefix(f"{inside}/")


def repository(repo_type: str, name: str) -> Path:
    """The folder of a repository in the cache, also of a name that none can have."""
    return Path(constants.HF_HUB_CACHE) / "--".join([f"{repo_type}s", *name.split("/")])


def read_manifest(repo_type: str, name: str) -> dict | None:
    try:
        return json.loads((repository(repo_type, name) / MANIFEST).read_text())
    except FileNotFoundError:
        return None


def manifests() -> Iterator[dict]:
    """Read all manifests of the cache, by name."""
    for file in sorted(Path(constants.HF_HUB_CACHE).glob(f"*/{MANIFEST}")):
        yield json.loads(file.read_text())


def revision(repo_type: str, name: str) -> str | None:
    """The commit that is read here: the downloaded one; else the newest that the cache knows; None if it has none."""
    if manifest := read_manifest(repo_type, name):
        return manifest["revision"]
    try:
        return (repository(repo_type, name) / "refs" / "main").read_text().strip()
    except FileNotFoundError:
        return None


def folder(repo_type: str, name: str) -> Path | None:
    """Find the folder of the files: `name` itself, or one in the cache; None if it is neither."""
    if os.path.isdir(name):
        return Path(name)
    commit = revision(repo_type, name)
    return repository(repo_type, name) / "snapshots" / commit if commit else None


def version(repo_type: str, name: str, pattern: str = "**/*") -> list:
    """Return what changes when matching files do: the commit that is read; of a folder, size and time of each file."""
    if not os.path.isdir(name):
        return [revision(repo_type, name)]
    return file_versions(sorted(str(path) for path in Path(name).glob(pattern) if path.is_file()))


def file_versions(files: Sequence[str]) -> list[list]:
    """Name, size and time of the last change of local files."""
    return [[file, (stat := os.stat(file)).st_size, stat.st_mtime_ns] for file in files]


def pinned(name: str) -> dict:
    """Return the settings with which `from_pretrained(name, ...)` reads what is here, and nothing else."""
    here = {"local_files_only": True}
    return here if os.path.isdir(name) else here | {"revision": revision("model", name)}


def files_of(manifest: dict, need: Need) -> list[str]:
    """List the files of a manifest that a run with this need reads; `split NAME` for a split that there is not."""
    if need.key in manifest["asked"]:
        return manifest["asked"][need.key]["files"]
    # Or part of what others asked for.
    if isinstance(need, HubModel):
        return [file for file in manifest["files"] if need.weights or not file.endswith((".safetensors", ".bin"))]
    if need.files:
        return sorted(file for file in manifest["files"] if matches(file, need.files))
    splits = manifest["configs"].get(need.config, {}).get("splits", {})
    return [file for name in need.split_names or splits for file in splits.get(name, [f"split {name}"])]


def absent(manifest: dict, files: list[str]) -> list[str]:
    """List the files that are not on the disk, or have another size."""
    snapshot = repository(manifest["type"], manifest["name"]) / "snapshots" / manifest["revision"]
    known = manifest["files"]
    return [file for file in files if file not in known or size_of(snapshot / file) != known[file]["size"]]


def size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def lacking(need: Need) -> list[str]:
    """List what of a need is not here: names of files, or what stands for them. Reads names and sizes only."""
    place = folder(need.repo_type, need.name)
    if place is None:
        return [ALL]
    if not os.path.isdir(need.name) and (manifest := read_manifest(need.repo_type, need.name)):
        if manifest["branch"] != need.branch:
            return [f"revision {need.branch}"]
        files = files_of(manifest, need)
        if (found := absent(manifest, files)) or (files and isinstance(need, HubDataset)):
            return found
    # What others than `download` put there: nobody can say which files it should have.
    if isinstance(need, HubModel):
        return lacking_of_model(place, need.weights)
    if (need.files and any(place.glob(need.files))) or (os.path.isdir(need.name) and not need.files):
        return []
    return [f"a file that matches {need.files!r}" if need.files else ALL]


def lacking_of_model(place: Path, weights: bool) -> list[str]:
    """List what a model, or a tokenizer, lacks of the files that none is without."""
    if not weights:
        return [] if any((place / name).is_file() for name in TOKENIZERS) else ["tokenizer.json"]
    found = next((name for name in WEIGHTS if (place / name).is_file()), WEIGHTS[0])
    names = ["config.json", *(shards_of(place / found) if found.endswith(".index.json") else [found])]
    return [name for name in names if not (place / name).is_file()]


def shards_of(index: Path) -> list[str]:
    """The files that weights are spread over."""
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def dataset_files(name: str, pattern: str) -> list[str]:
    """Paths of the files of a dataset, or of a folder, that match; in the order of their names.

    Raises:
        ConfigError: if there is none.
    """
    place = folder("dataset", name)
    manifest = None if os.path.isdir(name) else read_manifest("dataset", name)
    if place and manifest:
        found = [str(place / file) for file in files_of(manifest, HubDataset(name, files=pattern))]
    else:
        found = sorted(str(path) for path in place.glob(pattern)) if place else []
    if not found:
        raise ConfigError(f"no file of {name!r} is here that matches {pattern!r}")
    return found


def load_arguments(need: HubDataset) -> dict:
    """Arguments for `datasets.load_dataset` to read a downloaded dataset from its files, besides the split.

    Asked for a dataset by its name, datasets 5.2 finds offline only what it has converted before with the same
    arguments, and with `data_files` not even that (datasets#6837): its key has the files' state on the Hub in it.

    Raises:
        ConfigError: if it was not downloaded.
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
    entry, place = manifest["configs"][need.config], folder("dataset", need.name)
    files = {name: [str(place / file) for file in entry["splits"].get(name, [])] for name in need.split_names}
    return {"path": entry["builder"], "data_files": files} | entry["options"]
