"""Commands that download the models and datasets of a run, where there is internet, and that check and list downloads.

    python -m accelerate_recipes download RECIPE ARGS...
    python -m accelerate_recipes verify
    python -m accelerate_recipes list

huggingface_hub transfers several files at a time. A file gets its name only when it is complete. So the same command
continues after a kill; unfinished files start again. huggingface_hub reads HF_HOME, HF_ENDPOINT and the token itself.
"""

import glob
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from accelerate_recipes.disk import existing, own_suffix, readable, write_atomically
from accelerate_recipes.errors import ConfigError, collecting_errors, first_few, first_line, near_path, raise_problems
from accelerate_recipes.hub import cache

# Files that from_pretrained reads besides weights. *.bin, *.h5, *.msgpack and consolidated.* hold the same weights again.
MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "additional_chat_templates/*")


def to_fetch(plan: dict) -> dict[str, dict]:
    """Return the files of a manifest whose contents the cache does not hold, at any commit."""
    blobs = cache.repository(plan["type"], plan["name"]) / "blobs"  # named by checksums
    sizes = {file: cache.size_of(blobs / entry["checksum"].partition(":")[2]) for file, entry in plan["files"].items()}
    return {file: entry for file, entry in plan["files"].items() if sizes[file] != entry["size"]}


def download(
    needs: Sequence[cache.Need], command: Sequence[str], *, max_shards: int | None = None, update: bool = False
) -> None:
    """Download everything in `needs`; the manifests record `command`, a recipe and its arguments.

    `max_shards` limits the files that match a pattern. A repository stays at the commit of its first download, unless
    `update` is given.

    Raises:
        ConfigError: with all needs that are not available, for too little space, and for a failed transfer.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set: unset it, or download on a machine that has internet")
    if not sys.stderr.isatty():  # a job's log: plain lines
        disable_progress_bars()
    line = shlex.join([*([] if max_shards is None else ["--max_shards", str(max_shards)]), *command])
    plans: dict[tuple[str, str], dict] = {}  # manifests of these needs alone
    problems: list[str] = []
    for need in needs:
        with collecting_errors(problems):
            add_to(plans, need, max_shards, update)
    raise_problems("This cannot be downloaded", problems)
    check_download_fits(list(plans.values()))
    for plan in plans.values():
        lacking = total(to_fetch(plan))
        rest = f"{readable(lacking)} to fetch" if lacking else "all here"
        files = f"{len(plan['files'])} files, {readable(total(plan['files']))}, {rest}"
        print(f"{plan['type']} {plan['name']} at commit {plan['revision'][:12]}: {files}", flush=True)
    for plan in plans.values():
        write_manifest(plan, line)
        transfer(plan)


def add_to(plans: dict[tuple[str, str], dict], need: cache.Need, max_shards: int | None, update: bool) -> None:
    """Add the files of a need to the plan of its repository. Raises ConfigError."""
    if os.path.isdir(need.name):
        return
    if cache.is_path(need.name):
        raise ConfigError(f"{need}: no such folder{near_path(need.name)}")
    api, key, where = HfApi(), (need.repo_type, need.name), constants.ENDPOINT
    try:
        plan = plans.get(key)
        if plan is None:
            manifest = None if update else cache.read_manifest(*key)
            commit = manifest["revision"] if manifest and manifest["branch"] == need.branch else need.branch
            info = api.repo_info(need.name, repo_type=need.repo_type, revision=commit)
            if info.gated:
                api.auth_check(need.name, repo_type=need.repo_type)
            plan = {
                "name": need.name, "type": need.repo_type, "branch": need.branch, "revision": info.sha,
                "files": {}, "asked": {}, "configs": {},
            }  # fmt: skip
        if need.branch != plan["branch"]:
            raise ConfigError(f"{need} is wanted at {plan['branch']} and at {need.branch}; the cache keeps one of them")
        if isinstance(need, cache.HubModel):
            chosen = files_of_model(plan, tree(api, *key, plan["revision"]), need.weights)
        elif need.files:
            listed = tree(api, *key, plan["revision"], *cache.place_of(need.files))
            chosen = {file: listed[file] for file in sorted(listed) if cache.matches(file, need.files)}
            if not chosen:
                raise ConfigError(f"{need} has no file that matches; there are {first_few(listed)}")
            chosen = dict(list(chosen.items())[:max_shards])
        else:
            chosen = files_of_config(api, plan, need)
    except GatedRepoError:
        page = f"{where}/{'datasets/' * (need.repo_type == 'dataset')}{need.name}"
        remedy = "then run `hf auth login` with a token of that account, or set HF_TOKEN"
        raise ConfigError(f"{need} is gated: accept its terms at {page}, {remedy}") from None
    except RepositoryNotFoundError:
        remedy = "check its name, or run `hf auth login`"
        raise ConfigError(f"{need} is not on {where}, or is private; {remedy}") from None
    except ConfigError:
        raise
    # For a failing network or server, the Hub's client and datasets raise errors without a common class.
    except Exception as error:
        remedy = "without internet, download it elsewhere (docs/offline.md), or give a folder"
        raise ConfigError(f"{need} cannot be downloaded from {where}: {first_line(error)}; {remedy}") from None
    plan["files"] |= chosen
    plan["asked"][need.key] = list(chosen)
    plans[key] = plan


def tree(
    api: HfApi, repo_type: str, name: str, revision: str | None, inside: str = "", recursive: bool = True
) -> dict[str, dict]:
    """Return size and checksum of each file of a repository, or of a folder in it."""
    entries = api.list_repo_tree(name, inside or None, recursive=recursive, revision=revision, repo_type=repo_type)
    files = {}
    for file in (entry for entry in entries if isinstance(entry, RepoFile)):
        checksum = f"sha256:{file.lfs.sha256}" if file.lfs else f"git-sha1:{file.blob_id}"
        files[file.path] = {"size": file.size, "checksum": checksum}
    return files


def files_of_model(plan: dict, listed: dict[str, dict], weights: bool) -> dict[str, dict]:
    names = [name for name in listed for pattern in MODEL_FILES if cache.matches(name, pattern)]
    names = [name for name in names if not name.endswith(".index.json")]
    if weights:
        weight_file = next((name for name in cache.WEIGHT_FILES if name in listed), None)
        if weight_file is None:
            raise ConfigError(f"model {plan['name']!r} has no weights for PyTorch; it has {first_few(listed)}")
        names.append(weight_file)
        if weight_file.endswith(".index.json"):
            names += cache.shards_of(Path(hf_hub_download(plan["name"], weight_file, revision=plan["revision"])))
    return {name: listed[name] for name in names}


def files_of_config(api: HfApi, plan: dict, need: cache.HubDataset) -> dict[str, dict]:
    """List the files of a configuration as `datasets` finds them; record in the plan how `datasets` would read them."""
    import datasets

    # `wmt14` has become `wmt/wmt14`; only the Hub's client knows the old name, datasets does not.
    full_name = api.dataset_info(need.name, revision=plan["revision"]).id
    try:
        builder = datasets.load_dataset_builder(full_name, need.config or None, revision=plan["revision"])
    except ValueError as error:  # it names the existing configurations
        raise ConfigError(f"{need}: {first_line(error)}") from None
    prefix = f"hf://datasets/{full_name}@{plan['revision']}/"
    data_files = builder.config.data_files.items()
    splits = {str(split): [file.removeprefix(prefix) for file in files] for split, files in data_files}
    if unknown := sorted(set(need.split_names) - set(splits)):
        raise ConfigError(f"{need} has no split {', '.join(unknown)}; it has {', '.join(splits)}")
    kind = type(builder).__module__.rpartition(".")[2]
    plan["configs"][need.config] = {"builder": kind, "options": cache.options_of(builder.config), "splits": splits}
    listed = tree(api, need.repo_type, need.name, plan["revision"])
    names = [file for name in need.split_names or splits for file in splits[name]]
    return {name: listed[name] for name in names}


def check_download_fits(plans: Sequence[dict]) -> None:
    """Check that the disk has room. Raises ConfigError."""
    needed = sum(total(to_fetch(plan)) for plan in plans)
    folder = existing(Path(constants.HF_HUB_CACHE))
    free = shutil.disk_usage(folder).free
    if needed > free:
        remedy = "make room, or set HF_HOME to a folder on another disk"
        raise ConfigError(f"{readable(needed)} are to be fetched, but {folder} has {readable(free)} free; {remedy}")


def write_manifest(plan: dict, recipe: str) -> None:
    """Write the manifest before the files, so that it shows the missing files of a killed download.

    Earlier downloads stay in it. A repeated request, such as a pattern with another `max_shards`, replaces the earlier one.
    """
    manifest = cache.read_manifest(plan["type"], plan["name"])
    if manifest is None or any(manifest[name] != plan[name] for name in ("branch", "revision")):
        manifest = plan | {"files": {}, "asked": {}, "configs": {}}
    asked = manifest["asked"]
    for key, files in plan["asked"].items():
        before = asked[key]["recipes"] if key in asked and asked[key]["files"] == files else []
        asked[key] = {"files": files, "recipes": [*(line for line in before if line != recipe), recipe]}
    files = manifest["files"] | plan["files"]
    manifest["files"] = {file: files[file] for entry in asked.values() for file in entry["files"]}
    manifest["configs"] |= plan["configs"]
    folder = cache.repository(plan["type"], plan["name"])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / cache.MANIFEST, json.dumps(manifest, indent=1), own_suffix())


def transfer(plan: dict) -> None:
    """Download the files. Raises ConfigError."""
    repo_type, name, patterns = plan["type"], plan["name"], [glob.escape(file) for file in plan["files"]]
    try:
        snapshot_download(name, repo_type=repo_type, revision=plan["revision"], allow_patterns=patterns)
    except Exception as error:  # network and disk raise errors of many classes
        kept = "What was fetched is kept: the same command goes on"
        raise ConfigError(f"{repo_type} {name}: {first_line(error)}. {kept}") from error
    if lost := cache.absent(plan, list(plan["files"])):
        raise ConfigError(f"{repo_type} {name}: {', '.join(lost)} did not arrive; run the same command again")
    # huggingface_hub 2.4 does not continue the files of a killed download. A running download writes to its files often.
    for rest in (cache.repository(repo_type, name) / "blobs").glob("*.incomplete"):
        if time.time() - rest.stat().st_mtime > 3600:
            rest.unlink(missing_ok=True)


def verify() -> str:
    """Read every downloaded file, and compare it with the Hub's checksum; return a text that says what was verified.

    Raises:
        ConfigError: names the missing and changed files, and the remedy.
    """
    files = [(manifest, name) for manifest in cache.manifests() for name in sorted(manifest["files"])]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing does not hold the interpreter's lock
        problems = [problem for problem in threads.map(lambda one: file_problem(*one), files) if problem]
    raise_problems(f"In {constants.HF_HUB_CACHE}", problems)
    size = sum(manifest["files"][name]["size"] for manifest, name in files)
    return f"{len(files)} files, {readable(size)}, in {constants.HF_HUB_CACHE}: complete and unchanged"


def file_problem(manifest: dict, name: str) -> str | None:
    """Return why a downloaded file is not as the Hub has it, with the command that replaces it; None if it is."""
    path, wanted = cache.snapshot(manifest) / name, manifest["files"][name]["checksum"]
    what = f"{manifest['type']} {manifest['name']}: {name}"
    asked = next(entry for entry in manifest["asked"].values() if name in entry["files"])
    again = f"python -m accelerate_recipes download {asked['recipes'][-1]}"
    if not path.is_file():
        return f"{what} is missing; run: {again}"
    actual = hub_checksum(path, wanted)
    if actual == wanted:
        return None
    remove = f"rm {shlex.quote(os.path.realpath(path))}"
    return f"{what} is damaged: its checksum is {actual} instead of {wanted}; run: {remove} && {again}"


def hub_checksum(file: Path, expected: str) -> str:
    """Compute a checksum of the kind that is `expected`: sha256 of a large file, git-sha1 of a small one."""
    if expected.startswith("git-sha1:"):
        return f"git-sha1:{git_hash(file.read_bytes())}"
    with file.open("rb") as data:
        return f"sha256:{sha_fileobj(data).hex()}"


def listing() -> str:
    """Return a paragraph for each downloaded repository: size, commit, missing files, and the recipes that need it."""
    paragraphs = []
    for manifest in cache.manifests():
        lacking = cache.absent(manifest, list(manifest["files"]))
        state = f"lacks {', '.join(lacking)}" if lacking else "complete"
        name = f"{manifest['type']} {manifest['name']}  commit {manifest['revision'][:12]}"
        line = f"{name}  {len(manifest['files'])} files, {readable(total(manifest['files']))}  {state}"
        recipes = {recipe: None for entry in manifest["asked"].values() for recipe in entry["recipes"]}
        paragraphs.append("\n    for ".join([line, *recipes]))
    return "\n".join(paragraphs) or f"nothing was downloaded to {constants.HF_HUB_CACHE}"


def total(files: dict[str, dict]) -> int:
    """Return the size of all files, in bytes."""
    return sum(entry["size"] for entry in files.values())
