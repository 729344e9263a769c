"""Chunks: the pieces of an optimizer's parameters that are updated together, and the columns of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import torch

from zinf_compile.ir.chunk_columns import Column, StepTiers, chunk_columns
from zinf_compile.ir.pieces import BY_RANGE, Piece, chunk_end, cut_chunks
from zinf_compile.ir.sizes import SMALL_NUMEL
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.transfer.move import StagingBuffers, UpdateRoute
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

MASTER = "master"
"""Name of the state that holds a parameter in higher precision."""

Kept = Mapping[str, torch.dtype]
"""The states that an optimizer keeps for each element, and their types."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Pieces of parameters that are updated together."""

    name: str
    numel: int
    pieces: tuple[tuple[ShardedParameter, Piece], ...]
    states: Kept
    columns: Mapping[str, Column]
    """Columns of the chunk's buffer: the states, the parameter's values and its gradient."""

    @functools.cached_property
    def first_need(self) -> tuple[bool, int]:
        """What is less for a chunk that the next forward needs earlier: one with small shards, then one of earlier parameters."""
        first = self.pieces[0][0]._zinf_unit
        return first.shard_numel > SMALL_NUMEL, min(parameter._zinf_unit.serial for parameter, _ in self.pieces)


def plan_chunks(parameters: Sequence[ShardedParameter], kept: Sequence[Kept], route: UpdateRoute, tier: Tier) -> list[Chunk]:
    """Cut parameters into chunks, each of one data type and one set of states. `tier`: that of the states.

    No chunk has more elements than graphs have planned for, whatever the order of the parameters.
    """
    made: list[Chunk] = []
    rows = [(p, dict(states), p._zinf_unit) for p, states in zip(parameters, kept, strict=True)]
    for _, same in itertools.groupby(rows, key=_alike):
        members = list(same)
        states = members[0][1]
        columns = _columns(members[0][2], states, route, tier)
        sizes, cuts = [unit.shard_numel for _, _, unit in members], [unit.cuts for _, _, unit in members]
        piece_numel = members[0][2].placement.piece_numel
        divisions, rank = [BY_RANGE] * len(members), members[0][2].shard_group.rank
        planned = members[0][2].context.memory.reservations.chunk_numel
        for pieces in cut_chunks(sizes, piece_numel=piece_numel, chunk_numel=planned, cuts=cuts, divisions=divisions, rank=rank):
            owned = tuple((members[piece.shard][0], piece) for piece in pieces)
            first, last = owned[0][0]._zinf_unit.name, owned[-1][0]._zinf_unit.name
            name = f"{first} .. {last} (chunk {len(made)})" if first != last else f"{first} (chunk {len(made)})"
            made.append(Chunk(name, chunk_end(pieces), owned, states, columns))
    return made


def _alike(row: tuple[ShardedParameter, Kept, Unit]) -> tuple[object, ...]:
    _, states, unit = row
    return states, unit.dtype, unit.backing is None, unit.placement.piece_numel


def _columns(unit: Unit, states: Kept, route: UpdateRoute, tier: Tier) -> dict[str, Column]:
    tiers = StepTiers(
        params=Tier.DEVICE if unit.backing is None else unit.backing.tier,
        grads=unit.placement.grads,
        optimizer=tier,
        topology=route.link.topology,
        update_on_device=route.update_on_device,
    )
    return chunk_columns(tiers, value=unit.dtype, gradient=unit.reduce_dtype, states=states)


def part_of(view: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece's slice of a chunk's column."""
    return view[piece.place : piece.place + piece.end - piece.start]


def cut(staging: StagingBuffers, piece: Piece) -> StagingBuffers:
    """Return a piece's slices of a column's memory."""
    if staging.host is None and staging.device is None:
        return staging
    return StagingBuffers(*(None if buffer is None else part_of(buffer, piece) for buffer in (staging.host, staging.device)))


def range_of(whole: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return a range of a tensor's elements, flat; no view is made where that is all: each asks for the interpreter's lock."""
    flat = whole if whole.dim() == 1 else whole.view(-1)
    return flat if start == 0 and end == flat.numel() else flat[start:end]
