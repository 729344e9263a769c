"""Decides which saved values are dropped at the forward's end and made again in the backward, and what they are made from.

What may be made again, by structure alone: names of parameters, order, and which compute reads and makes what. So equal blocks
are treated alike, and ranks with other batch shapes find the same blocks: the gathers that a block needs again are collectives.

Note: blocks
    A block is compute in a row whose parameters have one prefix, up to a number in their names: `layers.3` of
    `layers.3.mlp.0.weight`, or `layers.3.mlp.0`. How many numbers a prefix has is chosen for the whole graph: so that what is
    kept, and the block that is made again at a time, are the fewest values together.

Note: shares
    Of the blocks that may be made again the first ones are, as many as is chosen: what they save is held longest, and the
    backward comes to them when it holds least. So a choice is a number of blocks, which ranks decide together.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from zinf_compile.ir.forward_compute import Compute, Remake

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")

_LEVELS = 4
"""Numbers that a block's name has at most."""

SHARES = 5
"""Numbers of blocks that are weighed, beside none: each takes the schedule of both graphs."""


class Outcome(NamedTuple):
    """What a share of the blocks leads to on a rank, with the best that it can do beside."""

    lacking: float
    """Bytes; 0 where a step fits."""
    busiest: float
    """Seconds of the lane that takes longest."""
    moving: float
    """Seconds of all links."""


def shares(count: int) -> tuple[int, ...]:
    """Return the numbers of first blocks, of `count`, that are weighed: evenly, up to all."""
    return tuple(sorted({-(-count * part // SHARES) for part in range(1, SHARES + 1)})) if count else ()


def worst_of(ranks: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Return for each share what it leads to where that is worst, given what each rank has found for all of them."""
    return [Outcome(*map(max, zip(*outcomes, strict=True))) for outcomes in zip(*ranks, strict=True)]


def best_share(worst: Sequence[Outcome]) -> int:
    """Return which of some shares is best for all ranks, given what each leads to where that is worst.

    One with which a step fits everywhere and takes least where it takes longest; where none fits, the one that lacks least.
    """
    return min(range(len(worst)), key=lambda number: (*worst[number], number))


def may_be_best(least: Outcome, worst: Sequence[Outcome]) -> bool:
    """Return whether a share that leads to no less than `least` could be better than the best of those that were weighed."""
    return least <= min(worst)


def first_blocks(remake: Remake, compute: Sequence[Compute], count: int) -> Remake:
    """Return the same for the first `count` blocks alone: others keep what they save."""
    blocks = remake.blocks[:count]
    made = {value for block in blocks for number in block for value in compute[number].makes}
    kept = {value for block in blocks for value in _inputs(compute, block)}
    return Remake(blocks=blocks, dropped=remake.dropped & made, kept=frozenset(kept))


def choose_remake(compute: Sequence[Compute], saved: Mapping[str, int], memory: Mapping[str, str]) -> Remake:
    """Return what is made again; nothing where no value could be dropped.

    `saved`: values that may be dropped, with the place in the backward's order where they are first read. `memory` names the
    value in whose memory one lies, if that isn't itself: of a memory all is dropped, or nothing. The last block is never made
    again, since the backward begins with it; nor is what isn't repeatable.
    """
    most = max((len(_prefixes(each.unit)) for each in compute), default=1)
    levels = range(max(1, min(_LEVELS, most)))
    found = [_choose(compute, saved, memory, list(_blocks(compute, level))) for level in levels]
    return min(found, key=lambda remake: _cost(remake, compute, saved, memory))


def _prefixes(name: str) -> list[str]:
    return [name[: match.end()] for match in _NUMBER.finditer(name)]


def _blocks(compute: Sequence[Compute], level: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of each block; what has no number in its name is one by itself, what reads no parameter goes on.

    Where a block's first parameter begins compute once more, after others, that is another passage, and a block by itself.
    """
    block, others = list[int](), False
    first = before = ""
    for number, each in enumerate(compute):
        prefixes = _prefixes(each.unit)
        name = prefixes[min(level, len(prefixes) - 1)] if prefixes else ""
        if block and each.unit and (not name or name != before or (each.unit == first and others)):
            yield tuple(block)
            block, first, others = [], "", False
        block.append(number)
        first = first or each.unit
        others |= each.reads_others or each.unit not in ("", first)
        before = name if each.unit else before
    if block:
        yield tuple(block)


def _choose(
    compute: Sequence[Compute], saved: Mapping[str, int], memory: Mapping[str, str], blocks: Sequence[tuple[int, ...]]
) -> Remake:
    crossing = {value for block in blocks for value in _inputs(compute, block)}
    held = {memory.get(value, value) for value in crossing}
    chosen = [block for block in blocks[:-1] if all(compute[number].repeatable for number in block)]
    while True:
        dropped = _dropped(compute, saved, memory, chosen, held)
        worth = [block for block, values in zip(chosen, dropped, strict=True) if values]
        if len(worth) == len(chosen):
            again = [_needed(compute, block, values) for block, values in zip(chosen, dropped, strict=True)]
            kept = frozenset(itertools.chain.from_iterable(_inputs(compute, block) for block in again))
            return Remake(blocks=tuple(again), dropped=frozenset().union(*dropped), kept=kept)
        chosen = worth


def _needed(compute: Sequence[Compute], block: Sequence[int], dropped: Collection[str]) -> tuple[int, ...]:
    """Return the compute of a block without which it can't make these values: not what only hands on to the next block."""
    wanted, found = set(dropped), list[int]()
    for number in reversed(block):
        if not wanted.isdisjoint(compute[number].makes):
            found.append(number)
            wanted |= compute[number].reads
    return tuple(reversed(found))


def _inputs(compute: Sequence[Compute], block: Sequence[int]) -> set[str]:
    made = set().union(*(compute[number].makes for number in block))
    return set().union(*(compute[number].reads for number in block)) - made


def _dropped(
    compute: Sequence[Compute],
    saved: Mapping[str, int],
    memory: Mapping[str, str],
    blocks: Sequence[tuple[int, ...]],
    kept: Collection[str],
) -> list[set[str]]:
    """Return for each block what it makes again: what no other block reads, in memory that isn't `kept`.

    And what the backward reads no earlier than what later blocks make again, so that these are there one at a time.
    """
    found: list[set[str]] = []
    earliest = 0
    for block in reversed(blocks):
        made = set().union(*(compute[number].makes for number in block))
        own = {value for value in made if value in saved and memory.get(value, value) in made}
        stays = {memory.get(value, value) for value in own if saved[value] < earliest} | set(kept)
        dropped = {value for value in own if memory.get(value, value) not in stays}
        found.append(dropped)
        earliest = min((saved[value] for value in dropped), default=earliest)
    return found[::-1]


def _cost(remake: Remake, compute: Sequence[Compute], saved: Mapping[str, int], memory: Mapping[str, str]) -> int:
    """Return the number of memories that are held at once in the backward: those kept, and those of the largest block."""

    def memories(values: Collection[str]) -> set[str]:
        return {memory.get(value, value) for value in values}

    held = memories(remake.kept | (saved.keys() - remake.dropped))
    sizes = [len(memories(remake.dropped & set().union(*(compute[number].makes for number in block)))) for block in remake.blocks]
    return len(held) + max(sizes, default=0)
