"""Tokenizers: of a pretrained model, and new ones."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.pretrained import read_tokenizer
from accelerate_recipes.ranks import on_first_rank


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a padding token. Without one, the end token becomes the padding token; padding has no loss.

    Raises:
        ConfigError: if the tokenizer has no end token either, or cannot be loaded.
    """
    tokenizer = read_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name} has no end token, which ends each text; set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stops_of(settings: GenerationConfig | PreTrainedConfig | PreTrainedTokenizerBase | None) -> set[int]:
    """Return the tokens at which generation with these settings stops: a chat model has several, as the end of a turn."""
    ends: Any = getattr(settings, "eos_token_id", None)
    return {*(ends if isinstance(ends, list) else [ends])} - {None}


def make_or_resume(make: Callable[[], PreTrainedTokenizerBase], checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """Make a new model's tokenizer on the first rank, or load the tokenizer of the checkpoint to resume."""
    return load_tokenizer(str(checkpoint)) if checkpoint else on_first_rank(make)


def new_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each word; white space separates words."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def new_bpe_tokenizer(texts: Iterable[str], vocab_size: int, template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with `vocab_size` tokens on the texts.

    `template` describes the tokens around a text $A: a begin token before it or, for an encoder-decoder, an end token after
    it (`$A </s>`).
    """
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    settings = {"special_tokens": list(special.values()), "initial_alphabet": ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=vocab_size, show_progress=False, **settings))
    tokens = [(token, tokenizer.token_to_id(token)) for token in template.split() if token != "$A"]
    pair = f"{template} {template.replace('$A', '$B')}"
    tokenizer.post_processor = TemplateProcessing(single=template, pair=pair, special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
