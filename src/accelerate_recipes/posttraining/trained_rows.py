"""Rows of SFT, DPO and GRPO as they are trained: numbered, known again on a resume, compared with the export's rendering."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.checkpoint.exported import (
    NUM_SHOWN,
    Exported,
    TrainedRows,
    compare_rows,
    ends_of_adapters,
    render,
)
from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.data import NUM_ROWS, rendering
from accelerate_recipes.data.messages import TEXT
from accelerate_recipes.data.passes import made_of
from accelerate_recipes.data.prepared import check_content, chunks_of, content_of, lengths_of
from accelerate_recipes.data.rendering import Rendering
from accelerate_recipes.data.rows import RowLoader, Rows, StepLoader, make_eval_loader, make_train_loader
from accelerate_recipes.data.shown import HasRows
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.errors import ConfigError, DataError, raise_problems
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.composites import placeholders, stands_for_image
from accelerate_recipes.models.pretrained import load_config, read_tokenizer
from accelerate_recipes.posttraining.settings import TrainerArgs, refused_by_trl
from accelerate_recipes.ranks import on_first_of_machine_before_others
from accelerate_recipes.run import Run

NUM_LAST = 4  # number of last targets of a row among which its end token is searched
EVERYTHING = slice(None)
# Row that fills a place for which there is none. Another row with masked labels would not do: if its activations are
# infinite, its gradients are not finite.
EMPTY = {
    "input_ids": [0], "labels": [IGNORE_INDEX], "seq_lengths": [1],
    "prompt_ids": [0, 0], "chosen_ids": [], "rejected_ids": [], "ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0,
    "images": [[]], "checksums": [[]], "image_begins": [[]], "places": [""],
}  # fmt: skip
TEMPLATES = (".jinja", ".j2")  # trl reads files with these endings as chat templates, other names as models
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
    rows: datasets.Dataset
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
    train: datasets.Dataset
    heldout: datasets.Dataset | None
    collate: Callable[[list[dict]], dict[str, Any]]
    content: str
    show: Callable[[list[dict]], dict[str, Any]] | None = None  # makes the batch to show; default: `collate`

    @property
    def items(self) -> Any:
        """Rows to train on, by their numbers."""
        return self.train

    @property
    def first(self) -> dict[str, HasRows]:
        """First rows of both sides, for `run.show_rows`."""
        show = self.show or self.collate
        first: dict[str, HasRows] = {"Training": FirstRows(self.run, self.train, show, self.content)}
        if self.heldout is not None:
            first["Evaluation"] = FirstRows(self.run, self.heldout, show)
        return first

    def make_loader(self, **settings: Any) -> StepLoader:
        """Make the loader of this rank's micro-batches; `settings` are those of `make_train_loader`."""
        run, rows = self.run, Rows(self.items, numbered_row)
        settings |= {"collate_fn": partial(numbered_batch, self.collate), "content": self.content}
        return make_train_loader(rows, run.args, run.data_rank, run.data_world_size, **settings)

    def make_heldout_loader(self, num_workers: int = 0) -> RowLoader:
        """Make the loader of this rank's batches of held-out rows; in `row`, a negative number only fills a batch."""
        run, rows = self.run, Rows(self.heldout, numbered_row)  # pyright: ignore[reportArgumentType]
        place = run.args, run.data_rank, run.data_world_size
        return make_eval_loader(rows, *place, collate_fn=partial(numbered_batch, self.collate), num_workers=num_workers)


@dataclass
class AnswerArgs:
    """Arguments of a recipe on rows of SFT. Put it before TrainerArgs in the bases of its arguments."""

    assistant_only_loss: str = arg(
        "auto",
        "Train the answers of conversations alone (true), or everything (false); auto: true, but false for texts.",
        choices=("auto", "true", "false"),
        fixed=False,
    )

    template_model = ""  # name or folder of a model whose chat template is used
    groups = TrainerArgs.groups | dict.fromkeys(("packing", "completion_only_loss"), "task")
    ranges = TrainerArgs.ranges | {"dataset_num_proc": Range(min=1), "max_length": Range(min=2)}
    owned_elsewhere = TrainerArgs.owned_elsewhere | {
        "accept_training_template": "remove it: answers are found with the model's own template",
        "dataset_kwargs": "remove it: rows are always prepared here",
    }

    def problems(self, world_size: int) -> list[str]:
        args: Any = self
        is_file = args.chat_template_path and not args.template_model
        found = super().problems(world_size)  # pyright: ignore[reportAttributeAccessIssue]
        return found + (args.file_problems("chat_template_path", TEMPLATES) if is_file else [])

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        if self.assistant_only_loss == "auto":
            self.assistant_only_loss = usual_value(saved.get("assistant_only_loss", "auto"))
        return super().settle(saved)  # pyright: ignore[reportAttributeAccessIssue]


def has_chats(features: datasets.Features) -> bool:
    """Tell whether rows are conversations, and not texts."""
    return any(isinstance(features.get(name), datasets.List) for name in ("messages", "completion"))


def of_answers(args: Any, features: datasets.Features) -> bool:
    """Tell whether answers alone are targets: by default in conversations, unless prompts are trained too."""
    if args.assistant_only_loss == "auto":
        return has_chats(features) and ("messages" in features or args.completion_only_loss is not False)
    return args.assistant_only_loss == "true"


def check_same_template(tokenizer: PreTrainedTokenizerBase, checkpoint: Path) -> None:
    """Check that a resumed run has the chat template of its checkpoint.

    Raises:
        ConfigError: if it does not.
    """
    known = read_tokenizer(str(checkpoint)).chat_template
    if known and known != tokenizer.chat_template:
        raise ConfigError(
            f"{checkpoint} was trained with another chat template, its chat_template.jinja; put that back, or start anew in "
            "another --output_dir"
        )


def check_same_targets(args: Any, features: datasets.Features, checkpoint: Path) -> None:
    """Check that a resumed run trains answers alone, or everything, as its checkpoint did.

    Raises:
        ConfigError: if it does not.
    """
    before = copy.copy(args)
    before.assistant_only_loss = usual_value(saved_arguments(checkpoint)["assistant_only_loss"])
    then, now = of_answers(before, features), of_answers(args, features)
    if then != now:
        kinds = {True: "answers alone", False: "everything"}
        raise ConfigError(
            f"{checkpoint} was trained on {kinds[then]}, and --assistant_only_loss {args.assistant_only_loss} trains "
            f"{kinds[now]}; give {str(then).lower()}, or start anew in another --output_dir"
        )


def usual_value(value: Any) -> str:
    """Return a value of --assistant_only_loss as it is now; checkpoints of earlier versions hold a bool."""
    return str(value).lower()


def content_of_sides(run: Run[Any], train: datasets.Dataset, heldout: datasets.Dataset | None = None) -> str:
    """Compute the checksum of the rows to train on; "" with --data_only. Call it before the model is sharded.

    Raises:
        ConfigError: if machines have other rows, to train on or held out.
    """
    if run.args.data_only:
        return ""
    if heldout is not None:
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


def tell_of_parts(run: Run[Any], whole: datasets.Dataset) -> int:
    """Tell of rows that are cut after an earlier answer, and of answers that lack a part of their prompt, if any.

    `source` of the rows to train on numbers those that they are made of.

    Returns:
        The number of rows that are cut after an earlier answer.
    """
    sources = whole.data.column("source").to_numpy()
    added = np.flatnonzero(sources[:-1] == sources[1:])  # the last row of a conversation is the whole one
    if len(added):
        tokens = lengths_of(whole)[added].sum()
        run.print(
            f"The chat template renders some answers otherwise once the conversation goes on: {len(added):,} rows with "
            f"{tokens:,} tokens are added, each cut after such an answer, from {len({*sources[added]}):,} conversations"
        )
    if opened := [prompt for prompt in whole["opened"][:] if prompt]:
        run.print(
            f"The chat template asks for an answer with {opened[0]!r}. In {len(opened):,} rows an answer does not begin "
            "with all of that: the model learns from another prompt than it will get. Give rows with thoughts, or "
            "another template (docs/rows.md)"
        )
    return len(added)


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
    given = {"features": rows.features, "tokenizer": tokenizer, "date": args.template_date}
    features = datasets.Features(dict(rows.features) | added)
    how = {"code": (rendering,), "num_proc": args.dataset_num_proc, "desc": desc}
    make_all = partial(made_of, rows, partial(make, **given, **settings), features, **how)
    with refused_by_trl():
        try:
            return on_first_of_machine_before_others(make_all)
        except ConfigError:
            raise
        except Exception as error:
            for name, side in args.read_rows_for(tokenizer).items():
                if found := first_refused(side, tokenizer, **settings):
                    raise ConfigError(f"{args.sources[name]}, row {found[0]}, {found[1]}") from error
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


def check_no_placeholders(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, base_model: str) -> None:
    """Check that no token of tokenised rows stands for an image in the model that a run begins with.

    Raises:
        DataError: names row and token.
    """
    known = placeholders(load_config(base_model)) if base_model else {}
    start = 0
    for lengths, ids in chunks_of(rows, "input_ids") if known else ():
        found = np.isin(ids, [*known]).nonzero()[0]
        if len(found):
            ends = lengths.cumsum()
            row, token = int(ends.searchsorted(found[0], "right")), int(ids[found[0]])
            begin = int(ends[row] - lengths[row])
            before: Any = tokenizer.decode(ids[max(begin, found[0] - NUM_SHOWN) : found[0]])
            raise DataError(stands_for_image(start + row + 1, int(found[0]) - begin, token, known[token], before))
        start += len(lengths)


def check_rows_are_left(
    given: Mapping[str, datasets.Dataset], prepared: Mapping[str, datasets.Dataset], longest: int | None
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
    run: Run[Any],
    exported: Exported,
    base_stops: set[int],
    rows: list[dict],
    trained: list[Rendering],
    ends: Iterable[int],
    **settings: Any,
) -> None:
    """Compare the first rows with how the export will render them, and keep them for a comparison with the real export.

    `rows` holds them as they were written, `trained` as they are trained, by the `settings` of `exported.render`; `ends`
    are the tokens that end rows. The base stops at `base_stops`. Only rank 0 calls this.

    Raises:
        ConfigError: if they differ, and if a file of the user is in the way.
    """
    args = run.args
    names = args.fixed_on_resume()
    if getattr(args, "part", ""):  # what a source of a mixture sets is not in the arguments of the run
        names -= {*args.of_source}
    fixed = {name: value for name, value in args.values().items() if name in names}
    first = TrainedRows(rows, trained, settings, sorted(ends), fixed)
    raise_problems("The export would not render what is trained", first.problems(exported))
    if not args.data_only:
        first.save(run.output_dir)
    if run.adapter and not args.merge_adapter and {*first.ends} - base_stops:
        run.print(ends_of_adapters(exported.tokenizer, first.ends, base_stops))


def compare_finished(run: Run[Any]) -> None:
    """Compare the first rows of a finished run, as its export renders them, with the trained rows, and print the result.

    Raises:
        ConfigError: for each row that differs.
    """
    if run.is_first:
        run.print(compare_rows(run.output_dir / "export", run.output_dir))


def cut_at(lengths: np.ndarray, max_length: int | None) -> dict[str, int]:
    """Count the rows that are longer than `max_length` and the tokens beyond it; also return the longest length."""
    over = np.maximum(lengths - max_length, 0) if max_length else np.zeros(1, int)
    return {"cut": int((over > 0).sum()), "tokens cut off": int(over.sum()), "longest": int(lengths.max())}


def count_targets_of(
    rows: datasets.Dataset, ends: set[int], kept: slice = EVERYTHING
) -> tuple[np.ndarray, int, set[int]]:
    """Count the targets of each row, and the rows that end with one of `ends`, from their `labels`; also return these ends.

    An end token counts if it is among the last NUM_LAST targets of a row: a template may write a line break after it, and
    end tokens of the user's messages are further from the end. `kept` is the part of each row that is trained, its beginning
    or its end. The first token of this part is not a target, because nothing comes before it.
    """
    counts, num_ended, seen = [np.empty(0, np.int64)], 0, set()
    for lengths, labels in chunks_of(rows, "labels"):
        starts = np.cumsum(lengths) - lengths
        first, last = starts + np.array([kept.indices(length)[:2] for length in lengths]).reshape(-1, 2).T
        of_targets = targets_up_to(labels)
        begin, end = of_targets[np.minimum(first + 1, last)], of_targets[last]  # of the row's targets, among all
        counts.append(end - begin)
        targets = labels[labels != IGNORE_INDEX]
        has_end = np.zeros(len(lengths), bool)
        for place in range(1, NUM_LAST + 1):
            numbers = np.flatnonzero(end - begin >= place)
            found = targets[end[numbers] - place]
            is_end = np.isin(found, list(ends))
            has_end[numbers[is_end]] = True
            seen |= {*found[is_end].tolist()}
        num_ended += int(has_end.sum())
    return np.concatenate(counts), num_ended, seen


def have_targets(rows: datasets.Dataset) -> np.ndarray:
    """Tell of each row whether a label is a target."""
    found = [np.empty(0, bool)]
    for lengths, labels in chunks_of(rows, "labels"):
        ends, of_targets = np.cumsum(lengths), targets_up_to(labels)
        found.append(of_targets[ends] > of_targets[ends - lengths])
    return np.concatenate(found)


def targets_up_to(labels: np.ndarray) -> np.ndarray:
    """Count the targets before each of the labels, and all of them."""
    return np.concatenate([[0], np.cumsum(labels != IGNORE_INDEX)])
