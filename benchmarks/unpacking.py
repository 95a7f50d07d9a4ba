"""Measure what it costs that layers with a state compute each document of a packed row by itself.

    python benchmarks/unpacking.py

For each model it takes the CPU time of forward and backward on packed rows, as they are trained, and as if such layers might
carry their state on from one to the next; it prints both, and writes benchmarks/results/unpacking.json. What computes are
transformers' kernels in torch, on one thread of a CPU: a GPU with their fast packages spends less in these layers.
"""

import json
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, BambaConfig, Lfm2Config, PreTrainedConfig, Qwen3_5TextConfig

from accelerate_recipes import mixers
from accelerate_recipes.data.packing import collate, pack, pack_row
from accelerate_recipes.losses import next_token_loss
from accelerate_recipes.mixers import documents_of, unpack_documents
from accelerate_recipes.probes import mixers_in

RESULT = Path(__file__).parent / "results/unpacking.json"
LENGTH, ROWS, REPEATS = 2048, 2, 2
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3.5, 3 of 4 layers": Qwen3_5TextConfig(
        head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"], **SIZES,
    ),
    "LFM2, 3 of 4 layers": Lfm2Config(
        layer_types=["conv"] * 3 + ["full_attention"], block_auto_adjust_ff_dim=False, **SIZES
    ),
    "Bamba, 3 of 4 layers": BambaConfig(attn_layer_indices=[3], mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64, **SIZES),
}  # fmt: skip
DOCUMENTS = {"60 to 250 tokens, as chess games": (60, 250), "20 to 2,048 tokens, as texts": (20, LENGTH)}


def rows_of(low: int, high: int) -> dict:
    """Pack documents of lengths drawn evenly on a logarithmic scale; takes the first rows."""
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(low), np.log(high), size=400)).astype(int).tolist()
    packed = [[end - start for _, start, end in row] for row in pack(lengths, LENGTH)]
    chosen = [packed[i] for i in generator.permutation(len(packed) - 1)[:ROWS]]
    tokens = [generator.integers(0, 512, size=sum(row)) for row in chosen]
    return collate([pack_row(some, row, LENGTH, 0, True) for some, row in zip(tokens, chosen, strict=True)])


def seconds(model: torch.nn.Module, batch: dict) -> float:
    """Return the least CPU time of a few passes forward and backward."""
    found = []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        next_token_loss(model, batch).backward()
        found.append(time.process_time() - start)
    return min(found[1:])


def main() -> None:
    torch.set_num_threads(1)
    result = {
        "command": "python benchmarks/unpacking.py",
        "torch": torch.__version__,
        "rows": ROWS,
        "length": LENGTH,
        "cases": [],
    }
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        unpack_documents(model, mixers_in(model))
        for kind, bounds in DOCUMENTS.items():
            batch = rows_of(*bounds)
            documents = documents_of(batch["position_ids"])
            with mock.patch.object(mixers, "documents_of", lambda _: None):
                whole = seconds(model, batch)
            case = {
                "model": name,
                "documents": kind,
                "number": sum(len(group) for group in documents.groups),
                "calls": len(documents.groups),
                "positions": round(sum(group.numel() for group in documents.groups) / (ROWS * LENGTH) - 1, 3),
                "seconds_whole": round(whole, 3),
                "seconds_unpacked": round(seconds(model, batch), 3),
            }
            case["more_time"] = round(case["seconds_unpacked"] / case["seconds_whole"] - 1, 3)
            result["cases"].append(case)
            times = f"{case['seconds_whole']} s whole, {case['seconds_unpacked']} s unpacked ({case['more_time']:+.0%})"
            print(f"{name}; {case['number']} documents of {kind}: {case['calls']} calls of a layer,", end=" ")
            print(f"{case['positions']:.0%} more positions; {times}", flush=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
