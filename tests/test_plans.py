"""Tests of the figures in presets and on pages: they are those of `make plans`, and `plan` says the same today.

Also of those benchmarks that compare simulations with real steps.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import memory_limits
import plans
import pytest
import yaml
from helpers import ROOT, by_time, environment

from accelerate_recipes.arguments.gpus import GIB
from recipe_tools.plan.layers import predict_outcomes
from recipe_tools.plan.ledger import COPIED_BY_GLOO
from recipe_tools.plan.simulate import Simulator

PLANS = json.loads(plans.RESULT.read_text())["plans"]
CHEAP = "c4/llama3_2_1b.yaml"


pytestmark = pytest.mark.usefixtures("at_the_root")


def test_pages_and_presets_show_what_was_simulated():
    """Each preset for GPUs says what it needs, each table is complete, and nothing was simulated that no page shows."""
    assert set(PLANS) == set(plans.wanted(PLANS)), "run `make plans`"
    for path, text in plans.pages(PLANS).items():
        assert path.read_text() == text, "run `make plans ARGS=--pages`"


def test_presets_for_gpus():
    """Only what `plan` does not simulate has a derived figure; the parameters that a preset names are those simulated."""
    assert len(plans.presets()) > 20
    for name in plans.presets():
        text = (plans.PRESETS / name).read_text()
        assert len(plans.MEMORY.findall(text)) == 1, name
        assert ("derived" in text) == (name in plans.NEAREST), name
        named = re.findall(r"Parameters: ([\d,]+)|([\d,]{9,}) parameters", text)
        if not yaml.safe_load(text).get("use_peft"):  # then the model has adapters besides
            parameters = f"{PLANS[plans.of_preset(name)]['parameters']:,}"
            assert {number.strip(",") for pair in named for number in pair if number} <= {parameters}, name


def test_presets_of_sft():
    """Ten models, each trained as a whole or with adapters; a run has a folder of its own, and what it needs fits easily."""
    names = [name for name in plans.presets() if name.startswith("sft/")]
    of_sft = {name: yaml.safe_load((plans.PRESETS / name).read_text()) for name in names}
    assert len({chosen["model_name_or_path"] for chosen in of_sft.values()}) == 10
    assert len({chosen["output_dir"] for chosen in of_sft.values()}) == len(of_sft)
    for name, chosen in of_sft.items():
        assert bool(chosen.get("use_peft")) == name.endswith("_lora.yaml") and "dataset_name" not in chosen
        memory = plans.GPUS[plans.presets()[name]].memory
        assert PLANS[plans.of_preset(name)]["needed"] < 0.93 * memory, f"{name}: only just"


COMMANDS = {name: plans.of_preset(name) for name in plans.presets()}
COMMANDS |= {f"{run.source}: {run.what}": run.command for run in plans.RUNS}


@pytest.mark.parametrize("name", by_time(COMMANDS, (), [CHEAP]))
def test_plan_says_the_same(name, tmp_path):
    """The figures of a preset are those that `plan` finds for the command in its first line; so are those of others' runs."""
    job = plans.job_for(COMMANDS[name], tmp_path)
    with Simulator() as simulator:
        (outcome,) = predict_outcomes(simulator, [job])
    assert not plans.differs(plans.facts_of(job, outcome), PLANS[COMMANDS[name]])


def test_published_runs():
    """At least ten, each with a source; where `plan` is off by 3 % of memory or 10 % of time, the page has a note on it."""
    assert len(plans.RUNS) >= 10 and len({run.command for run in plans.RUNS}) == len(plans.RUNS)
    section = (ROOT / "docs/development/published.md").read_text()
    assert all(f"[{run.source}](https://github.com/" in section for run in plans.RUNS)
    notes = {note for run in plans.RUNS for note in (*run.otherwise, *run.slower)}
    assert notes == set(re.findall(r"^- (\w)[:,] ", section, re.M))
    for run in plans.RUNS:
        facts = PLANS[run.command]
        held = (facts["in_use"] + run.is_reserved * facts["allocator"]) / GIB
        if math.isinf(run.memory):
            assert facts["needed"] > plans.GPUS["h100"].memory and " --gpu h100 " in run.command
        elif run.memory:
            assert abs(held / run.memory - 1) <= 0.03 or run.otherwise, run.what
        assert not run.seconds or abs(facts["seconds"] / run.seconds - 1) <= 0.1 or run.slower, run.what


def test_what_has_changed():
    """`--check` finds a changed byte, a figure that is gone, and a time that differs by more than a hundredth."""
    facts = PLANS[plans.of_preset(CHEAP)]
    assert not plans.differs(facts | {"seconds": facts["seconds"] * 1.005}, facts)
    more = {"seconds": facts["seconds"] * 1.02, "in_use": facts["in_use"] + 1, "by_kind": {}, "more": 1}
    for changed in ({name: value} for name, value in more.items()):
        assert plans.differs(facts | changed, facts)
    assert plans.differs(facts, None)


RESULTS = ROOT / "benchmarks/results"


def run_benchmark(name: str, *arguments: str, tmp_path: Path) -> dict:
    out = tmp_path / "out.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--out", str(out), *arguments]
    subprocess.run(command, cwd=ROOT, env=environment(tmp_path), check=True)
    return json.loads(out.read_text())


def test_the_page_says_what_shapes_have_shown():
    """Twelve drawn shapes: no peak differs by a byte, no resident one by a hundredth, and the page says by how much."""
    found = json.loads((RESULTS / "plan_shapes.json").read_text())
    shapes = found["shapes"]
    assert len(shapes) == 12 and all(shape["simulated"] == shape["real"] for shape in shapes)
    differences = [abs(shape["simulated"] / shape["resident"] - 1) for shape in shapes]
    assert max(differences) < 0.01
    page = " ".join((ROOT / "docs/development/testing.md").read_text().split())
    assert f"a resident peak that differs from it by {max(differences):.1%} at most".replace("%", " %") in page
    # The ledger counts a whole copy of what gloo gathers and reduces.
    copies = {name: round(share, 1) for name, share in found["copied_by_gloo"].items()}
    assert copies == dict.fromkeys(COPIED_BY_GLOO, 1.0) | {"allreduce": 0.0}


@pytest.mark.long
def test_shapes_have_their_simulated_peak(tmp_path):
    """Of four shapes the last two have their peak where gloo copies what it exchanges."""
    for shape in run_benchmark("plan_shapes", "--number", "4", tmp_path=tmp_path)["shapes"]:
        assert shape["simulated"] == shape["real"]
        assert shape["resident"] == pytest.approx(shape["real"], rel=0.015), shape


def test_the_page_says_what_plan_takes():
    """The check of a preset took less than 30 s, and 70 billion parameters on 64 GPUs less than 2 minutes and 2 GiB."""
    found = json.loads((RESULTS / "plan_time.json").read_text())
    large, presets = found["large"], found["presets"]
    longest = max(preset["seconds"] for preset in presets.values())
    assert longest < 30 and large["seconds"] < 120 and large["memory"] < 2 * 2**30
    page = " ".join((ROOT / "docs/plan.md").read_text().split())
    assert f"takes {large['seconds']:.0f} s and {large['memory'] / 2**30:.1f} GiB" in page
    assert f"at most {longest:.0f} s" in page


def test_what_other_numbers_of_gpus_need():
    """What follows from 8 GPUs is what a simulation of 2, 4 and 32 says, to a millionth, and of one to a hundredth."""
    for model, setting, number, command, allowed in (
        ("Llama 3.2 3B", "recomputed", 4, plans.of_preset("c4/llama3_2_3b.yaml"), 1e-6),
        ("Llama 3.1 8B", "adapters", 2, plans.of_preset("c4/llama3_1_8b_lora.yaml"), 1e-6),
        ("Llama 2 70B", "recomputed", 32, plans.of_preset("c4/llama2_70b.yaml"), 1e-6),
        ("Llama 3.2 1B", "as it is", 1, plans.of_model("Llama 3.2 1B", "as it is", 1), 1e-2),
    ):
        allocator = PLANS[plans.of_model(model, setting)]["allocator"]
        found = plans.need_of(PLANS, model, number, setting) - allocator - plans.OUTSIDE
        assert found == pytest.approx(PLANS[command]["in_use"], rel=allowed), model


def test_what_did_not_fit_died():
    """In the committed result each refused run died for want of memory, and trained with what the search proposed."""
    cases = json.loads((RESULTS / "memory_limits.json").read_text())["cases"]
    assert [case["case"] for case in cases] == [case.name for case in memory_limits.CASES] and len(cases) == 10
    for case in cases:
        assert memory_limits.holds(case), case
        assert case["peak with it"] <= case["memory"] < case["peak"]
    assert not memory_limits.holds(cases[0] | {"refused": [{"trained": True}] * 2})
    assert not memory_limits.holds(cases[0] | {"refused": [{"died": "ValueError: not for want of memory"}] * 2})
    assert not memory_limits.holds(cases[0] | {"with it": [{"trained": True}, {"died": "SIGABRT"}]})


@pytest.mark.long
def test_a_case_under_a_limit_of_memory(tmp_path):
    (case,) = run_benchmark("memory_limits", "--cases", memory_limits.CASES[0].name, tmp_path=tmp_path)["cases"]
    assert memory_limits.holds(case), case
