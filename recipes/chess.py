"""Fine-tune a causal language model on chess games, and count how many of its moves are legal.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/chess.py

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/chess.py --config recipes/configs/chess/laptop.yaml

A game is one document, with its moves in UCI (`e2e4 e7e5 g1f3`). Several games are packed into a row. Before and after
training, the recipe measures the loss on held-out games, which are chosen by hash. In positions of all phases of these
games, it measures the shares of moves that are legal and of moves that were played. It compares both with a baseline that
knows only the previous move.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data.packing import PackedRows, collate
from accelerate_recipes.data.prepared import prepared_rows
from accelerate_recipes.data.rows import make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.life.picture import Bars
from accelerate_recipes.losses import check_document_mask, count_next_tokens, next_token_loss
from accelerate_recipes.metrics import flops_per_token
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.attention import KERNELS
from accelerate_recipes.models.configurations import Architecture, check_belong_together, new_config
from accelerate_recipes.models.generation import KEPT, tell_left_out
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.models.pretrained import check_length
from accelerate_recipes.models.tokenizers import load_tokenizer, new_word_tokenizer
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.trial import Trial, packed_trial
from chess_games import rules
from chess_games.games import GamesArgs, prepare_games
from chess_games.next_moves import NextMoves

METRIC = Path(__file__).parent / "metrics" / "chess_moves.py"


@dataclass
class Args(GamesArgs, TrainArgs, Architecture):
    shares_rows = True

    output_dir: str = "outputs/chess"
    model_name_or_path: str = arg("codellama/CodeLlama-7b-hf", "Causal language model: a name on the Hub, or a folder.")
    from_scratch: bool = arg(
        False, "Train a new model of --model_type, with one token for each move, instead of a pretrained model."
    )
    attn_implementation: str = arg("auto", "Attention kernel, see docs/levers.md.", choices=KERNELS, fixed=False)
    max_length: int = arg(1024, "Tokens in a row; a longer game is split.", min=2)
    document_mask: bool = arg(True, "Keep attention inside a game; --no_document_mask lets it cross the whole row.")

    def problems(self, world_size: int) -> list[str]:
        return super().problems(world_size) + self.architecture_problems(self.max_length)


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model],
        datasets=args.game_datasets,
        new_model=(lambda: make_model(args, make_tokenizer(args))) if args.from_scratch else None,
    )


def make_tokenizer(args: Args) -> PreTrainedTokenizerBase:
    if args.from_scratch:
        return new_word_tokenizer(rules.all_uci_moves())
    return load_tokenizer(args.model_name_or_path)


def make_model(args: Args, tokenizer: PreTrainedTokenizerBase) -> transformers.PreTrainedModel:
    if not args.from_scratch:
        return load_model(args.model_name_or_path, args.attn_implementation, **load_settings(args))
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = new_config(args, tokenizer, args.max_length, **words)
    check_belong_together(config, tokenizer)
    return new_model(config, args.attn_implementation, args.param_dtype)


def trial(args: Args) -> Trial:
    config = make_model(args, make_tokenizer(args)).config if args.from_scratch else None
    return packed_trial(args, config, next_token_loss)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    tokenizer = make_tokenizer(args)
    if args.base_model:
        check_length(args.base_model, args.max_length)
    folder = prepare_games(tokenizer, args, max_length=args.max_length, seed=args.seed)
    next_moves = NextMoves(folder, tokenizer, METRIC)
    facts = next_moves.facts
    train_rows, heldout_rows = (
        PackedRows(prepared_rows(folder / name), args.max_length, tokenizer.pad_token_id, args.document_mask)
        for name in ("train", "heldout")
    )
    train_loader = make_train_loader(
        train_rows, args, run.data_rank, run.data_world_size, collate_fn=collate, content=facts["content"]
    )
    heldout_loader = make_eval_loader(heldout_rows, args, run.data_rank, run.data_world_size, collate_fn=collate)
    run.show_rows(tokenizer, {"Training": train_loader, "Evaluation": heldout_loader}, train_rows.num_targets)

    # Model
    total_steps = num_steps(args, len(train_rows))
    lengths = train_rows.attended_length, args.max_length
    model = make_model(args, tokenizer)
    tell_left_out(run.print, model, KEPT)
    run.prepare(model, tokenizer, total_steps=total_steps, flops_fn=lambda model: flops_per_token(model, *lengths))
    if args.document_mask:
        check_document_mask(run.model, run.accelerator.device)
    run.print(
        f"Data: {facts['train']:,} games to train on, {facts['heldout']:,} held out, {facts['skipped']:,} skipped; "
        f"{len(train_rows):,} rows of {args.max_length} tokens, {train_rows.padding_share:.1%} padding"
    )

    # Training and evaluation
    def evaluate_fn(step: int) -> dict[str, float]:
        loss = evaluate_loss(run.accelerator, run.model, heldout_loader, next_token_loss, count_next_tokens)
        return {"loss": loss} | next_moves.evaluate(run.accelerator, run.model, args.per_device_eval_batch_size)

    records = train(run, train_loader, loss_fn=next_token_loss, count_fn=count_next_tokens, evaluate_fn=evaluate_fn)

    # Result
    game = next_moves.play(run.accelerator, run.model, 40)

    def result(before: dict, after: dict) -> Result:
        baseline = {f"eval_{name}": value for name, value in next_moves.baseline().items()}
        results = {"before": before, "baseline": baseline, "after": after}
        parts = [part for part in (*rules.PHASES, "unseen") if f"eval_legal_move_rate_{part}" in after]
        bars = {
            name: {part: 100 * values[f"eval_legal_move_rate_{part}"] for part in parts}
            for name, values in results.items()
        }
        against_itself = f"\nThe model against itself, {len(game)} legal moves:\n{rules.draw_game(game)}\n\n"
        text = against_itself + next_moves.summary(results)
        return Result(text, Bars(bars, "Legal next moves in held-out games", "%"))

    begin = f"A new {args.model_type}, trained" if args.from_scratch else f"{args.model_name_or_path}, fine-tuned"
    description = f"{begin} on {facts['train']:,} chess games in UCI, from {args.game_source}."
    finish(run, records, description, result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
