"""Recipes, presets, accelerate configs and data that are shipped, found by their names.

In a clone they lie at its top; a wheel has them in `shipped_files/` of the package (setup.py).
"""

import os
from collections.abc import Sequence
from pathlib import Path

INSTALLED = Path(__file__).parent / "shipped_files"
HOME = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2]


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
    place = Path("recipes/configs", Path(recipe).stem)
    folder = place if place.is_dir() else HOME / place
    names = sorted(file.name for file in folder.glob("*.yaml"))
    if f"{path.stem}.yaml" in names:
        return f"; did you mean {folder}/{path.stem}.yaml?"
    return f"; {folder} holds {', '.join(names)}" if names else ""


def named(name: str, place: str) -> str:
    """Return where a shipped file lies, if no file of the user has this name."""
    path = HOME / place
    if os.path.isfile(name) or Path(name).name != name or not path.is_file():
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def data(value: str, preset: Path) -> str:
    """Return where the data lie that a shipped preset names, if they are not in the working directory."""
    is_here = not value.startswith("data/") or os.path.exists(value)
    is_shipped = (HOME / value).exists() and preset.resolve().is_relative_to((HOME / "recipes").resolve())
    return value if is_here or not is_shipped else str(HOME / value)
