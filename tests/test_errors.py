"""Tests of docs/errors.md, and of where a message stands: it is the end of the screen."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import CHILDREN, CONFIGS, REPOSITORY, ROOT, environment, launch_command, log_of, refuses
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accelerate_recipes.arguments import shipped
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life import parent
from accelerate_recipes.recipe import as_problem_of_the_machine
from recipe_tools import commands, quiet, request
from recipe_tools.quiet import failure_in_words, launch

PAGE = (ROOT / "docs/errors.md").read_text()
MISTAKES = re.findall(r"```console\n\$ (.*)\n([^`]*(?:`[^`]+`[^`]*)*)```", PAGE)
TOY = CHILDREN / "toy.py"


def typed(command: str) -> tuple[str, list[str]]:
    """Return the name of a command and what follows, without variables of the environment and the program."""
    words = shlex.split(command.removeprefix("HF_HUB_OFFLINE=1 "))  # tests always are offline
    assert words[0] == "accelerate-recipes"
    return words[1], words[2:]


@pytest.mark.slow
def test_mistakes_of_a_new_user(fork_server, tmp_path, monkeypatch, at_the_root, capfd):
    """What the page shows is the end of what is printed; ranks run in forked processes, with the launcher's environment."""
    assert len(MISTAKES) == 8
    places = {"my_games.jsonl": tmp_path / "my_games.jsonl", "my_fsdp.yaml": tmp_path / "my_fsdp.yaml"}
    places["my_games.jsonl"].write_text(json.dumps({"text": "1. e4 e5"}) + "\n")
    strategy = (CONFIGS / "fsdp_full.yaml").read_text()
    places["my_fsdp.yaml"].write_text(strategy.replace("offload_params:", "offload_parameters:"))
    hub = psutil.Process(fork_server.process.pid).environ()["HF_HOME"] + "/hub"
    for number, (command, shown) in enumerate(MISTAKES):
        name, words = typed(command)
        words = [str(places.get(word, word)) for word in words]
        if name == "launch":
            script = next(i for i, word in enumerate(words) if word.endswith(".py"))
            flags, out = words[2:script], tmp_path / f"out-{number}"
            args = [*words[script + 1 :], "--data_cache_dir", tmp_path / "data"]
            code = fork_server.run(out, *args, script=ROOT / words[script], config=Path(words[1]).stem, flags=flags)
            assert code == 2, log_of(out)[-3000:]
            said = log_of(out)
            said = re.sub(r"download \S*?recipes/chess.py --output_dir \S+", "download recipes/chess.py", said)
            said = said.replace(f" --data_cache_dir {tmp_path / 'data'}", "").replace(hub, "~/.cache/huggingface/hub")
        else:
            monkeypatch.setattr(sys, "argv", ["accelerate-recipes", name, *words])
            refuses("1", commands.main, error=SystemExit)
            said = capfd.readouterr().err
        for word, place in places.items():
            said = said.replace(str(place), word)
        assert said.endswith(f"\n{shown}") or said == shown, (command, said[-3000:])


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """Make the failure of a rank as torch's launcher finds it: with the message that the rank has written, or without."""

    def fail(rank: int, exitcode: int, message: str = "") -> ProcessFailure:
        file = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        file.unlink(missing_ok=True)
        if message:
            parent.tell_launcher(message)
        return ProcessFailure(rank, 100 + rank, exitcode, str(file))

    return fail


def test_torchs_launcher_ends_with_the_message(failed):
    """It names the rank that has failed, not one that it has ended in the same second; only its frame follows the message."""
    error = ChildFailedError("recipe.py", {0: failed(0, -15), 1: failed(1, 2, "These rows are bad:\n  - row 17")})
    assert error.get_first_failure()[0] == 1
    *_, title, row, frame = str(error).splitlines()
    assert title.endswith("traceback : These rows are bad:") and row.strip() == "- row 17" and set(frame) == {"="}


def test_what_the_command_launch_adds(failed):
    """Nothing to the stack that a rank has printed; else the message of one rank, or the first that failed, and why."""
    assert failure_in_words(ChildFailedError("", {0: failed(0, -15), 1: failed(1, 1, "KeyError: 7")})) == ""
    assert failure_in_words(ChildFailedError("", {0: failed(0, -15), 1: failed(1, 2, "error: no")})) == "no"
    words = failure_in_words(ChildFailedError("", {0: failed(0, -15), 1: failed(1, -9)}))
    assert words == "rank 1: Signal 9 (SIGKILL) received by PID 101"
    both = {0: failed(0, 1, "rank 1: gone"), 1: failed(1, 1, "error: row 17")}
    both[1].timestamp -= 1
    assert failure_in_words(ChildFailedError("", both)) == "rank 1: row 17"


def test_without_torchs_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not parent.tell_launcher("no")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/error.json"))
    assert not parent.tell_launcher("a message is no reason for another error")


@pytest.mark.parametrize("argv, said", [
    (("--config_file", "configs/single.yaml", "chess"), r"no such file; did you mean accelerate_configs/single.yaml\?$"),
    (("--config_file", "mine.yaml", "chess"), "^mine.yaml: no such file; .* accelerate_configs/$"),
    (("recipes/configs/chess/laptop.yaml", "chess"), "laptop.yaml .*: --config recipes/configs/chess/laptop.yaml$"),
    (("fsdp_full", "chess"), "fsdp_full is not a recipe; .*: --config_file fsdp_full$"),
    (("accelerate_configs/ddp.yaml", "chess"), "before the recipe: --config_file accelerate_configs/ddp.yaml$"),
    (("--config_file", "fsdp_ful", "chess"), r"no such file; did you mean accelerate_configs/fsdp_full.yaml\?$"),
    (("--config_file", "single", "ches"), r"^ches: no such recipe; did you mean 'chess'\?$"),
    (("--config_file", "single", "recipes/stf.py"), r"^recipes/stf.py: no such recipe; did you mean 'sft'\?$"),
])  # fmt: skip
def test_files_that_cannot_be_meant(argv, said, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    refuses(said, launch, argv)


@pytest.mark.parametrize("flags, said", [
    (["fsdp_full", "--num_processes", "0"], "0 processes .--num_processes. on 1 machines"),
    (["fsdp_full", "--num_processes", "-2"], "-2 processes .--num_processes. on 1 machines"),
    (["fsdp_full", "--num_processes", "2", "--num_machines", "3"], "2 processes .--num_processes. on 3 machines"),
    (["fsdp_full", "--num_processes", "two"], "--num_processes/--num-processes: invalid int value: 'two'"),
    (["single", "--num_processes", "0"], "0 processes .--num_processes. on 1 machines"),
    (["fsdp_full", "--num_machines", "0"], "--num_machines is 0; it must be at least 1"),
    (["fsdp_full", "--num_machines", "2", "--machine_rank", "2"], "--machine_rank is 2; the 2 machines are 0 to 1"),
    (["fsdp_full", "--num_machines", "2"], "--num_machines is 2, .* --main_process_ip, and .* --machine_rank"),
    (["fsdp_full", "--main_process_port", "99999"], "--main_process_port is 99999; .* at most 65535"),
    (["fsdp_full", "--main_process_port", "-5", "--num_processes", "0"], "0 processes .*_port is -5; "),
])  # fmt: skip
def test_numbers_at_which_the_launcher_would_end_in_a_stack(flags, said, monkeypatch):
    """They are one message, before it starts anything; without the address of the first machine it would wait forever."""
    monkeypatch.setattr(quiet, "launch_command", lambda args: pytest.fail("launched"))
    refuses(said, launch, ["--config_file", str(CONFIGS / f"{flags[0]}.yaml"), *flags[1:], str(TOY)])


def test_a_wrong_file_of_the_launcher_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(quiet, "launch_command", lambda args: pytest.fail("launched"))
    text = "distributed_type: FSDP\nnum_processes: 2\nmain_process_port: abc\nmachine_rnk: 1\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"unknown key 'machine_rnk'(.|\n)*main_process_port is 'abc'"):
        launch(["--config_file", str(tmp_path / "mine.yaml"), str(TOY)])


@pytest.mark.parametrize("config, processes", [("ddp", 1), ("single", 1), ("fsdp_hybrid", 4), ("fsdp1_full", 2)])
def test_what_the_launcher_takes_is_not_refused(config, processes, monkeypatch):
    started = []
    monkeypatch.setattr(quiet, "launch_command", started.append)
    launch(["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes), str(TOY)])
    assert started[0].num_processes == processes


def test_a_launch_without_a_config_counts_gpus(tmp_path, monkeypatch):
    """It starts one process where there are none: that nothing says how many is no mistake."""
    started = []
    monkeypatch.setattr(quiet, "launch_command", started.append)
    monkeypatch.setattr(request, "_validate_launch_command", lambda args: vars(args).update(num_processes=0))
    launch([str(TOY)])
    (args,) = started
    assert args.num_processes is None  # for the launcher to count, and to tell


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    """It is one message: of `launch` and `preflight` when the recipe imports it at once, of a run when it is used."""
    monkeypatch.setattr(quiet, "launch_command", lambda args: pytest.fail("launched"))
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # as if it were not installed
    recipe, said = tmp_path / "mine.py", "sacrebleu is not installed; run: pip install "
    recipe.write_text("import os\nimport of_the_user\nfrom sacrebleu.there import things\nfrom . import others\n")
    refuses(rf"mine.py cannot start:\n  - {said}", launch, ["--config_file", str(CONFIGS / "single.yaml"), str(recipe)])
    recipe.write_text("from sacrebleu.there import things\n")
    refuses(f"mine.py: {said}", shipped.load, recipe)
    with pytest.raises(ConfigError, match=f"^{said}"), as_problem_of_the_machine():
        import sacrebleu  # noqa: F401
    with pytest.raises(ModuleNotFoundError), as_problem_of_the_machine():  # a mistake in a recipe keeps its stack
        import accelerate_recipes.nowhere  # noqa: F401


def quiet_launch(config: str, *args: object) -> list[str]:
    """Build the command line of `accelerate-recipes launch`."""
    command = launch_command(config, TOY, *args)
    place = command.index("accelerate.commands.launch")
    return [*command[:place], "accelerate_recipes", "launch", *command[place + 1 :]]


@pytest.mark.slow
def test_launch_ends_with_the_message_alone(tmp_path):
    command = quiet_launch("fsdp_full", "--lerning_rate", 1)
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    *_, title, problem = done.stderr.splitlines()
    assert title == "error: This run cannot start:" and problem.startswith("  - unknown argument 'lerning_rate' on the")


def said_after_the_launcher_is_killed(folder: Path) -> str:
    """Kill (SIGKILL) the launcher of a run after two steps; returns all that is printed until the ranks end."""
    folder.mkdir()
    log, out = folder / "log", folder / "out"
    command = quiet_launch("fsdp_full", "--output_dir", out, "--save_steps", 0)
    env = environment(folder) | {"TOY_PACE": "0.5"}
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file) as launcher:
        while "Step 2/" not in log.read_text():
            assert launcher.poll() is None, log.read_text()
            time.sleep(0.1)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert json.loads((out / "status.json").read_text())["reason"] == "SIGTERM"
    return log.read_text()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_stack(tmp_path):
    """The ranks save and say why they stop; c10d, whose store is gone, says nothing.

    A question to the store that is under way at this very moment still fails loudly. That is rare, so there are three tries.
    """
    said = (said_after_the_launcher_is_killed(tmp_path / str(number)) for number in range(3))
    assert any("Stopped by SIGTERM" in text.splitlines()[-1] and "frame #" not in text for text in said)
