"""Tiny models of a class, which show whether it separates the documents of packed rows, and whether ranks can share rows."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from accelerate_recipes import upstream
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.models import attention
from accelerate_recipes.models.documents import DOCUMENTS, READ_BOUNDARIES, document_masks
from accelerate_recipes.models.mixers import unpack_documents
from accelerate_recipes.models.rotary import ROPE_KINDS
from accelerate_recipes.models.shared_rows import balance_of_rows, whole_rows
from accelerate_recipes.ranks import ranks_a_row

# Errors of models for arguments that they do not take.
REFUSALS = (AttributeError, TypeError, ValueError, RuntimeError, KeyError)
FIRST = 5  # number of tokens of the first of two documents
# Fields for the number of tokens that attention sees in some layers, and this number in a tiny model.
WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "local_attention",
    "window_size", "index_topk",
)  # fmt: skip
WINDOW = 4
# Names of widths inside feed-forward layers, and of ranks.
INNER = re.compile("ffn|intermediate|^d_?ff$|^dim_ff$|_lora_rank$")
MAX_SIZE = 2**25  # parameters of a tiny model, which are 128 MiB
# Heads of a tiny model, and of its keys and values, where 2 and 2 cannot be: CodeGen computes four at a time, and some
# layers of MiMo have twice as many of keys and values as the configuration says.
UNUSUAL_HEADS = {"codegen": (4, 4), "mimo_v2_flash": (2, 1)}
CHANGING = ("architectures", "dtype", "use_cache")  # fields of which the results do not depend
LONGEST_MASK = 8192  # tokens in a row that ranks share; the mask of such a row has 64 MiB
UNTRIED = "no tiny {} could be made and tried, so nothing says whether"


class Packing(Enum):
    """Way in which a model keeps attention inside the documents of a packed row."""

    POSITIONS = "its positions say where documents begin, or the kernel is told"
    MASK = "it gets a mask"
    NONE = "it does not"
    UNKNOWN = "no tiny model of its class can be made"


_packing: dict[tuple, tuple[Packing, frozenset[str]]] = {}  # results of `examined`
_balances: dict[tuple, float | None] = {}  # results of `own_balance`


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside the wrappers of DDP, FSDP1 and torch.compile."""
    return next(module for module in model.modules() if isinstance(module, transformers.PreTrainedModel))


def alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Attend only to the position itself, as an attention function of transformers; for `examined` and `shares_in_small`.

    Raises:
        KeyError: if the model has not passed `sequence_group` on to its attention.
    """
    settings["sequence_group"]
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def packing_of(config: PreTrainedConfig) -> Packing:
    """Find out with a tiny model how models of this configuration separate the documents of a packed row.

    The classes that `mixers_in` names compute each document by itself. The trial takes a tenth of a second, once for each
    class and kind of attention. If the answer is UNKNOWN, only `check_document_mask` can tell.
    """
    return examined(config)[0]


def mixers_in(model: nn.Module) -> frozenset[str]:
    """Name the classes of a decoder's modules that must compute each document by itself; see `mixers`."""
    config: Any = getattr(model, "config", None)
    is_decoder = getattr(model, "get_output_embeddings", lambda: None)() is not None and not config.is_encoder_decoder
    return examined(config)[1] if is_decoder else frozenset()


@whole_rows()
def examined(config: PreTrainedConfig) -> tuple[Packing, frozenset[str]]:
    """Find the results of `packing_of` and `mixers_in`; keep them for each class and kind of attention."""
    text, kernel = config.get_text_config(), config._attn_implementation
    if kernel in READ_BOUNDARIES:
        kernel = "alone"  # the kernel gets the boundaries; only layers other than attention are in question
    elif kernel not in ("sdpa", "eager"):  # flex_attention would be compiled; its masks come from the same functions
        kernel = attention.unsupported_kernels(config).get("sdpa", "sdpa")
    kinds = tuple(sorted(set(getattr(text, "layer_types", None) or ())))
    fields = (vars(text).get(name) in (None, 0) for name in (*WINDOWS, "num_kv_shared_layers"))
    key = (type(config), kernel, kinds, *fields)
    if key not in _packing:
        _packing[key] = examined_anew(config, kernel)
    return _packing[key]


def examined_anew(config: PreTrainedConfig, kernel: str) -> tuple[Packing, frozenset[str]]:
    """Try a tiny model as it is, then with mixers that compute each document by itself."""
    group = {"sequence_group": None} if kernel == "alone" else {}
    model = tiny_model(config, kernel, **group)
    if model is None:  # a model that passes nothing on to its attention is checked itself later
        return Packing.POSITIONS if group else Packing.UNKNOWN, frozenset()
    ways = {Packing.POSITIONS: False} if group else {Packing.POSITIONS: False, Packing.MASK: True}
    for way, with_masks in ways.items():
        if is_packed_as_alone(model, with_masks, **group):
            return way, frozenset()
    mixers = (not group and classes_that_mix(model, with_masks=True)) or classes_that_mix(model, False, **group)
    unpack_documents(model, mixers)
    for way, with_masks in ways.items():
        if mixers and is_packed_as_alone(model, with_masks, **group):
            return way, mixers
    return Packing.NONE, frozenset()


def tiny_model(config: PreTrainedConfig, kernel: str, **inputs: Any) -> nn.Module | None:
    """Make a model with one layer of each kind, two heads, few words and random weights; None if that fails.

    Layers have experts if any have. The heads keep their width, because tables of positions may depend on it. Up to 32
    experts stay, because they may be grouped.
    """
    transformers.AttentionInterface.register("alone", alone)
    try:
        text = config.get_text_config()
        # Take the text part alone if it has a class of its own.
        config = copy.deepcopy(text if attention.class_of(text) else config)
        shrink(config.get_text_config())
        model = randomly_made(transformers.AutoModelForCausalLM, config, kernel)
        upstream.name_backbone(model)
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False, **inputs)
    except Exception:  # an unusual configuration may raise anything: only the real model can tell
        return None
    return model


def randomly_made(
    auto_class: Any, config: PreTrainedConfig, kernel: str | dict[str, str]
) -> transformers.PreTrainedModel:
    """Make a model of an auto class of transformers in which no parameter is all zeros, which would hide their input.

    Raises:
        ConfigError: if it would have more than MAX_SIZE parameters.
    """
    vars(config).pop("quantization_config", None)
    settings = {"dtype": torch.float32, "attn_implementation": kernel}
    with torch.device("meta"):
        size = sum(map(torch.numel, auto_class.from_config(copy.deepcopy(config), **settings).parameters()))
    if size > MAX_SIZE:
        raise ConfigError(f"a small {config.model_type} would have {size:,} parameters, more than {MAX_SIZE:,}")
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        model = auto_class.from_config(config, **settings)
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                nn.init.normal_(parameter, std=0.2)
    return model.eval()


def shrink(text: PreTrainedConfig, **other: int) -> None:
    """Change the configuration of a text part, in place, to that of a tiny model; see `tiny_model`. `other` sizes win."""
    layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(text).items()
        # A list with more different values holds numbers, not kinds of layers.
        if isinstance(value, list) and len(value) == layers and len(set(map(repr, value))) <= 4
        if not any(isinstance(entry, float) for entry in value)
    }
    kinds = list(zip(*lists.values(), strict=True)) or list(getattr(text, "layer_types", None) or ())
    # The last layers may take keys and values from earlier ones of their kind.
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    kinds = [(kind, i >= layers - shared) for i, kind in enumerate(kinds)]
    chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]] or list(range(min(2, layers)))
    if not lists:  # the kind of a layer follows from its index: keep all layers up to the last kind
        chosen = list(range(max(2, chosen[-1] + 1)))
    sizes = sizes_of_tiny(text, len(chosen))
    # Some configurations list sizes by layer.
    sizes |= {name: [sizes.get(name, value[i]) for i in chosen] for name, value in lists.items()}
    sizes["num_kv_shared_layers"] = sum(i >= layers - shared for i in chosen)
    if getattr(text, "hybrid_layer_ids", None):  # Zamba2's
        sizes["hybrid_layer_ids"] = [i for i, kind in enumerate(sizes["layers_block_type"]) if kind == "hybrid"]
    sizes |= other
    by_layer = fields_by_layer(text, chosen, sizes)
    # DBRX keeps sizes of its layers in configurations of their own.
    for part in (text, *(value for value in vars(text).values() if isinstance(value, PreTrainedConfig))):
        inner = [name for name, value in vars(part).items() if INNER.search(name) and type(value) is int and value > 32]
        for name, value in (dict.fromkeys(inner, 32) | sizes).items():
            if getattr(part, name, None) is not None:
                setattr(part, name, value)
    if by_layer:
        text.per_layer_config = by_layer
    text.pad_token_id = sizes["vocab_size"] - 1  # a token of no document; some classes need one


def fields_by_layer(
    text: PreTrainedConfig, chosen: Sequence[int], sizes: Mapping[str, Any]
) -> dict[int, dict[str, Any]] | None:
    """Take the fields that differ between layers, as in Gemma 4, out of a configuration; return them by chosen layer."""
    if not text.is_heterogeneous:
        return None
    layers, names = text.per_layer_config, [*(text.per_layer_attributes or ())]
    fields = {new: {name: sizes.get(name, getattr(layers[i], name)) for name in names} for new, i in enumerate(chosen)}
    text.per_layer_config = None
    return fields


def sizes_of_tiny(text: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Choose the sizes of a tiny model; sizes that a configuration derives from others are derived here in the same way.

    Windows of attention become shorter than the documents of a probe, since a model may lose them in packed rows.
    """
    has_heads = getattr(attention.of_layers(text)[0], "num_attention_heads", None)
    hidden = 2 * max(map(attention.width_of_heads, attention.of_layers(text))) if has_heads else 128
    heads, groups = UNUSUAL_HEADS.get(text.model_type, (2, 2))
    sizes = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": hidden,
        "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 32, "initializer_range": 0.2,
        "kv_n_heads": groups, "decoder_attention_heads": heads, "decoder_layers": layers, "decoder_vocab_size": 32,
        "lru_width": hidden, "embedding_dim": hidden,
        "linear_num_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_num_heads": 2,
        "mamba_n_groups": 1, "mamba_ngroups": 1, "n_groups": 1, "chunk_size": 8, "mamba_chunk_size": 8,
        "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 16,
    }  # fmt: skip
    dense = {"first_k_dense_replace": 0, "num_dense_layers": 0, "moe_layer_start_index": 0, "mlp_only_layers": []}
    numbers = [getattr(text, name, None) or 0 for name in dense]
    if all((len(n) if isinstance(n, list) else n) < getattr(text, "num_hidden_layers", 0) for n in numbers):
        sizes |= dense | {"decoder_sparse_step": 1}
    if unpadded := getattr(text, "unpadded_vocab_size", None):  # Inkling's: rows behind it are no words
        sizes["unpadded_vocab_size"] = 32 - (unpadded < text.vocab_size)
    for name in WINDOWS:
        if isinstance(window := vars(text).get(name), int) and window > WINDOW:
            sizes[name] = WINDOW
    most = 25 if text.model_type == "doge" else 32  # each of Doge's experts is a pair of keys
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        sizes[name] = min(most, getattr(text, name, None) or 0)
    sizes["num_experts_per_tok"] = min(16, getattr(text, "num_experts_per_tok", None) or 0)
    if of_attention := getattr(text, "attention_hidden_size", None):  # Zamba2's, or RWKV's
        sizes["attention_hidden_size"] = hidden * of_attention // text.hidden_size
        sizes["attention_head_dim"] = sizes["attention_hidden_size"] // 2
    inner = hidden * (getattr(text, "mamba_expand", None) or getattr(text, "expand", None) or 0)
    if inner:  # of a state space
        of_mamba = {"mamba_n_heads": "mamba_d_head"}
        of_mamba |= {} if has_heads else {"num_heads": "head_dim"}
        sizes |= {name: inner // (getattr(text, width, None) or 1) for name, width in of_mamba.items()}
        sizes |= {"mamba_d_ssm": inner, "mamba_headdim": inner // (getattr(text, "n_mamba_heads", None) or 1)}
    return sizes


@contextlib.contextmanager
def on_cpu_in_fp32() -> Iterator[None]:
    """Compute as tiny models do in this context, whatever the device and the precision around it are."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


@torch.enable_grad()
def sees(model: nn.Module, tokens: slice, of: slice, **inputs: Any) -> bool:
    """Tell whether a tiny model's predictions at the places `of` depend on `tokens`, however little.

    The gradient shows this: a token that the predictions do not depend on has a gradient of exactly 0.
    """
    seen = []
    embedding: Any = unwrapped(model).get_input_embeddings()
    with embedding.register_forward_hook(lambda *some: seen.append(some[-1])):
        logits = model(**inputs).logits
    (gradient,) = torch.autograd.grad(logits[:, of].square().sum(), seen)
    return bool(gradient[:, tokens].any())


@on_cpu_in_fp32()
def sees_later_tokens(config: PreTrainedConfig) -> bool:
    """Tell with a tiny model whether models of this configuration see the tokens that they should predict."""
    model, tokens = tiny_model(config, "eager"), torch.arange(12)[None]
    return model is not None and sees(model, slice(6, None), slice(6), input_ids=tokens, use_cache=False)


@torch.no_grad()
@on_cpu_in_fp32()
def is_packed_as_alone(model: nn.Module, with_masks: bool, **inputs: Any) -> bool:
    """Tell whether a tiny model predicts the same for the second document of a row as for this document alone."""
    inputs |= {"use_cache": False}

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        row = row_of_two(model, with_masks) | inputs
        second = {name: row[name][:, FIRST:] for name in ("input_ids", "position_ids")}
        return model(**row).logits[:, FIRST:], model(**second, **inputs).logits

    try:
        is_seen = sees(model, slice(FIRST), slice(FIRST, None), **row_of_two(model, with_masks), **inputs)
        return not is_seen and are_equal(model, logits)
    except REFUSALS:  # the model takes no positions, or no such masks
        return False


def are_equal(model: nn.Module, logits: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Tell whether a tiny model computes the same twice, but for rounding: in fp64 if not in fp32.

    Layers that are applied again and again, as those of HRM-Text, may multiply the rounding of fp32 until all is rounding.
    """
    try:
        for precise in (model.float, model.double):
            precise()
            one, other = logits()
            if (one - other).norm() <= 1e-3 * other.norm():
                return True
    finally:
        model.float()
    return False


def row_of_two(model: nn.Module, with_masks: bool) -> dict[str, Any]:
    """Make a row of two documents, the first of which has FIRST tokens."""
    positions = torch.tensor([[*range(FIRST), *range(7)]])
    masks = document_masks(model.config, positions, next(model.parameters()).dtype) if with_masks else {}
    return {"input_ids": torch.arange(FIRST + 7)[None], "position_ids": positions} | masks


@torch.enable_grad()
@on_cpu_in_fp32()
def classes_that_mix(model: nn.Module, with_masks: bool, **inputs: Any) -> frozenset[str]:
    """Name the classes of modules inside a tiny model's layers whose results depend on the document before."""
    seen: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def see(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        of_tokens = [
            next((t for t in tree_leaves(some) if isinstance(t, torch.Tensor) and t.shape[:2] == shape), None)
            for some in ((args, kwargs), result)
        ]
        if all(t is not None and t.requires_grad for t in of_tokens):
            seen.append((module, *of_tokens))

    layers = {module for module in model.modules() if isinstance(module, transformers.GradientCheckpointingLayer)}
    inside = {part for layer in layers for part in layer.modules() if layers.isdisjoint(part.modules())}
    with contextlib.ExitStack() as hooks:
        for module in inside:
            hooks.enter_context(module.register_forward_hook(see, with_kwargs=True))
        try:
            row = row_of_two(model, with_masks)
            shape = row["input_ids"].shape
            model(**row, **inputs, use_cache=False)
        except REFUSALS:
            return frozenset()
    # A module mixes documents if its result in the second document has a gradient in its own input of the first document.
    mixing = {
        module
        for module, before, after in seen
        if torch.autograd.grad(after[:, FIRST:].square().sum(), before, retain_graph=True)[0][:, :FIRST].any()
    }
    # Of modules inside each other, the outermost one counts.
    parts = {part for module in mixing for part in module.modules() if part is not module}
    return frozenset(type(module).__name__ for module in mixing - parts)


@torch.no_grad()
@on_cpu_in_fp32()
def shares_in_small(config: PreTrainedConfig) -> bool | None:
    """Tell whether a tiny model of this configuration, apart from attention, computes parts of a row as in the whole row.

    None if no tiny model can be made.

    `shared_rows` exchanges data for attention, so here an attention that sees only the position itself replaces it.
    """
    group = {"sequence_group": None, "use_cache": False}
    model = tiny_model(config, "alone", sequence_group=None)
    if model is None:
        return None
    positions = torch.arange(12)[None]  # tokens and their positions

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        parts = [model(input_ids=part, position_ids=part, **group).logits for part in positions.split(6, 1)]
        return torch.cat(parts, 1), model(input_ids=positions, position_ids=positions, **group).logits

    try:
        is_seen = sees(model, slice(6), slice(6, None), input_ids=positions, position_ids=positions, **group)
        return not is_seen and are_equal(model, logits)
    except REFUSALS:
        return False


def check_packing(config: PreTrainedConfig) -> None:
    """Raise ConfigError for a class of models that lets attention cross the documents of a packed row."""
    if packing_of(config) is Packing.NONE:
        raise ConfigError(crosses(config))


def crosses(config: PreTrainedConfig) -> str:
    """Say that attention crosses the documents of a packed row, and what was tried."""
    is_tried = packing_of(config) is not Packing.UNKNOWN
    how = "not even with a mask" if is_tried else "and a mask could not be tried, since no tiny one could be made"
    return (
        f"{config.model_type} models do not keep attention inside a document of a packed row, {how}; give "
        "--no_document_mask, or another model"
    )


def deciding_fields(config: PreTrainedConfig) -> tuple:
    """Return the class of a configuration and the fields of its text part, to find results again."""
    fields = vars(config.get_text_config()).items()
    return type(config), str([(name, value) for name, value in fields if name[0] != "_" and name not in CHANGING])


@torch.no_grad()
def router_of(model: Any, tokens: torch.Tensor) -> dict[str, bool]:
    """Return the argument with which a tiny model computes the loss that balances experts; empty if it computes none."""
    try:
        balance = model(input_ids=tokens, use_cache=False, output_router_logits=True).aux_loss
    except Exception:  # there are no experts, though the class may have some
        return {}
    return {"output_router_logits": True} if isinstance(balance, torch.Tensor) else {}


def own_balance(config: PreTrainedConfig) -> float | None:
    """Return the weight of the loss that balances experts in the class of a tiny model; None if it computes none.

    A configuration does not tell: Llama 4 has a weight and no such loss, JetMoe calls it otherwise, and classes for mixtures
    are also those of dense models.
    """
    key = deciding_fields(config)
    if key not in _balances:
        with whole_rows(), on_cpu_in_fp32():
            model: Any = tiny_model(config, "eager")
            if model is None:  # nothing can be tried: the configuration is believed
                owners = [config.get_text_config()]
                is_balanced = hasattr(owners[0], "output_router_logits")
            else:
                owners, is_balanced = [model, model.config], bool(router_of(model, torch.arange(12)[None]))
        weights = [getattr(owner, name, None) for owner in owners for name in ("router_aux_loss_coef", "aux_loss_coef")]
        _balances[key] = next((weight for weight in weights if weight is not None), None) if is_balanced else None
    return _balances[key]


def balance_weight(config: PreTrainedConfig, given: float | None = None) -> float:
    """Return the weight of the loss that balances experts, the `given` one or the model's; 0 without such a loss."""
    own = own_balance(config)
    return 0.0 if own is None else own if given is None else given


def check_sharing(config: PreTrainedConfig) -> None:
    """Raise ConfigError if ranks share rows (see `shared_rows`), but not those of a model with this configuration."""
    size = ranks_a_row()
    if size > 1:
        raise_problems("Ranks cannot share rows (parallelism_config_cp_size)", model_sharing_problems(config, size))


def model_sharing_problems(config: PreTrainedConfig, size: int) -> list[str]:
    """List why `size` ranks cannot share the rows of a model with this configuration, one sentence each."""
    text = config.get_text_config()
    name = text.model_type
    heads = math.gcd(*(getattr(layer, "num_attention_heads", 0) or 0 for layer in attention.of_layers(text)))
    if config.is_encoder_decoder:
        return [f"{name} is an encoder-decoder, whose rows are not packed; set parallelism_config_cp_size to 1"]
    problems = []
    if not heads or heads % size:
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        problems.append(
            f"{name} has {heads} query heads, which parallelism_config_cp_size {size} does not divide; set it to one of "
            f"{sizes or 1}"
        )
    if asked := [what for what in attention.beyond_documents(config) if what in attention.NOT_SHARED]:
        problems.append(f"{name} has {', '.join(asked)}; set parallelism_config_cp_size to 1")
    elif (shares := shares_in_small(config)) is None:
        problems.append(f"{UNTRIED.format(name)} ranks can share its rows; set parallelism_config_cp_size to 1")
    elif not shares:
        problems.append(
            f"layers of {name} mix positions beside attention (a linear attention, a state space, a convolution), or do not "
            "call attention by transformers' interface: a rank would see only its part of a row; set "
            "parallelism_config_cp_size to 1"
        )
    elif balance_weight(config) and not balances_as_known(config):
        problems.append(
            f"{name} balances its experts by a loss of its own, which would see only a part of a row; set "
            "parallelism_config_cp_size to 1, or router_aux_loss_coef in its config.json to 0"
        )
    ropes = getattr(text, "rope_parameters", None) or {}
    of_kinds = [part for part in ropes.values() if isinstance(part, dict)]
    if moving := {*ROPE_KINDS} & {part.get("rope_type") for part in (ropes, *of_kinds)}:
        problems.append(
            f"the rotary embedding of {name} ({', '.join(moving)}) depends on the last position, and each rank has another; "
            "set parallelism_config_cp_size to 1"
        )
    return problems


def check_shared_masks(config: PreTrainedConfig, kernel: str, max_length: int) -> None:
    """Raise ConfigError if this attention cannot have a mask for rows of `max_length` tokens (0: any) that ranks share."""
    if kernel == "sdpa" and balance_weight(config):
        raise ConfigError(
            f"with sdpa, rows that ranks share have a mask, with which {config.model_type} cannot balance its experts; give "
            f"--attn_implementation {DOCUMENTS}, or set router_aux_loss_coef in its config.json to 0"
        )
    if kernel == "sdpa" and not 0 < max_length <= LONGEST_MASK:
        raise ConfigError(
            f"--max_length {max_length or 'none'}: with sdpa, rows that ranks share have a mask of all pairs of tokens, for "
            f"at most {LONGEST_MASK} tokens; shorten them, or give --attn_implementation {DOCUMENTS}"
        )


@torch.no_grad()
@on_cpu_in_fp32()
def balances_as_known(config: PreTrainedConfig) -> bool:
    """Tell whether a tiny model of this configuration balances its experts by the same loss as `balance_of_rows`."""
    model = tiny_model(config, "alone", sequence_group=None)
    if model is None:
        return False
    try:
        output = model(torch.arange(12)[None], use_cache=False, output_router_logits=True, sequence_group=None)
        loss, _ = balance_of_rows(output.router_logits, model.config.num_experts_per_tok, torch.ones(()), None)
        return bool((loss - output.aux_loss).abs() <= 1e-4 * output.aux_loss)
    except REFUSALS:
        return False
