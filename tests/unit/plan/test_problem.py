"""Problems and plans as JSON, and the words for what makes no sense in them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from plan_cases import training, training_problems

from zinf_compile.errors import PlanError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Fetch, Homes, Kind, Local, Plan
from zinf_compile.plan.planners import just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Beside, Link, Memory, Region, Unit

PROBLEM = training(1, 3, world=2)


@settings(max_examples=20, deadline=None)
@given(problem=training_problems())
def test_problems_and_plans_survive_json(problem: StepProblem) -> None:
    plan = just_in_time(problem)
    assert StepProblem.from_json(problem.to_json()) == problem
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()


def test_a_plan_by_hand_is_short() -> None:
    text = """{
      "format": "zinf-compile plan", "version": 1,
      "local": {
        "homes": {"params": {"w": "host"}},
        "fetches": [{"kind": "param", "name": "w", "source": "host", "to": "device", "start": -1, "due": 0, "until": 1}]
      }
    }"""
    fetch = Fetch(Kind.PARAM, "w", Tier.HOST, Tier.DEVICE, -1, 0, 1)
    assert Plan.from_json(text) == Plan(local=Local(homes=Homes(params={"w": Tier.HOST}), fetches=(fetch,)))


def test_plans_are_compared_by_line() -> None:
    one = just_in_time(PROBLEM)
    homes = dataclasses.replace(one.local.homes, states={**one.local.homes.states, "s0": Tier.HOST})
    other = dataclasses.replace(one, local=dataclasses.replace(one.local, homes=homes, update_buffers=2))
    assert one.diff(one) == []
    assert one.diff(other) == [
        "- states s0 lives on nvme",
        "- 3 update buffers",
        "+ states s0 lives on host",
        "+ 2 update buffers",
    ]
    assert one.digest() == other.digest(), "ranks may differ in what is local"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(version=7), r"has version 7; this release reads 1"),
        (lambda body: body.update(format="x"), r"begins with format 'x'"),
        (lambda body: body.update(speed=1), r"step problem has no field 'speed'; accepted: regions, "),
        (lambda body: body.pop("regions"), r"step problem lacks 'regions'"),
        (lambda body: body["regions"][1].update(seconds="fast"), r"step problem\.regions\[1\]\.seconds: 'fast' is no float"),
        (lambda body: body["memories"][0].update(tier="tape"), r"memories\[0\]\.tier: 'tape' is no tier; accepted: 'device'"),
        (lambda body: body["units"][0].update(uses=3), r"units\[0\]\.uses: 3 is no list"),
        (lambda body: body["units"][0].update(trained=1), r"units\[0\]\.trained: 1 is no bool"),
        (lambda body: body["links"][0].update(bytes_per_second=float("nan")), r"bytes_per_second: nan is not finite"),
    ],
)
def test_wrong_json_is_named_by_its_field(change: Any, words: str) -> None:
    body = json.loads(PROBLEM.to_json())
    change(body)
    with pytest.raises(PlanError, match=words):
        StepProblem.from_json(json.dumps(body))


def test_text_that_is_no_json_says_so() -> None:
    with pytest.raises(PlanError, match="the plan is no JSON"):
        Plan.from_json("{")
    with pytest.raises(PlanError, match=r"gathers\[0\].*lacks 'due', 'start', 'until'"):
        Plan.from_json('{"format": "zinf-compile plan", "version": 1, "shared": {"gathers": [{"unit": "w"}]}}')


def replaced(table: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    rows = getattr(PROBLEM, table)
    return {table: (*rows[:number], dataclasses.replace(rows[number], **fields), *rows[number + 1 :])}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (replaced("units", name="w1"), "two units are named 'w1'"),
        (replaced("units", name=""), "a unit without a name"),
        (replaced("units", uses=(0, 99)), "uses of unit 'w0': region 99 of 6"),
        (replaced("units", uses=(5, 0)), r"regions \[5, 0\]; accepted: each once, in order"),
        (replaced("units", uses=(), gradients=()), "unit 'w0' is used in no region"),
        (replaced("units", full_bytes=0), "unit 'w0' has no full bytes, on 2 ranks"),
        (replaced("units", trained=False), "unit 'w0' has gradients, but isn't trained"),
        (replaced("units", stored_bytes=-1), "unit 'w0' has stored_bytes -1; accepted: 0 or more"),
        (replaced("regions", seconds=-1.0), "region 0 has seconds -1.0"),
        (replaced("saved", used_in=(0,)), "saved value 'a0.0' is used in region 0, and made in 0"),
        (replaced("saved", remade_by=(1,)), "is made in region 0, which is none of those that make it again"),
        (replaced("saved", 1, remade_from=("b",)), "is made again from 'b', which is no saved value"),
        (replaced("saved", choices=("burn",)), "has choice 'burn'; accepted: host, keep, nvme, recompute"),
        (replaced("saved", choices=("recompute",), remade_by=()), "has to be recomputed, but no region makes it again"),
        (replaced("pieces", units=("w9",)), "piece 's0' updates 'w9', which is no unit"),
        (replaced("pieces", units=()), "piece 's0' updates no unit"),
        (replaced("pieces", read_bytes=10**6), "piece 's0' reads 1,000,000 and writes"),
        (replaced("pieces", granularity="row"), "has granularity 'row'; accepted: range, matrix"),
        (replaced("pieces", owner=2), "piece 's0' is owned by rank 2 of 2"),
        (replaced("pieces", value_bytes=10**6), "the pieces of unit 'w0' write 1,000,000 bytes of values"),
        (replaced("links", bytes_per_second=0.0), "moves 0.0 bytes/s; accepted: more than 0"),
        (replaced("links", beside=(Beside(link="x", bytes_per_second=1.0),)), "has a rate beside 'x', which is no link"),
        (replaced("links", beside=(Beside(link="gather", bytes_per_second=1e9),)), "is faster beside 'gather' than alone"),
        (replaced("memories", bytes=-1), "the budget of device is -1 bytes"),
        (replaced("memories", tier=Tier.NVME), "tiers nvme, host, nvme; the device comes first"),
        ({"links": PROBLEM.links[:-1]}, "no link for reductions between 2 ranks"),
        ({"links": PROBLEM.links[1:]}, "no link leads from host to device"),
        ({"world_size": 0}, "0 ranks; accepted: 1 or more"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(PROBLEM, **fields)


def test_two_links_between_the_same_tiers_are_one() -> None:
    link = Link(name="a", source=Tier.HOST, destination=Tier.DEVICE, bytes_per_second=1.0)
    both = (link, dataclasses.replace(link, name="b"))
    memories = (Memory(tier=Tier.DEVICE), Memory(tier=Tier.HOST))
    with pytest.raises(PlanError, match="second one from host to device; join both with the sum of their rates"):
        StepProblem(regions=(), memories=memories, links=both)


def test_ranks_share_memories_and_links() -> None:
    memory = Memory(tier=Tier.HOST, bytes=1000, sharers=4, reserved_bytes=50)
    link = Link(name="a", source=Tier.NVME, destination=Tier.HOST, bytes_per_second=100.0, latency_seconds=0.5, sharers=4)
    assert memory.room == 200
    assert link.seconds(10) == pytest.approx(0.5 + 0.4)
    assert link.seconds(0) == 0


def test_budgets_are_changed_by_the_words_of_tiers() -> None:
    assert PROBLEM.with_budgets(device=7).room(Tier.DEVICE) == 7
    with pytest.raises(PlanError, match="budgets for tape; the problem has device, host, nvme"):
        PROBLEM.with_budgets(tape=7)


def test_a_drive_beside_the_device_has_no_host() -> None:
    problem = training(1, 2, tiers=1)
    assert problem.tiers == (Tier.DEVICE, Tier.NVME)
    assert problem.host == Tier.DEVICE
    assert [link.name for link in problem.hops(Tier.NVME, Tier.DEVICE)] == ["nvme to device"]
    assert [link.name for link in PROBLEM.hops(Tier.DEVICE, Tier.NVME)] == ["device to host", "host to nvme"]


def test_an_empty_step_is_a_problem() -> None:
    problem = StepProblem(regions=(Region(name="r", seconds=1.0),), memories=(Memory(tier=Tier.DEVICE),))
    assert problem.compute_seconds == 1.0
    unit = Unit(name="u", stored_bytes=1, uses=(0,))
    assert dataclasses.replace(problem, units=(unit,)).unit == {"u": unit}


def test_json_is_one_row_a_line() -> None:
    lines = PROBLEM.to_json().splitlines()
    assert sum(bool(re.match(r' *{"name": "w\d"', line)) for line in lines) == 3
    assert max(map(len, lines)) < 400
