"""Measure the cost of the training loop: tokens/s of `engine.train`, `transformers.Trainer` and a bare torch loop.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        benchmarks/engine_overhead.py --out benchmarks/results/engine_overhead.json

One launch trains three copies of one Llama side by side, on the same rows of data/chess in the same order and in the
same FSDP2 units. They take turns, so that other work on the machine disturbs all three:

    ours      engine.train as a recipe calls it, with schedule, log and the check for non-finite values
    trainer   transformers.Trainer with its own data loader and the same FSDP plugin; no saving, no evaluation
    bare      fully_shard, backward, clip and step by hand; no Accelerate, schedule, log or check: the floor

A segment is --steps optimizer steps of one loop; a round is one segment of each, in an order that rotates; a first
round warms up and does not count. The clock of a segment runs from the fetch of its first micro-batch to the end of
its last step, between barriers, and covers one log entry of `ours` and of `trainer`. All three reduce-scatter gradients
with every micro-batch (the Trainer's default would keep them whole until the last). Speed counts every position of a
row, padding too.

Read the ratios first: above 1, ours is faster. Each is the median over the rounds, with the smallest and the
largest; if 1 lies between those, the run shows no difference. The CPU time of rank 0 in a segment varies less than its
wall time, and shows what a loop costs the host: below 1, ours is cheaper. The losses of the three at the
last step are compared: if they differ, the loops did not do the same work, and the benchmark ends with an error.
"""

import argparse
import contextlib
import copy
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import load_from_disk
from harness import ROOT, machine, make_parser, print_ratios, ratios, turns, write_json
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from accelerate_recipes import engine
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data.packing import PackedRows
from accelerate_recipes.data.rows import make_train_loader, rows_of_step
from accelerate_recipes.distributed import make_accelerator, strategy_name
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.models.weights import initialize
from accelerate_recipes.optim import make_scheduler, optimizer_fn
from accelerate_recipes.run import Run
from chess_games import rules
from chess_games.games import GamesArgs, prepare_games

LOOPS = ("ours", "trainer", "bare")
GAMES = ROOT / "data/chess/games_20k.parquet"


def parse_flags(description: str | None) -> argparse.Namespace:
    parser = make_parser(
        description,
        pairs=(5, "Rounds that count."),
        steps=(10, "Optimizer steps in a segment."),
        micro_batches=(2, "Forward passes per step on one process."),
        per_device_train_batch_size=(1, "Rows per forward pass."),
        max_length=(256, "Tokens in a row."),
        hidden_size=(512, "Width of the model."),
        intermediate_size=(1408, "Width of the model's feed-forward layers."),
        num_hidden_layers=(6, "Layers of the model."),
        num_attention_heads=(8, "Attention heads of the model."),
    )
    parser.add_argument("--data_cache_dir", default=".cache/data", help="Folder for the packed games.")
    return parser.parse_args()


def now() -> np.ndarray:
    """Return wall and CPU seconds of this process, once every rank is here and its device has finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    dist.barrier()
    return np.array([time.perf_counter(), time.process_time()])


class OurLoop:
    """Run `engine.train` a segment at a time; each segment continues where the one before ended.

    The engine uses this object as its loader, which starts the clock when the first micro-batch is fetched (opening the
    log is no part of a step), and as its checkpointer, whose `save` is the last act of a run and stops it.
    """

    newest = resumed_from = None
    data_states: ClassVar[list] = []
    is_uneven = False

    def __init__(self, accelerator: Accelerator, model: nn.Module, args: TrainArgs, loader: DataLoader):
        self.args, self.accelerator = args, accelerator
        self.training = Run(args, accelerator)
        self.training.shard(model)
        self.training.scheduler = make_scheduler(self.training.optimizer, args, args.max_steps)
        self.training.checkpointer = self
        self.model, self.loader, self.step = self.training.model, loader, 0
        self.losses: list[float] = []

    def run(self, num_steps: int) -> np.ndarray:
        with contextlib.redirect_stdout(io.StringIO()):
            self.training.total_steps = self.step + num_steps
            records = engine.train(
                self.training, self, loss_fn=next_token_loss, count_fn=count_next_tokens, evaluate_fn=lambda step: {}
            )
        self.losses.append([record["loss"] for record in records if "loss" in record][-1])
        return self.seconds

    def resume(self) -> int:
        return self.step

    def start_at(self, step: int, states: list[dict]) -> None:
        self.loader.start_at(step, states)

    def state(self) -> dict:
        return {}

    counts = state

    def wait(self) -> None:
        pass

    def __iter__(self):
        self.start = now()
        return iter(self.loader)

    def save(self, step: int, data_state: dict) -> None:
        self.seconds = now() - self.start
        self.step = step


class BareLoop:
    """Loop with the same arithmetic, in nothing but torch."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, args: TrainArgs, loader: DataLoader):
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        settings: dict[str, Any] = {"reshard_after_forward": plugin.reshard_after_forward, "mp_policy": policy}
        # Make the same units as Accelerate: layers, input embedding, final norm with output layer, and the rest.
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, **settings)
        fully_shard(model.model.embed_tokens, **settings)  # pyright: ignore[reportCallIssue]
        fully_shard([model.model.norm, model.lm_head], **settings | {"reshard_after_forward": False})  # pyright: ignore[reportCallIssue]
        fully_shard(model, mp_policy=policy)
        self.model, self.args, self.device = model.train(), args, accelerator.device
        self.optimizer = optimizer_fn(model, args)(model)
        self.micro_batches = iter(loader)
        self.losses: list[float] = []  # of the last step of each segment

    def run(self, num_steps: int) -> np.ndarray:
        start = now()
        for _ in range(num_steps):
            loss = self.train_step()
        seconds = now() - start
        dist.all_reduce(loss)
        self.losses.append(loss.item())
        return seconds

    def train_step(self) -> torch.Tensor:
        """Take one step; return this rank's part of the mean loss over all targets."""
        world_size = dist.get_world_size()
        batches = []
        for _ in range(self.args.accumulation_steps(world_size)):
            batch, names = next(self.micro_batches), ("input_ids", "position_ids", "labels")
            batches.append({name: batch[name].to(self.device, non_blocking=True) for name in names})
        num_targets = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()
        dist.all_reduce(num_targets)
        loss_sum = torch.zeros((), device=self.device)
        for batch in batches:
            inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
            logits = self.model(**inputs, use_cache=False).logits
            targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            (loss * world_size / num_targets).backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss_sum / num_targets


class Turns(TrainerCallback):
    """Follow the plan of (loop, steps) from inside the Trainer, whose loop cannot be left and entered again.

    The other loops take their turn between two steps of the Trainer. A step of the Trainer ends where it calls
    `on_step_end`; what it does next, logging and fetching, belongs to the next step.
    """

    def __init__(self, plan: Iterable[tuple[str, int]], runs: dict[str, Callable[[int], np.ndarray]]):
        self.plan, self.runs = iter(plan), runs
        self.seconds: dict[str, list[np.ndarray]] = {name: [] for name in (*runs, "trainer")}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.next_turn()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.steps_left -= 1
        if self.steps_left == 0:
            self.seconds["trainer"].append(now() - self.start)
            control.should_log = True
            self.next_turn()

    def next_turn(self) -> None:
        for name, num_steps in self.plan:
            if name == "trainer":
                self.steps_left, self.start = num_steps, now()
                return
            self.seconds[name].append(self.runs[name](num_steps))


def order_of_trainer(args: TrainArgs, num_rows: int, world_size: int) -> list[int]:
    """List the rows for a Trainer that reads them one after the other, so that its steps are those of `StepOrder`."""
    micro_batches = args.accumulation_steps(world_size)
    order = []
    for step in range(args.max_steps):
        # StepOrder gives each rank one slice of a global batch; Accelerate deals micro-batches out in turn.
        chosen = torch.tensor(rows_of_step(step, args.total_batch_size, num_rows, args.seed))
        order += chosen.view(world_size, micro_batches, -1).transpose(0, 1).flatten().tolist()
    return order


def settings_of(config_class: type[TrainingArguments], args: TrainArgs, world_size: int) -> dict[str, Any]:
    """Collect the arguments of a Trainer that does what `args` says, and nothing besides but the entries of its log."""
    return {name: value for name, value in vars(args).items() if hasattr(config_class, name)} | {
        "gradient_accumulation_steps": args.accumulation_steps(world_size),
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "logging_strategy": "no",  # `turns` asks for the entries
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "accelerator_config": {
            # TrainingArguments would reset Accelerate's state, which `ours` uses too and which on a CPU only
            # make_accelerator can start. Keeping it also gives the Trainer the very same FSDP plugin.
            "use_configured_state": True,
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        },
    }


def make_trainer(model: nn.Module, rows: PackedRows, args: TrainArgs, world_size: int, turns: Turns) -> Trainer:
    """Make a Trainer with the arguments `args`, which reads the rows in the order of `StepOrder`."""
    return Trainer(
        model,
        TrainingArguments(**settings_of(TrainingArguments, args, world_size), remove_unused_columns=False),
        train_dataset=Subset(rows, order_of_trainer(args, len(rows), world_size)),
        callbacks=[turns],
    )


def make_args(flags: argparse.Namespace, output_dir: str, world_size: int) -> TrainArgs:
    return TrainArgs(
        output_dir=output_dir,
        max_steps=flags.steps * (1 + flags.pairs) + 1,
        total_batch_size=flags.per_device_train_batch_size * flags.micro_batches * world_size,
        per_device_train_batch_size=flags.per_device_train_batch_size,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=0,
        logging_steps=flags.steps,
        save_steps=0,
    )


def make_model(flags: argparse.Namespace, vocab_size: int, device: torch.device) -> PreTrainedModel:
    """Make and initialise the model before it is sharded, so that its copies start from the same weights."""
    model = new_model(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=flags.hidden_size,
            intermediate_size=flags.intermediate_size,
            num_hidden_layers=flags.num_hidden_layers,
            num_attention_heads=flags.num_attention_heads,
            num_key_value_heads=flags.num_attention_heads,
            max_position_embeddings=flags.max_length,
        ),
        "sdpa",
    )
    return initialize(model, TrainArgs.seed, device)


def load_rows(flags: argparse.Namespace, seed: int) -> tuple[PackedRows, int]:
    """Return packed games and the size of their vocabulary, which has one token per move."""
    tokenizer = new_word_tokenizer(rules.all_uci_moves())
    games = GamesArgs(
        train_files=[str(GAMES)], heldout_share=0.05, num_positions=1, data_cache_dir=flags.data_cache_dir
    )
    folder = prepare_games(tokenizer, games, max_length=flags.max_length, seed=seed)
    rows = load_from_disk(folder / "train")
    return PackedRows(rows, flags.max_length, tokenizer.pad_token_id, document_mask=True), len(tokenizer)


def compare(
    flags: argparse.Namespace,
    output_dir: str,
    make_trainer: Callable[[PreTrainedModel, PackedRows, TrainArgs, int, Turns], Trainer],
) -> dict[str, Any]:
    """Let the loops train in turns; return what was found, which the first process also writes and prints.

    Raises:
        RuntimeError: if the loops shard other modules, or end with other losses.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    args = make_args(flags, output_dir, world_size)
    rows, vocab_size = load_rows(flags, args.seed)
    accelerator = make_accelerator(args)
    strategy = strategy_name(accelerator)
    if strategy not in ("FSDP2 full shard", "FSDP2 gradients and optimizer sharded"):
        raise ConfigError(f"no bare loop for {strategy}; use accelerate_configs/fsdp_full.yaml or fsdp_grad_op.yaml")
    model = make_model(flags, vocab_size, accelerator.device)
    num_parameters = model.num_parameters()

    loops = {}
    for name, make in {"ours": OurLoop, "bare": BareLoop}.items():
        loader = make_train_loader(rows, args, accelerator.process_index, world_size)
        loops[name] = make(accelerator, copy.deepcopy(model), args, loader)
    plan = [(name, flags.steps) for i in range(1 + flags.pairs) for name in turns(LOOPS, i)]
    plan += [(name, 1) for name in LOOPS]  # one more step, whose loss is logged alone
    timed = Turns(plan, {name: loop.run for name, loop in loops.items()})
    trainer = make_trainer(model, rows, args, world_size, timed)
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    units = [
        [name for name, module in loop.model.named_modules() if isinstance(module, FSDPModule)]
        for loop in (*loops.values(), trainer)
    ]
    if any(others != units[0] for others in units):
        raise RuntimeError(f"the loops shard different modules: {units}")
    losses = {name: loop.losses for name, loop in loops.items()}
    losses["trainer"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens_per_step = args.total_batch_size * flags.max_length
    # The first round warms up; the last segment only gives the loss.
    wall, cpu = ({name: [float(s[i]) for s in timed.seconds[name][1:-1]] for name in LOOPS} for i in range(2))
    speeds = {name: [flags.steps * tokens_per_step / s for s in wall[name]] for name in LOOPS}
    others = [name for name in LOOPS if name != "ours"]
    found = machine(accelerator.device) | {
        "strategy": strategy,
        "mixed_precision": accelerator.mixed_precision,
        "processes": world_size,
        "num_parameters": num_parameters,
        "flags": vars(flags),
        "tokens_per_step": tokens_per_step,
        "seconds_per_segment": wall,
        "cpu_seconds_per_segment": cpu,
        "tokens_per_second": speeds,
        "ratios": ratios(speeds, "ours", others),
        "cpu_ratios": ratios(cpu, "ours", others),
        "losses": losses,
    }
    if accelerator.is_main_process:
        print(f"{num_parameters:,} parameters, {tokens_per_step:,} tokens a step; tokens/s:")
        for i in range(flags.pairs):
            print(f"round {i + 1}:", ", ".join(f"{name} {speeds[name][i]:,.1f}" for name in LOOPS))
        print("median:", ", ".join(f"{name} {median(speeds[name]):,.1f}" for name in LOOPS))
        print_ratios("speed", found["ratios"])
        print_ratios("CPU time", found["cpu_ratios"])
        print("last loss:", ", ".join(f"{name} {losses[name][-1]:.6f}" for name in LOOPS))
        write_json(flags.out, found)
    # The Trainer passes the number of targets to the model's forward pass, where FSDP2 casts it to the model's
    # precision: in bf16 the logged loss is off by up to 2**-8.
    tolerances = {"bare": 1e-3, "trainer": 1e-3 if accelerator.mixed_precision == "no" else 1e-2}
    for name in others:
        if abs(losses[name][-1] - losses["ours"][-1]) > tolerances[name] * losses["ours"][-1]:
            raise RuntimeError(f"ours and {name} did not train the same: {losses}, tolerance {tolerances[name]:g}")
    accelerator.end_training()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compare(parse_flags(__doc__), folder, make_trainer)
