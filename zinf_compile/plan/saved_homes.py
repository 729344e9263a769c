"""Where the memory of saved values lives between forward and backward: by a word for all of it, or choices for a plan.

Note: order of choices
    Equal memory of equal blocks leaves together, the kind first that is away longest for what its transfers take: so each block's
    compute hides the same transfers. A kind with a large share leaves in parts, the first blocks' before the last ones', whose
    way is shortest. Each choice moves all that the one before moves: beside given homes a larger budget never moves more.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from zinf_compile.ir.forward_compute import NOTHING_AGAIN, Again
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier, Topology

from .fill_homes import Excess
from .problem_parts import Link
from .saved_schedule import Hop

LEAST_BYTES = 64 << 10
"""Less isn't worth moving: issuing a transfer takes as long as the link needs for about as much."""

PARTS = 16
"""Choices differ by about this part of all that may leave."""

SHARES = (1.0, 0.5, 0.0)
"""Of what leaves, the part that takes the cheapest way, where there are several."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One thing that may become of saved memory in place of staying on the device."""

    memory: SavedMemory
    """As it then is."""
    seconds: Mapping[str, float]
    """What that takes in one micro-batch, by lane."""

    @property
    def cost(self) -> float:
        """Seconds of all lanes."""
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Saved memory that may leave the device."""

    bytes: int
    away: float
    """Seconds of compute meanwhile."""
    ways: tuple[Way, ...]
    """From the cheapest to the one that takes most."""
    kind: Hashable
    """Equal for equal memory of equal blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saving:
    """What leaves, and what that takes in one micro-batch, by lane; beside what is made again."""

    moving: tuple[SavedMemory, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    again: Again = NOTHING_AGAIN

    @property
    def cost(self) -> float:
        """Seconds of all lanes."""
        return sum(self.seconds.values())


KEPT = Saving()
"""Everything stays."""

Check = Callable[[Saving], Excess]


def choose_homes(
    memories: Iterable[SavedMemory], tier: Tier, topology: Topology, *, least_bytes: int = LEAST_BYTES
) -> tuple[SavedMemory, ...]:
    """Return what leaves the device, all of it for one tier; nothing where that is the device, or its memory."""
    if not topology.is_offloaded(tier):
        return ()
    return tuple(dataclasses.replace(each, tier=tier) for each in memories if each.bytes >= least_bytes)


def may_leave(memories: Iterable[SavedMemory], *, least_bytes: int = LEAST_BYTES) -> tuple[SavedMemory, ...]:
    """Return what is worth a transfer, and of the same size in each call: space for that can be reserved."""
    return tuple(each for each in memories if each.bytes >= least_bytes and not each.dynamic)


def moving_ways(memory: SavedMemory, tiers: Sequence[Tier], topology: Topology, links: Iterable[Link]) -> tuple[Way, ...]:
    """Return a way for each of the tiers, from near to far: the memory passes each link there and back."""
    by_ends = {(link.source, link.destination): link for link in links}
    ways = []
    for tier in tiers:
        seconds: dict[str, float] = defaultdict(float)
        path = topology.hops(tier)
        for far, near in itertools.pairwise(path):
            for link in (by_ends[near, far], by_ends[far, near]):
                seconds[link.on_lane] += link.seconds(memory.bytes)
        if path:
            ways.append(Way(memory=dataclasses.replace(memory, tier=tier), seconds=dict(seconds)))
    return tuple(sorted(ways, key=lambda way: way.cost))


def hops_of(memory: SavedMemory, topology: Topology, links: Iterable[Link]) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """Return the transfers of a memory from the device to its tier, and those back."""
    by_ends = {(link.source, link.destination): link for link in links}
    path = [by_ends[ends] for ends in itertools.pairwise(topology.hops(memory.tier))]
    away = [by_ends[ends] for ends in itertools.pairwise(topology.hops(memory.tier)[::-1])]
    out, back = (tuple((link.on_lane, link.seconds(memory.bytes)) for link in way) for way in (away, path))
    return out, back


def savings(candidates: Sequence[Candidate]) -> tuple[Saving, ...]:
    """Return the choices for some candidates, from nothing that leaves to all of it, what costs less before what costs more.

    Along one order of the candidates; of those that leave, the ones that are back soonest take the cheapest way.
    """
    order = _ordered(candidates)
    found = [KEPT]
    for end in _ends(order):
        leaving = order[:end]
        several = any(len(each.ways) > 1 for each in leaving)
        for share in SHARES if several else SHARES[:1]:
            cheapest = round(end * share)
            ways = [each.ways[-1] for each in leaving[: end - cheapest]] + [each.ways[0] for each in leaving[end - cheapest :]]
            found.append(_sum(ways))
    return tuple(found)


def first_blocks_first(candidates: Sequence[Candidate]) -> tuple[Saving, ...]:
    """Return choices in which what is away longest leaves first, of any kind: links have time to catch up where most is held."""
    return savings([dataclasses.replace(each, kind=None) for each in candidates])


def beside(again: Again, choices: Iterable[Saving]) -> tuple[Saving, ...]:
    """Return the same choices where blocks run again."""
    return tuple(dataclasses.replace(each, again=again) for each in choices)


def a_few(choices: Sequence[Saving], *, most: int = 7) -> tuple[Saving, ...]:
    """Return choices from the first to the last, evenly: for decisions that take long for each of them."""
    if len(choices) <= most:
        return tuple(choices)
    last = len(choices) - 1
    return tuple(choices[last * number // (most - 1)] for number in range(most))


def first_that_fits(choices: Sequence[Saving], check: Check) -> Saving:
    """Return the first choice that fits; where none does, the one that lacks least."""
    lacking: list[int] = []
    for each in choices:
        excess = check(each)
        if excess.fits:
            return each
        lacking.append(excess.lacking)
    return choices[lacking.index(min(lacking))]


def least_that_fits(choices: Sequence[Saving], check: Check) -> Saving:
    """Return a choice that fits while the one before it doesn't, found by halves; the last one where that doesn't fit."""
    low, high = -1, len(choices) - 1
    while check(choices[high]).fits and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if check(choices[middle]).fits else (middle, high)
    return choices[high]


def _ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates kind by kind, those first that hold most bytes for longest per second of transfer."""
    kinds: dict[Hashable, list[Candidate]] = defaultdict(list)
    for each in candidates:
        kinds[each.kind].append(each)

    def worth(alike: Sequence[Candidate]) -> float:
        taken = sum(each.ways[0].cost for each in alike)
        return sum(each.bytes * each.away for each in alike) / max(taken, 1e-12)

    by_worth = sorted(kinds.values(), key=worth, reverse=True)
    return [each for alike in by_worth for each in sorted(alike, key=lambda one: one.away, reverse=True)]


def _ends(order: Sequence[Candidate]) -> list[int]:
    """Return how many of the first candidates leave in each choice: a part more, or a kind."""
    part = sum(each.bytes for each in order) / PARTS
    found, since = [], 0
    for number, each in enumerate(order, 1):
        since += each.bytes
        kind_ends = number == len(order) or order[number].kind != each.kind
        if since >= part or number == len(order) or (kind_ends and since >= part / 2):
            found.append(number)
            since = 0
    return found


def _sum(ways: Sequence[Way]) -> Saving:
    seconds: dict[str, float] = defaultdict(float)
    for way in ways:
        for lane, count in way.seconds.items():
            seconds[lane] += count
    moving = sorted((way.memory for way in ways), key=lambda memory: memory.outputs)
    return Saving(tuple(moving), dict(seconds))
