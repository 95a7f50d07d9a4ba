"""Tests of the package: names of shipped files, ranges and pins, and the wheel outside of a clone."""

import json
import re
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import REPOSITORY, environment
from packaging.requirements import Requirement

from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.declaring import read_preset
from accelerate_recipes.arguments.help import recipe_parser
from accelerate_recipes.launch.settings import parse_flags

SRC = REPOSITORY / "src"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_pins_lie_in_the_ranges():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pins = {r.name: r.specifier for r in map(Requirement, [x for x in lines if x and not x.startswith(("#", "-"))])}
    ranges = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert pins.keys() == ranges.keys()
    for name, pin in pins.items():
        (version,) = re.fullmatch("==(.*)", str(pin)).groups()
        assert ranges[name].contains(version), name
        assert not ranges[name].contains("999"), name  # what is untested is not promised


def test_what_is_named_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = shipped.HOME
    args = parse_flags(["--config_file", "fsdp_full", "chess", "--config", "laptop", "--seed", "1"])
    assert args.config_file == str(home / "accelerate_configs/fsdp_full.yaml")
    assert args.training_script == str(home / "recipes/chess.py")
    assert args.training_script_args == ["--config", str(home / "recipes/configs/chess/laptop.yaml"), "--seed", "1"]
    assert shipped.found_command(["t5", "--config=laptop"])[1] == f"--config={home / 'recipes/configs/t5/laptop.yaml'}"
    # Files of the user, paths, other names and values of other flags stay as they are.
    (tmp_path / "laptop").write_text("seed: 3\n")
    assert shipped.found_command(["chess", "--config", "laptop"])[2] == "laptop"
    (tmp_path / "chess").write_text("")
    assert shipped.found_command(["chess", "--dataset_name", "laptop"]) == ["chess", "--dataset_name", "laptop"]
    for line in ("mine.py --config laptop.yaml", "c4 --config none", "../chess --config", ".. --config .."):
        words = line.split()
        assert shipped.found_command(words)[1:] == words[1:]
    assert shipped.found_command(["../chess"]) == ["../chess"] and shipped.config_file("none") == "none"
    # In a clone they are as one types them there.
    monkeypatch.chdir(home)
    found = shipped.found_command(["c4", "--config", "laptop"])
    assert found == ["recipes/c4.py", "--config", "recipes/configs/c4/laptop.yaml"]


def test_data_of_a_shipped_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preset = shipped.HOME / "recipes/configs/chess/laptop.yaml"
    parser = recipe_parser(shipped.load(shipped.HOME / "recipes/chess.py").Args)
    found = {flag: values for flag, values, _ in read_preset([[str(preset)]], parser)}
    assert found["--output_dir"] == ["outputs/demo"]
    assert found["--train_files"] == [str(shipped.HOME / "data/chess/games_20k.parquet")]
    # Data of the user come first, and presets of the user mean the user's data.
    (tmp_path / "data/chess").mkdir(parents=True)
    (tmp_path / "data/chess/games_20k.parquet").write_text("")
    assert shipped.data("data/chess/games_20k.parquet", preset) == "data/chess/games_20k.parquet"
    assert shipped.data("data/en_fr/libreoffice.jsonl", tmp_path / "mine.yaml") == "data/en_fr/libreoffice.jsonl"
    assert shipped.data("data/train-*.parquet", preset) == "data/train-*.parquet"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "recipes", "accelerate_configs", "data"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(REPOSITORY / name, copy / name)
    build = [
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder),
        str(copy),
    ]  # fmt: skip
    done = subprocess.run(build, capture_output=True, text=True, env=environment(folder), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel(wheel, tmp_path):
    """It holds what is shipped, with licences, and no more; outside of a clone it trains by names alone."""
    names = {name.removeprefix("accelerate_recipes/") for name in zipfile.ZipFile(wheel).namelist()}
    for folder in ("recipes", "accelerate_configs", "data"):
        paths = [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
        here = {str(path.relative_to(REPOSITORY)) for path in paths if "__pycache__" not in path.parts}
        assert here == {name.partition("/")[2] for name in names if name.startswith(f"shipped_files/{folder}/")}
    packages = {str(path.relative_to(SRC)).removeprefix("accelerate_recipes/") for path in SRC.rglob("*.py")}
    assert packages == {name for name in names if name.endswith(".py") and not name.startswith("shipped_files/")}
    for page in ("README.md", "docs/start.md"):  # what they tell to install
        text = " ".join((REPOSITORY / page).read_text().split())
        assert f"`pip install {wheel.name}`" in text.replace("VERSION", PROJECT["version"]), page
    info = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" in name]
    assert {name.partition("licenses/")[2] for name in info if "licenses/" in name} == {*PROJECT["license-files"]}

    # An environment that is empty but for the dependencies.
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    (purelib,) = (tmp_path / "env/lib").glob("python*/site-packages")
    target = ["--no-deps", "--no-index", "--target", str(purelib), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *target], check=True, timeout=120)
    (purelib / "dependencies.pth").write_text("\n".join(p for p in site.getsitepackages() if "site-packages" in p))
    env = environment(tmp_path) | {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}

    def run(*words: str) -> str:
        done = subprocess.run([str(python), *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    home = run("-c", "from accelerate_recipes.arguments import shipped; print(shipped.HOME)")
    assert home.strip() == str(purelib / "accelerate_recipes/shipped_files")
    short = [
        "--max_steps", "1", "--num_positions", "6", "--per_device_train_batch_size", "4", "--train_files", "games.jsonl",
        "--config_overrides", "hidden_size=32", "intermediate_size=32", "num_attention_heads=2", "num_hidden_layers=1",
    ]  # fmt: skip
    games = pq.read_table(REPOSITORY / "data/chess/games_20k.parquet").slice(0, 200).to_pylist()
    (tmp_path / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
    launched = ["--config_file", "single", "--mixed_precision", "no", "chess", "--config", "laptop"]
    code = "import sys; from accelerate.commands.launch import launch_command as launch; "
    code += "from accelerate_recipes.launch.settings import parse_flags; launch(parse_flags(sys.argv[1:]))"
    run("-c", code, *launched, *short)
    assert (tmp_path / "outputs/demo/export/model.safetensors").is_file()
