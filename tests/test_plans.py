"""Tests of the figures in presets and on pages: they are those of `make plans`, and `plan` says the same today."""

import json
import re

import plans
import pytest
import yaml
from helpers import ROOT

from accelerate_recipes.plan.layers import predict
from accelerate_recipes.plan.simulate import Simulator

PLANS = json.loads(plans.RESULT.read_text())["plans"]
CHEAP = "c4/llama3_2_1b.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == CHEAP else pytest.mark.long) for name in plans.presets()],
)
def test_plan_says_the_same(name, tmp_path):
    """The figures of a preset are those that `plan` finds for the command in its first line."""
    job = plans.job_for(plans.of_preset(name), tmp_path)
    with Simulator() as simulator:
        (outcome,) = predict(simulator, [job])
    assert not plans.differs(plans.facts_of(job, outcome), PLANS[plans.of_preset(name)])


def test_what_has_changed():
    """`--check` finds a changed byte, a figure that is gone, and a time that differs by more than a hundredth."""
    facts = PLANS[plans.of_preset(CHEAP)]
    assert not plans.differs(facts | {"seconds": facts["seconds"] * 1.005}, facts)
    for changed in ({"seconds": facts["seconds"] * 1.02}, {"in_use": facts["in_use"] + 1}, {"by_kind": {}}, {"more": 1}):
        assert plans.differs(facts | changed, facts)
    assert plans.differs(facts, None)
