"""How many chunks of a step have memory at a time under the caps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from zinf_compile.errors import BudgetError
from zinf_compile.ir.chunk_columns import Column
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import CHUNK_BUFFERS, Sides
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.transfer.chunk_buffers import largest_buffer
from zinf_compile.sharded.budget_checks import check_states
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import Kept
from .step_gradient import check_gradients

Shapes = Sequence[tuple[Mapping[str, Column], int]]
"""The columns and the elements of each chunk."""


def buffers_within_budget(context: Context, name: str, tier: Tier, kept: Mapping[ShardedParameter, Kept], shapes: Shapes) -> int:
    """Return how many chunks fit in memory, for the optimizer of this class `name`; raise `BudgetError` if not even one does.

    `tier`: that of the states, `kept` by each parameter.
    """
    most = min(context.memory.reservations.chunk_buffers or CHUNK_BUFFERS, len(shapes))
    for count in range(most, 1, -1):
        with contextlib.suppress(BudgetError):
            _check(context, name, tier, kept, shapes, count)
            return count
    _check(context, name, tier, kept, shapes, 1)
    return 1


def buffers_for(
    context: Context, name: str, tier: Tier, kept: Mapping[ShardedParameter, Kept], shapes: Shapes, again: bool
) -> int:
    """Return the same, once gradients on their way to a tier are there; `again`: states were counted before."""
    if again:
        return buffers_within_budget(context, name, tier, {}, shapes)
    check_gradients(kept)  # in-flight gradients would be counted on the device
    return buffers_within_budget(context, name, tier, kept, shapes)


def _check(context: Context, name: str, tier: Tier, kept: Mapping[ShardedParameter, Kept], shapes: Shapes, count: int) -> None:
    device, host = (size * count for size in largest_buffer(shapes))
    bytes_of = ((p._zinf_unit.shard_numel, states) for p, states in kept.items())
    states = sum(format_of(dtype).bytes(numel) for numel, each in bytes_of for dtype in each.values())
    on_device = states if tier == Tier.DEVICE else 0
    on_host = states if tier == Tier.HOST else 0
    topology = context.link.topology
    held, buffers = topology.counted(Sides(on_device, on_host)), topology.counted(Sides(device, host))
    check_states(context, on_device=True, states=held.device, slots=buffers.device, name=name)
    if topology.host_apart:
        check_states(context, on_device=False, states=held.host, slots=buffers.host, name=name)
