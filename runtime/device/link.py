"""The link between host memory and a device's own: buffers on both sides, and copies."""

from __future__ import annotations

from typing import Protocol

import torch

from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.lanes.lanes import Pending, ThreadLane
from zinf_compile.runtime.lanes.link_meter import Meter, moving
from zinf_compile.runtime.memory.arena import GatherMemory

MOST_COPIES = 64
"""Copies of one direction that may be under way: what is brought ahead is bounded by the schedule."""


class DeviceLink(Protocol):
    """Buffers on both sides, and copies between them, each direction a lane of its own."""

    topology: Topology
    """How tiers are linked; where the device is host memory nothing is ever copied."""

    def attach(self, meter: Meter) -> None:
        """Count what crosses on this meter."""

    def detach(self, meter: Meter) -> None:
        """Count on this meter no longer: its rank uses the link no more. Threads that the link has made for it end."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat host memory, content undefined, that drives and the device copy from and to without another copy."""

    def device_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat memory of the device, content undefined."""

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """Start to copy host memory to the device, once `after` is over; both stay until then."""

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """Start to copy the device's memory to the host, once `after` is over."""


class HostIsDevice:
    """A device that is host memory."""

    topology = Topology(host_apart=False)

    def __init__(self, memory: GatherMemory) -> None:
        self._memory = memory

    def attach(self, meter: Meter) -> None:
        """See `DeviceLink.attach`; nothing crosses."""

    def detach(self, meter: Meter) -> None:
        """See `DeviceLink.detach`."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceLink.host_buffer`."""
        return self._memory.lend(numel, dtype)

    device_buffer = host_buffer

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_device`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing to it")

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_host`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing from it")


class AcceleratorLink:
    """An accelerator: pinned host memory, and a stream for each direction."""

    topology = Topology(host_apart=True)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meters: list[Meter] = []
        self._host_memory = GatherMemory(pinned=True)
        self._lanes: dict[str, ThreadLane] = {}
        self._streams: dict[str, torch.Stream] = {}

    def attach(self, meter: Meter) -> None:
        """See `DeviceLink.attach`."""
        self._meters.append(meter)

    def detach(self, meter: Meter) -> None:
        """See `DeviceLink.detach`."""
        self._meters = [other for other in self._meters if other is not meter]  # a copy under way goes by the list it began with
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceLink.host_buffer`; used again, since pinning takes milliseconds."""
        return self._host_memory.lend(numel, dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceLink.device_buffer`."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(numel, dtype=dtype, device=self._device)

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_device`."""
        return self._copy("host to device", source, into, after)

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_host`."""
        return self._copy("device to host", source, into, after)

    def _copy(self, way: str, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        if way not in self._lanes:
            self._lanes[way] = ThreadLane(f"zinf {way}", link=way, most=MOST_COPIES, forgiving=True)
            self._streams[way] = torch.Stream(self._device)
        stream = self._streams[way]
        for meter in self._meters:
            meter.moved(way, source.nbytes)
        issued = torch.accelerator.current_stream(self._device).record_event()  # memory from the allocator is free from then on

        def copy() -> None:
            with stream:
                stream.wait_event(issued)
                if after is not None:
                    after.wait()
                with moving(self._meters, way, source.nbytes):
                    into.copy_(source, non_blocking=True)
                    stream.record_event().synchronize()

        return self._lanes[way].submit(copy)
