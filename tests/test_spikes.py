"""Tests of steps that go wrong: what is planted is found and attributed, and the weights at the end are the right ones."""

import copy
import itertools
import json
import math
import random
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from faults import keep_still
from helpers import CHILDREN, by_mark, log_of, losses, read_metrics, refuses
from safetensors.torch import load_file
from tiny import tiny_config
from torch import nn

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.bad_steps import FEWEST, MEMORY, Spikes, checksums
from accelerate_recipes.checkpoint.checkpointer import Checkpointer
from accelerate_recipes.checkpoint.files import complete_checkpoints
from accelerate_recipes.conversations.objective import Objective
from accelerate_recipes.conversations.trained_rows import without_targets
from accelerate_recipes.data.rows import Rows, StepOrder, make_train_loader
from accelerate_recipes.engine import Step, train, train_step
from accelerate_recipes.errors import NonFiniteError
from accelerate_recipes.life import stop
from accelerate_recipes.life.stop import Stopped
from accelerate_recipes.losses import Gathered, LossOfSources, count_next_tokens, next_token_loss
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.run import Run

SCRIPT = CHILDREN / "toy.py"
NAN, INF = float("nan"), float("inf")


def step_of(loss: float, norm: float = 1.0, has_targets: bool = True) -> SimpleNamespace:
    return SimpleNamespace(loss=loss, norm=norm, has_targets=has_targets, micro_losses=torch.tensor([loss]))


def judge(factor: float = 6.0, past=(1.0, 1.1, 1.2) * 10, **settings) -> Spikes:
    """Make a judge that has seen these losses, and norms that are ten times as large."""
    spikes = Spikes(factor, **settings)
    for loss in past:
        assert spikes.settle(step_of(loss, 10 * loss), lambda: pytest.fail("computed again"))[1] == ""
    return spikes


# The median of the losses is 1.1, and their median absolute deviation 0.1: six robust deviations are 0.88956 above it.
@pytest.mark.parametrize("loss, norm, found", [
    (1.98, 11.0, ""),
    (2.0, 11.0, "loss 2, which is more than 6 robust deviations (0.148 each) above 1.1, the median of the last 30"),
    (1.0, 19.8, ""),
    (1.0, 20.0, "gradient norm 20, which is more than 6"),
    (-5.0, 0.0, ""),
    (NAN, 11.0, "loss nan, gradient norm 11.0"),
    (1.0, INF, "loss 1.0, gradient norm inf"),
])  # fmt: skip
def test_what_is_a_spike(loss, norm, found):
    said = judge().reason(step_of(loss, norm))
    assert said.startswith(found) and bool(said) == bool(found)


def test_where_a_spike_is_judged():
    """Not without a factor, nor by few steps, nor the loss of drawn rows; rounding of a constant loss is none."""
    high, high_norm = step_of(9.0, 10.0), step_of(1.0, 90.0)
    assert not judge(factor=0.0).reason(high) and judge(factor=0.0).reason(step_of(NAN))
    few = judge(past=[1.0] * (FEWEST - 1))
    assert not few.reason(high)
    few.settle(step_of(1.0, has_targets=False), lambda: None)
    assert not few.reason(high), "a step without targets says nothing"
    few.settle(step_of(1.0), lambda: None)
    assert few.reason(high)
    drawn = judge(by_norm_alone=True)
    assert not drawn.reason(high) and drawn.reason(high_norm) and drawn.reason(step_of(NAN))
    constant = judge(past=[2.0] * 50)
    assert not constant.reason(step_of(2.01, 20.1)) and constant.reason(step_of(2.02, 20.0))
    forgetful = judge(past=[5.0] * MEMORY + [1.0] * (MEMORY - 40))
    assert "above 1, the median of the last 100" in forgetful.reason(step_of(3.0))


GOOD, GONE = (1.0, 1.0), (NAN, NAN)
OUTCOMES = [  # computations of a step, on a device that gives the same bits or not; what is taken, or why the run ends
    ([GOOD], True, GOOD, 0),
    ([GONE, GONE], True, "rows or weights did it", 0),
    ([GONE, GOOD, GOOD], True, GOOD, 1),
    ([(1.0, INF), (1.0, 2.0), (1.0, 2.0)], True, (1.0, 2.0), 1),
    ([GONE, GOOD, GONE], True, "rows or weights did it", 1),
    ([GONE, GOOD, (1.0, 1.0 + 1e-6)], True, "no two of three", 1),
    ([GONE, GOOD, (1.0, 1.0 + 1e-6)], False, (1.0, 1.0 + 1e-6), 1),
    ([GONE, (2.0, 1.0), (1.0, 1.0)], False, "no two of three", 1),
    ([(9.0, 1.0), (9.01, 1.0)], False, "rows or weights did it", 0),
    ([(9.0, 1.0), (9.01, 1.0), (9.01, 1.0)], True, "rows or weights did it", 1),
]


@pytest.mark.parametrize("numbers, is_exact, taken, num_unstable", OUTCOMES)
def test_computed_again(numbers, is_exact, taken, num_unstable, capsys):
    computed = [step_of(*values) for values in numbers]
    spikes, left = judge(past=[1.0] * 30, is_exact=is_exact), iter(computed[1:])
    said = ""
    if isinstance(taken, str):
        with pytest.raises(NonFiniteError, match=taken) as error:
            spikes.settle(computed[0], lambda: next(left))
        said = str(error.value)
    else:
        step, reason = spikes.settle(computed[0], lambda: next(left))
        assert ((step.loss, step.norm), reason) == (taken, "") and step is computed[-1]
        assert spikes.past["loss"][-1] == taken[0]
    assert next(left, None) is None and spikes.num_unstable == num_unstable
    where = re.findall("(the loss of rank 0 differs|gradients differ)", capsys.readouterr().out + said)
    is_of_gradient = len({loss for loss, _ in numbers}) == 1
    assert where == ["gradients differ" if is_of_gradient else "the loss of rank 0 differs"] * num_unstable


def test_noise_around_zero_is_no_fault():
    """Losses of drawn rows, sums of which little is left, differ each time on a GPU; their norms do not."""
    one, other = step_of(1e-9, 3.0), step_of(-2e-9, 3.001)
    assert Spikes(by_norm_alone=True, is_exact=False).agree(one, other)
    assert not Spikes(is_exact=False).agree(one, other) and not Spikes(by_norm_alone=True).agree(one, other)
    assert not Spikes(by_norm_alone=True, is_exact=False).agree(step_of(NAN, 3.0), other)


def test_many_skips_end_the_run():
    """The third in a row does; any step that may be applied begins the count anew; a resume goes on with it."""

    def skips(spikes: Spikes) -> str:
        return spikes.settle(step_of(NAN), lambda: step_of(NAN))[1]

    spikes = judge(fatal=3)
    assert skips(spikes) and skips(spikes) and not spikes.settle(step_of(1.0), lambda: None)[1]
    assert skips(spikes) and skips(spikes)
    spikes.skipped.append({"step": 9})
    resumed = Spikes(6.0, fatal=3)
    resumed.restore([json.loads(json.dumps(spikes.state())), {}])
    assert resumed.state() == spikes.state() and len(resumed.past["loss"]) == 31
    with pytest.raises(NonFiniteError, match="as in 2 steps before it, which were skipped"):
        skips(resumed)


class Replacing(nn.Sequential):
    """Model whose pass replaces a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cached", self.cached + 1)
        return super().forward(x) * self.cached


@pytest.mark.parametrize("wrong", [[], [1], [1, 2, 3]], ids=["good", "once", "always"])
def test_a_step_that_is_skipped_leaves_no_trace(wrong):
    """Neither in weights, buffers and moments nor in the log; one that is right when computed again is as if it always was."""
    model = Replacing(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model.register_buffer("cached", torch.ones(1))
    run: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model, args=TrainArgs(), first_units=[])
    run.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches, gathered, drawn = [{"x": torch.randn(6, 3)} for _ in range(2)], [], []

    def take(wrong: list[int]) -> Step:
        def loss_fn(model: nn.Module, batch: dict) -> torch.Tensor:
            drawn.append((random.random(), np.random.random()))
            gathered.append(len(drawn))
            return model(batch["x"]).pow(2).sum() * (NAN if (len(drawn) + 1) // 2 in wrong else 1)

        def mark():
            before = [*gathered]
            return lambda: gathered.__setitem__(slice(None), before)

        return train_step(run, batches, loss_fn, lambda batch: torch.tensor(6), spikes=Spikes(fatal=2), mark_fn=mark)

    take([])
    model_before, optimizer_before = copy.deepcopy(model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    state = torch.get_rng_state()
    gathered.clear()
    drawn.clear()
    done = take(wrong)
    assert drawn == drawn[:2] * {0: 1, 1: 3, 3: 2}[len(wrong)], "each computation draws the same"
    assert bool(done.skipped) == (len(wrong) == 3) and all(p.grad is None for p in model.parameters())
    if done.skipped:
        assert equal(model.state_dict(), model_before) and gathered == []
        assert str(run.optimizer.state_dict()) == str(optimizer_before)
        assert not done.has_targets and (done.loss_sums.tolist(), done.grad_norm.item()) == ([0], 0)
        assert done.num_targets.tolist() == [0] and math.isnan(done.loss)
        assert not torch.equal(torch.get_rng_state(), state), "random generators go on"
        return
    again, after = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert len(gathered) == 2 and not equal(again, model_before)
    model.load_state_dict(model_before)
    run.optimizer.load_state_dict(optimizer_before)
    torch.set_rng_state(state)
    take([])
    assert equal(model.state_dict(), again) and torch.equal(after, torch.get_rng_state())


def test_losses_forget_what_they_gathered():
    """Of supervised answers and of trl: what came before stays, also what a draw gathered; without a step there is no value."""
    gathered = Gathered()
    gathered.add(torch.tensor([1.0, 2.0]))
    forget = gathered.mark()
    for _ in range(3):  # a step may be computed three times
        gathered.add(torch.full((2,), NAN))
        forget()
    gathered.add(torch.tensor([3.0, 4.0]))
    assert gathered.take() == [4, 6] and gathered.take() == []
    trl: Any = Objective.__new__(Objective)
    trl.counted, trl._metrics = [1], {"train": defaultdict(list, reward=[0.5])}
    forget = trl.mark()
    for _ in range(2):
        trl.counted += [2]
        trl._metrics["train"]["reward"] += [NAN]
        trl._metrics["train"]["kl"] += [NAN]
        forget()
        assert (trl.counted, trl._metrics["train"]) == ([1], {"reward": [0.5]})
    trl.counted = []
    assert LossOfSources(False, ["a"]).values(3) == trl.values(3) == {} and trl._metrics["train"]["reward"] == [0.5]


def test_what_fills_an_empty_place_is_of_no_row():
    """It is not the row with masked labels: infinite activations would still give gradients that are not finite."""
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "seq_lengths": [3], "source": 9}
    assert without_targets(row, 0) == row
    assert without_targets(row, -1) == {"input_ids": [0], "labels": [-100], "seq_lengths": [1], "source": 9}


def test_skips_that_are_not_asked_for():
    assert "--max_skips 3 has no effect with --on_spike stop" in TrainArgs(max_skips=3).problems(1)[0]
    assert TrainArgs(on_spike="skip", max_skips=3).problems(1) == []


# Whole runs in this process: 36 steps of 4 rows of a tiny model that knows its rows, with dropout, saved every 6 steps

STEPS, NUM_ROWS, BATCH = 36, 200, 4
ARGS = TrainArgs(
    total_batch_size=BATCH, per_device_train_batch_size=2, max_steps=STEPS, learning_rate=1e-4, warmup_steps=2,
    save_steps=6, async_save=False, logging_steps=1, spike_factor=50.0, on_spike="skip",
)  # fmt: skip


class Killed(BaseException):
    """End of the process, in this process."""


def make_row(first: int, number: int) -> dict:
    """Make a row of counting: each token follows from the one before."""
    ids = (torch.arange(16) + first) % 30
    return {"input_ids": ids, "labels": ids if number >= 0 else torch.full_like(ids, -100), "row": torch.tensor(number)}


def make_model(weights: dict[str, torch.Tensor] | None = None) -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 16}
    model = initialize(new_model(tiny_config(attention_dropout=0.1, **sizes), "sdpa"), 0, "cpu")
    model.load_state_dict(weights or model.state_dict())
    return model


def model_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    positions = torch.arange(16).expand_as(batch["input_ids"])
    return next_token_loss(model, batch | {"position_ids": positions})


@pytest.fixture(scope="module")
def known() -> dict[str, torch.Tensor]:
    """Weights of the model after it has learnt the rows."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = torch.utils.data.default_collate([make_row(first, first) for first in range(30)])
    for _ in range(80):
        (model_loss(model, rows) / 450).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def attempt(known, monkeypatch):
    """Train from the newest checkpoint on, with what is planted, to the end or to where a kill or a signal strikes.

    `planted` has rows that give no number (`poison`), one with wrong labels (`wrong`), and flips of hardware by step;
    `killed` is the pass in which the run is killed, `signalled` that of a signal. A flip is forgotten once it has happened.
    `still` is a step whose update is not made.
    """
    monkeypatch.setattr(stop, "listen", lambda output_dir: None)

    def run_once(args: TrainArgs, planted: dict, killed: int = -1, signalled: int = -1) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(stop, "_asked_by", None)
        out = Path(args.output_dir)
        run = Run(args, Accelerator(cpu=True))
        run.resumed_from = next(reversed(complete_checkpoints(out)), None)
        model = make_model(known)
        config = model.config
        run.shard(model)
        run.total_steps = STEPS
        run.scheduler = make_scheduler(run.optimizer, args, STEPS)
        parts = (run.accelerator, run.model, run.optimizer, run.scheduler, args, [config], run.resumed_from)
        run.checkpointer = Checkpointer(*parts)
        loader = make_train_loader(Rows([7 * i for i in range(NUM_ROWS)], make_row), args, 0, 1)
        passes, happened = itertools.count(), {}
        keep_still(run, planted.get("still", 0))

        def loss_fn(model: nn.Module, batch: dict) -> torch.Tensor:
            number, step = next(passes), run.scheduler.last_epoch + 1
            if number == killed:
                planted.get("flips", {}).update(happened if step in happened else {})  # nobody has told it yet
                raise Killed
            if number == signalled:
                stop.ask("SIGTERM")
            rows = batch["row"].tolist()
            if planted.get("wrong") in rows:
                is_wrong = (batch["row"] == planted["wrong"])[:, None] & (batch["labels"] >= 0)
                batch = batch | {"labels": torch.where(is_wrong, 31, batch["labels"])}
            loss = model_loss(model, batch)
            if planted.get("poison", set()) & {*rows}:
                loss = loss + (model.model.norm.weight.sum() * INF) * 0
            if step == planted.get("loud"):
                loss = loss + 1e6  # its gradients are those of other steps
            kind = planted.get("flips", {}).pop(step, "")
            if kind:
                happened.clear()
                happened[step] = kind
            if kind == "loss":
                loss = loss * 2.0**80
            elif kind == "gradient":
                loss.register_hook(lambda gradient: gradient * 2.0**80)
            return loss

        functions = {"loss_fn": loss_fn, "count_fn": count_next_tokens, "evaluate_fn": lambda step: {"loss": 0.0}}
        train(run, loader, **functions, **planted.get("functions", {}))
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    return run_once


def new_run(tmp_path: Path, name: str = "run", **changes) -> tuple[TrainArgs, Path]:
    """Return arguments of a run, and its output directory, which is there."""
    (out := tmp_path / name).mkdir()
    return replace(ARGS, output_dir=str(out), **changes), out


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def skipped(out: Path) -> list[dict]:
    file = out / "skipped.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rows_of_step(step: int) -> list[int]:
    order = StepOrder(NUM_ROWS, ARGS, 0, 1)
    return order.rows(step - 1)


@pytest.fixture(scope="module")
def reference():
    """Weights at the end of runs without anything planted, by the step whose update they do not make; 0: all are made."""
    return {}


def run_schedule(seed: int, attempt, reference: dict, tmp_path: Path, capsys) -> None:
    """Plant something at random, kill and signal the run at random, and compare its end with the run that it should equal."""
    draw = random.Random(seed)
    planted, kind, step = {}, draw.choice(["poison", "wrong", "flips"]), draw.randrange(FEWEST + 3, STEPS + 1)
    if kind == "flips":
        steps = draw.sample(range(1, STEPS + 1), 2)
        planted["flips"] = {step: draw.choice(["loss", "gradient"]) for step in steps}
    else:
        row = draw.choice(rows_of_step(step))
        planted[kind] = row if kind == "wrong" else {row}
    args, out = new_run(tmp_path, f"run-{seed}")
    flips, said, weights = dict(planted.get("flips", {})), "", None
    ends = [("killed", "signalled")[draw.randrange(2)] for _ in range(draw.randrange(1, 4))]
    for end in [*ends, None]:
        struck = {end: draw.randrange(2 * STEPS)} if end else {}
        try:
            weights = attempt(args, planted, **struck)
        except (Killed, Stopped):
            weights = None
        said += capsys.readouterr().out
        if weights is not None:
            break
    assert weights is not None
    # Attribution: each flip to hardware, once, since it happens once; a row to its step, and to nothing else.
    places = re.findall(r"hardware or a race; (the loss of rank 0 differs|gradients differ)", said)
    wanted = {"loss": "the loss of rank 0 differs", "gradient": "gradients differ"}
    assert sorted(places) == sorted(map(wanted.get, flips.values())), (seed, planted, said)
    found = skipped(out)
    assert [record["step"] for record in found] == ([] if flips else [step]), (seed, planted, said)
    still = step if found else 0
    if found:
        (micro_batches,) = found[0]["micro_batches_of_ranks"]
        rows = [row for micro_batch in micro_batches for row in micro_batch["rows"]]
        assert rows == rows_of_step(step) and row in rows
        assert math.isfinite(float(found[0]["loss"])) == (kind == "wrong")
        assert read_metrics(out)[-2]["skipped_steps"] == 1
    if still not in reference:
        reference[still] = attempt(replace(args, output_dir=str(tmp_path / f"reference-{seed}")), {"still": still})
        assert not skipped(tmp_path / f"reference-{seed}")
    assert equal(weights, reference[still]), (seed, planted)


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(seed, attempt, reference, tmp_path, capsys):
    run_schedule(seed, attempt, reference, tmp_path, capsys)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 200, 5))
def test_a_hundred_random_schedules(first, attempt, reference, tmp_path, capsys):
    for seed in range(first, first + 5):
        run_schedule(seed, attempt, reference, tmp_path, capsys)


def test_a_run_stops_at_a_spike_by_default(attempt, tmp_path):
    """Its rows are named in non_finite.json, and a resume may skip it; the checkpoint has the median's history."""
    wrong = rows_of_step(30)[2]
    args, out = new_run(tmp_path, on_spike="stop")
    said = r"step 30: .*more than 50 robust deviations .* last 29 steps.*checkpoint-24"
    for _ in range(2):
        refuses(said, attempt, args, {"wrong": wrong}, error=NonFiniteError)
    (micro_batches,) = json.loads((out / "non_finite.json").read_text())["micro_batches_of_ranks"]
    assert [row for micro_batch in micro_batches for row in micro_batch["rows"]] == rows_of_step(30)
    attempt(replace(args, on_spike="skip"), {"wrong": wrong})
    assert max(losses(out)) == STEPS and 30 not in losses(out) and skipped(out)[0]["step"] == 30


def test_skips_in_a_row_end_the_run(attempt, tmp_path):
    """As many as one likes; but a run of which no step is applied ends in an error."""
    for most, last in ((3, 3), (15, 15), (1000, STEPS)):
        args, out = new_run(tmp_path, f"{most}", max_skips=most)
        with pytest.raises(NonFiniteError, match=rf"step {last}: .*as in {last - 1} steps before it, which were skip"):
            attempt(args, {"poison": {*range(NUM_ROWS)}})
        assert [record["step"] for record in skipped(out)] == [*range(1, last)]


def test_what_is_drawn_is_judged_by_its_loss_too(attempt, tmp_path):
    """Unless the recipe says that losses are sums around zero; KTO draws, and its losses are not."""
    drawn = {"draw_fn": lambda step, batches: batches}
    for more, found in (({}, [29]), ({"by_norm_alone": True}, [])):
        args, out = new_run(tmp_path, f"{len(more)}")
        attempt(args, {"loud": 29, "functions": drawn | more})
        assert [record["step"] for record in skipped(out)] == found


def test_a_new_run_forgets_what_an_old_one_skipped(attempt, tmp_path):
    args, out = new_run(tmp_path)
    (out / "skipped.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(Killed):
        attempt(args, {}, killed=5)
    assert not skipped(out)


# Replicas


def test_a_checksum_sees_each_bit():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    first = checksums(model, optimizer, torch.device("cpu"))
    assert {"weight", "bias", "exp_avg of weight", "exp_avg_sq of bias", "step of bias"} <= {*first}
    for tensor, name in ((model.weight, "weight"), (optimizer.state[model.bias]["exp_avg"], "exp_avg of bias")):
        bits = tensor.detach().view(torch.int32).flatten()
        for place, bit in itertools.product(range(len(bits)), range(31)):
            bits[place] ^= 1 << bit
            now = checksums(model, optimizer, torch.device("cpu"))
            assert {n for n, value in now.items() if value != first[n]} == {name}
            bits[place] ^= 1 << bit
    assert checksums(model.to(torch.bfloat16), optimizer, torch.device("cpu")).keys() == first.keys()


# Whole launches, of two or more processes


def flip(**planted) -> dict[str, str]:
    return {"TOY_FLIP": json.dumps({"times": 1} | planted)}


DROPOUT = ("--dropout", 0.1)


@pytest.fixture(scope="module")
def undisturbed(forks, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    forks.succeed(out, *DROPOUT)
    return exported(out)


def exported(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "export/model.safetensors")


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_flip_on_one_rank(forks, undisturbed, tmp_path, where):
    """The rank is named only where its loss tells; the weights at the end are those of an undisturbed run."""
    out = tmp_path / "out"
    config = "ddp" if where == "loss" else "fsdp_full"
    verify = ("--verify_replicas", 1) if config == "ddp" else ()  # which finds nothing
    log = forks.succeed(out, *DROPOUT, *verify, config=config, **flip(step=5, rank=1, where=where))
    said = {"loss": "the loss of rank 1 differs", "gradient": "gradients differ"}[where]
    assert log.count("hardware or a race") == 1 and f"hardware or a race; {said} (" in log
    assert [record.get("unstable_steps") for record in read_metrics(out)[1:-1]] == [None] * 4 + [1] * 6
    if config == "fsdp_full":
        assert equal(exported(out), undisturbed)
    else:
        for name, value in exported(out).items():
            torch.testing.assert_close(value, undisturbed[name], rtol=1e-4, atol=1e-6)


def test_a_skipped_step_is_one_that_is_not_made(forks, tmp_path):
    """On two processes, with a row that gives no number."""
    out, other = tmp_path / "skip", tmp_path / "still"
    args = (*DROPOUT, "--num_train_epochs", 1)
    assert forks.run(out, *args, "--on_spike", "skip", TOY_POISON="17") == 0
    (record,) = skipped(out)
    assert 17 in {row for rank in record["micro_batches_of_ranks"] for entry in rank for row in entry["rows"]}
    assert sum(len(entry["rows"]) for rank in record["micro_batches_of_ranks"] for entry in rank) == 8
    forks.succeed(other, *args, TOY_STILL=str(record["step"]))
    made = {step: loss for step, loss in losses(other).items() if step != record["step"]}
    assert equal(exported(out), exported(other)) and losses(out) == made


@pytest.mark.parametrize("config, num_processes, rank, every, found, said", by_mark({
    "": [("ddp", 3, 1, 1, 5, r"the replicas differ: rank 1 \(replica 1\), in model.embed_tokens.weight. It is")],
    "slow": [("fsdp_hybrid", 4, 3, 100, 6, r"rank 1 \(replica 0\), rank 3 \(replica 1\), in .*; no majority tells which of them is right")],
}))  # fmt: skip
def test_a_replica_that_differs_is_named(forks, tmp_path, config, num_processes, rank, every, found, said):
    """Within --verify_replicas steps, and before the next save."""
    out, size = tmp_path / "out", ("--total_batch_size", 2 * num_processes, "--max_steps", 8)
    args, options = ("--verify_replicas", every, *size), {"config": config, "num_processes": num_processes}
    assert forks.run(out, *args, **options, **flip(step=5, rank=rank, where="weight")) == 2
    kept = "No checkpoint is saved. Last good checkpoint: .*checkpoint-3"
    assert re.search(f"step {found}: .*{said}.*{kept}", log_of(out))
    assert not (out / "checkpoint-6").exists()
