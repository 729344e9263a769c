"""Keep views and casts of gathered weights out of the values that the forward saves for the backward."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.ir import ops
from zinf_compile.passes.graph.alias import aliased_inputs, derived_from
from zinf_compile.passes.graph.node_facts import parameters, recompute


def recompute_unit_views(gm: fx.GraphModule) -> fx.GraphModule:
    """Mark views and casts of parameters must-recompute and their consumers must-save, on a joint graph.

        before:  t = t(w);                    a = addmm(b, x, t)
        after:   t = t(w) [must_recompute];   a = addmm(b, x, t) [must_save]

    A saved view would keep the gathered weight alive until the backward. With these marks the partitioner saves the hollow
    parameter and recomputes the view. Marks of `torch.utils.checkpoint` stay.

    Note: must-save consumers keep ranks in agreement
        Recomputation stops at the consumers, whatever the shapes. Without their marks the min-cut would decide from activation
        sizes whether the backward gathers a parameter again, and ranks with other batch shapes would gather other units.
    """
    roots = [node for node, _ in parameters(gm.graph)]
    tiles = [node for node in gm.graph.nodes if node.target is ops.tile]
    roots += tiles
    derived = derived_from(roots)
    for node in (*derived, *tiles):
        recompute(node)
    for source in (*roots, *derived):
        for user in source.users:
            if (
                user.op == "call_function"
                and user not in derived
                and user.target is not ops.tile
                and "recompute" not in user.meta
                and _may_be_saved(user)
            ):
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return gm


def _may_be_saved(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and not aliased_inputs(node)
