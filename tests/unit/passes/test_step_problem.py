"""Problems of steps from graphs whose gathers are just in time."""

from __future__ import annotations

import pytest
import torch
from irtext import copied, graph_of, unit
from pipeline import MODULES
from step_problems import facts
from torch import fx
from tracing import traced

from zinf_compile.ir import ops
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes import region_passes, run_passes
from zinf_compile.passes.analysis.step_problem import step_problem, unit_members
from zinf_compile.passes.analysis.step_regions import find_regions, least_of_regions
from zinf_compile.passes.schedule.align_regions import align_regions
from zinf_compile.plan.planners import PLANNERS
from zinf_compile.plan.problem_parts import SavedValue, Unit
from zinf_compile.plan.verify import verify

FORWARD = """
g = all_gather(w); v = wait(g); a = mm(x, v); b = relu(a); release(v)
k = all_gather(u); z = wait(k); c = mm(b, z); release(z)
return (c, b)
"""
BACKWARD = """
k = all_gather(u); z = wait(k); t = t(z); d = mm(tangent, t); release(z)
s = t(b); e = mm(s, tangent); q = reduce_scatter(e, u)
return (d, q)
"""
NAMES = ["mlp", "tied", "lora", "used_twice", "autocast", "odd_shapes", "one_gradient_for_two", "returned"]


def graphs() -> tuple[fx.Graph, fx.Graph]:
    """Return a forward of two regions and its backward of one, on parameters w [4, 8] and u [8, 2]."""
    forward = graph_of(FORWARD, x=torch.empty(4, 4), w=unit(4, 8), u=unit(8, 2))
    backward = graph_of(BACKWARD, tangent=torch.empty(4, 2), b=torch.empty(4, 8), w=unit(4, 8), u=unit(8, 2))
    return tuple(align_regions(gm, region_bytes=64).graph for gm in (forward, backward))  # type: ignore[return-value]


def test_a_pair_of_graphs_as_a_problem() -> None:
    problem = step_problem([graphs()], facts(world_size=2), name="two")
    assert [region.name for region in problem.regions] == ["forward 0:0", "forward 0:1", "backward 0:0"]
    w, u = problem.units
    assert w == Unit(name="w", stored_bytes=64, uses=(0,), full_bytes=128, wire_bytes=64, trained=True, structure=w.structure)
    assert u == Unit(
        name="u",
        stored_bytes=32,
        uses=(1, 2),
        full_bytes=64,
        wire_bytes=32,
        trained=True,
        gradients=(2,),
        gradient_bytes=32,
        full_gradient_bytes=64,
        reduced_bytes=32,
        structure=u.structure,
    )
    assert problem.saved == (SavedValue(name="b of forward 0", bytes=128, made_in=0, used_in=(1, 2), choices=("keep",)),)
    # a [4, 8] is a temporary beside the saved b; c [4, 2] is returned; d [4, 8] is returned, and e is u's full gradient
    assert [region.workspace_bytes for region in problem.regions] == [128, 32, 128]
    (piece,) = problem.pieces
    assert (piece.units, piece.state_bytes, piece.value_bytes, piece.gradient_bytes) == (("u",), 64, 32, 32)


def test_seconds_are_the_longer_of_operations_and_bytes() -> None:
    problem = step_problem([graphs()], facts())
    moved = 4 * 4 + 4 * 8 + 4 * 8  # x, w; b
    assert problem.regions[0].seconds == pytest.approx(max(2 * 4 * 4 * 8 / 1e12, moved * 4 / 1e11))
    given = step_problem([graphs()], facts(seconds=lambda nodes: float(len(nodes))))
    assert [region.seconds for region in given.regions] == [2.0, 1.0, 4.0]


def test_micro_batches_repeat_regions_and_gradients_but_not_units() -> None:
    problem = step_problem([graphs()], facts(), micro_batches=2)
    assert [region.micro_batch for region in problem.regions] == [0, 0, 0, 1, 1, 1]
    assert [(u.name, u.uses, u.gradients) for u in problem.units] == [("w", (0, 3), ()), ("u", (1, 2, 4, 5), (2, 5))]
    assert [(v.made_in, v.used_in) for v in problem.saved] == [(0, (1, 2)), (3, (4, 5))]


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_stays_is_gathered_once_in_a_step(planner: str) -> None:
    problem = step_problem([graphs()], facts(world_size=2, stays=lambda slot: slot.name == "u"), micro_batches=2)
    assert [(u.name, u.uses, u.gradients) for u in problem.units] == [("w", (0, 3), ()), ("u", (1, 2, 3, 4, 5), (2, 5))]
    gathers = PLANNERS[planner](problem.with_budgets(device=1 << 20)).shared.gathers
    assert [(row.due, row.until) for row in gathers if row.unit == "u"] == [(1, problem.count)]


def test_what_stays_and_is_never_changed_is_gathered_once_in_all() -> None:
    forward = graph_of(FORWARD, x=torch.empty(4, 4), w=unit(4, 8), u=unit(8, 2).requires_grad_(False))
    graph = align_regions(forward, region_bytes=64).graph
    problem = step_problem([(graph, None)], facts(world_size=2, stays=lambda slot: True), micro_batches=2)
    assert [(u.name, u.uses) for u in problem.units] == [("w", (0, 1, 2, 3)), ("u", (0, 1, 2, 3))]
    plan = PLANNERS["cached_prefetch"](problem.with_budgets(device=1 << 20))
    assert plan.shared.resident == ("u",)


def test_gradients_that_are_reduced_at_the_step() -> None:
    forward, backward = graphs()
    (reduction,) = [node for node in backward.nodes if node.target is ops.reduce_scatter]
    reduction.kwargs = {"at_step": True}
    problem = step_problem([(forward, backward)], facts(world_size=2), micro_batches=2)
    assert [unit.reduced_at_step for unit in problem.units] == [False, True]
    assert problem.allowed.grads == ("device",)
    plan = PLANNERS["just_in_time"](problem)
    assert [(row.regions, row.start) for row in plan.shared.reductions] == [((2, 5), problem.count)]


def test_forwards_run_in_order_and_backwards_in_reverse() -> None:
    problem = step_problem([graphs(), graphs()], facts())
    assert [region.graph for region in problem.regions] == [*["forward 0"] * 2, *["forward 1"] * 2, "backward 1", "backward 0"]
    assert problem.unit["u"].uses == (1, 3, 4, 5)


def test_parameters_that_are_apart_are_different_units() -> None:
    """A matrix and two vectors that are gathered and used together."""

    def is_vector(slot: ParameterSlot) -> bool:
        return len(slot.shape) == 1

    text = """
    g = all_gather(w); h = all_gather(b); k = all_gather(s)
    v = wait(g); c = wait(h); z = wait(k); a = addmm(c, x, v); m = mul(a, z); release(v); release(c); release(z)
    return (m,)
    """
    parameters = {"w": unit(256, 256), "b": unit(256), "s": unit(256)}
    graph = align_regions(graph_of(text, x=torch.empty(4, 256), **parameters), region_bytes=64).graph
    assert [*unit_members([graph])] == ["w .. s"]
    found = unit_members([graph], apart=is_vector)
    assert {name: [slot.name for slot in slots] for name, slots in found.items()} == {"w": ["w"], "b .. s": ["b", "s"]}
    problem = step_problem([(graph, None)], facts(apart=is_vector))
    assert [(own.name, own.stored_bytes) for own in problem.units] == [("w", 4 * 256 * 256), ("b .. s", 2 * 4 * 256)]
    assert [own.name for own in step_problem([(graph, None)], facts()).units] == ["w .. s"]


def test_parameters_alone() -> None:
    problem = step_problem([graphs()], facts(only_params=True))
    assert not problem.saved
    assert not problem.pieces
    assert not any(unit.gradients for unit in problem.units)
    assert not any(region.workspace_bytes for region in problem.regions)


@pytest.mark.parametrize(
    "name", ["mlp", "tied", "lora", "used_twice", "autocast", "odd_shapes", "one_gradient_for_two", "returned"]
)
def test_every_planner_solves_the_problems_of_modules(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    found = traced(module, *inputs)
    for bucket, world in ((1, 1), (300, 2), (1 << 20, 1), (1 << 20, 2)):
        forward, backward, inference = (
            run_passes(copied(found[kind]), region_passes(bucket_bytes=bucket)).graph
            for kind in ("forward", "backward", "inference")
        )
        for pairs in ([(forward, backward)], [(inference, None)]):
            problem = step_problem(pairs, facts(world_size=world))
            members = unit_members([graph for pair in pairs for graph in pair if graph is not None])
            assert list(members) == [unit.name for unit in problem.units]
            for planner in PLANNERS.values():
                assert not verify(problem, planner(problem))


def test_what_a_region_has_left_is_the_least_of_its_operators_and_of_the_transfers_around_it() -> None:
    """A unit is brought in front of a region, and let go of behind it."""
    forward, _ = graphs()
    names = [node.name for node in forward.nodes]
    assert names == ["x", "w", "u", "g", "v", "a", "b", "release_default", "k", "z", "c", "release_default_1", "output"]
    regions = [{"a", "b"}, {"c"}]
    assert [{node.name for node in each} for each in find_regions(forward).compute] == regions
    spans = [range(names.index("c")), range(names.index("release_default"), len(names))]
    for low in range(len(names)):
        rows = [7 if place == low else 9 for place in range(len(names))]
        assert least_of_regions(forward, rows) == [7 if low in span else 9 for span in spans]
