"""Plans as text."""

from __future__ import annotations

import re

from plan_cases import training

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Fetch, Gather, Homes, Kind, Local, Plan, Shared
from zinf_compile.plan.planners import cached_prefetch, just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link, Memory, Region, Unit
from zinf_compile.plan.simulate import simulate
from zinf_compile.plan.table import homes_table, schedule_table, summary_line


def squeezed(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


def test_homes_are_shares_of_bytes() -> None:
    problem = training(1, 2, even=True)
    assert squeezed(homes_table(problem, just_in_time(problem))) == [
        "bytes device host nvme keep recompute",
        "------------ ------- -------- ------ ------ ------ -----------",
        "parameters 400 100%",
        "gradients 800 100%",
        "states 2,400 100%",
        "saved values 320 100%",
    ]


def test_a_schedule_is_a_line_for_each_boundary() -> None:
    problem = StepProblem(
        regions=(Region(name="f", seconds=1.0), Region(name="b", seconds=1.0)),
        units=(Unit(name="w", stored_bytes=2, full_bytes=4, wire_bytes=2, uses=(0, 1)),),
        memories=(Memory(tier=Tier.DEVICE), Memory(tier=Tier.HOST)),
        links=tuple(
            Link(name=name, source=source, destination=to, bytes_per_second=1.0)
            for name, source, to in (
                ("in", Tier.HOST, Tier.DEVICE),
                ("out", Tier.DEVICE, Tier.HOST),
                ("gather", None, Tier.DEVICE),
                ("reduce", Tier.DEVICE, None),
            )
        ),
        world_size=2,
    )
    plan = Plan(
        shared=Shared(gathers=(Gather("w", 0, 0, 2),)),
        local=Local(homes=Homes(params={"w": Tier.HOST}), fetches=(Fetch(Kind.PARAM, "w", Tier.HOST, Tier.DEVICE, -1, 0, 1),)),
    )
    assert squeezed(schedule_table(problem, plan))[2:] == [
        "0 gather w, param w host→device gather w f",
        "1 param w host→device w on device b",
        "2 w (step)",
    ]


def test_the_first_line_has_the_bound_and_the_memory() -> None:
    problem = training(1, 2, even=True)
    timeline = simulate(problem, cached_prefetch(problem))
    line = summary_line(problem, timeline, bound=1.5, by="nvme to host")
    assert re.fullmatch(
        r"step [\d.]+ s \(bound 1\.50 s, by nvme to host\), device [\d,]+ of [\d,]+ bytes, host [\d,]+ of [\d,]+ bytes",
        line.replace(" bytes of", " of"),
    )
