"""Tests of formulas and of the log line, against values worked out by hand."""

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import Gemma4TextConfig, LlamaConfig, MixtralConfig

from accelerate_recipes import metrics
from accelerate_recipes.agenda import tracker_settings
from accelerate_recipes.life.status import read_status, update_status
from accelerate_recipes.models.loading import new_model

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_7B = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)


def test_flops_per_token():
    """The formula is 6 N + 12 L H Q T; of 6,738,415,616 parameters 131,072,000 are the input embedding."""
    found = metrics.decoder_flops(LLAMA_7B, 6_738_415_616, attended_length=4096)
    assert found == 6 * (6_738_415_616 - 131_072_000) + 12 * 32 * 4096 * 4096
    tied = LlamaConfig(**(LLAMA_7B.to_dict() | {"tie_word_embeddings": True}))
    assert metrics.decoder_flops(tied, 1000, attended_length=0) == 6000
    # Mixtral 8x7B: 12.9 of 46.7 billion parameters are active, less the input embedding.
    found = metrics.decoder_flops(MixtralConfig(), 46_702_792_704, attended_length=0)
    assert found == 6 * (12_879_925_248 - 131_072_000)
    # Gemma 4: four of five layers have heads 256 wide, the others 512.
    gemma = Gemma4TextConfig(num_hidden_layers=5, num_attention_heads=2, hidden_size=8, vocab_size=4)
    assert metrics.decoder_flops(gemma, 0, attended_length=10) == 12 * 10 * 2 * (4 * 256 + 512)


def test_flops_by_two_conventions():
    """Documents of 100 tokens in rows of 400."""
    model = new_model(LlamaConfig(**SMALL), "sdpa")
    found = metrics.flops_per_token(model, 100.0, 400)
    assert found.full_rows - found.attended == 12 * 2 * 32 * 300
    assert found.attended == metrics.decoder_flops(model.config, model.num_parameters(), 100)


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA H200", 989.4),
    ("NVIDIA H200 NVL", 835.5),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA A10G", 70.0),
    ("NVIDIA L40S", 362),
    ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA RTX A4000", None),
    ("NVIDIA H100 PCIe MIG 1g.10gb", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("Some GPU of next year", None),
])  # fmt: skip
def test_peak_is_dense_bf16_or_unknown(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.bf16_peak(metrics.device_name(torch.device("cuda"))) == (tflops and pytest.approx(tflops * 1e12))


def test_log_line_and_record(tmp_path, capsys, monkeypatch):
    """Job controllers look for the line's beginning; the file has the same values."""
    monkeypatch.setattr(metrics, "bf16_peak", lambda name: 1e9)
    log = metrics.MetricsLog(Accelerator(cpu=True), tmp_path, total_steps=1000, flops=metrics.Flops(1e4, 2e4, 120))
    log.restore(None)
    window = metrics.Window()
    window.add(torch.tensor([600.0]), torch.tensor([300]), samples=8, seconds=0.25, data_seconds=0.01)
    window.add(torch.tensor([400.0]), torch.tensor([100]), samples=8, seconds=0.25, data_seconds=0.01)
    log.log_step(120, window, grad_norm=0.81, lr=2.9e-4, gib=23.4, counts={"tokens_seen": 4096, "retries": 2})
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line == (
        "Step 120/1000 Loss: 2.50000, Speed: 32.00 samples/sec, 800 tokens/sec, lr: 0.000290, grad norm: 0.81, "
        "MFU: 0.008 (counting full rows: 0.016), peak memory: 23.4 GiB, data wait: 4.0%, retries: 2, "
        "done: 12.0%"
    )
    log.log_step(121, window, grad_norm=0.81, lr=1.234e-7, gib=23.4, counts={})
    later = capsys.readouterr().out
    assert ", lr: 1.23e-07, grad norm" in later, "a rate of GRPO"
    assert "MFU" not in later, "behind the last step for which FLOPs are counted"
    assert re.match(r".*Loss:.*", line)  # HyperPod's hang detection
    record, _ = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record.pop("time") > 0
    assert record == {
        "step": 120,
        "loss": 2.5,
        "samples_per_second": 32.0,
        "tokens_per_second": 800.0,
        "learning_rate": 2.9e-4,
        "grad_norm": 0.81,
        "mfu": 0.008,
        "mfu_full_rows": 0.016,
        "peak_memory_gib": 23.4,
        "data_wait": 0.04,
        "tokens_seen": 4096,
        "retries": 2,
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_time_to_the_end(tmp_path, capsys, monkeypatch):
    """A resumed run counts only its own steps, and not its first; on a terminal there is a bar, else no trace of it."""
    clock = iter([100.0, 130.0, 130.0, 130.0])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock), time=time.time))
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        log = metrics.MetricsLog(Accelerator(cpu=True), tmp_path, total_steps=1000, flops=None, begun_at=500)
        log.log_evaluation(500, {"loss": 2.0})
        for step in range(501, 512):
            log.completed(step)
        log.log_evaluation(511, {"loss": 1.0})
        log.log_evaluation(1000, {"loss": 1.0})
        log.progress.close()
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].endswith("Evaluation loss: 2, done: 50.0%")
    assert lines[1].endswith("Evaluation loss: 1, done: 51.1%, left: 24:27"), "489 steps of 3 s"
    assert lines[2].endswith("done: 100.0%, left: 00:00")
    assert re.search(r"51%\|.*\| 511/1000 \[\d\d:\d\d<", terminal.getvalue()), "the bar begins at the checkpoint"


def test_a_window_of_a_loss_of_parts():
    """Each part is divided by its own targets, of all steps; the last are the tokens of the speed."""
    window = metrics.Window()
    window.add(torch.tensor([6.0, 10.0]), torch.tensor([2, 10]), samples=2, seconds=1, data_seconds=0)
    window.add(torch.tensor([2.0, 20.0]), torch.tensor([2, 50]), samples=2, seconds=1, data_seconds=0)
    assert (window.num_targets, window.mean_loss) == (60, 8 / 4 + 30 / 60)


def test_a_step_has_its_evaluation_or_not(tmp_path):
    """The log knows whether a step has its evaluation, so a run stopped between the two knows what is left to do."""
    log = metrics.MetricsLog(Accelerator(cpu=True), tmp_path, total_steps=10, flops=None)
    window = metrics.Window()
    window.add(torch.tensor([2.0]), torch.tensor([1]), samples=1, seconds=1, data_seconds=0)
    for step in (2, 4):
        log.log_step(step, window, grad_norm=1.0, lr=0.1, gib=1.0, counts={})
    log.log_evaluation(4, {"loss": 1.0})
    assert [log.has_evaluation(step) for step in (0, 2, 4)] == [False, False, True]


def test_a_tracker_knows_a_run_again(tmp_path, monkeypatch):
    """A run is named after its output directory; resumed there it is the same one, begun anew or elsewhere another one."""

    def settings(folder: Path, resumed: int | None = None) -> dict:
        return tracker_settings(folder, resumed)

    for name in ("tall", "two/tall", "new"):
        (tmp_path / name).mkdir(parents=True)
    first = settings(tmp_path / "tall")
    assert first["wandb"]["name"] == "tall" and first["trackio"]["name"].startswith("tall-")
    assert first["trackio"]["resume"] == "never"
    monkeypatch.chdir(tmp_path)
    again = settings(Path("tall"), resumed=20)
    assert again == first | {"trackio": first["trackio"] | {"resume": "allow"}, "tensorboard": {"purge_step": 21}}
    others = [settings(tmp_path / "tall"), settings(tmp_path / "two/tall"), settings(tmp_path / "new", resumed=20)]
    assert len({other["wandb"]["id"] for other in [first, *others]}) == 4
    assert others[-1]["trackio"]["resume"] == "never"
    update_status(tmp_path / "tall", state="running")
    assert read_status(tmp_path / "tall")["run"] == others[0]["wandb"]["id"]
