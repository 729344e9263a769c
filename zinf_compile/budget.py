"""Whether a model fits within the caps, and how far ahead its transfers may run there."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .config import Config, parse_bytes
from .errors import BudgetError
from .limits import ranks_of_node, usable_bytes
from .parameter import ShardedParameter, unit_of
from .passage import measure_passage
from .passes import BUCKETS_GATHERED, BUCKETS_ON_THE_WAY
from .passes.needs import measure_needs
from .program import Slot
from .runtime import chunks
from .runtime.chunk_slots import SLOTS
from .runtime.claims import Claim
from .runtime.context import Context
from .runtime.ledger import Ledger
from .runtime.mover import Mover
from .runtime.placement import Placement, way_in
from .runtime.store import STAGING_BYTES
from .runtime.tile import Tile
from .runtime.unit import Unit

BUCKETS_REDUCED = 4
"""Full gradients on their way to their tier or to other ranks, where there is room for as many."""


_unplanned: weakref.WeakSet[Unit] = weakref.WeakSet()
"""Units that were made before any graph: nothing has planned for their gradients and updates yet."""


def plan_later(units: Iterable[Unit]) -> None:
    """Let the first graph that uses these units plan for their gradients and updates."""
    _unplanned.update(units)


def bucket_of(config: Config, slots: Sequence[Slot]) -> int:
    """Return the bytes that move together in a graph: no more than a tile, where some parameter is cut into tiles."""
    tile = config.tile_bytes if any(slot.tiles for slot in slots) else None
    return config.bucket_bytes if tile is None else min(config.bucket_bytes, tile)


@dataclasses.dataclass(frozen=True)
class Caps:
    """What this rank may hold, in bytes, and who says so."""

    device: int
    host: int
    device_source: str
    host_source: str


def agree_on_memory(context: Context) -> None:
    """Let several ranks go by the memory of the one that has least: plans must not differ. Collective, once for each context."""
    if context.size > 1 and context.usable is None:
        mine = torch.tensor(usable_bytes(context.device), dtype=torch.float64)
        device, host = context.exchange(mine, what="the memory that each rank may use").amin(0).tolist()
        context.usable = int(device), int(host)


def find_caps(config: Config, context: Context, *, held: int) -> Caps:
    """Return the caps of this rank: those declared, otherwise what the process may use, `held` bytes included."""
    device = context.device
    usable_device, usable_host = context.usable or usable_bytes(device)
    declared = None if config.device_memory is None else parse_bytes(config.device_memory, option="device_memory")
    of_node = None if config.host_memory is None else parse_bytes(config.host_memory, option="host_memory")
    host = usable_host + held if of_node is None else of_node // ranks_of_node()
    host_source = "what this process may use" if of_node is None else f"option host_memory, for {ranks_of_node()} ranks of a node"
    if declared is not None:
        return Caps(declared, host, "option device_memory", host_source)
    if device.type == "cpu":
        return Caps(host, host, host_source, host_source)
    return Caps(usable_device + held, host, "what this process may use", host_source)


@dataclasses.dataclass(frozen=True)
class Resident:
    """What stays on the device, and in host memory beside it, in bytes."""

    device: int
    host: int
    slot_device: int
    """Of one chunk during a step."""
    slot_host: int
    later: int
    """On the device, of what isn't known before the first step: a guess, Adam's two states of each, a master copy where there is
    one, and a second gradient."""
    later_host: int
    """The same, in host memory beside it."""


def measure_resident(
    slots: Sequence[Slot], placement: Placement, context: Context, *, size: int, held: Collection[int] = ()
) -> Resident:
    """Add up what a captured graph's parameters, gradients and chunks take where they live; states come with their optimizer.

    The shards of those in `held`, by `Slot.index`, are on the account already.
    """
    unified = context.bridge.unified
    sides = {"device": 0, "host": 0}
    largest = total = 0
    for slot in slots:
        shard = math.ceil(slot.numel / size)
        place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
        own = () if slot.index in held else ((place.params, slot.dtype),)
        reduced = ((place.grads, place.reduce_dtype_of(slot.dtype)),) if slot.requires_grad else ()
        for tier, dtype in (*own, *reduced):
            if tier != "nvme":
                sides["device" if unified else tier] += shard * dtype.itemsize
        if slot.requires_grad:
            largest = max(largest, min(shard, chunks.PIECE_NUMEL))
            total += -(-shard // chunks.ALIGN) * chunks.ALIGN
    numel = min(-(-max(largest, chunks.PIECE_NUMEL) // chunks.ALIGN) * chunks.ALIGN, total)
    mover = Mover(context.bridge, update_on_device=placement.update_on_device)
    rooms = [0, 0]
    values, gradients, kept = (mover.needs(tier) for tier in (placement.params, placement.grads, placement.optimizer))
    brought = mover.needs("device")  # where a user's own gradient is
    for side in range(2):
        rooms[side] = 4 * numel * (values[side] + (gradients[side] or brought[side]) + 2 * kept[side])
    later = {"device": 0, "host": 0}
    for slot in slots:
        if slot.requires_grad:
            place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
            master, second = place.master_of(slot.dtype), place.reduce_dtype_of(slot.dtype).itemsize
            states = 2 * slot.dtype.itemsize if master is None else 3 * master.itemsize
            for size_of_one, tier in ((states, place.optimizer), (second, place.grads)):
                if tier != "nvme":
                    later["device" if unified else tier] += math.ceil(slot.numel / size) * size_of_one
    return Resident(sides["device"], sides["host"], rooms[1], rooms[0], later["device"], later["host"])


def check_shards(config: Config, slots: Sequence[Slot], context: Context) -> None:
    """Raise `BudgetError` where the shards of parameters about to be made, and one of them whole, exceed a cap."""
    agree_on_memory(context)
    caps = find_caps(config, context, held=context.ledger.total()[0])
    resident = measure_resident(slots, config.placement(), context, size=context.size)
    largest = max(slots, key=lambda slot: slot.bytes)
    unified = context.bridge.unified
    cap = min(caps.device, caps.host) if unified else caps.device
    staging = measure_passage(slots, config.placement(), size=context.size, unified=unified).staging
    here = resident.device + (largest.bytes + staging if unified else 0)
    needed = here + held_bytes(context.ledger, here, cap)
    if needed > cap:
        raise BudgetError(
            f"the model needs {needed:,} bytes on {context.device} of each rank before anything is computed: {resident.device:,} "
            f"of parameters and gradients that stay there, and {largest.name} whole{_blocks(staging)}. {cap:,} are allowed ("
            f"{caps.device_source if cap == caps.device else caps.host_source}); the smallest that works is {needed:,}. "
            "params and grads on 'host' or 'nvme' keep less there"
        )
    here = resident.host + largest.bytes + staging
    host = here + (0 if unified else held_bytes(context.host_ledger, here, caps.host))
    if not unified and host > caps.host:
        raise BudgetError(
            f"the model needs {host:,} bytes of host memory for each rank before anything is computed: {resident.host:,} of "
            f"parameters and gradients, and {largest.name} whole{_blocks(staging)}. {caps.host:,} are allowed "
            f"({caps.host_source}); the smallest host_memory that works is {host * ranks_of_node():,}. 'nvme' for params and "
            "grads keeps less there"
        )
    if staging and not context.claims.staging:
        context.staging.limit(min(STAGING_BYTES, staging + (cap - needed if unified else caps.host - host)))


def _blocks(staging: int) -> str:
    return f", and {staging:,} for blocks on their way to a drive" if staging else ""


class Spare:
    """What is left within the caps, for what is better with more memory."""

    def __init__(self, device: int, host: int | None) -> None:
        self._device, self._host = device, host

    def take(self, most: int, device: float, host: float = 0) -> int:
        """Take as many as there is room for, of what takes so much on the device and in host memory, and return how many."""
        rows = [(self._device, device + host)] if self._host is None else [(self._device, device), (self._host, host)]
        count = max(0, min([most, *(int(left / one) for left, one in rows if one)]))
        self._device -= math.ceil(count * rows[0][1])
        self._host = None if self._host is None else self._host - math.ceil(count * host)
        return count


@dataclasses.dataclass(frozen=True)
class _Side:
    """Of the device, or of host memory beside it: the cap, what passes at least, and what is left besides that."""

    cap: int
    passing: int
    spare: int


class GraphBudget:
    """The caps as one captured graph meets them; `limits` decides how far its gathers and reads run ahead.

    Forward and backward are both planned before `check` speaks: the smallest cap that it names is that of both. `caps` are by
    default those of this process.
    """

    def __init__(
        self, config: Config, slots: Sequence[Slot], inputs: Sequence[Any], context: Context, *, caps: Caps | None = None
    ) -> None:
        fresh = [slot for slot in slots if not isinstance(inputs[slot.index], ShardedParameter)]
        units = {slot.index: unit for slot in slots if (unit := unit_of(inputs[slot.index])) is not None}
        self._units = {index: unit for index, unit in units.items() if unit in _unplanned}
        born = self._units.keys()
        whole = sum(slot.bytes for slot in fresh)
        self.caps = caps or find_caps(config, context, held=whole + context.ledger.total()[0])
        self._short: list[tuple[int, str]] = []
        self._claims: list[Claim] = []
        """What the graph may hold; counts for as long as this object lives, which is as long as what was compiled."""
        self._checked = False
        cut = config.tile is None and any(slot.tiles for slot in slots)
        self._tiles = f" with option tile={config.tile_bytes}, as here" if cut else ""
        self._context, self._bucket, self._placement = context, bucket_of(config, slots), config.placement()
        known = [slot for slot in slots if slot in fresh or slot.index in born]
        self._resident = measure_resident(known, self._placement, context, size=context.size, held=born)
        self._passage = measure_passage(slots, self._placement, size=context.size, unified=context.bridge.unified)
        self._swapped = bool(way_in(self._placement.params, unified=context.bridge.unified))
        self._away = self._placement.grads == "nvme" or (self._placement.grads == "host" and not context.bridge.unified)

    def limits(self, graph: fx.Graph) -> tuple[int, int]:
        """Return how many bytes may be gathered, and how many gathered or on the way."""
        context, resident, size = self._context, self._resident, self._context.size
        needs = measure_needs(graph)
        reduced, left = (self._on_their_way(gradients) for gradients in (needs.reduced, needs.left))
        converted = 0 if reduced else needs.converted  # in `reduced`, where there is any
        widening = needs.widening if self._swapped else 1.0
        full = math.ceil(needs.gathered * widening)  # in the units' own types, in which shards arrive
        share = max(1.0, 1 / widening + 1 / size) if self._swapped and size > 1 else 1.0  # a shard stays until it is gathered
        cast = needs.cast if self._swapped and size == 1 else 0
        looked_up = needs.rows if size > 1 or self._swapped else 0
        gathered = math.ceil(full * share) + cast if size > 1 or self._swapped or needs.narrowed else 0
        from_drive = 1 / size if self._placement.params == "nvme" and not context.bridge.unified else 0.0
        device = self._check_device(gathered + looked_up, reduced + converted, needs.largest)
        host = self._check_host(math.ceil((full + looked_up) * from_drive), self._passage.leaving if needs.left else 0)
        spare = Spare(device.spare, None if context.bridge.unified else host.spare)
        slots = 1 + spare.take(SLOTS - 1, resident.slot_device, resident.slot_host)
        widest = max(BUCKETS_ON_THE_WAY * self._bucket, math.ceil(BUCKETS_GATHERED * self._bucket * widening))
        ahead = spare.take(widest - full, share, from_drive) if gathered else 0
        flight = spare.take(BUCKETS_REDUCED * self._bucket - reduced, 1) if reduced else 0
        staging = spare.take(STAGING_BYTES - self._passage.staging, 0, 1) if self._passage.staging else 0
        passing = math.ceil(ahead * share) + flight + (staging if context.bridge.unified else 0)
        claims = context.claims
        claims.device_cap, claims.host_cap = device.cap, self.caps.host
        claim = Claim(
            passing=device.passing + passing,
            left=left,
            reduced=reduced + flight,
            slots=slots,
            passing_host=host.passing + math.ceil(ahead * from_drive) + staging,
            staging=self._passage.staging + staging or None,
        )
        self._claims.append(claim)
        claims.add(claim)
        context.gradient_room.limit = claims.on_the_way
        context.staging.limit(claims.staging or STAGING_BYTES)
        if not gathered:  # what is used is held anyway
            return BUCKETS_GATHERED * self._bucket, BUCKETS_ON_THE_WAY * self._bucket
        return min(int((full + ahead) / widening), BUCKETS_GATHERED * self._bucket), full + ahead

    def _on_their_way(self, gradients: int) -> int:
        """Return what full gradients take until they are where they live: themselves, and with ranks and tiers shards besides."""
        size = self._context.size
        if size == 1:
            return gradients if self._away else 0
        return math.ceil(gradients * (1 + 1 / size)) if self._away else gradients

    def _check_device(self, gathered: int, reduced: int, largest: str) -> _Side:
        context, resident, passage = self._context, self._resident, self._passage
        unified = context.bridge.unified
        cap = min(self.caps.device, self.caps.host) if unified else self.caps.device
        slot = resident.slot_device + (resident.slot_host if unified else 0)
        besides = passage.read if unified else passage.on_device
        passing = max(gathered + reduced, besides) + (passage.staging if unified else 0)
        here = resident.device + slot + passing
        least = here + held_bytes(context.ledger, here, cap)
        if least > cap:
            source = self.caps.device_source if cap == self.caps.device else self.caps.host_source
            self._fall_short(
                least,
                f"the model needs {least:,} bytes on {context.device} of each rank: {least - slot - passing:,} stay there "
                f"(parameters and gradients whose tier that is), {gathered:,} are gathered at once (with "
                f"{largest or 'nothing'}), {reduced:,} are full gradients on their way, {slot:,} one chunk of the optimizer's "
                f"step, {passing - gathered - reduced:,} for gradients read back and blocks on their way to a drive. {cap:,} are "
                f"allowed ({source}); the smallest that works is {least:,}{self._tiles}. A smaller `bucket` gathers less at "
                "once; params, grads and optimizer on 'host' or 'nvme' keep less there",
            )
        return _Side(cap, passing, max(0, cap - least - resident.later))

    def _check_host(self, read: int, leaving: int) -> _Side:
        """`read`: of parameters on their way from a drive; `leaving`: of a gradient on its way to one."""
        context, resident, passage, cap = self._context, self._resident, self._passage, self.caps.host
        if context.bridge.unified:
            return _Side(cap, 0, 0)
        passing = max(read + leaving, passage.read) + passage.staging
        here = resident.host + resident.slot_host + passing
        least = here + held_bytes(context.host_ledger, here, cap)
        if least > cap:
            fixed = least - resident.slot_host - passing
            self._fall_short(
                least,
                f"the model needs {least:,} bytes of host memory for each rank: {fixed:,} of parameters and gradients, "
                f"{passing:,} on their way from drives and to them, {resident.slot_host:,} for one chunk of the optimizer's "
                f"step. {cap:,} are allowed ({self.caps.host_source}); the smallest host_memory that works is "
                f"{least * ranks_of_node():,}. 'nvme' for params, grads or optimizer keeps less there",
            )
        return _Side(cap, passing, max(0, cap - least - resident.later_host))

    def check(self) -> None:
        """Raise `BudgetError` for the graph seen so far that needs most beyond a cap; from now on, at once for any other."""
        self._checked = True
        if self._short:
            raise BudgetError(max(self._short)[1])
        for unit in self._units.values():
            _unplanned.discard(unit)

    def _fall_short(self, needed: int, message: str) -> None:
        self._short.append((needed, message))
        if self._checked:
            raise BudgetError(message)


def check_states(context: Context, *, on_device: bool, states: int, slots: int, name: str) -> None:
    """Raise `BudgetError` where states in memory and chunks, about to be made, exceed a cap. Nothing was updated yet."""
    claims = context.claims
    on_device = on_device or context.bridge.unified
    ledger, cap = (context.ledger, claims.device_cap) if on_device else (context.host_ledger, claims.host_cap)
    if cap is None:
        return
    side = "device" if on_device else "host"
    held = held_bytes(ledger, slots + states + (claims.passing if on_device else claims.passing_host), cap)
    passing = claims.passing if on_device else claims.passing_host  # perhaps less by now
    needed = held + slots + states + passing
    if needed > cap:
        raise BudgetError(
            f"{name} needs {needed:,} bytes on the {side} of this rank: {held:,} are held, {states:,} are its states, {slots:,} "
            f"its chunks, {passing:,} are gathered or reduced at once. {cap:,} are allowed; nothing was updated. The smallest "
            f"{side}_memory that works is {needed * (1 if on_device else ranks_of_node()):,}; optimizer='nvme' keeps states on a "
            "drive"
        )


def check_second_gradients(context: Context, units: Iterable[Unit | Tile]) -> None:
    """Raise `BudgetError` where gradients in memory, about to be made beside earlier ones of the same units, exceed a cap."""
    second = {"device": 0, "host": 0}
    for unit in {part.unit if isinstance(part, Tile) else part for part in units}:
        parameter, tier = unit.parameter(), unit.placement.grads
        if tier != "nvme" and parameter is not None and parameter.grad is not None:
            second["device" if context.bridge.unified else tier] += unit.shard_numel * unit.reduce_dtype.itemsize
    claims = context.claims
    sides = (
        ("device", context.ledger, claims.device_cap, claims.passing, 1),
        ("host", context.host_ledger, claims.host_cap, claims.passing_host, ranks_of_node()),
    )
    for side, ledger, cap, passing, ranks in sides:
        more = second[side]
        if more and cap is not None and (held := held_bytes(ledger, more + passing, cap)) + more + passing > cap:
            needed = held + more + passing
            raise BudgetError(
                f"a second backward before the step needs {needed:,} bytes on the {side} of this rank: {held:,} are held, "
                f"{more:,} second gradients until they are added to the first, {passing:,} pass at once. {cap:,} are allowed; "
                f"the smallest {side}_memory that works is {needed * ranks:,}; grads='nvme' keeps gradients on a drive"
            )


def held_bytes(ledger: Ledger, more: int, cap: int) -> int:
    """Return the bytes that an account holds, but for blocks that are staged, which are planned for.

    Where `more` don't fit beside them, without models and graphs that nobody uses any more.
    """

    def held() -> int:
        return ledger.total()[0] - ledger.now()["bounced"]

    if held() + more > cap:
        gc.collect()
    return held()
