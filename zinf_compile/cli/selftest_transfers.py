"""Checks of the GPU self-test that only copy: host memory that is locked, the link's speed, and copies beside compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zinf_compile.runtime.device.link import AcceleratorLink
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import Meter
from zinf_compile.runtime.lanes.stream_lane import StreamLane
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.memory.device_arena import DeviceArena

from .selftest_check import Finding

COPIED_BYTES = 256 << 20
"""Of each copy that is timed."""
COPIES = 8
LEAST_SHARE = 0.8
"""Of a plain copy's speed that ours should have at least."""
LEAST_OVERLAP = 0.3
"""Of the shorter one of compute and copies that should be beside the other."""


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device=device, enable_timing=True)


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    """Return how long work takes that is ordered before and after by the current stream."""
    begin, end = _event(device), _event(device)
    torch.accelerator.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.accelerator.synchronize(device)
    return max(begin.elapsed_time(end) / 1e3, 1e-9)


def locked(device: torch.device) -> Finding:
    """Say whether the system locks our arenas, which `is_pinned` of PyTorch knows."""
    memory = aligned_buffer(COPIED_BYTES + 12345, pinned=True)
    there = memory.is_pinned()
    advice = "" if there else ": the system refuses, copies are slower and keep compute waiting; raise `ulimit -l`"
    return Finding(there, f"{memory.numel():,} bytes, exactly as asked for, {'locked' if there else 'not locked'}{advice}")


def speed(device: torch.device) -> Finding:
    """Compare our copies with a plain one of pinned memory, both ways."""
    link = AcceleratorLink(device, DeviceArena(device))
    meter = Meter()
    link.attach(meter)
    host, there = link.host_buffer(COPIED_BYTES, torch.uint8), link.device_buffer(COPIED_BYTES, torch.uint8)
    theirs = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)

    def plain(into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return lambda: _copy_all([(source, into)] * COPIES)

    def ours(copy: Callable[..., Pending], source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            for pending in [copy(source, into, None) for _ in range(COPIES)]:
                pending.wait()

        return work

    found, passed = [], True
    try:
        for way, mine, other in (
            ("to the device", ours(link.to_device, host, there), plain(there, theirs)),
            ("to the host", ours(link.to_host, there, host), plain(theirs, there)),
        ):
            _seconds(device, mine), _seconds(device, other)  # the first of each touches memory
            rates = [COPIED_BYTES * COPIES / min(_seconds(device, work) for _ in range(2)) / 1e9 for work in (mine, other)]
            passed = passed and rates[0] >= LEAST_SHARE * rates[1]
            found.append(f"{way} {rates[0]:.1f} GB/s, a plain copy {rates[1]:.1f}")
    finally:
        link.detach(meter)
    return Finding(passed, "; ".join(found))


def overlap(device: torch.device) -> Finding:
    """Time compute and a lane's copies by events on their streams; say how much of the shorter one was beside the other."""
    lane = StreamLane(device, "zinf selftest")
    width = 2048
    a = torch.ones(width, width, device=device)
    into, host = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device), aligned_buffer(COPIED_BYTES, pinned=True)
    times = {name: _event(device) for name in ("start", "compute begins", "compute ends", "copies begin", "copies end")}

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    multiply(2)
    copies_s = _seconds(device, lambda: _copy_all([(host, into)] * COPIES))
    count = max(4, min(4096, int(copies_s / (_seconds(device, lambda: multiply(4)) / 4))))
    torch.accelerator.synchronize(device)
    times["start"].record()

    def copy() -> None:
        times["copies begin"].record()
        _copy_all([(host, into)] * COPIES)
        times["copies end"].record()

    pending = lane.submit(copy, host_memory=[host])
    times["compute begins"].record()
    multiply(count)
    times["compute ends"].record()
    pending.wait()
    torch.accelerator.synchronize(device)
    lane.close()
    at = {name: times["start"].elapsed_time(event) for name, event in times.items() if name != "start"}
    beside = min(at["compute ends"], at["copies end"]) - max(at["compute begins"], at["copies begin"])
    shorter = max(1e-6, min(at["compute ends"] - at["compute begins"], at["copies end"] - at["copies begin"]))
    text = ", ".join(f"{name} at {ms:.1f} ms" for name, ms in at.items())
    return Finding(beside >= LEAST_OVERLAP * shorter, f"{max(0.0, beside) / shorter:.0%} of the shorter one: {text}")


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for source, into in pairs:
        into.copy_(source, non_blocking=True)
