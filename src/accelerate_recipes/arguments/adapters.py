"""Arguments of adapters, which every recipe takes; see `models.adapters`."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from accelerate_recipes.arguments.declaring import arg

ALL_LINEAR = "all-linear"


@dataclass
class AdapterArgs:
    """Arguments of adapters, a part of `TrainArgs`."""

    group = "adapters"
    use_peft: bool = arg(
        False, "Train adapters (LoRA) in a frozen model; see accelerate_recipes/models/adapters.py.", fixed=True
    )
    load_in_4bit: bool = arg(
        False, "Hold the frozen model in 4 bits (QLoRA: NF4, by bitsandbytes). Needs a GPU.", fixed=True
    )
    lora_r: int = arg(16, "Rank of an adapter.", fixed=True, min=1, max=65536)
    lora_alpha: int = arg(32, "Scale of an adapter's output: this value / --lora_r.", fixed=True, min=1)
    lora_dropout: float = arg(
        0.05, "Dropout on an adapter's input; 0 if experts get adapters.", min=0, below=1, group="rare"
    )
    lora_target_modules: list[str] = arg(
        [ALL_LINEAR],
        "Layers that get an adapter, such as q_proj v_proj; all-linear: all but the output layer, and all experts.",
        fixed=True,
    )
    use_rslora: bool = arg(
        False, "Scale adapters by --lora_alpha / sqrt(--lora_r): for high ranks.", fixed=True, group="rare"
    )
    use_dora: bool = arg(
        False, "Train the length of each row of a weight apart from its direction (DoRA).", fixed=True, group="rare"
    )
    merge_adapter: bool = arg(False, "Export the merged model and the adapter.")

    # Whether the model gets a new output layer. Adapters would leave it untrained.
    has_new_layer: ClassVar[bool] = False

    def adapter_problems(self) -> Iterator[str]:
        """List problems of the arguments of adapters, one sentence each."""
        if not self.use_peft:
            changed = [name for name, value in vars(AdapterArgs()).items() if getattr(self, name) != value]
            yield from (f"--{name} has no effect without --use_peft; add that, or remove it" for name in changed)
            return
        if self.has_new_layer:
            yield "--use_peft would leave the new output layer as it is; remove it"
        named = " ".join(self.lora_target_modules)
        if not named or (ALL_LINEAR in self.lora_target_modules and named != ALL_LINEAR):
            yield f"--lora_target_modules is {named or 'empty'}; give names of layers, or {ALL_LINEAR} alone"
        if self.optim == "adamw_bf16_kahan":
            yield "--optim adamw_bf16_kahan keeps trained weights in bf16, --use_peft in fp32; choose another --optim"
        if self.load_in_4bit and find_spec("bitsandbytes") is None:
            yield "--load_in_4bit: bitsandbytes is not installed; run: pip install bitsandbytes"
        if self.load_in_4bit and self.merge_adapter:
            yield (
                "--merge_adapter would add the adapter to the model's own weights, but with --load_in_4bit it is trained "
                "beside rounded ones; remove one of the two: PEFT loads the adapter beside a 4-bit model"
            )
        if self.load_in_4bit and self.use_dora:
            yield "--use_dora needs the exact length of each row of a weight, but --load_in_4bit rounds it; remove one"
        if not self.base_model:
            yield "--use_peft adapts a pretrained model, and this run makes a new one; remove it, or name a model"
