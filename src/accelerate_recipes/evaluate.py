"""Evaluation of an export by lm-evaluation-harness: `python -m accelerate_recipes evaluate EXPORT --tasks ...`

The export's `evaluation.json` keeps the results of each task, and its model card shows them.
"""

import json
import re
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from accelerate_recipes.arguments.shipped import HOME
from accelerate_recipes.checkpoint.export import add_to_list, exported_files
from accelerate_recipes.disk import read_json, write_atomically
from accelerate_recipes.errors import ConfigError, raise_problems, suggestion
from accelerate_recipes.hub import cache
from accelerate_recipes.models.composites import is_composite

RESULTS = "evaluation.json"
HEADING = "## Evaluation by lm-evaluation-harness"
OWN_TASKS = HOME / "recipes/tasks"
REQUIREMENTS = "requirements-eval.txt"
SETTINGS = ("limit", "num_fewshot", "apply_chat_template")  # those of the harness that change its figures


def evaluate_export(
    export: Path, tasks: Sequence[str], include_path: Sequence[Path], batch_size: int, settings: dict[str, Any]
) -> str:
    """Evaluate an export on tasks of lm-evaluation-harness, and return a table of the results.

    The tasks are found in `include_path`, in recipes/tasks, and in lm-evaluation-harness; most tasks of the latter read
    datasets from the Hub. `settings` has a value for each of SETTINGS. A new result of a task replaces the earlier one.

    Raises:
        ConfigError: for an export that cannot be evaluated, for unknown tasks, and without lm-evaluation-harness.
    """
    exported_files(export)  # raises ConfigError unless the export is whole
    model = model_args(export)
    if find_spec("lm_eval") is None:
        raise ConfigError(f"lm-evaluation-harness is not installed; run: pip install -r {REQUIREMENTS}")
    if missing := [str(folder) for folder in include_path if not folder.is_dir()]:
        raise ConfigError(f"--include_path {', '.join(missing)}: no such folder")
    # The import changes environment variables, and takes seconds.
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    folders = [str(folder) for folder in (OWN_TASKS, *include_path) if folder.is_dir()]
    told = {"export": str(export)}  # a task may read the run's held-out rows there
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=told)
    if not all(task in manager.all_tasks for task in tasks):
        manager = TaskManager(include_path=folders, metadata=told)
    unknown = [f"{task}{suggestion(task, manager.all_tasks)}" for task in tasks if task not in manager.all_tasks]
    raise_problems("lm-evaluation-harness does not know these tasks", unknown)
    found: Any = simple_evaluate(
        model=HFLM(**model, device="cuda" if torch.cuda.is_available() else "cpu", batch_size=batch_size),
        tasks=list(tasks),
        task_manager=manager,
        log_samples=False,
        **settings,
    )
    keep(export, results_of(found, {name: value for name, value in settings.items() if value}))
    return table(read_results(export))


def model_args(export: Path) -> dict[str, Any]:
    """Return the arguments with which lm-evaluation-harness loads an export.

    Raises:
        ConfigError: for a model that is not a language model, and for adapters whose base model is not here.
    """
    if not (export / "adapter_config.json").is_file():
        architectures = read_json(export / "config.json").get("architectures") or ["none"]
        if not architectures[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            raise ConfigError(f"{export} is a {architectures[0]}; lm-evaluation-harness evaluates language models")
        config = AutoConfig.from_pretrained(export, trust_remote_code=False)
        if is_composite(config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            remedy = "export the checkpoint with --text_only_export"
            raise ConfigError(f"{export} is a {architectures[0]}, no language model to lm-evaluation-harness; {remedy}")
        return {"pretrained": str(export)}
    settings = read_json(export / "adapter_config.json")
    name = settings["base_model_name_or_path"]
    if cache.folder("model", name) is None:
        raise ConfigError(f"{export} holds adapters of {name}, which is not here; run: hf download {name}")
    revision = settings.get("revision") or cache.revision("model", name) or "main"  # a folder has none
    return {"pretrained": name, "revision": revision, "peft": str(export), "tokenizer": str(export)}


def results_of(found: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the results by task: measures, their standard errors, and the settings of the evaluation."""
    results = {}
    for task, values in found["results"].items():
        numbers = {key: value for key, value in values.items() if "," in key and isinstance(value, int | float)}
        measures = {
            key.removesuffix(",none"): [value, numbers.get(key.replace(",", "_stderr,"))]
            for key, value in numbers.items()
            if "_stderr," not in key
        }
        if measures:
            examples = found.get("n-samples", {}).get(task, {}).get("effective")
            versions = {"lm_eval": metadata.version("lm_eval"), "task": found.get("versions", {}).get(task)}
            results[task] = {"measures": measures, "examples": examples, "versions": versions} | settings
    return results


def read_results(export: Path) -> dict[str, Any]:
    try:
        return read_json(export / RESULTS)
    except (FileNotFoundError, ValueError):
        return {}


def keep(export: Path, results: dict[str, Any]) -> None:
    """Add results to those of an export; in its model card, a table of all results replaces the earlier table."""
    results = read_results(export) | results
    write_atomically(export / RESULTS, json.dumps(results, indent=1) + "\n")
    add_to_list(export, RESULTS)
    card = (export / "README.md").read_text(encoding="utf-8")
    section = f"{HEADING}\n\n{table(results)}\n"
    # The table ends at the next heading, or with the card.
    earlier = re.compile(rf"^{re.escape(HEADING)}\n.*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)
    if not earlier.search(card):
        before, arguments, after = card.partition("## Arguments\n")
        card = f"{before.rstrip()}\n\n{HEADING}\n{arguments}{after}"
    write_atomically(export / "README.md", earlier.sub(lambda _: section, card, count=1))


def table(results: dict[str, Any]) -> str:
    """Write results as a table in Markdown."""
    lines = ["| task | examples | measure | value | standard error |", "|---|---|---|---|---|"]
    for task, result in sorted(results.items()):
        said = ", ".join(f"{name} {result[name]}" for name in SETTINGS if name in result)
        first = [f"{task} ({said})" if said else task, "" if result["examples"] is None else f"{result['examples']:,}"]
        for name, (value, error) in result["measures"].items():
            lines.append(f"| {' | '.join(first)} | {name} | {value:.5g} | {'' if error is None else f'{error:.2g}'} |")
            first = ["", ""]
    return "\n".join(lines) + "\n"
