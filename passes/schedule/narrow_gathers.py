"""Gather a parameter in the narrower data type of its uses."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import is_narrower
from zinf_compile.passes.graph.alias import METADATA_OPS, aliased_inputs, is_cast, is_view
from zinf_compile.passes.graph.node_facts import data_types, fake_value, set_type, set_wire_type

WIRE_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Data types that a gather may be narrowed to: those that every transport supports."""


def narrow_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """Gather a unit in the data type to which all its uses cast it: under autocast, half the bytes.

        before:  g = all_gather(w);  v = wait(g);  c = _to_copy(v, dtype=torch.bfloat16);  t = t(c);  a = mm(x, t)
        after:   g = all_gather(w, dtype=torch.bfloat16);  v = wait(g);  t = t(v);  a = mm(x, t)

    A cast is element-wise, so casting shards before the gather gives the same bits as casting the unit after it. Each gather is
    decided alone, from the data types of its uses and never from shapes or strides, so ranks with other batch shapes agree. A
    view whose strides differ from its cast's (a slice) keeps the cast, which then only copies.
    """
    for full in [node for node in gm.graph.nodes if node.target is ops.wait]:
        views, casts, others = _uses(full)
        dtype = choose_type(fake_value(full).dtype, {fake_value(cast).dtype for cast in casts})
        if dtype is not None and not others:
            _narrow(gm.graph, full, views, casts, dtype)
    return gm


def choose_type(held: torch.dtype, used: Set[torch.dtype]) -> torch.dtype | None:
    """Return the data type in which to gather a unit that is only cast to `used`; None for its own."""
    if len(used) != 1:
        return None
    (dtype,) = used
    narrower = dtype in WIRE_TYPES and held.is_floating_point and is_narrower(dtype, held)
    return dtype if narrower else None


def _uses(full: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Return the views of a unit, the casts of it or of its views, and its other readers."""
    views: dict[fx.Node, None] = {}
    casts: dict[fx.Node, None] = {}
    others: dict[fx.Node, None] = {}
    stack = [full]
    while stack:
        source = stack.pop()
        for user in source.users:
            if is_cast(user):
                casts[user] = None
            elif is_view(user) and source in aliased_inputs(user) and data_types(user) == data_types(full):
                if user not in views:
                    views[user] = None
                    stack.append(user)
            elif user.target not in METADATA_OPS:
                others[user] = None
    return list(views), list(casts), list(others)


def _narrow(graph: fx.Graph, full: fx.Node, views: list[fx.Node], casts: list[fx.Node], dtype: torch.dtype) -> None:
    handle = full.args[0]
    assert isinstance(handle, fx.Node)
    for cast in casts:
        source = cast.args[0]
        assert isinstance(source, fx.Node)
        if cast.kwargs.keys() <= {"dtype"} and _has_layout_of(full, source, cast):
            cast.replace_all_uses_with(source)
            graph.erase_node(cast)
    set_wire_type(handle, dtype)
    for node in (handle, full, *views):
        set_type(node, dtype)


def _has_layout_of(full: fx.Node, view: fx.Node, cast: fx.Node) -> bool:
    """Return whether a view has the unit's storage offset and its cast's strides; False where one of them is dynamic."""
    start, found, wanted = (fake_value(node) for node in (full, view, cast))
    layout = (*found.stride(), found.storage_offset())
    expected = (*wanted.stride(), start.storage_offset())
    return all(isinstance(number, int) for number in (*layout, *expected)) and layout == expected
