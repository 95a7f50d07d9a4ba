import atexit
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

# Tests use no network; libraries cache nothing outside the tests' own folders, and do not find a user's caches.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="huggingface-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
# Threads that wait for work take a core from the other processes of `make test`.
os.environ["OMP_NUM_THREADS"] = "1"


# Files that take long come first, so that the processes of `make test` and `make test-slow` end at about the same time.
LONGEST = (
    "plan", "faults", "kubernetes_runs", "simulate", "epochs", "trainers", "equivalence", "conversations", "doctor", "mirror",
    "adapters", "decisions", "benchmarks", "levers", "chess", "site", "models_table", "readme", "t5", "sft_vlm", "grpo", "spikes", "c4", "dpo",
    "distill", "decide", "attention", "streams", "kto", "kubernetes", "template", "mixtures", "image_models", "losses", "download",
    "distributed", "causal_models", "checkpoint", "push", "mixed_c4",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def as_in_forked_runs():
    """Resolve vector math for tests that compute in this process, as `make_accelerator` does for runs, and keep one thread."""
    import torch

    from accelerate_recipes.upstream import resolve_vector_math

    resolve_vector_math()
    torch.set_num_threads = lambda number: None


@pytest.fixture(scope="module")
def quick_tries():
    """Let reading from a failing network end within a second: in workers too, if `worker_server` comes after it."""
    from accelerate_recipes.data import documents

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TRIES": 4, "WAIT": 0.01, "LONGEST_WAIT": 0.02, "TIMEOUT": 0.5}.items():
            patch.setattr(documents, name, value)
        yield


@pytest.fixture(scope="module")
def worker_server():
    """Let the loaders of a module start their workers as a run does."""
    from accelerate_recipes.life import workers

    workers.start_fork_server()
    yield
    server = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()
    multiprocessing.set_start_method(None, force=True)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    from helpers import IMPORTS, TRL, ForkServer  # imported modules read the variable above

    server = ForkServer(tmp_path_factory.mktemp("forks"), (*IMPORTS, *TRL))
    yield server
    server.close()


@pytest.fixture(scope="module")
def forks(request, fork_server):
    """Run the module's SCRIPT, or another `script`, in forked ranks; `succeed` is for runs that must."""

    def with_script(run):
        return lambda *args, script=None, **options: run(*args, script=script or request.module.SCRIPT, **options)

    return SimpleNamespace(run=with_script(fork_server.run), succeed=with_script(fork_server.succeed))


@pytest.fixture(scope="module")
def arguments() -> tuple:
    """Arguments of each `run` of a module, which may have its own."""
    return ()


@pytest.fixture(scope="module")
def run(request, forks, arguments, tmp_path_factory):
    """Run the module's script with its `arguments` and more, once for all tests that ask for the same; return its output."""
    from helpers import launch_ok

    @cache
    def output(*args: object, **options: Any) -> Path:
        out = tmp_path_factory.mktemp("run") / "out"
        if "inductor" in options.get("flags", ()):  # its workers do not survive a fork
            given = ("--output_dir", out, *arguments, *args)
            launch_ok(out.parent, options["config"], request.module.SCRIPT, *given, flags=options["flags"])
        else:
            forks.succeed(out, *arguments, *args, **options)
        return out

    return output


@pytest.fixture(scope="module")
def run_result(run):
    """Do as `run`, with a script that writes result.json; return what it wrote."""
    return lambda *args, **options: json.loads((run(*args, **options) / "result.json").read_text())


@pytest.fixture(scope="module")
def killed_and_resumed(forks, tmp_path_factory):
    """Compare a run with one that has data workers, was killed in step 5, and was run again: their records are equal."""
    from helpers import IN_STEP_5, STEPS, TIMES, log_of, losses, read_metrics

    from accelerate_recipes.checkpoint.files import complete_checkpoints

    def run_both(script: Path, *args: object, whole: Path | None = None) -> tuple[Path, Path]:
        """Run a recipe; `whole` is the output of the run that is not killed, if it is there already."""
        out = tmp_path_factory.mktemp("killed") / "out"
        if whole is None:
            whole = tmp_path_factory.mktemp("whole") / "out"
            forks.succeed(whole, *args, script=script)
        args = (*args, "--dataloader_num_workers", 1)
        assert forks.run(out, *args, script=script, **IN_STEP_5) == -9, log_of(out)[-3000:]
        assert [path.name for path in complete_checkpoints(out)] == ["checkpoint-3"]
        forks.succeed(out, *args, script=script)
        assert sorted(losses(out)) == list(range(1, STEPS + 1))
        for one, other in zip(read_metrics(whole), read_metrics(out), strict=True):
            different = {name for name in one if one[name] != other[name]}
            assert different <= TIMES, f"{different} at step {one['step']}"
        assert json.loads((out / "status.json").read_text())["state"] == "finished"
        for file in (whole / "export").glob("**/*.safetensors"):
            assert file.read_bytes() == (out / file.relative_to(whole)).read_bytes(), file.name
        return whole, out

    return run_both


@pytest.fixture
def skips_a_step(forks, tmp_path):
    """Compare a run that skips step 2 with one in which the optimizer does not make that step: its weights and its log."""
    from helpers import CHILDREN, TIMES, read_metrics
    from safetensors.torch import load_file

    def run_both(script: Path, *args: object) -> None:
        def run(name: str, *more: object, **planted: str) -> tuple[Path, dict, dict]:
            out = tmp_path / name / "out"
            out.parent.mkdir()
            given = (*args, "--max_steps", 3, "--save_steps", 0, *more)
            forks.succeed(out, *given, script=CHILDREN / "poisoned.py", POISONED_RECIPE=str(script), **planted)
            records = {
                record["step"]: {name: value for name, value in record.items() if name not in TIMES}
                for record in read_metrics(out)
                if "loss" in record
            }
            return out, records, load_file(out / "export/model.safetensors")

        out, found, weights = run("skip", "--on_spike", "skip", POISON="2")
        _, wanted, same = run("still", STILL="2")
        (record,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
        assert record["step"] == 2 and found[3].pop("skipped_steps") == 1
        assert found == {step: wanted[step] for step in (1, 3)}
        assert all(weights[name].equal(value) for name, value in same.items())

    return run_both


@pytest.fixture(scope="session")
def games_file(tmp_path_factory) -> Path:
    """File with the first 300 real games."""
    from helpers import ROOT

    file = tmp_path_factory.mktemp("games") / "games.parquet"
    pq.write_table(pq.read_table(ROOT / "data/chess/games_20k.parquet").slice(0, 300), file)
    return file


@pytest.fixture(scope="module")
def template_arguments(tmp_path_factory) -> list:
    """Arguments of recipes/template.py: a classifier of texts with even and odd words."""
    from helpers import ROOT, write_rows
    from tiny import tiny_model
    from transformers import AutoModelForMaskedLM

    from accelerate_recipes.models.tokenizers import new_word_tokenizer

    folder = tmp_path_factory.mktemp("bert")
    words = [f"w{i}" for i in range(40)]
    tokenizer = new_word_tokenizer(words)
    tokenizer.save_pretrained(folder / "model")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    bert = tiny_model("bert", AutoModelForMaskedLM, max_position_embeddings=16, pad_token_id=0, **sizes)
    bert.save_pretrained(folder / "model")
    # The label says whether the words are even or odd; there are more even ones.
    texts = [[words[(7 * i * j + i % 3 % 2) % 40] for j in range(0, 10 + i % 9, 2)] for i in range(300)]
    rows = [{"text": " ".join(text), "label": ["even", "odd"][i % 3 % 2]} for i, text in enumerate(texts)]
    write_rows(folder / "texts.jsonl", rows)
    (folder / "preset.yaml").write_text(
        re.search(r"```yaml\n(.*?)```", (ROOT / "docs/your-recipe.md").read_text(), re.DOTALL)[1]
    )
    return [
        "--config", folder / "preset.yaml", "--model_name_or_path", folder / "model", "--train_files", folder / "texts.jsonl",
        "--max_length", 16, "--learning_rate", 0.03, "--per_device_eval_batch_size", 4, "--max_steps", 8, "--save_steps", 2, "--logging_steps", 1, "--total_batch_size", 16,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def simulator():
    from recipe_tools.plan.simulate import Simulator

    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    from simulations import save_bases

    return save_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def serve():
    """Start file servers, each of a dictionary of files."""
    from streaming import Server

    servers = []

    def start(files: dict[str, bytes]) -> Server:
        servers.append(Server(files))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.end_stalls.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def preset(tmp_path):
    """Write a preset; return the flags that give it."""

    def write(content: str) -> list[str]:
        (tmp_path / "preset.yaml").write_text(content)
        return ["--config", str(tmp_path / "preset.yaml")]

    return write


@pytest.fixture
def command(monkeypatch, capfd):
    """Run `python -m accelerate_recipes ...` in this process."""
    from recipe_tools.commands import main

    def run(*words: object) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["accelerate_recipes", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


@pytest.fixture
def at_the_root(monkeypatch):
    from helpers import ROOT

    monkeypatch.chdir(ROOT)


@pytest.fixture
def out(tmp_path) -> Path:
    """Output directory of a run, which makes it."""
    return tmp_path / "out"


@pytest.fixture
def place(tmp_path) -> Path:
    """Where copies of checkpoints go."""
    return tmp_path / "place"
