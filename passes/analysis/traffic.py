"""Bytes that a scheduled graph moves over each link, and holds at its peak, per rank. Dumps and planning call it."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import COPY_IN, COPY_OUT, GATHER, LANES, READ, REDUCE, SPECS, WRITE, OpSpec, Volume
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.graph.node_facts import (
    argument_of,
    group_of,
    hop_of,
    is_collective,
    rows_bytes,
    slot_behind,
    values_behind,
    wire_bytes,
    wire_format,
    wire_type,
)
from zinf_compile.passes.verify import peak_gathered_bytes

from .saved_memories import bytes_together


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one graph by link, for one rank of N.

    Between ranks, a transfer of a unit receives (and sends) N-1 of its N padded shards. Over the other links a rank moves its own
    shard alone.
    """

    units: int
    gathered: int
    reduced: int
    read: int
    """From a drive to the host, or to a device that is host memory."""
    copied_in: int
    """From the host to the device."""
    copied_out: int
    """From the device to the host."""
    written: int
    """To a drive, from the host or the device."""
    live: int
    """Peak bytes of gathered units, counted as in `peak_gathered_bytes`."""


def measure_traffic(graph: fx.Graph, *, world_size: int) -> Traffic:
    """Add up the graph's transfers for one of `world_size` ranks."""
    moved = dict.fromkeys(LANES, 0)
    units = set()
    for node in graph.nodes:
        lane = lane_of(node)
        if lane is not None:
            moved[lane] += bytes_moved(node, world_size=world_size)
            if not values_behind(node):
                units.add(slot_behind(node).key)
            src = argument_of(node, "src")
            if node.target is ops.gather_rows and src not in (None, Tier.DEVICE):
                moved[COPY_IN if Tier(str(src)).in_memory else READ] += rows_bytes(node)
    live, _ = peak_gathered_bytes(graph)
    return Traffic(
        units=len(units),
        gathered=moved[GATHER],
        reduced=moved[REDUCE],
        read=moved[READ],
        copied_in=moved[COPY_IN],
        copied_out=moved[COPY_OUT],
        written=moved[WRITE],
        live=live,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One unit's collective."""

    operator: str
    """all_gather, gather_rows or reduce_scatter."""
    group: int
    """Collectives of one operator and group are issued as one; -1: no group."""
    unit: ParameterSlot
    dtype: torch.dtype
    """In which the unit moves."""
    bytes: int
    """Of the whole unit in that type; for gather_rows an upper bound of its rows."""
    moved: int
    """Bytes that this rank receives (and sends)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """One hop of a unit's shard, or of its gradient's."""

    operator: str
    """swap_in or swap_out."""
    src: str
    dst: str
    """Tiers: device, host or nvme."""
    unit: ParameterSlot
    moved: int
    """Bytes of this rank's shard."""


def list_collectives(graph: fx.Graph, *, world_size: int) -> tuple[Collective, ...]:
    """Return the graph's collectives in order, for one of `world_size` ranks."""
    return tuple(
        Collective(
            _operator(node),
            group_of(node),
            slot_behind(node),
            wire_type(node),
            rows_bytes(node) if _spec(node).volume is Volume.ROWS else wire_bytes(node),
            bytes_moved(node, world_size=world_size),
        )
        for node in graph.nodes
        if is_collective(node)
    )


def list_swaps(graph: fx.Graph, *, world_size: int) -> tuple[Swap, ...]:
    """Return the graph's swaps in order, for one of `world_size` ranks."""
    return tuple(
        Swap(_operator(node), *hop_of(node), slot_behind(node), bytes_moved(node, world_size=world_size))
        for node in graph.nodes
        if is_swap(node)
    )


def is_swap(node: fx.Node) -> bool:
    """Return whether the node moves a rank's own shard between two tiers."""
    return _spec(node).volume is Volume.SHARD


def lane_of(node: fx.Node) -> str | None:
    """Return the lane that serves a transfer; None for any other node."""
    lane = _spec(node).lane
    return lane(*hop_of(node)) if callable(lane) else lane


def bytes_moved(node: fx.Node, *, world_size: int) -> int:
    """Return the bytes that one rank moves: its own shard in a swap, the other ranks' shards in a gather or reduce-scatter.

    For gather_rows this is an upper bound: as many different rows as there are indices. Saved values move as a whole.
    """
    volume = _spec(node).volume
    if volume is Volume.VALUES:
        return bytes_together(values_behind(node))
    if volume is Volume.ROWS:
        return rows_bytes(node) * (world_size - 1) // world_size
    shard = wire_format(node).bytes(math.ceil(slot_behind(node).numel / world_size))
    return shard if volume is Volume.SHARD else shard * (world_size - 1)


_COMPUTE = OpSpec(name="compute", schema="", kernel=lambda: None)


def _spec(node: fx.Node) -> OpSpec:
    return SPECS.get(node.target, _COMPUTE)


def _operator(node: fx.Node) -> str:
    return str(node.target).split(".")[1]
