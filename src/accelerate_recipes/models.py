"""Models and tokenizers: from a name, a folder or a configuration; and generation on every rank."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from accelerate_recipes import hub, stop
from accelerate_recipes.args import arg

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "mixtral": MixtralConfig}


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """With a padding token; where the model has none, it is the end token, which no loss is taken of."""
    tokenizer = AutoTokenizer.from_pretrained(name, **hub.pinned(name))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, attn_implementation: str) -> PreTrainedModel:
    """A causal language model in fp32, as master weights; the accelerate YAML decides the precision it computes in.

    Under FSDP2 with `fsdp_cpu_ram_efficient_loading` only each node's first process reads the weights; the others
    get theirs when the model is sharded.
    """
    return AutoModelForCausalLM.from_pretrained(
        name,
        dtype=torch.float32,
        attn_implementation=attn_implementation,
        use_safetensors=True,
        **hub.pinned(name),
    )


@dataclass
class Architecture:
    """Arguments of a recipe that makes new models: the fields of their config.json, by their names there.

    In its place a file of `recipes/configs/c4/` gives those of a published model.
    """

    model_type: str = arg("llama", "Of a new model.", choices=list(CONFIGS))
    vocab_size: int = arg(32000, "Rows of the embedding: at least as many as the tokenizer has tokens.")
    hidden_size: int = arg(4096, "Width of the residual stream.")
    intermediate_size: int = arg(11008, "Width inside the MLP; in mixtral, of one expert.")
    num_hidden_layers: int = arg(32, "Layers.")
    num_attention_heads: int = arg(32, "Query heads.")
    num_key_value_heads: int = arg(0, "Key and value heads; 0: as many as query heads.")
    head_dim: int = arg(0, "Width of a head; 0: hidden_size / num_attention_heads.")
    max_position_embeddings: int = arg(4096, "Longest sequence the model is made for, in tokens.")
    tie_word_embeddings: bool = arg(False, "Input embedding and output layer are one matrix.")
    rms_norm_eps: float = arg(1e-5, "Epsilon of the norms.")
    initializer_range: float = arg(0.02, "Standard deviation of the first weights.")
    attention_dropout: float = arg(0.0, "Dropout on attention weights.")
    rope_theta: float = arg(10000.0, "Base of the rotary embedding.")
    rope_scaling_factor: float = arg(1.0, "Above 1: Llama 3's stretching (rope_type llama3), by this factor.")
    rope_low_freq_factor: float = arg(
        1.0, "With it: waves longer than the original context / this are stretched whole."
    )
    rope_high_freq_factor: float = arg(4.0, "With it: waves shorter than the original context / this, not at all.")
    rope_original_max_position_embeddings: int = arg(8192, "With it: the original context, in tokens.")
    sliding_window: int = arg(0, "mistral and mixtral: tokens that attention looks back; 0: all.")
    num_local_experts: int = arg(8, "mixtral: experts in a layer.")
    num_experts_per_tok: int = arg(2, "mixtral: experts that compute a token.")
    router_aux_loss_coef: float = arg(0.0, "mixtral: weight of the loss that balances the experts.")
    bos_token_id: int = arg(1, "Of the tokenizer; goes into the model's config.json.")
    eos_token_id: int = arg(2, "The same.")

    def architecture_problems(self) -> list[str]:
        """What no model can be made of, one sentence each."""
        found = []
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if not self.head_dim and self.hidden_size % (2 * heads):
            found.append(f"--hidden_size {self.hidden_size} is not an even multiple of --num_attention_heads {heads}")
        if kv_heads and heads % kv_heads:
            found.append(f"--num_attention_heads {heads} is not a multiple of --num_key_value_heads {kv_heads}")
        if self.sliding_window and self.model_type == "llama":
            found.append(f"--sliding_window {self.sliding_window}: llama has none; it is mistral's and mixtral's")
        return found


def new_config(args: Architecture) -> PreTrainedConfig:
    """The configuration of the model that the arguments describe."""
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling_factor,
            "low_freq_factor": args.rope_low_freq_factor,
            "high_freq_factor": args.rope_high_freq_factor,
            "original_max_position_embeddings": args.rope_original_max_position_embeddings,
        }
    values = {name: getattr(args, name) for name in Architecture.__dataclass_fields__}
    values |= {
        "num_key_value_heads": args.num_key_value_heads or args.num_attention_heads,
        "head_dim": args.head_dim or args.hidden_size // args.num_attention_heads,
        "sliding_window": args.sliding_window or None,
        "rope_parameters": rope,
    }
    config_class = CONFIGS[values.pop("model_type")]
    has = config_class.__dataclass_fields__  # a llama has no experts
    return config_class(**{name: value for name, value in values.items() if name in has})


def vocabulary_problems(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Where model and tokenizer do not belong together, one sentence each."""
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
    return found


def new_model(config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel:
    """A causal language model on the meta device, in fp32: `distributed.prepare` gives it its first weights.

    Elsewhere `init.initialize` does.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    model.config.architectures = [type(model).__name__]
    model.is_new = True  # until it has them
    return model


def new_llama(attn_implementation: str, **config) -> PreTrainedModel:
    """A Llama of these sizes, as `new_model` makes it."""
    return new_model(LlamaConfig(**config), attn_implementation)


def new_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer in which each word, between white space, is one token."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def new_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` tokens, trained on the texts; it begins each with a begin token."""
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
    begin = special["bos_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@torch.no_grad()
def continue_greedily(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """The text that `model` continues each prompt (token ids) with; on every rank, for all prompts.

    Each rank generates for its share; all run the same number of batches, since forward passes communicate.

    Raises:
        Stopped: between two batches.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    missing = -len(by_length) % (world_size * batch_size)
    mine = (by_length + by_length[-1:] * missing)[rank::world_size]
    texts: list[tuple[int, str]] = []
    model.eval()
    with whole_root(model):
        # Compiled forward passes would be compiled again for every length.
        generator = accelerator.unwrap_model(model, keep_torch_compile=False)
        for start in range(0, len(mine), batch_size):
            stop.raise_if_requested(accelerator)
            indices = mine[start : start + batch_size]
            batch = tokenizer.pad(
                {"input_ids": [prompts[i] for i in indices]}, padding_side="left", return_tensors="pt"
            ).to(accelerator.device)
            tokens = generator.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=tokenizer.pad_token_id,
                synced_gpus=world_size > 1,
            )
            new = tokens[:, batch["input_ids"].shape[1] :]
            texts += zip(indices, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True)
    model.train()
    if world_size > 1:
        texts = gather_object(texts)
    found = dict(texts)
    return [found[i] for i in range(len(prompts))]


def whole_root(model: nn.Module) -> contextlib.AbstractContextManager:
    """FSDP1 gathers a module's own parameters only when it is called itself; `generate` calls the module inside."""
    if isinstance(model, FSDP1):
        return FSDP1.summon_full_params(model, recurse=False, writeback=False)
    return contextlib.nullcontext()
