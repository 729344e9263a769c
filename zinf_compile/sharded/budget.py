"""Whether a captured graph fits within the caps, and how far ahead its transfers may run there."""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from zinf_compile.config import Config, tile_range
from zinf_compile.errors import BudgetError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import BUCKETS_GATHERED, BUCKETS_ON_THE_WAY, LOOK_AHEAD
from zinf_compile.passes.analysis.memory_needs import ahead_key, measure_ahead, measure_needs
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.memory.reservations import Reservation, Sides
from zinf_compile.runtime.storage.extent_store import STAGING_BYTES
from zinf_compile.runtime.system.host_limits import ranks_of_node
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.transfer.chunk_buffers import CHUNK_BUFFERS
from zinf_compile.runtime.units.unit import Unit

from .caps import Caps, Headroom, find_caps, held_bytes
from .parameter import ShardedParameter, unit_of
from .passage import measure_passage
from .resident import measure_resident
from .short_ranks import SIDES, Lack, any_rank_short, is_any_short, largest_of_ranks, least_of_ranks, worst_of_ranks
from .shortage import Need, advice, find_smallest, refusal, refusal_elsewhere

BUCKETS_REDUCED = 4
"""Full gradients on their way to their tier or to other ranks, where there is room for as many."""


_unplanned: weakref.WeakSet[Unit] = process_wide(weakref.WeakSet())
"""Units that were made before any graph: nothing has planned for their gradients and updates yet."""


def plan_later(units: Iterable[Unit]) -> None:
    """Let the first graph that uses these units plan for their gradients and updates."""
    _unplanned.update(units)


def bucket_of(config: Config, slots: Sequence[ParameterSlot]) -> int:
    """Return the bytes that move together in a graph: no more than a tile, where some parameter is cut into tiles."""
    tile = config.tile_bytes if any(slot.tiles for slot in slots) else None
    return config.bucket_bytes if tile is None else min(config.bucket_bytes, tile)


@dataclasses.dataclass(frozen=True)
class _Side:
    """Of the device, or of host memory beside it: the cap, what passes at least, what is left besides that, what cap works."""

    cap: int
    passing: int
    spare: int
    works: int


@dataclasses.dataclass(frozen=True)
class _Wish:
    """What a graph takes where there is room for it, in bytes beside the least."""

    ahead: int
    flight: int
    staging: int


class GraphBudget:
    """The caps as one captured graph meets them; `limits` decides how far its gathers and reads run ahead.

    Forward and backward are both planned before `check` speaks: the smallest cap that it names is that of both. `caps` are by
    default those of this process. While `measuring` nothing is claimed: the graph is not going to run. `together`: all ranks plan
    for it at the same point, exchange on the way what each has room for, and refuse it together.
    """

    def __init__(
        self,
        config: Config,
        slots: Sequence[ParameterSlot],
        inputs: Sequence[Any],
        context: Context,
        *,
        caps: Caps | None = None,
        measuring: bool = False,
        together: bool = False,
    ) -> None:
        fresh = [slot for slot in slots if not isinstance(inputs[slot.index], ShardedParameter)]
        units = {slot.index: unit for slot in slots if (unit := unit_of(inputs[slot.index])) is not None}
        self._units = {index: unit for index, unit in units.items() if unit in _unplanned}
        born = self._units.keys()
        whole = sum(slot.bytes for slot in fresh)
        self.caps = caps or find_caps(config, context, held=whole + context.memory.ledger.total()[0])
        self._needs: list[Need] = []
        self._claims: list[Reservation] = []
        """What the graph may hold; counts for as long as this object lives, which is as long as what was compiled."""
        self._checked = False
        self._measuring = measuring
        self._together = together and context.size > 1
        self._signature = config.signature()
        self._context, self._bucket, self._placement = context, bucket_of(config, slots), config.placement()
        known = [slot for slot in slots if slot in fresh or slot.index in born]
        self._resident = measure_resident(known, self._placement, context, size=context.size, held=born)
        self._passage = measure_passage(slots, self._placement, size=context.size, unified=context.bridge.unified)
        self._swapped = context.bridge.topology.is_away(self._placement.params)
        self._away = context.bridge.topology.is_away(self._placement.grads)

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
        from_drive = 1 / size if not (self._placement.params.in_memory or context.bridge.unified) else 0.0
        device = self._check_device(gathered + looked_up, reduced + converted, needs.largest)
        host = self._check_host(math.ceil((full + looked_up) * from_drive), self._passage.leaving if needs.left else 0)
        standing = BUCKETS_GATHERED * self._bucket, BUCKETS_ON_THE_WAY * self._bucket
        if self._measuring:
            return standing
        room = Headroom(device.spare, None if context.bridge.unified else host.spare)
        slots = 1 + room.take(CHUNK_BUFFERS - 1, resident.slot_device, resident.slot_host)
        next_gathered, next_on_the_way = self._one_ahead(graph, widening)
        widest = max(BUCKETS_ON_THE_WAY * self._bucket, math.ceil(BUCKETS_GATHERED * self._bucket * widening))
        wish = _Wish(
            ahead=max(0, max(widest, next_on_the_way) - full) if gathered else 0,
            flight=max(0, BUCKETS_REDUCED * self._bucket - reduced) if reduced else 0,
            staging=max(0, STAGING_BYTES - self._passage.staging) if self._passage.staging else 0,
        )
        ahead = room.take(min(widest - full, wish.ahead), share, from_drive)
        flight = room.take(wish.flight, 1)
        staging = room.take(wish.staging, 0, 1)
        ahead += room.take(wish.ahead - ahead, share, from_drive)
        claims = context.memory.reservations
        besides = flight + (staging if context.bridge.unified else 0)
        if size > 1:  # what ranks send each other follows from it: one that compiles again alone goes by what all had before
            known = claims.ahead.setdefault((self._signature, ahead_key(graph)), ahead)
            if known < ahead or (
                device.passing + math.ceil(known * share) + besides <= claims.passing
                and host.passing + math.ceil(known * from_drive) + staging <= claims.passing_host
            ):
                ahead = known
            if self._together and not self._checked:
                ahead = claims.ahead[self._signature, ahead_key(graph)] = least_of_ranks(context, ahead, what="room to run ahead")
        passing = math.ceil(ahead * share) + besides
        claims.device_cap, claims.host_cap = device.cap, self.caps.host
        claim = Reservation(
            passing=device.passing + passing,
            left=left,
            reduced=reduced + flight,
            slots=slots,
            passing_host=host.passing + math.ceil(ahead * from_drive) + staging,
            staging=self._passage.staging + staging or None,
            least=Sides(device.passing, host.passing),
            works=Sides(device.works, host.works),
            wish=Sides(
                (CHUNK_BUFFERS - 1) * (resident.slot_device + (resident.slot_host if context.bridge.unified else 0))
                + math.ceil(wish.ahead * share)
                + wish.flight
                + (wish.staging if context.bridge.unified else 0),
                (CHUNK_BUFFERS - 1) * resident.slot_host + math.ceil(wish.ahead * from_drive) + wish.staging,
            ),
        )
        self._claims.append(claim)
        claims.add(claim)
        context.memory.inflight_gradients.limit = claims.on_the_way
        context.memory.staging.limit(claims.staging or STAGING_BYTES)
        if not gathered:  # what is used is held anyway
            return standing
        return min(int((full + ahead) / widening), max(next_gathered, BUCKETS_GATHERED * self._bucket)), full + ahead

    def _one_ahead(self, graph: fx.Graph, widening: float) -> tuple[int, int]:
        """Return what is gathered, and gathered or on the way, where nothing but `LOOK_AHEAD` bounds the schedule, in bytes.

        That is how far the largest unit is brought ahead of its use, too; more memory would not be used.
        """
        topology = self._context.bridge.topology
        hops = len(topology.hops(self._placement.params))
        if topology.reads_at_once(self._placement.params):  # one read takes the place of two hops
            hops += 1
        gathered = measure_ahead(graph, stages=LOOK_AHEAD)
        return gathered, math.ceil(widening * measure_ahead(graph, stages=LOOK_AHEAD * max(1, hops)))

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
        least = here + self._held(context.memory.ledger, here, cap)
        self._note(
            Need(
                side=Tier.DEVICE,
                text=f"the model needs {least:,} bytes on {context.device} of each rank: {least - slot - passing:,} stay there "
                f"(parameters and gradients whose tier that is), {gathered:,} are gathered at once (with "
                f"{largest or 'nothing'}), {reduced:,} are full gradients on their way, {slot:,} one chunk of the optimizer's "
                f"step, {passing - gathered - reduced:,} for gradients read back and blocks on their way to a drive",
                stays=least - passing,
                least=least,
                later=resident.later,
                cap=cap,
                options=self.caps.options(unified),
                source=self.caps.device_source if cap == self.caps.device else self.caps.host_source,
                advice=advice(self._placement, unified=unified, side=Tier.DEVICE, several=gathered > 0),
            )
        )
        return _Side(cap, passing, max(0, cap - least - resident.later), least + resident.later)

    def _check_host(self, read: int, leaving: int) -> _Side:
        """`read`: of parameters on their way from a drive; `leaving`: of a gradient on its way to one."""
        context, resident, passage, cap = self._context, self._resident, self._passage, self.caps.host
        if context.bridge.unified:
            return _Side(cap, 0, 0, 0)
        passing = max(read + leaving, passage.read) + passage.staging
        here = resident.host + resident.slot_host + passing
        least = here + self._held(context.memory.host_ledger, here, cap)
        fixed = least - resident.slot_host - passing
        self._note(
            Need(
                side=Tier.HOST,
                text=f"the model needs {least:,} bytes of host memory for each rank: {fixed:,} of parameters and gradients, "
                f"{passing:,} on their way from drives and to them, {resident.slot_host:,} for one chunk of the optimizer's step",
                stays=least - passing,
                least=least,
                later=resident.later_host,
                cap=cap,
                options={"host_memory": ranks_of_node()},
                source=self.caps.host_source,
                advice=advice(self._placement, unified=False, side=Tier.HOST),
            )
        )
        return _Side(cap, passing, max(0, cap - least - resident.later_host), least + resident.later_host)

    def check(self, *, measure: Callable[[int], GraphBudget] | None = None) -> None:
        """Raise `BudgetError` for the graphs seen so far if one doesn't fit; from now on, at once for any other.

        `measure` returns the budget of the same graphs for another `device_memory`, where their tiles would follow from that.
        """
        self._checked = True
        lacks = {side: self._lack(side) for side in SIDES}
        if any_rank_short(self._context, lacks, what="planning within the caps") if self._together else is_any_short(lacks):
            error = self._refusal(lacks, measure)
            self._claims.clear()  # who has hold of the error has hold of this object: the graph is not going to run
            raise error
        for unit in self._units.values():
            _unplanned.discard(unit)

    def _refusal(self, lacks: Mapping[Tier, Lack], measure: Callable[[int], GraphBudget] | None) -> BudgetError:
        """Return the error that names a cap with which the graphs work, on all ranks where these refuse together."""

        def of_all(number: int) -> int:
            return largest_of_ranks(self._context, number, what="the smallest cap") if self._together else number

        worst = worst_of_ranks(self._context, lacks) if self._together else {}
        smallest = {side: of_all(self.works(side)) for side in SIDES}
        if measure is not None and "device_memory" in self.caps.options(True):
            known: dict[int, GraphBudget] = {}

            def needed(cap: int) -> int:
                known[cap] = measure(cap)
                return of_all(known[cap].works(Tier.DEVICE))

            floor = of_all(max((need.stays + need.later for need in self._needs if need.side == Tier.DEVICE), default=0))
            smallest[Tier.DEVICE] = find_smallest(needed, floor=floor, edges=tile_range)
            smallest[Tier.HOST] = of_all(known[max(known)].works(Tier.HOST))
        return refusal(self._needs, smallest) or refusal_elsewhere(self._needs, smallest, worst)

    def _lack(self, side: Tier) -> Lack:
        here = [need for need in self._needs if need.side == side]
        cap = here[0].cap if here else None
        return Lack(max((need.least for need in here), default=0), cap, self.works(side))

    def works(self, side: Tier) -> int:
        """Return the least bytes of "device" or "host" memory with which the graphs seen so far work."""
        return max((need.works for need in self._needs if need.side == side), default=0)

    def _held(self, ledger: Ledger, more: int, cap: int) -> int:
        cap = sys.maxsize if self._measuring else cap  # what nobody uses went before
        return held_bytes(ledger, more, cap, self._context.memory.inflight_gradients)

    def _note(self, need: Need) -> None:
        self._needs.append(need)
        error = refusal([need], {need.side: need.works}) if self._checked else None
        if error is not None:
            raise error
