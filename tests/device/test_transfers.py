"""What a transfer on a stream holds, and until when: no more than the order of streams asks for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import late
import pytest
import torch

from zinf_compile.runtime.lanes.lanes import All
from zinf_compile.runtime.lanes.stream_lane import StreamLane, TransferToHost

LATE = torch.device("late:0")


@pytest.fixture
def lanes() -> Iterator[tuple[StreamLane, StreamLane]]:
    """Two of them, as that of copies to the device and that of gathers."""
    made = StreamLane(LATE, "copies"), StreamLane(LATE, "gathers")
    yield made
    for lane in made:
        lane.close()


def submitted(lane: StreamLane) -> tuple[TransferToHost, weakref.ref[torch.Tensor]]:
    """Return a transfer that nothing else holds the memory of, and that memory."""
    memory = torch.empty(1000, device=LATE)
    return TransferToHost(lane.submit(lambda into=memory: into.fill_(1))), weakref.ref(memory)  # type: ignore[misc]


@pytest.mark.parametrize("several", [False, True])
def test_compute_after_a_transfer_is_after_those_before_it(lanes: tuple[StreamLane, StreamLane], several: bool) -> None:
    """Else the device holds all that was issued to it before it has come so far, whatever the cap."""
    copies, gathers = lanes
    with late.held(copies._stream):
        one, memory = submitted(copies)
        two = gathers.submit(lambda: None, after=[All([one]) if several else one])
        assert memory() is not None
        two.wait()
        assert memory() is None
    torch.accelerator.synchronize()
    assert not late.defects()


def test_another_stream_after_it_lets_nothing_go(lanes: tuple[StreamLane, StreamLane]) -> None:
    copies, gathers = lanes
    with late.held(copies._stream):
        one, memory = submitted(copies)
        two = gathers.submit(lambda: None, after=[one])
        with torch.Stream(device=LATE):
            two.wait()
        assert memory() is not None
    torch.accelerator.synchronize()
    copies.settle()
    assert memory() is None
