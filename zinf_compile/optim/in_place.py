"""Chunks that are updated where they live: their columns, which nothing has to be brought for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from zinf_compile.ir.chunk_columns import GRADIENT, VALUE
from zinf_compile.ir.pieces import Piece
from zinf_compile.runtime.device.link import DeviceLink
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import range_of
from .shard_state import shard_state
from .state_table import StateTable
from .step_gradient import StepGradient

Due = Sequence[tuple[int, ShardedParameter, Piece]]
"""The pieces of a chunk that a step updates, each behind its number in the chunk."""


def in_place(
    due: Sequence[Due],
    gradients: Mapping[ShardedParameter, StepGradient],
    table: StateTable,
    optimizer: Optimizer,
    link: DeviceLink,
) -> list[ChunkBuffer]:
    """Return for each chunk a buffer without memory, with the columns of its pieces, once no copy reads them any more.

    Copies may still read a parameter's values; a gradient's too, which a fused kernel may unscale in place.
    """
    buffers, read = list[ChunkBuffer](), list[torch.Tensor]()
    for pieces in due:
        buffer = ChunkBuffer.in_place()
        for place, parameter, piece in pieces:
            buffer.brought[place] = columns = _columns_of(parameter, piece, gradients[parameter], table, optimizer)
            read += columns[VALUE], columns[GRADIENT]
        buffers.append(buffer)
    link.wait_read(*read)
    return buffers


def _columns_of(
    parameter: ShardedParameter, piece: Piece, gradient: StepGradient, table: StateTable, optimizer: Optimizer
) -> dict[str, torch.Tensor]:
    unit, start, end = parameter._zinf_unit, piece.start, piece.end
    value = unit.shard if unit.backing is None else unit.resident
    grad = gradient.local() if gradient.offloaded is None else gradient.offloaded.backing.resident
    assert value is not None, "it is in memory"
    assert grad is not None, "it is in memory"
    columns = {VALUE: range_of(value, start, end), GRADIENT: range_of(grad, start, end)}
    given = {} if table.by_entry else table.given(parameter, optimizer) or {}
    for name in table.kept[parameter]:
        state = given.get(name)
        if isinstance(state, torch.Tensor):
            columns[name] = range_of(shard_state(state, unit, name, optimizer), start, end)
    return columns
