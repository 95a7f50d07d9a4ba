"""The file that a run leaves which a step has ended."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_recipes.checkpoint.files import saved_checkpoints, step_of
from accelerate_recipes.errors import NonFiniteError
from accelerate_recipes.life.spikes import wrong_step
from accelerate_recipes.ranks import is_first


def dump_non_finite(
    output_dir: Path, step: int, batches: Sequence[dict[str, Any]], error: NonFiniteError, newest: Path | None
) -> tuple[Path, Path | None]:
    """Describe the step after `step`, which ended the run, in non_finite.json.

    Returns:
        The file, and the last good checkpoint. A checkpoint is not good if its weights give no micro-batch a finite loss.
    """
    record = wrong_step(step + 1, str(error), batches, error.micro_losses)
    losses = [float(entry["loss_sum"]) for rank in record["micro_batches_of_ranks"] for entry in rank]
    if newest and step_of(newest) == step and not any(map(math.isfinite, losses)):
        newest = next((path for path in reversed(saved_checkpoints(output_dir)) if step_of(path) < step), None)
    file = output_dir / "non_finite.json"
    if is_first():
        record |= {"last_good_step": step, "checkpoint": str(newest or "")}
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file, newest
