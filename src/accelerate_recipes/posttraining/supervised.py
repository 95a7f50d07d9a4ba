"""Rows of supervised fine-tuning: conversations are rendered here, texts by trl, which also cuts and packs all rows."""

import copy
import itertools
import math
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import align_special_tokens
from trl import SFTConfig, clone_chat_template
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes.checkpoint.check_export import as_exported, stops_of
from accelerate_recipes.checkpoint.files import saved_arguments
from accelerate_recipes.data import answer_spans, rendering
from accelerate_recipes.data.conversations import (
    EVERYTHING,
    NUM_COMPARED,
    TEXT,
    count_targets_of,
    cut_at,
    has_unweighted,
    missing_answers,
    select,
)
from accelerate_recipes.data.dates import frozen_date
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.passes import made_of, rows_in
from accelerate_recipes.data.prepared import chunks_of, lengths_of
from accelerate_recipes.data.rendering import NUM_SHOWN, SETTINGS, Rendering, render_read, shown_ends, texts_read
from accelerate_recipes.data.rows import RowLoader, Rows, make_eval_loader
from accelerate_recipes.errors import ConfigError, DataError, printable
from accelerate_recipes.hub import cache
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.composites import placeholders, stands_for_image
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.posttraining.settings import pad_multiple, refused_by_trl, trl_config
from accelerate_recipes.posttraining.supervised_loss import OUTPUTS, make_collator
from accelerate_recipes.posttraining.trained_rows import (
    ReadRows,
    check_rows_are_left,
    compare_with_rendering,
    content_of_sides,
    cut_or_packed,
    naming_rows,
    without_targets,
)
from accelerate_recipes.ranks import is_first, on_first_of_machine_before_others, on_first_rank, ranks_a_row
from accelerate_recipes.run import Run

FORMATS = (("messages",), ("prompt", "completion"))  # the first column holds the question
# Columns that `rendered` adds, the first two of the types that trl gives them.
RENDERED = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int64")),
    "source": datasets.Value("int64"),
    "opened": TEXT,
}


def load_sides(args: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, datasets.Dataset], list[dict]]:
    """Load the rows to train on and to evaluate on, as `train` and `test`; also return the first training rows as written.

    Raises:
        DataError: for files that cannot be read, and for rows that hold no text or messages.
        ConfigError: for columns that trl cannot use, for conversations without a chat template, for an end that is no token,
            and if a side is empty.
    """
    rows = args.read_rows_for(tokenizer)
    features = rows["train"].features
    columns = next(c for c in (*FORMATS, (args.dataset_text_field,)) if {*c} <= {*features})
    if args.completion_only_loss and "completion" not in columns:
        raise ConfigError(
            f"--completion_only_loss is for rows of prompt and completion; these have {' and '.join(columns)}; remove it: "
            "of messages, the answers alone are trained (--assistant_only_loss)"
        )
    are_chats = any(isinstance(features[name], datasets.List) for name in columns)
    if are_chats and not (tokenizer.chat_template or args.chat_template_path):
        raise ConfigError(
            f"{args.base_model or args.tokenizer_name} has no chat template; give --chat_template_path, such as "
            "recipes/chat_templates/chatml.jinja (docs/sft.md has the whole command)"
        )
    if args.assistant_only_loss == "true" and not are_chats:
        raise ConfigError(
            f"--assistant_only_loss true is for conversations, and the column {columns[-1]} holds texts; remove it"
        )
    if args.eos_token and not args.template_model and args.eos_token not in tokenizer.get_vocab():
        raise ConfigError(
            f"--eos_token {args.eos_token!r} is no token of the tokenizer; add it, with the other marks of the template: "
            f"--new_tokens {args.eos_token!r}"
        )
    if "prompt" not in columns and are_chats != (columns == FORMATS[0]):
        raise ConfigError(
            f"the column {columns[0]} holds {'messages' if are_chats else 'texts'}; lists of messages belong into messages, "
            f"texts into {args.dataset_text_field} (--dataset_text_field)"
        )
    for name, side in rows.items():
        if lost := [column for column in columns if column not in side.column_names]:
            raise ConfigError(
                f"{args.sources[name]} has no column {lost[0]!r}; there are {', '.join(side.column_names)}: give rows to "
                f"evaluate on in the form of those to train on, {' and '.join(columns)}"
            )
        check_texts_or_messages(side, columns, args.sources[name])
    rows = args.without_controls(rows, columns, tokenizer)
    read = {name: select(side, columns, args.sources[name]) for name, side in rows.items()}
    args.check_written(read, columns, tokenizer)
    asked, trained = columns[0], columns if args.completion_only_loss is False else columns[-1:]
    unweighted = [name for name, side in read.items() if has_unweighted(side, trained, args.sources[name])]
    if unweighted and not of_answers(args, features):
        raise ConfigError(
            f"{args.sources[unweighted[0]]} has messages of weight 0, which are no targets, but everything is trained; "
            "remove --assistant_only_loss false and --completion_only_loss false"
        )
    for name, side in read.items() if is_first() else ():
        has_answers = has_chats(side.features) and of_answers(args, side.features)
        if has_answers and (said := missing_answers(side, columns[-1], args.sources[name])):
            print(printable(said), flush=True)
    written = rows["train"].select_columns([name for name in features if name in {*columns, *SETTINGS}])
    first = islice((row for row in written if not args.is_heldout(row, asked)), NUM_COMPARED)
    return args.sides(read, asked), list(first)  # pyright: ignore[reportReturnType]


def has_chats(features: datasets.Features) -> bool:
    """Tell whether rows are conversations, and not texts."""
    return any(isinstance(features.get(name), datasets.List) for name in ("messages", "completion"))


def of_answers(args: Any, features: datasets.Features) -> bool:
    """Tell whether answers alone are targets: by default in conversations, unless prompts are trained too."""
    if args.assistant_only_loss == "auto":
        return has_chats(features) and ("messages" in features or args.completion_only_loss is not False)
    return args.assistant_only_loss == "true"


def check_same_template(run: Run[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a resumed run has the chat template of its checkpoint.

    Raises:
        ConfigError: if it does not.
    """
    checkpoint = run.resumed_from
    known = load_tokenizer(str(checkpoint)).chat_template if checkpoint else None
    if known and str(known) != run.args.template_of(tokenizer):
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


def make_config(run: Run[Any]) -> Any:
    """Make the settings by which trl prepares rows."""
    args = run.args
    # Give trl the folder of the template's model at its pinned commit; by its name, trl would ask the Hub.
    template = str(cache.folder("model", args.template_model)) if args.template_model else args.chat_template_path
    padding = {"pad_to_multiple_of": math.lcm(pad_multiple(args) or 1, ranks_a_row())} if ranks_a_row() > 1 else {}
    # `prepare_sides` finds the answers itself; trl would use another template.
    return trl_config(run, SFTConfig, chat_template_path=template, assistant_only_loss=False, **padding)


def set_up_by_trl(args: Any, config: SFTConfig, model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Give a model trl's forward pass of the loss; set chat template, end and padding of the arguments, as trl would.

    A template may be that of another model, whose tokens are then added to the tokenizer and to the model, by trl. The
    special tokens of the tokenizer are written into the configurations of the model.

    Returns:
        The tokens at which the model stopped before.

    Raises:
        ConfigError: for an end or a padding that is no token, and if adapters would have to train tokens of a template.
    """
    base_stops = stops_of(model.generation_config)
    text, generation = model.config.get_text_config(), model.generation_config
    if config.eos_token is not None:
        check_is_token("eos_token", config.eos_token, tokenizer)
        tokenizer.eos_token = config.eos_token
        text.eos_token_id = end = tokenizer.eos_token_id
        ends = generation.eos_token_id
        ends = ends if isinstance(ends, list) else sorted(stops_of(generation))
        if end not in ends:  # generation may have several
            generation.eos_token_id = [end, *ends]
    if args.template_model:
        num_tokens, num_embeddings = len(tokenizer), model.get_input_embeddings().num_embeddings
        set_seed(args.seed)  # for rows of new tokens
        clone_chat_template(model, tokenizer, config.chat_template_path)
        # Even if the embedding has spare rows for new tokens, these rows mean nothing while they are not trained.
        if args.use_peft and (num_tokens, num_embeddings) != (
            len(tokenizer), model.get_input_embeddings().num_embeddings,
        ):  # fmt: skip
            raise ConfigError(
                f"--chat_template_path {args.chat_template_path} is a model, whose tokens trl adds: the tokenizer had "
                f"{num_tokens:,}, and has {len(tokenizer):,}. --use_peft neither trains nor saves their rows of the "
                "embedding; give the template as a .jinja file"
            )
    elif config.chat_template_path:
        tokenizer.chat_template = Path(config.chat_template_path).read_text(encoding="utf-8")
    padding = config.pad_token or tokenizer.pad_token or tokenizer.eos_token
    check_is_token("pad_token", padding, tokenizer)
    tokenizer.pad_token = padding
    text.pad_token_id = generation.pad_token_id = tokenizer.pad_token_id
    align_special_tokens(model, tokenizer)
    add_fused_lm_head(model, outputs=OUTPUTS)
    return base_stops


def check_is_token(name: str, token: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the value of an argument, or the default in its place, is no token of the tokenizer."""
    if token not in tokenizer.get_vocab():
        raise ConfigError(f"--{name} {token!r} is no token of the tokenizer; give one of its tokens")


@dataclass(kw_only=True)
class SupervisedRows(ReadRows):
    """Rows as the model reads them, and what their preparation knows of the rows to train on.

    `whole` holds these before they are cut or packed, `rendered` the first of them as they were rendered by `settings`;
    `left_out` counts rows of which nothing is trained. The base stops at `base_stops`.
    """

    whole: datasets.Dataset
    rendered: list[Rendering]
    settings: dict[str, Any]
    left_out: int
    base_stops: set[int]

    @property
    def lengths(self) -> np.ndarray | None:
        """Lengths of the rows, if a micro-batch is padded: then it gets rows of similar length."""
        args = self.run.args
        return None if args.packing or args.padding_free else lengths_of(self.train)

    def make_heldout_loader(self) -> RowLoader:
        run = self.run
        place = run.args, run.data_rank, run.data_world_size
        return make_eval_loader(Rows(self.heldout, without_targets), *place, collate_fn=self.collate)


def prepare_sides(
    run: Run[Any],
    config: SFTConfig,
    sides: dict[str, datasets.Dataset],
    tokenizer: PreTrainedTokenizerBase,
    base_stops: set[int],
) -> SupervisedRows:
    """Tokenise conversations ourselves, and texts by trl. Then cut or pack by trl; in between, keep the first rows.

    It also tells of rows that a template makes otherwise than one expects. The base stops at `base_stops`.

    Raises:
        ConfigError: for rows that cannot be rendered, if no row is left, and if a resumed run has other targets.
        DataError: for a token that stands for an image.
    """
    args, prepared, known, added = run.args, {}, {}, 0
    if run.resumed_from:
        check_same_targets(args, sides["train"].features, run.resumed_from)
    completion_only = config.completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= {*sides["train"].column_names}
    for side, rows in sides.items():
        settings = {
            "text_field": config.dataset_text_field,
            "completion_only": completion_only,
            "assistant_only": of_answers(args, rows.features),
            "stops": sorted(base_stops | stops_of(tokenizer)),
        }
        make = partial(
            rendered, features=rows.features, tokenizer=tokenizer, settings=settings, date=args.template_date
        )
        render_all = partial(
            made_of,
            rows,
            make,
            datasets.Features(dict(rows.features) | RENDERED),
            code=(rendering, answer_spans),
            num_proc=config.dataset_num_proc,
            desc=f"Tokenizing rows to {'train' if side == 'train' else 'evaluate'} on",
        )
        with refused_by_trl(), naming_rows(args, tokenizer, **settings):
            whole = on_first_of_machine_before_others(render_all)
        # The number of the row that each is made of, and the prompt that its answer lacks a part of.
        sources, opened = whole.data.column("source").to_numpy(), whole["opened"][:]
        whole = whole.remove_columns(["source", "opened"])
        if not len(whole):
            raise ConfigError(
                f"none of {len(rows):,} rows to {'train' if side == 'train' else 'evaluate'} on has an answer that is a "
                "target, which is a message of the role 'assistant' with a text; give rows with answers, see roles and "
                "weights of the messages, or train everything by --assistant_only_loss false"
            )
        check_no_placeholders(whole, tokenizer, args.base_model)
        if side == "train":
            added = tell_of_parts(run, whole, sources, [prompt for prompt in opened if prompt])
            first: Any = whole.select(range(int((sources < NUM_COMPARED).sum())))
            renderings = [
                Rendering(row["input_ids"], [label != IGNORE_INDEX for label in row["labels"]]) for row in first
            ]
            known = {"whole": whole, "rendered": renderings, "settings": settings}
        is_packed = config.packing if side == "train" or config.eval_packing is None else config.eval_packing
        prepared[side] = on_first_of_machine_before_others(partial(cut_or_packed, config, whole, is_packed))
    check_rows_are_left(sides, prepared, config.max_length)
    left_out = len(sides["train"]) - len(prepared["train"]) + added  # the difference does not show rows that are added
    train, heldout = prepared["train"], prepared["test"]
    collate = make_collator(args, tokenizer.pad_token_id, config.pad_to_multiple_of)
    read = (run, train, heldout, collate, content_of_sides(run, train, heldout))
    return SupervisedRows(*read, **known, left_out=left_out, base_stops=base_stops)


def tell_of_parts(run: Run[Any], whole: datasets.Dataset, sources: np.ndarray, opened: list[str]) -> int:
    """Tell of rows that are cut after an earlier answer, and of answers that lack a part of their prompt, if any.

    `sources` are the numbers of the rows that the rows to train on are made of, `opened` those prompts.

    Returns:
        The number of rows that are cut after an earlier answer.
    """
    added = np.flatnonzero(sources[:-1] == sources[1:])  # the last row of a conversation is the whole one
    if len(added):
        tokens = lengths_of(whole)[added].sum()
        run.print(
            f"The chat template renders some answers otherwise once the conversation goes on: {len(added):,} rows with "
            f"{tokens:,} tokens are added, each cut after such an answer, from {len({*sources[added]}):,} conversations"
        )
    if opened:
        run.print(
            f"The chat template asks for an answer with {opened[0]!r}. In {len(opened):,} rows an answer does not begin "
            "with all of that: the model learns from another prompt than it will get. Give rows with thoughts, or "
            "another template (docs/rows.md)"
        )
    return len(added)


def count_and_compare(
    config: SFTConfig,
    rows: SupervisedRows,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    written: list[dict],
) -> tuple[np.ndarray, dict[str, int]]:
    """Count what is trained, and compare the first rows, which were `written` so, with how the export will render them.

    Returns:
        The number of targets of each row, and other counts to print (see `shown.count_line`).

    Raises:
        ConfigError: if the model would not learn to stop, and if the export would render the rows otherwise.
    """
    exported, whole = as_exported(model, tokenizer), rows.whole
    num_targets, *_ = count_targets_of(rows.train, exported.stops)
    kept = EVERYTHING  # what `bfd_split` and `wrapped` cut off a row is trained as another row
    if config.max_length and not (config.packing and config.packing_strategy != "bfd"):
        at_end = config.truncation_mode == "keep_end" and not config.packing
        kept = slice(-config.max_length, None) if at_end else slice(config.max_length)
    _, num_ended, ends = count_targets_of(whole, exported.stops, kept)
    if num_targets.any() and not num_ended:
        stops = shown_ends(tokenizer, sorted(exported.stops))
        last = next((ids[kept] for ids, targets, _ in rows.rendered if any(targets[kept])), whole[0]["input_ids"])[-2:]
        raise ConfigError(
            f"no row ends with a target at which the model would stop: generation stops at {stops}, the first row ends "
            f"with {tokenizer.decode(last)!r}; name the token that ends an answer by --eos_token (and by --new_tokens, if "
            "the tokenizer does not have it), raise --max_length, or mend the chat template"
        )
    place = rows.run, exported, rows.base_stops
    on_first_rank(lambda: compare_with_rendering(*place, written, rows.rendered, ends, **rows.settings))
    # trl drops rows in which no target is left, but no packed row.
    counts = {"packed from": len(whole)} if config.packing else {"left out": rows.left_out}
    longest = config.max_length if kept != EVERYTHING else None
    return num_targets, {"with an end": num_ended} | counts | cut_at(lengths_of(whole), longest)


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


def rendered(
    table: pa.Table,
    first: int,
    features: datasets.Features,
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    date: str,
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
    targets = np.fromiter(itertools.chain.from_iterable(one.targets for one in renderings), bool)
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
