"""Sources of supervised fine-tuning: each is prepared by itself, as in a run on it alone."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.conversations.supervised import SupervisedRows, columns_said, prepare_supervised
from accelerate_recipes.conversations.trained_rows import FirstRows, remedy_of_date
from accelerate_recipes.data.files import text_hash
from accelerate_recipes.data.heldout import MOST_REPEATED, beginning, repeated
from accelerate_recipes.data.mixed_rows import SourceOrder, SourceTable
from accelerate_recipes.data.mixture import titled
from accelerate_recipes.data.rows import RowLoader, StepLoader
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.disk import read_json
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.run import Run


def with_sources(
    collate: Callable[[list], dict[str, Any]], ends: np.ndarray, rows: list[tuple[int, dict]]
) -> dict[str, Any]:
    """Return what `collate` makes of numbered rows, and the source of each token, (B, T), as `source`.

    `ends` are the numbers behind the last row of each source.
    """
    batch = collate(rows)
    # A place without a row, number -1, has no targets: its source does not matter.
    sources = np.searchsorted(ends, [number for number, _ in rows], side="right").astype(np.int16)
    size, length = batch["input_ids"].shape
    behind = np.cumsum([len(row["input_ids"]) for _, row in rows])
    if size == len(rows):
        behind = length * np.arange(1, size + 1)
    # Padding of rows behind each other is behind the last.
    of_tokens = np.searchsorted(behind[:-1], np.arange(size * length), "right")
    return batch | {"source": torch.from_numpy(sources[of_tokens].reshape(size, length))}


@dataclass(kw_only=True)
class RowsOfSources(SupervisedRows):
    """Rows of all sources as the model reads them. `parts` are those of each source alone, in the order of `table`."""

    parts: Mapping[str, SupervisedRows]
    table: SourceTable

    @property
    def first(self) -> dict[str, HasRows]:
        """First rows of both sides of each source. They are not checked again."""
        sides = {"Training": "train", "Evaluation": "heldout"}
        return {
            titled(heading, name): FirstRows(self.run, getattr(part, side), self.collate)
            for name, part in self.parts.items()
            for heading, side in sides.items()
        }

    @property
    def visits(self) -> np.ndarray:
        """Number of times that each row is trained in the whole run, on average over the rows of its source."""
        asked = self.table.shares.asked(self.table.num_steps() * self.run.args.total_batch_size)
        return np.repeat(asked / self.table.sizes, self.table.sizes)

    def make_loader(self, **settings: Any) -> StepLoader:
        order = partial(SourceOrder, self.table)
        loader: Any = super().make_loader(order_class=order, lengths=self.lengths, **settings)
        loader.check, loader.state = self.table.check, self.table.state
        return self.with_sources(loader, self.table.ends)

    def make_heldout_loader(self, num_workers: int = 0) -> RowLoader:
        ends = np.cumsum([len(part.heldout) for part in self.parts.values()])
        return self.with_sources(super().make_heldout_loader(num_workers), ends)

    def with_sources(self, loader: Any, ends: np.ndarray) -> Any:
        """Let the batches of a loader name the sources of a mixture, whose rows end before the numbers `ends`."""
        if self.table.mixture.names:
            loader.collate_fn = partial(with_sources, loader.collate_fn, ends)
        return loader


def prepare_sources(
    run: Run[Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: set[int]
) -> RowsOfSources:
    """Prepare the rows of each source as `prepare_supervised` does, and put them behind each other.

    Raises:
        ConfigError: as `prepare_supervised`, with the name of the source; for held-out rows of a source that are trained in
            another; and if a resumed run has other sources than its checkpoint.
        DataError: as `prepare_supervised`.
    """
    args, mixture = run.args, run.args.mix
    parts: dict[str, SupervisedRows] = {}
    for alone in args.sources:
        of_source = copy.copy(run)
        of_source.args, name = alone, alone.source_name
        try:
            parts[name] = prepare_supervised(of_source, model, tokenizer, base_stops)
        except (ConfigError, DataError) as error:
            if not name:
                raise
            raise type(error)(f"{mixture.file}, source {name}: {error}") from error
    check_sources_apart(run, parts)
    states = read_json(run.resumed_from / "data.json") if run.resumed_from else []
    begun_at = step_of(run.resumed_from) if run.resumed_from else 0
    table = SourceTable(
        args,
        mixture,
        [len(part.train) for part in parts.values()],
        [part.content for part in parts.values()],
        states[0].get("weights", ()) if states else (),
        begun_at,
    )
    first, *_ = parts.values()
    table.check(states, remedy_of_date(run))
    if mixture.names:
        tell_of_sources(run, parts, table)
    counts = [part.counts for part in parts.values()]
    summed = {name: sum(count[name] for count in counts) for name in counts[0] if name != "longest"}
    longest = {"longest": max(count["longest"] for count in counts)}
    return RowsOfSources(
        run,
        ConcatDataset([part.train for part in parts.values()]),
        ConcatDataset([part.heldout for part in parts.values()]),
        first.collate,
        table.state()["content"],
        sides={side: range(sum(part.num_read[side] for part in parts.values())) for side in first.sides},
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
    alone = run.args.sources
    has_one_share = len({args.heldout_share for args in alone}) == 1
    if len(alone) == 1 or (has_one_share and not any(args.eval_files for args in alone)):
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
                    f"{run.args.mix.file}: {said}; remove them from one side (at most {MOST_REPEATED:.0%} may lie on both)"
                )
            told += [said] if both else []
        return told

    for said in on_first_rank(found):
        run.print(said)


def tell_of_sources(run: Run[Any], parts: Mapping[str, SupervisedRows], table: SourceTable) -> None:
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
