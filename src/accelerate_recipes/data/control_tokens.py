"""Control tokens in the texts of rows: a tokenizer reads them as the marks that a chat template writes around messages."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.rendering import SETTINGS, parsed, without_tail
from accelerate_recipes.errors import ConfigError, DataError, printable
from accelerate_recipes.ranks import is_first

if TYPE_CHECKING:
    import datasets

THOUGHT = {"<think>", "</think>"}  # stand in answers, and some tokenizers mark them as special


class Controls:
    """Finder of the control tokens of a tokenizer: those that it marks as special, and those of `stops`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]):
        added = tokenizer.added_tokens_decoder.items()  # a text holds no other token for certain
        found = {number: token for number, token in added if token.special or number in stops}
        self.names = {number: token.content for number, token in found.items() if token.content not in THOUGHT}
        self.tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        is_normalized = any(token.normalized for token in found.values()) and backend is not None
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
        return next((self.names[number] for number in ids if number in self.names), "")


def pattern_of(words: Iterable[str]) -> str:
    """Return a regular expression for any of some words, as a tree: `re` would try thousands of words one by one."""
    ends: dict[str, list[str]] = {}
    for word in (words := [*words]):
        if word:
            ends.setdefault(word[0], []).append(word[1:])
    branches = "|".join(re.escape(first) + pattern_of(rest) for first, rest in ends.items())
    return f"(?:{branches}){'?' if '' in words else ''}" if branches else ""


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a nested value, with the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        yield from value if isinstance(value, dict) else ()
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts_in(entry)


def named_in(template: str, message: Any) -> Any:
    """Return a message without the fields that a chat template does not name: it cannot write these."""
    is_message = isinstance(message, dict)
    return {name: value for name, value in message.items() if name in template} if is_message else message


def first_controls(
    rows: dict[str, list],
    indices: Sequence[int],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    stops: Collection[int],
    template: str,
    source: str,
) -> dict[str, list[str]]:
    """Return the first control token of each row; "" for a row without one. `template` is the chat template.

    A text that is no message may begin with the begin token and end with the end token of the first tokenizer; the white
    space behind that is removed later.
    """
    controls = [Controls(tokenizer, stops) for tokenizer in tokenizers]
    begin, end = tokenizers[0].bos_token or "", tokenizers[0].eos_token or ""
    found = []
    for index, *values in zip(indices, *rows.values(), strict=True):
        said = [
            parsed(value, name, index + 1, source)
            if name in SETTINGS
            else without_tail(value.removeprefix(begin), end).removesuffix(end)
            if isinstance(value, str)
            else [named_in(template, message) for message in value or []]
            for name, value in zip(rows, values, strict=True)
        ]
        firsts = (one.first_in(text) for text in texts_in(said) for one in controls)
        found.append(next(filter(None, firsts), ""))
    return {"control": found}


def without_controls(
    rows: "datasets.Dataset",
    columns: Collection[str],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    stops: Collection[int],
    template: str,
    source: str,
    action: str,
) -> "datasets.Dataset":
    """Look for control tokens in `columns` and in the settings of a chat template, and do as --control_tokens says.

    Texts that are no messages were rendered by the user, so their control tokens are only told.

    Raises:
        DataError: for messages with control tokens, unless `action` is `keep` or `drop_rows`.
        ConfigError: if no row is left.
    """
    from datasets import List

    said_in = [name for name in rows.column_names if name in columns]
    read = [*said_in, *(name for name in rows.column_names if name in SETTINGS)]
    found = rows.select_columns(read).map(
        first_controls,
        batched=True,
        with_indices=True,
        fn_kwargs={"tokenizers": tokenizers, "stops": stops, "template": template, "source": source},
        remove_columns=read,
        desc="Looking for control tokens",
    )["control"][:]
    (numbers,) = np.array(found, dtype=bool).nonzero()
    if not len(numbers):
        return rows
    first, shares = int(numbers[0]), f"{len(numbers):,} of {len(rows):,} rows"
    said = f"{source}, row {first + 1}: the text {found[first]!r} is read as a control token, as in {shares}"
    if action == "drop_rows":
        if len(numbers) == len(rows):
            raise ConfigError(f"{said}; --control_tokens drop_rows leaves none")
        rows = rows.select(np.setdiff1d(np.arange(len(rows)), numbers))
        said += "; they are left out"
    elif action != "keep" and any(isinstance(rows.features[name], List) for name in said_in):
        raise DataError(
            f"{said}: it would end a message, or begin another, in the middle of a text. Change these texts, or leave the "
            "rows out by --control_tokens drop_rows; --control_tokens keep trains them so"
        )
    if is_first():
        print(printable(said), flush=True)
    return rows
