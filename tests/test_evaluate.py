"""Test of the command of docs/serving.md that evaluates an export, without lm-evaluation-harness, which it needs."""

import importlib.util
import re

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT, read_metrics
from transformers import AutoModelForCausalLM

from accelerate_recipes.models.tokenizers import load_tokenizer
from chess_games.next_moves import prompt_of

SCRIPT = ROOT / "recipes/chess.py"
TINY = [
    "--config", ROOT / "recipes/configs/chess/laptop.yaml", "--config_overrides", "hidden_size=32",
    "intermediate_size=32", "num_attention_heads=2", "num_hidden_layers=1", "--heldout_share", 0.1, "--num_positions", 120,
    "--max_steps", 30, "--total_batch_size", 8, "--learning_rate", 0.02, "--eval_steps", 0, "--save_steps", 0,
]  # fmt: skip


def tasks_in(folder: str) -> dict[str, dict]:
    """Read the tasks of a folder as the harness does: `!function module.name` is a function of a file beside the task."""
    found = {}
    for file in (ROOT / folder).rglob("*.yaml"):

        class Loader(yaml.SafeLoader):
            here = file.parent

        def function(loader: Loader, node: yaml.ScalarNode):
            module, _, name = node.value.rpartition(".")
            spec = importlib.util.spec_from_file_location(module, loader.here / f"{module}.py")
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
            return getattr(loaded, name)

        Loader.add_constructor("!function", function)
        task = yaml.load(file.read_text(), Loader)  # a subclass of SafeLoader
        found[task["task"]] = task
    return found


def test_the_command_of_the_page_gives_the_figures_of_the_run(forks, games_file, tmp_path):
    args = [*TINY, "--train_files", games_file, "--data_cache_dir", tmp_path / "cache"]
    forks.succeed(tmp_path / "run", *args, config="single", num_processes=1)
    (command,) = re.findall(r"^lm_eval run (.*)$", (ROOT / "docs/serving.md").read_text(), re.M)
    flags = {flag: words.split() for flag, words in re.findall(r"--(\w+) ([^-][^ ]*(?: [^-][^ ]*)*)", command)}
    assert flags.keys() == {"model", "model_args", "include_path", "tasks", "batch_size"}
    tasks, model_args = tasks_in(*flags["include_path"]), dict(word.split("=") for word in flags["model_args"])
    assert {*flags["tasks"]} == tasks.keys() and model_args == {"pretrained": "outputs/demo/export"}
    own = {name.removeprefix("eval_"): value for name, value in read_metrics(tmp_path / "run")[-1].items()}

    export = str(tmp_path / "run/export")
    tokenizer, model = load_tokenizer(export), AutoModelForCausalLM.from_pretrained(export)
    task = tasks["chess_loss"]
    scores = []
    for doc in task["custom_dataset"](pretrained=export)[task["test_split"]]:
        text = doc[task["doc_to_text"]] + task["target_delimiter"] + doc[task["doc_to_target"]]
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        begun = len(tokenizer(doc[task["doc_to_text"]], add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0].log_softmax(-1)
        of_targets = logits[:-1].gather(1, ids[1:, None])[begun - 1 :]
        scores.append(task["process_results"](doc, [(of_targets.sum().item(), False)])["loss"])
    assert task["metric_list"][0]["aggregation"](scores) == pytest.approx(own["loss"], rel=1e-5)

    task = tasks["chess_next_move"]
    found: dict[str, list[float]] = {}
    docs = task["custom_dataset"](pretrained="a base", peft=export)[task["test_split"]]
    for doc in docs:
        ids = torch.tensor(tokenizer(doc[task["doc_to_text"]], add_special_tokens=False)["input_ids"])[None]
        # A small model hardly notices a missing begin token, so the tokens are compared too.
        assert ids[0].tolist() == prompt_of(tokenizer, doc["prefix"])
        drawn = model.generate(ids, do_sample=False, max_new_tokens=task["generation_kwargs"]["max_gen_toks"])
        answer = tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)
        for name, value in task["process_results"](doc, [answer]).items():
            found.setdefault(name, []).append(value)
    assert found.keys() == {measure["metric"] for measure in task["metric_list"]} and len(found) == 10
    means = {name: np.mean(values) for name, values in found.items()}
    assert means == pytest.approx({name: own[name] for name in found})
    assert 0.02 < own["legal_move_rate"] < 0.98 and own["next_move_accuracy"] > 0, "figures that say something"
