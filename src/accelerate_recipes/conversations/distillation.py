"""Distillation: a model, the student, learns the probabilities that another model, the teacher, gives each next token.

The divergence is a sum over tokens, by trl's kernel, which makes no whole logits. It is computed on answers of the rows, or
on answers that the student draws.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.kernels import chunked_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.drawing_trial import draw_answers
from accelerate_recipes.conversations.heads import check_hidden_suffices
from accelerate_recipes.conversations.prompts import PromptArgs
from accelerate_recipes.conversations.rewards import reward_problems
from accelerate_recipes.conversations.settings import AnswerArgs, trial_model
from accelerate_recipes.conversations.supervised_loss import supervised_trial
from accelerate_recipes.engine import batches_to_evaluate
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import TILE_ON_CPU, TILES, Gathered, count_next_tokens
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.probes import unwrapped
from accelerate_recipes.ranks import data_world_size, on_all_data_ranks
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
        found = super().problems(world_size)
        if not self.teacher_model_name_or_path:
            found.append(
                "--teacher_model_name_or_path is missing: a name on the Hub, or a folder such as outputs/demo/export"
            )
        return found + (reward_problems(self.rewards, self.elsewhere) if self.rewards else [])


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
        found = []
        for batch in batches_to_evaluate(run.accelerator, run.model, batches):
            (forward, _), (reverse, _) = self.divergences(run.model, batch, [*DIVERGENCES.values()])
            counts = (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1).tolist()
            parts = zip(forward.double().split(counts), reverse.double().split(counts), counts, strict=True)
            found += [(one.sum().item(), other.sum().item(), count) for one, other, count in parts]
        return np.array([row for rows in zip(*on_all_data_ranks(found), strict=True) for row in rows])


def mean_divergences(sums: np.ndarray) -> dict[str, float]:
    """Return the means a token of what `DistillationLoss.of_rows` has found."""
    *divergences, number = sums.sum(0).tolist()
    return {name: value / max(number, 1) for name, value in zip(DIVERGENCES, divergences, strict=True)}


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

    return replace(
        trial,
        make_model=lambda config: with_access(trial.make_model(config)),
        loss_fn=loss.sum_parts,
        count_fn=count_next_tokens,
        tokens=int(count_next_tokens(trial.batch)),
        before_fn=draw if args.lmbda else None,
        keep_reference=loss.use_teacher,
        make_reference=lambda: with_access(trial_model(frozen, teacher)),
    )
