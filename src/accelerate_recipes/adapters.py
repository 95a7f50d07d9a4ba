"""Adapters by PEFT: LoRA and DoRA in a frozen model, in PEFT's files, and merged into the model's.

They are put into the model in place. It stays the transformers model that FSDP wraps, losses call and `generate` runs;
a layer with an adapter keeps its weight under `base_layer`.

Under FSDP2 frozen weights in bf16 and adapters in fp32 share a layer's group: torch 2.13 wants one dtype among the
trained parameters of a group, not among all, and gathers them in the precision of the YAML. Gradients are kept and
reduced of the adapters alone.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021; Liu et al., DoRA: Weight-Decomposed
Low-Rank Adaptation, 2024.
"""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from accelerate_recipes import hub
from accelerate_recipes.args import ALL_LINEAR, ConfigError, TrainArgs
from accelerate_recipes.distributed import on_first_rank
from accelerate_recipes.init import seed_of

NAME = "default"  # PEFT's, of a model's only adapter


@dataclass
class Adapter:
    """What a checkpoint of adapters says of itself."""

    config: LoraConfig
    base: dict[str, str | None]  # the model that it belongs to, as `base_of` describes it


def load_settings(args: TrainArgs) -> dict[str, Any]:
    """How `from_pretrained` is to load a model: in the dtype of trained weights; of frozen ones, that which they compute in.

    With --load_in_4bit the linear layers but the output layer are rounded to NF4 with double quantization, block by
    block, and packed into numbers of that dtype: FSDP2 shards floating-point parameters only, and gathers them in the
    precision of the YAML, which must leave the bits as they are. Each process rounds the whole model on its device.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """
    is_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    dtype = torch.bfloat16 if args.use_peft and is_bf16 else args.param_dtype
    if not args.load_in_4bit:
        return {"dtype": dtype}
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return {"dtype": dtype, "quantization_config": quantization}


def target_modules(model: PreTrainedModel, args: TrainArgs) -> list[str]:
    """Names, or their ends, of the linear layers that get an adapter.

    The output layer never does: it may be the embedding too, and a loss without logits calls it in a way of its own.

    Raises:
        ConfigError: for a name that is no such layer's.
    """
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    if not layers:
        raise ConfigError(f"--use_peft: {type(model).__name__} has no layers of torch.nn.Linear to put adapters beside")
    if args.lora_target_modules == [ALL_LINEAR]:
        return kinds
    unknown = [end for end in args.lora_target_modules if not any(f".{name}".endswith(f".{end}") for name in layers)]
    if unknown:
        raise ConfigError(
            f"--lora_target_modules {' '.join(unknown)}: no linear layer inside {type(model).__name__} has that name; "
            f"there are {', '.join(kinds)}"
        )
    return args.lora_target_modules


def add_adapters(model: PreTrainedModel, args: TrainArgs) -> PreTrainedModel:
    """With --use_peft, freeze a model and put an adapter, in fp32, beside each layer that `args` name; in place.

    An adapter's first weights depend on the seed and the layer's name only: they are the same on any number of
    processes. One that did not read the model's weights (fsdp_cpu_ram_efficient_loading) gets those of the first.

    Returns:
        The same model.

    Raises:
        ConfigError: for layers that are not there, and where --merge_adapter would not find them in the model's files.
    """
    if not args.use_peft:
        return model
    config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM,
        base_model_name_or_path=args.base_model,
        revision=hub.pinned(args.base_model).get("revision"),
        target_modules=target_modules(model, args),
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
    )
    is_real = not any(parameter.is_meta for parameter in model.parameters())  # else preflight's, or of another rank
    model.adapter = Adapter(config, on_first_rank(lambda: base_of(config) if is_real else {}))
    inject_adapter_in_model(config, model, NAME)
    model._hf_peft_config_loaded = True  # else transformers' Trainer refuses a model in 4 bits: it would train nothing
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    with torch.random.fork_rng([]):
        for name, layer in layers.items():
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()  # PEFT gave it the dtype of the layer
            torch.manual_seed(seed_of(name, args.seed))
            layer.reset_lora_parameters(NAME, init_lora_weights=True)
            if args.use_dora:
                length = layer.get_base_layer().weight.data.float().norm(dim=1)
                layer.lora_magnitude_vector[NAME].weight.data = length
    if args.merge_adapter:
        lacking = {f"{name}.weight" for name in layers} - base_tensors(config).keys()
        if lacking:
            raise ConfigError(
                f"--merge_adapter: there is no {min(lacking)} in the files of {args.base_model}, which name weights "
                f"otherwise than {type(model).__name__} does; remove it"
            )
    return model


def base_of(config: LoraConfig) -> dict[str, str | None]:
    """`name`, `revision` and `checksum` of the model that an adapter belongs to, from its files, all of which are read.

    The checksum is of each weight, by its name, shape, dtype and bytes: it does not change with the number of files. Of a
    model on the Hub it is taken too, since a commit says nothing of what became of the files here.

    Raises:
        ConfigError: if the model is not here, or cannot be read.
    """

    def described(weight: tuple[str, torch.Tensor]) -> str:
        name, tensor = weight
        content = xxhash.xxh3_128_hexdigest(tensor.flatten().view(torch.uint8).numpy())
        return f"{name} {tuple(tensor.shape)} {tensor.dtype} {content}\n"

    with ThreadPoolExecutor() as threads:
        weights = "".join(threads.map(described, sorted(base_tensors(config).items())))
    checksum = xxhash.xxh3_128_hexdigest(weights.encode())
    return {"name": config.base_model_name_or_path, "revision": config.revision, "checksum": checksum}


def adapter_of(model: nn.Module) -> Adapter | None:
    """That of a prepared model."""
    return next((vars(module)["adapter"] for module in model.modules() if "adapter" in vars(module)), None)


def base_tensors(config: LoraConfig) -> dict[str, torch.Tensor]:
    """The weights of the model that an adapter belongs to, from its files, which are mapped and not read.

    Raises:
        ConfigError: if it is not here, or cannot be read.
    """
    name, revision = config.base_model_name_or_path, config.revision
    place = hub.repository("model", name) / "snapshots" / revision if revision else Path(name)
    found = next((file for file in hub.WEIGHTS if (place / file).is_file()), None)
    if found is None:
        raise ConfigError(f"{place} holds no weights, but the adapter is to be merged into those of {name}")
    tensors = {}
    for file in hub.shards(place / found) if found.endswith(".index.json") else [found]:
        try:
            if file.endswith(".safetensors"):
                tensors |= load_file(place / file)
            else:
                tensors |= torch.load(place / file, map_location="cpu", mmap=True, weights_only=True)
        except (SafetensorError, RuntimeError, OSError, UnpicklingError) as error:
            raise ConfigError(f"{place / file} cannot be read: {error}") from error
    return tensors


def merged(name: str, weight: torch.Tensor, adapter: Mapping[str, torch.Tensor], config: LoraConfig) -> torch.Tensor:
    """A weight with what the adapter adds to it, in fp32; as it is if that has nothing for it."""
    layer = name.removesuffix(".weight")
    if f"{layer}.lora_A.{NAME}.weight" not in adapter:
        return weight
    down, up = (adapter[f"{layer}.lora_{which}.{NAME}.weight"].float() for which in "AB")
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    whole = weight.float() + scale * (up @ down)
    if config.use_dora:
        length = adapter[f"{layer}.lora_magnitude_vector.{NAME}.weight"].float()
        whole *= (length / whole.norm(dim=1)).unsqueeze(1)
    return whole


def peft_name(name: str) -> str:
    """In adapter_model.safetensors, as PEFT names it."""
    name = name.replace(f"lora_magnitude_vector.{NAME}.weight", "lora_magnitude_vector")
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
