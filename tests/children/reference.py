"""Train dpo.py, and write down what the reference says of each pair, and how much of the model a rank holds meanwhile.

The ranks read their own slices when the model is sharded. Adapters do not begin at zero, so that
a reference with them would say something else.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.settings import make_model
from accelerate_recipes.conversations.trained_rows import ReadRows
from accelerate_recipes.optim import local_shard
from accelerate_recipes.ranks import max_over_ranks
from accelerate_recipes.run import Run

dpo = shipped.load(Path(__file__).resolve().parents[2] / "recipes/dpo.py")
Args, requirements, main = dpo.Args, dpo.requirements, dpo.main
TOTAL = 0  # of the model's elements


def make_checked_model(args: Any) -> nn.Module:
    global TOTAL
    model = make_model(args)
    TOTAL = sum(parameter.numel() for parameter in model.parameters())
    assert {p.is_meta for p in model.parameters()} == {not args.load_in_4bit}
    return model


class PairLoss(dpo.PairLoss):
    held: ClassVar[list[int]] = []  # elements of the model, whenever the reference computes a layer

    def add_reference(self, run: Run, rows: ReadRows) -> None:
        def note(layer: nn.Module, inputs: Any) -> None:
            self.held.append(sum(local_shard(p).numel() for p in run.model.parameters()))

        with torch.no_grad():
            for name, weight in run.model.named_parameters():
                if ".lora_B." in name:
                    weight.fill_(0.5)
        layers = [module for module in run.model.modules() if isinstance(module, LlamaDecoderLayer)]
        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        super().add_reference(run, rows)
        for hook in hooks:
            hook.remove()
        held = max_over_ranks(max(self.held, default=0), run.accelerator.device)
        if run.is_first:
            names = ["prompt", "chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps"]
            found = {"train": rows.train, "test": rows.heldout}
            found = {side: pairs.select_columns(names).to_list() for side, pairs in found.items()}
            text = json.dumps(found | {"held": held, "of": TOTAL})
            (run.output_dir / "reference.json").write_text(text, encoding="utf-8")


dpo.make_model, dpo.PairLoss = make_checked_model, PairLoss
