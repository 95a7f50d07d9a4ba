"""Measure peak memory and time of one step with a vocabulary of 128,256: with whole logits, and without.

    python benchmarks/loss_memory.py --out benchmarks/results/loss_memory.json

Each way runs a forward and a backward pass of one small Llama, with the same weights and tokens, in its own process:

    plain     losses.next_token_loss: the logits of all tokens at once
    ours      losses.next_token_loss_without_logits
    torch     the same by torch.nn.functional.linear_cross_entropy (torch 2.13), which computes logits twice

Memory is the peak of the step, gradients included, above the memory before it: the largest resident set of the
process on a CPU, allocated tensors on a GPU. The gradients are compared with the plain ones; in fp32, if they differ by
more than 1e-4 of their norm, the benchmark ends with an error.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from harness import GIB, machine, make_parser, write_json
from torch import nn
from transformers import LlamaConfig

from accelerate_recipes import losses
from accelerate_recipes.losses import next_token_loss, next_token_loss_without_logits
from accelerate_recipes.metrics import device_name, peak_memory_gib
from accelerate_recipes.models import new_model
from accelerate_recipes.weights import initialize

WAYS = ("plain", "ours", "torch")


def parse_flags() -> argparse.Namespace:
    parser = make_parser(
        __doc__,
        vocab_size=(128256, "Words in the model's vocabulary."),
        hidden_size=(512, "Width of the model."),
        num_hidden_layers=(2, "Layers of the model."),
        max_length=(2048, "Tokens of the only row."),
    )
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"], help="Precision to use.")
    parser.add_argument("--way", choices=WAYS, help="Run only this way, in this process.")
    parser.add_argument("--folder", type=Path, help="Folder for the result of --way.")
    return parser.parse_args()


def linear_cross_entropy_of_torch(head: nn.Linear, targets: torch.Tensor, hidden: torch.Tensor):
    """Compute `losses.linear_cross_entropy` by torch, in chunks whose logits are as large as the hidden states."""
    hidden, weight = hidden.flatten(0, -2), head.weight
    if torch.is_autocast_enabled(hidden.device.type):  # which knows F.linear, not F.linear_cross_entropy
        hidden, weight = (t.to(torch.get_autocast_dtype(hidden.device.type)) for t in (hidden, weight))
    rows = max(256, hidden.numel() // weight.shape[0])
    # Under bf16 reduction="sum" adds up in bf16.
    found = F.linear_cross_entropy(
        hidden, weight, targets, reduction="none", ignore_index=losses.IGNORE_INDEX,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
    )  # fmt: skip
    return found.float().sum()


def measure(flags: argparse.Namespace) -> None:
    """Take one step in this process; write its figures and gradients to files."""
    if flags.way == "torch":
        losses.linear_cross_entropy = linear_cross_entropy_of_torch
    loss_fn = next_token_loss if flags.way == "plain" else next_token_loss_without_logits
    accelerator = Accelerator(mixed_precision=flags.mixed_precision)
    model = new_model(
        LlamaConfig(
            vocab_size=flags.vocab_size,
            hidden_size=flags.hidden_size,
            intermediate_size=2 * flags.hidden_size,
            num_hidden_layers=flags.num_hidden_layers,
            num_attention_heads=flags.hidden_size // 64,
            max_position_embeddings=flags.max_length,
        ),
        "sdpa",
    )
    model = accelerator.prepare(initialize(model, 0, accelerator.device))
    ids = torch.randint(flags.vocab_size, (1, flags.max_length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(flags.max_length)[None], "labels": ids}
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    on_gpu = accelerator.device.type == "cuda"
    before = (torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss) / GIB
    start, cpu_start = time.perf_counter(), time.process_time()
    loss = loss_fn(model, batch)
    accelerator.backward(loss / flags.max_length)
    loss = loss.item() / (flags.max_length - 1)  # waits for a GPU
    result = {
        "step_gib": peak_memory_gib(accelerator.device) - before,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "loss": loss,
        "device": device_name(accelerator.device),
    }
    (flags.folder / f"{flags.way}.json").write_text(json.dumps(result), encoding="utf-8")
    torch.save({name: p.grad.cpu() for name, p in model.named_parameters()}, flags.folder / f"{flags.way}.pt")


def main(flags: argparse.Namespace) -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            subprocess.run([sys.executable, *sys.argv, "--way", way, "--folder", folder], check=True)
            results[way] = json.loads(Path(folder, f"{way}.json").read_text(encoding="utf-8"))
            found, plain = (torch.load(Path(folder, f"{name}.pt")) for name in (way, "plain"))
            distances = [(found[name] - plain[name]).norm() / plain[name].norm() for name in plain]
            results[way]["gradient_distance"] = max(distances).item()
    logits = flags.max_length * flags.vocab_size * 4 / GIB
    print(f"{results['plain']['device']}, {flags.mixed_precision}: logits in fp32 would be {logits:.2f} GiB")
    for way, r in results.items():
        print(
            f"{way:8} step {r['step_gib']:.2f} GiB ({r['step_gib'] / results['plain']['step_gib']:.2f} of plain), "
            f"{r['seconds']:.1f} s, {r['cpu_seconds']:.1f} s of CPU, loss {r['loss']:.6f}, "
            f"gradients off by {r['gradient_distance']:.1e}"
        )
    options = {name: value for name, value in vars(flags).items() if name not in ("way", "folder", "out")}
    write_json(flags.out, {"machine": machine(), "flags": options, "ways": results})
    if flags.mixed_precision == "no" and max(r["gradient_distance"] for r in results.values()) > 1e-4:
        sys.exit("the gradients differ")


if __name__ == "__main__":
    flags = parse_flags()
    if flags.way:
        measure(flags)
    else:
        main(flags)
