"""Tests of `prepare`: the rows that it tokenises are those that the run reads; none is tokenised again."""

import json
import os
import signal
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pytest
from conversations import save_base, template_of
from datasets import Features, Value
from helpers import ROOT, SMALL_CHESS, write_rows

from accelerate_recipes.data import passes
from accelerate_recipes.data.files import read_files
from accelerate_recipes.data.passes import map_rows, num_processes
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.life import workers
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer, new_word_tokenizer
from accelerate_recipes.text.text_pairs import PairArgs, prepare_pairs
from chess_games.games import GamesArgs, prepare_games
from chess_games.rules import all_uci_moves

# What `python -m accelerate_recipes` does, in a process that is no rank.
PREPARE = """import os

from recipe_tools.commands import main

del os.environ["RANK"], os.environ["LOCAL_RANK"]
main()
"""
SIZE = ("--max_steps", 2, "--total_batch_size", 4, "--per_device_train_batch_size", 2)
SMALL_T5 = ("--config_overrides", "vocab_size=400", "d_model=32", "d_kv=8", "d_ff=64", "num_layers=2", "num_heads=4")


@pytest.fixture
def arguments(tmp_path, games_file) -> dict[str, tuple]:
    """Return arguments of each recipe that tokenises its rows into files before it trains."""

    base = save_base(tmp_path / "base", template_of("qwen2_5"), "<|im_end|>")
    messages = [[{"role": "user", "content": f"Question {i}?"}] for i in range(40)]
    answer = {"role": "assistant", "content": "Yes."}
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": [*asked, answer]} for asked in messages])
    pairs = [{"prompt": a, "chosen": [answer], "rejected": [answer | {"content": "No."}]} for a in messages]
    sides = write_rows(tmp_path / "pairs.jsonl", pairs)
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        texts = write_rows(tmp_path / "texts.jsonl", [json.loads(line) for line in islice(lines, 100)])
    loaded = ("--model_name_or_path", base, "--heldout_share", 0.2, "--max_length", 400)
    kept = ("--data_cache_dir", tmp_path / "rows")
    return {
        "sft": (*loaded, "--train_files", chats),
        # Log-probabilities of the reference, which the run keeps with the pairs, need its weights.
        "dpo": (*loaded, "--train_files", sides, "--precompute_ref_log_probs", "false"),
        "chess": ("--from_scratch", "--train_files", games_file, "--max_length", 64, *kept, *SMALL_CHESS),
        "t5": ("--from_scratch", "--train_files", texts, "--heldout_share", 0.2, *kept, *SMALL_T5),
    }


@pytest.mark.parametrize(
    "name", ["sft", pytest.param("dpo", marks=pytest.mark.slow), "chess", pytest.param("t5", marks=pytest.mark.slow)]
)
def test_the_run_reads_what_was_prepared(fork_server, forks, arguments, tmp_path, name):
    """Two ranks find all tokenised rows of `prepare`: no file of rows is new, and none is written again."""
    home = Path(psutil.Process(fork_server.process.pid).environ()["HF_HOME"], "datasets")
    script, out, temporary = ROOT / f"recipes/{name}.py", tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    args = (*arguments[name], *SIZE, "--output_dir", out)

    def files() -> dict[Path, tuple[int, int, int]]:
        places = (home, tmp_path / "rows", temporary)
        # `datasets` locks its caches by empty files.
        found = [file for place in places for file in place.rglob("*") if file.is_file() and file.suffix != ".lock"]
        stats = [file.stat() for file in found]
        return {file: (s.st_ino, s.st_mtime_ns, s.st_size) for file, s in zip(found, stats, strict=True)}

    before = files()
    printed = fork_server.run_python(tmp_path, PREPARE, "prepare", script, *args, TMPDIR=temporary)
    assert "target |" in printed
    prepared = files()
    assert [file for file in prepared.keys() - before.keys() if file.suffix == ".arrow"], "rows were tokenised"
    forks.succeed(out, *args, script=script, TMPDIR=temporary)
    assert files() == prepared


def numbered(table: pa.Table, first: int, refused: int, log: str) -> pa.Table:
    """Number the rows of a table, and write which process did it; refuse one row."""
    with Path(log).open("a") as lines:
        lines.write(f"{os.getpid()}\n")
    if first <= refused < first + len(table):
        raise DataError(f"row {refused}")
    if refused < -1:
        os.kill(os.getpid(), signal.SIGKILL)
    return table.append_column("number", pa.array(range(first, first + len(table))))


def test_a_pass_in_several_processes(worker_server, tmp_path, monkeypatch):
    """It makes the rows that one process makes, in their order, once; what fails leaves no file, and ends no other pass."""
    file = write_rows(tmp_path / "rows.jsonl", ({"text": f"{i}"} for i in range(2000)))
    rows = read_files([str(file)], tmp_path).select(range(1999, -1, -1))  # each is a chunk
    features, log = Features(dict(rows.features) | {"number": Value("int64")}), tmp_path / "log"
    given = {"refused": -1, "log": str(log)}
    monkeypatch.setattr(passes, "ROWS_TOGETHER", 100)
    made = map_rows(rows, partial(numbered, **given), features, num_proc=2)
    assert made["text"][:] == [f"{i}" for i in range(1999, -1, -1)] and made["number"][:] == [*range(2000)]
    processes = log.read_text().split()
    assert len(processes) == 20 and len({*processes}) <= 2 and str(os.getpid()) not in processes
    assert map_rows(rows, partial(numbered, **given), features)["number"][:] == [*range(2000)]
    assert len(log.read_text().split()) == 20, "it is found again, whatever the number of processes"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="row 1234"):
        map_rows(rows, partial(numbered, **given | {"refused": 1234}), features, num_proc=2)
    with pytest.raises(ConfigError, match=r"one of 2 processes .* was ended, .* --dataset_num_proc"):
        map_rows(rows, partial(numbered, **given | {"refused": -2}), features, num_proc=2)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(workers, "_has_fork_server", False)
    log.unlink()
    alone = map_rows(rows, partial(numbered, **given | {"log": str(tmp_path / "other")}), features, num_proc=2)
    assert alone["number"][:] == [*range(2000)] and {*(tmp_path / "other").read_text().split()} == {str(os.getpid())}


@pytest.mark.parametrize("kind", ["pairs", "games"])
def test_pairs_and_games_are_equal_from_any_number_of_processes(kind, worker_server, tmp_path, games_file, monkeypatch):
    """They come from the fork server, as those of conversations do. Nothing that is kept depends on their number."""
    start, asked, made = passes.in_processes, [], []

    def in_processes(number: int, make: passes.Make):
        asked.append(number)
        return start(number, make)

    def prepare(folder: Path) -> Path:
        if kind == "games":
            files = {"train_files": [str(games_file)], "data_cache_dir": str(folder)}
            games = GamesArgs(heldout_share=0.2, num_positions=3, **files)
            return prepare_games(new_word_tokenizer(all_uci_moves()), games, max_length=64, seed=0)
        texts = ROOT / "data/en_fr/libreoffice.jsonl"
        tokenizer = new_bpe_tokenizer(texts.read_text().splitlines()[:100], 400, "$A </s>")
        pairs = PairArgs(train_files=[str(texts)], dataset_config="", max_source_length=9, data_cache_dir=str(folder))
        return prepare_pairs(tokenizer, pairs)

    monkeypatch.setattr(passes, "in_processes", in_processes)
    for number in (1, 3):
        monkeypatch.setattr(passes, "num_processes", lambda _, number=number: number)
        folder = prepare(tmp_path / str(number))
        names = ("facts.json", "key.json", "*/*.arrow")
        made.append({file.relative_to(folder): file.read_bytes() for name in names for file in folder.glob(name)})
    assert made[0] == made[1] and len(made[0]) == 4
    packing = [1, 1]  # both sides, always by one process
    assert asked == {"pairs": [1, 3], "games": [1, 1, *packing, 3, 3, *packing]}[kind]


def test_processes_of_a_pass(monkeypatch):
    """By default as many as there are cores, at most 8, for rows and memory enough."""
    cores, memory = {*range(32)}, SimpleNamespace(available=64 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert [num_processes(number) for number in (10, 4999, 5000, 20_000, 10**6)] == [1, 1, 2, 5, 8]
    memory.available = 3 << 30
    assert num_processes(10**6) == 3
    memory.available, cores = 1 << 20, {0, 1}
    assert num_processes(10**6) == 1
