"""Accumulate products in the memory of their sum."""

from __future__ import annotations

import torch
from torch import fx

from zinf_compile.passes.graph.node_facts import fake_value

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {aten.mm.default, aten.bmm.default} | {aten.addmm.default, aten.baddbmm.default, aten.addmm_.default, aten.baddbmm_.default}
)
_IN_PLACE = {aten.addmm.default: aten.addmm_.default, aten.baddbmm.default: aten.baddbmm_.default}


def accumulate_in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace `addmm` and `baddbmm` by their in-place forms where nothing else reads the sum so far.

        before:  a = mm(x, w_tile_0);  b = addmm(a, y, w_tile_1)
        after:   a = mm(x, w_tile_0);  b = addmm_(a, y, w_tile_1)

    A layer's input gradient is such a sum over the tiles of its weight, and `addmm` would copy it for each tile. The bits are
    the same.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _IN_PLACE and _is_last_use(node):
            node.target = _IN_PLACE[node.target]
    return gm


def _is_last_use(node: fx.Node) -> bool:
    """Return whether the sum so far is a product with no other user, in the layout and type of the result."""
    total = node.args[0]
    if not isinstance(total, fx.Node) or total.target not in _PRODUCTS or list(total.users) != [node]:
        return False
    if any(other is total for other in node.args[1:]):
        return False
    before, after = fake_value(total), fake_value(node)
    return (before.shape, before.dtype, before.stride()) == (after.shape, after.dtype, after.stride())
