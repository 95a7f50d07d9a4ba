"""Layers and experts of a model that get adapters, by the names that the arguments give. PEFT is not imported."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from importlib.util import find_spec

import transformers

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments.adapters import ALL_LINEAR
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.composites import layers_of_text, sees_images
from accelerate_recipes.models.weights import BY_WEIGHT, linear_layers_and_experts
from accelerate_recipes.ranks import is_compiled

# Names that PEFT 0.21 takes for experts (_MOE_TARGET_MODULE_MAPPING), as transformers 4 called them, in models whose weights
# are converted like those of these types.
NAMES_OF_EXPERTS = {"mixtral": ("gate", "w1", "w2", "w3"), "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj")}


def targets(model: transformers.PreTrainedModel, args: TrainArgs) -> dict[str, list[str]]:
    """Return `target_modules` and `target_parameters` for PEFT: names, or ends of names, of modules and parameters to adapt.

    The modules are linear layers. Those of a model that sees images lie in its text part, unless a name is in other parts
    alone. The parameters are weights of experts: a mixture keeps all experts of a layer in one parameter of three
    dimensions. A short name that is a part of experts and a linear layer too means all parts of these experts. Linear layers
    with a name that PEFT takes for experts are parameters too. The output layer is never included: it may also be the
    embedding, and a loss without logits calls it in a special way.

    Raises:
        ConfigError: for a name that fits neither, and for settings that PEFT's adapters of parameters do not support.
    """
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as TYPES  # which imports FSDP

    layers, experts = linear_layers_and_experts(model)
    in_text = layers_of_text(model, layers)
    kinds = sorted({name.rpartition(".")[2] for name in (*in_text, *experts)})
    if not layers:
        raise ConfigError(f"--use_peft: {type(model).__name__} has no layers of torch.nn.Linear to put adapters beside")
    by_weight = BY_WEIGHT.get(model.config.model_type, ())
    if args.load_in_4bit and ("dt_proj" in by_weight or (by_weight and find_spec("mamba_ssm"))):
        raise ConfigError(
            f"--use_peft: {type(model).__name__} computes with the weights of {', '.join(by_weight)} itself, which "
            "--load_in_4bit packs; leave it out"
        )
    ends = kinds if args.lora_target_modules == [ALL_LINEAR] else args.lora_target_modules
    if unknown := [end for end in ends if not ending_with([end], [*layers, *experts])]:
        raise ConfigError(
            f"--lora_target_modules {' '.join(unknown)}: no linear layer inside {type(model).__name__} has that name; "
            f"there are {', '.join(kinds)}"
        )
    of_layers = [end for end in ends if ending_with([end], layers)]
    found = {"target_modules": of_layers}
    if sees_images(model.config):  # the tower may have layers of these names: name layers whole
        chosen = (ending_with([end], in_text) or ending_with([end], layers) for end in of_layers)
        found["target_modules"] = sorted({*itertools.chain(*chosen)})
    parents = {name.rpartition(".")[0] for name in ending_with(of_layers, experts)}
    chosen = [end for end in ends if ending_with([end], experts)]
    others = [name for name in experts if name.rpartition(".")[0] in parents and not ending_with(chosen, [name])]
    chosen += sorted({".".join(name.split(".")[-2:]) for name in others})
    taken = NAMES_OF_EXPERTS.get(TYPES.get(model.config.model_type, ""), ())
    mistaken = [end for end in found["target_modules"] if end.rpartition(".")[2] in taken]
    if chosen or mistaken:
        found["target_modules"] = [end for end in found["target_modules"] if end not in mistaken]
        names = [name for name, _ in model.named_parameters()]
        of_experts = (own_ends(end, experts, names) for end in chosen)
        weights = [f"{name}.weight" for name in layers]
        of_mistaken = (own_ends(f"{end}.weight", weights, names) for end in mistaken)
        found["target_parameters"] = [*itertools.chain(*of_experts, *of_mistaken)]
        settings = {"--lora_dropout above 0": args.lora_dropout, "--use_dora": args.use_dora}
        settings |= {"--load_in_4bit": args.load_in_4bit, "dynamo_backend in the accelerate YAML": is_compiled()}
        if refused := [setting for setting, is_on in settings.items() if is_on]:
            why = "keeps the experts of a layer in one weight" if chosen else "has layers that PEFT takes for experts"
            free = (kind for kind in kinds if kind not in taken and not ending_with([kind], experts))
            raise ConfigError(
                f"--use_peft: {type(model).__name__} {why} ({', '.join(chosen or mistaken)}), whose adapters do not work "
                f"with {' and '.join(refused)}; change that, or name other layers: --lora_target_modules {' '.join(free)}"
            )
    return found


def own_ends(end: str, own: Collection[str], names: Iterable[str]) -> list[str]:
    """Lengthen an end of names by a part, if it is one of other names than its `own` too: JetMoe calls experts `weight`."""
    fitting = ending_with([end], names)
    longer = sorted({".".join(name.split(".")[-2 - end.count(".") :]) for name in fitting if name in own})
    return [end] if {*fitting} <= {*own} else longer


def ending_with(ends: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that end with one of `ends`; an end consists of one or more whole parts of a name."""
    return [name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)]
