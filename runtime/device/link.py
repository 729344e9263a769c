"""The link between host memory and a device's own: buffers on both sides, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import Meter, timing
from zinf_compile.runtime.lanes.stream_lane import StreamLane, StreamTransfer, TransferToHost
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.memory.device_arena import DeviceArena

from .measured_rates import rates_of

_TO_DEVICE: Final = "host to device"
_TO_HOST: Final = "device to host"

MOST_COPIES = 1024
"""Most copies in flight in one direction: the schedule bounds what is loaded ahead."""


class DeviceLink(Protocol):
    """Buffers on both sides, and copies between them, each direction a lane of its own."""

    topology: Topology
    """How tiers are linked; where the device is host memory nothing is ever copied."""
    copies_together: bool
    """Whether copies that are issued at one time are better issued as one."""

    def attach(self, meter: Meter) -> None:
        """Count what crosses on this meter."""

    def detach(self, meter: Meter) -> None:
        """Count on this meter no longer: its rank uses the link no more. Threads that the link has made for it end."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat host memory, content undefined, that drives and the device copy from and to without another copy."""

    def device_buffer(self, numel: int, dtype: torch.dtype, *, lasting: bool = False) -> torch.Tensor:
        """Return flat memory of the device, content undefined. What is `lasting` is not for a transfer alone."""

    def device_buffers(self, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return several as `device_buffer` does."""

    def clear(self) -> None:
        """Let memory go that is kept to be used again: no model uses it."""

    def rates(self) -> DeviceRates:
        """Return what is known of the device before anything has run: measured at the first call, or nothing."""

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """Start to copy host memory to the device, once `after` is over; both stay until then."""

    def to_device_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending] = ()
    ) -> Pending:
        """Start to copy several tensors in host memory to the device, once all of `after` is over; all stay until then."""

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """Start to copy the device's memory to the host, once `after` is over."""

    def to_host_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending]
    ) -> Pending:
        """Start to copy several tensors of the device's memory to the host, once all of `after` is over; all stay until then."""

    def free_host_memory(self, enough: Callable[[], bool]) -> None:
        """Wait for copies to the device until the host memory that they let go leaves `enough`, or none is under way."""

    def wait_read(self, *host: torch.Tensor) -> None:
        """Return when no copy to the device reads any of this host memory any more: call it before that is changed."""

    def reads_of(self, host: torch.Tensor) -> Sequence[Pending]:
        """Return the copies to the device that read this host memory and may be under way; who waits waits for their end."""


class HostIsDevice:
    """A device that is host memory."""

    topology = Topology(host_apart=False)
    copies_together = False

    def __init__(self, memory: GatherMemory) -> None:
        self._memory = memory

    def attach(self, meter: Meter) -> None:
        """See `DeviceLink.attach`; nothing crosses."""

    def detach(self, meter: Meter) -> None:
        """See `DeviceLink.detach`."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceLink.host_buffer`."""
        return self._memory.lend(numel, dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype, *, lasting: bool = False) -> torch.Tensor:
        """See `DeviceLink.device_buffer`."""
        return self._memory.lend(numel, dtype)

    def device_buffers(self, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """See `DeviceLink.device_buffers`."""
        return [self.device_buffer(numel, dtype) for numel in numels]

    def clear(self) -> None:
        """See `DeviceLink.clear`; the arena is the context's."""

    def rates(self) -> DeviceRates:
        """See `DeviceLink.rates`; nothing is copied."""
        return DeviceRates()

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_device`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing to it")

    def to_device_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending] = ()
    ) -> Pending:
        """See `DeviceLink.to_device_together`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing to it")

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_host`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing from it")

    def to_host_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending]
    ) -> Pending:
        """See `DeviceLink.to_host_together`."""
        raise AssertionError("a schedule for a device that is host memory copies nothing from it")

    def free_host_memory(self, enough: Callable[[], bool]) -> None:
        """See `DeviceLink.free_host_memory`; nothing is copied."""

    def wait_read(self, *host: torch.Tensor) -> None:
        """See `DeviceLink.wait_read`; nothing is copied."""

    def reads_of(self, host: torch.Tensor) -> Sequence[Pending]:
        """See `DeviceLink.reads_of`; nothing is copied."""
        return ()


class AcceleratorLink:
    """An accelerator: pinned host memory, and a stream for each direction."""

    topology = Topology(host_apart=True)
    copies_together = True

    def __init__(self, device: torch.device, memory: DeviceArena) -> None:
        self._device, self._memory = device, memory
        self._meters: list[Meter] = []
        self._host_memory = GatherMemory(pinned=True)
        self._lanes: dict[str, StreamLane] = {}

    def attach(self, meter: Meter) -> None:
        """See `DeviceLink.attach`."""
        self._meters.append(meter)

    def detach(self, meter: Meter) -> None:
        """See `DeviceLink.detach`."""
        self._meters = [other for other in self._meters if other is not meter]
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceLink.host_buffer`; used again, since pinning takes milliseconds."""
        return self._host_memory.lend(numel, dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype, *, lasting: bool = False) -> torch.Tensor:
        """See `DeviceLink.device_buffer`."""
        if not lasting:
            (buffer,) = self.device_buffers([numel], dtype)
            return buffer
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(numel, dtype=dtype, device=self._device)

    def device_buffers(self, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """See `DeviceLink.device_buffers`."""
        for lane in self._lanes.values():
            lane.settle()  # what copies hold that are over, and that only other lanes have waited for
        return self._memory.lend_together(numels, dtype)

    def clear(self) -> None:
        """See `DeviceLink.clear`; the arena of the device is the context's."""
        self._host_memory.clear()

    def rates(self) -> DeviceRates:
        """See `DeviceLink.rates`."""
        return rates_of(self._device)

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_device`."""
        return self.to_device_together([source], [into], [] if after is None else [after])

    def to_device_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending] = ()
    ) -> Pending:
        """See `DeviceLink.to_device_together`."""
        return self._copy(_TO_DEVICE, sources, into, after, host=sources)

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_host`."""
        return self.to_host_together([source], [into], [] if after is None else [after])

    def to_host_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending]
    ) -> Pending:
        """See `DeviceLink.to_host_together`."""
        before = [*after, *self._readers(into)]
        return TransferToHost(self._copy(_TO_HOST, sources, into, before, host=into))

    def free_host_memory(self, enough: Callable[[], bool]) -> None:
        """See `DeviceLink.free_host_memory`."""
        if (lane := self._lanes.get(_TO_DEVICE)) is not None:
            lane.free_host_memory(enough)

    def wait_read(self, *host: torch.Tensor) -> None:
        """See `DeviceLink.wait_read`."""
        for reader in reversed(self._readers(host)):  # the end of the last one is that of all
            reader.synchronize()

    def reads_of(self, host: torch.Tensor) -> Sequence[Pending]:
        """See `DeviceLink.reads_of`."""
        return [TransferToHost(reader) for reader in self._readers([host])]

    def _copy(
        self,
        way: str,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        after: Sequence[Pending],
        *,
        host: Sequence[torch.Tensor],
    ) -> StreamTransfer:
        if way not in self._lanes:
            self._lanes[way] = StreamLane(self._device, f"zinf {way}", link=way, most=MOST_COPIES, forgiving=True)
        count = sum(source.nbytes for source in sources)
        for meter in self._meters:
            meter.moved(way, count)

        def copy() -> None:
            with timing(self._meters, way, count):
                _copy(sources, into)

        return self._lanes[way].submit(copy, after=after, host_memory=host)

    def _readers(self, host: Sequence[torch.Tensor]) -> list[StreamTransfer]:
        lane = self._lanes.get(_TO_DEVICE)
        return [] if lane is None else lane.readers(host)


def _copy(sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    if len(sources) == 1:
        into[0].copy_(sources[0], non_blocking=True)
    else:
        torch._foreach_copy_(list(into), list(sources), non_blocking=True)
