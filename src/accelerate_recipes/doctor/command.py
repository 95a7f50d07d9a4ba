"""The command: `accelerate-recipes doctor [--prove] [--only PROOF ...] [--output_dir FOLDER]`"""

import itertools
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accelerate_recipes.disk import refusal
from accelerate_recipes.doctor.card import write_card
from accelerate_recipes.doctor.links import Links, measure_links
from accelerate_recipes.doctor.proofs import PROOFS, Runs, prove
from accelerate_recipes.errors import ConfigError, error_list
from accelerate_recipes.machine import (
    Found,
    describe_machine,
    disks,
    gpu_findings,
    installed_gpus,
    setting_findings,
    versions,
)
from accelerate_recipes.strategy import num_accelerators


def doctor(output_dir: Path, only: Sequence[str], *, proves: bool) -> bool:
    """Print what this machine is, and what on it would fail or be slow; with `proves`, make the proofs and write the card.

    Returns:
        Whether nothing would fail, and all proofs passed.

    Raises:
        ConfigError: for a proof that there is not, and for a folder that cannot be written to.
    """
    if unknown := [name for name in only if name not in PROOFS]:
        raise ConfigError(f"--only {' '.join(unknown)}: no such proof; there are {', '.join(PROOFS)}")
    machine = describe_machine()
    described, of_disks = disks(output_dir)
    links = measure_links(num_accelerators()) if num_accelerators() > 1 else Links({}, Found([], []))
    machine |= links.described
    for name, value in [*machine.items(), *((f"disk, {name}", value) for name, value in described.items())]:
        print(f"{name}: {value}")
    parts = [Found(*versions()), gpu_findings(installed_gpus()), of_disks, setting_findings(), links.found]
    problems, warnings = ([*itertools.chain(*said)] for said in zip(*parts, strict=True))
    for title, none, said in (
        ("Would fail", "Nothing would fail", problems),
        ("Would be slow, or is not as tested", "Nothing would be slow, and all is as tested", warnings),
    ):
        print(error_list(title, said) if said else none, flush=True)
    if not proves:
        return not problems
    if why := refusal(output_dir):
        raise ConfigError(f"--output_dir {output_dir} cannot be written to: {why}; give another")
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="runs-", dir=output_dir))
    figures = prove(only or [*PROOFS], Runs(folder), lambda line: print(line, flush=True))
    command = shlex.join(["accelerate-recipes", "doctor", "--prove", *(["--only", *only] if only else [])])
    print(write_card(output_dir, command, machine, figures))
    print(f"Card: {output_dir / 'card.md'} and card.json")
    has_passed = all(figure.passed for figure in figures)
    if has_passed:
        shutil.rmtree(folder)
    else:
        print(f"The runs, with their logs: {folder}")
    return has_passed
