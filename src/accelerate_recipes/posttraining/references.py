"""Log-probabilities of a DPO run's reference: computed once for all pairs, and kept beside the rows on every machine."""

import contextlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader
from tqdm import tqdm

from accelerate_recipes.data.prepared import content_of
from accelerate_recipes.disk import own_suffix, read_json, write_atomically
from accelerate_recipes.life import stop
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.pretrained import model_checksum
from accelerate_recipes.ranks import is_first, is_first_of_machine, on_all_ranks, on_first_rank
from accelerate_recipes.run import Run

REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")  # columns that the loss reads
READ = ("prompt_ids", "chosen_ids", "rejected_ids")  # columns that the reference reads


def with_reference(
    run: Run[Any], loss: Any, rows: datasets.Dataset, collate: Callable, batch_size: int
) -> datasets.Dataset:
    """Add the columns REFERENCE to all pairs, from the file beside the rows, or computed by the run's sharded model.

    All ranks take the same values: those of the first rank whose machine has the file, else all compute together. Then each
    machine has the file.

    Raises:
        Stopped: between two batches.
    """
    content = content_of(rows, READ)
    key = on_first_rank(lambda: xxhash.xxh3_128_hexdigest(repr((content, what_decides(run, loss.args))).encode()))
    folder = Path(rows.cache_files[0]["filename"]).parent if rows.cache_files else None  # none: rows in memory
    file = folder / f"reference-{key}.json" if folder else None
    values = kept_values(file, len(rows)) if file else None
    is_here = on_all_ranks(values is not None)
    if any(is_here):
        found = [values]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=is_here.index(True))
        known: Any = found[0]
    else:
        known = compute(run, loss, rows, collate, batch_size)
    if file and values is None and is_first_of_machine():
        keep_values(file, known)
    features = datasets.Features(dict.fromkeys(REFERENCE, datasets.Value("float32")))
    columns = datasets.Dataset.from_dict(dict(zip(REFERENCE, known, strict=True)), features)
    return datasets.concatenate_datasets([rows, columns], axis=1)


def what_decides(run: Run[Any], args: Any) -> list:
    """List what decides the values besides the tokens of the pairs.

    The division into batches is none of it: it changes last bits, and a run goes on with the same values on any number of
    ranks.
    """
    settings = load_settings(args)
    quantization = settings.get("quantization_config")
    return [
        model_checksum(args.base_model or ""),
        str(settings["dtype"]),
        quantization and quantization.to_dict(),
        run.accelerator.mixed_precision,
        run.accelerator.device.type,
        run.accelerator.unwrap_model(run.model).config._attn_implementation,
        args.max_length,
        args.truncation_mode,
        args.ld_alpha,
        *(metadata.version(name) for name in ("torch", "transformers", "trl")),
    ]


def kept_values(file: Path, number: int) -> list[list[float]] | None:
    """Read the values of `number` pairs; None if the file is not here, or is not whole."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        values = read_json(file)
        return values if [len(column) for column in values] == [number] * len(REFERENCE) else None
    return None


def keep_values(file: Path, values: list[list[float]]) -> None:
    """Write the values for later runs; say so if the folder cannot be written to, as one that others prepared."""
    try:
        write_atomically(file, json.dumps(values), own_suffix())
    except OSError as error:
        print(f"The reference's values are not kept, so that a later run computes them again: {error}", flush=True)


def compute(run: Run[Any], loss: Any, rows: datasets.Dataset, collate: Callable, batch_size: int) -> list[list[float]]:
    """Compute the values of all pairs, on all ranks together: those of the chosen and those of the rejected answers."""
    accelerator, args = run.accelerator, run.args
    loader = DataLoader(
        rows,  # pyright: ignore[reportArgumentType]
        batch_size=batch_size,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    found, batches = [], accelerator.prepare(loader)
    for batch in tqdm(batches, desc="Log-probabilities of the reference", disable=None if is_first() else True):
        stop.raise_if_requested(accelerator)
        values = torch.stack(loss.compute_ref_log_probs(run.model, batch), 1)
        found.append(accelerator.gather_for_metrics(values).float().cpu())
    return torch.cat(found).T.tolist()
