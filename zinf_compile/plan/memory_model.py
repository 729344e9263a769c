"""The one formula for memory: device and host bytes that the parameters of a graph take.

It counts everything that is checked against a cap before allocation: shards, reduced gradients, optimizer states, a chunk of the
step, and transient memory while a graph runs: of its transfers, and of its compute. The ledger of the runtime counts live memory
of all but compute; `tests/e2e/test_memory_model.py` compares both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from zinf_compile.ir.chunk_columns import Column, StepTiers, buffer_bytes, chunk_columns
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.pieces import chunk_end, cut_chunks
from zinf_compile.ir.placements import Placements, as_placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import BLOCK_BYTES, PAGE, PIECE_ALIGN, Sides, round_up
from zinf_compile.ir.tiers import Placement, Tier, Topology
from zinf_compile.ir.tiling import Box, tile_shape

from .compute_memory import NO_COMPUTE, ComputeMemory
from .graph_plan import GraphMemory, GraphPlan

Part = tuple[Tier, int, torch.dtype]
"""A shard: its tier, elements, and data type."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransientMemory:
    """Transient memory of one graph without prefetch, in bytes."""

    full: int
    """Peak of gathered units, in their own types, in which shards are swapped in."""
    widening: float
    """Ratio of their own bytes to those of the gather."""
    gathered: int
    """Device bytes of these and of the shards being gathered; 0 if compute reads the shards themselves."""
    rows: int
    """Rows of `gather_rows`."""
    left: int
    """Gradients of one region, until they reach their tier."""
    reduced: int
    """These, and those of the region before that are still in transfer."""
    converted: int
    """Gradients cast to the type of their reduction, unless `reduced` counts them."""
    compute: ComputeMemory
    """Activations and temporaries, where these count."""
    largest: str
    """Name of a gathered parameter, for messages."""
    on_device: float
    """Device bytes per byte of a prefetched full unit."""
    on_host: float
    """Host bytes per byte of a prefetched full unit."""
    least: Sides
    """Peak of the sum."""
    topology: Topology

    def with_plan(self, plan: GraphPlan) -> Sides:
        """Return the peak if the graph runs ahead as planned."""
        staging = self.topology.counted(Sides(0, plan.staging)).device
        return Sides(
            self.least.device + math.ceil(plan.ahead * self.on_device) + plan.reduced + staging,
            self.least.host + math.ceil(plan.ahead * self.on_host) + plan.staging,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Memory of one of `size` ranks for some parameters, in bytes."""

    size: int
    topology: Topology
    swaps: bool
    """Whether a shard has to be loaded to the device, and may be freed there before the next use."""
    passes_host: bool
    """Whether one passes host memory on its way."""
    leaves: bool
    """Whether a gradient leaves the device."""
    shards: Sides
    """Shards of parameters, without those that are allocated already, and full parameters that stay on the device."""
    gradients: Sides
    """One reduced gradient per trained parameter."""
    states: Sides
    """States of Adam, and master copies: an estimate until an optimizer's first step."""
    chunk: Sides
    """Largest chunk of the optimizer's step; where placements differ, one of each."""
    chunk_numel: int
    """Its elements. An optimizer that has the parameters in another order keeps to them as well."""
    offloading: int
    """Host bytes of one gradient, or of a tile's, that is written to a drive."""
    read: int
    """Host bytes of two gradients, or of two tiles', while they are added. A norm reads one."""
    normed: int
    """Device bytes of one gradient while its norm is computed, on a device with memory of its own."""
    staging: int
    """Host bytes of one block that isn't aligned to pages."""

    @property
    def resident(self) -> Sides:
        """Resident memory: shards, and gradients between backward and step."""
        return self.shards.plus(self.gradients)

    @property
    def added_by_steps(self) -> Sides:
        """Memory that the first steps add: states, and second gradients during accumulation."""
        return self.states.plus(self.gradients)

    def before_computing(self, largest: int) -> Sides:
        """Return the memory of partitioning: shards, gradients, one whole parameter of `largest` bytes, and staging."""
        whole = largest + self.staging
        return self.resident.plus(self.topology.counted(Sides(0, whole)))

    def transient(self, graph: GraphMemory, compute: ComputeMemory = NO_COMPUTE) -> TransientMemory:
        """Return the transient memory of a graph with these needs, of transfers and of compute."""
        size, swapped = self.size, self.swaps
        widening = graph.widening if swapped else 1.0
        full = math.ceil(graph.gathered * widening)
        on_device = max(1.0, 1 / widening + 1 / size) if swapped and size > 1 else 1.0  # a shard is freed after its gather
        on_host = 1 / size if self.passes_host else 0.0
        cast = graph.cast if swapped and size == 1 else 0
        moves = size > 1 or swapped
        gathered = math.ceil(full * on_device) + cast if moves or graph.narrowed else 0
        rows = graph.rows if moves else 0
        left, reduced = self._on_their_way(graph.left), self._on_their_way(graph.reduced)
        converted = 0 if reduced else graph.converted  # counted in `reduced` otherwise
        computing = gathered + rows + reduced + converted + compute.peak
        if not self.topology.host_apart:
            least = Sides(max(computing, self.read) + self.staging, 0)
        else:
            moving = math.ceil((full + rows) * on_host) + (self.offloading if graph.left else 0)
            least = Sides(max(computing, self.normed), max(moving, self.read) + self.staging)
        return TransientMemory(
            full=full,
            widening=widening,
            gathered=gathered,
            rows=rows,
            left=left,
            reduced=reduced,
            converted=converted,
            compute=compute,
            largest=graph.largest,
            on_device=on_device,
            on_host=on_host,
            least=least,
            topology=self.topology,
        )

    def _on_their_way(self, gradients: int) -> int:
        """Return the bytes of full gradients in transfer: with several ranks and tiers also of their shards."""
        if self.size == 1:
            return gradients if self.leaves else 0
        return math.ceil(gradients * (1 + 1 / self.size)) if self.leaves else gradients


def model_memory(
    slots: Sequence[ParameterSlot],
    placement: Placement | Placements,
    *,
    size: int,
    topology: Topology,
    held: Collection[int] = (),
    moved: Sequence[ParameterSlot] | None = None,
) -> MemoryModel:
    """Return the memory model of parameters on each of `size` ranks.

    `held`: the `ParameterSlot.index` of parameters whose shards are allocated already. `moved`: all parameters of a graph, if an
    earlier graph planned for some of them: they are missing in `slots`, but their transfers count.
    """
    placements = as_placements(placement)
    chunk_numel, chunk = step_chunk(slots, placements, size=size, topology=topology)
    moving = _kinds(slots if moved is None else moved, placements)
    homes = {kind.home for kind in moving} or {placements.rest}
    shards, gradients, states = held_memory(slots, placements, size=size, topology=topology, held=held)
    return MemoryModel(
        size=size,
        topology=topology,
        swaps=any(topology.is_offloaded(home.params) for home in homes),
        passes_host=any(topology.passes_host(home.params) for home in homes),
        leaves=any(topology.is_offloaded(home.grads) for home in homes),
        shards=shards,
        gradients=gradients,
        states=states,
        chunk=chunk,
        chunk_numel=chunk_numel,
        **_passing_gradients(moving, size=size, topology=topology),
        staging=_staging(moving, size=size, most=placements.rest.piece_numel),
    )


def held_memory(
    slots: Sequence[ParameterSlot],
    placements: Placements,
    *,
    size: int,
    topology: Topology,
    held: Collection[int] = (),
) -> tuple[Sides, Sides, Sides]:
    """Return the memory of shards, of one gradient per trained parameter, and of states, as `MemoryModel` has them.

    With the shards, full parameters that stay: in the parameter's type, of which a gather's is none that is wider.
    """
    shards, gradients, states = Counter[Part](), Counter[Part](), Counter[Part]()
    for slot, at, times, is_held in _kinds(slots, placements, held):
        n = shard_numel(slot.numel, size)
        if not is_held:
            shards[at.params, n, slot.dtype] += times
        shards[Tier.DEVICE, at.full_copy_numel(slot.numel, n, topology, tiled=slot.in_tiles), slot.dtype] += times
        if slot.requires_grad:
            gradients[at.grads, gradient_numel(slot, at, size), at.reduce_dtype_of(slot.dtype)] += times
            for dtype in adam_states(at, slot.dtype).values():
                states[at.optimizer, n, dtype] += times
    return _resident(shards, topology), _resident(gradients, topology), _resident(states, topology)


class _Kind(NamedTuple):
    """Parameters that are alike, and live alike."""

    slot: ParameterSlot
    """One of them."""
    home: Placement
    times: int
    is_held: bool
    """Whether their shards are allocated already."""


def _kinds(slots: Iterable[ParameterSlot], placements: Placements, held: Collection[int] = ()) -> list[_Kind]:
    """Return the kinds of parameters: equal blocks of a large model have few."""
    rows: dict[Hashable, list[ParameterSlot]] = {}
    for slot in slots:
        home = id(placements.own.get(slot.index, placements.rest))  # many parameters have the same, which take long to compare
        key = slot.shape, slot.dtype, slot.tiles, slot.tile is None, slot.requires_grad, slot.index in held, home
        rows.setdefault(key, []).append(slot)
    return [_Kind(each[0], placements.of(each[0]), len(each), each[0].index in held) for each in rows.values()]


def resident(parts: Iterable[Part], topology: Topology) -> Sides:
    """Sum the memory of shards. Those on a drive take none."""
    return _resident(Counter(parts), topology)


def _resident(parts: Mapping[Part, int], topology: Topology) -> Sides:
    sides = {Tier.DEVICE: 0, Tier.HOST: 0}
    for (tier, numel, dtype), count in parts.items():
        if (side := topology.side(tier)) is not None:
            sides[side] += count * format_of(dtype).bytes(numel)
    return Sides(sides[Tier.DEVICE], sides[Tier.HOST])


def shard_numel(numel: int, size: int) -> int:
    """Return the elements of a shard, with padding."""
    return math.ceil(numel / size)


def gradient_numel(slot: ParameterSlot, placement: Placement, size: int) -> int:
    """Return the elements of a parameter's gradient that a rank holds, see `Placement.gradient_numel`."""
    return placement.gradient_numel(slot.numel, shard_numel(slot.numel, size), tiled=slot.in_tiles)


def adam_states(placement: Placement, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return Adam's states of a parameter by name, and its master copy if it has one."""
    master = placement.master_of(dtype)
    kept = dict.fromkeys(("exp_avg", "exp_avg_sq"), master or dtype)
    return kept if master is None else {"master": master, **kept}


def step_chunk(
    slots: Sequence[ParameterSlot], placements: Placements, *, size: int, topology: Topology, least: int | None = None
) -> tuple[int, Sides]:
    """Return the elements of the largest chunk of an optimizer that has the parameters in this order, and the chunks' bytes.

    `least`: chunks may have that many elements, as another graph has planned for.

    Parameters of one placement are updated in chunks of their own, and have memory for these.
    """
    by_placement: dict[Placement, list[ParameterSlot]] = {}
    seen: dict[int, list[ParameterSlot]] = {}
    for slot in [slot for slot in slots if slot.requires_grad]:
        # by the objects first: many parameters have the same, which take long to compare
        placement = placements.own.get(slot.index, placements.rest)
        if id(placement) not in seen:
            seen[id(placement)] = by_placement.setdefault(placement.without_tiles, [])
        seen[id(placement)].append(slot)
    packed = (_packed_numel(alike, at, size=size, topology=topology) for at, alike in by_placement.items())
    largest = max([least or 0, *packed])  # what is planned for one is what all keep to
    sides = Sides(0, 0)
    for at, alike in by_placement.items():
        sides = sides.plus(_chunk_bytes(alike, at, largest, size=size, topology=topology))
    return largest, sides


def _packed_numel(trained: Sequence[ParameterSlot], placement: Placement, *, size: int, topology: Topology) -> int:
    """Return the elements of the largest chunk of parameters in this order."""
    largest, columns_of = 0, _columns_by_slot(placement, topology)
    for _, alike in itertools.groupby(trained, key=columns_of):
        parts = tuple(_parts_numel(slot.numel, slot.tiles, size) for slot in alike)
        largest = max(largest, _largest_chunk(parts, placement.piece_numel))
    return largest


def _chunk_bytes(
    trained: Sequence[ParameterSlot], placement: Placement, chunk_numel: int, *, size: int, topology: Topology
) -> Sides:
    """Return the bytes of a chunk of at most `chunk_numel` elements, in whatever order an optimizer has the parameters."""
    kinds: dict[tuple[Column, ...], list[tuple[int, ...]]] = {}
    columns_of = _columns_by_slot(placement, topology)
    for slot in trained:
        kinds.setdefault(columns_of(slot), []).append(_parts_numel(slot.numel, slot.tiles, size))
    sides = Sides(0, 0)
    for columns, parts in kinds.items():
        most = _most_numel(tuple(sorted(parts)), placement.piece_numel, chunk_numel)
        sides = Sides(*map(max, sides, buffer_bytes(columns, most)))  # more elements take no less
    return topology.counted(sides)


def _columns_by_slot(placement: Placement, topology: Topology) -> Callable[[ParameterSlot], tuple[Column, ...]]:
    tiers = StepTiers(
        params=placement.params,
        grads=placement.grads,
        optimizer=placement.optimizer,
        topology=topology,
        update_on_device=placement.update_on_device,
    )
    known: dict[Hashable, tuple[Column, ...]] = {}

    def columns_of(slot: ParameterSlot) -> tuple[Column, ...]:
        key = bool(slot.shape), bool(slot.numel), slot.dtype  # all that the columns depend on
        if key not in known:
            known[key] = _columns(placement.of_parameter(dim=len(slot.shape), numel=slot.numel), tiers, slot.dtype)
        return known[key]

    return columns_of


@lru_cache(maxsize=256)
def _largest_chunk(parts: tuple[tuple[int, ...], ...], piece_numel: int) -> int:
    """Return the elements of the largest chunk of shards with these parts: many homes that are tried have the same groups."""
    cuts = [list(itertools.accumulate(each))[:-1] for each in parts]
    chunks = cut_chunks([sum(each) for each in parts], piece_numel=piece_numel, cuts=cuts)
    return max(map(chunk_end, chunks), default=0)


@lru_cache(maxsize=256)
def _most_numel(parts: tuple[tuple[int, ...], ...], piece_numel: int, chunk_numel: int) -> int:
    """Return the most elements that a chunk of shards with these parts has in any order: a piece of each, up to `chunk_numel`."""
    pieces = [round_up(min(max(each), piece_numel), PIECE_ALIGN) for each in parts]
    return min(sum(pieces), max(*pieces, min(piece_numel, chunk_numel))) if pieces else 0


@cache
def _columns(own: Placement, tiers: StepTiers, dtype: torch.dtype) -> tuple[Column, ...]:
    columns = chunk_columns(tiers, value=dtype, gradient=own.reduce_dtype_of(dtype), states=adam_states(own, dtype))
    return tuple(columns.values())


def _passing_gradients(kinds: Iterable[_Kind], *, size: int, topology: Topology) -> Mapping[str, int]:
    """Return the memory of gradients that leave the device or are read back, by field of `MemoryModel`."""
    trained = [(slot, own) for slot, own, *_ in kinds if slot.requires_grad and topology.is_offloaded(own.grads)]
    parts = [(slot, own.grads, own.reduce_dtype_of(slot.dtype)) for slot, own in trained]
    sizes = [(slot, tier, format_of(dtype).bytes(_part_numel(slot, size))) for slot, tier, dtype in parts]
    largest = max((count for *_, count in sizes), default=0)
    whole = max((count for slot, _, count in sizes if not slot.tiles), default=0)
    return {
        "offloading": max((count for _, tier, count in sizes if not tier.in_memory), default=0),
        "read": 2 * largest,
        "normed": whole if size == 1 and topology.host_apart else 0,
    }


def _part_numel(slot: ParameterSlot, size: int) -> int:
    return max(_parts_numel(slot.numel, slot.tiles, size))


@lru_cache(maxsize=4096)
def _parts_numel(numel: int, tiles: tuple[Box, ...], size: int) -> tuple[int, ...]:
    """Return the elements of a rank's shards of all tiles, or of the one shard of what isn't tiled."""
    return tuple(shard_numel(math.prod(tile_shape(box)), size) for box in tiles) or (shard_numel(numel, size),)


def _staging(kinds: Iterable[_Kind], *, size: int, most: int) -> int:
    own = [(slot, at) for slot, at, *_ in kinds]
    on_drives = [(slot, slot.dtype) for slot, at in own if not at.params.in_memory]
    on_drives += [(slot, at.reduce_dtype_of(slot.dtype)) for slot, at in own if slot.requires_grad and not at.grads.in_memory]
    pieces = [format_of(dtype).bytes(min(shard_numel(slot.numel, size), most)) for slot, dtype in on_drives]
    return max((min(BLOCK_BYTES, round_up(piece, PAGE)) for piece in pieces), default=0)
