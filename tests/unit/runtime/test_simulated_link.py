"""The links of a simulated device: what is copied together is one transfer, as on an accelerator."""

from __future__ import annotations

import threading

import torch

from zinf_compile.runtime.device.simulated import SimulatedDevice


def test_what_is_copied_together_is_one_transfer() -> None:
    device = SimulatedDevice(latency_s=0.001)
    sources = [torch.full((size,), float(size)) for size in (3, 5, 0)]
    for way, copy in (("to device", device.to_device_together), ("to host", device.to_host_together)):
        into = [torch.zeros_like(source) for source in sources]
        copy(sources, into, ()).wait()
        assert all(map(torch.equal, into, sources))
        assert (len(device.links[way].spans), device.links[way].bytes) == (1, 32)


def test_a_schedule_may_issue_many_copies_before_the_first_is_over() -> None:
    """A graph goes on with its compute: what it loads ahead is bounded by its plan."""
    device, first, issued = SimulatedDevice(), threading.Event(), threading.Event()
    source, into = torch.ones(1), torch.zeros(300)

    class First:
        def wait(self) -> None:
            first.wait()

    def issue() -> None:
        pending = [device.to_device(source, into[n : n + 1], First()) for n in range(into.numel())]
        issued.set()
        for each in pending:
            each.wait()

    thread = threading.Thread(target=issue, daemon=True)
    thread.start()
    assert issued.wait(timeout=60.0)
    assert not into.any()
    first.set()
    thread.join()
    assert into.all()
