"""Start each swap ahead of the gather it is for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.gather_stages import find_stages
from zinf_compile.passes.graph.node_facts import hop_of, live_bytes

from .prefetch import choose_stages


def prefetch_swaps(gm: fx.GraphModule, *, look_ahead: int, limit_bytes: int | Callable[[fx.Graph], int]) -> fx.GraphModule:
    """Start each hop of a shard's way to the device `look_ahead` stages ahead of the next one.

        before:  s = swap_in(w0, "host", "device", 0);  g = all_gather(s, 0);  v = wait(g);  a = mm(x, v);  release(v)
                 t = swap_in(w1, "host", "device", 1);  h = all_gather(t, 1);  u = wait(h);  b = mm(a, u)
        after:   s = swap_in(w0, "host", "device", 0);  g = all_gather(s, 0);  t = swap_in(w1, "host", "device", 1);  v = wait(g)
                 a = mm(x, v);  release(v);  h = all_gather(t, 1);  u = wait(h);  b = mm(a, u)

    A stage begins where gathers stand together. `prefetch` has put them one stage ahead of their use: so while one group is in
    use the next is gathered, the one after it copied to the device, and the one after that read from the drive. A read that
    ends on the device goes two hops' stages ahead of its gather. The first stage's swaps stay with it at the graph's start;
    a later one starts early only as far as what is on its way to the device, gathered and not yet released stays within
    `limit_bytes`, or what that says for the graph. No gather moves and no order changes: what ranks must agree on is the same
    wherever parameters live.
    """
    stages, released = find_stages(gm.graph)
    anchors = [gathers[-1].next for gathers in stages]
    sizes = [sum(live_bytes(node) for node in gathers) for gathers in stages]
    levels = _levels(stages)
    most = limit_bytes if isinstance(limit_bytes, int) else limit_bytes(gm.graph)
    chosen: Sequence[int] = range(len(stages))
    for consumers, level in itertools.pairwise(levels):
        due = chosen
        ahead = look_ahead * max(map(_hops, itertools.chain(*level)))
        chosen = choose_stages(sizes, released, due=due, look_ahead=ahead, limit_bytes=most)
        for stage, needed, swaps, following in zip(chosen, due, level, consumers, strict=True):
            for node in swaps:
                (anchors[stage] if stage < needed else following[0]).prepend(node)
    return gm


def _levels(stages: Sequence[list[fx.Node]]) -> list[list[list[fx.Node]]]:
    """Return the gathers of each stage, then the swaps before them, then the swaps before those."""
    levels = [list(stages)]
    while any(map(_swap_before, itertools.chain(*levels[-1]))):
        levels.append([[swap for node in nodes if (swap := _swap_before(node))] for nodes in levels[-1]])
    return levels


def _swap_before(node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    return source if isinstance(source, fx.Node) and source.target is ops.swap_in else None


def _hops(swap: fx.Node) -> int:
    src, dst = (Tier(word) for word in hop_of(swap))
    return 2 if not src.in_memory and dst == Tier.DEVICE else 1
