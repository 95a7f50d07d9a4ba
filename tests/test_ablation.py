"""Tests of the ablation: its search, its file, its tables; and launches that really run out of memory."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import ablation
import pytest
from ablation_trial import covered, longest_batch
from helpers import CHILDREN, ROOT, environment, refuses

pytestmark = pytest.mark.long
MACHINE = {"device": "a CPU", "cores": 2, "load_average": 1.0, "versions": {"torch": "2.13.0"}}
RANK = {
    "machine": MACHINE, "model": "t5", "num_parameters": 3_000_000_000, "num_processes": 2, "device_type": "cpu",
    "tokens_per_second": 100.0, "tflops_per_device": 0.5, "step_seconds": [1.0], "peak_memory_gib": 0.5,
    "parameter_bytes": 25 << 20, "gradient_bytes": 25 << 20, "optimizer_bytes": 50 << 20, "whole_bytes": 200 << 20,
    "communication_share": 0.25,
}  # fmt: skip
LOST = {"outcome": "failed", "failed_at": 1.0, "reason": "RuntimeError: Connection closed by peer"}
NO_MEMORY = {"outcome": "out of memory", "failed_at": 2.0, "reason": "RuntimeError: can't allocate memory"}
FITS = ablation.outcome([RANK, RANK], "", 0)
OUT = {"outcome": "out of memory", "reason": "no memory"}
REASON = "This run cannot start:\n  - 2 x 2 | 4 processes; launch more\n  - another problem"
CANNOT = {"outcome": "cannot run", "reason": REASON}


@pytest.mark.parametrize("tolerance", [0.0, 0.25])
def test_search(tolerance):
    """The largest is found for any limit and start; no size is tried twice or beyond the limit."""
    for limit in range(1, 34):
        for largest in range(limit + 1):
            for start in (1, 5, 40):
                asked = []
                found = ablation.largest_fitting(
                    lambda size, asked=asked, largest=largest: asked.append(size) or size <= largest,
                    limit,
                    start,
                    tolerance,
                )
                assert found <= largest < found + max(1, tolerance * found) + 1e-9
                assert len(asked) == len(set(asked)) <= 11 and min(asked) >= 1 and max(asked) <= limit
                assert found in (0, *asked)


class Machine:
    """Replacement of `ablation.launch`, in which the option's config and the batch decide what fits."""

    def __init__(self, monkeypatch, dies_at: int = -1):
        self.launched: list[list[str]] = []
        self.dies_at = dies_at
        monkeypatch.setattr(ablation, "launch", self.launch)

    def launch(self, command: list[str], seconds: float, memory_gib: float) -> dict:
        if len(self.launched) == self.dies_at:
            raise KeyboardInterrupt
        self.launched.append(command)
        config = Path(command[command.index("--config_file") + 1]).stem
        batch = int(command[command.index("--per_device_train_batch_size") + 1])
        if config == "fsdp_hybrid":
            return CANNOT
        if batch > {"ddp": 0, "fsdp_full": 6, "fsdp_no_wrap": 3}[config]:
            # The same size may fail with another message.
            return {"outcome": "failed", "reason": "no primitive"} if config == "fsdp_no_wrap" else OUT
        return FITS | {"tokens_per_second": 100.0 * batch + 10 * (len(self.launched) % 3)}


OPTIONS = ("full shard", "DDP", "hybrid shard", "no wrapping")


def run(monkeypatch, out: Path, *arguments: str, rounds: int = 2, options=OPTIONS):
    words = ["ablation.py", "--out", str(out), "--memory_gib", "1", "--num_processes", "2", "--rounds", str(rounds)]
    monkeypatch.setattr(sys, "argv", [*words, "--options", *options, "--", "recipes/t5.py", *arguments])
    ablation.main()
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_nothing_is_launched_twice(monkeypatch, tmp_path, capsys):
    whole = Machine(monkeypatch)
    records = run(monkeypatch, tmp_path / "whole")
    assert [shlex.split(record["command"]) for record in records] == whole.launched
    table = (tmp_path / "whole/table.md").read_text()

    first = Machine(monkeypatch, dies_at=5)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path / "ended")
    assert len(first.launched) == 5
    second = Machine(monkeypatch)
    run(monkeypatch, tmp_path / "ended")
    assert first.launched + second.launched == whole.launched
    third = Machine(monkeypatch)
    run(monkeypatch, tmp_path / "whole")
    assert third.launched == [] and (tmp_path / "whole/table.md").read_text() == table

    refuses("another --out", run, monkeypatch, tmp_path / "whole", "--seed", "1", error=SystemExit)


def test_tables_and_plots(monkeypatch, tmp_path, capsys):
    """Every number comes from a line of results.jsonl; every empty cell has a reason."""
    Machine(monkeypatch)
    records = run(monkeypatch, tmp_path)
    table = (tmp_path / "table.md").read_text()
    measured = {  # the faster of two rounds, at the largest batch
        name: max(
            r["tokens_per_second"] for r in records if (r["option"], r["batch"], r["outcome"]) == (name, batch, "fits")
        )
        for name, batch in (("full shard", 6), ("no wrapping", 3))
    }
    assert sum((r["option"], r["batch"]) == ("full shard", 6) for r in records) == 2
    assert f"| full shard | 6 (not 7) | {measured['full shard']:,.0f} | 0.5 | 0.500 | 25% |  |" in table
    ratio = measured["full shard"] / measured["no wrapping"]
    assert f"| Transformer wrapping policy, against none | t5 3B | {ratio:.2f}x | 3 -> 6 |  |" in table
    assert "| DDP |  |  |  |  |  | out of memory with a batch of 1: no memory |" in table
    assert "| Full shard, against DDP | t5 3B |  |  | DDP: out of memory with a batch of 1: no memory |" in table
    assert "| hybrid shard |  |  |  |  |  | 2 x 2 \\| 4 processes |" in table
    assert "| full shard | 25.0 | 25.0 | 50.0 | 100.0 | 1.000 |  |" in table
    assert "| FSDP1 |  |  |  |  |  | not chosen |" in table
    assert "**2 CPU cores, gloo: shows that it works, not what a GPU does.**" in table
    speeds = [r["tokens_per_second"] for r in records if (r["option"], r["batch"]) == ("full shard", 6)]
    assert f"differ by up to {max(speeds) / min(speeds):.2f}x" in table
    for name in ("throughput.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_fastest_round_at_the_batch_that_always_fits():
    lines = [(8, 1, 80), (16, 1, 160), (16, 2, None), (12, 1, 100), (12, 2, 120), (12, 3, 110), (32, 1, None)]
    records = [
        {"option": "DDP", "batch": batch, "round": number} | (FITS | {"tokens_per_second": speed} if speed else OUT)
        for batch, number, speed in lines
    ]
    for order in (records, records[::-1]):
        found = ablation.best("DDP", order)
        assert (found["batch"], found["tokens_per_second"]) == (12, 120)
    assert ablation.best("FSDP1", records) == {"reason": "not launched yet"}


@pytest.mark.parametrize("ranks, log, memory_gib, wanted", [
    ([RANK, RANK], "", 0, ("fits", None)),
    ([RANK, LOST], "", 0, ("failed", LOST["reason"])),
    ([LOST, NO_MEMORY], "", 0, ("out of memory", NO_MEMORY["reason"])),
    ([LOST | {"reason": "second", "failed_at": 2.0}, LOST], "", 1, ("failed", LOST["reason"])),
    ([], "Root Cause\n exitcode  : -6 (pid: 7)", 1, ("out of memory", "killed by SIGABRT")),
    ([], "Root Cause\n exitcode  : -6 (pid: 7)", 0, ("failed", "killed by SIGABRT")),
    ([], "Root Cause\n exitcode  : -9 (pid: 7)", 0, ("out of memory", "killed by SIGKILL")),
    ([], "usage:\nno such flag", 0, ("failed", "no such flag")),
])  # fmt: skip
def test_outcome(ranks, log, memory_gib, wanted):
    found = ablation.outcome(ranks, log, memory_gib)
    assert (found["outcome"], found.get("reason") if found["outcome"] != "fits" else None) == wanted


def test_a_profile_that_fails_leaves_its_cell_empty():
    without = {name: value for name, value in RANK.items() if name != "communication_share"}
    for ranks in ([RANK, without | {"profile_failed": "why"}], [without | {"profile_failed": "why"}, without]):
        found = ablation.outcome(ranks, "", 0)
        assert found["outcome"] == "fits" and found["communication_share"] is None
        assert found["communication_reason"] == "the profiled step failed: why"


def test_time_under_way():
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4 and covered([]) == 0


def test_longest_rows_come_first():
    import numpy as np
    import torch

    class Loader:
        class batch_sampler:
            lengths = np.array([3, 9, 1, 7])

        dataset = torch.arange(4)
        collate_fn = staticmethod(torch.stack)

    assert longest_batch(Loader, 2).tolist() == [1, 3]
    assert longest_batch(Loader, 6).tolist() == [1, 3, 0, 2, 1, 3]
    assert longest_batch(object(), 2) is None


TOY = [str(CHILDREN / "toy.py"), "--hidden_size", "256"]


@pytest.fixture
def like_a_user(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN), prepend=os.pathsep)  # what the toy imports


def test_ablation(like_a_user, tmp_path):
    """A whole ablation finds a batch between one that fits and one that does not; DDP holds the whole model's bytes.

    Fully sharded, each of 2 ranks holds parameters, gradients and optimizer within 5 % of half of 16 bytes a parameter.
    """
    command = [sys.executable, "benchmarks/ablation.py", "--out", str(tmp_path), "--num_processes", "2", "--steps", "2"]
    command += ["--memory_gib", "0.125", "--first_batch", "64", "--tolerance", "1"]
    command += ["--options", "full shard", "DDP", "hybrid shard", "--", *TOY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    best = {name: ablation.best(name, records) for name in ("full shard", "DDP", "hybrid shard")}
    for name in ("full shard", "DDP"):
        assert {r["outcome"] for r in records if r["option"] == name} == {"fits", "out of memory"}
        assert best[name]["batch"] > 1 and best[name]["machine"]["versions"]["torch"]
    whole = sum(best["DDP"][part][0] for part in ablation.STATE)
    assert whole == best["DDP"]["whole_bytes"] == pytest.approx(best["full shard"]["whole_bytes"], rel=1e-3)
    found = best["full shard"]
    assert found["whole_bytes"] == pytest.approx(16 * found["num_parameters"], rel=1e-3)
    for rank in range(2):
        held = [found[part][rank] for part in ablation.STATE]
        assert sum(held) == pytest.approx(8 * found["num_parameters"], rel=0.05)
        assert held[0] == held[1] == pytest.approx(2 * found["num_parameters"], rel=0.05)
    assert found["tflops_per_device"] is None, "the recipe counts no FLOPs"
    assert len(found["step_seconds"]) == 2 and 0 < found["communication_share"] < 1
    assert 0 < max(found["peak_memory_gib"]) < 0.125
    assert "2 replicas x 2 shards = 4 processes, but 2 " in best["hybrid shard"]["reason"]
    assert (tmp_path / "memory.png").exists() and "| hybrid shard |" in done.stdout
