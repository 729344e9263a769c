"""Gather a parameter in the narrower data type of its uses."""

from __future__ import annotations

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.node_facts import fake_value, set_type, set_wire_type
from zinf_compile.passes.graph.unit_casts import UnitUses, find_unit_uses, narrower_type


def narrow_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """Gather a unit in the data type to which all its uses cast it: under autocast, half the bytes.

        before:  g = all_gather(w);  v = wait(g);  c = _to_copy(v, dtype=torch.bfloat16);  t = t(c);  a = mm(x, t)
        after:   g = all_gather(w, dtype=torch.bfloat16);  v = wait(g);  t = t(v);  a = mm(x, t)

    A cast is element-wise, so casting shards before the gather gives the same bits as casting the unit after it. Each gather is
    decided alone, from the data types of its uses and never from shapes or strides, so ranks with other batch shapes agree. A
    view whose strides differ from its cast's (a slice) keeps the cast, which then only copies.
    """
    for full in [node for node in gm.graph.nodes if node.target is ops.wait]:
        uses = find_unit_uses(full)
        dtype = narrower_type(fake_value(full).dtype, uses.casts)
        if dtype is not None and not uses.others:
            _narrow(gm.graph, full, uses, dtype)
    return gm


def _narrow(graph: fx.Graph, full: fx.Node, uses: UnitUses, dtype: torch.dtype) -> None:
    handle = full.args[0]
    assert isinstance(handle, fx.Node)
    for cast in uses.casts:
        source = cast.args[0]
        assert isinstance(source, fx.Node)
        if cast.kwargs.keys() <= {"dtype"} and _has_layout_of(full, source, cast):
            cast.replace_all_uses_with(source)
            graph.erase_node(cast)
    set_wire_type(handle, dtype)
    for node in (handle, full, *uses.views):
        set_type(node, dtype)


def _has_layout_of(full: fx.Node, view: fx.Node, cast: fx.Node) -> bool:
    """Return whether a view has the unit's storage offset and its cast's strides; False where one of them is dynamic."""
    start, found, wanted = (fake_value(node) for node in (full, view, cast))
    layout = (*found.stride(), found.storage_offset())
    expected = (*wanted.stride(), start.storage_offset())
    return all(isinstance(number, int) for number in (*layout, *expected)) and layout == expected
