"""Memory of an accelerator that libraries take at the first matrix products and then keep.

These are cuBLAS's workspaces, one for each thread that computes and each of its streams. PyTorch's allocator counts them as
tensors. A cap on `device_memory` has to allow for them before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .process_wide import process_wide

_TYPES = (torch.float32, torch.bfloat16)
"""Products of these types are computed by different libraries, or by different parts of one."""

_taken: set[tuple[torch.device, int]] = process_wide(set())
"""Devices and streams whose workspaces there are."""


def take_workspaces(device: torch.device) -> None:
    """Have libraries take their workspaces for this thread's current stream, here and on autograd's thread, once.

    On an H100 they are 66 MiB: for each of the two threads cuBLAS takes 32 MiB, and 1 MiB for products with a bias, which a
    backward computes where activations are made again.
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
            torch.autograd.grad(_Multiply.apply(one.to(device, dtype)), one)


class _Multiply(torch.autograd.Function):
    """Multiplies matrices, without a bias and with one, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        return _multiply(one)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _multiply(gradients[0])


def _multiply(one: torch.Tensor) -> torch.Tensor:
    matrix, bias = one.expand(16, 16).contiguous(), one.expand(16).contiguous()
    return functional.linear(functional.linear(matrix, matrix), matrix, bias).sum()
