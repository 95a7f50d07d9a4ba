"""Measure a process's peak memory while a new model is made and sharded: on the meta device, or by plain construction.

    python benchmarks/init_memory.py --config_file accelerate_configs/fsdp_full.yaml \\
        --preset recipes/configs/c4/llama3_2_1b.yaml --out benchmarks/results/init_memory.json

The script launches two processes for each of two ways, one way after the other:

    ours      models.new_model on the meta device, which distributed.prepare shards and then initialises
    plain     from_config on the CPU of every process, then distributed.prepare; the YAML's cpu_ram_efficient_loading

The result is the peak until the optimizer is built, above the memory after the imports: on a CPU the largest resident
set (so the start of gloo is included), on a GPU allocated tensors. Compare it with the bound: a process's own shard plus
the largest single parameter, plus 10 % of their sum. If `ours` exceeds the bound, the script ends with an error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from machine import machine
from transformers import AutoModelForCausalLM

from accelerate_recipes.architecture import new_config
from accelerate_recipes.args import arg, parse
from accelerate_recipes.distributed import local_numel, make_accelerator, prepare
from accelerate_recipes.metrics import device_name, peak_memory_gib
from accelerate_recipes.models import new_model
from accelerate_recipes.recipe import leave, load

WAYS = ("ours", "plain")
ROOT = Path(__file__).parents[1]
GIB = 2**30


@dataclass
class Args(load(ROOT / "recipes/c4.py").Args):
    way: str = arg("ours", "How the model is made.", choices=list(WAYS))


def measure(args: Args) -> None:
    """Run one process of a launch, which writes what it held to a file."""
    before = psutil.Process().memory_info().rss / GIB
    accelerator = make_accelerator(args)
    config = new_config(args)
    start = time.perf_counter()
    if args.way == "ours":
        model = new_model(config, "sdpa")
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    largest = max(parameter.numel() for parameter in model.parameters())
    model, optimizer, _ = prepare(accelerator, model, args)
    seconds = time.perf_counter() - start
    assert optimizer.param_groups[0]["params"]
    on_cpu = accelerator.device.type == "cpu"
    result = {
        "above_imports_gib": peak_memory_gib(accelerator.device) - (before if on_cpu else 0.0),
        "after_imports_gib": before,
        "shard_gib": sum(local_numel(parameter) for parameter in model.parameters()) * 4 / GIB,
        "largest_parameter_gib": largest * 4 / GIB,
        "seconds": seconds,
        "device": device_name(accelerator.device),
    }
    Path(args.output_dir, f"{args.way}-{accelerator.process_index}.json").write_text(
        json.dumps(result), encoding="utf-8"
    )
    leave(0)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config_file", default="accelerate_configs/fsdp_full.yaml", help="The accelerate YAML.")
    parser.add_argument("--preset", default="recipes/configs/c4/llama3_2_1b.yaml", help="Whose model.")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="Which to measure.")
    parser.add_argument("--num_processes", type=int, default=2, help="Processes to launch.")
    parser.add_argument("--out", type=Path, help="Write all numbers to this JSON file.")
    flags = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in flags.ways:
            command = f"""{sys.executable} -m accelerate.commands.launch --config_file {flags.config_file}
                --mixed_precision no --num_processes {flags.num_processes} --main_process_port 0 {__file__}
                --config {flags.preset} --output_dir {folder} --way {way}"""
            subprocess.run(command.split(), check=True)
            files = sorted(Path(folder).glob(f"{way}-*.json"))
            results[way] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    print(f"GiB above the imports, of {flags.num_processes} processes:")
    for way, ranks in results.items():
        for rank, r in enumerate(ranks):
            r["bound_gib"] = 1.1 * (r["shard_gib"] + r["largest_parameter_gib"])
            print(
                f"{way:6} rank {rank}: {r['above_imports_gib']:.2f}, {r['above_imports_gib'] / r['bound_gib']:.2f} of the "
                f"bound {r['bound_gib']:.2f} = 1.1 x (shard {r['shard_gib']:.2f} + largest parameter "
                f"{r['largest_parameter_gib']:.2f}); {r['seconds']:.1f} s"
            )
    if flags.out:
        found = {"machine": machine(torch.device("cpu")), "preset": flags.preset, "ways": results}
        flags.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if any(r["above_imports_gib"] > r["bound_gib"] for r in results.get("ours", [])):
        sys.exit("ours is over the bound")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        measure(parse(Args))
    else:
        main()
