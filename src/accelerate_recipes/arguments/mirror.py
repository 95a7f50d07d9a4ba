"""Arguments of a mirror: a second place for the checkpoints of a run; see `checkpoint.store`."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.registry import known_implementations, registry

# Arguments that may differ where a run with an empty output directory takes the place of an earlier one for its own.
OF_PLACE_AND_SPEED = {
    "output_dir", "mirror", "mirror_bandwidth", "data_cache_dir", "dataset_num_proc", "dataloader_num_workers",
    "per_device_train_batch_size", "per_device_eval_batch_size", "prefetch_layers", "checkpoint_every_n_layers",
    "activation_memory_budget", "async_save", "ddp_timeout", "step_timeout", "report_to", "profile_steps", "profile_ranks",
    "attn_implementation", "logging_steps", "save_steps", "save_minutes", "push_to_hub", "verify_replicas",
    "resume_from_checkpoint",
}  # fmt: skip


def mirror_problems(args: Any) -> Iterator[str]:
    """List problems of the arguments of a mirror, one sentence each."""
    if args.mirror_bandwidth and not args.mirror:
        yield "--mirror_bandwidth has no effect without --mirror; add that, or remove it"
    if args.resume_from_checkpoint == "mirror" and not args.mirror:
        yield "--resume_from_checkpoint mirror has no effect without --mirror; add that, or give `latest`"
    if args.mirror:
        yield from (f"--mirror: {problem}" for problem in url_problems(args.mirror))
        path = args.mirror.removeprefix("file://")
        here, there = os.path.realpath(args.output_dir), os.path.realpath(path)
        if "://" not in path and os.path.commonpath([here, there]) in (here, there):
            yield f"--mirror {args.mirror} and --output_dir {args.output_dir}: neither may contain the other"


def url_problems(url: str) -> list[str]:
    """List why a place cannot hold copies, one sentence each. What may be a password is not repeated."""
    if "://" not in url:
        return []
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return [f"not a URL: {error}"]
    if parts.scheme == "hf" and parts.netloc != "buckets":
        return ["a repository of models cannot hold checkpoints; give hf://buckets/ORG/NAME/FOLDER"]
    if "@" in parts.netloc or parts.query or parts.fragment or "::" in url:
        return [
            f"a URL of {parts.scheme}:// with a user, a query or a chain; give PLACE/FOLDER alone, and credentials as the "
            "store's own tools read them: from the environment, or from their files"
        ]
    module = known_implementations.get(parts.scheme, {"class": ""})["class"].split(".")[0]
    if not module and parts.scheme not in registry:
        return [f"fsspec knows no {parts.scheme}://; give s3://, gs://, az://, hf://buckets/..., or a folder"]
    if module and find_spec(module) is None:
        pin = f"=={fsspec.__version__}" if module in ("s3fs", "gcsfs") else ""  # which appear with each fsspec
        return [f"{parts.scheme}:// needs {module}, which is not installed; run: pip install {module}{pin}"]
    return []
