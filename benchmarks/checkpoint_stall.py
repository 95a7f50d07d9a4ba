"""Measure how long training stands still for a checkpoint: asynchronous, synchronous, and by Accelerate's `save_state`.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        benchmarks/checkpoint_stall.py --out benchmarks/results/checkpoint_stall.json

One launch trains one Llama under FSDP2. Four kinds of segments of --steps optimizer steps take turns, so that
other work on the machine disturbs all of them; the first round warms up and does not count:

    none         no save
    async        a checkpoint as a run writes it, from a copy in host memory, while the steps continue
    sync         the same with --async_save false
    save_state   `Accelerator.save_state` with SHARDED_STATE_DICT: model, optimizer and RNG; no marker, no checksums

`stall` is the duration of the call on the slowest rank: during it no step is made. `total` is the duration of the segment,
from before the save until the steps are made and the files are on the disk. `extra` is `total` less that of the segment
without a save in the same round. On a CPU a save in the background takes its time from the steps, so `extra` shows its
cost where no core is idle; with a GPU the steps do not need the cores. Read the ratio of the stalls first: the median
of async should stay under a quarter of sync.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator
from machine import machine

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.checkpoint.checkpointer import Checkpointer
from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models import new_llama
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.ranks import max_over_ranks
from accelerate_recipes.run import Run

SEGMENTS = ("none", "async", "sync", "save_state")
LENGTH = 64  # tokens in a row


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default, text in (
        ("rounds", 5, "Rounds that count."),
        ("steps", 4, "Optimizer steps in a segment."),
        ("hidden_size", 640, "Width of the model."),
        ("num_hidden_layers", 10, "Layers of the model."),
        ("vocab_size", 16000, "Words in the model's vocabulary."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--out", type=Path, help="Write all numbers to this JSON file.")
    return parser.parse_args()


def now(accelerator: Accelerator) -> float:
    """Return the time in seconds, once every rank is here and its device has finished."""
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(flags: argparse.Namespace, output_dir: Path) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    args = TrainArgs(output_dir=str(output_dir), total_batch_size=world_size, save_total_limit=1)
    accelerator = make_accelerator(args)
    model = new_llama(
        "sdpa",
        vocab_size=flags.vocab_size,
        hidden_size=flags.hidden_size,
        intermediate_size=4 * flags.hidden_size,
        num_hidden_layers=flags.num_hidden_layers,
        num_attention_heads=flags.hidden_size // 64,
        num_key_value_heads=flags.hidden_size // 64,
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    artifacts = [model.config, model.generation_config]
    run = Run(args, accelerator)
    run.shard(model)
    accelerator._optimizers.append(run.optimizer)  # for save_state; `prepare` keeps it from Accelerate
    scheduler = make_scheduler(run.optimizer, args, 100)
    checkpointer = Checkpointer(accelerator, run.model, run.optimizer, scheduler, args, artifacts, resumed_from=None)
    (output_dir / "metrics.jsonl").touch()

    generator = torch.Generator().manual_seed(accelerator.process_index)
    tokens = torch.randint(flags.vocab_size, (1, LENGTH), generator=generator).to(accelerator.device)
    batch = {"input_ids": tokens, "position_ids": torch.arange(LENGTH, device=tokens.device)[None], "labels": tokens}

    def segment(name: str, number: int) -> dict[str, float]:
        """Save in the given way, then take the steps."""
        start = now(accelerator)
        if name == "save_state":
            accelerator.save_state(str(output_dir / "save_state"))
        elif name != "none":
            args.async_save = name == "async"
            checkpointer.save(number, {})
        stall = max_over_ranks(time.perf_counter() - start, accelerator.device)
        for _ in range(flags.steps):
            train_step(run, [batch], next_token_loss, count_next_tokens)
        checkpointer.wait()
        found = {"stall": stall, "total": now(accelerator) - start}
        if name == "save_state":
            found["bytes"] = size_of(output_dir / "save_state")
            dist.barrier()
            if accelerator.is_main_process:
                shutil.rmtree(output_dir / "save_state")
        elif name != "none":
            found["bytes"] = size_of(checkpointer.newest)
        return found

    rounds = []
    for i in range(1 + flags.rounds):
        order = SEGMENTS[i % len(SEGMENTS) :] + SEGMENTS[: i % len(SEGMENTS)]
        found = {name: segment(name, 1 + i * len(SEGMENTS) + SEGMENTS.index(name)) for name in order}
        for name in SEGMENTS:
            found[name]["extra"] = found[name]["total"] - found["none"]["total"]
        rounds.append(found)
        accelerator.print(
            f"round {i}: "
            + ", ".join(
                f"{name} stall {found[name]['stall']:.2f} s, total {found[name]['total']:.2f} s" for name in SEGMENTS
            ),
            flush=True,
        )
    if accelerator.is_main_process:
        counted = rounds[1:]
        medians = {
            name: {key: median(found[name][key] for found in counted) for key in ("stall", "total", "extra")}
            for name in SEGMENTS
        }
        for name in SEGMENTS[1:]:
            values = medians[name]
            print(
                f"{name:<12} stall {values['stall']:6.2f} s, total {values['total']:6.2f} s, "
                f"extra {values['extra']:6.2f} s, {counted[0][name]['bytes'] / 2**20:,.0f} MiB"
            )
        ratio = median(found["async"]["stall"] / found["sync"]["stall"] for found in counted)
        print(
            f"{num_parameters:,} parameters; stall async/sync {ratio:.3f}: "
            f"{'under' if ratio < 0.25 else 'NOT under'} a quarter"
        )
        if flags.out:
            result = {"machine": machine(accelerator.device), "num_parameters": num_parameters, "rounds": counted}
            result |= {"medians": medians, "stall_async_over_sync": ratio}
            flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    parsed = parse_flags()
    # All ranks need one folder before they can talk, so its name is made from what they have in common.
    folder = Path(tempfile.gettempdir()) / f"checkpoint_stall-{os.environ.get('MASTER_PORT', os.getpid())}"
    folder.mkdir(exist_ok=True)
    try:
        main(parsed, folder)
    finally:
        if int(os.environ.get("RANK", 0)) == 0:
            shutil.rmtree(folder, ignore_errors=True)
