"""Supervised fine-tuning: rows from their files to what the model reads."""

import itertools
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import pack_dataset

from accelerate_recipes.checkpoint.exported import Exported, as_exported, shown_ends
from accelerate_recipes.data.chats import check_written, without_controls
from accelerate_recipes.data.dates import frozen_date
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.formats import LABEL
from accelerate_recipes.data.messages import NUM_COMPARED, TEXT, has_unweighted, missing_answers, select
from accelerate_recipes.data.passes import chosen_rows, made_of, rows_in
from accelerate_recipes.data.prepared import lengths_of
from accelerate_recipes.data.rendering import Rendering, render_read, texts_read
from accelerate_recipes.data.rows import num_steps
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.errors import ConfigError, printable
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.posttraining.supervised_loss import make_collator
from accelerate_recipes.posttraining.trained_rows import (
    EVERYTHING,
    USES,
    ReadRows,
    check_no_placeholders,
    check_rows_are_left,
    check_same_targets,
    check_same_template,
    compare_with_rendering,
    content_of_sides,
    count_targets_of,
    cut_at,
    has_chats,
    have_targets,
    of_answers,
    tell_of_parts,
    tell_of_prompts,
    tokenized_rows,
)
from accelerate_recipes.ranks import is_first, on_first_of_machine_before_others, on_first_rank
from accelerate_recipes.run import Run

FORMATS = (("messages",), ("prompt", "completion"))  # the first column holds the question
# Columns that `rendered` adds, the first two of the types that trl gives them.
RENDERED = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int64")),
    "source": datasets.Value("int64"),
    "opened": TEXT,
}


@dataclass(kw_only=True)
class SupervisedRows(ReadRows):
    """Rows as the model reads them, and what their preparation counts.

    `sides` has the rows of each side before they were rendered, `num_targets` the number of targets of each row to train
    on; `counts` are to be printed, see `shown.count_line`.
    """

    sides: Mapping[str, Sized]
    num_targets: np.ndarray
    counts: dict[str, int]

    @property
    def num_read(self) -> dict[str, int]:
        return {side: len(rows) for side, rows in self.sides.items()}

    @property
    def lengths(self) -> np.ndarray | None:
        """Lengths of the rows, if a micro-batch is padded: then it gets rows of similar length."""
        args = self.run.args
        return None if args.packing or args.padding_free else lengths_of(self.train)

    visits: ClassVar[Any] = 1  # how often each row is trained, or all of them, up to a factor

    def num_steps(self) -> int:
        """Return the number of optimizer steps of the run."""
        return num_steps(self.run.args, len(self.train))

    def seen(self, step: int) -> dict[str, float]:
        """Return what the log tells of the sources of a mixture after a step."""
        return {}


def prepare_supervised(
    run: Run[Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: set[int]
) -> SupervisedRows:
    """Read, render and tokenise rows; cut or pack them as trl does; count them, and compare the first with the export's.

    It also tells of rows that a template makes otherwise than one expects. The base stops at `base_stops`.

    Raises:
        ConfigError: for rows that cannot be rendered, if no row is left, if a resumed run has another template or other
            targets, if the model would not learn to stop, and if the export would render the first rows otherwise.
        DataError: for rows that cannot be read, or hold no text or messages, or a token that stands for an image.
    """
    args, stops = run.args, base_stops | stops_of(tokenizer)
    sides, written = on_first_of_machine_before_others(lambda: load_sides(args, tokenizer, stops))
    tell_of_prompts(run, sides, tokenizer)
    if run.resumed_from:
        check_same_template(tokenizer, run.resumed_from)
        check_same_targets(args, sides["train"].features, run.resumed_from)
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= {*sides["train"].column_names}
    how = {"text_field": args.dataset_text_field, "completion_only": completion_only, "stops": sorted(stops)}
    settings = {side: how | {"assistant_only": of_answers(args, rows.features)} for side, rows in sides.items()}
    whole, prepared, first, added = {}, {}, [], 0
    for side, rows in sides.items():
        found = render_side(run, side, rows, tokenizer, settings[side])
        if side == "train":
            added, first = tell_of_parts(run, found), first_rendered(found)
        whole[side] = found.remove_columns(["source", "opened"])
        prepared[side] = on_first_of_machine_before_others(partial(cut_or_packed, args, side, whole[side]))
    check_rows_are_left(sides, prepared, args.max_length)
    train, heldout = prepared["train"], prepared["test"]
    content = content_of_sides(run, train, heldout)
    exported = as_exported(model, tokenizer)
    num_targets, *_ = count_targets_of(train, exported.stops)
    num_ended, ends = ends_of(args, whole["train"], first, exported) if num_targets.any() else (0, set())
    place = run, exported, base_stops
    on_first_rank(lambda: compare_with_rendering(*place, written, first, ends, **settings["train"]))
    # trl drops rows in which no target is left, but no packed row. The numbers of rows do not show rows that are added.
    left_out = {"left out": len(sides["train"]) - len(train) + added}
    counts = {"with an end": num_ended} | ({"packed from": len(whole["train"])} if args.packing else left_out)
    counts |= cut_at(lengths_of(whole["train"]), args.max_length if kept_part(args) != EVERYTHING else None)
    counted = {"sides": sides, "num_targets": num_targets, "counts": counts}
    return SupervisedRows(run, train, heldout, make_collator(args, tokenizer.pad_token_id), content, **counted)


def load_sides(
    args: Any, tokenizer: PreTrainedTokenizerBase, stops: set[int]
) -> tuple[dict[str, datasets.Dataset], list[dict]]:
    """Load the rows to train on and to evaluate on, as `train` and `test`; also return the first training rows as written.

    `stops` are the tokens at which generation stops.

    Raises:
        DataError: for files that cannot be read, and for rows that hold no text or messages.
        ConfigError: for columns that trl cannot use, for conversations without a chat template, and if a side is empty.
    """
    rows = args.read_rows_for(tokenizer)
    features = rows["train"].features
    columns = columns_said(args, features)
    if args.completion_only_loss and "completion" not in columns:
        raise ConfigError(
            f"--completion_only_loss is for rows of prompt and completion; these have {' and '.join(columns)}; remove it: "
            "of messages, the answers alone are trained (--assistant_only_loss)"
        )
    are_chats = any(isinstance(features[name], datasets.List) for name in columns)
    if are_chats and not tokenizer.chat_template:
        raise ConfigError(
            f"{args.base_model or args.tokenizer_name} has no chat template; give --chat_template_path, such as "
            "recipes/chat_templates/chatml.jinja (docs/sft.md has the whole command)"
        )
    if args.assistant_only_loss == "true" and not are_chats:
        raise ConfigError(
            f"--assistant_only_loss true is for conversations, and the column {columns[-1]} holds texts; remove it"
        )
    if "prompt" not in columns and are_chats != (columns == FORMATS[0]):
        raise ConfigError(
            f"the column {columns[0]} holds {'messages' if are_chats else 'texts'}; lists of messages belong into messages, "
            f"texts into {args.dataset_text_field} (--dataset_text_field)"
        )
    asked, trained = columns[0], columns if args.completion_only_loss is False else columns[-1:]
    read = {}
    for name, side in rows.items():
        source = args.sources[name]
        if lost := [column for column in columns if column not in side.column_names]:
            raise ConfigError(
                f"{source} has no column {lost[0]!r}; there are {', '.join(side.column_names)}: give rows to evaluate on in "
                f"the form of those to train on, {' and '.join(columns)}"
            )
        check_texts_or_messages(side, columns, source)
        rows[name] = without_controls(side, columns, tokenizer, stops, source, args.control_tokens)
        judged = [LABEL] if LABEL in side.column_names else []
        read[name] = side = select(rows[name], (*columns, *judged), source)
        check_written(side, columns, tokenizer, f"{source}, row", args.template_date)
        if has_unweighted(side, trained, source) and not of_answers(args, features):
            raise ConfigError(
                f"{source} has messages of weight 0, which are no targets, but everything is trained; remove "
                "--assistant_only_loss false and --completion_only_loss false"
            )
        has_answers = is_first() and has_chats(side.features) and of_answers(args, side.features)
        if has_answers and (said := missing_answers(side, columns[-1], source)):
            print(printable(said), flush=True)
    written = rows["train"].select_columns([name for name in features if name in {*columns, *SETTINGS}])
    first = islice((row for row in written if not args.is_heldout(row, asked)), NUM_COMPARED)
    return args.sides(read, asked), list(first)  # pyright: ignore[reportReturnType]


def columns_said(args: Any, features: datasets.Features) -> tuple[str, ...]:
    """Return the columns with messages or texts, the one with the question first."""
    return next(c for c in (*FORMATS, (args.dataset_text_field,)) if {*c} <= {*features})


def render_side(
    run: Run[Any], side: str, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> datasets.Dataset:
    """Render and tokenise the rows of a side by the `settings` of `rendering.render_read`; see RENDERED.

    Raises:
        ConfigError: for rows that cannot be rendered, and if none has a target.
        DataError: for a token that stands for an image.
    """
    use = f"rows to {USES[side]} on"
    found = tokenized_rows(run, rows, rendered, RENDERED, tokenizer, f"Tokenizing {use}", **settings)
    check_answers_are_left(rows, found, use)
    check_no_placeholders(found, tokenizer, run.args.base_model)
    return found


def check_answers_are_left(rows: datasets.Dataset, found: datasets.Dataset, use: str) -> None:
    """Check that some of the rows for a `use` have a target once they are rendered.

    Raises:
        ConfigError: if none has.
    """
    if not len(found):
        raise ConfigError(
            f"none of {len(rows):,} {use} has an answer that is a target, which is a message of the role 'assistant' with a "
            "text; give rows with answers, see roles and weights of the messages, or train everything by "
            "--assistant_only_loss false"
        )


def first_rendered(whole: datasets.Dataset) -> list[Rendering]:
    """Return the renderings of the first NUM_COMPARED rows that rows are made of, by their column `source`."""
    number = int((whole.data.column("source").to_numpy() < NUM_COMPARED).sum())
    rows: Any = whole.select(range(number))
    return [Rendering(row["input_ids"], [label != IGNORE_INDEX for label in row["labels"]]) for row in rows]


def rendered(
    table: pa.Table,
    first: int,
    features: datasets.Features,
    tokenizer: PreTrainedTokenizerBase,
    date: str,
    **settings: Any,
) -> pa.Table:
    """Render rows. Return their columns and those of RENDERED, once for each row to train on.

    Texts are returned as they are read. `first` is the number of the first row.
    """
    rows = rows_in(table, features)
    with frozen_date(date):
        found = render_read(rows, tokenizer, **settings)
    numbers = np.repeat(np.arange(len(rows)), [*map(len, found)])
    renderings = [one for made in found for one in made]
    offsets = np.cumsum([0, *(len(one.ids) for one in renderings)], dtype=np.int32)
    ids = np.fromiter(itertools.chain.from_iterable(one.ids for one in renderings), np.int32)
    targets = np.frombuffer(bytearray(itertools.chain.from_iterable(one.targets for one in renderings)), bool)
    columns = dict(zip(table.column_names, table.take(numbers).columns, strict=True))
    if not has_chats(features):
        texts = texts_read(rows, tokenizer, settings["text_field"])
        columns |= {name: [read[name] for read in texts] for name in texts[0]}
    columns |= {
        "input_ids": pa.ListArray.from_arrays(offsets, ids),
        "labels": pa.ListArray.from_arrays(offsets, np.where(targets, ids, np.int64(IGNORE_INDEX))),
        "source": first + numbers,
        "opened": [one.opened for one in renderings],
    }
    return pa.table(columns, schema=datasets.Features(dict(features) | RENDERED).arrow_schema)


def is_packed(args: Any, side: str) -> bool:
    """Tell whether the rows of a side, `train` or `test`, are packed."""
    return args.packing if side == "train" or args.eval_packing is None else args.eval_packing


def cut_or_packed(args: Any, side: str, whole: datasets.Dataset) -> datasets.Dataset:
    """Pack the rows of a side, or cut them and leave out those that have no target then, as trl does."""
    if is_packed(args, side):
        rows = whole.select_columns(["input_ids", "labels"])
        rows = rows.shuffle(seed=args.seed) if args.shuffle_dataset else rows
        rows = pack_dataset(rows, args.max_length, args.packing_strategy, {"desc": "Packing rows"})
    elif longest := args.max_length:
        rows = whole
        if (lengths_of(whole) > longest).any():
            at_end = args.truncation_mode == "keep_end"
            rows = made_of(
                whole, partial(cut_tokens, longest=longest, at_end=at_end), whole.features, desc="Cutting rows"
            )
        rows = chosen_rows(rows, have_targets(rows))
    else:
        rows = whole
    return rows.shuffle(seed=args.seed) if args.shuffle_dataset else rows


def cut_tokens(table: pa.Table, first: int, longest: int, at_end: bool) -> pa.Table:
    """Cut the tokens of rows to the first `longest`, or to the last."""
    for name in ("input_ids", "labels"):
        column = table.column(name).combine_chunks()
        lengths, tokens = np.asarray(column.value_lengths()), np.asarray(column.flatten())
        kept = np.minimum(lengths, longest)
        begins = np.cumsum(lengths) - (kept if at_end else lengths)
        offsets = np.cumsum([0, *kept], dtype=np.int32)
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], kept)
        cut_column = pa.ListArray.from_arrays(offsets, tokens[places])
        table = table.set_column(table.column_names.index(name), name, cut_column)
    return table


def kept_part(args: Any) -> slice:
    """Return the part of each row that is trained; what `bfd_split` and `wrapped` cut off is trained as another row."""
    if not args.max_length or (args.packing and args.packing_strategy != "bfd"):
        return EVERYTHING
    at_end = args.truncation_mode == "keep_end" and not args.packing
    return slice(-args.max_length, None) if at_end else slice(args.max_length)


def ends_of(args: Any, whole: datasets.Dataset, first: list[Rendering], exported: Exported) -> tuple[int, set[int]]:
    """Count the rows that end with a target at which the exported model stops; also return these tokens.

    Raises:
        ConfigError: if there are none: the model would not learn to stop.
    """
    kept = kept_part(args)
    _, num_ended, ends = count_targets_of(whole, exported.stops, kept)
    if not num_ended:
        stops = shown_ends(exported.tokenizer, sorted(exported.stops))
        last = next((ids[kept] for ids, targets, _ in first if any(targets[kept])), first[0].ids)[-2:]
        raise ConfigError(
            f"no row ends with a target at which the model would stop: generation stops at {stops}, the first row ends "
            f"with {exported.tokenizer.decode(last)!r}; name the token that ends an answer by --eos_token (and by "
            "--new_tokens, if the tokenizer does not have it), raise --max_length, or mend the chat template"
        )
    return num_ended, ends
