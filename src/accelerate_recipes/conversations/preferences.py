"""Preferences: pairs of a better and a worse answer, made from rows of several forms; their evaluation; DPO's arguments."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedConfig
from trl import DPOTrainer
from trl.data_utils import maybe_extract_prompt
from trl.trainer.dpo_trainer import DataCollatorForPreference

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.conversations.formats import JUDGED, PAIR, SCORES
from accelerate_recipes.conversations.messages import ANY, CALLS, select
from accelerate_recipes.conversations.objective import SYNC_REFERENCE, Collectives, Objective, Outputs, reference_of
from accelerate_recipes.conversations.settings import TrainerArgs, pad_multiple, trial_of
from accelerate_recipes.conversations.trained_rows import ReadRows
from accelerate_recipes.data.files import check_texts_or_messages
from accelerate_recipes.data.prepared import content_of
from accelerate_recipes.data.tables import is_converted, kind_of
from accelerate_recipes.data.template_values import SETTINGS
from accelerate_recipes.disk import made_once, read_json
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.errors import ConfigError, DataError, that_apply
from accelerate_recipes.life import stop
from accelerate_recipes.models.adapters import load_settings, without_adapters
from accelerate_recipes.models.pretrained import max_positions, model_checksum
from accelerate_recipes.ranks import is_first_of_machine, on_all_ranks, on_first_rank, print_first, sum_over_ranks
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial, config_of, refuse

# Arguments that trl's loss reads as attributes of the trainer.
READ_BY_LOSS = (
    "beta", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing", "use_weighting",
)  # fmt: skip
# Values of --f_divergence_type; of --loss_type, those for which the others than the first are defined; and all.
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
HAVE_DIVERGENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
LOSSES = (*HAVE_DIVERGENCES, "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")


REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")  # columns that the loss reads
READ_BY_REFERENCE = ("prompt_ids", "chosen_ids", "rejected_ids")  # columns that the reference reads


@dataclass
class DPOArgs(TrainerArgs):
    """Arguments of dpo.py, in addition to the fields of DPOConfig. Put it before DPOConfig."""

    per_device_train_batch_size: int = arg(4, "Pairs per forward pass on one process.", min=1)
    total_batch_size: int = arg(32, "Pairs per optimizer step, over all processes and accumulation.", min=1)
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    precompute_ref_log_probs: bool = arg(
        True,
        "Compute the reference's values once, before training, with the model itself; else keep a second model in memory.",
        fixed=False,
        group="memory",
    )

    groups = TrainerArgs.groups | dict.fromkeys(("beta", "loss_type", "label_smoothing"), "task")
    fixed = frozenset({"max_length", "truncation_mode"})
    ranges = (
        TrainerArgs.ranges
        | dict.fromkeys(("beta", "discopop_tau"), Range(above=0))  # they are divisors
        | dict.fromkeys(("f_alpha_divergence_coef", "loss_weights"), Range(min=0))
        | dict.fromkeys(("dataset_num_proc", "precompute_ref_batch_size"), Range(min=1))
        | {"loss_type": LOSSES, "f_divergence_type": DIVERGENCES}
        | {"ld_alpha": Range(min=0, max=1), "label_smoothing": Range(min=0, below=0.5), "max_length": Range(min=2)}
    )
    owned_elsewhere = (
        TrainerArgs.owned_elsewhere
        | dict.fromkeys(SYNC_REFERENCE, "the reference is the model that it begins with")
        | {"padding_free": "remove it: trl's loss of pairs reads padded rows"}
    )

    def problems(self, world_size: int) -> list[str]:
        number, losses = self.total_batch_size // self.per_device_train_batch_size, {*self.loss_type}
        is_divided, by_zero = number > 1, "exo_pair" in losses and not self.label_smoothing
        weights = len(self.loss_weights or self.loss_type)
        undefined = ", ".join(sorted(losses.difference(HAVE_DIVERGENCES)))
        problems = {
            "--loss_type sft has a mean over tokens, --use_weighting weighs the pairs of a micro-batch; "
            "remove one": self.use_weighting and "sft" in losses,
            f"--loss_weights has {weights} numbers, --loss_type {len(self.loss_type)} losses; "
            "give one for each": weights != len(self.loss_type),
            f"--f_divergence_type {self.f_divergence_type} is not defined for --loss_type {undefined}; "
            "leave one of the two out": self.f_divergence_type != DIVERGENCES[0] and undefined,
            "--loss_type exo_pair divides by --label_smoothing, which is 0; give 1e-3, as its paper does": by_zero,
        }
        for name in (name for name in self.loss_type if name in ("aot", "aot_unpaired")):
            problems |= {
                f"--loss_type {name} compares the pairs of a micro-batch, of which a step has {number}: make "
                f"--per_device_train_batch_size {self.total_batch_size}, on one process, or choose another loss": is_divided,
                f"--loss_type {name} sorts the pairs, so --use_weighting would weigh others; remove it": self.use_weighting,
            }
        return super().problems(world_size) + that_apply(problems)


def to_pairs(rows: datasets.Dataset, source: str, min_margin: float) -> datasets.Dataset:
    """Make pairs with `prompt`, `chosen` and `rejected` from rows of two forms.

    Rows with `chosen` and `rejected` are pairs. Without `prompt`, the common beginning of both answers is the prompt. With
    `score_chosen` and `score_rejected` too, pairs whose scores differ by less than `min_margin` are left out.

    Rows with `prompt`, `completion` and `score` hold one judged answer each. The best and the worst answer to a prompt make
    a pair, unless their scores are equal or differ by less than `min_margin`. Answers without a score are left out.

    Pairs of equal answers are left out. The columns `tools` and `chat_template_kwargs` stay, for the chat template.

    Raises:
        ConfigError: for images, and if no pair is left.
        DataError: for values that are not texts, messages, tools or scores.
    """
    columns = set(rows.column_names)
    if columns >= set(JUDGED):
        check_texts_or_messages(rows, JUDGED[:2], source)
        rows = select(with_numbers(rows, JUDGED[2:], source), JUDGED, source)
        # Use `map`: its result lies in a file, so every rank finds the data that trl computes for this result.
        made = PAIR
        asked = {name: rows.features[name] for name in ("prompt", *SETTINGS) if name in rows.column_names}
        features = datasets.Features(asked | dict.fromkeys(PAIR, rows.features["completion"]))
        every = {"batched": True, "batch_size": None, "remove_columns": rows.column_names}
        pairs = rows.map(best_and_worst, fn_kwargs={"min_margin": min_margin}, features=features, **every)
        number = len({json.dumps(prompt) for prompt in rows["prompt"]})
        reason = f"{number - len(pairs):,} of {number:,} prompts have no two answers whose scores differ enough"
    else:
        check_texts_or_messages(rows, PAIR, source)
        are_chats = isinstance(rows.features["chosen"], datasets.List)
        if "prompt" in columns:  # answers may be whole conversations although there is a prompt
            is_chat = isinstance(rows.features["prompt"], datasets.List)
            check_texts_or_messages(rows, ("prompt", *(PAIR if is_chat or not are_chats else ())), source)
        if columns >= set(SCORES):
            rows = with_numbers(rows, SCORES, source)
        rows = select(rows, columns & {"prompt", *PAIR, *SCORES}, source)
        is_scored = columns >= set(SCORES)

        def is_pair(row: dict) -> bool:
            better, worse = (row[name] for name in SCORES) if is_scored else (math.inf, 0)
            is_apart = None not in (better, worse) and not better - worse < min_margin
            return row["chosen"] != row["rejected"] and is_apart

        made = () if isinstance(rows.features.get("prompt"), datasets.List) else ("prompt",)  # of both answers
        features = datasets.Features(rows.features | dict.fromkeys(made, rows.features["chosen"]))
        pairs = rows.filter(is_pair).map(maybe_extract_prompt, features=features)
        number = len(rows)
        reason = f"{number - len(pairs):,} of {number:,} pairs have equal answers, or scores that differ too little"
        if are_chats and not all(prompts := pairs["prompt"][:]):
            numbers = (number for number, row in enumerate(rows, 1) if is_pair(row))
            row = next(number for number, prompt in zip(numbers, prompts, strict=True) if not prompt)
            raise DataError(
                f"{source}, row {row}: the answers are messages, but do not begin with the same one, and there is no "
                "prompt; give the prompt as messages, or remove the row"
            )
        pairs = pairs.remove_columns([name for name in SCORES if name in pairs.column_names])
    if not len(pairs):
        raise ConfigError(
            f"{source} gives no pair of a better and a worse answer: {reason} (--min_score_margin {min_margin})"
        )
    if number > len(pairs):
        print_first(f"{source}: {reason}; they are left out")
    pairs = with_types_of_files(pairs, made)
    return pairs.select_columns([name for name in ("prompt", *PAIR, *SETTINGS) if name in pairs.column_names])


def with_types_of_files(rows: datasets.Dataset, columns: Iterable[str]) -> datasets.Dataset:
    """Give columns of messages as JSON the type that they have in a file, if that is another; checksums depend on it."""
    for name in columns:
        kind = kind_of(rows[name][:]) if rows.features[name] == ANY else pa.null()
        inferred = datasets.Features.from_arrow_schema(pa.schema([(name, kind)]))
        message = getattr(inferred[name], "feature", None)
        if isinstance(message, dict) and not is_converted(kind) and not CALLS & {*message}:
            features = datasets.Features(rows.features | inferred)
            rows = rows.map(lambda row, name: {name: row[name]}, fn_kwargs={"name": name}, features=features)
    return rows


def with_numbers(rows: datasets.Dataset, columns: Iterable[str], source: str) -> datasets.Dataset:
    """Return rows whose score columns hold numbers. In a CSV file, scores are texts; an empty text is no score.

    Whole numbers beside fractions become fractions.

    Raises:
        DataError: for a column that holds other values.
    """
    for column in columns:
        kind = rows.data.column(column).type
        try:
            if pa.types.is_string(kind) or isinstance(kind, pa.JsonType):
                features = datasets.Features(rows.features | {column: datasets.Value("float64")})
                rows = rows.map(read_number, fn_kwargs={"column": column}, features=features)
            elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise ValueError
        except (TypeError, ValueError):
            raise DataError(f"{source}: {column!r} holds {kind}, not numbers") from None
    return rows


def read_number(row: dict, column: str) -> dict[str, float | None]:
    return {column: float(row[column]) if row[column] not in ("", None) else None}


def best_and_worst(rows: dict[str, list], min_margin: float) -> dict[str, list]:
    """Make a pair for each prompt of judged answers, in the order of the prompts; among equal scores the first wins."""
    asked = [name for name in ("prompt", *SETTINGS) if name in rows]
    answers: dict[str, list[tuple]] = {}
    for *question, completion, score in zip(*(rows[name] for name in (*asked, *JUDGED[1:])), strict=True):
        if score is not None and not math.isnan(score):
            answers.setdefault(json.dumps(question), []).append((question, completion, score))
    pairs: dict[str, list] = {name: [] for name in (*asked, *PAIR)}
    for judged in answers.values():
        scores = [score for _, _, score in judged]
        (question, best, most), (_, worst, least) = (judged[scores.index(extreme(scores))] for extreme in (max, min))
        if 0 < most - least >= min_margin:
            for column, value in zip(pairs.values(), (*question, best, worst), strict=True):
                column.append(value)
    return pairs


class PairLoss(Objective, DPOTrainer):
    """trl's loss of pairs. Its reference is the sharded model before its first step, without adapters.

    That needs no more memory than a step. trl's constructor would compute the reference's log-probabilities with a second
    model, of which each forward pass gathers all parameters together under FSDP.
    """

    ref_model: Any = None  # with --precompute_ref_log_probs false

    def __init__(self, args: Any, config: PreTrainedConfig, accelerator: Any):
        super().__init__(args, config, accelerator)
        # What trl's loss reads of the forward pass, see `add_head`.
        self.outputs = ("log_probs", "entropy", "mean_logits", "is_top1") + ("log_sum_sq_probs",) * args.use_weighting
        self.args.max_length = args.max_length or sys.maxsize
        vars(self).update({name: getattr(args, name) for name in READ_BY_LOSS})
        self.precompute_ref_logps = args.precompute_ref_log_probs
        # The parts of --loss_type that are means over pairs; `sft` is one over tokens.
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        pairs = [part for part in zip(args.loss_type, weights, strict=True) if part[0] != "sft"]
        self.loss_types, self.loss_weights = map(list, zip(*pairs, strict=True)) if pairs else ([], [])
        self.weight_of_sft = sum(weights) - sum(self.loss_weights)

    def collator(self, pad_token_id: int) -> DataCollatorForPreference:
        """Make the collator of tokenised pairs: of a batch, all chosen answers come before the rejected ones."""
        kept = {"max_length": self.args.max_length, "truncation_mode": self.args.truncation_mode}
        return DataCollatorForPreference(pad_token_id, pad_to_multiple_of=pad_multiple(self.args), **kept)

    def sum_parts(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum the parts of trl's loss over a micro-batch, each for one of `count_parts`, in nats.

        trl's mean over the pairs becomes a sum. There are two more parts: the mean over the tokens of chosen answers
        (--loss_type sft), and the balance of experts, a single number.
        """
        outputs = Outputs(model)
        loss = self.compute_loss(outputs, {name: value for name, value in batch.items() if name != "row"})
        log_probs, number = outputs.last.log_probs, len(batch["input_ids"]) // 2
        if not self.loss_types:  # `sft` alone: trl's sum of no losses is a plain 0
            loss = torch.zeros_like(log_probs[0, 0])
        parts = [loss * number, -self.weight_of_sft * log_probs[:number].sum(), *self.balances(outputs)]
        return torch.stack([*parts, torch.zeros_like(parts[1])])

    def count_parts(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Count the pairs, the tokens of chosen answers, the micro-batch itself if there are experts, and all tokens."""
        mask = batch["completion_mask"]
        one = torch.ones((), dtype=torch.int64, device=mask.device)
        chosen, _ = mask.chunk(2)
        return torch.stack([one * len(chosen), chosen.sum(), *[one] * self.aux_loss_enabled, mask.sum()])

    def weights(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        _, chosen, *_, tokens = counts
        weights = dict.fromkeys(("logits/chosen", "mean_token_accuracy"), chosen)
        return weights | {"logits/rejected": tokens - chosen, "entropy": tokens}

    def log(self, logs: dict[str, float], *_: Any) -> None:
        """Add the means of what the loss has gathered."""
        gathered = self._metrics["train"]
        logs.update({name: sum(values) / len(values) for name, values in gathered.items()})
        gathered.clear()

    def add_reference(self, run: Run[DPOArgs], rows: ReadRows) -> None:
        """Add the log-probabilities of the reference to all pairs, or make a second model that computes them in each step.

        Even on a resume, the sharded model still has its first weights when this is called.

        Raises:
            Stopped: between two batches.
        """
        if not self.precompute_ref_logps:
            self.ref_model = reference_of(run)
            return
        stop.listen(run.output_dir)
        size, args = self.args.precompute_ref_batch_size, self.args
        run.model.eval()
        # The loader draws a seed for its workers. This must not change the random numbers of training.
        with torch.random.fork_rng([]), without_adapters(run.model):
            rows.train = with_reference(run, self, rows.train, rows.collate, size or args.per_device_train_batch_size)
            size = size or args.per_device_eval_batch_size
            rows.heldout = with_reference(run, self, rows.heldout, rows.collate, size)

    @torch.no_grad()
    def evaluate_pairs(self, model: nn.Module, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Evaluate a model on held-out pairs; `row` of a batch is negative for one that only fills it.

        Returns:
            `loss`: DPO's original loss (`sigmoid`), whatever --loss_type is trained. `accuracy`: share of the pairs in which
            the log-probability of the chosen answer has grown more than that of the rejected one, compared with the
            reference. `margin`: mean of this difference, times beta. `logps_chosen`, `logps_rejected`: mean log-probability
            of the answers, weighted by --ld_alpha.

        Raises:
            Stopped: between two batches.
        """
        sums = torch.zeros(6, device=self.accelerator.device, dtype=torch.float64)
        for batch in batches_to_evaluate(self.accelerator, model, batches):
            is_pair = batch.pop("row") >= 0
            chosen, rejected = self.compute_ref_log_probs(model, batch)
            if self.precompute_ref_logps:
                references = (batch["ref_chosen_logps"], batch["ref_rejected_logps"])
            else:
                references = self.compute_ref_log_probs(self.ref_model, batch)
            margin = self.beta * ((chosen - references[0]) - (rejected - references[1]))
            values = [-functional.logsigmoid(margin), margin > 0, margin, chosen, rejected, torch.ones_like(margin)]
            sums += torch.stack([(value.double() * is_pair).sum() for value in values])
        *means, count = sum_over_ranks(sums).tolist()
        names = ("loss", "accuracy", "margin", "logps_chosen", "logps_rejected")
        return {name: value / count for name, value in zip(names, means, strict=True)}


def with_reference(
    run: Run[Any], loss: Any, rows: datasets.Dataset, collate: Callable, batch_size: int
) -> datasets.Dataset:
    """Add the columns REFERENCE to all pairs, from the file beside the rows, or computed by the run's sharded model.

    All ranks take the same values: those of the first rank whose machine has the file, else all compute together. Then each
    machine has the file.

    Raises:
        Stopped: between two batches.
    """
    content = content_of(rows, READ_BY_REFERENCE)
    key = on_first_rank(lambda: xxhash.xxh3_128_hexdigest(repr((content, what_decides(run, loss.args))).encode()))
    folder = Path(rows.cache_files[0]["filename"]).parent if rows.cache_files else None  # none: rows in memory
    file = folder / f"reference-{key}.json" if folder else None
    values = kept_values(file, len(rows)) if file else None
    is_here = on_all_ranks(values is not None)
    if any(is_here):
        shared = [values]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, src=is_here.index(True))
        known: Any = shared[0]
    else:
        known = compute(run, loss, rows, collate, batch_size)
    if file and values is None and is_first_of_machine():
        keep_values(file, known)
    features = datasets.Features(dict.fromkeys(REFERENCE, datasets.Value("float32")))
    columns = datasets.Dataset.from_dict(dict(zip(REFERENCE, known, strict=True)), features)
    return datasets.concatenate_datasets([rows, columns], axis=1)


def what_decides(run: Run[Any], args: Any) -> list:
    """List what decides the values besides the tokens of the pairs.

    The division into batches is none of it: it changes last bits, and a run goes on with the same values on any number of
    ranks.
    """
    settings = load_settings(args)
    quantization = settings.get("quantization_config")
    return [
        model_checksum(args.base_model or ""),
        str(settings["dtype"]),
        quantization and quantization.to_dict(),
        run.accelerator.mixed_precision,
        run.accelerator.device.type,
        run.accelerator.unwrap_model(run.model).config._attn_implementation,
        args.max_length,
        args.truncation_mode,
        args.ld_alpha,
        *(metadata.version(name) for name in ("torch", "transformers", "trl")),
    ]


def kept_values(file: Path, number: int) -> list[list[float]] | None:
    """Read the values of `number` pairs; None if the file is not here, or is not whole."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        values = read_json(file)
        return values if [len(column) for column in values] == [number] * len(REFERENCE) else None
    return None


def keep_values(file: Path, values: list[list[float]]) -> None:
    """Write the values for later runs; say so if the folder cannot be written to, as one that others prepared."""
    try:
        file.unlink(missing_ok=True)  # one that is not whole
        made_once(file, lambda partial: partial.write_text(json.dumps(values), encoding="utf-8"))
    except OSError as error:
        print(f"The reference's values are not kept, so that a later run computes them again: {error}", flush=True)


def compute(run: Run[Any], loss: Any, rows: datasets.Dataset, collate: Callable, batch_size: int) -> list[list[float]]:
    """Compute the values of all pairs, on all ranks together: those of the chosen and those of the rejected answers."""
    accelerator, args = run.accelerator, run.args
    how = {"num_workers": args.dataloader_num_workers, "pin_memory": accelerator.device.type == "cuda"}
    loader: Any = DataLoader(rows, batch_size, collate_fn=collate, **how)  # pyright: ignore[reportArgumentType]
    log_probs, batches = [], accelerator.prepare(loader)
    for batch in tqdm(batches, desc="Log-probabilities of the reference", disable=None if run.is_first else True):
        stop.raise_if_requested(accelerator)
        values = torch.stack(loss.compute_ref_log_probs(run.model, batch), 1)
        log_probs.append(accelerator.gather_for_metrics(values).float().cpu())
    return torch.cat(log_probs).T.tolist()


def preference_trial(args: Any) -> Trial:
    """Make the trial of a DPO run: trl's own loss, on pairs whose longer answer with its prompt has --max_length tokens.

    The reference before training needs no more memory: the same model computes the same rows, without gradients.

    Raises:
        NotSimulatedError: for settings that change the step, or with which the reference may need more than the step.
    """
    rows = args.per_device_train_batch_size
    others = {
        "--max_length none": not args.max_length,
        f"--precompute_ref_batch_size {args.precompute_ref_batch_size}": (args.precompute_ref_batch_size or 0) > rows,
    }
    refuse("DPO", others)
    config = config_of(args)
    loss = PairLoss(args, config, Collectives())
    length = min(loss.args.max_length, max_positions(config))  # longer pairs are refused
    pair = {"prompt_ids": [0], "chosen_ids": [0] * (length - 1), "rejected_ids": [0] * (length - 2)}
    batch = loss.collator(0)([pair | dict.fromkeys(REFERENCE, 0.0)] * rows)
    batch["completion_mask"][:, 1:] = 1  # the largest possible number of targets
    keep = None if args.precompute_ref_log_probs else partial(setattr, loss, "ref_model")
    return trial_of(args, config, loss, batch, 2 * rows * (length - 1), keep_reference=keep)
