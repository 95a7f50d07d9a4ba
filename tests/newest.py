"""Run the tests with the newest releases of all libraries, and list what fails there: `make newest`.

    make newest ARGS="-m slow tests/test_plan.py"

ARGS are pytest's; without them all tests run but the longest and those that need root or another environment. A warning that
something which we call, or which a test calls, will go (FutureWarning, DeprecationWarning) is an error, in runs too. Where the
library does not tell who has called, it is only listed.

The list has the pinned and the installed version of each library, and the first line of each failure, with `new` where the
test is not in the last list. That list is `.cache/newest.json`: what is not run keeps its lines there.
"""

import json
import os
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAST = ROOT / ".cache/newest.json"
DEPRECATED = (FutureWarning, DeprecationWarning)


class Failures:
    """Plugin of pytest that keeps the tests that have run, the first line of each failure, and what is deprecated."""

    def __init__(self):
        self.run: set[str] = set()
        self.failed: dict[str, str] = {}
        self.deprecated: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.run.add(report.nodeid)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # a module that cannot be imported has none
            said = crash.message if crash else str(report.longrepr).rpartition("\nE  ")[2]
            self.failed[report.nodeid] = said.strip().partition("\n")[0]

    pytest_collectreport = pytest_runtest_logreport

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        if issubclass(warning_message.category, DEPRECATED):
            self.deprecated.add(str(warning_message.message).strip().partition("\n")[0])


def own_modules() -> list[str]:
    """List the names of our modules, as a warning names the module that called."""
    roots = {"src": "**/*.py", "recipes": "*.py", "tests": "*.py", "tests/children": "*.py"}
    files = [path.relative_to(ROOT / root) for root, pattern in roots.items() for path in (ROOT / root).glob(pattern)]
    return [".".join(path.with_suffix("").parts) for path in files]


def main(arguments: list[str]) -> int:
    errors = [f"error::{kind.__name__}:{name}" for kind in DEPRECATED for name in own_modules()]
    os.environ["PYTHONWARNINGS"] = ",".join(errors)  # for what tests start
    found = Failures()
    code = pytest.main(["-q", *(f"-W{error}" for error in errors), *arguments], plugins=[found])
    pins = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt"))
    print("\n| library | pinned | installed |\n|---|---|---|")
    for name, pin in re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE):
        print(f"| {name} | {pin} | {version(name)} |")
    last = json.loads(LAST.read_text()) if LAST.exists() else {}
    number = sum("::" in test for test in found.run)  # not modules
    print(f"\n{len(found.failed)} of {number} tests failed\n")
    for test, line in sorted(found.failed.items()):
        print(f"- {'' if test in last else 'new: '}`{test}`: {line}")
    for test in sorted(last.keys() & found.run - found.failed.keys()):
        print(f"- passes again: `{test}`")
    print("".join(f"- deprecated, by whoever calls it: {line}\n" for line in sorted(found.deprecated)))
    kept = {test: line for test, line in last.items() if test not in found.run}
    LAST.write_text(json.dumps(kept | found.failed, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
