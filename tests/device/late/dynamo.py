"""The device as torch.compile asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

from . import torch_module


class LateInterface(DeviceInterface):
    Event = torch.Event
    Stream = torch.Stream
    device = torch_module.device

    current_device = staticmethod(torch_module.current_device)
    set_device = staticmethod(torch_module.set_device)
    device_count = staticmethod(torch_module.device_count)
    is_available = staticmethod(torch_module.is_available)
    current_stream = staticmethod(torch_module.current_stream)
    set_stream = staticmethod(torch_module.set_stream)
    synchronize = staticmethod(torch_module.synchronize)
    is_bf16_supported = staticmethod(torch_module.is_bf16_supported)

    @staticmethod
    def exchange_device(device: int) -> int:
        return 0

    @staticmethod
    def maybe_exchange_device(device: int) -> int:
        return 0

    @staticmethod
    def get_raw_stream(device_index: int) -> int:
        return torch_module.current_stream().stream_id

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return None


register_interface_for_device("late", LateInterface)
register_interface_for_device("late:0", LateInterface)
