"""Tests of the layout: which module may import which, and what a recipe is."""

import ast
import graphlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, fields

import pytest
import ratchet
from conftest import LONGEST
from helpers import LIBRARY, OURS, PACKAGE, ROOT, SRC, touch_rows_of_demos

from accelerate_recipes import recipe
from accelerate_recipes.arguments import shipped
from accelerate_recipes.launch import requirements

PACKAGES = ("accelerate_recipes", "recipe_tools", "chess_games")
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
# Our modules and folders that a folder, or a flat module, may import. A module that is not listed may import any.
# The core imports none of the services: report, launch, conversations, text, images, but of the Hub the cache, and of `launch` the
# checks of this launch. `recipe` joins them with a run.
BELOW = {"disk", "errors", "ranks"}
MAY_IMPORT = {
    "disk": set(),
    "errors": set(),
    "ranks": {"errors"},
    "upstream": {"ranks"},
    "arguments": {"errors"},
    "hub.cache": {"disk", "errors"},
    "hub": {"disk", "errors", "hub.cache"},
    "life": BELOW,
    "args": BELOW | {"arguments"},
    "models": BELOW | {"args", "arguments", "hub.cache", "life", "upstream"},
    "data": BELOW | {"args", "arguments", "hub.cache", "life", "models", "upstream"},
    "metrics": {"arguments", "disk", "models"},
    "losses": {"errors", "models", "ranks"},
    "optim": {"args", "arguments", "errors", "models", "ranks"},
    "launch.checks": {"args", "errors", "models", "ranks", "upstream"},
    "distributed": {"args", "errors", "launch.checks", "life", "models", "optim", "ranks", "upstream"},
    "checkpoint": BELOW | {"args", "arguments", "data", "distributed", "hub.cache", "life", "metrics", "models", "optim", "upstream"},
    "bad_steps": BELOW | {"checkpoint", "distributed", "models", "optim"},
    "agenda": {"bad_steps", "checkpoint", "errors", "life", "metrics", "ranks", "upstream"},
    "run": BELOW | {"args", "checkpoint", "data", "distributed", "hub.cache", "life", "metrics", "models", "optim", "upstream"},
    "engine": {"agenda", "bad_steps", "distributed", "errors", "life", "metrics", "models", "ranks", "run"},
    "trial": {"args", "data", "errors", "hub.cache", "losses", "models"},
    "report": BELOW | {"agenda", "args", "checkpoint", "data", "life", "metrics"},
    "launch": BELOW | {
        "args", "arguments", "checkpoint", "data", "distributed", "hub", "hub.cache", "launch.checks", "life", "models", "optim", "trial",
    },
}  # fmt: skip


def dotted(path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def room(module: str) -> str:
    """Return the folder of a module of the library, or the module itself if it is flat, or if the core takes no more of its folder."""
    package, _, name = module.partition(".")
    if package != "accelerate_recipes":
        return package
    return name if name in ("hub.cache", "launch.checks") else name.split(".")[0]


def imports(path) -> set[str]:
    """List our modules that a file imports, such as `accelerate_recipes.data.rows`, also inside functions; and `recipes`."""
    modules, found = {dotted(path) for path in OURS}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (named & modules) or {node.module}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            found |= {"recipes"} & {name.split(".")[0] for name in names}
    return found


@pytest.mark.parametrize("path", LIBRARY, ids=dotted)
def test_library(path):
    """It imports no recipe, and of the programs only their commands, for `python -m accelerate_recipes`."""
    rooms = {room(module) for module in imports(path)}
    here = room(dotted(path))
    assert not {"recipes", "chess_games"} & rooms and ("recipe_tools" not in rooms or here == "__main__")
    assert here not in MAY_IMPORT or rooms <= MAY_IMPORT[here] | {here}


def test_no_circles_and_few_floors():
    """There are no import cycles, neither among modules nor among folders; a folder stands above all that it imports."""
    modules = {dotted(path): imports(path) for path in OURS}
    rooms = {room(name): set() for name in modules}
    for name, imported in modules.items():
        rooms[room(name)] |= {room(module) for module in imported} - {room(name)}
    for graph in (modules, rooms):
        order = list(graphlib.TopologicalSorter(graph).static_order())
        assert set(order) >= graph.keys()
    floors = {}
    for name in order:
        floors[name] = 1 + max((floors[below] for below in rooms[name]), default=0)
    assert max(floors.values()) <= 14


def test_no_test_module_imports_another():
    """What two test modules share is a helper, so that a test module may be moved, renamed or deleted alone."""
    imported = re.compile(r"^\s*(?:from|import) +(?:tests\.)?test_\w+", re.M)
    assert {file.name: found for file in ROOT.glob("tests/*.py") if (found := imported.findall(file.read_text()))} == {}


def test_promises_name_their_tests():
    """Each line of docs/development/promises.md names tests, and each of these is there."""
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (ROOT / "docs/development/promises.md").read_text(), re.M)[1:]
    named = {promise: re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests) for promise, tests in rows}
    assert len(named) > 40 and [promise for promise, tests in named.items() if not tests] == []
    missing = [
        f"{file}::{test}"
        for file, test in itertools.chain.from_iterable(named.values())
        if not re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M)
    ]
    assert missing == []


def test_the_project_only_gets_smaller():
    """Each size of `ratchet.json` is at most its number, and at least 99 % of it: `make ratchet` writes a lower one."""
    most, found = json.loads(ratchet.FILE.read_text()), ratchet.sizes()
    grown = {name: f"{size}, was {most[name]}" for name, size in found.items() if size > most[name]}
    assert not grown, "take as much away elsewhere, or write the number, and in the commit what the lines buy"
    assert {name: size for name, size in found.items() if size < most[name] * 0.99} == {}, "make ratchet"


@pytest.mark.parametrize("path", [*OURS, *RECIPES], ids=lambda path: path.stem)
def test_no_import_is_shadowed(path):
    """No parameter or variable has the name of something that the file imports from our library."""
    tree = ast.parse(path.read_text())
    ours = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] in PACKAGES]
    imported = {alias.asname or alias.name for node in ours for alias in node.names}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    inside = [node for function in functions for node in ast.walk(function)]
    names = {node.arg for node in inside if isinstance(node, ast.arg)}
    names |= {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not names & imported


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path):
    """A recipe does nothing at import, defines what a recipe must define, and imports no other recipe."""
    module = shipped.load(path)
    assert issubclass(module.Args, recipe.TrainArgs)
    assert isinstance(module.requirements(module.Args()), requirements.Requirements)
    assert "recipes" not in imports(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_nothing_of_a_checkpoint_before_its_checksums(path):
    """A recipe begins with `start`, which agrees on the checkpoint, verifies it, and takes the output directory."""
    main = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert ast.unparse(main.body[0]) == "run = start(args)"


def called(node: ast.AST) -> list[str]:
    """List what a piece of code calls, in the order of the lines, also in functions inside it."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return [ast.unparse(call.func) for call in sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset))]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_main_shows_the_steps_of_a_run(path):
    """`main` itself shows the rows, prepares the model, trains with the losses that it names, and finishes, in this order."""
    main = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    calls = called(main)
    shows = "run.show_images" if "run.show_images" in calls else "run.show_rows"
    places = [calls.index(step) for step in (shows, "run.prepare", "train", "finish")]
    assert places == sorted(places)
    (train,) = (node for node in ast.walk(main) if isinstance(node, ast.Call) and ast.unparse(node.func) == "train")
    assert {"loss_fn", "count_fn", "evaluate_fn"} <= {keyword.arg for keyword in train.keywords}


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.parent.name == "conversations"], ids=dotted)
def test_a_constructor_has_no_effect_beyond_its_object(path):
    """It prints, writes, shows and compares nothing, and prepares no model: `main` does."""
    found = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__")
        for name in called(node)
        if name.rpartition(".")[2].startswith(("print", "show", "write", "compare", "prepare", "on_", "add_", "save"))
    ]
    assert found == []


# Lines of code, without blanks, comments and docstrings: a recipe is its task.
MOST_LINES = {"template": 65, "t5": 200, "c4": 140, "engine": 220}


@pytest.mark.parametrize("path", [PACKAGE / "engine.py", *RECIPES], ids=lambda path: path.stem)
def test_what_is_read_first_is_short(path):
    assert len(ratchet.lines_of_code(path)) <= MOST_LINES.get(path.stem, 130)
    # Long lines that the formatter leaves alone save none.
    skips = {"c4": 2, "sft": 1, "kto": 1}
    assert path.read_text().count("# fmt: skip") <= skips.get(path.stem, 0)


# Fields that a resumed run may change, besides those of TrainArgs and of trl: they decide neither model nor order of data.
# Data may move: they are compared by content. Of --assistant_only_loss, what it means for the rows is compared. Of images it is their sizes, so their files stay where they are.
MAY_CHANGE = {
    "attn_implementation", "data_cache_dir", "dropout_rate", "whole_logits", "pretokenize",
    "dataset_name", "dataset_revision", "dataset_files", "train_files", "eval_files", "eval_dataset_name",
    "validation_dataset_files", "validation_files", "num_validation_rows", "num_positions", "num_eval_pairs",
    "eval_source_column", "eval_target_column", "metrics", "generation_max_length", "generation_num_beams",
    "generation_length_penalty", "precompute_ref_log_probs", "reward_weights",
    "rewards", "num_eval_prompts", "num_samples", "label_smoothing", "assistant_only_loss",
    "image_folder", "mixture", "beta", "temperature", "lmbda", "desirable_weight", "undesirable_weight", "disable_dropout",
}  # fmt: skip
MAY_CHANGE_IN_C4_ONLY = {"dataset_revision", "dataset_files"}
FIXED = {"vit": {"train_files", "eval_files"}}
SHARED_FIXED = {
    "seed", "total_batch_size", "optim", "use_peft", "load_in_4bit", "lora_r", "lora_alpha", "lora_target_modules",
    "use_rslora", "use_dora",
}  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_a_resumed_run_may_change(path):
    args = shipped.load(path).Args
    names = {field.name for field in fields(args) if "fixed" in field.metadata}
    may_change = MAY_CHANGE - (MAY_CHANGE_IN_C4_ONLY if path.stem != "c4" else set()) - FIXED.get(path.stem, set())
    own = names - {field.name for field in fields(recipe.TrainArgs)}
    fixed = args.fixed_on_resume()
    assert fixed & names == SHARED_FIXED | own - may_change
    assert {"model_name_or_path", "max_length"} & {f.name for f in fields(args)} <= fixed


def test_another_default_leaves_an_argument_fixed():
    """A class that derives from a recipe's arguments may change a default, but the argument stays fixed."""

    @dataclass
    class Games(shipped.load(ROOT / "recipes/chess.py").Args):
        heldout_share: float = 0.1
        learning_rate: float = 1.0

    fixed = Games.fixed_on_resume()
    assert "heldout_share" in fixed and not {"learning_rate", "num_positions"} & fixed


def is_in_the_locale(call: ast.Call) -> bool:
    """Tell whether a call opens a text in the encoding of the locale, which differs from machine to machine."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg for keyword in call.keywords}
    if "encoding" in given or name not in ("read_text", "write_text", "open", "fdopen"):
        return False
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if owner in ("tarfile", "Image", "os") and name == "open":
        return False
    at = int(isinstance(call.func, ast.Name) or name == "fdopen")  # place of the mode
    mode = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[at : at + 1]
    if name.endswith("_text"):
        return len(call.args) <= (name == "write_text")  # else the encoding is given by its place
    return not mode or (isinstance(mode[0], ast.Constant) and "b" not in str(mode[0].value))


def test_texts_are_utf_8_in_any_locale():
    folders = ("src", "recipes", "slurm", "tests/children", "benchmarks")
    found = [
        f"{path}, line {node.lineno}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and is_in_the_locale(node)
    ]
    assert not found, "\n".join(found)


def test_presets_are_valid(at_the_root):
    """The first line of each preset is its command, which launcher and recipe take, on the GPUs that the preset names."""
    from accelerate_recipes.args import resolve
    from recipe_tools.request import launch_environment

    (ROOT / "my_rows.jsonl").touch()
    touch_rows_of_demos()
    found = {}
    for folder in sorted({path.parent for path in (ROOT / "recipes/configs").glob("*/*.yaml")}):
        args_class = shipped.load(ROOT / f"recipes/{folder.name}.py").Args
        for path in sorted(folder.glob("*.yaml")):
            text, name = path.read_text(), str(path.relative_to(ROOT))
            words = shlex.split(text.partition("\n")[0])
            script = words.index(f"recipes/{folder.name}.py")
            assert words[:3] == ["#", "accelerate", "launch"] and words[script + 1 : script + 3] == ["--config", name]
            env = launch_environment(words[3:])
            world_size, a_row = (int(env.get(key, 1)) for key in ("WORLD_SIZE", "PARALLELISM_CONFIG_CP_SIZE"))
            _, found[name] = resolve(args_class, words[script + 1 :], world_size // a_row)
            machine = re.search(r"# Hardware: (\d+) GPU", text)
            assert not machine or int(machine[1]) == world_size, name
    assert {name: problems for name, problems in found.items() if problems} == {}


# A text that begins with one of these continues a name that the reader does not see in --help, in a hover, or in grep.
FRAGMENT = re.compile(
    "(As|Before|By|For|How|In|Instead|Its|Of|That|The same|Their|Those|To|What|Where|Whether|Which|Why)[ ,:]"
)


@pytest.mark.parametrize("path", [*OURS, *RECIPES], ids=lambda path: path.stem)
def test_docstrings_stand_alone(path):
    """Each docstring begins with a verb or a noun phrase."""
    documented = ast.FunctionDef | ast.ClassDef | ast.Module
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    found = [text for node in nodes if (text := ast.get_docstring(node)) and FRAGMENT.match(text)]
    assert not found, "\n".join(text.splitlines()[0] for text in found)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_help_texts_stand_alone(path):
    """The help texts of our own fields stand alone; those of trl's fields are not ours."""
    ours = [c for c in shipped.load(path).Args.__mro__ if c.__module__.startswith(("accelerate_recipes", "recipe_"))]
    of_classes = [(c, *item) for c in ours for item in getattr(c, "__dataclass_fields__", {}).items()]
    texts = {name: field.metadata.get("help", "") for c, name, field in of_classes if name in c.__annotations__}
    assert len(texts) > 40 and not [text for text in texts.values() if FRAGMENT.match(text)]


def test_lists_of_tests_name_files():
    """What `make test-fast` and `make test-runs` run, and what all others run first, exists."""
    names, runs = (
        re.search(rf"^{name} := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)[1].replace("\\\n", " ").split()
        for name in ("FAST", "RUNS")
    )
    assert len(names) > 10 < len(runs)
    for file, test in (run.partition("[")[0].split(":") for run in runs):
        assert f"\ndef test_{test}(" in (ROOT / f"tests/test_{file}.py").read_text(), test
    assert [name for name in (*names, *LONGEST) if not (ROOT / f"tests/test_{name}.py").exists()] == []


def test_notes_of_a_release(tmp_path):
    """The tag is the version, and its section of the changes is neither absent nor empty."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/notes", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')

    def notes(tag: str, changes: str) -> tuple[int, str]:
        (tmp_path / "CHANGELOG.md").write_text(changes)
        done = subprocess.run([tmp_path / ".ci/notes", tag], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert notes("v0.2.0", "# Changes\n\n## 0.2.0\n\n- New.\n\n## 0.1.0\n\n- Old.\n") == (0, "\n- New.\n")
    assert notes("v0.1.0", "## 0.1.0\n\n- Old.\n")[0] == 1
    assert notes("v0.2.0", "## Unreleased\n\n- New.\n") == (
        1, 'CHANGELOG.md has nothing under "## 0.2.0": rename "## Unreleased"\n',
    )  # fmt: skip
    assert notes("v0.2.0", "## 0.2.0\n\n## 0.1.0\n\n- Old.\n")[0] == 1
