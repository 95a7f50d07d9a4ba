"""Measure what loading reads and holds (`slices`), with 1, 2, 4 and 8 ranks.

    python benchmarks/loading.py --out benchmarks/results/loading.json

First every decoder of the models table and every composite, each tiny and with random weights: it is an error if a weight
differs in one bit from what transformers loads in one process. `read` is what all ranks read, over the size of the files.

Then a Llama in bf16, loaded in fp32 as for training, is read `slices` (each rank its own part) and `sent` (the first rank
reads all, and Accelerate sends it). They take turns, with files in memory; `cold` is `slices` with files that are not, and
`slow` with 50 ms more for each read, as from a busy store on the network.
`held` is the largest growth of a rank's own memory (RssAnon) beyond its shard, over the size of the largest weight in fp32.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from harness import machine, make_parser, write_json
from transformers import AutoModelForCausalLM, LlamaConfig

from accelerate_recipes.models import slices
from accelerate_recipes.optim import local_shard
from accelerate_recipes.ranks import is_first, on_all_ranks

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "children")]
import models_table  # noqa: E402
from loaded import CPU, compare, loaded, on_ranks, sharded  # noqa: E402
from tiny import COMPOSITE, tiny_composite  # noqa: E402

WORLDS = (1, 2, 4, 8)
WAYS = ("slices", "sent", "cold", "slow")


def save_all(root: Path) -> dict[str, str]:
    """Save a tiny model of each architecture and composite."""
    torch.manual_seed(0)
    configs = {name: config for name, config in models_table.ARCHITECTURES.items() if not config.is_encoder_decoder}
    models = {name: lambda config=config: AutoModelForCausalLM.from_config(config) for name, config in configs.items()}
    models |= {name: lambda name=name: tiny_composite(name) for name in COMPOSITE}
    for name, make in models.items():
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape))
        model.save_pretrained(root / name)
    return {name: str(root / name) for name in models}


class Peak:
    """Largest private memory of this process while a thread watches it, in bytes above that at the start."""

    def __enter__(self) -> "Peak":
        self.start, self.most, self.ends = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self.thread.join()

    def now(self) -> int:
        info = psutil.Process().memory_info()
        return info.rss - info.shared

    def watch(self) -> None:
        while not self.ends.wait(0.002):
            self.most = max(self.most, self.now() - self.start)


def read(folder: str, way: str) -> dict[str, float]:
    """Load one model in one way; return seconds and memory, each the largest of all ranks."""
    if way == "cold":
        for file in Path(folder).glob("*.safetensors"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    on_all_ranks(None)
    with Peak() as peak:
        start = time.perf_counter()
        model = loaded(folder, torch.float32, by_slices=way != "sent" or not is_first())
        source, largest = slices.source_of(model), max(p.nbytes for p in model.parameters())
        if way == "sent":
            state = model.state_dict() if is_first() else {}
            model = sharded(model.to("meta"))
            fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=is_first()), model, state)  # pyright: ignore
            del state
        else:
            assert source is not None
            model = sharded(model)
            preadv, slow = os.preadv, lambda *words: time.sleep(0.05) or preadv(*words)
            with mock.patch.object(os, "preadv", slow if way == "slow" else preadv):
                slices.read_slices(model, source, CPU, CPU)
        seconds = time.perf_counter() - start
    held = (peak.most - 4 * sum(local_shard(p).numel() for p in model.parameters())) / largest
    seconds, held = (max(values) for values in zip(*on_all_ranks((seconds, held)), strict=True))
    return {"seconds": seconds, "held": held}


def main() -> None:
    parser = make_parser(
        __doc__, rounds=(3, "Repetitions of the timed part."), hidden_size=(1024, "Of the timed Llama.")
    )
    flags = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "read": {}, "differ": {}, "timed": {}}
    with tempfile.TemporaryDirectory() as root:
        folders = save_all(Path(root))
        for world in WORLDS:
            found = on_ranks(world, compare, [(folder,) for folder in folders.values()])
            results["read"][world] = {
                name: round(result["read"], 4) for name, result in zip(folders, found, strict=True)
            }
            results["differ"][world] = [name for name, result in zip(folders, found, strict=True) if result["differ"]]
            print(
                world, "ranks:", {n: r for n, r in results["read"][world].items() if r > 1.01}, results["differ"][world]
            )
        size = flags.hidden_size
        config = LlamaConfig(
            vocab_size=32 * size, hidden_size=size, intermediate_size=4 * size, num_hidden_layers=12,
            num_attention_heads=8,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(Path(root, "llama"))
        results["bytes"] = model.num_parameters() * 2
        del model
        for world in WORLDS:
            cases = [(str(Path(root, "llama")), way) for way in WAYS * flags.rounds]
            found = on_ranks(world, read, cases)
            results["timed"][world] = {
                way: [result for case, result in zip(cases, found, strict=True) if case[1] == way] for way in WAYS
            }
            print(world, "ranks:", results["timed"][world])
    write_json(flags.out, results)
    if any(results["differ"].values()):
        raise SystemExit("weights differ from those that transformers loads")


if __name__ == "__main__":
    main()
