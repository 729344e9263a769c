"""Keep units gathered behind their last use in a forward, for its backward, where the plan says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.activations.carry_values import carry_values
from zinf_compile.passes.analysis.keepable_units import KeepableUnit, last_reader
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, mark_kept, parameters, positions


def keep_for_backward(
    gm: fx.GraphModule, *, backward: fx.GraphModule, own_outputs: int, units: Sequence[KeepableUnit]
) -> fx.GraphModule:
    """Let a forward save full units behind their last use, and give them to its backward, where `read_kept_units` uses them.

        before:  forward:   t = t(w);  a = mm(x, t);  return (a, x, w)
                 backward:  b = mm(g, w);  r = reduce_scatter(b, w);  return (r,)
        after:   forward:   t = t(w);  a = mm(x, t);  kept = keep_for_backward(w);  return (a, kept, x, w)
                 backward:  b = mm(g, w);  r = reduce_scatter(b, w);  return (r,)

    with the backward's new input `kept`. Runs right after the cut, on hollow parameters; `own_outputs` of the forward are the
    user's. Where both graphs only cast a unit to a narrower type, it is kept in that type. The hollow parameter is saved as
    before, so that a change of it between the two is found out as in eager PyTorch.
    """
    by_name = {node.name: node for node, _ in parameters(gm.graph)}
    kept = {_keep(gm.graph, by_name[unit.name], unit.dtype).name: unit.name for unit in units}
    carry_values(gm, backward=backward, own_outputs=own_outputs, values=kept)
    taken = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    for name, unit in kept.items():
        mark_kept(taken[name], taken[unit])
    return gm


def _keep(graph: fx.Graph, unit: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Keep a unit right behind its last reader in the forward."""
    last = last_reader(unit, positions(graph))
    assert last is not None, "a unit that may be kept is read"
    insert = NodeBuilder(graph, last, after=True)
    value = unit if dtype == fake_value(unit).dtype else insert(torch.ops.aten._to_copy.default, unit, dtype=dtype)
    return insert(ops.keep_for_backward, value, name="kept")
