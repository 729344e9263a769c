"""Hold a unit from one use to the next where releasing it in between gains nothing."""

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
    """What is gathered, and in which data type."""
    bytes: int
    gathers: bool


def merge_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop a release and the gather after it, where the graph's peak of gathered bytes stays what it is without them.

        before:  g = all_gather(w);  k = all_gather(e);  v = wait(g);  a = mm(x, v);  release(v)
                 u = wait(k);  b = mm(a, u);  release(u);  h = all_gather(w);  z = wait(h);  c = mm(b, z);  release(z)
        after:   g = all_gather(w);  k = all_gather(e);  v = wait(g);  a = mm(x, v)
                 u = wait(k);  b = mm(a, u);  release(u);  c = mm(b, v);  release(v)

    Runs after `prefetch`: what is held fills room that the gathers running ahead left, and delays none of them. Regions stay
    as `align_regions` cut them. Follows from order and sizes of the units alone, so ranks with other batch shapes do the same.
    """
    nodes = [node for node in gm.graph.nodes if node.target in (ops.all_gather, ops.release)]
    for end, start in choose_held([_move(node) for node in nodes]):
        release, gather = nodes[end], nodes[start]
        held = release.args[0]
        wait = next(iter(gather.users))
        wait.replace_all_uses_with(held)
        for node in (release, wait, gather):
            gm.graph.erase_node(node)
    return gm


def choose_held(moves: Sequence[Move]) -> list[tuple[int, int]]:
    """Decide which units are held: pairs of the release and the gather to drop, as positions in `moves`.

    Every unit is held at first, and where that exceeds the peak, the one whose next use is furthest away is given up: for
    units of one size, no choice keeps more.
    """
    changes = [move.bytes if move.gathers else -move.bytes for move in moves]
    room = list(itertools.accumulate(changes))
    peak = max(room, default=0)
    again = _next_gathers(moves)
    held: dict[int, int] = {}
    held_bytes = 0
    furthest: list[tuple[int, int]] = []  # (-position of the next gather, position of the release)
    chosen: list[tuple[int, int]] = []
    for position, (move, live) in enumerate(zip(moves, room, strict=True)):
        if not move.gathers:
            if position in again:
                heapq.heappush(furthest, (-again[position], position))
                held[again[position]] = position
                held_bytes += move.bytes
            continue
        if position in held:
            chosen.append((held.pop(position), position))
            held_bytes -= move.bytes
        while live + held_bytes > peak:
            negative, release = heapq.heappop(furthest)
            del held[-negative]
            held_bytes -= moves[release].bytes
    return chosen


def _next_gathers(moves: Sequence[Move]) -> dict[int, int]:
    """Return for each release the unit's next gather, where there is one."""
    again: dict[int, int] = {}
    following: dict[Hashable, int] = {}
    for position in range(len(moves) - 1, -1, -1):
        unit = moves[position].unit
        if moves[position].gathers:
            following[unit] = position
        elif unit in following:
            again[position] = following.pop(unit)
    return again


def _move(node: fx.Node) -> Move:
    return Move((slot_behind(node).key, wire_type(node)), wire_bytes(node), node.target is ops.all_gather)
