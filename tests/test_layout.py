"""Who may import whom, and what a recipe is."""

import ast
import re
import subprocess
import sys

import pytest
from helpers import ROOT

from accelerate_recipes import recipe

LIBRARY = sorted((ROOT / "src/accelerate_recipes").glob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
# Modules of ours that a module may import; others may import any.
ALLOWED = {
    "args": set(),
    "losses": {"args"},
    "status": set(),
    "optim": {"args"},
    "metrics": {"args"},
    "engine": {"args", "checkpoint", "distributed", "metrics", "status", "stop", "watch"},
}


def imports(path) -> set[str]:
    """Modules of ours that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accelerate_recipes":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            found |= {"recipes"} & {name.split(".")[0] for name in names}
    return found


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_library(path):
    assert "recipes" not in imports(path)
    if path.stem in ALLOWED:
        assert imports(path) <= ALLOWED[path.stem]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path):
    """Does nothing at import, defines what a recipe defines, and imports no other."""
    module = recipe.load(path)
    assert issubclass(module.Args, recipe.TrainArgs)
    assert isinstance(module.requirements(module.Args()), recipe.Requirements)
    assert "recipes" not in imports(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_nothing_of_a_checkpoint_before_its_checksums(path):
    """Before anything else it agrees on the checkpoint, which verifies it and makes the output directory its own."""
    main = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert [ast.unparse(statement) for statement in main.body[:3]] == [
        "find_resume(args)", "accelerator = make_accelerator(args)", "resumed_from = agree_on_resume(accelerator, args)",
    ]  # fmt: skip


def test_python_chess_is_found_beside_a_recipe_of_its_name():
    """As when recipes/chess.py is the script: its folder comes first on the path."""
    code = "from accelerate_recipes import chess_rules; print(chess_rules.chess.Board().fen())"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'recipes')!r}); {code}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("rnbqkbnr/pppppppp"), done.stderr


def test_presets_are_valid():
    """Every preset parses, and says first with which command."""
    from accelerate_recipes.args import parse

    for path in sorted((ROOT / "recipes/configs").glob("*/*.yaml")):
        module = recipe.load(ROOT / "recipes" / f"{path.parent.name}.py")
        parse(module.Args, ["--config", str(path)], world_size=2)
        first = path.read_text().splitlines()[0]
        assert first.startswith("# accelerate launch") and first.endswith(str(path.relative_to(ROOT)))


# A text that begins so continues a name that the reader does not see in --help, in a hover, or in grep.
FRAGMENT = re.compile(
    "(As|Before|By|For|How|In|Instead|Its|Of|That|The same|Their|Those|To|What|Where|Whether|Which|Why)[ ,:]"
)


@pytest.mark.parametrize("path", [*LIBRARY, *RECIPES], ids=lambda path: path.stem)
def test_docstrings_stand_alone(path):
    """Each begins with a verb or a noun phrase."""
    documented = ast.FunctionDef | ast.ClassDef | ast.Module
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    found = [text for node in nodes if (text := ast.get_docstring(node)) and FRAGMENT.match(text)]
    assert not found, "\n".join(text.splitlines()[0] for text in found)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_help_texts_stand_alone(path):
    """Those of our own fields; trl's are trl's."""
    ours = [c for c in recipe.load(path).Args.__mro__ if c.__module__.startswith(("accelerate_recipes", "recipe_"))]
    texts = {
        name: field.metadata.get("help", "")
        for c in ours
        for name, field in getattr(c, "__dataclass_fields__", {}).items()
        if name in c.__annotations__
    }
    assert len(texts) > 40 and not [text for text in texts.values() if FRAGMENT.match(text)]
