"""Start each swap ahead of its gather."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.gather_stages import find_stages, stage_bytes
from zinf_compile.passes.graph.node_facts import Counts, counts_all, hop_of

from .prefetch import choose_stages


def prefetch_swaps(
    gm: fx.GraphModule, *, look_ahead: int, limit_bytes: int | Callable[[fx.Graph], int], counts: Counts = counts_all
) -> fx.GraphModule:
    """Start each hop of a shard to the device `look_ahead` stages ahead of the next hop.

        before:  s = swap_in(w0, "host", "device", 0);  g = all_gather(s, 0);  v = wait(g);  a = mm(x, v);  release(v)
                 t = swap_in(w1, "host", "device", 1);  h = all_gather(t, 1);  u = wait(h);  b = mm(a, u)
        after:   s = swap_in(w0, "host", "device", 0);  g = all_gather(s, 0);  t = swap_in(w1, "host", "device", 1);  v = wait(g)
                 a = mm(x, v);  release(v);  h = all_gather(t, 1);  u = wait(h);  b = mm(a, u)

    Note: the pipeline of hops
        A stage begins with adjacent gathers, which `prefetch` put one stage ahead of their use. So while one group is in use, the
        next is gathered, the one after is copied to the device, and a third is read from the drive. A read that ends on the
        device covers two hops, so it starts twice as far ahead.

    The first stage's swaps stay at the graph's start. A later swap starts early only as far as bytes swapped in or gathered, and
    not yet released, stay within `limit_bytes`, a number or a function of the graph; `counts` says which units take memory. No
    gather moves and no order changes, so the collectives are the same for every placement.
    """
    stages, released = find_stages(gm.graph, counts=counts)
    anchors = [gathers[-1].next for gathers in stages]
    sizes = [stage_bytes(gathers, counts) for gathers in stages]
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
