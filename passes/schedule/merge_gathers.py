"""Keep a unit gathered between two uses where that doesn't raise the peak of gathered bytes."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.node_facts import slot_behind, wire_bytes, wire_type


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A gather or a release of one unit."""

    unit: Hashable
    """Key of the unit and its data type in the transfer."""
    bytes: int
    gathers: bool


def merge_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop a release and the unit's next gather where the peak of gathered bytes stays the same.

        before:  g = all_gather(w);  k = all_gather(e);  v = wait(g);  a = mm(x, v);  release(v)
                 u = wait(k);  b = mm(a, u);  release(u);  h = all_gather(w);  z = wait(h);  c = mm(b, z);  release(z)
        after:   g = all_gather(w);  k = all_gather(e);  v = wait(g);  a = mm(x, v)
                 u = wait(k);  b = mm(a, u);  release(u);  c = mm(b, v);  release(v)

    Runs after `prefetch`: units are kept in memory that prefetched gathers leave free, and delay none of them. Regions of
    `align_regions` don't change. The choice follows from order and sizes of units alone, so ranks with other batch shapes agree.
    """
    nodes = [node for node in gm.graph.nodes if node.target in (ops.all_gather, ops.release)]
    for end, start in choose_kept([_move(node) for node in nodes]):
        release, gather = nodes[end], nodes[start]
        kept = release.args[0]
        wait = next(iter(gather.users))
        wait.replace_all_uses_with(kept)
        for node in (release, wait, gather):
            gm.graph.erase_node(node)
    return gm


def choose_kept(moves: Sequence[Move]) -> list[tuple[int, int]]:
    """Decide which units are kept: return pairs of the release and the gather to drop, as positions in `moves`.

    Belady's algorithm: keep every unit, and where that exceeds the peak release the one whose next use is furthest ahead. For
    units of equal size no choice keeps more.
    """
    changes = [move.bytes if move.gathers else -move.bytes for move in moves]
    live_bytes = list(itertools.accumulate(changes))
    peak = max(live_bytes, default=0)
    next_gather = _next_gathers(moves)
    kept: dict[int, int] = {}
    kept_bytes = 0
    furthest: list[tuple[int, int]] = []  # (-position of the next gather, position of the release)
    chosen: list[tuple[int, int]] = []
    for position, (move, live) in enumerate(zip(moves, live_bytes, strict=True)):
        if not move.gathers:
            if position in next_gather:
                heapq.heappush(furthest, (-next_gather[position], position))
                kept[next_gather[position]] = position
                kept_bytes += move.bytes
            continue
        if position in kept:
            chosen.append((kept.pop(position), position))
            kept_bytes -= move.bytes
        while live + kept_bytes > peak:
            negative, release = heapq.heappop(furthest)
            del kept[-negative]
            kept_bytes -= moves[release].bytes
    return chosen


def _next_gathers(moves: Sequence[Move]) -> dict[int, int]:
    """Return for each release the position of the unit's next gather, if there is one."""
    next_gather: dict[int, int] = {}
    following: dict[Hashable, int] = {}
    for position in range(len(moves) - 1, -1, -1):
        unit = moves[position].unit
        if moves[position].gathers:
            following[unit] = position
        elif unit in following:
            next_gather[position] = following.pop(unit)
    return next_gather


def _move(node: fx.Node) -> Move:
    return Move((slot_behind(node).key, wire_type(node)), wire_bytes(node), node.target is ops.all_gather)
