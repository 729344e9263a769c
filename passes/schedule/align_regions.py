"""Move transfers to the boundaries of regions, so that each region's compute is compiled as one."""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.analysis.blocks import block_of, choose_regions
from zinf_compile.passes.graph.alias import is_view
from zinf_compile.passes.graph.node_facts import mark_region, slot_behind, wire_bytes

_AT_START = frozenset({ops.all_gather, ops.wait})
_AT_END = frozenset({ops.release, ops.reduce_scatter, ops.keep_for_backward})
_NO_COMPUTE = frozenset({ops.random_state, ops.copy_value})


def align_regions(gm: fx.GraphModule, *, region_bytes: int) -> fx.GraphModule:
    """Move gathers and waits to the start of their region, releases and reduce-scatters to its end.

        before:  g = all_gather(h.0.up);  v = wait(g);  a = mm(x, v);  release(v)
                 k = all_gather(h.0.down);  u = wait(k);  b = mm(a, u);  release(u)
        after:   g = all_gather(h.0.up);  k = all_gather(h.0.down);  v = wait(g);  u = wait(k)
                 a = mm(x, v);  b = mm(a, u);  release(v);  release(u)

    A region is the compute that uses one block of the model (`h.0`), or a part of a block whose units exceed `region_bytes`.
    Equal blocks become equal regions, which compile once. Regions follow from names, order and sizes of units and
    from `region_bytes`, never from tiers or batch shapes, so every placement computes the same bits. Where compute comes back to
    a block whose units are still gathered, a region begins as well: each passage through a block can run again by itself. A
    region also ends after `region_bytes` of gradients of tiles, so that no more of them are live at once.
    """
    graph = gm.graph
    waits = [node for node in graph.nodes if node.target is ops.wait]
    starts = {waits[index] for index in choose_regions([slot_behind(node) for node in waits], region_bytes=region_bytes)[1:]}
    starts |= _returns(graph, {*waits[:1], *starts})
    regions: list[list[fx.Node]] = [[]]
    pending: list[fx.Node] = []  # gathers move with the next wait
    reduced = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node in starts or (reduced >= region_bytes and node.target is not ops.reduce_scatter):
            if not all(map(is_view, regions[-1])):  # a region of views alone joins the one that reads them
                regions.append([])
            reduced = 0
        if node.target is ops.all_gather:
            pending.append(node)
            continue
        regions[-1] += [*pending, node]
        pending = []
        if node.target is ops.reduce_scatter and slot_behind(node).tile is not None:
            reduced += wire_bytes(node)
    for region in regions:
        _align(region)
    return gm


def _returns(graph: fx.Graph, firsts: Set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that come back to a block: they read the unit of its region that is used first, after other units.

    And what follows reads others once more, too: a backward that computes its block's forward itself reads that unit last.
    `firsts`: the waits for these units.
    """
    found, before = set[fx.Node](), set[fx.Node]()
    region = maybe = None  # the wait that compute's region begins with; what may come back
    others = passing = False
    for node in graph.nodes:
        if node in firsts:
            region, maybe, others, passing = node, None, False, False
        if node.op != "call_function" or node.target in SCHEDULE_OPS:
            continue
        reads = [read for read in node.all_input_nodes if read.target is ops.wait]
        if maybe is not None and any(read in before and read is not region for read in reads):
            found.add(maybe)
            maybe, passing = None, True
        for read in reads:
            if read in firsts & before and block_of(slot_behind(read).name) and (read is not region or others):
                if passing and read is not region:
                    found.add(node)
                else:
                    maybe = node
                region, others = read, False
        others |= any(read is not region for read in reads)
        before.update(reads)
    return found


def _align(region: list[fx.Node]) -> None:
    compute = [node for node in region if node.target not in _AT_START | _AT_END | _NO_COMPUTE]
    if not compute:
        return
    mark_region(next((node for node in compute if node.op == "call_function"), compute[0]))
    for kind in (ops.all_gather, ops.wait):
        for node in region:
            if node.target is kind:
                compute[0].prepend(node)
    end = compute[-1]
    for node in region:
        if node.target in _AT_END:
            end.append(node)
            end = node
