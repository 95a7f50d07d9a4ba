"""Train sft.py, dpo.py, kto.py or grpo.py (RECIPE), and the same base by trl's own trainer and loop, in one process.

trl gets the prepared rows in our order, all of a step as one micro-batch, our optimizer, and for answers our numbers. Written
to beside.json: how far apart the weights are at the end, and how far trl's have moved, both relative to their length; and the
largest relative difference of the norms of gradients.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations import settings
from accelerate_recipes.conversations.settings import make_model, trl_config
from accelerate_recipes.engine import train
from accelerate_recipes.models.generation import drawn_by, numbers_of
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.optim import make_scheduler, optimizer_fn

NAME = os.environ["RECIPE"]
module = shipped.load(Path(__file__).resolve().parents[2] / f"recipes/{NAME}.py")
Args, requirements, main = module.Args, module.requirements, module.main
# In float64, since ten steps of Adam make of the rounding of fp32 what one processor rounds otherwise than the next.
# Torch has no grouped products of it
settings.load_settings = lambda args: {"dtype": torch.float64, "experts_implementation": "eager"}
CONFIG, TRL = {
    "sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer), "grpo": (GRPOConfig, GRPOTrainer),
}[NAME]  # fmt: skip


class InOrder(TRL):
    """trl's trainer on rows that are prepared and lie in the order of the steps."""

    def _prepare_dataset(self, rows: datasets.Dataset, *_: Any) -> datasets.Dataset:
        return rows

    def _get_train_sampler(self, *_: Any) -> Any:
        return super()._get_train_sampler() if NAME == "grpo" else SequentialSampler(self.train_dataset)

    def _generate_and_score_completions(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        with drawn_by(self.model, numbers_of(42, self.state.global_step, range(len(rows)), self.max_completion_length)):
            return super()._generate_and_score_completions(rows)


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def compared(run: Any, loader: Any, *, loss_fn: Any, **functions: Any) -> list[dict]:
    """Train by our loop, then by trl's, and write how far apart they are."""
    args, rows, order = run.args, loader.dataset.items, loader.batch_sampler
    records = train(run, loader, loss_fn=loss_fn, **functions)
    decided = {name: getattr(args, name) for name in ("max_steps", "max_grad_norm", "logging_steps")}
    decided |= {"per_device_train_batch_size": args.total_batch_size, "gradient_accumulation_steps": 1}
    decided |= {"average_tokens_across_devices": True, "save_strategy": "no", "output_dir": str(run.output_dir / "trl")}
    of_grpo = {"shuffle_dataset": False, "steps_per_generation": 1}
    more = {"sft": {"assistant_only_loss": False}, "dpo": {}, "kto": {}, "grpo": of_grpo}[NAME]
    given = {"reward_funcs": loss_fn.__self__.reward_funcs} if NAME == "grpo" else {}
    if NAME == "kto":
        vars(args).update({field.name: field.default for field in fields(KTOConfig) if not hasattr(args, field.name)})
        # trl would load it with grouped products
        given["ref_model"] = make_model(args)
    model = make_model(args)
    first = vector(model)
    rows = datasets.Dataset.from_list([rows[number] for number in in_order(order, args)])
    rows = rows.remove_columns([name for name in rows.column_names if name.startswith("ref_")])
    if NAME == "kto":
        rows = rows.map(beside_neighbours, batched=True, batch_size=args.total_batch_size)
    given |= {"processing_class": load_tokenizer(args.model_name_or_path), "train_dataset": rows}
    trainer = InOrder(model=model, args=trl_config(run, CONFIG, **decided, **more), **given)
    optimizer = optimizer_fn(model, args)(model)
    trainer.optimizer, trainer.lr_scheduler = optimizer, make_scheduler(optimizer, args, args.max_steps)
    trainer.train()
    theirs, ours = vector(trainer.model), vector(run.model)
    length = theirs.norm()
    found = {"apart": ((ours - theirs).norm() / length).item(), "moved": ((theirs - first).norm() / length).item()}
    # Adam does not see a factor of the loss; the norms of the gradients do.
    log_of_trl = trainer.state.log_history
    norms = [[entry["grad_norm"] for entry in log if "grad_norm" in entry] for log in (records, log_of_trl)]
    found["norms"] = max(abs(one / other - 1) for one, other in zip(*norms, strict=True))
    (run.output_dir / "beside.json").write_text(json.dumps(found), encoding="utf-8")
    return records


def in_order(order: Any, args: Any) -> Iterator[int]:
    """Yield the rows in the order of the steps; of answers, their prompts, each once for the steps that use it."""
    if NAME == "grpo":
        for step in range(0, args.max_steps, args.num_iterations):
            yield from order.rows(step)[:: args.num_generations]
    else:
        size = args.total_batch_size // args.per_device_train_batch_size
        for batch in islice(order, args.max_steps * size):
            yield from (number[0] if NAME == "kto" else number for number in batch)  # beside that of its neighbour


def beside_neighbours(rows: dict[str, list]) -> dict[str, list]:
    """Make rows of KTO as trl prepares them: in a step, each prompt also has the answer of the row before."""
    begins = [next(n for n, label in enumerate(labels) if label >= 0) for labels in rows["labels"]]
    made = {
        "prompt_ids": [ids[:begin] for ids, begin in zip(rows["input_ids"], begins, strict=True)],
        "completion_ids": [ids[begin:] for ids, begin in zip(rows["input_ids"], begins, strict=True)],
    }
    return made | {"KL_completion_ids": made["completion_ids"][-1:] + made["completion_ids"][:-1]}


module.train = compared
