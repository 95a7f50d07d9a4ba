"""Compare our loop with trl's SFTTrainer with packing, on chess games: tokens/s, and whether the loss curves agree.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        benchmarks/against_trl.py --out benchmarks/results/against_trl.json

Model, rows and turns are those of benchmarks/engine_overhead.py: one launch trains two copies of one Llama side by side.
Both get the same packed rows in the same order, the same optimizer and the same FSDP2 units. trl's trainer has its
defaults, with `packing` on (the rows are packed beforehand, since trl would pack them differently), its own collator,
which lays the rows of a batch one after the other, and its own loss. Only its activation checkpointing, on by default, is
off, as in our loop.

The ratio is ours / trl's, above 1 if ours is faster: the median over the rounds, with the smallest and the largest.
The losses of all segments are drawn too; those of the last step must agree, or the benchmark ends with an error.
"""

import argparse
import copy
import json
import os
import tempfile
from statistics import median

import numpy as np
import torch
from datasets import Dataset
from engine_overhead import OurLoop, Turns, load_rows, make_args, make_model, order_of_trainer, parse_flags
from machine import machine
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PrinterCallback
from trl import SFTConfig, SFTTrainer

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.rows import make_train_loader
from accelerate_recipes.distributed import make_accelerator, strategy_name
from accelerate_recipes.games import rules
from accelerate_recipes.tokenizers import new_word_tokenizer

LOOPS = ("ours", "trainer")


class OurCurve(OurLoop):
    """Our loop, which also keeps the loss of each segment."""

    def __init__(self, *args):
        super().__init__(*args)
        self.losses: list[float] = []

    def run(self, num_steps: int) -> np.ndarray:
        seconds = super().run(num_steps)
        self.losses.append(self.last_loss)
        return seconds


def make_sft_trainer(
    model: PreTrainedModel, rows: Dataset, args: TrainArgs, max_length: int, world_size: int, turns: Turns
) -> SFTTrainer:
    same = {name: value for name, value in vars(args).items() if hasattr(SFTConfig, name)}
    settings = {
        "gradient_accumulation_steps": args.accumulation_steps(world_size),
        "activation_checkpointing": False,
        "optim": "adamw_torch_fused",
        "packing": True,
        "max_length": max_length,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "logging_strategy": "no",  # `turns` asks for the entries
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16",
        # engine_overhead.make_trainer says why.
        "accelerator_config": {
            "use_configured_state": True,
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        },
    }
    order = order_of_trainer(args, len(rows), world_size)
    trainer = SFTTrainer(
        model,
        SFTConfig(**same | settings),
        train_dataset=rows.rename_column("lengths", "seq_lengths").select(order),
        processing_class=new_word_tokenizer(rules.all_uci_moves()),
        callbacks=[turns],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def draw(path, steps: int, losses: dict[str, list[float]], speeds: dict[str, list[float]]) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curve, chart = figure.subplots(1, 2)
    for name, style in (("trainer", "o-"), ("ours", "x--")):
        places = [steps * (i + 1) for i in range(len(losses[name]))]
        curve.plot(places, losses[name], style, label="trl" if name == "trainer" else name)
    curve.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss of each segment")
    curve.legend()
    chart.boxplot([speeds[name] for name in LOOPS], tick_labels=["ours", "trl"])
    chart.set(ylabel="tokens/s", title="Speed of the segments")
    figure.savefig(path, dpi=110)


def main(flags: argparse.Namespace, output_dir: str) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    args = make_args(flags, output_dir, world_size)
    rows, vocab_size = load_rows(flags, args.seed)
    accelerator = make_accelerator(args)
    model = make_model(flags, vocab_size, accelerator.device)
    num_parameters = model.num_parameters()
    loader = make_train_loader(rows, args, accelerator.process_index, world_size)
    ours = OurCurve(accelerator, copy.deepcopy(model), args, loader)
    plan = [(name, flags.steps) for i in range(1 + flags.pairs) for name in LOOPS[:: -1 if i % 2 else 1]]
    plan += [(name, 1) for name in LOOPS]  # one more step, whose loss is logged alone
    turns = Turns(plan, {"ours": ours.run})
    packed = rows.rows.with_format(None).select_columns(["input_ids", "lengths"])
    trainer = make_sft_trainer(model, packed, args, flags.max_length, world_size, turns)
    trainer.train()

    losses = {"ours": ours.losses, "trainer": [e["loss"] for e in trainer.state.log_history if "loss" in e]}
    tokens = flags.steps * args.total_batch_size * flags.max_length
    # The first round warms up; the last segment only gives the loss.
    seconds, cpu = ({name: [float(s[i]) for s in turns.seconds[name][1:-1]] for name in LOOPS} for i in range(2))
    speeds = {name: [tokens / s for s in seconds[name]] for name in LOOPS}
    result = machine(accelerator.device) | {
        "strategy": strategy_name(accelerator),
        "mixed_precision": accelerator.mixed_precision,
        "processes": world_size,
        "num_parameters": num_parameters,
        "flags": vars(flags) | {"out": str(flags.out)},
        "tokens_per_second": speeds,
        "speed_ours/trl": [a / b for a, b in zip(speeds["ours"], speeds["trainer"], strict=True)],
        "cpu_time_ours/trl": [a / b for a, b in zip(cpu["ours"], cpu["trainer"], strict=True)],
        "losses": losses,
    }
    if accelerator.is_main_process:
        for name in ("speed_ours/trl", "cpu_time_ours/trl"):
            values = result[name]
            print(f"{name}: {median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"median tokens/s: ours {median(speeds['ours']):,.0f}, trl's {median(speeds['trainer']):,.0f}")
        print(
            "losses of segments, ours / trl's:",
            ", ".join(f"{a:.4f} / {b:.4f}" for a, b in zip(*losses.values(), strict=True)),
        )
        if flags.out:
            flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            draw(flags.out.with_suffix(".png"), flags.steps, losses, speeds)
    last = [losses[name][-1] for name in LOOPS]
    if abs(last[0] - last[1]) > (1e-3 if accelerator.mixed_precision == "no" else 1e-2) * last[0]:
        raise RuntimeError(f"ours and trl's did not train the same: {last}")
    accelerator.end_training()


if __name__ == "__main__":
    flags = parse_flags()
    with tempfile.TemporaryDirectory() as output_dir:
        main(flags, output_dir)
