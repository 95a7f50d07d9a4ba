"""Card of a machine: what was run on what, and each figure with its tolerance, as Markdown and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from accelerate_recipes.disk import write_atomically
from accelerate_recipes.doctor.proofs import Figure
from accelerate_recipes.launch.machine import versions


def write_card(folder: Path, command: str, machine: Mapping[str, str], figures: Sequence[Figure]) -> str:
    """Write card.md and card.json into a folder; returns the text of the first."""
    verdict = "passed" if all(figure.passed for figure in figures) else "FAILED"
    missing, other = versions()
    content = {
        "command": command,
        "verdict": verdict,
        "machine": dict(machine),
        "packages": [said.partition(";")[0] for said in (*missing, *other)],
        "figures": [asdict(figure) | {"passed": figure.passed} for figure in figures],
    }
    lines = [f"**{verdict}**: `{command}`", "", *(f"- {name}: {value}" for name, value in machine.items())]
    lines += [f"- not as pinned: {said}" for said in content["packages"]]
    lines += ["", "| proof | figure | value | at most | |", "|---|---|---|---|---|", *map(row, figures)]
    text = "\n".join(lines) + "\n"
    write_atomically(folder / "card.json", json.dumps(content, indent=1) + "\n")
    write_atomically(folder / "card.md", text)
    return text


def row(figure: Figure) -> str:
    """Write a figure as a row of the table."""
    value = figure.why.replace("|", "\\|") if figure.value is None else f"{figure.value:.3g} {figure.unit}".strip()
    limit = "" if figure.limit is None else f"{figure.limit:g}"
    verdict = "" if figure.limit is None else "passed" if figure.passed else "**FAILED**"
    return f"| {figure.proof} | {figure.what} | {value} | {limit} | {verdict} |"
