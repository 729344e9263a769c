"""Passes act a plan out: each transfer starts, and each unit is released, at its boundary."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from irtext import copied, example_of, graph_of, text_of, unit
from pipeline import MODULES
from rank_planners import drawn
from step_problems import facts
from torch import fx
from tracing import traced

from zinf_compile.ir import ops
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import graph_passes, run_passes, verify
from zinf_compile.passes.analysis.planned_graph import PlannedGraph
from zinf_compile.passes.analysis.step_problem import step_problem, unit_members
from zinf_compile.passes.graph.found_units import is_found
from zinf_compile.passes.graph.node_facts import hop_of, mark_region, slot_behind, starts_region
from zinf_compile.passes.schedule.hand_on_units import hand_on_units
from zinf_compile.passes.schedule.keep_gathered import keep_gathered
from zinf_compile.passes.schedule.start_gathers import start_gathers
from zinf_compile.passes.schedule.start_swaps import start_swaps
from zinf_compile.plan.plan import Fetch, Gather, Kind, Local, Plan, Shared

INPUTS = {"x": torch.empty(4, 4), "w": unit(4, 4), "w0": unit(4, 4), "w1": unit(4, 4)}


def rows(*gathers: Gather, fetches: tuple[Fetch, ...] = ()) -> PlannedGraph:
    """Return a plan by hand, in which each parameter is a unit."""
    plan = Plan(shared=Shared(gathers=gathers), local=Local(fetches=fetches))
    return PlannedGraph(plan, {name: name for name in INPUTS})


def marked(lines: list[str], *regions: str) -> fx.GraphModule:
    """Build a graph in which these operators begin regions."""
    gm = graph_of("\n".join([*lines, "return ()"]), **INPUTS)
    for node in gm.graph.nodes:
        if node.name in regions:
            mark_region(node)
    return gm


def test_docstring_of_keep_gathered() -> None:
    before, after = example_of(keep_gathered)
    planned = rows(Gather("w", 0, 0, 2))
    assert text_of(keep_gathered(marked(before, "a", "c"), plan=lambda graph: planned)).splitlines() == after
    apart = rows(Gather("w", 0, 0, 1), Gather("w", 1, 1, 2))
    assert text_of(keep_gathered(marked(before, "a", "c"), plan=lambda graph: apart)).splitlines() == before


@pytest.mark.parametrize("planned", [rows(Gather("w", 0, 0, 2)), rows(Gather("w", 0, 0, 1), Gather("w", 1, 1, 2))])
def test_stays_that_overlap_become_one(planned: PlannedGraph) -> None:
    lines = ["g = all_gather(w)", "a = relu(x)", "h = all_gather(w)", "u = wait(h)", "b = mm(a, u)", "release(u)"]
    gm = marked([*lines, "v = wait(g)", "c = mm(b, v)", "release(v)"], "a", "c")
    kept = ["g = all_gather(w)", "a = relu(x)", "v = wait(g)", "b = mm(a, v)", "c = mm(b, v)", "release(v)"]
    assert text_of(keep_gathered(gm, plan=lambda graph: planned)).splitlines()[: len(kept)] == kept


def test_docstring_of_hand_on_units() -> None:
    before, after = example_of(hand_on_units)
    planned = rows(Gather("w", 0, 0, 2))
    leaves = dataclasses.replace(planned, leaves=frozenset({"w"}))
    assert text_of(hand_on_units(marked(before, "a", "b"), plan=lambda graph: leaves)).splitlines() == after
    assert text_of(hand_on_units(marked(before, "a", "b"), plan=lambda graph: planned)).splitlines() == before
    finds = dataclasses.replace(planned, finds=frozenset({"w"}))
    found = hand_on_units(marked(before, "a", "b"), plan=lambda graph: finds)
    assert text_of(found).splitlines() == before
    assert [is_found(node) for node in found.graph.nodes if node.target is ops.all_gather] == [True]


def test_a_unit_that_is_used_twice_is_found_first_and_left_last() -> None:
    lines = ["g = all_gather(w)", "v = wait(g)", "a = mm(x, v)", "release(v)", "h = all_gather(w)", "u = wait(h)"]
    lines += ["b = mm(a, u)", "release(u)", "c = relu(b)"]
    both = dataclasses.replace(rows(), leaves=frozenset({"w"}), finds=frozenset({"w"}))
    gm = hand_on_units(marked(lines, "a", "b", "c"), plan=lambda graph: both)
    assert [is_found(node) for node in gm.graph.nodes if node.target is ops.all_gather] == [True, False]
    assert text_of(gm).splitlines()[: len(lines)] == [*lines[:7], "c = relu(b)", "release(u)"]


def test_docstring_of_start_gathers() -> None:
    before, after = example_of(start_gathers)
    planned = rows(Gather("w0", 0, 0, 1), Gather("w1", 0, 1, 2))
    assert text_of(start_gathers(marked(before, "a", "b"), plan=lambda graph: planned)).splitlines() == after
    late = rows(Gather("w0", 0, 0, 1), Gather("w1", 1, 1, 2))
    assert text_of(start_gathers(marked(before, "a", "b"), plan=lambda graph: late)).splitlines() == before


def test_docstring_of_start_swaps() -> None:
    before, after = example_of(start_swaps)
    fetches = tuple(Fetch(Kind.PARAM, f"w{n}", Tier.HOST, Tier.DEVICE, 0, n, n + 1) for n in range(2))
    planned = rows(Gather("w0", 0, 0, 1), Gather("w1", 1, 1, 2), fetches=fetches)
    assert text_of(start_swaps(marked(before, "a", "b"), plan=lambda graph: planned)).splitlines() == after


def test_the_members_of_a_group_start_when_the_last_of_them_does() -> None:
    lines = ["a = relu(x)", "g = all_gather(w0, 0)", "h = all_gather(w1, 0)", "v = wait(g)", "u = wait(h)", "b = mm(v, u)"]
    gm = marked([*lines, "release(v)", "release(u)"], "a", "b")
    planned = rows(Gather("w0", 0, 1, 2), Gather("w1", 1, 1, 2))
    assert text_of(start_gathers(gm, plan=lambda graph: planned)).splitlines()[: len(lines)] == lines


def test_swaps_of_a_group_that_start_apart_are_groups_of_their_own() -> None:
    swaps = [f's{n} = swap_in(w{n}, "host", "device", 0)' for n in range(2)] + ['s = swap_in(w, "host", "device", 0)']
    rest = ["g = all_gather(s0, 0)", "h = all_gather(s1, 0)", "k = all_gather(s, 0)", "v = wait(g)", "u = wait(h)", "z = wait(k)"]
    lines = ["a = relu(x)", *swaps, *rest, "b = mm(v, u)", "c = mm(b, z)", "release(v)", "release(u)", "release(z)"]
    starts = {"w0": 0, "w1": 1, "w": 0}
    fetches = tuple(Fetch(Kind.PARAM, name, Tier.HOST, Tier.DEVICE, start, 1, 2) for name, start in starts.items())
    gm = start_swaps(marked(lines, "a", "b"), plan=lambda graph: rows(fetches=fetches))
    other = swaps[1].replace("0)", "1)")
    assert text_of(gm).splitlines()[:5] == [swaps[0], swaps[2], "a = relu(x)", other, rest[0]]
    verify(gm, complete=False)


Boundaries = set[tuple[str, str, int]]


def boundaries(graph: fx.Graph) -> Boundaries:
    """Return what starts and ends at which boundary: (operator or hop, unit, boundary)."""
    found, passed = set(), 0
    for node in graph.nodes:
        passed += starts_region(node)
        if node.target is ops.swap_in:
            found.add((" ".join(hop_of(node)), slot_behind(node).name, passed))
        elif node.target in (ops.all_gather, ops.release):
            found.add((str(node.target).split(".")[1], slot_behind(node).name, passed))
    return found


def expected(planned: PlannedGraph, *, world_size: int) -> Boundaries:
    found: Boundaries = set()
    for parameter, name in planned.units.items():
        for row in planned.plan.shared.gathers:
            if row.unit == name:
                found |= {("all_gather", parameter, row.start), ("release", parameter, row.until)}
        for fetch in planned.plan.local.fetches:
            if fetch.name == name:
                found.add((f"{fetch.source} {fetch.to}", parameter, fetch.start))
                if world_size == 1 and fetch.to == Tier.DEVICE:
                    found |= {("all_gather", parameter, fetch.due), ("release", parameter, fetch.until)}
    return found


class Drawing:
    """A planner of graphs that draws plans, and keeps the last one."""

    def __init__(self, seed: int, *, world_size: int, host: bool) -> None:
        self.facts = facts(world_size=world_size, host=host, only_params=True)
        self.draw = drawn(seed)
        self.made: list[PlannedGraph] = []

    def __call__(self, graph: fx.Graph) -> PlannedGraph:
        units = {slot.name: name for name, slots in unit_members([graph]).items() for slot in slots}
        self.made.append(PlannedGraph(self.draw(step_problem([(graph, None)], self.facts)), units))
        return self.made[-1]


@pytest.mark.parametrize("name", ["mlp", "tied", "lora", "used_twice", "attention"])
def test_graphs_do_what_drawn_plans_say(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    found = traced(module, *inputs)
    for seed in range(12):
        world_size, host = seed % 2 + 1, seed % 3 == 0
        path = ("nvme", "host", "device") if host else ("nvme", "device")
        for kind in ("forward", "backward", "inference"):
            plan = Drawing(seed, world_size=world_size, host=host)
            gm = run_passes(copied(found[kind]), graph_passes(bucket_bytes=1, params=path, plan=plan), verify_each=True)
            verify(gm)
            assert len(plan.made) == 1
            assert boundaries(gm.graph) == expected(plan.made[0], world_size=world_size)
