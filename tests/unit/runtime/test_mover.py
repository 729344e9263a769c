"""Pieces of states between where they live and where they are updated."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.lanes.lanes import Done, Pending, ThreadLane
from zinf_compile.runtime.transfer.move import Location, StagingBuffers, UpdateRoute


class Copying:
    """A copy that is over when it is told so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(10)


def test_what_was_updated_on_the_device_is_written_once_it_is_copied_and_nobody_waits() -> None:
    copying, written = Copying(), threading.Event()
    link: Any = SimpleNamespace(topology=Topology(host_apart=True), to_host_together=lambda pieces, hosts, before: copying)
    lane = ThreadLane("test")

    def write(source: torch.Tensor) -> Pending:
        assert copying.over.is_set()
        written.set()
        return Done()

    route = UpdateRoute(link, update_on_device=True, lane=lambda: lane)
    under_way: list[Pending] = []
    staging = StagingBuffers(torch.zeros(4), torch.zeros(4))
    assert route.keep([(Location(write=write), torch.zeros(4), staging)], under_way) == [None], "it stays on no other side"
    copied, pending = under_way
    assert copied is copying
    assert not written.wait(0.05)
    copying.over.set()
    pending.wait()
    assert written.is_set()
    lane.close()
