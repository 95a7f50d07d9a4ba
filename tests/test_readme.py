"""Tests of every command in the README and on the pages of the documentation.

A command is shortened and run; if it needs GPUs, Slurm or Kubernetes, it is checked as far as possible. Downloads are run in
tests/test_download.py, with a Hub of the tests; sbatch's own flags are checked in tests/test_slurm.py.
"""

import inspect
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from helpers import CONFIGS, ROOT, blocks, environment, read_metrics, touch_rows_of_demos
from kubernetes_schemas import problems
from tiny import tiny_model
from trl import DPOTrainer, GRPOTrainer

from accelerate_recipes.args import OPTIMIZERS, TrainArgs, parse, resolve
from accelerate_recipes.arguments.shipped import load
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from recipe_tools.commands import command_parser
from recipe_tools.kubernetes import JobArgs, flag, render_manifest
from recipe_tools.request import launch_environment, launch_flags

README = (ROOT / "README.md").read_text()
SLURM = (ROOT / "slurm/README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
CONFIG_NAMES = {path.stem for path in CONFIGS.glob("*.yaml")}
BLOCKS = re.findall(r"```bash\n(.*?)```", "\n".join([README, SLURM, *PAGES.values()]), re.DOTALL)
SIZES = ["--config_overrides", "hidden_size=32", "intermediate_size=32", "num_attention_heads=2", "num_hidden_layers=1"]
SHORT = {
    "recipes/chess.py": [*SIZES, "--per_device_train_batch_size", 4, "--num_positions", 6],
    "recipes/c4.py": [*SIZES, "--num_validation_rows", 4],
    "recipes/t5.py": [
        "--config_overrides", "d_model=16", "num_layers=1", "--num_eval_pairs", 4, "--generation_max_length", 4,
    ],
    "recipes/sft.py": [*SIZES, "vocab_size=16"],
    "recipes/vit.py": SIZES,
}  # fmt: skip


def commands(elsewhere: bool) -> list[str]:
    """List the lines of blocks that need another machine (they begin with `# on ...`, `# where ...`), or of the others."""
    chosen = "".join(block for block in BLOCKS if block.startswith(("# on ", "# where ", "# for ")) == elsewhere)
    lines = re.sub(r"\\\n\s*", "", chosen).splitlines()
    return sorted({line for line in lines if line and not line.startswith("#")})


def test_there_are_commands():
    assert len(commands(elsewhere=False)) >= 4 and len(commands(elsewhere=True)) >= 4


OTHER_PROGRAMS = (
    ".", "apptainer", "docker", "enroot", "export", "hf", "kubectl", "llama-server", "lm_eval", "pip", "sed", "sglang.launch_server",
    "squeue", "tar", "transformers", "vllm",
)  # fmt: skip
CHATML = (ROOT / "recipes/chat_templates/chatml.jinja").read_text().replace("<|im_end|>", "</s>")
HERE = commands(elsewhere=False)
LAUNCHES = [command for command in HERE if command.startswith("accelerate launch ")]
# The Makefile's commands as they are typed, by their targets; .ci/run runs them, shortened.
MAKEFILE = re.sub(r"\\\n\t+|\$\(BIN\)/| \$\(ARGS\)", "", (ROOT / "Makefile").read_text())
TARGETS = re.findall(r"^(demo[\w-]*):.*\n(?:\tpython .*\n)*\t(.*)", MAKEFILE, re.MULTILINE)
DEMOS = {command: target for target, command in TARGETS}


@pytest.fixture
def shortened(games_file, cache, tmp_path):
    """Function that shortens a launch to two steps of a small model, on a few games, with its output in `tmp_path`."""

    def shorten(command: str) -> list[str]:
        words = shlex.split(command)
        (recipe,) = set(words) & set(SHORT)
        more = [*SHORT[recipe], "--max_steps", 2, "--eval_steps", 0, "--output_dir", tmp_path / "out"]
        more += ["--data_cache_dir", cache] if "data_cache_dir" in load(ROOT / recipe).Args.__dataclass_fields__ else []
        more += ["--train_files", games_file] if recipe == "recipes/chess.py" else []
        return [*words, *map(str, more)]

    return shorten


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("readme-cache")


def test_demos_are_run():
    script = (ROOT / ".ci/run").read_text()
    assert len(DEMOS) == 5 and DEMOS.keys() <= set(LAUNCHES)
    assert all(f'part make {target} ARGS="--max_steps 2' in script for target in DEMOS.values())


OTHERS = [command for command in LAUNCHES if command not in DEMOS]


@pytest.mark.parametrize("command", OTHERS)
def test_launch_runs(command, fork_server, shortened, tmp_path):
    """Each launch runs in forked processes, with the environment that the launcher would give them."""
    words = shortened(command)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    flags, arguments = words[2:script], words[script + 1 :]
    config = Path(flags[flags.index("--config_file") + 1]).stem
    fork_server.succeed(tmp_path / "out", *arguments, script=ROOT / words[script], config=config, flags=flags)


@pytest.mark.slow
def test_launch_runs_as_typed(shortened, tmp_path):
    words = shortened(OTHERS[-1])
    run([sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *words[2:]], ROOT, tmp_path)


def is_target(name: str) -> bool:
    return bool(re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", [command for command in HERE if command not in LAUNCHES])
def test_command_runs(command, tmp_path):
    words, folder = shlex.split(command, comments=True), ROOT
    if words[0] == "make":
        assert is_target(words[1])
        return  # tests/test_demo.py
    if words[0] == "eval" or words[3:4] == ["report"]:  # tests/test_arguments.py, tests/test_report.py
        return
    words = words[: words.index(">")] if ">" in words else words
    if words[3:4] == ["plan"]:  # tests/test_plan.py prints what it prints
        parse_command(words[4:], 1)
        return
    if words[0] == "python":
        words[0] = sys.executable
    elif words[0] == "tar":  # test_download.py carries a cache with it
        (tmp_path / "hf/hub").mkdir(parents=True)
        words, folder = [word.replace("$HF_HOME", str(tmp_path / "hf")) for word in words], tmp_path
    run(words, folder, tmp_path)


def run(words: list[str], folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(words, cwd=folder, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:4000]


@pytest.mark.parametrize("shown", commands(elsewhere=True))
def test_command_elsewhere_is_valid(shown, command, monkeypatch, at_the_root):
    # Math-verify is optional
    monkeypatch.setattr("accelerate_recipes.conversations.rewards.find_spec", lambda name: True)
    touch_rows_of_demos()
    words = shlex.split(shown)
    for word in words:
        if word.startswith("my_"):  # a file of the reader; a function in it is the one that the page shows
            name, _, function = word.partition(":")
            (ROOT / name).write_text(blocks(PAGES["grpo"])[0] if function else "")
    match words:
        case ["python", "-m", "accelerate_recipes", "k8s", kind, *job, "|", "kubectl", "apply", "-f", "-"]:
            monkeypatch.setattr(
                "recipe_tools.preflight.memory_problems", lambda *args, **settings: ("", [], [])
            )  # minutes
            assert problems(list(yaml.safe_load_all(render_manifest(kind, job)[0]))) == []
        case ["python", "-m", "accelerate_recipes", "push" | "check-export", *_]:  # tests/test_push.py
            assert "is no export" in command(*words[3:]).stderr
        case ["python", "-m", "accelerate_recipes", "plan" | "prepare", *run]:
            parse_command(run, 1)
        case ["python", "-m", "accelerate_recipes", "checkpoint" | "export", *_]:  # tests/test_checkpoint.py
            command_parser().parse_args(words[3:])
        case ["make", target, *_]:
            assert is_target(target)
        case ["cp", file, *_]:
            assert (ROOT / file).is_file()
        case ["slurm/submit.sh" | "sbatch" as program, *_]:
            end = words.index("--" if program == "slurm/submit.sh" else "slurm/submit.sh")
            asked = dict(flag.lstrip("-").split("=") for flag in words[1:end] if "=" in flag)
            config, *run = words[end + 1 :] or ["accelerate_configs/fsdp_full.yaml", "recipes/chess.py"]
            flags = launch_flags(Path(config), int(asked.get("nodes", 1)), int(asked.get("gpus-per-node", 1)))
            check_launch(["--config_file", config, "--main_process_ip", "head", *flags, *run])
        case ["accelerate", "launch", *run]:
            check_launch(run)
        case ["python", "benchmarks/ablation.py", *run]:  # tests/test_ablation.py
            parse_command(run, 1)
        case _:  # tests/test_demo.py, test_download.py, test_create_env.py, test_image.py, test_evaluate.py
            ours = ["python", "-m", "accelerate_recipes"]
            is_ours = words[1] == "data/chess/moves.py" or (words[:3] == ours and words[3] in ("download", "preflight"))
            assert is_ours or {*words[:3]} & {*OTHER_PROGRAMS} or words[1].startswith("convert_")


def check_launch(words: list[str]) -> None:
    """Parse the arguments of a recipe that the launcher would start."""
    parse_command(words, int(launch_environment(words)["WORLD_SIZE"]))


def parse_command(words: list[str], world_size: int) -> None:
    """Parse the recipe's arguments in a command."""
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    parse(load(words[script]).Args, words[script + 1 :], world_size)


def test_recipes_of_the_table(at_the_root):
    """Each recipe has a command in the README that parses, and a page."""
    rows = re.findall(r"^\| \[(.*?)\]\((docs/[\w-]+\.md)\) \|.*\| `(recipes/.*)` \|$", README, re.MULTILINE)
    named = {name for names, _, _ in rows for name in re.findall(r"`(\w+)\.py`", names)}
    assert named == {path.stem for path in (ROOT / "recipes").glob("*.py")}
    for _, page, command in rows:
        assert (ROOT / page).is_file()
        words = shlex.split(command)
        for word in words:
            if word.startswith("my_"):
                (ROOT / word).touch()
        _, problems = resolve(load(ROOT / words[0]).Args, words[1:], world_size=8)
        assert [said for said in problems if "math-verify" not in said] == []


def test_your_model_on_your_file(fork_server, tmp_path, monkeypatch, command):
    """The first screen's commands for a laptop run, with its rows and a small model; the model is asked afterwards."""
    monkeypatch.chdir(tmp_path)
    section = README.partition("## Fine-tune your model on your file")[2].partition("\n## ")[0]
    section = re.sub(r"\\\n\s*", "", section)
    (shown,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    assert len(shown.splitlines()) == 5
    rows = "".join(line.replace("?", f" ({number})?") + "\n" for number in range(20) for line in shown.splitlines())
    (tmp_path / "my_rows.jsonl").write_text(rows)
    tokenizer = new_bpe_tokenizer([rows], 300)
    tokenizer.chat_template = CHATML
    base = tmp_path / "HuggingFaceTB/SmolLM2-135M-Instruct"
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tiny_model(vocab_size=len(tokenizer), **ids).save_pretrained(base)
    tokenizer.save_pretrained(base)
    begins = ("SmolLM2", "python -m accelerate_recipes check-export")
    launched, asked = (next(line for line in section.splitlines() if begin in line) for begin in begins)
    words = shlex.split(launched)
    script = words.index("recipes/sft.py")
    mine = ("my_rows.jsonl", f"{base.parent.name}/{base.name}")
    arguments = [str(tmp_path / word) if word in mine else word for word in words[script + 1 :]]
    out = tmp_path / arguments[arguments.index("--output_dir") + 1]
    out.parent.mkdir()
    config = Path(words[words.index("--config_file") + 1]).stem
    log = fork_server.succeed(
        out, *arguments, "--output_dir", out, "--max_steps", 1, script=ROOT / words[script], config=config,
        num_processes=1,
    )  # fmt: skip
    assert "messages (messages), read as conversations" in log
    values = {name for record in read_metrics(out) for name in record} - {"step", "time"}
    assert [name for name in values if f"`{name}`" not in PAGES["health"]] == []
    said = command(*shlex.split(asked)[3:], "--max_new_tokens", "2").stdout
    assert "Where is my parcel?" in said and "2 tokens, ended by" in said


def test_needs_of_the_first_presets():
    """What the README says that a GPU needs stands in the presets of its commands."""
    found = re.findall(r"^# .*? of (\d+) GB: .*needs ([\d.]+) GiB\n(?:.*\\\n)*.*--config (\S+)", README, re.MULTILINE)
    assert len(found) == 2
    for gigabytes, gib, preset in found:
        text = (ROOT / preset).read_text()
        assert f"of {gigabytes} GB" in text and f"measured: {gib} of " in text


def test_table_of_sizes():
    """The numbers of slurm/README.md stand in the presets."""
    rows = re.findall(r"^\| `(\w+)` \| (\d.*) \|$", SLURM, re.MULTILINE)
    presets = {path.stem for path in (ROOT / "recipes/configs/c4").glob("*.yaml")}
    assert {name for name, _ in rows} == {
        name for name in presets if not name.startswith("laptop") and not name.endswith(("_lora", "_one_gpu", "_128k"))
    }
    keys = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    keys += ["intermediate_size", "max_length"]
    for name, cells in rows:
        preset = yaml.safe_load((ROOT / f"recipes/configs/c4/{name}.yaml").read_text())
        preset |= preset["config_overrides"]
        assert [int(cell.split(",")[0]) for cell in cells.split(" | ")] == [preset[key] for key in keys], name


def test_python_example(fork_server, tmp_path):
    """The example works with a small model instead of the demo's, and does not import this project."""
    from accelerate_recipes.models.tokenizers import new_word_tokenizer
    from chess_games.rules import all_uci_moves

    export = tmp_path / "outputs/demo/export"
    tokenizer = new_word_tokenizer(all_uci_moves())
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(export)
    tokenizer.save_pretrained(export)
    (code,) = blocks(PAGES["chess"])
    before = f"import os, sys; os.chdir({str(tmp_path)!r})\n"
    alone = "\nassert 'accelerate_recipes' not in sys.modules"
    assert "\n<s> e2e4 c7c5 g1f3" in "\n" + fork_server.run_python(tmp_path, before + code + alone)


def test_every_lever_exists_and_has_its_line():
    """Flags, keys of the accelerate YAML and configs in docs/levers.md exist; every optimizer and lever has a line."""
    page = PAGES["levers"]
    keys = {action.dest for action in launch_command_parser()._actions} | {"fsdp_config", "dynamo_config"}
    assert set(re.findall(r"\b(?:fsdp|dynamo|parallelism_config)_\w+(?!\w|\.yaml)", page)) <= keys
    assert set(re.findall(r"`(\w+)\.yaml`", page)) <= CONFIG_NAMES
    own = {"attn_implementation", "packing"}  # arguments of recipes with packed rows
    assert set(re.findall(r"(?<![\w-])--([a-z_0-9]+)", page)) <= set(TrainArgs.__dataclass_fields__) | own
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(OPTIMIZERS)
    for lever in (
        "prefetch_layers", "checkpoint_every_n_layers", "activation_memory_budget", "reduce_dtype",
        "fsdp_activation_checkpointing_offload",
    ):  # fmt: skip
        assert lever in page


def test_values_of_trl_are_on_the_page_of_a_runs_health():
    """What trl's losses log has its line; values of generation by vLLM, of tools and of other losses are not logged here."""
    names = set()
    for trainer in (DPOTrainer, GRPOTrainer):
        names |= set(re.findall(r'_metrics\[mode\]\["([^"]+)"\]', inspect.getsource(trainer)))
    names = {re.sub(r"^clip_ratio/.*", "clip_ratio/...", name) for name in names}
    names = {re.sub(r"^completions/.*length$", "completions/...length", name) for name in names}
    missing = {name for name in names if f"`{name}`" not in PAGES["health"]}
    others = {name for name in missing if not name.startswith(("sampling/", "tools/", "vespo/"))}
    assert others <= {"cispo_clip_ratio", "entropy_coef"}


def test_memory_of_adapters_is_as_measured():
    measured = json.loads((ROOT / "benchmarks/results/adapter_memory.json").read_text())["MiB_of_ranks"]
    for ranks in measured.values():
        numbers = [ranks[-1][name] for name in ("frozen", "trained", "gradients", "optimizer", "peak")]
        assert f"| {' | '.join(f'{number:.0f}' for number in numbers)} |" in PAGES["adapters"]


def test_every_config_and_flag_on_the_page_exists():
    table = re.search(r"\| config \|.*?\n\n", PAGES["configs"], re.DOTALL)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == CONFIG_NAMES
    assert set(re.findall(r"`((?:single|ddp|fsdp)(?:_\w+)?)`", README)) <= CONFIG_NAMES
    recipes = [load(recipe).Args.__dataclass_fields__ for recipe in (ROOT / "recipes").glob("*.py")]
    known = {f"--{name}" for names in recipes for name in names} | {"--config", "--help"}
    known |= {f"--no_{name}" for names in recipes for name in names if names[name].default is True}
    launch = {flag for action in launch_command_parser()._actions for flag in action.option_strings}
    ours = {
        "--nodes", "--gpus-per-node", "--gpu", "--max_shards", "--update", "--memory_gib", "--seeds", "--out", "--model",
        "--prompt", "--prove", "--dtype", "--max_shard_size", "--no_plan", "--no_search", "--json", "--gres",
    }  # fmt: skip
    of_jobs = {f"--{flag(field.name)}" for field in fields(JobArgs)}
    about_other_flags = {
        "architecture", "command-line", "doctor", "errors", "image", "kubernetes", "models", "names", "performance", "serving",
    }  # fmt: skip
    for name, page in {**PAGES, "README": README}.items():
        found = set(re.findall(r"(?<![\w-])--[a-z0-9_-]+\w", page))
        assert name in about_other_flags or found <= known | launch | ours | of_jobs, name
    assert of_jobs <= set(re.findall(r"(?<![\w-])--[a-z-]+\w", PAGES["kubernetes"]))
    others = ("architecture", "your-recipe", "token-labels")
    texts = [README, *(page for name, page in PAGES.items() if name not in others)]
    for path in re.findall(r"`((?:tests|recipes|accelerate_configs|src|data)/[\w/.]*)`", "\n".join(texts)):
        assert (ROOT / path).exists(), path
