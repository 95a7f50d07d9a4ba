"""Train a chess model with rewards, by trl's GRPOTrainer: it answers with moves, and earns more for legal ones.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/chess_grpo.py --config recipes/configs/chess_grpo/laptop.yaml

It begins with the export of chess.py. In each position of a step the model draws `--num_generations` moves; those that
earn more than their group's mean become likelier. The rewards are in accelerate_recipes/games/rewards.py. Before and
after training, it measures the share of legal moves and of moves as played, in positions of held-out games.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import datasets
from trl import GRPOConfig, GRPOTrainer

from accelerate_recipes.args import ConfigError, Range, arg
from accelerate_recipes.games.games import GamesArgs, prepare_positions
from accelerate_recipes.games.next_moves import NextMoves, prompt_of
from accelerate_recipes.games.rewards import REWARDS, StockfishArgs, stockfish_reward
from accelerate_recipes.games.rules import PHASES
from accelerate_recipes.models import load_tokenizer, max_positions
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.trainers import RecipeTrainer, TrainerArgs, make_model, trl_config

METRIC = Path(__file__).parent / "metrics" / "chess_moves.py"

# Fields of trl's config, which has no ranges.
NOT_NEGATIVE = (
    "beta", "epsilon", "epsilon_high", "top_k", "off_policy_mask_threshold", "entropy_coef", "entropy_coef_min",
    "entropy_coef_max", "entropy_coef_delta", "entropy_target", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap", "max_tool_calling_iterations", "num_completions_to_print",
)  # fmt: skip
AT_LEAST_ONE = ("num_iterations", "ref_model_sync_steps", "vllm_max_model_length", "vllm_tensor_parallel_size")


@dataclass
class Args(StockfishArgs, GamesArgs, TrainerArgs, GRPOConfig):
    output_dir: str = "outputs/chess_grpo"
    model_name_or_path: str = arg("outputs/demo/export", "Chess model to begin with: a folder, or a name on the Hub.")
    num_train_positions: int = arg(20000, "Number of positions, from other games, to answer in.", min=len(PHASES))
    max_prompt_length: int = arg(
        0, "Longest prompt in tokens; longer ones are left out. 0: as long as the model can read.", min=0
    )
    per_device_train_batch_size: int = arg(8, "Answers per forward pass on one process.", min=1)
    total_batch_size: int = arg(128, "Answers per optimizer step, over all processes and accumulation.", min=1)
    learning_rate: float = arg(1e-6, "Peak learning rate.", min=0, max=1)
    weight_decay: float = arg(0.0, "Weight decay; norms and biases have none.", min=0, max=1000)
    reward_weights: list[float] = arg(
        [0.2, 1.0, 0.5, 1.0],
        "Weights of the rewards: the answer is a move, is legal, was played, is good (with --stockfish).",
        fixed=False,
        choices=Range(),
    )

    fixed = TrainerArgs.fixed | {"num_generations", "num_iterations", "shuffle_dataset"}
    ranges = (
        TrainerArgs.ranges
        | dict.fromkeys(NOT_NEGATIVE, Range(min=0))
        | dict.fromkeys(("delta", "sapo_temperature_neg", "sapo_temperature_pos", "vllm_server_timeout"), Range(above=0))
        | dict.fromkeys(AT_LEAST_ONE, Range(min=1))
        | dict.fromkeys(("min_p", "ref_model_mixup_alpha", "top_entropy_quantile"), Range(min=0, max=1))
        | dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), Range(above=0, max=1))
        | dict.fromkeys(("vllm_server_port", "vllm_group_port"), Range(min=1, max=65535))
        # Logits are divided by these.
        | {"temperature": Range(min=1e-4), "repetition_penalty": Range(min=0.01, max=100)}
        | {"num_generations": Range(min=2)}  # an answer is compared with other answers
    )  # fmt: skip
    owned_elsewhere = (
        TrainerArgs.owned_elsewhere
        | dict.fromkeys(("generation_batch_size", "steps_per_generation"), "answers are drawn for one step at a time")
        | dict.fromkeys(("num_generations_eval", "max_completion_length"), "the recipe asks for one move")
        | {"ds3_gather_for_generation": "this collection shards with FSDP"}
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.total_batch_size % self.num_generations:  # pyright: ignore[reportOperatorIssue]
            found.append(
                f"--total_batch_size {self.total_batch_size} is not a multiple of --num_generations "
                f"{self.num_generations}, the answers in one position"
            )
        if self.save_steps % self.num_iterations:
            found.append(
                f"--save_steps {self.save_steps} is not a multiple of --num_iterations {self.num_iterations}, the steps "
                "on the same answers, which a checkpoint does not hold"
            )
        if len(self.reward_weights) != len(REWARDS) + 1:
            found.append(
                f"--reward_weights has {len(self.reward_weights)} numbers; there are {len(REWARDS) + 1} rewards, the last "
                "of --stockfish"
            )
        return found


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path], datasets=args.game_datasets)


class Trainer(RecipeTrainer, GRPOTrainer):
    def _tokenize_prompts(self, prompts: list[str]):
        """Tokenise prompts as in the model's training: a begin token, then the moves."""
        return [prompt_of(self.processing_class, prompt.split()) for prompt in prompts], None, {}


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    tokenizer = load_tokenizer(args.model_name_or_path)
    folder = prepare_positions(
        args,
        num_train_positions=args.num_train_positions,
        seed=TrainerArgs.seed,  # not --seed: runs are compared in the same positions
    )
    facts = json.loads((folder / "facts.json").read_text())
    next_moves = NextMoves(facts, tokenizer, METRIC)

    # Model and trainer
    model = make_model(args)
    room = max_positions(model.config) - next_moves.max_new_tokens
    room = min(room, args.max_prompt_length or room)
    positions = [
        {"prompt": " ".join(position["prefix"]), "move": position["move"]}
        for position in datasets.Dataset.load_from_disk(folder / "train").to_list()
        if len(prompt_of(tokenizer, position["prefix"])) <= room
    ]
    if not positions:
        raise ConfigError(f"no position is left: all come after more than {room} tokens; raise --max_prompt_length")
    decided = {
        "max_completion_length": next_moves.max_new_tokens,
        "reward_weights": args.reward_weights[: len(REWARDS) + bool(args.stockfish)],
    }
    config = trl_config(run, GRPOConfig, **decided)
    with contextlib.ExitStack() as engines:
        rewards = REWARDS
        if args.stockfish:
            rewards = [*REWARDS, engines.enter_context(stockfish_reward(args.stockfish, args.stockfish_nodes))]
        train_dataset = datasets.Dataset.from_list(positions)
        trainer = Trainer(run, config, model, tokenizer, reward_funcs=rewards, train_dataset=train_dataset)
        run.print(
            f"Data: {len(positions):,} positions to answer in, {len(facts['positions']):,} held out; "
            f"{args.num_generations} answers of {next_moves.max_new_tokens} tokens at most in each of "
            f"{args.total_batch_size // args.num_generations} positions a step"  # pyright: ignore[reportOperatorIssue]
        )

        # Training and evaluation
        def evaluate_fn(step: int) -> dict[str, float]:
            return next_moves.evaluate(run.accelerator, run.model, args.per_device_eval_batch_size)

        records = trainer.train(evaluate_fn)

    # Result
    def result(before: dict, after: dict) -> Result:
        return Result(next_moves.summary({"before": before, "after": after}))

    begin = f"{args.model_name_or_path}, trained by GRPO for legal and played moves"
    finish(run, records, f"{begin} in positions of {args.game_source}.", result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
