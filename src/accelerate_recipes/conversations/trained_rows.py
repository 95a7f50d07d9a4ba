"""Rows of SFT, DPO and GRPO as they are trained: tokenised, numbered, known again, compared with the export's rendering."""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.conversations import rendering
from accelerate_recipes.conversations.exported import Exported, TrainedRows, compare_rows, ends_of_adapters, render
from accelerate_recipes.conversations.messages import TEXT
from accelerate_recipes.conversations.packed import Packed
from accelerate_recipes.conversations.rendering import Rendering
from accelerate_recipes.conversations.settings import refused_by_trl
from accelerate_recipes.data import NUM_ROWS
from accelerate_recipes.data.passes import map_rows
from accelerate_recipes.data.prepared import check_content, content_of
from accelerate_recipes.data.rows import RowLoader, Rows, StepLoader, make_eval_loader, make_train_loader
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.data.template_values import SETTINGS, in_texts
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.ranks import local_main_process_first
from accelerate_recipes.run import Run

# Row that fills a place for which there is none. Another row with masked labels would not do: if its activations are
# infinite, its gradients are not finite.
EMPTY = {
    "input_ids": [0], "labels": [IGNORE_INDEX], "seq_lengths": [1],
    "prompt_ids": [0, 0], "chosen_ids": [], "rejected_ids": [], "ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0,
    "questions": [], "images": [[]], "checksums": [[]], "image_begins": [[]], "places": [""],
}  # fmt: skip
USES = {"train": "train", "test": "evaluate"}  # what the rows of a side are for


def remedy_of_date(run: Run[Any]) -> str:
    """Return the remedy for other rows if the checkpoint does not say which date its template wrote; else ""."""
    date, checkpoint = run.args.template_date, run.resumed_from
    if date and checkpoint and "template_date" not in saved_arguments(checkpoint):
        return f"give by --template_date, which is now {date}, the day on which the run began; "
    return ""


class FirstRows(NamedTuple):
    """First of the rows as a batch, to show them. `content` is the checksum of rows to train on."""

    run: Run[Any]
    rows: datasets.Dataset | Packed
    collate: Callable[[list[dict]], dict[str, Any]]
    content: str = ""

    def check(self, states: list[dict]) -> None:
        """Raise ConfigError if the states of a checkpoint belong to other rows. The loader of a mixture checks its parts."""
        if self.content:
            check_content(self.content, states, remedy_of_date(self.run))

    def first_batch(self) -> dict[str, Any]:
        return self.collate([self.rows[i] for i in range(min(NUM_ROWS, len(self.rows)))])


@dataclass
class ReadRows:
    """Rows of a run as the model reads them, and their collator. `content` is the checksum of those to train on."""

    run: Run[Any]
    train: Any  # a dataset, or Packed
    heldout: Any  # likewise
    collate: Callable[[list[dict]], dict[str, Any]]
    content: str
    show: Callable[[list[dict]], dict[str, Any]] | None = None  # makes the batch to show; default: `collate`

    @property
    def first(self) -> dict[str, HasRows]:
        """First rows of both sides, for `run.show_rows`."""
        show = self.show or self.collate
        training = FirstRows(self.run, self.train, show, self.content)
        return {"Training": training, "Evaluation": FirstRows(self.run, self.heldout, show)}

    def make_loader(self, **settings: Any) -> StepLoader:
        """Make the loader of this rank's micro-batches; `settings` are those of `make_train_loader`."""
        run, rows = self.run, Rows(self.train, numbered_row)
        settings |= {"collate_fn": partial(numbered_batch, self.collate), "content": self.content}
        return make_train_loader(rows, run.args, run.data_rank, run.data_world_size, **settings)

    def make_heldout_loader(self, num_workers: int = 0) -> RowLoader:
        """Make the loader of this rank's batches of held-out rows; in `row`, a negative number only fills a batch."""
        run, rows = self.run, Rows(self.heldout, numbered_row)
        shard = run.args, run.data_rank, run.data_world_size
        return make_eval_loader(rows, *shard, collate_fn=partial(numbered_batch, self.collate), num_workers=num_workers)


def content_of_sides(run: Run[Any], train: Any, heldout: Any) -> str:
    """Compute the checksum of the rows to train on; "" with --data_only. Call it before the model is sharded.

    Raises:
        ConfigError: if machines have other rows, to train on or held out.
    """
    if run.args.data_only:
        return ""
    content_of(heldout, heldout.column_names)
    return content_of(train, train.column_names)


def numbered_batch(collate: Callable[[list[dict]], dict[str, Any]], rows: list[tuple[int, dict]]) -> dict[str, Any]:
    """Return what `collate` makes of numbered rows, and their numbers as `row`."""
    return collate([row for _, row in rows]) | {"row": torch.tensor([number for number, _ in rows])}


def numbered_row(row: dict, number: int) -> tuple[int, dict]:
    return number, without_targets(row, number)


def without_targets(row: dict, number: int) -> dict:
    """Return a row as trl prepared it; for number -1 one of a single token, which is no target and belongs to no row."""
    return row if number >= 0 else row | {name: value for name, value in EMPTY.items() if name in row}


def tell_of_prompts(run: Run[Any], sides: dict[str, datasets.Dataset], tokenizer: PreTrainedTokenizerBase) -> None:
    """Tell if prompts are texts, for which the chat template is not used."""
    if sides["train"].features.get("prompt") == TEXT and tokenizer.chat_template:
        run.print(
            f"The prompts are texts, which are read as they stand: the chat template of {run.args.model_name_or_path} is "
            "not used. Give lists of messages to use it"
        )


def tokenized_rows(
    run: Run[Any],
    rows: datasets.Dataset,
    make: Callable[..., pa.Table],
    added: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    desc: str,
    **settings: Any,
) -> datasets.Dataset:
    """Tokenise rows by `make`, a function of a module, in several processes: they get the columns `added`, with their types.

    `settings` are those of `rendering.render_read`, which `make` takes too.

    Raises:
        ConfigError: for a conversation that cannot be rendered; it names the file and the row.
    """
    args = run.args
    given = {"tokenizer": tokenizer, "date": args.template_date}
    features = datasets.Features(dict(rows.features) | added)
    how = {"code": (rendering,), "num_proc": args.dataset_num_proc, "desc": desc}
    make_all = partial(map_rows, rows, partial(make, **given, **settings), features, **how)
    with refused_by_trl():
        try:
            return local_main_process_first(make_all)
        except ConfigError:
            raise
        except Exception as error:
            for name, side in args.read_rows_for(tokenizer).items():
                written = (in_texts(row, side.features) for row in side)
                if refusal := first_refused(written, tokenizer, **settings):
                    raise ConfigError(f"{args.origins[name]}, row {refusal[0]}, {refusal[1]}") from error
            raise


def first_refused(rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase, **settings: Any) -> tuple[int, str] | None:
    """Find the first row, or pair, with a conversation that cannot be rendered; return its number, from 1, and the reason.

    `settings` are those of `exported.render`.
    """
    for number, row in enumerate(rows, 1):
        own = {name: row.get(name) for name in SETTINGS}
        answers = [row[name] for name in ("chosen", "rejected") if name in row]
        if not answers:
            parts = [row]
        elif isinstance(row.get("prompt"), list):
            own["prompt"] = row["prompt"]
            parts = [own, *(own | {"completion": answer} for answer in answers)]
        else:  # whole conversations, or texts, which no template renders
            parts = [own | {"messages": answer} for answer in answers if isinstance(answer, list)]
        try:
            for part in parts:
                render(part, tokenizer, **settings)
        except Exception as error:
            return number, f"cannot be rendered by the chat template: {error}"
    return None


def check_rows_are_left(
    given: Mapping[str, datasets.Dataset], prepared: Mapping[str, Sized], longest: int | None
) -> None:
    """Check that cutting has left rows of each side, `train` and `test`, of those that were given.

    Raises:
        ConfigError: for a side without rows.
    """
    for name, rows in prepared.items():
        if not len(rows):
            raise ConfigError(
                f"none of {len(given[name]):,} rows is left to {USES[name]} on: none has a target within --max_length "
                f"{longest}; raise it, or see the weights of the messages"
            )


def compare_with_rendering(
    run: Run[Any], exported: Exported, rows: list[dict], trained: list[Rendering], ends: Iterable[int], **settings: Any
) -> None:
    """Compare the first rows with how the export will render them, and keep them for a comparison with the real export.

    `rows` holds them as they were written, `trained` as they are trained, by the `settings` of `exported.render`; `ends`
    are the tokens that end rows. Only rank 0 calls this.

    Raises:
        ConfigError: if they differ, and if a file of the user is in the way.
    """
    args = run.args
    names = args.fixed_on_resume()
    if args.source_name:  # what a source of a mixture sets is not in the arguments of the run
        names -= {*args.of_source}
    fixed = {name: value for name, value in args.values().items() if name in names}
    first = TrainedRows(rows, trained, settings, sorted(ends), fixed)
    raise_problems("The export would not render what is trained", first.problems(exported))
    if not args.data_only:
        first.save(run.output_dir)
    if run.adapter and not args.merge_adapter and {*first.ends} - exported.base_stops:
        run.print(ends_of_adapters(exported.tokenizer, first.ends, exported.base_stops))


def compare_finished(run: Run[Any], **settings: Any) -> None:
    """Compare the first rows of a finished run, as its export renders them, with the trained rows, and print the result.

    `settings` are those of `compare_rows`.

    Raises:
        ConfigError: for each row that differs.
    """
    if run.is_first:
        run.print(compare_rows(run.output_dir / "export", run.output_dir, **settings))


def cut_at(lengths: np.ndarray, max_length: int | None) -> dict[str, int]:
    """Count the rows that are longer than `max_length` and the tokens beyond it; also return the longest length."""
    over = np.maximum(lengths - max_length, 0) if max_length else np.zeros(1, int)
    return {"cut": int((over > 0).sum()), "tokens cut off": int(over.sum()), "longest": int(lengths.max())}
