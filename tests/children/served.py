"""Read folders of models as a program that serves them: prints, as JSON, logits, token ids, texts and settings of each.

Runs under transformers 4 or 5, without this project. Arguments: a JSON list of folders.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

TEXTS = ["e2e4 e7e5", " Two  spaces,\nand lines", "Zürich ∑ 象棋 🙂", "<s>1234567890</s> don't", "<new> and <|end|>"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def seen(folder: str) -> dict:
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    is_pair = config.get("is_encoder_decoder")
    auto_class = AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM
    model, info = auto_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    ids = torch.arange(3, 43)[None] % config["vocab_size"]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, **({"decoder_input_ids": ids} if is_pair else {})).logits
    found = {"logits": logits[0, ::5, :8].tolist(), "missing": sorted(info["missing_keys"])}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found |= {"ids": [tokenizer(text)["input_ids"] for text in TEXTS], "length": len(tokenizer)}
    found |= {"special": [getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")]}
    found |= {"texts": [tokenizer.decode(ids) for ids in found["ids"]]}
    if find_spec("gguf") and Path(folder, "tokenizer.json").exists():
        found["gguf"] = seen_by_llama_cpp(Path(folder))
    if tokenizer.chat_template:
        found["chat"] = tokenizer.apply_chat_template(CHAT, tokenize=False)
    return found


def seen_by_llama_cpp(folder: Path) -> dict:
    """Read a tokenizer by the library of llama.cpp's converter."""
    from gguf.vocab import SentencePieceVocab, SpecialVocab

    special = SpecialVocab(folder, load_merges=True)
    names = {"special": special.special_token_ids, "merges": special.merges[-2:], "template": special.chat_template}
    if not (folder / "tokenizer.model").exists():
        return names
    return names | {"scores": [[text.decode(), score] for text, score, _ in SentencePieceVocab(folder).all_tokens()]}


found = {}
for folder in json.loads(sys.argv[1]):
    try:
        found[folder] = seen(folder)
    except Exception as error:  # this version cannot read it
        found[folder] = {"error": repr(error)}
print(json.dumps(found))
