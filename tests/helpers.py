"""Helpers that launch what a user launches, and read the result from a file."""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from accelerate_recipes.errors import ConfigError
from recipe_tools.request import launch_environment

REPOSITORY = Path(__file__).resolve().parents[1]


def without_runs(repository: Path) -> tempfile.TemporaryDirectory:
    """Link the repository's files into a folder, without earlier runs, which tests would resume or write to."""
    folder = tempfile.TemporaryDirectory(prefix="accelerate-recipes-")
    for entry in repository.iterdir():
        if entry.name not in (".cache", ".git", "outputs"):
            (Path(folder.name) / entry.name).symlink_to(entry)
    return folder


_links = without_runs(REPOSITORY)  # until this process ends
ROOT = Path(_links.name)
CONFIGS = ROOT / "accelerate_configs"
CHILDREN = ROOT / "tests" / "children"
SRC = ROOT / "src"
PACKAGE = SRC / "accelerate_recipes"


def modules_of(package: str) -> list[Path]:
    return sorted(path for path in (SRC / package).rglob("*.py") if path.name != "__init__.py")


LIBRARY = modules_of("accelerate_recipes")
OURS = [*LIBRARY, *modules_of("recipe_tools"), *modules_of("chess_games")]

OPTIONAL = {"chess", "datasets", "evaluate", "matplotlib", "pandas", "peft", "pyarrow", "trl"}
# Read by each Python process at its start.
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *args: None if name.split(".")[0] in {names} else find(name, *args)
)
"""

# Flags that follow a preset of chess.py: a small model, and a hundred games to test on.
SMALL_CHESS = [
    "--config_overrides", "hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=4",
]  # fmt: skip
SMALL_CHESS += ["--heldout_share", "0.005", "--num_positions", "20", "--eval_steps", "0"]


# Lists that a test gives again, after those of a fixture. A recipe adds them up; a test means the last one alone.
LISTS = {"--train_files", "--eval_files", "--rewards", "--reward_weights", "--loss_type", "--lora_target_modules"}


def with_last_lists(args: Iterable[object]) -> list[object]:
    """Leave out the values of a list which is given again."""
    groups: dict[object, list[object]] = {None: []}
    name: object = None
    for number, word in enumerate(args):
        if str(word).startswith("--"):
            name = word if word in LISTS else number
            groups[name] = []
        groups[name].append(word)
    return [word for group in groups.values() for word in group]


def launch_command(config: str, script: Path, *args: object, flags: tuple[str, ...] = ()) -> list[str]:
    """Build `accelerate launch` with a shipped config, in fp32 and on a free port; `flags` go before the script."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    command += ["--mixed_precision", "no", "--main_process_port", "0", *flags]
    return command + [str(part) for part in (script, *with_last_lists(args))]


def environment(tmp_path: Path) -> dict[str, str]:
    """Make an environment with CPU only, one thread a process and no network; caches go to the test's folder.

    Bytecode is kept beside the sources: without it a short run spends a fifth of its time compiling them.
    """
    not_inherited = ("ACCELERATE_", "FSDP_", "HF_", "PARALLELISM_", "PYTHONDONTWRITEBYTECODE")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(not_inherited)}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONFAULTHANDLER": "1"}
    return inherited | offline | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def hidden(tmp_path: Path, names: set[str] = OPTIONAL) -> dict[str, str]:
    """Make an environment as on a machine where these packages are not installed."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=names))
    env = environment(tmp_path)
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), env.get("PYTHONPATH"))))}


def launch(
    tmp_path: Path,
    config: str,
    script: Path,
    *args: object,
    flags: tuple[str, ...] = (),
    timeout: int = 400,
    gpu: bool = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """Launch a recipe and wait for its end; the caller checks `returncode`, `stdout` and `stderr`."""
    variables = environment(tmp_path) | env
    if gpu:
        del variables["CUDA_VISIBLE_DEVICES"]
    command, where = launch_command(config, script, *args, flags=flags), {"cwd": ROOT, "env": variables}
    return subprocess.run(command, **where, capture_output=True, text=True, timeout=timeout)


def launch_ok(tmp_path: Path, config: str, script: Path, *args: object, **options) -> subprocess.CompletedProcess:
    done = launch(tmp_path, config, script, *args, **options)
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[:6000]}"
    return done


@contextlib.contextmanager
def refused(*facts: str, error: type[Exception] = ConfigError) -> Iterator[pytest.ExceptionInfo]:
    """Expect one error, whose message names each of these facts."""
    with pytest.raises(error) as caught:
        yield caught
    for fact in facts:
        assert fact in str(caught.value), str(caught.value)


def refuses(said: str, call: Callable, *args: object, error: type[Exception] = ConfigError, **settings: object) -> str:
    """Check that a call is refused, with a message that matches; return the message."""
    with pytest.raises(error, match=said) as caught:
        call(*args, **settings)
    return str(caught.value)


def by_time(names: Iterable, fast: Container = (), slow: Container | None = None, *more: object) -> list:
    """Return the parameters of a test: names that are not `fast` are slow, or long if they are not in `slow` either."""

    def mark(name: object):
        return () if name in fast else pytest.mark.slow if slow is None or name in slow else pytest.mark.long

    return [pytest.param(name, *more, marks=mark(name)) for name in names]


def by_mark(cases: dict[str, list]) -> list:
    """Return the parameters of a test, which are listed by their mark; "" is none."""
    return [
        pytest.param(*case, marks=getattr(pytest.mark, mark) if mark else ()) for mark in cases for case in cases[mark]
    ]


def blocks(page: str) -> list[str]:
    """Return the Python code that a page shows."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def png(seed: int, size: int = 24) -> bytes:
    """Make an image of noise, so that no two are alike."""
    from PIL import Image  # which a machine for tests/test_gpu.py may lack

    pixels = np.random.default_rng(seed).integers(0, 256, (size, size + seed % 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out := io.BytesIO(), format="png")
    return out.getvalue()


def write_tar(
    file: Path | io.BytesIO, members: Iterable[tuple[str, bytes]], mode: str = "w", **settings: object
) -> None:
    """Write files into a tar, or, with the mode "a", behind what it has."""
    where = {"fileobj": file} if isinstance(file, io.BytesIO) else {"name": file}
    with tarfile.open(**where, mode=mode, **settings) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_rows(file: Path, rows: Iterable[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def change_json(file: Path, **changes: object) -> None:
    """Give fields of a JSON file other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def read_metrics(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> dict[int, float]:
    """Return the training loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(output_dir) if "loss" in record}


def trajectory(output_dir: Path) -> list[tuple[float, float]]:
    """Return the training losses and the norms of the gradients, in the order of the steps."""
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(output_dir) if "loss" in record]


def rows_trained_on(output_dir: Path) -> list[int]:
    """Return the rows of all steps of a toy, in order; of a step that two runs have made, those of the later one."""
    entries = [json.loads(line) for line in (output_dir / "rows.jsonl").read_text().splitlines()]
    last_run_of = {entry["step"]: entry["from"] for entry in sorted(entries, key=lambda entry: entry["from"])}
    return sorted(row for entry in entries if entry["from"] == last_run_of[entry["step"]] for row in entry["rows"])


def near(wanted: list, rel: float = 1e-5) -> list:
    """Return what is compared with losses and norms of another run, by step, up to rounding."""
    return [pytest.approx(step, rel=rel) for step in wanted]


def evaluations(output_dir: Path, name: str = "eval_loss") -> list[float]:
    return [record[name] for record in read_metrics(output_dir) if name in record]


def killed_at_opening(count: int) -> dict[str, str]:
    """Return variables of a run whose ranks all get SIGKILL when rank 0 opens its file of metrics for the `count`-th time."""
    fault = {"event": "open", "path": "/out/metrics.jsonl", "count": count, "rank": 0, "everyone": True}
    return {"TOY_FAULT": json.dumps(fault)}


def killed_in_step(step: int) -> dict[str, str]:
    """Return variables of a run of the toy whose ranks all get SIGKILL in a step."""
    fault = {"event": "toy.loss", "path": f"step {step}.", "count": 1, "rank": 0, "everyone": True}
    return {"TOY_FAULT": json.dumps(fault)}


# Runs on trl's trainers: 6 steps, saved after 3. They are killed when rank 0 would log step 5: it has opened the file for
# the evaluation, 4 steps and a copy.
STEPS = 6
SHORT_RUN = (
    "--max_steps", STEPS, "--save_steps", 3, "--logging_steps", 1, "--learning_rate", 1e-2, "--async_save", "false",
)  # fmt: skip
IN_STEP_5 = killed_at_opening(9)
# The signal goes to each process of the run: both ranks, what starts their data workers, and these. The first process of
# the session stands for the launcher; the shell that sends the signal is one of them.
SIGTERM_TO_ALL = {
    "event": "toy.loss", "path": "step 5.", "count": 1, "rank": 0,
    "command": "trap '' TERM; session=$(ps -o sid= -p $$ | tr -d ' '); kill -TERM $(pgrep -s $session | grep -vx $session) 2>&-; true",
}  # fmt: skip
# Values that differ between two equal runs.
TIMES = {"time", "samples_per_second", "tokens_per_second", "peak_memory_gib", "data_wait"}


def touch_rows_of_demos() -> None:
    """Make the files that presets name and that a command of their page writes, for tests that only parse."""
    moves = (f"chess_moves/{side}{of}.jsonl" for side in ("train", "heldout") for of in ("", "_pairs"))
    names = (f"chess_{what}/{side}.jsonl" for what in ("texts", "decisions") for side in ("train", "heldout"))
    demos = ("chess_decisions/decision.json", "demo-vlm/rows/train.jsonl", "demo-vlm/rows/test.jsonl")
    for name in (*names, *moves, *demos):
        file = ROOT / "outputs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def log_of(out: Path) -> str:
    return out.with_suffix(".log").read_text()


# Third-party modules that runs would wait for. Each run imports our own modules anew, so that no run passes only because
# another one made a missing import.
IMPORTS = (
    "accelerate.commands.launch", "bitsandbytes.nn", "chess.pgn", "datasets", "evaluate", "matplotlib.backends.backend_svg",
    "matplotlib.pyplot", "peft", "psutil", "PIL.JpegImagePlugin", "torch.nn.attention.varlen",
    "torch.distributed.checkpoint._fsspec_filesystem", "torch.distributed.checkpoint.state_dict",
    "torch.utils.flop_counter", "torch.utils.serialization", "numpy.ctypeslib", "transformers.hf_argparser",
    "transformers.models.auto.image_processing_auto", "transformers.models.bit.image_processing_pil_bit",
    "transformers.models.llama.modeling_llama", "transformers.models.mistral.modeling_mistral",
    "transformers.models.mixtral.modeling_mixtral", "transformers.models.t5.modeling_t5", "transformers.optimization",
    "transformers.trainer_pt_utils", "xxhash",
)  # fmt: skip
TRL = ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer")


class ForkServer:
    """Server process that has imported `imports` and forks the ranks of runs; see tests/children/fork_server.py."""

    def __init__(self, tmp_path: Path, imports: Sequence[str] = IMPORTS):
        self.process = subprocess.Popen(
            [sys.executable, str(CHILDREN / "fork_server.py"), *imports],
            cwd=ROOT,
            env=environment(tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, out: Path, *args: object, **options: object) -> int:
        """Run and return the exit code of the first rank that failed, or 0; 128 + n for a signal, -n if it killed all."""
        self.start(out, *args, **options)
        return self.wait()

    def succeed(self, out: Path, *args: object, **options: object) -> str:
        """Run to a good end; returns the log."""
        code = self.run(out, *args, **options)
        assert code == 0, log_of(out)[-3000:]
        return log_of(out)

    def start(
        self,
        out: Path,
        *args: object,
        script: Path,
        config: str = "fsdp_full",
        num_processes: int = 2,
        flags: Sequence[str] = (),
        **env: str,
    ) -> None:
        """Start a run; call `wait` afterwards. `config` names a shipped YAML, `flags` are the launcher's."""
        config_flags = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--mixed_precision", "no"]
        launched = launch_environment([*config_flags, "--num_processes", str(num_processes), *flags, "recipe.py"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        argv, world_size = ["--output_dir", out, *with_last_lists(args)], int(launched["WORLD_SIZE"])
        self._send(script, argv, launched | env, out.with_suffix(".log"), world_size, True)

    def run_python(self, folder: Path, script: Path | str, *args: object, **env: str) -> str:
        """Run a script, or code, as `python` would in a new process without this project; returns what it printed."""
        if isinstance(script, str):
            (folder / "code.py").write_text(script)
            script = folder / "code.py"
        log = folder / f"{script.stem}.log"
        log.unlink(missing_ok=True)
        self._send(script, args, env, log, 1, False)
        assert self.wait() == 0, log.read_text()[-3000:]
        return log.read_text()

    def _send(
        self, script: Path, args: Sequence[object], env: dict[str, str], log: Path, world_size: int, is_recipe: bool
    ) -> None:
        job = {
            "script": str(script),
            "world_size": world_size,
            "env": {name: str(value) for name, value in env.items()},
            "argv": [str(arg) for arg in args],
            "log": str(log),
            "seconds": 300,
            "is_recipe": is_recipe,
        }
        print(json.dumps(job), file=self.process.stdin, flush=True)

    def ranks(self) -> list[psutil.Process]:
        """List the ranks of the started run that exist already, in order."""
        groups = psutil.Process(self.process.pid).children()
        return sorted((rank for group in groups for rank in group.children()), key=lambda rank: rank.pid)

    def wait(self) -> int:
        answer = self.process.stdout.readline()
        assert answer, f"the server of forks has ended with exit code {self.process.wait(60)}"
        return int(answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            print(file=self.process.stdin, flush=True)
            self.process.stdin.close()
        self.process.wait(timeout=60)
