"""Tests of `doctor`: what it finds on a machine, and that each proof passes here and fails under planted faults."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, by_time, hidden

from accelerate_recipes.errors import ConfigError
from recipe_tools import machine
from recipe_tools.doctor import command, proofs
from recipe_tools.doctor.proofs import Figure, Runs, prove

# Changes of the library's source that a proof must notice: the proof, the module, what stood there, what stands there now, and the
# strategy under which the trajectory shows it, if it is not fsdp_full.
FAULTS = {
    "each micro-batch is divided by its own targets": (
        "trajectory", "engine", "(loss * scale).sum()", "(loss / count_fn(batch).clamp(min=1) / len(micro_batches)).sum()"
    ),
    "the logged loss is one rank's": (
        "trajectory", "engine", "loss_sums, norm = sum_over_ranks(torch.cat([losses.sum(0), norm])).split(", "loss_sums, norm = torch.cat([losses.sum(0), norm]).split("
    ),
    "gradients are an average over the ranks": (
        "trajectory", "engine", "scale = accelerator.num_processes / num", "scale = 1 / num"
    ),
    "shards are not clipped": (
        "trajectory", "distributed", 'max_norm or float("inf"))', '(max_norm if accelerator.num_processes == 1 else 0) or float("inf"))'
    ),
    "DDP never reduces": (
        "trajectory", "distributed", "contextlib.nullcontext() if is_last else accelerator.no_sync(model)", "accelerator.no_sync(model)", "ddp"
    ),
    "gradients are summed in bf16": (
        "trajectory", "distributed", '"reduce_dtype": DTYPES[args.reduce_dtype]', '"reduce_dtype": torch.bfloat16'
    ),
    "all ranks read the same rows": (
        "trajectory", "data/rows", "rows[self.rank * share : (self.rank + 1) * share]", "rows[:share]"
    ),
    "the order depends on the number of ranks": (
        "trajectory", "data/rows", "num_rows, self.args.seed, self.end)", "num_rows, self.args.seed + self.world_size, self.end)"
    ),
    "first weights depend on the number of ranks": (
        "trajectory", "distributed", "set_seed(args.seed)", "set_seed(args.seed + accelerator.num_processes)"
    ),
    "a shared row loses the target at its seam": (
        "trajectory", "models/shared_rows", 'F.pad(batch["labels"], (0, 1)', 'F.pad(batch["labels"][:, : start + length], (0, 1)', "fsdp_long"
    ),
    "the optimizer begins anew": (
        "resume", "checkpoint/checkpointer", "load_state(state, ", 'load_state({"model": state["model"]}, '
    ),
    "the weights are not read": (
        "resume", "checkpoint/checkpointer", "load_state(state, ", 'load_state({"optimizer": state["optimizer"]}, '
    ),
    "the schedule begins anew": ("resume", "checkpoint/checkpointer", 'seek(self.scheduler, marker["step"])', "pass"),
    "the rows begin anew": (
        "resume", "engine", "train_loader.start_at(step, ", "train_loader.start_at(0, "
    ),
    "random numbers begin anew": ("resume", "checkpoint/checkpointer", "set_rng_state(load_plain", "dict(load_plain"),
    "the run begins anew": (
        "resume", "checkpoint/resume", "chosen = present[-1] if present else None", "chosen = None; [__import__('shutil').rmtree(path) for path in present]; present = []"
    ),
    "exported weights are rounded": (
        "export", "checkpoint/weight_files", "parts[name].contiguous()", "parts[name].bfloat16().to(parts[name].dtype).contiguous()"
    ),
    "one exported weight is the first one": (
        "export", "checkpoint/weight_files", "parts[name].contiguous()", "parts[name].clamp(min=1 if name == 'model.norm.weight' else None, max=1 if name == 'model.norm.weight' else 9e9)"
    ),
    "exported settings differ": (
        "export", "checkpoint/export", 'config, names = read_json(file), {"dtype", "torch_dtype"}',
        'config, names = read_json(file) | {"rms_norm_eps": 0.01}, {"dtype", "torch_dtype"}'
    ),
    "the tokenizer lacks a word": (
        "export", "models/tokenizers", "enumerate([*special.values(), *words])}", "enumerate([*special.values(), *words[1:]])}"
    ),
    "layers stay gathered": (
        "plan", "distributed", '{"mixed_precision_policy": MixedPrecisionPolicy(**policy)}', '{"mixed_precision_policy": MixedPrecisionPolicy(**policy), "reshard_after_forward": False}'
    ),
    "plan leaves out a layer": (
        "plan", "../recipe_tools/plan/simulate", "config = with_layers(trial.config, job.num_layers) if job.num_layers else trial.config", "config = with_layers(trial.config, 3)", "plan"
    ),
    "the speed counts one rank's tokens": (
        "throughput", "engine", "window.add(done.loss_sums, done.num_targets,", "window.add(done.loss_sums, done.num_targets // 2,"
    ),
    "the time is measured without the pass": (
        "throughput", "engine", "args.total_batch_size, seconds, data_seconds)", "args.total_batch_size, seconds / 2, data_seconds)"
    ),
    "rows come slowly": (
        "throughput", "data/rows", "return self.make(self.items[number], number)", "return [self.make(self.items[number], number), __import__('time').sleep(0.1)][0]"
    ),
}  # fmt: skip


def forked(fork_server, **env):
    """Make a Launch that forks the ranks; the real one starts new processes, which takes ten times as long."""

    def start(flags, argv, log, seconds):
        script = Path(env.get("PYTHONPATH", ROOT / "src"), "recipe_tools/doctor/workload.py")
        config, processes = Path(flags[1]).stem, int(flags[5])
        named = {"config": config, "num_processes": processes, "flags": flags[6:], "script": script}
        assert argv[0] == "--output_dir" and log == Path(argv[1]).with_suffix(".log")
        return fork_server.run(log.with_suffix(""), *argv[2:], **named, **env)

    return start


@pytest.fixture(scope="module")
def figures(fork_server, tmp_path_factory):
    """Figures of all proofs on this machine; tests/test_equivalence.py has more strategies."""
    runs = Runs(tmp_path_factory.mktemp("runs"), forked(fork_server))
    runs.fitting = lambda: ["fsdp_full", "fsdp_long"]
    return prove([*proofs.PROOFS], runs)


@pytest.mark.slow
def test_all_proofs_pass_here(figures, tmp_path):
    assert [figure for figure in figures if not figure.passed] == []
    assert Counter(figure.proof for figure in figures) == {
        "trajectory": 2, "resume": 3, "export": 2, "plan": 2, "throughput": 3
    }  # fmt: skip
    text = command.write_card(tmp_path, "a command", {"CPU": "a|b"}, figures)
    assert "**passed**: `a command`" in text and "| trajectory | fsdp_long on 2: " in text
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["verdict"] == "passed" and len(card["figures"]) == len(figures)


@pytest.mark.long
def test_a_repetition_differs_only_in_memory_and_times(fork_server, figures, tmp_path):
    names = ["resume", "export"]
    again = prove(names, Runs(tmp_path, forked(fork_server)))
    assert [f for f in again if not f.varies] == [f for f in figures if f.proof in names and not f.varies]


@pytest.mark.slow
def test_the_command_launches(tmp_path):
    """The command launches as a user does, without `datasets`, `trl` and other optional packages, and leaves the card alone."""
    command = [sys.executable, "-m", "accelerate_recipes", "doctor", "--only", "export", "--output_dir", "card"]
    done = subprocess.run(command, cwd=tmp_path, env=hidden(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| export | its loss: difference to training | " in done.stdout
    assert sorted(path.name for path in (tmp_path / "card").iterdir()) == ["card.json", "card.md"]


def test_a_run_that_fails_is_a_figure(tmp_path, capsys):
    """A run that fails, one that is not killed, and one for which no time is left fail their proofs; the card says why."""

    def start(flags, argv, log, seconds):
        log.write_text("ValueError: a | b\nlast line\n")
        return 0 if "--kill_at_step" in argv or "--dropout" in argv else 1

    figures = prove(["trajectory", "resume"], Runs(tmp_path, start))
    assert [figure.why for figure in figures] == ["single ended with 1: ValueError: a | b", "it was not killed"]
    assert "trajectory: 0 s, FAILED" in capsys.readouterr().out
    figures += [Figure("plan", "bytes", 3.0, 2.0, "GiB"), Figure("plan", "n", 1.0)]
    text = command.write_card(tmp_path, "doctor", {}, figures)
    assert "| trajectory | the runs | single ended with 1: ValueError: a \\| b | 0 | **FAILED** |" in text
    assert "| plan | bytes | 3 GiB | 2 | **FAILED** |" in text and "| plan | n | 1 |  |  |" in text
    assert json.loads((tmp_path / "card.json").read_text())["verdict"] == "FAILED"
    late = Runs(tmp_path, start)
    late.deadline = 0
    assert prove(["export"], late)[0].why == "no time left of 600 s"


def test_lost_and_different_records():
    one = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    assert proofs.largest_difference(one, one) == 0
    for other in (one[:1], [one[0], {"step": 2}]):
        assert proofs.largest_difference(one, other) == float("inf")
    assert proofs.largest_difference(one, [one[0], {"step": 2, "loss": 1.1}]) == pytest.approx(0.1 / 1.1)


@pytest.mark.parametrize(
    "gpus, missing",
    [(0, {"fsdp_hybrid"}), (1, {"ddp", "fsdp1_full", "fsdp_hybrid", "fsdp_long"}), (3, {"fsdp_hybrid", "fsdp_long"}), (8, set())],
)  # fmt: skip
def test_strategies_fit_the_machine(monkeypatch, tmp_path, gpus, missing):
    monkeypatch.setattr(proofs, "num_accelerators", lambda: gpus)
    assert Runs(tmp_path).fitting() == [name for name in proofs.STRATEGIES if name not in missing]


def test_gpus_that_fail_or_are_slow(monkeypatch):
    good = machine.read_gpu("NVIDIA H100 80GB HBM3, 81559, 570.86, 4, 0, Disabled")
    assert (good.memory // 2**20, good.errors, good.is_divided) == (81559, 0, False)
    assert machine.read_gpu("NVIDIA L4, 23034, 550.54, 0, [N/A], [N/A]")[4:] == (0, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert machine.gpu_findings([good, good]) == ([], [])
    bad = good._replace(name="Unheard-of 9000", used=3 * 2**30, errors=2, is_divided=True)
    problems, warnings = machine.gpu_findings([good, bad])
    assert len(problems) == 1 and "GPU 1 had 2 memory errors" in problems[0]
    expected = ("holds 3.0 GiB", "divided by MIG", "does not know its memory", "its peak is not known", "GPUs differ")
    assert all(text in said for text, said in zip(expected, warnings, strict=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch does not see NVIDIA H100" in machine.gpu_findings([good])[0][0]


def test_disks_that_fail_or_are_slow(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "write_speed", lambda path: 10e6)
    monkeypatch.setattr(machine, "refusal", lambda path: "Read-only file system" if path == Path("/frozen") else None)
    monkeypatch.setattr(machine, "filesystem", lambda path: "nfs4")
    monkeypatch.setattr(machine.constants, "HF_HOME", "/frozen")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    described, problems, warnings = machine.disks(tmp_path)
    assert described["output"] == f"{tmp_path}: nfs4, 0.1 GiB free, writes 10 MB/s"
    assert problems == [
        "caches: /frozen cannot be written to: Read-only file system; give another (--output_dir, HF_HOME, TMPDIR)"
    ]
    expected = ("has 0.1 GiB free", "takes 20 min", "has 0.1 GiB free", "lies on nfs4", "/dev/shm has 64 MiB free")
    assert all(text in said for text, said in zip(expected, warnings, strict=True)), warnings


def test_settings_that_are_slow(monkeypatch):
    for name in (*filter(machine.LEFT_OVER.fullmatch, os.environ), *machine.ALLOCATOR_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "limit", lambda name: [])
    assert machine.setting_warnings() == []
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.setattr(machine, "limit", lambda name: ["50000", "100000"])
    warnings = machine.setting_warnings()
    expected = ("NCCL_P2P_DISABLE=1 is set", "add expandable_segments:True", "the time of 0.5")
    assert all(text in said for text, said in zip(expected, warnings, strict=True))


def test_the_command_says_what_it_finds(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "versions", lambda: (["torch is not installed"], ["peft is 1"]))
    monkeypatch.setattr(machine, "write_speed", lambda path: 1e9)
    assert not command.doctor(tmp_path, [], proves=False)
    said = capsys.readouterr().out
    assert "Would fail:\n  - torch is not installed\nWould be slow, or is not as tested:\n  - peft is 1\n" in said
    assert "disk, output: " in said and "versions: accelerate_recipes " in said
    with pytest.raises(ConfigError, match="--only speed: no such proof; there are trajectory, resume"):
        command.doctor(tmp_path, ["speed"], proves=True)


FEW = {"gradients are an average over the ranks"}


@pytest.mark.parametrize("name", by_time(FAULTS, (), FEW))
def test_a_planted_fault_fails_its_proof(fork_server, tmp_path, monkeypatch, name):
    proof, file, old, new, *strategy = FAULTS[name]
    packages = shutil.copytree(ROOT / "src", tmp_path / "src")
    module = packages / f"accelerate_recipes/{file}.py"
    source = module.read_text()
    assert source.count(old) == 1
    module.write_text(source.replace(old, new))
    env = {"PYTHONPATH": str(packages)}
    if strategy == ["plan"]:  # only there
        monkeypatch.setenv(*next(iter(env.items())))
        env = {}
    runs = Runs(tmp_path / "runs", forked(fork_server, **env))
    runs.folder.mkdir()
    monkeypatch.setattr(runs, "fitting", lambda: strategy or ["fsdp_full"])
    found = prove([proof], runs)
    print(*found, sep="\n")
    assert [f for f in found if f.limit is not None and f.value is not None and not f.passed], found
