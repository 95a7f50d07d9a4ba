"""Settings of the recipes on trl: their arguments, the config of trl's trainer, and the model that a recipe begins with."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.trainer_utils import align_special_tokens
from trl import clone_chat_template
from trl.kernels import chunked_logprob
from trl.trainer.utils import disable_dropout_in_model

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.arguments.names import ELSEWHERE
from accelerate_recipes.conversations.heads import add_head
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.losses import TILE_ON_CPU
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.configurations import Architecture, check_belong_together, new_config
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.models.head_probe import Tiny, tiny_and_tokens
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.models.pretrained import check_length, generation_config, load_text_config
from accelerate_recipes.models.probes import UNTRIED, Packing, balance_weight, packing_of
from accelerate_recipes.models.slices import source_of
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.models.weights import initialize, seed_of
from accelerate_recipes.ranks import computes_in_bf16, ranks_a_row
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial

# Fields of transformers.TrainingArguments that are not arguments here: they would repeat or contradict the engine.
REPLACED = {field.name for field in fields(TrainingArguments)} - set(TrainArgs.__dataclass_fields__)
# Those that are arguments here, and that trl reads. Its optimizer, schedule and loop are never used.
READ_BY_TRL = (
    "output_dir", "seed", "per_device_train_batch_size", "per_device_eval_batch_size", "dataloader_num_workers",
)  # fmt: skip
WHEN = "--save_steps, --eval_steps and --logging_steps say when"
CHECKPOINTING = "set `fsdp_activation_checkpointing: true` under `fsdp_config:` in the accelerate YAML"
MODEL = "the recipe loads the model; its arguments are --model_name_or_path and --attn_implementation"

if not torch.cuda.is_available():
    chunked_logprob.TOKEN_CHUNK_SIZE = TILE_ON_CPU


@dataclass
class TrainerArgs(TrainArgs):
    """Arguments of every recipe on one of trl's trainers, in addition to the fields of trl's config class."""

    model_name_or_path: str = arg("", "Causal language model to begin with: a name on the Hub, or a folder.")
    attn_implementation: str = arg(
        "auto",
        "Attention kernel, as transformers names it, or documents (SFT with --packing or --padding_free); auto: documents "
        "in bf16 on a GPU if possible, else sdpa, or eager for a model without sdpa.",
        fixed=False,
    )

    groups = TrainArgs.groups | dict.fromkeys(("chat_template_path", "dataset_num_proc"), "data")
    ranges = dict.fromkeys(("router_aux_loss_coef",), Range(min=0))
    from_scratch = False  # in recipes that always begin with a pretrained model
    # In recipes without these arguments.
    disable_dropout = False
    eos_token = chat_template_path = None
    template_model = ""  # name or folder of a model whose chat template is used
    owned_elsewhere = (
        dict.fromkeys(REPLACED, "it is of the loop of transformers' Trainer; this loop is that of all recipes, see --help")
        | dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), WHEN)
        | dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), CHECKPOINTING)
        | dict.fromkeys(("gradient_checkpointing_kwargs", "activation_offloading"), CHECKPOINTING)
        | dict.fromkeys(("model_init_kwargs", "trust_remote_code"), MODEL)
        | {"load_best_model_at_end": "--metric_for_best_model keeps the best checkpoint, which `export` turns into a model"}
        | ELSEWHERE
    )  # fmt: skip

    def __post_init__(self):
        """Skip `TrainingArguments.__post_init__`, which starts the process group; `trl_config` makes such a config later."""

    @property
    def has_boundaries(self) -> bool:
        return False

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size)
        if not self.model_name_or_path and not self.from_scratch:
            problems.append(
                "--model_name_or_path is missing: a name on the Hub, or a folder such as outputs/demo/export"
            )
        if self.attn_implementation == DOCUMENTS and not self.has_boundaries:
            problems.append(
                f"--attn_implementation {DOCUMENTS}: trl's batches do not say where documents begin; give sdpa, or train "
                "by SFT with --packing or --padding_free"
            )
        multiple = str(self.pad_to_multiple_of or "none").lower()
        if multiple not in ("auto", "none") and not (multiple.isdecimal() and int(multiple)):
            problems.append(f"--pad_to_multiple_of is {multiple}; it must be auto, none or a positive number")
        return problems


@dataclass
class AnswerArgs:
    """Arguments of a recipe on rows of SFT. Put it before TrainerArgs in the bases of its arguments."""

    assistant_only_loss: str = arg(
        "auto",
        "Train the answers of conversations alone (true), or everything (false); auto: true, but false for texts.",
        choices=("auto", "true", "false"),
        fixed=False,
    )

    templates = (".jinja", ".j2")  # trl reads files with these endings as chat templates, other names as models
    groups = TrainerArgs.groups | dict.fromkeys(("packing", "completion_only_loss"), "task")
    ranges = TrainerArgs.ranges | {"dataset_num_proc": Range(min=1), "max_length": Range(min=2)}
    owned_elsewhere = TrainerArgs.owned_elsewhere | {
        "accept_training_template": "remove it: answers are found with the model's own template",
        "dataset_kwargs": "remove it: rows are always prepared here",
    }

    def problems(self, world_size: int) -> list[str]:
        args: Any = self
        is_file = args.chat_template_path and not args.template_model
        problems = super().problems(world_size)  # pyright: ignore[reportAttributeAccessIssue]
        if (args.packing or args.eval_packing) and not args.max_length:
            problems.append("packing fills rows of --max_length tokens, which is none; give a number")
        return problems + (args.file_problems("chat_template_path", self.templates) if is_file else [])

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        if self.assistant_only_loss == "auto":
            self.assistant_only_loss = usual_value(saved.get("assistant_only_loss", "auto"))
        return super().settle(saved)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class NewModelArgs(TrainerArgs, Architecture):
    """Arguments of a recipe that may also begin with a new, small model."""

    tokenizer_name: str = arg("", "Tokenizer of a new model: a name on the Hub, or a folder (with --from_scratch).")
    router_aux_loss_coef: float | None = arg(
        None, "Weight of the loss that balances experts; default: the model's own.", group="rare"
    )

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size) + self.architecture_problems(self.max_length)
        if self.from_scratch and self.model_name_or_path:
            problems.append("--from_scratch makes a new model; remove it, or --model_name_or_path")
        if self.from_scratch != bool(self.tokenizer_name):
            problems.append("--from_scratch and --tokenizer_name go together; give both, or neither")
        return problems

    def new_model(self, tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedModel:
        """Make the new model on the meta device."""
        config = new_config(self, tokenizer, self.max_length)
        return new_model(config, self.attn_implementation, self.param_dtype, self.has_boundaries)


def usual_value(value: Any) -> str:
    """Return a value of --assistant_only_loss as it is now; checkpoints of earlier versions hold a bool."""
    return str(value).lower()


def trl_config(run: Run[TrainerArgs], config_class: type[TrainingArguments], **decided: Any) -> TrainingArguments:
    """Make the config of trl's trainer from our arguments; switch everything off that the trainer must not do.

    `decided` are fields that the recipe sets.

    Raises:
        ConfigError: for arguments that trl refuses.
    """
    args, accelerator = run.args, run.accelerator
    names = {field.name for field in fields(config_class)} - {field.name for field in fields(TrainingArguments)}
    values = {name: getattr(args, name) for name in {*names, *READ_BY_TRL} - args.owned_elsewhere.keys()}
    values |= {
        "accelerator_config": {"use_configured_state": True},
        "use_cpu": accelerator.device.type == "cpu",
        "bf16": computes_in_bf16(accelerator.mixed_precision),
        "gradient_accumulation_steps": args.accumulation_steps(accelerator.num_processes),
        "activation_checkpointing": False,  # trl would turn it on, whatever the YAML says
        "disable_tqdm": True,
    }
    # For one process without torch.distributed, transformers 5.23 counts all GPUs of the machine and wants DataParallel; trl
    # refuses that. And `run.prepare` moves the model; under FSDP, only this process's shard of it.
    ours = type(config_class.__name__, (config_class,), {"n_gpu": 1, "place_model_on_device": False})
    try:
        return ours(**values | decided)
    except ValueError as error:
        raise ConfigError(f"trl's {config_class.__name__} refuses these arguments: {error}") from error


def make_model(args: TrainerArgs) -> PreTrainedModel:
    """Load the model; with --data_only make it on the meta device, without weights."""
    if args.data_only:
        config = load_text_config(args.model_name_or_path)
        model = new_model(config, args.attn_implementation, has_boundaries=args.has_boundaries)
        # It names the tokens that end an answer; a model may have none.
        model.generation_config = generation_config(model, args.model_name_or_path)
    else:
        model = load_model(
            args.model_name_or_path, args.attn_implementation, has_boundaries=args.has_boundaries, **load_settings(args)
        )
    check_trl_packing(args, model)
    # trl would set rows of new tokens to the mean of the other rows, which have no values.
    if model.device.type == "meta" and not source_of(model):
        model.resize_token_embeddings = partial(model.resize_token_embeddings, mean_resizing=False)
    return model


def set_up_by_trl(
    args: Any, model: Any, tokenizer: PreTrainedTokenizerBase, outputs: Sequence[str], tiny: Tiny = tiny_and_tokens
) -> set[int]:
    """Give a model the forward pass that computes `outputs` (see `add_head`); set what the arguments say of it.

    These are dropout, chat template, end and padding.

    A template may be that of another model, whose tokens are then added to the tokenizer and to the model, by trl. The
    special tokens of the tokenizer are written into the configurations of the model. The forward pass is tried with a `tiny`
    model.

    Returns:
        The tokens at which the model stopped before.

    Raises:
        ConfigError: for an end or a padding that is no token, for a model without a template, and if adapters would have to
            train tokens of a template.
    """
    base_stops = stops_of(model.generation_config)
    text, generation = model.config.get_text_config(), model.generation_config
    if args.eos_token is not None:
        check_is_token("eos_token", args.eos_token, tokenizer)
        tokenizer.eos_token = args.eos_token
        text.eos_token_id = end = tokenizer.eos_token_id
        ends = generation.eos_token_id
        ends = ends if isinstance(ends, list) else sorted(stops_of(generation))
        if end not in ends:  # generation may have several
            generation.eos_token_id = [end, *ends]
    if args.template_model:
        num_tokens, num_embeddings = len(tokenizer), model.get_input_embeddings().num_embeddings
        set_seed(args.seed)  # for rows of new tokens
        try:
            # Its folder at the pinned commit; by its name, trl would ask the Hub.
            clone_chat_template(model, tokenizer, str(cache.folder("model", args.template_model)))
        except ValueError as error:  # it has no template
            raise ConfigError(f"--chat_template_path {args.chat_template_path}: {error}") from None
        # Even if the embedding has spare rows for new tokens, these rows mean nothing while they are not trained.
        if args.use_peft and (num_tokens, num_embeddings) != (
            len(tokenizer), model.get_input_embeddings().num_embeddings,
        ):  # fmt: skip
            raise ConfigError(
                f"--chat_template_path {args.chat_template_path} is a model, whose tokens trl adds: the tokenizer had "
                f"{num_tokens:,}, and has {len(tokenizer):,}. --use_peft neither trains nor saves their rows of the "
                "embedding; give the template as a .jinja file"
            )
    elif args.chat_template_path:
        tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
    padding = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    check_is_token("pad_token", padding, tokenizer)
    tokenizer.pad_token = padding
    text.pad_token_id = generation.pad_token_id = tokenizer.pad_token_id
    align_special_tokens(model, tokenizer)
    add_head(model, outputs, tiny=tiny)
    if args.disable_dropout:
        switch_off_dropout(model)
    return base_stops


def check_is_token(name: str, token: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the value of an argument, or the default in its place, is no token of the tokenizer."""
    if token not in tokenizer.get_vocab():
        raise ConfigError(
            f"--{name} {token!r} is no token of the tokenizer; give one of its tokens, or add it, with the other marks of "
            f"the template: --new_tokens {token!r}"
        )


def stops_of_run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens at which generation stops, by the model's settings and by the tokenizer."""
    return stops_of(model.generation_config) | stops_of(tokenizer)


@contextlib.contextmanager
def refused_by_trl() -> Iterator[None]:
    """Turn an error by which trl refuses its settings, a model or rows into an error for the user."""
    try:
        yield
    except (ValueError, TemplateError, TypeError) as error:
        # A TemplateError comes from a wrong chat template, or from wrong rows.
        # A TypeError about Undefined comes from a template that writes a value which a row lacks.
        if isinstance(error, ConfigError) or (isinstance(error, TypeError) and "Undefined" not in str(error)):
            raise
        raise ConfigError(f"trl's trainer refuses this run: {error}") from error


def check_trl_packing(args: TrainerArgs, model: PreTrainedModel) -> None:
    """Refuse packed rows of trl for a model that does not read from the positions where documents begin.

    trl's `wrapped` strategy does not separate documents, for any model. Rows that ranks share have no mask, and experts are
    not balanced over the whole row.

    Raises:
        ConfigError: for such a model.
    """
    text, attention = model.config.get_text_config(), model.config._attn_implementation
    if ranks_a_row() > 1 and attention != DOCUMENTS:
        raise ConfigError(
            f"rows that ranks share (parallelism_config_cp_size) need --attn_implementation {DOCUMENTS} in this recipe, and "
            f"it is {attention}; give that if the model can, or set parallelism_config_cp_size to 1"
        )
    if ranks_a_row() > 1 and balance_weight(text, args.router_aux_loss_coef):
        raise ConfigError(
            f"{text.model_type} balances its experts over whole rows, of which a rank has a part; give "
            "--router_aux_loss_coef 0, or set parallelism_config_cp_size to 1"
        )
    packing = packing_of(model.config) if args.has_boundaries else Packing.POSITIONS
    if packing is Packing.UNKNOWN:
        untried = UNTRIED.format(model.config.model_type)
        raise ConfigError(
            f"{untried} it keeps to the documents of a packed row; leave out --packing and --padding_free"
        )
    if packing is not Packing.POSITIONS:
        raise ConfigError(
            f"{model.config.model_type} models do not see from the positions of a packed row where its documents begin, "
            "and trl gives them no mask: attention would cross them; leave out --packing and --padding_free"
        )


def make_or_load_model(
    args: NewModelArgs, tokenizer: PreTrainedTokenizerBase, new_tokens: Sequence[str]
) -> tuple[PreTrainedModel, list[int]]:
    """Load the model to begin with, or make a new one: whole on each rank, because trl's trainer takes no meta device.

    Tokens that were added to the tokenizer get rows in the embedding; their first values depend only on the seed.

    Returns:
        The model; and the ids of `new_tokens` and of all tokens with new rows in the embedding.

    Raises:
        ConfigError: for a tokenizer or a length that does not fit the new model.
    """
    if not args.from_scratch:
        model = make_model(args)
        num_embeddings = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
        added = range(num_embeddings, len(tokenizer))
        of_layers = getattr(model.config, "vocab_size_per_layer_input", None)
        if added and of_layers:
            raise ConfigError(
                f"the tokenizer has {len(tokenizer)} tokens, {args.model_name_or_path} has room for {num_embeddings}, and "
                f"its embedding of each layer ({of_layers} tokens) cannot grow; leave out --new_tokens, or give another"
            )
        if added:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed_of("new rows", args.seed))
                model.resize_token_embeddings(len(tokenizer))
        vocabulary = tokenizer.get_vocab()
        return model, sorted({*added, *(vocabulary[token] for token in new_tokens)})
    model = args.new_model(tokenizer)
    check_trl_packing(args, model)
    check_belong_together(model.config, tokenizer)
    return model if args.data_only else initialize(model, args.seed, "cpu"), []


def trial_model(args: TrainerArgs, config: PreTrainedConfig) -> PreTrainedModel:
    """Make a model of a trial, as a run with these arguments would load it."""
    return new_model(config, args.attn_implementation, load_settings(args)["dtype"], args.has_boundaries)


def with_fused_head(
    args: TrainerArgs, outputs: Sequence[str], config: PreTrainedConfig, temperature: float = 1.0
) -> PreTrainedModel:
    """Make a model of a trial with the forward pass that computes `outputs`; see `add_head`."""
    model = trial_model(args, config)
    if args.disable_dropout:
        switch_off_dropout(model)
        args.lora_dropout = 0.0  # the model gets its adapters later, by these `args`
    add_head(model, outputs, temperature)
    return model


def trial_of(args: TrainerArgs, config: PreTrainedConfig, loss: Any, batch: Any, tokens: int, **more: Any) -> Trial:
    """Make the trial of a loss and a batch of it, with `tokens` targets; `more` are other fields of the trial."""
    make = partial(with_fused_head, args, loss.outputs)
    return Trial(config, make, loss.sum_parts, loss.count_parts, batch, tokens, **more)


def switch_off_dropout(model: nn.Module) -> None:
    """Switch off all dropout of a model.

    trl 1.16 does so for layers of dropout alone: the attention of most models holds its rate as a number.
    """
    disable_dropout_in_model(model)
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        vars(module).update(dict.fromkeys(rates, 0.0))


def pad_multiple(args: Any) -> int:
    """Return the number whose multiples trl's batches have as lengths; ranks that share a row get equal parts of it."""
    multiple = str(args.pad_to_multiple_of)
    return math.lcm(int(multiple) if multiple.isdecimal() else 1, ranks_a_row())


def check_documents(args: Any, name: str, config: PreTrainedConfig, *lengths: np.ndarray) -> None:
    """Check that the longest of the documents with these `lengths`, as far as it is kept, fits into a model's positions.

    Raises:
        ConfigError: if it does not.
    """
    longest = max(int(some.max(initial=0)) for some in lengths)
    kept = min(longest, args.max_length or longest)
    check_length(
        name or "the new model", kept, multiple=1 if args.has_boundaries else pad_multiple(args), config=config
    )
