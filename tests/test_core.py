"""Tests that the core needs only torch, accelerate and transformers, and is there soon."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CHILDREN, OPTIONAL, OURS, ROOT, SRC, hidden, losses
from tiny import tiny_model
from transformers import AutoModelForMaskedLM

from accelerate_recipes.models.tokenizers import new_word_tokenizer

# Modules about these packages, which import them at once; all others do where they use them.
ABOUT = {
    "chess_games/rules.py", "conversations/chats.py", "conversations/formats.py", "conversations/messages.py", "data/tables.py",
    "conversations/answers.py", "conversations/heads.py",
    "conversations/distillation.py", "conversations/preferences.py", "conversations/prompts.py", "conversations/rewards.py", "conversations/settings.py",
    "conversations/supervised.py", "images/supervised_images.py", "conversations/supervised_loss.py", "conversations/trained_pairs.py", "conversations/unpaired.py",
    "conversations/packed.py", "conversations/trained_rows.py", "decisions/prompts.py", "decisions/rows.py", "images/image_places.py", "images/image_rows.py", "images/image_texts.py", "images/pictures.py",
}  # fmt: skip


def imports_at_once(path: Path) -> set[str]:
    """List the packages that a module imports when it is imported: outside of functions, and not for types alone."""
    found, nodes = set(), list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef) and ast.unparse(getattr(node, "test", node)) != "TYPE_CHECKING":
            nodes += ast.iter_child_nodes(node)
    return found


def test_optional_packages_are_imported_where_they_are_used():
    found = {str(p.relative_to(SRC)).removeprefix("accelerate_recipes/"): imports_at_once(p) & OPTIONAL for p in OURS}
    assert {name for name, packages in found.items() if packages} == ABOUT


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = new_word_tokenizer([f"w{i}" for i in range(8)])
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 16, "pad_token_id": 0}
    tiny_model("bert", AutoModelForMaskedLM, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_core_runs_without_optional_packages(model, tmp_path):
    """It checks, plans, trains with a data worker, saves and exports."""
    env = hidden(tmp_path)
    command = [sys.executable, str(CHILDREN / "core.py"), str(model), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "Ready: single.yaml with 1 processes" in done.stdout and "1 simulation in" in done.stdout
    assert sorted(losses(tmp_path / "out"))[-1] == 4
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "finished"
    assert (tmp_path / "out/export/model.safetensors").exists()


# Their imports take long: with them, an error in the arguments takes twice the CPU seconds of `import torch`, and more.
HEAVY = {
    "bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "pyarrow", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.modeling_utils", "transformers.models.auto.auto_mappings",
    "transformers.trainer", "trl",
}  # fmt: skip


# The class of a new model's configuration imports these, to tell whether an unknown argument is one of its fields.
OF_FIELDS = {"torch.distributed.fsdp", "torch.distributed.tensor", "transformers.models.auto.auto_mappings"}


@pytest.mark.parametrize(("recipe", "argument", "heavy"), [
    ("template", "--lr_nonsense", HEAVY),
    ("chess", "--lr_nonsense", HEAVY - OF_FIELDS),
    ("chess", "--help", HEAVY),
    ("c4", "--help", HEAVY),
    ("t5", "--lr_nonsense", HEAVY - OF_FIELDS),
    ("vit", "--lr_nonsense", HEAVY - OF_FIELDS),
    ("vit", "--help", HEAVY - OF_FIELDS),
    ("sft", "--help", {"bitsandbytes"}),
    ("dpo", "--help", {"bitsandbytes"}),
])  # fmt: skip
def test_the_command_line_waits_for_nothing_that_it_does_not_need(recipe, argument, heavy):
    """To help, and to an error in the arguments. A heavy class of transformers is read as `transformers.PreTrainedModel`."""
    code = (
        "import atexit, os, runpy, sys; tell = lambda: print('MODULES', *sys.modules, flush=True); atexit.register(tell); "
        "leave = os._exit; os._exit = lambda code: (tell(), leave(code)); "  # by which an error ends
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(ROOT / f"recipes/{recipe}.py"), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said, _, modules = done.stdout.rpartition("MODULES ")
    assert ("--learning_rate" if argument == "--help" else f"unknown argument '{argument[2:]}'") in said + done.stderr
    assert heavy & {*modules.split()} == set() and "accelerate_recipes.args" in modules
