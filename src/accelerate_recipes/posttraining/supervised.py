"""Supervised fine-tuning by trl: the targets are shown, counted, and compared with the rendering of the export."""

import copy
import inspect
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from accelerate_recipes.checkpoint.check_export import Exported, as_exported, stops_of
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
from accelerate_recipes.data.dates import frozen_date, with_date_as_key
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.prepared import chunks_of, lengths_of
from accelerate_recipes.data.rendering import NUM_SHOWN, SETTINGS, Rendering, render_read, shown_ends
from accelerate_recipes.data.rows import StepOrder, num_steps
from accelerate_recipes.errors import ConfigError, DataError, printable
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.metrics import Flops, flops_per_token
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.composites import placeholders, stands_for_image
from accelerate_recipes.models.configurations import new_config
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.posttraining.objective import Objective, Outputs, bare
from accelerate_recipes.posttraining.settings import pad_multiple, with_fused_head
from accelerate_recipes.ranks import is_first, on_first_of_machine_before_others, on_first_rank
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


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the model in a batch. If ranks share rows, labels are shifted to where they are predicted."""
    inputs = {name: value for name, value in batch.items() if name not in ("row", "row_position_ids")}
    if "sequence_group" in batch:
        inputs["shift_labels"] = inputs.pop("labels")[:, 1:]
    return inputs


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


class SupervisedTrainer(Objective, SFTTrainer):
    """trl's SFTTrainer, which checks before training that the export will render the rows as they are trained.

    `source_rows` are the first training rows, as they were written.
    """

    ended = ("completion",)
    order_class = StepOrder

    def __init__(self, run: Run[Any], *args: Any, source_rows: list[dict], **settings: Any):
        self.source_rows = source_rows
        if run.resumed_from:
            check_same_targets(run.args, settings["train_dataset"].features, run.resumed_from)
        super().__init__(run, *args, **settings)

    def _prepare_dataset(
        self, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, config: SFTConfig, packing: bool, _, name: str
    ) -> datasets.Dataset:
        """Tokenise conversations ourselves, and texts by trl. Then cut or pack by trl; in between, keep the first rows."""
        whole_rows = copy.copy(config)  # for texts
        whole_rows.max_length, whole_rows.shuffle_dataset = None, False
        settings = {
            "text_field": config.dataset_text_field,
            "completion_only": self.completion_only_loss,
            "assistant_only": of_answers(self.run.args, rows.features),
            "stops": sorted(self.base_stops | stops_of(tokenizer)),
        }
        # Of each row to train on: the number of the row that it is made of, and the prompt that its answer lacks a part of.
        sources, opened = np.arange(len(rows)), []
        date = self.run.args.template_date
        rows = with_date_as_key(rows, date)
        if has_chats(rows.features):
            # `datasets` finds its result again by the name of our function, and would not see that its code has changed.
            code = "".join(map(inspect.getsource, (rendering, answer_spans)))
            render_all = partial(
                rows.map,
                rendered,
                with_indices=True,
                batched=True,
                fn_kwargs={"tokenizer": tokenizer, "settings": settings, "code": code},
                features=datasets.Features(dict(rows.features) | RENDERED),
                num_proc=config.dataset_num_proc,
                desc=f"Tokenizing {name} dataset",
            )
            with frozen_date(date), self.naming_rows(tokenizer, **settings):
                whole: Any = on_first_of_machine_before_others(render_all)
            sources, opened = np.array(whole["source"][:], int), whole["opened"][:]
            whole = whole.remove_columns(["source", "opened"])
        else:
            whole = super()._prepare_dataset(rows, tokenizer, whole_rows, False, None, name)
        if not len(whole):
            raise ConfigError(
                f"none of {len(rows):,} rows to {'train' if name == 'train' else 'evaluate'} on has an answer that is a "
                "target, which is a message of the role 'assistant' with a text; give rows with answers, see roles and "
                "weights of the messages, or train everything by --assistant_only_loss false"
            )
        check_no_placeholders(whole, tokenizer, self.run.args.base_model)
        if name == "train":
            self.whole, self.settings = whole, settings
            self.tell_of_parts(sources, [prompt for prompt in opened if prompt])
            first = whole.select(range(int((sources < NUM_COMPARED).sum())))
            self.first = [
                Rendering(row["input_ids"], [label != IGNORE_INDEX for label in row["labels"]]) for row in first
            ]
            self.kept = EVERYTHING  # of each row: the parts that `bfd_split` and `wrapped` cut off become other rows
            if config.max_length and not (packing and config.packing_strategy != "bfd"):
                at_end = config.truncation_mode == "keep_end" and not packing
                self.kept = slice(-config.max_length, None) if at_end else slice(config.max_length)
        return super()._prepare_dataset(whole, tokenizer, config, packing, None, name)  # pyright: ignore[reportReturnType]

    def tell_of_parts(self, sources: np.ndarray, opened: list[str]) -> None:
        """Tell of rows that are cut after an earlier answer, and of answers that lack a part of their prompt, if any.

        `sources` are the numbers of the rows that the rows to train on are made of, `opened` those prompts.
        """
        added = np.flatnonzero(sources[:-1] == sources[1:])  # the last row of a conversation is the whole one
        self.counts["left out"] += len(added)  # the difference of the numbers of rows does not show these
        if len(added):
            tokens = lengths_of(self.whole)[added].sum()
            self.run.print(
                f"The chat template renders some answers otherwise once the conversation goes on: {len(added):,} rows with "
                f"{tokens:,} tokens are added, each cut after such an answer, from {len({*sources[added]}):,} conversations"
            )
        if opened:
            self.run.print(
                f"The chat template asks for an answer with {opened[0]!r}. In {len(opened):,} rows an answer does not begin "
                "with all of that: the model learns from another prompt than it will get. Give rows with thoughts, or "
                "another template (docs/rows.md)"
            )

    def sum_parts(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of trl's loss over a micro-batch, each for one of `count_parts`, in nats."""
        outputs = Outputs(model)
        loss = self.compute_loss(outputs, inputs_of(batch), num_items_in_batch=1)
        return torch.stack([*self.balances(outputs), loss])

    def count_parts(self, batch: dict[str, Any]) -> torch.Tensor:
        """Count the micro-batch itself if there are experts, and the targets."""
        num_targets = count_next_tokens(batch)
        return torch.stack([*[torch.ones_like(num_targets)] * self.aux_loss_enabled, num_targets])

    def weights(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("entropy", "mean_token_accuracy"), counts[-1])

    def num_steps(self) -> int:
        return num_steps(self.run.args, len(self.train_dataset))

    def examine(self) -> tuple[np.ndarray, dict[str, int]]:
        exported = as_exported(self.model, self.processing_class)
        num_targets, *_ = count_targets_of(self.train_dataset, exported.stops)
        self.count_flops(num_targets.sum())
        _, num_ended, ends = count_targets_of(self.whole, exported.stops, self.kept)
        if num_targets.any() and not num_ended:
            stops = shown_ends(self.processing_class, sorted(exported.stops))
            kept = (ids[self.kept] for ids, targets, _ in self.first if any(targets[self.kept]))
            last = next(kept, self.whole[0]["input_ids"])[-2:]
            raise ConfigError(
                f"no row ends with a target at which the model would stop: generation stops at {stops}, the first row ends "
                f"with {self.processing_class.decode(last)!r}; name the token that ends an answer by --eos_token (and by "
                "--new_tokens, if the tokenizer does not have it), raise --max_length, or mend the chat template"
            )
        on_first_rank(lambda: self.compare(exported, ends))
        longest = self.args.max_length if self.kept != EVERYTHING else None
        # trl drops rows in which no target is left, but no packed row.
        counts = {"packed from": len(self.whole)} if self.args.packing else self.counts
        counts |= cut_at(lengths_of(self.whole), longest)
        return num_targets, {"with an end": num_ended} | counts

    def count_flops(self, num_targets: int) -> None:
        """Set the FLOP counter for MFU; if rows are padded, put rows of similar length into a micro-batch."""
        lengths = documents = lengths_of(self.train_dataset)
        if "seq_lengths" in self.train_dataset.column_names:
            documents = np.concatenate([values for _, values in chunks_of(self.train_dataset, "seq_lengths")])
        if not (self.args.packing or self.args.padding_free):
            self.lengths = lengths
        tokens, squares = documents.sum(), np.square(documents, dtype=float).sum()
        row_length = self.args.max_length if self.args.packing else 0

        def flops_fn(model: PreTrainedModel) -> Flops:
            a_token = flops_per_token(model, squares / tokens, row_length)
            attended, full_rows = (number * tokens / max(1, num_targets) for number in a_token)
            return Flops(attended, full_rows if row_length else None)

        self.flops_fn = flops_fn

    def compare(self, exported: Exported, ends: set[int]) -> None:
        """Compare the first rows with their rendering by the export, and keep them for the export.

        Raises:
            ConfigError: if the rows and the rendering differ.
        """
        self.compare_with_export(exported, self.first_rows(self.source_rows, self.first, ends, **self.settings))


def rendered(
    rows: dict[str, list],
    numbers: list[int],
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    code: str = "",
) -> dict[str, list]:
    """Render a batch of conversations. Return their columns and those of RENDERED, once for each row to train on.

    `code` is that of the modules which render: it only makes another key for the cache.
    """
    found: dict[str, list] = {name: [] for name in (*rows, *RENDERED)}
    for place, number in enumerate(numbers):
        row = {name: values[place] for name, values in rows.items()}
        for ids, targets, opened in render_read(row, tokenizer, **settings):
            labels = [token if target else IGNORE_INDEX for token, target in zip(ids, targets, strict=True)]
            made = {"input_ids": ids, "labels": labels, "source": number, "opened": opened}
            for name, value in (row | made).items():
                found[name].append(value)
    return found


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
    trainer = bare(SupervisedTrainer, args, config)
    length, rows = args.max_length, args.per_device_train_batch_size
    row, shorter = {"input_ids": [0] * length}, {"input_ids": [0] * (length - 1)}
    if args.has_boundaries:
        row["seq_lengths"] = [length - 1, 1]
    collator = DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=args.has_boundaries, pad_to_multiple_of=pad_multiple(args)
    )
    batch = collator([row] * rows if args.has_boundaries or rows == 1 else [*[row] * (rows - 1), shorter])
    if rows == 1 and batch.pop("attention_mask", None) is not None:  # one row has no padding, and attention no mask
        batch["position_ids"] = torch.arange(length)[None]
    return Trial(
        config,
        partial(
            with_fused_head, attn_implementation=attention, dtype=dtype, outputs=("log_probs", "entropy", "is_top1")
        ),
        trainer.sum_parts,
        trainer.count_parts,
        batch,
        rows * (length - 1),
    )
