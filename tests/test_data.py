"""Tests of packing, which loses nothing and crosses no document, and of the order of rows, a function of the step."""

import errno
import itertools
import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import tiny_config

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data import prepared
from accelerate_recipes.data.packing import PackedRows, pack, pack_documents
from accelerate_recipes.data.prepared import cached
from accelerate_recipes.data.rows import StepOrder, make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize


def documents(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(4, 50, size=n).tolist() for n in generator.integers(1, longest, size=num)]


@pytest.fixture
def packed(tmp_path):
    def build(texts: list[list[int]], max_length: int) -> Dataset:
        return pack_documents(Dataset.from_dict({"input_ids": texts}), max_length, tmp_path / "rows.arrow")

    return build


def test_pack_is_best_fit():
    """The result equals a search of all rows: longest first, each into the row where least is left, the latest of those."""
    lengths = np.random.default_rng(2).integers(1, 20, size=300).tolist()
    pieces = [(d, start, min(start + 16, n)) for d, n in enumerate(lengths) for start in range(0, n, 16)]
    rows, left = [], {}
    for piece in sorted(pieces, key=lambda piece: -(piece[2] - piece[1])):
        length = piece[2] - piece[1]
        row = min((row for row in left if left[row] >= length), key=lambda row: left[row], default=len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        left = {row: left.pop(row, 16) - length} | left  # the latest that changed comes first
    assert pack(lengths, max_length=16) == rows


def test_rows_hold_the_documents(packed):
    texts = documents(50, 40)
    rows = packed(texts, 16)
    pieces = []
    for row in rows:
        cuts = np.cumsum([0, *row["lengths"]])
        pieces += [tuple(row["input_ids"][a:b]) for a, b in itertools.pairwise(cuts)]
    wanted = [tuple(text[i : i + 16]) for text in texts for i in range(0, len(text), 16)]
    assert Counter(pieces) == Counter(wanted)


def test_packed_losses_are_those_of_the_documents_alone(packed):
    """Losses agree token for token: neither attention nor positions cross from one document to the next."""
    model = new_model(tiny_config(max_position_embeddings=64), "sdpa")
    initialize(model, 0, "cpu").eval()
    texts = documents(30, 30)
    rows = PackedRows(packed(texts, 64), 64, pad_token_id=0, document_mask=True)
    batch = torch.utils.data.default_collate([rows[i] for i in range(len(rows))])

    def token_losses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        return losses[batch["labels"][:, 1:] != IGNORE_INDEX]

    def alone(text: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([text])
        return {"input_ids": ids, "position_ids": torch.arange(len(text))[None], "labels": ids}

    with torch.no_grad():
        together = token_losses(batch)
        apart = torch.cat([token_losses(alone(text)) for text in texts])
        torch.testing.assert_close(together.sort().values, apart.sort().values, rtol=1e-5, atol=1e-5)
        assert next_token_loss(model, batch).item() == pytest.approx(apart.sum().item(), rel=1e-5)
        assert count_next_tokens(batch).item() == len(apart)
        # The mask matters: without it the losses differ.
        batch["position_ids"] = torch.arange(64).expand_as(batch["position_ids"])
        assert (token_losses(batch).sum() - apart.sum()).abs() > 1e-2


def test_padding_share_and_attended_length(packed):
    rows = PackedRows(packed([[5] * 10, [6] * 6], 20), 20, 0, document_mask=True)
    assert rows.padding_share == pytest.approx(4 / 20)
    assert rows.attended_length == pytest.approx((10 * 10 + 6 * 6) / 16)


@pytest.mark.parametrize("num_rows", [27, 5, 8, 800, 1003])
def test_every_row_once_in_each_epoch_on_any_number_of_ranks(num_rows):
    """A step has the same rows on any number of ranks, also grouped by length, else its gradients would differ with the length."""
    args = TrainArgs(total_batch_size=8, per_device_train_batch_size=2, num_train_epochs=3)
    lengths, found = np.random.default_rng(0).integers(1, 100, num_rows), []
    for world_size, by_length in itertools.product((1, 2, 4), (False, True)):
        given = (num_rows, args), (world_size, lengths if by_length else None)
        orders = [iter(StepOrder(*given[0], rank, *given[1])) for rank in range(world_size)]
        turns = [order for _ in range(args.accumulation_steps(world_size)) for order in orders]
        steps = [[row for order in turns for row in next(order)] for _ in range(num_steps(args, num_rows))]
        found.append([sorted(step) for step in steps])
        if by_length:  # what the ranks have at one time is of similar length
            in_turn = [[lengths[row] for row in step if row >= 0] for step in steps]
            assert in_turn == [sorted(step) for step in in_turn]
    assert all(steps == found[0] for steps in found)
    seen = Counter(dict.fromkeys(range(num_rows), 0))
    for step in found[0]:  # no row comes again before all have come
        seen.update(row for row in step if row >= 0)
        assert max(seen.values()) == math.ceil(seen.total() / num_rows)
    assert {*seen.values()} == {3} and sum(step.count(-1) for step in found[0]) == 8 * len(found[0]) - 3 * num_rows
    whole = [row for rows in map(StepOrder(num_rows, args, 0, 1).rows, range(len(found[0]))) for row in rows]
    assert whole[:num_rows] != whole[num_rows : 2 * num_rows], "an epoch has an order of its own"


BY_LENGTH = ["plain", "by length"]


@pytest.mark.parametrize("lengths", [None, np.arange(4)], ids=BY_LENGTH)
def test_the_order_ends_with_the_last_row(lengths):
    """So nobody waits for a row for ever, where a rank has fewer rows than are shown, or none."""
    args = TrainArgs(total_batch_size=8, per_device_train_batch_size=2, num_train_epochs=1)
    for world_size in (2, 4):
        for rank in range(world_size):
            loader = make_train_loader(range(4), args, rank, world_size, lengths, collate_fn=list)
            batches = list(itertools.islice(loader.batch_sampler, 100))
            assert len(batches) == args.accumulation_steps(world_size), "one step"
            mine = [row for batch in batches for row in batch if row >= 0]
            assert loader.first_batch(5) == mine and (mine or rank)


@pytest.mark.parametrize("lengths", [None, np.arange(10)], ids=BY_LENGTH)
def test_starting_later_is_the_same_order(lengths):
    args = TrainArgs(total_batch_size=4, per_device_train_batch_size=4, max_steps=100)
    order, later = StepOrder(10, args, 0, 1, lengths), StepOrder(10, args, 0, 1, lengths)
    later.start_step = 7
    whole = [micro for micro, _ in zip(order, range(12), strict=False)]
    assert [micro for micro, _ in zip(later, range(5), strict=False)] == whole[7:]


@pytest.mark.parametrize("num_rows, world_size, size", [(10, 4, 2), (3, 4, 2), (16, 2, 4), (1, 1, 8)])
def test_evaluation_reads_every_row_once_in_equally_many_batches(num_rows, world_size, size):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return num_rows

        def __getitem__(self, index):
            return index

    args = TrainArgs(per_device_eval_batch_size=size)
    batches = [list(make_eval_loader(Rows(), args, rank, world_size)) for rank in range(world_size)]
    assert len({len(mine) for mine in batches}) == 1
    rows = [row for mine in batches for batch in mine for row in batch.tolist()]
    assert sorted(row for row in rows if row >= 0) == list(range(num_rows))
    # By length too; and the batches of the ranks are alike.
    lengths = np.random.default_rng(0).permutation(num_rows)
    batches = [list(make_eval_loader(Rows(), args, rank, world_size, lengths=lengths)) for rank in range(world_size)]
    in_turn = [row for step in zip(*batches, strict=True) for row in torch.stack(step, 1).flatten().tolist()]
    assert in_turn == [*np.argsort(lengths), *[-1] * (len(rows) - num_rows)]


def test_loaders_leave_the_global_generator_alone():
    args = TrainArgs(total_batch_size=2, per_device_train_batch_size=2, max_steps=1)
    before = torch.get_rng_state()
    next(iter(make_train_loader([1, 2, 3], args, 0, 1)))
    next(iter(make_eval_loader([1, 2, 3], args, 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_cache_is_built_once_and_failure_leaves_nothing(tmp_path, monkeypatch):
    built = []

    def build(folder, tmp):
        built.append(folder)
        (tmp / "y").write_text("not kept")
        (folder / "x").write_text("1")
        return {"n": 1}

    first = cached(tmp_path / "c", {"a": 1}, build)
    assert {file.name for file in first.iterdir()} == {"x", "facts.json", "key.json"}
    assert json.loads((first / "facts.json").read_text()) == {"n": 1}
    assert cached(tmp_path / "c", {"a": 1}, build) == first
    with monkeypatch.context() as other:
        other.setattr(prepared, "is_first_of_machine", lambda: False)
        assert cached(tmp_path / "c", {"a": 1}, build) == first
    assert cached(tmp_path / "c", {"a": 2}, build) != first
    assert len(built) == 2 and len(first.name) == 16

    def fail(folder, tmp):
        (folder / "x").write_text("1")
        raise ValueError("no")

    with pytest.raises(ValueError):
        cached(tmp_path / "d", {}, fail)
    assert not (tmp_path / "d").exists()

    def fill_the_disk(folder, tmp):
        raise OSError(errno.ENOSPC, "Error writing bytes to file")  # as by pyarrow, without a name

    with pytest.raises(OSError, match=f"to file: '{tmp_path}/f/"):
        cached(tmp_path / "f", {}, fill_the_disk)

    def build_when_another_node_has(folder, tmp):
        shutil.copytree(first, folder.with_name(folder.name.split(".")[0]))
        (folder / "x").write_text("2")
        return {}

    theirs = cached(tmp_path / "e", {}, build_when_another_node_has)
    assert (theirs / "x").read_text() == "1" and list((tmp_path / "e").iterdir()) == [theirs]


@pytest.mark.parametrize("epochs, steps", [(1.0, 25), (0.5, 13), (0.01, 1), (2.5, 63)])
def test_number_of_steps(epochs, steps):
    assert num_steps(TrainArgs(total_batch_size=4, num_train_epochs=epochs), 100) == steps


def test_less_than_one_row_is_no_run():
    with pytest.raises(ConfigError, match=r"--num_train_epochs 1e-09 of 100 rows"):
        num_steps(TrainArgs(num_train_epochs=1e-9), 100)
