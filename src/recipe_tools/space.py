"""Disk space that a run will need."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint import files
from accelerate_recipes.disk import existing, readable
from accelerate_recipes.hub import cache
from accelerate_recipes.models.base import is_decoder, open_base
from accelerate_recipes.optim import checkpoint_bytes, trained_by_muon


def space_needed(
    args: TrainArgs, num_parameters: int, trained: int, state_dict_type: str | None, rest: int = 0, by_muon: int = 0
) -> tuple[int, str]:
    """Compute the bytes that future checkpoints and the export add to the output directory, and describe the count.

    A checkpoint holds the `trained` parameters (`by_muon` counts those with one moment); so does the export, unless
    adapters are merged. The export also contains `rest` bytes of untrained parts of its base.

    If the number of steps is not known, this is a lower bound.
    """
    present = files.complete_checkpoints(Path(args.output_dir))
    # The size of a real checkpoint is better than a computed one.
    size = files.total_size(present[-1]) if present else checkpoint_bytes(args, trained, state_dict_type, by_muon)
    saves = math.ceil(args.max_steps / args.save_steps) if args.max_steps > 0 and args.save_steps else 1
    at_once = saves
    if args.save_total_limit:
        kept = args.max_steps // args.keep_every_n_steps if args.max_steps > 0 and args.keep_every_n_steps else 0
        # An old checkpoint is removed only when the new one is complete, and when the mirror has read it.
        more = bool(args.metric_for_best_model) + bool(args.mirror) + 1
        at_once = min(saves, args.save_total_limit + more + kept)
    coming = max(0, at_once - len(present))
    export = (num_parameters if args.merge_adapter else trained) * args.param_dtype.itemsize + rest
    return coming * size + export, f"{coming} checkpoints of {readable(size)} and the export of {readable(export)}"


def bytes_of_rest(args: TrainArgs, models: Sequence[PreTrainedModel]) -> int:
    """Count the bytes that the export copies from the base's files (0 if they are absent); `models` begins with the base."""
    name = args.base_model
    is_left_out = args.text_only_export or (args.use_peft and not args.merge_adapter)
    if is_left_out or not name or not models or not is_decoder(models[0]) or cache.lacking(cache.HubModel(name)):
        return 0
    rest = open_base(models[0], name, cache.pinned(name).get("revision")).rest
    return sum(tensor.nbytes for tensor in rest.values())


def space_problems(
    args: TrainArgs, models: Sequence[PreTrainedModel], state_dict_type: str | None, *, is_here: bool
) -> tuple[str, list[str]]:
    """Return a line with the space that a run needs; if the disk `is_here`, also list the problem if space is lacking."""
    output_dir = Path(args.output_dir)
    num_parameters = sum(model.num_parameters() for model in models)
    trained = sum(model.num_parameters(only_trainable=True) for model in models)
    by_muon = sum(p.numel() for model in models for p in {*trained_by_muon(model, args).values()})
    needs, counted = space_needed(args, num_parameters, trained, state_dict_type, bytes_of_rest(args, models), by_muon)
    needed_space = f"{output_dir} needs {readable(needs)} for {counted}"
    of_adapters = f", of which {trained:,} are trained" if trained < num_parameters else ""
    line = f"Parameters: {num_parameters:,}{of_adapters}; {needed_space}"
    if not is_here:
        return line, []
    # Unfinished files there are removed before the run writes anything.
    unfinished = (file for folder in files.leftovers(output_dir) for file in folder.rglob("*"))
    free = shutil.disk_usage(existing(output_dir)).free + sum(f.stat().st_size for f in unfinished if f.is_file())
    remedy = "make room, lower --save_total_limit, or give another"
    found = [f"--output_dir {needed_space}, but has {readable(free)} free; {remedy}"] if needs > free else []
    return f"{line}; {readable(free)} are free", found
