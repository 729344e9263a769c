"""Between host memory and a device's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import torch

from zinf_compile.runtime.lanes.lanes import Pending, ThreadLane
from zinf_compile.runtime.lanes.link_meter import Meter, moving
from zinf_compile.runtime.memory.arena import GatherMemory

MOST_COPIES = 64
"""Copies of one direction that may be under way: what is brought ahead is bounded by the schedule."""


class Bridge(Protocol):
    """Buffers on both sides, and copies between them, each direction a lane of its own."""

    unified: bool
    """The device is host memory: nothing is ever copied."""

    def attach(self, meter: Meter) -> None:
        """Count what crosses on this meter."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat host memory, content undefined, that drives and the device copy from and to without another copy."""

    def device_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat memory of the device, content undefined."""

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """Start to copy host memory to the device, once `after` is over; both stay until then."""

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """Start to copy the device's memory to the host, once `after` is over."""


class Unified:
    """A device that is host memory."""

    unified = True

    def __init__(self, memory: GatherMemory) -> None:
        self._memory = memory

    def attach(self, meter: Meter) -> None:
        """See `Bridge.attach`; nothing crosses."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Bridge.host_buffer`."""
        return self._memory.lend(numel, dtype)

    device_buffer = host_buffer

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `Bridge.to_device`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing to it")

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `Bridge.to_host`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing from it")


class CudaBridge:
    """A GPU: pinned host memory, and a stream for each direction."""

    unified = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meters: list[Meter] = []
        self._host_memory = GatherMemory(pinned=True)
        self._lanes: dict[str, ThreadLane] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}

    def attach(self, meter: Meter) -> None:
        """See `Bridge.attach`."""
        self._meters.append(meter)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Bridge.host_buffer`; used again, since pinning takes milliseconds."""
        return self._host_memory.lend(numel, dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Bridge.device_buffer`."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(numel, dtype=dtype, device=self._device)

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `Bridge.to_device`."""
        return self._copy("host to device", source, into, after)

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `Bridge.to_host`."""
        return self._copy("device to host", source, into, after)

    def _copy(self, way: str, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        if way not in self._lanes:
            self._lanes[way] = ThreadLane(f"zinf {way}", link=way, most=MOST_COPIES, forgiving=True)
            self._streams[way] = torch.cuda.Stream(self._device)
        stream = self._streams[way]
        for meter in self._meters:
            meter.moved(way, source.nbytes)
        issued = torch.cuda.current_stream(self._device).record_event()  # memory from the allocator is free from then on

        def copy() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(issued)
                if after is not None:
                    after.wait()
                with moving(self._meters, way, source.nbytes):
                    into.copy_(source, non_blocking=True)
                    stream.record_event().synchronize()

        return self._lanes[way].submit(copy)


class FakeLink:
    """One direction between host memory and a device that is only said to have memory of its own."""

    def __init__(self, name: str, *, bytes_per_s: float, latency_s: float) -> None:
        self.bytes = 0
        self.meters: list[Meter] = []
        """Where what crosses is counted, too."""
        self.name = name
        self.spans: list[tuple[float, float]] = []
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._lane = ThreadLane(f"zinf {name}", link=name, most=MOST_COPIES, forgiving=True)

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        def run() -> None:
            if after is not None:
                after.wait()
            start = time.perf_counter()
            into.copy_(source)
            self.bytes += source.nbytes
            for meter in self.meters:
                meter.moved(self.name, source.nbytes)
            took = time.perf_counter() - start
            with moving(self.meters, self.name, source.nbytes):
                time.sleep(max(0.0, self._latency_s + source.nbytes / self._bytes_per_s - took))
            self.spans.append((start, time.perf_counter()))

        return self._lane.submit(run)


class FakeDevice:
    """A device with memory of its own, two links away, played by the CPU: for machines without one.

    Its buffers are counted, and so is what crosses each link, at a speed that can be set.
    """

    unified = False

    def __init__(self, *, bytes_per_s: float = 1e12, latency_s: float = 0.0) -> None:
        self.links = {
            "to device": FakeLink("host to device", bytes_per_s=bytes_per_s, latency_s=latency_s),
            "to host": FakeLink("device to host", bytes_per_s=bytes_per_s, latency_s=latency_s),
        }
        self.memory = GatherMemory()
        self.host_memory = GatherMemory()

    def attach(self, meter: Meter) -> None:
        """See `Bridge.attach`."""
        for link in self.links.values():
            link.meters.append(meter)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Bridge.host_buffer`."""
        return self.host_memory.lend(numel, dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Bridge.device_buffer`."""
        return self.memory.lend(numel, dtype)

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `Bridge.to_device`."""
        return self.links["to device"].copy(source, into, after)

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `Bridge.to_host`."""
        return self.links["to host"].copy(source, into, after)


_players: list[Bridge] = []


@contextlib.contextmanager
def played_by(device: Bridge) -> Iterator[Bridge]:
    """Context in which the CPU plays `device` for every model that is partitioned."""
    _players.append(device)
    try:
        yield device
    finally:
        _players.remove(device)


def player_of(device: torch.device) -> Bridge | None:
    """Return what plays the device, inside `played_by`."""
    return _players[-1] if device.type == "cpu" and _players else None
