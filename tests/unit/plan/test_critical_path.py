"""The critical path of planned steps: as long as the step, and made of what really bounds it."""

from __future__ import annotations

import pytest
from plan_cases import read_only, training

from zinf_compile.errors import BudgetError
from zinf_compile.plan.critical_path import critical_path
from zinf_compile.plan.planners import PLANNERS
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import simulate

PROBLEMS = [
    read_only(1, 8, 0.3),
    read_only(2, 6, 0.6),
    training(3, 4, tiers=2, world=1, device=0.5, host=0.5),
    training(4, 4, tiers=3, world=4, device=0.5, host=0.5),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=["read", "read more", "two tiers", "three tiers, ranks"])
@pytest.mark.parametrize("planner", ["just_in_time", "greedy"])
def test_the_path_is_as_long_as_the_step(problem: StepProblem, planner: str) -> None:
    try:
        plan = PLANNERS[planner](problem)
    except BudgetError:
        pytest.fail("the problems fit")
    path, timeline = critical_path(problem, plan), simulate(problem, plan)
    assert path.seconds == pytest.approx(timeline.seconds)
    assert path.by_lane()["compute"] >= problem.compute_seconds * (1 - 1e-9) or len(path.by_lane()) > 1
    assert all(task.seconds > 0 for task in path.tasks)
    assert path.text().startswith("critical path ")


def test_a_slow_link_is_on_the_path() -> None:
    problem = read_only(1, 8, 0.3)
    plan = PLANNERS["just_in_time"](problem)
    path = critical_path(problem, plan)
    (read,) = {link.on_lane for link in problem.links if link.source == problem.tiers[-1]}
    assert path.by_lane()[read] > 0
    assert path.by_lane()["compute"] == pytest.approx(problem.compute_seconds), "just in time, nothing goes on beside compute"
