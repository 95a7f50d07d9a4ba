"""Run the tests with the newest releases of all libraries, and list what fails there: `make newest`.

    make newest ARGS="-m slow tests/test_plan.py"

ARGS are pytest's; without them all tests run but the longest and those that need root or another environment. A warning that
something which we call, or which a test calls, will go (FutureWarning, DeprecationWarning) is an error, in runs too.

The list has the pinned and the installed version of each library, and the first line of each failure, with `new` where the
test is not in the last list. That list is `.cache/newest.json`: what is not run keeps its lines there.
"""

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAST = ROOT / ".cache/newest.json"


class Failures:
    """Plugin of pytest that keeps the tests that have run, and the first line of each failure."""

    def __init__(self):
        self.run: set[str] = set()
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.run.add(report.nodeid)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # a module that cannot be imported has none
            said = crash.message if crash else str(report.longrepr).rpartition("\nE  ")[2]
            self.failed[report.nodeid] = said.strip().partition("\n")[0]

    pytest_collectreport = pytest_runtest_logreport


def own_modules() -> list[str]:
    """List the names of our modules, as a warning names the module that called."""
    library = [
        path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src/accelerate_recipes").rglob("*.py")
    ]
    names = [".".join(path.parts).removesuffix(".__init__") for path in library]
    return names + [
        path.stem for folder in ("recipes", "tests", "tests/children") for path in (ROOT / folder).glob("*.py")
    ]


def main(arguments: list[str]) -> int:
    errors = [f"error::{kind}:{name}" for kind in ("FutureWarning", "DeprecationWarning") for name in own_modules()]
    os.environ["PYTHONWARNINGS"] = ",".join(errors)  # for what tests start
    found = Failures()
    code = pytest.main(["-q", *(f"-W{error}" for error in errors), *arguments], plugins=[found])
    pins = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt"))
    print("\n| library | pinned | installed |\n|---|---|---|")
    for name, pin in re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE):
        print(f"| {name} | {pin} | {version(name)} |")
    last = json.loads(LAST.read_text()) if LAST.exists() else {}
    print(f"\n{len(found.failed)} of {len(found.run)} tests failed\n")
    for test, line in sorted(found.failed.items()):
        print(f"- {'' if test in last else 'new: '}`{test}`: {line}")
    for test in sorted(last.keys() & found.run - found.failed.keys()):
        print(f"- passes again: `{test}`")
    kept = {test: line for test, line in last.items() if test not in found.run}
    LAST.write_text(json.dumps(kept | found.failed, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
