"""Rates of a device and of its link to host memory, as they were measured on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

TYPES = ("float32", "bfloat16", "float16")
"""Of the products that are measured, as PyTorch names them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What is known of a device; 0, or a type that isn't there, is not known."""

    to_device: float = 0.0
    """Bytes per second from host memory."""
    to_host: float = 0.0
    """Bytes per second to it."""
    flops: Mapping[str, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """Operations per second of large products, by type."""

    def row(self) -> list[float]:
        """Return the rates as numbers, which `of_row` reads."""
        return [self.to_device, self.to_host, *(self.flops.get(name, 0.0) for name in TYPES)]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> DeviceRates:
        """Return the rates of such a row."""
        to_device, to_host, *flops = row
        known = {name: rate for name, rate in zip(TYPES, flops, strict=True) if rate}
        return cls(to_device=to_device, to_host=to_host, flops=known)
