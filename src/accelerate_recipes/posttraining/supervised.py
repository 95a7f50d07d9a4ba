"""Supervised fine-tuning: rows from their files to what the model reads, and the loss that trains them.

The loss is computed by the forward pass that trl gives a model: log-probabilities without whole logits.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from accelerate_recipes.checkpoint.exported import Exported, as_exported, shown_ends, stops_of
from accelerate_recipes.data.chats import check_written, without_controls
from accelerate_recipes.data.dates import frozen_date
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.messages import NUM_COMPARED, TEXT, has_unweighted, missing_answers, select
from accelerate_recipes.data.passes import chosen_rows, made_of, rows_in
from accelerate_recipes.data.prepared import chunks_of, lengths_of
from accelerate_recipes.data.rendering import Rendering, render_read, texts_read
from accelerate_recipes.data.rows import RowLoader, Rows, make_eval_loader
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.errors import ConfigError, printable
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.metrics import Flops, flops_per_token
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.configurations import new_config
from accelerate_recipes.posttraining.settings import OUTPUTS, pad_multiple, weight_of_balance, with_fused_head
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
    without_targets,
)
from accelerate_recipes.ranks import is_first, on_first_of_machine_before_others, on_first_rank, sum_over_ranks
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial, config_of, refuse

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

    `num_read` has the number of rows of each side before they were rendered, `num_targets` the number of targets of each
    row to train on; `counts` are to be printed, see `shown.count_line`.
    """

    num_read: dict[str, int]
    num_targets: np.ndarray
    counts: dict[str, int]

    @property
    def lengths(self) -> np.ndarray | None:
        """Lengths of the rows, if a micro-batch is padded: then it gets rows of similar length."""
        args = self.run.args
        return None if args.packing or args.padding_free else lengths_of(self.train)

    def make_heldout_loader(self) -> RowLoader:
        run = self.run
        place = run.args, run.data_rank, run.data_world_size
        return make_eval_loader(Rows(self.heldout, without_targets), *place, collate_fn=self.collate)


def prepare_supervised(
    run: Run[Any], config: SFTConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: set[int]
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
    completion_only = config.completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= {*sides["train"].column_names}
    how = {"text_field": config.dataset_text_field, "completion_only": completion_only, "stops": sorted(stops)}
    settings = {side: how | {"assistant_only": of_answers(args, rows.features)} for side, rows in sides.items()}
    whole, prepared, first, added = {}, {}, [], 0
    for side, rows in sides.items():
        found = render_side(run, side, rows, tokenizer, settings[side])
        if side == "train":
            sources = found.data.column("source").to_numpy()
            added = tell_of_parts(run, found, sources)
            first = [as_rendered(row) for row in found.select(range(int((sources < NUM_COMPARED).sum())))]
        whole[side] = found.remove_columns(["source", "opened"])
        is_packed = config.packing if side == "train" or config.eval_packing is None else config.eval_packing
        prepared[side] = on_first_of_machine_before_others(partial(cut_or_packed, config, whole[side], is_packed))
    check_rows_are_left(sides, prepared, config.max_length)
    train, heldout = prepared["train"], prepared["test"]
    content = content_of_sides(run, train, heldout)
    exported = as_exported(model, tokenizer)
    num_targets, *_ = count_targets_of(train, exported.stops)
    num_ended, ends = ends_of(config, whole["train"], first, exported) if num_targets.any() else (0, set())
    place = run, exported, base_stops
    on_first_rank(lambda: compare_with_rendering(*place, written, first, ends, **settings["train"]))
    # trl drops rows in which no target is left, but no packed row. The numbers of rows do not show rows that are added.
    left_out = {"left out": len(sides["train"]) - len(train) + added}
    counts = {"with an end": num_ended} | ({"packed from": len(whole["train"])} if config.packing else left_out)
    counts |= cut_at(lengths_of(whole["train"]), config.max_length if kept_part(config) != EVERYTHING else None)
    num_read = {side: len(rows) for side, rows in sides.items()}
    collate = make_collator(args, tokenizer.pad_token_id, config.pad_to_multiple_of)
    counted = {"num_read": num_read, "num_targets": num_targets, "counts": counts}
    return SupervisedRows(run, train, heldout, collate, content, **counted)


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
    columns = next(c for c in (*FORMATS, (args.dataset_text_field,)) if {*c} <= {*features})
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
        read[name] = side = select(rows[name], columns, source)
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
    if not len(found):
        raise ConfigError(
            f"none of {len(rows):,} {use} has an answer that is a target, which is a message of the role "
            "'assistant' with a text; give rows with answers, see roles and weights of the messages, or train everything by "
            "--assistant_only_loss false"
        )
    check_no_placeholders(found, tokenizer, run.args.base_model)
    return found


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


def cut_or_packed(config: SFTConfig, whole: datasets.Dataset, is_packed: bool) -> datasets.Dataset:
    """Pack rows, or cut them and leave out those that have no target then, as trl does."""
    if is_packed:
        rows = whole.select_columns(["input_ids", "labels"])
        rows = rows.shuffle(seed=config.seed) if config.shuffle_dataset else rows
        rows = pack_dataset(rows, config.max_length, config.packing_strategy, {"desc": "Packing rows"})
    elif longest := config.max_length:
        rows = whole
        if (lengths_of(whole) > longest).any():
            at_end = config.truncation_mode == "keep_end"
            rows = made_of(
                whole, partial(cut_tokens, longest=longest, at_end=at_end), whole.features, desc="Cutting rows"
            )
        rows = chosen_rows(rows, have_targets(rows))
    else:
        rows = whole
    return rows.shuffle(seed=config.seed) if config.shuffle_dataset else rows


def cut_tokens(table: pa.Table, first: int, longest: int, at_end: bool) -> pa.Table:
    """Cut the tokens of rows to the first `longest`, or to the last."""
    for name in ("input_ids", "labels"):
        column = table.column(name).combine_chunks()
        lengths, tokens = np.asarray(column.value_lengths()), np.asarray(column.flatten())
        kept = np.minimum(lengths, longest)
        begins, offsets = (
            np.cumsum(lengths) - kept * at_end - lengths * (not at_end),
            np.cumsum([0, *kept], dtype=np.int32),
        )
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], kept)
        cut_column = pa.ListArray.from_arrays(offsets, tokens[places])
        table = table.set_column(table.column_names.index(name), name, cut_column)
    return table


def kept_part(config: SFTConfig) -> slice:
    """Return the part of each row that is trained; what `bfd_split` and `wrapped` cut off is trained as another row."""
    if not config.max_length or (config.packing and config.packing_strategy != "bfd"):
        return EVERYTHING
    at_end = config.truncation_mode == "keep_end" and not config.packing
    return slice(-config.max_length, None) if at_end else slice(config.max_length)


def as_rendered(row: dict) -> Rendering:
    return Rendering(row["input_ids"], [label != IGNORE_INDEX for label in row["labels"]])


def ends_of(
    config: SFTConfig, whole: datasets.Dataset, first: list[Rendering], exported: Exported
) -> tuple[int, set[int]]:
    """Count the rows that end with a target at which the exported model stops; also return these tokens.

    Raises:
        ConfigError: if there are none: the model would not learn to stop.
    """
    kept = kept_part(config)
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


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the model in a batch. If ranks share rows, labels are shifted to where they are predicted."""
    inputs = {name: value for name, value in batch.items() if name not in ("row", "row_position_ids")}
    if "sequence_group" in batch:
        inputs["shift_labels"] = inputs.pop("labels")[:, 1:]
    return inputs | {"use_cache": False, "fused_lm_head": True}


def nll_sum(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Sum the negative log-likelihood of the targets, in nats."""
    return -model(**inputs_of(batch)).log_probs.sum()


class SupervisedLoss:
    """Loss that trains: of the targets, by --loss_type, and of the balance of experts, if the model has any.

    It keeps the sums of what is logged: entropy, share of the targets that the model finds most probable, and balance.
    """

    def __init__(self, args: Any, config: PreTrainedConfig):
        self.is_dft = args.loss_type == "dft"
        self.balance = weight_of_balance(config, args.router_aux_loss_coef)
        self.router = {"output_router_logits": True} if self.balance else {}
        self.measured: list[torch.Tensor] = []  # of the micro-batches since the last log line

    def sum_parts(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of the loss over a micro-batch, each for one of `count_parts`, in nats."""
        found: Any = model(**inputs_of(batch), **self.router)
        losses = -found.log_probs  # 0 where there is no target
        if self.is_dft:
            losses = losses * found.log_probs.exp().detach()
        one = torch.ones((), device=losses.device)
        balance = [found.aux_loss] if self.balance else []
        measured = [found.label_mask.sum(), found.entropy.sum(), found.is_top1.sum(), one, *balance]
        self.measured.append(torch.stack([value.detach().double() for value in measured]))
        return torch.stack([*(self.balance * loss for loss in balance), losses.sum()])

    def count_parts(self, batch: dict[str, Any]) -> torch.Tensor:
        """Count the micro-batch itself if there are experts, and the targets."""
        num_targets = count_next_tokens(batch)
        return torch.stack([*[torch.ones_like(num_targets)] * bool(self.balance), num_targets])

    def mark(self) -> Callable[[], None]:
        """Return a function that forgets the micro-batches from here on."""
        number = len(self.measured)
        return lambda: self.measured.__delitem__(slice(number, None))

    def values(self, step: int) -> dict[str, float]:
        """Return the means over the targets since the last log line, and the mean balance of the micro-batches."""
        if not self.measured:  # all steps were left out
            return {}
        sums, self.measured = sum_over_ranks(torch.stack(self.measured).sum(0)).tolist(), []
        targets, entropy, most_probable, number, *balance = sums
        means = {"entropy": entropy / max(targets, 1), "mean_token_accuracy": most_probable / max(targets, 1)}
        return means | ({"aux_loss": balance[0] / number} if balance else {})


def make_collator(args: Any, pad_token_id: int, multiple: int | None) -> DataCollatorForLanguageModeling:
    """Make trl's collator. The lengths of its batches are multiples of `multiple`, if there is one."""
    return DataCollatorForLanguageModeling(
        pad_token_id=pad_token_id, padding_free=args.has_boundaries, pad_to_multiple_of=multiple
    )


def flops_of_rows(args: Any, rows: Any, num_targets: int) -> Callable[[PreTrainedModel], Flops]:
    """Return a function that counts the training FLOPs of a model per target of the prepared rows, for MFU."""
    documents = lengths_of(rows)
    if "seq_lengths" in rows.column_names:
        documents = np.concatenate([values for _, values in chunks_of(rows, "seq_lengths")])
    tokens, squares = documents.sum(), np.square(documents, dtype=float).sum()
    row_length = args.max_length if args.packing else 0

    def flops_fn(model: PreTrainedModel) -> Flops:
        a_token = flops_per_token(model, squares / tokens, row_length)
        attended, full_rows = (number * tokens / max(1, num_targets) for number in a_token)
        return Flops(attended, full_rows if row_length else None)

    return flops_fn


def supervised_trial(args: Any) -> Trial:
    """Make the trial of an SFT run: the run's own loss, on rows of --max_length tokens by trl's own collator.

    Raises:
        NotSimulatedError: for settings that change the step.
    """
    others = {
        "--max_length none": not args.max_length,
        "--packing_strategy wrapped": args.packing and args.packing_strategy == "wrapped",
        "--new_tokens": args.new_tokens,
        f"--loss_type {args.loss_type}": args.loss_type != "nll",
    }
    refuse("SFT", others)
    config = new_config(args, max_length=args.max_length) if args.from_scratch else config_of(args)
    dtype = load_settings(args)["dtype"]
    attention, _ = choose(args.attn_implementation, config, dtype, args.has_boundaries)
    loss = SupervisedLoss(args, config)
    length, rows = args.max_length, args.per_device_train_batch_size
    row, shorter = {"input_ids": [0] * length}, {"input_ids": [0] * (length - 1)}
    if args.has_boundaries:
        row["seq_lengths"] = [length - 1, 1]
    collate = make_collator(args, 0, pad_multiple(args))
    batch = collate([row] * rows if args.has_boundaries or rows == 1 else [*[row] * (rows - 1), shorter])
    if rows == 1 and batch.pop("attention_mask", None) is not None:  # one row has no padding, and attention no mask
        batch["position_ids"] = torch.arange(length)[None]
    return Trial(
        config,
        partial(with_fused_head, attn_implementation=attention, dtype=dtype, outputs=OUTPUTS),
        loss.sum_parts,
        loss.count_parts,
        batch,
        rows * (length - 1),
    )
