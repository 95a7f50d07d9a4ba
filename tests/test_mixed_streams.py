"""Tests of mixtures of streams: shares, the same rows on any number of ranks and workers, exact after a resume."""

import itertools
import math

import numpy as np
import pytest
from helpers import refuses
from streaming import OF_ROWS, Numbered, Ranks, go_on, no_retry, states_of

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.mixture import Mixture, MixturePhase, Source
from accelerate_recipes.data.shares import Shares
from accelerate_recipes.data.stream_order import StreamState, stream_documents
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("worker_server")

STREAMS, BATCH, LENGTH = 24, 36, 16
SOURCES = {"big": ([400, 80, 0], 12), "four": ([70], 30), "tiny": ([6, 4], 40), "zebra": ([300], 9)}
WEIGHTS = {"big": 5.0, "four": 3.0, "tiny": 0.5, "zebra": 1.5}
LATER = {"big": 1.0, "four": 1.0, "tiny": 1.0, "zebra": 0.0}
STEPS = 60


def mixture_of(weights=WEIGHTS, phases=(), **max_epochs) -> Mixture:
    sources = [Source(name, weight, max_epochs.get(name, math.inf), {}) for name, weight in weights.items()]
    return Mixture("mixture.yaml", sources, [*phases])


def make_loader(
    mixture: Mixture, rank=0, world_size=1, workers=0, sources=SOURCES, batch=BATCH, max_steps=STEPS, streams=STREAMS,
    **changes,
) -> StreamLoader:  # fmt: skip
    sizes = {"total_batch_size": batch, "per_device_train_batch_size": 1, "max_steps": max_steps}
    args = TrainArgs(seed=5, dataloader_num_workers=workers, **sizes)
    settings = {"max_length": LENGTH, "num_streams": streams, "shuffle_block": 4} | changes
    documents = [Numbered(*SOURCES[name]) if name in SOURCES else sources[name] for name in sources]
    return StreamLoader(documents, args, rank, world_size, mixture=mixture, **settings)


def rows_of(loaders: list[StreamLoader], num_steps: int) -> list[list]:
    """Return place, source, tokens and labels of the rows of each step."""
    steps = Ranks(loaders, (*OF_ROWS, "source")).run(num_steps)

    def shown(row: dict) -> tuple:
        return row["row"][1].item(), row["source"][0].item(), row["input_ids"].tolist(), row["labels"].tolist()

    return [[*map(shown, step)] for step in steps]


PHASES = [MixturePhase(23, LATER), MixturePhase(41, {}, max_length=40)]
ENDS = {"four": 1.5, "tiny": 2.0}  # both end within the run


def mixed(*place, **changes) -> StreamLoader:
    return make_loader(mixture_of(phases=PHASES, **ENDS), *place, **changes)


@pytest.fixture(scope="module")
def alone() -> tuple[list[list], StreamLoader]:
    loader = mixed()
    return rows_of([loader], STEPS), loader


def test_order_is_what_the_page_says(alone):
    """Each stream mixes by its own shares, and goes on in each source where it was; computed anew from these parts."""
    found, loader = alone
    names = list(SOURCES)

    def tokens(name: str, stream: int):
        order = loader.orders(loader.order)[names.index(name)]
        for epoch in itertools.count():
            for _, some in stream_documents(Numbered(*SOURCES[name]), order, stream, StreamState(epoch), no_retry):
                yield from some.tolist()

    streams = []
    for stream in range(STREAMS):
        first = next(k for k in itertools.count() if k * STREAMS + stream >= 23 * BATCH)
        weights = [(0, list(WEIGHTS.values())), (first, list(LATER.values()))]
        shares = Shares(weights, loader.limits[stream], 5, stream)
        streams.append((iter(shares.take(0, 200)[0].tolist()), [tokens(name, stream) for name in names]))
    for number, row in enumerate(itertools.chain(*found)):
        sources, texts = streams[number % STREAMS]
        source, length = next(sources), 40 if number >= 41 * BATCH else LENGTH
        assert row[:3] == (number, source, list(itertools.islice(texts[source], length)))
    ended = [sources for sources, _ in streams]
    assert all(len(list(rest)) == 200 - STEPS * BATCH // STREAMS for rest in ended)


@pytest.mark.parametrize("world_size, workers", [(2, 2), (4, 0)])
def test_ranks_divide_the_same_rows(alone, world_size, workers):
    """The ranks never talk, also where sources end, and where the weights or the length of rows change."""
    loaders = [mixed(rank, world_size, workers) for rank in range(world_size)]
    ranks = Ranks(loaders, (*OF_ROWS, "source"))
    assert rows_of(loaders, STEPS) == alone[0]
    assert ranks.talks == 0


def test_sources_end_after_their_epochs(alone):
    """No document is trained on more often than max_epochs, and of the tokens a stream may read, less than a row is left."""
    found, loader = alone
    rows = list(itertools.chain(*found))
    k, source = [*SOURCES].index("tiny"), Numbered(*SOURCES["tiny"])
    tokens = np.concatenate([row[2] for row in rows if row[1] == k and len(row[2]) == LENGTH])
    times = np.bincount(tokens, minlength=11)[1:] / source.num_tokens
    assert times.max() <= 2 and len(tokens) == loader.limits[:, k].sum() * LENGTH
    assert 2 * sum(source.num_tokens) - len(tokens) < STREAMS * LENGTH


@pytest.mark.parametrize(
    "before, after, step", [((2, 0), (2, 0), 5), ((4, 0), (1, 2), 22), ((3, 0), (2, 0), 23), ((1, 0), (3, 0), 41)]
)
def test_resume_is_exact(alone, before, after, step):
    """On another number of ranks and workers, before, at and after the end of a source and a change of weights or length."""
    expected, whole = alone
    first = [mixed(rank, *before) for rank in range(before[0])]
    rows = rows_of(first, step)
    second = [mixed(rank, *after) for rank in range(after[0])]
    go_on(second, step, states_of(first))
    assert rows + rows_of(second, STEPS - step) == expected
    streams = [loader.state()["streams"] for loader in second]
    assert {stream: state for part in streams for stream, state in part.items()} == whole.state()["streams"]
    counts = [loader.counts() for loader in second]
    assert {name: pytest.approx(sum(part[name] for part in counts)) for name in counts[0]} == whole.counts()


def test_new_weights_hold_from_the_resume_on(capsys):
    """The rows before stay as they were, and a later resume replays them all; test_mixtures.py changes weights twice."""
    plain, later = mixture_of(WEIGHTS), mixture_of(LATER)

    def go(mixture: Mixture, ranks: int, step: int, states: list[dict], num_steps: int) -> tuple[list, list[dict]]:
        loaders = [make_loader(mixture, rank, ranks) for rank in range(ranks)]
        go_on(loaders, step, states)
        return rows_of(loaders, num_steps), states_of(loaders)

    whole, _ = go(plain, 1, 0, [], 20)
    first, at_7 = go(plain, 2, 0, [], 7)
    assert capsys.readouterr().out == ""
    second, at_20 = go(later, 3, 7, at_7, 13)
    assert "Shares from step 8 on: big 33.33%, four 33.33%, tiny 33.33%, zebra 0.00%" in capsys.readouterr().out
    third, at_31 = go(later, 4, 20, at_20, 11)
    assert capsys.readouterr().out == "", "nothing is new"
    assert first == whole[:7] and second != whole[7:20]
    assert at_31[0]["weights"] == [[0, WEIGHTS], [7, LATER]]
    assert go(later, 2, 7, at_7, 24)[0] == second + third, "what follows does not depend on where it was interrupted"
    of_second = [row[1] for step in second for row in step]
    assert 3 not in of_second and np.bincount(of_second).tolist() == pytest.approx([13 * 12] * 3, abs=24)


def test_ten_documents_beside_a_million():
    """All streams have ten documents in turn, each equally often: an epoch of them has each once, not once a stream."""
    sources = {"few": Numbered([10], 30), "many": Numbered([10**6], 30)}
    loader = make_loader(mixture_of({"few": 1.0, "many": 1.0}), sources=sources, batch=240)
    rows = list(itertools.chain(*rows_of([loader], 12)))
    few = np.concatenate([row[2] for row in rows if row[1] == 0])
    times = np.bincount(few, minlength=11)[1:] / sources["few"].num_tokens
    assert times.sum() * 30 > 20_000 and times.max() < 1.15 * times.min()
    assert loader.counts()["few_epochs"] == pytest.approx(times.mean(), rel=0.15)
    many = np.concatenate([row[2] for row in rows if row[1] == 1])
    assert np.bincount(many).max() <= max(sources["many"].num_tokens), "no document came twice"
    # As .txt files: ten shards of one document.
    sources = {"few": Numbered([1] * 10, 30), "many": sources["many"]}
    loader = make_loader(mixture_of({"few": 1.0, "many": 1.0}), sources=sources, batch=240)
    few = np.concatenate([row[2] for step in rows_of([loader], 12) for row in step if row[1] == 0])
    times = np.bincount(few, minlength=11)[1:] / sources["few"].num_tokens
    assert times.max() < 1.3 * times.min()


def test_equal_documents_in_two_sources():
    """Both sources are read, each in an order of its own, and counted apart."""
    loader = make_loader(mixture_of({"a": 1.0, "b": 1.0}), sources=dict.fromkeys("ab", Numbered([500], 30)))
    rows = list(itertools.chain(*rows_of([loader], 10)))
    assert abs(sum(1 - 2 * row[1] for row in rows)) <= STREAMS
    first = [[row[2] for row in rows if row[:2] == (row[0] // STREAMS * STREAMS, k)] for k in range(2)]
    assert not any(one == other for one, other in zip(*first, strict=False)), "in stream 0"
    counts = loader.counts()
    assert counts["a_tokens"] + counts["b_tokens"] == counts["tokens_seen"] == 10 * BATCH * LENGTH


def test_a_source_without_documents():
    empty = {"big": None, "none": Numbered([0, 0], 5)}
    with pytest.raises(DataError, match=r"no document to train on in 0.json.gz and 1 more"):
        rows_of([make_loader(mixture_of({"big": 1.0, "none": 1e-2}), sources=empty)], 30)
    assert len(rows_of([make_loader(mixture_of({"big": 1.0, "none": 0.0}), sources=empty)], 30)) == 30


def test_a_run_ends_with_its_sources():
    ends = {"big": 1.0, "four": 1.0, "tiny": 1.0, "zebra": 1.0}
    with pytest.raises(ConfigError, match=r"all sources end after .* rows, which are \d+ steps; --max_steps is 60"):
        make_loader(mixture_of(**ends), batch=480).num_steps()
    loader = make_loader(mixture_of(**ends), max_steps=-1)
    steps = loader.num_steps()
    for workers in (0, 2):
        loader = make_loader(mixture_of(**ends), workers=workers, max_steps=-1)
        assert len(rows_of([loader], steps)) == steps
    assert steps * BATCH * LENGTH <= sum(sum(Numbered(*some).num_tokens) for some in SOURCES.values())


def test_sources_with_too_little_or_much():
    """A source that ends at once is an error, and many epochs of a source are not counted in vain."""
    with pytest.raises(DataError, match=r"mixture.yaml, source none has less than a row of 16 tokens"):
        make_loader(mixture_of({"big": 1.0, "none": 1.0}, none=2.0), sources={"big": 0, "none": Numbered([0, 1], 4)})
    assert (make_loader(mixture_of(tiny=1e9)).limits[:, 2] > STEPS * BATCH / STREAMS).all()


def test_a_checkpoint_goes_on_with_longer_rows():
    """Rows of another length, which a resume asks for: each stream goes on in the token in which its last row ended."""

    def one(rank: int, ranks: int, *phases: MixturePhase) -> StreamLoader:
        mixture = mixture_of({"one": 1.0}, phases)
        return make_loader(mixture, rank, ranks, sources={"one": Numbered([90, 40], 12)}, batch=12)

    first = [one(rank, 2) for rank in range(2)]
    begun = rows_of(first, 9)
    longer = [one(rank, 4, MixturePhase(9, {}, max_length=40), MixturePhase(40, {}, max_length=8)) for rank in range(4)]
    go_on(longer, 9, states_of(first))
    steps = begun + rows_of(longer, 51)
    assert [len(step[0][2]) for step in steps] == [LENGTH] * 9 + [40] * 31 + [8] * 20
    times = np.bincount(np.concatenate([row[2] for step in steps for row in step]), minlength=131)[1:]
    times = times / Numbered([90, 40], 12).num_tokens
    epochs = [states[0].epoch for loader in longer for states in loader.consumed.values()]
    assert min(epochs) <= times.min() and times.max() <= max(epochs) + 1


def test_checkpoints_of_other_mixtures_are_refused():
    """test_mixtures.py has all differences."""
    (state,) = states_of([make_loader(mixture_of())])
    other = make_loader(mixture_of(tiny=2.0))
    refuses(r"source tiny: max_epochs is 2\.0, the checkpoint has none", other.check, [state])
