"""Whether a model fits within the caps, and how far ahead its transfers may run there."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from zinf_compile.config import Config, parse_bytes, tile_range
from zinf_compile.errors import BudgetError
from zinf_compile.ir.program import Slot
from zinf_compile.ir.tiers import Placement, way_in
from zinf_compile.passes import BUCKETS_GATHERED, BUCKETS_ON_THE_WAY, LOOK_AHEAD
from zinf_compile.passes.analysis.memory_needs import ahead_key, measure_ahead, measure_needs
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.memory.reservations import ByteRoom, Claim, Sides
from zinf_compile.runtime.storage.extent_store import STAGING_BYTES
from zinf_compile.runtime.system.host_limits import ranks_of_node, usable_bytes
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.transfer.chunk_buffers import SLOTS
from zinf_compile.runtime.transfer.move import Mover
from zinf_compile.runtime.units import pieces
from zinf_compile.runtime.units.unit import Tile, Unit

from .parameter import ShardedParameter, unit_of
from .passage import measure_passage
from .short_ranks import SIDES, Lack, any_rank_short, is_any_short, largest_of_ranks, least_of_ranks, refusal_text, worst_of_ranks
from .shortage import Need, advice, advice_at_birth, find_smallest, gradient_bytes, name_cap, refusal, refusal_elsewhere

BUCKETS_REDUCED = 4
"""Full gradients on their way to their tier or to other ranks, where there is room for as many."""


_unplanned: weakref.WeakSet[Unit] = process_wide(weakref.WeakSet())
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

    def options(self, unified: bool) -> dict[str, int]:
        """Return the options that set the device's cap, each with the ranks that share it."""
        declared = {"device_memory": 1} if self.device_source == "option device_memory" else {}
        if self.host_source.startswith("option") and (unified or self.device_source == self.host_source):
            declared["host_memory"] = ranks_of_node()
        return declared


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
            largest = max(largest, min(shard, pieces.PIECE_NUMEL))
            total += -(-shard // pieces.ALIGN) * pieces.ALIGN
    numel = min(-(-max(largest, pieces.PIECE_NUMEL) // pieces.ALIGN) * pieces.ALIGN, total)
    mover = Mover(context.bridge, update_on_device=placement.update_on_device)
    rooms = [0, 0]
    values, gradients, kept = (mover.needs(tier) for tier in (placement.params, placement.grads, placement.optimizer))
    brought = mover.needs("device")  # where a user's own gradient is
    for slot in slots:
        if slot.requires_grad:
            place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
            reduced_bytes, states = place.reduce_dtype_of(slot.dtype).itemsize, _state_bytes(place, slot.dtype)
            for side in range(2):
                one = (
                    slot.dtype.itemsize * values[side] + reduced_bytes * (gradients[side] or brought[side]) + states * kept[side]
                )
                rooms[side] = max(rooms[side], numel * one)
    later = {"device": 0, "host": 0}
    for slot in slots:
        if slot.requires_grad:
            place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
            second = place.reduce_dtype_of(slot.dtype).itemsize
            for size_of_one, tier in ((_state_bytes(place, slot.dtype), place.optimizer), (second, place.grads)):
                if tier != "nvme":
                    later["device" if unified else tier] += math.ceil(slot.numel / size) * size_of_one
    return Resident(sides["device"], sides["host"], rooms[1], rooms[0], later["device"], later["host"])


def _state_bytes(placement: Placement, dtype: torch.dtype) -> int:
    """Return what Adam keeps of one element: two states, and a master copy where there is one."""
    master = placement.master_of(dtype)
    return 2 * dtype.itemsize if master is None else 3 * master.itemsize


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
            f"{caps.device_source if cap == caps.device else caps.host_source}); the smallest that works is {needed:,}"
            + advice_at_birth(config.placement(), unified=unified, side="device")
        )
    here = resident.host + largest.bytes + staging
    host = here + (0 if unified else held_bytes(context.host_ledger, here, caps.host))
    if not unified and host > caps.host:
        raise BudgetError(
            f"the model needs {host:,} bytes of host memory for each rank before anything is computed: {resident.host:,} of "
            f"parameters and gradients, and {largest.name} whole{_blocks(staging)}. {caps.host:,} are allowed "
            f"({caps.host_source}); the smallest host_memory that works is {host * ranks_of_node():,}"
            + advice_at_birth(config.placement(), unified=False, side="host")
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
        slots: Sequence[Slot],
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
        self.caps = caps or find_caps(config, context, held=whole + context.ledger.total()[0])
        self._needs: list[Need] = []
        self._claims: list[Claim] = []
        """What the graph may hold; counts for as long as this object lives, which is as long as what was compiled."""
        self._checked = False
        self._measuring = measuring
        self._together = together and context.size > 1
        self._signature = config.signature()
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
        standing = BUCKETS_GATHERED * self._bucket, BUCKETS_ON_THE_WAY * self._bucket
        if self._measuring:
            return standing
        spare = Spare(device.spare, None if context.bridge.unified else host.spare)
        slots = 1 + spare.take(SLOTS - 1, resident.slot_device, resident.slot_host)
        next_gathered, next_on_the_way = self._one_ahead(graph, widening)
        widest = max(BUCKETS_ON_THE_WAY * self._bucket, math.ceil(BUCKETS_GATHERED * self._bucket * widening))
        wish = _Wish(
            ahead=max(0, max(widest, next_on_the_way) - full) if gathered else 0,
            flight=max(0, BUCKETS_REDUCED * self._bucket - reduced) if reduced else 0,
            staging=max(0, STAGING_BYTES - self._passage.staging) if self._passage.staging else 0,
        )
        ahead = spare.take(min(widest - full, wish.ahead), share, from_drive)
        flight = spare.take(wish.flight, 1)
        staging = spare.take(wish.staging, 0, 1)
        ahead += spare.take(wish.ahead - ahead, share, from_drive)
        claims = context.claims
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
        claim = Claim(
            passing=device.passing + passing,
            left=left,
            reduced=reduced + flight,
            slots=slots,
            passing_host=host.passing + math.ceil(ahead * from_drive) + staging,
            staging=self._passage.staging + staging or None,
            least=Sides(device.passing, host.passing),
            works=Sides(device.works, host.works),
            wish=Sides(
                (SLOTS - 1) * (resident.slot_device + (resident.slot_host if context.bridge.unified else 0))
                + math.ceil(wish.ahead * share)
                + wish.flight
                + (wish.staging if context.bridge.unified else 0),
                (SLOTS - 1) * resident.slot_host + math.ceil(wish.ahead * from_drive) + wish.staging,
            ),
        )
        self._claims.append(claim)
        claims.add(claim)
        context.gradient_room.limit = claims.on_the_way
        context.staging.limit(claims.staging or STAGING_BYTES)
        if not gathered:  # what is used is held anyway
            return standing
        return min(int((full + ahead) / widening), max(next_gathered, BUCKETS_GATHERED * self._bucket)), full + ahead

    def _one_ahead(self, graph: fx.Graph, widening: float) -> tuple[int, int]:
        """Return what is gathered, and gathered or on the way, where nothing but `LOOK_AHEAD` bounds the schedule, in bytes.

        That is how far the largest unit is brought ahead of its use, too; more memory would not be used.
        """
        hops = len(way_in(self._placement.params, unified=self._context.bridge.unified))
        if self._placement.params == "nvme" and hops == 2:  # one read takes the place of two hops
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
        least = here + self._held(context.ledger, here, cap)
        self._note(
            Need(
                side="device",
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
                advice=advice(self._placement, unified=unified, side="device", several=gathered > 0),
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
        least = here + self._held(context.host_ledger, here, cap)
        fixed = least - resident.slot_host - passing
        self._note(
            Need(
                side="host",
                text=f"the model needs {least:,} bytes of host memory for each rank: {fixed:,} of parameters and gradients, "
                f"{passing:,} on their way from drives and to them, {resident.slot_host:,} for one chunk of the optimizer's step",
                stays=least - passing,
                least=least,
                later=resident.later_host,
                cap=cap,
                options={"host_memory": ranks_of_node()},
                source=self.caps.host_source,
                advice=advice(self._placement, unified=False, side="host"),
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

    def _refusal(self, lacks: Mapping[str, Lack], measure: Callable[[int], GraphBudget] | None) -> BudgetError:
        """Return the error that names a cap with which the graphs work, on all ranks where these refuse together."""

        def of_all(number: int) -> int:
            return largest_of_ranks(self._context, number, what="the smallest cap") if self._together else number

        worst = worst_of_ranks(self._context, lacks) if self._together else {}
        smallest = {side: of_all(self.works(side)) for side in SIDES}
        if measure is not None and "device_memory" in self.caps.options(True):
            known: dict[int, GraphBudget] = {}

            def needed(cap: int) -> int:
                known[cap] = measure(cap)
                return of_all(known[cap].works("device"))

            floor = of_all(max((need.stays + need.later for need in self._needs if need.side == "device"), default=0))
            smallest["device"] = find_smallest(needed, floor=floor, edges=tile_range)
            smallest["host"] = of_all(known[max(known)].works("host"))
        return refusal(self._needs, smallest) or refusal_elsewhere(self._needs, smallest, worst)

    def _lack(self, side: str) -> Lack:
        here = [need for need in self._needs if need.side == side]
        cap = here[0].cap if here else None
        return Lack(max((need.least for need in here), default=0), cap, self.works(side))

    def works(self, side: str) -> int:
        """Return the least bytes of "device" or "host" memory with which the graphs seen so far work."""
        return max((need.works for need in self._needs if need.side == side), default=0)

    def _held(self, ledger: Ledger, more: int, cap: int) -> int:
        cap = sys.maxsize if self._measuring else cap  # what nobody uses went before
        return held_bytes(ledger, more, cap, self._context.gradient_room)

    def _note(self, need: Need) -> None:
        self._needs.append(need)
        error = refusal([need], {need.side: need.works}) if self._checked else None
        if error is not None:
            raise error


def check_states(context: Context, *, on_device: bool, states: int, slots: int, name: str) -> None:
    """Raise `BudgetError` where states in memory and chunks, about to be made, exceed a cap. Nothing was updated yet."""
    claims = context.claims
    on_device = on_device or context.bridge.unified
    ledger, cap = (context.ledger, claims.device_cap) if on_device else (context.host_ledger, claims.host_cap)
    if cap is None:
        return
    side = "device" if on_device else "host"
    held = held_bytes(ledger, slots + states + (claims.passing if on_device else claims.passing_host), cap, context.gradient_room)
    passing = claims.passing if on_device else claims.passing_host  # perhaps less by now
    needed = held + slots + states + passing
    if needed > cap:
        more = gradient_bytes(context, context.units)[side]
        works = claims.works(side, held + slots + states + more)
        second = f", with {more:,} for second gradients while they accumulate" if more else ""
        raise BudgetError(
            f"{name} needs {needed:,} bytes on the {side} of this rank: {held:,} are held, {states:,} are its states, {slots:,} "
            f"its chunks, {passing:,} are gathered or reduced at once. {cap:,} are allowed; nothing was updated. "
            f"The smallest {name_cap(context, side, works)}{second}"
            + ("; optimizer='nvme' keeps states on a drive" if states else "")
        )


def lack_of_second_gradients(context: Context, units: Iterable[Unit | Tile]) -> dict[str, Lack]:
    """Return what a backward needs of each side that makes gradients in memory beside earlier ones of the same units."""
    distinct = {part.unit if isinstance(part, Tile) else part for part in units}
    second = gradient_bytes(context, [unit for unit in distinct if (p := unit.parameter()) is not None and p.grad is not None])
    claims = context.claims
    sides = (
        ("device", context.ledger, claims.device_cap, claims.passing),
        ("host", context.host_ledger, claims.host_cap, claims.passing_host),
    )
    lacks = {}
    for side, ledger, cap, passing in sides:
        more = second[side]
        if more and cap is not None:
            held = held_bytes(ledger, more + passing, cap, context.gradient_room)
            works = claims.works(side, held + more)
            if not ledger.now()["states"]:  # no step was made yet
                works = max(works, claims.planned(side))
            lacks[side] = Lack(
                needed=held + more + passing,
                cap=cap,
                works=works,
                text=f"a second backward before the step needs {held + more + passing:,} bytes on the {side} of this rank: "
                f"{held:,} are held, {more:,} second gradients until they are added to the first, {passing:,} pass at once",
            )
    return lacks


def refuse_second_gradients(context: Context, lacks: Mapping[str, Lack]) -> NoReturn:
    """Raise `BudgetError`, on all ranks, where one lacks memory for second gradients. Collective."""
    text = refusal_text(
        context,
        lacks,
        lambda side, works: f"the smallest {name_cap(context, side, works)}",
        what="a second backward before the step",
    )
    raise BudgetError(f"{text}; grads='nvme' keeps gradients on a drive")


def held_bytes(ledger: Ledger, more: int, cap: int, on_the_way: ByteRoom | None = None) -> int:
    """Return the bytes that an account holds, but for blocks that are staged, which are planned for.

    Where `more` don't fit beside them, without models and graphs that nobody uses any more, and without full gradients that are
    still `on_the_way`, for which there is room in what passes.
    """

    def held() -> int:
        return ledger.total()[0] - ledger.now()["bounced"]

    if held() + more > cap and on_the_way is not None:
        on_the_way.drain(lambda: held() + more <= cap)
    if held() + more > cap:
        gc.collect()
    return held()
