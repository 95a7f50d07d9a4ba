"""Measure what it costs that layers with a state compute each document of a packed row by itself.

    python benchmarks/unpacking.py --out benchmarks/results/unpacking.json

For each model it takes the CPU time of forward and backward on packed rows, as they are trained, and as if such layers might
carry their state on from one document to the next. What computes are transformers' kernels in torch, on one thread of a CPU:
a GPU with their fast packages spends less in these layers.
"""

import time
from unittest import mock

import numpy as np
import torch
from harness import machine, make_parser, write_json
from transformers import AutoModelForCausalLM, BambaConfig, Lfm2Config, PreTrainedConfig, Qwen3_5TextConfig

from accelerate_recipes import mixers
from accelerate_recipes.data.packing import collate, pack, pack_row
from accelerate_recipes.losses import next_token_loss
from accelerate_recipes.mixers import documents_of, unpack_documents
from accelerate_recipes.probes import mixers_in

ROWS, REPEATS = 2, 2
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


def rows_of(low: int, high: int, length: int) -> dict:
    """Pack documents of lengths drawn evenly on a logarithmic scale; takes the first rows."""
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(low), np.log(high), size=400)).astype(int).tolist()
    packed = [[end - start for _, start, end in row] for row in pack(lengths, length)]
    chosen = [packed[i] for i in generator.permutation(len(packed) - 1)[:ROWS]]
    tokens = [generator.integers(0, 512, size=sum(row)) for row in chosen]
    return collate([pack_row(some, row, length, 0, True) for some, row in zip(tokens, chosen, strict=True)])


def seconds(model: torch.nn.Module, batch: dict) -> float:
    """Return the least CPU time of a few passes forward and backward."""
    found = []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        next_token_loss(model, batch).backward()
        found.append(time.process_time() - start)
    return min(found[1:])


def main() -> None:
    flags = make_parser(__doc__, max_length=(2048, "Tokens of a row.")).parse_args()
    torch.set_num_threads(1)
    cases = []
    games, texts = (min(60, flags.max_length // 4), min(250, flags.max_length)), (20, flags.max_length)
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        unpack_documents(model, mixers_in(model))
        for kind, bounds in (("as chess games", games), ("as texts", texts)):
            batch = rows_of(*bounds, flags.max_length)
            documents = documents_of(batch["position_ids"])
            with mock.patch.object(mixers, "documents_of", lambda _: None):
                whole = seconds(model, batch)
            case = {
                "model": name,
                "documents": f"{bounds[0]} to {bounds[1]} tokens, {kind}",
                "number": sum(len(group) for group in documents.groups),
                "calls": len(documents.groups),
                "positions": round(sum(group.numel() for group in documents.groups) / (ROWS * flags.max_length) - 1, 3),
                "seconds_whole": round(whole, 3),
                "seconds_unpacked": round(seconds(model, batch), 3),
            }
            case["more_time"] = round(case["seconds_unpacked"] / case["seconds_whole"] - 1, 3)
            cases.append(case)
            times = f"{case['seconds_whole']} s whole, {case['seconds_unpacked']} s unpacked ({case['more_time']:+.0%})"
            print(
                f"{name}; {case['number']} documents of {case['documents']}: {case['calls']} calls of a layer,", end=" "
            )
            print(f"{case['positions']:.0%} more positions; {times}", flush=True)
    write_json(flags.out, machine() | {"rows": ROWS, "length": flags.max_length, "cases": cases})


if __name__ == "__main__":
    main()
