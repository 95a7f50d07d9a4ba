"""Data and measures of the chess tasks for lm-evaluation-harness.

The functions get the --model_args of `lm_eval`. The card of the export, which is `peft` if it holds adapters, has the
arguments of the run, which say what was held out. Relative names of files are those of the run, so start the evaluation
where the run was started.
"""

import tempfile
import warnings
from dataclasses import fields
from pathlib import Path

from datasets import Dataset

from accelerate_recipes.checkpoint.export import arguments_of
from accelerate_recipes.data.files import falls_under
from accelerate_recipes.disk import read_json
from accelerate_recipes.models.tokenizers import load_tokenizer
from chess_games import rules
from chess_games.games import GamesArgs, begin_token, load_games, prepare_games
from chess_games.next_moves import answer


def games_args(export: str) -> tuple[GamesArgs, dict]:
    """Return the arguments of a run that say which games it read, and all its arguments."""
    arguments = arguments_of(Path(export))
    known = {field.name: arguments[field.name] for field in fields(GamesArgs) if field.name in arguments}
    return GamesArgs(**known), arguments


def positions(pretrained: str, peft: str = "", **_: object) -> dict[str, Dataset]:
    """Return the positions in which the run predicted moves."""
    export = peft or pretrained
    args, arguments = games_args(export)
    tokenizer = load_tokenizer(export)
    folder = prepare_games(tokenizer, args, max_length=arguments["max_length"], seed=arguments["seed"])
    found = read_json(folder / "facts.json")["positions"]
    begin = str(tokenizer.convert_ids_to_tokens(begin_token(tokenizer)))
    return {"test": Dataset.from_list([{**one, "prompt": begin + " ".join(one["prefix"])} for one in found])}


def judge(doc: dict, results: list[str]) -> dict[str, float]:
    """Judge a generated move, over all positions, in its phase, and in positions that occur in no training game."""
    move = answer(results[0])
    found = {"legal_move_rate": rules.is_legal(doc["prefix"], move), "next_move_accuracy": move == doc["move"]}
    parts = ["", f"_{doc['phase']}", *(["_unseen"] * (not doc["is_seen"]))]
    return {f"{name}{part}": float(value) for name, value in found.items() for part in parts}


def games(pretrained: str, peft: str = "", **_: object) -> dict[str, Dataset]:
    """Return the games that the run held out, each with the number of its tokens that the loss counts."""
    export = peft or pretrained
    args, _arguments = games_args(export)
    tokenizer = load_tokenizer(export)
    begin, rows, different = str(tokenizer.convert_ids_to_tokens(begin_token(tokenizer))), [], 0
    with tempfile.TemporaryDirectory() as folder:
        for i, file in enumerate(args.game_files):
            read = load_games(file, Path(folder) / str(i), args.piece_letters)
            for moves, defect in zip(read["Moves"], read["defect"], strict=True):
                text = "" if defect else " ".join(moves)
                if text and falls_under(text, args.heldout_share) and not rules.defect_of_game(moves):
                    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                    game = text + str(tokenizer.eos_token)
                    together = tokenizer(begin + game, add_special_tokens=False)["input_ids"]
                    different += together != [begin_token(tokenizer), *ids, tokenizer.eos_token_id]
                    rows.append({"prompt": begin, "game": game, "num_targets": len(ids) + 1})
    if different:
        warnings.warn(
            f"{different} games have other tokens here than in the run, so their loss is another", stacklevel=2
        )
    return {"test": Dataset.from_list(rows)}


def score(doc: dict, results: list[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    """Return the log-likelihood of a game, and over how many tokens."""
    return {"loss": (results[0][0], doc["num_targets"])}


def mean_loss(games: list[tuple[float, int]]) -> float:
    """Average over all tokens, as the recipe does, not over games."""
    return -sum(likelihood for likelihood, _ in games) / sum(number for _, number in games)
