"""Tests of `push` and --push_to_hub, with a Hub on the loopback interface."""

import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import CHILDREN, ROOT, log_of
from huggingface_hub import constants
from loopback_hub import Commands, LoopbackHub, model_files

from accelerate_recipes import recipe
from accelerate_recipes.checkpoint.export import exported_files, list_files
from accelerate_recipes.hub.push import push_problems
from accelerate_recipes.launch import requirements

SCRIPT = CHILDREN / "pushing.py"


@pytest.fixture
def server():
    server = LoopbackHub()
    server.owner = "me"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shared_commands(tmp_path_factory):
    commands = Commands("http://127.0.0.1:9", tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture
def push(server, shared_commands, tmp_path):
    """Run `push`, which ends with a code; returns what it prints, in which the token never stands."""

    def run(*argv: object, code: int = 0) -> str:
        ready = {"TESTED_ENDPOINT": server.url, "HF_TOKEN": server.token}
        found, output = shared_commands.run(tmp_path / "cache", "push", *argv, **ready)
        assert found == code and server.token not in output and "Traceback" not in output, output
        return output

    return run


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Write an export of these files."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    list_files(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    made = model_files(tmp_path_factory.mktemp("model"))
    others = ("pytorch_model.bin", "consolidated.safetensors", "flax_model.msgpack", "original/consolidated.00.pth")
    return {name: data for name, data in made.items() if name not in others}


@pytest.fixture
def export(files, tmp_path) -> Path:
    return write(tmp_path / "out/export", files)


def holds(server: LoopbackHub, repo: str) -> dict[str, bytes]:
    repository = server.repositories[f"models/{repo}"]
    return {name: data for name, data in repository.commits[repository.main].items() if name != ".gitattributes"}


def contents(export: Path) -> dict[str, bytes]:
    return {name: (export / name).read_bytes() for name in exported_files(export)}


def test_a_new_repository_is_private_and_gets_the_export_in_one_commit(server, push, export, tmp_path):
    (export / "notes.txt").write_text("No export wrote this.")
    output = push(export, "me/tiny")
    assert server.created == [{"name": "tiny", "organization": "me", "visibility": "private", "type": "model"}]
    assert holds(server, "me/tiny") == contents(export) and "notes.txt" not in holds(server, "me/tiny")
    assert "additional_chat_templates/short.jinja" in holds(server, "me/tiny")
    assert len(server.repositories["models/me/tiny"].commits) == 2  # with the one that made the repository
    assert "after an interruption, run: python -m accelerate_recipes push " in output and "it is private" in output
    assert not any(server.token.encode() in body for body in server.bodies)
    assert not any(server.token.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    server.received.clear()
    assert "holds this export already" in push(export, "me/tiny") and not server.received
    assert len(server.repositories["models/me/tiny"].commits) == 2 and len(server.created) == 1


def test_public_is_asked_for(server, push, export):
    assert "everybody can read it" in push(export, "me/open", "--public")
    assert [one["visibility"] for one in server.created] == ["public"]
    before = server.repositories["models/me/open"].main
    (export / "README.md").write_text("Another card.")
    assert "everybody can read me/open; add --public" in push(export, "me/open", code=1)
    assert server.repositories["models/me/open"].main == before
    push(export, "me/open", "--public")
    assert holds(server, "me/open")["README.md"] == b"Another card."


def test_an_earlier_push_is_replaced_and_files_of_others_stay(server, push, export, tmp_path):
    """The next model has its weights in one file; then come adapters, which are no part of a whole model."""
    push(export, "me/tiny")
    repository = server.repositories["models/me/tiny"]
    others = {"LICENSE": b"Mine.", "pictures/a.png": b"A picture.", ".gitattributes": b"*.bin filter=lfs"}
    repository.push(repository.commits[repository.main] | others)
    whole = write(tmp_path / "whole", {"README.md": b"New.", "config.json": b"{}", "model.safetensors": b"One file."})
    assert "of the earlier one" in push(whole, "me/tiny")
    assert holds(server, "me/tiny") == contents(whole) | {name: others[name] for name in ("LICENSE", "pictures/a.png")}
    adapter = {"README.md": b"LoRA.", "adapter_config.json": b"{}", "adapter_model.safetensors": b"Adapters."}
    push(write(tmp_path / "adapter", adapter), "me/tiny")
    assert holds(server, "me/tiny").keys() == adapter.keys() | {"accelerate_recipes.json", "LICENSE", "pictures/a.png"}
    assert repository.commits[repository.main][".gitattributes"] == others[".gitattributes"]


@pytest.mark.parametrize("name", [
    "README.md", "pytorch_model.bin", "model-00001-of-00007.safetensors", "chat_template.jinja",
    "additional_chat_templates/rag.jinja", "generation_config.json", "tokenizer.model", "vocab.txt",
])  # fmt: skip
def test_nothing_is_overwritten_or_mixed_that_no_push_wrote(server, push, tmp_path, name):
    """A template, settings or tokenizer of somebody else would change what the model answers; other files would not."""
    export = write(tmp_path / "plain", {"README.md": b"Plain.", "config.json": b"{}", "model.safetensors": b"Weights."})
    server.push("models/me/theirs", {name: b"Somebody wrote this.", "notes.txt": b"Mine.", "results.json": b"{}"})
    server.repositories["models/me/theirs"].private = True
    before = server.repositories["models/me/theirs"].main
    assert f"me/theirs holds {name}, which no push of an export wrote" in push(export, "me/theirs", code=1)
    assert server.repositories["models/me/theirs"].main == before and not server.received
    server.push("models/me/theirs", {"notes.txt": b"Mine.", "results.json": b"{}"})
    push(export, "me/theirs")


def test_shards_of_an_earlier_push_without_its_list(server, push, export, tmp_path):
    """If somebody deletes the list, what that push wrote is nobody's, and in the way of a model in other files."""
    push(export, "me/tiny")
    repository = server.repositories["models/me/tiny"]
    kept = dict(repository.commits[repository.main])
    del kept["accelerate_recipes.json"]
    repository.push(kept)
    whole = write(tmp_path / "whole", {"README.md": b"New.", "config.json": b"{}", "model.safetensors": b"One file."})
    output = push(whole, "me/tiny", code=1)
    assert "which no push of an export wrote" in output
    assert all(name in output for name in kept if name.endswith(".safetensors")), output


def test_the_same_files_from_elsewhere_are_not_in_the_way(server, push, export):
    card = (export / "README.md").read_bytes()
    large = next(name for name in contents(export) if name.endswith(".safetensors"))
    server.push("models/me/tiny", {"README.md": card, large: (export / large).read_bytes()})
    server.repositories["models/me/tiny"].private = True
    push(export, "me/tiny")
    assert holds(server, "me/tiny") == contents(export)


def test_a_killed_push_goes_on(server, shared_commands, push, export, tmp_path):
    """Nothing is committed of a killed push; the same command sends only the large files that have not arrived."""
    large = sorted(name for name in contents(export) if name.endswith(".safetensors"))
    assert len(large) == 2
    server.held.add(hashlib.sha256((export / large[1]).read_bytes()).hexdigest())
    ready = {"TESTED_ENDPOINT": server.url, "HF_TOKEN": server.token}
    pid = shared_commands.start(tmp_path / "cache", "push", export, "me/tiny", **ready)
    deadline = time.monotonic() + 60
    while not server.received:  # one; a part of the other is under way
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert shared_commands.end()[0] == -signal.SIGKILL
    assert holds(server, "me/tiny") == {} and len(server.received) == 1
    server.held.clear()
    push(export, "me/tiny")
    assert len(server.received) == len(set(server.received)) == 2 and len(server.created) == 1
    assert holds(server, "me/tiny") == contents(export)


def test_what_the_hub_refuses(server, push, export):
    output = push(export, "others/tiny", code=1)
    assert "403" in output and output.endswith(f"python -m accelerate_recipes push {export} others/tiny\n"), output
    server.push("models/me/tiny", {".gitattributes": b"", ".gitignore": b"config.json\n"})
    repository = server.repositories["models/me/tiny"]
    repository.private = True
    assert "config.json did not arrive" in push(export, "me/tiny", code=1)
    server.before_commit = lambda: repository.push({"by": b"somebody else"})
    (export / "README.md").write_text("New.")
    assert "A commit has happened since" in push(export, "me/tiny", code=1)
    assert holds(server, "me/tiny") == {"by": b"somebody else"}
    server.before_commit = lambda: 1 / 0
    output = push(export, "me/tiny", code=1)
    assert "was not pushed: Server disconnected" in output and "to push it, run: " in output, output


def test_what_is_no_export(server, push, export, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(export, tmp_path / "loaded", ignore=shutil.ignore_patterns("accelerate_recipes.json"))
    for folder, what in {
        tmp_path / "empty": "it holds no config.json",
        tmp_path / "nowhere": "there is no such folder",
        tmp_path / "loaded": "it holds no accelerate_recipes.json",
        export.parent: f"it is the output directory of a run, whose export is {export}",
    }.items():
        assert f"{folder} is no export: {what}" in push(folder, "me/tiny", code=1)
    outside = tmp_path / "secret"
    outside.write_text("not to be pushed")
    shutil.copytree(export, tmp_path / "evil")
    listed = (export / "accelerate_recipes.json").read_text()
    (tmp_path / "evil/accelerate_recipes.json").write_text(listed.replace('"README.md"', '"README.md", "../secret"'))
    assert "it lacks ../secret" in push(tmp_path / "evil", "me/tiny", code=1)
    (export / "config.json").unlink()
    assert f"{export} is not whole: it lacks config.json" in push(export, "me/tiny", code=1)
    (tmp_path / "begun").mkdir()
    list_files(tmp_path / "begun")
    assert "begun is an export that was not finished" in push(tmp_path / "begun", "me/tiny", code=1)
    assert not server.requests


@pytest.mark.parametrize(("repo", "said"), [
    ("tiny", "'tiny' is no repository to push to; give ORG/NAME"),
    ("a/b/c", "'a/b/c' is no repository to push to; give ORG/NAME"),
    ("me/tiny model", "'me/tiny model' is no repository to push to: Repo id must use alphanumeric"),
    ("hf_abcdefghijk", "the repository to push to looks like a token"),
])  # fmt: skip
def test_names(repo, said, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_1")
    (problem,) = push_problems(repo)
    assert problem.startswith(said) and "abcdefghijk" not in problem


def test_problems_are_found_together_and_before_any_work(monkeypatch, tmp_path):
    """Offline, without a token, with one that an HTTP library would print, on every rank and on a login node."""
    args = recipe.TrainArgs(push_to_hub="tiny")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    found = requirements.push_to_hub_problems(args, from_here=True)
    assert len(found) == 3 and all(problem.startswith("--push_to_hub: ") for problem in found)
    assert "HF_HUB_OFFLINE is set" in found[1] and "run `hf auth login`" in found[2]
    assert len(requirements.push_to_hub_problems(args, from_here=False)) == 1  # of a pod, only the name is known
    assert requirements.push_to_hub_problems(recipe.TrainArgs(), from_here=True) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    args.push_to_hub = "me/tiny"
    for token in ("hf_secret\x01", "hf_secret two", "hf_secreté"):
        monkeypatch.setenv("HF_TOKEN", token)
        (problem,) = requirements.push_to_hub_problems(args, from_here=True)
        assert "the token holds characters that no token has" in problem and "secret" not in problem
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")  # such an end is cut off
    assert requirements.push_to_hub_problems(args, from_here=True) == []


def test_a_run_pushes_and_a_failed_push_loses_nothing(server, forks, template_arguments, push, tmp_path):
    """A run that may not push is trained and exported, and says how to push; the same run again pushes, as does `push`."""
    out = tmp_path / "run"
    env = {"TESTED_ENDPOINT": server.url, "HF_TOKEN": server.token}
    args = [*template_arguments, "--push_to_hub", "me/run"]
    server.owner = "others"
    assert forks.run(out, *args, **env) == 2
    log = log_of(out)
    export = out / "export"
    assert f"Model: {export}" in log and "403" in log and "Traceback" not in log
    assert f"to push it, run: python -m accelerate_recipes push {export} me/run\n" in log
    assert exported_files(export) and not (tmp_path / "run/export.partial").exists()
    server.owner = "me"
    push(export, "me/run")
    assert holds(server, "me/run") == contents(export)

    before = server.repositories["models/me/run"].main
    forks.succeed(out, *args, "--max_steps", 9, **env)
    assert server.repositories["models/me/run"].main != before and holds(server, "me/run") == contents(export)
    assert {one["visibility"] for one in server.created} == {"private"}
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"push_to_hub: me/run" in file.read_bytes() for file in written if file.name == "args.yaml")
    assert not any(server.token.encode() in file.read_bytes() for file in written)


def test_a_run_without_network_is_refused_before_work(forks, template_arguments, tmp_path):
    template = ROOT / "recipes/template.py"
    assert forks.run(tmp_path / "run", *template_arguments, "--push_to_hub", "me/run", script=template) == 2
    log = (tmp_path / "run.log").read_text()
    assert "error: This run cannot start" in log and "HF_HUB_OFFLINE is set: unset it, or push the export later" in log
    assert not (tmp_path / "run").exists()
