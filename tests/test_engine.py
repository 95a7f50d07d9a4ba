"""Tests of a step: arithmetic compared with transformers.Trainer, log, and what happens to values that are not finite."""

import itertools
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers import refuses
from tiny import tiny_config
from transformers import Trainer, TrainingArguments

from accelerate_recipes import agenda as agenda_module
from accelerate_recipes import engine, metrics, upstream
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.packing import PackedRows
from accelerate_recipes.data.rows import StepLoader, StepOrder, make_train_loader
from accelerate_recipes.engine import evaluate_loss, to_device, train, train_step
from accelerate_recipes.errors import DataError, NonFiniteError
from accelerate_recipes.life import stop, watch
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.run import Run

ARGS = TrainArgs(
    total_batch_size=8, per_device_train_batch_size=4, max_steps=5, learning_rate=1e-2, warmup_steps=2, weight_decay=0.1
)


def make_model():
    model = new_model(tiny_config(num_key_value_heads=4, max_position_embeddings=32), "sdpa")
    return initialize(model, 0, "cpu")


def make_rows() -> PackedRows:
    generator = np.random.default_rng(0)
    lengths = [generator.integers(2, 9, size=generator.integers(1, 5)).tolist() for _ in range(50)]
    rows = {"input_ids": [generator.integers(4, 100, size=sum(n)).tolist() for n in lengths], "lengths": lengths}
    return PackedRows(Dataset.from_dict(rows), 32, 0, document_mask=True)


def make_run(args: TrainArgs) -> Run:
    run = Run(args, Accelerator(cpu=True))
    run.shard(make_model())
    return run


def our_losses() -> list[float]:
    run = make_run(ARGS)
    scheduler = make_scheduler(run.optimizer, ARGS, ARGS.max_steps)
    batches = iter(make_train_loader(make_rows(), ARGS, 0, 1))
    found = []
    for _ in range(ARGS.max_steps):
        micro = [next(batches), next(batches)]
        done = train_step(run, micro, next_token_loss, count_next_tokens)
        scheduler.step()
        found.append(done.loss)
    return found


def trainer_losses(tmp_path) -> list[float]:
    """Return the Trainer's losses on the same rows in the same order, with two micro-batches a step."""
    rows = make_rows()
    order = [row for micro, _ in zip(StepOrder(len(rows), ARGS, 0, 1), range(10), strict=False) for row in micro]
    found = []

    class Recorder(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            found.append(loss.item())  # of a micro-batch; they add up to the step's
            return loss

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=5,
        learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, lr_scheduler_type="cosine", adam_beta2=0.95,
        max_grad_norm=1.0, optim="adamw_torch_fused", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Recorder(make_model(), arguments, train_dataset=torch.utils.data.Subset(rows, order)).train()
    return [a + b for a, b in zip(found[::2], found[1::2], strict=True)]


def test_five_losses_are_those_of_trainer(tmp_path):
    assert our_losses() == pytest.approx(trainer_losses(tmp_path), rel=1e-5)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train for 5 steps with a checkpointer that saves nothing; return the log of the steps, and what was due when.

    `evaluated` are batches for each evaluation.
    """
    monkeypatch.setattr(stop, "listen", lambda output_dir: None)

    def train_with(
        resumed_at: int = 0, count_fn=count_next_tokens, evaluated: list[dict] | None = None, **changes
    ) -> tuple[list[dict], list[tuple]]:
        done = []
        args = replace(ARGS, output_dir=str(tmp_path / str(changes)), **changes)
        run = make_run(args)
        run.total_steps, run.flops = args.max_steps, metrics.Flops(1e6)
        run.scheduler = make_scheduler(run.optimizer, args, args.max_steps)
        run.checkpointer = SimpleNamespace(
            args=args, accelerator=run.accelerator, resumed_from=None, newest=None, data_states=[], resume=lambda: resumed_at,
            save=lambda step, data_state: done.append(("save", step)), wait=lambda: None,
        )  # fmt: skip

        def evaluate_fn(step: int) -> dict[str, float]:
            done.append(("evaluate", step))
            if evaluated:
                evaluate_loss(run.accelerator, run.model, evaluated, next_token_loss, count_next_tokens)
            return {"loss": 0.0}

        functions = {"loss_fn": next_token_loss, "count_fn": count_fn, "evaluate_fn": evaluate_fn}
        records = train(run, make_train_loader(make_rows(), args, 0, 1), **functions)
        return [record for record in records if "loss" in record], done

    return train_with


def test_a_finished_run_keeps_its_arguments(run, tmp_path, capsys):
    """Another learning rate in the folder of a finished run trains nothing: the run says so, and args.yaml stays true."""
    changes = {"learning_rate": 0.5}
    saved = tmp_path / str(changes) / "args.yaml"
    saved.parent.mkdir()
    saved.write_text("learning_rate: 0.1\n")
    run(resumed_at=5, **changes)
    assert saved.read_text() == "learning_rate: 0.1\n"
    assert re.search("All 5 steps are done.* --output_dir", capsys.readouterr().out)
    run(resumed_at=4, **changes)
    assert "learning_rate: 0.5\n" in saved.read_text() and "nothing is trained" not in capsys.readouterr().out


def test_what_is_due_at_a_step(run):
    """Evaluations come before the first step, every `eval_steps` and after the last step; a save follows its evaluation."""
    records, done = run(logging_steps=3, eval_steps=2, save_steps=4)
    assert [record["step"] for record in records] == [3, 5]
    assert done == [("evaluate", 0), ("evaluate", 2), ("evaluate", 4), ("save", 4), ("evaluate", 5), ("save", 5)]
    _, done = run(eval_steps=0, save_steps=0)
    assert done == [("evaluate", 0), ("evaluate", 5), ("save", 5)]
    _, done = run(eval_steps=1, save_steps=1)
    assert [step for kind, step in done if kind == "evaluate"] == [0, 1, 2, 3, 4, 5]
    assert [step for kind, step in done if kind == "save"] == [1, 2, 3, 4, 5]
    _, done = run(resumed_at=3, eval_steps=2, save_steps=0)
    assert done == [("evaluate", 4), ("evaluate", 5), ("save", 5)]
    _, done = run(resumed_at=4, eval_steps=2, save_steps=0)  # stopped before its evaluation
    assert done == [("evaluate", 4), ("evaluate", 5), ("save", 5)]


@pytest.mark.parametrize("forgets", [True, False])
def test_an_evaluation_leaves_the_sizes_of_training_constant(run, monkeypatch, forgets):
    """Compiled layers have no symbolic sizes, though rows are evaluated one by one. When it holds for the second case too,
    upstream no longer needs the workaround."""
    graphs = []

    def note(graph: torch.fx.GraphModule, inputs: list):
        if torch.is_grad_enabled():
            sizes = [node.meta.get("example_value") for node in graph.graph.nodes]
            graphs.append([size for size in sizes if isinstance(size, torch.SymInt)])
        return graph.forward

    def compiled_model():
        model = make_model()
        for layer in model.model.layers:
            layer.compile(backend=note)
        return model

    make_model = globals()["make_model"]
    monkeypatch.setitem(globals(), "make_model", compiled_model)
    monkeypatch.setattr(upstream, "is_compiled", lambda: forgets)
    torch._dynamo.reset()
    run(evaluated=[torch.utils.data.default_collate([make_rows()[0]])], eval_steps=2)
    torch._dynamo.reset()
    assert graphs and any(graphs) != forgets


def test_what_the_watch_expects(run, monkeypatch):
    """The first step may take --ddp_timeout, others as much as the first suggests; waiting for data allows retries."""
    expected = []
    monkeypatch.setattr(watch, "expect", lambda what, seconds, done=None: expected.append((what, seconds, done)))
    monkeypatch.setattr(StepLoader, "counts", lambda self: {"retries": 7})
    monkeypatch.setattr(stop, "step_took", lambda seconds: None)
    run(ddp_timeout=300, step_timeout=300)  # equal limits: they do not tell whether the first step is over
    waits = [(what, progress()) for what, _, progress in expected if what.startswith("the data")]
    assert waits == [(f"the data of step {step}", 7) for step in range(1, 6)]
    run(ddp_timeout=1800, step_timeout=100)
    limits = {what: seconds for what, seconds, _ in expected}
    assert limits["the data of step 1"] == limits["step 1"] == limits["what follows step 3"] == 1800
    assert {limits[f"step {step}"] for step in range(2, 6)} == {100}
    assert limits["what follows training"] == float("inf")


def test_each_batch_of_an_evaluation_has_its_own_time(run, monkeypatch):
    """An evaluation of hours is no hang as long as it gets on; the save after it has its own time too."""
    expected, seen = [("the start", None)], []

    def requested():
        what, progress = expected[-1]
        if progress and what.startswith("the evaluation"):
            seen.append((what, progress()))

    monkeypatch.setattr(watch, "expect", lambda what, seconds, progress=None: expected.append((what, progress)))
    monkeypatch.setattr(stop, "requested", requested)
    monkeypatch.setattr(stop, "step_took", lambda seconds: None)
    rows = make_rows()
    run(evaluated=[torch.utils.data.default_collate([rows[number]]) for number in range(3)], eval_steps=4)
    assert [what for what, _ in seen] == ["the evaluation after step 4"] * 3 + ["the evaluation after step 5"] * 3
    assert len(set(seen)) == 6
    assert [what for what, _ in expected[-3:]] == [
        "the evaluation after step 5", "what follows step 5", "what follows training",
    ]  # fmt: skip


def test_observers_are_told_what_has_happened(run, monkeypatch):
    """Each moment, in order, with the step or the log's records; one that fails at all of them is a warning, and the next is told."""
    told = []

    class Recorder(agenda_module.Observer):
        def evaluated(self, records):
            told.append(("evaluated", records[-1]["step"]))

    class Broken(agenda_module.Observer):
        def began(self, value):
            raise OSError("no room")

        completed = evaluated = ended = began

    for moment in ("began", "completed", "ended"):
        setattr(Recorder, moment, lambda self, step, moment=moment: told.append((moment, step)))
    monkeypatch.setattr(agenda_module, "observers", [Broken(), Recorder()])
    with pytest.warns(UserWarning, match="Broken failed: OSError: no room"):
        _, done = run(eval_steps=2, max_steps=3)
    steps = [("completed", 1), ("completed", 2), ("evaluated", 2), ("completed", 3), ("evaluated", 3), ("ended", 3)]
    assert told == [("evaluated", 0), ("began", 0), *steps]
    assert ("save", 3) in done


def test_a_slow_first_step_raises_the_limit_once(monkeypatch):
    monkeypatch.setattr(stop, "step_took", lambda seconds: None)
    agenda = agenda_module.Agenda.__new__(agenda_module.Agenda)
    agenda.step_timeout = None
    agenda.args = replace(ARGS, ddp_timeout=300, step_timeout=300)
    agenda.log = SimpleNamespace(completed=lambda step: None)
    limits = []
    for seconds in (100.0, 1000.0, 1.0):
        agenda.completed(1, seconds, wants_save=False, wants_stop=False)
        limits.append(agenda.step_timeout)
    assert limits == [400, 400, 400]


def test_every_target_counts_in_the_log(run, monkeypatch, capsys):
    """Mean loss, tokens/s and MFU are right for one step and for several with unequal numbers of targets."""
    monkeypatch.setattr(metrics, "bf16_peak", lambda name: 1e9)
    batches = itertools.islice(make_train_loader(make_rows(), ARGS, 0, 1), 2 * ARGS.max_steps)
    micro = [count_next_tokens(batch).item() for batch in batches]
    counts = np.add(micro[::2], micro[1::2])
    assert len(set(counts)) > 2, "the steps must differ"
    steps, _ = run(logging_steps=1)
    step_losses = np.array([record["loss"] for record in steps])
    capsys.readouterr()
    windows, _ = run(logging_steps=2)
    assert [record["step"] for record in windows] == [2, 4, 5]

    for records in (steps, windows):
        first = 0
        for record in records:
            of = slice(first, record["step"])
            assert record["loss"] == pytest.approx(np.average(step_losses[of], weights=counts[of]), rel=1e-6)
            samples = ARGS.total_batch_size * len(counts[of])
            targets = record["tokens_per_second"] / record["samples_per_second"] * samples
            assert targets == pytest.approx(counts[of].sum(), rel=1e-9)
            assert record["mfu"] == pytest.approx(1e6 * record["tokens_per_second"] / 1e9, rel=1e-9)
            first = record["step"]
    of_two = np.average(step_losses[:2], weights=counts[:2])
    assert of_two != pytest.approx(step_losses[:2].mean(), rel=1e-6), "a mean of means would pass"
    lines = re.findall(r"Loss: (\S+), .* (\d+) tokens/sec, .*MFU: (\S+),", capsys.readouterr().out)
    assert lines == [(f"{r['loss']:.5f}", f"{r['tokens_per_second']:.0f}", f"{r['mfu']:.3f}") for r in windows]


@pytest.mark.parametrize("due", [{}, {"eval_steps": 1}, {"save_steps": 1}], ids=["log", "evaluation", "save"])
def test_the_logged_speed_counts_what_the_device_still_does(run, monkeypatch, due):
    """A GPU still updates the weights when `train_step` is back; the next reading waits for it, as that of the norm here."""
    waits = []

    def wait() -> float:
        waits.append(0.1)
        time.sleep(0.1)
        return 1.0

    norm = SimpleNamespace(item=wait)
    monkeypatch.setattr(engine, "train_step", lambda *args: train_step(*args)._replace(grad_norm=norm))
    records, _ = run(logging_steps=5, **due)
    assert len(waits) == (5 if due else 1), "a step that only the next step follows does not wait"
    assert 5 * ARGS.total_batch_size / records[-1]["samples_per_second"] >= sum(waits)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_the_weights(poison):
    run = make_run(ARGS)
    before = [p.detach().clone() for p in run.model.parameters()]
    batch = torch.utils.data.default_collate([make_rows()[i] for i in range(4)])

    def loss_fn(model, batch):
        loss = next_token_loss(model, batch)
        if poison == "loss":
            return loss * float("inf")
        loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    refuses(r"inf|nan", train_step, run, [batch], loss_fn, count_next_tokens, error=NonFiniteError)
    for parameter, old in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def without_targets(batch: dict) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def test_a_step_without_targets_leaves_the_weights():
    """Neither weight decay nor the optimizer's memory of earlier steps changes them."""
    run = make_run(ARGS)
    micro = [next(iter(make_train_loader(make_rows(), ARGS, 0, 1)))]
    for count_fn, is_trained in ((count_next_tokens, True), (without_targets, False)):
        before = [parameter.clone() for parameter in run.model.parameters()]
        train_step(run, micro, lambda *some, n=is_trained: next_token_loss(*some) * n, count_fn)
        is_same = [torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True)]
        assert not any(is_same) if is_trained else all(is_same)


@pytest.mark.parametrize("idle, logging_steps", [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_steps_without_targets(run, monkeypatch, idle, logging_steps):
    """Some are left out, and their log line has no loss; many in a row, or all, end the run."""
    monkeypatch.setattr(agenda_module, "MOST_IDLE", 4)
    left = [idle * 2]  # micro-batches

    def count_fn(batch):
        left[0] -= 1
        return count_next_tokens(batch) * (left[0] < 0)

    if idle == 5:
        with pytest.raises(DataError, match=r"no row of the steps 1 to 4 has a target"):
            run(logging_steps=logging_steps, count_fn=count_fn)
        return
    records, _ = run(logging_steps=logging_steps, count_fn=count_fn)
    assert [record["step"] for record in records] == [4, 5]
    assert all(np.isfinite(record["loss"]) for record in records)
    with pytest.raises(DataError, match="no row to evaluate on has a target"):
        evaluate_loss(Accelerator(cpu=True), make_model(), [], next_token_loss, count_next_tokens)


def test_evaluation_weights_tokens_and_skips_empty_rows():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    rows = make_rows()
    one_by_one = [torch.utils.data.default_collate([rows[i]]) for i in range(20)]
    together = torch.utils.data.default_collate([rows[i] for i in [*range(20), -1, -1]])

    def loss_fn(model, batch):
        assert not torch.is_grad_enabled(), "it keeps nothing for gradients"
        return next_token_loss(model, batch)

    functions = (loss_fn, count_next_tokens)
    together, apart = (evaluate_loss(accelerator, model, b, *functions) for b in ([together], one_by_one))
    assert together == pytest.approx(apart, rel=1e-6)
    assert model.training and torch.is_grad_enabled()


def test_tensors_of_a_batch_go_to_the_device():
    batch = to_device({"input_ids": torch.ones(2), "max_length": 2}, torch.device("meta"))
    assert batch["input_ids"].is_meta and batch["max_length"] == 2


@pytest.mark.parametrize("limit", [float("nan"), -1.0, float("inf")])
def test_a_limit_of_the_norm_that_is_none_changes_no_weight(limit):
    """A limit that is NaN, negative or infinite is refused: loss and norm would be finite, clipped gradients might not be."""
    run = make_run(replace(ARGS, max_grad_norm=limit))
    before = [parameter.clone() for parameter in run.model.parameters()]
    micro = [next(iter(make_train_loader(make_rows(), ARGS, 0, 1)))]
    with pytest.raises(AssertionError):
        train_step(run, micro, next_token_loss, count_next_tokens)
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))
