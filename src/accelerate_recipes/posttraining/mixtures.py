"""Mixtures for supervised fine-tuning: each source is prepared by itself, as in a run on it alone."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.data.files import text_hash
from accelerate_recipes.data.heldout import MOST_REPEATED, beginning, repeated
from accelerate_recipes.data.mixed_rows import MixedTable, MixtureLoader, MixtureOrder
from accelerate_recipes.data.rows import RowLoader, StepLoader
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.disk import read_json
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.losses import means_of_sources, sums_by_source
from accelerate_recipes.posttraining.supervised import SupervisedRows, columns_said, prepare_supervised
from accelerate_recipes.posttraining.supervised_loss import inputs_of
from accelerate_recipes.posttraining.trained_rows import FirstRows, remedy_of_date
from accelerate_recipes.ranks import on_first_rank, sum_over_ranks
from accelerate_recipes.run import Run

READ = ("input_ids", "labels", "seq_lengths")  # columns that are trained


def with_sources(
    collate: Callable[[list], dict[str, Any]],
    source_of: Callable[[np.ndarray], np.ndarray],
    rows: list[tuple[int, dict]],
) -> dict[str, Any]:
    """Return what `collate` makes of numbered rows, and the source of each token, (B, T), as `source`."""
    batch = collate(rows)
    # A place without a row, number -1, has no targets: its source does not matter.
    sources = source_of(np.array([number for number, _ in rows])).astype(np.int16)
    size, length = batch["input_ids"].shape
    if size == len(rows):
        lengths = [length] * size
    else:  # rows behind each other in one, with padding behind the last
        lengths = [len(row["input_ids"]) for _, row in rows]
        lengths[-1] += length - sum(lengths)
    tokens = np.repeat(sources, lengths).reshape(size, length)
    return batch | {"source": torch.from_numpy(tokens)}


@dataclass(kw_only=True)
class MixedSupervisedRows(SupervisedRows):
    """Rows of all sources as the model reads them. `parts` are those of each source alone, in the order of `table`."""

    parts: Mapping[str, SupervisedRows]
    table: MixedTable

    @property
    def first(self) -> dict[str, HasRows]:
        """First rows of both sides of each source."""
        sides = {"Training": "train", "Evaluation": "heldout"}
        return {
            f"{heading}, {name}": FirstRows(self.run, getattr(part, side), self.collate)
            for name, part in self.parts.items()
            for heading, side in sides.items()
        }

    @property
    def items(self) -> Any:
        # A row of one of many tables is found faster than in a table of tables.
        columns = self.train.column_names
        return ConcatDataset([part.train.select_columns(columns) for part in self.parts.values()])

    @property
    def visits(self) -> np.ndarray:
        """Number of times that each row is trained in the whole run, on average over the rows of its source."""
        asked = self.table.shares.asked(self.table.num_steps() * self.run.args.total_batch_size)
        return np.repeat(asked / self.table.sizes, self.table.sizes)

    def num_steps(self) -> int:
        return self.table.num_steps()

    def seen(self, step: int) -> dict[str, float]:
        return self.table.seen(step)

    def make_loader(self, **settings: Any) -> StepLoader:
        order = partial(MixtureOrder, self.table, settings.pop("lengths"))
        loader: Any = super().make_loader(order_class=order, loader_class=MixtureLoader, **settings)
        loader.collate_fn = partial(with_sources, loader.collate_fn, self.table.source_of)
        loader.table = self.table
        return loader

    def make_heldout_loader(self, num_workers: int = 0) -> RowLoader:
        ends = np.cumsum([len(part.heldout) for part in self.parts.values()])  # pyright: ignore
        loader: Any = super().make_heldout_loader(num_workers)
        source_of = partial(np.searchsorted, ends, side="right")
        loader.collate_fn = partial(with_sources, loader.collate_fn, source_of)
        return loader


def prepare_sources(
    run: Run[Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: set[int]
) -> MixedSupervisedRows:
    """Prepare the rows of each source of --mixture as `prepare_supervised` does, and put them behind each other.

    Raises:
        ConfigError: as `prepare_supervised`, with the name of the source; for held-out rows of a source that are trained in
            another; and if a resumed run has other sources than its checkpoint.
        DataError: as `prepare_supervised`.
    """
    args, mixture = run.args, run.args.read
    parts: dict[str, SupervisedRows] = {}
    for source, alone in zip(mixture.sources, args.alone, strict=True):
        of_source = copy.copy(run)
        of_source.args = alone
        try:
            parts[source.name] = prepare_supervised(of_source, model, tokenizer, base_stops)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{mixture.file}, source {source.name}: {error}") from error
    check_sources_apart(run, parts)
    states = read_json(run.resumed_from / "data.json") if run.resumed_from else []
    begun_at = step_of(run.resumed_from) if run.resumed_from else 0
    table = MixedTable(
        args,
        mixture,
        [len(part.train) for part in parts.values()],
        [part.content for part in parts.values()],
        states[0].get("weights", ()) if states else (),
        begun_at,
    )
    first, *_ = parts.values()
    table.check(states, remedy_of_date(run))
    tell_of_sources(run, parts, table)
    sides = {
        side: datasets.concatenate_datasets([getattr(part, name).select_columns(columns) for part in parts.values()])
        for side, name in (("train", "train"), ("test", "heldout"))
        if (columns := [column for column in getattr(first, name).column_names if column in READ])
    }
    counts = [part.counts for part in parts.values()]
    summed = {name: sum(count[name] for count in counts) for name in counts[0] if name != "longest"}
    longest = {"longest": max(count["longest"] for count in counts)}
    return MixedSupervisedRows(
        run,
        sides["train"],
        sides["test"],
        first.collate,
        table.state()["content"],
        sides={side: range(sum(part.num_read[side] for part in parts.values())) for side in sides},
        num_targets=np.concatenate([part.num_targets for part in parts.values()]),
        counts=summed | longest,
        parts=parts,
        table=table,
    )


def check_sources_apart(run: Run[Any], parts: Mapping[str, SupervisedRows]) -> None:
    """Count the held-out rows of each source that begin as rows to train on of another do, and print the numbers.

    Where all sources hold out the same share by the hash of the beginning, there are none.

    Raises:
        ConfigError: if there are too many.
    """
    alone = run.args.alone
    if not any(args.eval_files for args in alone) and len({args.heldout_share for args in alone}) == 1:
        return

    def begin(name: str, side: str) -> list[int]:
        rows: Any = parts[name].sides[side]
        asked, *_ = columns_said(run.args, rows.features)
        return [text_hash(beginning(row, asked)) for row in rows.select_columns([asked])]

    def found() -> list[str]:
        trained, evaluated = ({name: begin(name, side) for name in parts} for side in ("train", "test"))
        told = []
        for name, other in itertools.permutations(parts, 2):
            both, number = repeated(trained[other], evaluated[name]), len(evaluated[name])
            said = f"{len(both):,} of {number:,} held-out rows of {name} begin as rows to train on of {other} do"
            if len(both) > MOST_REPEATED * number:
                raise ConfigError(
                    f"{run.args.read.file}: {said}; remove them from one side (at most {MOST_REPEATED:.0%} may lie on both)"
                )
            told += [said] if both else []
        return told

    for said in on_first_rank(found):
        run.print(said)


def tell_of_sources(run: Run[Any], parts: Mapping[str, SupervisedRows], table: MixedTable) -> None:
    """Print what each source has, and what the whole run takes of it."""
    steps = table.num_steps()
    seen = table.seen(steps)
    for name, part in parts.items():
        read = part.num_read
        run.print(
            f"Source {name}: {read['train']:,} rows to train on, {read['test']:,} held out; {len(part.train):,} sequences: "
            f"{seen[f'{name}_share']:.2%} of the run's, {seen[f'{name}_epochs']:.3g} epochs in {steps:,} steps"
        )
    if said := table.changed():
        run.print(said)


@torch.no_grad()
def evaluate_sources(run: Run[Any], batches: RowLoader, names: Sequence[str]) -> dict[str, float]:
    """Compute the mean loss over all targets, in nats per token, and over those of each source.

    Raises:
        Stopped: between two batches.
        DataError: if there is no target at all.
    """
    sums = torch.zeros(2 * len(names), device=run.accelerator.device, dtype=torch.float64)
    for batch in batches_to_evaluate(run.accelerator, run.model, batches):
        sums += sums_by_source(batch, -run.model(**inputs_of(batch)).log_probs, len(names))
    values = sum_over_ranks(sums).tolist()
    losses, targets = values[: len(names)], values[len(names) :]
    if not sum(targets):
        raise DataError("no row to evaluate on has a target of the loss; give others, or hold out a larger share")
    means = {name: value for name, value in means_of_sources(names, values).items() if name.endswith("_loss")}
    return {"loss": sum(losses) / sum(targets)} | means
