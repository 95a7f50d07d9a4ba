"""Tests of `doctor`: what it finds on a machine, and that each proof passes here and fails under planted faults."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ROOT

from accelerate_recipes.doctor import proofs
from accelerate_recipes.doctor.card import write_card
from accelerate_recipes.doctor.proofs import Runs, prove


class Fault(NamedTuple):
    """A change of the library's source that a proof must notice."""

    proof: str
    module: str
    old: str
    new: str
    config: str = "fsdp_full"  # the strategy under which the trajectory shows it


FAULTS = {
    "each micro-batch is divided by its own targets": Fault(
        "trajectory", "engine", "(loss * scale).sum()", "(loss / count_fn(batch).clamp(min=1) / len(micro_batches)).sum()"
    ),
    "the logged loss is one rank's": Fault(
        "trajectory", "engine", "loss_sums = sum_over_ranks(torch.stack(micro_losses).sum(0))", "loss_sums = torch.stack(micro_losses).sum(0)"
    ),
    "gradients are an average over the ranks": Fault(
        "trajectory", "engine", "scale = accelerator.num_processes / num", "scale = 1 / num"
    ),
    "clipping by the norm of one rank's shards": Fault(
        "trajectory", "distributed", "norm.full_tensor() if", "norm.to_local() if"
    ),
    "DDP never reduces": Fault(
        "trajectory", "distributed", "contextlib.nullcontext() if is_last else accelerator.no_sync(model)", "accelerator.no_sync(model)", "ddp"
    ),
    "gradients are summed in bf16": Fault(
        "trajectory", "distributed", '"reduce_dtype": DTYPES[args.reduce_dtype]', '"reduce_dtype": torch.bfloat16'
    ),
    "all ranks read the same rows": Fault(
        "trajectory", "data/rows", "rows[self.rank * share : (self.rank + 1) * share]", "rows[:share]"
    ),
    "the order depends on the number of ranks": Fault(
        "trajectory", "data/rows", "return permutation(num_rows, seed, epoch)\n\n    def share", "return permutation(num_rows, seed + self.world_size, epoch)\n\n    def share"
    ),
    "first weights depend on the number of ranks": Fault(
        "trajectory", "distributed", "set_seed(args.seed)", "set_seed(args.seed + accelerator.num_processes)"
    ),
    "a shared row loses the target at its seam": Fault(
        "trajectory", "sequence", 'labels[:, start : start + length + 1]', 'torch.cat([labels[:, start : start + length], torch.full_like(labels[:, :1], IGNORE_INDEX)], 1)', "fsdp_long"
    ),
    "the optimizer begins anew": Fault(
        "resume", "checkpoint/checkpointer", 'optim_state_dict=state["optimizer"]', "optim_state_dict=get_state_dict(self.model, self.optimizer)[1]"
    ),
    "the weights are not read": Fault(
        "resume", "checkpoint/checkpointer", 'model_state_dict=state["model"]', "model_state_dict=get_state_dict(self.model, self.optimizer)[0]"
    ),
    "the schedule begins anew": Fault("resume", "checkpoint/checkpointer", 'seek(self.scheduler, marker["step"])', "pass"),
    "the rows begin anew": Fault(
        "resume", "engine", "train_loader.start_at(step, ", "train_loader.start_at(0, "
    ),
    "random numbers begin anew": Fault("resume", "checkpoint/checkpointer", "        self.restore_rng()\n", ""),
    "the run begins anew": Fault(
        "resume", "checkpoint/resume", "chosen = present[-1] if present else None", "chosen = None; [shutil.rmtree(path) for path in present]"
    ),
    "exported weights are rounded": Fault(
        "export", "checkpoint/weight_files", "parts[name].contiguous()", "parts[name].bfloat16().to(parts[name].dtype).contiguous()"
    ),
    "one exported weight is the first one": Fault(
        "export", "checkpoint/weight_files", "parts[name].contiguous()", "parts[name].clamp(min=1 if name == 'model.norm.weight' else None, max=1 if name == 'model.norm.weight' else 9e9)"
    ),
    "exported settings differ": Fault(
        "export", "checkpoint/export", 'config = read_json(out / "config.json")', 'config = read_json(out / "config.json") | {"rms_norm_eps": 0.01}'
    ),
    "the tokenizer lacks a word": Fault(
        "export", "tokenizers", "enumerate([*special.values(), *words])}", "enumerate([*special.values(), *words[1:]])}"
    ),
    "layers stay gathered": Fault(
        "plan", "distributed", '{"mixed_precision_policy": MixedPrecisionPolicy(**policy)}', '{"mixed_precision_policy": MixedPrecisionPolicy(**policy), "reshard_after_forward": False}'
    ),
    "plan divides by twice as many ranks": Fault("plan", "plan/simulate", "pretend(world_size,", "pretend(2 * world_size,", "plan"),
    "the speed counts one rank's tokens": Fault(
        "throughput", "engine", "window.add(done.loss_sums, done.num_targets,", "window.add(done.loss_sums, done.num_targets // 2,"
    ),
    "the time is measured without the pass": Fault(
        "throughput", "engine", "args.total_batch_size, seconds, data_seconds)", "args.total_batch_size, seconds / 2, data_seconds)"
    ),
    "rows come slowly": Fault(
        "throughput", "data/rows", "return self.make(self.items[number], number)", "return [self.make(self.items[number], number), __import__('time').sleep(1)][0]"
    ),
}  # fmt: skip


def forked(fork_server, **env):
    """Make a Launch that forks the ranks; the real one starts new processes, which takes ten times as long."""

    def start(config, processes, flags, argv, log, seconds):
        script = Path(env.get("PYTHONPATH", ROOT / "src"), "accelerate_recipes/doctor/workload.py")
        named = {"config": config, "num_processes": processes, "flags": flags, "script": script}
        assert argv[0] == "--output_dir" and log == Path(argv[1]).with_suffix(".log")
        return fork_server.run(log.with_suffix(""), *argv[2:], **named, **env)

    return start


@pytest.fixture(scope="module")
def figures(fork_server, tmp_path_factory):
    """Figures of all proofs on this machine."""
    return prove([*proofs.PROOFS], Runs(tmp_path_factory.mktemp("runs"), forked(fork_server)), print)


@pytest.mark.slow
def test_all_proofs_pass_here(figures, tmp_path):
    assert [figure for figure in figures if not figure.passed] == []
    assert Counter(figure.proof for figure in figures) == {
        "trajectory": 5, "resume": 3, "export": 2, "plan": 2, "throughput": 3
    }  # fmt: skip
    text = write_card(tmp_path, "a command", {"CPU": "a|b"}, figures)
    assert "**passed**: `a command`" in text and "| trajectory | ddp on 2: " in text
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["verdict"] == "passed" and len(card["figures"]) == len(figures)


FEW = {"gradients are an average over the ranks", "the optimizer begins anew", "exported weights are rounded"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in FEW else pytest.mark.long) for n in FAULTS]
)
def test_a_planted_fault_fails_its_proof(fork_server, tmp_path, monkeypatch, name):
    fault = FAULTS[name]
    package = shutil.copytree(ROOT / "src/accelerate_recipes", tmp_path / "src/accelerate_recipes")
    source = (package / f"{fault.module}.py").read_text()
    assert source.count(fault.old) == 1
    (package / f"{fault.module}.py").write_text(source.replace(fault.old, fault.new))
    env = {"PYTHONPATH": str(package.parent)}
    if fault.config == "plan":  # only there
        monkeypatch.setenv(*next(iter(env.items())))
        env = {}
    runs = Runs(tmp_path / "runs", forked(fork_server, **env))
    runs.folder.mkdir()
    monkeypatch.setattr(runs, "fitting", lambda: [fault.config])
    found = prove([fault.proof], runs, print)
    assert [
        figure for figure in found if figure.limit is not None and figure.value is not None and not figure.passed
    ], found
