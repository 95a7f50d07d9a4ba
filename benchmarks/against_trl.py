"""Compare our loop with trl's SFTTrainer with packing, on chess games: tokens/s, and whether the loss curves agree.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        benchmarks/against_trl.py --out benchmarks/results/against_trl.json

Model, rows and turns are those of benchmarks/engine_overhead.py: one launch trains copies of one Llama side by side.
All get the same packed rows in the same order, the same optimizer and the same FSDP2 units. trl's trainer has its
defaults, with `packing` on (the rows are packed beforehand, since trl would pack them differently), its own collator,
which lays the rows of a batch one after the other, and its own loss. Only its activation checkpointing, on by default, is
off, as in our loop.

The ratios are ours / trl's, and ours / those of the bare loop, which is the floor: above 1 if ours is faster. Each is the
median over the rounds, with the smallest and the largest.
The losses of all segments are drawn too; those of the last step must agree, or the benchmark ends with an error.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from engine_overhead import Turns, compare, order_of_trainer, parse_flags, settings_of
from matplotlib.figure import Figure
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.packing import PackedRows
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from chess_games import rules

LOOPS = {"ours": "ours", "trainer": "trl", "bare": "bare loop"}


def make_sft_trainer(
    model: PreTrainedModel, rows: PackedRows, args: TrainArgs, world_size: int, turns: Turns
) -> SFTTrainer:
    settings = settings_of(SFTConfig, args, world_size) | {
        "activation_checkpointing": False,
        "packing": True,
        "max_length": rows.max_length,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "bf16": os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16",
    }
    packed = rows.rows.with_format(None).select_columns(["input_ids", "lengths"])
    return SFTTrainer(
        model,
        SFTConfig(**settings),
        train_dataset=packed.rename_column("lengths", "seq_lengths").select(
            order_of_trainer(args, len(rows), world_size)
        ),
        processing_class=new_word_tokenizer(rules.all_uci_moves()),
        callbacks=[turns],
    )


def draw(path: Path, found: dict[str, Any]) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curve, chart = figure.subplots(1, 2)
    # Of the bare loop, only the losses of last steps are known.
    for name, style in (("trainer", "o-"), ("ours", "x--")):
        losses = found["losses"][name]
        places = [found["flags"]["steps"] * (i + 1) for i in range(len(losses))]
        curve.plot(places, losses, style, label=LOOPS[name])
    curve.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss of each segment")
    curve.legend()
    chart.boxplot([found["tokens_per_second"][name] for name in LOOPS], tick_labels=[*LOOPS.values()])
    chart.set(ylabel="tokens/s", title="Speed of the segments")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    flags = parse_flags(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        result = compare(flags, folder, make_sft_trainer)
        if flags.out and int(os.environ.get("RANK", 0)) == 0:
            draw(flags.out.with_suffix(".png"), result)
