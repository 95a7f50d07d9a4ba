"""Pairs of source and target texts for an encoder-decoder: read from files or the Hub, prepared, and padded to batches."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data.files import SUFFIXES, falls_under, file_kind, read_files, read_split
from accelerate_recipes.data.prepared import cached, check_no_bad, checksum_of_rows, lengths_of, num_proc
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.sequence import IGNORE_INDEX

if TYPE_CHECKING:
    import datasets

VERSION = 2  # of the data in the cache
PAD_MULTIPLE = 8  # suits tensor cores, and gives fewer shapes to compile


@dataclass(frozen=True)
class PairSource:
    """Source of pairs: a local file, or a split of a dataset on the Hub, from all its files or from the matching files.

    The name of a column may be a path, such as `translation.en`.
    """

    name: str
    source_column: str
    target_column: str
    split: str = ""  # of a dataset; if empty, `name` is a file
    config: str = ""
    revision: str = ""
    files: str = ""

    @property
    def dataset(self) -> cache.HubDataset:
        return cache.HubDataset(self.name, self.files, self.config, (self.split,), self.revision)

    def __str__(self) -> str:
        return f"{self.name}, split {self.split}" if self.split else self.name


@dataclass
class PairArgs:
    """Arguments of a recipe that trains on pairs of texts."""

    # The pairs of a resumed run are compared by content, so the files may have moved.
    group = "data"
    dataset_name: str = arg(
        "Helsinki-NLP/opus_books", "Dataset to train on: a name on the Hub, or a folder.", fixed=False
    )
    dataset_config: str = arg("en-fr", "Configuration of the dataset, if it has several.")
    dataset_revision: str = arg("", "Branch or commit of the dataset; default: main.")
    dataset_files: str = arg("", "Pattern of the dataset's files to read; default: all.", group="rare")
    train_split: str = arg("train", "Split to train on.")
    eval_split: str = arg("", "Split to evaluate on; default: a share of the training pairs.")
    eval_dataset_name: str = arg("", "Dataset to evaluate on; default: --dataset_name.", fixed=False, group="rare")
    train_files: list[str] = arg([], "Local .csv, .jsonl or .parquet files, instead of a dataset.", fixed=False)
    eval_files: list[str] = arg([], "Local files to evaluate on.", fixed=False)
    source_column: str = arg("translation.en", "Column of the source texts; an inner column is `translation.en`.")
    target_column: str = arg("translation.fr", "Column of the target texts, or of lists of correct texts.")
    eval_source_column: str = arg(
        "", "Column of the source texts in evaluation; default: --source_column.", fixed=False, group="rare"
    )
    eval_target_column: str = arg(
        "", "Column of the target texts in evaluation; default: --target_column.", fixed=False, group="rare"
    )
    task_prefix: str = arg("translate English to French: ", "Text to put before every source.")
    heldout_share: float = arg(
        0.02, "Share of the training pairs to evaluate on, chosen by a hash of the source.", above=0, below=1
    )
    num_eval_pairs: int = arg(
        500, "Number of pairs to evaluate on, drawn with the seed.", fixed=False, min=1, group="evaluation"
    )
    skip_bad_pairs: bool = arg(False, "Skip and count pairs with an empty text, instead of stopping.", group="rare")
    max_source_length: int = arg(512, "Longest source in tokens; longer texts are cut, and counted.", min=2)
    max_target_length: int = arg(128, "Longest target in tokens; longer texts are cut, and counted.", min=2)
    data_cache_dir: str = arg(".cache/data", "Folder for tokenised pairs.", fixed=False)

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        found += self.file_problems("train_files", SUFFIXES)
        found += self.file_problems("eval_files", SUFFIXES)
        used = {"dataset_name": self.dataset_name} if not self.train_files else {}
        for flag, name in {**used, "eval_dataset_name": self.eval_dataset_name}.items():
            found += cache.folder_problems(flag, name)
        if self.train_files and self.eval_split and not self.eval_dataset_name:
            found.append(
                f"--eval_split {self.eval_split} names a split of a dataset, but there are --train_files; give "
                "--eval_dataset_name, or --eval_files instead"
            )
        if self.eval_dataset_name and not self.eval_split:
            found.append(f"--eval_dataset_name {self.eval_dataset_name} needs --eval_split, such as test")
        if self.eval_files and self.eval_split:
            found.append(f"--eval_files and --eval_split {self.eval_split} both say what to evaluate on; remove one")
        return found

    @property
    def train_sources(self) -> list[PairSource]:
        columns = (self.source_column, self.target_column)
        if self.train_files:
            return [PairSource(file, *columns) for file in self.train_files]
        dataset = (self.train_split, self.dataset_config, self.dataset_revision, self.dataset_files)
        return [PairSource(self.dataset_name, *columns, *dataset)]

    @property
    def eval_sources(self) -> list[PairSource]:
        columns = (self.eval_source_column or self.source_column, self.eval_target_column or self.target_column)
        if self.eval_files or not self.eval_split:
            return [PairSource(file, *columns) for file in self.eval_files]
        if self.eval_dataset_name:
            return [PairSource(self.eval_dataset_name, *columns, self.eval_split)]
        return [PairSource(self.dataset_name, *columns, self.eval_split, self.dataset_config, self.dataset_revision)]


def prepare_pairs(tokenizer: PreTrainedTokenizerBase, args: PairArgs) -> Path:
    """Build or find the folder with the prepared pairs.

    - `train/` and `heldout/`: `source_ids` and `target_ids` of each pair (see `Pairs`); in `heldout/` also the texts:
      `source`, without the prefix, and `references`, a list
    - `facts.json`: for each of `train` and `heldout`: the number of `pairs`, and how many `truncated_sources` and
      `truncated_targets` were cut at the given lengths; for both together: `skipped`, and `content`, a checksum of the
      training pairs

    If there are `args.eval_sources`, their pairs are held out. Otherwise a pair is held out if the hash of its source falls
    under `heldout_share`. Case and white space do not count. So pairs with the same source lie on one side, whatever the
    order of the files.

    A target may be a list of texts, all of them correct. For training, each text makes a pair. For a held-out pair, the loss
    uses the first text and metrics use all.

    Raises:
        DataError: for a file that cannot be read, or has no rows.
        ConfigError: for a missing column, a split without pairs, and empty texts unless `skip_bad_pairs`.
    """
    sources = [(source, False) for source in args.train_sources] + [(source, True) for source in args.eval_sources]
    settings = {
        "sources": [
            (*astuple(replace(source, name="")), source_version(source), is_heldout) for source, is_heldout in sources
        ],
        "tokenizer": xxhash.xxh64_hexdigest(tokenizer.backend_tokenizer.to_str().encode()),
        "settings": [
            args.task_prefix,
            args.max_source_length,
            args.max_target_length,
            args.skip_bad_pairs,
            args.heldout_share,
        ],
        "version": VERSION,
    }

    def build(folder: Path, tmp: Path) -> dict:
        import datasets

        parts: dict[str, list[datasets.Dataset]] = {"train": [], "heldout": []}
        bad: list[str] = []
        for i, (source, is_heldout) in enumerate(sources):
            rows = load_rows(source, tmp / f"source-{i}")
            share = float(is_heldout) if args.eval_sources else args.heldout_share
            texts = read_columns(rows, source, share, tmp / f"texts-{i}.arrow")
            heldout, good = np.array(texts["heldout"]), np.array(texts["defect"]) == ""
            bad += [f"{source}, row {row}: {texts[row]['defect']}" for row in np.flatnonzero(~good).tolist()]
            parts["train"].append(texts.select(np.flatnonzero(good & ~heldout)))
            parts["heldout"].append(texts.select(np.flatnonzero(good & heldout)))
        if not args.skip_bad_pairs:
            check_no_bad("These pairs cannot be used; --skip_bad_pairs leaves them out", bad)
        facts: dict = {"skipped": len(bad)}
        num_pairs = sum(len(part) for some in parts.values() for part in some)
        for name, some in parts.items():
            texts = datasets.concatenate_datasets(some)
            if not len(texts):
                remedy = f"; change --heldout_share {args.heldout_share}" if num_pairs and not args.eval_sources else ""
                raise ConfigError(f"none of {num_pairs} pairs of texts is left for {name}{remedy}")
            lengths = (args.max_source_length, args.max_target_length)
            pairs = tokenize_pairs(texts, tokenizer, args.task_prefix, lengths, name == "train", tmp / f"{name}.arrow")
            facts[name] = {"pairs": len(pairs)}
            for side in ("source", "target"):
                facts[name][f"truncated_{side}s"] = sum(pairs[f"{side}_is_cut"])
            pairs.remove_columns(["source_is_cut", "target_is_cut"]).save_to_disk(folder / name)
            if name == "train":
                facts["content"] = checksum_of_rows(pairs, ["source_ids", "target_ids"])
        return facts

    return cached(Path(args.data_cache_dir), settings, build)


def source_version(source: PairSource) -> list:
    """Return a value that changes when a local file or a downloaded dataset changes."""
    if source.split:
        return cache.version("dataset", source.name, source.files or "**/*")
    return [file_kind(source.name), cache.file_version(source.name)]


def load_rows(source: PairSource, cache_dir: Path) -> "datasets.Dataset":
    """Load all rows of a source.

    Raises:
        DataError: if it cannot be read, or has no rows.
        ConfigError: if a dataset was not downloaded.
    """
    if not source.split:
        return read_files([source.name], cache_dir)
    return read_split(source.dataset, source.split, cache_dir)


def source_texts(sources: Sequence[PairSource]) -> Iterator[str]:
    """Yield every text of both columns, for the training of a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        for i, source in enumerate(sources):
            rows = load_rows(source, Path(folder) / str(i))
            texts = read_columns(rows, source, 0.0, Path(folder) / f"{i}.arrow")
            row: Any
            for row in texts:
                if not row["defect"]:
                    yield from (row["source"], *row["references"])


def read_columns(
    rows: "datasets.Dataset", where: PairSource, heldout_share: float, cache_file: Path
) -> "datasets.Dataset":
    """Read `source` (text), `references` (texts), `defect` (why a pair cannot be used, or "") and `heldout` (bool)."""
    import datasets
    import pyarrow as pa

    rows = rows.flatten()
    types = {field.name: field.type for field in rows.data.schema}
    source_column, target_column = where.source_column, where.target_column
    for column in (source_column, target_column):
        if column not in types:
            raise ConfigError(f"{where} has no column {column!r}; it has {', '.join(types) or 'none'}")
    several = pa.types.is_list(types[target_column]) or pa.types.is_large_list(types[target_column])
    wanted = {source_column: types[source_column]}
    wanted[target_column] = types[target_column].value_type if several else types[target_column]
    for column, kind in wanted.items():
        # `datasets` keeps values of several types as JSON; values that are not texts are reported row by row.
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or isinstance(kind, pa.JsonType)
        if not (is_text or pa.types.is_null(kind)):
            raise ConfigError(f"{where}: column {column!r} holds {kind}, not text")
    features = datasets.Features(
        {
            "source": datasets.Value("string"),
            "references": datasets.List(datasets.Value("string")),
            "defect": datasets.Value("string"),
            "heldout": datasets.Value("bool"),
        }
    )

    def read(batch: dict[str, list]) -> dict[str, list]:
        sources = batch[source_column]
        references = [target if several else [target] for target in batch[target_column]]
        defects = [defect_of_pair(*pair) for pair in zip(sources, references, strict=True)]
        return {
            "source": [None if defect else source for source, defect in zip(sources, defects, strict=True)],
            "references": [None if defect else texts for texts, defect in zip(references, defects, strict=True)],
            "defect": defects,
            "heldout": [not d and falls_under(s, heldout_share) for s, d in zip(sources, defects, strict=True)],
        }

    return rows.select_columns([*wanted]).map(
        read,
        batched=True,
        remove_columns=[*wanted],
        features=features,
        num_proc=num_proc(len(rows), 20_000),
        cache_file_name=str(cache_file),
        desc="Reading",
    )


def defect_of_pair(source: str | None, references: list[str | None] | None) -> str:
    """Say why a pair cannot be used, or return an empty string."""
    for name, texts in (("source", [source]), ("target", references)):
        for text in texts or [None]:
            if not (text is None or isinstance(text, str)):  # a JSON file may mix texts and other values
                return f"its {name} is no text, but {text!r:.80}"
            if not (text or "").strip():
                return f"its {name} is empty"
    return ""


def tokenize_pairs(
    texts: "datasets.Dataset",
    tokenizer: PreTrainedTokenizerBase,
    task_prefix: str,
    max_lengths: tuple[int, int],
    is_train: bool,
    cache_file: Path,
) -> "datasets.Dataset":
    """Make `source_ids` and `target_ids`, cut at `max_lengths`; `source_is_cut` and `target_is_cut` say whether it cut them.

    For training, each reference makes a pair. Otherwise there is one pair with the first reference, and with the texts.
    """

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        chosen = [(i, text) for i, texts in enumerate(batch["references"]) for text in texts[: None if is_train else 1]]
        sources = tokenizer([task_prefix + text for text in batch["source"]], verbose=False)["input_ids"]
        targets = tokenizer(text_target=[text for _, text in chosen], verbose=False)["input_ids"]
        result = {}
        sides = {"source": [sources[i] for i, _ in chosen], "target": targets}
        for (side, ids_of_rows), max_length in zip(sides.items(), max_lengths, strict=True):
            result[f"{side}_ids"] = [cut(ids, max_length) for ids in ids_of_rows]
            result[f"{side}_is_cut"] = [len(ids) > max_length for ids in ids_of_rows]
        return result if is_train else result | {name: batch[name] for name in ("source", "references")}

    ends = {ids[-1] for ids in tokenizer(["a", "b"])["input_ids"]}
    if any(end != tokenizer.eos_token_id for end in ends):
        raise ConfigError(
            "the tokenizer does not put its end token behind a text, so a model trained with it would never stop; "
            "use the tokenizer of an encoder-decoder"
        )
    return texts.map(
        tokenize,
        batched=True,
        remove_columns=texts.column_names,
        num_proc=num_proc(len(texts), 20_000),
        cache_file_name=str(cache_file),
        desc="Tokenising",
    )


def cut(ids: list[int], max_length: int) -> list[int]:
    """Cut a text to `max_length` tokens; keep its last token, the end token."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]


class Pairs(torch.utils.data.Dataset):
    """Dataset of tokenised pairs: `source_ids`, `target_ids` and the number `row`.

    Number -1 is a pair without targets. It fills a place in a batch for which no row is left. `collate` pads pairs;
    `lengths` put pairs of similar length into a micro-batch (see `data.rows.LengthOrder`).
    """

    def __init__(self, rows: "datasets.Dataset", pad_token_id: int):
        self.rows = rows.select_columns(["source_ids", "target_ids"]).with_format("numpy")
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        if index < 0:
            # Keep one token to attend to: without any, some kernels give values that are not finite.
            return {"source_ids": np.array([self.pad_token_id]), "target_ids": np.array([], int), "row": -1}
        return self.rows[index] | {"row": index}

    def collate(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        """Make `input_ids` and `attention_mask`, (B, S), `labels`, (B, T), and `row`, (B,); all int64.

        S and T are the longest lengths in the batch, rounded up to a multiple of 8.
        """
        sources, targets = [pair["source_ids"] for pair in pairs], [pair["target_ids"] for pair in pairs]
        return {
            "input_ids": pad(sources, self.pad_token_id),
            # Do not derive the mask from the ids: in some tokenizers the padding token is also a real one.
            "attention_mask": pad([np.ones_like(ids) for ids in sources], 0),
            "labels": pad(targets, IGNORE_INDEX),
            "row": torch.tensor([pair["row"] for pair in pairs]),
        }

    @property
    def lengths(self) -> np.ndarray:
        """Return a sort key for each pair: first by the padded length of the source, then of the target.

        A key of the sum of the lengths would put long sources beside short ones.
        """
        source, target = (self.num_tokens(side).astype(np.int64) for side in ("source", "target"))
        return -(-source // PAD_MULTIPLE) * (target.max() + 1) + target

    def num_tokens(self, side: str) -> np.ndarray:
        """Count the tokens of each `source` or `target`."""
        return lengths_of(self.rows, f"{side}_ids")


def pad(rows: list[np.ndarray], value: int) -> torch.Tensor:
    """Make a matrix, (B, T) int64, padded with `value` on the right; T is a multiple of 8."""
    longest = max(1, *(len(row) for row in rows))
    padded = np.full((len(rows), -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE), value)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)
