"""Make small pretrained models as transformers 4 publishes them, in the folder of the first argument. Runs under transformers 4.

Prints, as JSON, the names of their folders.
"""

import io
import json
import sys
from pathlib import Path

import sentencepiece
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

ROOT = Path(sys.argv[1])
WORDS = [f"{a}{b}{c}{d} " * 3 for a in "abcdefgh" for b in "12345678" for c in "abcdefgh" for d in "12345678"]
TEXTS = [
    *WORDS,
    "Zürich ∑ don't and lines\nof text, 1234567890 times over; the tokenizer learns a few words of it.",
] * 2
ALL = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = ALL | {"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
LONG = {"type": "longrope", "short_factor": [1.1] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}


def sentencepiece_model(kind: str, **settings) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=380, model_type=kind, byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False, **settings,
    )  # fmt: skip
    return model.getvalue()


def code_llama(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("bpe", unk_id=0, bos_id=1, eos_id=2))
    fast = transformers.CodeLlamaTokenizerFast(str(folder / "tokenizer.model"))
    fast.save_pretrained(folder)
    assert (
        fast("e2e4 e7e5")["input_ids"]
        == transformers.CodeLlamaTokenizer(str(folder / "tokenizer.model"))("e2e4 e7e5")["input_ids"]
    )


def sentencepiece_alone(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("bpe", unk_id=0, bos_id=1, eos_id=2))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}), encoding="utf-8"
    )


def gpt2(folder: Path) -> None:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=380, special_tokens=["<|end|>"], show_progress=False)
    bpe.save_model(str(folder))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|end|>")
    fast = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"), **special)
    fast.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    fast.save_pretrained(folder, save_jinja_files=False)


def t5(folder: Path) -> None:
    (folder / "spiece.model").write_bytes(sentencepiece_model("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    transformers.T5TokenizerFast(str(folder / "spiece.model"), extra_ids=4).save_pretrained(folder)


T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5_SIZES |= {"vocab_size": 400, "decoder_start_token_id": 0}
BASES = {
    "llama3": (transformers.LlamaConfig(**SIZES, rope_theta=500000.0, rope_scaling=LLAMA3), code_llama),
    "codellama": (transformers.LlamaConfig(**SIZES, rope_theta=1000000.0), sentencepiece_alone),
    "yarn": (transformers.Qwen2Config(**SIZES, rope_theta=1000000.0, rope_scaling=YARN, tie_word_embeddings=True), gpt2),
    "gemma3": (
        transformers.Gemma3TextConfig(
            **SIZES, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
            rope_local_base_freq=5000.0, rope_theta=300000.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        code_llama,
    ),
    "mixtral": (transformers.MixtralConfig(**SIZES, num_local_experts=4, rope_theta=1000000.0), code_llama),
    "neox": (transformers.GPTNeoXConfig(**ALL, rotary_pct=1.0, rotary_emb_base=50000), gpt2),
    "phi3": (
        transformers.Phi3Config(**SIZES | {"pad_token_id": 0}, original_max_position_embeddings=32, rope_scaling=LONG),
        sentencepiece_alone,
    ),
    "gpt2": (transformers.GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4), gpt2),
    "t5": (transformers.T5Config(**T5_SIZES), t5),
    "flan": (transformers.T5Config(**T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False), t5),
}  # fmt: skip

for name, (config, make_tokenizer) in BASES.items():
    folder = ROOT / name
    folder.mkdir()
    torch.manual_seed(0)
    config.initializer_range = 0.2
    auto_class = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    auto_class.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder)
    transformers.AutoTokenizer.from_pretrained(folder)
print(json.dumps([*BASES]))
