"""Models and tokenizers: from a name, a folder or a configuration; and generation on every rank."""

import contextlib
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from accelerate_recipes import stop


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """With a padding token; where the model has none, it is the end token, which no loss is taken of."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, attn_implementation: str) -> PreTrainedModel:
    """A causal language model in fp32, as master weights; the accelerate YAML decides the precision it computes in.

    Under FSDP2 with `fsdp_cpu_ram_efficient_loading` only each node's first process reads the weights; the others
    get theirs when the model is sharded.
    """
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation=attn_implementation, use_safetensors=True
    )


def new_llama(attn_implementation: str, **config) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every rank that has the same seed."""
    config = LlamaConfig(architectures=[LlamaForCausalLM.__name__], **config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)


def new_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer in which each word, between white space, is one token."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
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
