"""What a scheduled graph moves and holds, in bytes per rank."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from zinf_compile import ops
from zinf_compile.program import Slot

from .facts import group_of, unit_of, wire_bytes, wire_type
from .verify import peak_gathered_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """One graph's account. A rank receives (and sends) N-1 of the N padded shards of a unit per transfer."""

    units: int
    gathered: int
    reduced: int
    live: int
    """The most bytes of full units held at once."""


def measure_traffic(graph: fx.Graph, *, world_size: int) -> Traffic:
    """Add up the graph's transfers for one of `world_size` ranks."""
    moved = {ops.all_gather: 0, ops.reduce_scatter: 0}
    units = set()
    for node in graph.nodes:
        if node.target in moved:
            moved[node.target] += bytes_moved(node, world_size=world_size)
            units.add(unit_of(node).index)
    live, _ = peak_gathered_bytes(graph)
    return Traffic(len(units), moved[ops.all_gather], moved[ops.reduce_scatter], live)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One unit's part in a transfer."""

    operator: str
    """all_gather or reduce_scatter."""
    group: int
    """Collectives of one operator and group are issued as one; -1: alone."""
    unit: Slot
    dtype: torch.dtype
    """As which the unit moves."""
    bytes: int
    """Of the whole unit, in that type."""
    moved: int
    """Bytes that this rank receives (and sends)."""


def list_collectives(graph: fx.Graph, *, world_size: int) -> tuple[Collective, ...]:
    """Return the graph's collectives in order, for one of `world_size` ranks."""
    return tuple(
        Collective(
            "all_gather" if node.target is ops.all_gather else "reduce_scatter",
            group_of(node),
            unit_of(node),
            wire_type(node),
            wire_bytes(node),
            bytes_moved(node, world_size=world_size),
        )
        for node in graph.nodes
        if node.target in (ops.all_gather, ops.reduce_scatter)
    )


def bytes_moved(node: fx.Node, *, world_size: int) -> int:
    """Return what one rank receives in a unit's gather, or sends in its gradient's reduce-scatter."""
    return math.ceil(unit_of(node).numel / world_size) * wire_type(node).itemsize * (world_size - 1)
