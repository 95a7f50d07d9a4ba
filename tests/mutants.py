"""Plant small faults in the core, one at a time, and find those that no test notices: `make mutants`.

    make mutants ARGS="--number 200 --seed 0"

The faults are Cosmic Ray's: another operator, comparison or number, a negated condition, a loop that is not entered.
`number` places are drawn at random, and one fault for each place. The tests of its module decide about a fault, in a process
forked from one that has imported the libraries; a new command would import them anew.

The script prints a line for each fault, and at the end the survivors with their source. Each needs a test, or a reason.
"""

import argparse
import difflib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import conftest  # noqa: F401  sets variables that the libraries read
import pytest

ROOT = Path(__file__).resolve().parents[1]
# Put this folder last: it brings other versions of some libraries.
sys.path += [str(ROOT / ".venv/mutants"), str(ROOT / "tests/children")]

from cosmic_ray import plugins  # noqa: E402
from cosmic_ray.ast import ast_nodes, get_ast_from_path  # noqa: E402
from cosmic_ray.mutating import mutate_code  # noqa: E402
from forked import run_and_exit  # noqa: E402

PACKAGE = ROOT / "src/accelerate_recipes"
# Tests of each module: not all that touch it, but those that check what it promises.
TESTS = {
    "args": ["test_args.py", "test_configs.py", "test_optim.py"],
    "checkpoint/checkpointer": ["test_checkpoint.py", "test_lock.py"],
    "checkpoint/export": ["test_checkpoint.py"],
    "checkpoint/files": ["test_checkpoint.py"],
    "checkpoint/resume": ["test_checkpoint.py", "test_lock.py"],
    "data/packing": ["test_data.py", "test_engine.py"],
    "data/prepared": ["test_data.py"],
    "data/rows": ["test_data.py", "test_engine.py"],
    "data/stream_order": ["test_streams.py"],
    "data/streams": ["test_streams.py"],
    "engine": ["test_engine.py", "test_metrics.py", "test_faults.py::test_chain_of_resumes", "test_faults.py::test_sigterm_to_all_processes_saves"],
    "models/generation": ["test_causal_models.py"],
    "losses": ["test_losses.py", "test_engine.py"],
    "metrics": ["test_metrics.py", "test_engine.py", "test_t5.py::test_flops_are_what_a_counter_counts"],
    "optim": ["test_optim.py", "test_levers.py"],
}  # fmt: skip
LIBRARIES = ["accelerate", "datasets", "evaluate", "hypothesis", "peft", "transformers.models.llama.modeling_llama"]  # fmt: skip
SECONDS = 400  # more than any module's tests take; taking longer means that the fault was noticed


def faults(modules: list[str]) -> dict[tuple[str, tuple], list[tuple[str, int]]]:
    """Return all faults, as (operator, its occurrence in the module), by (module, place)."""
    found = defaultdict(list)
    for module in modules:
        nodes = list(ast_nodes(get_ast_from_path(PACKAGE / f"{module}.py")))
        for name in plugins.operator_names():
            operator = plugins.get_operator(name)
            if operator.arguments():
                continue
            places = (place for node in nodes for place in operator().mutation_positions(node))
            for occurrence, place in enumerate(places):
                found[module, place].append((name, occurrence))
    return found


def run_tests(module: str, source: str, log: Path) -> str:
    """Run the module's tests on this source; return `killed`, `survived` or `too long`."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / PACKAGE.relative_to(ROOT)
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / f"{module}.py").write_text(source)
        (Path(folder) / "requirements.txt").symlink_to(ROOT / "requirements.txt")  # the package looks for it
        log.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            os.setsid()
            os.environ |= {"PYTHONPATH": str(package.parent), "TMPDIR": folder}  # also for processes that tests start
            tempfile.tempdir = None
            sys.path.insert(0, str(package.parent))
            tests = [str(ROOT / "tests" / test) for test in TESTS[module]]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long"]
            run_and_exit(lambda: sys.exit(pytest.main([*options, *tests])), str(log))
        deadline = time.monotonic() + SECONDS
        try:
            while time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return "killed" if status else "survived"
                time.sleep(0.1)
            return "too long"
        finally:
            try:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="How many faults to plant.")
    parser.add_argument("--seed", type=int, default=0, help="Which faults are drawn.")
    parser.add_argument("--modules", nargs="+", default=list(TESTS), choices=list(TESTS), help="Where to plant them.")
    parser.add_argument(
        "--log", type=Path, default=Path(tempfile.gettempdir()) / "mutant.log", help="What pytest says."
    )
    args = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    sources = {module: (PACKAGE / f"{module}.py").read_text() for module in args.modules}
    for module, source in sources.items():
        if (outcome := run_tests(module, source, args.log)) != "survived":
            sys.exit(f"the tests of {module} fail without a fault ({outcome}): see {args.log}")
    places = faults(args.modules)
    generator = random.Random(args.seed)
    chosen = generator.sample(sorted(places), min(args.number, len(places)))
    counts, survivors = Counter(), []
    for number, (module, place) in enumerate(chosen, 1):
        operator, occurrence = generator.choice(places[module, place])
        mutated = mutate_code(sources[module], plugins.get_operator(operator)(), occurrence)
        outcome = run_tests(module, mutated, args.log)
        counts[outcome] += 1
        print(f"{number}/{len(chosen)} {module}.py:{place[0][0]} {operator.split('/')[1]}: {outcome}", flush=True)
        if outcome == "survived":
            survivors.append((module, place[0][0], mutated))
    print(f"\n{len(places)} places; " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for module, line, mutated in survivors:
        lines = difflib.unified_diff(sources[module].splitlines(), mutated.splitlines(), n=0, lineterm="")
        print(f"\n{module}.py:{line}\n" + "\n".join(list(lines)[3:]))


if __name__ == "__main__":
    main()
