"""Training under planners: the same bits, and transfers where the plan says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_plans import DrawnPlan, plans, train_under
from hypothesis import given, settings
from marks import more
from memory_models import check_against_ledgers
from pages import TEXTS
from paths import ROOT
from pipeline import MODULES
from rank_planners import drawn, train_under_planners

from zinf_compile.cli.main import main
from zinf_compile.cli.trace import trace
from zinf_compile.config import PLANNERS, Config
from zinf_compile.errors import OptionError, PlanError
from zinf_compile.plan import planners
from zinf_compile.plan.plan import Local, Plan
from zinf_compile.plan.problem import StepProblem
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

ALL, DRIVE, HOST = ("nvme", "nvme", "nvme"), ("nvme", "device", "device"), ("host", "host", "host")


@pytest.mark.parametrize("bucket", [300, more(1 << 20)])
@pytest.mark.parametrize("apart", [False, True])
def test_bits_under_every_planner(apart: bool, bucket: int, tmp_path: Path) -> None:
    placements = [ALL, HOST] if apart else [DRIVE]
    done = train_under_planners(0, 1, str(tmp_path), torch.float32, "fx", 2, PLANNERS, placements, bucket, apart)
    assert done == len(PLANNERS) * len(placements)


@pytest.mark.parametrize("apart", [False, True])
def test_bits_under_drawn_plans(apart: bool, tmp_path: Path) -> None:
    seeds = range(6)
    assert train_under_planners(0, 1, str(tmp_path), torch.bfloat16, "fx", 1, seeds, [ALL], 300, apart) == len(seeds)


@pytest.mark.parametrize(("dtype", "examples"), [(torch.float32, 3), more(torch.float32, 30), more(torch.bfloat16, 30)])
def test_bits_under_plans_that_decide_everything(dtype: torch.dtype, examples: int, tmp_path: Path) -> None:
    """A home for each parameter, gradient and state; where updates run; what becomes of saved values; when units move."""

    @settings(max_examples=examples, deadline=None, derandomize=examples < 10, database=None)
    @given(plan=plans())
    def check(plan: DrawnPlan) -> None:
        assert train_under(0, 1, str(tmp_path), dtype, plan)

    check()


def test_names_are_those_of_the_planners() -> None:
    assert tuple(planners.PLANNERS) == PLANNERS


@pytest.mark.parametrize("planner", ["one_behind", 3])
def test_what_is_no_planner(planner: Any) -> None:
    with pytest.raises(OptionError, match=r"option planner=.*accepted: 'just_in_time', 'one_ahead'.*or a function"):
        Config.from_options({"planner": planner})


OPTIONS = {"compute": "fx", "params": "nvme", "nvme": "/tmp", "bucket": 300}


def swaps_of(planner: Any) -> list[str]:
    """Return the text of the mlp's graphs under a planner."""
    return [graph.text for graph in trace(MODULES["mlp"], options={**OPTIONS, "planner": planner})]


def test_the_planner_of_the_page_starts_reads_one_region_early() -> None:
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", TEXTS[ROOT / "docs" / "write-a-planner.md"], re.DOTALL):
        exec(code, found)
    assert swaps_of(found["one_region_early"])[0] == swaps_of("one_ahead")[0] != swaps_of("just_in_time")[0]


def test_a_plan_that_is_late_is_refused_before_anything_runs() -> None:
    def forgetful(problem: StepProblem) -> Plan:
        return Plan(local=Local(homes=planners.just_in_time(problem).local.homes))

    with pytest.raises(PlanError, match=r"plan \S*forgetful is illegal: region 0 uses unit .* which is not on device"):
        swaps_of(forgetful)
    with pytest.raises(PlanError, match=r"planner .* returned a NoneType; accepted: a Plan"):
        swaps_of(lambda problem: None)


def test_what_a_planner_raises_is_named_as_its_own() -> None:
    def wrong(problem: StepProblem) -> Plan:
        return problem.plans["best"]  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(PlanError, match=r"planner '[^']*wrong' raised AttributeError: .* 'plans' \(.*test_planners.py:\d+\)"):
        swaps_of(wrong)


def test_a_plan_made_for_another_model_is_refused_by_what_differs() -> None:
    """From its file: nothing happened to the model, which trains without it. A few differences are named, the others counted."""
    kept: list[str] = []

    def keep(problem: StepProblem) -> Plan:
        plan = planners.just_in_time(problem)
        kept.append(plan.to_json())
        return plan

    trace(MODULES["tied"], options={**OPTIONS, "planner": keep})
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(9)))
    options = {**OPTIONS, "planner": lambda problem: Plan.from_json(kept[0])}
    call = torch.compile(model, backend="zero_infinity", options=options)
    wrong = r"parameter '[^']*' has no home in Homes.params; .*; and \d+ more.* made for another model"
    with pytest.raises(PlanError, match=wrong) as refused:
        call(torch.ones(2, 9))
    assert len(str(refused.value)) < 1000
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    torch.compiler.reset()
    torch.compile(model, backend="zero_infinity", options=OPTIONS)(torch.ones(2, 9)).sum().backward()


def test_dumps_show_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    given = '{"planner": "greedy", "params": "nvme", "nvme": "/tmp", "bucket": "4MiB", "compute": "fx"}'
    assert not main(["dump", "mlp", "--options", given])
    shown = capsys.readouterr().out
    assert shown.count("# plan by greedy") == 2
    assert "param down.weight nvme→device" in shown
    assert [shown.count(f" {kind} 0:0 ") for kind in ("forward", "backward")] == [1, 1], "each region under its graph's name"


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_gathered_and_on_its_way_stays_within_what_was_reserved(apart: bool, tmp_path: Path) -> None:
    away = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": str(tmp_path), "bucket": 300}
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        with pytest.raises(Exception, match="BudgetError: the model needs") as refused:
            check_against_ledgers([16, 40, 24], torch.float32, {**away, "device_memory": 1})
        least = re.search(r"that works is ([\d,]+)", str(refused.value))
        assert least
        smallest = int(least[1].replace(",", ""))
        for chosen in ("greedy", "cached_prefetch", drawn(1)):
            for more_bytes in (0, 4_000):
                options = {**away, "planner": chosen, "device_memory": smallest + more_bytes}
                check_against_ledgers([16, 40, 24], torch.float32, options)
