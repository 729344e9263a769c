"""Which pieces of an optimizer's parameters are updated together, and what each of them consists of."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch

from zinf_compile.ir.chunk_columns import Column, StepTiers, chunk_columns
from zinf_compile.runtime.transfer.move import Mover
from zinf_compile.runtime.units import pieces as chunks
from zinf_compile.runtime.units.pieces import Piece, chunk_end, cut_chunks
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

MASTER = "master"
"""Name of the state that is a parameter in higher precision."""

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
    """What passes through a buffer: the states, the parameter's values and its gradient."""


def plan_chunks(parameters: Sequence[ShardedParameter], kept: Sequence[Kept], mover: Mover, tier: str) -> list[Chunk]:
    """Cut parameters into chunks. `tier` is where the states live; parameters of one type and with like states go together."""
    made: list[Chunk] = []
    rows = [(p, dict(states), p._zinf_unit) for p, states in zip(parameters, kept, strict=True)]
    for _, same in itertools.groupby(rows, key=lambda row: (row[1], row[2].dtype, row[2].home is None)):
        members = list(same)
        states = members[0][1]
        columns = _columns(members[0][2], states, mover, tier)
        sizes, cuts = [unit.shard_numel for _, _, unit in members], [unit.cuts for _, _, unit in members]
        for pieces in cut_chunks(sizes, piece_numel=chunks.PIECE_NUMEL, cuts=cuts):
            owned = tuple((members[piece.shard][0], piece) for piece in pieces)
            first, last = owned[0][0]._zinf_unit.name, owned[-1][0]._zinf_unit.name
            name = f"{first} .. {last} (chunk {len(made)})" if first != last else f"{first} (chunk {len(made)})"
            made.append(Chunk(name, chunk_end(pieces), owned, states, columns))
    return made


def _columns(unit: Unit, states: Kept, mover: Mover, tier: str) -> dict[str, Column]:
    tiers = StepTiers(
        params="device" if unit.home is None else unit.home.tier,
        grads=unit.placement.grads,
        optimizer=tier,
        unified=mover.bridge.unified,
        update_on_device=mover.update_on_device,
    )
    return chunk_columns(tiers, value=unit.dtype, gradient=unit.reduce_dtype, states=states)


def part_of(view: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Cut a piece's part out of a chunk's column."""
    return view[piece.place : piece.place + piece.end - piece.start]
