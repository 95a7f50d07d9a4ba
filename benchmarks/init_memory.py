"""Measure a process's peak memory while a new model is made on the meta device, sharded and then initialised.

    python benchmarks/init_memory.py --config_file accelerate_configs/fsdp_full.yaml \\
        --preset recipes/configs/c4/llama3_2_1b.yaml --out benchmarks/results/init_memory.json

The result is the peak until the optimizer is built, above the memory after the imports: on a CPU the largest resident
set (so the start of gloo is included), on a GPU allocated tensors. If it exceeds the bound, the script ends with an error:
a process's own shard plus the largest single parameter, plus 10 % of their sum.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import GIB, ROOT, machine, make_parser, write_json

from accelerate_recipes.args import TrainArgs, parse
from accelerate_recipes.arguments.shipped import load
from accelerate_recipes.distributed import make_accelerator, prepare
from accelerate_recipes.metrics import device_name, peak_memory_gib
from accelerate_recipes.models.configurations import new_config
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.optim import local_shard
from accelerate_recipes.recipe import leave


def measure(args: TrainArgs) -> None:
    """Run one process of a launch, which writes what it held to a file."""
    before = psutil.Process().memory_info().rss / GIB
    accelerator = make_accelerator(args)
    start = time.perf_counter()
    model = new_model(new_config(args), "sdpa")
    largest = max(parameter.numel() for parameter in model.parameters())
    model, optimizer, _ = prepare(accelerator, model, args)
    seconds = time.perf_counter() - start
    assert optimizer.param_groups[0]["params"]
    on_cpu = accelerator.device.type == "cpu"
    shard = sum(local_shard(parameter).numel() for parameter in model.parameters())
    result = {
        "above_imports_gib": peak_memory_gib(accelerator.device) - (before if on_cpu else 0.0),
        "after_imports_gib": before,
        "shard_gib": shard * 4 / GIB,
        "largest_parameter_gib": largest * 4 / GIB,
        "bound_gib": 1.1 * (shard + largest) * 4 / GIB,
        "seconds": seconds,
        "device": device_name(accelerator.device),
    }
    Path(args.output_dir, f"{accelerator.process_index}.json").write_text(json.dumps(result), encoding="utf-8")
    leave(0)


def main() -> None:
    parser = make_parser(__doc__, num_processes=(2, "Processes to launch."))
    parser.add_argument("--config_file", default="accelerate_configs/fsdp_full.yaml", help="The accelerate YAML.")
    parser.add_argument("--preset", default="recipes/configs/c4/llama3_2_1b.yaml", help="Whose model.")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = f"""{sys.executable} -m accelerate.commands.launch --config_file {flags.config_file}
            --mixed_precision no --num_processes {flags.num_processes} --main_process_port 0 {__file__}
            --config {flags.preset} --output_dir {folder}"""
        subprocess.run(command.split(), check=True)
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(folder).glob("*.json"))]
    print(f"GiB above the imports, of {flags.num_processes} processes:")
    for rank, r in enumerate(ranks):
        print(
            f"rank {rank}: {r['above_imports_gib']:.2f}, {r['above_imports_gib'] / r['bound_gib']:.2f} of the "
            f"bound {r['bound_gib']:.2f} = 1.1 x (shard {r['shard_gib']:.2f} + largest parameter "
            f"{r['largest_parameter_gib']:.2f}); {r['seconds']:.1f} s"
        )
    write_json(flags.out, {"machine": machine(), "preset": flags.preset, "ranks": ranks})
    if any(r["above_imports_gib"] > r["bound_gib"] for r in ranks):
        sys.exit("a process held more than the bound")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        measure(parse(load(ROOT / "recipes/c4.py").Args, sys.argv[1:]))
    else:
        main()
