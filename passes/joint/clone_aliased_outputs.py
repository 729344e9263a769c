"""Clone outputs that share memory with a partitioned parameter. The backend calls it at capture, outside the pipeline."""

from __future__ import annotations

import torch
from torch import fx


def clone_aliased_outputs(gm: fx.GraphModule, parameter_inputs: set[fx.Node]) -> fx.GraphModule:
    """Return a clone wherever a captured graph returns a parameter or a view of one.

        before:  y = relu(x);  v = detach(w);                  return (y, v)
        after:   y = relu(x);  v = detach(w);  c = clone(v);   return (y, c)

    Runs on the graph that Dynamo captured, before AOTAutograd, which would rebuild an output that aliases an input as a view of
    that input after the call: a view of a hollow parameter. Aliases are read from the storages of the traced values.
    """
    storages = {_storage(node) for node in parameter_inputs} - {None}
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    clones: dict[fx.Node, fx.Node] = {}
    for node in output.all_input_nodes:
        if _storage(node) not in storages:
            continue
        with gm.graph.inserting_before(output):
            clones[node] = gm.graph.call_function(torch.clone, (node,))
        clones[node].meta.update(node.meta)
    output.args = fx.map_arg(output.args, lambda node: clones.get(node, node))
    gm.recompile()
    return gm


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout == torch.strided else None
