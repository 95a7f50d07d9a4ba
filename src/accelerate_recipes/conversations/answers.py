"""Answers that a model draws and rewards score: GRPO's arguments, its step by trl, and its trial.

An answer depends on the weights, its prompt, and (seed, step, place in the step). Each of its tokens is drawn with a
random number of its own. So a run draws the same answers on any number of processes, and after a resume.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import torch
from accelerate.utils import DistributedType
from huggingface_hub import constants
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from transformers.trainer_utils import align_special_tokens
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import nanstd, split_tensor_dict

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.conversations.drawing_trial import draw_answers
from accelerate_recipes.conversations.exported import as_exported
from accelerate_recipes.conversations.heads import add_head, difference_by_trl
from accelerate_recipes.conversations.objective import SYNC_REFERENCE, Collectives, Objective, Outputs, reference_of
from accelerate_recipes.conversations.prompts import PromptArgs, compare_prompts, room_for_prompts, tokenize_prompts
from accelerate_recipes.conversations.settings import pad_multiple, refused_by_trl, switch_off_dropout, with_fused_head
from accelerate_recipes.conversations.trained_rows import ReadRows, content_of_sides
from accelerate_recipes.errors import ConfigError, that_apply
from accelerate_recipes.models.generation import KEPT, by_model_alone, drawn_by, numbers_of, own_draws, tell_left_out
from accelerate_recipes.models.tokenizers import stops_of
from accelerate_recipes.models.weights import seed_of
from accelerate_recipes.ranks import data_world_size, on_all_data_ranks, on_first_rank
from accelerate_recipes.report.samples import Samples, expected
from accelerate_recipes.run import Run
from accelerate_recipes.trial import Trial, config_of, refuse

constants.HF_HUB_DISABLE_TELEMETRY = True  # a run tells nobody of itself
# trl 1.16 uses an old name of transformers 5.23 in every step that generates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

ROUTING = ("output_router_logits", "router_aux_loss_coef")  # fields of a configuration that trl sets

# Fields of trl's config; trl declares no ranges for them.
NOT_NEGATIVE = (
    "beta", "epsilon", "epsilon_high", "top_k", "off_policy_mask_threshold", "entropy_coef", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "max_tool_calling_iterations", "num_completions_to_print",
)  # fmt: skip
AT_LEAST_ONE = ("num_iterations", "vllm_max_model_length", "vllm_tensor_parallel_size")

ADAPTIVE_ENTROPY = (
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
)  # fmt: skip

# Values of fields that trl checks late, when it computes a loss.
VALUES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

# Settings of `generate` that are decided elsewhere: each token of an answer is drawn by a number of its own.
OWN_FLAGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "cache_implementation")
DECIDED = (
    dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "is --max_completion_length")
    | {name: f"is --{name}" for name in OWN_FLAGS}
    | dict.fromkeys(("num_return_sequences", "n"), "is --num_generations")
    | dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "do_sample", "penalty_alpha"), "does not draw answers"
    )
    | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), "the model and its tokenizer decide")
    | dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), "changes what `generate` returns")
)
NO_SETTING = "is no setting of `generate`"

# Values of --loss_type that average over the tokens of all answers. The others average over answers.
OVER_TOKENS = {"bnpo", "cispo", "dapo", "vespo"}


@dataclass
class GRPOArgs(PromptArgs):
    """Arguments of grpo.py, in addition to the fields of GRPOConfig. Put it before that class."""

    per_device_train_batch_size: int = arg(8, "Answers per forward pass on one process.", min=1)
    total_batch_size: int = arg(128, "Answers per optimizer step, over all processes and accumulation.", min=1)
    num_generations: int = arg(8, "Answers to each prompt, which are compared with each other.", min=2)
    max_completion_length: int = arg(512, "Longest answer in tokens.", min=1, group="essential")
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    disable_dropout: bool = arg(True, "Train without dropout, as answers are drawn.", fixed=False, group="rare")

    groups = PromptArgs.groups | dict.fromkeys(
        ("temperature", "beta", "loss_type", "num_iterations", "reward_weights", "mask_truncated_completions"), "task"
    )
    fixed = frozenset({"num_iterations", "num_generations"})
    ranges = (
        PromptArgs.ranges
        | dict.fromkeys(NOT_NEGATIVE, Range(min=0))
        | dict.fromkeys(("delta", "sapo_temperature_neg", "sapo_temperature_pos", "vllm_server_timeout"), Range(above=0))
        | dict.fromkeys(AT_LEAST_ONE, Range(min=1))
        | dict.fromkeys(("min_p", "top_entropy_quantile"), Range(min=0, max=1))
        | dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), Range(above=0, max=1))
        | dict.fromkeys(("vllm_server_port", "vllm_group_port"), Range(min=1, max=65535))
        # Logits are divided by these.
        | {"temperature": Range(min=1e-4), "repetition_penalty": Range(min=0.01, max=100)}
        | {"reward_weights": Range()}
        | VALUES
    )  # fmt: skip
    owned_elsewhere = (
        PromptArgs.owned_elsewhere
        | dict.fromkeys(("generation_batch_size", "steps_per_generation"), "answers are drawn for one step at a time")
        | dict.fromkeys(SYNC_REFERENCE, "the reference is the model that it begins with")
        | dict.fromkeys(ADAPTIVE_ENTROPY, "a checkpoint would not hold its state; --entropy_coef is constant")
        | {"shuffle_dataset": "the order of the prompts follows from --seed"}
        | {"num_generations_eval": "the evaluation draws one answer to each held-out prompt"}
        | {"ds3_gather_for_generation": "this collection shards with FSDP"}
        # Old names, which trl 2 will not have.
        | {"use_transformers_paged": "it is --use_transformers_continuous_batching now"}
        | {"vllm_importance_sampling_cap": "it is --vllm_importance_sampling_clip_max now"}
    )

    def problems(self, world_size: int) -> list[str]:
        answers, given = self.total_batch_size // world_size, self.object_in("generation_kwargs")
        number, leaves_out = answers // self.per_device_train_batch_size, self.top_entropy_quantile < 1
        problems = {
            f"--total_batch_size {self.total_batch_size} is not a multiple of --num_generations {self.num_generations}, the "
            "answers to one prompt": self.total_batch_size % self.num_generations,
            f"--save_steps {self.save_steps} is not a multiple of --num_iterations {self.num_iterations}, the steps on the "
            "same answers, which a checkpoint does not hold": self.save_steps % self.num_iterations,
            f"--top_entropy_quantile compares the tokens of a micro-batch, of which a process has {number} a step: "
            f"make --per_device_train_batch_size {answers}, or leave it out": leaves_out and number > 1,
            "--entropy_coef is for all tokens, --top_entropy_quantile leaves some out; "
            "remove one of the two": leaves_out and self.entropy_coef,
            f"--generation_kwargs is {self.generation_kwargs!r}; it must be a JSON object, such as "
            "'{\"renormalize_logits\": false}'": given is None,
        }
        for key in given or ():
            why = DECIDED.get(key) or ("" if self.use_vllm or hasattr(GenerationConfig(), key) else NO_SETTING)
            problems[f"--generation_kwargs has {key}, which {why}; remove it"] = why
        return super().problems(world_size) + that_apply(problems)

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings of `generate` with which answers are drawn; vLLM has others of its own in --generation_kwargs."""
        given: Any = self
        own = {name: getattr(given, name) for name in OWN_FLAGS}
        return own | ({} if given.use_vllm else self.object_in("generation_kwargs") or {})


class AnswerTrainer(Objective, GRPOTrainer):
    """trl's GRPOTrainer, which draws the answers of a step, scores them and computes their loss, and shows some of them.

    Make one by `give_model_to_trl`.
    """

    # The engine divides the loss, so trl must not divide it too; transformers' loop, which sets this, does not run.
    current_gradient_accumulation_steps = 1
    base_stops: set[int]  # tokens at which the base stops, as it is published
    rows: list[dict[str, Any]]  # to which answers were drawn
    drawn: list[dict[str, Any]] | None = None  # micro-batches of these answers
    samples: Samples | None = None  # pages of answers, given on rank 0
    shown = 0  # last step whose answers were written
    teaches: torch.Tensor  # whether the rewards of an answer's group differ, of all ranks

    def __init__(self, run: Run[Any], config: GRPOConfig, **settings: Any):
        self.run, self.accelerator, self.counted = run, run.accelerator, []
        # With these, trl would load the reference, whole on each rank, and add the entropy to the loss; see `sum_parts`.
        decided = {name: getattr(config, name) for name in ("beta", "entropy_coef")}
        vars(config).update(dict.fromkeys(decided, 0.0))
        GRPOTrainer.__init__(self, args=config, **settings)
        for keeper in (config, self):
            vars(keeper).update(decided)
        self.remove_callback(PrinterCallback)
        # A step draws all its answers at once. The engine divides the loss by their number, so trl must not divide it too.
        self.args.gradient_accumulation_steps = self.args.steps_per_generation = 1
        self.data_collator = as_rows
        self.keep_balance_apart(run.args, self.model.config)

    def create_accelerator_and_postprocess(self) -> None:
        """Do nothing: the run has its Accelerator. If trl saw FSDP, it would load a second model, whole on each rank."""
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def use_sharded_model(self) -> None:
        """Compute with the run's model from here on, which is prepared."""
        self.model.config.use_cache = False  # which trl reads, and the export's copy does not have
        self.model_wrapped = self.run.model
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self.model = self.run.model

    def batch_of(self, rows: list[dict]) -> Any:
        """Make a batch of prompts without answers, which are drawn in training."""
        ids = tokenize_prompts(self.processing_class, [row["prompt"] for row in rows], self.run.args)
        return self.processing_class.pad({"input_ids": ids}, return_tensors="pt")

    def add_reference(self) -> None:
        """Keep a reference model for the KL divergence, if its weight --beta is not 0."""
        if self.beta:
            self.ref_model = reference_of(self.run, self.temperature)
            if isinstance(self.ref_model, nn.Module):
                add_positions(self.ref_model)

    def draw(self, step: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Draw and score answers to the prompts of the step after `step`, or return those drawn for an earlier step."""
        args, accelerator = self.run.args, self.accelerator
        # Answers are drawn at each multiple of num_iterations. All seeds come from that step and from the place of an answer
        # in the global batch, so a resume and any number of ranks draw the same answers.
        since = step % self.num_iterations
        if since == 0 or self.drawn is None:
            self.rows = [row for batch in batches for row in batch["rows"]]
            self.state.global_step, self.state.max_steps = step, self.run.total_steps
            first = accelerator.process_index * len(self.rows)
            indices = range(first, first + len(self.rows))
            numbers = numbers_of(args.seed, step - since, indices, self.max_completion_length)
            with contextlib.ExitStack() as drawing:
                drawing.enter_context(own_draws(seed_of(f"answers of step {step - since}", args.seed)))
                drawing.enter_context(by_model_alone(self.run.model, self.processing_class))
                if not (self.use_vllm or self.use_transformers_continuous_batching):
                    drawing.enter_context(drawn_by(self.run.model, numbers.to(accelerator.device)))
                self.leave_out_dropout()
                answers = self._generate_and_score_completions(self.rows)
                self.run.model.train()
            mine = self.teaches[first : first + len(self.rows)]
            answers["advantages"] = answers["advantages"].where(mine, 0.0).float()
            self.drawn = split_tensor_dict(answers, len(batches))
        return [drawn | {"row": batch["row"]} for drawn, batch in zip(self.drawn, batches, strict=True)]

    def leave_out_dropout(self) -> None:
        """Compute as in an evaluation, while trl still counts all that it does as training."""
        self.run.model.eval()
        self.model.training = True  # by which trl 1.16 tells the two apart

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        return tokenize_prompts(self.processing_class, prompts, self.run.args), None, {}

    def _generate(self, prompts: list) -> tuple:
        answers = super()._generate(prompts)
        self.leave_out_dropout()  # again: continuous batching of trl 1.16 ends with `train()`
        return answers

    def _calculate_rewards(self, *given: Any) -> torch.Tensor:
        """Compute rewards in float64, and keep which answers are of a group whose rewards differ.

        In fp32, the mean of equal rewards may be another number, and Adam makes a full step of a difference of any size.
        """
        rewards = super()._calculate_rewards(*given).double()
        for name, share in zip(self.reward_func_names, rewards.isnan().double().mean(0).tolist(), strict=True):
            self._metrics["train"][f"rewards/{name}/none"].append(share)
        normalize = self.multi_objective_aggregation == "normalize_then_sum"
        self.teaches = differ_in_groups(rewards, self.reward_weights.to(rewards), self.num_generations, normalize)
        return rewards

    def sum_parts(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Sum the parts of trl's loss over the answers of a micro-batch; `count_parts` has the divisor of each part.

        trl's loss is a mean over answers or over tokens, depending on --loss_type. (For `bnpo`, trl divides by the
        tokens of a micro-batch. Here `bnpo` is divided by the tokens of the step, as `dapo` is.)
        """
        outputs, mask = Outputs(model), batch["completion_mask"]
        # trl divides by this number / the number of processes. This value makes it a division by 1.
        tokens = torch.tensor(float(self.accelerator.num_processes), device=mask.device)
        loss = self.compute_loss(outputs, batch | {"num_items_in_batch": tokens})
        # Undo the mean that trl has taken over this micro-batch, so that the engine can divide by the counts of the step.
        answers, tokens = torch.zeros_like(loss), torch.zeros_like(loss)
        if self.loss_type in OVER_TOKENS:
            tokens = loss * mask.sum().clamp(min=1) if self.loss_type == "bnpo" else loss
        else:
            answers = loss * len(mask)
        if self.entropy_coef:
            tokens = tokens - self.entropy_coef * (outputs.last.entropy[:, -mask.shape[1] :] * mask).sum()
        return torch.stack([answers, *self.balances(outputs), tokens])

    def count_parts(self, batch: dict[str, Any]) -> torch.Tensor:
        """Count the answers, the micro-batches (1, only if there are experts), and the tokens of the answers."""
        mask = batch["completion_mask"]
        one = torch.ones((), dtype=torch.int64, device=mask.device)
        return torch.stack([len(mask) * one, *[one] * self.aux_loss_enabled, mask.sum()])

    def weights(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        by_token = self.importance_sampling_level == "token"  # else each answer has one value
        names = ("kl", "entropy", *(("clip_ratio/*_mean", "cispo_clip_ratio") if by_token else ()))
        return dict.fromkeys(names, counts[-1])

    def weigh(self) -> None:
        super().weigh()
        gathered = self._metrics["train"]
        for name in gathered.keys() & {"clip_ratio/low_min", "clip_ratio/high_max"}:
            numbers = [value for value in gathered[name] if not math.isnan(value)] or gathered[name]
            gathered[name] = [min(numbers) if name.endswith("min") else max(numbers)]

    def compare(self, rows: datasets.Dataset) -> None:
        """Compare the first prompts with the rendering of the tokenizer that will be exported; see `compare_prompts`."""
        tokenizer = self.processing_class
        exported = as_exported(self.model, tokenizer, self.base_stops)
        on_first_rank(lambda: compare_prompts(self.run, exported, tokenizer, rows, self.eos_token_ids))

    def log(self, logs: dict[str, float], *others: Any) -> None:
        """Log a step, and write some of its answers to `samples`."""
        super().log(logs, *others)
        step, number = self.state.global_step, self.run.args.num_samples
        wanted = [value for part in on_all_data_ranks([*map(expected, self.rows)]) for value in part] if number else []
        if self.samples and number and step != self.shown:  # once, even if a step is logged twice
            drawn, self.shown = self._logs, step
            every = max(1, len(drawn["prompt"]) // number)
            of_each = zip(*drawn["rewards"].values(), strict=True)
            rewards = [dict(zip(drawn["rewards"], values, strict=True)) for values in of_each]
            columns = (drawn["prompt"], drawn["completion"], wanted, rewards)
            names = ("prompt", "completion", "expected", "rewards")
            rows = [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
            self.samples.add(step, "drawn in training", rows[::every][:number])


def differ_in_groups(rewards: torch.Tensor, weights: torch.Tensor, size: int, normalize: bool) -> torch.Tensor:
    """Tell for each answer whether its group has different rewards: sums of weighted parts, normalized before as by trl.

    `rewards` (answers, parts) are NaN where a part does not apply. Groups of `size` answers stand one after the other.
    Differences within the rounding of fp32, in which trl keeps rewards, are none.
    """
    parts = rewards.reshape(-1, size, len(weights))
    sizes, applies = parts.abs(), ~parts.isnan().all(-1, keepdim=True)
    if normalize:
        scale, differs = nanstd(parts, dim=1, keepdim=True) + 1e-4, beyond_rounding(parts, sizes)
        parts = ((parts - parts.nanmean(1, keepdim=True)) / scale).where(differs, 0.0)
        sizes = (sizes / scale).where(differs, 0.0)
    sums = (parts * weights).nansum(-1, keepdim=True).where(applies, torch.nan)
    return beyond_rounding(sums, (sizes * weights.abs()).nansum(-1, keepdim=True)).flatten().repeat_interleave(size)


def beyond_rounding(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Tell where `values` (groups, answers, parts) differ in a group by more than numbers of these `sizes` are rounded."""
    spread = values.nan_to_num(-math.inf).amax(1, keepdim=True) - values.nan_to_num(math.inf).amin(1, keepdim=True)
    return spread > sizes.nan_to_num(0.0).amax(1, keepdim=True) * torch.finfo(torch.float32).eps


def add_positions(model: nn.Module) -> None:
    """Let the passes of trl's loss read the position of each token in its own row, as those of `generate` do.

    Prompts are padded on the left, and trl 1.16 gives no positions: a model with learned ones would count the padding.
    """

    def with_positions(_: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if "fused_lm_head" in inputs:
            mask = inputs["attention_mask"]
            inputs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        return args, inputs

    model.register_forward_pre_hook(with_positions, with_kwargs=True)


def as_rows(rows: list[dict]) -> dict[str, list[dict]]:
    """Make a batch of prompts, unchanged, with the columns that go to the rewards."""
    return {"rows": rows}


def give_model_to_trl(
    run: Run[Any], config: GRPOConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> AnswerTrainer:
    """Make trl's trainer of a model with its adapters. It gives the model the forward pass that computes trl's loss.

    trl and transformers' Trainer also write the special tokens of the tokenizer into the configurations of the model. What
    else they change is changed back, so that it is not exported. `settings` are those of trl's trainer.

    Raises:
        ConfigError: if trl refuses the model, the rows or the settings.
    """
    base_stops, text = stops_of(model.generation_config), model.config.get_text_config()
    routing = {name: getattr(text, name) for name in ROUTING if hasattr(text, name)}
    adapter = [(p, p.data) for p in model.parameters() if p.requires_grad] if run.adapter else []
    use_cache = model.config.use_cache  # transformers' Trainer switches this off
    with refused_by_trl():
        trainer = AnswerTrainer(run, config, model=model, processing_class=tokenizer, **settings)
    if difference := difference_by_trl(model.config):
        if config.cast_lm_head_to_fp32:
            raise ConfigError(f"--cast_lm_head_to_fp32: without whole logits, {difference}; remove it")
        add_head(model, ("log_probs", "entropy"), trainer.temperature)
    add_positions(model)
    tell_left_out(run.print, model, KEPT)
    model.config.use_cache = use_cache
    for name, value in routing.items():  # trl would compute router logits in each forward pass, also of the export
        setattr(text, name, value)
    # transformers' Trainer does this when training begins, but the rows are compared with the export before that.
    align_special_tokens(model, tokenizer)
    for parameter, data in adapter:
        parameter.data = data  # trl 1.16 rounds it to bf16 for a model in 4 bits: small updates would be lost
    trainer.base_stops = base_stops
    if config.disable_dropout:
        switch_off_dropout(model)
    return trainer


def rows_of_prompts(trainer: AnswerTrainer, train: datasets.Dataset, heldout: datasets.Dataset) -> ReadRows:
    """Return prompts as rows of a run, with their checksum."""
    run = trainer.run
    return ReadRows(run, train, heldout, as_rows, content_of_sides(run, train, heldout), show=trainer.batch_of)


# Trial


def answers_trial(args: Any) -> Trial:
    """Make the trial of a GRPO run: answers of --max_completion_length tokens to prompts of --max_prompt_length.

    All answers of a process are drawn at once, before the first micro-batch. trl's other computations without gradients,
    by the first model with --beta, or once more with --num_iterations, need less memory: they take one micro-batch at a
    time.

    Raises:
        NotSimulatedError: for settings that change the step in ways that are not simulated.
        ConfigError: if an answer leaves no room for a prompt.
    """
    others = {
        "--max_prompt_length 0": not args.max_prompt_length,
        "--use_vllm": args.use_vllm,
        "--use_transformers_continuous_batching": args.use_transformers_continuous_batching,
        "--cast_lm_head_to_fp32": args.cast_lm_head_to_fp32,
        **{f"--{name}": getattr(args, name) for name in ("cache_implementation", "generation_kwargs")},
    }
    refuse("GRPO", others)
    config = config_of(args)
    rows, multiple = args.per_device_train_batch_size, pad_multiple(args)
    answer_length = args.max_completion_length
    lengths = {"prompt": room_for_prompts(args, config), "completion": answer_length}
    batch: dict[str, Any] = {"advantages": torch.zeros(rows)}
    for name, length in lengths.items():
        padded = -(-length // multiple) * multiple
        batch[f"{name}_ids"] = torch.zeros(rows, padded, dtype=torch.int64)
        batch[f"{name}_mask"] = torch.ones(rows, padded, dtype=torch.int64)
    batch["prompt_mask"][0, 0] = 0  # prompts have several lengths
    if args.beta:
        batch["ref_per_token_logps"] = torch.zeros(batch["completion_ids"].shape)
    if args.num_iterations > 1:
        batch["old_per_token_logps"] = torch.zeros(batch["completion_ids"].shape)
    names = (
        "beta", "loss_type", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold", "use_vllm",
        "max_completion_length", "entropy_coef",
    )  # fmt: skip
    trainer = AnswerTrainer.__new__(AnswerTrainer)  # it can only compute its loss
    Objective.__init__(trainer, args, config, Collectives())
    vars(trainer).update({name: getattr(args, name) for name in names})
    trainer.epsilon_low, trainer._entropy_bonus_enabled = args.epsilon, False
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.args.steps_per_generation = 1

    def make_model(config: PreTrainedConfig) -> PreTrainedModel:
        model = with_fused_head(args, ("log_probs", "entropy"), config, args.temperature)
        add_positions(model)
        return model

    def draw_all(model: nn.Module, batch: dict[str, torch.Tensor], begin: Callable[[str, int], None]) -> None:
        number, length = rows * args.accumulation_steps(data_world_size()), batch["prompt_ids"].shape[1] + answer_length
        ids = batch["prompt_ids"].new_zeros(number, length)
        draw_answers(args.sampling, ids, answer_length, 1, model, begin)

    given = config, make_model, trainer.sum_parts, trainer.count_parts, batch, rows * answer_length
    keep_reference = partial(setattr, trainer, "ref_model") if args.beta else None
    return Trial(*given, before_fn=draw_all, keep_reference=keep_reference)
