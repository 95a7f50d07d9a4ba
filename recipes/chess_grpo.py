"""Train a chess model with rewards, by trl's GRPOTrainer: the model answers with moves, and legal moves earn more.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/chess_grpo.py --config recipes/configs/chess_grpo/laptop.yaml

It begins with the export of chess.py. In each position of a step, the model draws `--num_generations` moves. Moves that
earn more than the mean of their group become more likely. The rewards are in accelerate_recipes/chess/rewards.py. Before
and after training, the recipe measures the shares of moves that are legal and of moves that were played, in positions of
held-out games.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import datasets
import trl

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range
from accelerate_recipes.chess.games import PositionsArgs, prepare_positions
from accelerate_recipes.chess.next_moves import NextMoves, longest_move, prompt_of, with_begin
from accelerate_recipes.chess.rewards import REWARDS, StockfishArgs, stockfish_reward
from accelerate_recipes.engine import train
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life.picture import Curves
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.posttraining.answers import AnswerTrainer, GRPOArgs, give_model_to_trl, rows_of_prompts
from accelerate_recipes.posttraining.answers_trial import answers_trial
from accelerate_recipes.posttraining.prompts import room_for_prompts
from accelerate_recipes.posttraining.settings import make_model, trl_config
from accelerate_recipes.posttraining.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.trial import Trial

METRIC = Path(__file__).parent / "metrics" / "chess_moves.py"


@dataclass
class Args(StockfishArgs, PositionsArgs, GRPOArgs, trl.GRPOConfig):
    output_dir: str = "outputs/chess_grpo"
    reward_weights: list[float] = arg(
        [0.2, 1.0, 0.5, 1.0],
        "Weights of the rewards: the answer is a move; it is legal; it was played; it is good (with --stockfish).",
        fixed=False,
        choices=Range(),
    )

    owned_elsewhere = GRPOArgs.owned_elsewhere | {"max_completion_length": "the recipe asks for one move"}

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        given, needed = len(self.reward_weights), len(REWARDS) + 1
        if given != needed:
            found.append(f"--reward_weights has {given} numbers; there are {needed} rewards, the last of --stockfish")
        return found


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path], datasets=args.game_datasets)


def trial(args: Args) -> Trial:
    return answers_trial(args, longest_move(load_tokenizer(args.model_name_or_path)))


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    tokenizer = load_tokenizer(args.model_name_or_path)
    folder = prepare_positions(args, Args.seed)  # not --seed: all runs are compared in the same positions
    next_moves = NextMoves(folder, tokenizer, METRIC)

    # Model and trainer
    model = make_model(args)
    room = room_for_prompts(args, model.config, next_moves.max_new_tokens)
    found = datasets.Dataset.load_from_disk(folder / "train").to_list()
    lengths = [len(prompt_of(tokenizer, position["prefix"])) for position in found]
    positions = [
        {"prompt": " ".join(position["prefix"]), "move": position["move"]}
        for position, length in zip(found, lengths, strict=True)
        if length <= room
    ]
    counts = {"left out": len(found) - len(positions), "longest": max(lengths)}
    if not positions:
        raise ConfigError(f"no position is left: all come after more than {room} tokens; raise --max_prompt_length")
    decided = {
        "max_completion_length": next_moves.max_new_tokens,
        "reward_weights": args.reward_weights[: len(REWARDS) + bool(args.stockfish)],
    }
    config = trl_config(run, trl.GRPOConfig, **decided)
    with contextlib.ExitStack() as engines:
        rewards = REWARDS
        if args.stockfish:
            rewards = [*REWARDS, engines.enter_context(stockfish_reward(args.stockfish, args.stockfish_nodes))]
        prompts = datasets.Dataset.from_list(positions)
        run.adapter = add_adapters(model, args)
        given = {"reward_funcs": rewards, "train_dataset": prompts}
        trainer = give_model_to_trl(AnswerTrainer, run, config, model, with_begin(tokenizer), **given)
        rows = rows_of_prompts(trainer, prompts)
        run.show_rows(tokenizer, rows.first | {"Evaluation": next_moves}, len(prompts), counts)
        run.print(
            f"Data: {len(positions):,} positions to answer in, {len(next_moves.positions):,} held out; "
            f"{args.num_generations} answers of {next_moves.max_new_tokens} tokens at most in each of "
            f"{args.total_batch_size // args.num_generations} positions a step"
        )

        # Training and evaluation
        run.prepare(model, tokenizer, num_whole_steps(args, len(prompts)))
        trainer.use_sharded_model()
        trainer.add_reference()
        loader = rows.make_loader(order_class=WholeSteps)

        def evaluate_fn(step: int) -> dict[str, float]:
            return next_moves.evaluate(run.accelerator, run.model, args.per_device_eval_batch_size)

        loss_fn, count_fn, draw_fn = trainer.sum_and_count, trainer.count_parts, trainer.draw
        functions = {"draw_fn": draw_fn, "values_fn": trainer.values, "mark_fn": trainer.mark}
        records = train(run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, **functions)

    # Result
    def result(before: dict, after: dict) -> Result:
        curves = [Curves({"training": "reward"}, "Reward"), next_moves.curves]
        return Result(next_moves.summary({"before": before, "after": after}), curves=curves)

    begin = f"{args.model_name_or_path}, trained by GRPO for legal and played moves"
    finish(run, records, f"{begin} in positions of {args.game_source}.", result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
