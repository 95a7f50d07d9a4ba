"""Distillation: a model, the student, learns the probabilities that another model, the teacher, gives each next token.

The divergence is a sum over tokens, by trl's kernel, which makes no whole logits. It is computed on answers of the rows, or
on answers that the student draws.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.kernels import chunked_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.drawing_trial import draw_answers
from accelerate_recipes.conversations.exported import as_exported
from accelerate_recipes.conversations.heads import check_hidden_suffices
from accelerate_recipes.conversations.packed import cut
from accelerate_recipes.conversations.prompts import (
    HeldoutAnswers,
    PromptArgs,
    compare_prompts,
    draw_texts,
    end_of_prompt,
    load_prompts,
    room_for_prompts,
    tokenize_prompts,
)
from accelerate_recipes.conversations.rewards import load_rewards, reward_problems, tell_of_rewards
from accelerate_recipes.conversations.settings import AnswerArgs, check_documents, stops_of_run, trial_model
from accelerate_recipes.conversations.supervised import SupervisedRows, prepare_supervised
from accelerate_recipes.conversations.supervised_loss import make_collator, supervised_trial
from accelerate_recipes.conversations.trained_rows import USES, content_of_sides, tell_of_prompts, without_targets
from accelerate_recipes.data.rows import Rows, make_eval_loader
from accelerate_recipes.engine import batches_to_evaluate, to_device
from accelerate_recipes.errors import ConfigError, that_apply
from accelerate_recipes.losses import TILE_ON_CPU, TILES, Gathered, count_next_tokens
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.generation import KEPT, Sampling, tell_left_out
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.models.probes import unwrapped
from accelerate_recipes.models.weights import seed_of
from accelerate_recipes.ranks import data_world_size, local_main_process_first, on_all_data_ranks, on_first_rank
from accelerate_recipes.report.samples import Samples
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial, config_of, refuse

DIVERGENCES = {"forward_kl": 0.0, "reverse_kl": 1.0}  # names in the log, and values of --beta

chunked_divergence.TOKEN_CHUNK_SIZE = TILES[chunked_divergence.__name__] if torch.cuda.is_available() else TILE_ON_CPU


@dataclass
class DistillArgs(AnswerArgs, PromptArgs):
    """Arguments about teacher and answers. Put it before trl's SFTConfig, which has those about rows."""

    teacher_model_name_or_path: str = arg("", "Model to learn from: a name on the Hub, or a folder.", group="essential")
    beta: float = arg(
        1.0, "Divergence: 0 is forward KL, 1 reverse KL, between them Jensen-Shannon.", min=0, max=1, fixed=False
    )
    lmbda: float = arg(
        1.0, "Share of the answers that the student draws; the others are those of the rows.", min=0, max=1, fixed=False
    )
    temperature: float = arg(
        1.0, "Temperature of drawn answers, and of both models' probabilities in the loss.", min=1e-4, fixed=False
    )
    max_completion_length: int = arg(512, "Longest answer to draw, in tokens.", min=1, group="essential")
    num_eval_prompts: int = arg(
        256, "Held-out prompts to which each evaluation draws answers; 0: all.", fixed=False, min=0, group="rare"
    )
    rewards: list[str] = arg(
        [],
        "Rewards that measure drawn held-out answers, as of grpo.py: FILE.py:FUNCTION, whose code is run.",
        fixed=False,
    )
    chat_template_kwargs: str = arg(
        "",
        "Settings of the chat template for rows of prompts alone, as JSON, such as '{\"enable_thinking\": false}'.",
        group="rare",
    )
    num_samples: int = arg(
        8, "Number of answers that samples.html shows of an evaluation.", fixed=False, min=0, group="rare"
    )
    disable_dropout: bool = arg(True, "Train without dropout.", fixed=False, group="rare")

    fixed = frozenset({
        "chat_template_path", "dataset_text_field", "eos_token", "max_length", "truncation_mode", "completion_only_loss",
    })  # fmt: skip
    owned_elsewhere = AnswerArgs.owned_elsewhere | dict.fromkeys(
        ("packing", "packing_strategy", "padding_free", "eval_packing", "shuffle_dataset", "loss_type",
         "router_aux_loss_coef"),
        "remove it: rows are padded, and the divergence from the teacher is the whole loss",
    )  # fmt: skip
    reward_weights = None  # each has the weight 1

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size)
        if not self.teacher_model_name_or_path:
            problems.append(
                "--teacher_model_name_or_path is missing: a name on the Hub, or a folder such as outputs/demo/export"
            )
        return problems + (reward_problems(self.rewards, self.elsewhere) if self.rewards else [])


# Teacher


def check_vocabularies(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, names: Sequence[str]
) -> None:
    """Check that student and teacher have the same tokens, by their ids. Rows of padding in their weights do not matter.

    Raises:
        ConfigError: names the first token that differs.
    """
    ours, theirs = ({number: token for token, number in one.get_vocab().items()} for one in (student, teacher))
    different = [number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number)]
    if different:
        first = min(different)
        one, other = (f"{tokens.get(first)!r} in {name}" for tokens, name in zip((ours, theirs), names, strict=True))
        raise ConfigError(
            f"the student has {len(ours):,} tokens, the teacher {len(theirs):,}, and {len(different):,} differ: token "
            f"{first} is {one}, and {other}. The teacher must judge the student's tokens; give one with the same tokenizer"
        )


def frozen_args(args: Any) -> Any:
    """Return arguments that load the teacher: in the precision in which it computes, as a base that is not trained."""
    frozen = copy.copy(args)
    frozen.model_name_or_path, frozen.use_peft, frozen.load_in_4bit = args.teacher_model_name_or_path, True, False
    return frozen


# Loss


class Head(NamedTuple):
    """Hidden states (N, H) from which the targets of a batch are predicted, and weight and bias of the output layer."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def first_tokens(self, number: int) -> "Head":
        """Return the head without the rows behind the first `number`."""
        if len(self.weight) == number:
            return self
        return Head(self.hidden, self.weight[:number], None if self.bias is None else self.bias[:number])


def with_access(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model a forward pass that, called with `at_head`, returns what `at_head(hidden states, output layer)` does.

    FSDP has gathered the output layer there, and reduces its gradient; see trl's `add_fused_lm_head`.
    """
    forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def read(self: Any, *args: Any, at_head: Callable | None = None, **inputs: Any) -> Any:
        if at_head is None:
            return forward(*args, **inputs)
        return at_head(self.base_model(**inputs, use_cache=False).last_hidden_state, self.get_output_embeddings())

    model.forward = MethodType(read, model)
    return model


def behind_head(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the factor of a model's logits, and the cap of them, behind its output layer, as trl reads them."""
    text = config.get_text_config()
    names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    scale = next((value for name in names if (value := getattr(text, name, None)) is not None), 1.0)
    if division := getattr(text, "logits_scaling", None):
        scale = division if text.model_type == "hyperclovax" else 1 / division
    return scale, getattr(text, "final_logit_softcapping", None)


class DistillationLoss:
    """Divergence of the student from the teacher, summed over tokens: by --beta, of the probabilities at --temperature."""

    teacher: Any  # a sharded model; see `Run.shard_reference`

    def __init__(self, args: Any, student: PreTrainedConfig, teacher: PreTrainedConfig):
        self.beta, self.temperature = args.beta, args.temperature
        self.behind = *behind_head(student), *behind_head(teacher)
        self.gathered = Gathered()

    def use_teacher(self, teacher: nn.Module) -> None:
        """Compare with this sharded model. FSDP2 keeps its output layer gathered, which the student's backward pass reads.

        FSDP1 keeps the root's parameters, among which the output layer is, as Accelerate shards a model.
        """
        head = unwrapped(teacher).get_output_embeddings()
        unit = head if isinstance(head, FSDPModule) else teacher
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(False, recurse=False)
        self.teacher = teacher

    @torch.no_grad()
    def ask_teacher(self, inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> Head:
        """Let the teacher read rows."""
        kept: list[Head] = []

        def keep(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
            kept.append(Head(hidden[:, :-1][mask], head.weight, head.bias))
            return hidden.new_zeros(1)

        self.teacher(**inputs, at_head=keep)
        return kept[0]

    def divergences(self, model: nn.Module, batch: dict[str, Any], betas: Sequence[float]) -> list[tuple]:
        """Compute for each of `betas` the divergence and the student's entropy at each target, (N,), in nats."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        mask = batch["labels"][:, 1:] != IGNORE_INDEX
        theirs = self.ask_teacher(inputs, mask)

        def compare(hidden: torch.Tensor, head: nn.Linear) -> list[tuple]:
            number = min(len(head.weight), len(theirs.weight))
            ours = Head(hidden[:, :-1][mask], head.weight, head.bias)
            both = *ours.first_tokens(number), *theirs.first_tokens(number)
            return [ChunkedDivergenceFunction.apply(*both, beta, self.temperature, *self.behind) for beta in betas]

        return model(**inputs, at_head=compare)

    def sum_parts(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the divergence over the targets of a micro-batch, in nats; `count_next_tokens` counts them."""
        ((divergence, entropy),) = self.divergences(model, batch, [self.beta])
        self.gathered.add(torch.stack([entropy.double().sum(), count_next_tokens(batch).double()]))
        return divergence.sum()

    def values(self, step: int) -> dict[str, float]:
        """Return the student's mean entropy at the targets since the last log line."""
        if not (sums := self.gathered.take()):
            return {}
        return {"entropy": sums[0] / max(sums[1], 1)}

    @torch.no_grad()
    def of_rows(self, run: Run[Any], batches: Iterable[dict[str, Any]]) -> np.ndarray:
        """Sum both divergences, forward and reverse, over the targets of each row, and count these; return (rows, 3).

        Every rank gets all. They are in the order of `make_eval_loader`; rows that fill the last batches have zeros.

        Raises:
            Stopped: between two batches.
        """
        sums = []
        for batch in batches_to_evaluate(run.accelerator, run.model, batches):
            (forward, _), (reverse, _) = self.divergences(run.model, batch, [*DIVERGENCES.values()])
            counts = (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1).tolist()
            parts = zip(forward.double().split(counts), reverse.double().split(counts), counts, strict=True)
            sums += [(one.sum().item(), other.sum().item(), count) for one, other, count in parts]
        return np.array([row for rows in zip(*on_all_data_ranks(sums), strict=True) for row in rows])


def mean_divergences(sums: np.ndarray) -> dict[str, float]:
    """Return the means a token of what `DistillationLoss.of_rows` has found."""
    *divergences, number = sums.sum(0).tolist()
    return {name: value / max(number, 1) for name, value in zip(DIVERGENCES, divergences, strict=True)}


# Answers of the rows, and of the student


def begins_of_answers(rows: Any) -> np.ndarray:
    """Return where the last answer of each row begins, (rows,): its last targets in one piece; without targets, its end."""
    begins = []
    for lengths, labels in rows.chunks("labels"):
        ends = lengths.cumsum()
        is_target = labels != IGNORE_INDEX
        opens = is_target & ~np.append(False, is_target[:-1])
        opens[ends - lengths] = is_target[ends - lengths]
        # The last one up to the end of each row; before the first token of all there is none.
        last = np.append(-1, np.flatnonzero(opens))[np.cumsum(opens)[ends - 1]]
        begins.append(np.where(last < ends - lengths, lengths, last - ends + lengths))
    return np.concatenate(begins)


def prepare_to_answer(
    run: Run[Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: set[int]
) -> tuple[SupervisedRows, datasets.Dataset | None]:
    """Prepare rows with answers as SFT does, or prompts alone, without targets, as GRPO reads them.

    Returns:
        The rows, and for prompts alone the held-out ones as they are written, with their other columns.

    Raises:
        ConfigError: for prompts alone with --lmbda below 1, for rows with answers and arguments that are of prompts alone,
            and like `prepare_supervised` and `load_prompts`.
        DataError: like these.
    """
    args = run.args
    columns = {*args.read_rows()["train"].column_names}
    if args.columns or "prompt" not in columns or any({*form.needs} <= columns for form in args.forms):
        given = {"--rewards": args.rewards, "--chat_template_kwargs": args.chat_template_kwargs}
        if ignored := that_apply(given):
            raise ConfigError(f"{args.source} has answers, but {', '.join(ignored)} is for prompts alone; remove it")
        rows, teacher = prepare_supervised(run, model, tokenizer, base_stops), args.teacher_model_name_or_path
        check_documents(args, teacher, load_config(teacher), rows.train.lengths, rows.heldout.lengths)
        return rows, None
    if args.lmbda < 1:
        raise ConfigError(
            f"{args.source} has prompts, but no answers for the share that the student does not draw (--lmbda "
            f"{args.lmbda}); give --lmbda 1, or rows with answers"
        )
    sides, counts = local_main_process_first(lambda: load_prompts(args, tokenizer, model))
    tell_of_prompts(run, sides, tokenizer)
    ids = {side: tokenize_prompts(tokenizer, rows["prompt"][:], args) for side, rows in sides.items()}
    made = {side: cut(datasets.Dataset.from_list([answered(row, []) for row in rows])) for side, rows in ids.items()}
    ends, exported = stops_of_run(model, tokenizer), as_exported(model, tokenizer, base_stops)
    on_first_rank(lambda: compare_prompts(run, exported, tokenizer, sides["train"], ends))
    collate, content = make_collator(args, tokenizer.pad_token_id), content_of_sides(run, made["train"], made["test"])

    def show(rows: list[dict]) -> Any:
        return tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")

    counted = {"sides": sides, "num_targets": len(ids["train"]), "counts": counts}
    return SupervisedRows(run, made["train"], made["test"], collate, content, show, **counted), sides["test"]


class OwnAnswers:
    """Answers that the student draws, to the share --lmbda of the prompts of a step, and to held-out prompts.

    An answer depends on the weights, its prompt, and (seed, step, place among the answers of the step). `written` are the
    held-out prompts, if the rows hold prompts alone.

    Raises:
        ConfigError: for a row without a prompt, if the longest leaves no room for an answer, and for a reward that cannot be
            loaded.
    """

    def __init__(
        self,
        run: Run[Any],
        tokenizer: PreTrainedTokenizerBase,
        rows: SupervisedRows,
        model: PreTrainedModel,
        written: datasets.Dataset | None,
    ):
        self.run, self.tokenizer, self.rows = run, tokenizer, rows
        args = run.args
        of_both = (model.config, load_config(args.teacher_model_name_or_path))
        room = min(room_for_prompts(args, config) for config in of_both)
        self.begins = begins_of_answers(rows.train)
        tell_left_out(run.print, model, KEPT)
        heldout = rows.heldout.chosen(np.arange(len(rows.heldout))[: args.num_eval_prompts or None])
        begins = begins_of_answers(heldout)
        for side, sizes in (("train", self.begins), ("test", begins)):
            if not sizes.all():
                raise ConfigError(
                    f"row {sizes.argmin() + 1:,} of those to {USES[side]} on has no prompt before its targets, to which the "
                    f"student could draw an answer (--lmbda {args.lmbda}); give rows with prompts, and train their answers "
                    "alone, or give --lmbda 0"
                )
            if sizes.max() > room:
                raise ConfigError(
                    f"the longest prompt to {USES[side]} on has {sizes.max():,} tokens, and answers of "
                    f"{args.max_completion_length:,} tokens leave room for {room:,}; give --max_length {room} or less"
                )
        self.prompts = [row["input_ids"][:begin] for row, begin in zip(heldout, begins, strict=True)]
        if written is None:
            answers = [row["input_ids"][begin:] for row, begin in zip(heldout, begins, strict=True)]
            texts = {"prompt": self.prompts, "expected": answers}
            shown = datasets.Dataset.from_dict({name: tokenizer.batch_decode(ids) for name, ids in texts.items()})
            begin = ""
        else:
            shown = written.select(range(len(heldout)))
            begin = end_of_prompt(tokenizer, shown[0]["prompt"], args.template_settings)
        samples = Samples(run.output_dir, run.resumed_from) if run.is_first and not args.data_only else None
        rewards = load_rewards(args.rewards, shown.column_names, begin, tokenizer)
        tell_of_rewards(run, tokenizer, {"evaluate": shown}, rewards)
        self.heldout = HeldoutAnswers(run, tokenizer, shown, rewards, samples, self.prompts)

    def draw(self, step: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the share --lmbda of the answers of the step after `step` by answers that the student draws now."""
        run, args, train = self.run, self.run.args, self.rows.train
        order = np.random.default_rng([seed_of("own answers", args.seed), step])
        is_own = order.random(args.total_batch_size) < args.lmbda
        numbers = is_own.cumsum() - 1
        size = args.per_device_train_batch_size
        first = run.data_rank * size * len(batches)
        mine = dict(enumerate((row for batch in batches for row in batch["row"].tolist()), first))
        asked = {index: row for index, row in mine.items() if is_own[index] and row >= 0}
        of_all = {index: row for part in on_all_data_ranks(asked) for index, row in part.items()}
        if not of_all:
            return batches
        prompts = [train[row]["input_ids"][: self.begins[row]] for row in of_all.values()]
        seed = seed_of(f"answers of step {step}", args.seed)
        sampling = Sampling(args.temperature, seed, numbers[[*of_all]].tolist())
        drawn = draw_texts(run, self.tokenizer, prompts, sampling, may_stop=False)
        answers = {index: answered(*both) for index, *both in zip(of_all, prompts, drawn.ids, strict=True)}
        rows = [answers.get(index) or without_targets(train[row], row) for index, row in mine.items()]
        return [
            batch | to_device(self.rows.collate(rows[i * size : (i + 1) * size]), run.accelerator.device)
            for i, batch in enumerate(batches)
        ]

    def evaluate(self, loss: DistillationLoss, step: int) -> dict[str, float]:
        """Measure both divergences, rewards, and the mean length, of answers to the held-out prompts, drawn now.

        They are drawn with the same random numbers in each evaluation. The first ones go to samples.html.

        Raises:
            Stopped: between two batches.
            ConfigError: if a reward fails.
        """
        run, args = self.run, self.run.args
        drawn = draw_texts(run, self.tokenizer, self.prompts, Sampling(args.temperature, args.seed))
        rows = Rows([*map(answered, self.prompts, drawn.ids)], without_targets)
        loader = make_eval_loader(rows, args, run.data_rank, run.data_world_size, collate_fn=self.rows.collate)
        sums = loss.of_rows(run, loader)
        of_each = {name: (sums[:, i] / np.maximum(sums[:, 2], 1)).tolist() for i, name in enumerate(DIVERGENCES)}
        scored = on_first_rank(lambda: self.heldout.score(step, drawn, "held out, drawn", of_each))
        measured = mean_divergences(sums) | scored
        return {f"drawn_{name}": value for name, value in measured.items()}


def answered(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    """Make a row of a prompt and an answer, whose tokens are the targets."""
    return {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}


# Trial


def distilled_trial(args: Any) -> Trial:
    """Make the trial of a distillation: rows of the greatest lengths, read by student and teacher, after answers are drawn.

    A pass draws --per_device_eval_batch_size answers of --max_completion_length tokens to prompts of --max_prompt_length, or
    else of --max_length.

    Raises:
        NotSimulatedError: for settings that change the step.
    """
    length, drawn = args.max_length or 0, args.max_completion_length
    refuse("distillation", {"--max_length none": not length})
    check_hidden_suffices((args.base_model, args.teacher_model_name_or_path))
    of_rows, asked = copy.copy(args), args.max_prompt_length or length
    targets = drawn if args.lmbda == 1 else max(drawn, length - 1)
    if args.lmbda:  # a row is longest with an answer that is drawn
        of_rows.max_length = max(asked + drawn, length)
    trial, frozen = supervised_trial(of_rows), frozen_args(args)
    if args.lmbda:
        trial.batch["labels"][:, : of_rows.max_length - targets] = IGNORE_INDEX
    teacher = config_of(frozen)
    loss = DistillationLoss(args, trial.config, teacher)
    passes = math.ceil(args.lmbda * args.total_batch_size / data_world_size() / args.per_device_eval_batch_size)

    def draw(model: nn.Module, batch: dict[str, Any], begin: Callable[[str, int], None]) -> None:
        ids = batch["input_ids"].new_zeros(args.per_device_eval_batch_size, asked + drawn)
        draw_answers({"temperature": args.temperature}, ids, drawn, passes, model, begin)

    def make_student(config: PreTrainedConfig) -> PreTrainedModel:
        return with_access(trial.make_model(config))

    def make_teacher() -> PreTrainedModel:
        return with_access(trial_model(frozen, teacher))

    tokens, before = int(count_next_tokens(trial.batch)), draw if args.lmbda else None
    given = trial.config, make_student, loss.sum_parts, count_next_tokens, trial.batch, tokens
    return Trial(*given, before_fn=before, keep_reference=loss.use_teacher, make_reference=make_teacher)
