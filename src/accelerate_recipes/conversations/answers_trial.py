"""Trial of GRPO: a step draws answers to its prompts, then trl's own loss is computed on them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from accelerate_recipes.conversations.answers import AnswerTrainer, add_positions
from accelerate_recipes.conversations.drawing_trial import draw_answers
from accelerate_recipes.conversations.objective import Collectives, Objective
from accelerate_recipes.conversations.prompts import room_for_prompts
from accelerate_recipes.conversations.settings import pad_multiple, with_fused_head
from accelerate_recipes.ranks import data_world_size
from accelerate_recipes.trial import Trial, config_of, refuse

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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
    vars(trainer).update(
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        _entropy_bonus_enabled=False,
        **{name: getattr(args, name) for name in names},
    )
    trainer.args.steps_per_generation = 1

    def make_model(config: PreTrainedConfig) -> PreTrainedModel:
        model = with_fused_head(args, ("log_probs", "entropy"), config, args.temperature)
        add_positions(model)
        return model

    def draw_all(model: nn.Module, batch: dict[str, torch.Tensor], begin: Callable[[str, int], None]) -> None:
        number, length = rows * args.accumulation_steps(data_world_size()), batch["prompt_ids"].shape[1] + answer_length
        ids = batch["prompt_ids"].new_zeros(number, length)
        draw_answers({name: getattr(args, name) for name in SAMPLING}, ids, answer_length, 1, model, begin)

    given = config, make_model, trainer.sum_parts, trainer.count_parts, batch, rows * answer_length
    keep_reference = partial(setattr, trainer, "ref_model") if args.beta else None
    return Trial(*given, before_fn=draw_all, keep_reference=keep_reference)
