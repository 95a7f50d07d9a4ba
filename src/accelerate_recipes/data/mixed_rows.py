"""Rows of one or several finite sources, which stand one behind the other in one table, and their order.

Place n of a run takes its source by (seed, n), and of this source its next row: each pass over a source is a permutation
of its own.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import xxhash

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.mixture import Mixture, Weights, changed_shares, check_same_sources, continued
from accelerate_recipes.data.prepared import check_content
from accelerate_recipes.data.rows import StepOrder, permutation
from accelerate_recipes.data.shares import Shares
from accelerate_recipes.errors import ConfigError

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
            epochs, said = source.max_epochs, f"{self.mixture.file}, source {source.name}: max_epochs"
            if not source.name and self.args.max_steps < 1:
                epochs, said = self.args.num_train_epochs, "--num_train_epochs"
            limits.append(math.inf if math.isinf(epochs) else round(epochs * size))
            if not limits[-1]:
                raise ConfigError(f"{said} {epochs:g} of {size:,} rows is less than one row; raise it")
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
        place = min(step * self.args.total_batch_size, self.shares.end)
        counts, asked = self.shares.counts(int(place)), self.shares.asked(place)
        found = {}
        of_sources = zip(self.mixture.names, self.sizes, counts.tolist(), asked.tolist(), strict=False)
        for name, size, count, wanted in of_sources:
            values = {"rows": count, "epochs": count / size, "share": count / place, "asked": wanted / place}
            found |= {f"{name}_{key}": value for key, value in values.items()}
        return found


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
        block, place = divmod(step, BLOCK)
        return self.block(block)[place * batch : (place + 1) * batch]

    def rows_of_block(self, block: int) -> list[int]:
        """List the rows of BLOCK steps, with -1 where no row is left."""
        size = BLOCK * self.args.total_batch_size
        found = np.full(size, -1)
        sources, numbers = self.table.shares.take(block * size, (block + 1) * size)
        for source in np.unique(sources[sources >= 0]).tolist():
            mine = np.flatnonzero(sources == source)
            epochs, places = np.divmod(numbers[mine], self.table.sizes[source])
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                found[mine[now]] = self.permutation(source, epoch)[places[now]]
        return found.tolist()
