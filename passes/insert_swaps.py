"""Bring the shards of units that live off the device in front of their gathers, and take reduced gradients away."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from zinf_compile import ops

from .facts import group_of


def insert_swaps(gm: fx.GraphModule, *, params: Sequence[str], grads: Sequence[str]) -> fx.GraphModule:
    """Insert a swap_in for each hop of a shard's way to the device, and a swap_out for each hop of a gradient's way from it.

        before:  g = all_gather(w, 0);  v = wait(g);  a = mm(x, v);  ...;  r = reduce_scatter(d, w)
        after:   s = swap_in(w, "nvme", "host", 0);  t = swap_in(s, "host", "device", 0);  g = all_gather(t, 0);  v = wait(g)
                 a = mm(x, v);  ...;  r = reduce_scatter(d, w)
                 o = swap_out(r, "device", "host");  q = swap_out(o, "host", "nvme")

    `params` and `grads` are the tiers on the way, such as ("nvme", "host", "device"); with fewer than two nothing moves. Each
    rank moves its own shard alone. Where a device is host memory there is one hop, ("nvme", "device"). Members of a group move
    together; gathers that stand together stay so, behind all their swaps.
    """
    for run in _runs(gm.graph):
        for src, dst in itertools.pairwise(params):
            for gather in run:
                with gm.graph.inserting_before(run[0]):
                    source = gather.args[0]
                    name = "read" if src == "nvme" else "copied"
                    handle = gm.graph.create_node("call_function", ops.swap_in, (source, src, dst, group_of(gather)), name=name)
                handle.meta["val"] = source.meta["val"]  # type: ignore[union-attr]
                gather.args = (handle, *gather.args[1:])
    for reduction in [node for node in gm.graph.nodes if node.target is ops.reduce_scatter]:
        _take_away(gm.graph, reduction, grads)
    return gm


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the gathers, those that stand together together."""
    runs: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.target is ops.all_gather:
            if not runs or node.prev is not runs[-1][-1]:
                runs.append([])
            runs[-1].append(node)
    return runs


def _take_away(graph: fx.Graph, reduction: fx.Node, tiers: Sequence[str]) -> None:
    last = reduction
    place = reduction
    while place.next.target is ops.reduce_scatter and group_of(place.next) == group_of(reduction) != ops.LONE_GROUP:
        place = place.next  # a group's members stand together
    while place.next.target is ops.swap_out:
        place = place.next
    for src, dst in itertools.pairwise(tiers):
        with graph.inserting_after(place):
            away = graph.create_node("call_function", ops.swap_out, (last, src, dst), name="away")
        away.meta["val"] = last.meta["val"]
        last.replace_all_uses_with(away, delete_user_cb=lambda user, away=away: user is not away)  # type: ignore[misc]
        last = place = away
