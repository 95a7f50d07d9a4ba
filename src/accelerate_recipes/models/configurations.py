"""Configuration of a new model: its type, and fields of its config.json."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar
from unittest import mock

import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, modeling_rope_utils

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range, field_names
from accelerate_recipes.errors import ConfigError, error_list, one_line, raise_problems, suggestion
from accelerate_recipes.models.loading import CAUSAL
from accelerate_recipes.models.pretrained import Kind, max_positions

MOST_LAYERS = 10_000
RANGES = {
    "vocab_size": Range(min=1, max=2**24), "hidden_size": Range(min=1, max=2**20),
    "num_hidden_layers": Range(min=1, max=MOST_LAYERS), "num_attention_heads": Range(min=1, max=2**20),
    "num_key_value_heads": Range(min=1, max=2**20), "initializer_range": Range(min=0, max=10),
}  # fmt: skip
# Names in the classes of transformers.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass
class Architecture:
    """Arguments of a recipe that makes new models."""

    group = "model"
    from_scratch: bool = arg(False, "Train a new model of --model_type, instead of --model_name_or_path.")
    model_type: str = arg("llama", "Architecture of a new model, by its name in transformers, such as qwen3.")
    config_overrides: dict = arg(
        {},
        "Fields of a new model's config.json, such as hidden_size=128 rope_parameters.rope_theta=5e5, with values in YAML; "
        "in a preset a mapping. All other fields, sizes too, have the defaults of the model's class in transformers.",
    )

    of_new_model: ClassVar[tuple[str, ...]] = ("model_type", "config_overrides")  # not used with a pretrained model
    kind: ClassVar[Kind] = CAUSAL

    def architecture_problems(self, max_length: int | None, **decided: Any) -> list[str]:
        """List why no new model can be made, one sentence each; `max_length` and `decided` are those of `new_config`."""
        if not self.from_scratch:
            return []
        config, problems = try_config(self, None, max_length, decided)
        if config and max_length and max_length > (longest := max_positions(config)):
            problems.append(
                f"--max_length is {max_length}, but the model is made for max_position_embeddings {longest}; set that in "
                f"--config_overrides to {max_length} or more"
            )
        return problems


def new_config(
    args: Architecture, tokenizer: PreTrainedTokenizerBase | None = None, max_length: int | None = None, **decided: Any
) -> PreTrainedConfig:
    """Make the configuration of the model that the arguments describe.

    Fields that the arguments leave open are as `decided`; the model is made for `max_length` tokens, and has the begin
    and end tokens of the tokenizer.

    Raises:
        ConfigError: with everything that is wrong with the arguments.
    """
    config, problems = try_config(args, tokenizer, max_length, decided)
    if config is None:
        raise ConfigError(error_list("No new model can be made", problems))
    return config


def try_config(
    args: Architecture, tokenizer: PreTrainedTokenizerBase | None, max_length: int | None, decided: dict[str, Any]
) -> tuple[PreTrainedConfig | None, list[str]]:
    """Make the configuration that `new_config` makes, or say what is wrong, one sentence each."""
    title, known = f"--model_type {args.model_type}", args.kind.auto_class._model_mapping
    if (
        args.model_type not in transformers.CONFIG_MAPPING
        or (config_class := transformers.CONFIG_MAPPING[args.model_type]) not in known
    ):
        close = suggestion(args.model_type, [config.model_type for config in known])
        wanted = args.kind.auto.removeprefix("Auto")
        return None, [f"{title}: transformers has no {wanted} of this type{close}"]
    title = "--config_overrides" if args.config_overrides else title
    if problems := field_problems(config_class, args.config_overrides):
        return None, [f"{title}: {problem}" for problem in problems]
    usual: dict[str, Any] = {"pad_token_id": None}  # where rows are packed
    # ModernBERT's decoder must have one.
    if any(f.name == "pad_token_id" and f.type is int for f in fields(config_class)):
        usual["pad_token_id"] = getattr(tokenizer, "pad_token_id", None) or 0
    if tokenizer is not None:
        usual |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        usual["forced_eos_token_id"] = tokenizer.eos_token_id
    if max_length and not has_positions(config_class, max_length, args.config_overrides):
        usual["max_position_embeddings"] = max_length
    names = field_names(config_class)
    values = {name: value for name, value in usual.items() if name in names} | decided | args.config_overrides
    try:
        # transformers only warns of unknown keys in `rope_parameters`, and of factors in the wrong order.
        with mock.patch.object(modeling_rope_utils.logger, "warning", problems.append):
            config = config_class(**nested(values, config_class.attribute_map))
        args.kind.check(config, f"--model_type {args.model_type}")
        problems += size_problems(config.get_text_config())
    except ConfigError as error:
        return None, [str(error)]
    except Exception as error:  # each class of configurations checks its fields in its own way
        return None, [f"{title}: {one_line(error)}"]
    return None if problems else config, [f"{title}: {problem}" for problem in dict.fromkeys(problems)]


def has_positions(config_class: type[PreTrainedConfig], max_length: int, overrides: Mapping[str, Any]) -> bool:
    """Tell whether a class has a rotary embedding that is stretched to the class's own length, `max_length` or more.

    Such an embedding (of GPT-OSS, Apertus) contradicts another length.
    """
    if any(name.startswith("rope_parameters") for name in overrides):
        return False
    try:
        usual = config_class()
    except Exception:  # some classes have no defaults that fit together
        return False
    stretched = "original_max_position_embeddings" in (getattr(usual, "rope_parameters", None) or {})
    return stretched and max_length <= max_positions(usual)


def field_problems(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any], path: str = "") -> list[str]:
    """List names that are no fields of a class of configurations, or of a class nested in it, and impossible values."""
    known, problems, inner = field_names(config_class), [], {}
    for name, value in overrides.items():
        first, _, rest = name.partition(".")
        if first not in known:
            problems.append(f"a {config_class.model_type} has no field {path}{first}{suggestion(first, known, 0.6)}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{path}{name} is {value}; it must be a finite number")
        elif "layer" in name and isinstance(value, int) and value > MOST_LAYERS:  # some classes make a list of them
            problems.append(f"{path}{name} is {value}; it must be at most {MOST_LAYERS}")
        elif rest:
            inner.setdefault(first, {})[rest] = value
    if twice := {config_class.attribute_map.get(name) for name in overrides} & {*overrides}:
        problems.append(
            f"{', '.join(sorted(twice))} is set under two names, of {', '.join(overrides)}; give one of them"
        )
    for first, values in inner.items():
        if spec := config_class.sub_configs_defaults.get(first):
            problems += field_problems(type(spec.default_config), values, f"{path}{first}.")
    return problems


def size_problems(config: PreTrainedConfig) -> list[str]:
    """List sizes that contradict each other. transformers would make a model of them that cannot compute."""

    def number(*names: str) -> tuple[str, int]:
        sizes = {f.name: getattr(config, f.name) for f in fields(config) if f.name in names}
        return next(((name, value) for name, value in sizes.items() if isinstance(value, int) and value), (names[0], 0))

    dropouts = {name: Range(min=0, below=1) for name in vars(config) if "drop" in name}
    problems = []
    for name, limits in (RANGES | dropouts).items():
        value = getattr(config, name, None)
        if type(value) in (int, float) and (problem := limits.problem(value)):
            problems.append(f"{name} is {value}; {problem}")
    (_, heads), (_, groups) = number("num_attention_heads"), number("num_key_value_heads")
    if groups and heads % groups and not problems:
        problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    (name, experts), (chosen, num_chosen) = number(*EXPERTS), number(*CHOSEN_EXPERTS)
    if experts and num_chosen > experts:
        problems.append(f"{chosen} is {num_chosen}, but {name} is {experts}")
    return problems


def nested(values: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Turn dotted names into sections, {"a.b": 1} into {"a": {"b": 1}}, and other names of a field into its proper name."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        first, *rest = name.split(".")
        *path, last = aliases.get(first, first), *rest
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = copy.deepcopy(value)  # classes of configurations change lists in place
    return tree


def check_belong_together(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model can be trained on rows of this tokenizer.

    Raises:
        ConfigError: with everything that does not fit.
    """
    problems = []
    if len(tokenizer) > config.vocab_size:
        problems.append(
            f"the tokenizer has {len(tokenizer):,} tokens, the model's vocab_size is {config.vocab_size:,}; "
            f"set vocab_size in --config_overrides to {len(tokenizer)} or more, or --tokenizer_name to the model's own"
        )
    for name in ("bos_token_id", "eos_token_id"):
        theirs = getattr(tokenizer, name)
        ours = getattr(config, name, theirs)
        if theirs is not None and theirs not in (ours if isinstance(ours, list) else [ours]):
            problems.append(
                f"the tokenizer's {name} is {theirs}, the model's is {ours}; leave it out of --config_overrides, or give "
                "the model's own tokenizer"
            )
    raise_problems("Model and data do not belong together", problems)
