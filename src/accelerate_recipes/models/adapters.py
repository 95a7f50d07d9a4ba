"""Adapters by PEFT: LoRA and DoRA in a frozen model, saved in PEFT's files, or merged into the model's weights.

Adapters are added in place. FSDP wraps the same transformers model, losses call it and `generate` runs it. A layer with an
adapter keeps its weight under `base_layer`.

Under FSDP2, frozen weights in bf16 and adapters in fp32 share a layer's group. torch 2.13 needs one dtype only among the
trained parameters of a group, and gathers all in the precision of the YAML. Only the gradients of the adapters are kept and
reduced.

The rows of new tokens in the embedding and in the output layer can be trained too; see `NewRows`.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021; Liu et al., DoRA: Weight-Decomposed
Low-Rank Adaptation, 2024.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import BitsAndBytesConfig

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments.adapters import ALL_LINEAR
from accelerate_recipes.errors import ConfigError, first_line
from accelerate_recipes.hub import cache
from accelerate_recipes.models.base import as_in_files, described, folder_of_base, open_base, parts_in_files
from accelerate_recipes.models.composites import layers_of_text, sees_images
from accelerate_recipes.models.pretrained import load_config, mapped_weights
from accelerate_recipes.models.slices import Source, gets_weights_later, plain_name, rows_of_tokens, source_of
from accelerate_recipes.models.weights import BY_WEIGHT, linear_layers_and_experts, seed_of
from accelerate_recipes.ranks import computes_in_bf16, is_compiled, is_sharded, on_all_ranks, on_first_rank, share

# Functions import PEFT when they use it. If bitsandbytes is installed, PEFT imports it and torch's compiler. This takes a
# quarter of the start time of a process.
if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

NAME = "default"  # PEFT's name for the only adapter of a model
NEW_ROWS = "new_rows"  # the trained rows of an embedding or output layer, beside its frozen weight
# Names that PEFT 0.21 takes for experts (_MOE_TARGET_MODULE_MAPPING), as transformers 4 called them, in models whose weights
# are converted like those of these types.
NAMES_OF_EXPERTS = {"mixtral": ("gate", "w1", "w2", "w3"), "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj")}


@dataclass
class Adapter:
    """Configuration and base of the adapters in a checkpoint."""

    config: LoraConfig
    base: dict[str, str | None]  # the base model, as `base.described` describes it


def load_settings(args: TrainArgs) -> dict[str, Any]:
    """Return settings for `from_pretrained`: it loads trained weights in `param_dtype`, frozen weights in the compute dtype.

    A process that gets its weights later makes its model on the meta device.

    With --load_in_4bit, the weights of all linear layers except the output layer are rounded to NF4 with double
    quantization, block by block. They are packed into numbers of the compute dtype, because FSDP2 shards only floating-point
    parameters. FSDP2 gathers them in the precision of the YAML, which must not change the bits. Each process rounds the
    whole model on its device.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """
    dtype = torch.bfloat16 if args.use_peft and computes_in_bf16() else args.param_dtype
    if not args.load_in_4bit:
        return {"dtype": dtype} | ({"device_map": "meta"} if gets_weights_later() else {})
    form = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    dtypes = {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
    return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_4bit=True, **form, **dtypes)}


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
    adapted = {"target_modules": of_layers}
    if sees_images(model.config):  # the tower may have layers of these names: name layers whole
        chosen = (ending_with([end], in_text) or ending_with([end], layers) for end in of_layers)
        adapted["target_modules"] = sorted({*itertools.chain(*chosen)})
    parents = {name.rpartition(".")[0] for name in ending_with(of_layers, experts)}
    chosen = [end for end in ends if ending_with([end], experts)]
    others = [name for name in experts if name.rpartition(".")[0] in parents and not ending_with(chosen, [name])]
    chosen += sorted({".".join(name.split(".")[-2:]) for name in others})
    taken = NAMES_OF_EXPERTS.get(TYPES.get(model.config.model_type, ""), ())
    mistaken = [end for end in adapted["target_modules"] if end.rpartition(".")[2] in taken]
    if chosen or mistaken:
        adapted["target_modules"] = [end for end in adapted["target_modules"] if end not in mistaken]
        names = [name for name, _ in model.named_parameters()]
        of_experts = (own_ends(end, experts, names) for end in chosen)
        weights = [f"{name}.weight" for name in layers]
        of_mistaken = (own_ends(f"{end}.weight", weights, names) for end in mistaken)
        adapted["target_parameters"] = [*itertools.chain(*of_experts, *of_mistaken)]
        settings = {"--lora_dropout above 0": args.lora_dropout, "--use_dora": args.use_dora}
        settings |= {"--load_in_4bit": args.load_in_4bit, "dynamo_backend in the accelerate YAML": is_compiled()}
        if refused := [setting for setting, is_on in settings.items() if is_on]:
            why = "keeps the experts of a layer in one weight" if chosen else "has layers that PEFT takes for experts"
            free = (kind for kind in kinds if kind not in taken and not ending_with([kind], experts))
            raise ConfigError(
                f"--use_peft: {type(model).__name__} {why} ({', '.join(chosen or mistaken)}), whose adapters do not work "
                f"with {' and '.join(refused)}; change that, or name other layers: --lora_target_modules {' '.join(free)}"
            )
    return adapted


def own_ends(end: str, own: Collection[str], names: Iterable[str]) -> list[str]:
    """Lengthen an end of names by a part, if it is one of other names than its `own` too: JetMoe calls experts `weight`."""
    fitting = ending_with([end], names)
    longer = sorted({".".join(name.split(".")[-2 - end.count(".") :]) for name in fitting if name in own})
    return [end] if {*fitting} <= {*own} else longer


def ending_with(ends: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that end with one of `ends`; an end consists of one or more whole parts of a name."""
    return [name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)]


class NewRows:
    """Mixin for the class of an embedding or output layer: while the model computes, trained rows replace some of its own.

    The weight stays a frozen parameter under its name, tied or not. PEFT 0.21 wraps both layers instead, with the same
    result. But with these wrappers, Accelerate 1.15 does not see that the layers are tied, and trl 1.16 does not find the
    `bias` of the output layer.
    """

    rows_of: tuple[nn.Module]  # the module that has the rows; in a tuple, so that it is not a child module
    computes = False

    @property
    def weight(self) -> torch.Tensor:
        weight = self._parameters["weight"]  # pyright: ignore[reportAttributeAccessIssue]
        if not self.computes:
            return weight
        (owner,) = self.rows_of
        weight, rows = (
            # trl's loss reads the weight of the output layer. FSDP2 may not have gathered it at that time.
            tensor.full_tensor() if is_sharded(tensor) else tensor
            for tensor in (weight, owner._parameters[NEW_ROWS])
        )
        return weight.index_copy(0, owner.new_tokens, rows.to(weight.dtype))  # pyright: ignore[reportArgumentType]


def add_new_rows(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> dict[str, list[int]]:
    """Train the rows of `tokens` in the embedding and the output layer of a frozen model, in fp32; in place.

    Returns:
        The tokens by the name of each layer that has such rows, as PEFT's `trainable_token_indices`.

    Raises:
        ConfigError: for an output layer with a bias.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"--use_peft: the output layer of {type(model).__name__} has a bias, which PEFT leaves out where it trains rows "
            "of new tokens; leave out --use_peft, or --new_tokens"
        )
    layers: list[Any] = [embedding, head]
    owners = layers[:1] if embedding.weight is head.weight else layers
    for layer in owners:
        layer.register_parameter(NEW_ROWS, nn.Parameter(rows_of_tokens(layer, tokens, model).float()))
        layer.register_buffer("new_tokens", torch.tensor(tokens, device="cpu"), persistent=False)
    for layer in layers:
        layer.__class__ = type(type(layer).__name__, (NewRows, type(layer)), {})
        layer.rows_of = (layer if layer in owners else embedding,)

    def switch(computes: bool) -> None:
        for layer in layers:
            layer.computes = computes

    # Outside of the forward pass `weight` is the parameter: code that shards, ties or saves it must find the parameter.
    model.register_forward_pre_hook(lambda *_: switch(True))
    model.register_forward_hook(lambda *_: switch(False), always_call=True)
    return {name: list(tokens) for name, module in model.named_modules() if module in owners}


def add_adapters(
    model: transformers.PreTrainedModel, args: TrainArgs, new_tokens: Sequence[int] = ()
) -> Adapter | None:
    """With --use_peft, freeze a model and put an adapter, in fp32, beside each layer that `args` name; in place.

    The rows of `new_tokens` in the embedding and the output layer are trained too.

    The first weights of an adapter depend only on the seed and the name of its layer, so they are the same on any number of
    processes.

    Returns:
        The record of the adapters in a checkpoint; None without --use_peft.

    Raises:
        ConfigError: for layers that do not exist, if --merge_adapter would not find them in the model's files, and for new
            tokens in a model whose output layer has a bias, or is tied only in its config.json.
    """
    if not args.use_peft:
        return None
    from peft import LoraConfig, TaskType, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    chosen = targets(model, args)
    layers, experts = linear_layers_and_experts(model)
    of_layers = {name: f"{name}.weight" for name in layers}
    wanted = {of_layers[name] for name in ending_with(chosen["target_modules"], layers)}
    wanted |= {*ending_with(chosen.get("target_parameters", ()), [*of_layers.values(), *experts])}
    task_type = TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM
    of_class = {"auto_mapping": {"base_model_class": type(model).__name__, "parent_library": "transformers"}}
    config = LoraConfig(
        **(of_class if sees_images(model.config) else {"task_type": task_type}),  # PEFT chooses a class by either
        base_model_name_or_path=args.base_model,
        revision=cache.pinned(args.base_model).get("revision"),
        r=args.lora_r,
        **chosen,
        **{name: getattr(args, name) for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
    )
    source = source_of(model)
    of_base = args.base_model, config.revision
    base = {}  # a run that is only simulated has no weights on any rank
    if on_first_rank(lambda: bool(source) or not any(parameter.is_meta for parameter in model.parameters())):
        base = described(*of_base, mapped_weights(folder_of_base(*of_base)), by_all=True)
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        raise ConfigError(
            f"--use_peft: PEFT puts no adapters beside {' '.join(map(' '.join, chosen.values()))}: {first_line(error)}; "
            "name other layers by --lora_target_modules"
        ) from error
    model._hf_peft_config_loaded = True  # without this, transformers' Trainer refuses a model in 4 bits
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if different := wanted ^ {weight_of(name, layer) for name, layer in layers.items()}:
        raise ConfigError(
            f"--use_peft: PEFT finds other layers than {type(model).__name__} has by these names, such as "
            f"{min(different)}; name layers by more of their names in --lora_target_modules, such as experts.gate_up_proj"
        )
    lengths = row_lengths(layers, source) if args.use_dora else {}
    with torch.random.fork_rng([]):
        for name, layer in layers.items():
            # PEFT has made them in the dtype of the layer, and on its device.
            parts = nn.ModuleList([layer.lora_A, layer.lora_B, layer.lora_magnitude_vector]).float()
            if source:
                parts.to_empty(device="cpu")
            torch.manual_seed(seed_of(name, args.seed))
            layer.reset_lora_parameters(NAME, init_lora_weights=True)
            if args.use_dora:
                layer.lora_magnitude_vector[NAME].weight.data = lengths[name]
    if new_tokens:
        config.trainable_token_indices = add_new_rows(model, new_tokens)
        is_tied = model.config.tie_word_embeddings  # as in the weights
        if not args.merge_adapter and load_config(args.base_model).tie_word_embeddings and not is_tied:
            raise ConfigError(
                f"the config.json of {args.base_model} ties its output layer to its embedding, but its weights do not; "
                "a program that enlarges its embedding for --new_tokens would lose the output layer: set "
                "tie_word_embeddings to false in a copy of the model, or add --merge_adapter"
            )
    if args.merge_adapter:
        with torch.device("meta"):
            plain = type(model)(model.config)
        weights = [weight_of(name, layer) for name, layer in layers.items()]
        names_in_base(plain, open_base(plain, *of_base).weights, weights + layers_with_new_rows(config))
    return Adapter(config, base)


def row_lengths(layers: Mapping[str, LoraLayer], source: Source | None) -> dict[str, torch.Tensor]:
    """Compute the length of each row of the layers' weights, in fp32, for DoRA.

    If the model has no values yet, each rank reads some of the weights from its `source`.

    Raises:
        ConfigError: for a row of zeros, which has no direction.
    """
    weights = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
    if source is None:
        lengths = {name: weight.float().norm(dim=1) for name, weight in weights.items()}  # pyright: ignore[reportCallIssue]
    else:
        of_rank = {
            name: source.whole(weight_of(name, layers[name])).to(weights[name].dtype).float().norm(dim=1)  # pyright: ignore
            for name in share(list(layers))
        }
        lengths = {name: length for part in on_all_ranks(of_rank) for name, length in part.items()}

    def check() -> None:
        for name, length in lengths.items():
            # A run that is only simulated has no values.
            if not length.is_meta and (number := int((length == 0).sum())):
                raise ConfigError(
                    f"--use_dora: {number:,} of {len(length):,} rows of {weight_of(name, layers[name])} are zeros, which "
                    "have no direction to train; leave out --use_dora, or name other layers by --lora_target_modules"
                )

    on_first_rank(check)  # the others may have no values yet
    return lengths


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute without its adapters in this context, like its base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would change which parameters are trained
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class WithoutAdapters:
    """Wrapper of a model that computes like its base, without dropout."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        was_training = self.model.training
        self.model.eval()
        with without_adapters(self.model):
            outputs = self.model(**inputs)
        self.model.train(was_training)
        return outputs


def layers_with_new_rows(config: LoraConfig) -> list[str]:
    """List the names of the weights that have rows of new tokens."""
    return [f"{layer}.weight" for layer in config.trainable_token_indices or ()]


def read_config(checkpoint: Path) -> LoraConfig:
    """Read PEFT's configuration of the adapters in a checkpoint."""
    from peft import LoraConfig

    return LoraConfig.from_pretrained(checkpoint)  # pyright: ignore[reportReturnType]


def weight_of(name: str, layer: LoraLayer) -> str:
    """Return the name of the weight that a PEFT layer adapts, in the model without adapters."""
    return f"{plain_name(name)}.{layer.parameter_name if is_of_experts(layer) else 'weight'}"


def is_of_experts(layer: LoraLayer) -> bool:
    """Tell whether a PEFT layer adapts a parameter (as for experts) rather than a linear layer."""
    from peft.tuners.lora import ParamWrapper

    return isinstance(layer, ParamWrapper)


def names_in_base(
    model: transformers.PreTrainedModel, base: Mapping[str, torch.Tensor], weights: Iterable[str]
) -> dict[str, list[str]]:
    """Map each weight's name in the model to its name in the files, or to the names of the parts that form the weight.

    `model` is on the meta device, without adapters.

    Raises:
        ConfigError: if the files use other names.
    """
    parts = parts_in_files(model, base, weights)
    if lacking := {name for names in parts.values() for name in names} - base.keys():
        raise ConfigError(
            f"--merge_adapter: there is no {min(lacking)} in the files of the model, which name weights otherwise than "
            f"{type(model).__name__} does; remove it"
        )
    return parts


def merged(
    model: transformers.PreTrainedModel,
    base: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    config: LoraConfig,
) -> Callable[[str], torch.Tensor]:
    """Return a function that gives a weight by its name in `base`; an adapted weight has its adapter merged in, in fp32.

    If tokens were added, the embedding and the output layer get the trained rows of the new tokens, and have in all as many
    rows as in `model`.

    `model` is on the meta device; this puts adapters without values into it. The function caches its results for two weights
    of the model, because the parts of one layer's experts lie side by side in the files.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    plain = copy.deepcopy(model)
    inject_adapter_in_model(replace(config, trainable_token_indices=None), model, NAME)
    layers = {weight_of(path, m): (path, m) for path, m in model.named_modules() if isinstance(m, LoraLayer)}
    names_in_base(plain, base, layers)
    shapes, weights_in = {name: tensor.shape for name, tensor in plain.state_dict().items()}, {}
    for weight, parts in parts_in_files(plain, base, shapes).items():
        for part in parts:
            weights_in[part] = (*weights_in.get(part, ()), weight)  # several, if the files hold them as one tensor
    extended = {name: weight for weight, (name,) in names_in_base(plain, base, layers_with_new_rows(config)).items()}

    @lru_cache(2)
    def deltas(weights: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the sums to add, by names in the files: splitting or transposing a weight commutes with the addition."""
        adapted = {weight: delta_of(*layers[weight], adapter) for weight in weights if weight in layers}
        others = {weight: torch.zeros(shapes[weight]) for weight in weights if weight not in layers}
        return as_in_files(plain, adapted | others, base)

    def lengths(weights: tuple[str, ...], name: str) -> torch.Tensor:
        """Return DoRA's length of each row of a tensor in the files, as a column; NaN where no adapter is."""
        norms = {weight: torch.full((shapes[weight][0], 1), torch.nan) for weight in weights}
        for weight in layers.keys() & norms.keys():
            norms[weight] = adapter[f"{layers[weight][0]}.lora_magnitude_vector.{NAME}.weight"].float().unsqueeze(1)
        return as_in_files(plain, norms, base)[name]

    def weight_named(name: str) -> torch.Tensor:
        if name in extended:
            layer = extended[name].removesuffix(".weight")
            whole = torch.zeros(plain.get_parameter(extended[name]).shape)
            whole[: len(base[name])] = base[name]
            whole[config.trainable_token_indices[layer]] = adapter[f"{layer}.{NEW_ROWS}"]  # pyright: ignore
            return whole
        weights = weights_in.get(name, ())
        if layers.keys().isdisjoint(weights):
            return base[name]
        whole = base[name].float() + deltas(weights)[name]
        if config.use_dora:
            wanted = lengths(weights, name)
            whole *= torch.where(wanted.isnan(), 1.0, wanted / whole.norm(dim=1, keepdim=True))
        return whole

    return weight_named


def delta_of(path: str, layer: LoraLayer, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the update that an adapter adds to its weight, in fp32: (out, in), or (experts, out, in) unless transposed.

    This replaces `get_delta_weight` of PEFT's layers, because the layers have no values here.
    """
    down, up = (adapter[f"{path}.lora_{which}.{NAME}.weight"].float() for which in "AB")
    if not is_of_experts(layer):
        return layer.scaling[NAME] * (up @ down)
    down = down.reshape(layer.num_experts, -1, down.shape[1])
    up = up.reshape(up.shape[0], -1, layer.num_experts)
    order = "eio" if getattr(layer.get_base_layer(), "is_transposed", False) else "eoi"
    delta = layer.scaling[NAME] * torch.einsum(f"ore,eri->{order}", up, down)
    return delta[0] if isinstance(layer.get_base_layer(), nn.Linear) else delta


def peft_name(name: str) -> str:
    """Return PEFT's name of a tensor in adapter_model.safetensors."""
    name = name.replace(f"lora_magnitude_vector.{NAME}.weight", "lora_magnitude_vector")
    name = name.replace(f".{NEW_ROWS}", ".token_adapter.trainable_tokens_delta")
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
