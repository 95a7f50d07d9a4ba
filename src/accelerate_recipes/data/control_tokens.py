"""Control tokens in texts: a tokenizer reads them as the marks that a chat template writes around messages."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

THOUGHT = {"<think>", "</think>"}  # stand in answers, and some tokenizers mark them as special


class Controls:
    """Finder of the control tokens of a tokenizer: those that it marks as special, and those of `stops`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]):
        added = tokenizer.added_tokens_decoder.items()  # a text holds no other token for certain
        controls = {number: token for number, token in added if token.special or number in stops}
        self.names = {number: token.content for number, token in controls.items() if token.content not in THOUGHT}
        self.tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        is_normalized = any(token.normalized for token in controls.values()) and backend is not None
        self.normalizer = backend.normalizer if is_normalized else None
        words = {*self.names.values(), *map(self.normal, self.names.values())}
        self.pattern = re.compile(pattern_of(sorted(words)) or "(?!)")

    def normal(self, text: str) -> str:
        return self.normalizer.normalize_str(text) if self.normalizer else text

    def first_in(self, text: str) -> str:
        """Return the first control token that the tokenizer reads in a text; "" if there is none."""
        if not (self.pattern.search(text) or (self.normalizer and self.pattern.search(self.normal(text)))):
            return ""
        # Some tokens are read only in a normalised text, or as a whole word.
        ids: Any = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        read = [self.names[number] for number in ids if number in self.names]
        # A character that the tokenizer does not know is read as its unknown token.
        return next((name for name in read if name != self.tokenizer.unk_token or name in text), "")


def pattern_of(words: Iterable[str]) -> str:
    """Return a regular expression for any of some words, as a tree: `re` would try thousands of words one by one."""
    ends: dict[str, list[str]] = {}
    for word in (words := [*words]):
        if word:
            ends.setdefault(word[0], []).append(word[1:])
    branches = "|".join(re.escape(first) + pattern_of(rest) for first, rest in ends.items())
    return f"(?:{branches}){'?' if '' in words else ''}" if branches else ""
