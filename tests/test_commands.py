"""Tests of the commands: whatever is wrong with what they are given, it is one message."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import ROOT, change_json, refuses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from accelerate_recipes.arguments.gpus import GPUS
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from recipe_tools import commands
from recipe_tools.check_export import check_export


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Model and tokenizer as transformers alone saves them."""
    folder = tmp_path_factory.mktemp("run") / "export"
    tokenizer = new_word_tokenizer(["a", "b"])
    ends = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 32}
    for part in (tiny_model(**ends), tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "run/export"))


@pytest.fixture
def refusal(command):
    """Run a command that is refused; return its one message."""

    def run(*argv: object, code: int = 1) -> str:
        done = command(*argv)
        said = done.stderr
        assert done.returncode == code and said.count("error: ") == 1 and "Traceback" not in said, said
        return said

    return run


@pytest.mark.parametrize("program", ["/somewhere/accelerate_recipes/__main__.py", "/bin/accelerate-recipes"])
def test_without_a_command(program, monkeypatch, capsys):
    """It lists the commands, with examples, all of which name it as it was called."""
    monkeypatch.setattr(sys, "argv", [program])
    commands.main()
    said = capsys.readouterr().out
    name = "accelerate-recipes" if program.startswith("/bin") else "python -m accelerate_recipes"
    assert said.startswith(f"usage: {name} [-h] COMMAND ...\n")
    listed = said.partition("commands:")[2].partition("examples")[0]
    assert {command[0] for command in COMMANDS if command != ["nonsense"]} | {"launch"} <= set(listed.split())
    examples = said.partition("examples")[2].replace("\\\n", " ").splitlines()[1:-2]
    for example in examples:
        words = example.removeprefix(f"  {name} ").split()
        commands.command_parser().parse_known_args(words)
        for word in words:
            assert not word.startswith(("recipes/", "accelerate_configs/")) or (ROOT / word).is_file(), word
    assert len(examples) > 5


@pytest.mark.parametrize(
    "command", [["plan"], ["preflight"], ["prepare", "recipes/template.py"], ["checkpoint", "list"], ["launch"]]
)
def test_usage_names_the_command(command, monkeypatch, at_the_root, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/accelerate_recipes/__main__.py", *command, "--help"])
    refuses("0", commands.main, error=SystemExit)
    name = "python -m accelerate_recipes " + " ".join(command).removesuffix(" recipes/template.py")
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {'accelerate launch' if command == ['launch'] else name} "), said[:200]
    assert command != ["plan"] or {*GPUS} <= {*re.findall(r"\w+", said)}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
    "weights": (lambda out: cut(out / "model.safetensors"), "cannot be loaded: "),
    "no weights": (lambda out: (out / "model.safetensors").unlink(), "cannot be loaded: "),
    "another model": (lambda out: change_json(out / "config.json", num_hidden_layers=3), "lacks the weights model.layers.2."),
    "other sizes": (lambda out: change_json(out / "config.json", hidden_size=64), "cannot be loaded: "),
    "a size of words": (lambda out: change_json(out / "config.json", hidden_size="wide"), "cannot be loaded: "),
    "no architecture": (lambda out: change_json(out / "config.json", architectures=3), "cannot be loaded: "),
    "config": (lambda out: cut(out / "config.json"), "cannot be loaded: "),
    "a config of binary": (lambda out: (out / "config.json").write_bytes(bytes(range(256))), "cannot be loaded: "),
    "tokenizer": (lambda out: cut(out / "tokenizer.json"), "cannot be loaded: "),
    "tokenizer's settings": (lambda out: (out / "tokenizer_config.json").write_text("[]"), "cannot be loaded: "),
    "rows": (
        lambda out: (out.parent / "rows.json").write_text(
            json.dumps({"rows": 1, "trained": [3], "settings": {}, "ends": [], "arguments": []})
        ),
        "rows.json cannot be read: ",
    ),
    "a checkpoint": (lambda out: (out / "complete.json").write_text("{}"), "is a checkpoint; `python -m"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_export(damage, copied, refusal):
    damaged, expected = DAMAGES[damage]
    damaged(copied)
    assert expected in refusal("check-export", copied, "--prompt", "a")


@pytest.mark.parametrize("flags, expected", [
    (["--max_new_tokens", "0"], "--max_new_tokens is 0; it must be at least 1"),
    (["--max_new_tokens", "-1"], "--max_new_tokens is -1; it must be at least 1"),
    (["--max_new_tokens", "100000"], "give at most 30"),
    (["--prompt", ""], "--prompt has no tokens; give a text"),
])  # fmt: skip
def test_what_an_export_cannot_answer(flags, expected, exported, refusal):
    assert expected in refusal("check-export", exported, "--prompt", "a b", *flags)


def test_answers(exported, refusal):
    """Each prompt has its answer, that of the prompt alone, in the order in which they are given."""

    def answers(*words: str) -> list[str]:
        prompts = commands.command_parser().parse_args(["check-export", str(exported), *words]).prompt
        lines = check_export(exported, prompts, 28).splitlines()
        return [line for line in lines if line.startswith(("Prompt: ", "Answer: "))]

    alone = [answers("--prompt", prompt) for prompt in ("a b", "b", "a a b")]
    assert [len(lines) for lines in alone] == [2, 2, 2] and len({lines[0] for lines in alone}) == 3
    assert answers("--prompt", "a b", "b", "--prompt", "a a b") == [line for lines in alone for line in lines]
    said = refusal("check-export", exported, "--prompt", "b", "a a b", "--max_new_tokens", "30")
    assert "behind a prompt of 3 tokens" in said and "give at most 29" in said


@pytest.mark.parametrize("size", ["abc", "0", "-1", "1e3", "", "0GB", "-5MB", "nanGB", "infGB", "5 G B"])
def test_sizes_of_files(size, tmp_path, refusal):
    said = refusal("export", tmp_path, tmp_path / "out", f"--max_shard_size={size}")
    assert f"--max_shard_size {size!r} is not a size" in said


def test_an_interrupted_command_leaves_no_stack(monkeypatch, command):
    """Ctrl-C comes most often while the libraries are loaded, in the function of the command."""

    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "show_downloads", interrupt)
    done = command("list")
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("typed, meant", [
    (["prefligth"], "preflight"), (["checkpoint", "lisst", "x"], "list"), (["k8s", "pytorchjb"], "pytorchjob"),
    (["check-export", "--promt", "x", "y"], "--prompt"),
])  # fmt: skip
def test_a_misspelt_command(typed, meant, refusal):
    assert refusal(*typed, code=2).endswith(f"; did you mean {meant!r}?\n")
    assert "did you mean" not in refusal("nonsense", code=2)


@pytest.fixture
def mistaken(tmp_path, monkeypatch) -> Path:
    """Folders and files, below the working directory, that are not what a command asks for."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "new", "run/checkpoint-5", "run/checkpoint-20", "run/export", "run/checkpoint-9.partial"):
        Path(name).mkdir(parents=True)
    for name in ("new/args.yaml", "run/args.yaml", "run/checkpoint-20/complete.json", "run/export/config.json", "file"):
        Path(name).touch()
    return tmp_path


@pytest.mark.parametrize("words, given, said", [
    ("checkpoint verify", "nothing", "nothing: there is no such folder"),
    ("checkpoint verify", "file", "file: it is a file"),
    ("checkpoint verify", "run", "whose newest checkpoint is run/checkpoint-20"),
    ("checkpoint verify", "new", "a run, which has no checkpoint yet"),
    ("checkpoint verify", "empty", "empty: it holds no complete.json"),
    ("checkpoint verify", "run/export", "it is an export, not a checkpoint"),
    ("checkpoint verify", "run/checkpoint-5", "it has no complete.json: the save was interrupted"),
    ("checkpoint verify", "run/checkpoint-9.partial", "it has no complete.json: the save was interrupted"),
    ("checkpoint list", "nothing", "nothing: there is no such folder"),
    ("checkpoint list", "file", "file: there is no such folder"),
    ("checkpoint list", "run/checkpoint-20", "run/checkpoint-20: it is a checkpoint"),
    ("export", "run", "whose newest checkpoint is run/checkpoint-20"),
    ("export", "nothing", "nothing: there is no such folder"),
    ("check-export", "nothing", "nothing is no export: there is no such folder"),
    ("check-export", "run", "whose export is run/export"),
    ("check-export", "new", "a run, which has no export yet"),
    ("check-export", "run/checkpoint-5", "it is a checkpoint; `python -m accelerate_recipes export`"),
    ("check-export", "empty", "it holds no config.json or adapter_config.json"),
    ("push", "run", "whose export is run/export"),
])  # fmt: skip
def test_a_folder_that_is_something_else(words, given, said, mistaken, refusal):
    """The message says what it is, and which was meant."""
    more = {"push": ["me/tiny"], "export": ["out"]}.get(words, [])
    assert said in refusal(*words.split(), given, *more)


def test_a_run_without_checkpoints_has_a_line(mistaken, command):
    assert command("checkpoint", "list", "new").stdout == "new holds no checkpoint\n"


LONG = "x" * 5000
COMMANDS = [
    ["preflight"], ["plan"], ["schema", "--json"], ["prepare"], ["download"], ["k8s", "pytorchjob"], ["k8s", "trainjob"], ["requeue"], ["verify"],
    ["list"], ["checkpoint"], ["checkpoint", "verify"], ["checkpoint", "list"], ["export"], ["check-export"],
    ["push"], ["nonsense"],
]  # fmt: skip
FLAGS = [
    "--nodes", "--gpus-per-node", "--cpus-per-node", "--gpu", "--no_plan", "--json", "--shell", "--num_processes",
    "--config", "--image", "--max_shards", "--update", "--max_restarts", "--signalled", "--dtype", "--max_shard_size",
    "--merge_adapter", "--prompt", "--max_new_tokens", "--public",
    "--lerning_rate", "--max_steps", "--output_dir", "--", "-x",
]  # fmt: skip
WORDS = [
    "", "0", "-1", "1e400", "nan", "\u2028", "ä" * 90, LONG, f"/{LONG}/y", "/dev/null", "/proc/self/mem", "..", "no/such",
    "ORG/NAME", "{empty}", "{empty}/new", "{bytes}", "{yaml}", "{config}", "{lists}", "{broken}.py", "{export}", "{checkpoint}",
    "recipes/chess.py", "accelerate_configs/fsdp_full.yaml",
]  # fmt: skip


@pytest.fixture
def places(exported, tmp_path) -> dict[str, Path]:
    """Folders and files that the words of WORDS name, most of them damaged."""
    found = {name: tmp_path / name for name in ("empty", "bytes", "yaml", "config", "lists", "broken", "checkpoint")}
    found["empty"].mkdir()
    found["bytes"].write_bytes(bytes(range(256)))
    found["yaml"].write_text("a: [")
    found["config"].write_text("distributed_type: FSDP\nnum_processes: two\nfsdp_config: {1: [[2]]}\n")
    found["lists"].write_text("- [1]\n")
    found["broken"].with_suffix(".py").write_text("import nowhere")
    found["checkpoint"].mkdir()
    (found["checkpoint"] / "complete.json").write_text('{"step": 1, "files": {"args.yaml": {"size": 1}}}')
    return found | {"export": exported}


NONSENSE = st.tuples(st.sampled_from(COMMANDS), st.lists(st.sampled_from([*FLAGS, *WORDS, *WORDS]), max_size=6))


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(NONSENSE)
def test_nonsense_is_one_message(places, tmp_path, monkeypatch, command, drawn):
    """Every command refuses, or does what it was asked for; it never ends in a traceback."""
    name, words = drawn
    if name == ["plan"] and "recipes/chess.py" in words:
        return  # it would simulate
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "accelerate_configs"):
        Path(name).exists() or Path(name).symlink_to(ROOT / name)
    argv = [word.format(**places) for word in words]
    done = command(*name, *argv)
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") <= 1
    assert done.returncode in (0, 75) or (done.returncode in (1, 2) and (done.stderr or name == ["requeue"])), done
