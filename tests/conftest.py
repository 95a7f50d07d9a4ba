import atexit
import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

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
    "adapters", "benchmarks", "levers", "chess", "site", "models_table", "readme", "t5", "sft_vlm", "grpo", "spikes", "c4", "dpo",
    "distill", "attention", "streams", "kto", "kubernetes", "template", "mixtures", "image_models", "losses", "download",
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
        return whole, out

    return run_both


@pytest.fixture
def excluded_and_skipped(forks, tmp_path):
    """Compare a run that skips step 2 with one that excludes its rows; and, without `half` of them, one process with two."""
    from helpers import CHILDREN, TIMES, losses, read_metrics
    from safetensors.torch import load_file

    def run_all(script: Path, *args: object, half: bool = True) -> None:
        def run(name: str, *more: object, **options: object) -> tuple[dict, dict, Path]:
            out, poison = tmp_path / name / "out", {"POISONED_RECIPE": str(script), "POISON": "2"}
            out.parent.mkdir()
            given = (*args, "--max_steps", 3, "--save_steps", 0, *more)
            forks.succeed(out, *given, script=CHILDREN / "poisoned.py", **poison | options)
            return losses(out), load_file(out / "export/model.safetensors"), out

        numbers, weights, out = run("skip", "--on_spike", "skip")
        (record,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
        assert record["step"] == 2 and [*numbers] == [1, 3] and read_metrics(out)[-2]["skipped_steps"] == 1
        others, same, _ = run("whole", "--exclude_rows", out / "skipped.jsonl")
        assert numbers == others and all(weights[name].equal(value) for name, value in same.items())
        rows = [row for rank in record["micro_batches_of_ranks"] for batch in rank for row in batch["rows"]]
        if not half:
            return
        (file := tmp_path / "half.json").write_text(json.dumps({"rows": rows[: len(rows) // 2 + 1]}))
        found = [
            run(config, "--exclude_rows", file, config=config, num_processes=number, POISON="0")
            for config, number in (("single", 1), ("fsdp_full", 2))
        ]
        assert found[1][0][1] == numbers[1] and found[1][0][3] != numbers[3]
        for one, two in zip(*(read_metrics(out) for *_, out in found), strict=True):
            of_one, of_two = ({n: v for n, v in record.items() if n not in TIMES} for record in (one, two))
            assert of_one == pytest.approx(of_two, rel=2e-5, abs=1e-5)

    return run_all


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
    from helpers import ROOT
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
    rows = [
        {
            "text": " ".join(words[(7 * i * j + i % 3 % 2) % 40] for j in range(0, 10 + i % 9, 2)),
            "label": ["even", "odd"][i % 3 % 2],
        }
        for i in range(300)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "preset.yaml").write_text(
        re.search(r"```yaml\n(.*?)```", (ROOT / "docs/your-recipe.md").read_text(), re.DOTALL)[1]
    )
    return [
        "--config", folder / "preset.yaml", "--model_name_or_path", folder / "model", "--train_files", folder / "texts.jsonl",
        "--max_length", 16, "--learning_rate", 0.03, "--per_device_eval_batch_size", 4, "--max_steps", 8, "--save_steps", 2, "--logging_steps", 1, "--total_batch_size", 16,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def simulator():
    from accelerate_recipes.plan.simulate import Simulator

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
def at_the_root(monkeypatch):
    from helpers import ROOT

    monkeypatch.chdir(ROOT)
