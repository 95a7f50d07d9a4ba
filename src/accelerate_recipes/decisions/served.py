"""Decisions as they are served: the settings in an export, the probabilities of an evaluation, and a comparison of both."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.decision import DecisionConfig

from accelerate_recipes.checkpoint.files import USAGE, step_of
from accelerate_recipes.decisions.loss import Question
from accelerate_recipes.decisions.measures import Reliability, groups_of, judge, key_of, summary
from accelerate_recipes.disk import read_json, read_json_lines, readable, write_atomically
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life.picture import Curves
from accelerate_recipes.models.composites import sees_images
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.ranks import is_first
from accelerate_recipes.run import Result, Run, before_and_after

DECISIONS, TABLES = "decisions.jsonl", "decisions.txt"  # in the output directory
FITTED = "eval_temperature/"
NUM_ASKED = 16  # rows that a comparison asks
MOST_BYTES = 4e9  # of an export that is asked when its run has ended
# Most that probabilities of an export in fp32, or in bf16, may differ. Packed rows and other kernels round otherwise.
TOLERANCES = 1e-3, 0.1
WEIGHTS = "These are the weights after {} steps."
CARD = """
## Use

```python
from transformers import AutoTokenizer, {auto}, pipeline

folder = "."  # this one
model = {auto}.from_pretrained(folder)  # of a name alone, transformers makes a new head for some types of models
tokenizer = AutoTokenizer.from_pretrained(folder)
decide = pipeline("decision", model=model, tokenizer=tokenizer, decision_config=folder)
answers = decide({request})
```

"""


class Served:
    """Artifact of a run: `decision.json` and the template of its export, with the temperatures of its last evaluation.

    `requests` are the held-out rows, with `state` and `questions`, as `Question.row` numbers them.
    """

    def __init__(self, config: DecisionConfig, requests: Sequence[dict], args: Any):
        self.config, self.requests, self.options_only = config, requests, args.options_only
        self.file = Path(args.output_dir) / DECISIONS
        # The card holds no state of the rows. It is made here, since the base may be gone when the run saves.
        is_whole = sees_images(load_config(args.base_model)) and not args.text_only_export
        auto = f"AutoModelFor{'ImageTextToText' if is_whole else 'CausalLM'}"
        self.card = CARD.format(auto=auto, request={"state": "...", "questions": requests[0]["questions"]})

    def measure(self, asked: Sequence[Question], step: int) -> dict[str, float]:
        """Measure the answers to all held-out questions, and fit temperatures after `step`. Call it on all ranks.

        A question is judged with a temperature that was not fitted on it; before training, with the base's.
        """
        answers, values = judge(asked, self.config.temperature, step > 0, self.options_only)
        rows = {}
        for question, answer in zip(asked, answers, strict=True):
            rows.setdefault(question.row, {})[question.name] = answer
        if is_first():
            lines = [{"step": step, **self.requests[row], "answers": given} for row, given in rows.items()]
            write_atomically(self.file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        return values

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the settings; the temperatures are those of the log that lies in the folder of a checkpoint."""
        folder = Path(folder)
        values = {name: value for record in read_json_lines(folder / "metrics.jsonl") for name, value in record.items()}
        fitted = {name.removeprefix(FITTED): value for name, value in values.items() if name.startswith(FITTED)}
        config = replace(self.config, temperature=self.config.temperature | fitted)
        config.save_pretrained(folder)
        # With the template, too: `transformers serve --decision-config` reads no other file.
        (folder / "decision.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
        # Not always those of the last evaluation
        weights = WEIGHTS.format(step_of(Path(folder.stem)))
        (folder / USAGE).write_text(f"{self.card}{weights}\n", encoding="utf-8")

    def result(self, before: dict, after: dict) -> Result:
        """Write the result of a run from two evaluations and the probabilities of the second."""
        if not self.file.exists():  # all steps were done before, in another place
            return before_and_after(before, after)
        rows = (line["answers"] for line in read_json_lines(self.file))
        answers = [answer for row in rows for answer in row.values()]
        lines = [summary(before, after, answers)]
        for kind in (name.removeprefix(FITTED) for name in after if name.startswith(FITTED)):
            gain = after[f"eval_temperature_gain/{kind}"]
            how = f"{'lowers' if gain > 0 else 'raises'} the log loss by {abs(gain):.4f} where it was not fitted"
            lines.append(f"Temperature of {kind}: {after[FITTED + kind]:.3f}; it {how}")
        write_atomically(self.file.with_name(TABLES), "\n".join(lines) + "\n")
        types = {kind: [a for a in answers if a["type"] == kind] for kind in sorted({a["type"] for a in answers})}
        # matplotlib would read what stands between dollars as a formula.
        curves = {group.replace("$", r"\$"): f"eval_{key_of('accuracy', group)}" for group in groups_of(answers)}
        return Result("\n".join(lines), Reliability(types), [Curves(curves, "Accuracy, held out")])


def compare_decisions(export: Path, model: Any = None) -> str:
    """Ask an export the first held-out rows of its run, as its users do, and compare its probabilities with the run's.

    Returns a text about how far they differ. By default, the model of the export is loaded.

    Raises:
        ConfigError: if the probabilities differ by more than rounding.
    """
    file = export.resolve().parent / DECISIONS
    if not file.exists():
        return f"Decisions: not compared, there is no {file}"
    lines = read_json_lines(file)[:NUM_ASKED]
    if WEIGHTS.format(lines[0]["step"]) not in (export / "README.md").read_text(encoding="utf-8"):
        return f"Decisions: not compared, {file} is of step {lines[0]['step']}, and the export of another"
    if model is None:
        (name,) = read_json(export / "config.json")["architectures"]
        model = getattr(transformers, name).from_pretrained(export)
    pipeline: Any = transformers.pipeline  # whose types lack a model of any kind
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    decide = pipeline("decision", model=model, tokenizer=tokenizer, decision_config=str(export), device="cpu")
    differences = []
    for line in lines:
        given = decide({"state": line["state"], "questions": line["questions"]})
        for name, answer in line["answers"].items():
            true = given[name].get("noul")
            probs = {"true": true, "false": 1 - true} if answer["type"] == "noul" else given[name]["probabilities"]
            pairs = zip(answer["options"], answer["served"], strict=True)
            differences.append(max(abs(probs[option] - value) for option, value in pairs))
    most = f"by at most {max(differences):.1e}"
    comparison = f"of {len(differences)} questions, probabilities differ from those of the last evaluation {most}"
    if max(differences) > TOLERANCES[model.dtype != torch.float32]:
        raise ConfigError(f"{export} does not decide as the model that was evaluated: {comparison}")
    return f'pipeline("decision") on the export: {comparison}'


def ask_finished(run: Run[Any]) -> None:
    """Compare the decisions of a finished run's export, if it is not large, and print the result."""
    export = run.output_dir / "export"
    if run.is_first and not (export / "config.json").is_file():
        note = "holds adapters, which no server asks by the settings in its folder; its README.md says how to ask them"
        run.print(f"{export} {note}")
    elif run.is_first:
        size = sum(file.stat().st_size for file in export.glob("*.safetensors"))
        command = f"python -m accelerate_recipes check-export {export}"
        run.print(
            compare_decisions(export) if size <= MOST_BYTES else f"{readable(size)} are not asked here: {command}"
        )
