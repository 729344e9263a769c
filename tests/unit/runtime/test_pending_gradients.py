"""Gradients that a deferred step has still to apply: who waits for them, and when."""

from __future__ import annotations

import pytest
from plain_memory import plain_memory

from zinf_compile._torch import compile_lock
from zinf_compile.ir.sizes import Sides
from zinf_compile.runtime.memory.rank_memory import Memory
from zinf_compile.runtime.memory.reservations import Reservation

HELD, PASSING = 700, 200


class Step:
    """A step under way with 300 bytes of gradients."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.waited = memory, 0
        memory.ledger.add("grads", 300)
        memory.pending_gradients.add(self)

    def gradient_bytes(self) -> Sides:
        return Sides(300, 0)

    def settle(self) -> None:
        self.waited += 1
        self.memory.ledger.add("grads", -300)


@pytest.fixture
def memory() -> Memory:
    """Return memory that holds 400 bytes beside the gradients of a step, with a graph that takes 200."""
    made = plain_memory()
    made.ledger.add("params", HELD - 300)
    return made


def reserve(memory: Memory) -> Reservation:
    made = Reservation(passing=PASSING, left=0, reduced=0, chunk_buffers=1)
    memory.reservations.add(made)
    return made


@pytest.mark.parametrize("cap", [None, HELD + PASSING, HELD + PASSING - 1])
def test_a_forward_waits_where_there_is_no_room_beside_them(memory: Memory, cap: int | None) -> None:
    memory.reservations.device_cap = cap
    reservation = reserve(memory)
    step = Step(memory)
    room = cap is None or cap >= HELD + PASSING
    assert memory.has_room_for_graphs() == room
    memory.begin_graph(makes_gradients=False)
    assert step.waited == (0 if room else 1)
    memory.begin_graph(makes_gradients=True)
    memory.begin_graph(makes_gradients=True)
    assert step.waited == 1, "once it is over nobody waits"
    assert memory.pending_gradients.bytes() == Sides(0, 0)
    del reservation


def test_who_compiles_does_not_wait(memory: Memory) -> None:
    """Nothing is updated meanwhile: the bytes are counted as gone, and a graph that has no room beside them waits."""
    step = Step(memory)
    with compile_lock:
        assert not memory.pending_gradients.wait()
        assert memory.pending_gradients.bytes() == Sides(300, 0)
    assert memory.pending_gradients.wait()
    assert step.waited == 1


def test_memory_that_is_short_waits_for_them(memory: Memory) -> None:
    memory.reservations.device_cap = HELD + 100
    step = Step(memory)
    memory.make_room(memory.ledger, 100)
    assert not step.waited
    memory.make_room(memory.ledger, 101)
    assert step.waited
