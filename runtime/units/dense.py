"""What lies in one stretch of memory, in some order of dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zinf_compile.ir.formats import StateFormat, format_of


class Dense:
    """Shape and strides of what is gathered: a parameter, or a tile of one."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = tuple(shape)
        self.stride = tuple(stride)
        self.dtype = dtype
        self.device = device
        self.numel = math.prod(self.shape)

    @property
    def format(self) -> StateFormat:
        """How its values are stored."""
        return format_of(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of it whole."""
        return self.format.bytes(self.numel)

    def logical(self, flat: torch.Tensor) -> torch.Tensor:
        """View a flat full tensor in the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """Lay a full tensor of the parameter's shape out flat in the parameter's order; copies only when it must."""
        if value.stride() != self.stride:
            value = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device).copy_(value)
        return value if self.stride == (1,) else value.as_strided((self.numel,), (1,))
