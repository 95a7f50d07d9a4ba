"""The command: `accelerate-recipes doctor [--prove] [--only PROOF ...] [--output_dir FOLDER]`

The card says what was run on what, and each figure with its tolerance, as Markdown and as JSON.
"""

import itertools
import json
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from accelerate_recipes.disk import write_atomically
from accelerate_recipes.errors import ConfigError, error_list
from recipe_tools import machine
from recipe_tools.doctor.proofs import PROOFS, Figure, Runs, prove


def doctor(output_dir: Path, only: Sequence[str], *, proves: bool) -> bool:
    """Print what this machine is, and what on it would fail or be slow; with `proves`, make the proofs and write the card.

    Returns:
        Whether nothing would fail, and all proofs passed.

    Raises:
        ConfigError: for a proof that there is not.
        OSError: for a folder that cannot be written to.
    """
    if unknown := [name for name in only if name not in PROOFS]:
        raise ConfigError(f"--only {' '.join(unknown)}: no such proof; there are {', '.join(PROOFS)}")
    of_disks, *of_folders = machine.disks(output_dir)
    described = machine.describe_machine()
    for name, value in [*described.items(), *((f"disk, {name}", value) for name, value in of_disks.items())]:
        print(f"{name}: {value}")
    of_gpus = machine.gpu_findings(machine.installed_gpus())
    parts = [machine.versions(), of_gpus, of_folders, ([], machine.setting_warnings())]
    problems, warnings = ([*itertools.chain(*said)] for said in zip(*parts, strict=True))
    print(error_list("Would fail", problems or ["nothing"]))
    print(error_list("Would be slow, or is not as tested", warnings or ["nothing"]), flush=True)
    if not proves:
        return not problems
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="runs-", dir=output_dir))
    figures = prove(only or [*PROOFS], Runs(folder))
    command = shlex.join(["accelerate-recipes", "doctor", "--prove", *(["--only", *only] if only else [])])
    print(write_card(output_dir, command, described, figures))
    print(f"Card: {output_dir / 'card.md'} and card.json")
    has_passed = all(figure.passed for figure in figures)
    if has_passed:
        shutil.rmtree(folder)
    else:
        print(f"The runs, with their logs: {folder}")
    return has_passed


def write_card(folder: Path, command: str, described: Mapping[str, str], figures: Sequence[Figure]) -> str:
    """Write card.md and card.json into a folder; returns the text of the first."""
    verdict = "passed" if all(figure.passed for figure in figures) else "FAILED"
    missing, other = machine.versions()
    content = {
        "command": command,
        "verdict": verdict,
        "machine": dict(described),
        "packages": [said.partition(";")[0] for said in (*missing, *other)],
        "figures": [asdict(figure) | {"passed": figure.passed} for figure in figures],
    }
    lines = [f"**{verdict}**: `{command}`", "", *(f"- {name}: {value}" for name, value in described.items())]
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
