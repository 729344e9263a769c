"""A closed context has nothing of its link to the device any more."""

from __future__ import annotations

from unittest.mock import Mock

import torch

from zinf_compile.runtime.close_context import close_context
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.device.link import AcceleratorLink
from zinf_compile.runtime.device.simulated import SimulatedDevice
from zinf_compile.runtime.memory.device_arena import DeviceArena


def test_lanes_of_an_accelerator_end() -> None:
    device = torch.device("cuda")
    link = AcceleratorLink(device, DeviceArena(device))
    context = Context(None, torch.device("cpu"), timeout_s=1.0, link=link)
    lane = link._lanes["host to device"] = Mock()  # as at its first copy, for which a GPU is needed
    close_context(context)
    lane.close.assert_called_once_with()
    assert not link._lanes


def test_a_simulated_device_counts_for_contexts_that_live() -> None:
    device = SimulatedDevice()
    gone, left = (Context(None, torch.device("cpu"), timeout_s=1.0, link=device) for _ in range(2))
    meter = left.lanes.meter
    close_context(gone)
    assert [link.meters for link in device.links.values()] == [[meter], [meter]]
    device.to_host(torch.ones(3), torch.empty(3), None).wait()
    assert meter.report()["device to host"]["bytes"] == 12
