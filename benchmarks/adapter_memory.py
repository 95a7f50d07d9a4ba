"""Measure what a process holds while it trains a whole model, LoRA or DoRA adapters: bytes of each kind, and the peak.

    python benchmarks/adapter_memory.py --out benchmarks/results/adapter_memory
    python benchmarks/adapter_memory.py --mixture --out benchmarks/results/adapter_memory_mixture

The script writes a Llama of the sizes below, or a mixture of experts, to a folder. For each way two processes load it as a
recipe does, and take two optimizer steps. The bytes are this process's shards after the second backward pass. The peak is
counted from the sharding of the model on, above the imports: resident set on a CPU, allocated tensors on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from machine import machine
from transformers import LlamaConfig, MixtralConfig

from accelerate_recipes.adapters import load_settings
from accelerate_recipes.args import TrainArgs, arg, parse
from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss_without_logits
from accelerate_recipes.models import load_model, new_model
from accelerate_recipes.optim import local_shard
from accelerate_recipes.recipe import leave
from accelerate_recipes.run import Run
from accelerate_recipes.strategy import num_accelerators
from accelerate_recipes.weights import initialize

# Name of the way: flags of the launcher, arguments of this script.
WAYS = {"full": ("", ""), "LoRA": ("", "--use_peft"), "DoRA": ("", "--use_peft --use_dora")}
QLORA = {"QLoRA": ("", "--use_peft --load_in_4bit")}  # on a GPU
RECOMPUTE, LORA = "--fsdp_activation_checkpointing true", "--use_peft --lora_dropout 0"
ATTENTION = f"{LORA} --lora_target_modules q_proj k_proj v_proj o_proj"
MIXTURE_WAYS = {
    "LoRA, attention": ("", ATTENTION),
    "LoRA, experts too": ("", LORA),
    "LoRA, attention; layers recomputed": (RECOMPUTE, ATTENTION),
    "LoRA, experts too; layers recomputed": (RECOMPUTE, LORA),
}
SIZES = {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip
MIXTURE_SIZES = SIZES | {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_local_experts": 8,
}  # fmt: skip
MIB = 2**20


@dataclass
class Args(TrainArgs):
    model_name_or_path: str = arg("", "The model's folder.")
    num_tokens: int = arg(256, "Tokens of a row; each process has one row.")
    total_batch_size: int = 2


def mib(tensors: Iterable[torch.Tensor]) -> float:
    return sum(local_shard(t).numel() * t.element_size() for t in tensors) / MIB


def peak_mib(device: torch.device) -> float:
    if device.type == "cpu":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
        return int(status["VmHWM"].split()[0]) / 1024
    return torch.accelerator.max_memory_allocated(device) / MIB


def forget_peak(device: torch.device) -> None:
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    else:
        torch.accelerator.reset_peak_memory_stats(device)


def measure(args: Args) -> None:
    """Run one process of a launch, which writes what it holds to a file."""
    before = psutil.Process().memory_info().rss / MIB
    accelerator = make_accelerator(args)
    run = Run(args, accelerator)
    run.shard(load_model(args.model_name_or_path, "sdpa", **load_settings(args)))
    model, optimizer = run.model, run.optimizer
    forget_peak(accelerator.device)
    ids = torch.arange(args.num_tokens, device=accelerator.device).unsqueeze(0)
    batch = {"input_ids": ids, "position_ids": ids, "labels": ids}
    gradients = 0.0

    def look(*_) -> None:
        nonlocal gradients
        gradients = mib(p.grad for p in model.parameters() if p.grad is not None)

    optimizer.register_step_pre_hook(look)
    model.train()
    for _ in range(2):
        train_step(run, [batch], next_token_loss_without_logits, count_next_tokens)
    result = {
        "frozen": mib(p for p in model.parameters() if not p.requires_grad),
        "trained": mib(p for p in model.parameters() if p.requires_grad),
        "gradients": gradients,
        "optimizer": mib(t for state in optimizer.state.values() for t in state.values()),
        "peak": peak_mib(accelerator.device) - (before if accelerator.device.type == "cpu" else 0.0),
    }
    Path(args.output_dir, f"{accelerator.process_index}.json").write_text(json.dumps(result), encoding="utf-8")
    leave(0)


def table(ways: dict[str, list[dict[str, float]]]) -> str:
    """Format the MiB of the last rank; rank 0 also holds what it needed to read the model."""
    columns = ["frozen", "trained", "gradients", "optimizer", "peak"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {way} | {' | '.join(f'{ranks[-1][c]:.0f}' for c in columns)} |" for way, ranks in ways.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config_file", default="accelerate_configs/fsdp_full.yaml", help="The accelerate YAML.")
    parser.add_argument("--num_processes", type=int, default=2, help="Processes to launch.")
    parser.add_argument("--num_hidden_layers", type=int, default=SIZES["num_hidden_layers"], help="Layers.")
    parser.add_argument("--mixture", action="store_true", help="Measure LoRA in a Mixtral with eight experts a layer.")
    parser.add_argument("--out", type=Path, help="Write all numbers to OUT.json, and the table to OUT.md.")
    flags = parser.parse_args()
    ways = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = (MIXTURE_SIZES if flags.mixture else SIZES) | {"num_hidden_layers": flags.num_hidden_layers}
        config = MixtralConfig(**sizes) if flags.mixture else LlamaConfig(**sizes)
        model = initialize(new_model(config, "sdpa"), 0, "cpu")
        model.save_pretrained(folder)
        num_parameters = model.num_parameters()
        del model
        chosen = MIXTURE_WAYS if flags.mixture else WAYS | (QLORA if num_accelerators() else {})
        for way, (launcher_flags, arguments) in chosen.items():
            command = f"""{sys.executable} -m accelerate.commands.launch --config_file {flags.config_file}
                --num_processes {flags.num_processes} --main_process_port 0 {launcher_flags} {__file__}
                --model_name_or_path {folder} --output_dir {folder} {arguments}"""
            subprocess.run(command.split(), check=True)
            files = [Path(folder, f"{rank}.json") for rank in range(flags.num_processes)]
            ways[way] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    print(table(ways))
    if flags.out:
        found = {"machine": machine(torch.device("cpu")), "num_parameters": num_parameters, "MiB_of_ranks": ways}
        flags.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        flags.out.with_suffix(".md").write_text(
            f"Memory of one process in MiB (rank {flags.num_processes - 1} of {flags.num_processes}), which trains a "
            f"{config.model_type} of {num_parameters:,} parameters; adapters of rank 16. {flags.config_file}, precision "
            f"bf16; device: {found['machine']['device']}; raw numbers in {flags.out.with_suffix('.json').name}.\n\n"
            f"    python {' '.join(sys.argv)}\n\n{table(ways)}\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        measure(parse(Args))
    else:
        main()
