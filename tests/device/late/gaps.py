"""What PyTorch asks of devices by name and gets wrong for those outside of it, mended."""

from __future__ import annotations

import torch
from torch.utils.dlpack import DLDeviceType

_dlpack_device = torch.Tensor.__dlpack_device__


def _with_late(self: torch.Tensor) -> tuple[DLDeviceType, int]:
    """PyTorch looks for the name "privateuse1", which a backend with a name of its own has no more. [torch 2.13]"""
    return (DLDeviceType.kDLExtDev, 0) if self.device.type == "late" else _dlpack_device(self)


torch.Tensor.__dlpack_device__ = _with_late
