"""Distillation: a model, the student, learns the probabilities that another model, the teacher, gives each next token.

The divergence is a sum over tokens, by trl's kernel, which makes no whole logits. It is computed on answers of the rows, or
on answers that the student draws.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.data.prepared import chunks_of
from accelerate_recipes.data.rows import Rows, make_eval_loader
from accelerate_recipes.engine import batches_to_evaluate, to_device
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.generation import Sampling, generate_texts
from accelerate_recipes.models.positions import max_positions
from accelerate_recipes.models.weights import seed_of
from accelerate_recipes.posttraining.settings import TrainerArgs, make_model
from accelerate_recipes.posttraining.trained_rows import USES, ReadRows, without_targets
from accelerate_recipes.ranks import on_all_data_ranks, sum_over_ranks
from accelerate_recipes.report.samples import Samples
from accelerate_recipes.run import Run

FORWARD, REVERSE = 0.0, 1.0  # values of --beta


@dataclass
class DistillArgs(TrainerArgs):
    """Arguments about teacher and answers. Put it before trl's SFTConfig, which has those about rows."""

    teacher_model_name_or_path: str = arg("", "Model to learn from: a name on the Hub, or a folder.", group="essential")
    beta: float = arg(
        1.0,
        "Divergence: 0 is forward KL, 1 reverse KL, between them Jensen-Shannon.",
        min=0,
        max=1,
        fixed=False,
        group="task",
    )
    lmbda: float = arg(
        1.0,
        "Share of the answers that the student draws itself; the others are those of the rows.",
        min=0,
        max=1,
        fixed=False,
        group="task",
    )
    temperature: float = arg(
        1.0,
        "Temperature at which answers are drawn, and of both models' probabilities in the loss.",
        min=1e-4,
        fixed=False,
        group="task",
    )
    max_completion_length: int = arg(512, "Longest answer to draw, in tokens.", min=1, group="essential")
    num_eval_prompts: int = arg(
        256, "Held-out prompts to which each evaluation draws answers; 0: all.", fixed=False, min=0
    )
    num_samples: int = arg(8, "Number of answers that samples.html shows of an evaluation.", fixed=False, min=0)
    disable_dropout: bool = arg(True, "Train without dropout.", fixed=False, group="rare")

    fixed = frozenset({
        "chat_template_path", "dataset_text_field", "eos_token", "max_length", "truncation_mode", "completion_only_loss",
    })  # fmt: skip
    owned_elsewhere = TrainerArgs.owned_elsewhere | dict.fromkeys(
        ("packing", "packing_strategy", "padding_free", "eval_packing", "shuffle_dataset", "dataset_kwargs",
         "accept_training_template", "loss_type", "router_aux_loss_coef"),
        "remove it: rows are padded, and the divergence from the teacher is the whole loss",
    )  # fmt: skip
    groups = TrainerArgs.groups | {"completion_only_loss": "task"}
    ranges = TrainerArgs.ranges | {"dataset_num_proc": Range(min=1), "max_length": Range(min=2)}

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if not self.teacher_model_name_or_path:
            found.append(
                "--teacher_model_name_or_path is missing: a name on the Hub, or a folder such as outputs/demo/export"
            )
        return found


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


def make_teacher(args: Any) -> PreTrainedModel:
    """Load the teacher, in the precision in which it computes, since it is never trained; see `make_model`."""
    frozen = copy.copy(args)
    frozen.model_name_or_path, frozen.use_peft, frozen.load_in_4bit = args.teacher_model_name_or_path, True, False
    return with_access(make_model(frozen))


# Loss


class Head(NamedTuple):
    """What the targets of a batch are predicted from: hidden states (N, H), and weight and bias of the output layer."""

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
        self.measured: list[torch.Tensor] = []  # of the micro-batches since the last log line

    @torch.no_grad()
    def ask_teacher(self, inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> Head:
        """Let the teacher read rows. Its output layer, if sharded, is copied: the student's backward pass reads it too."""
        kept: list[Head] = []

        def keep(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
            whole = torch.clone if isinstance(self.teacher, FSDPModule | FSDP1) else torch.Tensor.detach
            kept.append(Head(hidden[:, :-1][mask], whole(head.weight), None if head.bias is None else whole(head.bias)))
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
        self.measured.append(torch.stack([entropy.double().sum(), count_next_tokens(batch).double()]))
        return divergence.sum()

    def values(self, step: int) -> dict[str, float]:
        """Return the student's mean entropy at the targets since the last log line."""
        sums, self.measured = sum_over_ranks(torch.stack(self.measured).sum(0)).tolist(), []
        return {"entropy": sums[0] / max(sums[1], 1)}

    @torch.no_grad()
    def of_rows(self, run: Run[Any], batches: Iterable[dict[str, Any]]) -> np.ndarray:
        """Sum both divergences, forward and reverse, over the targets of each row, and count these; return (rows, 3).

        Every rank gets all. They are in the order of `make_eval_loader`; rows that fill the last batches have zeros.

        Raises:
            Stopped: between two batches.
        """
        found = []
        for batch in batches_to_evaluate(run.accelerator, run.model, batches):
            (forward, _), (reverse, _) = self.divergences(run.model, batch, [FORWARD, REVERSE])
            counts = (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1).tolist()
            parts = zip(forward.double().split(counts), reverse.double().split(counts), counts, strict=True)
            found += [(one.sum().item(), other.sum().item(), count) for one, other, count in parts]
        return np.array([row for rows in zip(*on_all_data_ranks(found), strict=True) for row in rows])


def mean_divergences(sums: np.ndarray, begin: str = "") -> dict[str, float]:
    """Return the means a token of what `DistillationLoss.of_rows` has found, by names that `begin` so."""
    forward, reverse, number = sums.sum(0)
    return {f"{begin}forward_kl": forward / max(number, 1), f"{begin}reverse_kl": reverse / max(number, 1)}


# Answers


def begins_of_answers(rows: datasets.Dataset) -> np.ndarray:
    """Return where the last answer of each row begins, (rows,): its last targets in one piece; without targets, its end."""
    found = []
    for lengths, labels in chunks_of(rows, "labels"):
        ends = lengths.cumsum()
        is_target = labels != IGNORE_INDEX
        opens = is_target & ~np.append(False, is_target[:-1])
        opens[ends - lengths] = is_target[ends - lengths]
        # The last one up to the end of each row; before the first token of all there is none.
        last = np.append(-1, np.flatnonzero(opens))[np.cumsum(opens)[ends - 1]]
        found.append(np.where(last < ends - lengths, lengths, last - ends + lengths))
    return np.concatenate(found)


class OwnAnswers:
    """Answers that the student draws, to the share --lmbda of the prompts of a step, and to held-out prompts.

    An answer depends on the weights, its prompt, and (seed, step, place among the answers of the step).

    Raises:
        ConfigError: for a row without a prompt, and if an answer to the longest one would leave no room for its tokens.
    """

    def __init__(self, run: Run[Any], tokenizer: PreTrainedTokenizerBase, rows: ReadRows, config: PreTrainedConfig):
        self.run, self.tokenizer, self.rows = run, tokenizer, rows
        args, self.samples = run.args, Samples(run.output_dir, run.resumed_from) if run.is_first else None
        self.begins = begins_of_answers(rows.train)
        heldout = rows.heldout.select(range(min(len(rows.heldout), args.num_eval_prompts or len(rows.heldout))))
        begins = begins_of_answers(heldout)
        self.heldout = [row["input_ids"][:begin] for row, begin in zip(heldout, begins, strict=True)]
        for side, found in (("train", self.begins), ("test", begins)):
            if not found.all():
                raise ConfigError(
                    f"row {found.argmin() + 1:,} of those to {USES[side]} on has no prompt before its targets, to which the "
                    f"student could draw an answer (--lmbda {args.lmbda}); give rows with prompts, and train their answers "
                    "alone, or give --lmbda 0"
                )
        longest, room = max(self.begins.max(), begins.max()), max_positions(config)
        if longest + args.max_completion_length > room:
            raise ConfigError(
                f"the longest prompt has {longest:,} tokens, an answer up to {args.max_completion_length:,}, and "
                f"{args.base_model} {room:,} positions; lower --max_length or --max_completion_length"
            )

    def generate(self, prompts: list[list[int]], seed: int, may_stop: bool) -> list[list[int]]:
        """Draw an answer to each prompt, on all ranks together; each gets all."""
        args, sampling = self.run.args, Sampling(self.run.args.temperature, seed)
        given = prompts, args.max_completion_length, args.per_device_eval_batch_size
        place = self.run.accelerator, self.run.model, self.tokenizer
        return generate_texts(*place, *given, sampling=sampling, may_stop=may_stop).ids

    def draw(self, step: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the share --lmbda of the answers of the step after `step` by answers that the student draws now."""
        run, args, train = self.run, self.run.args, self.rows.train
        is_own = (
            np.random.default_rng([seed_of("own answers", args.seed), step]).random(args.total_batch_size) < args.lmbda
        )
        size = args.per_device_train_batch_size
        first = run.data_rank * size * len(batches)
        mine = {first + i: row for i, row in enumerate(row for batch in batches for row in batch["row"].tolist())}
        asked = {place: row for place, row in mine.items() if is_own[place] and row >= 0}
        of_all = {place: row for part in on_all_data_ranks(asked) for place, row in part.items()}
        if not of_all:
            return batches
        prompts = [train[row]["input_ids"][: self.begins[row]] for row in of_all.values()]
        drawn = self.generate(prompts, seed_of(f"answers of step {step}", args.seed), may_stop=False)
        answers = {place: answered(*both) for place, *both in zip(of_all, prompts, drawn, strict=True)}
        rows = [answers.get(place) or without_targets(train[row], row) for place, row in mine.items()]
        return [
            batch | to_device(self.rows.collate(rows[i * size : (i + 1) * size]), run.accelerator.device)
            for i, batch in enumerate(batches)
        ]

    def evaluate(self, loss: DistillationLoss, step: int) -> dict[str, float]:
        """Measure both divergences, and the mean length, of answers to the held-out prompts that the student draws now.

        They are drawn with the same random numbers in each evaluation. The first ones go to samples.html.

        Raises:
            Stopped: between two batches.
        """
        run, args = self.run, self.run.args
        drawn = self.generate(self.heldout, args.seed, may_stop=True)
        rows = Rows([*map(answered, self.heldout, drawn)], without_targets)
        loader = make_eval_loader(rows, args, run.data_rank, run.data_world_size, collate_fn=self.rows.collate)
        sums = loss.of_rows(run, loader)
        if self.samples:
            shown = [
                {"prompt": self.tokenizer.decode(prompt), "completion": self.tokenizer.decode(answer)}
                | {"rewards": {name: round(value, 4) for name, value in mean_divergences(found[None]).items()}}
                for prompt, answer, found in zip(self.heldout[: args.num_samples], drawn, sums, strict=False)
            ]
            self.samples.add(step, "held out, drawn", shown)
            self.samples.write_page()
        return mean_divergences(sums, "drawn_") | {"drawn_length": sum(map(len, drawn)) / len(drawn)}


def answered(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    """Make a row of a prompt and an answer, whose tokens are the targets."""
    return {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}
