"""The columns of a chunk of an optimizer's step, and the bytes of a buffer for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from .formats import format_of
from .sizes import PAGE, Sides, round_up
from .tiers import Tier, Topology

VALUE, GRADIENT = "parameter", "gradient"
"""Names of the columns beside the states'."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Memory in a chunk buffer for elements of one type, on the sides where they are needed."""

    dtype: torch.dtype
    host: bool
    device: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTiers:
    """The tiers of a chunk's columns, and the side on which they are updated."""

    params: Tier
    grads: Tier
    optimizer: Tier
    topology: Topology
    update_on_device: bool

    def buffers(self, tier: Tier) -> tuple[bool, bool]:
        """Say whether what lives on a tier needs memory on the host, and on the device, while it is updated."""
        return self.topology.step_buffers(tier, update_on_device=self.update_on_device)


def chunk_columns(
    tiers: StepTiers, *, value: torch.dtype, gradient: torch.dtype, states: Mapping[str, torch.dtype]
) -> dict[str, Column]:
    """Return what passes through a buffer: the states, the parameter's values and its gradient."""
    columns = {name: Column(dtype, *tiers.buffers(tiers.optimizer)) for name, dtype in states.items()}
    columns[VALUE] = Column(value, *tiers.buffers(tiers.params))
    sides = [tiers.buffers(where) for where in (Tier.DEVICE, tiers.grads)]  # a user's own gradient is on the device
    columns[GRADIENT] = Column(gradient, any(host for host, _ in sides), any(device for _, device in sides))
    return columns


def buffer_bytes(columns: Iterable[Column], numel: int) -> Sides:
    """Return the bytes of a buffer for a chunk of `numel` elements, each column from a page on."""
    device = host = 0
    for column in columns:
        size = round_up(format_of(column.dtype).bytes(numel), PAGE)
        device += size * column.device
        host += size * column.host
    return Sides(device, host)
