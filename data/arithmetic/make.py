"""Make the sums of two numbers with two digits, in three parts, and the tokenizer that reads them.

    python data/arithmetic/make.py

Which part a sum lies in depends on the unordered pair, so a + b and b + a lie in one part. `sft.jsonl` has answers to
learn from, `rl.jsonl` problems with their solution, for a reward, `test.jsonl` problems that nothing is trained on.
"""

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

from tokenizers import Regex
from tokenizers.decoders import Fuse
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from accelerate_recipes.models.tokenizers import new_word_tokenizer

NUMBERS = range(10, 100)
PARTS = {"sft": 0.4, "rl": 0.4, "test": 0.2}


def parts() -> dict[str, list[tuple[int, int]]]:
    """Divide all ordered pairs of numbers into parts, in random order; the two orders of a pair lie in one part."""
    generator = random.Random(0)
    pairs = list(combinations_with_replacement(NUMBERS, 2))
    generator.shuffle(pairs)
    found, first, share = {}, 0, 0.0
    for name, size in PARTS.items():
        share += size
        last = round(share * len(pairs))
        ordered = sorted({order for a, b in pairs[first:last] for order in ((a, b), (b, a))})
        generator.shuffle(ordered)
        found[name], first = ordered, last
    return found


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer in which each character is one token; a text gets a begin token."""
    tokenizer = new_word_tokenizer("0123456789+=")
    backend, begin = tokenizer.backend_tokenizer, (tokenizer.bos_token, tokenizer.bos_token_id)
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    backend.post_processor = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=[begin])
    return tokenizer


def write(folder: Path) -> None:
    """Write the parts and the tokenizer to a folder."""
    for name, pairs in parts().items():
        answer = "completion" if name == "sft" else "solution"
        rows = [{"prompt": f"{a}+{b}=", answer: str(a + b)} for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_tokenizer().save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    write(Path(__file__).parent)
