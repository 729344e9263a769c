"""The memory model and what a graph takes of the headroom: figures by hand, and bounds over all sizes. No model is compiled."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from irtext import graph_of, unit

from zinf_compile.ir.chunk_columns import StepTiers, buffer_bytes, chunk_columns
from zinf_compile.ir.pieces import Piece, chunk_end, cut_chunks
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import CHUNK_BUFFERS, PIECE_ALIGN, UNFORESEEN, Sides
from zinf_compile.ir.tiers import Placement, Tier, Topology
from zinf_compile.passes.graph.node_facts import mark_region
from zinf_compile.plan.graph_plan import GraphMemory, GraphPlan
from zinf_compile.plan.headroom import Headroom, plan_graph
from zinf_compile.plan.memory_model import MemoryModel, adam_states, model_memory, step_chunk
from zinf_compile.runtime.memory.reservations import Reservation, Reservations
from zinf_compile.sharded.graph_room import room_for_units

TIERS = st.sampled_from(["device", "host", "nvme"])


def slot(index: int, *shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> ParameterSlot:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    device = torch.device("cpu")
    return ParameterSlot(
        index=index, name=f"p{index}", shape=shape, stride=stride, dtype=dtype, device=device, requires_grad=trained
    )


def model(slots: list[ParameterSlot], *, size: int = 1, apart: bool = True, **placement: object) -> MemoryModel:
    return model_memory(slots, Placement(**placement, piece_numel=8192), size=size, topology=Topology(host_apart=apart))  # type: ignore[arg-type]


def graph(**needs: object) -> GraphMemory:
    nothing = dict.fromkeys(("gathered", "rows", "cast", "converted", "left", "reduced"), 0)
    return GraphMemory(**{**nothing, "largest": "", "narrowed": False, "widening": 1.0, **needs})  # type: ignore[arg-type]


def test_an_uneven_a_frozen_and_a_0d_parameter_on_two_ranks() -> None:
    slots = [slot(0, 3, 5), slot(1, 4, trained=False), slot(2)]
    found = model(slots, size=2, params="host", grads="nvme", optimizer="device")
    assert found.shards == Sides(4, 4 * (8 + 2)), "the number stays on the device, padded shards of the others on the host"
    assert found.gradients == Sides(4, 0)
    assert found.states == Sides(2 * 4 * (8 + 1), 0)
    assert found.offloading == 4 * 8
    assert found.read == 2 * 4 * 8
    assert found.normed == 0, "several ranks take norms of shards on the host"
    assert found.staging == 4096


def test_a_master_copy_counts_with_states_and_widens_gradients() -> None:
    found = model([slot(0, 10, 10, dtype=torch.bfloat16)], apart=False, master=torch.float32)
    assert found.shards == Sides(200, 0)
    assert found.gradients == Sides(400, 0)
    assert found.states == Sides(1200, 0)
    assert found.resident == Sides(600, 0)
    assert found.added_by_steps == Sides(1600, 0)
    assert found.chunk == Sides(0, 0), "all is where it is updated"


def test_what_is_held_already_counts_its_gradient_only() -> None:
    found = model_memory(
        [slot(0, 8), slot(1, 4)], Placement(piece_numel=8192), size=1, topology=Topology(host_apart=False), held={0}
    )
    assert (found.shards, found.gradients) == (Sides(16, 0), Sides(48, 0))


def test_a_chunk_has_memory_for_what_is_brought_to_be_updated() -> None:
    slots = [slot(0, 100, 100), slot(1, 7)]
    page = 4 * 8192  # both parameters, cut off where a piece ends
    assert model(slots, params="nvme", apart=False).chunk == Sides(page, 0)
    assert model(slots, params="nvme", grads="nvme", optimizer="nvme", apart=False).chunk == Sides(4 * page, 0)
    assert model(slots, optimizer="host").chunk == Sides(0, 2 * page), "values and gradients come to the host"
    assert model(slots, optimizer="nvme", update="device").chunk == Sides(2 * page, 2 * page)


@st.composite
def shards_and_pieces(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Draw the parts of shards, in elements, another order of these, and the elements of a piece; few pieces for each shard."""
    piece_numel = draw(st.integers(1, 4 * PIECE_ALIGN))
    parts = st.lists(st.integers(0, min(5 * PIECE_ALIGN, 50 * piece_numel)), min_size=1, max_size=4)
    shards = draw(st.lists(parts, max_size=12))
    return shards, draw(st.permutations(range(len(shards)))), piece_numel


def cut(shards: list[list[int]], piece_numel: int, planned: int | None = None) -> list[tuple[Piece, ...]]:
    cuts = [list(itertools.accumulate(parts))[:-1] for parts in shards]
    return cut_chunks([sum(parts) for parts in shards], piece_numel=piece_numel, chunk_numel=planned, cuts=cuts)


@given(shards_and_pieces())
def test_no_chunk_is_larger_than_planned_in_any_order(drawn: tuple[list[list[int]], list[int], int]) -> None:
    shards, order, piece_numel = drawn
    chunks = cut(shards, piece_numel)
    planned = max(map(chunk_end, chunks), default=0)
    assert cut(shards, piece_numel, planned or None) == chunks
    others = cut([shards[number] for number in order], piece_numel, planned or None)
    assert max(map(chunk_end, others), default=0) <= planned
    assert sorted((order[p.shard], p.start, p.end) for c in others for p in c) == sorted(
        (p.shard, p.start, p.end) for c in chunks for p in c
    )


def test_chunks_are_counted_in_the_order_of_parameters() -> None:
    """Two of them fit into one chunk of 8,192 elements, a third one does not; the last has states of its own kind."""
    slots = [slot(0, 3000), slot(1, 4000), slot(2, 100)]
    assert model(slots, params="nvme", apart=False).chunk == Sides(4 * 8192, 0)
    assert model(slots, params="nvme", apart=False).chunk_numel == 8192
    halves = [slot(0, 3000), slot(1, 4000, dtype=torch.bfloat16)]
    assert model(halves, params="nvme", apart=False).chunk == Sides(4 * 4096, 0)
    assert model([slot(0, 10, trained=False)], params="nvme", apart=False).chunk_numel == 0


def test_tiles_bound_a_chunk() -> None:
    """A chunk has one piece of each shard, and a piece lies in one tile."""
    tiles = tuple(((row, row + 25), (0, 100)) for row in range(0, 100, 25))
    tiled = dataclasses.replace(slot(0, 100, 100), tiles=tiles)
    assert model([tiled], params="nvme", apart=False).chunk == Sides(4 * 4096, 0)
    assert model([slot(1, 7), tiled], params="nvme", apart=False).chunk == Sides(4 * (4096 + 4096), 0)
    assert model([tiled, slot(1, 7)], params="nvme", apart=False).chunk == Sides(4 * 4096, 0), (
        "behind the last tile another begins"
    )
    assert model([slot(0, 100, 100)], params="nvme", apart=False).chunk == Sides(4 * 8192, 0)


@pytest.mark.parametrize(
    ("size", "apart", "expected"),
    [(1, False, (1000, 0)), (1, True, (1000, 1000)), (2, False, (1500, 0)), (2, True, (1500, 500))],
)
def test_a_shard_from_a_drive_is_there_until_it_is_gathered(size: int, apart: bool, expected: tuple[int, int]) -> None:
    found = model([], size=size, apart=apart, params="nvme").transient(graph(gathered=1000))
    assert found.least == expected


def test_gradients_on_their_way_count_where_they_travel() -> None:
    needs = graph(left=100, reduced=200, converted=7)
    assert model([], apart=False).transient(needs).least == (7, 0)
    assert model([], grads="host").transient(needs).least == (200, 0)
    assert model([], size=2).transient(needs).least == (200, 0)
    assert model([], size=2, grads="nvme").transient(needs).least == (300, 0)


def test_headroom_is_taken_from_both_sides_and_is_one_where_they_are() -> None:
    apart = Headroom(Sides(100, 30), Topology(host_apart=True))
    assert apart.take(10, 5, 10) == 3
    assert apart.take(100, 1) == 85
    one = Headroom(Sides(100, 0), Topology(host_apart=False))
    assert one.take(10, 5, 10) == 6
    assert one.take(100, 1) == 10
    assert one.take(-4, 1) == 0


@given(
    st.fixed_dictionaries({"params": TIERS, "grads": TIERS, "optimizer": TIERS}),
    st.booleans(),
    st.integers(1, 3),
    st.tuples(st.integers(0, 1 << 27), st.integers(0, 1 << 27)),
    st.tuples(*[st.integers(0, 1 << 22)] * 3),
)
def test_what_a_graph_takes_stays_within_the_headroom(
    placement: dict[str, str], apart: bool, size: int, spare: tuple[int, int], needs: tuple[int, int, int]
) -> None:
    found = model([slot(0, 700, 31), slot(1, 64)], size=size, apart=apart, **placement)
    gathered, left, more = needs
    passing = found.transient(graph(gathered=gathered, left=left, reduced=left + more, widening=2.0))
    room = Sides(spare[0], spare[1] if apart else 0)
    plan = plan_graph(found, passing, spare=room, bucket_bytes=1 << 20, one_ahead=3 << 20)
    taken = passing.with_plan(plan)
    assert 1 <= plan.chunk_buffers <= CHUNK_BUFFERS
    for side in range(2 if apart else 1):
        used = taken[side] - passing.least[side] + (plan.chunk_buffers - 1) * found.chunk[side]
        assert 0 <= used <= min(room[side], plan.wish[side])


def test_a_part_of_the_room_stays_free() -> None:
    passing = model([slot(0, 64)], apart=False, params="nvme").transient(graph(gathered=100))
    room = UNFORESEEN << 10
    plan = plan_graph(model([]), passing, spare=Sides(room, room), bucket_bytes=1 << 20, one_ahead=300)
    assert plan.ahead == room - room // UNFORESEEN


def test_gathers_may_come_before_gradients() -> None:
    found = model([slot(0, 64)], params="host", grads="host")
    passing = found.transient(graph(gathered=100, left=10, reduced=20))
    room, ask = Sides(8 << 20, 8 << 20), {"bucket_bytes": 1 << 20, "one_ahead": 32 << 20}
    shared = plan_graph(found, passing, spare=room, **ask)  # type: ignore[arg-type]
    first = plan_graph(found, passing, spare=room, gathers_first=True, **ask)  # type: ignore[arg-type]
    assert shared.reduced > 2 << 20
    assert first.reduced == 0
    assert first.ahead == shared.ahead + shared.reduced


def test_what_is_planned_for_gradients_is_free_until_there_are_any() -> None:
    lines = ["a = relu(x)", "b = relu(a)", "r = reduce_scatter(b, w)", "c = relu(b)", "return (c, r)"]
    gm = graph_of("\n".join(lines), x=torch.empty(4, 4), w=unit(4, 4))
    for node in gm.graph.nodes:
        if node.name in "abc":
            mark_region(node)
    passing = model([slot(0, 64)], params="host", grads="host").transient(graph(gathered=100, left=10, reduced=20))
    plan = GraphPlan(ahead=50, reduced=7, staging=0, chunk_buffers=1, wish=Sides(0, 0))
    room = room_for_units(gm.graph, passing, plan, [1, 2, 3])
    assert (room.device, list(room.more)) == (150, [1 + 27, 2, 3])
    assert list(room_for_units(gm.graph, passing, plan, ()).more) == [], "compute isn't known region by region"


@given(least=st.integers(0, 1000), more=st.integers(0, 200), wish=st.integers(0, 5000))
def test_the_smallest_cap_for_what_no_plan_knew_is_exact(least: int, more: int, wish: int) -> None:
    """As `plan_graph` takes of what a cap leaves beside what was planned, all of it in bytes."""
    planned, reservations = least, Reservations()
    reservation = Reservation(
        passing=least, left=0, reduced=0, chunk_buffers=1, least=Sides(least, 0), works=Sides(planned, 0), wish=Sides(wish, 0)
    )
    reservations.add(reservation)

    def fits(cap: int) -> bool:
        spare = cap - planned
        return spare >= 0 and planned + more + min(wish, spare - spare // UNFORESEEN) <= cap

    named = reservations.works(Tier.DEVICE, more)
    assert fits(named)
    assert not fits(named - 1)


@example([(3, False, True), (2, False, True), (1, False, True), (4, False, False)])
@example([(2, False, True), (4, True, True), (3, True, True), (1, False, True)])
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_chunks_fit_in_whatever_order_an_optimizer_has_the_parameters(sizes: list[tuple[int, bool, bool]]) -> None:
    """Of two homes and two types; sizes in steps of `PIECE_ALIGN`."""
    piece = 4 * PIECE_ALIGN
    near, far = (Placement(grads=grads, optimizer="nvme", piece_numel=piece) for grads in ("device", "nvme"))  # type: ignore[arg-type]
    types = [torch.bfloat16 if half else torch.float32 for _, half, _ in sizes]
    slots = [slot(i, numel * PIECE_ALIGN, dtype=types[i]) for i, (numel, *_) in enumerate(sizes)]
    homes = Placements(near, {i: far for i, (*_, away) in enumerate(sizes) if away})
    topology = Topology(host_apart=False)
    planned, reserved = step_chunk(slots, homes, size=1, topology=topology)

    def taken(home: Placement, order: Sequence[ParameterSlot]) -> int:
        tiers = StepTiers(
            params=home.params, grads=home.grads, optimizer=home.optimizer, topology=topology, update_on_device=True
        )
        most = 0
        for dtype, run in itertools.groupby([each for each in order if homes.of(each) is home], key=lambda each: each.dtype):
            columns = chunk_columns(tiers, value=dtype, gradient=dtype, states=adam_states(home, dtype)).values()
            chunks = cut_chunks([each.numel for each in run], piece_numel=piece, chunk_numel=planned)
            most = max(most, *(topology.counted(buffer_bytes(tuple(columns), chunk_end(chunk))).device for chunk in chunks))
        return most

    assert all(taken(near, order) + taken(far, order) <= reserved.device for order in itertools.permutations(slots))
