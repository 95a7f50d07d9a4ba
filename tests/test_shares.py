"""Which source each row of a mixture comes from: shares, ends of sources, and changes of the weights."""

import math

import numpy as np
import pytest

from accelerate_recipes.data.shares import Shares

WEIGHTS = [(0, [5.0, 3.0, 1.5, 0.5])]
ANY = [math.inf] * 4


@pytest.mark.parametrize("num_streams", [1, 24, 96])
def test_shares_are_the_weights(num_streams):
    """After 10,000 rows of any number of streams, no share is wrong by more than the bound, and far less as a rule."""
    asked, worst = np.array(WEIGHTS[0][1]) / 10, 0.0
    rows = -(-10_000 // num_streams)
    for seed in range(10):
        streams = [Shares(WEIGHTS, ANY, seed, stream) for stream in range(num_streams)]
        counts = sum(stream.counts(rows) for stream in streams)
        assert counts.sum() == rows * num_streams
        worst = max(worst, abs(counts / counts.sum() - asked).max())
    assert worst < {1: 3e-4, 24: 1e-3, 96: 3e-3}[num_streams]


@pytest.mark.parametrize("limits", [ANY, [700, math.inf, 1, 0], [30, 40, 1, 9]])
@pytest.mark.parametrize("weights", [WEIGHTS, [*WEIGHTS, (333, [0.0, 1.0, 1.0, 1.0]), (334, [1, 1e-6, 0, 0])]])
def test_any_part_is_that_of_the_whole(weights, limits):
    """A place has one source, whatever is asked for; a source takes its numbers one after the other, up to its limit."""
    shares = Shares(weights, limits, seed=3)
    sources, numbers = shares.take(0, 3000)
    for start, stop in [(0, 1), (5, 5), (300, 400), (2990, 3000), (69, 90)]:
        part = shares.take(start, stop)
        assert np.array_equal(part, (sources[start:stop], numbers[start:stop]))
    for place in (0, 1, 333, 334, 2999):
        assert shares.counts(place).tolist() == [(sources[:place] == k).sum() for k in range(4)]
    for k, limit in enumerate(limits):
        mine = numbers[sources == k]
        assert np.array_equal(mine, np.arange(len(mine))) and len(mine) <= limit
    assert shares.end == (math.inf if math.isinf(max(limits)) else sum(limits))
    assert (sources >= 0).sum() == min(shares.end, 3000)


def test_changed_weights_leave_what_came_before():
    changed = [*WEIGHTS, (1000, [1, 1, 1, 1])]
    before, after = (Shares(weights, ANY, seed=0).take(0, 3000)[0] for weights in (WEIGHTS, changed))
    assert np.array_equal(before[:1000], after[:1000])
    assert np.bincount(after[1000:]).tolist() == pytest.approx([500] * 4, abs=3)


def test_a_source_that_has_ended_leaves_its_share_to_the_others():
    sources, _ = Shares([(0, [1, 1, 2])], [100, math.inf, math.inf], seed=1).take(0, 1000)
    last = np.flatnonzero(sources == 0)[-1]
    assert last == pytest.approx(400, abs=4)
    assert np.bincount(sources[last + 1 :])[1:].tolist() == pytest.approx([200, 400], abs=4)


def test_late_places_are_found_at_once():
    shares = Shares([(0, [1.0, 1e-4])], [math.inf, math.inf], seed=0)
    sources, numbers = shares.take(10**12, 10**12 + 20_000)
    assert (sources == 1).sum() in (1, 2, 3) and numbers.max() == pytest.approx((1e12 + 2e4) / 1.0001, rel=1e-10)
