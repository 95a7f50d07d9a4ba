"""The command: `accelerate-recipes doctor [--prove] [--only PROOF ...] [--output_dir FOLDER]`"""

import itertools
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accelerate_recipes.doctor.card import write_card
from accelerate_recipes.doctor.proofs import PROOFS, Runs, prove
from accelerate_recipes.errors import ConfigError, error_list
from accelerate_recipes.launch import machine


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
