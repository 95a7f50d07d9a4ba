"""Shares of sources in the rows of a run: which source each place takes, as a function of the seed and the place."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Stretch(NamedTuple):
    """Places from `begin` on in which the weights stay as they are; sources of weight 0 take none of them."""

    begin: int
    counts: np.ndarray  # (K,) integers: earlier places that each of K sources took
    weights: np.ndarray  # (K,), which add up to 1, or are all 0 once no source is left
    offsets: np.ndarray  # (K,) in [0, 1): when each source is due first

    def due(self, source: int, number: np.ndarray) -> np.ndarray:
        """Return when a source takes its places of this stretch, from number 0; on average, one place is due a unit."""
        return (number + self.offsets[source]) / self.weights[source]

    def num_due(self, source: int, time: float, inclusive: bool = False) -> int:
        """Count the places of this stretch that a source takes before a time, or at it too."""
        if not self.weights[source]:
            return 0
        about = max(0, math.floor(time * self.weights[source] - self.offsets[source]) - 1)
        near = self.due(source, np.arange(about, about + 4))  # rounding moves the count by less than one
        return about + int(((near <= time) if inclusive else (near < time)).sum())

    def place_of(self, source: int, number: int) -> int:
        """Return the place that a source takes as its place `number` of this stretch."""
        time = float(self.due(source, np.array(number)))
        others = (k for k in range(len(self.weights)) if k != source)
        return self.begin + number + sum(self.num_due(k, time, inclusive=k < source) for k in others)

    def take(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each place from `start` to `stop`, and its earlier places; -1 if none is left."""
        if not self.weights.any():
            return np.full(stop - start, -1), np.full(stop - start, -1)
        num_sources = len(self.weights)
        # At a time t, a source has taken less than one place more, or less, than its weight times t.
        early = max(0, start - self.begin - num_sources)
        late = stop - self.begin + num_sources
        first = [self.num_due(k, early) for k in range(num_sources)]
        numbers = [np.arange(begin, self.num_due(k, late)) for k, begin in enumerate(first)]
        sources = np.repeat(np.arange(num_sources), [*map(len, numbers)])
        times = np.concatenate([self.due(k, some) if len(some) else some for k, some in enumerate(numbers)])
        order = np.lexsort((sources, times))[start - self.begin - sum(first) :][: stop - start]
        sources = sources[order]
        return sources, np.concatenate(numbers)[order] + self.counts[sources]


class Shares:
    """Sources of the places of a run, or of one of its streams, by error diffusion.

    Each source is due at equal distances, from an offset on that the seed draws; the places follow in this order. So after
    any number of places of a stretch a source has its share of them, but for less than one place for each other source.
    Nothing is kept: any place can be asked for.

    Args:
        weights: by the first place for which they hold, in order and from place 0 on; (K,) for K sources.
        limits: most places that each source takes; infinity for any number. Its weight then goes to the others.
        seed: seed of the run.
        stream: number of the stream, which gets offsets of its own.
    """

    def __init__(
        self, weights: Sequence[tuple[int, Sequence[float]]], limits: Sequence[float], seed: int, stream: int = 0
    ):
        self.stretches: list[Stretch] = []
        counts, begin = np.zeros(len(limits), dtype=np.int64), 0
        for index, (first, given) in enumerate(weights):
            end = weights[index + 1][0] if index + 1 < len(weights) else math.inf
            assert begin == first, weights
            while begin < end:
                left = np.where(counts < limits, np.asarray(given, float), 0)
                key = np.random.SeedSequence([seed, begin], spawn_key=(stream,))
                offsets = np.random.Generator(np.random.Philox(key)).random(len(limits))
                stretch = Stretch(begin, counts, left / (left.sum() or 1), offsets)
                self.stretches.append(stretch)
                if not left.any():  # the run ends here, even if later weights would name other sources
                    return
                # The stretch ends behind the last place of the source that ends first.
                ends = [
                    stretch.place_of(k, int(limits[k] - counts[k]) - 1) + 1
                    for k in np.flatnonzero(left).tolist()
                    if math.isfinite(limits[k])
                ]
                begin = min([end, *ends])
                if math.isfinite(begin):
                    counts = self.counts(int(begin))

    def take(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each place from `start` to `stop`, and how many earlier places took it.

        Both are integers of the shape (stop - start,); both are -1 where all sources have ended.
        """
        ends = [*(stretch.begin for stretch in self.stretches[1:]), math.inf]
        parts = [
            stretch.take(max(start, stretch.begin), int(min(stop, end)))
            for stretch, end in zip(self.stretches, ends, strict=True)
            if stretch.begin < stop and start < end
        ]
        sources, numbers = (np.concatenate([part[i] for part in parts] or [np.empty(0, int)]) for i in range(2))
        return sources, numbers

    def counts(self, place: int) -> np.ndarray:
        """Count the places before `place` that each source takes, (K,) integers."""
        stretch = next(one for one in reversed(self.stretches) if one.begin < place or one.begin == 0)
        if place == stretch.begin or not stretch.weights.any():
            return stretch.counts
        (last,), (number,) = stretch.take(place - 1, place)
        time = float(stretch.due(last, number - stretch.counts[last]))
        earlier = [stretch.num_due(k, time, inclusive=k <= last) for k in range(len(stretch.counts))]
        return stretch.counts + np.array(earlier)

    def asked(self, place: float) -> np.ndarray:
        """Return how many of the places before `place` the weights give to each source, (K,) floats."""
        ends = [*(stretch.begin for stretch in self.stretches[1:]), math.inf]
        parts = [
            (min(place, end) - stretch.begin) * stretch.weights
            for stretch, end in zip(self.stretches, ends, strict=True)
            if stretch.begin < place
        ]
        return np.sum(parts, axis=0) if parts else np.zeros(len(self.stretches[0].weights))

    @property
    def end(self) -> float:
        """First place for which no source is left; infinity if there always is one."""
        last = self.stretches[-1]
        return math.inf if last.weights.any() else last.begin
