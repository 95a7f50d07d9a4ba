"""Tests that each benchmark, made as small as possible, runs and reports. Its numbers mean nothing here."""

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gpu_cases
import gpu_kernels
import gpu_layer
import gpu_predicted
import gpu_profile
import gpu_report
import gpu_steps
import long_documents
import numpy as np
import pytest
import torch
from helpers import CONFIGS, ROOT, environment

from accelerate_recipes.launch.preflight import launch_environment
from accelerate_recipes.models import new_bpe_tokenizer, new_llama
from accelerate_recipes.strategy import environment_problems, lever_problems
from accelerate_recipes.weights import initialize

GPU_LAYER = ROOT / "benchmarks/results/gpu_layer.json"
TINY_LLAMA = "--hidden_size 64 --num_hidden_layers 1"
TINY_HEADS = "--intermediate_size 64 --num_attention_heads 2"
LAUNCH = "-m accelerate.commands.launch --main_process_port 0 --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no"
COMMANDS = {
    "adapter_memory": "--num_hidden_layers 1",
    "against_trl": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
    "arithmetic": "run --seeds 1 --steps 150 1 1",  # fewer leave DPO without pairs
    "checkpoint_stall": f"--rounds 1 --steps 1 {TINY_LLAMA} --vocab_size 500",
    "data_throughput": "--documents 400 --shards 24 --rounds 1 --max_length 128 --vocab_size 500",
    "engine_overhead": f"--pairs 1 --steps 2 {TINY_LLAMA} {TINY_HEADS}",
    "image_throughput": "--images 64 --rounds 1 --workers 0",
    "export_memory": f"--rounds 1 {TINY_LLAMA} {TINY_HEADS} --vocab_size 500",
    "long_rows": "--length 256 --slice_length 512",
    "plan_time": "--large 2 --presets c4/llama3_2_1b.yaml",
    "loss_memory": f"{TINY_LLAMA} --vocab_size 500 --max_length 64",
    "stream_resume": "--documents 2000 --rounds 1 --max_length 128 --vocab_size 500",
}
LAUNCHED = ("against_trl", "checkpoint_stall", "engine_overhead")
LONG = set(COMMANDS) - {"data_throughput", "image_throughput", "long_rows"}
# In test_ablation, test_plans, test_weights, test_vit, and below.
ELSEWHERE = {
    "ablation",
    "ablation_trial",
    "attention_maps",
    "init_memory",
    "long_documents",
    "memory_limits",
    "plan_shapes",
    "plans",
    "vision_baselines",
}
HELPERS = {"machine", "pages", "real_steps"}
GPU = {
    "gpu",
    "gpu_cases",
    "gpu_kernels",
    "gpu_layer",
    "gpu_predicted",
    "gpu_profile",
    "gpu_records",
    "gpu_report",
    "gpu_steps",
}
# Of `gpu.py`, by part: the rest differs in settings, which test_gpu_cases looks at.
GPU_CASES = {
    1: [
        "ceilings",
        "attention: documents",
        "attention: FlashAttention 3",
        "attention: sdpa",
        "attention: flex",
        "attention: NaN",
        "decode",
    ],
    2: ["same: fsdp_grad_op, regional"],
    3: ["staging", "7B: best", "8B: LoRA", "Trainer", "7B: fp8"],
    4: ["memory: fsdp_grad_op"],
}
# As on a machine where these are not installed; read by each Python process at its start.
HIDE = """
from importlib.machinery import PathFinder

HIDDEN = {"bitsandbytes", "chess", "datasets", "torchao", "trl"}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *args: None if name.split(".")[0] in HIDDEN else find(name, *args)
)
"""


def test_all_are_here():
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert modules - ELSEWHERE - GPU - HELPERS == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in COMMANDS]
)
def test_runs(name, tmp_path):
    launcher = LAUNCH.split() if name in LAUNCHED else []
    command = [
        sys.executable,
        *launcher,
        f"benchmarks/{name}.py",
        *COMMANDS[name].split(),
        "--out",
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text())


@torch.no_grad()
def test_long_documents(tmp_path, monkeypatch):
    """Both losses are of the same tokens, and equal where nothing is cut; the rest is what a short text gives."""
    texts = [" ".join(f"{(i * j) % 97} is no word" for j in range(60)) for i in range(2, 6)]
    tokenizer = new_bpe_tokenizer(texts, 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = initialize(new_llama("sdpa", vocab_size=300, initializer_range=0.2, **sizes), 0, "cpu").eval()
    tokens = torch.tensor(tokenizer(texts[0])["input_ids"][:70])
    whole, cut = long_documents.compare(model, tokens, 16, 8)
    assert len(whole) == len(cut) == 48  # the rest does not fill a block
    assert cut[:8] == pytest.approx(whole[:8], rel=1e-5) and cut[8:] != pytest.approx(whole[8:], rel=1e-2)
    position = 35  # in the block from 32 on, which sees 16 tokens before it
    logits = model(tokens[None, 16:position]).logits[0, -1]
    assert cut[position - 16] == pytest.approx(-logits.log_softmax(-1)[tokens[position]].item(), rel=1e-4)

    found = long_documents.paired(np.array([0.1, 0.2, 0.3, 0.15, 0.2, 0.1, 0.2, 0.3]), np.random.default_rng(0))
    assert (
        found["mean"] == pytest.approx(0.19375)
        and 0.1 < found["interval"][0] < found["mean"] < found["interval"][1] < 0.3
    )
    assert found["p"] == pytest.approx(2 / 2**8, rel=0.5)  # of 256 ways to flip the signs, two are as far from none
    assert long_documents.paired(np.array([-0.1, 0.1, -0.2, 0.2]), np.random.default_rng(0))["p"] == 1

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "pages.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = {"model": tmp_path, "pages": tmp_path / "pages.json", "length": 70, "context": 16, "stride": 8, "parts": 2}
    flags |= {"out": tmp_path / "out.json", "picture": tmp_path / "out.png"}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["long_documents.py", *argv])
    long_documents.main()
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["documents"] == 4 and [(part["from"], part["to"]) for part in result["parts"]] == [(16, 40), (40, 64)]
    assert result["parts"][0]["by_document"]["whole"][0] == pytest.approx(whole[:24].mean(), abs=1e-4)
    assert (tmp_path / "out.png").stat().st_size > 1000


def gpu_environment(tmp_path: Path) -> dict[str, str]:
    """Hide what gpu.py must do without."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    inherited = environment(tmp_path)
    return inherited | {"PYTHONPATH": f"{tmp_path}:{inherited.get('PYTHONPATH', '')}"}


@pytest.mark.slow
def test_gpu_needs_no_datasets(tmp_path):
    """Nor trl, chess, bitsandbytes and torchao: what gpu.py imports of the library."""
    code = "import sys, gpu, gpu_steps, gpu_report; assert not sys.modules.keys() & {'datasets', 'trl', 'chess'}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", env=gpu_environment(tmp_path), capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.long), 2, 3, 4])
def test_gpu(part, tmp_path):
    """What fails, fails for want of a GPU, and says so."""
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--part", str(part), "--out", str(tmp_path / "out")]
    command += ["--cases", *GPU_CASES[part]]
    done = subprocess.run(command, cwd=ROOT, env=gpu_environment(tmp_path), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    log = (tmp_path / f"out/part{part}.log").read_text()
    machine, *records = gpu_report.read(tmp_path / f"out/part{part}.jsonl")
    assert machine["tiny"] and machine["versions"]["torch"] == torch.__version__ and machine["command"]
    assert {record["case"] for record in records} == set(GPU_CASES[part])
    errors = [record for record in records if "error" in record]
    assert all(part == 1 and "No viable backend" in record["error"] for record in errors), (errors, log)
    skipped = {(record["case"], record["skipped"]) for record in records if "skipped" in record}
    no_flex = gpu_kernels.NO_FLEX
    assert (
        skipped
        == {
            1: {("attention: flex", no_flex), ("attention: FlashAttention 3", "flash_attn_interface is not installed")},
            2: {("same: fsdp_grad_op, regional", no_flex)},
            3: {("7B: fp8", "torchao is not installed")},
            4: set(),
        }[part]
    )
    found = {(record["case"], record.get("what")) for record in records}
    wanted = {
        1: {
            ("ceilings", "matmul"),
            ("attention: sdpa", "attention"),
            ("attention: NaN", "finite"),
            ("decode", "decode"),
        },
        2: {("same: fsdp_grad_op, regional", "same")},
        3: {("7B: best", "steps"), ("7B: best", "rows"), ("7B: best", "profile"), ("8B: LoRA", "steps")}
        | {("Trainer", "steps"), ("staging", "staging")},
        4: {("memory: fsdp_grad_op", "steps")},
    }[part]
    assert wanted <= found
    assert gpu_report.load(tmp_path / "out") == []  # a rehearsal is no result


@pytest.mark.parametrize("case", gpu_cases.CASES.values(), ids=gpu_cases.CASES)
def test_gpu_cases(case):
    """Each can be launched and measured: what the launcher, the library and the arguments say of it on one GPU."""
    assert hasattr(gpu_kernels if case.part == 1 else gpu_steps, case.measure)
    flags = ["--config_file", str(CONFIGS / f"{case.config}.yaml"), "--num_processes", "1", *case.launch.split()]
    env = launch_environment([*flags, "recipe.py"])
    assert environment_problems(env, 1) == []
    for setting in case.settings:
        assert setting.attention in ("documents", "sdpa", "flex_attention")
        assert setting.args.keys() <= {field.name for field in dataclasses.fields(gpu_steps.Args)}
        args = gpu_steps.Args(model_name_or_path="base" if "use_peft" in setting.args else "", **setting.args)
        assert lever_problems(args, env, 1) == []
        assert [problem for problem in args.problems(1) if "bitsandbytes" not in problem] == []


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_gpu_part_fits(part):
    """A part takes its eight minutes on a GPU of 141 GB, as is expected, with what requirements.txt names."""
    gib = 139.8
    cases = [case for case in gpu_cases.CASES.values() if case.part == part and case.gib <= gib < case.below_gib]
    assert sum(case.seconds for case in cases if not case.package) <= 480


@pytest.mark.parametrize("kind", ["one", "eight", "c4"])
def test_gpu_batch(kind):
    batch = gpu_kernels.packed_batch(kind, rows=2, row=4096, vocab_size=100, seed=3)
    starts = (batch["position_ids"] == 0).sum(1).tolist()
    assert {"one": starts == [1, 1], "eight": starts == [8, 8], "c4": min(starts) > 3}[kind]
    assert ((batch["labels"] == -100) == (batch["position_ids"] == 0)).all()
    wanted = {"one": 4096, "eight": 512}.get(kind)
    found = gpu_kernels.attended_length(batch["position_ids"])
    assert found == wanted or (wanted is None and 400 < found < 2000)


def test_gpu_profile_of_kernels():
    """Parts of a step by name, the optimizer by time; idle is what no kernel covers, though kernels overlap."""
    events = [
        ("nvjet_sm90_tst_128x256", 0.0, 40.0),
        ("void pytorch_flash::flash_fwd_kernel", 30.0, 20.0),
        ("triton_red_fused_cat_mul_sum_3", 60.0, 10.0),
        ("direct_copy_kernel_cuda", 70.0, 10.0),
        ("vectorized_elementwise_kernel", 90.0, 10.0),
    ]
    found = gpu_profile.summary(events, [("Optimizer.step#KahanAdamW.step", 85.0, 20.0)])
    assert {part: ms for part, ms in found["milliseconds"].items() if ms} == {
        "matmuls": 0.04, "attention": 0.02, gpu_profile.REST: 0.01, "copies and casts": 0.01, "optimizer": 0.01,
    }  # fmt: skip
    assert found["idle_share"] == pytest.approx(0.2)


def test_gpu_predictions_are_those_of_this_version():
    kept = json.loads(gpu_report.PREDICTED.read_text())["predicted"]
    wanted = {(case.name, setting.name) for case in gpu_cases.memory() for setting in case.settings}
    assert {(found["case"], found["setting"]) for found in kept} == wanted and len(wanted) > 8
    name = "memory: fsdp_full, Kahan"
    assert gpu_predicted.predict([name]) == [found for found in kept if found["case"] == name]


@pytest.mark.slow
def test_gpu_layer_is_that_of_this_version():
    kept = json.loads(GPU_LAYER.read_text())["layers"]
    name = "all in bf16, not compiled"
    assert gpu_layer.of_one_layer(*gpu_layer.SIMULATED[name]) == kept[name]
    if find_spec("triton"):
        kernels, moved, activations = gpu_layer.in_process(gpu_layer.compiled, False)
        wanted = kept[gpu_layer.COMPILED]
        assert activations == wanted["kept_activations"]
        assert {part: moved[part] for part in moved} == {part: wanted["bytes"][part] for part in moved}
        assert {part: kernels[part] for part in kernels} == {part: wanted["kernels"][part] for part in kernels}


def test_gpu_layer_is_on_the_page():
    layers = json.loads(GPU_LAYER.read_text())["layers"]
    assert "\n".join(gpu_layer.table(layers)) in (ROOT / "docs/levers.md").read_text()
    # AdamW reads 4 tensors in bf16 and writes 3, the compensation reads and writes 2; a layer of 7B has 202,383,360.
    assert layers[gpu_layer.COMPILED]["bytes"][gpu_layer.OPTIMIZER] == pytest.approx(22 * 202_383_360, rel=1e-6)


def test_gpu_page_is_what_was_measured(tmp_path):
    assert (ROOT / "docs/performance.md").read_text() == gpu_report.page(gpu_report.load(gpu_report.RESULTS))
    assert gpu_report.draw(tmp_path / "performance.png", []) is False
    assert "Not measured" in gpu_report.page([]) and "reached" not in gpu_report.page([])


def test_gpu_page_of_results(tmp_path):
    """Goals by the figures; of two runs of a case the later that found something; a picture."""
    machine = {
        "what": "machine", "is_gpu": True, "tiny": False, "device": "NVIDIA H200", "gib": 139.8, "driver": "1", "cuda": "13.0",
        "cudnn": 9, "versions": {"torch": "2.11.0"},
    }  # fmt: skip
    step = {
        "what": "steps", "setting": "one document a row", "rows": 1, "micro_batches": 8, "tokens_per_second": 13000.0,
        "tokens_per_second_range": [12900.0, 13100.0], "mfu_full": 0.6, "mfu_attended": 0.6,
    }  # fmt: skip
    rows = [{"rows": 2, "tokens_per_second": 14000.0, "tokens_per_second_range": [14000.0, 14000.0]}]
    runs = [
        machine,
        {"case": "7B: best"} | step,
        {
            "case": "7B: best",
            "what": "rows",
            "setting": step["setting"],
            "fitting": rows,
            "then": "3: OutOfMemoryError",
        },
        {
            "case": "7B: best",
            "what": "profile",
            "setting": "packed",
            "milliseconds": {"matmuls": 200.0},
            "idle_share": 0.1,
        },
        {"case": "8B: LoRA", "error": "OutOfMemoryError: 80 GiB | no more"},
        machine,
        {"case": "7B: best", "skipped": "no time"},
        {"case": "8B: LoRA"} | step | {"setting": "LoRA, r 16", "tokens_per_second": 12000.0},
        {"case": "memory: single"} | step | {"setting": "autocast", "peak_allocated_gib": 20, "peak_reserved_gib": 18},
    ]
    (tmp_path / "part3.jsonl").write_text("".join(json.dumps(record) + "\n" for record in runs) + '{"case": "cut of')
    results = gpu_report.load(tmp_path)
    page = gpu_report.page(results)
    assert "MFU 62% | 64.6% | reached |" in page  # of two rows
    assert "12,473 tokens/s | 12,000 | missed |" in page
    predicted = {(p["case"], p["setting"]): p for p in json.loads(gpu_report.PREDICTED.read_text())["predicted"]}
    allocated, reserved = (predicted["memory: single", "autocast"][what] / 2**30 for what in ("allocated", "reserved"))
    off = f"{allocated:.2f} | 20.00 | {allocated / 20 - 1:+.1%} | {reserved:.2f} | 18.00 | {reserved / 18 - 1:+.1%} |"
    assert f"memory: single | autocast | {off}" in page
    assert "fp8: 1.15 of bf16 |  | not measured |" in page
    assert "OutOfMemoryError" not in page.split("Failed")[0].split("Goals")[1] and "no time" not in page
    assert gpu_report.draw(tmp_path / "performance.png", results) and (tmp_path / "performance.png").stat().st_size
