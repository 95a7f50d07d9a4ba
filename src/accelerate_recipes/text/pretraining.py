"""Text from shards for pretraining, of one or several sources: which files, which documents are held out, their tokens."""

import contextlib
import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data.control_tokens import Controls
from accelerate_recipes.data.documents import Document, all_texts, read_documents, text_of
from accelerate_recipes.data.files import falls_under
from accelerate_recipes.data.mixture import MixtureArgs
from accelerate_recipes.data.packing import PackedRows
from accelerate_recipes.data.reading import TXT
from accelerate_recipes.data.shards import find_shards, hub_files, is_named_elsewhere, named_shards, shards_version
from accelerate_recipes.data.shares import Shares
from accelerate_recipes.data.stream_order import no_document
from accelerate_recipes.data.streams import StreamArgs
from accelerate_recipes.errors import ConfigError, DataError, collecting_errors
from accelerate_recipes.hub import cache

ENCODE_BYTES = 2**17  # text to tokenise at once: enough to keep the tokenizer busy, and little enough to start soon


@dataclass
class TextArgs(StreamArgs):
    """Arguments of a recipe that streams text from shards: files of a dataset, or files named one by one."""

    shares_rows = True
    fills_caches = False

    # Largest share that a source of the same mixture holds out.
    of_others = 0.0

    group = "data"
    dataset_name: str = arg(
        "allenai/c4", "Dataset on the Hub, or a folder with the same files, such as a mounted copy.", fixed=False
    )
    dataset_revision: str = arg(
        "", "Branch or commit of the dataset; default: the downloaded commit, else the newest of main.", fixed=False
    )
    dataset_files: str = arg("en/c4-train.*.json.gz", "Pattern of the dataset's files to train on.", fixed=False)
    validation_dataset_files: str = arg(
        "en/c4-validation.*.json.gz", "Pattern of the dataset's files to validate on.", fixed=False
    )
    train_files: list[str] = arg(
        [], "Paths or URLs of files to train on, or folders, instead of a dataset.", fixed=False
    )
    validation_files: list[str] = arg(
        [], "Paths or URLs of files to validate on, or folders; default: a share of --train_files.", fixed=False
    )
    heldout_share: float = arg(
        0.05,
        "Share of the documents of --train_files to validate on, chosen by a hash of the text, if no other text is named "
        "for validation; 0: validate on the dataset.",
        min=0,
        below=1,
    )
    text_column: str = arg("text", "Key or column that holds the text.")
    pretokenize: str = arg(
        "", "Folder for the tokens of all training text, which is then tokenised only once; empty: none.", fixed=False
    )
    min_document_tokens: int = arg(
        0,
        "Leave out documents with fewer tokens, in training and validation: to train only on long ones.",
        min=0,
        group="rare",
    )

    def source_problems(self) -> list[str]:
        problems = super().source_problems()
        named = {"train_files": {*self.train_files}, "validation_files": {*self.validation_files}}
        for name in ("validation_files",) if self.pretokenize else named:
            with collecting_errors(problems, f"--{name} "):
                named[name] |= self.files_here(name)
        train, validation = ({*map(os.path.realpath, files)} for files in named.values())
        if both := sorted(train & validation):
            problems.append(f"--train_files and --validation_files both name {both[0]}; remove it from one")
        return problems

    def files_here(self, name: str) -> set[str]:
        """Find the files on this machine that an argument names, also those in folders."""
        here = [file for file in getattr(self, name) if not (is_named_elsewhere(file) or self.is_elsewhere(file))]
        return {*named_shards(here)}

    @property
    def is_here(self) -> bool:
        """Tell whether the text to train on lies on a disk."""
        if not self.train_files:
            return os.path.isdir(self.dataset_name)
        return not any(map(is_named_elsewhere, self.train_files))

    @property
    def is_finite(self) -> bool:
        return bool(self.train_files) and self.is_here

    @property
    def share_heldout(self) -> float:
        """Share of the documents of --train_files that is held out for validation; 0 if other files are named for it."""
        fields = TextArgs.__dataclass_fields__
        names = ("dataset_name", "validation_dataset_files")
        is_named = self.validation_files or any(getattr(self, name) != fields[name].default for name in names)
        return self.heldout_share if self.train_files and not is_named else 0.0

    @property
    def share_left_out(self) -> float:
        """Share of the documents that is not trained on, by a hash of the text: a source of a mixture may hold it out."""
        return max(self.share_heldout, self.of_others)

    @property
    def validated(self) -> list[str]:
        """Files that are named to validate on, or of which a share is held out."""
        return self.train_files if self.share_heldout else self.validation_files

    def shards_of(self, files: list[str], pattern: str) -> list[str]:
        """Find the files that are named, or else those of the dataset that match the pattern."""
        return named_shards(files) if files else find_shards(self.dataset_name, pattern, self.dataset_revision)

    def train_shards(self) -> list[str]:
        """Find the files to train on."""
        return self.shards_of(self.train_files, self.dataset_files)

    def validation_shards(self) -> list[str]:
        """Find the files to validate on."""
        return self.shards_of(self.validated, self.validation_dataset_files)

    def train_texts(self) -> Iterator[str]:
        """Read the documents to train on, shard by shard."""
        texts = all_texts(self.train_shards(), self.text_column)
        return (text for text in texts if not falls_under(text, self.share_left_out))

    def validation_text(self, tokenizer: PreTrainedTokenizerBase) -> "TextShards":
        """Open the text to validate on."""
        share = self.share_left_out if self.share_heldout else 0.0
        return TextShards(self.validation_shards(), tokenizer, self.text_column, share, is_heldout=share > 0)

    def text_note(self, shards: Sequence[str]) -> str:
        """Note for the end of a line: the held-out documents, and that a .txt file is one document; else an empty text."""
        held = f"; {self.share_left_out:.1%} of the documents, by a hash of their text, are validated on"
        is_txt = any(shard.endswith(TXT) for shard in shards)
        return (held if self.share_left_out else "") + ("; each .txt file is one document" if is_txt else "")

    def text_datasets(self, training: bool) -> list[cache.HubDataset]:
        """List the datasets of the Hub that are read for validation and, with `training`, for training."""
        on_hub, parts = [], [(self.validated, self.validation_dataset_files), (self.train_files, self.dataset_files)]
        for files, pattern in parts if training else parts[:1]:
            dataset = cache.HubDataset(self.dataset_name, files=pattern, revision=self.dataset_revision, streamed=True)
            on_hub += hub_files(files) if files else [dataset]
        return on_hub


@dataclass
class MixedTextArgs(MixtureArgs, TextArgs):
    """Arguments of a recipe that streams text from one source or, with --mixture, from several."""

    of_source = (
        "dataset_name", "dataset_revision", "dataset_files", "validation_dataset_files", "train_files", "validation_files",
        "heldout_share", "text_column",
    )  # fmt: skip
    of_phase = ("weights", "lr_factor", "max_length")

    @property
    def sources(self) -> list[Any]:
        """Arguments of each source. What one of them holds out, none trains on; and each has its folder of tokens."""
        sources = super().sources
        share = max((one.share_heldout for one in sources), default=0.0)
        for one in sources if self.mixture else ():
            one.of_others = share
            one.pretokenize = self.pretokenize and os.path.join(self.pretokenize, one.source_name)
        return sources

    @property
    def is_finite(self) -> bool:
        return bool(self.mixture) or super().is_finite  # `mixture_problems` asks each source of a mixture

    @property
    def longest_row(self) -> int:
        """Tokens of the longest rows of the run, whichever phase has them."""
        return max(self.max_length, *(phase.max_length for phase in self.mix.phases), 0)

    @property
    def steps_alike(self) -> float:
        """First steps of the run, whose rows have --max_length tokens; infinity if no phase has others."""
        lengths = self.mix.lengths(self.max_steps)
        return min((step for step, length in lengths if length != self.max_length), default=math.inf)

    def mixture_problems(self) -> Iterator[str]:
        yield from super().mixture_problems()
        where = self.mix.file
        both = zip(self.mix.sources, self.sources, strict=True)
        counted = [pair for pair in both if pair[0].weight is None or math.isfinite(pair[0].max_epochs)]
        for source, one in counted:
            if not one.is_finite:
                asked = "weight: size" if source.weight is None else f"max_epochs {source.max_epochs:g}"
                yield (
                    f"{where}, source {source.name}: {asked} needs text that is counted before the run: give "
                    "train_files on a disk, or a number as weight and no max_epochs"
                )
        lengths = [phase.max_length for phase in self.mix.phases if phase.max_length]
        if lengths and counted:
            yield f"{where}: max_epochs and weight: size cannot count rows of another max_length; remove one of the two"
        for length in lengths:
            if length % self.row_size:
                yield f"{where}: max_length {length} is not a multiple of parallelism_config_cp_size {self.row_size}"
        trained, validated = {}, {}
        for one in self.sources:
            for name, files in (("train_files", trained), ("validation_files", validated)):
                with contextlib.suppress(ConfigError):  # which the source itself tells
                    files |= dict.fromkeys(map(os.path.realpath, one.files_here(name)), one.source_name)
        for file in sorted(trained.keys() & validated.keys()):
            one, other = trained[file], validated[file]
            if one != other:
                yield f"{where}: {one} trains on {file}, which {other} validates on; remove it from one"

    def texts_in_turns(self) -> Iterator[str]:
        """Read the documents to train on; those of a mixture in turns, as its first weights say."""
        texts = [one.train_texts() for one in self.sources]
        weights = np.array([1.0 if source.weight is None else source.weight for source in self.mix.sources])
        while weights.any():
            for source in Shares([(0, weights)], [math.inf] * len(texts), self.seed).take(0, 2**16)[0].tolist():
                if (text := next(texts[source], None)) is None:
                    weights[source] = 0  # the others go on
                    break
                yield text

    @property
    def text_sources(self) -> str:
        """Names of the text of all sources, for messages."""
        texts = [", ".join(one.train_files) or f"{one.dataset_name} ({one.dataset_files})" for one in self.sources]
        named = zip(self.mix.sources, texts, strict=True)
        return "; ".join(f"{source.name}: {text}" if source.name else text for source, text in named)


def prefix_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer puts before a text by itself: none, a begin token, or several."""
    whole, text = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    if not text:  # a tokenizer without this letter may write nothing
        return [token for token in whole if token != tokenizer.eos_token_id]
    begins = range(len(whole) - len(text) + 1)
    return next((whole[:begin] for begin in begins if whole[begin : begin + len(text)] == text), [])


@dataclass
class TextShards:
    """Source of text that is tokenised while it is read. A document starts with the tokens that the tokenizer adds there.

    Documents whose hash falls below `heldout_share` are not read. With `is_heldout`, only these are read.
    """

    shards: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    text_column: str = "text"
    heldout_share: float = 0.0
    is_heldout: bool = False

    def __post_init__(self):
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token, which would end each document; set its eos_token")
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"a {type(self.tokenizer).__name__} is written in Python, and too slow for a stream of text; give a "
                "tokenizer that has a tokenizer.json"
            )
        self.prefix = prefix_of(self.tokenizer)
        # Use a copy: other callers change the truncation and padding of the original.
        self.backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()

    def version(self) -> dict[str, str]:
        return shards_version(self.shards)

    def read(self, shard: int, first: int, stride: int, on_retry: Callable[[], None]) -> Iterator[Document]:
        return read_documents(self.shards[shard], self.text_column, first, stride, on_retry)

    def tokens(self, shard: int, documents: Iterable[Document], first: int = 0, epoch: int = 0) -> Iterator[np.ndarray]:
        texts, size = [], 0
        for index, document in islice(documents, first, None):
            text = text_of(self.shards[shard], index, document, self.text_column)
            texts.append(text if self.is_read(text) else None)
            size += len(document)
            if size >= ENCODE_BYTES:
                yield from self.encode(texts)
                texts, size = [], 0
        yield from self.encode(texts)

    def is_read(self, text: str | None) -> bool:
        """Tell whether there is a document, and whether it lies on the side that is read."""
        return text is not None and falls_under(text, self.heldout_share) == self.is_heldout

    def lengths(self, shard: int) -> np.ndarray:
        """Count the tokens of each document of a shard."""
        documents = self.read(shard, 0, 1, on_retry=lambda: None)
        return np.array([len(tokens) for tokens in self.tokens(shard, documents)], dtype=np.int64)

    def encode(self, texts: Sequence[str | None]) -> list[np.ndarray]:
        """Return each text's token ids (int32); None gives none. No text is truncated, whatever the tokenizer did last."""
        eos = [self.tokenizer.eos_token_id]
        # The `_fast` version leaves out the offsets of the tokens in the text, which are not needed.
        encodings = self.backend.encode_batch_fast([text or "" for text in texts], add_special_tokens=False)
        ids = zip(texts, encodings, strict=True)
        return [np.array([] if text is None else self.prefix + one.ids + eos, dtype=np.int32) for text, one in ids]


class ValidationRows(NamedTuple):
    """Fixed rows for validation, for `make_eval_loader`."""

    rows: PackedRows
    texts: list[str]  # the documents in the rows; the last may be cut
    bytes_per_token: float  # of these documents, in UTF-8

    def note_of_controls(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Note for the end of a line: how many of the documents hold control tokens; "" if none does."""
        controls = Controls(tokenizer, [])
        tokens = [name for text in self.texts if (name := controls.first_in(text))]
        if not tokens:
            return ""
        note = f"; {len(tokens):,} of their {len(self.texts):,} documents hold control tokens, such as {tokens[0]!r}"
        return f"{note}, which the tokenizer reads as such, in training too"

    def measures(self, loss: float) -> dict[str, float]:
        """Return the loss in nats per token, the perplexity, and bits per byte, which can be compared across tokenizers."""
        # The first token of a row or document is no target. Assume that it costs as much as the other tokens.
        bits_per_byte = loss / math.log(2) / self.bytes_per_token
        perplexity = math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
        return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}


def validation_rows(
    source: TextShards, num_rows: int, max_length: int, document_mask: bool, min_document_tokens: int = 0
) -> ValidationRows:
    """Read the first `num_rows` rows of the documents, in their own order, into memory; fewer if the shards hold fewer.

    In that case the last row may have padding.

    Raises:
        DataError: for shards without documents.
    """
    texts: list[str] = []
    pieces: list[np.ndarray] = []
    wanted, num_tokens = num_rows * max_length, 0
    for text in filter(source.is_read, all_texts(source.shards, source.text_column)):
        (tokens,) = source.encode([text])
        if len(tokens) >= max(1, min_document_tokens):
            texts.append(text)
            pieces.append(tokens)
            num_tokens += len(tokens)
        if num_tokens >= wanted:
            break
    if not texts:
        held = (
            f"; raise --heldout_share {source.heldout_share}, or give --validation_files" if source.is_heldout else ""
        )
        raise DataError(f"{no_document('validate', source.shards, min_document_tokens)}{held}")
    bytes_per_token = sum(len(text.encode()) for text in texts) / num_tokens
    tokens, ends = np.concatenate(pieces)[:wanted], np.cumsum([len(piece) for piece in pieces])
    rows: dict[str, list] = {"input_ids": [], "lengths": []}
    for start in range(0, len(tokens), max_length):
        row = tokens[start : start + max_length]
        inside = ends[(ends > start) & (ends < start + len(row))]
        rows["input_ids"].append(row)
        rows["lengths"].append(np.diff([start, *inside, start + len(row)]))
    from datasets import Dataset

    packed = PackedRows(Dataset.from_dict(rows), max_length, source.tokenizer.pad_token_id, document_mask)
    return ValidationRows(packed, texts, bytes_per_token)


def read_validation(args: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, ValidationRows]:
    """Read the rows to validate on into memory, by source: of a mixture equally many of each, which together are as asked.

    Raises:
        DataError: for shards without documents.
    """
    settings = args.max_length, args.document_mask, args.min_document_tokens
    number = -(-args.num_validation_rows // len(args.sources))
    return {one.source_name: validation_rows(one.validation_text(tokenizer), number, *settings) for one in args.sources}


def join_sources(parts: Mapping[str, ValidationRows]) -> ValidationRows:
    """Put the rows of all sources behind each other."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    from datasets import concatenate_datasets

    first, *_ = (part.rows for part in parts.values())
    rows = concatenate_datasets([part.rows.rows for part in parts.values()])
    sizes = {name: sum(len(text.encode()) for text in part.texts) for name, part in parts.items()}
    num_tokens = sum(sizes[name] / part.bytes_per_token for name, part in parts.items())
    return ValidationRows(
        PackedRows(rows, first.max_length, first.pad_token_id, first.document_mask),
        [text for part in parts.values() for text in part.texts],
        sum(sizes.values()) / num_tokens,
    )


def measured(parts: Mapping[str, ValidationRows], losses: Mapping[str, float]) -> dict[str, float]:
    """Return what `ValidationRows.measures` does of the mean over all targets and, of a mixture, the loss of each source."""
    mean, *others = losses.values()
    if others:
        targets = {name: int(part.rows.num_targets.sum()) for name, part in parts.items()}
        mean = sum(losses[name] * targets[name] for name in parts) / sum(targets.values())
    return join_sources(parts).measures(mean) | {f"{name}_loss": loss for name, loss in losses.items() if name}
