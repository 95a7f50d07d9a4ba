"""Measure what a rank keeps of a row that 1, 2 and 4 ranks share, for the backward pass: bytes, and resident memory.

    python benchmarks/long_rows.py --out benchmarks/results/long_rows.json --picture docs/long-context.png

`counted` is a slice of Llama 3.1 8B on the meta device, of --slice_length tokens: nothing is computed, each operation and
saved tensor is counted, and the ranks but one are imagined. `run` is a small Llama under FSDP2 on forked ranks, of
--length tokens: the bytes that autograd saves for the backward pass, and by how much the resident memory of a rank
grows at most in a training step.
"""

import argparse
import json
import os
import re
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from machine import machine
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.attention import DOCUMENTS, boundaries
from accelerate_recipes.distributed import make_accelerator, prepare
from accelerate_recipes.launcher import launch_environment
from accelerate_recipes.losses import next_token_loss_without_logits
from accelerate_recipes.models import new_model
from accelerate_recipes.sequence import part_of_rows, row_group, share_attention, whole_rows

RANKS = (1, 2, 4)
MIB = 2**20
CONFIGS = Path(__file__).resolve().parents[1] / "accelerate_configs"
LAYERS = 2  # of the 32 of Llama 3.1 8B
SLICE = {
    "vocab_size": 1024, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip


def packed(length: int, document: int, device: str) -> dict:
    """Make a row of documents of the same length."""
    positions = torch.arange(length)[None] % document
    ids = torch.arange(length, device=device)[None] % 1000
    found = boundaries(positions)
    found |= {"input_ids": ids, "labels": ids, "position_ids": positions.to(device)}
    return found | {"cu_seqlens": found["cu_seqlens"].to(device)}


def kept_bytes(model, batch: dict, length: int) -> tuple[int, torch.Tensor]:
    """Return the bytes that a forward pass saves, and the loss. Weights, without a dimension of positions, do not count."""
    kept, lengths = {}, {length, batch["input_ids"].shape[1]}

    def keep(tensor):
        if lengths & set(tensor.shape):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = next_token_loss_without_logits(model, batch)
    return sum(kept.values()), loss


def count(size: int, length: int) -> int:
    """Count, on the meta device, what one of `size` ranks keeps."""
    config = LlamaConfig(**SLICE, max_position_embeddings=length, attn_implementation=DOCUMENTS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    group = dist.group.WORLD if size > 1 else None
    try:
        with whole_rows():
            return kept_bytes(model, part_of_rows(packed(length, length, "meta"), group), length)[0]
    finally:
        dist.destroy_process_group()


def memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


class Args(TrainArgs):
    shares_rows = True


def train_one_step(length: int) -> dict[str, float]:
    """Run a forward and a backward pass in this rank."""
    accelerator = make_accelerator(Args())
    config = LlamaConfig(**SMALL, max_position_embeddings=length)
    model, _, _ = prepare(accelerator, new_model(config, DOCUMENTS), Args())
    model.train()
    batch = part_of_rows(packed(length, 512, "cpu"), row_group(accelerator))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    kept, loss = kept_bytes(model, batch, length)
    loss.backward()
    return {"kept_mib": kept / MIB, "resident_mib": (memory("VmHWM") - before) / MIB, "loss": loss.item()}


def run(size: int, length: int) -> list[dict[str, float]]:
    """Fork `size` ranks, and return what each measured."""
    config = [
        "--config_file",
        str(CONFIGS / ("single.yaml" if size == 1 else "fsdp_long.yaml")),
        "--mixed_precision",
        "no",
    ]
    flags = ["--num_processes", str(size), "--parallelism_config_cp_size", str(size)] if size > 1 else []
    env = launch_environment([*config, *flags, "--fsdp_activation_checkpointing", "false", "recipe.py"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    found = []
    for rank in range(size):
        reader, writer = os.pipe()
        if not os.fork():
            os.environ.update(env if size > 1 else {})
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {})
            torch.set_num_threads(1)
            os.write(writer, json.dumps(train_one_step(length)).encode())
            os._exit(0)
        os.close(writer)
        found.append(reader)
    ranks = [json.loads(os.fdopen(reader, encoding="utf-8").read()) for reader in found]
    for _ in ranks:
        os.wait()
    return ranks


def draw(path: Path, measured: dict) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    kept, resident = figure.subplots(1, 2)
    for place, (name, label) in enumerate({"counted": "slice of 8B, counted", "run": "small Llama, run"}.items()):
        one = measured[name]["1"]["kept_mib"]
        shares = [measured[name][str(size)]["kept_mib"] / one for size in RANKS]
        bars = kept.bar([i + 0.3 * (place - 1) for i in range(len(RANKS))], shares, 0.28, label=label, align="edge")
        kept.bar_label(bars, fmt="%.3f", fontsize=8)
    for i, size in enumerate(RANKS):
        kept.hlines(1 / size, i - 0.4, i + 0.4, colors="black", linestyles="--", label="1 / N" if i == 0 else None)
    kept.set(
        title="Activations that a rank keeps", xlabel="ranks that share a row", ylabel="share of those of one rank"
    )
    values = [measured["run"][str(size)]["resident_mib"] for size in RANKS]
    resident.bar_label(resident.bar(range(len(RANKS)), values, 0.5), fmt="%.0f", fontsize=8)
    resident.set(
        title="Resident memory of a training step", xlabel="ranks that share a row", ylabel="MiB, above that before it"
    )
    for axes in (kept, resident):
        axes.set_xticks(range(len(RANKS)), RANKS)
        axes.margins(y=0.12)
    kept.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--slice_length", type=int, default=131072)
    args = parser.parse_args()
    result = {"machine": machine(torch.device("cpu")), "length": args.length, "slice_length": args.slice_length}
    result |= {"layers_of_the_slice": LAYERS, "run": {}, "counted": {}}
    for size in RANKS:
        ranks = run(size, args.length)
        result["run"][str(size)] = {name: max(rank[name] for rank in ranks) for name in ("kept_mib", "resident_mib")}
        result["run"][str(size)]["loss"] = sum(rank["loss"] for rank in ranks)
        print(size, result["run"][str(size)], flush=True)
    share_attention()
    torch.is_autocast_enabled = lambda device: False  # it does not know the meta device
    for size in RANKS:
        result["counted"][str(size)] = {"kept_mib": count(size, args.slice_length) / MIB}
        print(size, result["counted"][str(size)], flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.picture:
        draw(args.picture, result)


if __name__ == "__main__":
    main()
