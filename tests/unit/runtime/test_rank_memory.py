"""What a rank's memory lets the allocator keep for the next step."""

from __future__ import annotations

import pytest
from plain_memory import plain_memory

from zinf_compile.runtime.memory import rank_memory
from zinf_compile.runtime.memory.reservations import Reservation

PARAMS, GRADS, PASSING = 500, 400, 200


def end_step(monkeypatch: pytest.MonkeyPatch, cap: int | None, *, host_apart: bool = False) -> list[tuple[int, int]]:
    """End a step, then let go of all units; return what the allocator was told: bytes to keep, and the room for them."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(rank_memory, "keep_free_memory", lambda wanted, *, room: told.append((wanted, room)))
    memory = plain_memory(host_apart=host_apart)
    memory.ledger.add("params", PARAMS)
    memory.ledger.add("grads", GRADS)
    memory.reservations.device_cap = cap
    reservation = Reservation(passing=PASSING, left=0, reduced=0, chunk_buffers=1)
    memory.reservations.add(reservation)
    memory.end_step()
    memory.forget_units()
    del reservation
    return told


@pytest.mark.parametrize("room", [10_000, 100, 0])
def test_what_a_step_frees_may_stay_where_the_cap_leaves_room_beside_all_that_is_planned(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    assert end_step(monkeypatch, PARAMS + GRADS + PASSING + room) == [(GRADS + PASSING, room), (0, 0)]


def test_no_room_is_less_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_step(monkeypatch, PARAMS) == [(GRADS + PASSING, 0), (0, 0)]


def test_nothing_is_kept_without_a_cap_or_beside_a_device_with_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_step(monkeypatch, None) == [(0, 0)]
    assert end_step(monkeypatch, 10_000, host_apart=True) == []
