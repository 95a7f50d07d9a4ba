"""Pairs of source and target texts for an encoder-decoder: read from files or the Hub, prepared, and padded to batches."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data import PAD_MULTIPLE
from accelerate_recipes.data.files import falls_under, file_kind, other_share, read_split, text_hash
from accelerate_recipes.data.heldout import RowsArgs, check_apart, in_folders
from accelerate_recipes.data.passes import columns_in, map_rows
from accelerate_recipes.data.prepared import cached, check_no_bad, checksum_of_rows, lengths_of, tokens_key
from accelerate_recipes.disk import read_json
from accelerate_recipes.errors import ConfigError, other_recipe, suggestion
from accelerate_recipes.hub import cache
from accelerate_recipes.losses import count_labels, sequence_to_sequence_loss
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.encoder_decoders import check_encoder_decoder, dropouts, encoder_decoder_on_meta
from accelerate_recipes.models.pretrained import output_is_embedding
from accelerate_recipes.ranks import print_first
from accelerate_recipes.trial import NotSimulatedError, Trial, config_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

VERSION = 4  # of the data in the cache
TASK_PREFIX = "translate English to French: "  # of the default dataset
DESCRIBED = ("dataset_name", "dataset_config", "source_column", "target_column")  # by that prefix


@dataclass
class PairArgs(RowsArgs):
    """Arguments of a recipe that trains on pairs of texts."""

    group = "data"
    dataset_name: str = arg(
        "Helsinki-NLP/opus_books",
        "Dataset to train on, unless there are --train_files: a name on the Hub, or a folder.",
        fixed=False,
    )
    dataset_config: str = arg("en-fr", "Configuration of the dataset, if it has several.")
    dataset_revision: str = arg("", "Branch or commit of the dataset; default: main.")
    dataset_files: str = arg("", "Pattern of the dataset's files to read; default: all.", group="rare")
    eval_split: str = arg("", "Split to evaluate on; default: a share of the training pairs.")
    eval_dataset_name: str = arg("", "Dataset to evaluate on; default: --dataset_name.", fixed=False, group="rare")
    source_column: str = arg("translation.en", "Column of the source texts; an inner column is `translation.en`.")
    target_column: str = arg("translation.fr", "Column of the target texts, or of lists of correct texts.")
    eval_source_column: str = arg(
        "", "Column of the source texts in evaluation; default: --source_column.", fixed=False, group="rare"
    )
    eval_target_column: str = arg(
        "", "Column of the target texts in evaluation; default: --target_column.", fixed=False, group="rare"
    )
    task_prefix: str | None = arg(
        None,
        f"Text to put before every source; default: {TASK_PREFIX!r} for the default columns of the default dataset.",
    )
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

    def __post_init__(self):
        if self.train_files:
            self.dataset_name = ""

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size) + cache.folder_problems("eval_dataset_name", self.eval_dataset_name)
        if self.train_files and self.eval_split and not self.eval_dataset_name:
            problems.append(
                f"--eval_split {self.eval_split} names a split of a dataset, but there are --train_files; give "
                "--eval_dataset_name, or --eval_files instead"
            )
        if self.eval_dataset_name and not self.eval_split:
            problems.append(f"--eval_dataset_name {self.eval_dataset_name} needs --eval_split, such as test")
        if self.eval_files and self.eval_split:
            problems.append(f"--eval_files and --eval_split {self.eval_split} both say what to evaluate on; remove one")
        return problems

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        if self.task_prefix is None:
            fields = PairArgs.__dataclass_fields__
            is_default = all(getattr(self, name) == fields[name].default for name in DESCRIBED)
            self.task_prefix = saved.get("task_prefix", TASK_PREFIX if is_default else "")
        return super().settle(saved)

    @property
    def row_datasets(self) -> list[cache.HubDataset]:
        config, revision = self.dataset_config, self.dataset_revision
        on_hub = []
        if self.dataset_name:
            on_hub = [cache.HubDataset(self.dataset_name, self.dataset_files, config, (self.train_split,), revision)]
        if self.eval_dataset_name:
            on_hub.append(cache.HubDataset(self.eval_dataset_name, splits=(self.eval_split,)))
        elif self.eval_split:
            on_hub.append(cache.HubDataset(self.dataset_name, "", config, (self.eval_split,), revision))
        return on_hub

    @property
    def origins(self) -> dict[str, str]:
        evaluated = f"{self.eval_dataset_name or self.dataset_name}, split {self.eval_split}"
        return super().origins | ({"test": evaluated} if self.eval_split else {})

    @property
    def columns(self) -> dict[str, tuple[str, str]]:
        """Columns with the sources and the targets of each part of the rows."""
        evaluated = self.eval_source_column or self.source_column, self.eval_target_column or self.target_column
        return {"train": (self.source_column, self.target_column), "test": evaluated}

    def read_rows(self) -> "dict[str, datasets.Dataset]":
        rows = super().read_rows()
        return rows | ({"test": read_split(self.row_datasets[-1], self.eval_split)} if self.eval_split else {})

    def version(self) -> list:
        """Return a value that changes when a local file or a downloaded dataset changes."""
        files = [
            [(file_kind(file), cache.file_version(file)) for file in in_folders(named)]
            for named in (self.train_files, self.eval_files)
        ]
        needs = [
            (need.config, need.splits, cache.version("dataset", need.name, need.files or "**/*"))
            for need in self.row_datasets
        ]
        return [files, needs]


def prepare_pairs(tokenizer: PreTrainedTokenizerBase, args: PairArgs) -> Path:
    """Build or find the folder with the prepared pairs.

    - `train/` and `heldout/`: `source_ids` and `target_ids` of each pair (see `Pairs`); in `heldout/` also the texts:
      `source`, without the prefix, and `references`, a list
    - `facts.json`: for each of `train` and `heldout`: the number of `pairs`, and how many `truncated_sources` and
      `truncated_targets` were cut at the given lengths; for both together: `skipped`, `content`, a checksum of the
      training pairs, and `repeated`: how many pairs to evaluate on have a source that is also trained on

    If there are files or a split to evaluate on, their pairs are held out. Those whose source is also
    trained on are counted; if a file has too many, it is refused, but a split belongs to its dataset. Otherwise a pair is
    held out if the hash of its source falls under `heldout_share`. So pairs with the same source lie on one side, whatever
    the order of the files. In both, case and white space do not count.

    A target may be a list of texts, all of them correct. For training, each text makes a pair. For a held-out pair, the loss
    uses the first text and metrics use all.

    Raises:
        DataError: for a file that cannot be read, or has no rows.
        ConfigError: for a missing column, a split without pairs, too many sources on both sides, and empty texts
            unless `skip_bad_pairs`.
    """
    lengths = args.max_source_length, args.max_target_length
    settings = {
        "sources": args.version(),
        "columns": args.columns,
        "tokenizer": tokens_key(tokenizer),
        "settings": [args.task_prefix or "", *lengths, args.skip_bad_pairs, args.heldout_share],
        "version": VERSION,
    }

    def build(folder: Path, tmp: Path) -> dict:
        import datasets

        check_ends(tokenizer)
        text, ids, flag = datasets.Value("string"), datasets.List(datasets.Value("int64")), datasets.Value("bool")
        features = datasets.Features(
            row=datasets.Value("int64"), source=text, references=datasets.List(text), defect=text, heldout=flag,
            hash=datasets.Value("uint64"), source_ids=ids, source_is_cut=flag, target_ids=ids, target_is_cut=flag,
        )  # fmt: skip
        parts, bad = [], []
        rows = args.read_rows()
        for name, part in rows.items():
            part = text_columns(part, args.columns[name], args.origins[name])
            share = args.heldout_share if len(rows) == 1 else float(name == "test")
            how = {"task_prefix": args.task_prefix or "", "lengths": lengths, "heldout_share": share}
            make = partial(pairs_of, columns=args.columns[name], tokenizer=tokenizer, **how)
            made = map_rows(part, make, features, desc="Tokenising", file=tmp / f"{name}.arrow")
            parts.append(made)
            defects = zip(made["row"][:], made["defect"][:], strict=True)
            bad += [f"{args.origins[name]}, row {row + 1}: {defect}" for row, defect in defects if defect]
        if not args.skip_bad_pairs:
            check_no_bad("These pairs cannot be used; --skip_bad_pairs leaves them out", bad)
        whole = datasets.concatenate_datasets(parts)
        is_heldout, is_good = np.array(whole["heldout"][:]), np.array([not defect for defect in whole["defect"][:]])
        hashes, asked = whole.data.column("hash").to_numpy(), np.flatnonzero(is_good & is_heldout)
        both = asked[np.isin(hashes[asked], hashes[is_good & ~is_heldout])]
        if args.eval_files and len(both):
            first = repr(whole[int(both[0])]["source"][:60])
            check_apart(both, len(asked), f"begin as rows of {args.source} do", first)
        facts: dict = {"skipped": len(bad), "repeated": len(both)}
        for name, chosen in {"train": is_good & ~is_heldout, "heldout": is_good & is_heldout}.items():
            if not chosen.any():
                remedy = is_good.any() and len(rows) == 1 and other_share(hashes[is_good].tolist(), args.heldout_share)
                problem = f"none of {is_good.sum()} pairs of texts is left for {name}"
                raise ConfigError(f"{problem}; {remedy}" if remedy else problem)
            pairs = whole.select(np.flatnonzero(chosen))
            cut_at = {f"truncated_{side}s": sum(pairs[f"{side}_is_cut"][:]) for side in ("source", "target")}
            facts[name] = {"pairs": len(pairs)} | cut_at
            kept = ["source_ids", "target_ids", *(("source", "references") if name == "heldout" else ())]
            pairs.select_columns(kept).save_to_disk(folder / name)
            if name == "train":
                facts["content"] = checksum_of_rows(datasets.Dataset.load_from_disk(folder / name), kept)
        return facts

    folder = cached(Path(args.data_cache_dir), settings, build)
    if both := read_json(folder / "facts.json")["repeated"]:
        print_first(f"Sources of {both:,} pairs of {args.origins['test']} are also trained on")
    return folder


def source_texts(args: PairArgs) -> Iterator[str]:
    """Yield every text to train on, of both columns, for the training of a tokenizer."""
    columns = args.columns["train"]
    for batch in text_columns(args.read_rows()["train"], columns, args.source).iter(batch_size=1000):
        for source, references, defect in pairs_in(batch, columns):
            yield from () if defect else (source, *references)


def text_columns(rows: "datasets.Dataset", columns: tuple[str, str], source: str) -> "datasets.Dataset":
    """Select the columns of sources and of targets; the name of a column may be a path, such as `translation.en`.

    Raises:
        ConfigError: if a column is missing, or holds no texts.
    """
    import pyarrow as pa

    rows = with_paths(rows.flatten(), columns)
    types = {field.name: field.type for field in rows.data.schema}
    for column in columns:
        if column not in types:
            meant = suggestion(column, types) or other_recipe(types)
            raise ConfigError(f"{source} has no column {column!r}; it has {', '.join(types) or 'none'}{meant}")
        kind = types[column]
        if column == columns[1] and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            kind = kind.value_type
        # `datasets` keeps values of several types as JSON; values that are not texts are reported row by row.
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or isinstance(kind, pa.JsonType)
        if not (is_text or pa.types.is_null(kind)):
            raise ConfigError(f"{source}: column {column!r} holds {kind}, not text")
    return rows.select_columns([*dict.fromkeys(columns)])


def with_paths(rows: "datasets.Dataset", columns: Collection[str]) -> "datasets.Dataset":
    """Add those of some columns that are paths into objects which are stored as JSON, as where one has other fields."""
    import datasets

    kind = datasets.Json()
    for column in columns:
        head = next(
            (name for name in rows.features if rows.features[name] == kind and column.startswith(f"{name}.")), ""
        )
        if head:
            how = {"head": head, "column": column}
            extended = rows.map(at_path, fn_kwargs=how, features=datasets.Features(rows.features | {column: kind}))
            rows = extended if extended.data.column(column).null_count < len(rows) else rows
    return rows


def at_path(row: dict, head: str, column: str) -> dict[str, Any]:
    value = row[head]
    for name in column.removeprefix(f"{head}.").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return {column: value}


def pairs_in(batch: dict[str, list], columns: tuple[str, str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each pair as (source, references, defect); a pair with a defect, which says why it cannot be used, is empty."""
    for source, target in zip(*(batch[column] for column in columns), strict=True):
        references = target if isinstance(target, list) else [target]
        defect = defect_of_pair(source, references)
        yield ("", [], defect) if defect else (source, references, "")


def defect_of_pair(source: str | None, references: list[str | None]) -> str:
    """Say why a pair cannot be used, or return an empty string."""
    for name, texts in (("source", [source]), ("target", references)):
        for text in texts or [None]:
            if not (text is None or isinstance(text, str)):  # a JSON file may mix texts and other values
                return f"its {name} is no text, but {text!r:.80}"
            if not (text or "").strip():
                return f"its {name} is empty"
    return ""


def check_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the tokenizer puts its end token behind a text."""
    if any(ids[-1] != tokenizer.eos_token_id for ids in tokenizer(["a", "b"])["input_ids"]):
        raise ConfigError(
            "the tokenizer does not put its end token behind a text, so a model trained with it would never stop; "
            "use the tokenizer of an encoder-decoder"
        )


def pairs_of(
    table: "pa.Table",
    first: int,
    columns: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase,
    task_prefix: str,
    lengths: tuple[int, int],
    heldout_share: float,
) -> "pa.Table":
    """Make `source_ids` and `target_ids`, cut at the longest `lengths`; `source_is_cut` and `target_is_cut` say whether.

    For training, each reference makes a pair; a pair that is `heldout` has the first one. `row` is the number of the row,
    `source` and `references` are the texts, `hash` is that of the source, and `defect` says why a pair cannot be used.
    """
    import pyarrow as pa

    pairs = []
    for row, (source, references, defect) in enumerate(pairs_in(columns_in(table), columns), first):
        is_heldout = not defect and falls_under(source, heldout_share)
        for target in references[: 1 if is_heldout else None] or [""]:
            pairs.append((row, source, references, defect, is_heldout, text_hash(source), target))
    names = ("row", "source", "references", "defect", "heldout", "hash", "target")
    result: dict[str, Any] = {name: [*values] for name, values in zip(names, zip(*pairs, strict=True), strict=True)}
    result["hash"] = np.array(result["hash"], np.uint64)
    texts = {"text": [task_prefix + text for text in result["source"]]}, {"text_target": result.pop("target")}
    for side, own, longest in zip(("source", "target"), texts, lengths, strict=True):
        tokens: Any = tokenizer(**own, return_attention_mask=False, verbose=False)["input_ids"]
        result[f"{side}_ids"] = [cut(ids, longest) for ids in tokens]
        result[f"{side}_is_cut"] = [len(ids) > longest for ids in tokens]
    return pa.table(result)


def cut(ids: list[int], max_length: int) -> list[int]:
    """Cut a text to `max_length` tokens; keep its last token, the end token."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]


class Pairs(torch.utils.data.Dataset):
    """Dataset of tokenised pairs: `source_ids`, `target_ids` and the number `row`.

    Number -1 is a pair without targets. It fills a place in a batch for which no row is left. `collate` pads pairs;
    `lengths` put pairs of similar length into a micro-batch (see `data.rows.StepOrder`).
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


def pairs_trial(args: Any, config: PreTrainedConfig | None) -> Trial:
    """Make the trial of an encoder-decoder on pairs of texts: one pair has the greatest lengths, the others are padded.

    `config` is the configuration of a new model; None for the pretrained model of the arguments.

    Raises:
        NotSimulatedError: for a BART.
    """
    is_tied = True
    if config is None:
        config = config_of(args)
        # Read the file itself; see `output_is_embedding`.
        settings, _ = PreTrainedConfig.get_config_dict(args.base_model, **cache.pinned(args.base_model))
        is_tied = output_is_embedding(settings)
        check_encoder_decoder(config, args.base_model)
        vars(config).update(dropouts(config, args.dropout_rate))
    if config.model_type == "bart":
        raise NotSimulatedError(
            "BART: whether its decoder uses a mask depends on values, which a simulation does not have"
        )
    rows = args.per_device_train_batch_size
    source, target = (-(-n // PAD_MULTIPLE) * PAD_MULTIPLE for n in (args.max_source_length, args.max_target_length))
    mask = torch.ones(rows, source, dtype=torch.int64)
    mask[-1, -1] = 0
    batch = {
        "input_ids": torch.zeros(rows, source, dtype=torch.int64),
        "attention_mask": mask,
        "labels": torch.zeros(rows, target, dtype=torch.int64),
        "row": torch.arange(rows),
    }
    settings = {"attn_implementation": args.attn_implementation, "dtype": load_settings(args)["dtype"]}
    make = partial(encoder_decoder_on_meta, is_tied=is_tied, **settings)
    return Trial(config, make, sequence_to_sequence_loss, count_labels, batch, rows * args.max_target_length)
