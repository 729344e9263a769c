"""Memory of an accelerator that libraries take at the first matrix products and then keep.

These are cuBLAS's workspaces, one for each thread that computes and each of its streams. PyTorch's allocator counts them as
tensors. What is promised of `device_memory` has to know them before the first step.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from .process_wide import process_wide

_TYPES = (torch.float32, torch.bfloat16)
"""Products of these types are computed by different libraries, or by different parts of one."""

_taken: set[tuple[torch.device, int]] = process_wide(set())
"""Devices and streams whose workspaces there are."""


def take_workspaces(device: torch.device) -> None:
    """Have libraries take their workspaces for this thread's current stream, here and on autograd's thread, once.

    An H100 gives 64 MiB to them: 32 MiB to the thread of the forward, as much to that of the backward.
    """
    if device.type == "cpu":
        return
    key = device, torch.accelerator.current_stream(device).stream_id
    if key in _taken:
        return
    _taken.add(key)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for dtype in _TYPES:
            # What autograd's thread still holds when its caller goes on is a gradient in host memory: nothing that is measured.
            one = torch.ones((), device="cpu", requires_grad=True)
            weight = one.to(device, dtype).expand(16, 16)
            product = functional.linear(torch.ones_like(weight), weight, torch.ones(16, dtype=dtype, device=device))
            torch.autograd.grad(product.sum(), one)
