"""Text of one source, or of the several sources of a mixture: arguments, loader, and rows to validate on."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.data.mixture import MixtureArgs
from accelerate_recipes.data.packing import PackedRows
from accelerate_recipes.data.shares import Shares
from accelerate_recipes.data.streams import StreamLoader
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.text.pretraining import TextArgs, ValidationRows, validation_rows
from accelerate_recipes.text.token_shards import open_text


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
        found = super().sources
        share = max((one.share_heldout for one in found), default=0.0)
        for one in found if self.mixture else ():
            one.of_others = share
            one.pretokenize = self.pretokenize and os.path.join(self.pretokenize, one.source_name)
        return found

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
        named = ((one, f"{one.source_name}: " if one.source_name else "") for one in self.sources)
        texts = (
            (name, ", ".join(one.train_files) or f"{one.dataset_name} ({one.dataset_files})") for one, name in named
        )
        return "; ".join(map("".join, texts))


def make_text_loader(
    args: Any, tokenizer: PreTrainedTokenizerBase, rank: int, world_size: int, data_rank: int, data_world_size: int
) -> StreamLoader:
    """Make the loader of the rows to train on, of one source or of a mixture. The numbers are those of `Run`.

    Raises:
        ConfigError: for text that was tokenised otherwise, and for sources that end before the run.
        DataError: for shards that must be counted or tokenised first and cannot be read.
    """
    settings = {
        "max_length": args.max_length, "document_mask": args.document_mask, "num_streams": args.num_streams,
        "min_document_tokens": args.min_document_tokens, "heldout_share": args.sources[0].share_left_out,
    }  # fmt: skip
    texts = [open_text(one, tokenizer, rank, world_size) for one in args.sources]
    return StreamLoader(texts, args, data_rank, data_world_size, mixture=args.mix, **settings)


def read_validation(args: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, ValidationRows]:
    """Read the rows to validate on into memory, by source: of a mixture equally many of each, which together are as asked.

    Raises:
        DataError: for shards without documents.
    """
    settings = args.max_length, tokenizer.pad_token_id, args.document_mask, args.min_document_tokens
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
