"""Sources of supervised fine-tuning: each is prepared by itself, as in a run on it alone; and the order of their rows.

Place n of a run takes its source by (seed, n), and of this source its next row: each pass over a source is a permutation
of its own. The rows of all sources stand one behind the other in one table.
"""

import copy
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint.files import step_of
from accelerate_recipes.conversations.supervised import SupervisedRows, columns_said, prepare_supervised
from accelerate_recipes.conversations.trained_rows import remedy_of_date
from accelerate_recipes.data.files import text_hash
from accelerate_recipes.data.heldout import MOST_REPEATED, beginning, repeated
from accelerate_recipes.data.mixture import Mixture, Weights, changed_shares, check_same_sources, continued
from accelerate_recipes.data.prepared import check_content
from accelerate_recipes.data.rows import RowLoader, StepLoader, StepOrder, permutation
from accelerate_recipes.data.shares import Shares
from accelerate_recipes.data.shown import HasRows, titled
from accelerate_recipes.disk import read_json
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.run import Run

BLOCK = 32  # steps whose rows are found together, which takes less time


@dataclass
class SourceTable:
    """Facts about the rows of all sources, which decide their order.

    Args:
        mixture: sources, in the order in which their rows stand in the table.
        sizes: numbers of their rows.
        contents: checksums of their rows.
        before: weights of the run until step `begun_at`, at which it is resumed.
    """

    args: TrainArgs
    mixture: Mixture
    sizes: Sequence[int]
    contents: Sequence[str]
    before: Sequence[Sequence[Any]] = ()
    begun_at: int = 0

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.mixture.sources]

    @cached_property
    def ends(self) -> np.ndarray:
        """Numbers of the rows behind the last of each source."""
        return np.cumsum(self.sizes)

    @cached_property
    def weights(self) -> Weights:
        """Weights of the whole run: also those that held before it was resumed."""
        now = self.mixture.weights(dict(zip(self.names, self.sizes, strict=True)), self.args.max_steps)
        return continued(self.before, self.begun_at, now) if self.before else now

    @cached_property
    def shares(self) -> Shares:
        batch, limits = self.args.total_batch_size, []
        for source, size in zip(self.mixture.sources, self.sizes, strict=True):
            epochs, setting = source.max_epochs, f"{self.mixture.file}, source {source.name}: max_epochs"
            if not source.name and self.args.max_steps < 1:
                epochs, setting = self.args.num_train_epochs, "--num_train_epochs"
            limits.append(math.inf if math.isinf(epochs) else round(epochs * size))
            if not limits[-1]:
                raise ConfigError(f"{setting} {epochs:g} of {size:,} rows is less than one row; raise it")
        table = [(step * batch, [weights[name] for name in self.names]) for step, weights in self.weights]
        return Shares(table, limits, self.args.seed)

    def num_steps(self) -> int:
        """Return the number of optimizer steps of the run: --max_steps, or those that end all sources.

        Raises:
            ConfigError: for steps without rows, and for phases behind the end.
        """
        end, batch, asked = self.shares.end, self.args.total_batch_size, self.args.max_steps
        most = math.inf if math.isinf(end) else math.ceil(end / batch)
        if asked > most:
            raise ConfigError(
                f"--max_steps {asked} needs {asked * batch:,} rows, and the sources of {self.mixture.file} end after "
                f"{end:,}: lower it to {most}, or raise max_epochs of a source"
            )
        steps = asked if asked > 0 else int(most)
        self.mixture.check_phases(steps)
        return steps

    def changed(self) -> str:
        """Say which shares hold from now on, if a resumed run has others than it had; "" if not."""
        return changed_shares(self.before, self.weights, self.begun_at) if self.before else ""

    def facts(self) -> dict[str, dict[str, Any]]:
        """Describe each source by what must not change on a resume."""
        parts = zip(self.mixture.sources, self.contents, strict=True)
        return {source.name: {"content": content, "max_epochs": source.limit} for source, content in parts}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the step. A run without a mixture refuses the `content` of all."""
        if not self.mixture.names:
            return {"content": self.contents[0]}
        facts = self.facts()
        content = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
        return {"content": content, "sources": facts, "weights": self.weights}

    def check(self, states: Sequence[dict], remedy: str = "") -> None:
        """Raise ConfigError if the states of a checkpoint belong to other sources. `remedy` is that of `check_content`."""
        if not states:
            return
        if not self.mixture.names and "sources" not in states[0]:
            return check_content(self.contents[0], list(states), remedy)
        now = self.facts()  # its weights can be told once the sources are the same
        check_same_sources(states[0], {"sources": now}, self.mixture.file)
        for name, facts in now.items():
            try:
                check_content(facts["content"], [states[0]["sources"][name]], remedy)
            except ConfigError as error:
                raise ConfigError(f"{self.mixture.file}, source {name}: {error}") from None

    def seen(self, step: int) -> dict[str, float]:
        """Return rows, epochs and share of each source after a step, and the share that the weights asked for."""
        num_rows = min(step * self.args.total_batch_size, self.shares.end)
        counts, asked = self.shares.counts(int(num_rows)), self.shares.asked(num_rows)
        record = {}
        of_sources = zip(self.mixture.names, self.sizes, counts.tolist(), asked.tolist(), strict=False)
        for name, size, count, wanted in of_sources:
            values = {"rows": count, "epochs": count / size, "share": count / num_rows, "asked": wanted / num_rows}
            record |= {f"{name}_{key}": value for key, value in values.items()}
        return record


class SourceOrder(StepOrder):
    """StepOrder of the rows of all sources."""

    def __init__(self, table: SourceTable, *place: Any):
        super().__init__(*place)
        self.table = table
        self.firsts = table.ends - table.sizes
        # One source has the order that it has without a mixture. Several of equal sizes need orders of their own; the name
        # decides, so that other sources can be written before it.
        self.keys = [xxhash.xxh32_intdigest(name.encode()) >> 1 for name in table.names]
        self.keys = self.keys if len(self.keys) > 1 else [0]
        self.permutation = lru_cache(2 * len(self.keys))(self.pass_over)
        self.block = lru_cache(2)(self.rows_of_block)

    def pass_over(self, source: int, epoch: int) -> np.ndarray:
        """Return the order of the rows of a source in one epoch, as numbers in the table."""
        size, key = self.table.sizes[source], self.keys[source]
        return self.firsts[source] + permutation.__wrapped__(size, self.args.seed, epoch, key)

    @property
    def end(self) -> float:
        return self.table.shares.end

    def rows(self, step: int) -> list[int]:
        batch = self.args.total_batch_size
        if step * batch >= self.end:
            return []
        block, offset = divmod(step, BLOCK)
        return self.block(block)[offset * batch : (offset + 1) * batch]

    def rows_of_block(self, block: int) -> list[int]:
        """List the rows of BLOCK steps, with -1 where no row is left."""
        size = BLOCK * self.args.total_batch_size
        rows = np.full(size, -1)
        sources, numbers = self.table.shares.take(block * size, (block + 1) * size)
        for source in np.unique(sources[sources >= 0]).tolist():
            mine = np.flatnonzero(sources == source)
            epochs, positions = np.divmod(numbers[mine], self.table.sizes[source])
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                rows[mine[now]] = self.permutation(source, epoch)[positions[now]]
        return rows.tolist()


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
        firsts: Any = [(name, *first) for name, part in self.parts.items() for first in part.first.items()]
        return {titled(heading, name): rows._replace(content="") for name, heading, rows in firsts}

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
    before = states[0].get("weights", ()) if states else ()
    every = [*parts.values()]
    sizes, contents = [len(part.train) for part in every], [part.content for part in every]
    table = SourceTable(args, mixture, sizes, contents, before, begun_at)
    table.check(states, remedy_of_date(run))
    if mixture.names:
        tell_of_sources(run, parts, table)
    counts = {name: sum(part.counts[name] for part in every) for name in every[0].counts}
    counts |= {"longest": max(part.counts["longest"] for part in every)}
    sides = {side: range(sum(part.num_read[side] for part in every)) for side in every[0].sides}
    num_targets = np.concatenate([part.num_targets for part in every])
    counted = {"sides": sides, "num_targets": num_targets, "counts": counts}
    train, heldout = (ConcatDataset([getattr(part, side) for part in every]) for side in ("train", "heldout"))
    content = table.state()["content"]
    return RowsOfSources(run, train, heldout, every[0].collate, content, **counted, parts=parts, table=table)


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
            line = f"{len(both):,} of {number:,} held-out rows of {name} begin as rows to train on of {other} do"
            if len(both) > MOST_REPEATED * number:
                raise ConfigError(
                    f"{run.args.mix.file}: {line}; remove them from one side (at most {MOST_REPEATED:.0%} may lie on both)"
                )
            told += [line] if both else []
        return told

    for line in on_first_rank(found):
        run.print(line)


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
    if line := table.changed():
        run.print(line)
