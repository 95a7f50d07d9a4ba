"""Models and tokenizers: from a name, a folder or a configuration."""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Fuse
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
)

from accelerate_recipes.args import arg
from accelerate_recipes.attention import choose
from accelerate_recipes.deepvit import DeepViTConfig, DeepViTForImageClassification
from accelerate_recipes.errors import ConfigError, error_list
from accelerate_recipes.hub import cache
from accelerate_recipes.losses import check_head
from accelerate_recipes.pretrained import Kind, load_config, read_tokenizer
from accelerate_recipes.probes import check_packing
from accelerate_recipes.ranks import is_first, on_first_rank, ranks_a_row
from accelerate_recipes.sharing import check_sharing

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "mixtral": MixtralConfig}
ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart")

# So that no code of a folder is run: transformers prefers a registered class to the copy in an export.
AutoConfig.register(DeepViTConfig.model_type, DeepViTConfig)
AutoModelForImageClassification.register(DeepViTConfig, DeepViTForImageClassification)


def model_class(name: str) -> type[PreTrainedModel]:
    """Return the class of a model that a config.json names.

    Raises:
        AttributeError: if transformers has no such class, and it is not ours.
    """
    ours = DeepViTForImageClassification
    return ours if name == ours.__name__ else getattr(transformers, name)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a padding token; if it has none, the end token is used, and padding has no loss.

    Raises:
        ConfigError: if it has no end token either, or cannot be loaded.
    """
    tokenizer = read_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name} has no end token, which ends each text; set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def make_or_resume(make: Callable[[], PreTrainedTokenizerBase], checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """Make a new model's tokenizer on the first rank, or load the tokenizer of the checkpoint to resume."""
    return load_tokenizer(str(checkpoint)) if checkpoint else on_first_rank(make)


def load_model(
    name: str,
    attn_implementation: str,
    *,
    packed: bool = False,
    has_boundaries: bool = True,
    stretch: "Architecture | None" = None,
    **settings: Any,
) -> PreTrainedModel:
    """Load a causal language model, with the `settings` that `adapters.load_settings` gives, such as the `dtype`.

    With `packed` a class of models is refused whose attention crosses the documents of a packed row;
    `has_boundaries` is that of `attention.choose`. `stretch` may extend the positions that the model was made for.

    Under FSDP2 with `fsdp_cpu_ram_efficient_loading` only each node's first process reads the weights; the others
    get theirs when the model is sharded.

    Raises:
        ConfigError: for an attention, packed rows, or rows that ranks share, that the model's class does not support, and
            for a model that is no decoder.
    """
    config = load_config(name)
    changes = stretched_positions(config, name, stretch) if stretch else {}
    if changes and is_first():
        before = {field: getattr(config, field) for field in changes}
        print(f"Positions of {name}: {changes}; before: {before}", flush=True)
    for field, value in changes.items():
        setattr(config, field, value)
    check_decoder(config, name)
    check_sharing(config)
    dtype = settings.get("dtype", torch.float32)
    attention, _ = choose(attn_implementation, config, dtype, has_boundaries, ranks_a_row() > 1)
    if packed:
        config._attn_implementation = attention
        check_packing(config)
    model = AutoModelForCausalLM.from_pretrained(
        name, attn_implementation=attention, **changes, **settings, **cache.pinned(name)
    )
    return tie_as_read(model)


def tie_as_read(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's output layer the embedding, or not, as the first rank read them, in place; returns the model.

    What config.json says may be wrong: transformers 5.23 does not tie weights that differ. With
    `fsdp_cpu_ram_efficient_loading` only the first rank has weights. The configuration is corrected; else Accelerate and
    `resize_token_embeddings`, which tie weights again, would replace the output layer, and an export would lose it.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return model
    is_tied = on_first_rank(lambda: head.weight is embedding.weight)
    if is_tied != (head.weight is embedding.weight):
        head.weight = embedding.weight if is_tied else nn.Parameter(torch.empty_like(embedding.weight))
    model.config.tie_word_embeddings = is_tied
    return model


def check_decoder(config: PreTrainedConfig, name: str) -> None:
    """Check that a model is a decoder that reads text alone.

    Raises:
        ConfigError: for a model that also reads images or sound, since text alone gives those parts no gradient, and for one
            that has an encoder: of a BART, transformers would silently take the decoder alone.
    """
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise ConfigError(
            f"{name} is a {config.model_type}, which also reads images or sound; these recipes train models that read text "
            "alone: give one of those"
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{name} is a {config.model_type}, which has an encoder; this recipe trains decoders alone, recipes/t5.py "
            f"trains encoder-decoders ({', '.join(ENCODER_DECODERS)})"
        )


CAUSAL = Kind(AutoModelForCausalLM, load_tokenizer, check_decoder)


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence that a model is made for, in tokens; a huge number if its configuration has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def check_length(name: str, max_length: int, flag: str = "max_length", multiple: int = 1) -> None:
    """Raise ConfigError if rows of `max_length` tokens are longer than the pretrained model is made for.

    `flag` is the argument that the message names; batches are padded to a `multiple`.
    """
    longest = max_positions(load_config(name)) // multiple * multiple
    if max_length > longest:
        raise ConfigError(
            f"--{flag} is {max_length}, but {name} is made for {longest} tokens; set it to {longest} or less"
        )


@dataclass
class Architecture:
    """Arguments of a recipe that makes new models: the fields of config.json, with the same names.

    A file of `recipes/configs/c4/` gives them for a published model.
    """

    model_type: str = arg("llama", "Architecture of a new model.", choices=list(CONFIGS))
    vocab_size: int = arg(
        32000, "Rows of the embedding: at least as many as the tokenizer has tokens.", min=1, max=2**24
    )
    hidden_size: int = arg(4096, "Width of the residual stream.", min=1, max=2**20)
    intermediate_size: int = arg(11008, "Width inside the MLP; in mixtral, inside one expert.", min=1, max=2**20)
    num_hidden_layers: int = arg(32, "Number of layers.", min=1, max=10_000)
    num_attention_heads: int = arg(32, "Number of query heads.", min=1, max=2**20)
    num_key_value_heads: int = arg(0, "Number of key and value heads; 0: as many as query heads.", min=0)
    head_dim: int = arg(0, "Width of a head; 0: hidden_size / num_attention_heads.", min=0, max=2**20)
    max_position_embeddings: int = arg(4096, "Longest sequence the model is made for, in tokens.", min=1)
    tie_word_embeddings: bool = arg(False, "Use one matrix for input embedding and output layer.")
    rms_norm_eps: float = arg(1e-5, "Epsilon of the norms.", above=0, max=1)
    initializer_range: float = arg(0.02, "Standard deviation of the initial weights.", min=0, max=10)
    attention_dropout: float = arg(0.0, "Dropout on attention weights.", min=0, below=1)
    rope_theta: float = arg(
        10000.0, "Base of the rotary embedding. The default leaves a pretrained model its own.", min=1
    )
    rope_scaling_factor: float = arg(
        1.0,
        "Factor by which positions are stretched, as in Llama 3 (rope_type llama3); 1: none, or the model's own.",
        min=1,
    )
    rope_low_freq_factor: float = arg(
        1.0,
        "With --rope_scaling_factor: waves longer than original context / this are stretched whole.",
        above=0,
    )
    rope_high_freq_factor: float = arg(
        4.0,
        "With --rope_scaling_factor: waves shorter than original context / this are not stretched.",
        above=0,
    )
    rope_original_max_position_embeddings: int = arg(
        8192, "With --rope_scaling_factor: the original context, in tokens.", min=1
    )
    sliding_window: int = arg(0, "Tokens that attention looks back, in mistral and mixtral; 0: all.", min=0)
    num_local_experts: int = arg(8, "Experts in a layer, in mixtral.", min=1, max=10_000)
    num_experts_per_tok: int = arg(2, "Experts that compute a token, in mixtral.", min=1)
    router_aux_loss_coef: float = arg(0.0, "Weight of the loss that balances the experts, in mixtral.", min=0)
    bos_token_id: int = arg(1, "Id of the tokenizer's begin token, for the model's config.json.", min=0)
    eos_token_id: int = arg(2, "Id of the tokenizer's end token, for the model's config.json.", min=0)

    @property
    def of_new_model(self) -> set[str]:
        """Names of the arguments that a pretrained model does without."""
        names = set(Architecture.__dataclass_fields__)
        return {n for n in names if not n.startswith(("rope_", "max_position"))} if self.stretches else names

    @property
    def stretches(self) -> bool:
        """True if the arguments say how a pretrained model's positions are stretched."""
        default = Architecture()
        return (self.rope_scaling_factor, self.rope_theta) != (default.rope_scaling_factor, default.rope_theta)

    def rope_problems(self) -> list[str]:
        """List what is wrong with the arguments of the rotary embedding, one sentence each."""
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if self.rope_scaling_factor != 1 and low >= high:
            return [f"--rope_high_freq_factor {high} must be above --rope_low_freq_factor {low}"]
        return []

    def stretch_problems(self, exports_adapter_alone: bool) -> list[str]:
        """List why these arguments cannot stretch a pretrained model's positions, one sentence each."""
        if not self.stretches:
            return []
        found = self.rope_problems()
        if exports_adapter_alone:
            found.append(
                "--rope_scaling_factor and --rope_theta with --use_peft: the files of an adapter do not say how positions "
                "are stretched; add --merge_adapter, or change the config.json of a copy of the model"
            )
        return found

    def length_problems(self, max_length: int) -> list[str]:
        """Say that rows of `max_length` tokens are longer than the arguments make the model for."""
        if max_length <= self.max_position_embeddings:
            return []
        return [
            f"--max_length is {max_length}, but the model is made for --max_position_embeddings "
            f"{self.max_position_embeddings}"
        ]

    def architecture_problems(self) -> list[str]:
        """List the sizes from which no model can be made, one sentence each."""
        found = self.rope_problems()
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if not self.head_dim and self.hidden_size % (2 * heads):
            found.append(f"--hidden_size {self.hidden_size} is not an even multiple of --num_attention_heads {heads}")
        if self.head_dim % 2:
            found.append(f"--head_dim is {self.head_dim}; the rotary embedding turns pairs: make it even")
        if kv_heads and heads % kv_heads:
            found.append(f"--num_attention_heads {heads} is not a multiple of --num_key_value_heads {kv_heads}")
        if self.sliding_window and self.model_type == "llama":
            found.append(f"--sliding_window {self.sliding_window}: llama has none; it is mistral's and mixtral's")
        if self.model_type == "mixtral" and self.num_experts_per_tok > self.num_local_experts:
            found.append(
                f"--num_experts_per_tok {self.num_experts_per_tok} is above --num_local_experts {self.num_local_experts}"
            )
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(self, name) >= self.vocab_size:
                found.append(
                    f"--{name} {getattr(self, name)} is no row of the embedding; --vocab_size is {self.vocab_size}"
                )
        return found


def rope_scaling(args: Architecture) -> dict[str, Any]:
    """Return what the arguments say about stretched positions, as in `rope_parameters` of config.json."""
    if args.rope_scaling_factor == 1:
        return {}
    return {
        "rope_type": "llama3",
        "factor": args.rope_scaling_factor,
        "low_freq_factor": args.rope_low_freq_factor,
        "high_freq_factor": args.rope_high_freq_factor,
        "original_max_position_embeddings": args.rope_original_max_position_embeddings,
    }


def stretched_positions(config: PreTrainedConfig, name: str, args: Architecture) -> dict[str, Any]:
    """Return the fields of a pretrained model's config.json that change if the arguments stretch its positions, else none.

    Raises:
        ConfigError: for a model whose positions cannot be stretched so, and for another original context than its own.
    """
    if not args.stretches:
        return {}
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "none, or several")
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"--rope_scaling_factor and --rope_theta stretch one rotary embedding of the type default or llama3, {name} has "
            f"{kind}; leave them out, and change the config.json of a copy of it"
        )
    longest = max_positions(config)
    original = rope.get("original_max_position_embeddings") or longest
    given = args.rope_original_max_position_embeddings
    if args.rope_scaling_factor != 1 and given != original:
        raise ConfigError(
            f"--rope_original_max_position_embeddings is {given}, but {name} was first trained for {original} tokens; set "
            f"it to {original}"
        )
    if args.max_position_embeddings < longest:
        raise ConfigError(
            f"--max_position_embeddings {args.max_position_embeddings} is what {name} is made for once its positions are "
            f"stretched, which is {longest} already; set it to {longest} or more"
        )
    rope |= rope_scaling(args)
    if args.rope_theta != Architecture().rope_theta:
        rope |= {"rope_theta": args.rope_theta}
    return {"rope_parameters": rope, "max_position_embeddings": args.max_position_embeddings}


def new_config(args: Architecture) -> PreTrainedConfig:
    """Make the configuration of the model that the arguments describe."""
    rope = {"rope_type": "default", "rope_theta": args.rope_theta} | rope_scaling(args)
    values = {name: getattr(args, name) for name in Architecture.__dataclass_fields__}
    values |= {
        "num_key_value_heads": args.num_key_value_heads or args.num_attention_heads,
        "head_dim": args.head_dim or args.hidden_size // args.num_attention_heads,
        "sliding_window": args.sliding_window or None,
        "router_aux_loss_coef": args.router_aux_loss_coef or 0.0,  # None in trl's configs: as the model says
        "rope_parameters": rope,
    }
    config_class = CONFIGS[values.pop("model_type")]
    has = config_class.__dataclass_fields__  # a llama has no experts
    return config_class(**{name: value for name, value in values.items() if name in has})


def check_belong_together(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int, whole_logits: bool = True
) -> None:
    """Check that a model can be trained on rows of `max_length` tokens of this tokenizer, with or without whole logits.

    Raises:
        ConfigError: with everything that does not fit.
    """
    found = []
    if len(tokenizer) > config.vocab_size:
        found.append(
            f"the tokenizer has {len(tokenizer):,} tokens, the model's vocab_size is {config.vocab_size:,}; "
            f"set --vocab_size to {len(tokenizer)} or more, or --tokenizer_name to the model's own"
        )
    for name in ("bos_token_id", "eos_token_id"):
        theirs, ours = getattr(tokenizer, name), getattr(config, name)
        if theirs is not None and theirs not in (ours if isinstance(ours, list) else [ours]):
            found.append(f"the tokenizer's {name} is {theirs}, the model's is {ours}; set --{name} {theirs}")
    if max_length > (longest := max_positions(config)):
        found.append(f"--max_length is {max_length}, the model's is {longest}")
    if not whole_logits:
        try:
            check_head(config)
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise ConfigError(error_list("Model and data do not belong together", found))


def new_model(
    config: PreTrainedConfig,
    attn_implementation: str,
    dtype: torch.dtype = torch.float32,
    has_boundaries: bool = True,
) -> PreTrainedModel:
    """Make a causal language model on the meta device, in `dtype`; `has_boundaries` is that of `attention.choose`.

    `distributed.prepare` gives it its first weights; outside of a run `weights.initialize` does.
    """
    check_sharing(config)
    attention, _ = choose(attn_implementation, config, dtype, has_boundaries, ranks_a_row() > 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.config.architectures = [type(model).__name__]
    return model


def classifier_on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a classifier of images on the meta device, in `dtype`."""
    config.architectures = config.architectures or []  # transformers 5.23 asks where a DeiT has several classes
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config, dtype=dtype)
    model.config.architectures = [type(model).__name__]
    return model


def new_llama(attn_implementation: str, dtype: torch.dtype = torch.float32, **config) -> PreTrainedModel:
    """Make a Llama of these sizes, as `new_model` does."""
    return new_model(LlamaConfig(**config), attn_implementation, dtype)


def load_encoder_decoder(name: str, attn_implementation: str, dropout_rate: float, **settings: Any) -> PreTrainedModel:
    """Load a pretrained T5, T5 v1.1, FLAN-T5, mT5 or BART, as `load_model` loads a model.

    `dropout_rate` holds wherever the model has dropout.

    Raises:
        ConfigError: for another kind of model, and for one that does not say how a text begins.
    """
    config = load_config(name)
    check_encoder_decoder(config, name)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        name,
        attn_implementation=attn_implementation,
        **dropouts(config, dropout_rate),
        **settings,
        **cache.pinned(name),
    )
    return share_embedding(model)


def check_encoder_decoder(config: PreTrainedConfig, name: str) -> None:
    """Raise ConfigError for a model that is none of ENCODER_DECODERS, and for one that does not say how a text begins."""
    if config.model_type not in ENCODER_DECODERS:
        raise ConfigError(
            f"{name} is a {config.model_type}, not one of {', '.join(ENCODER_DECODERS)}; give another model"
        )
    if getattr(config, "decoder_start_token_id", None) is None:
        raise ConfigError(
            f"the config.json of {name} has no decoder_start_token_id, the token before the first of a text; add the one "
            f"that it was trained with (in a T5 that of the padding, here {config.pad_token_id})"
        )


ENCODER_DECODER = Kind(AutoModelForSeq2SeqLM, load_tokenizer, check_encoder_decoder)


def dropouts(config: PreTrainedConfig, rate: float) -> dict[str, float]:
    """Return the fields of an encoder-decoder's configuration with which it has this dropout, and no LayerDrop.

    LayerDrop skips whole layers, different ones on each rank: under FSDP the ranks would wait for each other for ever.
    """
    kinds = ("dropout_rate", "dropout", "attention_dropout", "activation_dropout")
    found = {kind: rate for kind in kinds if hasattr(config, kind)}
    return found | {kind: 0.0 for kind in ("encoder_layerdrop", "decoder_layerdrop") if hasattr(config, kind)}


def output_is_embedding(settings: Mapping[str, Any]) -> bool:
    """Tell from the content of a config.json whether an encoder-decoder's output layer is its embedding.

    transformers 5.23 forgets what the file says: it takes the output layer of every T5 and mT5 for the embedding.
    """
    return settings.get("tie_word_embeddings", True)


def encoder_decoder_on_meta(
    config: PreTrainedConfig, is_tied: bool, attn_implementation: str, dtype: torch.dtype
) -> PreTrainedModel:
    """Make an encoder-decoder on the meta device, of which only the sizes matter: as it would be after loading."""
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        if not is_tied:
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(torch.empty_like(head.weight))
    return share_embedding(model)


def new_t5(attn_implementation: str, dtype: torch.dtype, **config) -> PreTrainedModel:
    """Make a T5 of these sizes, with its first weights: the same on all ranks, from the common seed.

    Each rank makes it whole: T5's rule for first weights reaches from a module into its children, which does not work
    on the meta device (see `weights`).
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(torch.initial_seed())
        model = AutoModelForSeq2SeqLM.from_config(
            T5Config(**config), dtype=dtype, attn_implementation=attn_implementation
        )
    model.config.architectures = [type(model).__name__]
    return share_embedding(model)


def share_embedding(model: PreTrainedModel) -> PreTrainedModel:
    """Make an encoder-decoder's embedding a single module, in place; returns the model.

    transformers 5.23 ties three modules, which FSDP2 would put into two groups, and refuses. Only the weights say whether
    the output layer is the embedding too (in v1.1 and FLAN it is not, though the configuration says so).
    """
    shared = tie_as_read(model).get_input_embeddings()
    for part in (model.get_encoder(), model.get_decoder()):
        part.embed_tokens = shared
    # FSDP2 warns because T5's layers pass on the position bias, a view. Nothing writes to it in place.
    warnings.filterwarnings("ignore", message=r".*T5Block\) returned a view tensor")
    return model


def tied_names(model: PreTrainedModel, folder: Path) -> set[str]:
    """Return the names that are aliases of another weight, in a model saved in `folder`.

    For an encoder-decoder the saved configuration decides, which `share_embedding` has corrected.
    """
    tied = set(model.all_tied_weights_keys)
    if not output_is_embedding(json.loads((folder / "config.json").read_text(encoding="utf-8"))):
        tied.discard("lm_head.weight")
    return tied


def new_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer in which each word, between white space, is one token."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def new_character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer in which each of these characters is one token; a text gets a begin token."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def new_bpe_tokenizer(texts: Iterable[str], vocab_size: int, template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with `vocab_size` tokens on the texts.

    `template` says which tokens are added to a text $A: a begin token before it or, for an encoder-decoder, an end
    token after it (`$A </s>`).
    """
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokens = [(token, tokenizer.token_to_id(token)) for token in template.split() if token != "$A"]
    pair = f"{template} {template.replace('$A', '$B')}"
    tokenizer.post_processor = TemplateProcessing(single=template, pair=pair, special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
