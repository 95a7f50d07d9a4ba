"""Tests that the order of the rows in every epoch of trl's trainers follows from (seed, epoch) alone.

The total batch does not divide the rows, nor do the micro-batches of a rank make whole steps of what is left over.
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from conversations import save_base_of_sums
from helpers import ROOT, TIMES, log_of, losses, read_metrics, write_rows

SCRIPT = ROOT / "recipes/sft.py"
DPO, GRPO = ROOT / "recipes/dpo.py", ROOT / "recipes/grpo.py"
NUM_ROWS, BATCH, STEPS = 41, 12, 8  # 3 steps in an epoch, and 5 rows left over; the third epoch begins with step 7
# Strategy, processes and micro-batch: a step has 6, 3 and 1 micro-batches on a process.
RUNS = {"one": ("single", 1, 2), "two": ("fsdp_full", 2, 2), "three": ("ddp", 3, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a base, and with files of rows for each recipe, of which no two have the same length and content."""
    folder = tmp_path_factory.mktemp("epochs")
    save_base_of_sums(folder / "base", max_position_embeddings=64, pad_token_id=None)
    chance = random.Random(0)

    def digits() -> str:
        return "".join(chance.choices("0123456789", k=chance.randint(1, 20)))

    for name, number in (("train", NUM_ROWS), ("test", 8)):
        rows = [
            {"text": digits(), "prompt": f"{i}+{digits()}=", "chosen": digits() + "1", "rejected": digits() + "2"}
            for i in range(number)
        ]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def arguments(folder) -> tuple:
    return (
        "--model_name_or_path", folder / "base", "--train_files", folder / "train.jsonl", "--eval_files",
        folder / "test.jsonl", "--max_steps", STEPS, "--save_steps", 1, "--save_total_limit", 0, "--logging_steps", 1,
        "--learning_rate", 1e-2, "--total_batch_size", BATCH, "--per_device_eval_batch_size", 4, "--async_save", "false",
    )  # fmt: skip


def train(forks, out: Path, name: str, *args: object, begin: Path | None = None, **options: object) -> dict[int, float]:
    """Train as RUNS says, from a copy of the checkpoint `begin` if it is given; returns the losses of all steps.

    Only a whole run on two processes saves.
    """
    config, num_processes, batch = RUNS[name]
    os.utime(args[args.index("--train_files") + 1])  # so that a run finds nothing in a cache that another one computed
    if begin:
        out.mkdir(parents=True)
        shutil.copytree(begin, out / begin.name)
    args = (*args, "--per_device_train_batch_size", batch, *(("--save_steps", 0) if begin or name != "two" else ()))
    forks.succeed(out, *args, config=config, num_processes=num_processes, **options)
    assert begin is None or f"{begin.name} (step " in log_of(out)
    assert [*losses(out)] == [*range(1, STEPS + 1)]
    return losses(out)


def numbers(out: Path) -> list[float]:
    """Return norms of the gradients, targets of a row in each step, and losses of the evaluations."""
    steps = [record for record in read_metrics(out) if "loss" in record]
    norms = [record["grad_norm"] for record in steps]
    targets = [record["tokens_per_second"] / record["samples_per_second"] for record in steps]
    return [*norms, *targets, *(record["eval_loss"] for record in read_metrics(out) if "eval_loss" in record)]


@pytest.mark.parametrize("script", [SCRIPT, pytest.param(DPO, marks=pytest.mark.slow)], ids=["sft", "dpo"])
def test_one_order_of_rows(forks, arguments, tmp_path, script):
    """Each step has the same rows on any number of processes, past the ends of two epochs, and after any resume.

    So it has the same arithmetic, also where the output layer is sharded, and a loss reads it without calling it.
    """
    found = {name: train(forks, tmp_path / name, name, *arguments, script=script) for name in RUNS}
    # In the middle of the first epoch, at its end, and in the middle of the second.
    for step, name in ((2, "three"), (3, "one"), (5, "two")):
        out, begin = tmp_path / f"{name}-{step}", tmp_path / "two" / f"checkpoint-{step}"
        found[out.name] = train(forks, out, name, *arguments, begin=begin, script=script)
        assert name != "two" or found[out.name] == found["two"]
    for name, values in found.items():
        assert values == pytest.approx(found["one"], rel=1e-5), name
        assert numbers(tmp_path / name) == pytest.approx(numbers(tmp_path / "one"), rel=1e-5), name


@pytest.fixture(scope="module")
def grpo_arguments(arguments, folder) -> tuple:
    """Arguments of GRPO, with as many prompts in a step as other recipes have rows."""
    rewards = folder / "rewards.py"
    rewards.write_text("def ones(completions, **columns):\n    return [text.count('1') for text in completions]\n")
    sizes = (
        "--num_generations", 2, "--total_batch_size", 2 * BATCH, "--num_samples", 2 * BATCH, "--num_eval_prompts", 4,
    )  # fmt: skip
    return (*arguments, *sizes, "--max_completion_length", 6, "--rewards", f"{rewards}:ones")


def prompts(out: Path) -> dict[int, list[str]]:
    """Return the prompts of each step in which answers were drawn."""
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    drawn = [row for row in rows if row["source"] == "drawn in training"]
    steps = sorted({row["step"] for row in drawn})
    return {step: sorted(row["prompt"] for row in drawn if row["step"] == step) for step in steps}


def test_one_order_of_prompts(forks, grpo_arguments, tmp_path):
    """Each step of GRPO has the same prompts and answers on any number of processes, and trains on them alike."""
    whole, again, three = (tmp_path / name for name in ("whole", "again", "three"))
    train(forks, whole, "two", *grpo_arguments, script=GRPO)
    wanted = prompts(whole)
    assert all(len({*asked}) == BATCH for asked in wanted.values())
    assert len({tuple(asked) for asked in wanted.values()}) == STEPS
    for out, name, step in ((again, "two", 5), (three, "three", 4)):
        train(forks, out, name, *grpo_arguments, begin=whole / f"checkpoint-{step}", script=GRPO)
        assert prompts(out) == {number: wanted[number] for number in range(step + 1, STEPS + 1)}
    assert losses(three) == pytest.approx(losses(whole), rel=1e-5)
    for record, other in zip(read_metrics(whole), read_metrics(again), strict=True):
        assert {name for name in record if record[name] != other[name]} <= TIMES, record["step"]


@pytest.mark.slow
def test_a_stop_between_two_draws(forks, grpo_arguments, tmp_path):
    """After a stop between two draws of answers, the prompts are asked in the same steps as without it."""
    args = (*grpo_arguments, "--num_iterations", 2, "--save_steps", 0)
    whole, out = tmp_path / "whole" / "out", tmp_path / "stopped" / "out"
    for folder in (whole, out):
        folder.parent.mkdir()
    # The run ends after step 5, the first of two on the same answers.
    stop = {"event": "open", "path": "/out/metrics.jsonl", "count": 7, "rank": 0, "command": "kill -TERM $PPID"}
    train(forks, whole, "two", *args, script=GRPO)
    config, num_processes, batch = RUNS["two"]
    size = ("--per_device_train_batch_size", batch)
    options = {"script": GRPO, "config": config, "num_processes": num_processes, "TOY_FAULT": json.dumps(stop)}
    forks.succeed(out, *args, *size, **options)
    assert json.loads((out / "status.json").read_text())["step"] == 5
    train(forks, out, "two", *args, script=GRPO)
    assert prompts(out) == prompts(whole)
