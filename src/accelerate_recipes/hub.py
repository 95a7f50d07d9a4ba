"""Whether the models and datasets of a run are here or can be fetched; and how to fetch them."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from transformers import AutoConfig, AutoTokenizer


def model_problem(name: str) -> str | None:
    """Why the model cannot be had, with the remedy; None if it is a folder, in the cache, or on the Hub."""
    return problem("model", name, AutoConfig.from_pretrained, "")


def tokenizer_problem(name: str) -> str | None:
    """The same for a tokenizer alone, whose model is not needed."""
    return problem("tokenizer", name, AutoTokenizer.from_pretrained, " --include 'token*' --include 'config.json'")


def problem(kind: str, name: str, load: Callable[[str], object], files: str) -> str | None:
    try:
        load(name)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            return f"{name} is a folder, but holds no {kind}: {first_sentence(error)}"
        return (
            f"{kind} {name!r} is no folder, not in the local cache, and {unreachable()}; "
            f"where there is internet, run: hf download {name}{files}"
        )
    return None


def dataset_problem(name: str, files: str) -> str | None:
    """The same for the files of a dataset that match the pattern `files`."""
    try:
        if any(Path(snapshot_download(name, repo_type="dataset", local_files_only=True)).glob(files)):
            return None
    except OSError:
        pass
    try:
        HfApi().dataset_info(name)
    except Exception:  # a connection that fails is no OSError with every version of the Hub's client
        return (
            f"dataset {name!r} ({files}) is not in the local cache, and {unreachable()}; "
            f"where there is internet, run: hf download --repo-type dataset {name} --include '{files}'"
        )
    return None


def unreachable() -> str:
    return "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the Hub does not have it or cannot be reached"


def first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".:")
