"""The arena of device memory for gathers and swaps: nothing is allocated after the first steps, and all of it comes back."""

from __future__ import annotations

import gc
import re
from typing import Any

import late
import pytest
import torch
from gradient_cases import Stack, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_steps_late import allocations_of_steps
from ranks import run_ranks

import zinf_compile
from zinf_compile.runtime.context import all_contexts
from zinf_compile.runtime.memory import device_arena
from zinf_compile.runtime.memory.device_arena import GRANULE, DeviceArena

LATE = torch.device("late:0")
FLOATS = GRANULE // 4


def warm(arena: DeviceArena, sizes: list[int]) -> None:
    """Lend some sizes at a time, often enough for the arena to have them."""
    for _ in range(3):
        lent = [arena.lend(size, torch.float32) for size in sizes]
        lent.clear()


def test_the_same_loans_have_the_same_addresses_and_nothing_is_allocated() -> None:
    arena, idle = DeviceArena(LATE), [0]
    arena.account = lambda change: idle.__setitem__(0, idle[0] + change)
    warm(arena, [FLOATS, 3 * FLOATS, 10])
    before = late.account()
    addresses = []
    for _ in range(3):
        lent = [arena.lend(FLOATS, torch.float32), arena.lend(3 * FLOATS, torch.float32)]
        assert idle[0] == arena.held_bytes() - 4 * GRANULE
        del lent[0]
        lent.append(arena.lend(10, torch.float32))
        addresses.append([tensor.data_ptr() for tensor in lent])
        lent.clear()
        assert idle[0] == arena.held_bytes() == 5 * GRANULE
    assert addresses[0] == addresses[1] == addresses[2]
    assert late.account().allocations == before.allocations
    arena.clear()
    assert idle[0] == arena.held_bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_loans_of_every_type_begin_where_their_storage_does(dtype: torch.dtype) -> None:
    arena = DeviceArena(LATE)
    for _ in range(4):  # beyond the arena, then in it
        lent = arena.lend_together([5, 0, 700], dtype)
        assert [tensor.dtype for tensor in lent] == [dtype] * 3
        assert [tensor.numel() for tensor in lent] == [5, 0, 700]
        assert [tensor.storage_offset() for tensor in lent] == [0, 0, 0]
        assert [tensor.untyped_storage().nbytes() for tensor in lent] == [5 * dtype.itemsize, 0, 700 * dtype.itemsize]
        lent.clear()


def test_memory_is_lent_again_after_the_last_view_of_it() -> None:
    arena = DeviceArena(LATE)
    warm(arena, [2 * FLOATS])
    first = arena.lend(2 * FLOATS, torch.float32)
    view, address = first[5:].as_strided((2, 3), (3, 1)), first.data_ptr()
    del first
    second = arena.lend(FLOATS, torch.float32)
    assert second.data_ptr() != address
    del view
    assert arena.lend(FLOATS, torch.bfloat16).data_ptr() == address


def test_it_goes_back_to_the_allocator_when_the_last_loan_does() -> None:
    start = late.account().now
    arena = DeviceArena(LATE)
    warm(arena, [FLOATS, FLOATS])
    assert late.account().now == start + 2 * GRANULE
    lent = arena.lend(FLOATS, torch.float32).fill_(7)
    arena.clear()
    assert lent.eq(7).all()
    del lent
    assert late.account().now == start


def use(arena: DeviceArena, stream: torch.Stream) -> None:
    with stream:
        lent = arena.lend(FLOATS, torch.float32)
        lent.fill_(1).mul_(2)


def test_another_stream_comes_after_what_was_done_with_memory_before() -> None:
    arena = DeviceArena(LATE)
    warm(arena, [FLOATS])
    one, other = torch.Stream(device="late"), torch.Stream(device="late")
    with late.delays(0.002, seed=1):
        for stream in (one, other, one):
            use(arena, stream)
        arena.clear()  # on the first stream
        torch.zeros(FLOATS, device="late")
        torch.accelerator.synchronize()
    assert late.defects() == []


def test_without_its_events_memory_would_be_used_by_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_arena, "_wait", lambda stream, events: None)
    arena = DeviceArena(LATE)
    warm(arena, [FLOATS])
    with late.delays(0.002, seed=1):
        use(arena, torch.Stream(device="late"))
        use(arena, torch.Stream(device="late"))
        torch.accelerator.synchronize()
    assert "unordered accesses" in {defect.kind for defect in late.defects()}


def test_a_limit_and_a_refusal_leave_the_rest_to_the_allocator() -> None:
    arena = DeviceArena(LATE, limit=lambda: GRANULE)
    warm(arena, [FLOATS, FLOATS])
    lent = [arena.lend(FLOATS, torch.float32).fill_(n) for n in range(2)]
    assert [tensor.eq(n).all().item() for n, tensor in enumerate(lent)] == [True, True]
    assert arena.held_bytes() == 2 * GRANULE
    lent.clear()
    assert arena.held_bytes() == 0
    arena.clear()
    arena = DeviceArena(LATE)
    with late.memory_limit(late.account().reserved + 4 * GRANULE):
        parts = [torch.empty(FLOATS, device="late") for _ in range(3)]
        del parts[1]  # free, and not in one piece
        warm(arena, [FLOATS, FLOATS])
        assert [tensor.numel() for tensor in [arena.lend(FLOATS, torch.float32) for _ in range(2)]] == [FLOATS] * 2


def test_no_part_of_an_arena_lies_idle_beside_what_it_has_no_place_for() -> None:
    """A small loan and a large one, and a limit that has room for the large one alone."""
    arena, most = DeviceArena(LATE, limit=lambda: 4 * GRANULE), 0
    for _ in range(4):
        lent = [arena.lend(FLOATS, torch.float32), arena.lend(4 * FLOATS, torch.float32)]
        most = max(most, arena.held_bytes())
        del lent
    assert most == 5 * GRANULE


def test_a_first_loan_that_is_larger_than_the_arena_is_in_its_place_where_both_are_too_much() -> None:
    arena = DeviceArena(LATE, limit=lambda: 4 * GRANULE)
    warm(arena, [2 * FLOATS])
    assert arena.held_bytes() == 2 * GRANULE
    lent = arena.lend(4 * FLOATS, torch.float32)
    assert arena.held_bytes() == lent.nbytes


def test_an_arena_is_given_back_when_its_limit_sinks() -> None:
    limit = [4 * GRANULE]
    arena = DeviceArena(LATE, limit=lambda: limit[0])
    warm(arena, [3 * FLOATS])
    limit[0] = 2 * GRANULE
    lent = arena.lend(FLOATS, torch.float32)
    arena.trim()
    assert arena.held_bytes() == lent.nbytes
    del lent
    arena.trim()
    assert arena.held_bytes() == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5 * FLOATS), st.integers(0, 2)), max_size=40))
def test_nothing_is_lent_twice(steps: list[tuple[int, int, int]]) -> None:
    streams = [torch.accelerator.current_stream(), *_STREAMS]
    arena = DeviceArena(LATE)
    for _ in range(2):
        held: dict[int, tuple[torch.Tensor, int, torch.Stream]] = {}
        for value, (name, size, stream) in enumerate(steps):
            if name in held:
                tensor, expected, mine = held.pop(name)
                with mine:
                    assert tensor.eq(expected).all().item()
            else:
                with streams[stream]:
                    held[name] = arena.lend(size, torch.float32).fill_(value), value, streams[stream]
        for tensor, expected, mine in held.values():
            with mine:
                assert tensor.eq(expected).all().item()
        held.clear()
    tensor = None
    arena.clear()
    assert arena.held_bytes() == 0
    assert late.defects() == []


_STREAMS = [torch.Stream(device="late") for _ in range(2)]


def allocations_of_a_step(options: dict[str, Any]) -> int:
    """Return how often memory is allocated in a forward and a backward, after the first steps."""
    found = train("late", options, micro_batches=1, before_step=lambda model: None)
    torch.accelerator.synchronize()
    before = late.account().allocations
    found.called(torch.ones(8, 32, device="late")).backward()
    return late.account().allocations - before


def test_gathers_and_swaps_allocate_nothing_after_the_first_steps() -> None:
    without = allocations_of_a_step({})
    assert allocations_of_a_step({"params": "host"}) == without
    assert allocations_of_a_step({"params": "host", "grads": "host"}) <= without


@pytest.mark.distributed
@pytest.mark.parametrize("grads", ["device", "host"])
def test_gathers_of_ranks_allocate_nothing_after_the_first_steps(grads: str) -> None:
    """The arena grows as often as threads give loans back in an order that needs more than all orders before: some steps."""
    options = {"params": "host", "grads": grads}
    for without, found in zip(*(run_ranks(allocations_of_steps, 2, o, backend="late") for o in ({}, options)), strict=True):
        assert min(found[8:]) <= min(without[8:])


def peak_beside_ours(options: dict[str, Any]) -> int:
    """Return the most bytes of device memory that were not the runtime's, of a forward: those of compute."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = Stack(4).to("late")
    called = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    x = torch.ones(8, 32, device="late")
    with torch.no_grad():
        for _ in range(4):
            called(x)
        torch.accelerator.synchronize()
        (context,) = all_contexts()
        late.reset_peak()
        context.memory.ledger.forget_peaks()
        called(x)
        torch.accelerator.synchronize()
    return late.account().peak - context.memory.ledger.total()[1]


def test_the_peak_is_that_of_the_ledger() -> None:
    assert peak_beside_ours({"params": "device"}) == peak_beside_ours({"params": "host"})


@pytest.mark.parametrize("end", ["reset", "del"])
def test_everything_is_given_back(end: str) -> None:
    gc.collect()
    zinf_compile.reset()
    torch.compiler.reset()
    start = late.account().now
    found = train("late", {"params": "host", "grads": "host", "optimizer": "host", "update": "device"})
    assert late.account().now > start
    if end == "reset":
        zinf_compile.reset()
        held = sum(context.memory.gather_memory.held_bytes() for context in all_contexts())
        assert held == 0
    del found
    torch.compiler.reset()
    gc.collect()
    assert late.account().now == start


def test_a_capped_model_stays_within_its_cap() -> None:
    """The arena's idle memory counts, too: with the least cap there is none."""

    def peak(cap: int, *, keeps: bool = True) -> int:
        options = {"params": "host", "grads": "host", "optimizer": "host", "device_memory": cap}
        trained = train("late", options, micro_batches=1)
        (context,) = all_contexts()
        assert (context.memory.gather_memory.held_bytes() > 0) == keeps
        del trained  # what gathers keep goes with the last unit
        return context.memory.ledger.total()[1]

    with pytest.raises(zinf_compile.BudgetError) as refused:
        peak(10_000)
    found = re.search(r"smallest that works is ([\d,]+)", str(refused.value))
    assert found is not None
    del refused  # with it goes the model, whose memory would count as somebody else's
    gc.collect()
    least = int(found[1].replace(",", ""))
    assert peak(least, keeps=False) <= least
    assert peak(least * 11 // 10) <= least * 11 // 10
