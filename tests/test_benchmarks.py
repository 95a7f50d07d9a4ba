"""Tests that each benchmark, made as small as possible, runs and reports. Its numbers mean nothing here."""

import argparse
import json
import re
import subprocess
import sys

import first_step
import gpu
import gpu_cases
import gpu_measure
import gpu_report
import harness
import psutil
import pytest
import torch
from helpers import CONFIGS, REPOSITORY, ROOT, environment, hidden, refuses

from accelerate_recipes.args import parse
from accelerate_recipes.launch.checks import environment_problems, lever_problems
from accelerate_recipes.models.loading import new_model
from recipe_tools.request import launch_environment

pytestmark = pytest.mark.long
RESULTS = ROOT / "benchmarks/results"
TINY_LLAMA = "--hidden_size 64 --num_hidden_layers 1"
TINY_HEADS = "--intermediate_size 64 --num_attention_heads 2"
LAUNCH = "-m accelerate.commands.launch --main_process_port 0 --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no"
COMMANDS = {
    "against_trl": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
    "engine_overhead": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
    "first_step": "--rounds 1 --rows 40 --max_length 512",
    "loading": "--rounds 1 --hidden_size 64",
    "mirror": "--rounds 1 --steps 22 --width 32 --mib 4",
    "mixture_throughput": "--rounds 1 --steps 2 --warm_up 1 --documents 40 --shards 1 --max_length 64",
    "mixtures": "--rounds 2 --rows 40 --max_length 64",
    "prepare_rows": "--rounds 1 --rows 40",
    "spike_cost": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
}
LAUNCHED = ("against_trl", "engine_overhead")
ELSEWHERE = {"ablation", "ablation_trial", "init_memory", "memory_limits", "plan_shapes", "plans"}  # test_ablation, ...
HELPERS = {"first_step_marks", "harness", "published", "real_steps"}
GPU = {"gpu", "gpu_cases", "gpu_measure", "gpu_report"}


def test_all_are_here():
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert modules - ELSEWHERE - GPU - HELPERS == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_runs(name, tmp_path):
    launcher = LAUNCH.split() if name in LAUNCHED else []
    command = [
        sys.executable, *launcher, f"benchmarks/{name}.py", *COMMANDS[name].split(), "--out",
        str(tmp_path / "out.json"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text())


def test_harness(tmp_path):
    """Each way begins as often as the others; a ratio is of one round; a result has its day, and a cell no column's end."""
    orders = [harness.turns("abc", number) for number in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert [order[0] for order in orders] == [*"abcabc"]
    found = harness.ratios({"a": [2.0, 9.0], "b": [1.0, 3.0], "c": [4.0, 4.5]}, "a", ["b", "c"])
    assert found == {"a/b": [2.0, 3.0], "a/c": [0.5, 2.0]}
    assert harness.table(["", "b"], [["1|2", "3"]]) == ["|  | b |", "| --- | --- |", "| 1\\|2 | 3 |"]
    harness.write_json(None, found)
    harness.write_json(tmp_path / "new/out.json", harness.machine() | {"flags": {"out": tmp_path}})
    written = json.loads((tmp_path / "new/out.json").read_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", written["date"]) and written["flags"]["out"] == str(tmp_path)


MODULES_WITH_PARTS = {
    "datasets/load.py": "def load_dataset(): pass",
    "transformers/modeling_utils.py": """
class PreTrainedModel:
    @classmethod
    def from_pretrained(cls): return burn(0.2) or cls()
    def named_parameters(self): return []
""",
    "accelerate/accelerator.py": "class Accelerator:\n    def prepare(self, *args): burn(0.1)",
    "torch/optim/optimizer.py": """
hooks = []
register_optimizer_step_post_hook = hooks.append
def step(): [hook() for hook in hooks]
""",
}
BURN = """
import time
def burn(seconds, start=time.process_time):
    since = start()
    while start() - since < seconds: pass
"""
STARTED = """
import subprocess, sys, time
from datasets.load import load_dataset
from transformers.modeling_utils import PreTrainedModel
from accelerate.accelerator import Accelerator
from torch.optim.optimizer import step
load_dataset()
work = "import time, transformers.modeling_utils as m; m.PreTrainedModel.from_pretrained(); m.burn(0.1); print(flush=True)"
child = [sys.executable, "-c", work + "; time.sleep(60)"]
with subprocess.Popen(child, stdout=subprocess.PIPE) as ended:
    ended.stdout.readline()
    ended.kill()
alive = subprocess.Popen(child, stdout=subprocess.PIPE)
alive.stdout.readline()
model = PreTrainedModel.from_pretrained()
Accelerator().prepare([])
Accelerator().prepare(model)
print("last words", flush=True)
if "fails" not in sys.argv: step()
alive.kill()
sys.exit(3)
"""


def test_first_step_parts(tmp_path):
    """A part has the CPU time of children, alive or not, and not what they begin; after the first step nothing of it is alive."""
    for name, text in MODULES_WITH_PARTS.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(BURN + text)
        for folder in (tmp_path / name).relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "program.py").write_text(STARTED)
    command = [sys.executable, str(tmp_path / "program.py")]
    other = psutil.Popen(["sleep", "100"])
    before = set(psutil.Process().children(recursive=True))
    found = first_step.start(command, tmp_path)
    assert set(psutil.Process().children(recursive=True)) <= before and other.poll() is None
    other.kill()
    other.wait()
    cpu = {part: used["cpu"] for part, used in found.items()}
    assert cpu["rows"] > 0.65 and 0.5 > cpu["model"] > 0.25 > cpu["first step"], cpu
    assert all(found[part]["wall"] > 0 for part in first_step.PARTS)
    refuses(r"(?s)ended with 3.*last words", first_step.start, [*command, "fails"], tmp_path, error=SystemExit)


def test_results_say_when_they_were_measured():
    """Each result has its date in it, or on the page of results, with the commit that has its benchmark."""
    page = (RESULTS / "README.md").read_text()
    dated = dict(re.findall(r"^\| `([\w/.]+)` \| 2\d{3}-\d\d-\d\d \| ([0-9a-f]{7}) \|", page, re.MULTILINE))
    results = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    kept_up_to_date = {"models.json", "plans.json"}
    undated = {name for name, found in results.items() if "date" not in found.get("machine", found)} - kept_up_to_date
    assert undated <= dated.keys() - {"ablation/"} <= results.keys()


def test_benchmarks_that_are_named_exist():
    """A page names a benchmark of the tree, or a commit that has it: behind it, by `at`, or in the table of results."""
    files = [p for name in ("*.md", "Makefile", "data/*.md", "slurm/*.md", "docs/**/*.md") for p in ROOT.glob(name)]
    for folder, kind in (("src", "py"), ("recipes", "*"), ("tests", "py"), ("benchmarks", "py"), ("benchmarks", "md")):
        files += [path for path in (ROOT / folder).rglob(f"*.{kind}") if path.is_file()]
    named = re.compile(r"(?:\| ([0-9a-f]{7}) \| `[^`|\n]*)?(benchmarks/\w+\.py)(?:[^`\n]*`\s+at\s+([0-9a-f]{7})\b)?")
    pages = [(path, path.read_text(errors="ignore")) for path in files if path.name != "CHANGELOG.md"]
    found = [(path, name, row or behind) for path, text in pages for row, name, behind in named.findall(text)]
    assert [(path, name) for path, name, commit in found if not commit and not (ROOT / name).exists()] == []
    objects = [f"{commit}:{name}" for _, name, commit in found if commit]
    objects += re.findall(r"`([0-9a-f]{7})`", (ROOT / "docs/development/tried.md").read_text())
    assert len(objects) > 60
    git = ["git", "-C", REPOSITORY]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, timeout=60)
    if shallow.stdout == "false\n":  # a clone with its history
        asked = [*git, "cat-file", "--batch-check"]
        done = subprocess.run(asked, input="\n".join(objects), capture_output=True, text=True, timeout=60, check=True)
        assert [line for line in done.stdout.splitlines() if " blob " not in line and " commit " not in line] == []


def test_gpu(tmp_path, out):
    """Without datasets, trl, chess and torchao; what fails, fails for want of a GPU, and says so."""
    names = ["attention", "0.6B", "8B: LoRA", "7B: budget 0.8", "3B: fp8", "tests"]
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--out", str(out), "--cases", *names]
    env = hidden(tmp_path, {"bitsandbytes", "chess", "datasets", "torchao", "trl"})
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    machine, *records = gpu_report.read(out / "gpu.jsonl")
    assert machine["tiny"] and machine["versions"]["torch"] == torch.__version__ and "--tiny" in machine["command"]
    found = {(r["case"], r["setting"]): r for r in records if "setting" in r and "error" not in r}
    errors = {(r["case"], r.get("setting")): r["error"] for r in records if "error" in r}
    assert errors.keys() == {("attention", "cuDNN, one")}, (errors, (out / "gpu.log").read_text())
    assert {r["case"]: r["skipped"] for r in records if "skipped" in r} == {
        "3B: fp8": "torchao is not installed", "tests": "datasets is not installed",
    }  # fmt: skip
    # Empty documents change nothing, and a whole row is one document.
    assert found["attention", "padded, c4"]["off"] < 1e-6 > found["attention", "flash, one"]["off"]
    steps = {key: r for key, r in found.items() if r["what"] == "steps"}
    assert {case for case, _ in steps} == {"0.6B", "8B: LoRA", "7B: budget 0.8"} and len(steps) == 5
    packed = steps["0.6B", "1 x 128 x 2, packed documents"]
    assert 0 < packed["attended_length"] <= 128 == steps["0.6B", "1 x 128 x 2"]["attended_length"]
    assert all(r["loss"] > 0 and r["tokens_per_second"] > 0 for r in steps.values())
    assert all(found[case, f"{setting}: kernels"]["milliseconds"] > 0 for case, setting in steps)
    assert "skipped torchao is not installed" in done.stdout
    assert gpu_report.load(out) == {}  # a rehearsal is no result


@pytest.mark.parametrize("case", [c for c in gpu_cases.CASES.values() if c.config], ids=lambda case: case.name)
def test_gpu_cases(case):
    """Each can be launched: what the launcher, the library and the arguments say of it on one GPU."""
    flags = ["--config_file", str(CONFIGS / f"{case.config}.yaml"), "--num_processes", "1", *case.launch.split()]
    env = launch_environment([*flags, "recipe.py"])
    assert environment_problems(env, 1) == []
    base = {"model_name_or_path": "base"} if "use_peft" in case.args else {}
    args = parse(gpu_measure.Args, [f"--{name}={str(value).lower()}" for name, value in (case.args | base).items()])
    assert lever_problems(args, env, 1) == [] == args.problems(1)


def test_gpu_models_have_the_published_sizes():
    sizes = {"0.5B": 494e6, "0.6B": 596e6, "1.5B": 1543.7e6, "3B": 3086e6, "7B": 6738e6, "8B": 8030e6}
    for name, wanted in sizes.items():
        config = gpu_cases.config_of(gpu_cases.Case("", 0, model=name))
        found = new_model(config, "sdpa", torch.bfloat16).num_parameters()
        assert found == pytest.approx(wanted, rel=1e-3), name  # Qwen's have biases, or norms of heads, besides


def test_gpu_takes_its_time(tmp_path, monkeypatch):
    """The first list takes seven minutes on either card, the second three; a case that no time is left for is left out."""
    for is_second, minutes in ((False, 7), (True, 3)):
        for gib in (79.6, 139.8):
            cases = [c for c in gpu_cases.CASES.values() if c.is_second == is_second and c.gib <= gib]
            assert sum(case.seconds for case in cases) <= 60 * minutes, (is_second, gib)
    assert "--second" in gpu.description() and "7B: budget 0.8" in gpu.description()
    monkeypatch.setattr(gpu, "describe_device", lambda: {"device": "card", "gib": 79.6, "versions": {"torch": "2"}})
    monkeypatch.setattr(gpu, "COMPILED", tmp_path / "none")
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--out", str(tmp_path), "--minutes", "0", "--cases", "attention", "8B: all of it"]
    )
    gpu.main()
    _, *skipped = gpu_report.read(tmp_path / "gpu.jsonl")
    assert skipped == [
        {"case": "8B: all of it", "skipped": "needs a GPU with 130 GiB, this one has 79.6"},
        {"case": "attention", "skipped": "no time: takes about 20 s, 0 are left"},
    ]


def test_gpu_launch_that_hangs_or_fails(tmp_path):
    """It ends with all of its processes, and its last words are the result."""
    flags = argparse.Namespace(tiny=True, out=tmp_path)
    hung = gpu.Launch([gpu_cases.CASES["0.6B"]], flags, tmp_path)
    launcher = psutil.Process(hung.process.pid)
    while not (processes := launcher.children()):  # the launcher has yet to start it
        assert hung.process.poll() is None
    assert hung.measure(0.1) == "not over within 0 s"
    assert psutil.wait_procs([launcher, *processes], timeout=10)[1] == []
    flags.out = tmp_path / "none"  # where nothing can be written
    failed = gpu.Launch([gpu_cases.CASES["attention"]], flags, tmp_path)
    assert failed.measure(100).startswith("ended with 1: FileNotFoundError: ")


def test_gpu_keeps_what_was_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "COMPILED", tmp_path / "compiled")
    gpu.pack(tmp_path / "none.tar.gz")
    assert not (tmp_path / "none.tar.gz").exists()
    (tmp_path / "compiled/rank-0").mkdir(parents=True)
    (tmp_path / "compiled/rank-0/kernel").write_bytes(b"kernel")
    gpu.pack(tmp_path / "compiled.tar.gz")
    (tmp_path / "compiled/rank-0/kernel").unlink()
    monkeypatch.setattr(gpu, "describe_device", lambda: {"device": "card", "gib": 0.0, "versions": {"torch": "2"}})
    for name in ("none.tar.gz", "compiled.tar.gz"):
        words = ["--out", str(tmp_path / "out"), "--cases", "3B", "--compiled", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        gpu.main()
        assert (tmp_path / "compiled/rank-0/kernel").exists() == (name == "compiled.tar.gz")
    assert "none.tar.gz is not there: everything is compiled anew" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "LARGEST", 10)
    gpu.pack(tmp_path / "compiled.tar.gz")
    assert not (tmp_path / "compiled.tar.gz").exists() and "is not kept" in capsys.readouterr().out


def test_gpu_page_is_what_was_measured(tmp_path):
    found = gpu_report.load(gpu_report.RESULTS)
    assert (ROOT / "docs/development/performance.md").read_text() == gpu_report.page(found)
    gpu_report.draw(tmp_path / "performance.png", found)
    assert (tmp_path / "performance.png").stat().st_size > 10_000


def test_gpu_page_of_results(tmp_path):
    """Of two runs of a case the later that found something; ratios only to the same kind of GPU; predictions stay apart."""
    machine = {
        "what": "machine", "is_gpu": True, "tiny": False, "device": "NVIDIA H100 80GB HBM3", "gib": 79.6, "driver": "1",
        "cuda": "13.0", "versions": {"torch": "2.11.0"},
    }  # fmt: skip
    step = {
        "what": "steps", "tokens_per_second": 12000.0, "range": [11900.0, 12100.0], "mfu": 0.5,
        "allocated_gib": 50.0, "reserved_gib": 60.0,
    }  # fmt: skip
    lora, large, small = "2 x 4096 x 4", "4 x 4096 x 1", "1 x 8192 x 2"
    runs = [
        machine,
        {"case": "8B: LoRA", "setting": lora} | step,
        {"case": "8B: all of it", "setting": large} | step,
        {"case": "0.6B", "setting": small, "error": "OutOfMemoryError: 80 GiB | no more"},
        machine,
        {"case": "8B: LoRA", "setting": lora} | step | {"tokens_per_second": 12473.0},
        {"case": "8B: LoRA", "setting": lora, "error": "cut"},
    ]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(record) + "\n" for record in runs) + '{"case": "cut of')
    found = gpu_report.load(tmp_path)
    page = gpu_report.page(found)
    row = next(line for line in page.splitlines() if line.startswith(f"| 8B: LoRA, {lora}"))
    assert "| 1.00 |" in row
    assert "| 12,473 (11,900 to 12,100) | 50.0% | 50.0 / 60.0 | 14,800 | 12,473, H100, NeMo" in row
    row = next(line for line in page.splitlines() if line.startswith(f"| 8B: all of it, {large}"))
    assert "| 12,000" in row and "| 11,150 (58%) |" in row and "10,471, H200" in row and "|  | all layers" in row
    row = next(line for line in page.splitlines() if line.startswith(f"| 0.6B, {small} |"))
    assert "| not measured |  |  | 60,000" in row
    assert "0.6B | 1 x 8192 x 2" in page.split("Failed")[1] and "OutOfMemoryError" in page.split("Failed")[1]
    gpu_report.draw(tmp_path / "performance.png", found)
    assert (tmp_path / "performance.png").stat().st_size > 10_000


def test_layer_counts_are_on_the_page():
    page = (ROOT / "docs/development/measured.md").read_text()
    for name, found in json.loads((RESULTS / "layer_counts.json").read_text())["layers"].items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        kernels, kept = sum(found["kernels"].values()), found["kept_activations"] / 1e6
        assert row.startswith(f"| {name} | {kernels} |") and row.endswith(f"| {kept:.0f} |")
