"""Recipes, presets, accelerate configs and data that are shipped, found by their names.

In a clone they lie at its top; a wheel has them in `shipped_files/` of the package (setup.py).
"""

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate_recipes.errors import ConfigError, suggestion

INSTALLED = Path(__file__).parents[1] / "shipped_files"
HOME = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[3]


def config_file(name: str) -> str:
    """Return the path of an accelerate config that is given by its name, such as fsdp_full; others stay as they are."""
    return named(name, f"accelerate_configs/{name}.yaml")


def found_command(words: Sequence[str]) -> list[str]:
    """Replace names in a recipe's command by paths: of the recipe, such as chess, and of its preset behind --config."""
    recipe, args = named(words[0], f"recipes/{words[0]}.py"), list(words[1:])
    for i, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag == "--config" and equals:
            args[i] = f"{flag}={preset(recipe, value)}"
        elif i and args[i - 1] == "--config":
            args[i] = preset(recipe, word)
    return [recipe, *args]


def preset(recipe: str, name: str) -> str:
    """Return the path of a recipe's preset that is given by its name, such as laptop; others stay as they are."""
    return named(name, f"recipes/configs/{Path(recipe).stem}/{name}.yaml")


def names(folder: str) -> list[str]:
    """List the names of what is shipped in a folder: recipes, or accelerate_configs."""
    return sorted(path.stem for path in (HOME / folder).iterdir() if path.is_file())


def other_presets(recipe: str, path: Path) -> str:
    """Return "; ..." with the presets of a shipped recipe, for one that is not there; "" for another recipe."""
    relative = Path("recipes/configs", Path(recipe).stem)
    folder = relative if relative.is_dir() else HOME / relative
    names = sorted(file.name for file in folder.glob("*.yaml"))
    if f"{path.stem}.yaml" in names:
        return f"; did you mean {folder}/{path.stem}.yaml?"
    return f"; {folder} holds {', '.join(names)}" if names else ""


def preset_of_another(recipe: str, preset: str) -> list[str]:
    """Say of which recipe a preset in a folder `configs/NAME` is, if that is another one."""
    owner, own = Path(preset).parent, Path(recipe).stem
    is_other = owner.parent.name == "configs" and owner.name in names("recipes") and owner.name != own
    return [f"--config {preset} is a preset of {owner.name}.py, not of {own}.py"] if is_other else []


def not_installed(modules: Iterable[str]) -> list[str]:
    """List the packages of this project's that some modules need and that are not installed, one sentence each.

    Other modules may be those of the user, and lie where only the script itself looks.
    """
    required = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requires("accelerate-recipes") or ()}
    packages = required & {name.partition(".")[0] for name in modules}
    missing = sorted(name for name in packages if importlib.util.find_spec(name) is None)
    return [f"{name} is not installed; run: pip install -r requirements.txt, or pip install {name}" for name in missing]


def named(name: str, place: str) -> str:
    """Return where a shipped file lies, if no file of the user has this name."""
    path = HOME / place
    if os.path.isfile(name) or Path(name).name != name or not path.is_file():
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def data(value: Any, preset: Path) -> Any:
    """Return a value of a shipped preset with the places of the data that it names and the working directory lacks."""
    if isinstance(value, list):
        return [data(part, preset) for part in value]
    if isinstance(value, dict):
        return {name: data(part, preset) for name, part in value.items()}
    if not isinstance(value, str) or not value.startswith("data/") or os.path.exists(value):
        return value
    is_shipped = (HOME / value).exists() and preset.resolve().is_relative_to((HOME / "recipes").resolve())
    return str(HOME / value) if is_shipped else value


def load(path: str | Path) -> ModuleType:
    """Load the recipe at `path` as a module.

    Raises:
        ConfigError: if there is no such file, if it cannot be imported, or if it lacks what a recipe defines.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe{suggestion(path.stem, names('recipes'), cutoff=0.6)}")
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a recipe; give a .py file, such as recipes/c4.py")
    # Do not import it by its bare name: `chess` is python-chess.
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (problems := not_installed([error.name or ""])):
            raise ConfigError(f"{path}: {problems[0]}") from error
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f" (line {lines[-1]})" if lines else ""  # a SyntaxError says it itself
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}{where}") from error
    missing = [name for name in ("Args", "requirements", "main") if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"{path} is not a recipe: it does not define {', '.join(missing)}")
    return module
