"""Train sft.py, dpo.py or grpo.py (RECIPE), and the same base by trl's own trainer and loop, in one process.

trl gets the prepared rows in our order, all of a step as one micro-batch, our optimizer, and for answers our numbers. Written
to beside.json: how far apart the weights are at the end, and how far trl's have moved, both relative to their length; and the
largest relative difference of the norms of gradients.
"""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from accelerate_recipes.agenda import EvaluateFn
from accelerate_recipes.arguments import shipped
from accelerate_recipes.models.generation import drawn_by, numbers_of
from accelerate_recipes.optim import make_scheduler, optimizer_fn
from accelerate_recipes.posttraining import settings
from accelerate_recipes.posttraining.settings import make_model, trl_config

NAME = os.environ["RECIPE"]
module = shipped.load(Path(__file__).resolve().parents[2] / f"recipes/{NAME}.py")
Args, requirements, main = module.Args, module.requirements, module.main
# In float64, since ten steps of Adam make of the rounding of fp32 what one processor rounds otherwise than the next.
settings.load_settings = lambda args: {
    "dtype": torch.float64,
    "experts_implementation": "eager",
}  # torch has no grouped products of it
OURS = {"sft": "SupervisedTrainer", "dpo": "PreferenceTrainer", "grpo": "Trainer"}[NAME]
CONFIG, TRL = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[NAME]


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


class Compared(getattr(module, OURS)):
    given: dict[str, Any]

    def __init__(self, run: Any, config: Any, model: Any, tokenizer: Any, **settings: Any):
        self.given = {name: settings[name] for name in ("reward_funcs",) if name in settings}
        super().__init__(run, config, model, tokenizer, **settings)

    def fine_tune(self, evaluate_fn: EvaluateFn) -> list[dict]:
        args = self.run.args
        records = super().fine_tune(evaluate_fn)
        decided = {
            "per_device_train_batch_size": args.total_batch_size,
            "gradient_accumulation_steps": 1,
            "average_tokens_across_devices": True,
            "max_steps": args.max_steps,
            "output_dir": str(self.run.output_dir / "trl"),
        }
        more = {
            "sft": {"assistant_only_loss": False},
            "dpo": {},
            "grpo": {"shuffle_dataset": False, "steps_per_generation": 1},
        }[NAME]
        config = trl_config(self.run, CONFIG, **decided | more)
        model = make_model(args)
        first = vector(model)
        rows = self.train_dataset.remove_columns([n for n in self.train_dataset.column_names if n.startswith("ref_")])
        trainer = InOrder(
            model=model,
            args=config,
            processing_class=self.processing_class,
            train_dataset=rows.select([*self.order()]),
            **self.given,
        )
        optimizer = optimizer_fn(model, args)(model)
        trainer.optimizer, trainer.lr_scheduler = optimizer, make_scheduler(optimizer, args, args.max_steps)
        trainer.train()
        theirs, ours = vector(trainer.model), vector(self.run.model)
        length = theirs.norm()
        found = {"apart": ((ours - theirs).norm() / length).item(), "moved": ((theirs - first).norm() / length).item()}
        # Adam does not see a factor of the loss; the norms of the gradients do.
        norms = [
            [entry["grad_norm"] for entry in log if "grad_norm" in entry]
            for log in (records, trainer.state.log_history)
        ]
        found["norms"] = max(abs(one / other - 1) for one, other in zip(*norms, strict=True))
        (self.run.output_dir / "beside.json").write_text(json.dumps(found), encoding="utf-8")
        return records

    def order(self) -> Iterator[int]:
        """Yield the rows in the order of the steps; of answers, their prompts, each once for the steps that use it."""
        args = self.run.args
        sampler = self.order_class(len(self.train_dataset), args, 0, 1)
        if self.lengths is not None:
            from accelerate_recipes.data.rows import LengthOrder

            sampler = LengthOrder(self.lengths, args, 0, 1)
        if NAME == "grpo":
            for step in range(0, args.max_steps, args.num_iterations):
                yield from sampler.rows(step)[:: args.num_generations]
        else:
            size = args.total_batch_size // args.per_device_train_batch_size
            for batch in islice(sampler, args.max_steps * size):
                yield from batch


setattr(module, OURS, Compared)
