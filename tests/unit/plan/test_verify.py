"""`verify` accepts legal plans, and says of each mutation of one what is wrong with it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from plan_cases import training

from zinf_compile.errors import PlanError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Homes, Plan, Store
from zinf_compile.plan.planners import PLANNERS, just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.verify import check, verify

PROBLEM = training(3, 3, world=2, tiers=3, micro_batches=2, device=0.0, host=0.0)
PLAN = just_in_time(PROBLEM)


def shared(**fields: Any) -> Plan:
    return dataclasses.replace(PLAN, shared=dataclasses.replace(PLAN.shared, **fields))


def local(**fields: Any) -> Plan:
    return dataclasses.replace(PLAN, local=dataclasses.replace(PLAN.local, **fields))


def homes(**fields: Mapping[str, Tier]) -> Plan:
    return local(homes=dataclasses.replace(PLAN.local.homes, **fields))


def first(rows: tuple[Any, ...], **fields: Any) -> tuple[Any, ...]:
    """Return the rows with other fields in the first one."""
    return (dataclasses.replace(rows[0], **fields), *rows[1:])


def shifted(rows: tuple[Any, ...], number: int, **by: int) -> tuple[Any, ...]:
    row = rows[number]
    moved = dataclasses.replace(row, **{name: getattr(row, name) + each for name, each in by.items()})
    return tuple(moved if other is row else other for other in rows)


GATHERS, FETCHES, STORES, UPDATES = PLAN.shared.gathers, PLAN.local.fetches, PLAN.local.stores, PLAN.local.updates
STEP = PROBLEM.count


def budget_short_by_one() -> StepProblem:
    need = {tier: total for tier, total in _peaks().items() if tier.in_memory}
    return PROBLEM.with_budgets(**{str(Tier.DEVICE): need[Tier.DEVICE] - 1})


def _peaks() -> dict[Tier, int]:
    from zinf_compile.plan.occupancy import occupied  # noqa: PLC0415

    return {tier: int(total.max()) for tier, total in occupied(PROBLEM, PLAN).items()}


MUTATIONS: dict[str, tuple[Callable[[], Plan], str]] = {
    "a gather a region too late": (
        lambda: shared(gathers=shifted(GATHERS, 1, start=1, due=1, until=1)),
        r"region 1 uses unit 'w1', which is not on device then; the next one is due at 2, too late",
    ),
    "a unit released a region too early": (
        lambda: shared(gathers=first(GATHERS, until=GATHERS[0].due)),
        r"region 0 uses unit 'w0', which is not on device",
    ),
    "a gather forgotten": (lambda: shared(gathers=GATHERS[1:]), r"region 0 uses unit 'w0', which is not on device"),
    "a gather without its shard": (
        lambda: local(fetches=tuple(row for row in FETCHES if (row.name, row.to) != ("w0", Tier.DEVICE))),
        r"Gather\(unit='w0'.*the shard lives on nvme, and no copy is on device",
    ),
    "a hop without its source": (
        lambda: local(fetches=tuple(row for row in FETCHES if (row.name, row.to) != ("w1", Tier.HOST))),
        r"Fetch\(.*'w1'.*the shard lives on nvme, and no copy is on host",
    ),
    "a source freed too early": (
        lambda: local(fetches=shifted(FETCHES, 0, until=-1)),
        r"no copy is on host until it is fetched",
    ),
    "a unit brought twice": (
        lambda: shared(gathers=(*GATHERS, GATHERS[0])),
        r"unit 'w0' is brought to device twice at once",
    ),
    "a parameter without a home": (
        lambda: homes(params={name: tier for name, tier in PLAN.local.homes.params.items() if name != "w1"}),
        r"parameter 'w1' has no home",
    ),
    "a second home": (
        lambda: shared(resident=("w1",)),
        r"unit 'w1' stays gathered, but is trained",
    ),
    "a copy that outlives an update": (
        lambda: shared(gathers=first(GATHERS, start=-1)),
        r"the copy lasts over an update of the unit, and would be the old one",
    ),
    "a gradient not reduced": (
        lambda: shared(reductions=PLAN.shared.reductions[1:]),
        r"the gradient of 'w2' from region 3 is not reduced",
    ),
    "a gradient reduced before it is made": (
        lambda: shared(reductions=first(PLAN.shared.reductions, start=3, due=3)),
        r"region 3 has not run yet",
    ),
    "a gradient that does not get home": (
        lambda: local(stores=tuple(row for row in STORES if row.to != Tier.NVME)),
        r"the gradient of 'w0' leaves host 0 times, and is made 2 times",
    ),
    "a piece not updated": (lambda: local(updates=UPDATES[1:]), r"piece 's0' is not updated"),
    "a piece updated twice": (lambda: local(updates=(*UPDATES, UPDATES[-1])), r"piece 's2' is updated 2 times"),
    "an update before the step": (
        lambda: local(updates=first(UPDATES, start=STEP - 1)),
        r"the step is not called before boundary 12",
    ),
    "an update after its use": (
        lambda: local(updates=first(UPDATES, due=STEP + 1), updates_done=STEP + 1),
        r"unit 'w0' is used at boundary 0 of the next step, before the update",
    ),
    "buffers freed while updates run": (
        lambda: local(updates_done=STEP - 1),
        r"buffers of updates are free at boundary 11, and updates due at 12",
    ),
    "no buffers": (lambda: local(update_buffers=0), r"updates move pieces, and there is no buffer for one"),
    "a saved value that is not fetched back": (
        lambda: local(stores=(*STORES, Store(STORES[0].kind.SAVED, "a0.0", Tier.DEVICE, Tier.HOST, 2, 3))),
        r"region 4 uses saved value 'a0.0', which is not on device then",
    ),
    "a hop over a tier": (lambda: local(fetches=first(FETCHES, to=Tier.DEVICE)), r"it is no hop to a nearer neighbour"),
    "an unknown unit": (lambda: shared(gathers=first(GATHERS, unit="w9")), r"no unit 'w9'"),
}


def test_the_plan_is_legal() -> None:
    assert verify(PROBLEM, PLAN) == []
    check(PROBLEM, PLAN)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught_with_the_right_words(name: str) -> None:
    mutate, words = MUTATIONS[name]
    wrong = verify(PROBLEM, mutate())
    assert any(re.search(words, sentence) for sentence in wrong), wrong
    with pytest.raises(PlanError, match="illegal"):
        check(PROBLEM, mutate())


def test_gradients_that_are_reduced_at_the_step() -> None:
    units = [dataclasses.replace(unit, reduced_at_step=bool(unit.gradients)) for unit in PROBLEM.units]
    allowed = dataclasses.replace(PROBLEM.allowed, grads=(Tier.DEVICE,))
    problem = dataclasses.replace(PROBLEM, units=tuple(units), allowed=allowed).with_budgets(device=1 << 20)
    for name, planner in PLANNERS.items():
        plan = planner(problem)
        assert verify(problem, plan) == [], name
        found = {row.unit: (row.regions, row.start) for row in plan.shared.reductions}
        assert found == {unit.name: (unit.gradients, STEP) for unit in units}
    early = (dataclasses.replace(plan.shared.reductions[0], start=STEP - 1), *plan.shared.reductions[1:])
    wrong = verify(problem, dataclasses.replace(plan, shared=dataclasses.replace(plan.shared, reductions=early)))
    assert any("the gradient is added up until the step" in sentence for sentence in wrong), wrong
    with pytest.raises(PlanError, match="until then its gradient can't leave the device, and may"):
        dataclasses.replace(PROBLEM, units=tuple(units))
    alone = [dataclasses.replace(unit, full_gradient_bytes=0) for unit in units]
    with pytest.raises(PlanError, match="but has no full gradient: one rank reduces nothing"):
        dataclasses.replace(problem, units=tuple(alone))


def test_a_byte_over_at_one_moment_is_caught() -> None:
    short = budget_short_by_one()
    (sentence,) = verify(short, PLAN)
    assert re.fullmatch(r"(at the step|in region \d+) [\d,]+ bytes are held on device, which has room for [\d,]+", sentence)


def test_tiers_that_the_user_forbids_are_caught() -> None:
    allowed = dataclasses.replace(PROBLEM.allowed, params=(Tier.HOST,))
    wrong = verify(dataclasses.replace(PROBLEM, allowed=allowed), PLAN)
    assert "parameter 'w0' lives on nvme; the user allows host" in wrong


def test_units_of_one_piece_have_one_home() -> None:
    piece = dataclasses.replace(PROBLEM.pieces[0], units=("w0", "w1"))
    joined = dataclasses.replace(PROBLEM, pieces=(piece, *PROBLEM.pieces[2:]))
    moved: Homes = dataclasses.replace(
        PLAN.local.homes,
        params={**PLAN.local.homes.params, "w1": Tier.HOST},
        states={name: tier for name, tier in PLAN.local.homes.states.items() if name != "s1"},
    )
    wrong = verify(joined, local(homes=moved, updates=UPDATES[:1] + UPDATES[2:]))
    assert "the units of piece 's0' have several homes: w0, w1" in wrong
