"""Swap shards in to the device in front of their gathers, and swap reduced gradients out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.gather_stages import find_stages
from zinf_compile.passes.graph.node_facts import group_of, slot_behind


def insert_swaps(gm: fx.GraphModule, *, params: Sequence[str], grads: Sequence[str]) -> fx.GraphModule:
    """Insert a swap_in per hop of a shard to the device, and a swap_out per hop of a reduced gradient from it.

        before:  g = all_gather(w, 0);  v = wait(g);  a = mm(x, v);  release(v);  r = reduce_scatter(a, w);  return (r,)
        after:   s = swap_in(w, "nvme", "host", 0);  t = swap_in(s, "host", "device", 0);  g = all_gather(t, 0);  v = wait(g)
                 a = mm(x, v);  release(v);  r = reduce_scatter(a, w);  o = swap_out(r, "device", "host")
                 q = swap_out(o, "host", "nvme");  return (q,)

    `params` and `grads` list the tiers of the path, such as ("nvme", "host", "device"); with fewer than two nothing moves. A
    device that is host memory has one hop, ("nvme", "device"). Each rank moves its own shard alone. Units without dimensions or
    elements stay on the device.

    Swaps of a group are issued together, in front of the gathers they are for; adjacent gathers stay adjacent. `gather_rows`
    fetches rows from the first tier itself. Runs after all passes that move collectives, so the collectives are the same for
    every placement.
    """
    for run in find_stages(gm.graph)[0]:
        for src, dst in itertools.pairwise(params):
            for gather in filter(_can_offload, run):
                source = gather.args[0]
                assert isinstance(source, fx.Node)
                name = "copied" if Tier(src).in_memory else "read"
                with gm.graph.inserting_before(run[0]):
                    handle = gm.graph.create_node("call_function", ops.swap_in, (source, src, dst, group_of(gather)), name=name)
                handle.meta["val"] = source.meta["val"]
                gather.args = (handle, *gather.args[1:])
    for node in gm.graph.nodes:
        if node.target is ops.gather_rows and params and _can_offload(node):
            node.args = (*node.args[:2], params[0])
    for reduction in [node for node in gm.graph.nodes if node.target is ops.reduce_scatter and _can_offload(node)]:
        _offload(gm.graph, reduction, grads)
    return gm


def _can_offload(node: fx.Node) -> bool:
    unit = slot_behind(node)
    return bool(unit.shape and unit.numel)


def _offload(graph: fx.Graph, reduction: fx.Node, tiers: Sequence[str]) -> None:
    last = reduction
    place = reduction
    while place.next.target is ops.reduce_scatter and group_of(place.next) == group_of(reduction) != LONE_GROUP:
        place = place.next  # members of a group are adjacent
    while place.next.target is ops.swap_out:
        place = place.next
    for src, dst in itertools.pairwise(tiers):
        with graph.inserting_after(place):
            offloaded = graph.create_node("call_function", ops.swap_out, (last, src, dst), name="offloaded")
        offloaded.meta["val"] = last.meta["val"]
        last.replace_all_uses_with(offloaded, delete_user_cb=lambda user, offloaded=offloaded: user is not offloaded)  # type: ignore[misc]
        last = place = offloaded
