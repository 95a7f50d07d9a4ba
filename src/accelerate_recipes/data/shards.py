"""Shards: which files a run reads, on a disk, at a URL or on the Hub, and what changes when they change.

A shard of text is a path or an http(s) URL that ends in .json or .jsonl (an object a line; also .gz or .zst), .txt (one
document) or .parquet (local only). Shards of images are in `tars`.
"""

import glob
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Hashable, Sequence
from pathlib import Path, PurePath

import xxhash
from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import EntryNotFoundError

from accelerate_recipes.data.reading import TXT, files_of_folder
from accelerate_recipes.disk import IS_POINTER, is_pointer
from accelerate_recipes.errors import ConfigError, first_line, near_path
from accelerate_recipes.hub import cache

SUFFIXES = (".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst", ".json", ".jsonl", TXT, ".parquet")
HUB = "hf://"


def find_shards(dataset_name: str, pattern: str, revision: str = "") -> list[str]:
    """Find the files that match `pattern` (such as `en/c4-train.*.json.gz`), in the order of their names.

    `dataset_name` is a folder or a dataset on the Hub. For a dataset the shards are URLs (below HF_ENDPOINT if it is set)
    at `revision`, else at the downloaded commit, else at the newest commit; with HF_HUB_OFFLINE they are the downloaded
    files.

    Raises:
        ConfigError: when nothing matches, or the Hub cannot be reached.
    """
    is_here = constants.HF_HUB_OFFLINE or Path(dataset_name).is_dir()
    shards = cache.dataset_files(dataset_name, pattern) if is_here else on_hub(dataset_name, pattern, revision)
    check_suffixes(shards)
    return shards


def named_shards(files: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[str]:
    """Find the shards that a user names one by one, in that order: paths, http(s) URLs, `hf://datasets/ORG/NAME/PATH`.

    A PATH with `*` stands for all files that match. A folder stands for all files in it and in its folders. Both are in
    the order of the names.

    Raises:
        ConfigError: for a file that is missing, or of a kind that cannot be read.
    """
    shards = []
    for file in files:
        if file.startswith(HUB):
            name, revision, path = parts_of_hub_path(file)
            if constants.HF_HUB_OFFLINE and revision:
                raise ConfigError(f"{file}: HF_HUB_OFFLINE is set, and only files without @REVISION can be downloaded")
            if constants.HF_HUB_OFFLINE:
                shards += downloaded(file)
            elif "*" in path:
                shards += on_hub(name, path, revision)
            else:
                shards.append(hub_url(name, path, revision or pinned_commit(name)))
        elif not is_remote(file) and Path(file).is_dir():
            shards += files_of_folder(file, suffixes)
        elif not is_remote(file) and not Path(file).is_file():
            url = "; of URLs, those of http, https and hf are read" if "://" in file else ""
            raise ConfigError(f"{file}: no such file{url or near_path(file)}")
        else:
            shards.append(file)
    check_suffixes(shards, suffixes)
    return shards


def parts_of_hub_path(file: str) -> tuple[str, str, str]:
    """Split `hf://datasets/ORG/NAME[@REVISION]/PATH` into dataset, revision (or "") and path.

    Raises:
        ConfigError: for something else.
    """
    kind, *repository = file.removeprefix(HUB).split("/", 3)
    if kind != "datasets" or len(repository) != 3:
        raise ConfigError(f"{file}: write it as hf://datasets/ORG/NAME/PATH")
    name, _, revision = "/".join(repository[:2]).partition("@")
    return name, revision, repository[2]


def hub_file(file: str, *, streamed: bool) -> cache.HubDataset:
    """Return the files on the Hub that a run reads for a name that a user gives."""
    name, revision, path = parts_of_hub_path(file)
    pattern = path if "*" in path else glob.escape(path)
    return cache.HubDataset(name, files=pattern, revision=revision, streamed=streamed)


def hub_files(files: Sequence[str]) -> list[cache.HubDataset]:
    """List the files that `named_shards` reads from the Hub."""
    needs = [hub_file(file, streamed=True) for file in files if file.startswith(HUB)]
    return [need for need in needs if not need.revision]


def downloaded(file: str) -> list[str]:
    """Return the paths of a downloaded file of the Hub, or of all downloaded files that match."""
    need = hub_file(file, streamed=False)
    return cache.dataset_files(need.name, need.files)


def pinned_commit(dataset_name: str) -> str:
    """Return the commit at which a dataset was downloaded; `main` if it was not."""
    manifest = cache.read_manifest("dataset", dataset_name)
    return manifest["revision"] if manifest else "main"


def check_suffixes(shards: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raise ConfigError for a shard whose kind cannot be read, or that is named twice, perhaps in two ways."""
    names: dict[Hashable, list[str]] = {}
    for shard in shards:
        if not shard.endswith(tuple(suffixes)):
            raise ConfigError(f"{shard}: its name must end with one of {', '.join(suffixes)}")
        if not is_remote(shard) and is_pointer(Path(shard)):
            raise ConfigError(f"{shard} {IS_POINTER}")
        if is_remote(shard) and shard.endswith(".parquet"):
            raise ConfigError(f"{shard}: Parquet is read from a disk only; download it first, see docs/offline.md")
        names.setdefault(identity(shard), []).append(shard)
    if twice := next((aliases for aliases in names.values() if len(aliases) > 1), None):
        raise ConfigError(f"one file is named twice, it would be trained on twice: {', '.join(twice)}")


def identity(shard: str) -> Hashable:
    """Return what two names of one file have in common. In the Hub's cache, equal files of a dataset are one."""
    if is_remote(shard) or Path(shard).resolve().parent.name == "blobs":
        return shard
    stat = os.stat(shard)
    return stat.st_dev, stat.st_ino


def on_hub(dataset_name: str, pattern: str, revision: str) -> list[str]:
    """Return URLs at one commit, so that a dataset which changes during a run does not change the run."""
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        commit = api.dataset_info(dataset_name, revision=revision or pinned_commit(dataset_name)).sha
        folder, recursive = cache.place_of(pattern)
        options = {"path_in_repo": folder or None, "recursive": recursive, "revision": commit, "repo_type": "dataset"}
        listed = [entry.path for entry in api.list_repo_tree(dataset_name, **options) if isinstance(entry, RepoFile)]
    except EntryNotFoundError:
        commit, listed = "", []
    except Exception as error:  # connection errors of the Hub's client are not OSErrors
        raise ConfigError(
            f"dataset {dataset_name!r} cannot be read from {constants.ENDPOINT}: {first_line(error)}. If it is gated or "
            "private, run: hf auth login. Without internet, download it elsewhere and set HF_HUB_OFFLINE=1 (docs/offline.md)"
        ) from None
    if not (names := sorted(path for path in listed if cache.matches(path, pattern))):
        raise ConfigError(f"no file of the dataset {dataset_name} on {constants.ENDPOINT} matches {pattern!r}")
    return [hub_url(dataset_name, name, commit) for name in names]


def shards_version(shards: Sequence[str]) -> dict[str, str]:
    """Return values that change with the shards: a checksum of file `sizes`, the Hub's `commit`; none for other URLs."""
    version = {}
    if sizes := [os.path.getsize(shard) for shard in shards if not is_remote(shard)]:
        version["sizes"] = xxhash.xxh3_128_hexdigest(json.dumps(sizes).encode())
    prefix = re.compile(re.escape(f"{constants.ENDPOINT}/datasets/") + "[^/]+/[^/]+/resolve/([^/]+)/")
    if commits := {match[1] for shard in shards if (match := prefix.match(shard))}:
        version["commit"] = ", ".join(sorted(commits))
    return version


def hub_url(dataset_name: str, name: str, revision: str) -> str:
    revision = urllib.parse.quote(revision, safe="")
    return f"{constants.ENDPOINT}/datasets/{dataset_name}/resolve/{revision}/{urllib.parse.quote(name)}"


def is_remote(shard: str) -> bool:
    return shard.startswith(("http://", "https://"))


def is_named_elsewhere(file: str) -> bool:
    """Tell whether a user names a file by a URL or on the Hub, not on this disk."""
    return is_remote(file) or file.startswith(HUB)


def fingerprint(shards: Sequence[str]) -> list:
    """Return the number of shards and a hash of their names, without folders: a run may continue with a copy of the data."""
    names = "\n".join(PurePath(shard).name for shard in shards)
    return [len(shards), xxhash.xxh64_hexdigest(names.encode())]
