"""A simulated device, for machines without one and for plans of a device that isn't there: the CPU computes in its place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.lanes.lanes import All, Pending, ThreadLane
from zinf_compile.runtime.lanes.link_meter import Meter, under_way
from zinf_compile.runtime.memory.arena import GatherMemory

from .link import MOST_COPIES, DeviceLink

_FAST = 1e12
"""Bytes per second of a link whose speed is not set."""


class SimulatedLink:
    """One direction between host memory and a simulated device."""

    def __init__(self, name: str, *, bytes_per_s: float, latency_s: float) -> None:
        self.bytes = 0
        self.meters: list[Meter] = []
        """Meters that count its bytes, too."""
        self.name = name
        self.spans: list[tuple[float, float]] = []
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._lane = ThreadLane(f"zinf {name}", link=name, most=MOST_COPIES, forgiving=True)

    def copy(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Pending | None) -> Pending:
        """Start one transfer of all `sources`, behind `after`."""

        def run() -> None:
            if after is not None:
                after.wait()
            start, count = time.perf_counter(), sum(source.nbytes for source in sources)
            torch._foreach_copy_(list(into), list(sources))
            self.bytes += count
            for meter in self.meters:
                meter.moved(self.name, count)
            took = time.perf_counter() - start
            with under_way(self.meters, self.name, count):
                time.sleep(max(0.0, self._latency_s + count / self._bytes_per_s - took))
            self.spans.append((start, time.perf_counter()))
            for meter in self.meters:
                meter.busy(self.name, *self.spans[-1], count)

        return self._lane.submit(run)


class SimulatedDevice:
    """A device with memory of its own, behind two links, simulated by the CPU.

    Its buffers are counted, and so is what crosses each link, at a speed that can be set: then decisions are made by it, too.
    """

    topology = Topology(host_apart=True)
    copies_together = True

    def __init__(self, *, bytes_per_s: float | None = None, latency_s: float = 0.0) -> None:
        self._rate = bytes_per_s
        self.links = {
            "to device": SimulatedLink("host to device", bytes_per_s=bytes_per_s or _FAST, latency_s=latency_s),
            "to host": SimulatedLink("device to host", bytes_per_s=bytes_per_s or _FAST, latency_s=latency_s),
        }
        self.memory = GatherMemory()
        self.host_memory = GatherMemory()

    def attach(self, meter: Meter) -> None:
        """See `DeviceLink.attach`."""
        for link in self.links.values():
            link.meters.append(meter)

    def detach(self, meter: Meter) -> None:
        """See `DeviceLink.detach`; its own threads serve the next model."""
        for link in self.links.values():
            link.meters = [other for other in link.meters if other is not meter]

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceLink.host_buffer`."""
        return self.host_memory.lend(numel, dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype, *, lasting: bool = False) -> torch.Tensor:
        """See `DeviceLink.device_buffer`."""
        return self.memory.lend(numel, dtype)

    def device_buffers(self, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """See `DeviceLink.device_buffers`."""
        return [self.memory.lend(numel, dtype) for numel in numels]

    def clear(self) -> None:
        """See `DeviceLink.clear`; it serves the next model."""

    def rates(self) -> DeviceRates:
        """See `DeviceLink.rates`."""
        return DeviceRates() if self._rate is None else DeviceRates(to_device=self._rate, to_host=self._rate)

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_device`."""
        return self.links["to device"].copy([source], [into], after)

    def to_device_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending] = ()
    ) -> Pending:
        """See `DeviceLink.to_device_together`."""
        return self.links["to device"].copy(sources, into, All(after))

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        """See `DeviceLink.to_host`."""
        return self.links["to host"].copy([source], [into], after)

    def to_host_together(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Sequence[Pending]
    ) -> Pending:
        """See `DeviceLink.to_host_together`."""
        return self.links["to host"].copy(sources, into, All(after))

    def free_host_memory(self, enough: Callable[[], bool]) -> None:
        """See `DeviceLink.free_host_memory`; a copy holds no memory once who needs it has waited."""

    def wait_read(self, *host: torch.Tensor) -> None:
        """See `DeviceLink.wait_read`; who waits for a copy here waits for its end."""

    def reads_of(self, host: torch.Tensor) -> Sequence[Pending]:
        """See `DeviceLink.reads_of`."""
        return ()


_simulated: list[DeviceLink] = []


@contextlib.contextmanager
def simulating(device: DeviceLink) -> Iterator[DeviceLink]:
    """Context in which every model that is partitioned uses the simulated `device`."""
    _simulated.append(device)
    try:
        yield device
    finally:
        _simulated.remove(device)


def simulated_link(device: torch.device) -> DeviceLink | None:
    """Return the simulated device, inside `simulating`."""
    return _simulated[-1] if device.type == "cpu" and _simulated else None
