"""Push of an export to a model repository on the Hub, in one commit: the repository gets the whole export, or nothing.

    python -m accelerate_recipes push EXPORT ORG/NAME

If the same command is repeated, bytes that have arrived are not sent again: huggingface_hub asks the Hub before it sends a
file (with hf_xet, a part of a file). It reads HF_ENDPOINT and the token itself. A new repository is private.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import HFValidationError, disable_progress_bars, validate_repo_id

from accelerate_recipes.disk import read_json, readable
from accelerate_recipes.errors import ConfigError, first_line, raise_problems
from accelerate_recipes.hub import cache
from accelerate_recipes.hub.download import hub_checksum, tree

# Files that `from_pretrained` reads if they are present, although no other file names them.
READ_BESIDE = {
    "adapter_config.json", "added_tokens.json", "chat_template.json", "config.json", "generation_config.json", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.json", "vocab.txt",
}  # fmt: skip
ATTRIBUTES = ".gitattributes"  # the Hub's own file in a new repository


def name_problems(repo: str) -> list[str]:
    """List what is wrong with the name of a repository, one sentence each."""
    if repo.startswith("hf_") and "/" not in repo:  # do not print it
        return ["the repository to push to looks like a token; give ORG/NAME, and the token by HF_TOKEN"]
    if repo.count("/") != 1:
        return [f"{repo!r} is no repository to push to; give ORG/NAME, or USER/NAME"]
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        return [f"{repo!r} is no repository to push to: {first_line(error)}"]
    return []


def push_problems(repo: str) -> list[str]:
    """List the reasons that prevent a push from this machine, one sentence each, without asking the Hub."""
    problems = name_problems(repo)
    if constants.HF_HUB_OFFLINE:
        remedy = "unset it, or push the export later: python -m accelerate_recipes push EXPORT ORG/NAME"
        problems.append(f"a push needs the Hub, and HF_HUB_OFFLINE is set: {remedy}")
    try:
        token = get_token() or ""
    except Exception as error:  # a login by OIDC asks a server
        return [*problems, f"a push needs a token, and the login fails: {type(error).__name__}"]
    if not token:
        problems.append("a push needs a token that may write: run `hf auth login`, or set HF_TOKEN")
    elif not token.isascii() or not token.isprintable() or " " in token:  # the error of an HTTP library would print it
        problems.append("the token holds characters that no token has; run `hf auth login` again, or set HF_TOKEN anew")
    return problems


def push(export: Path, files: Sequence[str], repo: str, *, public: bool = False) -> None:
    """Push `files`, the paths of a whole export below its folder, to the repository `repo` (ORG/NAME).

    A repository that does not exist is created, private unless `public`. In an existing repository, files of an earlier push
    are replaced, or deleted if this export lacks them. All other files stay. If one of these would be overwritten, or taken
    for a part of this model, nothing is pushed. The export is only read.

    Raises:
        ConfigError: for any problem that prevents the push, with the command that repeats it.
    """
    raise_problems(f"{export} cannot be pushed", push_problems(repo))
    token = str(get_token())
    again = shlex.join(["python", "-m", "accelerate_recipes", "push", *(["--public"] * public), str(export), repo])
    what = f"{len(files)} files, {readable(sum((export / name).stat().st_size for name in files))}"
    to = f"{constants.ENDPOINT}/{repo}"
    print(f"Pushing {export}: {what}, to {to}; after an interruption, run: {again}", flush=True)
    if not sys.stderr.isatty():  # a job's log: plain lines
        disable_progress_bars()
    try:
        message = commit(HfApi(token=token), export, files, repo, public)
    # For a failing network or server, or a lack of permission, the Hub's client raises errors without a common class.
    except Exception as error:
        reason = str(error) if isinstance(error, ConfigError) else said_by(error).replace(token, "<token>")
        message = f"{export} was not pushed: {reason}. It is whole and unchanged; to push it, run: {again}"
        raise ConfigError(message) from None
    print(message, flush=True)


def said_by(error: Exception) -> str:
    """Return the text of an error, with the message of the Hub."""
    message = error.server_message if isinstance(error, HfHubHTTPError) else None
    return f"{first_line(error)}: {message}" if message else first_line(error)


def commit(api: HfApi, export: Path, files: Sequence[str], repo: str, public: bool) -> str:
    """Make the commit; return a text that says what was done. See `push`."""
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, repo_type="model", private=not public)
        info = api.model_info(repo)
    if not info.private and not public:
        raise ConfigError(f"everybody can read {repo}; add --public to push there, or give another repository")
    there = tree(api, "model", repo, info.sha)
    earlier = pushed_files(api, repo, info.sha) if cache.MANIFEST in there else set()
    foreign = set(there) - earlier - {ATTRIBUTES}
    sums = {name: there[name]["checksum"] for name in foreign}
    in_the_way = {name for name in foreign & set(files) if hub_checksum(export / name, sums[name]) != sums[name]}
    if in_the_way := sorted(in_the_way | {name for name in foreign - set(files) if is_of_a_model(name)}):
        remedy = "delete that there, or give another repository"
        raise ConfigError(f"{repo} holds {', '.join(in_the_way)}, which no push of an export wrote; {remedy}")
    stale = sorted((earlier & set(there)) - set(files) - {ATTRIBUTES})
    about = {"repo_id": repo, "folder_path": export, "commit_message": "Push an export of accelerate-recipes"}
    # With the parent, nothing is pushed if somebody else has pushed since.
    made = api.upload_folder(**about, allow_patterns=[*files], delete_patterns=stale, parent_commit=info.sha)
    now = tree(api, "model", repo, made.oid)
    if lost := [name for name in files if name not in now or now[name]["size"] != (export / name).stat().st_size]:
        raise ConfigError(f"{', '.join(lost)} did not arrive; a .gitignore there may name them")
    who = "everybody can read it" if public and not info.private else "it is private"
    if made.oid == info.sha:
        return f"{constants.ENDPOINT}/{repo} holds this export already, at commit {made.oid[:12]}; {who}"
    replaced = f", without {len(stale)} files of the earlier one" if stale else ""
    return f"{constants.ENDPOINT}/{repo} holds the export at commit {made.oid[:12]}{replaced}; {who}"


def pushed_files(api: HfApi, repo: str, revision: str | None) -> set[str]:
    """List the files that an earlier push wrote into a repository; empty if its list cannot be understood."""
    with TemporaryDirectory() as folder:
        file = api.hf_hub_download(repo, cache.MANIFEST, revision=revision, cache_dir=folder)
        try:
            return set(read_json(Path(file))["files"])
        except (ValueError, KeyError, TypeError):
            return set()


def is_of_a_model(name: str) -> bool:
    """Tell whether `from_pretrained` could take a file for a part of the pushed model or its tokenizer."""
    if "/" in name:
        return name.startswith("additional_chat_templates/")
    return name.endswith((".safetensors", ".bin", ".index.json", ".jinja", ".model")) or name in READ_BESIDE
