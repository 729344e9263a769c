"""Swap shards in to the device in front of their gathers, and swap reduced gradients out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.gather_stages import find_stages
from zinf_compile.passes.graph.node_facts import group_of, slot_behind

Path = Sequence[str] | Callable[[ParameterSlot], Sequence[str]]
"""The tiers that a shard passes, both ends included: the same for all parameters, or a function of each. Fewer than two: none."""


def insert_swaps(gm: fx.GraphModule, *, params: Path, grads: Path) -> fx.GraphModule:
    """Insert a swap_in per hop of a shard to the device, and a swap_out per hop of a reduced gradient from it.

        before:  g = all_gather(w, 0);  v = wait(g);  a = mm(x, v);  release(v);  r = reduce_scatter(a, w);  return (r,)
        after:   s = swap_in(w, "nvme", "host", 0);  t = swap_in(s, "host", "device", 0);  g = all_gather(t, 0);  v = wait(g)
                 a = mm(x, v);  release(v);  r = reduce_scatter(a, w);  o = swap_out(r, "device", "host")
                 q = swap_out(o, "host", "nvme");  return (q,)

    `params` and `grads` list the tiers of the path, such as ("nvme", "host", "device"); with fewer than two nothing moves. A
    device that is host memory has one hop, ("nvme", "device"). Units may differ, each rank moves its own shard alone, and units
    without dimensions or elements stay on the device.

    Swaps of a group are issued together, in front of the gathers they are for; adjacent gathers stay adjacent. `gather_rows`
    fetches rows from the first tier itself. Runs after all passes that move collectives, so the collectives are the same for
    every placement.
    """
    for run in find_stages(gm.graph)[0]:
        paths = {gather: _path_of(gather, params) for gather in run}
        for hop in _hops(paths.values()):
            src, dst = hop
            for gather in (gather for gather in run if hop in itertools.pairwise(paths[gather])):
                source = gather.args[0]
                assert isinstance(source, fx.Node)
                name = "copied" if Tier(src).in_memory else "read"
                with gm.graph.inserting_before(run[0]):
                    handle = gm.graph.create_node("call_function", ops.swap_in, (source, src, dst, group_of(gather)), name=name)
                handle.meta["val"] = source.meta["val"]
                gather.args = (handle, *gather.args[1:])
    for node in gm.graph.nodes:
        if node.target is ops.gather_rows and (path := _path_of(node, params)):
            node.args = (*node.args[:2], path[0])
    for reduction in [node for node in gm.graph.nodes if node.target is ops.reduce_scatter]:
        _offload(gm.graph, reduction, _path_of(reduction, grads))
    return gm


def _path_of(node: fx.Node, path: Path) -> Sequence[str]:
    unit = slot_behind(node)
    if not (unit.shape and unit.numel):
        return ()
    return path(unit) if callable(path) else path


def _hops(paths: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Return the hops of some paths, each once, the farthest first."""
    found = dict.fromkeys(hop for path in paths for hop in itertools.pairwise(path))
    return sorted(found, key=lambda hop: -Tier(hop[0]).distance)


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
