"""Simulated steps, worked out by hand."""

from __future__ import annotations

import dataclasses

import networkx as nx
import pytest
from plan_cases import links, training

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Fetch, Gather, Homes, Kind, Local, Plan, Reduction, Remake, Shared, Store, Update
from zinf_compile.plan.planners import cached_prefetch
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Beside, Link, Memory, Region, SavedValue, StatePiece, Unit
from zinf_compile.plan.simulate import simulate
from zinf_compile.plan.unroll import COMPUTE, Unrolled
from zinf_compile.plan.verify import verify

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def two_units() -> StepProblem:
    """Return two regions of 3 s, each with its unit of 20 bytes behind a link of 10 bytes/s."""
    return StepProblem(
        regions=(Region(name="a", seconds=3.0, workspace_bytes=5), Region(name="b", seconds=3.0)),
        units=(Unit(name="u", stored_bytes=20, uses=(0,)), Unit(name="v", stored_bytes=20, uses=(1,))),
        memories=(Memory(tier=DEVICE, bytes=45), Memory(tier=NVME)),
        links=links(10.0),
    )


def fetching(*rows: tuple[str, int, int, int]) -> Plan:
    homes = Homes(params={"u": NVME, "v": NVME})
    fetches = tuple(Fetch(Kind.PARAM, name, NVME, DEVICE, start, due, until) for name, start, due, until in rows)
    return Plan(local=Local(homes=homes, fetches=fetches))


def test_just_in_time_pays_for_every_transfer() -> None:
    problem, plan = two_units(), fetching(("u", 0, 0, 1), ("v", 1, 1, 2))
    assert not verify(problem, plan)
    timeline = simulate(problem, plan)
    assert timeline.seconds == pytest.approx(2 + 3 + 2 + 3)
    assert timeline.waited == {"nvme to device": pytest.approx(4.0)}
    assert timeline.peak == {DEVICE: 25, NVME: 40}
    assert timeline.busy(COMPUTE) == pytest.approx(6.0)


def test_a_fetch_ahead_hides_and_takes_memory_from_its_start_on() -> None:
    problem, plan = two_units(), fetching(("v", 0, 1, 2), ("u", -1, 0, 1))
    assert not verify(problem, plan)
    timeline = simulate(problem, plan)
    assert timeline.seconds == pytest.approx(6.0)
    assert timeline.waited == {}
    assert [(span.name, span.start, span.end) for span in timeline.lanes["nvme to device"]] == [
        ("fetch param v", pytest.approx(0.0), pytest.approx(2.0)),
        ("fetch param u", pytest.approx(3.0), pytest.approx(5.0)),
    ]
    assert timeline.peak[DEVICE] == 45
    assert timeline.memory[DEVICE] == ((0.0, 45), (pytest.approx(3.0), 40), (pytest.approx(6.0), 20))


def test_latency_counts_once_for_each_transfer() -> None:
    problem = two_units()
    slow = tuple(dataclasses.replace(link, latency_seconds=0.25) for link in problem.links)
    timeline = simulate(dataclasses.replace(problem, links=slow), fetching(("u", 0, 0, 1), ("v", 1, 1, 2)))
    assert timeline.seconds == pytest.approx(10.5)


def test_reads_and_writes_of_a_drive_slow_each_other_down() -> None:
    """A value of 20 bytes leaves while a unit of 20 comes: alone 2 s each, both at once 4 s."""
    both = (
        Link(
            name="read",
            source=NVME,
            destination=DEVICE,
            bytes_per_second=10.0,
            beside=(Beside(link="write", bytes_per_second=5.0),),
        ),
        Link(
            name="write",
            source=DEVICE,
            destination=NVME,
            bytes_per_second=10.0,
            beside=(Beside(link="read", bytes_per_second=5.0),),
        ),
    )
    problem = StepProblem(
        regions=tuple(Region(name=name, seconds=1.0) for name in "abcd"),
        units=(Unit(name="u", stored_bytes=20, uses=(2,)),),
        saved=(SavedValue(name="x", bytes=20, made_in=0, used_in=(3,)),),
        memories=(Memory(tier=DEVICE), Memory(tier=NVME)),
        links=both,
    )
    plan = Plan(
        local=Local(
            homes=Homes(params={"u": NVME}),
            stores=(Store(Kind.SAVED, "x", DEVICE, NVME, 1, 2),),
            fetches=(Fetch(Kind.PARAM, "u", NVME, DEVICE, 1, 2, 3), Fetch(Kind.SAVED, "x", NVME, DEVICE, 3, 3, 4)),
        )
    )
    assert not verify(problem, plan)
    timeline = simulate(problem, plan)
    spans = {span.name: (span.start, span.end) for lane in ("read", "write") for span in timeline.lanes[lane]}
    assert spans["fetch param u"] == (pytest.approx(1.0), pytest.approx(5.0))
    assert spans["store saved x"] == (pytest.approx(1.0), pytest.approx(5.0))
    assert timeline.seconds == pytest.approx(1 + 4 + 1 + 2 + 1)


def test_values_are_made_again_with_the_regions_that_made_them() -> None:
    problem = StepProblem(
        regions=(Region(name="f", seconds=2.0, workspace_bytes=7), Region(name="g", seconds=1.0), Region(name="b", seconds=4.0)),
        saved=(SavedValue(name="x", bytes=50, made_in=0, used_in=(1, 2), remade_by=(0,)),),
        memories=(Memory(tier=DEVICE),),
    )
    plan = Plan(shared=Shared(remakes=(Remake(("x",), (0,), 2),)))
    assert not verify(problem, plan)
    timeline = simulate(problem, plan)
    assert timeline.seconds == pytest.approx(9.0)
    assert [span.name for span in timeline.lanes[COMPUTE]] == ["f", "g", "f again", "b"]
    assert timeline.peak[DEVICE] == 57


def trained(*, on: Tier, due: int) -> tuple[StepProblem, Plan]:
    """Return one unit of 20 bytes on two ranks, updated in 5 s with 100 bytes of states on the host; links of 100 bytes/s."""
    problem = StepProblem(
        regions=(Region(name="x", seconds=4.0), Region(name="f", seconds=1.0), Region(name="b", seconds=1.0)),
        units=(
            Unit(
                name="u",
                stored_bytes=20,
                uses=(1, 2),
                full_bytes=40,
                wire_bytes=20,
                trained=True,
                gradients=(2,),
                gradient_bytes=40,
                full_gradient_bytes=80,
                reduced_bytes=40,
            ),
        ),
        pieces=(
            StatePiece(
                name="s",
                units=("u",),
                state_bytes=100,
                read_bytes=100,
                written_bytes=100,
                value_bytes=20,
                gradient_bytes=40,
                host_seconds=5.0,
                device_seconds=0.5,
            ),
        ),
        memories=(Memory(tier=DEVICE), Memory(tier=HOST)),
        links=(
            *links(100.0, far=HOST),
            Link(name="gather", source=None, destination=DEVICE, bytes_per_second=20.0, lane="ranks"),
            Link(name="reduce", source=DEVICE, destination=None, bytes_per_second=40.0, lane="ranks"),
        ),
        world_size=2,
    )
    plan = Plan(
        shared=Shared(gathers=(Gather("u", 1, 1, 3),), reductions=(Reduction("u", (2,), 3, 3),)),
        local=Local(
            homes=Homes(params={"u": HOST}, grads={"u": HOST}, states={"s": HOST}),
            fetches=(Fetch(Kind.PARAM, "u", HOST, DEVICE, 1, 1, 2),),
            stores=(Store(Kind.GRAD, "u", DEVICE, HOST, 3, 3),),
            updates=(Update("s", on, 3, due),),
            update_buffers=1,
            updates_done=due,
        ),
    )
    return problem, plan


def test_an_update_behind_the_last_region_is_exposed() -> None:
    problem, plan = trained(on=HOST, due=3)
    assert not verify(problem, plan)
    # regions 6, reduction 1, gradient out 0.4, update 5, shard in 0.2, gather 1
    assert simulate(problem, plan).seconds == pytest.approx(6 + 1 + 0.4 + 5 + 0.2 + 1)


def test_a_deferred_update_runs_beside_the_next_step() -> None:
    problem, plan = trained(on=HOST, due=4)
    assert not verify(problem, plan)
    # region x runs beside 4 s of the update
    assert simulate(problem, plan).seconds == pytest.approx(13.6 - 4)


def test_an_update_on_the_device_brings_states_there_and_back() -> None:
    problem, plan = trained(on=DEVICE, due=3)
    assert not verify(problem, plan)
    # states and gradient in 1.4, update 0.5, states and values out 1.2
    timeline = simulate(problem, plan)
    assert timeline.seconds == pytest.approx(6 + 1 + 0.4 + 1.4 + 0.5 + 1.2 + 0.2 + 1)
    assert timeline.peak[DEVICE] == 280, "a buffer of 160 bytes, and the gradient, whole and as a shard"


def test_tasks_are_a_graph_without_cycles() -> None:
    problem = training(1, 3, world=2, device=0.1, host=0.1)
    graph = Unrolled(problem, cached_prefetch(problem), 2).graph()
    assert nx.is_directed_acyclic_graph(graph)
    assert {data["lane"] for _, data in graph.nodes(data=True)} >= {COMPUTE, "ranks"}
