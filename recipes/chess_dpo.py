"""Train a chess model to prefer the moves of masters to its own illegal moves, with trl's DPOTrainer.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/chess_dpo.py --config recipes/configs/chess_dpo/laptop.yaml

It begins with the export of chess.py. First the model chooses a move in positions of real games. If its move is illegal
(with `--reject not_played`, also if the master played another move), the master's move and the model's move make a pair.
Then the model learns to prefer the master's move. Before and after training, the recipe measures the shares of moves that
are legal and of moves that were played, in positions of held-out games.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import trl
import xxhash
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.chess.games import PositionsArgs, prepare_positions
from accelerate_recipes.chess.next_moves import NextMoves, prompt_of
from accelerate_recipes.chess.preferences import RULES, make_pairs
from accelerate_recipes.data.files import read_files
from accelerate_recipes.engine import train
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.life import stop
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.posttraining.preferences import DPOArgs, PairLoss, outputs_of_loss, preference_trial
from accelerate_recipes.posttraining.settings import add_loss_by_trl, make_model
from accelerate_recipes.posttraining.trained_pairs import count_pairs, read_pairs
from accelerate_recipes.posttraining.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.ranks import on_first_of_machine_before_others, on_first_rank
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.trial import Trial

METRIC = Path(__file__).parent / "metrics" / "chess_moves.py"
MOVES = ("chosen", "rejected")


@dataclass
class Args(PositionsArgs, DPOArgs, trl.DPOConfig):
    output_dir: str = "outputs/chess_dpo"
    reject: str = arg(
        "illegal", "Moves to reject: `illegal` ones, or also legal ones that were `not_played`.", choices=RULES
    )


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path], datasets=args.game_datasets)


def pair_file(args: Args, positions: Path) -> Path:
    """Name the file of pairs after what decides its content: another --reject, model or set of games gets another file."""
    model = [args.model_name_or_path, cache.version("model", args.model_name_or_path)]
    key = json.dumps([args.reject, model, positions.name]).encode()
    return Path(args.output_dir) / f"pairs-{xxhash.xxh64_hexdigest(key)}.jsonl"


def load_pairs(
    file: Path, args: Args, positions: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[datasets.Dataset, int]:
    """Load the pairs, tokenised for trl's collator, without those that have more than `max_tokens`.

    Returns:
        The rows, and the number of pairs before any was left out.

    Raises:
        ConfigError: if there are no pairs.
    """

    def tokenize(pair: dict) -> dict[str, list[int]]:
        prefix = positions[pair["position"]]["prefix"]
        prompt = prompt_of(tokenizer, prefix)
        moves = {f"{name}_ids": prompt_of(tokenizer, [*prefix, pair[name]])[len(prompt) :] for name in MOVES}
        moves["rejected_ids"] = moves["rejected_ids"] or [tokenizer.eos_token_id]
        return {"prompt_ids": prompt} | moves

    if file.stat().st_size == 0:
        raise ConfigError(
            f"no pairs: in {len(positions):,} positions the model made no move that --reject {args.reject} takes; raise "
            "--num_train_positions, or give --reject not_played"
        )
    pairs = read_files([str(file)], args.data_cache_dir)
    rows = pairs.map(tokenize, remove_columns=pairs.column_names)
    rows = rows.filter(lambda pair: len(pair["prompt_ids"]) + max(len(pair[f"{m}_ids"]) for m in MOVES) <= max_tokens)
    return rows, len(pairs)


def trial(args: Args) -> Trial:
    return preference_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    tokenizer = load_tokenizer(args.model_name_or_path)
    folder = prepare_positions(args, Args.seed)  # not --seed: all runs are compared in the same positions
    next_moves = NextMoves(folder, tokenizer, METRIC)

    # Pairs
    positions = datasets.Dataset.load_from_disk(folder / "train")
    file = on_first_rank(lambda: pair_file(args, folder))
    if not on_first_rank(file.exists):
        if args.data_only:
            run.show_rows(tokenizer, {"Evaluation": next_moves})  # the model makes the pairs when the run begins
        stop.listen(run.output_dir)
        run.shard(make_model(args))
        size = args.per_device_eval_batch_size
        make_pairs(run.accelerator, run.model, next_moves, positions.to_list(), args.reject, file, size)
        run.release()

    # Model, before the pairs as it reads them
    model = make_model(args)
    run.adapter = add_adapters(model, args)
    add_loss_by_trl(args, model, tokenizer, outputs_of_loss(args))
    loss = PairLoss(args, model.config, run.accelerator)
    load = partial(load_pairs, file, args, positions, tokenizer, loss.args.max_length)
    pairs, num_pairs = on_first_of_machine_before_others(load)
    rows = read_pairs(run, loss.collator(tokenizer.pad_token_id), pairs)
    num_targets, cut = count_pairs(loss.args, pairs)
    left_out = {"left out": num_pairs - len(pairs)}
    run.show_rows(tokenizer, rows.first | {"Evaluation": next_moves}, num_targets, left_out | cut)
    run.print(f"Data: {len(pairs):,} pairs from {len(positions):,} positions, {len(next_moves.positions):,} held out")

    # Training and evaluation
    run.prepare(model, tokenizer, num_whole_steps(args, len(pairs)))
    loss.add_reference(run, rows)
    loader = rows.make_loader(order_class=WholeSteps)

    def evaluate_fn(step: int) -> dict[str, float]:
        return next_moves.evaluate(run.accelerator, run.model, args.per_device_eval_batch_size)

    loss_fn, count_fn, values_fn, mark_fn = loss.sum_and_count, loss.count_parts, loss.values, loss.mark
    records = train(
        run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, values_fn=values_fn, mark_fn=mark_fn
    )

    # Result
    def result(before: dict, after: dict) -> Result:
        return Result(next_moves.summary({"before": before, "after": after}), curves=[next_moves.curves])

    description = f"{args.model_name_or_path}, trained by DPO to prefer the moves of {args.game_source} to its own."
    finish(run, records, description, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
