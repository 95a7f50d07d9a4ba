"""Preparation of games from files or the Hub: check, split by hash, tokenise, and cache as packed rows."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data.files import falls_under, other_share, read_files, text_hash
from accelerate_recipes.data.packing import pack_documents
from accelerate_recipes.data.passes import map_rows
from accelerate_recipes.data.prepared import cached, check_no_bad, checksum_of_rows, tokens_key
from accelerate_recipes.data.reading import reading
from accelerate_recipes.errors import ConfigError, suggestion
from accelerate_recipes.hub import cache
from chess_games import rules

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

SUFFIXES = (".parquet", ".jsonl", ".pgn")
VERSION = 5  # of the prepared data; raise it when their form changes, so that cached data of the old form are not used


@dataclass
class GamesArgs:
    """Arguments that say which games a recipe reads. Put it before TrainArgs in the bases of a recipe's arguments."""

    # The games of a resumed run are compared by content, so the files may have moved.
    group = "data"
    dataset_name: str = arg(
        "laion/strategic_game_chess", "Dataset on the Hub with a column Moves (list of UCI moves).", fixed=False
    )
    dataset_files: str = arg(
        "**/chess_game_0001.parquet", "Pattern of the dataset's files to read; each file has about 528 MB."
    )
    train_files: list[str] = arg([], "Local .parquet, .jsonl or .pgn files, instead of a dataset.", fixed=False)
    skip_bad_games: bool = arg(False, "Skip and count games with an illegal move, instead of stopping.", group="rare")
    piece_letters: str = arg(
        rules.LETTERS,
        "Letters of king, queen, rook, bishop and knight in .pgn files; KDTLS in German, RDTFC in French.",
        group="rare",
    )
    heldout_share: float = arg(
        0.002,
        "Share of the games to test on, chosen by a hash of the moves; use the same in recipes that follow chess.py.",
        above=0,
        below=1,
    )
    num_positions: int = arg(
        600, "Positions of held-out games to predict moves in.", fixed=False, min=len(rules.PHASES), group="evaluation"
    )
    data_cache_dir: str = arg(".cache/data", "Folder for prepared games and positions.", fixed=False)

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size) + self.file_problems("train_files", SUFFIXES)
        letters = self.piece_letters
        if len({*letters}) != len(letters) or len(letters) != len(rules.LETTERS) or letters.upper() != letters:
            found.append(f"--piece_letters {letters!r} must be five different capitals, such as {rules.LETTERS}")
        return found

    @property
    def game_datasets(self) -> list[cache.HubDataset]:
        """List the datasets to read from the Hub."""
        return [] if self.train_files else [cache.HubDataset(self.dataset_name, files=self.dataset_files)]

    @property
    def game_source(self) -> str:
        """Name of the games' source, for messages."""
        return ", ".join(self.train_files) or f"{self.dataset_name} ({self.dataset_files})"

    @property
    def game_files(self) -> list[str]:
        return self.train_files or cache.dataset_files(self.dataset_name, self.dataset_files)

    @property
    def game_key(self) -> list:
        """Key under which the cache finds the data from these files, with these settings."""
        files = [[Path(file).suffix, cache.file_version(file)] for file in self.train_files]
        if not files:
            files = [self.dataset_files, cache.version("dataset", self.dataset_name, self.dataset_files)]
        return [VERSION, files, self.heldout_share, self.num_positions, self.skip_bad_games, self.piece_letters]


def prepare_games(tokenizer: PreTrainedTokenizerBase, args: GamesArgs, *, max_length: int, seed: int) -> Path:
    """Build or find the folder with the prepared games.

    - `train/` and `heldout/`: packed rows (see `data.packing.PackedRows`)
    - `facts.json`: numbers of games, `positions` to test on, the `baseline`'s table, and `content`, a checksum of the
      training rows

    A game is one document: begin token, moves separated by spaces, end token (see `begin_token`). `is_seen` of a position
    says whether a training game begins with the same moves. A game is held out if the hash of its moves falls under
    `args.heldout_share`. So the same game never lies on both sides, whatever the order of the files.

    Raises:
        ConfigError: for files without games, and for illegal moves unless `args.skip_bad_games`.
    """

    def build(folder: Path, tmp: Path) -> dict:
        import datasets

        parts = []
        for i, file in enumerate(args.game_files):
            games = load_games(file, tmp / f"source-{i}", args.piece_letters)
            parts.append(tokenize_games(games, tokenizer, args.heldout_share, file, tmp / f"tokens-{i}.arrow"))
        good = good_games(parts, args)
        games = datasets.concatenate_datasets(parts)
        heldout = np.array(games["heldout"])
        facts = {"games": len(games), "skipped": int((~good).sum())}
        for name, chosen in sides_of(good, heldout).items():
            check_left(name, chosen, games["Moves"], good, args)
            part = games.select(chosen).flatten_indices(cache_file_name=str(tmp / f"{name}.arrow"))
            rows = pack_documents(part, max_length, tmp / f"{name}-rows.arrow")
            rows.save_to_disk(folder / name)
            facts[name] = len(part)
            if name == "train":
                facts["content"] = checksum_of_rows(rows, ["input_ids", "lengths"])
                train_games = part["Moves"]
                facts["baseline"] = rules.most_frequent_followers(train_games)
            else:
                facts["positions"] = rules.sample_positions(part["Moves"], args.num_positions, seed)
                rules.mark_seen(facts["positions"], train_games)
        return facts

    key = {"games": args.game_key, "rows": [tokens_key(tokenizer), max_length, seed]}
    return cached(Path(args.data_cache_dir), key, build)


def sides_of(good: np.ndarray, heldout: np.ndarray) -> dict[str, np.ndarray]:
    """Return the numbers of the good games on each side."""
    return {"train": np.flatnonzero(good & ~heldout), "heldout": np.flatnonzero(good & heldout)}


def check_left(name: str, left: Sized, games: "Sequence[list[str]]", good: np.ndarray, args: GamesArgs) -> None:
    """Raise ConfigError if nothing of the games, of which some are `good`, is left for a side."""
    if not len(left):
        hashes = [text_hash(" ".join(games[int(number)])) for number in np.flatnonzero(good)]
        raise ConfigError(f"none of {len(games)} games is left for {name}; {other_share(hashes, args.heldout_share)}")


def begin_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that begins a game. With it, the first move can also be learnt and predicted.

    If a tokenizer has no begin token, like Qwen's, this is the end token, which separates two texts anyway. GPT-2's begin
    token is its end token.
    """
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id  # pyright: ignore[reportReturnType]


def load_games(file: str, cache_dir: Path, letters: str = rules.LETTERS) -> "datasets.Dataset":
    """Load the games of one file: `Moves`, a list of texts, and `defect`: why a row is not a normal game of chess, or "".

    `letters` are the letters of the pieces in a .pgn file.

    Raises:
        DataError: for a file that cannot be read, or has no games.
        ConfigError: for a file without a column `Moves`.
    """
    import datasets

    columns = datasets.Features({"Moves": datasets.List(datasets.Value("string")), "defect": datasets.Value("string")})
    if file.endswith(".pgn"):
        with reading(file):
            if next(rules.read_pgn(file, letters), None) is None:
                raise ValueError("it has 0 games")
            given = {"path": file, "letters": letters}
            return datasets.Dataset.from_generator(rules.read_pgn, columns, str(cache_dir), gen_kwargs=given)
    rows = read_files([file], cache_dir)
    if "Moves" not in rows.column_names:
        raise ConfigError(
            f"{file} has the columns {rows.column_names}; chess needs `Moves`, a list of UCI moves"
            + suggestion("Moves", rows.column_names)
        )
    rows = rows.select_columns("Moves")
    return map_rows(rows, partial(normal_games, features=rows.features), columns, desc="Reading games")


def normal_games(table: "pa.Table", first: int, features: "datasets.Features") -> "pa.Table":
    """Make `Moves` and `defect` of rows that were read, see `load_games`."""
    import pyarrow as pa

    read = features.decode_batch(table.to_pydict())["Moves"]
    read = [moves.split() if isinstance(moves, str) else moves for moves in read]
    defects = [rules.defect_of_moves(moves) for moves in read]
    games = [[] if defect else rules.canonical(moves) for moves, defect in zip(read, defects, strict=True)]
    return pa.table({"Moves": games, "defect": defects})


def good_games(parts: "Sequence[datasets.Dataset]", args: GamesArgs) -> np.ndarray:
    """Return for each game of all files whether it has no defect, (number of games,) bool.

    Raises:
        ConfigError: names the defective games, unless `args.skip_bad_games`.
    """
    defects = [part["defect"][:] for part in parts]
    bad = [
        f"{file}, row {row}: {defect}"
        for file, part in zip(args.game_files, defects, strict=True)
        for row, defect in enumerate(part, 1)
        if defect
    ]
    if not args.skip_bad_games:
        check_no_bad("These games cannot be used; --skip_bad_games leaves them out", bad)
    return np.array([not defect for part in defects for defect in part])


def tokenize_games(
    games: "datasets.Dataset", tokenizer: PreTrainedTokenizerBase, heldout_share: float, source: str, file: Path
) -> "datasets.Dataset":
    """Add `input_ids` and `heldout` (bool); write the reason into `defect` if a game has an illegal move."""
    import datasets

    added = {"input_ids": datasets.List(datasets.Value("int32")), "heldout": datasets.Value("bool")}
    make = partial(checked_games, tokenizer=tokenizer, share=heldout_share)
    said = f"Checking and tokenising {Path(source).name}"
    return map_rows(games, make, datasets.Features(dict(games.features) | added), desc=said, file=file)


def checked_games(table: "pa.Table", first: int, tokenizer: PreTrainedTokenizerBase, share: float) -> "pa.Table":
    """Make what `tokenize_games` returns."""
    import pyarrow as pa

    games, defects = table["Moves"].to_pylist(), table["defect"].to_pylist()
    texts = [" ".join(moves) for moves in games]
    tokens: Any = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return pa.table({
        "Moves": table["Moves"],
        "defect": [defect or rules.defect_of_game(moves) for moves, defect in zip(games, defects, strict=True)],
        "input_ids": [[begin_token(tokenizer), *ids, tokenizer.eos_token_id] for ids in tokens],
        "heldout": [falls_under(text, share) for text in texts],
    })  # fmt: skip
