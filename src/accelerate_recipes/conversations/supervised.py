"""Supervised fine-tuning: rows from their files to what the model reads."""

import copy
import itertools
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.conversations.chats import check_written, without_controls
from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.exported import NUM_COMPARED, NUM_SHOWN, Exported, as_exported, shown_ends
from accelerate_recipes.conversations.formats import LABEL
from accelerate_recipes.conversations.messages import TEXT, has_unweighted, missing_answers, select
from accelerate_recipes.conversations.packed import EVERYTHING, Packed, count_targets_of, cut, cut_or_packed, kept_part
from accelerate_recipes.conversations.rendering import (
    Rendering,
    answers_in,
    end_behind_mark,
    has_marks,
    is_conversation,
    messages_in,
    render_read,
    texts_read,
)
from accelerate_recipes.conversations.settings import check_documents, usual_value
from accelerate_recipes.conversations.supervised_loss import make_collator
from accelerate_recipes.conversations.trained_rows import (
    USES,
    ReadRows,
    check_rows_are_left,
    compare_with_rendering,
    content_of_sides,
    cut_at,
    tokenized_rows,
)
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.passes import rows_in
from accelerate_recipes.data.prepared import chunks_of, lengths_of
from accelerate_recipes.data.template_values import SETTINGS, in_texts, settings_of
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.composites import placeholders, stands_for_image
from accelerate_recipes.models.pretrained import load_config, read_tokenizer
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.ranks import is_first, local_main_process_first, on_first_rank, print_first
from accelerate_recipes.run import Run

FORMATS = (("messages",), ("prompt", "completion"))  # the first column holds the question
# Columns that `rendered` adds, the first two of the types that trl gives them.
RENDERED = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int64")),
    "of_row": datasets.Value("int64"),
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
    def tables(self) -> list[Packed]:
        """Rows to train on, of each source."""
        return getattr(self.train, "datasets", [self.train])

    @property
    def lengths(self) -> np.ndarray | None:
        """Lengths of the rows, if a micro-batch is padded: then it gets rows of similar length."""
        args = self.run.args
        pads = not (args.packing or args.padding_free)
        return np.concatenate([rows.lengths for rows in self.tables]) if pads else None


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
    sides, written = local_main_process_first(lambda: load_sides(args, tokenizer, stops))
    check_same_rendering(run, tokenizer, sides["train"].features)
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= {*sides["train"].column_names}
    how = {"text_field": args.dataset_text_field, "completion_only": completion_only, "stops": sorted(stops)}
    settings = {side: how | {"assistant_only": of_answers(args, rows.features)} for side, rows in sides.items()}
    whole, prepared, first, added = {}, {}, [], 0
    for side, rows in sides.items():
        use = f"rows to {USES[side]} on"
        tokenized = tokenized_rows(run, rows, rendered, RENDERED, tokenizer, f"Tokenizing {use}", **settings[side])
        check_answers_are_left(rows, tokenized, use)
        check_no_placeholders(tokenized, tokenizer, args.base_model)
        if side == "train":
            added, first = tell_of_rendering(rows, tokenized, tokenizer, settings[side])
        whole[side] = tokenized.remove_columns(["of_row", "opened"])
        prepared[side] = cut_or_packed(args, side, whole[side])
    check_rows_are_left(sides, prepared, args.max_length)
    documents = [lengths_of(whole[side]) if args.has_boundaries else rows.lengths for side, rows in prepared.items()]
    check_documents(args, args.base_model, model.config, *documents)
    train, heldout = prepared["train"], prepared["test"]
    content = content_of_sides(run, train, heldout)
    exported = as_exported(model, tokenizer, base_stops)
    num_targets, *_ = count_targets_of(train)
    num_ended, ends = ends_of(args, whole["train"], first, exported) if num_targets.any() else (0, set())
    on_first_rank(lambda: compare_with_rendering(run, exported, written, first, ends, **settings["train"]))
    # trl drops rows in which no target is left, but no packed row. The numbers of rows do not show rows that are added.
    left_out = {"left out": len(sides["train"]) - len(train) + added}
    counts = {"with an end": num_ended} | ({"packed from": len(whole["train"])} if args.packing else left_out)
    longest = args.max_length if kept_part(args, args.packing) != EVERYTHING else None
    counts |= cut_at(lengths_of(whole["train"]), longest)
    counted = {"sides": sides, "num_targets": num_targets, "counts": counts}
    return SupervisedRows(run, train, heldout, make_collator(args, tokenizer.pad_token_id), content, **counted)


def has_chats(features: datasets.Features) -> bool:
    """Tell whether rows are conversations, and not texts."""
    return any(isinstance(features.get(name), datasets.List) for name in ("messages", "completion"))


def of_answers(args: Any, features: datasets.Features) -> bool:
    """Tell whether answers alone are targets: by default in conversations, unless prompts are trained too."""
    if args.assistant_only_loss == "auto":
        return has_chats(features) and ("messages" in features or args.completion_only_loss is not False)
    return args.assistant_only_loss == "true"


def check_same_rendering(run: Run[Any], tokenizer: PreTrainedTokenizerBase, features: datasets.Features) -> None:
    """Check that a resumed run has the chat template of its checkpoint, and trains answers alone, or all, as that did.

    Raises:
        ConfigError: if it does not.
    """
    if not (checkpoint := run.resumed_from):
        return
    known, args = read_tokenizer(str(checkpoint)).chat_template, run.args
    if known and known != tokenizer.chat_template:
        raise ConfigError(
            f"{checkpoint} was trained with another chat template, its chat_template.jinja; put that back, or start anew in "
            "another --output_dir"
        )
    before = copy.copy(args)
    before.assistant_only_loss = usual_value(saved_arguments(checkpoint)["assistant_only_loss"])
    then, now = of_answers(before, features), of_answers(args, features)
    if then != now:
        kinds = {True: "answers alone", False: "everything"}
        raise ConfigError(
            f"{checkpoint} was trained on {kinds[then]}, and --assistant_only_loss {args.assistant_only_loss} trains "
            f"{kinds[now]}; give {str(then).lower()}, or start anew in another --output_dir"
        )


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
        source = args.origins[name]
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
        if has_answers and (warning := missing_answers(side, columns[-1], source)):
            print_first(warning)
    written = rows["train"].select_columns([name for name in features if name in {*columns, *SETTINGS}])
    first: Any = islice((row for row in written if not args.is_heldout(row, asked)), NUM_COMPARED)  # pyright: ignore
    return args.sides(read, asked), [in_texts(row, written.features) for row in first]


def columns_said(args: Any, features: datasets.Features) -> tuple[str, ...]:
    """Return the columns with messages or texts, the one with the question first."""
    return next(c for c in (*FORMATS, (args.dataset_text_field,)) if {*c} <= {*features})


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


def tell_of_rendering(
    rows: datasets.Dataset, whole: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> tuple[int, list[Rendering]]:
    """Tell what one may not expect of the rendering of `rows` to train on, which are `whole` with these `settings`.

    Rows may be cut after an earlier answer, answers may lack a part of their prompt, and the end of an answer that stands
    behind a mark of the template is a target, unlike in trl. `of_row` of `whole` numbers the rows that they are made of.

    Returns:
        The number of rows that are cut after an earlier answer, and the renderings of the first NUM_COMPARED rows.
    """
    sources = whole.data.column("of_row").to_numpy()
    added = np.flatnonzero(sources[:-1] == sources[1:])  # the last row of a conversation is the whole one
    if len(added):
        tokens = lengths_of(whole)[added].sum()
        print_first(
            f"The chat template renders some answers otherwise once the conversation goes on: {len(added):,} rows with "
            f"{tokens:,} tokens are added, each cut after such an answer, from {len({*sources[added]}):,} conversations"
        )
    if opened := [prompt for prompt in whole["opened"][:] if prompt]:
        print_first(
            f"The chat template asks for an answer with {opened[0]!r}. In {len(opened):,} rows an answer does not begin "
            "with all of that: the model learns from another prompt than it will get. Give rows with thoughts, or "
            "another template (docs/rows.md)"
        )
    asked: Any = rows if settings["assistant_only"] else ()
    row = next((row for row in asked if answers_in(row, completion_only=False)), {})
    if row and has_marks(tokenizer, settings_of(row)):
        ends = [str(tokenizer.decode([stop])) for stop in settings["stops"]]
        if end := end_behind_mark(tokenizer, messages_in(row), settings_of(row), ends):
            print_first(
                f"The chat template writes {end!r} directly behind what it marks as an answer: it is a target too, unlike "
                "in trl, since the model must learn to stop"
            )
    first: Any = whole.select(range(int((sources < NUM_COMPARED).sum())))
    return len(added), [
        Rendering(row["input_ids"], [label != IGNORE_INDEX for label in row["labels"]]) for row in first
    ]


def check_no_placeholders(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, base_model: str) -> None:
    """Check that no token of tokenised rows stands for an image in the model that a run begins with.

    Raises:
        DataError: names row and token.
    """
    known = placeholders(load_config(base_model)) if base_model else {}
    start = 0
    for lengths, ids in chunks_of(rows, "input_ids") if known else ():
        positions = np.isin(ids, [*known]).nonzero()[0]
        if len(positions):
            ends = lengths.cumsum()
            row, token = int(ends.searchsorted(positions[0], "right")), int(ids[positions[0]])
            begin = int(ends[row] - lengths[row])
            before: Any = tokenizer.decode(ids[max(begin, positions[0] - NUM_SHOWN) : positions[0]])
            raise DataError(stands_for_image(start + row + 1, int(positions[0]) - begin, token, known[token], before))
        start += len(lengths)


def rendered(table: pa.Table, first: int, tokenizer: PreTrainedTokenizerBase, date: str, **settings: Any) -> pa.Table:
    """Render rows. Return their columns and those of RENDERED, once for each row to train on.

    Texts are returned as they are read. `first` is the number of the first row.
    """
    rows = rows_in(table)
    with frozen_date(date):
        by_row = render_read(rows, tokenizer, **settings)
    numbers = np.repeat(np.arange(len(rows)), [*map(len, by_row)])
    renderings = [one for made in by_row for one in made]
    offsets = np.cumsum([0, *(len(one.ids) for one in renderings)], dtype=np.int32)
    ids = np.fromiter(itertools.chain.from_iterable(one.ids for one in renderings), np.int32)
    targets = np.frombuffer(bytearray(itertools.chain.from_iterable(one.targets for one in renderings)), bool)
    columns = dict(zip(table.column_names, table.take(numbers).columns, strict=True))
    if not is_conversation(rows[0]):
        texts = texts_read(rows, tokenizer, settings["text_field"])
        columns |= {name: [read[name] for read in texts] for name in texts[0]}
    columns |= {
        "input_ids": pa.ListArray.from_arrays(offsets, ids),
        "labels": pa.ListArray.from_arrays(offsets, np.where(targets, ids, np.int64(IGNORE_INDEX))),
        "of_row": first + numbers,
        "opened": [one.opened for one in renderings],
    }
    return pa.table(columns)


def ends_of(args: Any, whole: datasets.Dataset, first: list[Rendering], exported: Exported) -> tuple[int, set[int]]:
    """Count the rows that end with a target at which the exported model stops; also return these tokens.

    Raises:
        ConfigError: if there are none: the model would not learn to stop.
    """
    kept = kept_part(args, args.packing)
    _, num_ended, ends = count_targets_of(cut(whole, kept), exported.stops)
    if not num_ended:
        stops = shown_ends(exported.tokenizer, sorted(exported.stops))
        ids, targets = next(((ids[kept], on[kept]) for ids, on, _ in first if any(on[kept])), (first[0].ids, []))
        last = len(targets) - [*reversed(targets)].index(True) if any(targets) else len(ids)
        shown = exported.tokenizer.decode(ids[max(0, last - 2) : last])
        behind = next((token for token in ids[last:] if token in exported.stops), None)
        written = "no such token is written behind it"
        if behind is not None:
            written = f"{exported.tokenizer.decode([behind])!r} stands behind it, which is no part of the answer"
        raise ConfigError(
            f"no row ends with a target at which the model would stop: generation stops at {stops}, the last answer of the "
            f"first row ends with {shown!r}, and {written}; name the token that ends an answer by --eos_token (and by "
            "--new_tokens, if the tokenizer does not have it), raise --max_length, or mend the chat template"
        )
    return num_ended, ends
